"""What activation checkpoints let go of is computed again once, and let go of again."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvopt import backpack, extend
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact, Variance

N, T, D = 3, 5, 4


class Block(nn.Module):
    """Attention and a gated layer, of functions, with a low-rank adapter and a norm of its own."""

    def __init__(self, checkpointed: bool, outer: bool = False):
        super().__init__()
        shapes = {"scale": (D,), "qkv": (3 * D, D), "a": (2, D), "b": (2 * D, 2), "down": (D, D)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))
        self.frozen = nn.Parameter(torch.randn(2 * D, D), requires_grad=False)
        self.checkpointed, self.outer = checkpointed, outer
        self.runs = 0
        self.alive: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)

    def block(self, x: Tensor) -> Tensor:
        self.runs += 1
        h = self.scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        q, k, v = F.linear(h, self.qkv).chunk(3, -1)
        x = x + F.softmax(q @ k.mT, -1) @ v
        gate = checkpoint(self.gated, x, use_reentrant=False) if self.outer else self.gated(x)
        self.alive.append(weakref.ref(gate))
        return x + gate @ self.down

    def gated(self, x: Tensor) -> Tensor:
        up, gate = F.linear(x, self.frozen + self.b @ self.a).chunk(2, -1)
        gate = torch.sigmoid(gate)
        self.alive.append(weakref.ref(gate))
        return up * gate


def network(checkpointed: bool, outer: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(checkpointed, outer) for _ in range(3)]
    return extend(nn.Sequential(nn.Linear(D, D), *blocks, nn.Flatten(), nn.Linear(T * D, 3)).double())


def loss(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    x, y = torch.randn(N, T, D).double(), torch.randint(3, (N,))
    return F.cross_entropy(model(x), y)


def blocks_of(model: nn.Module) -> list[Block]:
    return [module for module in model if isinstance(module, Block)]


@pytest.mark.parametrize("outer", [False, True])
def test_blocks_run_once_more_than_for_the_gradient_and_for_blocks_inside(outer: bool):
    model = network(True, outer)
    for _ in range(2):  # the network's first backward looks for the samples, too
        for block in blocks_of(model):
            block.runs = 0
        value = loss(model)
        with backpack(BatchGrad(), Variance()):
            value.backward()
    assert [block.runs for block in blocks_of(model)] == [3 + outer] * 3


@pytest.mark.parametrize("outer", [False, True])
def test_what_is_not_needed_is_let_go_before_the_backward_begins(outer: bool):
    model = network(True, outer)
    found: list[bool] = []
    model[-1].register_full_backward_hook(
        lambda *_: found.extend(ref() is None for block in blocks_of(model) for ref in block.alive)
    )
    with backpack(BatchGrad()):
        loss(model).backward()
    assert len(found) >= 12 and all(found)


@pytest.mark.parametrize("change", [lambda model: None, lambda model: model[2].requires_grad_(False)])
@pytest.mark.parametrize("outer", [False, True])
def test_fields_are_those_of_the_network_without_checkpoints(outer: bool, change: Callable):
    models = [network(False), network(True, outer)]
    for model in models:
        change(model)
        with backpack(BatchGrad(), KFLR(), DiagGGNExact()):
            loss(model).backward()
    for plain, checkpointed in zip(*(model.parameters() for model in models), strict=True):
        for field in ("grad_batch", "kflr", "diag_ggn_exact") if plain.requires_grad else ():
            torch.testing.assert_close(getattr(checkpointed, field), getattr(plain, field))
