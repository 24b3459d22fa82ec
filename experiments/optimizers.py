"""How it is trained: one class per optimizer holds its settings and builds it; ``OPTIMIZERS`` lists them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from curvopt import extend
from curvopt.optim import KFACSGD, DiagonalNewton

# An optimizer, and the context to run each ``loss.backward()`` in.
Built = tuple[torch.optim.Optimizer, Callable[[], AbstractContextManager[object]]]


@dataclass(frozen=True)
class OptimizerConfig(ABC):
    """Settings of an optimizer; ``None`` stands for the problem's tuned value, else the one in ``untuned``."""

    name: ClassVar[str]
    untuned: ClassVar[Mapping[str, float]]
    remedy: ClassVar[str] = "lower --lr"

    @abstractmethod
    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:
        """The optimizer of the model's parameters; ``model`` and ``lossfunc`` are extended where it needs that."""

    def resolved(self, tuned: Mapping[str, float]) -> Self:
        """The same settings with every ``None`` replaced."""
        known = {**self.untuned, **tuned}
        return replace(self, **{name: known[name] for name, value in self.settings().items() if value is None})

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        tuned = ", ".join(f"{name} {getattr(self, name):g}" for name in self.untuned)
        return f"{self.name} ({tuned})"


@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """torch.optim.SGD with momentum."""

    name = "sgd"
    untuned = {"lr": 0.03}

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else 0.03."""
    momentum: float = 0.9
    """Momentum of the step."""

    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:  # noqa: D102
        return torch.optim.SGD(model.parameters(), **self.settings()), nullcontext


@dataclass(frozen=True)
class AdamwConfig(OptimizerConfig):
    """torch.optim.AdamW."""

    name = "adamw"
    untuned = {"lr": 1e-3}

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else 0.001."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""

    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:  # noqa: D102
        return torch.optim.AdamW(model.parameters(), **self.settings()), nullcontext


@dataclass(frozen=True)
class KfacSgdConfig(OptimizerConfig):
    """curvopt.optim.KFACSGD: SGD with momentum on gradients preconditioned by Kronecker-factored curvature."""

    name = "kfac-sgd"
    untuned = {"lr": 0.05, "damping": 0.03}
    remedy = "lower --lr or raise --damping"

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else 0.05."""
    momentum: float = 0.9
    """Momentum of the step."""
    damping: float | None = None
    """Added to the curvature before its inversion; without it the problem's tuned value, else 0.03."""
    kl_clip: float = 0.03
    """Bound on the predicted change by one step, before momentum; inf for none."""
    curvature_every: int = 10
    """Steps between refreshes of the curvature, reached gradually from 1."""
    inverse_every: int = 10
    """Steps between refreshes of the inverses, reached gradually from 1."""

    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:  # noqa: D102
        return _curvature_optimizer(KFACSGD, model, lossfunc, self)


@dataclass(frozen=True)
class DiagonalNewtonConfig(OptimizerConfig):
    """curvopt.optim.DiagonalNewton: SGD with momentum on gradients divided by the sampled diagonal of the curvature."""

    name = "diagonal-newton"
    untuned = {"lr": 0.1, "damping": 0.005}
    remedy = KfacSgdConfig.remedy

    lr: float | None = None
    """Learning rate; without it the problem's tuned value, else 0.1."""
    momentum: float = 0.9
    """Momentum of the step."""
    damping: float | None = None
    """Added to the curvature before dividing by it; without it the problem's tuned value, else 0.005."""
    kl_clip: float = 0.0005
    """Bound on the predicted change by one step, before momentum; inf for none."""
    curvature_every: int = 10
    """Steps between refreshes of the curvature, reached gradually from 1."""

    def build(self, model: nn.Module, lossfunc: nn.Module) -> Built:  # noqa: D102
        return _curvature_optimizer(DiagonalNewton, model, lossfunc, self)


def _curvature_optimizer(
    kind: type[KFACSGD | DiagonalNewton], model: nn.Module, lossfunc: nn.Module, config: OptimizerConfig
) -> Built:
    extend(lossfunc)
    optimizer = kind(extend(model).named_parameters(), **config.settings())
    return optimizer, optimizer.curvature


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    c.name: c for c in (KfacSgdConfig, SgdConfig, AdamwConfig, DiagonalNewtonConfig)
}
