"""Operations that broadcast an operand over the samples: ``x * p``, ``x + p``, ``p.expand(N, ...)``.

The bias of a convolution and the scale of a norm are such operands, too. The derivative in the operand is a number
times a factor::

    x - p        -1                 x * p          1, factor x
    x / p        -1, factor x/p^2   layer norm     1, factor: the normalised input
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.modules import _functions

from curvopt.core.graph.node_vjp import Edge
from curvopt.core.graph.nodes import Saved, name_of, operation, shape_of
from curvopt.core.graph.operations import FUSED_CELLS


class Broadcast(NamedTuple):
    """The derivative of an operation in the operand that it repeats.

    Attributes:
        scale: a number.
        factor: computes a factor from tensors.
        args: these tensors.
        linear: whether the operation is linear in the operand.
    """

    scale: float = 1.0
    factor: Callable[..., Tensor] | None = None
    args: tuple[Tensor, ...] = ()
    linear: bool = True


def broadcasts(node: Node) -> bool:
    """Whether an operation may repeat an operand."""
    return name_of(node) in _REPETITIONS


def broadcast_of(node: Node, position: int) -> Broadcast | None:
    """The derivative of an operation that `broadcasts` in an operand; ``None`` if it does not repeat that one."""
    return _REPETITIONS[name_of(node)](Saved(node), position)


def is_bias(node: Node, position: int, p: Tensor) -> bool:
    """Whether an operand has an entry for each output of a layer with rows for samples."""
    name = name_of(node)
    if name == "AddmmBackward0" and position == 0:
        return p.shape == shape_of(node)[1:] and Saved(node).beta == 1
    return name == "ConvolutionBackward0" and position == 2


#: Operands of a fused recurrent cell: the products of input and state with their weights, the state, and two biases.
_FIRST_BIAS = 3


def product_in_cell(node: Node, position: int) -> Edge | None:
    """The product to which a fused recurrent cell adds an operand; ``None`` if that is not a bias of such a cell."""
    if operation(node) not in FUSED_CELLS or position < _FIRST_BIAS:
        return None
    product, output_nr = node.next_functions[position - _FIRST_BIAS]
    return None if product is None else (product, output_nr)


def shape_among(node: Node, shape: torch.Size) -> torch.Size:
    """The shape of an operand as it is repeated, whose axes are the last ones of the output."""
    dims = len(shape_of(node))
    return torch.Size([*shape, *[1] * (dims - 2)]) if name_of(node) in _BY_CHANNELS else shape


#: Operations whose weight and bias belong to axis 1.
_BY_CHANNELS = frozenset(
    ["ConvolutionBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0", "SyncBatchNormBackward"]
)


def _quotient(saved: Saved, position: int) -> Broadcast:
    if position == 0:
        return Broadcast(1.0, torch.reciprocal, (saved.other,))
    return Broadcast(-1.0, _slope_of_quotient, (saved.self, saved.other), linear=False)


def _power(saved: Saved, position: int) -> Broadcast:
    slope = _slope_in_exponent if position else _slope_in_base
    return Broadcast(1.0, slope, (saved.self, saved.exponent), linear=False)


def _sum_with_product(saved: Saved, position: int) -> Broadcast:
    if position == 0:
        return Broadcast()
    return Broadcast(saved.value, _itself, (saved.tensor2 if position == 1 else saved.tensor1,))


def _interpolation(saved: Saved, position: int) -> Broadcast:
    if position == 2:
        return Broadcast(1.0, torch.sub, (saved.end, saved.self))
    return Broadcast(1.0, partial(torch.rsub, other=1) if position == 0 else _itself, (saved.weight,))


def _summand_of_product(saved: Saved, position: int) -> Broadcast | None:
    return Broadcast(saved.beta) if position == 0 else None


def _bias(saved: Saved, position: int) -> Broadcast | None:
    return Broadcast() if position == 2 else None


def _norm(scale: Callable[[Saved], Broadcast]) -> Callable[[Saved, int], Broadcast | None]:
    """An operation with a scale, and a bias behind it."""
    return lambda saved, position: scale(saved) if position == 1 else _bias(saved, position)


def _scale_of_layer_norm(saved: Saved) -> Broadcast:
    x = saved.input
    shape = (*x.shape[: x.dim() - len(saved.normalized_shape)], -1)
    return Broadcast(1.0, partial(_normalised, shape=shape, axes=[-1]), (x, saved.result2))


def _scale_of_group_norm(saved: Saved) -> Broadcast:
    x = saved.input
    return Broadcast(1.0, partial(_normalised, shape=(len(x), saved.group, -1), axes=[-1]), (x, saved.result2))


def _scale_of_batch_norm(saved: Saved) -> Broadcast:
    x = saved.input
    if not saved.training:
        return Broadcast(1.0, partial(F.batch_norm, eps=saved.eps), (x, saved.running_mean, saved.running_var))
    axes = [0, *range(2, x.dim())]
    return Broadcast(1.0, partial(_normalised, shape=x.shape, axes=axes), (x, saved.result2))


def _sync_batch_norm(saved: Saved, position: int) -> Broadcast | None:
    tensors = saved.of_function(_functions.SyncBatchNorm)
    if tensors is None or position != 1:
        return None if tensors is None else _bias(saved, position)
    x, _, mean, inverse, *_ = tensors
    return Broadcast(1.0, _standardised, (x, mean, inverse))


def _slope_of_quotient(x: Tensor, divisor: Tensor) -> Tensor:
    return x / divisor.square()


def _slope_in_base(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(exponent == 0, 0, exponent * x ** (exponent - 1))


def _slope_in_exponent(x: Tensor, exponent: Tensor) -> Tensor:
    return x**exponent * torch.where(x == 0, 1, x).log()


def _itself(factor: Tensor) -> Tensor:
    return factor


def _standardised(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Values by channels less their mean, times the inverse of their standard deviation."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    return (x - mean.view(shape)) * inverse.view(shape)


def _normalised(x: Tensor, inverse: Tensor, shape: Sequence[int], axes: list[int]) -> Tensor:
    """Values less their mean along some axes of another shape, times the inverse of their standard deviation."""
    x_shape, x = x.shape, x.reshape(shape)
    mean = x.mean(axes, keepdim=True)
    centred, inverse = x - mean, inverse.detach().reshape(mean.shape)
    if torch.is_grad_enabled():  # as a function of x: what was added to the variance is known from the inverse
        variance = centred.square().mean(axes, keepdim=True)
        inverse = (variance + (inverse**-2 - variance).detach()).rsqrt()
    return (centred * inverse).reshape(x_shape)


_REPETITIONS: dict[str, Callable[[Saved, int], Broadcast | None]] = {
    "ExpandBackward0": lambda saved, position: Broadcast(),
    "RepeatBackward0": lambda saved, position: Broadcast(),
    "AddBackward0": lambda saved, position: Broadcast(saved.alpha if position else 1.0),
    "SubBackward0": lambda saved, position: Broadcast(-saved.alpha if position else 1.0),
    "MulBackward0": lambda saved, position: Broadcast(1.0, _itself, (saved.self if position else saved.other,)),
    "DivBackward0": _quotient,
    "PowBackward1": _power,
    "WhereBackward0": lambda saved, position: Broadcast(
        1.0, _itself, (~saved.condition if position else saved.condition,)
    ),
    "PreluKernelBackward0": lambda saved, position: (
        Broadcast(1.0, partial(torch.clamp, max=0), (saved.self,)) if position == 1 else None
    ),
    "AddcmulBackward0": _sum_with_product,
    "LerpBackward0": lambda saved, position: Broadcast(saved.weight if position else 1 - saved.weight),
    "LerpBackward1": _interpolation,
    "AddmmBackward0": _summand_of_product,
    "BaddbmmBackward0": _summand_of_product,
    "ConvolutionBackward0": _bias,
    "NativeLayerNormBackward0": _norm(_scale_of_layer_norm),
    "NativeGroupNormBackward0": _norm(_scale_of_group_norm),
    "NativeBatchNormBackward0": _norm(_scale_of_batch_norm),
    "SyncBatchNormBackward": _sync_batch_norm,
}
