"""Reading the autograd graph of one backward: which uses and losses it holds, and what would make a quantity wrong."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.functional_losses import find_losses
from curvopt.core.derivatives.rules import Rule, rule_for
from curvopt.core.functional import added_term, parents_and_dependents, recognise
from curvopt.core.uses import TermUse, Use, records_of
from curvopt.errors import CurvoptError


class Entry:
    """A use in the graph: its rule, the parameters it answers for, and where its outputs lie."""

    def __init__(self, use: Use, parameters: dict[str, nn.Parameter] | None = None):
        """Look up the rule and, unless told, the trainable parameters."""
        self.use = use
        self.rule: Rule = rule_for(use.module)
        if parameters is None:
            parameters = {name: p for name, p in self.rule.parameters(use.module).items() if p.requires_grad}
        self.parameters = parameters
        self.edges: dict[int, GradientEdge] = {}
        for name, p in self.parameters.items():
            if p.is_complex():
                raise CurvoptError(f"{use.describe()}: parameter '{name}' is complex; use two real ones.")
        self.rows = self.rule.rows(use) if self.parameters else 0


class Graph:
    """What lies behind a node of the autograd graph.

    Attributes:
        entries: the uses of parameters, by extended modules and by functional calls on their parameters.
        functional: the entries of functional calls.
        losses: the extended and functional losses.
        nonlinear: names of operations through which the differentiated scalar depends on more than the sum of them.
        terms: regularizers, with the parameters they see.
        mixing: descriptions of modules that mix samples (train-mode batch norm).
        outside: names of parameters that enter the loss by an added term, which no quantity contains.
        owners: the extended module that owns each parameter, and the parameter's name in it.
        structure: hash of the operations and their arguments, ``None`` if some reorder by the values of tensors.

    Raises:
        CurvoptError: if a parameter is used outside of its module in a way that is not known.
    """

    def __init__(self, roots: Sequence[Node]):
        """Walk the graph from ``roots`` to its leaves once."""
        self.entries: dict[Use, Entry] = {}
        self.terms: list[TermUse] = []
        self.mixing: list[str] = []
        nodes = list(_walk(list(roots)))
        inside: set[tuple[Node, int]] = set()
        for node in nodes:
            records = records_of(node)
            for record, index, output_nr in records:
                if isinstance(record, TermUse):
                    self.terms.append(record)
                    inside |= _parameter_edges([node], record.boundary, record.parameters)
                elif isinstance(record, Use):
                    entry = self.entries.get(record) or self.entries.setdefault(record, Entry(record))
                    entry.edges[index] = GradientEdge(node, output_nr)
            if _mixes_samples(node):
                self.mixing.append(records[0][0].describe() if records else node.name())
        self.structure = structure(nodes)
        self.owners: dict[nn.Parameter, tuple[Entry, str]] = {}
        for entry in self.entries.values():
            entry.use.check_inputs()
            inside |= _parameter_edges(
                [e.node for e in entry.edges.values()], entry.use.boundary, entry.parameters.values()
            )
            for name, p in entry.parameters.items():
                self.owners.setdefault(p, (entry, name))
        self.functional: list[Entry] = []
        self.outside: list[str] = []
        self._read_outside(nodes, inside)
        outputs = {edge.node for entry in self.entries.values() if entry.parameters for edge in entry.edges.values()}
        self.losses, self.nonlinear = find_losses(roots, outputs)
        self.uses_of: dict[nn.Parameter, int] = {}
        for entry in self.entries.values():
            for p in entry.parameters.values():
                self.uses_of[p] = self.uses_of.get(p, 0) + len(entry.edges)

    def name(self, p: nn.Parameter) -> str:
        """Path of a parameter in the extended model."""
        entry, name = self.owners[p]
        return f"{entry.use.path}.{name}".lstrip(".")

    def _read_outside(self, nodes: list[Node], inside: set[tuple[Node, int]]) -> None:
        """Recognise, note or refuse every edge into a known parameter that lies in no use of it."""
        outside = [edge for edge in _edges_to(nodes, self.owners) if edge not in inside]
        if not outside:
            return
        parents, dependent = parents_and_dependents(self, nodes)
        for node, position in outside:
            p = node.next_functions[position][0].variable  # type: ignore[union-attr]
            entry, name = self.owners[p]
            found = recognise(node, p, parents, entry.use.path)
            if found is not None:
                use, edge = found
                functional = Entry(use, {"weight": p})
                functional.edges[0] = edge
                self.entries[use] = functional
                self.functional.append(functional)
            elif added_term(node, parents, dependent):
                self.outside.append(self.name(p))
            else:
                raise CurvoptError(
                    f"{entry.use.describe()}: parameter '{name}' is also used outside of its module (by "
                    f"{node.name()}), which the quantities would miss; use it through the module, F.linear or "
                    "F.embedding only."
                )


# operations that move entries to where the values of a tensor say: among samples, perhaps
_REORDERING = ("Index", "Gather", "Scatter", "Sort", "Topk", "Take", "MaskedSelect", "RepeatInterleave", "Put")
_arguments: dict[str, tuple[str, ...]] = {}


def structure(nodes: Iterable[Node]) -> int | None:
    """Hash of the operations of some nodes and their integer arguments, or ``None`` where tensors are arguments."""
    found: list[Any] = []
    for node in nodes:
        name = node.name()
        if name.startswith(_REORDERING):
            return None
        if name not in _arguments:
            saved = [attribute for attribute in dir(node) if attribute.startswith("_saved_")]
            _arguments[name] = tuple(a for a in saved if _is_argument(getattr(node, a)))
        found.append((name, *(_hashable(getattr(node, attribute)) for attribute in _arguments[name])))
    return hash(tuple(found))


def _is_argument(value: Any) -> bool:
    """Whether what a node saved is a number of axes, sizes or flags; not a tensor, and no factor that changes."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(v, (int, str)) for v in values)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, (int, str, tuple)) else None


def _edges_to(nodes: Iterable[Node], parameters: Container[nn.Parameter]) -> list[tuple[Node, int]]:
    """Edges ``(node, position)`` from the nodes into the leaves of some parameters."""
    return [
        (node, position)
        for node in nodes
        for position, (target, _) in enumerate(node.next_functions)
        if (p := getattr(target, "variable", None)) is not None and p in parameters
    ]


def _parameter_edges(
    roots: list[Node], boundary: frozenset, parameters: Iterable[nn.Parameter]
) -> set[tuple[Node, int]]:
    return set(_edges_to(_walk(roots, boundary), set(parameters)))


def _walk(roots: list[Node], boundary: frozenset = frozenset()) -> Iterator[Node]:
    """Every node reachable from ``roots`` without entering ``boundary``, once."""
    seen = set(roots) - boundary
    stack = list(seen)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in boundary:
                seen.add(following)
                stack.append(following)


def _mixes_samples(node: Node) -> bool:
    """Whether a node is a batch norm that normalises over the samples (instance norm runs as one of a batch of 1)."""
    if "BatchNorm" not in node.name() or not getattr(node, "_saved_training", True):
        return False
    return node._saved_input.shape[0] > 1  # type: ignore[attr-defined]
