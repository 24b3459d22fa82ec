"""Backwards in which a little of all passes to wherever it may: samples that values keep away or apart now are seen.

``(A[:, :, None] * h).sum(1)`` mixes nothing while A is the identity, and a closed gate hides what is behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from curvopt.core.functional import signed_axis
from curvopt.core.residuals import BY_ENTRY, operation, walk
from curvopt.core.structure import many


@contextmanager
def opened(ends: list[Node]) -> Iterator[None]:
    """Inside, operations whose values decide what passes, and where to, pass a little of all to wherever they may."""
    with ExitStack() as hooks:
        for number, node in enumerate(walk(ends)):
            spread = mixing_by_values(node)
            if spread is not None:
                hooks.callback(node.register_hook(_Opening(spread, number)).remove)
        yield


class _Opening:
    """What a node gives, and besides, linear in what arrives, random multiples of that, spread as values may spread it.

    As much as the node gives by itself, so that no chain of them outgrows, or is outgrown by, what goes past it; but
    what would become too small for one more is multiplied.

    Args:
        spread: spreads what arrives, for an operand and its shape.
        number: for random ones that are always the same.
    """

    def __init__(self, spread: Callable[[Tensor, int, torch.Size], Tensor], number: int):
        """Nothing is known of sizes yet."""
        self.spread, self.number = spread, number
        self.scales: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, grads: Sequence[Tensor | None], arrived: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of all operands."""
        passed = only_plain(arrived)
        if passed is None:
            return None
        generator = torch.Generator().manual_seed(self.number)
        return tuple(
            grad if grad is None or not (is_plain(grad) and grad.numel()) else self._of(i, grad, passed, generator)
            for i, grad in enumerate(grads)
        )

    def _of(self, i: int, grad: Tensor, passed: Tensor, generator: torch.Generator) -> Tensor:
        more = self.spread(passed if grad.is_complex() else passed.real, i, grad.shape)
        more = _randomly(more, torch.broadcast_shapes(more.shape, grad.shape), generator)
        more = more.sum_to_size(grad.shape).to(grad)
        if i in self.scales:
            share, gain = self.scales[i]
            return more.mul_(share).add_(grad).mul_(gain)
        given, most = largest(grad), largest(more)
        share = torch.where((given > 0) & (most > 0), given / most / 5, 1)
        most = largest(more.mul_(share).add_(grad))
        gain = torch.where(most > 0, torch.where(given < 1e-4, 1, given) / most, 1)
        self.scales[i] = share, gain  # all is linear afterwards
        return more.mul_(gain)


def _randomly(x: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A tensor, expanded to a shape, times random numbers along every axis: large ones take no more memory."""
    x = x.expand(shape) * (0.5 + torch.rand((), generator=generator)).to(x.real)
    for axis, length in enumerate(shape):
        x.mul_((0.5 + torch.rand(length, generator=generator)).to(x.real).view(-1, *[1] * (len(shape) - axis - 1)))
    return x


def largest(x: Tensor) -> Tensor:
    """The largest absolute value."""
    return torch.linalg.vector_norm(x, torch.inf)


def only_plain(arrived: Sequence[Tensor | None]) -> Tensor | None:
    """The first gradient that arrived at a node, if it `is_plain`."""
    first = next((grad for grad in arrived if grad is not None), None)
    return first if first is not None and is_plain(first) else None


def is_plain(grad: Tensor) -> bool:
    """Whether a gradient is neither sparse nor nested."""
    return grad.layout == torch.strided and not grad.is_nested


# of single entries
_BY_ENTRY = (BY_ENTRY - {"ADD", "ALIAS", "CLONE", "NEG", "RSUB", "SUB", "TOCOPY"}) | frozenset(
    """Atan2 Fmax Fmin Fmod Hardshrink Hypot Lerp Logaddexp Logaddexp2 NanToNum Polar Remainder Softshrink
    SpecialXlog1Py Xlogy""".upper().split()
)
# of those along some axes
_OVER_AXES = frozenset(
    """Amax Amin Aminmax Cummax Cummin Cumprod Glu Kthvalue LinalgVectorNorm LogSoftmax Logcumsumexp Logsumexp Max
    Median Min Mode Nanmedian Norm Prod Softmax""".upper().split()
)
# of the last two operands, rows of the first and columns of the second
_PRODUCTS = frozenset("ADDBMM ADDMM ADDR BADDBMM BMM MM".split())


def mixing_by_values(node: Node) -> Callable[[Tensor, int, torch.Size], Tensor] | None:
    """How an operation may spread what arrives at it over an operand, given its index and shape.

    The result has to be expanded to the shape, or summed. ``None`` for operations that always pass on all gradients to
    where their shapes and arguments say.
    """
    name = operation(node)
    if name in _BY_ENTRY:
        return lambda passed, i, shape: passed
    if name in _OVER_AXES:
        return partial(_over_axes, getattr(node, "_saved_dim", None))
    last = len(node.next_functions) - 1
    if name in _PRODUCTS:
        return lambda passed, i, shape: passed if i < last - 1 else passed.mean(-1 if i < last else -2, name != "ADDR")
    if name in ("ADDMV", "MV"):
        return lambda passed, i, shape: [passed, passed.unsqueeze(-1), passed.mean()][i - last + 2]
    if name == "DOT":
        return lambda passed, i, shape: passed
    if "NORM" in name:
        return partial(_normalizing, len(getattr(node, "_saved_normalized_shape", ())), "GROUP" in name)
    if "CONV" in name:
        return partial(_convolving, getattr(node, "_saved_groups", 1))
    if "POOL" in name:
        axes = list(range(-2 if "2D" in name else -3, 0))
        return lambda passed, i, shape: passed.mean(axes, keepdim=True)
    if name.startswith("SCALEDDOTPRODUCT"):
        return _attending
    return None


def _over_axes(saved: Any, passed: Tensor, i: int, shape: torch.Size) -> Tensor:
    axes = [] if saved is None else sorted(signed_axis(axis) % max(len(shape), 1) for axis in many(saved))
    axes = axes or list(range(len(shape)))
    if passed.dim() == len(shape):
        return passed.mean(axes, keepdim=True) if axes else passed
    for axis in axes:
        passed = passed.unsqueeze(axis)
    return passed


def _normalizing(axes: int, all_of_a_row: bool, passed: Tensor, i: int, shape: torch.Size) -> Tensor:
    if i > 0:
        return passed.mean()
    over = [*range(-axes, 0)] or ([*range(1, passed.dim())] if all_of_a_row else [])
    return passed.mean(over, keepdim=True) if over else passed


def _convolving(groups: int, passed: Tensor, i: int, shape: torch.Size) -> Tensor:
    if i == 2:
        return passed.transpose(0, 1).flatten(1).mean(1)
    of_groups = passed.unflatten(1, (groups, -1)).flatten(2).mean(2)
    of_groups = of_groups if i == 0 else of_groups.mean(0)
    channels = of_groups.repeat_interleave(shape[1 - i] // groups, -1)
    return channels.view(*channels.shape, *[1] * (len(shape) - channels.dim()))


def _attending(passed: Tensor, i: int, shape: torch.Size) -> Tensor:
    passed = passed.mean((-2, -1), keepdim=True)
    other = [
        axis
        for axis, (one, two) in enumerate(zip(passed.shape, shape, strict=False))
        if two not in (1, one) and one != 1
    ]
    return passed.mean(other, keepdim=True) if other else passed  # where heads share keys
