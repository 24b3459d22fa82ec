"""The one table of operations, by their names in the autograd graph.

>>> OPERATIONS["TANH"]
Operation(batch_axis='elementwise', second_derivative='elementwise')

To add an operation, add its name to a row. The name is that of its node without ``Backward0``: ``TanhBackward0`` is
``Tanh``. An operation that is missing costs time, never correctness: its batch axis is probed in each backward, and its
second derivative comes from double backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.autograd.graph import GradientEdge, Node

from curvopt.core.nodes import consumers_first, is_complex, operation, saved


class Operation(NamedTuple):
    """The knowledge of an operation.

    Attributes:
        batch_axis: how the batch axis of its output follows that of its operands, the name of a rule in
            `curvopt.core.samples.rules`; ``None`` where nothing is known.
        second_derivative: ``"linear"`` (or piecewise linear) in all operands together: the second derivative is zero.
            ``"multilinear"``: linear in each operand by itself. ``"elementwise"``: a function of single entries, whose
            second derivative is diagonal. ``None`` for any other.
    """

    batch_axis: str | None
    second_derivative: str | None


_ROWS = """
batch axis     | second derivative | operations

elementwise    | linear      | Abs Add Alias Clamp ClampMax ClampMin Clone Conj ConjPhysical Expand Hardshrink
elementwise    | linear      | Hardsigmoid Hardtanh LeakyRelu MaskedFill Maximum Minimum NanToNum NativeDropout Neg
elementwise    | linear      | Relu RreluWithNoise Rsub Softshrink Sub Threshold ToCopy Where
elementwise    | multilinear | Addcmul Lerp Mul PreluKernel
elementwise    | elementwise | Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Digamma Elu Erf Erfc Exp Exp2 Expm1 Gelu
elementwise    | elementwise | Hardswish Lgamma Log Log10 Log1P Log2 LogSigmoid Logit Mish Pow Reciprocal Rsqrt
elementwise    | elementwise | Sigmoid Silu Sin Sinc Sinh Softplus Sqrt Tan Tanh
elementwise    | -           | Addcdiv Atan2 BinaryCrossEntropy BinaryCrossEntropyWithLogits Div HuberLoss LogAddExp
elementwise    | -           | LogAddExp2 MseLoss SmoothL1Loss SoftMarginLoss Xlogy
elementwise    | -           | EluBackward GeluBackward HardswishBackward HardtanhBackward LeakyReluBackward
elementwise    | -           | LogSigmoidBackward SigmoidBackward SoftplusBackward
elementwise    | -           | TanhBackward ThresholdBackward

view           | linear      | ReshapeAlias Squeeze UnsafeView Unsqueeze View
t              | linear      | T
transpose      | linear      | Transpose
permute        | linear      | Permute
matmul         | multilinear | Addmm Addmv Mm Mv
bmm            | multilinear | Baddbmm Bmm
linear         | multilinear | Linear
rows           | multilinear | Convolution ConvolutionOverrideable CudnnConvolution MkldnnConvolution SlowConv2D
rows           | -           | ConvolutionBackward NativeGroupNorm
images         | linear      | AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D
images         | linear      | AvgPool3D ChannelShuffle Col2Im FractionalMaxPool2D FractionalMaxPool3D Im2Col
images         | linear      | MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices MaxUnpool2D MaxUnpool3D
images         | linear      | MkldnnAdaptiveAvgPool2D PixelShuffle PixelUnshuffle UpsampleBicubic2D
images         | linear      | UpsampleBicubic2DAA UpsampleBilinear2D UpsampleBilinear2DAA UpsampleLinear1D
images         | linear      | UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D
images         | linear      | UpsampleNearestExact2D UpsampleNearestExact3D UpsampleTrilinear3D
images         | -           | GridSampler2D GridSampler3D
layer_norm     | -           | FusedRmsNorm NativeLayerNorm
batch_norm     | multilinear | CudnnBatchNorm MiopenBatchNorm NativeBatchNorm
sync_batch_norm | -          | SyncBatchNorm
along          | linear      | Cummax Cummin Cumsum Flip Roll Sort Topk
along          | -           | Cumprod Glu LogSoftmax Logcumsumexp SafeSoftmax Softmax
reduce         | linear      | Amax Amin Kthvalue Max Mean Median Min Mode Nansum Sum
reduce         | -           | LinalgVectorNorm Logsumexp Norm Prod Std Var
select         | linear      | Select Unbind
slice          | linear      | Slice
split          | linear      | Split SplitWithSizes UnsafeSplit
cat            | linear      | Cat
stack          | linear      | Stack
repeat         | linear      | Repeat
pad            | linear      | ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D
pad            | linear      | ReplicationPad2D ReplicationPad3D
index          | linear      | Index
index_select   | linear      | IndexSelect
index_add      | linear      | IndexAdd IndexCopy
gather         | linear      | Gather
embedding      | linear      | Embedding
embedding      | -           | EmbeddingBag
attention      | -           | ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention
attention      | -           | ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu
attention      | -           | ScaledDotProductFusedAttentionOverrideable
recurrent      | -           | CudnnRnn MiopenRnn MkldnnRnnLayer
cell           | -           | ThnnFusedGruCell ThnnFusedLstmCell

-              | linear      | AsStrided BlockDiag DiagEmbed Diagonal FFTC2C FFTC2R FFTR2C IndexFill IndexPut
-              | linear      | MaskedScatter MaskedSelect NllLoss NllLoss2D Rot90 Scatter ScatterAdd SelectScatter
-              | linear      | SliceScatter Take Trace Tril Triu Unfold ViewAsComplex ViewAsReal
-              | multilinear | Addbmm Addr Dot Trilinear
"""


def _table() -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for row in _ROWS.strip().splitlines()[1:]:
        if row:
            batch_axis, second, names = (None if (cell := part.strip()) == "-" else cell for part in row.split("|"))
            table.update((name.upper(), Operation(batch_axis, second)) for name in str(names).split())
    return table


#: By upper-case names.
OPERATIONS = _table()
UNKNOWN_OPERATION = Operation(None, None)


def _with_second_derivative(kind: str) -> frozenset[str]:
    return frozenset(name for name, known in OPERATIONS.items() if known.second_derivative == kind)


#: Names of operations by their second derivative (see `Operation`).
LINEAR, MULTILINEAR, ELEMENTWISE = map(_with_second_derivative, ("linear", "multilinear", "elementwise"))
#: Batch norms. In train mode they mix samples.
BATCH_NORMS = frozenset(
    name for name, known in OPERATIONS.items() if known.batch_axis in ("batch_norm", "sync_batch_norm")
)
#: `torch.nn.LSTMCell` and `torch.nn.GRUCell` in one operation, as GPUs compute them.
FUSED_CELLS = frozenset(name for name, known in OPERATIONS.items() if known.batch_axis == "cell")
#: Losses that have the samples along axis 1.
TIME_FIRST = frozenset(["CTCLOSS", "CUDNNCTCLOSS"])
#: Operations that leave entries where they are.
BY_ENTRY = frozenset(name for name, known in OPERATIONS.items() if known.batch_axis == "elementwise")


class Residual(NamedTuple):
    """A nonlinear operation: its node, the edges of its inputs that depend on parameters, and whether R is diagonal."""

    node: Node
    outputs: list[int]
    inputs: list[GradientEdge]
    diagonal: bool


def nonlinear_operations(roots: Sequence[GradientEdge], calls: set[Node]) -> list[Residual]:
    """The operations between the roots and the outputs of calls that add a residual.

    Args:
        roots: where the network's outputs come from.
        calls: nodes of the outputs of all calls.

    >>> import torch
    >>> h = 2 * torch.ones(3, requires_grad=True)  # the output of a layer
    >>> z = 3 * h.tanh()
    >>> [operation(each.node) for each in nonlinear_operations([GradientEdge(z.grad_fn, 0)], {h.grad_fn})]
    ['TANH']
    """
    order = consumers_first([root.node for root in roots])[::-1]  # inputs before what they feed
    reached: dict[Node, set[int]] = {}
    for node, nr in [*((root.node, root.output_nr) for root in roots), *(e for n in order for e in n.next_functions)]:
        if node is not None:
            reached.setdefault(node, set()).add(nr)
    dependent: set[Node] = set()
    found: list[Residual] = []
    for node in order:
        inputs = {(f, nr): GradientEdge(f, nr) for f, nr in node.next_functions if f is not None and f in dependent}
        links = sum(1 for f, _ in node.next_functions if f is not None and f in dependent)
        if inputs or node in calls:
            dependent.add(node)
        name = operation(node)
        linear = name in LINEAR or (name in MULTILINEAR and links == 1)
        if not inputs or (linear and not _curved(node, name)):
            continue
        if name == "DIV" and links == 1 and node.next_functions[0][0] in dependent:
            continue  # linear in the numerator
        diagonal = links == 1 and (name in ELEMENTWISE or name == "DIV")
        found.append(Residual(node, sorted(reached[node]), list(inputs.values()), diagonal))
    return found


def _curved(node: Node, name: str) -> bool:
    """Whether an operation is nonlinear although its name is among the linear or multilinear ones."""
    if name == "ABS":  # of complex numbers
        following, nr = node.next_functions[0]
        return following is not None and is_complex(following, nr)
    return name.endswith("BATCHNORM") and bool(saved(node, "training", False))  # of single samples: instance norm
