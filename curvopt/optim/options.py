"""The options of optimizers, and the names of their parameters: checks, and reports."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from curvopt.distributed import is_sharded, refuse_sharded
from curvopt.errors import CurvoptError
from curvopt.optim.state import curvature_of

#: The options that say how large the damping is.
DAMPINGS = ("damping", "relative_damping")
#: Options that may differ between param groups, beside those of the torch optimizer.
OF_GROUPS = ("ema", "orthogonalize", *DAMPINGS)
#: The slowest decay of averages that are kept in bfloat16: what a step adds is at least two units of its 8 bits.
SLOWEST = 0.98


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
    _check_rms_clip(options.get("rms_clip"))
    if options.get("state_dtype") not in (None, torch.bfloat16):
        raise ValueError(f"state_dtype must be torch.bfloat16 or None, got {options['state_dtype']}")
    if options.get("on_nonfinite", "raise") not in ("raise", "skip"):
        raise ValueError(f'on_nonfinite must be "raise" or "skip", got {options["on_nonfinite"]!r}')


def _check_rms_clip(rms_clip: Any) -> None:
    if rms_clip is None:
        return
    if isinstance(rms_clip, (Real, Tensor)) and not float(rms_clip) > 0:
        raise ValueError(f"rms_clip must be positive or None, got {rms_clip}")
    check_number("rms_clip", rms_clip)


def check_group_options(
    group: Mapping[str, Any], of_run: Collection[str] = (), state_dtype: torch.dtype | None = None
) -> None:
    """Check the options of a param group.

    Args:
        group: the param group.
        of_run: names of options that a group cannot have.
        state_dtype: of its averages, where that is not the one of the parameters.

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
    if not isinstance(group.get("orthogonalize", False), bool):
        raise TypeError(f"orthogonalize must be True or False, got {group['orthogonalize']!r}")
    check_decays(group, state_dtype)


def check_decays(group: Mapping[str, Any], state_dtype: torch.dtype | None) -> None:
    """Refuse averages that stand still where they are rounded to ``state_dtype``; ``None`` rounds none.

    Raises:
        ValueError: if there is one.
    """
    decays = [*group.get("betas", ()), group["ema"]]
    if state_dtype is not None and max(decays) > SLOWEST:
        raise ValueError(
            f"state_dtype={state_dtype} rounds averages to 8 bits, so they have to forget: betas and ema must be at "
            f"most {SLOWEST}, got {decays}"
        )


class Attached(TypedDict, total=False):
    """What an optimizer may be told of the model and the loop, by its constructor or by ``attach``.

    Attributes:
        lossfunc: the loss, where it is a module that has parameters; these are trained, too.
        scaler: what scales the loss, anything with ``get_scale()``; not needed for a ``torch.amp.GradScaler`` whose
            ``step()`` is given the optimizer, unless ``unscale_()`` comes before.
        gradient_scale: by what the loop multiplies gradients after the backward (1 / n where it divides them by a
            number n), or a function that returns it.
        loss_reduction: whether losses of no known kind are a ``"mean"`` over the samples or a ``"sum"``.
        batch_axis: axis of the model's inputs that counts the samples.
    """

    lossfunc: nn.Module | None
    scaler: Any
    gradient_scale: float | Callable[[], float] | None
    loss_reduction: Literal["mean", "sum"] | None
    batch_axis: int | None


#: Options that there are elsewhere, or were here: what to do without them.
_MISSING = {
    "adaptive_damping": (
        "has no adaptive_damping any more, which lost on five of six tasks; leave it out, or change "
        'param_groups[0]["relative_damping"] by a schedule'
    ),
    "preconditioner_samples": (
        "has no preconditioner_samples any more, as no task of its tables used them; leave them out, or raise "
        "cg_iterations where curvature differs much"
    ),
    "fused": "has no fused step of its own; leave fused out, on a CPU it is used where that is faster",
    "capturable": "cannot be captured in a CUDA graph, as it reads the graph of each backward; leave capturable out",
    "differentiable": "cannot be differentiated through; leave differentiable out",
}


def check_attached(who: str, params: Any, options: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that an optimizer does not have, or that go to ``attach``.

    Args:
        who: name of the optimizer.
        params: its first argument.
        options: the arguments, see `Attached`.

    Raises:
        TypeError: if there is one.
    """
    check_known(who, options, Attached.__annotations__)
    for name in options:
        if not isinstance(params, nn.Module):
            raise TypeError(
                f"{who} got {name} with parameters; write {who}(model, {name}=...), or optimizer.attach(model, "
                f"{name}=...)."
            )


def check_known(who: str, options: Iterable[str], known: Container[str] = ()) -> None:
    """Refuse keyword arguments that an optimizer does not have.

    Raises:
        TypeError: if there is one.
    """
    for name in options:
        if name not in known:
            missing = _MISSING.get(name, f"has no option {name}; help({who}) lists the options that it has")
            raise TypeError(f"{who} {missing}.")


def parameters_of(params: Any, lossfunc: nn.Module | None = None) -> Any:
    """Named parameters where a model is given in their place, and those of its loss; else what is given."""
    if not isinstance(params, nn.Module):
        return params
    named = dict(params.named_parameters())
    if isinstance(lossfunc, nn.Module):
        known = set(named.values())
        more = {f"lossfunc.{name}": p for name, p in lossfunc.named_parameters() if p not in known}
        named |= more
    return list(named.items())


def check_new_group(optimizer: torch.optim.Optimizer, check_shards: Callable[[], Any] | None = None) -> None:
    """Refuse sharded and complex parameters; the param group that was added last is taken out again.

    Args:
        optimizer: the optimizer.
        check_shards: refuses shards that the optimizer cannot gather; ``None`` if it can gather none.

    Raises:
        CurvoptError: if there is one.
    """
    who, names = type(optimizer).__name__, parameter_names(optimizer.param_groups)
    try:
        refuse_sharded((who, name, p) for p, name in names.items() if check_shards is None or not is_sharded(p))
        if check_shards is not None:
            check_mixed(who, names)
            check_shards()
        for p, name in names.items():
            if p.is_complex():
                raise CurvoptError(f"{name}: {who} got a complex parameter; use two real ones.")
    except CurvoptError:
        optimizer.param_groups.pop()
        raise


def check_mixed(who: str, names: Mapping[Tensor, str]) -> None:
    """Refuse sharded parameters together with others.

    Raises:
        CurvoptError: if there are both.
    """
    plain = [name for p, name in names.items() if not is_sharded(p)]
    if plain and len(plain) < len(names):
        raise CurvoptError(
            f"{who}: {plain[0]} is not sharded, but other parameters are; call fully_shard for the whole model after "
            "its layers, or give it to another optimizer."
        )


def check_schedules(who: str, options: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Refuse options, of the whole run or of param groups, that were set out of their range after the constructor.

    Raises:
        CurvoptError: if there is one.
    """
    where = ""
    try:
        check_options(options)
        for i, group in enumerate(groups):
            where = f" in param group {i}"
            check_group_options(group, (), options.get("state_dtype"))
    except (TypeError, ValueError) as error:
        raise CurvoptError(
            f"{who}.step(): {error}{where}; look for the code that changes it (a schedule?). Parameters and state are "
            "unchanged."
        ) from error


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
