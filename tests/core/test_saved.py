"""What a graph has is not kept besides; what activation checkpoints let go of is computed again once, and let go of.

Tests of `extending.py`, too.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from curvopt import CurvoptError, backpack, extend
from curvopt.core.layers.affine import Linear
from curvopt.extending import register
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact

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
        self.alive: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)

    def block(self, x: Tensor) -> Tensor:
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


def assert_equal_fields(*models: nn.Module, names: tuple[str, ...] = ("grad_batch", "kflr", "diag_ggn_exact")) -> None:
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        for name in names if p.requires_grad else ():
            torch.testing.assert_close(getattr(q, name), getattr(p, name))


@pytest.mark.parametrize("outer", [False, True])
def test_what_is_not_needed_is_let_go_before_the_backward_begins(outer: bool):
    model = network(True, outer)
    blocks = [module for module in model if isinstance(module, Block)]
    found: list[bool] = []
    model[-1].register_full_backward_hook(
        lambda *_: found.extend(ref() is None for block in blocks for ref in block.alive)
    )
    with backpack(BatchGrad()):
        loss(model).backward()
    assert len(found) >= 12 and all(found)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_fields_are_those_of_the_network_without_checkpoints(outer: bool, frozen: bool):
    models = [network(False), network(True, outer)]
    for model in models:
        if frozen:
            model[2].requires_grad_(False)
        with backpack(BatchGrad(), KFLR(), DiagGGNExact()):
            loss(model).backward()
    assert_equal_fields(*models)


def peak(call: Callable[[], object]) -> float:
    """MiB allocated at most while something runs, beyond what was there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)) / 2**20


def layers() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU())])


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(64, 256), layers(), nn.Linear(256, 3)), (1000, 64)),
    "frozen": (lambda: nn.Sequential(nn.Linear(64, 256), frozen_layers()), (1000, 64)),
    "tokens": (lambda: nn.Sequential(nn.Linear(64, 256), layers(), nn.Flatten(), nn.Linear(2560, 3)), (100, 10, 64)),
    "convolutions": (lambda: nn.Sequential(*convolutions(), nn.Flatten(), nn.Linear(16 * 64, 3)), (200, 3, 8, 8)),
}


def frozen_layers() -> nn.Module:
    """A GELU keeps other tensors than the layer after it."""
    rest = [module for _ in range(6) for module in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*rest, nn.Linear(256, 3)).requires_grad_(False)


def convolutions() -> list[nn.Module]:
    kinds = [(nn.Conv2d(i, 16, 3, padding=1), nn.GELU(), nn.BatchNorm2d(16).eval()) for i in (3, 16, 16, 16)]
    return [module for modules in kinds for module in modules]


def steps(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Training as most write it: the loss of a step lives until that of the next."""
    for _ in range(3):
        loss = F.cross_entropy(model(torch.ones(shape)), torch.zeros(shape[0], dtype=torch.long))
        model.zero_grad()
        loss.backward()


@pytest.mark.parametrize("name", NETS)
def test_an_idle_extended_model_takes_no_more_memory(name: str):
    make, shape = NETS[name]
    torch.manual_seed(0)
    model = make()
    plain = peak(lambda: steps(model, shape))
    extend(model)
    most = 1.03 if name == "frozen" else 1.01  # where nothing trains, the graph keeps less
    assert peak(lambda: steps(model, shape)) < most * plain


def test_an_input_that_changes_in_a_checkpoint_is_refused():
    linear = extend(nn.Linear(D, D)).double()

    def block(x: Tensor) -> Tensor:
        h = torch.tanh(x) * 1.5
        y = linear(h)
        h.mul_(2)
        return torch.tanh(y + h)

    x = torch.randn(N, D).double().requires_grad_()
    with backpack(BatchGrad()), pytest.raises(CurvoptError, match="modified in place"):
        checkpoint(block, x, use_reentrant=False).sum().backward()


def test_saved_tensors_may_be_packed():
    models = [network(False), network(False)]
    with torch.autograd.graph.save_on_cpu(), backpack(BatchGrad(), KFLR()):
        loss(models[0]).backward()
    with backpack(BatchGrad(), KFLR()):
        loss(models[1]).backward()
    assert_equal_fields(*models, names=("grad_batch", "kflr"))


def test_a_graph_that_is_gone_is_said_to_be():
    model = network(False)
    value = loss(model)
    value.backward()
    with backpack(BatchGrad()), pytest.raises(CurvoptError, match="retain_graph=True"):
        value.backward()


class Doubled(nn.Linear):
    """Does something to its input first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(2 * x, self.weight, self.bias)


@register(Doubled)
class DoubledRule(Linear):
    """Shares the rule of linear layers."""

    def unfold(self, module: nn.Module, x: Tensor) -> Tensor:
        return super().unfold(module, 2 * x)


def test_a_rule_may_be_shared_by_layers_that_do_something_to_their_input():
    model, x = extend(nn.Sequential(nn.Linear(D, D), Doubled(D, 3))), torch.randn(N, D)
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), torch.arange(N)).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_blocks_are_found_when_the_backward_has_passed_what_follows_them():
    torch.manual_seed(0)
    block, out = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), nn.Linear(D, 3)
    model, x, last = extend(nn.Sequential(block, out)).double(), torch.randn(N, T, D).double(), torch.arange(N)
    with backpack(BatchGrad()):
        h = checkpoint(block, x.requires_grad_(), use_reentrant=False)
        F.cross_entropy(out(h)[torch.arange(N), last], torch.arange(N)).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
