"""Hessians of losses in the output z of the network, factored sample by sample, and the columns that travel backwards.

>>> p = torch.tensor([[0.5, 0.3, 0.2]])  # of one sample
>>> S = Softmax(p, mass=torch.ones(1)).root(0, 2)[:, 0]  # two columns
>>> torch.allclose(S.T @ S, p[0].diag() - p.T @ p, atol=1e-6)
True
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.errors import CurvoptError

Modify = Literal["clip", "abs"] | None


class Columns(NamedTuple):
    """Columns at several edges together, where they begin to travel backwards.

    Attributes:
        edges: the edges.
        vectors: ``[v, *z]`` at each of them.
        weights: of each column in sums of squares, for each sample, ``[v, N]``; ``None`` where all are 1.
        moment: computes a matrix ``[C, C]`` for columns ``[v, N, C]``. The matrices of all columns of a root add up to
            ``sum s s^T`` over columns and samples. ``None`` where only the columns tell.
    """

    edges: Sequence[GradientEdge]
    vectors: Sequence[Tensor]
    weights: Tensor | None = None
    moment: Callable[[], Tensor] | None = None


class LossCurvature(ABC):
    """Hessian of a loss in the network's output z, factored sample by sample."""

    #: The factor that each independent prediction's loss (the sum over its entries of z) has in the loss, 1/N for a
    #: mean over N of them; broadcastable to z.
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

    @property
    @abstractmethod
    def moment(self) -> Tensor:
        """``sum_n S_n S_n^T`` in closed form, ``[C, C]``, for z ``[N, C]``."""

    def by_entries(self) -> LossCurvature:
        """The curvature with the usual root, a column for every entry of z, where `root` has fewer."""
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

    @property
    def moment(self) -> Tensor:
        return self.diagonal.square().sum(0).diag()

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

    ``u = sqrt(p)`` is of length 1 and there is no curvature along it: ``diag(u) (1 - u u^T) diag(u)``. A reflection
    maps u to a unit vector, that of the likeliest class, so that its column vanishes and nothing cancels elsewhere.

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

    @property
    def moment(self) -> Tensor:
        between = (self.mass.square() * self.p).mT @ self.p
        between = between - between.diagonal().diag()
        # rows sum to zero; not p (1 - p): see `Bernoulli`
        return between.sum(1).diag() - between

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


class NotCurved(CurvoptError):
    """A loss is linear in the network's output, or gets a single number, or has no second derivative."""


class NotConvex(NotCurved):
    """A loss has negative curvature."""


def root_of_weights(weight: Tensor, what: str, rounding: Tensor | float = 0.0) -> Tensor:
    """The root of the weights of a loss' entries; of what rounding makes negative, zero.

    Raises:
        NotConvex: if any is negative.
    """
    if bool((weight < -rounding).any()):
        raise NotConvex(
            f"{what}: it, or a part of it, has the negative weight {float(weight.min()):.3g}; second-order quantities "
            "need a loss that is minimised (its curvature is positive)."
        )
    return weight.clamp(min=0).sqrt()


def _normal(like: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Gradient:
    """The gradient itself: one column, whatever the loss."""


@dataclass(frozen=True)
class Exact:
    """All columns of the root of the loss Hessian.

    Args:
        by_entries: of the usual root, which may have more columns than it needs.
    """

    by_entries: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Hessian(Exact):
    """All columns of the root of the loss Hessian, then weighted columns of what nonlinear operations add.

    Args:
        modify: replace what each operation adds by its positive part (``"clip"``) or absolute value (``"abs"``).
    """

    modify: Modify = None


@dataclass(frozen=True)
class MonteCarlo:
    """Random columns whose outer products average to the loss Hessian.

    Args:
        samples: number of columns drawn per data point.
        generator: source of randomness, else the global one.
    """

    samples: int = 1
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Refuse a number that is no number of samples."""
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"mc_samples: expected a positive integer, got {self.samples!r}.")


@dataclass(frozen=True)
class Empirical:
    """One column: the gradient of each prediction, at the target that it has.

    Args:
        generator: source of random signs of the rows where a batch counts as one sample, so that products of different
            rows average to zero, as they do for drawn targets. Without it such a batch goes by rows.
        scaled: multiply the column of each loss so that its mean square is that of columns at drawn targets: it shows
            how predictions err together, in units of the curvature of the loss, whatever the size of the errors.
    """

    generator: torch.Generator | None = None
    scaled: bool = False


@dataclass(frozen=True)
class Averaged:
    """One matrix for all samples, averaged layer by layer."""


def ranks_of(samples: Sequence[int]) -> list[int]:
    """The number of each row among the rows of its sample."""
    seen: dict[int, int] = {}
    ranks = []
    for sample in samples:
        ranks.append(seen.get(sample, 0))
        seen[sample] = ranks[-1] + 1
    return ranks
