"""Checking fields against slow, plain autograd, on your own model: `check`.

`Reference` defines every field densely, from derivatives that the engine has no part in. The tests of this package
compare with it on small networks; `check` compares with the parts of it that real ones can afford.
"""

from curvopt.testing.checking import check
from curvopt.testing.reference import Reference, affine_type, by_position, hessian, jacobian, patches
from curvopt.testing.report import CheckResult, Row

__all__ = [
    "CheckResult",
    "Reference",
    "Row",
    "affine_type",
    "by_position",
    "check",
    "hessian",
    "jacobian",
    "patches",
]
