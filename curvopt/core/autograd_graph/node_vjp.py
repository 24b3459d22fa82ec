"""Vector-Jacobian products through the graph, node by node.

`pull_by_nodes` calls the nodes itself instead of autograd's engine: hooks of tensors, parameters and modules do not
run, and nothing is accumulated in ``.grad``. The graph stays alive.

>>> x = torch.tensor([1.0, 2.0], requires_grad=True)
>>> y = x.square()
>>> found = pull_by_nodes({(y.grad_fn, 0): torch.ones(2)}, [get_gradient_edge(x)[:2]])
>>> [vector.tolist() for vector in found.values()], x.grad
([[2.0, 4.0]], None)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from curvopt.core.autograd_graph.nodes import outputs_of, shape_of
from curvopt.core.autograd_graph.vjp import cut, pull
from curvopt.core.pytorch_workarounds import vmap_of_autograd

Place = tuple[Node, int]  # an output of a node


def consumers_first(roots: Iterable[Node], last: Collection[Node] = ()) -> list[Node]:
    """These nodes and all behind them, each after the nodes that use its outputs; nodes of ``last`` are not left."""
    order: list[Node] = []
    seen: set[Node | None] = {None}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for below, _ in () if node in last else node.next_functions:
                if below not in seen:
                    stack.append((below, False))  # type: ignore[arg-type]
    return order[::-1]


def call_node(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients at the operands of an operation, from those at its outputs."""
    return [
        # as autograd's engine does for an operand that was repeated
        grad if grad is None or below is None else _summed(grad, shape_of(below, nr))
        for grad, (below, nr) in zip(_called(node, grads), node.next_functions, strict=False)
    ]


def _summed(grad: Tensor, shape: torch.Size) -> Tensor:
    return grad if grad.shape == shape or grad.is_sparse else grad.sum_to_size(shape)


def _called(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    if isinstance(node, BackwardCFunction):
        return _by_engine(node, grads)
    result = node(*grads)  # type: ignore[operator]
    return list(result) if isinstance(result, tuple) else [result]


def _by_engine(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Call a function that is written in Python by the engine: called directly, it may free what it saved.

    Hooks of its operands run.
    """
    outputs = [GradientEdge(node, nr) for nr, grad in enumerate(grads) if grad is not None]
    operands = list(dict.fromkeys(place for place in node.next_functions if place[0] is not None))
    if not outputs or not operands:
        return [None] * len(node.next_functions)
    with cut([below for below, _ in operands]):
        vectors = [grad.unsqueeze(0) for grad in grads if grad is not None]
        found = pull(outputs, [GradientEdge(below, nr) for below, nr in operands], vectors)  # type: ignore[arg-type]
    arrived = {place: None if grad is None else grad[0] for place, grad in zip(operands, found, strict=True)}
    first = {place: position for position, place in reversed(list(enumerate(node.next_functions)))}
    # an operand that is given twice has the sum: once
    return [arrived.get(place) if first[place] == i else None for i, place in enumerate(node.next_functions)]


def pull_by_nodes(
    vectors: Mapping[Place, Tensor], targets: Collection[Place], order: Sequence[Node] | None = None
) -> dict[Place, Tensor]:
    """Pull vectors back from outputs of nodes to others; those at which nothing arrives are left out.

    A target does not stop a vector: behind it may be another one.

    Args:
        vectors: by the outputs.
        targets: the other outputs.
        order: the nodes behind the vectors, each after those that use its outputs, if they are known.
    """
    ends = {node for node, _ in targets}
    order = consumers_first([node for node, _ in vectors]) if order is None else order
    reached, leads = set(ends), set[Node]()  # further to a target
    for node in reversed(order):
        if not reached.isdisjoint([below for below, _ in node.next_functions]):
            leads.add(node)
            reached.add(node)
    arrived: dict[Place, Tensor] = dict(vectors)
    found: dict[Place, Tensor] = {}
    for node in order:
        if node not in leads and node not in ends:
            continue
        grads = [arrived.pop((node, nr), None) for nr in range(len(outputs_of(node)))]
        found.update(((node, nr), g) for nr, g in enumerate(grads) if g is not None and (node, nr) in targets)
        if node in leads and any(grad is not None for grad in grads):
            for below, grad in zip(node.next_functions, call_node(node, grads), strict=False):
                if grad is not None and below[0] is not None and (below[0] in leads or below[0] in ends):
                    place = below[0], below[1]
                    arrived[place] = arrived[place] + grad if place in arrived else grad
    return found


def pull_together(node: Node, output_nr: int, position: int, vectors: Tensor) -> Tensor | None:
    """Pull vectors ``[v, *output]`` through one operation to one of its operands, ``[v, *operand]``."""
    outputs = len(outputs_of(node))

    def single(vector: Tensor) -> Tensor | None:
        return call_node(node, [vector if nr == output_nr else None for nr in range(outputs)])[position]

    return _together(single, vectors, not isinstance(node, BackwardCFunction))


def pull_to_leaf(source: Place, leaf: Tensor, vectors: Tensor) -> Tensor | None:
    """Pull vectors ``[v, *source]`` back to a leaf, ``[v, *leaf]``, past its hooks; ``None`` if nothing arrives."""
    target = get_gradient_edge(leaf)[:2]

    def single(vector: Tensor) -> Tensor | None:
        return pull_by_nodes({source: vector}, [target]).get(target)

    return _together(single, vectors, not any(isinstance(n, BackwardCFunction) for n in consumers_first([source[0]])))


def _together(single: Callable[[Tensor], Tensor | None], vectors: Tensor, batched: bool) -> Tensor | None:
    if batched and not torch.is_anomaly_enabled():
        try:
            found = vmap_of_autograd(single)(vectors)
            if found is None or _is_linear(single, vectors, found):
                return found
        except (RuntimeError, ValueError):  # vmap cannot enter an operation
            pass
    found = [single(vector) for vector in vectors]
    return None if found[0] is None else torch.stack([x for x in found if x is not None])


def _is_linear(single: Callable[[Tensor], Tensor | None], vectors: Tensor, found: Tensor) -> bool:
    """Whether products that were computed together have the sum that they should: some batching rules are wrong."""
    sizes = found.detach().abs().reshape(len(found), -1).amax(1).clamp(min=torch.finfo(found.dtype).tiny).to(vectors)
    weights = torch.randn(len(vectors), device="cpu", generator=torch.Generator().manual_seed(0)).to(vectors) / sizes
    of_sum, sum_of = single(torch.tensordot(weights, vectors, 1)), torch.tensordot(weights.to(found), found, 1)
    if of_sum is None or not of_sum.numel():
        return True
    tolerance = torch.finfo(found.dtype).eps ** 0.5 * of_sum.abs().max()
    return not bool(((sum_of - of_sum).abs() > tolerance).any())
