"""Which graphs have the same operations, and which of these may bring samples in; by names, arguments and shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from curvopt.core.functional import has_number
from curvopt.core.residuals import dependents, is_sink, leaf_of, name_of, shape_of
from curvopt.core.saved import Saved, is_tensor, names_of

# operations that move entries to where the values of a tensor say, among samples perhaps, or sum over them
_REORDERING = (
    *("Index", "Gather", "Scatter", "Sort", "Topk", "Take", "MaskedSelect", "RepeatInterleave", "Put"),
    *("Sparse", "LinalgSolve", "LinalgLuSolve", "CholeskySolve", "TriangularSolve", "MaskedScatter", "SegmentReduce"),
    *("Nested", "GridSampler", "Dist", "Renorm"),
)
# beside operands, keep indices or masks
_KEEPING = (*_REORDERING, "Embedding", "Where", "Masked")
#: The end of the name of what operations keep of the layout of operands in memory, which moves no sample.
_LAYOUT = "_sym_strides"


_arguments: dict[str, tuple[str, ...]] = {}
#: The name by which operations keep indices, where these are all that tells.
_BY_INDICES = {"IndexBackward0": "indices"} | {
    f"{name}Backward0": "index" for name in ("IndexSelect", "IndexAdd", "Gather")
}
#: How many of them are read in every backward.
_FEW = 1 << 16


def structure(ends: list[Node], passed_over: Collection[Node], marks: Mapping[Node, Sequence[Any]]) -> int | None:
    """Hash of the operations behind some nodes, how they hang together, their shapes and integer arguments.

    ``None`` where tensors are arguments, but for a few indices.

    Args:
        ends: the nodes.
        passed_over: nodes that no sample has a part in, nor what lies behind them.
        marks: what else is to be told of nodes.
    """
    found: list[Any] = []
    numbers = {node: number for number, node in enumerate(dict.fromkeys(ends))}
    nodes = list(numbers)
    for node in nodes:
        name = name_of(node)
        keeps = _keeper(name)
        if isinstance(node, BackwardCFunction) and not is_sink(node):
            return None
        if keeps is not None and not keeps(node):
            indices = _indices(node, name)
            if indices is None:
                return None
            found += indices
        if name not in _arguments:
            named = (a for a in names_of(node) if not is_tensor(node, a) and not a.endswith(_LAYOUT))
            _arguments[name] = tuple(a for a in named if not isinstance(getattr(node, a), float))
        # `expand` and `cat` do not keep how much they give
        found += [name, *[tuple(metadata.shape) for metadata in node._input_metadata], *marks.get(node, ())]
        found += [_argument(getattr(node, attribute)) for attribute in _arguments[name]]
        for following, output_nr in node.next_functions:
            if following is None or following in passed_over:
                found.append(None)
                continue
            if following not in numbers:
                numbers[following] = len(nodes)
                nodes.append(following)
            found.append((numbers[following], output_nr))
    return hash(tuple(found))


def _indices(node: Node, name: str) -> list[Any] | None:
    """All that tells where an operation moves entries, if that is a few integers that need not be waited for."""
    if name not in _BY_INDICES:
        return None
    saved = getattr(Saved(node), _BY_INDICES[name])
    given = many(saved)
    tensors = [x for x in given if x is not None]
    if any(x.device.type != "cpu" for x in tensors) or sum(x.numel() for x in tensors) > _FEW:
        return None
    return [None if x is None else (x.dtype, x.shape, hash(tuple(x.flatten().tolist()))) for x in given]


@cache
def _keeper(name: str) -> Callable[[Node], bool] | None:
    """What tells of an operation that entries go where its shapes and arguments say; ``None`` if they always do."""
    if name.startswith(_REORDERING):
        return lambda node: False
    if name.endswith("CopySlices"):
        return _copies_all_rows
    if name.startswith("Embedding"):
        return lambda node: leaf_of(node.next_functions[0][0]) is not None
    return None


def _copies_all_rows(node: Node) -> bool:
    """Whether an assignment to a part of a tensor is one to all of its rows: of others nothing tells which."""
    copied, shape = [shape_of(*edge) for edge in node.next_functions[1:] if edge[0] is not None], shape_of(node)
    return all(len(part) == len(shape) and part[0] == shape[0] for part in copied)


def many(saved: Any) -> Sequence[Any]:
    """One or more values that a node saved."""
    return saved if isinstance(saved, (tuple, list)) else (saved,)


def _argument(value: Any) -> int | str | tuple | None:
    """What a node saved, if it is numbers of axes, sizes or flags; ``None`` for factors, which change."""
    if isinstance(value, (int, str)):
        return value
    plain = isinstance(value, (tuple, list)) and all([isinstance(v, (int, str)) for v in value])
    return tuple(value) if plain else None


def meets_constant(node: Node) -> bool:
    """Whether a node has operands that are no parameters, nor computed from any."""
    leaf = leaf_of(node)
    return any(below is None for below, _ in node.next_functions) or not (
        leaf is None or isinstance(leaf, nn.Parameter)
    )


def _may_bring_samples(node: Node) -> bool:
    """Whether a node may have been given samples, not by its operands, or keeps anything that users do."""
    keeping = isinstance(node, BackwardCFunction) or name_of(node).startswith(_KEEPING)
    return keeping or (meets_constant(node) and not has_number(node))


def seeing_more(nodes: Sequence[Node], parents: dict[Node, list[Node]]) -> set[Node]:
    """The nodes that see more than parameters, all of which may be samples."""
    return dependents(filter(_may_bring_samples, nodes), parents)
