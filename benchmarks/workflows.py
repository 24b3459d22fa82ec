"""Which everyday losses and training loops train: ``python -m benchmarks.workflows`` writes the table of the docs."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
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


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW as one takes it first."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--page", type=Path, default=Path(__file__).parents[1] / "docs" / "workflows.md")
    options = parser.parse_args()
    head, _, rest = options.page.read_text().partition("<!-- table -->\n")
    tail = rest.partition("<!-- end of table -->\n")[2]
    options.page.write_text(f"{head}<!-- table -->\n{table(options.steps)}\n<!-- end of table -->\n{tail}")


if __name__ == "__main__":
    main()
