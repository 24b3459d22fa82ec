"""A sample is a row of the input of the model, whatever the loss does with the output.

Where the model pools rows (tokens of documents, nodes of graphs), it is a row of the output.

`locate` finds the model calls of a backward, their heads (the outputs that the loss reaches) and with them the batch
axis of every tensor behind. Each extended model has its own number of samples, so a generator may have 6 where the
discriminator has 12; models with equal numbers share a `Location`.

>>> from curvopt import extend
>>> from curvopt.core.graph.backward_graph import read_graph
>>> model = extend(nn.Linear(3, 2))
>>> loss = model(torch.ones(4, 3))[:2].sum()  # uses two rows of four
>>> [location.N for location in locate(read_graph([loss.grad_fn])).values()]
[4]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.graph.node_vjp import Place
from curvopt.core.graph.nodes import operation, shape_of, walk
from curvopt.core.graph.operations import BY_ENTRY
from curvopt.core.record.extended_parameters import extended_model, extended_owner
from curvopt.core.record.model_calls import Model, ModelCall
from curvopt.core.samples.heads import agreeing, around_heads, behind_reductions, outermost
from curvopt.core.samples.layout import UNUSED, Axis, Layout, axis_of, labelled, labels_along
from curvopt.core.samples.propagation import BatchAxes, propagate_batch_axis
from curvopt.core.samples.rows import axis_of_head, is_along_second, matched, samples_of_rows
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.core.graph.backward_graph import BackwardGraph


@dataclass(frozen=True)
class Location:
    """The place of the samples of some models.

    Attributes:
        N: number of samples.
        heads: outputs of the models, or of operations, whose rows are the samples; what each sample feeds from there on
            is its part of the loss.
        axes: the batch axis of all tensors behind them.
        appended: whether the rows of several calls of different lengths were appended to one batch.
        is_one_sample: whether all rows of a batch are one sample, see `Model.is_one_sample`.
    """

    N: int
    heads: Mapping[Place, Layout]
    axes: BatchAxes
    appended: bool
    is_one_sample: bool = False

    def rows_of(self, edge: GradientEdge) -> list[int] | None:
        """The sample of each row (along axis 0) of a tensor before or behind the heads.

        ``None`` where it is not known, or one row depends on several samples.
        """
        place = edge.node, edge.output_nr
        shape = shape_of(*place)
        layout = self.axes.layouts.get(place)
        if isinstance(layout, Layout):
            axis = axis_of(shape, layout)
            return None if axis is None or axis.index else list(labels_along(layout, axis))
        if place in self.axes.layouts:
            return None
        return samples_of_rows(place, self.heads)


def locate(
    graph: BackwardGraph, appends_single_rows: bool = False, may_be_one: bool = False
) -> dict[Model | None, Location]:
    """The location of the samples of each model; by ``None`` that of functional code, of no model that was called.

    Args:
        graph: of the backward.
        appends_single_rows: whether calls with one row each are samples of one batch, and not an error.
        may_be_one: whether a batch is one sample if that is so for one of the models (`Model.is_one_sample`).

    Raises:
        CurvoptError: where it is not clear what a sample is.
    """
    by_model: dict[Model, list[tuple[ModelCall, Place]]] = {}
    for call, place in graph.model_calls:
        by_model.setdefault(call.model, []).append((call, place))
    found: list[tuple[Model | None, int, dict[Place, Layout], bool]] = []
    one = may_be_one and any(model.is_one_sample for model in by_model)
    for model, outputs in by_model.items():
        whole = one and model.seeks_axis is not False  # with the others, as a generator with its discriminator
        places = [place for _, place in outputs if whole and shape_of(*place)]
        located = None if places else _of_model(model, outputs, graph, appends_single_rows)
        if whole and located is not None:  # the model returns its loss
            places = [*located[1]]
        if places:
            found.append((model, 1, {place: Layout(1, 1, prod(shape_of(*place))) for place in places}, False))
        elif located is not None:
            found.append((model, *located))
    for model in _without_heads(graph, by_model):
        for N in model.last:
            heads = behind_reductions(graph, N, model.batch_axis)
            if heads:
                found.append((model, N, heads, False))
                break
    if not found:
        functional = _functional(graph)
        found = [] if functional is None else [(None, *functional, False)]
    locations: dict[Model | None, Location] = {}
    for key in dict.fromkeys((N, appended) for _, N, _, appended in found):
        same = [(model, heads) for model, N, heads, appended in found if (N, appended) == key]
        heads = {place: layout for _, own in same for place, layout in own.items()}
        heads = heads if len(same) == 1 else outermost(heads, key[0], graph)
        parameters = graph.of_parameters_alone if key[0] == 1 else None
        axes = propagate_batch_axis(heads, key[0], order=graph.nodes, parameters=parameters)
        if any(transposed for _, transposed in axes.mixing()):
            heads = agreeing(axes, heads, graph)
            axes = propagate_batch_axis(heads, key[0], order=graph.nodes)
        location = Location(key[0], heads, axes, key[1], one and key[0] == 1)
        locations.update((model, location) for model, _ in same)
    return locations


def _without_heads(graph: BackwardGraph, called: Collection[Model]) -> list[Model]:
    """The models of which parameters take part but no output, as in a gradient penalty."""
    by_calls = [found.call.model for found in graph.module_calls.values() if found.parameters]
    models = dict.fromkeys([*by_calls, *map(extended_model, graph.operands)])
    return [model for model in models if model is not None and model.last and model not in called]


def _of_model(
    model: Model, outputs: Sequence[tuple[ModelCall, Place]], graph: BackwardGraph, appends_single_rows: bool
) -> tuple[int, dict[Place, Layout], bool] | None:
    """Number of samples, heads, and whether batches were appended; ``None`` for calls without tensors."""
    first = _first_calls(outputs, graph)
    voting = [call for call in first if call.samples]
    if not voting:
        return None
    ends = {place[0] for _, place in outputs if len(shape_of(*place))}
    met = set(walk(graph.roots, last=ends))
    heads = [(call, place) for call, place in outputs if place[0] in met and len(shape_of(*place)) > 0]
    axis = model.batch_axis
    lengths = [_number(call, heads, axis) for call in voting]
    single = len(lengths) > 1 and set(lengths) == {1}
    N, appended = lengths[0], len(set(lengths)) > 1 or (single and appends_single_rows)
    pooled = not appended and all(call in voting for call, _ in heads)
    if pooled and (rows := _rows_of_outputs(heads, N)) is not None:
        N, lengths = rows, [rows] * len(lengths)
    if single and not appended:
        raise CurvoptError(
            f"{voting[0].name} was called {len(lengths)} times with one row each, so that each call has one sample "
            "of its own; stack the rows and call it once."
        )
    if 0 in lengths:
        alone = not any(shape_of(*place).numel() for _, place in graph.model_calls)
        raise (EmptyBatch if alone else CurvoptError)(EMPTY.format(voting[0].name))
    starts: dict[int, int] = {}
    if appended:
        for call in voting:
            starts[call.number] = sum(lengths[: len(starts)])
        N = sum(lengths)
    size = {call.number: length for call, length in zip(voting, lengths, strict=True)}
    known: dict[Place, Layout] = {}
    others: list[tuple[ModelCall, Place]] = []
    for call, place in sorted(outputs, key=lambda output: output[0].number):
        shape = shape_of(*place)
        if not shape:
            continue
        # along the batch axis, or the first one
        rows = size.get(call.number, N) if appended else N
        at = axis_of_head(place, rows, axis)
        own = at is not None
        if call.number in size and own:
            start = starts.get(call.number, 0)
            known[place] = labelled(shape, at or 0, range(start, start + rows), N, False)
        elif call.number not in size and (labels := samples_of_rows(place, known)) is not None:
            known[place] = labelled(shape, 0, labels, N, False)
        elif own and not appended:
            known[place] = labelled(shape, at or 0, range(N), N, False)
        elif (call, place) in heads:
            others.append((call, place))
    shares = [] if not others else _place_others(others, known, N, axis, appended)
    found = {place: known[place] for _, place in heads}
    found = found or behind_reductions(graph, N, axis)
    if not found:
        raise CurvoptError(
            f"{voting[0].name} was called with {N} samples, but no tensor with {N} rows along axis {axis} leads to the "
            "loss; if the samples are along another axis, say extend(model, batch_axis=1)."
        )
    if shares and not _are_shares(found, graph, N, axis):
        for call, place in shares:
            if axis or not is_along_second(place, N):
                raise _no_shares(call, place, N)
            found[place] = labelled(shape_of(*place), 1, range(N), N, False)
    if not appended:
        found |= around_heads(graph, N, axis, found)
        for other in model.last:
            more = around_heads(graph, other, axis, found) if other != N else {}
            if more:  # of a call whose output the loss does not contain, as where it is differentiated by the input
                found = _appended(found, 0, N + other) | _appended(more, N, N + other)
                return N + other, found, True
    return N, found, appended


def _appended(heads: Mapping[Place, Layout], start: int, N: int) -> dict[Place, Layout]:
    """The layouts of heads whose samples are some of the N of several batches."""
    found = {}
    for place, layout in heads.items():
        shape = shape_of(*place)
        axis = axis_of(shape, layout)
        if axis is not None:
            labels = [start + label for label in labels_along(layout, axis)]
            found[place] = labelled(shape, axis.index, labels, N, layout.mixed)
    return found


def _place_others(
    others: Sequence[tuple[ModelCall, Place]], known: dict[Place, Layout], N: int, axis: int, appended: bool
) -> list[tuple[ModelCall, Place]]:
    """Add heads without N rows along the batch axis.

    Rows of some follow from other heads, some have their samples along axis 1; others are shares of k rows, which are
    returned.
    """
    layouts = propagate_batch_axis(known, N).layouts
    located = {place: layout for place, layout in layouts.items() if isinstance(layout, Layout)}
    shares: list[tuple[ModelCall, Place]] = []
    for call, place in others:
        shape = shape_of(*place)
        rows = samples_of_rows(place, located)
        if rows is not None and UNUSED not in rows:
            known[place] = labelled(shape, 0, rows, N, False)
            continue
        second = not axis and not appended and shape[0] % N > 0 and is_along_second(place, N, located)
        if not second and (appended or shape[0] % N or not shape[0]):
            raise _other_length(call, shape, N, axis)
        # of a flattened [T, N], row t N + n is of sample n
        before = shape[0] if second else shape[0] // N if axis else 1
        known[place] = Layout(before, N, prod(shape) // (before * N))
        if located:
            axes = propagate_batch_axis({place: known[place]}, N, located, complete=False)
            met, pairs = any(other in axes.layouts for other in located), matched(axes, located)
            # other outputs have other shares, or none that is known
            if met and (pairs is None or any(a != b for a, b in pairs.items())):
                raise _other_length(call, shape, N, axis)
        if not second:
            shares.append((call, place))
    return shares


class EmptyBatch(CurvoptError):
    """All that the models were called with is empty."""


EMPTY = "{}: the batch is empty; skip it, or call backward inside of an empty `with backpack():` for it."


def _number(call: ModelCall, heads: Sequence[tuple[ModelCall, Place]], axis: int) -> int:
    """The number of samples of a call, which the heads decide where a list may be one batch or several inputs."""
    for length in call.samples:
        if any(len(shape := shape_of(*place)) > axis and shape[axis] == length for _, place in heads):
            return length
    return call.samples[0]


def _rows_of_outputs(heads: Sequence[tuple[ModelCall, Place]], N: int) -> int | None:
    """The number of rows of outputs ``[rows, C]`` if it is less than N, as where tokens or nodes were pooled."""
    shapes = [shape_of(*place) for _, place in heads]
    rows = {shape[0] for shape in shapes}
    if len(rows) != 1 or any(len(shape) != 2 or N in shape for shape in shapes):
        return None
    (found,) = rows
    return found if 0 < found < N else None


def _first_calls(outputs: Sequence[tuple[ModelCall, Place]], graph: BackwardGraph) -> list[ModelCall]:
    """The calls of a model whose inputs depend on no other call of it."""
    calls = list(dict.fromkeys(call for call, _ in outputs))
    if len(calls) == 1:
        return calls
    behind: dict[Node, frozenset[int]] = {}  # the calls on which a node depends
    at: dict[Node, set[int]] = {}
    for call, (node, _) in outputs:
        at.setdefault(node, set()).add(call.number)
    later = set[int]()
    for node in reversed(graph.nodes):
        found: frozenset[int] = frozenset()
        for below, _ in node.next_functions:
            if below is not None and behind.get(below):
                found = found | behind[below] if found else behind[below]
        if node in at:
            # what a call depends on, but for its own outputs
            later |= {number for number in at[node] if found - {number}}
            found = found | at[node]
        behind[node] = found
    return [call for call in calls if call.number not in later]


def _are_shares(heads: Mapping[Place, Layout], graph: BackwardGraph, N: int, axis: int) -> bool:
    """Whether a layer says which rows of the heads belong to a sample, where these have several."""
    axes = propagate_batch_axis(heads, N)
    for call in graph.module_calls.values():
        for index, edge in call.edges.items():
            layout, expected = axes.of(edge.node, edge.output_nr), call.axis(index)
            if isinstance(layout, Layout) and isinstance(expected, int):
                shape = shape_of(edge.node, edge.output_nr)
                # with samples along axis 1 any layer says so, unless its output is [N, N, ...]
                at = axis if axis and shape[0] != N else expected
                if axis_of(shape, layout) == Axis(at, 1, 1) and shape[at] == N:
                    return True
    return False


def _no_shares(call: ModelCall, place: Place, N: int) -> CurvoptError:
    return CurvoptError(
        f"{call.name} was called with {N} samples but gives {shape_of(*place)[0]} rows, and no layer with {N} rows "
        "says which rows belong to a sample; return the output with a batch axis and reshape it outside of the model."
    )


def _other_length(call: ModelCall, shape: torch.Size, N: int, axis: int) -> CurvoptError:
    return CurvoptError(
        f"{call.name} was called with {N} samples along axis {axis}, but gives an output of shape {list(shape)}; if "
        "the samples are along another axis, say extend(model, batch_axis=1), else return one row for each sample. "
        "A single sample without a batch axis needs unsqueeze(0)."
    )


def _functional(graph: BackwardGraph) -> tuple[int, dict[Place, Layout]] | None:
    """Number of samples and heads of code that calls no extended module: rows of operations of parameters and data."""
    owners = [extended_owner(p) for p in graph.operands]
    if not all(type(owner).forward is nn.Module.forward for owner in owners):
        return None  # a model that was called where nothing is recorded
    lengths: dict[int, None] = {}
    alone = graph.of_parameters_alone
    for node in graph.nodes:
        below = [b for b, _ in node.next_functions if b is not None]
        constant = len(below) < len(node.next_functions) and operation(node) in BY_ENTRY  # may be data of this shape
        shape = shape_of(node)
        if below and all(b in alone for b in below) and (node not in alone or constant) and len(shape) > 0:
            lengths[shape[0]] = None
    lengths = {length: None for length in lengths if length}
    for N in sorted(lengths, reverse=True):
        heads = behind_reductions(graph, N, 0)
        if heads:
            return N, heads
    return None
