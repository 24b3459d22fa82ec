"""How low optimizers get the loss, in training and held out, at AdamW's cost and at the end: ten tasks, one commit.

Each optimizer is tried with four learning rates and one seed; tables show the rate that ends lowest and the default, of
three other seeds. Rates fall as a cosine to zero at the last step (but for the schedule-free AdamW). A dearer optimizer
is trained twice: in as many steps as AdamW, and in as many as AdamW's cost allows, where its rate is the best of the
longer run. HessianFree has no rate; it takes an eighth of the steps, of batches eight times as large, on two tasks. The
cost of a run is its CPU time in units of the plain gradient, in one thread, which is timed again and again in between:
so it is corrected for what else the machine was doing. Finished runs are kept by commit and settings, so a call goes on
where another one has ended, and never mixes commits.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import multiprocessing
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.optimizer_reports import Row, end, load, summary, write
from benchmarks.optimizer_tasks import TASKS, Batch, Problem
from benchmarks.timing import RESULTS, kept, machine, save
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner
from curvopt.optim.step import CurvatureOptimizer

try:
    import pytorch_optimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("SOAP and Shampoo come with pytorch_optimizer: pip install '.[bench]'.") from error

#: The seed that rates are chosen with, and those that are reported; no default was chosen with any of them.
CHOOSING, REPORTED = 10, (11, 12, 13)
EVALUATIONS = 12
#: What results depend on; the last commit that changed any of it is theirs.
CODE = [f"benchmarks/{name}.py" for name in ("optimizers", "optimizer_tasks", "language_model")]
CODE += ["experiments/models.py", "experiments/data.py", "experiments/problems.py", "curvopt"]

# ------------------------------------------------------------------------------------------------------- the optimizers

Optimizers = list[torch.optim.Optimizer]
Options = Mapping[str, Any]


def one(
    kind: type[torch.optim.Optimizer], model: nn.Module, lr: float | None, attached: Options, **options: Any
) -> Optimizers:
    """One optimizer of all parameters; curvopt's are given the model."""
    if lr is not None:
        options["lr"] = lr
    if issubclass(kind, CurvatureOptimizer | HessianFree):
        return [kind(model, **attached, **options)]  # pyright: ignore[reportArgumentType]
    return [kind([p for p in model.parameters() if p.requires_grad], **options)]


def adamw(model: nn.Module, lr: float, attached: Options) -> Optimizers:
    """Without decay of weights, as all."""
    return one(torch.optim.AdamW, model, lr, attached, weight_decay=0.0)


def muon(model: nn.Module, lr: float, attached: Options) -> Optimizers:
    """For matrices but embeddings and (of several) the last; AdamW for all else, whose rates mean the same."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and p not in embeddings]
    matrices = matrices[:-1] or matrices
    rest = [p for p in trained if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr, weight_decay=0.0),
    ]


def preconditioned(model: nn.Module, lr: float, attached: Options) -> Optimizers:
    """KFAC in front of AdamW."""
    return [KFACPreconditioner(model, **attached), *adamw(model, lr, attached)]


@dataclass(frozen=True)
class Method:
    """An optimizer.

    Args:
        make: makes it (or those that step one after the other) for a model and a learning rate.
        rates: learning rates to choose from, with the default.
        default: the learning rate that a user has first.
        tasks: where it runs.
        large: how many times larger its batches are, and fewer its steps.
    """

    make: Callable[..., Optimizers]
    rates: tuple[float, ...] = ()
    default: float | None = None
    tasks: tuple[str, ...] = tuple(TASKS)
    large: int = 1


def _method(kind: Any, *rates: float, tasks: tuple[str, ...] = tuple(TASKS), **options: Any) -> Method:
    default = inspect.signature(kind.__init__).parameters["lr"].default
    return Method(functools.partial(one, kind, **options), rates, default, tasks)


_few = ("pinn", "lstm", "vit")
METHODS: dict[str, Method] = {
    "AdamW": Method(adamw, (0.001, 0.003, 0.01, 0.03), 0.001),
    "schedule-free AdamW": _method(pytorch_optimizer.ScheduleFreeAdamW, 0.0025, 0.008, 0.025, 0.08),
    "Muon": Method(muon, (0.001, 0.003, 0.01, 0.03), 0.001),
    "SOAP": _method(pytorch_optimizer.SOAP, 0.001, 0.003, 0.01, 0.03, weight_decay=0.0),
    "KFACSGD": _method(KFACSGD, 0.03, 0.1, 0.3, 1.0),
    "KFACAdamW": _method(KFACAdamW, 0.005, 0.015, 0.03, 0.06),
    "HessianFree": Method(functools.partial(one, HessianFree, cg_iterations=30), tasks=("pinn", "regression"), large=8),
    "EKFACSGD": _method(EKFACSGD, 0.03, 0.1, 0.3, 1.0, tasks=_few),
    "DiagonalNewton": _method(DiagonalNewton, 0.02, 0.04, 0.1, 0.3, tasks=_few),
    "KFAC + AdamW": Method(preconditioned, (0.001, 0.003, 0.01, 0.03), 0.001, _few),
    "SGD": _method(torch.optim.SGD, 0.001, 0.01, 0.1, 1.0, tasks=_few, momentum=0.9),
    # with the step lengths of RMSProp (grafting, Anil et al. 2020)
    "Shampoo": _method(
        pytorch_optimizer.ScalableShampoo,
        *(0.001, 0.003, 0.01, 0.03),
        tasks=_few,
        graft_type=pytorch_optimizer.optimizer.shampoo.LayerWiseGrafting.RMSPROP,
        betas=(0.9, 0.99),
        moving_average_for_momentum=True,
        start_preconditioning_step=10,
        preconditioning_compute_steps=10,
    ),
}

# -------------------------------------------------------------------------------------------------------------- one run


@functools.cache
def problem_of(task: str, images: Path | None) -> Problem:
    """The problem of a task, made once a process."""
    return TASKS[task].make(images)


class Run:
    """A training that can be measured."""

    def __init__(self, job: Job) -> None:
        task, method = TASKS[job.task], METHODS[job.method]
        self.problem, self.steps = problem_of(job.task, job.images), max(1, job.steps // method.large)
        torch.manual_seed(job.seed)
        self.model = self.problem.model()
        self.plain = copy.deepcopy(self.model)
        self.batches = self.problem.batches(job.seed, task.batch * method.large)
        self.small = next(self.problem.batches(job.seed, task.batch))
        self.optimizers = method.make(self.model, job.lr, task.attached)
        fixed = (KFACPreconditioner, HessianFree)
        self.schedules = [
            torch.optim.lr_scheduler.CosineAnnealingLR(o, self.steps)
            for o in self.optimizers
            if not (isinstance(o, fixed) or hasattr(o, "eval"))
        ]

    def step(self, batch: Batch) -> None:
        """As a user would write it."""

        def closure() -> Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.problem.loss(self.model, batch)
            loss.backward()
            return loss

        first: Any = self.optimizers[0]
        if isinstance(first, HessianFree):
            first.step(closure)
            return
        closure()
        for each in (*self.optimizers, *self.schedules):
            each.step()

    def losses(self) -> tuple[float, float]:
        """In training and held out, where optimizers that average weights have put the averages."""
        averaging: list[Any] = [o for o in self.optimizers if hasattr(o, "eval")]
        for each in (self.model, *averaging):
            each.eval()
        with torch.no_grad():
            found = [
                [self.problem.loss(self.model, batch).item() for batch in batches]
                for batches in (self.problem.train, self.problem.held_out)
            ]
        for each in (self.model, *averaging):
            each.train()
        train, held_out = map(statistics.fmean, found)
        return train, held_out

    def gradient_seconds(self) -> float:
        """CPU time of one plain gradient of a batch of the task, with a model that is not trained."""
        times = []
        for _ in range(3):
            start = time.process_time()
            self.plain.zero_grad()
            self.problem.loss(self.plain, self.small).backward()
            times.append(time.process_time() - start)
        return statistics.median(times)

    def measure(self) -> list[Row]:
        """Trains; losses and CPU time every few steps, until it diverges."""
        rows: list[Row] = []
        spent, first, unit = 0.0, self.losses()[0], self.gradient_seconds()
        for step in range(1, self.steps + 1):
            batch, start = next(self.batches), time.process_time()
            try:
                self.step(batch)
            except RuntimeError as error:  # a gradient that is not finite
                tqdm.write(f"stopped at step {step}: {error}")
                break
            spent += time.process_time() - start
            if step % max(1, self.steps // EVALUATIONS) and step < self.steps:
                continue
            before, unit = unit, self.gradient_seconds()
            train, held_out = self.losses()
            cost = (rows[-1]["cost"] if rows else 0.0) + 2 * spent / (before + unit)
            rows.append({"step": step, "cost": cost, "train": train, "held_out": held_out})
            spent = 0.0
            if not train < 3 * first:
                break
        else:
            state = sum(entries(o.state) for o in self.optimizers) / entries(list(self.model.parameters()))
            rows[-1] |= {"state": state, "unit": unit}
        return rows

    def seconds(self) -> float:
        """CPU time that `measure` takes, by its first steps, which are dearer than later ones."""
        start, few = time.process_time(), min(20, self.steps)
        for _ in range(few):
            self.step(next(self.batches))
        middle = time.process_time()
        self.losses()
        self.gradient_seconds()
        return (middle - start) * self.steps / few + (time.process_time() - middle) * EVALUATIONS


def entries(value: Any) -> int:
    """Number of entries of all tensors in nested lists, dictionaries and objects."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(entries, value))
    return entries(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else 0


#: Of an optimizer with a rate, one for each seed.
Runs = dict[tuple[str, float | None], list[list[Row]]]


@dataclass(frozen=True)
class Job:
    """A run, and the folder of runs of its commit."""

    task: str
    method: str
    lr: float | None
    seed: int
    steps: int
    folder: Path
    images: Path | None

    def rows(self) -> list[Row]:
        """The rows of the run, which is made unless the folder has it."""
        key = {name: getattr(self, name) for name in ("task", "method", "lr", "seed", "steps")}
        return kept(self.folder, f"{self.task}-{self.method.replace(' ', '')}", key, lambda: Run(self).measure())


def affordable(job: Job, runs: Runs, budget: float) -> int:
    """How many steps a budget allows to an optimizer, at most those of a job, by the cost of its runs."""
    cost = statistics.fmean(rows[-1]["cost"] / rows[-1]["step"] for rows in runs[job.method, job.lr] if rows)
    return min(job.steps, round(budget / cost) * METHODS[job.method].large)


# ------------------------------------------------------------------------------------------------------------- all runs

TaskName = str if TYPE_CHECKING else Literal[tuple(TASKS)]


@dataclass(frozen=True)
class Settings:
    """What is compared, and how."""

    task: tuple[TaskName, ...] = tuple(TASKS)
    """Tasks, from cheap to dear; vit needs --images."""
    plan: bool = False
    """Say how long the runs take that are missing, by 20 steps of each optimizer on each task, and end."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Processes, of one thread each."""
    images: Path | None = field(default_factory=lambda: Path(p) if (p := os.environ.get("CURVOPT_CIFAR_NPZ")) else None)
    """File with arrays x_train, y_train, x_test, y_test of CIFAR-10; by default the variable CURVOPT_CIFAR_NPZ."""
    cache: Path = Path("runs/benchmark-optimizers")
    """Finished runs, in a folder for each commit."""
    out: Path = RESULTS
    """Folder for optimizers.json and optimizers.md."""
    page: Path = Path("docs") / "choosing_an_optimizer.md"
    """Page whose table and figure are replaced once all tasks are there."""
    steps: int | None = None
    """Steps of each run, to see whether everything works: results go to the cache."""


def commit_of_code() -> str:
    """The last commit that changed what results depend on.

    Raises:
        SystemExit: files differ from it.
    """

    def git(*command: str) -> str:
        root = Path(__file__).parents[1]
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    if changed := git("status", "--porcelain", "--", *CODE):
        raise SystemExit(f"Results are of one commit, but these files are of none:\n{changed}\nCommit them first.")
    return git("log", "-1", "--format=%h", "--", *CODE)


class Bench:
    """The runs of a commit."""

    def __init__(self, settings: Settings, commit: str, run_all: Callable[..., Iterable[Any]] = map) -> None:
        self.settings, self.commit, self.run_all = settings, commit, run_all
        self.bar: Any = tqdm(total=sum(map(self.number, settings.task)), unit=" runs", disable=settings.plan)

    def methods(self, task: str) -> dict[str, Method]:
        """The optimizers that run on a task."""
        return {name: method for name, method in METHODS.items() if task in method.tasks}

    def number(self, task: str) -> int:
        """How many runs a task has, at most."""
        return sum(len(m.rates) + (4 if m.rates else 2) * len(REPORTED) for m in self.methods(task).values())

    def job(self, task: str, method: str, lr: float | None, seed: int) -> Job:
        """A run of the task with its usual steps, or those that are asked for."""
        steps = self.settings.steps or TASKS[task].steps
        folder = self.settings.cache / self.commit
        return Job(task, method, lr, seed, steps, folder, self.settings.images)

    def rows(self, jobs: list[Job]) -> Iterator[list[Row]]:
        """Of runs, in their order."""
        for job, rows in zip(jobs, self.run_all(Job.rows, jobs), strict=True):
            self.bar.set_postfix_str(f"{job.task}: {job.method}, seed {job.seed}")
            self.bar.update()
            yield rows

    def runs(self, jobs: list[Job]) -> Runs:
        """Of each optimizer with each rate, one for each seed."""
        found: Runs = {}
        for job, rows in zip(jobs, self.rows(jobs), strict=True):
            found.setdefault((job.method, job.lr), []).append(rows)
        return found

    def results(self, task: str) -> dict[str, Any]:
        """Everything of one task."""
        methods = self.methods(task)
        tried = [
            self.job(task, name, round(TASKS[task].faster * lr, 6), CHOOSING)
            for name, m in methods.items()
            for lr in m.rates
        ]
        scores: dict[str, dict[float | None, float]] = {name: {} for name in methods}
        for job, rows in zip(tried, self.rows(tried), strict=True):
            scores[job.method][job.lr] = end(rows)
        best = {name: min(found, key=found.__getitem__, default=None) for name, found in scores.items()}
        # in turns, under the same conditions; the best rate may be the default
        chosen = [
            self.job(task, name, lr, seed)
            for seed in REPORTED
            for name, m in methods.items()
            for lr in dict.fromkeys([best[name], m.default])
        ]
        runs = self.runs(chosen)
        budget = statistics.fmean(rows[-1]["cost"] for rows in runs["AdamW", best["AdamW"]])
        dearer = [
            replace(job, steps=steps)
            for job in chosen
            if job.method != "AdamW" and (steps := affordable(job, runs, budget)) < 0.98 * job.steps
        ]
        within = runs | self.runs(dearer)
        self.bar.total -= self.number(task) - len(tried) - len(chosen) - len(dearer)
        return {
            "title": TASKS[task].title,
            "cost": budget,
            "steps": tried[0].steps,
            "methods": {
                name: {
                    "lr": best[name],
                    "default": m.default,
                    "tried": [[lr, score if math.isfinite(score) else None] for lr, score in scores[name].items()],
                    "tuned": summary(runs[name, best[name]], within[name, best[name]], budget),
                    "defaults": summary(runs[name, m.default], within[name, m.default], budget),
                }
                for name, m in methods.items()
            },
        }

    def plan(self) -> str:
        """A table of seconds of CPU time."""
        lines, total = ["| task | runs | there | seconds to go |", "|---|---|---|---|"], 0.0
        for task in tqdm(self.settings.task, unit=" tasks"):
            seconds = 0.0
            there = len(list((self.settings.cache / self.commit).glob(f"{task}-*.json")))
            for name, m in self.methods(task).items():
                runs = len(m.rates) + (4 if m.rates else 2) * len(REPORTED)
                seconds += runs * Run(self.job(task, name, m.default, CHOOSING)).seconds()
            left = seconds * max(0, 1 - there / self.number(task))
            total += left
            lines.append(f"| {task} | {self.number(task)} | {there} | {left:.0f} |")
        hours = total / 3600
        return "\n".join(
            [*lines, f"\n{hours:.1f} hours of one core, {hours / self.settings.workers:.1f} of all workers."]
        )


def _alone() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.optimizers", description=__doc__, args=arguments)
    commit = commit_of_code() if settings.steps is None else f"{settings.steps} steps"
    if settings.steps is not None:
        settings = replace(settings, out=settings.cache / commit, page=settings.cache / commit / "page.md")
    chosen = tuple(name for name in settings.task if not TASKS[name].images or settings.images is not None)
    for name in set(settings.task) - set(chosen):
        print(f"{name} is left out: it needs --images")
    settings = replace(settings, task=chosen)
    _alone()
    if settings.plan:
        print(Bench(settings, commit).plan())
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.workers, context, _alone) as pool:
        bench = Bench(settings, commit, map if settings.workers == 1 else pool.map)
        for name in chosen:
            path, found = settings.out / "optimizers.json", bench.results(name)
            before = load(path)
            tasks = before["tasks"] if before.get("commit") == commit else {}
            together = tasks | {name: found}
            ordered = {task: together[task] for task in TASKS if task in together}
            save(path, {"commit": commit, "machine": machine(), "tasks": ordered})
    print(f"\n{write(path, settings.page, len(TASKS))}")


if __name__ == "__main__":
    main()
