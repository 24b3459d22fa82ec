"""One Jacobian of several: of all calls that share a parameter, or of samples that came one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from curvopt.core.jacobians.base import Dense, Jacobian
from curvopt.core.jacobians.lookup import Lookup
from curvopt.core.jacobians.outer import Outer
from curvopt.core.jacobians.pulled_back import PulledBack


def combine(parts: Sequence[Jacobian]) -> Jacobian:
    """One Jacobian for all calls that share one parameter: positions are concatenated, other kinds are added."""
    if len(parts) == 1:
        return parts[0]
    return _concatenate(parts)


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


def _concatenate(parts: Sequence[Jacobian]) -> Jacobian:
    first = parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) == len(parts) and len({(part.transposed, part.G, part.O) for part in outers}) == 1:
        left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
        lengths = None
        if any(o.lengths is not None for o in outers):
            of_each = [torch.full((o.N,), o.S) if o.lengths is None else o.lengths for o in outers]
            lengths = torch.stack(of_each).sum(0)
        return Outer(left, right, first.shape, outers[0].transposed, lengths, parts=parts)
    computed = [part for part in parts if isinstance(part, PulledBack)]
    if len(computed) == len(parts) and len({part.source for part in computed}) == 1:
        return computed[0].of(_concatenate([part.inner for part in computed]))
    if all(isinstance(part, Lookup) for part in parts):
        lookups = [part for part in parts if isinstance(part, Lookup)]
        left = torch.cat([lookup.left for lookup in lookups], 1)
        rows, samples = (torch.cat([getattr(lookup, side) for lookup in lookups]) for side in ("rows", "samples"))
        return Lookup(left, rows, samples, first.N, first.shape, parts=parts)
    return Dense(sum((part.dense() for part in parts[1:]), start=first.dense()))
