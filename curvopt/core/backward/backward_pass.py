"""One backward pass of the user and the quantities that are computed along with it.

Its stages are here in the order in which they run, but for the checks of a request (`curvopt.core.backward.checks`)
and the columns of the loss Hessian (`curvopt.core.backward.second_order`): **read** the graph, **locate** the samples
in it, **pull back** vectors to the outputs of all calls with parameters, **reduce** them there, by the rule of the call
and the extension, and **finish**: set the fields and call the hook::

    read_and_locate ─► before_backward ─► sweep ─► update ─► _complete          columns of the loss Hessian
                       listen, the user's backward ─► update ─► _complete       the gradient
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.backward.module_io import showing
from curvopt.core.graph import BackwardGraph, CallInGraph, read_graph
from curvopt.core.layers.operations import ParameterCall
from curvopt.core.layers.parameters import find_entry_points, join_biases, parameter_calls
from curvopt.core.losses.any import LARGEST_BLOCK, Reduction, loss_weight
from curvopt.core.losses.roots import Columns, Gradient
from curvopt.core.nodes import Edge, walk
from curvopt.core.products import costs
from curvopt.core.products.base import Chunk, Dense, Jacobian
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import PulledBack, combine
from curvopt.core.pytorch_workarounds import running_backward, without_reductions
from curvopt.core.record import Model, ModuleCall, extended_model, extended_name, extended_parameters
from curvopt.core.samples.axes import Samples
from curvopt.core.samples.samples import locate
from curvopt.core.vjp import NodeVjp, check_functions, listen, pull_each
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


@dataclass
class LocatedGraph:
    """The graph of one backward pass, with its calls and samples.

    Attributes:
        graph: the graph.
        locations: where the samples are, by model.
        distinct_locations: each of these once: models with equal numbers of samples share one.
        calls: the calls that have parameters.
        owners: for each parameter the call that counts for messages and hooks, and its name there.
        outside: names of parameters that enter the loss around the heads, by an added term or as a weight of losses:
            no quantity contains that.
    """

    graph: BackwardGraph
    locations: dict[Model | None, Samples] = field(default_factory=dict)
    distinct_locations: list[Samples] = field(default_factory=list)
    calls: list[CallInGraph] = field(default_factory=list)
    owners: dict[nn.Parameter, tuple[CallInGraph, str]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)

    @property
    def N(self) -> int:
        """The number of samples, of all models together."""
        return sum({location.N for location in self.locations.values()})

    @property
    def may_reach_parameters(self) -> bool:
        """Whether parameters are among the leaves, or functions that are written in Python, which may hide any."""
        custom = any(isinstance(node, BackwardCFunction) for node in self.graph.nodes)
        return custom or any(isinstance(leaf, nn.Parameter) for leaf in self.graph.leaves.values())

    def name(self, p: Tensor) -> str:
        """Path of a parameter in the extended model."""
        if not isinstance(p, nn.Parameter) or p not in self.owners:
            return extended_name(p) or "a parameter"
        call, name = self.owners[p]
        return extended_name(p) or f"{call.call.path}.{name}".lstrip(".")

    def location_of(self, model: Model | None) -> Samples | None:
        """The samples of a model; where it was not called itself, the only samples there are."""
        if model in self.locations:
            return self.locations[model]
        return self.distinct_locations[0] if len(self.distinct_locations) == 1 else None


def read_and_locate(roots: Sequence[Node], as_one_sample: bool = False) -> LocatedGraph:
    """Read the graph behind nodes, and find out where the samples are in it, see `locate`.

    Raises:
        CurvoptError: where that is not clear, or the results would be wrong.
    """
    graph = read_graph(roots)
    check_functions(graph.nodes)
    located = LocatedGraph(graph)
    if not graph.operands and not any(found.parameters for found in graph.module_calls.values()):
        return located
    located.locations = locate(graph, as_one_sample)
    located.distinct_locations = list({id(location): location for location in located.locations.values()}.values())
    for found in graph.module_calls.values():
        if not found.parameters:
            continue
        location = located.location_of(found.call.model)
        if location is None:
            raise _no_samples(found.call.describe(), found.call.model, graph)
        if found.locate(location):
            located.calls.append(found)
        elif any((edge.node, edge.output_nr) in location.axes.layouts for edge in found.edges.values()):
            _leave_to_operations(found, graph)
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
            raise _no_samples(f"parameter '{located.name(p)}'", extended_model(p), graph)
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
    """Read the operations of a call whose output all samples share one by one, as operations outside of modules."""
    nodes = set(walk([edge.node for edge in found.edges.values()], found.call.boundary))
    for operand, p in graph.operands_among(nodes, found.parameters.values()).items():
        if operand not in graph.operands.setdefault(p, []):
            graph.operands[p].append(operand)
    found.parameters = {}


def _no_samples(what: str, model: Model | None, graph: BackwardGraph) -> CurvoptError:
    if any(call.model is model for call, _ in graph.model_calls):
        return CurvoptError(
            f"{what}: its model was called without tensors, so it is not known what a sample is. Pass it the "
            "points that it draws, extend the part of it that gets them, as extend(model.network), or let all points "
            "be one sample by extend(model, batch_axis=None)."
        )
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
        create_graph: whether it builds a graph, so that fields can be differentiated.
        batched: whether several vectors are pulled back at once (``is_grads_batched=True``).
        leaves: returns the leaf tensors behind the roots.
    """

    roots: Mapping[Edge, Tensor]
    accumulates: bool
    to_some_inputs: bool
    create_graph: bool
    batched: bool
    leaves: Callable[[], set[Tensor]]


@dataclass(frozen=True)
class Request:
    """What is asked for in a backward.

    Attributes:
        extensions: without any, the backward runs as it is.
        counted: the parameters of the optimizer that asks: only losses that reach one of them count in the weight of
            the loss, whatever is added; ``None`` for a user, for whom all losses count.
        maximized: whether what is differentiated is maximised: second-order quantities are of its negative.
        loss_reduction: how losses of no known kind are reduced over the samples.
        largest_block: how many outputs of a sample such a loss may couple.
        as_one_sample: whether each batch is one sample, whatever `extend` was told.
        skips_empty: whether backwards of empty batches are let through, without fields; else they are refused.
    """

    extensions: tuple[Extension, ...] = ()
    counted: frozenset[Tensor] | None = None
    maximized: bool = False
    loss_reduction: Reduction = None
    largest_block: int = LARGEST_BLOCK
    as_one_sample: bool = False
    skips_empty: bool = False


class BackwardPass:
    """Pulls vectors back to the calls of one backward, reduces them there, and sets the fields.

    Args:
        request: what is asked for.
        extension_hook: called with each module whose fields are complete.
        located: the graph of this backward, with its calls and samples.
        how: how autograd was called.

    Attributes:
        weight: how many means over single predictions the scalar is, see `curvopt.core.losses.any.loss_weight`; for
            second-order quantities, and first-order ones that add up.
        variables: the largest number of variables of a prediction, see `curvopt.core.losses.roots.LossCurvature`.
        totals: the reduced columns so far.
        done: the fields that are set.
        regularizers: the weights of regularizers, times the gradients that arrive at them.
    """

    def __init__(
        self,
        request: Request,
        extension_hook: Callable[[nn.Module], None] | None,
        located: LocatedGraph,
        how: Backward,
    ):
        self.request, self.extensions, self.extension_hook = request, request.extensions, extension_hook
        self.located, self.how, self.calls = located, how, located.calls
        self.roots = [GradientEdge(*edge) for edge in how.roots]
        self.first_order = [e for e in self.extensions if isinstance(e.columns, Gradient)]
        self.device = next(iter(located.owners)).device.type if located.owners else "cpu"
        # whether inputs are needed for the first chunk of columns only
        self.reads_inputs_once = all([e.reads_inputs_once for e in self.extensions])
        self.totals: dict[tuple[nn.Parameter, Extension], Any] = {}
        self.regularizers: dict[nn.Parameter, Tensor] = {}
        self.done: dict[nn.Parameter, set[Extension]] = {}
        self.hooked: set[nn.Module] = set()
        self.weight: Tensor | float = 0.0
        self.variables = 1
        self._gradient: Sweep | None = None
        self._task: int | None = None

    # Before the user's backward

    def before_backward(self, second_order: Callable[[], None] | None) -> BackwardPass:
        """All that needs no gradient of the user's backward. Returns itself.

        Args:
            second_order: has columns of the loss Hessian swept, if a quantity needs that.
        """
        terms = self.located.graph.terms
        adds_up = any([e.adds_up for e in self.first_order])
        if second_order is None and not (terms or adds_up):
            return self
        with self._computing():
            if terms:
                arrived = NodeVjp(self.roots, list(terms.values()))(list(self.how.roots.values()))
                for term, grad in zip(terms, arrived, strict=True):
                    if grad is not None:
                        for p in term.parameters:
                            self.regularizers[p] = self.regularizers.get(p, 0) + grad * term.weight
            if second_order is not None:
                second_order()
            elif adds_up:
                grads = list(self.how.roots.values())
                self.weight = loss_weight(self.roots, grads, self.located.N, self.request.loss_reduction)
            for p, extension in list(self.totals):
                self._complete(p, extension)
        return self

    def _computing(self) -> AbstractContextManager[Any]:
        """Inside, numbers have the precision of the parameters, and a graph is built if the backward builds one."""
        models, is_autocast = self.located.graph.static_models, torch.is_autocast_enabled(self.device)
        if not models and not is_autocast:
            return torch.set_grad_enabled(self.how.create_graph)
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.how.create_graph))
        if models:
            stack.enter_context(without_reductions(models))
        stack.enter_context(torch.autocast(self.device, enabled=False))
        return stack

    def remove_earlier_fields(self, first: bool) -> None:
        """At the first backward in a context, remove fields of other forward passes of the models that take part."""
        for model in {model for p in self.located.owners if (model := extended_model(p)) is not None}:
            forwards = {call.forward for call, _ in self.located.graph.model_calls if call.model is model}
            earlier = [e for e in self.extensions if forwards.isdisjoint(model.forwards.get(e.field, ()))]
            for p in extended_parameters([model]) if first and earlier else ():
                for extension in earlier:
                    if extension not in self.done.get(p, ()):  # type: ignore[call-overload]
                        vars(p).pop(extension.field, None)
            model.forwards |= dict.fromkeys([e.field for e in self.extensions], forwards)

    # Pull back and reduce

    def sweep(
        self,
        columns: Columns,
        extensions: Sequence[Extension],
        skip: Collection[CallInGraph | nn.Parameter] = (),
        total: int | None = None,
        last: bool = False,
    ) -> None:
        """Pull columns back to all calls, and update the totals of their parameters.

        Args:
            columns: where they start, such as outputs of the network, and their weights in sums of squares.
            extensions: whose totals are updated.
            skip: calls and parameters that are left out.
            total: number of columns of all sweeps for these extensions.
            last: no columns follow, so tensors that columns share may be freed.
        """
        calls = [call for call in self.calls if call not in skip] if skip else self.calls
        outputs = [(call, index) for call in calls for index in call.edges]
        moment = None if columns.moment is None else (columns.vectors[0], columns.moment)
        sweep = Sweep(self, extensions, self.calls_of, skip, columns.weights, total, last, moment=moment)
        targets = [call.edges[index] for call, index in outputs]
        together = len(columns.vectors[0]) > 1 or self.chunk_size > 1
        pull_each(columns.edges, targets, columns.vectors, lambda i, grad: sweep.arrived(*outputs[i], grad), together)
        sweep.finish()

    @cached_property
    def calls_of(self) -> Counter[nn.Parameter]:
        """Number of calls of each parameter."""
        return Counter([p for call in self.calls for p in call.parameters.values()])

    def has_several_sources(self, p: nn.Parameter) -> bool:
        """Whether calls use a parameter itself and weights that are computed from it, or several such weights."""
        uses = [call.rule for call in self.calls if any(q is p for q in call.parameters.values())]
        return len({getattr(rule, "source", None) for rule in uses}) > 1

    @cached_property
    def chunk_size(self) -> int:
        """Columns to sweep together, from the activations that one column fills."""
        entries = sum([prod(shape) for call in self.calls for shape in call.call.shapes])
        return _columns_per_sweep or costs.columns_at_once(entries, self.device)

    def update(self, chunk: Chunk, extensions: Sequence[Extension]) -> None:
        """Add a chunk to the totals of its parameter."""
        p = chunk.parameter
        for extension in extensions:
            if (p, extension) not in self.totals:
                vars(p).pop(extension.field, None)  # frees an earlier field before the new one is formed
            self.totals[p, extension] = extension.update(self.totals.get((p, extension)), chunk)

    # In the user's backward

    def listening(self) -> ExitStack:
        """Inside, the gradient of each output of a call is taken as a column, for first-order quantities."""
        hooks = ExitStack()
        if self.first_order:
            outputs = Counter([p for call in self.calls for p in call.parameters.values() for _ in call.edges])
            self._gradient = Sweep(self, self.first_order, outputs, last=True, of_gradient=True)
            for call in self.calls:
                for index, edge in call.edges.items():
                    hooks.callback(listen(edge, partial(self._arrived, call, index)).remove)
        return hooks

    def _arrived(self, call: CallInGraph, index: int, grad: Tensor) -> None:
        task = running_backward()
        self._task = task if self._task is None else self._task
        if task == self._task and self._gradient is not None:  # not of a backward that was started inside of this one
            with self._computing():
                self._gradient.arrived(call, index, grad.unsqueeze(0))

    # Finish

    def finish(self) -> None:
        """The backward is over: reduce the rest, and free everything shared."""
        if self._gradient is not None and self._gradient.parts and not self.how.to_some_inputs:
            with self._computing():
                self._gradient.finish()
        self.release()

    def release(self) -> None:
        """Drop what calls cached for this backward, and the gradient."""
        self._gradient = None
        for call in self.calls:
            call.call.cache.clear()

    def undo(self) -> None:
        """Take back the fields that a failed backward has set."""
        for p, extensions in self.done.items():
            for extension in extensions:
                vars(p).pop(extension.field, None)
        self.release()

    def _complete(self, p: nn.Parameter, extension: Extension) -> None:
        """Set one field; call the extension hook once all fields of the parameters of a module are there."""
        total = self.totals.pop((p, extension))
        call, _ = self.located.owners[p]
        if p in self.regularizers and not isinstance(extension.columns, Gradient):
            total = extension.regularize(total, self.regularizers[p], p, call.location.N)
        setattr(p, extension.field, extension.finish(total))
        self.done.setdefault(p, set()).add(extension)
        if self.extension_hook is None or (module := call.call.owner) in self.hooked:
            return
        wanted = {q for call in self.calls if call.call.owner is module for q in call.parameters.values()}
        if all(len(self.done.get(q, ())) == len(self.extensions) for q in wanted):
            self.hooked.add(module)
            calls = (call.call for call in self.calls if call.call.module is module)
            found = next((call for call in calls if not isinstance(call, ParameterCall) and call.is_held), None)
            with nullcontext() if found is None else showing(module, found):
                self.extension_hook(module)


@dataclass
class Sweep:
    """Columns on their way through a backward, and Jacobians of parameters that columns reach by further calls.

    ::

        columns [v, N, C] ──► last layer ──► rule ──► Chunk ──► extension.update
                                  │
                                  └──► first layer ──► rule ──► Chunk ──► extension.update

    The Jacobians of all calls that share a parameter are combined first.

    Attributes:
        run: the backward whose totals are updated.
        extensions: whose totals they are.
        expected: how many Jacobians make one of each parameter.
        skip: parameters that are left out.
        weights: of the columns in sums of squares, ``[v, N]``; ``None`` for ones.
        total: number of columns of all sweeps for these extensions.
        last: no columns follow, so tensors that columns share may be freed.
        of_gradient: the column is the gradient of the user's backward, which frees the graph behind it: each output of
            a call is reduced by itself. Else a call is reduced when columns have arrived at all of its outputs.
        moment: the columns and a function for their second moment, see `Outer.known_moment`.
        waiting: columns at the outputs of calls that wait for further ones.
        parts: Jacobians of single calls, by parameter.
    """

    run: BackwardPass
    extensions: Sequence[Extension]
    expected: Mapping[nn.Parameter, int]
    skip: Collection[CallInGraph | nn.Parameter] = ()
    weights: Tensor | None = None
    total: int | None = None
    last: bool = False
    of_gradient: bool = False
    moment: tuple[Tensor, Callable[[], Tensor]] | None = None
    waiting: dict[CallInGraph, list[Tensor | None]] = field(default_factory=dict)
    parts: dict[nn.Parameter, list[tuple[ModuleCall, Jacobian]]] = field(default_factory=dict)

    def arrived(self, call: CallInGraph, index: int, grad: Tensor) -> None:
        """Columns ``[v, *out]`` have arrived at an output of a call."""
        grads: list[Tensor | None] = self.waiting.pop(call, [None] * len(call.call.shapes))
        grads[index] = grad
        if self.of_gradient or len(call.edges) == 1 or sum([g is not None for g in grads]) == len(call.edges):
            self._reduce(call, grads)
        else:
            self.waiting[call] = grads

    def _reduce(self, call: CallInGraph, grads: list[Tensor | None]) -> None:
        try:
            jacobians = call.jac_t(grads)
        except CurvoptError as error:
            raise naming_fields(self.run.extensions, error) from error
        if self.last:
            call.call.cache.clear()  # patches go with the Jacobians, layer by layer
        if isinstance(weight := jacobians.get("weight"), Outer):
            weight.known_moment = self.moment
        for name in list(jacobians):
            p, jacobian = call.parameters[name], jacobians.pop(name)
            if p in self.skip:
                continue
            if self.run.reads_inputs_once:
                jacobian = jacobian.with_own_patches()
            if self.of_gradient and isinstance(jacobian, PulledBack) and self.run.has_several_sources(p):
                jacobian = jacobian.settled()  # the graph behind it may be freed before the next Jacobian is there
            self.parts.setdefault(p, []).append((call.call, jacobian))
            del jacobian  # so that nothing keeps it while a combined one is reduced
            if len(self.parts[p]) == self.expected[p]:
                self._update(p)

    def _update(self, p: nn.Parameter) -> None:
        parts, run = self.parts.pop(p), self.run
        calls, jacobians = tuple([call for call, _ in parts]), [jacobian for _, jacobian in parts]
        del parts
        jacobian = jacobians[0] if len(jacobians) == 1 else combine(jacobians)
        del jacobians
        if self.of_gradient and p in run.regularizers:
            share = run.regularizers[p] * p / jacobian.N
            jacobian = combine([jacobian, Dense(share.expand(1, jacobian.N, *p.shape))])
        if self.weights is not None:
            jacobian = jacobian.with_weights(self.weights.to(p))
        run.update(Chunk(p, jacobian, calls, self.total), self.extensions)
        for extension in self.extensions if self.of_gradient else ():
            run._complete(p, extension)

    def finish(self) -> None:
        """No further columns arrive: reduce the rest."""
        for call in list(self.waiting):
            self._reduce(call, self.waiting.pop(call))
        for p in list(self.parts):
            self._update(p)
