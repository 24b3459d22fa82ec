"""Transposed Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from curvopt.core.nodes import walk
from curvopt.core.vjp import loses_derivative, own_backward
from curvopt.errors import CurvoptError


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
    with own_backward():
        return torch.autograd.grad(
            ys, xs, ws, retain_graph=retain_graph, create_graph=not detach, materialize_grads=True
        )


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A tensor alone counts as a sequence of one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def check_shapes(argument: str, vectors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Raise a ``ValueError`` if vectors do not have the shapes of ``like``."""
    got, expected = [list(v.shape) for v in vectors], [list(t.shape) for t in like]
    if got != expected:
        raise ValueError(f"{argument}: expected vectors of shapes {expected}, got {got}.")


_once_differentiable = torch.autograd.function.once_differentiable(lambda ctx, grad: grad).__code__


def check_differentiable(caller: str, ys: Sequence[Tensor] | Sequence[GradientEdge], twice: bool = False) -> None:
    """Raise if a function behind ``ys`` is marked as differentiable only once: autograd.grad takes it for linear.

    Args:
        caller: for messages.
        ys: outputs.
        twice: also if the derivative of its backward is lost, as Hessians need it.
    """
    for node in walk([node for y in ys if (node := y.node if isinstance(y, GradientEdge) else y.grad_fn) is not None]):
        if isinstance(node, BackwardCFunction):
            function = node._forward_cls  # type: ignore[attr-defined]
            if getattr(function.backward, "__code__", None) is _once_differentiable:
                raise CurvoptError(
                    f"{caller}: {function.__name__} is marked as once_differentiable, so PyTorch has no second "
                    "derivative of it; write its backward in operations that are differentiable."
                )
            if twice and loses_derivative(node):
                raise CurvoptError(
                    f"{caller}: the backward of {function.__name__} returns what its forward computed, or leaves "
                    "autograd, so its second derivative is not known; write it by operations of PyTorch."
                )
