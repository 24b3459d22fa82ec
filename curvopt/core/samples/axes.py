"""The batch axis of every tensor of a backward pass, propagated from the heads to the leaves.

The heads are the outputs of the model, whose batch axis is known. From there one walk against the direction of the
forward pass gives each operand of each operation its layout, by one rule for each kind of operation::

    head [N, C]           Layout(1, N, C)
    addmm                 rows of the first matrix: Layout(1, N, d); the weight holds no samples: None
    view [N, T, d']       entries keep their order: Layout(1, N, T d')
    transpose(0, 1)       Layout(T, N, d')

An entry in row n of its layout reaches only rows of sample n in the heads. The values of tensors do not matter, so the
answer holds for every batch, also where a gate is zero at first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.nodes import Edge, consumers_first, leaf_of, operation, shape_of
from curvopt.core.operations import OPERATIONS, UNKNOWN_OPERATION
from curvopt.core.record import ModuleCall, records_of
from curvopt.core.samples.layout import (
    UNKNOWN,
    UNUSED,
    AnyLayout,
    Layout,
    OperationCall,
    as_mixed,
    axis_of,
    completed,
    labels_along,
    merged,
    rows_together,
)
from curvopt.core.samples.probe import probe_operands
from curvopt.core.samples.rules import RULES, view


class BatchAxes(NamedTuple):
    """The layouts that the walk has found.

    Attributes:
        N: number of samples.
        layouts: of each output of a node between the heads and the leaves.
        arrived: for heads from which other heads are computed, the layouts that the other heads give them.
    """

    N: int
    layouts: Mapping[Edge, AnyLayout]
    arrived: Mapping[Edge, AnyLayout]

    def mixing(self) -> Iterator[tuple[Edge, bool]]:
        """Heads whose samples another head mixes, or transposes (True)."""
        for head, found in self.arrived.items() if self.N > 1 else ():
            if not isinstance(merged(found, self.layouts[head], self.N), Layout):
                yield head, isinstance(found, Layout)


def propagate_batch_axis(
    heads: Mapping[Edge, Layout],
    N: int,
    last: Collection[Edge] = (),
    complete: bool = True,
    order: Iterable[Node] | None = None,
    parameters: Collection[Node] | None = None,
) -> BatchAxes:
    """The layout of all tensors behind the heads.

    Args:
        heads: outputs of nodes, and where their samples are.
        N: number of samples.
        last: outputs at which the walk stops.
        complete: assign rows that lead to no head to samples, too, so that their layouts need no labels if possible.
        order: the nodes of the graph, each after the nodes that use its outputs, if they are known.
        parameters: the nodes without data behind them, if they are known; all other nodes belong to a single sample.
    """
    layouts: dict[Edge, AnyLayout] = dict(heads)
    arrived: dict[Edge, AnyLayout] = {}
    waiting: dict[Node, list[int]] = {}  # outputs that have a layout, of nodes that the walk has not met
    for node, nr in heads:
        waiting.setdefault(node, []).append(nr)
    order = consumers_first([node for node, _ in heads], {node for node, _ in last}) if order is None else order
    for node in order:
        for nr in waiting.pop(node, ()):
            layout, operands = layouts[node, nr], node.next_functions
            if isinstance(layout, Layout):
                found = operand_layouts(node, nr, layout, N)
            else:
                found = [layout] * len(operands)
            for operand, below in zip(operands, found, strict=True):
                if operand[0] is None:
                    continue
                if N == 1 and _is_of_sample(below, operand[0], parameters):
                    below = Layout(1, 1, prod(shape_of(*operand)))  # noqa: PLW2901
                known = arrived if operand in heads else layouts
                if operand in known:
                    below = merged(known[operand], below, N)  # type: ignore[index] # noqa: PLW2901
                elif known is layouts and operand not in last:
                    waiting.setdefault(operand[0], []).append(operand[1])
                known[operand] = below  # type: ignore[index]
    for edge, layout in layouts.items() if complete else ():
        if isinstance(layout, Layout) and layout.labels is not None:
            layouts[edge] = completed(layout, N)
    return BatchAxes(N, layouts, arrived)


def _is_of_sample(layout: AnyLayout, node: Node, parameters: Collection[Node] | None) -> bool:
    """Whether an operand belongs to the only sample although the rule of its operation does not say so."""
    if layout is None:
        return parameters is not None and node not in parameters
    return layout is UNKNOWN


def operand_layouts(node: Node, output_nr: int, layout: Layout, N: int) -> list[AnyLayout]:
    """The layouts of the operands of an operation, from that of one of its outputs."""
    if not node.next_functions:
        return []  # a leaf: to probe it would accumulate a gradient
    rule = _rule(operation(node))
    if rule is view:
        return [layout] * len(node.next_functions)
    shape = shape_of(node, output_nr)
    axis = axis_of(shape, layout)
    if rule is None and axis is not None and _is_recorded_batch_norm(node):
        call = OperationCall(node, output_nr, shape, layout, axis, N)
        return [as_mixed(call.at(each, axis.index)) if each == shape else None for each in call.operands]
    if rule is None or axis is None:
        return probe_operands(node, output_nr, layout, N)
    return rule(OperationCall(node, output_nr, shape, layout, axis, N))


@cache
def _rule(kind: str) -> Callable[[OperationCall], list[AnyLayout]] | None:
    batch_axis = OPERATIONS.get(kind, UNKNOWN_OPERATION).batch_axis
    return None if batch_axis is None else RULES[batch_axis]


def _is_recorded_batch_norm(node: Node) -> bool:
    """Whether a compiled function is the call of a batch norm that normalises over the samples."""
    calls = [record for record, *_ in records_of(node) if isinstance(record, ModuleCall)]
    norms = [call for call in calls if isinstance(call.module, nn.modules.batchnorm._BatchNorm)]
    return any(norm.training or norm.module.running_mean is None for norm in norms)


def layouts_of_parameters(axes: BatchAxes) -> set[AnyLayout]:
    """The layouts of parameters: ``None``, unless entries of a parameter belong to single samples."""
    return {layout for (node, _), layout in axes.layouts.items() if isinstance(leaf_of(node), nn.Parameter)}


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
    """The sample that each row belongs to, from tensors that have a layout by rows and one by samples."""
    samples: dict[int, int] = {}
    met = [other for other in known if other in axes.layouts]
    for other in met:
        by_rows, by_samples = axes.layouts[other], known[other]
        if not isinstance(by_rows, Layout):
            return None
        _, pairs = rows_together(by_rows, by_samples)
        if pairs is None:
            return None
        for row, sample in pairs:
            if row != UNUSED and samples.setdefault(row, sample) != sample:
                return None
    return samples if met else None


Heads = dict[Edge, Layout]


@dataclass(frozen=True)
class Samples:
    """Where the samples of models are.

    Attributes:
        N: number of samples.
        heads: outputs of the models, or of operations with parameters, whose rows are the samples; what each sample
            feeds from there on is its part of the loss.
        axes: the batch axis of all tensors behind them.
        appended: whether the rows of several calls of different lengths were appended to one batch.
        is_one_sample: whether all rows of a batch are one sample.
    """

    N: int
    heads: Mapping[Edge, Layout]
    axes: BatchAxes
    appended: bool = False
    is_one_sample: bool = False

    def rows_of(self, edge: GradientEdge) -> list[int] | None:
        """The sample of each row (along axis 0) of a tensor before or behind the heads.

        ``None`` where it is not known, or one row depends on several samples.
        """
        key = edge.node, edge.output_nr
        shape = shape_of(*key)
        layout = self.axes.layouts.get(key)
        if isinstance(layout, Layout):
            axis = axis_of(shape, layout)
            return None if axis is None or axis.index else list(labels_along(layout, axis))
        if key in self.axes.layouts:
            return None
        return samples_of_rows(key, self.heads)
