"""Where a parameter meets the samples, in code that calls no module with a rule: read off the graph.

``F.linear(x, W)``, ``x @ W``, ``torch.einsum``, convolutions and lookups become uses like those of modules; ``x * p``,
``x + p``, ``p.expand(N, ...)`` and scales of functional norms repeat what they get for the samples. That may be the
parameter itself or what is computed from it: ``p.exp()``, a part of a table, a normalised or masked weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.embedding import Embedding
from curvopt.core.derivatives.operations import Derived, Repeated
from curvopt.core.derivatives.rules import Rule
from curvopt.core.functional import (
    FunctionalUse,
    Way,
    constants_of,
    is_bias,
    is_layer,
    lacks_rows,
    layer_call,
    repeats,
    repetition,
    seen_of,
    shape_among,
)
from curvopt.core.residuals import is_complex, leaf_of, name_of, shape_of, walk

_EXPANDING = frozenset(["ExpandBackward0", "RepeatBackward0"])

#: Operations between a parameter and the samples that are followed.
LONGEST = 30


class Meeting(NamedTuple):
    """A use of a parameter by an operation.

    Attributes:
        node: of the operation.
        use: what it was called with.
        rule: its rule.
        role: the parameter's name in the rule, or in that of the layer which it belongs to if that is there, too.
        source: where the operand was computed from the parameter; ``None`` if it is a view of it.
    """

    node: Node
    use: FunctionalUse
    rule: Rule
    role: str
    source: GradientEdge | None


Place = tuple[Node, int]
Found = dict[Place, Meeting]


class Data:
    """What is known of the samples before they meet a parameter: autograd knows them as constants like any others.

    Args:
        rows: the lengths of axes along which they may lie.
        given: what modules were called with.
        fixed: their buffers and frozen parameters, which hold none.
    """

    def __init__(self, rows: Collection[int], given: Sequence[Tensor], fixed: Sequence[Tensor]):
        """Remember shapes and places in memory."""
        self.rows = [row for row in rows if row > 0]
        self._shapes = {(x.dim(), len(x)) for x in given if x.dim() and len(x) in self.rows}
        self._places, self._held = ({x.untyped_storage().data_ptr() for x in each} for each in (given, fixed))
        self._fixed = fixed

    def may_lie_along(self, lengths: Iterable[int]) -> bool:
        """Whether samples may lie along one of some axes."""
        return any(length > 0 and length % row == 0 for length in lengths for row in self.rows)

    def may_be(self, constant: Tensor) -> bool:
        """Whether a layer that is applied to a constant is applied to samples."""
        if constant.layout != torch.strided or constant._is_zerotensor():  # a tangent, without memory
            return False
        place = constant.untyped_storage().data_ptr()
        if place in self._places or place in self._held:
            return place in self._places
        if _is_multiple_of_identity(constant):
            return False
        kind = (constant.shape, constant.dtype, constant.device)
        return not any((x.shape, x.dtype, x.device) == kind and torch.equal(x, constant) for x in self._fixed)

    def _are(self, leaf: Tensor) -> bool:
        given = leaf.layout == torch.strided and leaf.untyped_storage().data_ptr() in self._places
        return given or (leaf.dim(), *leaf.shape[:1]) in self._shapes

    def repeats(self, node: Node) -> bool:
        """Whether an operation repeats what it is called with for every sample."""
        return name_of(node) in _EXPANDING and lacks_rows(node, 0) and shape_of(node)[0] in self.rows

    def enter(self, node: Node) -> bool:
        """Whether they are a constant operand of an operation, or the leaf whose gradient a node accumulates."""
        leaf = leaf_of(node)
        if leaf is not None:
            return not isinstance(leaf, nn.Parameter) and self._are(leaf)
        constants = constants_of(node)
        if constants and not any(self.may_be(x) for x, _ in constants):
            return False
        if any(self.may_lie_along(lengths) and self.may_be(x) for x, lengths in constants):
            return True
        operands = [shape_of(below, nr) for below, nr in node.next_functions if below is not None]
        shape = shape_of(node)
        if len(operands) == len(node.next_functions) or not len(shape):
            return False
        known = (len(shape), shape[0]) in self._shapes or shape[0] in self.rows
        # a number that is added to something as long brings nothing
        added = any(len(other) == len(shape) and other[0] == shape[0] for other in operands)
        return known and (not added or name_of(node).startswith(("Cat", "Stack")))


def _is_multiple_of_identity(x: Tensor) -> bool:
    if x.dim() != 2 or not len(x) == x.shape[1] > 1:
        return False
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
    return torch.equal(x, x[0, 0] * identity) and bool(x[0, 0] != 0)


class Meetings:
    """The search for the meetings of the parameters of a module, or of a model.

    Args:
        path: of the module.
        module: the module, for messages and hooks.
        data: what is known of the samples.
        parents: who consumes each node.
        dependent: the nodes that depend on the samples.
        repeated: those that depend on what was repeated for every sample.
        holds: whether uses hold their inputs, or leave them to the checkpoint in which they are.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        data: Data,
        parents: dict[Node, list[Node]],
        dependent: Collection[Node],
        repeated: Collection[Node],
        holds: bool = True,
    ):
        """Keep them."""
        self.holds = holds
        self.path, self.module, self.data, self.parents = path, module, data, parents
        self.dependent, self.repeated = dependent, repeated

    def of(self, p: nn.Parameter, ways: Iterable[Way]) -> list[Meeting] | None:
        """The meetings of a parameter that starts on some ways; ``None`` if an operation is not known."""
        known: dict[Place, Found | None] = {}
        found: Found = {}
        for way in ways:
            met = self._follow(p, way, known, LONGEST)
            if met is None:
                return None
            found |= met
        nodes = {meeting.node for meeting in found.values()}
        for meeting in found.values():
            if meeting.source is not None and not nodes.isdisjoint(walk([meeting.source.node])):
                return None  # one counts in another
        return list(found.values())

    def _follow(self, p: nn.Parameter, way: Way, known: dict[Place, Found | None], left: int) -> Found | None:
        """The meetings by what an operation makes of a parameter, or by itself if there are none further on."""
        place = way.node, way.position
        if place not in known:
            known[place] = self._met(p, way, known, left)
        return known[place]

    def _met(self, p: nn.Parameter, way: Way, known: dict[Place, Found | None], left: int) -> Found | None:
        node = way.node
        try:
            product = None if is_complex(node) else self._product(p, way)
            meeting = None if is_complex(node) else product or self._repetition(p, way)
        except RuntimeError:  # of a graph that is gone, or computed again in the backward
            return None
        here = None if meeting is None else {(node, way.position): meeting}
        others = [other for i, (other, _) in enumerate(node.next_functions) if other is not None and i != way.position]
        above = [
            (up, i) for up in self.parents.get(node, ()) for i, (b, _) in enumerate(up.next_functions) if b is node
        ]
        if product is not None or not above or not left or node in self.dependent:
            return here
        # as far from the parameter as possible: what meets a constant first may look like samples
        passed = None if others or way.passed is None else (*way.passed, node)
        found = [self._follow(p, Way(up, i, passed), known, left - 1) for up, i in above]
        if None in found:
            return here
        return dict(item for meetings in found if meetings for item in meetings.items())

    def _product(self, p: nn.Parameter, way: Way) -> Meeting | None:
        """The use of a parameter, or of what was computed from it, as the weight of a layer applied to samples."""
        node, source = way.node, None
        if not is_layer(node):
            return None
        seen = seen_of(p, way)
        shape = p.shape
        call = None if seen is None else layer_call(node, way.position, seen, shape)
        if call is None:
            if leaf_of(way.operand[0]) is p or way.operand[0] in self.repeated:
                return None
            shape = shape_of(*way.operand)
            source, seen = GradientEdge(*way.operand), torch.empty(shape, device="meta")
            call = layer_call(node, way.position, seen, shape)
        if call is None or seen is None:
            return None
        before = None if call.other is None else node.next_functions[call.other][0]
        leaf = leaf_of(before)
        of_parameters = leaf is None or isinstance(leaf, nn.Parameter)
        if before is not None and of_parameters and before not in self.dependent and before not in self.repeated:
            return None  # multiplied with what was computed from parameters alone
        if before is None and not self.data.may_be(call.input):
            return None
        call.module._parameters["weight"] = p if source is None else nn.Parameter(seen, requires_grad=False)
        rule = call.rule if source is None and p.dim() > 1 else Derived(call.rule, p, source)
        boundary = frozenset() if before is None else frozenset([before])
        again = partial(_input, node, way.position, seen, shape)
        use = self._use(node, call.module, (call.input,), again, boundary)
        shared = isinstance(call.rule, Embedding) and repeats_for_samples(node, self.parents) is not None
        # experts, say, are called with as many samples as are sent to them
        if not shared and before not in self.dependent and not self.data.may_lie_along([rule.rows(use)]):
            return None
        return Meeting(node, use, rule, "weight", source)

    def _repetition(self, p: nn.Parameter, way: Way) -> Meeting | None:
        """The use of a parameter by an operation, if that repeats for the samples what was computed from it."""
        node = way.node
        if not repeats(node):
            return None
        source = None if leaf_of(way.operand[0]) is p else GradientEdge(*way.operand)
        shape, out = shape_among(node, shape_of(*way.operand)), shape_of(node)
        sizes = [1] * (len(out) - len(shape)) + list(shape)
        if len(sizes) > len(out):
            return None
        if any(size not in (1, length) for size, length in zip(sizes, out, strict=True)):
            return None
        own = source is None and len(sizes) > 0 and sizes[0] == out[0] in self.data.rows  # one for each sample
        of_samples = own or (node in self.dependent and sizes[:1] == [1])
        if not of_samples and not self.data.may_lie_along(b for a, b in zip(sizes, out, strict=True) if a == 1):
            return None
        found = repetition(node, way.position)
        if found is None:
            return None
        use = self._use(node, self.module, found.args, lambda: repetition(node, way.position).args)  # type: ignore[union-attr]
        role = "bias" if source is None and is_bias(node, way.position, p) else "weight"
        rule = Repeated(p, source, shape, found.scale, found.factor, found.linear)
        return Meeting(node, use, rule, role, source)

    def _use(
        self,
        node: Node,
        module: nn.Module,
        args: tuple[Tensor, ...],
        again: Callable[[], tuple[Tensor, ...]],
        boundary: frozenset[Node] = frozenset(),
    ) -> FunctionalUse:
        use = FunctionalUse(self.path, module, args, shape_of(node), self.module, boundary)
        if not self.holds:
            use.left = again
            use.hold_nothing()
        return use


def _input(node: Node, position: int, weight: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """The input of a layer, read again."""
    call = layer_call(node, position, weight, shape)
    assert call is not None
    return (call.input,)


def repeats_for_samples(node: Node, parents: dict[Node, list[Node]]) -> Node | None:
    """The only operation above one, if that adds it to something for every sample, or repeats it: nothing else."""
    above = parents.get(node, [])
    if len(above) != 1:
        return None
    own, out = shape_of(node), shape_of(above[0])
    broadcasts = name_of(above[0]) == "ExpandBackward0" or (
        name_of(above[0]) == "AddBackward0" and above[0]._saved_alpha == 1  # type: ignore[attr-defined]
    )
    shared = len(out) > 0 and out[0] > 1 and own in (out[1:], torch.Size([1, *out[1:]]))
    return above[0] if broadcasts and shared else None


def added_term(node: Node, parents: dict[Node, list[Node]], dependent: set[Node]) -> bool:
    """Whether what ``node`` computes from parameters alone meets the data only as a scalar summand of the loss."""
    stack, seen = [node], {node}
    if node in dependent:
        return _adds_scalar(node)
    while stack:
        for parent in parents.get(stack.pop(), ()):
            if parent in seen:
                continue
            seen.add(parent)
            if parent not in dependent:
                stack.append(parent)
            elif not _adds_scalar(parent):
                return False
    return True


def _adds_scalar(node: Node) -> bool:
    return name_of(node).startswith(("Add", "Sub")) and shape_of(node).numel() == 1
