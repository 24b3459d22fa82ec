"""The Hessian root of a loss module that a user wrote, by double backward.

>>> from curvopt import extend
>>> from curvopt.core.losses.loss_call import LossCall
>>> z = torch.ones(4, 3, requires_grad=True)
>>> call = LossCall("", torch.nn.SmoothL1Loss(reduction="sum"), (z, torch.full((4, 3), 0.5)), {})
>>> _from_autograd(call, z.detach()).root(0, 3).shape  # a diagonal Hessian: a column for each entry
torch.Size([3, 4, 3])
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from math import inf, nan, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvopt.core.linear_algebra import eigh
from curvopt.core.losses.hessian_root import Diagonal, LossCurvature, _normal
from curvopt.core.recording.state import disable
from curvopt.errors import CurvoptError, CurvoptWarning

if TYPE_CHECKING:
    from curvopt.core.losses.loss_call import LossCall


# ------------------------------------------------------------------------------------------------------- any other loss


class Blocks(LossCurvature):
    """Any Hessian with independent samples. Samples are Gaussian.

    Args:
        roots: root of each sample's Hessian, ``[N, D, V]`` with D entries of ``z`` per sample.
        shape: the shape of ``z``.
    """

    def __init__(self, roots: Tensor, shape: torch.Size):
        self.roots, self.shape = roots, shape

    @property
    def columns(self) -> int:
        return self.roots.shape[2]

    def root(self, start: int, stop: int) -> Tensor:
        return self.roots[:, :, start:stop].permute(2, 0, 1).reshape(-1, *self.shape)

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        noise = _normal(self.roots, (samples, len(self.roots), self.columns), generator)
        return torch.einsum("ndv,mnv->mnd", self.roots, noise).reshape(-1, *self.shape)


def _from_autograd(call: LossCall, z: Tensor) -> LossCurvature:
    """The Hessian of a loss that is only known as a function, from double backward, with its properties checked.

    The checks are products with random vectors: a Hessian that is diagonal, or has no entries between samples, agrees
    with its diagonal (its blocks) on them, and any other does not, almost surely.
    """
    if any(p.requires_grad for p in call.module.parameters()):
        raise CurvoptError(
            f"{call.describe()}: a loss may have no trainable parameters; put them into the model, or "
            "requires_grad_(False) them."
        )
    differentiable = torch.is_grad_enabled() and z.requires_grad
    value, product = _hessian_at(call, z)
    generator = torch.Generator(device=z.device).manual_seed(0)  # the user's random numbers stay as they are
    probe = _normal(z, z.shape, generator)
    image = product(probe)
    N, D = len(z), prod(z.shape[1:])
    limit = _rounding(image)
    if not 0 < limit < inf:
        if not limit == 0:
            if value.isfinite().all():
                raise CurvoptError(f"{call.describe()}: its Hessian in the network's output is not finite.")
            return Diagonal(torch.full_like(z, nan))  # of a network that diverged, as those of known losses
        warnings.warn(
            f"{call.describe()}: it is (piecewise) linear in its input, so its Gauss-Newton curvature is zero here.",
            CurvoptWarning,
            stacklevel=2,
        )
        if not _is_diagonal_elsewhere(call, z, probe, generator):
            return Blocks(z.new_zeros(N, D, D), z.shape)
    diagonal = product(torch.ones_like(z))
    if _is_diagonal(diagonal, probe, image):
        _check_convex(call, diagonal)
        return Diagonal(diagonal.clamp(min=0).sqrt())

    columns = []
    for j in range(D):
        vector = torch.zeros_like(z)
        vector.view(N, D)[:, j] = 1
        columns.append(product(vector).reshape(N, D))
    blocks = torch.stack(columns, dim=2)
    if bool(((blocks @ probe.reshape(N, D, 1)).reshape(z.shape) - image).abs().max() > limit):
        raise CurvoptError(
            f"{call.describe()}: its Hessian couples the rows of its input {list(z.shape)}, but second-order "
            "quantities need a loss that is a sum over independent samples."
        )
    if differentiable:
        raise CurvoptError(
            f"{call.describe()}: the root of its Hessian comes from an eigendecomposition, which cannot be "
            "differentiated; call backward without create_graph, or register_loss its curvature."
        )
    values, vectors = eigh(blocks)
    _check_convex(call, values)
    return Blocks(vectors * values.clamp(min=0).sqrt().unsqueeze(1), z.shape)


def _hessian_at(call: LossCall, z: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The value of a loss at ``z``, and products with its Hessian there."""
    differentiable = torch.is_grad_enabled() and z.requires_grad
    with torch.enable_grad(), disable():
        # an alias: z itself has hooks
        at = z.view_as(z) if differentiable else z.detach().requires_grad_()
        value = call.again(at)
        (gradient,) = torch.autograd.grad(value, at, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        if not gradient.requires_grad:
            return torch.zeros_like(z)
        try:
            (Hv,) = torch.autograd.grad(
                gradient, at, vector, retain_graph=True, create_graph=differentiable, materialize_grads=True
            )
        except RuntimeError as error:
            raise CurvoptError(
                f"{call.describe()}: PyTorch has no second derivative of it ({error}); use another loss, e.g. "
                "CrossEntropyLoss, or write its Hessian down with curvopt.core.losses.registry.register_loss."
            ) from error
        return Hv

    return value, product


def _is_diagonal_elsewhere(call: LossCall, z: Tensor, probe: Tensor, generator: torch.Generator) -> bool:
    """Whether the Hessian of a loss that is flat here is diagonal at other outputs, a permutation of these.

    It is a sum over entries then, else over samples. If that is not known (the loss may not take such outputs), it is.
    """
    order = torch.randperm(z.numel(), generator=generator, device=z.device)
    elsewhere = copy.copy(call)
    try:
        elsewhere.module = copy.deepcopy(call.module)  # it may keep something
        _, product = _hessian_at(elsewhere, z.detach().flatten()[order].view(z.shape))
        return _is_diagonal(product(torch.ones_like(z)), probe, product(probe))
    except Exception:
        return True


def _rounding(image: Tensor) -> Tensor:
    """Bound on the rounding errors in a product with a Hessian, ``[]``."""
    return 1e3 * torch.finfo(image.dtype).eps * image.abs().max()


def _is_diagonal(diagonal: Tensor, probe: Tensor, image: Tensor) -> bool:
    """Whether a Hessian is, by its products with ones and with a random vector; if they are no numbers, say so."""
    return not bool(((diagonal * probe - image).abs() > _rounding(image)).any())


def _check_convex(call: LossCall, eigenvalues: Tensor) -> None:
    smallest = eigenvalues.min()
    if bool(smallest < -1e4 * torch.finfo(eigenvalues.dtype).eps * eigenvalues.abs().max()):
        raise CurvoptError(
            f"{call.describe()}: it is not convex here (its Hessian in the network's output has the eigenvalue "
            f"{float(smallest):.3g}), so it has no Gauss-Newton matrix; use a convex loss, or a quantity of the "
            "Hessian itself (DiagHessian, HMP) where there is one."
        )
