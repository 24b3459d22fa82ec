"""Products with the generalized Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from curvopt.hessianfree.hvp import hessian_vector_product
from curvopt.hessianfree.lop import L_op
from curvopt.hessianfree.rop import R_op


def ggn_vector_product(loss: Tensor, output: Tensor, model: nn.Module, v: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The product ``J^T H J v`` with J the Jacobian of the model's output and H the loss' Hessian in it.

    Blocks between different parameters are included (Schraudolph 2002). The graph of ``loss`` is kept.

    Args:
        loss: the scalar loss.
        output: the model's output that the loss was computed from.
        model: parameters that require no gradient are skipped.
        v: vectors like the remaining parameters, in the order of ``model.parameters()``.

    Returns:
        Tensors like ``v``.
    """
    return ggn_vector_product_from_plist(loss, output, [p for p in model.parameters() if p.requires_grad], v)


def ggn_vector_product_from_plist(
    loss: Tensor, output: Tensor, plist: Sequence[Tensor], v: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`ggn_vector_product` for a list of parameters instead of a model."""
    Jv = R_op(output, plist, v)
    HJv = hessian_vector_product(loss, output, Jv)
    return L_op(output, plist, HJv)
