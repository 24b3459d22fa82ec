"""The losses of which the differentiated scalar is a linear function, found in the graph.

>>> import torch
>>> z = 1 * torch.ones(4, 3, requires_grad=True)  # the output of a network
>>> scalar = 2 * torch.nn.functional.cross_entropy(z, torch.tensor([0, 1, 2, 0]))
>>> losses, unknown = find_losses([scalar.grad_fn], {z.grad_fn})
>>> [loss.describe() for loss in losses], unknown
(['the functional loss with LogSoftmaxBackward0'], [])
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.graph.nodes import leads_to, leaf_of, name_of, operation, shape_of
from curvopt.core.graph.operations import BATCH_NORMS, LINEAR, MULTILINEAR
from curvopt.core.losses.known import _recognise
from curvopt.core.losses.loss_call import LossCall
from curvopt.core.losses.roots import Loss
from curvopt.core.record.calls import ModuleCall, TermCall, records_of
from curvopt.errors import CurvoptError

# operations that are linear in an operand that comes from the network, if no other one depends on its parameters
_LINEAR = (LINEAR | MULTILINEAR | {"DIV"}) - BATCH_NORMS

_ONE_OPERAND = MULTILINEAR | {"DIV"}


Losses = dict[Loss, GradientEdge]


def find_losses(roots: Collection[Node], calls: Collection[Node]) -> tuple[Losses, list[str]]:
    """Losses of which ``roots`` are linear functions, and the names of operations that stand in the way.

    Args:
        roots: nodes of the scalars that are differentiated.
        calls: nodes of outputs of modules with parameters.

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
            record.of(GradientEdge(node, output_nr))
            for record, _, output_nr in records
            if isinstance(record, LossCall)
            and getattr(record.module, "reduction", "") != "none"
            and not isinstance(record.module, nn.CTCLoss)
            and shape_of(node, output_nr).numel() == 1
        ]
        if extended and node not in calls:
            losses[extended[0]] = extended[0].value
            continue
        if any(isinstance(record, TermCall) for record, *_ in records):
            if not known:
                raise CurvoptError(
                    "The loss is not linear in the value of an L2Regularizer, so its curvature is not that of the "
                    "regularizer; add the regularizer to the loss as it is."
                )
            continue
        if leaf_of(node) is not None:
            continue  # parameters alone: no sample's loss
        inputs = [following for following, _ in node.next_functions if following is not None]
        if known:
            # the output of a call with a rule is no loss; an operation of a module without a rule may be one
            inside = [record.describe() for record, *_ in records if isinstance(record, ModuleCall) and node in calls]
            functional = None if inside else _recognise(node)
            if functional is not None:
                if leads_to(functional.edge.node, calls):
                    losses[functional] = GradientEdge(node, 0)
                continue
            name = operation(node)
            if name in _ONE_OPERAND and len(inputs) > 1:  # a weight that is learned is a constant for all others
                inputs = [following for following in inputs if leads_to(following, calls)]
            linear = name in _LINEAR and not (name in _ONE_OPERAND and len(inputs) > 1)
            linear = linear and not (name == "DIV" and node.next_functions[0][0] not in inputs)
            if inside or not linear:
                if not leads_to(node, calls):
                    continue
                reduced = extended or not len(shape_of(node))
                where = f" inside of {inside[0]} (move its parameters into a submodule)" if inside and reduced else ""
                unknown.append(name_of(node) + where)
                known = False
        if node in calls:
            continue
        for following in inputs:
            if following not in seen:
                seen.add(following)
                stack.append((following, known))
    return losses, unknown
