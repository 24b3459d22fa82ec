"""Bytes that a rank sends in a step, and its time: measured with gloo for 1 to 4 ranks, and by formula for up to 512.

Linear layers are trained under ``DistributedDataParallel`` and ``fully_shard``, by SGD and by optimizers of curvature,
these also with ``communication_dtype=torch.bfloat16``, whose effect on steps and losses is measured on 2 and 3 ranks.
Every byte that passes the loopback device in a step is counted, so nothing else may use it: run it in a container, or
by ``unshare -n sh -c 'ip link set lo up && python -m benchmarks.ranks'``. Formulas: docs/distributed.md.

By a model, a plain step of `KFACSGD` under ``fully_shard`` takes as long as one of a small network (Python, and
transfers that wait for each other), the largest share of the products, and the bytes there and back. Each of them is
measured by itself on 2 and more ranks, in turn with the step; the model is drawn for 1.2 billion parameters on GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import RESULTS, machine, save
from curvopt.distributed import Ranks, divide_rows, own_part
from curvopt.optim import EKFACSGD, KFACSGD
from curvopt.optim.sharding.shards import Shards
from curvopt.utils.compression import half, whole

MODELS = ("DistributedDataParallel", "fully_shard")
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "KFACSGD": lambda p: KFACSGD(p, lr=0.01, max_factor_size=None),
    "EKFACSGD": lambda p: EKFACSGD(p, lr=0.01, max_factor_size=None, curvature_every=20, inverse_every=20),
}
#: What follows the name of an optimizer that sends curvature in another dtype.
LOW = {"": None, ", float32": torch.float32, ", bfloat16": torch.bfloat16}
NAMES = ("SGD", *(name + low for name in ("KFACSGD", "EKFACSGD") for low in LOW))
#: Bytes a second that a rank sends, and what does that.
LINKS = {"25 Gbit/s Ethernet": 3e9, "400 Gbit/s InfiniBand": 50e9, "NVLink of an H100": 450e9}
COUNTS = (1, 2, 3, 4, 8, 64, 512)
#: Transfers of a plain step under ``fully_shard``; one more where rows of a matrix have several owners.
TRANSFERS = 5
#: Seconds that ranks of several machines wait for a transfer of a few bytes.
LATENCY = 20e-6
#: Products of a GPU in a second, in flops.
PRODUCTS = 1e14
#: Matrices of a transformer of 24 blocks of width 2048.
TRANSFORMER = 24 * [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)]
COLOURS = {"SGD": "#000000", "KFACSGD": "#0072B2", "EKFACSGD": "#D55E00"}
STYLES = {"": "-", ", bfloat16": ":"}


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
    training: int = 100
    """Steps after which losses with and without ``communication_dtype`` are compared."""
    interval: int = 20
    """Steps between refreshes, for the means."""
    repetitions: int = 60
    """Of a step whose time is measured, of a model of twice the width."""
    out: Path = RESULTS
    """Folder for the results and the figure."""
    worker: Path | None = None
    """For the processes that are started: where to write."""


def sent_by_formula(model: str, optimizer: str, ranks: int, P: float, F: float, interval: float) -> float:
    """Numbers that a rank sends in a step, in the mean over the ranks and the interval, with gloo.

    Its reduce-scatter sends as much as an all-reduce, so ``fully_shard`` itself sends 4 P, where NCCL needs 3 P.
    """
    sharded, (name, _, low) = model == "fully_shard", optimizer.partition(", ")
    half, bits = 1 / 2 if low else 1, 1 / 2 if low == "bfloat16" else 1
    total = 4.0 * P if sharded else 2.0 * P
    if name == "SGD":
        return total * (ranks - 1) / ranks
    factors = (F if sharded else 2 * F) * half * bits
    if name == "EKFACSGD":  # scales, too; bases for the backward, or of their owners
        factors += (F + P) * bits if sharded else F + 2 * P * bits
    elif not sharded:
        factors += F * half  # inverses
    total += factors / interval + (2 * P / ranks if sharded else 0)
    return total * (ranks - 1) / ranks


def largest_share(shapes: Sequence[Sequence[int]], ranks: int) -> float:
    """Of the work of `KFACSGD` with blocks of 128: that of the rank with the most."""
    optimizer = KFACSGD([nn.Parameter(torch.zeros(2, 2))])
    quantity, params = optimizer._quantity, [torch.empty(shape, device="meta") for shape in shapes]
    costs = [quantity.cost(p, optimizer.inverse_every) for p in params]
    loads = [0] * ranks
    divide_rows(costs, [(p.shape[0], quantity.rows_together(p)) for p in params], ranks, loads)
    return max(loads) / sum(costs)


def bytes_of_step(ranks: int, share: float, P: float) -> float:
    """That a rank sends in a plain step under ``fully_shard``: its shards of the gradients, and the changes it has."""
    return 4 * P * (1 / ranks + share) * (ranks - 1) / ranks


def seconds_of_step(small: float, products: float, share: float, cores: int, sent: float, bandwidth: float) -> float:
    """Of a plain step of `KFACSGD` under ``fully_shard``, none of whose parts overlap.

    Args:
        small: seconds of a step of few numbers: Python, and transfers that wait for each other.
        products: seconds of all products on one core (or GPU).
        share: the largest part of them that a rank takes.
        cores: among which all of them are divided, where ranks share cores.
        sent: bytes that a rank sends.
        bandwidth: of these bytes in a second.
    """
    return small + products * max(share, 1 / cores) + sent / bandwidth


def milliseconds_of_transformer(link: float, ranks: int, python: Mapping[str, float], interval: int) -> list[float]:
    """Of `TRANSFORMER` with blocks of 128, in the order of `MODELS`: a step of `KFACSGD` in the mean over an interval.

    Args:
        link: bytes a second.
        ranks: number of ranks.
        python: seconds of the Python of a step, by model.
        interval: steps between refreshes.
    """
    P, F = sum(prod(shape) for shape in TRANSFORMER), 128 * sum(sum(shape) for shape in TRANSFORMER)
    products, share = 4 * 128 * P / PRODUCTS, largest_share(TRANSFORMER, ranks)
    refresh = 4 * F / interval * (ranks - 1) / ranks / link
    copies, small = (python[model] for model in MODELS)
    sent = bytes_of_step(ranks, share, P)
    plain = seconds_of_step(small + TRANSFERS * LATENCY, products, share, ranks, sent, link)
    return [1e3 * (copies + products + 3 * refresh), 1e3 * (plain + refresh)]


def loopback() -> int:
    """Bytes that were sent over the loopback device so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def wrapped(net: Any, model: str) -> Any:
    """A network whose layers are shared out by ``fully_shard``, or that is in ``DistributedDataParallel``."""
    if model != "fully_shard":
        return DistributedDataParallel(net)
    for layer in net[::2]:
        fully_shard(layer)
    return fully_shard(net)


def made(optimizer: str, net: nn.Module, lossfunc: nn.Module) -> Any:
    """An optimizer by its name in `NAMES`."""
    name, comma, low = optimizer.partition(", ")
    result = OPTIMIZERS[name](net.parameters())
    if name != "SGD":
        result.communication_dtype = LOW[comma + low]
        result.attach(net, lossfunc)
    return result


def volumes(settings: Settings, model: str, optimizer: str) -> list[int]:
    """Bytes of each step, of all ranks together."""
    torch.manual_seed(0)
    net: Any = nn.Sequential()
    for _ in range(settings.depth):
        net.extend([nn.Linear(settings.width, settings.width, bias=False), nn.Tanh()])
    net, lossfunc = wrapped(net, model), nn.CrossEntropyLoss()
    stepping = made(optimizer, net, lossfunc)
    x, y = torch.randn(512, settings.width), torch.randint(settings.width, (512,))
    found = []
    for _ in range(settings.steps):
        dist.barrier()
        before = loopback()
        dist.barrier()
        stepping.zero_grad()
        lossfunc(net(x), y).backward()
        stepping.step()
        dist.barrier()
        found.append(loopback() - before)
    return found


def training(settings: Settings, model: str, optimizer: str) -> tuple[Tensor, float]:
    """The change of all parameters by the first step, and the loss of all data after the last one.

    A network of 1,250 parameters learns the classes that another network has drawn, from 64 samples a step.
    """
    torch.manual_seed(0)
    teacher, net = (nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10)) for _ in range(2))
    x = torch.randn(1024, 20)
    with torch.no_grad():
        y = (4 * teacher(x)).softmax(1).multinomial(1).flatten()
    net, lossfunc = wrapped(net, model), nn.CrossEntropyLoss()
    stepping = made(optimizer, net, lossfunc)
    stepping.param_groups[0]["lr"] = 0.1

    def parameters() -> Tensor:
        whole = (p.full_tensor() if model == "fully_shard" else p for p in net.parameters())
        return torch.cat([p.detach().flatten() for p in whole])

    before, change = parameters(), torch.zeros(0)
    generator = torch.Generator().manual_seed(0)
    for step in range(settings.training):
        rows = torch.randint(len(x), (64,), generator=generator).tensor_split(dist.get_world_size())[dist.get_rank()]
        stepping.zero_grad()
        lossfunc(net(x[rows]), y[rows]).backward()
        stepping.step()
        change = parameters() - before if step == 0 else change
    with torch.no_grad():
        return change, float(lossfunc(net(x), y))


def effects(settings: Settings, model: str) -> dict[str, dict[str, float]]:
    """Of a ``communication_dtype``: relative difference of the first step, and the loss of the data in the end."""
    found = {name: training(settings, model, name) for name in NAMES if name != "SGD"}
    plain = {name: found[name.partition(",")[0]][0] for name in found}
    return {
        name: {"difference": float((change - plain[name]).norm() / plain[name].norm()), "loss": loss}
        for name, (change, loss) in found.items()
    }


def packing() -> dict[str, dict[str, float]]:
    """Milliseconds to average a factor over the ranks by ``communication_dtype``, and of packing; least of 10 times."""
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))  # pyright: ignore[reportArgumentType]

    def least(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(10):
            dist.barrier()
            start = perf_counter()
            call()
            times.append(1e3 * (perf_counter() - start))
        return min(times)

    found = {}
    for shape in ((256, 256), (1024, 1024), (16, 128, 128)):
        factor = torch.randn(shape)
        found[str(list(shape))] = {
            "whole": least(lambda factor=factor: ranks.mean([factor])),
            "by halves": least(lambda factor=factor: ranks.mean([factor], torch.float32)),
            "bfloat16": least(lambda factor=factor: ranks.mean([factor], torch.bfloat16)),
            "packing": least(lambda factor=factor: whole(half(factor), factor.shape)),
        }
    return found


def trained(width: int, depth: int, sharded: bool) -> KFACSGD:
    """An optimizer whose next refresh is far off, of a network on this process alone or on all ranks together."""
    torch.manual_seed(0)
    net: Any = nn.Sequential()
    for _ in range(depth):
        net.extend([nn.Linear(width, width, bias=False), nn.Tanh()])
    net = wrapped(net, "fully_shard") if sharded else net
    optimizer, x, y = KFACSGD(net, curvature_every=10_000), torch.randn(64, width), torch.randint(width, (64,))
    if not sharded:
        optimizer.process_group = None
    for _ in range(26):  # refreshes are at 0, 1, 5, 25 and 125
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return optimizer


def there_and_back(optimizer: KFACSGD) -> Callable[[], Any]:
    """Sends what a plain step does: shards of each parameter to its owners, and back."""
    shards, params = optimizer._ranks(), optimizer._params()
    assert isinstance(shards, Shards)
    return lambda: shards.slices(shards.whole({p: own_part(p) for p in params}), params)


def times(settings: Settings) -> dict[str, float]:
    """Medians of the seconds of a plain step under ``fully_shard``, and of its parts, which are measured in turn.

    Each until all ranks have ended it.
    """
    ranks, cores, width, depth = dist.get_world_size(), os.cpu_count() or 1, 2 * settings.width, settings.depth
    together, small = trained(width, depth, True), trained(8, depth, True)
    calls = {
        "step": together.step,
        "small step": small.step,
        "alone": trained(width, depth, False).step,
        "small step alone": trained(8, depth, False).step,
        "transfers": there_and_back(together),
        "small transfers": there_and_back(small),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(settings.repetitions):
        for name, call in calls.items():
            dist.barrier()
            start = perf_counter()
            if "alone" not in name or dist.get_rank() < cores:  # so that none of them waits for a core
                call()
            dist.barrier()
            taken[name].append(perf_counter() - start)
    found = {name: statistics.median(each) for name, each in taken.items()}
    P, share = depth * width**2, largest_share(depth * [(width, width)], ranks)
    sent, products = bytes_of_step(ranks, share, P), found["alone"] - found["small step alone"]
    bandwidth = sent / max(found["transfers"] - found["small transfers"], 1e-9)
    model = seconds_of_step(found["small step"], products, share, cores, sent, bandwidth)
    return found | {"bandwidth": bandwidth, "share": share, "model": model}


def python(settings: Settings) -> dict[str, float]:
    """Median of the seconds of the Python of a plain step, by model, of as many matrices as `TRANSFORMER` has."""
    found = {}
    for model in MODELS:
        optimizer, taken = trained(8, len(TRANSFORMER), model == "fully_shard"), []
        for _ in range(settings.repetitions):
            start = thread_time()  # without waiting
            optimizer.step()
            taken.append(thread_time() - start)
        found[model] = statistics.median(taken)
    return found


def work(settings: Settings) -> None:
    """In each process: measure, and write on the first one."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {model: {name: volumes(settings, model, name) for name in NAMES} for model in MODELS}
    found["effects"] = {model: effects(settings, model) for model in MODELS} if dist.get_world_size() in (2, 3) else {}
    found["packing"], found["times"] = packing(), times(settings) if dist.get_world_size() > 1 else {}
    found["python"] = python(settings) if dist.get_world_size() == 2 else {}
    if dist.get_rank() == 0 and settings.worker is not None:
        settings.worker.write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(settings: Settings, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bytes that a rank sends in a step, by model and optimizer; and `effects`, `packing`, `times`, `python`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volumes.json"
        given = {name: getattr(settings, name) for name in ("width", "depth", "steps", "training", "repetitions")} | {
            "worker": path
        }
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "benchmarks.ranks"]
        options = [f"--{name}={value}" for name, value in given.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *command, *options], check=True, env=environment)
        steps = json.loads(path.read_text())
    result: dict[str, dict[str, dict[str, float]]] = {}
    of_dtypes = {name: steps.pop(name) for name in ("effects", "packing", "times", "python")}
    for model, by_name in steps.items():
        for name, found in by_name.items():
            least, most = min(found[1:]) / ranks, max(found[1:]) / ranks  # the first step tells the shapes, too
            mean = least + (most - least) / settings.interval
            result.setdefault(model, {})[name] = {"without": least, "with": most, "mean": mean}
    return result, of_dtypes


def draw(settings: Settings, measured: Mapping[int, Any], large: Mapping[str, Any], path: Path) -> None:
    """Bytes a step in sizes of the model, measured and by formula, and milliseconds of a large model by link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    P = settings.depth * settings.width**2
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, model in zip(axes, MODELS, strict=False):
        for name, style in ((name + low, style) for name in COLOURS for low, style in STYLES.items()):
            if name not in NAMES:
                continue
            colour = COLOURS[name.partition(",")[0]]
            line = [sent_by_formula(model, name, r, P, 2 * P, settings.interval) / P for r in COUNTS]
            axis.plot(COUNTS, line, style, color=colour, label=name)
            dots = [(r, each[model][name]["mean"] / (4 * P)) for r, each in measured.items()]
            axis.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4)
        axis.set_title(f"{model}: sent by a rank in a step,\nin sizes of the model", fontsize=9)
        axis.set_ylim(bottom=0)
    for (link, by_ranks), colour in zip(large.items(), ("#CC79A7", "#E69F00", "#009E73"), strict=False):
        ddp, sharded = zip(*by_ranks.values(), strict=True)
        axes[2].plot([*by_ranks], ddp, "--", color=colour)
        axes[2].plot([*by_ranks], sharded, color=colour, label=link)
    axes[2].set_yscale("log")
    axes[2].set_ylim(bottom=1)
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
    both = {ranks: measure(settings, ranks) for ranks in settings.ranks}
    measured = {ranks: volume for ranks, (volume, _) in both.items()}
    print("\n| ranks | model | optimizer | without a refresh | with one | mean | by formula |\n|" + "---|" * 7)
    for ranks, by_model in measured.items():
        for model, by_name in by_model.items():
            for name, found in by_name.items():
                formula = 4 * sent_by_formula(model, name, ranks, P, 2 * P, settings.interval)
                numbers = " | ".join(f"{each / (4 * P):.2f}" for each in (*found.values(), formula))
                print(f"| {ranks} | {model} | {name} | {numbers} |")
    print(f"\n| ranks | model | optimizer | first step differs by | loss after {settings.training} |\n|" + "---|" * 5)
    for ranks, (_, of_dtypes) in both.items():
        for model, by_name in of_dtypes["effects"].items():
            for name, found in by_name.items():
                print(f"| {ranks} | {model} | {name} | {found['difference']:.1e} | {found['loss']:.4f} |")
    print("\n| ranks | factor | ms to average it | by halves | in bfloat16 | packing alone |\n|" + "---|" * 6)
    for ranks, (_, of_dtypes) in both.items():
        for shape, found in of_dtypes["packing"].items():
            print(f"| {ranks} | {shape} | {' | '.join(f'{ms:.2f}' for ms in found.values())} |")
    seconds = {ranks: found for ranks, (_, of_dtypes) in both.items() if (found := of_dtypes.pop("times"))}
    print("\n| seconds | " + " | ".join(f"{ranks} ranks" for ranks in seconds) + " |\n|" + "---|" * (1 + len(seconds)))
    for name in next(iter(seconds.values()), {}):
        print(f"| {name} | {' | '.join(f'{found[name]:.3g}' for found in seconds.values())} |")
    python_of = [found for _, of_dtypes in both.values() if (found := of_dtypes.pop("python"))]
    large = {
        name: {ranks: milliseconds_of_transformer(link, ranks, python_of[0], settings.interval) for ranks in COUNTS[1:]}
        for name, link in LINKS.items()
        if python_of
    }
    print("\n| ms of 1.2 billion parameters | " + " | ".join(map(str, COUNTS[1:])) + " |\n|" + "---|" * len(COUNTS))
    for link, by_ranks in large.items():
        for i, model in enumerate(MODELS):
            print(f"| {model}, {link} | {' | '.join(f'{each[i]:.3g}' for each in by_ranks.values())} |")
    content = {"machine": machine(), "width": settings.width, "depth": settings.depth, "interval": settings.interval}
    of_dtypes = {"training": settings.training, "dtypes": {ranks: each for ranks, (_, each) in both.items()}}
    of_steps = {"bytes": measured, "times": seconds, "python": python_of, "large": large}
    save(settings.out / "ranks.json", content | of_steps | of_dtypes)
    draw(settings, measured, large, settings.out / "ranks.png")
    print(f"\nresults: {settings.out / 'ranks.json'}, {settings.out / 'ranks.png'}")


if __name__ == "__main__":
    main()
