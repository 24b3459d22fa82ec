"""Optimizers of ``torch.optim`` that precondition by curvature."""

from curvopt.optim.checkpoint import state_to_load
from curvopt.optim.diagonal_newton import DiagonalNewton
from curvopt.optim.ekfac_sgd import EKFACSGD
from curvopt.optim.hessian_free import HessianFree
from curvopt.optim.kfac_adamw import KFACAdamW
from curvopt.optim.kfac_sgd import KFACSGD
from curvopt.optim.preconditioner import KFACPreconditioner

__all__ = ["EKFACSGD", "KFACSGD", "DiagonalNewton", "HessianFree", "KFACAdamW", "KFACPreconditioner", "state_to_load"]
