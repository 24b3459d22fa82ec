"""A use in the graph of one backward: what it answers for, and what can be told of it by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.rules import DefaultRule, Rule, has_batch, tensors
from curvopt.core.functional import FunctionalUse
from curvopt.core.residuals import is_complex, leaf_of, shape_of, walk
from curvopt.core.uses import Steps, Use
from curvopt.errors import CurvoptError


class Part(NamedTuple):
    """The part of the graph between the outputs of a use and its inputs.

    Attributes:
        ends: the outputs.
        boundary: the nodes that give the inputs.
        parameters: the identities of those of the use.
    """

    ends: frozenset[tuple[Node, int]]
    boundary: frozenset
    parameters: frozenset[int]

    def behind(self, node: Node) -> list[nn.Parameter]:
        """The parameters on which a node inside depends, in the order of the graph."""
        leaves = (leaf_of(inner) for inner in walk([node], self.boundary))
        return [leaf for leaf in leaves if id(leaf) in self.parameters]


class Interior:
    """The parts of the graph that lie in recorded uses, and by which parameters enter them."""

    def __init__(self) -> None:
        self.parts: dict[Node, list[Part]] = {}
        self.edges: dict[tuple[Node, int], None] = {}  # in the order of the graph, so that sums are the same again

    @property
    def nodes(self) -> KeysView[Node]:
        """All nodes in them."""
        return self.parts.keys()

    def add(
        self, outputs: Sequence[GradientEdge], boundary: frozenset, parameters: Sequence[nn.Parameter]
    ) -> set[nn.Parameter]:
        """The part between the outputs of a use and its inputs; those of its parameters that enter it."""
        ends = frozenset([(edge.node, edge.output_nr) for edge in outputs])
        part = Part(ends, boundary, frozenset(map(id, parameters)))
        entering: set[nn.Parameter] = set()
        for node in walk([edge.node for edge in outputs], boundary):
            self.parts.setdefault(node, []).append(part)
            for position, (target, _) in enumerate(node.next_functions):
                p = leaf_of(target)
                if p is not None and id(p) in part.parameters:
                    self.edges[node, position] = None
                    entering.add(p)
        return entering

    def ways_around(
        self, nodes: Iterable[Node], known: Callable[[nn.Parameter], bool]
    ) -> Iterator[tuple[Node, int, nn.Parameter]]:
        """Edges ``(node, position)`` by which a known parameter enters the graph past every use of it.

        Any number of parameters by one edge, from what a module keeps, and others read: modules perhaps.
        """
        for node in nodes:
            own = self.parts.get(node, [])
            for position, (target, nr) in enumerate(node.next_functions):
                p = leaf_of(target)
                if p is not None:
                    if (node, position) not in self.edges and known(p):
                        yield node, position, p
                elif target is not None and self.parts.get(target, own) != own:
                    inner = [part for part in self.parts[target] if (target, nr) not in part.ends]
                    inside = {p for part in inner if part in own for p in part.behind(target)}
                    around = [p for part in inner if part not in own for p in part.behind(target)]
                    yield from ((node, position, p) for p in dict.fromkeys(around) if p not in inside)


class Entry:
    """A use in the graph: its rule, the parameters it answers for, and where its outputs lie."""

    def __init__(self, use: Use, parameters: dict[str, nn.Parameter] | None = None, rule: Rule | None = None):
        """Look up, unless told, the trainable parameters and the rule."""
        self.use = use
        self.rule: Rule = use.rule if rule is None else rule
        if parameters is None:
            own = self.rule.parameters(use.module).items()
            trainable = {name: p for name, p in own if p.requires_grad and p.numel()}  # nothing of no entries
            parameters = {name: p for name, p in trainable.items() if not any(p is x for x in use.given)}
        self.parameters = parameters
        #: Names of those that other uses inside of this one answer for, too.
        self.divided: list[str] = []
        self.edges: dict[int, GradientEdge] = {}
        for name, p in self.parameters.items():
            if p.is_complex():
                raise CurvoptError(f"{use.describe()}: parameter '{name}' is complex; use two real ones.")
            if p.is_meta:
                raise CurvoptError(
                    f"{use.describe()}: parameter '{name}' is on the meta device; give it numbers first."
                )
        #: Whether a module without a rule got nothing that may hold samples.
        self.no_samples = isinstance(self.rule, DefaultRule) and not has_batch(use)
        self.rows = self.rule.rows(use) if self.parameters and not self.no_samples else 0
        #: How steps come before the samples, if they do.
        self.steps: Steps | None = None
        #: Whether it is a call on a single sample without a batch axis.
        self.single = not (self.rows or self.no_samples) and self.rule.is_single(use)

    @property
    def takes_samples(self) -> bool:
        """Whether a module without a rule can be called on single samples, as far as that can be told beforehand.

        One that gives complex numbers is not.
        """
        if not isinstance(self.rule, DefaultRule):
            return True
        real = not any(is_complex(edge.node, edge.output_nr) for edge in self.edges.values())
        return real and self.rule.takes_samples(self.use, list(self.parameters))

    @property
    def length(self) -> int:
        """Length of the first axis of the input, of frozen modules, too; 0 if there is none."""
        return self.rows or (self.rule.rows(self.use) if has_batch(self.use) else 0)

    def axis(self, index: int) -> int | Tensor | None:
        """Axis of an output that counts the samples, or the (packed) sequence of each row; -1 where it is not there.

        ``None`` where neither tells.
        """
        if self.steps is not None:
            return 1 if self.steps == "axis" else None
        return -1 if self.single else self.rule.output_axis(self.use, index)

    @property
    def nodes(self) -> set[Node]:
        """The nodes of its outputs."""
        return {edge.node for edge in self.edges.values()}

    @property
    def sees_data(self) -> bool:
        """Whether a module was called with numbers that were not computed from parameters."""
        return not (self.use.boundary or self.sees_indices or isinstance(self.use, FunctionalUse))

    @property
    def gives_vectors(self) -> bool:
        """Whether every output is one vector, or of a call without a batch axis."""
        return self.single or all(shape[:-1].numel() == 1 for shape in self.use.shapes)

    @property
    def gives_numbers(self) -> bool:
        """Whether no output has an axis, as those of a model that computes its loss."""
        return not any(self.use.shapes)

    @property
    def sees_indices(self) -> bool:
        """Whether it was called with other than floating-point numbers."""
        return not all(x.is_floating_point() for x in tensors(self.use))

    def may_hold_samples(self, seeing: Collection[Node]) -> bool:
        """Whether it sees anything but parameters, by the nodes that do."""
        return self.sees_indices or not self.nodes.isdisjoint(seeing)

    @property
    def part(self) -> tuple[list[GradientEdge], frozenset, list[nn.Parameter]]:
        """Its part of the graph: where its outputs come from, where it begins, and its parameters."""
        return list(self.edges.values()), self.use.boundary, list(self.parameters.values())

    def leave(self, interior: Interior, inside: Interior) -> None:
        """Leave to others what they answer for inside: modules that it calls, or earlier calls whose results it keeps.

        Args:
            interior: what the others answer for.
            inside: the part of the graph that lies in this use, less that afterwards.
        """
        others, own = set[int](), set[int]()
        for node, position in list(inside.edges):
            known = (node, position) in interior.edges
            (others if known else own).add(id(leaf_of(node.next_functions[position][0])))
            if known:
                del inside.edges[node, position]
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) in own}
        self.divided = [name for name, p in self.parameters.items() if id(p) in others]

    def check_alone(self) -> None:
        """Raise if others answer for a part of a parameter's uses, all of which a call of the module would count."""
        if self.divided:
            raise CurvoptError(
                f"{self.use.describe()}: parameter '{self.divided[0]}' is also used by a module that it calls, or by "
                "an earlier call whose result it keeps, and by itself in a way that is not known, so its part cannot "
                "be told; pass it what it keeps, or use the parameter by F.linear, products, sums or F.embedding."
            )

    def gives_samples(self, edge: GradientEdge) -> bool:
        """Whether an output may hold the samples along its first axis, as that of a module of parameters may not."""
        shape = shape_of(edge.node, edge.output_nr)
        called = isinstance(self.rule, DefaultRule) and self.rows > 0
        return not self.no_samples and (not called or (len(shape) > 0 and shape[0] % self.rows == 0))


def inner_first(calls: dict[Entry, Interior]) -> list[tuple[Entry, Interior]]:
    """Calls before those that they are in, and those in one block of a checkpoint one after the other."""
    sizes: dict[Any, int] = {}
    for entry, inside in calls.items():
        sizes[entry.use.block] = max(sizes.get(entry.use.block, 0), len(inside.nodes))
    numbers = {block: number for number, block in enumerate(sizes)}

    def order(item: tuple[Entry, Interior]) -> tuple[int, int, int]:
        block, size = item[0].use.block, len(item[1].nodes)
        return size if block is None else sizes[block], numbers[block], size

    return sorted(calls.items(), key=order)


class Ending:
    """A use after which no other comes before a loss that is not known: a row of its output is a sample, or a part.

    Args:
        use: the use.
        edge: where its output comes from.
        axis: of the output, along which the rows lie.
    """

    def __init__(self, use: Use, edge: GradientEdge, axis: int = 0):
        """Remember the place."""
        metadata: Any = edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]
        self.use, self.edge, self.axis = use, edge, axis
        self.input = torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)

    def describe(self) -> str:
        """Path and type of the module, for messages."""
        return self.use.describe()

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in the output."""
        return grad
