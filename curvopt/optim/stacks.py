"""Products of many parameters with their factors at once: parameters of one form are groups of one factor list."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from curvopt.kroneckers import kfac_mat_prod, sizes_of


@dataclass(frozen=True)
class Stack:
    """Parameters, and the factor list of all their entries, one parameter after the other.

    Attributes:
        params: the parameters.
        factors: their factor list, which is empty for the identity.
        sizes: of its factors.
    """

    params: list[Tensor]
    factors: list[Tensor]
    sizes: list[int]

    def product(self, flat: Tensor, transposed: bool = False) -> Tensor:
        """Multiply all entries ``[P]`` by the factor list, or by its transpose."""
        if flat.numel() == 0:  # parameters without entries
            return flat
        matrices = [f if f.ndim < 2 or not transposed else f.mT for f in self.factors]
        return kfac_mat_prod(matrices, self.sizes)(flat)

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Values of the parameters in one vector ``[P]``, a copy."""
        return torch.cat([value.reshape(-1) for value in values])

    def split(self, flat: Tensor, like: Mapping[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters and their values, in their shapes and in the dtype of tensors that they are like."""
        pieces = flat.split([param.numel() for param in self.params])
        for param, piece in zip(self.params, pieces, strict=True):
            yield param, piece.view(param.shape).to(like[param].dtype)


class Stacks:
    """The stacks of some parameters; made again where a list in the state is another one than before.

    Args:
        name: of the lists in the state. They become views of the stacks, so that no memory is needed twice.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lists: list[list[Tensor] | None] = []
        self._stacks: list[tuple[list[int], list[Tensor], list[int]]] = []

    def of(self, params: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Stack]:
        """The stacks of parameters by their state."""
        own = [states[param] for param in params]
        lists = [state.get(self.name) for state in own]
        if len(lists) != len(self._lists) or not all(map(is_, lists, self._lists)):
            self._stacks = [self._stack(chosen, params, own) for chosen in _of_one_form(params, lists)]
            self._lists = [state.get(self.name) for state in own]
        return [Stack([params[i] for i in chosen], factors, sizes) for chosen, factors, sizes in self._stacks]

    def _stack(
        self, chosen: list[int], params: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[Tensor], list[int]]:
        lists: list[list[Tensor]] = [list(states[i].get(self.name) or []) for i in chosen]
        first = lists[0]
        if first and first[0].ndim == 0:  # multiples of the identity
            diagonals = [own[0].expand(params[i].numel()) for i, own in zip(chosen, lists, strict=True)]
            return chosen, [torch.cat(diagonals)], [sum(map(len, diagonals))]
        if len(chosen) == 1 or not first:
            return chosen, first, sizes_of(first, params[chosen[0]].shape) if first else []
        factors, sizes = [], sizes_of(first, params[chosen[0]].shape)
        for i, factor in enumerate(first):
            parts = [own[i] if factor.ndim != 2 else own[i].unsqueeze(0) for own in lists]
            factors.append(torch.cat(parts))
            for own, view in zip(lists, factors[-1].split(list(map(len, parts))), strict=True):
                own[i] = view if factor.ndim != 2 else view[0]
        for i, own in zip(chosen, lists, strict=True):
            states[i][self.name] = own
        return chosen, factors, sizes if factors[0].ndim > 1 else [len(factors[0])]


def _of_one_form(params: Sequence[Tensor], lists: Sequence[list[Tensor] | None]) -> list[list[int]]:
    """Indices of the parameters whose factor lists can be stacked, together."""
    found: dict[Any, list[int]] = defaultdict(list)
    for i, (param, factors) in enumerate(zip(params, lists, strict=True)):
        dims = [factor.ndim for factor in factors or []]
        key: Any = (param.device, param.dtype, dims)
        if dims and (min(dims) > 1 or len(dims) > 1):
            # a diagonal beside a matrix has no groups
            key = (*key, i if min(dims) < 2 else (param.shape, [factor.shape for factor in factors or []]))
        found[str(key)].append(i)
    return list(found.values())
