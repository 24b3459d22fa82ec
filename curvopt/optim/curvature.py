"""The curvature of an optimizer's parameters: when it is due, collected in backwards, added up, averaged over steps.

Each parameter is refreshed by its own steps, so that heads may take turns and layers be unfrozen. A run keeps, for each
parameter in the order of the param groups, ``steps``: how many it has taken, ``due``: the number at which its curvature
is refreshed next, and ``refreshed``: the number at which it was refreshed last. New parameters are due at once.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvopt.core.backward.backward_pass import Request
from curvopt.core.backward.checks import may_be_one_sample
from curvopt.core.backward.intercept import is_listening
from curvopt.core.extend import extend_on_demand
from curvopt.core.losses.roots import MonteCarlo, NotCurved
from curvopt.core.products.base import DENSE_BLOCK_LIMIT, widened
from curvopt.core.record import extended_model, owned_parameters
from curvopt.distributed import is_sharded, refuse_sharded
from curvopt.errors import CurvoptError
from curvopt.optim.accumulation import (
    Collected,
    Move,
    Sums,
    are_alike,
    are_zero,
    number,
    update_averages,
    versions,
)
from curvopt.optim.empirical import are_of_gradients
from curvopt.optim.options import listed
from curvopt.optim.ranks import Alone
from curvopt.optim.state import ParameterCurvature, Run, curvature_of

#: How many outputs of a sample an unknown loss may couple: so many products with its Hessian cost a few gradients.
COUPLED_OUTPUTS = 32

#: A factor list and what else adds up as losses do, and the index of the input's factor.
Taken = tuple[list[Tensor], int | None]


class Quantity(ABC):
    """The curvature that an optimizer collects. It holds options alone: what a run has chosen stands in `Run`."""

    #: Its options, which ``defaults`` and ``print`` show.
    options: Mapping[str, Any] = {}  # noqa: RUF012
    #: Whether the empirical quantity is the one that the optimizer is made for.
    prefers_empirical = False
    #: How many times more vectors are drawn of a batch that is one sample: several where steps divide by the curvature
    #: without a bound, or by squares of the vectors themselves.
    draws_of_one_sample = 1
    #: The refresh at step n is followed by one ``growth * n`` steps later, until intervals are as long as was asked.
    growth = 4

    @abstractmethod
    def extensions(self, curvature: "Curvature") -> list[Any]:
        """The extensions that compute it."""

    def empirical(self, curvature: "Curvature", one_sample: bool) -> list[Any]:
        """Extensions of the empirical quantity (see `curvopt.optim.empirical`); by default none.

        Args:
            curvature: whose parameters they are for.
            one_sample: whether the batch is one sample.
        """
        return []

    def of_one_sample(self, extensions: Sequence[Any]) -> tuple[Any, ...]:
        """The extensions for a batch that is one sample, which draw several vectors for it."""
        for extension in extensions:
            if isinstance(columns := extension.columns, MonteCarlo):
                extension.columns = replace(columns, samples=self.draws_of_one_sample * columns.samples)
        return tuple(extensions)

    @abstractmethod
    def take(self, param: Tensor, run: Run) -> Taken | None:
        """Remove the extensions' fields from a parameter.

        Returns:
            The factor list (then anything else that adds up as losses do), and the index of the input's factor;
            ``None`` if there is none.
        """

    def settle(
        self,
        accepted: dict[Tensor, list[Tensor]],
        known: Set[Tensor],
        collected: Collected,
        run: Run,
        ranks: Alone,
    ) -> dict[Tensor, list[Tensor]]:
        """Choose between factors of several kinds, where there are, before they are averaged.

        Args:
            accepted: means over the loss.
            known: parameters that have an average.
            collected: what they are of.
            run: of the optimizer.
            ranks: that take the step.
        """
        return accepted

    def average(self, param: Tensor, kept: ParameterCurvature, new: list[Tensor], decay: float) -> list[Move]:
        """Begin the averages of a parameter's new factors; what moves the averages that there are."""
        if kept.factors is None or kept.ema_weight is None:
            kept.factors, kept.ema_weight = [factor.clone() for factor in new], number(1.0)
            return []
        kept.ema_weight = number(weight := decay * float(kept.ema_weight) + 1)
        return [(old, value, 1 / weight) for old, value in zip(kept.factors, new, strict=True)]

    def cost(self, param: Tensor, inverse_every: int) -> int:
        """Of the step and the state of a parameter, for the choice of its owner."""
        return param.numel() + 1

    def rows_together(self, param: Tensor) -> int:
        """The least number of rows that a rank may own; all, but in matrices and vectors that are not small."""
        return 1 if param.ndim < 3 and param.numel() > DENSE_BLOCK_LIMIT else param.shape[0]


class Listening:
    """Takes curvature from a backward, by a ladder that each backward climbs anew.

    The curvature that was asked for, with rows as samples or else the batch as one sample; else the empirical quantity;
    else what there is: earlier curvature, or the gradient as it is. Each is said once.

    Args:
        curvature: takes it.
        ranks: of the optimizer.
        scale: factor of the loss that gradients do not have in ``step()``.

    Attributes:
        fields: of the backward.
    """

    def __init__(self, curvature: "Curvature", ranks: Alone, scale: Any):
        self.curvature, self.ranks, self.scale = curvature, ranks, scale
        self.fields: dict[Tensor, Taken] = {}
        self.extensions: tuple[Any, ...] = ()  # the empirical ones, where the first ones were refused
        self.refusal: CurvoptError | None = None
        self.before, self.params = curvature.run.empirical, set(curvature.params())

    def wanted(self, leaves: set[Any]) -> bool:
        """See `curvopt.core.backward.context.Listener`."""
        self.curvature.drop_discarded(self.ranks)
        # a forward pass that came before the step which made it due has no records; the next one has
        known = {*leaves, *self.curvature.reached(leaves)}
        found = not any((model := extended_model(p)) is not None and model.was_skipped for p in known)
        self.ranks.begin(found)
        if found:
            self.curvature.run.empirical = 0
        self.curvature.collected.partial |= not found
        return found

    def refused(self, error: CurvoptError, request: Request) -> Request:
        """See `curvopt.core.backward.context.Listener`."""
        curvature, run, say = self.curvature, self.curvature.run, self.curvature.optimizer._say
        self.refusal = self.refusal or error
        # rows may be samples after an error about the loss, but after no other one
        as_one_sample = request.as_one_sample or not isinstance(error, NotCurved)
        was_by_rows = as_one_sample and not request.as_one_sample
        if was_by_rows and not curvature.has_no_rows() and may_be_one_sample(request.extensions):
            extensions = curvature.quantity.of_one_sample(request.extensions)
            return replace(request, extensions=extensions, as_one_sample=True)
        if was_by_rows or not self.extensions:
            run.empirical = 1
            extensions = curvature.quantity.empirical(curvature, as_one_sample or curvature.has_no_rows())
            self.extensions = tuple(extensions)
            return replace(request, extensions=self.extensions, as_one_sample=as_one_sample)
        run.empirical, curvature.collected.partial = self.before, True
        why = _in_words_of_attach(self.refusal)
        if self.ranks.have_curvature(curvature.optimizer.state) or curvature.has_begun:
            say("refused", f"goes on with the curvature it has, as a backward has none. {why}")
        else:
            curvature.collected.refused = True
            say("plain", f"takes plain gradients until a backward has curvature, as this one has none. {why}")
        return Request()

    @torch.no_grad()
    def collect(self, module: nn.Module) -> None:
        """Extension hook: take the fields off a module's parameters."""
        for used in owned_parameters(module).values():
            taken = self.curvature.quantity.take(used, self.curvature.run)
            param = self.ranks.gathered.get(used, used)
            if taken is not None and param in self.params:
                # bfloat16 or half factors would lose the average and break the inverse
                dtype = torch.promote_types(param.dtype, torch.float32)
                self.fields[param] = [t.detach().to(dtype) for t in taken[0]], taken[1]

    @torch.no_grad()
    def finished(self, weight: Tensor | float, variables: int) -> None:
        """See `curvopt.core.backward.context.Listener`."""
        curvature, factors = self.curvature, self.fields
        if self.refusal is not None:
            why = _in_words_of_attach(self.refusal).split("; use ")[0].removesuffix(".")  # the rest names extensions
            if not self.extensions:
                curvature.optimizer._say(
                    "one sample",
                    f"takes a batch as one sample, which is right on average; batch_axis=None says so. {why}.",
                )
            elif not curvature.quantity.prefers_empirical:
                curvature.optimizer._say("empirical", f"takes the empirical quantity for such batches. {why}.")
        params = curvature.params()
        curvature.versions = [param._version for param in params]
        if not factors:
            return
        weight = widened(torch.as_tensor(weight, device=next(iter(factors)).device))
        collected = Collected({}, weight, weight / self.scale, variables)
        collected.versions = versions(params) if are_zero(params) else []
        for param, (tensors, of_input) in factors.items():
            if are_of_gradients(self.extensions):
                least = torch.finfo(weight.dtype).tiny
                tensors = [t if i == of_input else t / weight.clamp(min=least).to(t) for i, t in enumerate(tensors)]
            if of_input is not None:
                tensors[of_input] = tensors[of_input] * weight.to(tensors[of_input])
            collected.curvature[param] = Sums(tensors, of_input, weight)
        curvature.collected.add(collected)


def _in_words_of_attach(error: CurvoptError) -> str:
    """The text of an error of the engine, whose remedy is an argument of `attach` here."""
    return str(error).replace("extend(model", "attach(model")


class Curvature:
    """The curvature of an optimizer's parameters.

    Args:
        optimizer: whose parameters they are; it is not kept alive.
        quantity: what is collected.
        run: counters and choices of the run.

    Attributes:
        collected: sums over the backwards since the last step.
        is_attached: whether all backwards that reach the parameters are asked.
        model: that the optimizer was attached to, and its parameters that are the optimizer's, by name.
        ranks_agree: whether the ranks were found in equal states.
        versions: of the parameters at the end of the last backward with curvature.
    """

    def __init__(self, optimizer: Any, quantity: Quantity, run: Run):
        self.optimizer: Any = weakref.proxy(optimizer)
        self.who, self.quantity, self.run = type(optimizer).__name__, quantity, run
        self.collected = Collected()
        self.is_attached, self.ranks_agree = False, False
        self.model: tuple[Callable[[], nn.Module | None], Mapping[str, Tensor]] = (lambda: None, {})
        self.scaler: Any = None
        self.gradient_scale: float | Callable[[], float] | None = None
        self.loss_reduction: Literal["mean", "sum"] | None = None
        self.versions: list[int] = []

    def params(self) -> list[Tensor]:
        """The optimizer's parameters."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    # --- attach -------------------------------------------------------------------------------------------------

    def attach(
        self,
        model: Any,
        lossfunc: Any = None,
        scaler: Any = None,
        gradient_scale: float | Callable[[], float] | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
        batch_axis: int | None = 0,
    ) -> None:
        """See `curvopt.optim.step.CurvatureOptimizer.attach`."""
        who = f"{self.who}.attach()"
        if not isinstance(model, nn.Module):
            got = "nothing" if model is None else type(model).__name__
            raise TypeError(f"{who}: expected a torch.nn.Module, got {got}; write attach(model).")
        if lossfunc is not None and not isinstance(lossfunc, nn.Module):
            kind = getattr(lossfunc, "__name__", type(lossfunc).__name__)
            raise TypeError(
                f"{who}: expected a torch.nn.Module, got {type(lossfunc).__name__} {kind} as lossfunc. Losses that are "
                "functions need none: write attach(model)."
            )
        ranks = self.optimizer._ranks()
        mine = ranks.in_forward(self.params())
        with ranks.serving(self.params()):
            refuse_sharded((who, name, p) for name, p in model.named_parameters() if not is_sharded(p))
        found = {name: p for name, p in model.named_parameters() if p in mine}
        if not found:
            raise CurvoptError(
                f"{who}: no parameter of this optimizer belongs to this {type(model).__name__}. Attach after "
                "everything that replaces parameters (moving to a device, wrapping), and build the optimizer from "
                "model.parameters()."
            )
        extend_on_demand(model, batch_axis)
        if lossfunc is not None:
            extend_on_demand(lossfunc)
        self.model = weakref.ref(model), found
        self.loss_reduction = loss_reduction or self.loss_reduction
        self.gradient_scale = self.gradient_scale if gradient_scale is None else gradient_scale
        self.scaler, self.is_attached = self.scaler if scaler is None else scaler, True

    def has_no_rows(self) -> bool:
        """Whether a batch of the model is one sample, as it was extended so."""
        models = {extended_model(param) for param in self.params()}
        return any(model is not None and model.batch_axis is None for model in models)

    # --- when it is due -----------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether there is curvature for the next step."""
        return bool(self.collected.curvature)

    def is_due(self, reached: Set[Tensor] | None = None) -> bool:
        """Whether a backward that reaches parameters is to compute curvature.

        Args:
            reached: the parameters; ``None`` before the forward pass, where any may be reached.
        """
        if not is_listening():
            return False
        ranks, params = self.optimizer._ranks(), self.params()
        known = ranks.have_curvature(self.optimizer.state) or self.run.refused
        if ranks.has_begun(self) or not known:  # one that was emptied is filled again
            return reached is None or not reached.isdisjoint(params)
        return self.is_overdue(params, reached, 0)

    def is_overdue(self, params: list[Tensor], reached: Set[Tensor] | None, late: int) -> bool:
        """Whether one of the parameters that are reached has been due for so many of its steps."""
        for param, steps, due in self._clocks(params, "due"):
            if steps >= due + late and param.requires_grad and (reached is None or param in reached):
                return True
        return False

    def restart(self, refreshed: Set[Tensor], moved: Set[Tensor], every: int) -> None:
        """Make parameters that were refreshed due again after an interval, and those that move, too."""
        params = self.params()
        clocks, growth = list(self._clocks(params, "due", "refreshed")), self.quantity.growth
        self.run.due = [
            steps + annealed_interval(steps, every, growth) if param in refreshed or param in moved else due
            for param, steps, due, _ in clocks
        ]
        self.run.refreshed = [steps if param in refreshed else last for param, steps, _, last in clocks]

    def ages(self) -> dict[Tensor, int]:
        """How many steps each parameter has taken since its last refresh, at least 1."""
        return {param: max(1, steps - last) for param, steps, last in self._clocks(self.params(), "refreshed")}

    def tick(self, moved: Set[Tensor]) -> None:
        """Count a step of parameters."""
        params = self.params()
        all_move = len(moved) == len(params)
        self.run.steps = [steps + (all_move or param in moved) for param, steps in self._clocks(params)]

    def _clocks(self, params: list[Tensor], *names: str) -> Iterator[Any]:
        new = [0] * len(params)  # more than are needed
        return zip(params, *([*getattr(self.run, name), *new] for name in ("steps", *names)), strict=False)

    # --- collect ------------------------------------------------------------------------------------------------

    def context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> Any:
        """For a backward that is about to reach ``parameters()``: the context to run it in, or ``None``."""
        if not self.is_due():
            return None
        reached = self.reached(parameters())
        due = self.is_due(reached)
        self.collected.partial |= bool(reached) and not due
        return self._context() if due else None

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Collect from the backward inside; drop that if it raises."""
        optimizer = self.optimizer
        optimizer._check_state()
        ranks = optimizer._ranks()
        extensions = self.quantity.extensions(self)
        request = Request(
            self.quantity.of_one_sample(extensions) if self.has_no_rows() else tuple(extensions),
            counted=frozenset(self.params()),
            maximized=bool(optimizer.param_groups[0].get("maximize", False)),
            loss_reduction=self.loss_reduction,
            largest_block=COUPLED_OUTPUTS,
            skips_empty=ranks.meet,
        )
        listening = Listening(self, ranks, 1.0 if self.scaler is None else self.scaler.get_scale())
        with ranks.backward(request, listening, listening.collect):
            yield
        self.collected.was_due = True

    def reached(self, leaves: Set[Tensor]) -> Set[Tensor]:
        """This optimizer's parameters among the leaves of a graph, or those that stand there for its shards."""
        mine = self.optimizer._ranks().in_forward(self.params())
        return {mine[leaf] for leaf in leaves if leaf in mine}

    def sampler(self) -> torch.Generator:
        """A generator for the Monte-Carlo samples of one backward."""
        return self.run.generator(self.optimizer._device(), self.optimizer._ranks().rank)

    def bases(self) -> Mapping[Tensor, list[Tensor]]:
        """The eigenbases, by what a backward uses in place of the parameters."""
        states = self.optimizer.state.items()
        known = {p: curvature.bases for p, state in states if (curvature := curvature_of(state)).bases}
        return self.optimizer._ranks().in_backward(known)

    @torch.no_grad()
    def drop_discarded(self, ranks: Alone) -> None:
        """Before a backward: drop the curvature whose gradients were discarded since, or set to zero."""
        params, last = self.params(), self.collected
        are_zeros = ranks.zero_test(params)
        replaced = bool(last.curvature) and versions(params) != last.versions
        if not ranks.have_gradients(params) or (replaced and are_zeros()):
            self.drop()

    def drop(self) -> None:
        """Drop all curvature since the last step, and tell other ranks where it was due for a step that is left out."""
        left_out, self.collected = self.collected.was_due, Collected()
        if left_out:
            self.optimizer._ranks().tell_of_step_left_out(self.run.step)

    def factor_of_gradients(self) -> float:
        """By what the loop multiplies gradients after the backward."""
        factor = self.gradient_scale
        return float(factor() if callable(factor) else 1.0 if factor is None else factor)

    # --- average ------------------------------------------------------------------------------------------------

    def average(
        self, ranks: Alone, accepted: dict[Tensor, list[Tensor]], collected: Collected, forget: Callable[[Tensor], None]
    ) -> None:
        """Move new factors into the averages.

        Args:
            ranks: that take the step.
            accepted: means over the loss.
            collected: what they are of.
            forget: drops the curvature of a parameter.
        """
        states = self.optimizer.state
        known = {p: factors for p in accepted if (factors := curvature_of(states[p]).factors) is not None}
        accepted = self.quantity.settle(accepted, known.keys(), collected, self.run, ranks)
        changed = [p for p, factors in known.items() if not are_alike(factors, accepted[p][: len(factors)])]
        for param in changed:
            forget(param)
        if changed or collected.mixed:
            names = self.optimizer._names()
            several = [names[p] for p in (*changed, *collected.mixed) if p in names]
            self.optimizer._say(
                "forms",
                f"has curvature of several forms for {listed(several)}: losses reach it through layers of different "
                "kinds, or its layer has changed (pruned, say). Its average begins anew with each change; of several "
                "backwards of a step the first counts.",
            )
        moves, moved = list[Move](), list[Tensor]()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p in accepted:
                    decay = group["ema"] ** collected.ages[p]
                    moves += self.quantity.average(p, curvature_of(states[p]), accepted[p], decay)
                    moved += [p] * (len(moves) - len(moved))
        update_averages(moves, partial(ranks.over_pieces, moved))


def annealed_interval(step: int, every: int, growth: int) -> int:
    """Steps until the next refresh: ``growth`` times as many as were taken so far, at least 1 and at most ``every``."""
    return max(1, min(every, growth * step))
