"""Halves of symmetric matrices, and the dtypes in which ranks send curvature; `distributed_worker.py` has the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from curvopt.optim import KFACSGD
from curvopt.utils.compression import half, half_shape, whole


@pytest.mark.parametrize("shape", [(), (5,), (0, 0), (1, 1), (2, 2), (7, 7), (3, 6, 6), (2, 3, 5, 5)])
def test_halves(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    packed = half(matrix)
    assert list(packed.shape) == half_shape(shape)
    again = whole(packed, shape)
    if len(shape) < 2:
        assert torch.equal(again, matrix)
    else:
        assert packed.shape[-1] == shape[-1] * (shape[-1] + 1) // 2
        assert torch.equal(again, again.mT)
        assert torch.equal(again.triu(), matrix.triu())


@pytest.mark.parametrize(
    ("dtype", "error"),
    [("bfloat16", TypeError), (16, TypeError), (torch.int8, ValueError), (torch.float16, ValueError)],
)
def test_dtypes_that_are_refused(dtype: Any, error: type[Exception]) -> None:
    optimizer = KFACSGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(error, match=r"communication_dtype must be torch.bfloat16, .* or None, got"):
        optimizer.communication_dtype = dtype
    assert optimizer.communication_dtype is None
