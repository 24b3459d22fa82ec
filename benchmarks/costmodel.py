"""Whether the engine chooses the faster of its algorithms: its chunk sizes against measurements of both ways.

For every layer of the networks, and for whole networks, a choice is forced either way and both are timed. "Regret" is
the time of what the engine chooses, divided by that of the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.packages import method
from benchmarks.problems import PROBLEMS
from benchmarks.tables import Choice, ProblemName
from benchmarks.timing import RESULTS, machine, save, seconds
from curvopt.core.layers.rule import AffineRule, rule_for
from curvopt.core.products import costs
from curvopt.core.products.outer import Outer, Patches, Squares

#: Largest temporary that a forced choice may ask for, in numbers.
LARGEST = 2e8
#: Seconds after which an answer is not measured again.
BUDGET = 2.0
#: Regret that is no mistake.
SLACK = 1.15


@dataclass(frozen=True)
class Settings:
    """What is measured, and how."""

    problem: tuple[ProblemName, ...] = Choice.problem
    """Networks whose layers are measured."""
    rounds: int = 5
    """Times that both ways are measured, in turns."""
    threads: int = 1
    """Threads of PyTorch."""
    out: Path = RESULTS
    """Folder for the results and the figure."""


@dataclass(frozen=True)
class Case:
    """A call, the function of `costs` that it asks, and what that may answer."""

    choice: str
    where: str
    function: str
    answers: tuple[Any, ...]
    call: Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution, as the engine sees it: see `Outer`."""

    name: str
    right: Tensor
    patches: Patches | None
    shape: torch.Size


def layers(problem: str) -> Iterator[Layer]:
    """The layers of a network, of each shape once."""
    task, found, handles = PROBLEMS[problem].make(), {}, []
    for name, module in task.model.named_modules():
        rule = rule_for(module)
        if isinstance(rule, AffineRule):

            def keep(
                module: nn.Module, args: tuple[Tensor], output: Tensor, name: str = name, rule: AffineRule = rule
            ) -> None:
                shape = module.get_parameter("weight").shape
                right = rule.unfold(module, args[0].detach())
                right, patches = (right.whole, right.used_once()) if isinstance(right, Patches) else (right, None)
                found.setdefault((right.shape, shape), Layer(name, right, patches, shape))

            handles.append(module.register_forward_hook(keep))
    task.model(task.x)
    for handle in handles:
        handle.remove()
    yield from found.values()


def chunks(left: Tensor, right: Tensor | Patches, shape: torch.Size, columns: int) -> Any:
    """Squares of columns that come one by one, as in a sweep of a large network."""
    squares, right = Squares(), right.used_once() if isinstance(right, Patches) else right
    for _ in range(columns):
        outer = Outer(left, right, shape)
        outer.columns = columns
        squares.add(outer)
    return squares.total()


def cases_of_layers(problem: str) -> Iterator[Case]:
    for layer in layers(problem):
        where, right = f"{problem} {layer.name}", layer.right
        N, _, S, I = right.shape  # noqa: E741 - the reserved letters
        O = layer.shape[0]  # noqa: E741
        left = torch.randn(1, N, 1, S, O) if layer.patches is None else torch.randn(1, N, 1, O, S).mT
        matrix = torch.Size((O, I))
        outer = Outer(left, right, matrix)
        in_use = Outer(left, layer.patches or right, matrix)
        if layer.patches is not None:
            yield Case("moments by rows", f"{where} S={S} I={I}", "by_rows", (True, False), in_use.input_factor)
            numbers = tuple(dict.fromkeys((1, min(8, N), N)))
            yield Case("rows of a moment at once", f"{where} S={S} I={I}", "rows_at_once", numbers, in_use.input_factor)
        if S == 1:
            continue
        shape = f"S={S} O={O} I={I}"
        pairs = S * (S + 1) // 2
        if 2 * N * S * S < LARGEST and N * O * I < LARGEST:
            yield Case("norms by Gram matrices", f"{where} {shape}", "by_gram", (True, False), outer.norms2)
        yield Case(
            "samples at once",
            f"{where} {shape}",
            "samples_at_once",
            tuple(dict.fromkeys((1, min(8, N), N))),
            partial(chunks, left, layer.patches or right, matrix, 1),
        )
        for V in (1, PROBLEMS[problem].classes):
            if N * pairs * (O + I) < LARGEST and V <= 100:
                call = partial(chunks, left, right, matrix, V)
                yield Case("squares by pairs of positions", f"{where} V={V} {shape}", "by_pairs", (True, False), call)


def cases_of_networks(problem: str) -> Iterator[Case]:
    if PROBLEMS[problem].exact:
        for quantity in ("DiagGGNExact", "KFLR"):
            together = tuple(c for c in (1, 2, 10) if c <= PROBLEMS[problem].classes)
            call = method("curvopt", PROBLEMS[problem].make(), quantity).run
            where = f"{problem} {quantity}"
            yield Case("columns at once", where, "columns_at_once", together, call)


def chosen(case: Case) -> Any:
    """What the engine answers; if it is asked more than once, what it answers first; ``None`` if it is not asked."""
    answers = []
    original = getattr(costs, case.function)

    def listen(*args: Any) -> Any:
        answers.append(original(*args))
        return answers[-1]

    with mock.patch.object(costs, case.function, listen):
        case.call()
    return answers[0] if answers else None


def measured(case: Case, answer: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds of every answer and of the engine's own, and the regret of that."""
    answers = tuple(dict.fromkeys((*case.answers, answer)))
    samples: dict[Any, list[float]] = {a: [] for a in answers}
    for _ in range(rounds):
        for a in answers:
            if sum(samples[a]) < BUDGET:
                with mock.patch.object(costs, case.function, lambda *_, a=a: a):
                    first = seconds(case.call)[0]
                    samples[a].append(first if first > 0.5 else min(seconds(case.call)[0] for _ in range(2)))
    times = {a: 1e3 * statistics.median(values) for a, values in samples.items()}
    return {
        "choice": case.choice,
        "where": case.where,
        "chosen": answer,
        "milliseconds": {str(a): t for a, t in times.items()},
        "regret": times[answer] / min(times.values()),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A row for each choice: how much longer the next best way takes, or by how much the engine misses the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    choices = list(dict.fromkeys(result["choice"] for result in results))
    figure, axis = plt.subplots(figsize=(7, 0.9 + 0.45 * len(choices)))
    for result in results:
        times = result["milliseconds"]
        own = times[str(result["chosen"])]
        other = min(t for answer, t in times.items() if answer != str(result["chosen"]))
        right = result["regret"] <= SLACK
        axis.plot(
            other / own,
            choices.index(result["choice"]),
            marker="o" if right else "X",
            color="#0072B2" if right else "#D55E00",
            alpha=0.6,
            zorder=2 + (not right),
        )
    axis.axvline(1, color="0.4", linewidth=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(choices)), choices)
    axis.set_ylim(len(choices) - 0.5, -0.5)
    axis.set_xlabel("time of the best other way / of the way chosen\n(crosses: the other is faster)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="0.9")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.costmodel", description=__doc__)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    results = []
    bar = tqdm(settings.problem)

    def measure(case: Case) -> None:
        bar.set_postfix_str(case.where)
        answer = chosen(case)
        if answer is not None:
            results.append(measured(case, answer, settings.rounds))

    for problem in bar:
        with torch.no_grad():
            for case in cases_of_layers(problem):
                measure(case)
        for case in cases_of_networks(problem):
            measure(case)
    print("\n| choice | cases | right | worst regret |\n|---|---|---|---|")
    for choice in dict.fromkeys(result["choice"] for result in results):
        regrets = [result["regret"] for result in results if result["choice"] == choice]
        right = sum(regret <= SLACK for regret in regrets)
        print(f"| {choice} | {len(regrets)} | {right} | {max(regrets):.2f} |")
    for result in sorted(results, key=lambda result: -result["regret"]):
        if result["regret"] > SLACK:
            times = ", ".join(f"{answer}: {t:.2f} ms" for answer, t in result["milliseconds"].items())
            print(f"{result['choice']}, {result['where']}: chosen {result['chosen']}, {times}")
    save(settings.out / "costmodel.json", {"machine": machine(), "results": results})
    draw(results, settings.out / "costmodel.png")
    print(f"\nresults: {settings.out / 'costmodel.json'}, {settings.out / 'costmodel.png'}")


if __name__ == "__main__":
    main()
