"""Checks of the options of optimizers: their types and ranges."""

from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

#: The options that say how large the damping is.
DAMPINGS = ("damping", "relative_damping")


def check_number(name: str, value: Any, least: float = 0.0, below: float | None = None) -> None:
    """Refuse anything but a number, or a tensor with one entry, of at least ``least``.

    Raises:
        TypeError: it is no number.
        ValueError: it is less, or not ``below`` the bound that is given.
    """
    if isinstance(value, bool) or not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not (float(value) >= least and (below is None or float(value) < below)):  # comparisons with nan are false
        range_ = f"at least {least:g}" if below is None else f"in [{least:g}, {below:g})"
        raise ValueError(f"{name} must be {range_}, got {value}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but a whole number of at least ``least``.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a whole run.

    Raises:
        TypeError: an option is of the wrong type.
        ValueError: an option is out of its range.
    """
    for name in ("curvature_every", "inverse_every"):
        check_count(f"{name} counts steps and", options[name])
    rms_clip = options.get("rms_clip")
    if rms_clip is not None:
        check_number("rms_clip", rms_clip)
        if not rms_clip > 0:
            raise ValueError(f"rms_clip must be positive or None, got {rms_clip}")
    if options.get("on_nonfinite", "raise") not in ("raise", "skip"):
        raise ValueError(f'on_nonfinite must be "raise" or "skip", got {options["on_nonfinite"]!r}')


def check_group_options(group: Mapping[str, Any], of_run: Collection[str]) -> None:
    """Check the options of a param group.

    Args:
        group: the param group.
        of_run: names of options that a group cannot have.

    Raises:
        TypeError: an option is of the wrong type, or is one of the whole run.
        ValueError: an option is out of its range.
    """
    optional = {"damping"} if "relative_damping" in group else set()
    for name in of_run:
        if name in group:
            raise TypeError(f"{name} is an option of the whole optimizer, not of a param group; pass {name}=...")
    for name in DAMPINGS:
        if name in group and (group[name] is not None or name not in optional):
            check_number(name, group[name])
    check_number("ema", group["ema"], 0, 1)


def refuse_modules(who: str, params: Any) -> None:
    """Refuse a model in place of its parameters.

    Raises:
        TypeError: if it is one.
    """
    if isinstance(params, nn.Module):
        kind = type(params).__name__
        raise TypeError(f"{who} needs parameters, got a model ({kind}); write {who}(model.parameters()).")
