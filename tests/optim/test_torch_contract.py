"""Curvature optimizers keep the contract of ``torch.optim``: options, types, messages, ``maximize``."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt import CurvoptError, CurvoptWarning
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner

KINDS = [KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton, HessianFree]
with_curvature = pytest.mark.parametrize("kind", KINDS[:-1])
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: type, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = kind(model.parameters(), **options)
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    return model, optimizer


@every_kind
def test_defaults_and_print_have_every_option(kind: type) -> None:
    names = {*inspect.signature(kind).parameters} - {"params", "attached"}
    _, optimizer = build(kind)
    assert names <= optimizer.defaults.keys()
    lines = [line.split(":")[0].strip() for line in repr(optimizer).splitlines()]
    assert all(lines.count(name) == 1 for name in names), repr(optimizer)
    assert "params" not in lines and "last_lr" not in lines


@pytest.mark.parametrize("kind", [*KINDS[:-1], KFACPreconditioner])
def test_a_model_in_place_of_its_parameters_is_attached(kind: type) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = kind(model)
    x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(3, (10,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.coverage().keys() == dict(model.named_parameters()).keys()
    assert "none" not in optimizer.coverage().values()


@pytest.mark.parametrize("kind", [*KINDS[:-1], KFACPreconditioner])
def test_a_loss_with_parameters_is_trained_with_its_model(kind: type) -> None:
    model, lossfunc = nn.Linear(6, 3), Weighted()
    optimizer = kind(model, lossfunc=lossfunc)
    x, y = torch.randn(10, 6), torch.randint(3, (10,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvoptWarning)
        lossfunc(model(x), y).backward()
        optimizer.step()
    assert [*optimizer.coverage()] == ["weight", "bias", "lossfunc.temperature"]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z * self.temperature, y)


def test_hessian_free_takes_a_model() -> None:
    model = nn.Linear(6, 3)
    optimizer, x, y = HessianFree(model), torch.randn(10, 6), torch.randint(3, (10,))
    before = optimizer.step(lambda: F.cross_entropy(model(x), y))
    assert F.cross_entropy(model(x), y) < before


@with_curvature
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("fused", True, "no fused step"),
        ("adaptive_damping", True, "lost on five of six tasks"),
        ("capturable", True, "CUDA graph"),
        ("dampng", 1.0, "has no option dampng"),
        ("batch_axis", 1, r"write \w+\(model, batch_axis="),
    ],
)
def test_options_that_there_are_not_are_named(kind: type, name: str, value: Any, why: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} .*{why}"):
        kind(nn.Linear(2, 2).parameters(), **{name: value})


@with_curvature
def test_a_closure_without_backward_is_told_of(kind: type) -> None:
    model, x, y = nn.Linear(6, 3), torch.randn(10, 6), torch.randint(3, (10,))
    optimizer = kind(model)
    with pytest.raises(CurvoptError, match="called backward on none"):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    assert optimizer.step(lambda: None) is None  # a batch that is left out


def test_a_preconditioner_behind_its_optimizer_says_so() -> None:
    model, x, y = nn.Linear(6, 3), torch.randn(10, 6), torch.randint(3, (10,))
    optimizer, preconditioner = torch.optim.SGD(model.parameters(), lr=0.1), KFACPreconditioner(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.warns(CurvoptWarning, match=r"Call preconditioner.step\(\) before optimizer.step\(\)"):
        preconditioner.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preconditioner.step()


@every_kind
def test_groups_have_their_own_options_alone(kind: type) -> None:
    _, optimizer = build(kind)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert optimizer.param_groups[1].keys() == optimizer.param_groups[0].keys()
    if kind is not HessianFree:
        with pytest.raises(TypeError, match="curvature_every is an option of the whole optimizer"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "curvature_every": 3})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"damping": value}) for kind in (DiagonalNewton, HessianFree) for value in ("0.1", None)),
        (KFACSGD, {"damping": "0.1"}),
        (EKFACSGD, {"relative_damping": None}),
        *((kind, {"curvature_every": 2.5}) for kind in KINDS[:-1]),
        (KFACSGD, {"rms_clip": "0.1"}),
        (KFACAdamW, {"ema": None}),
        (KFACAdamW, {"wide": 2.5}),
        (EKFACSGD, {"inverse_every": True}),
        (HessianFree, {"cg_iterations": 2.5}),
    ],
)
def test_options_of_the_wrong_type_are_type_errors(kind: type, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=rf"{name}.* must be a .*number, got {value!r}"):
        build(kind, **options)


@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, DiagonalNewton])
def test_no_damping_warns(kind: type) -> None:
    with pytest.warns(CurvoptWarning, match="damping=0"):
        build(kind, damping=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(kind), build(KFACAdamW)


@with_curvature
def test_a_function_in_place_of_a_loss_module_says_what_to_write(kind: type) -> None:
    model, optimizer = build(kind)
    with pytest.raises(TypeError, match=r"got function cross_entropy as lossfunc.*attach\(model\)"):
        optimizer.attach(model, F.cross_entropy)


def evaluate(optimizer: torch.optim.Optimizer, objective: Callable[[], Tensor]) -> Tensor:
    optimizer.zero_grad()
    value = objective()
    value.backward()
    return value


@with_curvature
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: z.sinh().square().mean()])
def test_maximising_the_negated_loss_takes_the_same_steps(kind: type, loss: Callable[..., Tensor]) -> None:
    weights, x, y = [], torch.randn(16, 6).double(), torch.arange(16) % 3
    for sign in (1, -1):
        model, optimizer = build(kind, maximize=sign < 0, curvature_every=2)
        for _ in range(7):
            optimizer.step(partial(evaluate, optimizer, lambda model=model, sign=sign: sign * loss(model(x), y)))
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*weights)


def test_hessian_free_loads_a_state_more_than_once() -> None:
    model, optimizer = build(HessianFree)
    x, y = torch.randn(8, 6).double(), torch.arange(8) % 3
    optimizer.step(lambda: F.cross_entropy(model(x), y))
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state["state"]
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_a_preconditioner_has_its_options_in_its_defaults() -> None:
    optimizer = KFACPreconditioner(nn.Linear(3, 2))
    assert {*inspect.signature(KFACPreconditioner).parameters} - {"model", "attached"} <= optimizer.defaults.keys()
    assert "rms_clip: None" in repr(optimizer)
