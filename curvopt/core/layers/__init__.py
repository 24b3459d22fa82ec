"""Layers: how vectors at their outputs become Jacobians of their parameters. Importing registers the rules.

::

    module with a rule       affine, normalization, embedding, recurrent
    operation of the graph   functional (matrix products, convolutions, lookups), broadcast (x * p, x + p)
    any other                sample_by_sample
"""

from torch.nn import Flatten

from curvopt.core.layers import affine, embedding, normalization, recurrent

__all__ = ["Flatten", "affine", "embedding", "normalization", "recurrent"]
