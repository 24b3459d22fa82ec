"""The batch axis behind an operation that no rule knows, found by random vectors in every backward pass.

A random vector at the output is pulled back to the operands, and once more with each sample scaled by a factor of its
own. An operand whose entries come back scaled by the factors of their samples keeps them apart.

>>> x = torch.ones(2, 3, requires_grad=True)
>>> probe_operands(x.cumsum(1).grad_fn, 0, Layout(1, 2, 3), N=2)
[Layout(before=1, rows=2, after=3, labels=None, mixed=False)]
>>> probe_operands(x.cumsum(0).grad_fn, 0, Layout(1, 2, 3), N=2)  # row 0 goes into both rows
[None]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from curvopt.core.autograd_graph.node_vjp import call_node
from curvopt.core.autograd_graph.nodes import outputs_of
from curvopt.core.batch_axis.layout import UNKNOWN, UNUSED, AnyLayout, Layout, labelled


def probe_operands(node: Node, output_nr: int, layout: Layout, N: int) -> list[AnyLayout]:
    """The layouts of the operands of an operation, from that of one of its outputs.

    ``None`` for an operand that all samples share, or whose entries belong to several.
    """
    metadata = outputs_of(node)
    at = metadata[output_nr]
    if not (at.dtype.is_floating_point or at.dtype.is_complex):
        return [UNKNOWN] * len(node.next_functions)
    vector = torch.randn(
        tuple(at.shape), device="cpu", generator=torch.Generator().manual_seed(0), dtype=_wide(at.dtype)
    )
    labels = range(layout.rows) if layout.labels is None else layout.labels
    samples = torch.tensor(labels, dtype=torch.float64, device="cpu")
    factors = (1 + samples / N).view(1, -1, 1).expand(layout.before, -1, layout.after).reshape(tuple(at.shape))
    vectors = [v.to(at.device, at.dtype) for v in (vector, vector * factors)]
    try:
        with torch.no_grad():
            one, other = (
                call_node(node, [v if nr == output_nr else None for nr in range(len(metadata))]) for v in vectors
            )
    except (RuntimeError, TypeError, NotImplementedError):
        return [UNKNOWN] * len(node.next_functions)
    return [
        None if below is None or a is None or b is None else _layout_of(a, b, N, layout.mixed)
        for (below, _), a, b in zip(node.next_functions, one, other, strict=False)
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _layout_of(one: Tensor, other: Tensor, N: int, mixed: bool) -> Layout | None:
    """The axis whose entries have come back scaled by the factor of one sample each."""
    eps, wide = torch.finfo(one.dtype).eps, _wide(one.dtype)
    a, b = one.detach().to(wide), other.detach().to(wide)
    size = a.abs()
    if not size.numel() or not bool(torch.isfinite(size).all()):
        return None
    known = size > 1e4 * eps * size.max()
    found = ((b / torch.where(known, a, 1)).real - 1).mul(N).round()
    for axis in range(a.dim()):
        others = [i for i in range(a.dim()) if i != axis]
        low = torch.where(known, found, torch.inf).amin(others) if others else torch.where(known, found, torch.inf)
        labels = torch.where(torch.isinf(low), UNUSED, low).clamp(UNUSED, N - 1)
        shape = [-1 if i == axis else 1 for i in range(a.dim())]
        expected = a * (1 + labels.clamp(min=0) / N).view(shape)
        if bool(((b - expected).abs() <= eps**0.5 * size + 100 * eps * size.max()).all()):
            return labelled(one.shape, axis, [int(label) for label in labels.tolist()], N, mixed)
    return None
