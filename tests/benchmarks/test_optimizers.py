"""The benchmark of optimizers: its search, its clock, its cache, and that every task and optimizer of it trains."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import optimizer_reports as reports
from benchmarks import optimizers as bench
from benchmarks.optimizer_tasks import TASKS, Problem, Task, supervised
from experiments import models
from experiments.data import Data, load, standardized

WITHOUT_FILES = [name for name, task in TASKS.items() if not task.images]


def digits() -> Problem:
    return supervised(standardized(load("digits")), lambda *_: models.mlp(64, 32, 10), cross_entropy)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the task "mlp" a small one, on which all optimizers run."""
    monkeypatch.setitem(bench.TASKS, "mlp", Task("Small", lambda _: digits(), steps=24, batch=32))
    for name, method in bench.METHODS.items():
        monkeypatch.setitem(bench.METHODS, name, replace(method, tasks=("mlp",), large=1))
    bench.problem_of.cache_clear()
    yield
    bench.problem_of.cache_clear()


def job(folder: Path, task: str, method: str, lr: float | None = None, seed: int = 0, steps: int = 24) -> bench.Job:
    return bench.Job(task, method, lr or bench.METHODS[method].default, seed, steps, folder, None)


def rows(losses: list[float]) -> list[dict[str, Any]]:
    """A run with evaluations twenty gradients apart."""
    return [{"step": 10 * i, "cost": 20.0 * i, "train": loss, "held_out": loss} for i, loss in enumerate(losses, 1)]


def test_losses_at_a_cost_are_interpolated_between_evaluations() -> None:
    run = rows([4.0, 3.0, 1.0])
    assert reports.at_cost(run, "train", 50) == pytest.approx(2.0)
    assert reports.at_cost(run, "train", 10) == 4.0 and reports.at_cost(run, "train", 1000) == 1.0


@pytest.mark.parametrize(("method", "budget", "steps"), [("SOAP", 24, 12), ("SOAP", 99, 24), ("HessianFree", 4, 16)])
def test_a_budget_allows_as_many_steps_as_runs_say(method: str, budget: float, steps: int, tmp_path: Path) -> None:
    of = job(tmp_path, "mlp", method)
    assert bench.affordable(of, {(method, of.lr): [rows([4.0]), rows([4.0, 3.0])]}, budget) == steps


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_every_task_is_trained_and_its_costs_are_in_gradients(name: str, tmp_path: Path) -> None:
    run = bench.Run(job(tmp_path, name, "KFACAdamW", steps=6))
    for method in bench.METHODS.values():
        if name in method.tasks:
            assert method.make(copy.deepcopy(run.plain), method.default, bench.TASKS[name].attached)
    before, frozen = run.losses(), [p.clone() for p in run.model.parameters() if not p.requires_grad]
    measured = run.measure()
    assert measured[-1]["train"] < before[0] and measured[-1]["held_out"] < before[1]
    costs = [row["cost"] for row in measured]
    assert costs == sorted(costs) and costs[-1] > 6  # each step needs a gradient
    assert bool(frozen) == (name == "finetuning")
    assert all(torch.equal(p, q) for p, q in zip(frozen, run.model.parameters(), strict=False))


@pytest.mark.parametrize("name", bench.METHODS)
def test_every_optimizer_trains(name: str, tiny: None, tmp_path: Path) -> None:
    method = bench.METHODS[name]
    assert method.default is None if not method.rates else method.default in method.rates and len(method.rates) == 4
    run = bench.Run(job(tmp_path, "mlp", name))
    before = run.losses()[0]
    measured = run.measure()
    assert [row["step"] for row in measured] == list(range(2, 26, 2))
    assert reports.end(measured) < before
    if name not in ("HessianFree", "schedule-free AdamW"):  # the last is the one that moves weights
        assert run.optimizers[-1].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    # what the gradient is timed with stays as it was
    torch.manual_seed(0)
    fresh = models.mlp(64, 32, 10)
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), run.plain.parameters(), strict=True))


def test_all_optimizers_begin_alike_and_see_the_same_batches(tiny: None, tmp_path: Path) -> None:
    runs = [bench.Run(job(tmp_path, "mlp", name, seed=3)) for name in ("SGD", "KFACSGD")]
    (x, _), (y, _) = (next(run.batches) for run in runs)
    assert torch.equal(x, y)
    weights = [torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs]
    assert torch.equal(*weights)


def test_muon_takes_the_matrices_between_embeddings_and_the_last_layer() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    muon, adamw = (optimizer.param_groups[0]["params"] for optimizer in bench.muon(model, 0.1, {}))
    assert [p.shape for p in muon] == [(4, 3)]
    assert {p.shape for p in adamw} == {(7, 3), (4,), (5, 4), (5,)}


def test_held_out_samples_are_not_trained_on() -> None:
    x, y = torch.arange(100.0)[:, None], torch.zeros(100).long()
    splits = [type(load("digits").train)(x[half], y[half]) for half in (slice(60), slice(60, 100))]
    problem = supervised(Data(*splits, classes=1), lambda *_: nn.Linear(1, 1), cross_entropy)
    batches = problem.batches(0, 16)
    epoch = torch.cat([next(batches)[0] for _ in range(3)])
    assert len(epoch.unique()) == 48 and epoch.max() < 60
    assert torch.cat([batch[0] for batch in problem.held_out]).min() == 60
    ((nodes, seen),), ((others, hidden),) = (getattr(TASKS["graph"].make(None), name) for name in ("train", "held_out"))
    assert torch.equal(nodes, others) and bool(((seen < 0) ^ (hidden < 0)).all())


def test_a_run_that_diverges_has_no_end(tiny: None, tmp_path: Path) -> None:
    assert reports.end(bench.Run(job(tmp_path, "mlp", "SGD", 1e4)).measure()) == math.inf


def test_the_command_resumes_and_does_not_mix_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: None, capsys: pytest.CaptureFixture
) -> None:
    commit, page = ["first"], tmp_path / "page.md"
    monkeypatch.setattr(bench, "commit_of_code", lambda: commit[0])
    monkeypatch.setattr(bench, "REPORTED", (1, 2))
    page.write_text(
        "Before\n<!-- table -->\nold\n<!-- end of table -->\n<!-- counts -->\n<!-- end of counts -->\nAfter\n"
    )
    out = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path), "--page", str(page)]
    threads = torch.get_num_threads()

    def run(*methods: str) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            for name in set(bench.METHODS) - {"AdamW", *methods}:
                patch.delitem(bench.METHODS, name)
            bench.main(["--task", "mlp", "--workers", "1", *out])
        torch.set_num_threads(threads)
        return json.loads((tmp_path / "optimizers.json").read_text())

    result = run("KFACSGD", "HessianFree")
    methods = result["tasks"]["mlp"]["methods"]
    assert list(methods) == ["AdamW", "KFACSGD", "HessianFree"] and result["commit"] == "first"
    assert methods["AdamW"]["lr"] == min(methods["AdamW"]["tried"], key=lambda pair: pair[1])[0]
    assert all(len(methods[name][how]["train"]) == 2 for name in methods for how in ("tuned", "defaults"))
    assert "| KFACSGD | " in (tmp_path / "optimizers.md").read_text()
    assert "old" in page.read_text()  # as not all tasks are there

    def refuse(*_: Any) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "Run", refuse)
        assert run("KFACSGD", "HessianFree")["tasks"] == result["tasks"]
        with pytest.raises(AssertionError, match="trained again"):
            run("SOAP")
    for task in list(bench.TASKS):
        if task != "mlp":
            monkeypatch.delitem(bench.TASKS, task)
    commit[0] = "second"
    (tmp_path / "optimizers.json").write_text(json.dumps({"commit": "first", "tasks": {"gone": {}}}))
    assert list(run("KFACSGD")["tasks"]) == ["mlp"]
    assert "| Small | " in page.read_text() and "| KFACSGD | 1 | " in page.read_text() and "After" in page.read_text()
    assert (tmp_path / "_static" / "optimizers.png").stat().st_size > 0
    capsys.readouterr()
    bench.main(["--task", "mlp", "--plan", *out])
    torch.set_num_threads(threads)
    assert f"| mlp | {11 * (4 + 4 * 2) + 2 * 2} | " in capsys.readouterr().out  # HessianFree has no rate
