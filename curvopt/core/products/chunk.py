"""The Jacobian products of one parameter for a chunk of columns, as an extension gets them.

::

    def update(self, total, chunk):                   # of an extension with `Exact()` columns
        trace = chunk.jacobian.norms2().sum()         # of chunk.jacobian.V columns out of chunk.num_columns
        return trace if total is None else total + trace
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from curvopt.core.products.base import Jacobian

if TYPE_CHECKING:
    from curvopt.core.record.calls import ModuleCall


@dataclass(frozen=True)
class Chunk:
    """Jacobian products of a parameter for a chunk of the columns of one sweep.

    Attributes:
        parameter: the parameter.
        jacobian: the products, those of all calls that share the parameter combined.
        calls: these calls. Chunks of the same calls share the inputs of the layer.
        num_columns: number of columns of the whole sweep, if it is known; ``jacobian.V`` are in this chunk.
    """

    parameter: nn.Parameter
    jacobian: Jacobian
    calls: tuple[ModuleCall, ...] = ()
    num_columns: int | None = None
