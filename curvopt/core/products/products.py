"""Products of the two sides of outer products: ``[..., N, G, S, O]`` of outputs and ``[N, G, S, I]`` of inputs.

>>> left, right = torch.ones(1, 4, 1, 5, 2), torch.ones(4, 1, 5, 3)
>>> products_of(left, right).shape, over_samples(left, right).shape
(torch.Size([1, 4, 1, 2, 3]), torch.Size([1, 1, 2, 3]))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvopt.core.products.second_moments import _by_feature


def pairs_of(sides: Tensor) -> Iterator[Tensor]:
    """Products of all pairs of positions of ``[..., S, F]``, by their distance: ``[..., S - d, F]``."""
    S = sides.shape[-2]
    yield from (sides[..., : S - d, :] * sides[..., d:, :] for d in range(max(S, 1)))


def products_of(rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
    """``rows^T columns`` of ``[V, N, G, S, *]`` or, for all vectors, ``[N, G, S, *]``; into ``out``."""
    if torch.is_grad_enabled():
        return rows.mT @ columns
    V = len(rows) if rows.dim() == 5 else len(columns)
    shape = (*(rows if rows.dim() == 4 else columns).shape[:2], rows.shape[-1], columns.shape[-1])
    result = rows.new_empty(V, *shape) if out is None else out
    if rows.shape[-2] == 1:
        return torch.mul(rows.mT, columns, out=result)
    for v in range(V):
        # one by one: a product that is broadcast copies the side that all vectors share
        of_v = [(side[v] if side.dim() == 5 else side).flatten(0, 1) for side in (rows, columns)]
        torch.bmm(of_v[0].mT, of_v[1], out=result[v].flatten(0, 1))
    return result


def pieces(sides: Tensor, step: int) -> Sequence[Tensor]:
    """Some samples of ``[N, G, S, F]`` at a time, ``[n G, S, F]``."""
    return [sides.flatten(0, 1)] if step >= len(sides) else sides.flatten(0, 1).split(step * sides.shape[1])


def over_samples(left: Tensor, right: Tensor) -> Tensor:
    """``sum_{n,s} l r^T`` of ``[..., N, G, S, O]`` and ``[N, G, S, I]``, ``[..., G, O, I]``."""
    return _by_feature(left) @ _by_feature(right).mT


def norms2_of(sides: Tensor) -> Tensor:
    """Squared norms of sides ``[..., G, S, F]``."""
    if torch.is_grad_enabled():  # at zero a norm has no second derivative
        return (sides * sides).sum((-3, -2, -1))
    return torch.linalg.vector_norm(sides, dim=(-3, -2, -1)).square_()
