"""Products of embeddings: a vector for each row that is picked.

>>> left = torch.ones(1, 3, 2)  # a vector of 2 entries for each of 3 picks
>>> rows, samples = torch.tensor([0, 5, 5]), torch.tensor([0, 0, 1])
>>> products = Lookup(left, rows, samples, N=2, shape=torch.Size([6, 2]))
>>> products.dense().shape, products.norms2()
(torch.Size([1, 2, 6, 2]), tensor([[4., 2.]]))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.products.base import Approx, Jacobian, in_basis, second_moment, weighted


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

    def __init__(
        self,
        left: Tensor,
        rows: Tensor,
        samples: Tensor,
        N: int,
        shape: torch.Size,
    ):
        """Keep the rows that were picked, the samples that picked them, and the vectors."""
        self.left, self.rows, self.samples, self.shape = left, rows, samples, shape
        self.V, self.N, self.like = left.shape[0], N, left

    def dense(self) -> Tensor:
        return self._scatter(self.left, 1, self.samples * self.shape[0] + self.rows, self.N * self.shape[0]).reshape(
            self.V, self.N, *self.shape
        )

    @property
    def positions(self) -> int:
        return len(self.rows)

    def sum_batch(self) -> Tensor:
        return self._scatter(self.left, 1, self.rows, self.shape[0])

    def squares(self, per_sample: bool = False) -> Tensor:
        left, rows, samples = self._merged()
        squares = weighted(left.square(), None if self.weights is None else self.weights[:, samples])
        if not per_sample:
            return self._scatter(squares, 0, rows, self.shape[0])
        of_samples = self._scatter(squares, 0, samples * self.shape[0] + rows, self.N * self.shape[0])
        return of_samples.reshape(self.N, *self.shape)

    def norms2(self) -> Tensor:
        left, _, samples = self._merged()
        return self._scatter(left.square().sum(2), 1, samples, self.N)

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        left = self._scatter(self.left, 1, self.samples, self.N) if approx == "reduce" else self.left
        return second_moment(left.flatten(0, 1)[None, None], limit)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """The diagonal ``[I]`` of the second moment of the one-hot inputs: how often each row is picked."""
        if approx == "expand":
            ones = torch.ones_like(self.rows, dtype=self.left.dtype)
            return self._scatter(ones, 0, self.rows, self.shape[0]) / max(len(self.rows), 1)
        positions = self.samples.bincount(minlength=self.N)
        share = (1 / positions).to(self.left.dtype)[self.samples]
        _, inverse, rows, _ = self._unique()
        share = self._scatter(share, 0, inverse, len(rows))
        return self._scatter(share.square(), 0, rows, self.shape[0]) / self.N

    def squares_in(self, bases: Sequence[Tensor]) -> Tensor:
        _, of_left = bases  # the other factor is diagonal
        left = in_basis(self.left[:, :, None, None], of_left)[:, :, 0, 0]
        return Lookup(left, self.rows, self.samples, self.N, self.shape).with_weights(self.weights).squares()

    def _selected(self, samples: list[int]) -> Jacobian:
        picked = [(self.samples == sample).nonzero()[:, 0] for sample in samples]
        of_new = torch.cat([torch.full_like(rows, n) for n, rows in enumerate(picked)])
        rows = torch.cat(picked)
        return Lookup(self.left[:, rows], self.rows[rows], of_new, len(samples), self.shape)

    def project(self, directions: Tensor) -> Tensor:
        products = torch.einsum("vpd,kpd->kvp", self.left, directions[:, self.rows])
        return self._scatter(products, 2, self.samples, self.N)

    def expand(self, coefficients: Tensor) -> Tensor:
        values = torch.einsum("kvp,vpd->kpd", coefficients[:, :, self.samples], self.left)
        return self._scatter(values, 1, self.rows, self.shape[0])

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        return Lookup(self.left, self.rows.clone(), self.samples, self.N, self.shape).with_weights(self.weights)

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
