r"""Curvature that nonlinear operations add to the Gauss-Newton matrix.

The Hessian of ``L(f(w))`` is ``J^T (\nabla^2 L) J`` plus, for every nonlinear operation ``b = h(a)`` of the network,
the residual ``J_a^T R J_a`` with ``R = \nabla_a^2 (g^T h(a))`` and g the gradient at b. Operations are read off the
autograd graph, so functional code counts. R is local: it is evaluated by differentiating the operation's own
backward, and travels on as columns ``u`` with weights: ``R = sum_v w_v u_v u_v^T``, sample by sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.eigen import eigh
from curvopt.core.uses import listen, unheard

Modify = Literal["clip", "abs"] | None
_engine = torch.autograd.Variable._execution_engine

# Names of autograd nodes. Linear or piecewise linear in all of their inputs together:
LINEAR = frozenset(
    """Abs Add Alias Amax Amin AsStrided BlockDiag Cat ChannelShuffle Clamp ClampMax ClampMin Clone ConstantPadNd Cummax
    Cummin Cumsum Diagonal DiagEmbed Embedding Expand FFTC2C FFTC2R FFTR2C Flip Gather Hardshrink Hardsigmoid Hardtanh
    Im2Col Col2Im Index IndexAdd IndexCopy IndexFill IndexPut IndexSelect Kthvalue LeakyRelu MaskedFill MaskedScatter
    MaskedSelect Max Maximum Mean Median Min Minimum NanToNum Nansum NativeDropout Neg Permute PixelShuffle
    PixelUnshuffle ViewAsComplex ViewAsReal Conj ConjPhysical ReflectionPad1D ReflectionPad2D ReflectionPad3D Relu
    Repeat ReplicationPad1D ReplicationPad2D ReplicationPad3D ReshapeAlias Roll Rot90 Rsub Scatter ScatterAdd Select
    SelectScatter Slice SliceScatter Softshrink Sort Split SplitWithSizes Squeeze Stack Sub Sum T Take Threshold
    ToCopy Topk Trace Transpose Tril Triu Unbind Unfold UnsafeSplit UnsafeView Unsqueeze UpsampleNearest1D
    UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D UpsampleNearestExact3D
    UpsampleLinear1D UpsampleBilinear2D UpsampleBilinear2DAA UpsampleBicubic2D UpsampleBicubic2DAA UpsampleTrilinear3D
    View Where
    AdaptiveAvgPool2D AdaptiveAvgPool3D MkldnnAdaptiveAvgPool2D AvgPool2D AvgPool3D AdaptiveMaxPool2D
    AdaptiveMaxPool3D MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices MaxUnpool2D MaxUnpool3D RreluWithNoise
    FractionalMaxPool2D FractionalMaxPool3D""".upper().split()
)
# Linear in each input by itself: nothing is added while only one of them depends on parameters upstream.
MULTILINEAR = frozenset(
    """Addbmm Addcmul Addmm Addmv Addr Baddbmm Bmm Convolution ConvolutionOverrideable CudnnConvolution Dot Lerp Linear
    MkldnnConvolution Mm Mul Mv PreluKernel SlowConv2D Trilinear
    NativeBatchNorm CudnnBatchNorm MiopenBatchNorm""".upper().split()
)
# Functions of single entries: the residual is diagonal.
ELEMENTWISE = frozenset(
    """Celu Cos Cosh Elu Erf Erfc Exp Exp2 Expm1 Gelu Hardswish Log Log10 Log1P Log2 LogSigmoid
    Logit Mish Pow Reciprocal Rsqrt Sigmoid Silu Sin Sinc Sinh Softplus Sqrt Tan Tanh
    Atan Asin Acos Asinh Acosh Atanh Digamma Lgamma""".upper().split()
)


# Leave entries where they are.
BY_ENTRY = ELEMENTWISE | frozenset(
    """Abs Add Addcdiv Addcmul Alias Clamp ClampMax ClampMin Clone Div Hardsigmoid Hardtanh LeakyRelu MaskedFill Maximum
    Minimum Mul NativeDropout Neg PreluKernel Relu Rsub Sub Threshold ToCopy Where""".upper().split()
)


def operation(node: Node) -> str:
    """Upper-case name of the operation a node differentiates, e.g. ``TANH``; functions of users keep a small letter."""
    name = name_of(node).rsplit("::", 1)[-1]
    if is_sink(node) or (isinstance(node, BackwardCFunction) and name == "BackwardHookFunctionBackward"):
        return "ALIAS"  # PyTorch's own functions: the latter is for full backward hooks of modules
    if isinstance(node, BackwardCFunction):
        return "SYNCBATCHNORM" if name == "SyncBatchNormBackward" else f"user's {name}"
    return re.sub(r"BACKWARD\d*$", "", name.upper())


def name_of(node: Node) -> str:
    """The name of a node, whose own attribute of that name is a user's if it is a user's function."""
    return type(node).name(node)


def leaf_of(node: Node | None) -> Any:
    """The leaf tensor whose gradient a node accumulates, if it does; what users keep on their functions is none."""
    return None if isinstance(node, BackwardCFunction) else getattr(node, "variable", None)


def is_sink(node: Node) -> bool:
    """Whether a node is the identity that ``DistributedDataParallel`` may put behind the outputs of its module."""
    return isinstance(node, BackwardCFunction) and name_of(node) == "_DDPSinkBackward"


def walk(roots: list[Node], boundary: frozenset = frozenset(), last: Collection[Node] = ()) -> Iterator[Node]:
    """Every node reachable from ``roots``, once; nodes of ``boundary`` are not entered, those of ``last`` not left."""
    stack = [root for root in dict.fromkeys(roots) if root not in boundary]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in () if node in last else node.next_functions:
            if following is not None and following not in seen and following not in boundary:
                seen.add(following)
                stack.append(following)


def leads_to(root: Node, targets: Collection[Node]) -> bool:
    """Whether any of some nodes lies behind ``root``, or is it."""
    return root in targets or leads_further_to(root, targets)


def leads_further_to(root: Node, targets: Collection[Node]) -> bool:
    """Whether any of some nodes lies behind ``root``; the nearest are looked at first."""
    nodes, seen = [root], {root}
    for node in nodes:
        for following, _ in node.next_functions:
            if following in targets:
                return True
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return False


def parents_of(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Who consumes each node."""
    parents: dict[Node, list[Node]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                parents.setdefault(following, []).append(node)
    return parents


def dependents(found: Iterable[Node], parents: dict[Node, list[Node]]) -> set[Node]:
    """The nodes that depend on some others, or are among them."""
    stack = list(found)
    dependent = set(stack)
    while stack:
        for parent in parents.get(stack.pop(), ()):
            if parent not in dependent:
                dependent.add(parent)
                stack.append(parent)
    return dependent


def shape_of(node: Any, nr: int = 0) -> torch.Size:
    """Shape of an output of a node."""
    return torch.Size(node._input_metadata[nr].shape)


def is_complex(node: Any, nr: int = 0) -> bool:
    """Whether an output of a node has complex entries."""
    return node._input_metadata[nr].dtype.is_complex


def precisions(nodes: list[Node]) -> set[torch.dtype]:
    """The floating dtypes behind some nodes: under autocast others than those of parameters and outputs."""
    return {
        metadata.dtype
        for node in walk(nodes)
        for metadata in node._input_metadata  # type: ignore[attr-defined]
        if metadata.dtype.is_floating_point
    }


class Wrong(NamedTuple):
    """A derivative that is wrong in PyTorch, of nodes of a name, and what to do instead."""

    name: str
    derivative: str
    instead: str

    def nodes(self, roots: list[Node], boundary: frozenset = frozenset()) -> list[Node]:
        """Those behind some nodes."""
        return [node for node in walk(roots, boundary) if name_of(node) == self.name]


WRONG_TWICE = Wrong(
    "WeightNormInterfaceBackward0",  # as if norms were fixed
    "second derivative of weight norm",
    "normalise by other operations (`g * v / v.norm(dim=1, keepdim=True)`)",
)
WRONG_THREE_TIMES = Wrong(
    "NativeLayerNormBackward0",
    "third derivative of layer norm",
    "normalise by other operations (`F.group_norm` of rows, `(x - x.mean(-1, keepdim=True)) / ...`)",
)


def lone_biases(root: Node, boundary: frozenset = frozenset()) -> list[Node]:
    """Where biases come from of norms behind ``root`` without a weight: PyTorch drops second derivatives in them."""
    norms = ("NativeLayerNormBackward0", "NativeBatchNormBackward0")
    found = [node for node in walk([root], boundary) if name_of(node) in norms and node.next_functions[1][0] is None]
    lone = [node for node in found if node._saved_weight is None]  # type: ignore[attr-defined]
    return [bias for node in lone if (bias := node.next_functions[2][0]) is not None]


class Residual(NamedTuple):
    """A nonlinear operation: its node, the edges of its inputs that depend on parameters, and whether R is diagonal."""

    node: Node
    outputs: list[int]
    inputs: list[GradientEdge]
    diagonal: bool


class Columns(NamedTuple):
    """Columns at several edges together, ``[v, *shape]`` each, with their weights ``[v, N]``."""

    edges: list[GradientEdge]
    vectors: list[Tensor]
    weights: Tensor


def nonlinear_operations(roots: Sequence[GradientEdge], uses: set[Node]) -> list[Residual]:
    """The operations between some edges and the outputs of uses that add a residual.

    Args:
        roots: where the network's outputs come from.
        uses: nodes of the outputs of all uses.
    """
    order: list[Node] = []  # inputs before what they feed
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root.node, False) for root in roots]
    reached: dict[Node, set[int]] = {}
    for root in roots:
        reached.setdefault(root.node, set()).add(root.output_nr)
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for following, nr in node.next_functions:
                if following is not None:
                    reached.setdefault(following, set()).add(nr)
                    stack.append((following, False))
    dependent: set[Node] = set()
    found: list[Residual] = []
    for node in order:
        inputs = {(f, nr): GradientEdge(f, nr) for f, nr in node.next_functions if f is not None and f in dependent}
        links = sum(1 for f, _ in node.next_functions if f is not None and f in dependent)
        if inputs or node in uses:
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
    return name.endswith("BATCHNORM") and bool(
        getattr(node, "_saved_training", False)
    )  # of single samples: instance norm


def pull(
    outputs: Sequence[GradientEdge | Tensor],
    inputs: Sequence[GradientEdge | Tensor],
    vectors: Sequence[Tensor],
) -> list[Tensor | None]:
    """Pull vectors ``[v, *output]`` back to the inputs, ``[v, *input]`` each; ``None`` where nothing arrives.

    Builds a graph of its own exactly if gradients are enabled, and leaves the network's graph alive.
    """
    create_graph, V = torch.is_grad_enabled(), vectors[0].shape[0]
    with unheard():
        # anomaly detection looks at numbers, as vmap cannot, and prints what follows
        if V > 1 and not torch.is_anomaly_enabled() and not _wrong_together(outputs):
            try:
                return list(
                    torch.autograd.grad(  # type: ignore[call-overload]
                        list(outputs),  # type: ignore[arg-type]
                        list(inputs),  # type: ignore[arg-type]
                        list(vectors),
                        retain_graph=True,
                        create_graph=create_graph,
                        allow_unused=True,
                        is_grads_batched=True,
                    )
                )
            except RuntimeError:
                pass  # an operation that vmap cannot enter (a custom autograd.Function): one by one
        # what `torch.autograd.grad` ends in; the first call of that with a vector takes a second for imports
        run = partial(_engine.run_backward, tuple(outputs), keep_graph=True, create_graph=create_graph)
        run = partial(run, inputs=tuple(inputs), allow_unreachable=True, accumulate_grad=False)
        columns = [run(tuple([vector[v] for vector in vectors])) for v in range(V)]
    if V == 1:
        return [None if found is None else found.unsqueeze(0) for found in columns[0]]
    return [None if column[0] is None else torch.stack(column) for column in zip(*columns, strict=True)]  # type: ignore[arg-type]


def _wrong_together(outputs: Sequence[GradientEdge | Tensor]) -> bool:
    """Whether several vectors at once may be pulled back wrongly: by PyTorch's batch norm of one image on a CPU.

    It mistakes some strides of a batch of vectors in channels-last layout. An instance norm is one of one image, too.
    """
    roots = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in outputs]
    for node in walk([root for root in roots if root is not None]):
        if name_of(node) == "NativeBatchNormBackward0":
            shape = shape_of(node)
            if len(shape) > 3 and shape[0] == 1 and node._input_metadata[0].device.type == "cpu":  # type: ignore[attr-defined]
                return True
    return False


def pull_each(
    outputs: Sequence[GradientEdge],
    inputs: Sequence[GradientEdge],
    vectors: Sequence[Tensor],
    arrived: Callable[[int, Tensor], None],
    together: bool = False,
) -> None:
    """`pull`, with ``arrived(i, [v, *input])`` called for each input that is reached.

    Args:
        outputs: where the vectors are.
        inputs: where they are pulled back to.
        vectors: one tensor for each output.
        arrived: called as soon as autograd passes the input, so that what arrives need not be kept.
        together: call it for all at the end, as has to be where there is more than one vector.
    """
    nodes = {edge.node for edge in inputs}
    passed = [not together and leads_further_to(edge.node, nodes) for edge in inputs]
    ends = [i for i, _ in enumerate(inputs) if not passed[i]]
    tasks: list[int] = []

    def passing(i: int, grad: Tensor) -> None:
        tasks.append(torch._C._current_graph_task_id())
        if tasks[-1] == tasks[0]:  # and not one of what is pulled back from where others arrive
            arrived(i, grad.unsqueeze(0))

    with ExitStack() as hooks:
        for i, edge in enumerate(inputs):
            if passed[i]:
                hooks.callback(listen(edge, partial(passing, i)).remove)
        found = pull(outputs, [inputs[i] for i in ends], vectors)[::-1] if ends else []
    for i in ends:
        vector = found.pop()
        if vector is not None:
            arrived(i, vector)


@contextmanager
def cut(nodes: Sequence[Node | None]) -> Iterator[None]:
    """Gradients are captured at the outputs of ``nodes`` and go no further."""
    handles = [node.register_prehook(_zeros) for node in set(nodes) if node is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def residual_columns(residual: Residual, grads: list[Tensor], N: int, size: int, modify: Modify) -> Iterator[Columns]:
    """Weighted columns of one operation's residual, at most ``size`` at a time.

    Args:
        residual: the operation.
        grads: gradients of the loss at its outputs.
        N: number of samples; entries of the inputs belong to samples in equal contiguous shares.
        size: columns at a time.
        modify: replace R by its positive part (``"clip"``) or absolute value (``"abs"``), else leave it.
    """
    if isinstance(residual.node, BackwardCFunction):
        # a function that is differentiable once protests only if its gradient could be differentiated
        grads = [grad if grad.requires_grad else grad.detach().requires_grad_() for grad in grads]
    # stay within the operation: an input may depend on another, and the gradient (under create_graph) on all of them
    borders = [edge.node for edge in residual.inputs] + [grad.grad_fn for grad in grads]
    with torch.enable_grad(), cut(borders):
        # the operation's own backward at a fixed gradient, as a function of the operation's inputs
        outputs = [GradientEdge(residual.node, nr) for nr in residual.outputs]
        pulled = pull(outputs, residual.inputs, [grad.unsqueeze(0) for grad in grads])
        found = [(e, p[0]) for e, p in zip(residual.inputs, pulled, strict=True) if p is not None and p.requires_grad]
    if not found:
        return
    edges, values = [edge for edge, _ in found], [value for _, value in found]
    shapes = [value.shape for value in values]

    def apply(vectors: list[Tensor]) -> list[Tensor]:
        with cut(borders):
            result = pull(values, edges, vectors)
        return [torch.zeros_like(v) if r is None else r for r, v in zip(result, vectors, strict=True)]

    dims = [shape.numel() // N for shape in shapes]
    if residual.diagonal:
        diagonal = apply([torch.ones_like(values[0]).unsqueeze(0)])[0].reshape(N, dims[0])
        if modify is not None:
            diagonal = diagonal.clamp(min=0) if modify == "clip" else diagonal.abs()
        active = (diagonal != 0).any(0).nonzero()[:, 0]
        for indices in active.split(size) if len(active) else ():
            units = unit_vectors(indices, dims[0], N, diagonal).reshape(-1, *shapes[0])
            yield Columns(edges, [units], diagonal[:, indices].T)
        return

    total = sum(dims)
    if modify is not None:
        R = torch.cat([_rows(apply, i, dims, shapes, N, values[0]) for i in torch.arange(total).split(size)], 1)
        eigenvalues, eigenvectors = eigh((R + R.mT) / 2)
        weights = eigenvalues.clamp(min=0) if modify == "clip" else eigenvalues.abs()
        for indices in torch.arange(total, device=R.device).split(size):
            flat = eigenvectors[:, :, indices].permute(2, 0, 1).split(dims, 2)
            vectors = [u.reshape(-1, *shape) for u, shape in zip(flat, shapes, strict=True)]
            yield Columns(edges, vectors, weights[:, indices].T)
        return
    for indices in torch.arange(total, device=values[0].device).split(max(1, size // 2)):
        units = unit_vectors(indices, total, N, values[0])
        both, weights = polarize(units, _rows(apply, indices, dims, shapes, N, values[0]).transpose(0, 1))
        vectors = [u.reshape(-1, *shape) for u, shape in zip(both.split(dims, 2), shapes, strict=True)]
        yield Columns(edges, vectors, weights)


def polarize(units: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Columns ``[2 v, N, D]`` and weights ``[2 v, N]`` of ``sum_v (e (Re)^T + (Re) e^T) / 2``.

    Over all units that is R itself.

    Args:
        units: unit vectors e, ``[v, N, D]``.
        images: their products Re with a symmetric matrix of each sample.
    """
    # (e + Re)(e + Re)^T - (e - Re)(e - Re)^T = 2 (e (Re)^T + (Re) e^T), with e and Re brought to one length first
    length = images.detach().square().sum(2, keepdim=True).sqrt()
    root = length.sqrt()
    images = torch.where(length > 0, images / root.clamp(min=torch.finfo(images.dtype).tiny), 0)
    both = torch.cat([units * root + images, units * root - images])
    quarter = both.new_full((len(units), 1), 0.25)
    return both, torch.cat([quarter, -quarter]).expand(-1, both.shape[1])


def unit_vectors(indices: Tensor, dim: int, N: int, like: Tensor) -> Tensor:
    """Unit vectors ``[v, N, dim]``, the same for all samples."""
    units = torch.zeros(len(indices), dim, dtype=like.dtype, device=like.device)
    return units.scatter_(1, indices.to(like.device).unsqueeze(1), 1).unsqueeze(1).expand(-1, N, -1)


def _rows(apply, indices: Tensor, dims: list[int], shapes: list[torch.Size], N: int, like: Tensor) -> Tensor:
    """Rows ``R e_i`` of the joint residual of all inputs, ``[N, v, sum(dims)]``."""
    units = unit_vectors(indices, sum(dims), N, like).split(dims, 2)
    vectors = [u.reshape(-1, *shape) for u, shape in zip(units, shapes, strict=True)]
    image = apply(vectors)
    return torch.cat([r.reshape(len(indices), N, d) for r, d in zip(image, dims, strict=True)], 2).transpose(0, 1)
