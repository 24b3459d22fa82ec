"""Derivatives of layers and losses. Importing the package registers every rule."""

from curvopt.core.derivatives import affine, embedding, losses, recurrent, scale
from curvopt.core.derivatives.rules import AffineRule, Rule, register, rule_for

__all__ = [
    "AffineRule",
    "Rule",
    "affine",
    "embedding",
    "losses",
    "recurrent",
    "register",
    "rule_for",
    "scale",
]
