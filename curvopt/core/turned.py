"""A column of a loss Hessian's root that costs nothing: the gradient, which travels backwards anyway.

A root stays one if its columns are rotated, sample by sample: ``S S^T = (S Q) (S Q)^T``. The gradient g of a sample's
loss nearly always lies in the range of its Hessian, ``g = S c``. With ``c / |c|`` for the first column of Q, that of
``S Q`` is ``g / |c|``, and what becomes of it at a layer is what autograd brings there, divided by ``|c|``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from curvopt.core.derivatives.losses import LossCurvature
from curvopt.core.entries import Entry
from curvopt.core.residuals import pull, walk
from curvopt.core.uses import Loss

#: What rounding may make of the curvature along the gradient, relative to the whole: this power of the precision.
ROUNDING = 0.7


class Turned(NamedTuple):
    """A root whose first column is along the gradient.

    Attributes:
        factors: by which each sample's gradient is multiplied to be that column, ``[N]``.
        others: the other columns, ``[V - 1, *z.shape]``.
    """

    factors: Tensor
    others: Tensor


def carries(of_loss: GradientEdge, loss: Loss, entries: Sequence[Entry], N: int) -> bool:
    """Whether the gradient at all uses is, sample by sample, what the loss' gradient in its input becomes there."""
    if loss.edge is None or loss.axis != 0 or loss.input.dim() == 0 or len(loss.input) != N:
        return False
    inside = walk([of_loss.node], frozenset([loss.edge.node]))
    if any(isinstance(node, BackwardCFunction) for node in inside):  # which may only be passed once
        return False
    places = [(entry, i, edge) for entry in entries for i, edge in entry.edges.items()]
    if len(places) > len(entries):  # what arrives at several outputs makes one column
        return False
    if any(entry.rule.source is not None or entry.axis(i) is None for entry, i, _ in places):
        return False
    # the gradient may be larger or smaller than a column, by more than half precision holds
    dtypes = {loss.input.dtype, *(edge.node._input_metadata[edge.output_nr].dtype for *_, edge in places)}
    return dtypes <= {torch.float32, torch.float64}


def slope_at(of_loss: GradientEdge, edge: GradientEdge, grad: Tensor) -> Tensor | None:
    """The gradient of a loss in its input; ``None`` if there is none, or a hook at either changes it."""
    (slope,) = pull([of_loss], [edge], [grad.clone().unsqueeze(0)])
    if slope is None:
        return None
    for place, arrived in ((of_loss, grad), (edge, slope[0])):
        (again,) = pull([place], [place], [arrived.clone().unsqueeze(0)])
        if again is None or not torch.equal(again[0], arrived):  # in place perhaps
            return None
    return slope[0]


def multiples(drawn: Tensor, curvature: LossCurvature) -> Tensor:
    """How long random columns ``[v, *z.shape]`` of each sample are together, in units of the root's only column."""
    lengths = [c.reshape(len(c), c.shape[1], -1).norm(dim=(0, 2)) for c in (drawn, curvature.root(0, 1))]
    return lengths[0] / lengths[1].clamp(min=torch.finfo(drawn.dtype).tiny)


def turn(curvature: LossCurvature, gradient: Tensor, per_sample: bool) -> Turned | None:
    """The exact root, turned; ``None`` where numbers would be less precise, or the gradient lies elsewhere.

    Args:
        curvature: of a loss.
        gradient: of the same in its input z, ``[N, ...]``.
        per_sample: whether the curvature of each sample has to be precise, not only their sum.
    """
    coordinates = curvature.coordinates(gradient)
    if coordinates is None:
        return None
    g = gradient.reshape(len(gradient), -1)
    root = curvature.root(0, curvature.columns).reshape(-1, *g.shape)
    dtype, lengths = torch.finfo(g.dtype), coordinates.norm(dim=0)
    # gradients that are small enough may vanish on their way
    factors = torch.where((lengths > 0) & (g.norm(dim=1) > dtype.tiny**0.5), 1 / lengths, 0)
    along = g * factors.unsqueeze(1)
    missing = torch.einsum("vn,vnd->nd", coordinates, root).sub_(g)
    size = root.square().sum((0, 2))
    # without a gradient all of a sample's curvature is missing, of one whose Jacobian may be larger than that of others
    error = torch.where(factors > 0, 2 * factors * missing.norm(dim=1) * along.norm(dim=1), 10 * size)
    if not per_sample:
        error, size = error.sum(), size.sum()
    if not bool((error - dtype.eps**ROUNDING * size <= 0).all()):  # nor where the curvature is not finite
        return None
    # a reflection of the first unit vector to c / |c|, or its opposite
    unit = coordinates * factors
    sign = torch.where(unit[0] < 0, -1.0, 1.0).to(g)
    shared = (along + sign.unsqueeze(1) * root[0]) / (1 + unit[0].abs()).unsqueeze(1)
    others = root[1:] - shared * unit[1:].unsqueeze(2)
    return Turned(factors, others.reshape(-1, *gradient.shape))
