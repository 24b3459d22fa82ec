"""The checks of a request: they raise an error, or warn, before anything is computed.

::

    BatchGrad, batch norm in train mode      CurvoptError: samples are mixed, call model.eval()
    KFLR, a vocabulary of 10,000             CurvoptWarning: 9,999 columns are pulled back, KFAC draws one
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.backward.backward_pass import LocatedGraph
from curvopt.core.graph import (
    CallInGraph,
    leaves_behind,
    records_behind,
)
from curvopt.core.layers.computed import PerSampleRule
from curvopt.core.losses.roots import Averaged, Empirical, Exact, Gradient, Hessian, MonteCarlo
from curvopt.core.nodes import leads_further_to, leaf_of, name_of, operation, saved, shape_of, walk
from curvopt.core.operations import BATCH_NORMS, LINEAR, TIME_FIRST
from curvopt.core.pytorch_workarounds import WRONG_THREE_TIMES, WRONG_TWICE, Wrong, lone_biases
from curvopt.core.record import ModuleCall, extended_model, records_of
from curvopt.core.samples.layout import Layout
from curvopt.core.vjp import is_own_backward
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions.base import Extension, fields_of, fields_that, naming_fields


def may_be_one_sample(extensions: Iterable[Extension]) -> bool:
    """Whether a batch may count as one sample, as vectors of different rows are independent."""

    def independent(extension: Extension) -> bool:
        columns = extension.columns
        return isinstance(columns, MonteCarlo) or (isinstance(columns, Empirical) and columns.generator is not None)

    return all(
        independent(e) and not e.needs_independent_samples and getattr(e, "approx", "") != "reduce" for e in extensions
    )


def check_request(extensions: Sequence[Extension], located: LocatedGraph) -> None:
    """Refuse what cannot be computed rightly.

    Raises:
        CurvoptError: with the request, the obstacle, and a remedy.
    """
    if not located.calls:
        raise CurvoptError(
            f"{fields_of(extensions)}: no extended module took part in this backward; call extend(model) "
            "before the forward pass (and outside of curvopt.disable()). A backward that is not meant (of a penalty "
            "alone, say) goes inside of `with backpack():`. A torch.utils.checkpoint of the whole model needs "
            "use_reentrant=False."
        )
    _warn_of_cost(extensions, located)
    _check_samples(extensions, located)
    if located.outside:
        warnings.warn(
            f"{', '.join(located.outside)}: in the loss by another path than rows of the model's outputs, too (an "
            "added term, a weight of losses, a method that is not forward), which is in .grad but in no quantity. A "
            "weight decay that is written as curvopt.L2Regularizer is in both; a learned temperature or weight needs "
            "nothing.",
            CurvoptWarning,
            stacklevel=2,
        )


class MixedSamples(CurvoptError):
    """A batch norm in train mode mixes samples that a quantity needs apart."""


def _check_norms(extensions: Sequence[Extension], located: LocatedGraph) -> None:
    """Refuse quantities of independent samples that a batch norm mixes, or warn of what is taken for them."""
    norms = [n for n in located.graph.of(BATCH_NORMS) if n.next_functions and saved(n, "training", True)]
    mixing, mixed = list[Node](), list[CallInGraph]()
    for location in located.distinct_locations if extensions else ():
        heads = {node for node, _ in location.heads}
        where = {edge for edge, x in location.axes.layouts.items() if isinstance(x, Layout) and x.mixed}
        # past an output of the models; that of a single image is an instance norm
        past_heads = [n for n in norms if shape_of(n)[0] > 1 and leads_further_to(n, heads)]
        mixing += past_heads + [n for n in norms if not where.isdisjoint(n.next_functions)]
        calls = [call for call in located.calls if call.location is location]
        edges = [{(edge.node, edge.output_nr) for edge in call.edges.values()} for call in calls]
        mixed += [call for call, at in zip(calls, edges, strict=True) if past_heads or not where.isdisjoint(at)]
    if not mixed:
        return
    records = [record for norm in mixing[:1] for record, *_ in records_of(norm) if isinstance(record, ModuleCall)]
    norm = records[0].describe() if records else name_of(mixing[0]) if mixing else "a batch norm"
    in_eval_mode = bool(records) and not records[0].training
    refused = [e for e in extensions if not e.through_batch_norm]
    if not refused:
        warnings.warn(
            f"{norm}: it mixes the samples, and {fields_that(extensions, 'take')} row n's part of the gradient for "
            "the gradient of sample n.",
            CurvoptWarning,
            stacklevel=2,
        )
        return
    what = (
        "it mixes them in eval mode, too, as it has no running statistics; train it with track_running_stats=True"
        if in_eval_mode
        else "train-mode batch norm mixes them; call model.eval()"
    )
    first_order = all(isinstance(e.columns, Gradient) for e in refused)
    way = (
        "row n's part of the gradient (through_batch_norm=True)"
        if first_order
        else "a Monte-Carlo quantity (KFAC), or take the batch as one sample: extend(model, batch_axis=None)"
    )
    raise MixedSamples(
        f"{norm}: {fields_that(refused, 'need')} independent samples of {mixed[0].call.describe()}, but {what}, or "
        f"use {way}."
    )


def _check_samples(extensions: Sequence[Extension], located: LocatedGraph) -> None:
    independent = [e for e in extensions if e.needs_independent_samples]
    _check_norms(independent, located)
    for location in located.distinct_locations:
        for head, transposed in location.axes.mixing():
            refused = extensions if transposed else independent
            if refused:
                raise CurvoptError(
                    f"{fields_that(refused, 'need')} independent samples, but an output of shape "
                    f"{list(shape_of(*head))} is in the loss and its samples meet on the way to another output (in a "
                    "matrix of all pairs, or a mean over the batch?); leave one of the two out of the loss, "
                    "mark what the loss is a function of (slopes, say) by curvopt.prediction"
                    f"{'.' if transposed else ', or use a Monte-Carlo quantity (KFAC).'}"
                )
    apart = [e for e in extensions if e.per_sample or (isinstance(e.columns, Gradient) and not e.adds_up)]
    if apart and any(location.appended for location in located.distinct_locations):
        raise CurvoptError(
            f"{fields_that(apart, 'keep')} samples apart, but the model was called with batches of different lengths, "
            "whose rows do not belong together; call backward for each batch, or ask for a quantity of the whole batch."
        )
    _check_ctc(extensions, located)
    for extension in extensions:
        for location in located.distinct_locations:
            missing = [n for n in extension.subsampling or () if not -location.N <= n < location.N]
            if missing:
                raise CurvoptError(
                    f"{extension.field}: subsampling asks for sample {missing[0]}, but this batch has {location.N}; "
                    f"choose indices from {-location.N} to {location.N - 1} for each batch, as the last one may be "
                    "smaller."
                )
    averaged = [e for e in extensions if isinstance(e.columns, Averaged)]
    further = located.distinct_locations[1:]  # of models with other numbers of samples than the first
    elsewhere = [
        call for call in located.calls if call.samples != "first" or any(call.location is each for each in further)
    ]
    if averaged and elsewhere:
        where = ", ".join(dict.fromkeys(call.call.describe() for call in elsewhere))
        raise CurvoptError(
            f"{where}: samples mix on the way to the loss, or have another order or another number there; "
            f"{fields_of(averaged)} is not defined there, use KFAC or KFLR."
        )


def _check_ctc(extensions: Sequence[Extension], located: LocatedGraph) -> None:
    """Refuse CTC losses, which have the samples along axis 1, of models that have them along axis 0."""
    for node in located.graph.of(TIME_FIRST):
        edge = GradientEdge(*node.next_functions[0])  # type: ignore[arg-type]
        shape = shape_of(edge.node, edge.output_nr)
        for location in located.distinct_locations:
            if len(shape) == 3 and location.N > 1 and location.rows_of(edge) is not None:
                raise CurvoptError(
                    f"{fields_of(extensions)}: the {shape[1]} samples of CTCLoss are along axis 1 of its input, "
                    f"but the model was called with {location.N} samples along axis 0 of them; call the model with "
                    "batch-first data and transpose its output for the loss, or say extend(model, batch_axis=1)."
                )


#: Columns of a root of the loss Hessian beyond which pulling all of them back is worth a warning.
MANY_COLUMNS = 1000


def warn_of_columns(extensions: Sequence[Extension], columns: int) -> None:
    """Say before the computation that it takes very many columns."""
    if columns > MANY_COLUMNS:
        warnings.warn(
            f"{fields_of(extensions)}: the Hessian of the loss has {columns:,} columns, and pulling all of them back "
            'takes up to as many gradients; DiagGGNMC, KFAC and fisher="mc" draw one column at random.',
            CurvoptWarning,
            stacklevel=2,
        )


def check_derivatives(extensions: Sequence[Extension], located: LocatedGraph, roots: Sequence[GradientEdge]) -> None:
    """Refuse to build a graph of fields by which they would be differentiated wrongly."""
    of_hessian = [e for e in extensions if isinstance(e.columns, Hessian)]
    of_gradient = [e for e in extensions if e not in of_hessian]
    for wrong, refused in ((WRONG_TWICE, of_gradient), (WRONG_THREE_TIMES, of_hessian)):
        if refused:
            what = f"{fields_of(refused)} cannot be differentiated"
            _refuse_wrong(located, wrong, roots, what, "call backward without create_graph")


def check_second_derivatives(
    extensions: Sequence[Extension],
    located: LocatedGraph,
    edges: Sequence[GradientEdge],
    direct: Collection[nn.Parameter],
) -> None:
    """Refuse Hessians for which PyTorch has wrong second derivatives.

    Args:
        extensions: whose they are.
        located: the graph.
        edges: where the parts of the loss have their inputs.
        direct: the parameters whose gradients are differentiated once more.
    """
    what = f"{fields_of(extensions)} cannot be had"
    _refuse_wrong(located, WRONG_TWICE, edges, what, "use a GGN quantity")
    dropped = leaves_behind([bias for edge in edges for bias in lone_biases(edge.node)]) if direct else set()
    for p in dropped.intersection(direct):
        raise CurvoptError(
            f"{located.name(p)}: PyTorch's second derivative of norms with a bias and no weight is wrong, so {what}; "
            "add the bias by `+`, or use a GGN quantity."
        )


def _refuse_wrong(located: LocatedGraph, wrong: Wrong, edges: Sequence[GradientEdge], what: str, remedy: str) -> None:
    """Refuse where a derivative is needed that PyTorch computes wrongly."""
    behind = leaves_behind(wrong.nodes([edge.node for edge in edges]))
    for p in located.owners:
        if p in behind:
            raise CurvoptError(
                f"{located.name(p)}: PyTorch's {wrong.derivative} is wrong, so {what}; {wrong.instead}, or {remedy}."
            )


def check_inner_backward(roots: list[Node], extensions: Sequence[Extension]) -> None:
    """Refuse a backward that was started inside of another one; optimizers go on without their curvature.

    Vectors that the engine itself pulls back must not be added to gradients. One that a hook starts may have layers
    that are not extended.

    Args:
        roots: of the inner backward.
        extensions: of the user.

    Raises:
        CurvoptError: if the engine runs the other one, or there are extended layers.
    """
    if is_own_backward() or (extensions and any(records_behind(roots, ModuleCall))):
        error = CurvoptError(
            "a backward was started inside of another one, by a function that computes layers again, or by a hook that "
            "uses an extended module; use torch.utils.checkpoint with use_reentrant=False, torch.autograd.grad in a "
            "function, and `with backpack():` in a hook."
        )
        raise naming_fields(extensions, error) if extensions else error


def _warn_of_cost(extensions: Sequence[Extension], located: LocatedGraph) -> None:
    """Say once for each model what makes quantities slow, if that takes most of the time."""
    slow = [call for call in located.calls if isinstance(call.samples, dict)]
    fast = sum(shape.numel() for call in located.calls if call not in slow for shape in call.call.shapes)
    slow = [call for call in slow if call.location.N > 1]
    if sum(call.location.N * _entries(call) for call in slow) > fast:
        for call in sorted(slow, key=_entries, reverse=True):
            what = "an operation that is not known" if isinstance(call.rule, PerSampleRule) else "its output"
            N = call.location.N
            _warn_once(
                call,
                f"{what} does not hold the {N} samples along one axis, so its quantities are computed sample by "
                f"sample, at up to {N} times the cost. If the samples are along another axis, say extend(model, "
                "batch_axis=1); if rows are no samples, as in a graph, batch_axis=None. "
                "print(curvopt.explain(loss)) shows where the axis is lost.",
            )
    exact = [e for e in extensions if isinstance(e.columns, Exact)]
    computed = [call for call in located.calls if exact and call.location.N > 1 and _mixes_entries(call)]
    weights = [sum(p.numel() for p in call.parameters.values()) for call in computed]
    if computed and 2 * sum(weights) > sum(p.numel() for p in located.owners):
        call = computed[weights.index(max(weights))]
        _warn_once(
            call,
            "its weight is computed from a parameter by operations that mix entries, as a norm or a softmax does, so "
            f"{fields_that(exact, 'pull')} the product of each sample with each column back through them, at several "
            "times the cost; DiagGGNMC draws one column at random.",
        )


def _mixes_entries(call: CallInGraph) -> bool:
    """Whether products go back one by one to a parameter, not only to its rows, as those of a table do."""
    source = call.rule.source
    behind = walk([source.node]) if call.rule.pulls_back and source is not None else ()
    return any(operation(node) not in LINEAR for node in behind if leaf_of(node) is None)


def _warn_once(call: CallInGraph, why: str) -> None:
    model, message = extended_model(next(iter(call.parameters.values()))), f"{call.call.describe()}: {why}"
    if model is None:
        warnings.warn(message, CurvoptWarning, stacklevel=2)
    else:
        model.warn_of_cost(message)


def _entries(call: CallInGraph) -> int:
    """Number of entries of the outputs of a call."""
    return sum(shape.numel() for shape in call.call.shapes)
