"""Parameters of modules without a rule that meet the samples in operations which repeat them: no need to call again.

``x * p``, ``x + p`` and ``p.expand(N, ...)``, of a parameter itself or of what is computed from it (``p.exp()``, a part
of a table), are read off the graph: scales of layers, class tokens, positions, temperatures. What arrives there is all
that the Jacobians need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.rules import Jacobians, Rule
from curvopt.core.functional import FunctionalUse
from curvopt.core.jacobians import Dense
from curvopt.core.residuals import LINEAR, MULTILINEAR, leaf_of, name_of, operation, pull, walk
from curvopt.core.uses import Use

if TYPE_CHECKING:
    from curvopt.core.graph import Entry

#: Operations between a parameter and the samples that are followed.
LONGEST = 30


class Repeated(Rule):
    """What an operation repeats for every sample, times a number and a factor that differs among them perhaps.

    Args:
        p: the parameter.
        source: where what is repeated was computed from it; ``None`` for itself.
        shape: shape of what is repeated.
        scale: the number.
    """

    def __init__(self, p: nn.Parameter, source: GradientEdge | None, shape: torch.Size, scale: float):
        """Keep them."""
        self.p, self.source, self.shape, self.scale = p, source, shape, scale
        between = [] if source is None else walk([source.node])
        self.linear = all(operation(node) in LINEAR | MULTILINEAR for node in between if leaf_of(node) is None)

    def rows(self, use: Use) -> int:
        return use.shapes[0][0]

    def jac_t(self, use: Use, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        for factor in use.args:
            grad = grad * factor
        sizes = [1] * (grad.dim() - 1 - len(self.shape)) + list(self.shape)
        if sizes[0] == 1:
            values = grad.unflatten(1, (N, -1)).sum(2, keepdim=True)
        else:  # rows of its own for each sample, or for the only one
            values = grad.new_zeros(len(grad), N, *grad.shape[1:])
            for n, rows in enumerate(grad.split(grad.shape[1] // N, 1)):
                values[:, n, n * rows.shape[1] : (n + 1) * rows.shape[1]] = rows
        axes = [i for i, size in enumerate(sizes, 2) if size == 1]
        values = (values.sum(axes) if axes else values) * self.scale
        if self.source is not None:
            (found,) = pull([self.source], [self.p], [values.reshape(-1, *self.shape)])
            values = values.new_zeros(len(grad), N, *self.p.shape) if found is None else found
        return {name: Dense(values.reshape(len(grad), N, *self.p.shape)) for name in names}


Meetings = dict[tuple[Node, int], tuple[FunctionalUse, Repeated, str]]


def repeated(
    entry: Entry, ways: Iterable[tuple[Node, int]], parents: dict[Node, list[Node]]
) -> tuple[Meetings, set[Node]] | None:
    """The operations in which the parameters of a use meet the samples, if each of them is a known one.

    Args:
        entry: the use, of a module without a rule.
        ways: the nodes that take its parameters, and for which of their inputs.
        parents: who consumes each node.

    Returns:
        By operation a use, its rule, and the name of its parameter; besides, the nodes between parameters and these
        operations.
    """
    names = {id(p): name for name, p in entry.parameters.items()}
    meetings: Meetings = {}
    for node, position in ways:
        p = leaf_of(node.next_functions[position][0])
        found = _follow(entry, p, names[id(p)], parents, node, position, LONGEST)
        if found is None:
            return None
        meetings |= found
    sources = [rule.source for _, rule, _ in meetings.values()]
    return meetings, set(walk([source.node for source in sources if source is not None]))


def _follow(
    entry: Entry,
    p: nn.Parameter,
    name: str,
    parents: dict[Node, list[Node]],
    node: Node,
    position: int,
    left: int,
) -> Meetings | None:
    """Where what a node gets of a parameter meets the samples, as far from the parameter as possible.

    What meets a constant first may look like samples. What the module gives for its samples, though, may be their part
    of a loss further on.
    """
    shape = node._input_metadata[0].shape  # type: ignore[attr-defined]
    ends = _rows(entry, shape[:1]) and any(edge.node is node for edge in entry.edges.values())
    reduces = len(shape) == 0 < len(_source(node, position, p)[1])  # to one number, as a loss does
    alone = sum(following is not None for following, _ in node.next_functions) == 1
    above = [(up, i) for up in parents.get(node, ()) for i, (below, _) in enumerate(up.next_functions) if below is node]
    if above and alone and left and not ends and not reduces:
        found = [_follow(entry, p, name, parents, up, i, left - 1) for up, i in above]
        if None not in found:
            return dict(item for meetings in found if meetings for item in meetings.items())
    meeting = _meeting(entry, p, node, position)
    return None if meeting is None else {(node, position): (*meeting, name)}


def _rows(entry: Entry, lengths: Iterable[int]) -> bool:
    """Whether the rows of a use may lie along one of some axes."""
    return any(length > 0 and entry.rows > 0 and length % entry.rows == 0 for length in lengths)


def _source(node: Node, position: int, p: nn.Parameter) -> tuple[GradientEdge | None, torch.Size]:
    """Where an operand of a node was computed, ``None`` for the parameter itself, and its shape."""
    below, nr = node.next_functions[position]
    if below is None or leaf_of(below) is p:
        return None, p.shape
    return GradientEdge(below, nr), torch.Size(below._input_metadata[nr].shape)  # type: ignore[attr-defined]


def _meeting(entry: Entry, p: nn.Parameter, node: Node, position: int) -> tuple[FunctionalUse, Repeated] | None:
    """The use of a parameter by an operation, if that repeats for the samples what was computed from it."""
    name = name_of(node)
    if name not in _OPERATIONS:
        return None
    source, shape = _source(node, position, p)
    metadata: Any = node._input_metadata[0]  # type: ignore[attr-defined]
    out = torch.Size(metadata.shape)
    sizes = [1] * (len(out) - len(shape)) + list(shape)
    if any(size not in (1, length) for size, length in zip(sizes, out, strict=True)) or metadata.dtype.is_complex:
        return None
    own = source is None and len(sizes) > 0 and sizes[0] == out[0] == entry.rows  # one for each sample
    if not own and not _rows(entry, [length for size, length in zip(sizes, out, strict=True) if size == 1]):
        return None
    factors, scale = (), 1.0
    try:
        if name in ("AddBackward0", "SubBackward0") and position == 1:
            scale = node._saved_alpha if name == "AddBackward0" else -node._saved_alpha  # type: ignore[attr-defined]
        elif name == "MulBackward0":
            factors = (node._saved_self if position else node._saved_other,)  # type: ignore[attr-defined]
        elif name == "WhereBackward0":
            condition: Any = node._saved_condition  # type: ignore[attr-defined]
            factors = (~condition if position else condition,)
    except RuntimeError:
        return None  # of a graph that is gone, or computed again in the backward
    args = tuple([factor.to(p.dtype) for factor in factors])
    # not in the use, which Jacobians keep: the rule knows nodes
    return FunctionalUse(entry.use.path, entry.use.module, args, out), Repeated(p, source, shape, scale)


_OPERATIONS = frozenset(
    ["AddBackward0", "SubBackward0", "MulBackward0", "WhereBackward0", "ExpandBackward0", "RepeatBackward0"]
)
