"""Nodes of the autograd graph: names, shapes, leaves, saved tensors, and walks over them.

>>> y = torch.tanh(torch.ones(2, 3, requires_grad=True))
>>> operation(y.grad_fn), shape_of(y.grad_fn)
('TANH', torch.Size([2, 3]))
>>> [leaf_of(node) is not None for node in walk([y.grad_fn])]
[False, True]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

#: PyTorch's functions in Python: for full backward hooks of modules, for inputs of modules that are sharded, and for
#: outputs of modules in a ``DistributedDataParallel``.
_IDENTITIES = ("BackwardHookFunctionBackward", "RegisterPostBackwardFunctionBackward", "_DDPSinkBackward")


def operation(node: Node) -> str:
    """Upper-case name of the operation a node differentiates, e.g. ``TANH``; functions of users keep a small letter."""
    return _operation(type(node).name(node), isinstance(node, BackwardCFunction))


def by_operation(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """The nodes of each operation."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(_operation(type(node).name(node), isinstance(node, BackwardCFunction)), []).append(node)
    return found


@cache
def _operation(name: str, in_python: bool) -> str:
    if not in_python:
        return re.sub(r"BACKWARD\d*$", "", name.rsplit("::", 1)[-1].upper())
    if name in _IDENTITIES:
        return "ALIAS"
    return "SYNCBATCHNORM" if name == "SyncBatchNormBackward" else f"user's {name}"


def name_of(node: Node) -> str:
    """The name of a node; ``node.name`` may be an attribute of a user's function."""
    return type(node).name(node)


def is_of_users(node: Node) -> bool:
    """Whether a node is a ``torch.autograd.Function`` that is not PyTorch's."""
    return isinstance(node, BackwardCFunction) and not type(node)._forward_cls.__module__.startswith("torch.")  # type: ignore[attr-defined]


def leaf_of(node: Node | None) -> Any:
    """The leaf tensor whose gradient a node accumulates, if it does; what users keep on their functions is none."""
    return None if isinstance(node, BackwardCFunction) else getattr(node, "variable", None)


def is_sink(node: Node) -> bool:
    """Whether a node is the identity that ``DistributedDataParallel`` may put behind the outputs of its module."""
    return isinstance(node, BackwardCFunction) and name_of(node) == "_DDPSinkBackward"


def is_compiled(node: Node) -> bool:
    """Whether a node is what ``torch.compile`` made of many operations."""
    return name_of(node).startswith("CompiledFunction")


def walk(roots: list[Node], boundary: frozenset = frozenset(), last: Collection[Node] = ()) -> list[Node]:
    """Every node reachable from ``roots``, once; none of ``boundary`` or behind it, none behind ``last``."""
    stack = [root for root in dict.fromkeys(roots) if root not in boundary]
    seen, found = set(stack), list[Node]()
    while stack:
        node = stack.pop()
        found.append(node)
        for following, _ in () if node in last else node.next_functions:
            if following is not None and following not in seen and following not in boundary:
                seen.add(following)
                stack.append(following)
    return found


def leads_to(root: Node, targets: Collection[Node]) -> bool:
    """Whether any of the targets is reachable from ``root``, or is it."""
    return root in targets or leads_further_to(root, targets)


def leads_further_to(root: Node, targets: Collection[Node]) -> bool:
    """Whether any of the targets is reachable from ``root``; the nearest come first."""
    nodes, seen = [root], {root}
    for node in nodes:
        for following, _ in node.next_functions:
            if following in targets:
                return True
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return False


def metadata(node: Any, nr: int = 0) -> Any:
    """Shape, dtype and device of an output of a node."""
    return node._input_metadata[nr]


def outputs_of(node: Any) -> Sequence[Any]:
    """Shape, dtype and device of each output of a node."""
    return node._input_metadata


def saved(node: Any, name: str, default: Any = None) -> Any:
    """The value that a node saved under a name; a default if there is none."""
    return getattr(node, f"_saved_{name}", default)


def signed(number: int) -> int:
    """An axis, or an index, that a node saved: negative ones are kept as unsigned numbers."""
    return number - 2**64 if number >= 2**63 else number


def shape_of(node: Any, nr: int = 0) -> torch.Size:
    """Shape of an output of a node."""
    return torch.Size(node._input_metadata[nr].shape)


def operand_shapes(node: Any) -> list[torch.Size | None]:
    """Shapes of the operands of a node, ``None`` for constants."""
    operands = node.next_functions
    return [None if below is None else torch.Size(below._input_metadata[nr].shape) for below, nr in operands]


def is_complex(node: Any, nr: int = 0) -> bool:
    """Whether an output of a node has complex entries."""
    return node._input_metadata[nr].dtype.is_complex


def precisions(nodes: list[Node]) -> set[torch.dtype]:
    """The floating dtypes behind nodes: under autocast not only the dtypes of parameters and outputs."""
    return {
        metadata.dtype
        for node in walk(nodes)
        for metadata in node._input_metadata  # type: ignore[attr-defined]
        if metadata.dtype.is_floating_point
    }


class Saved:
    """The values that a node saved, as attributes. Each is unpacked once: a checkpoint may give it out only once."""

    def __init__(self, node: Node):
        self._node = node

    def __getattr__(self, name: str) -> Any:
        value = vars(self)[name] = getattr(self._node, f"_saved_{name}")
        return value

    def of_function(self, function: type[torch.autograd.Function]) -> tuple[Tensor, ...] | None:
        """The tensors that a function in Python saved, in order; ``None`` if the node is of another function."""
        node: Any = self._node
        return node.saved_tensors if node._forward_cls is function else None


Edge = tuple[Node, int]  # an output of a node


def consumers_first(
    roots: Iterable[Node],
    last: Collection[Node] = (),
    ends: Collection[Edge] = (),
    through: Collection[Node] | None = None,
) -> list[Node]:
    """These nodes and all behind them, each after the nodes that use its outputs.

    None behind the nodes ``last``, or reached by an edge of ``ends`` only, or, if these are given, not of ``through``.
    """
    order: list[Node] = []
    seen: set[Node | None] = {None}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen and (through is None or node in through):
            seen.add(node)
            stack.append((node, True))
            for edge in () if node in last else node.next_functions:
                if edge[0] not in seen and edge not in ends:
                    stack.append((edge[0], False))  # type: ignore[arg-type]
    return order[::-1]
