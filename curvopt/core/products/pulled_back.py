"""Products with respect to a weight that is computed from a parameter.

::

    y = x W^T,  W = f(p)        products J of W      ──►    those of p: pull(J), a few samples at a time
    y = x W^T,  W = tanh(p)     products J of W      ──►    those of p: J * tanh'(p), by `Scaled`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.products.base import Dense, Jacobian
from curvopt.core.products.in_parts import InParts
from curvopt.core.products.outer import Outer


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
        self.V, self.N, self.shape, self.source = inner.V, inner.N, p.shape, source

    def of(self, inner: Jacobian) -> PulledBack:
        """Other products, pulled back by the same map."""
        return PulledBack(inner, self.pull, self.p, self.source)

    @property
    def like(self) -> Tensor:
        return self.inner.like

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
