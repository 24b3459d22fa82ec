"""Products of an embedding that is also the output layer: no array of N times the weight is formed.

::

    h = E[tokens],  z = h E^T       E [I, D] has an Outer (all rows) and a Lookup (the rows of the tokens)
    (outer + lookup)^2 = outer^2 + lookup^2 + 2 outer lookup      the last term has entries in these rows only
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvopt.core.products.in_parts import Summed
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import _weighted


class Tied(Summed):
    """The products of a linear layer and those of an embedding with one weight ``[I, D]``.

    ``(outer + lookup)^2 = outer^2 + lookup^2 + 2 outer lookup``, where the last term has entries in picked rows only.

    Args:
        outer: those of the linear layer.
        lookup: those of the embedding, of equally many picked rows for each sample, one sample after the other.
    """

    def __init__(self, outer: Outer, lookup: Lookup):
        """Keep both."""
        super().__init__([outer, lookup])
        self.outer, self.lookup = outer, lookup

    def squares(self) -> Tensor:
        total = self.outer.left.new_zeros(self.shape)
        # as many samples at a time as have temporaries of about the size of the weight
        step = max(1, 2 * self.outer.I // (self.outer.S * (self.outer.S + 1)))
        for n in range(0, self.N, step):
            samples = range(n, min(n + step, self.N))
            outer, lookup = self.outer.select(samples), self.lookup.select(samples)
            assert isinstance(outer, Outer) and isinstance(lookup, Lookup)
            weights = None if self.weights is None else self.weights[:, n : n + step]
            both = 2 * _weighted(Tied(outer, lookup)._picked(), weights)
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
