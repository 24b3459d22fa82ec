"""What all benchmarks share: interleaved timings, peak memory in fresh processes, and files that say where."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
#: Calls that take less are repeated until they take this long, in seconds.
SHORTEST = 0.03


def seconds(call: Callable[[], Any], repeat: int = 1, device: str = "cpu") -> tuple[float, float]:
    """Process CPU time and wall time of a call, averaged over ``repeat`` of them."""
    _synchronize(device)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeat):
        call()
    _synchronize(device)
    return (time.process_time() - cpu) / repeat, (time.perf_counter() - wall) / repeat


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def ratios(
    unit: Callable[[], Any],
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    budget: float = math.inf,
    device: str = "cpu",
    tick: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Median time of every call as a multiple of the unit measured just before it.

    Args:
        unit: what is measured against.
        calls: what is measured, in turns.
        rounds: how many turns.
        budget: seconds after which a call takes no more turns (but at least one).
        device: where the calls compute.
        tick: called after every measurement.

    Returns:
        For every call ``cpu`` and ``wall`` (medians of ratios), ``spread`` (half the distance of the quartiles of the
        first), ``unit_seconds`` and ``rounds``.
    """
    unit(), unit()
    lengths = {name: _warm(call, device) for name, call in calls.items()}
    unit_repeat = _repeat(seconds(unit, device=device)[1])
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    gc.freeze()  # what is here stays; to look at it again and again takes longer than many a call
    for _ in range(rounds):
        for name, call in calls.items():
            if samples[name] and len(samples[name]) * lengths[name] > budget:
                continue
            gc.collect()
            unit_cpu, unit_wall = seconds(unit, unit_repeat, device)
            cpu, wall = seconds(call, _repeat(lengths[name]), device)
            samples[name].append((cpu / unit_cpu, wall / unit_wall, unit_wall))
            tick()
    return {name: _summary(of) for name, of in samples.items()}


def _warm(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call after a first one, unless that was long."""
    first = seconds(call, device=device)[1]
    return first if first > 1 else seconds(call, device=device)[1]


def _repeat(length: float) -> int:
    return max(1, math.ceil(SHORTEST / max(length, 1e-6)))


def _summary(samples: list[tuple[float, float, float]]) -> dict[str, Any]:
    cpu, wall, unit = zip(*samples, strict=True)
    quartiles = statistics.quantiles(cpu, n=4) if len(cpu) > 1 else [0, 0, 0]
    return {
        "cpu": statistics.median(cpu),
        "wall": statistics.median(wall),
        "spread": (quartiles[2] - quartiles[0]) / 2,
        "unit_seconds": statistics.median(unit),
        "rounds": len(samples),
    }


# ------------------------------------------------------------------------------------------------------------ memory


def peak_memory(device: str = "cpu") -> float:
    """Most memory that this process has had so far, in MiB."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:  # ru_maxrss would begin with that of the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**10
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a module's function, called in a process of its own that has imported torch and nothing more.

    Raises:
        RuntimeError: whatever went wrong there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.packages", "benchmarks.problems"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, torch.get_num_threads(), function, *args))
    process.start()
    sender.close()
    try:
        ok, result = receiver.recv()
    except EOFError:
        ok, result = False, "the process was killed"
    process.join()
    if not ok:
        raise RuntimeError(result)
    return result


def _answer(sender: Any, threads: int, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        sender.send((True, function(*args)))
    except Exception as error:
        sender.send((False, reason(error)))


# ------------------------------------------------------------------------------------------------------------- files


def reason(error: BaseException) -> str:
    """An exception on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the numbers were measured on and with."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = found[0].split(":")[1].strip() if found else cpu
    versions = {}
    for name in ("torch", "backpack-for-pytorch", "asdfghjkl", "nngeometry", "opacus", "curvlinops-for-pytorch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": commit.stdout.strip(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
    }


def save(path: Path, content: Mapping[str, Any], device: str = "cpu") -> None:
    """Results as JSON, with the machine's description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(device), **content}, indent=1) + "\n")
