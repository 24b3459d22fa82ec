"""The terms of a loss that are known, read off the graph: ``F.cross_entropy(model(x), y)`` needs no `curvopt.extend`.

Whatever its options, a cross-entropy is *linear* in log-probabilities ``l = log_softmax(z)``: ``L = -sum t_c l_c``.
So the Hessian at a position is ``m (diag p - p p^T)`` with the mass ``m = sum_c t_c = -sum_c dL/dl_c``, which is the
gradient that arrives at the log-softmax, summed. Class weights, ignored targets, smoothing, probabilities as targets,
reductions, scale, and losses written by hand need no further knowledge: only that everything after the log-softmax is
linear, which the names of the nodes tell. Squared errors, squares written by hand, and binary cross-entropies are
treated likewise.

>>> z = 1 * torch.ones(4, 3, requires_grad=True)  # the output of a network
>>> scalar = 2 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 1, 2, 0])) + z.exp().mean()
>>> terms = find_terms([(scalar.grad_fn, 0)], {z.grad_fn})
>>> [loss.describe() for loss in terms.known], terms.nonlinear_names
(['the cross-entropy (LogSoftmaxBackward0)'], ['ExpBackward0'])
>>> terms.receive([torch.tensor(1.0)])
>>> curvature = terms.known[0].curvature()
>>> curvature.columns, curvature.root(0, 2).shape  # C - 1 columns
(2, torch.Size([2, 4, 3]))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.losses.roots import Bernoulli, Columns, Diagonal, LossCurvature, Softmax, root_of_weights
from curvopt.core.nodes import (
    Edge,
    Saved,
    leads_to,
    leaf_of,
    metadata,
    name_of,
    operation,
    saved,
    shape_of,
    signed,
    walk,
)
from curvopt.core.operations import BATCH_NORMS, LINEAR, MULTILINEAR
from curvopt.core.products.base import cast, widened
from curvopt.core.record import TermCall, records_of
from curvopt.core.vjp import NodeVjp, pull
from curvopt.errors import CurvoptError


class KnownLoss:
    """A term of the scalar: a nonlinear operation of a known kind, of which the scalar is a linear function.

    Attributes:
        node: the operation's node.
        edge: where its input z comes from.
        grad: the gradient that arrives at the operation by linear operations.
    """

    grad: Tensor

    def __init__(self, node: Node, edge: GradientEdge):
        """Keep the place; saved values are read when they are needed."""
        self.node, self.edge = node, edge

    @property
    def input(self) -> Tensor:
        """A tensor with the shape, type and device of z."""
        z = metadata(self.edge.node, self.edge.output_nr)
        return torch.empty((), dtype=z.dtype, device=z.device).expand(z.shape)

    def describe(self) -> str:
        """The kind of the loss, for messages."""
        return f"{_KINDS[operation(self.node)][0]} ({name_of(self.node)})"

    @property
    def is_square(self) -> bool:
        """Whether it is a square written by hand, whose factor does not tell how many means over samples it is."""
        return operation(self.node) in ("MUL", "POW")

    def slope(self) -> Tensor:
        """Gradient of the term in z, like z; differentiable if gradients are enabled."""
        grad = self.grad.clone()  # which hooks may change in place
        (slope,) = pull([GradientEdge(self.node, 0)], [self.edge], [grad.unsqueeze(0)])
        assert slope is not None
        return slope[0]

    def curvature(self) -> LossCurvature:
        """The Hessian of the term in z.

        Raises:
            NotConvex: if the loss weighs entries negatively.
        """
        weight, build = _KINDS[operation(self.node)][1](Saved(self.node), self.grad)
        rounding = 1e3 * torch.finfo(weight.dtype).eps * self.grad.abs().max()
        return build(root_of_weights(weight, self.describe(), rounding))


class FactoredLoss:
    """A known term with its Hessian in its input: a part of the scalar, as is a `GenericLoss`.

    Args:
        loss: the term.
        by_entries: whether the root has a column for each entry of the input, though it needs fewer.

    Attributes:
        curvature: the Hessian.
        edges: where the input comes from.
        weights: the factor of the loss of each prediction, see `LossCurvature`.
        variables: the number of variables of a prediction.
        may_be_flat: whether the scalar may be linear in entries of the input.
        is_linear: whether it has no curvature there at all.

    Raises:
        NotConvex: if the loss weighs entries negatively.
    """

    is_linear = False

    def __init__(self, loss: KnownLoss, by_entries: bool):
        curvature = loss.curvature()
        self.loss, self.edges = loss, [loss.edge]
        self.curvature = curvature.by_entries() if by_entries else curvature
        assert curvature.weights is not None
        self.weights, self.variables = curvature.weights, curvature.variables
        self.may_be_flat = isinstance(curvature, Diagonal)

    @cached_property
    def slopes(self) -> list[Tensor]:
        """Gradient of the term at each edge."""
        return [self.loss.slope()]

    def root(self, size: int, ranks: Sequence[int]) -> Iterator[Columns]:
        """Columns of the exact root, at most ``size`` at a time.

        Args:
            size: columns at a time.
            ranks: of each row of z its number among the rows of its sample; rows of equal rank share columns.
        """
        rows, total = max(ranks, default=0) + 1, self.curvature.columns
        in_closed_form = rows == 1 and self.loss.input.dim() == 2
        rank_of_row = torch.tensor(ranks, device=self.loss.input.device) if rows > 1 else None  # else no transfer
        for rank in range(rows):
            for start in range(0, total, size):
                columns = self.curvature.root(start, min(start + size, total))
                if rank_of_row is not None:
                    columns = columns * (rank_of_row == rank).view(1, -1, *[1] * (columns.dim() - 2))
                moment = partial(self._moment, start) if in_closed_form else None
                yield Columns(self.edges, [cast(columns, self.loss.input.dtype)], moment=moment)

    def _moment(self, start: int) -> Tensor:
        """The moment of all columns for the first ones, zeros for further ones."""
        nothing = widened(self.loss.input.new_zeros(())).expand(2 * self.loss.input.shape[1:])
        return self.curvature.moment if start == 0 else nothing

    def sample(self, samples: int, generator: torch.Generator | None) -> list[Tensor]:
        """Random columns ``[samples, *z]`` at each edge, see `LossCurvature.sample`."""
        return [self.curvature.sample(samples, generator)]

    def typical(self, generator: torch.Generator | None) -> list[Tensor]:
        """A column at each edge with the mean square of random ones."""
        return [self.curvature.diagonal] if isinstance(self.curvature, Diagonal) else self.sample(1, generator)


Kind = tuple[Tensor, Callable[[Tensor], LossCurvature]]


def _log_softmax(saved: Any, grad: Tensor) -> Kind:
    dim = _class_axis(saved.dim, saved.result.dim())
    return -widened(grad).sum(dim), lambda mass: Softmax(widened(saved.result).exp(), mass, dim)


def _squared_error(saved: Any, grad: Tensor) -> Kind:
    z = widened(saved.self)
    return (2 * _by_entry(saved, grad)).expand(z.shape), lambda root: Diagonal(root, root.square() / 2)


def _bce_with_logits(saved: Any, grad: Tensor) -> Kind:
    z, y = widened(saved.self), widened(saved.target)
    weight = _by_entry(saved, grad)
    if saved.pos_weight is not None:
        weight = weight * (1 + (saved.pos_weight - 1) * y)
    if saved.weight is not None:
        weight = weight * saved.weight
    return weight.expand(z.shape), lambda root: Bernoulli(z, root)


def _square(saved: Any, grad: Tensor) -> Kind:
    z = widened(saved.self)
    return (2 * widened(grad)).expand(z.shape), lambda root: Diagonal(root, root.square() / 2)


#: For each operation its name for messages, and a function of its saved values and of the gradient. It returns the
#: weight of the entries, and the curvature as a function of the root of the weight.
_KINDS: dict[str, tuple[str, Callable[[Any, Tensor], Kind]]] = {
    "LOGSOFTMAX": ("the cross-entropy", _log_softmax),
    "MSELOSS": ("the squared error", _squared_error),
    "MUL": ("the square", _square),
    "POW": ("the square", _square),
    "BINARYCROSSENTROPYWITHLOGITS": ("the binary cross-entropy", _bce_with_logits),
}


def _by_entry(saved: Any, grad: Tensor) -> Tensor:
    """The gradient at every entry of an elementwise loss before its reduction."""
    grad = widened(grad)
    return grad / saved.self.numel() if saved.reduction == 1 else grad


def _class_axis(dim: int, dims: int) -> int:
    return signed(dim) % max(dims, 1)


def _recognise(node: Node) -> KnownLoss | None:
    kind = operation(node)
    edges = [GradientEdge(following, nr) for following, nr in node.next_functions if following is not None]
    if kind not in _KINDS or len(set(edges)) != 1:
        return None  # unknown, or the target depends on parameters, too
    (z,) = set(edges)
    shape = shape_of(z.node, z.output_nr)
    if kind in ("MUL", "POW"):
        is_square = len(edges) == 2 if kind == "MUL" else saved(node, "exponent") == 2
        return KnownLoss(node, z) if is_square and shape and shape == shape_of(node) else None
    if kind == "LOGSOFTMAX" and _class_axis(saved(node, "dim"), len(shape_of(node))) == 0:
        return None  # no batch axis
    if kind != "LOGSOFTMAX" and operation(z.node) == "EXPAND":
        return None  # broadcast to the target: rows are no samples
    if kind == "BINARYCROSSENTROPYWITHLOGITS" and node.next_functions[0][0] is None:
        return None
    return KnownLoss(node, z)


@dataclass
class Terms:
    """The scalar as a sum: terms that are known, and a remainder.

    Attributes:
        roots: outputs of nodes that are differentiated.
        known: the terms.
        nonlinear: the outermost operations of which the remainder is a nonlinear function of outputs of calls.
        ends: outputs of calls of which the scalar is a linear function, along a path past all known terms.
        linear: the operations on paths from the roots to known terms.
    """

    roots: Sequence[Edge]
    known: list[KnownLoss] = field(default_factory=list)
    nonlinear: list[Node] = field(default_factory=list)
    ends: list[Edge] = field(default_factory=list)
    linear: set[Node] = field(default_factory=set)

    @property
    def nonlinear_names(self) -> list[str]:
        """Names of the outermost operations of the remainder."""
        return list(dict.fromkeys(map(name_of, self.nonlinear)))

    def join(self, losses: Collection[KnownLoss]) -> None:
        """Make known terms a part of the remainder."""
        self.nonlinear += [loss.node for loss in losses]
        self.known = [loss for loss in self.known if loss not in losses]

    def receive(self, grads: Sequence[Tensor]) -> None:
        """Set what arrives at the known terms from the gradients of the roots; drop terms at which nothing arrives."""
        edges = [GradientEdge(loss.node, 0) for loss in self.known]
        arrived = NodeVjp([GradientEdge(*root) for root in self.roots], edges, self.linear)(grads)
        for loss, grad in zip(self.known, arrived, strict=True):
            if grad is not None:
                loss.grad = grad
        self.known = [loss for loss, grad in zip(self.known, arrived, strict=True) if grad is not None]


# operations that are linear in an operand that comes from the network, if no other one depends on its parameters
_ONE_OPERAND = MULTILINEAR | {"DIV"}
_LINEAR = (LINEAR | _ONE_OPERAND) - BATCH_NORMS


def find_terms(roots: Sequence[Edge], ends: Collection[Node], predictions: Collection[Edge] = ()) -> Terms:
    """The terms of a sum: losses of a known kind that reach the scalar through linear operations.

    Args:
        roots: outputs of nodes that are differentiated.
        ends: nodes of outputs of calls with parameters.
        predictions: outputs of models with several numbers for each sample. Where the scalar is linear in one, that
            part has no curvature but that of known losses behind it, such as a cross-entropy of log-probabilities.

    Raises:
        CurvoptError: for a regularizer of which the scalar is no linear function.
    """
    terms, nonlinear = Terms(roots), dict[Node, None]()
    known: dict[Node, KnownLoss] = {}
    stack = [(root, False) for root in roots]
    seen = set(stack)
    while stack:
        edge, predicted = stack.pop()
        node, predicted = edge[0], predicted or edge in predictions
        if leaf_of(node) is not None or any(isinstance(record, TermCall) for record, *_ in records_of(node)):
            continue  # only parameters: no sample's loss
        if node in ends:
            terms.ends.append(edge)
            continue
        found = known.get(node) or _recognise(node)
        if found is not None:
            if leads_to(found.edge.node, ends) and found.input.numel():
                known[node] = found
            continue
        operands = [below for below, _ in node.next_functions if below is not None]
        kind = operation(node)
        if kind in _ONE_OPERAND and len(operands) > 1:  # a learned weight is a constant for all other parameters
            operands = [below for below in operands if leads_to(below, ends)]
        one = len(operands) <= 1 and not (kind == "DIV" and node.next_functions[0][0] not in operands)
        if kind not in _LINEAR or (kind in _ONE_OPERAND and not one):
            if leads_to(node, ends) and predicted:
                terms.ends.append(edge)
            elif leads_to(node, ends):
                nonlinear[node] = None
            _refuse_regularizers(node, ends)
            continue
        terms.linear.add(node)
        for below in node.next_functions:
            if below[0] in operands and (below, predicted) not in seen:
                seen.add((below, predicted))  # type: ignore[arg-type]
                stack.append((below, predicted))  # type: ignore[arg-type]
    terms.known, terms.nonlinear = list(known.values()), list(nonlinear)
    terms.ends = [edge for edge in dict.fromkeys(terms.ends) if edge[0] not in nonlinear]
    return terms


def _refuse_regularizers(node: Node, ends: Collection[Node]) -> None:
    if any(isinstance(record, TermCall) for below in walk([node], last=ends) for record, *_ in records_of(below)):
        raise CurvoptError(
            "The loss is not linear in the value of an L2Regularizer, so its curvature is not that of the "
            "regularizer; add the regularizer to the loss as it is."
        )
