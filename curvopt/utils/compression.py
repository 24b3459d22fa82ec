"""Curvature as ranks send it where an optimizer has a ``communication_dtype``: half of each matrix, in fewer bits.

Symmetric matrices ``[..., d, d]`` are folded, for copies of blocks cost less than indexing. With ``h = ceil(d/2)``::

    [ P  Q ]        the upper triangle of P and, below it, the lower one of S: one matrix [d - h + 1, h]
    [ Qᵀ S ]        and Q, of shape [h, d - h]; together d (d + 1) / 2 numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Squares of gradients are often smaller than the numbers of float16 and of the 8-bit types.
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def check_communication_dtype(dtype: Any) -> None:
    """Refuse anything but ``None`` and a floating-point type with the range of float32.

    Raises:
        TypeError: it is no dtype.
        ValueError: it is another dtype.
    """
    if dtype is None or dtype in DTYPES:
        return
    names = "torch.bfloat16, torch.float32, torch.float64 or None"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"communication_dtype must be {names}, got {dtype!r} ({type(dtype).__name__})")
    small = " Squares of gradients leave the range of smaller types." if dtype.is_floating_point else ""
    raise ValueError(f"communication_dtype must be {names}, got {dtype}.{small}")


def sent_dtype(own: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """The dtype in which numbers are sent: the one that is chosen, if it has fewer bits than their own."""
    return own if chosen is None or chosen.itemsize >= own.itemsize else chosen


def half_shape(shape: Sequence[int]) -> list[int]:
    """Shape of `half` of a tensor."""
    return list(shape) if len(shape) < 2 else [*shape[:-2], shape[-1] * (shape[-1] + 1) // 2]


def half(matrix: Tensor) -> Tensor:
    """The upper triangles ``[..., d (d + 1) / 2]`` of symmetric matrices ``[..., d, d]``; vectors as they are."""
    if matrix.ndim < 2:
        return matrix
    h = (matrix.shape[-1] + 1) // 2
    s = matrix.shape[-1] - h
    folded = matrix.new_zeros(*matrix.shape[:-2], s + 1, h)
    folded[..., :h, :] = matrix[..., :h, :h].triu()
    folded[..., 1:, :s] += matrix[..., h:, h:].mT.tril()
    return torch.cat([folded.flatten(-2), matrix[..., :h, h:].flatten(-2)], -1)


def whole(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The symmetric matrices of some shape, from their `half`."""
    if len(shape) < 2:
        return packed
    h = (shape[-1] + 1) // 2
    s = shape[-1] - h
    folded = packed[..., : (s + 1) * h].unflatten(-1, (s + 1, h))
    upper, lower = folded[..., :h, :].triu(), folded[..., 1:, :s].tril()
    right = packed[..., (s + 1) * h :].reshape(*shape[:-2], h, s)
    matrix = packed.new_empty(*shape)
    matrix[..., :h, :h] = upper + upper.triu(1).mT
    matrix[..., h:, h:] = lower + lower.tril(-1).mT
    matrix[..., :h, h:], matrix[..., h:, :h] = right, right.mT
    return matrix
