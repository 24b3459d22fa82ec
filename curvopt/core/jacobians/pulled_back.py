"""Products with respect to a weight that is computed from a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.jacobians import base
from curvopt.core.jacobians import chunk_sizes as costs
from curvopt.core.jacobians.base import Approx, Dense, Jacobian
from curvopt.core.jacobians.outer import Outer
from curvopt.core.jacobians.squares import Squares
from curvopt.core.jacobians.sums import _weighted


class PulledBack(Jacobian):
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

    def of(self, inner: Jacobian) -> PulledBack:
        """Other products, pulled back by the same map."""
        return PulledBack(inner, self.pull, self.p, self.source)

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

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

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.shape.numel() > base.DENSE_BLOCK_LIMIT:
            return self.squares().flatten()
        return self.settled().output_factor(approx, limit)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> None:
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
