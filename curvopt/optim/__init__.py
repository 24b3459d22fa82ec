"""Optimizers of ``torch.optim`` that live on curvature."""

from curvopt.optim.diagonal_newton import DiagonalNewton
from curvopt.optim.kfac_sgd import KFACSGD

__all__ = ["DiagonalNewton", "KFACSGD"]
