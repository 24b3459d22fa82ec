"""How many steps and seconds optimizers need to the loss that tuned AdamW ends at.

Every optimizer is tuned by the same number of runs with one seed, and reported with others. The search begins at its
defaults, and goes on next to the best settings so far: a factor of ten first, then half of that. HessianFree, which
adapts its damping and needs minutes for a step, is not tuned. Seconds are CPU time of training alone, in one
thread, corrected for what else the machine was doing: the plain gradient is timed again and again in between, and all
are scaled to its median. Finished runs are kept by their settings and not repeated.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.timing import RESULTS, save
from curvopt import extend
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner
from experiments import models, problems
from experiments.data import DEFAULT_ROOT, Data, Split, load, load_npz
from experiments.problems import PROBLEMS
from experiments.training import evaluate

Settings_ = Mapping[str, float]
Result = dict[str, Any]

# ------------------------------------------------------------------------------------------------------ what is trained


def batchnorm_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three convolutions with batch norm, and a linear layer."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in [(shape[0], 8), (8, 16), (16, 32)]:
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (shape[1] // 8) * (shape[2] // 8), classes))


@dataclass(frozen=True)
class Task:
    """A problem of ``experiments``, at the size of this benchmark."""

    problem: problems.Problem
    steps: int
    every: int  # steps between evaluations
    batch: int
    evaluated: int | None = None  # samples of the training set, all by default
    npz: bool = False  # whether the data are the user's


_mlp, _gpt = PROBLEMS["mnist5k-mlp"], PROBLEMS["help-gpt"]
TASKS: dict[str, Task] = {
    "autoencoder": Task(PROBLEMS["mnist5k-autoencoder"], steps=300, every=20, batch=256),
    "3c3d": Task(replace(PROBLEMS["cifar10-3c3d"], augment=False), 80, every=10, batch=128, evaluated=1000, npz=True),
    "transformer": Task(
        replace(_gpt, model=lambda shape, classes: models.gpt(classes, *shape, dim=64, depth=2)),
        steps=240,
        every=20,
        batch=16,
        evaluated=400,
    ),
    "mlp": Task(_mlp, steps=160, every=10, batch=128),
    "batchnorm-cnn": Task(replace(_mlp, model=batchnorm_cnn), steps=60, every=6, batch=128, evaluated=1000),
}

# ------------------------------------------------------------------------------------------------ what it is trained by


def adamw_beside(model: nn.Module, **options: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices of weights, AdamW for all else, whose rates mean the same."""
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or p in embeddings]
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", **options)
    return [muon, torch.optim.AdamW(others, weight_decay=0.0, **options)]


def preconditioned(
    other: Callable[..., list[torch.optim.Optimizer]], model: nn.Module, damping: float, **options: float
) -> list[torch.optim.Optimizer]:
    """KFAC in front of another optimizer."""
    return [KFACPreconditioner(model, damping=damping), *other(model, **options)]


def single(
    kind: type[torch.optim.Optimizer], model: nn.Module, fixed: Mapping[str, Any] = {}, **options: float
) -> list[torch.optim.Optimizer]:
    """One optimizer of all parameters."""
    return [kind(model.parameters(), **fixed, **options)]


@dataclass(frozen=True)
class Method:
    """An optimizer, and which options are tuned.

    Args:
        make: builds it (or those that step one after the other) for a model.
        tuned: options that are tuned in this order, with the values that the search begins at.
        large: how many times larger its batches are, and fewer its steps.
    """

    make: Callable[..., list[torch.optim.Optimizer]]
    tuned: Settings_
    large: int = 1

    @property
    def signature(self) -> str:
        """All that is not tuned, for the cache: an optimizer with other defaults is another one."""
        make, told = self.make, []
        while isinstance(make, functools.partial):
            told.append(make.keywords)
            told += [inspect.signature(kind) for kind in make.args if isinstance(kind, type)]
            make = make.args[0] if make.func is preconditioned else make.func
        kinds = (KFACPreconditioner,) if "damping" in self.tuned else ()
        return str([*told, *(inspect.signature(kind) for kind in kinds)])


def ours(kind: type[torch.optim.Optimizer], *tuned: str, large: int = 1, **fixed: Any) -> Method:
    """One of curvopt's, tuned from its defaults."""
    parameters = inspect.signature(kind).parameters
    return Method(
        functools.partial(single, kind, fixed=fixed), {name: parameters[name].default for name in tuned}, large
    )


_sgd = functools.partial(single, torch.optim.SGD, fixed={"momentum": 0.9})
_adamw = functools.partial(single, torch.optim.AdamW, fixed={"weight_decay": 0.0})
_damping = inspect.signature(KFACPreconditioner).parameters["damping"].default
METHODS: dict[str, Method] = {
    "SGD": Method(_sgd, {"lr": 0.01}),
    "AdamW": Method(_adamw, {"lr": 0.001}),
    "Muon": Method(adamw_beside, {"lr": 0.001}),
    "KFACSGD": ours(KFACSGD, "kl_clip", "damping"),
    "KFACSGD sampled": ours(KFACSGD, "kl_clip", "damping", fisher="mc"),
    "EKFACSGD": ours(EKFACSGD, "kl_clip", "damping"),
    "KFACAdamW": ours(KFACAdamW, "lr"),
    "KFAC + AdamW": Method(functools.partial(preconditioned, _adamw), {"lr": 0.001, "damping": _damping}),
    "KFAC + Muon": Method(functools.partial(preconditioned, adamw_beside), {"lr": 0.001, "damping": _damping}),
    "DiagonalNewton": ours(DiagonalNewton, "kl_clip", "damping"),
    "HessianFree": ours(HessianFree, large=8, cg_iterations=30),
}
BASELINES = ("SGD", "AdamW", "Muon")

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

        first = self.optimizers[0]
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
        for optimizer in self.optimizers:
            optimizer.step()

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
        spent, first = 0.0, evaluate(self.model, self.lossfunc, train)[0]
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
            loss, _ = evaluate(self.model, self.lossfunc, train)
            rows.append({"step": step, "loss": loss, "seconds": spent, "unit": (before + unit) / 2})
            spent = 0.0
            if not loss < 3 * first:
                break
        else:
            rows[-1]["test_loss"], accuracy = evaluate(self.model, self.lossfunc, self.data.test)
            rows[-1]["accuracy"] = None if math.isnan(accuracy) else accuracy
        return rows


# ------------------------------------------------------------------------------------------------------------- all runs


def end(rows: list[Result]) -> float:
    """Loss at the end; infinite if there is none."""
    return rows[-1]["loss"] if rows and "test_loss" in rows[-1] and math.isfinite(rows[-1]["loss"]) else math.inf


def neighbours(options: Settings_, defaults: Settings_) -> Iterator[dict[str, float]]:
    """Settings next to others, in the order in which they are tried."""
    for factor in (10.0, math.sqrt(10.0)):
        for name in defaults:
            for value in (options[name] * factor, options[name] / factor):
                yield {**options, name: float(f"{value:.3g}")}


def tune(score: Callable[[dict[str, float]], float], defaults: Settings_, runs: int) -> dict[str, float]:
    """The best settings after a number of runs, beginning with the defaults."""
    scores: dict[tuple, float] = {}
    options = dict(defaults)
    for _ in range(runs):
        scores[tuple(options.values())] = score(options)
        best = dict(zip(defaults, min(scores, key=lambda values: scores[values]), strict=True))
        untried = [near for near in neighbours(best, defaults) if tuple(near.values()) not in scores]
        if not untried:
            break
        options = untried[0]
    return best


def arrival(rows: list[Result], target: float, key: str) -> float | None:
    """Steps or seconds at which the loss comes to the target, interpolated between evaluations."""
    total, before = 0.0, None
    for row in rows:
        start, total = total, row["step"] if key == "step" else total + row[key]
        if row["loss"] <= target:
            part = 1.0 if before is None or before == row["loss"] else (before - target) / (before - row["loss"])
            return start + part * (total - start)
        before = row["loss"]
    return None


def averaged(runs: list[list[Result]]) -> list[Result]:
    """Mean losses and seconds over runs, up to the shortest."""
    columns = zip(*runs, strict=False)
    return [
        {"step": rows[0]["step"]} | {key: statistics.fmean(row[key] for row in rows) for key in ("loss", "seconds")}
        for rows in columns
    ]


def corrected(rows: list[Result], unit: float) -> list[Result]:
    """Seconds as on a machine on which the plain gradient takes ``unit``."""
    return [{**row, "seconds": row["seconds"] * unit / row["unit"]} for row in rows]


if TYPE_CHECKING:
    TaskName = MethodName = str
else:
    TaskName = Literal[tuple(TASKS)]
    MethodName = Literal[tuple(METHODS)]


@dataclass(frozen=True)
class Settings:
    """What is compared, and how."""

    task: tuple[TaskName, ...] = tuple(TASKS)
    """autoencoder (MNIST, 784-1000-500-250-30-..., batch 256), 3c3d (batch 128, needs --npz), transformer (characters,
    two layers, batch 16), mlp (MNIST, 784-128-64-10), batchnorm-cnn (MNIST, three convolutions)."""
    method: tuple[MethodName, ...] = tuple(METHODS)
    """Optimizers; AdamW is always among them."""
    runs: int = 6
    """Runs that each optimizer is tuned by."""
    seeds: tuple[int, ...] = (1, 2)
    """Seeds of the runs that are reported; tuning is done with seed 0."""
    npz: Path | None = field(default_factory=lambda: Path(p) if (p := os.environ.get("CURVOPT_CIFAR_NPZ")) else None)
    """Arrays x_train, y_train, x_test, y_test of CIFAR-10 for 3c3d; without it the variable CURVOPT_CIFAR_NPZ says
    where, and 3c3d is left out if it does not."""
    data_root: Path = DEFAULT_ROOT
    """Where data sets are looked for and cached."""
    cache: Path = Path("runs/benchmark-optimizers")
    """Finished runs; remove it to measure again."""
    out: Path = RESULTS
    """Folder for the results and the figure."""
    quick: bool = False
    """Three steps with small batches of little data, untuned, to see whether everything works: some minutes. Results
    go to the cache."""


class Bench:
    """The runs of one task."""

    def __init__(self, settings: Settings, name: str, bar: Any) -> None:
        self.settings, self.name, self.bar = settings, name, bar
        self.task = TASKS[name]
        if settings.quick:
            self.task = replace(self.task, steps=3, every=2, batch=16)

    @functools.cached_property
    def data(self) -> Any:
        problem = self.task.problem
        given = load_npz(self.settings.npz) if self.task.npz else load(problem.data, self.settings.data_root)  # type: ignore[arg-type]
        data = problem.prepare(given)
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
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        path = self.settings.cache / f"{self.name}-{method.replace(' ', '')}-{digest}.json"
        if path.exists():
            rows = json.loads(path.read_text())["rows"]
        else:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in options.items())
            self.bar.set_postfix_str(f"{self.name}: {method} {shown}, seed {seed}")
            run = Run(self.task, METHODS[method], options, seed, self.data)
            rows = run.measure()
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps({**key, "rows": rows}))
            part.replace(path)  # never half a file
        self.bar.update()
        return rows

    def results(self) -> Result:
        """Everything of one task."""
        names = ["AdamW", *(name for name in self.settings.method if name != "AdamW")]
        best = {
            name: tune(
                lambda options, name=name: end(self.run(name, options, 0)), METHODS[name].tuned, self.settings.runs
            )
            for name in names
        }
        reported: dict[str, list[list[Result]]] = {name: [] for name in names}
        untuned: dict[str, list[list[Result]]] = {name: [] for name in names}
        for seed in self.settings.seeds:  # optimizers in turns, under the same conditions
            for name in names:
                reported[name].append(self.run(name, best[name], seed))
        for name in names:
            untuned[name].append(self.run(name, METHODS[name].tuned, 0))
        unit = statistics.median(row["unit"] for runs in reported.values() for rows in runs for row in rows)
        target = statistics.fmean(map(end, reported["AdamW"]))
        return {
            "task": self.name,
            "target": target,
            "gradient_seconds": unit,
            "methods": {
                name: {
                    "options": best[name],
                    "runs": [corrected(rows, unit) for rows in reported[name]],
                    "defaults": [corrected(rows, unit) for rows in untuned[name]],
                    "large": METHODS[name].large,
                }
                for name in names
            },
        }


# -------------------------------------------------------------------------------------------------------- what is shown


def mean(values: list[float | None]) -> float | None:
    """Mean; ``None`` if one is missing."""
    return None if not values or None in values else statistics.fmean(v for v in values if v is not None)


def summary(result: Result) -> dict[str, Result]:
    """A row for each method."""
    unit, rows = result["gradient_seconds"], {}
    for name, found in result["methods"].items():
        runs = found["runs"]
        steps, seconds = (arrival(averaged(runs), result["target"], key) for key in ("step", "seconds"))
        last = [run[-1] for run in runs if math.isfinite(end(run))]
        whole = len(last) == len(runs)
        per_step = [sum(row["seconds"] for row in run) / run[-1]["step"] / unit for run in runs if run]
        rows[name] = {
            "steps": steps,
            "seconds": seconds,
            "loss": mean([row["loss"] for row in last]) if whole else None,
            "accuracy": mean([row.get("accuracy") for row in last]) if whole else None,
            "untuned": mean([end(run) for run in found["defaults"]]),
            "cost": mean(per_step),
            "options": found["options"],
        }
    return rows


def markdown(result: Result) -> str:
    """The table of a task."""

    def show(value: float | None, form: str) -> str:
        return "–" if value is None or not math.isfinite(value) else format(value, form)

    lines = [
        f"| {result['task']}, to training loss {result['target']:.4g} | steps | seconds | loss at the end | "
        "held-out accuracy | untuned loss | step, in gradients | tuned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summary(result).items():
        options = ", ".join(f"{key} {value:.3g}" for key, value in row["options"].items()) or "–"
        accuracy = None if row["accuracy"] is None else 100 * row["accuracy"]
        cells = [
            show(row["steps"], ".0f"),
            show(row["seconds"], ".2f"),
            show(row["loss"], ".4g"),
            show(accuracy, ".1f"),
            show(row["untuned"], ".4g"),
            show(row["cost"], ".2f"),
        ]
        lines.append(" | ".join([f"| {name}", *cells, options]) + " |")
    return "\n".join(lines)


def saved(folder: Path) -> list[Result]:
    """Results of this and former calls."""
    paths = [folder / f"optimizers-{name}.json" for name in TASKS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def draw(results: list[Result], path: Path) -> None:
    """Training loss over seconds, a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(len(results), 3)
    lines = -(-len(results) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 3.2 * lines + 0.9), squeeze=False)
    colours = dict(zip(METHODS, plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2], strict=False))  # type: ignore[attr-defined]
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        for name, found in result["methods"].items():
            if not all(math.isfinite(end(run)) for run in found["runs"]):
                continue
            run = averaged(found["runs"])
            seconds = torch.tensor([row["seconds"] for row in run]).cumsum(0).tolist()
            style = "--" if name in BASELINES else "-"
            axis.plot(seconds, [row["loss"] for row in run], style, color=colours[name], label=name, linewidth=1.4)
        axis.axhline(result["target"], color="0.8", zorder=0)
        ends = [end(run) for found in result["methods"].values() for run in found["runs"]]
        starts = [row["loss"] for found in result["methods"].values() for run in found["runs"] for row in run[:2]]
        lowest, highest = min(ends), statistics.median(starts)
        axis.set_yscale("log")
        axis.set_ylim(lowest * 0.9, max(highest, lowest * 1.5))
        slowest = [sum(row["seconds"] for row in run) for name in ("AdamW",) for run in result["methods"][name]["runs"]]
        axis.set_xlim(0, 2.5 * max(slowest))
        axis.set_title(result["task"], fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds of training, CPU time", fontsize=10)
    figure.supylabel("training loss", fontsize=10)
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines() if not h.get_label().startswith("_")}
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=2 * columns, frameon=False, fontsize=9)
    height = 0.2 * -(-len(handles) // (2 * columns)) + 0.1
    figure.tight_layout(rect=(0, 0, 1, 1 - height / figure.get_figheight()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.optimizers", description=__doc__, args=arguments)
    settings = replace(settings, runs=1, out=settings.cache) if settings.quick else settings
    torch.set_num_threads(1)
    chosen = [name for name in settings.task if not TASKS[name].npz or settings.npz is not None]
    for name in set(settings.task) - set(chosen):
        print(f"{name} is left out: it needs --npz")
    results = []
    per_method = settings.runs + len(settings.seeds) + 1
    with tqdm(total=len(chosen) * len({"AdamW", *settings.method}) * per_method) as bar:
        for name in chosen:
            results.append(Bench(settings, name, bar).results())
            save(settings.out / f"optimizers-{name}.json", results[-1])
    for result in results:
        print(f"\n{markdown(result)}")
    draw(saved(settings.out), settings.out / "optimizers.png")
    print(f"\nresults: {settings.out}/optimizers-*.json, {settings.out / 'optimizers.png'}")


if __name__ == "__main__":
    main()
