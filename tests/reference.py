"""The dense definitions of `curvopt.testing`, for the table of problems."""

from __future__ import annotations

from functools import cache

from cases import Case

from curvopt.testing import Reference, affine_type, hessian, jacobian, patches

__all__ = ["Reference", "affine_type", "hessian", "jacobian", "patches", "reference"]


@cache
def reference(case: Case) -> Reference:
    """The reference of a row of the table, computed once."""
    problem = case.problem()
    return Reference(problem.model, problem.x, problem.loss_of_output)
