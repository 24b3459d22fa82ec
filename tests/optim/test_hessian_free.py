"""What `HessianFree` promises: its mathematics against dense references, the closure, the contract of optimizers.

Tests of the folder `optim/hessian_free`, and of `optim/closures.py`.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Lambda, Once, Sine
from optimizer_cases import checkpoint, digits, mlp
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from curvopt import CurvoptError, L2Regularizer, backpack, extend
from curvopt.extensions import DiagGGNExact
from curvopt.hessianfree import Solution
from curvopt.optim import HessianFree
from curvopt.optim.closures import Closure
from curvopt.optim.hessian_free import optimizer as hessian_free
from curvopt.optim.hessian_free.optimizer import backtrack, levenberg_marquardt, line_search, solve
from curvopt.optim.hessian_free.quadratic_model import Differentiated, Objective, QuadraticModel

float64 = torch.float64


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def split(v: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [piece.view_as(t) for piece, t in zip(v.split([t.numel() for t in like]), like, strict=True)]


def weights(module: nn.Module) -> Tensor:
    return flat(module.parameters()).detach().clone()


class Tied(nn.Module):
    """A residual net with batch norm whose last layer is the first one transposed, and an auxiliary output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.block = nn.Linear(3, 3)
        self.unused = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.norm(self.first(x)))
        h = h + torch.sigmoid(self.block(h))
        return F.linear(h, self.first.weight.T), h


class Problem:
    """Two losses, one of which sees what the other is computed from, scaled, plus a regularizer."""

    def __init__(self, train: bool = False, extended: bool = True):
        self.model = Tied().to(float64).train(train)
        self.x, self.y = torch.randn(6, 4, dtype=float64), torch.randint(4, (6,))
        self.regularizer = L2Regularizer([self.model.block.weight], 0.2)
        if extended:
            extend(self.model)
        self.parameters = list(self.model.parameters())

    def losses(self, *outputs: Tensor) -> Tensor:
        logits, hidden = outputs
        squares = F.mse_loss(hidden, torch.ones_like(hidden), reduction="sum")
        return 3 * F.cross_entropy(logits, self.y) + 0.5 * squares

    def loss(self) -> Tensor:
        return self.losses(*self.model(self.x)) + 2 * self.regularizer()

    def dense(self, decay: float = 0.0) -> tuple[Tensor, Tensor]:
        """Gradient and Gauss-Newton matrix by torch.func, in running statistics' stead those of the mode."""
        names = [name for name, _ in self.model.named_parameters()]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

        def outputs(w: Tensor) -> Tensor:
            state = dict(zip(names, split(w, self.parameters), strict=True)) | copy.deepcopy(buffers)
            return torch.cat(torch.func.functional_call(self.model, state, (self.x,)), 1)

        def of_outputs(z: Tensor) -> Tensor:
            return self.losses(z[:, :4], z[:, 4:])

        w = weights(self.model)
        z = outputs(w)
        J = torch.func.jacrev(outputs)(w).reshape(z.numel(), -1)
        # at fixed hidden units, though logits depend on them
        H = torch.func.hessian(of_outputs)(z).reshape(z.numel(), -1)
        g = torch.func.grad(of_outputs)(z).reshape(-1) @ J
        shift = flat([torch.full_like(p, decay + 0.4 * (p is self.model.block.weight)) for p in self.parameters])
        return g + shift * w, J.T @ H @ J + shift.diag()


def model_of(closure: Callable[[], Any], parameters: list[nn.Parameter], decay: float = 0.0) -> QuadraticModel:
    decays = [decay] * len(parameters)
    with torch.no_grad():
        objective = Objective(Closure(closure, parameters), parameters, decays, 1.0)
        return QuadraticModel(objective.differentiate(), parameters, decays)


def matrix_of(model: QuadraticModel) -> Tensor:
    like = list(model.parameters)
    eye = torch.eye(sum(p.numel() for p in like), dtype=like[0].dtype)
    return torch.stack([flat(model.product(split(row, like))) for row in eye])


# ------------------------------------------------------------------------------------------------------ the mathematics


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_gradient_and_products_are_the_dense_ones(train: bool, extended: bool) -> None:
    problem = Problem(train, extended)
    model = model_of(problem.loss, problem.parameters, decay=0.1)
    gradient, matrix = problem.dense(decay=0.1)
    assert_close(flat(model.gradient), gradient)
    assert_close(matrix_of(model), matrix)


@pytest.mark.parametrize("extended", [True, False])
def test_weight_counts_mean_losses(extended: bool) -> None:
    problem = Problem(extended=extended)
    # a mean cross-entropy three times, and half a sum over the samples of sums over the entries
    assert model_of(problem.loss, problem.parameters).weight == pytest.approx(3 + 0.5 * len(problem.x))


def least_squares() -> tuple[nn.Module, Callable[[], Tensor], list[Tensor]]:
    A, b = torch.randn(20, 5, dtype=float64), torch.randn(20, 3, dtype=float64)
    model = nn.Linear(5, 3, bias=False).to(float64)
    return model, lambda: F.mse_loss(model(A), b), [torch.linalg.lstsq(A, b).solution.T]


def linear_with_decay() -> tuple[nn.Module, Callable[[], Tensor], list[Tensor]]:
    """Curved by the decay alone."""
    net, x, weights = nn.Linear(3, 2).to(float64), torch.randn(5, 3, dtype=float64), torch.randn(5, 2, dtype=float64)
    return net, lambda: (net(x) * weights).sum(), [-2 * weights.T @ x, -2 * weights.sum(0)]


def output_itself() -> tuple[nn.Module, Callable[[], Tensor], list[Tensor]]:
    model, target = nn.ParameterList([torch.randn(4, 3, dtype=float64)]), torch.randn(4, 3, dtype=float64)
    return model, lambda: F.mse_loss(model[0], target), [target]


@pytest.mark.parametrize("quadratic", [least_squares, linear_with_decay, output_itself])
def test_a_full_solve_without_damping_is_the_minimum(quadratic: Callable) -> None:
    model, loss, expected = quadratic()
    decay = 0.5 if quadratic is linear_with_decay else 0.0
    optimizer = HessianFree(model.parameters(), damping=0.0, cg_progress=0.0, weight_decay=decay)
    optimizer.step(loss)
    assert_close([p.detach() for p in model.parameters()], expected)
    metrics = optimizer.metrics()
    assert metrics["reduction_ratio"] == pytest.approx(1) and metrics["rate"] == 1
    assert optimizer.param_groups[0]["damping"] == 0


def test_a_full_solve_is_the_damped_newton_step() -> None:
    problem = Problem()
    model = model_of(problem.loss, problem.parameters, decay=0.1)
    gradient, matrix = problem.dense(decay=0.1)
    zeros = [torch.zeros_like(p) for p in problem.parameters]
    found, iterates = solve(model, [0.3] * len(zeros), zeros, 500, 0.0)
    expected = torch.linalg.solve(matrix + 0.3 * model.weight * torch.eye(len(matrix), dtype=float64), -gradient)
    assert_close(flat(found.x), expected)
    assert iterates[-1] is found.x


def test_iterates_are_kept_at_growing_distances() -> None:
    x, y = torch.randn(60, 40, dtype=float64), torch.randn(60, 1, dtype=float64)
    net = nn.Linear(40, 1).to(float64)
    model = model_of(lambda: F.mse_loss(net(x), y), list(net.parameters()))
    zeros = [torch.zeros_like(p) for p in net.parameters()]

    def iterate(k: int) -> Tensor:
        return flat(solve(model, [0.0, 0.0], zeros, k, 0.0)[0].x)

    kept = [flat(x) for x in solve(model, [0.0, 0.0], zeros, 25, 0.0)[1]]
    steps = sorted({math.ceil(1.3**k) for k in range(13)} | {25})
    assert len(kept) == len(steps)
    for x, k in zip(kept, steps, strict=True):
        assert_close(x, iterate(k))


def test_levenberg_marquardt() -> None:
    for ratio, factor in ((-math.inf, 1.5), (0.24, 1.5), (0.25, 1), (0.75, 1), (0.76, 2 / 3), (math.nan, 1)):
        assert levenberg_marquardt(ratio) == factor


def test_backtracking_stops_where_the_objective_rises() -> None:
    for values, expected, calls in (
        ([5.0, 1.0, 3.0, 4.0], 1.0, 4),
        ([0.0, 9.0, 3.0, 4.0], 3.0, 3),
        ([2.0, 3.0, math.inf, math.inf], 2.0, 4),
        ([math.inf] * 3, math.inf, 3),
        ([1.0], 1.0, 1),
    ):
        seen = []

        def f(x: list[Tensor], values: list[float] = values, seen: list[int] = seen) -> float:
            seen.append(int(x[0]))
            return values[int(x[0])]

        best, x = backtrack(f, [[torch.tensor(i)] for i in range(len(values))])
        assert best == expected and (best == math.inf or values[int(x[0])] == best) and len(seen) == calls


def test_line_search_meets_armijo() -> None:
    def f(rate: float) -> float:
        return -rate + 2 * rate**2 if rate < 0.7 else math.inf

    value, rate = line_search(f, 0.0, f(1.0), -1.0)
    assert value == f(rate) <= -0.01 * rate and f(rate / 0.8) > -0.01 * rate / 0.8
    assert line_search(f, 0.0, f(1.0), 1.0) == (0.0, 0.0)  # no descent direction
    assert line_search(lambda rate: rate, 0.0, 1.0, -1.0) == (0.0, 0.0)
    assert line_search(lambda rate: -0.005 * rate, 0.0, -0.005, -1.0) == (0.0, 0.0)  # less than the slope promises
    assert line_search(lambda rate: 0.0, 0.0, 0.0, 0.0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("slope", "resolution", "tried"), [(1.0, 0.0, 0), (-1.0, 0.0, 41), (-1.0, 0.5, 3), (0.0, 0.0, 0)]
)
def test_line_search_tries_no_rate_that_can_promise_nothing(slope: float, resolution: float, tried: int) -> None:
    rates: list[float] = []
    assert line_search(lambda rate: rates.append(rate) or 1.0, 0.0, 1.0, slope, resolution) == (0.0, 0.0)
    assert rates == pytest.approx([0.8**k for k in range(1, tried + 1)])


def test_reduction_ratio_compares_with_the_undamped_model() -> None:
    problem = Problem()
    optimizer = HessianFree(problem.model.parameters(), weight_decay=0.1, damping=0.5, lr=0.8)
    for _ in range(3):
        before, start = weights(problem.model), problem.loss().item() + 0.05 * weights(problem.model).square().sum()
        gradient, matrix = problem.dense(decay=0.1)
        optimizer.step(problem.loss)
        delta = weights(problem.model) - before
        end = problem.loss().item() + 0.05 * weights(problem.model).square().sum()
        metrics = optimizer.metrics()
        assert metrics["loss_before"] == pytest.approx(float(start))
        assert metrics["loss_after"] == pytest.approx(float(end))
        predicted = gradient @ delta + delta @ matrix @ delta / 2
        assert metrics["reduction_ratio"] == pytest.approx(float((end - start) / predicted), rel=1e-6)
        factor = levenberg_marquardt(float((end - start) / predicted))
        assert optimizer.param_groups[0]["damping"] == pytest.approx(metrics["damping"] * factor)
        assert metrics["step_norm"] == pytest.approx(float(delta.norm()))


def test_cg_starts_at_the_decayed_solution_before(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []
    solutions: list[Tensor] = []

    def recorded(model: Any, damping: Any, x0: Any, *rest: Any) -> Any:
        found, iterates = solve(model, damping, x0, *rest)
        starts.append(x0 and flat(x0))
        solutions.append(flat(found.x))
        return found, iterates

    monkeypatch.setattr(hessian_free, "solve", recorded)
    for decay in (0.7, 0.0):
        starts.clear(), solutions.clear()
        problem = Problem()
        optimizer = HessianFree(problem.parameters, cg_decay=decay)
        for _ in range(3):
            optimizer.step(problem.loss)
        assert starts[0] is None and solutions[0].any()
        if not decay:
            assert starts == [None] * 3
            continue
        for start, solution in zip(starts[1:], solutions[:-1], strict=True):
            assert_close(start, decay * solution)


# ------------------------------------------------------------------------------------------------------------- training


def autoencoder() -> nn.Module:
    sizes = [64, 40, 28, 18, 10, 4, 10, 18, 28, 40, 64]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


@pytest.mark.parametrize(("net", "steps", "factor"), [(mlp, 20, 0.3), (autoencoder, 8, 0.85)])
def test_gets_further_than_sgd_by_as_many_gradients(net: Callable, steps: int, factor: float) -> None:
    """A forward counts a third of a gradient, a product with the matrix four thirds."""
    x, y = (each[: 900 if net is mlp else 400] for each in digits())
    lossfunc, y = (F.cross_entropy, y) if net is mlp else (F.binary_cross_entropy_with_logits, x.flatten(1))
    floor = 0.0 if net is mlp else F.binary_cross_entropy(x, x).item()  # the entropy of the grey images

    def train(make: Callable[..., torch.optim.Optimizer], steps: int) -> tuple[float, float]:
        torch.manual_seed(0)
        model, cost = net(), 0.0
        optimizer: Any = make(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = lossfunc(model(x), y)
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
            if isinstance(optimizer, HessianFree):
                metrics: dict[str, Any] = optimizer.metrics()
                cost += (metrics["cg_iterations"] + 2) * 4 / 3 + metrics["evaluations"] / 3 + 2
        return lossfunc(model(x), y).item(), cost

    loss, cost = train(HessianFree, steps)
    rates = (0.1, 0.3, 1.0)
    baseline = min(train(partial(torch.optim.SGD, lr=lr, momentum=0.9), round(cost))[0] for lr in rates)
    assert loss - floor < factor * (baseline - floor), (loss, baseline, cost)


# ---------------------------------------------------------------------------------------------------------- the closure


class Small:
    """A classifier with an optimizer."""

    def __init__(
        self, model: Callable[[], nn.Module] | None = None, dtype: torch.dtype = torch.float32, **options: Any
    ):
        torch.manual_seed(0)
        self.model = (model or self.net)().to(dtype)
        self.x, self.y = torch.randn(20, 6, dtype=dtype), torch.randint(4, (20,))
        self.optimizer = HessianFree(self.model.named_parameters(), **options)
        self.calls = 0

    @staticmethod
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(self) -> Tensor:
        self.calls += 1
        return F.cross_entropy(self.model(self.x), self.y)

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, steps: int) -> Tensor:
        for _ in range(steps):
            self.optimizer.step(self.closure)
        return weights(self.model)


def conditional(small: Small) -> Tensor:
    if torch.is_grad_enabled():
        small.optimizer.zero_grad(set_to_none=False)
    loss = small.loss()
    if loss.requires_grad:
        loss.backward()
    return loss


def without_result(small: Small) -> None:
    torch.autograd.backward([small.loss()])


def without_zero_grad(small: Small) -> float:
    loss = small.loss()
    loss.backward()
    return 3.0 * loss.item()  # what is differentiated counts


def zeroing(small: Small) -> Tensor:
    small.optimizer.zero_grad(set_to_none=False)
    loss = small.loss()
    loss.backward()
    return loss


def halves(small: Small) -> Tensor:
    for _ in range(2):
        (small.loss() / 2).backward()
    return torch.zeros(())


def with_gradients(small: Small) -> Tensor:
    with torch.enable_grad():
        return small.closure()


def as_sums(small: Small) -> Tensor:
    """Damping means the same for any reduction."""
    return 7 * F.cross_entropy(small.model(small.x), small.y, reduction="sum")


def repeated(small: Small) -> Tensor:
    return F.cross_entropy(small.model(small.x.repeat(3, 1)), small.y.repeat(3))


def micro_batches(small: Small) -> Tensor:
    for part in (slice(5), slice(5, 20)):
        loss = F.cross_entropy(small.model(small.x[part]), small.y[part], reduction="sum") / 20
        loss.backward()
    return loss


def scaled(small: Small) -> Tensor:
    return 7 * small.loss()


SUMS = [as_sums, scaled, repeated, micro_batches]


@pytest.mark.parametrize(
    "form", [Small.loss, conditional, zeroing, without_result, without_zero_grad, halves, with_gradients, *SUMS]
)
def test_closures_of_all_forms_take_the_same_steps(form: Callable[[Small], Any]) -> None:
    options = {"damping": 0.05, "cg_progress": 0.0} if form in SUMS else {}
    expected, small = Small(dtype=float64, **options), Small(dtype=float64, **options)
    for _ in range(4):
        expected.train(1)
        small.optimizer.step(lambda: form(small))
        bound = {"rtol": 1e-6, "atol": 1e-8} if form in SUMS else {"rtol": 1e-9, "atol": 1e-12}
        assert_close(weights(expected.model), weights(small.model), **bound)
    ratios = [each.optimizer.metrics()["reduction_ratio"] for each in (expected, small)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_what_the_closure_returns_comes_back_without_its_graph() -> None:
    small = Small()
    before = small.loss()
    loss = small.optimizer.step(small.closure)
    assert_close(loss, before.detach())
    assert not loss.requires_grad
    assert small.optimizer.step(lambda: without_result(small)) is None


def test_gradients_are_those_of_the_first_call() -> None:
    for form in (Small.closure, conditional, zeroing):
        small = Small()
        small.closure()
        expected = [p.grad.clone() for p in small.model.parameters()]
        calls = small.calls
        small.optimizer.step(lambda small=small, form=form: form(small))
        assert small.calls > calls + 2
        assert all(torch.equal(p.grad, g) for p, g in zip(small.model.parameters(), expected, strict=True))
    untouched = Small()
    untouched.optimizer.step(untouched.loss)
    assert all(p.grad is None for p in untouched.model.parameters())


def test_the_closure_is_called_with_gradients_first_and_autograd_is_left_as_it_was() -> None:
    small, modes = Small(), []
    backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        return small.closure()

    with torch.no_grad():
        small.optimizer.step(closure)
    assert modes[0] and len(modes) > 2 and not any(modes[1:])
    with pytest.raises(KeyError):
        small.optimizer.step(lambda: {}["loss"])
    assert torch.autograd._engine_run_backward is backward  # type: ignore[attr-defined]


def test_closures_may_differentiate_by_themselves() -> None:
    """A network that is to satisfy u' = cos: the residual contains a derivative."""
    torch.manual_seed(0)
    u = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    t = torch.linspace(0, 3, 50).unsqueeze(1).requires_grad_()
    optimizer = HessianFree(u.parameters(), damping=1e-3)

    def closure() -> Tensor:
        value = u(t)
        (slope,) = torch.autograd.grad(value.sum(), t, create_graph=True)
        return F.mse_loss(slope, t.detach().cos()) + F.mse_loss(value[0], torch.zeros(1))

    for _ in range(30):
        optimizer.step(closure)
    assert_close(u(t).detach(), t.detach().sin(), atol=0.02, rtol=0)


def test_all_calls_of_a_step_draw_the_same_random_numbers() -> None:
    small, masks = Small(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))), []
    small.model[1].register_forward_hook(lambda module, args, out: masks.append(out.detach() == 0))
    state = torch.get_rng_state()
    small.model(small.x)
    after_one_call = torch.get_rng_state()
    masks.clear()
    torch.set_rng_state(state)
    small.optimizer.step(small.closure)
    assert len(masks) > 2 and all(torch.equal(mask, masks[0]) for mask in masks)
    assert torch.equal(torch.get_rng_state(), after_one_call)
    masks = [masks[0]]
    small.optimizer.step(small.closure)
    assert not torch.equal(masks[0], masks[-1])


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def test_running_statistics_change_once_in_a_step() -> None:
    small, once = Small(norms), Small(norms)
    once.model(once.x)
    buffers = dict(small.model.named_buffers())
    small.optimizer.step(small.closure)
    assert small.calls > 2
    for (name, buffer), expected in zip(small.model.named_buffers(), once.model.buffers(), strict=True):
        assert buffer is buffers[name] and torch.equal(buffer, expected)


def test_an_open_context_sees_an_ordinary_backward() -> None:
    small, plain = Small(), Small()
    extend(small.model), extend(plain.model)
    with backpack(DiagGGNExact()):
        plain.closure()
        small.optimizer.step(small.closure)
    for p, q in zip(small.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p.diag_ggn_exact, q.diag_ggn_exact)
        assert not torch.equal(p, q)


@pytest.mark.parametrize("differentiates", [False, True])
def test_a_context_inside_of_the_closure_sees_its_first_call(differentiates: bool) -> None:
    small, plain, modules = Small(dtype=float64), Small(dtype=float64), []
    extend(small.model), extend(plain.model)

    def closure() -> Tensor:
        small.optimizer.zero_grad()
        with backpack(DiagGGNExact(), extension_hook=modules.append):
            loss = small.loss()
            loss.backward()
        if differentiates:  # then further calls have gradients, too
            torch.autograd.grad(small.loss(), small.model[0].weight)
        return loss

    for _ in range(3):
        with backpack(DiagGGNExact()):
            plain.optimizer.step(plain.closure)
        modules.clear()
        small.optimizer.step(closure)
        assert modules == [small.model[2], small.model[0]]
        for p, q in zip(small.model.parameters(), plain.model.parameters(), strict=True):
            assert_close(p.diag_ggn_exact, q.diag_ggn_exact, rtol=1e-9, atol=1e-12)
            assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outside", [False, True], ids=["loss within", "loss outside"])
@pytest.mark.parametrize("lossfunc", [F.cross_entropy, F.mse_loss])
def test_autocast_inside_of_the_closure(lossfunc: Callable, outside: bool, dtype: torch.dtype) -> None:
    """It trains as in float32, whether the loss' input is of half precision or only what is before it."""
    losses = []
    for enabled in (True, False):
        small = Small()
        y = F.one_hot(small.y, 4).float() if lossfunc is F.mse_loss else small.y

        def closure(small: Small = small, y: Tensor = y, enabled: bool = enabled) -> Tensor:
            with torch.autocast("cpu", dtype, enabled):
                z = small.model(small.x)
                loss = None if outside else lossfunc(z, y)
            return lossfunc(z, y.to(z.dtype) if lossfunc is F.mse_loss else y) if loss is None else loss

        for _ in range(12):
            small.optimizer.step(closure)
        losses.append(lossfunc(small.model(small.x), y).item())
    start = lossfunc(Small().model(small.x), y).item()
    mixed, full = losses
    assert mixed < full + 0.02 * start < start / 2


# --------------------------------------------------------------------------------------------------------- the contract


def test_param_groups() -> None:
    small = Small(dtype=float64)
    first, second, *rest = small.model.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": [second], "damping": 1e8}, {"params": rest}]
    small.optimizer = HessianFree(groups)
    before = [p.detach().clone() for p in small.model.parameters()]
    small.train(1)
    moved = [(p - q).norm().item() for p, q in zip(small.model.parameters(), before, strict=True)]
    assert moved[0] == 0 and 0 < moved[1] < 1e-8 and min(moved[2:]) > 1e-2


def test_weight_decay_is_the_l2_term() -> None:
    decayed, written = Small(dtype=float64), Small(dtype=float64)
    groups = [{"params": [decayed.model[0].weight], "weight_decay": 0.3}]
    groups += [{"params": [decayed.model[0].bias, *decayed.model[2].parameters()]}]
    decayed.optimizer = HessianFree(groups)
    regularizer = L2Regularizer([written.model[0].weight], 0.3)
    for _ in range(4):
        decayed.train(1)
        written.optimizer.step(lambda: written.loss() + regularizer())
        assert_close(weights(decayed.model), weights(written.model), rtol=1e-6, atol=1e-8)
        for name in ("loss_before", "loss_after", "reduction_ratio"):
            assert decayed.optimizer.metrics()[name] == pytest.approx(written.optimizer.metrics()[name], rel=1e-6)


def test_learning_rate_schedule() -> None:
    small = Small(lr=torch.tensor(1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(small.optimizer, lambda step: float(step < 2))
    for _ in range(2):
        small.train(1)
        scheduler.step()
    before, damping = weights(small.model), small.optimizer.param_groups[0]["damping"]
    assert torch.equal(small.train(1), before) and small.optimizer.param_groups[0]["damping"] == damping


def test_frozen_parameters_stay() -> None:
    small = Small()
    small.model[0].weight.requires_grad_(False)
    before = small.model[0].weight.clone()
    after = small.train(2)
    assert torch.equal(small.model[0].weight, before) and small.optimizer.metrics()["step_norm"] > 0
    assert not torch.equal(after, weights(Small().model))


def test_resume_is_bit_for_bit() -> None:
    options = {"weight_decay": 1e-3}
    straight, first = Small(norms, **options), Small(norms, **options)
    straight.train(7)
    first.train(4)
    second = Small(norms, **options)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(torch.load(checkpoint(first.optimizer), weights_only=True))
    assert torch.equal(second.train(3), weights(straight.model))
    assert_equal(snapshot(second), snapshot(straight))


def test_copies_continue_alike() -> None:
    small = Small(cg_decay=0.5, weight_decay=0.1)
    small.train(2)
    twin = copy.deepcopy(small)
    assert twin.optimizer.metrics() == small.optimizer.metrics()
    assert torch.equal(small.train(2), twin.train(2))


def test_metrics() -> None:
    small = Small()
    assert small.optimizer.metrics() == {}
    small.train(1)
    metrics = small.optimizer.metrics()
    assert metrics["evaluations"] == small.calls
    assert metrics["cg_reason"] in ("residual", "progress", "curvature", "maxiter")
    assert 0 < metrics["cg_iterations"] <= 250 and metrics["loss_after"] < metrics["loss_before"]
    capped = Small(cg_iterations=2)
    capped.train(1)
    assert capped.optimizer.metrics()["cg_iterations"] == 2 and capped.optimizer.metrics()["cg_reason"] == "maxiter"


def trained_on_parts(rank: int, ranks: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    small = Small(dtype=float64, weight_decay=0.01)
    model = small.model
    small.model = nn.parallel.DistributedDataParallel(model)
    small.x, small.y = small.x[rank::ranks], small.y[rank::ranks]
    small.train(4)
    torch.save((weights(model), small.optimizer.metrics()), f"{results}{rank}")
    if rank == 0:  # would wait for the other
        alone = Small()
        alone.optimizer.process_group = None
        copy.deepcopy(alone).train(1)
    dist.destroy_process_group()


def test_two_processes_on_halves_take_the_steps_of_one(tmp_path: Path) -> None:
    arguments = (2, str(tmp_path / "store"), str(tmp_path / "rank"))
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(trained_on_parts, arguments, 2, start_method=method)
    one = Small(dtype=float64, weight_decay=0.01)
    one.train(4)
    results = [torch.load(tmp_path / f"rank{rank}") for rank in range(2)]
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert_close(results[0][0], weights(one.model), rtol=1e-6, atol=1e-8)
    assert results[0][1]["reduction_ratio"] == pytest.approx(one.optimizer.metrics()["reduction_ratio"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------- errors and limits


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 100.0])
def test_without_improvement_parameters_stay_and_damping_rises(value: float) -> None:
    small = Small(norms)
    small.train(2)
    before, calls, damping = weights(small.model), small.calls, small.optimizer.param_groups[0]["damping"]
    small.optimizer.step(lambda: small.loss() + (0 if small.calls == calls + 1 else value))
    assert torch.equal(weights(small.model), before)
    assert small.optimizer.param_groups[0]["damping"] == 1.5 * damping
    metrics = small.optimizer.metrics()
    assert metrics["rate"] == metrics["step_norm"] == 0 and metrics["reduction_ratio"] == -math.inf
    assert metrics["loss_after"] == metrics["loss_before"]
    assert not any(small.optimizer.state[p] for p in small.model.parameters())  # CG starts afresh
    small.train(1)
    assert small.optimizer.metrics()["rate"] > 0


def test_candidates_that_are_not_finite_are_passed_over() -> None:
    """A loss that exists near the present parameters only."""
    small = Small(damping=1e-6)
    before = weights(small.model)
    moved_far = lambda: (weights(small.model) - before).norm() > 0.5  # noqa: E731
    small.optimizer.step(lambda: small.loss() * (math.nan if moved_far() else 1.0))
    moved = (weights(small.model) - before).norm()
    assert 0 < moved <= 0.5 and small.optimizer.metrics()["loss_after"] < small.optimizer.metrics()["loss_before"]


def test_directions_that_are_not_finite_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def infinite(model: QuadraticModel, *_: Any) -> tuple[Solution, list]:
        x = [torch.full_like(g, -math.inf) for g in model.gradient]
        return Solution(x, 1, "curvature"), [x]

    small = Small()
    before = weights(small.model)
    monkeypatch.setattr(hessian_free, "solve", infinite)
    small.train(1)
    assert torch.equal(weights(small.model), before)
    assert small.optimizer.metrics()["step_norm"] == 0 and small.optimizer.metrics()["reduction_ratio"] == -math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_squares_may_leave_the_range_of_float16(dtype: torch.dtype) -> None:
    """The gradient is in its range, its squared norm is not."""
    model = nn.Linear(1, 1).to(dtype)
    optimizer, x = HessianFree(model.parameters()), torch.ones(1, 1, dtype=dtype)
    for _ in range(5):
        optimizer.step(lambda: F.mse_loss(model(x), 150 * x))
    assert (model(x) - 150).abs() < 1


def snapshot(small: Small) -> list:
    """All tensors and numbers that a checkpoint holds."""
    return copy.deepcopy(tree_leaves((small.model.state_dict(), small.optimizer.state_dict())))


def assert_equal(left: list, right: list) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def refuses(small: Small, closure: Any, match: str) -> None:
    """A step raises and has changed nothing."""
    before = snapshot(small)
    with pytest.raises(CurvoptError, match=match):
        small.optimizer.step(closure)
    assert_equal(snapshot(small), before)


def test_steps_that_cannot_be_taken_change_nothing() -> None:
    small = Small(norms)
    small.train(2)
    refuses(small, None, r"optimizer\.step\(closure\)")
    refuses(small, lambda: small.loss().item(), "must return the loss.*returned a float")
    refuses(small, lambda: small.loss().detach(), r"returned a tensor of shape \[\] without a graph")
    refuses(small, lambda: F.cross_entropy(small.model(small.x), small.y, reduction="none"), r"shape \[20\]")
    refuses(small, lambda: torch.autograd.backward([get_gradient_edge(small.loss())], [torch.ones(())]), "GradientEdge")
    small.model.requires_grad_(False)
    refuses(small, small.loss, "no parameter requires a gradient")
    small.model.requires_grad_(True)
    refuses(small, lambda: small.loss() * math.nan, r"loss of the closure \(nan\) is not finite")
    refuses(small, lambda: small.loss() * math.inf, r"loss of the closure \(inf\) is not finite")
    hook = small.model[-1].bias.register_hook(lambda grad: grad * math.inf)
    refuses(small, small.closure, r"gradient of 3\.bias is not finite")
    hook.remove()
    small.x[0] = math.nan
    refuses(small, small.closure, "not finite")
    table = Small(lambda: nn.Sequential(nn.Embedding(20, 4, sparse=True)))
    table.x = torch.arange(20)
    refuses(table, table.closure, r"0\.weight.*dense gradient.*sparse=False")


@pytest.mark.parametrize(
    "loss",
    [
        lambda small, z: z.sin().mean(),
        lambda small, z: F.cross_entropy(z, small.y).exp(),
        lambda small, z: (F.cross_entropy(z, small.y, reduction="none") * torch.linspace(-1, 1, 20)).mean(),
        lambda small, z: F.cross_entropy(z, small.y) + 0.01 * small.model[0].weight.cosh().sum(),
    ],
)
def test_any_objective_that_is_differentiable_twice_falls(loss: Callable) -> None:
    """By its Hessian, where CG stops at directions that are not curved upwards."""
    small = Small(norms)
    values = [float(small.optimizer.step(lambda: loss(small, small.model(small.x)))) for _ in range(12)]
    assert small.optimizer.metrics()["is_hessian"] == 1
    assert values[-1] < values[0] - 0.1 and values == sorted(values, reverse=True)


def test_damping_rises_where_the_first_direction_is_curved_downwards() -> None:
    """The objective falls along the gradient, though no step of CG does: distances of a triplet are no convex loss."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    anchor, other = torch.randn(2, 64, 4).double()
    near, optimizer = anchor + 0.3 * torch.randn(64, 4).double(), HessianFree(model)
    closure = lambda: F.triplet_margin_loss(model(anchor), model(near), model(other))  # noqa: E731
    first = float(optimizer.step(closure))
    assert optimizer.metrics()["cg_reason"] == "curvature" and optimizer.metrics()["step_norm"] == 0
    assert [float(optimizer.step(closure)) for _ in range(12)][-1] < first - 0.1


def test_products_of_an_unknown_objective_are_those_of_the_hessian() -> None:
    w = nn.Parameter(torch.randn(3, dtype=torch.float64))
    model = QuadraticModel(Differentiated([w.sinh().prod()], [torch.tensor(2.0).double()], [w]), [w], [0.5])
    H = torch.autograd.functional.hessian(lambda v: 2 * v.sinh().prod(), w.detach()) + 0.5 * torch.eye(3)
    torch.testing.assert_close(torch.stack([model.product([v])[0] for v in torch.eye(3).double()]), H)


def test_exceptions_of_later_calls_change_nothing() -> None:
    small = Small(norms)
    small.train(2)
    before, calls = snapshot(small), small.calls

    def closure() -> Tensor:
        if small.calls == calls + 2:
            raise KeyError
        return small.closure()

    with pytest.raises(KeyError):
        small.optimizer.step(closure)
    assert small.calls == calls + 2
    assert_equal(snapshot(small), before)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_rounding_errors_at_a_minimum_do_not_change_the_damping(noise: float) -> None:
    torch.manual_seed(0)
    model, x, error = nn.Linear(10, 4), torch.randn(64, 10), noise * torch.randn(64, 4)
    optimizer, truth = HessianFree(model.parameters()), torch.randn(10, 4)
    for _ in range(60):
        optimizer.step(lambda: F.mse_loss(model(x), x @ truth + error))
    assert optimizer.param_groups[0]["damping"] < 1
    for _ in range(5):  # another task
        optimizer.step(lambda: F.mse_loss(model(x), x @ -truth + error))
    assert optimizer.metrics()["loss_after"] < 1e-6 + noise


def test_jacobians_are_compared_up_to_rounding_near_a_minimum() -> None:
    torch.manual_seed(0)
    model, y = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randint(4, (64,))
    nn.init.constant_(model[0].bias, -1000.0)  # no unit is active
    optimizer = HessianFree(model.parameters(), damping=0.0)
    losses = [optimizer.step(lambda: F.cross_entropy(model(torch.ones(64, 10)), y)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_state_of_another_model_is_refused() -> None:
    small = Small()
    small.train(1)
    other = Small(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)))
    other.optimizer.load_state_dict(small.optimizer.state_dict())
    refuses(other, other.closure, r"0\.weight: .*shape \[8, 6\].*\[9, 6\]")


class Hidden(Sine):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.data * ctx.saved_tensors[0].cos()


def attention(x: Tensor) -> Tensor:
    x = x.view(1, 5, 4, 8)
    return F.scaled_dot_product_attention(x, x, x).reshape(20, 8)


def flash_attention(x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return attention(x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("function", "match"),
    [
        (flash_attention, "no second derivative.*SDPBackend.MATH"),
        (Once.apply, "marked as once_differentiable"),
        (Hidden.apply, "by double backward is not that by backward"),
    ],
)
def test_operations_without_second_derivative_are_refused(function: Callable, match: str, last: bool) -> None:
    def net(function: Callable) -> nn.Module:
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)]
        return nn.Sequential(*layers, Lambda(function), *([] if last else [nn.Linear(8, 4)]))

    small = Small(lambda: net(function))
    refuses(small, small.closure, match)
    small = Small(lambda: net(attention if function is flash_attention else Sine.apply))
    small.train(1)
    assert small.optimizer.metrics()["rate"] > 0
