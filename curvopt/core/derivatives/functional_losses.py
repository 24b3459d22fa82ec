r"""Losses read off the graph, so that ``F.cross_entropy(model(x), y)`` needs no `curvopt.extend`.

Whatever its options, a cross-entropy is *linear* in log-probabilities ``l = log_softmax(z)``: ``L = -sum t_c l_c``.
So the Hessian at a position is ``m (diag p - p p^T)`` with the mass ``m = sum_c t_c = -sum_c dL/dl_c``, which the
backward itself brings to the log-softmax. Class weights, ignored targets, smoothing, probabilities as targets,
reductions, scale, and losses written by hand need no further knowledge: only that everything after the log-softmax is
linear, which the names of the nodes tell. The same holds for squared errors and binary cross-entropies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.derivatives.losses import Bernoulli, Diagonal, LossCurvature, Softmax, root_of_weights
from curvopt.core.jacobians import widened
from curvopt.core.residuals import LINEAR, MULTILINEAR, leads_to, leaf_of, name_of, operation, pull
from curvopt.core.saved import saved_names
from curvopt.core.uses import Loss, LossUse, TermUse, Use, records_of
from curvopt.errors import CurvoptError

# operations that are linear in what comes from the network, while nothing else in them depends on its parameters
_LINEAR = (LINEAR | MULTILINEAR | {"NLLLOSS", "NLLLOSS2D", "DIV"}) - {
    "NATIVEBATCHNORM",
    "CUDNNBATCHNORM",
    "MIOPENBATCHNORM",
}
_ONE_OPERAND = MULTILINEAR | {"DIV", "NLLLOSS", "NLLLOSS2D"}


class FunctionalLoss:
    """A nonlinear operation of a known kind, after which the loss is linear.

    Attributes:
        node: the operation's node.
        edge: where its input z, the network's output, comes from.
    """

    axis = 0

    def __init__(self, node: Node, edge: GradientEdge):
        """Remember the place; what the node saved is read when the backward arrives."""
        self.node, self.edge = node, edge

    @property
    def input(self) -> Tensor:
        """A tensor with the shape, type and device of z."""
        z = self.edge.node._input_metadata[self.edge.output_nr]
        return torch.empty((), dtype=z.dtype, device=z.device).expand(z.shape)

    def describe(self) -> str:
        """What was recognised, for messages."""
        return f"the functional loss with {name_of(self.node)}"

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in z, from the gradient after the operation."""
        own = grad.clone()  # which hooks may change in place
        (slope,) = pull([GradientEdge(self.node, 0)], [self.edge], [own.unsqueeze(0)])
        assert slope is not None
        return slope[0]

    def curvature(self, grad: Tensor) -> tuple[LossCurvature, Tensor]:
        """The curvature, from the gradient after the operation; the factor of the loss is part of it.

        Raises:
            CurvoptError: if the loss weighs some entries negatively.
        """
        weight, build = _KINDS[operation(self.node)](_saved(self.node), grad)
        rounding = 1e3 * torch.finfo(weight.dtype).eps * grad.abs().max()
        root = root_of_weights(weight, self.describe(), rounding)
        return build(root), torch.ones((), dtype=weight.dtype, device=weight.device)


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


#: Operation to what it makes of what it saved and of the gradient: the weight of its entries, and the curvature for the
#: root of the weight.
_KINDS: dict[str, Callable[[Any, Tensor], Kind]] = {
    "LOGSOFTMAX": _log_softmax,
    "MSELOSS": _squared_error,
    "BINARYCROSSENTROPYWITHLOGITS": _bce_with_logits,
}


def _by_entry(saved: Any, grad: Tensor) -> Tensor:
    """What arrives at every entry of an elementwise loss before its reduction."""
    grad = widened(grad)
    return grad / saved.self.numel() if saved.reduction == 1 else grad


def _class_axis(dim: int, dims: int) -> int:
    return (dim - 2**64 if dim >= 2**63 else dim) % max(dims, 1)  # a negative axis is saved as an unsigned number


def _saved(node: Node) -> SimpleNamespace:
    """What a node saved, by name."""
    return SimpleNamespace(**{name.removeprefix("_saved_"): getattr(node, name) for name in saved_names(node)})


def _recognise(node: Node) -> FunctionalLoss | None:
    kind = operation(node)
    edges = [GradientEdge(following, nr) for following, nr in node.next_functions if following is not None]
    if kind not in _KINDS or len(edges) != 1:
        return None  # unknown, or the target depends on parameters, too
    if kind == "LOGSOFTMAX" and _class_axis(node._saved_dim, len(node._input_metadata[0].shape)) == 0:  # type: ignore[attr-defined]
        return None  # no batch axis
    if kind != "LOGSOFTMAX" and operation(edges[0].node) == "EXPAND":
        return None  # broadcast to the target: rows are no samples
    if kind == "BINARYCROSSENTROPYWITHLOGITS" and node.next_functions[0][0] is None:
        return None
    return FunctionalLoss(node, edges[0])


def _by_argument(loss: LossUse, uses: Collection[Node]) -> Iterator[LossUse]:
    """An extended loss, and the same for each other argument that depends on a use."""
    yield loss
    for further in loss.further:
        if further.edge is None or not leads_to(further.edge.node, uses):
            continue
        if further.input.shape[:1] != loss.input.shape[:1]:
            raise CurvoptError(
                f"{loss.describe()}: arguments of shapes {list(loss.input.shape)} and {list(further.input.shape)} both "
                "depend on parameters; give each of them a row for each sample (expand what all samples share)."
            )
        yield further


def _check_time_last(node: Node, uses: Collection[Node]) -> None:
    """Refuse a CTC loss, which takes ``[T, N, C]``, of a network that may not have the samples on the first axis."""
    following, nr = node.next_functions[0]
    assert following is not None
    T, *rest = following._input_metadata[nr].shape
    N = rest[0] if len(rest) == 2 else 1
    shapes = {use: use._input_metadata[0].shape for use in uses if leaf_of(use) is None}  # a parameter has no samples
    others = {use for use, shape in shapes.items() if N and shape and (shape[0] % N or shape[0] == T)}
    if leads_to(node, others):
        raise CurvoptError(
            f"{name_of(node)}: the CTC loss sees {N} samples of {T} steps, but a layer has an output of "
            f"shape {list(shapes[others.pop()])}; use a batch-first layout in the network, log_probs.transpose(0, 1) "
            "in front of the loss, and another number of steps than samples."
        )


Losses = dict[Loss, GradientEdge]


def find_losses(roots: Collection[Node], uses: Collection[Node]) -> tuple[Losses, list[str]]:
    """Losses of which ``roots`` are linear functions, and the names of operations that stand in the way.

    Args:
        roots: nodes of the scalars that are differentiated.
        uses: nodes of outputs of modules with parameters.

    Returns:
        The losses, and where their gradients arrive: of extended ones the factor by which it was scaled. Functional
        ones are found where there are no extended ones. If some operation stands in the way, the sum of what
        second-order rules know is not the loss; extended losses behind it are still among the losses.
    """
    losses: Losses = {}
    unknown: list[str] = []
    seen, stack = set(roots), [(root, True) for root in roots]
    while stack:
        node, known = stack.pop()
        records = records_of(node)
        # of nested losses the outermost, but of those that return the same tensor the innermost, which may be known;
        # one that was not reduced is read off the graph
        extended = [
            (record, GradientEdge(node, output_nr))
            for record, _, output_nr in records
            if isinstance(record, LossUse)
            and getattr(record.module, "reduction", "") != "none"
            and not isinstance(record.module, nn.CTCLoss)
        ]
        if extended and node not in uses:
            losses.update((use, extended[0][1]) for use in _by_argument(extended[0][0], uses))
            continue
        if any(isinstance(record, TermUse) for record, *_ in records) or leaf_of(node) is not None:
            continue  # parameters alone: no sample's loss
        inputs = [following for following, _ in node.next_functions if following is not None]
        if operation(node).endswith("CTCLOSS"):
            _check_time_last(node, uses)
        if known:
            # of a use that answers for it: what was read off a module's operations may have a loss among them
            inside = [record.describe() for record, *_ in records if isinstance(record, Use) and node in uses]
            functional = None if inside else _recognise(node)
            if functional is not None:
                if leads_to(functional.edge.node, uses):
                    losses[functional] = GradientEdge(node, 0)
                continue
            name = operation(node)
            if name in _ONE_OPERAND and len(inputs) > 1:  # a weight that is learned is a constant for all others
                inputs = [following for following in inputs if leads_to(following, uses)]
            linear = name in _LINEAR and not (name in _ONE_OPERAND and len(inputs) > 1)
            linear = linear and not (name == "DIV" and node.next_functions[0][0] not in inputs)
            if inside or not linear:
                if not leads_to(node, uses):
                    continue
                reduced = extended or not len(node._input_metadata[0].shape)  # type: ignore[attr-defined]
                where = f" inside of {inside[0]} (move its parameters into a submodule)" if inside and reduced else ""
                unknown.append(name_of(node) + where)
                known = False
        if node in uses:
            continue
        for following in inputs:
            if following not in seen:
                seen.add(following)
                stack.append((following, known))
    return losses, unknown
