"""Small behaviours that programs written for BackPACK rely on.

Tests of `core/backward/module_io.py`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Lambda
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from curvopt import CurvoptError, backpack, extend
from curvopt.extensions import (
    HMP,
    KFAC,
    KFLR,
    KFRA,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    Variance,
)

# ------------------------------------------------------------------------------------------------- nothing to compute


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian, KFAC, HMP])
@pytest.mark.parametrize("loss", [extend(nn.CrossEntropyLoss()), F.cross_entropy], ids=["extended", "functional"])
@pytest.mark.parametrize("body", [lambda z: z, extend(nn.Sequential(nn.Tanh(), nn.Flatten()))], ids=["leaf", "layers"])
def test_a_loss_behind_no_parameter_asks_for_nothing(extension: type[Extension], loss: Callable, body: Callable):
    z, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 1, 1])
    (expected,) = torch.autograd.grad(loss(body(z), y), z)
    with backpack(extension()):
        loss(body(z), y).backward()
    assert torch.equal(z.grad, expected)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_parameter_behind_the_loss_is_not_left_out(hidden: bool):
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    z = checkpoint(layer, x, use_reentrant=True) if hidden else layer(x)
    remedy = "use_reentrant=False" if hidden else r"extend\(model\)"
    with pytest.raises(CurvoptError, match=remedy), backpack(DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(z, torch.tensor([0, 2, 1, 1])).backward()


# ---------------------------------------------------------------------------------- what hooks see of a module's call


class Inputs(nn.Module):
    """A module with a parameter by the name that hooks look for."""

    def __init__(self) -> None:
        super().__init__()
        self.input0 = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.input0


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
    "norms": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.LayerNorm(6), nn.Linear(6, 3)),
    "train-mode batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 2), nn.Flatten()),
    "in place": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
    "recurrent": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.LSTM(2, 3, batch_first=True), Lambda(lambda z: z[0][:, -1])
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_hooks_see_the_inputs_of_a_module(name: str):
    extensions: list[type[Extension]] = [DiagGGNMC]
    if not name.startswith("train-mode"):
        extensions += [BatchGrad, Variance, KFLR]
    if name in ("mlp", "in place", "convolution"):
        extensions.append(KFRA)
    for extension in extensions:
        hooks_see_the_inputs(NETWORKS[name]().double(), extension)


def hooks_see_the_inputs(model: nn.Module, extension: type[Extension]) -> None:
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 2, 1, 1, 0])
    expected: dict[nn.Module, Tensor] = {}
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        expected[module] = args[0].clone()

    def hook(module: nn.Module) -> None:
        seen[module] = module.input0
        assert "input0" not in {**module.state_dict(), **dict(module.named_buffers())}

    of_own = {module for module in extend(model) if any(True for _ in module.parameters())}
    for module in of_own:
        module.register_forward_hook(record)
    with backpack(extension(), extension_hook=hook):
        loss = extend(nn.CrossEntropyLoss())(model(x), y)
        model.eval()  # which changes nothing that has been computed
        loss.backward()
    assert set(seen) == of_own
    for module, found in seen.items():
        assert_close(found, expected[module].detach())
        assert not hasattr(module, "input0")


def test_names_that_a_module_has_itself_are_left_alone():
    model, seen = extend(nn.Sequential(Inputs(), nn.Linear(4, 3))), {}
    with backpack(BatchGrad(), extension_hook=lambda module: seen.update({module: module.input0})):
        F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 2, 1, 1, 0])).backward()
    assert seen[model[0]] is model[0].input0


def test_a_hook_may_change_the_buffers_of_a_module():
    model, y = extend(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval())), torch.tensor([0, 2, 1, 1, 0])

    def hook(module: nn.Module) -> None:
        module.register_buffer("mean_input", module.input0.mean(0))

    with backpack(BatchGrad(), extension_hook=hook):
        F.cross_entropy(model(x := torch.randn(5, 4)), y).backward()
    assert_close(model[0].mean_input, x.mean(0))
    assert "0.mean_input" in model.state_dict()


def test_inputs_are_differentiable_where_fields_are():
    model, x, seen = extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))), torch.randn(5, 4), []
    with backpack(BatchGrad(), extension_hook=lambda module: seen.append(module.input0)):
        F.cross_entropy(model(x), torch.tensor([0, 2, 1, 1, 0])).backward(create_graph=True)
    assert any(input0.requires_grad for input0 in seen)
    torch.autograd.grad(sum(input0.sum() for input0 in seen), model[0].weight)


def test_what_hooks_might_see_is_let_go():
    model, inputs = extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))), []
    model[2].register_forward_hook(lambda module, args, output: inputs.append(weakref.ref(args[0])))
    gc.collect()
    gc.disable()
    try:
        loss = F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 2, 1, 1, 0]))
        with backpack(BatchGrad(), extension_hook=lambda module: module.input0):
            loss.backward()
        del loss
        assert inputs[0]() is None
    finally:
        gc.enable()
