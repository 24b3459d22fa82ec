"""One backward pass of the user and the quantities that are computed along with it.

`backpack` has read, located and checked the request before. The other four stages are here: **factor** the loss Hessian
into columns, **pull back** the columns to the outputs of all calls with parameters, **reduce** them there, by the rule
of the call and the extension, and **finish**: set the fields and call the hook::

    before_backward ─► second_order ─► sweep ─► update ─► _complete       columns of the loss Hessian
    listen, the user's backward ─► _gradient ─► update ─► _complete       the user's own gradient
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from curvopt.core.backward.module_io import showing
from curvopt.core.graph import BackwardGraph, CallInGraph, operands_among, read_graph
from curvopt.core.layers.operations import ParameterCall
from curvopt.core.layers.parameters import find_entry_points, join_biases, parameter_calls, shared_call
from curvopt.core.losses.any import Reduction, loss_weight
from curvopt.core.losses.roots import Gradient
from curvopt.core.nodes import Edge, walk
from curvopt.core.products import costs
from curvopt.core.products.base import Chunk, Dense
from curvopt.core.products.sums import PulledBack, combine
from curvopt.core.pytorch_workarounds import running_backward, without_reductions
from curvopt.core.record import Model, extended_model, extended_name, extended_parameters
from curvopt.core.samples.axes import Samples
from curvopt.core.samples.samples import locate
from curvopt.core.vjp import NodeVjp, listen, pull_each
from curvopt.errors import CurvoptError
from curvopt.extensions.base import Extension, naming_fields

_columns_per_sweep: int | None = None


def set_columns_per_sweep(columns: int | None) -> None:
    """Override how many columns of the loss Hessian's root are pulled back, or kept to be multiplied, together.

    Args:
        columns: a positive number (memory grows with it), or ``None`` to choose from the sizes of the network.

    Raises:
        ValueError: for a number below one.
    """
    global _columns_per_sweep
    if columns is not None and columns < 1:
        raise ValueError(f"set_columns_per_sweep: expected a positive number or None, got {columns}.")
    _columns_per_sweep = columns


def columns_per_sweep() -> int | None:
    """The number that was set."""
    return _columns_per_sweep


@dataclass
class LocatedGraph:
    """The graph of one backward pass, with its calls and samples.

    Attributes:
        graph: the graph.
        locations: where the samples are, by model.
        calls: the calls that have parameters.
        owners: for each parameter the call that counts for messages and hooks, and its name there.
        outside: names of parameters that enter the loss around the heads, by an added term or as a weight of losses:
            no quantity contains that.
    """

    graph: BackwardGraph
    locations: dict[Model | None, Samples] = field(default_factory=dict)
    calls: list[CallInGraph] = field(default_factory=list)
    owners: dict[nn.Parameter, tuple[CallInGraph, str]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)

    @property
    def distinct_locations(self) -> list[Samples]:
        """The locations, each once: models with equal numbers of samples share one."""
        return list({id(location): location for location in self.locations.values()}.values())

    @property
    def N(self) -> int:
        """The number of samples, of all models together."""
        return sum({location.N for location in self.locations.values()})

    @property
    def may_reach_parameters(self) -> bool:
        """Whether parameters are among the leaves, or functions that are written in Python, which may hide some."""
        custom = any(isinstance(node, BackwardCFunction) for node in self.graph.nodes)
        return custom or any(isinstance(leaf, nn.Parameter) for leaf in self.graph.leaves.values())

    def name(self, p: Tensor) -> str:
        """Path of a parameter in the extended model."""
        if not isinstance(p, nn.Parameter) or p not in self.owners:
            return extended_name(p) or "a parameter"
        call, name = self.owners[p]
        return extended_name(p) or f"{call.call.path}.{name}".lstrip(".")

    def location_of(self, model: Model | None) -> Samples | None:
        """The samples of a model; those of the only other one where it was not called itself."""
        if model in self.locations:
            return self.locations[model]
        others = self.distinct_locations
        return others[0] if len(others) == 1 else None


def read_and_locate(roots: Sequence[Node], as_one_sample: bool = False) -> LocatedGraph:
    """Read the graph behind some nodes, and find out where the samples are in it, see `locate`.

    Raises:
        CurvoptError: where that is not clear, or the results would be wrong.
    """
    graph = read_graph(roots)
    located = LocatedGraph(graph)
    if not graph.operands and not any(found.parameters for found in graph.module_calls.values()):
        return located
    located.locations = locate(graph, as_one_sample)
    for found in graph.module_calls.values():
        if not found.parameters:
            continue
        location = located.location_of(found.call.model)
        if location is None:
            raise _no_samples(found.call.describe())
        if found.locate(location):
            located.calls.append(found)
        elif any((edge.node, edge.output_nr) in location.axes.layouts for edge in found.edges.values()):
            _leave_to_operations(found, graph)
            if found.parameters:
                located.calls.append(shared_call(found, graph, location))
        else:
            raise CurvoptError(
                f"{found.call.describe()}: the loss depends on it by a path around the outputs of the model (a term "
                "that is computed inside of the model, or a prediction without a batch axis?), whose samples are not "
                "known; return what it is made of, too, with a row for each sample, or mark it by curvopt.prediction."
            )
    functional: list[CallInGraph] = []
    for p, operands in graph.operands.items():
        location = located.location_of(extended_model(p))
        if location is None:
            raise _no_samples(f"parameter '{located.name(p)}'")
        entries, around = find_entry_points(operands, graph, location.axes.layouts)
        functional += parameter_calls(p, entries, location)
        if around:
            located.outside.append(located.name(p))
    located.calls += join_biases(functional)
    for call in located.calls:
        for name, p in call.parameters.items():
            located.owners.setdefault(p, (call, name))
    return located


def _leave_to_operations(found: CallInGraph, graph: BackwardGraph) -> None:
    """Take parameters from a shared call that are also in its input: behind it, both paths count as one."""
    ends = [edge.node for edge in found.edges.values()]
    behind = set(walk(ends)) if any(p in graph.operands for p in found.parameters.values()) else ()
    for name, p in list(found.parameters.items()):
        if any(node in behind for node, _ in graph.operands.get(p, ())):
            del found.parameters[name]
            graph.operands[p] += operands_among(walk(ends, found.call.boundary), {p})


def _no_samples(what: str) -> CurvoptError:
    return CurvoptError(
        f"{what}: no call of the extended model that it belongs to leads to this loss, so its samples are not known; "
        "call extend(model) before the forward pass, and the model with inputs (not under curvopt.disable()), or write "
        "functions of parameters as the forward of a module. A backward that is not meant (of a penalty alone, say) "
        "goes inside of `with backpack():`."
    )


class Backward(NamedTuple):
    """How autograd was called.

    Attributes:
        roots: outputs of nodes that are differentiated, with the gradients that were passed in.
        accumulates: whether gradients are accumulated in leaves.
        to_some_inputs: whether it was given inputs, so that it may not reach all calls of a parameter.
        create_graph: whether it builds a graph of its own, so that fields can be differentiated.
        batched: whether several vectors are pulled back at once (``is_grads_batched=True``).
    """

    roots: Mapping[Edge, Tensor]
    accumulates: bool
    to_some_inputs: bool
    create_graph: bool
    batched: bool


class BackwardPass:
    """Reduces the vectors that arrive at the calls of one backward pass, and sets the fields.

    A parameter is reduced as soon as the vectors have arrived at all of its calls.

    Args:
        extensions: the active extensions.
        extension_hook: called with each module whose fields are complete.
        located: the graph of this backward, with its calls and samples.
        how: how autograd was called.
        loss_reduction: how losses of no known kind are reduced over the samples, see `loss_weight`.
    """

    def __init__(
        self,
        extensions: Sequence[Extension],
        extension_hook: Callable[[nn.Module], None] | None,
        located: LocatedGraph,
        how: Backward,
        loss_reduction: Reduction = None,
    ):
        self.extensions, self.extension_hook, self.located = extensions, extension_hook, located
        self.how, self.calls = how, located.calls
        self.first_order = [e for e in extensions if isinstance(e.columns, Gradient)]
        self.calls_of = Counter(p for call in self.calls for p in call.parameters.values())
        self.parts: dict[nn.Parameter, list[Chunk]] = {}
        self.totals: dict[tuple[nn.Parameter, Extension], Any] = {}
        #: The weights of regularizers, times the gradients that arrive at them.
        self.terms: dict[nn.Parameter, Tensor] = {}
        self.done: dict[nn.Parameter, set[Extension]] = {}
        self.hooked: set[nn.Module] = set()
        self.loss_reduction: Reduction = loss_reduction
        #: How many means over single predictions the scalar is, see `SecondOrder`. For second-order quantities, and
        #: first-order ones that add up.
        self.weight: Tensor | float = 0.0
        #: The largest number of variables of a prediction (see `SecondOrder`).
        self.variables = 1
        self._task: int | None = None

    @cached_property
    def device(self) -> str:
        """Type of the device of the parameters."""
        return next(iter(self.located.owners)).device.type if self.located.owners else "cpu"

    # Before the user's backward

    def before_backward(self, second: Callable[[], None] | None) -> BackwardPass:
        """Factor, pull back and reduce: all that needs no gradient of the user's backward. Returns itself.

        Args:
            second: computes the second-order quantities, if there are any.
        """
        graph = self.located.graph
        if second is None and not (graph.terms or any([e.adds_up for e in self.first_order])):
            return self
        with self._own_computation():
            arrived = self._arrived(graph.terms.values())
            for term, edge in graph.terms.items():
                if (grad := arrived.get(edge)) is not None:
                    for p in term.parameters:
                        self.terms[p] = self.terms.get(p, 0) + grad * term.weight
            if second is not None:
                second()
            elif any(e.adds_up for e in self.first_order):
                edges, N = [GradientEdge(*edge) for edge in self.how.roots], self.located.N
                self.weight = loss_weight(edges, list(self.how.roots.values()), N, self.loss_reduction)
            for p, extension in list(self.totals):
                self._complete(p, extension)
        return self

    def _arrived(self, edges: Iterable[GradientEdge]) -> dict[GradientEdge, Tensor]:
        """The gradients that arrive at some edges, of which none is behind another; edges without one are left out."""
        wanted = list(dict.fromkeys(edges))
        if not wanted:
            return {}
        vjp = NodeVjp.between([GradientEdge(*edge) for edge in self.how.roots], wanted)
        found = zip(wanted, vjp(list(self.how.roots.values())), strict=True)
        return {edge: grad for edge, grad in found if grad is not None}

    @contextlib.contextmanager
    def _own_computation(self) -> Iterator[None]:
        """Inside, numbers have the precision of the parameters, and a graph is built if the backward builds one."""
        with torch.set_grad_enabled(self.how.create_graph), contextlib.ExitStack() as stack:
            if self.located.graph.static_models:
                stack.enter_context(without_reductions(self.located.graph.static_models))
            if torch.is_autocast_enabled(self.device):
                stack.enter_context(torch.autocast(self.device, enabled=False))
            yield

    def remove_earlier_fields(self, first: bool) -> None:
        """At the first backward in a context, remove fields of other forward passes of the models that take part."""
        for model in {model for p in self.located.owners if (model := extended_model(p)) is not None}:
            forwards = {call.forward for call, _ in self.located.graph.model_calls if call.model is model}
            others = [e for e in self.extensions if forwards.isdisjoint(model.forwards.get(e.field, ()))]
            for p in extended_parameters([model]) if first and others else ():
                for extension in others:
                    if extension not in self.done.get(p, ()):  # type: ignore[call-overload]
                        vars(p).pop(extension.field, None)
            model.forwards |= dict.fromkeys([e.field for e in self.extensions], forwards)

    # Pull back and reduce

    def sweep(
        self,
        edges: Sequence[GradientEdge],
        vectors: Sequence[Tensor],
        weights: Tensor | None,
        extensions: Sequence[Extension],
        skip: Collection[CallInGraph | nn.Parameter] = (),
        columns: int | None = None,
        last: bool = False,
    ) -> None:
        """Pull vectors ``[v, *z]`` back to all calls and update the totals of their parameters.

        Args:
            edges: the edges at which the vectors start, such as outputs of the network.
            vectors: one tensor for each edge.
            weights: of the vectors in sums of squares, ``[v, N]``; ``None`` for ones.
            extensions: whose totals are updated.
            skip: calls and parameters that are left out.
            columns: number of columns of the whole sweep.
            last: no vectors follow, so tensors that vectors share may be freed.
        """
        calls = [call for call in self.calls if call not in skip] if skip else self.calls
        sweep = Sweep(self, extensions, calls, skip, weights, columns, last)
        targets = [call.edges[index] for call, index in sweep.places]
        pull_each(edges, targets, vectors, sweep.arrived, len(vectors[0]) > 1 or self.chunk_size > 1)
        sweep.finish()

    def jacobians(self, call: CallInGraph, grads: list[Tensor | None], last: bool) -> Iterator[Chunk]:
        """The Jacobian products of the parameters of a call with the vectors at its outputs, as chunks."""
        try:
            jacobians = call.jac_t(grads)
        except CurvoptError as error:
            raise naming_fields(self.extensions, error) from error
        if last:
            call.call.cache.clear()  # patches go with the Jacobians, layer by layer
        for name in list(jacobians):
            jacobian = jacobians.pop(name)
            jacobian = jacobian.with_own_patches() if self.reads_inputs_once else jacobian
            yield Chunk(call.parameters[name], jacobian, (call.call,))

    @cached_property
    def reads_inputs_once(self) -> bool:
        """Whether inputs are needed for the first chunk of columns only."""
        return all(e.reads_inputs_once for e in self.extensions)

    def update(self, chunk: Chunk, extensions: Sequence[Extension]) -> None:
        """Add a chunk to the totals of its parameter."""
        p = chunk.parameter
        for extension in extensions:
            if (p, extension) not in self.totals:
                vars(p).pop(extension.field, None)  # frees an earlier field before the new one is formed
            self.totals[p, extension] = extension.update(self.totals.get((p, extension)), chunk)

    @cached_property
    def chunk_size(self) -> int:
        """Columns to sweep together, from the activations that one column fills."""
        entries = sum(prod(shape) for call in self.calls for shape in call.call.shapes)
        return columns_per_sweep() or costs.columns_at_once(entries, self.device)

    # In the user's backward

    def listen(self) -> list[RemovableHandle]:
        """For first-order quantities, have `_gradient` called with the gradient of each output of a call."""
        if not self.first_order:
            return []
        return [
            listen(edge, partial(self._gradient, call, index))
            for call in self.calls
            for index, edge in call.edges.items()
        ]

    @cached_property
    def _gradients_of(self) -> Counter[nn.Parameter]:
        """Number of output gradients that have to arrive before a parameter is reduced."""
        found: Counter[nn.Parameter] = Counter()
        for call in self.calls:
            for p in call.parameters.values():
                found[p] += len(call.edges)
        return found

    @cached_property
    def _sources_of(self) -> Mapping[nn.Parameter, set[object]]:
        """The weights that calls use: the parameter itself (``None``), or an edge where one is computed from it."""
        found: dict[nn.Parameter, set[object]] = {}
        for call in self.calls:
            for p in call.parameters.values():
                found.setdefault(p, set()).add(getattr(call.rule, "source", None))
        return found

    def _gradient(self, call: CallInGraph, index: int, grad: Tensor) -> None:
        """The gradient of one output of a call: reduce it, or keep it until the parameter's other calls have theirs."""
        task = running_backward()
        self._task = task if self._task is None else self._task
        if task != self._task:
            return  # of a backward that was started inside of this one
        grads = [grad.unsqueeze(0) if i == index else None for i in range(len(call.call.shapes))]
        with self._own_computation():
            for chunk in self.jacobians(call, grads, last=True):
                p = chunk.parameter
                if isinstance(chunk.jacobian, PulledBack) and len(self._sources_of[p]) > 1:
                    # the graph behind one source may be freed before the others have theirs
                    chunk = replace(chunk, jacobian=chunk.jacobian.settled())
                parts = self.parts.setdefault(p, [])
                parts.append(chunk)
                if len(parts) == self._gradients_of[p]:
                    self._reduce_gradient(p)

    def _reduce_gradient(self, p: nn.Parameter) -> None:
        chunk = combined(self.parts.pop(p))
        if p in self.terms:
            N = chunk.jacobian.N
            share = (self.terms[p] * p / N).expand(1, N, *p.shape)
            chunk = replace(chunk, jacobian=combine([chunk.jacobian, Dense(share)]))
        self.update(chunk, self.first_order)
        for extension in self.first_order:
            self._complete(p, extension)

    # Finish

    def finish(self) -> None:
        """The backward is over: reduce the rest, and free everything shared."""
        with self._own_computation() if self.parts else contextlib.nullcontext():
            for p in list(self.parts):
                if not self.how.to_some_inputs or len(self.parts[p]) == self._gradients_of[p]:
                    self._reduce_gradient(p)
        self.release()

    def release(self) -> None:
        """Drop what calls cached for this backward."""
        for call in self.calls:
            call.call.cache.clear()

    def undo(self) -> None:
        """Take back the fields that a failed backward has set."""
        for p, extensions in self.done.items():
            for extension in extensions:
                if hasattr(p, extension.field):
                    delattr(p, extension.field)
        self.release()

    def _complete(self, p: nn.Parameter, extension: Extension) -> None:
        """Set one field; call the extension hook once all fields of a module's own parameters are there."""
        total = self.totals.pop((p, extension))
        if p in self.terms and extension not in self.first_order:
            total = extension.regularize(total, self.terms[p], p, self.located.owners[p][0].location.N)
        setattr(p, extension.field, extension.finish(total))
        self.done.setdefault(p, set()).add(extension)
        if self.extension_hook is None or (module := self.located.owners[p][0].call.owner) in self.hooked:
            return
        wanted = {q for call in self.calls if call.call.owner is module for q in call.parameters.values()}
        if all(len(self.done.get(q, ())) == len(self.extensions) for q in wanted):
            self.hooked.add(module)
            calls = (call.call for call in self.calls if call.call.module is module)
            found = next((call for call in calls if not isinstance(call, ParameterCall) and call.is_held), None)
            shown = None if found is None else showing(module, found)
            with contextlib.nullcontext() if shown is None else shown:
                self.extension_hook(module)


@dataclass
class Sweep:
    """The vectors of one sweep, and the Jacobians that are not reduced yet.

    Attributes:
        run: the backward whose totals are updated.
        extensions: those whose totals they are.
        calls: where the vectors go to.
        skip: parameters that are left out.
        weights: of the vectors in sums of squares, ``[v, N]``; ``None`` for ones.
        columns: number of columns of all sweeps for these extensions.
        last: no vectors follow, so tensors that vectors share may be freed.
        waiting: vectors at the outputs of calls that have other outputs without vectors so far.
        parts: Jacobians of single calls, by parameter.
    """

    run: BackwardPass
    extensions: Sequence[Extension]
    calls: Sequence[CallInGraph]
    skip: Collection[CallInGraph | nn.Parameter] = ()
    weights: Tensor | None = None
    columns: int | None = None
    last: bool = False
    waiting: dict[CallInGraph, list[Tensor | None]] = field(default_factory=dict)
    parts: dict[nn.Parameter, list[Chunk]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = [(call, index) for call in self.calls for index in call.edges]

    def arrived(self, i: int, grad: Tensor) -> None:
        """Vectors ``[v, *out]`` have arrived at one of the places; reduce the call if all its outputs have some."""
        call, index = self.places[i]
        grads = self.waiting.setdefault(call, [None] * len(call.call.shapes))
        grads[index] = grad
        if len(call.edges) == 1 or sum([grad is not None for grad in grads]) == len(call.edges):
            self._reduce(call)

    def finish(self) -> None:
        """Reduce the rest: no other vectors arrive."""
        for call in list(self.waiting):
            self._reduce(call)
        for p in list(self.parts):
            self._update(p)

    def _reduce(self, call: CallInGraph) -> None:
        for chunk in self.run.jacobians(call, self.waiting.pop(call), self.last):
            p = chunk.parameter
            if p not in self.skip:
                self.parts.setdefault(p, []).append(chunk)
                del chunk
                if len(self.parts[p]) == self.run.calls_of[p]:
                    self._update(p)

    def _update(self, p: nn.Parameter) -> None:
        self.run.update(combined(self.parts.pop(p), self.weights, self.columns), self.extensions)


def combined(chunks: Sequence[Chunk], weights: Tensor | None = None, num_columns: int | None = None) -> Chunk:
    """One chunk for all calls that share a parameter."""
    p, jacobian = chunks[0].parameter, combine([chunk.jacobian for chunk in chunks])
    if weights is not None:
        jacobian = jacobian.with_weights(weights.to(p))
    return Chunk(p, jacobian, tuple([call for chunk in chunks for call in chunk.calls]), num_columns)
