"""Sums in at least float32, in place where no graph is built.

>>> total = torch.zeros(2)
>>> add(total, torch.ones(2)) is total, widened(total.half()).dtype
(True, torch.float32)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def widened(value: Tensor) -> Tensor:
    """In at least float32, to be summed: in half precision, small terms vanish in a large sum."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``value.to(dtype)``, without the call if that would do nothing."""
    return value if value.dtype == dtype else value.to(dtype)


def add(total: Any, value: Any) -> Any:
    """``total + value``, in place where no graph is built."""
    if total is None:
        return value
    return total + value if total.requires_grad or value.requires_grad else total.add_(value)


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """``[V, N, ...]`` values summed over V, with weights ``[V, N]`` if there are any."""
    if weights is None:
        return values.sum(0) if len(values) > 1 else values[0]
    return torch.einsum("vn,vn...->n...", weights, values)


def _sum(values: Tensor) -> Tensor:
    """Sum over the first axis, laid out in memory as they are: where it is not, it takes ten times as long."""
    return torch.sum(values, 0, out=torch.empty_like(values[0]))
