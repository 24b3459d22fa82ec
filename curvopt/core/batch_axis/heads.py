"""The heads, where the loss does not only reach outputs of one model.

::

    loss of D(G(x))                       outermost: the output of D; that of G reaches the loss through it
    out.mean() + slopes.square().sum()    around_heads: also the slopes [N, d] by the input, with rows of their own
    slopes.square().sum() alone           behind_reductions: the first tensor with N rows behind the scalar
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from torch.autograd.graph import Node

from curvopt.core.autograd_graph.node_vjp import Place
from curvopt.core.autograd_graph.nodes import leads_to, leaf_of, operation, shape_of, walk
from curvopt.core.autograd_graph.operations import LINEAR, SQUARES, SUMS
from curvopt.core.batch_axis.layout import Layout, labelled
from curvopt.core.batch_axis.propagation import operand_layouts, propagate_batch_axis
from curvopt.core.batch_axis.rows import samples_of_rows

if TYPE_CHECKING:
    from curvopt.core.autograd_graph.backward_graph import BackwardGraph


def outermost(heads: dict[Place, Layout], N: int, graph: BackwardGraph) -> dict[Place, Layout]:
    """The heads without those that reach the loss through others: outputs of a model that another model is called with.

    So operations between the models that mix samples are noticed. Heads are kept if their rows only change places.
    """
    ends = {node for node, _ in heads}
    met = set(walk(graph.roots, last=ends))
    outer = {place: layout for place, layout in heads.items() if place[0] in met}
    if len(outer) == len(heads):
        return heads
    behind = propagate_batch_axis(outer, N).layouts

    def stays(place: Place) -> bool:
        found = behind.get(place)
        return place in outer or (isinstance(found, Layout) and not found.mixed and found != heads[place])

    return {place: layout for place, layout in heads.items() if stays(place)}


def around_heads(graph: BackwardGraph, N: int, axis: int, heads: Mapping[Place, Layout]) -> dict[Place, Layout]:
    """More heads where parameters behind the heads take part around them, too: the slopes in a gradient penalty.

    The first tensors with N rows behind the scalar, as far as their rows are those of the heads.
    """
    ends = {node for node, _ in heads}
    outputs = ends | {node for _, (node, _) in graph.model_calls}
    beside = [node for node in walk(graph.roots, last=outputs) if node not in outputs]
    around = {leaf for node in beside if (leaf := leaf_of(node)) is not None}
    if not around or not any(leaf in around for leaf in map(leaf_of, walk(list(ends))) if leaf is not None):
        return {}
    alone = graph.of_parameters_alone
    reach = {node for node in beside if leaf_of(node) in around}  # grows by all that reaches them around the heads
    for node in graph.nodes[::-1]:
        if node not in outputs and not reach.isdisjoint([below for below, _ in node.next_functions]):
            reach.add(node)

    def layout(place: Place) -> Layout | None:
        shape = shape_of(*place)
        if len(shape) <= axis or shape[axis] != N:
            return None
        leads = not ends.isdisjoint(walk([place[0]]))
        rows = samples_of_rows(place, heads) if leads else list(range(N))
        return None if rows is None or (axis and leads) else labelled(shape, axis, rows, N, False)

    found = _first(graph, layout, lambda place: place in heads or place[0] in alone or place[0] not in reach)
    return inside_the_loss(found, N, graph, ends, reach)


def _first(
    graph: BackwardGraph, layout: Callable[[Place], Layout | None], ends: Callable[[Place], bool]
) -> dict[Place, Layout]:
    """The first tensors behind the scalar that have a layout; a path ends at a leaf, and where it is asked to."""
    found: dict[Place, Layout] = {}
    stack: list[Place] = [(root, 0) for root in graph.roots]
    seen = set(stack)
    while stack:
        place = stack.pop()
        if leaf_of(place[0]) is not None or ends(place):
            continue
        own = layout(place)
        if own is not None:
            found[place] = own
            continue
        for below in place[0].next_functions:
            if below[0] is not None and below not in seen:
                seen.add(below)  # type: ignore[arg-type]
                stack.append(below)  # type: ignore[arg-type]
    return found


def inside_the_loss(
    found: Mapping[Place, Layout], N: int, graph: BackwardGraph, ends: Collection[Node], reach: Collection[Node] | None
) -> dict[Place, Layout]:
    """Replace tensors in which the scalar is linear, such as squares of residuals, by the residuals.

    As a function of the squares the loss would have no curvature.

    Args:
        found: the tensors, that are no outputs of models.
        N: number of samples.
        graph: the graph.
        ends: outputs of models.
        reach: nodes that may replace a tensor; ``None`` for all.
    """
    if not found:
        return {}
    last = {node for node, _ in found} | set(ends)
    outside = [node for node in walk(graph.roots, last=last) if node not in last]
    curved = [node for node in outside if operation(node) not in LINEAR | {"MUL", "DIV"} and leaf_of(node) is None]
    inside = {p: layout for p, layout in found.items() if any(leads_to(node, {p[0]}) for node in curved)}
    stack = [(place, layout) for place, layout in found.items() if place not in inside]
    while stack:
        place, layout = stack.pop()
        node, kind = place[0], operation(place[0])
        operands = [b for b in node.next_functions if b[0] is not None]
        below = list(dict.fromkeys(operands))
        summed = kind in SUMS or (kind in ("DIV", "MUL") and len(operands) == 1)  # by a constant
        known = summed or (kind in SQUARES and len(below) == 1)
        layouts = operand_layouts(node, place[1], layout, N) if known else []
        at = {b: x for b, x in zip(node.next_functions, layouts, strict=False) if isinstance(x, Layout)}
        if not known or len(at) < len(below) or any(leaf_of(b) is not None for b, _ in below):  # type: ignore[arg-type]
            inside[place] = layout
            continue
        for b, x in at.items():
            if reach is None or b[0] in reach:
                (stack.append((b, x)) if summed else inside.update({b: x}))  # type: ignore[arg-type]
    return inside


def behind_reductions(graph: BackwardGraph, N: int, axis: int) -> dict[Place, Layout]:
    """The first tensors with N rows behind the scalar that is differentiated, of those that depend on parameters."""

    def layout(place: Place) -> Layout | None:
        shape = shape_of(*place)
        return labelled(shape, axis, range(N), N, False) if len(shape) > axis and shape[axis] == N else None

    found = _first(graph, layout, lambda _: False)
    return inside_the_loss(found, N, graph, (), None)
