"""Rules of single operations that were read off the graph: what becomes of a parameter when it meets the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.derivatives.rules import AffineRule, Jacobians, Rule
from curvopt.core.jacobians import Dense
from curvopt.core.residuals import leaf_of, nonlinear_operations, pull, walk
from curvopt.core.uses import Use


class Product(AffineRule):
    """A product of matrices, or of batches of them, one of which are parameters ``[G, O, I]`` as seen by the product.

    Args:
        from_left: ``W x``, with samples in the columns, instead of ``x W^T``.
        shared: the batch holds the samples, which share one matrix; else it holds groups.
        transposed: the parameter is a reshaped ``[G, I, O]``.
    """

    def __init__(self, from_left: bool, shared: bool, transposed: bool):
        """Keep them."""
        self.from_left, self.shared, self.transposed = from_left, shared, transposed

    def unfold(self, module: nn.Module, x: Tensor) -> Tensor:
        x = x.mT if self.from_left else x
        x = x if x.dim() == 3 else x.unsqueeze(0)
        return x.unsqueeze(1) if self.shared else x.transpose(0, 1).unsqueeze(2)

    def fold(self, module: nn.Module, grad: Tensor, x: Tensor) -> Tensor:
        if grad.dim() == 2:  # of a matrix and a vector
            grad = grad.unsqueeze(2)
        grad = grad.mT if self.from_left else grad
        grad = grad if grad.dim() == 4 else grad.unsqueeze(1)
        return grad.unsqueeze(2) if self.shared else grad.transpose(1, 2).unsqueeze(3)

    def rows(self, use: Use) -> int:
        return use.shapes[0][self.output_axis(use, 0)]

    def output_axis(self, use: Use, index: int) -> int:
        return 0 if self.shared else max(0, len(use.shapes[0]) - (1 if self.from_left else 2))


class Repeated(Rule):
    """What an operation repeats for every sample, times a number and a factor that differs among them perhaps.

    Args:
        p: the parameter.
        source: where what is repeated was computed from it; ``None`` for itself.
        shape: shape of what is repeated.
        scale: the number.
        factor: computes the factor from the tensors of the use.
        linear: whether the operation is linear in what it repeats.
    """

    def __init__(
        self,
        p: nn.Parameter,
        source: GradientEdge | None,
        shape: Sequence[int],
        scale: float = 1.0,
        factor: Callable[..., Tensor] | None = None,
        linear: bool = True,
    ):
        """Keep them."""
        self.p, self.source, self.shape, self.scale, self.factor = p, source, tuple(shape), scale, factor
        self._in_operand = linear

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self._in_operand and _is_linear(self.source, self.p)

    def rows(self, use: Use) -> int:
        return use.shapes[0][0]

    def jac_t(self, use: Use, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        if self.factor is not None:
            grad = grad * self.factor(*use.args).to(grad.dtype)
        sizes = [1] * (grad.dim() - 1 - len(self.shape)) + list(self.shape)
        if sizes[0] == 1:
            values = grad.unflatten(1, (N, -1))
        else:  # rows of its own for each sample, or for the only one
            values = grad.new_zeros(len(grad), N, *grad.shape[1:])
            for n, rows in enumerate(grad.split(grad.shape[1] // N, 1)):
                values[:, n, n * rows.shape[1] : (n + 1) * rows.shape[1]] = rows
        axes = [i for i, size in enumerate(sizes, 2) if size == 1]
        values = (values.sum(axes) if axes else values) * self.scale
        return {name: _through(self.source, self.p, values.reshape(len(grad), N, *self.shape)) for name in names}


class Derived(Rule):
    """An operation with a weight that was computed from the parameter.

    Args:
        rule: of the operation with a weight of its own, by the name ``weight``.
        p: the parameter.
        source: where the weight was computed; ``None`` if it is the parameter, with axes moved perhaps.
    """

    def __init__(self, rule: Rule, p: nn.Parameter, source: GradientEdge | None):
        """Keep them."""
        self.rule, self.p, self.source = rule, p, source

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.rule.linear and _is_linear(self.source, self.p)

    def rows(self, use: Use) -> int:
        return self.rule.rows(use)

    def output_axis(self, use: Use, index: int) -> int | None:
        return self.rule.output_axis(use, index)

    def jac_t(self, use: Use, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        values = self.rule.jac_t(use, grads, ["weight"], N)["weight"].dense()
        return {name: _through(self.source, self.p, values) for name in names}


def _through(source: GradientEdge | None, p: nn.Parameter, values: Tensor) -> Dense:
    """Products ``[V, N, *shape]`` with respect to what was computed from a parameter, as those of the parameter."""
    V, N = values.shape[:2]
    if source is not None:
        shape = source.node._input_metadata[source.output_nr].shape  # type: ignore[attr-defined]
        (found,) = pull([source], [p], [values.reshape(V * N, *shape)])
        values = p.new_zeros(V * N, *p.shape) if found is None else found
    return Dense(values.reshape(V, N, *p.shape))


def _is_linear(source: GradientEdge | None, p: nn.Parameter) -> bool:
    """Whether what was computed at an edge is linear in a parameter; ``None`` for the parameter itself."""
    if source is None:
        return True
    leaves = {node for node in walk([source.node]) if leaf_of(node) is p}
    return not nonlinear_operations(source.node, leaves)
