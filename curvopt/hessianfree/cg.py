"""Conjugate gradients on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curvopt.core.products.base import widened

Product = Callable[[list[Tensor]], Sequence[Tensor]]


class Solution(NamedTuple):
    """The result of `cg`.

    Attributes:
        x: the approximate solution.
        iterations: number of products with A that were used to improve it.
        reason: why it stopped: the residual is small, progress is slow, a direction has no positive (or finite)
            curvature, or the budget is used up.
    """

    x: list[Tensor]
    iterations: int
    reason: Literal["residual", "progress", "curvature", "maxiter"]


@torch.no_grad()
def cg(
    A: Product,
    b: Sequence[Tensor],
    x0: Sequence[Tensor] | None = None,
    maxiter: int | None = None,
    tol: float = 1e-5,
    atol: float = 0.0,
    preconditioner: Product | None = None,
    progress: float | None = None,
    callback: Callable[[int, list[Tensor]], None] | None = None,
) -> Solution:
    r"""Solve ``A x = b`` for symmetric positive definite ``A``, which is to minimise ``q(x) = x^T A x / 2 - b^T x``.

    Args:
        A: the product ``v -> A v`` with a list of tensors.
        b: the right-hand side.
        x0: where to start, else at zero.
        maxiter: largest number of products for steps, else the number of entries of ``b``.
        tol: stop when the residual's norm is at most ``tol`` times that of ``b``,
        atol: or at most this.
        preconditioner: the product with an approximate inverse of ``A``, symmetric positive definite, too.
        progress: if given, also stop once q is negative and its last k steps changed it by less than ``k * progress``
            relatively, with k a tenth of the number of steps but at least 10 (Martens 2010, who uses 0.0005).
        callback: called as ``callback(iteration, x)`` after each step, the first being 1; it may keep ``x``.

    Returns:
        The solution with the number of steps and the reason to stop. Where a direction has no positive curvature, it
        is the last point before that direction.
    """
    b = [t.detach() for t in b]
    x = [torch.zeros_like(t) for t in b] if x0 is None else [t.detach().clone() for t in x0]
    r = list(b) if x0 is None else [t - Ax for t, Ax in zip(b, A(x), strict=True)]
    limit = max(tol * dot(b, b) ** 0.5, atol)
    maxiter = sum(t.numel() for t in b) if maxiter is None else maxiter
    values = [_quadratic(x, b, r)]
    d: list[Tensor] = []
    rho = 1.0
    for step in range(maxiter):
        if dot(r, r) ** 0.5 <= limit:
            return Solution(x, step, "residual")
        y = list(preconditioner(r)) if preconditioner is not None else r
        rho, before = dot(r, y), rho
        d = [yi + rho / before * di for yi, di in zip(y, d, strict=True)] if d else y
        Ad = list(A(d))
        curvature = dot(d, Ad)
        if not 0 < curvature < float("inf"):
            return Solution(x, step, "curvature")
        alpha = rho / curvature
        x = [xi + alpha * di for xi, di in zip(x, d, strict=True)]
        r = [ri - alpha * Adi for ri, Adi in zip(r, Ad, strict=True)]
        values.append(_quadratic(x, b, r))
        if callback is not None:
            callback(step + 1, x)
        if progress is not None:
            k = max(10, (step + 1) // 10)
            if step + 1 > k and values[-1] < 0 and (values[-1] - values[-1 - k]) / values[-1] < k * progress:
                return Solution(x, step + 1, "progress")
    return Solution(x, maxiter, "residual" if dot(r, r) ** 0.5 <= limit else "maxiter")


def _quadratic(x: list[Tensor], b: list[Tensor], r: list[Tensor]) -> float:
    """``x^T A x / 2 - b^T x``, from the residual ``r = b - A x``."""
    return -(dot(x, b) + dot(x, r)) / 2


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Sum of the products of all entries, in float32 at least."""
    return float(sum((widened(s) * widened(t)).sum() for s, t in zip(a, b, strict=True)))
