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

from collections.abc import Callable, Sequence
from functools import cached_property, partial, reduce
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.layers.operations import Broadcast, ParameterCall, broadcast_of, broadcasts, lookup_of, viewed
from curvopt.core.layers.rule import Jacobians, Rule, tensors
from curvopt.core.nodes import Saved, consumers_first, leaf_of, metadata, name_of, operation, shape_of, walk
from curvopt.core.operations import BY_ENTRY, nonlinear_operations
from curvopt.core.products.base import Dense, Jacobian
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import PulledBack, Scaled
from curvopt.core.record import ModuleCall
from curvopt.core.vjp import pull, pull_through, pull_to_leaf


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
        self.lookup = None if source is None else lookup_of(source, p)

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.operation.linear and is_linear(self.source, self.p)

    @cached_property
    def pulls_back(self) -> bool:  # type: ignore[override]
        return not (self.source is None or self.lookup is not None or is_by_entry(self.source, self.p))

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
        else:  # other rows for each sample, or for the only one
            values = grad.new_zeros(len(grad), N, *grad.shape[1:])
            for n, rows in enumerate(grad.split(grad.shape[1] // N, 1)):
                values[:, n, n * rows.shape[1] : (n + 1) * rows.shape[1]] = rows
        axes = [i for i, size in enumerate(sizes, 2) if size == 1]
        values = (values.sum(axes) if axes else values) * self.operation.scale
        if self.lookup is not None:  # each sample picks the same rows
            x = self.lookup.input
            picked = ParameterCall(
                call.path, self.lookup.module, (x.expand(N, *x.shape),), torch.Size([N, *self.shape]), call.owner
            )
            found = self.lookup.rule.jac_t(picked, [values.reshape(len(grad), N, *x.shape, -1)], ["weight"], N)
            return dict.fromkeys(names, found["weight"])
        jacobian = Dense(values.reshape(len(grad), N, *self.shape))
        return dict.fromkeys(names, through(call, self.source, self.p, jacobian))


class ComputedWeightRule(Rule):
    """An operation with a weight that was computed from the parameter.

    Args:
        rule: of the operation, with a weight by the name ``weight``.
        p: the parameter.
        source: where the weight was computed; ``None`` if it is the parameter, with axes moved perhaps.
        start: the first row of the parameter that is the weight; ``None`` if all rows are.
    """

    def __init__(self, rule: Rule, p: nn.Parameter, source: GradientEdge | None, start: int | None = None):
        """Keep them, and read what nodes saved: while the graph is passed, checkpoints give that out only once."""
        self.rule, self.p, self.source, self.start = rule, p, source, start
        self.way = [] if source is None else way_back(source, p)

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.rule.linear and is_linear(self.source, self.p)

    @cached_property
    def pulls_back(self) -> bool:  # type: ignore[override]
        return not (self.source is None or self.way or is_by_entry(self.source, self.p))

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        return self.rule.takes_steps(call, how)

    def output_axis(self, call: ModuleCall, index: int) -> int | Tensor | None:
        return self.rule.output_axis(call, index)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        jacobian, source = self.rule.jac_t(call, grads, ["weight"], N)["weight"], self.source
        if self.way and isinstance(jacobian, Outer):
            kept = f"sides of {N}"
            if kept not in call.cache:
                sides = Sides(jacobian)
                call.cache[kept] = sides if sides.go(self.way) else None
            if call.cache[kept] is not None:
                jacobian, source = call.cache[kept](jacobian), None
        if self.start is not None and isinstance(jacobian, Outer):
            around = self.start, len(self.p) - self.start - jacobian.O
            jacobian = jacobian.with_sides(F.pad(jacobian.left, around), None, self.p.shape, False)
        return dict.fromkeys(names, through(call, source, self.p, jacobian))


class PerSampleRule(Rule):
    """An operation with an operand that all samples share: what arrives at the operand from each of them.

    Args:
        node: of the operation.
        output_nr: which output of it has the samples.
        position: of the operand.
        p: the parameter from which the operand was computed.
    """

    sample_by_sample = True

    def __init__(self, node: Node, output_nr: int, position: int, p: nn.Parameter):
        self.node, self.output_nr, self.position, self.p = node, output_nr, position, p

    @property
    def edge(self) -> GradientEdge:
        """The edge of the operand."""
        return GradientEdge(*self.node.next_functions[self.position])  # type: ignore[arg-type]

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        at = metadata(self.node, self.output_nr)
        values = pull_through(self.node, self.output_nr, self.position, grad.to(at.dtype))
        shape = shape_of(self.edge.node, self.edge.output_nr)
        below = metadata(self.edge.node, self.edge.output_nr)
        if values is None:
            values = torch.zeros(len(grad), *shape, dtype=below.dtype, device=grad.device)
        if leaf_of(self.edge.node) is not self.p:
            pulled = pull_to_parameter(self.edge, self.p, values)
            values = self.p.new_zeros(len(grad), *self.p.shape) if pulled is None else pulled
        return dict.fromkeys(names, Dense(values.unsqueeze(1)))


def through(call: ModuleCall, source: GradientEdge | None, p: nn.Parameter, jacobian: Jacobian) -> Jacobian:
    """Products of a parameter, from the products of a tensor that was computed from it."""
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
        shape: shape of its operand.
        what: its kind: a product (the position of the operand, and the other matrix), a scaling, or a view.
    """

    shape: torch.Size
    what: tuple[int, Tensor] | Broadcast | Tensor


def way_back(source: GradientEdge, p: nn.Parameter) -> list[Passed]:
    """The operations from a weight back to the parameter; none if these are not one after the other, and known."""
    path: list[Passed] = []
    between: set[Node] = nodes_between(source.node, p)
    node, nr = source.node, source.output_nr
    while leaf_of(node) is not p:
        positions = [i for i, (below, _) in enumerate(node.next_functions) if below in between]
        if len(positions) != 1:
            return []
        (position,) = positions
        below: Any = node.next_functions[position]
        shape, what = shape_of(*below), None
        if name_of(node) == "MmBackward0":
            what = position, Saved(node).self if position else Saved(node).mat2
        elif name_of(node) == "CloneBackward0":
            what = torch.empty(shape, device="meta")
        elif not broadcasts(node):
            what = viewed(node, nr, torch.empty(shape, device="meta"))
            what = what if what is None or what.numel() == shape.numel() else None
        elif shape == shape_of(node):
            what = broadcast_of(node, position)
        if what is None:
            return []
        path.append(Passed(shape, what))
        node, nr = below
    return path


class Sides:
    """How operations between a weight and a parameter act on the two sides of the weight's outer products.

    Entry ``[o, i]``, of which o belongs to the left side, has the number ``o I + i``, which goes back with it. Known
    are factors of whole rows or columns, products of matrices, and moves of entries.

    Args:
        outer: products with respect to the weight.
    """

    def __init__(self, outer: Outer):
        """Begin at the weight."""
        self.sizes, self.shape, self.transposed = [outer.O, outer.I], outer.shape, outer.transposed
        self.numbers = self._numbers(outer.transposed).reshape(outer.shape) if outer.G == 1 else None
        self.steps: tuple[list[Step], list[Step]] = [], []
        self._right, self._one = None, outer.left.new_ones(())

    def go(self, path: Sequence[Passed]) -> bool:
        """Go the operations back to the parameter; whether all of them act on the sides by themselves."""
        return self.numbers is not None and all(self._pass(*passed) for passed in path) and self._arrive()

    def __call__(self, outer: Outer) -> Outer:
        """The products with respect to the parameter."""
        if self.steps[1] and self._right is None:
            self._right = reduce(lambda side, step: step[0](side, step[1]), self.steps[1], outer.right)
        left = reduce(lambda side, step: step[0](side, step[1]), self.steps[0], outer.left)
        return outer.with_sides(left, self._right, self.shape, self.transposed)

    def _numbers(self, transposed: bool) -> Tensor:
        """Those of a matrix ``[O, I]`` or ``[I, O]``."""
        numbers = torch.arange(prod(self.sizes), device="cpu").view(self.sizes)
        return numbers.mT if transposed else numbers

    def _pass(self, shape: torch.Size, what: tuple[int, Tensor] | Broadcast | Tensor) -> bool:
        """Remember how an operation acts on the sides; whether it does."""
        assert self.numbers is not None
        if isinstance(what, Broadcast):
            return self._scale(self._one * what.scale if what.factor is None else what.factor(*what.args) * what.scale)
        if isinstance(what, Tensor):
            numbers = torch.empty(shape, dtype=torch.long, device="cpu")
            numbers.as_strided(what.shape, what.stride()).copy_(self.numbers)
            self.numbers = numbers
            return True
        position, other = what
        transposed = next((t for t in (False, True) if torch.equal(self.numbers, self._numbers(t))), None)
        if transposed is None:
            return False
        # a matrix that is multiplied from the right acts on the side of the columns
        side = int((position == 0) != transposed)
        self.steps[side].append((torch.matmul, (other if position else other.mT).to(self._one)))
        self.sizes[side] = shape[1 - position]
        self.numbers = self._numbers(transposed)
        return True

    def _scale(self, factor: Tensor) -> bool:
        """Remember a factor, if its entries belong to one side."""
        assert self.numbers is not None
        if factor.numel() == 1:
            self.steps[0].append((torch.mul, factor.flatten().to(self._one)))
            return True
        entries = torch.arange(factor.numel(), device="cpu").view(factor.shape).expand(self.numbers.shape)
        entries = torch.empty(prod(self.sizes), dtype=torch.long, device="cpu").scatter_(
            0, self.numbers.flatten(), entries.flatten()
        )
        entries = entries.view(self.sizes)
        for side in (0, 1):
            of_side = entries.select(1 - side, 0)
            if torch.equal(entries, of_side.unsqueeze(1 - side).expand(self.sizes)):
                self.steps[side].append((torch.mul, factor.flatten()[of_side.to(factor.device)].to(self._one)))
                return True
        return False

    def _arrive(self) -> bool:
        """Put the sides in the order of the parameter's entries; whether its axes belong to one side each."""
        assert self.numbers is not None
        (O, I), self.shape = self.sizes, self.numbers.shape  # noqa: E741
        likely = self.shape[0] == I != O
        for transposed in (likely, not likely):
            numbers = self.numbers.reshape(I, O).mT if transposed else self.numbers.reshape(O, I)
            rows, columns = numbers[:, 0] // I, numbers[0] % I
            if torch.equal(numbers, rows[:, None] * I + columns):
                for steps, order in zip(self.steps, (rows, columns), strict=True):
                    if not torch.equal(order, torch.arange(len(order), device="cpu")):
                        steps.append((_in_order, order.to(self._one.device)))
                self.transposed = transposed
                return True
        return False


def _in_order(side: Tensor, order: Tensor) -> Tensor:
    return side[..., order]
