"""Curvature of losses in the network's output against ``torch.func.hessian`` of the whole batch's loss in float64."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Margins, row
from checks import Calls, generator
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.core.losses.known import find_terms
from curvopt.core.losses.roots import LossCurvature, Softmax, draw
from curvopt.errors import CurvoptWarning
from curvopt.extensions import GGNMP, KFLR, DiagGGNExact, DiagHessian, KFACEmpirical


def curvature(module: nn.Module, z: Tensor, *target: Tensor) -> LossCurvature:
    """As in a backward: gradients are only enabled if ``z`` is to be differentiated again."""
    enabled, z = z.requires_grad, z if z.requires_grad else z.detach().requires_grad_()
    head = 1 * z
    value = module(head, *target)
    terms = find_terms([(value.grad_fn, 0)], {head.grad_fn})
    (loss,) = terms.known
    with torch.set_grad_enabled(enabled):
        terms.receive([torch.ones_like(value)])
        return loss.curvature()


def dense(columns: Tensor) -> Tensor:
    """The matrix ``sum_v s s^T`` with a block for each sample, ``[z.numel(), z.numel()]``."""
    return torch.block_diag(*(s.T @ s for s in columns.reshape(*columns.shape[:2], -1).unbind(1)))


def hessian(module: nn.Module, z: Tensor, *target: Tensor) -> Tensor:
    return torch.func.hessian(lambda z: module(z, *target))(z.detach()).reshape(z.numel(), z.numel())


W = row(0.5, 2.0, 1.3)
LOSSES = {case.name: case for case in CASES if case.name.startswith(("mse-", "ce-", "bce-")) or "squeezed" in case.name}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"weight": W}, {"label_smoothing": 0.2}], ids=str)
def test_targets_that_are_all_ignored_leave_no_curvature(options: dict, reduction: str):
    z = torch.randn(4, 3, dtype=torch.float64)
    curved = curvature(nn.CrossEntropyLoss(**options, reduction=reduction), z, torch.full((4,), -100))
    assert curved.weights is not None and not curved.weights.any()
    assert not curved.root(0, curved.columns).any() and not curved.sample(2, None).any()


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A loss, the output of a model and targets."""
    of = LOSSES[name].problem()
    return of.lossfunc, of.model(of.x).detach(), of.y


@pytest.mark.parametrize("name", LOSSES)
def test_root_is_a_root_of_the_hessian(name: str):
    module, z, y = problem(name)
    curved, H = curvature(module, z, y), hessian(module, z, y)
    assert H.abs().max() > 0
    for root in (curved, curved.by_entries()):
        whole = root.root(0, root.columns)
        assert whole.shape == (root.columns, *z.shape)
        assert_close(dense(whole), H)
        split = root.columns // 2
        assert_close(torch.cat([root.root(0, split), root.root(split, root.columns)]), whole)
        if z.dim() == 2:
            assert_close(root.moment, torch.einsum("vnc,vnd->cd", whole, whole))


def test_softmax_has_no_more_columns_than_rank():
    z, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.randint(3, (2, 3))
    curved = curvature(nn.CrossEntropyLoss(), z, y)
    rank = int(torch.linalg.matrix_rank(hessian(nn.CrossEntropyLoss(), z, y)))
    assert (curved.columns, curved.by_entries().columns) == (rank / len(z), z[0].numel())


def test_a_single_class_has_no_curvature():
    net = extend(nn.Linear(2, 1))
    with backpack(DiagGGNExact(), KFLR(), GGNMP()):
        F.cross_entropy(net(torch.randn(3, 2)), torch.zeros(3, dtype=torch.long)).backward()
    for p in net.parameters():
        assert_close(
            [p.diag_ggn_exact, p.kflr[0], p.ggnmp(torch.ones(1, *p.shape))[0]],
            [torch.zeros_like(p), torch.zeros(1, 1), torch.zeros_like(p)],
        )


@pytest.mark.parametrize("sure", [0.0, 20.0, 60.0])
def test_root_of_a_softmax_keeps_small_curvatures(sure: float):
    z = sure * torch.eye(4, dtype=torch.float64)[[0, 2, 3]] - torch.tensor([0.0, 1, 3, 7])
    curved = curvature(nn.CrossEntropyLoss(), z.float(), torch.randint(3, (3,)))
    diagonal = curved.root(0, curved.columns).square().sum(0).double()
    p = z.softmax(1)
    others = p @ (1 - torch.eye(4, dtype=torch.float64))
    assert_close(diagonal, p * others / 3, rtol=1e-5, atol=0)
    assert_close(curved.moment.diagonal().double(), (p * others / 3).sum(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_samples_average_to_the_hessian(name: str):
    module, z, y = problem(name)
    curved, H = curvature(module, z, y), hessian(module, z, y)
    number = 20_000
    s = curved.sample(number, generator(1)).flatten(1)
    products = s.unsqueeze(2) * s.unsqueeze(1)
    error = products.std(0) / number**0.5
    assert ((products.mean(0) - H).abs() <= 6 * error + 1e-12).all()
    assert error.max() < 0.1 * H.abs().max()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_softmax_takes_its_classes_from_any_axis(dim: int):
    z, y = torch.randn(2, 3, 4, 2, dtype=torch.float64), torch.randint(2, (2, 2, 2))
    first = curvature(nn.CrossEntropyLoss(), z[:, :, :2], y)
    moved = Softmax(first.p.movedim(1, dim), first.mass.squeeze(1), dim)
    assert_close(moved.root(1, 7), first.root(1, 7).movedim(2, dim + 1))
    samples = [c.sample(3, generator(0)) for c in (moved, first)]
    assert_close(samples[0], samples[1].movedim(2, dim + 1))


def test_labels_are_drawn_as_often_as_they_are_probable():
    p = torch.tensor([[0, 0.25, 0, 0.75, 0], [1, 0, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    labels = draw(p, 200_000, generator(0))
    counts = torch.stack([row.bincount(minlength=5) for row in labels])
    assert (counts[p == 0] == 0).all()
    assert ((counts / 200_000 - p).abs() <= 5 * (p * (1 - p) / 200_000).sqrt()).all()
    even = draw(torch.full((50_000,), 1 / 50_000), 200_000, generator(0))
    assert (torch.histc(even.float(), 10) / 20_000 - 1).abs().max() < 0.05


@pytest.mark.parametrize("module", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()])
def test_a_network_that_diverged_has_columns_of_nan(module: nn.Module):
    z = torch.full((2, 3), torch.nan, dtype=torch.float64)
    curved = curvature(
        module, z, torch.randint(3, (2,)) if isinstance(module, nn.CrossEntropyLoss) else torch.rand(2, 3)
    )
    assert curved.sample(2, None).isnan().all()


def test_a_chunk_of_columns_needs_the_memory_of_the_chunk():
    """No square matrix over the entries of a sample: for 4096 of them it would hold 16.8M numbers."""
    z = torch.randn(2, 4096)
    for module, y in [(nn.MSELoss(), torch.randn(2, 4096)), (nn.BCEWithLogitsLoss(), torch.rand(2, 4096))]:
        curved = curvature(module, z, y)
        with Calls() as calls:
            curved.root(10, 12)
        assert calls.largest() == 2 * z.numel()
    curved = curvature(nn.CrossEntropyLoss(), z.view(2, 4, 1024), torch.randint(3, (2, 1024)))
    with Calls() as calls:
        curved.root(10, 12)
    assert calls.largest() == 2 * z.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["ce-smoothed-weight-ignored", "ce-probabilities-weight", "bce-weights-soft", "mse-mean"]
)
def test_lower_precision(name: str, dtype: torch.dtype):
    """The root is computed in float32, from what the forward pass has saved in its own precision."""
    module, z, y = problem(name)
    low = z.to(dtype)
    module = copy.deepcopy(module).to(dtype)
    curved = curvature(module, low, y.to(dtype) if y.is_floating_point() else y)
    root = curved.root(0, curved.columns)
    assert root.dtype == torch.float32
    y = y.to(dtype).double() if y.is_floating_point() else y
    H, rounding = hessian(module.double(), low.double(), y), 2 * torch.finfo(dtype).eps
    assert_close(dense(root.double()), H, atol=float(rounding * H.abs().max()), rtol=max(rounding, 1e-4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extension", [KFLR, KFACEmpirical, DiagHessian])
@pytest.mark.parametrize("lossfunc", [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), nn.HuberLoss()])
def test_weights_and_targets_in_lower_precision(lossfunc: nn.Module, extension: type, dtype: torch.dtype):
    y = torch.tensor([0, 2, 1, 1]) if isinstance(lossfunc, nn.CrossEntropyLoss) else torch.rand(4, 3).bfloat16()
    base, x, found = nn.Linear(5, 3).bfloat16(), torch.randn(4, 5).bfloat16(), []
    for precision in (dtype, torch.float64):
        model, loss = (extend(copy.deepcopy(part).to(precision), loss=part is lossfunc) for part in (base, lossfunc))
        with backpack(extension()):
            loss(model(x.to(precision)), y.to(precision) if y.is_floating_point() else y).backward()
        value = getattr(model.weight, extension().field)
        found.append([each.double() for each in (value if isinstance(value, list) else [value])])
    for half, full in zip(*found, strict=True):
        assert (half - full).norm() < 0.03 * full.norm()


@pytest.mark.parametrize("name", ["ce-smoothed-weight", "bce-weights-of-samples"])
def test_root_can_be_differentiated(name: str):
    module, z, y = problem(name)
    curved = curvature(module, z.requires_grad_(), y)
    (found,) = torch.autograd.grad(curved.root(0, curved.columns).pow(2).sum(), z, allow_unused=True)
    z = z.detach().requires_grad_()
    trace = torch.autograd.functional.hessian(lambda z: module(z, y), z, create_graph=True).reshape(12, 12).trace()
    (expected,) = torch.autograd.grad(trace, z)
    assert found.isfinite().all()
    assert_close(found, expected)


@pytest.mark.parametrize("lossfunc", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()], ids=str)
def test_root_can_be_differentiated_where_probabilities_vanish(lossfunc: nn.Module):
    z = torch.tensor([[0.0, 1.0, -300.0], [300.0, 1.0, -torch.inf]], requires_grad=True)
    curved = curvature(lossfunc, z, torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3))
    for each in (curved, curved.by_entries()):
        (gradient,) = torch.autograd.grad(each.root(0, each.columns).pow(4).sum(), z, retain_graph=True)
        assert gradient.isfinite().all() and gradient[0, 1] != 0 and gradient[0, 2] == gradient[1, 2] == 0


def test_linear_loss_warns():
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    model = extend(nn.Linear(3, 3))
    with pytest.warns(CurvoptWarning, match="kflr: the loss.* is linear.*GGN is zero"), backpack(KFLR()):
        extend(nn.L1Loss())(model(x), y).backward()
    assert not model.weight.kflr[0].any()
    with warnings.catch_warnings(), backpack(KFLR()):
        warnings.simplefilter("error")
        extend(nn.HuberLoss())(model(x), y).backward()


@pytest.mark.parametrize("by_entries", [True, False])
@pytest.mark.filterwarnings("ignore:.*linear in the network's output")
def test_weight_of_a_loss_is_the_same_where_it_is_flat(by_entries: bool):
    model, y = extend(nn.Linear(4, 4, bias=False)), torch.arange(8) % 4
    x = F.one_hot(y, 4).float()
    for factor, curved in ((-10.0, True), (10.0, False)):
        with torch.no_grad():
            model.weight.copy_(factor * (2 * torch.eye(4) - 1))
        with backpack(KFLR()) as context:
            Margins(by_entries)(model(x), y).backward()
        assert context.loss_weight == 1 and bool(model.weight.kflr[0].any()) == curved
