"""Samples that come after the steps of sequences: ``[T, N, ...]``, ``[T N, ...]`` or packed.

>>> samples_first(2, "rows", torch.tensor([0, 1, 0, 1, 0, 1]))  # three steps of samples 0 and 1
tensor([0, 0, 0, 1, 1, 1])
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


def samples_of(sequences: Tensor, N: int) -> Tensor:
    """The sample of each row of packed sequences, of which each has as many, one after the other."""
    return sequences // ((int(sequences.max()) + 1) // N)


class Packed(NamedTuple):
    """The places of the rows of packed sequences if every sample has as many, ``[N T]``: between them zeros are put.

    Attributes:
        places: of the rows there.
        there: which rows of those are some of the sequences.
        lengths: of the sequences, ``[N]``, on the CPU.
    """

    places: Tensor
    there: Tensor
    lengths: Tensor

    @property
    def longest(self) -> int:
        """Number of steps T of the longest sequence."""
        return len(self.there) // len(self.lengths)

    @staticmethod
    def of(samples: Tensor, N: int) -> Packed:
        """From the sample of each row, whose steps come in their order."""
        lengths, order = samples.bincount(minlength=N), samples.argsort(stable=True)
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        places, longest = samples.clone(), int(lengths.max())
        places[order] = samples[order] * longest + torch.arange(len(samples), device=samples.device) - begins
        there = torch.zeros(N * longest, dtype=torch.bool, device=samples.device).index_fill_(0, places, True)
        return Packed(places, there, lengths.cpu())


#: How steps come before samples: along an axis of their own, or in rows, all samples of a step after each other, where
#: sequences may have ended.
Steps = Literal["axis", "rows"] | Packed


def samples_first(N: int, steps: Steps, x: Tensor, axis: int = 0) -> Tensor:
    """``[T, N, ...]`` as ``[N, T, ...]``, or ``[T N, ...]`` as ``[N T, ...]``; these begin at an axis."""
    if isinstance(steps, Packed):
        padded = x.new_zeros(*x.shape[:axis], len(steps.there), *x.shape[axis + 1 :])
        return padded.index_copy(axis, steps.places, x)
    if steps == "axis":
        return x.transpose(axis, axis + 1)
    return x.unflatten(axis, (-1, N)).transpose(axis, axis + 1).flatten(axis, axis + 1)
