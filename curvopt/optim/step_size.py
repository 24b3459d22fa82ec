"""How long a step may be: the KL clip, momentum under a rising rate, and damping that adapts."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvopt.core.jacobians.sums import widened
from curvopt.distributed import Ranks
from curvopt.kroneckers import kfac_mat_prod, sizes_of
from curvopt.optim.closures import Closure

T = TypeVar("T")

#: Levenberg-Marquardt: once in so many steps the damping is multiplied by this factor, its inverse, or one.
ADAPT_EVERY = 5
ADAPT_FACTOR = (19 / 20) ** ADAPT_EVERY


def damping_of(group: Mapping[str, Any], mean_curvature: Tensor) -> float | Tensor:
    """The damping λ of a param group: its own, or a multiple of the mean curvature (1 where there is none at all)."""
    if group["damping"] is not None:
        return group["damping"]
    return torch.where(mean_curvature > 0, group["relative_damping"] * mean_curvature, 1.0)


def kl_clip_factor(quadratic: Tensor, kl_clip: float | None) -> Tensor:
    """``ν = min(1, √(κ / Σ lr² uᵀg))`` bounds the KL change predicted for a step by ``κ`` (Ba et al. 2017, sec. 5)."""
    if kl_clip is None:
        return torch.ones_like(quadratic)
    quadratic = quadratic.nan_to_num(nan=inf, posinf=inf)  # beyond the range of its dtype: no step rather than nan
    return (kl_clip / quadratic.clamp(min=torch.finfo(quadratic.dtype).tiny)).sqrt().clamp(max=1)


def clip_is_tight(progress: dict[str, Any]) -> bool:
    """Whether the KL clip has shortened all of the last 100 steps or more by half; asked now and then."""
    if progress["step"] < progress["looked"] + 100:
        return False
    largest = float(progress["clip"])
    progress |= {"looked": progress["step"], "clip": torch.zeros_like(progress["clip"])}
    return largest < 0.5


def moments(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sums ``[3]`` of ``uᵀg``, ``uᵀu`` and ``gᵀg`` over pairs ``u, g`` of vectors."""
    joined: list[tuple[Tensor, Tensor]] = []
    for device, own in by_device(pairs).items():
        # calls cost more than copies there
        joined += own if device.type == "cpu" else [(torch.cat([u for u, _ in own]), torch.cat([g for _, g in own]))]
    dots = [dot for u, g in joined for dot in (u.dot(g), u.dot(u), g.dot(g))]
    return torch.stack([dot.to(dots[0]) for dot in dots]).view(-1, 3).sum(0)


def cosine(ug: Tensor, uu: Tensor, gg: Tensor) -> Tensor:
    """Cosine of the angle between two vectors, by their `moments`."""
    return ug / (uu.sqrt() * gg.sqrt()).clamp(min=torch.finfo(uu.dtype).tiny)


def by_device(items: Iterable[T]) -> dict[torch.device, list[T]]:
    """Tensors, or tuples of them, sorted by the device of the (first) tensor."""
    found: dict[torch.device, list[T]] = {}
    for item in items:
        first: Any = item[0] if isinstance(item, tuple) else item
        found.setdefault(first.device, []).append(item)
    return found


def shorten_momentum(
    groups: Sequence[dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    progress: dict[str, Any],
    kl_clip: float | None,
) -> None:
    """Where a learning rate has risen, clip the momentum as the last step would have been clipped at this rate.

    The momentum was clipped for the old rate. At the new one its step is longer by the ratio of the two, and a warm-up
    would leave the bound.
    """
    last_lrs, last_kl = progress["last_lrs"], progress["kl"]
    progress["last_lrs"] = [float(group["lr"]) for group in groups]
    last_lrs = [*last_lrs, *[inf] * (len(groups) - len(last_lrs))]  # of groups that are new
    for group, lr, last_lr in zip(groups, progress["last_lrs"], last_lrs, strict=True):
        if kl_clip is None or lr <= last_lr:
            continue
        now = last_kl * (lr / last_lr) ** 2 if last_lr > 0 else torch.full_like(last_kl, inf)
        factor = kl_clip_factor(now, kl_clip) / kl_clip_factor(last_kl, kl_clip)
        kept = (states[param].get("momentum_buffer") for param in group["params"])
        for device, buffers in by_device(buffer for buffer in kept if buffer is not None).items():
            torch._foreach_mul_(buffers, factor.to(device))  # pyright: ignore[reportPrivateImportUsage]


def adapt_damping(
    groups: Sequence[dict[str, Any]],
    progress: Mapping[str, Any],
    predicted: float,
    objective: Closure,
    ranks: Ranks | None,
) -> float | None:
    """Levenberg-Marquardt's rule (Martens & Grosse 2015, section 6.5), by the loss of the batch after the step.

    Where momentum went uphill in the model, the model predicts no decrease and its ratio says nothing. Then damping
    rises if the loss rose, because steps of that length diverge, and stays if it did not. Of accumulated backwards the
    closure may compute the last alone: both changes are per unit of weight. Nothing is done where its weight is not
    known.

    Args:
        groups: param groups, whose damping is changed.
        progress: of the optimizer.
        predicted: see `predicted_change`.
        objective: the closure, as a function of the parameters.
        ranks: those that train together.

    Returns:
        The change of the loss over the predicted one, nan if no decrease was predicted; ``None`` if the damping stays
        because nothing can be said.
    """
    weight = float(progress["closure_weight"])
    if not weight > 0:
        return None
    sign = -1 if groups[0].get("maximize") else 1
    start, change = objective.start, objective.again() - objective.start
    if ranks is not None:
        (means,) = ranks.mean([torch.tensor([start, change], dtype=torch.float64, device=ranks.device)])
        start, change = means.tolist()
    if abs(change) <= (noise := objective.eps * abs(start)) and abs(predicted) * weight <= noise:
        return None  # rounding errors
    actual = sign * change / weight
    actual = actual if isfinite(actual) else inf
    ratio = actual / predicted if predicted < 0 else nan
    factor = 1 / ADAPT_FACTOR if ratio < 1 / 4 or actual > 0 else ADAPT_FACTOR if ratio > 3 / 4 else 1.0
    curvature = progress["mean_curvature"]
    least = torch.finfo(curvature.dtype).eps  # the effect of less is lost in rounding
    for group in groups:
        name, unit = ("relative_damping", 1.0) if group["damping"] is None else ("damping", float(curvature))
        group[name] = max(group[name] * factor, min(group[name], least * unit))
    return ratio


def predicted_change(
    groups: Sequence[dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    progress: Mapping[str, Any],
    changes: Mapping[Tensor, Tensor],
    grads: Mapping[Tensor, Tensor],
) -> Tensor:
    """``gᵀδ + ½ δᵀ(F + λ I)δ`` by the averaged factors F, ``[]``.

    Args:
        groups: param groups.
        states: of the optimizer, by parameter.
        progress: of the optimizer.
        changes: δ of the whole step, by parameter.
        grads: gradients before the step of these parameters.
    """
    terms = [torch.zeros((), dtype=torch.float64)]
    for group in groups:
        damping = damping_of(group, progress["mean_curvature"])
        for param in group["params"]:
            if param in changes:
                grad = grads[param].reshape(-1) * (-1 if group.get("maximize") else 1)
                delta = widened(changes[param].reshape(-1))
                factors = states[param].get("factors") or [progress["mean_curvature"].to(delta)]
                sizes = sizes_of(factors, param.shape) if factors[0].ndim else None
                curved = kfac_mat_prod(factors, sizes)(delta.to(factors[0].dtype)) + damping * delta
                terms.append(delta.dot(grad.to(delta) / progress["step_weight"].to(delta) + curved / 2))
    return torch.stack([term.to(terms[-1]) for term in terms]).sum()
