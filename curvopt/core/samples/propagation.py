"""The batch axis of every tensor of a backward pass, propagated from the heads to the leaves.

The heads are the outputs of the model, whose batch axis is known. From there one walk against the direction of the
forward pass gives each operand of each operation its layout, by one rule for each kind of operation::

    head [N, C]           Layout(1, N, C)
    addmm                 rows of the first matrix: Layout(1, N, d); the weight holds no samples: None
    view [N, T, d']       entries keep their order: Layout(1, N, T d')
    transpose(0, 1)       Layout(T, N, d')

An entry in row n of its layout reaches the heads of sample n alone. The values of tensors do not matter, so the answer
holds for every batch, also where a gate is zero at first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import NamedTuple

from torch import nn
from torch.autograd.graph import Node

from curvopt.core.graph.node_vjp import Edge, consumers_first
from curvopt.core.graph.nodes import operation, outputs_of, shape_of
from curvopt.core.graph.operations import OPERATIONS, UNKNOWN_OPERATION
from curvopt.core.record.calls import ModuleCall, records_of
from curvopt.core.samples.layout import UNKNOWN, AnyLayout, Layout, axis_of, completed, merged
from curvopt.core.samples.operation_call import OperationCall, as_mixed
from curvopt.core.samples.operation_rules import RULES, view
from curvopt.core.samples.probe import probe_operands


class BatchAxes(NamedTuple):
    """The layouts that the walk has found.

    Attributes:
        N: number of samples.
        layouts: of each output of a node between the heads and the leaves.
        arrived: of heads from which other heads are computed, the layouts that these others give them.
    """

    N: int
    layouts: Mapping[Edge, AnyLayout]
    arrived: Mapping[Edge, AnyLayout]

    def mixing(self) -> Iterator[tuple[Edge, bool]]:
        """Heads that have other samples by another head than their own: it mixes them, or transposes them (True)."""
        for head, found in self.arrived.items() if self.N > 1 else ():
            if not isinstance(merged(found, self.layouts[head], self.N), Layout):
                yield head, isinstance(found, Layout)

    def of(self, node: Node, output_nr: int = 0) -> AnyLayout:
        """The layout of an output; ``None`` for one that does not lead to the heads."""
        return self.layouts.get((node, output_nr))


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
        order: the nodes of the graph, each after those that use its outputs, if they are known.
        parameters: the nodes that depend on parameters alone, if they are known; all others belong to a single sample.
    """
    layouts: dict[Edge, AnyLayout] = dict(heads)
    arrived: dict[Edge, AnyLayout] = {}
    order = consumers_first([node for node, _ in heads], {node for node, _ in last}) if order is None else order
    for node in order:
        for nr in range(len(outputs_of(node))):
            edge = node, nr
            if edge not in layouts or (edge in last and edge not in heads):
                continue
            layout, operands = layouts[edge], node.next_functions
            if isinstance(layout, Layout):
                found = operand_layouts(node, nr, layout, N)
            else:
                found = [layout] * len(operands)
            for operand, own in zip(operands, found, strict=True):
                if N == 1 and operand[0] is not None and _is_of_sample(own, operand[0], parameters):
                    own = Layout(1, 1, prod(shape_of(*operand)))  # noqa: PLW2901
                if operand[0] is not None:
                    known = arrived if operand in heads else layouts
                    known[operand] = merged(known[operand], own, N) if operand in known else own  # type: ignore[index,assignment]
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
        return [as_mixed(call.at(own, axis.index)) if own == shape else None for own in call.operands]
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
