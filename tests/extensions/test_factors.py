"""Kronecker factors of other kinds: empirical, cut down to blocks, and the diagonal in their eigenbasis."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from checks import BY_NAME, backward, by_case, columns_per_sweep, compare, extended
from reference import Reference, reference
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.core.products import costs
from curvopt.extensions import KFAC, KFLR, DiagGGNExact, DiagGGNMC, EigenDiagonal, KFACEmpirical
from curvopt.kroneckers import kfacs_to_mat

LOSSES = [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss]


def target_of(lossfunc: nn.Module, z: Tensor) -> Tensor:
    return torch.arange(len(z)) % z.shape[1] if isinstance(lossfunc, nn.CrossEntropyLoss) else torch.rand_like(z)


@pytest.mark.parametrize("name", ["mlp", "conv2d-groups", "used-twice", "own-parameters-and-children"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_empirical_factors_are_those_of_the_predictions_own_gradients(name: str, reduction: str, loss: type) -> None:
    problem, plain = BY_NAME[name].problem(), BY_NAME[name].problem()
    lossfunc = loss(reduction=reduction)
    with torch.no_grad():
        y = target_of(lossfunc, plain.model(plain.x))
    ref = Reference(plain.model, plain.x, lambda z: lossfunc(z, y))
    gradients = ref.gradient_of_output.view(len(y), -1)
    entries = 1 if loss is nn.CrossEntropyLoss else gradients.shape[1]
    weight = 1 / (len(y) * entries) if reduction == "mean" else 1  # of one prediction's loss
    ref.H = torch.block_diag(*(torch.outer(g, g) / weight for g in gradients))
    model, lossfunc = extend(problem.model), extend(lossfunc)
    with backpack(KFACEmpirical()):
        lossfunc(model(problem.x), y).backward()
    for parameter, p in problem.trainable().items():
        compare(p.kfac_empirical, ref.kflr(parameter), f"{parameter}.kfac_empirical")


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_weight_of_the_loss_counts_predictions(loss: type, functional: bool) -> None:
    torch.manual_seed(0)
    model, x = extend(nn.Linear(4, 3)), torch.randn(6, 4)
    y = target_of(loss(), x[:, :3])
    entries = 1 if loss is nn.CrossEntropyLoss else 3
    weights = {}
    for reduction in ("mean", "sum"):
        lossfunc = loss(reduction=reduction) if functional else extend(loss(reduction=reduction))
        with backpack(DiagGGNMC()) as context:
            (2 * lossfunc(model(x), y)).backward()
            (2 * lossfunc(model(x), y)).backward()
        weights[reduction] = context.loss_weight
    torch.testing.assert_close(weights["sum"], torch.tensor(4.0 * len(x)))
    torch.testing.assert_close(weights["mean"], torch.tensor(4.0 / entries))


def test_ignored_targets_weigh_nothing() -> None:
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss(reduction="sum", ignore_index=1))
    with backpack(DiagGGNMC()) as context:
        lossfunc(model(torch.randn(6, 4)), torch.tensor([0, 1, 2, 1, 1, 0])).backward()
    torch.testing.assert_close(context.loss_weight, torch.tensor(3.0))


@by_case
def test_factors_in_blocks_and_in_their_bases(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, limited, limit = extended(case), extended(case), 3
    for approx in ("expand", "reduce"):
        backward(whole, KFLR(approx=approx))
        with monkeypatch.context() as patched:
            patched.setattr(costs, "rows_at_once", lambda *sizes: 1)
            backward(limited, KFLR(approx=approx, max_factor_size=limit))
        for p, q in zip(whole.trainable().values(), limited.trainable().values(), strict=True):
            for factor, cut in zip(p.kflr, q.kflr, strict=True):
                are_blocks(cut, factor, limit)
    eigen_diagonal_is_that_of_the_rotated_matrix(case)


def are_blocks(cut: Tensor, factor: Tensor, limit: int) -> None:
    """``[groups, blocks, size, size]`` are those on the diagonal of a factor, and no more than it takes."""
    size = factor.shape[-1]
    if size <= limit or factor.dim() == 1:
        compare(cut, factor, "small enough")
        return
    groups = factor if factor.dim() == 3 else factor[None]
    assert cut.shape[0] == len(groups) and cut.shape[-1] <= limit
    assert (cut.shape[1] - 1) * limit < size
    for group, blocks in zip(groups, cut, strict=True):
        mask = torch.block_diag(*torch.ones_like(blocks))[:size, :size]
        compare(torch.block_diag(*blocks)[:size, :size], group * mask, "blocks")
        assert not torch.block_diag(*blocks)[size:].any()


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_factor_of_outputs_is_that_of_what_arrives_at_them(loss: type, scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(6, 5).double()
    y = target_of(loss(), model(x).detach())
    ref, model = Reference(model, x, lambda z: loss()(z, y)), extend(model)
    with columns_per_sweep(1), backpack(KFLR(), DiagGGNExact()):
        z = model(x)
        z.register_hook(lambda grad: scale * grad)
        loss()(z, y).backward()
    for name, p in model.named_parameters():
        compare(p.kflr[:1], [scale**2 * ref.kflr(name)[0]], f"{name}.kflr")


def eigen_diagonal_is_that_of_the_rotated_matrix(case: Case) -> None:
    for limit in (None, 3):
        kflr, ref, bases = KFLR(max_factor_size=limit), reference(case), {}
        problem = backward(extended(case), kflr)
        for p in problem.trainable().values():
            bases[p] = [f if f.dim() == 1 else torch.linalg.eigh(f + torch.randn_like(f) / 10)[1] for f in p.kflr]
        if len(bases) > 1:
            del bases[next(iter(bases))]
        backward(problem, EigenDiagonal(bases, kflr.columns))
        for name, p in problem.trainable().items():
            if p not in bases:
                assert p.eigen_diagonal is None
                continue
            own = [torch.ones_like(basis) if basis.dim() == 1 else basis for basis in bases[p]]
            if not any(basis.dim() == 4 for basis in own):  # padded ones are compared with whole ones below
                U = kfacs_to_mat(own)
                compare(p.eigen_diagonal, (U.T @ ref.ggn(name) @ U).diagonal(), f"{name}.eigen_diagonal")


def test_eigen_diagonal_in_bases_of_blocks() -> None:
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    lossfunc = extend(nn.MSELoss())
    x, y = torch.randn(7, 5).double(), torch.randn(7, 3).double()
    blocks = [torch.linalg.qr(torch.randn(size, size).double())[0] for size in (3, 2)]
    padded = torch.stack([blocks[0], torch.block_diag(blocks[1], torch.ones(1, 1).double())])[None]
    other = torch.linalg.qr(torch.randn(4, 4).double())[0]
    values = []
    for basis in (torch.block_diag(*blocks), padded):
        extension = EigenDiagonal({model[0].weight: [other, basis]}, KFLR().columns)
        with backpack(extension):
            lossfunc(model(x), y).backward()
        values.append(model[0].weight.eigen_diagonal)
    compare(values[1], values[0], "eigen_diagonal")


def test_factors_say_which_of_them_is_the_inputs() -> None:
    model = extend(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)))
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(KFAC()):
        lossfunc(model(torch.tensor([0, 2, 1])), torch.tensor([0, 1, 1])).backward()
    assert model[0].weight.kfac.transposed and [f.shape[-1] for f in model[0].weight.kfac] == [4, 3]
    assert not model[1].weight.kfac.transposed


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="max_factor_size"):
        KFAC(max_factor_size=0)
