"""What all benchmarks share: interleaved timings, peak memory in fresh processes, and files that say where."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path("benchmarks") / "results"
#: Calls that take less are repeated until they take this long, in seconds.
SHORTEST = 0.03
#: How many times the budget a call has to take to be measured cold.
COLD = 4


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
        torch.accelerator.synchronize(torch.device(device))


@contextmanager
def limited(limit: float) -> Iterator[None]:
    """Raises `TimeoutError` after so many seconds of CPU time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {limit:g} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def ratios(
    unit: Callable[[], Any],
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    budget: float = math.inf,
    limit: float = 1e6,
    device: str = "cpu",
    tick: Callable[[], Any] = lambda: None,
    between: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Median time of every call as a multiple of the unit measured just before it.

    Args:
        unit: what is measured against.
        calls: what is measured, in turns.
        rounds: how many turns.
        budget: seconds (of CPU time, on the CPU) after which a call takes no more turns; one that takes longer has one
            turn, and is measured cold if it takes `COLD` times as long.
        limit: seconds of CPU time that one call may take.
        device: where the calls compute.
        tick: called after every measurement.
        between: called before every measurement.

    Returns:
        For every call ``cpu`` and ``wall`` (medians of ratios), ``spread`` (half the distance of the quartiles of the
        first), ``unit_seconds`` and ``rounds``; or why it ``fails``, and the ratio it exceeds if it is too ``slow``.
    """
    unit(), unit()
    unit_seconds = seconds(unit, device=device)[1]
    unit_repeat = _repeat(unit_seconds)
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    lengths: dict[str, float] = {}
    walls: dict[str, float] = {}
    failed: dict[str, dict[str, Any]] = {}

    def sample(name: str) -> None:
        between()
        gc.collect()
        unit()  # takes the memory that the call before has given back
        unit_cpu, unit_wall = seconds(unit, unit_repeat, device)
        cpu, wall = seconds(calls[name], _repeat(walls.get(name, 1)), device)
        # a busy machine makes calls longer, which should not cost turns
        lengths[name], walls[name] = cpu if device == "cpu" else wall, wall
        # under `limited` the clock of CPU time has ticks of milliseconds
        samples[name].append((cpu / max(unit_cpu, 1e-9), wall / unit_wall, unit_wall))
        tick()

    gc.freeze()  # what is here stays; to look at it again and again takes longer than many a call
    for name in calls:
        try:
            with limited(limit):
                sample(name)
                if lengths[name] < COLD * budget:
                    samples[name].clear()
                    calls[name]()  # what the first call has found out may be checked by the second
        except TimeoutError as error:
            failed[name] = {"fails": reason(error), "slow": limit / unit_seconds}
        except Exception as error:
            failed[name] = {"fails": reason(error)}
    for _ in range(rounds):
        for name in calls:
            if name not in failed and (not samples[name] or (len(samples[name]) + 0.5) * lengths[name] < budget):
                sample(name)
    gc.unfreeze()
    return failed | {name: _summary(of) for name, of in samples.items() if name not in failed}


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
    """Most memory that this process has had so far, in MiB; on Linux without the code it runs, read from libraries."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:  # ru_maxrss would begin with that of the process that started this one
        status = Path("/proc/self/status").read_text()
        most, of_files = (int(status.split(f"{name}:")[1].split()[0]) for name in ("VmHWM", "RssFile"))
        return (most - of_files) / 2**10
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
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": _commit(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _commit() -> str:
    """The commit of this code, ``-dirty`` if code (not results) differs from it; empty outside of a repository."""
    if not shutil.which("git"):
        return ""

    def git(*command: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!../docs", ":!results", ":!../*.md")
    return git("describe", "--always") + "-dirty" * bool(changed)


def kept(folder: Path, name: str, key: Mapping[str, Any], measure: Callable[[], list[Any]]) -> list[Any]:
    """Rows of a run, which is made unless the folder has one with equal settings.

    Args:
        folder: of finished runs.
        name: with which its file begins.
        key: settings that tell runs apart, as JSON has them.
        measure: makes the rows.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    path = folder / f"{name}-{digest}.json"
    if not path.exists():
        rows = measure()
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**key, "rows": rows}))
        part.replace(path)  # never half a file
    return json.loads(path.read_text())["rows"]


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
