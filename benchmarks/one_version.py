"""The quantities of all programs, and the everyday loops, by one version of the package: see `compare_versions`.

It uses the public names of the package alone, so that it runs with every version.
"""

from __future__ import annotations

import inspect
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]

#: Quantities of which only the product with its transpose is unique; what takes minutes for the batches of loops.
ROOTS, SLOW = ("SqrtGGNExact", "SqrtGGNMC"), ("BatchDiagHessian",)


@dataclass
class Failed:
    """An exception in place of a result; ``refused`` if it is the package's own."""

    refused: bool
    text: str

    @classmethod
    def by(cls, error: Exception, curvopt: ModuleType) -> Failed:
        """What an exception says."""
        return cls(isinstance(error, curvopt.CurvoptError), f"{type(error).__name__}: {error}")


@dataclass
class Computed:
    """Fields by parameter; ``sampled`` ones depend on random numbers."""

    fields: dict[str, list[Tensor]]
    sampled: bool


#: Of the loops, whose numbers are means over them: a single draw says little.
SEEDS = range(3)


@dataclass
class Loop:
    """The numbers of a loop, and what it warned of."""

    numbers: list[float]
    warned: list[str]


Quantity = Callable[[nn.Module], Any]
Backward = Callable[[Quantity], tuple[nn.Module, Any]]
Results = dict[tuple[str, str], Failed | Computed | Loop]


def load(checkout: Path) -> ModuleType:
    """The package of a checkout, beside the programs of this one."""
    sys.path[:] = [str(checkout), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    import curvopt

    found = Path(curvopt.__file__).resolve().parents[1]
    assert found == checkout.resolve(), f"{checkout} was asked for, and {found} was imported"
    sys.path[0] = str(ROOT)
    sys.path.append(str(next(ROOT.glob("tests/**/cases.py")).parent))
    return curvopt


def quantities(curvopt: ModuleType) -> dict[str, Quantity]:
    """Functions that make extensions, given the model: each class without options, and some with."""
    kinds = {name: getattr(curvopt.extensions, name) for name in curvopt.extensions.__all__}
    made = {name: kind for name, kind in kinds.items() if name not in ("Extension", "EigenDiagonal")}
    made["KFLR, reduce"] = partial(kinds["KFLR"], approx="reduce")
    made["KFLR, blocks"] = partial(kinds["KFLR"], max_factor_size=3)
    made["BatchGrad, two samples"] = partial(kinds["BatchGrad"], subsampling=[1, 0])
    return {name: lambda model, make=make: make() for name, make in made.items()}


def in_bases_of(curvopt: ModuleType, factors: dict[str, list[Tensor]]) -> Quantity:
    """The extension that takes bases, with random ones of the shapes of factors."""

    def basis(factor: Tensor) -> Tensor:
        drawn = torch.randn(factor.shape, dtype=factor.dtype, generator=torch.Generator().manual_seed(len(factor)))
        return drawn if factor.dim() == 1 else torch.linalg.qr(drawn)[0]

    def make(model: nn.Module) -> Any:
        p = dict(model.named_parameters())
        bases = {p[name]: [basis(factor) for factor in factors[name]] for name in factors}
        return curvopt.extensions.EigenDiagonal(bases, curvopt.extensions.KFLR().columns)

    return make


def as_tensors(quantity: str, value: Any, p: Tensor) -> list[Tensor]:
    """A field as tensors that can be compared: products and roots by their action on directions."""
    directions = torch.randn(3, *p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    if callable(value):
        value = value(directions)
    if quantity in ROOTS:
        value = value.reshape(*value.shape[:2], -1)
        value = torch.einsum("cnp,vp,cnq->vnq", value, directions.reshape(3, -1), value)
    return [t.detach().clone() for t in ([value] if isinstance(value, Tensor) else value)]


def computed(curvopt: ModuleType, name: str, quantity: Quantity, backward: Backward) -> Failed | Computed:
    """A quantity of all parameters after the backward of a program."""
    torch.manual_seed(1)
    try:
        model, extension = backward(quantity)
        found = {key: (getattr(p, extension.field, None), p) for key, p in model.named_parameters()}
        fields = {key: as_tensors(name, value, p) for key, (value, p) in found.items() if value is not None}
    except Exception as error:
        return Failed.by(error, curvopt)
    return Computed(fields, "generator" in inspect.signature(type(extension)).parameters)


def networks(curvopt: ModuleType) -> Iterator[tuple[str, Backward]]:
    """The tables of the tests."""
    torch.manual_seed(0)  # some of their rows draw masks
    from cases import CASES, LAYERS  # pyright: ignore[reportMissingImports]

    def backward(case: Any, quantity: Quantity) -> tuple[nn.Module, Any]:
        problem = case.problem()
        model = curvopt.extend(problem.model)
        if case in CASES:
            curvopt.extend(problem.lossfunc)
        with curvopt.backpack(extension := quantity(model)):
            problem.loss().backward()
        return model, extension

    for case in [*CASES, *LAYERS]:
        yield f"network {case.name}", partial(backward, case)


def everyday_losses(curvopt: ModuleType) -> Iterator[tuple[str, Backward]]:
    """The losses of the table in the docs, and a model that returns each of them."""
    from benchmarks.everyday_losses import N, Net, losses

    class Returns(nn.Module):
        """The loss of a network."""

        def __init__(self, loss: Callable[[Any, Tensor], Tensor]):
            super().__init__()
            self.net, self.loss = Net(), loss

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(self.net, x)

    def backward(loss: Callable[[Any, Tensor], Tensor], inside: bool, quantity: Quantity) -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model, x = curvopt.extend(Returns(loss) if inside else Net()), torch.randn(N, 5)
        with curvopt.backpack(extension := quantity(model)):
            (model(x) if inside else loss(model, x)).backward()
        return model, extension

    torch.manual_seed(0)
    for name, loss in losses():
        yield f"loss {name.replace('`', '')}", partial(backward, loss, False)
        yield f"returned loss {name.replace('`', '')}", partial(backward, loss, True)


class Observer(torch.optim.SGD):
    """An optimizer of a loop, whose first step computes a quantity."""

    def __init__(self, curvopt: ModuleType, model: nn.Module, quantity: Quantity | None):
        super().__init__(model.parameters(), lr=0.01)
        self.backpack, self.model, self.quantity = curvopt.backpack, model, quantity
        self.extension, self.context = None, None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Enter the context of the backward that follows."""
        super().zero_grad(set_to_none)
        if self.quantity is not None and self.extension is None:
            self.extension = self.quantity(self.model)
            self.context = self.backpack(self.extension)
            self.context.__enter__()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Leave it, and end the loop."""
        if self.context is not None:
            self.context.__exit__(None, None, None)
            raise StopIteration
        super().step()


def first_backwards(curvopt: ModuleType) -> Iterator[tuple[str, Backward]]:
    """The first backward of each optimizer of each loop."""
    from benchmarks.everyday_loops import WORKFLOWS

    def backward(loop: Callable, which: int, quantity: Quantity) -> tuple[nn.Module, Any]:
        made: list[Observer] = []

        def make(model: nn.Module) -> Observer:
            made.append(Observer(curvopt, curvopt.extend(model), quantity if len(made) == which else None))
            return made[-1]

        torch.manual_seed(0)
        try:
            for _ in zip(loop(make), range(40), strict=False):
                pass
        except RuntimeError as error:  # what an iterator makes of it
            if not isinstance(error.__cause__, StopIteration):
                raise
        finally:
            for observer in made:
                if observer.context is not None and sys.exc_info()[0] is not None:
                    observer.context.__exit__(*sys.exc_info())
        if made[which].extension is None:
            raise LookupError("the loop has no loss.backward() between zero_grad() and step()")
        return made[which].model, made[which].extension

    for name, loop in WORKFLOWS.items():
        for which in range(2 if "GAN" in name or "DDPG" in name else 1):
            yield f"loop {name}" + f", optimizer {which + 1}" * (which > 0), partial(backward, loop, which)


def all_fields(curvopt: ModuleType) -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, Any]]]]]:
    """Each program, and a function that computes its quantities."""

    def results(backward: Backward, left_out: tuple[str, ...]) -> Iterator[tuple[str, Failed | Computed]]:
        for name, quantity in quantities(curvopt).items():
            if name in left_out:
                continue
            result = computed(curvopt, name, quantity, backward)
            yield name, result
            if name == "KFLR" and isinstance(result, Computed):
                in_bases = in_bases_of(curvopt, result.fields)
                yield "EigenDiagonal", computed(curvopt, "EigenDiagonal", in_bases, backward)

    torch.set_default_dtype(torch.float64)
    for programs in (networks, everyday_losses, first_backwards):
        for name, backward in programs(curvopt):
            yield name, partial(results, backward, SLOW if programs is first_backwards else ())


def all_loops(curvopt: ModuleType, steps: int) -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, Any]]]]]:
    """Each loop, and a function that trains by each optimizer."""
    from benchmarks.everyday_loops import WORKFLOWS

    optim = curvopt.optim

    def attached(kind: type, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind(model.parameters())
        optimizer.attach(model)
        return optimizer

    def preconditioned(model: nn.Module) -> torch.optim.Optimizer:
        preconditioner, optimizer = optim.KFACPreconditioner(model), torch.optim.SGD(model.parameters(), 0.1)
        preconditioner.attach(model)
        optimizer.register_step_pre_hook(lambda *_: preconditioner.step())
        return optimizer

    optimizers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        kind.__name__: partial(attached, kind)
        for kind in (optim.KFACSGD, optim.EKFACSGD, optim.KFACAdamW, optim.DiagonalNewton)
    }
    optimizers["KFACPreconditioner"] = preconditioned

    def numbers(loop: Callable, make: Callable, seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(number) for number, _ in zip(loop(make), range(steps), strict=False)]

    def results(loop: Callable) -> Iterator[tuple[str, Failed | Loop]]:
        for name, make in optimizers.items():
            try:
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    runs = [numbers(loop, make, seed) for seed in SEEDS]
            except Exception as error:
                yield name, Failed.by(error, curvopt)
            else:
                texts = [str(w.message) for w in warned if issubclass(w.category, curvopt.CurvoptWarning)]
                yield name, Loop([sum(each) / len(runs) for each in zip(*runs, strict=True)], texts)

    for name, loop in WORKFLOWS.items():
        yield name, partial(results, loop)


def matches(name: str, chosen: str) -> bool:
    """Whether a name contains a pattern."""
    return fnmatch(name, f"*{chosen}*")


def read(file: Path) -> Results:
    """All results of a file, as far as they were written."""
    found: Results = {}
    if file.exists():
        with file.open("rb") as source:
            while True:
                try:
                    found.update(pickle.load(source))
                except EOFError:
                    return found
                except pickle.UnpicklingError:  # interrupted while it was written
                    return found
    return found


def work(checkout: str, only: str, chosen: str, steps: int, results: str) -> None:
    """Compute what the file does not have yet, and append it."""
    curvopt, file = load(Path(checkout)), Path(results)
    torch.set_num_threads(1)
    torch.manual_seed = torch.default_generator.manual_seed  # the stack of the call is not written down for others
    kept = read(file)
    done = {program for program, _ in kept}
    with file.open("wb") as out:
        pickle.dump(list(kept.items()), out)
        for name, results in all_fields(curvopt) if only == "fields" else all_loops(curvopt, steps):
            if matches(name, chosen) and name not in done:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = list(results())
                pickle.dump([((name, quantity), result) for quantity, result in found], out)
                out.flush()
