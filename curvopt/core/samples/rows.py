"""The sample of each row of a tensor between the heads and the loss.

>>> z = 2 * torch.ones(3, 5, requires_grad=True)  # the head: row n is sample n
>>> picked = z[[2, 0]]
>>> samples_of_rows((picked.grad_fn, 0), {(z.grad_fn, 0): Layout(1, 3, 5)})
[2, 0]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, prod

import torch
from torch import nn

from curvopt.core.graph.node_vjp import Edge
from curvopt.core.graph.nodes import leaf_of, shape_of
from curvopt.core.samples.layout import UNKNOWN, UNUSED, AnyLayout, Layout, labelled
from curvopt.core.samples.propagation import BatchAxes, propagate_batch_axis


def axis_of_head(edge: Edge, rows: int, axis: int) -> int | None:
    """The batch axis of an output: where the first axis fits besides, the one along which more is located.

    So may the second one of ``[N, N, ...]``, of as many steps as samples, if operations mix the entries of the first.
    """
    shape = shape_of(*edge)
    fit = [i for i in dict.fromkeys((axis, 0)) if len(shape) > i and shape[i] == rows]
    if fit == [1] and len(shape) == 2 and shape[0] % rows == 0:
        if divides_parameters(edge, 1, rows):
            return None  # flattened, with N features
    if fit == [0] and len(shape) > 2 and is_along_second(edge, rows):
        first = propagate_batch_axis({edge: labelled(shape, 0, range(rows), rows, False)}, rows).layouts
        fit = [0, 1] if UNKNOWN in first.values() else [0]
    if len(fit) < 2:
        return fit[0] if fit else None

    def located(i: int) -> int:
        layouts = propagate_batch_axis({edge: labelled(shape, i, range(rows), rows, False)}, rows).layouts
        return sum(isinstance(layout, Layout) for layout in layouts.values())

    return max(fit, key=located)


def is_along_second(edge: Edge, N: int, known: Mapping[Edge, Layout] | None = None) -> bool:
    """Whether an output is ``[T, N, ...]``, as layers with the time first, or `torch.vmap` over nets, return it.

    It is not if entries of parameters were those of samples then, as of ``[K, N]`` with N features.
    """
    return shape_of(*edge)[1:2] == (N,) and _of_parameters(edge, 1, N, known) == {None}


def divides_parameters(edge: Edge, axis: int, N: int) -> bool:
    """Whether entries of parameters would be those of single samples, if these were along an axis of an output."""
    return any(isinstance(layout, Layout) for layout in _of_parameters(edge, axis, N))


def _of_parameters(edge: Edge, axis: int, N: int, known: Mapping[Edge, Layout] | None = None) -> set[AnyLayout]:
    """The layouts that the parameters behind a tensor have, if its samples are along an axis."""
    head = labelled(shape_of(*edge), axis, range(N), N, False)
    layouts = propagate_batch_axis({edge: head}, N, known or {}, complete=False).layouts
    return {own for (node, _), own in layouts.items() if isinstance(leaf_of(node), nn.Parameter)}


def samples_of_rows(edge: Edge, known: Mapping[Edge, Layout]) -> list[int] | None:
    """The sample of each row of a tensor that was computed from tensors with known layouts, row by row.

    ``None`` if a row depends on several samples, or that is not known.
    """
    shape = shape_of(*edge)
    if not (shape and known):
        return None
    samples = max((layout.rows for layout in known.values() if layout.labels is None), default=1)
    for rows in dict.fromkeys((shape[0], samples, 1)):  # of several rows, of shares of samples, or of one sample
        if not rows or shape[0] % rows:
            continue
        axes = propagate_batch_axis({edge: Layout(1, rows, prod(shape) // rows)}, rows, known, complete=False)
        found = matched(axes, known)
        if found is not None:
            share = shape[0] // rows
            return [found.get(row // share, UNUSED) for row in range(shape[0])]
    return None


def matched(axes: BatchAxes, known: Mapping[Edge, Layout]) -> dict[int, int] | None:
    """The sample that each row belongs to, from the layouts that both have of some tensors."""
    samples: dict[int, int] = {}
    met = [other for other in known if other in axes.layouts]
    for other in met:
        by_rows, by_samples = axes.layouts[other], known[other]
        if not isinstance(by_rows, Layout):
            return None
        pairs = _pairs(by_rows, by_samples)
        if pairs is None:
            return None
        for row, sample in pairs:
            if row != UNUSED and samples.setdefault(row, sample) != sample:
                return None
    return samples if met else None


def _pairs(one: Layout, other: Layout) -> Iterable[tuple[int, int]] | None:
    """For all entries of a tensor the row by one layout and by another one, each pair once."""
    rows = range(one.rows) if one.labels is None else one.labels
    samples = range(other.rows) if other.labels is None else other.labels
    if (one.before, one.rows, one.after) == (other.before, other.rows, other.after):
        return zip(rows, samples, strict=True)
    size = one.before * one.rows * one.after
    step = gcd(one.after, other.after)
    if size // step > 1 << 20:
        return None
    entries = torch.arange(0, size, step)
    by_row = torch.tensor(rows)[entries // one.after % one.rows]
    by_sample = torch.tensor(samples)[entries // other.after % other.rows]
    return [tuple(pair) for pair in torch.stack([by_row, by_sample], 1).unique(dim=0).tolist()]  # type: ignore[misc]
