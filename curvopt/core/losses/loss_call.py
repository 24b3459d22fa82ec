"""One call of an extended loss.

>>> from torch.nn import functional as F
>>> z, y = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
>>> call = LossCall("", nn.CrossEntropyLoss(), (z, y), {}).of(get_gradient_edge(F.cross_entropy(z, y)))
>>> curvature, factor = call.curvature(torch.tensor(1.0))
>>> type(curvature).__name__, curvature.columns
('Softmax', 2)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvopt.core.graph.node_vjp import NodeVjp
from curvopt.core.losses.any import GenericLoss
from curvopt.core.losses.blocks import Head
from curvopt.core.losses.registry import _losses
from curvopt.core.losses.roots import Diagonal, LossCurvature, root_of_weights
from curvopt.core.products.sums import widened
from curvopt.core.record.calls import describe, version
from curvopt.errors import CurvoptError


class LossCall:
    """One call of an extended loss: its module, its input (the network's output) and its other arguments.

    Only the input may require gradients.

    Attributes:
        edge: of the input; ``None`` if it does not depend on parameters.
        value: the edge of the loss. A record has none, since the node keeps the record; `of` adds it.
    """

    __slots__ = ("edge", "input", "module", "path", "target", "value", "version")

    value: GradientEdge

    def __init__(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Record the arguments of the loss, given by position or by name: first the input, then the target if any."""
        self.path, self.module = path, module
        given = [*args, *kwargs.values()]
        self.target: Any = kwargs.get("target", given[1] if len(given) > 1 else None)
        self.input: Tensor = _first(args, kwargs)
        self.version = version(self.input)
        self.edge = get_gradient_edge(self.input) if self.input.requires_grad else None

    def of(self, value: GradientEdge) -> LossCall:
        """A copy of the record, with the edge of the loss."""
        found = copy.copy(self)
        found.value = value
        return found

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in its input, in float32 at least, from the gradient of its value."""
        assert self.edge is not None
        (slope,) = NodeVjp.between([self.value], [self.edge])([grad])
        return torch.zeros_like(widened(self.input)) if slope is None else slope

    def curvature(self, grad: Tensor) -> tuple[LossCurvature, Tensor]:
        """The curvature, and the root of the factor ``grad`` by which the loss was scaled.

        Raises:
            CurvoptError: for a loss that does not reduce to a scalar, was given a negative factor, whose input changed
                since, or whose Hessian has no root.
        """
        reduction = getattr(self.module, "reduction", "mean")
        if reduction not in ("mean", "sum", "batchmean") or grad.numel() != 1:
            raise CurvoptError(
                f"{self.describe()}: second-order quantities need a scalar loss, but this one has shape "
                f"{list(grad.shape)} (reduction={reduction!r}); use reduction='mean' or 'sum'."
            )
        scale = root_of_weights(grad, self.describe())
        if version(self.input) != self.version:
            raise CurvoptError(
                f"{self.describe()}: its input was modified in place after the loss was computed; give it a copy."
            )
        z = widened(self.input)
        for base in type(self.module).__mro__:
            if base in _losses and type(self.module).forward is base.forward:
                curvature = _losses[base](self.module, z, self.target)
                if curvature.weights is None:
                    terms = z.numel() if isinstance(curvature, Diagonal) and reduction == "mean" else len(z)
                    curvature.weights = _by_sample(z.new_ones(len(z)) * (1.0 if reduction == "sum" else 1 / terms), z)
                return curvature, scale
        return self._curvature_by_autograd(z), scale

    def _curvature_by_autograd(self, z: Tensor) -> LossCurvature:
        """The Hessian between the input and the value, from the graph: of a loss that somebody wrote."""
        if any(p.requires_grad for p in self.module.parameters()):
            raise CurvoptError(
                f"{self.describe()}: a loss may have no trainable parameters; put them into the model, or "
                "requires_grad_(False) them."
            )
        assert self.edge is not None
        differentiable = torch.is_grad_enabled() and z.requires_grad
        one, reduction = z.new_ones(()), getattr(self.module, "reduction", None)
        with torch.no_grad():
            head, whole = Head(self.edge, len(z)), "sum" if reduction == "sum" else "mean"
            loss = GenericLoss([self.value], [one], [head], len(z), whole, self.describe())
            loss.check_definite()
        (blocks,) = loss.blocks
        curvature: LossCurvature
        if blocks.cells.shape[2] > 1:
            if differentiable:
                raise CurvoptError(
                    f"{self.describe()}: the root of its Hessian comes from an eigendecomposition, which cannot be "
                    "differentiated; call backward without create_graph, or register_loss its curvature."
                )
            curvature = Columns(loss)
        elif differentiable:
            curvature = Diagonal(self._diagonal(one).clamp(min=0).sqrt())
        else:  # of a network that diverged nan, as those of known losses
            values = torch.where(blocks.values.isfinite(), blocks.values.clamp(min=0), torch.nan)
            curvature = Diagonal(blocks.cells.scatter(values.sqrt().unsqueeze(0))[0][0])
        (weights,) = loss.weights
        by_entries = reduction == "mean" and isinstance(curvature, Diagonal)
        curvature.weights = _by_sample(weights * len(z) / z.numel() if by_entries else weights, z)
        return curvature

    def _diagonal(self, one: Tensor) -> Tensor:
        """The Hessian's diagonal, differentiable, where it has no other entries."""
        assert self.edge is not None
        slope = self.slope(one)
        if not slope.requires_grad:
            return torch.zeros_like(slope)
        (diagonal,) = NodeVjp.between([get_gradient_edge(slope)], [self.edge])([torch.ones_like(slope)])
        return torch.zeros_like(slope) if diagonal is None else diagonal

    def describe(self) -> str:
        """Path and type of the loss module, for messages."""
        return describe(self.path, self.module)


class Columns(LossCurvature):
    """The Hessian of a loss that couples the entries of a sample.

    Args:
        loss: in one head.
    """

    def __init__(self, loss: GenericLoss):
        self.loss = loss
        ((self.vectors,),) = [found.vectors for found in loss.root(loss.num_columns)]

    @property
    def columns(self) -> int:
        return len(self.vectors)

    def root(self, start: int, stop: int) -> Tensor:
        return self.vectors[start:stop]

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        return self.loss.sample(samples, generator)[0]


def _by_sample(weights: Tensor, z: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (z.dim() - 1))


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument of a loss that is the network's output, ``None`` if there are no arguments."""
    return args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
