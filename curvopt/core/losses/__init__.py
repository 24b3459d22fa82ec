"""Losses and the roots of their Hessians. Importing the package registers PyTorch's losses."""

from curvopt.core.losses import pytorch_losses

__all__ = ["pytorch_losses"]
