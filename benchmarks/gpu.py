"""What curvopt costs on a GPU, and whether its numbers are those of the CPU: one command, six minutes.

It needs torch and einops, and torchvision for one network; BackPACK is compared where it is installed.

    python -m benchmarks.gpu                       # benchmarks/results/gpu.json, and tables in markdown
    python -m benchmarks.gpu --out DIR --minutes 3
    python -m benchmarks.gpu --quick --device cpu  # every part on tiny networks

The file is written after every cell. A cell that raises an error, or runs out of memory, holds the message; cells that
the time does not suffice for are named under ``skipped``.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks import gpu_numbers as numbers
from benchmarks import gpu_parts as parts
from benchmarks.gpu_parts import Effort, Result
from benchmarks.packages import EXACT, PRODUCTS, QUANTITIES, installed
from benchmarks.problems import PROBLEMS, Problem, Task
from benchmarks.timing import RESULTS, machine, save
from experiments import models

PACKAGES = ("curvopt", "backpack", "torch.func")
SHOWN = ("Idle", "BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "KFAC", "DiagGGNMC")
#: Quantities of a column for each class (and token), for the network of ten classes.
COLUMNS = ("KFLR", "DiagGGNExact", "DiagHessian", "GGNMP", "HMP")
#: Up to which share of the time each part may go on.
SHARES = {"correctness": 0.2, "chunks": 0.35, "quantities": 0.75, "optimizers": 1.0}


def imagenet_resnet18(classes: int) -> nn.Module:
    from torchvision.models import resnet18  # slow to import, and not everywhere

    return resnet18(num_classes=classes)


def gpt2(vocabulary: int, length: int, dim: int, depth: int, heads: int) -> nn.Module:
    """A transformer of the shape of GPT-2 (its smallest: width 768, 12 layers and heads), in bfloat16 by autocast."""
    model = models.gpt(vocabulary, length, dim, depth)
    for block in model.blocks:
        block.attention.heads = heads  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return parts.Mixed(model)


def problems(quick: bool) -> dict[str, Problem]:
    """The networks whose cost is measured, float32 but for the transformer; tiny ones in their places if quick."""
    if quick:
        tiny, text = PROBLEMS["tiny"], partial(gpt2, length=8, dim=16, depth=1, heads=2)
        return {
            "3c3d": tiny,
            "resnet18": replace(tiny, exact=False),
            "transformer": Problem(text, classes=7, N=2, tokens=8, exact=False),
        }
    text = partial(gpt2, length=512, dim=768, depth=12, heads=12)
    return {
        "3c3d": Problem(models.c3d3, classes=10, N=128, inputs=(3, 32, 32)),
        "resnet18": Problem(imagenet_resnet18, classes=1000, N=32, inputs=(3, 224, 224), exact=False),
        # a vocabulary of 50,257 would have a Kronecker factor of 10 GB
        "transformer": Problem(text, classes=8192, N=8, tokens=512, exact=False),
    }


def compared_problems(quick: bool) -> dict[str, Problem]:
    """The networks whose numbers are compared."""
    text = Problem(partial(models.gpt, length=8, dim=16, depth=1), 7, N=3, tokens=8, exact=False)
    images = Problem(models.c3d3, classes=4, N=3, inputs=(3, 32, 32))
    return {"tiny": PROBLEMS["tiny"], "text": text} | ({} if quick else {"3c3d": images})


class Run:
    """The results so far, the file that they go to, and the time that is left.

    Args:
        path: the JSON file.
        minutes: after so many minutes no other cell is begun.
        effort: how long each measurement may take.
        quick: whether the networks are tiny.
    """

    def __init__(self, path: Path, minutes: float, effort: Effort, quick: bool):
        self.path, self.effort, self.quick = path, effort, quick
        self.begin, self.length = time.monotonic(), 60 * minutes
        settings = {"device": effort.device, "minutes": minutes, "quick": quick}
        self.results: Result = {"machine": machine(effort.device), "settings": settings, "skipped": [], "seconds": {}}
        self._tasks: dict[str, Task] = {}

    def cell(self, part: str, keys: Sequence[str], measure: Callable[[], Result]) -> None:
        """Measure a cell if the part has time, and write all results."""
        name = " ".join([part, *keys])
        passed = time.monotonic() - self.begin
        if passed > SHARES[part] * self.length:
            self.results["skipped"].append(name)
            return
        print(f"{passed:6.1f} s  {name}", file=sys.stderr, flush=True)
        row = self.results.setdefault(part, {})
        for key in keys[:-1]:
            row = row.setdefault(key, {})
        row[keys[-1]] = measure()
        self.results["seconds"][part] = self.results["seconds"].get(part, 0) + time.monotonic() - self.begin - passed
        save(self.path, self.results)

    def task(self, name: str, problem: Problem) -> Task:
        """The network and its batch; only that of the last call is kept."""
        if name not in self._tasks:
            self._tasks.clear()
            self._tasks[name] = problem.make(self.effort.device)
        return self._tasks[name]

    def guarded_task(self, name: str, problem: Problem, measure: Callable[[Task], Result]) -> Result:
        """The measurement of a task, or why there is no such task."""
        result: Result = {}
        with parts.guarded(result):
            return measure(self.task(name, problem))
        return result


def correctness(run: Run) -> None:
    """Every field, and the loss after a few steps, by the CPU's numbers; waits of every layer."""
    device = run.effort.device
    for name, problem in compared_problems(run.quick).items():
        for quantity in QUANTITIES:
            if (problem.exact or quantity not in (*EXACT, *PRODUCTS)) and (quantity != "KFRA" or name == "tiny"):
                run.cell("correctness", (name, quantity), partial(numbers.compared, problem, quantity, device))
        for kind in parts.OURS:
            row = (name, kind.__name__)
            run.cell("correctness", row, partial(numbers.optimizer_compared, kind, problem, device))
    layers = list(numbers.layers().items())
    for name, (make, shape) in layers[:3] if run.quick else layers:
        run.cell("correctness", ("waits", name), partial(numbers.waits_of_layer, make, shape, device))


def chunks(run: Run) -> None:
    """Time by the number of columns that go together, for few and many classes and large activations."""
    measured = problems(run.quick)
    c3d3, resnet = measured["3c3d"], measured["resnet18"]
    cases = {
        "3c3d, 10 classes": (c3d3, 10, (1, 2, 3, 5, 9)),
        "3c3d, 100 classes": (c3d3, 12 if run.quick else 100, (1, 4, 6, 10, 25, 50, 99)),
        "resnet18, 10 classes": (resnet, 3 if run.quick else 10, (1, 2, 3, 5, 9)),
    }
    for name, (problem, classes, sizes) in cases.items():
        made = replace(problem, classes=classes)
        for quantity in ("KFLR", "DiagGGNExact"):
            cell = partial(parts.chunk_cell, quantity=quantity, sizes=sizes, effort=run.effort)
            run.cell("chunks", (name, quantity), partial(run.guarded_task, name, made, cell))


def quantities(run: Run) -> None:
    """Every quantity in every package that is installed."""
    for name, problem in problems(run.quick).items():
        gradient = partial(parts.plain, effort=run.effort)
        run.cell("quantities", (name, "gradient", "torch"), partial(run.guarded_task, name, problem, gradient))
        for quantity in (*SHOWN, *COLUMNS) if problem.exact else SHOWN:
            for package in installed(PACKAGES):
                cell = partial(parts.quantity_cell, package=package, quantity=quantity, effort=run.effort)
                run.cell("quantities", (name, quantity, package), partial(run.guarded_task, name, problem, cell))


def optimizers(run: Run) -> None:
    """Steps of every optimizer, the fastest first."""
    for name in ("transformer", "resnet18"):
        problem = problems(run.quick)[name]
        for optimizer in parts.OPTIMIZERS:
            cell = partial(parts.step_cell, name=optimizer, effort=run.effort)
            run.cell("optimizers", (name, optimizer), partial(run.guarded_task, name, problem, cell))


PARTS = {"correctness": correctness, "chunks": chunks, "quantities": quantities, "optimizers": optimizers}


# ------------------------------------------------------------------------------------------------------------ tables


def text_of(result: Result, key: str, form: str = ".2f") -> str:
    """A number of a cell, or why there is none."""
    if key in result and result[key] is not None:
        return format(result[key], form)
    if result.get("absent"):
        return "–"
    return str(result["fails"]).replace("|", "/")[:60] if "fails" in result else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(results: Result) -> str:
    """All tables."""
    shown = [f"# {results['machine']['device']}, torch {results['machine']['versions'].get('torch')}"]
    for problem, rows in results.get("correctness", {}).items():
        if problem == "waits":
            head = ("waits by layer", *next(iter(rows.values())))
            waits = [(layer, *(text_of(cell, "waits", "d") for cell in row.values())) for layer, row in rows.items()]
            shown.append(table(head, waits))
            continue
        wrong = [name for name, cell in rows.items() if not cell.get("right")]
        worst = max((cell["error"] for cell in rows.values() if "error" in cell), default=float("nan"))
        shown.append(f"{problem}: {len(rows) - len(wrong)} of {len(rows)} right, largest relative error {worst:.1e}")
        shown += [f"- {name}: {rows[name].get('fails') or rows[name]['error']}" for name in wrong]
    for problem, rows in results.get("quantities", {}).items():
        lines = []
        for quantity, row in rows.items():
            for package, cell in row.items():
                if not cell.get("absent"):
                    texts = [text_of(cell, "ratio"), text_of(cell, "ms") if "ms" in cell else ""]
                    texts += [text_of(cell, "peak_mib", ".0f") if "peak_mib" in cell else ""]
                    texts += [str(cell.get(key, "")) for key in ("launches", "waits", "host_waits")]
                    lines.append((quantity, package, *texts))
        head = (problem, "package", "gradients", "ms", "peak MiB", "launches", "waits", "waits, profiler")
        shown.append(table(head, lines))
    columns = ("refresh_ms", "first_ms", "peak_mib")
    for problem, rows in results.get("optimizers", {}).items():
        lines = [
            (
                name,
                text_of(c, "ms"),
                *(text_of(c, k, ".1f") if k in c else "" for k in columns),
                str(c.get("waits", "")),
            )
            for name, c in rows.items()
        ]
        shown.append(table((f"steps, {problem}", "ms", "refresh ms", "first ms", "peak MiB", "waits"), lines))
    for problem, rows in results.get("chunks", {}).items():
        lines = []
        for quantity, cell in rows.items():
            sizes = [f"{size}: {text_of(each, 'ms')}" for size, each in cell.get("sizes", {}).items()]
            result = ", ".join(sizes) or text_of(cell, "sizes")
            lines.append((quantity, result, str(cell.get("default")), str(cell.get("best"))))
        shown.append(table((f"columns, {problem}", "ms by size", "default", "best"), lines))
    if results["skipped"]:
        shown.append("not measured, for lack of time: " + "; ".join(results["skipped"]))
    return "\n\n".join(shown)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="where to compute: cuda, cuda:1, cpu")
    parser.add_argument("--minutes", type=float, default=6.0, help="no cell is begun afterwards")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and gpu.md")
    parser.add_argument("--quick", action="store_true", help="tiny networks and batches, two turns")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure")
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"no CUDA device for --device {given.device}; use --device cpu")
    effort = Effort(given.device, 1, 0.05, 10) if given.quick else Effort(given.device)
    run = Run(given.out / "gpu.json", given.minutes, effort, given.quick)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in given.parts:
            PARTS[part](run)
    save(run.path, run.results)
    text = markdown(run.results)
    run.path.with_suffix(".md").write_text(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
