"""The benchmark of optimizers: its search, its clock, its cache, and that every optimizer of it trains."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from benchmarks import optimizer_reports as reports
from benchmarks import optimizers as bench
from experiments.data import DEFAULT_ROOT, Data, Split, load
from experiments.problems import PROBLEMS

TINY = bench.Task(PROBLEMS["digits-mlp"], steps=8, every=3, batch=32)


def rows(losses: list[float], every: int = 10) -> list[dict[str, Any]]:
    """A run with an evaluation every so many steps, each of a second."""
    return [
        {"step": every * (i + 1), "loss": loss, "seconds": 1.0 * every, "unit": 0.5} for i, loss in enumerate(losses)
    ]


@pytest.fixture(scope="module")
def data() -> Any:
    return TINY.problem.prepare(load("digits", DEFAULT_ROOT))


def test_costs_are_in_gradients_of_the_moment() -> None:
    run = rows([4.0, 3.0])
    run[1] |= {"seconds": 20.0, "unit": 1.0}  # the machine was busy: all took twice as long
    assert reports.costs(run) == [20.0, 40.0]


def test_arrival_is_interpolated_between_evaluations() -> None:
    run = rows([4.0, 3.0, 1.0])
    assert reports.arrival(run, 2.0) == pytest.approx(50)
    assert reports.arrival(run, 4.0) == 20  # at the first evaluation: nothing to interpolate
    assert reports.arrival(run, 0.5) is None


def test_losses_at_a_cost_are_interpolated_between_evaluations() -> None:
    run = rows([4.0, 3.0, 1.0])
    assert reports.at_cost(run, 50) == pytest.approx(2.0)
    assert reports.at_cost(run, 10) == 4.0 and reports.at_cost(run, 1000) == 1.0


@pytest.mark.parametrize("name", ["lstm", "pinn", "regression", "finetuning"])
def test_every_task_is_trained(name: str) -> None:
    """Those whose data are not the user's, and that other tests do not train."""
    task = replace(bench.TASKS[name], steps=12, every=6, batch=16, evaluated=64)
    data = task.data(None, DEFAULT_ROOT)
    data = Data(*(Split(split.x[:64], split.y[:64]) for split in (data.train, data.test)), data.classes)
    run = bench.Run(task, bench.METHODS["KFACAdamW"], {}, 0, data)
    before, _ = run.evaluate(data.train)
    frozen = [p.clone() for p in run.model.parameters() if not p.requires_grad]
    assert reports.end(run.measure()) < before
    assert bool(frozen) == (name == "finetuning")
    assert all(torch.equal(p, q) for p, q in zip(frozen, run.model.parameters(), strict=False))


@pytest.mark.parametrize("name", bench.METHODS)
def test_every_optimizer_trains(name: str, data: Any) -> None:
    method = bench.METHODS[name]
    task = replace(TINY, steps=TINY.steps * method.large, every=TINY.every * method.large)
    run = bench.Run(task, method, {}, seed=0, data=data)
    before = run.evaluate(data.train)[0]
    measured = run.measure()
    assert [row["step"] for row in measured] == [3, 6, 8]
    assert reports.end(measured) < before or name == "Shampoo"  # which wants another rate here
    assert measured[-1]["state"] >= 0
    assert all(row["seconds"] > 0 and row["unit"] > 0 for row in measured)
    assert 0 <= measured[-1]["accuracy"] <= 1
    # what the gradient is timed with stays as it was
    torch.manual_seed(0)
    fresh = task.problem.model(tuple(data.train.x.shape[1:]), data.classes)
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), run.plain[0].parameters(), strict=True))


def test_all_optimizers_see_the_same_batches(data: Any) -> None:
    runs = [bench.Run(TINY, bench.METHODS[name], {}, 3, data) for name in ("SGD", "KFACSGD")]
    (x, _), (y, _) = (next(run.batches()) for run in runs)
    assert torch.equal(x, y)
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs]
    assert torch.equal(*weights)


def test_a_run_that_diverges_has_no_end(data: Any) -> None:
    run = bench.Run(TINY, bench.METHODS["SGD"], {"lr": 1e4}, 0, data)
    assert reports.end(run.measure()) == math.inf


def test_results_are_kept_shown_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TASKS, "mlp", TINY)
    settings = bench.Settings(method=("SGD", "KFACSGD"), seeds=1, cache=tmp_path)
    result = bench.Bench(settings, "mlp", tqdm(disable=True)).results()
    assert list(result["methods"]) == ["AdamW", "SGD", "KFACSGD"]
    table = reports.markdown(result)
    assert all(f"| {name} |" in table for name in result["methods"])
    assert all("| mlp | " in reports.overview([result], tuned) for tuned in (True, False))
    reports.draw([result], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0

    def refuse(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(bench, "Run", refuse)
    assert bench.Bench(settings, "mlp", tqdm(disable=True)).results() == result
    with pytest.raises(AssertionError, match="trained again"):
        bench.Bench(replace(settings, seeds=2), "mlp", tqdm(disable=True)).results()


def test_defaults_are_measured_again_beside_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TASKS, "mlp", TINY)
    settings = bench.Settings(method=("KFACSGD",), seeds=1, cache=tmp_path)
    before = bench.Bench(settings, "mlp", tqdm(disable=True)).results()
    twice = bench.Bench(replace(settings, seeds=2), "mlp", tqdm(disable=True)).with_defaults(copy.deepcopy(before))
    assert [twice["methods"]["KFACSGD"].pop(name) for name in ("defaults", "defaults_measured")][0][1:]
    assert twice["methods"]["KFACSGD"].items() <= before["methods"]["KFACSGD"].items()
    assert twice["methods"]["AdamW"] == before["methods"]["AdamW"]


def test_quick_writes_to_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    bench.main(["--quick", "--task", "mlp", "--method", "KFACSGD"])
    torch.set_num_threads(threads)
    results = tmp_path / "runs" / "benchmark-optimizers"
    assert (results / "optimizers-mlp.json").exists() and (results / "optimizers.png").exists()
    assert not (tmp_path / "benchmarks").exists()
