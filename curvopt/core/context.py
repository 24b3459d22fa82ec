"""The ``with backpack(...)`` context: which extensions are active, and when a backward begins and ends."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from curvopt.core import costs
from curvopt.core.graph import Graph, leaves_behind, records_behind
from curvopt.core.residuals import leaf_of
from curvopt.core.sweep import Backward, Pass, fields_of
from curvopt.core.uses import Use, extend, listen, listeners, outside_of_graphs, unheard
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.extensions.base import Extension


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
            complete; it may use and delete them, so that not all layers' quantities are in memory at once.
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
        #: Called before each backward that accumulates gradients.
        self.began: Callable[[], None] | None = None
        #: Called at the end of each backward with this weight, and with the number of variables of a prediction.
        self.finished: Callable[[Tensor | float, int], None] | None = None
        #: Called once gradients are what the backward leaves (``DistributedDataParallel`` writes them after its end).
        self.ended: Callable[[], None] | None = None
        #: If set, only losses that reach one of these tensors count in the weight: the optimizer's, whose step has to
        #: be the same whatever is added to its loss.
        self.counted: set[Tensor] | None = None
        #: Whether backwards of empty batches are let through, without fields; else they are refused.
        self.skips_empty = False
        self._passes: dict[int, Pass] = {}  # by graph task: a backward started inside a backward is another pass
        self._pending: Pass | None = None  # checked, its backward about to begin

    def __enter__(self) -> backpack:
        """Activate the extensions."""
        listeners.append(self)
        _watch(+1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deactivate them; after an exception, take back what a half-finished backward has set."""
        _watch(-1)
        listeners.remove(self)
        self._abandon()

    def _tell(self, event: Callable[..., None], *what: Any) -> None:
        """A gradient has arrived, in a backward of this context or of another one."""
        if self in _told():
            event(self._current(), *what)

    def _current(self) -> Pass:
        """The pass of the running backward; begun by its first event, ended by the engine's own final callback."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            if self._pending is None:
                raise self._started_inside()
            self._passes[task], self._pending = self._pending, None
            self._passes[task].begin()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(task))
        return self._passes[task]

    def _started_inside(self) -> CurvoptError:
        return CurvoptError(
            f"{fields_of(self.extensions)}: an extended module was used in a backward that was started "
            "inside of another one; use torch.utils.checkpoint with use_reentrant=False."
        )

    def _finish(self, task: int) -> None:
        finished = self._passes.pop(task, None)
        if finished is not None:
            finished.finish()
            self.loss_weight = self.loss_weight + finished.weight
            if self.finished is not None:
                self.finished(finished.weight, finished.variables)
            if self.debug:
                for p, extensions in finished.done.items():
                    print(f"curvopt: {finished.graph.name(p)}: {', '.join(sorted(e.field for e in extensions))}")

    def _abandon(self) -> None:
        while self._passes:
            self._passes.popitem()[1].undo()
        self._pending = None

    def _read(self, roots: Sequence[Node], how: Backward) -> tuple[Graph, Pass | None]:
        """The graph of a call into autograd, and what is to be done in its backward, if anything."""
        try:
            graph = Graph(roots)
        except CurvoptError as error:
            raise CurvoptError(f"{fields_of(self.extensions)}: {error}") from error
        if not (graph.entries or how.accumulates) or (self.skips_empty and graph.empty):
            return graph, None
        with graph.own_backwards(), graph.blocks:
            begun = Pass(self.extensions, self.extension_hook, graph, how, self.counted)
        for call in () if graph.mixing else graph.calls:
            call.use.was_read_off()
        return graph, begun

    def _run(self, roots: Sequence[Node], call: Callable[..., Any], how: Backward) -> Any:
        """A call into autograd, with its graph read (and the request checked) before anything is computed."""
        if self.began is not None and how.accumulates:
            self.began()
        graph, pending = self._read(roots, how)
        if pending is None and not graph.entries:
            return call()  # a gradient of something else
        if pending is None:
            with unheard():
                return call()
        self._pending, handles = pending, list[RemovableHandle]()
        try:
            # not in the forward: a model that is extended but not asked should cost nothing
            for term, edge in graph.terms.items():
                handles.append(listen(edge, functools.partial(self._tell, Pass.term, term)))
            for loss, edge in graph.losses.items():
                handles.append(listen(edge, functools.partial(self._tell, functools.partial(_own, Pass.loss), loss)))
            for head, edge in graph.heads.items() if pending.samples.unaligned else ():
                handles.append(listen(edge, functools.partial(self._tell, functools.partial(_own, Pass.head), head)))
            for entry in pending.listening():
                for index, edge in entry.edges.items():
                    handles.append(listen(edge, functools.partial(self._tell, Pass.gradient, entry.use, index)))
            for p in pending.awaited:
                handles.append(listen(get_gradient_edge(p), functools.partial(self._tell, Pass.accumulated, p)))
            if pending.spared:
                others = [leaf for leaf in graph.leaves if leaf not in pending.spared]
                result = call((*others, *(edge for edges in pending.spared.values() for edge in edges)))
            else:
                result = call()
            if self.ended is not None and how.accumulates:
                self.ended()
            return result
        except BaseException:
            self._abandon()
            raise
        finally:
            self._pending = None
            for handle in handles:
                handle.remove()


def _own(event: Callable[..., None], current: Pass, *what: Any) -> None:
    """An event that has the engine start backwards."""
    with current.graph.own_backwards():
        event(current, *what)


class _Together:
    """Several contexts that are told of one backward: those of attached optimizers, then one that the user opened."""

    def __init__(self, contexts: list[backpack]):
        self.contexts = contexts

    def __enter__(self) -> None:
        listeners.append(self)

    def __exit__(self, *_: object) -> None:
        listeners.remove(self)


def _told() -> list[backpack]:
    """The contexts with extensions that are told what happens now."""
    top = listeners[-1] if listeners else None
    contexts = top.contexts if isinstance(top, _Together) else [top]
    return [context for context in contexts if isinstance(context, backpack) and context.extensions]


_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # what every way into autograd ends in
_watching = 0


def _watch(change: int) -> None:
    """While any context is open, autograd shows the engine what is differentiated: the roots of the graph."""
    global _watching
    if not torch.compiler.is_dynamo_compiling():
        costs.keep_freed_memory()
    _watching += change
    torch.autograd._engine_run_backward = _watched_backward if _watching else _run_backward  # type: ignore[attr-defined]


_heard = True


def heard() -> bool:
    """Whether contexts are told of backwards."""
    return _heard


@contextmanager
def engine(run: Callable[..., Any], told: bool) -> Iterator[None]:
    """Calls into autograd inside end in ``run(engine, *args, **kwargs)``, whatever contexts are open or opened there.

    Args:
        run: is given what would have been called, and its arguments.
        told: whether contexts are told of the calls.
    """
    global _run_backward, _heard
    before = _run_backward, _heard
    _run_backward, _heard = functools.partial(run, _run_backward), told
    _watch(0)
    try:
        yield
    finally:
        _run_backward, _heard = before
        _watch(0)


class Observer(Protocol):
    """Somebody with a context for backwards that others start."""

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> AbstractContextManager[Any] | None:
        """The context to run a backward in that will reach some parameters; ``None`` to let it run as it is."""


_observers: weakref.WeakKeyDictionary[Observer, None] = weakref.WeakKeyDictionary()  # in the order of attach()


def attach(observer: Observer, *modules: nn.Module | None) -> None:
    """Extend modules, and ask ``observer`` for a context for every backward from now on.

    Not for those inside a context without extensions.
    """
    for module in modules:
        if module is not None:
            extend(module)
    if observer not in _observers:
        _observers[observer] = None
        _watch(+1)
        weakref.finalize(observer, _watch, -1)


def _watched_backward(outputs: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return outside_of_graphs(functools.partial(_watched_backward, **kwargs), outputs, *args)

    def call(inputs: Sequence[Tensor | GradientEdge] = args[3]) -> Any:
        return _run_backward(outputs, *args[:3], inputs, *args[4:], **kwargs)

    if not _heard:
        return call()
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in outputs]
    roots = [node for node in nodes if node is not None]
    accumulates, inputs = kwargs.get("accumulate_grad", False), args[3]
    contexts = _told()
    if torch._C._current_graph_task_id() != -1:  # of a hook inside a backward
        if contexts and accumulates and any(records_behind(roots, Use)):
            raise contexts[-1]._started_inside()
        return call()
    if not roots or (inputs and not any(_is_parameter(x) for x in inputs)):  # of slopes, say, that the loss is made of
        return call()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # where leaves have no nodes
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if accumulates and (contexts or not listeners):
            # attached optimizers first: they take their fields off, and leave those of the user
            contexts = [*_observing(stack, lambda: set(inputs) if inputs else leaves_behind(roots)), *contexts]
            if len(contexts) > 1:
                stack.enter_context(_Together(contexts))
        if contexts and args[2]:
            # backward(create_graph=True) is what one asks for here; fields hold no reference to .grad
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        known = len(roots) == len(outputs) and not any(leaf_of(root) is not None for root in roots)
        plain = known and accumulates and not inputs and not args[2]
        is_batched = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined]
        batched = any(is_batched(grad) for grad in args[0] if grad is not None)
        how = Backward(accumulates, bool(inputs), plain, bool(args[2]), alone=len(contexts) == 1, batched=batched)
        run: Callable[[], Any] = call
        for context in reversed(contexts):
            run = functools.partial(context._run, roots, run, how)
        return run()


def _is_parameter(x: Tensor | GradientEdge) -> bool:
    return isinstance(leaf_of(x.node) if isinstance(x, GradientEdge) else x, nn.Parameter)


def _observing(stack: ExitStack, parameters: Callable[[], set[Any]]) -> list[Any]:
    """Enter the contexts of all observers that want one; return them."""
    if not _observers:
        return []
    outside, parameters = len(listeners), functools.cache(parameters)
    for observer in list(_observers):
        opened = observer._context_of_backward(parameters)
        if opened is not None:
            stack.enter_context(opened)
    return listeners[outside:]
