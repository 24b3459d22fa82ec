"""Products with the diagonal blocks of curvature matrices, one block for each parameter, usable after the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvopt.core.jacobians import Jacobian
from curvopt.core.sweep import Exact, Hessian
from curvopt.errors import CurvoptError
from curvopt.extensions.base import Extension


class BlockProduct:
    """A symmetric matrix ``sum_v w_v j_v j_v^T`` of one parameter, kept as factored Jacobians that it owns.

    Args:
        jacobians: the columns j with their weights.
    """

    def __init__(self, jacobians: Sequence[Any]):
        self._jacobians = jacobians

    def __call__(self, directions: Tensor) -> Tensor:
        """The matrix applied to ``[V, *p]`` directions, same shape.

        Raises:
            CurvoptError: if the directions do not have the parameter's shape behind a leading axis.
        """
        shape = self._jacobians[0].shape
        if directions.shape[1:] != shape:
            raise CurvoptError(
                f"expected directions of shape {['V', *shape]}, got {list(directions.shape)}; stack them along a "
                "leading axis (unsqueeze(0) for a single one)."
            )
        return sum((jacobian.matmul(directions) for jacobian in self._jacobians), start=directions.new_zeros(()))


class _Identity:
    """A multiple of the identity, like a `Jacobian` as far as products go."""

    def __init__(self, weight: Tensor, shape: torch.Size):
        self.weight, self.shape = weight, shape

    def matmul(self, directions: Tensor) -> Tensor:
        return self.weight * directions


class _Product(Extension):
    def update(self, total: list[Jacobian] | None, jacobian: Jacobian) -> list[Jacobian]:
        return [*(total or ()), jacobian.owned()]

    def regularize(self, total: list[Jacobian], weight: Tensor, p: Tensor, N: int) -> list[Any]:
        return [*total, _Identity(weight, p.shape)]

    def finish(self, total: list[Any]) -> BlockProduct:
        return BlockProduct(total)


class GGNMP(_Product):
    """Products with the GGN's blocks ``ggnmp``: a callable ``[V, *p] -> [V, *p]``."""

    field = "ggnmp"
    columns = Exact()


class HMP(_Product):
    """Products with the Hessian's blocks ``hmp``: a callable ``[V, *p] -> [V, *p]``."""

    field = "hmp"
    columns = Hessian()


class PCHMP(_Product):
    """Products with the positive-curvature Hessian ``pchmp`` (Chen et al. 2018): a callable ``[V, *p] -> [V, *p]``.

    The GGN plus, for each nonlinear operation, a positive semi-definite replacement of what it adds to the Hessian.

    Args:
        modify: drop negative eigenvalues (``"clip"``) or take absolute values (``"abs"``).

    Raises:
        ValueError: for another ``modify``.
    """

    field = "pchmp"

    def __init__(self, modify: str = "clip"):
        if modify not in ("clip", "abs"):
            raise ValueError(f"PCHMP: modify must be 'clip' or 'abs', got {modify!r}.")
        self.columns = Hessian(modify)
