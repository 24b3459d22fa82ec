"""Compare optimizers on one problem: how many steps and seconds do they need to a training loss?

Trains every optimizer with every seed as experiments.train does, then prints a table and draws curves. The loss
compared is that over the whole training set, evaluated after every epoch; the first evaluation at or below the target
counts. Learning rates and damping are those in experiments/problems.py, which says for which problems they are tuned.

Runs that are in the output directory already, finished and with the very same settings, are not trained again.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from experiments.metrics import evaluations, read_metrics
from experiments.problems import PROBLEMS
from experiments.settings import (
    OPTIMIZERS_IN_WORDS,
    DataName,
    DivergedError,
    Mode,
    ProblemName,
    Settings,
    SettingsError,
)
from experiments.train import train

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Config

    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS_IN_WORDS)]


@dataclass(frozen=True)
class Comparison:
    """Which runs to compare."""

    problem: ProblemName = Settings.problem
    """Data set and model to train."""
    optimizers: tuple[OptimizerName, ...] = ("sgd", "adamw", "kfac-sgd")
    """Optimizers to compare."""
    seeds: tuple[int, ...] = (0,)
    """One run per optimizer and seed; the table shows their mean and deviation, the curves median and range."""
    target: float | None = None
    """Training loss to reach; without it the problem's."""
    epochs: int | None = None
    """Passes over the training set; without it those of the problem."""
    batch_size: int | None = None
    """Samples per step; without it those of the problem."""
    device: str | None = None
    """Where to train: cpu, cuda, cuda:1, mps ...; without it cuda where there is a GPU, else cpu."""
    data: DataName | None = None
    """Another data set than the problem's."""
    npz: Path | None = None
    """Your own arrays: a NumPy archive of x_train, y_train, x_test, y_test."""
    data_root: Path | None = None
    """Folder where data sets are looked for and cached; without it curvopt in the cache of the user."""
    download: bool = False
    """Download the data set if it is not there."""
    overwrite: bool = False
    """Train all runs anew, also those that are finished."""
    out: Path = Path("runs")
    """Directory for the run directories, <problem>-comparison.png and <problem>-comparison.md."""
    wandb: Mode | None = None
    """Whether to log to wandb; without it online if a key is configured, else offline."""

    def runs(self) -> "dict[str, list[Config]]":
        """The runs, under the label of their optimizer."""
        from experiments.config import Config  # imports PyTorch, which help does without
        from experiments.optimizers import OPTIMIZERS

        runs: dict[str, list[Config]] = {}
        for name in self.optimizers:
            for seed in self.seeds:
                config = Config(
                    problem=self.problem,
                    optimizer=OPTIMIZERS[name](),
                    seed=seed,
                    epochs=self.epochs,
                    batch_size=self.batch_size,
                    device=self.device,
                    data=self.data,
                    npz=self.npz,
                    data_root=self.data_root,
                    download=self.download,
                    overwrite=self.overwrite,
                    out=self.out / f"{self.problem}-{name}-{seed}",
                    wandb=self.wandb,
                ).resolved()
                runs.setdefault(config.optimizer.label, []).append(config)
        return runs


def compare(comparison: Comparison) -> str:
    """Trains what is missing, draws ``<out>/<problem>-comparison.png`` and returns the table as Markdown.

    Raises:
        SettingsError: a setting is out of its range, or there are runs with other settings.
        DataError: the data set is absent or corrupt.
    """
    from experiments.plots import plot_curves
    from experiments.run_directory import is_finished, require_free

    if not (comparison.optimizers and comparison.seeds):
        raise SettingsError("--optimizers and --seeds need at least one each")
    runs = comparison.runs()
    missing = [c for of in runs.values() for c in of if comparison.overwrite or not is_finished(c)]
    for config in missing:  # all of them before the first begins
        require_free(config)
    for config in (config for of in runs.values() for config in of):
        if config not in missing:
            print(f"{config.out}: trained before; --overwrite trains it anew")
            continue
        try:
            train(config)
        except DivergedError as error:
            print(f"stopped: {error}")
    target = PROBLEMS[comparison.problem].target if comparison.target is None else comparison.target
    directories = {label: [config.out for config in of if config.out] for label, of in runs.items()}
    plot_curves(
        directories, PROBLEMS[comparison.problem].title, comparison.out / f"{comparison.problem}-comparison.png", target
    )
    rows = [
        {"optimizer": label, "run": index, **row}
        for label, of in directories.items()
        for index, directory in enumerate(of)
        if _whole(directory)
        for row in evaluations(read_metrics(directory))
    ]
    result = table(rows, list(runs), len(comparison.seeds), target)
    (comparison.out / f"{comparison.problem}-comparison.md").write_text(result + "\n")
    return result


def _whole(run: Path) -> bool:
    return json.loads((run / "finished.json").read_text())["diverged"] is None


def table(rows: Sequence[dict], labels: Sequence[str], seeds: int, target: float) -> str:
    """Steps and seconds of the runs that got to the target, and the end of all that finished: mean ± deviation.

    Args:
        rows: the evaluations of all finished runs, with the label of their ``optimizer`` and the number of the ``run``.
        labels: of all optimizers, in order.
        seeds: the number of runs that each optimizer started.
        target: loss over the training set to reach.
    """
    import pandas as pd

    from experiments.plots import markdown

    columns = ["optimizer", "run", "step", "time/training", "train/loss", "test/loss", "test/accuracy"]
    frame = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[2:], float))
    arrivals = frame[frame["train/loss"] <= target].groupby(["optimizer", "run"]).first()
    ends = frame.groupby(["optimizer", "run"]).last()
    accurate = bool(ends["test/accuracy"].notna().all())
    last, header = (
        (100 * ends["test/accuracy"], "held-out accuracy at the end, %")
        if accurate
        else (ends["test/loss"], "held-out loss at the end")
    )
    lines = []
    for label in labels:
        arrived = arrivals.loc[[label]] if label in arrivals.index else arrivals.iloc[:0]
        share = "" if len(arrived) == seeds else f" ({len(arrived)} of {seeds} runs)"
        lines.append(
            {
                f"to training loss {target:.3g}": label,
                "steps": _mean(arrived["step"], 0) + share,
                "seconds": _mean(arrived["time/training"], 2),
                header: _mean(last.loc[[label]] if label in last.index else last.iloc[:0], 1),
            }
        )
    return markdown(pd.DataFrame(lines))


def _mean(values: "pd.Series", digits: int) -> str:
    if values.empty:
        return "–"
    spread = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"


def main() -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    comparison = tyro.cli(
        Comparison,
        prog="python -m experiments.compare",
        description=__doc__,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from experiments.data import DataError

    try:
        result = compare(comparison)
    except (SettingsError, DataError, OSError) as error:
        sys.exit(f"stopped: {error}")
    print(f"\n{comparison.problem}\n{result}\n\ncurves: {comparison.out / f'{comparison.problem}-comparison.png'}")


if __name__ == "__main__":
    main()
