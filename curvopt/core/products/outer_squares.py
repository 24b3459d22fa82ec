"""Squares of the products of an `Outer`, a few samples at a time or by pairs of positions.

For two positions, ``l1 r1 + l2 r2`` is the product of a sample::

    a few samples at a time    (l1 r1 + l2 r2)^2                               for each of V vectors
    by pairs                   l1^2 r1^2 + l2^2 r2^2 + 2 (l1 l2) (r1 r2)       left sides summed over vectors first
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvopt.core.products import chunk_sizes as costs
from curvopt.core.products.patches import Patches
from curvopt.core.products.products import over_samples, pairs_of, pieces, products_of
from curvopt.core.products.sums import _sum, _weighted, add, widened

if TYPE_CHECKING:
    from curvopt.core.products.outer import Outer


def squares_of_pairs(outer: Outer, left: Tensor, per_sample: bool) -> Tensor:
    """Squares from `output_pairs`, ``[*p]`` or, sample by sample, ``[N, *p]``."""
    P, width, device = left.shape[2], outer.G * outer.I, left.device.type
    step = costs.samples_at_once(P * width, outer.N, device) if per_sample else costs.rows_at_once(P, width, device)
    left = torch.cat([left[:, :, : outer.S], 2 * left[:, :, outer.S :]], 2) if outer.S > 1 else left
    several = step < outer.N
    sides = zip(left.split(step), outer.right.split(step), strict=True) if several else [(left, outer.right)]
    parts = ((part, right * right if outer.S == 1 else torch.cat([*pairs_of(right)], 2)) for part, right in sides)
    if not per_sample:
        return outer._shaped(reduce(add, (widened(over_samples(part, right)) for part, right in parts)))
    if torch.is_grad_enabled():
        return outer._shaped(torch.cat([part.mT @ right for part, right in parts]))
    result = left.new_empty(1, outer.N, outer.G, *outer._sides(outer.O, outer.I))
    for (part, right), out in zip(parts, result.split(step, 1), strict=True):
        rows, columns = outer._sides(part, right)
        products_of(rows.unsqueeze(0), columns.unsqueeze(0), out)
    return result.reshape(outer.N, *outer.shape)


def add_squares(outer: Outer, total: Tensor | None, per_sample: bool) -> Tensor:
    """``total`` plus the squares, ``[*p]`` or, sample by sample, ``[N, *p]``; in place where no graph is built.

    The result is of at least float32 (see `widened`).
    """
    if torch.is_grad_enabled():
        squares = widened(_weighted(outer.dense().square(), outer.weights))
        return add(total, squares if per_sample else squares.sum(0))
    if per_sample:
        like = widened(outer.left.new_empty(0))
        result = like.new_empty(outer.N, *outer.shape) if total is None else total.contiguous()
        for v, samples, products in by_sample(outer, in_order=True):
            weighted = _times_weights(outer, products, v, samples)
            of_samples = result[samples].view(-1, *products.shape[1:])
            if total is None and v == 0:
                torch.mul(weighted, products, out=of_samples)
            else:
                of_samples.addcmul_(weighted, products)
        return result
    return add(total, sums_by_sample(outer)[0].contiguous())


def sums_by_sample(outer: Outer, of_products: bool = False) -> list[Tensor]:
    """Squares, weighted and summed over vectors and samples; first the sums of the products, if they are wanted.

    Each is ``[*p]``, of at least float32 (see `widened`), in any order in memory.
    """
    sums: list[Tensor] = []
    for v, samples, products in by_sample(outer):
        sums = sums or [widened(torch.zeros_like(products[0])) for _ in range(1 + of_products)]
        if of_products:
            sums[0].add_(products[0] if len(products) == 1 else _sum(products))
        weighted = _times_weights(outer, products, v, samples)
        if len(products) == 1:
            sums[-1].addcmul_(weighted[0], products[0])
        else:
            sums[-1].add_(_sum(products.mul_(weighted)))
    return [total.reshape(outer.shape) for total in sums]


def by_sample(outer: Outer, in_order: bool = False) -> Iterator[tuple[int, slice, Tensor]]:
    """A vector, some samples, and their products ``[n, *]``.

    The last axes are the parameter's, split. They are overwritten by the next ones: fresh memory costs more than
    arithmetic.

    Args:
        outer: the products.
        in_order: entries are in the parameter's order in memory, too.
    """
    # [I, O]: few inputs, as of the first convolution, fill the rows of a matrix product better than its columns
    right_first = outer.transposed or not (in_order or isinstance(outer._right, Tensor))
    sides = (outer.I, outer.O) if right_first else (outer.O, outer.I)
    device = outer.left.device.type
    step = costs.samples_at_once(outer.G * outer.O * outer.I, outer.N, device)
    bands = outer._right.bands if isinstance(outer._right, Patches) and right_first else None
    if bands is not None and (step == 1 or costs.one_by_one(outer.I // bands.shape[2], outer.I * outer.S, device)):
        K, C, R = bands.shape[2:5]
        buffer, rights = outer.left.new_empty(outer.G, K, C * R, outer.O), bands.flatten(3, 4).flatten(0, 1).unbind()
        products = buffer.view(1, outer.G, K, C, R, outer.O).permute(0, 1, 5, 3, 2, 4)
        for v, of_v in enumerate(outer.left):
            for i, (left, right) in enumerate(zip(of_v.flatten(0, 1), rights, strict=True)):
                n, g = divmod(i, outer.G)
                torch.bmm(right, left.expand(K, -1, -1), out=buffer[g])
                if g == outer.G - 1:
                    yield v, slice(n, n + 1), products
        return
    rights = pieces(outer.right, step)
    buffer = outer.left.new_empty(min(step, outer.N) * outer.G, *sides)
    for v, of_v in enumerate(outer.left):
        for i, (left, right) in enumerate(zip(pieces(of_v, step), rights, strict=True)):
            rows, columns = (right, left) if right_first else (left, right)
            products = torch.bmm(rows.mT, columns, out=buffer[: len(left)]).view(-1, outer.G, *sides)
            products = products if right_first == outer.transposed else products.mT
            yield v, slice(i * step, (i + 1) * step), products


def _times_weights(outer: Outer, products: Tensor, v: int, samples: slice) -> Tensor:
    if outer.weights is None:
        return products
    return products * outer.weights[v, samples].reshape(-1, *[1] * (products.dim() - 1))
