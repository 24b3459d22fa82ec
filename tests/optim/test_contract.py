"""What every optimizer promises. A new optimizer is one row in ``OPTIMIZERS`` of `optimizer_cases`.

Tests of `optim/step.py`, `optim/step_size.py`, `optim/state.py`, `optim/curvature.py` and `optim/diagonal_newton.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Net
from checks import Calls
from optimizer_cases import (
    EXACT,
    OPTIMIZERS,
    Run,
    Tokens,
    assert_close,
    assert_equal,
    cnn,
    counters,
    covered,
    digits,
    every_optimizer,
    mlp,
    numbers,
    resume_with,
    sgd_like,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.utils import prune

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact
from curvopt.kroneckers import kfacs_to_mat
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW
from curvopt.optim.accumulation import number
from curvopt.optim.curvature import Listening, Quantity, annealed_interval
from curvopt.optim.state import curvature_of, unpacked
from curvopt.optim.step_size import damping_of, rms_clip_factor

DOUBLE: dict[str, Any] = {"dtype": torch.float64}

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
def test_one_batch_out_of_all_proportion_does_not_spoil_the_training(make: Callable) -> None:
    """Neither moments, whose mean squares would be 1e8 times as large, nor the curvature, where that is due."""

    def loss_after(bad: int) -> float:
        run = Run(make, cnn, seed=1)

        def loss(step: int) -> Tensor:
            x, y = run.data(step)
            return run.lossfunc(run.model(1e4 * x if step == bad else x), y)

        return run.train(100, loss).full_loss()

    usual, due = loss_after(-1), 25
    assert max(loss_after(20), loss_after(due)) < 1.5 * usual


# ------------------------------------------------------------------------------------------------------ the mathematics

PLAIN: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "damping": 0.3, "rms_clip": None, **DOUBLE}


def test_kfac_step_is_the_dense_solve() -> None:
    damping = PLAIN["damping"]
    run = Run(KFACSGD, cnn, fisher="exact", **PLAIN)
    moves = run.moves()
    for p, moved, factors in zip(run.model.parameters(), moves, run.factors(), strict=True):
        solution = []
        for group, piece in enumerate(p.grad.reshape(2 if factors[0].ndim == 3 else 1, -1)):
            chosen = [factor[group] if factor.ndim == 3 else factor for factor in factors]
            eyes = [torch.eye(factor.shape[-1], dtype=torch.float64) for factor in chosen]
            if len(chosen) == 2:
                (b, a), (eye_b, eye_a) = chosen, eyes
                pi = ((a.trace() / len(a)) / (b.trace() / len(b))).sqrt()
                matrix = kfacs_to_mat([b + damping**0.5 / pi * eye_b, a + pi * damping**0.5 * eye_a])
            else:
                matrix = chosen[0] + damping * eyes[0]
            solution.append(torch.linalg.solve(matrix, piece))
        torch.testing.assert_close(-moved, torch.stack(solution).reshape(p.shape) * (p.grad != 0))


def test_diagonal_step_is_the_elementwise_quotient() -> None:
    run = Run(DiagonalNewton, curvature="diag_ggn_exact", **PLAIN)
    moves = run.moves()
    for p, moved, (h,) in zip(run.model.parameters(), moves, run.factors(), strict=True):
        torch.testing.assert_close(-moved, p.grad / (h.view_as(p) + 0.3))


def test_small_entries_of_the_first_diagonal_are_raised_to_its_mean_and_of_no_later_one() -> None:
    run, seen = Run(DiagonalNewton, curvature="diag_ggn_exact", curvature_every=1, ema=0.5, **DOUBLE), []
    kept = []
    for step in range(2):
        with backpack(DiagGGNExact()):
            run.loss(step).backward()
        seen.append([p.diag_ggn_exact.flatten() for p in run.model.parameters()])
        run.step(step)
        kept.append([factors[0].clone() for factors in run.factors()])
    for one, two, start, end in zip(*seen, *kept, strict=True):
        assert (one < one.mean()).any() and (two < two.mean()).any()
        torch.testing.assert_close(start, torch.maximum(one, one.mean()))
        torch.testing.assert_close(end, (start / 2 + two) / 1.5)


@pytest.mark.parametrize(("name", "extension"), [("KFACSGD exact", KFLR()), ("DiagonalNewton exact", DiagGGNExact())])
def test_the_exact_factors_are_those_of_the_extension(name: str, extension: Any) -> None:
    run = Run(OPTIMIZERS[name], cnn, **DOUBLE)
    with backpack(extension):
        run.loss(0).backward()
    fields = [getattr(p, extension.field) for p in run.model.parameters()]
    for field, factors in zip(fields, run.train(1).factors(), strict=True):
        assert_close(factors, field if isinstance(field, list) else [field.reshape(-1).clamp(min=field.mean())])


@pytest.mark.parametrize("name", ["KFACSGD", "EKFACSGD", "DiagonalNewton"])
def test_averages_forget_by_the_steps_of_each_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that rests forgets nothing, and a resumed run forgets alike."""
    decays: dict[str, list[float]] = {}

    def average(quantity: Any, param: Tensor, kept: Any, new: Any, decay: float) -> Any:
        decays.setdefault(str(param.shape), []).append(decay)
        return plain(quantity, param, kept, new, decay)

    plain = Quantity.average
    monkeypatch.setattr(Quantity, "average", average)
    run = Run(OPTIMIZERS[name], ema=0.5, curvature_every=4).train(3)
    resting, *_, trained = run.model.parameters()
    resting.requires_grad_(False)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.train(range(3, 13))
    resting.requires_grad_(True)
    run.train(range(13, 15))
    assert decays[str(resting.shape)] == [0.5**age for age in (1, 1, 2)]  # in its steps 0, 1 and 3
    assert decays[str(trained.shape)] == [0.5**age for age in (1, 1, 4, 4, 4)]


def test_numbers_of_the_state_are_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert number(0.5).item() == 0.5


@pytest.mark.parametrize(("growth", "first"), [(1, [1, 1, 2, 4]), (4, [1, 4, 10])])
def test_annealed_interval_grows_from_one(growth: int, first: list[int]) -> None:
    steps, gaps = 0, list[int]()
    while steps < 400:
        gaps.append(annealed_interval(steps, 10, growth))
        steps += gaps[-1]
    assert gaps[: len(first)] == first and gaps[-20:] == [10] * 20 and gaps == sorted(gaps)


@sgd_like
def test_rms_clip_counts_weights_by_their_inputs_and_schedules_act_on_clipped_steps(make: Callable) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10))

    clips = ((1.0, 1e-4), (2.0, 1e-4), (1.0, None))
    run, fast, free = (Run(make, wide, lr=lr, momentum=0.0, rms_clip=clip, **DOUBLE) for lr, clip in clips)
    moves, twice, whole = run.moves(), fast.moves(), free.moves()
    for moved, param, more in zip(moves, run.model.parameters(), (1, 1, 4, 1), strict=True):
        assert more * float(moved.square().sum() / (param.grad != 0).sum()) == pytest.approx(1e-8)
    assert_close(moves, [u * moved.norm() / u.norm() for u, moved in zip(whole, moves, strict=True)])
    assert_close([2 * moved for moved in moves], twice)


def test_rms_clip_never_lengthens_and_accepts_no_step() -> None:
    for rms in (0.0, 1e-12, 1.0, 1e12, float("inf"), float("nan")):
        assert 0 <= rms_clip_factor(torch.tensor(rms), 1e-3) <= 1
    assert rms_clip_factor(torch.tensor(5.0), None) == 1


# -------------------------------------------------------------------------------------------- what torch.optim gives us


@sgd_like
@pytest.mark.parametrize("nesterov", [False, True])
def test_step_is_the_sgd_step_on_the_preconditioned_gradient(make: Callable, nesterov: bool) -> None:
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov}
    run, without = (Run(make, **DOUBLE, **kept, curvature_every=3) for kept in (options, {"momentum": 0.0}))
    twin = [nn.Parameter(p.detach().clone()) for p in run.model.parameters()]
    sgd = torch.optim.SGD(twin, **options)
    for step in range(6):
        without.load(run).optimizer.param_groups[0].update(lr=1.0, momentum=0.0, nesterov=False)
        run.step(step)
        for q, moved in zip(twin, without.moves(step), strict=True):
            q.grad = -moved
        sgd.step()
        assert_close(run.weights(), [q.detach() for q in twin])


@pytest.mark.parametrize(("make", "call"), [(KFACSGD, "_fused_sgd_"), (KFACAdamW, "_fused_adamw_")])
def test_a_step_on_the_cpu_moves_all_parameters_by_one_call(make: Callable, call: str) -> None:
    run = Run(make).train(1)
    run.backward(1)
    with Calls() as calls:
        run.optimizer.step()
    assert [name for name, _ in calls.entries].count(call) == 1


@every_optimizer
def test_weight_decay_is_decoupled(make: Callable) -> None:
    plain, decayed = (Run(make, lr=0.1, weight_decay=wd, **DOUBLE) for wd in (0.0, 0.5))
    before = plain.weights()
    expected = [moved - 0.1 * 0.5 * weight for moved, weight in zip(plain.moves(), before, strict=True)]
    assert_close(decayed.moves(), expected)
    assert decayed.optimizer.param_groups[0]["weight_decay"] == 0.5


@sgd_like
def test_param_groups(make: Callable) -> None:
    def grouped(params: Iterator[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        first, second, *rest = params
        return make([{"params": [first], "lr": 0.0}, {"params": [second], "damping": 1e6}, {"params": rest}], **options)

    run = Run(grouped, momentum=0.0, **DOUBLE)
    lengths = [float(moved.norm()) for moved in run.moves()]
    assert lengths[0] == 0 and 0 < lengths[1] < 1e-6 and min(lengths[2:]) > 1e-5
    assert [group["damping"] for group in run.optimizer.param_groups][1] == 1e6


@every_optimizer
def test_learning_rate_schedule(make: Callable) -> None:
    """Of a number, and of a tensor."""
    runs = [Run(make, lr=lr) for lr in (0.05, torch.tensor(0.05))]
    for run in runs:
        scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: float(step < 3))
        for step in range(3):
            run.step(step)
            scheduler.step()
        assert not any(moved.any() for moved in run.moves(3))
    assert_close(runs[0].weights(), runs[1].weights(), atol=1e-6, rtol=1e-4)


@every_optimizer
def test_a_step_leaves_the_callers_things_alone(make: Callable) -> None:
    """Hooks run once; gradients, attributes of parameters and the global random numbers stay."""
    torch.optim.SGD([torch.zeros(1)])  # from now on SGD.step itself is wrapped to run hooks
    run, calls = Run(make, cnn), []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    attributes, drawn = [set(p.__dict__) for p in run.model.parameters()], torch.get_rng_state()
    run.backward(0)
    assert [set(p.__dict__) for p in run.model.parameters()] == attributes
    grads = [p.grad for p in run.model.parameters()]
    values = [grad.clone() for grad in grads]
    run.optimizer.step()
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), grads, strict=True))
    assert_equal(grads, values)
    assert calls == ["pre", "post"]
    run.train(range(1, 3))
    assert torch.equal(torch.get_rng_state(), drawn)


# ---------------------------------------------------------------------------------------------- loops with equal steps


def evaluated(run: Run, step: int) -> Tensor:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward()
    return loss


def closure(run: Run, step: int) -> None:
    assert run.optimizer.step(lambda: evaluated(run, step)).requires_grad


def closure_that_asks_for_fields(run: Run, step: int) -> None:
    def evaluate() -> Tensor:
        with backpack(BatchGrad()):
            return evaluated(run, step)

    run.optimizer.step(evaluate)
    assert all(hasattr(p, "grad_batch") for p in run.model.parameters())


def after_an_exception(run: Run, step: int) -> None:
    sampler = counters(run.optimizer)["sampler"]

    def fail(grad: Tensor) -> None:
        raise KeyError

    loss, weight = run.loss(7), next(run.model.parameters())
    handle = weight.register_hook(fail)
    with pytest.raises(KeyError):
        loss.backward()
    handle.remove()
    resume_with(run.optimizer, sampler=sampler)
    run.step(step)


LOOPS = [closure, closure_that_asks_for_fields, after_an_exception]


@pytest.mark.parametrize("loop", LOOPS)
@every_optimizer
def test_a_loop_takes_the_steps_of_the_plain_one_bit_for_bit(make: Callable, loop: Callable) -> None:
    plain, run = (Run(make, cnn, curvature_every=3) for _ in range(2))
    for step in range(6):
        loop(run, step)
        plain.step(step)
        assert_equal(run.weights(), plain.weights())
    assert run.optimizer.metrics() == plain.optimizer.metrics()


@every_optimizer
def test_the_first_group_may_be_empty(make: Callable) -> None:
    grouped, plain = Run(lambda params, **options: make([{"params": []}, {"params": params}], **options)), Run(make)
    assert_equal(grouped.train(3).weights(), plain.train(3).weights())


# ----------------------------------------------------------------------------------------------- what damping refers to


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_relative_damping_is_in_units_of_the_smaller_mean_curvature(make: Callable) -> None:
    """Of a parameter and of all; steps are those of these absolute dampings."""
    options: dict[str, Any] = {"rms_clip": None, "fisher": "exact", **DOUBLE}
    relative = Run(make, relative_damping=3.0, **options).train(1)
    blocks = [kfacs_to_mat(factors).diagonal() for factors in relative.factors()]
    means, of_all = [float(block.mean()) for block in blocks], float(torch.cat(blocks).mean())
    assert min(means) < of_all < max(means)
    assert float(relative.optimizer.metrics()["damping"]) == pytest.approx(3.0 * of_all)

    def by_parameter(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
        groups = zip(params, means, strict=True)
        return make([{"params": [p], "damping": 3.0 * min(mean, of_all)} for p, mean in groups], **options)

    assert_close(relative.weights(), Run(by_parameter, **options).train(1).weights())


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_no_relative_damping_is_no_damping(make: Callable) -> None:
    """Directions without curvature, as of pixels that are zero everywhere, are left out."""
    options: dict[str, Any] = {"rms_clip": None, "fisher": "exact", **DOUBLE}
    runs = [Run(make, **damping, **options).train(2) for damping in ({"relative_damping": 0.0}, {"damping": 0.0})]
    assert_equal(*(run.weights() for run in runs))
    assert max(weights.abs().max() for weights in Run(make, damping=0.0, fisher="exact").train(1).weights()) < 1e4


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, DiagonalNewton])
def test_without_damping_inputs_may_be_zero_at_first(make: Callable) -> None:
    run = Run(make, damping=0.0)
    x, run.x = run.x, torch.zeros_like(run.x)
    run.train(10)
    run.x = x
    assert all(weight.isfinite().all() for weight in run.train(range(10, 30)).weights())


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_a_run_with_a_chosen_fisher_is_resumed_without_one(make: Callable, fisher: str) -> None:
    run = Run(make).load(Run(make, fisher=fisher).train(3))
    before = run.full_loss()
    assert run.train(range(3, 40)).full_loss() < before


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_damping_of_a_parameter_without_curvature_is_that_of_all(make: Callable) -> None:
    run = Run(make, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)), fisher="exact")
    nn.init.constant_(run.model[1].bias, -100.0)  # dead units
    moves = run.moves()
    assert not any(factor.any() for factor in run.factors()[1])
    assert all(torch.isfinite(weight).all() for weight in run.weights())
    assert [bool(moved.any()) for moved in moves] == [False, False, False, True]  # the second weight sees zeros alone


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD])
def test_where_there_is_no_curvature_at_all_steps_are_those_of_gradients(make: Callable) -> None:
    model = nn.Linear(3, 1)
    optimizer = make(model, lr=0.1, momentum=0.0, fisher="exact", rms_clip=None)
    nn.MSELoss()(model(torch.zeros(4, 3)) * 0.0, torch.ones(4, 1)).backward()
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
        resume_with(optimizer, several=several if known else None)
        for step in range(5):
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            z = model(x) if several else model(x).sum(1, keepdim=True)
            lossfunc(z, y if several else y[:, :1]).backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert_close(*weights)


# ------------------------------------------------------------------------------------------------------------- schedule


@every_optimizer
def test_curvature_is_computed_when_due_and_costs_nothing_otherwise(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make, curvature_every=4)
    computed: list[int] = []
    finished = Listening.finished
    monkeypatch.setattr(Listening, "finished", lambda *args: computed.append(step) or finished(*args))
    for step in range(24):
        run.step(step)
    expected, due = [], 0
    while due < 24:
        expected.append(due)
        due += annealed_interval(due, 4, growth=4)
    assert computed == expected


def test_inverses_follow_their_own_interval() -> None:
    run = Run(KFACSGD, curvature_every=1, inverse_every=5)
    p = next(run.model.parameters())
    changed = []
    for step in range(40):
        before = [inverse.clone() for inverse in curvature_of(run.optimizer.state[p]).inverses or []]
        run.step(step)
        if not before or not all(map(torch.equal, run.optimizer.state[p]["curvature"].inverses, before)):
            changed.append(step)
    assert changed[:3] == [0, 1, 5] and {b - a for a, b in zip(changed[-3:], changed[-2:], strict=False)} == {5}


@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_parameter_that_is_new_is_solved_for_at_once_and_no_other_again(kind: Callable) -> None:
    run = Run(lambda params, **options: kind(list(params)[2:], **options), mlp, curvature_every=1, inverse_every=100)
    run.train(40)

    def renewals(steps: range) -> Iterator[int]:
        for step in steps:
            before = counters(run.optimizer)["next_inverse"]
            run.step(step)
            if counters(run.optimizer)["next_inverse"] != before:
                yield step

    assert list(renewals(range(40, 43))) == []
    late = list(run.model.parameters())[:2]
    before = [p.detach().clone() for p in late]
    run.optimizer.add_param_group({"params": late})
    assert list(renewals(range(43, 47))) == [43] and covered(run.optimizer)
    assert not any(torch.equal(p, q) for p, q in zip(late, before, strict=True))


# ----------------------------------------------------------------------------------------------------------- checkpoint


def by_file(first: Run, second: Run) -> Run:
    return second.load(first)


def by_copy(first: Run, second: Run) -> Run:
    return copy.deepcopy(first)


def by_pickle(first: Run, second: Run) -> Run:
    return pickle.loads(pickle.dumps(first))


def by_loading_into_tensors(first: Run, second: Run) -> Run:
    """As torch.distributed.checkpoint does."""
    into = {"state": second.train(1).optimizer.state_dict()["state"]}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"state": first.optimizer.state_dict()["state"]}, checkpoint_id=folder, no_dist=True)
        dcp.load(into, checkpoint_id=folder, no_dist=True)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict({**first.optimizer.state_dict(), **into})
    return second


def by_get_and_set_state_dict(first: Run, second: Run, flat: bool = False) -> Run:
    """Of torch.distributed.checkpoint, which finds the names of a state by a step of zero."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    get_state_dict(second.model, second.optimizer, options=options)
    if flat:
        second.train(2)  # one that has a state
    model, state = copy.deepcopy(get_state_dict(first.model, first.optimizer, options=options))
    set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=state, options=options)
    return second


def by_a_flat_state_dict(first: Run, second: Run) -> Run:
    return by_get_and_set_state_dict(first, second, flat=True)


def by_a_state_with_floats(first: Run, second: Run) -> Run:
    """As written before they were tensors."""
    state = copy.deepcopy(first.optimizer.state_dict())
    for values in state["state"].values():
        kept = values["curvature"]
        kept |= {name: float(kept[name]) for name in ("ema_weight", "scales_weight") if name in kept}
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(state)
    return second


def by_a_state_of_earlier_versions(first: Run, second: Run) -> Run:
    """They had our entries beside those of torch, the run beside state and groups, and no metrics."""
    state = copy.deepcopy(first.optimizer.state_dict())
    for values in state["state"].values():
        curvature = vars(unpacked(values))
        del values["curvature"]
        values |= {name: value for name, value in curvature.items() if value is not None}
    state["curvature"] = state["param_groups"][0].pop("run")
    del state["curvature"]["metrics"]
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(state)
    return second


def frozen() -> nn.Module:
    model = mlp()
    model[1].requires_grad_(False)
    return model


WAYS = [by_loading_into_tensors, by_get_and_set_state_dict, by_a_flat_state_dict]
WAYS += [by_a_state_with_floats, by_a_state_of_earlier_versions]
RESUMPTIONS: list[tuple[Callable, Callable, int, torch.dtype]] = [
    *((by_file, cnn, steps, torch.float32) for steps in (1, 11)),
    (by_file, mlp, 5, torch.bfloat16),
    *((way, frozen, 4, torch.float32) for way in (by_file, by_copy, by_pickle)),
    *((way, mlp, 3, torch.float32) for way in WAYS),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("way", "model", "steps", "dtype"), RESUMPTIONS)
@every_optimizer
def test_a_resumed_run_goes_on_bit_for_bit(
    make: Callable, way: Callable, model: Callable, steps: int, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "weight_decay": 0.01, "curvature_every": 3}
    straight = Run(make, model, **options).train(2 * steps)
    first, fresh = Run(make, model, **options).train(steps), Run(make, model, **options)
    torch.manual_seed(4321)  # the sampler must not depend on the global generator
    second = way(first, fresh)
    known = {} if way is by_a_state_of_earlier_versions else first.optimizer.metrics()
    assert second.optimizer.metrics() == known  # those that are measured with inversions, too
    assert_equal(straight.weights(), second.train(range(steps, 2 * steps)).weights())
    torch.testing.assert_close(numbers(straight.optimizer), numbers(second.optimizer), rtol=0, atol=0)
    if dtype == torch.bfloat16:
        assert {factor.dtype for factors in second.factors() for factor in factors} == {torch.float32}


@every_optimizer
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_run_goes_on_in_another_precision(make: Callable, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    first, second = (Run(make, dtype=dtype) for dtype in dtypes)
    second.load(first.train(5))
    losses = [run.train(range(5, 12)).full_loss() for run in (first, second)]  # of other samples, where these are drawn
    assert losses[0] == pytest.approx(losses[1], rel=0.2)
    assert {factor.dtype for factors in second.factors() for factor in factors} == {dtypes[1]}


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize(
    ("before", "after", "of"),
    [
        (torch.float32, torch.float64, "curvature"),
        (torch.float32, torch.bfloat16, "momentum_buffer|exp_avg"),
        (torch.bfloat16, torch.float32, "momentum_buffer|exp_avg"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["KFACSGD", "EKFACSGD", "DiagonalNewton", "KFACAdamW"])
def test_a_model_that_changes_its_precision_says_what_to_do(
    name: str, before: torch.dtype, after: torch.dtype, of: str, steps: int
) -> None:
    """Whether the next step refreshes the curvature or not; curvature of parameters in bfloat16 is in float32."""
    run = Run(OPTIMIZERS[name], dtype=before, weight_decay=0.1).train(steps)
    assert (min(counters(run.optimizer)["due"]) == steps) == (steps == 5)
    run.model.to(after)
    run.x = run.x.to(after)
    weights, state = run.weights(), copy.deepcopy(numbers(run.optimizer)["state"])
    with pytest.raises(CurvoptError, match=rf"keeps its ({of}) in {before},.*load_state_dict"):
        run.train(1)
    assert_equal(weights, run.weights())
    torch.testing.assert_close(numbers(run.optimizer)["state"], state, rtol=0, atol=0)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    loss = run.full_loss()
    assert run.train(range(steps, steps + 10)).full_loss() < loss


@every_optimizer
def test_hooks_see_and_change_all_of_a_checkpoint(make: Callable) -> None:
    """One that is loaded by names, say, as the parameters come in another order."""

    def build(order: int) -> Run:
        return Run(lambda params, **options: make(list(params)[::order], **options), curvature_every=3)

    def reverse(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        loaded, last = optimizer.state_dict(), len(state["state"]) - 1
        assert state["marked"] and loaded["marked"]
        states = {last - index: values for index, values in state["state"].items()}
        loaded["param_groups"][0]["run"] = state["param_groups"][0]["run"]
        return {"param_groups": loaded["param_groups"], "state": states}

    def mark(_: Any, state: dict[str, Any]) -> None:
        state["marked"] = "run" in state["param_groups"][0]

    seen: list[int] = []
    first, second = build(1).train(5), build(-1)
    for run in (first, second):
        run.optimizer.register_state_dict_post_hook(mark)
    second.optimizer.register_load_state_dict_pre_hook(reverse)
    second.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append(counters(optimizer)["step"]))
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
def test_state_of_other_shapes_is_refused(make: Callable) -> None:
    """Of as many entries, even."""
    for change in (lambda p: p.mT, lambda p: p[:-1]):
        other, run = (Run(make, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))) for _ in range(2))
        weight = other.model[1].weight
        weight.data = change(weight.data).contiguous()
        if isinstance(other.optimizer, DiagonalNewton) and len(weight) == 64:
            continue  # a diagonal is flat
        with pytest.raises(CurvoptError, match=r"0\.0 has shape \[\d+, \d+\], but curvature of another one"):
            other.optimizer.load_state_dict(run.train(1).optimizer.state_dict())
        assert not other.optimizer.state and counters(other.optimizer)["step"] == 0


@every_optimizer
@pytest.mark.parametrize("how", ["resized", "loaded"])
def test_moments_of_another_shape_are_refused(make: Callable, how: str) -> None:
    """Kernels of torch would write beyond their memory; of parameters with curvature and without."""
    extras = [nn.Parameter(torch.zeros(n)) for n in (3, 2)]
    runs = [Run(lambda params, extra=extra: make([*params, extra])) for extra in extras]

    def train(run: Run, extra: Tensor) -> None:
        run.train(1, lambda step: run.loss(step) + extra.sum())

    with pytest.warns(CurvoptWarning, match=r"for 0\.6, which are of no extended module"):
        for run, extra in zip(runs, extras, strict=True):
            train(run, extra)
    run = runs[1]
    changed = [*run.model[5].parameters()] if how == "resized" else extras[1:]
    if how == "loaded":
        run.optimizer.load_state_dict(runs[0].optimizer.state_dict())
    for param in changed if how == "resized" else ():
        param.data = torch.cat([param, param[:2]])
    weights, state = run.weights(), copy.deepcopy(numbers(run.optimizer)["state"])
    with pytest.raises(CurvoptError, match=r"keeps its \w+ of another shape.*del optimizer.state\[parameter\]"):
        train(run, extras[1])
    assert_equal(weights, run.weights())
    torch.testing.assert_close(numbers(run.optimizer)["state"], state, rtol=0, atol=0)
    for param in changed:
        del run.optimizer.state[param]
    loss = run.full_loss()
    assert run.train(range(2, 12)).full_loss() < loss


# ---------------------------------------------------------------------------------------------------- errors and limits


@contextlib.contextmanager
def curvature_of_nan() -> Iterator[None]:
    """Inside, what backwards collect is not finite, though their gradients are."""
    finished = Listening.finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Listening, "finished", lambda self, weight, n: finished(self, weight * math.nan, n))
        yield


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
@pytest.mark.parametrize("how", ["by the model", "by the optimizer", "closure"])
def test_curvature_goes_with_gradients_that_are_reset(how: str, set_to_none: bool) -> None:
    clean, aborted = (Run(KFACSGD, cnn, fisher="empirical") for _ in range(2))
    clean.train(1)

    def evaluate() -> Tensor:
        (aborted.optimizer if how == "by the optimizer" else aborted.model).zero_grad(set_to_none)
        loss = aborted.loss(0)
        loss.backward()
        return loss

    aborted.backward(1)  # whose step is left out
    if how == "closure":
        aborted.optimizer.step(evaluate)
    else:
        evaluate()
        aborted.optimizer.step()
    assert_equal(clean.weights(), aborted.weights())


@every_optimizer
def test_curvature_that_is_not_finite_never_enters(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(make, ema=0.5, curvature_every=1).train(2)
    before = copy.deepcopy(run.factors())
    with curvature_of_nan():
        run.backward(2)
    with caplog.at_level(logging.WARNING, logger="curvopt"):
        run.optimizer.step()
    assert "not finite" in caplog.text
    torch.testing.assert_close(run.factors(), before, rtol=0, atol=0)
    run.step(3)  # due again at once, and taken
    assert not torch.equal(run.factors()[-1][0], before[-1][0])


@every_optimizer
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_without_targets_change_nothing(
    make: Callable, reduction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At first, later, and among those that accumulate."""

    def backward(run: Run, ignored: bool) -> None:
        x, y = run.data(0)
        run.lossfunc(run.model(x), y.clone().fill_(-100) if ignored else y).backward()

    run, plain = (Run(make, reduction=reduction, ema=0.5) for _ in range(2))
    before, sampler = run.weights(), counters(run.optimizer)["sampler"]
    backward(run, ignored=True)
    run.optimizer.step()
    assert_equal(run.weights(), before)
    resume_with(run.optimizer, sampler=sampler)
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
    before, who = run.weights(), type(run.optimizer).__name__
    forgotten = make(run.model.parameters())
    with curvature_of_nan():
        run.loss(0).backward()
    with pytest.raises(CurvoptError, match=rf"attached to no model.* {who}\(model\)"):
        forgotten.step()
    with pytest.raises(CurvoptError, match=rf"is gone.* {who}\(model\)"):
        forgotten.curvature()
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
            with contextlib.suppress(CurvoptError):  # no curvature that is finite
                run.step(step, lambda step, run=run, factor=factor: factor * run.loss(step))
    if 1e-16 < scale < 1e16:
        assert_close(scaled.weights(), plain.weights(), rtol=0.0, atol=1e-3)
    assert all(weights.isfinite().all() for weights in scaled.weights())


def test_coverage_and_a_parameter_without_curvature() -> None:
    x, y = digits()
    body = extend(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh()))  # the curvature never sees the head
    model: Any = Net(lambda net, x: net.head(net.body(x)), body=body, head=nn.Linear(16, 10))
    lossfunc = extend(nn.CrossEntropyLoss())
    optimizer = KFACSGD(model.named_parameters(), momentum=0.0, rms_clip=None, lr=1.0, damping=0.05)
    optimizer.attach(body)
    assert set(optimizer.coverage().values()) == {"none"}
    before = [p.detach().clone() for p in model.parameters()]
    lossfunc(model(x[:64]), y[:64]).backward()
    with pytest.warns(CurvoptWarning, match="for head.weight, head.bias, which are of no extended module"):
        optimizer.step()
    kinds = {"body.1.weight": "kronecker", "body.1.bias": "dense", "head.weight": "none", "head.bias": "none"}
    assert optimizer.coverage() == kinds
    blocks = [kfacs_to_mat(optimizer.state[p]["curvature"].factors).diagonal() for p in model.body.parameters()]
    for p, old in zip(model.head.parameters(), before[2:], strict=True):
        torch.testing.assert_close(old - p.detach(), p.grad / (torch.cat(blocks).mean() + 0.05))


@every_optimizer
def test_groups_of_modules_may_have_the_same_names(make: Callable) -> None:
    run = Run(make)
    groups = [{"params": run.model[i].named_parameters()} for i in (1, 3)]
    run.optimizer = make([*groups, {"params": zip(("out", "shift"), run.model[5].parameters(), strict=True)}])
    run.optimizer.attach(run.model)
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
        assert run.factors()[0][0].ndim == 1


@every_optimizer
def test_an_emptied_state_is_filled_again(make: Callable) -> None:
    run = Run(make).train(7)
    run.optimizer.state.clear()
    run.step(7)
    assert covered(run.optimizer)
    before = run.full_loss()
    assert run.train(range(8, 40)).full_loss() < before


@every_optimizer
def test_parameters_of_no_extended_module_are_told_of_once(make: Callable) -> None:
    run = Run(make).train(5)
    run.model[5] = nn.Linear(32, 10)
    run.optimizer.add_param_group({"params": list(run.model[5].parameters())})
    with pytest.warns(CurvoptWarning, match=r"for 1\.0, 1\.1, which are of no extended module.*attach\(model\)"):
        run.step(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(range(6, 20))
        extend(run.model)
        run.train(range(20, 40))
        Run(make, frozen).train(6)
    assert list(run.optimizer.coverage().values())[-2:] != ["none", "none"]


def tied_heads() -> Any:
    """One matrix as an embedding, and as a linear layer on what it embeds or on features."""
    forward = lambda net, x: net.head(x) if x.is_floating_point() else net.table(x)  # noqa: E731
    net: Any = Net(forward, table=nn.Embedding(4, 4), head=nn.Linear(4, 4))
    net.head.weight = net.table.weight
    return net


@pytest.mark.parametrize("accumulated", [True, False])
@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_weight_of_two_kinds_of_use_trains(make: Callable, accumulated: bool) -> None:
    """Its curvature is that of the first backward of a step, and begins anew where another kind comes."""
    model, lossfunc = tied_heads(), nn.CrossEntropyLoss()
    optimizer = make(model, fisher="exact")
    features, indices, y = torch.randn(8, 4), torch.randint(4, (8,)), torch.randint(4, (8,))
    sizes = []
    with pytest.warns(CurvoptWarning, match=r"several forms for .*: .*layers of different kinds") as said:
        for x in (features, indices, features):
            if not accumulated:
                optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            if not accumulated:
                optimizer.step()
                sizes.append([factor.ndim for factor in optimizer.state[model.table.weight]["curvature"].factors])
        optimizer.step()
    assert len(said) == 1
    assert sizes == ([] if accumulated else [[2, 2], [1, 2], [2, 2]])
    assert all(p.isfinite().all() for p in model.parameters())
    with pytest.raises(CurvoptError, match=r"weight: .*calls of different kinds.*kflr"), backpack(KFLR()):
        (lossfunc(model(features), y) + lossfunc(model(indices), y)).backward()


def test_moments_are_those_of_the_parameter_again_where_curvature_begins_anew() -> None:
    run = Run(KFACAdamW, betas=(0.9, 0.99), curvature_every=1, max_factor_size=512, **DOUBLE).train(3)
    p = run.model[5].weight
    state = run.optimizer.state[p]
    (left, right), moment = state["curvature"].bases, state["exp_avg"].clone()
    prune.l1_unstructured(run.model[5], "weight", 0.3)
    with pytest.warns(CurvoptWarning, match="several forms"):
        run.train(range(3, 4))
    (basis,) = state["curvature"].bases  # of all entries
    expected = 0.9 * left @ moment @ right.mT + 0.1 * p.grad
    torch.testing.assert_close((basis @ state["exp_avg"].flatten()).view_as(p), expected)


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_weight_that_is_pruned_during_training_begins_anew(make: Callable) -> None:
    run = Run(make, curvature_every=1).train(3)
    prune.l1_unstructured(run.model[3], "weight", 0.3)
    with pytest.warns(CurvoptWarning, match=r"several forms for (0\.2|3\.weight): .*pruned"):
        run.train(1)
    run.train(30)
    assert run.optimizer.coverage()["0.2"] == "dense" and run.full_loss() < 1


@every_optimizer
def test_parameters_without_curvature_may_have_another_dtype(make: Callable) -> None:
    other = nn.Parameter(torch.ones(2).double())
    run = Run(lambda params, **options: make([*params, other], **options))
    run.backward(0)
    other.grad = torch.ones(2).double()
    run.optimizer.step()
    assert other.dtype == torch.float64 and (other < 1).all()


def test_state_of_other_options_begins_anew() -> None:
    run = Run(KFACSGD, max_factor_size=8).load(Run(KFACSGD).train(1))
    with pytest.warns(CurvoptWarning, match="several forms"):
        run.train(1)
    assert run.factors()[0][0].ndim == 4


@every_optimizer
def test_batches_that_are_not_finite_may_be_skipped(make: Callable) -> None:
    skipping, plain = Run(make, on_nonfinite="skip"), Run(make)
    for step in range(5):
        for run in (skipping, plain):
            run.step(step)
        before = skipping.weights()
        skipping.step(step, lambda step: skipping.loss(step) * math.nan)
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
            x, y = run.data(step)
            x = x * (scale if step == 3 else 1)
            run.backward(step, lambda _: run.lossfunc(run.model(x), y))  # noqa: B023
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
        losses.append(run.full_loss())
    assert losses[1] < 2 * losses[0] + 0.1


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
    run = Run(make, frozen, curvature_every=1)
    run.optimizer.inverse_every = 100
    weight = run.model[1].weight
    run.train(20)
    kept = curvature_of(run.optimizer.state[weight])
    made = lambda: any(tensor.ndim for tensor in kept.inverses or kept.bases)  # noqa: E731
    assert kept.factors is None and not made()
    weight.requires_grad_(True)
    for step in range(2):
        run.step(step)
        assert (kept.factors is not None) == made()
    assert kept.factors is not None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, DiagonalNewton])
def test_unfreezing_the_first_layer_does_not_raise_the_loss(kind: Callable, seed: int) -> None:
    run = Run(kind, frozen, seed=seed)
    before = run.train(40).full_loss()
    run.model[1].requires_grad_(True)
    worst = max(run.train(range(step, step + 1)).full_loss() for step in range(40, 60))
    assert worst < 1.3 * before and all(run.factors())


@sgd_like
def test_metrics(make: Callable) -> None:
    run, free = (Run(make, momentum=0.0, **options) for options in ({}, {"rms_clip": None}))
    moved, whole = (torch.cat([each.flatten() for each in one.moves()]) for one in (run, free))
    metrics = {name: float(value) for name, value in run.optimizer.metrics().items()}
    grad = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    assert metrics["step_norm"] == pytest.approx(moved.norm().item(), rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(grad.norm().item(), rel=1e-4)
    assert metrics["cosine"] == pytest.approx(-(moved @ grad / moved.norm() / grad.norm()).item(), rel=1e-3)
    entries = moved[grad != 0] / run.optimizer.param_groups[0]["lr"]
    assert metrics["rms"] == pytest.approx(entries.square().mean().sqrt().item(), rel=1e-3)
    assert metrics["clip_factor"] == pytest.approx((moved.norm() / whole.norm()).item(), rel=1e-3)
    assert metrics["clip_factor"] < 0.9 and float(free.optimizer.metrics()["clip_factor"]) == pytest.approx(1)
    damping = damping_of(run.optimizer.param_groups[0], counters(run.optimizer)["mean_curvature"])
    assert metrics["damping"] == float(damping) and metrics.get("fallbacks", 0) == 0


@every_optimizer
@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        *(("rms_clip", value, "positive") for value in (-1.0, math.nan)),
        ("curvature_every", None, "a whole number"),
        ("inverse_every", 0, "at least 1"),
        ("on_nonfinite", "ignore", '"raise" or "skip"'),
        ("ema", 1.5, "in"),
        *(("damping", value, "at least 0") for value in (-1.0, math.nan)),
    ],
)
def test_options_that_leave_their_range_change_nothing(make: Callable, name: str, value: Any, range_: str) -> None:
    run = Run(make).train(2)
    weights, state = run.weights(), copy.deepcopy(run.optimizer.state_dict()["state"])
    group = run.optimizer.param_groups[0]
    if is_of_group := name in ("ema", "damping"):
        group[name] = value
    else:
        setattr(run.optimizer, name, value)
    where = " in param group 0" if is_of_group else ""
    got = rf"{value!r}(?: \(NoneType\))?"
    with pytest.raises(CurvoptError, match=rf"{name}(?: counts steps and)? must be {range_}.*, got {got}{where}; "):
        run.step(2)
    assert_equal(run.weights(), weights)
    torch.testing.assert_close(run.optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*in the loss by another path")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_parameters_without_entries(name: str, used: bool) -> None:
    run, other = (Run(OPTIMIZERS[name], cnn, **DOUBLE) for _ in range(2))
    empty = nn.Parameter(torch.empty(0))
    run.model.register_parameter("empty", empty)
    run.optimizer.add_param_group({"params": [empty]})
    run.optimizer.attach(run.model)
    run.attached = True
    run.train(3, lambda step: run.loss(step) + (empty.sum() if used else 0.0))
    assert_close(run.weights()[1:], other.train(3).weights())
