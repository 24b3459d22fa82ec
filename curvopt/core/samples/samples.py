"""What a sample is: N and the heads of each model, by one rule for each question.

::

    N            the length of the batch axis of the first tensor that a model call got
    heads        the outputs of model calls that the loss reaches, and past these the first tensors that operations with
                 parameters compute: slopes, what a model computes its loss from, functional code, what users mark
    [N, ...]     row n of a head is sample n
    [k N, ...]   rows n k to n k + k - 1 are sample n, or n, n + N, ... as of torch.cat, as layers with N rows show
    [T, N, ...]  the samples are along axis 1, if they share all parameters then
    [R, ...]     rows that are computed from tensors whose samples are known have the samples of these
    [M, ...]     M < N rows on which all heads agree, as of graphs or molecules, are the samples
    else         a named error

A generator may have 6 samples where the discriminator has 12. Models with equal N share their `Samples`. Calls of one
model with different N have their rows one after the other.

>>> from curvopt import extend
>>> from curvopt.core.graph import read_graph
>>> model = extend(nn.Linear(3, 2))
>>> loss = model(torch.ones(4, 3))[:2].sum()  # uses two rows of four
>>> [samples.N for samples in locate(read_graph([loss.grad_fn])).values()]
[4]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import nn
from torch.autograd.graph import Node

from curvopt.core.graph import BackwardGraph
from curvopt.core.nodes import Edge, leads_further_to, leaf_of, name_of, outputs_of, shape_of, walk
from curvopt.core.record import Model, ModelCall, extended_model, extended_owner
from curvopt.core.samples.axes import (
    Heads,
    Samples,
    layouts_of_parameters,
    matched,
    propagate_batch_axis,
    samples_of_rows,
)
from curvopt.core.samples.layout import UNUSED, Axis, Layout, axis_of, labelled
from curvopt.errors import CurvoptError


def locate(graph: BackwardGraph, as_one_sample: bool = False) -> dict[Model | None, Samples]:
    """The samples of each model that takes part.

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
    # all models, as a generator with its discriminator
    one = as_one_sample or any(model is not None and model.batch_axis is None for model in models)
    found: dict[tuple[int, bool], dict[Model | None, Heads]] = {}
    for model in models:
        batch = _Batch(model, outputs.get(model, []), computed.get(model, []), graph)
        N, appended, heads = batch.as_one_sample() if one else batch.locate()
        if heads:
            found.setdefault((N, appended), {})[model] = heads
    samples: dict[Model | None, Samples] = {}
    for (N, appended), heads_of in found.items():
        heads = {edge: layout for heads in heads_of.values() for edge, layout in heads.items()}
        if len(heads_of) > 1:  # what a model gets from another one is located through the other
            met = set(walk(graph.roots, last={node for node, _ in heads}))
            heads = {edge: layout for edge, layout in heads.items() if edge[0] in met}
        parameters = graph.free_of_data if N == 1 else None
        axes = propagate_batch_axis(heads, N, order=graph.nodes, parameters=parameters)
        for edge in [edge for model in heads_of for edge in computed.get(model, ())]:
            if edge not in axes.layouts:  # operations with parameters compute it: no head, and not behind one
                raise _no_rows(edge, N, edge in graph.predictions)
        samples.update(dict.fromkeys(heads_of, Samples(N, heads, axes, appended, one)))
    return samples


def _computed_with_parameters(graph: BackwardGraph) -> dict[Model | None, list[Edge]]:
    """The heads past the outputs of models: marked ones, and the first tensors that operations with parameters compute.

    Operations without data, as in a weight decay, are passed over.
    """
    outputs = {edge for _, edge in graph.model_calls if shape_of(*edge)}
    ends = {node for node, _ in outputs if len(outputs_of(node)) == 1}
    between = [node for node in walk(graph.roots, last=ends) if node not in ends]
    found: dict[Model | None, list[Edge]] = {}
    if not any([node in graph.leaves or node.metadata for node in between]):  # type: ignore[attr-defined]
        return found  # nearly always: only data and outputs of models
    layers = {(edge.node, edge.output_nr) for layer in graph.module_calls.values() for edge in layer.edges.values()}
    marked = {node for node, _ in graph.predictions}
    models_of = {node: call.model for call, (node, _) in graph.model_calls if node in ends}
    stack: list[Edge] = [(node, 0) for node in graph.roots]
    seen = set(stack)
    while stack:
        edge = stack.pop()
        node, parameters = edge[0], graph.free_of_data
        computing: list[Node] = []  # nodes behind which the parameters are that compute this tensor
        if edge in graph.predictions:
            computing = [node]
        elif edge in outputs:
            continue
        elif node not in graph.leaves and shape_of(*edge):
            if edge in layers:
                computing = [node]
            elif node not in parameters and not (marked and leads_further_to(node, marked)):
                computing = [below for below, _ in node.next_functions if below is not None and below in parameters]
        if computing:
            models = (models_of.get(node) or _model_of(node) for node in walk(computing, last=ends))
            found.setdefault(next((model for model in models if model is not None), None), []).append(edge)
            continue
        for operand in node.next_functions:
            if operand[0] is not None and operand not in seen:
                seen.add(operand)  # type: ignore[arg-type]
                stack.append(operand)  # type: ignore[arg-type]
    return found


def _model_of(node: Node) -> Model | None:
    """The model of a parameter's leaf."""
    leaf = leaf_of(node)
    return None if leaf is None else extended_model(leaf)


class EmptyBatch(CurvoptError):
    """All that the models were called with is empty."""


class _Batch:
    """The calls of one model in a backward.

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
        self.name = "The model" if model is None else model.name
        self.axis = (model.batch_axis or 0) if model is not None else 0
        self.graph, self.computed = graph, computed
        inner = [layer.model_call for layer in graph.module_calls]
        calls = dict.fromkeys([call for call, _ in outputs] + [c for c in inner if c is not None and c.model is model])
        has_samples = any([call.samples for call in calls])
        later = _later_calls(outputs, graph)
        #: Calls that say how many samples there are: with data, and not with outputs of another one.
        self.calls = sorted([c for c in calls if c.samples and c not in later], key=lambda call: call.number)
        owners = [extended_owner(p) for p in graph.operands if extended_model(p) is model]
        #: Code that calls no module with data. A model that was called where nothing is recorded is none.
        self.is_functional = not has_samples and all(type(owner).forward is nn.Module.forward for owner in owners)
        # modules that are called with parameters only give no predictions
        self.outputs = [] if computed and not has_samples else [output for output in outputs if shape_of(*output[1])]
        ends = {edge[0] for _, edge in self.outputs}
        marked = {edge[0] for edge in computed if edge in graph.predictions}  # marks of other models are passed
        met = set(walk(graph.roots, last=ends | marked)) if ends else set()
        self.heads = [(call, edge) for call, edge in self.outputs if edge[0] in met]

    @property
    def edges(self) -> list[Edge]:
        """The heads."""
        return [edge for _, edge in self.heads] + list(self.computed)

    def as_one_sample(self) -> tuple[int, bool, Heads]:
        """`locate`, of a batch that is one sample."""
        heads = {edge: Layout(1, 1, prod(shape_of(*edge))) for edge in self.edges}
        if not all(layout.after for layout in heads.values()):
            raise EmptyBatch(_EMPTY.format(self.name))
        return 1, False, heads

    def locate(self) -> tuple[int, bool, Heads]:
        """Number of samples, whether batches of different lengths are one after the other, and the heads."""
        lengths = {call: self._length(call) for call in self.calls}
        numbers = list(dict.fromkeys(lengths.values()))
        if not numbers:
            agreed = {shape_of(*edge)[0] for edge in self.edges}
            if not self.is_functional or len(agreed) != 1:
                return 0, False, {}
            (N,) = agreed
            return N, False, self._heads({}, N)
        if 0 in numbers:
            empty = not any(shape_of(*edge).numel() for _, edge in self.graph.model_calls)
            raise (EmptyBatch if empty else CurvoptError)(_EMPTY.format(self.calls[0].name))
        if len(numbers) > 1:
            ends = list(accumulate(lengths.values()))
            rows = {call: range(end - lengths[call], end) for call, end in zip(lengths, ends, strict=True)}
            return ends[-1], True, self._heads(rows, ends[-1])
        N = self._pooled_rows(numbers[0]) or numbers[0]
        if N == 1 < len(lengths):
            raise CurvoptError(
                f"{self.calls[0].name} was called {len(lengths)} times with one row each, so that each call has "
                "another sample; stack the rows and call it once, or say that the calls are one sample by "
                "extend(model, batch_axis=None)."
            )
        return N, False, self._heads(dict.fromkeys(lengths, range(N)), N)

    def _length(self, call: ModelCall) -> int:
        """The number of samples of a call, which the heads decide where a list may be one batch or several inputs."""
        lengths = [shape_of(*edge)[self.axis : self.axis + 1] for _, edge in self.heads]
        return next((length for length in call.samples if (length,) in lengths), call.samples[0])

    def _pooled_rows(self, N: int) -> int | None:
        """The number of rows of the heads if they agree on fewer than N, as where tokens or nodes were pooled."""
        shapes = [shape_of(*edge) for call, edge in self.heads if call in self.calls]
        rows = {shape[0] for shape in shapes}
        if len(rows) != 1 or len(shapes) < len(self.heads) or any(N in shape for shape in shapes):
            return None
        (M,) = rows
        if not 0 < M < N:
            return None
        for _, edge in self.heads:
            axes = propagate_batch_axis({edge: labelled(shape_of(*edge), 0, range(M), M, False)}, M, complete=False)
            if any(isinstance(layout, Layout) for layout in layouts_of_parameters(axes)):
                return None  # entries of parameters would belong to samples: columns of a mean over the batch
        return M

    def _heads(self, rows: Mapping[ModelCall, range], N: int) -> Heads:
        """The heads, from the samples of the rows of each call."""
        known, unclear, everything = Heads(), list[tuple[ModelCall, Edge]](), range(N)
        for call, edge in sorted(self.outputs, key=lambda output: output[0].number):
            picked = None if call in rows else samples_of_rows(edge, known)
            if picked is not None:
                known[edge] = labelled(shape_of(*edge), 0, picked, N, False)
            elif (layout := self._layout(edge, rows.get(call, everything), N)) is not None:
                known[edge] = layout
            elif (call, edge) in self.heads:
                unclear.append((call, edge))
        located = _located(known, N) if unclear else {}
        for call, edge in unclear:
            picked, n = samples_of_rows(edge, located), rows.get(call, everything)
            if picked is not None and UNUSED not in picked:
                known[edge] = labelled(shape_of(*edge), 0, picked, N, False)
            elif (layout := self._layout(edge, n, N, located)) is not None:
                known[edge] = layout
            else:
                raise _other_length(call, shape_of(*edge), len(n), self.axis)
        heads = {edge: known[edge] for _, edge in self.heads}
        located = _located(heads, N) if self.computed else {}
        for edge in self.computed:
            layouts = [self._layout(edge, samples, N) for samples in dict.fromkeys([*rows.values(), everything])]
            layout = next((layout for layout in layouts if layout is not None), None)
            if edge not in located and layout is not None:
                heads[edge] = layout
        if not heads and self.computed:
            raise _no_rows(self.computed[0], N, self.computed[0] in self.graph.predictions)
        if not heads:
            raise CurvoptError(
                f"{self.calls[0].name if self.calls else 'The model'} was called with {N} samples, but no tensor with "
                f"{N} rows along axis {self.axis} leads to the loss; if the samples are along another axis, say "
                "extend(model, batch_axis=1), and if rows are no samples, say batch_axis=None."
            )
        return heads

    def _layout(self, edge: Edge, samples: range, N: int, located: Heads | None = None) -> Layout | None:
        """The layout of a tensor with rows for ``samples``, ``None`` where no layout is proven.

        Args:
            edge: the tensor.
            samples: that it has rows for.
            N: number of all samples.
            located: tensors whose samples are known. Without them, the batch axis or the first one has to fit.
        """
        shape, n = shape_of(*edge), len(samples)
        fit = [i for i in dict.fromkeys((self.axis, 0)) if shape[i : i + 1] == (n,)]
        found = [Layout(prod(shape[:i]), n, prod(shape[i + 1 :])) for i in fit]
        if shape[0] > n and shape[0] % n == 0 and not (fit and len(shape) > 2):
            blocks, turns = Layout(1, n, prod(shape) // n), Layout(shape[0] // n, n, prod(shape[1:]))
            found += [turns] if self.axis else [blocks, turns]
        if not self.axis and shape[1:2] == (n,):
            found.append(Layout(shape[0], n, prod(shape[2:])))
        if not fit and located is None:
            return None
        if fit and 1 < len(found) and 1 < n and not self.axis:  # [N, N, ...]
            found = [each for each in found if not self._is_turned(edge, each)]
            fit = fit if found else []
        if len(found) == 1 and fit:
            layout = found[0]
        else:
            proven = (each for each in found if self._is_proven(edge, each, located or {}))
            layout = next(proven, found[0] if fit else None)
        return layout if layout is None or n == N else layout._replace(labels=tuple(samples))

    def _is_turned(self, edge: Edge, layout: Layout) -> bool:
        """Whether layers that get the first input itself would have its samples along another axis than it has."""
        axes = propagate_batch_axis({edge: layout}, layout.rows, complete=False)
        for call in self.graph.module_calls.values():
            of_model, args = call.call.model_call, call.call.args if call.call.is_held else ()
            if of_model is None or call.single or not (args and args[0] is of_model.first()):
                continue
            for index, (node, nr, *_) in call.edges.items():
                found, expected = axes.layouts.get((node, nr)), call.rule.output_axis(call.call, index)
                axis = axis_of(shape_of(node, nr), found) if isinstance(found, Layout) else None
                if axis is not None and isinstance(expected, int) and axis.index != expected:
                    return True
        return False

    def _is_proven(self, edge: Edge, layout: Layout, located: Heads) -> bool:
        """Whether the operations behind a tensor show that it has a layout.

        They do if tensors whose samples are known have the same ones then. Where there are none behind it: if all
        samples share all parameters, or, where a sample has several rows, if layers with N rows have one for each
        sample, in order.
        """
        n = layout.rows
        axes = propagate_batch_axis({edge: layout}, n, located, complete=False)
        if located.keys() & axes.layouts.keys():
            pairs = matched(axes, located)
            return pairs is not None and all(row == sample for row, sample in pairs.items())
        axis = axis_of(shape_of(*edge), layout)
        if axis is not None and axis.before == axis.after == 1:
            return layouts_of_parameters(axes) == {None}
        proven = False
        for call in self.graph.module_calls.values():
            for index, (node, nr, *_) in call.edges.items():
                found, shape = axes.layouts.get((node, nr)), shape_of(node, nr)
                expected = None if call.single else call.rule.output_axis(call.call, index)
                if isinstance(found, Layout) and isinstance(expected, int):
                    # with samples along axis 1 any layer says so, unless its output is [N, N, ...]
                    at = self.axis if self.axis and shape[0] != n else expected
                    if axis_of(shape, found) == Axis(at, 1, 1) and shape[at] == n:
                        if any(label not in (row, UNUSED) for row, label in enumerate(found.labels or ())):
                            return False  # rows of several calls in turns are no blocks
                        proven = True
        return proven


def _located(heads: Heads, N: int) -> Heads:
    """The tensors behind heads that have samples."""
    layouts = propagate_batch_axis(heads, N).layouts if heads else {}
    return {edge: layout for edge, layout in layouts.items() if isinstance(layout, Layout)}


def _later_calls(outputs: Sequence[tuple[ModelCall, Edge]], graph: BackwardGraph) -> set[ModelCall]:
    """The calls of a model whose inputs depend on another call of it."""
    at: dict[Node, set[ModelCall]] = {}
    for call, (node, _) in outputs:
        at.setdefault(node, set()).add(call)
    later, behind = set[ModelCall](), dict[Node | None, frozenset[ModelCall]]()  # the calls on which a node depends
    for node in reversed(graph.nodes) if len({call for call, _ in outputs}) > 1 else ():
        found = {behind[below] for below, _ in node.next_functions if behind.get(below)}
        calls = next(iter(found)) if len(found) == 1 else frozenset().union(*found)
        if node in at:
            later |= {call for call in at[node] if calls - {call}}
            calls = calls | at[node]
        behind[node] = calls
    return later


_EMPTY = "{}: the batch is empty; skip it, or call backward inside of an empty `with backpack():` for it."


def _no_rows(edge: Edge, N: int, is_marked: bool) -> CurvoptError:
    what, way = "is computed with parameters of the model, and is in the loss past its outputs", "leave it out"
    if is_marked:
        what, way = "is marked by curvopt.prediction", "mark what has such rows"
    return CurvoptError(
        f"A tensor of shape {list(shape_of(*edge))} ({name_of(edge[0])}) {what}, but has no row for each of the {N} "
        f"samples (forces on atoms beside energies of molecules?); {way}, or say that the batch is one sample by "
        "extend(model, batch_axis=None). curvopt.explain(loss) shows what was found."
    )


def _other_length(call: ModelCall, shape: torch.Size, n: int, axis: int) -> CurvoptError:
    return CurvoptError(
        f"{call.name} was called with {n} samples along axis {axis} of its first tensor, but gives an output of shape "
        f"{list(shape)}, and no operation behind it shows which rows belong to a sample; if another tensor has the "
        "samples, pass it first, if they are along another axis, say extend(model, batch_axis=1), if rows are no "
        "samples batch_axis=None, else return one row for each sample. A "
        "single sample without a batch axis needs unsqueeze(0)."
    )
