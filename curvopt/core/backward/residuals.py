r"""Curvature that nonlinear operations add to the Gauss-Newton matrix.

The Hessian of ``L(f(w))`` is ``J^T (\nabla^2 L) J`` plus, for every nonlinear operation ``b = h(a)`` of the network,
the residual ``J_a^T R J_a`` with ``R = \nabla_a^2 (g^T h(a))`` and g the gradient at b. Operations are read off the
autograd graph, so functional code counts. Differentiating the backward of the operation gives R, and R travels on as
columns ``u`` with weights: ``R = sum_v w_v u_v u_v^T``, sample by sample::

    b = tanh(a)     R = diag(g tanh''(a))             a unit vector for each entry, with the weight g tanh''(a)
    b = a1 * a2     R = [[0, diag g], [diag g, 0]]    two columns for each entry, with the weights 1/4 and -1/4
    b = relu(a)     R = 0                             no columns
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from curvopt.core.backward.backward_pass import BackwardPass
from curvopt.core.backward.checks import check_second_derivatives
from curvopt.core.linear_algebra import allclose, eigh
from curvopt.core.losses.roots import Columns, Modify
from curvopt.core.nodes import is_complex, name_of, precisions, shape_of
from curvopt.core.operations import Residual, nonlinear_operations
from curvopt.core.products.base import Chunk, Dense
from curvopt.core.samples.layout import Layout
from curvopt.core.vjp import cut, loses_derivative, pull
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions.base import Extension, fields_of

#: Entries of parameters beyond which their exact Hessian by double backward is worth a warning.
DIRECT_ENTRIES = 2000


class Residuals:
    """What nonlinear operations between the loss and the parameters add to the Gauss-Newton matrix.

    A parameter that is used twice or enters nonlinearly has curvature beside that of the operations after it: its
    gradient is differentiated once more, entry by entry.

    Args:
        run: the backward, which pulls columns back.
        edges: where the parts of the loss have their inputs.
        slopes: the gradient at each.
    """

    def __init__(self, run: BackwardPass, edges: Sequence[GradientEdge], slopes: Sequence[Tensor]):
        self.run, self.located, self.edges, self.slopes = run, run.located, edges, slopes
        uses: dict[nn.Parameter, int] = {}
        for call in run.calls:
            for p in call.parameters.values():
                uses[p] = uses.get(p, 0) + (len(call.edges) if call.rule.linear else 2)
        #: The parameters whose gradients are differentiated once more, and the operations whose residuals are swept.
        self.direct = {p for p, count in uses.items() if count > 1}
        nodes = {n for call in run.calls if not self.direct.issuperset(call.parameters.values()) for n in call.nodes}
        self.operations = nonlinear_operations(edges, nodes) if nodes else []
        inputs = [edge for operation in self.operations for edge in operation.inputs]
        if any(is_complex(edge.node, edge.output_nr) or not self._is_sample_first(edge) for edge in inputs):
            self.direct, self.operations = set(uses), []

    def _is_sample_first(self, edge: GradientEdge) -> bool:
        """Whether the samples of a tensor come one after the other in memory."""
        if len(self.located.distinct_locations) > 1:
            return False
        (location,) = self.located.distinct_locations
        layout = location.axes.layouts.get((edge.node, edge.output_nr))
        if (edge.node, edge.output_nr) not in location.axes.layouts:  # between the heads and the loss
            rows = location.rows_of(edge) if shape_of(edge.node, edge.output_nr) else None
            return rows is not None and rows == [n for n in range(location.N) for _ in range(len(rows) // location.N)]
        return isinstance(layout, Layout) and layout.before == 1 and layout.labels is None

    def add(self, extensions: Sequence[Extension], modify: Modify) -> None:
        """Add the residuals to the totals of extensions, see `residual_columns`.

        Raises:
            CurvoptError: where PyTorch has no second derivative of an operation, or a wrong one.
        """
        check_second_derivatives(extensions, self.located, self.edges, self.direct)
        try:
            self._sweep(extensions, modify)
            if self.direct:
                self._differentiate(extensions, modify)
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

    def _sweep(self, extensions: Sequence[Extension], modify: Modify) -> None:
        run, outputs = self.run, [GradientEdge(op.node, nr) for op in self.operations for nr in op.outputs]
        arrived = iter(pull(self.edges, outputs, [slope.unsqueeze(0) for slope in self.slopes]) if outputs else ())
        for operation in self.operations:
            grads = {nr: grad[0] for nr in operation.outputs if (grad := next(arrived)) is not None}
            if grads:
                reached = operation._replace(outputs=list(grads))
                N = self.located.distinct_locations[0].N
                for columns in residual_columns(reached, list(grads.values()), N, run.chunk_size, modify):
                    run.sweep(columns, extensions, self.direct)

    def _differentiate(self, extensions: Sequence[Extension], modify: Modify) -> None:
        """The whole Hessian of single parameters by differentiating the gradient, a column for each entry."""
        located, parameters = self.located, list(self.direct)
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
        with torch.no_grad():  # of all: the gradient of a single parameter may be nothing but rounding errors, too
            reached = pull(self.edges, parameters, [slope.detach().unsqueeze(0) for slope in self.slopes])
        largest = torch.stack(
            [p.new_zeros(()) for p in parameters[:1]] + [g.abs().max() for g in reached if g is not None]
        ).max()
        eps = max(torch.finfo(dtype).eps for dtype in precisions([edge.node for edge in self.edges]))
        for p in parameters:
            location = located.owners[p][0].location
            rows = [location.rows_of(edge) for edge in self.edges]
            per_sample = any(e.per_sample for e in extensions)
            if per_sample and None in rows:
                raise CurvoptError(
                    f"{located.name(p)}: {fields_of(extensions)} keeps samples apart, but rows of the loss' input "
                    "depend on several samples; use DiagHessian or HMP."
                )
            # where second derivatives are zero, they come out as rounding errors
            noise = 100 * eps * largest.to(p) / p.detach().abs().max().clamp(min=torch.finfo(p.dtype).tiny)
            images = []
            for n in range(location.N) if per_sample else (None,):
                slopes = [
                    slope if n is None or of is None else slope * _mask(of, n, slope)
                    for of, slope in zip(rows, self.slopes, strict=True)
                ]
                images.append(_hessian(slopes, self.edges, p, self.run.chunk_size))
            products = torch.stack(images, 1)
            if not allclose(products, products.transpose(0, 2), 0, noise + 1e-2 * products.detach().abs().max()):
                raise CurvoptError(
                    f"{located.name(p)}: PyTorch's second derivative of an operation on the way is wrong "
                    f"(its Hessian is not symmetric), so {fields_of(extensions)} cannot be had; use a GGN quantity."
                )
            units = unit_vectors(torch.arange(p.numel(), device=p.device), p.numel(), len(images), products)
            vectors, weights = polarize(units, products)
            jacobian = Dense(vectors.reshape(*vectors.shape[:2], *p.shape)).with_weights(weights)
            self.run.update(Chunk(p, jacobian), extensions)


def _mask(rows: Sequence[int], sample: int, like: Tensor) -> Tensor:
    of_sample = torch.tensor([row == sample for row in rows], device=like.device)
    return of_sample.view(-1, *[1] * (like.dim() - 1))


def _hessian(slopes: Sequence[Tensor], edges: Sequence[GradientEdge], p: nn.Parameter, size: int) -> Tensor:
    """The Hessian ``[P, P]`` of one parameter of what has these slopes at edges."""
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


def residual_columns(residual: Residual, grads: list[Tensor], N: int, size: int, modify: Modify) -> Iterator[Columns]:
    """Weighted columns of one operation's residual, at most ``size`` at a time.

    Args:
        residual: the operation.
        grads: gradients of the loss at its outputs.
        N: number of samples; entries of the inputs belong to samples in equal contiguous shares.
        size: columns at a time.
        modify: replace R by its positive part (``"clip"``) or absolute value (``"abs"``), else leave it.
    """
    if loses_derivative(residual.node):
        raise CurvoptError(
            f"{name_of(residual.node)}: its backward leaves autograd (numpy, a kernel, detach) or returns what its "
            "forward computed, so its second derivative is not known; write it by operations of PyTorch, or use a GGN "
            "quantity."
        )
    if isinstance(residual.node, BackwardCFunction):
        # a function that is differentiable once protests only if its gradient could be differentiated
        grads = [grad if grad.requires_grad else grad.detach().requires_grad_() for grad in grads]
    # stay within the operation: an input may depend on another, and the gradient (under create_graph) on all of them
    borders = [edge.node for edge in residual.inputs] + [grad.grad_fn for grad in grads]
    with torch.enable_grad(), cut(borders):
        # the backward of the operation at a fixed gradient, as a function of the operation's inputs
        outputs = [GradientEdge(residual.node, nr) for nr in residual.outputs]
        pulled = pull(outputs, residual.inputs, [grad.unsqueeze(0) for grad in grads])
        found = [(e, p[0]) for e, p in zip(residual.inputs, pulled, strict=True) if p is not None and p.requires_grad]
    if not found:
        return
    edges, values = [edge for edge, _ in found], [value for _, value in found]
    shapes = [value.shape for value in values]
    dims = [shape.numel() // N for shape in shapes]

    def at_inputs(columns: Tensor) -> list[Tensor]:
        """``[v, N, sum(dims)]`` as a tensor for each input."""
        return [u.reshape(-1, *shape) for u, shape in zip(columns.split(dims, 2), shapes, strict=True)]

    def images(columns: Tensor) -> Tensor:
        """Products R u of the joint residual of all inputs, ``[v, N, sum(dims)]``."""
        vectors = at_inputs(columns)
        with cut(borders):
            found = pull(values, edges, vectors)
        found = [torch.zeros_like(v) if r is None else r for r, v in zip(found, vectors, strict=True)]
        return torch.cat([r.reshape(-1, N, d) for r, d in zip(found, dims, strict=True)], 2)

    if residual.diagonal:
        diagonal = images(values[0].new_ones(1, N, dims[0]))[0]
        if modify is not None:
            diagonal = diagonal.clamp(min=0) if modify == "clip" else diagonal.abs()
        active = (diagonal != 0).any(0).nonzero()[:, 0]
        for indices in active.split(size) if len(active) else ():
            units = unit_vectors(indices, dims[0], N, diagonal)
            yield Columns(edges, at_inputs(units), diagonal[:, indices].T)
        return

    entries = torch.arange(sum(dims), device=values[0].device)
    if modify is not None:
        rows = [images(unit_vectors(i, len(entries), N, values[0])) for i in entries.split(size)]
        R = torch.cat(rows).transpose(0, 1)
        eigenvalues, eigenvectors = eigh((R + R.mT) / 2)
        weights = eigenvalues.clamp(min=0) if modify == "clip" else eigenvalues.abs()
        for indices in entries.split(size):
            yield Columns(edges, at_inputs(eigenvectors[:, :, indices].permute(2, 0, 1)), weights[:, indices].T)
        return
    for indices in entries.split(max(1, size // 2)):
        units = unit_vectors(indices, len(entries), N, values[0])
        both, weights = polarize(units, images(units))
        yield Columns(edges, at_inputs(both), weights)


def polarize(units: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Columns ``[2 v, N, D]`` and weights ``[2 v, N]`` of ``sum_v (e (Re)^T + (Re) e^T) / 2``.

    Over all units that is R itself.

    Args:
        units: unit vectors e, ``[v, N, D]``.
        images: their products Re with a symmetric matrix of each sample.
    """
    # (e + Re)(e + Re)^T - (e - Re)(e - Re)^T = 2 (e (Re)^T + (Re) e^T), with e and Re scaled to one length first
    length = images.detach().square().sum(2, keepdim=True).sqrt()
    root = length.sqrt()
    images = torch.where(length > 0, images / root.clamp(min=torch.finfo(images.dtype).tiny), 0)
    both = torch.cat([units * root + images, units * root - images])
    quarter = both.new_full((len(units), 1), 0.25)
    return both, torch.cat([quarter, -quarter]).expand(-1, both.shape[1])


def unit_vectors(indices: Tensor, dim: int, N: int, like: Tensor) -> Tensor:
    """Unit vectors ``[v, N, dim]``, the same for all samples."""
    units = torch.zeros(len(indices), dim, dtype=like.dtype, device=like.device)
    return units.scatter_(1, indices.to(like.device).unsqueeze(1), 1).unsqueeze(1).expand(-1, N, -1)
