"""Reading the autograd graph of one backward: which uses and losses it holds, and what would make a quantity wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves

from curvopt.core.derivatives.functional_losses import find_losses
from curvopt.core.derivatives.operations import Itself
from curvopt.core.derivatives.rules import AffineRule, DefaultRule
from curvopt.core.entries import Ending, Entry, Interior, inner_first
from curvopt.core.functional import FunctionalUse, Way, met_by_parameters
from curvopt.core.meetings import Data, Meeting, Meetings, added_term, repeats_for_samples
from curvopt.core.residuals import dependents, is_sink, leaf_of, name_of, parents_of, shape_of, walk
from curvopt.core.saved import Blocks, inputs_left
from curvopt.core.structure import meets_constant, seeing_more
from curvopt.core.uses import Called, TermUse, Use, describe, extended_name, extended_owner, records_of
from curvopt.distributed import refuse_sharded
from curvopt.errors import CurvoptError

R = TypeVar("R")


class Graph:
    """What lies behind a node of the autograd graph.

    Attributes:
        entries: the uses of parameters, by extended modules and by functional calls on their parameters.
        functional: the entries of functional calls.
        calls: those of modules, with the entries of operations that were found in them instead.
        leaves: the tensors whose gradients are accumulated.
        custom: whether there are functions of users, who may ask what is differentiated.
        losses: the extended and functional losses, and where their gradients arrive.
        heads: where the samples are known, and where its gradient arrives: the losses if there are no others, else the
            last uses before them.
        nonlinear: names of operations through which the differentiated scalar depends on more than the sum of them.
        terms: regularizers, and where their gradients arrive.
        mixing: operations that mix samples (train-mode batch norm), and descriptions of their modules.
        outside: names of parameters that enter the loss by an added term, which no quantity contains.
        weights: names of those that weigh losses, and get none.
        owners: the extended module that owns each parameter, and the parameter's name in it.
        blocks: of activation checkpoints.
        between: nodes between parameters and the operations in which they meet the samples.

    Raises:
        CurvoptError: if a parameter is used outside of its module in a way that is not known.
    """

    def __init__(self, roots: Sequence[Node]):
        """Walk the graph from ``roots`` to its leaves once."""
        self.blocks = Blocks(roots, met_by_parameters)
        with self.blocks:
            self._read(roots)

    def _read(self, roots: Sequence[Node]) -> None:
        self.entries: dict[Use, Entry] = {}
        self.calls: dict[Entry, list[Entry]] = {}
        self.terms: dict[TermUse, GradientEdge] = {}
        self.mixing: dict[Node, str] = {}
        self._called = False
        nodes = list(walk(list(roots)))
        custom = [node for node in nodes if isinstance(node, BackwardCFunction)]
        self.custom, self._sinks = bool(custom), list[Any](filter(is_sink, custom))
        self.leaves: list[Tensor] = [leaf for leaf in map(leaf_of, nodes) if leaf is not None]
        interior = Interior()
        terms: set[Node] = set()
        for node in nodes:
            records = records_of(node)
            for record, index, output_nr in records:
                if isinstance(record, TermUse):
                    self.terms[record] = GradientEdge(node, output_nr)
                    terms.add(node)
                    interior.add([self.terms[record]], record.boundary, record.parameters)
                elif isinstance(record, Called):
                    self._called = True
                elif isinstance(record, Use):
                    entry = self.entries.get(record) or self.entries.setdefault(record, Entry(record))
                    entry.edges[index] = GradientEdge(node, output_nr)
            if _mixes_samples(node, records):
                self.mixing[node] = records[0][0].describe() if records else name_of(node)
        self.owners: dict[nn.Parameter, tuple[Entry, str]] = {}
        self.between: set[Node] = set()
        self._nodes, self._roots = nodes, roots
        calls: dict[Entry, Interior] = {}
        entries = list(self.entries.values())
        refuse_sharded((e.use.describe(), f"'{name}'", p) for e in entries for name, p in e.parameters.items())
        for entry in entries:
            entry.use.check_settings()
            entry.use.check_inputs()
            if entry.single and entry.parameters and not entry.may_hold_samples(self._seeing):
                # no sample, but what its operations do is known
                entry.rule, entry.no_samples, entry.single = DefaultRule(), True, False
            if entry.parameters and entry.rule.by_operations and not entry.single:
                calls[entry] = Interior()
                calls[entry].add(*entry.part)
            else:
                self._own(entry, interior)
        for entry, inside in inner_first(calls):
            entry.leave(interior, inside)
            if not self._read_inside(entry, inside, interior):
                entry.use.check_held()
                if not isinstance(entry.rule, DefaultRule):
                    self._own(entry, interior)
                    continue
                entry.check_alone()
                self._own(entry, interior)
                one_by_one = not entry.no_samples and self._sees_single(inside)
                if entry.no_samples or entry.gives_numbers or one_by_one or not entry.takes_samples:
                    del self.entries[entry.use]
                    for name, p in entry.parameters.items():
                        self._take_itself(p, entry.use.path, name, entry.use.module)
                if one_by_one:
                    self.calls[entry] = []  # it may tell where the samples are
        self.functional: list[Entry] = []
        self.outside: list[str] = []
        self._read_outside(interior)
        self._take_what_counts_twice()
        self._follow_shared_lookups()
        del self._nodes, self._roots
        outputs = {node for entry in self.entries.values() if entry.parameters for node in entry.nodes}
        self.losses, self.nonlinear = find_losses(roots, outputs | terms)
        computed = {edge.node for edge in self.losses.values()}
        for call in [call for call in self.calls if not computed.isdisjoint(calls[call].nodes)]:
            del self.calls[call]  # it computes its loss itself: its outputs tell nothing of the samples
        self.weights: list[str] = []
        taken = {e.edges[0].node: e for e in self.entries.values() if isinstance(e.rule, Itself)}
        if self.nonlinear and taken:
            self._leave_out_weights(roots, outputs | terms, taken)
        known = self.losses and not self.nonlinear
        self.heads: Mapping[Any, GradientEdge] = self.losses if known else self._endings(roots)

    def _leave_out_weights(self, roots: Sequence[Node], uses: set[Node], taken: dict[Node, Entry]) -> None:
        """Of parameters taken themselves, those that losses are multiplied by and that are behind none: constants."""
        losses, _ = find_losses(roots, uses.difference(taken))
        behind = set(walk([loss.edge.node for loss in losses if loss.edge is not None]))
        weights = {node: entry for node, entry in taken.items() if node not in behind}
        losses, nonlinear = find_losses(roots, uses.difference(weights))
        if weights and losses and not nonlinear:
            self.losses, self.nonlinear = losses, nonlinear
            self.weights = [self.name(p) for entry in weights.values() for p in entry.parameters.values()]
            self.outside = [name for name in self.outside if name not in self.weights]
            self.functional = [entry for entry in self.functional if entry not in weights.values()]
            for entry in weights.values():
                del self.entries[entry.use]
                for p in entry.parameters.values():
                    del self.owners[p]

    def _endings(self, roots: Sequence[Node]) -> dict[Ending, GradientEdge]:
        """The uses that are met first from some nodes; none if samples cannot lie on an axis of one."""
        outputs = {
            edge.node: (entry, index, edge)
            for entry in (*self.entries.values(), *self.calls)
            for index, edge in entry.edges.items()
            if entry not in self.calls or entry.gives_samples(edge)
        }
        met = [outputs[node] for node in walk(list(roots), last=outputs) if node in outputs]
        endings: dict[Ending, GradientEdge] = {}
        for entry, index, edge in met:
            axis = entry.axis(index)
            if not isinstance(axis, int) or not 0 <= axis < len(shape_of(edge.node, edge.output_nr)):
                return {}
            endings[Ending(entry.use, edge, axis)] = edge
        return endings

    @property
    def may_be_functional(self) -> bool:
        """Whether functions of parameters may be all there is: of a model that was called, or of lists of them.

        Else the modules may have been called where nothing is recorded (`curvopt.disable`).
        """
        owners = [entry.use.owner for entry in self.functional]
        called = self._called or all(type(owner).forward is nn.Module.forward for owner in owners)
        return bool(owners and self.losses) and called

    @property
    def empty(self) -> bool:
        """Whether there are losses, of no samples each."""
        return bool(self.losses) and not any(loss.input.numel() for loss in self.losses)

    @contextmanager
    def own_backwards(self) -> Iterator[None]:
        """Backwards inside are the engine's own: ``DistributedDataParallel`` shall not take them for the user's.

        Its sinks have the first backward of a static graph end with an all-reduce of gradients that are not there yet.
        """
        models = [ddp for ddp in {sink.ddp_weakref() for sink in self._sinks} if ddp is not None and ddp.static_graph]
        before = [ddp._static_graph_delay_allreduce_enqueued for ddp in models]
        for ddp in models:
            ddp._static_graph_delay_allreduce_enqueued = True
        try:
            yield
        finally:
            for ddp, enqueued in zip(models, before, strict=True):
                ddp._static_graph_delay_allreduce_enqueued = enqueued

    def inside(self, entry: Entry) -> list[Node]:
        """The nodes of an entry of one output, and those that accumulate gradients of its parameters."""
        (edge,) = entry.edges.values()
        return list(walk([edge.node], entry.use.boundary))

    def holding(self, entry: Entry) -> AbstractContextManager[None]:
        """A context in which a use has its input, where that was left to the graph."""
        try:
            with self.blocks:
                inputs = inputs_left(entry.use, next(iter(entry.edges.values())).node)
        except RuntimeError as error:
            if "inplace" in str(error):
                raise entry.use.modified() from error
            raise
        return entry.use.holding(inputs)

    def name(self, p: nn.Parameter) -> str:
        """Path of a parameter in the extended model."""
        if p not in self.owners:
            return extended_name(p) or "a parameter"
        entry, name = self.owners[p]
        return f"{entry.use.path}.{name}".lstrip(".")

    @cached_property
    def _parents(self) -> dict[Node, list[Node]]:
        return parents_of(self._nodes)

    @cached_property
    def _seeing(self) -> set[Node]:
        return seeing_more(self._nodes, self._parents)

    def _outputs(self) -> Iterator[Node]:
        """Where the samples are given by uses, but those of what was computed from parameters alone."""
        of_constants = dependents([node for node in self._nodes if meets_constant(node)], self._parents)
        for entry in self.entries.values():
            for edge in entry.edges.values():
                if (entry.sees_indices or edge.node in of_constants) and entry.gives_samples(edge):
                    yield edge.node

    @cached_property
    def _data(self) -> Data:
        entries = [entry for entry in self.entries.values() if entry.parameters]
        called = [entry.use for entry in entries if isinstance(entry.rule, DefaultRule)]
        given = [x for x in tree_leaves([(use.args, use.kwargs) for use in called]) if isinstance(x, Tensor)]
        fixed = [x for use in called for x in (*use.module.buffers(), *use.module.parameters()) if not x.requires_grad]
        given, fixed = ([x for x in each if x.layout == torch.strided and not x.is_nested] for each in (given, fixed))
        rows = {entry.rows for entry in entries}
        if not any(self._outputs()):
            rows |= self._lengths_of_losses()
        return Data(rows, given, fixed)

    def _lengths_of_losses(self) -> set[int]:
        """The lengths of what losses that see data are given."""
        leaves = {node for node in self._nodes if isinstance(leaf_of(node), nn.Parameter)}
        losses, _ = find_losses(self._roots, leaves)
        return {
            len(loss.input)
            for loss in losses
            if loss.edge is not None and loss.input.dim() and any(map(meets_constant, walk([loss.edge.node])))
        }

    @cached_property
    def _dependent(self) -> set[Node]:
        """The nodes that depend on the samples, as far as that can be told."""
        entering = [node for node in self._nodes if self._data.enter(node)]
        return dependents([*self._outputs(), *entering], self._parents)

    @cached_property
    def _repeated(self) -> set[Node]:
        """The nodes that depend on what was repeated for every sample."""
        return dependents([node for node in self._nodes if self._data.repeats(node)], self._parents)

    def _add(self, found: dict[nn.Parameter, list[Meeting]], names: dict[nn.Parameter, str]) -> list[Entry]:
        """Uses of parameters that were read off the graph; the bias of a layer goes with its weight."""
        layers: dict[Node, Entry] = {}
        added: list[Entry] = []
        meetings = [(meeting, p) for p, of_p in found.items() for meeting in of_p]
        for (node, use, rule, role, source), p in sorted(meetings, key=lambda item: item[0].role == "bias"):
            entry = layers.get(node) if role == "bias" else None
            if entry is not None:
                entry.parameters[role] = entry.use.module._parameters[role] = p
                entry.use.seen = tuple(entry.use.module._parameters.values())
            else:
                entry = self.entries[use] = Entry(use, {"weight": p}, rule)
                entry.edges[0] = GradientEdge(node, 0)
                added.append(entry)
                if isinstance(rule, AffineRule):
                    layers[node] = entry
            self.owners.setdefault(p, (entry, names[p]))
            if source is not None:
                self.between |= set(walk([source.node]))
        return added

    def _own(self, entry: Entry, interior: Interior) -> None:
        """Have a use answer for its parameters in its part of the graph, which some may not enter (frozen then)."""
        entering = interior.add(*entry.part)
        entry.parameters = {name: p for name, p in entry.parameters.items() if p in entering}
        for name, p in entry.parameters.items():
            self.owners.setdefault(p, (entry, name))

    def _read_inside(self, entry: Entry, inside: Interior, interior: Interior) -> bool:
        """Put uses by operations in the place of that of a module without a rule, if they are known ones."""
        use = entry.use
        known = self._data, self._parents, self._dependent, self._repeated
        search = Meetings(use.path, use.module, *known, holds=use.block is None)
        names = {p: name for name, p in entry.parameters.items()}
        ways: dict[nn.Parameter, list[Way]] = {p: [] for p in names}
        for node, position in inside.edges:
            ways[leaf_of(node.next_functions[position][0])].append(Way(node, position))
        found: dict[nn.Parameter, list[Meeting]] = {}
        for p in names:
            meetings = search.of(p, ways[p])
            if meetings is None:
                return False
            found[p] = meetings
        nodes = {meeting.node for meetings in found.values() for meeting in meetings}
        if self.mixing and not nodes <= inside.nodes and not entry.no_samples:
            return False  # the module may have to be called again
        interior.edges |= inside.edges
        del self.entries[use]
        added = self._add(found, names)
        if not entry.no_samples:
            self.calls[entry] = added
        return True

    def _take_itself(self, p: nn.Parameter, path: str, name: str, module: nn.Module) -> Entry:
        """Have one use answer for all that becomes of a parameter, instead of all others."""
        if p._backward_hooks:
            raise CurvoptError(
                f"{describe(path, module)}: what becomes of parameter '{name}' is not known, and its hooks would see, "
                "and may change, what is pulled back to it for every sample; remove them."
            )
        for entry in (*self.entries.values(), *self.calls):
            entry.parameters = {other: q for other, q in entry.parameters.items() if q is not p}
        use = FunctionalUse(path, nn.Module(), (), p.shape, module)
        entry = self.entries[use] = Entry(use, {name: p}, Itself())
        entry.edges[0] = GradientEdge(next(node for node in self._nodes if leaf_of(node) is p), 0)
        self.owners[p] = entry, name
        return entry

    def _sees_single(self, inside: Interior) -> bool:
        """Whether some module is called on single samples in a part of the graph: what it is may depend on which."""
        singles = [entry for entry in self.entries.values() if entry.single and entry.parameters]
        return not inside.nodes.isdisjoint(node for entry in singles for node in entry.nodes)

    def call_again(self, call: Entry) -> None:
        """Put the call of a module in the place of the operations in it."""
        call.use.check_held()
        call.check_alone()
        for entry in self.calls.pop(call):
            del self.entries[entry.use]
        self.entries[call.use] = call

    def _read_outside(self, interior: Interior) -> None:
        """Recognise, note or refuse every way to an extended parameter that lies in no use of it."""
        known = interior.ways_around(self._nodes, lambda p: p in self.owners or extended_name(p) is not None)
        ways: dict[nn.Parameter, list[Way]] = {}
        dependent: set[Node] = set()
        for node, position, p in known:
            if not (p.numel() and p.requires_grad):
                continue
            # modules that see parameters alone give no samples: then data that enters tells them
            dependent = dependent or dependents(self._outputs(), self._parents) or self._dependent
            if added_term(node, self._parents, dependent):
                self.outside.append(self.name(p))
            else:
                passed = () if leaf_of(node.next_functions[position][0]) is p else None
                ways.setdefault(p, []).append(Way(node, position, passed))
        found: dict[nn.Parameter, list[Meeting]] = {}
        names: dict[nn.Parameter, str] = {}
        for p in ways:
            path, _, names[p] = self.name(p).rpartition(".")
            entry = self.owners[p][0] if p in self.owners else None
            meetings = None
            if not any(way.operand[0] in self._dependent for way in ways[p]):
                module = extended_owner(p) if entry is None else entry.use.owner
                search = Meetings(path, module, self._data, self._parents, self._dependent, self._repeated)
                meetings = search.of(p, ways[p])
            if meetings is not None:
                found[p] = meetings
                continue
            if any(isinstance(way.node, BackwardCFunction) for way in ways[p]):
                where = entry.use.describe() if entry is not None else "the extended model"
                operations = ", ".join(dict.fromkeys(name_of(way.node) for way in ways[p]))
                raise CurvoptError(
                    f"{where}: parameter '{names[p]}' is also used outside of its module (by {operations}) in a way "
                    "that is not known, which the quantities would miss; call its module, or use it by F.linear or "
                    "F.embedding, outside of what torch.compile compiles; extend the model before its first forward "
                    "pass if it is compiled."
                )
            owner = extended_owner(p) if entry is None else entry.use.owner
            self.functional.append(self._take_itself(p, path, names[p], owner))
        self.functional += self._add(found, names)

    def _take_what_counts_twice(self) -> None:
        """Take parameters themselves of which one use lies behind what the operand of another was computed from.

        As a layer's call on its own weight, moved: calls of modules and what lies outside of them are read one by one.
        """
        entries = list(self.entries.values())
        computed = [p for entry in entries if entry.rule.source is not None for p in entry.parameters.values()]
        for p in dict.fromkeys(computed):
            of = [entry for entry in entries if any(q is p for q in entry.parameters.values())]
            sources = [(e.edges[0].node, e.rule.source) for e in of if e.rule.source is not None]
            behind = set(walk([source.node for _, source in sources]))
            if len(set(sources)) < len(sources) or not behind.isdisjoint(node for entry in of for node in entry.nodes):
                path, _, name = self.name(p).rpartition(".")
                self.functional.append(self._take_itself(p, path, name, self.owners[p][0].use.owner))

    def _follow_shared_lookups(self) -> None:
        """Embeddings of positions, shared by all samples: see them where they are added to every sample.

        What arrives there is not yet summed over the samples. The call is the same as on indices expanded to [N, ...].
        """
        lookups = [
            entry
            for entry in self.entries.values()
            if entry.parameters and entry.use.is_lookup and len(entry.use.shapes) == len(entry.edges) == 1
        ]
        for entry in lookups:
            above = repeats_for_samples(entry.edges[0].node, self._parents)
            if above is not None:
                out = shape_of(above)
                del self.entries[entry.use]
                entry.use = entry.use.expanded(out, shared=entry.use.shapes[0] == out[1:])
                self.entries[entry.use] = entry
                entry.edges[0] = GradientEdge(above, 0)
                entry.rows, entry.single = out[0], False


def leaves_behind(roots: Sequence[Node]) -> set[Tensor]:
    """All leaf tensors that a backward from some nodes reaches."""
    return {leaf for leaf in map(leaf_of, walk(list(roots))) if leaf is not None}


def records_behind(roots: list[Node], kind: type[R]) -> Iterator[tuple[R, GradientEdge]]:
    """The records of a kind behind some nodes, and where their gradients arrive."""
    for node in walk(roots):
        for record, _, output_nr in records_of(node):
            if isinstance(record, kind):
                yield record, GradientEdge(node, output_nr)


def _mixes_samples(node: Node, records: Sequence[tuple[Any, int, int]]) -> bool:
    """Whether a node is a batch norm that normalises over the samples (instance norm runs as one of a batch of 1)."""
    name = name_of(node)
    if isinstance(node, BackwardCFunction):  # the former in training only; one of torch.compile tells nothing
        return name == "SyncBatchNormBackward" or any(_is_batch_norm(record) for record, _, _ in records)
    if "BatchNorm" not in name or not getattr(node, "_saved_training", True):
        return False
    return shape_of(node)[0] > 1


def _is_batch_norm(record: Any) -> bool:
    """Whether a batch norm was called to normalise over the samples."""
    if not isinstance(record, Use) or isinstance(record.rule, DefaultRule):
        return False
    module = record.module
    batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return batch_norm and (module.training or module.running_mean is None) and len(record.input) > 1
