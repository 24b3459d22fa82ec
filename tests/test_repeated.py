"""Parameters of modules without a rule in operations that repeat them for the samples: read off the graph, right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case, cross_entropy, labels, normal
from checks import check_all, extended
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvopt import backpack, extend
from curvopt.core.derivatives.rules import DefaultRule
from curvopt.extensions import KFAC, KFLR, BatchGrad, DiagGGNExact, KFACEmpirical

N = 3
TOKENS = 4


class Own(nn.Module):
    """A layer, something done to its output with two parameters of one's own, and a head."""

    def __init__(self, use: Callable[[Own, Tensor], Tensor], shape: tuple[int, ...], other: tuple[int, ...] = ()):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.p, self.q = nn.Parameter(torch.randn(shape) / 2), nn.Parameter(torch.randn(other) / 2)
        self.register_buffer("constant", torch.randn(TOKENS, 4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, self.first(x)))).flatten(1)


def class_token(m: Own, h: Tensor) -> Tensor:
    return torch.cat([m.p.expand(len(h), -1, -1), h], 1) + m.q


def windows(m: Own, h: Tensor) -> Tensor:
    """Attention with a learned bias for every distance."""
    distances = torch.arange(TOKENS).unsqueeze(1) - torch.arange(TOKENS) + TOKENS - 1
    scores = h @ h.mT + m.p[distances.flatten().to(h.device)].view(TOKENS, TOKENS, 1).permute(2, 0, 1).contiguous()
    return scores.softmax(-1) @ h + m.q


def in_place(m: Own, h: Tensor) -> Tensor:
    h = h * 1
    h.mul_(m.p)
    h += m.q
    return h


#: what is done with p and q, and their shapes
USES: dict[str, tuple[Callable[[Own, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "scale and shift": (lambda m, h: h * m.p + m.q, (4,), (4,)),
    "from the left": (lambda m, h: m.q - m.p * h, (4,), (1, TOKENS, 1)),
    "multiples": (lambda m, h: torch.sub(torch.add(h, m.p, alpha=2), m.q, alpha=0.5), (4,), ()),
    "in place": (in_place, (4,), (TOKENS, 4)),
    "class token and positions": (class_token, (1, 1, 4), (1, TOKENS + 1, 4)),
    "repeat": (lambda m, h: h + m.p.repeat(len(h), TOKENS, 1) + m.q.repeat(len(h), 1, 1), (1, 4), (1, TOKENS, 4)),
    "temperature": (lambda m, h: h * m.p.exp() + F.softplus(m.q), (), (4,)),
    "norm of a parameter": (lambda m, h: h * (m.p / 2).tanh().square() + m.q, (TOKENS, 1), (4,)),
    "residual": (lambda m, h: h + m.p * torch.tanh(h) + m.q * h, (4,), ()),
    "used twice": (lambda m, h: (h * m.p + m.p.sin()) * m.q, (4,), (4,)),
    "a part": (lambda m, h: h + m.p[:TOKENS] + m.q[None, :, None, None][:, :TOKENS, 0], (TOKENS + 2, 4), (9,)),
    "a constant": (lambda m, h: h + m.constant * m.p + (m.q + 1), (4,), (4,)),
    "as long as the batch": (lambda m, h: h + (m.constant[:N] * m.p).sum(0) + m.q, (4,), ()),
    "of its own for each sample": (lambda m, h: h * m.p + m.q, (N, 1, 4), (N, TOKENS, 4)),
    "mask": (lambda m, h: torch.where(h.detach() > 0, m.p, h) + torch.where(h.detach() < 0, h, m.q), (4,), ()),
    "bias of distances": (windows, (2 * TOKENS - 1, 1), ()),
    "samples trade places": (lambda m, h: (h.flip(0) * m.p).roll(1, 0) + m.q, (4,), (4,)),
    "samples mix": (lambda m, h: (h - h.mean(0)) * m.p + m.q, (4,), (4,)),
    "sequence first": (lambda m, h: (h.transpose(0, 1) * m.p + m.q).transpose(0, 1), (4,), (TOKENS, 1, 4)),
    "statistics of the batch": (lambda m, h: (h - (h.detach() * m.p).mean(0)) * m.q, (4,), (4,)),
    "power": (lambda m, h: (h * m.p).abs().add(1) ** m.q, (4,), (4,)),
}
#: of which a parameter meets the samples in another operation
CALLED_AGAIN = {"power"}


def calls_of_default_rule(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    called: list[str] = []
    jac_t = DefaultRule.jac_t
    monkeypatch.setattr(DefaultRule, "jac_t", lambda *a: (called.append(a[1].path), jac_t(*a))[1])
    return called


@pytest.mark.filterwarnings("ignore:the first axis does not hold")
@pytest.mark.parametrize("name", USES)
def test_quantities_equal_the_dense_reference(name: str, monkeypatch: pytest.MonkeyPatch):
    use, shape, other = USES[name]
    called = calls_of_default_rule(monkeypatch)
    check_all(extended(Case("", lambda: Own(use, shape, other), normal(N, TOKENS, 3), cross_entropy(), labels)))
    assert bool(called) == (name in CALLED_AGAIN)


class Block(nn.Module):
    """A residual block with a scale for its branch, which is dropped for some samples, as ConvNeXt has it."""

    def __init__(self, drop: float, times: Callable[[Tensor, Tensor], Tensor] = torch.mul):
        super().__init__()
        self.inner, self.scale, self.drop, self.times = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), drop, times

    def forward(self, x: Tensor) -> Tensor:
        branch = self.times(torch.tanh(self.inner(x)), self.scale)
        return x + (branch * (torch.rand(len(x), 1, device=x.device) > self.drop) if self.drop else branch)


def network(*blocks: nn.Module) -> nn.Sequential:
    return extend(nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 2)).double())


def test_blocks_that_draw_random_numbers():
    model, x, y = network(Block(0.3), Block(0.3)), torch.randn(6, 3).double(), torch.randint(2, (6,))
    torch.manual_seed(0)
    losses = F.cross_entropy(model(x), y, reduction="none") / 6
    expected = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    torch.manual_seed(0)
    with backpack(BatchGrad(), KFAC()):
        F.cross_entropy(model(x), y).backward()
    for p, *gradients in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(gradients))
        assert all(factor.isfinite().all() for factor in p.kfac)


def test_factors_are_those_of_a_module_that_is_called_again():
    x, y = torch.randn(6, 3).double(), torch.randint(2, (6,))
    model = network(Block(0), Block(0, lambda x, p: torch.addcmul(torch.zeros_like(x), x, p)))
    model[2].load_state_dict(model[1].state_dict())
    factors = []
    for block in (model[1], model[2]):
        with backpack(KFLR(), KFACEmpirical()):
            F.cross_entropy(nn.Sequential(model[0], block, model[3])(x), y).backward()
        factors.append([*block.scale.kflr, *block.scale.kfac_empirical])
    for read_off, called in zip(*factors, strict=True):
        torch.testing.assert_close(read_off, called)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fields_and_hooks_of_blocks_that_are_computed_twice(checkpointed: bool):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(0)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False) if checkpointed else self.block(x)

    model, x, y = network(Checkpointed()), torch.randn(6, 3).double(), torch.randint(2, (6,))
    hooked: list[nn.Module] = []
    with backpack(BatchGrad(), DiagGGNExact(), extension_hook=hooked.append):
        F.cross_entropy(model(x), y).backward()
    block = model[1].block
    assert sorted(map(id, hooked)) == sorted(map(id, (model[0], model[2], block, block.inner)))
    torch.testing.assert_close(block.scale.grad_batch.sum(0), block.scale.grad)
    assert block.scale.diag_ggn_exact.shape == (4,)
