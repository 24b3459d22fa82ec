"""What tests of fields share: extended problems, and comparisons with the dense references."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import pytest
import torch
from cases import CASES, Case, Problem
from reference import Reference
from torch import Tensor
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.extensions import (
    GGNMP,
    HMP,
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


#: The device that autocast and scalers are for; the emulated one has none of its own.
DEVICE = "cuda" if torch.get_default_device().type == "cuda" else "cpu"


def generator(seed: int) -> torch.Generator:
    """A seeded generator of the default device (of the CPU for the emulated one, which has none)."""
    return torch.Generator(DEVICE).manual_seed(seed)


def extended(case: Case) -> Problem:
    """The problem of a case with an extended model and loss."""
    problem = case.problem()
    extend(problem.model)
    extend(problem.lossfunc)
    return problem


def assert_same(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> None:
    """Up to rounding, of weighted sums in single precision, too."""
    single = expected[0].dtype == torch.float32
    assert_close(found, expected, **({"rtol": 1e-4, "atol": 1e-4} if single else {}))


def gradients_of_each(losses: Iterable[Tensor], parameters: Iterable[Tensor]) -> list[Tensor]:
    """For each parameter the gradients of the losses of single samples, ``[N, *p.shape]``."""
    of = list(parameters)
    each = [torch.autograd.grad(loss, of, retain_graph=True, materialize_grads=True) for loss in losses]
    return [torch.stack(gradients) for gradients in zip(*each, strict=True)]


def check(problem: Problem, ref: Reference, extension: type[Extension]) -> None:
    """Compare one field of all parameters with the reference."""
    for name, p in problem.model.named_parameters():
        if not p.requires_grad:
            assert not hasattr(p, extension.field), f"{name} requires no gradient"
            continue
        actual, expected = getattr(p, extension.field), getattr(ref, extension.field)(name)
        compare(actual, expected, f"{name}.{extension.field}")


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
    extend(problem.model)
    extend(problem.lossfunc)
    tensors = [*FIRST_ORDER, DiagGGNExact, BatchDiagGGNExact]
    products = {GGNMP: ref.ggn}
    if of_hessian:
        tensors += [DiagHessian, BatchDiagHessian]
        products[HMP] = ref.hessian
    with backpack(*(extension() for extension in [*tensors, *products, SqrtGGNExact])):
        (loss or problem.loss)().backward()
    for name, p in problem.trainable().items():
        for extension in tensors:
            field = extension.field
            compare(getattr(p, field), getattr(ref, field)(name), f"{name}.{field}")
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        for extension, matrix in products.items():
            expected = (v.reshape(2, -1) @ matrix(name)).reshape(v.shape)
            compare(getattr(p, extension.field)(v), expected, f"{name}.{extension.field}")
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
