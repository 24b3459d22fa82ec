"""How the cost of quantities grows with batch size, width, classes, depth and steps, and their memory with the classes.

A small convolutional network is varied in one size at a time. Time is a multiple of the plain gradient at that size;
memory is that beyond the plain gradient's peak in a fresh process, and for exact curvature should stay where it is
however many columns the classes ask for. The vocabulary is that of a small language model, whose columns are sampled,
the steps are those of an LSTM, and of an LSTM cell that is called for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.memory import peak
from benchmarks.packages import installed, method
from benchmarks.problems import Problem
from benchmarks.tables import PackageName, QuantityName
from benchmarks.timing import RESULTS, machine, ratios, save
from experiments import models


def network(width: int, depth: int, classes: int) -> nn.Module:
    """Convolutions of one width, a pooling and a linear layer, for 16x16 images."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(width if i else 3, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * width, classes))


def images(N: int = 32, width: int = 32, depth: int = 4, classes: int = 10) -> Problem:
    return Problem(partial(network, width, depth), classes, N, inputs=(3, 16, 16))


def text(vocabulary: int) -> Problem:
    return Problem(partial(models.gpt, length=64, dim=64, depth=1), vocabulary, N=4, tokens=64, exact=False)


class Recurrent(nn.Module):
    """A language model of an LSTM, or of a cell that is called step by step."""

    def __init__(self, characters: int, kind: type[nn.LSTM | nn.LSTMCell], dim: int = 64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(characters, dim), nn.Linear(dim, characters)
        self.recurrent = kind(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.embedding(x).transpose(0, 1)
        if isinstance(self.recurrent, nn.LSTM):
            return self.head(self.recurrent(steps)[0]).permute(1, 2, 0)
        state, hidden = None, []
        for step in steps:
            state = self.recurrent(step, state)
            hidden.append(state[0])
        return self.head(torch.stack(hidden, 1)).mT


def sequences(kind: type[nn.LSTM | nn.LSTMCell], steps: int) -> Problem:
    return Problem(partial(Recurrent, kind=kind), 50, N=16, tokens=steps, exact=False)


#: What grows, and the problem of each size.
SIZES: Mapping[str, tuple[Callable[[int], Problem], tuple[int, ...]]] = {
    "batch size": (lambda size: images(N=size), (4, 8, 16, 32, 64, 128)),
    "width": (lambda size: images(width=size), (8, 16, 32, 64, 128)),
    "depth": (lambda size: images(depth=size), (2, 4, 8, 16)),
    "steps of a cell": (partial(sequences, nn.LSTMCell), (10, 30, 100, 300)),
    "steps of an LSTM": (partial(sequences, nn.LSTM), (10, 30, 100, 300)),
    "vocabulary": (text, (300, 1000, 3000, 10000)),
    "classes": (lambda size: images(classes=size), (10, 30, 100, 300, 1000)),
}
#: Whose memory is measured as they grow.
COLUMNS = ("vocabulary", "classes")
LUCK = 32  # MiB of a peak that are the allocator's
#: Okabe and Ito (2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
LINES = {"curvopt": "-", "backpack": "--"}
#: Quantities that cost about as much as another one: where that one is drawn, they are not.
LIKE = {"SumGradSquared": "BatchL2Grad", "KFLR": "DiagGGNExact"}

SizeName = str if TYPE_CHECKING else Literal[tuple(SIZES)]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how."""

    size: tuple[SizeName, ...] = tuple(SIZES)
    """What grows."""
    quantity: tuple[QuantityName, ...] = ("BatchL2Grad", "SumGradSquared", "KFAC", "DiagGGNMC", "KFLR", "DiagGGNExact")
    """Extensions."""
    package: tuple[PackageName, ...] = ("curvopt",)
    """Packages; curvopt is drawn with lines, others dashed."""
    threads: int = 1
    """Threads of PyTorch."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""
    rounds: int = 5
    """Turns of every quantity."""
    budget: float = 3.0
    """Seconds after which a quantity takes no more turns."""
    out: Path = RESULTS
    """Folder for the results and the figure."""


def at(settings: Settings, name: str, size: int) -> dict[str, Any]:
    """Costs of all quantities at one size, by package and quantity."""
    problem = SIZES[name][0](size)
    calls = {}
    for package in installed(settings.package):
        for quantity in settings.quantity:
            if problem.exact or quantity not in ("KFLR", "DiagGGNExact"):
                calls[f"{package} {quantity}"] = method(package, problem.make(settings.device), quantity).run
    unit = problem.make(settings.device).gradient
    costs = ratios(unit, calls, settings.rounds, settings.budget, device=settings.device)
    if name in COLUMNS:
        for key in calls:
            costs[key] |= peak(problem, *key.split(), settings.device)
    return costs


def points_of(costs: Mapping[int, Mapping[str, Any]], number: str) -> dict[str, list[tuple[int, float]]]:
    """The points of each line of a panel, by package and quantity."""
    labels = list(dict.fromkeys(label for at_size in costs.values() for label in at_size))
    found: dict[str, list[tuple[int, float]]] = {}
    for label in labels:
        package, quantity = label.split()
        if f"{package} {LIKE.get(quantity)}" not in labels:
            found[label] = [(size, at[label][number]) for size, at in costs.items() if number in at.get(label, {})]
    return {label: line for label, line in found.items() if line}


def draw(curves: Mapping[str, Mapping[int, Mapping[str, Any]]], key: str, path: Path) -> None:
    """Panels of times, then of memory that is more than the luck of the allocator, four in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in SIZES if name in curves]
    panels = [(name, key) for name in names]
    for name in names:
        used = [y for points in points_of(curves[name], "peak_mib").values() for _, y in points]
        if name in COLUMNS and max(used, default=0) > LUCK:
            panels.append((name, "peak_mib"))
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    size = (1.95 * columns, 0.5 + 1.95 * rows)  # the width of a page
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 10})
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    colours: dict[str, str] = {}
    for axis, (name, number) in zip(axes.flat, panels, strict=False):
        lines = points_of(curves[name], number)
        for label, points in lines.items():
            package, quantity = label.split()
            colour = colours.setdefault(quantity, COLOURS[len(colours) % len(COLOURS)])
            axis.plot(*zip(*points, strict=True), LINES.get(package, ":"), color=colour, marker="o", markersize=3)
        axis.set_xscale("log")
        highest = max(y for points in lines.values() for _, y in points)
        if number != "peak_mib" and highest > 20:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.1 * highest)
        axis.yaxis.set_major_formatter("{x:g}")
        sizes = list(curves[name])
        axis.set_xticks(sizes, [f"{size:,}" if size in (sizes[0], sizes[-1]) else "" for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.set_title("more MiB" if number == "peak_mib" else "gradients", loc="left")
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    handles = [
        plt.Line2D([], [], color=colour, marker="o", markersize=3, label=name) for name, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.scaling", description=__doc__)
    torch.set_num_threads(settings.threads)
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    bar = tqdm([(name, size) for name in settings.size for size in SIZES[name][1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, size in bar:
            bar.set_postfix_str(f"{name} {size}")
            curves.setdefault(name, {})[size] = at(settings, name, size)
    key = "cpu" if settings.threads == 1 and settings.device == "cpu" else "wall"
    for name, points in curves.items():
        labels = list(dict.fromkeys(label for costs in points.values() for label in costs))
        print(f"\n| {name} | " + " | ".join(labels) + " |\n|" + "---|" * (1 + len(labels)))
        for size, costs in points.items():
            shown = [f"{costs[label][key]:.2f}" if key in costs.get(label, {}) else "–" for label in labels]
            if name in COLUMNS:
                memory = [costs.get(label, {}).get("peak_mib") for label in labels]
                shown = [f"{s} ({m:.0f} MiB)" if m is not None else s for s, m in zip(shown, memory, strict=True)]
            print(" | ".join([f"| {size:,}", *shown]) + " |")
    description = machine(settings.device)
    save(settings.out / "scaling.json", {"machine": description, "key": key, "curves": curves})
    draw(curves, key, settings.out / "scaling.png")
    print(f"\nresults: {settings.out / 'scaling.json'}, {settings.out / 'scaling.png'}")


if __name__ == "__main__":
    main()
