"""Tables and the figure of `benchmarks.optimizers`, by the rows of its runs, which lie in ``benchmarks/results``.

``python -m benchmarks.optimizer_reports`` writes them and the table of the docs anew, and trains nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS

Result = dict[str, Any]
PAGE = Path("docs") / "choosing_an_optimizer.md"
FIGURE = PAGE.parent / "_static" / "optimizers.png"
#: Optimizers of the overviews, which have three seeds.
SHOWN = ("AdamW", "Muon", "SOAP", "KFACSGD", "KFACAdamW")
#: Rows of the figure: an optimizer, whether its rate is tuned, and a colour.
ROWS = (
    ("schedule-free AdamW", True, "0.5"),
    ("Muon", True, "tab:brown"),
    ("SOAP", True, "tab:blue"),
    ("KFACSGD", False, "tab:orange"),
    ("KFACAdamW", False, "tab:red"),
    ("KFACSGD", True, "tab:orange"),
    ("KFACAdamW", True, "tab:red"),
)
#: Ratios are drawn between these.
LEAST, MOST = 1e-2, 10.0


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
            "untuned": mean([end(run) for run in found["defaults"]]),
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
    names = [name for name in SHOWN if all(name in result["methods"] for result in results)]
    lines = [" | ".join(["| task", *names]) + " |", "|---" * (len(names) + 1) + "|"]
    for result in results:
        losses = [training(result, name, tuned) for name in names]
        lines.append(" | ".join([f"| {result['task']}", *(_show(loss, ".3g") for loss in losses)]) + " |")
    return "\n".join(lines)


def verdict(results: list[Result]) -> str:
    """The table of the docs: rivals tuned, curvopt's with their defaults; held-out losses of three."""
    first = [("AdamW", True), ("Muon", True), ("SOAP", True), ("KFACSGD", False), ("KFACAdamW", False)]
    second = [column for column in first if column[0] not in ("Muon", "SOAP")]
    names = [name if tuned else f"`{name}`" for name, tuned in (*first, *second)]
    names[len(first) :] = [f"{name}, held out" for name in names[len(first) :]]
    lines = [" | ".join(["| task", *names]) + " |", "|---" * (len(names) + 1) + "|"]
    for result in results:
        cells = [f"| {result['task']}"]
        for value, columns in ((training, first), (held_out, second)):
            found = [value(result, name, tuned) for name, tuned in columns]
            best = min((loss for loss in found if loss is not None), default=None)
            shown = [_show(loss, ".3g") for loss in found]
            cells += [f"**{text}**" if loss == best else text for loss, text in zip(found, shown, strict=True)]
        lines.append(" | ".join(cells) + " |")
    return "\n".join(lines)


def training(result: Result, name: str, tuned: bool) -> float | None:
    """Training loss at the cost of tuned AdamW."""
    if tuned:
        return summary(result)[name]["at equal cost"]
    return mean([at_cost(run, result["budget"]) for run in result["methods"][name]["defaults"]])


def held_out(result: Result, name: str, tuned: bool) -> float | None:
    """Held-out loss at the end, after as many steps as AdamW's."""
    if tuned:
        return summary(result)[name]["held out"]
    return mean([run[-1].get("test_loss") for run in result["methods"][name]["defaults"]])


def draw(results: list[Result], path: Path) -> None:
    """A dot a task: loss over that of tuned AdamW, for each optimizer; hollow ones are of long tasks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    for axis, value, title in zip(
        axes, (training, held_out), ("training loss at AdamW's cost", "held-out loss at the end"), strict=True
    ):
        for place, (name, tuned, colour) in enumerate(ROWS):
            axis.axhline(place, color="0.92", zorder=0)
            for result in results:
                loss, base = (
                    value(result, n, t) if n in result["methods"] else None for n, t in ((name, tuned), ("AdamW", True))
                )
                if loss is None or base is None or not math.isfinite(loss):
                    continue
                ratio = loss / base
                marker = "<" if ratio < LEAST else ">" if ratio > MOST else "o"
                face = "none" if result["task"].endswith("-long") else colour
                axis.plot(min(max(ratio, LEAST), MOST), place, marker, color=colour, markerfacecolor=face, markersize=6)
        axis.axvline(1, color="0.4", linewidth=0.8)
        axis.set(xscale="log", xlim=(0.85 * LEAST, 1.18 * MOST))
        axis.set_title(title, fontsize=10)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(ROWS)), [f"{name}, {'tuned' if tuned else 'defaults'}" for name, tuned, _ in ROWS])
    axes[0].invert_yaxis()
    figure.supxlabel("over the loss of tuned AdamW: left of the line is better", fontsize=10)
    handles = [
        Line2D([], [], color="0.3", marker="o", linestyle="", markerfacecolor=face, label=label)
        for face, label in (("0.3", "short task"), ("none", "long task, with a cosine"))
    ]
    handles.append(Line2D([], [], color="0.3", marker="<", linestyle="", label="beyond the axis"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(results: list[Result], tables: Path, figure: Path) -> str:
    """Writes all tables and the figure, and returns the tables."""
    text = "\n\n".join(
        [
            *(
                f"At the cost of tuned AdamW, {'tuned' if tuned else 'with defaults'}:\n\n{overview(results, tuned)}"
                for tuned in (True, False)
            ),
            *map(markdown, results),
        ]
    )
    tables.parent.mkdir(parents=True, exist_ok=True)
    tables.write_text(text + "\n")
    draw(results, figure)
    return text


def load(folder: Path, tasks: Sequence[str]) -> list[Result]:
    """Results of the tasks that a folder has."""
    files = [folder / f"optimizers-{task}.json" for task in tasks]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def main() -> None:
    """The command line."""
    from benchmarks.optimizer_tasks import SHORT  # imports PyTorch
    from benchmarks.workflows import replaced

    results = load(RESULTS, [name for short in SHORT for name in (short, f"{short}-long")])
    report(results, RESULTS / "optimizers.md", FIGURE)
    PAGE.write_text(replaced(PAGE.read_text(), "table", verdict(results)))
    print(f"written: {PAGE}, {FIGURE}, {RESULTS / 'optimizers.md'}")


if __name__ == "__main__":
    main()
