"""Transposed-Jacobian products of one parameter, kept in factored form, and the reductions every quantity is made of.

A rule turns the vectors that arrive at a module's output into a `Jacobian`: for each vector ``v`` and sample ``n`` the
product ``J_n^T v_n`` with respect to one parameter of shape ``p``. Letters: V vectors, N samples, G groups, S shared
positions (sequence, space, or several uses of one module), O/I output/input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, reduce
from math import prod
from typing import Any, Literal, TypeVar

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core import costs

Approx = Literal["expand", "reduce"]
T = TypeVar("T")

#: Largest number of entries of a parameter without Kronecker structure that still gets a dense curvature block.
DENSE_BLOCK_LIMIT = 2048


class Jacobian(ABC):
    """``J_n^T v_n`` for V vectors and N samples with respect to one parameter of shape ``shape``."""

    shape: torch.Size
    V: int
    N: int
    #: Whether the parameter has two Kronecker factors.
    factored = True
    #: Whether axis 0 of the parameter belongs to `right_factor` (``[I, O]``: transposed convolutions, embeddings).
    transposed = False
    #: Signed weight of every vector in the sums of squares and products, ``[V, N]``; ``None`` for ones.
    weights: Tensor | None = None
    #: The uses it belongs to; chunks of columns of the same uses share their right side.
    origin: tuple = ()
    #: Number of columns of the whole sweep, of which V are here.
    columns: int | None = None
    #: Whether some positions may be those of other samples, where these do not lie one after the other.
    positions_of_all = False
    #: Whether it has all positions of the batch for every sample, of which each may be of one sample only.
    of_batch = False
    #: Those of single uses, if it is of several of which some are of the batch.
    uses: Sequence[Jacobian] = ()
    #: The sum over the samples, where it is known.
    gradient: Tensor | None = None
    #: The parameter; known to extensions whose quantity depends on it.
    parameter: Tensor | None = None

    @abstractmethod
    def dense(self) -> Tensor:
        """All products, ``[V, N, *p]``."""

    @abstractmethod
    def sum_batch(self) -> Tensor:
        """Products summed over the samples, ``[V, *p]``."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Squared entries, weighted by `weights`, summed over vectors and samples, ``[*p]``."""

    @abstractmethod
    def squares_batch(self) -> Tensor:
        """Squared entries, weighted by `weights`, summed over the vectors only, ``[N, *p]``."""

    @abstractmethod
    def norms2(self) -> Tensor:
        """Squared Euclidean norm of every product, ``[V, N]``."""

    @abstractmethod
    def left_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """Second moment of the backpropagated side, summed over vectors and samples (the ``B`` of KFAC).

        ``[O, O]`` (``[G, O, O]`` with groups) for a parameter with Kronecker structure, its blocks ``[G, K, b, b]`` on
        the diagonal where O is more than ``limit``. Else the dense block ``sum_vn j j^T`` of shape ``[P, P]``, or such
        blocks of it, or its diagonal ``[P]`` for more than `DENSE_BLOCK_LIMIT` entries.
        """

    @abstractmethod
    def right_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor | None:
        """Second moment of the input side, averaged over samples and positions (the ``A`` of KFAC), if there is one.

        Blocks ``[G, K, b, b]`` on its diagonal where I is more than ``limit``.
        """

    @property
    def positions(self) -> int:
        """How many positions the samples have, where those of the batch may be of one sample each."""
        return 0

    @property
    def rows_of_batch(self) -> int:
        """Number of samples that reach the parameter here."""
        return self.N

    def set_lengths(self, lengths: Tensor) -> None:  # noqa: B027 - a difference where positions are averaged only
        """Tell how long the sequences are, ``[N]``, if there are zeros in the place of steps that some have not."""

    def right_factor_of_uses(self, approx: Approx = "expand", limit: int | None = None) -> Tensor | None:
        """`right_factor`, in which every use counts by its `positions`."""
        if approx == "reduce" or not self.uses:
            return self.right_factor(approx, limit)
        counts = [use.positions for use in self.uses]
        factors = (use.right_factor(approx, limit) for use in self.uses)
        means = zip(counts, factors, strict=True)
        return reduce(add, (factor * (count / max(sum(counts), 1)) for count, factor in means if factor is not None))

    @abstractmethod
    def rotated(self, bases: Sequence[Tensor]) -> Jacobian:
        """Products in other coordinates: ``(U1 ⊗ U2)^T j`` for orthogonal bases shaped as the Kronecker factors.

        Args:
            bases: the columns of the first and second factor's bases, or of the only one's; those of diagonal factors
                are the identity, whatever their entries.
        """

    def select(self, samples: Sequence[int] | None) -> Jacobian:
        """The same for some samples only (all for ``None``), in the order given."""
        return self if samples is None else Dense(self.dense()[:, list(samples)])

    def project(self, directions: Tensor) -> Tensor:
        """Inner product of every product with ``[K, *p]`` directions, ``[K, V, N]``."""
        return torch.einsum("vnp,kp->kvn", self._flat(), directions.reshape(len(directions), -1))

    def expand(self, coefficients: Tensor) -> Tensor:
        """Products weighted by ``[K, V, N]`` coefficients and summed over vectors and samples, ``[K, *p]``."""
        result = torch.einsum("kvn,vnp->kp", coefficients, self._flat())
        return result.reshape(-1, *self.shape)

    def _flat(self) -> Tensor:
        return self.dense().reshape(self.V, self.N, -1)

    @abstractmethod
    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        """A copy that shares nothing with the network's activations or graph.

        Args:
            alike: such a copy for other vectors of the same uses, with which this one may share the layer's input.
        """

    def joined(self, others: Sequence[Jacobian]) -> Sequence[Jacobian]:
        """One for the vectors of this and of others, as far as they share the layer's input, and all that do not."""
        return [self, *others]

    def settled(self) -> Jacobian:
        """The same, needing no more of the network's graph."""
        return self

    def share_no_patches(self) -> None:  # noqa: B027 - few have any
        """Let patches that are put together for this one go with it."""

    def matmul(self, directions: Tensor) -> Tensor:
        """``sum_vn w_vn j_vn j_vn^T`` applied to ``[K, *p]`` directions."""
        coefficients = self.project(directions)
        return self.expand(coefficients if self.weights is None else coefficients * self.weights)


class Dense(Jacobian):
    """Products that are already multiplied out: biases, scales, anything without structure.

    Args:
        values: ``[V, N, *p]``.
        left_of: products of one position whose left side has the same values, so that both share what is made of it.
    """

    factored = False

    def __init__(self, values: Tensor, left_of: Outer | None = None):
        """Keep the values."""
        self.values, self.left_of = values, left_of
        self.V, self.N = values.shape[:2]
        self.shape = values.shape[2:]

    def dense(self) -> Tensor:
        return self.values

    def sum_batch(self) -> Tensor:
        return self.values.sum(1)

    def squares(self) -> Tensor:
        return self._squares().sum(0)

    def squares_batch(self) -> Tensor:
        squares = self._squares()
        return squares if self.left_of is None else squares.clone()  # others may share them

    def _squares(self) -> Tensor:
        if self.left_of is not None and self.left_of.weights is self.weights:
            return self.left_of.left_squares.flatten(1)
        return _weighted(self.values.square(), self.weights)

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        result = Dense(self.values)  # its neighbour holds the activations
        result.weights = self.weights
        return result

    def norms2(self) -> Tensor:
        if self.left_of is not None:
            return self.left_of.left_norms2.clone()
        return self.values.reshape(self.V, self.N, -1).square().sum(2)

    def left_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        flat = self.values.reshape(self.V * self.N, -1)
        if flat.shape[1] > DENSE_BLOCK_LIMIT:
            return flat.square().sum(0)
        if self.left_of is None or (limit is not None and flat.shape[1] > limit):
            return _second_moment(flat[:, None, None], limit)
        return self.left_of.left_moment()

    def right_factor(self, approx: Approx = "expand", limit: int | None = None) -> None:
        return None

    def rotated(self, bases: Sequence[Tensor]) -> Jacobian:
        (basis,) = bases
        if basis.dim() == 1:
            return self
        result = Dense(_in_basis(self._flat()[..., None, None, :], basis).reshape(self.values.shape))
        result.weights = self.weights
        return result


class Patches:
    """The input of a convolution as patches, put together when a product needs them.

    Args:
        x: the input, ``[N, ...]``.
        see: rows ``[N, G, C, R, T]`` of some samples, K, and their length: of the ``I = [C, K, R]`` entries of a patch
            those at k see the S positions from the k-th row on.
    """

    def __init__(self, x: Tensor, see: Callable[[Tensor], tuple[Tensor, int, int]]):
        """Keep the input."""
        self._x, self._see = x, see
        #: Rows of the input that make a sample, whose positions are those of all of them.
        self.rows = 1
        #: Whether others need them, too.
        self.kept = True

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._x) // self.rows

    @cached_property
    def windows(self) -> Tensor:
        """What the kernel sees at all positions, a view ``[N, G, C, K, R, S]``."""
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
        """The whole, a few samples at a time if nobody else needs it."""
        if self.kept:
            yield self.whole
            return
        for x in self._x.split(step * self.rows):
            yield self._changed(_x=x).whole

    def moment_by_rows(self) -> Tensor | None:
        """Mean ``x x^T`` of all samples and positions, ``[G, I, I]``, by products of rows if that is cheaper.

        Entries k and k + d see the rows that 0 and d see, k rows further down. So products of rows with those d further
        down are summed once over the rows that count for every k, and by themselves for rows that some k see.
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
                    _add_product(total, left.flatten(2), right.flatten(2).mT, 1 / (N * S))
        moments = rows.new_empty(G, C, K, R, C, K, R)
        for d, of_d in enumerate(sums):
            for k in range(K - d):
                moment = of_d[k : k + K - d].sum(0).view(G, C, R, C, R)
                moments[:, :, k, :, :, k + d] = moment
                moments[:, :, k + d, :, :, k] = moment.permute(0, 3, 4, 1, 2)
        return moments.view(G, K * F, K * F)

    def used_once(self) -> Patches:
        """The same, kept for nobody."""
        return self._changed(kept=False)

    def select(self, samples: list[int]) -> Patches:
        """Those of some samples."""
        return self._changed(_x=self._x.unflatten(0, (len(self), self.rows))[samples].flatten(0, 1), kept=False)

    def by_sample(self, N: int) -> Patches:
        """Those of N samples, of as many rows each."""
        return self if len(self) == N else self._changed(rows=len(self._x) // N)

    def _changed(self, **values: Any) -> Patches:
        patches = copy(self)
        vars(patches).update(values)
        for made in ("windows", "whole"):
            vars(patches).pop(made, None)
        return patches


class Outer(Jacobian):
    """Products ``sum_s left ⊗ right`` of a matrix-times-patches parameter (linear, convolution, ...).

    Args:
        left: what arrived from the output, ``[V, N, G, S, O]``.
        right: the layer's input, ``[N, G, S, I]``, as `Patches` perhaps.
        shape: shape of the parameter, a reshaped ``[G, O, I]``.
        transposed: the parameter is a reshaped ``[G, I, O]`` instead.
    """

    def __init__(self, left: Tensor, right: Tensor | Patches, shape: torch.Size, transposed: bool = False):
        """Keep both sides."""
        self.left, self._right, self.shape, self.transposed = left, right, shape, transposed
        self.V, self.N, self.G, self.S, self.O = left.shape
        self.I = prod(shape) // (self.G * self.O)
        self._moment: Tensor | None = None
        #: How many positions each sample has, ``[N]``, if there are zeros in the place of others.
        self.lengths: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """The layer's input, ``[N, G, S, I]``."""
        return self._right.whole if isinstance(self._right, Patches) else self._right

    def dense(self) -> Tensor:
        if torch.is_grad_enabled() or not isinstance(self._right, Patches):
            return _products(*self._sides(self.left, self.right)).reshape(self.V, self.N, *self.shape)
        products = self.left.new_empty(self.V, self.N, *self.shape)
        of_matrices, n = products.view(self.V, self.N, self.G, *self._sides(self.O, self.I)), 0
        for right in self._right.split(costs.rows_at_once(self.S, self.G * self.I, self.left.device.type)):
            samples = slice(n, n := n + len(right))
            _products(*self._sides(self.left[:, samples], right), out=of_matrices[:, samples])
        return products

    def set_lengths(self, lengths: Tensor) -> None:
        steps = int(lengths.max()) * (len(lengths) // self.N)  # of all sequences of a sample
        self.lengths = lengths.view(self.N, -1).sum(1) * (self.S // max(steps, 1))

    @property
    def positions(self) -> int:
        number = self.N * self.S if self.lengths is None else int(self.lengths.sum())
        return number // self.N if self.of_batch and _are_apart(self.left.movedim(3, 2)) else number

    def sum_batch(self) -> Tensor:
        return self._shaped(_over_samples(self.left, self.right))

    def squares(self) -> Tensor:
        return Squares().add(self).total()

    def squares_batch(self) -> Tensor:
        return Squares(per_sample=True).add(self).total()

    def norms2(self) -> Tensor:
        """Squared norms ``[V, N]`` without forming the products where that is cheaper (Gram trick, Goodfellow 2015)."""
        if self.G == self.S == 1:
            return self.left_norms2 * _norms2(self.right)
        if costs.by_gram(self.S, self.O, self.I):
            # terms of both signs may round to less than nothing
            return ((self.left @ self.left.mT) * (self.right @ self.right.mT)).sum((2, 3, 4)).clamp(min=0)
        if torch.is_grad_enabled():
            return self.dense().reshape(self.V, self.N, -1).square().sum(2)
        norms = self.left.new_empty(self.V, self.N)
        for v, samples, products in self._by_sample():
            norms[v, samples] = products.square_().sum([*range(1, products.dim())])
        return norms

    def left_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.S == 1 and (limit is None or self.O <= limit):
            return self.left_moment()
        left = self.left.sum(3, keepdim=True) if approx == "reduce" else self.left
        return _second_moment(left.flatten(0, 1), limit)

    # of the left side of one position, which are those of a bias, too:

    def left_moment(self) -> Tensor:
        """Second moment, computed for who asks first; the others get copies."""
        if self._moment is not None:
            return self._moment.clone()
        self._moment = _second_moment(self.left.flatten(0, 1))
        return self._moment

    @cached_property
    def left_norms2(self) -> Tensor:
        """Squared norms, ``[V, N]``."""
        return _norms2(self.left)

    @cached_property
    def left_squares(self) -> Tensor:
        """Squares, weighted and summed over vectors, ``[N, G, 1, O]``."""
        return _weighted(self.left * self.left, self.weights)

    def right_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
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
        result = Outer(left, right, self.shape, self.transposed)
        result.weights = self.weights
        return result

    def select(self, samples: Sequence[int] | None) -> Jacobian:
        if samples is None:
            return self
        samples, right = list(samples), self._right
        right = right.select(samples) if isinstance(right, Patches) else right[samples]
        return Outer(self.left[:, samples], right, self.shape, self.transposed)

    def with_sides(self, left: Tensor, right: Tensor | None, shape: torch.Size, transposed: bool) -> Outer:
        """The same, of another left side and another right one perhaps."""
        if right is None:
            return Outer(left, self._right, shape, transposed)
        return Outer(left, right, shape, transposed)

    def project(self, directions: Tensor) -> Tensor:
        # one product with the input for all directions, then one for each sample: summed as they lie in memory
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
        """The left side as ``[N, V, *]``, with features and positions in the order in which they lie in memory."""
        return (self.left.mT if self._features_first else self.left).transpose(0, 1).flatten(2)

    def share_no_patches(self) -> None:
        if isinstance(self._right, Patches):
            self._right = self._right.used_once()

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        right = alike.right if isinstance(alike, Outer) else self.right.clone()
        result = Outer(self.left, right, self.shape, self.transposed)
        result.weights = self.weights
        return result

    def joined(self, others: Sequence[Jacobian]) -> Sequence[Jacobian]:
        sharing = [self, *(other for other in others if isinstance(other, Outer) and other._right is self._right)]
        if len(sharing) == 1:
            return [self, *others]
        result = Outer(torch.cat([each.left for each in sharing]), self._right, self.shape, self.transposed)
        result.weights = torch.cat(
            [each.left.new_ones(each.V, each.N) if each.weights is None else each.weights for each in sharing]
        )
        return [result, *(other for other in others if other not in sharing)]

    def matrices(self, directions: Tensor) -> Tensor:
        """``[K, *p]`` as ``[K, 1, G, O, I]``, the inverse of `_shaped`."""
        matrices = directions.reshape(-1, 1, self.G, *self._sides(self.O, self.I))
        return matrices.mT if self.transposed else matrices

    def _shaped(self, matrices: Tensor) -> Tensor:
        """``[..., G, O, I]`` as ``[..., *p]``."""
        matrices = matrices.mT if self.transposed else matrices
        return matrices.reshape(*matrices.shape[:-3], *self.shape)

    @property
    def pairs_are_cheaper(self) -> bool:
        """Whether to take squares by `left_pairs`, instead of by `add_squares`."""
        V = self.columns or self.V
        return costs.by_pairs(V, self.S, self.O, self.I, -(-V // self.V))

    def left_pairs(self) -> Tensor:
        """Products of the left sides of all pairs of positions, summed over vectors, ``[N, G, P, O]``."""
        if self.S == 1:
            return self.left_squares
        return torch.cat([_weighted(pairs, self.weights) for pairs in _pairs(self.left)], 2)

    def squares_of_pairs(self, left: Tensor, per_sample: bool) -> Tensor:
        """Squares from `left_pairs`, ``[*p]`` or, sample by sample, ``[N, *p]``."""
        P, width, device = left.shape[2], self.G * self.I, left.device.type
        step = costs.samples_at_once(P * width, self.N, device) if per_sample else costs.rows_at_once(P, width, device)
        left = torch.cat([left[:, :, : self.S], 2 * left[:, :, self.S :]], 2) if self.S > 1 else left
        several = step < self.N
        sides = zip(left.split(step), self.right.split(step), strict=True) if several else [(left, self.right)]
        parts = ((part, right * right if self.S == 1 else torch.cat([*_pairs(right)], 2)) for part, right in sides)
        if not per_sample:
            return self._shaped(reduce(add, (widened(_over_samples(part, right)) for part, right in parts)))
        if torch.is_grad_enabled():
            return self._shaped(torch.cat([part.mT @ right for part, right in parts]))
        result = left.new_empty(1, self.N, self.G, *self._sides(self.O, self.I))
        for (part, right), out in zip(parts, result.split(step, 1), strict=True):
            rows, columns = self._sides(part, right)
            _products(rows.unsqueeze(0), columns.unsqueeze(0), out)
        return result.reshape(self.N, *self.shape)

    def add_squares(self, total: Tensor | None, per_sample: bool) -> Tensor:
        """``total`` plus the squares, ``[*p]`` or, sample by sample, ``[N, *p]``; in place where no graph is built.

        The result is of at least float32 (see `widened`).
        """
        if torch.is_grad_enabled():
            squares = widened(_weighted(self.dense().square(), self.weights))
            return add(total, squares if per_sample else squares.sum(0))
        if per_sample:
            like = widened(self.left.new_empty(0))
            result = like.new_empty(self.N, *self.shape) if total is None else total.contiguous()
            for v, samples, products in self._by_sample(in_order=True):
                weighted = self._times_weights(products, v, samples)
                of_samples = result[samples].view(-1, *products.shape[1:])
                if total is None and v == 0:
                    torch.mul(weighted, products, out=of_samples)
                else:
                    of_samples.addcmul_(weighted, products)
            return result
        squares = None
        for v, samples, products in self._by_sample():
            if squares is None:
                squares = widened(torch.zeros_like(products[0]))
            weighted = self._times_weights(products, v, samples)
            if len(products) > 1 and not costs.adds_one_by_one(squares.numel(), squares.device.type):
                squares.add_(_sum(products.mul_(weighted)))
                continue
            for a, b in zip(weighted, products, strict=True):
                squares.addcmul_(a, b)
        assert squares is not None
        return add(total, squares.reshape(self.shape).contiguous())

    def _sides(self, left: T, right: T) -> tuple[T, T]:
        """Left and right side, in the order in which the parameter has them."""
        return (right, left) if self.transposed else (left, right)

    def _by_sample(self, in_order: bool = False) -> Iterator[tuple[int, slice, Tensor]]:
        """A vector, some samples, and their products ``[n, *]``.

        The last axes are the parameter's, split. They are overwritten by the next ones: fresh memory costs more than
        arithmetic.

        Args:
            in_order: entries are in the parameter's order in memory, too.
        """
        return self._formed(in_order)

    def _formed(self, in_order: bool) -> Iterator[tuple[int, slice, Tensor]]:
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
        rights = _pieces(self.right, step)
        buffer = self.left.new_empty(min(step, self.N) * self.G, *sides)
        for v, of_v in enumerate(self.left):
            for i, (left, right) in enumerate(zip(_pieces(of_v, step), rights, strict=True)):
                rows, columns = (right, left) if right_first else (left, right)
                products = torch.bmm(rows.mT, columns, out=buffer[: len(left)]).view(-1, self.G, *sides)
                products = products if right_first == self.transposed else products.mT
                yield v, slice(i * step, (i + 1) * step), products

    def _times_weights(self, products: Tensor, v: int, samples: slice) -> Tensor:
        if self.weights is None:
            return products
        return products * self.weights[v, samples].reshape(-1, *[1] * (products.dim() - 1))


class Computed(Jacobian):
    """Products with respect to what was computed from a parameter, pulled back to it a few samples at a time.

    Args:
        inner: the products.
        pull: pulls ``[v, *computed]`` back to ``[v, *p]``.
        p: the parameter.
        source: where it was computed.
    """

    factored = False

    def __init__(self, inner: Jacobian, pull: Callable[[Tensor], Tensor], p: Tensor, source: GradientEdge):
        """Keep them."""
        self.inner, self.pull, self.p = inner if isinstance(inner, Outer) else Dense(inner.dense()), pull, p
        self.V, self.N, self.shape, self.source = inner.V, inner.N, p.shape, source

    def of(self, inner: Jacobian) -> Computed:
        """The same of other products."""
        return Computed(inner, self.pull, self.p, self.source)

    def dense(self) -> Tensor:
        return torch.cat([values for _, values in self._parts()], 1)

    def sum_batch(self) -> Tensor:
        return self.pull(self.inner.sum_batch())

    def squares(self) -> Tensor:
        total = Squares()
        for samples, values in self._parts():
            part = Dense(values)
            part.weights = None if self.weights is None else self.weights[:, samples]
            total.add(part)
        return total.total()

    def squares_batch(self) -> Tensor:
        parts = self._parts()
        weights = self.weights
        return torch.cat([_weighted(v.square(), None if weights is None else weights[:, n]) for n, v in parts])

    def norms2(self) -> Tensor:
        return torch.cat([Dense(values).norms2() for _, values in self._parts()], 1)

    def left_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.shape.numel() > DENSE_BLOCK_LIMIT:
            return self.squares().flatten()
        return self.settled().left_factor(approx, limit)

    def right_factor(self, approx: Approx = "expand", limit: int | None = None) -> None:
        return None

    def rotated(self, bases: Sequence[Tensor]) -> Jacobian:
        return self if bases[0].dim() == 1 else self.settled().rotated(bases)

    def expand(self, coefficients: Tensor) -> Tensor:
        return self.pull(self.inner.expand(coefficients))

    def settled(self) -> Jacobian:
        result = Dense(self.dense())
        result.weights = self.weights
        return result

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        return self.settled()

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Some samples, and their products ``[V, n, *p]``."""
        entries = self.V * max(self.shape.numel(), self.inner.shape.numel())
        step = costs.samples_in_cache(entries, self.p.device.type)
        for n in range(0, self.N, step):
            samples = range(n, min(n + step, self.N))
            values = self.inner.select(samples).dense()
            pulled = self.pull(values.flatten(0, 1)).reshape(*values.shape[:2], *self.shape)
            yield slice(samples.start, samples.stop), pulled


class Scaled(Computed):
    """The same, of what was computed entry by entry.

    Args:
        inner: the products.
        factor: by which each entry is multiplied, ``[*p]``.
        source: where it was computed.
    """

    def __init__(self, inner: Outer, factor: Tensor, source: GradientEdge):
        """Keep them."""
        super().__init__(inner, factor.mul, factor, source)
        self.outer, self.factor = inner, factor

    def of(self, inner: Jacobian) -> Computed:
        return Scaled(inner, self.factor, self.source) if isinstance(inner, Outer) else super().of(inner)

    def squares(self) -> Tensor:
        self.outer.weights = self.weights
        return self.outer.squares() * self.factor.square()

    def squares_batch(self) -> Tensor:
        self.outer.weights = self.weights
        return self.outer.squares_batch() * self.factor.square()

    def norms2(self) -> Tensor:
        left, right = self.outer.left, self.outer.right
        if self.outer.S > 1:
            return super().norms2()
        return (((left * left) @ self.outer.matrices(self.factor.square())) * (right * right)).sum((2, 3, 4))


class Lookup(Jacobian):
    """Products of a parameter ``[I, D]`` of which the input picks rows (embeddings): nothing of size I per sample.

    Args:
        left: the vector for each row that was picked, ``[V, P, D]``.
        rows: which row was picked, ``[P]``.
        samples: the sample that picked it, ``[P]``.
        N: number of samples.
        shape: shape of the parameter.
    """

    transposed = True

    def __init__(self, left: Tensor, rows: Tensor, samples: Tensor, N: int, shape: torch.Size):
        """Keep what was picked, by whom, and the vectors."""
        self.left, self.rows, self.samples, self.shape = left, rows, samples, shape
        self.V, self.N = left.shape[0], N

    def dense(self) -> Tensor:
        return self._scatter(self.left, 1, self.samples * self.shape[0] + self.rows, self.N * self.shape[0]).reshape(
            self.V, self.N, *self.shape
        )

    @property
    def positions(self) -> int:
        P = len(self.rows)
        return P // self.N if self.of_batch and _are_apart(self.left.unflatten(1, (self.N, -1))) else P

    def sum_batch(self) -> Tensor:
        return self._scatter(self.left, 1, self.rows, self.shape[0])

    def squares(self) -> Tensor:
        left, rows, samples = self._merged()
        return self._scatter(self._weighted_squares(left, samples), 0, rows, self.shape[0])

    def squares_batch(self) -> Tensor:
        left, rows, samples = self._merged()
        picked = samples * self.shape[0] + rows
        squares = self._scatter(self._weighted_squares(left, samples), 0, picked, self.N * self.shape[0])
        return squares.reshape(self.N, *self.shape)

    def norms2(self) -> Tensor:
        left, _, samples = self._merged()
        return self._scatter(left.square().sum(2), 1, samples, self.N)

    def left_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        left = self._scatter(self.left, 1, self.samples, self.N) if approx == "reduce" else self.left
        return _second_moment(left.flatten(0, 1)[None, None], limit)

    def right_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """The diagonal ``[I]`` of the second moment of the one-hot inputs: how often each row is picked."""
        if approx == "expand":
            ones = torch.ones_like(self.rows, dtype=self.left.dtype)
            return self._scatter(ones, 0, self.rows, self.shape[0]) / max(len(self.rows), 1)
        positions = self.samples.bincount(minlength=self.N)
        share = (1 / positions).to(self.left.dtype)[self.samples]
        _, inverse, rows, _ = self._unique()
        share = self._scatter(share, 0, inverse, len(rows))
        return self._scatter(share.square(), 0, rows, self.shape[0]) / self.N

    def rotated(self, bases: Sequence[Tensor]) -> Jacobian:
        _, of_left = bases  # the other factor is diagonal
        left = _in_basis(self.left[:, :, None, None], of_left)[:, :, 0, 0]
        result = Lookup(left, self.rows, self.samples, self.N, self.shape)
        result.weights = self.weights
        return result

    def project(self, directions: Tensor) -> Tensor:
        products = torch.einsum("vpd,kpd->kvp", self.left, directions[:, self.rows])
        return self._scatter(products, 2, self.samples, self.N)

    def expand(self, coefficients: Tensor) -> Tensor:
        values = torch.einsum("kvp,vpd->kpd", coefficients[:, :, self.samples], self.left)
        return self._scatter(values, 1, self.rows, self.shape[0])

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        result = Lookup(self.left, self.rows.clone(), self.samples, self.N, self.shape)
        result.weights = self.weights
        return result

    def _weighted_squares(self, left: Tensor, samples: Tensor) -> Tensor:
        return _weighted(left.square(), None if self.weights is None else self.weights[:, samples])

    def _unique(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, inverse = torch.unique(self.samples * self.shape[0] + self.rows, return_inverse=True)
        return keys, inverse, keys % self.shape[0], keys // self.shape[0]

    def _merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """``left``, ``rows`` and ``samples`` with every row at most once per sample."""
        keys, inverse, rows, samples = self._unique()
        return self._scatter(self.left, 1, inverse, len(keys)), rows, samples

    @staticmethod
    def _scatter(values: Tensor, axis: int, index: Tensor, size: int) -> Tensor:
        """Values summed into ``size`` places along an axis."""
        shape = (*values.shape[:axis], size, *values.shape[axis + 1 :])
        return values.new_zeros(shape).index_add_(axis, index, values)


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

    def add(self, jacobian: Jacobian) -> Squares:
        """Add those of a chunk of columns."""
        if not isinstance(jacobian, Outer):
            value = jacobian.squares_batch() if self.per_sample else jacobian.squares()
            self._dtype = self._dtype or value.dtype
            self._value = add(self._value, widened(value))
            return self
        self._dtype = self._dtype or jacobian.left.dtype
        if jacobian.pairs_are_cheaper:
            if self._pairs is not None and self._pairs[0].right is not jacobian.right:
                self.total()
            pairs = widened(jacobian.left_pairs())  # which others may share
            self._pairs = jacobian, pairs if self._pairs is None else self._pairs[1] + pairs
            self._signed = self._signed or jacobian.weights is not None
            return self
        self._value = jacobian.add_squares(self._value, self.per_sample)
        return self

    def total(self) -> Tensor:
        """What has been added, ``[*p]`` or ``[N, *p]``."""
        if self._pairs is not None:
            (jacobian, left), self._pairs = self._pairs, None
            squares = jacobian.squares_of_pairs(cast(left, jacobian.left.dtype), self.per_sample)
            if jacobian.S > 1 and not self._signed:  # terms of both signs may round to less than nothing
                squares.clamp_(min=0)
            self._value = add(self._value, widened(squares))
        assert self._value is not None
        return cast(self._value, self._dtype)


def widened(value: Tensor) -> Tensor:
    """In at least float32, to be summed: in half precision, small terms vanish in a large sum."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``value.to(dtype)``, without the call if that would do nothing."""
    return value if value.dtype == dtype else value.to(dtype)


def add(total: Any, value: Any) -> Any:
    """``total + value``, in place where no graph is built."""
    if total is None:
        return value
    return total + value if total.requires_grad or value.requires_grad else total.add_(value)


def _pairs(sides: Tensor) -> Iterator[Tensor]:
    """Products of all pairs of positions of ``[..., S, F]``, by their distance: ``[..., S - d, F]``."""
    S = sides.shape[-2]
    yield from (sides[..., : S - d, :] * sides[..., d:, :] for d in range(max(S, 1)))


def _products(rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
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


def _pieces(sides: Tensor, step: int) -> Sequence[Tensor]:
    """Some samples of ``[N, G, S, F]`` at a time, ``[n G, S, F]``."""
    return [sides.flatten(0, 1)] if step >= len(sides) else sides.flatten(0, 1).split(step * sides.shape[1])


def _by_feature(values: Tensor) -> Tensor:
    """``[..., N, G, S, F]`` as ``[..., G, F, N S]``; what needs to be copied is copied by rows."""
    return values.movedim((-4, -2), (-2, -1)).flatten(-2)


def _over_samples(left: Tensor, right: Tensor) -> Tensor:
    """``sum_{n,s} l r^T`` of ``[..., N, G, S, O]`` and ``[N, G, S, I]``, ``[..., G, O, I]``."""
    return _by_feature(left) @ _by_feature(right).mT


def _norms2(sides: Tensor) -> Tensor:
    """Squared norms of sides ``[..., G, S, F]``."""
    if torch.is_grad_enabled():  # at zero a norm has no second derivative
        return (sides * sides).sum((-3, -2, -1))
    return torch.linalg.vector_norm(sides, dim=(-3, -2, -1)).square_()


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """``[V, N, ...]`` values summed over V, with weights ``[V, N]`` if there are any."""
    if weights is None:
        return values.sum(0) if len(values) > 1 else values[0]
    return torch.einsum("vn,vn...->n...", weights, values)


def _sum(values: Tensor) -> Tensor:
    """Sum over the first axis, laid out in memory as they are: where it is not, it takes ten times as long."""
    return torch.sum(values, 0, out=torch.empty_like(values[0]))


def _second_moment(rows: Tensor, limit: int | None = None, scale: float = 1.0) -> Tensor:
    """``scale * sum_{n,s} x x^T`` of ``[N, G, S, F]``: ``[F, F]``, or ``[G, F, F]`` when there are groups.

    If F is more than ``limit``, blocks on its diagonal, ``[G, K, b, b]``, the last padded with zeros.
    """
    N, G, S, F = rows.shape
    limit = limit if limit is not None and F > limit else None
    if limit is None and not torch.is_grad_enabled():
        if not _are_sorted(rows) and costs.moment_by_samples(S, F, rows.dtype, rows.device.type):
            return _moment_by_samples(rows, scale)
        return _moment_of_parts(_in_parts(rows), N * S, scale)
    flat = _by_feature(rows)
    flat = flat if scale == 1 else flat * scale**0.5  # before the product: half precision ends at 65504
    if limit is not None:
        blocks = in_blocks(flat.mT, limit).transpose(1, 2)
        return blocks.mT @ blocks
    return _ungrouped(flat @ flat.mT)


def _ungrouped(moments: Tensor) -> Tensor:
    """The only one of ``[G, F, F]``, if there are no groups."""
    return moments[0] if len(moments) == 1 else moments


def _are_sorted(rows: Tensor) -> bool:
    """Whether rows ``[N, G, S, F]`` of all samples lie in memory by features, or each feature's by rows."""
    return rows.stride(3) == 1 or rows.stride(0) == rows.shape[2] * rows.stride(2)


def _in_parts(rows: Tensor) -> Sequence[Tensor]:
    """Some samples of ``[N, G, S, F]`` at a time, which will be sorted by features; all if they are sorted."""
    _, G, S, F = rows.shape
    return [rows] if _are_sorted(rows) else rows.split(costs.rows_at_once(S, G * F, rows.device.type))


def _moment_by_samples(rows: Tensor, scale: float) -> Tensor:
    """The same by a product for each sample, whose rows are read where they lie."""
    N, G, _, F = rows.shape
    parts = rows.mT.split(costs.samples_at_once(G * F * F, N, rows.device.type))
    moments = (torch.bmm(x.flatten(0, 1), x.mT.flatten(0, 1)).unflatten(0, (len(x), G)).sum(0) for x in parts)
    return _ungrouped(reduce(add, moments).mul_(scale))


def _moment_of_parts(parts: Iterable[Tensor], R: int, scale: float) -> Tensor:
    """The same of parts of the samples, which have R positions in all."""
    moments, dtype, F, block = None, None, 0, 0
    for part in parts:
        x = _by_feature(part)
        if moments is None:
            dtype, (G, F, _) = x.dtype, x.shape
            block = min(costs.SYMMETRIC_BLOCK, -(-F // 2)) if costs.by_blocks(F, R, x.device.type) else F
            moments = widened(x.new_zeros(G, F, F))
        for i in range(0, F, block):  # what is below the diagonal follows
            _add_product(moments[:, i : i + block, i:], x[:, i : i + block], x[:, i:].mT, scale)
    assert moments is not None
    for i in range(0, F - block, block):
        j = i + block
        moments[:, j:, i:j] = costs.apart(moments[:, i:j, j:]).mT
    return cast(_ungrouped(moments), dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """``total += scale left @ right`` of ``[G, M, R]`` and ``[G, R, K]``; the total may be in higher precision."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=scale)
    else:
        total.add_(torch.baddbmm(left.new_zeros(1), left, right, beta=0, alpha=scale))


def in_blocks(values: Tensor, limit: int) -> Tensor:
    """The last axis ``F`` cut into the fewest pieces of at most ``limit``, ``[..., K, b]``, padded with zeros."""
    return in_pieces(values, costs.even_share(values.shape[-1], limit))


def in_pieces(values: Tensor, size: int, axis: int = -1) -> Tensor:
    """An axis (-1, -2, ...) cut into pieces ``[..., K, size, ...]``, the last padded with zeros."""
    missing = -values.shape[axis] % size
    if missing:
        values = torch.nn.functional.pad(values, (0, 0) * (-1 - axis) + (0, missing))
    return values.unflatten(axis, (-1, size))


def _in_basis(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows ``[..., G, S, F]`` in the basis of a factor: ``[F]`` (identity), ``[F, F]``, with groups or blocks.

    Factors of parameters in half precision may be kept in float32: then so are the results.
    """
    rows = rows.to(torch.promote_types(rows.dtype, basis.dtype))
    if basis.dim() == 1:
        return rows
    if basis.dim() < 4:
        return rows @ basis  # [F, F] or [G, F, F]
    blocks = in_blocks(rows, basis.shape[-1]).transpose(-3, -2)  # [..., G, K, S, b]
    return (blocks @ basis).transpose(-3, -2).flatten(-2)[..., : rows.shape[-1]]


def combine(parts: Sequence[Jacobian]) -> Jacobian:
    """One Jacobian for all uses of one parameter: positions are concatenated, other kinds are added."""
    if len(parts) == 1:
        return parts[0]
    result = _concatenate(parts)
    if isinstance(result, (Outer, Lookup)) and any(part.of_batch for part in parts):
        result.uses = parts
    result.origin = tuple(use for part in parts for use in part.origin)
    result.positions_of_all = any(part.positions_of_all for part in parts)
    return result


def by_sample(sides: Tensor, N: int) -> Tensor:
    """``[..., N k, G, S, F]`` as ``[..., N, G, k S, F]``: the k rows of a sample are positions."""
    if sides.shape[-4] == N:
        return sides
    return rearrange(sides, "... (n k) g s f -> ... n g (k s) f", n=N)


def _are_apart(vectors: Tensor) -> bool:
    """Whether no position of ``[V, N, S, ...]`` is reached by more than one sample."""
    reached = (vectors != 0).flatten(3).any(3).any(0)
    return not bool((reached.sum(0) > 1).any())


def of_samples(jacobian: Jacobian, N: int) -> Jacobian:
    """One Jacobian of V vectors and N samples from one of one sample, whose vectors are those of N samples in turn."""
    if isinstance(jacobian, Outer):
        left, right = jacobian.left.flatten(0, 1).unflatten(0, (-1, N)), jacobian.right.expand(N, -1, -1, -1)
        result: Jacobian = Outer(left, right, jacobian.shape, jacobian.transposed)
        result.positions_of_all = jacobian.S > 1
        result.lengths = None if jacobian.lengths is None else jacobian.lengths.expand(N)
    elif isinstance(jacobian, Lookup):
        rows, left = jacobian.rows, jacobian.left.unflatten(0, (-1, N)).flatten(1, 2)
        samples = torch.arange(N, device=rows.device).repeat_interleave(len(rows))
        result = Lookup(left, rows.repeat(N), samples, N, jacobian.shape)
        result.positions_of_all = len(rows) > 1
    else:
        result = Dense(jacobian.dense().flatten(0, 1).unflatten(0, (-1, N)))
    result.of_batch = True
    result.origin = jacobian.origin
    return result


def _concatenate(parts: Sequence[Jacobian]) -> Jacobian:
    first = parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) == len(parts) and len({(part.transposed, part.G, part.O) for part in outers}) == 1:
        left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
        result = Outer(left, right, first.shape, outers[0].transposed)
        if any(o.lengths is not None for o in outers):
            result.lengths = torch.stack([torch.full((o.N,), o.S) if o.lengths is None else o.lengths for o in outers])
            result.lengths = result.lengths.sum(0)
        return result
    computed = [part for part in parts if isinstance(part, Computed)]
    if len(computed) == len(parts) and len({part.source for part in computed}) == 1:
        return computed[0].of(_concatenate([part.inner for part in computed]))
    if all(isinstance(part, Lookup) for part in parts):
        lookups = [part for part in parts if isinstance(part, Lookup)]
        left = torch.cat([lookup.left for lookup in lookups], 1)
        rows, samples = (torch.cat([getattr(lookup, side) for lookup in lookups]) for side in ("rows", "samples"))
        return Lookup(left, rows, samples, first.N, first.shape)
    return Dense(sum((part.dense() for part in parts[1:]), start=first.dense()))
