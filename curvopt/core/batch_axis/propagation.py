"""The batch axis of every tensor of a backward, propagated from the heads to the leaves.

The heads are the outputs of the model, whose batch axis is known. From there one walk against the arrows of the forward
pass gives each operand of each operation its layout, by one rule per kind of operation, as the batching rules of vmap
do in the other direction::

    head [N, C]           Layout(1, N, C)
    addmm                 rows of the first matrix: Layout(1, N, d); the weight holds no samples: None
    view [N, T, d']       the same entries in the same order: Layout(1, N, T d')
    transpose(0, 1)       Layout(T, N, d')

An entry that has layout ``n`` reaches the heads of sample n alone. The values of tensors do not matter, so the answer
holds for every batch, also where a gate is zero at first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from curvopt.core.autograd_graph.node_vjp import Place, consumers_first
from curvopt.core.autograd_graph.nodes import name_of, operation
from curvopt.core.autograd_graph.operations import OPERATIONS, UNKNOWN_OPERATION
from curvopt.core.batch_axis.layout import (
    UNKNOWN,
    UNUSED,
    AnyLayout,
    Axis,
    Layout,
    along,
    axis_of,
    completed,
    labelled,
    labels_along,
    merged,
)
from curvopt.core.batch_axis.probe import probe_operands
from curvopt.core.recording.calls import ModuleCall, records_of


class BatchAxes(NamedTuple):
    """What the walk found.

    Attributes:
        N: number of samples.
        layouts: of each output of a node between the heads and the leaves.
    """

    N: int
    layouts: Mapping[Place, AnyLayout]

    def of(self, node: Node, output_nr: int = 0) -> AnyLayout:
        """The layout of an output; ``None`` for one that does not lead to the heads."""
        return self.layouts.get((node, output_nr))


def propagate_batch_axis(
    heads: Mapping[Place, Layout], N: int, last: Collection[Place] = (), complete: bool = True
) -> BatchAxes:
    """The layout of all tensors behind the heads.

    Args:
        heads: outputs of nodes, and where their samples are.
        N: number of samples.
        last: outputs behind which the walk does not go on.
        complete: give rows that lead to no head to samples, too.
    """
    layouts: dict[Place, AnyLayout] = dict(heads)
    for node in consumers_first([node for node, _ in heads], {node for node, _ in last}):
        for nr in range(len(node._input_metadata)):  # type: ignore[attr-defined]
            place = node, nr
            if place not in layouts or (place in last and place not in heads):
                continue
            layout, operands = layouts[place], node.next_functions
            if isinstance(layout, Layout):
                found = operand_layouts(node, nr, layout, N)
            else:
                found = [layout] * len(operands)
            for operand, own in zip(operands, found, strict=True):
                if N == 1 and own is UNKNOWN and operand[0] is not None:
                    own = Layout(1, 1, prod(operand[0]._input_metadata[operand[1]].shape))  # noqa: PLW2901
                if operand[0] is not None and operand not in heads:
                    layouts[operand] = merged(layouts[operand], own, N) if operand in layouts else own  # type: ignore[index,assignment]
    for place, layout in layouts.items() if complete else ():
        if isinstance(layout, Layout) and layout.labels is not None:
            layouts[place] = completed(layout, N)
    return BatchAxes(N, layouts)


def operand_layouts(node: Node, output_nr: int, layout: Layout, N: int) -> list[AnyLayout]:
    """The layouts of the operands of an operation, from that of one of its outputs."""
    if not node.next_functions:
        return []  # a leaf: to probe it would accumulate a gradient
    rule = _rule(name_of(node), operation(node))
    if rule is _view:
        return [layout] * len(node.next_functions)
    shape = node._input_metadata[output_nr].shape  # type: ignore[attr-defined]
    axis = axis_of(shape, layout)
    if rule is None and axis is not None and _is_recorded_batch_norm(node):
        call = _Call(node, output_nr, shape, layout, axis, N)
        return [_mixed(call.at(own, axis.index)) if own == shape else None for own in call.operands]
    if rule is None or axis is None:
        return probe_operands(node, output_nr, layout, N)
    return rule(_Call(node, output_nr, shape, layout, axis, N))


@cache
def _rule(name: str, kind: str) -> Callable[[_Call], list[AnyLayout]] | None:
    del name  # part of the key: user's functions may have any
    batch_axis = OPERATIONS.get(kind, UNKNOWN_OPERATION).batch_axis
    return None if batch_axis is None else _RULES[batch_axis]


def _is_recorded_batch_norm(node: Node) -> bool:
    """Whether a compiled function is the call of a batch norm that normalises over the samples."""
    modules = [record.module for record, *_ in records_of(node) if isinstance(record, ModuleCall)]
    norms = [module for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return any(norm.training or norm.running_mean is None for norm in norms)


def _mixed(layout: AnyLayout) -> AnyLayout:
    return layout._replace(mixed=True) if isinstance(layout, Layout) else layout


class _Call:
    """An operation with one of its outputs, which has the samples along an axis."""

    __slots__ = ("N", "axis", "layout", "node", "output_nr", "shape")

    def __init__(self, node: Node, output_nr: int, shape: Sequence[int], layout: Layout, axis: Axis, N: int):
        self.node, self.output_nr, self.shape = node, output_nr, shape
        self.layout, self.axis, self.N = layout, axis, N

    def saved(self, name: str) -> Any:
        """A number or numbers that the node saved."""
        return getattr(self.node, f"_saved_{name}")

    def dim(self, of: int, name: str = "dim") -> int:
        """An axis that the node saved, of a tensor with so many."""
        return _signed(self.saved(name)) % max(of, 1)

    @property
    def operands(self) -> list[torch.Size | None]:
        """Shapes of the operands, ``None`` for constants."""
        return [None if below is None else below._input_metadata[nr].shape for below, nr in self.node.next_functions]  # type: ignore[attr-defined]

    @property
    def unknown(self) -> list[AnyLayout]:
        return [UNKNOWN] * len(self.node.next_functions)

    @property
    def shared(self) -> list[AnyLayout]:
        """All samples share all operands."""
        return [None] * len(self.node.next_functions)

    def at(self, shape: torch.Size | None, index: int) -> AnyLayout:
        """The layout of an operand that has the samples along its axis ``index``."""
        if shape is None:
            return None
        return along(shape, self.axis._replace(index=index), self.layout)

    def broadcast(self, shape: torch.Size | None) -> AnyLayout:
        """The layout of an operand whose last axes are those of the output; ``None`` if it is repeated."""
        index = self.axis.index - len(self.shape) + len(shape or ())
        if shape is None or index < 0 or shape[index] != self.shape[self.axis.index]:
            return None
        return self.at(shape, index)

    def labelled(self, shape: torch.Size | None, index: int, labels: Sequence[int]) -> AnyLayout:
        """The layout of an operand whose entries along an axis belong to some samples."""
        return None if shape is None else labelled(shape, index, labels, self.N, self.layout.mixed)

    def placed(self, shape: torch.Size, index: int, labels: Sequence[int], places: Iterable[int]) -> AnyLayout:
        """The layout of an operand of which some entries along an axis are picked, for the samples ``labels``."""
        found = [UNUSED] * shape[index]
        for label, place in zip(labels, places, strict=True):
            if found[place] not in (UNUSED, label):
                return UNKNOWN  # two samples use it
            found[place] = label
        return labelled(shape, index, found, self.N, self.layout.mixed)

    @property
    def labels(self) -> tuple[int, ...]:
        """The samples of the entries along the axis."""
        return labels_along(self.layout, self.axis)


def _signed(dim: int) -> int:
    """An axis as a node has it, where negative ones are kept as unsigned numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


def _elementwise(call: _Call) -> list[AnyLayout]:
    return [call.broadcast(shape) for shape in call.operands]


def _view(call: _Call) -> list[AnyLayout]:
    return [call.layout] * len(call.node.next_functions)


def _as_strided(call: _Call) -> list[AnyLayout]:
    (shape,), size, strides = call.operands, call.saved("size"), call.saved("stride")
    if shape is None or sorted(size) != sorted(shape):
        return call.unknown
    operand_strides = torch.empty(shape, device="meta").stride()
    found = [i for i, stride in enumerate(operand_strides) if stride == strides[call.axis.index] and shape[i] > 1]
    # an axis of the memory that the operand fills in order
    if len(found) != 1 or shape[found[0]] != size[call.axis.index]:
        return call.unknown
    return [call.at(shape, found[0])]


def _t(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    return [call.at(shape, call.axis.index if len(call.shape) < 2 else 1 - call.axis.index)]


def _transpose(call: _Call) -> list[AnyLayout]:
    dims = list(range(len(call.shape)))
    i, j = call.dim(len(dims), "dim0"), call.dim(len(dims), "dim1")
    dims[i], dims[j] = dims[j], dims[i]
    return [call.at(call.operands[0], dims[call.axis.index])]


def _permute(call: _Call) -> list[AnyLayout]:
    dims = [_signed(dim) % len(call.shape) for dim in call.saved("dims")]
    return [call.at(call.operands[0], dims[call.axis.index])]


def _matmul(call: _Call) -> list[AnyLayout]:
    # rows belong to the first matrix, columns to the second one
    found, shapes, first = call.shared, call.operands, len(call.node.next_functions) - 2
    found[first + call.axis.index] = call.at(shapes[first + call.axis.index], call.axis.index)
    if first:
        found[0] = call.broadcast(shapes[0])
    return found


def _bmm(call: _Call) -> list[AnyLayout]:
    found, shapes, first = call.shared, call.operands, len(call.node.next_functions) - 2
    index = call.axis.index
    if index == 0:
        found[first], found[first + 1] = call.at(shapes[first], 0), call.at(shapes[first + 1], 0)
    else:
        found[first + index - 1] = call.at(shapes[first + index - 1], index)
    if first:
        found[0] = call.broadcast(shapes[0])
    return found


def _linear(call: _Call) -> list[AnyLayout]:
    if call.axis.index == len(call.shape) - 1:
        return call.unknown
    found = call.shared
    found[0] = call.at(call.operands[0], call.axis.index)
    return found


def _convolution(call: _Call) -> list[AnyLayout]:
    # of the backward of a convolution only the gradient in the input has samples
    if call.axis.index or call.output_nr:
        return call.unknown
    found = call.shared
    found[0] = call.at(call.operands[0], 0)
    return found


def _images(call: _Call) -> list[AnyLayout]:
    return call.unknown if call.axis.index else [call.at(shape, 0) for shape in call.operands]


def _group_norm(call: _Call) -> list[AnyLayout]:
    return call.unknown if call.axis.index else [call.at(call.operands[0], 0), *call.shared[1:]]


def _layer_norm(call: _Call) -> list[AnyLayout]:
    if call.axis.index >= len(call.shape) - len(call.saved("normalized_shape")):
        return call.unknown
    return [call.at(call.operands[0], call.axis.index), *call.shared[1:]]


def _batch_norm(call: _Call) -> list[AnyLayout]:
    found = call.at(call.operands[0], call.axis.index)
    # channels are normalised one by one: samples along axis 1 do not meet (instance norm of a batch runs as that)
    if isinstance(found, Layout) and call.axis.index != 1 and call.saved("training") and call.N > 1:
        found = found._replace(mixed=True)
    return [found, *call.shared[1:]]


def _sync_batch_norm(call: _Call) -> list[AnyLayout]:
    found = call.at(call.operands[0], call.axis.index)
    return [found._replace(mixed=True) if isinstance(found, Layout) else found, *call.shared[1:]]


def _along(call: _Call) -> list[AnyLayout]:
    for name in ("dim", "dims"):
        dims = getattr(call.node, f"_saved_{name}", None)
        if dims is not None:
            taken = {_signed(dim) % len(call.shape) for dim in ([dims] if isinstance(dims, int) else dims)}
            return call.unknown if call.axis.index in taken else [call.at(call.operands[0], call.axis.index)]
    return call.unknown


def _last_two(call: _Call) -> list[AnyLayout]:
    return [call.at(call.operands[0], call.axis.index)] if call.axis.index < len(call.shape) - 2 else call.unknown


def _reduce(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    dims = getattr(call.node, "_saved_dim", None)
    if dims is None or shape is None:
        return call.unknown
    taken = {_signed(dim) % max(len(shape), 1) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])}
    kept = [i for i in range(len(shape)) if i not in taken]
    if call.saved("keepdim"):
        return [call.at(shape, call.axis.index)] if call.axis.index in kept else call.unknown
    return [call.at(shape, kept[call.axis.index])] if len(kept) == len(call.shape) else call.unknown


def _select(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    dim = call.dim(len(shape or ()))
    return [call.at(shape, call.axis.index + (call.axis.index >= dim))]


def _unbind(call: _Call) -> list[AnyLayout]:
    return _select(call)


def _slice(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    places = range(
        *slice(_signed(call.saved("start")), _signed(call.saved("end")), call.saved("step")).indices(shape[index])
    )
    return [call.placed(shape, index, call.labels, places)]


def _split(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    start = sum(metadata.shape[index] for metadata in call.node._input_metadata[: call.output_nr])  # type: ignore[attr-defined]
    places = range(start, start + call.shape[index])
    return [call.placed(shape, index, call.labels, places)]


def _cat(call: _Call) -> list[AnyLayout]:
    index, shapes = call.axis.index, call.operands
    if index != call.dim(len(call.shape)):
        return [call.at(shape, index) for shape in shapes]
    if None in shapes:
        return call.unknown  # how long the constants are is not saved
    found, labels = [], call.labels
    for shape in shapes:
        length = shape[index] if shape is not None and len(shape) == len(call.shape) else 0  # legacy: empty ones
        found.append(call.labelled(shape, index, labels[:length]) if length else None)
        labels = labels[length:]
    return found


def _stack(call: _Call) -> list[AnyLayout]:
    index, dim = call.axis.index, call.dim(len(call.shape))
    return call.unknown if index == dim else [call.at(shape, index - (index > dim)) for shape in call.operands]


def _repeat(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index - len(call.shape) + len(shape or ())
    if shape is None or index < 0 or shape[index] == 1 < call.shape[call.axis.index]:
        return call.shared
    return [call.at(shape, index)] if shape[index] == call.shape[call.axis.index] else call.unknown


def _pad(call: _Call) -> list[AnyLayout]:
    widths = getattr(call.node, "_saved_pad", None) or getattr(call.node, "_saved_padding", ())
    padded = call.axis.index >= len(call.shape) - len(widths) // 2
    return call.unknown if padded else [call.at(call.operands[0], call.axis.index)]


def _unfold(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    dim = call.dim(len(shape or ()), "dimension")
    return call.unknown if call.axis.index in (dim, len(shape or ())) else [call.at(shape, call.axis.index)]


def _index(call: _Call) -> list[AnyLayout]:
    (shape,), picked = call.operands, _picked(call.saved("indices"))
    if shape is None or picked is None:
        return call.unknown
    first, count, ways = picked
    if call.axis.index != first:  # an axis that is not indexed
        index = call.axis.index if call.axis.index < first else call.axis.index - 1 + count
        return [call.at(shape, index)]
    for axis, merged_axes, places in ways:
        seen = [*shape[:axis], prod(shape[axis : axis + merged_axes]), *shape[axis + merged_axes :]]
        found = call.placed(torch.Size(seen), axis, call.labels, places)
        if found is not UNKNOWN:
            return [found]
    return call.unknown


def _picked(indices: Sequence[Tensor | None]) -> tuple[int, int, list[tuple[int, int, list[int]]]] | None:
    """How rows are picked by indices, where these make one axis of the output; ``None`` otherwise.

    Returns:
        The first axis that is indexed, how many are, and the ways to see it: an axis of the operand, how many axes
        from there on count as one, and the places along it.
    """
    given = [(i, x) for i, x in enumerate(indices) if x is not None]
    if not given or [i for i, _ in given] != list(range(given[0][0], given[0][0] + len(given))):
        return None
    (first, x), *others = given
    if x.dtype == torch.bool:
        return None if others else (first, x.dim(), [(first, x.dim(), x.flatten().nonzero()[:, 0].tolist())])
    if any(each.dim() != 1 or each.dtype == torch.bool or len(each) != len(x) for _, each in given):
        return None
    return first, len(given), [(i, 1, each.tolist()) for i, each in given]


def _index_select(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    return [call.placed(shape, index, call.labels, call.saved("index").flatten().tolist())]


def _index_put(call: _Call) -> list[AnyLayout]:
    (own, values), picked = call.operands, _picked(call.saved("indices"))
    if picked is None or picked[0] != 0:
        return call.unknown
    _, count, ((_, merged_axes, places), *others) = picked
    if others or call.axis.index >= max(count, merged_axes):
        return call.unknown
    found: list[AnyLayout] = [call.at(own, call.axis.index), None]
    if values is not None:
        if len(values) != len(call.shape) - merged_axes + 1 or values[0] != len(places):
            return call.unknown  # repeated for the rows
        labels, share = call.labels, prod(call.shape[call.axis.index + 1 : merged_axes])
        picks = [labels[place // share % len(labels)] for place in places]
        found[1] = call.labelled(values, 0, picks)
    return found


def _index_add(call: _Call) -> list[AnyLayout]:
    shapes, index = call.operands, call.axis.index
    if index != call.dim(len(call.shape)):
        return [call.at(shape, index) for shape in shapes]
    labels, source, places = call.labels, shapes[1], call.saved("index").flatten().tolist()
    if source is not None and not len(source):  # a single number
        return [call.at(shapes[0], index), Layout(1, 1, 1, (labels[places[0]],), call.layout.mixed)]
    if source is None or len(source) != len(call.shape):
        return call.unknown
    return [call.at(shapes[0], index), call.labelled(source, index, [labels[place] for place in places])]


def _gather(call: _Call) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index
    kept = shape is not None and index != call.dim(len(shape)) and shape[index] == call.shape[index]
    return [call.at(shape, index)] if kept else call.unknown


def _scatter(call: _Call) -> list[AnyLayout]:
    shapes, index, dim = call.operands, call.axis.index, call.dim(len(call.shape))
    if index == dim:
        return call.unknown
    found: list[AnyLayout] = []
    for shape in shapes:
        own = index - (index > dim) if shape is not None and len(shape) < len(call.shape) else index  # SelectScatter
        if shape is not None and shape[own] != call.shape[index]:
            return call.unknown
        found.append(call.at(shape, own))
    return found


def _embedding(call: _Call) -> list[AnyLayout]:
    return call.shared


def _attention(call: _Call) -> list[AnyLayout]:
    if call.axis.index > 1:
        return call.unknown
    return [call.broadcast(shape) if shape and len(shape) == 4 else None for shape in call.operands]


def _recurrent(call: _Call) -> list[AnyLayout]:
    # input and output [T, N, ...] or [N, T, ...], states [layers, N, ...], weights
    batch_first = bool(getattr(call.node, "_saved_batch_first", False))
    index = 1 - batch_first if call.output_nr == 0 else 1
    shapes, found = call.operands, call.shared
    if call.axis.index != index or call.shape[index] != call.layout.rows:
        return call.unknown
    for i, shape in enumerate(shapes):
        states = len(shapes) - 2 if i >= len(shapes) - 2 else None
        if i == 0:
            found[0] = call.at(shape, 1 - batch_first)
        elif states is not None and shape is not None and len(shape) == 3:
            found[i] = call.at(shape, 1)
    return found


def _cell(call: _Call) -> list[AnyLayout]:
    if call.axis.index:
        return call.unknown
    return [call.at(shape, 0) if shape is not None and len(shape) == 2 else None for shape in call.operands]


_RULES: dict[str, Callable[[_Call], list[AnyLayout]]] = {
    rule.__name__[1:]: rule
    for rule in (
        *(_elementwise, _view, _as_strided, _t, _transpose, _permute, _matmul, _bmm, _linear, _convolution, _images),
        *(_group_norm, _layer_norm, _batch_norm, _sync_batch_norm, _along, _last_two, _reduce, _select, _unbind),
        *(_slice, _split, _cat, _stack, _repeat, _pad, _unfold, _index, _index_select, _index_put, _index_add),
        *(_gather, _scatter, _embedding, _attention, _recurrent, _cell),
    )
}
