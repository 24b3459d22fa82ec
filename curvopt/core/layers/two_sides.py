"""Operations on a weight that act on the rows and columns of its Jacobian by themselves.

The Jacobian of the weight W is ``sum_s left ⊗ right``, and that of the parameter p is::

    W = a[:, None] * p    (a * left) ⊗ right             W = p * b    left ⊗ (b * right)
    W = A @ p             (A^T left) ⊗ right             W = p @ B    left ⊗ (B right)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.graph.nodes import Saved, leaf_of, name_of, shape_of
from curvopt.core.layers.broadcast import Broadcast, broadcast_of, broadcasts
from curvopt.core.layers.functional import viewed
from curvopt.core.layers.pull_to_parameter import _between
from curvopt.core.products.outer import Outer

#: A product with a side.
Step = tuple[Callable[[Tensor, Tensor], Tensor], Tensor]


class Passed(NamedTuple):
    """An operation on the way from a weight back to a parameter.

    Attributes:
        operand: where its operand was computed; ``None`` for the parameter.
        shape: shape of that.
        what: its kind: a product (the position, and the other matrix), a scaling, or a view.
    """

    operand: GradientEdge | None
    shape: torch.Size
    what: tuple[int, Tensor] | Broadcast | Tensor


def _way_back(source: GradientEdge, p: nn.Parameter) -> list[Passed]:
    """The operations from a weight back to the parameter, as far as these are one after the other, and known."""
    path: list[Passed] = []
    between, at = _between(source.node, p), source
    while at is not None:
        node = at.node
        positions = [i for i, (below, _) in enumerate(node.next_functions) if below in between]
        if len(positions) != 1:
            break
        (position,) = positions
        below: Any = node.next_functions[position]
        shape, what = shape_of(*below), None
        if name_of(node) == "MmBackward0":
            what = position, Saved(node).self if position else Saved(node).mat2
        elif name_of(node) == "CloneBackward0":
            what = torch.empty(shape, device="meta")
        elif not broadcasts(node):
            what = viewed(node, at.output_nr, torch.empty(shape, device="meta"))
            what = what if what is None or what.numel() == shape.numel() else None
        elif shape == shape_of(node):
            what = broadcast_of(node, position)
        if what is None:
            break
        at = None if leaf_of(below[0]) is p else GradientEdge(*below)
        path.append(Passed(at, shape, what))
    return path


class Sides:
    """The way from a weight back to the parameter, as far as it acts on the sides of outer products by themselves.

    Numbers, factors that are one for a whole row or column, products with other matrices, and views do; so does what
    moves the entries of rows, or of columns, alone.

    Args:
        source: where the weight was computed.
        outer: products with respect to the weight.

    Attributes:
        source: where the rest was computed; ``None`` if nothing is left.
    """

    def __init__(self, source: GradientEdge, outer: Outer):
        """Begin at the weight."""
        self.source: GradientEdge | None = source
        self._shape, self._transposed, self._sizes = outer.shape, outer.transposed, [outer.O, outer.I]
        self._has_groups = outer.G > 1
        self._steps: tuple[list[Step], list[Step]] = [], []
        self._right, self._one = None, outer.left.new_ones(())

    def along(self, path: Sequence[Passed]) -> Sides:
        """Go the operations from the weight on, as far as they act on the sides by themselves. Returns itself."""
        if self._move(path):
            return self
        for passed in path:
            if not self._pass(passed):
                break
            self.source = passed.operand
        return self

    def __call__(self, outer: Outer) -> Outer:
        """The products with respect to where the rest of the path begins."""
        left = _apply(self._steps[0], outer.left)
        if self._steps[1] and self._right is None:
            self._right = _apply(self._steps[1], outer.right)
        return outer.with_sides(left, self._right, self._shape, self._transposed)

    def _move(self, path: Sequence[Passed]) -> bool:
        """Remember in which order the sides have the entries of the parameter, if the path does nothing but move these.

        ``torch.einsum`` copies a weight whose axes it sums over in another order.
        """
        if self._has_groups or not path or path[-1].operand is not None:
            return False
        pieces = [_Piece(self._sizes[side], side, 1) for side in self._sides]
        axes = _in_axes(pieces, self._shape)
        for _, shape, what in path:
            if axes is None or not isinstance(what, Tensor) or what.numel() != prod(shape):
                return False
            moved = sorted(range(what.dim()), key=what.stride, reverse=True)
            axes = _in_axes([piece for axis in moved for piece in axes[axis]], shape)
        if axes is None:
            return False
        pieces = [piece for axis in axes for piece in axis]
        order = [side for side, _ in itertools.groupby(piece.side for piece in pieces)]
        if len(order) > 2:
            return False
        for side in (0, 1):
            own = [piece for piece in pieces if piece.side == side]
            if own != sorted(own, key=lambda piece: piece.stride, reverse=True):
                places = torch.zeros(1, dtype=torch.long, device=self._one.device)
                for length, _, stride in own:
                    steps = torch.arange(length, device=places.device) * stride
                    places = (places[:, None] + steps).flatten()
                self._steps[side].append((_in_order, places))
        self._shape, self.source, (O, I) = path[-1].shape, None, self._sizes  # noqa: E741
        self._transposed = order == [1, 0] if len(order) == 2 else self._shape[0] == I != O
        return True

    def _pass(self, passed: Passed) -> bool:
        """Remember how an operation acts on the sides, if it does."""
        what = passed.what
        if isinstance(what, Broadcast):
            return self._pass_factor(what)
        if isinstance(what, Tensor):
            if what.shape != self._shape:
                return False
            # the transpose of a single row has the order of the row in memory
            row = 1 in what.shape and passed.shape != what.shape and list(passed.shape) == [*what.shape[::-1]]
            swapped = row or not what.is_contiguous()
            if swapped and not (self._is_matrix and what.mT.is_contiguous()):
                return False
            self._transposed = self._transposed != swapped
        elif self._is_matrix:
            position, other = what
            # a matrix that is multiplied from the right acts on the side of the columns
            side, other = self._sides[1 - position], other if position else other.mT
            self._steps[side].append((torch.matmul, other))
            self._sizes[side] = other.shape[1]
        else:
            return False
        self._shape = passed.shape
        return True

    def _pass_factor(self, found: Broadcast) -> bool:
        factor = found.scale * (self._one if found.factor is None else found.factor(*found.args))
        lengths = [*[1] * (len(self._shape) - factor.dim()), *factor.shape]
        rows, columns = self._sides
        if factor.numel() == 1:
            side, factor = 0, factor.reshape(())
        elif self._has_groups or self._shape[0] != self._sizes[rows]:
            return False
        elif lengths[0] == factor.numel():
            side, factor = rows, factor.flatten()
        elif lengths[0] == 1:
            side, factor = columns, factor.expand(1, *self._shape[1:]).flatten()
        else:
            return False
        self._steps[side].append((torch.mul, factor))
        return True

    @property
    def _sides(self) -> tuple[int, int]:
        """The sides, 0 for the left one, of the first axis and of the others."""
        return (1, 0) if self._transposed else (0, 1)

    @property
    def _is_matrix(self) -> bool:
        return not self._has_groups and list(self._shape) == [self._sizes[side] for side in self._sides]


class _Piece(NamedTuple):
    """A part of an axis: its length, the side of an outer product to which it belongs, and the stride there."""

    length: int
    side: int
    stride: int


def _in_axes(pieces: Sequence[_Piece], shape: Sequence[int]) -> list[list[_Piece]] | None:
    """Pieces put together, and split, to axes of some lengths; ``None`` where they cannot be."""
    rest = [piece for piece in pieces if piece.length > 1][::-1]
    axes: list[list[_Piece]] = []
    for length in shape:
        axes.append([])
        while length > 1:
            n, side, stride = rest.pop()
            if n > length:
                if n % length:
                    return None
                rest.append(_Piece(n // length, side, stride))
                n, stride = length, stride * (n // length)
            if length % n:
                return None
            axes[-1].append(_Piece(n, side, stride))
            length //= n  # noqa: PLW2901 - what is left of it
    return axes


def _apply(steps: Sequence[Step], side: Tensor) -> Tensor:
    for multiply, other in steps:
        side = multiply(side, other.to(side) if other.is_floating_point() else other)
    return side


def _in_order(side: Tensor, order: Tensor) -> Tensor:
    return side[..., order]
