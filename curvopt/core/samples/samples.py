"""A sample is a row of the input of the model, whatever the loss does with the output.

Where the model pools rows (tokens of documents, nodes of graphs), it is a row of the output.

`locate` finds the model calls of a backward, their heads (the outputs that the loss reaches) and with them the batch
axis of every tensor behind. Each extended model has its own number of samples, so a generator may have 6 where the
discriminator has 12; models with equal numbers share a `Samples`.

>>> from curvopt import extend
>>> from curvopt.core.graph import read_graph
>>> model = extend(nn.Linear(3, 2))
>>> loss = model(torch.ones(4, 3))[:2].sum()  # uses two rows of four
>>> [location.N for location in locate(read_graph([loss.grad_fn])).values()]
[4]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import Node

from curvopt.core.nodes import Edge, leads_further_to, leaf_of, name_of, outputs_of, shape_of, walk
from curvopt.core.record import Model, ModelCall, extended_model, extended_owner
from curvopt.core.samples.axes import (
    Heads,
    Samples,
    axis_of_head,
    divides_parameters,
    is_along_second,
    matched,
    propagate_batch_axis,
    samples_of_rows,
)
from curvopt.core.samples.layout import UNUSED, Axis, Layout, axis_of, labelled
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.core.graph import BackwardGraph


def locate(graph: BackwardGraph, as_one_sample: bool = False) -> dict[Model | None, Samples]:
    """The location of the samples of each model that takes part.

    Args:
        graph: of the backward.
        as_one_sample: whether each batch is one sample, whatever the models say (`Model.batch_axis`).

    Raises:
        CurvoptError: where it is not clear what a sample is.
    """
    outputs: dict[Model | None, list[tuple[ModelCall, Edge]]] = {}
    for call, edge in graph.model_calls:
        outputs.setdefault(call.model, []).append((call, edge))
    computed = _computed_with_parameters(graph)
    models = dict.fromkeys([*outputs, *computed])
    found: list[tuple[Model | None, int, Heads, bool]] = []
    one = as_one_sample or any(model is not None and model.batch_axis is None for model in models)
    for model in models:
        rows = _BatchOfModel(model, outputs.get(model, []), computed.get(model, []), graph)
        if one:  # with the others, as a generator with its discriminator
            edges = rows.edges
            if not all(shape_of(*edge).numel() for edge in edges):
                raise EmptyBatch(EMPTY.format("The model" if model is None else model.name))
            found.append((model, 1, {edge: Layout(1, 1, prod(shape_of(*edge))) for edge in edges}, False))
        else:
            found.append((model, *rows.locate()))
    locations: dict[Model | None, Samples] = {}
    for key in dict.fromkeys((N, appended) for _, N, heads, appended in found if heads):
        same = [(model, heads) for model, N, heads, appended in found if (N, appended) == key and heads]
        heads = {edge: layout for _, own in same for edge, layout in own.items()}
        if len(same) > 1:  # what a model gets from another one is located through that one
            met = set(walk(graph.roots, last={node for node, _ in heads}))
            heads = {edge: layout for edge, layout in heads.items() if edge[0] in met}
        parameters = graph.of_parameters_alone if key[0] == 1 else None
        axes = propagate_batch_axis(heads, key[0], order=graph.nodes, parameters=parameters)
        location = Samples(key[0], heads, axes, key[1], one)
        locations.update((model, location) for model, _ in same)
    return locations


def _computed_with_parameters(graph: BackwardGraph) -> dict[Model | None, list[Edge]]:
    """The first tensors behind the scalar that operations with parameters compute, past the outputs of models.

    And those that users have marked as predictions.

    Such are slopes (gradients by an input) in a penalty, what a model computes its loss from if it returns that, and
    results of functional code. Operations on parameters alone, as in a weight decay, are passed over.
    """
    outputs = {edge for _, edge in graph.model_calls if shape_of(*edge)}
    layers = {
        (edge.node, edge.output_nr): found.call.model
        for found in graph.module_calls.values()
        for edge in found.edges.values()
    }
    found: dict[Model | None, list[Edge]] = {}
    ends = {node for node, _ in outputs if len(outputs_of(node)) == 1}
    between = [node for node in walk(graph.roots, last=ends) if node not in ends]
    if not any([node in graph.leaves or node.metadata for node in between]):  # type: ignore[attr-defined]
        return found  # nearly always: data and outputs of models alone
    marked = {node for node, _ in graph.predictions}
    stack: list[Edge] = [(node, 0) for node in graph.roots]
    seen = set(stack)
    while stack:
        edge = stack.pop()
        node = edge[0]
        if edge in graph.predictions:
            below = walk([node])
            leaf = next(leaf for leaf in map(leaf_of, below) if leaf is not None and extended_model(leaf) is not None)
            found.setdefault(extended_model(leaf), []).append(edge)
            continue
        if edge in outputs:
            continue
        if shape_of(*edge) if leaf_of(node) is None else False:
            if edge in layers:
                found.setdefault(layers[edge], []).append(edge)
                continue
            if node not in graph.of_parameters_alone and not (marked and leads_further_to(node, marked)):
                below = [b for b, _ in node.next_functions if b is not None]
                entering = [b for b in below if b in graph.of_parameters_alone]
                if not entering and not graph.of_parameters.issuperset(below):  # a weight computed with constants
                    entering = [b for b in below if b in graph.of_parameters]
                models = [
                    extended_model(leaf) for b in entering for leaf in map(leaf_of, walk([b])) if leaf is not None
                ]
                if models:
                    found.setdefault(models[0], []).append(edge)
                    continue
        for operand in node.next_functions:
            if operand[0] is not None and operand not in seen:
                seen.add(operand)  # type: ignore[arg-type]
                stack.append(operand)  # type: ignore[arg-type]
    return found


class EmptyBatch(CurvoptError):
    """All that the models were called with is empty."""


EMPTY = "{}: the batch is empty; skip it, or call backward inside of an empty `with backpack():` for it."


class _BatchOfModel:
    """The calls of one model in a backward, and where their samples are in its heads.

    Args:
        model: the model.
        outputs: of its calls.
        computed: tensors that operations with its parameters compute, which the loss reaches past outputs of models.
        graph: the graph.
    """

    def __init__(
        self,
        model: Model | None,
        outputs: Sequence[tuple[ModelCall, Edge]],
        computed: Sequence[Edge],
        graph: BackwardGraph,
    ):
        self.graph, self.computed = graph, computed
        self.axis = (model.batch_axis or 0) if model is not None else 0
        self.outputs = [(call, edge) for call, edge in outputs if shape_of(*edge)]
        ends = {edge[0] for _, edge in self.outputs}
        met = set(walk(graph.roots, last=ends | {node for node, _ in graph.predictions})) if ends else set()
        self.heads = [(call, edge) for call, edge in self.outputs if edge[0] in met]
        inner = [found.call.model_call for found in graph.module_calls.values() if found.call.model is model]
        calls = dict.fromkeys([*(call for call, _ in outputs), *(call for call in inner if call is not None)])
        has_samples = any(call.samples for call in calls)
        if not has_samples and computed:  # modules that are called with parameters alone give no predictions
            self.outputs = self.heads = []
        owners = [extended_owner(p) for p in graph.operands if extended_model(p) is model]
        #: Code that calls no module with data. A model that was called where nothing is recorded is none.
        self.is_functional = not has_samples and all(type(owner).forward is nn.Module.forward for owner in owners)
        later = _later_calls(outputs, graph)
        self.calls = sorted((c for c in calls if c.samples and c not in later), key=lambda call: call.number)

    @property
    def edges(self) -> list[Edge]:
        """The heads."""
        return [edge for _, edge in self.heads] + list(self.computed)

    def locate(self) -> tuple[int, Heads, bool]:
        """Number of samples, heads, and whether batches of different lengths were appended."""
        lengths = [self._number(call) for call in self.calls]
        if not lengths:
            rows = {shape_of(*edge)[0] for edge in self.edges}
            if not self.is_functional or len(rows) != 1:
                return 0, {}, False
            (N,) = rows
            return (N, *self._same_length(N))
        if len(set(lengths)) > 1:
            return self._appended(lengths)
        rows = self._pooled_rows(lengths[0])
        if rows is None and lengths[0] == 1 < len(lengths):
            raise CurvoptError(
                f"{self.calls[0].name} was called {len(lengths)} times with one row each, so that each call has one "
                "sample of its own; stack the rows and call it once, or say that the calls are one sample by "
                "extend(model, batch_axis=None)."
            )
        N = lengths[0] if rows is None else rows
        if N == 0:
            empty = not any(shape_of(*edge).numel() for _, edge in self.graph.model_calls)
            raise (EmptyBatch if empty else CurvoptError)(EMPTY.format(self.calls[0].name))
        return (N, *self._same_length(N))

    def _number(self, call: ModelCall) -> int:
        """The number of samples of a call, which the heads decide where a list may be one batch or several inputs."""
        for length in call.samples:
            if any(len(s := shape_of(*edge)) > self.axis and s[self.axis] == length for _, edge in self.heads):
                return length
        return call.samples[0]

    def _pooled_rows(self, N: int) -> int | None:
        """The number of rows of the heads if they agree on fewer than N, as where tokens or nodes were pooled."""
        shapes = [shape_of(*edge) for call, edge in self.heads if call in self.calls]
        rows = {shape[0] for shape in shapes}
        if len(rows) != 1 or len(shapes) < len(self.heads) or any(N in shape for shape in shapes):
            return None
        (found,) = rows
        # where entries of parameters were those of samples, these are columns of a mean over the batch
        columns = 0 < found < N and any(divides_parameters(edge, 0, found) for _, edge in self.heads)
        return found if 0 < found < N and not columns else None

    def _same_length(self, N: int) -> tuple[Heads, bool]:
        """The heads, where row n of each call is of sample n."""
        known: Heads = {}
        others: list[tuple[ModelCall, Edge]] = []
        for call, edge in sorted(self.outputs, key=lambda output: output[0].number):
            at = axis_of_head(edge, N, self.axis)
            if call not in self.calls and (labels := samples_of_rows(edge, known)) is not None:
                known[edge] = labelled(shape_of(*edge), 0, labels, N, False)
            elif at is not None:
                known[edge] = labelled(shape_of(*edge), at, range(N), N, False)
            elif (call, edge) in self.heads:
                others.append((call, edge))
        shares = self._place_others(others, known, N) if others else []
        heads = {edge: known[edge] for _, edge in self.heads}
        if shares and not _are_shares(heads, self.graph, N, self.axis):
            for call, edge in shares:
                if self.axis or not is_along_second(edge, N):
                    raise CurvoptError(
                        f"{call.name} was called with {N} samples but gives {shape_of(*edge)[0]} rows, and no layer "
                        f"with {N} rows says which rows belong to a sample; return the output with a batch axis and "
                        "reshape it outside of the model."
                    )
                heads[edge] = labelled(shape_of(*edge), 1, range(N), N, False)
        heads |= self._of_computed(N, range(N), N, heads)
        self._check_computed(heads, N)
        if not heads:
            raise CurvoptError(
                f"{self.calls[0].name if self.calls else 'The model'} was called with {N} samples, but no tensor with "
                f"{N} rows along axis {self.axis} leads to the loss; if the samples are along another axis, say "
                "extend(model, batch_axis=1), and if rows are no samples, say batch_axis=None."
            )
        return heads, False

    def _of_computed(self, rows: int, labels: Iterable[int], N: int, known: Heads) -> Heads:
        """The heads among tensors that operations with parameters compute: those with so many rows."""
        layouts = propagate_batch_axis(known, N).layouts if known and self.computed else {}
        found: Heads = {}
        for edge in self.computed:
            if isinstance(layouts.get(edge), Layout):
                continue
            at = axis_of_head(edge, rows, self.axis)
            of_rows = samples_of_rows(edge, known) if known and not self.axis else None
            if of_rows is not None and UNUSED not in of_rows:
                found[edge] = labelled(shape_of(*edge), 0, of_rows, N, False)
            elif at is not None:
                found[edge] = labelled(shape_of(*edge), at, labels, N, False)  # type: ignore[arg-type]
        return found

    def _check_computed(self, heads: Heads, N: int) -> None:
        """Refuse tensors that operations with parameters compute, if these are no heads and not behind heads."""
        behind = propagate_batch_axis(heads, N).layouts if len(self.computed) > 0 else {}
        for edge in self.computed:
            if edge not in behind:
                raise CurvoptError(
                    f"A tensor of shape {list(shape_of(*edge))} ({name_of(edge[0])}) is computed with parameters of "
                    f"the model, and is in the loss past its outputs, but has no row for each of the {N} samples "
                    "(forces on atoms beside energies of molecules?); leave it out, or say that the batch is one "
                    "sample by extend(model, batch_axis=None). curvopt.explain(loss) shows what was found."
                )

    def _appended(self, lengths: Sequence[int]) -> tuple[int, Heads, bool]:
        """The heads, where the samples of a call come after those of the calls before it."""
        if 0 in lengths:
            raise CurvoptError(EMPTY.format(self.calls[0].name))
        N, start, heads = sum(lengths), 0, Heads()
        for call, rows in zip(self.calls, lengths, strict=True):
            labels = range(start, start + rows)
            for _, edge in (head for head in self.heads if head[0] is call):
                at = axis_of_head(edge, rows, self.axis)
                if at is None:
                    raise _other_length(call, shape_of(*edge), rows, self.axis)
                heads[edge] = labelled(shape_of(*edge), at, labels, N, False)
            heads |= {p: x for p, x in self._of_computed(rows, labels, N, {}).items() if p not in heads}
            start += rows
        self._check_computed(heads, N)
        for call, edge in self.heads:
            if edge not in heads:
                labels = samples_of_rows(edge, heads)
                if labels is None or UNUSED in labels:
                    raise _other_length(call, shape_of(*edge), N, self.axis)
                heads[edge] = labelled(shape_of(*edge), 0, labels, N, False)
        return N, heads, True

    def _place_others(
        self, others: Sequence[tuple[ModelCall, Edge]], known: Heads, N: int
    ) -> list[tuple[ModelCall, Edge]]:
        """Add heads without N rows along the batch axis.

        Rows of some follow from other heads, some have their samples along axis 1; others are shares of k rows, which
        are returned.
        """
        layouts = propagate_batch_axis(known, N).layouts
        located = {edge: layout for edge, layout in layouts.items() if isinstance(layout, Layout)}
        shares: list[tuple[ModelCall, Edge]] = []
        for call, edge in others:
            shape = shape_of(*edge)
            rows = samples_of_rows(edge, located)
            if rows is not None and UNUSED not in rows:
                known[edge] = labelled(shape, 0, rows, N, False)
                continue
            second = not self.axis and shape[0] % N > 0 and is_along_second(edge, N, located)
            if not second and (shape[0] % N or not shape[0]):
                raise _other_length(call, shape, N, self.axis)
            # of a flattened [T, N], row t N + n is of sample n
            before = shape[0] if second else shape[0] // N if self.axis else 1
            known[edge] = Layout(before, N, prod(shape) // (before * N))
            if located:
                axes = propagate_batch_axis({edge: known[edge]}, N, located, complete=False)
                met, pairs = any(other in axes.layouts for other in located), matched(axes, located)
                # other outputs have other shares, or none that is known
                if met and (pairs is None or any(a != b for a, b in pairs.items())):
                    raise _other_length(call, shape, N, self.axis)
            if not second:
                shares.append((call, edge))
        return shares


def _later_calls(outputs: Sequence[tuple[ModelCall, Edge]], graph: BackwardGraph) -> set[ModelCall]:
    """The calls of a model whose inputs depend on another call of it."""
    if len({call for call, _ in outputs}) < 2:
        return set()
    behind: dict[Node, frozenset[ModelCall]] = {}  # the calls on which a node depends
    at: dict[Node, set[ModelCall]] = {}
    for call, (node, _) in outputs:
        at.setdefault(node, set()).add(call)
    later = set[ModelCall]()
    for node in reversed(graph.nodes):
        found: frozenset[ModelCall] = frozenset()
        for below, _ in node.next_functions:
            if below is not None and behind.get(below):
                found = found | behind[below] if found else behind[below]
        if node in at:
            # what a call depends on, but for its own outputs
            later |= {call for call in at[node] if found - {call}}
            found = found | at[node]
        behind[node] = found
    return later


def _are_shares(heads: Mapping[Edge, Layout], graph: BackwardGraph, N: int, axis: int) -> bool:
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


def _other_length(call: ModelCall, shape: torch.Size, N: int, axis: int) -> CurvoptError:
    return CurvoptError(
        f"{call.name} was called with {N} samples along axis {axis}, but gives an output of shape {list(shape)}; if "
        "the samples are along another axis, say extend(model, batch_axis=1), if rows are no samples batch_axis=None, "
        "else return one row for each sample. A single sample without a batch axis needs unsqueeze(0)."
    )
