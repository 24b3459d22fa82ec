"""When parameters are refreshed: each by its own steps, so that heads may take turns and layers be unfrozen.

A run keeps, for each parameter in the order of the param groups, ``steps``: how many it has taken, ``due``: the number
at which its curvature is refreshed next, and ``refreshed``: the number at which it was refreshed last. New parameters
are due at once.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor


def annealed_interval(step: int, every: int) -> int:
    """Steps until the next refresh: as many as were taken so far, at least 1 and at most ``every``."""
    return max(1, min(every, step))


def is_due(run: Mapping[str, Any], params: Sequence[Tensor], reached: Set[Tensor] | None, late: int = 0) -> bool:
    """Whether one of the parameters that are reached (``None``: any may be) has been due for ``late`` of its steps."""
    return any(
        steps >= due + late and param.requires_grad and (reached is None or param in reached)
        for param, steps, due in _clocks(run, params, "due")
    )


def restart(
    run: dict[str, Any], params: Sequence[Tensor], refreshed: Set[Tensor] | None, others: Set[Tensor], every: int
) -> None:
    """Make parameters that were refreshed (``None``: all) due again after an interval, and others, too."""
    clocks = list(_clocks(run, params, "due", "refreshed"))
    everyone = refreshed is None
    run["due"] = [
        steps + annealed_interval(steps, every) if everyone or param in refreshed or param in others else due
        for param, steps, due, _ in clocks
    ]
    run["refreshed"] = [steps if everyone or param in refreshed else last for param, steps, _, last in clocks]


def ages(run: Mapping[str, Any], params: Sequence[Tensor]) -> list[int]:
    """How many steps each parameter has taken since its last refresh, at least 1."""
    return [max(1, steps - last) for _, steps, last in _clocks(run, params, "refreshed")]


def tick(run: dict[str, Any], params: Sequence[Tensor], moved: Set[Tensor]) -> None:
    """Count a step of some parameters."""
    everyone = len(moved) == len(params)
    run["steps"] = [steps + (everyone or param in moved) for param, steps in _clocks(run, params)]


def _clocks(run: Mapping[str, Any], params: Sequence[Tensor], *names: str) -> Iterator[Any]:
    new = [0] * len(params)  # more than are needed
    return zip(params, *([*run[name], *new] for name in ("steps", *names)), strict=False)
