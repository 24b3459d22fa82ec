"""One Jacobian made of several: of all calls that share a parameter, or of samples that came one by one.

>>> left, right = torch.ones(1, 4, 1, 1, 2), torch.ones(4, 1, 1, 3)
>>> call = Outer(left, right, torch.Size([2, 3]))
>>> combine([call, call]).S  # a linear layer that is called twice has two positions
2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from curvopt.core.products.base import Dense, Jacobian
from curvopt.core.products.in_parts import Summed
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer, concatenated
from curvopt.core.products.pulled_back import PulledBack
from curvopt.core.products.slopes import Slopes
from curvopt.core.products.tied import tied


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
    """Equal for those whose positions can be concatenated."""
    if isinstance(part, Outer):
        return part.transposed, part.G, part.O
    return part.source if isinstance(part, PulledBack) else type(part)


def from_single_samples(jacobian: Jacobian, N: int) -> Jacobian:
    """A Jacobian of V vectors and N samples, from one of one sample and ``V N`` vectors, those of N samples in turn."""
    if isinstance(jacobian, Outer):
        left, right = jacobian.left.flatten(0, 1).unflatten(0, (-1, N)), jacobian.right.expand(N, -1, -1, -1)
        lengths = None if jacobian.lengths is None else jacobian.lengths.expand(N)
        return Outer(left, right, jacobian.shape, jacobian.transposed, lengths, of_batch=True)
    if isinstance(jacobian, Lookup):
        rows, left = jacobian.rows, jacobian.left.unflatten(0, (-1, N)).flatten(1, 2)
        samples = torch.arange(N, device=rows.device).repeat_interleave(len(rows))
        return Lookup(left, rows.repeat(N), samples, N, jacobian.shape, of_batch=True)
    return Dense(jacobian.dense().flatten(0, 1).unflatten(0, (-1, N)))


def _concatenated(parts: Sequence[Jacobian]) -> Jacobian:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Outer):
        left, right, lengths = concatenated([part for part in parts if isinstance(part, Outer)])
        return Outer(left, right, first.shape, first.transposed, lengths, parts=parts)
    if isinstance(first, PulledBack):
        return first.of(combine([part.inner for part in parts if isinstance(part, PulledBack)]))
    if isinstance(first, Lookup):
        lookups = [part for part in parts if isinstance(part, Lookup)]
        left = torch.cat([lookup.left for lookup in lookups], 1)
        rows, samples = (torch.cat([getattr(lookup, side) for lookup in lookups]) for side in ("rows", "samples"))
        return Lookup(left, rows, samples, first.N, first.shape, parts=parts)
    return Dense(Summed(parts).dense())
