"""What nodes saved for their backward, also where an activation checkpoint has let go of it.

Such a checkpoint computes its whole block again for whoever asks for one tensor of it, outside of a backward each time
anew, and keeps the others for later. So what one block saved is taken out at once, and dropped where nobody wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from curvopt.core.residuals import name_of, pull, walk
from curvopt.core.uses import Use, of_checkpoint, version

Place = tuple[Node, str]

_names: dict[str, tuple[str, ...]] = {}
_readers: list[Blocks] = []


class Saved:
    """What a node saved, by name."""

    def __init__(self, node: Node):
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return read(self._node, f"_saved_{name}")

    def of_function(self, function: type[torch.autograd.Function]) -> tuple[Tensor, ...] | None:
        """What a function that is written in Python saved, in order; ``None`` if it is another."""
        node: Any = self._node
        return read(node, "saved_tensors") if node._forward_cls is function else None


def read(node: Node, name: str) -> Any:
    """An attribute by which a node gives what it saved."""
    block = _block(node, name) if _readers else None
    return getattr(node, name) if block is None else _readers[-1].read((node, name), block)


def names_of(node: Node) -> tuple[str, ...]:
    """The attributes by which a node gives what it saved."""
    if isinstance(node, BackwardCFunction):
        return ("saved_tensors",)
    name = name_of(node)
    if name not in _names:
        _names[name] = tuple(attribute for attribute in dir(node) if attribute.startswith("_saved_"))
    return _names[name]


def is_tensor(node: Node, name: str) -> bool:
    """Whether such an attribute gives tensors, told without reading it."""
    return hasattr(node, _raw(name))


def inputs_left(use: Use, node: Any) -> tuple[Tensor, ...]:
    """The inputs that a use left to the graph, where ``node`` gives its output.

    Raises:
        CurvoptError: if they have changed since, which autograd does not notice where they were computed again.
    """
    left = use.left
    if left is None:
        return ()
    if callable(left):
        return left()
    for _ in range(left.depth):
        node = node.next_functions[0][0]
    x = read(node, left.name) if left.hooked else getattr(node, left.name)
    if version(x) > left.version:  # autograd sees to that, but in checkpoints
        raise use.modified()
    return (x,)


class Blocks:
    """A context in which the block of a checkpoint is computed again once at most for all that is read of it.

    Args:
        roots: the nodes behind which it lies.
        wanted: those of all nodes that may be read.
    """

    def __init__(self, roots: Sequence[Node], wanted: Callable[[Sequence[Node]], Collection[Node]]):
        """Nothing has been read yet."""
        self._find, self._roots = wanted, list(roots)
        self._kept: dict[Place, Any] = {}
        self._last: Any = None  # the block of what is kept

    def __enter__(self) -> Blocks:
        """Read by this."""
        _readers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop that."""
        _readers.pop()

    @cached_property
    def _blocks(self) -> dict[Any, list[tuple[Node, str, bool]]]:
        """What each block saved, and whether it may be read."""
        nodes = list(walk(self._roots))
        wanted = self._find(nodes)
        found: dict[Any, list[tuple[Node, str, bool]]] = {}
        for node in nodes:
            for name in names_of(node):
                block = _block(node, name)
                if block is not None:
                    found.setdefault(block, []).append((node, name, node in wanted))
        return found

    def read(self, place: Place, block: Any) -> Any:
        """What a node of a block saved."""
        if place not in self._kept:
            if block is not self._last:
                self._kept.clear()
            self._last = block
            x = torch.zeros((), requires_grad=True)
            with torch.enable_grad():
                y = x.view_as(x)
            # in a backward, in which the block is computed again for the first of them only
            y.register_hook(lambda _: self._take_out(place, block))
            pull([y], [x], [torch.zeros(1)])
        return self._kept[place]

    def _take_out(self, asked: Place, block: Any) -> None:
        for node, name, wanted in self._blocks[block]:
            try:
                value = getattr(node, name)
            except RuntimeError:
                if (node, name) == asked:
                    raise
                continue  # the backward has passed it
            if wanted or (node, name) == asked:
                self._kept[node, name] = value


def _raw(name: str) -> str:
    return f"_raw_{name.lstrip('_')}"


def _block(node: Node, name: str) -> Any:
    """What tells the block of a checkpoint that has to be computed again for a tensor; ``None`` if none has to."""
    try:
        raw = getattr(node, _raw(name), None)
    except RuntimeError:  # the backward has passed it
        return None
    for each in raw if isinstance(raw, tuple) else (raw,):
        hook = getattr(each, "unpack_hook", None)
        if hook is not None and of_checkpoint(hook):
            return hook
    return None
