"""Quantities of individual gradients.

``g_n`` is the gradient of sample n's term of the loss, scaled as the loss reduces it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.products.base import Dense
from curvopt.core.products.chunk import Chunk
from curvopt.extensions.base import Extension, indices


class BatchGrad(Extension):
    """Individual gradients ``grad_batch``, ``[N, *p]``; they sum to ``.grad`` (and carry 1/N under a mean loss).

    Args:
        subsampling: indices of the samples to keep, else all.
    """

    field = "grad_batch"
    reads_inputs_once = True

    def __init__(self, subsampling: Sequence[int] | None = None):
        self.subsampling = indices(subsampling)

    def update(self, total: None, chunk: Chunk) -> Tensor:
        values = chunk.jacobian.select(self.subsampling).dense()[0]
        # those of a bias are a view of the output's gradient, which other layers may share
        return values.clone() if isinstance(chunk.jacobian, Dense) else values


class BatchL2Grad(Extension):
    """Squared norms of individual gradients ``batch_l2``, ``[N]`` per parameter (Goodfellow 2015)."""

    field = "batch_l2"

    def update(self, total: None, chunk: Chunk) -> Tensor:
        return chunk.jacobian.norms2()[0]


class SumGradSquared(Extension):
    """Second moment of individual gradients ``sum_grad_squared``: ``sum_n g_n^2``, like the parameter."""

    field = "sum_grad_squared"

    def update(self, total: None, chunk: Chunk) -> Tensor:
        return chunk.jacobian.squares()


class Variance(Extension):
    """Variance of individual gradients ``variance``: ``sum_n g_n^2 / N - (sum_n g_n / N)^2``, like the parameter."""

    field = "variance"

    def update(self, total: None, chunk: Chunk) -> Tensor:
        (gradient, squares), N = chunk.jacobian.moments(), chunk.jacobian.N
        if torch.is_grad_enabled():
            return (squares / N - (gradient / N).square()).clamp(min=0)
        # the difference of nearly equal gradients may round to a negative number
        return squares.div_(N).addcmul_(gradient, gradient, value=-1 / N**2).clamp_(min=0).contiguous()
