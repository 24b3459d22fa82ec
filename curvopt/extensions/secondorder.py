"""Quantities of the generalized Gauss-Newton matrix ``G = sum_n J_n^T H_n J_n``.

H_n is the Hessian of sample n's loss term in the network's output. Its root ``H_n = S_n S_n^T`` carries the loss'
scaling (1/sqrt(N) under a mean). Monte-Carlo variants replace the exact columns of S by gradients at targets drawn from
the model's predictive distribution (Martens 2020), each divided by the root of their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvopt.core.jacobians import Approx, Jacobian
from curvopt.core.sweep import Averaged, Exact, MonteCarlo
from curvopt.extensions.base import Extension, add


class _Sampled(Extension):
    """An extension on Monte-Carlo columns.

    Args:
        mc_samples: number of samples drawn per data point.
        generator: source of randomness, else the global one.
    """

    def __init__(self, mc_samples: int = 1, generator: torch.Generator | None = None):
        self.columns = MonteCarlo(mc_samples, generator)


class Diagonal(Extension):
    """Squares of all columns, summed over samples."""

    def update(self, total: Tensor | None, jacobian: Jacobian) -> Tensor:
        return add(total, jacobian.squares())

    def regularize(self, total: Tensor, weight: Tensor, p: Tensor, N: int) -> Tensor:
        return total + weight


class BatchDiagonal(Extension):
    """Squares of all columns, sample by sample."""

    per_sample = True

    def update(self, total: Tensor | None, jacobian: Jacobian) -> Tensor:
        return add(total, jacobian.squares_batch())

    def regularize(self, total: Tensor, weight: Tensor, p: Tensor, N: int) -> Tensor:
        return total + weight / N


class DiagGGNExact(Diagonal):
    """Diagonal of the GGN ``diag_ggn_exact``, like the parameter."""

    field = "diag_ggn_exact"
    columns = Exact()


class DiagGGNMC(_Sampled, Diagonal):
    """Monte-Carlo estimate of the GGN's diagonal ``diag_ggn_mc``, like the parameter."""

    field = "diag_ggn_mc"


class BatchDiagGGNExact(BatchDiagonal):
    """Each sample's share of the GGN's diagonal ``diag_ggn_exact_batch``, ``[N, *p]``; sums to `DiagGGNExact`."""

    field = "diag_ggn_exact_batch"
    columns = Exact()


class BatchDiagGGNMC(_Sampled, BatchDiagonal):
    """Each sample's share of the GGN's sampled diagonal ``diag_ggn_mc_batch``, ``[N, *p]``; sums to `DiagGGNMC`."""

    field = "diag_ggn_mc_batch"

    @property
    def needs_independent_samples(self) -> bool:
        """There is no single sample's share where samples mix."""
        return True


class _Root(Extension):
    """Root of the GGN: transposed Jacobian products of all columns, kept in the order of the columns."""

    needs_independent_samples = True
    subsampling: Sequence[int] | None = None

    def update(self, total: list[Tensor] | None, jacobian: Jacobian) -> list[Tensor]:
        return [*(total or ()), jacobian.select(self.subsampling).dense()]

    def finish(self, total: list[Tensor]) -> Tensor:
        return torch.cat(total)


class SqrtGGNExact(_Root):
    """Root ``V`` of the GGN ``sqrt_ggn_exact``, ``[C, N, *p]``: ``G = V^T V`` with columns and samples summed.

    Args:
        subsampling: indices of the samples to keep, else all.
    """

    field = "sqrt_ggn_exact"
    columns = Exact()

    def __init__(self, subsampling: Sequence[int] | None = None):
        self.subsampling = subsampling


class SqrtGGNMC(_Root):
    """Monte-Carlo root of the GGN ``sqrt_ggn_mc``, ``[mc_samples, N, *p]``.

    Args:
        mc_samples: number of samples drawn per data point.
        subsampling: indices of the samples to keep, else all.
        generator: source of randomness, else the global one.
    """

    field = "sqrt_ggn_mc"

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ):
        self.columns, self.subsampling = MonteCarlo(mc_samples, generator), subsampling


@dataclass
class _Factors:
    """The left factor summed over columns, and the right one of each group of uses."""

    left: Tensor | None = None
    rights: dict[tuple, Tensor | None] = field(default_factory=dict)
    transposed: bool = False


class _Kronecker(Extension):
    """Kronecker factors: ``[B, A]`` with ``G ≈ B ⊗ A`` of ``[O, I]`` matrices, a single factor for other parameters."""

    approx: Approx = "expand"

    def _set_approx(self, approx: Approx) -> None:
        if approx not in ("expand", "reduce"):
            raise ValueError(f"{type(self).__name__}: approx must be 'expand' or 'reduce', got {approx!r}.")
        self.approx = approx

    def update(self, total: list[Tensor] | None, jacobian: Jacobian) -> list[Tensor]:
        left = jacobian.left_factor(self.approx)
        place = 1 if jacobian.transposed else 0  # axis 0 of the parameter comes first
        if total is not None:
            return [add(factor, left) if i == place else factor for i, factor in enumerate(total)]
        right = jacobian.right_factor(self.approx)
        if right is None:
            return [left]
        return [right, left] if jacobian.transposed else [left, right]


class KFAC(_Kronecker):
    """Kronecker factors ``kfac`` of the GGN from sampled targets (Martens & Grosse 2015; Grosse & Martens 2016).

    Weights get ``[B, A]`` with ``A = 1/(N R) sum x x^T`` over samples and R shared positions, ``B = sum s s^T``; with
    groups both have a leading group axis. A bias gets ``[B_bias]``, ``sum_n (sum_r s)(sum_r s)^T``; other parameters a
    dense block, or its diagonal when they are large.

    Args:
        mc_samples: number of samples drawn per data point.
        approx: how shared positions enter (Eschenhagen et al. 2023): each by itself (``"expand"``), or the mean of the
            inputs and the sum of the backpropagated vectors (``"reduce"``).
        generator: source of randomness, else the global one.

    Raises:
        ValueError: for another ``approx`` or a number of samples below one.
    """

    field = "kfac"

    def __init__(self, mc_samples: int = 1, approx: Approx = "expand", generator: torch.Generator | None = None):
        self.columns = MonteCarlo(mc_samples, generator)
        self._set_approx(approx)


class KFLR(_Kronecker):
    """Kronecker factors ``kflr`` like `KFAC`, from the exact columns of the loss Hessian's root (Botev et al. 2017).

    Args:
        approx: as for `KFAC`.
    """

    field = "kflr"
    columns = Exact()

    def __init__(self, approx: Approx = "expand"):
        self._set_approx(approx)


class KFRA(_Kronecker):
    """Kronecker factors ``kfra`` from one curvature matrix averaged over the batch at every layer (Botev et al. 2017).

    For sequential networks of linear and convolution layers.
    """

    field = "kfra"
    columns = Averaged()
