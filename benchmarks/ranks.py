"""Bytes that a rank sends in a step: measured with gloo for 1 to 4 ranks, and by formula for up to 512.

Linear layers are trained under ``DistributedDataParallel`` and ``fully_shard``, by SGD and by optimizers of curvature.
Every byte that passes the loopback device in a step is counted, so nothing else may use it: run it in a container, or
by ``unshare -n sh -c 'ip link set lo up && python -m benchmarks.ranks'``. Formulas: docs/distributed.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import RESULTS, machine, save
from curvopt.optim import EKFACSGD, KFACSGD

MODELS = ("DistributedDataParallel", "fully_shard")
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "KFACSGD": lambda p: KFACSGD(p, lr=0.01, max_factor_size=None),
    "EKFACSGD": lambda p: EKFACSGD(p, lr=0.01, max_factor_size=None, curvature_every=20, inverse_every=20),
}
#: Bytes a second that a rank sends, and what does that.
LINKS = {"25 Gbit/s Ethernet": 3e9, "400 Gbit/s InfiniBand": 50e9, "NVLink of an H100": 450e9}
COUNTS = (1, 2, 3, 4, 8, 64, 512)
COLOURS = {"SGD": "#000000", "KFACSGD": "#0072B2", "EKFACSGD": "#D55E00"}


@dataclass(frozen=True)
class Settings:
    """What is measured, and where the results go."""

    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of processes."""
    width: int = 256
    """Of the layers."""
    depth: int = 6
    """Number of layers."""
    steps: int = 12
    """Steps; those with and without a refresh of the curvature send the most and the least."""
    interval: int = 20
    """Steps between refreshes, for the means."""
    out: Path = RESULTS
    """Folder for the results and the figure."""
    worker: Path | None = None
    """For the processes that are started: where to write."""


def sent_by_formula(model: str, optimizer: str, ranks: int, P: float, F: float, interval: float) -> float:
    """Numbers that a rank sends in a step, in the mean over the ranks and the interval, with gloo.

    Its reduce-scatter sends as much as an all-reduce, so ``fully_shard`` itself sends 4 P, where NCCL needs 3 P.
    """
    sharded = model == "fully_shard"
    total = 4.0 * P if sharded else 2.0 * P
    if optimizer != "SGD":
        total += 2 * P / ranks if sharded else 0
        of_factors = F if sharded and optimizer == "KFACSGD" else 3 * F if optimizer == "KFACSGD" else 0
        if optimizer == "EKFACSGD":  # scales, too; bases for the backward, or of their owners
            of_factors = 2 * F + P if sharded else 3 * F + 2 * P
        total += of_factors / interval
    return total * (ranks - 1) / ranks


def loopback() -> int:
    """Bytes that were sent over the loopback device so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def volumes(settings: Settings, model: str, optimizer: str) -> list[int]:
    """Bytes of each step, of all ranks together."""
    torch.manual_seed(0)
    net: Any = nn.Sequential()
    for _ in range(settings.depth):
        net.extend([nn.Linear(settings.width, settings.width, bias=False), nn.Tanh()])
    if model == "fully_shard":
        for layer in net[::2]:
            fully_shard(layer)
        fully_shard(net)
    else:
        net = DistributedDataParallel(net)
    lossfunc, made = nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](net.parameters())
    if optimizer != "SGD":
        made.attach(net, lossfunc)
    x, y = torch.randn(512, settings.width), torch.randint(settings.width, (512,))
    found = []
    for _ in range(settings.steps):
        dist.barrier()
        before = loopback()
        dist.barrier()
        made.zero_grad()
        lossfunc(net(x), y).backward()
        made.step()
        dist.barrier()
        found.append(loopback() - before)
    return found


def work(settings: Settings) -> None:
    """In each process: measure, and write on the first one."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {model: {name: volumes(settings, model, name) for name in OPTIMIZERS} for model in MODELS}
    if dist.get_rank() == 0 and settings.worker is not None:
        settings.worker.write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(settings: Settings, ranks: int) -> dict[str, dict[str, dict[str, float]]]:
    """Bytes that a rank sends in a step, with a refresh, without and in the mean, by model and optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volumes.json"
        given = {"width": settings.width, "depth": settings.depth, "steps": settings.steps, "worker": path}
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "benchmarks.ranks"]
        options = [f"--{name}={value}" for name, value in given.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *command, *options], check=True, env=environment)
        steps = json.loads(path.read_text())
    result: dict[str, dict[str, dict[str, float]]] = {}
    for model, by_name in steps.items():
        for name, found in by_name.items():
            least, most = min(found[1:]) / ranks, max(found[1:]) / ranks  # the first step tells the shapes, too
            mean = least + (most - least) / settings.interval
            result.setdefault(model, {})[name] = {"without": least, "with": most, "mean": mean}
    return result


def draw(settings: Settings, measured: Mapping[int, Any], path: Path) -> None:
    """Bytes a step in sizes of the model, measured and by formula, and milliseconds of a large model by link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    P = settings.depth * settings.width**2
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, model in zip(axes, MODELS, strict=False):
        for name, colour in COLOURS.items():
            line = [sent_by_formula(model, name, r, P, 2 * P, settings.interval) / P for r in COUNTS]
            axis.plot(COUNTS, line, color=colour, label=name)
            dots = [(r, each[model][name]["mean"] / (4 * P)) for r, each in measured.items()]
            axis.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4)
        axis.set_title(f"{model}: sent by a rank in a step,\nin sizes of the model", fontsize=9)
        axis.set_ylim(bottom=0)
    P, F = 12 * 24 * 2048**2, 2 * 24 * 128 * 2048 * 9  # a transformer of 24 blocks of width 2048, blocks of 128
    for model, style in zip(MODELS, ("--", "-"), strict=True):
        for link, colour in zip(LINKS, ("#CC79A7", "#E69F00", "#009E73"), strict=True):
            both = [[sent_by_formula(model, name, r, P, F, 20) for name in ("KFACSGD", "SGD")] for r in COUNTS]
            ms = [1e3 * 4 * (ours - sgd) / LINKS[link] for ours, sgd in both[1:]]
            axes[2].plot(COUNTS[1:], ms, style, color=colour, label=link if style == "-" else None)
    axes[2].set_yscale("log")
    axes[2].set_title("KFACSGD beyond SGD, 1.2 billion parameters:\nms a step (dashed: DDP)", fontsize=9)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(COUNTS, [f"{r}" for r in COUNTS], fontsize=8)
        axis.set_xlabel("ranks")
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.ranks", description=__doc__)
    if settings.worker is not None:
        work(settings)
        return
    P = settings.depth * settings.width**2
    measured = {ranks: measure(settings, ranks) for ranks in settings.ranks}
    print("\n| ranks | model | optimizer | without a refresh | with one | mean | by formula |\n|" + "---|" * 7)
    for ranks, by_model in measured.items():
        for model, by_name in by_model.items():
            for name, found in by_name.items():
                formula = 4 * sent_by_formula(model, name, ranks, P, 2 * P, settings.interval)
                numbers = " | ".join(f"{each / (4 * P):.2f}" for each in (*found.values(), formula))
                print(f"| {ranks} | {model} | {name} | {numbers} |")
    content = {"machine": machine(), "width": settings.width, "depth": settings.depth, "interval": settings.interval}
    save(settings.out / "ranks.json", content | {"bytes": measured})
    draw(settings, measured, settings.out / "ranks.png")
    print(f"\nresults: {settings.out / 'ranks.json'}, {settings.out / 'ranks.png'}")


if __name__ == "__main__":
    main()
