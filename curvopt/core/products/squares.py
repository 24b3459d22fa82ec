"""Squared products, summed over chunks of columns.

>>> from curvopt.core.products.base import Dense
>>> total = Squares()
>>> for values in (torch.full((1, 4, 3), 2.0), torch.ones(1, 4, 3)):  # two chunks of one column, [V, N, *p]
...     total = total.add(Dense(values))
>>> total.total()
tensor([20., 20., 20.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvopt.core.products.base import Jacobian
from curvopt.core.products.sums import add, cast, widened

if TYPE_CHECKING:
    from curvopt.core.products.outer import Outer


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
        """Add those of a chunk of columns, of ``num_columns`` in all."""
        self._dtype = self._dtype or jacobian.like.dtype
        outer = jacobian.by_pairs(num_columns or jacobian.V)
        if outer is not None:
            if self._pairs is not None and self._pairs[0].right is not outer.right:
                self.total()
            pairs = widened(outer.output_pairs())  # which others may share
            self._pairs = outer, pairs if self._pairs is None else self._pairs[1] + pairs
            self._signed = self._signed or outer.weights is not None
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
