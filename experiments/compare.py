"""Compare optimizers on one problem by the steps and seconds that they need to the same training loss.

Trains every optimizer with every seed as experiments.train does, then prints a table and draws curves. The loss
compared is that over the whole training set, evaluated after every epoch, and the first evaluation at or below the
target counts. Learning rates (and damping) are the tuned ones that experiments/problems.py holds.
"""

import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from experiments import data
from experiments.optimizers import OPTIMIZERS
from experiments.plots import Row, evaluations, plot_curves, read_metrics
from experiments.problems import PROBLEMS
from experiments.tracking import Mode
from experiments.train import Config, DivergedError, ProblemName, SettingsError, train

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
    """One run per optimizer and seed; the table shows their mean."""
    target: float | None = None
    """Training loss to reach; without it the problem's, which the optimizers were tuned for."""
    epochs: int | None = None
    """Passes over the training set; without it those of the problem."""
    device: str = Config.device
    """Where to train: cpu, cuda, cuda:1, mps ..."""
    data_root: Path = data.DEFAULT_ROOT
    """Where data sets are looked for and cached."""
    out: Path = Path("runs")
    """Directory for the run directories and for the comparison's PNG; runs there are overwritten."""
    wandb: Mode | None = None
    """Whether to log to wandb; without it online if a key is configured, else offline."""


def compare(comparison: Comparison) -> str:
    """Trains, draws ``<out>/<problem>-comparison.png`` and returns the table as Markdown."""
    runs: dict[str, list[Path]] = {}
    finished: dict[str, list[list[Row]]] = {}
    for name in comparison.optimizers:
        for seed in comparison.seeds:
            config = Config(
                problem=comparison.problem,
                optimizer=OPTIMIZERS[name](),
                seed=seed,
                epochs=comparison.epochs,
                device=comparison.device,
                data_root=comparison.data_root,
                out=comparison.out / f"{comparison.problem}-{name}-{seed}",
                wandb=comparison.wandb,
            ).resolved()
            assert config.out is not None
            label = str(config.optimizer)
            runs.setdefault(label, []).append(config.out)
            finished.setdefault(label, [])
            try:
                finished[label].append(evaluations(read_metrics(train(config))))
            except DivergedError as error:
                print(f"stopped: {error}")
    plot_curves(runs, comparison.problem, comparison.out / f"{comparison.problem}-comparison.png")
    target = PROBLEMS[comparison.problem].target if comparison.target is None else comparison.target
    return table(finished, len(comparison.seeds), target)


def table(finished: Mapping[str, Sequence[Sequence[Row]]], seeds: int, target: float) -> str:
    """Steps and seconds of the runs that got to the target, and the accuracy of all that finished: mean ± deviation.

    Args:
        finished: the evaluations of each finished run, under the label of its optimizer.
        seeds: the number of runs that each optimizer started.
        target: loss over the training set to reach.
    """
    lines = [
        f"| to training loss {target:.3g} | steps | seconds | held-out accuracy at the end, % |",
        "|---|---|---|---|",
    ]
    for label, runs in finished.items():
        arrivals = [row for rows in runs for row in [r for r in rows if r["train_set_loss"] <= target][:1]]
        share = "" if len(arrivals) == seeds else f" ({len(arrivals)} of {seeds} runs)"
        steps, seconds = (
            _mean([row[key] for row in arrivals], digits) for key, digits in (("step", 0), ("seconds", 2))
        )
        accuracy = _mean([100 * rows[-1]["test_accuracy"] for rows in runs], 1)
        lines.append(f"| {label} | {steps}{share} | {seconds} | {accuracy} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def main() -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    comparison = tyro.cli(Comparison, prog="python -m experiments.compare", description=__doc__)
    try:
        result = compare(comparison)
    except (SettingsError, data.DataError) as error:
        sys.exit(str(error))
    print(f"\n{comparison.problem}\n{result}\n\ncurves: {comparison.out / f'{comparison.problem}-comparison.png'}")


if __name__ == "__main__":
    main()
