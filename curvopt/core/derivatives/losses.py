r"""Curvature of losses with respect to the network's output ``z``: columns of a root ``S`` of the Hessian ``S S^T``.

Samples ``n`` are rows of ``z`` and independent of each other, so the Hessian has one block per sample; a column is a
tensor like ``z`` that holds one vector for every sample at once.

A loss of one's own is a module marked with ``extend(MyLoss(), loss=True)``: its Hessian comes from autograd. Where a
formula is known, register it, as a class with `columns`, `root` and `sample` or a function that returns one::

    @register_loss(LogCosh)
    def log_cosh(module, z, target):  # sum of log cosh(z - target): the Hessian is diagonal
        return Diagonal(1 / torch.cosh(z - target))  # root of the diagonal
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from math import inf, nan, prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from curvopt.core.eigen import eigh
from curvopt.core.jacobians import widened
from curvopt.core.uses import LossUse, disable, version
from curvopt.errors import CurvoptError, CurvoptWarning


class LossCurvature(ABC):
    """Hessian of a loss in the network's output z, factored sample by sample."""

    #: The factor that each independent prediction's own loss (the sum over its entries of z) has in the loss, 1/N for a
    #: mean over N of them; broadcastable to z. ``None`` to have it read off the loss module's reduction.
    weights: Tensor | None = None
    #: Number of variables that are predicted for one of them: its entries of z, but one for a choice among classes.
    variables: int = 1

    @property
    @abstractmethod
    def columns(self) -> int:
        """Number V of columns of the exact root (of each sample)."""

    @abstractmethod
    def root(self, start: int, stop: int) -> Tensor:
        """Columns ``start`` to ``stop`` of the exact root S, ``[stop - start, *z.shape]``."""

    def by_entries(self) -> LossCurvature:
        """The same with the usual root, of a column for every entry of z, where `root` has fewer."""
        return self

    @abstractmethod
    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        """Independent random columns ``[samples, *z.shape]``, each with ``E[s s^T] = S S^T``.

        Where the loss is a negative log-likelihood, they are its gradients at targets drawn from the model.
        """


class Diagonal(LossCurvature):
    """A sum of functions of single entries of ``z``. Samples are Gaussian.

    Args:
        diagonal: root of the Hessian's diagonal, like ``z``.
        weight: the factor that each entry's loss has in the loss, like ``z``, if known.
    """

    def __init__(self, diagonal: Tensor, weight: Tensor | None = None):
        self.diagonal, self.variables = diagonal, prod(diagonal.shape[1:])
        if weight is not None:
            self.weights = weight.mean(tuple(range(1, weight.dim())), keepdim=True) if weight.dim() > 1 else weight

    @property
    def columns(self) -> int:
        return prod(self.diagonal.shape[1:])

    def root(self, start: int, stop: int) -> Tensor:
        flat = self.diagonal.reshape(len(self.diagonal), -1)
        index = torch.arange(stop - start, device=flat.device)
        columns = flat.new_zeros(stop - start, *flat.shape)
        columns[index, :, start + index] = flat[:, start:stop].T
        return columns.reshape(-1, *self.diagonal.shape)

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        return self.diagonal * _normal(self.diagonal, (samples, *self.diagonal.shape), generator)


class Bernoulli(Diagonal):
    """Binary cross-entropy of logits, ``w p (1 - p)`` at every entry. Samples are Bernoulli labels.

    Args:
        logits: the network's output.
        weight: root of the weight w of every entry, like ``logits``.
    """

    def __init__(self, logits: Tensor, weight: Tensor):
        self.p, self.weight = logits.sigmoid(), weight
        # not p (1 - p): 1 - p rounds to zero where p is close to one
        super().__init__(_root_of(self.p * (-logits).sigmoid()) * weight, weight.square())

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        p = self.p.detach().nan_to_num()  # of a network that diverged: the columns are nan all the same
        labels = torch.bernoulli(p.expand(samples, *p.shape), generator=generator)
        return (self.p - labels) * self.weight


class Softmax(LossCurvature):
    """Cross-entropy of logits, ``m (diag p - p p^T)`` at every position. Samples are labels drawn from the softmax.

    Whatever the target, the cross-entropy is linear in the log-probabilities, and the curvature depends on the target
    only by its mass m at the position: the sum over classes of its weighted probabilities, times the factor of the
    reduction (Kunstner et al. 2019 on the samples, "MC Fisher").

    ``u = sqrt(p)`` is of length 1 and no curvature lies along it: ``diag(u) (1 - u u^T) diag(u)``. A reflection turns u
    into a unit vector, that of the likeliest class, so that its column vanishes, and nothing cancels in the others.

    Args:
        p: probabilities, like ``z``.
        mass: root of the mass, like ``z`` without the classes.
        dim: axis of the classes, not the first.
        full: give a column for every class, ``sqrt(m p_c) (e_c - p)``, though one less is enough.
    """

    def __init__(self, p: Tensor, mass: Tensor, dim: int = 1, full: bool = False):
        self.p, self.mass, self.dim = p.movedim(dim, 1), mass.unsqueeze(1), dim
        self.full = full or p.shape[dim] == 1  # one column of zeros for a single class
        self.weights = self.mass.square().movedim(1, dim)

    def by_entries(self) -> Softmax:
        return Softmax(self.p.movedim(1, self.dim), self.mass.squeeze(1), self.dim, full=True)

    @property
    def columns(self) -> int:
        return (self.p.shape[1] - (not self.full)) * prod(self.p.shape[2:])

    def root(self, start: int, stop: int) -> Tensor:
        # column (c, position): a vector at that position, zero elsewhere
        p, mass = (t.reshape(*t.shape[:2], -1).mT for t in (self.p, self.mass))
        index = torch.arange(start, stop, device=p.device)
        c, position = index // p.shape[1], index % p.shape[1]

        def at(values: Tensor) -> Tensor:  # [N, positions, *] as [v, N, *]
            values = values.transpose(0, 1)
            return values.expand(len(index), -1, -1) if len(values) == 1 else values[position]

        c = c.view(-1, 1, 1).expand(-1, len(p), 1)
        if self.full:
            p_at = at(p)
            vectors = _root_of(p_at.gather(2, c)) * (_onehot(c, p_at) - p_at)
        else:
            u, likeliest, reflected = map(at, self._reflection)
            c = torch.where(c == likeliest, p.shape[2] - 1, c)  # the last class has the column that vanishes
            vectors = u * (_onehot(c, u) - reflected * u.gather(2, c))
        vectors = vectors * at(mass)
        if self.p.dim() == 2:
            return vectors
        columns = vectors.new_zeros(*vectors.shape, p.shape[1])
        columns[index - start, :, :, position] = vectors
        return columns.unflatten(3, self.p.shape[2:]).movedim(2, self.dim + 1)

    @cached_property
    def _reflection(self) -> tuple[Tensor, Tensor, Tensor]:
        """Roots u of probabilities, the likeliest class k, ``(u + e_k) / (1 + u_k)``; ``[N, positions, *]`` each."""
        p = self.p.reshape(*self.p.shape[:2], -1).mT
        u, likeliest = _root_of(p), p.argmax(-1, keepdim=True)
        return u, likeliest, (u + _onehot(likeliest, u)) / (1 + u.gather(-1, likeliest))

    def sample(self, samples: int, generator: torch.Generator | None) -> Tensor:
        labels = draw(self.p.detach().movedim(1, -1), samples, generator).movedim(-1, 0).unsqueeze(2)
        columns = self.p.expand(samples, *self.p.shape) * self.mass
        return columns.scatter_add_(2, labels, -self.mass.expand(labels.shape)).movedim(2, self.dim + 1)


def draw(p: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Labels ``[..., samples]`` from probabilities ``[..., C]``, by inverting their cumulative sums.

    Not ``torch.multinomial``, which draws a random number for every class.
    """
    sums = p.cumsum(-1)
    uniform = torch.rand(*p.shape[:-1], samples, dtype=p.dtype, device=p.device, generator=generator)
    labels = torch.searchsorted(sums, uniform * sums[..., -1:], right=True)
    return labels.clamp_(max=p.shape[-1] - 1)  # where a probability is nan


def _root_of(p: Tensor) -> Tensor:
    """Root of probabilities; where one rounds to zero, so does the root's derivative in the logits."""
    return torch.where(p > 0, p, 1).sqrt() * (p > 0) if p.requires_grad else p.sqrt()


def _onehot(index: Tensor, like: Tensor) -> Tensor:
    """Unit vectors along the last axis, at ``index`` of length 1 there."""
    return torch.zeros_like(like).scatter_(-1, index, 1.0)


# --------------------------------------------------------------------------------------------------- losses as modules

Builder = Callable[[Any, Tensor, Any], LossCurvature]
_losses: dict[type[nn.Module], Builder] = {}
B = TypeVar("B", bound=Builder)

#: Losses that are linear in their input: what is curved comes before them and is recognised in the graph.
LINEAR_LOSSES = (nn.NLLLoss, nn.KLDivLoss)


def register_loss(*types: type[nn.Module]) -> Callable[[B], B]:
    """Decorator: the class or function ``(module, z, target) -> LossCurvature`` serves these loss modules.

    The curvature is that of the module's scalar output, its reduction included; for a ``z`` in half precision it is
    computed in float32. Instances of the types, and of subclasses with the same ``forward``, are losses for
    `curvopt.extend`.
    """

    def add(builder: B) -> B:
        _losses.update(dict.fromkeys(types, builder))
        return builder

    return add


def is_loss(module: nn.Module) -> bool:
    """Whether a module is a loss: a registered type, or a subclass of PyTorch's (private) base of losses."""
    return isinstance(module, (nn.modules.loss._Loss, *_losses)) and not isinstance(module, LINEAR_LOSSES)


def curvature_of(use: LossUse, grad: Tensor) -> tuple[LossCurvature, Tensor]:
    """The curvature of a recorded loss, and the root of the factor ``grad`` by which the loss was scaled.

    Raises:
        CurvoptError: for a loss that does not reduce to a scalar, was given a negative factor, whose input changed
            since, whose target depends on parameters, or whose Hessian has no root.
    """
    reduction = getattr(use.module, "reduction", "mean")
    if reduction not in ("mean", "sum", "batchmean") or grad.numel() != 1:
        raise CurvoptError(
            f"{use.describe()}: second-order quantities need a scalar loss, but this one has shape {list(grad.shape)} "
            f"(reduction={reduction!r}); use reduction='mean' or 'sum'."
        )
    # elsewhere than on a CPU, whoever asks waits for the device: there the root below is nan
    if grad.device.type == "cpu" and bool(grad < 0):
        raise CurvoptError(
            f"{use.describe()}: the loss was scaled by {float(grad):g}; second-order quantities need a loss that is "
            "minimised (its curvature is positive)."
        )
    if version(use.input) != use.version:
        raise CurvoptError(
            f"{use.describe()}: its input was modified in place after the loss was computed; give it a copy."
        )
    if any(other.requires_grad for other in use.others):
        raise CurvoptError(
            f"{use.describe()}: only the first argument of a loss may depend on parameters, but another one requires "
            "gradients; detach() it, or pass all that depends on parameters as one tensor to a loss of your own."
        )
    z = widened(use.input)
    for base in type(use.module).__mro__:
        if base in _losses and type(use.module).forward is base.forward:
            curvature = _losses[base](use.module, z, use.target)
            break
    else:
        curvature = _from_autograd(use, z)
    if curvature.weights is None:
        terms = z.numel() if isinstance(curvature, Diagonal) and reduction == "mean" else len(z)
        curvature.weights = z.new_ones(len(z), *[1] * (z.dim() - 1)) * (1.0 if reduction == "sum" else 1 / terms)
    return curvature, grad.sqrt()


def _reduced(module: Any, weight: Any, terms: int | Tensor) -> Any:
    """The weight that the module's reduction leaves: divided by the number of averaged terms, or as it is in a sum."""
    return weight / terms if module.reduction == "mean" else weight


def root_of_weights(weight: Tensor, what: str, rounding: Tensor | float = 0.0) -> Tensor:
    """The root of the weights of a loss' entries; of what rounding makes negative, zero.

    Raises:
        CurvoptError: if some are negative; elsewhere than on a CPU, where asking has to wait, their root is nan.
    """
    negative = weight < -rounding
    if weight.device.type == "cpu" and bool(negative.any()):
        raise CurvoptError(
            f"{what}: some entries have the negative weight {float(weight.min()):.3g}; second-order quantities need a "
            "loss that is minimised (its curvature is positive)."
        )
    return weight.clamp(min=0).sqrt().masked_fill(negative, torch.nan)


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


def _from_autograd(use: LossUse, z: Tensor) -> LossCurvature:
    """The Hessian of a loss that is only known as a function, from double backward, with its properties checked.

    The checks are products with random vectors: a Hessian that is diagonal, or has no entries between samples, agrees
    with its diagonal (its blocks) on them, and any other does not, almost surely.
    """
    if any(p.requires_grad for p in use.module.parameters()):
        raise CurvoptError(
            f"{use.describe()}: a loss may have no trainable parameters; put them into the model, or "
            "requires_grad_(False) them."
        )
    differentiable = torch.is_grad_enabled() and z.requires_grad
    value, product = _hessian_at(use, z)
    generator = torch.Generator(device=z.device).manual_seed(0)  # the user's random numbers stay as they are
    probe = _normal(z, z.shape, generator)
    image = product(probe)
    N, D = len(z), prod(z.shape[1:])
    limit = _rounding(image)
    if not 0 < limit < inf:
        if not limit == 0:
            if value.isfinite().all():
                raise CurvoptError(f"{use.describe()}: its Hessian in the network's output is not finite.")
            return Diagonal(torch.full_like(z, nan))  # of a network that diverged, as those of known losses
        warnings.warn(
            f"{use.describe()}: it is (piecewise) linear in its input, so its Gauss-Newton curvature is zero here.",
            CurvoptWarning,
            stacklevel=2,
        )
        if not _is_diagonal_elsewhere(use, z, probe, generator):
            return Blocks(z.new_zeros(N, D, D), z.shape)
    diagonal = product(torch.ones_like(z))
    if _is_diagonal(diagonal, probe, image):
        _check_convex(use, diagonal)
        return Diagonal(diagonal.clamp(min=0).sqrt())

    columns = []
    for j in range(D):
        vector = torch.zeros_like(z)
        vector.view(N, D)[:, j] = 1
        columns.append(product(vector).reshape(N, D))
    blocks = torch.stack(columns, dim=2)
    if bool(((blocks @ probe.reshape(N, D, 1)).reshape(z.shape) - image).abs().max() > limit):
        raise CurvoptError(
            f"{use.describe()}: its Hessian couples the rows of its input {list(z.shape)}, but second-order quantities "
            "need a loss that is a sum over independent samples."
        )
    if differentiable:
        raise CurvoptError(
            f"{use.describe()}: the root of its Hessian comes from an eigendecomposition, which cannot be "
            "differentiated; call backward without create_graph, or register_loss its curvature."
        )
    values, vectors = eigh(blocks)
    _check_convex(use, values)
    return Blocks(vectors * values.clamp(min=0).sqrt().unsqueeze(1), z.shape)


def _hessian_at(use: LossUse, z: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The value of a loss at ``z``, and products with its Hessian there."""
    differentiable = torch.is_grad_enabled() and z.requires_grad
    with torch.enable_grad(), disable():
        # an alias: z itself has hooks
        at = z.view_as(z) if differentiable else z.detach().requires_grad_()
        value = use.again(at)
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
                f"{use.describe()}: PyTorch has no second derivative of it ({error}); use another loss, e.g. "
                "CrossEntropyLoss, or write its Hessian down with curvopt.core.derivatives.losses.register_loss."
            ) from error
        return Hv

    return value, product


def _is_diagonal_elsewhere(use: LossUse, z: Tensor, probe: Tensor, generator: torch.Generator) -> bool:
    """Whether the Hessian of a loss that is flat is diagonal where it is not: at outputs that have traded places.

    It is a sum over entries then, else over samples. If it cannot be told (the loss may not take such outputs), it is.
    """
    order = torch.randperm(z.numel(), generator=generator, device=z.device)
    elsewhere = copy.copy(use)
    try:
        elsewhere.module = copy.deepcopy(use.module)  # it may keep something
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


def _check_convex(use: LossUse, eigenvalues: Tensor) -> None:
    smallest = eigenvalues.min()
    if bool(smallest < -1e4 * torch.finfo(eigenvalues.dtype).eps * eigenvalues.abs().max()):
        raise CurvoptError(
            f"{use.describe()}: it is not convex here (its Hessian in the network's output has the eigenvalue "
            f"{float(smallest):.3g}), so it has no Gauss-Newton matrix; use a convex loss, or a quantity of the "
            "Hessian itself (DiagHessian, HMP) where there is one."
        )


def _normal(like: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
