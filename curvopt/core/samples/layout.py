"""Which sample each entry of a tensor belongs to.

A tensor ``[T, N, d]`` with the samples along axis 1 has ``Layout(before=T, rows=N, after=d)``: seen as ``[T, N, d]``,
row n belongs to sample n. Views keep a layout for free, since they keep the order of the entries. Where rows are picked
(``h[mask]``, one part of a batch), ``labels`` say which sample each row belongs to.

>>> axis_of((3, 2, 5), Layout(before=3, rows=2, after=5))
Axis(index=1, before=1, after=1)
>>> axis_of((6, 5), Layout(before=3, rows=2, after=5))  # flattened: rows 0, 2, 4 are sample 0
Axis(index=0, before=3, after=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, lcm, prod
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import Node

from curvopt.core.nodes import operand_shapes, signed

#: Label of a row from which nothing leads to the heads.
UNUSED = -1


class Layout(NamedTuple):
    """The place of the samples in a tensor, seen as ``[before, rows, after]``.

    Attributes:
        before: product of the lengths of the axes before the batch axis.
        rows: length of the batch axis: N, the number of samples, unless there are labels.
        after: product of the lengths of the axes behind it.
        labels: the sample of each row, or `UNUSED`; ``None`` if row n belongs to sample n.
        mixed: whether a train-mode batch norm mixes the samples on the way to the heads.
    """

    before: int
    rows: int
    after: int
    labels: tuple[int, ...] | None = None
    mixed: bool = False


class Unknown:
    """The layout of a tensor whose samples are not known."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()
#: ``None``: the tensor holds no samples, all of them share it.
AnyLayout = Layout | Unknown | None


class Axis(NamedTuple):
    """The axis that holds the samples, whose length is ``before * rows * after``."""

    index: int
    before: int
    after: int


def axis_of(shape: Sequence[int], layout: Layout) -> Axis | None:
    """The axis of a shape that has the rows of a layout; ``None`` if several axes have them."""
    start = 1
    for index, length in enumerate(shape):
        if start == layout.before and length == layout.rows:
            return Axis(index, 1, 1)
        start *= length
    start = 1
    for index, length in enumerate(shape):
        if not layout.rows:  # of an empty tensor
            if not length:
                return Axis(index, 1, 1)
        elif start * length >= layout.before * layout.rows and layout.before >= start and layout.before % start == 0:
            before = layout.before // start
            if before * layout.rows <= length and length % (before * layout.rows) == 0:
                return Axis(index, before, length // (before * layout.rows))
        start *= length
    return None


def along(shape: Sequence[int], axis: Axis, layout: Layout) -> Layout:
    """The layout of a tensor of a shape that has the samples along an axis as another one has."""
    before = prod(shape[: axis.index]) * axis.before
    size = prod(shape)
    return layout._replace(before=before, after=size // max(before * layout.rows, 1))


def labels_along(layout: Layout, axis: Axis) -> tuple[int, ...]:
    """The sample of each entry of the axis that holds them."""
    rows = range(layout.rows) if layout.labels is None else layout.labels
    return tuple([label for _ in range(axis.before) for label in rows for _ in range(axis.after)])


def labelled(
    shape: Sequence[int], axis: int, labels: Sequence[int], N: int, mixed: bool, complete: bool = False
) -> Layout:
    """The layout of a tensor whose entries along an axis belong to these samples; regular if all are in order.

    With ``complete``, unused ones are given to samples, so that it is regular where that is possible.
    """
    before, labels, after = prod(shape[:axis]), tuple(labels), prod(shape[axis + 1 :])
    share, rest = divmod(len(labels), max(N, 1))
    for by_share in (True, False) if share and not rest else ():
        ordered = tuple([j // share if by_share else j % N for j in range(len(labels))])
        if labels == ordered or (complete and all(a in (UNUSED, b) for a, b in zip(labels, ordered, strict=True))):
            return Layout(before if by_share else before * share, N, after * share if by_share else after, mixed=mixed)
    return Layout(before, len(labels), after, tuple([max(a, 0) for a in labels]) if complete else labels, mixed)


def completed(layout: Layout, N: int) -> Layout:
    """A layout in which unused rows are given to samples."""
    if layout.labels is None or UNUSED not in layout.labels:
        return layout
    return labelled((layout.before, layout.rows, layout.after), 1, layout.labels, N, layout.mixed, complete=True)


def merged(one: AnyLayout, other: AnyLayout, N: int) -> AnyLayout:
    """The layout of a tensor that two operations use."""
    if one is other or one == other:
        return one
    if not (isinstance(one, Layout) and isinstance(other, Layout)):
        if N == 1:
            return one if isinstance(one, Layout) else other
        return UNKNOWN  # one operation uses the rows of single samples, the other one all rows
    mixed = one.mixed or other.mixed
    if N == 1 or one[:4] == other[:4]:
        return one._replace(mixed=mixed)
    if one.labels is None and other.labels is None:
        return UNKNOWN
    step, pairs = rows_together(one, other)
    if pairs is None or any(UNUSED not in pair and pair[0] != pair[1] for pair in pairs):
        return UNKNOWN
    before, rows = one.before * one.rows * one.after // max(len(pairs) * step, 1), [max(pair) for pair in pairs]
    if UNUSED in rows:
        return Layout(before, len(rows), step, tuple(rows), mixed)
    return labelled((before, len(rows), step), 1, rows, N, mixed)


#: Pairs that `rows_together` lists at most; more take seconds.
MOST_PAIRS = 1 << 20


def rows_together(one: Layout, other: Layout) -> tuple[int, list[tuple[int, int]] | None]:
    """How many entries of a tensor next to each other have one pair of samples by two layouts, and these pairs.

    Behind the last pair comes the first again. ``None`` in place of more than `MOST_PAIRS`.
    """
    step = gcd(one.after, other.after) or 1
    length = lcm(one.rows * one.after, other.rows * other.after) // step
    if length > MOST_PAIRS:
        return step, None
    rows = [range(layout.rows) if layout.labels is None else layout.labels for layout in (one, other)]
    return step, [
        (rows[0][j * step // one.after % one.rows], rows[1][j * step // other.after % other.rows])
        for j in range(length)
    ]


def as_mixed(layout: AnyLayout) -> AnyLayout:
    """The layout, with the samples mixed by a batch norm."""
    return layout._replace(mixed=True) if isinstance(layout, Layout) else layout


class OperationCall:
    """An operation with one of its outputs, which has the samples along an axis."""

    __slots__ = ("N", "axis", "layout", "node", "operands", "output_nr", "shape")

    def __init__(self, node: Node, output_nr: int, shape: Sequence[int], layout: Layout, axis: Axis, N: int):
        self.node, self.output_nr, self.shape = node, output_nr, shape
        self.layout, self.axis, self.N = layout, axis, N
        #: Shapes of the operands, ``None`` for constants.
        self.operands = operand_shapes(node)

    def saved(self, name: str) -> Any:
        """A number or numbers that the node saved."""
        return getattr(self.node, f"_saved_{name}")

    def dim(self, of: int, name: str = "dim") -> int:
        """An axis that the node saved, of a tensor with so many."""
        return signed(self.saved(name)) % max(of, 1)

    @property
    def unknown(self) -> list[AnyLayout]:
        return [UNKNOWN] * len(self.node.next_functions)

    @property
    def shared(self) -> list[AnyLayout]:
        """All samples share all operands."""
        return [None] * len(self.node.next_functions)

    def at(self, shape: torch.Size | None, index: int) -> AnyLayout:
        """The layout of an operand that has the samples along its axis ``index``."""
        if shape is None:
            return None
        return along(shape, self.axis._replace(index=index), self.layout)

    def broadcast(self, shape: torch.Size | None) -> AnyLayout:
        """The layout of an operand whose last axes are the output's; ``None`` if it is repeated."""
        if shape == self.shape:
            return self.layout
        index = self.axis.index - len(self.shape) + len(shape or ())
        if shape is None or index < 0 or shape[index] != self.shape[self.axis.index]:
            return None
        return self.at(shape, index)

    def labelled(self, shape: torch.Size | None, index: int, labels: Sequence[int]) -> AnyLayout:
        """The layout of an operand whose entries along an axis belong to the samples ``labels``."""
        return None if shape is None else labelled(shape, index, labels, self.N, self.layout.mixed)

    def placed(self, shape: torch.Size, index: int, labels: Sequence[int], places: Iterable[int]) -> AnyLayout:
        """The layout of an operand of which entries along an axis are picked, for the samples ``labels``."""
        found = [UNUSED] * shape[index]
        for label, place in zip(labels, places, strict=True):
            if found[place] not in (UNUSED, label):
                return UNKNOWN  # two samples use it
            found[place] = label
        return labelled(shape, index, found, self.N, self.layout.mixed)

    @property
    def labels(self) -> tuple[int, ...]:
        """The samples of the entries along the axis."""
        return labels_along(self.layout, self.axis)
