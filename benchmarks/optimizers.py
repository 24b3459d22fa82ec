"""How low optimizers get the training loss, at equal steps and at equal cost, tuned alike and with their defaults.

Every optimizer is tried with three learning rates and one seed; the rate that ends lowest is reported, with other
seeds, and so are its defaults. HessianFree has no rate, and needs minutes for a step. The cost of a run is its CPU time
in units of the plain gradient, in one thread, which is timed again and again in between: so it is corrected for what
else the machine was doing. Finished runs are kept by their settings, so a call goes on where another one has ended.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from benchmarks.optimizer_methods import METHODS, Method
from benchmarks.optimizer_reports import FIGURE, costs, end, load, report
from benchmarks.optimizer_tasks import SHORT, TASKS, Task
from benchmarks.timing import RESULTS, kept, machine, save
from curvopt import extend
from curvopt.optim import HessianFree
from experiments.data import DEFAULT_ROOT, Data, Split
from experiments.training import evaluate

Settings_ = Mapping[str, float]
Result = dict[str, Any]

# -------------------------------------------------------------------------------------------------------------- one run


class Run:
    """A training that can be measured."""

    def __init__(self, task: Task, method: Method, options: Settings_, seed: int, data: Any) -> None:
        torch.manual_seed(seed)
        self.task, self.seed, self.data = task, seed, data
        self.batch, self.steps, self.every = task.batch * method.large, task.steps, task.every
        if method.large > 1:
            self.batch = min(self.batch, len(data.train.x))
            self.steps, self.every = -(-task.steps // method.large), -(-task.every // method.large)
        self.model = task.problem.model(tuple(data.train.x.shape[1:]), data.classes)
        self.lossfunc = task.problem.loss()
        self.plain = copy.deepcopy((self.model, self.lossfunc))
        self.optimizers = method.make(extend(self.model), **options)
        extend(self.lossfunc)
        scheduled = [o for o in self.optimizers if task.cosine and method.scheduled and "lr" in o.param_groups[0]]
        self.schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, self.steps) for o in scheduled]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches without end; the same for all optimizers."""
        generator, train = torch.Generator().manual_seed(self.seed), self.data.train
        while True:
            order = torch.randperm(len(train.x), generator=generator)
            for chosen in order.split(self.batch)[: len(order) // self.batch]:
                yield train.x[chosen], train.y[chosen]

    def step(self, x: Tensor, y: Tensor) -> None:
        """As a user would write it."""

        def closure() -> Tensor:
            first.zero_grad()
            loss = self.lossfunc(self.model(x), y)
            loss.backward()
            return loss

        first: Any = self.optimizers[0]
        if isinstance(first, HessianFree):
            first.step(closure)
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.lossfunc(self.model(x), y)
        with ExitStack() as stack:
            if hasattr(first, "curvature"):
                stack.enter_context(first.curvature())
            loss.backward()
        for each in (*self.optimizers, *self.schedules):
            each.step()

    def evaluate(self, split: Split) -> tuple[float, float]:
        """Loss and accuracy, where optimizers that average weights have put the averages."""
        averaging: list[Any] = [o for o in self.optimizers if hasattr(o, "eval")]
        for optimizer in averaging:
            optimizer.eval()
        found = evaluate(self.model, self.lossfunc, split)
        for optimizer in averaging:
            optimizer.train()
        return found

    def gradient_seconds(self, x: Tensor, y: Tensor) -> float:
        """CPU time of one plain gradient of a batch of the task, with a model that is not trained."""
        model, lossfunc = self.plain
        x, y = x[: self.task.batch], y[: self.task.batch]
        times = []
        for _ in range(3):
            start = time.process_time()
            model.zero_grad()
            lossfunc(model(x), y).backward()
            times.append(time.process_time() - start)
        return statistics.median(times)

    def measure(self) -> list[Result]:
        """Trains; losses over the training set, held-out accuracy and CPU time every few steps, until it diverges."""
        batches, rows = self.batches(), []
        train = Split(self.data.train.x[: self.task.evaluated], self.data.train.y[: self.task.evaluated])
        spent, first = 0.0, self.evaluate(train)[0]
        unit = self.gradient_seconds(*next(self.batches()))
        for step in range(1, self.steps + 1):
            x, y = next(batches)
            start = time.process_time()
            try:
                self.step(x, y)
            except RuntimeError as error:  # a gradient that is not finite
                tqdm.write(f"stopped at step {step}: {error}")
                break
            spent += time.process_time() - start
            if step % self.every and step < self.steps:
                continue
            before, unit = unit, self.gradient_seconds(x, y)
            loss, _ = self.evaluate(train)
            rows.append({"step": step, "loss": loss, "seconds": spent, "unit": (before + unit) / 2})
            spent = 0.0
            if not loss < 3 * first:
                break
        else:
            rows[-1]["test_loss"], accuracy = self.evaluate(self.data.test)
            rows[-1]["accuracy"] = None if math.isnan(accuracy) else accuracy
            rows[-1]["state"] = sum(entries(o.state) for o in self.optimizers) / entries(list(self.model.parameters()))
        return rows


def entries(value: Any) -> int:
    """Number of entries of all tensors in nested lists, dictionaries and objects."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(entries, value))
    return entries(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else 0


# ------------------------------------------------------------------------------------------------------------- all runs

if TYPE_CHECKING:
    TaskName = MethodName = str
else:
    TaskName = Literal[tuple(TASKS)]
    MethodName = Literal[tuple(METHODS)]


@dataclass(frozen=True)
class Settings:
    """What is compared, and how."""

    task: tuple[TaskName, ...] = tuple(TASKS)
    """autoencoder (MNIST, 784-1000-500-250-30-..., batch 256), 3c3d (CIFAR-10, batch 128), transformer (characters, two
    layers, batch 16), mlp (MNIST, 784-128-64-10), batchnorm-cnn (MNIST, three convolutions), vit (CIFAR-10, three
    layers), lstm (characters), pinn (Poisson's equation), regression (ten inputs), finetuning (a head on a frozen
    trunk); each with -long for five times the steps and a cosine. 3c3d and vit need --npz."""
    method: tuple[MethodName, ...] = tuple(METHODS)
    """Optimizers; AdamW is always among them."""
    seeds: int = 3
    """Runs that are reported, at most: of the optimizers that matter most three, of the others one."""
    npz: Path | None = field(default_factory=lambda: Path(p) if (p := os.environ.get("CURVOPT_CIFAR_NPZ")) else None)
    """Arrays x_train, y_train, x_test, y_test of CIFAR-10; without it the variable CURVOPT_CIFAR_NPZ says where, and
    tasks that need them are left out if it does not."""
    data_root: Path = DEFAULT_ROOT
    """Where data sets are looked for and cached."""
    cache: Path = Path("runs/benchmark-optimizers")
    """Finished runs; remove it to measure again."""
    out: Path = RESULTS
    """Folder for the results."""
    figure: Path = FIGURE
    """Where to draw a dot for each task and optimizer."""
    defaults: bool = False
    """Run defaults alone; what the results of the tasks have of tuned runs and of other methods stays."""
    quick: bool = False
    """Three steps of short tasks with small batches of little data, untuned, to see whether everything works: ten
    minutes. Results go to the cache."""


class Bench:
    """The runs of one task."""

    def __init__(self, settings: Settings, name: str, bar: Any) -> None:
        self.settings, self.name, self.bar = settings, name, bar
        self.task = TASKS[name]
        if settings.quick:
            self.task = replace(self.task, steps=3, every=2, batch=16)

    @cached_property
    def data(self) -> Any:
        data = self.task.data(self.settings.npz, self.settings.data_root)
        if self.settings.quick:
            sets = (Split(split.x[:256], split.y[:256]) for split in (data.train, data.test))
            data = Data(*sets, data.classes)
        return data

    def run(self, method: str, options: Settings_, seed: int) -> list[Result]:
        """Rows of a run, which is made unless there is one."""
        key = {
            "task": self.name,
            "method": method,
            "options": dict(options),
            "seed": seed,
            "steps": self.task.steps,
            "every": self.task.every,
            "defaults": METHODS[method].signature,
        }

        def measure() -> list[Result]:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in options.items())
            self.bar.set_postfix_str(f"{self.name}: {method} {shown}, seed {seed}")
            return Run(self.task, METHODS[method], options, seed, self.data).measure()

        rows = kept(self.settings.cache, f"{self.name}-{method.replace(' ', '')}", key, measure)
        self.bar.update()
        return rows

    def results(self) -> Result:
        """Everything of one task."""
        names = ["AdamW", *(name for name in self.settings.method if name != "AdamW")]
        best: dict[str, dict[str, float]] = {}
        for name in names:
            tried = [{"lr": rate} for rate in METHODS[name].rates] or [{}]
            scores = {} if self.settings.quick else {i: end(self.run(name, tried[i], 0)) for i in range(len(tried))}
            best[name] = tried[min(scores, key=scores.__getitem__, default=len(tried) // 2)]
        reported, untuned = self.reported(best), self.reported(dict.fromkeys(names, {}))
        return {
            "task": self.name,
            "target": statistics.fmean(map(end, reported["AdamW"])),
            "budget": statistics.fmean(costs(rows)[-1] for rows in reported["AdamW"]),
            "methods": {
                name: {"options": best[name], "runs": reported[name], "defaults": untuned[name]} for name in names
            },
        }

    def reported(self, options: Mapping[str, Settings_]) -> dict[str, list[list[Result]]]:
        """Runs with seeds that no rate was chosen with; optimizers in turns, under the same conditions."""
        runs: dict[str, list[list[Result]]] = {name: [] for name in options}
        for seed in range(1, self.settings.seeds + 1):
            for name in options:
                if seed <= METHODS[name].seeds:
                    runs[name].append(self.run(name, options[name], seed))
        return runs

    def with_defaults(self, result: Result) -> Result:
        """Results whose defaults are measured again, and when."""
        stamp = {key: machine()[key] for key in ("date", "commit")}
        for name, runs in self.reported(dict.fromkeys(self.settings.method, {})).items():
            result["methods"][name] |= {"defaults": runs, "defaults_measured": stamp}
        return result


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.optimizers", description=__doc__, args=arguments)
    if settings.quick:
        short = tuple(name for name in settings.task if name in SHORT or settings.task != tuple(TASKS))
        settings = replace(settings, task=short, seeds=1, out=settings.cache)
    torch.set_num_threads(1)
    chosen = [name for name in settings.task if not TASKS[name].npz or settings.npz is not None]
    for name in set(settings.task) - set(chosen):
        print(f"{name} is left out: it needs --npz")
    with tqdm(unit=" runs") as bar:
        for name in chosen:
            bench, path = Bench(settings, name, bar), settings.out / f"optimizers-{name}.json"
            save(path, bench.with_defaults(json.loads(path.read_text())) if settings.defaults else bench.results())
    figure = settings.out / "optimizers.png" if settings.quick else settings.figure
    print(f"\n{report(load(settings.out, list(TASKS)), settings.out / 'optimizers.md', figure)}")
    print(f"\nresults: {settings.out}/optimizers-*.json, {settings.out / 'optimizers.md'}, {figure}")


if __name__ == "__main__":
    main()
