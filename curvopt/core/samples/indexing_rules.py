"""The rules of operations that pick rows by integers: their labels say which sample each row is of.

::

    h[[2, 0]] [2, d], rows of samples 0 and 1    ──►    h [3, d], labels (1, UNUSED, 0)
    h[[2, 2]] [2, d], rows of samples 0 and 1    ──►    UNKNOWN: both samples use row 2
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from curvopt.core.samples.layout import UNKNOWN, AnyLayout, Layout
from curvopt.core.samples.operation_call import OperationCall


def index(call: OperationCall) -> list[AnyLayout]:
    """Rows that are picked by one tensor of integers, or several."""
    (shape,), picked = call.operands, _picked(call.saved("indices"))
    if shape is None or picked is None:
        return call.unknown
    first, count, ways = picked
    if call.axis.index != first:  # an axis that is not indexed
        index = call.axis.index if call.axis.index < first else call.axis.index - 1 + count
        return [call.at(shape, index)]
    for axis, merged_axes, places in ways:
        seen = [*shape[:axis], prod(shape[axis : axis + merged_axes]), *shape[axis + merged_axes :]]
        found = call.placed(torch.Size(seen), axis, call.labels, places)
        if found is not UNKNOWN:
            return [found]
    return call.unknown


def _picked(indices: Sequence[Tensor | None]) -> tuple[int, int, list[tuple[int, int, list[int]]]] | None:
    """How rows are picked by indices, where these make one axis of the output; ``None`` otherwise.

    Returns:
        The first axis that is indexed, how many are, and the ways to see it: an axis of the operand, how many axes
        from there on count as one, and the places along it.
    """
    given = [(i, x) for i, x in enumerate(indices) if x is not None]
    if not given or [i for i, _ in given] != list(range(given[0][0], given[0][0] + len(given))):
        return None
    (first, x), *others = given
    if x.dtype == torch.bool:
        return None if others else (first, x.dim(), [(first, x.dim(), x.flatten().nonzero()[:, 0].tolist())])
    if any(each.dim() != 1 or each.dtype == torch.bool or len(each) != len(x) for _, each in given):
        return None
    return first, len(given), [(i, 1, each.tolist()) for i, each in given]


def index_select(call: OperationCall) -> list[AnyLayout]:
    """Rows that are picked along an axis."""
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    return [call.placed(shape, index, call.labels, call.saved("index").flatten().tolist())]


def index_put(call: OperationCall) -> list[AnyLayout]:
    """Rows that are written, and those that are kept."""
    (own, values), picked = call.operands, _picked(call.saved("indices"))
    if picked is None or picked[0] != 0:
        return call.unknown
    _, count, ((_, merged_axes, places), *others) = picked
    if others or call.axis.index >= max(count, merged_axes):
        return call.unknown
    found: list[AnyLayout] = [call.at(own, call.axis.index), None]
    if values is not None:
        if len(values) != len(call.shape) - merged_axes + 1 or values[0] != len(places):
            return call.unknown  # repeated for the rows
        labels, share = call.labels, prod(call.shape[call.axis.index + 1 : merged_axes])
        picks = [labels[place // share % len(labels)] for place in places]
        found[1] = call.labelled(values, 0, picks)
    return found


def index_add(call: OperationCall) -> list[AnyLayout]:
    """Rows that are added to others."""
    shapes, index = call.operands, call.axis.index
    if index != call.dim(len(call.shape)):
        return [call.at(shape, index) for shape in shapes]
    labels, source, places = call.labels, shapes[1], call.saved("index").flatten().tolist()
    if source is not None and not len(source):  # a single number
        return [call.at(shapes[0], index), Layout(1, 1, 1, (labels[places[0]],), call.layout.mixed)]
    if source is None or len(source) != len(call.shape):
        return call.unknown
    return [call.at(shapes[0], index), call.labelled(source, index, [labels[place] for place in places])]


def gather(call: OperationCall) -> list[AnyLayout]:
    """Entries that are picked along an axis."""
    (shape,) = call.operands
    index = call.axis.index
    kept = shape is not None and index != call.dim(len(shape)) and shape[index] == call.shape[index]
    return [call.at(shape, index)] if kept else call.unknown


def embedding(call: OperationCall) -> list[AnyLayout]:
    """Rows of a table, which all samples share."""
    return call.shared
