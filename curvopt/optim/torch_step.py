"""The step of the torch optimizer on other gradients than those of the user."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvopt.optim.checkpoint import without_curvature


def decay_weights(optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor]) -> None:
    """Decoupled weight decay of the parameters that take a step."""
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if decay != 0 and (decayed := [param for param in group["params"] if param in grads]):
            factor = 1 - group["lr"] * decay
            torch._foreach_mul_(decayed, factor)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _fused(
    optimizer: torch.optim.Optimizer, update: Mapping[Tensor, Tensor], states: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Inside, SGD and AdamW take one call for all parameters on the CPU, unless ``foreach`` is set: that is faster.

    It goes through memory, so parameters, gradients and moments need one dtype and equal strides; and it begins
    momentum for all parameters of a group or for none.
    """
    begun = {"momentum_buffer" in state for state in states}
    kinds = {(p.is_cpu, p.dtype, new.dtype) for p, new in update.items()}
    alike = all(cpu and own == given for cpu, own, given in kinds) and all(map(Tensor.is_contiguous, update))
    plain = alike and len(begun) < 2
    groups = optimizer.param_groups if plain else []
    chosen = [group for group in groups if group.get("foreach", False) is None and group.get("fused", False) is None]
    try:
        for group in chosen:
            group["fused"] = True
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def take_torch_step(
    optimizer: torch.optim.Optimizer,
    step: Callable[[Any], Any],
    update: Mapping[Tensor, Tensor],
    restored: Mapping[Tensor, Tensor],
) -> None:
    """Run the step of the torch optimizer, without its weight decay.

    Args:
        optimizer: the optimizer.
        step: its step, a function of the optimizer.
        update: takes the place of the gradients.
        restored: gradients that are put back after the step, also if it raises.
    """
    while getattr(step, "hooked", False):  # step hooks of users run around our step already
        step = step.__wrapped__  # type: ignore[attr-defined]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    try:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = 0
        for param, value in update.items():
            param.grad = value
        states = [optimizer.state[param] for param in update]
        with without_curvature(states), _fused(optimizer, update, states):
            step(optimizer)
    finally:
        for param, grad in restored.items():
            param.grad = grad
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
