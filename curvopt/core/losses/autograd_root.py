"""The Hessian root of a loss module that a user wrote, by `GenericLoss` at the input of the module.

>>> from curvopt.core.losses.loss_call import LossCall
>>> z = torch.ones(4, 3, requires_grad=True)
>>> call = LossCall("", torch.nn.SmoothL1Loss(reduction="sum"), (z, torch.full((4, 3), 0.5)), {})
>>> curvature_by_autograd(call, z.detach()).root(0, 3).shape  # a diagonal Hessian: a column for each entry
torch.Size([3, 4, 3])
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from curvopt.core.losses.generic_loss import GenericLoss
from curvopt.core.losses.hessian_root import Diagonal, LossCurvature, _normal
from curvopt.core.losses.loss_blocks import Head
from curvopt.core.recording.state import disable
from curvopt.errors import CurvoptError, CurvoptWarning

if TYPE_CHECKING:
    from curvopt.core.losses.loss_call import LossCall


class Columns(LossCurvature):
    """Any Hessian with independent samples. Samples are Gaussian.

    Args:
        vectors: columns of its root, ``[V, *z.shape]``.
    """

    def __init__(self, vectors: Tensor):
        self.vectors = vectors

    @property
    def columns(self) -> int:
        return len(self.vectors)

    def root(self, start: int, stop: int) -> Tensor:
        return self.vectors[start:stop]

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        noise = _normal(self.vectors, (samples, *self.vectors.shape[:2]), generator)
        return torch.einsum("mvn,vn...->mn...", noise, self.vectors)


def curvature_by_autograd(call: LossCall, z: Tensor) -> LossCurvature:
    """The Hessian of a loss that is only known as a function, at the input ``z``.

    Raises:
        CurvoptError: for parameters of the loss, where the root cannot be differentiated, and as `GenericLoss`.
    """
    if any(p.requires_grad for p in call.module.parameters()):
        raise CurvoptError(
            f"{call.describe()}: a loss may have no trainable parameters; put them into the model, or "
            "requires_grad_(False) them."
        )
    value, loss = _loss_at(call, z.detach())
    loss.check_definite()
    (blocks,) = loss.blocks
    values, by_entries = blocks.values, blocks.cells.shape[2] == 1
    if not values.isfinite().all() and value.isfinite().all():
        raise CurvoptError(f"{call.describe()}: its Hessian in the network's output is not finite.")
    if not values.any():
        warnings.warn(
            f"{call.describe()}: it is (piecewise) linear in its input, so its Gauss-Newton curvature is zero here.",
            CurvoptWarning,
            stacklevel=2,
        )
        by_entries = _is_by_entries_elsewhere(call, z)
    differentiable = torch.is_grad_enabled() and z.requires_grad
    if by_entries and differentiable:
        with disable():
            (slope,) = torch.autograd.grad(call.again(at := z.view_as(z)), at, create_graph=True)  # z itself has hooks
            (diagonal,) = torch.autograd.grad(slope, at, torch.ones_like(z), create_graph=True, materialize_grads=True)
        return Diagonal(diagonal.clamp(min=0).sqrt())
    if by_entries:  # of a network that diverged nan, as those of known losses
        values = torch.where(values.isfinite(), values.clamp(min=0), torch.nan)
        return Diagonal(blocks.cells.scatter(values.sqrt().unsqueeze(0))[0][0])
    if differentiable:
        raise CurvoptError(
            f"{call.describe()}: the root of its Hessian comes from an eigendecomposition, which cannot be "
            "differentiated; call backward without create_graph, or register_loss its curvature."
        )
    return Columns(next(loss.root(loss.num_columns)).vectors[0])


def _loss_at(call: LossCall, z: Tensor) -> tuple[Tensor, GenericLoss]:
    """The value of a loss at another input, and its Hessian there."""
    with torch.enable_grad(), disable():
        value = call.again(z.requires_grad_())
    root, head = get_gradient_edge(value), Head(get_gradient_edge(z), len(z))
    return value, GenericLoss([root], [torch.ones_like(value)], [head], len(z), name=call.describe())


def _is_by_entries_elsewhere(call: LossCall, z: Tensor) -> bool:
    """Whether a loss that is flat here is a sum over entries, not samples, by its Hessian at a permutation of ``z``.

    If that is not known (the loss may not take such outputs), it is.
    """
    generator = torch.Generator(device=z.device).manual_seed(0)  # the user's random numbers stay as they are
    order = torch.randperm(z.numel(), generator=generator, device=z.device)
    elsewhere = copy.copy(call)
    try:
        elsewhere.module = copy.deepcopy(call.module)  # it may keep something
        return _loss_at(elsewhere, z.detach().flatten()[order].view(z.shape))[1].blocks[0].cells.shape[2] == 1
    except Exception:
        return True
