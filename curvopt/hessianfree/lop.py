"""Transposed Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.uses import unheard


def L_op(  # noqa: N802 - the name in the literature
    ys: Tensor | Sequence[Tensor],
    xs: Tensor | Sequence[Tensor],
    ws: Tensor | Sequence[Tensor],
    retain_graph: bool = True,
    detach: bool = True,
) -> tuple[Tensor, ...]:
    """The product ``J^T w`` with the Jacobian ``J`` of ``ys`` in ``xs``.

    Args:
        ys: outputs.
        xs: inputs that the outputs were computed from.
        ws: vectors like ``ys``.
        retain_graph: keep the graph of ``ys`` for further products.
        detach: return tensors that cannot be differentiated again.

    Returns:
        Tensors like ``xs``, zero where nothing depends on them.
    """
    ys, xs, ws = as_list(ys), as_list(xs), as_list(ws)
    check_shapes("L_op: ws", ws, ys)
    with unheard():
        return torch.autograd.grad(
            ys, xs, ws, retain_graph=retain_graph, create_graph=not detach, materialize_grads=True
        )


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A tensor alone counts as a sequence of one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def check_shapes(what: str, vectors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Raise a ``ValueError`` if vectors do not have the shapes of what they belong to."""
    got, expected = [list(v.shape) for v in vectors], [list(t.shape) for t in like]
    if got != expected:
        raise ValueError(f"{what}: expected vectors of shapes {expected}, got {got}.")
