"""Every loop that trains with AdamW trains with curvature optimizers, attached and with their defaults.

Tests of `optim/empirical.py`, too.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Net
from checks import generator
from optimizer_cases import counters, covered, descend, silent
from torch import Tensor, distributions, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.workflows import OPTIMIZERS, WORKFLOWS, adamw, train
from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.core.backward.backward_pass import Request
from curvopt.extensions import KFAC
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW, KFACPreconditioner
from curvopt.optim.curvature import Listening
from curvopt.optim.diagonal_newton import CurvatureDiagonal
from curvopt.optim.state import curvature_of

every_kind = pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton])
quiet = pytest.mark.filterwarnings("ignore::curvopt.CurvoptWarning")
_generator = generator(0)
x, y = torch.randn(32, 8, generator=_generator).double(), torch.arange(32) % 3
t = torch.randn(32, 3, generator=_generator).double()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def attached(kind: Callable, net: Callable[[], nn.Module] | None = None, **options: object) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = (net or small)()
    optimizer = kind(model.parameters(), **({} if net else {"curvature_every": 1}), **options)
    optimizer.attach(model)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, loss: Callable[[Tensor], Tensor], steps: int = 1) -> list[float]:
    return descend(optimizer, lambda: loss(model(x)), steps)


def classes(z: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


by_adamw = cache(lambda name: train(name, adamw))


@quiet
@pytest.mark.parametrize("kind", ["KFACSGD", "KFACAdamW"])
@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_loss_falls_at_least_as_with_adamw(name: str, kind: str) -> None:
    start, end = by_adamw(name)
    found = train(name, OPTIMIZERS[kind])[1]
    assert found < end + 0.1 * abs(start - end) + 1e-3, (start, end, found)


def without_samples(model: nn.Module) -> Tensor:
    """A loss with layers that are called inside of a backward."""
    return F.cross_entropy(model[2](checkpoint(model[1], model[0](x), use_reentrant=True)), y)


@every_kind
def test_a_loss_of_a_mean_over_the_batch_takes_the_batch_as_one_sample(kind: Callable) -> None:
    model, optimizer = attached(kind)
    with pytest.warns(CurvoptWarning, match="takes a batch as one sample.*couples samples"):
        step(model, optimizer, lambda z: z.mean(0).square().sum())
    assert covered(optimizer) and "empirical" not in optimizer.metrics()


@every_kind
def test_rows_that_a_model_is_called_with_one_by_one_are_one_sample(kind: Callable) -> None:
    model, optimizer = attached(kind)
    rows = lambda: torch.stack([F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(32)])  # noqa: E731
    with pytest.warns(CurvoptWarning, match="takes a batch as one sample.*called 32 times with one row each"):
        descend(optimizer, lambda: rows().mean(), 3)
    assert covered(optimizer)


@every_kind
def test_a_call_without_a_batch_axis_is_one_sample(kind: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a later call are samples again."""
    monkeypatch.setattr(CurvatureDiagonal, "draws_of_one_sample", 1)  # as many as for a row

    def trained(*rows: int | slice) -> list[Tensor]:
        model, optimizer = attached(kind)
        for of in (*rows, slice(None)):
            descend(optimizer, lambda: F.mse_loss(model(x[of])[..., :1], x[of][..., :1]))  # noqa: B023
        assert covered(optimizer)
        return list(model.parameters())

    with pytest.warns(CurvoptWarning, match="takes a batch as one sample.*without a batch axis"):
        found = trained(*range(6))
    torch.testing.assert_close(found, trained(*[slice(n, n + 1) for n in range(6)]))


@every_kind
def test_without_samples_gradients_are_taken_as_they_are_until_a_backward_has_some(kind: Callable) -> None:
    model, optimizer = attached(kind)
    with pytest.warns(CurvoptWarning, match="takes plain gradients until a backward has curvature.*use_reentrant"):
        for n in range(5):
            if n == 2:  # a resumed run goes on alike
                state = optimizer.state_dict()
                optimizer = kind(model.parameters(), curvature_every=1)
                optimizer.attach(model)
                optimizer.load_state_dict(state)
            before = weights(model)
            descend(optimizer, lambda: without_samples(model))
            for p, old in zip(model.parameters(), before, strict=True):
                assert p.grad is not None and p.grad.flatten().dot((p - old).flatten()) < 0
    assert {*optimizer.coverage().values()} == {"none"}
    step(model, optimizer, classes)
    assert covered(optimizer)


@quiet
def test_an_optimizer_that_was_replaced_may_go_in_the_middle_of_a_backward() -> None:
    model, optimizer = attached(KFACSGD, small)
    gc.disable()
    try:
        optimizer.itself, optimizer = optimizer, None  # only the collector finds it
        z = model(x)
        z.register_hook(lambda grad: (gc.collect(), grad)[1])
        classes(z).backward()
    finally:
        gc.enable()
    assert all(p.grad is not None for p in model.parameters())


class Reversible(torch.autograd.Function):
    """``x + layer(x)``, computed again in a backward of its own, as in a RevNet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        return x + layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            ctx.layer(x).backward(grads[0])
        return grads[0] + x.grad, None


@pytest.mark.filterwarnings("ignore:.*as one sample")
@every_kind
@pytest.mark.parametrize("layer", [True, False])
def test_a_function_with_a_backward_of_its_own_has_the_right_gradients(kind: Callable, layer: bool) -> None:
    """It adds to the ``.grad`` of a layer, or of a tensor that it keeps."""
    torch.manual_seed(0)
    raw, layers = torch.ones(16, requires_grad=True), {"first": nn.Linear(8, 16), "last": nn.Linear(16, 3)}
    middle: Any = nn.Linear(16, 16) if layer else lambda h: (raw * h).tanh()
    layers |= {"middle": middle} if layer else {}
    model = Net(lambda net, x: net.last(Reversible.apply(net.first(x), middle)), **layers).double()
    kept = [*model.parameters()] if layer else [*model.parameters(), raw]
    F.cross_entropy(model(x), y).backward()
    expected = [p.grad for p in kept]
    optimizer = kind(model.parameters())
    optimizer.attach(model)
    optimizer.zero_grad()
    raw.grad = None
    with pytest.warns(CurvoptWarning, match="takes plain gradients.*inside of another one"):
        F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(kept, expected, strict=True))
    optimizer.step()
    extend(model)
    with backpack(KFAC()), pytest.raises(CurvoptError, match="^kfac: .*inside of another one"):
        F.cross_entropy(model(x), y).backward()


@every_kind
def test_parameters_may_have_several_dtypes(kind: Callable) -> None:
    def mixed() -> nn.Module:
        forward = lambda net, x: net.last(net.first(x.float()).tanh().double())  # noqa: E731
        return Net(forward, first=nn.Linear(8, 16), last=nn.Linear(16, 3).double())

    losses = step(*attached(kind, mixed), classes, 11)
    assert losses[-1] < losses[0]


@quiet
def test_one_number_without_a_batch_axis_is_one_sample() -> None:
    model, optimizer = attached(KFACSGD, lambda: nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    loss = lambda: F.mse_loss(model(torch.tensor([0.3])), torch.tensor([0.5]))  # noqa: E731
    descend(optimizer, loss)
    assert covered(optimizer)
    extend(model)
    with backpack(KFAC()), pytest.raises(CurvoptError, match="no batch axis.*unsqueeze"):
        loss().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_without_a_second_derivative_has_the_gradients_of_the_samples(compiled: bool) -> None:
    """Not those of the batch as one sample."""
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(5, 4).double(), torch.randn(6, 3, 5).double(), torch.randint(1, 4, (3, 2))
    lengths = torch.full((3,), 6), torch.full((3,), 2)
    squares = torch.compile(lambda z: z.softmax(-1).square().sum((0, 2)), backend="aot_eager")

    def losses() -> Tensor:
        if compiled:
            return squares(model(inputs))
        return F.ctc_loss(model(inputs).log_softmax(-1), targets, *lengths, reduction="none")

    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses()]
    optimizer = DiagonalNewton(model.parameters())
    optimizer.attach(model, batch_axis=1)
    with pytest.warns(CurvoptWarning, match="takes the empirical quantity.*no second derivative"):
        losses().mean().backward()
    optimizer.step()
    for p, gradients in zip(model.parameters(), zip(*rows, strict=True), strict=True):
        expected = torch.stack(gradients).square().mean(0)
        expected = torch.maximum(expected, expected.mean())  # of one batch, small entries say little
        torch.testing.assert_close(optimizer.state[p]["curvature"].factors[0].view_as(p), expected)


@quiet
@every_kind
def test_gradients_that_no_backward_brought_are_taken_as_they_are(kind: Callable) -> None:
    """As where they are set by hand, as in Reptile, or combined, as in PCGrad; curvature begins with a backward."""
    model, optimizer = attached(kind)
    params = list(model.parameters())
    before = classes(model(x)).item()
    with pytest.warns(CurvoptWarning, match=r"takes plain gradients.*autograd\.grad") as said:
        for _ in range(20):
            for p, gradient in zip(params, torch.autograd.grad(classes(model(x)), params), strict=True):
                p.grad = gradient
            optimizer.step()
    assert len(said) == 1
    assert classes(model(x)).item() < before
    assert set(optimizer.coverage().values()) == {"none"}
    step(model, optimizer, classes, 10)
    assert covered(optimizer)
    with pytest.warns(CurvoptWarning, match=r"overdue.*autograd\.grad"):
        for _ in range(60):
            optimizer.step()


def test_where_no_backward_has_curvature_it_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = attached(KFACAdamW, small)
    tried, climb = set[int](), Listening.refused

    def refused(listener: Listening, error: CurvoptError, request: Request) -> Request | None:
        tried.add(counters(optimizer)["step"])
        return climb(listener, error, request)

    monkeypatch.setattr(Listening, "refused", refused)
    descend(optimizer, lambda: without_samples(model), 60)
    assert tried == {0, 1, *range(5, 60, 7)}
    step(model, optimizer, classes, 20)
    assert covered(optimizer)


@quiet
@pytest.mark.parametrize("offset", [0, 1])
def test_backwards_with_and_without_samples_in_turn_have_curvature(offset: int) -> None:
    model, optimizer = attached(KFACSGD, small)
    for n in range(40):
        descend(optimizer, lambda: classes(model(x)) if (n + offset) % 2 else without_samples(model))  # noqa: B023
    assert covered(optimizer)
    assert all(last > 10 for last in optimizer.state_dict()["param_groups"][0]["run"]["refreshed"])
    with pytest.warns(CurvoptWarning, match="overdue") as said:
        for _ in range(60):
            optimizer.step()
    assert len(said) == 1


def test_a_resumed_run_that_is_not_attached_does_not_go_on_silently() -> None:
    model, optimizer = attached(KFACSGD)
    step(model, optimizer, classes, 1)
    resumed = KFACSGD(model.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(CurvoptError, match=r"attached to no model.*KFACSGD\(model\)"):
        resumed.step()


#: Losses that have no GGN, and those that have one though no rule knows them.
WITHOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "negative weights": lambda z: (F.cross_entropy(z, y, reduction="none") * t[:, 0]).mean(),
    "coupled samples": lambda z: F.mse_loss(z, t).sqrt(),
    "indefinite": lambda z: z.sin().mean(),
    "double": lambda z: F.cross_entropy(z, y) - 0.5 * z.square().mean(),
}
WITH: dict[str, Callable[[Tensor], Tensor]] = {
    "square by hand": lambda z: (z - t).square().mean(),
    "distributions": lambda z: -distributions.Categorical(logits=z).log_prob(y).mean(),
    "huber": lambda z: F.huber_loss(z, t),
}


@pytest.mark.parametrize("kind", [KFACSGD, KFACAdamW])
def test_a_loss_by_hand_takes_the_steps_of_pytorchs(kind: Callable) -> None:
    """It has as many variables, too, by which KFACSGD chooses between sampled and empirical factors."""
    finals = []
    for loss in (F.mse_loss, lambda z, t: (z - t).square().mean()):
        model, optimizer = attached(kind, fisher=None if kind is KFACSGD else "empirical")
        step(model, optimizer, partial(loss, t), 5)
        finals.append(weights(model))
    torch.testing.assert_close(*finals)


@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD])
@pytest.mark.parametrize("lossfunc", [F.mse_loss, lambda z, t: (z - t).square().mean()])
def test_targets_of_any_size_have_equal_steps(kind: Callable, lossfunc: Callable) -> None:
    """Predictions and targets in other units are the same task: the network's part takes the same steps."""
    finals = []
    for scale in (1.0, 100.0):
        model, optimizer = attached(kind)
        step(model, optimizer, lambda z, scale=scale: lossfunc(scale * z, scale * t), 8)
        finals.append(weights(model))
    torch.testing.assert_close(*finals)


@pytest.mark.parametrize("kind", [KFACSGD, KFACAdamW, DiagonalNewton])
def test_a_loss_that_couples_whole_images_takes_the_empirical_quantity(kind: Callable) -> None:
    """Its Hessian would take a product for each pixel."""
    convolutions = lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1))  # noqa: E731
    model, optimizer = attached(kind, convolutions)
    images = F.interpolate(torch.randn(6, 1, 4, 4), size=(12, 12))

    def smooth() -> Tensor:
        z = model(images)
        steps = z[..., 1:] - z[..., :-1], z[..., 1:, :] - z[..., :-1, :]
        variation = sum((1 + step.square()).sqrt().mean() for step in steps)
        return F.mse_loss(z, images) + 0.01 * variation

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CurvoptWarning)
        losses = descend(optimizer, smooth, 30)
    # KFACSGD would have taken it in any case, as a prediction has several variables
    assert ["couples 144 entries" in str(each.message) for each in said] == [True] * (kind is not KFACSGD)
    assert losses[-1] < 0.7 * losses[0]
    with backpack(KFAC()):  # for fields it is computed all the same
        smooth().backward()


@pytest.mark.parametrize("kind", [partial(KFACSGD, fisher="exact"), KFACAdamW, DiagonalNewton])
@pytest.mark.parametrize("name", [*WITHOUT, *WITH])
def test_losses_without_a_ggn_are_said_once_and_are_empirical_for_their_batches(name: str, kind: Callable) -> None:
    model, optimizer = attached(kind)
    step(model, optimizer, classes)
    assert "empirical" not in optimizer.metrics()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(model, optimizer, (WITHOUT | WITH)[name], 3)
    assert sum("takes the empirical quantity" in str(each.message) for each in said) == (name in WITHOUT)
    kinds = optimizer.coverage().values()
    assert all(("empirical" in each) == (name in WITHOUT) for each in kinds)
    assert ("empirical" in optimizer.metrics()) == (name in WITHOUT)
    step(model, optimizer, classes)
    assert "empirical" not in optimizer.metrics()


@pytest.mark.parametrize("kind", [partial(KFACSGD, fisher="exact"), KFACAdamW, DiagonalNewton])
def test_losses_that_are_linear_in_a_batch_have_curvature_in_others(kind: Callable) -> None:
    model, optimizer = attached(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for shift in (100.0, 100.0, 0.0, 100.0, 0.0):
            step(model, optimizer, lambda z, shift=shift: F.huber_loss(z, t + shift))
            assert ("empirical" in optimizer.metrics()) == bool(shift)
    assert [str(each.message) for each in said] == [
        f"{type(optimizer).__name__} takes the empirical quantity for such batches. "
        "the loss (HuberLossBackward0): it is linear in the network's output, so it has no curvature."
    ]


@every_kind
@pytest.mark.filterwarnings("ignore:.*empirical quantity for such batches")
def test_a_last_batch_of_one_prediction_changes_no_other(kind: Callable) -> None:
    model, optimizer = attached(kind)
    for n in (8, 8, 1, 8, 1, 8):
        descend(optimizer, lambda: F.mse_loss(model(x[:n])[:, 0].squeeze(), t[:n, 0].squeeze()))  # noqa: B023
        assert bool(counters(optimizer)["empirical"]) == (n == 1)


@quiet
@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, partial(DiagonalNewton, rms_clip=None)])
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_empirical_curvature_and_steps_are_those_of_a_mean_loss(kind: Callable, scale: float) -> None:
    """Whatever scales the loss, and also where it is a sum, which may be said."""

    def weighed(z: Tensor) -> Tensor:  # negatively, so that no rule serves it
        return F.cross_entropy(z, y, reduction="none") * t[:, 0]

    runs: list[list[Tensor]] = []
    total = lambda z: scale * weighed(z).sum()  # noqa: E731
    for change in (lambda z: weighed(z).mean(), lambda z: scale * weighed(z).mean(), total, total):
        model, optimizer = attached(kind)
        if len(runs) == 2:
            optimizer.attach(model, loss_reduction="sum")
        step(model, optimizer, change, 3)
        runs.append(weights(model))
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0])


def test_the_empirical_factors_are_those_of_the_samples_gradients() -> None:
    model, optimizer = attached(KFACSGD)
    step(model, optimizer, WITHOUT["negative weights"])
    other, _ = attached(KFACSGD)
    z = other(x)
    (slope,) = torch.autograd.grad(WITHOUT["negative weights"](z) * 32, z)
    hidden = other[1](other[0](x))
    B, A = optimizer.state[model[2].weight]["curvature"].factors
    torch.testing.assert_close(B, slope.mT @ slope / 32)
    torch.testing.assert_close(A, hidden.mT @ hidden / 32)


@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, KFACAdamW])
def test_heads_that_take_turns_are_refreshed_by_their_own_steps(kind: Callable) -> None:
    torch.manual_seed(0)
    trunk, heads = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.ModuleList(nn.Linear(8, 3) for _ in range(4))
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = kind(model.parameters(), curvature_every=5)
    optimizer.attach(model)
    last, seen = [0] * 4, [0.0] * 4
    for i in range(100):
        descend(optimizer, lambda: F.cross_entropy(heads[i % 4](trunk(x.float())), y))  # noqa: B023
        for head, at in zip(heads, range(4), strict=True):
            factors = curvature_of(optimizer.state[head.weight]).factors  # pyright: ignore[reportArgumentType]
            if factors and float(factors[0].norm()) != seen[at]:
                last[at], seen[at] = i, float(factors[0].norm())
    assert min(last) >= 100 - 2 * 4 * 5, last


@pytest.mark.parametrize("by_hand", [False, True])
@every_kind
def test_outputs_in_which_the_loss_is_linear_have_the_curvature_of_their_gradients(
    kind: Callable, by_hand: bool
) -> None:
    """Boxes by an L1 loss beside classes, as of detectors."""
    torch.manual_seed(0)
    trunk, classes, boxes = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)
    model = nn.ModuleList([trunk, classes, boxes]).double()
    model.forward = lambda x: (classes(trunk(x).tanh()), boxes(trunk(x).tanh()))
    optimizer = kind(model.parameters())
    optimizer.attach(model)
    z, b = model(x)
    loss = 5 * ((b - t[:, :2]).abs().mean() if by_hand else F.l1_loss(b, t[:, :2]))
    with silent():
        (F.cross_entropy(z, y) + loss).backward()
        optimizer.step()
    squares = torch.full((2,), (5 / 2) ** 2, dtype=torch.float64)  # of 5 / 2 sign(b - t)
    factor = optimizer.state[boxes.bias]["curvature"].factors[0]
    torch.testing.assert_close(factor if factor.dim() == 1 else factor.diagonal(dim1=-2, dim2=-1).flatten(), squares)
    assert optimizer.state[classes.bias]["curvature"].factors[0].any()


@pytest.mark.parametrize(
    ("kind", "by_hook"),
    [
        *((kind, True) for kind in (KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton)),
        *((kind, False) for kind in (KFACSGD, EKFACSGD, DiagonalNewton)),  # for KFACAdamW one masks the weight itself
    ],
)
def test_what_a_mask_freezes_stays(kind: Callable, by_hook: bool) -> None:
    """Rows of old classes, say, or pruned entries. Half of the run is a resumed one."""
    model, optimizer = attached(kind)
    weight, mask = model[-1].weight, torch.ones_like(model[-1].weight)
    mask[0], mask[1, ::2] = 0, 0
    before = weight.detach().clone()
    if by_hook:
        weight.register_hook(lambda grad: grad * mask)
    for i in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if not by_hook:
            weight.grad *= mask
        optimizer.step()
        if i == 6:
            state = optimizer.state_dict()
            optimizer = kind(model.parameters())
            optimizer.attach(model)
            optimizer.load_state_dict(state)
    moved = (weight.detach() - before) != 0
    assert torch.equal(moved, mask.bool())


@quiet
@pytest.mark.parametrize("start", ["CLIP, which returns the matrix of pairs", "SimCLR with its loss inside", "Diff"])
def test_a_preconditioner_draws_several_vectors_of_a_batch_that_is_one_sample(start: str) -> None:
    """A single one leaves directions without curvature, in which steps have no bound."""

    def preconditioned(model: nn.Module) -> torch.optim.Optimizer:
        preconditioner, optimizer = KFACPreconditioner(model), torch.optim.SGD(model.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: preconditioner.step())
        return optimizer

    (name,) = (name for name in WORKFLOWS if name.startswith(start))
    first, end = train(name, preconditioned, steps=20)
    assert end < first / 2
