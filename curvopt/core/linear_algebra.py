"""Eigendecompositions that work where LAPACK's fail, and comparisons that do not wait for the device.

>>> values, vectors = eigh(torch.diag(torch.tensor([1.0, 4.0])).half())  # LAPACK has none in half precision
>>> values
tensor([1., 4.], dtype=torch.float16)
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh``, in float64 where it fails in the dtype of the matrices, and in float32 for half precision.

    Of matrices of low rank, as curvature often has, LAPACK's divide and conquer sometimes makes nan without an error.

    Raises:
        LinAlgError: it failed in float64, too, as of matrices that are not finite.
    """
    natural = torch.promote_types(matrices.dtype, torch.float32)
    for dtype in dict.fromkeys((natural, torch.float64)):
        try:
            values, vectors = torch.linalg.eigh(matrices.to(dtype))
        except LinAlgError:
            continue
        if bool(values.isfinite().all() & vectors.isfinite().all()):
            if dtype != natural:
                logger.info("eigendecomposition of matrices %s in float64", tuple(matrices.shape))
            return values.to(matrices.dtype), vectors.to(matrices.dtype)
    raise LinAlgError(f"no eigendecomposition of matrices {list(matrices.shape)} in float64")


def eigh_of_blocks(batch: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh` of matrices, or of blocks ``[..., G, K, b, b]`` whose last may reach over the matrix (with zeros)."""
    batch, rest = with_rest_apart(batch)
    spectra, vectors = eigh(batch)
    return without_rest(spectra, rest), vectors


def with_rest_apart(batch: Tensor) -> tuple[Tensor, Tensor | None]:
    """Blocks whose rows beyond the matrix have the largest eigenvalues, and which rows these are, if there may be any.

    So they stay at the end, and no eigenvector mixes them with other rows.
    """
    if batch.ndim < 5:
        return batch, None
    rest = (batch == 0).all(-1)
    largest = batch.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) + 1
    apart = largest * torch.arange(1, batch.shape[-1] + 1).to(batch)
    return batch + torch.diag_embed(torch.where(rest, apart, 0.0)), rest


def without_rest(spectra: Tensor, rest: Tensor | None) -> Tensor:
    """Eigenvalues of `with_rest_apart` with zeros for the rows beyond."""
    return spectra if rest is None else torch.where(rest.sort(dim=-1).values, 0.0, spectra)


@torch.no_grad()
def allclose(values: Tensor, expected: Tensor, rtol: float, atol: Tensor) -> Tensor:
    """``torch.allclose`` with tensors for ``atol`` and the result: only to read that waits for the device."""
    error = (values - expected).abs()
    return ((values == expected) | (error.isfinite() & (error <= atol + rtol * expected.abs()))).all()
