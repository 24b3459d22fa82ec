"""What nodes saved for their backward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node


class Saved:
    """What a node saved, by name."""

    def __init__(self, node: Node):
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, f"_saved_{name}")

    def of_function(self, function: type[torch.autograd.Function]) -> tuple[Tensor, ...] | None:
        """What a function that is written in Python saved, in order; ``None`` if it is another."""
        node: Any = self._node
        return node.saved_tensors if node._forward_cls is function else None


def saved_names(node: Node) -> tuple[str, ...]:
    """The attributes by which a node gives what it saved."""
    if isinstance(node, BackwardCFunction):
        return ("saved_tensors",)
    return _names(type(node))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))
