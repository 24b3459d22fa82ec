"""Mixed precision: ``torch.autocast`` and ``torch.amp.GradScaler`` change rounding, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Net
from checks import DEVICE
from optimizer_cases import (
    OPTIMIZERS,
    Run,
    assert_close,
    assert_equal,
    cnn,
    counters,
    covered,
    exact_optimizer,
    mlp,
    numbers,
)
from torch import Tensor, nn

from curvopt.errors import CurvoptError
from curvopt.optim import KFACSGD, HessianFree, KFACPreconditioner

HALF = [torch.bfloat16, torch.float16]


class Blocks(nn.Module):
    """Convolution, batch norm, attention, a norm and a parameter of its own: what autocast treats differently."""

    def __init__(self) -> None:
        super().__init__()
        # a bias in front of batch norm has no gradient but rounding, which is divided by its curvature all the same
        self.patches = nn.Conv2d(1, 8, 2, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        # a module without a rule: it is called once more for its Jacobians, outside of autocast
        parts = {"added": nn.Parameter(torch.zeros(16, 8)), "mixed": nn.Parameter(torch.randn(8, 8) / 3)}
        self.positions = Net(lambda net, x: x @ net.mixed + net.added, **parts)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> Tensor:
        h = self.positions(self.norm(self.patches(x)).flatten(2).mT)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(h.mean(1))


def train(
    make: Callable,
    model: Callable[[], nn.Module],
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    *,
    steps: int = 4,
    clip: float | None = None,
) -> Run:
    """A few steps, under autocast to ``dtype`` if any, the loss scaled if asked."""
    run = Run(make, model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale or 1.0, enabled=scale is not None)
    for step in range(steps):
        run.optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = run.loss(step)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), clip)
        scaler.step(run.optimizer)
        scaler.update()
    return run


def flat(weights: list[Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights])


# rounding to 8 and 11 bits, over four steps: the gradients themselves differ by 0.01 to 0.02 and an eighth of that
@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    [(torch.bfloat16, None, 0.04), (torch.bfloat16, 2.0**16, 0.04), (torch.float16, 2.0**12, 0.02)],
)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("KFACSGD exact", cnn),
        ("KFACSGD", Blocks),
        ("EKFACSGD exact", cnn),
        ("DiagonalNewton exact", cnn),
        ("DiagonalNewton hessian", cnn),
    ],
)
def test_steps_are_those_of_float32(name: str, model: Callable, dtype: torch.dtype, scale: float, tolerance: float):
    make = OPTIMIZERS[name]
    # the less curvature is damped, the more it makes of rounding
    if name.startswith("DiagonalNewton"):
        make = functools.partial(make, damping=0.005)
    if name.startswith("KFACSGD"):
        make = functools.partial(make, relative_damping=5.0)
    start, full = flat(Run(make, model).weights()), flat(train(make, model).weights())
    mixed = flat(train(make, model, dtype, scale).weights())
    assert (mixed - full).norm() < tolerance * (full - start).norm()


@pytest.mark.parametrize("dtype", HALF)
def test_adam_trains_as_well_as_in_float32(dtype: torch.dtype):
    """Its steps have the length of the learning rate in every direction, so those without a gradient are noise."""
    make = OPTIMIZERS["KFACAdamW"]
    start = Run(make).full_loss()
    full, mixed = (train(make, cnn, *amp, steps=25).full_loss() for amp in ((), (dtype, 2.0**12)))
    assert full < start / 2 and mixed < 1.2 * full


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), torch.optim.SGD], ids=[*OPTIMIZERS, "a preconditioner"])
def test_a_step_inside_of_autocast_is_that_outside(make: Callable):
    def train(whole: bool) -> Run:
        run = Run(make)
        collecting: Any = KFACPreconditioner(run.model) if make is torch.optim.SGD else run.optimizer
        collecting.attach(run.model, run.lossfunc)
        for step in range(3):
            run.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=whole):
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = run.loss(step)
                loss.backward()
                collecting.step()
                if collecting is not run.optimizer:
                    run.optimizer.step()
        return run

    assert_equal(train(True).weights(), train(False).weights())


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", ["KFACSGD", "HessianFree"])
def test_closures_inside_of_autocast_see_the_parameters_move(name: str, inner: bool):
    """Autocast keeps the weights that it has cast; a closure runs under it as the caller does, or opens its own."""

    def train(whole: bool) -> Run:
        run = Run(HessianFree if name == "HessianFree" else KFACSGD)
        for _ in range(3):

            def closure() -> Tensor:
                run.optimizer.zero_grad()
                with torch.autocast(DEVICE, torch.bfloat16) if inner or not whole else contextlib.nullcontext():
                    loss = run.loss(0)
                loss.backward()
                return loss

            with torch.autocast(DEVICE, torch.bfloat16, enabled=whole):
                run.optimizer.step(closure)
        return run

    plain, inside = train(False), train(True)
    assert_equal(inside.weights(), plain.weights())
    assert inside.optimizer.metrics() == plain.optimizer.metrics()


@pytest.mark.parametrize("lossfunc", [nn.BCEWithLogitsLoss(), nn.PoissonNLLLoss()], ids=str)
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_a_scaler_skips_a_batch_that_is_not_finite(lossfunc: nn.Module, poison: float):
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.rand(4, 3), torch.rand(4, 2)
    optimizer, scaler = KFACSGD(model.parameters(), fisher="mc"), torch.amp.GradScaler(DEVICE)
    optimizer.attach(model, lossfunc, scaler=scaler)
    before = model.weight.detach().clone()
    for factor in (poison, 1.0):
        optimizer.zero_grad()
        scaler.scale(lossfunc(model(factor * x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor != 1)
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["first step", "later"])
@exact_optimizer
def test_an_overflow_changes_nothing(make: Callable, known: bool, given: bool):
    """The loss is scaled until gradients leave the range of float16, and less and less until they do not."""
    run, steps = train(make, cnn, torch.float16, 2.0**10, steps=3 * known), 0
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**26, backoff_factor=2.0**-4)
    if given:
        run.optimizer.attach(run.model, run.lossfunc, scaler=scaler)
    weights, state = run.weights(), copy.deepcopy(numbers(run.optimizer))
    while True:
        run.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = run.loss(3)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() == before:
            break
        steps += 1
        assert_equal(run.weights(), weights)
        torch.testing.assert_close(numbers(run.optimizer), state, rtol=0, atol=0)
    assert steps >= 2 and not torch.equal(flat(run.weights()), flat(weights))

    clean = train(make, cnn, torch.float16, 2.0**10, steps=3 * known)
    clean.optimizer.zero_grad()
    with torch.autocast(DEVICE, torch.float16):
        loss = clean.loss(3)
    loss.backward()
    clean.optimizer.step()
    moved = (flat(clean.weights()) - flat(weights)).norm()
    if not isinstance(clean.optimizer, torch.optim.AdamW):  # see above
        assert (flat(run.weights()) - flat(clean.weights())).norm() < 0.02 * moved


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_copies_find_the_scaler_that_steps_them(duplicate: Callable):
    """No copy of a scaler: nobody would update it."""
    run, plain = Run(KFACSGD), Run(KFACSGD).train(range(1))
    first, other = (torch.amp.GradScaler(DEVICE, init_scale=scale) for scale in (2.0**10, 2.0**4))
    run.optimizer.attach(run.model, run.lossfunc, scaler=first)
    twin = duplicate(run)
    other.scale(twin.loss(0)).backward()
    other.step(twin.optimizer)
    assert_close(twin.weights(), plain.weights())


@pytest.mark.parametrize("known", [True, False])
def test_a_preconditioner_leaves_an_overflow_to_the_scaler(known: bool):
    run = Run(torch.optim.SGD, lr=0.01)
    preconditioner, scaler = KFACPreconditioner(run.model), torch.amp.GradScaler(DEVICE, init_scale=2.0**26)
    preconditioner.attach(run.model, scaler=scaler if known else None)
    weights = run.weights()
    for _ in range(12):
        run.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = run.loss(0)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        if not known:
            with pytest.raises(CurvoptError, match="is not finite"):
                preconditioner.step()
            break
        preconditioner.step()
        scaler.step(run.optimizer)
        if scaler.get_scale() == 2.0**26:
            assert_equal(run.weights(), weights)
        scaler.update()
    else:
        assert scaler.get_scale() < 2.0**26 and 0 < counters(preconditioner)["step"] < 12
        assert all(weight.isfinite().all() for weight in run.weights())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "Adam" not in name])
def test_gradients_may_have_another_dtype_than_their_parameters(name: str):
    first, second = (Run(OPTIMIZERS[name], dtype=torch.bfloat16) for _ in range(2))
    for p in second.model.parameters():
        p.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    second.train(3)
    start, moved = flat(Run(OPTIMIZERS[name], dtype=torch.bfloat16).weights()), flat(first.train(3).weights())
    assert (flat(second.weights()) - moved).norm() < 0.1 * (moved - start).norm()


def test_a_scale_beyond_the_range_of_float16_reaches_no_column():
    """Gradients of the loss itself are formed in float32: 2¹⁶ is no float16."""
    run = Run(KFACSGD, mlp, fisher="empirical")
    with torch.autocast(DEVICE, torch.float16):
        loss = run.loss(0)
    (2.0**16 * loss).backward()
    run.optimizer.step()
    assert covered(run.optimizer) and all(factor.isfinite().all() for factors in run.factors() for factor in factors)
