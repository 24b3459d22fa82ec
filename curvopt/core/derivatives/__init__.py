"""Derivatives of layers and losses. Importing the package registers every rule."""

from curvopt.core.derivatives import affine, attention, embedding, losses, recurrent, scale
from curvopt.core.derivatives.rules import AffineRule, Rule, register, rule_for

__all__ = [
    "AffineRule",
    "Rule",
    "affine",
    "attention",
    "embedding",
    "losses",
    "recurrent",
    "register",
    "rule_for",
    "scale",
]
