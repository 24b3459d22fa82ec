"""Products ``sum_s left ⊗ right`` of linear and convolution layers, which are rarely multiplied out.

>>> left, right = torch.ones(1, 4, 1, 5, 2), torch.ones(4, 1, 5, 3)  # [V, N, G, S, O] and [N, G, S, I]
>>> products = Outer(left, right, torch.Size([2, 3]))
>>> products.dense().shape, products.norms2()  # norms come from Gram matrices where that is cheaper
(torch.Size([1, 4, 2, 3]), tensor([[150., 150., 150., 150.]]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property, reduce
from math import prod
from typing import Any, Self, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from curvopt.core.products import costs
from curvopt.core.products.base import (
    Approx,
    Dense,
    Jacobian,
    add,
    add_product,
    by_feature,
    cast,
    in_basis,
    in_parts,
    moment_of_parts,
    second_moment,
    summed,
    ungrouped,
    weighted,
    widened,
)

T = TypeVar("T")


class Patches:
    """The input of a convolution as patches, put together when a product needs them.

    Args:
        x: the input, ``[N, ...]``.
        see: returns rows ``[N, G, C, R, T]`` of the samples given, K, and the length of a row. A patch has the entries
            ``I = [C, K, R]``; entry k reads the rows shifted by k row lengths.
    """

    def __init__(self, x: Tensor, see: Callable[[Tensor], tuple[Tensor, int, int]]):
        """Keep the input."""
        self._x, self._see = x, see
        #: Rows of the input per sample; the positions of all its rows are positions of the sample.
        self.rows = 1
        #: Whether the patches stay in memory after their first use, for other columns or quantities.
        self.kept = True

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._x) // self.rows

    @cached_property
    def windows(self) -> Tensor:
        """The entries that the kernel sees at all positions, a view ``[N, G, C, K, R, S]``."""
        rows, K, row = self._see(self._x)
        return rows.unfold(-1, rows.shape[-1] - (K - 1) * row, max(row, 1)).transpose(3, 4)

    @cached_property
    def whole(self) -> Tensor:
        """The patches, ``[N, G, S, I]``; in memory positions come last, and samples before them."""
        seen = self.windows.permute(1, 2, 3, 4, 0, 5)
        del self.windows  # few will ask for both
        return by_sample(seen.flatten(1, 3).permute(2, 0, 3, 1), len(self))

    @property
    def bands(self) -> Tensor | None:
        """The view as ``[N, G, K, C, R, S]``, if it is smaller than the whole, and that is not there yet."""
        if "whole" in vars(self) or self.rows > 1 or self.windows.shape[3] == 1:
            return None
        return self.windows.transpose(2, 3)

    def split(self, step: int) -> Iterator[Tensor]:
        """The whole, a few samples at a time if it is used once."""
        if self.kept:
            yield self.whole
            return
        for x in self._x.split(step * self.rows):
            yield self._changed(_x=x).whole

    def moment_by_rows(self) -> Tensor | None:
        """Mean ``x x^T`` of all samples and positions, ``[G, I, I]``, by products of rows if that is cheaper.

        Entries k and k + d see the rows that 0 and d see, k rows further down. So products of rows d apart are summed
        once over the rows that count for every k, and by themselves for rows that not every k sees.
        """
        rows, K, row = self._see(self._x[:1])
        _, G, C, R, T = rows.shape
        N, F, S = len(self._x), C * R, T - (K - 1) * row
        if S < (K - 1) * row or not costs.by_rows(F, K, N * S, N * row, rows.device.type):
            return None
        sizes = [[row] * m + [S - m * row] + [row] * m for m in reversed(range(K))]
        sums = [widened(rows.new_zeros(len(sizes[d]), G, F, F)) for d in range(K)]
        for x in self._x.split(costs.rows_at_once(S, G * K * F, rows.device.type)):
            rows = self._see(x)[0].flatten(2, 3).permute(1, 2, 3, 0).contiguous()  # [G, F, T, N]
            for d in range(K):
                pairs = (side.split(sizes[d], 2) for side in (rows[:, :, : T - d * row], rows[:, :, d * row :]))
                for total, left, right in zip(sums[d], *pairs, strict=True):
                    add_product(total, left.flatten(2), right.flatten(2).mT, 1 / (N * S))
        moments = rows.new_empty(G, C, K, R, C, K, R)
        for d, of_d in enumerate(sums):
            for k in range(K - d):
                moment = of_d[k : k + K - d].sum(0).view(G, C, R, C, R)
                moments[:, :, k, :, :, k + d] = moment
                moments[:, :, k + d, :, :, k] = moment.permute(0, 3, 4, 1, 2)
        return moments.view(G, K * F, K * F)

    def used_once(self) -> Patches:
        """These patches, for one use."""
        return self._changed(kept=False)

    def select(self, samples: list[int]) -> Patches:
        """The patches of single samples."""
        return self._changed(_x=self._x.unflatten(0, (len(self), self.rows))[samples].flatten(0, 1), kept=False)

    def by_sample(self, N: int) -> Patches:
        """The patches of N samples, which have equally many rows each."""
        return self if len(self) == N else self._changed(rows=len(self._x) // N)

    def _changed(self, **values: Any) -> Patches:
        patches = copy(self)
        vars(patches).update(values)
        for made in ("windows", "whole"):
            vars(patches).pop(made, None)
        return patches


def by_sample(sides: Tensor, N: int) -> Tensor:
    """``[..., N k, G, S, F]`` as ``[..., N, G, k S, F]``: the k rows of a sample are positions."""
    if sides.shape[-4] == N:
        return sides
    return rearrange(sides, "... (n k) g s f -> ... n g (k s) f", n=N)


class Outer(Jacobian):
    """Products ``sum_s left ⊗ right`` of a matrix-times-patches parameter (linear, convolution, ...).

    Args:
        left: what arrived from the output, ``[V, N, G, S, O]``.
        right: the layer's input, ``[N, G, S, I]``, as `Patches` perhaps.
        shape: shape of the parameter, a reshaped ``[G, O, I]``.
        transposed: the parameter is a reshaped ``[G, I, O]`` instead.
        lengths: how many positions each sample has, ``[N]``, if zeros fill up to the longest.
    """

    #: Vectors ``[V, N, O]`` and a function for their second moment, which counts if the left side consists of them.
    known_moment: tuple[Tensor, Callable[[], Tensor]] | None = None

    def __init__(
        self,
        left: Tensor,
        right: Tensor | Patches,
        shape: torch.Size,
        transposed: bool = False,
        lengths: Tensor | None = None,
    ):
        """Keep both sides."""
        self.left, self.like, self._right, self.shape, self.transposed = left, left, right, shape, transposed
        self.lengths = lengths
        self.V, self.N, self.G, self.S, self.O = left.shape
        self.I = prod(shape) // (self.G * self.O)
        #: Second moments of the left side, computed once: who asks later gets a copy.
        self._moments: dict[tuple[Approx, int | None], Tensor] = {}

    @property
    def right(self) -> Tensor:
        """The layer's input, ``[N, G, S, I]``."""
        return self._right.whole if isinstance(self._right, Patches) else self._right

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
        result = copy(self)
        result.lengths = lengths * (self.S // max(int(lengths.max()), 1))
        return result

    @property
    def rows_of_batch(self) -> int:
        return self.N if self.lengths is None else int((self.lengths > 0).sum())

    @property
    def positions(self) -> int:
        return self.N * self.S if self.lengths is None else int(self.lengths.sum())

    def sum_batch(self) -> Tensor:
        return self._shaped(over_samples(self.left, self.right))

    def squares(self, per_sample: bool = False) -> Tensor:
        return Squares(per_sample).add(self).total()

    def moments(self) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or self.pays_by_pairs(1):
            return super().moments()
        total, squares = self._sums_by_sample(of_products=True)
        return cast(total, self.left.dtype), cast(squares, self.left.dtype)

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
        for v, samples, products in self._by_sample():
            norms[v, samples] = products.square_().sum([*range(1, products.dim())])
        return norms

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        limit = None if limit is None or self.O <= limit else limit
        key: tuple[Approx, int | None] = "expand" if self.S == 1 else approx, limit
        if key in self._moments:
            return self._moments[key].clone()
        left, known = self.left, self.known_moment
        if known is not None and key == ("expand", None) and _consists_of(left, known[0]):
            self._moments[key] = cast(known[1](), left.dtype)
        else:
            left = left.sum(3, keepdim=True) if key[0] == "reduce" else left
            self._moments[key] = second_moment(left.flatten(0, 1), limit)
        return self._moments[key]

    def beside(self, right: Tensor, shape: torch.Size) -> Outer:
        """Products of the same left side with another right one; the factors of the left side are computed once."""
        result = Outer(self.left, right, shape, self.transposed, self.lengths)
        result._moments = self._moments
        return result

    # of the left side of one position, which is the side of a bias, too:

    @cached_property
    def output_norms2(self) -> Tensor:
        """Squared norms, ``[V, N]``."""
        return norms2_of(self.left)

    @cached_property
    def output_squares(self) -> Tensor:
        """Squares, weighted and summed over vectors, ``[N, G, 1, O]``."""
        return weighted(self.left * self.left, self.weights)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if approx == "expand":
            factor = self._mean_square(limit)
            return factor if self.lengths is None else factor * (self.N * self.S / max(self.positions, 1))
        rows = self.right.mean(2, keepdim=True)
        if self.lengths is not None:
            rows = rows * (self.S / self.lengths.clamp(min=1)).to(rows)[:, None, None, None]
        return second_moment(rows, limit, 1 / max(self.rows_of_batch, 1))

    def _mean_square(self, limit: int | None) -> Tensor:
        """The mean over all positions, ended sequences' included."""
        right = self._right
        if torch.is_grad_enabled():
            return second_moment(self.right, limit, 1 / max(self.right.shape[0] * self.right.shape[2], 1))
        if isinstance(right, Patches):
            whole = limit is None or self.I <= limit
            if whole and (moments := right.moment_by_rows()) is not None:
                return ungrouped(moments)
            right = right if right.rows == 1 else right.whole
        if isinstance(right, Patches):
            step = costs.rows_at_once(self.S, self.G * self.I, self.left.device.type)
            R, parts = len(right) * self.S, right.split(step)
        else:  # of KFRA, more positions than on the left
            R, parts = right.shape[0] * right.shape[2], in_parts(right)
        return moment_of_parts(parts, 1 / max(R, 1), limit)

    def squares_in(self, bases: Sequence[Tensor]) -> Tensor:
        of_left, of_right = reversed(bases) if self.transposed else bases
        in_one_dtype = of_left.dtype == of_right.dtype == self.left.dtype  # else the bases' one is for both sides
        multiplied = in_one_dtype and not (torch.is_grad_enabled() or self.pays_by_pairs(self.V))
        left_later = multiplied and costs.in_basis_later(self.S, self.I)
        right_later = multiplied and costs.in_basis_later(self.S, self.V * self.O)
        left = self.left if left_later else in_basis(self.left, of_left)
        right = self._right if right_later else in_basis(self.right, of_right)
        products = Outer(left, right, self.shape, self.transposed).with_weights(self.weights)
        if not (left_later or right_later):
            return products.squares()

        def in_bases(values: Tensor) -> Tensor:
            matrices = values.reshape(-1, self.G, *self._sides(self.O, self.I))
            matrices = matrices.mT if self.transposed else matrices  # [n, G, O, I]
            matrices = in_basis(matrices, of_right) if right_later else matrices
            matrices = in_basis(matrices.mT, of_left).mT if left_later else matrices
            return matrices.mT if self.transposed else matrices

        (squares,) = products._sums_by_sample(change=in_bases)
        return cast(squares, torch.promote_types(self.left.dtype, of_left.dtype))

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
        seen = directions.flatten(1, 2) @ by_feature(self.right)
        seen = seen.unflatten(2, (self.N, self.S)).unflatten(1, (-1, self.O)).permute(3, 1, 0, 2, 4)  # [N, K, G, O, S]
        # small products of other layouts take five times as long
        seen = (seen if self._features_first else seen.mT).flatten(2).contiguous()
        return (seen @ self._left_rows.mT).permute(1, 2, 0)

    def expand(self, coefficients: Tensor) -> Tensor:
        sides = (self.O, self.S) if self._features_first else (self.S, self.O)
        left = (coefficients.permute(2, 0, 1) @ self._left_rows).unflatten(2, (self.G, *sides))  # [N, K, G, *]
        left = (left if self._features_first else left.mT).permute(2, 1, 3, 0, 4)  # [G, K, O, N, S]
        products = left.flatten(3).flatten(1, 2) @ by_feature(self.right).mT
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

    def joined(self, following: Sequence[Jacobian]) -> Sequence[Jacobian]:
        sharing = [self, *(each for each in following if isinstance(each, Outer) and each._right is self._right)]
        if len(sharing) == 1:
            return [self, *following]
        left = torch.cat([each.left for each in sharing])
        weights = [each.left.new_ones(each.V, each.N) if each.weights is None else each.weights for each in sharing]
        result = Outer(left, self._right, self.shape, self.transposed).with_weights(torch.cat(weights))
        return [result, *(each for each in following if each not in sharing)]

    def matrices(self, directions: Tensor) -> Tensor:
        """``[K, *p]`` as ``[K, 1, G, O, I]``, the inverse of `_shaped`."""
        matrices = directions.reshape(-1, 1, self.G, *self._sides(self.O, self.I))
        return matrices.mT if self.transposed else matrices

    def _shaped(self, matrices: Tensor) -> Tensor:
        """``[..., G, O, I]`` as ``[..., *p]``."""
        matrices = matrices.mT if self.transposed else matrices
        return matrices.reshape(*matrices.shape[:-3], *self.shape)

    def pays_by_pairs(self, num_columns: int) -> bool:
        """Whether squares of so many columns are cheaper by pairs of positions."""
        chunks = -(-num_columns // self.V)
        return costs.by_pairs(num_columns, self.S, self.O, self.I, chunks)

    def output_pairs(self) -> Tensor:
        """Products of the left sides of all pairs of positions, summed over vectors, ``[N, G, P, O]``."""
        if self.S == 1:
            return self.output_squares
        return torch.cat([weighted(pairs, self.weights) for pairs in pairs_of(self.left)], 2)

    def squares_of_pairs(self, left: Tensor, per_sample: bool) -> Tensor:
        """Squares from `output_pairs`, ``[*p]`` or, sample by sample, ``[N, *p]``."""
        P, width, device = left.shape[2], self.G * self.I, left.device.type
        step = costs.samples_at_once(P * width, self.N, device) if per_sample else costs.rows_at_once(P, width, device)
        left = torch.cat([left[:, :, : self.S], 2 * left[:, :, self.S :]], 2) if self.S > 1 else left
        several = step < self.N
        sides = zip(left.split(step), self.right.split(step), strict=True) if several else [(left, self.right)]
        parts = ((part, right * right if self.S == 1 else torch.cat([*pairs_of(right)], 2)) for part, right in sides)
        if not per_sample:
            return self._shaped(reduce(add, (widened(over_samples(part, right)) for part, right in parts)))
        if torch.is_grad_enabled():
            return self._shaped(torch.cat([part.mT @ right for part, right in parts]))
        result = left.new_empty(1, self.N, self.G, *self._sides(self.O, self.I))
        for (part, right), out in zip(parts, result.split(step, 1), strict=True):
            rows, columns = self._sides(part, right)
            products_of(rows.unsqueeze(0), columns.unsqueeze(0), out)
        return result.reshape(self.N, *self.shape)

    def add_squares(self, total: Tensor | None, per_sample: bool) -> Tensor:
        """``total`` plus the squares, ``[*p]`` or, sample by sample, ``[N, *p]``; in place where no graph is built.

        The result is of at least float32 (see `widened`).
        """
        if torch.is_grad_enabled():
            squares = widened(weighted(self.dense().square(), self.weights))
            return add(total, squares if per_sample else squares.sum(0))
        if per_sample:
            like = widened(self.left.new_empty(0))
            result = like.new_empty(self.N, *self.shape) if total is None else total.contiguous()
            for v, samples, products in self._by_sample(in_order=True):
                scaled = self._times_weights(products, v, samples)
                of_samples = result[samples].view(-1, *products.shape[1:])
                if total is None and v == 0:
                    torch.mul(scaled, products, out=of_samples)
                else:
                    of_samples.addcmul_(scaled, products)
            return result
        return add(total, self._sums_by_sample()[0].contiguous())

    def _sums_by_sample(
        self, of_products: bool = False, change: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Squares, weighted and summed over vectors and samples; first the sums of the products, if they are wanted.

        Each is ``[*p]``, of at least float32 (see `widened`), in any order in memory.

        Args:
            of_products: whether the sums of the products are wanted.
            change: of products, before they are squared.
        """
        sums: list[Tensor] = []
        for v, samples, products in self._by_sample():
            products = products if change is None else change(products)
            sums = sums or [widened(torch.zeros_like(products[0])) for _ in range(1 + of_products)]
            if of_products:
                sums[0].add_(products[0] if len(products) == 1 else summed(products))
            scaled = self._times_weights(products, v, samples)
            if len(products) == 1:
                sums[-1].addcmul_(scaled[0], products[0])
            else:
                sums[-1].add_(summed(products.mul_(scaled)))
        return [total.reshape(self.shape) for total in sums]

    def _by_sample(self, in_order: bool = False) -> Iterator[tuple[int, slice, Tensor]]:
        """The number of a vector, a slice of the samples, and their products ``[n, *]``.

        The last axes are the parameter's, split. They are overwritten by the next ones: fresh memory costs more than
        arithmetic.

        Args:
            in_order: entries are in the parameter's order in memory, too.
        """
        # [I, O]: few inputs, as of the first convolution, fill the rows of a matrix product better than its columns
        right_first = self.transposed or not (in_order or isinstance(self._right, Tensor))
        sides = (self.I, self.O) if right_first else (self.O, self.I)
        device = self.left.device.type
        step = costs.samples_at_once(self.G * self.O * self.I, self.N, device)
        bands = self._right.bands if isinstance(self._right, Patches) and right_first else None
        if bands is not None and (step == 1 or costs.one_by_one(self.I // bands.shape[2], self.I * self.S, device)):
            K, C, R = bands.shape[2:5]
            buffer, rights = self.left.new_empty(self.G, K, C * R, self.O), bands.flatten(3, 4).flatten(0, 1).unbind()
            products = buffer.view(1, self.G, K, C, R, self.O).permute(0, 1, 5, 3, 2, 4)
            for v, of_v in enumerate(self.left):
                for i, (left, right) in enumerate(zip(of_v.flatten(0, 1), rights, strict=True)):
                    n, g = divmod(i, self.G)
                    torch.bmm(right, left.expand(K, -1, -1), out=buffer[g])
                    if g == self.G - 1:
                        yield v, slice(n, n + 1), products
            return
        rights = pieces(self.right, step)
        buffer = self.left.new_empty(min(step, self.N) * self.G, *sides)
        for v, of_v in enumerate(self.left):
            for i, (left, right) in enumerate(zip(pieces(of_v, step), rights, strict=True)):
                rows, columns = (right, left) if right_first else (left, right)
                products = torch.bmm(rows.mT, columns, out=buffer[: len(left)]).view(-1, self.G, *sides)
                products = products if right_first == self.transposed else products.mT
                yield v, slice(i * step, (i + 1) * step), products

    def _times_weights(self, products: Tensor, v: int, samples: slice) -> Tensor:
        if self.weights is None:
            return products
        return products * self.weights[v, samples].reshape(-1, *[1] * (products.dim() - 1))

    def _sides(self, left: T, right: T) -> tuple[T, T]:
        """Left and right side, in the order in which the parameter has them."""
        return (right, left) if self.transposed else (left, right)


class Bias(Dense):
    """Products of a bias that equal the left side of its weight's, of one position: its moments are computed once.

    Args:
        values: ``[V, N, O]``.
        weight: the products of the weight.
    """

    def __init__(self, values: Tensor, weight: Outer):
        """Keep both."""
        super().__init__(values)
        self.weight = weight

    def squares(self, per_sample: bool = False) -> Tensor:
        if self.weight.weights is not self.weights:
            return super().squares(per_sample)
        squares = self.weight.output_squares.flatten(1)
        return squares.clone() if per_sample else squares.sum(0)  # the weight may ask for them, too

    def norms2(self) -> Tensor:
        return self.weight.output_norms2.clone()

    def _moment(self, limit: int | None) -> Tensor:
        return self.weight.output_factor("expand", limit)


def concatenated(outers: Sequence[Outer]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both sides with the positions of all, and how many these are."""
    left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
    if all(o.lengths is None for o in outers):
        return left, right, None
    of_each = [torch.full((o.N,), o.S) if o.lengths is None else o.lengths for o in outers]
    return left, right, torch.stack(of_each).sum(0)


class Squares:
    """Squared products, summed over chunks of columns, over vectors and, unless they are kept apart, over samples.

    Chunks of an `Outer` share their right side. Where squares are taken by pairs of positions (or there is one position
    only), it is multiplied once, at the end.

    Args:
        per_sample: keep samples apart.
    """

    def __init__(self, per_sample: bool = False):
        """Begin with nothing."""
        self.per_sample = per_sample
        self._value: Tensor | None = None
        self._pairs: tuple[Outer, Tensor] | None = None
        self._signed = False
        self._dtype: torch.dtype | None = None

    def add(self, jacobian: Jacobian, num_columns: int | None = None) -> Squares:
        """Add the squares of a chunk of columns, of ``num_columns`` in all."""
        self._dtype = self._dtype or jacobian.like.dtype
        if isinstance(jacobian, Outer) and jacobian.pays_by_pairs(num_columns or jacobian.V):
            if self._pairs is not None and self._pairs[0].right is not jacobian.right:
                self.total()
            pairs = widened(jacobian.output_pairs())  # a bias may share them
            self._pairs = jacobian, pairs if self._pairs is None else self._pairs[1] + pairs
            self._signed = self._signed or jacobian.weights is not None
            return self
        self._value = jacobian.add_squares(self._value, self.per_sample)
        return self

    def total(self) -> Tensor:
        """The sum so far, ``[*p]`` or ``[N, *p]``."""
        if self._pairs is not None:
            (jacobian, left), self._pairs = self._pairs, None
            squares = jacobian.squares_of_pairs(cast(left, jacobian.left.dtype), self.per_sample)
            if jacobian.S > 1 and not self._signed:  # terms of both signs may round to less than nothing
                squares.clamp_(min=0)
            self._value = add(self._value, widened(squares))
        assert self._value is not None
        return cast(self._value, self._dtype)


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
    return by_feature(left) @ by_feature(right).mT


def _consists_of(left: Tensor, vectors: Tensor) -> bool:
    """Whether a left side of one position, ``[V, N, 1, 1, O]``, is vectors ``[V, N, O]``, in the same memory."""
    if left.dtype != vectors.dtype or left.device != vectors.device or left.shape[2:4] != (1, 1):
        return False
    rows = left[:, :, 0, 0]
    return (rows.shape, rows.stride(), rows.data_ptr()) == (vectors.shape, vectors.stride(), vectors.data_ptr())


def norms2_of(sides: Tensor) -> Tensor:
    """Squared norms of sides ``[..., G, S, F]``."""
    if torch.is_grad_enabled():  # at zero a norm has no second derivative
        return (sides * sides).sum((-3, -2, -1))
    return torch.linalg.vector_norm(sides, dim=(-3, -2, -1)).square_()
