"""Solving in eigenbases and with blocks, and the optimizers that do, against dense matrices.

Tests of `optim/solve.py`, `optim/stacks.py`, `optim/kfac.py` and `optim/kfac_adamw.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Net
from checks import assert_same
from optimizer_cases import Run, Tokens, assert_close, assert_equal, cnn, counters, descend, mlp, numbers, resume_with
from torch import Tensor, nn

from curvopt import CurvoptError, backpack
from curvopt.extensions import SqrtGGNExact
from curvopt.kroneckers import eigenbases, kfac_mat_prod, kfacs_to_mat, kron_diagonal, renewed_bases, sizes_of
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW, KFACPreconditioner
from curvopt.optim.curvature import Quantity
from curvopt.optim.kfac import ScaledEigenbasis
from curvopt.optim.kfac_adamw import MomentsInEigenbasis
from curvopt.optim.solve import Eigenbasis, Solver, off_diagonals, without_ties

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def dense_basis(bases: list[Tensor]) -> Tensor:
    return kfacs_to_mat([torch.ones_like(basis) if basis.ndim == 1 else basis for basis in bases])


def dense_ggn(run: Run, step: int) -> dict[Tensor, Tensor]:
    with backpack(SqrtGGNExact()):
        run.loss(step).backward()
    roots = {p: p.sqrt_ggn_exact.flatten(0, 1).reshape(-1, p.numel()) for p in run.model.parameters()}
    run.model.zero_grad()
    return {p: root.T @ root for p, root in roots.items()}


@pytest.mark.parametrize("model", [mlp, cnn, Tokens])
def test_ekfac_step_is_the_dense_solve_with_the_best_diagonal(model) -> None:
    """In one's own basis, the diagonal of the GGN is the closest of all to it in the Frobenius norm."""
    run = Run(EKFACSGD, model, fisher="exact", lr=1.0, momentum=0.0, damping=0.3, ema=0.0, rms_clip=None, **DOUBLE)
    run.train(1)
    run.optimizer.curvature_every = run.optimizer.inverse_every = 1
    ggn, before = dense_ggn(run, 1), run.weights()
    bases = {p: list(run.optimizer.state[p]["curvature"].bases) for p in run.model.parameters()}
    resume_with(run.optimizer, next_inverse=100)  # the bases stay
    run.train(range(1, 2))
    for p, old in zip(run.model.parameters(), before, strict=True):
        U = dense_basis(bases[p])
        scales = (U.T @ ggn[p] @ U).diagonal()
        torch.testing.assert_close(run.optimizer.state[p]["curvature"].scales, scales)
        matrix = U @ torch.diag(scales + 0.3) @ U.T
        solution = torch.linalg.solve(matrix, p.grad.reshape(-1)).view_as(p)
        torch.testing.assert_close(old - p.detach(), solution * (p.grad != 0))


def test_scales_follow_the_bases() -> None:
    """What turns the basis of a matrix that is diagonal in it gives its diagonal in the new one."""
    run = Run(EKFACSGD, cnn, **DOUBLE).train(1)
    p = run.model[2].weight  # with groups
    state = run.optimizer.state[p]
    old, scales = list(state["curvature"].bases), state["curvature"].scales.clone()
    state["curvature"].bases = [torch.linalg.qr(torch.randn_like(basis))[0] for basis in old]
    ScaledEigenbasis().change_basis(state, p.shape, old, [None] * len(old))
    U, V = dense_basis(old), dense_basis(state["curvature"].bases)
    torch.testing.assert_close(state["curvature"].scales, (V.T @ U @ torch.diag(scales) @ U.T @ V).diagonal())


def test_bases_are_renewed_once_they_have_turned() -> None:
    run = Run(EKFACSGD, lr=0.0, fisher="exact", curvature_every=1, inverse_every=1, **DOUBLE)
    run.train(range(1))
    states = [run.optimizer.state[p]["curvature"] for p in run.model.parameters()]
    bases = [[basis.clone() for basis in state.bases] for state in states]
    for _ in range(3):  # the same batch, the same parameters: the same curvature
        assert run.train(range(1)).optimizer.metrics()["new_bases"] == 0
    for state, old in zip(states, bases, strict=True):
        assert all(map(torch.equal, state.bases, old))
    p = run.model[1].weight
    turned = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0]
    run.optimizer.state[p]["curvature"].factors[0] = turned @ run.optimizer.state[p]["curvature"].factors[0] @ turned.T
    assert run.train(range(1)).optimizer.metrics()["new_bases"] == 1
    kept = run.optimizer.state[p]["curvature"]
    assert off_diagonals(without_ties(kept.factors[0].unsqueeze(0)), kept.bases[:1])[0] < 1e-6


def with_equal_singular_values(matrix: Tensor) -> Tensor:
    """As five iterations of Muon leave them, which act on each singular value alone; of the same norm."""
    U, s, V = torch.linalg.svd(matrix, full_matrices=False)
    new = s / s.norm()
    for _ in range(5):
        new = 3.4445 * new - 4.775 * new**3 + 2.0315 * new**5
    return U @ torch.diag(new * s.norm() / new.norm()) @ V


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.3}, {"amsgrad": True}, {"maximize": True}, {"orthogonalize": True}]
)
@pytest.mark.parametrize(("cautious", "wide"), [(True, 128), (True, 5), (False, None)])
def test_kfac_adamw_is_adamw_in_the_eigenbasis_without_what_goes_uphill(
    options: dict[str, Any], cautious: bool, wide: int | None
) -> None:
    options = {"betas": (0.9, 0.99), **options}
    every = {"curvature_every": 100, "inverse_every": 100}
    run = Run(KFACAdamW, Tokens, lr=0.02, cautious=cautious, wide=wide, **every, **options, **DOUBLE)
    resume_with(run.optimizer, step=200, steps=[200] * 7)  # no refresh after the first
    start = run.weights()
    twins: list[nn.Parameter] = []
    count = 0
    for i in range(5):
        run.backward(i)
        grads = [p.grad.clone() for p in run.model.parameters()]
        run.optimizer.step()
        U = [dense_basis(run.optimizer.state[p]["curvature"].bases) for p in run.model.parameters()]
        if not twins:
            twins = [nn.Parameter(u.T @ w.reshape(-1)) for u, w in zip(U, start, strict=True)]
            options = {"weight_decay": 0.0, **options}
            equal = options.pop("orthogonalize", False)
            adamw = torch.optim.AdamW(twins, lr=0.02, **options)
        for twin, u, grad in zip(twins, U, grads, strict=True):
            twin.grad = u.T @ grad.reshape(-1)
        decayed = [twin.detach() * (1 - 0.02 * options["weight_decay"]) for twin in twins]
        adamw.step()
        inputs = [p[0].numel() if p.ndim > 1 else 1 for p in run.model.parameters()]
        for twin, before, n in zip(twins, decayed, inputs, strict=True):
            assert twin.grad is not None
            shorter = 1 if wide is None else min(1, (wide / n) ** 0.5)
            change = (twin.detach() - before) * shorter
            if equal and n > 1:
                change = with_equal_singular_values(change.view(-1, n)).reshape(-1)
            uphill = cautious & (change * twin.grad * (-1 if options.get("maximize") else 1) > 0)
            count += int(uphill.sum())
            twin.data.copy_(before + change.masked_fill(uphill, 0))
        assert_close(
            [p.detach().reshape(-1) for p in run.model.parameters()],
            [u @ twin.detach() for u, twin in zip(U, twins, strict=True)],
        )
    assert (count > 0) == cautious


@pytest.mark.parametrize("shape", [(3, 200, 10), (3, 10, 200)], ids=["many-inputs", "many-outputs"])
def test_stacked_weights_have_the_inputs_of_one(shape: tuple[int, ...]) -> None:
    """The larger side of one, since nothing says which are the inputs."""

    forward = lambda net, x: torch.bmm(x.expand(3, *x.shape), net.weight)  # noqa: E731
    model: Any = Net(forward, weight=nn.Parameter(torch.randn(shape) / 10))
    optimizer = KFACAdamW(model.parameters(), lr=0.01, eps=1e-30, cautious=False)
    optimizer.attach(model)
    before = model.weight.detach().clone()
    model(torch.randn(16, shape[1])).square().mean().backward()
    optimizer.step()
    length = (model.weight - before).norm() / before.numel() ** 0.5  # a first step of Adam
    assert float(length) == pytest.approx(0.01 * (128 / 200) ** 0.5, rel=1e-3)


def test_groups_that_maximise_and_minimise_together() -> None:
    model, multiplier = nn.Linear(3, 1).double(), nn.Parameter(torch.zeros(1).double())
    optimizer = KFACAdamW([{"params": model.parameters()}, {"params": [multiplier], "maximize": True}])
    optimizer.attach(model)
    x = torch.randn(16, 3).double()

    def loss() -> Tensor:
        z = model(x)
        return (z.square().mean() + multiplier * (1 - z.detach().mean().square())).sum()

    descend(optimizer, loss, 20)
    assert 0.1 < multiplier.item()


def test_averages_of_adam_follow_the_bases() -> None:
    run = Run(KFACAdamW, cnn, **DOUBLE).train(3)
    p = run.model[0].weight
    state = run.optimizer.state[p]
    old = list(state["curvature"].bases)
    U = dense_basis(old)
    m, v = U @ state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1)
    state["curvature"].bases = [torch.linalg.qr(torch.randn_like(basis))[0] for basis in old]
    MomentsInEigenbasis().change_basis(state, p.shape, old, [None] * len(old))
    V = dense_basis(state["curvature"].bases)
    torch.testing.assert_close(state["exp_avg"].reshape(-1), V.T @ m)
    torch.testing.assert_close(state["exp_avg_sq"].reshape(-1), (V.T @ U @ torch.diag(v) @ U.T @ V).diagonal())


def test_state_is_kept_in_bfloat16_between_steps() -> None:
    """Its steps, and those of a resumed run, are those of one whose state is rounded after each step."""
    few = {"curvature_every": 2, "inverse_every": 2}
    low, resumed = (Run(KFACAdamW, cnn, state_dtype=torch.bfloat16, **few) for _ in range(2))
    full = Run(KFACAdamW, cnn, **few)

    def kept(run: Run) -> list[Tensor]:
        states = run.optimizer.state.values()
        lists = [[*s["curvature"].factors, *s["curvature"].bases, s["exp_avg"], s["exp_avg_sq"]] for s in states]
        return [tensor for tensors in lists for tensor in tensors]

    for step in range(6):
        low.train(range(step, step + 1))
        for tensor in kept(full.train(range(step, step + 1))):
            tensor.copy_(tensor.bfloat16())
        if step == 3:
            resumed.load(low)
    assert {tensor.dtype for tensor in kept(low)} == {torch.bfloat16}
    for run in (full, resumed.train(range(4, 6))):
        for a, b in zip(low.weights(), run.weights(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_averages_in_bfloat16_forget() -> None:
    """Whether slow ones are those of the constructor, of a state or of a schedule."""
    low, slow = Run(KFACAdamW, state_dtype=torch.bfloat16).train(1), Run(KFACAdamW, betas=(0.9, 0.999)).train(2)
    before, state = low.weights(), copy.deepcopy(numbers(low.optimizer))
    group = low.optimizer.param_groups[0]
    with pytest.raises(ValueError, match="have to forget"):
        Run(KFACAdamW, state_dtype=torch.bfloat16, betas=(0.9, 0.999))
    with pytest.raises(ValueError, match="have to forget"):
        low.optimizer.load_state_dict(slow.optimizer.state_dict())
    torch.testing.assert_close(numbers(low.optimizer), state, rtol=0, atol=0)
    for name, value in (("betas", (0.9, 0.999)), ("ema", 0.999)):
        group[name], usual = value, group[name]
        with pytest.raises(CurvoptError, match=r"step\(\).*have to forget.*0\.999"):
            low.step(1)
        group[name] = usual
    assert_equal(before, low.weights())
    low.train(range(1, 3))


@pytest.mark.parametrize("columns", [(), (2,)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(7, 5), (4, 9), (7, 9), (8, 8)])
def test_block_factors_multiply_as_block_diagonal_matrices(
    shape: tuple[int, int], groups: int, columns: tuple[int, ...]
) -> None:
    limit, factors, dense = 4, [], []
    for d in shape:
        count = -(-d // limit)
        size = -(-d // count)
        blocks = torch.randn(groups, count, size, size).double()
        rest = count * size - d
        if rest:
            blocks[:, -1, size - rest :] = blocks[:, -1, :, size - rest :] = 0
        factors.append(blocks if d > limit else blocks[0, 0] if groups == 1 else blocks[:, 0])
        dense.append([torch.block_diag(*of_group)[:d, :d] for of_group in blocks])
    x = torch.randn(groups * shape[0] * shape[1], *columns).double()
    with torch.no_grad():
        expected = torch.block_diag(*(torch.kron(*both) for both in zip(*dense, strict=True))) @ x
        assert_same(kfac_mat_prod(factors, shape)(x), expected)
    assert sizes_of(factors, (groups * shape[0], shape[1])) == list(shape)


def blocks_of(whole: Tensor, count: int = 3) -> Tensor:
    """The blocks ``[1, count, size, size]`` on the diagonal of a matrix, the last of which may reach over it."""
    d, size = len(whole), -(-len(whole) // count)
    padded = F.pad(whole, (0, count * size - d, 0, count * size - d))
    return torch.stack([padded[i : i + size, i : i + size] for i in range(0, count * size, size)])[None]


@pytest.mark.parametrize("d", [7, 8, 10])
def test_eigenbases_of_blocks_keep_to_the_factor(d: int) -> None:
    root = torch.randn(d, 2 * d).double()
    root[1] = 0  # an input that is always zero, as what a block reaches over the factor
    blocks = blocks_of(root @ root.T)
    (basis,), (values,) = eigenbases([blocks])
    U = torch.block_diag(*basis[0])[:d, :d]
    torch.testing.assert_close(U.T @ U, torch.eye(d).double())
    diagonal = torch.diag(kron_diagonal([values], [d]))
    torch.testing.assert_close(U @ diagonal @ U.T, torch.block_diag(*blocks[0])[:d, :d])


@pytest.mark.parametrize("d", [7, 8, 10])
def test_renewed_bases_of_blocks_keep_to_the_factor(d: int) -> None:
    """They are orthogonal and nearly diagonalise; of a factor that stays as it is, they converge."""
    root = torch.randn(d, 2 * d).double() * torch.logspace(0, -2, d).double()[:, None]
    root[1] = 0
    bases, _ = eigenbases([blocks_of(root @ root.T), root @ root.T])
    root = root + 0.1 * root.roll(1, 1)
    factors = [blocks_of(root @ root.T), root @ root.T]
    spectra = [eigenbases([factor])[1][0] for factor in factors]
    for _ in range(30):
        bases, values = renewed_bases(factors, bases)
        for basis, value, factor, spectrum in zip(bases, values, factors, spectra, strict=True):
            torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1]).double().expand_as(basis))
            torch.testing.assert_close(value.sum(-1), spectrum.sum(-1))  # of the padding, nothing
            assert off_diagonals([factor], [basis])[0] < 0.1
    for value, spectrum in zip(values, spectra, strict=True):
        torch.testing.assert_close(value.sort().values, spectrum.sort().values, rtol=1e-3, atol=1e-6)


def test_preconditioner_in_front_of_sgd_is_kfac_sgd() -> None:
    options = {"damping": 0.1, "fisher": "exact", "rms_clip": 1e-3, "curvature_every": 1, "inverse_every": 1}
    run = Run(KFACSGD, cnn, lr=0.03, momentum=0.9, **options, **DOUBLE).train(6)
    other = Run(lambda params, **o: torch.optim.SGD(params, lr=0.03, momentum=0.9), cnn, **DOUBLE)
    preconditioner = KFACPreconditioner(other.model, **options)
    for step in range(6):
        preconditioner.zero_grad()
        other.backward(step)
        before = other.weights()
        preconditioner.step()
        assert_close(before, other.weights(), rtol=0, atol=0)
        other.optimizer.step()
    assert_close(run.weights(), other.weights())


def test_gradients_of_a_preconditioner_outlive_its_next_step() -> None:
    run = Run(lambda params: torch.optim.SGD(params, lr=0.1), mlp)
    preconditioner, kept = KFACPreconditioner(run.model), list[tuple[Tensor, Tensor]]()
    for step in range(8):  # 5 to 7 without a refresh
        run.backward(step)
        preconditioner.step()
        kept += [(p.grad, p.grad.clone()) for p in run.model.parameters()]
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert all(torch.equal(grad, copied) for grad, copied in kept)


def test_preconditioner_in_a_closure() -> None:
    runs = [Run(lambda params: torch.optim.SGD(params, lr=0.1), mlp) for _ in range(2)]
    run, other = runs
    first, second = (KFACPreconditioner(each.model, lossfunc=each.lossfunc, fisher="exact") for each in runs)
    for step in range(3):
        run.backward(step)
        first.step()
        run.optimizer.step()

        def closure(step: int = step) -> Tensor:
            other.optimizer.zero_grad()
            loss = other.loss(step)
            loss.backward()
            return loss

        other.optimizer.step(lambda: second.step(closure))  # noqa: B023
    assert_close(run.weights(), other.weights(), rtol=0, atol=0)


def test_preconditioner_by_a_hook_and_in_front_of_muon() -> None:
    run = Run(lambda params, **o: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.05), mlp)
    rest = torch.optim.AdamW([p for p in run.model.parameters() if p.ndim != 2], lr=0.01)
    preconditioner = KFACPreconditioner(run.model)
    preconditioner.attach(run.model, run.lossfunc)
    run.optimizer.register_step_pre_hook(lambda *_: preconditioner.step())
    before = run.full_loss()
    for step in range(30):
        run.model.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        rest.step()
    assert counters(preconditioner)["step"] == 30 and run.full_loss() < before / 2
    twin = KFACPreconditioner(run.model)
    twin.load_state_dict(preconditioner.state_dict())
    for part in ("state", "run"):
        torch.testing.assert_close(numbers(twin)[part], numbers(preconditioner)[part], rtol=0, atol=0)


def test_condition_is_that_of_the_damped_factors() -> None:
    run = Run(KFACSGD, cnn, **DOUBLE).train(1)
    numbers = []
    for p in run.model.parameters():
        for inverse in run.optimizer.state[p]["curvature"].inverses:
            for matrix in inverse.reshape(-1, *inverse.shape[-2:]):
                numbers.append(torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix.inverse(), 1))
    torch.testing.assert_close(run.optimizer.metrics()["condition"], torch.stack(numbers).max())


@pytest.mark.parametrize(
    ("part", "forgotten"),
    [(Quantity, "extensions.*take"), (Solver, "renew"), (Eigenbasis, "change_basis")],
    ids=["collects nothing", "solves nothing", "changes no basis"],
)
def test_a_part_of_an_optimizer_that_lacks_a_method_cannot_be_built(part: type, forgotten: str) -> None:
    incomplete = type("Incomplete", (part,), {})
    with pytest.raises(TypeError, match=f"Incomplete.*{forgotten}"):
        incomplete()


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_bases_of_badly_scaled_factors_are_renewed(scale: float) -> None:
    """Squares of the entries are zero, or infinite."""
    torch.manual_seed(0)
    factor = torch.randn(4, 8) @ torch.randn(8, 4)
    factor = factor @ factor.mT
    basis = torch.linalg.eigh(factor).eigenvectors
    assert off_diagonals([scale * factor], [basis])[0] < 1e-3
    torch.testing.assert_close(*off_diagonals([scale * factor, factor], [torch.eye(4)] * 2))
    assert off_diagonals([0 * factor], [basis])[0] == 0  # of a dead layer, in any basis


@pytest.mark.parametrize("sizes", [(10, 16, 12, 4), (64, 32, 10)])
@pytest.mark.parametrize(
    "kind",
    [KFACSGD, EKFACSGD, KFACAdamW, functools.partial(KFACAdamW, fisher="exact"), DiagonalNewton],
    ids=["KFACSGD", "EKFACSGD", "KFACAdamW", "KFACAdamW exact", "DiagonalNewton"],
)
def test_steps_are_continuous_in_the_data(kind: Callable, sizes: tuple[int, ...]) -> None:
    """Also where a batch leaves directions without curvature, in which any basis is one of eigenvectors."""

    def train(noise: float) -> list[Tensor]:
        seeded, layers = torch.manual_seed(0), []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        model = nn.Sequential(*layers[:-1]).double()
        optimizer = kind(model)
        for _ in range(3):
            x, y = torch.randn(6, sizes[0]).double(), torch.randint(sizes[-1], (6,))
            x = x + noise * torch.randn(x.shape, dtype=x.dtype, generator=seeded)
            descend(optimizer, lambda: F.cross_entropy(model(x), y))  # noqa: B023
        return [p.detach() for p in model.parameters()]

    for a, b in zip(train(0.0), train(1e-12), strict=True):
        assert (a - b).abs().max() < 1e-5
