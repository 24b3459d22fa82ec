"""How it is trained: one class per optimizer holds its settings and builds it; ``OPTIMIZERS`` lists them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import nn

from curvopt import extend
from curvopt.optim import KFACSGD, DiagonalNewton

# An optimizer, and the context to run each ``loss.backward()`` in.
Built = tuple[torch.optim.Optimizer, Callable[[], AbstractContextManager[object]]]


@dataclass(frozen=True)
class OptimizerConfig(ABC):
    """Settings of an optimizer; ``None`` stands for the problem's tuned value, else the optimizer's own default."""

    name: ClassVar[str]
    kind: ClassVar[type[torch.optim.Optimizer]]
    tunable: ClassVar[tuple[str, ...]] = ("lr",)
    remedy: ClassVar[str] = "lower --lr"

    @abstractmethod
    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:
        """The optimizer of the model's parameters; ``model`` and ``lossfunc`` are extended where it needs that."""

    def resolved(self, tuned: Mapping[str, float]) -> Self:
        """The same settings with every ``None`` replaced."""
        own = {name: parameter.default for name, parameter in signature(self.kind).parameters.items()}
        return replace(
            self, **{name: {**own, **tuned}[name] for name, value in self.settings().items() if value is None}
        )

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        tuned = ", ".join(f"{name} {getattr(self, name):g}" for name in self.tunable)
        return f"{self.name} ({tuned})"


class _FirstOrder(OptimizerConfig):
    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:
        return self.kind(model.parameters(), **self.settings()), nullcontext


class _SecondOrder(OptimizerConfig):
    kind: ClassVar[type[KFACSGD | DiagonalNewton]]
    tunable = ("lr", "damping")
    remedy = "lower --lr or raise --damping"

    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:
        extend(lossfunc)
        optimizer = self.kind(extend(model).named_parameters(), **self.settings())
        return optimizer, optimizer.curvature


@dataclass(frozen=True)
class SgdConfig(_FirstOrder):
    """torch.optim.SGD with momentum."""

    name, kind = "sgd", torch.optim.SGD

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else the optimizer's default."""
    momentum: float = 0.9
    """Momentum of the step."""


@dataclass(frozen=True)
class AdamwConfig(_FirstOrder):
    """torch.optim.AdamW."""

    name, kind = "adamw", torch.optim.AdamW

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else the optimizer's default."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclass(frozen=True)
class KfacSgdConfig(_SecondOrder):
    """curvopt.optim.KFACSGD: SGD with momentum on gradients preconditioned by Kronecker-factored curvature."""

    name, kind = "kfac-sgd", KFACSGD

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else the optimizer's default."""
    momentum: float = 0.9
    """Momentum of the step."""
    damping: float | None = None
    """Added to the curvature before its inversion; without it the problem's tuned value, else the default."""
    kl_clip: float | None = None
    """Bound on the predicted change by one step, before momentum; inf for none, without it the default."""
    curvature_every: int | None = None
    """Steps between refreshes of the curvature, reached gradually from 1; without it the default."""
    inverse_every: int | None = None
    """Steps between refreshes of the inverses, reached gradually from 1; without it the default."""


@dataclass(frozen=True)
class DiagonalNewtonConfig(_SecondOrder):
    """curvopt.optim.DiagonalNewton: SGD with momentum on gradients divided by the sampled diagonal of the curvature."""

    name, kind = "diagonal-newton", DiagonalNewton

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else the optimizer's default."""
    momentum: float = 0.9
    """Momentum of the step."""
    damping: float | None = None
    """Added to the curvature before dividing by it; without it the problem's tuned value, else the default."""
    kl_clip: float | None = None
    """Bound on the predicted change by one step, before momentum; inf for none, without it the default."""
    curvature_every: int | None = None
    """Steps between refreshes of the curvature, reached gradually from 1; without it the default."""


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    config.name: config for config in (KfacSgdConfig, SgdConfig, AdamwConfig, DiagonalNewtonConfig)
}
