"""Tables and the figure of `benchmarks.optimizers`, by its results, which lie in ``benchmarks/results``."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.workflows import replaced

Row = dict[str, Any]
Result = dict[str, Any]
Column = tuple[str, str]  # an optimizer, and "tuned" or "defaults"
#: Columns of the page's table, first of training losses, then (but for rivals that come second) of held-out ones.
SHOWN: list[Column] = [("AdamW", "tuned"), ("Muon", "tuned"), ("SOAP", "tuned")]
SHOWN += [("KFACSGD", "defaults"), ("KFACAdamW", "defaults")]
#: Rows of the figure, and their colours.
ROWS: dict[Column, str] = {
    ("schedule-free AdamW", "tuned"): "0.5",
    ("Muon", "tuned"): "tab:brown",
    ("SOAP", "tuned"): "tab:blue",
    ("KFACSGD", "defaults"): "tab:orange",
    ("KFACAdamW", "defaults"): "tab:red",
    ("KFACSGD", "tuned"): "tab:orange",
    ("KFACAdamW", "tuned"): "tab:red",
}
#: Ratios are drawn between these.
LEAST, MOST = 1e-2, 10.0


def end(rows: list[Row]) -> float:
    """Training loss at the end; infinite if there is none."""
    return rows[-1]["train"] if rows and "state" in rows[-1] and math.isfinite(rows[-1]["train"]) else math.inf


def at_cost(rows: list[Row], name: str, budget: float) -> float:
    """Loss at a cost, interpolated between evaluations; that of the end for runs which are cheaper."""
    cost, loss = 0.0, math.inf
    for row in rows:
        if row["cost"] >= budget:
            part = (budget - cost) / (row["cost"] - cost)
            return loss + part * (row[name] - loss) if math.isfinite(loss) else row[name]
        cost, loss = row["cost"], row[name]
    return loss


def summary(runs: list[list[Row]], within: list[list[Row]], budget: float) -> Result:
    """Losses at AdamW's cost and at the end, cost of a step and size of the state; ``None`` for runs without end.

    Args:
        runs: of all steps.
        within: of as many steps as AdamW's cost allows.
        budget: AdamW's cost.
    """

    def known(loss: float) -> float | None:
        return float(f"{loss:.5g}") if math.isfinite(loss) else None

    losses = {
        f"{name}{where}": [known(loss(rows, name)) if math.isfinite(end(rows)) else None for rows in these]
        for name in ("train", "held_out")
        for where, these, loss in (
            ("_at_cost", within, lambda rows, name: at_cost(rows, name, budget)),
            ("", runs, lambda rows, name: rows[-1][name]),
        )
    }
    done = [rows[-1] for rows in runs if math.isfinite(end(rows))]
    step = statistics.fmean(row["cost"] / row["step"] for row in done) if done else None
    return {**losses, "step": step, "state": done[0]["state"] if done else None}


def mean(result: Result, column: Column, name: str) -> float | None:
    """Mean over seeds of a loss of an optimizer on a task; ``None`` if a run has none."""
    method, how = column
    values: list[Any] = result["methods"][method][how][name] if method in result["methods"] else [None]
    return None if None in values else statistics.fmean(values)


def _show(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def markdown(result: Result) -> str:
    """The table of a task: means and, behind ±, deviations over the seeds."""
    lines = [
        f"| {result['title']}, {result['steps']} steps | lr | training, at AdamW's cost | held out, at AdamW's cost | "
        "training, at the end | held out, at the end | step, in gradients | state, in parameters |",
        "|---" * 8 + "|",
    ]
    for name, found in result["methods"].items():
        for how, lr in (("tuned", found["lr"]), ("defaults", found["default"])):
            row = found[how]
            cells = [name, f"{lr} ({how})" if lr else "–"]
            for loss in ("train_at_cost", "held_out_at_cost", "train", "held_out"):
                whole = None not in row[loss]
                cells.append(
                    f"{statistics.fmean(row[loss]):.3g} ± {statistics.stdev(row[loss]):.1g}" if whole else "diverges"
                )
            lines.append(f"| {' | '.join([*cells, _show(row['step']), _show(row['state'], '.1f')])} |")
            if lr == found["default"]:
                break
    return "\n".join(lines)


def verdict(results: dict[str, Result]) -> str:
    """The table of the page, at AdamW's cost: the lowest loss of a row in bold."""
    held_out = [column for column in SHOWN if column[0] not in ("Muon", "SOAP")]
    names = [name if how == "tuned" else f"`{name}`" for name, how in (*SHOWN, *held_out)]
    names[len(SHOWN) :] = [f"{name}, held out" for name in names[len(SHOWN) :]]
    lines = [" | ".join(["| task", *names]) + " |", "|---" * (len(names) + 1) + "|"]
    for result in results.values():
        cells = [f"| {result['title']}"]
        for name, columns in (("train_at_cost", SHOWN), ("held_out_at_cost", held_out)):
            found = [mean(result, column, name) for column in columns]
            best = min((loss for loss in found if loss is not None), default=None)
            cells += [f"**{_show(loss)}**" if loss is not None and loss == best else _show(loss) for loss in found]
        lines.append(" | ".join(cells) + " |")
    return "\n".join(lines)


def over_adamw(results: dict[str, Result], column: Column, name: str) -> list[float]:
    """Losses over those of tuned AdamW, on the tasks that an optimizer runs on; infinite where a run has none."""
    pairs = [
        (mean(r, column, name), mean(r, ("AdamW", "tuned"), name))
        for r in results.values()
        if column[0] in r["methods"]
    ]
    return [math.inf if loss is None else loss / base for loss, base in pairs if base is not None]


def counts(results: dict[str, Result]) -> str:
    """On how many tasks each optimizer is below tuned AdamW at its cost, and the loss over AdamW's in the middle."""
    lines = [
        "| | tasks | tuned, training | tuned, held out | defaults, training | defaults, held out "
        "| step, in gradients | state, in parameters |",
        "|---" * 8 + "|",
    ]
    for method in dict.fromkeys(name for result in results.values() for name in result["methods"]):
        found = [result["methods"][method] for result in results.values() if method in result["methods"]]
        cells = [method, str(len(found))]
        for how in ("tuned", "defaults"):
            for name in ("train_at_cost", "held_out_at_cost"):
                ratios = over_adamw(results, (method, how), name)
                below = sum(ratio < 1 for ratio in ratios)
                is_tuned = how == "tuned" and method != "AdamW" and found[0]["lr"] is not None
                cells.append(
                    "–" if how == "tuned" and not is_tuned else f"{below} ({_show(statistics.median(ratios), '.2g')})"
                )
        for what in ("step", "state"):
            values = [row["defaults"][what] for row in found if row["defaults"][what] is not None]
            cells.append(f"{min(values):.1f} to {max(values):.1f}" if values else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Result], path: Path) -> None:
    """A dot a task: loss at AdamW's cost over that of tuned AdamW, for each optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    for axis, name, title in zip(axes, ("train_at_cost", "held_out_at_cost"), ("training", "held out"), strict=True):
        for place, (column, colour) in enumerate(ROWS.items()):
            axis.axhline(place, color="0.92", zorder=0)
            for ratio in over_adamw(results, column, name):
                marker = "<" if ratio < LEAST else ">" if ratio > MOST else "o"
                axis.plot(min(max(ratio, LEAST), MOST), place, marker, color=colour, markersize=6, alpha=0.8)
        axis.axvline(1, color="0.4", linewidth=0.8)
        axis.set(xscale="log", xlim=(0.85 * LEAST, 1.18 * MOST))
        axis.set_title(f"{title} loss at AdamW's cost", fontsize=10)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(ROWS)), [f"{name}, {how}" for name, how in ROWS])
    axes[0].invert_yaxis()
    figure.supxlabel("over the loss of tuned AdamW: left of the line is better; triangles are beyond it", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def load(path: Path) -> Result:
    """Results that were written; empty if there are none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, page: Path, tasks: int) -> str:
    """Write the tables beside the results, and tables and figure of the page if it has all tasks; return the tables."""
    results = load(path)
    text = "\n\n".join(
        [
            f"`python -m benchmarks.optimizers` at commit {results['commit']}. At AdamW's cost:",
            verdict(results["tasks"]),
            "Below tuned AdamW at its cost, and the loss over AdamW's in the middle of the tasks:",
            counts(results["tasks"]),
            *map(markdown, results["tasks"].values()),
        ]
    )
    path.with_suffix(".md").write_text(text + "\n")
    if len(results["tasks"]) == tasks and page.exists():
        for name, table in (("table", verdict), ("counts", counts)):
            page.write_text(replaced(page.read_text(), name, table(results["tasks"])))
        draw(results["tasks"], page.parent / "_static" / "optimizers.png")
    return text
