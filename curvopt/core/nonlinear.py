"""The nonlinear operations of a graph, which add curvature to the Gauss-Newton matrix.

>>> import torch
>>> h = 2 * torch.ones(3, requires_grad=True)  # the output of a layer
>>> z = 3 * h.tanh()
>>> [operation(each.node) for each in nonlinear_operations([GradientEdge(z.grad_fn, 0)], {h.grad_fn})]
['TANH']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.autograd.graph import GradientEdge, Node

from curvopt.core.nodes import consumers_first, is_complex, operation, saved
from curvopt.core.operations import ELEMENTWISE, LINEAR, MULTILINEAR


class Residual(NamedTuple):
    """A nonlinear operation: its node, the edges of its inputs that depend on parameters, and whether R is diagonal."""

    node: Node
    outputs: list[int]
    inputs: list[GradientEdge]
    diagonal: bool


def nonlinear_operations(roots: Sequence[GradientEdge], calls: set[Node]) -> list[Residual]:
    """The operations between the roots and the outputs of calls that add a residual.

    Args:
        roots: where the network's outputs come from.
        calls: nodes of the outputs of all calls.
    """
    order = consumers_first([root.node for root in roots])[::-1]  # inputs before what they feed
    reached: dict[Node, set[int]] = {}
    for node, nr in [*((root.node, root.output_nr) for root in roots), *(e for n in order for e in n.next_functions)]:
        if node is not None:
            reached.setdefault(node, set()).add(nr)
    dependent: set[Node] = set()
    found: list[Residual] = []
    for node in order:
        inputs = {(f, nr): GradientEdge(f, nr) for f, nr in node.next_functions if f is not None and f in dependent}
        links = sum(1 for f, _ in node.next_functions if f is not None and f in dependent)
        if inputs or node in calls:
            dependent.add(node)
        name = operation(node)
        linear = name in LINEAR or (name in MULTILINEAR and links == 1)
        if not inputs or (linear and not _curved(node, name)):
            continue
        if name == "DIV" and links == 1 and node.next_functions[0][0] in dependent:
            continue  # linear in the numerator
        diagonal = links == 1 and (name in ELEMENTWISE or name == "DIV")
        found.append(Residual(node, sorted(reached[node]), list(inputs.values()), diagonal))
    return found


def _curved(node: Node, name: str) -> bool:
    """Whether an operation is nonlinear although its name is among the linear or multilinear ones."""
    if name == "ABS":  # of complex numbers
        following, nr = node.next_functions[0]
        return following is not None and is_complex(following, nr)
    return name.endswith("BATCHNORM") and bool(saved(node, "training", False))  # of single samples: instance norm
