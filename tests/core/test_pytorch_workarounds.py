"""Faults of PyTorch that the engine avoids. A test that fails says that one is mended: then its workaround can go."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import Lambda
from checks import columns_per_sweep
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.core import pytorch_workarounds
from curvopt.extensions import DiagGGNExact

DOUBLE = {"dtype": torch.float64}


def by_differences(function, x: Tensor, v: Tensor, eps: float = 1e-5) -> Tensor:
    """Derivative of a function along v."""
    return (function(x + eps * v) - function(x - eps * v)) / (2 * eps)


def slope_of(function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def hessian_times(function, x: Tensor, v: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(slope, x, v)[0]


def test_second_derivatives_of_weight_norm_take_the_norms_as_fixed():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2, **DOUBLE))
    x = torch.randn(4, 3, **DOUBLE)
    direction = layer.parametrizations.weight.original1

    def loss(v: Tensor) -> Tensor:
        weight = torch._weight_norm(v, layer.parametrizations.weight.original0, 0)
        return F.linear(x, weight).tanh().sum()

    along = torch.randn_like(direction)
    expected = by_differences(lambda v: slope_of(loss, v), direction.detach(), along)
    assert not torch.allclose(hessian_times(loss, direction, along), expected, rtol=1e-4, atol=1e-6)
    assert pytorch_workarounds.WRONG_TWICE.name == "WeightNormInterfaceBackward0"


def test_third_derivatives_of_layer_norm_are_wrong():
    x, u, v = torch.randn(3, 2, 5, **DOUBLE)
    weight = torch.randn(5, **DOUBLE)

    def curvature(x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.layer_norm(x, (5,), weight).pow(3).sum(), x, create_graph=True)
        return (torch.autograd.grad(slope, x, u, create_graph=True)[0] * u).sum()

    at = x.clone().requires_grad_()
    (third,) = torch.autograd.grad(curvature(at), at)
    expected = by_differences(lambda x: curvature(x).detach(), x, v)
    assert not torch.allclose((third * v).sum(), expected, rtol=1e-3)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_second_derivatives_drop_a_bias_without_a_weight(norm: str):
    x, p = torch.randn(4, 3, **DOUBLE), torch.randn(3, **DOUBLE)

    def loss(b: Tensor) -> Tensor:
        out = F.layer_norm(x, (3,), None, b) if norm == "layer" else F.batch_norm(x, None, None, None, b, training=True)
        return out.pow(3).sum()

    along = torch.randn(3, **DOUBLE)
    expected = by_differences(lambda b: slope_of(loss, b), p, along)
    try:
        found = hessian_times(loss, p, along)
    except RuntimeError:  # nothing depends on the bias any more
        return
    assert not torch.allclose(found, expected, rtol=1e-4)


def test_several_vectors_through_a_batch_norm_of_one_image_are_wrong():
    """Before a convolution in channels-last layout."""
    inner = nn.Conv2d(2, 4, 3).double().to(memory_format=torch.channels_last)
    x = torch.randn(1, 2, 6, 6, **DOUBLE).requires_grad_()
    out = inner(nn.BatchNorm2d(2).double()(x))
    vectors = torch.randn(3, *out.shape, **DOUBLE)
    single = torch.stack([torch.autograd.grad(out, x, vector, retain_graph=True)[0] for vector in vectors])
    together = torch.autograd.grad(out, x, vectors, retain_graph=True, is_grads_batched=True)[0]
    assert not torch.allclose(single, together)
    assert pytorch_workarounds.wrong_together([out])


def test_several_columns_of_one_image_pass_a_batch_norm_before_a_channels_last_convolution():
    """PyTorch's batching rule mistakes their strides."""
    for seed in range(20):
        torch.manual_seed(seed)
        inner = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        model = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.BatchNorm2d(2), inner, nn.Flatten(), nn.Linear(24, 3))
        model, lossfunc = extend(model.eval().double()), extend(nn.CrossEntropyLoss())
        x, y = torch.randn(1, 2, 5, 4).double(), torch.randint(3, (1,))
        found = []
        for columns in (1, None):
            with columns_per_sweep(columns), backpack(DiagGGNExact()):
                lossfunc(model(x), y).backward()
            found.append([p.diag_ggn_exact for p in model.parameters()])
        assert_close(*found)


class Clamp(torch.autograd.Function):
    """A straight-through estimator, as they were written before 2018."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.data * (ctx.saved_tensors[0].abs() <= 1)


CRASH = """
x = torch.ones(3, requires_grad=True)
torch.autograd.grad(Clamp.apply(x), x, torch.ones(2, 3), is_grads_batched=True)
"""


def test_data_of_several_vectors_crashes():
    code = f"import torch\nfrom torch import Tensor\n{inspect.getsource(Clamp)}\n{CRASH}"
    crash = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert crash.returncode < 0, crash.stderr


def test_several_columns_pass_a_function_that_takes_data():
    found = []
    for function in (Clamp.apply, lambda x: x.clamp(-1, 1)):
        torch.manual_seed(0)
        net = extend(nn.Sequential(nn.Linear(3, 4), Lambda(function), nn.Linear(4, 3)).double())
        x, y = torch.randn(5, 3, **DOUBLE), torch.randint(3, (5,))
        with backpack(DiagGGNExact()), columns_per_sweep(3):
            F.cross_entropy(net(x), y).backward()
        found.append([p.diag_ggn_exact for p in net.parameters()])
    assert_close(*found)


def test_compiled_code_is_not_guarded_against_hooks():
    torch.compiler.reset()
    layer, seen = nn.Linear(2, 2), list[object]()
    compiled = torch.compile(layer, backend="eager")
    compiled(torch.ones(1, 2))
    layer.register_forward_hook(lambda *args: seen.append(args))
    compiled(torch.ones(1, 2))
    assert not seen
    pytorch_workarounds.forget_compiled_code()
    compiled(torch.ones(1, 2))
    assert seen
