"""Curvature optimizers keep the contract of ``torch.optim``: options, types, messages, ``maximize``.

Tests of `optim/options.py`.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import covered, silent
from torch import Tensor, nn

from curvopt import CurvoptError, CurvoptWarning
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner

KINDS = [KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton, HessianFree]
with_curvature = pytest.mark.parametrize("kind", KINDS[:-1])
every_kind = pytest.mark.parametrize("kind", KINDS)
every_collector = pytest.mark.parametrize("kind", [*KINDS[:-1], KFACPreconditioner])
X, Y = torch.linspace(-1, 1, 96).view(16, 6).double().sin(), torch.arange(16) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def build(kind: type, **options: Any) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = kind(model.parameters(), **options)
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor] = F.cross_entropy) -> Tensor:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        return value

    return optimizer.step(evaluate)


@pytest.mark.parametrize("kind", [*KINDS, KFACPreconditioner])
def test_defaults_and_print_have_every_option(kind: type) -> None:
    names = {*inspect.signature(kind).parameters} - {"params", "model", "attached", "options"}
    optimizer = kind(network())
    assert names <= optimizer.defaults.keys()
    lines = [line.split(":")[0].strip() for line in repr(optimizer).splitlines()]
    if kind is not KFACPreconditioner:
        assert all(lines.count(name) == 1 for name in names), repr(optimizer)
    assert "params" not in lines and "last_lr" not in lines
    assert ("rms_clip: None" in repr(optimizer)) == (kind is KFACPreconditioner)


@every_collector
def test_a_model_in_place_of_its_parameters_is_attached(kind: type) -> None:
    model = network()
    optimizer = kind(model)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert optimizer.coverage().keys() == dict(model.named_parameters()).keys() and covered(optimizer)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z * self.temperature, y)


@pytest.mark.filterwarnings("ignore::curvopt.CurvoptWarning")
@every_collector
def test_a_loss_with_parameters_is_trained_with_its_model(kind: type) -> None:
    model, lossfunc = nn.Linear(6, 3).double(), Weighted().double()
    optimizer = kind(model, lossfunc=lossfunc)
    lossfunc(model(X), Y).backward()
    optimizer.step()
    assert [*optimizer.coverage()] == ["weight", "bias", "lossfunc.temperature"]


def test_hessian_free_takes_a_model() -> None:
    model = network()
    before = step(model, HessianFree(model))
    assert F.cross_entropy(model(X), Y) < before


@with_curvature
def test_a_closure_without_backward_is_told_of(kind: type) -> None:
    model, optimizer = build(kind)
    with pytest.raises(CurvoptError, match="called backward on none"):
        optimizer.step(lambda: F.cross_entropy(model(X), Y))
    assert optimizer.step(lambda: None) is None  # a batch that is left out


def test_a_preconditioner_behind_its_optimizer_says_so() -> None:
    model = network()
    optimizer, preconditioner = torch.optim.SGD(model.parameters(), lr=0.1), KFACPreconditioner(model)
    step(model, optimizer)
    with pytest.warns(CurvoptWarning, match=r"Call preconditioner.step\(\) before optimizer.step\(\)"):
        preconditioner.step()
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    with silent():
        preconditioner.step()


@every_kind
def test_groups_have_their_own_options_alone(kind: type) -> None:
    _, optimizer = build(kind)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert optimizer.param_groups[1].keys() == optimizer.param_groups[0].keys()
    if kind is not HessianFree:
        with pytest.raises(TypeError, match="curvature_every is an option of the whole optimizer"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "curvature_every": 3})


ALL, WITH_CURVATURE, LIKE_SGD = (*KINDS,), (*KINDS[:-1],), (KFACSGD, EKFACSGD, DiagonalNewton)
#: Who refuses which option, with which error, and what the message says behind the name of the optimizer.
REFUSED: list[tuple[tuple[type, ...], str, Any, type[Exception], str]] = [
    (WITH_CURVATURE, "fused", True, TypeError, "no fused step"),
    (WITH_CURVATURE, "adaptive_damping", True, TypeError, "lost on five of six tasks"),
    ((HessianFree,), "preconditioner_samples", 10, TypeError, "no preconditioner_samples any more"),
    (WITH_CURVATURE, "capturable", True, TypeError, "CUDA graph"),
    (WITH_CURVATURE, "dampng", 1.0, TypeError, "has no option dampng"),
    (WITH_CURVATURE, "batch_axis", 1, TypeError, r"write \w+\(model, batch_axis="),
    *(((DiagonalNewton, HessianFree), "damping", value, TypeError, "number") for value in ("0.1", None)),
    ((KFACSGD,), "damping", "0.1", TypeError, "number"),
    ((EKFACSGD,), "relative_damping", None, TypeError, "number"),
    (WITH_CURVATURE, "curvature_every", 2.5, TypeError, "number"),
    ((KFACSGD,), "rms_clip", "0.1", TypeError, "number"),
    ((KFACAdamW,), "ema", None, TypeError, "number"),
    ((KFACAdamW,), "wide", 2.5, TypeError, "number"),
    ((KFACAdamW,), "orthogonalize", 1, TypeError, ""),
    ((EKFACSGD,), "inverse_every", True, TypeError, "number"),
    ((HessianFree,), "cg_iterations", 2.5, TypeError, "number"),
    (WITH_CURVATURE, "ema", 1.0, ValueError, ""),
    (WITH_CURVATURE, "curvature_every", 0, ValueError, ""),
    (ALL, "lr", -1.0, ValueError, ""),
    ((*LIKE_SGD, HessianFree), "damping", -1.0, ValueError, ""),
    (LIKE_SGD, "rms_clip", 0.0, ValueError, ""),
    ((KFACSGD,), "fisher", "true", ValueError, ""),
    ((KFACAdamW,), "approx", "sum", ValueError, ""),
    ((KFACAdamW,), "state_dtype", torch.float16, ValueError, ""),
    ((EKFACSGD,), "max_factor_size", 0, ValueError, ""),
    ((DiagonalNewton,), "curvature", "variance", ValueError, ""),
    ((DiagonalNewton,), "mc_samples", 0, ValueError, ""),
    ((DiagonalNewton,), "modify", "square", ValueError, ""),
    ((HessianFree,), "weight_decay", -1.0, ValueError, ""),
    ((HessianFree,), "cg_iterations", 0, ValueError, ""),
    ((HessianFree,), "cg_progress", -1.0, ValueError, ""),
    ((HessianFree,), "cg_decay", -0.1, ValueError, ""),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "why"),
    [(kind, *row) for kinds, *row in REFUSED for kind in kinds],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_options_that_are_refused(kind: type, name: str, value: Any, error: type[Exception], why: str) -> None:
    match = rf"{kind.__name__} .*{why}" if why else rf"{name}|[Ll]earning rate"
    if why == "number":
        match = rf"{name}.* must be a .*number, got {value!r}"
    with pytest.raises(error, match=match):
        build(kind, **{name: value})


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


@every_kind
def test_parameters_and_gradients_that_are_refused(kind: type) -> None:
    phase, table = nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(4, 2))
    with pytest.raises(CurvoptError, match="phase: .*complex"):
        kind([("phase", phase)])
    optimizer = kind([("table", table)])
    if kind is not HessianFree:
        with pytest.raises(CurvoptError, match="complex"):
            optimizer.add_param_group({"params": iter([("phase", phase)])})
        assert len(optimizer.param_groups) == 1
        table.grad = torch.ones(4, 2).to_sparse()
        with pytest.raises(CurvoptError, match="table.*dense gradient.*sparse=False"):
            optimizer.step()


@every_kind
def test_the_state_of_another_optimizer_is_refused(kind: type) -> None:
    model, optimizer = build(kind)
    before = copy.deepcopy(optimizer.state_dict())
    for other in {*KINDS, torch.optim.SGD, torch.optim.Adam} - {kind}:
        state = build(other)
        step(*state)
        whose = f", {other.__name__}; .*Nothing has changed" if other in KINDS[:-1] and kind is not HessianFree else ""
        with pytest.raises(CurvoptError, match=f"state of another optimizer{whose}"):
            optimizer.load_state_dict(state[1].state_dict())
        assert optimizer.state_dict() == before
    step(model, optimizer)


def test_a_subclass_goes_on_with_the_state_of_its_base() -> None:
    base, sub = build(KFACSGD), build(type("Sub", (KFACSGD,), {}))
    step(*base)
    sub[1].load_state_dict(base[1].state_dict())
    with pytest.raises(CurvoptError, match="state of another optimizer, Sub"):
        base[1].load_state_dict(sub[1].state_dict())


@every_kind
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: z.sinh().square().mean()])
def test_maximising_the_negated_loss_takes_the_same_steps(kind: type, loss: Callable[..., Tensor]) -> None:
    weights = []
    for sign in (1, -1):
        model, optimizer = build(kind, maximize=sign < 0, **({} if kind is HessianFree else {"curvature_every": 2}))
        for _ in range(7):
            step(model, optimizer, lambda z, y, sign=sign: sign * loss(z, y))
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*weights)


def test_hessian_free_loads_a_state_more_than_once() -> None:
    model, optimizer = build(HessianFree)
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state["state"]
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
