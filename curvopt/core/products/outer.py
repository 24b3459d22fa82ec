"""Products ``sum_s left ⊗ right`` of linear and convolution layers, which are rarely multiplied out.

>>> left, right = torch.ones(1, 4, 1, 5, 2), torch.ones(4, 1, 5, 3)  # [V, N, G, S, O] and [N, G, S, I]
>>> products = Outer(left, right, torch.Size([2, 3]))
>>> products.dense().shape, products.norms2()  # norms come from Gram matrices where that is cheaper
(torch.Size([1, 4, 2, 3]), tensor([[150., 150., 150., 150.]]))
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property, reduce
from math import prod
from typing import Self, TypeVar

import torch
from torch import Tensor

from curvopt.core.products import chunk_sizes as costs
from curvopt.core.products.base import Approx, Jacobian
from curvopt.core.products.outer_squares import add_squares, by_sample, squares_of_pairs, sums_by_sample
from curvopt.core.products.patches import Patches
from curvopt.core.products.products import norms2_of, over_samples, pairs_of, products_of
from curvopt.core.products.second_moments import (
    _are_apart,
    _by_feature,
    _in_basis,
    _in_parts,
    _moment_of_parts,
    _second_moment,
    _ungrouped,
)
from curvopt.core.products.squares import Squares
from curvopt.core.products.sums import _weighted, add, cast, widened

T = TypeVar("T")


class Outer(Jacobian):
    """Products ``sum_s left ⊗ right`` of a matrix-times-patches parameter (linear, convolution, ...).

    Args:
        left: what arrived from the output, ``[V, N, G, S, O]``.
        right: the layer's input, ``[N, G, S, I]``, as `Patches` perhaps.
        shape: shape of the parameter, a reshaped ``[G, O, I]``.
        transposed: the parameter is a reshaped ``[G, I, O]`` instead.
        lengths: how many positions each sample has, ``[N]``, if there are zeros in place of others.
        of_batch: see `Jacobian`.
        parts: see `Jacobian`.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor | Patches,
        shape: torch.Size,
        transposed: bool = False,
        lengths: Tensor | None = None,
        of_batch: bool = False,
        parts: Sequence[Jacobian] = (),
    ):
        """Keep both sides."""
        self.left, self._right, self.shape, self.transposed = left, right, shape, transposed
        self.lengths, self.of_batch, self.parts = lengths, of_batch, parts
        self.V, self.N, self.G, self.S, self.O = left.shape
        self.I = prod(shape) // (self.G * self.O)
        self._moment: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """The layer's input, ``[N, G, S, I]``."""
        return self._right.whole if isinstance(self._right, Patches) else self._right

    @property
    def like(self) -> Tensor:
        return self.left

    def dense(self) -> Tensor:
        if torch.is_grad_enabled() or not isinstance(self._right, Patches):
            return products_of(*self._sides(self.left, self.right)).reshape(self.V, self.N, *self.shape)
        products = self.left.new_empty(self.V, self.N, *self.shape)
        of_matrices, n = products.view(self.V, self.N, self.G, *self._sides(self.O, self.I)), 0
        for right in self._right.split(costs.rows_at_once(self.S, self.G * self.I, self.left.device.type)):
            samples = slice(n, n := n + len(right))
            products_of(*self._sides(self.left[:, samples], right), out=of_matrices[:, samples])
        return products

    def with_lengths(self, lengths: Tensor) -> Self:
        steps = int(lengths.max()) * (len(lengths) // self.N)  # of all sequences of a sample
        result = copy(self)
        of_samples = lengths if len(lengths) == self.N else lengths.view(self.N, -1).sum(1)
        result.lengths = of_samples if steps == self.S else of_samples * (self.S // max(steps, 1))
        return result

    @property
    def positions_of_all(self) -> bool:
        return super().positions_of_all or (self.of_batch and self.S > 1)

    @property
    def positions(self) -> int:
        number = self.N * self.S if self.lengths is None else int(self.lengths.sum())
        return number // self.N if self.of_batch and _are_apart(self.left.movedim(3, 2)) else number

    def sum_batch(self) -> Tensor:
        return self._shaped(over_samples(self.left, self.right))

    def squares(self) -> Tensor:
        return Squares().add(self).total()

    def moments(self) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or self.by_pairs(1) is not None:
            return super().moments()
        total, squares = sums_by_sample(self, of_products=True)
        return cast(total, self.left.dtype), cast(squares, self.left.dtype)

    def squares_batch(self) -> Tensor:
        return Squares(per_sample=True).add(self).total()

    def norms2(self) -> Tensor:
        """Squared norms ``[V, N]`` without forming the products where that is cheaper (Gram trick, Goodfellow 2015)."""
        if self.G == self.S == 1:
            return self.output_norms2 * norms2_of(self.right)
        if costs.by_gram(self.S, self.O, self.I):
            # terms of both signs may round to less than nothing
            return ((self.left @ self.left.mT) * (self.right @ self.right.mT)).sum((2, 3, 4)).clamp(min=0)
        if torch.is_grad_enabled():
            return self.dense().reshape(self.V, self.N, -1).square().sum(2)
        norms = self.left.new_empty(self.V, self.N)
        for v, samples, products in by_sample(self):
            norms[v, samples] = products.square_().sum([*range(1, products.dim())])
        return norms

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.S == 1 and (limit is None or self.O <= limit):
            return self.output_moment()
        left = self.left.sum(3, keepdim=True) if approx == "reduce" else self.left
        return _second_moment(left.flatten(0, 1), limit)

    # of the left side of one position, which are those of a bias, too:

    def output_moment(self) -> Tensor:
        """Second moment, computed for who asks first; the others get copies."""
        if self._moment is not None:
            return self._moment.clone()
        self._moment = _second_moment(self.left.flatten(0, 1))
        return self._moment

    @cached_property
    def output_norms2(self) -> Tensor:
        """Squared norms, ``[V, N]``."""
        return norms2_of(self.left)

    @cached_property
    def output_squares(self) -> Tensor:
        """Squares, weighted and summed over vectors, ``[N, G, 1, O]``."""
        return _weighted(self.left * self.left, self.weights)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if approx == "expand":
            factor = self._mean_square(limit)
            return factor if self.lengths is None else factor * (self.N * self.S / max(int(self.lengths.sum()), 1))
        rows = self.right.mean(2, keepdim=True)
        if self.lengths is not None:
            rows = rows * (self.S / self.lengths.clamp(min=1)).to(rows)[:, None, None, None]
        return _second_moment(rows, limit, 1 / max(self.rows_of_batch, 1))

    @property
    def rows_of_batch(self) -> int:
        """Number of samples that have positions."""
        return self.N if self.lengths is None else int((self.lengths > 0).sum())

    def _mean_square(self, limit: int | None) -> Tensor:
        """The mean over all positions, ended sequences' included."""
        right = self._right
        if torch.is_grad_enabled():
            return _second_moment(self.right, limit, 1 / max(self.right.shape[0] * self.right.shape[2], 1))
        limited = limit is not None and self.I > limit
        if isinstance(right, Patches):
            if not limited and (moments := right.moment_by_rows()) is not None:
                return _ungrouped(moments)
            right = right if right.rows == 1 else right.whole
        if isinstance(right, Patches):
            step = costs.rows_at_once(self.S, self.G * self.I, self.left.device.type)
            R, parts = len(right) * self.S, right.split(step)
        else:  # of KFRA, more positions than on the left
            R, parts = right.shape[0] * right.shape[2], _in_parts(right)
        scale = 1 / max(R, 1)
        if not limited:
            return _moment_of_parts(parts, R, scale)
        moment = reduce(add, (widened(_second_moment(part, limit, scale)) for part in parts))
        return cast(moment, self.left.dtype)

    def rotated(self, bases: Sequence[Tensor]) -> Jacobian:
        of_left, of_right = reversed(bases) if self.transposed else bases
        left, right = _in_basis(self.left, of_left), _in_basis(self.right, of_right)
        return Outer(left, right, self.shape, self.transposed).with_weights(self.weights)

    def _selected(self, samples: list[int]) -> Jacobian:
        right = self._right
        right = right.select(samples) if isinstance(right, Patches) else right[samples]
        return Outer(self.left[:, samples], right, self.shape, self.transposed)

    def with_sides(self, left: Tensor, right: Tensor | None, shape: torch.Size, transposed: bool) -> Outer:
        """Products with another left side, and perhaps another right one."""
        return Outer(left, self._right if right is None else right, shape, transposed)

    def project(self, directions: Tensor) -> Tensor:
        # one product with the input for all directions, then one for each sample: summed in the order of memory
        directions = self.matrices(directions)[:, 0].transpose(0, 1)  # [G, K, O, I]
        seen = directions.flatten(1, 2) @ _by_feature(self.right)
        seen = seen.unflatten(2, (self.N, self.S)).unflatten(1, (-1, self.O)).permute(3, 1, 0, 2, 4)  # [N, K, G, O, S]
        # small products of other layouts take five times as long
        seen = (seen if self._features_first else seen.mT).flatten(2).contiguous()
        return (seen @ self._left_rows.mT).permute(1, 2, 0)

    def expand(self, coefficients: Tensor) -> Tensor:
        sides = (self.O, self.S) if self._features_first else (self.S, self.O)
        left = (coefficients.permute(2, 0, 1) @ self._left_rows).unflatten(2, (self.G, *sides))  # [N, K, G, *]
        left = (left if self._features_first else left.mT).permute(2, 1, 3, 0, 4)  # [G, K, O, N, S]
        products = left.flatten(3).flatten(1, 2) @ _by_feature(self.right).mT
        return self._shaped(products.unflatten(1, (-1, self.O)).transpose(0, 1))

    @property
    def _features_first(self) -> bool:
        """Whether the left side has the positions of a feature next to each other in memory."""
        return self.left.stride(3) < self.left.stride(4)

    @property
    def _left_rows(self) -> Tensor:
        """The left side as ``[N, V, *]``, with features and positions in the order in which they are stored."""
        return (self.left.mT if self._features_first else self.left).transpose(0, 1).flatten(2)

    def with_own_patches(self) -> Self:
        if not isinstance(self._right, Patches):
            return self
        result = copy(self)
        result._right = self._right.used_once()
        return result

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        right = alike.right if isinstance(alike, Outer) else self.right.clone()
        return Outer(self.left, right, self.shape, self.transposed).with_weights(self.weights)

    def joined(self, others: Sequence[Jacobian]) -> Sequence[Jacobian]:
        sharing = [self, *(other for other in others if isinstance(other, Outer) and other._right is self._right)]
        if len(sharing) == 1:
            return [self, *others]
        left = torch.cat([each.left for each in sharing])
        weights = [each.left.new_ones(each.V, each.N) if each.weights is None else each.weights for each in sharing]
        result = Outer(left, self._right, self.shape, self.transposed).with_weights(torch.cat(weights))
        return [result, *(other for other in others if other not in sharing)]

    def matrices(self, directions: Tensor) -> Tensor:
        """``[K, *p]`` as ``[K, 1, G, O, I]``, the inverse of `_shaped`."""
        matrices = directions.reshape(-1, 1, self.G, *self._sides(self.O, self.I))
        return matrices.mT if self.transposed else matrices

    def _shaped(self, matrices: Tensor) -> Tensor:
        """``[..., G, O, I]`` as ``[..., *p]``."""
        matrices = matrices.mT if self.transposed else matrices
        return matrices.reshape(*matrices.shape[:-3], *self.shape)

    def by_pairs(self, num_columns: int) -> Outer | None:
        chunks = -(-num_columns // self.V)
        return self if costs.by_pairs(num_columns, self.S, self.O, self.I, chunks) else None

    def output_pairs(self) -> Tensor:
        """Products of the left sides of all pairs of positions, summed over vectors, ``[N, G, P, O]``."""
        if self.S == 1:
            return self.output_squares
        return torch.cat([_weighted(pairs, self.weights) for pairs in pairs_of(self.left)], 2)

    def squares_of_pairs(self, left: Tensor, per_sample: bool) -> Tensor:
        """Squares from `output_pairs`, ``[*p]`` or, sample by sample, ``[N, *p]``."""
        return squares_of_pairs(self, left, per_sample)

    def add_squares(self, total: Tensor | None, per_sample: bool) -> Tensor:
        return add_squares(self, total, per_sample)

    def _sides(self, left: T, right: T) -> tuple[T, T]:
        """Left and right side, in the order in which the parameter has them."""
        return (right, left) if self.transposed else (left, right)


def concatenated(outers: Sequence[Outer]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both sides with the positions of all, and how many these are."""
    left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
    if all(o.lengths is None for o in outers):
        return left, right, None
    of_each = [torch.full((o.N,), o.S) if o.lengths is None else o.lengths for o in outers]
    return left, right, torch.stack(of_each).sum(0)
