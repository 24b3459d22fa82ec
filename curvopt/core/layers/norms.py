"""Rules of layers ``w * f(x) + b`` with a function f without parameters: norm layers and PReLU.

::

    layer norm of x [N, T, d], vectors [V, N, T, d]
    weight    vectors * f(x), summed over T    Dense [V, N, d]
    bias      vectors, summed over T           Dense [V, N, d]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from curvopt.core.layers.rule import Jacobians, Rule, register
from curvopt.core.products.base import Dense
from curvopt.core.record import ModuleCall


class ScaleRule(Rule):
    """A weight (and bias) along some axes of the output, shared along all further ones."""

    any_order = True
    linear = True
    takes_single = True
    #: Whether the parameters belong to the last axes, not to axis 1.
    last_axes = False

    @abstractmethod
    def scaled(self, module: Any, x: Tensor, training: bool) -> Tensor:
        """The tensor that the weight multiplies, like the output; ``training`` is the mode of the forward."""

    def leaves_input(self, module: Any) -> bool:
        return True

    def expected(self, module: Any) -> Container[str]:
        return ("weight", "bias")

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        grad = grads[0]
        assert grad is not None
        jacobians: Jacobians = {}
        if "weight" in names:
            if "scaled" not in call.cache:
                # autocast: the input may be in another precision
                call.cache["scaled"] = self.scaled(call.module, call.input.to(grad.dtype), call.training)
            jacobians["weight"] = self._summed(call.module, "weight", grad * call.cache["scaled"], N)
        if "bias" in names:
            jacobians["bias"] = self._summed(call.module, "bias", grad, N)
        return jacobians

    def _summed(self, module: nn.Module, name: str, values: Tensor, N: int) -> Dense:
        """``[V, N k, *out]`` summed over all axes but V, N and the parameter's."""
        shape, V = module.get_parameter(name).shape, len(values)
        if self.last_axes:
            return Dense(values.reshape(V, N, -1, *shape).sum(2))
        if shape[0] == 1:  # one channel, or one PReLU slope for all
            return Dense(values.reshape(V, N, -1).sum(2, keepdim=True))
        return Dense(values.reshape(V, N, values.shape[1] // N, *shape, -1).sum((2, 4)))


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNorm(ScaleRule):
    """In train mode the batch's statistics are taken as constants; exact quantities are refused there by the sweep."""

    def scaled(self, module: nn.BatchNorm2d, x: Tensor, training: bool) -> Tensor:
        if training or module.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        return F.batch_norm(x, module.running_mean, module.running_var, training=False, eps=module.eps)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(ScaleRule):
    """Statistics per sample and channel, or running ones in eval mode if they are tracked."""

    def scaled(self, module: nn.InstanceNorm2d, x: Tensor, training: bool) -> Tensor:
        if training or not module.track_running_stats:
            return F.instance_norm(x, eps=module.eps)
        return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=False, eps=module.eps)

    def least_dims(self, module: nn.InstanceNorm2d) -> int:
        return module._get_no_batch_dim() + 1


@register(nn.GroupNorm)
class GroupNorm(ScaleRule):
    """Statistics per sample and group of channels."""

    def scaled(self, module: nn.GroupNorm, x: Tensor, training: bool) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register(nn.LayerNorm)
class LayerNorm(ScaleRule):
    """Statistics over the last axes, which the parameters belong to."""

    any_axes = True
    last_axes = True

    def scaled(self, module: nn.LayerNorm, x: Tensor, training: bool) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)

    def least_dims(self, module: nn.LayerNorm) -> int:
        return len(module.normalized_shape) + 1


@register(nn.RMSNorm)
class RMSNorm(LayerNorm):
    """Root mean square over the last axes."""

    def scaled(self, module: nn.RMSNorm, x: Tensor, training: bool) -> Tensor:
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)

    def leaves_input(self, module: nn.RMSNorm) -> bool:
        return False  # in half precision, autograd keeps a copy in single precision in place of the input


@register(nn.PReLU)
class PReLU(ScaleRule):
    """``max(x, 0) + w min(x, 0)`` with one slope or one per channel."""

    def scaled(self, module: nn.PReLU, x: Tensor, training: bool) -> Tensor:
        return x.clamp(max=0)

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        return bool(call.module.num_parameters == 1) or super().takes_steps(call, how)

    def least_dims(self, module: nn.PReLU) -> int:
        return 1 if module.num_parameters == 1 else 2
