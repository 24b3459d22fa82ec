"""The runs of a sweep: the points that Optuna proposes, trained several at a time, and a table of what they reach."""

import contextlib
import itertools
import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import joblib
import optuna
import pandas as pd
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from tqdm import tqdm

from curvopt import CurvoptError
from experiments.config import Config, check_least, parse
from experiments.data import DataError
from experiments.metrics import evaluations, read_metrics
from experiments.plots import markdown, plot_sweep
from experiments.run_directory import is_finished
from experiments.settings import DivergedError, SettingsError
from experiments.train import train

if TYPE_CHECKING:
    from experiments.sweep import Sweep

#: Numbers that the last evaluation of a run has.
METRICS = ("train/loss", "test/loss", "test/accuracy", "time/training")
_RUNS = 20  # of a search that has no end of its own


@dataclass(frozen=True)
class Run:
    """A point of the search."""

    point: dict[str, Any]
    arguments: tuple[str, ...]  # of experiments.train
    config: Config


class Search:
    """What a sweep file says, and the study of Optuna that proposes its points.

    Attributes:
        metric: the number that runs are compared by.
        smaller: whether less of it is better.
        space: what the parameters may be.

    Raises:
        SettingsError: the file cannot be read, or asks for what does not run here.
    """

    def __init__(self, sweep: "Sweep") -> None:
        check_least(sweep, jobs=1, runs=1)
        self.sweep = sweep
        try:
            settings = yaml.safe_load(sweep.file.read_text())
            self.fixed = {name: spec["value"] for name, spec in settings["parameters"].items() if "value" in spec}
            self.space = {
                name: _distribution(name, spec) for name, spec in settings["parameters"].items() if "value" not in spec
            }
            command, metric = settings["command"], settings["metric"]
            self.method = settings["method"]
            self.metric, goal = metric["name"], metric.get("goal", "minimize")
            self._words = command[command.index("${program}") + 1 :]
            self._cap = settings.get("run_cap")
        except SettingsError as error:
            raise SettingsError(f"{sweep.file}: {error}") from error
        except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
            message = f"{sweep.file} is no sweep with command, method, metric, parameters: {error!r}"
            raise SettingsError(message) from error
        if self.method not in ("grid", "random", "bayes"):
            raise SettingsError(f"{sweep.file}: the method must be grid, random or bayes, got {self.method}")
        if self.metric not in METRICS or goal not in ("minimize", "maximize"):
            raise SettingsError(
                f"{sweep.file}: the metric must be one of {', '.join(METRICS)}, to minimize or to maximize; got "
                f"{self.metric}, to {goal}"
            )
        self.smaller = goal == "minimize"
        sampler = optuna.samplers.TPESampler if self.method == "bayes" else optuna.samplers.RandomSampler
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(sampler=sampler(seed=sweep.seed), direction=goal)
        self.size = sweep.runs or self._cap or _RUNS
        if self.method == "grid":
            choices = [
                spec.choices if isinstance(spec, CategoricalDistribution) else () for spec in self.space.values()
            ]
            if not all(choices):
                raise SettingsError(f"{sweep.file}: a grid needs values, not min and max; take method random or bayes")
            points = [dict(zip(self.space, chosen, strict=True)) for chosen in itertools.product(*choices)]
            for point in points:
                self.study.enqueue_trial(point)
            self.size = len(points)

    def batches(self) -> Iterator[list[Run]]:
        """The runs that may begin together. Their results are looked at when the next ones are asked for."""
        most, left = self.sweep.jobs if self.method == "bayes" else self.size, self.size
        while left:
            trials = [self.study.ask(self.space) for _ in range(min(most, left))]
            left -= len(trials)
            runs = [self.run_at(trial.params) for trial in trials]
            yield runs
            for trial, one in zip(trials, runs, strict=True):
                reached = result(one, self.metric)
                # a run that diverged counts as worse than all that did not
                self.study.tell(trial, reached, optuna.trial.TrialState.PRUNED if reached is None else None)

    def run_at(self, varied: Mapping[str, Any]) -> Run:
        """The run at a point."""
        names = [f"{name}={value}" for name, value in varied.items() if not self.space[name].single()]
        # no name leaves the directory: what is no plain character of a file's name is written as %xx
        directory = self.sweep.out / (quote(",".join(names), safe="=,+-. ") or "only")
        arguments = [f"--{name}={value}" for name, value in {**self.fixed, **varied}.items()]
        expanded: list[str] = []
        for word in self._words:
            expanded += sorted(arguments) if word == "${args}" else [str(word)]
        expanded += [f"--out={directory}", "--overwrite" if self.sweep.overwrite else "--resume"]
        return Run(dict(varied), tuple(expanded), parse(expanded))


def _distribution(name: str, spec: Mapping[str, Any]) -> BaseDistribution:
    """What wandb's words for a parameter are to Optuna."""
    if "values" in spec:
        return CategoricalDistribution(spec["values"])
    low, high = spec["min"], spec["max"]
    integers = isinstance(low, int) and isinstance(high, int)
    kind = spec.get("distribution", "int_uniform" if integers else "uniform")
    if kind == "int_uniform":
        return IntDistribution(low, high)
    if kind == "uniform":
        return FloatDistribution(low, high)
    if kind == "log_uniform_values":
        return FloatDistribution(low, high, log=True)
    raise SettingsError(
        f"{name}: the distribution must be uniform, log_uniform_values or int_uniform, got {kind}; or give values"
    )


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


def result(one: Run, metric: str) -> float | None:
    """The number that a run ended with; ``None`` if it diverged or failed."""
    out = one.config.resolved().out
    assert out is not None
    if not (out / "finished.json").exists() or json.loads((out / "finished.json").read_text())["diverged"] is not None:
        return None
    return evaluations(read_metrics(out))[-1][metric]


def frame_of(runs: Sequence[Run], metric: str, smaller: bool) -> pd.DataFrame:
    """A row for each setting, mean over seeds, the best first; those that diverged or failed last."""
    worst = float("inf" if smaller else "-inf")
    rows = []
    for one in runs:
        reached = result(one, metric)
        settings = {name: value for name, value in one.point.items() if name != "seed"}
        rows.append({**settings, metric: worst if reached is None else reached})
    frame = pd.DataFrame(rows).assign(runs=1)
    names = list(frame.columns[:-2])
    if names:
        frame = frame.groupby(names, as_index=False, sort=False, dropna=False).agg({metric: "mean", "runs": "sum"})
    return frame.sort_values(metric, ascending=smaller, kind="stable")


def table(frame: pd.DataFrame) -> str:
    """The settings as Markdown."""
    return markdown(frame.map(lambda value: f"{value:.4g}" if isinstance(value, float) else value))


def run_all(sweep: "Sweep") -> tuple[str, list[str]]:
    """Trains what is missing, draws ``<out>/sweep.png`` and returns the table, and what stopped runs that failed.

    Raises:
        SettingsError: the file cannot be read, or asks for what does not run here.
    """
    search = Search(sweep)
    runs: list[Run] = []
    failures: list[str] = []
    bar = tqdm(total=search.size, unit="run")
    for batch in search.batches():
        missing = [one for one in batch if sweep.overwrite or not is_finished(one.config.resolved())]
        bar.update(len(batch) - len(missing))
        # one thread each: runs at the same time would fight for the cores
        with joblib.parallel_config("loky", inner_max_num_threads=1):
            done = joblib.Parallel(sweep.jobs, return_as="generator_unordered")(
                joblib.delayed(run)(one.arguments) for one in missing
            )
            for failure in done:
                bar.update()
                failures += [failure] if failure else []
        runs += batch
    bar.close()
    frame = frame_of(runs, search.metric, search.smaller)
    sweep.out.mkdir(parents=True, exist_ok=True)
    (sweep.out / "sweep.md").write_text(table(frame) + "\n")
    plot_sweep(frame, search.metric, sweep.out / "sweep.png")
    return table(frame), failures
