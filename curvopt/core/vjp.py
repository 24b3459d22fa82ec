"""Vector-Jacobian products: by autograd's engine, which runs hooks, and node by node, without them.

`pull` calls autograd's engine. `NodeVjp` calls the nodes itself: hooks of tensors, parameters and modules do not run,
and nothing is accumulated in ``.grad``. The graph stays alive. Two kinds of hooks run: saved tensors are unpacked (a
checkpoint recomputes its block), and, while a backward runs, hooks at functions that are written in Python are called.

>>> x = torch.tensor([1.0, 2.0], requires_grad=True)
>>> (found,) = pull([x.square()], [x], [torch.eye(2)])  # two vectors at once
>>> found.tolist()
[[2.0, 0.0], [0.0, 4.0]]
>>> z = 1 * x
>>> vjp = NodeVjp([get_gradient_edge(z.square().sum())], [get_gradient_edge(z)])
>>> [vector.tolist() for vector in vjp([torch.tensor(1.0)])]
[[2.0, 4.0]]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from curvopt.core.nodes import (
    consumers_first,
    is_of_users,
    leads_further_to,
    leaf_of,
    metadata,
    name_of,
    outputs_of,
    shape_of,
)
from curvopt.core.pytorch_workarounds import running_backward, wrong_together
from curvopt.core.randomness import RandomState
from curvopt.errors import CurvoptError


class _Listeners(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.all: list[Any] = []


_of_thread = _Listeners()
_running: dict[object, list[Any]] = {}  # listeners of backwards that run, of any thread, the last one last


def listeners() -> list[Any]:
    """The contexts that take part in backwards, innermost last, and an `OwnBackward` while it pulls back itself.

    A thread has the contexts that it has opened. The threads that autograd has for a GPU have the contexts of the
    backward that runs.
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
    """Marks the backward passes that the engine itself runs: it is last among `listeners`, so no context takes part."""


def is_own_backward() -> bool:
    """Whether the engine pulls back itself."""
    found = listeners()
    return bool(found) and isinstance(found[-1], OwnBackward)


@contextmanager
def own_backward() -> Iterator[None]:
    """No listener takes part in backward passes inside; a function that starts a further one is refused."""
    engine = OwnBackward()
    listening = _of_thread.all
    listening.append(engine)
    try:
        with carried():
            yield
    finally:
        listening.remove(engine)


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

    Builds a graph exactly if gradients are enabled, and leaves the network's graph alive.
    """
    create_graph, V = torch.is_grad_enabled(), vectors[0].shape[0]
    with own_backward():
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
                pass  # an operation that vmap cannot enter (a custom autograd.Function): one by one
        # the engine itself: the first `torch.autograd.grad` with a vector imports modules for a second
        run = partial(_engine.run_backward, tuple(outputs), keep_graph=True, create_graph=create_graph)
        run = partial(run, inputs=tuple(inputs), allow_unreachable=True, accumulate_grad=False)
        columns = [run(tuple([vector[v] for vector in vectors])) for v in range(V)]
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


class NodeVjp:
    """Products of vectors with the Jacobian between two sets of edges.

    Args:
        outputs: where the vectors are.
        inputs: where they are pulled back to. A path ends at the first of them.

    Attributes:
        nodes: all nodes on paths from the outputs that do not pass an input, each after the nodes it uses.
        order: nodes that lead to an input, in the order in which vectors pass them.
    """

    def __init__(
        self, outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge], through: Collection[Node] | None = None
    ):
        """Read the graph between the edges; with ``through`` only paths of these nodes."""
        self.outputs = [(edge.node, edge.output_nr) for edge in outputs]
        self.inputs = {(edge.node, edge.output_nr): i for i, edge in enumerate(inputs)}
        roots = [node for node, nr in self.outputs if (node, nr) not in self.inputs]
        self.nodes = consumers_first(roots, ends=self.inputs, through=through)[::-1]
        self._leading: set[Node] = set()
        for node in self.nodes:
            if any(edge in self.inputs or edge[0] in self._leading for edge in node.next_functions):
                self._leading.add(node)
        self.order = [node for node in reversed(self.nodes) if node in self._leading]

    @property
    def eps(self) -> float:
        """The coarsest precision of numbers on the way, 0 if there are no nodes."""
        found: list[Any] = [meta.dtype for node in self.order for meta in outputs_of(node)]
        return max((torch.finfo(dtype).eps for dtype in found if dtype.is_floating_point), default=0.0)

    def __call__(
        self, vectors: Sequence[Tensor], arrived: Callable[[Node, Tensor], None] | None = None
    ) -> list[Tensor | None]:
        """A vector at each input, in float32 at least, from one at each output; ``None`` where nothing arrives.

        Builds a graph if gradients are enabled.

        Args:
            vectors: one for each output.
            arrived: called with each vector on the way and the node that it reaches.
        """
        found: list[Tensor | None] = [None] * len(self.inputs)
        waiting: dict[Node, list[Tensor | None]] = {}

        def arrive(node: Any, nr: int, grad: Tensor) -> None:
            grads, i, meta = found, self.inputs.get((node, nr)), metadata(node, nr)
            if i is None:
                if node not in self._leading:
                    return
                grads, i = waiting.setdefault(node, [None] * len(outputs_of(node))), nr
            before, dtype = grads[i], meta.dtype
            if grads is found:  # half precision would round what is differentiated again
                dtype = torch.promote_types(torch.promote_types(dtype, grad.dtype), torch.float32)
            # as the engine does after each node
            grad = (grad if dtype.is_complex or not grad.is_complex() else grad.real).to(meta.device, dtype)
            if arrived is not None:
                arrived(node, grad)
            grads[i] = grad if before is None else before + grad

        device = vectors[0].device.type if vectors else "cpu"
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            for (node, nr), vector in zip(self.outputs, vectors, strict=True):
                arrive(node, nr, vector)
            for node in self.order:
                if node in waiting:
                    found_below = call_node(node, waiting.pop(node))
                    for (following, nr), grad in zip(node.next_functions, found_below, strict=False):
                        if following is not None and grad is not None:
                            arrive(following, nr, grad)
        return found


def call_node(node: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients at the operands of an operation, from the gradients at its outputs.

    Casts do not round to the precision that was cast from.
    """
    runs = running_backward() != -1
    if name_of(node) == "ToCopyBackward0":
        found = grads
    elif isinstance(node, BackwardCFunction):
        found = _by_engine(node, grads) if runs else _applied(node, grads)
    else:
        found = node(*grads)
        found = found if isinstance(found, Sequence) else [found]
        pairs = zip(found, node.next_functions, strict=False)
        if runs and any(grad is None and below is not None for grad, (below, _) in pairs):
            # the node leaves out what the running backward does not need, if that is one to a few inputs only
            found = _by_engine(node, grads)
    return [
        # as autograd's engine does for an operand that was repeated
        grad if grad is None or below is None or grad.is_sparse else grad.sum_to_size(shape_of(below, nr))
        for grad, (below, nr) in zip(found, node.next_functions, strict=False)
    ]


def _applied(node: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Call a function that is written in Python."""
    given = []
    for nr, grad in enumerate(grads):
        meta = metadata(node, nr)
        grad = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
        # a function that is differentiable once protests only if it could be differentiated again
        given.append(grad.detach().requires_grad_() if torch.is_grad_enabled() and not grad.requires_grad else grad)
    with own_backward():
        result = node.apply(*given)
    result = result if isinstance(result, tuple) else (result,)
    # there is a result for each argument of the forward, but an operand for each tensor among them
    wanted = iter([grad for grad, needed in zip(result, node.needs_input_grad, strict=False) if needed])
    return [None if below is None else next(wanted) for below, _ in node.next_functions]


def _by_engine(node: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Call a node while a backward runs.

    Called directly, a function that is written in Python may free what it saved (as compiled ones do). Hooks
    of its operands run.
    """
    outputs = [GradientEdge(node, nr) for nr, grad in enumerate(grads) if grad is not None]
    operands = list(dict.fromkeys(edge for edge in node.next_functions if edge[0] is not None))
    if not outputs or not operands:
        return [None] * len(node.next_functions)
    with cut([below for below, _ in operands]):
        vectors = [grad.unsqueeze(0) for grad in grads if grad is not None]
        found = pull(outputs, [GradientEdge(below, nr) for below, nr in operands], vectors)  # type: ignore[arg-type]
    arrived = {edge: None if grad is None else grad[0] for edge, grad in zip(operands, found, strict=True)}
    first = {edge: position for position, edge in reversed(list(enumerate(node.next_functions)))}
    # an operand that is given twice has the sum: once
    return [arrived.get(edge) if first[edge] == i else None for i, edge in enumerate(node.next_functions)]


def pull_through(node: Node, output_nr: int, position: int, vectors: Tensor) -> Tensor | None:
    """Pull vectors ``[v, *output]`` through one operation to one of its operands, ``[v, *operand]``."""
    outputs = range(len(outputs_of(node)))
    return _stacked([call_node(node, [v if nr == output_nr else None for nr in outputs])[position] for v in vectors])


def pull_to_leaf(source: GradientEdge, leaf: Tensor, vectors: Tensor) -> Tensor | None:
    """Pull vectors ``[v, *source]`` back to a leaf, ``[v, *leaf]``, past its hooks; ``None`` if nothing arrives."""
    vjp = NodeVjp([source], [get_gradient_edge(leaf)])
    found = _stacked([vjp([vector])[0] for vector in vectors])
    return None if found is None else found.to(leaf.dtype)


def _stacked(found: Sequence[Tensor | None]) -> Tensor | None:
    """Results of several vectors, which arrive all or not at all."""
    arrived = [vector for vector in found if vector is not None]
    return torch.stack(arrived) if arrived else None


class NotRepeatable(CurvoptError):
    """The backward of a function gives something else when it is called again."""


_repeatable = WeakSet[type]()


def check_functions(nodes: Iterable[Node]) -> None:
    """Call the backward of functions that users wrote twice, once a class: fields need several calls.

    Raises:
        NotRepeatable: if the calls differ, or one of them changes a ``.grad`` itself.
    """
    for node in nodes:
        kind: Any = type(node)
        if not is_of_users(node) or kind in _repeatable:
            continue
        if not _is_repeatable(node):
            raise NotRepeatable(
                f"{name_of(node)}: the backward of this torch.autograd.Function cannot be called several times, as "
                "fields need: it overwrites or frees what it saved, or adds to .grad itself, as fused kernels do. Use "
                "plain operations in its place, or let it keep these; this graph is spoilt, so run the forward again."
            )
        _repeatable.add(kind)


@torch.no_grad()
def _is_repeatable(node: Any) -> bool:
    """Whether a second call finds all as it was; true if there cannot be a first one."""
    outputs = outputs_of(node)
    leaves = {leaf for below, _ in node.next_functions if (leaf := leaf_of(below)) is not None}
    before, random = {leaf: leaf.grad for leaf in leaves}, RandomState([meta.device for meta in outputs])
    found: list[list[Tensor]] = []
    try:
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        for _ in range(2):
            with random.again():
                vectors = [torch.randn(meta.shape, dtype=meta.dtype, device=meta.device) for meta in outputs]
                found.append([grad.clone().to_dense() for grad in call_node(node, vectors) if grad is not None])
        if any(leaf.grad is None or bool(leaf.grad.any()) for leaf in leaves):
            return False
    except Exception:
        return not found
    finally:
        for leaf, grad in before.items():
            leaf.grad = grad
    first, second = found
    return len(first) == len(second) and all(
        torch.allclose(a, b, 0.01, float(0.01 * a.abs().amax()) if a.numel() else 0.0, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def loses_derivative(node: Any) -> bool:
    """Whether the backward of a function that users wrote lacks its derivative.

    Either it leaves autograd, as kernels do; or it returns what the forward has computed, as fused losses do: then it
    keeps floating-point tensors without a graph, and its result depends on no input of the function. A linear function
    that keeps a constant matrix looks the same.
    """
    if not is_of_users(node):
        return False
    with torch.enable_grad():
        ones = [torch.ones(meta.shape, dtype=meta.dtype, device=meta.device) for meta in outputs_of(node)]
        given = [one.requires_grad_() for one in ones if one.is_floating_point() or one.is_complex()]
        found = [grad for grad in call_node(node, ones) if grad is not None and grad.any()]
        along = [torch.ones_like(grad).unsqueeze(0) for grad in found]
        # a backward is linear in what it gets, so a result that does not depend on it has left autograd
        for grad, one in zip(found, along, strict=True):
            if not grad.requires_grad or all(each is None for each in pull([grad], given, [one])):
                return True
        kept = [*node.saved_tensors, *(value for value in vars(node).values() if isinstance(value, Tensor))]
        if not found or not any(t.is_floating_point() and t.ndim and not t.requires_grad for t in kept):
            return False
        below = [GradientEdge(edge, nr) for edge, nr in node.next_functions if edge is not None]
        return all(each is None for each in pull(found, below, along))
