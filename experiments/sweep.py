"""Run the grid of a wandb sweep file here, several runs at a time, without a server.

Runs that are finished with the very same settings are not trained again, and interrupted ones go on from their
checkpoint if they have one (--save-every), so the same command resumes a sweep.
"""

import contextlib
import itertools
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import joblib
import pandas as pd
import tyro
import yaml
from tqdm import tqdm

from curvopt import CurvoptError
from experiments.config import Config, SettingsError, check_least, parse
from experiments.data import DataError
from experiments.plots import evaluations, markdown, read_metrics
from experiments.run_directory import is_finished
from experiments.train import train
from experiments.training import DivergedError

#: Numbers that the last evaluation of a run has.
METRICS = ("train/loss", "test/loss", "test/accuracy", "time/training")


@dataclass(frozen=True)
class Sweep:
    """Which grid, and how to run it."""

    file: Annotated[Path, tyro.conf.Positional] = Path(__file__).with_name("sweep.yaml")
    """A file for `wandb sweep`: command, method grid, metric, and parameters with a value or values."""
    jobs: int = 1
    """Runs at the same time."""
    out: Path = Path("runs") / "sweep"
    """Directory for the run directories, each named by the settings in which it differs."""
    overwrite: bool = False
    """Train all runs anew, also those that are finished."""


@dataclass(frozen=True)
class Run:
    """A point of the grid."""

    point: dict[str, Any]
    arguments: tuple[str, ...]  # of experiments.train
    config: Config


def grid(sweep: Sweep) -> tuple[list[Run], str, bool]:
    """The runs of a sweep file, the metric to compare them by, and whether less of it is better.

    Raises:
        SettingsError: the file cannot be read, needs wandb's server, or compares by a number that runs do not have.
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
        expanded += [f"--out={directory}", "--overwrite" if sweep.overwrite else "--resume"]
        runs.append(Run({parameter: point[parameter] for parameter in varied}, tuple(expanded), parse(expanded)))
    return runs, name, goal == "minimize"


def run(arguments: Sequence[str]) -> str | None:
    """Trains a point of the grid; the error that stopped it, if one did. Its output goes to log.txt."""
    config = parse(arguments).resolved()
    assert config.out is not None
    config.out.mkdir(parents=True, exist_ok=True)
    with open(config.out / "log.txt", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        handler = logging.StreamHandler(log)
        logging.getLogger().addHandler(handler)
        try:
            train(config)
        except (DivergedError, SettingsError, CurvoptError, DataError, OSError) as error:
            print(f"stopped: {error}")
            return f"{shlex.join(arguments)}: {error}"
        finally:
            logging.getLogger().removeHandler(handler)
    return None


def table(runs: Sequence[Run], metric: str, smaller: bool) -> str:
    """The runs as Markdown, mean over seeds, the best first; those that diverged or failed last."""
    rows = []
    for one in runs:
        out = one.config.resolved().out
        assert out is not None
        reached = None
        if (out / "finished.json").exists() and json.loads((out / "finished.json").read_text())["diverged"] is None:
            reached = evaluations(read_metrics(out))[-1][metric]
        if reached is None:
            reached = float("inf" if smaller else "-inf")
        settings = {name: str(value) for name, value in one.point.items() if name != "seed"}
        rows.append({**settings, metric: reached})
    frame = pd.DataFrame(rows).assign(runs=1)
    names = list(frame.columns[:-2])
    if names:
        frame = frame.groupby(names, as_index=False, sort=False).agg({metric: "mean", "runs": "sum"})
    frame = frame.sort_values(metric, ascending=smaller, kind="stable")
    return markdown(frame.assign(**{metric: frame[metric].map("{:.4g}".format)}))


def main() -> None:
    """The command line."""
    sweep = tyro.cli(Sweep, prog="python -m experiments.sweep", description=__doc__)
    try:
        runs, metric, smaller = grid(sweep)
    except SettingsError as error:
        sys.exit(f"stopped: {error}")
    missing = [one for one in runs if sweep.overwrite or not is_finished(one.config.resolved())]
    # one thread each: runs at the same time would fight for the cores
    with joblib.parallel_config("loky", inner_max_num_threads=1):
        done = joblib.Parallel(sweep.jobs, return_as="generator_unordered")(
            joblib.delayed(run)(one.arguments) for one in missing
        )
        failures = [failure for failure in tqdm(done, total=len(missing), unit="run") if failure]
    print("\n".join(failures), table(runs, metric, smaller), sep="\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
