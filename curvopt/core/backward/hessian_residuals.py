"""The part of the Hessian that nonlinear operations between the loss and the parameters add to the GGN.

::

    z = V tanh(W x)      Hessian of W = GGN + J_a^T diag(g tanh''(a)) J_a    with a = W x and g the gradient at tanh(a)
    z = V relu(W x)      Hessian of W = GGN
    z = W tanh(W x)      W is used twice: the gradient of W is differentiated once more, entry by entry
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.backward.request_checks import fields_of, refuse_wrong
from curvopt.core.backward.second_derivatives import (
    Modify,
    nonlinear_operations,
    polarize,
    residual_columns,
    unit_vectors,
)
from curvopt.core.graph.backward_graph import leaves_behind
from curvopt.core.graph.nodes import is_complex, precisions, shape_of
from curvopt.core.graph.vjp import cut, pull
from curvopt.core.linear_algebra import allclose
from curvopt.core.products.base import Chunk, Dense
from curvopt.core.pytorch_workarounds import WRONG_TWICE, lone_biases
from curvopt.core.samples.layout import Layout
from curvopt.errors import CurvoptError, CurvoptWarning

if TYPE_CHECKING:
    from curvopt.core.backward.backward_pass import BackwardPass
    from curvopt.extensions.base import Extension

#: Entries of parameters beyond which their exact Hessian by double backward is worth a warning.
DIRECT_ENTRIES = 2000


@contextmanager
def _differentiated_twice(extensions: Sequence[Extension]) -> Iterator[None]:
    """Inside, an error of PyTorch says that an operation has no second derivative."""
    try:
        yield
    except (CurvoptError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        remedy = (
            "run the forward pass under torch.backends.cudnn.flags(enabled=False)"
            if "cudnn" in str(error)
            else "run the forward pass inside of the context, too, where attention has its second derivative"
        )
        raise CurvoptError(
            f"{fields_of(extensions)}: an operation of the network has no second derivative in PyTorch "
            f"({str(error).splitlines()[0].split('. ')[0]}); use a GGN quantity, or {remedy}."
        ) from error


def sweep_residuals(
    run: BackwardPass,
    edges: Sequence[GradientEdge],
    slopes: Sequence[Tensor],
    modify: Modify,
    extensions: Sequence[Extension],
) -> None:
    """Add the residuals of all nonlinear operations behind some edges, with the gradients there, to the totals.

    Raises:
        CurvoptError: where PyTorch has no second derivative of an operation, or a wrong one.
    """
    for edge in edges:
        what = f"{fields_of(extensions)} cannot be had"
        refuse_wrong(run.located, WRONG_TWICE, edge.node, what, "use a GGN quantity")
    # a parameter that is used twice or enters nonlinearly has curvature beside that of the operations after it
    calls: dict[nn.Parameter, int] = {}
    for call in run.calls:
        for p in call.parameters.values():
            calls[p] = calls.get(p, 0) + (len(call.edges) if call.rule.linear else 2)
    direct = {p for p, count in calls.items() if count > 1}
    nodes = {node for call in run.calls if not direct.issuperset(call.parameters.values()) for node in call.nodes}
    operations = nonlinear_operations(edges, nodes) if nodes else []
    inputs = [edge for operation in operations for edge in operation.inputs]
    N = run.calls[0].location.N
    if any(is_complex(edge.node, edge.output_nr) or not _is_sample_first(run, edge) for edge in inputs):
        direct, operations = set(calls), []
    if not operations and not direct:
        return
    lone = [bias for edge in edges for bias in lone_biases(edge.node)] if direct else []
    dropped = leaves_behind(lone)
    for p in direct & dropped:
        raise CurvoptError(
            f"{run.located.name(p)}: PyTorch's second derivative of norms with a bias and no weight is wrong, so "
            f"{fields_of(extensions)} cannot be had; add the bias by `+`, or use a GGN quantity."
        )
    with _differentiated_twice(extensions):
        outputs = [GradientEdge(op.node, nr) for op in operations for nr in op.outputs]
        arrived = iter(pull(edges, outputs, [slope.unsqueeze(0) for slope in slopes]) if outputs else ())
        for operation in operations:
            grads = [next(arrived) for _ in operation.outputs]
            reached = [nr for nr, g in zip(operation.outputs, grads, strict=True) if g is not None]
            present = [g[0] for g in grads if g is not None]
            if present:
                changed = operation._replace(outputs=reached)
                for columns in residual_columns(changed, present, N, run.chunk_size, modify):
                    run.sweep(columns.edges, columns.vectors, columns.weights, extensions, direct)
        if direct:
            _by_double_backward(run, edges, slopes, list(direct), modify, extensions)


def _is_sample_first(run: BackwardPass, edge: GradientEdge) -> bool:
    """Whether the samples of a tensor come one after the other in memory."""
    location = run.calls[0].location
    layout = location.axes.layouts.get((edge.node, edge.output_nr))
    if any(call.location is not location for call in run.calls):
        return False
    if (edge.node, edge.output_nr) not in location.axes.layouts:  # between the heads and the loss
        shape = shape_of(edge.node, edge.output_nr)
        rows = location.rows_of(edge) if len(shape) else None
        return rows is not None and rows == [j // max(len(rows) // location.N, 1) for j in range(len(rows))]
    return isinstance(layout, Layout) and layout.before == 1 and layout.labels is None


def _by_double_backward(
    run: BackwardPass,
    edges: Sequence[GradientEdge],
    slopes: Sequence[Tensor],
    parameters: list[nn.Parameter],
    modify: Modify,
    extensions: Sequence[Extension],
) -> None:
    """The whole Hessian of single parameters by differentiating the gradient, a column for each of their entries."""
    located = run.located
    if modify is not None:
        raise CurvoptError(
            f"{located.name(parameters[0])}: {fields_of(extensions)} is only defined for parameters that are "
            "used once and enter linearly; use HMP or GGNMP."
        )
    entries = sum(p.numel() for p in parameters)
    if entries > DIRECT_ENTRIES:
        warnings.warn(
            f"{fields_of(extensions)}: {entries} parameter entries ({located.name(parameters[0])}, ...) are "
            "used several times or nonlinearly; their exact Hessian takes one double backward for each entry.",
            CurvoptWarning,
            stacklevel=2,
        )
    with torch.no_grad():  # of all: a parameter's own gradient may be nothing but rounding errors, too
        reached = pull(edges, parameters, [slope.detach().unsqueeze(0) for slope in slopes])
    largest = torch.stack(
        [p.new_zeros(()) for p in parameters[:1]] + [g.abs().max() for g in reached if g is not None]
    ).max()
    eps = max(torch.finfo(dtype).eps for dtype in precisions([edge.node for edge in edges]))
    for p in parameters:
        location = located.owners[p][0].location
        rows = [location.rows_of(edge) for edge in edges]
        per_sample = any(e.per_sample for e in extensions)
        if per_sample and None in rows:
            raise CurvoptError(
                f"{located.name(p)}: {fields_of(extensions)} keeps samples apart, but rows of the loss' input depend "
                "on several samples; use DiagHessian or HMP."
            )
        # where second derivatives are zero, they come out as rounding errors
        noise = 100 * eps * largest.to(p) / p.detach().abs().max().clamp(min=torch.finfo(p.dtype).tiny)
        images = []
        for n in range(location.N) if per_sample else (None,):
            own = [
                slope if n is None or of is None else slope * _mask(of, n, slope)
                for of, slope in zip(rows, slopes, strict=True)
            ]
            images.append(_hessian(own, edges, p, run.chunk_size))
        products = torch.stack(images, 1)
        if not allclose(products, products.transpose(0, 2), 0, noise + 1e-2 * products.detach().abs().max()):
            raise CurvoptError(
                f"{located.name(p)}: PyTorch's second derivative of an operation on the way is wrong "
                f"(its Hessian is not symmetric), so {fields_of(extensions)} cannot be had; use a GGN quantity."
            )
        units = unit_vectors(torch.arange(p.numel(), device=p.device), p.numel(), len(images), products)
        vectors, weights = polarize(units, products)
        jacobian = Dense(vectors.reshape(*vectors.shape[:2], *p.shape)).with_weights(weights)
        run.update(Chunk(p, jacobian), extensions)


def _mask(rows: Sequence[int], sample: int, like: Tensor) -> Tensor:
    own = torch.tensor([row == sample for row in rows], device=like.device)
    return own.view(-1, *[1] * (like.dim() - 1))


def _hessian(slopes: Sequence[Tensor], edges: Sequence[GradientEdge], p: nn.Parameter, size: int) -> Tensor:
    """The Hessian ``[P, P]`` of one parameter of what has these slopes at some edges."""
    with torch.enable_grad():
        (gradient,) = pull(edges, [p], [slope.unsqueeze(0) for slope in slopes])
        gradient = None if gradient is None else gradient[0]
    image = torch.zeros(p.numel(), p.numel(), dtype=p.dtype, device=p.device)
    if gradient is not None and gradient.requires_grad:
        units = torch.eye(p.numel(), dtype=p.dtype, device=p.device).reshape(-1, *p.shape).split(size)
        with cut([slope.grad_fn for slope in slopes]):
            pulled = [pull([gradient], [p], [unit])[0] for unit in units]
        image = torch.cat([torch.zeros_like(u) if h is None else h for h, u in zip(pulled, units, strict=True)])
    return image.reshape(p.numel(), p.numel())
