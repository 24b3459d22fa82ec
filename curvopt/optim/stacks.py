"""Products of many parameters with their factors at once: parameters of one form are groups of one factor list."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from curvopt.core.products.base import cast
from curvopt.kroneckers import kfac_mat_prod, sizes_of
from curvopt.optim.state import ParameterCurvature, curvature_of
from curvopt.optim.step_size import WIDE, excess, rms_clip_factor

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """Parameters whose factor lists have one form, which are groups of one factor list.

    Attributes:
        chosen: indices of the parameters.
        numel: number of their entries.
        inputs: number of inputs of each.
        products: with the factor list and its transpose, of all entries, one parameter after the other.
    """

    chosen: list[int]
    numel: int
    inputs: list[int]
    products: tuple[Product, Product]


@dataclass(frozen=True)
class Stack:
    """Parameters of one device and dtype as one vector ``[P]``, in the order of its parts.

    Attributes:
        params: the parameters.
        parts: one for each form of factor lists.
    """

    params: list[Tensor]
    parts: list[Part]

    @property
    def inputs(self) -> list[int]:
        """Number of inputs of each parameter."""
        return [number for part in self.parts for number in part.inputs]

    def wide(self, flat: Tensor, wide: int | None = WIDE) -> list[tuple[Tensor, float]]:
        """The pieces of a vector that belong to weights with more than so many inputs, and their `excess`."""
        pieces = flat.split([param.numel() for param in self.params])
        return [(piece, more) for piece, n in zip(pieces, self.inputs, strict=True) if (more := excess(n, wide)) > 1]

    def clip(self, flat: Tensor, moves: Tensor, bound: Tensor | None) -> Tensor:
        """Bound the root mean square of each parameter's values, in place.

        Args:
            flat: the values.
            moves: 1 for entries that count in the mean, else 0.
            bound: of weights with at most `WIDE` inputs; ``None`` for none.

        Returns:
            Sums of squares before, after, and after by how they count, and the number of entries that do, ``[4]``.
        """
        pieces = flat.split(numels := [param.numel() for param in self.params])
        norms = torch._foreach_norm(pieces + moves.split(numels))  # pyright: ignore[reportPrivateImportUsage]
        roots = [excess(number) ** 0.5 for number in self.inputs]  # numbers, as a tensor of them would wait for a GPU
        norms += torch._foreach_mul(norms[: len(roots)], roots)  # pyright: ignore[reportPrivateImportUsage]
        before, counts, wide = torch.stack(norms).square().chunk(3)
        after = before
        if bound is not None:
            factors = rms_clip_factor(wide / counts.clamp(min=1) / bound.to(wide).square(), 1.0)
            after, wide = before * factors.square(), wide * factors.square()
            torch._foreach_mul_(pieces, factors.unbind())  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack([before, after, wide, counts]).sum(1)

    def product(self, flat: Tensor, transposed: bool = False) -> Tensor:
        """Multiply all entries by the factor lists, or by their transposes; a copy."""
        pieces = flat.split([part.numel for part in self.parts])
        return torch.cat([part.products[transposed](piece) for part, piece in zip(self.parts, pieces, strict=True)])

    def join(self, values: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """Values of the parameters, by default their own, in one vector; a copy."""
        flat = _flatten_dense_tensors(self.params if values is None else [values[param] for param in self.params])
        return flat if len(self.params) > 1 else flat.clone()

    def split(self, flat: Tensor) -> list[Tensor]:
        """The values of the parameters in a vector, in their shapes."""
        pieces = _unflatten_dense_tensors(flat, self.params)
        # those of empty parameters have one axis
        return [piece if piece.numel() else piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]


def by_parameter(vectors: Iterable[tuple[Stack, Tensor]], like: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The values of all parameters of some stacks, by their vectors, in the dtypes of tensors that they are like."""
    found: dict[Tensor, Tensor] = {}
    for stack, flat in vectors:
        found |= zip(stack.params, stack.split(cast(flat, like[stack.params[0]].dtype)), strict=True)
    return found


class Stacks:
    """The stacks of some parameters; made again where a list in the state is another one than before.

    Args:
        name: of the lists in `ParameterCurvature`. They become views of the stacks, so that no memory is needed twice.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lists: list[list[Tensor] | None] = []
        self._parts: list[list[Part]] = []

    def of(self, params: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Stack]:
        """The stacks of parameters by their state."""
        kept = [curvature_of(states[param]) for param in params]
        lists = [getattr(each, self.name) for each in kept]
        if len(lists) != len(self._lists) or not all(map(is_, lists, self._lists)):
            kinds: dict[Any, list[Part]] = defaultdict(list)
            for chosen in _of_one_form(params, lists):
                first = params[chosen[0]]
                kinds[first.device, first.dtype].append(self._part(chosen, params, kept))
            self._parts = [*kinds.values()]
            self._lists = [getattr(each, self.name) for each in kept]
        return [Stack([params[i] for part in parts for i in part.chosen], parts) for parts in self._parts]

    def _part(self, chosen: list[int], params: Sequence[Tensor], kept: Sequence[ParameterCurvature]) -> Part:
        lists: list[list[Tensor]] = [list(getattr(kept[i], self.name) or []) for i in chosen]
        first, numel = lists[0], sum(params[i].numel() for i in chosen)
        inputs = [_inputs(params[i].shape, factors) for i, factors in zip(chosen, lists, strict=True)]
        if not first or not numel:
            return Part(chosen, numel, inputs, (lambda flat: flat, lambda flat: flat))
        factors, sizes = first, sizes_of(first, params[chosen[0]].shape)
        if first[0].ndim == 0:  # multiples of the identity
            diagonals = [numbers[0].expand(params[i].numel()) for i, numbers in zip(chosen, lists, strict=True)]
            factors, sizes = [torch.cat(diagonals)], [numel]
        elif len(chosen) > 1:
            factors = []
            for i, factor in enumerate(first):
                parts = [each[i] if factor.ndim != 2 else each[i].unsqueeze(0) for each in lists]
                factors.append(torch.cat(parts))
                for each, view in zip(lists, factors[-1].split(list(map(len, parts))), strict=True):
                    each[i] = view if factor.ndim != 2 else view[0]
            for i, views in zip(chosen, lists, strict=True):
                setattr(kept[i], self.name, views)
            sizes = sizes if factors[0].ndim > 1 else [numel]
        transposed = [factor if factor.ndim < 2 else factor.mT for factor in factors]
        return Part(chosen, numel, inputs, (kfac_mat_prod(factors, sizes), kfac_mat_prod(transposed, sizes)))


def _inputs(shape: torch.Size, factors: Sequence[Tensor]) -> int:
    """Number of inputs of a weight ``[O, *I]``; of a stack of matrices, as their factors show it, the larger side."""
    if len(shape) < 2:
        return 1
    stacked = len(factors) == 2 and max((len(f) for f in factors if f.ndim > 2), default=1) > 1
    return max(sizes_of(factors, shape)) if stacked else prod(shape[1:])


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
