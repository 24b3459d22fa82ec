"""Sums of products: of several calls that share a parameter, and of weights that are computed from one.

::

    Slopes        layers and their derivatives by the input      both multiply the weight
    Tied          a linear layer and an embedding                no array of N times the weight
    PulledBack    a weight that is computed from the parameter   autograd pulls the products back
    Summed        any further ones                               multiplied out for a few samples at a time

>>> left, right = torch.ones(1, 4, 1, 1, 2), torch.ones(4, 1, 1, 3)
>>> call = Outer(left, right, torch.Size([2, 3]))
>>> combine([call, call]).S  # a linear layer that is called twice has two positions
2
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.products import base, costs
from curvopt.core.products.base import Approx, Dense, Jacobian, add, cast, in_blocks, weighted, widened
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer, concatenated


def combine(parts: Sequence[Jacobian]) -> Jacobian:
    """One Jacobian for all calls that share one parameter.

    Positions of calls of one kind are concatenated, products of other kinds are added.
    """
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) == len(parts) and Slopes.are(outers):
        return Slopes.of(outers)
    kinds: dict[object, list[Jacobian]] = {}
    for part in parts:
        kinds.setdefault(_kind(part), []).append(part)
    found = [_concatenated(of_kind) for of_kind in kinds.values()]
    if len(found) == 2 and {*map(type, found)} == {Outer, Lookup}:
        outer, lookup = sorted(found, key=lambda part: isinstance(part, Lookup))
        return tied(outer, lookup)  # type: ignore[arg-type]
    return found[0] if len(found) == 1 else Summed(found)


def _kind(part: Jacobian) -> object:
    """Equal for products whose positions can be concatenated."""
    if isinstance(part, Outer):
        return part.transposed, part.G, part.O
    return part.source if isinstance(part, PulledBack) else type(part)


def _concatenated(parts: Sequence[Jacobian]) -> Jacobian:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Outer):
        left, right, lengths = concatenated([part for part in parts if isinstance(part, Outer)])
        return Outer(left, right, first.shape, first.transposed, lengths)
    if isinstance(first, PulledBack):
        return first.of(combine([part.inner for part in parts if isinstance(part, PulledBack)]))
    if isinstance(first, Lookup):
        lookups = [part for part in parts if isinstance(part, Lookup)]
        left = torch.cat([lookup.left for lookup in lookups], 1)
        rows, samples = (torch.cat([getattr(lookup, side) for lookup in lookups]) for side in ("rows", "samples"))
        return Lookup(left, rows, samples, first.N, first.shape)
    return Dense(Summed(parts).dense())


class InParts(Jacobian):
    """Products whose sums are computed of a few samples at a time."""

    factored = False

    @abstractmethod
    def values_of(self, samples: Sequence[int]) -> Tensor:
        """The products of single samples, ``[V, n, *p]``."""

    @property
    def entries(self) -> int:
        """Entries that the products of a sample fill."""
        return self.V * self.shape.numel()

    def in_parts(self) -> Iterator[Dense]:
        """The products of a few samples after the other."""
        step = costs.samples_in_cache(self.entries, self.like.device.type)
        for n in range(0, self.N, step):
            part = Dense(self.values_of(range(n, min(n + step, self.N))))
            yield part.with_weights(None if self.weights is None else self.weights[:, n : n + step])

    def dense(self) -> Tensor:
        return torch.cat([part.values for part in self.in_parts()], 1)

    def squares(self, per_sample: bool = False) -> Tensor:
        squares = (part.squares(per_sample) for part in self.in_parts())
        return torch.cat([*squares]) if per_sample else cast(reduce(add, map(widened, squares)), self.like.dtype)

    def norms2(self) -> Tensor:
        return torch.cat([part.norms2() for part in self.in_parts()], 1)

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.shape.numel() > base.DENSE_BLOCK_LIMIT:
            return self.squares().flatten()
        return self.settled().output_factor(approx, limit)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> None:
        return None

    def squares_in(self, bases: Sequence[Tensor]) -> Tensor:
        return self.squares() if bases[0].dim() == 1 else self.settled().squares_in(bases)

    def settled(self) -> Jacobian:
        return Dense(self.dense()).with_weights(self.weights)

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        return self.settled()


class Summed(InParts):
    """The sum of the products of calls of different kinds: of an embedding that is also the output layer, say.

    Args:
        parts: products of single calls.
    """

    def __init__(self, parts: Sequence[Jacobian]):
        """Keep the products of single calls."""
        self.parts = parts
        self.V, self.N, self.shape, self.like = parts[0].V, parts[0].N, parts[0].shape, parts[0].like

    def values_of(self, samples: Sequence[int]) -> Tensor:
        return _added([part.select(samples).dense() for part in self.parts])

    def dense(self) -> Tensor:
        return _added([part.dense() for part in self.parts])

    def sum_batch(self) -> Tensor:
        return _added([part.sum_batch() for part in self.parts])

    def _selected(self, samples: list[int]) -> Jacobian:
        return Summed([part.select(samples) for part in self.parts])

    def project(self, directions: Tensor) -> Tensor:
        return _added([part.project(directions) for part in self.parts])

    def expand(self, coefficients: Tensor) -> Tensor:
        return _added([part.expand(coefficients) for part in self.parts])

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        return Summed([part.owned() for part in self.parts]).with_weights(self.weights)


def _added(values: Sequence[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])


class Tied(Summed):
    """The products of a linear layer and of an embedding with one weight ``[I, D]``.

    ``(outer + lookup)^2 = outer^2 + lookup^2 + 2 outer lookup``, where the last term has entries in picked rows only.

    Args:
        outer: of the linear layer.
        lookup: of the embedding, of equally many picked rows for each sample, one sample after the other.
    """

    def __init__(self, outer: Outer, lookup: Lookup):
        """Keep both."""
        super().__init__([outer, lookup])
        self.outer, self.lookup = outer, lookup

    def squares(self, per_sample: bool = False) -> Tensor:
        if per_sample:
            return super().squares(per_sample)
        total = self.outer.left.new_zeros(self.shape)
        # as many samples at a time as have temporaries of about the size of the weight
        step = max(1, 2 * self.outer.I // (self.outer.S * (self.outer.S + 1)))
        for n in range(0, self.N, step):
            samples = range(n, min(n + step, self.N))
            outer, lookup = self.outer.select(samples), self.lookup.select(samples)
            assert isinstance(outer, Outer) and isinstance(lookup, Lookup)
            weights = None if self.weights is None else self.weights[:, n : n + step]
            both = 2 * weighted(Tied(outer, lookup)._picked(), weights)
            total = total + outer.with_weights(weights).squares() + lookup.with_weights(weights).squares()
            total = total.index_add(0, lookup.rows, both.flatten(0, 1))
        return total

    def norms2(self) -> Tensor:
        return self.outer.norms2() + self.lookup.norms2() + 2 * self._picked().sum((2, 3))

    def _picked(self) -> Tensor:
        """The vector for each row that was picked times that row of the linear layer's products, ``[V, N, P, D]``."""
        rows = self.lookup.rows.view(1, self.N, 1, -1).expand(self.V, -1, self.outer.S, -1)
        of_rows = self.outer.left[:, :, 0].gather(3, rows)  # [V, N, S, P]
        return self.lookup.left.unflatten(1, (self.N, -1)) * (of_rows.mT @ self.outer.right[:, 0])


def tied(outer: Outer, lookup: Lookup) -> Summed:
    """The sum of products of a linear layer and of an embedding."""
    in_order = torch.arange(lookup.N, device=lookup.samples.device).repeat_interleave(len(lookup.rows) // lookup.N)
    fits = not outer.transposed and outer.G == 1 and torch.equal(in_order, lookup.samples)
    return Tied(outer, lookup) if fits else Summed([outer, lookup])


class PulledBack(InParts):
    """Products with respect to a tensor that was computed from a parameter, pulled back a few samples at a time.

    Args:
        inner: the products.
        pull: pulls ``[v, *computed]`` back to ``[v, *p]``.
        p: the parameter.
        source: where it was computed.
    """

    def __init__(self, inner: Jacobian, pull: Callable[[Tensor], Tensor], p: Tensor, source: GradientEdge):
        """Keep them."""
        self.inner, self.pull, self.p = inner if isinstance(inner, Outer) else Dense(inner.dense()), pull, p
        self.V, self.N, self.shape, self.like, self.source = inner.V, inner.N, p.shape, inner.like, source

    def of(self, inner: Jacobian) -> PulledBack:
        """Other products, pulled back by the same map."""
        return PulledBack(inner, self.pull, self.p, self.source)

    def sum_batch(self) -> Tensor:
        return self.pull(self.inner.sum_batch())

    def expand(self, coefficients: Tensor) -> Tensor:
        return self.pull(self.inner.expand(coefficients))

    @property
    def entries(self) -> int:
        return self.V * max(self.shape.numel(), self.inner.shape.numel())

    def values_of(self, samples: Sequence[int]) -> Tensor:
        values = self.inner.select(samples).dense()
        return self.pull(values.flatten(0, 1)).reshape(*values.shape[:2], *self.shape)

    def _selected(self, samples: list[int]) -> Jacobian:
        return self.of(self.inner.select(samples))


class Scaled(PulledBack):
    """Products with respect to a weight that is computed entry by entry.

    Args:
        inner: the products.
        factor: by which each entry is multiplied, ``[*p]``.
        source: where it was computed.
    """

    def __init__(self, inner: Outer, factor: Tensor, source: GradientEdge):
        """Keep them."""
        super().__init__(inner, factor.mul, factor, source)
        self.outer, self.factor = inner, factor

    def of(self, inner: Jacobian) -> PulledBack:
        return Scaled(inner, self.factor, self.source) if isinstance(inner, Outer) else super().of(inner)

    def squares(self, per_sample: bool = False) -> Tensor:
        self.outer.weights = self.weights
        return self.outer.squares(per_sample) * self.factor.square()

    def norms2(self) -> Tensor:
        left, right = self.outer.left, self.outer.right
        if self.outer.S > 1:
            return super().norms2()
        return (((left * left) @ self.outer.matrices(self.factor.square())) * (right * right)).sum((2, 3, 4))


#: `Slopes` compute A of so many samples if there are twice as many or more, and the last B of twice as many.
ENOUGH_SAMPLES = 256


class Slopes(Outer):
    """Products of a layer and of its slopes: derivatives by its input, which multiply its weight, too.

    Both are positions of the weight, but differ by orders of magnitude, so that means over all of them say little.
    Factors are the ones of the nearest Kronecker product (Van Loan & Pitsianis 1993): ``B = sum_n G_n A G_n^T`` and
    ``A = sum_n G_n^T B G_n`` in two turns for the products ``G_n`` of the samples. Of many samples a part is drawn, see
    `ENOUGH_SAMPLES`. A has the trace of the second moment of the layer's inputs, ``B ⊗ A`` that of the exact block of
    all samples.
    """

    #: Trace of the right side's factor.
    size: Tensor
    #: Both factors by the limit of their blocks, once they are known.
    _factors: dict[int | None, tuple[Tensor, Tensor]]

    @staticmethod
    def are(outers: Sequence[Outer]) -> bool:
        """Whether there are layers and slopes by the input, which multiply the transposed weight, of one vector."""
        orientations = {outer.transposed for outer in outers}
        return len(orientations) == 2 and all(outer.V == outer.G == 1 for outer in outers)

    @classmethod
    def of(cls, outers: Sequence[Outer]) -> Slopes:
        """The sum of products of layers, and of their slopes, whose sides are exchanged."""
        sides = [
            Outer(o.right.unsqueeze(0), o.left[0], o.shape, False, o.lengths) if o.transposed else o for o in outers
        ]
        left, right, lengths = concatenated(sides)
        result = cls(left, right, outers[0].shape, False, lengths)
        result._factors = {}
        inputs = [(outer.right.square().sum(), outer.positions) for outer in outers if not outer.transposed]
        result.size = torch.stack([size for size, _ in inputs]).sum() / max(sum(number for _, number in inputs), 1)
        return result

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """The factor of the left side, see the class, whatever ``approx``."""
        return self._nearest(limit)[0].clone()  # further quantities may ask for it

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """The factor of the right side, see the class, whatever ``approx``."""
        return self._nearest(limit)[1].clone()

    def _nearest(self, limit: int | None) -> tuple[Tensor, Tensor]:
        if limit in self._factors:
            return self._factors[limit]
        left, right = self.left[0, :, 0], self.right[:, 0]  # [N, S, F]
        of_left = left @ left.mT
        squares = (of_left * (right @ right.mT)).sum((1, 2))  # ||G_n||^2
        several = min(self.O, self.I) > 1  # else it is exact
        enough = ENOUGH_SAMPLES if several else self.N
        (few, share), (more, share_of_more) = _drawn(squares, enough), _drawn(squares, 2 * enough)
        A = _moment(right[few], of_left[few] * share, limit)
        if several:
            B = _moment(left[few], _gram(right[few], _sized(A)) * share, limit)
            A = _moment(right[few], _gram(left[few], _sized(B)) * share, limit)
        A = _sized(_symmetric(A), self.size)
        B = _symmetric(_moment(left[more], _gram(right[more], A) * share_of_more, limit))
        self._factors[limit] = _sized(B, squares.sum() / torch.where(self.size > 0, self.size, 1)), A
        return self._factors[limit]


def _drawn(squares: Tensor, number: int) -> tuple[Tensor | slice, Tensor | float]:
    """Indices of samples drawn by their squared norms, the same ones each time, and weights that make up for that.

    So few points of a boundary that weigh much are there, and a grid of points leaves no pattern.
    """
    if len(squares) < 2 * number:
        return slice(None), 1.0
    dtype = squares.dtype
    squares = widened(squares).clamp(min=torch.finfo(torch.float32).tiny)  # rounding may make them negative
    ends = squares.cumsum(0)
    step = ends[-1] / number
    places = torch.arange(number) + torch.rand(number, device="cpu", generator=torch.Generator().manual_seed(0))
    drawn = torch.searchsorted(ends, places.to(ends) * step).clamp(max=len(squares) - 1)
    return drawn, (step / squares[drawn]).to(dtype).view(-1, 1, 1)


def _moment(rows: Tensor, weights: Tensor, limit: int | None) -> Tensor:
    """``sum_n X_n^T W_n X_n`` of ``[N, S, F]`` and ``[N, S, S]``: ``[F, F]``, or blocks ``[1, K, b, b]``."""
    F = rows.shape[2]
    weighted, rows = (weights @ rows).flatten(0, 1), rows.flatten(0, 1)
    if limit is None or F <= limit:
        return rows.mT @ weighted
    return (in_blocks(rows, limit).permute(1, 2, 0) @ in_blocks(weighted, limit).transpose(0, 1)).unsqueeze(0)


def _symmetric(moment: Tensor) -> Tensor:
    """Without what rounding makes of a symmetric matrix."""
    return (moment + moment.mT) / 2


def _gram(rows: Tensor, factor: Tensor) -> Tensor:
    """``X_n M X_n^T`` of ``[N, S, F]`` and a factor: ``[N, S, S]``."""
    if factor.dim() == 2:
        return rows @ factor @ rows.mT
    blocks = in_blocks(rows, factor.shape[-1])  # [N, S, K, b]
    return torch.einsum("nskb,kbc,ntkc->nst", blocks, factor[0], blocks)


def _sized(factor: Tensor, trace: Tensor | float = 1.0) -> Tensor:
    """A factor scaled to a trace."""
    found = factor.diagonal(dim1=-2, dim2=-1).sum()
    return factor * (trace / torch.where(found > 0, found, 1))
