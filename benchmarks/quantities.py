"""What every quantity costs as a multiple of the plain gradient, here and in other packages.

All packages that have a quantity compute it in turns, in one process. Before every run the plain gradient (forward and
backward of the network as it is) is measured, and the medians of the ratios are shown. First the numbers are compared
with the quantity's definition by plain autograd, in float64, on three samples and at most ten classes.

In the table: "–" the package has no such quantity, "fails" it raises an error on this network, "wrong" its numbers
disagree with the definition, "*" it leaves the gradient out, which has to be computed by itself (and is kept where
memory is measured). Reasons and all measurements are in the JSON files.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm

from benchmarks.agreement import TOLERANCE, Checker
from benchmarks.memory import peak
from benchmarks.packages import Method, NotOffered, installed, method
from benchmarks.problems import PROBLEMS
from benchmarks.tables import Choice, Result, Rows, draw, load_rows, markdown, save_rows
from benchmarks.timing import RESULTS, ratios, reason

#: How many more rounds for what is meant to cost nothing.
IDLE_ROUNDS = 4


@dataclass(frozen=True)
class Settings(Choice):
    """What is measured, and how."""

    rounds: int = 9
    """Turns of every package."""
    budget: float = 5.0
    """Seconds after which a package takes no more turns at a quantity."""
    limit: float = 60.0
    """Seconds of CPU time that one computation may take."""
    memory: bool = True
    """Measure the peak memory, too, in a fresh process each."""
    check: bool = True
    """Compare the numbers with the definitions first."""
    company: bool = False
    """Compute other quantities before each measurement and delete their fields, which leaves the allocator gaps."""
    out: Path = RESULTS
    """Folder for the results; what is there of other quantities and packages stays."""
    figure: Path = Path("docs") / "_static" / "quantities.png"
    """Where to draw all results of that folder."""


def prepared(problem: str, package: str, quantity: str, device: str, checker: Checker | None) -> tuple[Method, Result]:
    """The method, and what the comparison says.

    Raises:
        NotOffered: the package has no such quantity.
        Exception: whatever the package raises.
    """
    result: Result = {}
    if checker is not None:
        error, dtype = checker.error(package, quantity)
        result = {"error": error, "dtype": str(dtype).removeprefix("torch."), "wrong": not error < TOLERANCE[dtype]}
    found = method(package, PROBLEMS[problem].make(device), quantity)
    return found, result | {"gradient": found.gradient}


def others(problem: str, device: str) -> Callable[[], None]:
    """Computes three quantities, as a training that uses several, and deletes their fields."""
    task = PROBLEMS[problem].make(device)
    runs = [method("curvopt", task, quantity).run for quantity in ("BatchL2Grad", "KFAC", "DiagGGNMC")]

    def compute() -> None:
        for run in runs:
            run()

    return compute


def measure(settings: Settings, problem: str, quantity: str, checker: Checker | None, bar: Any) -> dict[str, Result]:
    """A row of the table: results by package."""
    row: dict[str, Result] = {}
    calls = {}
    for package in installed(settings.package):
        try:
            found, row[package] = prepared(problem, package, quantity, settings.device, checker)
            calls[package] = found.run
        except NotOffered:
            row[package] = {"absent": True}
        except (Exception, AssertionError) as error:
            row[package] = {"fails": reason(error)}
    unit = PROBLEMS[problem].make(settings.device).gradient
    rounds = IDLE_ROUNDS * settings.rounds if quantity == "Idle" else settings.rounds
    tick = functools.partial(bar.set_postfix_str, f"{problem} {quantity}", refresh=False)
    between = others(problem, settings.device) if settings.company else lambda: None
    measured = ratios(unit, calls, rounds, settings.budget, settings.limit, settings.device, tick, between)
    for package, numbers in measured.items():
        row[package] |= numbers
        if settings.memory and "fails" not in numbers:
            row[package] |= peak(PROBLEMS[problem], package, quantity, settings.device, settings.limit)
    return row


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.quantities", description=__doc__)
    torch.set_num_threads(settings.threads)
    tables: dict[str, Rows] = {}
    checker: Checker | None = None
    measured = ["time", *["memory"] * settings.memory, *["agreement"] * settings.check]
    bar = tqdm(settings.cells())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem, quantity in bar:
            bar.set_postfix_str(f"{problem} {quantity}")
            if problem not in tables and settings.check:
                checker = Checker(PROBLEMS[problem])
            tables.setdefault(problem, {})[quantity] = measure(settings, problem, quantity, checker, bar)
            save_rows(settings.out, problem, tables[problem], settings, measured)
    key = "cpu" if settings.threads == 1 and settings.device == "cpu" else "wall"
    label = "multiples of the plain gradient's " + {"cpu": "CPU time", "wall": "time"}[key]
    print(f"\n{label}")
    for problem, rows in tables.items():
        print(f"\n{markdown(problem, rows, key)}")
        if settings.memory:
            print(f"\nMiB beyond the plain gradient's peak, with the gradient\n\n{markdown(problem, rows, 'peak_mib')}")
    draw(load_rows(settings.out), key, label, settings.figure)
    print(f"\nresults: {settings.out}/quantities-*.json, {settings.figure}")


if __name__ == "__main__":
    main()
