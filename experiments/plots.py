"""Curves of runs, drawn from their ``metrics.jsonl`` alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe & Ito (2008): told apart with every kind of colour vision; each colour has a marker of its own besides.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Row = Mapping[str, Any]


def read_metrics(run: Path) -> list[Row]:
    """The rows of a run directory's ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(rows: Sequence[Row]) -> list[Row]:
    """Those rows that evaluate the whole training set and the held-out data."""
    return [row for row in rows if "train_set_loss" in row]


def plot_curves(runs: Mapping[str, Sequence[Path]], title: str, out: Path) -> None:
    """Draws loss by steps, loss by seconds and held-out accuracy as a PNG.

    Args:
        runs: run directories under the label that they share; each label has one colour.
        title: what was trained.
        out: the PNG to write.
    """
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    by_steps, by_seconds, accuracy = figure.subplots(1, 3)
    alone = sum(map(len, runs.values())) == 1
    for index, (label, directories) in enumerate(runs.items()):
        style: dict[str, Any] = {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "markersize": 4,
        }
        for directory in directories:
            rows = read_metrics(directory)
            evaluated = evaluations(rows)
            name = label if directory == directories[0] else None
            for axes, x in ((by_steps, "step"), (by_seconds, "seconds")):
                if alone:
                    steps = [row for row in rows if "train_loss" in row]
                    _draw(axes, steps, x, "train_loss", color="0.75", linewidth=0.8, label="batch")
                _draw(axes, evaluated, x, "train_set_loss", **style, label=name and f"{name}, training set")
                _draw(axes, evaluated, x, "test_loss", **style, ls="--", mfc="none", label=name and f"{name}, held out")
            _draw(accuracy, evaluated, "step", "test_accuracy", **style, ls="--", mfc="none")
    for axes, x, y in (
        (by_steps, "steps", "loss"),
        (by_seconds, "seconds of training, evaluation excluded", "loss"),
        (accuracy, "steps", "accuracy on held-out data"),
    ):
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
    by_steps.set_yscale("log")
    by_seconds.set_yscale("log")
    figure.suptitle(title)
    figure.legend(*by_steps.get_legend_handles_labels(), loc="outside lower center", ncols=3 if alone else len(runs))
    figure.savefig(out, dpi=120)


def _draw(axes: Axes, rows: Sequence[Row], x: str, y: str, **style: Any) -> None:
    """A line through the rows, with gaps where a value is missing because it was not finite."""
    values = [float("nan") if row[y] is None else row[y] for row in rows]
    axes.plot([row[x] for row in rows], values, **style)
