"""The batch axis behind an operation that no rule knows, found by random vectors in every backward pass.

A random vector at the output is pulled back to the operands, and again with each sample scaled by another power of
two, which rounds nothing. An operand whose entries come back scaled by the factors of their samples keeps them apart.

>>> x = torch.ones(2, 3, requires_grad=True)
>>> probe_operands(x.cumsum(1).grad_fn, 0, Layout(1, 2, 3), N=2)
[Layout(before=1, rows=2, after=3, labels=None, mixed=False)]
>>> probe_operands(x.cumsum(0).grad_fn, 0, Layout(1, 2, 3), N=2)  # row 0 goes into both rows
[None]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from curvopt.core.nodes import outputs_of
from curvopt.core.samples.layout import UNKNOWN, UNUSED, AnyLayout, Layout, labelled
from curvopt.core.vjp import call_node


def probe_operands(node: Node, output_nr: int, layout: Layout, N: int) -> list[AnyLayout]:
    """The layouts of the operands of an operation, from that of one of its outputs.

    ``None`` for an operand that all samples share, or whose entries belong to several.
    """
    metadata = outputs_of(node)
    at = metadata[output_nr]
    if not (at.dtype.is_floating_point or at.dtype.is_complex):
        return [UNKNOWN] * len(node.next_functions)
    labels = range(layout.rows) if layout.labels is None else layout.labels
    samples = torch.tensor(labels, device="cpu").view(1, -1, 1)
    shape = tuple(at.shape)
    vector = torch.randn(shape, device="cpu", generator=torch.Generator().manual_seed(0), dtype=_wide(at.dtype))
    vector = vector.view(layout.before, -1, layout.after)
    eps = torch.finfo(at.dtype).eps
    vectors = [vector, *(vector * scale for scale in _scales(samples, _base(eps), N))]
    try:
        with torch.no_grad():
            given = [v.view(shape).to(at.device, at.dtype) for v in vectors]
            pulled = [call_node(node, [v if nr == output_nr else None for nr in range(len(metadata))]) for v in given]
    except (RuntimeError, TypeError, NotImplementedError):
        return [UNKNOWN] * len(node.next_functions)
    return [
        None
        if below is None or any(v is None or v.is_sparse for v in values)
        else _layout_of(values, eps, N, layout.mixed)
        for (below, _), *values in zip(node.next_functions, *pulled, strict=False)
    ]


#: Between the roundings of numbers of 16 and of 32 bits.
_HALF = 1e-5


def _base(eps: float) -> int:
    """Powers of two below the base-th do not leave the range of numbers: float16 ends at 65504."""
    return 8 if eps > _HALF else 64


def _scales(samples: Tensor, base: int, N: int) -> list[Tensor]:
    """For each digit of the samples' numbers, two to its power.

    Rows that are not used count as one more sample, so that an operand which mixes them with rows in use is found.
    """
    samples = torch.where(samples == UNUSED, N, samples)
    scales = [2.0 ** (samples % base)]
    while N >= base:
        samples, N = samples // base, N // base
        scales.append(2.0 ** (samples % base))
    return scales


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _layout_of(values: Sequence[Tensor], eps: float, N: int, mixed: bool) -> Layout | None:
    """The axis whose entries have come back scaled by the factors of one sample each.

    Args:
        values: without factors, and with the factors of each digit.
        eps: rounding at the output.
        N: number of samples.
        mixed: whether a batch norm has mixed them.
    """
    base, eps = _base(eps), max(eps, torch.finfo(values[0].dtype).eps)
    a, *scaled = [v.detach().to(_wide(v.dtype)) for v in values]
    size = a.abs()
    if not size.numel() or not bool(torch.isfinite(size).all()):
        return None
    relative, noise = (4 * eps, 1e-4) if eps > _HALF else (eps**0.5, 100 * eps)
    known = size > 10 * noise * size.max()
    digits = [(b / torch.where(known, a, 1)).abs().log2().round() for b in scaled]
    found = sum(digit * base**i for i, digit in enumerate(digits))
    for axis in range(a.dim()):
        across = [i for i in range(a.dim()) if i != axis]
        low = torch.where(known, found, torch.inf)
        low = low.amin(across) if across else low
        labels = torch.where((low >= 0) & (low < N), low, UNUSED)
        factors = _scales(labels.clamp(min=0).view([-1 if i == axis else 1 for i in range(a.dim())]), base, N)
        kept = [(b / f - a).abs() <= relative * size + noise * size.max() for b, f in zip(scaled, factors, strict=True)]
        if all(bool(entries.all()) for entries in kept):
            return labelled(values[0].shape, axis, [int(label) for label in labels.tolist()], N, mixed)
    return None
