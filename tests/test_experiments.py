"""The scripts that people run: what they write, what they say, and that seeds fix them."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from experiments import data
from experiments.compare import Comparison, compare, table
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.plots import evaluations, read_metrics
from experiments.problems import PROBLEMS
from experiments.tracking import default_mode
from experiments.train import Config, DivergedError, SettingsError, evaluate, train

EPOCHS = 3


def run(out: Path, optimizer: str | OptimizerConfig = "sgd", **settings) -> Path:
    return train(
        Config(
            problem="digits-mlp",
            optimizer=OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer,
            epochs=EPOCHS,
            out=out,
            wandb="disabled",
            **settings,
        )
    )


def command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    repository = Path(__file__).parents[1]
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env={**known, "PYTHONPATH": str(repository), "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def losses(out: Path) -> list[float]:
    return [row["train_loss"] for row in read_metrics(out) if "train_loss" in row]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns(optimizer: str, tmp_path: Path) -> None:
    tuned = optimizer in PROBLEMS["digits-mlp"].tuned
    config = OPTIMIZERS[optimizer]()
    if optimizer == "lbfgs":  # whose unit step is for whole data sets
        config = replace(config, lr=0.1, max_iter=5)
    rows = evaluations(read_metrics(run(tmp_path, config)))
    assert [row["epoch"] for row in rows] == list(range(EPOCHS + 1))
    factor = 2 if tuned else 1
    assert rows[-1]["train_set_loss"] < rows[0]["train_set_loss"] / factor
    assert rows[-1]["test_loss"] < rows[0]["test_loss"] / factor
    assert rows[-1]["test_accuracy"] > rows[0]["test_accuracy"]


def test_metrics_have_a_row_for_every_step_and_every_evaluation(tmp_path: Path) -> None:
    run(tmp_path, batch_size=100)
    rows = read_metrics(tmp_path)
    steps = [row for row in rows if "train_loss" in row]
    digits = data.load("digits", tmp_path)
    per_epoch = len(digits.train.x) // 100
    assert [row["step"] for row in steps] == list(range(1, EPOCHS * per_epoch + 1))
    assert [row["epoch"] for row in steps] == [epoch for epoch in range(1, EPOCHS + 1) for _ in range(per_epoch)]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] == 0
    for before, row in zip(rows, rows[1:], strict=False):
        if "train_set_loss" in row:  # evaluation does not count as training time
            assert row["seconds"] == before["seconds"]
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 100


def test_curves_are_a_picture(tmp_path: Path) -> None:
    picture = matplotlib.image.imread(run(tmp_path) / "curves.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 3 * picture.shape[0] / 2
    assert np.unique(picture.reshape(-1, picture.shape[2]), axis=0).shape[0] > 10


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-sgd"])
def test_a_seed_fixes_the_curve(optimizer: str, tmp_path: Path) -> None:
    first, again, other = (losses(run(tmp_path / str(i), optimizer, seed=seed)) for i, seed in enumerate([5, 5, 6]))
    assert first == again
    assert first != other


def test_divergence_stops_the_run_and_says_what_to_lower(tmp_path: Path) -> None:
    settings = replace(OPTIMIZERS["sgd"](), lr=1e30)
    with pytest.raises(DivergedError, match=r"sgd \(lr 1e\+30\).*lower --lr"):
        train(Config(problem="digits-mlp", optimizer=settings, out=tmp_path, wandb="disabled"))
    last = read_metrics(tmp_path)[-1]  # the row is there, as valid JSON
    assert [name for name, value in last.items() if value is None] in (["train_loss"], ["train_set_loss", "test_loss"])
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"batch_size": 5000}, "--batch-size must be in 1 ... 14"), ({"batch_size": 0}, "--batch-size must be in 1")],
)
def test_settings_out_of_range(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        run(tmp_path, **settings)


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batches(tmp_path: Path) -> None:
    import torch

    split = data.load("digits", tmp_path).test
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    loss, accuracy = evaluate(model, torch.nn.CrossEntropyLoss(), split, batch_size=100)
    z = model(split.x)
    assert math.isclose(loss, torch.nn.functional.cross_entropy(z, split.y).item(), rel_tol=1e-5)
    assert math.isclose(accuracy, (z.argmax(1) == split.y).double().mean().item(), rel_tol=1e-9)


def test_command_line_writes_an_offline_wandb_run(tmp_path: Path) -> None:
    arguments = ["experiments.train", "--problem", "digits-mlp", "--epochs", "1", "sgd", "--lr", "0.05"]
    done = command(*arguments, cwd=tmp_path, HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "digits-mlp-sgd-0"
    assert "curves.png" in done.stdout and (out / "curves.png").exists()
    assert json.loads((out / "config.json").read_text())["optimizer"]["lr"] == 0.05
    assert [path.stat().st_size > 0 for path in out.glob("wandb/offline-run-*/*.wandb")] == [True]


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


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--problem", "mnist6k"], ["--problem", "mnist6k", "mnist5k-cnn"]),
        (["adahessian"], ["adahessian", "kfac-sgd", "adamw"]),
        (["kfac-sgd", "--damping", "small"], ["--damping", "small"]),
        (["--problem", "digits-mlp", "--wandb", "disabled", "kfac-sgd", "--damping", "-1"], ["damping", "-1"]),
    ],
)
def test_bad_input_gets_a_message_and_no_traceback(arguments: list[str], messages: list[str], tmp_path: Path) -> None:
    done = command("experiments.train", *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    for message in messages:
        assert message in done.stderr + done.stdout


def test_compare_prints_its_table(tmp_path: Path) -> None:
    comparison = Comparison("digits-mlp", ("sgd", "adamw"), seeds=(0, 1), epochs=2, out=tmp_path, wandb="disabled")
    header, rule, *rows = compare(comparison).splitlines()
    assert "steps" in header and "seconds" in header and set(rule) == {"|", "-"}
    assert [row.split()[1] for row in rows] == ["sgd", "adamw"]
    assert all("±" in row for row in rows)
    picture = matplotlib.image.imread(tmp_path / "digits-mlp-comparison.png")
    assert picture.shape[0] > 300


def test_table_counts_the_first_evaluation_at_the_target() -> None:
    def rows(*training_losses: float) -> list[dict]:
        return [
            {"step": 10 * i, "seconds": 0.5 * i, "train_set_loss": loss, "test_accuracy": 0.5}
            for i, loss in enumerate(training_losses)
        ]

    finished = {"fast": [rows(2, 0.5, 0.1)], "slow": [rows(2, 1, 0.7, 0.5)], "never": []}
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(finished, 1, 0.5).splitlines()]
    assert cells[0][0] == "to training loss 0.5"
    assert cells[2:] == [
        ["fast", "10", "0.50", "50.0"],
        ["slow", "30", "1.50", "50.0"],
        ["never", "– (0 of 1 runs)", "–", "–"],
    ]
    assert table(finished, 1, 0.2).count("(0 of 1 runs)") == 2


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(example, {})
    assert "0.weight torch.Size([32, 64]) torch.Size([128, 32, 64])" in capsys.readouterr().out
