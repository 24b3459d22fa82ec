"""Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.vjp import own_backward
from curvopt.hessianfree.lop import as_list, check_differentiable, check_shapes


def R_op(  # noqa: N802 - the name in the literature
    ys: Tensor | Sequence[Tensor],
    xs: Tensor | Sequence[Tensor],
    vs: Tensor | Sequence[Tensor],
    retain_graph: bool = True,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """The product ``J v`` with the Jacobian ``J`` of ``ys`` in ``xs``, from the graph of ``ys`` by two backwards.

    ``J^T w`` is linear in ``w``, so its own transposed Jacobian in ``w`` is ``J`` (Pearlmutter's R-operator).

    Args:
        ys: outputs.
        xs: inputs that the outputs were computed from.
        vs: vectors like ``xs``.
        retain_graph: keep the graph of ``ys`` for further products.
        detach: return tensors that cannot be differentiated again.

    Returns:
        Tensors like ``ys``, zero where they depend on nothing.

    Raises:
        CurvoptError: if a function between them is marked as differentiable only once.
    """
    ys, xs, vs = as_list(ys), as_list(xs), as_list(vs)
    check_shapes("R_op: vs", vs, xs)
    return linearise(ys, xs, ys, retain_graph)(vs, create_graph=not detach)


def linearise(
    ys: Sequence[Tensor] | Sequence[GradientEdge],
    xs: Sequence[Tensor],
    like: Sequence[Tensor],
    retain_graph: bool = True,
) -> Callable[..., tuple[Tensor, ...]]:
    """The map ``v -> J v`` for many vectors: the graph of ``J^T w`` is built here, once.

    Args:
        ys: outputs, or their edges in the graph.
        xs: inputs that the outputs were computed from.
        like: tensors like the outputs.
        retain_graph: keep the graph of ``ys``, which the map does not need.

    Raises:
        CurvoptError: if a function between them is marked as differentiable only once.
    """
    check_differentiable("R_op", ys)
    ws = [torch.zeros(y.shape, dtype=y.dtype, device=y.device, requires_grad=True) for y in like]
    with own_backward(), torch.enable_grad():
        gs = torch.autograd.grad(ys, xs, ws, retain_graph=retain_graph, create_graph=True, materialize_grads=True)
    dependent = [g.requires_grad for g in gs]

    def product(vs: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
        if not any(dependent):
            return tuple(torch.zeros_like(w) for w in ws)
        with own_backward():
            return torch.autograd.grad(
                list(compress(gs, dependent)),
                ws,
                list(compress(vs, dependent)),
                retain_graph=True,
                create_graph=create_graph,
                materialize_grads=True,
            )

    return product
