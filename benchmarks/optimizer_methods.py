"""The optimizers of `benchmarks.optimizers`, and three learning rates of each to choose from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner

try:
    import pytorch_optimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("SOAP and Shampoo come with pytorch_optimizer: pip install '.[bench]'.") from error

Optimizers = list[torch.optim.Optimizer]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def adamw_beside(model: nn.Module, **options: Any) -> Optimizers:
    """Muon for matrices of weights, AdamW for all else, whose rates mean the same."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in trained(model) if p.ndim == 2 and p not in embeddings]
    others = [p for p in trained(model) if p.ndim != 2 or p in embeddings]
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", **options)
    return [muon, torch.optim.AdamW(others, weight_decay=0.0, **options)] if others else [muon]


def preconditioned(other: Callable[..., Optimizers], model: nn.Module, **options: Any) -> Optimizers:
    """KFAC in front of another optimizer."""
    return [KFACPreconditioner(model), *other(model, **options)]


def single(
    kind: type[torch.optim.Optimizer], model: nn.Module, fixed: Mapping[str, Any] = {}, **options: float
) -> Optimizers:
    """One optimizer of all parameters."""
    return [kind(trained(model), **fixed, **options)]


@dataclass(frozen=True)
class Method:
    """An optimizer, and which learning rates it is tried with.

    Args:
        make: builds it (or those that step one after the other) for a model, with its own rate or another one.
        rates: three learning rates, a factor of about three or ten apart; empty for none.
        large: how many times larger its batches are, and fewer its steps.
        seeds: how many runs are reported.
        scheduled: whether its rate follows the schedule of the task.
    """

    make: Callable[..., Optimizers]
    rates: tuple[float, ...]
    large: int = 1
    seeds: int = 1
    scheduled: bool = True

    @property
    def signature(self) -> str:
        """All that is not tuned, for the cache: an optimizer with other defaults is another one."""
        make, told = self.make, []
        while isinstance(make, functools.partial):
            told.append(make.keywords)
            told += [inspect.signature(kind) for kind in make.args if isinstance(kind, type)]
            told += [inspect.signature(KFACPreconditioner)] if make.func is preconditioned else []
            make = make.args[0] if make.func is preconditioned else make.func
        return str(told)


def plain(kind: type[torch.optim.Optimizer], **fixed: Any) -> Callable[..., Optimizers]:
    """One optimizer of all parameters, with some options."""
    return functools.partial(single, kind, fixed=fixed)


_adamw = plain(torch.optim.AdamW, weight_decay=0.0)
# with the step lengths of RMSProp (grafting, Anil et al. 2020)
_shampoo = plain(
    pytorch_optimizer.ScalableShampoo,
    graft_type=pytorch_optimizer.optimizer.shampoo.LayerWiseGrafting.RMSPROP,
    betas=(0.9, 0.99),
    moving_average_for_momentum=True,
    start_preconditioning_step=10,
    preconditioning_compute_steps=10,
)
METHODS: dict[str, Method] = {
    "SGD": Method(plain(torch.optim.SGD, momentum=0.9), (0.001, 0.01, 0.1)),
    "AdamW": Method(_adamw, (0.001, 0.003, 0.01), seeds=3),
    "schedule-free AdamW": Method(plain(pytorch_optimizer.ScheduleFreeAdamW), (0.0025, 0.008, 0.025), scheduled=False),
    "Muon": Method(adamw_beside, (0.003, 0.01, 0.03), seeds=3),
    "SOAP": Method(plain(pytorch_optimizer.SOAP, weight_decay=0.0), (0.001, 0.003, 0.01), seeds=3),
    "Shampoo": Method(_shampoo, (0.003, 0.01, 0.03)),
    "KFACSGD": Method(plain(KFACSGD), (0.03, 0.1, 0.3), seeds=3),
    "EKFACSGD": Method(plain(EKFACSGD), (0.03, 0.1, 0.3)),
    "KFACAdamW": Method(plain(KFACAdamW), (0.003, 0.01, 0.03), seeds=3),
    "KFAC + AdamW": Method(functools.partial(preconditioned, _adamw), (0.001, 0.003, 0.01)),
    "KFAC + Muon": Method(functools.partial(preconditioned, adamw_beside), (0.003, 0.01, 0.03)),
    "DiagonalNewton": Method(plain(DiagonalNewton), (0.02, 0.06, 0.2)),
    "HessianFree": Method(plain(HessianFree, cg_iterations=30), (), large=8),
}
