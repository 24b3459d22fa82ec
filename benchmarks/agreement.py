"""Whether the numbers of a package are right: every quantity by plain autograd, sample by sample, in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.packages import EXACT, KRONECKER, PRODUCTS, Method, Values, direction, method
from benchmarks.problems import Affine, Problem, Task

#: What a comparison is made with: nothing depends on more.
SAMPLES, CLASSES = 3, 10
#: Relative error that is rounding, by dtype; ties of ReLU and max-pooling cost digits in float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


def most_likely(p: Tensor, num_samples: int, *args: Any, **kwargs: Any) -> Tensor:
    """In place of drawing labels: nothing random, so that sampled quantities can be compared."""
    return p.argmax(-1, keepdim=True).expand(*p.shape[:-1], num_samples)


@contextmanager
def most_likely_labels() -> Iterator[None]:
    names = ("torch.multinomial", "torch.Tensor.multinomial", "curvopt.core.losses.roots.draw")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch(name, most_likely))
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rows_of(z: Tensor) -> Tensor:
    """``[N, C, ...]`` outputs as ``[rows, C]``."""
    return z.movedim(1, -1).flatten(0, -2)


def sampled_loss(z: Tensor, rows: int) -> Tensor:
    """What has the Monte-Carlo column of a mean over that many rows for its gradient."""
    labels = rows_of(z).detach().argmax(1)
    return F.cross_entropy(rows_of(z), labels, reduction="sum") / math.sqrt(rows)


def exact_columns(z: Tensor) -> Iterator[Tensor]:
    """Columns ``[N, C]`` of the root of the Hessian of a mean cross-entropy of ``[N, C]`` outputs, without the 1/N."""
    p = z.detach().softmax(1)
    for c in range(z.shape[1]):
        yield p[:, c : c + 1].sqrt() * (F.one_hot(torch.tensor(c), z.shape[1]) - p)


class Definitions:
    """Quantities of a task by their definitions, each kind of vector once."""

    def __init__(self, task: Task):
        self.task = task
        self.names = [name for name, _ in task.model.named_parameters()]
        self.parameters = list(task.model.parameters())
        self._cache: dict[str, Values] = {}

    def __getitem__(self, quantity: str) -> Values:
        source = next(s for s, quantities in self._sources().items() if quantity in quantities)
        if source not in self._cache:
            self._cache |= getattr(self, source)()
        return self._cache[quantity]

    @staticmethod
    def _sources() -> dict[str, tuple[str, ...]]:
        exact = tuple(q for q in (*EXACT, *PRODUCTS) if q not in KRONECKER)
        return {
            "_gradients": ("Idle", "BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
            "_sampled": ("DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC"),
            "_exact": exact,
            "_kfac": ("KFAC",),
            "_kflr": ("KFLR",),
        }

    def _outputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for n in range(len(self.task.x)):
            yield self.task.model(self.task.x[n : n + 1]), self.task.y[n : n + 1]

    def _grads(self, value: Tensor, column: Tensor | None = None) -> list[Tensor]:
        return list(torch.autograd.grad(value, self.parameters, column, retain_graph=True, materialize_grads=True))

    def _named(self, values: list[Tensor]) -> Values:
        return dict(zip(self.names, values, strict=True))

    def _gradients(self) -> dict[str, Values]:
        N = len(self.task.x)
        samples = [self._grads(self.task.lossfunc(z, y) / N) for z, y in self._outputs()]
        grads = [torch.stack(g) for g in zip(*samples, strict=True)]
        reductions: dict[str, Callable[[Tensor], Tensor]] = {
            "Idle": lambda g: g.sum(0),
            "BatchGrad": lambda g: g,
            "BatchL2Grad": lambda g: g.flatten(1).square().sum(1),
            "SumGradSquared": lambda g: g.square().sum(0),
            "Variance": lambda g: g.square().mean(0) - g.mean(0).square(),
        }
        return {quantity: self._named([of(g) for g in grads]) for quantity, of in reductions.items()}

    def _sampled(self) -> dict[str, Values]:
        rows = self.task.y.numel()
        samples = [[g.square() for g in self._grads(sampled_loss(z, rows))] for z, _ in self._outputs()]
        batch = [torch.stack(g) for g in zip(*samples, strict=True)]
        total = self._named([g.sum(0) for g in batch])
        return {"DiagGGNMC": total, "BatchDiagGGNMC": self._named(batch), "SqrtGGNMC": total}

    def _exact(self) -> dict[str, Values]:
        """Of a piecewise linear network, whose Hessian has the blocks of the GGN."""
        N = len(self.task.x)
        batch = [torch.zeros(N, *p.shape) for p in self.parameters]
        products = [torch.zeros_like(p) for p in self.parameters]
        for n, (z, _) in enumerate(self._outputs()):
            for column in exact_columns(z):
                for i, g in enumerate(self._grads(z, column / N**0.5)):
                    batch[i][n] += g.square()
                    products[i] += g * (g * direction(g)).sum()
        total = self._named([b.sum(0) for b in batch])
        found = dict.fromkeys(("DiagGGNExact", "DiagHessian", "SqrtGGNExact"), total)
        found |= dict.fromkeys(("BatchDiagGGNExact", "BatchDiagHessian"), self._named(batch))
        return found | dict.fromkeys(PRODUCTS, self._named(products))

    def _kfac(self) -> dict[str, Values]:
        return {"KFAC": self._factors(lambda z: [torch.autograd.grad(sampled_loss(z, self.task.y.numel()), z)[0]])}

    def _kflr(self) -> dict[str, Values]:
        return {"KFLR": self._factors(lambda z: [column / len(z) ** 0.5 for column in exact_columns(z)])}

    def _factors(self, columns: Callable[[Tensor], list[Tensor]]) -> Values:
        """Kronecker factors ``[B, A]`` of the weights of linear layers and (ungrouped) convolutions.

        Two B are in use where positions share a weight: every position by itself, and the sum over positions.
        """
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
                inputs[name], outputs[name] = args[0].detach(), out
                return out.clone()  # an activation may work in place

            return hook

        layers = {n: m for n, m in self.task.model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d, Affine))}
        handles = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
        z = self.task.model(self.task.x)
        for handle in handles:
            handle.remove()
        A: Values = {}
        for name, module in layers.items():
            x = inputs[name]
            if isinstance(module, nn.Conv2d):
                x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
            x = x.flatten(0, -2)
            A[name] = x.T @ x / len(x)
        B: Values = {name: (0, 0) for name in layers}
        for column in columns(z):
            grads = torch.autograd.grad(z, list(outputs.values()), column, retain_graph=True)
            for name, g in zip(outputs, grads, strict=True):
                g = g.flatten(2).mT if isinstance(layers[name], nn.Conv2d) else g.reshape(len(g), -1, g.shape[-1])
                rows, sums = g.flatten(0, 1), g.sum(1)
                B[name] = (B[name][0] + rows.T @ rows, B[name][1] + sums.T @ sums)
        return {f"{name}.weight": [B[name], (A[name],)] for name in layers}


def distance(value: Tensor, reference: Tensor) -> float:
    """Relative error."""
    return float((value.detach().reshape(reference.shape) - reference).norm() / reference.norm().clamp_min(1e-300))


def error_of(values: Values, reference: Values) -> float:
    """The largest relative error over the parameters; Kronecker factors may differ by a factor.

    Raises:
        RuntimeError: if a parameter is left out.
    """
    missing = [name for name in reference if values.get(name) is None]
    if missing:
        raise RuntimeError(f"nothing for {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")
    errors = [0.0]
    for name, expected in reference.items():
        if isinstance(expected, list):
            for factor, allowed in zip(values[name], expected, strict=True):
                errors.append(min(distance(factor / factor.trace(), wanted / wanted.trace()) for wanted in allowed))
        else:
            errors.append(distance(values[name], expected))
    return max(errors)


class Checker:
    """Compares packages with the definitions, on few samples and classes of a problem, on the CPU."""

    def __init__(self, problem: Problem):
        self.problem = dataclasses.replace(problem, N=SAMPLES, classes=min(problem.classes, CLASSES))
        with default_dtype(torch.float64):
            self.definitions = Definitions(self.problem.make())

    def error(self, package: str, quantity: str) -> tuple[float, torch.dtype]:
        """Relative error, in float64 or, where the package cannot, float32.

        Raises:
            Exception: whatever the package raises in both.
        """
        reference = self.reference(quantity)
        for dtype in (torch.float64, torch.float32):
            try:
                with default_dtype(dtype), most_likely_labels():
                    computed: Method = method(package, self.problem.make(), quantity)
                    values = computed.read(computed.run())
                return error_of(values, reference), dtype
            except Exception:
                if dtype == torch.float32:
                    raise
        raise AssertionError

    def reference(self, quantity: str) -> Values:
        with default_dtype(torch.float64):
            if quantity != "KFRA":
                return self.definitions[quantity]
            found = method("curvopt", self.problem.make(), quantity).run()  # of which the tests take care
            weights = {name: v for name, v in found.items() if len(v) == 2}
            return {n: [(B, *found.get(n.replace("weight", "bias"), ())), (A,)] for n, (B, A) in weights.items()}
