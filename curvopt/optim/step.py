"""The step that all curvature optimizers share: refresh the curvature, precondition, clip, step."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, reduce
from inspect import unwrap
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvopt.core.backward.intercept import attach
from curvopt.core.pytorch_workarounds import outside_of_graphs
from curvopt.distributed import fsdp_states, is_sharded, own_part, ranks_of, whole_of
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.optim.accumulation import Collected, are_zero, means_of
from curvopt.optim.closures import without_autocast
from curvopt.optim.curvature import Curvature, Quantity, annealed_interval
from curvopt.optim.options import (
    DAMPINGS,
    OF_GROUPS,
    Attached,
    check_attached,
    check_decays,
    check_group_options,
    check_new_group,
    check_options,
    check_schedules,
    coverage,
    listed,
    parameter_names,
    parameters_of,
    shown,
)
from curvopt.optim.ranks import Alone, Replicas
from curvopt.optim.solve import Solver
from curvopt.optim.stacks import Stack, Stacks, by_parameter
from curvopt.optim.state import (
    CURVATURE,
    RUN,
    Run,
    curvature_of,
    exporting,
    fits,
    have_curvature,
    importing,
    in_full_precision,
    unsolved,
    without_curvature,
)
from curvopt.optim.step_size import by_device, cosine, damping_of, decay_weights, rms_clip_factor
from curvopt.utils.compression import check_communication_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

#: Indices of param groups, stacks of their parameters, gradients of these ``[P]``, and the squares of their norms.
Joined = list[tuple[int, Stack, Tensor, Tensor]]

#: Steps between attempts where no backward has curvature, at most; a prime, so that each of a few kinds is met.
RETRY_EVERY = 7

#: How gradients come to be of which no curvature is known.
WITHOUT_BACKWARD = (
    "Gradients by torch.autograd.grad or torch.func bring none, a step inside of the backward (in a hook) comes before "
    "it, and a torch.utils.checkpoint of the whole model needs use_reentrant=False."
)
_ALONE = Alone()


class Overflow(CurvoptError):
    """A gradient is not finite."""


class CurvatureOptimizer(torch.optim.Optimizer):
    """Preconditions gradients by damped curvature, then takes the step of the torch optimizer it is mixed into.

    A concrete optimizer is ``class X(CurvatureOptimizer, torch.optim.Y)``. Its constructor says of what it consists:
    a `curvopt.optim.curvature.Quantity` that backwards compute, and a `curvopt.optim.solve.Solver`. Per parameter,
    ``state["curvature"]`` is a `curvopt.optim.state.ParameterCurvature`, beside what ``Y`` keeps.

    All curvature is kept per unit of weight of the loss, that is for a mean-reduced loss, and gradients are divided by
    the weight of theirs: so ``damping`` and ``rms_clip`` have one meaning at any batch size, reduction, number of
    accumulated backwards or loss scale.

    ``.grad`` is the preconditioned gradient only while the step of ``Y`` runs: clipping before it acts on raw ones, and
    logging after it sees them. ``weight_decay`` is decoupled (``p *= 1 - lr * weight_decay``), whatever ``Y`` does.

    Args:
        params: a model, parameters, named parameters or param groups.
        quantity: what is collected.
        solver: what uses it.
        options: ``ema`` and the damping (if the optimizer has one) of param groups, all other ones of the whole run.
        attached: for `attach`, where the optimizer is built of a model.
        **of_torch: for the constructor of ``Y``.
    """

    #: Options of the whole run, where an optimizer has them.
    rms_clip: float | None = None
    on_nonfinite: str = "raise"
    state_dtype: torch.dtype | None = None
    curvature_every: int
    inverse_every: int
    #: Which ranks train this model together (see `curvopt.distributed`): all, or those of a group; ``None`` for a
    #: process on its own. A group is not copied or saved with the optimizer.
    process_group: "ProcessGroup | Literal['world'] | None" = "world"
    _communication_dtype: torch.dtype | None = None
    #: Set by ``GradScaler.step`` while it calls `step`, if it is asked to.
    grad_scale: Any
    found_inf: Any
    #: Whether the caller's gradients are put back after the step.
    _restores_gradients = True

    def __init__(
        self,
        params: Any,
        quantity: Quantity,
        solver: Solver,
        options: Mapping[str, Any],
        attached: Attached | None = None,
        **of_torch: Any,
    ) -> None:
        given = attached or {}
        self._quantity, self._solver = quantity, solver
        self._group_defaults = {name: options[name] for name in OF_GROUPS if name in options}
        of_run = {name: value for name, value in options.items() if name not in self._group_defaults}
        check_options(of_run)
        for name, value in of_run.items():
            setattr(self, name, value)
        self._run_options = tuple(of_run)
        self._begin()
        check_attached(type(self).__name__, params, given)
        super().__init__(parameters_of(params, given.get("lossfunc")), **of_torch)
        self.defaults |= self._group_defaults | of_run | dict(quantity.options)
        if isinstance(params, nn.Module):
            self.attach(params, **given)

    def _begin(self) -> None:
        """With nothing collected and nothing said."""
        self._run = Run()
        self._curvature = Curvature(self, self._quantity, self._run)
        self._shards: Any = None
        self._stacks: dict[int, Stacks] = {}
        self._said: set[str] = set()
        self._checked: list[Any] = []  # dtypes and shapes that fit the state
        self._runs_closure = False
        self._measured: Callable[[], dict[str, Any]] = dict  # of the last step, once somebody asks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, before or during training; damping and ``ema`` may be set per group.

        Raises:
            TypeError: an option is no number, or is one of the whole optimizer.
            ValueError: an option is out of its range.
        """
        for name, value in (self._group_defaults | {RUN: None}).items():
            param_group.setdefault(name, value)
        of_run = (*self._run_options, *self._quantity.options)
        check_group_options(param_group, of_run, self.state_dtype)
        if 0 in [param_group.get(name) for name in DAMPINGS]:
            warnings.warn(
                f"{type(self).__name__} with damping=0: a step is as long as the curvature says, however little that "
                "knows of a direction. Take a small positive number unless the curvature is exact and full-batch.",
                CurvoptWarning,
                stacklevel=4,
            )
        super().add_param_group(param_group)
        for name in of_run:  # torch copies all of `defaults`
            self.param_groups[-1].pop(name, None)
        check_new_group(self, self._ranks)

    def _say(self, what: str, text: str) -> None:
        """Warn, unless that was said before."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"{type(self).__name__} {text}", CurvoptWarning, stacklevel=3)

    def _params(self) -> list[Tensor]:
        return self._curvature.params()

    def _names(self) -> dict[Tensor, str]:
        return parameter_names(self.param_groups)

    def _device(self) -> torch.device:
        """Where small numbers are exchanged and samples drawn."""
        return next((param.device for param in self._params()), torch.device("cpu"))

    # --- ranks --------------------------------------------------------------------------------------------------

    def _ranks(self) -> Alone:
        """The ranks that train together, as they are now; not to be asked for while a step has parameters it owns."""
        if not (dist.is_available() and dist.is_initialized()):
            return _ALONE
        if fsdp_states() or any(is_sharded(p) for group in self.param_groups for p in group["params"][:1]):
            from curvopt.optim.sharding.shards import shards_of

            self._shards = shards_of(self, self._shards)
            if self._shards is not None:
                return self._shards
        ranks = ranks_of(self.process_group, self._device())
        return _ALONE if ranks is None else Replicas(ranks, self.communication_dtype)

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """In which precision ranks send curvature; ``None``, the default, sends it as it is.

        Any other value sends one half of each symmetric matrix, which loses nothing. ``torch.bfloat16`` also rounds
        factors, diagonals and scales to its 8 bits, and eigenbases on their way to backward passes of sharded models.
        They are added up, averaged over steps and inverted in full precision; inverses and eigenbases of steps are sent
        in it.

        Raises:
            TypeError: when it is set to anything but a dtype.
            ValueError: when it is set to a dtype that is not floating-point, or has a smaller range than float32.
        """
        return self._communication_dtype

    @communication_dtype.setter
    def communication_dtype(self, dtype: torch.dtype | None) -> None:
        check_communication_dtype(dtype)
        self._communication_dtype = dtype

    # --- curvature ----------------------------------------------------------------------------------------------

    def attach(
        self,
        model: nn.Module | None = None,
        lossfunc: nn.Module | None = None,
        scaler: Any = None,
        *,
        gradient_scale: float | Callable[[], float] | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
        batch_axis: int | None = 0,
    ) -> None:
        """Collect curvature from now on in every ``loss.backward()`` that reaches this optimizer's parameters.

        So training loops of others (Lightning, transformers, accelerate) need no other change. Backwards inside of a
        ``backpack(...)`` with extensions count, too, and those that other attached optimizers see. Calls of
        ``torch.autograd.grad`` and backwards inside of an empty ``with backpack():`` are left alone. Several backwards
        between two steps (gradient accumulation) add up as their gradients do; what was collected goes with gradients
        that are reset. The optimizer is not kept alive by this; copies of it are attached, too.

        The model records its calls while an attached optimizer is due, and inside of ``backpack``; a model for which
        ``extend`` was called records always.

        No loss is refused: where a loss has no curvature (it is not convex, couples samples, has no second derivative,
        or is linear in a batch), the optimizer warns once and takes the empirical quantity for that batch, the second
        moments of the samples' gradients; ``coverage()`` and ``metrics()`` say so. Where it is not clear what a sample
        is, it warns and takes the batch as one; where that does not help, the curvature it has, or plain gradients.

        Args:
            model: is extended.
            lossfunc: is extended; not needed for the functional losses of PyTorch, or inside of the model.
            scaler: what scales the loss, anything with ``get_scale()``; later calls without one keep it. Not needed
                for a ``torch.amp.GradScaler`` whose ``step()`` is given this optimizer, unless ``unscale_()`` comes
                before.
            gradient_scale: by what the loop multiplies gradients after the backward (1 / n where it divides them by a
                number n), or a function that returns it; later calls without it keep it.
            loss_reduction: whether losses of no known kind are a ``"mean"`` over the samples or a ``"sum"``; later
                calls without it keep it. To begin with, they are what their last operation is: a sum of one number for
                each row is a sum, so is one of several that no constant divides again, and all else is a mean.
            batch_axis: axis of the model's inputs and outputs that counts the samples; 0, unless `extend` was told
                another one. ``None`` where rows are no samples, or would cost many times a gradient (nodes of a
                graph): the batch is one sample.

        Raises:
            CurvoptError: no parameter of this optimizer belongs to the model.
        """
        self._curvature.attach(model, lossfunc, scaler, gradient_scale, loss_reduction, batch_axis)
        attach(self)
        self._said.clear()

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> Any:
        """See `curvopt.core.record.Observer`."""
        return self._curvature.context_of_backward(parameters)

    def _is_due(self) -> bool:
        """See `curvopt.core.record.Observer`."""
        return self._curvature.is_due()

    def curvature(self, loss_scale: Any = None) -> None:
        """There was a context of this name.

        Raises:
            CurvoptError: always.
        """
        raise CurvoptError(
            f"{type(self).__name__}.curvature() is gone: all backwards have curvature when it is due, outside of "
            f"contexts. Build the optimizer of the model, {type(self).__name__}(model), or call attach(model) once."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the curvature that was collected with them."""
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.zero_grad, set_to_none)
        self._curvature.drop()
        super().zero_grad(set_to_none)

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    @without_autocast
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes gradients and returns the loss; called with gradients enabled. Where backwards accumulate
                it may be the last of them alone.

        Raises:
            CurvoptError: the optimizer is not attached to a model, a gradient is not finite or sparse, an option has
                left its range, or the parameters have another precision than before. Nothing has changed then, but the
                curvature collected for this step is dropped.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.step, closure)
        loss = None if closure is None else self._evaluate(closure)
        curvature, run, who = self._curvature, self._run, type(self).__name__
        collected, curvature.collected = curvature.collected, Collected()
        if self._overflows(collected):
            return loss
        grads = {p: p.grad for p in self._params() if p.grad is not None}
        ranks = self._ranks()
        renews = run.stale and run.step >= run.next_inverse  # for which ranks share the work
        if ranks.meet and (renews or curvature.is_due(grads.keys()) or not curvature.ranks_agree):
            collected = ranks.exchange(self, collected, run)
            curvature.ranks_agree = True
        if not grads:
            return loss
        check_schedules(who, vars(self), self.param_groups)
        collected.ages = curvature.ages() if collected.curvature else {}
        try:
            with ranks.owned(self, grads, collected) as owned, in_full_precision(self.state, self.state_dtype):
                accepted = self._advance(ranks, owned, collected)
                if self.state_dtype is not None:  # its memory is that of full precision
                    self._stacks.clear()
        except Overflow:
            if self.on_nonfinite == "raise":
                raise
            run.metrics["skipped"] = run.metrics.get("skipped", 0.0) + 1
            return loss
        if accepted is None:
            return loss
        if collected.refreshed:
            curvature.restart(ranks.refreshed(accepted), grads.keys(), self.curvature_every)
        elif collected.refused:  # tried again after an interval, as it may take long
            curvature.restart(set(), grads.keys(), RETRY_EVERY)
        elif not collected.curvature and ranks.have_curvature(self.state):
            self._tell_if_overdue(grads)
        curvature.tick(grads.keys())
        ranks.apply(self, grads)
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call the closure, and return its result."""
        before, self._runs_closure = _gradients(self._params()), True
        with torch.enable_grad():
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
        scaled = [own_part(param.grad) for param in self._params() if param.grad is not None]
        for device, grads in by_device(scaled).items():
            torch._foreach_div_(grads, whole_of(scale).to(device))  # pyright: ignore[reportPrivateImportUsage]
        collected.step_weight = collected.step_weight / whole_of(scale).to(collected.step_weight)
        return False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler.step`` is to hand over its scale, as the optimizer does not know it.

        Lightning asks in the closure of a step whether it may clip: no scaler works there.
        """
        return self._curvature.scaler is None and not self._runs_closure

    def _advance(
        self, ranks: Alone, grads: dict[Tensor, Tensor], collected: Collected
    ) -> dict[Tensor, list[Tensor]] | None:
        """Refresh the curvature and step.

        Returns:
            The curvature that was accepted; ``None`` if no step is taken, as the loss weighs nothing and there is none.
        """
        if self._is_asked_for_names(grads, collected):
            CurvatureOptimizer._move(self, ranks, grads, grads)
            for param in grads:
                curvature_of(self.state[param])
            return None
        who = type(self).__name__
        check_dense(who, grads, self._names)
        if not self._curvature.is_attached:
            raise CurvoptError(
                f"{who}.step(): the optimizer is attached to no model, so no backward computes curvature. Build it of "
                f"the model, {who}(model), or call optimizer.attach(model) once."
            )
        # new curvature changes the stacks
        joined = self._joined(grads) if have_curvature(self.state) and not collected.curvature else []
        accepted = self._accepted(ranks, grads, collected, joined)
        if accepted is None:
            return None
        if self._refresh(ranks, grads, collected, accepted) or not joined:
            joined = self._joined(grads)
        update = self._precondition(ranks, grads, joined)
        del joined  # of the size of the gradients
        decay_weights(self.param_groups, grads)
        self._move(ranks, grads, update)
        self._run.step += 1
        return accepted

    def _is_asked_for_names(self, grads: dict[Tensor, Tensor], collected: Collected) -> bool:
        """Whether this is the step of zero by which ``torch.distributed.checkpoint`` finds the names of a state."""
        rates = [group["lr"] for group in self.param_groups]
        if any(self.state.values()) or collected.curvature or any(float(rate) != 0 for rate in rates):
            return False
        return are_zero(grads)

    def _joined(self, grads: dict[Tensor, Tensor]) -> Joined:
        all_move, found = len(grads) == len(self._params()), []
        for i, group in enumerate(self.param_groups):
            params = group["params"] if all_move else [param for param in group["params"] if param in grads]
            for stack in self._stacks_of(params, i):
                flat = stack.join("grad", grads)
                found.append((i, stack, flat, flat.dot(flat)))
        return found

    def _stacks_of(self, params: Sequence[Tensor], group: int = 0) -> list[Stack]:
        """Parameters of a group whose curvature has one form, together."""
        return self._stacks.setdefault(group, Stacks(self._solver.field)).of(params, self.state)

    def _check_state(self, grads: Mapping[Tensor, Tensor] | None = None) -> None:
        """Refuse parameters of another precision or shape than their curvature or, before a step, their moments.

        Fused kernels of torch write beyond the memory of moments that are too small.

        Args:
            grads: of the step; ``None`` before a backward.

        Raises:
            CurvoptError: if there is one.
        """
        params = self._params()
        now = [self.state_dtype, *((param.dtype, param.shape) for param in params)]
        if now == self._checked:
            return
        all_fit = grads is not None
        for param, state in self.state.items():
            factors = state[CURVATURE].factors if CURVATURE in state else None
            kept = [(CURVATURE, factors[0], torch.promote_types(param.dtype, torch.float32))] if factors else []
            for name, value in state.items() if grads is not None else ():
                if isinstance(value, Tensor) and value.ndim and value.is_floating_point():
                    kept.append((name, value, (grads or {}).get(param, param).dtype))
            for name, tensor, usual in kept:
                if tensor.dtype not in (param.dtype, usual, self.state_dtype):
                    differs = (
                        f"in {tensor.dtype}, but the parameter is now of {param.dtype}; after a change of the model's "
                        "precision call optimizer.load_state_dict(optimizer.state_dict())"
                    )
                elif not is_sharded(param) and not (
                    fits(factors, param.shape) if factors and name == CURVATURE else tensor.shape == param.shape
                ):
                    differs = (
                        f"of another shape than that of the parameter, {list(param.shape)}; load the state of an equal "
                        "model, or `del optimizer.state[parameter]` where the parameter was resized"
                    )
                else:
                    continue
                all_fit = False
                if any(param is each for each in (params if grads is None else grads)):
                    raise CurvoptError(
                        f"{self._names()[param]}: {type(self).__name__} keeps its {name} {differs}. Parameters and "
                        "state are unchanged."
                    )
        if all_fit:
            self._checked = now

    def _accepted(
        self, ranks: Alone, grads: dict[Tensor, Tensor], collected: Collected, joined: Joined
    ) -> dict[Tensor, list[Tensor]] | None:
        """The mean curvature of the parameters for which it is finite, by parameter; ``None`` if there never was any.

        Raises:
            CurvoptError: if a gradient is not finite, a parameter changed its precision, or all curvature was not
                finite.
        """
        self._check_state(grads)
        who, params = type(self).__name__, list(grads)
        # not finite if the loss weighs nothing
        new = means_of(collected.curvature, collected.weight)
        owners = [param for param, tensors in new.items() for _ in tensors]
        tensors = [*grads.values(), *(tensor for tensors in new.values() for tensor in tensors)]
        weight = collected.step_weight
        if new:  # else its weight is no number of the device
            weight = weight.to(tensors[0].device)
            tensors.append(torch.where(weight > 0, weight, torch.nan))
        known_finite = not new and bool(joined) and all(isfinite(square.item()) for *_, square in joined)
        finite = [True] * len(tensors) if known_finite else all_finite(tensors)

        bad = [self._names()[param] for param, ok in zip(params, finite, strict=False) if not ok]
        rejected = {
            param for param, ok in zip(owners, finite[len(params) : len(params) + len(owners)], strict=True) if not ok
        }
        weightless = bool(new) and not finite[-1] and float(weight) == 0
        if new and not finite[-1]:
            rejected = set(new)
        known = have_curvature(self.state) or collected.refused or self._run.refused
        counts = torch.tensor([len(bad), len(new), len(rejected), weightless, known], dtype=torch.float64)
        all_bad, all_new, all_rejected, all_weightless, all_known = ranks.over_owners(counts).tolist()
        if all_rejected:  # what is rejected of some rows, is of all
            verdicts = ranks.over_pieces(new, [weight.new_tensor(float(param in rejected)) for param in new])
            rejected = {param for param, verdict in zip(new, verdicts, strict=True) if verdict > 0}
            all_rejected = float(ranks.over_owners(torch.tensor(float(len(rejected)))))
        collected.refreshed = all_new > all_rejected
        if all_bad:
            raise Overflow(
                f"gradient of {listed(bad) or 'parameters that other ranks own'} is not finite (inf or nan). "
                "Parameters and state are unchanged. Call zero_grad() and skip this batch, or lower lr, raise damping, "
                "or use torch.amp.GradScaler for half precision."
            )
        if weightless:
            logger.info("%s: the loss weighs nothing (were all targets ignored?)", who)
        for param in () if weightless else rejected:
            logger.warning("%s: new curvature is not finite and was dropped", self._names()[param])

        if not all_known and all_rejected == all_new:
            if not all_new:
                self._say(
                    "plain",
                    f"takes plain gradients until a backward has curvature, as none was seen. {WITHOUT_BACKWARD}",
                )
                collected.refused = True
            elif all_weightless and ranks.over_owners(torch.tensor(float(not are_zero(params)))) == 0:
                return None
            else:
                raise CurvoptError(f"{who}.step(): all curvature so far was not finite; skip this batch.")
        return {param: tensors for param, tensors in new.items() if param not in rejected}

    def _refresh(
        self,
        ranks: Alone,
        grads: dict[Tensor, Tensor],
        collected: Collected,
        accepted: dict[Tensor, list[Tensor]],
    ) -> bool:
        """Move new factors into the averages, and call ``_renew`` if that is due: then true."""
        run, curvature = self._run, self._curvature
        if collected.refreshed:
            run.stale, run.refused, run.variables = True, False, collected.variables
            # else the weight lacks a loss, and an earlier one is known
            if not (collected.partial and ranks.have_curvature(self.state)):
                run.step_weight = collected.step_weight * curvature.factor_of_gradients()
            curvature.average(ranks, accepted, collected, self._forget)
        elif collected.refused:
            run.refused = True
        new = unsolved(self._params(), self.state)
        outside = {p for p in ranks.outside(new) if p in grads and curvature_of(self.state[p]).factors is None}
        if outside:
            missing = listed([name for p, name in self._names().items() if p in outside])
            self._say(
                f"outside {missing}",
                f"takes the mean curvature of other parameters for {missing}, which are of no extended module. That "
                "is fine for parameters of your own; call attach(model) again where modules were added or replaced, "
                "attach(model, loss) for those of a loss.",
            )
        due = ranks.any(new) or (run.stale and run.step >= run.next_inverse)
        if due:
            self._renew(ranks)
            run.next_inverse = run.step + annealed_interval(run.step, self.inverse_every, self._quantity.growth)
            run.stale = False
        return due

    def _renew(self, ranks: Alone) -> None:
        """Prepare the solver by the averaged factors."""
        run = self._run
        run.mean_curvature, metrics = self._solver.renew(self.param_groups, self.state, self._names(), ranks)
        run.metrics |= metrics

    def _forget(self, param: Tensor) -> None:
        """Drop the curvature of a parameter."""
        self._solver.forget(self.state[param], param.shape)

    def _precondition(self, ranks: Alone, grads: dict[Tensor, Tensor], joined: Joined) -> dict[Tensor, Tensor]:
        """The preconditioned gradients, clipped; records the metrics."""
        run = self._run
        sums: list[Callable[[], Tensor]] = []
        solved: list[tuple[Stack, Tensor]] = []
        norms: list[Tensor] = []
        known = ranks.have_curvature(self.state)
        # without any curvature, one factor is for all, below
        bound = self.rms_clip * run.step_weight if self.rms_clip is not None and known else None
        means = self._solver.means([param for _, stack, *_ in joined for param in stack.params], self.state, ranks)
        for i, stack, grad, _ in joined:
            group = self.param_groups[i]
            update = self._solver.solve(stack, grad, group, self.state, run.mean_curvature, means)
            # 0 where masks hold a gradient at zero, else 1
            update *= (moves := torch.ne(grad, 0, out=stack.memory("scratch")))
            solved.append((stack, update))
            norms.append(torch.stack([stack.norms(update), stack.norms(moves)], 1))
        whole = ranks.over_pieces((param for stack, _ in solved for param in stack.params), norms, norms=True)
        for (i, stack, grad, gg), (_, update), here, of_all in zip(joined, solved, norms, whole, strict=True):
            rate, factors = self.param_groups[i]["lr"], stack.clip(update, of_all, bound)
            sums.append(partial(_sums, update.dot(grad), gg, rate**2, here, factors, stack.roots))
        # of the loss, not divided by its weight; so are the updates, below
        total = self._over_owners(ranks, sums or [lambda: torch.zeros(7, dtype=torch.float64, device=self._device())])
        weight, clip = run.step_weight.to(solved[0][1] if solved else total()), 1.0
        if not known:  # plain gradients have no natural length: they take that of the bound
            clip = rms_clip_factor((total()[5] / total()[6].clamp(min=1)).sqrt() / weight, self.rms_clip, inf)
        self._measured = partial(_measured, total, weight, clip, self.param_groups[0], run.mean_curvature)
        scale = clip / weight
        for device, updates in by_device([update for _, update in solved]).items():
            torch._foreach_mul_(updates, scale.to(device))  # pyright: ignore[reportPrivateImportUsage]
        return by_parameter(solved, grads)

    def _over_owners(self, ranks: Alone, sums: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
        """A function that adds up sums of stacks, over all ranks; called here where ranks meet in a step."""

        @cache
        def total() -> Tensor:
            found = [each() for each in sums]
            return ranks.over_owners(reduce(torch.add, [each.to(found[0]) for each in found]))

        if ranks.meet:
            total()
        return total

    def _move(self, ranks: Alone, grads: dict[Tensor, Tensor], update: dict[Tensor, Tensor]) -> None:
        """Run the step of the torch optimizer, without its weight decay, on ``update`` in place of the gradients."""
        # hooks of users run around our step already, and it is without gradients
        step = unwrap(super().step.__func__)  # type: ignore[attr-defined]
        decays = [group.get("weight_decay") for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = 0
            for param, value in update.items():  # in memory of the stack
                param.grad = value if self._restores_gradients else value.clone()
            states = [self.state[param] for param in update]
            with without_curvature(states), _fused(self.param_groups, update, states):
                step(self)
        finally:
            for param, grad in grads.items() if self._restores_gradients else ():
                param.grad = grad
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay

    def _tell_if_overdue(self, grads: dict[Tensor, Tensor]) -> None:
        """Say that steps go on with old curvature."""
        if self._curvature.is_overdue(self._params(), grads.keys(), self.curvature_every):
            self._say(
                "overdue",
                "takes steps with old curvature: its refresh is overdue, but no backward computed any. "
                + WITHOUT_BACKWARD,
            )

    # --- reports and checkpoints --------------------------------------------------------------------------------

    def coverage(self) -> dict[str, str]:
        """The curvature that preconditions each parameter: ``"kronecker"``, ``"dense"``, ``"diagonal"`` or ``"none"``.

        Parameters are called by name if the optimizer was given ``model.named_parameters()``, else ``group.index``; by
        name and group if names repeat. At first all are ``"none"``. A parameter that stays so is trained with the mean
        curvature of the others; its first step warns if it is of no extended module. ``"empirical kronecker"`` and so
        on: the loss had no curvature of the kind asked for.
        """
        names = self._names()
        return coverage(names, self.state, self._is_replaced) | self._ranks().kinds(names)

    def metrics(self) -> dict[str, float | Tensor]:
        """Numbers of the last step; tensors ``[]`` stay on the device until you read them.

        ``rms``: root mean square of all entries, as ``rms_clip`` counts them, after clipping. ``clip_factor``: norm of
        the preconditioned gradient over that before clipping, 1 if nothing is clipped, more without any curvature.
        ``step_norm``: ``‖lr u‖`` before momentum. ``grad_norm``, per unit of weight of the loss. ``cosine``: between
        gradient and preconditioned gradient. ``damping``: of the first group; parameters may have less, see
        ``relative_damping``. ``fallbacks``: matrices that needed more than the usual factorisation when last renewed.
        ``condition``: largest condition number of a damped factor (in the 1-norm) there, or of the rows of it that a
        rank owns. ``new_bases``: eigenbases computed when they were last checked. ``KFACAdamW`` has no damping and no
        clip; its ``step_norm`` and ``cosine`` are those of the whole step. ``skipped``: steps that
        ``on_nonfinite="skip"`` left out. ``empirical``: 1 where the loss had no curvature of the kind asked for.
        """
        self._run.metrics |= self._measured()
        return self._run.metrics | ({"empirical": 1.0} if self._is_replaced else {})

    @property
    def _is_replaced(self) -> bool:
        """Whether the empirical quantity took the place of the one that was asked for."""
        return bool(self._run.empirical) and not self._quantity.prefers_empirical

    def __repr__(self) -> str:
        """The options of the whole optimizer, then those of each param group."""
        of_run = {name: getattr(self, name) for name in self._run_options} | dict(self._quantity.options)
        return shown(type(self).__name__, of_run, self.param_groups)

    def _export(self) -> dict[str, Any]:
        self._run.metrics |= self._measured()
        return self._run.export(type(self).__name__) | self._ranks().export()

    def _import(self, exported: dict[str, Any]) -> None:
        self._ranks().load(type(self).__name__, exported, self.state)
        self._run.load(exported)
        self._curvature.ranks_agree, self._measured, self._checked = False, dict, []

    def state_dict(self) -> dict[str, Any]:
        """State of the torch optimizer plus all that a run needs to continue bit for bit."""
        with exporting(self, self._params(), self._export, self._ranks().saved):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()``, of a model in any precision; curvature is kept in at least single precision.

        Raises:
            CurvoptError: if it is the state of another optimizer, or of parameters of other shapes. Nothing has changed
                then.
            ValueError: if its averages forget too slowly for ``state_dtype``. Nothing has changed then.
        """
        kept = partial(self._ranks().loaded, type(self).__name__)
        check = partial(check_decays, state_dtype=self.state_dtype)
        with importing(self, self._names(), check, kept, self._import):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_quantity", "_solver", "_group_defaults", "_run_options", "_communication_dtype", *self._run_options)
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in kept},
            **({"process_group": None} if self.process_group is None else {}),
            "attached": (self._curvature.is_attached, self._curvature.loss_reduction),
            "curvature": self._export(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        exported, attached = state.pop("curvature", None), state.pop("attached", (False, None))
        with without_curvature(state["state"].get(p, {}) for group in state["param_groups"] for p in group["params"]):
            super().__setstate__(state)
        if exported is not None:  # unpickled or copied; load_state_dict() imports by itself
            self._begin()
            self._import(exported)
            self._curvature.is_attached, self._curvature.loss_reduction = attached
            if self._curvature.is_attached:
                attach(self)


def _sums(ug: Tensor, gg: Tensor, rate2: float | Tensor, norms: Tensor, factors: Tensor, roots: Tensor) -> Tensor:
    """The sums of a stack for metrics, ``[7]``.

    ``uᵀg``, ``gᵀg``, squares of ``lr u``, squares before and after the clip and by how they count, number of entries.
    """
    before, counts = norms.unbind(1)
    squares = torch.stack([before, before * factors, before * roots * factors, counts]).square().sum(1)
    return torch.cat([torch.stack([ug, gg, squares[1] * rate2]), squares])


def _measured(
    total: Callable[[], Tensor],
    weight: Tensor,
    clip: float | Tensor,
    group: Mapping[str, Any],
    mean_curvature: Tensor,
) -> dict[str, Any]:
    """The metrics of a step, by its `_sums`."""
    sums = total()
    # divided twice, because the square of the weight may leave the range of float32
    ug, gg, length, raw, uu, weighted = (sums[:6] / weight / weight).unbind()
    # rows of an embedding that no token asked for have no part in the mean
    return {
        "rms": clip * (weighted / sums[6].clamp(min=1)).sqrt(),
        "clip_factor": clip * (uu / raw.clamp(min=torch.finfo(raw.dtype).tiny)).sqrt(),
        "step_norm": clip * length.sqrt(),
        "grad_norm": gg.sqrt(),
        "cosine": cosine(ug, uu, gg),
        "damping": damping_of(group, mean_curvature),
    }


@contextmanager
def _fused(
    groups: Sequence[dict[str, Any]], update: Mapping[Tensor, Tensor], states: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Inside, SGD and AdamW take one call for all parameters on the CPU, unless ``foreach`` is set: that is faster.

    It goes through memory, so parameters, gradients and moments need one dtype and equal strides; and it begins
    momentum for all parameters of a group or for none.
    """
    begun = {"momentum_buffer" in state for state in states}
    kinds = {(p.is_cpu, p.dtype, new.dtype) for p, new in update.items()}
    alike = all(cpu and kept == given for cpu, kept, given in kinds) and all(map(Tensor.is_contiguous, update))
    plain = groups if alike and len(begun) < 2 else []
    chosen = [group for group in plain if group.get("foreach", False) is None and group.get("fused", False) is None]
    try:
        for group in chosen:
            group["fused"] = True
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def check_dense(who: str, grads: Mapping[Tensor, Tensor], named: Callable[[], Mapping[Tensor, str]]) -> None:
    """Refuse sparse gradients.

    Raises:
        CurvoptError: if there is one.
    """
    for param, grad in grads.items():
        if grad.layout != torch.strided:
            raise CurvoptError(
                f"{named()[param]}: {who} needs a dense gradient, got one with layout {grad.layout}; build the "
                "embedding with sparse=False."
            )


def all_finite(tensors: list[Tensor]) -> list[bool]:
    """Whether all entries of a tensor are finite, for each; one transfer for all."""
    if not tensors:
        return []
    device = tensors[0].device
    norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    finite = torch.stack([norm.to(device) for norm in norms]).isfinite().tolist()
    # a norm may overflow where no entry does
    return [
        ok or (tensor.numel() > 1 and bool(tensor.isfinite().all())) for ok, tensor in zip(finite, tensors, strict=True)
    ]


def _gradients(params: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """What tells whether a backward has changed a gradient."""
    return [None if (grad := param.grad) is None else (id(grad), grad._version) for param in params]
