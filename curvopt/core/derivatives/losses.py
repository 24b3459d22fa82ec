r"""Curvature of losses with respect to the network's output: columns of a root ``S`` of ``\nabla_z^2 loss = S S^T``.

A loss is one class with three methods, registered beside its definition. Samples ``n`` are rows of ``z``; a column is a tensor
like ``z`` that holds one vector for every sample at once. Under ``mean`` the root carries the square root of the normaliser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt.core.uses import LossUse
from curvopt.errors import CurvoptError


class LossCurvature(ABC):
    """Hessian of one call of a loss in its input ``z = use.input``, factored sample by sample."""

    def __init__(self, module: Any, z: Tensor, target: Tensor):
        """Keep the module and what it was given."""
        self.module, self.z, self.target = module, z, target

    @property
    @abstractmethod
    def columns(self) -> int:
        """Number V of columns of the exact root (of each sample)."""

    @abstractmethod
    def root(self, start: int, stop: int) -> Tensor:
        """Columns ``start`` to ``stop`` of the exact root S, ``[stop - start, *z.shape]``."""

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        """Random columns ``[samples, *z.shape]`` with ``E[s s^T] = S S^T`` each; gradients at targets drawn from the model."""

    def scale(self, mean_over: int | Tensor) -> Tensor | float:
        """The factor of the module's reduction: one over the number of averaged terms, or 1 for a sum."""
        return 1 / mean_over if self.module.reduction == "mean" else 1.0


_losses: dict[type[nn.Module], type[LossCurvature]] = {}
L = TypeVar("L", bound=LossCurvature)


def register_loss(*types: type[nn.Module]) -> Callable[[type[L]], type[L]]:
    """Class decorator: this curvature serves these loss modules."""

    def add(curvature: type[L]) -> type[L]:
        _losses.update(dict.fromkeys(types, curvature))
        return curvature

    return add


def is_loss(module: nn.Module) -> bool:
    """Whether a module is a loss: a registered type, or a subclass of PyTorch's (private) base of losses."""
    return isinstance(module, (nn.modules.loss._Loss, *_losses))


def curvature_of(use: LossUse) -> LossCurvature:
    """The curvature of a recorded loss.

    Raises:
        CurvoptError: for a loss without a rule, or one that does not reduce to a scalar.
    """
    for base in type(use.module).__mro__:
        if base in _losses and type(use.module).forward is base.forward:
            if getattr(use.module, "reduction", "mean") not in ("mean", "sum"):
                raise CurvoptError(
                    f"{use.describe()}: second-order quantities need a scalar loss, but reduction={use.module.reduction!r} keeps one "
                    "value per element; use reduction='mean' or 'sum'."
                )
            return _losses[base](use.module, use.input, use.target)
    known = ", ".join(sorted(loss.__name__ for loss in _losses))
    raise CurvoptError(
        f"{use.describe()}: no curvature is known for this loss; use one of {known}, or register one with "
        "curvopt.core.derivatives.losses.register_loss."
    )


class ElementwiseLoss(LossCurvature):
    """A sum of functions of single entries of ``z``: the Hessian is diagonal, `second` holds the diagonal."""

    @abstractmethod
    def second(self) -> Tensor:
        """Second derivative of the (unreduced) loss of every entry, like ``z``."""

    @property
    def columns(self) -> int:  # noqa: D102
        return prod(self.z.shape[1:])

    def root(self, start: int, stop: int) -> Tensor:  # noqa: D102
        entries = torch.eye(self.columns, dtype=self.z.dtype, device=self.z.device)[start:stop].reshape(
            -1, 1, *self.z.shape[1:]
        )
        return entries * self._root_diagonal()

    def _root_diagonal(self) -> Tensor:
        return (self.second() * self.scale(self.z.numel())).sqrt()


@register_loss(nn.MSELoss)
class MSE(ElementwiseLoss):
    """Squared error: Hessian 2, divided by the number of entries under ``mean``; samples are Gaussian."""

    def second(self) -> Tensor:  # noqa: D102
        return torch.full_like(self.z, 2.0)

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:  # noqa: D102
        noise = torch.randn(samples, *self.z.shape, generator=generator, dtype=self.z.dtype, device=self.z.device)
        return noise * self._root_diagonal()


@register_loss(nn.BCEWithLogitsLoss)
class BCEWithLogits(ElementwiseLoss):
    """Binary cross-entropy of logits: ``w (pos_weight y + 1 - y) p (1 - p)``; samples are Bernoulli labels."""

    def second(self) -> Tensor:  # noqa: D102
        p = self.z.sigmoid()
        return self._weight() * p * (1 - p)

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:  # noqa: D102
        p = self.z.sigmoid()
        labels = torch.bernoulli(p.detach().expand(samples, *p.shape), generator=generator)
        return (p - labels) * (self._weight() * self.scale(self.z.numel())).sqrt()

    def _weight(self) -> Tensor:
        y, pos = self.target.to(self.z.dtype), self.module.pos_weight
        weight = torch.ones_like(self.z) if pos is None else pos * y + 1 - y
        return weight if self.module.weight is None else weight * self.module.weight


@register_loss(nn.CrossEntropyLoss)
class CrossEntropy(LossCurvature):
    """Softmax cross-entropy: ``m (diag p - p p^T)`` at every position, with m the mass of the target there.

    The mass is the sum over classes of weighted target probabilities (class weights, smoothing, ignored targets included) times
    the factor of the reduction. Samples are labels drawn from the softmax (Kunstner et al. 2019, the "MC Fisher").
    """

    def __init__(self, module: nn.CrossEntropyLoss, z: Tensor, target: Tensor):
        """Compute probabilities and the root of the mass, both with classes on axis 1."""
        super().__init__(module, z, target)
        if z.dim() < 2:
            raise CurvoptError(
                f"CrossEntropyLoss: input of shape {list(z.shape)} has no batch axis; unsqueeze(0) the input and the target."
            )
        self.p = z.softmax(1)
        self.root_mass = self._mass().sqrt().unsqueeze(1)

    def _mass(self) -> Tensor:
        """Mass of the target at each position, ``[N, *positions]``."""
        classes, smoothing = self.z.shape[1], self.module.label_smoothing
        ones = torch.ones(classes, dtype=self.z.dtype, device=self.z.device)
        weight = ones if self.module.weight is None else self.module.weight.to(self.z.dtype)
        if self.target.is_floating_point():
            smooth = self.target * (1 - smoothing) + smoothing / classes
            return torch.einsum("nc...,c->n...", smooth, weight) * self.scale(self.z.numel() // classes)
        kept = self.target != self.module.ignore_index
        of_target = weight[torch.where(kept, self.target, 0)] * kept
        mass = of_target if smoothing == 0 else of_target * (1 - smoothing) + kept * (smoothing * weight.mean())
        return mass * self.scale(of_target.sum())

    @property
    def columns(self) -> int:  # noqa: D102
        return prod(self.z.shape[1:])

    def root(self, start: int, stop: int) -> Tensor:  # noqa: D102
        # column (c, position): sqrt(m p_c) (e_c - p) at that position, zero elsewhere
        classes, *positions = self.z.shape[1:]
        index = torch.arange(start, stop, device=self.z.device)
        c, position = index // prod(positions), index % prod(positions)
        onehot = F.one_hot(c, classes).to(self.z.dtype).reshape(-1, 1, classes, *(1 for _ in positions))
        scaled = (self.p[:, c].transpose(0, 1).unsqueeze(2).sqrt() * (onehot - self.p)) * self.root_mass
        if not positions:
            return scaled
        return scaled * F.one_hot(position, prod(positions)).to(self.z.dtype).reshape(-1, 1, 1, *positions)

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:  # noqa: D102
        p = self.p.detach().movedim(1, -1)
        labels = torch.multinomial(p.reshape(-1, p.shape[-1]), samples, replacement=True, generator=generator)
        onehot = F.one_hot(labels.T.reshape(samples, *p.shape[:-1]), p.shape[-1]).movedim(-1, 2)
        return (self.p - onehot) * self.root_mass
