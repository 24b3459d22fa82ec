"""From an operand that was computed from a parameter back to the parameter.

::

    y = h * g,  g = p.exp()       each entry of g is a function of one entry of p: products of g times exp(p)
    y = h * g,  g = p / p.norm()  autograd pulls the products of g back to p
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.backward.second_derivatives import nonlinear_operations
from curvopt.core.graph.node_vjp import consumers_first, pull_to_leaf
from curvopt.core.graph.nodes import leaf_of, operation, shape_of, walk
from curvopt.core.graph.operations import BY_ENTRY
from curvopt.core.graph.vjp import pull
from curvopt.core.products.base import Dense, Jacobian
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import PulledBack, Scaled
from curvopt.core.record.calls import ModuleCall


def _through(call: ModuleCall, source: GradientEdge | None, p: nn.Parameter, jacobian: Jacobian) -> Jacobian:
    """Products of a parameter, from those of a tensor that was computed from it."""
    shape = (jacobian.V, jacobian.N, *p.shape)
    if source is None:
        return jacobian if isinstance(jacobian, Outer) and p.dim() > 1 else Dense(jacobian.dense().reshape(shape))
    if "slopes" not in call.cache:
        call.cache["slopes"] = _pull(source, p, torch.ones_like(p))[0] if _is_by_entry(source, p) else None
    slopes = call.cache["slopes"]
    if slopes is None:
        return PulledBack(jacobian, partial(_pull, source, p), p, source)
    if isinstance(jacobian, Outer):
        return Scaled(jacobian, slopes, source)
    return Dense(jacobian.dense().reshape(shape) * slopes)


def _pull(source: GradientEdge, p: nn.Parameter, vectors: Tensor) -> Tensor:
    shape = shape_of(source.node, source.output_nr)
    found = pull_to_parameter(source, p, vectors.reshape(-1, *shape))
    return p.new_zeros(len(vectors), *p.shape) if found is None else found


def pull_to_parameter(source: GradientEdge, p: nn.Parameter, vectors: Tensor) -> Tensor | None:
    """Pull vectors ``[v, *source]`` back to a parameter past its hooks, ``[v, *p]``; ``None`` if nothing arrives."""
    if p._backward_hooks:
        return pull_to_leaf(source, p, vectors)
    return pull([source], [p], [vectors])[0]


def _is_by_entry(source: GradientEdge, p: nn.Parameter) -> bool:
    """Whether each entry of the tensor at an edge is a function of that entry of a parameter."""
    between = _between(source.node, p)
    operations = [node for node in between if leaf_of(node) is not p]
    inputs = [at for node in operations for at in node.next_functions if at[0] in between]
    shapes = {shape_of(*at) for at in [(source.node, source.output_nr), *inputs]}
    return shapes == {p.shape} and all(operation(node) in BY_ENTRY for node in operations)


def _between(root: Node, p: nn.Parameter) -> set[Node]:
    """The nodes on the paths from a root to a parameter."""
    found = set[Node]()
    for node in reversed(consumers_first([root])):
        if leaf_of(node) is p or not found.isdisjoint([below for below, _ in node.next_functions]):
            found.add(node)
    return found


def _is_linear(source: GradientEdge | None, p: nn.Parameter) -> bool:
    """Whether the tensor at an edge is linear in a parameter; ``None`` for the parameter itself."""
    if source is None:
        return True
    leaves = {node for node in walk([source.node]) if leaf_of(node) is p}
    return not nonlinear_operations([source], leaves)
