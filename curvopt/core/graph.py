"""Reading the autograd graph of one backward pass: the calls of modules in it, and how parameters enter it.

>>> from curvopt import extend
>>> model = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
>>> graph = read_graph([model(torch.ones(4, 3)).sum().grad_fn])
>>> [(found.call.describe(), sorted(found.parameters)) for found in graph.module_calls.values()]
[('0 (Linear)', ['bias', 'weight'])]
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parallel import DistributedDataParallel

from curvopt.core.layers.rule import Rule, no_batch_axis
from curvopt.core.nodes import (
    Edge,
    by_operation,
    consumers_first,
    is_sink,
    leaf_of,
    metadata,
    operation,
    outputs_of,
    shape_of,
    walk,
)
from curvopt.core.operations import OPERATIONS, UNKNOWN_OPERATION
from curvopt.core.products.base import Dense, Jacobian, cast
from curvopt.core.record import (
    ModelCall,
    ModuleCall,
    Prediction,
    RowsBySample,
    Steps,
    TermCall,
    extended_name,
    owned_parameters,
    records_of,
    rows_by_sample,
    samples_first,
)
from curvopt.core.samples.axes import Samples
from curvopt.core.samples.layout import Layout, axis_of
from curvopt.distributed import refuse_sharded
from curvopt.errors import CurvoptError, CurvoptWarning

R = TypeVar("R")
Operand = tuple[Node, int]  # an operation, and the position of one of its operands


class CallInGraph:
    """A call of a module, or an operation on parameters, in the graph of one backward.

    Attributes:
        call: its record.
        rule: how vectors at its outputs become Jacobians of its parameters.
        parameters: the trainable ones that enter the graph in it, by the names that the rule knows.
        edges: where the gradients of its outputs arrive, by the number of the output.
        location: the samples of its model.
        samples: where they are for the rule: on the axis that it expects (``"first"``), behind steps (see
            `curvopt.core.record.samples_first`), or elsewhere: then the layouts of the outputs, by which samples are
            given to the rule one by one.
    """

    location: Samples
    samples: Literal["first"] | Steps | dict[int, Layout] = "first"

    def __init__(
        self, call: ModuleCall, rule: Rule, parameters: dict[str, nn.Parameter], edges: dict[int, GradientEdge]
    ):
        self.call, self.rule, self.parameters, self.edges = call, rule, parameters, edges

    @cached_property
    def single(self) -> bool:
        """Whether it is a call on a single sample without a batch axis."""
        return self.rule.is_single(self.call)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of its outputs."""
        return list(dict.fromkeys([edge.node for edge in self.edges.values()]))

    def locate(self, location: Samples) -> bool:
        """Find out where the samples are; whether all outputs that lead to the heads have samples."""
        self.location = location
        found: dict[int, Layout] = {}
        for index, edge in self.edges.items():
            key = edge.node, edge.output_nr
            layout = location.axes.layouts.get(key)
            if isinstance(layout, Layout):
                if self.single and not location.is_one_sample:
                    if location.N == 1 and key not in location.heads:
                        return False  # a shared call, whose samples are separated where its output gets a batch axis
                    raise no_batch_axis(self.call)
                self.rule.check_input(self.call)
                found[index] = layout
            elif key in location.axes.layouts:
                return False
        where: list[Literal["first"] | Steps | None] = [self._samples(index, layout) for index, layout in found.items()]
        first = where[0] if len(set(where)) == 1 else None
        self.samples = found if first is None else first
        return bool(found)

    def _samples(self, index: int, layout: Layout) -> Literal["first"] | Steps | None:
        """Where the rule finds the samples of an output; ``None`` where it cannot take them."""
        if self.rule.sample_by_sample:
            return None
        if self.single:
            return "none"
        N, edge, wanted = self.location.N, self.edges[index], self.rule.output_axis(self.call, index)
        shape = shape_of(edge.node, edge.output_nr)
        axis = axis_of(shape, layout)
        if N == 1 and isinstance(wanted, int) and wanted < len(shape) and shape[wanted] == 1:
            return "first"
        if isinstance(wanted, Tensor):  # packed sequences, of which each sample has as many
            sequences = int(wanted.max()) + 1
            alike = sequences % N == 0 and layout.labels == tuple((wanted // (sequences // N)).tolist())
            return "first" if alike else None
        if axis is None or wanted is None:
            return None
        if layout.labels is None and axis[:2] == (wanted, 1):
            return "first"
        how: Literal["axis", "rows"] = "axis" if axis == (1, 1, 1) and layout.labels is None else "rows"
        fits = how == "axis" or (axis.index == 0 and axis.after == 1)
        if wanted != 0 or not fits or len(self.edges) > 1 or not self.rule.takes_steps(self.call, how):
            return None
        if layout.labels is None:
            return how
        device = metadata(edge.node, edge.output_nr).device  # parameters may be stand-ins without one
        return rows_by_sample(layout.labels, N, device) if axis.before == 1 else None

    def jac_t(self, grads: list[Tensor | None]) -> dict[str, Jacobian]:
        """Jacobian products of the parameters, by their names, with vectors ``[V, *out]`` at the outputs."""
        N, names, samples = self.location.N, list(self.parameters), self.samples
        dtype = next(iter(self.parameters.values())).dtype
        if not self.rule.sample_by_sample:
            grads = [None if grad is None else cast(grad, dtype) for grad in grads]
        cache, rows = self.call.cache, 1 if isinstance(samples, dict) else N
        if cache.get("N") != rows:  # contexts of one backward may take rows and the batch for samples
            cache.clear()
            cache["N"] = rows
        call = self.call.in_precision(dtype)
        if self.rule.reads_graph:
            call.cache["nodes"] = self.nodes  # emptied after the backward, so no cycle stays
        if samples == "first":
            return self.rule.jac_t(call, grads, names, N)
        if not isinstance(samples, dict):
            call = call.samples_first(N, samples)
            grads = [None if grad is None else samples_first(N, samples, grad, 1) for grad in grads]
            jacobians = self.rule.jac_t(call, grads, names, N)
            if isinstance(samples, RowsBySample):
                return {name: jacobian.with_lengths(samples.lengths) for name, jacobian in jacobians.items()}
            return jacobians
        by_sample = [None if g is None else apart(g, samples[i], N) for i, g in enumerate(grads)]
        jacobians = self.rule.jac_t(call, by_sample, names, 1)
        return {name: Dense(j.dense().flatten(0, 1).unflatten(0, (-1, N))) for name, j in jacobians.items()}


def apart(vectors: Tensor, layout: Layout, N: int) -> Tensor:
    """Vectors ``[V, *out]``, each once for every sample and zero elsewhere: ``[V N, *out]``."""
    flat = vectors.reshape(len(vectors), 1, layout.before, layout.rows, layout.after)
    labels = torch.tensor(range(N) if layout.labels is None else layout.labels, device=vectors.device)
    kept = (labels == torch.arange(N, device=vectors.device)[:, None]).to(vectors.dtype)
    return (flat * kept[None, :, None, :, None]).reshape(len(vectors) * N, *vectors.shape[1:])


@dataclass
class BackwardGraph:
    """The graph behind the scalar that is differentiated.

    Attributes:
        roots: nodes of the tensors that are differentiated.
        nodes: all nodes, each after the nodes that use its outputs.
        leaves: tensors whose gradients are accumulated, by the nodes that do it.
        module_calls: calls of modules that have a rule, of frozen ones, too.
        model_calls: outputs of model calls.
        predictions: tensors that users have marked as predictions.
        terms: regularizers, and where their gradients arrive.
        operands: by parameter of an extended model, how it enters the graph outside of `module_calls`.
        inside: operations of `module_calls` that share operands with operations outside.
    """

    roots: list[Node]
    nodes: list[Node] = field(default_factory=list)
    leaves: dict[Node, Tensor] = field(default_factory=dict)
    module_calls: dict[ModuleCall, CallInGraph] = field(default_factory=dict)
    model_calls: list[tuple[ModelCall, Edge]] = field(default_factory=list)
    predictions: set[Edge] = field(default_factory=set)
    terms: dict[TermCall, GradientEdge] = field(default_factory=dict)
    operands: dict[nn.Parameter, list[Operand]] = field(default_factory=dict)
    inside: set[Operand] = field(default_factory=set)

    @cached_property
    def node_of(self) -> dict[Tensor, Node]:
        """The node of each leaf."""
        return {leaf: node for node, leaf in self.leaves.items()}

    @cached_property
    def users(self) -> dict[Edge, list[Operand]]:
        """The operations that use an output of a node."""
        users: dict[Edge, list[Operand]] = {}
        for node in self.nodes:
            for position, edge in enumerate(node.next_functions):
                if edge[0] is not None:
                    users.setdefault(edge, []).append((node, position))  # type: ignore[arg-type]
        return users

    def users_of(self, node: Node) -> list[Operand]:
        """The operations that use any output of a node."""
        outputs = range(len(outputs_of(node)))
        return [user for nr in outputs for user in self.users.get((node, nr), ())]

    def operands_among(self, nodes: Collection[Node], parameters: Iterable[Tensor]) -> dict[Operand, Any]:
        """How parameters enter a set of nodes: operands, and the parameter that each is."""
        users = {p: self.users.get((self.node_of[p], 0), ()) for p in parameters if p in self.node_of}
        return {user: p for p, using in users.items() for user in using if user[0] in nodes}

    @cached_property
    def free_of_data(self) -> set[Node]:
        """The nodes that depend on parameters and on constants of equal shape, as ``p - old`` does, but not on data.

        As far as operands tell: a choice of rows, as by an embedding, is one by data.
        """
        found = {node for node, leaf in self.leaves.items() if isinstance(leaf, nn.Parameter)}
        for node in reversed(self.nodes):
            operands = [(below, nr) for below, nr in node.next_functions if below is not None]
            if operands and found.issuperset([below for below, _ in operands]):
                kind = OPERATIONS.get(operation(node), UNKNOWN_OPERATION).batch_axis
                by_entry = kind == "elementwise" and shape_of(node) in [shape_of(*operand) for operand in operands]
                without_data = len(operands) == len(node.next_functions)
                if by_entry or (without_data and kind not in ("embedding", "gather", "index", "index_select")):
                    found.add(node)
        return found

    @cached_property
    def by_operation(self) -> dict[str, list[Node]]:
        """The nodes of each operation."""
        return by_operation(self.nodes)

    def of(self, operations: Iterable[str]) -> list[Node]:
        """The nodes of operations with these names."""
        return [node for name in operations for node in self.by_operation.get(name, ())]

    @cached_property
    def static_models(self) -> list[DistributedDataParallel]:
        """Models with a static graph, which would take backwards of the engine for the user's.

        Their sinks have the first one end with an all-reduce of gradients that are not there yet.
        """
        sinks: list[Any] = [node for node in self.of(["ALIAS"]) if is_sink(node)]
        return [ddp for ddp in {sink.ddp_weakref() for sink in sinks} if ddp is not None and ddp.static_graph]


def read_graph(roots: Sequence[Node]) -> BackwardGraph:
    """Walk the graph from its roots to its leaves once.

    Raises:
        CurvoptError: for parameters that are sharded, complex or without values, and calls that have changed since.
    """
    graph = BackwardGraph(list(dict.fromkeys(roots)))
    graph.nodes = consumers_first(graph.roots)
    if "user's CheckpointFunctionBackward" in graph.by_operation:
        raise CurvoptError(
            "torch.utils.checkpoint with use_reentrant=True starts a backward inside of the backward, whose layers "
            "cannot be seen; use use_reentrant=False."
        )
    ends = [node for node in graph.nodes if not node.next_functions]
    graph.leaves = {node: leaf for node in ends if (leaf := leaf_of(node)) is not None}
    for node in graph.nodes:
        if not node.metadata:  # type: ignore[attr-defined]
            continue
        for record, index, output_nr in records_of(node):
            if isinstance(record, TermCall):
                graph.terms[record] = GradientEdge(node, output_nr)
            elif isinstance(record, Prediction):
                graph.predictions.add((node, output_nr))
            elif isinstance(record, ModelCall):
                graph.model_calls.append((record, (node, output_nr)))
            elif isinstance(record, ModuleCall):
                found = graph.module_calls.get(record)
                if found is None:
                    found = graph.module_calls[record] = CallInGraph(record, record.rule, {}, {})
                found.edges[index] = GradientEdge(node, output_nr)
    inside, outside = set[Operand](), dict[Operand, nn.Parameter]()
    for found in graph.module_calls.values():
        nodes = set(walk(found.nodes, found.call.boundary))
        operands = _find_parameters(found, nodes, graph)
        inside.update(operands)
        if found.parameters:
            outside |= _used_outside(found, nodes, operands, graph)
    for term, edge in graph.terms.items():
        inside.update(graph.operands_among(set(walk([edge.node])), term.parameters))
    for node, p in graph.leaves.items():
        if isinstance(p, nn.Parameter) and p.requires_grad and p.numel():
            entering = [operand for operand in graph.users.get((node, 0), ()) if operand not in inside]
            name = extended_name(p) if entering else None
            if name is not None:
                if p.is_complex():
                    warning = f"Parameter '{name}' is complex, so it has no fields; use two real ones."
                    warnings.warn(warning, CurvoptWarning, stacklevel=2)
                    continue
                graph.operands.setdefault(p, []).extend(entering)
    for operand, p in outside.items():
        if operand not in graph.operands.setdefault(p, []):
            graph.operands[p].append(operand)
    return graph


def _find_parameters(found: CallInGraph, nodes: set[Node], graph: BackwardGraph) -> dict[Operand, nn.Parameter]:
    """Set the parameters of a call of a module; return how they enter its nodes, between its outputs and inputs."""
    call = found.call
    call.check_settings()
    trained = {
        name: p
        for name, p in owned_parameters(call.module).items()
        if p.requires_grad and p.numel() and not any([p is x for x in call.given])
    }
    refuse_sharded((call.describe(), f"'{name}'", p) for name, p in trained.items())
    for name, p in trained.items():
        if p.is_complex():
            raise CurvoptError(f"{call.describe()}: parameter '{name}' is complex; use two real ones.")
        if p.is_meta:
            raise CurvoptError(f"{call.describe()}: parameter '{name}' is on the meta device; give it numbers first.")
    operands = graph.operands_among(nodes, trained.values())
    entering = set(operands.values())
    found.parameters = {name: p for name, p in trained.items() if p in entering}
    if found.parameters:
        call.check_inputs()
    return operands


def _used_outside(
    found: CallInGraph, nodes: set[Node], operands: dict[Operand, nn.Parameter], graph: BackwardGraph
) -> dict[Operand, nn.Parameter]:
    """The operands of a call's nodes that operations outside of it use, too.

    The backward of a linear layer saves W^T, that of a recurrent one its states. A call whose states are used outside
    is no call for the engine: its operations are read one by one.
    """
    shared = [
        node
        for node in nodes.difference(found.nodes, graph.leaves)
        if not nodes.issuperset([user for user, _ in graph.users_of(node)])
    ]
    if not shared:
        return {}
    parameters = set(found.parameters.values())
    if not (graph.free_of_data.issuperset(shared) and parameters.issuperset(leaves_behind(shared))):
        found.parameters = {}
        return operands
    graph.inside.update(user for node in shared for user in graph.users_of(node) if user[0] in nodes)
    return graph.operands_among(set(walk(shared, found.call.boundary)), parameters)


def leaves_behind(roots: Sequence[Node]) -> set[Tensor]:
    """All leaf tensors that a backward from the roots reaches."""
    return {leaf for leaf in map(leaf_of, walk(list(roots))) if leaf is not None}


def records_behind(roots: list[Node], kind: type[R]) -> Iterator[tuple[R, GradientEdge]]:
    """The records of a kind behind the roots, and where their gradients arrive."""
    for node in walk(roots):
        for record, _, output_nr in records_of(node):
            if isinstance(record, kind):
                yield record, GradientEdge(node, output_nr)
