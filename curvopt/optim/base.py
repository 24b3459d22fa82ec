"""What all curvature optimizers share: collecting factors, averaging them, inverting them, and the guarded step."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvopt import backpack
from curvopt.core.uses import owned_parameters
from curvopt.errors import CurvoptError
from curvopt.kroneckers import damped_inverses, kfac_mat_prod, mean_diagonal, pi_damping

logger = logging.getLogger(__name__)

_STATE = ("factors", "ema_weight", "inverses")


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


def kl_clip_factor(quadratic: Tensor, kl_clip: float | None) -> Tensor:
    """``ν = min(1, √(κ / Σ lr² uᵀg))`` bounds the KL change predicted for a step by ``κ`` (Ba et al. 2017, sec. 5)."""
    if kl_clip is None:
        return torch.ones_like(quadratic)
    return (kl_clip / quadratic.clamp(min=torch.finfo(quadratic.dtype).tiny)).sqrt().clamp(max=1)


def pop_field(param: Tensor, field: str) -> Any:
    """Take a quantity off a parameter; ``None`` if there is none."""
    value = getattr(param, field, None)
    if value is not None:
        delattr(param, field)
    return value


class CurvatureOptimizer(torch.optim.Optimizer):
    """Preconditions gradients by damped curvature, then takes the step of the torch optimizer it is mixed into.

    A concrete optimizer is ``class X(CurvatureOptimizer, torch.optim.Y)``. It calls ``_configure`` before the
    constructor of ``Y`` and says which quantity it needs (``_extension``) and how to take it from a parameter
    (``_take``). Per parameter, ``state`` holds ``factors`` (moving average of a factor list, see
    ``curvopt.kroneckers``), ``ema_weight`` and ``inverses`` (the damped inverses that the next steps multiply with).

    The gradients seen by the caller do not change: ``.grad`` is exchanged for the preconditioned gradient only while
    the step of ``Y`` runs. So clipping or ``GradScaler.unscale_`` before ``step()`` act on raw gradients, and
    logging after it sees them. ``weight_decay`` is decoupled (``p *= 1 - lr * weight_decay``), whatever ``Y`` does.
    """

    # --- what a concrete optimizer provides ---------------------------------------------------------------------

    def _extension(self) -> Any:
        """The extension that ``curvature()`` activates."""
        raise NotImplementedError

    def _take(self, param: Tensor) -> list[Tensor] | None:
        """Remove the extension's field from ``param`` and return it as a factor list; ``None`` if there is none."""
        raise NotImplementedError

    def _configure(
        self,
        *,
        damping: float,
        ema: float,
        kl_clip: float | None,
        curvature_every: int,
        inverse_every: int,
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
        self._group_defaults: dict[str, Any] = {"damping": damping, "ema": ema}
        self._progress: dict[str, Any] = {"step": 0, "next_refresh": 0, "next_inverse": 0, "stale": False}
        self._fresh: dict[Tensor, tuple[list[Tensor], int]] | None = None  # of the open curvature()
        self._pending: dict[Tensor, tuple[list[Tensor], int]] = {}  # of those closed since the last step
        self._generator: torch.Generator | None = None
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
        self._progress["next_refresh"] = self._progress["step"]  # new parameters do not wait for the interval

    # --- collecting curvature -----------------------------------------------------------------------------------

    @contextmanager
    def curvature(self, loss_scale: float | Tensor = 1.0) -> Iterator[None]:
        """Run the backward pass in here: refreshes the curvature on steps that are due, costs nothing on the others.

        Several backwards between two steps (gradient accumulation) add up as their gradients do: the curvature is that
        of the sum of the losses, with input factors averaged over (equally large) micro-batches. If the block raises,
        what it collected is dropped; so is what was collected before a ``zero_grad()``.

        Damping is measured against the curvature of the loss that is differentiated, so with a mean-reduced loss
        it means the same at any batch size, and for micro-batches whose losses are divided by their number.

        Args:
            loss_scale: how many times the intended loss is differentiated, if its gradients do not reach ``step()``
                that much larger: ``scaler.get_scale()`` for ``torch.amp.GradScaler``.

        Raises:
            CurvoptError: no parameter of this optimizer received curvature.
        """
        if self._fresh is not None or self._progress["step"] < self._progress["next_refresh"]:
            yield
            return
        self._fresh, self._seen = {}, False
        self._loss_scale = loss_scale
        try:
            with backpack(self._extension(), extension_hook=self._collect):
                yield
            if not self._seen:
                raise CurvoptError(
                    f"{type(self).__name__}.curvature(): no parameter of this optimizer received curvature. Run "
                    "loss.backward() inside the block, with model = extend(model) and lossfunc = extend(lossfunc) "
                    "called before the forward pass."
                )
            for param, (factors, count) in self._fresh.items():
                self._accumulate(self._pending, param, factors, count)
        finally:
            self._fresh = None

    @torch.no_grad()
    def _collect(self, module: torch.nn.Module) -> None:
        """Extension hook: move the fields of a module's own parameters to the open ``curvature()``."""
        mine = {param for group in self.param_groups for param in group["params"]}
        for param in owned_parameters(module).values():
            factors = self._take(param)
            if factors is not None and param in mine and self._fresh is not None:
                self._seen = True
                # bfloat16 or half factors would lose the average and break the inverse
                factors = [f.detach().to(torch.promote_types(f.dtype, torch.float32)) for f in factors]
                factors[0] = factors[0] / self._loss_scale  # see _refresh: what counts is the product
                self._accumulate(self._fresh, param, factors, 1)

    @staticmethod
    def _accumulate(
        store: dict[Tensor, tuple[list[Tensor], int]], param: Tensor, factors: list[Tensor], count: int
    ) -> None:
        """Add sums of factors over ``count`` backwards to those in ``store``."""
        if param in store:
            old, former = store[param]
            factors, count = [a + b for a, b in zip(old, factors, strict=True)], former + count
        store[param] = (factors, count)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the curvature that was collected with them."""
        self._pending.clear()
        if self._fresh is not None:
            self._fresh.clear()
        super().zero_grad(set_to_none)

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes gradients and returns the loss; called with gradients enabled, inside ``curvature()``.

        Raises:
            CurvoptError: a gradient is not finite or sparse, or no curvature was ever computed. Nothing has changed
                then, but the curvature collected for this step is dropped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.curvature():
                loss = closure()

        pending, self._pending = self._pending, {}
        grads = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        if not grads:
            return loss
        rejected = self._check(grads, pending)
        self._refresh({param: value for param, value in pending.items() if param not in rejected})
        step = self._precondition(grads)
        self._take_torch_step(grads, step)
        self._progress["step"] += 1
        return loss

    def _check(self, grads: dict[Tensor, Tensor], pending: dict[Tensor, tuple[list[Tensor], int]]) -> set[Tensor]:
        """Refuse a step that cannot be taken; return the parameters whose new factors are not finite."""
        sparse = [param for param, grad in grads.items() if grad.layout != torch.strided]
        if sparse:
            raise CurvoptError(
                f"{self._names()[sparse[0]]}: {type(self).__name__} needs a dense gradient, got one with layout "
                f"{sparse[0].grad.layout}; build the embedding with sparse=False."  # type: ignore[union-attr]
            )
        params = list(grads)
        owners = [param for param, (factors, _) in pending.items() for _ in factors]
        tensors = list(grads.values()) + [factor for factors, _ in pending.values() for factor in factors]
        # the largest magnitude is finite just where all entries are, and cannot overflow; one transfer for all
        peaks = [tensor.norm(float("inf")) if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]
        device = peaks[0].device
        finite = torch.stack([peak.isfinite().to(device, non_blocking=True) for peak in peaks]).tolist()

        bad = [param for param, ok in zip(params, finite, strict=False) if not ok]
        if bad:
            names = self._names()
            raise CurvoptError(
                f"gradient of {', '.join(names[param] for param in bad[:5])}"
                f"{f' and {len(bad) - 5} more' if len(bad) > 5 else ''} is not finite (inf or nan). Parameters "
                "and state are unchanged. Call zero_grad() and skip this batch, or lower lr, raise damping, or use "
                "torch.amp.GradScaler for half precision."
            )
        rejected = {param for param, ok in zip(owners, finite[len(params) :], strict=True) if not ok}
        for param in rejected:
            logger.warning("%s: new curvature is not finite and was dropped", self._names()[param])

        known = any("factors" in state for state in self.state.values())
        if not known and all(param in rejected for param in pending):
            reason = "all curvature so far was not finite" if rejected else "no curvature was computed so far"
            raise CurvoptError(
                f"{type(self).__name__}.step(): {reason}. Wrap the backward pass: `with optimizer.curvature(): "
                "loss.backward()`, with the model and the loss function extended by extend(...)."
            )
        return rejected

    def _refresh(self, pending: dict[Tensor, tuple[list[Tensor], int]]) -> None:
        """Move new factors into the averages, and renew the inverses if they are due."""
        progress = self._progress
        if pending:
            progress["next_refresh"] = progress["step"] + annealed_interval(progress["step"], self.curvature_every)
            progress["stale"] = True
        for group in self.param_groups:
            for param in group["params"]:
                if param not in pending:
                    continue
                # Curvature adds up over backwards, inputs are averaged. It need not be known which factor is which (a
                # transposed layer has its input factor first): scaling one factor by s and the other by 1/s changes
                # neither their product nor, with π, the damped one.
                (first, *rest), count = pending[param]
                factors = [first, *(factor / count for factor in rest)]
                state = self.state[param]
                if "factors" in state:
                    state["ema_weight"] = ema_update(state["factors"], state["ema_weight"], factors, group["ema"])
                else:
                    state["factors"] = [factor.clone() for factor in factors]
                    state["ema_weight"] = 1 - group["ema"]
        missing = any("inverses" not in self.state[p] for group in self.param_groups for p in group["params"])
        if missing or (progress["stale"] and progress["step"] >= progress["next_inverse"]):
            self._invert()
            progress["next_inverse"] = progress["step"] + annealed_interval(progress["step"], self.inverse_every)
            progress["stale"] = False

    def _invert(self) -> None:
        """Compute ``inverses`` for all parameters, together."""
        names = self._names()
        factors, shifts, stale, labels = [], [], [], []
        traces, numel = [], 0
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "factors" not in state:
                    continue
                own, former = state["factors"], state.get("inverses", [])
                factors += own
                shifts += pi_damping(own, group["damping"])
                stale += former if len(former) == len(own) and former[0].ndim else [None] * len(own)
                labels += [f"{names[param]} factor {i}" for i in range(len(own))]
                means = [mean_diagonal(factor) for factor in own]
                traces.append(prod(means[1:], start=means[0]).mean() * param.numel())
                numel += param.numel()
        inverses, failures = damped_inverses(factors, shifts, stale, labels)
        self._metrics["fallbacks"] = float(failures)

        results = iter(inverses)
        # a parameter that no factor covers is treated as if it had the mean curvature of the others
        curvature = torch.stack([trace.to(traces[0]) for trace in traces]).sum() / numel
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "factors" in state:
                    state["inverses"] = [next(results) for _ in state["factors"]]
                else:
                    tiny = torch.finfo(curvature.dtype).tiny
                    scale = (curvature + group["damping"]).clamp(min=tiny).reciprocal()
                    state["inverses"] = [scale.to(param.device)]

    def _precondition(self, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The preconditioned gradients, scaled by the KL clip; records the metrics."""
        step, dots = {}, []
        for group in self.param_groups:
            lr = group["lr"]
            for param in group["params"]:
                if param not in grads:
                    continue
                inverses = self.state[param]["inverses"]
                grad = grads[param].reshape(-1).to(inverses[0].dtype)
                update = kfac_mat_prod(inverses)(grad)
                dot = torch.stack([update.dot(grad), update.dot(update), grad.dot(grad)])
                dots.append(torch.cat([dot, dot[:2] * (lr * lr)]))
                step[param] = update
        device, dtype = dots[0].device, dots[0].dtype
        ug, uu, gg, quadratic, length = torch.stack([dot.to(device, dtype) for dot in dots]).sum(0)
        clip = kl_clip_factor(quadratic, self.kl_clip)
        self._metrics |= {
            "kl": clip.square() * quadratic,
            "kl_clip_factor": clip,
            "step_norm": clip * length.sqrt(),
            "grad_norm": gg.sqrt(),
            "cosine": ug / (uu.sqrt() * gg.sqrt()).clamp(min=torch.finfo(dtype).tiny),
            "damping": float(self.param_groups[0]["damping"]),
        }
        return {
            param: (update * clip.to(update.device, update.dtype)).to(param.dtype).reshape(param.shape)
            for param, update in step.items()
        }

    def _take_torch_step(self, grads: dict[Tensor, Tensor], step: dict[Tensor, Tensor]) -> None:
        """Decay the weights and run the step of the torch optimizer on ``step`` in place of the gradients."""
        decays = [group["weight_decay"] for group in self.param_groups]
        torch_step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(torch_step, "hooked", False):  # step hooks of users run around our step already
            torch_step = torch_step.__wrapped__
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                decayed = [param for param in group["params"] if param in grads]
                if decay != 0 and decayed:
                    torch._foreach_mul_(decayed, 1 - group["lr"] * decay)  # pyright: ignore[reportPrivateImportUsage]
                group["weight_decay"] = 0
            for param, update in step.items():
                param.grad = update
            torch_step(self)
        finally:
            for param, grad in grads.items():
                param.grad = grad
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    # --- what users ask -----------------------------------------------------------------------------------------

    def coverage(self) -> dict[str, str]:
        """What preconditions each parameter: ``"kronecker"``, ``"dense"``, ``"diagonal"`` or ``"none"``.

        Parameters are called by name if the optimizer was given ``model.named_parameters()``, else
        ``group.index``. Before the first step all are ``"none"``: they are known once curvature was computed.
        """
        kinds = {}
        for param, name in self._names().items():
            factors = self.state[param].get("factors", []) if param in self.state else []
            single = {0: "none", 1: "diagonal"}.get(factors[0].ndim if factors else 0, "dense")
            kinds[name] = "kronecker" if len(factors) > 1 else single
        return kinds

    def metrics(self) -> dict[str, float | Tensor]:
        """Numbers of the last step; tensors ``[]`` stay on the device until you read them.

        ``kl``: ``lr² uᵀg`` after clipping, what ``kl_clip`` bounds. ``kl_clip_factor``: 1 if not clipped.
        ``step_norm``: ``‖lr u‖`` before momentum. ``grad_norm``. ``cosine``: between gradient and preconditioned
        gradient. ``damping``: of the first group. ``fallbacks``: matrices that needed more than a Cholesky
        factorisation when the inverses were last computed.
        """
        return dict(self._metrics)

    def _names(self) -> dict[Tensor, str]:
        names = {}
        for i, group in enumerate(self.param_groups):
            given = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
            names.update(zip(group["params"], given, strict=True))
        return names

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _sampler(self) -> torch.Generator:
        """Own generator of Monte-Carlo samples: leaves the global one alone and goes into the checkpoint."""
        if self._generator is None:
            device = self.param_groups[0]["params"][0].device
            self._generator = torch.Generator(device).manual_seed(torch.initial_seed())
        return self._generator

    def _export(self) -> dict[str, Any]:
        sampler = None if self._generator is None else self._generator.get_state()
        return {**self._progress, "sampler": sampler}

    def _import(self, exported: dict[str, Any]) -> None:
        self._progress = {name: exported[name] for name in self._progress}
        self._generator = None
        if exported["sampler"] is not None:
            try:
                self._sampler().set_state(exported["sampler"].cpu())
            except RuntimeError:  # saved on another type of device
                logger.warning("the state of the sampler is of another device type; samples will differ")
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """State of the torch optimizer plus all that a run needs to continue bit for bit."""
        return {**super().state_dict(), "curvature": self._export()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; factors and inverses keep their own dtype."""
        if "curvature" not in state_dict:
            raise CurvoptError(
                f'{type(self).__name__}.load_state_dict(): no "curvature" entry, so this is the state of another '
                "optimizer."
            )
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            for name in _STATE:
                value = state_dict["state"].get(index, {}).get(name)
                if isinstance(value, list):  # torch has cast them to the dtype of the parameter
                    self.state[param][name] = [tensor.to(param.device) for tensor in value]
        self._import(state_dict["curvature"])

    def __getstate__(self) -> dict[str, Any]:
        own = ("kl_clip", "curvature_every", "inverse_every", "_group_defaults", "_options")
        return {
            **super().__getstate__(),
            **{name: self.__dict__[name] for name in own if name in self.__dict__},
            "curvature": self._export(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        exported = state.pop("curvature", None)
        super().__setstate__(state)
        if exported is not None:  # unpickled or copied; load_state_dict() imports by itself
            self._fresh, self._pending, self._metrics = None, {}, {}
            self._generator = None
            self._progress = {name: exported[name] for name in exported if name != "sampler"}
            self._import(exported)
