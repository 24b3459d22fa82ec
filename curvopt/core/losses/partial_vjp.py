"""Vector-Jacobian products node by node, outside of PyTorch's engine: no hook of a tensor, module or node runs.

The graph stays as it is. Only hooks that unpack saved tensors run (a checkpoint recomputes its block).

>>> from torch.autograd.graph import get_gradient_edge
>>> z = 1 * torch.tensor([1.0, 2.0], requires_grad=True)
>>> vjp = NodeVjp.between([get_gradient_edge(z.square().sum())], [get_gradient_edge(z)])
>>> [vector.tolist() for vector in vjp([torch.tensor(1.0)])]
[[2.0, 4.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.autograd_graph.node_vjp import Place
from curvopt.core.autograd_graph.nodes import is_reentrant_checkpoint, metadata, name_of, outputs_of
from curvopt.errors import CurvoptError


class NodeVjp:
    """Products of vectors with the Jacobian between two sets of edges.

    Args:
        outputs: where the vectors are.
        inputs: where they are pulled back to. A path ends at the first of them.

    Attributes:
        nodes: all nodes on paths from the outputs that do not pass an input.
        order: those that lead to an input, in the order in which vectors pass them.
    """

    def __init__(self, outputs: Sequence[Place], inputs: dict[Place, int]):
        """Begin without nodes."""
        self.outputs, self.inputs = outputs, inputs
        self.nodes, self.order, self._leading = list[Node](), list[Node](), set[Node]()

    @classmethod
    def between(cls, outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge]) -> NodeVjp:
        """Read the graph between two sets of edges."""
        vjp = cls(
            [(edge.node, edge.output_nr) for edge in outputs],
            {(edge.node, edge.output_nr): i for i, edge in enumerate(inputs)},
        )
        seen = set[Node]()
        stack = [(node, False) for node, nr in vjp.outputs if (node, nr) not in vjp.inputs]
        while stack:
            node, done = stack.pop()
            if done:
                vjp.nodes.append(node)
                if any(edge in vjp.inputs or edge[0] in vjp._leading for edge in node.next_functions):
                    vjp._leading.add(node)
                    vjp.order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(e[0], False) for e in node.next_functions if e[0] is not None and e not in vjp.inputs]
        vjp.order.reverse()
        return vjp

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
            grad = grad.sum_to_size(meta.shape).to(meta.device, dtype)  # as the engine does after each node
            if arrived is not None:
                arrived(node, grad)
            grads[i] = grad if before is None else before + grad

        device = vectors[0].device.type if vectors else "cpu"
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            for (node, nr), vector in zip(self.outputs, vectors, strict=True):
                arrive(node, nr, vector)
            for node in self.order:
                if node in waiting:
                    for (following, nr), grad in call_node(node, waiting.pop(node)):
                        if following is not None and grad is not None:
                            arrive(following, nr, grad)
        return found


def call_node(node: Any, grads: Sequence[Tensor | None]) -> Iterable[tuple[tuple[Node | None, int], Tensor | None]]:
    """The gradients that a node makes of those at its outputs, each with the edge where it goes."""
    if name_of(node) == "ToCopyBackward0":  # without rounding to the precision that was cast from
        return zip(node.next_functions, grads, strict=True)
    if is_reentrant_checkpoint(node):  # it would run the engine, and accumulate
        raise CurvoptError(
            "A torch.utils.checkpoint between the network's output and the loss needs use_reentrant=False."
        )
    if not isinstance(node, BackwardCFunction):
        result = node(*grads)
        return zip(node.next_functions, result if isinstance(result, tuple) else [result], strict=True)
    given = []
    for nr, grad in enumerate(grads):
        meta = metadata(node, nr)
        grad = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
        # a function that is differentiable once protests only if it could be differentiated again
        given.append(grad.detach().requires_grad_() if torch.is_grad_enabled() and not grad.requires_grad else grad)
    result = node.apply(*given)
    result = result if isinstance(result, tuple) else (result,)
    # there is a result for each argument of the forward, but an edge for each tensor among them
    wanted = [grad for grad, needed in zip(result, node.needs_input_grad, strict=False) if needed]
    return zip([edge for edge in node.next_functions if edge[0] is not None], wanted, strict=True)
