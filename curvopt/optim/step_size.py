"""How long a step may be: the damping, and the bound on its root mean square."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: Weights with more inputs than this take shorter steps.
WIDE = 128


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


def rms_clip_factor(rms: Tensor, rms_clip: float | Tensor | None, limit: float = 1.0) -> Tensor:
    """``min(limit, c / r)`` bounds the root mean square r of an update by c (Shazeer & Stern 2018, section 6)."""
    if rms_clip is None:
        return torch.ones_like(rms)
    rms = rms.nan_to_num(nan=inf, posinf=inf)  # beyond the range of its dtype: no step rather than nan
    return (rms_clip / rms.clamp(min=torch.finfo(rms.dtype).tiny)).clamp(max=limit)


def moments(u: Tensor, g: Tensor) -> Callable[[], Tensor]:
    """A function that returns ``uᵀg``, ``uᵀu`` and ``gᵀg`` of vectors, ``[3]``; the products are taken here."""
    return partial(torch.stack, [u.dot(g), u.dot(u), g.dot(g)])


def sums_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums of the entries of tensors, none of which is negative."""
    if all(tensor.is_cpu for tensor in tensors):
        return [tensor.sum() for tensor in tensors]
    return list(torch._foreach_norm(list(tensors), 1))  # pyright: ignore[reportPrivateImportUsage]


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


def decay_weights(groups: Iterable[Mapping[str, Any]], moved: Container[Tensor]) -> None:
    """Decoupled weight decay of the parameters that take a step."""
    for group in groups:
        decay = group.get("weight_decay", 0)
        if decay != 0 and (decayed := [param for param in group["params"] if param in moved]):
            torch._foreach_mul_(decayed, 1 - group["lr"] * decay)  # pyright: ignore[reportPrivateImportUsage]
