"""Checks that a step can be taken, before anything has changed."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvopt.distributed import is_sharded, refuse_sharded
from curvopt.errors import CurvoptError
from curvopt.optim.accumulation import Collected, are_zero
from curvopt.optim.options import DAMPINGS
from curvopt.optim.reports import listed, parameter_names

logger = logging.getLogger(__name__)


class Overflow(CurvoptError):
    """A gradient is not finite."""


class NoCurvature(CurvoptError):
    """No backward has computed any curvature so far."""


#: How gradients come to be of which no curvature is known.
WITHOUT_BACKWARD = (
    "Gradients by torch.autograd.grad or torch.func bring none, a step inside of the backward (in a hook) comes before "
    "it, and a torch.utils.checkpoint of the whole model needs use_reentrant=False."
)


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


def check_schedules(who: str, rms_clip: float | None, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse options that were set out of their range after the constructor; comparisons with nan are false.

    Raises:
        CurvoptError: if there is one.
    """
    options = [("rms_clip", rms_clip, rms_clip is None or rms_clip > 0, "positive or None")]
    for i, group in enumerate(groups):
        dampings = {name: group[name] for name in DAMPINGS if group.get(name) is not None}
        options += [
            *((f"{name} of param group {i}", value, value >= 0, "at least 0") for name, value in dampings.items()),
            (f"ema of param group {i}", group["ema"], 0 <= group["ema"] < 1, "in [0, 1)"),
        ]
    for name, value, valid, range_ in options:
        if not valid:
            raise CurvoptError(
                f"{who}.step(): {name} is {value}, but must be {range_}; look for the code that changes it "
                "(a schedule?). Parameters and state are unchanged."
            )


def check_dense(who: str, grads: Mapping[Tensor, Tensor], named: Callable[[], Mapping[Tensor, str]]) -> None:
    """Refuse sparse gradients.

    Raises:
        CurvoptError: if there is one.
    """
    for param, grad in grads.items():
        if grad.layout != torch.strided:
            raise CurvoptError(
                f"{named()[param]}: {who} needs a dense gradient, got one with layout {grad.layout}; build the "
                "embedding with sparse=False."
            )


def check_precision(
    who: str,
    states: Mapping[Tensor, dict[str, Any]],
    params: Iterable[Tensor],
    named: Callable[[], Mapping[Tensor, str]],
) -> None:
    """Refuse parameters that have another precision than their curvature.

    Raises:
        CurvoptError: if there is one.
    """
    for param, state in states.items():  # not by parameter: hashes of tensors are slow
        kept = state.get("factors")
        if not kept or kept[0].dtype == param.dtype:
            continue
        now = torch.promote_types(param.dtype, torch.float32)
        if kept[0].dtype != now and any(param is own for own in params):
            raise CurvoptError(
                f"{named()[param]}: {who} keeps its curvature in {kept[0].dtype}, but the parameter is now of {now}; "
                "after a change of the model's precision call optimizer.load_state_dict(optimizer.state_dict()). "
                "Parameters and state are unchanged."
            )


def accepted_curvature(
    who: str,
    named: Callable[[], Mapping[Tensor, str]],
    states: Mapping[Tensor, dict[str, Any]],
    grads: Mapping[Tensor, Tensor],
    collected: Collected,
    over_ranks: Callable[[Tensor], Tensor],
    known_finite: bool,
    refused: bool,
) -> dict[Tensor, list[Tensor]] | None:
    """The mean curvature of the parameters for which it is finite, by parameter; ``None`` if there never was any.

    Args:
        who: name of the optimizer.
        named: names all its parameters.
        states: its state by parameter, which holds the curvature so far.
        grads: gradients by parameter.
        collected: curvature since the last step.
        over_ranks: sums over ranks that have different parameters.
        known_finite: whether all of these tensors are known to be finite.
        refused: whether all backwards that were due had no curvature, as was said.

    Raises:
        CurvoptError: if a gradient is not finite, a parameter changed its precision, or all curvature was not finite.
        NoCurvature: if none was ever computed.
    """
    check_precision(who, states, grads, named)
    params = list(grads)
    # not finite if the loss weighs nothing
    new = {param: curvature.mean(collected.weight) for param, curvature in collected.curvature.items()}
    owners = [param for param, tensors in new.items() for _ in tensors]
    tensors = [*grads.values(), *(tensor for tensors in new.values() for tensor in tensors)]
    weight = collected.step_weight
    if new:  # else its weight is no number of the device
        weight = weight.to(tensors[0].device)
        tensors.append(torch.where(weight > 0, weight, torch.nan))
    finite = [True] * len(tensors) if known_finite else all_finite(tensors)

    bad = [named()[param] for param, ok in zip(params, finite, strict=False) if not ok]
    rejected = {
        param for param, ok in zip(owners, finite[len(params) : len(params) + len(owners)], strict=True) if not ok
    }
    weightless = bool(new) and not finite[-1] and float(weight) == 0
    if new and not finite[-1]:
        rejected = set(new)
    known = has_curvature(states) or refused
    counts = torch.tensor([len(bad), len(new), len(rejected), weightless, known], dtype=torch.float64)
    all_bad, all_new, all_rejected, all_weightless, all_known = over_ranks(counts).tolist()
    if all_bad:
        raise Overflow(
            f"gradient of {listed(bad) or 'parameters that other ranks own'} is not finite (inf or nan). Parameters "
            "and state are unchanged. Call zero_grad() and skip this batch, or lower lr, raise damping, or use "
            "torch.amp.GradScaler for half precision."
        )
    if weightless:
        logger.info("%s: the loss weighs nothing (were all targets ignored?)", who)
    for param in () if weightless else rejected:
        logger.warning("%s: new curvature is not finite and was dropped", named()[param])

    if not all_known and all_rejected == all_new:
        nonzero = bool(params) and not are_zero(named())
        if not all_weightless or over_ranks(torch.tensor(float(nonzero))) > 0:
            reason = "all curvature so far was not finite" if all_rejected else "no curvature was computed so far"
            raise (CurvoptError if all_rejected else NoCurvature)(
                f"{who}.step(): {reason}. Build the optimizer of the model, {who}(model), or call "
                "optimizer.attach(model) once; or wrap each backward pass of an extended model: `with "
                f"optimizer.curvature(): loss.backward()`. {WITHOUT_BACKWARD}"
            )
        return None
    return {param: tensors for param, tensors in new.items() if param not in rejected}


def has_curvature(states: Mapping[Tensor, dict[str, Any]]) -> bool:
    """Whether any parameter has curvature."""
    return any("factors" in state for state in states.values())


def are_finite(vectors: Sequence[Tensor]) -> bool:
    """Whether all entries are finite, by one sum for each vector; false if that cannot be said."""
    return bool(vectors) and all(bool(vector.dot(vector).isfinite()) for vector in vectors)


def all_finite(tensors: list[Tensor]) -> list[bool]:
    """Whether all entries of a tensor are finite, for each; one transfer for all."""
    if not tensors:
        return []
    device = tensors[0].device
    norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    finite = torch.stack([norm.to(device) for norm in norms]).isfinite().tolist()
    # a norm may overflow where no entry does
    return [
        ok or (tensor.numel() > 1 and bool(tensor.isfinite().all())) for ok, tensor in zip(finite, tensors, strict=True)
    ]
