"""The optimizers that promise the contract of ``torch.optim``, and short trainings of each. A new one is one row."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checks import generator
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import CurvoptWarning, extend
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW
from curvopt.optim.state import curvature_of
from curvopt.optim.step import CurvatureOptimizer

#: Optimizers that take the step of SGD on preconditioned gradients.
SGD_LIKE: dict[str, Callable[..., CurvatureOptimizer]] = {
    "KFACSGD": KFACSGD,
    "KFACSGD exact": lambda params, **options: KFACSGD(params, fisher="exact", **options),
    "KFACSGD mc": lambda params, **options: KFACSGD(params, fisher="mc", **options),
    "KFACSGD blocks": lambda params, **options: KFACSGD(params, max_factor_size=30, approx="reduce", **options),
    "EKFACSGD": EKFACSGD,
    "EKFACSGD mc": lambda params, **options: EKFACSGD(params, fisher="mc", **options),
    "EKFACSGD exact": lambda params, **options: EKFACSGD(params, fisher="exact", max_factor_size=40, **options),
    "DiagonalNewton": DiagonalNewton,
    "DiagonalNewton exact": lambda params, **options: DiagonalNewton(params, curvature="diag_ggn_exact", **options),
    "DiagonalNewton hessian": lambda params, **options: DiagonalNewton(params, curvature="diag_h", **options),
}
#: All; a new optimizer is one row.
OPTIMIZERS: dict[str, Callable[..., CurvatureOptimizer]] = {
    **SGD_LIKE,
    "KFACAdamW": lambda params, lr=0.02, **options: KFACAdamW(params, lr, **options),
    "KFACAdamW exact": lambda params, lr=0.02, **options: KFACAdamW(params, lr, fisher="exact", **options),
}
#: In what has nothing to do with numbers, the kinds of another row go the ways of these.
LIKE_OTHERS = {"KFACSGD exact", "EKFACSGD mc", "DiagonalNewton exact", "KFACAdamW exact"}
CONTRACT = [name for name in OPTIMIZERS if name not in LIKE_OTHERS]
every_optimizer = pytest.mark.parametrize("make", [OPTIMIZERS[name] for name in CONTRACT], ids=CONTRACT)
OF_SGD = [name for name in CONTRACT if name in SGD_LIKE]
sgd_like = pytest.mark.parametrize("make", [SGD_LIKE[name] for name in OF_SGD], ids=OF_SGD)
EXACT = [name for name in OPTIMIZERS if name.endswith("exact")]
exact_optimizer = pytest.mark.parametrize("make", [OPTIMIZERS[name] for name in EXACT], ids=EXACT)


def digits(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=dtype).div(16).view(-1, 1, 8, 8), torch.tensor(labels)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Tokens(nn.Module):
    """One parameter of every kind of factor list: an embedding, a norm layer, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.embed((16 * x.flatten(1)).long()))
        return self.out(torch.tanh(self.hidden(tokens)).mean(1))


class Run:
    """A model, its loss, an optimizer, and an endless stream of batches that depends on the seed alone."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        model: Callable[[], nn.Module] = mlp,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        batch: int = 64,
        reduction: str = "mean",
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = extend(model().to(dtype))
        self.lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
        self.x, self.y = digits(dtype)
        self.batch, self.seed = batch, seed
        self.optimizer: Any = make(self.model.parameters(), **options)
        if isinstance(self.optimizer, CurvatureOptimizer):
            self.optimizer.attach(self.model, self.lossfunc)

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(len(self.x), generator=generator(1000 * self.seed + step))
        return self.x[chosen[: self.batch]], self.y[chosen[: self.batch]]

    def loss(self, step: int) -> Tensor:
        x, y = self.data(step)
        return self.lossfunc(self.model(x), y)

    def backward(self, step: int, loss: Callable[[int], Tensor] | None = None) -> None:
        self.optimizer.zero_grad()
        (loss or self.loss)(step).backward()

    def step(self, step: int = 0, loss: Callable[[int], Tensor] | None = None) -> None:
        self.backward(step, loss)
        self.optimizer.step()

    def train(self, steps: range | int, loss: Callable[[int], Tensor] | None = None) -> Run:
        for step in range(steps) if isinstance(steps, int) else steps:
            self.step(step, loss)
        return self

    def moves(self, step: int = 0) -> list[Tensor]:
        """What a step adds to the weights."""
        before = self.weights()
        self.step(step)
        return [new - old for new, old in zip(self.weights(), before, strict=True)]

    def load(self, other: Run) -> Run:
        """Goes on where another run is, by what a file holds of it."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(torch.load(checkpoint(other.optimizer), weights_only=True))
        return self

    def full_loss(self) -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(self.model(self.x), self.y).item()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def factors(self) -> list[list[Tensor]]:
        """Those of the curvature of every parameter."""
        return [[*curvature_of(self.optimizer.state[p]).factors] for p in self.model.parameters()]


def counters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds of a run and of no parameter."""
    return optimizer.state_dict()["param_groups"][0]["run"]


def resume_with(optimizer: torch.optim.Optimizer, **changed: Any) -> None:
    """Loads the state that there is, some of whose counters are changed."""
    state = optimizer.state_dict()
    state["param_groups"][0]["run"] |= changed
    optimizer.load_state_dict(state)


def covered(optimizer: Any) -> bool:
    """Whether every parameter has curvature."""
    return "none" not in optimizer.coverage().values()


def descend(optimizers: Any, loss: Callable[[], Tensor], steps: int = 1) -> list[float]:
    """The loop that knows nothing of curvature, of an optimizer or several; the losses before its steps."""
    every, losses = optimizers if isinstance(optimizers, list) else [optimizers], []
    for _ in range(steps):
        for optimizer in every:
            optimizer.zero_grad()
        value = loss()
        value.backward()
        for optimizer in every:
            optimizer.step()
        losses.append(value.item())
    return losses


@contextmanager
def silent() -> Iterator[None]:
    """Whatever curvopt says is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvoptWarning)
        yield


def checkpoint(optimizer: torch.optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


def numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state that ``assert_close`` can compare: without the name of its optimizer."""
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    return {**state, "run": {name: value for name, value in group.pop("run").items() if name != "optimizer"}}


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_close(left: list[Tensor], right: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
