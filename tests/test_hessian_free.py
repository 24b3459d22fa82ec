"""What `HessianFree` promises: the mathematics against dense references, the closure, and the contract of optimizers."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import CurvoptError, L2Regularizer, backpack, extend
from curvopt.extensions import DiagGGNExact
from curvopt.optim import HessianFree
from curvopt.optim.closures import Closure
from curvopt.optim.hessian_free import (
    Objective,
    QuadraticModel,
    backtrack,
    levenberg_marquardt,
    line_search,
    solve,
)

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
        self.cross_entropy, self.mse = nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")
        self.regularizer = L2Regularizer([self.model.block.weight], 0.2)
        if extended:
            extend(self.model), extend(self.cross_entropy), extend(self.mse)
        self.parameters = list(self.model.parameters())

    def losses(self, *outputs: Tensor) -> Tensor:
        logits, hidden = outputs
        return 3 * self.cross_entropy(logits, self.y) + 0.5 * self.mse(hidden, torch.ones_like(hidden))

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


def checkpoint(optimizer: torch.optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


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


def test_a_full_solve_without_damping_is_the_newton_step() -> None:
    A, b = torch.randn(20, 5, dtype=float64), torch.randn(20, 3, dtype=float64)
    model = nn.Linear(5, 3, bias=False).to(float64)
    optimizer = HessianFree(model.parameters(), damping=0.0, cg_progress=0.0)
    optimizer.step(lambda: F.mse_loss(model(A), b))
    assert_close(model.weight.detach().T, torch.linalg.lstsq(A, b).solution)
    metrics = optimizer.metrics()
    assert metrics["reduction_ratio"] == pytest.approx(1) and metrics["rate"] == 1
    assert optimizer.param_groups[0]["damping"] == 0


def test_parameters_may_be_the_outputs() -> None:
    p = nn.Parameter(torch.randn(4, 3, dtype=float64))
    target = torch.randn(4, 3, dtype=float64)
    HessianFree([p], damping=0.0).step(lambda: F.mse_loss(p, target))
    assert_close(p.detach(), target)


@pytest.mark.parametrize("samples", [0, 3])
def test_a_full_solve_is_the_damped_newton_step(samples: int) -> None:
    problem = Problem()
    model = model_of(problem.loss, problem.parameters, decay=0.1)
    gradient, matrix = problem.dense(decay=0.1)
    zeros = [torch.zeros_like(p) for p in problem.parameters]
    found, iterates = solve(model, [0.3] * len(zeros), zeros, 500, 0.0, samples)
    expected = torch.linalg.solve(matrix + 0.3 * model.weight * torch.eye(len(matrix), dtype=float64), -gradient)
    assert_close(flat(found.x), expected)
    assert iterates[-1] is found.x


@pytest.mark.parametrize("change", ["sum", "scaled", "repeated", "micro-batches"])
def test_damping_means_the_same_for_any_reduction_scale_and_batch_size(change: str) -> None:
    x, y = torch.randn(6, 4, dtype=float64), torch.randint(3, (6,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(float64)
    other = copy.deepcopy(model)

    def changed() -> Tensor:
        if change == "repeated":
            return F.cross_entropy(other(torch.cat([x, x, x])), torch.cat([y, y, y]))
        if change == "micro-batches":
            for part in (slice(2), slice(2, 6)):
                loss = F.cross_entropy(other(x[part]), y[part], reduction="sum") / 6
                loss.backward()
            return loss
        return 7 * F.cross_entropy(other(x), y, reduction="sum" if change == "sum" else "mean")

    optimizers = [HessianFree(m.parameters(), damping=0.05, cg_progress=0.0) for m in (model, other)]
    for _ in range(4):
        optimizers[0].step(lambda: F.cross_entropy(model(x), y))
        optimizers[1].step(changed)
        assert_close(weights(model), weights(other), rtol=1e-6, atol=1e-8)
    ratios = [optimizer.metrics()["reduction_ratio"] for optimizer in optimizers]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_samples_estimate_the_diagonal() -> None:
    problem = Problem()
    model = model_of(problem.loss, problem.parameters, decay=0.1)
    diagonal = matrix_of(model).diagonal()
    errors = [(flat(model.sampled_diagonal(n)) - diagonal).norm() / diagonal.norm() for n in (4, 400)]
    assert errors[1] < 0.1 and errors[1] < errors[0] / 3


def test_the_preconditioner_helps_where_scales_differ() -> None:
    torch.manual_seed(0)
    scale = torch.logspace(-2, 2, 30, dtype=float64)
    x, y = torch.randn(200, 30, dtype=float64) * scale, torch.randn(200, 1, dtype=float64)
    model = nn.Linear(30, 1).to(float64)
    iterations = []
    for samples in (0, 10):
        twin = copy.deepcopy(model)
        optimizer = HessianFree(twin.parameters(), damping=1e-8, preconditioner_samples=samples)
        optimizer.step(lambda twin=twin: F.mse_loss(twin(x), y))
        iterations.append((optimizer.metrics()["cg_iterations"], optimizer.metrics()["loss_after"]))
    assert iterations[1][0] < iterations[0][0] and iterations[1][1] < iterations[0][1] + 1e-3


def test_iterates_are_kept_at_growing_distances() -> None:
    x, y = torch.randn(60, 40, dtype=float64), torch.randn(60, 1, dtype=float64)
    net = nn.Linear(40, 1).to(float64)
    model = model_of(lambda: F.mse_loss(net(x), y), list(net.parameters()))
    zeros = [torch.zeros_like(p) for p in net.parameters()]

    def iterate(k: int) -> Tensor:
        return flat(solve(model, [0.0, 0.0], zeros, k, 0.0, 0)[0].x)

    kept = [flat(x) for x in solve(model, [0.0, 0.0], zeros, 25, 0.0, 0)[1]]
    steps = sorted({math.ceil(1.3**k) for k in range(13)} - {24} | {25})
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
    assert line_search(lambda rate: 0.0, 0.0, 0.0, 0.0) == (0.0, 1.0)


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
    from curvopt.optim import hessian_free

    starts, solutions = [], []

    def recorded(model: Any, damping: Any, x0: Any, *rest: Any) -> Any:
        found, iterates = solve(model, damping, x0, *rest)
        starts.append(flat(x0))
        solutions.append(flat(found.x))
        return found, iterates

    monkeypatch.setattr(hessian_free, "solve", recorded)
    for decay in (0.7, 0.0):
        starts.clear(), solutions.clear()
        problem = Problem()
        optimizer = HessianFree(problem.parameters, cg_decay=decay)
        for _ in range(3):
            optimizer.step(problem.loss)
        assert not starts[0].any() and solutions[0].any()
        for start, solution in zip(starts[1:], solutions[:-1], strict=True):
            assert_close(start, decay * solution)


# ------------------------------------------------------------------------------------------------------------- training


def digits(samples: int | None = None) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:samples], dtype=torch.float32).div(16), torch.tensor(labels[:samples])


def mlp() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, lambda model: F.cross_entropy(model(x), y)


def autoencoder() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, _ = digits(400)
    sizes = [64, 40, 28, 18, 10, 4, 10, 18, 28, 40, 64]
    layers = [layer for sizes in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers[:-1]), lambda model: F.binary_cross_entropy_with_logits(model(x), x)


def train(
    problem: Callable, make: Callable[..., torch.optim.Optimizer], steps: int, seed: int = 0
) -> tuple[float, float]:
    """The last loss, and what it cost in gradients (a forward counts a third, a product with B four)."""
    torch.manual_seed(seed)
    model, loss_of = problem()
    optimizer = make(model.parameters())
    cost = 0.0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
        if isinstance(optimizer, HessianFree):
            metrics: dict[str, Any] = optimizer.metrics()
            cost += (metrics["cg_iterations"] + 2) * 4 / 3 + metrics["evaluations"] / 3 + 2
    return loss_of(model).item(), cost
