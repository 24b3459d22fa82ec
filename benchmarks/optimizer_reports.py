"""Tables and the figure of `benchmarks.optimizers`, by the rows of its runs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.optimizer_methods import DRAWN

Result = dict[str, Any]


def end(rows: list[Result]) -> float:
    """Loss at the end; infinite if there is none."""
    return rows[-1]["loss"] if rows and "test_loss" in rows[-1] and math.isfinite(rows[-1]["loss"]) else math.inf


def costs(rows: list[Result]) -> list[float]:
    """Cost at each evaluation, in plain gradients."""
    total, found = 0.0, []
    for row in rows:
        found.append(total := total + row["seconds"] / row["unit"])
    return found


def arrival(rows: list[Result], target: float) -> float | None:
    """Cost at which the loss comes to the target, interpolated between evaluations."""
    start, before = 0.0, None
    for cost, row in zip(costs(rows), rows, strict=True):
        if row["loss"] <= target:
            part = 1.0 if before is None or before == row["loss"] else (before - target) / (before - row["loss"])
            return start + part * (cost - start)
        start, before = cost, row["loss"]
    return None


def at_cost(rows: list[Result], budget: float) -> float:
    """Loss at a cost, interpolated between evaluations; that of the end for runs which are cheaper."""
    start, before = 0.0, math.inf
    for cost, row in zip(costs(rows), rows, strict=True):
        if cost >= budget:
            part = (budget - start) / (cost - start)
            return before + part * (row["loss"] - before) if math.isfinite(before) else row["loss"]
        start, before = cost, row["loss"]
    return before


def mean(values: list[float | None]) -> float | None:
    """Mean; ``None`` if one is missing."""
    return None if not values or None in values else statistics.fmean(v for v in values if v is not None)


def summary(result: Result) -> dict[str, Result]:
    """A row for each method."""
    rows = {}
    for name, found in result["methods"].items():
        runs = found["runs"]
        last = [run[-1] for run in runs if math.isfinite(end(run))]
        whole = len(last) == len(runs)
        losses = [row["loss"] for row in last]
        rows[name] = {
            "loss": mean(losses) if whole else None,
            "spread": statistics.stdev(losses) if whole and len(losses) > 1 else None,
            "at equal cost": mean([at_cost(run, result["budget"]) for run in runs]) if whole else None,
            "untuned": end(found["defaults"]),
            "arrival": mean([arrival(run, result["target"]) for run in runs]) if whole else None,
            "held out": mean([row["test_loss"] for row in last]) if whole else None,
            "accuracy": mean([row.get("accuracy") for row in last]) if whole else None,
            "cost": mean([costs(run)[-1] / run[-1]["step"] for run in runs if run]),
            "state": mean([row["state"] for row in last]) if whole else None,
            "options": found["options"],
        }
    return rows


def _show(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def markdown(result: Result) -> str:
    """The table of a task."""
    lines = [
        f"| {result['task']} | loss at the end | spread of seeds | at equal cost | with defaults | "
        "cost to AdamW's loss | held-out loss | accuracy | step, in gradients | state, in parameters | lr |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summary(result).items():
        accuracy = None if row["accuracy"] is None else 100 * row["accuracy"]
        cells = [
            _show(row["loss"], ".4g"),
            _show(row["spread"], ".2g"),
            _show(row["at equal cost"], ".4g"),
            _show(row["untuned"], ".4g"),
            _show(row["arrival"], ".0f"),
            _show(row["held out"], ".4g"),
            _show(accuracy, ".1f"),
            _show(row["cost"], ".2f"),
            _show(row["state"], ".1f"),
            _show(row["options"].get("lr"), "g"),
        ]
        lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return "\n".join(lines)


def overview(results: list[Result], tuned: bool) -> str:
    """Losses at the cost of a whole run of tuned AdamW, with tuned rates or with defaults."""
    names = [name for name in DRAWN if all(name in result["methods"] for result in results)]
    lines = [" | ".join(["| task", *names]) + " |", "|---" * (len(names) + 1) + "|"]
    for result in results:
        rows, budget = summary(result), result["budget"]
        defaults = {name: at_cost(found["defaults"], budget) for name, found in result["methods"].items()}
        losses = [rows[name]["at equal cost"] if tuned else defaults[name] for name in names]
        lines.append(" | ".join([f"| {result['task']}", *(_show(loss, ".3g") for loss in losses)]) + " |")
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Training loss over cost, a panel for each task, four in a row: a task in its short and its long run, twice."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(len(results), 4)
    lines = -(-len(results) // columns)
    size = (2.0 * columns, 0.8 + 1.75 * lines)  # the width of a page
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        for name, colour in DRAWN.items():
            runs = result["methods"].get(name, {"runs": []})["runs"][:1]
            for run in (run for run in runs if math.isfinite(end(run))):
                points = [(c, row["loss"]) for c, row in zip(costs(run), run, strict=True) if c <= 2 * result["budget"]]
                axis.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=name)
        axis.axhline(result["target"], color="0.8", linewidth=0.8, zorder=0)
        losses = [line.get_ydata() for line in axis.lines[:-1]]
        axis.set_yscale("log" if max(map(max, losses)) > 8 * min(map(min, losses)) else "linear")
        axis.set_xlim(0, 2 * result["budget"])
        axis.set_title(result["task"], fontsize=10)
        axis.tick_params(which="both", labelsize=8)
        axis.xaxis.set_major_locator(plt.MaxNLocator(3))
        axis.yaxis.set_minor_formatter("")
        axis.yaxis.set_major_formatter("{x:.3g}")
        axis.spines[["top", "right"]].set_visible(False)
    handles = {line.get_label(): line for axis in axes.flat for line in axis.lines if line.get_label() in DRAWN}
    figure.legend(
        handles=[handles[name] for name in DRAWN if name in handles], loc="outside upper center", ncols=5, frameon=False
    )
    figure.supxlabel("cost, in plain gradients (grey line: where tuned AdamW ends)", fontsize=10)
    figure.supylabel("training loss", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
