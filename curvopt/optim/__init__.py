"""Optimizers of ``torch.optim`` that precondition by curvature."""

from typing import TYPE_CHECKING

from curvopt.optim.diagonal_newton import DiagonalNewton
from curvopt.optim.kfac import EKFACSGD, KFACSGD, KFACPreconditioner
from curvopt.optim.kfac_adamw import KFACAdamW
from curvopt.optim.state import state_to_load

__all__ = ["EKFACSGD", "KFACSGD", "DiagonalNewton", "HessianFree", "KFACAdamW", "KFACPreconditioner", "state_to_load"]

if TYPE_CHECKING:
    from curvopt.optim.hessian_free import HessianFree as HessianFree
else:  # a type checker that sees __getattr__ takes every name for an attribute

    def __getattr__(name):
        """Import `HessianFree`, which has many modules of its own, when it is first looked up."""
        if name == "HessianFree":
            from curvopt.optim.hessian_free import HessianFree

            return HessianFree
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
