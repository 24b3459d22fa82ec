"""Read and locate: the graph of one backward pass with all calls that have parameters, and where their samples are.

>>> import torch
>>> from curvopt import extend
>>> model = extend(nn.Linear(3, 2))
>>> located = read_and_locate([model(torch.ones(4, 3)).sum().grad_fn])
>>> located.N, [(call.call.describe(), call.samples) for call in located.calls]
(4, [('the extended Linear', 'first')])
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from curvopt.core.graph.backward_graph import BackwardGraph, CallInGraph, operands_among, read_graph
from curvopt.core.graph.nodes import leads_to, name_of, saved, shape_of, walk
from curvopt.core.graph.operations import BATCH_NORMS
from curvopt.core.layers.computed import PerSampleRule, SharedCallRule
from curvopt.core.layers.parameters import find_entry_points, join_biases, parameter_calls, shared_call
from curvopt.core.record.calls import ModuleCall, records_of
from curvopt.core.record.extended_parameters import extended_model, extended_name
from curvopt.core.record.model_calls import Model
from curvopt.core.samples.layout import Layout
from curvopt.core.samples.samples import Samples, locate
from curvopt.errors import CurvoptError, CurvoptWarning


@dataclass
class LocatedGraph:
    """The graph of one backward pass, with its calls and samples.

    Attributes:
        graph: the graph.
        locations: where the samples are, by model.
        calls: the calls that have parameters.
        owners: for each parameter the call that counts for messages and hooks, and its name there.
        outside: names of parameters that enter the loss around the heads, by an added term or as a weight of losses:
            no quantity contains that.
    """

    graph: BackwardGraph
    locations: dict[Model | None, Samples] = field(default_factory=dict)
    calls: list[CallInGraph] = field(default_factory=list)
    owners: dict[nn.Parameter, tuple[CallInGraph, str]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)

    @property
    def distinct_locations(self) -> list[Samples]:
        """The locations, each once: models with equal numbers of samples share one."""
        return list({id(location): location for location in self.locations.values()}.values())

    @property
    def N(self) -> int:
        """The number of samples, of all models together."""
        return sum({location.N for location in self.locations.values()})

    @property
    def may_reach_parameters(self) -> bool:
        """Whether parameters are among the leaves, or functions that are written in Python, which may hide some."""
        custom = any(isinstance(node, BackwardCFunction) for node in self.graph.nodes)
        return custom or any(isinstance(leaf, nn.Parameter) for leaf in self.graph.leaves.values())

    def name(self, p: Tensor) -> str:
        """Path of a parameter in the extended model."""
        if not isinstance(p, nn.Parameter) or p not in self.owners:
            return extended_name(p) or "a parameter"
        call, name = self.owners[p]
        return extended_name(p) or f"{call.call.path}.{name}".lstrip(".")

    def location_of(self, model: Model | None) -> Samples | None:
        """The samples of a model; those of the only other one where it was not called itself."""
        if model in self.locations:
            return self.locations[model]
        others = self.distinct_locations
        return others[0] if len(others) == 1 else None


def read_and_locate(roots: Sequence[Node], as_one_sample: bool = False) -> LocatedGraph:
    """Read the graph behind some nodes, and find out where the samples are in it, see `locate`.

    Raises:
        CurvoptError: where that is not clear, or the results would be wrong.
    """
    graph = read_graph(roots)
    located = LocatedGraph(graph)
    if not graph.operands and not any(found.parameters for found in graph.module_calls.values()):
        return located
    located.locations = locate(graph, as_one_sample)
    for found in graph.module_calls.values():
        if not found.parameters:
            continue
        location = located.location_of(found.call.model)
        if location is None:
            raise _no_samples(found.call.describe())
        if found.locate(location):
            located.calls.append(found)
        elif any((edge.node, edge.output_nr) in location.axes.layouts for edge in found.edges.values()):
            _leave_to_operations(found, graph)
            if found.parameters:
                located.calls.append(shared_call(found, graph, location))
        else:
            raise CurvoptError(
                f"{found.call.describe()}: the loss depends on it by a path around the outputs of the model (a term "
                "that is computed inside of the model, or a prediction without a batch axis?), whose samples are not "
                "known; return what it is made of, too, with a row for each sample, or mark it by curvopt.prediction."
            )
    functional: list[CallInGraph] = []
    for p, operands in graph.operands.items():
        location = located.location_of(extended_model(p))
        if location is None:
            raise _no_samples(f"parameter '{located.name(p)}'")
        entries, around = find_entry_points(operands, graph, location.axes.layouts)
        functional += parameter_calls(p, entries, location)
        if around:
            located.outside.append(located.name(p))
    located.calls += join_biases(functional)
    for call in located.calls:
        for name, p in call.parameters.items():
            located.owners.setdefault(p, (call, name))
    _warn_of_cost(located)
    return located


def _leave_to_operations(found: CallInGraph, graph: BackwardGraph) -> None:
    """Take parameters from a shared call that are also in its input: behind it, both paths count as one."""
    ends = [edge.node for edge in found.edges.values()]
    behind = set(walk(ends)) if any(p in graph.operands for p in found.parameters.values()) else ()
    for name, p in list(found.parameters.items()):
        if any(node in behind for node, _ in graph.operands.get(p, ())):
            del found.parameters[name]
            graph.operands[p] += operands_among(walk(ends, found.call.boundary), {p})


def _no_samples(what: str) -> CurvoptError:
    return CurvoptError(
        f"{what}: no call of the extended model that it belongs to leads to this loss, so its samples are not known; "
        "call extend(model) before the forward pass, and the model with inputs (not under curvopt.disable()), or write "
        "functions of parameters as the forward of a module. A backward that is not meant (of a penalty alone, say) "
        "goes inside of `with backpack():`."
    )


def _warn_of_cost(located: LocatedGraph) -> None:
    """Say once for each model where quantities are computed sample by sample, if these cost most."""
    slow = [call for call in located.calls if isinstance(call.samples, dict) or isinstance(call.rule, SharedCallRule)]
    fast = sum(shape.numel() for call in located.calls if call not in slow for shape in call.call.shapes)
    slow = [call for call in slow if call.location.N > 1]
    if sum(call.location.N * _entries(call) for call in slow) <= fast:
        return
    for call in sorted(slow, key=_entries, reverse=True):
        model = extended_model(next(iter(call.parameters.values())))
        N = call.location.N
        layout = "an operation that is not known" if isinstance(call.rule, PerSampleRule) else "its output"
        message = (
            f"{call.call.describe()}: {layout} does not hold the {N} samples along one axis, so its quantities are "
            f"computed sample by sample, at up to {N} times the cost. If the samples are along another axis, say "
            "extend(model, batch_axis=1); if rows are no samples, as in a graph, batch_axis=None. "
            "print(curvopt.explain(loss)) shows where the axis is lost."
        )
        if model is None:
            warnings.warn(message, CurvoptWarning, stacklevel=2)
        else:
            model.warn_of_cost(message)


def _entries(call: CallInGraph) -> int:
    """Number of entries of the outputs of a call."""
    shapes = call.rule.call.shapes if isinstance(call.rule, SharedCallRule) else call.call.shapes
    return sum(shape.numel() for shape in shapes)


def mixing_norm(located: LocatedGraph) -> tuple[str, bool]:
    """A batch norm that mixes samples: a description, and whether the module is in eval mode."""
    found = [node for location in located.distinct_locations for node in norms_in_loss(located, location)]
    for node in _training_norms(located.graph):
        edges = [(following, nr) for following, nr in node.next_functions if following is not None]
        layouts = [location.axes.layouts.get(edge) for edge in edges for location in located.distinct_locations]
        if any(isinstance(x, Layout) and x.mixed for x in layouts):
            found.append(node)
    if not found:
        return "a batch norm", False
    call = next((call for call, *_ in records_of(found[0]) if isinstance(call, ModuleCall)), None)
    return (name_of(found[0]), False) if call is None else (call.describe(), not call.training)


def norms_in_loss(located: LocatedGraph, location: Samples) -> list[Node]:
    """Train-mode batch norms between an output of the models of a location and the scalar, or a further output."""
    heads = {node for node, _ in location.heads}
    norms = [node for node in _training_norms(located.graph) if shape_of(node)[0] > 1]  # one image: an instance norm
    return [norm for norm in norms if any(below and leads_to(below, heads) for below, _ in norm.next_functions)]


def _training_norms(graph: BackwardGraph) -> list[Node]:
    return [node for node in graph.of(BATCH_NORMS) if node.next_functions and saved(node, "training", True)]


def is_mixed(call: CallInGraph) -> bool:
    """Whether a train-mode batch norm between a call and the heads mixes samples."""
    layouts = call.location.axes.layouts
    found = [layouts.get((edge.node, edge.output_nr)) for edge in call.edges.values()]
    return any(isinstance(layout, Layout) and layout.mixed for layout in found)
