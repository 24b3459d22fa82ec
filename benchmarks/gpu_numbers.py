"""Whether curvopt computes on a device what it computes on the CPU, and where it has the host wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.agreement import default_dtype, distance, most_likely_labels
from benchmarks.gpu_parts import Result, guarded, waits_of
from benchmarks.packages import method
from benchmarks.problems import Problem
from curvopt import backpack, extend
from curvopt.extensions import KFAC, BatchGrad, DiagGGNExact, DiagGGNMC
from curvopt.kroneckers import eigenbases
from curvopt.optim import solve

#: Relative error of float64 that is rounding.
ROUNDING = 1e-8
#: Relative difference of steps that the choice among equal eigenvectors may make.
ARBITRARY = 5e-2
#: Learning rate of compared steps: longer ones on a few samples diverge, which makes rounding errors visible.
SMALL = 1e-6


def fields(problem: Problem, quantity: str, device: str) -> dict[str, list[Tensor]]:
    """A quantity in float64, as a list of tensors for each parameter; sampled labels are the most likely ones."""
    with most_likely_labels(), default_dtype(torch.float64):
        computed = method("curvopt", problem.make(device), quantity)
        values = computed.read(computed.run())
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def compared(problem: Problem, quantity: str, device: str) -> Result:
    """The largest relative error of a quantity on the device, by the CPU's numbers."""
    result: Result = {}
    with guarded(result):
        expected, found = fields(problem, quantity, "cpu"), fields(problem, quantity, device)
        errors = [0.0]
        for name, reference in expected.items():
            for value, wanted in zip(found[name], reference, strict=True):
                assert value.device.type == torch.device(device).type, f"{name} is on {value.device}"
                errors.append(distance(value.cpu(), wanted))
        result |= {"error": max(errors), "right": max(errors) < ROUNDING}
    return result


def optimizer_compared(make: Callable[..., Any], problem: Problem, device: str, steps: int = 4) -> Result:
    """How much the loss after a few steps of an optimizer differs, relative to what the steps changed.

    Parameters cannot be compared: eigenvectors of equal eigenvalues are arbitrary, and rounding chooses them. The GPU
    takes eigendecompositions for this, as the CPU does.
    """

    def losses(device: str) -> tuple[float, float]:
        with most_likely_labels(), default_dtype(torch.float64):
            task = problem.make(device)
            task.model.train()
            optimizer = make(task.model.parameters(), lr=SMALL)
            optimizer.attach(task.model, task.lossfunc)
            first = float(task.lossfunc(task.model(task.x), task.y))
            for _ in range(steps):
                task.gradient()
                optimizer.step()
            return first, float(task.lossfunc(task.model(task.x), task.y))

    result: Result = {}
    as_on_cpu = mock.patch.object(solve, "renewed_bases", lambda factors, _: eigenbases(factors))
    with guarded(result), as_on_cpu:
        (first, last), (_, found) = losses("cpu"), losses(device)
        error = abs(found - last) / abs(first - last)
        result |= {"error": error, "right": error < ARBITRARY}
    return result


class First(nn.Module):
    """The first output of a module that returns several, for its input given so many times."""

    def __init__(self, module: nn.Module, times: int = 1):
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x: Tensor) -> Tensor:
        return self.module(*[x] * self.times)[0]


def layers() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Layers, each with the shape of a sample that it takes."""
    with_parameters = {
        "Linear": (lambda: nn.Linear(6, 4), (6,)),
        "Linear of sequences": (lambda: nn.Linear(6, 4), (5, 6)),
        "Conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 9)),
        "Conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6)),
        "Conv2d in groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 6, 6)),
        "Conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 4, 4, 4)),
        "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 4)),
        "LayerNorm": (lambda: nn.LayerNorm(6), (5, 6)),
        "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
        "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), (3, 4, 4)),
        "PReLU": (lambda: nn.PReLU(), (6,)),
        "Embedding": (lambda: nn.Embedding(11, 4), ()),
        "LSTM": (lambda: First(nn.LSTM(6, 4, batch_first=True)), (5, 6)),
        "GRU": (lambda: First(nn.GRU(6, 4, batch_first=True)), (5, 6)),
        "MultiheadAttention": (lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), times=3), (5, 6)),
    }
    without = {module.__name__: (module, (2, 4, 4)) for module in (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)}
    behind = {
        name: (lambda kind=kind: nn.Sequential(nn.Conv2d(2, 2, 1), kind(2)), shape)
        for name, (kind, shape) in without.items()
    }
    return with_parameters | behind


def waits_of_layer(make: Callable[[], nn.Module], shape: Sequence[int], device: str) -> Result:
    """Where each quantity has the host wait, at its third backward; the number of all."""
    result: Result = {}
    for extension in (BatchGrad, KFAC, DiagGGNMC, DiagGGNExact):
        own: Result = {}
        with guarded(own):
            torch.manual_seed(0)
            N, first = 8, make()
            x = torch.randn(N, *shape) if shape else torch.randint(11, (N, 5))
            features = first(x).flatten(1).shape[1]
            model = extend(nn.Sequential(first, nn.Flatten(), nn.Linear(features, 3)).to(device))
            lossfunc, x, y = extend(nn.CrossEntropyLoss()), x.to(device), torch.randint(3, (N,)).to(device)

            def backward(model=model, lossfunc=lossfunc, x=x, y=y, extension=extension) -> None:
                loss = lossfunc(model(x), y)
                with backpack(extension()):
                    loss.backward()

            backward(), backward()
            own["places"] = waits_of(backward)
            own["waits"] = None if own["places"] is None else sum(own["places"].values())
        result[extension.__name__] = own
    return result
