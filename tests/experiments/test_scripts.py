"""The other scripts: lists, help, compare, sweep, inspect."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from training_runs import (
    environment,
    require_picture,
    run,
)

from experiments import __main__ as listing
from experiments import data
from experiments.compare import Comparison, compare, table
from experiments.curvature import layer_statistics
from experiments.inspect import Inspection
from experiments.metrics import read_metrics
from experiments.optimizers import OPTIMIZERS
from experiments.pictures import draw, draw_gradients, sample_norms
from experiments.problems import PROBLEMS
from experiments.search import Search, frame_of
from experiments.search import table as table_of_sweep
from experiments.settings import OPTIMIZERS_IN_WORDS, SettingsError, show_help
from experiments.sweep import Sweep
from experiments.sweep import main as sweep_main
from experiments.train import train


def test_help_lists_problems_and_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        show_help(["--help"], "")
    text = capsys.readouterr().out
    for name, problem in PROBLEMS.items():
        [at] = [n for n, line in enumerate(text.splitlines()) if line.split()[:1] == [name]]
        first, second = text.splitlines()[at : at + 2]
        assert problem.title in first and f"{problem.epochs} epochs of batches of {problem.batch_size}" in second
        assert ("not tuned" in second) == (not {"sgd", "adamw"} <= problem.tuned.keys())
    assert {*OPTIMIZERS} == {*OPTIMIZERS_IN_WORDS} <= {line.split()[0] for line in text.splitlines() if line.strip()}


def test_the_package_lists_scripts_problems_and_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    listing.main()
    text = capsys.readouterr().out
    for name in ("train", "compare", "sweep", "inspect"):
        assert f"python -m experiments.{name} " in text
    assert {*PROBLEMS, *OPTIMIZERS} <= {line.split()[0] for line in text.splitlines() if line.strip()}


@pytest.mark.parametrize("script", ["train", "compare", "sweep", "inspect"])
def test_help_does_without_pytorch(script: str) -> None:
    code = f"""
import sys
from experiments.{script} import main
try:
    main()
finally:
    sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, "--help"], env=environment(), timeout=400, capture_output=True)
    assert done.returncode == 0 and b"usage: " in done.stdout, done.stderr


def test_a_command_line_is_read_without_what_takes_long_to_import() -> None:
    script = """
import sys
from experiments.config import parse
import experiments.train
parse(["sgd"])
print(*{"torchvision", "sklearn", "matplotlib", "pandas", "accelerate"} & {*sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment(), timeout=400, capture_output=True)
    assert done.returncode == 0 and not done.stdout.strip()


@pytest.mark.usefixtures("pictures")
def test_compare_prints_its_table_and_trains_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison("digits-mlp", ("sgd", "adamw"), seeds=(0, 1), epochs=2, out=tmp_path, wandb="disabled")
    result = compare(comparison)
    header, rule, *rows = result.splitlines()
    assert "steps" in header and "seconds" in header and set(rule) == {"|", "-"}
    assert [row.split()[1] for row in rows] == ["SGD,", "AdamW,"]
    assert all("±" in row for row in rows)
    assert (tmp_path / "digits-mlp-comparison.md").read_text() == result + "\n"
    require_picture(tmp_path / "digits-mlp-comparison.png")

    def written() -> dict[str, int]:
        return {file.parent.name: file.stat().st_mtime_ns for file in tmp_path.glob("*/metrics.jsonl")}

    first = written()
    assert len(first) == 4
    assert compare(comparison) == result and written() == first
    assert capsys.readouterr().out.count("trained before") == 4
    for name in ("finished.json", "checkpoint.pt"):  # interrupted before the first checkpoint
        (tmp_path / "digits-mlp-sgd-1" / name).unlink()
    compare(comparison)
    assert {name for name, time in written().items() if time != first[name]} == {"digits-mlp-sgd-1"}
    second = written()
    others = replace(comparison, epochs=1, optimizers=("adamw",))
    with pytest.raises(SettingsError, match="adamw-0 holds a run that is finished"):  # with other settings
        compare(others)
    compare(replace(others, overwrite=True))
    assert {name for name, time in written().items() if time != second[name]} == {
        "digits-mlp-adamw-0",
        "digits-mlp-adamw-1",
    }


@pytest.mark.parametrize("empty", ["optimizers", "seeds"])
def test_compare_of_nothing_is_refused(empty: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--optimizers and --seeds need at least one each"):
        compare(Comparison(**{"out": tmp_path, empty: ()}))


@pytest.mark.usefixtures("pictures")
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
        "metric": {"name": "test/loss", "goal": "minimize"},
        "parameters": {"lr": {"values": [0.1, 1e30]}, "epochs": {"value": 1}, "wandb": {"value": "disabled"}},
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def test_a_sweep_runs_its_grid_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep() -> tuple[Any, str]:
        with pytest.raises(SystemExit) as stop:
            sweep_main()
        return stop.value.code, capsys.readouterr().out

    monkeypatch.setattr("sys.argv", ["sweep", str(sweep_file(tmp_path)), "--out", str(tmp_path / "out")])
    search = Search(Sweep(sweep_file(tmp_path), out=tmp_path / "out"))
    runs = next(search.batches())
    assert [one.point for one in runs] == [{"lr": 0.1}, {"lr": 1e30}]
    train(runs[0].config)
    before = read_metrics(tmp_path / "out" / "lr=0.1")
    code, printed = sweep()
    assert code == 1 and "\n--problem=digits-mlp sgd --epochs=1 --lr=1e+30" in printed and "lower --lr" in printed
    assert "lower --lr" in (tmp_path / "out" / "lr=1e+30" / "log.txt").read_text()
    assert read_metrics(tmp_path / "out" / "lr=0.1") == before  # not again
    text = table_of_sweep(frame_of(runs, search.metric, search.smaller))
    assert (tmp_path / "out" / "sweep.md").read_text() == text + "\n"
    require_picture(tmp_path / "out" / "sweep.png")
    assert [line.split()[1] for line in text.splitlines()[2:]] == ["0.1", "1e+30"] and "inf" in text
    monkeypatch.setattr("experiments.search.train", lambda config: pytest.fail("trained again"))
    code, printed = sweep()
    assert code == 0 and text in printed


def test_the_sweep_file_means_the_same_to_wandb() -> None:
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    settings = yaml.safe_load(Sweep.file.read_text())
    search = Search(Sweep())
    assert (search.method, search.size, search.metric) == ("bayes", settings["run_cap"], "test/loss")
    [one] = next(search.batches())
    point = {**search.fixed, **one.point}
    arguments = utils.create_sweep_command_args({"args": {name: {"value": v} for name, v in point.items()}})
    words = [w for word in settings["command"] for w in (arguments["args"] if word == "${args}" else [word])]
    ours = [word for word in one.arguments if not word.startswith(("--out", "--resume"))]
    assert words[words.index("${program}") + 1 :] == ours


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_search_takes_numbers_from_ranges(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {
        "lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1},
        "momentum": {"min": 0.0, "max": 0.9},
        "batch_size": {"min": 32, "max": 64},
        "epochs": {"value": 1},
        "layers_every": {"value": 0},
        "wandb": {"value": "disabled"},
    }
    file = sweep_file(tmp_path, method=method, parameters=parameters, run_cap=3)

    def names() -> list[str]:
        monkeypatch.setattr("sys.argv", ["sweep", str(file), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as stop:
            sweep_main()
        assert stop.value.code == 0
        capsys.readouterr()
        return sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())

    first = names()
    assert len(first) == 3
    for name in first:
        point = dict(word.split("=") for word in name.split(","))
        assert 1e-4 <= float(point["lr"]) <= 0.1 and 0 <= float(point["momentum"]) <= 0.9
        assert 32 <= int(point["batch_size"]) <= 64
    monkeypatch.setattr("experiments.search.train", lambda config: pytest.fail("trained again"))
    assert names() == first


def test_names_of_runs_stay_in_the_folder(tmp_path: Path) -> None:
    parameters = {"data_root": {"values": ["../../elsewhere", "/etc", ".."]}, "epochs": {"value": 1}}
    search = Search(Sweep(sweep_file(tmp_path, parameters=parameters), out=tmp_path / "out"))
    places = {one.config.out for one in next(search.batches())}
    assert len(places) == 3 and {place and place.resolve().parent for place in places} == {tmp_path / "out"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "hyperband"}, "must be grid, random or bayes, got hyperband"),
        ({"parameters": {"lr": {"min": 0.1, "max": 1.0}}}, "a grid needs values, not min and max"),
        (
            {"method": "bayes", "parameters": {"lr": {"distribution": "beta", "min": 0.1, "max": 1.0}}},
            "lr: the distribution must be uniform, log_uniform_values or int_uniform, got beta",
        ),
        ({"parameters": None}, "is no sweep"),
        ({"command": ["python", "${args}"]}, "is no sweep"),
        ({"metric": {"name": "train/batch_loss"}}, "must be one of train/loss, .*got train/batch_loss"),
        ({"metric": {"name": "test/loss", "goal": "min"}}, "to minimize or to maximize; got test/loss, to min"),
    ],
)
def test_sweeps_that_cannot_run_here(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        Search(Sweep(sweep_file(tmp_path, **changes)))


def test_a_sweep_of_no_jobs_is_refused() -> None:
    with pytest.raises(SettingsError, match="--jobs must be at least 1"):
        Search(Sweep(jobs=0))


def test_inspect_draws_what_a_checkpoint_says(tmp_path: Path) -> None:
    drawn = draw(Inspection(run(tmp_path, "kfac-sgd"), samples=100))
    assert [picture.name for picture in drawn] == ["traces.png", "spectra.png", "gradients.png", "hessian.png"]
    for picture in drawn:
        require_picture(picture)
    again = draw(Inspection(tmp_path / "checkpoint.pt", samples=20, hessian_samples=0, out=tmp_path / "o"))
    assert {picture.parent for picture in again} == {tmp_path / "o"} and len(again) == 3
    with pytest.raises(ValueError, match="holds no checkpoint"):
        draw(Inspection(tmp_path / "o"))
    with pytest.raises(ValueError, match="--samples must be at least 1, got 0"):
        draw(Inspection(tmp_path, samples=0))
    with pytest.raises(ValueError, match="--hessian-samples must be at least 0, got -1"):
        draw(Inspection(tmp_path, hessian_samples=-1))


def test_inspect_tells_of_samples_that_are_no_images() -> None:
    def described(x: torch.Tensor) -> list[str]:
        y, norms = torch.tensor([1, 0, 2]), torch.tensor([1.0, 3.0, 2.0])
        [text] = draw_gradients(x, y, norms, torch.eye(3)).subfigs[1].texts
        return text.get_text().splitlines()[1:]

    assert described(torch.randn(3, 5)) == [
        "       3  is 0, said 1",
        "       2  is 2, said 2",
        "       1  is 1, said 0",
    ]
    assert described(torch.randn(3, 2, 5, 5)) == described(torch.randn(3, 5))
    words = torch.tensor([[data.ALPHABET.index(letter) for letter in word] for word in ("one", "two", "six")])
    assert described(words) == ["       3  'two'", "       2  'six'", "       1  'one'"]


def test_curvature_per_layer_is_what_its_names_say() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).double()
    lossfunc, x, y = torch.nn.CrossEntropyLoss(), torch.randn(30, 5, dtype=torch.float64), torch.randint(3, (30,))
    layers, eigenvalues = layer_statistics(model, lossfunc, x, y, mc_samples=3000)
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
    torch.testing.assert_close(10 ** eigenvalues["A/0.weight"], second_moment.flip(0))
    p = model(x).softmax(1)
    trace = (p - p.square()).sum() / 30  # of the Hessian in the last bias
    assert layers["2.bias"]["ggn_trace"] == pytest.approx(trace.item(), rel=0.05)


def test_factors_of_an_embedding_are_called_by_their_sides() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3))
    tokens, y = torch.randint(5, (20, 3)), torch.randint(3, (20,))
    layers, eigenvalues = layer_statistics(model, torch.nn.CrossEntropyLoss(), tokens, y)
    shares = tokens.flatten().bincount(minlength=5).sort(descending=True).values / 60
    torch.testing.assert_close(10 ** eigenvalues["A/0.weight"], shares)
    assert layers["0.weight"]["top_A"] == pytest.approx(shares[0].item())


def test_table_counts_the_first_evaluation_at_the_target() -> None:
    def rows(*training_losses: float) -> list[dict]:
        return [
            {"step": 10 * i, "time/training": 0.5 * i, "train/loss": loss, "test/accuracy": 0.5}
            for i, loss in enumerate(training_losses)
        ]

    finished = {"fast": rows(2, 0.5, 0.1), "slow": rows(2, 1, 0.7, 0.5)}
    found = [{"optimizer": label, "run": 0, **row} for label, of in finished.items() for row in of]
    labels = ["fast", "slow", "never"]
    lines = table(found, labels, 1, 0.5).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][0] == "to training loss 0.5"
    assert cells[2:] == [
        ["fast", "10", "0.50", "50.0"],
        ["slow", "30", "1.50", "50.0"],
        ["never", "– (0 of 1 runs)", "–", "–"],
    ]
    assert table(found, labels, 1, 0.2).count("(0 of 1 runs)") == 2
