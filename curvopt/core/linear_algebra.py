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


@torch.no_grad()
def allclose(values: Tensor, expected: Tensor, rtol: float, atol: Tensor) -> Tensor:
    """``torch.allclose`` with tensors for ``atol`` and the result: only to read that waits for the device."""
    error = (values - expected).abs()
    return ((values == expected) | (error.isfinite() & (error <= atol + rtol * expected.abs()))).all()
