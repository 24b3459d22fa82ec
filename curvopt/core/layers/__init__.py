"""Layers: how vectors at their outputs become Jacobians of their parameters. Importing registers the rules.

::

    module with a rule       affine, norms, embedding, recurrent
    operation of the graph   operations (matrix products, convolutions, lookups; x * p, x + p)
    its parameters           parameters (where they enter), computed (as they are, or computed from one)
"""

from torch.nn import Flatten

from curvopt.core.layers import affine, embedding, norms, recurrent

__all__ = ["Flatten", "affine", "embedding", "norms", "recurrent"]
