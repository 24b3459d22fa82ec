"""Run the grid of a wandb sweep file here, several runs at a time, without a server.

Runs that are finished with the very same settings are not trained again, and interrupted ones go on from their
checkpoint if they have one (--save-every), so the same command resumes a sweep.
"""

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml
from tqdm import tqdm

from experiments.plots import evaluations, read_metrics
from experiments.train import Config, SettingsError, check_least, parse

#: What the last evaluation of a run has.
METRICS = ("train_set_loss", "test_loss", "test_accuracy", "seconds")


@dataclass(frozen=True)
class Sweep:
    """Which grid, and how to run it."""

    file: Annotated[Path, tyro.conf.Positional] = Path(__file__).with_name("sweep.yaml")
    """What `wandb sweep` takes: command, method grid, metric, and parameters with a value or values."""
    jobs: int = 1
    """Runs at the same time."""
    out: Path = Path("runs") / "sweep"
    """Directory for the run directories, each named by the settings in which it differs."""


@dataclass(frozen=True)
class Run:
    """A point of the grid."""

    point: dict[str, Any]
    arguments: tuple[str, ...]  # of experiments.train
    config: Config


def grid(sweep: Sweep) -> tuple[list[Run], str, bool]:
    """The runs of a sweep file, the metric to compare them by, and whether less of it is better.

    Raises:
        SettingsError: the file cannot be read, needs wandb's server, or compares by what runs do not have.
    """
    try:
        settings = yaml.safe_load(sweep.file.read_text())
        values = {
            name: spec["values"] if "values" in spec else [spec["value"]]
            for name, spec in settings["parameters"].items()
        }
        method, command, metric = settings["method"], settings["command"], settings["metric"]
        name, goal = metric["name"], metric.get("goal", "minimize")
        words = command[command.index("${program}") + 1 :]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise SettingsError(f"{sweep.file} is no sweep with command, method, metric, parameters: {error!r}") from error
    check_least(sweep, jobs=1)
    if method != "grid":
        raise SettingsError(f"{sweep.file}: method {method} needs wandb's server; only grid runs without")
    if name not in METRICS or goal not in ("minimize", "maximize"):
        raise SettingsError(
            f"{sweep.file}: the metric must be one of {', '.join(METRICS)}, to minimize or to maximize; got {name}, "
            f"to {goal}"
        )
    varied = [parameter for parameter, choices in values.items() if len(choices) > 1]
    runs = []
    for chosen in itertools.product(*values.values()):
        point = dict(zip(values, chosen, strict=True))
        directory = sweep.out / (",".join(f"{parameter}={point[parameter]}" for parameter in varied) or "only")
        arguments = [f"--{parameter}={value}" for parameter, value in point.items()]
        expanded: list[str] = []
        for word in words:
            expanded += arguments if word == "${args}" else [str(word)]
        expanded += [f"--out={directory}", "--resume"]
        runs.append(Run({parameter: point[parameter] for parameter in varied}, tuple(expanded), parse(expanded)))
    return runs, name, goal == "minimize"


def run(run: Run) -> str | None:
    """Trains a point of the grid unless it is finished; ``None`` or what went wrong."""
    config = run.config.resolved()
    assert config.out is not None
    if config.finished():
        return None
    arguments = list(run.arguments)
    if (config.out / "config.json").exists() and set(config.differences()) - {"versions"}:
        arguments.remove("--resume")  # another run had this name
    config.out.mkdir(parents=True, exist_ok=True)
    with open(config.out / "log.txt", "wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "experiments.train", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # runs at the same time would fight for the cores
        ).returncode
    lines = (config.out / "log.txt").read_text(errors="replace").splitlines()
    return None if code == 0 else f"{shlex.join(arguments)}: {lines[-1] if lines else f'exit status {code}'}"


def table(runs: Sequence[Run], metric: str, smaller: bool) -> str:
    """The runs as Markdown, mean over seeds, the best first; those that diverged or failed last."""
    groups: dict[str, list[float]] = {}
    for one in runs:
        setting = " | ".join(str(value) for name, value in one.point.items() if name != "seed")
        out = one.config.resolved().out
        assert out is not None
        reached = float("inf") if smaller else float("-inf")
        if (out / "finished.json").exists() and json.loads((out / "finished.json").read_text())["diverged"] is None:
            value = evaluations(read_metrics(out))[-1][metric]
            reached = reached if value is None else value
        groups.setdefault(setting, []).append(reached)
    names = [name for name in runs[0].point if name != "seed"]
    lines = [f"| {' | '.join([*names, metric, 'runs'])} |", "|---" * (len(names) + 2) + "|"]
    for setting, values in sorted(groups.items(), key=lambda item: statistics.fmean(item[1]) * (1 if smaller else -1)):
        lines.append(f"| {setting} | {statistics.fmean(values):.4g} | {len(values)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    sweep = tyro.cli(Sweep, prog="python -m experiments.sweep", description=__doc__)
    try:
        runs, metric, smaller = grid(sweep)
    except SettingsError as error:
        sys.exit(str(error))
    with ThreadPoolExecutor(sweep.jobs) as pool:
        failures = [failure for failure in tqdm(pool.map(run, runs), total=len(runs), unit="run") if failure]
    print("\n".join(failures), table(runs, metric, smaller), sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
