"""Reading the autograd graph of one backward: which uses and losses it holds, and what would make a quantity wrong."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.rules import Rule, rule_for
from curvopt.core.uses import KEY, LossUse, Use
from curvopt.errors import CurvoptError


class Entry:
    """A use in the graph: its rule, the parameters it answers for, and where its outputs lie."""

    def __init__(self, use: Use):
        """Look up the rule and the trainable parameters."""
        self.use = use
        self.rule: Rule = rule_for(use.module)
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in self.rule.parameters(use.module).items() if p.requires_grad
        }
        self.edges: dict[int, GradientEdge] = {}
        self.rows = self.rule.rows(use) if self.parameters else 0


class Graph:
    """What lies behind a node of the autograd graph.

    Attributes:
        entries: the uses of extended modules.
        losses: the extended losses.
        outside: nodes that consume an extended module's parameter outside that module's forward.
        mixing: per node that mixes samples (train-mode batch norm), the module's description.
    """

    def __init__(self, root: Node):
        """Walk the graph from ``root`` to its leaves once."""
        self.entries: dict[Use, Entry] = {}
        self.losses: list[LossUse] = []
        self.mixing: list[str] = []
        nodes = list(_walk([root]))
        for node in nodes:
            records = node.metadata.get(KEY, ())
            for record, index, output_nr in records:
                if isinstance(record, LossUse):
                    self.losses.append(record)
                else:
                    entry = self.entries.get(record) or self.entries.setdefault(record, Entry(record))
                    entry.edges[index] = GradientEdge(node, output_nr)
            if _mixes_samples(node):
                self.mixing.append(records[0][0].describe() if records else node.name())
        self.outside = self._outside(nodes)
        self.uses_of: dict[nn.Parameter, int] = {}
        for entry in self.entries.values():
            for p in entry.parameters.values():
                self.uses_of[p] = self.uses_of.get(p, 0) + len(entry.edges)

    def batch_size(self, loss: LossUse | None = None) -> int:
        """Number of samples N: every batch axis is N, or N times a few rows of the same sample (flattened positions).

        Raises:
            CurvoptError: if the batch axes have no common size.
        """
        rows = {entry.use.describe(): entry.rows for entry in self.entries.values() if entry.parameters}
        if loss is not None:
            rows[loss.describe()] = loss.input.shape[0]
        N = min(rows.values(), default=1)
        for where, length in rows.items():
            if length % max(N, 1):
                raise CurvoptError(
                    f"{where}: batch axis of length {length}, but another part of the network sees {N} samples; "
                    "keep the samples on the first axis everywhere (expand inputs that are shared by all samples)."
                )
        return N

    def _outside(self, nodes: list[Node]) -> list[tuple[Node, nn.Parameter]]:
        """Edges into a known parameter that lie in no use of it."""
        inside: dict[int, set[tuple[Node, int]]] = {}
        for entry in self.entries.values():
            known = {id(p) for p in entry.parameters.values()}
            for node in _walk([edge.node for edge in entry.edges.values()], entry.use.boundary):
                for position, (target, _) in enumerate(node.next_functions):
                    if target is not None and id(getattr(target, "variable", None)) in known:
                        inside.setdefault(id(target.variable), set()).add((node, position))
        return [
            (node, target.variable)
            for node in nodes
            for position, (target, _) in enumerate(node.next_functions)
            if target is not None
            and (edges := inside.get(id(getattr(target, "variable", None)))) is not None
            and (node, position) not in edges
        ]


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
    return "BatchNorm" in node.name() and getattr(node, "_saved_training", True) and node._saved_input.shape[0] > 1
