"""Hessian-free optimization, see `curvopt.optim.HessianFree`."""

from curvopt.optim.hessian_free.optimizer import HessianFree

__all__ = ["HessianFree"]
