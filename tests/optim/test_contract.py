"""What every optimizer promises. A new optimizer is one row in ``OPTIMIZERS`` of `optimizer_cases`."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import (
    EXACT,
    OPTIMIZERS,
    Run,
    Tokens,
    assert_close,
    assert_equal,
    checkpoint,
    cnn,
    digits,
    every_optimizer,
    exact_optimizer,
    mlp,
    numbers,
    sgd_like,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.utils import prune

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact
from curvopt.kroneckers import kfacs_to_mat
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW
from curvopt.optim.accumulation import ema_update, number
from curvopt.optim.curvature import Quantity, annealed_interval
from curvopt.optim.state import curvature_of, unpacked
from curvopt.optim.step_size import damping_of, excess, rms_clip_factor

# ------------------------------------------------------------------------------------------------------------- training


@functools.cache
def sgd_loss(model: Callable[[], nn.Module]) -> float:
    """Mean loss over the seeds of ``SGD`` with momentum after 80 steps, at the best of three learning rates."""

    def run(lr: float, seed: int) -> float:
        return Run(torch.optim.SGD, model, seed=seed, lr=lr, momentum=0.9).train(80).full_loss()

    return min(sum(run(lr, seed) for seed in range(2)) / 2 for lr in (0.03, 0.1, 0.3))


@pytest.mark.parametrize("model", [mlp, cnn])
@pytest.mark.parametrize("make", [make for name, make in OPTIMIZERS.items() if not name.startswith("DiagonalNewton")])
def test_defaults_beat_sgd_of_any_learning_rate(make: Callable, model: Callable) -> None:
    losses = [Run(make, model, seed=seed).train(80).full_loss() for seed in range(2)]
    assert sum(losses) / 2 < sgd_loss(model), (losses, sgd_loss(model))


@every_optimizer
def test_many_seeds_stay_stable(make: Callable) -> None:
    for seed in range(3):
        run = Run(make, seed=seed, batch=32)
        before = run.full_loss()
        assert run.train(60).full_loss() < before / (2 if isinstance(run.optimizer, DiagonalNewton) else 4)


# ------------------------------------------------------------------------------------------------------ the mathematics


def test_kfac_step_is_the_dense_solve() -> None:
    damping = 0.3
    run = Run(KFACSGD, cnn, dtype=torch.float64, fisher="exact", lr=1.0, momentum=0.0, damping=damping, rms_clip=None)
    before = run.weights()
    run.backward(0)
    gradients = [p.grad.clone() for p in run.model.parameters()]
    run.optimizer.step()
    for p, old, gradient in zip(run.model.parameters(), before, gradients, strict=True):
        factors = run.optimizer.state[p]["curvature"].factors
        dims = [factor.shape[-1] for factor in factors]
        solution = []
        pieces = gradient.reshape(2 if factors[0].ndim == 3 else 1, -1)
        for group, piece in enumerate(pieces):
            own = [factor[group] if factor.ndim == 3 else factor for factor in factors]
            eyes = [torch.eye(d, dtype=torch.float64) for d in dims]
            if len(own) == 2:
                (b, a), (eye_b, eye_a) = own, eyes
                pi = ((a.trace() / dims[1]) / (b.trace() / dims[0])).sqrt()
                matrix = kfacs_to_mat([b + damping**0.5 / pi * eye_b, a + pi * damping**0.5 * eye_a])
            else:
                matrix = own[0] + damping * eyes[0]
            solution.append(torch.linalg.solve(matrix, piece))
        expected = torch.stack(solution).reshape(p.shape) * (gradient != 0)
        torch.testing.assert_close(old - p.detach(), expected)


def test_diagonal_step_is_the_elementwise_quotient() -> None:
    run = Run(
        DiagonalNewton,
        dtype=torch.float64,
        curvature="diag_ggn_exact",
        lr=1.0,
        momentum=0.0,
        damping=0.3,
        rms_clip=None,
    )
    before = run.weights()
    run.backward(0)
    run.optimizer.step()
    for p, old in zip(run.model.parameters(), before, strict=True):
        (h,) = run.optimizer.state[p]["curvature"].factors
        torch.testing.assert_close(old - p.detach(), p.grad / (h.view_as(p) + 0.3))


def test_small_entries_of_the_first_diagonal_are_raised_to_its_mean_and_of_no_later_one() -> None:
    run, seen = Run(DiagonalNewton, dtype=torch.float64, curvature="diag_ggn_exact", curvature_every=1, ema=0.5), []
    for step in range(2):
        with backpack(DiagGGNExact()):
            run.loss(step).backward()
        seen.append([p.diag_ggn_exact.flatten() for p in run.model.parameters()])
        run.train(range(step, step + 1))
        if step == 0:
            first = [run.optimizer.state[p]["curvature"].factors[0].clone() for p in run.model.parameters()]
    for p, one, two, start in zip(run.model.parameters(), *seen, first, strict=True):
        assert (one < one.mean()).any() and (two < two.mean()).any()
        torch.testing.assert_close(start, torch.maximum(one, one.mean()))
        torch.testing.assert_close(run.optimizer.state[p]["curvature"].factors[0], (start / 2 + two) / 1.5)


def test_the_exact_factors_are_those_of_the_extension() -> None:
    for make, extension in (
        (OPTIMIZERS["KFACSGD exact"], KFLR()),
        (OPTIMIZERS["DiagonalNewton exact"], DiagGGNExact()),
    ):
        run = Run(make, cnn, dtype=torch.float64)
        with backpack(extension):
            run.loss(0).backward()
        fields = [getattr(p, extension.field) for p in run.model.parameters()]
        run.train(1)
        for p, field in zip(run.model.parameters(), fields, strict=True):
            expected = field if isinstance(field, list) else [field.reshape(-1).clamp(min=field.mean())]
            assert_close(run.optimizer.state[p]["curvature"].factors, expected)


def test_values_count_less_with_their_age_in_steps() -> None:
    ema, values, steps = 0.8, torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 5, 9, 20])
    average, weight = [torch.full((3,), 7.0, dtype=torch.float64)], 0.0  # the start value must not matter
    for t, value in enumerate(values):
        weight = ema_update(average, weight, [value], ema ** int(steps[t] - steps[max(0, t - 1)]))
        weights = ema ** (steps[t] - steps[: t + 1]).double()
        torch.testing.assert_close(average[0], weights @ values[: t + 1] / weights.sum())


@pytest.mark.parametrize("name", ["KFACSGD", "EKFACSGD", "DiagonalNewton"])
def test_averages_forget_by_the_steps_of_each_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that rests forgets nothing, and a resumed run forgets alike."""
    decays: dict[str, list[float]] = {}

    def average(quantity: Any, param: Tensor, kept: Any, new: Any, decay: float) -> None:
        decays.setdefault(str(param.shape), []).append(decay)
        plain(quantity, param, kept, new, decay)

    plain = Quantity.average
    monkeypatch.setattr(Quantity, "average", average)
    run = Run(OPTIMIZERS[name], ema=0.5, curvature_every=4).train(3)
    resting, *_, trained = run.model.parameters()
    resting.requires_grad_(False)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.train(range(3, 13))
    resting.requires_grad_(True)
    run.train(range(13, 15))
    assert decays[str(resting.shape)] == [0.5**age for age in (1, 1, 1, 2)]  # in its steps 0, 1, 2 and 4
    assert decays[str(trained.shape)] == [0.5**age for age in (1, 1, 1, 2, 4, 4, 2)]


def test_numbers_of_the_state_are_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert number(0.5).item() == 0.5


def test_annealed_interval_grows_from_one() -> None:
    steps, refreshes = 0, [0]
    while steps < 400:
        steps += annealed_interval(steps, 10)
        refreshes.append(steps)
    gaps = [b - a for a, b in zip(refreshes, refreshes[1:], strict=False)]
    assert gaps[:4] == [1, 1, 2, 4] and gaps[-20:] == [10] * 20 and gaps == sorted(gaps) and len(set(gaps)) > 3


@sgd_like
def test_rms_clip_counts_weights_by_their_inputs(make: Callable) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10))

    run, free = (Run(make, wide, lr=1.0, momentum=0.0, rms_clip=c, dtype=torch.float64) for c in (1e-4, None))
    before = run.weights()
    moved = [a - b for a, b in zip(run.train(1).weights(), before, strict=True)]
    for own, param, more in zip(moved, run.model.parameters(), (1, 1, 4, 1), strict=True):
        assert more * float(own.square().sum() / (param.grad != 0).sum()) == pytest.approx(1e-8)
    unclipped = [a - b for a, b in zip(free.train(1).weights(), before, strict=True)]
    assert_close(moved, [u * own.norm() / u.norm() for u, own in zip(unclipped, moved, strict=True)])


@sgd_like
def test_a_schedule_acts_on_clipped_steps(make: Callable) -> None:
    slow, fast = (Run(make, lr=lr, momentum=0.0, rms_clip=1e-4, dtype=torch.float64) for lr in (0.01, 0.02))
    before = slow.weights()
    moved = [[a - b for a, b in zip(run.train(1).weights(), before, strict=True)] for run in (slow, fast)]
    assert_close([2 * each for each in moved[0]], moved[1])


def test_rms_clip_never_lengthens_and_accepts_no_step() -> None:
    for square in (0.0, 1e-12, 1.0, 1e12, float("inf"), float("nan")):
        factor = rms_clip_factor(torch.tensor(square), 1e-3)
        assert 0 <= factor <= 1
    assert rms_clip_factor(torch.tensor(5.0), None) == 1


# -------------------------------------------------------------------------------------------- what torch.optim gives us


@sgd_like
@pytest.mark.parametrize("nesterov", [False, True])
def test_step_is_the_sgd_step_on_the_preconditioned_gradient(make: Callable, nesterov: bool) -> None:
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov}
    run = Run(make, **options, dtype=torch.float64, curvature_every=3)
    twin = [nn.Parameter(p.detach().clone()) for p in run.model.parameters()]
    sgd = torch.optim.SGD(twin, **options)
    for step in range(6):
        run.train(range(step, step + 1))
        for p, q in zip(run.model.parameters(), twin, strict=True):
            (stack,) = run.optimizer._stacks_of([p])
            given = run.optimizer.param_groups[0], run.optimizer.state, run.optimizer._run.mean_curvature
            product = run.optimizer._solver.solve(stack, p.grad.reshape(-1), *given).view_as(p)
            product, moves = product * (p.grad != 0), (p.grad != 0).sum()
            weight = run.optimizer._run.step_weight
            rms = (product.square().sum() * excess(p[0].numel() if p.ndim > 1 else 1) / moves).sqrt() / weight
            q.grad = product / weight * rms_clip_factor(rms.square(), run.optimizer.rms_clip)
        sgd.step()
        assert_close(run.weights(), [q.detach() for q in twin])


@every_optimizer
def test_weight_decay_is_decoupled(make: Callable) -> None:
    plain, decayed = (Run(make, lr=0.1, weight_decay=wd, dtype=torch.float64) for wd in (0.0, 0.5))
    before = plain.weights()
    plain.train(1)
    decayed.train(1)
    assert_close(decayed.weights(), [a - 0.1 * 0.5 * b for a, b in zip(plain.weights(), before, strict=True)])
    assert decayed.optimizer.param_groups[0]["weight_decay"] == 0.5


@sgd_like
def test_param_groups(make: Callable) -> None:
    def grouped(params: Iterator[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        first, second, *rest = params
        return make([{"params": [first], "lr": 0.0}, {"params": [second], "damping": 1e6}, {"params": rest}], **options)

    run = Run(grouped, momentum=0.0, dtype=torch.float64)
    before = run.weights()
    run.train(1)
    moved = [(a - b).norm().item() for a, b in zip(run.weights(), before, strict=True)]
    assert moved[0] == 0 and 0 < moved[1] < 1e-6 and min(moved[2:]) > 1e-5
    assert [group["damping"] for group in run.optimizer.param_groups][1] == 1e6


@every_optimizer
def test_learning_rate_schedule(make: Callable) -> None:
    run = Run(make)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: float(step < 3))
    for step in range(3):
        run.train(range(step, step + 1))
        scheduler.step()
    before = run.weights()
    run.train(range(3, 4))
    assert_equal(run.weights(), before)


@every_optimizer
def test_learning_rate_may_be_a_tensor(make: Callable) -> None:
    assert_close(
        Run(make, lr=torch.tensor(0.05)).train(3).weights(), Run(make, lr=0.05).train(3).weights(), atol=1e-6, rtol=1e-4
    )


@every_optimizer
def test_closure(make: Callable) -> None:
    plain, closed = Run(make), Run(make)
    plain.train(5)
    for step in range(5):

        def closure(step: int = step) -> Tensor:
            closed.optimizer.zero_grad()
            loss = closed.loss(step)
            loss.backward()
            return loss

        assert closed.optimizer.step(closure).requires_grad
    assert_equal(plain.weights(), closed.weights())


@every_optimizer
def test_step_hooks_run_once(make: Callable) -> None:
    torch.optim.SGD([torch.zeros(1)])  # from now on SGD.step itself is wrapped to run hooks
    run, calls = Run(make), []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run.train(1)
    assert calls == ["pre", "post"]


@every_optimizer
def test_gradients_of_the_caller_stay(make: Callable) -> None:
    run = Run(make)
    run.backward(0)
    grads = [p.grad for p in run.model.parameters()]
    values = [grad.clone() for grad in grads]
    run.optimizer.step()
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), grads, strict=True))
    assert_equal(grads, values)


@every_optimizer
def test_nothing_stays_on_the_parameters(make: Callable) -> None:
    run = Run(make, cnn)
    untouched = [set(p.__dict__) for p in run.model.parameters()]
    run.backward(0)
    assert [set(p.__dict__) for p in run.model.parameters()] == untouched


# ----------------------------------------------------------------------------------------------- what damping refers to


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_relative_damping_is_in_units_of_the_smaller_mean_curvature(make: Callable) -> None:
    """Of a parameter and of all; steps are those of these absolute dampings."""
    options: dict[str, Any] = {"dtype": torch.float64, "rms_clip": None, "fisher": "exact"}
    relative = Run(make, relative_damping=3.0, **options).train(1)
    blocks = [
        kfacs_to_mat(relative.optimizer.state[p]["curvature"].factors).diagonal() for p in relative.model.parameters()
    ]
    own, of_all = [float(block.mean()) for block in blocks], float(torch.cat(blocks).mean())
    assert min(own) < of_all < max(own)
    assert float(relative.optimizer._run.mean_curvature) == pytest.approx(of_all)
    assert float(relative.optimizer.metrics()["damping"]) == pytest.approx(3.0 * of_all)

    def by_parameter(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        groups = zip(params, own, strict=True)
        return make([{"params": [p], "damping": 3.0 * min(mean, of_all)} for p, mean in groups], **options)

    absolute = Run(by_parameter, **options).train(1)
    assert_close(relative.weights(), absolute.weights())


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_no_relative_damping_is_no_damping(make: Callable) -> None:
    """Directions without curvature are left out."""
    options: dict[str, Any] = {"dtype": torch.float64, "rms_clip": None, "fisher": "exact"}
    runs = [Run(make, **damping, **options).train(2) for damping in ({"relative_damping": 0.0}, {"damping": 0.0})]
    assert_equal(*(run.weights() for run in runs))


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_a_run_with_a_chosen_fisher_is_resumed_without_one(make: Callable, fisher: str) -> None:
    first, second = Run(make, fisher=fisher).train(3), Run(make)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(torch.load(checkpoint(first.optimizer)))
    before = second.full_loss()
    second.train(range(3, 40))
    assert second.full_loss() < before


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_damping_of_a_parameter_without_curvature_is_that_of_all(make: Callable) -> None:
    run = Run(make, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)), fisher="exact")
    nn.init.constant_(run.model[1].bias, -100.0)  # dead units
    before = run.weights()
    run.train(1)
    assert not any(factor.any() for factor in run.optimizer.state[run.model[1].bias]["curvature"].factors)
    assert all(torch.isfinite(weight).all() for weight in run.weights())
    moved = [bool((a != b).any()) for a, b in zip(run.weights(), before, strict=True)]
    assert moved == [False, False, False, True]  # the second weight sees zeros alone


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_where_there_is_no_curvature_at_all_steps_are_those_of_gradients(make: Callable) -> None:
    model = extend(nn.Linear(3, 1))
    optimizer = make(model.parameters(), lr=0.1, momentum=0.0, fisher="exact", rms_clip=None)
    with optimizer.curvature():
        extend(nn.MSELoss())(model(torch.zeros(4, 3)) * 0.0, torch.ones(4, 1)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert_close([p.detach() for p in model.parameters()], [p - 0.1 for p in before])


@pytest.mark.parametrize("name", ["KFACSGD", "EKFACSGD"])
@pytest.mark.parametrize("several", [False, True])
def test_the_fisher_matrix_is_chosen_by_the_variables_of_a_prediction(name: str, several: bool) -> None:
    """With the factors that the choice has from the first step on; and a resumed run keeps it."""
    x, y = torch.randn(2, 16, 4).double()
    weights = []
    for known in (False, True):
        torch.manual_seed(0)
        model, lossfunc = extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))).double(), nn.MSELoss()
        optimizer = OPTIMIZERS[name](model.parameters(), fisher=None, curvature_every=2)
        optimizer.attach(model, lossfunc)
        optimizer._run.several = several if known else None
        for step in range(5):
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            z = model(x) if several else model(x).sum(1, keepdim=True)
            lossfunc(z, y if several else y[:, :1]).backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert_close(*weights)


@exact_optimizer
def test_two_half_batches_are_one_batch(make: Callable) -> None:
    """In a context each, and, in the second step, in one."""
    whole, halves = (Run(make, cnn, dtype=torch.float64) for _ in range(2))
    for step in range(3):
        whole.train(range(step, step + 1))
        x, y = halves.data(step)
        halves.optimizer.zero_grad()
        with halves.optimizer.curvature() if step == 1 else contextlib.nullcontext():
            for part in (slice(None, 32), slice(32, None)):
                with halves.optimizer.curvature() if step != 1 else contextlib.nullcontext():
                    (halves.lossfunc(halves.model(x[part]), y[part]) / 2).backward()
        halves.optimizer.step()
        assert_close(whole.weights(), halves.weights())


@exact_optimizer
def test_loss_scale_takes_a_factor_out_of_the_curvature(make: Callable) -> None:
    plain, scaled = (Run(make, dtype=torch.float64) for _ in range(2))
    plain.train(1)
    with scaled.optimizer.curvature(loss_scale=8.0):
        (8.0 * scaled.loss(0)).backward()
    for p in scaled.model.parameters():
        p.grad /= 8.0
    scaled.optimizer.step()
    assert_close(plain.weights(), scaled.weights())


# ------------------------------------------------------------------------------------------------------------- schedule


@every_optimizer
def test_curvature_is_computed_when_due_and_costs_nothing_otherwise(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make, curvature_every=4)
    computed: list[int] = []
    quantity = type(run.optimizer._quantity)
    original = quantity.extensions
    monkeypatch.setattr(quantity, "extensions", lambda *args: computed.append(step) or original(*args))
    for step in range(24):
        run.train(range(step, step + 1))
    expected, due = [], 0
    while due < 24:
        expected.append(due)
        due += annealed_interval(due, 4)
    assert computed == expected


def test_inverses_follow_their_own_interval() -> None:
    run = Run(KFACSGD, curvature_every=1, inverse_every=5)
    p = next(run.model.parameters())
    changed = []
    for step in range(40):
        before = curvature_of(run.optimizer.state[p]).inverses
        run.train(range(step, step + 1))
        if run.optimizer.state[p]["curvature"].inverses is not before:
            changed.append(step)
    assert changed[:4] == [0, 1, 2, 4] and {b - a for a, b in zip(changed[-3:], changed[-2:], strict=False)} == {5}


@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_parameter_that_is_new_is_solved_for_at_once_and_no_other_again(kind: Callable) -> None:
    run = Run(lambda params, **options: kind(list(params)[2:], **options), mlp, curvature_every=1, inverse_every=100)
    run.train(40)
    renewed, renew = [], run.optimizer._renew
    run.optimizer._renew = lambda ranks: [renewed.append(run.optimizer._run.step), renew(ranks)]
    run.train(range(40, 43))
    assert renewed == []
    run.optimizer.add_param_group({"params": list(run.model.parameters())[:2]})
    run.train(range(43, 47))
    assert renewed == [43]


# ----------------------------------------------------------------------------------------------------------- checkpoint


@every_optimizer
@pytest.mark.parametrize("steps", [1, 11])
def test_resume_is_bit_for_bit(make: Callable, steps: int) -> None:
    options: dict[str, Any] = {"weight_decay": 0.01, "curvature_every": 3}
    straight = Run(make, cnn, **options).train(2 * steps)
    first = Run(make, cnn, **options).train(steps)
    file = checkpoint(first.optimizer)
    torch.manual_seed(1234)  # the sampler must not depend on the global generator
    second = Run(make, cnn, seed=0, **options)
    torch.manual_seed(4321)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(torch.load(file, weights_only=True))
    second.train(range(steps, 2 * steps))
    assert_equal(straight.weights(), second.weights())
    torch.testing.assert_close(numbers(straight.optimizer), numbers(second.optimizer), rtol=0, atol=0)


@every_optimizer
def test_metrics_are_there_after_a_resumption(make: Callable) -> None:
    """Those that are measured with inversions, too, which are seldom due in the first step."""
    first = Run(make).train(25)
    second = Run(make)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(torch.load(checkpoint(first.optimizer), weights_only=True))
    assert second.optimizer.metrics() == first.optimizer.metrics()
    assert first.train(range(25, 26)).optimizer.metrics() == second.train(range(25, 26)).optimizer.metrics()
    state = first.optimizer.state_dict()
    del state["param_groups"][0]["run"]["metrics"]  # as written before they were kept
    second.optimizer.load_state_dict(state)
    assert second.optimizer.metrics() == {}


@every_optimizer
def test_parameters_without_gradients_go_into_checkpoints_and_copies(make: Callable) -> None:
    """Whatever the curvature of the others makes of them, it is no state of the torch optimizer."""
    run = Run(make, curvature_every=3)
    run.model[1].requires_grad_(False)
    twin = copy.deepcopy(run.train(4))
    loaded = pickle.loads(pickle.dumps(run))
    loaded.optimizer.load_state_dict(torch.load(checkpoint(run.optimizer), weights_only=True))
    run.train(range(4, 8))
    for other in (twin, loaded):
        assert_equal(other.train(range(4, 8)).weights(), run.weights())


@every_optimizer
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_run_goes_on_in_another_precision(make: Callable, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    first, second = (Run(make, dtype=dtype) for dtype in dtypes)
    second.model.load_state_dict(first.train(5).model.state_dict())
    second.optimizer.load_state_dict(torch.load(checkpoint(first.optimizer), weights_only=True))
    losses = [run.train(range(5, 12)).full_loss() for run in (first, second)]  # of other samples, where these are drawn
    assert losses[0] == pytest.approx(losses[1], rel=0.2)
    assert all(
        t.dtype == dtypes[1] for p in second.model.parameters() for t in second.optimizer.state[p]["curvature"].factors
    )


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("name", ["KFACSGD", "EKFACSGD", "DiagonalNewton", "KFACAdamW"])
def test_a_model_that_changes_its_precision_says_what_to_do(name: str, steps: int) -> None:
    """Whether the next step refreshes the curvature or not."""
    run = Run(OPTIMIZERS[name]).train(steps)
    assert run.optimizer._curvature.is_due() == (steps == 4)
    run.model.double()
    run.x = run.x.double()
    before = run.weights()
    with pytest.raises(CurvoptError, match=r"keeps its curvature in torch\.float32.*load_state_dict"):
        run.train(1)
    assert_equal(before, run.weights())
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    loss = run.full_loss()
    assert run.train(range(steps, steps + 10)).full_loss() < loss


@every_optimizer
def test_models_in_half_precision_resume_bit_for_bit(make: Callable) -> None:
    first, second = (Run(make, dtype=torch.bfloat16, curvature_every=3) for _ in range(2))
    second.model.load_state_dict(first.train(5).model.state_dict())
    second.optimizer.load_state_dict(torch.load(checkpoint(first.optimizer), weights_only=True))
    torch.testing.assert_close(numbers(first.optimizer), numbers(second.optimizer), rtol=0, atol=0)
    assert_equal(first.train(range(5, 10)).weights(), second.train(range(5, 10)).weights())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@every_optimizer
def test_resumption_by_checkpoints_that_are_loaded_into_tensors(make: Callable, tmp_path: Path) -> None:
    """As torch.distributed.checkpoint does."""
    first, second = Run(make).train(7), Run(make).train(1)
    dcp.save({"state": first.optimizer.state_dict()["state"]}, checkpoint_id=tmp_path, no_dist=True)
    into = {"state": second.optimizer.state_dict()["state"]}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    state = first.optimizer.state_dict()
    torch.testing.assert_close(state["state"], second.optimizer.state_dict()["state"], rtol=0, atol=0)
    for values in state["state"].values():  # as written before they were tensors
        ours = values["curvature"]
        ours |= {name: float(ours[name]) for name in ("ema_weight", "scales_weight") if name in ours}
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(state))
    assert_equal(first.train(range(7, 12)).weights(), second.train(range(7, 12)).weights())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@every_optimizer
def test_resumption_by_get_and_set_state_dict(make: Callable, flat: bool) -> None:
    """Of torch.distributed.checkpoint, which finds the names of a state by a step of zero."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    first, second = Run(make), Run(make)
    get_state_dict(first.model, first.optimizer, options=options)
    first.train(7)
    kept = copy.deepcopy(get_state_dict(first.model, first.optimizer, options=options))

    def resume() -> None:
        model, state = copy.deepcopy(kept)
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=state, options=options)

    resume()
    assert first.optimizer.metrics() == second.optimizer.metrics()
    assert_equal(first.train(range(7, 12)).weights(), second.train(range(7, 12)).weights())
    resume()  # of one that has a state
    assert_equal(second.train(range(7, 12)).weights(), first.weights())


@every_optimizer
def test_states_of_earlier_versions_are_loaded(make: Callable) -> None:
    """They had our entries beside those of torch, and the run beside state and groups."""
    first, second = Run(make).train(7), Run(make)
    second.model.load_state_dict(first.model.state_dict())
    state = copy.deepcopy(first.optimizer.state_dict())
    for values in state["state"].values():
        curvature = vars(unpacked(values))
        del values["curvature"]
        values |= {name: value for name, value in curvature.items() if value is not None}
    state["curvature"] = state["param_groups"][0].pop("run")
    second.optimizer.load_state_dict(state)
    assert_equal(first.train(range(7, 12)).weights(), second.train(range(7, 12)).weights())


@every_optimizer
def test_hooks_see_and_change_all_of_a_checkpoint(make: Callable) -> None:
    """One that is loaded by names, say, as the parameters come in another order."""

    def build(order: int) -> Run:
        return Run(lambda params, **options: make(list(params)[::order], **options), curvature_every=3)

    def reverse(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        own, last = optimizer.state_dict(), len(state["state"]) - 1
        assert state["own"] and own["own"]
        states = {last - index: values for index, values in state["state"].items()}
        own["param_groups"][0]["run"] = state["param_groups"][0]["run"]
        return {"param_groups": own["param_groups"], "state": states}

    seen: list[int] = []
    first, second = build(1).train(5), build(-1)
    for run in (first, second):
        run.optimizer.register_state_dict_post_hook(
            lambda _, state: state.update(own="run" in state["param_groups"][0])
        )
    second.optimizer.register_load_state_dict_pre_hook(reverse)
    second.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer._run.step))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert seen == [5]
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        states = [
            {**state, **vars(state["curvature"])} for state in (first.optimizer.state[p], second.optimizer.state[q])
        ]
        assert states[0].pop("curvature") and states[1].pop("curvature")
        present = [{name: value for name, value in state.items() if value is not None} for state in states]
        torch.testing.assert_close(*present, rtol=0, atol=0)


@every_optimizer
def test_state_of_another_optimizer_is_refused(make: Callable) -> None:
    run = Run(make)
    before = copy.deepcopy(run.optimizer.state_dict())
    for kind in {KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton, torch.optim.SGD} - {type(run.optimizer)}:
        whose = "" if kind is torch.optim.SGD else f", {kind.__name__}; .*Nothing has changed"
        with pytest.raises(CurvoptError, match=f"state of another optimizer{whose}"):
            run.optimizer.load_state_dict(Run(kind).train(3).optimizer.state_dict())
        assert run.optimizer.state_dict() == before
    run.train(2)


def test_a_subclass_goes_on_with_the_state_of_its_base() -> None:
    class Own(KFACSGD):
        pass

    base, own = Run(KFACSGD).train(3), Run(Own)
    own.optimizer.load_state_dict(base.optimizer.state_dict())
    with pytest.raises(CurvoptError, match="state of another optimizer, Own"):
        base.optimizer.load_state_dict(own.optimizer.state_dict())


@every_optimizer
def test_state_of_other_shapes_is_refused(make: Callable) -> None:
    """Of as many entries, even."""
    for change in (lambda p: p.mT, lambda p: p[:-1]):
        other = Run(make, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        weight = other.model[1].weight
        weight.data = change(weight.data).contiguous()
        state = Run(make, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).train(1).optimizer.state_dict()
        if isinstance(other.optimizer, DiagonalNewton) and len(weight) == 64:
            continue  # a diagonal is flat
        with pytest.raises(CurvoptError, match=r"0\.0 has shape \[\d+, \d+\], but curvature of another one"):
            other.optimizer.load_state_dict(state)
        assert not other.optimizer.state and other.optimizer._run.step == 0


@every_optimizer
def test_sampling_leaves_the_global_generator_alone(make: Callable) -> None:
    run = Run(make)
    before = torch.get_rng_state()
    run.train(3)
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------------------------- errors and limits


@every_optimizer
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(make: Callable, poison: float) -> None:
    clean, hit = Run(make).train(3), Run(make).train(3)
    state, weights = copy.deepcopy(numbers(hit.optimizer)), hit.weights()
    hit.backward(3)
    hit.model[3].bias.grad[5] = poison
    with pytest.raises(CurvoptError, match=r"gradient of 0\.3 is not finite.*zero_grad"):
        hit.optimizer.step()
    assert_equal(hit.weights(), weights)
    now = numbers(hit.optimizer)
    state["run"].pop("sampler"), now["run"].pop("sampler")  # only samples were drawn for the refused step
    torch.testing.assert_close(now, state, rtol=0, atol=0)
    losses = [hit.train(range(3, 30)).full_loss(), clean.train(range(3, 30)).full_loss()]
    assert losses[0] < 2 * losses[1] + 0.1


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("how", ["before", "by the optimizer", "closure", "context", "twice"])
def test_curvature_goes_with_gradients_that_are_reset(how: str, set_to_none: bool) -> None:
    """Before its context, inside of it, or in a closure."""
    clean, aborted = (Run(KFACSGD, cnn, fisher="empirical") for _ in range(2))
    clean.train(1)

    def closure() -> Tensor:
        (aborted.optimizer if how == "by the optimizer" else aborted.model).zero_grad(set_to_none)
        if how in ("before", "by the optimizer"):
            stack.enter_context(aborted.optimizer.curvature())
        loss = aborted.loss(0)
        loss.backward()
        return loss

    if how != "twice":
        aborted.backward(1)  # whose step is left out
    with contextlib.ExitStack() as stack:
        if how in ("context", "twice"):
            stack.enter_context(aborted.optimizer.curvature())
        if how == "twice":
            aborted.loss(1).backward()
        if how == "closure":
            aborted.optimizer.step(closure)
        else:
            closure()
    if how != "closure":
        aborted.optimizer.step()
    assert_equal(clean.weights(), aborted.weights())


@every_optimizer
def test_curvature_that_is_not_finite_never_enters(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(make, ema=0.5).train(2)
    before = [[f.clone() for f in run.optimizer.state[p]["curvature"].factors] for p in run.model.parameters()]
    run.optimizer.zero_grad()
    with run.optimizer.curvature(loss_scale=0.0):
        run.loss(2).backward()
    with caplog.at_level(logging.WARNING, logger="curvopt"):
        run.optimizer.step()
    assert "not finite" in caplog.text
    for p, factors in zip(run.model.parameters(), before, strict=True):
        assert_equal(run.optimizer.state[p]["curvature"].factors, factors)
    run.train(range(3, 4))  # due again at once, and taken
    assert not torch.equal(run.optimizer.state[p]["curvature"].factors[0], before[-1][0])


@every_optimizer
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_without_targets_change_nothing(
    make: Callable, reduction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At first, later, and among those that accumulate."""

    def backward(run: Run, ignored: bool) -> None:
        x, y = run.data(0)
        with run.optimizer.curvature():
            run.lossfunc(run.model(x), y.clone().fill_(-100) if ignored else y).backward()

    run, plain = (Run(make, reduction=reduction, ema=0.5) for _ in range(2))
    before = run.weights()
    backward(run, ignored=True)
    run.optimizer.step()
    assert_equal(run.weights(), before)
    run.optimizer._run.sampler = run.optimizer._run.sampler[0], 0
    for step in range(2):
        for each in (run, plain):
            each.optimizer.zero_grad()
            backward(each, ignored=False)
        if step:
            backward(run, ignored=True)
        for each in (run, plain):
            each.optimizer.step()
        assert_close(run.weights(), plain.weights())
    run.optimizer.zero_grad()
    backward(run, ignored=True)
    run.optimizer.step()
    assert not caplog.records and all(weights.isfinite().all() for weights in run.weights())


@every_optimizer
def test_step_without_any_curvature_says_how(make: Callable) -> None:
    run = Run(make)
    before = run.weights()
    run.loss(0).backward()
    with pytest.raises(CurvoptError, match=r"with optimizer\.curvature\(\)"):
        run.optimizer.step()
    with run.optimizer.curvature(loss_scale=0.0):
        run.loss(0).backward()
    with pytest.raises(CurvoptError, match="all curvature so far was not finite"):
        run.optimizer.step()
    assert_equal(run.weights(), before)
    run.train(1)


@sgd_like
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_the_loss_may_be_scaled_by_any_number(make: Callable, scale: float) -> None:
    """Where squares of gradients are zero or infinite the clip is not as documented, but nothing ends in nan."""
    plain, scaled = (Run(make, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))) for _ in range(2))
    for factor, run in ((1.0, plain), (scale, scaled)):
        for step in range(3):
            run.optimizer.zero_grad()
            with run.optimizer.curvature():
                (factor * run.loss(step)).backward()
            with contextlib.suppress(CurvoptError):  # no curvature that is finite
                run.optimizer.step()
    if 1e-16 < scale < 1e16:
        assert_close(scaled.weights(), plain.weights(), rtol=0.0, atol=1e-3)
    assert all(weights.isfinite().all() for weights in scaled.weights())


@every_optimizer
def test_curvature_of_foreign_parameters_says_extend(make: Callable) -> None:
    run = Run(make)
    stranger = extend(mlp())
    with pytest.raises(CurvoptError, match=r"extend\(model\)"), run.optimizer.curvature():
        run.lossfunc(stranger(run.x[:4]), run.y[:4]).backward()
    with pytest.raises(CurvoptError, match="extend"), run.optimizer.curvature():
        nn.CrossEntropyLoss()(mlp()(run.x[:4]), run.y[:4]).backward()
    run.train(1)


@every_optimizer
def test_an_exception_drops_the_curvature_of_its_context(make: Callable) -> None:
    clean, hit = Run(make), Run(make)
    with pytest.raises(KeyError), hit.optimizer.curvature():
        hit.loss(7).backward()
        raise KeyError
    hit.optimizer._run.sampler = hit.optimizer._run.sampler[0], 0
    hit.optimizer.zero_grad()
    assert_equal(clean.train(3).weights(), hit.train(3).weights())


@every_optimizer
def test_sparse_gradients_are_refused(make: Callable) -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = make([("table", weight)])
    weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(CurvoptError, match="table.*dense gradient.*sparse=False"):
        optimizer.step()


@every_optimizer
@pytest.mark.parametrize("options", [{"ema": 1.0}, {"curvature_every": 0}, {"lr": -1.0}])
def test_options_out_of_range_are_refused(make: Callable, options: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        make([nn.Parameter(torch.ones(2))], **options)


@sgd_like
@pytest.mark.parametrize("options", [{"damping": -1.0}, {"rms_clip": 0.0}])
def test_dampings_out_of_range_are_refused(make: Callable, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make([nn.Parameter(torch.ones(2))], **options)


def test_unknown_kinds_of_curvature_are_refused() -> None:
    wrong: list[tuple[Callable, dict[str, Any]]] = [
        (KFACSGD, {"fisher": "true"}),
        (KFACAdamW, {"approx": "sum"}),
        (EKFACSGD, {"max_factor_size": 0}),
        (DiagonalNewton, {"curvature": "variance"}),
        (DiagonalNewton, {"mc_samples": 0}),
        (DiagonalNewton, {"modify": "square"}),
    ]
    for kind, option in wrong:
        with pytest.raises(ValueError, match=next(iter(option))):
            kind([nn.Parameter(torch.ones(2))], **option)


class PartlyExtended(nn.Module):
    """Only ``body`` is extended: the curvature never sees ``head``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_coverage_and_a_parameter_without_curvature() -> None:
    x, y = digits()
    model = PartlyExtended()
    extend(model.body)
    lossfunc = extend(nn.CrossEntropyLoss())
    optimizer = KFACSGD(model.named_parameters(), momentum=0.0, rms_clip=None, lr=1.0, damping=0.05)
    assert set(optimizer.coverage().values()) == {"none"}
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.curvature():
        lossfunc(model(x[:64]), y[:64]).backward()
    with pytest.warns(CurvoptWarning, match="for head.weight, head.bias, which are of no extended module"):
        optimizer.step()
    assert optimizer.coverage() == {
        "body.1.weight": "kronecker",
        "body.1.bias": "dense",
        "head.weight": "none",
        "head.bias": "none",
    }
    curvature, count = 0.0, 0
    for p in model.body.parameters():
        curvature += kfacs_to_mat(optimizer.state[p]["curvature"].factors).trace()
        count += p.numel()
    for p, old in zip(model.head.parameters(), before[2:], strict=True):
        torch.testing.assert_close(old - p.detach(), p.grad / (curvature / count + 0.05))


@every_optimizer
def test_groups_of_modules_may_have_the_same_names(make: Callable) -> None:
    run = Run(make)
    groups = [{"params": run.model[i].named_parameters()} for i in (1, 3)]
    run.optimizer = make([*groups, {"params": zip(("out", "shift"), run.model[5].parameters(), strict=True)}])
    coverage = run.train(1).optimizer.coverage()
    assert list(coverage) == [f"{name} (group {i})" for i in (0, 1) for name in ("weight", "bias")] + ["out", "shift"]
    run.backward(1)
    run.model[3].weight.grad[0, 0] = math.nan
    with pytest.raises(CurvoptError, match=r"^gradient of weight \(group 1\) is not finite"):
        run.optimizer.step()


@every_optimizer
def test_every_kind_of_factor_trains(make: Callable) -> None:
    run = Run(make, Tokens)
    before, weights = run.full_loss(), run.weights()
    assert run.train(15).full_loss() < before
    assert not any(torch.equal(a, b) for a, b in zip(run.weights(), weights, strict=True))
    if isinstance(run.optimizer, KFACSGD):
        kinds = list(run.optimizer.coverage().values())
        assert kinds == ["kronecker", "dense", "dense", "kronecker", "dense", "kronecker", "dense"]
        assert run.optimizer.state[run.model.embed.weight]["curvature"].factors[0].ndim == 1


@every_optimizer
def test_parameters_added_during_training(make: Callable) -> None:
    run = Run(lambda params, **options: make(list(params)[2:], **options))
    run.train(12)
    late = list(run.model.parameters())[:2]
    before = [p.detach().clone() for p in late]
    run.optimizer.add_param_group({"params": late, "lr": 0.01})
    run.train(range(12, 13))
    assert list(run.optimizer.coverage().values()).count("none") == 0
    assert not any(torch.equal(p, q) for p, q in zip(late, before, strict=True))


@every_optimizer
def test_the_first_group_may_be_empty(make: Callable) -> None:
    grouped, plain = Run(lambda params, **options: make([{"params": []}, {"params": params}], **options)), Run(make)
    assert_equal(grouped.train(3).weights(), plain.train(3).weights())


@every_optimizer
def test_an_emptied_state_is_filled_again(make: Callable) -> None:
    run = Run(make).train(7)
    run.optimizer.state.clear()
    run.train(range(7, 8))
    assert "none" not in run.optimizer.coverage().values()
    before = run.full_loss()
    assert run.train(range(8, 40)).full_loss() < before


@every_optimizer
def test_parameters_of_no_extended_module_are_told_of_once(make: Callable) -> None:
    run = Run(make).train(5)
    run.model[5] = nn.Linear(32, 10)
    run.optimizer.add_param_group({"params": list(run.model[5].parameters())})
    with pytest.warns(CurvoptWarning, match=r"for 1\.0, 1\.1, which are of no extended module.*attach\(model\)"):
        run.train(range(5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(range(6, 20))
        extend(run.model)
        run.train(range(20, 40))
        covered = Run(make).train(3)
        covered.model[1].requires_grad_(False)
        covered.train(range(3, 6))
    assert list(run.optimizer.coverage().values())[-2:] != ["none", "none"]


class TiedHeads(nn.Module):
    """One matrix as an embedding, and as a linear layer on what it embeds or on features."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if x.is_floating_point() else self.table(x)


@pytest.mark.parametrize("accumulated", [True, False])
@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_weight_of_two_kinds_of_use_trains(make: Callable, accumulated: bool) -> None:
    """Its curvature is that of the first backward of a step, and begins anew where another kind comes."""
    model, lossfunc = extend(TiedHeads()), extend(nn.CrossEntropyLoss())
    optimizer = make(model.parameters(), fisher="exact")
    features, indices, y = torch.randn(8, 4), torch.randint(4, (8,)), torch.randint(4, (8,))
    sizes = []
    with pytest.warns(CurvoptWarning, match=r"several forms for .*: .*layers of different kinds") as said:
        for x in (features, indices, features):
            if not accumulated:
                optimizer.zero_grad()
            with optimizer.curvature():
                lossfunc(model(x), y).backward()
            if not accumulated:
                optimizer.step()
                sizes.append([factor.ndim for factor in optimizer.state[model.table.weight]["curvature"].factors])
        optimizer.step()
    assert len(said) == 1
    assert sizes == ([] if accumulated else [[2, 2], [1, 2], [2, 2]])
    assert all(p.isfinite().all() for p in model.parameters())


def test_moments_are_those_of_the_parameter_again_where_curvature_begins_anew() -> None:
    run = Run(KFACAdamW, dtype=torch.float64).train(3)
    p = run.model[3].weight
    state = run.optimizer.state[p]
    (left, right), moment = state["curvature"].bases, state["exp_avg"].clone()
    run.optimizer._forget(p)
    torch.testing.assert_close(state["exp_avg"], left @ moment @ right.mT)
    assert state["curvature"].bases is None and state["curvature"].factors is None


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_weight_that_is_pruned_during_training_begins_anew(make: Callable) -> None:
    run = Run(make, curvature_every=1).train(3)
    prune.l1_unstructured(run.model[3], "weight", 0.3)
    with pytest.warns(CurvoptWarning, match=r"several forms for (0\.2|3\.weight): .*pruned"):
        run.train(1)
    run.train(30)
    assert run.optimizer.coverage()["0.2"] == "dense" and run.full_loss() < 1


def test_losses_by_two_kinds_of_use_are_refused() -> None:
    model, lossfunc = extend(TiedHeads()), extend(nn.CrossEntropyLoss())
    x, indices, y = torch.randn(8, 4), torch.randint(4, (8,)), torch.randint(4, (8,))
    with pytest.raises(CurvoptError, match=r"weight: .*calls of different kinds.*kflr"), backpack(KFLR()):
        (lossfunc(model(x), y) + lossfunc(model(indices), y)).backward()


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_no_damping_leaves_out_directions_without_curvature(make: Callable) -> None:
    run = Run(make, damping=0.0, fisher="exact")  # some pixels are zero everywhere
    run.train(1)
    assert max(weights.abs().max() for weights in run.weights()) < 1e4


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, DiagonalNewton])
def test_without_damping_inputs_may_be_zero_at_first(make: Callable) -> None:
    torch.manual_seed(0)
    model, lossfunc = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4)), nn.CrossEntropyLoss()
    x = torch.randn(64, 10)
    y = (x @ torch.randn(10, 4)).argmax(1)
    optimizer = make(model.parameters(), damping=0.0)
    optimizer.attach(model, lossfunc)
    for step in range(30):
        optimizer.zero_grad()
        lossfunc(model(x * (step >= 10)), y).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@every_optimizer
def test_parameters_without_curvature_may_have_another_dtype(make: Callable) -> None:
    other = nn.Parameter(torch.ones(2).double())
    run = Run(lambda params, **options: make([*params, other], **options))
    run.backward(0)
    other.grad = torch.ones(2).double()
    run.optimizer.step()
    assert other.dtype == torch.float64 and (other < 1).all()


def test_state_of_other_options_begins_anew() -> None:
    state = Run(KFACSGD).train(1).optimizer.state_dict()
    run = Run(KFACSGD, max_factor_size=8)
    run.optimizer.load_state_dict(state)
    with pytest.warns(CurvoptWarning, match="several forms"):
        run.train(1)
    assert run.optimizer.state[run.model[1].weight]["curvature"].factors[0].ndim == 4


@every_optimizer
def test_batches_that_are_not_finite_may_be_skipped(make: Callable) -> None:
    skipping, plain = Run(make, on_nonfinite="skip"), Run(make)
    for step in range(5):
        for run in (skipping, plain):
            run.backward(step)
            run.optimizer.step()
        before = skipping.weights()
        skipping.optimizer.zero_grad()
        with skipping.optimizer.curvature():
            (skipping.loss(step) * math.nan).backward()
        skipping.optimizer.step()
        assert_equal(before, skipping.weights())
    assert skipping.optimizer.metrics()["skipped"] == 5
    if "mc" not in str(skipping.optimizer.defaults):
        assert_equal(skipping.weights(), plain.weights())


@every_optimizer
def test_one_bad_batch_does_not_stall_the_training(make: Callable) -> None:
    losses = []
    for scale in (1.0, 1000.0):
        run = Run(make)
        for step in range(60):
            run.optimizer.zero_grad()
            x, y = run.data(step)
            with run.optimizer.curvature():
                run.lossfunc(run.model(x * (scale if step == 3 else 1)), y).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
        losses.append(run.full_loss())
    assert losses[1] < 2 * losses[0] + 0.1


@every_optimizer
def test_complex_parameters_are_refused(make: Callable) -> None:
    with pytest.raises(CurvoptError, match="complex"):
        make([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = make([nn.Parameter(torch.ones(2))])
    with pytest.raises(CurvoptError, match="complex"):
        optimizer.add_param_group({"params": iter([nn.Parameter(torch.ones(2, dtype=torch.complex64))])})
    assert len(optimizer.param_groups) == 1


@every_optimizer
def test_a_group_without_gradients_stays(make: Callable) -> None:
    run = Run(lambda params, **options: make([{"params": each} for each in params], **options))
    weight, bias = run.model[1].weight.requires_grad_(False), run.model[1].bias
    before, moved = weight.clone(), bias.clone()
    run.train(2)
    assert torch.equal(weight, before) and not torch.equal(bias, moved)


@every_optimizer
def test_a_parameter_that_is_unfrozen_does_not_wait_for_the_interval(make: Callable) -> None:
    """It is preconditioned by its own curvature from when it has some, as ``coverage()`` says."""
    run = Run(make, curvature_every=1)
    run.optimizer.inverse_every = 100
    weight = run.model[1].weight.requires_grad_(False)
    run.train(20)
    kept, field = curvature_of(run.optimizer.state[weight]), run.optimizer._solver.field
    assert kept.factors is None and not any(tensor.ndim for tensor in getattr(kept, field))
    weight.requires_grad_(True)
    for step in range(2):
        run.backward(step)
        run.optimizer.step()
        made = getattr(kept, field)
        assert (kept.factors is not None) == bool(made and made[0].ndim)
    assert kept.factors is not None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, DiagonalNewton])
def test_unfreezing_the_first_layer_does_not_raise_the_loss(kind: Callable, seed: int) -> None:
    run = Run(kind, seed=seed)
    frozen = [*run.model[1].parameters()]
    for param in frozen:
        param.requires_grad_(False)
    before = run.train(40).full_loss()
    for param in frozen:
        param.requires_grad_(True)
    worst = max(run.train(range(step, step + 1)).full_loss() for step in range(40, 60))
    assert worst < 1.3 * before and all(curvature_of(run.optimizer.state[param]).factors for param in frozen)


@sgd_like
def test_metrics(make: Callable) -> None:
    run = Run(make, momentum=0.0)
    before = run.weights()
    run.train(1)
    metrics = {name: float(value) for name, value in run.optimizer.metrics().items()}
    moved = torch.cat([(a - b).flatten() for a, b in zip(run.weights(), before, strict=True)])
    grad = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    assert metrics["step_norm"] == pytest.approx(moved.norm().item(), rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(grad.norm().item(), rel=1e-4)
    assert metrics["cosine"] == pytest.approx(-(moved @ grad / moved.norm() / grad.norm()).item(), rel=1e-3)
    entries = moved[grad != 0] / run.optimizer.param_groups[0]["lr"]
    assert metrics["rms"] == pytest.approx(entries.square().mean().sqrt().item(), rel=1e-3)
    free = Run(make, momentum=0.0, rms_clip=None).train(1)
    whole = torch.cat([(a - b).flatten() for a, b in zip(free.weights(), before, strict=True)])
    assert metrics["clip_factor"] == pytest.approx((moved.norm() / whole.norm()).item(), rel=1e-3)
    assert metrics["clip_factor"] < 0.9 and float(free.optimizer.metrics()["clip_factor"]) == pytest.approx(1)
    damping = damping_of(run.optimizer.param_groups[0], run.optimizer._run.mean_curvature)
    assert metrics["damping"] == float(damping) and metrics.get("fallbacks", 0) == 0


@every_optimizer
@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        ("rms_clip", -1.0, "positive"),
        ("rms_clip", math.nan, "positive"),
        ("ema", 1.5, "in"),
        ("damping", -1.0, "at least 0"),
        ("damping", math.nan, "at least 0"),
    ],
)
def test_options_that_leave_their_range_change_nothing(make: Callable, name: str, value: float, range_: str) -> None:
    run = Run(make).train(2)
    weights, state = run.weights(), copy.deepcopy(run.optimizer.state_dict()["state"])
    if name == "rms_clip":
        run.optimizer.rms_clip = value
    else:
        run.optimizer.param_groups[0][name] = value
    where = "" if name == "rms_clip" else " of param group 0"
    with pytest.raises(CurvoptError, match=rf"{name}{where} is {value}, but must be {range_}"):
        run.train(range(2, 3))
    assert_equal(run.weights(), weights)
    torch.testing.assert_close(run.optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*in the loss by another path")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_parameters_without_entries(name: str, used: bool) -> None:
    run, other = (Run(OPTIMIZERS[name], cnn, dtype=torch.float64) for _ in range(2))
    empty = nn.Parameter(torch.empty(0))
    run.model.register_parameter("empty", empty)
    run.optimizer.add_param_group({"params": [empty]})
    run.optimizer.attach(run.model)
    for step in range(3):
        run.optimizer.zero_grad()
        (run.loss(step) + (empty.sum() if used else 0.0)).backward()
        run.optimizer.step()
    assert_close(run.weights()[1:], other.train(3).weights())


# ------------------------------------------------------------------------------------------------------------ closures


def closure_of(run: Run, step: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("attached", [False, True])
def test_closures_may_open_contexts_themselves(attached: bool) -> None:
    """``curvature()``, as without a closure, or fields for the user's own purposes."""
    plain, run = (Run(KFACSGD, curvature_every=1) for _ in range(2))
    if attached:
        run.optimizer.attach(run.model, run.lossfunc)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        with backpack(BatchGrad()) if attached else run.optimizer.curvature():
            loss = run.loss(0)
            loss.backward()
        return loss

    for _ in range(7):
        plain.optimizer.step(closure_of(plain, 0))
        run.optimizer.step(closure)
    assert_equal(plain.weights(), run.weights())
    assert plain.optimizer.metrics() == run.optimizer.metrics()
    assert all(hasattr(p, "grad_batch") for p in run.model.parameters()) == attached
