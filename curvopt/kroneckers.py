"""Products, inverses and dense matrices of Kronecker factor lists.

A *factor list* stands for one symmetric positive semi-definite matrix over the ``P`` flattened entries of a parameter:

- ``[F1, F2, ...]``, each ``[d, d]``: ``F1 ⊗ F2 ⊗ ...`` (for a weight ``[O, I]``: ``[B, A]``, ``B ⊗ A`` row-major);
- a factor ``[d]`` is the diagonal of a diagonal matrix, a factor ``[]`` a multiple of the identity;
- factors ``[G, d, d]`` are ``G`` groups: the block-diagonal matrix of their ``G`` Kronecker products.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """Dense matrix ``[P, P]`` of a factor list; for tests and small layers."""
    dense = [torch.diag(factor) if factor.ndim == 1 else factor for factor in factors]
    groups = max((factor.shape[0] for factor in dense if factor.ndim == 3), default=1)
    blocks = []
    for group in range(groups):
        block = torch.ones(1, 1, dtype=dense[0].dtype, device=dense[0].device)
        for factor in dense:
            block = torch.kron(block, factor[group] if factor.ndim == 3 else factor)
        blocks.append(block)
    return torch.block_diag(*blocks)


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Product ``x -> (F1 ⊗ F2 ⊗ ...) x`` with ``x`` of shape ``[P]`` or ``[P, K]``; never forms the matrix."""
    groups = max((factor.shape[0] for factor in factors if factor.ndim == 3), default=1)
    dims = [factor.shape[-1] for factor in factors if factor.ndim > 0]

    def product(x: Tensor) -> Tensor:
        if dims and x.shape[0] != groups * prod(dims):
            raise ValueError(
                f"a product of {groups} group(s) of factors with sizes {dims} needs {groups * prod(dims)} rows, "
                f"got {tuple(x.shape)}"
            )
        left, right, y = 1, x.numel() // groups, x
        for factor in factors:
            if factor.ndim == 0:
                y = factor * y
                continue
            d = factor.shape[-1]
            right //= d
            if factor.ndim == 1:
                y = factor[:, None] * y.reshape(groups * left, d, right)
            elif right == 1:  # one large product instead of `left` products with a vector
                y = y.reshape(groups, left, d) @ factor.mT
            elif factor.ndim == 3:
                y = factor.unsqueeze(1) @ y.reshape(groups, left, d, right)
            else:
                y = factor @ y.reshape(groups * left, d, right)
            left *= d
        return y.reshape(x.shape)

    return product


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """``(F1 ⊗ F2 ⊗ ...) mat`` for ``mat`` of shape ``[P]`` or ``[P, K]``."""
    return kfac_mat_prod(factors)(mat)


def inv_kfac_mat_prod(
    factors: Sequence[Tensor], shift: float | Sequence[float | Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """Product with ``(F1 + shift1 I)⁻¹ ⊗ (F2 + shift2 I)⁻¹ ⊗ ...``."""
    return kfac_mat_prod(inv_kfacs(factors, shift))


def inv_kfacs(factors: Sequence[Tensor], shift: float | Sequence[float | Tensor] | None = None) -> list[Tensor]:
    """Inverses ``[(F1 + shift1 I)⁻¹, ...]`` of symmetric positive semi-definite factors, shapes as ``factors``.

    Args:
        factors: factor list.
        shift: one shift for all factors or one per factor; ``None`` is zero. Directions without curvature and shift
            are cut off at the precision of the dtype.
    """
    shifts = list(shift) if isinstance(shift, Sequence) else [shift or 0.0] * len(factors)
    if len(shifts) != len(factors):
        raise ValueError(f"{len(factors)} factor(s) need one shift or {len(factors)}, got {len(shifts)}")
    return damped_inverses(factors, shifts)[0]


def mean_diagonal(factor: Tensor) -> Tensor:
    """Mean of the diagonal of a factor: ``[]``, or ``[G]`` for factors ``[G, d, d]``."""
    return factor.mean() if factor.ndim < 2 else factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def pi_damping(factors: Sequence[Tensor], damping: float) -> list[Tensor]:
    """Shifts of a factor list that together stand for ``+ damping I`` (Martens & Grosse 2015, section 6.3).

    ``(B + √λ/π I) ⊗ (A + π √λ I)`` with ``π² = (tr A / dim A) / (tr B / dim B)`` damps both factors by the same
    multiple ``√(λ / (a b))`` of their mean eigenvalues ``a``, ``b``. A single factor is shifted by ``damping``.

    Returns:
        One shift per factor, ``[]`` or ``[G]``.
    """
    means = [mean_diagonal(factor) for factor in factors]
    if len(factors) == 1:
        return [torch.full_like(means[0], damping)]
    b, a = means
    tiny = torch.finfo(b.dtype).eps ** 2
    pi = ((a + tiny) / (b + tiny)).sqrt()  # both without curvature: π = 1
    return [damping**0.5 / pi, damping**0.5 * pi]


def damped_inverses(
    factors: Sequence[Tensor],
    shifts: Sequence[float | Tensor],
    stale: Sequence[Tensor | None] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[list[Tensor], int]:
    """Inverses of ``F + shift I`` for many factors at once, with one synchronisation of the device.

    Factors of equal shape are inverted together by Cholesky. A matrix for which this fails goes down a ladder:
    float64, ten times the shift, clamped eigenvalues, the stale inverse, the inverse of the diagonal. Each rung below
    the first is logged; nothing is raised.

    Args:
        factors: ``[d]``, ``[d, d]`` or ``[G, d, d]`` each, at least float32.
        shifts: one per factor, ``[]`` or ``[G]``.
        stale: former inverses, used when all else fails.
        names: how the log calls the factors.

    Returns:
        The inverses, shaped as the factors, and how many matrices needed the ladder.
    """
    stale = [None] * len(factors) if stale is None else stale
    names = [f"factor {i}" for i in range(len(factors))] if names is None else names
    inverses: list[Tensor] = [torch.empty(0)] * len(factors)

    alike: dict[tuple, list[int]] = defaultdict(list)
    for i, factor in enumerate(factors):
        if factor.ndim < 2:
            diagonal = factor + shifts[i]
            inverses[i] = diagonal.clamp(min=_floor(diagonal)).reciprocal()
        else:
            alike[(factor.shape, factor.dtype, factor.device)].append(i)
    if not alike:
        return inverses, 0

    accepted = []
    for members in alike.values():
        batch = torch.stack([factors[i] for i in members])
        shift = torch.stack([torch.as_tensor(shifts[i]).to(batch).expand(batch.shape[1:-2]) for i in members])
        batch.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
        inverse, ok = _cholesky_inverse(batch)
        accepted.append(ok.reshape(-1))
        for i, result in zip(members, inverse, strict=True):
            # a view would keep the whole batch alive, and be saved with it
            inverses[i] = result.clone(memory_format=torch.contiguous_format)

    device = accepted[0].device
    verdicts = iter(torch.cat([ok.to(device) for ok in accepted]).tolist())
    failures = 0
    for members in alike.values():
        for i in members:
            d = factors[i].shape[-1]
            matrices, targets = factors[i].reshape(-1, d, d), inverses[i].view(-1, d, d)
            former = stale[i]
            for group, (matrix, target) in enumerate(zip(matrices, targets, strict=True)):
                if not next(verdicts):
                    failures += 1
                    shift = torch.as_tensor(shifts[i]).expand(len(matrices))[group].item()
                    old = None if former is None else former.reshape(-1, d, d)[group]
                    target.copy_(_rescue(matrix, shift, old, names[i]))
    return inverses, failures


def _floor(values: Tensor) -> Tensor:
    """Smallest value that counts as curvature beside the largest of ``values``."""
    info = torch.finfo(values.dtype)
    return (values.abs().amax() * info.eps).clamp(min=info.tiny)


def _cholesky_inverse(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Inverses ``[..., d, d]`` and whether each can be trusted ``[...]``."""
    chol, info = torch.linalg.cholesky_ex(matrices)
    diagonal = chol.diagonal(dim1=-2, dim2=-1)
    # a pivot at rounding level passes the factorisation, yet its inverse is noise
    pivots = diagonal.square()
    ok = (info == 0) & (pivots.amin(-1) > torch.finfo(chol.dtype).eps * pivots.amax(-1))
    # cholesky_inverse raises on the zeros that an incomplete factorisation leaves
    diagonal.copy_(torch.where(ok.unsqueeze(-1), diagonal, 1))
    inverse = torch.cholesky_inverse(chol)
    # the diagonal of a positive definite matrix bounds all its entries
    return inverse, ok & inverse.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def _rescue(matrix: Tensor, shift: float, stale: Tensor | None, name: str) -> Tensor:
    """Inverse of ``matrix + shift I`` ``[d, d]`` by the lower rungs of the ladder."""
    rungs: Iterable[tuple[str, Callable[[], Tensor | None]]] = (
        ("float64", lambda: _float64_inverse(matrix, shift)),
        ("float64 with ten times the damping", lambda: _float64_inverse(matrix, 10 * shift)),
        ("clamped eigenvalues", lambda: _eigh_inverse(matrix, shift)),
        ("the stale inverse", lambda: stale),
    )
    for rung, attempt in rungs:
        inverse = attempt()
        if inverse is not None:
            logger.info("%s %s: Cholesky failed in %s, used %s", name, tuple(matrix.shape), matrix.dtype, rung)
            return inverse
    logger.warning("%s %s: no inverse and no stale one, used the diagonal", name, tuple(matrix.shape))
    diagonal = matrix.diagonal().nan_to_num().clamp(min=0) + shift
    return torch.diag(diagonal.clamp(min=_floor(diagonal)).reciprocal())


def _float64_inverse(matrix: Tensor, shift: float) -> Tensor | None:
    eye = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    inverse, ok = _cholesky_inverse(matrix.double() + shift * eye)
    return inverse if ok else None


def _eigh_inverse(matrix: Tensor, shift: float) -> Tensor | None:
    if not matrix.isfinite().all():
        return None
    try:
        values, vectors = torch.linalg.eigh(matrix.double())
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return None
    values = values.clamp(min=0) + shift
    # cut off at the precision that the factor was computed in, not at that of this decomposition
    floor = (values.amax() * torch.finfo(matrix.dtype).eps).clamp(min=torch.finfo(matrix.dtype).tiny)
    return (vectors / values.clamp(min=floor)) @ vectors.mT
