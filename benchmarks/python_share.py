"""How much time the engine's own Python takes in a backward pass, as a share of the plain gradient.

Each network has a twin with the same operations and hardly any numbers, where kernels take no time. What a backward of
the twin takes longer inside of `backpack` is Python (and PyTorch's dispatch of the operations that were asked for), and
does not depend on sizes; it is divided by the time of the plain gradient of the network itself.

"first order" and "second order" are extensions that compute nothing: reading the graph, locating samples, checks, hooks
and rules, with the user's gradient and with one sampled column.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import tyro

from benchmarks.problems import PROBLEMS, Problem, Task, mlp_of_functions
from benchmarks.timing import seconds
from curvopt import backpack, extend
from curvopt.core.losses.roots import Gradient, MonteCarlo
from curvopt.core.products.base import Chunk
from curvopt.extensions import KFAC, BatchGrad, DiagGGNMC, Extension
from experiments import models


class Nothing(Extension):
    """Computes nothing.

    Args:
        columns: what is pulled back for it.
    """

    field = "nothing"

    def __init__(self, columns: Gradient | MonteCarlo):
        self.columns = columns

    def update(self, total: None, chunk: Chunk) -> None:
        """Leave the Jacobian alone."""


QUANTITIES: dict[str, Callable[[], Extension]] = {
    "first order": partial(Nothing, Gradient()),
    "second order": partial(Nothing, MonteCarlo(1)),
    "BatchGrad": BatchGrad,
    "DiagGGNMC": DiagGGNMC,
    "KFAC": KFAC,
}
_small = partial(replace, classes=2, N=2)
#: Of each network its twin.
TWINS: dict[str, Problem] = {
    "mlp": _small(PROBLEMS["mlp"], model=partial(models.mlp, 3, 3, 3), inputs=(3,)),
    "functions": _small(PROBLEMS["functions"], model=partial(mlp_of_functions, widths=(3, 3, 3)), inputs=(3,)),
    "transformer": _small(PROBLEMS["transformer"], model=partial(models.gpt, length=2, dim=4, depth=2), tokens=2),
}
if TYPE_CHECKING:
    ProblemName = QuantityName = str
else:
    ProblemName, QuantityName = Literal[tuple(TWINS)], Literal[tuple(QUANTITIES)]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how."""

    problem: tuple[ProblemName, ...] = tuple(TWINS)
    """Networks, see `benchmarks.problems`."""
    quantity: tuple[QuantityName, ...] = tuple(QUANTITIES)
    """Extensions."""
    rounds: int = 200
    """Backward passes of each; medians are compared."""
    threads: int = 1
    """Threads of PyTorch."""


def backward(task: Task, *extensions: Extension) -> float:
    """Seconds of one backward pass of an extended network; without extensions, outside of any context."""
    task.model.zero_grad()
    loss = task.lossfunc(task.model(task.x), task.y)
    begin = time.process_time()
    if extensions:
        with backpack(*extensions):
            loss.backward()
    else:
        loss.backward()
    return time.process_time() - begin


def python_seconds(twin: Problem, quantities: list[str], rounds: int) -> dict[str, float]:
    """Seconds by which a backward of a twin takes longer, by quantity."""
    task = twin.make()
    extend(task.model), extend(task.lossfunc)
    found: dict[str, list[float]] = {name: [] for name in quantities}
    for _ in range(rounds):
        plain = backward(task)
        for name in quantities:
            found[name].append(backward(task, QUANTITIES[name]()) - plain)
    return {name: statistics.median(times) for name, times in found.items()}


def gradient_seconds(problem: Problem, rounds: int) -> float:
    """Seconds of the plain gradient, forward included."""
    task: Any = problem.make()
    return statistics.median(seconds(task.gradient)[0] for _ in range(rounds))


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.python_share", description=__doc__)
    torch.set_num_threads(settings.threads)
    warnings.simplefilter("ignore")
    print(f"{'share of the gradient (milliseconds)':38}" + "".join(f"{name:>16}" for name in settings.quantity))
    for name in settings.problem:
        unit = gradient_seconds(PROBLEMS[name], max(settings.rounds // 10, 3))
        python = python_seconds(TWINS[name], list(settings.quantity), settings.rounds)
        cells = [f"{python[quantity] / unit:.2f} ({1e3 * python[quantity]:.2f})" for quantity in settings.quantity]
        print(f"{f'{name}, gradient {1e3 * unit:.1f} ms':38}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
