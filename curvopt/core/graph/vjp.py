"""Vector-Jacobian products by autograd's engine: pull vectors back, listen to gradients, cut paths.

>>> x = torch.tensor([1.0, 2.0], requires_grad=True)
>>> (found,) = pull([x.square()], [x], [torch.eye(2)])  # two vectors at once
>>> found.tolist()
[[2.0, 0.0], [0.0, 4.0]]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from curvopt.core.graph.nodes import leads_further_to
from curvopt.core.pytorch_workarounds import running_backward, wrong_together


class _Listeners(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.all: list[Any] = []


_of_thread = _Listeners()
_running: dict[object, list[Any]] = {}  # those of backwards that run, of any thread, the last one last


def listeners() -> list[Any]:
    """The contexts that take part in backwards, innermost last, and an `OwnBackward` while it pulls back itself.

    Those that this thread has opened. The threads that autograd has for a GPU go by those of the backward that runs.
    """
    found = _of_thread.all
    if found or not _running or not isinstance(threading.current_thread(), threading._DummyThread):
        return found
    return ([found] + list(_running.values()))[-1]  # at once, as other threads change it


@contextmanager
def carried() -> Iterator[None]:
    """Inside, the threads of a GPU go by the listeners of this thread."""
    backward = object()
    _running[backward] = listeners()
    try:
        yield
    finally:
        del _running[backward]


class OwnBackward:
    """Marks the backward passes that the engine itself runs: it is last among `listeners`, so no context takes part.

    A function that is written in Python may start one of its own, which adds the engine's vectors to ``.grad``.

    Attributes:
        grads: ``.grad`` before, and a copy of it, by leaf.
    """

    def __init__(self) -> None:
        self.grads: dict[Tensor, tuple[Tensor, Tensor] | None] = {}

    def keep(self, leaves: Iterable[Tensor]) -> None:
        """Keep the ``.grad`` of leaves to which a backward is about to add."""
        for leaf in leaves:
            if leaf not in self.grads:
                self.grads[leaf] = None if leaf.grad is None else (leaf.grad, leaf.grad.detach().clone())

    @torch.no_grad()
    def restore(self) -> None:
        """Set ``.grad`` of these leaves to what it was."""
        for leaf, kept in self.grads.items():
            leaf.grad = None if kept is None else kept[0].copy_(kept[1])


def is_own_backward() -> bool:
    """Whether the engine pulls back itself."""
    found = listeners()
    return bool(found) and isinstance(found[-1], OwnBackward)


@contextmanager
def own_backward() -> Iterator[OwnBackward]:
    """Backward passes inside are the engine's own: no listener takes part in them."""
    engine = OwnBackward()
    own = _of_thread.all
    own.append(engine)
    try:
        with carried():
            yield engine
    finally:
        own.remove(engine)
        engine.restore()


def listen(edge: GradientEdge, arrived: Callable[[Tensor], None]) -> RemovableHandle:
    """Have ``arrived`` called with the gradient that arrives at an edge in a backward.

    That is before the node itself, and after the hooks of tensors by which users change gradients.
    """
    return edge.node.register_prehook(partial(_on_gradient, arrived, edge.output_nr))


def _on_gradient(arrived: Callable[[Tensor], None], output_nr: int, grads: Sequence[Tensor | None]) -> None:
    grad = grads[output_nr]
    if grad is not None:
        arrived(grad)


_engine = torch.autograd.Variable._execution_engine


def pull(
    outputs: Sequence[GradientEdge | Tensor],
    inputs: Sequence[GradientEdge | Tensor],
    vectors: Sequence[Tensor],
) -> list[Tensor | None]:
    """Pull vectors ``[v, *output]`` back to the inputs, ``[v, *input]`` each; ``None`` where nothing arrives.

    Builds a graph of its own exactly if gradients are enabled, and leaves the network's graph alive.
    """
    create_graph, V = torch.is_grad_enabled(), vectors[0].shape[0]
    with own_backward() as engine:
        # anomaly detection looks at numbers, as vmap cannot, and prints what follows
        if V > 1 and not torch.is_anomaly_enabled() and not wrong_together(outputs):
            try:
                return list(
                    torch.autograd.grad(  # type: ignore[call-overload]
                        list(outputs),  # type: ignore[arg-type]
                        list(inputs),  # type: ignore[arg-type]
                        list(vectors),
                        retain_graph=True,
                        create_graph=create_graph,
                        allow_unused=True,
                        is_grads_batched=True,
                    )
                )
            except RuntimeError:
                engine.restore()  # an operation that vmap cannot enter (a custom autograd.Function): one by one
        # the engine itself: the first `torch.autograd.grad` with a vector imports modules for a second
        run = partial(_engine.run_backward, tuple(outputs), keep_graph=True, create_graph=create_graph)
        run = partial(run, inputs=tuple(inputs), allow_unreachable=True, accumulate_grad=False)
        columns = []
        for v in range(V):
            columns.append(run(tuple([vector[v] for vector in vectors])))
            engine.restore()
    if V == 1:
        return [None if found is None else found.unsqueeze(0) for found in columns[0]]
    return [None if column[0] is None else torch.stack(column) for column in zip(*columns, strict=True)]  # type: ignore[arg-type]


def pull_each(
    outputs: Sequence[GradientEdge],
    inputs: Sequence[GradientEdge],
    vectors: Sequence[Tensor],
    arrived: Callable[[int, Tensor], None],
    together: bool = False,
) -> None:
    """`pull`, with ``arrived(i, [v, *input])`` called for each input that is reached.

    Args:
        outputs: where the vectors are.
        inputs: where they are pulled back to.
        vectors: one tensor for each output.
        arrived: called as soon as autograd passes the input, so that what arrives need not be kept.
        together: call it for all at the end, as has to be where there is more than one vector.
    """
    nodes = {edge.node for edge in inputs}
    passed = [not together and leads_further_to(edge.node, nodes) for edge in inputs]
    ends = [i for i, _ in enumerate(inputs) if not passed[i]]
    tasks: list[int] = []

    def collect(i: int, grad: Tensor) -> None:
        tasks.append(running_backward())
        if tasks[-1] == tasks[0]:  # no gradient of a backward that `arrived` itself starts
            arrived(i, grad.unsqueeze(0))

    with ExitStack() as hooks:
        for i, edge in enumerate(inputs):
            if passed[i]:
                hooks.callback(listen(edge, partial(collect, i)).remove)
        found = pull(outputs, [inputs[i] for i in ends], vectors)[::-1] if ends else []
    for i in ends:
        vector = found.pop()
        if vector is not None:
            arrived(i, vector)


@contextmanager
def cut(nodes: Sequence[Node | None]) -> Iterator[None]:
    """Gradients are captured at the outputs of ``nodes`` and go no further."""
    handles = [node.register_prehook(_zeros) for node in set(nodes) if node is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
