"""Quantities that one backward can compute; see `Extension` for writing one's own."""

from curvopt.extensions.base import Extension
from curvopt.extensions.firstorder import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from curvopt.extensions.secondorder import KFAC, KFLR, DiagGGNExact, DiagGGNMC

__all__ = [
    "KFAC",
    "KFLR",
    "BatchGrad",
    "BatchL2Grad",
    "DiagGGNExact",
    "DiagGGNMC",
    "Extension",
    "SumGradSquared",
    "Variance",
]
