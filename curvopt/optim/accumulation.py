"""Curvature between backward and step: collected in one backward, summed over several, averaged over steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvopt.core.jacobians.sums import widened
from curvopt.core.recording.extended_parameters import extended_name
from curvopt.distributed import Ranks, is_sharded
from curvopt.errors import CurvoptError

#: Gradients and their versions, if none has an entry but zeros.
Zeros = list[tuple[Tensor, int]]


def pop_field(param: Tensor, name: str) -> Any:
    """Take a quantity off a parameter; ``None`` if there is none."""
    return vars(param).pop(name, None)


def number(value: float) -> Tensor:
    """A number of a parameter's state, on the CPU: torch.distributed.checkpoint loads into tensors alone."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def ema_update(average: list[Tensor], weight: float, new: Sequence[Tensor], decay: float) -> float:
    """Exponential moving average with bias correction, in place (Kingma & Ba 2015, section 3).

    Kept normalised: ``average = Σ_t decay^(T-t) new_t / Σ_t decay^(T-t)``. ``weight`` is ``(1 - decay)`` times that
    denominator, 0 before the first update; its new value is returned.
    """
    weight = decay * weight + (1 - decay)
    for old, value in zip(average, new, strict=True):
        old.lerp_(value, (1 - decay) / weight)
    return weight


def check_forms(name: str | None, known: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Refuse to add curvature to that of a parameter if the two differ in form.

    Raises:
        CurvoptError: for other shapes or another dtype.
    """
    before, now = ([(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in each] for each in (known, new))
    if before != now:
        raise CurvoptError(
            f"{name or 'a parameter'}: its curvature is kept as {before}, but the new one is {now}. If losses reach it "
            "through layers of different kinds (an embedding and a linear layer, for example), compute them from one "
            "output, untie it, or use DiagonalNewton; if its layer has changed (pruned, for example), restart its "
            "curvature by optimizer.state[p].clear(); if the state was loaded, build the optimizer with the same "
            "options, for parameters of the same dtype. Parameters and state are unchanged."
        )


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


@dataclass
class Collection:
    """The curvature that some backwards have computed, and the weight of their losses.

    Attributes:
        curvature: by parameter.
        weight: of the losses that were differentiated.
        step_weight: that weight in units of the gradients that reach ``step()`` (without the scale of a
            ``GradScaler``).
        closure_weight: the part of ``step_weight`` that belongs to the closure of the step.
        foreign: number of parameters of other optimizers that received curvature where none of ours did; -1 if some of
            ours did, or if there was no backward at all.
        variables: largest number of variables of a prediction, see `curvopt.core.losses.hessian_root.LossCurvature`.
        zeros: the gradients after the last of the backwards and their versions, if they were all zero.
    """

    curvature: dict[Tensor, Curvature] = field(default_factory=dict)
    weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    step_weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    closure_weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    foreign: int = -1
    variables: int = 1
    zeros: Zeros = field(default_factory=list)

    def add(self, other: "Collection") -> None:
        """Add the curvature of later backwards."""
        self.foreign = max(self.foreign, other.foreign)
        self.variables = max(self.variables, other.variables)
        self.zeros = other.zeros
        for param, curvature in other.curvature.items():
            if param in self.curvature:
                check_forms(extended_name(param), self.curvature[param].sums, curvature.sums)
                self.curvature[param].add(curvature)
            else:
                self.curvature[param] = curvature
        self.weight = self.weight.to(other.weight) + other.weight
        self.step_weight = self.step_weight.to(other.step_weight) + other.step_weight

    def forms(self, params: Sequence[Tensor]) -> dict[int, Any]:
        """Shapes, dtype and index of the input's factor, by index of a parameter that has curvature."""
        found = {i: self.curvature[param] for i, param in enumerate(params) if param in self.curvature}
        return {
            i: ([list(s.shape) for s in c.sums], str(c.sums[0].dtype).removeprefix("torch."), c.of_input)
            for i, c in found.items()
        }

    def mean(self, forms: dict[int, Any], params: Sequence[Tensor], ranks: Ranks) -> "Collection":
        """The mean over the ranks, some of which have nothing for some parameters.

        Args:
            forms: of all ranks, see `forms`.
            params: the parameters.
            ranks: the ranks.
        """
        device = params[0].device
        # of one dtype, whatever that of the losses: a rank may have none
        tensors = [w.to(device, torch.float64) for w in (self.weight, self.step_weight, self.closure_weight)]
        for i, (shapes, dtype, of_input) in forms.items():
            zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device=params[i].device) for shape in shapes]
            own = self.curvature.get(params[i], Curvature(zeros, of_input, torch.zeros((), device=params[i].device)))
            tensors += [*own.sums, own.weight.to(torch.float64)]
        weight, step_weight, closure_weight, *means = ranks.mean(tensors)
        result = Collection({}, weight, step_weight, closure_weight, variables=self.variables)
        rest = iter(means)
        for i, (shapes, _, of_input) in forms.items():
            sums = [next(rest) for _ in shapes]
            result.curvature[params[i]] = Curvature(sums, of_input, next(rest))
        return result


class Accumulation:
    """Sums over the backwards between two steps.

    Attributes:
        this_backward: factors of a parameter and the index of the input's, while a backward runs.
        this_context: of the backwards in the present ``curvature()``, ``None`` outside of one.
        since_last_step: of the finished ``curvature()`` since the last step.
        foreign: number of parameters of other optimizers that received curvature in the present ``curvature()``.
    """

    def __init__(self) -> None:
        self.this_backward: dict[Tensor, tuple[list[Tensor], int | None]] = {}
        self.this_context: Collection | None = None
        self.since_last_step = Collection()
        self.foreign = 0

    @contextmanager
    def context(self, who: str | None) -> Iterator[None]:
        """Sum over the backwards inside, and keep the sums for the step unless the block raises.

        Args:
            who: name of the optimizer that has to receive curvature; ``None`` if it may stay without.

        Raises:
            CurvoptError: if it does not.
        """
        self.this_context, self.foreign = Collection(), 0
        try:
            yield
            if not self.this_context.curvature:
                if who is not None:
                    raise nothing_received(who, self.foreign)
                self.this_context.foreign = self.foreign
            self.since_last_step.add(self.this_context)
        finally:
            self.this_context = None
            self.this_backward.clear()

    @torch.no_grad()
    def end_backward(self, weight: Tensor | float, variables: int, loss_scale: float | Tensor) -> None:
        """Weigh the factors of the backward that has ended, and add them to those of the context.

        Args:
            weight: of its loss.
            variables: of a prediction.
            loss_scale: factor of the loss that the gradients of the step do not have.
        """
        factors, self.this_backward = self.this_backward, {}
        if self.this_context is None or not factors:
            return
        weight = widened(torch.as_tensor(weight, device=next(iter(factors)).device))
        collected = Collection({}, weight, weight / loss_scale, variables=variables)
        for param, (tensors, of_input) in factors.items():
            if of_input is not None:
                tensors[of_input] = tensors[of_input] * weight.to(tensors[of_input])
            collected.curvature[param] = Curvature(tensors, of_input, weight)
        self.this_context.add(collected)

    def drop_discarded(self, has_gradients: bool, find_zeros: Callable[[], Zeros]) -> None:
        """Before a backward: drop the curvature whose gradients were discarded since."""
        context = self.this_context
        last = context if context is not None and context.curvature else self.since_last_step
        zeros = find_zeros() if last.curvature else None
        if not has_gradients or (zeros and not _are_identical(zeros, last.zeros)):
            self.since_last_step, self.this_context = Collection(), Collection()

    def note_zeros(self, params: Sequence[Tensor]) -> None:
        """After a backward, once all gradients are there: remember those that are zero though nobody reset them."""
        if self.this_context is not None and self.this_context.curvature:
            self.this_context.zeros = zero_gradients(params)

    def drop(self) -> None:
        """Drop all curvature that was collected since the last step."""
        self.since_last_step = Collection()
        if self.this_context is not None:
            self.this_context = Collection()


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
        "with model = extend(model) and lossfunc = extend(lossfunc) called before the forward pass."
    )


def has_gradients(params: Iterable[Tensor]) -> bool:
    """Whether any parameter has a gradient."""
    return any(param.grad is not None for param in params)


def zero_gradients(params: Iterable[Tensor]) -> Zeros:
    """All gradients (this rank's shards) and their versions, if none has an entry but zeros: usually the first does."""
    grads: list[Any] = [param.grad for param in params if param.grad is not None]
    grads = [grad.to_local() if is_sharded(grad) else grad for grad in grads]
    if any(grad.layout != torch.strided or grad.any() for grad in grads):
        return []
    return [(grad, grad._version) for grad in grads]


def _are_identical(these: Zeros, those: Zeros) -> bool:
    """Whether two lists hold identical tensors, unchanged."""
    pairs = zip(these, those, strict=False)
    return len(these) == len(those) and all(this is that and now == then for (this, now), (that, then) in pairs)
