"""What every quantity costs as a multiple of the plain gradient, here and in other packages.

All packages that have a quantity compute it in turns, in one process. Before every run the plain gradient (forward and
backward of the network as it is) is measured, and the medians of the ratios are shown. First the numbers are compared
with the quantity's definition by plain autograd, in float64 and on three samples.

In the table: "–" the package has no such quantity, "fails" it raises an error on this network, "wrong" its numbers
disagree with the definition, "*" it leaves the gradient out, which has to be computed by itself. Reasons and all
measurements are in the JSON file.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro
from tqdm import tqdm

from benchmarks.agreement import TOLERANCE, Checker
from benchmarks.packages import EXACT, PACKAGES, PRODUCTS, QUANTITIES, Method, NotOffered, installed, method
from benchmarks.problems import PROBLEMS
from benchmarks.timing import RESULTS, in_fresh_process, peak_memory, ratios, reason, save

if TYPE_CHECKING:
    ProblemName = QuantityName = PackageName = str
else:
    ProblemName = Literal[tuple(PROBLEMS)]
    QuantityName = Literal[tuple(QUANTITIES)]
    PackageName = Literal[tuple(PACKAGES)]

#: What is measured unless asked otherwise; the others cost as much as one of these.
USUAL = (
    "Idle BatchGrad BatchL2Grad SumGradSquared Variance KFAC KFLR DiagGGNExact DiagGGNMC BatchDiagGGNExact DiagHessian"
).split()
#: Largest result that is measured, in numbers.
LARGEST = 3e8
#: Rounds of what is meant to cost nothing.
IDLE_ROUNDS = 30

Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how."""

    problem: Annotated[tuple[ProblemName, ...], tyro.conf.arg(metavar="NAME")] = tuple(
        p for p in PROBLEMS if p != "tiny"
    )
    """Networks and batches: mlp (784-512-256-10, N=128), 3c3d (CIFAR-10, N=64), allcnnc (CIFAR-100, N=16), resnet18
    (batch norm in eval mode, N=16), transformer (two layers, N=8, 64 tokens), tiny."""
    quantity: tuple[QuantityName, ...] = tuple(USUAL)
    """Extensions; Idle is the gradient of an extended network while nothing is asked for."""
    package: tuple[PackageName, ...] = tuple(PACKAGES)
    """Packages; those that are not installed are left out."""
    threads: int = 1
    """Threads of PyTorch."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""
    rounds: int = 9
    """Turns of every package."""
    budget: float = 10.0
    """Seconds after which a package takes no more turns at a quantity."""
    memory: bool = True
    """Measure the peak memory, too, in a fresh process each."""
    check: bool = True
    """Compare the numbers with the definitions first."""
    out: Path = RESULTS / "quantities.json"
    """Where the results go; the figure lies beside them."""


def size(quantity: str, problem: str) -> float:
    """How many numbers the result has."""
    made = PROBLEMS[problem]
    entries = sum(p.numel() for p in made.make(1).model.parameters())
    columns = made.classes if quantity == "SqrtGGNExact" else 1
    return entries * columns * (made.N if quantity.startswith(("Batch", "Sqrt")) and "L2" not in quantity else 1)


def asked(settings: Settings, problem: str) -> list[str]:
    """Quantities of a problem that are affordable at all."""
    exact = PROBLEMS[problem].exact
    possible = [q for q in settings.quantity if exact or q not in (*EXACT, *PRODUCTS)]
    return [q for q in possible if size(q, problem) <= LARGEST]


def prepared(problem: str, package: str, quantity: str, device: str, checker: Checker | None) -> tuple[Method, Result]:
    """The method, and what the comparison says; raises whatever the package raises."""
    result: Result = {}
    if checker is not None:
        error, dtype = checker.error(package, quantity)
        result = {"error": error, "dtype": str(dtype).removeprefix("torch."), "wrong": not error < TOLERANCE[dtype]}
    return method(package, PROBLEMS[problem].make(device=device), quantity), result


def measure(settings: Settings, problem: str, quantity: str, checker: Checker | None, bar: Any) -> dict[str, Result]:
    """A row of the table: results by package."""
    row: dict[str, Result] = {}
    methods: dict[str, Method] = {}
    for package in installed(settings.package):
        try:
            found, row[package] = prepared(problem, package, quantity, settings.device, checker)
            row[package]["gradient"] = found.gradient
            found.run()
            methods[package] = found
        except NotOffered:
            row[package] = {"absent": True}
        except (Exception, AssertionError) as error:
            row[package] = {"fails": reason(error)}
    unit = PROBLEMS[problem].make(device=settings.device).gradient
    rounds = max(settings.rounds, IDLE_ROUNDS) if quantity == "Idle" and settings.rounds > 3 else settings.rounds
    calls = {package: found.run for package, found in methods.items()}
    tick = functools.partial(bar.set_postfix_str, f"{problem} {quantity}", refresh=False)
    for package, measured in ratios(unit, calls, rounds, settings.budget, settings.device, tick).items():
        row[package] |= measured
    if settings.memory:
        for package in methods:
            row[package] |= memory_of(problem, package, quantity, settings.device)
    return row


def memory_of(problem: str, package: str, quantity: str, device: str) -> Result:
    """Peak memory in a fresh process."""
    try:
        own, gradient = in_fresh_process(peaks, problem, package, quantity, device)
    except RuntimeError as error:
        return {"memory_fails": str(error)}
    return {"peak_mib": own - gradient, "gradient_peak_mib": gradient}


def peaks(problem: str, package: str, quantity: str, device: str) -> tuple[float, float]:
    """Peak memory after a quantity and after the plain gradient before it, for a fresh process."""
    method(package, PROBLEMS["tiny"].make(device=device), quantity).run()  # what the package loads at its first use
    task = PROBLEMS[problem].make(device=device)
    computed = method(package, PROBLEMS[problem].make(device=device), quantity)
    task.gradient()
    task.model.zero_grad()
    gradient = peak_memory(device)
    computed.run()
    return peak_memory(device), gradient


def run(settings: Settings) -> dict[str, dict[str, dict[str, Result]]]:
    """All results, by problem, quantity and package."""
    torch.set_num_threads(settings.threads)
    table: dict[str, dict[str, dict[str, Result]]] = {}
    cells = [(problem, quantity) for problem in settings.problem for quantity in asked(settings, problem)]
    bar = tqdm(cells)
    checker: Checker | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem, quantity in bar:
            bar.set_postfix_str(f"{problem} {quantity}")
            if problem not in table and settings.check:
                checker = Checker(PROBLEMS[problem])
            table.setdefault(problem, {})[quantity] = measure(settings, problem, quantity, checker, bar)
    return table


def best(row: dict[str, Result], key: str, among: list[str] | None = None) -> str | None:
    """The package with the lowest correct number of a row."""
    right = {
        package: result[key]
        for package, result in row.items()
        if key in result and not result.get("wrong") and (among is None or package in among)
    }
    return min(right, key=lambda package: right[package], default=None)


def cell(result: Result | None, key: str) -> str:
    """What the table shows of a result."""
    if result is None or result.get("absent"):
        return "–"
    if "fails" in result:
        return "fails"
    if key not in result:
        return "?"
    value = result[key]
    text = f"{value:.0f}" if key == "peak_mib" or value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"
    return f"wrong ({text})" if result.get("wrong") else text if result.get("gradient", True) else f"{text}*"


def markdown(table: dict[str, dict[str, dict[str, Result]]], key: str) -> str:
    """A table for each problem, the best correct number of a row in bold."""
    lines = []
    for problem, rows in table.items():
        packages = [p for p in PACKAGES if any(not row.get(p, {"absent": True}).get("absent") for row in rows.values())]
        lines += ["", " | ".join([f"| {problem}", *packages]) + " |", "|---" * (1 + len(packages)) + "|"]
        for quantity, row in rows.items():
            winner = best(row, key)
            cells = [cell(row.get(p), key) for p in packages]
            cells = [f"**{text}**" if p == winner else text for p, text in zip(packages, cells, strict=True)]
            lines.append(" | ".join([f"| {quantity}", *cells]) + " |")
    return "\n".join(lines[1:])


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.quantities", description=__doc__)
    table = run(settings)
    key = "cpu" if settings.threads == 1 and settings.device == "cpu" else "wall"
    unit = {"cpu": "process CPU time", "wall": "wall time"}[key]
    print(f"\nMultiples of the plain gradient's {unit}\n\n{markdown(table, key)}")
    if settings.memory:
        print(f"\nPeak memory beyond the gradient's, MiB\n\n{markdown(table, 'peak_mib')}")
    save(settings.out, {"key": key, "table": table}, settings.device)
    print(f"\nresults: {settings.out}")


if __name__ == "__main__":
    main()
