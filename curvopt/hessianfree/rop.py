"""Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.uses import unheard
from curvopt.hessianfree.lop import as_list, check_shapes


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
    """
    ys, xs, vs = as_list(ys), as_list(xs), as_list(vs)
    check_shapes("R_op: vs", vs, xs)
    ws = [torch.zeros_like(y).requires_grad_() for y in ys]
    with unheard():
        gs = torch.autograd.grad(ys, xs, ws, retain_graph=True, create_graph=True, materialize_grads=True)
        dependent = [(g, v) for g, v in zip(gs, vs, strict=True) if g.requires_grad]
        if not dependent:
            return tuple(torch.zeros_like(y) for y in ys)
        gs, vs = zip(*dependent, strict=True)
        return torch.autograd.grad(
            gs, ws, vs, retain_graph=retain_graph, create_graph=not detach, materialize_grads=True
        )
