"""Kronecker factor lists against their dense matrices, in float64.

Tests of `core/linear_algebra.py`, too.
"""

from __future__ import annotations

import logging

import pytest
import torch
from checks import assert_same
from torch import Tensor

from curvopt.core.linear_algebra import eigh
from curvopt.kroneckers import (
    apply_kfac_mat_prod,
    damped_inverses,
    eigenbases,
    inv_kfac_mat_prod,
    inv_kfacs,
    kfac_mat_prod,
    kfacs_to_mat,
    largest_condition,
    mean_diagonals,
    pi_dampings,
)


def psd(*shape: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random positive semi-definite matrices ``[*shape, shape[-1]]``."""
    root = torch.randn(*shape, rank or shape[-1] + 2, dtype=torch.float64)
    return (root @ root.mT).to(dtype)


FACTORS = {
    "weight": lambda: [psd(3), psd(4)],
    "dense": lambda: [psd(5)],
    "diagonal": lambda: [torch.rand(6, dtype=torch.float64)],
    "embedding": lambda: [psd(3), torch.rand(5, dtype=torch.float64)],
    "grouped": lambda: [psd(2, 3), psd(2, 4)],
    "grouped with a shared diagonal": lambda: [psd(2, 3), torch.rand(4, dtype=torch.float64)],
    "scaled": lambda: [torch.tensor(2.5, dtype=torch.float64), psd(3)],
    "three": lambda: [psd(2), psd(3), psd(4)],
}


def test_largest_condition() -> None:
    factors = [psd(3), psd(3), psd(2, 3), psd(1, 2, 4), torch.rand(5, dtype=torch.float64)]
    shifts = [torch.full({3: (2,), 4: (1, 1)}.get(f.ndim, ()), 0.1 * (i + 1)).double() for i, f in enumerate(factors)]
    conditions = []
    for factor, shift in zip(factors, shifts, strict=True):
        whole = torch.diag(factor) if factor.ndim == 1 else factor
        damped = whole + shift.flatten()[0] * torch.eye(whole.shape[-1]).double()
        conditions.append(torch.linalg.cond(damped, 1).max())
    for chosen in ([0, 1, 2, 3, 4], [0], [1, 4], [4], [3, 2]):
        own = [[column[i] for i in chosen] for column in (factors, shifts)]
        largest = largest_condition(*own, damped_inverses(*own)[0])
        torch.testing.assert_close(largest, max(conditions[i] for i in chosen))


def block(factors: list[Tensor], group: int) -> Tensor:
    """Kronecker product of one group, entry by entry from the definition."""
    result = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        f = factor[group] if factor.ndim == 3 else torch.diag(factor) if factor.ndim == 1 else factor.reshape(-1, 1)
        f = factor if factor.ndim == 2 else f
        (m, n), (p, q) = result.shape, f.shape
        entries = [[result[i // p, j // q] * f[i % p, j % q] for j in range(n * q)] for i in range(m * p)]
        result = torch.tensor(entries, dtype=torch.float64)
    return result


@pytest.mark.parametrize("name", FACTORS)
def test_dense_matrix(name: str) -> None:
    factors = FACTORS[name]()
    groups = max([f.shape[0] for f in factors if f.ndim == 3], default=1)
    torch.testing.assert_close(kfacs_to_mat(factors), torch.block_diag(*(block(factors, g) for g in range(groups))))


@pytest.mark.parametrize("name", FACTORS)
def test_product_is_the_dense_product(name: str) -> None:
    for columns in (None, 1, 7):
        factors = FACTORS[name]()
        dense = kfacs_to_mat(factors)
        x = torch.randn(len(dense), *([] if columns is None else [columns])).double()
        with torch.no_grad():
            assert_same(kfac_mat_prod(factors)(x), dense @ x)
            assert_same(apply_kfac_mat_prod(factors, x), dense @ x)


@pytest.mark.parametrize("columns", [(), (2,)])
def test_product_of_factors_that_are_not_square(columns: tuple[int, ...]) -> None:
    factors, x = [torch.randn(*shape) for shape in ((2, 3), (4, 1), (1, 5))], torch.randn(15, *columns)
    torch.testing.assert_close(kfac_mat_prod(factors)(x), kfacs_to_mat(factors) @ x)


def test_product_refuses_other_sizes_and_another_precision() -> None:
    with pytest.raises(ValueError, match=r"12 rows, got \(11,\)"):
        kfac_mat_prod([psd(3), psd(4)])(torch.ones(11, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="dtype|scalar type"):
        kfac_mat_prod([psd(3), psd(4)])(torch.ones(12))


@pytest.mark.parametrize("shift", [None, 0.3, [0.2, 0.7]])
@pytest.mark.parametrize("name", ["weight", "embedding", "grouped"])
def test_inverse_is_the_dense_inverse(name: str, shift: float | list[float] | None) -> None:
    factors = FACTORS[name]()
    shifts = shift if isinstance(shift, list) else [shift or 0.0] * 2
    shifted = []
    for factor, s in zip(factors, shifts, strict=True):
        eye = torch.ones_like(factor) if factor.ndim == 1 else torch.eye(factor.shape[-1], dtype=torch.float64)
        shifted.append(factor + s * eye)
    dense = kfacs_to_mat(shifted)
    x = torch.randn(len(dense), dtype=torch.float64)
    torch.testing.assert_close(kfacs_to_mat(inv_kfacs(factors, shift)), torch.linalg.inv(dense))
    torch.testing.assert_close(inv_kfac_mat_prod(factors, shift)(x), torch.linalg.solve(dense, x))


def test_inverse_refuses_a_wrong_number_of_shifts() -> None:
    with pytest.raises(ValueError, match="2 factor"):
        inv_kfacs([psd(3), psd(4)], [0.1])


def pi_damping(factors: list[Tensor], damping: float) -> list[Tensor]:
    return pi_dampings([factors], [mean_diagonals(factors)], [damping])


@pytest.mark.parametrize("name", ["weight", "embedding", "grouped"])
def test_pi_damping_splits_the_damping_by_the_mean_eigenvalues(name: str) -> None:
    damping, (b, a) = 0.1, FACTORS[name]()
    shift_b, shift_a = pi_damping([b, a], damping)
    together = pi_dampings(
        [[b], [b, a], [b]], [mean_diagonals(each) for each in ([b], [b, a], [b])], [2.0, damping, 3.0]
    )
    for shift, expected in zip(together, (torch.full_like(shift_b, 2.0), shift_b, shift_a, 3.0), strict=True):
        torch.testing.assert_close(shift, torch.as_tensor(expected).to(shift).expand_as(shift))
    torch.testing.assert_close(shift_b * shift_a, torch.full_like(shift_b * shift_a, damping))

    def mean_eigenvalue(factor: Tensor) -> Tensor:
        return factor.mean() if factor.ndim == 1 else torch.linalg.eigvalsh(factor).mean(-1)

    torch.testing.assert_close(shift_a / mean_eigenvalue(a), shift_b / mean_eigenvalue(b))


def test_pi_damping_of_dead_factors_is_finite() -> None:
    zero = torch.zeros(3, 3, dtype=torch.float64)
    for factors in ([zero, zero], [psd(3), zero], [zero, psd(3)]):
        shifts = pi_damping(factors, 0.1)
        assert all(shift.isfinite() and shift > 0 for shift in shifts)
        assert kfacs_to_mat(inv_kfacs(factors, shifts)).isfinite().all()


def test_pi_damping_of_tiny_curvature_is_that_of_large_one() -> None:
    b, a = psd(3).float(), psd(4).float()
    for factors in ([b * 1e-24, a], [b, a * 1e-24], [b * 1e-12, a * 1e-12]):
        ends = zip(pi_damping(factors, 1e-25), mean_diagonals(factors), strict=True)
        (relative_b, relative_a) = [shift / mean for shift, mean in ends]
        torch.testing.assert_close(relative_b, relative_a)


def test_a_single_factor_is_shifted_by_the_damping() -> None:
    torch.testing.assert_close(pi_damping([psd(4)], 0.1)[0], torch.tensor(0.1, dtype=torch.float64))


def test_many_factors_are_inverted_as_one_by_one() -> None:
    factors = [psd(3), psd(2, 4), psd(3), torch.rand(5, dtype=torch.float64), psd(4)]
    shifts = [0.1, torch.tensor([0.2, 0.3], dtype=torch.float64), 0.4, 0.5, 0.6]
    inverses, failures = damped_inverses(factors, shifts)
    assert failures == 0
    for factor, shift, inverse in zip(factors, shifts, inverses, strict=True):
        torch.testing.assert_close(inverse, damped_inverses([factor], [shift])[0][0])
        # each owns its memory: a checkpoint of one holds no other
        assert inverse.untyped_storage().nbytes() == inverse.numel() * inverse.element_size()


class TestLadder:
    """Matrices that defeat a Cholesky factorisation, one per rung."""

    def climb(self, matrix: Tensor, shift: float, caplog: pytest.LogCaptureFixture, stale: Tensor | None = None):
        with caplog.at_level(logging.INFO, logger="curvopt"):
            good = psd(*matrix.shape[:-1], dtype=matrix.dtype)
            inverses, failures = damped_inverses([good, matrix], [0.1, shift], [None, stale], ["good", "bad"])
        assert failures == 1 and len(caplog.records) == 1 and "bad" in caplog.text
        torch.testing.assert_close(inverses[0], damped_inverses([good], [0.1])[0][0])  # the neighbour is untouched
        return inverses[1], caplog.text

    def test_float64(self, caplog: pytest.LogCaptureFixture) -> None:
        root = torch.randint(-3, 4, (30, 3), dtype=torch.float64)
        matrix = (root @ root.mT).float()  # integers: positive semi-definite without rounding
        shift = 1e-6  # below what float32 resolves beside the largest eigenvalues
        inverse, log = self.climb(matrix, shift, caplog)
        assert "used float64" in log and "ten times" not in log
        eye = torch.eye(30, dtype=torch.float64)
        torch.testing.assert_close(inverse, torch.linalg.inv(matrix.double() + shift * eye).float())

    def test_ten_times_the_damping(self, caplog: pytest.LogCaptureFixture) -> None:
        values, vectors = torch.linalg.eigh(psd(5))
        values[0] = -0.2
        matrix = vectors @ torch.diag(values) @ vectors.mT
        inverse, log = self.climb(matrix, 0.1, caplog)
        assert "ten times" in log
        torch.testing.assert_close(inverse, torch.linalg.inv(matrix + torch.eye(5, dtype=torch.float64)))

    def test_clamped_eigenvalues(self, caplog: pytest.LogCaptureFixture) -> None:
        values, vectors = torch.linalg.eigh(psd(5))
        values[0] = -20.0
        inverse, log = self.climb(vectors @ torch.diag(values) @ vectors.mT, 0.1, caplog)
        assert "clamped" in log
        expected = vectors @ torch.diag((values.clamp(min=0) + 0.1).reciprocal()) @ vectors.mT
        torch.testing.assert_close(inverse, expected)

    def test_stale_inverse(self, caplog: pytest.LogCaptureFixture) -> None:
        matrix, stale = psd(4), psd(4)
        matrix[1, 2] = matrix[2, 1] = torch.nan
        inverse, log = self.climb(matrix, 0.1, caplog, stale)
        assert "stale" in log
        assert torch.equal(inverse, stale)

    def test_no_eigenvalues(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(matrix: Tensor) -> None:
            raise torch.linalg.LinAlgError("did not converge")

        monkeypatch.setattr("curvopt.kroneckers.eigh", fails)
        stale = psd(4)
        inverse, log = self.climb(psd(4) - 100 * torch.eye(4), 0.1, caplog, stale)
        assert "stale" in log
        assert torch.equal(inverse, stale)

    def test_diagonal(self, caplog: pytest.LogCaptureFixture) -> None:
        matrix = psd(4)
        matrix[1, 2] = matrix[2, 1] = torch.nan
        inverse, log = self.climb(matrix, 0.1, caplog)
        assert "used the diagonal" in log
        torch.testing.assert_close(inverse, torch.diag((matrix.diagonal() + 0.1).reciprocal()))

    @pytest.mark.parametrize("stale", [None, psd(4)], ids=["diagonal", "stale"])
    def test_a_shift_that_is_no_number(self, stale: Tensor | None, caplog: pytest.LogCaptureFixture) -> None:
        matrix = psd(4)
        inverse, _ = self.climb(matrix, torch.nan, caplog, stale)
        torch.testing.assert_close(inverse, torch.diag(matrix.diagonal().reciprocal()) if stale is None else stale)

    def test_an_infinite_shift(self, caplog: pytest.LogCaptureFixture) -> None:
        inverse, _ = self.climb(psd(4), torch.inf, caplog, psd(4))
        assert torch.equal(inverse, torch.zeros(4, 4, dtype=torch.float64))

    def test_one_group_of_many(self, caplog: pytest.LogCaptureFixture) -> None:
        matrices, stale = psd(3, 4), psd(3, 4)
        matrices[1, 0, 0] = torch.inf
        inverse, _ = self.climb(matrices, 0.1, caplog, stale)
        assert torch.equal(inverse[1], stale[1])
        torch.testing.assert_close(inverse[0], damped_inverses([matrices[0]], [0.1])[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 2])
def test_inverses_without_shift_are_pseudo_inverses(rank: int, dtype: torch.dtype) -> None:
    matrix = psd(6, rank=rank or None, dtype=dtype) * (rank > 0)
    tolerance = 1e3 * torch.finfo(dtype).eps
    expected = torch.linalg.pinv(matrix.double(), rtol=tolerance, hermitian=True)
    torch.testing.assert_close(inv_kfacs([matrix])[0].double(), expected, rtol=tolerance, atol=tolerance)
    diagonal = torch.tensor([0.0, 2.0, 0.5], dtype=dtype) * rank
    assert torch.equal(inv_kfacs([diagonal])[0], torch.linalg.pinv(torch.diag(diagonal)).diagonal())


@pytest.mark.parametrize("name", FACTORS)
def test_inverses_are_finite_whatever_the_shift(name: str) -> None:
    for shift in (torch.nan, torch.inf, -torch.inf, -1.0, 0.0):
        assert all(inverse.isfinite().all() for inverse in inv_kfacs(FACTORS[name](), shift))


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("rungs", [1, 2])
def test_eigendecompositions_that_fail_go_down_a_ladder(
    rungs: int, silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    roots = torch.randn(2, 4, 6)
    factors = [*(roots @ roots.mT), torch.rand(3)]
    decompose = torch.linalg.eigh

    def failing(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if matrices.dtype == torch.float64 and rungs == 1:
            return decompose(matrices)
        if not silent:
            raise torch.linalg.LinAlgError("did not converge")
        values, vectors = decompose(matrices)
        return values, vectors.index_fill(-1, torch.tensor(0), torch.nan)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with caplog.at_level("INFO", logger="curvopt"):
        bases, values = eigenbases(factors, ["a", "b", "c"])
    assert caplog.text.count("used the diagonal") == (2 if rungs == 2 else 0)
    assert caplog.text.count("in float64") == (0 if rungs == 2 else 1)
    for factor, basis, spectrum in zip(factors[:2], bases, values, strict=False):
        if rungs == 2:
            assert torch.equal(basis, torch.eye(4)) and torch.equal(spectrum, factor.diagonal())
        else:
            torch.testing.assert_close(basis @ torch.diag(spectrum) @ basis.T, factor, atol=1e-4, rtol=1e-4)
    assert torch.equal(bases[2], torch.ones(3)) and torch.equal(values[2], factors[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eigendecomposition_in_half_precision(dtype: torch.dtype):
    matrix = psd(5).to(dtype)
    values, vectors = eigh(matrix)
    assert values.dtype == vectors.dtype == dtype
    product = (vectors.double() * values.double()) @ vectors.double().T
    torch.testing.assert_close(
        product, matrix.double(), rtol=0, atol=float(4 * torch.finfo(dtype).eps * matrix.abs().max())
    )
