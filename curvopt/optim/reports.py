"""Reports of optimizers on their parameters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from curvopt.optim.state import curvature_of


def parameter_names(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Names of the parameters: those that were given, else ``group.index``; by name and group where names repeat."""
    names: dict[Tensor, tuple[str, int]] = {}
    for i, group in enumerate(groups):
        given = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
        names.update(zip(group["params"], ((name, i) for name in given), strict=True))
    times = Counter(name for name, _ in names.values())  # groups of modules have names of their own
    return {p: name if times[name] == 1 else f"{name} (group {i})" for p, (name, i) in names.items()}


def coverage(
    names: Mapping[Tensor, str], states: Mapping[Tensor, dict[str, Any]], empirical: bool = False
) -> dict[str, str]:
    """By name of a parameter, the form of the curvature that its state holds, and whether that is empirical."""
    kinds = {}
    for param, name in names.items():
        factors = (curvature_of(states[param]).factors if param in states else None) or []
        kind = kind_of(factors[0].ndim if factors else 0, len(factors) > 1)
        kinds[name] = f"empirical {kind}" if empirical and factors else kind
    return kinds


def kind_of(dims: int, several: bool) -> str:
    """The form of curvature, by the number of axes of its (first) factor, and whether there are several."""
    return "kronecker" if several else {0: "none", 1: "diagonal"}.get(dims, "dense")


def listed(names: Sequence[str]) -> str:
    """The first five names and the number of the others."""
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def shown(kind: str, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """The options of an optimizer and of its param groups, in the form of ``torch.optim``."""
    parts = {kind + " (": options} | {f"Parameter Group {i}": group for i, group in enumerate(groups)}
    lines = []
    for title, own in parts.items():
        lines.append(title)
        lines += [f"    {name}: {own[name]}" for name in sorted(own) if name not in ("params", "param_names", "run")]
    return "\n".join([*lines, ")"])
