"""Curves of runs, drawn from their ``metrics.jsonl`` alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter

from experiments.metrics import Row, evaluations, read_metrics

# Okabe & Ito (2008): distinct with every kind of colour vision; each colour has a marker of its own besides.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_curves(runs: Mapping[str, Sequence[Path]], title: str, out: Path, target: float | None = None) -> None:
    """Draws loss by steps, loss by seconds and held-out error as a PNG.

    Of several runs with one label, the line is the median and the band reaches from the smallest to the largest.

    Args:
        runs: run directories under the label that they share; each label has one colour.
        title: problem, and optimizer if it is one.
        out: the PNG to write.
        target: training loss to mark.
    """
    figure = Figure(figsize=(9.6, 4), layout="constrained")
    by_steps, by_seconds, error = figure.subplots(1, 3)
    most = max(map(len, runs.values()))
    held_out: dict[str, Any] = {"ls": "--", "mfc": "none"}
    legend = []
    for index, (label, directories) in enumerate(runs.items()):
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 4,
        }
        legend.append(Line2D([], [], label=label, **style))
        of_runs = [read_metrics(directory) for directory in directories]
        evaluated = pd.DataFrame([row for rows in of_runs for row in evaluations(rows)])
        evaluated["error"] = 100 - 100 * evaluated["test/accuracy"].astype(float)
        for axes, x in ((by_steps, "step"), (by_seconds, "time/training")):
            if len(runs) == most == 1:
                steps = pd.DataFrame([row for row in of_runs[0] if "train/batch_loss" in row])
                if not steps.empty:
                    axes.plot(steps[x], steps["train/batch_loss"].astype(float), color="0.75", lw=0.8)
            _band(axes, evaluated, x, "train/loss", **style)
            _band(axes, evaluated, x, "test/loss", **style, **held_out)
        _band(error, evaluated, "step", "error", **style, **held_out)
    legend.append(Line2D([], [], color="0.3", label="training set"))
    legend.append(Line2D([], [], color="0.3", marker="o", markersize=4, label="held-out data", **held_out))
    if len(runs) == most == 1:
        legend.append(Line2D([], [], color="0.75", lw=0.8, label="batch"))
    if target is not None:
        legend.append(Line2D([], [], color="0.4", ls=":", label=f"target {target:g}"))
        for axes in (by_steps, by_seconds):
            axes.axhline(target, color="0.4", ls=":")
    for axes, x, y in (
        (by_steps, "steps", "loss / nats"),
        (by_seconds, "seconds of training", "loss / nats"),
        (error, "steps", "error on held-out data / %"),
    ):
        axes.set(xlabel=x, ylabel=y, yscale="log")
        axes.grid(alpha=0.3)
    error.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    error.yaxis.set_major_formatter("{x:g}")
    if not np.isfinite(np.concatenate([np.asarray(line.get_ydata()) for line in error.lines])).any():
        error.remove()  # an autoencoder has none
    figure.suptitle(title if most == 1 else f"{title} (median and range of {most} seeds)")
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(out, dpi=160)


def _band(axes: Axes, evaluated: pd.DataFrame, x: str, y: str, **style: Any) -> None:
    """Median and range over the runs that were evaluated at each step."""
    by_step = evaluated.astype({y: float}).groupby("step", as_index=False)
    values = by_step.agg(x=(x, "median"), middle=(y, "median"), low=(y, "min"), high=(y, "max"))
    axes.plot(values["x"], values["middle"], markevery=max(1, len(values) // 16), **style)
    if len(evaluated) > len(values):
        axes.fill_between(values["x"], values["low"], values["high"], color=style["color"], alpha=0.15, linewidth=0)


def plot_layers(rows: Sequence[Row], title: str, out: Path | BinaryIO) -> None:
    """Draws the GGN trace and the signal-to-noise ratio of the gradient of every parameter over training as a PNG."""
    rows = [row for row in rows if "curvature" in row]
    names = list(rows[0]["curvature"])
    figure = Figure(figsize=(9.6, 1.6 + 0.22 * max(6, len(names))), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, quantity, text in (
        (panels[0], "ggn_trace", "curvature: trace of the GGN block"),
        (panels[1], "gradient_snr", "signal to noise of the gradient"),
    ):
        values = np.array([[row["curvature"][name][quantity] for row in rows] for name in names], dtype=float)
        values = np.where(values > 0, values, np.nan)
        norm = LogNorm() if np.isfinite(values).any() else None
        image = axes.imshow(values, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
        axes.set(title=text, xlabel="epoch")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        ticks = np.unique(np.linspace(0, len(rows) - 1, 8).round().astype(int))
        axes.set_xticks(ticks, [rows[tick]["epoch"] for tick in ticks])
        figure.colorbar(image, ax=axes, label="no unit" if quantity == "gradient_snr" else "nats / parameter²")
    figure.suptitle(title)
    figure.savefig(out, dpi=120, format="png")


def plot_sweep(frame: pd.DataFrame, metric: str, out: Path) -> None:
    """Draws the metric over each parameter of a sweep as a PNG; a star marks the best setting.

    Args:
        frame: a row for each setting, the best first: a column for each parameter, ``metric`` and ``runs``.
        metric: the column that settings are compared by; runs that diverged are not finite.
        out: the PNG to write.
    """
    names = [name for name in frame.columns if name not in (metric, "runs")]
    reached = np.array(frame[metric].tolist(), dtype=float)
    finite = np.isfinite(reached)
    figure = Figure(figsize=(max(5.2, 3.2 * len(names)), 3.4), layout="constrained")
    panels = figure.subplots(1, max(1, len(names)), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=False):
        entries = frame[name].tolist()
        numeric = all(isinstance(entry, int | float) and not isinstance(entry, bool) for entry in entries)
        values = np.array(entries if numeric else [str(entry) for entry in entries])
        axes.scatter(values[finite], reached[finite], color=COLOURS[0], s=22)
        if finite.any():
            axes.scatter(values[:1], reached[:1], color=COLOURS[1], marker="*", s=160)
        if numeric and values.min() > 0 and values.max() > 8 * values.min():
            axes.set_xscale("log")
        elif numeric:
            axes.locator_params("x", nbins=4)
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(metric)
    if finite.any() and reached[finite].min() > 0:
        panels[0].set_yscale("log")
    diverged = "" if finite.all() else f", {len(frame) - finite.sum()} diverged"
    figure.suptitle(f"{len(frame)} settings{diverged}; the star is the best")
    figure.savefig(out, dpi=120)


def markdown(frame: pd.DataFrame) -> str:
    """A table without its index."""
    header, *rows = (f"| {' | '.join(map(str, row))} |" for row in (frame.columns, *frame.itertuples(index=False)))
    return "\n".join([header, "|---" * frame.columns.size + "|", *rows])
