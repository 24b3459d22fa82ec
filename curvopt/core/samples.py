"""Where the samples lie: seen by pulling vectors back, not believed from shapes.

Rules read samples off the first axis: N of them, in equal contiguous shares (a flattened sequence counts as one
sample). Whether that holds at a use depends on the network: a lookup of positions is shared by all samples,
``torch.cat([x1, x2])`` interleaves them, a sequence-first layout has them elsewhere, and custom code may mix them. So
the first backward through a network sends back a random vector, and again with every sample scaled by a factor of its
own. Uses at which not every share arrives scaled by exactly its sample's factor, and which have no steps before the
samples either, are *unaligned*: their Jacobians are formed sample by sample, exact whatever the layout, at N times the
cost. Packed sequences tell of which sequence each of their rows is.

What was found holds for all graphs of the same structure if the second backward finds the same where a little of all
passes to wherever values (a gate, a mask, weights of an identity) might let it pass. It is compared with what is found
in the 11th, 101st ... backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.compare import allclose
from curvopt.core.derivatives.operations import Itself
from curvopt.core.derivatives.rules import no_batch_axis
from curvopt.core.entries import Ending, Entry
from curvopt.core.functional import FunctionalUse, broadcasts, spreads
from curvopt.core.graph import Graph
from curvopt.core.meetings import Place
from curvopt.core.opened import is_plain, largest, mixing_by_values, only_plain, opened
from curvopt.core.residuals import (
    BY_ENTRY,
    dependents,
    leads_to,
    leaf_of,
    operation,
    parents_of,
    pull_each,
    shape_of,
    walk,
)
from curvopt.core.structure import seeing_more, structure
from curvopt.core.uses import Head, Packed, Steps, Use, samples_of
from curvopt.errors import CurvoptError, CurvoptWarning

#: Where samples lie: along an axis, or in the rows, whose samples are told; ``None`` where nothing tells.
Where = int | Tensor | None
#: How steps come before samples: as `Steps`, or as in the packed sequences of the use of an index.
How = Literal["axis", "rows"] | int
#: In the place of an axis: all samples come one after the other along the first one, again and again.
IN_ROWS = -2
EMPTY = "the batch is empty; skip it, or call backward inside of an empty `with backpack():` for it."


class Samples(NamedTuple):
    """Where the samples are.

    Attributes:
        N: their number.
        unaligned: the uses whose first axis does not hold them in equal contiguous shares.
        met: of those of them that see what all samples share, the operands that are repeated for the samples.
        steps: of other uses in which steps come before the samples, how.
    """

    N: int
    unaligned: frozenset[Use]
    met: Mapping[Use, Collection[Place]] = {}
    steps: Mapping[Use, Steps] = {}


class Found(NamedTuple):
    """The same, by the indices of uses: ``passing`` are the strays above which all meetings are aligned.

    In the place of packed steps stands the index of the use that tells them.
    """

    N: int
    strays: frozenset[int]
    passing: frozenset[int] = frozenset()
    steps: frozenset[tuple[int, How]] = frozenset()


class Look(NamedTuple):
    """What one look shows.

    Attributes:
        found: where the samples lie.
        vague: the indices of uses where nothing arrived, or too little to tell.
    """

    found: Found
    vague: frozenset[int]


class Known(NamedTuple):
    """What is known of a structure.

    Attributes:
        found: what was found and holds; ``None`` if it has to be looked for.
        times: in how many backwards it was asked for.
        changed: whether something else was found later.
    """

    found: Found | None = None
    times: int = 0
    changed: bool = False


_known: dict[int, Known] = {}
_AGAIN = frozenset(10**digits for digits in range(20))


def find_samples(graph: Graph, losses: Collection[Head]) -> Samples:
    """Find out where the samples lie in a graph.

    Without a loss whose input is known every first axis must be N or a multiple of it. Where batch norm mixes samples N
    is told by lengths as well; a module in whose operations samples lie elsewhere is called again, and where they do in
    uses is looked for as if batch norms were the identity.

    Raises:
        CurvoptError: if then they are not.
    """
    losses = [loss for loss in losses if loss.edge is not None and loss.input.dim() > 0]
    for loss in losses:
        if _rows(loss) == 0:
            raise CurvoptError(f"{loss.describe()}: {EMPTY}")
    entries = [entry for entry in graph.entries.values() if entry.parameters]
    single = next((entry for entry in entries if entry.single), None)
    if single is not None and (not losses or graph.mixing):
        raise no_batch_axis(single.use)
    if single is not None and (vector := _read_as_rows(graph, losses)) is not None:
        raise no_batch_axis(vector.use)
    if not losses:
        return _common_length(graph, losses)
    if graph.mixing:
        return _around_batch_norms(graph, losses)
    frozen = [entry for entry in graph.entries.values() if not entry.parameters]
    everything = [*entries, *graph.calls, *frozen]
    look = partial(_look, losses, entries, list(graph.calls), frozen)
    N, strays, passing, steps = _remembered(_key(graph, losses, everything), losses, entries, look)
    places = _meetings(losses, entries, strays, N) if passing else {}
    met = {entries[i].use: places[i] for i in passing & places.keys()}
    by_use: dict[Use, Steps] = {}
    for i, how in steps:
        where = everything[how].axis(0) if isinstance(how, int) else None
        by_use[entries[i].use] = Packed.of(where, N) if isinstance(where, Tensor) else how  # type: ignore[assignment]
    return Samples(N, frozenset(entries[i].use for i in strays), met, by_use)


def _remembered(key: int | None, losses: Sequence[Head], entries: Sequence[Entry], look: Callable[[], Look]) -> Found:
    """Where the samples lie, looked for in the first backwards of a structure until what is found holds for all.

    Again after 10, 100 ... of them: operations may treat other values otherwise than the first ones.

    Args:
        key: of the structure; ``None`` to look in every backward.
        losses: where the samples are known.
        entries: the uses.
        look: finds out.
    """
    known = Known() if key is None else _known.get(key, Known())
    if key is not None and known.found is not None:
        _known[key] = known._replace(times=known.times + 1)
        if known.times not in _AGAIN:
            return known.found
    seen = look()
    if known.found is not None and _differing(seen.found, known.found) <= seen.vague:
        return known.found
    behind = None
    if known.found is None and ((key is not None and known.times in _AGAIN) or seen.found.strays & seen.vague):
        behind = _found_behind_values(losses, entries, look, seen)
    found = seen.found if behind is None else behind
    if dear := _dear(found, entries):
        _warn(found.N, _names(entries, dear))
    if known.found is not None:
        names = _names(entries, found.strays ^ known.found.strays or range(len(entries)))
        warnings.warn(
            f"the samples lie elsewhere than in earlier backwards through the same operations, at {names}: quantities "
            "of those were of other samples. They are looked for in every backward from now on.",
            CurvoptWarning,
            stacklevel=3,
        )
    if key is None:
        return found
    changed = known.changed or known.found is not None
    holds = behind is not None and not (changed or _passes_strays(entries, found.strays))
    if len(_known) > 1024:
        _known.clear()
    _known[key] = Known(found if holds else None, known.times + 1, changed)
    return found


def _found_behind_values(
    losses: Sequence[Head], entries: Sequence[Entry], look: Callable[[], Look], seen: Look
) -> Found | None:
    """What is found where a little of all passes, if nothing is hidden there, and it is what was seen.

    But for what was too vague.
    """
    with opened(_ends(losses)):
        try:
            behind, vague = look()
        except CurvoptError:  # of losses whose rows do not agree, say
            return None
        same = not vague and _differing(behind, seen.found) <= seen.vague
        return behind if same and not _closed(losses, entries) else None


def _differing(one: Found, other: Found) -> set[int]:
    """The indices of uses of which two looks say different things; -1 if it is the number of samples."""
    steps = {i for i, _ in one.steps ^ other.steps}
    return {*one.strays ^ other.strays, *one.passing ^ other.passing, *steps, *([] if one.N == other.N else [-1])}


def _look(losses: Sequence[Head], entries: Sequence[Entry], calls: Sequence[Entry], frozen: Sequence[Entry]) -> Look:
    """Look for the samples."""
    N, strays, vague = _search(losses, entries, calls, frozen)
    steps = _behind_steps(N, losses, entries, strays, [*entries, *calls, *frozen])
    strays = strays.difference(i for i, _ in steps)
    passing, quiet = _aligned_above(N, losses, _meetings(losses, entries, strays, N))
    return Look(Found(N, strays, passing, steps), vague | quiet)


def _behind_steps(
    N: int, losses: Sequence[Head], entries: Sequence[Entry], strays: Collection[int], everything: Sequence[Entry]
) -> frozenset[tuple[int, How]]:
    """The strays that have the samples behind the steps of sequences, and how, where these are to them the same."""
    packed = {j: where for j, entry in enumerate(everything) if isinstance(where := entry.axis(0), Tensor)}
    first_of = {tuple(where.tolist()): j for j, where in reversed(packed.items())}
    ways: list[tuple[How, Where]] = [*((j, packed[j]) for j in first_of.values()), ("axis", 1), ("rows", IN_ROWS)]
    found: dict[int, How] = {}
    for how, where in ways:
        places: list[tuple[int, GradientEdge, Where]] = []
        for i in sorted(set(strays).difference(found) if N > 1 else ()):
            use, shape = entries[i].use, entries[i].use.shapes[0]
            if isinstance(where, Tensor):
                fits = shape[:1] == where.shape
            else:
                fits = shape[1:2] == (N,) if how == "axis" else len(shape) > 0 and shape[0] > N and shape[0] % N == 0
            if fits and not entries[i].single and entries[i].rule.takes_steps(use, "axis" if how == "axis" else "rows"):
                places.append((i, entries[i].edges[0], where))
        wrong = unaligned(N, losses, places)[0] if places else set()
        found |= {i: how for i, *_ in places if i not in wrong}
    return frozenset(found.items())


def _warn(N: int, names: str) -> None:
    warnings.warn(
        f"the first axis does not hold the {N} samples one after the other at {names}: computing "
        f"their quantities sample by sample, {N} times the cost. Expanding shared inputs to [N, ...], a "
        "batch-first layout, or calling a module twice instead of on a concatenated batch avoid that.",
        CurvoptWarning,
        stacklevel=4,
    )


def _names(entries: Sequence[Entry], indices: Collection[int]) -> str:
    return ", ".join(dict.fromkeys(entries[i].use.describe() for i in sorted(indices)))


def _key(graph: Graph, losses: Collection[Head], everything: Sequence[Entry]) -> int | None:
    """Hash of what tells where the samples lie, ``None`` if the values of tensors do."""
    shapes = [*(loss.input.shape for loss in losses), *(entry.use.shapes for entry in everything)]
    kinds = [(type(e.use), type(e.rule), e.length, e.sees_data, bool(e.parameters)) for e in everything]
    marks: dict[Node, list[tuple[int, int, int, int | None]]] = {}
    for i, entry in enumerate(everything):
        for index, edge in entry.edges.items():
            where = entry.axis(index)
            told = hash(tuple(where.tolist())) if isinstance(where, Tensor) else where
            marks.setdefault(edge.node, []).append((i, index, edge.output_nr, told))
    operations = structure(_ends(losses), graph.between, marks)
    return None if operations is None else hash((operations, bool(graph.mixing), *shapes, *kinds))


def _rows(loss: Head) -> int:
    """How many rows a loss sees."""
    return loss.input.shape[loss.axis]


def _random(loss: Head, generator: torch.Generator | None = None) -> Tensor:
    """A random vector like what a loss sees, always the same one without a generator."""
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return torch.randn(loss.input.shape, generator=generator).to(loss.input)


def _ends(losses: Collection[Head]) -> list[Node]:
    """The nodes that give what some losses are called with."""
    return [loss.edge.node for loss in losses if loss.edge is not None]


def _read_as_rows(graph: Graph, losses: Collection[Head]) -> Entry | None:
    """A call on a single sample whose vector a loss may take for that of all samples, each of one number."""
    outputs = {node: entry for entry in graph.entries.values() for node in entry.nodes}
    ends = _ends([loss for loss in losses if loss.input.dim() == 1])
    last = [outputs[node] for node in walk(ends, last=outputs) if node in outputs]
    return next((entry for entry in last if entry.single and entry.use.shapes[0].numel() > 1), None)


def _dear(found: Found, entries: Sequence[Entry]) -> frozenset[int]:
    """The strays, less those passing that, N times, have no more outputs than all uses that are no strays."""
    sizes = [sum(shape.numel() for shape in entry.use.shapes) for entry in entries]
    some, others = found.passing, set(range(len(entries))) - found.strays
    small = found.N * sum(sizes[i] for i in some) <= sum(sizes[i] for i in others)
    return found.strays - some if small else found.strays


def _meetings(
    losses: Sequence[Head],
    entries: Sequence[Entry],
    strays: Collection[int],
    N: int,
    repeated: Callable[[Node, int], bool] = spreads,
) -> dict[int, list[Place]]:
    """By the index of a stray, the first operands above it that are repeated for N samples, as far as lengths tell.

    Strays of which some way leads elsewhere are left out.
    """

    def for_samples(node: Node, i: int) -> bool:
        return repeated(node, i) and shape_of(node)[0] % N == 0

    if not strays:
        return {}
    ends = _ends(losses)
    parents = parents_of(list(walk(ends)))
    given = [node for i, entry in enumerate(entries) if i not in strays for node in entry.nodes]
    stop = dependents(given, parents).union(ends)
    places: dict[int, list[Place]] = {}
    for i in strays:
        found = _met_above([edge.node for edge in entries[i].edges.values()], parents, stop, for_samples)
        if found:
            places[i] = found
        else:
            stop.update(edge.node for edge in entries[i].edges.values())  # nor has what leads there
    return places


def _aligned_above(
    N: int, losses: Sequence[Head], places: Mapping[int, Sequence[Place]]
) -> tuple[frozenset[int], frozenset[int]]:
    """The strays above which all meetings are aligned, and those above which nothing arrived at one."""
    distinct = list(dict.fromkeys(node for each in places.values() for node, _ in each))
    above = [(i, GradientEdge(node, 0), 0) for i, node in enumerate(distinct)]
    wrong, vague, _ = unaligned(N, losses, above) if above else (set(), frozenset(), set())
    wrong, quiet = ({distinct[i] for i in some} for some in (wrong, vague))
    meeting = {i: {node for node, _ in places[i]} for i in places}
    aligned = frozenset(i for i, nodes in meeting.items() if nodes.isdisjoint(wrong))
    return aligned, frozenset(i for i, nodes in meeting.items() if not nodes.isdisjoint(quiet))


def _of_all_samples(
    N: int, losses: Sequence[Head], entries: Sequence[Entry], strays: Collection[int]
) -> frozenset[int]:
    """The strays that see nothing but parameters, or what is repeated for the samples further on."""
    nodes = list(walk(_ends(losses)))
    seeing = seeing_more(nodes, parents_of(nodes))
    alone = [i for i in strays if not entries[i].may_hold_samples(seeing)]
    places = _meetings(losses, entries, strays, 1, broadcasts)
    rows = {shape_of(node)[0] for each in places.values() for node, _ in each}  # of sequences, of which N has several
    numbers = [N, *(length for length in rows if N % length == 0 and length != N)]
    return frozenset(alone).union(*(_aligned_above(number, losses, places)[0] for number in numbers))


def _met_above(
    nodes: list[Node],
    parents: dict[Node, list[Node]],
    stop: Collection[Node],
    repeated: Callable[[Node, int], bool],
) -> list[Place]:
    """The first operands above some nodes that are repeated along the first axis; none if not all ways lead to such."""
    stack, seen = list(nodes), set(nodes)
    found: dict[Place, None] = {}  # in the order of the graph
    while stack:
        node = stack.pop()
        above = parents.get(node, ())
        if not above or node in stop:
            return []
        for up in above:
            places = [(up, i) for i, (operand, _) in enumerate(up.next_functions) if operand is node]
            if all(repeated(*place) for place in places):
                found |= dict.fromkeys(places)
            elif up not in seen:
                seen.add(up)
                stack.append(up)
    return list(found)


def _search(
    losses: Sequence[Head], entries: Sequence[Entry], calls: Sequence[Entry], frozen: Sequence[Entry]
) -> tuple[int, frozenset[int], frozenset[int]]:
    """The number of samples and the indices of unaligned uses, and of those where nothing arrived that would tell.

    A sample is a row of the loss, unless most calls of modules, frozen ones included, have several of its rows in one
    (flattened sequences). Operations may have any axis first.
    """
    lengths = {_rows(loss) for loss in losses}
    N = min(lengths)
    if len(lengths) > 1 and (any(length % N for length in lengths) or not _common_use(losses, entries)):
        raise CurvoptError(
            f"{losses[0].describe()}: the losses see {sorted(lengths)} samples; call backward for each batch by itself."
        )
    everything = [*entries, *calls, *frozen]
    edges = [(i, edge, entry.axis(index)) for i, entry in enumerate(everything) for index, edge in entry.edges.items()]
    own = [edge for edge in edges if edge[0] < len(entries) + len(calls)]
    strays, vague, shared = unaligned(N, losses, own)
    if strays and frozen:
        strays, _, shared = unaligned(N, losses, edges)
    else:
        everything, edges = everything[: len(entries) + len(calls)], own
    rows = {i: entry.length for i, entry in enumerate(everything) if not isinstance(entry.use, FunctionalUse)}
    if not shared.isdisjoint(rows):
        for i in _of_all_samples(N, losses, everything, strays):
            rows.pop(i, None)
    if any(i in rows and entry.sees_data for i, entry in enumerate(everything) if i not in strays):
        # the data has as many rows as the loss: one vector is for all of them, while sequences hold several each
        shared = {i for i in shared if not everything[i].gives_vectors}
    for i in shared:
        if i in rows and everything[i].single:  # the only sample, or what all samples share?
            raise no_batch_axis(everything[i].use)
    for fewer in sorted({rows[i] for i in shared if rows.get(i)}, reverse=True):
        having = {i for i in rows if rows[i] == fewer}
        if N % fewer == 0 and 2 * len(having & strays) > len(rows) and (fewer > 1 or _share_one(losses, edges, having)):
            left, more, _ = unaligned(fewer, losses, edges)
            if 2 * len(having - left) > len(rows):
                strays, vague, N = left, vague | more, fewer
                break
    if strays and len(losses) > 1 and any(_rows(loss) != N for loss in losses):
        _check_agreement(N, losses, everything, edges)
    return N, frozenset(i for i in strays if i < len(entries)), vague


def _share_one(losses: Sequence[Head], edges: Sequence[tuple[int, GradientEdge, Where]], uses: Collection[int]) -> bool:
    """Whether the first and the last row of some loss come together in one of some uses, which sees the only sample.

    Else they are calls on one of many samples each, whose rows come together as well.
    """
    places = [(i, edge) for i, edge, _ in edges if i in uses]

    def reached(loss: Head, row: int) -> set[int]:
        assert loss.edge is not None
        found: set[int] = set()

        def arrived(k: int, grad: Tensor) -> None:
            if grad.any():
                found.add(places[k][0])

        row_alone = only(_random(loss), loss.axis, row, _rows(loss)).unsqueeze(0)
        pull_each([loss.edge], [edge for _, edge in places], [row_alone], arrived)
        return found

    with torch.no_grad():
        return any(not reached(loss, 0).isdisjoint(reached(loss, _rows(loss) - 1)) for loss in losses)


def _check_agreement(
    N: int, losses: Sequence[Head], entries: Sequence[Entry], edges: Sequence[tuple[int, GradientEdge, Where]]
) -> None:
    """Raise where samples that one loss sees in shares are none to another: its rows are no equal shares of them."""
    aligned_for: dict[int, Head] = {}
    strays_of: dict[int, Head] = {}
    with torch.no_grad():
        for loss in losses:
            assert loss.edge is not None
            strays, _, _ = _probe(loss, loss.edge, N, edges, torch.Generator().manual_seed(0))
            nodes = set(walk([loss.edge.node]))
            behind = {i for i, entry in enumerate(entries) if not nodes.isdisjoint(entry.nodes)}
            strays_of |= dict.fromkeys(behind & strays, loss)
            aligned_for |= dict.fromkeys(_seen_in_all_rows(loss, edges) - strays, loss)
    for i in strays_of.keys() & aligned_for.keys():
        raise CurvoptError(
            f"{strays_of[i].describe()}: its {_rows(strays_of[i])} rows are no equal shares of the {N} samples that "
            f"{aligned_for[i].describe()} sees at {entries[i].use.describe()} (different numbers of rows for each, or "
            "another order); call backward for each loss by itself."
        )


def _seen_in_all_rows(loss: Head, edges: Sequence[tuple[int, GradientEdge, Where]]) -> set[int]:
    """Indices of uses of which a loss sees every row: of zeros nothing tells whose they are."""
    assert loss.edge is not None
    seen: set[int] = set()

    def arrived(k: int, grad: Tensor) -> None:
        i, _, where = edges[k]
        axis = 0 if isinstance(where, Tensor) else where
        if axis is not None and grad[0].dim() and grad[0].movedim(axis, 0).unsqueeze(-1).flatten(1).any(1).all():
            seen.add(i)

    pull_each([loss.edge], [edge for _, edge, _ in edges], [_random(loss).unsqueeze(0)], arrived)
    return seen


def _passes_strays(entries: Sequence[Entry], strays: Collection[int]) -> bool:
    """Whether what is aligned passes strays further on: with other weights than ones of an identity they may mix it."""
    aligned = {node for i, entry in enumerate(entries) if i not in strays for node in entry.nodes}
    return not aligned.isdisjoint(walk([node for i in strays for node in entries[i].nodes]))


def _closed(losses: Sequence[Head], entries: Sequence[Entry]) -> bool:
    """Whether nothing but zeros arrives at some operation that may move samples, or leaves one that may keep some away.

    What the operation, or one before the latter, does to samples is not seen.
    """
    generator = torch.Generator().manual_seed(0)
    edges = [edge for entry in entries for edge in entry.edges.values()]
    zeros: list[Tensor] = []

    def arrived(grads: Sequence[Tensor | None]) -> None:
        zeros.extend(~grad.any() for grad in grads if grad is not None)

    def left(grads: Sequence[Tensor | None], arrived: Sequence[Tensor | None]) -> None:
        passed = only_plain(arrived)
        if passed is not None:
            came = passed.any()
            zeros.extend(came & ~grad.any() for grad in grads if grad is not None and is_plain(grad))

    with torch.no_grad():
        for loss in losses:
            assert loss.edge is not None
            with ExitStack() as hooks:
                for node in walk([loss.edge.node]):
                    if mixing_by_values(node) is not None:
                        hooks.callback(node.register_hook(left).remove)
                    if leaf_of(node) is None and operation(node) not in BY_ENTRY:
                        hooks.callback(node.register_prehook(arrived).remove)
                pull_each([loss.edge], edges, [_random(loss, generator).unsqueeze(0)], lambda *_: None)
        return bool(zeros) and bool(torch.stack([zero.to(zeros[0].device) for zero in zeros]).any())


def _common_use(losses: Sequence[Head], entries: Sequence[Entry]) -> bool:
    """Whether some use lies behind all of the losses."""
    return any(
        all(loss.edge is not None and leads_to(loss.edge.node, entry.nodes) for loss in losses) for entry in entries
    )


def only(vectors: Tensor, axis: int, n: int, N: int) -> Tensor:
    """Vectors with everything but the share of sample n along an axis set to zero."""
    share = vectors.shape[axis] // N
    index = torch.arange(n * share, (n + 1) * share, device=vectors.device)
    return torch.zeros_like(vectors).index_add(axis, index, vectors.index_select(axis, index))


def along(factors: Tensor, where: int | Tensor, like: Tensor) -> Tensor:
    """Factors of the samples, to be multiplied with a tensor that has them in equal contiguous shares of an axis.

    Or in its rows, if it is the sequence of each row that is given.
    """
    if isinstance(where, Tensor):
        shares, axis = factors.to(like)[samples_of(where, len(factors))], 0
    else:
        shares, axis = factors.repeat_interleave(like.shape[where] // len(factors)).to(like), where
    return shares.view([-1 if a == axis % like.dim() else 1 for a in range(like.dim())])


def aligned(grad: Tensor, scaled: Tensor, where: Where, factors: Tensor, half: bool = False) -> Tensor:
    """Whether scaling every sample at the loss scaled its share of an axis, and nothing else; ``half``: by float16."""
    if not _may_lie(grad, where, len(factors)):
        return grad.new_zeros((), dtype=torch.bool)
    assert where is not None
    expected = along(factors, where, grad)
    if grad.numel() == 0:
        return grad.new_ones((), dtype=torch.bool)
    most = largest(grad).to(torch.promote_types(grad.dtype, torch.float32))
    # what is scaled down may come near the smallest numbers that half precision has, and so may parts of large sums
    noise, rounding = (2.0**-18, 2e-3) if half else (0.0, 1e-5)
    # much of it a few rows at a time: nothing else of a first backward needs as much memory
    parts = 8 if grad.numel() > 1 << 16 else 1
    axis = 0 if isinstance(where, Tensor) else where
    rows = [tensor.split(max(1, grad.shape[axis] // parts), axis) for tensor in (scaled, expected, grad)]
    return torch.stack(
        [
            allclose(s / f, g, 1e-3, rounding * most + torch.minimum(noise / f, 1e-2 * most))
            for s, f, g in zip(*rows, strict=True)
        ]
    ).all()


def _may_lie(grad: Tensor, where: Where, N: int) -> bool:
    """Whether N samples may lie somewhere, by lengths."""
    if isinstance(where, Tensor):
        return len(where) == len(grad) > 0 and (int(where.max()) + 1) % N == 0
    return where is not None and grad.dim() > 0 and grad.shape[where] % N == 0


def _sampled(grad: Tensor, where: Where, N: int) -> tuple[Tensor, Where]:
    """What is kept of a gradient to compare another one with it: of each sample a few sums with random signs.

    All of it where N is 0: parts that float16 rounds differently would add up.
    """
    few = 64
    if N == 0 or not isinstance(where, int) or not _may_lie(grad, where, N) or grad.numel() < 4 * few * N:
        return grad, where
    entries = grad.movedim(where, 0).reshape(N, -1)
    long = entries.shape[1] // few
    generator = torch.Generator().manual_seed(1)
    signs = (torch.randint(2, (few, long), generator=generator) * 2 - 1).to(grad)
    sums = torch.einsum("nfl,fl->nf", entries[:, : few * long].view(N, few, long), signs)
    return torch.cat([sums, entries[:, few * long :]], 1), 0


def _shared(grad: Tensor, scaled: Tensor, axis: int, half: bool) -> Tensor:
    """Whether a row of an axis got gradients of several samples: then its entries are not all scaled by one factor."""
    grad, scaled = (each.movedim(axis, 0).flatten(1).double() for each in (grad, scaled))
    # in half precision small numbers are no more precise than `aligned` takes them to be
    smallest, tolerance = (2.0**-8, 1e-2) if half else (0.0, 1e-3)
    told = (grad != 0) & (torch.minimum(grad.abs(), scaled.abs()) >= smallest)
    factors = (scaled / grad).masked_fill(~told, torch.nan)
    least, most = factors.nan_to_num(torch.inf).amin(1), factors.nan_to_num(-torch.inf).amax(1)
    return (most > (1 + tolerance) * least).any()


def unaligned(
    N: int, losses: Sequence[Head], edges: Sequence[tuple[int, GradientEdge, Where]]
) -> tuple[set[int], frozenset[int], set[int]]:
    """Indices of uses where N samples do not arrive each in its share, and of those where nothing arrived that tells.

    Besides, the uses of fewer rows than samples, some of which share one.

    Args:
        N: number of samples.
        losses: where the samples are known.
        edges: index of a use, an output of it, and where the samples should be there (see `Entry.axis`).
    """
    generator = torch.Generator().manual_seed(0)
    strays: set[int] = set()
    reached: set[int] = set()
    shared: set[int] = set()
    with torch.no_grad():
        for loss in losses:
            if loss.edge is not None:
                found, met, several = _probe(loss, loss.edge, N, edges, generator)
                strays, reached, shared = strays | found, reached | met, shared | several
    return strays, frozenset(i for i, _, _ in edges) - reached, shared


def _probe(
    loss: Head,
    at: GradientEdge,
    N: int,
    edges: Sequence[tuple[int, GradientEdge, Where]],
    generator: torch.Generator,
) -> tuple[set[int], set[int], set[int]]:
    """The same for one loss, whose z lies ``at`` an edge, with the uses where something arrived or nothing could."""
    z = loss.input
    seed = _random(loss, generator)
    # powers of two, so that products with them are exact; samples that trade places or mix betray themselves
    dtypes = {z.dtype, *(edge.node._input_metadata[edge.output_nr].dtype for _, edge, _ in edges)}  # type: ignore[attr-defined]
    half = torch.float16 in dtypes
    # far apart, but not so far that what vanishes on its way back is lost
    most = 12 if half else min(max(N, 24), 64)
    order = torch.cat([torch.randperm(min(N, most), generator=generator) for _ in range(-(-N // most))])[:N]
    exponents = order * (most - 1) // max(min(N, most) - 1, 1) - most // 2
    inputs = [edge for _, edge, _ in edges]
    arrived: dict[int, tuple[Tensor, Tensor]] = {}
    verdicts: dict[int, Tensor] = {}

    def sampled(k: int, grad: Tensor) -> tuple[Tensor, Where]:
        where = edges[k][2]
        grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
        if isinstance(where, Tensor):
            return grad[0], where
        if where == IN_ROWS:
            grad, where = grad.unflatten(1, (-1, N)), 1
        return _sampled(*((grad, 0) if where == -1 else (grad[0], where)), 0 if half else N)

    def keep(k: int, grad: Tensor) -> None:
        met = grad.isfinite().all()
        if grad.numel():  # of what is fainter, too little is left when it is scaled down
            met = met & (largest(grad) > (0.0 if half else torch.finfo(grad.dtype).tiny * 2.0 ** (most // 2)))
        arrived[k] = met, sampled(k, grad)[0]

    def compare(factors: Tensor, k: int, scaled: Tensor) -> None:
        met, grad = arrived[k]
        scaled, where = sampled(k, scaled)
        single = grad.new_ones((), dtype=torch.bool)
        if isinstance(where, int) and grad.dim() > 1 and grad.numel() and grad.shape[where] < N:
            single = ~_shared(grad, scaled, where, half)
        verdict = torch.stack([met, aligned(grad, scaled, where, factors.to(grad.device), half), single]).to(z.device)
        verdicts[k] = verdict & verdicts[k] if k in verdicts else verdict

    pull_each([at], inputs, [seed.unsqueeze(0)], keep)
    reached = {i for k, (i, _, _) in enumerate(edges) if k not in arrived}  # whatever the values
    # the larger of two samples betrays what little it adds to the other one
    for signed in (exponents, -exponents):
        factors = (2.0**signed).to(z.device)
        pull_each([at], inputs, [(seed * along(factors, loss.axis, z)).unsqueeze(0)], partial(compare, factors))
    strays: set[int] = set()
    shared: set[int] = set()
    told: list[list[bool]] = torch.stack([*verdicts.values()]).tolist() if verdicts else []  # one transfer for all
    for k, (met, fits, single) in zip(verdicts, told, strict=True):
        if met:
            reached.add(edges[k][0])
        if not fits:  # where nothing arrives, by its shape
            strays.add(edges[k][0])
        if not single:
            shared.add(edges[k][0])
    return strays, reached, shared


def _common_length(graph: Graph, losses: Sequence[Head]) -> Samples:
    """The number of samples by shapes alone."""
    entries = [entry for entry in (*graph.entries.values(), *graph.calls) if entry.parameters]
    called = [entry.rows for entry in entries if not isinstance(entry.use, FunctionalUse)]
    N = min([_rows(loss) for loss in losses] or called or [entry.rows for entry in entries], default=1)
    for call, operations in list(graph.calls.items()):
        if N and _scattered(N, call, operations, graph.mixing):
            graph.call_again(call)
    rows = {entry.use: entry.rows for entry in graph.entries.values() if entry.parameters}
    if losses:
        return Samples(N, frozenset(use for use, length in rows.items() if length % N))
    # time steps of packed sequences are no equal shares
    packed = any(isinstance(entry.axis(i), Tensor) for entry in entries for i in entry.edges)
    for use, length in rows.items():
        if N == 0:
            raise CurvoptError(f"{use.describe()}: {EMPTY}")
        if length % N and isinstance(graph.entries[use].rule, Itself):
            raise CurvoptError(
                f"{use.describe()}: parameter '{next(iter(graph.entries[use].parameters))}' is used in a way that is "
                "not known, where only a known loss tells the samples apart; extend the loss, or call its module."
            )
        if length % N or (packed and length != N):
            raise CurvoptError(
                f"{use.describe()}: batch axis of length {length}, but another part of the network sees {N} samples; "
                "keep the samples on the first axis everywhere (expand inputs shared by all), or extend the loss."
            )
    return Samples(N, frozenset())


def _around_batch_norms(graph: Graph, losses: Sequence[Head]) -> Samples:
    """The number of samples by shapes, and the uses that did not have them in shares, were batch norms the identity."""
    found = _common_length(graph, losses)
    if any(isinstance(node, BackwardCFunction) for node in graph.mixing):  # those of several processes meet in theirs
        return found
    entries = [entry for entry in graph.entries.values() if entry.parameters]
    edges = [(i, edge, entry.axis(index)) for i, entry in enumerate(entries) for index, edge in entry.edges.items()]

    def look() -> Look:
        with _without(graph.mixing):
            strays, vague, _ = unaligned(found.N, losses, edges)
        return Look(Found(found.N, frozenset(strays)), vague)

    _, strays, *_ = _remembered(_key(graph, losses, entries), losses, entries, look)
    return Samples(found.N, found.unaligned.union(entries[i].use for i in strays))


@contextmanager
def _without(mixing: Collection[Node]) -> Iterator[None]:
    """Inside, batch norms pull back as if they left their input as it is."""
    with ExitStack() as hooks:
        for node in mixing:
            hooks.callback(node.register_hook(_as_identity).remove)
        yield


def _scattered(N: int, call: Entry, operations: Sequence[Entry], mixing: Collection[Node]) -> bool:
    """Whether N samples at the outputs of a module are elsewhere in operations in it, where batch norm mixes them."""
    outputs = [Ending(call.use, edge) for edge in call.edges.values()]
    if any(output.input.dim() == 0 or _rows(output) % N for output in outputs):
        return True
    edges = [(i, edge, entry.axis(0)) for i, entry in enumerate(operations) for edge in entry.edges.values()]
    with _without(mixing):
        return bool(unaligned(N, outputs, edges)[0])


def _as_identity(grads: Sequence[Tensor | None], arrived: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What a batch norm's node gives, had it left its input as it was."""
    of_shape = {grad.shape: grad for grad in arrived if grad is not None}
    return tuple(grad if grad is None else of_shape.get(grad.shape, grad) for grad in grads)
