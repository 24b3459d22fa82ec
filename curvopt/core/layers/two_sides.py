"""Weights that are a multiple of a parameter with its entries in another order: views, and copies that einsum makes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.autograd_graph.nodes import leaf_of, name_of, shape_of
from curvopt.core.jacobians.outer import Outer
from curvopt.core.layers.broadcast import broadcast_of, broadcasts
from curvopt.core.layers.functional import viewed
from curvopt.core.layers.pull_to_parameter import _between


class Views(NamedTuple):
    """How a weight views a parameter.

    Attributes:
        path: the shape of what is viewed, and the view, without values; from the weight to the parameter.
        scales: numbers by which it is multiplied.
    """

    path: Sequence[tuple[torch.Size, Tensor]]
    scales: Sequence[Tensor | float]


def views_of(source: GradientEdge, p: nn.Parameter) -> Views | None:
    """The views and numbers that lead from a parameter to a weight; ``None`` where there are other operations."""
    path, scales = list[tuple[torch.Size, Tensor]](), list[Tensor | float]()
    between, at = _between(source.node, p), source
    while leaf_of(at.node) is not p:
        node = at.node
        positions = [i for i, (below, _) in enumerate(node.next_functions) if below in between]
        if len(positions) != 1:
            return None
        below: Any = node.next_functions[positions[0]]
        view = operand = torch.empty(shape_of(*below), device="meta")
        if broadcasts(node) and operand.shape == shape_of(node):
            found = broadcast_of(node, positions[0])
            factor = None if found is None else 1.0 if found.factor is None else found.factor(*found.args)
            if found is None or factor is None or (isinstance(factor, Tensor) and factor.numel() > 1):
                return None
            scales.append(found.scale * factor)
        elif name_of(node) != "CloneBackward0":
            view = viewed(node, at.output_nr, operand)
            if view is None or view.numel() != operand.numel():
                return None
        path.append((operand.shape, view))
        at = GradientEdge(*below)
    return Views(path, scales)


class Sides:
    """Outer products with respect to a weight, as those with respect to the parameter that it views.

    Args:
        scales: numbers that multiply them.
        shape: shape of the parameter.
        transposed: whether its first axis belongs to the right side.
        orders: for each side the places of its entries, in the order of the parameter; ``None`` where they stay.
    """

    def __init__(
        self, scales: Sequence[Tensor | float], shape: torch.Size, transposed: bool, orders: Sequence[Tensor | None]
    ):
        """Keep them."""
        self.scales, self.shape, self.transposed, self.orders = scales, shape, transposed, orders
        self._right: Tensor | None = None

    @classmethod
    def of(cls, views: Views, outer: Outer) -> Sides | None:
        """Follow views back to the parameter; ``None`` where they mix entries of both sides."""
        sizes, sides = (outer.O, outer.I), (1, 0) if outer.transposed else (0, 1)
        axes = _in_axes([_Piece(sizes[side], side, 1) for side in sides], outer.shape)
        for shape, view in views.path:
            if axes is not None:
                moved = sorted(range(view.dim()), key=view.stride, reverse=True)
                axes = _in_axes([piece for axis in moved for piece in axes[axis]], shape)
        if axes is None or outer.G > 1:
            return None
        pieces = [piece for axis in axes for piece in axis]
        order, shape = [side for side, _ in itertools.groupby(piece.side for piece in pieces)], views.path[-1][0]
        if len(order) > 2:
            return None
        orders: list[Tensor | None] = [None, None]
        for side in (0, 1):
            own = [piece for piece in pieces if piece.side == side]
            if own != sorted(own, key=lambda piece: piece.stride, reverse=True):
                places = torch.zeros(1, dtype=torch.long, device=outer.left.device)
                for length, _, stride in own:
                    places = (places[:, None] + torch.arange(length, device=places.device) * stride).flatten()
                orders[side] = places
        transposed = order == [1, 0] if len(order) == 2 else shape[0] == outer.I != outer.O
        return cls(views.scales, shape, transposed, orders)

    def __call__(self, outer: Outer) -> Outer:
        """The products."""
        of_left, of_right = self.orders
        if of_right is not None and self._right is None:
            self._right = outer.right[..., of_right]
        left = outer.left if of_left is None else outer.left[..., of_left]
        for scale in self.scales:
            left = left * (scale.to(left).reshape(()) if isinstance(scale, Tensor) else scale)
        return outer.with_sides(left, self._right, self.shape, self.transposed)


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
