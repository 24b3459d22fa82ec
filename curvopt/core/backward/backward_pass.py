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
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from curvopt.core.backward.columns import (
    Gradient,
    columns_per_sweep,
)
from curvopt.core.backward.located_graph import LocatedGraph
from curvopt.core.backward.module_io import showing
from curvopt.core.backward.request_checks import naming_fields
from curvopt.core.backward.second_order import SecondOrder
from curvopt.core.backward.sweep import Sweep, combined
from curvopt.core.graph.backward_graph import CallInGraph
from curvopt.core.graph.node_vjp import Edge, NodeVjp
from curvopt.core.graph.vjp import listen, pull_each
from curvopt.core.layers.operations import ParameterCall
from curvopt.core.losses.any import Reduction, loss_weight
from curvopt.core.products import costs
from curvopt.core.products.base import Chunk, Dense
from curvopt.core.products.sums import PulledBack, combine
from curvopt.core.pytorch_workarounds import running_backward, without_reductions
from curvopt.core.record.extended_parameters import extended_model, extended_parameters
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.extensions.base import Extension


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
        second: the second-order quantities, if there are any.
        how: how autograd was called.
        loss_reduction: how losses of no known kind are reduced over the samples, see `loss_weight`.
    """

    def __init__(
        self,
        extensions: Sequence[Extension],
        extension_hook: Callable[[nn.Module], None] | None,
        located: LocatedGraph,
        second: SecondOrder | None,
        how: Backward,
        loss_reduction: Reduction = None,
    ):
        self.extensions, self.extension_hook, self.located, self.second = extensions, extension_hook, located, second
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
        self._task: int | None = None

    @cached_property
    def device(self) -> str:
        """Type of the device of the parameters."""
        return next(iter(self.located.owners)).device.type if self.located.owners else "cpu"

    @property
    def variables(self) -> int:
        """The largest number of variables of a prediction (see `SecondOrder`)."""
        return 1 if self.second is None else self.second.variables

    # Before the user's backward

    def before_backward(self) -> BackwardPass:
        """Factor, pull back and reduce: all that needs no gradient of the user's backward. Returns itself."""
        graph = self.located.graph
        if self.second is None and not (graph.terms or any([e.adds_up for e in self.first_order])):
            return self
        with self._own_computation():
            arrived = self._arrived(graph.terms.values())
            for term, edge in graph.terms.items():
                if (grad := arrived.get(edge)) is not None:
                    for p in term.parameters:
                        self.terms[p] = self.terms.get(p, 0) + grad * term.weight
            if self.second is not None:
                self.second.compute(self)
                self.weight = self.second.weight
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
