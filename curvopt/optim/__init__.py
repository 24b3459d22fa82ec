"""Optimizers of ``torch.optim`` that precondition by curvature."""

from curvopt.optim.diagonal_newton import DiagonalNewton
from curvopt.optim.hessian_free import HessianFree
from curvopt.optim.kfac import EKFACSGD, KFACSGD, KFACPreconditioner
from curvopt.optim.kfac_adamw import KFACAdamW
from curvopt.optim.state import state_to_load

__all__ = ["EKFACSGD", "KFACSGD", "DiagonalNewton", "HessianFree", "KFACAdamW", "KFACPreconditioner", "state_to_load"]
