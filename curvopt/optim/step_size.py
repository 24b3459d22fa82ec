"""How long a step may be: the bound on its root mean square, and damping that adapts."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvopt.core.products.sums import widened
from curvopt.distributed import Ranks
from curvopt.kroneckers import kfac_mat_prod, kron_mean_diagonal, sizes_of
from curvopt.optim.closures import Closure

T = TypeVar("T")

#: Weights with more inputs than this take shorter steps.
WIDE = 128
#: Levenberg-Marquardt: once in so many steps the damping is multiplied by this factor, its inverse, or one.
ADAPT_EVERY = 5
ADAPT_FACTOR = (19 / 20) ** ADAPT_EVERY


def damping_of(group: Mapping[str, Any], mean_curvature: Tensor) -> float | Tensor:
    """The damping λ of a param group: its own, or a multiple of the mean curvature (1 where there is none at all)."""
    if group["damping"] is not None:
        return group["damping"]
    return _relative_damping(group, mean_curvature)


def _relative_damping(group: Mapping[str, Any], mean_curvature: Tensor) -> Tensor:
    return torch.where(mean_curvature > 0, group["relative_damping"] * mean_curvature, 1.0)


def dampings_of(group: Mapping[str, Any], means: Sequence[Tensor], mean_curvature: Tensor) -> Sequence[Any]:
    """The dampings of some parameters of a param group, by their own mean curvature and that of all parameters.

    A relative damping multiplies the smaller of the two: with that of all, parameters of much less curvature (behind a
    LayerScale, say) would hardly move. A parameter without any curvature takes the mean of all.
    """
    if group["damping"] is not None or not means:
        return [group["damping"]] * len(means)
    own = torch.stack([mean.to(mean_curvature) for mean in means])
    smaller = torch.where(own > 0, torch.minimum(own, mean_curvature), mean_curvature)
    return _relative_damping(group, smaller).unbind()


def excess(inputs: int, wide: int | None = WIDE) -> float:
    """``n / wide`` for a weight with n inputs, at least 1; 1 without ``wide``.

    More inputs add up in an output, so equal steps of their weights move it further (Yang & Hu 2021, whose rates of
    Adam fall as ``1 / n``); and usual initializations make such weights smaller by the root of n.
    """
    return 1.0 if wide is None else max(1.0, inputs / wide)


def rms_clip_factor(square: Tensor, rms_clip: float | None, limit: float = 1.0) -> Tensor:
    """``min(limit, c / r)`` bounds the root mean square r of an update by c (Shazeer & Stern 2018, section 6)."""
    if rms_clip is None:
        return torch.ones_like(square)
    square = square.nan_to_num(nan=inf, posinf=inf)  # beyond the range of its dtype: no step rather than nan
    return (rms_clip / square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()).clamp(max=limit)


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
        for param in group["params"]:
            if param in changes:
                grad = grads[param].reshape(-1) * (-1 if group.get("maximize") else 1)
                delta = widened(changes[param].reshape(-1))
                factors = states[param].get("factors") or [progress["mean_curvature"].to(delta)]
                sizes = sizes_of(factors, param.shape) if factors[0].ndim else None
                (damping,) = dampings_of(group, [kron_mean_diagonal(factors)], progress["mean_curvature"])
                curved = kfac_mat_prod(factors, sizes)(delta.to(factors[0].dtype)) + damping * delta
                terms.append(delta.dot(grad.to(delta) / progress["step_weight"].to(delta) + curved / 2))
    return torch.stack([term.to(terms[-1]) for term in terms]).sum()
