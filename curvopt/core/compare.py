"""Comparing numbers without waiting for the device that they are on."""

import torch
from torch import Tensor


@torch.no_grad()
def allclose(values: Tensor, expected: Tensor, rtol: float, atol: Tensor, equal_nan: bool = False) -> Tensor:
    """``torch.allclose`` with tensors for ``atol`` and the result, which whoever asks for it waits for."""
    error = (values - expected).abs()
    close = (values == expected) | (error.isfinite() & (error <= atol + rtol * expected.abs()))
    if equal_nan:
        close |= values.isnan() & expected.isnan()
    return close.all()
