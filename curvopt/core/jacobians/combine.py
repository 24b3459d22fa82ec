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
    result = _concatenate(parts)
    if isinstance(result, (Outer, Lookup)) and any(part.of_batch for part in parts):
        result.calls = parts
    result.origin = tuple(call for part in parts for call in part.origin)
    result.positions_of_all = any(part.positions_of_all for part in parts)
    return result


def from_single_samples(jacobian: Jacobian, N: int) -> Jacobian:
    """One Jacobian of V vectors and N samples from one of one sample, whose vectors are those of N samples in turn."""
    if isinstance(jacobian, Outer):
        left, right = jacobian.left.flatten(0, 1).unflatten(0, (-1, N)), jacobian.right.expand(N, -1, -1, -1)
        result: Jacobian = Outer(left, right, jacobian.shape, jacobian.transposed)
        result.positions_of_all = jacobian.S > 1
        result.lengths = None if jacobian.lengths is None else jacobian.lengths.expand(N)
    elif isinstance(jacobian, Lookup):
        rows, left = jacobian.rows, jacobian.left.unflatten(0, (-1, N)).flatten(1, 2)
        samples = torch.arange(N, device=rows.device).repeat_interleave(len(rows))
        result = Lookup(left, rows.repeat(N), samples, N, jacobian.shape)
        result.positions_of_all = len(rows) > 1
    else:
        result = Dense(jacobian.dense().flatten(0, 1).unflatten(0, (-1, N)))
    result.of_batch = True
    result.origin = jacobian.origin
    return result


def _concatenate(parts: Sequence[Jacobian]) -> Jacobian:
    first = parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) == len(parts) and len({(part.transposed, part.G, part.O) for part in outers}) == 1:
        left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
        result = Outer(left, right, first.shape, outers[0].transposed)
        if any(o.lengths is not None for o in outers):
            result.lengths = torch.stack([torch.full((o.N,), o.S) if o.lengths is None else o.lengths for o in outers])
            result.lengths = result.lengths.sum(0)
        return result
    computed = [part for part in parts if isinstance(part, PulledBack)]
    if len(computed) == len(parts) and len({part.source for part in computed}) == 1:
        return computed[0].of(_concatenate([part.inner for part in computed]))
    if all(isinstance(part, Lookup) for part in parts):
        lookups = [part for part in parts if isinstance(part, Lookup)]
        left = torch.cat([lookup.left for lookup in lookups], 1)
        rows, samples = (torch.cat([getattr(lookup, side) for lookup in lookups]) for side in ("rows", "samples"))
        return Lookup(left, rows, samples, first.N, first.shape)
    return Dense(sum((part.dense() for part in parts[1:]), start=first.dense()))
