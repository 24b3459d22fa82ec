"""Solving with averaged curvature: by inverses of the factors, or in their eigenbasis."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvopt.core.products.base import widened
from curvopt.distributed import share
from curvopt.kroneckers import (
    damped_inverses,
    eigenbases,
    kron_mean_diagonal,
    largest_condition,
    pi_damping,
    renewed_bases,
)
from curvopt.optim.curvature_optimizer import CurvatureOptimizer
from curvopt.optim.stacks import Stack
from curvopt.optim.step_size import damping_of, dampings_of


class FactoredInverse(CurvatureOptimizer):
    """Multiplies by inverses of factors to which the damping was added, split between them by π."""

    _stacked = "inverses"

    def _renew(self) -> None:
        """Compute ``state["inverses"]`` of all parameters, together."""
        names = self._names()
        means, curvature = mean_curvatures(self)
        self._progress["mean_curvature"] = curvature
        factors, shifts, stale, labels = [], [], [], []
        for group in self.param_groups:
            covered = [param for param in group["params"] if param in means]
            dampings = dampings_of(group, [means[param] for param in covered], curvature)
            for param, damping in zip(covered, dampings, strict=True):
                own, former = self.state[param]["factors"], self.state[param].get("inverses", [])
                factors += own
                shifts += pi_damping(own, damping)
                stale += former if len(former) == len(own) and former[0].ndim else [None] * len(own)
                labels += [f"{names[param]} factor {i}" for i in range(len(own))]
        ranks, failures = self._helpers(), 0

        def invert(chosen: list[int]) -> list[list[Tensor]]:
            nonlocal failures
            own = ([column[i] for i in chosen] for column in (factors, shifts, stale, labels))
            inverted, failures = damped_inverses(*own)
            return [inverted]

        by_halves = self.communication_dtype is not None
        (inverses,) = share(ranks, factors, invert, [lambda factor: factor.shape], by_halves)
        ranks = self._ranks()
        self._metrics["fallbacks"] = float(failures if ranks is None else ranks.sum(failures))
        condition = largest_condition(factors, shifts, inverses) if factors else torch.zeros(())
        self._metrics["condition"] = self._over_ranks(condition, largest=True)

        results = iter(inverses)
        for group in self.param_groups:
            damping = damping_of(group, curvature)
            for param in group["params"]:
                state = self.state[param]
                if "factors" in state:
                    state["inverses"] = [next(results) for _ in state["factors"]]
                else:
                    tiny = torch.finfo(curvature.dtype).tiny
                    scale = (curvature + damping).clamp(min=tiny).reciprocal()
                    state["inverses"] = [scale.to(widened(param.new_empty(0)))]

    def _solve(self, stack: Stack, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        return stack.product(grad)


def mean_curvatures(optimizer: CurvatureOptimizer) -> tuple[dict[Tensor, Tensor], Tensor]:
    """Means of the curvature's diagonal: by parameter that has factors, and over all their entries.

    The latter is also for parameters that have none. Without any curvature, it is that of the unit matrix.
    """
    covered = [p for p in optimizer._params() if "factors" in optimizer.state[p]]  # in an order that checkpoints keep
    means = {p: kron_mean_diagonal(optimizer.state[p]["factors"]) for p in covered}
    traces, numel = [mean * p.numel() for p, mean in means.items()], sum(p.numel() for p in means)
    traces = traces or [torch.zeros((), dtype=torch.float64, device=optimizer._device())]
    total = torch.stack([trace.to(traces[0]) for trace in traces]).sum()
    entries = optimizer._over_ranks(torch.tensor(float(numel), dtype=torch.float64)).to(total)
    return means, torch.where(entries > 0, optimizer._over_ranks(total) / entries.clamp(min=1), 1.0)


#: A basis is renewed once ``‖offdiag(UᵀFU)‖ / ‖F‖`` of its factor exceeds this.
MAX_OFF_DIAGONAL = 0.1


class Eigenbasis(CurvatureOptimizer):
    """Works in the eigenbases of factors, and renews a basis once its factor is no longer diagonal in it."""

    _stacked = "bases"

    def _renew(self) -> None:
        """Renew ``state["bases"]`` of new parameters and of factors that are no longer diagonal in theirs."""
        names = self._names()
        covered = [param for param in self._params() if "factors" in self.state[param]]
        factors, former, labels = [], [], []
        for param in self._params():
            state = self.state[param]
            state.setdefault("bases", [])
            for i, factor in enumerate(state.get("factors", [])):
                factors.append(factor)
                former.append(state["bases"][i] if state["bases"] else None)
                labels.append(f"{names[param]} factor {i}")
        ranks = self._helpers()
        (off_diagonals,) = share(
            ranks, factors, lambda own: [[off_diagonal(factors[i], former[i]) for i in own]], [lambda _: ()]
        )
        # one transfer for all
        on_device = [part.to(factors[0].device, torch.float32) for part in off_diagonals]
        parts = torch.stack(on_device).tolist() if on_device else []
        chosen = [i for i, part in enumerate(parts) if part > MAX_OFF_DIAGONAL]
        bases, values = share(
            ranks,
            [factors[i] for i in chosen],
            lambda own: _bases(*([each[chosen[i]] for i in own] for each in (factors, former, labels))),
            [lambda factor: factor.shape, lambda factor: factor.shape[:-1]],
        )
        self._metrics["new_bases"] = float(self._over_ranks(torch.tensor(float(len(chosen)))))

        new = dict(zip(chosen, zip(bases, values, strict=True), strict=True))
        start = 0
        for param in covered:
            state = self.state[param]
            own = range(start, start := start + len(state["factors"]))
            if not new.keys().isdisjoint(own):
                old = state["bases"]
                state["bases"] = [new[i][0] if i in new else former[i] for i in own]
                self._change_basis(param, old, [new[i][1] if i in new else None for i in own])
        _, self._progress["mean_curvature"] = mean_curvatures(self)

    @abstractmethod
    def _change_basis(self, param: Tensor, old: list[Tensor], spectra: list[Tensor | None]) -> None:
        """Transform all state that is kept in the old bases to the new ones, or begin it if there are none.

        Args:
            param: the parameter whose ``state["bases"]`` are new.
            old: its old bases, empty at first.
            spectra: eigenvalues of the factors whose basis is new.
        """


def _bases(factors: list[Tensor], former: list[Tensor | None], labels: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """New bases of factors, and the diagonals of these in them."""
    known = [basis for basis in former if basis is not None]
    if len(known) < len(factors) or all(factor.device.type == "cpu" for factor in factors):
        bases, _ = eigenbases([without_ties(factor) for factor in factors], labels)
        return bases, [diagonal_in(factor, basis) for factor, basis in zip(factors, bases, strict=True)]
    return renewed_bases(factors, known)


#: Of the mean of a factor's diagonal: what is added to tell eigenvectors of (nearly) equal eigenvalues apart.
TIE = 1e-3


def without_ties(factor: Tensor) -> Tensor:
    """A matrix, or many, with a small fixed diagonal added.

    A batch of N samples leaves all but N directions of a factor without curvature. Any basis of these diagonalises it,
    so rounding errors would choose one; but Adam, and damped scales, take another step in each.
    """
    if factor.ndim < 2:
        return factor
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    tie = TIE * diagonal.mean(-1, keepdim=True) * torch.linspace(0, 1, factor.shape[-1]).to(factor)
    if factor.ndim > 3:  # rows beyond the matrix, in its last block, stay zero
        tie = tie.masked_fill((factor == 0).all(-1), 0.0)
    return factor + torch.diag_embed(tie)


def diagonal_in(factor: Tensor, basis: Tensor) -> Tensor:
    """The diagonal of a factor in a basis, not negative."""
    return (factor if factor.ndim < 2 else (basis * (factor @ basis)).sum(-2)).clamp(min=0)


def transposed(bases: list[Tensor]) -> list[Tensor]:
    """The inverses of bases."""
    return [basis if basis.ndim < 2 else basis.mT for basis in bases]


def basis_changes(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """Matrices that change coordinates from old to new bases."""
    return [u if u.ndim < 2 else u.mT @ v for u, v in zip(new, old, strict=True)]


def squared(matrices: list[Tensor]) -> list[Tensor]:
    """Squared entries: these map a diagonal to the diagonal after a change of coordinates."""
    return [matrix.square() for matrix in matrices]


def off_diagonal(factor: Tensor, basis: Tensor | None) -> Tensor:
    """``‖offdiag(UᵀFU)‖ / ‖F‖``: how far a factor is from diagonal in a basis, ``[]``; 1 if there is none."""
    if basis is None:
        return torch.ones((), device=factor.device)
    if factor.ndim < 2:
        return torch.zeros((), device=factor.device)
    rotated = basis.mT @ factor @ basis
    rotated /= rotated.abs().amax().clamp(min=torch.finfo(rotated.dtype).tiny)  # its squares may leave its range
    diagonal = rotated.diagonal(dim1=-2, dim2=-1).square().sum()
    total = rotated.square().sum()
    return ((total - diagonal) / total.clamp(min=torch.finfo(total.dtype).tiny)).clamp(min=0).sqrt().float()
