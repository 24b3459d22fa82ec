"""Second moments of the sides of products: the Kronecker factors.

>>> rows = torch.ones(8, 1, 5, 3)  # [N, G, S, F]
>>> _second_moment(rows).shape, _second_moment(rows, limit=2).shape  # [F, F], or blocks [G, K, b, b]
(torch.Size([3, 3]), torch.Size([1, 2, 2, 2]))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from curvopt.core.products import chunk_sizes as costs
from curvopt.core.products.sums import cast, widened


def _by_feature(values: Tensor) -> Tensor:
    """``[..., N, G, S, F]`` as ``[..., G, F, N S]``; what needs to be copied is copied by rows."""
    return values.movedim((-4, -2), (-2, -1)).flatten(-2)


def _second_moment(rows: Tensor, limit: int | None = None, scale: float = 1.0) -> Tensor:
    """``scale * sum_{n,s} x x^T`` of ``[N, G, S, F]``: ``[F, F]``, or ``[G, F, F]`` when there are groups.

    If F is more than ``limit``, blocks on its diagonal, ``[G, K, b, b]``, the last padded with zeros.
    """
    N, G, S, F = rows.shape
    limit = limit if limit is not None and F > limit else None
    if limit is None and not torch.is_grad_enabled():
        return _moment_of_parts(_in_parts(rows), N * S, scale)
    flat = _by_feature(rows)
    flat = flat if scale == 1 else flat * scale**0.5  # before the product: half precision ends at 65504
    if limit is not None:
        blocks = in_blocks(flat.mT, limit).transpose(1, 2)
        return blocks.mT @ blocks
    return _ungrouped(flat @ flat.mT)


def _ungrouped(moments: Tensor) -> Tensor:
    """The only one of ``[G, F, F]``, if there are no groups."""
    return moments[0] if len(moments) == 1 else moments


def _are_sorted(rows: Tensor) -> bool:
    """Whether rows ``[N, G, S, F]`` of all samples are stored by features, or each feature's by rows."""
    return rows.stride(3) == 1 or rows.stride(0) == rows.shape[2] * rows.stride(2)


def _in_parts(rows: Tensor) -> Sequence[Tensor]:
    """Some samples of ``[N, G, S, F]`` at a time, which will be sorted by features; all if they are sorted."""
    _, G, S, F = rows.shape
    return [rows] if _are_sorted(rows) else rows.split(costs.rows_at_once(S, G * F, rows.device.type))


def _moment_of_parts(parts: Iterable[Tensor], R: int, scale: float) -> Tensor:
    """The second moment of parts of the samples, which have R positions in all."""
    moments, dtype, F, block = None, None, 0, 0
    for part in parts:
        x = _by_feature(part)
        if moments is None:
            dtype, (G, F, _) = x.dtype, x.shape
            block = min(costs.SYMMETRIC_BLOCK, -(-F // 2)) if costs.by_blocks(F, R, x.device.type) else F
            moments = widened(x.new_zeros(G, F, F))
        for i in range(0, F, block):  # what is below the diagonal follows
            _add_product(moments[:, i : i + block, i:], x[:, i : i + block], x[:, i:].mT, scale)
    assert moments is not None
    for i in range(0, F - block, block):
        j = i + block
        moments[:, j:, i:j] = moments[:, i:j, j:].mT
    return cast(_ungrouped(moments), dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """``total += scale left @ right`` of ``[G, M, R]`` and ``[G, R, K]``; the total may be in higher precision."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=scale)
    else:
        total.add_(torch.baddbmm(left.new_zeros(1), left, right, beta=0, alpha=scale))


def in_blocks(values: Tensor, limit: int) -> Tensor:
    """The last axis ``F`` cut into the fewest pieces of at most ``limit``, ``[..., K, b]``, padded with zeros."""
    return in_pieces(values, costs.even_share(values.shape[-1], limit))


def in_pieces(values: Tensor, size: int, axis: int = -1) -> Tensor:
    """An axis (-1, -2, ...) cut into pieces ``[..., K, size, ...]``, the last padded with zeros."""
    missing = -values.shape[axis] % size
    if missing:
        values = torch.nn.functional.pad(values, (0, 0) * (-1 - axis) + (0, missing))
    return values.unflatten(axis, (-1, size))


def _in_basis(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows ``[..., G, S, F]`` in the basis of a factor: ``[F]`` (identity), ``[F, F]``, with groups or blocks.

    Factors of parameters in half precision may be kept in float32: then so are the results.
    """
    rows = rows.to(torch.promote_types(rows.dtype, basis.dtype))
    if basis.dim() == 1:
        return rows
    if basis.dim() == 2:
        return rows @ basis
    # broadcasting would copy the matrices for each row
    if basis.dim() == 3:
        return torch.einsum("...gsb,gbc->...gsc", rows, basis)
    blocks = in_blocks(rows, basis.shape[-1])  # [..., G, S, K, b]
    return torch.einsum("...gskb,gkbc->...gskc", blocks, basis).flatten(-2)[..., : rows.shape[-1]]


def _are_apart(vectors: Tensor) -> bool:
    """Whether no position of ``[V, N, S, ...]`` is reached by more than one sample."""
    reached = (vectors != 0).flatten(3).any(3).any(0)
    return not bool((reached.sum(0) > 1).any())
