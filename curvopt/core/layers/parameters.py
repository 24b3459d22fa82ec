"""The operations that combine parameters with samples outside of modules with a rule, read off the graph.

From a parameter one goes towards the loss until an operation whose output has samples: ``F.linear(x, W)``,
``h * scale``, ``h + positions``. What comes in between is computed from the parameter before it meets the samples, such
as a mask, a norm or a sum of low rank::

    W ── t ── addmm(b, x, W^T) [N, O]        a linear layer
    W ── mul(W, mask) ── addmm [N, O]        a linear layer with a weight that was computed
    g ── mul(h, g) [N, O]                    a factor that all samples share
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.graph import BackwardGraph, CallInGraph, Operand
from curvopt.core.layers.computed import BroadcastRule, ComputedWeightRule, PerSampleRule
from curvopt.core.layers.operations import (
    Broadcast,
    ParameterCall,
    broadcast_of,
    broadcasts,
    is_bias,
    is_layer,
    layer_call,
    product_in_cell,
    shape_among,
    view_of,
)
from curvopt.core.layers.rule import AffineRule, Rule
from curvopt.core.nodes import Edge, is_complex, leaf_of, outputs_of, shape_of
from curvopt.core.record import extended_name, extended_owner
from curvopt.core.samples.axes import Samples
from curvopt.core.samples.layout import Layout


class EntryPoint(NamedTuple):
    """An operation whose output has samples, and an operand of it that comes from a parameter.

    Attributes:
        node: of the operation.
        output_nr: which output has the samples.
        position: of the operand.
    """

    node: Node
    output_nr: int
    position: int

    @property
    def operand(self) -> GradientEdge:
        """Where the operand was computed."""
        return GradientEdge(*self.node.next_functions[self.position])  # type: ignore[arg-type]


def find_entry_points(
    operands: Sequence[Operand], graph: BackwardGraph, layouts: Mapping[Edge, object]
) -> tuple[list[EntryPoint], bool]:
    """The first operations with samples on the paths to the heads, and whether there are paths around the heads.

    Args:
        operands: operations, and the positions of operands, to start with.
        graph: the graph.
        layouts: of all tensors behind the heads.
    """
    entries, around = list[EntryPoint](), False
    stack, seen = list(operands), set(operands)
    while stack:
        node, position = stack.pop()
        behind = [edge for nr in range(len(outputs_of(node))) if (edge := (node, nr)) in layouts]
        around = around or not behind
        for edge in behind:
            if isinstance(layouts[edge], Layout):
                entries.append(EntryPoint(*edge, position))
                continue
            following = [user for user in graph.users.get(edge, ()) if user not in graph.inside and user not in seen]
            seen.update(following)
            stack += following
    return entries, around


def parameter_calls(p: nn.Parameter, entries: Iterable[EntryPoint], location: Samples) -> Iterator[CallInGraph]:
    """Calls of operations on a parameter."""
    path = (extended_name(p) or "").rpartition(".")[0]
    owner = extended_owner(p)
    in_cells: dict[Edge, EntryPoint] = {}  # a cell has two outputs, and adds its biases once
    for entry in entries:
        product = product_in_cell(entry.node, entry.position)
        if product is None:
            yield _operation(p, entry, location, path, owner)
        else:
            in_cells.setdefault(product, entry)
    for product, entry in in_cells.items():
        source = None if leaf_of(entry.operand.node) is p else entry.operand
        rule = BroadcastRule(p, source, shape_of(entry.operand.node, entry.operand.output_nr), Broadcast())
        operation_call = ParameterCall(path, owner, (), shape_of(*product), owner)
        call = CallInGraph(operation_call, rule, {"weight": p}, {0: GradientEdge(*product)})
        call.locate(location)
        yield call


def _operation(p: nn.Parameter, entry: EntryPoint, location: Samples, path: str, owner: nn.Module) -> CallInGraph:
    """The call of an operation on a parameter.

    Args:
        p: the parameter.
        entry: the operation.
        location: of its samples.
        path: of the module, for messages.
        owner: the module.
    """
    node, nr, position = entry
    edges = {0: GradientEdge(node, nr)}
    if nr == 0 and not is_complex(node):
        try:
            found = _layer(p, entry, path, owner) or _broadcast(p, entry, path, owner)
        except RuntimeError:  # a part of the graph that is gone
            found = None
        if found is not None:
            call = CallInGraph(*found, {"weight": p}, edges)
            call.locate(location)
            if not isinstance(call.samples, dict):
                return call
    call = CallInGraph(
        ParameterCall(path, nn.Module(), (), shape_of(node, nr), owner),
        PerSampleRule(node, nr, position, p),
        {"weight": p},
        edges,
    )
    call.locate(location)
    return call


def _layer(p: nn.Parameter, entry: EntryPoint, path: str, owner: nn.Module) -> tuple[ParameterCall, Rule] | None:
    """The operation as a layer with the operand as its weight."""
    node, _, position = entry
    if not is_layer(node):
        return None
    source, seen = view_of(entry.operand)
    of_p = leaf_of(source.node) is p
    shape = p.shape if of_p else shape_of(source.node, source.output_nr)
    call = layer_call(node, position, seen, shape)
    if call is None or (call.start is not None and not of_p):
        source, of_p, shape = entry.operand, False, shape_of(entry.operand.node, entry.operand.output_nr)
        call = layer_call(node, position, torch.empty(shape, device="meta"), shape)
    if call is None:
        return None
    whole = of_p and call.start is None
    weight = seen if call.start is not None else torch.empty(shape, device="meta")
    call.module._parameters["weight"] = p if whole else nn.Parameter(weight, requires_grad=False)
    rule = (
        call.rule if whole and p.dim() > 1 else ComputedWeightRule(call.rule, p, None if of_p else source, call.start)
    )
    return ParameterCall(path, call.module, (call.input,), shape_of(node), owner), rule


def _broadcast(p: nn.Parameter, entry: EntryPoint, path: str, owner: nn.Module) -> tuple[ParameterCall, Rule] | None:
    """The operation as one that repeats the operand for the samples."""
    node, _, position = entry
    if not broadcasts(node):
        return None
    operand = entry.operand
    source = None if leaf_of(operand.node) is p else operand
    shape, out = shape_among(node, shape_of(operand.node, operand.output_nr)), shape_of(node)
    sizes = [1] * (len(out) - len(shape)) + list(shape)
    if len(sizes) > len(out) or any(a not in (1, b) for a, b in zip(sizes, out, strict=True)):
        return None
    found = broadcast_of(node, position)
    if found is None:
        return None
    call = ParameterCall(path, owner, found.args, out, owner)
    return call, BroadcastRule(p, source, shape, found)


def join_biases(calls: list[CallInGraph]) -> list[CallInGraph]:
    """Calls of layers whose bias is a parameter, too, as one."""
    layers = {
        next(iter(call.nodes)): call
        for call in calls
        if isinstance(call.rule, AffineRule) and isinstance(call.call, ParameterCall)
    }
    joined: list[CallInGraph] = []
    for call in calls:
        p = call.parameters["weight"]
        layer = layers.get(next(iter(call.nodes)))
        if isinstance(call.rule, BroadcastRule) and call.rule.source is None and layer is not None:
            node = next(iter(call.nodes))
            positions = [i for i, (below, _) in enumerate(node.next_functions) if leaf_of(below) is p]
            added = any(is_bias(node, i, p) for i in positions) or not positions  # by a cell behind it
            if "bias" not in layer.parameters and added:
                layer.parameters["bias"] = layer.call.module._parameters["bias"] = p
                layer.call.seen = tuple(layer.call.module._parameters.values())
                continue
        joined.append(call)
    return joined
