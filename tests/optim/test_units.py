"""The spellings of one loop: whatever factor a loss has, and wherever it is taken out again, steps are equal.

Tests of `optim/accumulation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt import CurvoptError
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW, KFACPreconditioner

SIZES = [8, 12, 6, 16, 4]  # of the batches
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "KFACSGD": lambda model, **options: KFACSGD(model, fisher="exact", curvature_every=1, **options),
    "EKFACSGD": lambda model, **options: EKFACSGD(model, fisher="exact", curvature_every=1, **options),
    "KFACAdamW": lambda model, **options: KFACAdamW(model, fisher="exact", curvature_every=1, eps=1e-12, **options),
    "DiagonalNewton": lambda model, **options: DiagonalNewton(
        model, curvature="diag_ggn_exact", curvature_every=1, **options
    ),
    "KFACPreconditioner": lambda model, **options: KFACPreconditioner(
        model, fisher="exact", curvature_every=1, damping=0.1, **options
    ),
}


BOUNDS = {"KFACSGD": 1e-14, "EKFACSGD": 1e-14, "KFACAdamW": 1e-6}  # eps does not scale with the loss


class Loop:
    """A training loop: its backwards, and its steps."""

    def __init__(self, name: str, sizes: list[int], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.optimizer = OPTIMIZERS[name](self.model, **options)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1) if name == "KFACPreconditioner" else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        self.batches = [(torch.randn(N, 5).double(), torch.randint(3, (N,))) for N in sizes]
        self.N = 1

    def train(self, backward: Callable[[Loop, Tensor, Tensor], None], scaled: bool = False) -> list[Tensor]:
        for x, y in self.batches:
            self.N = len(x)
            self.model.zero_grad()
            backward(self, x, y)
            if self.inner is not None:
                self.optimizer.step()
            stepped = self.inner or self.optimizer
            if scaled:
                self.scaler.step(stepped)
                self.scaler.update()
            else:
                stepped.step()
        return [p.detach().clone() for p in self.model.parameters()]


def mean(loop: Loop, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(loop.model(x), y).backward()


def summed(loop: Loop, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(loop.model(x), y, reduction="sum").backward()


def sum_over_n(loop: Loop, x: Tensor, y: Tensor) -> None:
    (F.cross_entropy(loop.model(x), y, reduction="sum") / len(x)).backward()


def sum_then_divided(loop: Loop, x: Tensor, y: Tensor) -> None:
    summed(loop, x, y)
    for p in loop.model.parameters():
        assert p.grad is not None
        p.grad /= len(x)


def in_two_backwards(loop: Loop, x: Tensor, y: Tensor) -> None:
    for part in (slice(None, None, 2), slice(1, None, 2)):
        (F.cross_entropy(loop.model(x[part]), y[part]) / 2).backward()


def in_unequal_parts(loop: Loop, x: Tensor, y: Tensor) -> None:
    for part in (slice(3), slice(3, None)):
        F.cross_entropy(loop.model(x[part]), y[part], reduction="sum").backward()


def two_losses(loop: Loop, x: Tensor, y: Tensor) -> None:
    for share in (0.25, 0.75):
        (share * F.cross_entropy(loop.model(x), y)).backward()


def seven_times(loop: Loop, x: Tensor, y: Tensor) -> None:
    (7 * F.cross_entropy(loop.model(x), y)).backward()


def scaled(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.scaler.scale(F.cross_entropy(loop.model(x), y)).backward()


def scaled_and_unscaled(loop: Loop, x: Tensor, y: Tensor) -> None:
    scaled(loop, x, y)
    loop.scaler.unscale_(loop.inner or loop.optimizer)


#: By spelling: the argument that it needs.
SPELLINGS: dict[Callable[[Loop, Tensor, Tensor], None], str | None] = {
    summed: None,
    sum_over_n: None,
    sum_then_divided: "gradient_scale",
    in_two_backwards: None,
    in_unequal_parts: None,
    two_losses: None,
    seven_times: None,
    scaled: None,
    scaled_and_unscaled: "scaler",
}


#: A scaler does not step the preconditioner.
PAIRS = [(name, each) for name in OPTIMIZERS for each in SPELLINGS if (name, each) != ("KFACPreconditioner", scaled)]


@pytest.mark.parametrize(("name", "spelling"), PAIRS, ids=lambda value: getattr(value, "__name__", value))
def test_every_spelling_of_a_loop_takes_the_steps_of_a_mean(name: str, spelling: Callable) -> None:
    # as in AdamW, moments are sums over steps, which weigh batches by their sizes where the loss is a sum
    sizes = [8] * 5 if name == "KFACAdamW" else SIZES
    loop = Loop(name, sizes)
    argument = SPELLINGS[spelling]
    if argument is not None:
        loop.optimizer.attach(
            loop.model, **{argument: {"scaler": loop.scaler, "gradient_scale": lambda: 1 / loop.N}[argument]}
        )
    found = loop.train(spelling, scaled="scaled" in spelling.__name__)
    expected = Loop(name, sizes).train(mean)
    start = [p.detach() for p in Loop(name, sizes).model.parameters()]
    for a, b, before in zip(found, expected, start, strict=True):
        assert (b - before).abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=BOUNDS.get(name, 1e-10))


#: Sums of losses of rows, and the argument that they need.
SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "squared error": (lambda z, t: F.mse_loss(z, t, reduction="sum"), {}),
    "Huber": (lambda z, t: F.huber_loss(z, t, reduction="sum", delta=5), {}),
    "squares by hand": (lambda z, t: (z - t).square().sum(1).sum(), {}),
    "by hand": (lambda z, t: (z - t).cosh().log().mean(1).sum(), {}),
    "entries": (lambda z, t: F.gaussian_nll_loss(z, t, torch.ones_like(z), reduction="sum"), {"loss_reduction": "sum"}),
}


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize("name", ["KFACSGD", "KFACAdamW", "DiagonalNewton"])
def test_a_sum_over_the_rows_of_the_whole_batch_may_come_in_unequal_parts(name: str, loss: str) -> None:
    f, options = SUMS[loss]

    def in_parts(*parts: slice) -> list[Tensor]:
        def backward(loop: Loop, x: Tensor, y: Tensor) -> None:
            for part in parts:
                (f(loop.model(x[part]), x[part, :3]) / loop.N).backward()

        return Loop(name, [8] * 3, **options).train(backward)

    found, expected = in_parts(slice(5), slice(5, None)), in_parts(slice(None))
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUNDS.get(name, 1e-10))


@pytest.mark.parametrize("name", ["KFACSGD", "EKFACSGD", "KFACAdamW", "DiagonalNewton"])
def test_gradients_that_a_scaler_has_divided_by_an_unknown_scale_are_refused(name: str) -> None:
    loop = Loop(name, SIZES)
    with pytest.raises(CurvoptError, match=rf"say {name}\(model, scaler=scaler\)"):
        loop.train(scaled_and_unscaled, scaled=True)


@pytest.mark.parametrize("name", ["KFACSGD", "KFACAdamW"])
def test_a_scaler_that_was_not_given_skips_overflows(name: str) -> None:
    loop = Loop(name, SIZES[:1])
    x, y = loop.batches[0]
    loop.train(scaled, scaled=True)
    before, scale = [p.detach().clone() for p in loop.model.parameters()], loop.scaler.get_scale()
    loop.model.zero_grad()
    scaled(loop, x, y)
    loop.model[0].weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert all(torch.equal(p, old) for p, old in zip(loop.model.parameters(), before, strict=True))
    assert loop.scaler.get_scale() < scale
    loop.train(scaled, scaled=True)
    assert all(not torch.equal(p, old) for p, old in zip(loop.model.parameters(), before, strict=True))


def test_a_preconditioner_wants_gradients_without_the_scale() -> None:
    loop = Loop("KFACPreconditioner", SIZES)
    loop.optimizer.attach(loop.model, scaler=loop.scaler)
    with pytest.raises(CurvoptError, match=r"scaler.unscale_\(optimizer\) before preconditioner.step\(\)"):
        loop.train(scaled, scaled=True)


def test_a_gradient_scale_may_be_a_number() -> None:
    def halved(loop: Loop, x: Tensor, y: Tensor) -> None:
        mean(loop, x, y)
        for p in loop.model.parameters():
            assert p.grad is not None
            p.grad /= 2

    found = Loop("KFACSGD", SIZES, gradient_scale=0.5).train(halved)
    for a, b in zip(found, Loop("KFACSGD", SIZES).train(mean), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
