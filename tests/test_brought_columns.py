"""Columns that the gradient brings instead of being pulled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, Lambda
from checks import by_case, compare, extended
from reference import reference
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from curvopt import L2Regularizer, backpack, extend, set_columns_per_sweep
from curvopt.core import costs, sweep
from curvopt.core.derivatives.losses import Bernoulli, Diagonal, LossCurvature, Softmax, register_loss
from curvopt.core.turned import turn
from curvopt.extensions import (
    GGNMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    KFACEmpirical,
    SqrtGGNExact,
    SqrtGGNMC,
    Variance,
)


class Residual(nn.Sequential):
    """``x + f(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def network(outputs: int) -> nn.Module:
    """A residual block, a layer that is used twice, steps before samples, and a bias of its own."""
    lstm = nn.LSTM(4, 4)
    shared = nn.Linear(4, 4)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        Residual(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        Lambda(lambda x: x.flatten(2).permute(2, 0, 1)),
        lstm,
        Lambda(lambda out: out[0].mean(0)),
        shared,
        nn.ReLU(),
        shared,
        nn.LayerNorm(4),
        nn.Linear(4, outputs),
    ).double()


class Pulls:
    """Counts the columns that are pulled back, or the calls if several go together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, pull_each = 0, sweep.pull_each

        def counting(outputs: Any, inputs: Any, vectors: Any, *args: Any) -> None:
            self.count += len(vectors[0])
            pull_each(outputs, inputs, vectors, *args)

        monkeypatch.setattr(sweep, "pull_each", counting)

    def of(self, call: Callable[[], Any]) -> int:
        """How many there are in a call."""
        before = self.count
        call()
        return self.count - before


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> Pulls:
    return Pulls(monkeypatch)


@pytest.fixture(autouse=True)
def _one_by_one() -> Any:
    set_columns_per_sweep(1)
    yield
    set_columns_per_sweep(None)


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all columns pulled back."""
    monkeypatch.setattr(sweep.Pass, "_may_bring", lambda self: False)


def fields(model: nn.Module, extensions: list[Extension]) -> list[Tensor]:
    """All fields of all parameters."""
    found = []
    for p in model.parameters():
        for extension in extensions:
            value = getattr(p, extension.field)
            if isinstance(extension, GGNMP):
                value = value(torch.linspace(-1, 1, 2 * p.numel(), dtype=p.dtype).view(2, *p.shape))
            found += value if isinstance(value, list) else [value]
    return found


X = torch.randn(6, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, 1, 0, 2])
EXACT = [KFLR, DiagGGNExact, BatchDiagGGNExact, GGNMP]
SAMPLED = [KFAC, DiagGGNMC, BatchDiagGGNMC]


def smooth(z: Tensor) -> Tensor:
    """A loss in functions, with weights of classes, an ignored target and a factor."""
    target = torch.where(torch.arange(len(z)) == 2, -100, Y)
    return 3 * F.cross_entropy(z, target, weight=torch.tensor([0.5, 1, 2]).double(), label_smoothing=0.2)


LOSSES: dict[str, tuple[int, Callable[[], Callable[[Tensor], Tensor]]]] = {
    "classes": (3, lambda: (lambda loss: lambda z: loss(z, Y))(extend(nn.CrossEntropyLoss()))),
    "in functions": (3, lambda: smooth),
    "soft targets": (
        3,
        lambda: (lambda loss: lambda z: loss(z, torch.rand(6, 3).double().softmax(1)))(
            extend(nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1))
        ),
    ),
    "values": (2, lambda: (lambda loss: lambda z: loss(z, X[:, 0, :2, 0]) / 7)(extend(nn.MSELoss()))),
    "bits": (
        2,
        lambda: (lambda loss: lambda z: loss(z, (X[:, 0, :2, 0] > 0).double()))(extend(nn.BCEWithLogitsLoss())),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_one_column_less_is_pulled_back(name: str, pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    outputs, lossfunc = LOSSES[name]
    model, loss = extend(network(outputs)), lossfunc()
    extensions = [extension() for extension in EXACT]

    def backward() -> None:
        torch.manual_seed(1)
        with backpack(*extensions):
            loss(model(X)).backward()

    backward()  # finds the samples
    brought = pulls.of(backward)
    found, grads = fields(model, extensions), [p.grad.clone() for p in model.parameters()]
    never(monkeypatch)
    assert brought == pulls.of(backward) - 1
    assert_close(found, fields(model, extensions), rtol=1e-9, atol=1e-12)
    assert_close([p.grad for p in model.parameters()], [1.5 * grad for grad in grads])


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("name", ["classes", "values", "bits"])
def test_multiples_of_the_only_column(name: str, samples: int, pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    outputs = 2 if name == "classes" else 1
    model, x = extend(network(outputs)), X
    lossfunc = extend({"classes": nn.CrossEntropyLoss, "values": nn.MSELoss, "bits": nn.BCEWithLogitsLoss}[name]())
    y = Y % 2 if name == "classes" else (Y % 2).double()

    def backward(*extensions: Extension) -> None:
        z = model(x)
        with backpack(*extensions):
            lossfunc(z if outputs > 1 else z.squeeze(1), y).backward()

    def sampled() -> list[Extension]:
        generator = torch.Generator().manual_seed(3)
        return [extension(samples, generator=generator) for extension in SAMPLED]

    backward(KFLR())  # finds the samples
    extensions = sampled()
    assert pulls.of(lambda: backward(*extensions)) == 0
    found = fields(model, extensions)
    extensions = [extension() for extension in EXACT[:3]]
    assert pulls.of(lambda: backward(*extensions)) == 0
    exact = fields(model, extensions)
    never(monkeypatch)
    extensions = sampled()
    assert pulls.of(lambda: backward(*extensions)) == samples
    assert_close(found, fields(model, extensions))
    extensions = [extension() for extension in EXACT[:3]]
    assert pulls.of(lambda: backward(*extensions)) == 1
    assert_close(exact, fields(model, extensions))


def test_nothing_is_pulled_back_for_the_empirical_fisher_matrix(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    model = extend(network(3))

    def backward() -> None:
        with backpack(KFACEmpirical()):
            smooth(model(X)).backward()

    backward()
    assert pulls.of(backward) == 0
    found = fields(model, [KFACEmpirical()])
    never(monkeypatch)
    assert pulls.of(backward) == 1
    assert_close(found, fields(model, [KFACEmpirical()]))


@by_case
def test_every_case(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "gradient_for_column", lambda V, at_once: V > 0)
    monkeypatch.setattr(costs, "spares_gradient", lambda *_: True)  # see test_spared_gradients
    ref, problem = reference(case), extended(case)
    extensions = [DiagGGNExact(), BatchDiagGGNExact(), GGNMP()]
    with backpack(*extensions):
        problem.loss().backward()
    for name, p in problem.trainable().items():
        compare(p.diag_ggn_exact, ref.diag_ggn_exact(name), f"{name}.diag_ggn_exact")
        compare(p.diag_ggn_exact_batch, ref.diag_ggn_exact_batch(name), f"{name}.diag_ggn_exact_batch")
        v = torch.randn_like(p)
        compare(p.ggnmp(v.unsqueeze(0)).flatten(), ref.ggn(name) @ v.flatten(), f"{name}.ggnmp")
        assert_close(p.grad, ref.grad(name))


def test_together_with_everything_else(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    model = extend(network(2))
    kinds = [*EXACT, DiagHessian, KFACEmpirical, BatchGrad, Variance]

    def backward() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        extensions = [*(kind() for kind in kinds), KFAC(2, generator=generator)]
        model.zero_grad()
        with backpack(*extensions):
            (F.cross_entropy(model(X), Y % 2) + L2Regularizer(model.parameters(), 0.1)()).backward()
        return fields(model, extensions)

    backward()
    brought = pulls.of(backward)
    found = backward()
    never(monkeypatch)
    assert brought == pulls.of(backward) - 4  # two that are drawn, the exact and the empirical one
    assert_close(found, backward(), rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------------- where nothing is brought


def same_without(
    backward: Callable[[], Any], found: Callable[[], list[Tensor]], pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many columns are pulled back as if the gradient brought none, with the same result."""
    backward()
    as_it_is = pulls.of(backward)
    values = found()
    with monkeypatch.context() as patch:
        never(patch)
        assert pulls.of(backward) == as_it_is
    assert_close(values, found(), rtol=0, atol=0)


def test_two_losses(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    model = extend(network(2))

    def backward() -> None:
        with backpack(KFLR()):
            z = model(X)
            (F.cross_entropy(z, Y % 2) + F.mse_loss(z, X[:, 0, :2, 0])).backward()

    same_without(backward, lambda: fields(model, [KFLR()]), pulls, monkeypatch)


def test_small_networks(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    """To pull one column back costs less than to turn the root."""
    set_columns_per_sweep(None)
    model = extend(network(1))

    def backward() -> None:
        generator = torch.Generator().manual_seed(3)
        with backpack(KFLR(), KFAC(2, generator=generator)):
            F.mse_loss(model(X), X[:, 0, :1, 0]).backward()

    same_without(backward, lambda: fields(model, [KFLR(), KFAC()]), pulls, monkeypatch)


def test_fitted_values(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    model = extend(network(2))
    target = model(X).detach()
    target[1:] += 1

    def backward() -> None:
        with backpack(DiagGGNExact()):
            F.mse_loss(model(X), target).backward()

    same_without(backward, lambda: fields(model, [DiagGGNExact()]), pulls, monkeypatch)


def test_roots_are_the_usual_ones(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    model = extend(network(1))

    def backward() -> None:
        torch.manual_seed(2)
        with backpack(DiagGGNExact(), SqrtGGNExact(), SqrtGGNMC(2)):
            F.mse_loss(model(X), X[:, 0, :1, 0]).backward()

    same_without(backward, lambda: fields(model, [SqrtGGNExact(), SqrtGGNMC()]), pulls, monkeypatch)


@pytest.mark.parametrize("how", ["create_graph", "inputs", "hook", "hook of the loss", "weight norm", "half precision"])
def test_other_backwards(how: str, pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    model = network(1)
    if how == "weight norm":
        nn.utils.parametrizations.weight_norm(model[-1])
    extend(model)
    inputs = {"inputs": [model[0].weight]} if how == "inputs" else {}

    def backward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "half precision"):
            z = model.float()(X.float()) if how == "half precision" else model(X)
        if how == "hook":
            z.register_hook(lambda grad: 2 * grad)
        loss = F.mse_loss(z, X[:, 0, :1, 0].to(z.dtype))
        if how == "hook of the loss":
            loss.register_hook(lambda grad: 2 * grad)
        with backpack(DiagGGNExact()):
            loss.backward(create_graph=how == "create_graph", **inputs)

    same_without(backward, lambda: [model[0].weight.diag_ggn_exact.detach()], pulls, monkeypatch)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian])
def test_hooks_that_change_gradients_in_place(
    extension: type[Extension], pulls: Pulls, monkeypatch: pytest.MonkeyPatch
):
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double())

    def backward(*extensions: Extension) -> None:
        model.zero_grad()
        loss = F.mse_loss(model(X[:, 0, 0]), X[:, 0, :1, 0])
        loss.register_hook(lambda grad: grad.mul_(2))
        with backpack(*extensions):
            loss.backward()

    def found() -> list[Tensor]:
        return [*fields(model, [extension()]), *(p.grad for p in model.parameters())]

    backward()
    expected = [p.grad.clone() for p in model.parameters()]
    same_without(lambda: backward(extension()), found, pulls, monkeypatch)
    assert_close([p.grad for p in model.parameters()], expected)


def test_losses_that_are_passed_once(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            ctx.gradient = z.clone()
            return z.square().sum() / 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return ctx.gradient.mul_(grad)

    class HalfSquares(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return Halves.apply(z)

    register_loss(HalfSquares)(lambda module, z, target: Diagonal(torch.ones_like(z)))
    model, lossfunc = extend(network(1)), extend(HalfSquares())

    def backward() -> None:
        model.zero_grad()
        with backpack(DiagGGNExact()):
            (3 * lossfunc(model(X))).backward()

    def found() -> list[Tensor]:
        return [*fields(model, [DiagGGNExact()]), *(p.grad for p in model.parameters())]

    same_without(backward, found, pulls, monkeypatch)


# ------------------------------------------------------------------------------------------------------- turning a root


def curvatures() -> dict[str, tuple[LossCurvature, Tensor]]:
    """Losses' curvatures, and gradients."""
    z, mass = torch.randn(5, 4, dtype=torch.float64), torch.tensor([1, 2, 0, 0.5, 1e-12]).double()
    p, y = (10 * z).softmax(1), torch.tensor([0, 1, 2, 3, 0])
    classes = mass.square()[:, None] * (p - F.one_hot(y, 4))
    d = z.abs()
    d[1] = 0
    return {
        "softmax": (Softmax(p, mass), classes),
        "two classes": (Softmax((x := z[:, :2].softmax(1)), mass), mass.square()[:, None] * (x - F.one_hot(y % 2, 2))),
        "diagonal": (Diagonal(d), d * torch.randn_like(d)),
        "bits": (Bernoulli(z[:, 0], mass), mass.square() * (z[:, 0].sigmoid() - y.clamp(max=1))),
    }


@pytest.mark.parametrize("name", ["softmax", "two classes", "diagonal", "bits"])
def test_a_turned_root_is_one(name: str):
    curvature, gradient = curvatures()[name]
    turned = turn(curvature, gradient, per_sample=True)
    assert turned is not None
    factors, others = turned
    assert len(others) == curvature.columns - 1
    first = (gradient.reshape(5, -1) * factors[:, None]).unsqueeze(0)
    found = torch.cat([first, others.reshape(-1, *first.shape[1:])])
    expected = curvature.root(0, curvature.columns).reshape(-1, *first.shape[1:])
    hessians = [torch.einsum("vni,vnj->nij", root, root) for root in (found, expected)]
    assert_close(*hessians, rtol=1e-12, atol=1e-14)
    # softmax has no curvature along ones
    assert (turn(curvature, gradient + 1, per_sample=True) is None) == (name in ("softmax", "two classes"))


class Doubled:
    """Another root of the same Hessian."""

    columns = property(lambda self: 2 * self.diagonal.shape[1])

    def root(self, start: int, stop: int) -> Tensor:
        half = Diagonal.root(self, 0, self.columns // 2) / 2**0.5  # type: ignore[arg-type, attr-defined]
        return torch.cat([half, half])[start:stop]


def test_coordinates_are_those_of_the_root():
    class Own(Diagonal):
        columns, root = Doubled.columns, Doubled.root

    class Mixed(Doubled, Diagonal):
        pass

    d = torch.rand(5, 3) + 1
    for curvature in (Own(d), Mixed(d)):
        assert turn(curvature, d, per_sample=True) is None


def test_curvature_that_is_not_finite():
    assert turn(Diagonal(torch.tensor([[1.0], [torch.inf]])), torch.ones(2, 1), per_sample=True) is None


def test_confident_predictions():
    """In float32 the gradient of what is nearly certain is mostly rounding error."""
    z = torch.tensor([[0.0, 1, 0], [18.0, 3, 2], [0, 0, 18]])
    y = torch.tensor([2, 0, 2])

    def turned(z: Tensor, y: Tensor, per_sample: bool) -> Any:
        z = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(z, y, reduction="sum"), z)
        return turn(Softmax(z.detach().softmax(1), torch.ones(len(z))), gradient, per_sample)

    assert turned(z, y, per_sample=True) is None
    assert turned(z[1:], y[1:], per_sample=False) is None
    assert turned(z, y, per_sample=False) is not None  # next to the first, the others count for nothing
    assert turned(z.double() / 2, y, per_sample=True) is not None


def test_samples_without_a_gradient():
    """In float32 the probability of a certain prediction is one, while its curvature is not zero."""
    for z, counts in (([5.0, 18], True), ([0.0, 18], False)):
        curvature = Bernoulli(torch.tensor(z), torch.ones(2))
        assert (turn(curvature, curvature.p - 1, per_sample=False) is None) == counts


def test_losses_that_are_only_known_as_functions(pulls: Pulls, monkeypatch: pytest.MonkeyPatch):
    class Coupled(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return (z.sum(1).square() + z.square().sum(1)).sum()

    model, lossfunc = extend(network(2)), extend(Coupled(), loss=True)

    def backward() -> None:
        with backpack(DiagGGNExact()):
            lossfunc(model(X)).backward()

    same_without(backward, lambda: fields(model, [DiagGGNExact()]), pulls, monkeypatch)
