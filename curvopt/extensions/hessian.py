"""Quantities of the Hessian's blocks: the GGN plus the second derivatives of nonlinear operations of the network.

Networks that are piecewise linear in every layer (ReLU, max-pooling) have none, so their blocks of Hessian and GGN are
equal. Every smooth activation adds columns, one for each of its units, which makes these quantities expensive in wide
networks.
"""

from __future__ import annotations

from curvopt.core.losses.roots import Hessian
from curvopt.extensions.secondorder import BatchDiagonal, Diagonal


class DiagHessian(Diagonal):
    """Diagonal of the Hessian ``diag_h``, like the parameter."""

    field = "diag_h"
    columns = Hessian()


class BatchDiagHessian(BatchDiagonal):
    """Each sample's share of the Hessian's diagonal ``diag_h_batch``, ``[N, *p]``; sums to `DiagHessian`."""

    field = "diag_h_batch"
    columns = Hessian()
