"""The rule of parameters that an operation broadcasts over the samples.

::

    y = x * p,  x [N, T, d],  p [d]
    vectors [V, N, T, d]  ──►  times x, summed over T  ──►  Dense [V, N, d]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.layers.broadcast import Broadcast
from curvopt.core.layers.pull_to_parameter import _is_by_entry, _is_linear, _through
from curvopt.core.layers.rule import Jacobians, Rule, tensors
from curvopt.core.products.base import Dense
from curvopt.core.record.calls import ModuleCall


class BroadcastRule(Rule):
    """An operand that an operation repeats for every sample, times a number, and perhaps a factor for each sample.

    Args:
        p: the parameter.
        source: the edge at which the operand was computed from it; ``None`` for the parameter itself.
        shape: shape of the operand.
        operation: number and factor.
    """

    def __init__(self, p: nn.Parameter, source: GradientEdge | None, shape: Sequence[int], operation: Broadcast):
        """Keep them."""
        self.p, self.source, self.shape, self.operation = p, source, tuple(shape), operation

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.operation.linear and _is_linear(self.source, self.p)

    @cached_property
    def pulls_back(self) -> bool:  # type: ignore[override]
        return not (self.source is None or _is_by_entry(self.source, self.p))

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        shape, axis = call.shapes[0], 1 if how == "axis" else 0
        given = all(x.shape[: axis + 1] == shape[: axis + 1] for x in tensors(call))
        return given and len(shape) > axis and self._sizes(len(shape))[axis] == 1

    def _sizes(self, dims: int) -> list[int]:
        """Lengths of the operand along the axes of the output."""
        return [1] * (dims - len(self.shape)) + list(self.shape)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        (grad,) = grads
        assert grad is not None
        if self.operation.factor is not None:
            grad = grad * self.operation.factor(*call.args).to(grad.dtype)
        sizes = self._sizes(grad.dim() - 1)
        if call.steps == "axis":
            sizes[:2] = sizes[1::-1]
        if sizes[0] == 1:
            values = grad.unflatten(1, (N, -1))
        else:  # rows of its own for each sample, or for the only one
            values = grad.new_zeros(len(grad), N, *grad.shape[1:])
            for n, rows in enumerate(grad.split(grad.shape[1] // N, 1)):
                values[:, n, n * rows.shape[1] : (n + 1) * rows.shape[1]] = rows
        axes = [i for i, size in enumerate(sizes, 2) if size == 1]
        values = (values.sum(axes) if axes else values) * self.operation.scale
        jacobian = Dense(values.reshape(len(grad), N, *self.shape))
        return dict.fromkeys(names, _through(call, self.source, self.p, jacobian))
