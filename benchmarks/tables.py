"""What is asked for on the command line, and how results by problem, quantity and package are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.packages import EXACT, FIRST_ORDER, PACKAGES, PRODUCTS, QUANTITIES
from benchmarks.problems import PROBLEMS
from benchmarks.timing import machine, save

if TYPE_CHECKING:
    ProblemName = QuantityName = PackageName = str
else:
    ProblemName = Literal[tuple(PROBLEMS)]
    QuantityName = Literal[tuple(QUANTITIES)]
    PackageName = Literal[tuple(PACKAGES)]

#: What is measured unless asked otherwise; each of the others costs about as much as one of these.
USUAL = (
    "Idle BatchGrad BatchL2Grad SumGradSquared Variance KFAC KFLR DiagGGNExact DiagGGNMC BatchDiagGGNExact DiagHessian"
).split()
#: Largest result that is measured, in numbers.
LARGEST = 3e8
#: What there is to know of a result, by what is measured together.
MEASURED = {
    "time": ("cpu", "wall", "spread", "unit_seconds", "rounds", "fails", "slow"),
    "memory": ("peak_mib", "gradient_peak_mib", "memory_fails"),
    "agreement": ("error", "dtype", "wrong"),
}
#: Distinct for every eye (Okabe and Ito 2008), and in shape.
STYLES = {
    "curvopt": ("#D55E00", "o"),
    "backpack": ("#0072B2", "s"),
    "asdl": ("#009E73", "^"),
    "nngeometry": ("#E69F00", "D"),
    "opacus": ("#CC79A7", "v"),
    "curvlinops": ("#56B4E9", "P"),
    "torch.func": ("#000000", "X"),
}

#: Problems in words, above their panels.
TITLES = {
    "mlp": "MLP",
    "functions": "MLP of custom layers",
    "3c3d": "3C3D, 10 classes",
    "allcnnc": "All-CNN-C, 100 classes",
    "resnet18": "ResNet-18, 10 classes",
    "transformer": "transformer, 1,000 words",
}

Result = dict[str, Any]
Rows = dict[str, dict[str, Result]]  # by quantity and package


@dataclass(frozen=True)
class Choice:
    """What is measured."""

    problem: tuple[ProblemName, ...] = tuple(name for name in PROBLEMS if name != "tiny")
    """Networks: mlp 784-512-256-10 with N=128, functions (the same of layers of one's own, by F.linear), 3c3d CIFAR-10
    N=64, allcnnc CIFAR-100 N=16, resnet18 N=16, batch norm in eval mode, transformer of 2 layers, N=8, 64 tokens."""
    quantity: tuple[QuantityName, ...] = tuple(USUAL)
    """Extensions; Idle is the gradient of an extended network while nothing is asked for."""
    package: tuple[PackageName, ...] = tuple(PACKAGES)
    """Packages; those that are not installed are left out."""
    threads: int = 1
    """Threads of PyTorch."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""

    def quantities(self, problem: str) -> list[str]:
        """Those that are affordable at all."""
        exact = PROBLEMS[problem].exact
        possible = [q for q in self.quantity if exact or q not in (*EXACT, *PRODUCTS)]
        return [q for q in possible if size(q, problem) <= LARGEST]

    def cells(self) -> list[tuple[str, str]]:
        """Problems with their quantities."""
        return [(problem, quantity) for problem in self.problem for quantity in self.quantities(problem)]


def size(quantity: str, problem: str) -> float:
    """How many numbers the result has."""
    made = PROBLEMS[problem]
    entries = sum(p.numel() for p in made.make().model.parameters())
    columns = made.classes if quantity == "SqrtGGNExact" else 1
    return entries * columns * (made.N if quantity.startswith(("Batch", "Sqrt")) and "L2" not in quantity else 1)


def is_absent(row: dict[str, Result], package: str) -> bool:
    return package not in row or bool(row[package].get("absent"))


def _has(result: Result, key: str) -> bool:
    """Whether there is such a number: none is of a package that raises an error at another measurement."""
    return key in result and ("fails" not in result or "slow" in result)


def best(quantity: str, row: dict[str, Result], key: str) -> str | None:
    """The package with the lowest correct number of a row, with the gradient, which individual ones sum to."""
    unit = 0 if key == "peak_mib" or quantity in FIRST_ORDER else 1
    right = {
        package: result[key] + (0 if result.get("gradient", True) else unit)
        for package, result in row.items()
        if _has(result, key) and not result.get("wrong")
    }
    return min(right, key=lambda package: right[package], default=None)


def cell(result: Result, key: str) -> str:
    """What the table shows of a result."""
    if result.get("absent"):
        return "–"
    if not _has(result, key):
        if "slow" in result and key != "peak_mib":
            return f"> {result['slow']:.0f}"
        return "fails" if "fails" in result or "memory_fails" in result else "not measured"
    value = result[key]
    text = f"{value:z.0f}" if key == "peak_mib" or value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"
    with_gradient = key == "peak_mib" or result.get("gradient", True)
    return f"wrong ({text})" if result.get("wrong") else text if with_gradient else f"{text}*"


def markdown(problem: str, rows: Rows, key: str) -> str:
    """The table of a problem, the best correct number of a row in bold."""
    packages = [p for p in PACKAGES if any(not is_absent(row, p) for row in rows.values())]
    lines = [" | ".join([f"| {problem}", *packages]) + " |", "|---" * (1 + len(packages)) + "|"]
    for quantity, row in rows.items():
        winner = best(quantity, row, key)
        cells = [cell(row.get(p, {"absent": True}), key) for p in packages]
        cells = [f"**{text}**" if p == winner else text for p, text in zip(packages, cells, strict=True)]
        lines.append(" | ".join([f"| {quantity}", *cells]) + " |")
    return "\n".join(lines)


def save_rows(folder: Path, problem: str, rows: Rows, choice: Choice, measured: Iterable[str] = MEASURED) -> None:
    """Write ``<folder>/quantities-<problem>.json``; what it holds of other quantities and packages stays.

    So does of these what is not in ``measured``, kinds of `MEASURED`. Every result says when its last part was measured
    and on which commit.
    """
    description = machine(choice.device)
    stamp = {key: description[key] for key in ("date", "commit")}
    kept = load_rows(folder).get(problem, {})
    again = {"absent", *(key for kind in measured for key in MEASURED[kind])}
    merged = {
        quantity: kept.get(quantity, {})
        | {
            package: {key: value for key, value in kept.get(quantity, {}).get(package, {}).items() if key not in again}
            | stamp
            | result
            for package, result in rows.get(quantity, {}).items()
        }
        for quantity in QUANTITIES
        if quantity in kept or quantity in rows
    }
    save(folder / f"quantities-{problem}.json", {"problem": problem, "machine": description, "rows": merged})


def load_rows(folder: Path) -> dict[str, Rows]:
    """What `save_rows` wrote, by problem."""
    paths = {problem: folder / f"quantities-{problem}.json" for problem in PROBLEMS}
    return {problem: json.loads(path.read_text())["rows"] for problem, path in paths.items() if path.exists()}


def draw(tables: dict[str, Rows], key: str, label: str, path: Path, skip: Iterable[str] = ("Idle",)) -> None:
    """A panel for each problem, two in a row: quantities downwards, a marker for each package, hollow where wrong."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    quantities = [q for q in QUANTITIES if q not in skip and any(q in rows for rows in tables.values())]
    columns = min(2, len(tables))
    rows_of_panels = -(-len(tables) // columns)
    size = (1.4 + 3.0 * columns, 0.9 + (0.6 + 0.24 * len(quantities)) * rows_of_panels)  # the width of a page
    figure, axes = plt.subplots(rows_of_panels, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis in axes.flat[len(tables) :]:
        axis.axis("off")
    for axis, (problem, rows) in zip(axes.flat, tables.items(), strict=False):
        for place, quantity in enumerate(quantities):
            axis.axhline(place, color="0.92", zorder=0)
            for package, result in reversed(rows.get(quantity, {}).items()):
                if _has(result, key):
                    colour, marker = STYLES[package]
                    first = package == "curvopt"
                    face = "none" if result.get("wrong") else colour
                    axis.plot(
                        max(result[key], 0.1 if key != "peak_mib" else 1),
                        place,
                        marker,
                        color=colour,
                        markerfacecolor=face,
                        markersize=9 if first else 6.5,
                        alpha=1 if first else 0.85,
                        zorder=3 if first else 2,
                    )
        axis.set_xscale("log")
        left, right = axis.get_xlim()
        axis.set_xlim(min(left, 0.9), max(right, 11))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_title(TITLES.get(problem, problem), fontsize=11)
        axis.grid(axis="x", color="0.88", linewidth=0.6)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.set_axisbelow(True)
    axes[0][0].set_yticks(range(len(quantities)), quantities)
    axes[0][0].invert_yaxis()
    figure.supxlabel(label, fontsize=11)
    shown = [p for p in STYLES if any(not is_absent(row, p) for rows in tables.values() for row in rows.values())]
    handles: list[Any] = [Line2D([], [], color=STYLES[p][0], marker=STYLES[p][1], linestyle="", label=p) for p in shown]
    if any(result.get("wrong") for rows in tables.values() for row in rows.values() for result in row.values()):
        handles.append(
            Line2D([], [], color="0.4", marker="o", markerfacecolor="none", linestyle="", label="wrong numbers")
        )
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, handletextpad=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
