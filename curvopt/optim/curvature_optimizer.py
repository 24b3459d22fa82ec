"""The step that all curvature optimizers share: refresh the curvature, precondition, clip, step."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import reduce
from math import inf
from typing import Any

import torch
from torch import Tensor

from curvopt.core.backward.intercept import is_listening
from curvopt.core.products.base import widened
from curvopt.core.record import extended_name, outside_of_graphs
from curvopt.distributed import own_part, whole_of
from curvopt.errors import CurvoptError
from curvopt.optim import clocks
from curvopt.optim.accumulation import Collected, are_alike, are_zero, ema_update, number
from curvopt.optim.checkpoint import CURVATURE, CURVATURE_STATE
from curvopt.optim.closures import without_autocast
from curvopt.optim.options import DAMPINGS
from curvopt.optim.reports import coverage, listed
from curvopt.optim.resumable import Resumable
from curvopt.optim.stacks import Stack, Stacks, by_parameter
from curvopt.optim.step_checks import (
    WITHOUT_BACKWARD,
    NoCurvature,
    Overflow,
    accepted_curvature,
    are_finite,
    check_dense,
    check_schedules,
    has_curvature,
)
from curvopt.optim.step_size import by_device, cosine, damping_of, rms_clip_factor
from curvopt.optim.torch_step import decay_weights, take_torch_step


def _is_renewed(state: dict[str, Any]) -> bool:
    """Whether a solver has used the factors of a parameter, or has replaced them where there are none so far."""
    made = state.get("inverses", state.get("bases"))
    if made is None or "factors" not in state:
        return made is not None
    return bool(made) and made[0].ndim > 0


def _not_renewed(params: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Tensor]:
    """The parameters whose factors no solver has used so far."""
    if len(states) == len(params) and all(map(_is_renewed, states.values())):  # hashes of tensors are slow
        return []
    return [param for param in params if not _is_renewed(states[param])]


#: Steps between attempts where no backward has curvature, at most; a prime, so that each of a few kinds is met.
RETRY_EVERY = 7


class CurvatureOptimizer(Resumable):
    """Preconditions gradients by damped curvature, then takes the step of the torch optimizer it is mixed into.

    A concrete optimizer is ``class X(<collects curvature>, <solves with it>, torch.optim.Y)`` of classes such as
    `curvopt.optim.kronecker.Kronecker` and `curvopt.optim.solvers.FactoredInverse`, which implement ``_extensions``,
    ``_take``, ``_renew`` and ``_solve``. It calls ``_configure`` before the constructor of ``Y``. Per parameter,
    ``state`` holds ``factors`` (moving average of a factor list, see `curvopt.kroneckers`), ``ema_weight``, and the
    solver's results.

    All curvature is kept per unit of weight of the loss, that is for a mean-reduced loss, and gradients are divided by
    the weight of theirs: so ``damping`` and ``rms_clip`` have one meaning at any batch size, reduction, number of
    accumulated backwards or loss scale.

    ``.grad`` is the preconditioned gradient only while the step of ``Y`` runs: clipping before it acts on raw ones, and
    logging after it sees them. ``weight_decay`` is decoupled (``p *= 1 - lr * weight_decay``), whatever ``Y`` does.
    """

    #: Set by ``GradScaler.step`` while it calls `step`, if it is asked to.
    grad_scale: Any
    found_inf: Any
    #: Whether the caller's gradients are put back after the step.
    _restores_gradients = True
    #: The list in the state that ``_solve`` multiplies by.
    _stacked: str

    def _start_collecting(self) -> None:
        super()._start_collecting()
        self._stacks: dict[int, Stacks] = {}

    def _stacks_of(self, params: Sequence[Tensor], group: int = 0) -> list[Stack]:
        """Parameters of a group whose curvature has one form, together."""
        return self._stacks.setdefault(group, Stacks(self._stacked)).of(params, self.state)

    @abstractmethod
    def _renew(self) -> None:
        """Prepare ``_solve`` by the averaged factors of all parameters, and set ``metrics``."""

    def _solve(self, stack: Stack, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Preconditioned gradients ``[P]`` of a group's parameters; needed unless ``_precondition`` is overridden."""
        raise NotImplementedError(f"{type(self).__name__} has neither _solve nor a _precondition of its own")

    def _due(self, reached: Set[Tensor] | None) -> bool:
        if not is_listening():
            return False
        params, sharding = self._params(), self._sharding()
        begun = self._accumulation.has_begun if sharding is None else sharding.has_begun
        if begun or not (self._has_curvature() or self._progress["refused"]):  # one that was emptied is filled again
            return reached is None or not reached.isdisjoint(params)
        return clocks.is_due(self._progress, params, reached)

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    @without_autocast
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes gradients and returns the loss; called with gradients enabled, inside ``curvature()``.
                Where backwards accumulate it may be the last of them alone.

        Raises:
            CurvoptError: a gradient is not finite or sparse, an option has left its range, the parameters have another
                precision than before, or no curvature was ever computed. Nothing has changed then, but the curvature
                collected for this step is dropped.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.step, closure)
        loss = None if closure is None else self._evaluate(closure)
        collected, self._accumulation.since_last_step = self._accumulation.since_last_step, Collected()
        if self._overflows(collected):
            return loss
        ranks = self._ranks()
        sharding = None if ranks is None else self._sharding()
        grads = {p: p.grad for p in self._params() if p.grad is not None}
        if ranks is not None and (self._due(grads.keys()) or not self._ranks_agree):
            run = {name: self._progress[name] for name in ("step", "steps", "due", "next_inverse")}
            of_groups = {name: [_number(group.get(name)) for group in self.param_groups] for name in ("lr", *DAMPINGS)}
            collected = self._exchange(collected, ranks, run | of_groups)
        if not grads:
            return loss
        check_schedules(type(self).__name__, self.rms_clip, self.param_groups)
        owned = dict[Tensor, Tensor]()
        try:
            if sharding is None:
                taken = self._advance(grads, collected)
            else:
                with sharding.owned(self, grads, collected) as owned:
                    taken = self._advance({p: p.grad for p in owned.values() if p.grad is not None}, collected)
        except Overflow:
            if self.on_nonfinite == "raise":
                raise
            self._metrics["skipped"] = self._metrics.get("skipped", 0.0) + 1
            return loss
        if taken:
            clocks.tick(self._progress, self._params(), grads.keys())
            if sharding is not None:
                decay_weights(self, grads)
                sharding.apply(owned, grads, to_gradients=not self._restores_gradients)
        return loss

    def _advance(self, grads: dict[Tensor, Tensor], collected: Collected) -> bool:
        """Refresh the curvature and step, unless the loss weighs nothing and there is none so far."""
        who = type(self).__name__
        if self._is_asked_for_names(grads, collected):
            CurvatureOptimizer._take_torch_step(self, grads, grads)
            for param in grads:
                self.state[param][CURVATURE] = {}
            return False
        check_dense(who, grads, self._names)
        joined = _joined(self, grads) if has_curvature(self.state) else []
        finite = not collected.curvature and are_finite([flat for _, _, flat in joined])
        refused = collected.refused or (self._attached and self._progress["refused"])
        checked = self._over_ranks, finite, refused
        try:
            accepted = accepted_curvature(who, self._names, self.state, grads, collected, *checked)
        except NoCurvature:
            if not self._attached:
                raise
            self._say(
                "plain", f"takes plain gradients until a backward has curvature, as none was seen. {WITHOUT_BACKWARD}"
            )
            accepted, collected.refused = {}, True
        if accepted is None:
            return False
        if self._refresh(grads, collected, accepted) or not joined:
            joined = _joined(self, grads)
        update = self._precondition(grads, joined)
        del joined  # of the size of the gradients
        decay_weights(self, grads)
        self._take_torch_step(grads, update)
        self._progress["step"] += 1
        return True

    def _is_asked_for_names(self, grads: dict[Tensor, Tensor], collected: Collected) -> bool:
        """Whether this is the step of zero by which ``torch.distributed.checkpoint`` finds the names of a state."""
        rates = [group["lr"] for group in self.param_groups]
        if any(self.state.values()) or collected.curvature or any(float(rate) != 0 for rate in rates):
            return False
        return are_zero(grads)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call the closure inside ``curvature()``; return its result."""
        before, self._runs_closure = _gradients(self._params()), True
        # an attached optimizer has a context in each backward, also where the closure has one of its own
        with torch.enable_grad(), nullcontext() if self._attached else self.curvature():
            try:
                loss = closure()
            finally:
                self._runs_closure = False
            if isinstance(loss, Tensor) and loss.requires_grad and _gradients(self._params()) == before:
                raise CurvoptError(
                    f"{type(self).__name__}.step(closure): the closure returned a loss but called backward on none, so "
                    "no gradient has changed; call loss.backward() in the closure."
                )
        return loss

    def _overflows(self, collected: Collected) -> bool:
        """Divide gradients and weights by the scale that ``GradScaler.step`` hands over; whether a gradient overflowed.

        Raises:
            CurvoptError: if it has divided gradients that came with curvature, by a scale that is not known.
        """
        if getattr(self, "found_inf", None) is None:
            return False
        scale, found_inf = self.grad_scale, self.found_inf
        self.grad_scale = self.found_inf = None  # the torch optimizer would divide again
        if bool(whole_of(found_inf) > 0):
            return True
        if scale is None:
            if collected.curvature:
                who = type(self).__name__
                raise CurvoptError(
                    f"{who}.step(): GradScaler.unscale_ has divided the gradients, but not the curvature, by a scale "
                    f"that is not known; say {who}(model, scaler=scaler), or attach(model, scaler=scaler)."
                )
            return False
        grads = [own_part(param.grad) for param in self._params() if param.grad is not None]
        for device, own in by_device(grads).items():
            torch._foreach_div_(own, whole_of(scale).to(device))  # pyright: ignore[reportPrivateImportUsage]
        collected.step_weight = collected.step_weight / whole_of(scale).to(collected.step_weight)
        return False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler.step`` is to hand over its scale, as the optimizer does not know it.

        Lightning asks in the closure of a step whether it may clip: no scaler works there.
        """
        return not (self._knows_scale or self._runs_closure)

    def _factor_of_gradients(self) -> float:
        """By what the loop multiplies gradients after the backward."""
        factor = self._gradient_scale
        return float(factor() if callable(factor) else 1.0 if factor is None else factor)

    def _refresh(self, grads: dict[Tensor, Tensor], collected: Collected, accepted: dict[Tensor, list[Tensor]]) -> bool:
        """Move new factors into the averages, and call ``_renew`` if that is due: then true."""
        progress = self._progress
        if self._on_any_rank(accepted):
            progress["stale"], progress["refused"] = True, False
            progress["variables"] = collected.variables
            if not (collected.partial and self._has_curvature()):  # else they lack a loss, and earlier ones are known
                progress["step_weight"] = collected.step_weight * self._factor_of_gradients()
            accepted = self._settle(accepted, collected)
            decays = self._decays()
            self._forget_other_forms(accepted, collected.mixed)
            for param, factors in accepted.items():
                self._average(param, factors, decays[param])
            self._restart_clocks({*accepted}, {*grads})
        elif collected.refused:  # tried again after an interval, as it may take long
            progress["refused"] = True
            self._restart_clocks(set(), {*grads}, RETRY_EVERY)
        elif self._has_curvature() and not self._step_of_owner and not collected.curvature:
            if clocks.is_due(progress, self._params(), grads.keys(), self.curvature_every):
                remedy = (
                    "Call optimizer.attach(model), also after loading a state, or run backwards inside of "
                    "optimizer.curvature()."
                )
                self._say(
                    "overdue",
                    "takes steps with old curvature: its refresh is overdue, but no backward computed any. "
                    f"{WITHOUT_BACKWARD if self._attached else remedy}",
                )
        unknown = _not_renewed(self._params(), self.state)
        outside = {p for p in unknown if p in grads and "factors" not in self.state[p] and extended_name(p) is None}
        if outside and not self._step_of_owner:
            missing = listed([name for p, name in self._names().items() if p in outside])
            self._say(
                f"outside {missing}",
                f"takes the mean curvature of other parameters for {missing}, which are of no extended module. That "
                "is fine for parameters of your own; call attach(model) again where modules were added or replaced, "
                "attach(model, loss) for those of a loss.",
            )
        due = self._on_any_rank(unknown) or (progress["stale"] and progress["step"] >= progress["next_inverse"])
        if due:
            self._renew()
            progress["next_inverse"] = progress["step"] + clocks.annealed_interval(progress["step"], self.inverse_every)
            progress["stale"] = False
        return due

    def _settle(self, accepted: dict[Tensor, list[Tensor]], collected: Collected) -> dict[Tensor, list[Tensor]]:
        """Choose between factors of several kinds, where there are."""
        return accepted

    def _forget_other_forms(self, accepted: dict[Tensor, list[Tensor]], mixed: set[Tensor]) -> None:
        """Begin anew where the curvature of a parameter changes its form, and say so once."""
        known = {p: self.state[p]["factors"] for p in accepted if "factors" in self.state[p]}
        changed = [p for p, factors in known.items() if not are_alike(factors, accepted[p][: len(factors)])]
        for param in changed:
            self._forget(param)
        if changed or mixed:
            names = self._names()
            self._say(
                "forms",
                f"has curvature of several forms for {listed([names[p] for p in (*changed, *mixed) if p in names])}: "
                "losses reach it through layers of different kinds, or its layer has changed (pruned, say). Its "
                "average begins anew with each change; of several backwards of a step the first counts.",
            )

    def _forget(self, param: Tensor) -> None:
        """Drop the curvature of a parameter."""
        for name in CURVATURE_STATE:
            self.state[param].pop(name, None)

    def _decays(self) -> dict[Tensor, float]:
        """By parameter, the decay of its averages over the steps since its last refresh."""
        ages = iter(self._own_clocks(clocks.ages(self._progress, self._clocked())))
        return {param: group["ema"] ** next(ages) for group in self.param_groups for param in group["params"]}

    def _average(self, param: Tensor, new: list[Tensor], decay: float) -> None:
        """Move a parameter's new factors into their average."""
        state = self.state[param]
        if "factors" in state:
            state["ema_weight"] = number(ema_update(state["factors"], float(state["ema_weight"]), new, decay))
        else:
            state["factors"] = [factor.clone() for factor in new]
            state["ema_weight"] = number(1.0)

    def _precondition(
        self, grads: dict[Tensor, Tensor], joined: list[tuple[int, Stack, Tensor]]
    ) -> dict[Tensor, Tensor]:
        """The preconditioned gradients, from those that are `_joined`, clipped; records the metrics."""
        sums = [] if joined else [torch.zeros(7, dtype=torch.float64, device=self._device())]
        solved: list[tuple[Stack, Tensor]] = []
        clips = self.rms_clip is not None and self._has_curvature()  # without any, one factor is for all, below
        bound = self.rms_clip * self._progress["step_weight"] if clips else None
        for i, stack, grad in joined:
            update, rate = self._solve(stack, grad, self.param_groups[i]), self.param_groups[i]["lr"] ** 2
            update *= (moves := grad.sign().abs_())  # 0 where masks hold a gradient at zero, else 1
            solved.append((stack, update))
            raw, uu, weighted, count = stack.clip(update, moves, bound).unbind()
            sums.append(torch.stack([update.dot(grad), uu, grad.dot(grad), uu * rate, weighted, raw, count]))
        # the sums are divided by the weight of the loss, not the gradients; so are the updates, below
        total, count = self._over_ranks(reduce(torch.add, [each.to(sums[0]) for each in sums])).split([6, 1])
        weight = self._progress["step_weight"].to(total)
        # twice, because the square of the weight may leave the range of float32
        ug, uu, gg, length, weighted, raw = (total / weight / weight).unbind()
        # rows of an embedding that no token asked for have no part in the mean
        square = weighted / count[0].clamp(min=1)
        # plain gradients have no natural length: they take that of the bound
        clip = rms_clip_factor(square, None if self._has_curvature() else self.rms_clip, inf)
        self._metrics |= {
            "rms": clip * square.sqrt(),
            "clip_factor": clip * (uu / raw.clamp(min=torch.finfo(raw.dtype).tiny)).sqrt(),
            "step_norm": clip * length.sqrt(),
            "grad_norm": gg.sqrt(),
            "cosine": cosine(ug, uu, gg),
            "damping": damping_of(self.param_groups[0], self._progress["mean_curvature"]),
        }
        scale = clip / weight
        for device, own in by_device([update for _, update in solved]).items():
            torch._foreach_mul_(own, scale.to(device))  # pyright: ignore[reportPrivateImportUsage]
        return by_parameter(solved, grads)

    def _take_torch_step(self, grads: dict[Tensor, Tensor], update: dict[Tensor, Tensor]) -> None:
        """Run the step of the torch optimizer on ``update`` in place of the gradients."""
        torch_step = super().step.__func__  # type: ignore[attr-defined]
        take_torch_step(self, torch_step, update, grads if self._restores_gradients else {})

    # --- reports and checkpoints --------------------------------------------------------------------------------

    def coverage(self) -> dict[str, str]:
        """The curvature that preconditions each parameter: ``"kronecker"``, ``"dense"``, ``"diagonal"`` or ``"none"``.

        Parameters are called by name if the optimizer was given ``model.named_parameters()``, else ``group.index``; by
        name and group if names repeat. At first all are ``"none"``. A parameter that stays so is trained with the mean
        curvature of the others; its first step warns if it is of no extended module. ``"empirical kronecker"`` and so
        on: the loss had no curvature of the kind asked for.
        """
        sharding, names = self._sharding(), self._names()
        elsewhere = {} if sharding is None else {names[p]: kind for p, kind in sharding.kinds.items()}
        return coverage(names, self.state, self._progress["empirical"] and not self._wants_empirical()) | elsewhere

    def metrics(self) -> dict[str, float | Tensor]:
        """Numbers of the last step; tensors ``[]`` stay on the device until you read them.

        ``rms``: root mean square of all entries, as ``rms_clip`` counts them, after clipping. ``clip_factor``: norm of
        the preconditioned gradient over that before clipping, 1 if nothing is clipped, more without any curvature.
        ``step_norm``: ``‖lr u‖`` before momentum. ``grad_norm``, per unit of weight of the loss. ``cosine``: between
        gradient and preconditioned gradient. ``damping``: of the first group; parameters may have less, see
        ``relative_damping``. ``fallbacks``: matrices that needed more than the usual factorisation when last renewed.
        ``condition``: largest condition number of a damped factor (in the 1-norm) there. ``new_bases``: eigenbases
        computed when they were last checked. ``KFACAdamW`` has no damping and no clip; its ``step_norm`` and ``cosine``
        are those of the whole step. ``skipped``: steps that ``on_nonfinite="skip"`` left out. ``empirical``: 1 where
        the loss had no curvature of the kind asked for.
        """
        empirical = self._progress["empirical"] and not self._wants_empirical()
        return self._metrics | ({"empirical": 1.0} if empirical else {})


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _gradients(params: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """What tells whether a backward has changed a gradient."""
    return [None if (grad := param.grad) is None else (id(grad), grad._version) for param in params]


def _joined(optimizer: CurvatureOptimizer, grads: dict[Tensor, Tensor]) -> list[tuple[int, Stack, Tensor]]:
    """Indices of param groups, stacks of their parameters, and gradients of these ``[P]``."""
    everyone, found = len(grads) == len(optimizer._params()), []
    for i, group in enumerate(optimizer.param_groups):
        params = group["params"] if everyone else [param for param in group["params"] if param in grads]
        found += [(i, stack, widened(stack.join(grads))) for stack in optimizer._stacks_of(params, i)]
    return found
