"""Everything that an extension of curvopt is made of: rules of layers, quantities.

The page "Extending" of the documentation shows one of each.
"""

from curvopt.core.layers.rule import AffineRule, Rule, register, rule_for
from curvopt.core.losses.roots import (
    Averaged,
    Bernoulli,
    Diagonal,
    Empirical,
    Exact,
    Gradient,
    Hessian,
    LossCurvature,
    MonteCarlo,
    Softmax,
)
from curvopt.core.products.base import Chunk, Dense, Jacobian
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer, Patches
from curvopt.extensions.base import Extension

__all__ = [
    "AffineRule",
    "Averaged",
    "Bernoulli",
    "Chunk",
    "Dense",
    "Diagonal",
    "Empirical",
    "Exact",
    "Extension",
    "Gradient",
    "Hessian",
    "Jacobian",
    "Lookup",
    "LossCurvature",
    "MonteCarlo",
    "Outer",
    "Patches",
    "Rule",
    "Softmax",
    "register",
    "rule_for",
]
