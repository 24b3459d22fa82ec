"""Quantities of the generalized Gauss-Newton matrix ``G = sum_n J_n^T H_n J_n``.

H_n is the Hessian of sample n's loss term in the network's output. Its root ``H_n = S_n S_n^T`` carries the loss'
scaling (1/sqrt(N) under a mean). Monte-Carlo variants replace the exact columns of S by gradients at targets drawn from
the model's predictive distribution (Martens 2020), each divided by the root of their number.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from curvopt.core.losses.roots import Averaged, Empirical, Exact, MonteCarlo
from curvopt.core.products.base import Approx, Chunk, Dense, add, widened
from curvopt.core.products.outer import Squares
from curvopt.core.record import extended_name
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions.base import Extension, indices


class _Sampled(Extension):
    """An extension on Monte-Carlo columns.

    Args:
        mc_samples: number of samples drawn per data point.
        generator: source of randomness, else the global one.
    """

    needs_independent_samples = False  # an approximation that is common practice

    def __init__(self, mc_samples: int = 1, generator: torch.Generator | None = None):
        self.columns = MonteCarlo(mc_samples, generator)


class Diagonal(Extension):
    """Squares of all columns, summed over samples unless `per_sample`."""

    def update(self, total: Squares | None, chunk: Chunk) -> Squares:
        return (total or Squares(self.per_sample)).add(chunk.jacobian, chunk.num_columns)

    def regularize(self, total: Squares, weight: Tensor, p: Tensor, N: int) -> Squares:
        N = N if self.per_sample else 1
        ones = Dense(p.new_ones(1, N, *p.shape))
        return total.add(ones.with_weights((weight / N).expand(1, N)))

    def finish(self, total: Squares) -> Tensor:
        return total.total()


class BatchDiagonal(Diagonal):
    """Squares of all columns, sample by sample."""

    per_sample = True


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

    needs_independent_samples = True  # no single sample's share where samples mix


@dataclasses.dataclass
class _Chunks:
    """Columns; the last tensor has memory for ``missing`` more."""

    values: list[Tensor] = dataclasses.field(default_factory=list)
    missing: int = 0


class _Root(Extension):
    """Root of the GGN: transposed Jacobian products of all columns, kept in the order of the columns."""

    def update(self, total: _Chunks | None, chunk: Chunk) -> _Chunks:
        values, total = chunk.jacobian.select(self.subsampling).dense(), total or _Chunks()
        columns = chunk.num_columns or len(values)
        if len(values) == columns or torch.is_grad_enabled():
            # a dense Jacobian may be a view of the output's gradient, which other layers may share
            total.values.append(values.clone() if isinstance(chunk.jacobian, Dense) else values)
            return total
        if not total.missing:
            total.values.append(values.new_empty(columns, *values.shape[1:]))
            total.missing = columns
        total.values[-1][-total.missing :][: len(values)] = values
        total.missing -= len(values)
        return total

    def finish(self, total: _Chunks) -> Tensor:
        if total.missing:  # of losses that do not reach the parameter
            total.values[-1] = total.values[-1][: -total.missing].clone()
        return total.values[0] if len(total.values) == 1 else torch.cat(total.values)


class SqrtGGNExact(_Root):
    """Root ``V`` of the GGN ``sqrt_ggn_exact``, ``[C, N, *p]``: ``G = V^T V`` with columns and samples summed.

    Args:
        subsampling: indices of the samples to keep, else all.
    """

    field = "sqrt_ggn_exact"
    columns = Exact(by_entries=True)

    def __init__(self, subsampling: Sequence[int] | None = None):
        self.subsampling = indices(subsampling)


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
        self.columns, self.subsampling = MonteCarlo(mc_samples, generator), indices(subsampling)


class KroneckerFactors(list[Tensor]):
    """A list of factors whose Kronecker product is the curvature of a parameter.

    Attributes:
        transposed: whether the factor of the input comes first, because axis 0 of the parameter belongs to it.
    """

    def __init__(self, factors: Sequence[Tensor], transposed: bool = False):
        """Keep the factors."""
        super().__init__(factors)
        self.transposed = transposed


@dataclasses.dataclass
class _Factors:
    """The output factor B, summed over columns, and the input factor A of each group of calls."""

    transposed: bool
    dtype: torch.dtype
    B: Tensor | None = None
    A: dict[tuple, Tensor | None] = dataclasses.field(default_factory=dict)
    rows: dict[tuple, int] = dataclasses.field(default_factory=dict)


def _different_kinds(field: str, p: Tensor) -> CurvoptError:
    name = extended_name(p) or "a parameter"
    return CurvoptError(
        f"{name}: losses reach it through calls of different kinds (an embedding and a linear layer, or a layer and "
        f"its slope by the input), and their {field} do not add up; ask for a diagonal (DiagGGNExact), a sampled "
        "quantity (KFAC), or KFACEmpirical."
    )


class _Kronecker(Extension):
    """Kronecker factors: ``[B, A]`` with ``G ≈ B ⊗ A`` of ``[O, I]`` matrices, a single factor for other parameters."""

    reads_inputs_once = True
    approx: Approx | Literal["backpack"] = "expand"
    limit: int | None = None

    def _set_approx(self, approx: Approx | Literal["backpack"], limit: int | None) -> None:
        if approx not in ("expand", "reduce", "backpack"):
            raise ValueError(f"{type(self).__name__}: approx must be 'expand', 'reduce' or 'backpack', got {approx!r}.")
        if limit is not None and limit < 1:
            raise ValueError(f"{type(self).__name__}: max_factor_size must be at least 1 or None, got {limit}.")
        self.approx, self.limit = approx, limit

    def update(self, total: _Factors | None, chunk: Chunk) -> _Factors:
        jacobian = chunk.jacobian
        of_B, of_A = ("reduce", "expand") if self.approx == "backpack" else (self.approx, self.approx)
        B = jacobian.output_factor(of_B, self.limit)
        total = total or _Factors(jacobian.transposed, B.dtype)
        if total.B is not None and (total.B.shape, total.transposed) != (B.shape, jacobian.transposed):
            raise _different_kinds(self.field, chunk.parameter)
        total.B = add(total.B, widened(B))
        if chunk.calls not in total.A:
            # once for all columns; several losses may reach the parameter through different layers
            A = jacobian.input_factor(of_A, self.limit)
            if A is not None and self.approx == "backpack":
                A = A * (jacobian.positions / jacobian.N)
            total.A[chunk.calls] = A
            total.rows[chunk.calls] = jacobian.rows_of_batch
        return total

    def regularize(self, total: _Factors, weight: Tensor, p: Tensor, N: int) -> _Factors:
        assert total.B is not None
        if any(A is not None for A in total.A.values()):
            warnings.warn(
                f"{self.field} of a matrix leaves the L2Regularizer out: a Kronecker product plus a multiple of the "
                "identity is no Kronecker product. Add its weight to the damping.",
                CurvoptWarning,
                stacklevel=2,
            )
        else:
            total.B = total.B + (weight if total.B.dim() == 1 else weight * torch.eye(len(total.B)).to(p))
        return total

    def finish(self, total: _Factors) -> KroneckerFactors:
        assert total.B is not None
        of_groups = {calls: A for calls, A in total.A.items() if A is not None}
        B = total.B.to(total.dtype)
        if not of_groups:
            return KroneckerFactors([B])
        rows = sum(total.rows[calls] for calls in of_groups)  # of batches that were appended, say
        A = reduce(torch.add, (A * (total.rows[calls] / max(rows, 1)) for calls, A in of_groups.items()))
        return KroneckerFactors([A, B] if total.transposed else [B, A], total.transposed)


class KFAC(_Kronecker):
    """Kronecker factors ``kfac`` of the GGN from sampled targets (Martens & Grosse 2015; Grosse & Martens 2016).

    Weights get ``[B, A]`` with ``A = 1/(N R) sum x x^T`` over samples and R shared positions, ``B = sum s s^T``; with
    groups both have a leading group axis. A bias gets ``[B_bias]``, ``sum_n (sum_r s)(sum_r s)^T``; other parameters a
    dense block, or its diagonal when they are large.

    Args:
        mc_samples: number of samples drawn per data point.
        approx: how shared positions enter (Eschenhagen et al. 2023): each by itself (``"expand"``), or the mean of the
            inputs and the sum of the backpropagated vectors (``"reduce"``). Or as in BackPACK (``"backpack"``), with
            the B of ``"reduce"`` and R times the A of ``"expand"``.
        generator: source of randomness, else the global one.
        max_factor_size: a factor ``[F, F]`` with more rows is cut down to K blocks on its diagonal, ``[G, K, b, b]``
            with ``K b >= F``.

    Raises:
        ValueError: for another ``approx``, or a number of samples or a size below one.
    """

    field = "kfac"
    needs_independent_samples = False

    def __init__(
        self,
        mc_samples: int = 1,
        approx: Approx | Literal["backpack"] = "expand",
        generator: torch.Generator | None = None,
        max_factor_size: int | None = None,
    ):
        self.columns = MonteCarlo(mc_samples, generator)
        self._set_approx(approx, max_factor_size)


class KFACEmpirical(_Kronecker):
    """Kronecker factors ``kfac_empirical`` like `KFAC`, of the empirical Fisher matrix: no target is drawn.

    The targets of the data take the place of samples from the model's predictive distribution, so this is no estimate
    of the GGN and no Hessian near a minimum (Kunstner et al. 2019), though it is often used for one.

    Args:
        approx: as for `KFAC`.
        max_factor_size: as for `KFAC`.
    """

    field = "kfac_empirical"
    columns = Empirical()
    needs_independent_samples = False

    def __init__(self, approx: Approx | Literal["backpack"] = "expand", max_factor_size: int | None = None):
        self._set_approx(approx, max_factor_size)


class KFLR(_Kronecker):
    """Kronecker factors ``kflr`` like `KFAC`, from the exact columns of the loss Hessian's root (Botev et al. 2017).

    Args:
        approx: as for `KFAC`.
        max_factor_size: as for `KFAC`.
    """

    field = "kflr"
    columns = Exact()

    def __init__(self, approx: Approx | Literal["backpack"] = "expand", max_factor_size: int | None = None):
        self._set_approx(approx, max_factor_size)


class KFRA(_Kronecker):
    """Kronecker factors ``kfra`` from one curvature matrix averaged over the batch at every layer (Botev et al. 2017).

    For sequential networks of linear and convolution layers.
    """

    field = "kfra"
    columns = Averaged()


class EigenDiagonal(Extension):
    """Diagonal ``eigen_diagonal`` of the GGN in given Kronecker-factored bases, ``[P]`` (George et al. 2018).

    ``diag((U1 ⊗ U2)^T G (U1 ⊗ U2))`` for the flattened parameter: with the eigenvectors of Kronecker factors, the
    diagonal that fits the GGN best in their basis.

    Args:
        bases: orthogonal bases by parameter, shaped as its factors (see `KFAC`; for a diagonal factor anything of one
            axis). The field of a parameter without bases is ``None``.
        columns: which columns of the loss Hessian's root are squared, e.g. those of ``KFAC(...).columns``.
    """

    field = "eigen_diagonal"
    needs_independent_samples = False

    def __init__(self, bases: Mapping[Tensor, Sequence[Tensor]], columns: Exact | MonteCarlo | Empirical):
        self.bases, self.columns = bases, columns

    def update(self, total: Tensor | None, chunk: Chunk) -> Tensor | None:
        jacobian, bases = chunk.jacobian, self.bases.get(chunk.parameter)
        if bases is not None and len(bases) != (2 if jacobian.factored else 1):
            raise CurvoptError(
                f"{_different_kinds('bases', chunk.parameter)} If its layer has changed (pruned, for example), "
                "restart its curvature by optimizer.state[p].clear()."
            )
        return None if bases is None else add(total, jacobian.squares_in(bases).reshape(-1))

    def regularize(self, total: Tensor | None, weight: Tensor, p: Tensor, N: int) -> Tensor | None:
        return None if total is None else total + weight
