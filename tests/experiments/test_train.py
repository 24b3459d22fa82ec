"""Training: it learns, logs, refuses wrong settings, and follows its seed."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import (
    EPOCHS,
    command,
    losses,
    run,
)

from curvopt.optim import KFACPreconditioner
from experiments import data
from experiments.config import Config, parse
from experiments.metrics import evaluations, read_metrics
from experiments.optimizers import OPTIMIZERS
from experiments.problems import PROBLEMS
from experiments.settings import DivergedError, SettingsError
from experiments.train import main, train
from experiments.training import evaluate


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns(optimizer: str, tmp_path: Path) -> None:
    tuned = optimizer in PROBLEMS["digits-mlp"].tuned
    rows = evaluations(read_metrics(run(tmp_path, optimizer, layers_every=0)))
    assert [row["epoch"] for row in rows] == list(range(EPOCHS + 1))
    factor = 2 if tuned else 1
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / factor
    assert rows[-1]["test/loss"] < rows[0]["test/loss"] / factor
    assert rows[-1]["test/accuracy"] > rows[0]["test/accuracy"]


def test_metrics_have_a_row_for_every_step_and_every_evaluation(tmp_path: Path) -> None:
    run(tmp_path, batch_size=100)
    rows = read_metrics(tmp_path)
    steps = [row for row in rows if "train/batch_loss" in row]
    digits = data.load("digits", tmp_path)
    per_epoch = len(digits.train.x) // 100
    assert [row["step"] for row in steps] == list(range(1, EPOCHS * per_epoch + 1))
    assert [row["epoch"] for row in steps] == [epoch for epoch in range(1, EPOCHS + 1) for _ in range(per_epoch)]
    seconds = [row["time/training"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] == 0
    for before, row in zip(rows, rows[1:], strict=False):
        if "train/loss" in row:  # evaluation does not count as training time
            assert row["time/training"] == before["time/training"]
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 100


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-sgd"])
def test_a_seed_fixes_the_curve(optimizer: str, tmp_path: Path) -> None:
    first, again, other = (losses(run(tmp_path / str(i), optimizer, seed=seed)) for i, seed in enumerate([5, 5, 6]))
    assert first == again
    assert first != other


@pytest.mark.usefixtures("pictures")
def test_divergence_stops_the_run_and_says_what_to_lower(tmp_path: Path) -> None:
    settings = replace(OPTIMIZERS["sgd"](), lr=1e30)
    with pytest.raises(DivergedError, match=r"sgd \(lr 1e\+30\).*lower --lr"):
        train(Config(problem="digits-mlp", optimizer=settings, out=tmp_path, wandb="disabled"))
    last = read_metrics(tmp_path)[-1]  # the row is there, as valid JSON
    assert [name for name, value in last.items() if value is None] in (
        ["train/batch_loss", "optim/gradient_norm"],
        ["train/batch_loss"],
        ["train/loss", "test/loss"],
    )
    assert (tmp_path / "curves.png").exists()


def test_gradient_norms_are_those_of_the_gradients_that_the_loss_has(tmp_path: Path) -> None:
    """The first of every optimizer are equal, as all begin with one network and one batch."""
    first = {}
    for optimizer in ("sgd", "kfac-sgd", "kfac-preconditioner", "hessian-free"):
        rows = read_metrics(run(tmp_path / optimizer, optimizer, epochs=1, batch_size=256, layers_every=0))
        norms = [row["optim/gradient_norm"] for row in rows if "optim/gradient_norm" in row]
        assert len(norms) == 5 and min(norms) > 0
        first[optimizer] = norms[0]
    assert list(first.values()) == pytest.approx([first["sgd"]] * 4, rel=1e-4)


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
        ({"out": Path(__file__)}, "--out: there cannot be a run directory.*test_train.py"),
        ({"data": "mnist5k", "npz": Path("own.npz")}, "give one"),
        ({"problem": "mnist-2c2d", "data": "digits"}, r"takes samples like \[1, 28, 28\], got \[1, 8, 8\]"),
        ({"problem": "help-gpt", "augment": True}, "--augment needs images"),
        ({"optimizer": OPTIMIZERS["lbfgs"](), "amp": "fp16"}, "lbfgs does not work with .* --amp fp16"),
        ({"optimizer": OPTIMIZERS["muon"](), "amp": "fp16"}, "muon does not work with .* --amp fp16"),
        ({"amp": "fp16"}, "--amp fp16 needs a GPU"),
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
    assert math.isclose(accuracy, (z.argmax(1) == split.y).double().mean().item(), rel_tol=1e-6)


def test_the_accuracy_of_texts_is_a_share_of_their_characters() -> None:
    split = data.Split(torch.randn(7, 5, 4), torch.randint(3, (7, 4)))
    model = torch.nn.Conv1d(5, 3, 1)
    _, accuracy = evaluate(model, torch.nn.CrossEntropyLoss(), split, batch_size=3)
    assert math.isclose(accuracy, (model(split.x).argmax(1) == split.y).double().mean().item(), rel_tol=1e-6)


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


@pytest.mark.parametrize("optimizer", ["sgd", "kfac-sgd"])
@pytest.mark.parametrize(("settings", "tolerance"), [({"accumulate": 4}, 1e-3), ({"amp": "bf16"}, 0.2)])
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
    rates = np.array([row["optim/lr"] for row in read_metrics(tmp_path) if "optim/lr" in row])
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


@pytest.mark.slow(reason="processes that start and train together")
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
    for name in ("train/loss", "test/loss", "test/accuracy"):
        assert one[name] == pytest.approx(two[name], rel=1e-4)


def test_options_of_optimizers_are_those_of_their_signatures() -> None:
    ours = {"kfac-sgd", "kfac-adamw", "ekfac-sgd", "diagonal-newton", "hessian-free", "kfac-preconditioner"}
    assert ours | {"sgd", "adam", "adamw", "lbfgs", "muon"} <= {*OPTIMIZERS}
    for name, config in OPTIMIZERS.items():
        options = config().resolved({}).options()
        own = {option: p.default for option, p in inspect.signature(config.kind).parameters.items()}
        if name == "kfac-preconditioner":
            of_preconditioner = inspect.signature(KFACPreconditioner).parameters
            own = {option: p.default for option, p in of_preconditioner.items()} | own
        for option, value in options.items():
            assert value == own[option]
        assert own.keys() - options.keys() <= {
            "params",
            "model",
            "attached",
            "options",
            "state_dtype",  # a torch.dtype, which a command line cannot give
            *("maximize", "differentiable", "capturable"),
        }
    tuned = OPTIMIZERS["sgd"]().resolved({"lr": 0.3})
    assert tuned.lr == 0.3 and OPTIMIZERS["sgd"](lr=0.2).resolved({"lr": 0.3}).lr == 0.2  # pyright: ignore


def test_muon_takes_matrices_and_leaves_the_rest_to_adamw() -> None:
    layers = [torch.nn.Embedding(5, 4), torch.nn.Conv1d(2, 3, 1), torch.nn.Linear(4, 3)]
    embedding, convolution, linear = layers
    optimizer = OPTIMIZERS["muon"]().resolved({"lr": 0.5}).build(torch.nn.ModuleList(layers))
    matrices, others = (group["params"] for group in optimizer.param_groups)
    assert matrices == [linear.weight]
    assert {id(p) for p in others} == {id(p) for p in (embedding.weight, *convolution.parameters(), linear.bias)}
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
def test_a_preconditioner_changes_the_steps_of_the_optimizer_behind_it(base: str, tmp_path: Path) -> None:
    settings = {"epochs": 1, "layers_every": 0}
    plain = OPTIMIZERS[base](lr=0.01, **{"sgd": {"momentum": 0.9}, "adamw": {"weight_decay": 0.0}, "muon": {}}[base])
    before = OPTIMIZERS["kfac-preconditioner"](base=base, lr=0.01)
    with_it, without = (run(tmp_path / str(i), config, **settings) for i, config in enumerate((before, plain)))
    assert losses(with_it)[0] == losses(without)[0] and losses(with_it)[1:] != losses(without)[1:]
    if base == "sgd":  # nothing but the damping is left
        damped = run(tmp_path / "damped", replace(before, lr=1e8, damping=1e10), **settings)
        assert losses(damped) == pytest.approx(losses(without), rel=1e-2)


def test_none_is_a_setting_of_its_own() -> None:
    arguments = ["--problem", "mnist5k-autoencoder", "kfac-sgd"]
    left, none = (
        parse([*arguments, *settings]).resolved().optimizer.options()
        for settings in ((), ("--rms-clip", "None", "--max-factor-size", "None"))
    )
    assert (left["rms_clip"], left["max_factor_size"], left["damping"]) == (0.015, 128, None)
    assert none == {**left, "rms_clip": None, "max_factor_size": None}
