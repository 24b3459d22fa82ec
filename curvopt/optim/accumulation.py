"""Curvature between backward and step: collected in one backward, summed over several, averaged over steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvopt.core.products.base import widened
from curvopt.distributed import Ranks, own_part
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
class Curvature:
    """The curvature of one parameter, summed over backwards.

    Attributes:
        sums: tensors that add up as the losses do, and the factor of the input, weighted by the losses' weights.
        of_input: index of the input's factor, which is a mean over the data; ``None`` if there is none.
        weight: of the losses, see `curvopt.backpack.loss_weight`.
    """

    sums: list[Tensor]
    of_input: int | None
    weight: Tensor

    def add(self, other: "Curvature") -> None:
        """Add those of other backwards."""
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        self.weight = self.weight + other.weight

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
    """The curvature that some backwards have computed, and the weight of their losses.

    Attributes:
        curvature: by parameter.
        weight: of the losses that were differentiated.
        step_weight: that weight in units of the gradients that reach ``step()`` (without the scale of a
            ``GradScaler``).
        foreign: number of parameters of other optimizers that received curvature where none of ours did; -1 if some of
            ours did, or if there was no backward at all.
        variables: largest number of variables of a prediction, see `curvopt.core.losses.roots.LossCurvature`.
        mixed: parameters whose curvature had several forms; the first one is kept.
        was_due: whether any backward was asked for curvature.
        versions: of the gradients after the last of the backwards, if they were all zero, see `versions`.
        refused: whether a backward had no curvature where there is none so far.
        partial: whether the weights lack the loss of a backward, none of whose parameters was due, or which had no
            curvature.
    """

    curvature: dict[Tensor, Curvature] = field(default_factory=dict)
    weight: Tensor = _ZERO
    step_weight: Tensor = _ZERO
    foreign: int = -1
    variables: int = 1
    mixed: set[Tensor] = field(default_factory=set)
    was_due: bool = False
    versions: list[int] = field(default_factory=list)
    refused: bool = False
    partial: bool = False

    def add(self, other: "Collected") -> None:
        """Add the curvature of later backwards."""
        self.foreign = max(self.foreign, other.foreign)
        self.variables, self.refused = max(self.variables, other.variables), self.refused or other.refused
        self.partial |= other.partial
        self.versions, self.was_due = other.versions, self.was_due or other.was_due
        self.mixed |= other.mixed
        for param, curvature in other.curvature.items():
            if param not in self.curvature:
                self.curvature[param] = curvature
            elif are_alike(self.curvature[param].sums, curvature.sums):
                self.curvature[param].add(curvature)
            else:
                self.mixed.add(param)
        self.weight = self.weight.to(other.weight) + other.weight
        self.step_weight = self.step_weight.to(other.step_weight) + other.step_weight

    def forms(self, params: Sequence[Tensor]) -> dict[int, Any]:
        """Shapes, dtype and index of the input's factor, by index of a parameter that has curvature."""
        found = {i: self.curvature[param] for i, param in enumerate(params) if param in self.curvature}
        return {
            i: ([list(s.shape) for s in c.sums], str(c.sums[0].dtype).removeprefix("torch."), c.of_input)
            for i, c in found.items()
        }

    def mean(
        self, forms: dict[int, Any], params: Sequence[Tensor], ranks: Ranks, chosen: torch.dtype | None
    ) -> "Collected":
        """The mean over the ranks, some of which have nothing for some parameters.

        Args:
            forms: of all ranks, see `forms`.
            params: the parameters.
            ranks: the ranks.
            chosen: dtype in which curvature is sent, see `curvopt.optim.over_ranks.OverRanks.communication_dtype`.
        """
        device = params[0].device
        # of one dtype, whatever that of the losses: a rank may have none
        weights = [w.to(device, torch.float64) for w in (self.weight, self.step_weight)]
        sums: list[Tensor] = []
        for i, (shapes, dtype, of_input) in forms.items():
            zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device=params[i].device) for shape in shapes]
            own = self.curvature.get(params[i], Curvature(zeros, of_input, torch.zeros((), device=params[i].device)))
            sums += own.sums
            weights.append(own.weight.to(torch.float64))
        weight, step_weight, *of_params = ranks.mean(weights)
        result = Collected({}, weight, step_weight, variables=self.variables)
        means = iter(ranks.mean(sums, chosen))
        for (i, (shapes, _, of_input)), mean_weight in zip(forms.items(), of_params, strict=True):
            result.curvature[params[i]] = Curvature([next(means) for _ in shapes], of_input, mean_weight)
        return result


class Accumulation:
    """Sums over the backwards between two steps.

    Attributes:
        this_backward: factors of a parameter and the index of the input's, while a backward runs.
        this_context: of the backwards in the present ``curvature()``, ``None`` outside of one.
        since_last_step: of the finished ``curvature()`` since the last step.
        foreign: number of parameters of other optimizers that received curvature in the present ``curvature()``.
        unneeded: whether a backward in it was left alone on purpose.
    """

    def __init__(self) -> None:
        self.this_backward: dict[Tensor, tuple[list[Tensor], int | None]] = {}
        self.this_context: Collected | None = None
        self.since_last_step = Collected()
        self.foreign, self.unneeded = 0, False

    @contextmanager
    def context(self, who: str | None) -> Iterator[None]:
        """Sum over the backwards inside, and keep the sums for the step unless the block raises.

        Args:
            who: name of the optimizer that has to receive curvature; ``None`` if it may stay without.

        Raises:
            CurvoptError: if it does not.
        """
        self.this_context, self.foreign, self.unneeded = Collected(), 0, False
        try:
            yield
            if not self.this_context.curvature and not self.unneeded:
                if who is not None:
                    raise nothing_received(who, self.foreign)
                self.this_context.foreign = self.foreign
            self.this_context.partial, self.this_context.was_due = self.unneeded, True
            self.since_last_step.add(self.this_context)
        finally:
            self.this_context = None
            self.this_backward.clear()

    @torch.no_grad()
    def end_backward(
        self,
        weight: Tensor | float,
        variables: int,
        loss_scale: float | Tensor,
        empirical: bool,
    ) -> None:
        """Weigh the factors of the backward that has ended, and add them to those of the context.

        Args:
            weight: of its loss.
            variables: of a prediction.
            loss_scale: factor of the loss that the gradients of the step do not have.
            empirical: whether the factors are of the gradients of this backward, see `curvopt.optim.empirical`.
        """
        factors, self.this_backward = self.this_backward, {}
        if self.this_context is None or not factors:
            return
        weight = widened(torch.as_tensor(weight, device=next(iter(factors)).device))
        collected = Collected({}, weight, weight / loss_scale, variables=variables)
        for param, (tensors, of_input) in factors.items():
            if empirical:
                least = torch.finfo(weight.dtype).tiny
                tensors = [t if i == of_input else t / weight.clamp(min=least).to(t) for i, t in enumerate(tensors)]
            if of_input is not None:
                tensors[of_input] = tensors[of_input] * weight.to(tensors[of_input])
            collected.curvature[param] = Curvature(tensors, of_input, weight)
        self.this_context.add(collected)

    @property
    def has_begun(self) -> bool:
        """Whether there is curvature for the next step."""
        return bool(self.since_last_step.curvature or (self.this_context and self.this_context.curvature))

    def drop_discarded(self, has_gradients: bool, are_zero: Callable[[], bool], versions: list[int]) -> bool:
        """Before a backward: drop the curvature whose gradients were discarded since, or set to zero.

        Returns:
            Whether a step was left out for which there was some.
        """
        context = self.this_context
        last = context if context is not None and context.curvature else self.since_last_step
        if not has_gradients or (last.curvature and versions != last.versions and are_zero()):
            left_out = self.since_last_step.was_due
            self.since_last_step, self.this_context = Collected(), Collected()
            return left_out
        return False

    def drop(self) -> bool:
        """Drop all curvature that was collected since the last step; whether it was due for one that was left out."""
        left_out, self.since_last_step = self.since_last_step.was_due, Collected()
        if self.this_context is not None:
            self.this_context = Collected()
        return left_out


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


def has_gradients(params: Iterable[Tensor]) -> bool:
    """Whether any parameter has a gradient."""
    return any(param.grad is not None for param in params)


def versions(params: Iterable[Tensor]) -> list[int]:
    """Of all gradients: how often each was changed in place."""
    return [own_part(param.grad)._version for param in params if param.grad is not None]


def are_zero(params: Iterable[Tensor]) -> bool:
    """Whether no gradient (or shard of one) has an entry but zeros: usually the first has one."""
    grads = [own_part(param.grad) for param in params if param.grad is not None]
    return not any(grad.layout != torch.strided or grad.any() for grad in grads)
