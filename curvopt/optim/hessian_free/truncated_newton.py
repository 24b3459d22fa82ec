"""The steps of truncated Newton methods (Martens 2010): conjugate gradients, backtracking, line search, damping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch

from curvopt.hessianfree.cg import Product, Solution, cg
from curvopt.optim.hessian_free.quadratic_model import QuadraticModel, Vector


def solve(
    model: QuadraticModel, damping: Sequence[float], x0: Vector | None, maxiter: int, progress: float, samples: int
) -> tuple[Solution, list[Vector]]:
    """CG on ``(B + λ) x = -g``.

    Returns:
        The solution, and the iterates 1, 1.3, 1.3², ... rounded up, and the last.
    """
    damping = [model.weight * value for value in damping]

    def product(v: Vector) -> Vector:
        return [Bv + value * t for Bv, value, t in zip(model.product(v), damping, v, strict=True)]

    preconditioner: Product | None = None
    if samples:
        diagonal = model.sampled_diagonal(samples)
        tiny = torch.finfo(diagonal[0].dtype).tiny
        inverse = [(t + value).clamp(min=tiny) ** -0.75 for t, value in zip(diagonal, damping, strict=True)]
        preconditioner = lambda r: [m * t for m, t in zip(inverse, r, strict=True)]  # noqa: E731

    iterates: list[Vector] = []
    due = 1.0

    def keep(iteration: int, x: Vector) -> None:
        nonlocal due
        if iteration >= due:
            iterates.append(x)
            while due <= iteration:
                due *= 1.3

    right = [-g for g in model.gradient]
    found = cg(product, right, x0, maxiter, 1e-10, preconditioner=preconditioner, progress=progress, callback=keep)
    if not iterates or iterates[-1] is not found.x:
        iterates.append(found.x)
    return found, iterates


def backtrack(f: Callable[[Vector], float], iterates: Sequence[Vector]) -> tuple[float, Vector]:
    """From the last iterate of CG backwards, as long as f decreases (or is infinite).

    Returns:
        f and the iterate.
    """
    best, x = inf, iterates[-1]
    for candidate in reversed(iterates):
        value = f(candidate)
        if value >= best and best < inf:
            break
        best, x = value, candidate
    return best, x


def line_search(
    f: Callable[[float], float], start: float, end: float, slope: float, resolution: float = 0.0
) -> tuple[float, float]:
    """The first of the rates 1, 0.8, 0.8², ... that meets Armijo's condition.

    Args:
        f: the objective by rate.
        start: f(0).
        end: f(1).
        slope: derivative of f at 0.
        resolution: change of f by rounding alone; rates that promise no more are not tried.

    Returns:
        f and the rate, which is 0 if there is none.
    """
    rate, value = 1.0, end
    while not (slope <= 0 and value <= start + 0.01 * rate * slope):
        rate *= 0.8
        if not -rate * slope > resolution or rate < 1e-4:
            return start, 0.0
        value = f(rate)
    return value, rate


def levenberg_marquardt(ratio: float) -> float:
    """The factor of the damping, by the reduction ratio ``ρ = (f(θ + δ) - f(θ)) / (q(δ) - q(0))``."""
    return 3 / 2 if ratio < 1 / 4 else 2 / 3 if ratio > 3 / 4 else 1.0
