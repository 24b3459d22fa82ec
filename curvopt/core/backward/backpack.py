"""The ``with backpack(...)`` context: which extensions are active, and when a backward begins and ends.

Inside of ``with backpack(KFAC(), BatchGrad())``::

    loss.backward() ──► _prepare ──► before_backward: sets kfac ──► the user's backward: sets grad_batch
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.hooks import RemovableHandle

from curvopt.core.backward.backward_pass import Backward, BackwardPass
from curvopt.core.backward.columns import Gradient, Hessian
from curvopt.core.backward.located_graph import read_and_locate
from curvopt.core.backward.request_checks import (
    check_derivatives,
    check_inner_backward,
    check_request,
    fields_of,
    naming_fields,
)
from curvopt.core.backward.second_order import SecondOrder
from curvopt.core.graph.backward_graph import leaves_behind
from curvopt.core.graph.nodes import leaf_of
from curvopt.core.graph.vjp import carried, is_own_backward, listeners
from curvopt.core.losses.any import LARGEST_BLOCK, Reduction
from curvopt.core.pytorch_workarounds import is_batched, running_backward
from curvopt.core.record.extend import extend
from curvopt.core.record.state import outside_of_graphs
from curvopt.core.samples.samples import EmptyBatch
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.extensions.base import Extension


@dataclass(frozen=True)
class Request:
    """What an optimizer asks for in a backward.

    Attributes:
        extensions: without any, the backward runs as it is.
        counted: the optimizer's parameters: only losses that reach one of them count in the weight of the loss,
            whatever is added; ``None`` if all losses count.
        maximized: whether what is differentiated is maximised: second-order quantities are those of minus it.
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


class Listener(Protocol):
    """An optimizer that takes quantities from the backwards that accumulate gradients."""

    def wanted(self, leaves: set[Any]) -> bool:
        """Before a backward that reaches ``leaves``: whether the quantities are to be computed in it."""
        ...

    def refused(self, error: CurvoptError, request: Request) -> Request | None:
        """Where a request cannot be served, before the backward runs.

        Args:
            error: why.
            request: what was asked for.

        Returns:
            What to try instead, without extensions to let the backward run as it is; ``None`` to raise the error.
        """
        ...

    def finished(self, weight: Tensor | float, variables: int) -> None:
        """After a backward with quantities, once fields and gradients are final.

        Args:
            weight: of its loss, see `backpack.loss_weight`.
            variables: the largest number of variables of a prediction.
        """
        ...


class backpack:  # noqa: N801 - the name users of BackPACK know
    """Compute quantities along with every backward inside the context and put them on the parameters.

    ::

        with backpack(BatchGrad(), KFAC()):
            loss.backward()
        model[0].weight.grad_batch, model[0].weight.kfac

    Fields are reset, never accumulated, by each backward. Contexts nest: the innermost decides. Nothing is left
    behind after an exception.

    Args:
        *extensions: instances of `curvopt.extensions`; none is allowed and computes nothing.
        extension_hook: called as ``extension_hook(module)`` as soon as all fields of a module's parameters are
            complete; it may use and delete them, so that not all layers' quantities are in memory at once. Called once
            in a backward for each module whose own parameters have fields, not for losses, containers and layers
            without parameters. Inside, ``module.input0`` (``input1``, ...) and ``module.output`` are what a layer that
            has a rule was called with and gave, detached unless the backward creates a graph. Gradients are disabled,
            as in all hooks of a backward; another backward goes inside of ``torch.enable_grad()``.
        debug: print which field is set on which parameter.
        retain_graph: accepted for programs written for BackPACK and needed for nothing: quantities that outlive the
            backward (matrix products) own what they need.

    Raises:
        TypeError: for an extension class instead of an instance, or something that is no extension.
        ValueError: if two extensions write the same field.
    """

    def __init__(
        self,
        *extensions: Extension,
        extension_hook: Callable[[nn.Module], None] | None = None,
        debug: bool = False,
        retain_graph: bool = False,
    ):
        """Check the extensions."""
        from curvopt.extensions.base import Extension

        for extension in extensions:
            if isinstance(extension, type) and issubclass(extension, Extension):
                raise TypeError(
                    f"backpack: got the class {extension.__name__}; pass an instance: {extension.__name__}()."
                )
            if isinstance(extension, (list, tuple)):
                raise TypeError("backpack: got a list of extensions; pass them without a list: backpack(*extensions).")
            if not isinstance(extension, Extension):
                raise TypeError(f"backpack: expected extensions such as curvopt.extensions.KFAC(), got {extension!r}.")
        fields = [extension.field for extension in extensions]
        for field in fields:
            if fields.count(field) > 1:
                raise ValueError(f"backpack: two extensions write the field '{field}'; use separate contexts.")
        self.extensions, self.extension_hook, self.debug = extensions, extension_hook, debug
        #: Sum of the predictions' weights in the losses of all backwards so far: 1 for a mean, N for a sum over N; of
        #: elementwise losses a prediction is a sample with all its entries. For second-order quantities only.
        self.loss_weight: Tensor | float = 0.0
        self.request = Request(extensions)
        self.listener: Listener | None = None
        self._pass: BackwardPass | None = None  # of the running backward
        self._kernels, self._is_first = ExitStack(), True  # of attention; whether no backward has been in the context

    def __enter__(self) -> backpack:
        """Activate the extensions."""
        if any(isinstance(extension.columns, Hessian) for extension in self.extensions):
            self._kernels.enter_context(sdpa_kernel(SDPBackend.MATH))  # the others have no second derivative
        listeners().append(self)
        self._is_first = True
        _watch(+1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deactivate them; after an exception, remove the fields of a half-finished backward."""
        _watch(-1)
        listeners().remove(self)
        self._kernels.close()
        self._abandon()

    def _finish(self, finished: BackwardPass) -> None:
        finished.finish()
        self._pass = None
        self.loss_weight = self.loss_weight + finished.weight
        if self.listener is not None:
            self.listener.finished(finished.weight, finished.variables)
        if self.debug:
            for p, extensions in finished.done.items():
                print(f"curvopt: {finished.located.name(p)}: {', '.join(sorted(e.field for e in extensions))}")

    def _abandon(self) -> None:
        if self._pass is not None:
            self._pass.undo()
            self._pass = None

    def _prepare(self, how: Backward, request: Request) -> BackwardPass | None:
        """Read, locate and check: the pass of a call into autograd, if there is anything to do in it."""
        extensions = request.extensions
        if request.maximized:
            how = how._replace(roots={edge: -grad for edge, grad in how.roots.items()})
        roots = [node for node, _ in how.roots]
        try:
            located = read_and_locate(roots, request.as_one_sample)
        except CurvoptError as error:
            if request.skips_empty and isinstance(error, EmptyBatch):
                return None
            raise naming_fields(extensions, error) from error
        if not located.calls and not (how.accumulates and located.may_reach_parameters):
            for call in located.graph.module_calls if how.accumulates and request.counted is None else ():
                call.check_parameters()
            return None
        if how.batched:
            raise CurvoptError(
                f"{fields_of(extensions)}: is_grads_batched=True pulls several vectors back at once, while fields "
                "are those of one backward; call torch.autograd.grad for each vector, or for all of them inside of an "
                "empty `with backpack():`, which asks for no fields."
            )
        check_request(extensions, located)
        second_order = [e for e in extensions if not isinstance(e.columns, Gradient)]
        second = None
        if second_order:
            given = request.counted, request.loss_reduction, request.largest_block
            second = SecondOrder(second_order, located, how, *given)
        if how.create_graph and request.counted is None:  # nobody differentiates what optimizers take
            check_derivatives(extensions, located, [GradientEdge(node, nr) for node, nr in how.roots])
        return BackwardPass(extensions, self.extension_hook, located, second, how, request.loss_reduction)

    def _attempt(self, how: Backward, request: Request) -> BackwardPass | None:
        """Prepare the pass, and compute the second-order fields."""
        self._pass = self._prepare(how, request)
        return None if self._pass is None else self._pass.before_backward()

    def _begin(self, how: Backward) -> BackwardPass | None:
        """As `_attempt`; after an error of curvopt again, with what the listener asks for: in later backwards, too."""
        request = self.request
        while request.extensions:
            try:
                begun = self._attempt(how, request)
                self.request = request
                return begun
            except BaseException as error:
                self._abandon()
                if self.listener is None or not isinstance(error, CurvoptError):
                    raise
                instead = self.listener.refused(error, request)
                if instead is None:
                    raise
                request = instead
        return None

    def _run(self, call: Callable[..., Any], how: Backward) -> Any:
        """A call into autograd, with its graph read (and the request checked) before anything is computed."""
        if self.listener is not None:
            leaves = leaves_behind([node for node, _ in how.roots])
            if not (how.accumulates and self.listener.wanted(leaves)):
                return call()
        prepared = self._begin(how)
        if prepared is None:
            return call()  # a gradient of something else
        handles = list[RemovableHandle]()
        try:
            prepared.remove_earlier_fields(self._is_first)
            self._is_first = False
            # not in the forward: a model that is extended but not asked should cost nothing
            handles += prepared.listen()
            result = call()
            self._finish(prepared)
            return result
        except BaseException:
            self._abandon()
            raise
        finally:
            for handle in handles:
                handle.remove()


class ListenedBackward(backpack):
    """A context of an optimizer, which listens.

    Args:
        request: what is computed in the backwards inside.
        listener: takes part in them.
        extension_hook: see `backpack`.
    """

    def __init__(self, request: Request, listener: Listener, extension_hook: Callable[[nn.Module], None] | None = None):
        super().__init__(*request.extensions, extension_hook=extension_hook)
        self.request, self.listener = request, listener


class _Together:
    """Several contexts for one backward: those of attached optimizers, then one of the user."""

    def __init__(self, contexts: list[backpack]):
        self.contexts = contexts

    def __enter__(self) -> None:
        listeners().append(self)

    def __exit__(self, *_: object) -> None:
        listeners().remove(self)


def _active_contexts() -> list[backpack]:
    """The contexts with extensions that take part now."""
    found = listeners()
    top = found[-1] if found else None
    contexts = top.contexts if isinstance(top, _Together) else [top]
    return [context for context in contexts if isinstance(context, backpack) and context.extensions]


_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # what every way into autograd ends in
_watching, _lock = 0, threading.RLock()


def _watch(change: int) -> None:
    """While any context is open, calls into autograd go through `_watched_backward`, which sees the roots."""
    global _watching
    with _lock:
        _watching += change
        torch.autograd._engine_run_backward = _watched_backward if _watching else _run_backward  # type: ignore[attr-defined]


class _Engine(threading.local):
    """What calls into autograd end in, in one thread, and whether contexts take part in them."""

    def __init__(self) -> None:
        self.run: Callable[..., Any] = _run_backward
        self.listening = True


_engine = _Engine()


def is_listening() -> bool:
    """Whether contexts take part in backwards."""
    return _engine.listening


@contextmanager
def engine(run: Callable[..., Any], listening: bool) -> Iterator[None]:
    """Calls into autograd inside end in ``run(engine, *args, **kwargs)``, whatever contexts are active.

    Args:
        run: is given what would have been called, and its arguments.
        listening: whether contexts take part in the calls.
    """
    before = _engine.run, _engine.listening
    _engine.run, _engine.listening = functools.partial(run, _engine.run), listening
    _watch(+1)
    try:
        yield
    finally:
        _engine.run, _engine.listening = before
        _watch(-1)


class Observer(Protocol):
    """Somebody with a context for backwards that others start."""

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> AbstractContextManager[Any] | None:
        """The context to run a backward in that will reach some parameters; ``None`` to let it run as it is."""


_observers: weakref.WeakKeyDictionary[Observer, None] = weakref.WeakKeyDictionary()  # in the order of attach()


def attach(observer: Observer, *modules: nn.Module | None) -> None:
    """Extend modules; from now on, ask ``observer`` for a context for every backward, but for those in an empty one."""
    for module in modules:
        if module is not None:
            extend(module)
    with _lock:
        if observer not in _observers:
            _observers[observer] = None
            _watch(+1)
            weakref.finalize(observer, _watch, -1)


def _watched_backward(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return outside_of_graphs(functools.partial(_watched_backward, **kwargs), outputs, *args)

    def call() -> Any:
        return _engine.run(outputs, *args, **kwargs)

    if not _engine.listening:
        return call()
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in outputs]
    roots = [node for node in nodes if node is not None]
    accumulates, inputs = kwargs.get("accumulate_grad", False), args[3]
    contexts = _active_contexts()
    own = is_own_backward() and accumulates  # of a function that is written in Python
    if own or running_backward() != -1:  # of a hook inside a backward
        if accumulates:
            asked = [context for context in listeners() if isinstance(context, backpack)][-1:] if own else contexts
            wanted = [e for context in asked if context.listener is None for e in context.extensions]
            check_inner_backward(roots, wanted)
            if own:
                listeners()[-1].keep(leaves_behind(roots))
        return call()
    if not roots or (inputs and not any(_is_parameter(x) for x in inputs)):  # of slopes, say, that the loss is made of
        return call()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # where leaves have no nodes
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if accumulates and (contexts or not listeners()):
            # attached optimizers first: they take their fields off, and leave those of the user
            contexts = [*_observing(stack, lambda: set(inputs) if inputs else leaves_behind(roots)), *contexts]
            if len(contexts) > 1:
                stack.enter_context(_Together(contexts))
        if contexts and args[2]:
            # backward(create_graph=True) is what one asks for here; fields hold no reference to .grad
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        batched = any(is_batched(grad) for grad in args[0] if grad is not None)
        given = {}
        for root, grad in zip(outputs, args[0], strict=True):
            edge = (root.node, root.output_nr) if isinstance(root, GradientEdge) else (root.grad_fn, root.output_nr)
            if edge[0] is not None:
                grad = root.new_ones(()) if grad is None and isinstance(root, Tensor) else grad
                given[edge] = given[edge] + grad if edge in given else grad
        how = Backward(given, accumulates, bool(inputs), bool(args[2]), batched)
        run: Callable[[], Any] = call
        for context in reversed(contexts):
            run = functools.partial(context._run, run, how)
        stack.enter_context(carried())
        return run()


def _is_parameter(x: Tensor | GradientEdge) -> bool:
    return isinstance(leaf_of(x.node) if isinstance(x, GradientEdge) else x, nn.Parameter)


def _observing(stack: ExitStack, parameters: Callable[[], set[Any]]) -> list[Any]:
    """Enter the contexts of all observers that want one; return them."""
    if not _observers:
        return []
    outside, parameters = len(listeners()), functools.cache(parameters)
    with _lock:
        observers = list(_observers)
    for observer in observers:
        context = observer._context_of_backward(parameters)
        if context is not None:
            stack.enter_context(context)
    return listeners()[outside:]
