"""Layers: how vectors at their outputs become Jacobians of their parameters. Importing registers the rules."""

from torch.nn import Flatten

from curvopt.core.layers import affine, embedding, normalization, recurrent

__all__ = ["Flatten", "affine", "embedding", "normalization", "recurrent"]
