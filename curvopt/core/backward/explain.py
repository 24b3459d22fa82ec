"""`explain`: what a backward would take for samples, predictions and terms, and how it would compute each field.

::

    samples       the extended Sequential: 4, along axis 0
    predictions   [4, 3] AddmmBackward0
    terms         the cross-entropy (LogSoftmaxBackward0), split at [4, 3]
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from curvopt.core.backward.backward_pass import LocatedGraph, read_and_locate
from curvopt.core.backward.second_order import terms_of
from curvopt.core.graph import CallInGraph
from curvopt.core.layers.computed import PerSampleRule
from curvopt.core.layers.embedding import Embedding
from curvopt.core.layers.recurrent import Recurrent
from curvopt.core.layers.rule import AffineRule
from curvopt.core.nodes import Edge, leaf_of, name_of, operation, shape_of
from curvopt.core.operations import OPERATIONS, UNKNOWN_OPERATION
from curvopt.core.record import extended_name
from curvopt.core.samples.layout import Layout
from curvopt.errors import CurvoptError, CurvoptWarning


@dataclass(frozen=True)
class Explanation:
    """What a backward pass takes a loss for; it prints as a table.

    Attributes:
        samples: of each model, their number and axis.
        predictions: tensors whose rows are the samples, as shape and operation.
        terms: the parts of the loss, and where each is split.
        operations: of each operation behind the predictions its name, the shape of its output, the layout
            ``(before, rows, after)`` that the output has its samples in (``None``: all samples share it), and the rule
            that says so.
        parameters: how the fields of each parameter are computed.
        refused: why no field can be had, if so.
    """

    samples: Sequence[str] = ()
    predictions: Sequence[str] = ()
    terms: Sequence[str] = ()
    operations: Sequence[tuple[str, str, str, str]] = ()
    parameters: dict[str, str] = field(default_factory=dict)
    refused: str | None = None

    def __str__(self) -> str:
        """The table."""
        lines = [f"refused       {self.refused}"] if self.refused else []
        for name in ("samples", "predictions", "terms"):
            rows = getattr(self, name)
            lines += [f"{name if i == 0 else '':13} {row}" for i, row in enumerate(rows)]
        for title, table in (
            (("operation", "shape", "layout", "because"), self.operations),
            (("parameter", "its fields"), list(self.parameters.items())),
        ):
            if table:
                widths = [max(len(row[i]) for row in [title, *table]) for i in range(len(title))]
                rows = [title, tuple("-" * width for width in widths), *table]
                cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
                lines += ["", *("  ".join(row).rstrip() for row in cells)]
        return "\n".join(lines)


def explain(loss: Tensor) -> Explanation:
    """What ``loss.backward()`` would take for samples, predictions and terms, and how it would compute fields.

    Nothing is computed and nothing is changed: the backward can still be run.

    ::

        model = curvopt.extend(torch.nn.Linear(3, 2))
        print(curvopt.explain(model(torch.ones(4, 3)).square().sum()))

    Args:
        loss: of a forward pass of extended models.

    Returns:
        A value that prints as a table. Where fields are refused it says why, and which argument helps.

    Raises:
        TypeError: for something that is no tensor with a graph.
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        got = "a tensor without a graph" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"explain: expected the loss of a forward pass of an extended model, got {got}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvoptWarning)
            located = read_and_locate([loss.grad_fn])
            if not located.calls:
                return Explanation(refused="no extended module took part; call extend(model) before the forward pass.")
            return Explanation(
                _samples(located),
                [_tensor(edge) for location in located.distinct_locations for edge in location.heads],
                _terms((loss.grad_fn, loss.output_nr), located),
                _operations(located),
                _parameters(located),
            )
    except CurvoptError as error:
        return Explanation(refused=str(error))


def _tensor(edge: Edge) -> str:
    return f"{list(shape_of(*edge))} {name_of(edge[0])}"


def _samples(located: LocatedGraph) -> list[str]:
    rows = []
    for model, location in located.locations.items():
        where = f"along axis {0 if model is None else model.batch_axis}"
        if location.is_one_sample:
            where = "as batch_axis=None makes a batch one sample"
        elif location.appended:
            where += ", the samples of several calls one after the other"
        rows.append(f"{'functional code' if model is None else model.name}: {location.N}, {where}")
    return rows


def _terms(root: Edge, located: LocatedGraph) -> list[str]:
    terms = terms_of([root], located)
    rows = [f"{loss.describe()}, split at {list(loss.input.shape)} {name_of(loss.edge.node)}" for loss in terms.known]
    if terms.nonlinear:
        rows.append(f"the rest ({', '.join(terms.nonlinear_names)}), split at the predictions by double backward")
    if terms.ends:
        rows.append(f"linear, without curvature, in {', '.join(dict.fromkeys(map(_tensor, terms.ends)))}")
    return rows or ["none that depends on a prediction"]


def _operations(located: LocatedGraph) -> list[tuple[str, str, str, str]]:
    rows = []
    for location in located.distinct_locations:
        by_node: dict[Node, list[Edge]] = {}
        for edge in location.axes.layouts:
            by_node.setdefault(edge[0], []).append(edge)
        for node in (node for node in located.graph.nodes if leaf_of(node) is None):
            for edge in by_node.get(node, ()):
                layout = location.axes.layouts[edge]
                shown = "all share it" if layout is None else "?"
                shown = str(tuple(layout[:3])) if isinstance(layout, Layout) else shown
                why = "a prediction" if edge in location.heads else _because(edge, located, layout)
                rows.append((name_of(node), str(list(shape_of(*edge))), shown, why))
    return rows


def _because(edge: Edge, located: LocatedGraph, layout: object) -> str:
    """The rule that gave a tensor its layout: that of an operation that uses it."""
    users = [user for user, _ in located.graph.users.get(edge, ())]
    rules = [OPERATIONS.get(operation(user), UNKNOWN_OPERATION).batch_axis or "probed" for user in users]
    found = dict.fromkeys(f"{rule} ({name_of(user)})" for rule, user in zip(rules, users, strict=True))
    mixed = ", mixed by a batch norm" if isinstance(layout, Layout) and layout.mixed else ""
    return ", ".join(found) + mixed


def _parameters(located: LocatedGraph) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for call in located.calls:
        for p in call.parameters.values():
            found.setdefault(located.name(p), []).append(_how(call))
    for p in located.graph.leaves.values():
        name = extended_name(p)
        if name is not None and p.requires_grad and name not in found:
            found[name] = ["none: it enters the loss past the predictions"]
    return {name: "; ".join(dict.fromkeys(ways)) for name, ways in found.items()}


def _how(call: CallInGraph) -> str:
    where = call.call.describe()
    if isinstance(call.rule, PerSampleRule):
        return f"{where}: sample by sample, as the operation has no rule"
    if isinstance(call.samples, dict):
        return f"{where}: sample by sample, as no axis of its output has the samples (batch_axis=1, or None?)"
    if call.rule.pulls_back:
        return f"{where}: dense, product by product, as its weight is computed from the parameter"
    if isinstance(call.rule, (AffineRule, Recurrent, Embedding)):
        return f"{where}: factors"
    return f"{where}: dense"
