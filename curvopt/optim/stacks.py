"""Products of many parameters with their factors at once: parameters of one form are groups of one factor list."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from itertools import groupby
from math import prod
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from curvopt.core.products.base import cast
from curvopt.kroneckers import kfac_mat_prod, sizes_of
from curvopt.optim.state import ParameterCurvature, curvature_of
from curvopt.optim.step_size import WIDE, excess, rms_clip_factor

#: The calls that multiply a vector, into another one, by memory of its size.
Product = Callable[[Tensor, Tensor, Tensor], list[Callable[[], Any]]]
Make = TypeVar("Make", bound=Callable[..., Any])


def _once(make: Make) -> Make:
    """What a stack makes of `Stack.memory` that is kept is made once: views and calls take a sixth of a small step."""

    @wraps(make)
    def made(self: "Stack", flat: Tensor, *more: Any) -> Any:
        known, key = self._made.get(id(flat), {}), (make, *more)
        if key not in known:
            known[key] = make(self, flat, *more)
        return known[key]

    return made  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Part:
    """Parameters whose factor lists have one form, which are groups of one factor list.

    Attributes:
        chosen: indices of the parameters.
        numel: number of their entries.
        matrices: of each, how many matrices it is, and their rows and columns; a vector is one of one column.
        products: with the factor list and its transpose, of all entries, one parameter after the other.
    """

    chosen: list[int]
    numel: int
    matrices: list[tuple[int, int, int]]
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

    @cached_property
    def numels(self) -> list[int]:
        """Number of entries of each parameter."""
        return [param.numel() for param in self.params]

    @cached_property
    def _matrices(self) -> list[tuple[int, int, int]]:
        """The matrices of each parameter."""
        return [shape for part in self.parts for shape in part.matrices]

    @cached_property
    def inputs(self) -> list[int]:
        """Number of inputs of each parameter; of stacked matrices the larger side, as nothing says which has them."""
        return [columns if number == 1 else max(rows, columns) for number, rows, columns in self._matrices]

    @cached_property
    def _alike(self) -> list[tuple[int, int]]:
        """Runs of parameters of one size: of each, how many there are, and how many entries each has."""
        return [(len(list(same)), numel) for numel, same in groupby(self.numels)]

    @cached_property
    def roots(self) -> Tensor:
        """By which norms of parameters with many inputs count more, ``[params]``."""
        dtype = torch.promote_types(self.params[0].dtype, torch.float32)
        runs = [(len(list(same)), excess(inputs) ** 0.5) for inputs, same in groupby(self.inputs)]
        like = {"dtype": dtype, "device": self.params[0].device}
        return torch.cat([torch.full((number,), root, **like) for number, root in runs])  # a list would wait for a GPU

    @_once
    def rows(self, flat: Tensor) -> list[Tensor]:
        """The values of parameters of one size as rows of a matrix, in the order of the parameters; views."""
        pieces = flat.split([number * numel for number, numel in self._alike])
        return [piece.view(shape) for piece, shape in zip(pieces, self._alike, strict=True)]

    @_once
    def matrices(self, flat: Tensor) -> list[Tensor]:
        """The values of matrices of one shape, ``[n, rows, columns]``, in the order of the parameters; views."""
        runs = [(len(list(same)) * shape[0], *shape[1:]) for shape, same in groupby(self._matrices)]
        pieces = zip(flat.split([*map(prod, runs)]), runs, strict=True)
        return [piece.view(shape) for piece, shape in pieces if min(shape[1:]) > 1]

    def _columns(self, numbers: Tensor) -> Sequence[Tensor]:
        """Numbers ``[params]`` as columns beside the `rows`."""
        return numbers.unsqueeze(1).split_with_sizes([number for number, _ in self._alike])

    def norms(self, flat: Tensor) -> Tensor:
        """The norms of the parameters' values, ``[params]``."""
        return torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in self.rows(flat)])

    def scale(self, flat: Tensor, factors: Tensor) -> None:
        """Multiply the values of each parameter by a factor, ``[params]``, in place."""
        for rows, column in zip(self.rows(flat), self._columns(factors), strict=True):
            rows.mul_(column)

    def without_rounding(self, name: str, flat: Tensor, norms: Tensor) -> Tensor:
        """The values, but zero where they are so small beside their parameter's norm that rounding chose their sign.

        So directions that a batch does not know, whose gradients are zero but for rounding, are alike on all ranks.
        """
        kept = torch.abs(flat, out=self.memory(name))
        limits = 10 * torch.finfo(flat.dtype).eps * norms
        for rows, limit in zip(self.rows(kept), self._columns(limits), strict=True):
            rows.gt_(limit)
        return kept.mul_(flat)

    def wide(self, flat: Tensor, wide: int | None = WIDE) -> list[tuple[Tensor, float]]:
        """The pieces of a vector that belong to weights with more than so many inputs, and their `excess`."""
        if wide is None or all(number <= wide for number in self.inputs):
            return []
        pieces = zip(flat.split(self.numels), self.inputs, strict=True)
        return [(piece, more) for piece, n in pieces if (more := excess(n, wide)) > 1]

    def clip(self, flat: Tensor, norms: Tensor, bound: Tensor | None) -> Tensor:
        """Bound the root mean square of each parameter's values, in place.

        Args:
            flat: the values.
            norms: of them, and of what is 1 for entries that count in the mean, else 0, ``[params, 2]``; where other
                ranks have rows of a parameter, of all of it.
            bound: of weights with at most `WIDE` inputs; ``None`` for none.

        Returns:
            By what the values were multiplied, ``[params]``.
        """
        length, number = norms.unbind(1)
        factors = rms_clip_factor(length * self.roots / number.clamp(min=1), bound)
        if bound is not None:
            self.scale(flat, factors)
        return factors

    def memory(self, name: str) -> Tensor:
        """A vector ``[P]`` of at least float32, whose values last until the same name is asked for again.

        On a CPU it is kept, as fresh memory costs more than a step does with it.
        """
        first = self.params[0]
        if not first.is_cpu or name not in self._kept:
            dtype = torch.promote_types(first.dtype, torch.float32)
            vector = torch.empty(sum(self.numels), dtype=dtype, device=first.device)
            if not first.is_cpu:
                return vector
            self._kept[name], self._made[id(vector)] = vector, {}
        return self._kept[name]

    @cached_property
    def _kept(self) -> dict[str, Tensor]:
        return {}

    @cached_property
    def _made(self) -> dict[int, dict[Any, Any]]:
        """By the id of a vector that is kept."""
        return {}

    def product(self, name: str, flat: Tensor, transposed: bool = False) -> Tensor:
        """Multiply all entries by the factor lists, or by their transposes, into `memory` of some name."""
        result, calls = self._product(flat, name, transposed)
        for call in calls:
            call()
        return result

    @_once
    def _product(self, flat: Tensor, name: str, transposed: bool) -> tuple[Tensor, list[Callable[[], Any]]]:
        sizes, result = [part.numel for part in self.parts], self.memory(name)
        pieces = zip(*(vector.split(sizes) for vector in (flat, result, self.memory("scratch"))), strict=True)
        products = zip(self.parts, pieces, strict=True)
        return result, [call for part, each in products for call in part.products[transposed](*each)]

    def join(self, name: str, values: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """Values of the parameters, by default their own, in `memory` of some name."""
        joined, tensors = self.memory(name), self.params if values is None else [values[p] for p in self.params]
        torch._foreach_copy_(self.split(joined), tensors)  # pyright: ignore[reportPrivateImportUsage]
        return joined

    @_once
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
        self._params: list[Tensor] = []
        self._stacks: list[Stack] = []

    def of(self, params: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Stack]:
        """The stacks of parameters by their state."""
        kept = [curvature_of(states[param]) for param in params]
        lists = [getattr(each, self.name) for each in kept]
        if not _are_same(lists, self._lists):
            kinds: dict[Any, list[Part]] = defaultdict(list)
            for chosen in _of_one_form(params, lists):
                first = params[chosen[0]]
                kinds[first.device, first.dtype].append(self._part(chosen, params, kept))
            self._parts, self._params = [*kinds.values()], []
            self._lists = [getattr(each, self.name) for each in kept]
        if not _are_same(params, self._params):
            self._params = [*params]
            self._stacks = [Stack([params[i] for part in parts for i in part.chosen], parts) for parts in self._parts]
        return self._stacks

    def _part(self, chosen: list[int], params: Sequence[Tensor], kept: Sequence[ParameterCurvature]) -> Part:
        lists: list[list[Tensor]] = [list(getattr(kept[i], self.name) or []) for i in chosen]
        first, numel = lists[0], sum(params[i].numel() for i in chosen)
        matrices = [_matrices(params[i].shape, factors) for i, factors in zip(chosen, lists, strict=True)]
        if not first or not numel:
            return Part(chosen, numel, matrices, (_copy, _copy))
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
        return Part(chosen, numel, matrices, (_product(factors, sizes), _product(transposed, sizes)))


def _copy(flat: Tensor, result: Tensor, scratch: Tensor) -> list[Callable[[], Any]]:
    return [partial(result.copy_, flat)]


def _product(factors: Sequence[Tensor], sizes: Sequence[int]) -> Product:
    """`kfac_mat_prod` of a vector; of matrices and whole blocks by one batched product for each."""
    if len(factors) == 1 and factors[0].ndim == 1:
        return lambda flat, result, scratch: [partial(torch.mul, flat, factors[0], out=result)]
    groups = max((len(factor) for factor in factors if factor.ndim > 2), default=1)
    matrices = [
        each.reshape(-1, *each.shape[-2:]) for each in (factors[0], *(f.mT for f in factors[1:])) if each.ndim > 1
    ]
    whole = len(matrices) == len(factors) and all(d % f.shape[-1] == 0 for f, d in zip(factors, sizes, strict=True))
    blocks = sizes[1] // factors[1].shape[-1] if whole and len(factors) == 2 else 1
    one_by_one = groups > 1 and blocks > 1  # of a group after the other, which a CPU does as fast
    if not whole or len(factors) > 2 or (groups > 1 and factors[0].ndim == 2) or (one_by_one and not factors[0].is_cpu):
        of_any = kfac_mat_prod(factors, sizes)
        return lambda flat, result, scratch: [lambda: result.copy_(of_any(flat))]
    first, *last = matrices

    def product(flat: Tensor, result: Tensor, scratch: Tensor) -> list[Callable[[], Any]]:
        rows = flat.view(len(first), first.shape[-1], -1)
        left = (scratch if last else result).view_as(rows)
        calls = [partial(torch.bmm, first, rows, out=left)]
        for right in last:
            size = right.shape[-1]
            if blocks == 1:
                shape = len(right), -1, size
                calls.append(partial(torch.bmm, left.view(shape), right, out=result.view(shape)))
            else:
                pieces = (each.view(groups, -1, blocks, size).transpose(1, 2) for each in (left, result))
                for piece, out, each in zip(
                    *pieces, right.view(-1, blocks, size, size).expand(groups, -1, -1, -1), strict=True
                ):
                    calls.append(partial(torch.bmm, piece, each, out=out))
        return calls

    return product


def _are_same(items: Sequence[Any], known: Sequence[Any]) -> bool:
    return len(items) == len(known) and all(map(is_, items, known))


def _matrices(shape: torch.Size, factors: Sequence[Tensor]) -> tuple[int, int, int]:
    """Number, rows and columns of the matrices of a weight ``[O, *I]``, or of a stack of some, as its factors show."""
    if len(shape) < 2:
        return 1, prod(shape), 1
    groups = max((len(f) for f in factors if f.ndim > 2), default=1) if len(factors) == 2 else 1
    rows, columns = sizes_of(factors, shape) if groups > 1 else (shape[0], prod(shape[1:]))
    return groups, rows, columns


def _of_one_form(params: Sequence[Tensor], lists: Sequence[list[Tensor] | None]) -> list[list[int]]:
    """Indices of the parameters whose factor lists can be stacked, together; those of one size one after the other."""
    found: dict[Any, list[int]] = defaultdict(list)
    for i, (param, factors) in enumerate(zip(params, lists, strict=True)):
        dims = [factor.ndim for factor in factors or []]
        key: Any = (param.device, param.dtype, dims)
        if dims and (min(dims) > 1 or len(dims) > 1):
            # a diagonal beside a matrix has no groups
            key = (*key, i if min(dims) < 2 else (param.shape, [factor.shape for factor in factors or []]))
        found[str(key)].append(i)
    return [sorted(chosen, key=lambda i: params[i].numel()) for chosen in found.values()]
