"""Products with the diagonal blocks of curvature matrices, one block for each parameter, usable after the backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from curvopt.core.losses.roots import Exact, Hessian
from curvopt.core.products.base import Chunk, Jacobian
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
        """The matrix applied to ``[V, *p]`` directions, or to a single one like ``p``; shaped as they are.

        Raises:
            CurvoptError: for directions of another shape.
        """
        shape = self._jacobians[0].shape
        if directions.shape == shape:
            return self(directions.unsqueeze(0)).squeeze(0)
        if directions.shape[1:] != shape:
            raise CurvoptError(
                f"expected directions of shape {['V', *shape]}, or {list(shape)} for a single one, got "
                f"{list(directions.shape)}; stack them along a leading axis."
            )
        return reduce(add, (jacobian.matmul(directions) for jacobian in self._jacobians))


class _Identity:
    """A multiple of the identity, with the products of a `Jacobian`."""

    def __init__(self, weight: Tensor, shape: torch.Size):
        self.weight, self.shape = weight, shape

    def joined(self, rest: Sequence[Any]) -> Sequence[Any]:
        return [self, *rest]

    def matmul(self, directions: Tensor) -> Tensor:
        return self.weight * directions


class _Product(Extension):
    """Keeps the columns.

    Args:
        savefield: another name for the field.
    """

    def __init__(self, savefield: str | None = None):
        self.field = savefield or self.field

    def update(self, total: dict[Any, list[Jacobian]] | None, chunk: Chunk) -> dict[Any, list[Jacobian]]:
        total = total or {}
        alike = total.setdefault(chunk.calls or chunk, [])
        alike.append(chunk.jacobian.owned(alike[0] if alike else None))
        return total

    def regularize(self, total: dict[Any, list[Any]], weight: Tensor, p: Tensor, N: int) -> dict[Any, list[Any]]:
        return {**total, "identity": [_Identity(weight, p.shape)]}

    def finish(self, total: dict[Any, list[Any]]) -> BlockProduct:
        return BlockProduct([each for first, *rest in total.values() for each in first.joined(rest)])


class GGNMP(_Product):
    """Products with the GGN's blocks ``ggnmp``, a callable: see `BlockProduct`.

    Args:
        savefield: another name for the field.
    """

    field = "ggnmp"
    columns = Exact()


class HMP(_Product):
    """Products with the Hessian's blocks ``hmp``, a callable: see `BlockProduct`.

    Args:
        savefield: another name for the field.
    """

    field = "hmp"
    columns = Hessian()


class PCHMP(_Product):
    """Products with the positive-curvature Hessian ``pchmp`` (Chen et al. 2018), a callable: see `BlockProduct`.

    The GGN plus, for each nonlinear operation, a positive semi-definite replacement of its term in the Hessian.

    Args:
        savefield: another name for the field, so that both replacements can be had in one backward.
        modify: drop negative eigenvalues (``"clip"``) or take absolute values (``"abs"``).

    Raises:
        ValueError: for another ``modify``.
    """

    field = "pchmp"

    def __init__(self, savefield: str | None = None, modify: str = "clip"):
        super().__init__(savefield)
        if modify not in ("clip", "abs"):
            raise ValueError(f"PCHMP: modify must be 'clip' or 'abs', got {modify!r}.")
        self.columns = Hessian(modify)
