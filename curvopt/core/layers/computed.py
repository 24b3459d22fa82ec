"""The rules of parameters that are used outside of modules with a rule, as they are or computed from a parameter.

::

    y = x * p            repeated for the samples      Dense, summed over what p is repeated for
    y = x W^T, W = f(p)  a weight that is computed     Outer of W, and back to p:

        W = a[:, None] * p    (a * left) ⊗ right       W = p * b    left ⊗ (b * right)
        W = A @ p             (A^T left) ⊗ right       W = p @ B    left ⊗ (B right)
        W = tanh(p)           each entry times its slope
        W = p / p.norm()      autograd pulls the products of W back to p

    any other            one sample after the other    Dense, at N times the cost of the operation
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.layers.operations import Broadcast, broadcast_of, broadcasts, viewed
from curvopt.core.layers.rule import Jacobians, Rule, tensors
from curvopt.core.nodes import Saved, consumers_first, leaf_of, metadata, name_of, operation, shape_of, walk
from curvopt.core.nonlinear import nonlinear_operations
from curvopt.core.operations import BY_ENTRY
from curvopt.core.products.base import Dense, Jacobian, cast
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import PulledBack, Scaled, from_single_samples
from curvopt.core.record import ModuleCall, owned_parameters
from curvopt.core.vjp import pull, pull_to_leaf, pull_together

if TYPE_CHECKING:
    from curvopt.core.graph import CallInGraph


class BroadcastRule(Rule):
    """An operand that an operation repeats for every sample, times a number, and perhaps a factor for each sample.

    Args:
        p: the parameter.
        source: the edge at which the operand was computed from it; ``None`` for the parameter itself.
        shape: shape of the operand.
        operation: number and factor.
    """

    def __init__(self, p: nn.Parameter, source: GradientEdge | None, shape: Sequence[int], operation: Broadcast):
        """Keep them."""
        self.p, self.source, self.shape, self.operation = p, source, tuple(shape), operation

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.operation.linear and is_linear(self.source, self.p)

    @cached_property
    def pulls_back(self) -> bool:  # type: ignore[override]
        return not (self.source is None or is_by_entry(self.source, self.p))

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        shape, axis = call.shapes[0], 1 if how == "axis" else 0
        given = all(x.shape[: axis + 1] == shape[: axis + 1] for x in tensors(call))
        return given and len(shape) > axis and self._sizes(len(shape))[axis] == 1

    def _sizes(self, dims: int) -> list[int]:
        """Lengths of the operand along the axes of the output."""
        return [1] * (dims - len(self.shape)) + list(self.shape)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        if self.operation.factor is not None:
            grad = grad * self.operation.factor(*call.args).to(grad.dtype)
        sizes = self._sizes(grad.dim() - 1)
        if call.steps == "axis":
            sizes[:2] = sizes[1::-1]
        if sizes[0] == 1:
            values = grad.unflatten(1, (N, -1))
        else:  # rows of its own for each sample, or for the only one
            values = grad.new_zeros(len(grad), N, *grad.shape[1:])
            for n, rows in enumerate(grad.split(grad.shape[1] // N, 1)):
                values[:, n, n * rows.shape[1] : (n + 1) * rows.shape[1]] = rows
        axes = [i for i, size in enumerate(sizes, 2) if size == 1]
        values = (values.sum(axes) if axes else values) * self.operation.scale
        jacobian = Dense(values.reshape(len(grad), N, *self.shape))
        return dict.fromkeys(names, through(call, self.source, self.p, jacobian))


class ComputedWeightRule(Rule):
    """An operation with a weight that was computed from the parameter.

    Args:
        rule: of the operation with a weight of its own, by the name ``weight``.
        p: the parameter.
        source: where the weight was computed; ``None`` if it is the parameter, with axes moved perhaps.
        start: the first row of the parameter that is the weight; ``None`` if all rows are.
    """

    def __init__(self, rule: Rule, p: nn.Parameter, source: GradientEdge | None, start: int | None = None):
        """Keep them, and read what nodes saved: while the graph is passed, checkpoints give that out only once."""
        self.rule, self.p, self.source, self.start = rule, p, source, start
        self._way = [] if source is None else way_back(source, p)

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.rule.linear and is_linear(self.source, self.p)

    @cached_property
    def pulls_back(self) -> bool:  # type: ignore[override]
        whole = self._way and self._way[-1].operand is None
        return not (self.source is None or whole or is_by_entry(self.source, self.p))

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        return self.rule.takes_steps(call, how)

    def output_axis(self, call: ModuleCall, index: int) -> int | Tensor | None:
        return self.rule.output_axis(call, index)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        jacobian, source = self.rule.jac_t(call, grads, ["weight"], N)["weight"], self.source
        if source is not None and isinstance(jacobian, Outer):
            if "sides" not in call.cache:
                call.cache["sides"] = Sides(source, jacobian).along(self._way)
            sides = call.cache["sides"]
            jacobian, source = sides(jacobian), sides.source
        if self.start is not None and isinstance(jacobian, Outer):
            others = self.start, len(self.p) - self.start - jacobian.O
            jacobian = jacobian.with_sides(F.pad(jacobian.left, others), None, self.p.shape, False)
        return dict.fromkeys(names, through(call, source, self.p, jacobian))


class PerSampleRule(Rule):
    """An operation with an operand that all samples share: what arrives at the operand from each of them.

    Args:
        node: of the operation.
        output_nr: which output of it has the samples.
        position: of the operand.
        p: the parameter from which the operand was computed; ``None`` for the operand itself.
    """

    sample_by_sample = True
    takes_any_dtype = True

    def __init__(self, node: Node, output_nr: int, position: int, p: nn.Parameter | None = None):
        self.node, self.output_nr, self.position, self.p = node, output_nr, position, p

    @property
    def edge(self) -> GradientEdge:
        """The edge of the operand."""
        return GradientEdge(*self.node.next_functions[self.position])  # type: ignore[arg-type]

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        at = metadata(self.node, self.output_nr)
        values = pull_together(self.node, self.output_nr, self.position, grad.to(at.dtype))
        shape = shape_of(self.edge.node, self.edge.output_nr)
        below = metadata(self.edge.node, self.edge.output_nr)
        if values is None:
            values = torch.zeros(len(grad), *shape, dtype=below.dtype, device=grad.device)
        if self.p is not None and getattr(self.edge.node, "variable", None) is not self.p:
            pulled = pull_to_parameter(self.edge, self.p, values)
            values = self.p.new_zeros(len(grad), *self.p.shape) if pulled is None else pulled
        return dict.fromkeys(names, Dense(values.unsqueeze(1)))


class SharedCallRule(Rule):
    """A call of a module that all samples share, or whose samples mix later; samples are separated where it is used.

    Args:
        rule: of the module.
        call: the call.
        edges: where its outputs' gradients arrive, by the number of the output.
        operands: the operations behind which the call is.
        sources: where the operands were computed that lead to the call.
    """

    takes_any_dtype = True

    def __init__(
        self,
        rule: Rule,
        call: ModuleCall,
        edges: dict[int, GradientEdge],
        operands: Sequence[CallInGraph],
        sources: Sequence[GradientEdge],
    ):
        self.rule, self.call, self.edges, self.operands, self.sources = rule, call, edges, operands, sources
        ends = {edge.node for edge in edges.values()}
        #: Whether the parameters enter linearly up to where the samples are.
        self.linear = (
            rule.linear and all(operand.rule.linear for operand in operands) and not nonlinear_operations(sources, ends)
        )

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        given: list[tuple[GradientEdge, Tensor]] = []
        for operand, source, grad in zip(self.operands, self.sources, grads, strict=True):
            if grad is not None:
                jacobian = operand.jac_t([grad])["weight"]
                given.append((source, jacobian.dense().flatten(0, 1)))
        sources, vectors = [source for source, _ in given], [vectors for _, vectors in given]
        found = pull(sources, list(self.edges.values()), vectors)
        dtype = next(iter(owned_parameters(self.call.module).values())).dtype
        arrived: list[Tensor | None] = [None] * len(self.call.shapes)
        for index, grad in zip(self.edges, found, strict=True):
            arrived[index] = None if grad is None else cast(grad, dtype)
        if all(grad is None for grad in arrived):
            index, like = min(self.edges), given[0][1]
            arrived[index] = torch.zeros(len(like), *self.call.shapes[index], dtype=dtype, device=like.device)
        own = self.call.in_precision(dtype)
        if self.rule.is_single(own):
            own, arrived = own.batched(), [None if grad is None else grad.unsqueeze(1) for grad in arrived]
        jacobians = self.rule.jac_t(own, arrived, names, 1)
        return {name: from_single_samples(jacobian, N) for name, jacobian in jacobians.items()}


def through(call: ModuleCall, source: GradientEdge | None, p: nn.Parameter, jacobian: Jacobian) -> Jacobian:
    """Products of a parameter, from those of a tensor that was computed from it."""
    shape = (jacobian.V, jacobian.N, *p.shape)
    if source is None:
        return jacobian if isinstance(jacobian, Outer) and p.dim() > 1 else Dense(jacobian.dense().reshape(shape))
    if "slopes" not in call.cache:
        call.cache["slopes"] = _pull(source, p, torch.ones_like(p))[0] if is_by_entry(source, p) else None
    slopes = call.cache["slopes"]
    if slopes is None:
        return PulledBack(jacobian, partial(_pull, source, p), p, source)
    if isinstance(jacobian, Outer):
        return Scaled(jacobian, slopes, source)
    return Dense(jacobian.dense().reshape(shape) * slopes)


def _pull(source: GradientEdge, p: nn.Parameter, vectors: Tensor) -> Tensor:
    shape = shape_of(source.node, source.output_nr)
    found = pull_to_parameter(source, p, vectors.reshape(-1, *shape))
    return p.new_zeros(len(vectors), *p.shape) if found is None else found


def pull_to_parameter(source: GradientEdge, p: nn.Parameter, vectors: Tensor) -> Tensor | None:
    """Pull vectors ``[v, *source]`` back to a parameter past its hooks, ``[v, *p]``; ``None`` if nothing arrives."""
    if p._backward_hooks:
        return pull_to_leaf(source, p, vectors)
    return pull([source], [p], [vectors])[0]


def is_by_entry(source: GradientEdge, p: nn.Parameter) -> bool:
    """Whether each entry of the tensor at an edge is a function of that entry of a parameter."""
    between = nodes_between(source.node, p)
    operations = [node for node in between if leaf_of(node) is not p]
    inputs = [at for node in operations for at in node.next_functions if at[0] in between]
    shapes = {shape_of(*at) for at in [(source.node, source.output_nr), *inputs]}
    return shapes == {p.shape} and all(operation(node) in BY_ENTRY for node in operations)


def nodes_between(root: Node, p: nn.Parameter) -> set[Node]:
    """The nodes on the paths from a root to a parameter."""
    found = set[Node]()
    for node in reversed(consumers_first([root])):
        if leaf_of(node) is p or not found.isdisjoint([below for below, _ in node.next_functions]):
            found.add(node)
    return found


def is_linear(source: GradientEdge | None, p: nn.Parameter) -> bool:
    """Whether the tensor at an edge is linear in a parameter; ``None`` for the parameter itself."""
    if source is None:
        return True
    leaves = {node for node in walk([source.node]) if leaf_of(node) is p}
    return not nonlinear_operations([source], leaves)


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


def way_back(source: GradientEdge, p: nn.Parameter) -> list[Passed]:
    """The operations from a weight back to the parameter, as far as these are one after the other, and known."""
    path: list[Passed] = []
    between, at = nodes_between(source.node, p), source
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
