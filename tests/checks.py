"""What tests of fields share: extended problems, and comparisons with the dense references."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from cases import CASES, Case, Problem
from reference import Reference
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvopt import backpack, extend, set_columns_per_sweep
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    Extension,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BY_NAME = {case.name: case for case in CASES}

# a chain, weights shared within and between calls, a module without a rule, losses with several columns per position
VARIED = ["mlp", "conv2d-groups", "used-on-tokens-and-pool", "own-parameters-and-children", "ce-extra-dims"]
by_varied_case = pytest.mark.parametrize("case", [BY_NAME[name] for name in VARIED], ids=lambda case: case.name)

FIRST_ORDER: list[type[Extension]] = [BatchGrad, BatchL2Grad, SumGradSquared, Variance]
DIAGONALS: list[type[Extension]] = [DiagGGNExact, BatchDiagGGNExact, DiagHessian, BatchDiagHessian]
# fields of first derivatives of the model that a method of the reference has the name of
EXACT: list[type[Extension]] = [*FIRST_ORDER, DiagGGNExact, BatchDiagGGNExact, KFLR]

#: The device that autocast and scalers are for; the emulated one has none of its own.
DEVICE = "cuda" if torch.get_default_device().type == "cuda" else "cpu"


def generator(seed: int) -> torch.Generator:
    """A seeded generator of the default device (of the CPU for the emulated one, which has none)."""
    return torch.Generator(DEVICE).manual_seed(seed)


def extended(case: Case) -> Problem:
    """The problem of a case with an extended model and loss."""
    return extend_problem(case.problem())


def extend_problem(problem: Problem) -> Problem:
    """The problem, whose model and loss are extended now."""
    extend(problem.model)
    extend(problem.lossfunc)
    return problem


def backward(
    problem: Problem, *extensions: type[Extension] | Extension, loss: Callable[[], Tensor] | None = None
) -> Problem:
    """The problem, after a backward pass of its loss (or another one) that set the fields of extensions."""
    with backpack(*(extension() if isinstance(extension, type) else extension for extension in extensions)):
        (loss or problem.loss)().backward()
    return problem


@contextmanager
def columns_per_sweep(columns: int | None) -> Iterator[None]:
    """So many columns are swept together inside."""
    set_columns_per_sweep(columns)
    try:
        yield
    finally:
        set_columns_per_sweep(None)


class Calls(TorchDispatchMode):
    """The operations inside, and how many entries each gives."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        self.entries.append(
            (str(func).split(".")[1], sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)))
        )
        return result

    def largest(self) -> int:
        """The most entries that an operation gave."""
        return max(entries for _, entries in self.entries)


def assert_same(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> None:
    """Up to rounding, of weighted sums in single precision, too."""
    single = expected[0].dtype == torch.float32
    assert_close(found, expected, **({"rtol": 1e-4, "atol": 1e-4} if single else {}))


def gradients_of_each(losses: Iterable[Tensor], parameters: Iterable[Tensor]) -> list[Tensor]:
    """For each parameter the gradients of the losses of single samples, ``[N, *p.shape]``."""
    of = list(parameters)
    each = [torch.autograd.grad(loss, of, retain_graph=True, materialize_grads=True) for loss in losses]
    return [torch.stack(gradients) for gradients in zip(*each, strict=True)]


def hessian_diagonals(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """Of each parameter, row by row, by autograd alone."""
    found = []
    for q, g in zip(params, torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True), strict=True):
        rows = [
            torch.autograd.grad(e, q, retain_graph=True, materialize_grads=True)[0] if e.requires_grad else 0 * g
            for e in g.flatten()
        ]
        found.append(torch.stack([row.flatten()[k] for k, row in enumerate(rows)]).detach().view_as(q))
    return found


def check(problem: Problem, ref: Reference, *extensions: type[Extension]) -> None:
    """Compare fields of all parameters with the reference."""
    for name, p in problem.model.named_parameters():
        for field in (extension.field for extension in extensions):
            if p.requires_grad:
                compare(getattr(p, field), getattr(ref, field)(name), f"{name}.{field}")
            else:
                assert not hasattr(p, field), f"{name} requires no gradient"


def check_products(problem: Problem, ref: Reference, *extensions: type[Extension]) -> None:
    """Compare products with random directions, several of them and one alone, with the matrices of the reference."""
    for name, p in problem.trainable().items():
        for extension in extensions:
            matrix = ref.hessian(name) if extension is HMP else ref.ggn(name)
            for V in (1, 3):
                v = torch.randn(V, *p.shape, dtype=p.dtype)
                expected = (v.reshape(V, -1) @ matrix).reshape(v.shape)
                compare(getattr(p, extension.field)(v), expected, f"{name}.{extension.field}")


def compare(actual: object, expected: object, what: str) -> None:
    """Both are tensors, or lists of factors; a vector among the factors is a diagonal matrix, or all there is of it."""
    assert_close(actual, expected, rtol=1e-8, atol=1e-11, msg=lambda text: f"{what}: {text}")


def check_all(
    problem: Problem,
    loss: Callable[[], Tensor] | None = None,
    ref: Reference | None = None,
    of_hessian: bool = True,
) -> None:
    """First-order quantities, diagonals and products of every parameter against the dense reference."""
    if ref is None:
        ref = Reference(copy.deepcopy(problem.model), problem.x, problem.loss_of_output)
    fields, products = [*FIRST_ORDER, *DIAGONALS], [GGNMP, HMP]
    if not of_hessian:
        fields, products = [*FIRST_ORDER, DiagGGNExact, BatchDiagGGNExact], [GGNMP]
    backward(extend_problem(problem), *fields, *products, SqrtGGNExact, loss=loss)
    check(problem, ref, *fields)
    check_products(problem, ref, *products)
    for name, p in problem.trainable().items():
        root = p.sqrt_ggn_exact.flatten(0, 1).reshape(-1, p.numel())
        compare(root.T @ root, ref.ggn(name), f"{name}.sqrt_ggn_exact")


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    """A package and its public modules that can be imported."""
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        serves = found.name == "curvopt.as_backpack"  # for the rest of the process
        if not serves and not any(part.startswith("_") for part in found.name.split(".")):
            try:
                yield importlib.import_module(found.name)
            except ImportError:
                continue  # needs what is not installed


def defined_in(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions and classes that a module defines itself."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value
