"""Curvature of losses in the network's output against ``torch.func.hessian`` of the whole batch's loss in float64."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import Margins
from checks import generator
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.testing import assert_close

from curvopt import CurvoptError, backpack, extend
from curvopt.core.losses.any import GenericLoss, Head
from curvopt.core.losses.known import find_terms
from curvopt.core.losses.roots import LossCurvature, Softmax, draw
from curvopt.errors import CurvoptWarning
from curvopt.extensions import GGNMP, KFLR, BatchGrad, DiagGGNExact, DiagGGNMC, DiagHessian, KFACEmpirical


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


def generic(module: nn.Module, z: Tensor, *target: Tensor) -> GenericLoss:
    head = 1 * z.detach().requires_grad_()
    value = module(head, *target)
    edge = get_gradient_edge(value)
    return GenericLoss([edge], [torch.ones_like(value)], [Head(get_gradient_edge(head), len(z))], len(z))


def dense(columns: Tensor) -> Tensor:
    """The matrix ``sum_v s s^T`` with a block for each sample, ``[z.numel(), z.numel()]``."""
    return torch.block_diag(*(s.T @ s for s in columns.reshape(*columns.shape[:2], -1).unbind(1)))


def hessian(module: nn.Module, z: Tensor, *target: Tensor) -> Tensor:
    return torch.func.hessian(lambda z: module(z, *target))(z.detach()).reshape(z.numel(), z.numel())


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def labels(*shape: int) -> Tensor:
    return torch.randint(3, shape)


def some_ignored(*shape: int) -> Tensor:
    y = labels(*shape)
    y.view(-1)[::3] = -100
    return y


def masses(*shape: int) -> Tensor:
    """Probability targets that do not sum to one."""
    return torch.rand(shape, dtype=torch.float64)


def signs(z: Tensor) -> Tensor:
    return torch.randn_like(z).sign()


W = row(0.5, 2.0, 1.3)
CROSS_ENTROPY = {
    f"ce-{options}-{shape}-{kind.__name__}": (
        lambda reduction, given=given: nn.CrossEntropyLoss(**given, reduction=reduction),
        shape,
        lambda shape, kind=kind: kind(*(shape if kind is masses else (shape[0], *shape[2:]))),
    )
    for options, given in {
        "plain": {},
        "weight": {"weight": W},
        "smooth": {"label_smoothing": 0.2},
        "all": {"weight": W, "label_smoothing": 0.2, "ignore_index": 2},
    }.items()
    for shape in [(4, 3), (3, 3, 2), (2, 3, 2, 2)]
    for kind in [labels, some_ignored, masses]
    if not (kind is some_ignored and "ignore_index" in given) and not (kind is masses and "ignore_index" in given)
}
BCE = {
    f"bce-{options}-{shape}": (
        lambda reduction, given=given: nn.BCEWithLogitsLoss(**given, reduction=reduction),
        shape,
        lambda shape: torch.rand(shape, dtype=torch.float64),
    )
    for shape in [(4, 3), (2, 2, 3), (2, 2, 2, 3), (3,)]
    for options, given in {
        "plain": {},
        "weight": {"weight": W},
        "pos_weight": {"pos_weight": W},
        "pos_weight_scalar": {"pos_weight": row(2.0)},
        "both": {"weight": torch.tensor(0.3), "pos_weight": W},
        "weights_of_samples": {"weight": torch.linspace(0, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))},
    }.items()
}
MSE = {
    f"mse-{shape}-{target}": (
        lambda reduction: nn.MSELoss(reduction=reduction),
        shape,
        lambda _, target=target: torch.randn(target, dtype=torch.float64),
    )
    for shape, target in [
        ((4, 3), (4, 3)),
        ((4,), (4,)),
        ((1,), (1,)),
        ((2, 3, 2), (2, 3, 2)),
        ((4, 3), (3,)),  # broadcasting, of which PyTorch warns
    ]
}
EVERY = CROSS_ENTROPY | BCE | MSE


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"weight": W}, {"label_smoothing": 0.2}], ids=str)
def test_targets_that_are_all_ignored_leave_no_curvature(options: dict, reduction: str):
    z = torch.randn(4, 3, dtype=torch.float64)
    curved = curvature(nn.CrossEntropyLoss(**options, reduction=reduction), z, torch.full((4,), -100))
    assert curved.weights is not None and not curved.weights.any()
    assert not curved.root(0, curved.columns).any() and not curved.sample(2, None).any()


class LogSumExp(nn.Module):
    """A loss of one's own that is neither known nor a function of single entries."""

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        value = z.flatten(1).logsumexp(1) + (z * y).flatten(1).sum(1) + z.square().flatten(1).sum(1)
        return value.mean() if self.reduction == "mean" else value.sum()


def problem(name: str, reduction: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape, target = EVERY[name]
    z = torch.randn(shape, dtype=torch.float64)
    return make(reduction), z, target(shape)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", EVERY)
def test_root_is_a_root_of_the_hessian(name: str):
    for reduction in ("mean", "sum"):
        module, z, y = problem(name, reduction)
        curved, H = curvature(module, z, y), hessian(module, z, y)
        assert H.abs().max() > 0
        for root in (curved, curved.by_entries()):
            whole = root.root(0, root.columns)
            assert whole.shape == (root.columns, *z.shape)
            assert_close(dense(whole), H)
            split = root.columns // 2
            assert_close(torch.cat([root.root(0, split), root.root(split, root.columns)]), whole)


def test_softmax_has_no_more_columns_than_rank():
    z, y = torch.randn(2, 4, 3, dtype=torch.float64), labels(2, 3)
    curved = curvature(nn.CrossEntropyLoss(), z, y)
    rank = int(torch.linalg.matrix_rank(hessian(nn.CrossEntropyLoss(), z, y)))
    assert (curved.columns, curved.by_entries().columns) == (rank / len(z), z[0].numel())


def test_a_single_class_has_no_curvature():
    net, lossfunc = extend(nn.Linear(2, 1)), extend(nn.CrossEntropyLoss())
    with backpack(DiagGGNExact(), KFLR(), GGNMP()):
        lossfunc(net(torch.randn(3, 2)), torch.zeros(3, dtype=torch.long)).backward()
    for p in net.parameters():
        assert_close(
            [p.diag_ggn_exact, p.kflr[0], p.ggnmp(torch.ones(1, *p.shape))[0]],
            [torch.zeros_like(p), torch.zeros(1, 1), torch.zeros_like(p)],
        )


@pytest.mark.parametrize("sure", [0.0, 20.0, 60.0])
def test_root_of_a_softmax_keeps_small_curvatures(sure: float):
    z = sure * torch.eye(4, dtype=torch.float64)[[0, 2, 3]] - torch.tensor([0.0, 1, 3, 7])
    curved = curvature(nn.CrossEntropyLoss(), z.float(), labels(3))
    diagonal = curved.root(0, curved.columns).square().sum(0).double()
    p = z.softmax(1)
    others = p @ (1 - torch.eye(4, dtype=torch.float64))
    assert_close(diagonal, p * others / 3, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", [n for n in EVERY if not ("-plain-" in n or "-weight-" in n) or "(4, 3)" in n])
def test_samples_average_to_the_hessian(name: str):
    module, z, y = problem(name, "mean")
    curved, H = curvature(module, z, y), hessian(module, z, y)
    number = 20_000
    s = curved.sample(number, generator(1)).flatten(1)
    products = s.unsqueeze(2) * s.unsqueeze(1)
    error = products.std(0) / number**0.5
    assert ((products.mean(0) - H).abs() <= 6 * error + 1e-12).all()
    assert error.max() < 0.1 * H.abs().max()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_softmax_takes_its_classes_from_any_axis(dim: int):
    z, y = torch.randn(2, 3, 4, 2, dtype=torch.float64), labels(2, 2, 2)
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


@pytest.mark.parametrize(
    ("module", "output"),
    [
        (nn.CrossEntropyLoss(), torch.nan),
        (nn.BCEWithLogitsLoss(), torch.nan),
    ],
)
def test_a_network_that_diverged_has_columns_of_nan(module: nn.Module, output: float):
    z = torch.full((2, 3), output, dtype=torch.float64)
    curved = curvature(module, z, labels(2) if isinstance(module, nn.CrossEntropyLoss) else torch.rand(2, 3))
    assert curved.sample(2, None).isnan().all()


def test_generator_decides_the_samples():
    for name in ["ce-plain-(4, 3)-labels", "bce-plain-(4, 3)", "mse-(4, 3)-(4, 3)"]:
        curved = curvature(*problem(name, "mean"))
        same, again, other = (curved.sample(5, generator(s)) for s in (0, 0, 1))
        assert torch.equal(same, again) and not torch.equal(same, other)


def test_a_chunk_of_columns_needs_the_memory_of_the_chunk():
    """No square matrix over the entries of a sample: for 4096 of them it would hold 16.8M numbers."""
    z = torch.randn(2, 4096)
    for module, y in [(nn.MSELoss(), torch.randn(2, 4096)), (nn.BCEWithLogitsLoss(), torch.rand(2, 4096))]:
        curved = curvature(module, z, y)
        assert largest_tensor(lambda curved=curved: curved.root(10, 12)) == 2 * z.numel()
    curved = curvature(nn.CrossEntropyLoss(), z.view(2, 4, 1024), labels(2, 1024))
    assert largest_tensor(lambda: curved.root(10, 12)) == 2 * z.numel()


def largest_tensor(function) -> int:
    """Entries of the largest tensor that operations in ``function`` return."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.entries = max(self.entries, *(o.numel() for o in [out] if isinstance(o, Tensor)), 0)
            return out

    with Largest() as mode:
        function()
    return mode.entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["ce-all-(4, 3)-labels", "ce-smooth-(3, 3, 2)-masses", "bce-both-(2, 2, 3)", "mse-(4, 3)-(4, 3)"]
)
def test_lower_precision(name: str, dtype: torch.dtype):
    """The root is computed in float32, from what the forward pass has saved in its own precision."""
    module, z, y = problem(name, "mean")
    low = z.to(dtype)
    module = copy.deepcopy(module).to(dtype)
    curved = curvature(module, low, y.to(dtype) if y.is_floating_point() else y)
    root = curved.root(0, curved.columns)
    assert root.dtype == torch.float32
    y = y.to(dtype).double() if y.is_floating_point() else y
    H, rounding = hessian(module.double(), low.double(), y), 2 * torch.finfo(dtype).eps
    assert_close(dense(root.double()), H, atol=float(rounding * H.abs().max()), rtol=max(rounding, 1e-4))


class Weighted(nn.Module):
    """Of one's own, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return ((z - y).pow(4) @ self.weight).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extension", [KFLR, KFACEmpirical, DiagHessian])
@pytest.mark.parametrize(
    "lossfunc", [nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), nn.HuberLoss(), Weighted()]
)
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


@pytest.mark.parametrize("lossfunc", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss])
def test_autocast(lossfunc: type[nn.Module]):
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    y = torch.randint(3, (8,)) if lossfunc is nn.CrossEntropyLoss else torch.rand(8, 3)
    extend(model)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), backpack(DiagGGNExact()):
            extend(lossfunc())(model(x), y).backward()
        found.append(model.weight.diag_ggn_exact)
    assert_close(found[1].float(), found[0], rtol=0.05, atol=1e-3)


# ------------------------------------------------------------------------------------------------ losses of one's own


VIEWS = torch.tensor([2, 0, 3, 1])


@pytest.mark.parametrize(
    ("lossfunc", "arguments", "couples"),
    [
        (nn.CosineEmbeddingLoss, lambda f, x, y: (*f(torch.cat([x, y])).chunk(2), x.new_tensor([1, -1, 1, -1])), True),
        (nn.TripletMarginLoss, lambda f, x, y: (f(x), f(y), f(x)[VIEWS]), True),
        (nn.MSELoss, lambda f, x, y: (f(x), f(torch.stack([x, y], 1)).mean(1)), False),
        (nn.GaussianNLLLoss, lambda f, x, y: (f(x), y[:, :3], f(y[:, None].expand(4, 2, 4)).exp().prod(1)), False),
    ],
)
def test_losses_of_several_predictions(lossfunc, arguments, couples: bool):
    """Row n of each call of the model is sample n, wherever the loss has it; where samples meet, an error says so."""
    model = extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    data, calls = torch.randn(2, 4, 4, dtype=torch.float64), []

    def call(x: Tensor) -> Tensor:
        calls.append(model(x))
        return calls[-1]

    with backpack(DiagHessian()), pytest.raises(CurvoptError, match="couples") if couples else nullcontext():
        extend(lossfunc())(*arguments(model, *data)).backward()
    for name, p in {} if couples else dict(model.named_parameters()).items():

        def of(q: Tensor, name: str = name) -> Tensor:
            f = lambda x: torch.func.functional_call(model, {name: q}, (x,))  # noqa: E731
            return lossfunc()(*arguments(f, *data))

        H = torch.autograd.functional.hessian(of, p.detach()).reshape(p.numel(), p.numel())
        assert_close(p.diag_h.flatten(), H.diagonal())
    loss = extend(lossfunc())(*arguments(call, *data))
    heads = [z for z in calls if z.grad_fn is not None]
    gradients = torch.autograd.grad(loss, heads, retain_graph=True)
    with backpack(BatchGrad()):
        loss.backward(retain_graph=True)
    for p in model.parameters():
        for n, found in enumerate(p.grad_batch):
            own = [g * (torch.arange(len(g)) == n).view(-1, *[1] * (g.dim() - 1)) for g in gradients]
            assert_close(found, torch.autograd.grad(heads, p, own, retain_graph=True)[0])


def test_predictions_of_batches_of_different_lengths_have_no_samples_in_common():
    model = extend(nn.Linear(4, 3))
    x = torch.randn(4, 4)
    with pytest.raises(CurvoptError, match="grad_batch .* batches of different lengths"), backpack(BatchGrad()):
        F.mse_loss(model(x), model(x[:1]).expand(4, 3)).backward()


def test_losses_of_containers_are_read_off_the_graph():
    class MultiTask(nn.modules.loss._Loss):
        def forward(self, outputs: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(outputs["z"], torch.ones(4, 2))

    x, model = torch.randn(4, 3), nn.ModuleDict({"net": nn.Linear(3, 2), "criterion": MultiTask()})
    found = []
    for lossfunc in (
        extend(model)["criterion"],
        lambda outputs: extend(nn.MSELoss())(outputs["z"], torch.ones(4, 2)),
    ):
        with backpack(DiagGGNExact(), BatchGrad()):
            lossfunc({"z": model["net"](x)}).backward()
        found.append((model["net"].weight.diag_ggn_exact, model["net"].weight.grad_batch))
    assert_close(*found)


def test_marked_loss_fills_the_fields():
    model, lossfunc = extend(nn.Linear(4, 3).double()), extend(LogSumExp(), loss=True)
    lossfunc = pickle.loads(pickle.dumps(copy.deepcopy(lossfunc)))
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    with backpack(DiagGGNExact(), DiagGGNMC(mc_samples=20_000)):
        (2 * lossfunc(model(x), y=y)).backward()
    H = torch.func.hessian(lambda w: 2 * LogSumExp()(F.linear(x, w, model.bias), y))(model.weight.detach())
    diagonal = H.reshape(12, 12).diagonal().view(3, 4)
    assert_close(model.weight.diag_ggn_exact, diagonal)
    assert_close(model.weight.diag_ggn_mc, diagonal, rtol=0.1, atol=0)


def test_subclass_with_another_forward_is_taken_as_it_is():
    class Squared(nn.MSELoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return 3 * super().forward(input, target)

    z, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    assert_close(dense(curvature(Squared(), z, y).root(0, 3)), hessian(Squared(), z, y))


@pytest.mark.parametrize("name", ["ce-all-(4, 3)-labels", "bce-weights_of_samples-(4, 3)"])
def test_root_can_be_differentiated(name: str):
    module, z, y = problem(name, "mean")
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


# ---------------------------------------------------------------------------------------------------- what is refused


def loss_of_own(function) -> nn.Module:
    class Own(nn.Module):
        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return function(z, y)

    return Own()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda z, y: (z * y).cos().sum(), "indefinite.*DiagHessian"),
        (lambda z, y: z.prod(1).sum() + 0 * y.sum(), "indefinite"),
        (lambda z, y: (z.mean(0) - y).square().sum(), "couples samples"),
        (lambda z, y: z.square().sum() + 0.1 * z[0].dot(z[1]), "couples"),
        (lambda z, y: (z - z.detach()).abs().pow(1.5).sum(), "not finite"),
    ],
)
def test_hessians_without_a_root_are_refused(function, message: str):
    z, y = torch.rand(4, 3, dtype=torch.float64) + 0.1, torch.rand(4, 3, dtype=torch.float64)
    with pytest.raises(CurvoptError, match=message):
        generic(loss_of_own(function), z, y).check_definite()


def test_loss_without_second_derivative_is_refused():
    with pytest.raises(CurvoptError, match="MultiMargin.*no second derivative"):
        generic(nn.MultiMarginLoss(), torch.rand(4, 3), labels(4)).check_definite()


def test_losses_without_a_root_have_what_errors_advise():
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    model, own = extend(nn.Linear(5, 3).double()), lambda z, y: (z * y).cos().sum()
    found = []
    for lossfunc in (extend(nn.MultiMarginLoss()), F.multi_margin_loss):
        with backpack(KFACEmpirical()):
            lossfunc(model(x), torch.tensor([0, 2, 1, 1])).backward()
        found.append(model.weight.kfac_empirical)
    assert_close(*found)
    with backpack(DiagHessian()):
        extend(loss_of_own(own), loss=True)(model(x), y).backward()
    H = torch.func.hessian(lambda w: own(F.linear(x, w, model.bias), y))(model.weight.detach())
    assert_close(model.weight.diag_h.flatten(), H.reshape(15, 15).diagonal())


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
    x = nn.functional.one_hot(y, 4).float()
    weights, curved = [], []
    for lossfunc in (extend(Margins(by_entries), loss=True), Margins(by_entries)):
        for factor in (-10.0, 10.0):
            with torch.no_grad():
                model.weight.copy_(factor * (2 * torch.eye(4) - 1))
            with backpack(KFLR()) as context:
                lossfunc(model(x), y).backward()
            weights.append(float(context.loss_weight))
            curved.append(bool(model.weight.kflr[0].any()))
    assert curved == [True, False] * 2
    assert weights == [1.0] * 4


class Noisy(nn.Module):
    """A loss with dropout, that counts its calls; the entries of a sample may be coupled."""

    def __init__(self, couples: bool):
        super().__init__()
        self.couples = couples
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        kept = F.dropout(z, 0.5)
        return self.calls * (kept.logsumexp(1) if self.couples else (kept - y).pow(4).sum(1)).mean()


@pytest.mark.parametrize("couples", [True, False])
@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFACEmpirical])
def test_losses_with_dropout_or_state_run_once(extension: type, couples: bool):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 3, dtype=torch.float64)
    model, found = extend(nn.Linear(4, 3).double()), []
    for lossfunc in (extend(Noisy(couples), loss=True), Noisy(couples)):
        torch.manual_seed(1)
        with backpack(extension()):
            lossfunc(model(x), y).backward()
        assert lossfunc.calls == 1
        found.append(getattr(model.weight, extension.field))
    assert_close(*found)
    if extension is not KFACEmpirical:
        torch.manual_seed(1)
        kept = F.dropout(torch.ones(6, 3, dtype=torch.float64), 0.5)

        def loss(w: Tensor) -> Tensor:
            z = kept * F.linear(x, w, model.bias)
            return (z.logsumexp(1) if couples else (z - y).pow(4).sum(1)).mean()

        H = torch.func.hessian(loss)(model.weight.detach()).reshape(12, 12)
        assert_close(found[0].flatten(), H.diagonal())


def test_rows_of_one_sample_that_the_network_mixes():
    """With a row of the output for each token, a column of the root must hold one row of each sample."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return (torch.softmax(h @ h.mT, -1) @ h).flatten(0, 1)

    model, x, y = Mixing().double(), torch.randn(2, 5, 4, dtype=torch.float64), labels(10)
    z = model(x)
    H = hessian(nn.CrossEntropyLoss(), z, y)
    rows = [torch.autograd.grad(entry, model.linear.weight, retain_graph=True)[0].flatten() for entry in z.flatten()]
    J = torch.stack(rows)
    extend(model)
    with backpack(DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert_close(model.linear.weight.diag_ggn_exact.flatten(), (J.T @ H @ J).diagonal())
