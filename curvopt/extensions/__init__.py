"""Quantities that one backward can compute; subclass `Extension` to add one."""

from curvopt.extensions.base import Extension
from curvopt.extensions.firstorder import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from curvopt.extensions.hessian import BatchDiagHessian, DiagHessian
from curvopt.extensions.products import GGNMP, HMP, PCHMP
from curvopt.extensions.secondorder import (
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
    EigenDiagonal,
    KFACEmpirical,
    SqrtGGNExact,
    SqrtGGNMC,
)

__all__ = [
    "GGNMP",
    "HMP",
    "KFAC",
    "KFLR",
    "KFRA",
    "PCHMP",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchGrad",
    "BatchL2Grad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "EigenDiagonal",
    "Extension",
    "KFACEmpirical",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
]
