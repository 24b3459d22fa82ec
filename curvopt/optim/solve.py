"""Solving with averaged curvature: by inverses of the factors, or in their eigenbasis."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvopt.core.products.base import widened
from curvopt.kroneckers import (
    alike,
    damped_inverses,
    eigenbases,
    largest_condition,
    mean_diagonals,
    pi_dampings,
    renewed_bases,
)
from curvopt.optim.accumulation import are_alike
from curvopt.optim.ranks import Alone
from curvopt.optim.stacks import Stack
from curvopt.optim.state import CURVATURE, ParameterCurvature, curvature_of
from curvopt.optim.step_size import damping_of, dampings_of

#: The states of a torch optimizer by parameter.
States = Mapping[Tensor, dict[str, Any]]


class Solver(ABC):
    """Solves with averaged curvature. It keeps nothing: what it makes stands in the states of the parameters."""

    #: The field of `ParameterCurvature` with the lists that a step multiplies by.
    field: str

    @abstractmethod
    def renew(
        self, groups: Sequence[Mapping[str, Any]], states: States, names: Mapping[Tensor, str], ranks: Alone
    ) -> tuple[Tensor, dict[str, Any]]:
        """Prepare `solve` by the averaged factors of all parameters, together.

        Args:
            groups: the param groups.
            states: of the parameters.
            names: of the parameters, for messages.
            ranks: that share the work.

        Returns:
            The mean curvature of all parameters, and metrics.
        """

    def means(self, params: Sequence[Tensor], states: States, ranks: Alone) -> Mapping[Tensor, Tensor]:
        """What `solve` needs of parameters, of which other ranks may own rows."""
        return {}

    def solve(
        self,
        stack: Stack,
        grad: Tensor,
        group: Mapping[str, Any],
        states: States,
        mean_curvature: Tensor,
        means: Mapping[Tensor, Tensor],
    ) -> Tensor:
        """Preconditioned gradients ``[P]`` of the parameters of a stack, which are in one param group."""
        return stack.product("update", grad)

    def forget(self, state: dict[str, Any], shape: torch.Size) -> None:
        """Drop the curvature of a parameter of some shape."""
        state[CURVATURE] = ParameterCurvature()


class Inverse(Solver):
    """Multiplies by inverses of factors to which the damping was added, split between them by π."""

    field = "inverses"

    def renew(
        self, groups: Sequence[Mapping[str, Any]], states: States, names: Mapping[Tensor, str], ranks: Alone
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute all ``inverses``."""
        diagonals = diagonals_of(names, states, ranks)
        means, curvature = mean_curvatures(diagonals, ranks)
        factors, stale, labels, lists, dampings = [], [], [], [], []
        for group in groups:
            covered = [param for param in group["params"] if param in means]
            dampings += dampings_of(group, [means[param] for param in covered], curvature)
            for param in covered:
                kept = curvature_of(states[param])
                new, former = kept.factors or [], kept.inverses or []
                factors += new
                lists.append(new)
                stale += former if len(former) == len(new) and former[0].ndim else [None] * len(new)
                labels += [f"{names[param]} factor {i}" for i in range(len(new))]
        shifts = pi_dampings(lists, [diagonals[p] for group in groups for p in group["params"] if p in means], dampings)
        failures = 0

        def invert(chosen: list[int]) -> list[list[Tensor]]:
            nonlocal failures
            inverted, failures = damped_inverses(*_chosen(chosen, factors, shifts, stale, labels))
            return [inverted]

        (inverses,) = ranks.share(factors, invert, [lambda factor: factor.shape], symmetric=True)
        condition = largest_condition(factors, shifts, inverses) if factors else torch.zeros(())

        results = iter(inverses)
        for group in groups:
            damping = damping_of(group, curvature)
            for param in group["params"]:
                kept = curvature_of(states[param])
                if kept.factors is not None:
                    kept.inverses = _in_place_of(kept.inverses, [next(results) for _ in kept.factors])
                else:
                    tiny = torch.finfo(curvature.dtype).tiny
                    scale = (curvature + damping).clamp(min=tiny).reciprocal()
                    kept.inverses = [scale.to(widened(param.new_empty(0)))]
        return curvature, {
            "fallbacks": float(ranks.sum(failures)),
            "condition": ranks.over_owners(condition, largest=True),
        }


def diagonals_of(params: Iterable[Tensor], states: States, ranks: Alone) -> dict[Tensor, list[Tensor]]:
    """`mean_diagonals` of the factors of parameters that have curvature, and of which other ranks may own rows."""
    found = {p: factors for p in params if (factors := curvature_of(states[p]).factors) is not None}
    owners, factors = [p for p, each in found.items() for _ in each], [f for each in found.values() for f in each]
    sizes = (factor.numel() // (factor.shape[-1] if factor.ndim > 1 else 1) for factor in factors)
    means = iter(ranks.over_pieces(owners, mean_diagonals(factors), sizes))
    return {p: [next(means) for _ in factors] for p, factors in found.items()}


def mean_curvatures(diagonals: Mapping[Tensor, Sequence[Tensor]], ranks: Alone) -> tuple[dict[Tensor, Tensor], Tensor]:
    """Means of the curvature's diagonal: by parameter that has factors, and over all their entries.

    The latter is also for parameters that have none. Without any curvature, it is that of the unit matrix.

    Args:
        diagonals: see `diagonals_of`.
        ranks: that have them.
    """
    means = {p: prod(each[1:], start=each[0]) for p, each in diagonals.items()}
    means = {p: mean.mean() if mean.ndim else mean for p, mean in means.items()}
    sizes = [p.numel() for p in means]
    traces = list(torch._foreach_mul(list(means.values()), sizes)) if means else []  # pyright: ignore[reportPrivateImportUsage]
    traces = traces or [torch.zeros((), dtype=torch.float64)]
    numel = sum(sizes)
    total = torch.stack([trace.to(traces[0]) for trace in traces]).sum()
    entries = ranks.over_owners(torch.tensor(float(numel), dtype=torch.float64)).to(total)
    return means, torch.where(entries > 0, ranks.over_owners(total) / entries.clamp(min=1), 1.0)


#: A basis is renewed once ``‖offdiag(UᵀFU)‖ / ‖F‖`` of its factor exceeds this.
MAX_OFF_DIAGONAL = 0.1


class Eigenbasis(Solver):
    """Works in the eigenbases of factors, and renews a basis once its factor is no longer diagonal in it."""

    field = "bases"

    def renew(
        self, groups: Sequence[Mapping[str, Any]], states: States, names: Mapping[Tensor, str], ranks: Alone
    ) -> tuple[Tensor, dict[str, Any]]:
        """Renew the ``bases`` of new parameters and of factors that are no longer diagonal in theirs."""
        owners, factors, former, labels = [], [], [], []
        for param, name in names.items():
            kept = curvature_of(states[param])
            kept.bases = [] if kept.bases is None else kept.bases
            for i, factor in enumerate(kept.factors or []):
                owners.append(param)
                factors.append(factor)
                former.append(kept.bases[i] if kept.bases else None)
                labels.append(f"{name} factor {i}")
        (found,) = ranks.share(factors, lambda mine: [off_diagonals(*_chosen(mine, factors, former))], [lambda _: ()])
        squares = (torch.linalg.vector_norm(factor, dtype=torch.float64).square() for factor in factors)
        found = ranks.over_pieces(owners, found, squares, norms=True)
        # one transfer for all
        on_device = [part.to(factors[0].device, torch.float32) for part in found]
        parts = torch.stack(on_device).tolist() if on_device else []
        chosen = [i for i, part in enumerate(parts) if part > MAX_OFF_DIAGONAL]
        bases, values = ranks.share(
            [factors[i] for i in chosen],
            lambda mine: _bases(*_chosen([chosen[i] for i in mine], factors, former, labels)),
            [lambda factor: factor.shape, lambda factor: factor.shape[:-1]],
        )
        new = dict(zip(chosen, zip(bases, values, strict=True), strict=True))
        start = 0
        for param in names:
            kept = curvature_of(states[param])
            numbers = range(start, start := start + len(kept.factors or []))
            if not new.keys().isdisjoint(numbers):
                old, kept.bases = kept.bases, [new[i][0] if i in new else former[i] for i in numbers]
                spectra = [new[i][1] if i in new else None for i in numbers]
                self.change_basis(states[param], param.shape, old or [], spectra)
                kept.bases = _in_place_of(old, kept.bases)
        _, curvature = mean_curvatures(diagonals_of(names, states, ranks), ranks)
        return curvature, {"new_bases": float(ranks.over_owners(torch.tensor(float(len(chosen)))))}

    @abstractmethod
    def change_basis(
        self, state: dict[str, Any], shape: torch.Size, old: list[Tensor], spectra: list[Tensor | None]
    ) -> None:
        """Transform all state that is kept in the old bases to the new ones, or begin it if there are none.

        Args:
            state: of a parameter whose bases are new.
            shape: of the parameter.
            old: its old bases, empty at first.
            spectra: eigenvalues of the factors whose basis is new.
        """


def _in_place_of(kept: list[Tensor] | None, new: list[Tensor]) -> list[Tensor]:
    """The new tensors, in the memory of those that are kept: stacks hold it, and would be made again."""
    if not kept or kept[0].ndim == 0 or not are_alike(kept, new):  # numbers are no part of a stack
        return new
    torch._foreach_copy_(kept, new)  # pyright: ignore[reportPrivateImportUsage]
    return kept


def _chosen(indices: Sequence[int], *columns: Sequence[Any]) -> list[list[Any]]:
    return [[column[i] for i in indices] for column in columns]


def _bases(factors: list[Tensor], former: list[Tensor | None], labels: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """New bases of factors, and the diagonals of these in them."""
    known = [basis for basis in former if basis is not None]
    if len(known) == len(factors) and not all(factor.is_cpu for factor in factors):
        return renewed_bases(factors, known)
    separated, diagonals = list(factors), list(factors)
    for chosen in alike(factors):
        for i, matrix in zip(chosen, without_ties(torch.stack([factors[i] for i in chosen])), strict=True):
            separated[i] = matrix
    bases, _ = eigenbases(separated, labels)
    for chosen in alike(factors):
        stacked = diagonals_in(*map(torch.stack, _chosen(chosen, factors, bases)))
        for i, diagonal in zip(chosen, stacked, strict=True):
            diagonals[i] = diagonal.clone()  # a view would be saved with all of them
    return bases, diagonals


#: Of the mean of a factor's diagonal: what is added to tell eigenvectors of (nearly) equal eigenvalues apart.
TIE = 1e-3


def without_ties(factors: Tensor) -> Tensor:
    """Factors of one shape, ``[n, *shape]``, with a small fixed diagonal added to matrices.

    A batch of N samples leaves all but N directions of a factor without curvature. Any basis of these diagonalises it,
    so rounding errors would choose one; but Adam, and damped scales, take another step in each.
    """
    if factors.ndim < 3:
        return factors
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    tie = TIE * diagonal.mean(-1, keepdim=True) * torch.linspace(0, 1, factors.shape[-1]).to(factors)
    if factors.ndim > 4:  # rows beyond the matrix, in its last block, stay zero
        tie = tie.masked_fill((factors == 0).all(-1), 0.0)
    return factors + torch.diag_embed(tie)


def diagonals_in(factors: Tensor, bases: Tensor) -> Tensor:
    """The diagonals of factors of one shape in bases, not negative."""
    return (factors if factors.ndim < 3 else (bases * (factors @ bases)).sum(-2)).clamp(min=0)


def transposed(bases: list[Tensor]) -> list[Tensor]:
    """The inverses of bases."""
    return [basis if basis.ndim < 2 else basis.mT for basis in bases]


def basis_changes(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """Matrices that change coordinates from old to new bases."""
    return [u if u.ndim < 2 else u.mT @ v for u, v in zip(new, old, strict=True)]


def squared(matrices: list[Tensor]) -> list[Tensor]:
    """Squared entries: these map a diagonal to the diagonal after a change of coordinates."""
    return [matrix.square() for matrix in matrices]


def off_diagonals(factors: Sequence[Tensor], bases: Sequence[Tensor | None]) -> list[Tensor]:
    """``‖offdiag(UᵀFU)‖ / ‖F‖``: how far factors are from diagonal in bases, ``[]``; 1 where there is none."""
    found = [torch.full((), float(basis is None), device=f.device) for f, basis in zip(factors, bases, strict=True)]
    known = [i for i, basis in enumerate(bases) if basis is not None and basis.ndim > 1]
    for members in alike([factors[i] for i in known]):
        chosen = [known[i] for i in members]
        matrices, vectors = map(torch.stack, _chosen(chosen, factors, bases))
        rotated = vectors.mT @ matrices @ vectors
        tiny = torch.finfo(rotated.dtype).tiny
        # squares may leave the range of the dtype
        rotated /= rotated.flatten(1).abs().amax(1).clamp(min=tiny).view(-1, *[1] * (rotated.ndim - 1))
        squares = rotated.square_()
        diagonal, total = squares.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1), squares.flatten(1).sum(1)
        parts = ((total - diagonal) / total.clamp(min=tiny)).clamp(min=0).sqrt().float()
        for i, part in zip(chosen, parts.unbind(), strict=True):
            found[i] = part
    return found
