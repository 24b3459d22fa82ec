"""Products, inverses and dense matrices of Kronecker factor lists.

A *factor list* stands for one symmetric positive semi-definite matrix over the ``P`` flattened entries of a parameter:

- ``[F1, F2, ...]``, each ``[d, d]``: ``F1 ⊗ F2 ⊗ ...`` (for a weight ``[O, I]``: ``[B, A]``, ``B ⊗ A`` row-major);
- a factor ``[d]`` is the diagonal of a diagonal matrix, a factor ``[]`` a multiple of the identity;
- factors ``[G, d, d]`` are ``G`` groups: the block-diagonal matrix of their ``G`` Kronecker products;
- a factor ``[G, K, b, b]`` is block-diagonal: K blocks for each group, and the last may reach beyond its size d.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import isnan, prod

import torch
from torch import Tensor

from curvopt.core.linear_algebra import LinAlgError, eigh, eigh_of_blocks, with_rest_apart, without_rest
from curvopt.core.products.base import in_pieces

logger = logging.getLogger(__name__)


def sizes_of(factors: Sequence[Tensor], shape: Sequence[int]) -> list[int]:
    """The sizes d of the factors of a parameter: the first axes belong to the first factor, all others to the second.

    These are axis 0, or more where the sizes of the factors require it, as for a parameter ``[G, I, O]``.
    """
    if len(factors) == 1:
        return [prod(shape)]
    groups = max((factor.shape[0] for factor in factors if factor.ndim > 2), default=1)
    sides = [(prod(shape[:k]) // groups, prod(shape[k:])) for k in range(1, len(shape))]
    fitting = (sizes for sizes in sides if all(map(_has_size, factors, sizes)))
    return list(next(fitting, sides[0]))


def _has_size(factor: Tensor, d: int) -> bool:
    """Whether a factor, which may be of blocks, is one of ``d`` rows."""
    if factor.ndim == 4:
        return (factor.shape[1] - 1) * factor.shape[2] < d <= factor.shape[1] * factor.shape[2]
    return factor.ndim == 0 or factor.shape[-1] == d


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """Dense matrix ``[P, P]`` of a factor list, for tests and small layers.

    Args:
        factors: factor list without blocks.
    """
    dense = [torch.diag(factor) if factor.ndim == 1 else factor for factor in factors]
    groups = max((factor.shape[0] for factor in dense if factor.ndim == 3), default=1)
    blocks = []
    for group in range(groups):
        block = torch.ones(1, 1, dtype=dense[0].dtype, device=dense[0].device)
        for factor in dense:
            # torch.kron cannot take the column-major eigenvectors that torch.linalg.eigh returns
            block = torch.kron(block, (factor[group] if factor.ndim == 3 else factor).contiguous())
        blocks.append(block)
    return torch.block_diag(*blocks)


def kfac_mat_prod(factors: Sequence[Tensor], sizes: Sequence[int] | None = None) -> Callable[[Tensor], Tensor]:
    """Product ``x -> (F1 ⊗ F2 ⊗ ...) x`` with ``x`` of shape ``[P]`` or ``[P, K]``; never forms the matrix.

    Factors without groups may have more rows than columns, or fewer; P counts the columns.

    Args:
        factors: factor list.
        sizes: the factors' sizes d, if one has blocks (see `sizes_of`).

    Raises:
        ValueError: from the product, for another number of rows.
    """
    groups = max((factor.shape[0] for factor in factors if factor.ndim > 2), default=1)
    matrices = [factor for factor in factors if factor.ndim > 0]
    sizes = [factor.shape[-1] for factor in matrices] if sizes is None else sizes

    def product(x: Tensor) -> Tensor:
        if matrices and x.shape[0] != groups * prod(sizes):
            raise ValueError(
                f"a product of {groups} group(s) of factors with sizes {list(sizes)} needs {groups * prod(sizes)} "
                f"rows, got {tuple(x.shape)}"
            )
        left, right, y = 1, x.numel() // groups, x
        for factor in factors:
            if factor.ndim == 0:
                y = factor * y
        for factor, d in zip(matrices, sizes, strict=True):
            right //= d
            if factor.ndim == 1:
                y = factor[:, None] * y.reshape(groups * left, d, right)
            elif factor.ndim == 4 and right == 1:
                pieces = in_pieces(y.reshape(groups, left, d), factor.shape[-1]).transpose(1, 2)
                y = (pieces @ factor.mT).transpose(1, 2).flatten(2)[:, :, :d]
            elif factor.ndim == 4:
                pieces = in_pieces(y.reshape(groups, left, d, right), factor.shape[-1], -2)
                y = (factor.unsqueeze(1) @ pieces).flatten(2, 3)[:, :, :d]
            elif right == 1:  # one large product instead of `left` products with a vector
                y = y.reshape(groups, left, d) @ factor.mT
            elif factor.ndim == 3:
                y = factor.unsqueeze(1) @ y.reshape(groups, left, d, right)
            else:
                y = factor @ y.reshape(groups * left, d, right)
            left *= factor.shape[0] if factor.ndim == 2 else d
        return y.reshape(groups * left if matrices else len(x), *x.shape[1:])

    return product


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """``(F1 ⊗ F2 ⊗ ...) mat``.

    Args:
        factors: factor list.
        mat: what is multiplied, ``[P]`` or ``[P, K]``.
    """
    return kfac_mat_prod(factors)(mat)


def inv_kfac_mat_prod(
    factors: Sequence[Tensor], shift: float | Sequence[float | Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """Product with ``(F1 + shift1 I)⁻¹ ⊗ (F2 + shift2 I)⁻¹ ⊗ ...``, a function of ``[P]`` or ``[P, K]``.

    Args:
        factors: factor list.
        shift: as for `inv_kfacs`.
    """
    return kfac_mat_prod(inv_kfacs(factors, shift))


def inv_kfacs(factors: Sequence[Tensor], shift: float | Sequence[float | Tensor] | None = None) -> list[Tensor]:
    """Inverses ``[(F1 + shift1 I)⁻¹, ...]`` of symmetric positive semi-definite factors, shapes as ``factors``.

    Args:
        factors: factor list.
        shift: one shift for all factors or one per factor; ``None`` is zero, which leaves out directions
            without curvature (a pseudo-inverse, by the precision of the dtype).
    """
    shifts = list(shift) if isinstance(shift, Sequence) else [shift or 0.0] * len(factors)
    if len(shifts) != len(factors):
        raise ValueError(f"{len(factors)} factor(s) need one shift or {len(factors)}, got {len(shifts)}")
    return damped_inverses(factors, shifts)[0]


def mean_diagonals(factors: Sequence[Tensor]) -> list[Tensor]:
    """Means of the diagonals of factors (padding of blocks counts, it is short): ``[]``, or ``[G]`` with groups."""
    means: list[Tensor] = [torch.empty(0)] * len(factors)
    for members in alike(factors):
        batch = torch.stack([factors[i] for i in members])
        diagonals = batch.diagonal(dim1=-2, dim2=-1) if batch.ndim > 2 else batch
        of_members = diagonals.reshape(*batch.shape[: 2 if batch.ndim > 3 else 1], -1).mean(-1)
        for i, mean in zip(members, of_members.unbind(), strict=True):
            means[i] = mean
    return means


def pi_dampings(
    factors: Sequence[Sequence[Tensor]], means: Sequence[Sequence[Tensor]], dampings: Sequence[float | Tensor]
) -> list[Tensor]:
    """Shifts of factor lists that together stand for ``+ damping I`` (Martens & Grosse 2015, section 6.3).

    ``(B + √λ/π I) ⊗ (A + π √λ I)`` with ``π² = (tr A / dim A) / (tr B / dim B)`` damps both factors by one
    multiple ``√(λ / (a b))`` of their mean eigenvalues ``a``, ``b``. A single factor is shifted by its damping.

    Args:
        factors: factor lists.
        means: `mean_diagonals` of their factors.
        dampings: one for each list, ``[]``.

    Returns:
        One shift for each factor of the first list, then of the second and so on: ``[]``, ``[G]``, or ``[G, 1]`` for
        blocks.
    """
    if not factors:
        return []
    like = means[0][0]
    sizes = [max(mean.numel() for mean in each) for each in means]  # of groups
    # of all lists at once; one of a single factor has π = 1
    a, b = (torch.cat([each[i].to(like).expand(n) for each, n in zip(means, sizes, strict=True)]) for i in (-1, 0))
    damping = torch.cat(
        [
            value.to(like).expand(n) if isinstance(value, Tensor) else like.new_full((n,), value)
            for value, n in zip(dampings, sizes, strict=True)
        ]
    )
    tiny = torch.finfo(like.dtype).tiny
    pi, root = (a + tiny).sqrt() / (b + tiny).sqrt(), damping.sqrt()  # both without curvature: π = 1
    shifts: list[Tensor] = []
    for each, single, *pair in zip(factors, *(v.split(sizes) for v in (damping, root / pi, root * pi)), strict=True):
        for factor, shift in zip(each, [single] if len(each) == 1 else pair, strict=True):
            shifts.append(shift.view((-1, 1) if factor.ndim == 4 else (-1,) if factor.ndim == 3 else ()))
    return shifts


def damped_inverses(
    factors: Sequence[Tensor],
    shifts: Sequence[float | Tensor],
    stale: Sequence[Tensor | None] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[list[Tensor], int]:
    """Inverses of ``F + shift I`` for many factors at once, with one synchronisation of the device.

    Factors of equal shape are inverted together by Cholesky. A matrix for which this fails goes down a ladder:
    float64, ten times the shift, clamped eigenvalues, the stale inverse, the inverse of the diagonal. Each rung below
    the first is logged; nothing is raised. For an infinite shift the inverse is zero. A shift that is nan gives the
    stale inverse, or counts as zero in the inverse of the diagonal.

    Args:
        factors: ``[d]``, ``[d, d]``, ``[G, d, d]`` or ``[G, K, b, b]`` each, at least float32.
        shifts: one per factor, ``[]``, ``[G]`` or ``[G, 1]``.
        stale: former inverses, used when all else fails.
        names: of the factors, for the log.

    Returns:
        The inverses, shaped as the factors, and how many matrices needed the ladder.
    """
    stale = [None] * len(factors) if stale is None else stale
    names = [f"factor {i}" for i in range(len(factors))] if names is None else names
    inverses: list[Tensor] = [torch.empty(0)] * len(factors)
    shifts = [
        shift.to(factor) if isinstance(shift, Tensor) else factor.new_full((), shift)
        for factor, shift in zip(factors, shifts, strict=True)
    ]

    for i, factor in enumerate(factors):
        if factor.ndim < 2:
            inverses[i] = _diagonal_inverse(factor, shifts[i])
    stacks = alike(factors, 2)
    if not stacks:
        return inverses, 0

    accepted = []
    for members in stacks:
        batch = torch.stack([factors[i] for i in members])
        shift = torch.stack([shifts[i].expand(batch.shape[1:-2]) for i in members])
        batch.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
        inverse, ok = _cholesky_inverse(batch)
        accepted.append(ok.reshape(-1))
        for i, result in zip(members, inverse, strict=True):
            # a view would keep the whole batch alive, and be saved with it
            inverses[i] = result.clone(memory_format=torch.contiguous_format)

    device = accepted[0].device
    results = torch.cat([ok.to(device) for ok in accepted]).tolist()
    if all(results):
        return inverses, 0
    verdicts, failures = iter(results), 0
    for members in stacks:
        for i in members:
            d = factors[i].shape[-1]
            matrices, targets = factors[i].reshape(-1, d, d), inverses[i].view(-1, d, d)
            former = stale[i]
            for group, (matrix, target) in enumerate(zip(matrices, targets, strict=True)):
                if not next(verdicts):
                    failures += 1
                    shift = shifts[i].expand(factors[i].shape[:-2]).reshape(-1)[group].item()
                    old = None if former is None else former.reshape(-1, d, d)[group]
                    target.copy_(_rescue(matrix, shift, old, names[i]))
    return inverses, failures


def largest_condition(factors: Sequence[Tensor], shifts: Sequence[Tensor], inverses: Sequence[Tensor]) -> Tensor:
    """Largest condition number, in the 1-norm, of the matrices ``F + shift I``; arguments as of `damped_inverses`."""
    found = [
        (factor + shift).abs().max() * inverse.abs().max()
        for factor, shift, inverse in zip(factors, shifts, inverses, strict=True)
        if factor.ndim < 2
    ]
    for members in alike(factors, 2):
        matrices, added, inverted = (torch.stack([each[i] for i in members]) for each in (factors, shifts, inverses))
        # the shift moves the diagonal, which is positive, and so the column sums
        sums = matrices.abs().sum(-2) + added.unsqueeze(-1)
        found.append((sums.amax(-1) * inverted.abs().sum(-2).amax(-1)).max())
    return torch.stack([each.to(found[0].device) for each in found]).max()


def eigenbases(factors: Sequence[Tensor], names: Sequence[str] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Eigenvectors (in columns, shaped as the factors) and eigenvalues ``[..., d]``, not negative, of many factors.

    Factors of equal shape are decomposed together. The basis of a diagonal factor ``[d]`` is the identity, ``[d]``
    ones. Where the decomposition fails in the factor's dtype and in float64, the identity and the diagonal take its
    place; that is logged, nothing is raised.
    """
    names = [f"factor {i}" for i in range(len(factors))] if names is None else names
    bases = [torch.ones_like(factor) for factor in factors]
    values = [factor.clamp(min=0) for factor in factors]
    for members in alike(factors, 2):
        batch = torch.stack([factors[i] for i in members])
        try:
            spectra, vectors = eigh_of_blocks(batch)
        except LinAlgError:
            rescued = [_eigh_or_diagonal(factors[i], names[i]) for i in members]
            spectra, vectors = (torch.stack(part) for part in zip(*rescued, strict=True))
        for i, spectrum, basis in zip(members, spectra, vectors, strict=True):
            bases[i], values[i] = basis.clone(), spectrum.clamp(min=0)  # a view would keep the whole batch alive
    return bases, values


def renewed_bases(factors: Sequence[Tensor], bases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """`eigenbases`, nearly, of factors whose eigenbases were ``bases`` some steps ago: ``qr(F U)``.

    A step of orthogonal iteration is what SOAP takes (Vyas et al. 2024). A GPU computes eigendecompositions one after
    the other, which takes twenty times as long.
    """
    bases, values = list(bases), [factor.clamp(min=0) for factor in factors]
    for members in alike(factors, 2):
        batch, rest = with_rest_apart(torch.stack([factors[i] for i in members]))
        scaled = batch / batch.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(batch.dtype).tiny)
        old = torch.stack([bases[i] for i in members])
        # from the largest eigenvalue to the smallest, as columns only see those before
        order = (old * (scaled @ old)).sum(-2, keepdim=True).argsort(-1, descending=True)
        new = torch.linalg.qr(scaled @ old.gather(-1, order.expand_as(old))).Q.flip(-1)
        spectra = without_rest((new * (batch @ new)).sum(-2), rest)
        for i, spectrum, basis in zip(members, spectra, new, strict=True):
            bases[i], values[i] = basis.clone(), spectrum.clamp(min=0)
    return bases, values


def alike(factors: Sequence[Tensor], dims: int = 0) -> list[list[int]]:
    """Indices of the factors that have so many axes, those of equal shape, type and device together."""
    found: dict[tuple, list[int]] = defaultdict(list)
    for i, factor in enumerate(factors):
        if factor.ndim >= dims:
            found[(factor.shape, factor.dtype, factor.device)].append(i)
    return list(found.values())


def kron_diagonal(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Diagonal ``[P]`` of a factor list whose factors are diagonal.

    Args:
        values: their diagonals, ``[d]``, ``[G, d]`` or ``[G, K, b]`` (see `eigenbases`).
        sizes: the sizes d.
    """
    result = values[0].new_ones(1, 1)
    for value, d in zip(values, sizes, strict=True):
        value = value.reshape(-1, value.shape[-1] * (value.shape[-2] if value.ndim == 3 else 1))[:, :d]
        result = (result.unsqueeze(2) * value.unsqueeze(1)).flatten(1)
    return result.flatten()


def _eigh_or_diagonal(factor: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of one factor; if it has none, of its diagonal."""
    try:
        spectrum, basis = (part[0] for part in eigh_of_blocks(factor.unsqueeze(0)))
    except LinAlgError:
        logger.warning("%s %s: no eigendecomposition, used the diagonal", name, tuple(factor.shape))
        spectrum = factor.diagonal(dim1=-2, dim2=-1)
        basis = torch.eye(factor.shape[-1]).to(factor).expand_as(factor)
    return spectrum, basis


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
        # without a shift it would invert the rounding errors of the matrix
        ("float64", lambda: _float64_inverse(matrix, shift) if shift > 0 else None),
        ("float64 with ten times the damping", lambda: _float64_inverse(matrix, 10 * shift) if shift > 0 else None),
        ("clamped eigenvalues", lambda: _eigh_inverse(matrix, shift)),
        ("the stale inverse", lambda: stale),
    )
    for rung, attempt in rungs:
        inverse = attempt()
        if inverse is not None:
            logger.info("%s %s: Cholesky failed in %s, used %s", name, tuple(matrix.shape), matrix.dtype, rung)
            return inverse
    logger.warning("%s %s: no inverse and no stale one, used the diagonal", name, tuple(matrix.shape))
    return torch.diag(_diagonal_inverse(matrix.diagonal().nan_to_num().clamp(min=0), torch.tensor(shift)))


def _diagonal_inverse(diagonal: Tensor, shift: Tensor) -> Tensor:
    """Inverse of a diagonal matrix of finite entries, finite whatever the shift is; see `_reciprocal`."""
    shifted = diagonal + shift.nan_to_num()
    return _reciprocal(shifted, _floor(shifted), shift)


def _reciprocal(values: Tensor, floor: Tensor, shift: Tensor) -> Tensor:
    """Reciprocals of values that are cut off at a floor; without a shift, zero below it."""
    return torch.where(values > floor, values, torch.where(shift > 0, floor, torch.inf)).reciprocal()


def _float64_inverse(matrix: Tensor, shift: float) -> Tensor | None:
    eye = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    inverse, ok = _cholesky_inverse(matrix.double() + shift * eye)
    return inverse if ok else None


def _eigh_inverse(matrix: Tensor, shift: float) -> Tensor | None:
    if isnan(shift) or not matrix.isfinite().all():
        return None
    try:
        values, vectors = eigh(matrix.double())
    except LinAlgError:
        return None
    values = values.clamp(min=0) + shift
    # cut off at the precision that the factor was computed in, not at that of this decomposition
    floor = (values.amax() * torch.finfo(matrix.dtype).eps).clamp(min=torch.finfo(matrix.dtype).tiny)
    return (vectors * _reciprocal(values, floor, torch.tensor(shift).to(values))) @ vectors.mT
