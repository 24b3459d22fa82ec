"""Rules of affine layers: each is the two views `unfold` and `fold`."""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from curvopt.core.derivatives.rules import AffineRule, register


@register(nn.Linear)
class Linear(AffineRule):
    """``x W^T + b`` on the last axis, any number of shared axes before it."""

    def unfold(self, module: nn.Linear, x: Tensor) -> Tensor:  # noqa: D102
        return x.reshape(x.shape[0], 1, prod(x.shape[1:-1]), x.shape[-1])

    def fold(self, module: nn.Linear, grad: Tensor) -> Tensor:  # noqa: D102
        return grad.reshape(*grad.shape[:2], 1, prod(grad.shape[2:-1]), grad.shape[-1])


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(AffineRule):
    """A convolution is a matrix applied to patches (im2col); groups act on their own channels."""

    def unfold(self, module: nn.Conv2d, x: Tensor) -> Tensor:  # noqa: D102
        return rearrange(patches(module, x), "n (g c) s k -> n g s (c k)", g=module.groups)

    def fold(self, module: nn.Conv2d, grad: Tensor) -> Tensor:  # noqa: D102
        return rearrange(grad.flatten(3), "v n (g o) s -> v n g s o", g=module.groups)


def patches(module: nn.Conv2d, x: Tensor) -> Tensor:
    """What the kernel sees, ``[N, C, S, K]`` for S output positions and K kernel entries: one strided view of the padded input."""
    dim = len(module.kernel_size)
    # the module's own padding amounts, which also serve padding="same"; F.pad wants the last axis first
    amounts = module._reversed_padding_repeated_twice
    if any(amounts):
        x = F.pad(x, amounts, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    for axis, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.flatten(2 + dim).flatten(2, 1 + dim)
