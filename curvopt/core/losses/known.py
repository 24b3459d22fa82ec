"""Losses read off the graph, so that ``F.cross_entropy(model(x), y)`` needs no `curvopt.extend`.

Whatever its options, a cross-entropy is *linear* in log-probabilities ``l = log_softmax(z)``: ``L = -sum t_c l_c``.
So the Hessian at a position is ``m (diag p - p p^T)`` with the mass ``m = sum_c t_c = -sum_c dL/dl_c``, which is the
gradient that arrives at the log-softmax, summed. Class weights, ignored targets, smoothing, probabilities as targets,
reductions, scale, and losses written by hand need no further knowledge: only that everything after the log-softmax is
linear, which the names of the nodes tell. Squared errors and binary cross-entropies are treated likewise.

>>> z = torch.ones(4, 3, requires_grad=True).log_softmax(1)
>>> curvature, _ = _recognise(z.grad_fn).curvature(torch.full((4, 3), -1 / 12))
>>> curvature.columns, curvature.root(0, 2).shape  # C - 1 columns
(2, torch.Size([2, 4, 3]))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.graph.nodes import Saved, metadata, name_of, operation, saved, shape_of, signed
from curvopt.core.graph.vjp import pull
from curvopt.core.losses.roots import Bernoulli, Diagonal, LossCurvature, Softmax, root_of_weights
from curvopt.core.products.sums import widened


class FunctionalLoss:
    """A nonlinear operation of a known kind, after which the loss is linear.

    Attributes:
        node: the operation's node.
        edge: where its input z, the network's output, comes from.
    """

    def __init__(self, node: Node, edge: GradientEdge):
        """Keep the place; saved values are read when the gradient arrives."""
        self.node, self.edge = node, edge

    @property
    def input(self) -> Tensor:
        """A tensor with the shape, type and device of z."""
        z = metadata(self.edge.node, self.edge.output_nr)
        return torch.empty((), dtype=z.dtype, device=z.device).expand(z.shape)

    def describe(self) -> str:
        """The operation, for messages."""
        return f"the functional loss with {name_of(self.node)}"

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in z, from the gradient after the operation."""
        own = grad.clone()  # which hooks may change in place
        (slope,) = pull([GradientEdge(self.node, 0)], [self.edge], [own.unsqueeze(0)])
        assert slope is not None
        return slope[0]

    def curvature(self, grad: Tensor) -> tuple[LossCurvature, Tensor]:
        """The curvature, from the gradient after the operation; the factor of the loss is part of it.

        Raises:
            CurvoptError: if the loss weighs some entries negatively.
        """
        weight, build = _KINDS[operation(self.node)](Saved(self.node), grad)
        rounding = 1e3 * torch.finfo(weight.dtype).eps * grad.abs().max()
        root = root_of_weights(weight, self.describe(), rounding)
        return build(root), torch.ones((), dtype=weight.dtype, device=weight.device)


Kind = tuple[Tensor, Callable[[Tensor], LossCurvature]]


def _log_softmax(saved: Any, grad: Tensor) -> Kind:
    dim = _class_axis(saved.dim, saved.result.dim())
    return -widened(grad).sum(dim), lambda mass: Softmax(widened(saved.result).exp(), mass, dim)


def _squared_error(saved: Any, grad: Tensor) -> Kind:
    z = widened(saved.self)
    return (2 * _by_entry(saved, grad)).expand(z.shape), lambda root: Diagonal(root, root.square() / 2)


def _bce_with_logits(saved: Any, grad: Tensor) -> Kind:
    z, y = widened(saved.self), widened(saved.target)
    weight = _by_entry(saved, grad)
    if saved.pos_weight is not None:
        weight = weight * (1 + (saved.pos_weight - 1) * y)
    if saved.weight is not None:
        weight = weight * saved.weight
    return weight.expand(z.shape), lambda root: Bernoulli(z, root)


#: For each operation a function of its saved values and of the gradient. It returns the weight of the entries, and the
#: curvature as a function of the root of the weight.
_KINDS: dict[str, Callable[[Any, Tensor], Kind]] = {
    "LOGSOFTMAX": _log_softmax,
    "MSELOSS": _squared_error,
    "BINARYCROSSENTROPYWITHLOGITS": _bce_with_logits,
}


def _by_entry(saved: Any, grad: Tensor) -> Tensor:
    """The gradient at every entry of an elementwise loss before its reduction."""
    grad = widened(grad)
    return grad / saved.self.numel() if saved.reduction == 1 else grad


def _class_axis(dim: int, dims: int) -> int:
    return signed(dim) % max(dims, 1)


def _recognise(node: Node) -> FunctionalLoss | None:
    kind = operation(node)
    edges = [GradientEdge(following, nr) for following, nr in node.next_functions if following is not None]
    if kind not in _KINDS or len(edges) != 1:
        return None  # unknown, or the target depends on parameters, too
    if kind == "LOGSOFTMAX" and _class_axis(saved(node, "dim"), len(shape_of(node))) == 0:
        return None  # no batch axis
    if kind != "LOGSOFTMAX" and operation(edges[0].node) == "EXPAND":
        return None  # broadcast to the target: rows are no samples
    if kind == "BINARYCROSSENTROPYWITHLOGITS" and node.next_functions[0][0] is None:
        return None
    return FunctionalLoss(node, edges[0])
