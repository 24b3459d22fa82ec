"""One call of an extended loss.

>>> from torch.nn import functional as F
>>> z, y = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
>>> call = LossCall("", nn.CrossEntropyLoss(), (z, y), {})
>>> curvature, factor = call.curvature(torch.tensor(1.0))
>>> type(curvature).__name__, curvature.columns
('Softmax', 2)
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from curvopt.core.jacobians.sums import widened
from curvopt.core.losses.autograd_root import curvature_by_autograd
from curvopt.core.losses.hessian_root import Diagonal, LossCurvature, root_of_weights
from curvopt.core.losses.registry import _losses
from curvopt.core.recording.calls import describe, version
from curvopt.core.recording.state import disable
from curvopt.errors import CurvoptError


class LossCall:
    """One call of an extended loss: its module, its input (the network's output) and its other arguments.

    Only the input may require gradients.
    """

    __slots__ = ("__weakref__", "args", "edge", "input", "kwargs", "module", "path", "target", "version")

    def __init__(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Record the arguments of the loss, given by position or by name: first the input, then the target if any."""
        self.path, self.module = path, module
        self.args, self.kwargs = args, kwargs
        given = [*args, *kwargs.values()]
        self.target: Any = kwargs.get("target", given[1] if len(given) > 1 else None)
        self.input: Tensor = _first(args, kwargs)
        self.version = version(self.input)
        self.edge = get_gradient_edge(self.input) if self.input.requires_grad else None

    def again(self, z: Tensor) -> Tensor:
        """The value of the loss at another input, in float32 at least."""
        given = (self.args, self.kwargs)
        args, kwargs = tree_map_only(Tensor, lambda arg: z if arg is self.input else widened(arg), given)
        held = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        wide = {name: raised for name, tensor in held if (raised := widened(tensor)) is not tensor}
        return torch.func.functional_call(self.module, wide, args, kwargs) if wide else self.module(*args, **kwargs)

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in its input, from the gradient of its value."""
        create_graph = torch.is_grad_enabled()
        # in float32 at least: a scaled loss would leave the range of float16
        z = self.input.to(torch.promote_types(self.input.dtype, torch.float32))
        z = z.view_as(z) if create_graph else z.detach().requires_grad_()  # an alias: the input itself has hooks
        with torch.enable_grad(), disable():
            value = self.again(z)
        grad = grad.reshape(value.shape).to(value.dtype)
        return torch.autograd.grad(value, z, grad, create_graph=create_graph)[0]

    def curvature(self, grad: Tensor) -> tuple[LossCurvature, Tensor]:
        """The curvature, and the root of the factor ``grad`` by which the loss was scaled.

        Raises:
            CurvoptError: for a loss that does not reduce to a scalar, was given a negative factor, whose input changed
                since, or whose Hessian has no root.
        """
        reduction = getattr(self.module, "reduction", "mean")
        if reduction not in ("mean", "sum", "batchmean") or grad.numel() != 1:
            raise CurvoptError(
                f"{self.describe()}: second-order quantities need a scalar loss, but this one has shape "
                f"{list(grad.shape)} (reduction={reduction!r}); use reduction='mean' or 'sum'."
            )
        scale = root_of_weights(grad, self.describe())
        if version(self.input) != self.version:
            raise CurvoptError(
                f"{self.describe()}: its input was modified in place after the loss was computed; give it a copy."
            )
        z = widened(self.input)
        for base in type(self.module).__mro__:
            if base in _losses and type(self.module).forward is base.forward:
                curvature = _losses[base](self.module, z, self.target)
                break
        else:
            curvature = curvature_by_autograd(self, z)
        if curvature.weights is None:
            terms = z.numel() if isinstance(curvature, Diagonal) and reduction == "mean" else len(z)
            curvature.weights = z.new_ones(len(z), *[1] * (z.dim() - 1)) * (1.0 if reduction == "sum" else 1 / terms)
        return curvature, scale

    def describe(self) -> str:
        """Path and type of the loss module, for messages."""
        return describe(self.path, self.module)


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument of a loss that is the network's output, ``None`` if there are no arguments."""
    return args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
