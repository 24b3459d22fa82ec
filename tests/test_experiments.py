"""The scripts that people run: what they write, what they say, and that seeds fix them."""

import errno
import inspect
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import yaml

from experiments import checkpoints, data
from experiments.compare import Comparison, compare, table
from experiments.curvature import layer_statistics
from experiments.inspect import Inspection, draw_gradients, sample_norms
from experiments.inspect import inspect as inspect_checkpoint
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.plots import evaluations, read_metrics
from experiments.problems import PROBLEMS
from experiments.sweep import Sweep, grid
from experiments.sweep import run as sweep_run
from experiments.sweep import table as table_of_sweep
from experiments.tracking import default_mode
from experiments.train import Config, DivergedError, SettingsError, Training, evaluate, main, parse, train

REPOSITORY = Path(__file__).parents[1]
EPOCHS = 3


@pytest.fixture
def pictures() -> None:
    """Named by tests that look at the pictures of a training."""


@pytest.fixture(autouse=True)
def _pictures_only_where_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:  # which take a second for each run
        monkeypatch.setattr("experiments.train.plot_curves", lambda runs, title, out: out.touch())
        monkeypatch.setattr("experiments.train.plot_layers", lambda rows, title, out: out.touch())


def run(out: Path, optimizer: str | OptimizerConfig = "sgd", **settings) -> Path:
    return train(
        Config(
            problem="digits-mlp",
            optimizer=OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer,
            out=out,
            wandb="disabled",
            **{"epochs": EPOCHS, **settings},
        )
    )


def environment() -> dict[str, str]:
    """For a process with a wandb of its own."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**known, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def command(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def losses(out: Path) -> list[float]:
    return [row["train_loss"] for row in read_metrics(out) if "train_loss" in row]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns(optimizer: str, tmp_path: Path) -> None:
    tuned = optimizer in PROBLEMS["digits-mlp"].tuned
    config = OPTIMIZERS[optimizer]()
    if optimizer == "lbfgs":  # whose unit step is for whole data sets
        config = replace(config, lr=0.1, max_iter=5)
    large = {"batch_size": 512} if config.needs_closure else {}
    rows = evaluations(read_metrics(run(tmp_path, config, layers_every=0, **large)))
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


def require_picture(file: Path) -> None:
    """Large enough to read, and more than a blank page."""
    picture = matplotlib.image.imread(file)
    assert picture.shape[0] > 200 and picture.shape[1] > 600
    colours, counts = np.unique(picture.reshape(-1, picture.shape[2]), axis=0, return_counts=True)
    assert len(colours) > 10 and counts.max() < 0.99 * counts.sum()


def test_curves_and_layers_are_pictures(tmp_path: Path, pictures: None) -> None:
    run(tmp_path)
    for name in ("curves", "layers"):
        require_picture(tmp_path / f"{name}.png")


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-sgd"])
def test_a_seed_fixes_the_curve(optimizer: str, tmp_path: Path) -> None:
    first, again, other = (losses(run(tmp_path / str(i), optimizer, seed=seed)) for i, seed in enumerate([5, 5, 6]))
    assert first == again
    assert first != other


def test_divergence_stops_the_run_and_says_what_to_lower(tmp_path: Path, pictures: None) -> None:
    settings = replace(OPTIMIZERS["sgd"](), lr=1e30)
    with pytest.raises(DivergedError, match=r"sgd \(lr 1e\+30\).*lower --lr"):
        train(Config(problem="digits-mlp", optimizer=settings, out=tmp_path, wandb="disabled"))
    last = read_metrics(tmp_path)[-1]  # the row is there, as valid JSON
    assert [name for name, value in last.items() if value is None] in (["train_loss"], ["train_set_loss", "test_loss"])
    assert (tmp_path / "curves.png").exists()


def test_damping_follows_the_loss_where_that_is_asked_for(tmp_path: Path) -> None:
    adaptive = OPTIMIZERS["kfac-sgd"](adaptive_damping=True)
    rows = [row for row in read_metrics(run(tmp_path / "adaptive", adaptive)) if "damping" in row]
    factors = {round(after["damping"] / before["damping"], 6) for before, after in zip(rows, rows[1:], strict=False)}
    assert 1 in factors and 2 <= len(factors) and factors <= {1, round(0.95**5, 6), round(0.95**-5, 6)}
    assert all("reduction_ratio" in row for row in rows)
    with pytest.raises(DivergedError, match=r"kfac-sgd \(lr 1e\+30.*lower --lr or raise --damping"):
        run(tmp_path / "diverges", replace(adaptive, lr=1e30, kl_clip=None))
    last = [row for row in read_metrics(tmp_path / "diverges") if "train_loss" in row][-1]
    assert last["train_loss"] is None  # the row is there


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 5000}, "--batch-size must be in 1 ... 14"),
        ({"batch_size": 0}, "--batch-size must be in 1"),
        ({"batch_size": 64, "accumulate": 3}, "multiple of 3"),
        ({"accumulate": 0}, "--accumulate"),
        ({"warmup": -1}, "--warmup must be at least 0, got -1"),
        ({"layers_every": -1}, "--layers-every must be at least 0"),
        ({"save_every": -1}, "--save-every must be at least 0"),
        ({"device": "abacus"}, "--device abacus cannot be used here"),
        ({"out": Path(__file__)}, "--out: there cannot be a run directory.*test_experiments.py"),
        ({"data": "mnist5k", "npz": Path("own.npz")}, "give one"),
        ({"problem": "mnist-2c2d", "data": "digits"}, r"takes samples like \[1, 28, 28\], got \[1, 8, 8\]"),
        ({"problem": "help-gpt", "augment": True}, "--augment needs images"),
        ({"optimizer": OPTIMIZERS["lbfgs"](), "amp": "fp16"}, "--amp fp16"),
        ({"optimizer": OPTIMIZERS["sgd"](lr=-1.0)}, "lr -1.*[Ii]nvalid learning rate"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        train(Config(**{"problem": "digits-mlp", "out": tmp_path, "wandb": "disabled", **settings}))


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batches(tmp_path: Path) -> None:
    split = data.load("digits", tmp_path).test
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    loss, accuracy = evaluate(model, torch.nn.CrossEntropyLoss(), split, batch_size=100)
    z = model(split.x)
    assert math.isclose(loss, torch.nn.functional.cross_entropy(z, split.y).item(), rel_tol=1e-5)
    assert math.isclose(accuracy, (z.argmax(1) == split.y).double().mean().item(), rel_tol=1e-9)


def wandb_records(file: Path) -> Iterator[Any]:
    """What wandb has written: a log in the format of LevelDB."""
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


def test_the_wandb_run_has_what_metrics_jsonl_has_and_more(tmp_path: Path, pictures: None) -> None:
    config = Config(problem="digits-mlp", optimizer=OPTIMIZERS["kfac-sgd"](), epochs=2, out=tmp_path, wandb="offline")
    train(config)
    name, history, records = wandb_run(tmp_path)
    assert name == (tmp_path / "wandb-id").read_text()
    rows = read_metrics(tmp_path)
    assert list(history) == list(range(len(rows)))
    for logged, row in zip(history.values(), rows, strict=True):
        for key in row.keys() - {"layers"}:
            assert logged[key] == pytest.approx(row[key])
    steps = [row for row in rows if "train_loss" in row]
    assert all({"lr", "damping", "kl", "step_seconds"} <= row.keys() for row in steps)
    for logged, row in zip(history.values(), rows, strict=True):
        for layer, of in row.get("layers", {}).items():
            assert layer in ("1.weight", "1.bias", "3.weight", "3.bias")
            for quantity in ("ggn_trace", "gradient_snr", "top_B"):
                assert logged[f"{quantity}/{layer}"] == pytest.approx(of[quantity]) and of[quantity] > 0
            assert f"values/{layer}/bins" in logged and f"log10_eigenvalues_B/{layer}/bins" in logged
            assert of["spectrum_B"] == sorted(of["spectrum_B"]) and len(of["spectrum_B"]) == 11
    assert {"curves/path", "layers/path", "evaluations/path"} <= history[len(rows) - 1].keys()
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    [results] = [artifact for artifact in artifacts if artifact.type == "results"]
    files = {entry.path for entry in results.manifest.contents}
    assert files == {"curves.png", "layers.png", "evaluations.table.json"}
    [of_run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    settings = {update.key: json.loads(update.value_json) for update in of_run.config.update}
    assert settings["optimizer"]["name"] == "kfac-sgd" and settings["seed"] == 0


def test_the_command_line_without_a_key_is_offline(tmp_path: Path) -> None:
    arguments = ["experiments.train", "--problem", "digits-mlp", "--epochs", "1", "sgd", "--lr", "0.05", "--seed", "3"]
    done = command(*arguments, cwd=tmp_path, HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "digits-mlp-sgd-3"
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


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--problem", "mnist6k"], ["--problem", "mnist6k", "mnist5k-cnn"]),
        (["adahessian"], ["adahessian", "kfac-sgd", "adamw"]),
        (["kfac-sgd", "--damping", "small"], ["--damping", "small"]),
        (["--problem", "digits-mlp", "--wandb", "disabled", "kfac-sgd", "--damping", "-1"], ["damping", "-1"]),
    ],
)
def test_bad_input_gets_a_message_and_no_traceback(
    arguments: list[str],
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    for message in messages:
        assert message in f"{said.err}{said.out}{stop.value}"
    assert stop.value.code not in (0, None)


def curve(out: Path) -> list[dict]:
    """All that a seed fixes: times and what is measured only when inverses are renewed left out."""
    free = {"seconds", "step_seconds", "condition", "fallbacks", "new_bases"}
    return [{name: value for name, value in row.items() if name not in free} for row in read_metrics(out)]


RESUMED = {"schedule": "cosine", "warmup": 5, "augment": True}

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


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, pictures: None) -> None:
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
    settings = {"lr": 0.1, "max_iter": 3} if optimizer == "lbfgs" else {}
    config = Config(
        "digits-mlp",
        OPTIMIZERS[optimizer](**settings),
        batch_size=256,
        epochs=2,
        layers_every=0,
        wandb="disabled",
        **RESUMED,
    )
    train(replace(config, out=tmp_path / "whole"))
    step = Training.step

    def interrupted(self: Training, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        if self.done == 8:
            raise KeyboardInterrupt
        return step(self, x, y)

    monkeypatch.setattr(Training, "step", interrupted)
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
    for name in checkpoints.NAMES:
        (tmp_path / name).unlink(missing_ok=True)
    before = curve(tmp_path)
    run(tmp_path, seed=1, resume=True)  # nothing to go on from: starts again
    assert curve(tmp_path) == before


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-sgd"])
@pytest.mark.parametrize(
    ("settings", "tolerance"), [({"accumulate": 4}, 1e-3), ({"amp": "bf16"}, 0.2), ({"amp": "fp16"}, 0.2)]
)
def test_parts_of_batches_and_half_precision_change_little(
    optimizer: str, settings: dict, tolerance: float, tmp_path: Path
) -> None:
    config = OPTIMIZERS[optimizer](**{"fisher": "exact"} if optimizer == "kfac-sgd" else {})
    plain, other = (run(tmp_path / name, config, epochs=1, **of) for name, of in (("plain", {}), ("other", settings)))
    assert losses(plain) != losses(other)
    assert losses(plain) == pytest.approx(losses(other), rel=tolerance)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "steps"])
def test_schedules(schedule: str, tmp_path: Path) -> None:
    run(tmp_path, OPTIMIZERS["sgd"](lr=0.1), schedule=schedule, warmup=9, layers_every=0)
    rates = np.array([row["lr"] for row in read_metrics(tmp_path) if "lr" in row])
    np.testing.assert_allclose(rates[:10], 0.01 * np.arange(1, 11))
    after = rates[9:]
    middle = after[len(after) // 2 - 1]
    assert np.all(np.diff(after) <= 0) and after[0] == pytest.approx(0.1)
    if schedule == "constant":
        assert set(after) == {after[0]}
    elif schedule == "steps":
        assert [f"{rate:.0e}" for rate in dict.fromkeys(after)] == ["1e-01", "1e-02", "1e-03"]
    else:
        assert middle == pytest.approx(0.05, rel=0.1) and after[-1] < 0.05 * after[0]


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    arguments = "experiments.train --problem digits-mlp --epochs 1 --wandb disabled".split()
    optimizer = ["kfac-sgd", "--fisher", "exact"]
    train(
        Config("digits-mlp", OPTIMIZERS["kfac-sgd"](fisher="exact"), epochs=1, out=tmp_path / "one", wandb="disabled")
    )
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m".split()
    done = command(*launcher, *arguments, "--out", "two", *optimizer, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = (evaluations(read_metrics(tmp_path / name))[-1] for name in ("one", "two"))
    for name in ("train_set_loss", "test_loss", "test_accuracy"):
        assert one[name] == pytest.approx(two[name], rel=1e-4)


def test_options_of_optimizers_are_those_of_their_signatures() -> None:
    assert {
        "sgd",
        "adam",
        "adamw",
        "lbfgs",
        "kfac-sgd",
        "kfac-adamw",
        "ekfac-sgd",
        "diagonal-newton",
        "hessian-free",
    } <= {*OPTIMIZERS}
    for config in OPTIMIZERS.values():
        built = config().resolved({})
        own = inspect.signature(config.kind).parameters
        for name, value in built.settings().items():
            assert value == own[name].default
        assert own.keys() - built.settings().keys() <= {"params", "maximize", "differentiable", "capturable"}
    tuned = OPTIMIZERS["sgd"]().resolved({"lr": 0.3})
    assert tuned.lr == 0.3 and OPTIMIZERS["sgd"](lr=0.2).resolved({"lr": 0.3}).lr == 0.2  # pyright: ignore


def test_none_is_a_setting_of_its_own() -> None:
    arguments = ["--problem", "mnist5k-autoencoder", "kfac-sgd"]
    left, none = (
        parse([*arguments, *settings]).resolved().optimizer.settings()
        for settings in ((), ("--kl-clip", "None", "--max-factor-size", "None"))
    )
    assert (left["kl_clip"], left["max_factor_size"], left["damping"]) == (0.0001, 128, 0.005)
    assert none == {**left, "kl_clip": None, "max_factor_size": None}


def test_help_lists_problems_and_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    for name, problem in PROBLEMS.items():
        dataset = data.DATASETS[problem.data]
        size = sum(p.numel() for p in problem.model(dataset.shape, dataset.classes).parameters())
        [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert f"{size:,}" in line and f"{problem.epochs}" in line and problem.data in line
    for name in OPTIMIZERS:
        assert f"• {name}" in text


def test_a_run_begins_without_what_takes_long_to_import() -> None:
    script = "import sys; from experiments.train import parse; parse(['sgd']); sys.exit('torchvision' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", script], env=environment(), timeout=400).returncode


def test_compare_prints_its_table_and_trains_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison("digits-mlp", ("sgd", "adamw"), seeds=(0, 1), epochs=2, out=tmp_path, wandb="disabled")
    result = compare(comparison)
    header, rule, *rows = result.splitlines()
    assert "steps" in header and "seconds" in header and set(rule) == {"|", "-"}
    assert [row.split()[1] for row in rows] == ["sgd", "adamw"]
    assert all("±" in row for row in rows)
    assert (tmp_path / "digits-mlp-comparison.md").read_text() == result + "\n"
    require_picture(tmp_path / "digits-mlp-comparison.png")

    def written() -> dict[str, int]:
        return {file.parent.name: file.stat().st_mtime_ns for file in tmp_path.glob("*/metrics.jsonl")}

    first = written()
    assert len(first) == 4
    assert compare(comparison) == result and written() == first
    assert capsys.readouterr().out.count("trained before") == 4
    (tmp_path / "digits-mlp-sgd-1" / "finished.json").unlink()  # interrupted
    compare(comparison)
    assert {name for name, time in written().items() if time != first[name]} == {"digits-mlp-sgd-1"}
    second = written()
    compare(replace(comparison, epochs=1, optimizers=("adamw",)))  # other settings
    assert {name for name, time in written().items() if time != second[name]} == {
        "digits-mlp-adamw-0",
        "digits-mlp-adamw-1",
    }
    third = written()
    compare(replace(comparison, epochs=1, optimizers=("adamw",), seeds=(0,), again=True))
    assert {name for name, time in written().items() if time != third[name]} == {"digits-mlp-adamw-0"}


@pytest.mark.parametrize("empty", ["optimizers", "seeds"])
def test_compare_of_nothing_is_refused(empty: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--optimizers and --seeds need at least one each"):
        compare(Comparison(**{"out": tmp_path, empty: ()}))


def test_compare_of_autoencoders_shows_losses(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=np.zeros(40, int), x_test=images, y_test=np.zeros(40, int))
    comparison = Comparison(
        "mnist5k-autoencoder",
        ("sgd",),
        epochs=1,
        batch_size=20,
        npz=tmp_path / "own.npz",
        out=tmp_path,
        wandb="disabled",
    )
    header, _, row = compare(comparison).splitlines()
    assert "held-out loss" in header and "nan" not in row
    require_picture(tmp_path / "mnist5k-autoencoder-comparison.png")


def sweep_file(tmp_path: Path, **changes: Any) -> Path:
    settings = {
        "program": "experiments.train",
        "command": ["${env}", "${interpreter}", "-m", "${program}", "--problem=digits-mlp", "sgd", "${args}"],
        "method": "grid",
        "metric": {"name": "test_loss", "goal": "minimize"},
        "parameters": {"lr": {"values": [0.1, 1e30]}, "epochs": {"value": 1}, "wandb": {"value": "disabled"}},
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def test_a_sweep_runs_its_grid_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, metric, smaller = grid(Sweep(sweep_file(tmp_path), out=tmp_path / "out"))
    assert [one.point for one in runs] == [{"lr": 0.1}, {"lr": 1e30}]
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    train(runs[0].config)
    before = read_metrics(tmp_path / "out" / "lr=0.1")
    good, bad = map(sweep_run, runs)
    assert good is None and bad is not None and "lower --lr" in bad
    assert read_metrics(tmp_path / "out" / "lr=0.1") == before  # not again
    text = table_of_sweep(runs, metric, smaller)
    assert [line.split()[1] for line in text.splitlines()[2:]] == ["0.1", "1e+30"] and "inf" in text
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("trained again"))
    assert [sweep_run(one) for one in runs] == [None, None]


def test_the_sweep_file_means_the_same_to_wandb() -> None:
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    settings = yaml.safe_load(Sweep.file.read_text())
    runs, metric, _ = grid(Sweep())
    assert len(runs) == 18 and metric == "test_loss" and len({one.config for one in runs}) == 18
    for one in runs:
        arguments = utils.create_sweep_command_args({"args": {name: {"value": v} for name, v in one.point.items()}})
        words = [w for word in settings["command"] for w in (arguments["args"] if word == "${args}" else [word])]
        ours = [word for word in one.arguments if not word.startswith(("--out", "--resume"))]
        assert words[words.index("${program}") + 1 :] == ours


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "bayes"}, "needs wandb's server"),
        ({"parameters": None}, "is no sweep"),
        ({"command": ["python", "${args}"]}, "is no sweep"),
        ({"metric": {"name": "train_loss"}}, "must be one of train_set_loss, .*got train_loss"),
        ({"metric": {"name": "test_loss", "goal": "min"}}, "to minimize or to maximize; got test_loss, to min"),
    ],
)
def test_sweeps_that_cannot_run_here(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        grid(Sweep(sweep_file(tmp_path, **changes)))


def test_a_sweep_of_no_jobs_is_refused() -> None:
    with pytest.raises(SettingsError, match="--jobs must be at least 1"):
        grid(Sweep(jobs=0))


def test_inspect_draws_what_a_checkpoint_says(tmp_path: Path) -> None:
    pictures = inspect_checkpoint(Inspection(run(tmp_path, "kfac-sgd"), samples=100))
    assert [picture.name for picture in pictures] == ["traces.png", "spectra.png", "gradients.png", "hessian.png"]
    for picture in pictures:
        require_picture(picture)
    again = inspect_checkpoint(
        Inspection(tmp_path / "checkpoint.pt", samples=20, hessian_samples=0, out=tmp_path / "o")
    )
    assert {picture.parent for picture in again} == {tmp_path / "o"} and len(again) == 3
    with pytest.raises(ValueError, match="holds no checkpoint"):
        inspect_checkpoint(Inspection(tmp_path / "o"))
    with pytest.raises(ValueError, match="--samples must be at least 1, got 0"):
        inspect_checkpoint(Inspection(tmp_path, samples=0))
    with pytest.raises(ValueError, match="--hessian-samples must be at least 0, got -1"):
        inspect_checkpoint(Inspection(tmp_path, hessian_samples=-1))


def test_inspect_tells_of_samples_that_are_no_images() -> None:
    def told(x: torch.Tensor) -> list[str]:
        y, norms = torch.tensor([1, 0, 2]), torch.tensor([1.0, 3.0, 2.0])
        [text] = draw_gradients(x, y, norms, torch.eye(3)).subfigs[1].texts
        return text.get_text().splitlines()[1:]

    assert told(torch.randn(3, 5)) == ["       3  is 0, said 1", "       2  is 2, said 2", "       1  is 1, said 0"]
    assert told(torch.randn(3, 2, 5, 5)) == told(torch.randn(3, 5))
    words = torch.tensor([[data.ALPHABET.index(letter) for letter in word] for word in ("one", "two", "six")])
    assert told(words) == ["       3  'two'", "       2  'six'", "       1  'one'"]


def test_curvature_per_layer_is_what_its_names_say() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).double()
    lossfunc, x, y = torch.nn.CrossEntropyLoss(), torch.randn(30, 5, dtype=torch.float64), torch.randint(3, (30,))
    layers, histograms = layer_statistics(model, lossfunc, x, y, mc_samples=3000)
    norms, z = sample_norms(model, lossfunc, x, y)
    assert z.equal(model(x)) and all(p.grad is None and not hasattr(p, "kfac") for p in model.parameters())
    parameters = dict(model.named_parameters())
    single = [
        torch.autograd.grad(lossfunc(model(x[n : n + 1]), y[n : n + 1]), [*parameters.values()]) for n in range(30)
    ]
    torch.testing.assert_close(norms, torch.stack([torch.cat([g.flatten() for g in own]).norm() for own in single]))
    for name, gradients in zip(parameters, zip(*single, strict=True), strict=True):
        stacked = torch.stack(gradients).flatten(1)
        noise = stacked.var(0, correction=0).sum() / 30
        assert layers[name]["gradient_snr"] == pytest.approx((stacked.mean(0).square().sum() / noise).item())
    second_moment = torch.linalg.eigvalsh(x.T @ x / 30)
    assert layers["0.weight"]["top_A"] == pytest.approx(second_moment.max().item())
    torch.testing.assert_close(10 ** histograms["log10_eigenvalues_A/0.weight"], second_moment.flip(0))
    p = model(x).softmax(1)
    trace = (p - p.square()).sum() / 30  # of the Hessian in the last bias
    assert layers["2.bias"]["ggn_trace"] == pytest.approx(trace.item(), rel=0.05)


def test_factors_of_an_embedding_are_called_by_their_sides() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3))
    tokens, y = torch.randint(5, (20, 3)), torch.randint(3, (20,))
    layers, histograms = layer_statistics(model, torch.nn.CrossEntropyLoss(), tokens, y)
    shares = tokens.flatten().bincount(minlength=5).sort(descending=True).values / 60
    torch.testing.assert_close(10 ** histograms["log10_eigenvalues_A/0.weight"], shares)
    assert layers["0.weight"]["top_A"] == pytest.approx(shares[0].item())


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
