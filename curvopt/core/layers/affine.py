"""Rules of affine layers: each is the two views `unfold` and `fold`.

>>> layer, x = nn.Linear(3, 2), torch.ones(4, 7, 3)  # 4 samples, 7 tokens
>>> Linear().unfold(layer, x).shape  # [N, G, S, I]
torch.Size([4, 1, 7, 3])
>>> Linear().fold(layer, torch.ones(1, 4, 7, 2), x).shape  # [V, N, G, S, O]
torch.Size([1, 4, 1, 7, 2])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from curvopt.core.layers.rule import AffineRule, register
from curvopt.core.products.outer import Patches
from curvopt.core.record import ModuleCall


@register(nn.Linear)
class Linear(AffineRule):
    """``x W^T + b`` on the last axis, any number of shared axes before it."""

    any_axes = True
    reads = ()

    def unfold(self, module: nn.Module, x: Tensor) -> Tensor:
        x = x if x.layout == torch.strided else x.to_dense()
        return x.reshape(x.shape[0], 1, prod(x.shape[1:-1]), x.shape[-1])

    def fold(self, module: nn.Module, grad: Tensor, x: Tensor) -> Tensor:
        return grad.reshape(*grad.shape[:2], 1, prod(grad.shape[2:-1]), grad.shape[-1])

    def fits(self, module: nn.Linear) -> bool:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is None or weight.dim() < 2:
            return False
        return bias is None or bias.shape == (weight.shape[1 if self.transposed else 0],)  # other shapes are broadcast

    def least_dims(self, module: nn.Linear) -> int:
        return 2


@register("transformers.pytorch_utils.Conv1D")
class InputFirst(Linear):
    """``x W + b``, the layer of GPT-2: the weight ``[I, O]`` has the input's features first."""

    transposed = True


@register(nn.Bilinear)
class Bilinear(Linear):
    """``x W_o y + b_o`` is linear in the products of the entries of x and y: the weight acts on ``[I_x I_y]``."""

    def unfold(self, module: nn.Bilinear, x: Tensor, y: Tensor) -> Tensor:
        return super().unfold(module, torch.einsum("...i,...j->...ij", x, y).flatten(-2))

    def fold(self, module: nn.Bilinear, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return super().fold(module, grad, x)


class Convolution(AffineRule):
    """The common part of convolutions and transposed ones."""

    def fits(self, module: nn.Conv2d) -> bool:
        weight = module._parameters.get("weight")
        return weight is not None and weight.shape[2:] == module.kernel_size  # the forward reads that of the weight

    def least_dims(self, module: nn.Conv2d) -> int:
        return 2 + len(module.kernel_size)


def per_axis(setting: Any, axes: int) -> Sequence[int]:
    """A setting along each axis: assigned after construction, or in a list, it may be one number for all."""
    values = setting if isinstance(setting, Sequence) else (setting,)
    return values if len(values) == axes else [values[0]] * axes


def moves(module: nn.Conv2d | nn.ConvTranspose2d) -> list[Sequence[int]]:
    """Size, stride and dilation of a kernel, along each of its axes."""
    axes = len(module.kernel_size)
    return [module.kernel_size, per_axis(module.stride, axes), per_axis(module.dilation, axes)]


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Convolution):
    """A convolution is a matrix applied to patches (im2col); each group acts on its channels."""

    def unfold(self, module: nn.Conv2d, x: Tensor) -> Patches:
        return Patches(x, lambda x: rows_seen(module, self._padded(module, x)))

    def _padded(self, module: nn.Conv2d, x: Tensor) -> Tensor:
        mode = module.padding_mode
        amounts: list[int] = module._reversed_padding_repeated_twice  # what the forward reads in other modes
        if mode == "zeros" and module.padding == "same":
            sizes, _, dilations = moves(module)
            spans = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
            amounts = [amount for span in reversed(spans) for amount in (span // 2, span - span // 2)]
        elif mode == "zeros":
            around = per_axis(0 if module.padding == "valid" else module.padding, len(module.kernel_size))
            amounts = [amount for amount in reversed(around) for _ in range(2)]
        return F.pad(x, amounts, mode="constant" if mode == "zeros" else mode) if any(amounts) else x

    def fold(self, module: nn.Conv2d, grad: Tensor, x: Tensor) -> Tensor:
        V, N, channels, *positions = grad.shape
        return grad.reshape(V, N, module.groups, channels // module.groups, prod(positions)).mT

    def leaves_input(self, module: nn.Conv2d) -> bool:
        return super().leaves_input(module) and module.padding_mode == "zeros" and not isinstance(module.padding, str)


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(Convolution):
    """Every input position paints a patch of the output, so patches are taken of the vectors, not of the input.

    The weight ``[C_in, C_out / G, *kernel]`` has the input's channels first: its Kronecker factors are the second
    moment of the input ``[C_in / G, C_in / G]``, then that of the patches ``[C_out / G * K, C_out / G * K]``.
    """

    transposed = True

    def unfold(self, module: nn.ConvTranspose2d, x: Tensor) -> Tensor:
        return rearrange(x.flatten(2), "n (g c) s -> n g s c", g=module.groups)

    def fold(self, module: nn.ConvTranspose2d, grad: Tensor, x: Tensor) -> Tensor:
        amounts: list[int] = []
        paddings = per_axis(module.padding, len(module.kernel_size))
        for axis, (size, stride, dilation, padding) in enumerate(zip(*moves(module), paddings, strict=True), start=2):
            # pad (or crop) the output to what the patches of all input positions span, whatever output_padding added
            span = (x.shape[axis] - 1) * stride + dilation * (size - 1) + 1
            amounts = [padding, span - padding - grad.shape[1 + axis], *amounts]
        seen = Patches(F.pad(grad.flatten(0, 1), amounts), partial(rows_seen, module))
        return seen.whole.unflatten(0, grad.shape[:2])

    def bias(self, grad: Tensor, left: Tensor) -> Tensor:
        return grad.flatten(3).sum(3).unflatten(1, (left.shape[1], -1)).sum(2)


def rows_seen(module: nn.Conv2d | nn.ConvTranspose2d, x: Tensor) -> tuple[Tensor, int, int]:
    """The padded input as a kernel sees it: rows ``[N, G, C, R, T]``, K and the length of a row, see `Patches`.

    K are the kernel's entries along the first axis, if it moves there by one: each sees what the one before sees, a row
    further down. The R entries along the other axes are put beside each other, by a copy with positions last, which
    reads and writes whole rows of the image: an order of magnitude faster than patch by patch.
    """
    sizes, strides, dilations = moves(module)
    x, dim = x.unflatten(1, (module.groups, -1)), len(sizes)
    first = int(strides[0] == 1 and sizes[0] > 1)
    for axis in range(first, dim):
        spread = dilations[axis]
        x = x.unfold(3 + axis, spread * (sizes[axis] - 1) + 1, strides[axis])[..., ::spread]
    kernel, positions = range(3 + dim, x.dim()), range(3, 3 + dim)
    if not first:
        x = x.permute(1, 2, *kernel, 0, *positions).flatten(3 + dim).flatten(2, 1 + dim)
        return x.permute(3, 0, 1, 2, 4), 1, 0
    x = x.permute(0, 1, 2, *kernel, *positions)
    row = dilations[0] * prod(x.shape[x.dim() - dim + 1 :])
    return x.reshape(*x.shape[:3], prod(sizes[1:]), prod(x.shape[-dim:])), sizes[0], row


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

    def output_axis(self, call: ModuleCall, index: int) -> int:
        return 0 if self.shared else max(0, len(call.shapes[0]) - (1 if self.from_left else 2))
