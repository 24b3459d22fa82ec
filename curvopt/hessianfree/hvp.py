"""Hessian-vector products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.pytorch_workarounds import WRONG_TWICE, lone_biases
from curvopt.core.vjp import own_backward
from curvopt.errors import CurvoptError
from curvopt.hessianfree.lop import L_op, as_list, check_differentiable, check_shapes


def hessian_vector_product(
    f: Tensor,
    params: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    grad_params: Sequence[Tensor] | None = None,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """The product ``H v`` with the Hessian ``H`` of a scalar, between different parameters included (Pearlmutter 1994).

    The graph of ``f`` is kept.

    Args:
        f: a scalar.
        params: tensors that ``f`` was computed from.
        v: vectors like ``params``.
        grad_params: the gradient of ``f`` with its graph, to save computing it for each of many products.
        detach: return tensors that cannot be differentiated again.

    Returns:
        Tensors like ``params``.

    Raises:
        CurvoptError: if a function between them is marked as differentiable only once, or PyTorch's second derivative
            of an operation is wrong.
    """
    params, v = as_list(params), as_list(v)
    check_shapes("hessian_vector_product: v", v, params)
    check_differentiable("hessian_vector_product", [f], twice=True)
    roots = [] if f.grad_fn is None else [f.grad_fn]
    boundary = frozenset(p.grad_fn for p in params if p.grad_fn is not None)
    if WRONG_TWICE.nodes(roots, boundary):
        raise CurvoptError(
            f"hessian_vector_product: PyTorch's {WRONG_TWICE.derivative} is wrong; {WRONG_TWICE.instead}."
        )
    if any(lone_biases(root, boundary) for root in roots):
        raise CurvoptError(
            "hessian_vector_product: PyTorch has no second derivative of norms with a bias and no weight; add the bias "
            "by `+`."
        )
    if grad_params is None:
        with own_backward():
            grad_params = torch.autograd.grad(f, params, create_graph=True, materialize_grads=True)
    # the Hessian is symmetric; gradients without a graph are constant
    curved = [(g, vector) for g, vector in zip(grad_params, v, strict=True) if g.requires_grad]
    if not curved:
        return tuple(torch.zeros_like(p) for p in params)
    gradients, vectors = zip(*curved, strict=True)
    return L_op(gradients, params, vectors, detach=detach)
