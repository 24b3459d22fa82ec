"""Rules for operations that no other rule serves: exact, at N times the cost of the operation.

They get vectors that are zero but for one sample, and compute the Jacobian of "one sample"::

    [V, N, ...]  ──►  [V N, N, ...], zero but for one sample  ──►  Dense [V N, 1, *p]  ──►  Dense [V, N, *p]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.backward.second_derivatives import nonlinear_operations
from curvopt.core.graph.node_vjp import pull_together
from curvopt.core.graph.nodes import metadata, shape_of
from curvopt.core.graph.vjp import pull
from curvopt.core.layers.pull_to_parameter import pull_to_parameter
from curvopt.core.layers.rule import Jacobians, Rule
from curvopt.core.products.base import Dense, cast
from curvopt.core.products.sums import from_single_samples
from curvopt.core.record.calls import ModuleCall
from curvopt.core.record.extended_parameters import owned_parameters

if TYPE_CHECKING:
    from curvopt.core.graph.backward_graph import CallInGraph


class PerSampleRule(Rule):
    """An operation with an operand that all samples share: what arrives at the operand from each of them.

    Args:
        node: of the operation.
        output_nr: which output of it has the samples.
        position: of the operand.
        p: the parameter from which the operand was computed; ``None`` for the operand itself.
    """

    sample_by_sample = True
    takes_any_dtype = True

    def __init__(self, node: Node, output_nr: int, position: int, p: nn.Parameter | None = None):
        self.node, self.output_nr, self.position, self.p = node, output_nr, position, p

    @property
    def edge(self) -> GradientEdge:
        """The edge of the operand."""
        return GradientEdge(*self.node.next_functions[self.position])  # type: ignore[arg-type]

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        at = metadata(self.node, self.output_nr)
        values = pull_together(self.node, self.output_nr, self.position, grad.to(at.dtype))
        shape = shape_of(self.edge.node, self.edge.output_nr)
        below = metadata(self.edge.node, self.edge.output_nr)
        if values is None:
            values = torch.zeros(len(grad), *shape, dtype=below.dtype, device=grad.device)
        if self.p is not None and getattr(self.edge.node, "variable", None) is not self.p:
            pulled = pull_to_parameter(self.edge, self.p, values)
            values = self.p.new_zeros(len(grad), *self.p.shape) if pulled is None else pulled
        return dict.fromkeys(names, Dense(values.unsqueeze(1)))


class SharedCallRule(Rule):
    """A call of a module that all samples share, or whose samples mix later; samples are separated where it is used.

    Args:
        rule: of the module.
        call: the call.
        edges: where its outputs' gradients arrive, by the number of the output.
        operands: the operations behind which the call is.
        sources: where the operands were computed that lead to the call.
    """

    takes_any_dtype = True

    def __init__(
        self,
        rule: Rule,
        call: ModuleCall,
        edges: dict[int, GradientEdge],
        operands: Sequence[CallInGraph],
        sources: Sequence[GradientEdge],
    ):
        self.rule, self.call, self.edges, self.operands, self.sources = rule, call, edges, operands, sources
        ends = {edge.node for edge in edges.values()}
        #: Whether the parameters enter linearly up to where the samples are.
        self.linear = (
            rule.linear and all(operand.rule.linear for operand in operands) and not nonlinear_operations(sources, ends)
        )

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        given: list[tuple[GradientEdge, Tensor]] = []
        for operand, source, grad in zip(self.operands, self.sources, grads, strict=True):
            if grad is not None:
                jacobian = operand.jac_t([grad])["weight"]
                given.append((source, jacobian.dense().flatten(0, 1)))
        sources, vectors = [source for source, _ in given], [vectors for _, vectors in given]
        found = pull(sources, list(self.edges.values()), vectors)
        dtype = next(iter(owned_parameters(self.call.module).values())).dtype
        arrived: list[Tensor | None] = [None] * len(self.call.shapes)
        for index, grad in zip(self.edges, found, strict=True):
            arrived[index] = None if grad is None else cast(grad, dtype)
        if all(grad is None for grad in arrived):
            index, like = min(self.edges), given[0][1]
            arrived[index] = torch.zeros(len(like), *self.call.shapes[index], dtype=dtype, device=like.device)
        own = self.call.in_precision(dtype)
        if self.rule.is_single(own):
            own, arrived = own.batched(), [None if grad is None else grad.unsqueeze(1) for grad in arrived]
        jacobians = self.rule.jac_t(own, arrived, names, 1)
        return {name: from_single_samples(jacobian, N) for name, jacobian in jacobians.items()}
