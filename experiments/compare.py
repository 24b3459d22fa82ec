"""Compare optimizers on one problem by the steps and seconds that they need to the same training loss.

Trains every optimizer with every seed as experiments.train does, then prints a table and draws curves. The loss
compared is that over the whole training set, evaluated after every epoch, and the first evaluation at or below the
target counts. Learning rates (and damping) are the tuned ones that experiments/problems.py holds.

Runs that are in the output directory already, finished and with the very same settings, are not trained again.
"""

import json
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from experiments.data import DEFAULT_ROOT, DataError
from experiments.optimizers import OPTIMIZERS
from experiments.plots import Row, evaluations, plot_curves, read_metrics
from experiments.problems import PROBLEMS
from experiments.tracking import Mode
from experiments.train import Config, DataName, DivergedError, ProblemName, SettingsError, train

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


@dataclass(frozen=True)
class Comparison:
    """Which runs to compare."""

    problem: ProblemName = Config.problem
    """What is trained."""
    optimizers: tuple[OptimizerName, ...] = ("sgd", "kfac-sgd")
    """How it is trained."""
    seeds: tuple[int, ...] = (0,)
    """One run per optimizer and seed; the table shows their mean and deviation, the curves median and range."""
    target: float | None = None
    """Training loss to reach; without it the problem's."""
    epochs: int | None = None
    """Passes over the training set; without it those of the problem."""
    batch_size: int | None = None
    """Samples per step; without it those of the problem."""
    device: str = Config.device
    """Where to train: cpu, cuda, cuda:1, mps ..."""
    data: DataName | None = None
    """Another data set than the problem's."""
    npz: Path | None = None
    """Arrays of one's own: a NumPy archive of x_train, y_train, x_test, y_test."""
    data_root: Path = DEFAULT_ROOT
    """Where data sets are looked for and cached."""
    download: bool = False
    """Download the data set if it is not there."""
    again: bool = False
    """Train also what is there already."""
    out: Path = Path("runs")
    """Directory for the run directories, <problem>-comparison.png and <problem>-comparison.md."""
    wandb: Mode | None = None
    """Whether to log to wandb; without it online if a key is configured, else offline."""


def compare(comparison: Comparison) -> str:
    """Trains what is missing, draws ``<out>/<problem>-comparison.png`` and returns the table as Markdown.

    Raises:
        SettingsError: a setting is out of its range.
        DataError: the data set is absent or corrupt.
    """
    if not (comparison.optimizers and comparison.seeds):
        raise SettingsError("--optimizers and --seeds need at least one each")
    runs: dict[str, list[Path]] = {}
    for name in comparison.optimizers:
        for seed in comparison.seeds:
            config = Config(
                problem=comparison.problem,
                optimizer=OPTIMIZERS[name](),
                seed=seed,
                epochs=comparison.epochs,
                batch_size=comparison.batch_size,
                device=comparison.device,
                data=comparison.data,
                npz=comparison.npz,
                data_root=comparison.data_root,
                download=comparison.download,
                out=comparison.out / f"{comparison.problem}-{name}-{seed}",
                wandb=comparison.wandb,
            ).resolved()
            assert config.out is not None
            runs.setdefault(str(config.optimizer), []).append(config.out)
            if not comparison.again and config.finished():
                print(f"{config.out}: trained before; --again trains it anew")
                continue
            try:
                train(config)
            except DivergedError as error:
                print(f"stopped: {error}")
    target = PROBLEMS[comparison.problem].target if comparison.target is None else comparison.target
    plot_curves(runs, comparison.problem, comparison.out / f"{comparison.problem}-comparison.png", target)
    result = table(
        {
            label: [evaluations(read_metrics(run)) for run in directories if _whole(run)]
            for label, directories in runs.items()
        },
        len(comparison.seeds),
        target,
    )
    (comparison.out / f"{comparison.problem}-comparison.md").write_text(result + "\n")
    return result


def _whole(run: Path) -> bool:
    return json.loads((run / "finished.json").read_text())["diverged"] is None


def table(finished: Mapping[str, Sequence[Sequence[Row]]], seeds: int, target: float) -> str:
    """Steps and seconds of the runs that got to the target, and the end of all that finished: mean ± deviation.

    Args:
        finished: the evaluations of each finished run, under the label of its optimizer.
        seeds: the number of runs that each optimizer started.
        target: loss over the training set to reach.
    """
    ends = [rows[-1] for runs in finished.values() for rows in runs]
    accurate = all(row["test_accuracy"] is not None for row in ends)
    last = "held-out accuracy at the end, %" if accurate else "held-out loss at the end"
    lines = [f"| to training loss {target:.3g} | steps | seconds | {last} |", "|---|---|---|---|"]
    for label, runs in finished.items():
        arrivals = [row for rows in runs for row in [r for r in rows if r["train_set_loss"] <= target][:1]]
        share = "" if len(arrivals) == seeds else f" ({len(arrivals)} of {seeds} runs)"
        steps, seconds = (
            _mean([row[key] for row in arrivals], digits) for key, digits in (("step", 0), ("seconds", 2))
        )
        end = _mean([100 * rows[-1]["test_accuracy"] if accurate else rows[-1]["test_loss"] for rows in runs], 1)
        lines.append(f"| {label} | {steps}{share} | {seconds} | {end} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def main() -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    comparison = tyro.cli(
        Comparison,
        prog="python -m experiments.compare",
        description=__doc__,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        result = compare(comparison)
    except (SettingsError, DataError) as error:
        sys.exit(str(error))
    print(f"\n{comparison.problem}\n{result}\n\ncurves: {comparison.out / f'{comparison.problem}-comparison.png'}")


if __name__ == "__main__":
    main()
