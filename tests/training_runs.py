"""Short trainings for the tests of the experiments, and how to look at their results."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

from experiments.config import Config
from experiments.metrics import read_metrics
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.train import train
from experiments.training import Training

REPOSITORY = Path(__file__).parents[1]
EPOCHS = 3
RESUMED = {"schedule": "cosine", "warmup": 5, "augment": True}  # settings that a resumed run has to find again


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


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a wandb file: a log in the format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if 2**15 - at % 2**15 < 7:  # the rest of a block is too short for a header
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        if at + 7 + length > len(raw):
            return  # it is being written
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield Record.FromString(parts)
            parts = b""


def wandb_run(out: Path) -> tuple[str, dict[int, dict[str, Any]], list[Any]]:
    """Name, history by step, and all records of the last offline run in a run directory."""
    file = sorted(out.glob("wandb/offline-run-*/*.wandb"))[-1]
    deadline = time.monotonic() + 20
    while True:  # wandb's process may write on for a moment after the run is finished
        records = list(wandb_records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    [name] = [record.run.run_id for record in records if record.WhichOneof("record_type") == "run"]
    history: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history[row["_step"]] = row
    return name, history, records


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when so many steps are done."""
    whole = Training.step

    def interrupted(self: Training, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        if self.done == step:
            raise KeyboardInterrupt
        return whole(self, x, y)

    monkeypatch.setattr(Training, "step", interrupted)
