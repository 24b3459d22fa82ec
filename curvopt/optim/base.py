"""What all curvature optimizers share: collecting factors, averaging them, and the guarded step."""

import logging
import sys
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from curvopt import backpack
from curvopt.core.context import attach, heard
from curvopt.core.jacobians import widened
from curvopt.core.uses import extended_name, outside_of_graphs, owned_parameters
from curvopt.distributed import Peers, peers_of, refuse_sharded
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.kroneckers import kfac_mat_prod, sizes_of
from curvopt.optim.closures import Closure, without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: What ``state`` holds per parameter beside the state of the torch optimizer, in its own dtype.
_STATE = ("factors", "ema_weight", "inverses", "bases", "scales", "scales_weight")
#: Levenberg-Marquardt: every so many steps the damping is multiplied by up to this, or its inverse.
ADAPT_EVERY = 5
ADAPT_FACTOR = (19 / 20) ** ADAPT_EVERY


def annealed_interval(step: int, every: int) -> int:
    """Steps until the next refresh: half of those taken so far, at least 1 and at most ``every``."""
    return max(1, min(every, step // 2))


def ema_update(average: list[Tensor], weight: float, new: Sequence[Tensor], decay: float) -> float:
    """Exponential moving average with bias correction, in place (Kingma & Ba 2015, section 3).

    Kept normalised: ``average = Σ_t decay^(T-t) new_t / Σ_t decay^(T-t)``. ``weight`` is ``(1 - decay)`` times that
    denominator, 0 before the first update; its new value is returned.
    """
    weight = decay * weight + (1 - decay)
    for old, value in zip(average, new, strict=True):
        old.lerp_(value, (1 - decay) / weight)
    return weight


def number(value: float) -> Tensor:
    """A number of a parameter's state, on the CPU: torch.distributed.checkpoint loads into tensors alone."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def kl_clip_factor(quadratic: Tensor, kl_clip: float | None) -> Tensor:
    """``ν = min(1, √(κ / Σ lr² uᵀg))`` bounds the KL change predicted for a step by ``κ`` (Ba et al. 2017, sec. 5)."""
    if kl_clip is None:
        return torch.ones_like(quadratic)
    quadratic = quadratic.nan_to_num(nan=inf, posinf=inf)  # beyond the range of its dtype: no step rather than nan
    return (kl_clip / quadratic.clamp(min=torch.finfo(quadratic.dtype).tiny)).sqrt().clamp(max=1)


def all_finite(tensors: list[Tensor]) -> list[bool]:
    """Whether all entries of a tensor are finite, for each; one transfer for all."""
    device = tensors[0].device
    norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    finite = torch.stack([norm.to(device) for norm in norms]).isfinite().tolist()
    # a norm may overflow where no entry does
    return [
        ok or (tensor.numel() > 1 and bool(tensor.isfinite().all())) for ok, tensor in zip(finite, tensors, strict=True)
    ]


def moments(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sums ``[3]`` of ``uᵀg``, ``uᵀu`` and ``gᵀg`` over pairs ``u, g`` of vectors."""
    joined: list[tuple[Tensor, Tensor]] = []
    for device, own in by_device(pairs).items():
        # calls cost more than copies there
        joined += own if device.type == "cpu" else [(torch.cat([u for u, _ in own]), torch.cat([g for _, g in own]))]
    dots = [dot for u, g in joined for dot in (u.dot(g), u.dot(u), g.dot(g))]
    return torch.stack([dot.to(dots[0]) for dot in dots]).view(-1, 3).sum(0)


def by_device(items: Iterable[T]) -> dict[torch.device, list[T]]:
    """Tensors, or tuples of them, sorted by the device of the (first) tensor."""
    found: dict[torch.device, list[T]] = {}
    for item in items:
        first: Any = item[0] if isinstance(item, tuple) else item
        found.setdefault(first.device, []).append(item)
    return found


def cosine(ug: Tensor, uu: Tensor, gg: Tensor) -> Tensor:
    """Cosine of the angle between two vectors, by their `moments`."""
    return ug / (uu.sqrt() * gg.sqrt()).clamp(min=torch.finfo(uu.dtype).tiny)


def check_new_group(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    """Refuse sharded and complex parameters; the param group that was added last is taken out again.

    Raises:
        CurvoptError: if there is one.
    """
    who = type(optimizer).__name__
    try:
        refuse_sharded((who, name, p) for p, name in names.items())
        for p, name in names.items():
            if p.is_complex():
                raise CurvoptError(f"{name}: {who} got a complex parameter; use two real ones.")
    except CurvoptError:
        optimizer.param_groups.pop()
        raise


def pop_field(param: Tensor, name: str) -> Any:
    """Take a quantity off a parameter; ``None`` if there is none."""
    return vars(param).pop(name, None)


@contextmanager
def without_curvature(states: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Inside, states are those of torch optimizers alone, which take one that is not empty for one of their own."""
    own = [(state, {name: state.pop(name) for name in _STATE if name in state}) for state in states]
    try:
        yield
    finally:
        for state, ours in own:
            state.update(ours)


def _are_same(these: list[tuple[Tensor, int]], those: list[tuple[Tensor, int]]) -> bool:
    """Whether tensors are the same ones, unchanged."""
    pairs = zip(these, those, strict=False)
    return len(these) == len(those) and all(this is that and now == then for (this, now), (that, then) in pairs)


def _is_renewed(state: dict[str, Any]) -> bool:
    """Whether a solver has made something of what a parameter has: of its factors, if there are any by now."""
    made = state.get("inverses", state.get("bases"))
    if made is None or "factors" not in state:
        return made is not None
    return bool(made) and made[0].ndim > 0


def check_forms(name: str | None, known: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Refuse to add curvature to what a parameter has if it comes in another form.

    Raises:
        CurvoptError: for other shapes or another dtype.
    """
    before, now = ([(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in each] for each in (known, new))
    if before != now:
        raise CurvoptError(
            f"{name or 'a parameter'}: its curvature is kept as {before}, but comes as {now}. If losses reach it by "
            "uses of different kinds (an embedding and a linear layer, say), compute them from one output, untie it, "
            "or use DiagonalNewton; if it is used otherwise than before (pruned, say), let its curvature begin anew by "
            "optimizer.state[p].clear(); if the state was loaded, build the optimizer with the same options, for "
            "parameters of the same dtype. Parameters and state are unchanged."
        )


def fits(factors: Sequence[Tensor], shape: Sequence[int]) -> bool:
    """Whether a factor list may be that of a parameter of some shape."""
    if not factors or (len(factors) > 1 and len(shape) < 2):
        return not factors
    pairs = list(zip(factors, sizes_of(factors, shape), strict=True))
    # blocks are padded
    return all(f.shape[-1] == d if f.ndim < 4 else 0 <= f.shape[-3] * f.shape[-1] - d < f.shape[-1] for f, d in pairs)


@dataclass
class Curvature:
    """Sums over backwards of what one parameter received.

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
    """What some backwards have brought: `Curvature` by parameter, and the weight of their losses.

    Attributes:
        curvature: by parameter.
        weight: of the losses that were differentiated.
        step_weight: the same, in units of the gradients that reach ``step()`` (without the scale of a ``GradScaler``).
        closure_weight: the part of ``step_weight`` that the closure of the step has brought.
        strangers: how many parameters of others received curvature where none of ours did; -1 if some did, or if there
            was no backward at all.
        variables: largest number of variables of a prediction, see `curvopt.core.derivatives.losses.LossCurvature`.
        zeros: the gradients after the last of the backwards and their versions, if they were all zero.
    """

    curvature: dict[Tensor, Curvature] = field(default_factory=dict)
    weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    step_weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    closure_weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    strangers: int = -1
    variables: int = 1
    zeros: list[tuple[Tensor, int]] = field(default_factory=list)

    def mean(self, forms: dict[int, Any], params: Sequence[Tensor], peers: Peers) -> "Collection":
        """The mean over the ranks, of which some have nothing for some parameters.

        Args:
            forms: shapes, dtype and index of the input's factor, by index of a parameter; equal on all ranks.
            params: the parameters.
            peers: the ranks.
        """
        device = params[0].device
        # of one dtype, whatever that of the losses: a rank may have none
        tensors = [w.to(device, torch.float64) for w in (self.weight, self.step_weight, self.closure_weight)]
        for i, (shapes, dtype, of_input) in forms.items():
            zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device=params[i].device) for shape in shapes]
            own = self.curvature.get(params[i], Curvature(zeros, of_input, torch.zeros((), device=params[i].device)))
            tensors += [*own.sums, own.weight.to(torch.float64)]
        weight, step_weight, closure_weight, *means = peers.mean(tensors)
        result = Collection({}, weight, step_weight, closure_weight, variables=self.variables)
        rest = iter(means)
        for i, (shapes, _, of_input) in forms.items():
            sums = [next(rest) for _ in shapes]
            result.curvature[params[i]] = Curvature(sums, of_input, next(rest))
        return result

    def add(self, other: "Collection") -> None:
        """Add what other backwards have brought."""
        self.strangers = max(self.strangers, other.strangers)
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


class Overflow(CurvoptError):
    """A gradient is not finite."""


class CurvatureOptimizer(torch.optim.Optimizer, ABC):
    """Preconditions gradients by damped curvature, then takes the step of the torch optimizer it is mixed into.

    A concrete optimizer is ``class X(<what it collects>, <how it solves>, torch.optim.Y)`` of classes such as
    `curvopt.optim.kronecker.Kronecker` and `curvopt.optim.solvers.FactoredInverse`, which implement the four methods
    below. It calls ``_configure`` before the constructor of ``Y``. Per parameter, ``state`` holds ``factors`` (moving
    average of a factor list, see `curvopt.kroneckers`), ``ema_weight``, and what the solver makes of them.

    All curvature is kept per unit of weight of the loss, that is for a mean-reduced loss, and gradients are divided by
    the weight of theirs: so ``damping`` and ``kl_clip`` mean the same at any batch size, reduction, number of
    accumulated backwards or loss scale.

    The gradients seen by the caller do not change: ``.grad`` is exchanged for the preconditioned gradient only while
    the step of ``Y`` runs. So clipping or ``GradScaler.unscale_`` before ``step()`` act on raw gradients, and
    logging after it sees them. ``weight_decay`` is decoupled (``p *= 1 - lr * weight_decay``), whatever ``Y`` does.
    """

    #: Whether the caller's gradients are put back after the step.
    _restores_gradients = True
    #: Which ranks train this model together (see `curvopt.distributed`): all, or those of a group; ``None`` for a
    #: process on its own. A group is not copied or saved with the optimizer.
    process_group: "ProcessGroup | Literal['world'] | None" = "world"

    # --- what a concrete optimizer provides ---------------------------------------------------------------------

    @abstractmethod
    def _extensions(self) -> list[Any]:
        """The extensions that ``curvature()`` activates."""

    @abstractmethod
    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        """Remove the extensions' fields from a parameter.

        Returns:
            The factor list (then anything else that adds up as losses do), and the index of the input's factor;
            ``None`` if there is none.
        """

    @abstractmethod
    def _renew(self) -> None:
        """Make of the averaged factors of all parameters what ``_solve`` needs; sets ``metrics``."""

    def _solve(self, param: Tensor, grad: Tensor, damping: float) -> Tensor:
        """The preconditioned gradient ``[P]``. Whoever preconditions otherwise (``_precondition``) needs none."""
        raise NotImplementedError(f"{type(self).__name__} has neither _solve nor a _precondition of its own")

    def _configure(
        self,
        *,
        damping: float,
        ema: float,
        kl_clip: float | None,
        curvature_every: int,
        inverse_every: int,
        adaptive_damping: bool = False,
    ) -> None:
        """Check and store the options; before the constructor of the torch optimizer, which adds the param groups."""
        if kl_clip is not None and not kl_clip > 0:
            raise ValueError(f"kl_clip must be positive or None, got {kl_clip}")
        for name, every in (("curvature_every", curvature_every), ("inverse_every", inverse_every)):
            if every < 1:
                raise ValueError(f"{name} counts steps and must be at least 1, got {every}")
        self.kl_clip = kl_clip
        self.curvature_every = curvature_every
        self.inverse_every = inverse_every
        self.adaptive_damping = adaptive_damping
        self._group_defaults: dict[str, Any] = {"damping": damping, "ema": ema, "last_lr": inf}
        self._progress: dict[str, Any] = {
            "step": 0,
            "next_refresh": 0,
            "next_inverse": 0,
            "stale": False,
            "step_weight": torch.ones(()),
            "closure_weight": torch.zeros(()),
            "variables": 1,
            "mean_curvature": torch.zeros(()),
            "kl": torch.zeros(()),  # of the last step, before clipping
        }
        self._fresh: Collection | None = None  # of the open curvature()
        self._arrived: dict[Tensor, tuple[list[Tensor], int | None]] = {}  # of the running backward
        self._pending = Collection()  # of those closed since the last step
        self._met = False  # whether the ranks have found each other in the same state
        self._seed: int | None = None  # of Monte-Carlo samples
        self._draws = 0
        self._scaler: Any = None
        self._attached = False
        self._knows_scale = True
        self._metrics: dict[str, float | Tensor] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, before or during training; ``damping`` and ``ema`` may be set per group."""
        for name, value in self._group_defaults.items():
            param_group.setdefault(name, value)
        if not param_group["damping"] >= 0:
            raise ValueError(f"damping must be at least 0, got {param_group['damping']}")
        if not 0 <= param_group["ema"] < 1:
            raise ValueError(f"ema must be in [0, 1), got {param_group['ema']}")
        super().add_param_group(param_group)
        check_new_group(self, self._names())
        self._progress["next_refresh"] = self._progress["step"]  # new parameters do not wait for the interval

    # --- collecting curvature -----------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, lossfunc: torch.nn.Module | None = None, scaler: Any = None) -> None:
        """Collect curvature from now on in every ``loss.backward()`` that reaches this optimizer's parameters.

        So training loops that one does not write oneself (Lightning, transformers, accelerate) need no other change:
        without ``curvature()`` around them, backwards are run in it as soon as it is due. So are those inside of a
        ``backpack(...)`` with extensions, and those that other attached optimizers see, too. Calls of
        ``torch.autograd.grad`` and backwards inside of an empty ``with backpack():`` are left alone. The optimizer is
        not kept alive by this; copies of it are attached, too.

        Args:
            model: is extended. If it is compiled by ``torch.compile``, attach before its first forward pass.
            lossfunc: is extended; not needed for the functional losses of PyTorch, or inside of the model.
            scaler: the ``torch.amp.GradScaler`` in use, if any (anything with ``get_scale()``); then
                ``curvature()`` without a ``loss_scale`` asks it, too. Later calls without one keep it; copies of the
                optimizer are not told of it.

        Raises:
            CurvoptError: no parameter of this optimizer belongs to the model.
        """
        who = f"{type(self).__name__}.attach()"
        refuse_sharded((who, name, p) for name, p in model.named_parameters())
        mine = set(self._params())
        if mine.isdisjoint(model.parameters()):
            raise CurvoptError(
                f"{type(self).__name__}.attach(): no parameter of this optimizer belongs to this {type(model).__name__}"
                ". Attach after everything that replaces parameters (moving to a device, wrapping), and build the "
                "optimizer from model.parameters()."
            )
        attach(self, model, lossfunc)
        self._scaler, self._attached = self._scaler if scaler is None else scaler, True

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> Any:
        """For a backward that is about to reach ``parameters()``: the context to run it in, or ``None``."""
        if self._fresh is not None or not self._due() or parameters().isdisjoint(self._params()):
            return None
        return self.curvature()

    @contextmanager
    def curvature(self, loss_scale: float | Tensor | None = None) -> Iterator[None]:
        """Run the backward pass in here: refreshes the curvature on steps that are due, costs nothing on the others.

        Several backwards between two steps (gradient accumulation) add up as their gradients do; run all of them in
        here. If the block raises, what it collected is dropped; so is what was collected before gradients were reset.

        Args:
            loss_scale: how many times larger the loss is than the gradients that reach ``step()`` say:
                ``scaler.get_scale()`` for ``torch.amp.GradScaler``, which divides them in between. By default that
                of the scaler given to ``attach()``, else 1.

        Raises:
            CurvoptError: no parameter of this optimizer received curvature, or they have another precision than before.
        """
        if self._fresh is not None or not self._due():
            yield
            return
        self._check_precision(self._params())
        self._knows_scale = loss_scale is not None or self._scaler is not None
        scale = loss_scale if loss_scale is not None else 1.0 if self._scaler is None else self._scaler.get_scale()
        self._fresh, self._strangers = Collection(), 0
        context = backpack(*self._extensions(), extension_hook=self._collect)
        alone = self._peers() is None
        context.skips_empty, context.counted = not alone, set(self._params())
        context.began = self._forget_discarded
        context.ended = self._note_zeros
        context.finished = lambda weight, variables: self._absorb(weight, variables, scale)
        try:
            with context:
                yield
            if not self._fresh.curvature:
                if alone:
                    raise CurvoptError(self._nothing_received())
                self._fresh.strangers = self._strangers  # other ranks may have some: step() will see
            self._pending.add(self._fresh)
        finally:
            self._fresh = None
            self._arrived.clear()

    def _forget_discarded(self) -> None:
        """A backward begins: drop what was collected with gradients that were discarded since."""
        last = self._fresh if self._fresh is not None and self._fresh.curvature else self._pending
        zeros = self._zeros() if last.curvature else None
        if all(param.grad is None for param in self._params()) or (zeros and not _are_same(zeros, last.zeros)):
            self._pending, self._fresh = Collection(), Collection()

    def _note_zeros(self) -> None:
        """A backward has ended, and all gradients are there."""
        if self._fresh is not None and self._fresh.curvature:
            self._fresh.zeros = self._zeros()

    def _zeros(self) -> list[tuple[Tensor, int]]:
        """All gradients and their versions, if none has an entry but zeros: usually the first one does."""
        grads = [param.grad for param in self._params() if param.grad is not None]
        if any(grad.layout != torch.strided or grad.any() for grad in grads):
            return []
        return [(grad, grad._version) for grad in grads]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """No. ``GradScaler.step`` asks, and so is noticed: by a scaler that is not known, curvature is too large."""
        if not self._knows_scale and isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
            warnings.warn(
                f"a GradScaler steps {type(self).__name__}, which takes the scale of the loss for curvature: updates "
                "will be far too small. Tell it: optimizer.attach(model, scaler=scaler), or "
                "optimizer.curvature(loss_scale=scaler.get_scale()).",
                CurvoptWarning,
                stacklevel=3,
            )
        return False

    def _due(self) -> bool:
        due = self._progress["step"] >= self._progress["next_refresh"]
        # a state that was emptied has to be filled again
        return heard() and (due or not self._knows_curvature())

    def _knows_curvature(self) -> bool:
        return any("factors" in state for state in self.state.values())

    @torch.no_grad()
    def _collect(self, module: torch.nn.Module) -> None:
        """Extension hook: take the fields off a module's own parameters."""
        mine = set(self._params())
        for param in owned_parameters(module).values():
            taken = self._take(param)
            if taken is None:
                continue
            if param in mine:
                # bfloat16 or half factors would lose the average and break the inverse
                tensors = [widened(t.detach()) for t in taken[0]]
                self._arrived[param] = (tensors, taken[1])
            else:
                self._strangers += 1

    @torch.no_grad()
    def _absorb(self, weight: Tensor | float, variables: int, loss_scale: float | Tensor) -> None:
        """A backward has ended: weigh what arrived."""
        arrived, self._arrived = self._arrived, {}
        if self._fresh is None or not arrived:
            return
        weight = widened(torch.as_tensor(weight, device=next(iter(arrived)).device))
        collected = Collection({}, weight, weight / loss_scale, variables=variables)
        for param, (tensors, of_input) in arrived.items():
            if of_input is not None:
                tensors[of_input] = tensors[of_input] * weight.to(tensors[of_input])
            collected.curvature[param] = Curvature(tensors, of_input, weight)
        self._fresh.add(collected)

    def _nothing_received(self) -> str:
        if self._strangers:
            return (
                f"{type(self).__name__}.curvature(): {self._strangers} parameters received curvature, but none of this "
                "optimizer. Were parameters of the model replaced after it was built? Build it anew from "
                "model.parameters(); and extend(model) that is trained."
            )
        return (
            f"{type(self).__name__}.curvature(): no parameter of this optimizer received curvature. Run "
            "loss.backward() inside the block, with model = extend(model) and lossfunc = extend(lossfunc) "
            "called before the forward pass."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the curvature that was collected with them."""
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.zero_grad, set_to_none)
        self._pending = Collection()
        if self._fresh is not None:
            self._fresh = Collection()
        super().zero_grad(set_to_none)

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    @without_autocast
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes gradients and returns the loss; called with gradients enabled, inside ``curvature()``.
                With ``adaptive_damping`` it is called once more every fifth step, with the same random numbers. Where
                backwards accumulate it may be the last of them alone.

        Raises:
            CurvoptError: a gradient is not finite or sparse, an option has left its range, the parameters have another
                precision than before, no curvature was ever computed, or ``adaptive_damping`` has no closure. Nothing
                has changed then, but the curvature collected for this step is dropped.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.step, closure)
        loss, objective = None, None
        if closure is None and self.adaptive_damping:
            raise CurvoptError(
                f"{type(self).__name__}.step(): adaptive_damping compares losses before and after a step, so it needs "
                "step(closure) with a closure that computes gradients and returns the loss."
            )
        if closure is not None:
            if self.adaptive_damping and self._progress["step"] % ADAPT_EVERY == 0:
                objective = Closure(closure, self._params())
                closure = objective.first
            earlier, weight = self._pending, self._pending.step_weight
            # an attached one is told by itself, also of a backward inside of a context of the closure's own
            with torch.enable_grad(), nullcontext() if self._attached else self.curvature():
                loss = closure()
            own = self._pending.step_weight
            # the rest is of accumulated backwards before it, unless their gradients were reset
            self._pending.closure_weight = own - weight.to(own) if self._pending is earlier else own

        pending, self._pending = self._pending, Collection()
        peers = self._peers()
        if peers is not None and (self._due() or not self._met):
            pending = self._exchange(pending, peers)
        grads = {p: p.grad for p in self._params() if p.grad is not None}
        if not grads:
            return loss
        accepted = self._check(grads, pending)
        if not accepted and not self._knows_curvature():  # the loss weighs nothing
            return loss
        self._refresh(grads, pending, accepted)
        before = {param: param.clone() for param in grads} if objective is not None else {}
        update = self._precondition(grads)
        self._decay(grads)
        self._take_torch_step(grads, update)
        self._progress["step"] += 1
        if objective is not None:
            self._adapt_damping(objective, grads, before)
        return loss

    def _exchange(self, pending: Collection, peers: Peers) -> Collection:
        """The mean over the ranks of what they collected; whatever is wrong on one of them is raised on all."""
        params, progress = self._params(), self._progress
        refuse_sharded((type(self).__name__, name, p) for p, name in self._names().items())
        indices = {param: i for i, param in enumerate(params)}
        forms = {
            indices[param]: ([list(s.shape) for s in c.sums], str(c.sums[0].dtype).removeprefix("torch."), c.of_input)
            for param, c in sorted(pending.curvature.items(), key=lambda item: indices[item[0]])
        }
        has_gradients = any(param.grad is not None for param in params)
        forms, (strangers, seed, draws, variables) = peers.union(
            forms,
            list(self._names().values()),
            [pending.strangers, -1 if self._seed is None else self._seed, self._draws, pending.variables],
            {name: progress[name] for name in ("step", "next_refresh", "next_inverse")}
            | {"damping": [float(group["damping"]) for group in self.param_groups]}
            | {"parameters": [list(param.shape) for param in params], "gradients": has_gradients},
        )
        self._met = True
        self._seed, self._draws = (None if seed < 0 else seed), draws
        self._strangers, pending.variables = strangers, variables
        if strangers > 0 or (strangers == 0 and not forms):
            raise CurvoptError(self._nothing_received())
        return pending.mean(forms, params, peers) if forms else pending

    def _check(self, grads: dict[Tensor, Tensor], pending: Collection) -> dict[Tensor, list[Tensor]]:
        """Refuse a step that cannot be taken; return the mean curvature of the parameters for which it is finite."""
        names = self._names()
        self._check_options()
        sparse = [param for param, grad in grads.items() if grad.layout != torch.strided]
        if sparse:
            raise CurvoptError(
                f"{names[sparse[0]]}: {type(self).__name__} needs a dense gradient, got one with layout "
                f"{sparse[0].grad.layout}; build the embedding with sparse=False."  # type: ignore[union-attr]
            )
        self._check_precision(grads)
        params = list(grads)
        # not finite if the loss weighs nothing
        new = {param: curvature.mean(pending.weight) for param, curvature in pending.curvature.items()}
        for param, tensors in new.items():
            known = self.state[param].get("factors", [])
            check_forms(names[param], known, tensors[: len(known)])
        owners = [param for param, tensors in new.items() for _ in tensors]
        tensors = [*grads.values(), *(tensor for tensors in new.values() for tensor in tensors)]
        if new:  # else its weight is no number of the device
            weight = pending.step_weight.to(params[0].device)
            tensors.append(torch.where(weight > 0, weight, torch.nan))
        finite = all_finite(tensors)

        bad = [param for param, ok in zip(params, finite, strict=False) if not ok]
        if bad:
            raise Overflow(
                f"gradient of {', '.join(names[param] for param in bad[:5])}"
                f"{f' and {len(bad) - 5} more' if len(bad) > 5 else ''} is not finite (inf or nan). Parameters "
                "and state are unchanged. Call zero_grad() and skip this batch, or lower lr, raise damping, or use "
                "torch.amp.GradScaler for half precision."
            )
        rejected = {
            param for param, ok in zip(owners, finite[len(params) : len(params) + len(owners)], strict=True) if not ok
        }
        weightless = bool(new) and not finite[-1] and float(weight) == 0
        if new and not finite[-1]:
            rejected = set(new)
        if weightless:
            logger.info("%s: the loss weighs nothing (were all targets ignored?)", type(self).__name__)
        for param in () if weightless else rejected:
            logger.warning("%s: new curvature is not finite and was dropped", names[param])

        if not self._knows_curvature() and len(rejected) == len(new) and not (weightless and self._zeros()):
            reason = "all curvature so far was not finite" if rejected else "no curvature was computed so far"
            raise CurvoptError(
                f"{type(self).__name__}.step(): {reason}. Wrap the backward pass: `with optimizer.curvature(): "
                "loss.backward()`, with the model and the loss function extended by extend(...); or "
                "`optimizer.attach(model, lossfunc)` once. A torch.utils.checkpoint of the whole model needs "
                "use_reentrant=False."
            )
        return {param: tensors for param, tensors in new.items() if param not in rejected}

    def _check_precision(self, params: Iterable[Tensor]) -> None:
        """Refuse parameters that have another precision than their curvature."""
        for param in params:
            kept = self.state[param].get("factors") if param in self.state else None
            if kept and kept[0].dtype != (now := torch.promote_types(param.dtype, torch.float32)):
                raise CurvoptError(
                    f"{self._names()[param]}: {type(self).__name__} keeps its curvature in {kept[0].dtype}, but the "
                    f"parameter has {now} by now; after a change of the model's precision call "
                    "optimizer.load_state_dict(optimizer.state_dict()). Parameters and state are unchanged."
                )

    def _check_options(self) -> None:
        """Refuse what was set after the constructor had looked; comparisons with nan are false."""
        options = [("kl_clip", self.kl_clip, self.kl_clip is None or self.kl_clip > 0, "positive or None")]
        for i, group in enumerate(self.param_groups):
            options += [
                (f"damping of param group {i}", group["damping"], group["damping"] >= 0, "at least 0"),
                (f"ema of param group {i}", group["ema"], 0 <= group["ema"] < 1, "in [0, 1)"),
            ]
        for name, value, valid, range_ in options:
            if not valid:
                raise CurvoptError(
                    f"{type(self).__name__}.step(): {name} is {value}, but must be {range_}; look at what changes it "
                    "(a schedule?). Parameters and state are unchanged."
                )

    def _refresh(self, grads: dict[Tensor, Tensor], pending: Collection, accepted: dict[Tensor, list[Tensor]]) -> None:
        """Move new factors into the averages, and renew what is made of them if it is due."""
        progress = self._progress
        if accepted:
            progress["next_refresh"] = progress["step"] + annealed_interval(progress["step"], self.curvature_every)
            progress["stale"] = True
            progress |= {name: getattr(pending, name) for name in ("step_weight", "closure_weight", "variables")}
        for group in self.param_groups:
            for param in group["params"]:
                if param in accepted:
                    self._average(self.state[param], accepted[param], group["ema"])
        unknown = [p for p in self._params() if not _is_renewed(self.state[p])]
        strangers = [p for p in unknown if p in grads and "factors" not in self.state[p] and extended_name(p) is None]
        if strangers:
            names = [name for p, name in self._names().items() if p in set(strangers)]
            warnings.warn(
                f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}: of no extended "
                f"module, so {type(self).__name__} takes the mean curvature of other parameters for theirs. Where "
                "modules were added or replaced, call optimizer.attach(model) (or extend(model)) again.",
                CurvoptWarning,
                stacklevel=5,
            )
        if unknown or (progress["stale"] and progress["step"] >= progress["next_inverse"]):
            self._renew()
            progress["next_inverse"] = progress["step"] + annealed_interval(progress["step"], self.inverse_every)
            progress["stale"] = False

    def _average(self, state: dict[str, Any], new: list[Tensor], ema: float) -> None:
        """Move a parameter's new factors into their average."""
        if "factors" in state:
            state["ema_weight"] = number(ema_update(state["factors"], float(state["ema_weight"]), new, ema))
        else:
            state["factors"] = [factor.clone() for factor in new]
            state["ema_weight"] = number(1 - ema)

    def _precondition(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The preconditioned gradients, scaled by the KL clip; records the metrics."""
        updates: dict[Tensor, Tensor] = {}
        sums = []
        for group in self.param_groups:
            lr, pairs = group["lr"], []
            for param in group["params"]:
                if param in grads:
                    grad = widened(grads[param].reshape(-1))
                    update = self._solve(param, grad, group["damping"])
                    updates[param] = update = update.clone() if update is grad else update
                    pairs.append((update, grad))
            if pairs:
                total = moments(pairs)
                sums.append(torch.cat([total, total[:2] * (lr * lr)]))
        weight = self._progress["step_weight"].to(sums[0])
        # divided once all is summed, as is what is linear in the gradients, below
        total = torch.stack([each.to(sums[0]) for each in sums]).sum(0)
        ug, uu, gg, quadratic, length = total / weight / weight  # whose square may leave the range of float32
        quadratic = self._kl(quadratic, updates, weight)
        clip = kl_clip_factor(quadratic, self.kl_clip)
        self._shorten_momentum()
        self._progress["kl"] = quadratic
        self._metrics |= {
            "kl": clip.square() * quadratic,
            "kl_clip_factor": clip,
            "step_norm": clip * length.sqrt(),
            "grad_norm": gg.sqrt(),
            "cosine": cosine(ug, uu, gg),
            "damping": float(self.param_groups[0]["damping"]),
        }
        scale = clip / weight
        for device, own in by_device(updates.values()).items():
            torch._foreach_mul_(own, scale.to(device))  # pyright: ignore[reportPrivateImportUsage]
        # like the gradient, which may be kept in another dtype than the parameter
        return {param: update.to(grads[param].dtype).reshape(param.shape) for param, update in updates.items()}

    def _kl(self, quadratic: Tensor, updates: dict[Tensor, Tensor], weight: Tensor) -> Tensor:
        """What the KL clip bounds: the change that the averaged curvature predicts, per variable of a prediction.

        Args:
            quadratic: ``lr² uᵀg``.
            updates: ``u`` by parameter, ``[P]``, still times ``weight``.
            weight: of the loss.
        """
        return quadratic / self._progress["variables"]

    def _shorten_momentum(self) -> None:
        """Where a learning rate has risen, clip what momentum keeps as the last step would be clipped at this rate.

        It was clipped for the rate of its time. Now it would lead further by as much as the rate has risen, and a
        warm-up beyond the bound.
        """
        last = self._progress["kl"]
        for group in self.param_groups:
            lr, last_lr = float(group["lr"]), group.get("last_lr", inf)
            group["last_lr"] = lr
            if self.kl_clip is None or lr <= last_lr:
                continue
            now = last * (lr / last_lr) ** 2 if last_lr > 0 else torch.full_like(last, inf)
            factor = kl_clip_factor(now, self.kl_clip) / kl_clip_factor(last, self.kl_clip)
            kept = (self.state[param].get("momentum_buffer") for param in group["params"])
            for device, buffers in by_device(buffer for buffer in kept if buffer is not None).items():
                torch._foreach_mul_(buffers, factor.to(device))  # pyright: ignore[reportPrivateImportUsage]

    def _decay(self, grads: dict[Tensor, Tensor]) -> None:
        """Decoupled weight decay of the parameters that take a step."""
        for group in self.param_groups:
            decayed = [param for param in group["params"] if param in grads]
            if group.get("weight_decay", 0) != 0 and decayed:
                factor = 1 - group["lr"] * group["weight_decay"]
                torch._foreach_mul_(decayed, factor)  # pyright: ignore[reportPrivateImportUsage]

    def _take_torch_step(self, grads: dict[Tensor, Tensor], update: dict[Tensor, Tensor]) -> None:
        """Run the step of the torch optimizer, without its weight decay, on ``update`` in place of the gradients."""
        torch_step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(torch_step, "hooked", False):  # step hooks of users run around our step already
            torch_step = torch_step.__wrapped__
        decays = [group.get("weight_decay") for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = 0
            for param, value in update.items():
                param.grad = value
            with without_curvature(self.state[param] for param in update):
                torch_step(self)
        finally:
            if self._restores_gradients:
                for param, grad in grads.items():
                    param.grad = grad
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay

    def _adapt_damping(self, objective: Closure, grads: dict[Tensor, Tensor], before: dict[Tensor, Tensor]) -> None:
        """Levenberg-Marquardt's rule (Martens & Grosse 2015, section 6.5), by the same batch's loss after the step.

        The model's prediction ``gᵀδ + ½ δᵀ(F + λ I)δ`` is that of the averaged factors, for the whole step ``δ``. Where
        momentum led uphill in the model it predicts no decrease, and so says nothing of itself: then damping rises if
        the loss rose, as steps that long lead out of control, and stays if it did not. Of accumulated backwards the
        closure may bring the last alone: both are per unit of weight. Nothing is done where its weight is not known.
        """
        weight = float(self._progress["closure_weight"])
        if not weight > 0:
            return
        terms = []
        for group in self.param_groups:
            for param in group["params"]:
                if param in grads:
                    grad = grads[param].reshape(-1) * (-1 if group.get("maximize") else 1)
                    delta = widened((param - before[param]).reshape(-1))
                    factors = self.state[param].get("factors") or [self._progress["mean_curvature"].to(delta)]
                    sizes = sizes_of(factors, param.shape) if factors[0].ndim else None
                    curved = kfac_mat_prod(factors, sizes)(delta.to(factors[0].dtype)) + group["damping"] * delta
                    terms.append(delta.dot(grad.to(delta) / self._progress["step_weight"].to(delta) + curved / 2))
        predicted = float(torch.stack([term.to(terms[0]) for term in terms]).sum())
        sign = -1 if self.param_groups[0].get("maximize") else 1
        change, peers = objective.again() - objective.start, self._peers()
        if peers is not None:
            change = float(peers.mean([torch.tensor(change, device=peers.device)])[0])
        if abs(change) <= (noise := objective.eps * abs(objective.start)) and abs(predicted) * weight <= noise:
            return  # rounding errors
        actual = sign * change / weight
        actual = actual if isfinite(actual) else inf
        ratio = actual / predicted if predicted < 0 else nan
        factor = 1 / ADAPT_FACTOR if ratio < 1 / 4 or actual > 0 else ADAPT_FACTOR if ratio > 3 / 4 else 1.0
        curvature = self._progress["mean_curvature"]
        least = torch.finfo(curvature.dtype).eps * float(curvature)  # what less does is lost in rounding
        for group in self.param_groups:
            group["damping"] = max(group["damping"] * factor, min(group["damping"], least))
        self._metrics["reduction_ratio"] = ratio

    # --- what users ask -----------------------------------------------------------------------------------------

    def coverage(self) -> dict[str, str]:
        """What preconditions each parameter: ``"kronecker"``, ``"dense"``, ``"diagonal"`` or ``"none"``.

        Parameters are called by name if the optimizer was given ``model.named_parameters()``, else ``group.index``;
        by name and group if groups of several modules have the same names. Before the first step all are ``"none"``:
        they are known once curvature was computed. A parameter that stays so is trained as if it had the mean curvature
        of the others; if it belongs to no extended module, its first step warns of that.
        """
        kinds = {}
        for param, name in self._names().items():
            factors = self.state[param].get("factors", []) if param in self.state else []
            single = {0: "none", 1: "diagonal"}.get(factors[0].ndim if factors else 0, "dense")
            kinds[name] = "kronecker" if len(factors) > 1 else single
        return kinds

    def metrics(self) -> dict[str, float | Tensor]:
        """Numbers of the last step; tensors ``[]`` stay on the device until you read them.

        ``kl``: what ``kl_clip`` bounds, after clipping; unless the optimizer says otherwise, ``lr² uᵀg`` per variable
        of a prediction. ``kl_clip_factor``: 1 if not clipped.
        ``step_norm``: ``‖lr u‖`` before momentum. ``grad_norm``, per unit of weight of the loss. ``cosine``: between
        gradient and preconditioned gradient. ``damping``: of the first group. ``fallbacks``: matrices that needed more
        than the usual factorisation when it was last done. ``condition``: largest condition number of a damped factor
        (in the 1-norm) then, where factors are inverted. ``new_bases``: factors whose eigenbasis was computed when
        these were last looked at, where they are worked in. ``reduction_ratio``: last one of ``adaptive_damping``,
        nan if no decrease was predicted. Of ``KFACAdamW``, which has no damping and no clip, ``step_norm`` and
        ``cosine`` are those of the whole step.
        """
        return dict(self._metrics)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _peers(self) -> Peers | None:
        """The other ranks, if any."""
        return peers_of(self.process_group, self._device())

    def _device(self) -> torch.device:
        """Where small numbers are exchanged and samples drawn."""
        return next((param.device for param in self._params()), torch.device("cpu"))

    def _names(self) -> dict[Tensor, str]:
        names: dict[Tensor, tuple[str, int]] = {}
        for i, group in enumerate(self.param_groups):
            given = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
            names.update(zip(group["params"], ((name, i) for name in given), strict=True))
        times = Counter(name for name, _ in names.values())  # groups of modules have names of their own
        return {p: name if times[name] == 1 else f"{name} (group {i})" for p, (name, i) in names.items()}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _sampler(self) -> torch.Generator:
        """A generator for the Monte-Carlo samples of one ``curvature()``, which leaves the global one alone.

        It follows from a seed, the number of those before it and the rank: the checkpoint of any rank serves all.
        """
        if self._seed is None:
            self._seed = torch.initial_seed() % 2**62
        peers = self._peers()
        key = f"{self._seed} {self._draws} {0 if peers is None else peers.rank}"
        self._draws += 1
        digest = blake2b(key.encode(), digest_size=7).digest()
        return torch.Generator(self._device()).manual_seed(int.from_bytes(digest))

    def _export(self) -> dict[str, Any]:
        # some are measured only now and then: whoever logs them finds them after a resumption, too
        metrics = {name: float(value) for name, value in self._metrics.items()}
        own = {"optimizer": type(self).__name__, "sampler": (self._seed, self._draws), "metrics": metrics}
        return {**self._progress, **own}

    def _import(self, exported: dict[str, Any]) -> None:
        own = ("optimizer", "sampler", "metrics")
        self._progress = {name: exported[name] for name in exported if name not in own}
        for name, value in {"closure_weight": exported["step_weight"], "kl": torch.zeros(())}.items():
            self._progress.setdefault(name, value)  # of older versions
        self._seed, self._draws = exported["sampler"]
        self._metrics = dict(exported.get("metrics", {}))
        self._met = False

    def state_dict(self) -> dict[str, Any]:
        """State of the torch optimizer plus all that a run needs to continue bit for bit."""
        # a hook before those of users, which see all of it
        handle = self.register_state_dict_post_hook(lambda _, state: {**state, "curvature": self._export()}, True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, of a model in whatever precision; curvature is kept in at least single.

        Raises:
            CurvoptError: if it is the state of another optimizer, or of parameters of other shapes. Nothing has changed
                then.
        """
        ours: list[dict[str, Any]] = []
        curvature: dict[str, Any] = {}

        def take_ours(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            who = f"{type(self).__name__}.load_state_dict()"
            if "curvature" not in loaded:
                raise CurvoptError(f'{who}: no "curvature" entry, so this is the state of another optimizer.')
            saved = loaded["curvature"].get("optimizer", type(self).__name__)
            if saved not in (kind.__name__ for kind in type(self).__mro__):  # a subclass may go on with its state
                raise CurvoptError(
                    f"{who}: this is the state of another optimizer, {saved}; build that one. Nothing has changed."
                )
            curvature.update(loaded["curvature"])
            states = dict(loaded["state"])
            for index in (index for group in loaded["param_groups"] for index in group["params"]):
                state = states.get(index, {})
                ours.append({name: state[name] for name in _STATE if name in state})
                if index in states:  # torch would cast ours to the dtype of the parameter
                    states[index] = {name: state[name] for name in state if name not in _STATE}
            for (param, name), state in zip(self._names().items(), ours, strict=False):
                if not fits(state.get("factors", []), param.shape):
                    raise CurvoptError(
                        f"{who}: {name} has shape {list(param.shape)}, but curvature of another one was saved "
                        f"({[list(factor.shape) for factor in state['factors']]}); load the state of the same model, "
                        "whose parameters come in the same order. Nothing has changed."
                    )
            return {**loaded, "state": states}

        def put_back(_: Any) -> None:
            for param, state in zip(self._params(), ours, strict=True):
                like = widened(param.new_empty(0))
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:
                        value = value.to(like)
                    elif isinstance(value, list):
                        value = [tensor.to(like) for tensor in value]
                    self.state[param][name] = value
            self._import(curvature)

        # after the hooks of users, which may make another state of it, and before those that see what is loaded
        handles = (
            self.register_load_state_dict_pre_hook(take_ours),
            self.register_load_state_dict_post_hook(put_back, True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = ("kl_clip", "curvature_every", "inverse_every", "adaptive_damping", "_group_defaults", "_options")
        own += ("_attached",)
        return {
            **super().__getstate__(),
            **{name: self.__dict__[name] for name in own if name in self.__dict__},
            **({"process_group": None} if self.process_group is None else {}),
            "curvature": self._export(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        exported = state.pop("curvature", None)
        with without_curvature(state["state"].get(p, {}) for group in state["param_groups"] for p in group["params"]):
            super().__setstate__(state)
        if exported is not None:  # unpickled or copied; load_state_dict() imports by itself
            self._fresh, self._arrived, self._pending = None, {}, Collection()
            self._scaler, self._knows_scale = None, True
            self._import(exported)
            if self._attached:
                attach(self)
