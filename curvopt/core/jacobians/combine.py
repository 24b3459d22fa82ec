"""One Jacobian of several: of all calls that share a parameter, or of samples that came one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.jacobians.base import Dense, Jacobian
from curvopt.core.jacobians.in_parts import Summed
from curvopt.core.jacobians.lookup import Lookup
from curvopt.core.jacobians.outer import Outer
from curvopt.core.jacobians.pulled_back import PulledBack
from curvopt.core.jacobians.tied import tied


def combine(parts: Sequence[Jacobian]) -> Jacobian:
    """One Jacobian for all calls that share one parameter.

    Positions of calls of one kind are concatenated, products of other kinds are added.
    """
    if len(parts) == 1:
        return parts[0]
    kinds: dict[object, list[Jacobian]] = {}
    for part in _alike(parts):
        kinds.setdefault(_kind(part), []).append(part)
    joined = [_concatenated(of_kind) for of_kind in kinds.values()]
    if len(joined) == 2 and {*map(type, joined)} == {Outer, Lookup}:
        outer, lookup = sorted(joined, key=lambda part: isinstance(part, Lookup))
        return tied(outer, lookup)  # type: ignore[arg-type]
    return joined[0] if len(joined) == 1 else Summed(joined)


def _kind(part: Jacobian) -> object:
    """Equal for those whose positions can be concatenated."""
    if isinstance(part, Outer):
        return part.transposed, part.G, part.O
    return part.source if isinstance(part, PulledBack) else type(part)


def _alike(parts: Sequence[Jacobian]) -> Sequence[Jacobian]:
    """Products of linear layers and of their slopes by the input, which multiply the transposed weight, in one form.

    What arrives at a slope is the input side then. It is scaled as inputs of the layers are, so that Kronecker factors
    of both add up (weight sharing between a function and its derivatives, Dangel et al. 2024).
    """
    outers = [part for part in parts if isinstance(part, Outer)]
    plain = [outer for outer in outers if not outer.transposed]
    swapped = [outer for outer in outers if outer.transposed and outer.V == outer.G == 1 and not outer.of_batch]
    if not plain or not swapped or len(plain) + len(swapped) < len(parts):
        return parts
    size = _mean_square(plain, [outer.right for outer in plain])
    own = _mean_square(swapped, [outer.left for outer in swapped])
    scale = torch.where((size > 0) & (own > 0), size / own, 1).sqrt()
    return [part if part in plain else part.swapped(scale) for part in outers]


def _mean_square(outers: Sequence[Outer], sides: Sequence[Tensor]) -> Tensor:
    positions = [outer.N * outer.S if outer.lengths is None else int(outer.lengths.sum()) for outer in outers]
    return torch.stack([side.detach().square().sum() for side in sides]).sum() / max(sum(positions), 1)


def from_single_samples(jacobian: Jacobian, N: int) -> Jacobian:
    """One Jacobian of V vectors and N samples from one of one sample, whose vectors are those of N samples in turn."""
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
        outers = [part for part in parts if isinstance(part, Outer)]
        left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
        lengths = None
        if any(o.lengths is not None for o in outers):
            of_each = [torch.full((o.N,), o.S) if o.lengths is None else o.lengths for o in outers]
            lengths = torch.stack(of_each).sum(0)
        return Outer(left, right, first.shape, first.transposed, lengths, parts=parts)
    if isinstance(first, PulledBack):
        return first.of(combine([part.inner for part in parts if isinstance(part, PulledBack)]))
    if isinstance(first, Lookup):
        lookups = [part for part in parts if isinstance(part, Lookup)]
        left = torch.cat([lookup.left for lookup in lookups], 1)
        rows, samples = (torch.cat([getattr(lookup, side) for lookup in lookups]) for side in ("rows", "samples"))
        return Lookup(left, rows, samples, first.N, first.shape, parts=parts)
    return Dense(sum((part.dense() for part in parts[1:]), start=first.dense()))
