"""Empirical curvature by the gradients of the samples: of any loss, whatever its curvature.

A sample's gradient ``g_n`` of a loss of weight w (see `curvopt.core.losses.any.loss_weight`) counts as
``N g_n g_n^T / w``. The fields here are ``N g_n g_n^T``, summed over the samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvopt.core.losses.roots import Empirical, Gradient
from curvopt.core.products.base import Chunk
from curvopt.extensions import EigenDiagonal, KFACEmpirical
from curvopt.extensions.base import Extension


def are_of_gradients(extensions: Iterable[Extension]) -> bool:
    """Whether these take the gradient of the backward itself, so that they are not divided by the loss's weight yet."""
    return any(isinstance(extension.columns, Gradient) for extension in extensions)


class GradientFactors(KFACEmpirical):
    """Kronecker factors ``kfac_empirical`` of the samples' gradients."""

    columns = Gradient()
    adds_up = True

    def update(self, total: Any, chunk: Chunk) -> Any:
        """The factors; there is one column."""
        total = super().update(total, chunk)
        total.B = total.B * chunk.jacobian.N
        return total


class GradientDiagonal(Extension):
    """Diagonal ``gradient_diagonal`` of the samples' gradients, like the parameter."""

    field = "gradient_diagonal"
    needs_independent_samples = False
    adds_up = True

    def update(self, total: None, chunk: Chunk) -> Tensor:
        """The diagonal; there is one column."""
        return chunk.jacobian.squares() * chunk.jacobian.N


class RowDiagonal(GradientDiagonal):
    """Diagonal of the rows' gradients with random signs, for batches that count as one sample.

    It is ``N g_n g_n^T / w`` already.
    """

    adds_up = False

    def __init__(self, generator: torch.Generator):
        self.columns = Empirical(generator)

    def update(self, total: Tensor | None, chunk: Chunk) -> Tensor:
        """The total after a column."""
        squares = chunk.jacobian.squares()
        return squares if total is None else total + squares


class Scales(EigenDiagonal):
    """Diagonal ``eigen_diagonal`` in given bases; none where the curvature has another form than the bases."""

    def update(self, total: Tensor | None, chunk: Chunk) -> Tensor | None:
        """The total after some columns."""
        bases = self.bases.get(chunk.parameter, ())
        return super().update(total, chunk) if len(bases) == (2 if chunk.jacobian.factored else 1) else None


class GradientScales(Scales):
    """Diagonal ``eigen_diagonal`` of the samples' gradients in given bases."""

    adds_up = True

    def __init__(self, bases: Mapping[Tensor, Sequence[Tensor]]):
        self.bases, self.columns = bases, Gradient()

    def update(self, total: None, chunk: Chunk) -> Tensor | None:
        """The diagonal; there is one column."""
        found = super().update(total, chunk)
        return None if found is None else found * chunk.jacobian.N
