r"""Curvature that nonlinear operations add to the Gauss-Newton matrix.

The Hessian of ``L(f(w))`` is ``J^T (\nabla^2 L) J`` plus, for every nonlinear operation ``b = h(a)`` of the network,
the residual ``J_a^T R J_a`` with ``R = \nabla_a^2 (g^T h(a))`` and g the gradient at b. Operations are read off the
autograd graph, so functional code counts. Differentiating the backward of the operation gives R, and R travels on as
columns ``u`` with weights: ``R = sum_v w_v u_v u_v^T``, sample by sample::

    b = tanh(a)     R = diag(g tanh''(a))             a unit vector for each entry, with the weight g tanh''(a)
    b = a1 * a2     R = [[0, diag g], [diag g, 0]]    two columns for each entry, with the weights 1/4 and -1/4
    b = relu(a)     R = 0                             no columns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.graph.node_vjp import consumers_first
from curvopt.core.graph.nodes import is_complex, operation, saved
from curvopt.core.graph.operations import ELEMENTWISE, LINEAR, MULTILINEAR
from curvopt.core.graph.vjp import cut, pull
from curvopt.core.linear_algebra import eigh

Modify = Literal["clip", "abs"] | None


class Residual(NamedTuple):
    """A nonlinear operation: its node, the edges of its inputs that depend on parameters, and whether R is diagonal."""

    node: Node
    outputs: list[int]
    inputs: list[GradientEdge]
    diagonal: bool


class Columns(NamedTuple):
    """Columns at several edges together, ``[v, *shape]`` each, with their weights ``[v, N]``."""

    edges: list[GradientEdge]
    vectors: list[Tensor]
    weights: Tensor


def nonlinear_operations(roots: Sequence[GradientEdge], calls: set[Node]) -> list[Residual]:
    """The operations between some edges and the outputs of calls that add a residual.

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


def residual_columns(residual: Residual, grads: list[Tensor], N: int, size: int, modify: Modify) -> Iterator[Columns]:
    """Weighted columns of one operation's residual, at most ``size`` at a time.

    Args:
        residual: the operation.
        grads: gradients of the loss at its outputs.
        N: number of samples; entries of the inputs belong to samples in equal contiguous shares.
        size: columns at a time.
        modify: replace R by its positive part (``"clip"``) or absolute value (``"abs"``), else leave it.
    """
    if isinstance(residual.node, BackwardCFunction):
        # a function that is differentiable once protests only if its gradient could be differentiated
        grads = [grad if grad.requires_grad else grad.detach().requires_grad_() for grad in grads]
    # stay within the operation: an input may depend on another, and the gradient (under create_graph) on all of them
    borders = [edge.node for edge in residual.inputs] + [grad.grad_fn for grad in grads]
    with torch.enable_grad(), cut(borders):
        # the operation's own backward at a fixed gradient, as a function of the operation's inputs
        outputs = [GradientEdge(residual.node, nr) for nr in residual.outputs]
        pulled = pull(outputs, residual.inputs, [grad.unsqueeze(0) for grad in grads])
        found = [(e, p[0]) for e, p in zip(residual.inputs, pulled, strict=True) if p is not None and p.requires_grad]
    if not found:
        return
    edges, values = [edge for edge, _ in found], [value for _, value in found]
    shapes = [value.shape for value in values]
    dims = [shape.numel() // N for shape in shapes]

    def at_inputs(columns: Tensor) -> list[Tensor]:
        """``[v, N, sum(dims)]`` as a tensor for each input."""
        return [u.reshape(-1, *shape) for u, shape in zip(columns.split(dims, 2), shapes, strict=True)]

    def images(columns: Tensor) -> Tensor:
        """Products R u of the joint residual of all inputs, ``[v, N, sum(dims)]``."""
        vectors = at_inputs(columns)
        with cut(borders):
            found = pull(values, edges, vectors)
        found = [torch.zeros_like(v) if r is None else r for r, v in zip(found, vectors, strict=True)]
        return torch.cat([r.reshape(-1, N, d) for r, d in zip(found, dims, strict=True)], 2)

    if residual.diagonal:
        diagonal = images(values[0].new_ones(1, N, dims[0]))[0]
        if modify is not None:
            diagonal = diagonal.clamp(min=0) if modify == "clip" else diagonal.abs()
        active = (diagonal != 0).any(0).nonzero()[:, 0]
        for indices in active.split(size) if len(active) else ():
            units = unit_vectors(indices, dims[0], N, diagonal)
            yield Columns(edges, at_inputs(units), diagonal[:, indices].T)
        return

    entries = torch.arange(sum(dims), device=values[0].device)
    if modify is not None:
        rows = [images(unit_vectors(i, len(entries), N, values[0])) for i in entries.split(size)]
        R = torch.cat(rows).transpose(0, 1)
        eigenvalues, eigenvectors = eigh((R + R.mT) / 2)
        weights = eigenvalues.clamp(min=0) if modify == "clip" else eigenvalues.abs()
        for indices in entries.split(size):
            yield Columns(edges, at_inputs(eigenvectors[:, :, indices].permute(2, 0, 1)), weights[:, indices].T)
        return
    for indices in entries.split(max(1, size // 2)):
        units = unit_vectors(indices, len(entries), N, values[0])
        both, weights = polarize(units, images(units))
        yield Columns(edges, at_inputs(both), weights)


def polarize(units: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Columns ``[2 v, N, D]`` and weights ``[2 v, N]`` of ``sum_v (e (Re)^T + (Re) e^T) / 2``.

    Over all units that is R itself.

    Args:
        units: unit vectors e, ``[v, N, D]``.
        images: their products Re with a symmetric matrix of each sample.
    """
    # (e + Re)(e + Re)^T - (e - Re)(e - Re)^T = 2 (e (Re)^T + (Re) e^T), with e and Re scaled to one length first
    length = images.detach().square().sum(2, keepdim=True).sqrt()
    root = length.sqrt()
    images = torch.where(length > 0, images / root.clamp(min=torch.finfo(images.dtype).tiny), 0)
    both = torch.cat([units * root + images, units * root - images])
    quarter = both.new_full((len(units), 1), 0.25)
    return both, torch.cat([quarter, -quarter]).expand(-1, both.shape[1])


def unit_vectors(indices: Tensor, dim: int, N: int, like: Tensor) -> Tensor:
    """Unit vectors ``[v, N, dim]``, the same for all samples."""
    units = torch.zeros(len(indices), dim, dtype=like.dtype, device=like.device)
    return units.scatter_(1, indices.to(like.device).unsqueeze(1), 1).unsqueeze(1).expand(-1, N, -1)
