"""The way into autograd: while a context is open, calls that end in its engine go through the context.

::

    loss.backward() ──► _engine_run_backward, replaced ──► Context._run ──► the engine
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.backward.backward_pass import Backward
from curvopt.core.backward.checks import check_inner_backward
from curvopt.core.graph import leaves_behind
from curvopt.core.nodes import leaf_of
from curvopt.core.pytorch_workarounds import is_batched, outside_of_graphs, running_backward
from curvopt.core.record import Observer, all_observers, observe
from curvopt.core.vjp import carried, is_own_backward, listeners
from curvopt.extensions.base import Extension


class Context(ABC):
    """What may take part in the backwards of a thread while it is open.

    Attributes:
        extensions: without any, backwards run as they are.
        listener: somebody who takes what is computed.
    """

    extensions: tuple[Extension, ...] = ()
    listener: object | None = None

    @abstractmethod
    def _run(self, call: Callable[..., Any], how: Backward) -> Any:
        """Take part in a call into autograd."""

    def __enter__(self) -> Context:
        """Take part from now on."""
        listeners().append(self)
        _watch(+1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take part no longer."""
        _watch(-1)
        listeners().remove(self)


def _active_contexts() -> list[Context]:
    """The contexts with extensions that take part now."""
    found = listeners()
    top = found[-1] if found else None
    contexts = top if isinstance(top, tuple) else (top,)
    return [context for context in contexts if isinstance(context, Context) and context.extensions]


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


def attach(observer: Observer) -> None:
    """From now on, ask ``observer`` for a context for each backward that is in no empty one."""
    if observe(observer):
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
    of_engine = is_own_backward() and accumulates  # of a function that is written in Python
    if of_engine or running_backward() != -1:  # of a hook inside a backward
        if accumulates:
            asked = [context for context in listeners() if isinstance(context, Context)][-1:] if of_engine else contexts
            wanted = [e for context in asked if context.listener is None for e in context.extensions]
            check_inner_backward(roots, wanted)
        return call()
    if not roots or (inputs and not any(_is_parameter(x) for x in inputs)):  # of slopes, say, that the loss is made of
        return call()
    if not (contexts or (accumulates and not listeners() and any(each._is_due() for each in all_observers()))):
        return call()
    leaves = functools.cache(lambda: leaves_behind(roots))
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # where leaves have no nodes
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if accumulates and (contexts or not listeners()):
            # attached optimizers first: they take their fields off, and leave fields of the user
            contexts = [*_observing(stack, lambda: set(inputs) if inputs else leaves()), *contexts]
            if len(contexts) > 1:
                together = tuple(contexts)  # of attached optimizers, then one of the user, for one backward
                listeners().append(together)
                stack.callback(listeners().remove, together)
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
        how = Backward(given, accumulates, bool(inputs), bool(args[2]), batched, leaves)
        run: Callable[[], Any] = call
        for context in reversed(contexts):
            run = functools.partial(context._run, run, how)
        stack.enter_context(carried())
        return run()


def _is_parameter(x: Tensor | GradientEdge) -> bool:
    return isinstance(leaf_of(x.node) if isinstance(x, GradientEdge) else x, nn.Parameter)


def _observing(stack: ExitStack, parameters: Callable[[], set[Any]]) -> list[Any]:
    """Enter the contexts of all observers that want one; return them."""
    outside, parameters = len(listeners()), functools.cache(parameters)
    for observer in all_observers():
        context = observer._context_of_backward(parameters)
        if context is not None:
            stack.enter_context(nullcontext(observer))  # one that nobody holds any more lives through the backward
            stack.enter_context(context)
    return listeners()[outside:]
