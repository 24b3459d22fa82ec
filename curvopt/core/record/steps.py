"""Samples that come after the steps of sequences: ``[T, N, ...]``, ``[T N, ...]`` or packed.

>>> samples_first(2, "rows", torch.tensor([0, 1, 0, 1, 0, 1]))  # three steps of samples 0 and 1
tensor([0, 0, 0, 1, 1, 1])
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor


def samples_of(sequences: Tensor, N: int) -> Tensor:
    """The sample of each row of packed sequences, of which each has as many, one after the other."""
    return sequences // ((int(sequences.max()) + 1) // N)


class RowsBySample(NamedTuple):
    """Rows that belong to samples in any order: of packed sequences, or of appended batches of different lengths.

    Each sample gets as many places as the one with most rows has, ``[N T]``; zeros fill the gaps.

    Attributes:
        places: of the rows.
        there: which places have a row.
        lengths: number of rows of each sample, ``[N]``, on the CPU.
        longest: the largest of these, T.
    """

    places: Tensor
    there: Tensor
    lengths: Tensor
    longest: int


@lru_cache(maxsize=2)  # calls of one backward have rows of equal samples; few, as tensors are kept
def rows_by_sample(samples: tuple[int, ...], N: int, device: torch.device) -> RowsBySample:
    """The places of rows, from the sample of each, whose steps come in their order."""
    longest, lengths, places = max(Counter(samples).values(), default=0), [0] * N, list[int]()
    for n in samples:
        places.append(n * longest + lengths[n])
        lengths[n] += 1
    at = torch.tensor(places, dtype=torch.long, device=device)
    there = torch.zeros(N * longest, dtype=torch.bool, device=device).index_fill_(0, at, True)
    return RowsBySample(at, there, torch.tensor(lengths, device="cpu"), longest)


#: How steps come before samples: along an axis of their own, or in rows, all samples of a step after each other, where
#: sequences may have ended. Of a single sample there may be no axis at all.
Steps = Literal["axis", "rows", "none"] | RowsBySample


def samples_first(N: int, steps: Steps, x: Tensor, axis: int = 0) -> Tensor:
    """``[T, N, ...]`` as ``[N, T, ...]``, or ``[T N, ...]`` as ``[N T, ...]``; these begin at an axis."""
    if isinstance(steps, RowsBySample):
        shape = list(x.shape)
        shape[axis] = N * steps.longest
        return x.new_zeros(shape).index_copy_(axis, steps.places, x)
    if steps == "none":
        return x.unsqueeze(axis)
    if steps == "axis":
        return x.transpose(axis, axis + 1)
    return x.unflatten(axis, (-1, N)).transpose(axis, axis + 1).flatten(axis, axis + 1)
