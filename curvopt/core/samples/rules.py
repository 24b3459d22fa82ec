"""How the batch axis of an operation's output follows to its operands: one rule for each kind of operation.

::

    rule           output                    operands
    elementwise    [T, N, d], axis 1         [T, N, d]: axis 1; [d], a bias: None, as all samples share it
    transpose      [N, T, d], axis 0         [T, N, d]: axis 1
    matmul         [N, O], axis 0            [N, I]: axis 0; [I, O]: None
    index          h[[2, 0]], axis 0         h [3, d]: labels (1, UNUSED, 0), the sample of each row
    index          h[[2, 2]], axis 0         UNKNOWN: both samples use row 2
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from curvopt.core.nodes import operation, outputs_of, saved, signed
from curvopt.core.samples.layout import UNKNOWN, AnyLayout, Layout, OperationCall
from curvopt.core.samples.probe import probe_operands


def index(call: OperationCall) -> list[AnyLayout]:
    """Rows that are picked by a mask, or by one tensor of integers or several, that make one axis of the output."""
    (shape,), given = call.operands, [(i, x) for i, x in enumerate(call.saved("indices")) if x is not None]
    if shape is None or not given or [i for i, _ in given] != list(range(given[0][0], given[0][0] + len(given))):
        return call.unknown
    first, mask = given[0]
    if mask.dtype == torch.bool and len(given) == 1:
        count, ways = mask.dim(), [(first, mask.dim(), mask.flatten().nonzero()[:, 0])]
    elif all(x.dim() == 1 and x.dtype != torch.bool and len(x) == len(mask) for _, x in given):
        count, ways = len(given), [(i, 1, x) for i, x in given]
    else:
        return call.unknown
    if call.axis.index != first:  # an axis that is not indexed
        return [call.at(shape, call.axis.index if call.axis.index < first else call.axis.index - 1 + count)]
    for axis, merged_axes, places in ways:
        seen = [*shape[:axis], prod(shape[axis : axis + merged_axes]), *shape[axis + merged_axes :]]
        found = call.placed(torch.Size(seen), axis, call.labels, places.tolist())
        if found is not UNKNOWN:
            return [found]
    return call.unknown


def index_select(call: OperationCall) -> list[AnyLayout]:
    """Rows that are picked along an axis."""
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    return [call.placed(shape, index, call.labels, call.saved("index").flatten().tolist())]


def index_add(call: OperationCall) -> list[AnyLayout]:
    """Rows that are added to the rows of another tensor."""
    shapes, index = call.operands, call.axis.index
    if index != call.dim(len(call.shape)):
        return [call.at(shape, index) for shape in shapes]
    labels, source, places = call.labels, shapes[1], call.saved("index").flatten().tolist()
    if source is not None and not len(source):  # a single number
        return [call.at(shapes[0], index), Layout(1, 1, 1, (labels[places[0]],), call.layout.mixed)]
    if source is None or len(source) != len(call.shape):
        return call.unknown
    return [call.at(shapes[0], index), call.labelled(source, index, [labels[place] for place in places])]


def gather(call: OperationCall) -> list[AnyLayout]:
    """Entries that are picked along an axis."""
    (shape,) = call.operands
    index = call.axis.index
    kept = shape is not None and index != call.dim(len(shape)) and shape[index] == call.shape[index]
    return [call.at(shape, index)] if kept else call.unknown


def embedding(call: OperationCall) -> list[AnyLayout]:
    """Rows of a table, which all samples share."""
    return call.shared


def _elementwise(call: OperationCall) -> list[AnyLayout]:
    return [call.broadcast(shape) for shape in call.operands]


def view(call: OperationCall) -> list[AnyLayout]:
    """Views keep the flat index."""
    return [call.layout] * len(call.node.next_functions)


def _t(call: OperationCall) -> list[AnyLayout]:
    (shape,) = call.operands
    return [call.at(shape, call.axis.index if len(call.shape) < 2 else 1 - call.axis.index)]


def _transpose(call: OperationCall) -> list[AnyLayout]:
    dims = list(range(len(call.shape)))
    i, j = call.dim(len(dims), "dim0"), call.dim(len(dims), "dim1")
    dims[i], dims[j] = dims[j], dims[i]
    return [call.at(call.operands[0], dims[call.axis.index])]


def _permute(call: OperationCall) -> list[AnyLayout]:
    dims = [signed(dim) % len(call.shape) for dim in call.saved("dims")]
    return [call.at(call.operands[0], dims[call.axis.index])]


def _matmul(call: OperationCall) -> list[AnyLayout]:
    # rows belong to the first matrix, columns to the second one
    found, shapes, first = call.shared, call.operands, len(call.node.next_functions) - 2
    found[first + call.axis.index] = call.at(shapes[first + call.axis.index], call.axis.index)
    if first:
        found[0] = call.broadcast(shapes[0])
    return found


def _bmm(call: OperationCall) -> list[AnyLayout]:
    found, shapes, first = call.shared, call.operands, len(call.node.next_functions) - 2
    index = call.axis.index
    if index == 0:
        found[first], found[first + 1] = call.at(shapes[first], 0), call.at(shapes[first + 1], 0)
    else:
        found[first + index - 1] = call.at(shapes[first + index - 1], index)
    if first:
        found[0] = call.broadcast(shapes[0])
    return found


def _linear(call: OperationCall) -> list[AnyLayout]:
    if call.axis.index == len(call.shape) - 1:
        return call.unknown
    found = call.shared
    found[0] = call.at(call.operands[0], call.axis.index)
    return found


def _rows(call: OperationCall) -> list[AnyLayout]:
    # convolutions, group norm; of the backward of a convolution only the gradient in the input has samples
    if call.axis.index or call.output_nr:
        return call.unknown
    found = call.shared
    found[0] = call.at(call.operands[0], 0)
    return found


def _images(call: OperationCall) -> list[AnyLayout]:
    return call.unknown if call.axis.index else [call.at(shape, 0) for shape in call.operands]


def _layer_norm(call: OperationCall) -> list[AnyLayout]:
    if call.axis.index >= len(call.shape) - len(call.saved("normalized_shape")):
        return call.unknown
    return [call.at(call.operands[0], call.axis.index), *call.shared[1:]]


def _batch_norm(call: OperationCall) -> list[AnyLayout]:
    found = call.at(call.operands[0], call.axis.index)
    # channels are normalised one by one: samples along axis 1 do not meet (instance norm of a batch runs as that)
    if isinstance(found, Layout) and call.axis.index != 1 and call.saved("training") and call.N > 1:
        found = found._replace(mixed=True)
    return [found, *call.shared[1:]]


def _sync_batch_norm(call: OperationCall) -> list[AnyLayout]:
    found = call.at(call.operands[0], call.axis.index)
    return [found._replace(mixed=True) if isinstance(found, Layout) else found, *call.shared[1:]]


def _along(call: OperationCall) -> list[AnyLayout]:
    for name in ("dim", "dims"):
        dims = getattr(call.node, f"_saved_{name}", None)
        if dims is not None:
            taken = {signed(dim) % len(call.shape) for dim in ([dims] if isinstance(dims, int) else dims)}
            return call.unknown if call.axis.index in taken else [call.at(call.operands[0], call.axis.index)]
    return call.unknown


def _reduce(call: OperationCall) -> list[AnyLayout]:
    (shape,) = call.operands
    dims = saved(call.node, "dim")
    if dims is None or shape is None:
        return call.unknown
    taken = {signed(dim) % max(len(shape), 1) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])}
    kept = [i for i in range(len(shape)) if i not in taken]
    if call.saved("keepdim"):
        return [call.at(shape, call.axis.index)] if call.axis.index in kept else call.unknown
    return [call.at(shape, kept[call.axis.index])] if len(kept) == len(call.shape) else call.unknown


def _select(call: OperationCall) -> list[AnyLayout]:
    (shape,) = call.operands
    dim = call.dim(len(shape or ()))
    return [call.at(shape, call.axis.index + (call.axis.index >= dim))]


def _slice(call: OperationCall) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    places = range(
        *slice(signed(call.saved("start")), signed(call.saved("end")), call.saved("step")).indices(shape[index])
    )
    return [call.placed(shape, index, call.labels, places)]


def _split(call: OperationCall) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index
    if shape is None or index != call.dim(len(shape)):
        return [call.at(shape, index)]
    start = sum(metadata.shape[index] for metadata in outputs_of(call.node)[: call.output_nr])
    places = range(start, start + call.shape[index])
    return [call.placed(shape, index, call.labels, places)]


def _cat(call: OperationCall) -> list[AnyLayout]:
    index, shapes = call.axis.index, call.operands
    if index != call.dim(len(call.shape)):
        return [call.at(shape, index) for shape in shapes]
    if None in shapes:  # how long the constants are is not saved
        return probe_operands(call.node, call.output_nr, call.layout, call.N)
    found, labels = [], call.labels
    for shape in shapes:
        length = shape[index] if shape is not None and len(shape) == len(call.shape) else 0  # legacy: empty ones
        found.append(call.labelled(shape, index, labels[:length]) if length else None)
        labels = labels[length:]
    return found


def _stack(call: OperationCall) -> list[AnyLayout]:
    index, dim = call.axis.index, call.dim(len(call.shape))
    return call.unknown if index == dim else [call.at(shape, index - (index > dim)) for shape in call.operands]


def _repeat(call: OperationCall) -> list[AnyLayout]:
    (shape,) = call.operands
    index = call.axis.index - len(call.shape) + len(shape or ())
    if shape is None or index < 0 or shape[index] == 1 < call.shape[call.axis.index]:
        return call.shared
    return [call.at(shape, index)] if shape[index] == call.shape[call.axis.index] else call.unknown


def _pad(call: OperationCall) -> list[AnyLayout]:
    widths = saved(call.node, "pad") or saved(call.node, "padding", ())
    padded = call.axis.index >= len(call.shape) - len(widths) // 2
    return call.unknown if padded else [call.at(call.operands[0], call.axis.index)]


def _attention(call: OperationCall) -> list[AnyLayout]:
    if call.axis.index > 1:
        return call.unknown
    return [call.broadcast(shape) if shape and len(shape) == 4 else None for shape in call.operands]


def _recurrent(call: OperationCall) -> list[AnyLayout]:
    # input and output [T, N, ...] or [N, T, ...], states [layers, N, ...], weights; oneDNN's are [T, N, ...] always
    batch_first = bool(saved(call.node, "batch_first", False)) and operation(call.node) != "MKLDNNRNNLAYER"
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


def _cell(call: OperationCall) -> list[AnyLayout]:
    if call.axis.index:
        return call.unknown
    return [call.at(shape, 0) if shape is not None and len(shape) == 2 else None for shape in call.operands]


RULES: dict[str, Callable[[OperationCall], list[AnyLayout]]] = {
    rule.__name__.removeprefix("_"): rule
    for rule in (
        *(_elementwise, view, _t, _transpose, _permute, _matmul, _bmm, _linear, _rows, _images),
        *(_layer_norm, _batch_norm, _sync_batch_norm, _along, _reduce, _select),
        *(_slice, _split, _cat, _stack, _repeat, _pad, index, index_select, index_add),
        *(gather, embedding, _attention, _recurrent, _cell),
    )
}
