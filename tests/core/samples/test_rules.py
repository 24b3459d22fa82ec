"""The table of operations: its rules put the batch axis where random vectors find it.

Tests of `core/samples/probe.py` and `core/nodes.py`, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from core.random_programs import STEPS
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.nodes import consumers_first, leaf_of, operation
from curvopt.core.operations import OPERATIONS
from curvopt.core.samples.axes import operand_layouts, propagate_batch_axis
from curvopt.core.samples.layout import UNUSED, AnyLayout, Layout, axis_of
from curvopt.core.samples.probe import probe_operands

long = torch.tensor
Make = Callable[..., Tensor | tuple[Tensor, ...]]

UNARY = (
    "abs acos acosh asin asinh atan atanh celu clone cos cosh digamma elu erf erfc exp exp2 expm1 gelu hardshrink "
    "hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 logsigmoid logit mish nan_to_num neg "
    "reciprocal "
    "relu rsqrt selu sigmoid silu sin sinc sinh softplus softshrink sqrt tan tanh tanhshrink"
).split()


def unary(name: str) -> Make:
    function = getattr(torch, name, None) or getattr(F, name)
    return lambda x: function(x + 1.1 if name == "acosh" else x)


#: what is done, with tensors of which shapes
CALLS: dict[str, tuple[Make, tuple[tuple[int, ...], ...]]] = {
    **{name: (unary(name), ((2, 3, 5),)) for name in UNARY},
    "add": (torch.add, ((2, 3, 5), (3, 1))),
    "sub": (lambda x, y: x - y, ((2, 3, 5), (5,))),
    "rsub": (lambda x: 1 - x, ((2, 3),)),
    "mul": (torch.mul, ((3, 5), (2, 3, 5))),
    "div": (torch.div, ((2, 3, 5), (2, 1, 5))),
    "pow": (lambda x, y: x**y, ((2, 3), (2, 3))),
    "float pow": (lambda x: x**3, ((2, 3),)),
    "atan2": (torch.atan2, ((2, 3), (2, 3))),
    "addcmul": (torch.addcmul, ((2, 3), (2, 3), (3,))),
    "addcdiv": (torch.addcdiv, ((2, 3), (2, 3), (3,))),
    "lerp": (torch.lerp, ((2, 3), (2, 3), (2, 3))),
    "clamp": (lambda x: x.clamp(-9, 9), ((2, 3),)),
    "clamp_max": (lambda x: torch.clamp_max(x, 9), ((2, 3),)),
    "clamp_min": (lambda x: torch.clamp_min(x, -9), ((2, 3),)),
    "maximum": (lambda x, y: torch.maximum(x + 1, y), ((2, 3), (2, 3))),
    "minimum": (lambda x, y: torch.minimum(x, y + 1), ((2, 3), (2, 3))),
    "masked_fill": (lambda x: x.masked_fill(x > 2, 0.0), ((2, 3),)),
    "where": (lambda x, y: torch.where(x > 0.5, x, y), ((4, 6), (4, 6))),
    "expand": (lambda x: x.expand(2, 3, 5), ((3, 1),)),
    "to": (lambda x: x.float().double(), ((2, 3),)),
    "alias": (lambda x: torch.ops.aten.alias(x), ((2, 3),)),
    "dropout": (lambda x: torch.native_dropout(x, 0.01, True)[0], ((2, 3),)),
    "rrelu": (lambda x: F.rrelu(x, training=True), ((2, 3),)),
    "threshold": (lambda x: F.threshold(x, -1, 0), ((2, 3),)),
    "prelu": (F.prelu, ((2, 3), (3,))),
    "logaddexp": (torch.logaddexp, ((2, 3), (2, 3))),
    "logaddexp2": (torch.logaddexp2, ((2, 3), (3,))),
    "xlogy": (torch.xlogy, ((2, 3), (2, 3))),
    "bce": (lambda x: F.binary_cross_entropy(x / 2, x.detach() / 3, reduction="none"), ((2, 3),)),
    "bce logits": (lambda x: F.binary_cross_entropy_with_logits(x, x.detach(), reduction="none"), ((2, 3),)),
    "huber": (lambda x, y: F.huber_loss(x, y, reduction="none"), ((2, 3), (2, 3))),
    "mse": (lambda x, y: F.mse_loss(x, y, reduction="none"), ((2, 3), (2, 3))),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), ((2, 3), (2, 3))),
    "soft margin": (lambda x: F.soft_margin_loss(x, x.detach().sign(), reduction="none"), ((2, 3),)),
    "view": (lambda x: x.view(6, 5), ((2, 3, 5),)),
    "unflatten": (lambda x: x.view(2, 3, 5), ((6, 5),)),
    "reshape alias": (lambda x: torch.ops.aten._reshape_alias(x, [6, 5], [5, 1]), ((2, 3, 5),)),
    "squeeze": (lambda x: x.squeeze(1), ((2, 1, 5),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), ((2, 5),)),
    "unsafe view": (lambda x: torch.ops.aten._unsafe_view(x, [6, 5]), ((2, 3, 5),)),
    "t": (lambda x: x.t(), ((2, 3),)),
    "transpose": (lambda x: x.transpose(-1, 0), ((2, 3, 5),)),
    "permute": (lambda x: x.permute(2, 0, -2), ((2, 3, 5),)),
    "mm": (torch.mm, ((2, 3), (3, 5))),
    "addmm": (torch.addmm, ((5,), (2, 3), (3, 5))),
    "mv": (torch.mv, ((2, 3), (3,))),
    "addmv": (torch.addmv, ((2,), (2, 3), (3,))),
    "bmm": (torch.bmm, ((2, 3, 5), (2, 5, 7))),
    "baddbmm": (torch.baddbmm, ((3, 1), (2, 3, 5), (2, 5, 7))),
    "convolution": (F.conv2d, ((2, 3, 4, 4), (5, 3, 3, 3), (5,))),
    "gradient of a convolution": (
        lambda x, w: torch.autograd.grad(F.conv2d(x, w).square().sum(), x, create_graph=True)[0],
        ((2, 3, 4, 4), (5, 3, 3, 3)),
    ),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), ((2, 3, 5, 5),)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), ((2, 3, 4, 4, 4),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), ((2, 3, 5, 5),)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), ((2, 3, 4, 4, 4),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), ((2, 3, 4, 4),)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), ((2, 3, 4, 4, 4),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], ((2, 3, 4, 4),)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), ((2, 3, 4, 4, 4),)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), ((2, 3, 4),)),
    "fractional 2d": (lambda x: F.fractional_max_pool2d(x, 2, output_size=2), ((2, 3, 5, 5),)),
    "fractional 3d": (lambda x: F.fractional_max_pool3d(x, 2, output_size=2), ((2, 3, 5, 5, 5),)),
    "unpool 2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ((2, 3, 4, 4),)),
    "unpool 3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), ((2, 3, 4, 4, 4),)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), ((3, 4, 2, 2),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), ((3, 4, 2, 2),)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), ((3, 4, 2, 2),)),
    "unfold of images": (lambda x: F.unfold(x, 2), ((2, 3, 4, 4),)),
    "fold": (lambda x: F.fold(x, (4, 4), 2, stride=2), ((2, 12, 4),)),
    "linear 1d": (lambda x: F.interpolate(x, 5, mode="linear"), ((2, 3, 4),)),
    "nearest 1d": (lambda x: F.interpolate(x, 8), ((2, 3, 4),)),
    "nearest exact 1d": (lambda x: F.interpolate(x, 8, mode="nearest-exact"), ((2, 3, 4),)),
    **{
        f"{mode} {anti}": (lambda x, m=mode, a=anti: F.interpolate(x, 8, mode=m, antialias=a), ((2, 3, 4, 4),))
        for mode, anti in (
            ("bilinear", False), ("bilinear", True), ("bicubic", False), ("bicubic", True), ("nearest", False),
            ("nearest-exact", False),
        )
    },
    **{
        f"{mode} 3d": (lambda x, m=mode: F.interpolate(x, 6, mode=m), ((2, 3, 4, 4, 4),))
        for mode in ("trilinear", "nearest", "nearest-exact")
    },
    "grid_sample": (lambda x, g: F.grid_sample(x, g - 0.5, align_corners=False), ((2, 3, 4, 4), (2, 3, 3, 2))),
    "grid_sample 3d": (lambda x, g: F.grid_sample(x, g - 0.5, align_corners=False), ((2, 3, 4, 4, 4), (2, 3, 3, 3, 3))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((3, 4, 5), (4,), (4,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), ((2, 3, 5), (5,), (5,))),
    "rms_norm": (lambda x, w: torch.ops.aten._fused_rms_norm(x, [5], w, 1e-5)[0], ((2, 3, 5), (5,))),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w, b), ((2, 3, 5), (3,), (3,)),
    ),
    **{
        name: (lambda x, f=name: getattr(torch, f)(x, 1)[0], ((2, 3, 5),)) for name in ("cummax", "cummin", "sort")
    },
    **{
        name: (lambda x, f=name: getattr(torch, f)(x, 1), ((2, 3, 5),))
        for name in ("cumsum", "cumprod", "softmax", "log_softmax", "logcumsumexp", "logsumexp", "mean", "sum", "nansum", "prod", "std", "var", "amax", "amin", "unbind")  # fmt: skip # noqa: E501
    },
    **{
        f"{name} over an axis": (lambda x, f=name: getattr(torch, f)(x, -2, True)[0], ((2, 3, 5),))
        for name in ("max", "min", "median", "mode")
    },
    "kthvalue": (lambda x: x.kthvalue(2, 1)[0], ((2, 3, 5),)),
    "topk": (lambda x: x.topk(2, 1)[0], ((2, 3, 5),)),
    "glu": (lambda x: F.glu(x, 1), ((2, 4, 5),)),
    "flip": (lambda x: x.flip(1), ((2, 3, 5),)),
    "roll": (lambda x: x.roll((1, 1), (1, 2)), ((2, 3, 5),)),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, 1), ((2, 3, 5),)),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=(0, 2)), ((2, 3, 5),)),
    "norm": (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]), ((2, 3, 5),)),
    "sum over two axes": (lambda x: x.sum((0, -1)), ((2, 3, 5),)),
    "select": (lambda x: x.select(1, -1), ((2, 3, 5),)),
    "slice": (lambda x: x[:, 1:4:2], ((2, 5, 3),)),
    "split": (lambda x: x.split([1, 3, 1], 1)[1], ((2, 5, 3),)),
    "split of equal parts": (lambda x: x.split(2, 0)[1], ((5, 3),)),
    "unsafe_split": (lambda x: torch.unsafe_split(x, 2, 0)[1], ((5, 3),)),
    "cat": (lambda x, y: torch.cat([x, y], 0), ((2, 3), (1, 3))),
    "cat of columns": (lambda x, y: torch.cat([x, y], -1), ((2, 3), (2, 4))),
    "stack": (lambda x, y: torch.stack([x, y, x], 1), ((2, 5), (2, 5))),
    "repeat": (lambda x: x.repeat(3, 1, 1), ((2, 5),)),
    "constant pad": (lambda x: F.pad(x, (1, 2)), ((2, 3, 5),)),
    **{
        f"{mode} pad {dims}": (lambda x, m=mode, d=dims: F.pad(x, (1, 1) * d, m), ((2, 3, *[4] * dims),))
        for mode in ("reflect", "replicate")
        for dims in (1, 2, 3)
    },
    "index": (lambda x: x[long([2, 0, 1])], ((3, 5),)),
    "index of the second axis": (lambda x: x[:, long([2, 0, 2])], ((2, 3, 5),)),
    "index by a mask": (lambda x: x[long([True, False, True])], ((3, 5),)),
    "index by a mask of two axes": (lambda x: x[long([[True, False], [True, True], [False, True]])], ((3, 2, 5),)),
    "index by pairs": (lambda x: x[long([0, 2, 1]), long([1, 1, 0])], ((3, 2, 5),)),
    "index_select": (lambda x: x.index_select(0, long([1, 2])), ((3, 5),)),
    "index_add": (lambda x, y: x.index_add(0, long([2, 0]), y), ((3, 5), (2, 5))),
    "index_copy": (lambda x, y: x.index_copy(1, long([2]), y), ((2, 3, 5), (2, 1, 5))),
    "gather": (lambda x: x.gather(1, long([[0, 2], [1, 1]])), ((2, 3),)),
    "scatter": (lambda x, y: x.scatter(1, long([[0, 2], [1, 0]]), y), ((2, 3), (2, 2))),
    "scatter_add": (lambda x, y: x.scatter_add(1, long([[0, 2], [1, 1]]), y), ((2, 3), (2, 2))),
    "select_scatter": (lambda x, y: x.select_scatter(y, 1, 0), ((2, 3), (2,))),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 0, 2), ((2, 3), (2, 2))),
    "embedding": (lambda w: F.embedding(long([[1, 0], [2, 2], [0, 1]]), w), ((4, 5),)),
    "embedding_bag": (lambda w: F.embedding_bag(long([[1, 0], [2, 2], [0, 1]]), w), ((4, 5),)),
    "attention": (F.scaled_dot_product_attention, ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))),
}  # fmt: skip

#: of which one axis of the weight may count samples, which the rules do not say
WEIGHTS = {"embedding", "embedding_bag", "batch_norm"}
#: operations of other devices, of compiled or quantised code, or that PyTorch's CPU build does not have
NOT_HERE = set(
    "ConvolutionOverrideable CudnnConvolution CudnnBatchNorm CudnnRnn MiopenBatchNorm MiopenRnn MkldnnRnnLayer "
    "MkldnnConvolution MkldnnAdaptiveAvgPool2D SlowConv2D Linear SyncBatchNorm ThnnFusedGruCell ThnnFusedLstmCell "
    "ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention "
    "ScaledDotProductFusedAttentionOverrideable Conj ConjPhysical ReshapeAlias FusedRmsNorm MaxPool2D".upper().split()
)


def call(name: str) -> tuple[Node, int, torch.Size]:
    """The node of an operation, which output of it is used, and its shape."""
    make, shapes = CALLS[name]
    torch.manual_seed(1)
    out = make(*(torch.rand(shape, dtype=torch.float64).mul(0.8).add(0.1).requires_grad_() for shape in shapes))
    out = out if isinstance(out, Tensor) else out[0]
    assert out.grad_fn is not None
    return out.grad_fn, out.output_nr, out.shape


def entries(layout: AnyLayout, N: int) -> list[int] | None:
    """The sample of each entry, if that is known."""
    if not isinstance(layout, Layout):
        return None
    labels = range(N) if layout.labels is None else layout.labels
    return [label for _ in range(layout.before) for label in labels for _ in range(layout.after)]


FAMILIES = {"unary": UNARY, **{name.split()[0]: [] for name in CALLS if name not in UNARY}}
for _name in CALLS.keys() - UNARY:
    FAMILIES[_name.split()[0]].append(_name)


@pytest.mark.parametrize("family", FAMILIES)
def test_propagated_is_probed(family: str):
    for name in sorted(FAMILIES[family]):
        propagated_is_probed(name)


def propagated_is_probed(name: str) -> None:
    node, nr, shape = call(name)
    told = [
        rule_is_probe(node, nr, Layout(prod(shape[:axis]), N, prod(shape[axis + 1 :])), N, f"{name}, axis {axis}")
        for axis, N in enumerate(shape)
        if N > 1
    ]
    assert any(told) or OPERATIONS[operation(node)].batch_axis == "embedding", name


def rule_is_probe(node: Node, nr: int, layout: Layout, N: int, name: str) -> bool:
    """Compare the layouts of operands by the rule of an operation and by random vectors; whether the rule tells any."""
    propagated, probed = operand_layouts(node, nr, layout, N), probe_operands(node, nr, layout, N)
    assert len(propagated) == len(probed) == len(node.next_functions)
    for (below, nr_below), one, other in zip(node.next_functions, propagated, probed, strict=True):
        mine, found = entries(one, N), entries(other, N)
        if below is None:
            continue
        if one is None:  # shared: no vector finds the samples apart
            assert name.split(",")[0] in WEIGHTS or found is None or set(found) - {UNUSED} <= {0}, name
        elif mine is not None and found is not None:
            pairs = [(a, b) for a, b in zip(mine, found, strict=True) if UNUSED not in (a, b)]
            assert all(a == b for a, b in pairs), f"{name}: {one} is not {other}"
        elif isinstance(one, Layout) and axis_of(below._input_metadata[nr_below].shape, one) is not None:
            assert other is not None, f"{name}: {one}, but the samples meet"
    return any(isinstance(one, Layout) for one in propagated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("N", [2, 7, 64, 130])
def test_samples_are_told_apart_in_any_precision(N: int, dtype: torch.dtype):
    """Compiled models compute in half precision under autocast, and are probed."""
    torch.manual_seed(0)
    x, weight = torch.randn(N, 5).to(dtype).requires_grad_(), torch.randn(4, 5).to(dtype)
    rows, order = Layout(1, N, 4), torch.randperm(N)

    def probed(out: Tensor, layout: Layout) -> AnyLayout:
        assert out.grad_fn is not None
        return probe_operands(out.grad_fn, 0, layout, N)[0]

    assert probed(torch._C._nn.linear(x, weight), rows) == Layout(1, N, 5)
    assert probed(x.movedim(0, 1), Layout(5, N, 1)) == Layout(1, N, 5)
    assert entries(probed(x[order], Layout(1, N, 5)), N) == [
        int(order.argsort()[n]) for n in range(N) for _ in range(5)
    ]
    for mixing in (x.cumsum(0), torch.randn(N, N).to(dtype) @ x):
        assert probed(mixing, Layout(1, N, 5)) is None
    assert probed(x.cumsum(1), Layout(1, N, 5)) == Layout(1, N, 5)


def test_all_operations_of_the_table_are_tried():
    tried = set()
    for name in CALLS:
        nodes = [call(name)[0]]
        while nodes:
            node = nodes.pop()
            tried.add(operation(node))
            nodes += [below for below, _ in node.next_functions if below is not None and leaf_of(below) is None]
    in_table = {name for name, known in OPERATIONS.items() if known.batch_axis is not None}
    of_gradients = {name for name in in_table if name.endswith("BACKWARD")}
    assert sorted(in_table - tried - NOT_HERE - of_gradients) == []


@pytest.mark.parametrize("seed", range(20))
def test_layouts_of_random_graphs_hold_whatever_the_values_are(seed: int):
    """Zeros and ones, by which samples do not meet yet, give the layouts of random numbers; rules equal the probe."""
    names = random.Random(seed).choices(list(STEPS), k=6)
    torch.manual_seed(seed)
    x, numbers = torch.rand(4, 3, 5, dtype=torch.float64), torch.rand(6, 5, 5, dtype=torch.float64)
    found = []
    for values in (torch.zeros_like(numbers), torch.eye(5).double().expand_as(numbers), numbers):
        out = x.requires_grad_()
        for name, value in zip(names, values, strict=True):
            out = STEPS[name](out, value)
        assert out.grad_fn is not None
        axes = propagate_batch_axis({(out.grad_fn, 0): Layout(1, 4, 15)}, 4)
        order = [(node, nr) for node in consumers_first([out.grad_fn]) for nr in range(len(node._input_metadata))]
        found.append([axes.layouts.get(place) for place in order])
    assert found[0] == found[1] == found[2], names
    for (node, nr), layout in zip(order, found[2], strict=True):
        if isinstance(layout, Layout) and node.next_functions:
            rule_is_probe(node, nr, layout, 4, f"{names}: {node.name()}")
        for n, row in enumerate(out.flatten(1).cos().sum(1)) if isinstance(layout, Layout) else ():
            (grad,) = torch.autograd.grad(row, GradientEdge(node, nr), retain_graph=True)
            samples = torch.tensor(entries(layout, 4)).view(grad.shape)
            assert not grad[samples != n].any(), f"{names}: {node.name()} is {layout}"
