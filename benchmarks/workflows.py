"""Which everyday losses and training loops train: ``python -m benchmarks.workflows`` writes the table of the docs."""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import nn

from benchmarks.everyday_loops import WORKFLOWS, Make
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW

#: How the table marks warnings.
MARKS = {
    "e": "takes the empirical quantity",
    "p": "takes plain gradients",
    "o": "as one sample",
}


def adamw(module: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW as one takes it first."""
    return torch.optim.AdamW(module.parameters(), lr=lr)


def attached(kind: type, **options: Any) -> Make:
    """Makes a curvature optimizer with its defaults, attached."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind(module.parameters(), **options)
        optimizer.attach(module)
        return optimizer

    return make


OPTIMIZERS: dict[str, Make] = {kind.__name__: attached(kind) for kind in (KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton)}


def train(name: str, make: Make, steps: int = 60, seed: int = 0) -> tuple[float, float]:
    """The number of a workflow at its first step, and its mean over the last sixth."""
    torch.manual_seed(seed)
    numbers = [number for number, _ in zip(WORKFLOWS[name](make), range(steps), strict=False)]
    last = numbers[-(-steps * 5 // 6) :]
    return numbers[0], sum(last) / len(last)


def table(steps: int) -> str:
    """Numbers of all workflows and optimizers, as Markdown."""
    lines = [f"| workflow | start | AdamW | {' | '.join(OPTIMIZERS)} |", "|---" * (3 + len(OPTIMIZERS)) + "|"]
    for name in WORKFLOWS:
        start, end = train(name, adamw, steps)
        row = [name, f"{start:.3g}", f"{end:.3g}"]
        for make in OPTIMIZERS.values():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                number = train(name, make, steps)[1]
            texts = " ".join(str(warning.message) for warning in said)
            mark = next((f" {mark}" for mark, text in MARKS.items() if text in texts), "")
            row.append(f"{number:.3g}{mark}")
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def timed(name: str, make: Make, steps: int) -> tuple[list[float], list[float]]:
    """The numbers of a workflow, and the seconds of CPU time after each step."""
    torch.manual_seed(0)
    numbers, seconds, start = [], [], time.process_time()
    for number, _ in zip(WORKFLOWS[name](make), range(steps), strict=False):
        numbers.append(number)
        seconds.append(time.process_time() - start)
    return numbers, seconds


def equal_time(steps: int) -> str:
    """At how many workflows an optimizer is below the better of two rates of AdamW, at equal steps and at its time.

    Times are medians of three runs, in turns.
    """
    counts = {name: [0, 0] for name in ("KFACSGD", "KFACAdamW")}
    makes = [*(partial(adamw, lr=lr) for lr in (1e-3, 3e-3)), *(OPTIMIZERS[name] for name in counts)]
    for workflow in WORKFLOWS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            turns = [[timed(workflow, make, steps) for make in makes] for _ in range(3)]
        numbers = [numbers for numbers, _ in turns[0]]
        seconds = torch.tensor([[spent for _, spent in turn] for turn in turns]).median(0).values.tolist()
        target, budget = min(map(_last, numbers[:2])), min(spent[-1] for spent in seconds[:2])
        for (name, below), found, spent in zip(counts.items(), numbers[2:], seconds[2:], strict=True):
            within = sum(each <= budget for each in spent)
            below[0] += _last(found) < target
            below[1] += within > 0 and _last(found[:within]) < target
            print(f"{workflow}: {name} takes {spent[-1] / budget:.1f} times as long", flush=True)
    told = [
        f"`{name}` on {at_steps} at equal steps and on {at_time} at its time"
        for name, (at_steps, at_time) in counts.items()
    ]
    return (
        f"Of the {len(WORKFLOWS)} loops, {steps} steps each, below the better of AdamW's rates 0.001 and 0.003 are "
        f"{' and '.join(told)}."
    )


def _last(numbers: list[float]) -> float:
    """The mean over the last sixth."""
    last = numbers[-max(1, len(numbers) // 6) :]
    return sum(last) / len(last)


def replaced(page: str, name: str, text: str) -> str:
    """A page with another text between two marks."""
    head, _, rest = page.partition(f"<!-- {name} -->\n")
    tail = rest.partition(f"<!-- end of {name} -->\n")[2]
    return f"{head}<!-- {name} -->\n{text}\n<!-- end of {name} -->\n{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--page", type=Path, default=Path(__file__).parents[1] / "docs" / "workflows.md")
    options = parser.parse_args()
    torch.set_num_threads(1)  # waiting threads would count as time
    page = options.page.read_text()
    page = replaced(page, "table", table(options.steps))
    options.page.write_text(replaced(page, "time", fill(equal_time(100), 98, break_on_hyphens=False)))


if __name__ == "__main__":
    main()
