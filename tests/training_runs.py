"""Short trainings for the tests of the experiments, and how to look at their results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from experiments.config import Config
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.plots import read_metrics
from experiments.train import train

REPOSITORY = Path(__file__).parents[1]
EPOCHS = 3
RESUMED = {"schedule": "cosine", "warmup": 5, "augment": True}  # settings that a resumed run has to find again


@pytest.fixture
def pictures() -> None:
    """Named by tests that look at the pictures of a training."""


@pytest.fixture(autouse=True)
def pictures_only_where_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing elsewhere: pictures take a second for each run."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("experiments.run_directory.plot_curves", lambda runs, title, out: out.touch())
        monkeypatch.setattr("experiments.run_directory.plot_layers", lambda rows, title, out: out.touch())


def run(out: Path, optimizer: str | OptimizerConfig = "sgd", **settings) -> Path:
    """Train on digits without wandb."""
    return train(
        Config(
            problem="digits-mlp",
            optimizer=OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer,
            out=out,
            **{"epochs": EPOCHS, "wandb": "disabled", **settings},
        )
    )


def environment() -> dict[str, str]:
    """For a process with a wandb of its own."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**known, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def command(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a script."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def losses(out: Path) -> list[float]:
    """The loss of every batch."""
    return [row["train/batch_loss"] for row in read_metrics(out) if "train/batch_loss" in row]


def curve(out: Path) -> list[dict]:
    """All that a seed fixes: no times, and nothing that is measured only when inverses are renewed."""
    free = {"time/training", "time/step", "optim/condition", "optim/fallbacks", "optim/new_bases"}
    return [{name: value for name, value in row.items() if name not in free} for row in read_metrics(out)]


def require_picture(file: Path) -> None:
    """Large enough to read, and more than a blank page."""
    picture = matplotlib.image.imread(file)
    assert picture.shape[0] > 200 and picture.shape[1] > 600
    colours, counts = np.unique(picture.reshape(-1, picture.shape[2]), axis=0, return_counts=True)
    assert len(colours) > 10 and counts.max() < 0.99 * counts.sum()
