"""Peak memory of every quantity with the gradient, in MiB beyond the peak of the plain gradient, here and elsewhere.

Every number is a median of fresh processes, each of which has computed the plain gradient before; it is kept meanwhile
for a package that does not compute it along.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from benchmarks.packages import NotOffered, installed, method
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.tables import Choice, Result, Rows, draw, load_rows, markdown, save_rows
from benchmarks.timing import RESULTS, in_fresh_process, limited, peak_memory

#: Processes of which the median is taken, and seconds after which no other one is started.
PROCESSES, PATIENCE = 7, 20.0


@dataclass(frozen=True)
class Settings(Choice):
    """What is measured, and how."""

    limit: float = 60.0
    """Seconds of CPU time that a package may take."""
    out: Path = RESULTS
    """Folder for the results and the figure; results there of other quantities and packages stay."""


def peaks(problem: Problem, package: str, quantity: str, device: str, limit: float) -> Result:
    """Peak memory after a quantity, less that after the plain gradient before it; for a fresh process."""
    try:
        method(package, PROBLEMS["tiny"].make(device), quantity).run()  # what the package loads at its first use
    except NotOffered:
        return {"absent": True}
    task = problem.make(device)
    computed = method(package, problem.make(device), quantity)
    for _ in range(2):  # the allocator learns from the first
        task.model.zero_grad()
        task.gradient()
    if computed.gradient:
        task.model.zero_grad()
    gradient = peak_memory(device)
    with limited(limit):
        computed.run()
    own = peak_memory(device) - gradient
    return {"peak_mib": own, "gradient_peak_mib": gradient, "gradient": computed.gradient}


def peak(problem: Problem, package: str, quantity: str, device: str = "cpu", limit: float = 60.0) -> Result:
    """The same, in processes of their own, or why not.

    The median of a few, unless they take long: where the system's allocator finds room is a matter of luck.
    """
    found: list[Result] = []
    begin = time.monotonic()
    while len(found) < PROCESSES and (not found or time.monotonic() - begin < PATIENCE):
        try:
            found.append(in_fresh_process(peaks, problem, package, quantity, device, limit))
        except RuntimeError as error:
            return {"memory_fails": str(error)}
        if "absent" in found[-1]:
            return found[-1]
    return sorted(found, key=lambda result: result["peak_mib"])[(len(found) - 1) // 2]


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.memory", description=__doc__)
    torch.set_num_threads(settings.threads)
    tables: dict[str, Rows] = {}
    bar = tqdm(settings.cells())
    for problem, quantity in bar:
        bar.set_postfix_str(f"{problem} {quantity}")
        tables.setdefault(problem, {})[quantity] = {
            package: peak(PROBLEMS[problem], package, quantity, settings.device, settings.limit)
            for package in installed(settings.package)
        }
        save_rows(settings.out, problem, tables[problem], settings, ["memory"])
    print("\nPeak memory with the gradient, MiB beyond that of the plain gradient")
    for problem, rows in tables.items():
        print(f"\n{markdown(problem, rows, 'peak_mib')}")
    figure = settings.out / "memory.png"
    draw(load_rows(settings.out), "peak_mib", "MiB beyond the plain gradient's peak", figure)
    print(f"\nresults: {settings.out}/quantities-*.json, {figure}")


if __name__ == "__main__":
    main()
