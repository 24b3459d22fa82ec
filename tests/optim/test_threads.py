"""Threads that train at the same time: each takes the steps and gets the fields that it gets alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import resume_with
from torch import Tensor, nn

from curvopt import backpack, disable, extend
from curvopt.extensions import BatchGrad, DiagGGNExact
from curvopt.optim import KFACSGD, DiagonalNewton, HessianFree, KFACAdamW

STEPS = 30


@pytest.fixture(autouse=True)
def short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def data(seed: int) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]], torch.Generator]:
    drawn = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=drawn) / 2)
    batches = ((torch.randn(8, 6, generator=drawn).double(), torch.arange(8) % 3) for _ in range(STEPS))
    return model, batches, drawn


def attached(kind: Callable, seed: int) -> list[Tensor]:
    model, batches, _ = data(seed)
    optimizer = kind(model, curvature_every=2)
    resume_with(optimizer, sampler=(seed, 0))
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def fields(seed: int) -> list[Tensor]:
    model, batches, _ = data(seed)
    extend(model)
    found = []
    for x, y in batches:
        with disable():
            model(x)
        with backpack(BatchGrad(), DiagGGNExact()):
            F.cross_entropy(model(x), y).backward()
        found += [each for p in model.parameters() for each in (p.grad_batch, p.diag_ggn_exact)]
        assert not any(hasattr(p, "kfac") for p in model.parameters())
    return found


def hessian_free(seed: int) -> list[Tensor]:
    model, batches, _ = data(seed)
    optimizer = HessianFree(model, cg_iterations=3)
    for x, y in batches:
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
    return [p.detach() for p in model.parameters()]


def plain(seed: int) -> list[Tensor]:
    """Without curvopt, with a penalty on slopes."""
    model, batches, _ = data(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        assert not any(vars(p) for p in model.parameters())
    return [p.detach() for p in model.parameters()]


TASKS: list[Callable[[int], list[Tensor]]] = [
    lambda seed: attached(KFACSGD, seed),
    fields,
    plain,
    lambda seed: attached(KFACAdamW, seed),
    hessian_free,
    lambda seed: attached(DiagonalNewton, seed),
]


@pytest.mark.parametrize("chosen", [(0, 3), (1, 2), (0, 1, 2), (3, 4, 5), (0, 0, 4), (1, 1, 5)], ids=str)
def test_threads_take_the_steps_that_each_takes_alone(chosen: tuple[int, ...]) -> None:
    alone = [TASKS[task](seed) for seed, task in enumerate(chosen)]
    together: list[list[Tensor] | BaseException] = [RuntimeError("did not run")] * len(chosen)
    start = threading.Barrier(len(chosen))

    def run(seed: int) -> None:
        start.wait()
        try:
            together[seed] = TASKS[chosen[seed]](seed)
        except BaseException as error:
            together[seed] = error

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(len(chosen))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, expected in zip(together, alone, strict=True):
        if isinstance(found, BaseException):
            raise found
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
