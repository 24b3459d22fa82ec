"""Curvature between backward and step: of one backward, summed over several, averaged over steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvopt.distributed import own_part


def pop_field(param: Tensor, name: str) -> Any:
    """Take a quantity off a parameter; ``None`` if there is none."""
    return vars(param).pop(name, None)


def number(value: float) -> Tensor:
    """A number of a parameter's state, on the CPU: torch.distributed.checkpoint loads into tensors alone."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


#: A new value enters an average at most as this many times the average.
LARGEST_JUMP = 10.0


#: A tensor that is averaged, its next value, and the part of the mean that this becomes.
Move = tuple[Tensor, Tensor, float]


def update_averages(
    moves: Sequence[Move], whole: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda traces: traces
) -> None:
    """Means of values that count less with age, in place, all at once.

    A value of age a (in steps) has the weight ``ema^a`` in its mean, as in Adam's moments with bias correction (Kingma
    & Ba 2015, section 3), however many steps are between values: the part of a new one is one over the sum of the
    weights. A value whose trace is more than `LARGEST_JUMP` times that of the average is scaled down to that, so that
    one bad batch spoils it no more than gradients that are clipped.

    Args:
        moves: the means and their values.
        whole: of a matrix of the traces of both, that of the traces of whole parameters.
    """
    traces = [_trace(tensor) for pair in moves for tensor in pair[:2]]
    pairs = whole([torch.stack([trace.to(traces[0]) for trace in traces]).view(-1, 2)] if moves else [])
    if not moves:
        return
    average, value = pairs[0].unbind(1)
    most = LARGEST_JUMP * average
    factors = torch.where((most > 0) & (value > most), most / value, 1.0)
    reads = factors.is_cpu  # of another device, a step that reads them would wait
    by_part: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for (old, new, part), factor in zip(moves, factors.tolist() if reads else factors.unbind(), strict=True):
        if part < 1 and not (reads and factor == 1):
            new = new * (factor if reads else factor.to(new))
        by_part.setdefault(part, []).append((old, new))
    for part, pairs in by_part.items():
        torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], part)  # pyright: ignore[reportPrivateImportUsage]


def _trace(factor: Tensor) -> Tensor:
    """Sum of the diagonal of a matrix, of all matrices of a stack, or of a diagonal, ``[]``."""
    return factor.sum() if factor.ndim < 2 else factor.diagonal(dim1=-2, dim2=-1).sum()


def are_alike(known: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """Whether the curvature of a parameter has the form of earlier one: shapes and dtypes."""
    before, now = ([(tensor.shape, tensor.dtype) for tensor in each] for each in (known, new))
    return before == now


@dataclass
class Sums:
    """The curvature of one parameter, summed over backwards.

    Attributes:
        sums: tensors that add up as the losses do, and the factor of the input, weighted by the losses' weights.
        of_input: index of the input's factor, which is a mean over the data; ``None`` if there is none.
        weight: of the losses, see `curvopt.backpack.loss_weight`.
    """

    sums: list[Tensor]
    of_input: int | None
    weight: Tensor

    def add(self, later: "Sums") -> None:
        """Add those of later backwards."""
        self.sums = [a + b for a, b in zip(self.sums, later.sums, strict=True)]
        self.weight = self.weight + later.weight


def means_of(curvature: Mapping[Tensor, Sums], weight: Tensor) -> dict[Tensor, list[Tensor]]:
    """The curvature of a loss of weight 1, if these are the sums over losses of weight ``weight`` in all."""
    values, weights = [], []
    for each in curvature.values():
        of_input = each.weight.clamp(min=torch.finfo(each.weight.dtype).tiny)
        values += each.sums
        weights += [(of_input if i == each.of_input else weight).to(value) for i, value in enumerate(each.sums)]
    means = iter(torch._foreach_div(values, weights) if values else [])  # pyright: ignore[reportPrivateImportUsage]
    return {param: [next(means) for _ in each.sums] for param, each in curvature.items()}


_ZERO = torch.zeros((), device="cpu")  # never changed in place


@dataclass
class Collected:
    """The curvature that backwards have computed, and the weight of their losses.

    Attributes:
        curvature: by parameter.
        weight: of the losses that were differentiated.
        step_weight: that weight in units of the gradients that reach ``step()`` (without the scale of a
            ``GradScaler``).
        variables: largest number of variables of a prediction, see `curvopt.core.losses.roots.LossCurvature`.
        mixed: parameters whose curvature had several forms; the first one is kept.
        was_due: whether any backward was asked for curvature.
        versions: of the gradients after the last of the backwards, if they were all zero, see `versions`.
        refused: whether a backward had no curvature where there is none so far.
        partial: whether the weights lack the loss of a backward, none of whose parameters was due, or which had no
            curvature.
        ages: in a step, by parameter: how many steps it has taken since its last refresh.
        refreshed: in a step, whether curvature of any parameter was accepted, on any rank.
    """

    curvature: dict[Tensor, Sums] = field(default_factory=dict)
    weight: Tensor = _ZERO
    step_weight: Tensor = _ZERO
    variables: int = 1
    mixed: set[Tensor] = field(default_factory=set)
    was_due: bool = False
    versions: list[int] = field(default_factory=list)
    refused: bool = False
    partial: bool = False
    ages: dict[Tensor, int] = field(default_factory=dict)
    refreshed: bool = False

    def add(self, later: "Collected") -> None:
        """Add the curvature of later backwards."""
        self.variables, self.refused = max(self.variables, later.variables), self.refused or later.refused
        self.partial |= later.partial
        self.versions, self.was_due = later.versions, self.was_due or later.was_due
        self.mixed |= later.mixed
        for param, curvature in later.curvature.items():
            if param not in self.curvature:
                self.curvature[param] = curvature
            elif are_alike(self.curvature[param].sums, curvature.sums):
                self.curvature[param].add(curvature)
            else:
                self.mixed.add(param)
        self.weight = self.weight.to(later.weight) + later.weight
        self.step_weight = self.step_weight.to(later.step_weight) + later.step_weight

    def forms(self, params: Sequence[Tensor]) -> dict[int, Any]:
        """Shapes, dtype and index of the input's factor, by index of a parameter that has curvature."""
        found = {i: self.curvature[param] for i, param in enumerate(params) if param in self.curvature}
        return {
            i: ([list(s.shape) for s in c.sums], str(c.sums[0].dtype).removeprefix("torch."), c.of_input)
            for i, c in found.items()
        }


def have_gradients(params: Iterable[Tensor]) -> bool:
    """Whether any parameter has a gradient."""
    return any(param.grad is not None for param in params)


def versions(params: Iterable[Tensor]) -> list[int]:
    """Of all gradients: how often each was changed in place."""
    return [own_part(param.grad)._version for param in params if param.grad is not None]


def are_zero(params: Iterable[Tensor]) -> bool:
    """Whether no gradient (or shard of one) has an entry but zeros: usually the first has one."""
    grads = [own_part(param.grad) for param in params if param.grad is not None]
    return not any(grad.layout != torch.strided or grad.any() for grad in grads)
