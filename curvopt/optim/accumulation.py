"""Curvature between backward and step: of one backward, summed over several, averaged over steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvopt.distributed import own_part
from curvopt.errors import CurvoptError


def pop_field(param: Tensor, name: str) -> Any:
    """Take a quantity off a parameter; ``None`` if there is none."""
    return vars(param).pop(name, None)


def number(value: float) -> Tensor:
    """A number of a parameter's state, on the CPU: torch.distributed.checkpoint loads into tensors alone."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


#: A new value enters an average at most as this many times the average.
LARGEST_JUMP = 10.0


def ema_update(average: list[Tensor], weight: float, new: Sequence[Tensor], decay: float) -> float:
    """Mean of values that count less with age, in place.

    A value whose trace is more than `LARGEST_JUMP` times that of the average is scaled down to that, so that one bad
    batch spoils it no more than gradients that are clipped.

    Args:
        average: the tensors that are averaged. A value of age a (in steps) has the weight ``ema^a`` in their mean, as
            in Adam's moments with bias correction (Kingma & Ba 2015, section 3), however many steps are between values.
        weight: the sum of the weights, 0 before the first update.
        new: the values, one for each.
        decay: of the steps since the last update together.

    Returns:
        The new sum of the weights.
    """
    weight = decay * weight + 1
    for old, value in zip(average, new, strict=True):
        most, trace = LARGEST_JUMP * _trace(old), _trace(value)
        factor = torch.where((most > 0) & (trace > most) & (decay > 0), most / trace, 1.0)
        old.lerp_(value * factor, 1 / weight)
    return weight


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

    def mean(self, weight: Tensor) -> list[Tensor]:
        """The curvature of a loss of weight 1, if these are those of losses of weight ``weight`` in all."""
        tiny = torch.finfo(self.weight.dtype).tiny
        return [
            value / (self.weight.clamp(min=tiny) if i == self.of_input else weight).to(value)
            for i, value in enumerate(self.sums)
        ]


_ZERO = torch.zeros((), device="cpu")  # never changed in place


@dataclass
class Collected:
    """The curvature that backwards have computed, and the weight of their losses.

    Attributes:
        curvature: by parameter.
        weight: of the losses that were differentiated.
        step_weight: that weight in units of the gradients that reach ``step()`` (without the scale of a
            ``GradScaler``).
        foreign: number of parameters of other optimizers that received curvature where none of ours did; -1 if ours
            did, or if there was no backward at all.
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
    foreign: int = -1
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
        self.foreign = max(self.foreign, later.foreign)
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


def nothing_received(who: str, foreign: int) -> CurvoptError:
    """The error of an optimizer that received no curvature, though ``foreign`` parameters of others did."""
    if foreign:
        return CurvoptError(
            f"{who}.curvature(): {foreign} parameters received curvature, but none of this optimizer. Were parameters "
            "of the model replaced after it was built? Build it again from model.parameters(), and call extend(model) "
            "for the model that is trained."
        )
    return CurvoptError(
        f"{who}.curvature(): no parameter of this optimizer received curvature. Run loss.backward() inside the block, "
        f"with the optimizer built of the model, {who}(model), or with extend(model) called before the forward pass."
    )
