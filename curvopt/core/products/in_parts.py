"""Products that are multiplied out for a few samples at a time, since those of all samples would not fit into memory.

::

    squares of an embedding [I, D] that has calls of two kinds (`Summed`):
    samples 0 to 7      (lookup + outer)  [V, 8, I, D]    squared, added to [I, D]
    samples 8 to 15     (lookup + outer)  [V, 8, I, D]    squared, added to [I, D]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvopt.core.products import base
from curvopt.core.products import chunk_sizes as costs
from curvopt.core.products.base import Approx, Dense, Jacobian
from curvopt.core.products.squares import Squares


class InParts(Jacobian):
    """Products whose sums are computed from those of a few samples at a time."""

    factored = False

    @abstractmethod
    def values_of(self, samples: Sequence[int]) -> Tensor:
        """The products of some samples, ``[V, n, *p]``."""

    @property
    def entries(self) -> int:
        """Entries that the products of a sample fill."""
        return self.V * self.shape.numel()

    def in_parts(self) -> Iterator[Dense]:
        """The products of some samples after the other."""
        step = costs.samples_in_cache(self.entries, self.like.device.type)
        for n in range(0, self.N, step):
            part = Dense(self.values_of(range(n, min(n + step, self.N))))
            yield part.with_weights(None if self.weights is None else self.weights[:, n : n + step])

    def dense(self) -> Tensor:
        return torch.cat([part.values for part in self.in_parts()], 1)

    def squares(self) -> Tensor:
        total = Squares()
        for part in self.in_parts():
            total.add(part)
        return total.total()

    def squares_batch(self) -> Tensor:
        return torch.cat([part.squares_batch() for part in self.in_parts()])

    def norms2(self) -> Tensor:
        return torch.cat([part.norms2() for part in self.in_parts()], 1)

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.shape.numel() > base.DENSE_BLOCK_LIMIT:
            return self.squares().flatten()
        return self.settled().output_factor(approx, limit)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> None:
        return None

    def rotated(self, bases: Sequence[Tensor]) -> Jacobian:
        return self if bases[0].dim() == 1 else self.settled().rotated(bases)

    def settled(self) -> Jacobian:
        return Dense(self.dense()).with_weights(self.weights)

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        return self.settled()


class Summed(InParts):
    """The sum of the products of calls of different kinds: of an embedding that is also the output layer, say.

    Args:
        parts: those of single calls.
    """

    def __init__(self, parts: Sequence[Jacobian]):
        """Keep the products of single calls."""
        self.parts = parts
        self.V, self.N, self.shape = parts[0].V, parts[0].N, parts[0].shape

    @property
    def like(self) -> Tensor:
        return self.parts[0].like

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
