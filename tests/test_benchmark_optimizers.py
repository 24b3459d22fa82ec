"""The benchmark of optimizers: its search, its clock, its cache, and that every optimizer of it trains."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from benchmarks import optimizers as bench
from experiments.data import DEFAULT_ROOT, load
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


@pytest.mark.parametrize("optimum", [{"lr": 1.0, "damping": 0.1}, {"lr": 0.01, "damping": 0.01}])
def test_search_finds_the_optimum_of_a_grid_and_counts_its_runs(optimum: dict[str, float]) -> None:
    tried: list[tuple[float, ...]] = []

    def score(options: dict[str, float]) -> float:
        tried.append(tuple(options.values()))
        return sum(abs(math.log10(options[name] / optimum[name])) for name in options)

    assert bench.tune(score, {"lr": 0.1, "damping": 0.1}, runs=9) == optimum
    assert len(tried) == len(set(tried)) == 9
    assert tried[0] == (0.1, 0.1)


def test_search_leaves_settings_that_diverge() -> None:
    best = bench.tune(lambda options: math.inf if options["lr"] > 0.05 else options["lr"], {"lr": 0.1}, runs=3)
    assert best["lr"] == pytest.approx(0.01)


def test_arrival_is_interpolated_between_evaluations() -> None:
    run = rows([4.0, 3.0, 1.0])
    assert bench.arrival(run, 2.0, "step") == pytest.approx(25)
    assert bench.arrival(run, 3.5, "seconds") == pytest.approx(15)
    assert bench.arrival(run, 4.0, "step") == 10  # at the first evaluation: nothing to interpolate
    assert bench.arrival(run, 0.5, "step") is None


def test_the_mean_of_runs_is_what_arrives() -> None:
    runs = [rows([4.0, 3.0, 1.0]), rows([4.0, 2.0, 2.0])]
    run = bench.averaged(runs)
    assert [row["loss"] for row in run] == [4.0, 2.5, 1.5]
    # so that what defines the target arrives at its end
    assert bench.arrival(run, (1.0 + 2.0) / 2, "step") == 30
    assert len(bench.averaged([runs[0], runs[1][:1]])) == 1  # one that diverged


def test_seconds_are_those_of_a_machine_of_constant_speed() -> None:
    run = rows([4.0, 3.0])
    run[1] |= {"seconds": 20.0, "unit": 1.0}  # the machine was busy: all took twice as long
    first, second = bench.corrected(run, unit=0.25)
    assert first["seconds"] == second["seconds"] == pytest.approx(5.0)


@pytest.mark.parametrize("name", bench.METHODS)
def test_every_optimizer_trains(name: str, data: Any) -> None:
    method = bench.METHODS[name]
    task = replace(TINY, steps=TINY.steps * method.large, every=TINY.every * method.large)
    run = bench.Run(task, method, method.tuned, seed=0, data=data)
    before = bench.evaluate(run.model, run.lossfunc, data.train)[0]
    measured = run.measure()
    assert [row["step"] for row in measured] == [3, 6, 8]
    assert bench.end(measured) < before
    assert all(row["seconds"] > 0 and row["unit"] > 0 for row in measured)
    assert 0 <= measured[-1]["accuracy"] <= 1
    # what the gradient is timed with stays as it was
    torch.manual_seed(0)
    fresh = task.problem.model(tuple(data.train.x.shape[1:]), data.classes)
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), run.plain[0].parameters(), strict=True))


def test_all_optimizers_see_the_same_batches(data: Any) -> None:
    runs = [bench.Run(TINY, bench.METHODS[name], bench.METHODS[name].tuned, 3, data) for name in ("SGD", "KFACSGD")]
    (x, _), (y, _) = (next(run.batches()) for run in runs)
    assert torch.equal(x, y)
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs]
    assert torch.equal(*weights)


def test_a_run_that_diverges_has_no_end(data: Any) -> None:
    run = bench.Run(TINY, bench.METHODS["SGD"], {"lr": 1e4}, 0, data)
    assert bench.end(run.measure()) == math.inf


def test_results_are_kept_shown_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TASKS, "mlp", TINY)
    settings = bench.Settings(method=("SGD", "KFACSGD"), runs=2, seeds=(1,), cache=tmp_path)
    result = bench.Bench(settings, "mlp", tqdm(disable=True)).results()
    assert list(result["methods"]) == ["AdamW", "SGD", "KFACSGD"]
    table = bench.markdown(result)
    assert all(f"| {name} |" in table for name in result["methods"])
    bench.draw([result], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0

    def refuse(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(bench, "Run", refuse)
    assert bench.Bench(settings, "mlp", tqdm(disable=True)).results() == result
    with pytest.raises(AssertionError, match="trained again"):
        bench.Bench(replace(settings, seeds=(2,)), "mlp", tqdm(disable=True)).results()


def test_quick_writes_to_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    bench.main(["--quick", "--task", "mlp", "--method", "KFACSGD"])
    torch.set_num_threads(threads)
    results = tmp_path / "runs" / "benchmark-optimizers"
    assert (results / "optimizers-mlp.json").exists() and (results / "optimizers.png").exists()
    assert not (tmp_path / "benchmarks").exists()
