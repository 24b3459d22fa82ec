"""An operation of the graph, one of its outputs, and the axis along which that output has the samples.

A rule asks it for the layouts of the operands:

>>> y = torch.ones(4, 3, requires_grad=True).t()  # [3, 4], samples along axis 1
>>> call = OperationCall(y.grad_fn, 0, y.shape, Layout(3, 4, 1), Axis(1, 1, 1), N=4)
>>> call.at(call.operands[0], 0)
Layout(before=1, rows=4, after=3, labels=None, mixed=False)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from curvopt.core.graph.nodes import shape_of, signed
from curvopt.core.samples.layout import UNKNOWN, UNUSED, AnyLayout, Axis, Layout, along, labelled, labels_along


def as_mixed(layout: AnyLayout) -> AnyLayout:
    """The layout, with the samples mixed by a batch norm."""
    return layout._replace(mixed=True) if isinstance(layout, Layout) else layout


class OperationCall:
    """An operation with one of its outputs, which has the samples along an axis."""

    __slots__ = ("N", "axis", "layout", "node", "output_nr", "shape")

    def __init__(self, node: Node, output_nr: int, shape: Sequence[int], layout: Layout, axis: Axis, N: int):
        self.node, self.output_nr, self.shape = node, output_nr, shape
        self.layout, self.axis, self.N = layout, axis, N

    def saved(self, name: str) -> Any:
        """A number or numbers that the node saved."""
        return getattr(self.node, f"_saved_{name}")

    def dim(self, of: int, name: str = "dim") -> int:
        """An axis that the node saved, of a tensor with so many."""
        return signed(self.saved(name)) % max(of, 1)

    @property
    def operands(self) -> list[torch.Size | None]:
        """Shapes of the operands, ``None`` for constants."""
        return [None if below is None else shape_of(below, nr) for below, nr in self.node.next_functions]

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
        """The layout of an operand whose last axes are those of the output; ``None`` if it is repeated."""
        index = self.axis.index - len(self.shape) + len(shape or ())
        if shape is None or index < 0 or shape[index] != self.shape[self.axis.index]:
            return None
        return self.at(shape, index)

    def labelled(self, shape: torch.Size | None, index: int, labels: Sequence[int]) -> AnyLayout:
        """The layout of an operand whose entries along an axis belong to some samples."""
        return None if shape is None else labelled(shape, index, labels, self.N, self.layout.mixed)

    def placed(self, shape: torch.Size, index: int, labels: Sequence[int], places: Iterable[int]) -> AnyLayout:
        """The layout of an operand of which some entries along an axis are picked, for the samples ``labels``."""
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
