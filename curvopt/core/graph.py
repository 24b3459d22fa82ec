"""Reading the autograd graph of one backward: which uses and losses it holds, and what would make a quantity wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from curvopt.core.derivatives.rules import AffineRule, DefaultRule, Rule, has_batch, tensors
from curvopt.core.functional import FunctionalUse, Way, has_number, met_by_parameters
from curvopt.core.meetings import Data, Meeting, Meetings, added_term, repeats_for_samples
from curvopt.core.residuals import dependents, is_sink, leaf_of, name_of, parents_of, shape_of, walk
from curvopt.core.saved import Blocks, inputs_left, is_tensor, names_of
from curvopt.core.uses import Called, TermUse, Use, describe, extended_name, extended_owner, records_of
from curvopt.distributed import refuse_sharded
from curvopt.errors import CurvoptError

R = TypeVar("R")


class Entry:
    """A use in the graph: its rule, the parameters it answers for, and where its outputs lie."""

    def __init__(self, use: Use, parameters: dict[str, nn.Parameter] | None = None, rule: Rule | None = None):
        """Look up, unless told, the trainable parameters and the rule."""
        self.use = use
        self.rule: Rule = use.rule if rule is None else rule
        if parameters is None:
            trainable = self.rule.parameters(use.module).items()
            parameters = {name: p for name, p in trainable if p.requires_grad and p.numel()}  # nothing of no entries
        self.parameters = parameters
        #: Names of those that other uses inside of this one answer for, too.
        self.divided: list[str] = []
        self.edges: dict[int, GradientEdge] = {}
        for name, p in self.parameters.items():
            if p.is_complex():
                raise CurvoptError(f"{use.describe()}: parameter '{name}' is complex; use two real ones.")
            if p.is_meta:
                raise CurvoptError(
                    f"{use.describe()}: parameter '{name}' is on the meta device; give it numbers first."
                )
        #: Whether a module without a rule got nothing that may hold samples.
        self.no_samples = isinstance(self.rule, DefaultRule) and not has_batch(use)
        self.rows = self.rule.rows(use) if self.parameters and not self.no_samples else 0
        #: Whether it is a call on a single sample without a batch axis.
        self.single = not (self.rows or self.no_samples) and self.rule.is_single(use)

    @property
    def takes_samples(self) -> bool:
        """Whether a module without a rule can be called on single samples, as far as that can be told beforehand."""
        return not isinstance(self.rule, DefaultRule) or self.rule.takes_samples(self.use, list(self.parameters))

    @property
    def length(self) -> int:
        """Length of the first axis of the input, of frozen modules, too; 0 if there is none."""
        return self.rows or (self.rule.rows(self.use) if has_batch(self.use) else 0)

    def axis(self, index: int) -> int | None:
        """Axis of an output that counts the samples; ``None`` where none does, -1 where it is not there."""
        return -1 if self.single else self.rule.output_axis(self.use, index)

    @property
    def sees_parameters_only(self) -> bool:
        """Whether nothing behind it may hold samples."""
        behind = walk([edge.node for edge in self.edges.values()])
        return not self.sees_indices and not any(map(_may_bring_samples, behind))

    @property
    def sees_data(self) -> bool:
        """Whether a module was called with numbers that were not computed from parameters."""
        return not (self.use.boundary or self.sees_indices or isinstance(self.use, FunctionalUse))

    @property
    def gives_vectors(self) -> bool:
        """Whether every output is one vector, or of a call without a batch axis."""
        return self.single or all(shape[:-1].numel() == 1 for shape in self.use.shapes)

    @property
    def sees_indices(self) -> bool:
        """Whether it was called with other than floating-point numbers."""
        return not all(x.is_floating_point() for x in tensors(self.use))

    @property
    def part(self) -> tuple[list[Node], frozenset, list[nn.Parameter]]:
        """Its part of the graph: the nodes of its outputs, where it begins, and its parameters."""
        return [edge.node for edge in self.edges.values()], self.use.boundary, list(self.parameters.values())

    def leave(self, interior: _Interior, inside: _Interior) -> None:
        """Leave to others what they answer for inside: modules that it calls, or earlier calls whose results it keeps.

        Args:
            interior: what the others answer for.
            inside: the part of the graph that lies in this use, less that afterwards.
        """
        others, own = set[int](), set[int]()
        for node, position in list(inside.edges):
            known = (node, position) in interior.edges
            (others if known else own).add(id(leaf_of(node.next_functions[position][0])))
            if known:
                del inside.edges[node, position]
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) in own or id(p) not in others}
        self.divided = [name for name, p in self.parameters.items() if id(p) in others]

    def check_alone(self) -> None:
        """Raise if others answer for a part of a parameter's uses, all of which a call of the module would count."""
        if self.divided:
            raise CurvoptError(
                f"{self.use.describe()}: parameter '{self.divided[0]}' is also used by a module that it calls, or by "
                "an earlier call whose result it keeps, and by itself in a way that is not known, so its part cannot "
                "be told; pass it what it keeps, or use the parameter by F.linear, products, sums or F.embedding."
            )

    def gives_samples(self, edge: GradientEdge) -> bool:
        """Whether an output may hold the samples along its first axis, as that of a module of parameters may not."""
        shape = shape_of(edge.node, edge.output_nr)
        called = isinstance(self.rule, DefaultRule) and self.rows > 0
        return not self.no_samples and (not called or (len(shape) > 0 and shape[0] % self.rows == 0))


class Ending:
    """A use after which no other comes before a loss that is not known: a row of its output is a sample, or a part."""

    def __init__(self, use: Use, edge: GradientEdge):
        """Remember the place."""
        metadata: Any = edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]
        self.use, self.edge = use, edge
        self.input = torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)

    def describe(self) -> str:
        """Path and type of the module, for messages."""
        return self.use.describe()

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in the output."""
        return grad


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
        structure: hash of the operations up to the losses and their arguments, ``None`` if the values of tensors may
            decide which samples meet.

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
        interior = _Interior()
        terms: set[Node] = set()
        for node in nodes:
            records = records_of(node)
            for record, index, output_nr in records:
                if isinstance(record, TermUse):
                    self.terms[record] = GradientEdge(node, output_nr)
                    terms.add(node)
                    interior.add([node], record.boundary, record.parameters)
                elif isinstance(record, Called):
                    self._called = True
                elif isinstance(record, Use):
                    entry = self.entries.get(record) or self.entries.setdefault(record, Entry(record))
                    entry.edges[index] = GradientEdge(node, output_nr)
            if _mixes_samples(node, records):
                self.mixing[node] = records[0][0].describe() if records else name_of(node)
        self.owners: dict[nn.Parameter, tuple[Entry, str]] = {}
        #: Nodes between parameters and the operations in which they meet the samples.
        self._between: set[Node] = set()
        self._nodes, self._roots = nodes, roots
        calls: dict[Entry, _Interior] = {}
        entries = list(self.entries.values())
        refuse_sharded((e.use.describe(), f"'{name}'", p) for e in entries for name, p in e.parameters.items())
        for entry in entries:
            entry.use.check_settings()
            entry.use.check_inputs()
            if entry.single and entry.parameters and not self._may_hold_samples(entry):
                # no sample, but what its operations do is known
                entry.rule, entry.no_samples, entry.single = DefaultRule(), True, False
            if entry.parameters and isinstance(entry.rule, DefaultRule):
                calls[entry] = _Interior()
                calls[entry].add(*entry.part)
            else:
                self._own(entry, interior)
        for entry, inside in _inner_first(calls):
            entry.leave(interior, inside)
            if not self._read_inside(entry, inside, interior):
                entry.use.check_held()
                entry.check_alone()
                self._own(entry, interior)
                one_by_one = not entry.no_samples and self._sees_single(inside)
                if entry.no_samples or one_by_one or not entry.takes_samples:
                    del self.entries[entry.use]
                    for name, p in entry.parameters.items():
                        self._take_itself(p, entry.use.path, name, entry.use.module)
                if one_by_one:
                    self.calls[entry] = []  # it may tell where the samples are
        self.functional: list[Entry] = []
        self.outside: list[str] = []
        self._read_outside(interior)
        self._follow_shared_lookups()
        del self._nodes, self._roots
        outputs = {edge.node for entry in self.entries.values() if entry.parameters for edge in entry.edges.values()}
        self.losses, self.nonlinear = find_losses(roots, outputs | terms)
        self.weights: list[str] = []
        taken = {e.edges[0].node: e for e in self.entries.values() if isinstance(e.rule, Itself)}
        if self.nonlinear and taken:
            self._leave_out_weights(roots, outputs | terms, taken)
        known = self.losses and not self.nonlinear
        self.heads: Mapping[Any, GradientEdge] = self.losses if known else self._endings(roots)
        ends = [loss.edge.node for loss in self.heads if loss.edge is not None]
        rows = {e.rows for e in self.entries.values() if e.parameters and not isinstance(e.rule, Itself)}
        self.structure = structure(
            ends, rows | {len(loss.input) for loss in self.heads if loss.input.dim()}, self._between
        )

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
        """The uses that are met first from some nodes; none if samples cannot lie on the first axis of one."""
        outputs = {
            edge.node: (entry, index, edge)
            for entry in (*self.entries.values(), *self.calls)
            for index, edge in entry.edges.items()
            if entry not in self.calls or entry.gives_samples(edge)
        }
        met = [outputs[node] for node in walk(list(roots), last=outputs) if node in outputs]
        endings = {Ending(entry.use, edge): edge for entry, _, edge in met}
        on_first_axis = all(entry.axis(index) == 0 for entry, index, _ in met)
        return endings if on_first_axis and all(ending.input.dim() for ending in endings) else {}

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
    def uses_of(self) -> dict[nn.Parameter, int]:
        """How many outputs of uses each parameter has a part in."""
        found: dict[nn.Parameter, int] = {}
        for entry in self.entries.values():
            for p in entry.parameters.values():
                found[p] = found.get(p, 0) + len(entry.edges)
        return found

    @cached_property
    def _parents(self) -> dict[Node, list[Node]]:
        return parents_of(self._nodes)

    @cached_property
    def _of_others(self) -> set[Node]:
        """The nodes that see more than parameters."""
        return dependents([node for node in self._nodes if _may_bring_samples(node)], self._parents)

    def _may_hold_samples(self, entry: Entry) -> bool:
        """The opposite of `Entry.sees_parameters_only`, of many calls in a row."""
        return entry.sees_indices or any(edge.node in self._of_others for edge in entry.edges.values())

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
                self._between |= set(walk([source.node]))
        return added

    def _own(self, entry: Entry, interior: _Interior) -> None:
        """Have a use answer for its parameters in its part of the graph."""
        interior.add(*entry.part)
        for name, p in entry.parameters.items():
            self.owners.setdefault(p, (entry, name))

    def _read_inside(self, entry: Entry, inside: _Interior, interior: _Interior) -> bool:
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

    def _sees_single(self, inside: _Interior) -> bool:
        """Whether some module is called on single samples in a part of the graph: what it is may depend on which."""
        singles = [entry for entry in self.entries.values() if entry.single and entry.parameters]
        return not inside.nodes.isdisjoint(edge.node for entry in singles for edge in entry.edges.values())

    def call_again(self, call: Entry) -> None:
        """Put the call of a module in the place of the operations in it."""
        call.use.check_held()
        call.check_alone()
        for entry in self.calls.pop(call):
            del self.entries[entry.use]
        self.entries[call.use] = call

    def _read_outside(self, interior: _Interior) -> None:
        """Recognise, note or refuse every way to an extended parameter that lies in no use of it."""
        known = interior.ways_around(self._nodes, lambda p: p in self.owners or extended_name(p) is not None)
        ways: dict[nn.Parameter, list[Way]] = {}
        dependent: set[Node] = set()
        for node, position, p in known:
            if not p.numel():
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


def _inner_first(calls: dict[Entry, _Interior]) -> list[tuple[Entry, _Interior]]:
    """Calls before those that they are in, and those in one block of a checkpoint one after the other."""
    sizes: dict[Any, int] = {}
    for entry, inside in calls.items():
        sizes[entry.use.block] = max(sizes.get(entry.use.block, 0), len(inside.nodes))
    numbers = {block: number for number, block in enumerate(sizes)}

    def order(item: tuple[Entry, _Interior]) -> tuple[int, int, int]:
        block, size = item[0].use.block, len(item[1].nodes)
        return size if block is None else sizes[block], numbers[block], size

    return sorted(calls.items(), key=order)


class _Interior:
    """The parts of the graph that lie in a recorded use, and by which parameters enter it."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()
        self.edges: dict[tuple[Node, int], None] = {}  # in the order of the graph, so that sums are the same again
        self.leading: dict[Node, nn.Parameter] = {}  # nodes inside, outputs excepted, that depend on a parameter

    def add(self, outputs: list[Node], boundary: frozenset, parameters: Sequence[nn.Parameter]) -> None:
        """The part between the outputs of a use and its inputs."""
        known = {id(p) for p in parameters}
        parents: dict[Node, list[Node]] = {}
        reached: list[tuple[Node, nn.Parameter]] = []
        for node in walk(outputs, boundary):
            self.nodes.add(node)
            for position, (target, _) in enumerate(node.next_functions):
                p = leaf_of(target)
                if p is None:
                    if target is not None:
                        parents.setdefault(target, []).append(node)
                elif id(p) in known:
                    self.edges[node, position] = None
                    reached.append((node, p))
        ends = set(outputs)
        while reached:
            node, p = reached.pop()
            if node not in ends and node not in self.leading:
                self.leading[node] = p
                reached += [(parent, p) for parent in parents.get(node, ())]

    def ways_around(
        self, nodes: Iterable[Node], known: Callable[[nn.Parameter], bool]
    ) -> Iterator[tuple[Node, int, nn.Parameter]]:
        """Edges ``(node, position)`` by which a known parameter enters the graph past every use of it."""
        for node in nodes:
            for position, (target, _) in enumerate(node.next_functions):
                p = leaf_of(target)
                if p is not None:
                    if (node, position) not in self.edges and known(p):
                        yield node, position, p
                elif node not in self.nodes and target in self.leading:
                    yield node, position, self.leading[target]


# operations that move entries to where the values of a tensor say, among samples perhaps, or sum over them
_REORDERING = (
    *("Index", "Gather", "Scatter", "Sort", "Topk", "Take", "MaskedSelect", "RepeatInterleave", "Put"),
    *("Sparse", "LinalgSolve", "MaskedScatter"),
)
_REDUCING = ("Mean", "Sum", "Var", "Std", "Softmax", "LogSoftmax", "Cum", "Amax", "Amin", "Logsumexp", "Norm", "Prod")
_arguments: dict[str, tuple[str, ...]] = {}


def structure(ends: list[Node], rows: set[int], passed_over: Collection[Node]) -> int | None:
    """Hash of the operations behind some nodes, how they hang together, and their integer arguments.

    ``None`` where tensors are arguments.

    Args:
        ends: the nodes.
        rows: lengths of first axes, which hold samples.
        passed_over: nodes that no sample has a part in, nor what lies behind them.
    """
    found: list[Any] = []
    numbers = {node: number for number, node in enumerate(dict.fromkeys(ends))}
    nodes = list(numbers)
    for node in nodes:
        name = name_of(node)
        if name.startswith(_REORDERING) or (isinstance(node, BackwardCFunction) and not is_sink(node)):
            return None
        if name.startswith(_REDUCING) and _reduces_samples(node):
            return None
        if name in _PRODUCTS and _mixes_rows(node, rows):
            return None
        if name.startswith("Embedding") and leaf_of(node.next_functions[0][0]) is None:
            return None
        if name not in _arguments:
            _arguments[name] = tuple(
                a for a in names_of(node) if not is_tensor(node, a) and _is_argument(getattr(node, a))
            )
        found.append(name)
        found += [_hashable(getattr(node, attribute)) for attribute in _arguments[name]]
        for following, output_nr in node.next_functions:
            if following is None or following in passed_over:
                found.append(None)
                continue
            if following not in numbers:
                numbers[following] = len(nodes)
                nodes.append(following)
            found.append((numbers[following], output_nr))
    return hash(tuple(found))


def _reduces_samples(node: Node) -> bool:
    """Whether a reduction goes over the first axis, or over all."""
    dims = getattr(node, "_saved_dim", None)
    return dims is None or 0 in (dims if isinstance(dims, (tuple, list)) else (dims,))


_PRODUCTS = frozenset(["MmBackward0", "AddmmBackward0", "BmmBackward0", "MvBackward0", "AddmvBackward0"])
_SHAPING = ("TBackward", "Transpose", "Permute", "ToCopy", "View", "Reshape", "UnsafeView", "Unsqueeze", "Expand")


def _mixes_rows(node: Node, rows: set[int]) -> bool:
    """Whether a product multiplies from the left what may have samples for rows, and not for batches."""
    right, nr = node.next_functions[-1]
    if right is None:
        return False
    shape = shape_of(right, nr)
    length = shape[-2] if len(shape) > 1 else shape[0]
    batched = len(shape) == 3 and any(row and shape[0] % row == 0 for row in rows)
    if batched or length == 0 or all(row % length for row in rows):
        return False
    while right is not None and name_of(right).startswith(_SHAPING):
        right = right.next_functions[0][0]
    return right is not None and leaf_of(right) is None


def _is_argument(value: Any) -> bool:
    """Whether what a node saved is a number of axes, sizes or flags; not a tensor, and no factor that changes."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(v, (int, str)) for v in values)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, (int, str, tuple)) else None


def meets_constant(node: Node) -> bool:
    """Whether a node has operands that are no parameters, nor computed from any."""
    leaf = leaf_of(node)
    return any(below is None for below, _ in node.next_functions) or not (
        leaf is None or isinstance(leaf, nn.Parameter)
    )


def _may_bring_samples(node: Node) -> bool:
    """Whether a node may have been given samples, not by its operands."""
    return keeps_others(node) or (meets_constant(node) and not has_number(node))


def keeps_others(node: Node) -> bool:
    """Whether a node may keep what it was given beside operands: indices, masks, or anything that users keep."""
    return isinstance(node, BackwardCFunction) or name_of(node).startswith(
        (*_REORDERING, "Embedding", "Where", "Masked")
    )


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
