"""The measurements of `benchmarks.gpu`: cost, launches, waits, steps of optimizers, chunks of columns."""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.packages import Method, NotOffered, method
from benchmarks.problems import Task
from benchmarks.timing import limited, ratios, reason
from curvopt import set_columns_per_sweep
from curvopt.core.products import costs
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW

Result = dict[str, Any]
#: Milliseconds of the longest call that is profiled.
PROFILED = 500.0
#: What the profiler calls a wait of the host.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Effort:
    """How long each measurement may take.

    Args:
        device: where to compute.
        rounds: turns of each call.
        budget: seconds after which a call takes no more turns.
        limit: seconds of CPU time that one call may take.
    """

    device: str
    rounds: int = 5
    budget: float = 0.8
    limit: float = 15.0


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize(torch.device(device))


@contextmanager
def guarded(result: Result) -> Iterator[None]:
    """Turns an error, out of memory too, into the message of a cell."""
    try:
        yield
    except NotOffered:
        result["absent"] = True
    except (Exception, AssertionError) as error:
        result["fails"] = reason(error)
        error.__traceback__ = None  # its frames hold tensors
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------- launches, waits, memory


def waits_of(call: Callable[[], Any]) -> dict[str, int] | None:
    """How often each line has the host wait for the GPU; ``None`` where PyTorch does not tell."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(_line(w) for w in caught if "synchronizing CUDA operation" in str(w.message))
    return dict(places)


def _line(warning: warnings.WarningMessage) -> str:
    parts = Path(warning.filename).parts
    start = next((i for i, part in enumerate(parts) if part in ("curvopt", "benchmarks", "torch")), -1)
    return f"{'/'.join(parts[start:])}:{warning.lineno}"


def launches_of(call: Callable[[], Any], device: str) -> Result:
    """Kernels, copies to the host and waits of a call, by the profiler; on the CPU the operations it runs."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    wait_for(device)
    with profile(activities=[activity]) as profiler:
        call()
        wait_for(device)
    events = profiler.events() or []
    if device == "cpu":
        return {"launches": sum(e.name.startswith("aten::") for e in events)}
    on_device = [e.name for e in events if e.device_type.name == "CUDA"]
    other = ("Memcpy", "Memset", "Optimizer.", "Stream Sync", "Event Sync", "Context Sync", "Stream Wait")
    return {
        "launches": sum(not name.startswith(other) for name in on_device),
        "copies_to_host": sum(name.startswith("Memcpy DtoH") for name in on_device),
        "host_waits": max(0, sum(e.name in WAITS for e in events) - 1),  # one is that of this function
    }


def peak_of(call: Callable[[], Any], device: str) -> Result:
    """Run a call; the most memory that it allocates beyond what was allocated before, in MiB, unknown on the CPU."""
    if not device.startswith("cuda"):
        call()
        return {}
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait_for(device)
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


# -------------------------------------------------------------------------------------------------------- quantities


class Mixed(nn.Module):
    """A network of float32 parameters that computes in bfloat16 under autocast; its outputs are float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            z = self.model(x)
        return z.float()


def copied(task: Task) -> Task:
    """A task of its own, so that no package sees the hooks of another one."""
    model, lossfunc = copy.deepcopy((task.model, task.lossfunc))
    return Task(model, lossfunc, task.x, task.y)


def milliseconds(numbers: Result) -> Result:
    """What the tables show of `ratios`."""
    if "fails" in numbers:
        return numbers
    return {
        "ms": 1e3 * numbers["wall"] * numbers["unit_seconds"],
        "ratio": numbers["wall"],
        "rounds": numbers["rounds"],
    }


def timed(task: Task, calls: dict[str, Callable[[], Any]], effort: Effort) -> dict[str, Result]:
    """Time of calls, in turns with the plain gradient."""
    found = ratios(task.gradient, calls, effort.rounds, effort.budget, effort.limit, effort.device)
    return {name: milliseconds(numbers) for name, numbers in found.items()}


def plain(task: Task, effort: Effort) -> Result:
    """The row of the plain gradient."""
    result: Result = {}
    with guarded(result):
        own = copied(task)
        result |= timed(task, {"gradient": own.gradient}, effort)["gradient"]
        result |= described(own, own.gradient, effort.device)
    return result


def described(task: Task, call: Callable[[], Any], device: str, ms: float = 0.0) -> Result:
    """Memory, launches and waits of a call; no launches of one that takes long, as the profiler takes longer."""
    task.model.zero_grad()
    result = peak_of(call, device)
    if ms < PROFILED:
        result |= launches_of(call, device)
    places = waits_of(call)
    return result if places is None else result | {"waits": sum(places.values()), "places": places}


def quantity_cell(task: Task, package: str, quantity: str, effort: Effort) -> Result:
    """Time, memory, launches and waits of a quantity in a package."""
    result: Result = {}
    with guarded(result):
        own = copied(task)
        computed: Method = method(package, own, quantity)
        numbers = timed(task, {quantity: computed.run}, effort)[quantity]
        result |= numbers | {"gradient": computed.gradient}
        if "fails" not in numbers:
            with limited(2 * effort.limit):
                result |= described(own, computed.run, effort.device, numbers["ms"])
    return result


# -------------------------------------------------------------------------------------------------------- optimizers


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-4)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of weights, AdamW for all else."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in embeddings]
    return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(others, lr=1e-4)]


def attached(kind: Any, model: nn.Module, lossfunc: nn.Module) -> list[torch.optim.Optimizer]:
    """One of curvopt's optimizers, with its defaults but for a rate that suits random data."""
    optimizer = kind(model.parameters(), lr=1e-4)
    optimizer.attach(model, lossfunc)
    return [optimizer]


OURS: tuple[Any, ...] = (KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton)
#: How each optimizer is made for a model and its loss.
OPTIMIZERS: dict[str, Callable[[nn.Module, nn.Module], list[torch.optim.Optimizer]]] = {
    "AdamW": lambda model, _: adamw(model),
    "Muon": lambda model, _: muon(model),
} | {kind.__name__: partial(attached, kind) for kind in OURS}


def step_cell(task: Task, name: str, effort: Effort, steps: int = 20, seconds: float = 6.0) -> Result:
    """Median time of ordinary steps, of those that refresh curvature, and of the first; peak memory; waits of a step.

    A step is zero_grad, forward, backward and step, in train mode. Long runs refresh every 10 or 20 steps.
    """
    result: Result = {}
    with guarded(result):
        own = copied(task)
        own.model.train()
        optimizers = OPTIMIZERS[name](own.model, own.lossfunc)

        def step() -> None:
            own.gradient()
            for optimizer in optimizers:
                optimizer.step()

        def refreshes() -> list[int]:
            return [vars(each)["_run"].due for each in optimizers if "_run" in vars(each)]

        times: dict[bool, list[float]] = {False: [], True: []}
        memory: Result = {}

        def run() -> None:
            begin = time.monotonic()
            # 8 steps: the first that is ordinary is the sixth
            for i in range(steps):
                if i >= 8 and time.monotonic() - begin > seconds:
                    break
                before = refreshes()
                wait_for(effort.device)
                start = time.perf_counter()
                step()
                wait_for(effort.device)
                times[refreshes() != before].append(time.perf_counter() - start)

        with limited(4 * effort.limit):
            memory = peak_of(run, effort.device)
        for key, of_kind in (("ms", times[False]), ("refresh_ms", times[True])):
            if of_kind:
                result[key] = 1e3 * statistics.median(of_kind[1:] or of_kind)  # the first is cold
        if times[True]:
            result["first_ms"] = 1e3 * times[True][0]
        result |= memory | {"steps": len(times[False]), "refreshes": len(times[True])}
        for _ in range(4):  # until one is ordinary
            before, places = refreshes(), waits_of(step)
            if refreshes() == before and places is not None:
                result |= {"waits": sum(places.values()), "places": places}
                break
    return result


# ------------------------------------------------------------------------------------------------- chunks of columns


def chunk_cell(task: Task, quantity: str, sizes: Iterable[int], effort: Effort) -> Result:
    """Time and memory of a quantity by the number of columns that go together, and the number that curvopt chooses."""
    result: Result = {}
    with guarded(result):
        computed = method("curvopt", copied(task), quantity)
        chosen: list[int] = []
        choose = costs.columns_at_once

        def choice(*args: Any) -> int:
            chosen.append(choose(*args))
            return chosen[-1]

        with mock.patch.object(costs, "columns_at_once", choice):
            computed.run()

        def together(size: int) -> None:
            set_columns_per_sweep(size)
            try:
                computed.run()
            finally:
                set_columns_per_sweep(None)

        calls = {str(size): partial(together, size) for size in sorted({*sizes})}
        found = timed(task, calls, effort)
        for size, numbers in found.items():
            if "fails" not in numbers:
                numbers |= peak_of(calls[size], effort.device)
        right = {int(size): numbers["ms"] for size, numbers in found.items() if "ms" in numbers}
        result |= {"sizes": found, "default": min(chosen, default=None), "best": min(right, key=lambda s: right[s])}
    return result
