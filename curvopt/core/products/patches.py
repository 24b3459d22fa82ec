"""The input of a convolution as patches, formed when a product needs them.

>>> import torch
>>> from curvopt.core.layers.affine import Conv
>>> patches = Conv().unfold(torch.nn.Conv2d(1, 5, kernel_size=2), torch.ones(7, 1, 3, 3))
>>> patches.whole.shape  # [N, G, S, I]: four positions, each sees four entries
torch.Size([7, 1, 4, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from typing import Any

from einops import rearrange
from torch import Tensor

from curvopt.core.products import chunk_sizes as costs
from curvopt.core.products.second_moments import _add_product
from curvopt.core.products.sums import widened


class Patches:
    """The input of a convolution as patches, put together when a product needs them.

    Args:
        x: the input, ``[N, ...]``.
        see: returns rows ``[N, G, C, R, T]`` of some samples, K, and the length of a row. A patch has the entries
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
        """These patches, for one use."""
        return self._changed(kept=False)

    def select(self, samples: list[int]) -> Patches:
        """The patches of some samples."""
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
