"""Quantities of individual gradients.

``g_n`` is the gradient of sample n's term of the loss, scaled as the loss reduces it. In front of a train-mode batch
norm there is none; with ``through_batch_norm=True``, row n's part of the gradient takes its place: what arrives at row
n of a layer's output, times row n of its input. Parts sum to ``.grad``, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvopt.core.products.base import Chunk, Dense
from curvopt.extensions.base import Extension, indices


class _OfGradients(Extension):
    """A quantity of individual gradients.

    Args:
        through_batch_norm: where train-mode batch norm mixes the samples, take row n's part of the gradient for g_n.
    """

    def __init__(self, through_batch_norm: bool = False):
        self.through_batch_norm = through_batch_norm


class BatchGrad(_OfGradients):
    """Individual gradients ``grad_batch``, ``[N, *p]``; they sum to ``.grad`` (and carry 1/N under a mean loss).

    Args:
        subsampling: indices of the samples to keep, else all.
        through_batch_norm: where train-mode batch norm mixes the samples, take row n's part of the gradient for g_n.
    """

    field = "grad_batch"
    reads_inputs_once = True

    def __init__(self, subsampling: Sequence[int] | None = None, through_batch_norm: bool = False):
        super().__init__(through_batch_norm)
        self.subsampling = indices(subsampling)

    def update(self, total: None, chunk: Chunk) -> Tensor:
        values = chunk.jacobian.select(self.subsampling).dense()[0]
        # values of a bias are a view of the output's gradient, which other layers may share
        return values.clone() if isinstance(chunk.jacobian, Dense) else values


class BatchL2Grad(_OfGradients):
    """Squared norms of individual gradients ``batch_l2``, ``[N]`` per parameter (Goodfellow 2015).

    Args:
        through_batch_norm: where train-mode batch norm mixes the samples, take row n's part of the gradient for g_n.
    """

    field = "batch_l2"

    def update(self, total: None, chunk: Chunk) -> Tensor:
        return chunk.jacobian.norms2()[0]


class SumGradSquared(_OfGradients):
    """Second moment of individual gradients ``sum_grad_squared``: ``sum_n g_n^2``, like the parameter.

    Args:
        through_batch_norm: where train-mode batch norm mixes the samples, take row n's part of the gradient for g_n.
    """

    field = "sum_grad_squared"

    def update(self, total: None, chunk: Chunk) -> Tensor:
        return chunk.jacobian.squares()


class Variance(_OfGradients):
    """Variance of individual gradients ``variance``: ``sum_n g_n^2 / N - (sum_n g_n / N)^2``, like the parameter.

    Args:
        through_batch_norm: where train-mode batch norm mixes the samples, take row n's part of the gradient for g_n.
    """

    field = "variance"

    def update(self, total: None, chunk: Chunk) -> Tensor:
        (gradient, squares), N = chunk.jacobian.moments(), chunk.jacobian.N
        # the difference of nearly equal gradients may round to a negative number
        return (squares / N - (gradient / N).square()).clamp(min=0).contiguous()
