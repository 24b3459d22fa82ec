"""Products of matrices, by the faster of two libraries that PyTorch brings."""

from __future__ import annotations

import torch
from torch import Tensor

from curvopt.core import costs, onednn


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices ``[M, K]`` and ``[K, N]``; where no graph is built, by whichever library is faster."""
    if a.dtype != b.dtype or not by_onednn(a, len(a), len(b), b.shape[1]):
        return a @ b
    return of_gapless(gapless(a), gapless(b)).contiguous()


def of_gapless(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by oneDNN, of matrices without gaps between their rows or columns."""
    if b.shape[1] < costs.NARROW and b.shape[1] < len(a):
        return of_gapless(b.T, a.T).T
    return onednn.multiply(a, b)


def by_onednn(like: Tensor, M: int, K: int, N: int, repeated: bool = False) -> bool:
    """Whether oneDNN shall multiply ``[M, K]`` and ``[K, N]``, which should have no gaps between their rows then.

    Args:
        like: a tensor of the same type.
        M: rows of the first matrix.
        K: columns of the first matrix.
        N: columns of the second matrix.
        repeated: there is one such product for every sample, which could be computed together otherwise.
    """
    if like.dtype != torch.float32 or like.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return M * K * N >= (costs.ONEDNN_REPEATED if repeated else costs.ONEDNN_SIZE) and costs.onednn_is_faster()


def add_product(total: Tensor | None, a: Tensor, b: Tensor, alpha: float = 1.0, overwrite: bool = False) -> Tensor:
    """``total + alpha * a @ b``, in place.

    Args:
        total: what to add to, perhaps in another precision; ``None`` for nothing.
        a: ``[M, K]``.
        b: ``[K, N]``.
        alpha: scale of the product.
        overwrite: do not add to the total, it is uninitialised.
    """
    if total is not None and total.dtype != a.dtype:
        values = add_product(None, a, b, alpha)
        return total.copy_(values) if overwrite else total.add_(values)
    if not by_onednn(a, len(a), len(b), b.shape[1]):
        if total is None:
            total, overwrite = costs.empty((len(a), b.shape[1]), a), True
        return total.addmm_(a, b, beta=not overwrite, alpha=alpha)
    values = product(a, b)
    if total is None:
        return values if alpha == 1 else values.mul_(alpha)
    return torch.mul(values, alpha, out=total) if overwrite else total.add_(values, alpha=alpha)


def add_products(total: Tensor | None, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """`add_product` of ``[G, M, K]`` and ``[G, K, N]``, whose calls would cost more than many small products."""
    if len(a) == 1:
        return add_product(None if total is None else total[0], a[0], b[0], alpha).unsqueeze(0)
    (G, M, K), N, overwrite = a.shape, b.shape[2], total is None
    total = costs.empty((G, M, N), a) if total is None else total
    if total.dtype == a.dtype and not by_onednn(a, M, K, N):
        return total.baddbmm_(a, b, beta=not overwrite, alpha=alpha)
    for out, left, right in zip(total, a, b, strict=True):
        add_product(out, left, right, alpha, overwrite)
    return total


def set_products(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a @ b`` of ``[B, M, K]`` and ``[B, K, N]``, in place."""
    if len(out) == 1:
        add_product(out[0], a[0], b[0], overwrite=True)
    else:
        out.baddbmm_(a, b, beta=0)


def gapless(matrix: Tensor) -> Tensor:
    """The same without gaps between rows (or columns) in memory: see `onednn.multiply`."""
    return matrix if matrix.is_contiguous() or matrix.T.is_contiguous() else matrix.contiguous()
