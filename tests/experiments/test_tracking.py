"""The wandb run beside a training, by the records that wandb itself writes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import (
    command,
    run,
    wandb_run,
)

from experiments.config import Config
from experiments.metrics import evaluations, read_metrics
from experiments.optimizers import OPTIMIZERS
from experiments.tracking import default_mode
from experiments.train import train
from experiments.training import Training


@pytest.mark.usefixtures("pictures")
def test_the_wandb_run_has_what_metrics_jsonl_has_and_more(tmp_path: Path) -> None:
    config = Config(problem="digits-mlp", optimizer=OPTIMIZERS["kfac-sgd"](), epochs=2, out=tmp_path, wandb="offline")
    train(config)
    name, history, records = wandb_run(tmp_path)
    assert name == (tmp_path / "wandb-id").read_text()
    rows = read_metrics(tmp_path)
    assert list(history) == list(range(len(rows)))
    for logged, row in zip(history.values(), rows, strict=True):
        for key in row.keys() - {"curvature"}:
            assert logged[key] == pytest.approx(row[key])
    steps = [row for row in rows if "train/batch_loss" in row]
    named = {"optim/lr", "optim/gradient_norm", "optim/damping", "optim/rms", "time/step"}
    assert all(named <= row.keys() for row in steps)
    for logged, row in zip(history.values(), rows, strict=True):
        drawn = {name for name in logged if name.startswith("curvature/")}
        numbers = {f"curvature/{name}" for name in ("trace", "gradient_snr", "largest_eigenvalue")}
        if "curvature" in row:  # one picture and three numbers, whatever the number of layers
            assert {name for name in drawn if not name.startswith("curvature/layers/")} == numbers
            assert "curvature/layers/path" in drawn
            traces = [of["ggn_trace"] for of in row["curvature"].values()]
            assert len(traces) == 4 and logged["curvature/trace"] == pytest.approx(sum(traces))
        else:
            assert not drawn
        for of in row.get("curvature", {}).values():
            assert of["spectrum_B"] == sorted(of["spectrum_B"]) and len(of["spectrum_B"]) == 11
    assert {"results/curves/path", "results/layers/path", "results/evaluations/path"} <= history[len(rows) - 1].keys()
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    files = {artifact.type: {entry.path for entry in artifact.manifest.contents} for artifact in artifacts}
    drawn = {"curves.png", "layers.png", "evaluations.table.json"}
    assert files["results"] == drawn | {"config.json", "metrics.jsonl"} and files["model"] == {"checkpoint.pt"}
    [of_run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    settings = {update.key: json.loads(update.value_json) for update in of_run.config.update}
    assert settings["optimizer"]["name"] == "kfac-sgd" and settings["seed"] == 0
    assert settings["parameters"] == sum(p.numel() for p in Training(config.resolved()).model.parameters())
    assert (of_run.run_group, of_run.job_type) == ("digits-mlp-kfac-sgd", "train")
    assert set(of_run.tags) == {"digits-mlp", "kfac-sgd"}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert commit.returncode or of_run.git.commit == commit.stdout.strip()


def test_charts_have_steps_below_and_the_best_values_are_in_the_summary(tmp_path: Path) -> None:
    run(tmp_path, wandb="offline")
    _, _, records = wandb_run(tmp_path)
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert [metric.options.hidden for metric in metrics if metric.glob_name == "*"] == [True]
    shown = [metric.name for metric in metrics if metric.name and not metric.options.hidden and metric.name != "step"]
    assert {"optim/gradient_norm", "optim/lr"} <= {*shown} and len(shown) < 12  # a screen
    assert {metric.step_metric for metric in metrics if metric.name != "step"} == {"step"}
    assert {metric.name for metric in metrics if metric.summary.min} == {"train/loss", "test/loss"}
    assert {metric.name for metric in metrics if metric.summary.max} == {"test/accuracy"}
    summary: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    rows = evaluations(read_metrics(tmp_path))
    assert summary["test/accuracy"]["max"] == pytest.approx(max(row["test/accuracy"] for row in rows))


def test_the_command_line_without_a_key_is_offline(tmp_path: Path) -> None:
    arguments = ["experiments.train", "--problem", "digits-mlp", "--epochs", "1", "sgd", "--lr", "0.05", "--seed", "3"]
    done = command(*arguments, cwd=tmp_path, HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "digits-mlp-sgd-3"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("wandb: offline")]
    folder = Path(line.split("wandb sync ")[1])
    assert (tmp_path / folder / f"run-{(out / 'wandb-id').read_text()}.wandb").is_file()
    assert "curves.png" in done.stdout and (out / "curves.png").exists()
    assert json.loads((out / "config.json").read_text())["optimizer"]["lr"] == 0.05
    assert len(wandb_run(out)[1]) == len(read_metrics(out))


def test_wandb_that_stops_working_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self, *args, **kwargs) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("wandb.Run.log", full)
    train(Config(problem="digits-mlp", optimizer=OPTIMIZERS["sgd"](), epochs=1, out=tmp_path, wandb="offline"))
    assert "No space left" in caplog.text
    assert len(evaluations(read_metrics(tmp_path))) == 2


def test_wandb_disabled_writes_none_of_its_files(tmp_path: Path) -> None:
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.pt",
        "config.json",
        "curves.png",
        "finished.json",
        "layers.png",
        "metrics.jsonl",
    ]


def test_a_broken_wandb_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert default_mode() == "offline"
    train(Config(problem="digits-mlp", optimizer=OPTIMIZERS["sgd"](), epochs=1, out=tmp_path, wandb="online"))
    assert "could not start online" in caplog.text and "could not start offline" in caplog.text
    assert len(evaluations(read_metrics(tmp_path))) == 2
