"""Faults and private functions of PyTorch, and how the engine deals with them.

A test fails once PyTorch has mended a fault (``tests/test_pytorch_workarounds.py``), so that its workaround can go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.autograd_graph.nodes import name_of, shape_of, walk


class Wrong(NamedTuple):
    """A derivative that is wrong in PyTorch, of nodes of a name, and what to do instead."""

    name: str
    derivative: str
    instead: str

    def nodes(self, roots: list[Node], boundary: frozenset = frozenset()) -> list[Node]:
        """Those behind some nodes."""
        return [node for node in walk(roots, boundary) if name_of(node) == self.name]


WRONG_TWICE = Wrong(
    "WeightNormInterfaceBackward0",  # as if norms were fixed
    "second derivative of weight norm",
    "normalise by other operations (`g * v / v.norm(dim=1, keepdim=True)`)",
)

WRONG_THREE_TIMES = Wrong(
    "NativeLayerNormBackward0",
    "third derivative of layer norm",
    "normalise by other operations (`F.group_norm` of rows, `(x - x.mean(-1, keepdim=True)) / ...`)",
)


def lone_biases(root: Node, boundary: frozenset = frozenset()) -> list[Node]:
    """Where biases come from of norms behind ``root`` without a weight: PyTorch drops second derivatives in them."""
    norms = ("NativeLayerNormBackward0", "NativeBatchNormBackward0")
    found = [node for node in walk([root], boundary) if name_of(node) in norms and node.next_functions[1][0] is None]
    lone = [node for node in found if node._saved_weight is None]  # type: ignore[attr-defined]
    return [bias for node in lone if (bias := node.next_functions[2][0]) is not None]


def _wrong_together(outputs: Sequence[GradientEdge | Tensor]) -> bool:
    """Whether several vectors at once may be pulled back wrongly: by PyTorch's batch norm of one image on a CPU.

    It mistakes some strides of a batch of vectors in channels-last layout. An instance norm is one of one image, too.
    """
    roots = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in outputs]
    for node in walk([root for root in roots if root is not None]):
        if name_of(node) == "NativeBatchNormBackward0":
            shape = shape_of(node)
            if len(shape) > 3 and shape[0] == 1 and node._input_metadata[0].device.type == "cpu":  # type: ignore[attr-defined]
                return True
    return False
