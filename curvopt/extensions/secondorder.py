"""Quantities of the generalized Gauss-Newton matrix ``G = sum_n J_n^T H_n J_n``, with H_n the Hessian of sample n's loss term.

The root ``H_n = S_n S_n^T`` carries the loss' scaling (1/sqrt(N) under a mean). Monte-Carlo variants replace the exact columns of S
by gradients at targets drawn from the model's predictive distribution (Martens 2020), each divided by the root of their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvopt.core.jacobians import Jacobian
from curvopt.core.sweep import Exact, MonteCarlo
from curvopt.extensions.base import Extension, add


class _Sampled(Extension):
    """An extension on Monte-Carlo columns.

    Args:
        mc_samples: number of samples drawn per data point.
        generator: source of randomness, else the global one.
    """

    def __init__(self, mc_samples: int = 1, generator: torch.Generator | None = None):
        self.columns = MonteCarlo(mc_samples, generator)


class _DiagGGN(Extension):
    def update(self, total: Tensor | None, jacobian: Jacobian) -> Tensor:
        return add(total, jacobian.squares())


class DiagGGNExact(_DiagGGN):
    """Diagonal of the GGN ``diag_ggn_exact``, like the parameter."""

    field = "diag_ggn_exact"
    columns = Exact()


class DiagGGNMC(_Sampled, _DiagGGN):
    """Monte-Carlo estimate of the GGN's diagonal ``diag_ggn_mc``, like the parameter."""

    field = "diag_ggn_mc"


class _Kronecker(Extension):
    """Kronecker factors: ``[B, A]`` with ``G ≈ B ⊗ A`` for ``[O, I]`` matrices, a single factor for other parameters."""

    def update(self, total: list[Tensor] | None, jacobian: Jacobian) -> list[Tensor]:
        left = jacobian.left_factor()
        if total is not None:
            return [add(total[0], left), *total[1:]]
        right = jacobian.right_factor()
        return [left] if right is None else [left, right]


class KFAC(_Sampled, _Kronecker):
    """Kronecker factors ``kfac`` of the GGN from sampled targets (Martens & Grosse 2015; Grosse & Martens 2016).

    Weights get ``[B, A]`` with ``A = 1/(N R) sum x x^T`` over samples and R shared positions, ``B = sum s s^T``; with groups both have
    a leading group axis. A bias gets ``[B_bias]``, ``sum_n (sum_r s)(sum_r s)^T``; other parameters a dense block, or its diagonal
    when they are large.
    """

    field = "kfac"


class KFLR(_Kronecker):
    """Kronecker factors ``kflr`` like `KFAC`, from the exact columns of the loss Hessian's root (Botev et al. 2017)."""

    field = "kflr"
    columns = Exact()
