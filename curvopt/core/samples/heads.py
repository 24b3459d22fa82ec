"""The heads, where the loss does not only reach outputs of one model.

::

    loss of D(G(x))                       outermost: the output of D; that of G reaches the loss through it
    out.mean() + slopes.square().sum()    around_heads: also the slopes [N, d] by the input, with rows of their own
    slopes.square().sum() alone           behind_reductions: the first tensor with N rows behind the scalar
    loss of a @ b.T and of its transpose  agreeing: a and b
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.autograd.graph import Node

from curvopt.core.graph.node_vjp import Place
from curvopt.core.graph.nodes import (
    leads_further_to,
    leads_to,
    leaf_of,
    operation,
    saved,
    shape_of,
    signed,
    walk,
)
from curvopt.core.graph.operations import BY_ENTRY, LAST_OF_LOSSES, LINEAR, MULTILINEAR, OF_LOSSES, SUMS
from curvopt.core.record.calls import records_of
from curvopt.core.samples.layout import UNUSED, Layout, axis_of, labelled
from curvopt.core.samples.propagation import BatchAxes, operand_layouts, propagate_batch_axis
from curvopt.core.samples.rows import samples_of_rows

if TYPE_CHECKING:
    from curvopt.core.graph.backward_graph import BackwardGraph


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
    """More heads where parameters take part around the heads: slopes in a gradient penalty, terms that models return.

    The first tensors with N rows behind the scalar, as far as their rows are those of the heads.
    """
    ends = {node for node, _ in heads}
    outputs = ends | {place[0] for _, place in graph.model_calls if len(shape_of(*place))}
    beside = {node for node in walk(graph.roots, last=outputs) if node not in outputs}
    around = {leaf for node in beside if (leaf := leaf_of(node)) is not None}
    terms = any(place[0] in beside for _, place in graph.model_calls)  # that the model returns
    if not around or not (terms or any(leaf in around for leaf in map(leaf_of, walk(list(ends))) if leaf is not None)):
        return {}
    reach = {node for node in beside if leaf_of(node) in around}  # grows by all that reaches them around the heads
    for node in graph.nodes[::-1]:
        if node not in outputs and not reach.isdisjoint([below for below, _ in node.next_functions]):
            reach.add(node)

    of_rows = _rows(N, axis)

    def layout(place: Place) -> Layout | None:
        own = of_rows(place)
        if own is None or ends.isdisjoint(walk([place[0]])):
            return own
        rows = None if axis else samples_of_rows(place, heads)
        return None if rows is None else labelled(shape_of(*place), 0, rows, N, False)

    alone = graph.of_parameters_alone
    found = _first(graph.roots, layout, lambda place: place in heads or place[0] in alone or place[0] not in reach)
    return inside_the_loss(found, N, graph, ends, reach)


def agreeing(axes: BatchAxes, heads: Mapping[Place, Layout], graph: BackwardGraph) -> dict[Place, Layout]:
    """The heads, with the samples of those that only have the rows of others in another order.

    In place of a matrix of all pairs of samples and of its transpose, those in front of it: a row of the matrix is a
    column of the transpose, so neither is a sample.
    """
    N, agreed = axes.N, dict(heads)
    for head in [head for head, transposed in axes.mixing() if transposed]:
        for place in heads:
            rows = samples_of_rows(place, {head: heads[head]}) if leads_further_to(place[0], {head[0]}) else None
            if rows is not None and UNUSED not in rows:
                agreed[place] = labelled(shape_of(*place), 0, rows, N, False)
    nodes = {node for (node, _), transposed in propagate_batch_axis(agreed, N).mixing() if transposed}
    below = [operand for node in nodes for operand, _ in node.next_functions if operand is not None]
    alone = graph.of_parameters_alone
    found = _first(below, _rows(N, 0), lambda place: place in agreed or place[0] in alone)
    return found | {place: x for place, x in agreed.items() if not leads_to(place[0], nodes)} if found else agreed


def _rows(N: int, axis: int) -> Callable[[Place], Layout | None]:
    """The layout of a tensor with N rows along an axis.

    ``None`` where they are no samples: for a mean over the batch, whose rows are columns of an operand with N rows, and
    for a stack of N losses.
    """
    seen = set[Place]()

    def layout(place: Place) -> Layout | None:
        shape = shape_of(*place)
        stacked = operation(place[0]) == "STACK" and signed(saved(place[0], "dim")) % len(shape) == axis
        if len(shape) <= axis or shape[axis] != N or stacked:
            return None
        own = labelled(shape, axis, range(N), N, False)
        layouts, stack = {place: own}, [place]
        while stack:  # as long as entries stay what they are; outputs of modules have the batch axis first
            at = stack.pop()
            if records_of(at[0]):
                continue
            for (below, nr), operand in zip(at[0].next_functions, operand_layouts(*at, layouts[at], N), strict=False):
                if isinstance(operand, Layout) and below is not None and shape_of(below, nr)[axis : axis + 1] == (N,):
                    found = axis_of(shape_of(below, nr), operand)
                    if found is None or found.index != axis:
                        return None
                    if operation(at[0]) in BY_ENTRY | SUMS and not ((below, nr) in seen or (below, nr) in layouts):
                        layouts[below, nr] = operand
                        stack.append((below, nr))
        seen.update(layouts)
        return own

    return layout


def _first(
    starts: Iterable[Node], layout: Callable[[Place], Layout | None], ends: Callable[[Place], bool]
) -> dict[Place, Layout]:
    """The first tensors behind some nodes that have a layout; a path ends at a leaf, and where it is asked to."""
    found: dict[Place, Layout] = {}
    stack: list[Place] = [(node, 0) for node in starts]
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


def _curved(graph: BackwardGraph, places: Sequence[Place], last: Collection[Node]) -> set[Place]:
    """The tensors in which the scalar is not linear, by the operations between it and the nodes of ``last``."""
    outside = {node for node in walk(graph.roots, last=last) if node not in last}
    number, behind, curved = {place: 1 << i for i, place in enumerate(places)}, dict[Node, int](), 0
    for node in [node for node in graph.nodes[::-1] if node in outside]:
        of_all = 0
        for i, edge in enumerate(node.next_functions):
            of_one = number.get(edge, 0) | behind.get(edge[0], 0)  # type: ignore[call-overload,arg-type]
            if operation(node) == "MUL":  # curved where a tensor is in both factors
                curved |= of_all & of_one
            elif operation(node) == "DIV" and i:
                curved |= of_one
            of_all |= of_one
        if of_all and operation(node) not in LINEAR | {"DIV", "MUL"}:
            curved |= of_all
        behind[node] = of_all
    return {place for place, bit in number.items() if curved & bit}


def inside_the_loss(
    found: Mapping[Place, Layout], N: int, graph: BackwardGraph, ends: Collection[Node], reach: Collection[Node] | None
) -> dict[Place, Layout]:
    """Replace tensors in which the scalar is linear, such as squares or log-probabilities, by their operands.

    As a function of the squares, the loss would have no curvature.

    Args:
        found: the tensors, that are no outputs of models.
        N: number of samples.
        graph: the graph.
        ends: outputs of models.
        reach: nodes that may replace a tensor; ``None`` for all.
    """
    if not found:
        return {}
    curved = _curved(graph, list(found), {node for node, _ in found} | set(ends))
    inside = {place: layout for place, layout in found.items() if place in curved}
    stack, products = [(place, layout, False) for place, layout in found.items() if place not in inside], False
    while stack:
        place, layout, begun = stack.pop()
        node, kind = place[0], operation(place[0])
        alone = graph.of_parameters_alone if kind in ("DIV", "MUL") else ()
        operands = [b for b in node.next_functions if b[0] is not None and b[0] not in alone]
        below = list(dict.fromkeys(operands))
        # both factors of a product are followed: they may be one tensor, scaled
        linear = kind in SUMS | {"MUL"} or (kind in MULTILINEAR | {"DIV"} and len(operands) == 1)
        ends_here = (kind == "MUL" and len(operands) == 2 and len(below) == 1) or (
            len(below) == 1 and (kind in OF_LOSSES or (begun and kind in ("SIGMOID", "SOFTMAX")))
        )
        known = linear or ends_here or kind in LAST_OF_LOSSES
        layouts = operand_layouts(node, place[1], layout, N) if known else []
        at = {b: x for b, x in zip(node.next_functions, layouts, strict=False) if b in below and isinstance(x, Layout)}
        if not known or len(at) < len(below) or any(leaf_of(b) is not None for b, _ in below):  # type: ignore[arg-type]
            inside[place] = layout
            continue
        for b, x in at.items():
            if reach is None or b[0] in reach:
                if ends_here:
                    inside[b] = x  # type: ignore[index]
                else:
                    stack.append((b, x, begun or kind in LAST_OF_LOSSES))  # type: ignore[arg-type]
        products = products or (kind == "MUL" and len(below) > 1)
    for place in [place for place in inside if products and place not in found]:
        others = {node for node, _ in inside} - {place[0]}
        behind = list(walk([place[0]], last=others))
        if not others.isdisjoint(behind) and all(leaf_of(node) is None for node in behind if node not in others):
            del inside[place]  # a function of others alone: (1 - p)^2 beside log p
    return inside


def behind_reductions(graph: BackwardGraph, N: int, axis: int) -> dict[Place, Layout]:
    """The first tensors with N rows behind the scalar that is differentiated, of those that depend on parameters.

    Penalties on the parameters have no samples.
    """

    def found(ends: Callable[[Place], bool]) -> dict[Place, Layout]:
        first = _first(graph.roots, _rows(N, axis), ends)
        return inside_the_loss(first, N, graph, (), None)

    # parameters may have a row for each sample where there is nothing else
    return found(lambda place: place[0] in graph.of_parameters_alone) or found(lambda _: False)
