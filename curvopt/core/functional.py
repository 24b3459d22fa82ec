"""Parameters used outside of their module's forward: tied heads, and terms that are added to the loss.

``F.linear(x, embedding.weight)``, ``x @ W.T`` and ``F.embedding`` are recognised in the graph and become uses of the
parameter like any other. A term of the loss that sees parameters only (weight decay written by hand) is no part of any
sample; it gets a warning. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.rules import rule_for
from curvopt.core.residuals import name_of
from curvopt.core.uses import Use

if TYPE_CHECKING:
    from curvopt.core.graph import Graph


class FunctionalUse(Use):
    """An operation read off the graph, of a module or of one that stands in, since it would compute the same."""

    def __init__(self, path: str, module: nn.Module, args: tuple[Tensor, ...], shape: torch.Size):
        """Record what the node saved."""
        self.path, self.module, self.args, self.kwargs = path, module, args, {}
        self.versions, self.boundary, self.outputs = tuple([x._version for x in args]), frozenset(), None
        self.random, self.state = None, {}
        self.shapes, self.cache, self.settings, self.seen = (shape,), {}, None, tuple(module._parameters.values())
        self.rule = rule_for(module)


def recognise(
    node: Node, position: int, p: nn.Parameter, parents: dict[Node, list[Node]], path: str
) -> tuple[FunctionalUse, str, GradientEdge] | None:
    """The use, the parameter's name in it and the edge of its output, if ``p`` enters a known call at ``node``."""
    name = name_of(node)
    if name == "EmbeddingBackward0" and not _saved(node, "scale_grad_by_freq"):
        padding = _saved(node, "padding_idx")
        module = nn.Embedding(1, 1, device="meta")
        module.padding_idx = padding if padding is not None and 0 <= padding < len(p) else None
        return _use(path, module, "weight", p, _saved(node, "indices"), node)
    if name == "AddmmBackward0" and position == 0 and p.dim() == 1 and _saved(node, "beta") == 1:
        rows = node._input_metadata[0].shape[0]  # type: ignore[attr-defined]
        return _use(path, nn.Linear(1, 1, device="meta"), "bias", p, p.new_empty(rows, 1), node)
    if name == "TBackward0" or (name in ("PermuteBackward0", "TransposeBackward0") and p.dim() == 2 and _swaps(node)):
        consumers = parents.get(node, [])
        product = consumers[0] if len(consumers) == 1 else None
        if product is not None and product.next_functions[-1][0] is node:
            linear = nn.Linear(1, 1, bias=False, device="meta")
            if name_of(product) == "MmBackward0":
                return _use(path, linear, "weight", p, _saved(product, "self"), product)
            if name_of(product) == "AddmmBackward0" and _saved(product, "alpha") == 1:
                return _use(path, linear, "weight", p, _saved(product, "mat1"), product)
    return None


def _swaps(node: Node) -> bool:
    """Whether a transposition or permutation of a matrix swaps its two axes."""
    if name_of(node) == "PermuteBackward0":
        return [dim % 2 for dim in _saved(node, "dims")] == [1, 0]
    return {_saved(node, "dim0") % 2, _saved(node, "dim1") % 2} == {0, 1}


def _use(
    path: str, module: nn.Module, name: str, p: nn.Parameter, x: Tensor, node: Node
) -> tuple[FunctionalUse, str, GradientEdge]:
    module._parameters[name] = p
    shape = torch.Size(node._input_metadata[0].shape)  # type: ignore[attr-defined]
    return FunctionalUse(path, module, (x,), shape), name, GradientEdge(node, 0)


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


def added_term(node: Node, parents: dict[Node, list[Node]], dependent: set[Node]) -> bool:
    """Whether what ``node`` computes from parameters alone meets the data only as a scalar summand of the loss."""
    stack, seen = [node], {node}
    if node in dependent:
        return _adds_scalar(node)
    while stack:
        for parent in parents.get(stack.pop(), ()):
            if parent in seen:
                continue
            seen.add(parent)
            if parent not in dependent:
                stack.append(parent)
            elif not _adds_scalar(parent):
                return False
    return True


def _adds_scalar(node: Node) -> bool:
    return name_of(node).startswith(("Add", "Sub")) and torch.Size(node._input_metadata[0].shape).numel() == 1


def parents_of(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Who consumes each node."""
    parents: dict[Node, list[Node]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                parents.setdefault(following, []).append(node)
    return parents


def parents_and_dependents(graph: Graph, nodes: Sequence[Node]) -> tuple[dict[Node, list[Node]], set[Node]]:
    """Who consumes each node, and which nodes depend on the output of a use."""
    parents = parents_of(nodes)
    dependent = {edge.node for entry in graph.entries.values() for edge in entry.edges.values()}
    stack = list(dependent)
    while stack:
        for parent in parents.get(stack.pop(), ()):
            if parent not in dependent:
                dependent.add(parent)
                stack.append(parent)
    return parents, dependent
