"""Regularizers whose curvature the quantities contain exactly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from curvopt.core.record import record_term


class L2Regularizer(nn.Module):
    """``weight / 2`` times the sum of squares of some parameters, to be added to an extended loss.

    ::

        regularizer = L2Regularizer(model.parameters(), 1e-3)
        with backpack(BatchGrad(), DiagGGNExact()):
            (lossfunc(model(x), y) + regularizer()).backward()

    Its curvature, ``weight`` on the diagonal, enters diagonals and matrix products; its gradient is shared out among
    the individual gradients in equal parts, so that they still sum to ``.grad``. A Kronecker product plus a multiple
    of the identity is no Kronecker product: `KFAC`, `KFLR` and `KFRA` of matrices leave the term out and warn.

    Args:
        parameters: the parameters to regularize.
        weight: non-negative factor.

    Raises:
        ValueError: for a negative weight, or no parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight: float):
        super().__init__()
        # a tuple, so that the parameters are not registered a second time
        self.regularized = tuple(parameters)
        self.weight = weight
        if weight < 0:
            raise ValueError(f"L2Regularizer: expected a non-negative weight, got {weight}.")
        if not self.regularized:
            raise ValueError("L2Regularizer: got no parameters.")

    def forward(self) -> Tensor:
        """The value of the term, a scalar."""
        value = self.weight / 2 * torch.stack([p.square().sum() for p in self.regularized]).sum()
        record_term(value, self.regularized, self.weight)
        return value

    def extra_repr(self) -> str:
        """Number of parameters and weight."""
        return f"{len(self.regularized)} parameters, weight={self.weight}"
