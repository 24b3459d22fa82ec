"""Operations of the graph as calls of a layer, or as operations that repeat an operand for the samples.

Products, convolutions and lookups are calls of a layer, whatever function made them: ``F.linear(x, W)``, ``x @ W``,
``torch.einsum``. Others repeat an operand: ``x * p``, ``x + p``, the bias of a convolution, the scale of a norm. The
derivative in such an operand is a number times a factor::

    x - p        -1                 x * p          1, factor x
    x / p        -1, factor x/p^2   layer norm     1, factor: the normalised input

>>> x, W = torch.ones(4, 3), nn.Parameter(torch.ones(3, 2))
>>> node = (x @ W).grad_fn
>>> call = layer_call(node, 1, torch.empty(3, 2, device="meta"), W.shape)
>>> call.rule.unfold(call.module, call.input).shape  # [N, G, S, I], as of a linear layer
torch.Size([4, 1, 1, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules import _functions

from curvopt.core.layers.affine import Conv, ConvTranspose, Product
from curvopt.core.layers.embedding import Embedding
from curvopt.core.layers.rule import Rule
from curvopt.core.nodes import Edge, Saved, leaf_of, name_of, operation, outputs_of, shape_of, signed
from curvopt.core.operations import FUSED_CELLS
from curvopt.core.record import ModuleCall


class ParameterCall(ModuleCall):
    """An operation read off the graph.

    Args:
        path: of the module in which it was called.
        module: for the rule: one that would compute the same.
        args: tensors that the node saved.
        shape: of the output.
        owner: the module in which it was called.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Tensor, ...],
        shape: torch.Size,
        owner: nn.Module,
    ):
        """Record the saved tensors."""
        self.path, self.model_call, self.module, self.owner = path, None, module, owner
        self._args, self.kwargs = args, {}
        self.versions, self.boundary, self.steps = [x._version for x in args], frozenset(), None
        self.training = module.training
        self.shapes, self.cache, self.settings, self.seen = (shape,), {}, None, tuple(module._parameters.values())


def view_of(operand: GradientEdge) -> tuple[GradientEdge, Tensor]:
    """The tensor of which an operand is a view, and that view without values: strides and offset tell the entries."""
    edges: list[Edge] = [(operand.node, operand.output_nr)]
    while name_of(edges[-1][0]) in _VIEWS | _MOVES:
        edges.append(edges[-1][0].next_functions[0])  # type: ignore[arg-type]
    base = edges.pop()
    seen = torch.empty(shape_of(*base), device="meta")
    while edges:
        edge = edges.pop()
        view = viewed(*edge, seen)
        base, seen = (edge, torch.empty(shape_of(*edge), device="meta")) if view is None else (base, view)
    return GradientEdge(*base), seen


def viewed(node: Node, output_nr: int, x: Tensor) -> Tensor | None:
    """An output of an operation that views its operand, from a tensor without values; ``None`` for other operations."""
    name, saved = name_of(node), Saved(node)
    if name == "SplitBackward0":
        return x.split(saved.split_size, signed(saved.dim))[output_nr]
    if name == "SplitWithSizesBackward0":
        return x.split(saved.split_sizes, signed(saved.dim))[output_nr]
    if name == "SliceBackward0" and saved.step == 1:
        start, end = (signed(row) for row in (saved.start, saved.end))
        return x.movedim(signed(saved.dim), 0)[start:end].movedim(0, signed(saved.dim))
    if name == "TBackward0":
        return x.t()
    if name == "TransposeBackward0":
        return x.transpose(signed(saved.dim0), signed(saved.dim1))
    if name == "PermuteBackward0":
        return x.permute([signed(dim) for dim in saved.dims])
    if name not in _VIEWS:
        return None
    shape = shape_of(node)
    try:
        return x.expand(shape) if name == "ExpandBackward0" else x.view(shape)
    except RuntimeError:  # the entries were copied
        return None


_MOVES = frozenset(f"{name}Backward0" for name in ("Split", "SplitWithSizes", "Slice", "T", "Transpose", "Permute"))
_VIEWS = frozenset(
    [
        *(f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias")),
        *("SqueezeBackward1", "SqueezeBackward2", "ToCopyBackward0", "ExpandBackward0"),
    ]
)


class LayerCall(NamedTuple):
    """An operation as a call of a layer.

    Attributes:
        rule: of the layer.
        module: with the settings that the rule reads, without parameters.
        input: the input.
        start: the first row of the parameter that is the weight, if not all of them are.
    """

    rule: Rule
    module: nn.Module
    input: Tensor
    start: int | None = None


def layer_call(node: Node, position: int, weight: Tensor, shape: torch.Size) -> LayerCall | None:
    """An operation as a call of a layer, ``None`` if it is none.

    Args:
        node: of the operation.
        position: of the operand that is the weight.
        weight: the view of it that the operation uses, without values.
        shape: shape of the parameter of which the operation sees this.
    """
    return _LAYERS[name_of(node)](node, position, weight, shape) if is_layer(node) else None


def is_layer(node: Node) -> bool:
    """Whether an operation may be a call of a layer."""
    return name_of(node) in _LAYERS


#: Position of the first of two matrices, and the names by which they are saved.
_PRODUCTS = {
    "MmBackward0": (0, "self", "mat2"),
    "MvBackward0": (0, "self", "vec"),
    "AddmmBackward0": (1, "mat1", "mat2"),
    "BmmBackward0": (0, "self", "mat2"),
    "BaddbmmBackward0": (1, "batch1", "batch2"),
}


def _matrices(weight: Tensor, shape: torch.Size, from_left: bool) -> tuple[bool, bool, int | None] | None:
    """Whether a batch of matrices is one that is repeated, and whether a parameter of a shape has O axes last.

    Besides, the first row of the parameter that is seen, if not all of them are (packed weights).
    """
    G, *sizes = weight.shape if weight.dim() == 3 else (1, *weight.shape)
    (O, I), (by_O, by_I) = (  # noqa: E741
        pair if from_left else pair[::-1] for pair in (sizes, weight.stride()[-2:])
    )
    shared, start, offset = G > 1 and weight.stride(0) == 0, None, int(weight.storage_offset())
    if (shared or G == 1) and len(shape) == 2 and O < shape[0] and I == shape[1] and offset % I == 0:
        start, shape = offset // I, torch.Size([O, I])
    if (1 if shared else G) * O * I != shape.numel() or not (shared or G == 1 or weight.stride(0) == O * I):
        return None
    plain, transposed = (
        (b == 1 or by_b == 1) and (a == 1 or by_a == b) for a, b, by_a, by_b in ((O, I, by_O, by_I), (I, O, by_I, by_O))
    )
    if plain and transposed:
        transposed = shape[0] == I != O
    if not (plain or transposed) or (transposed and start is not None):
        return None
    return shared, transposed, start


def _product(node: Node, position: int, weight: Tensor, shape: torch.Size) -> LayerCall | None:
    (first, *sides), saved = _PRODUCTS[name_of(node)], Saved(node)
    from_left = position == first
    if position < first or (first and saved.alpha != 1) or (from_left and name_of(node) == "MvBackward0"):
        return None
    kind, other = _matrices(weight if weight.dim() > 1 else weight.unsqueeze(1), shape, from_left), sides[from_left]
    if kind is None or getattr(saved, other).layout != torch.strided:  # a sparse matrix of neighbours, say
        return None
    *kind, start = kind
    return LayerCall(Product(from_left, *kind), nn.Module(), getattr(saved, other), start)


def _convolution(node: Node, position: int, weight: Tensor, shape: torch.Size) -> LayerCall | None:
    if position != 1 or not weight.is_contiguous() or weight.numel() != shape.numel():
        return None
    saved = Saved(node)
    rule, module = _convolution_layer(saved, saved.transposed, weight)
    return LayerCall(rule, module, saved.input)


def _slope_of_convolution(node: Node, position: int, weight: Tensor, shape: torch.Size) -> LayerCall | None:
    """The gradient by a convolution's input: a transposed one, with the same weight, of what arrived at its output."""
    saved, metadata = Saved(node), outputs_of(node)
    by_input = not any(len(further.shape) for further in metadata[1:])  # else by the weight, too
    if position != 2 or not by_input or not weight.is_contiguous() or weight.numel() != shape.numel():
        return None
    if saved.transposed and any(a >= b for a, b in zip(saved.output_padding, saved.stride, strict=True)):
        return None  # rows that no input has painted
    rule, module = _convolution_layer(saved, not saved.transposed, weight)
    return LayerCall(rule, module, saved.grad_output)


def _convolution_layer(saved: Saved, transposed: bool, weight: Tensor) -> tuple[Rule, nn.Module]:
    """Rule and settings of a convolution, or of a transposed one, with the settings that a node saved."""
    first, second, *kernel = weight.shape
    plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    kinds: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d) if transposed else plain
    sides = (first, second * saved.groups)
    channels = sides if transposed else sides[::-1]
    settings = {name: getattr(saved, name) for name in ("stride", "padding", "dilation", "groups")}
    module = kinds[len(kernel) - 1](*channels, tuple(kernel), bias=False, device="meta", **settings)
    return ConvTranspose() if transposed else Conv(), module


def _lookup(node: Node, position: int, weight: Tensor, shape: torch.Size) -> LayerCall | None:
    saved = Saved(node)
    if saved.scale_grad_by_freq or weight.shape != shape or not weight.is_contiguous():
        return None
    module, padding = nn.Embedding(1, 1, device="meta"), saved.padding_idx
    module.padding_idx = padding if padding is not None and 0 <= padding < len(weight) else None
    return LayerCall(Embedding(), module, saved.indices)


def lookup_of(operand: GradientEdge, p: Tensor) -> LayerCall | None:
    """The lookup by which a shared operand picks rows of a matrix, as an embedding of positions does; else ``None``."""
    base, seen = view_of(operand)
    picks = _LAYERS.get(name_of(base.node)) in (_lookup, _indexed) and leaf_of(base.node.next_functions[0][0]) is p
    if not picks or p.dim() != 2 or seen.numel() != shape_of(base.node).numel() or not seen.is_contiguous():
        return None
    call = layer_call(base.node, 0, torch.empty(p.shape, device="meta"), p.shape)
    if call is not None:
        call.module._parameters["weight"] = p  # type: ignore[assignment]
    return call


def _indexed(node: Node, position: int, weight: Tensor, shape: torch.Size) -> LayerCall | None:
    x = _index(node)
    if x is None or weight.dim() > 2 or weight.shape != shape or not weight.is_contiguous():
        return None
    module = nn.Embedding(1, 1, device="meta")
    return LayerCall(Embedding(), module, x)


def _index(node: Node) -> Tensor | None:
    """The integers by which rows are picked, and nothing else."""
    saved = Saved(node)
    if name_of(node) == "IndexSelectBackward0":
        return saved.index if saved.dim == 0 else None
    x, *further = saved.indices
    return None if x is None or further or x.dtype not in (torch.int32, torch.int64) else x


_LAYERS: dict[str, Callable[[Node, int, Tensor, torch.Size], LayerCall | None]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    "ConvolutionBackward0": _convolution,
    "ConvolutionBackwardBackward0": _slope_of_convolution,
    "EmbeddingBackward0": _lookup,
    "IndexBackward0": _indexed,
    "IndexSelectBackward0": _indexed,
}


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
    """Values less their mean along axes of another shape, times the inverse of their standard deviation."""
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
    "AddcmulBackward0": _sum_with_product,
    "AddmmBackward0": _summand_of_product,
    "BaddbmmBackward0": _summand_of_product,
    "ConvolutionBackward0": _bias,
    "NativeLayerNormBackward0": _norm(_scale_of_layer_norm),
    "NativeGroupNormBackward0": _norm(_scale_of_group_norm),
    "NativeBatchNormBackward0": _norm(_scale_of_batch_norm),
    "SyncBatchNormBackward": _sync_batch_norm,
}
