"""Hessian roots of PyTorch's loss modules.

>>> z, target = torch.zeros(4, 3), torch.ones(4, 3)
>>> mse(nn.MSELoss(reduction="sum"), z, target).diagonal[0]  # roots of 2
tensor([1.4142, 1.4142, 1.4142])
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from curvopt.core.losses.registry import _reduced, register_loss
from curvopt.core.losses.roots import Bernoulli, Diagonal, Softmax, root_of_weights
from curvopt.errors import CurvoptError


@register_loss(nn.MSELoss)
def mse(module: nn.MSELoss, z: Tensor, target: Tensor) -> Diagonal:
    """Squared error: Hessian 2 for each term, with as many terms per entry of z as broadcasting makes."""
    terms = prod(torch.broadcast_shapes(z.shape, target.shape))
    weight = torch.full_like(z, _reduced(module, terms / z.numel(), terms))
    return Diagonal((2 * weight).sqrt(), weight)


@register_loss(nn.BCEWithLogitsLoss)
def bce_with_logits(module: nn.BCEWithLogitsLoss, z: Tensor, target: Tensor) -> Bernoulli:
    """Binary cross-entropy of logits: every entry weighs ``weight (pos_weight y + 1 - y)``."""
    y = target.to(z.dtype)
    weight = torch.ones_like(z) if module.pos_weight is None else 1 + (module.pos_weight - 1) * y
    weight = weight if module.weight is None else weight * module.weight
    return Bernoulli(z, root_of_weights(_reduced(module, weight, z.numel()).to(z.dtype), type(module).__name__))


@register_loss(nn.CrossEntropyLoss)
def cross_entropy(module: nn.CrossEntropyLoss, z: Tensor, target: Tensor) -> Softmax:
    """Cross-entropy of logits ``[N, C, *positions]`` with labels ``[N, *positions]`` or probabilities like ``z``."""
    if z.dim() < 2:
        raise CurvoptError(
            f"{type(module).__name__}: input of shape {list(z.shape)} has no batch axis; unsqueeze(0) input and target."
        )
    classes, smoothing = z.shape[1], module.label_smoothing
    weight = None if module.weight is None else module.weight.to(z.dtype)
    if target.is_floating_point():
        smooth = (target.to(z.dtype) * (1 - smoothing) + smoothing / classes).movedim(1, -1)
        mass, terms = (smooth if weight is None else smooth * weight).sum(-1), z.numel() // classes
    else:
        kept = target != module.ignore_index
        mass = of_target = kept.to(z.dtype)
        if weight is not None:
            of_target = weight[torch.where(kept, target, 0)] * kept
            mass = of_target * (1 - smoothing) + kept * (smoothing * weight.mean())
        terms = torch.where(kept.any(), of_target.sum(), 1.0)  # where all are ignored, there is no curvature, either
    return Softmax(z.softmax(1), root_of_weights(_reduced(module, mass, terms), type(module).__name__))
