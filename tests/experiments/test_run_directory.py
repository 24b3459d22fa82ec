"""Run directories: resumed bit for bit, never overwritten by accident, readable after a kill or a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import (
    RESUMED,
    curve,
    environment,
    interrupt_at,
    run,
    wandb_run,
)

from experiments import checkpoints
from experiments.config import Config
from experiments.optimizers import OPTIMIZERS
from experiments.settings import SettingsError
from experiments.train import main, train

KILLED = """
import io, os, signal, sys, torch
whole = torch.save
def killed(state, file):
    if state["step"] < 21:
        return whole(state, file)
    memory = io.BytesIO()
    whole(state, memory)
    file.write(memory.getvalue()[: len(memory.getvalue()) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
torch.set_num_threads(1)
from experiments.train import main
main()
"""


@pytest.mark.usefixtures("pictures")
@pytest.mark.slow(reason="trains until it is killed, and again without that")
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = Config("digits-mlp", OPTIMIZERS["kfac-sgd"](), epochs=2, wandb="offline", **RESUMED)
    train(replace(config, out=tmp_path / "whole", wandb="disabled"))
    out = tmp_path / "killed"
    arguments = "--problem digits-mlp --epochs 2 --wandb offline --schedule cosine --warmup 5 --augment True".split()
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments, "--save-every", "7", "--out", str(out), "kfac-sgd"],
        env=environment(),
        capture_output=True,
        timeout=400,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    before = curve(out)
    assert len(before) == 1 + 21 and not (out / "finished.json").exists()
    train(replace(config, out=out, save_every=7, resume=True))
    assert curve(out) == curve(tmp_path / "whole")
    # offline-run-<time>-<id>, with a number behind it if the second begins within the same second
    assert len({path.name.split("-")[3] for path in out.glob("wandb/offline-run-*")}) == 1  # one wandb run
    name, history, _ = wandb_run(out)
    assert name == (out / "wandb-id").read_text()
    assert list(history) == list(range(15, 47))  # goes on behind step 14 and two evaluations


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"asgd", "adadelta", "adagrad", "adamax", "nadam"}))
def test_every_optimizer_goes_on_bit_for_bit(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        "digits-mlp",
        OPTIMIZERS[optimizer](),
        batch_size=256,
        epochs=2,
        layers_every=0,
        wandb="disabled",
        **RESUMED,
    )
    train(replace(config, out=tmp_path / "whole"))
    interrupt_at(8, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(replace(config, out=tmp_path / "stopped", save_every=3))
    monkeypatch.undo()
    train(replace(config, out=tmp_path / "stopped", save_every=3, resume=True))
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")


def test_a_broken_checkpoint_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoints.load(tmp_path) is None
    for step in (1, 2, 3):
        checkpoints.save({"step": step}, tmp_path)
    newest, previous = (tmp_path / name for name in checkpoints.NAMES)
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None and loaded["step"] == 3
    newest.write_bytes(newest.read_bytes()[:100])
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None and loaded["step"] == 2 and "checkpoint.pt" in caplog.text
    previous.unlink()
    with pytest.raises(ValueError, match="no checkpoint can be read"):
        checkpoints.load(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        checkpoints.load(tmp_path / "none.pt")


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path, seed=1)
    with pytest.raises(SettingsError, match="trained with another optimizer, seed"):
        run(tmp_path, "adam", resume=True)
    for name in ("finished.json", *checkpoints.NAMES):
        (tmp_path / name).unlink(missing_ok=True)
    before = curve(tmp_path)
    run(tmp_path, seed=1, resume=True)  # nothing to go on from: starts again
    assert curve(tmp_path) == before


def test_a_run_is_overwritten_only_where_that_is_asked_for(tmp_path: Path) -> None:
    run(tmp_path, seed=1, save_every=0)  # finished, without a checkpoint
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for resume in (False, True):
        with pytest.raises(SettingsError, match="holds a run that is finished; --overwrite trains anew, --out"):
            run(tmp_path, seed=1, resume=resume)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run(tmp_path, seed=2, overwrite=True)
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after != before
    (tmp_path / "finished.json").unlink()  # interrupted
    with pytest.raises(SettingsError, match="can be resumed; --resume goes on with it .*--overwrite trains anew"):
        run(tmp_path, seed=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == after


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_goes_on_to_more_epochs(schedule: str, tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    run(long, "kfac-sgd", schedule=schedule)
    run(short, "kfac-sgd", epochs=2, schedule=schedule)
    with pytest.raises(SettingsError, match="--epochs may be raised from 2, got 1"):
        run(short, "kfac-sgd", epochs=1, schedule=schedule, resume=True)
    run(short, "kfac-sgd", schedule=schedule, resume=True)
    steps = [row for row in curve(short) if "optim/lr" in row]
    expected = [row for row in curve(long) if "optim/lr" in row]
    assert [row["step"] for row in steps] == [row["step"] for row in expected]
    if schedule == "constant":
        assert curve(short) == curve(long)
    else:  # the schedule ends at the new end
        third = len(steps) // 3
        assert [row["optim/lr"] for row in steps[2 * third :]] == [row["optim/lr"] for row in expected[2 * third :]]
        assert steps[third]["optim/lr"] < expected[third]["optim/lr"]


@pytest.mark.parametrize("writer", ["experiments.checkpoints.save", "experiments.run_directory.RunDirectory.write"])
def test_a_full_disk_ends_in_one_line(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, full)
    monkeypatch.setattr("logging.raiseExceptions", True)  # put back afterwards
    arguments = ["--problem", "digits-mlp", "--epochs", "1", "--wandb", "disabled", "--out", str(tmp_path), "sgd"]
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert str(stop.value.code) == f"stopped: {tmp_path} cannot be written: [Errno 28] No space left on device"


@pytest.mark.parametrize("rows", ["missing", "short", "garbled"])
def test_a_checkpoint_without_its_rows_is_not_resumed_and_nothing_is_lost(rows: str, tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    if rows == "missing":
        file.unlink()
    else:
        file.write_bytes(whole[:-7] if rows == "short" else b"\0" * len(whole))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="has a checkpoint of step 22, but not the rows before it.*--overwrite"):
        run(tmp_path, epochs=2, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_broken_checkpoint_does_not_take_the_place_of_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoints.save({"step": step}, tmp_path)
    newest, previous = (tmp_path / name for name in checkpoints.NAMES)
    newest.write_bytes(newest.read_bytes()[:100])
    checkpoints.save({"step": 3}, tmp_path)
    assert torch.load(previous)["step"] == 1 and torch.load(newest)["step"] == 3


@pytest.mark.parametrize(("at", "message"), [(3, "before there was a checkpoint"), (8, "--resume goes on from")])
def test_an_interrupted_run_speaks_of_a_checkpoint_only_if_there_is_one(
    at: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(at, monkeypatch)
    arguments = ["--problem", "digits-mlp", "--save-every", "5", "--wandb", "disabled", "--out", str(tmp_path), "sgd"]
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()
