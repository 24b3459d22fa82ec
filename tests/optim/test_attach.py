"""``attach()``: plain ``loss.backward(); optimizer.step()`` collects the curvature, whatever else goes on."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Margins, Net
from checks import generator
from optimizer_cases import (
    OPTIMIZERS,
    Run,
    assert_close,
    assert_equal,
    cnn,
    counters,
    covered,
    descend,
    digits,
    exact_optimizer,
    mlp,
    resume_with,
    silent,
)
from torch import Tensor, nn

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.core.layers.computed import PerSampleRule
from curvopt.core.losses.roots import Empirical
from curvopt.core.record import ModuleCall, records_of
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact, DiagGGNMC, KFACEmpirical
from curvopt.extensions.base import Extension
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW
from curvopt.optim.diagonal_newton import CurvatureDiagonal
from curvopt.optim.empirical import GradientDiagonal, RowDiagonal
from curvopt.optim.kfac import Kronecker
from curvopt.optim.state import curvature_of

Y = torch.arange(64) % 3

# ----------------------------------------------------------------------------------------------------- one optimizer


def tasks() -> nn.Module:
    """Three heads on a body."""
    heads = nn.ModuleList([nn.Linear(8, 10) for _ in range(3)])
    forward = lambda net, x, task: net.heads[task](torch.tanh(net.body(x.flatten(1))))  # noqa: E731
    return Net(forward, body=nn.Linear(64, 8), heads=heads)


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, DiagonalNewton])
def test_gradients_of_two_backwards_count_as_those_also_where_one_is_due(make: Callable) -> None:
    run = Run(make, tasks, dtype=torch.float64, damping=1e6, rms_clip=None, momentum=0.0, lr=1.0)
    for step in range(30):
        x, y = run.data(step)
        run.optimizer.zero_grad()
        for task in (0, 1 + (step % 3 > 0)):  # the last heads take turns, and are due at other steps
            run.lossfunc(run.model(x, task), y).backward()
        before = run.model.body.weight.detach().clone()
        run.optimizer.step()
        taken, expected = before - run.model.body.weight.detach(), run.model.body.weight.grad / 2e6  # of two losses
        assert float(taken.norm()) == pytest.approx(float(expected.norm()), rel=0.02)


@exact_optimizer
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.filterwarnings("ignore:.*linear in the network's output")
def test_accumulation_that_begins_with_a_gradient_of_zeros(make: Callable, reset: bool) -> None:
    """Its curvature and weight count, unless its gradient is reset, to the same zeros, before the next one."""
    whole, halves = (Run(make, dtype=torch.float64) for _ in range(2))
    lossfunc = extend(Margins(), loss=True)
    with torch.no_grad():
        for run in (whole, halves):
            run.model[-1].weight.mul_(1e4)
    x, y = whole.data(0)
    x, y = torch.cat([x[:8], x[:8]]), torch.cat([whole.model(x[:8]).argmax(1), y[:8]])
    lossfunc(whole.model(x[8:] if reset else x), y[8:] if reset else y).backward()
    (lossfunc(halves.model(x[:8]), y[:8]) / 2).backward()
    assert not any(p.grad.any() for p in halves.model.parameters())
    if reset:
        halves.model.zero_grad(set_to_none=False)
    (lossfunc(halves.model(x[8:]), y[8:]) / (1 if reset else 2)).backward()
    for run in (whole, halves):
        run.optimizer.step()
        assert float(run.optimizer.state_dict()["param_groups"][0]["run"]["step_weight"]) == pytest.approx(1)
    torch.testing.assert_close(whole.factors(), halves.factors())


def test_a_state_loaded_between_accumulated_backwards_leaves_what_belongs_to_the_gradients() -> None:
    plain, loaded = (Run(KFACSGD, fisher="exact", rms_clip=None) for _ in range(2))
    for step in range(3):
        for run in (plain, loaded):
            run.backward(step, lambda step, run=run: run.loss(step) / 2)
            if run is loaded:
                run.optimizer.load_state_dict(run.optimizer.state_dict())
            (run.loss(step) / 2).backward()
            run.optimizer.step()
    assert_equal(plain.weights(), loaded.weights())


def test_other_calls_into_autograd_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(KFACSGD)
    monkeypatch.setattr(Kronecker, "extensions", lambda *_: pytest.fail("curvature was computed"))
    x = run.x[:4].clone().requires_grad_()
    torch.autograd.grad(run.lossfunc(run.model(x), run.y[:4]), list(run.model.parameters()))
    run.lossfunc(run.model(x), run.y[:4]).backward(inputs=[x])  # an attack on the input
    with backpack():
        run.loss(0).backward()
    nn.Linear(3, 1)(torch.randn(2, 3)).sum().backward()


@pytest.mark.parametrize("make", [KFACSGD, lambda params: DiagonalNewton(params, curvature="diag_h")])
def test_graphs_of_gradients_are_built_though_fields_would_be_differentiated_wrongly(make: Callable) -> None:
    middle = nn.LayerNorm(8) if make is not KFACSGD else nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model, x, y = nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Linear(8, 3)), torch.randn(6, 4), Y[:6]
    optimizer = make(model.parameters())
    optimizer.attach(model)
    F.cross_entropy(model(x), y).backward(create_graph=True)
    optimizer.step()
    assert covered(optimizer)


def test_a_model_without_parameters_of_the_optimizer_is_refused() -> None:
    with pytest.raises(CurvoptError, match=r"attach\(\): no parameter of this optimizer belongs to this Sequential"):
        KFACSGD(mlp().parameters()).attach(mlp())


def test_the_scaler_is_kept_when_modules_are_attached_again() -> None:
    run, again = (Run(KFACSGD, fisher="exact") for _ in range(2))
    for each in (run, again):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        each.optimizer.attach(each.model, each.lossfunc, scaler=scaler)
        if each is again:
            again.optimizer.attach(again.model)
        for step in range(3):
            each.backward(step, lambda step, each=each, scaler=scaler: scaler.scale(each.loss(step)))
            scaler.step(each.optimizer)
            scaler.update()
    assert_equal(run.weights(), again.weights())


def test_a_backward_without_curvature_says_what_to_do_and_steps() -> None:
    run = Run(KFACSGD)
    before = run.weights()
    with pytest.warns(CurvoptWarning, match=r"takes plain gradients.*inside of `with backpack\(\):`"):
        sum(p.square().sum() for p in run.model.parameters()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    run.optimizer.step()
    for old, new in zip(before, run.weights(), strict=True):
        torch.testing.assert_close(new / old, (new / old).mean().expand_as(new))  # a step along the gradient
    assert covered(run.train(1).optimizer)


def test_backwards_without_curvature_are_left_alone_where_errors_say() -> None:
    run, plain = (Run(KFACSGD, cnn, reduction="sum", fisher="exact") for _ in range(2))
    for step in range(3):
        run.optimizer.zero_grad()
        penalty = run.model(run.x[:4]).mean(0).square().sum()  # of mean activations, say
        empty = run.lossfunc(run.model(run.x[:0]), run.y[:0])
        if step == 0:
            with pytest.warns(CurvoptWarning, match=r"inside of an empty `with backpack\(\):`"):
                empty.backward(retain_graph=True)
        for term in (penalty, empty):
            with backpack():
                (0 * term).backward()
        run.loss(step).backward()
        run.optimizer.step()
    assert_equal(run.weights(), plain.train(3).weights())
    assert "empirical" not in run.optimizer.metrics()


def test_backwards_that_are_refused_later_leave_the_curvature_as_it_is() -> None:
    run = Run(KFACSGD, cnn, reduction="sum").train(2)
    before = copy.deepcopy(run.factors())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for refused in (lambda _: run.lossfunc(run.model(run.x[:0]), run.y[:0]), lambda _: run.model[0].weight.sum()):
            for _ in range(2):
                run.step(0, refused)
    assert ["goes on with the curvature it has" in str(each.message) for each in said] == [True]
    torch.testing.assert_close(before, run.factors(), rtol=0, atol=0)


def test_nothing_is_watched_after_the_optimizer_is_gone() -> None:
    gc.collect()  # optimizers of other tests
    run_backward = torch.autograd._engine_run_backward  # pyright: ignore[reportAttributeAccessIssue]
    first, second = Run(KFACSGD).train(1), Run(KFACAdamW)
    second.optimizer.attach(second.model)
    watched = torch.autograd._engine_run_backward  # pyright: ignore[reportAttributeAccessIssue]
    assert watched is not run_backward
    del first.optimizer
    gc.collect()
    assert torch.autograd._engine_run_backward is watched  # pyright: ignore[reportAttributeAccessIssue]
    del second
    gc.collect()
    assert torch.autograd._engine_run_backward is run_backward  # pyright: ignore[reportAttributeAccessIssue]
    first.loss(0).backward()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_copies_are_attached(duplicate: Callable) -> None:
    run = Run(KFACSGD, curvature_every=3).train(5)
    twin = duplicate(run)
    before = twin.factors()[0][0].clone()
    assert_equal(run.train(range(5, 10)).weights(), twin.train(range(5, 10)).weights())
    assert not torch.equal(before, twin.factors()[0][0])


# ----------------------------------------------------------------------------------------------- several, and others


@pytest.mark.parametrize("zero", ["module", "optimizer"])
def test_a_generator_and_its_critic(zero: str) -> None:
    """The critic sees real and fake images in two backwards; that of the generator reaches it, too, without effect."""

    def train(apart: bool) -> tuple[list[Tensor], list[KFACSGD]]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 64))
        critic = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
        nets = {"generator": generator, "critic": critic}
        optimizers = {name: KFACSGD(net, fisher="exact", curvature_every=2) for name, net in nets.items()}

        def zero_grad(name: str) -> None:
            (nets if zero == "module" else optimizers)[name].zero_grad()

        def loss(images: Tensor, label: float) -> Tensor:
            z = critic(images)
            return nn.functional.binary_cross_entropy_with_logits(z, torch.full_like(z, label))

        for step in range(12):
            fake = torch.sigmoid(generator(torch.randn(64, 8)))
            zero_grad("critic")
            loss(digits()[0][64 * step :][:64].flatten(1), 1.0).backward()
            loss(fake.detach(), 0.0).backward()
            optimizers["critic"].step()
            zero_grad("generator")
            loss(fake, 1.0).backward(inputs=list(generator.parameters()) if apart else None)
            optimizers["generator"].step()
        return [p.detach() for net in nets.values() for p in net.parameters()], list(optimizers.values())

    weights, optimizers = train(False)
    assert_equal(weights, train(True)[0])
    for optimizer in optimizers:
        assert min(counters(optimizer)["due"]) >= 12 and set(optimizer.coverage().values()) == {
            "kronecker",
            "dense",
        }


def test_two_optimizers_share_a_model() -> None:
    """Each half trains as it does when the other half is held by an optimizer that sees the same."""

    def run(*optimizers_of: Callable) -> list[Tensor]:
        whole = Run(torch.optim.SGD, dtype=torch.float64)
        params, parts = list(whole.model.parameters()), (slice(2), slice(2, None))
        optimizers = [make(params[part]) for make, part in zip(optimizers_of, parts, strict=True)]
        for optimizer in optimizers:
            optimizer.attach(whole.model)
        for step in range(6):
            descend(optimizers, lambda: whole.loss(step))  # noqa: B023
        assert all(covered(optimizer) for optimizer in optimizers)
        return whole.weights()

    kfac = partial(KFACSGD, fisher="exact", rms_clip=None, lr=0.01, damping=0.05)
    assert_close(run(kfac, kfac), Run(kfac, dtype=torch.float64).train(6).weights())
    run(EKFACSGD, lambda params: DiagonalNewton(params, curvature="diag_h"))


@pytest.mark.parametrize("other", ["attached", "of torch"])
@pytest.mark.parametrize("name", ["KFACSGD exact", "EKFACSGD exact", "DiagonalNewton exact"])
def test_models_whose_losses_are_added_up_train_as_alone(name: str, other: str) -> None:
    """Each optimizer counts the losses that reach its parameters: a factor of another one is none of its business."""
    alone, joint, second = (Run(OPTIMIZERS[name], seed=seed, dtype=torch.float64) for seed in (0, 0, 1))
    if other == "of torch":
        second = Run(torch.optim.SGD, seed=1, dtype=torch.float64, lr=1e-6)
    for step in range(4):

        def loss(step: int = step) -> Tensor:
            penalty = second.model(second.x[:64]).square().mean()
            return joint.loss(step) + 100 * (second.loss(step) + penalty)

        descend([joint.optimizer, second.optimizer], loss)
    assert_close(joint.weights(), alone.train(4).weights())
    torch.testing.assert_close(joint.optimizer.metrics(), alone.optimizer.metrics())


def test_a_context_of_the_user() -> None:
    """The user gets the fields that are asked for, of the same name even, and the optimizer its curvature."""
    plain, watched, alone = (Run(KFACSGD, fisher="exact", dtype=torch.float64) for _ in range(3))
    plain.train(6)
    for step in range(6):
        alone.model.load_state_dict(watched.model.state_dict())
        with backpack(BatchGrad(), KFLR()):
            alone.loss(step).backward()
        with backpack(BatchGrad(), KFLR()) as context:
            watched.backward(step)
        torch.testing.assert_close(context.loss_weight, torch.ones((), dtype=torch.float64))
        for p, q in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
            assert_close([p.grad_batch, *p.kflr], [q.grad_batch, *q.kflr])
            del p.grad_batch, p.kflr
        watched.optimizer.step()
    assert_equal(plain.weights(), watched.weights())


def test_an_error_of_one_context_leaves_nothing_of_the_others() -> None:
    net = partial(nn.Sequential, nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Linear(9, 10))
    run = Run(KFACSGD, net)
    with pytest.raises(CurvoptError, match="grad_batch needs independent samples"), backpack(BatchGrad()):
        run.loss(0).backward()
    assert all(not vars(p) for p in run.model.parameters())
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(CurvoptWarning, match="takes plain gradients"):
        run.optimizer.step()
    assert set(run.optimizer.coverage().values()) == {"none"}
    run.train(2)


# ---------------------------------------------------------------------------------------------------------- batch axis


def time_first(kind: str) -> Any:
    """On texts ``[T, N]``, as PyTorch's layers take them by default."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.inner(net.embedding(x))
        return net.last(h[0] if kind == "lstm" else h)

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    inner = nn.LSTM(8, 8, 2, dropout=0.2) if kind == "lstm" else nn.TransformerEncoder(layer, 1, None, False)
    return Net(forward, embedding=nn.Embedding(9, 8), inner=inner, last=nn.Linear(8, 9))


def samples(param: Tensor, loss: Callable[[], Tensor]) -> int:
    with backpack(BatchGrad()):
        loss().backward()
    return len(param.grad_batch)  # pyright: ignore[reportAttributeAccessIssue]


def test_without_a_declaration_the_samples_are_along_axis_0() -> None:
    for model, x in ((time_first("lstm"), torch.randint(9, (5, 7))), (mixed(), torch.randn(6, 6))):
        optimizer = KFACAdamW(model.parameters())
        optimizer.attach(model)
        loss = lambda: model(x).square().mean()  # noqa: B023, E731
        with pytest.warns(CurvoptWarning, match="sample by sample.*batch_axis=1.*batch_axis=None"):
            descend(optimizer, loss, 3)
        assert covered(optimizer) and samples(next(model.parameters()), loss) == len(x)


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_batch_axis_that_is_declared_counts_and_one_that_is_given_later(kind: str) -> None:
    x, model = torch.randint(9, (5, 7)), time_first(kind)
    loss = lambda: F.cross_entropy(model(x).reshape(-1, 9), x.flatten())  # noqa: E731
    for axis, count in ((0, 5), (1, 7), (0, 7), (None, 1)):  # 0 leaves it as it is
        optimizer = KFACAdamW(model.parameters())
        optimizer.attach(model, batch_axis=axis)
        with silent() if count != 5 else pytest.warns(CurvoptWarning, match="sample by sample.*batch_axis=1"):
            descend(optimizer, loss)
        assert covered(optimizer) and samples(model.last.bias, loss) == count


def of_rows(forward: Callable[..., Tensor]) -> Callable[[], Any]:
    """A net of two layers for rows ``[N, 6]``, or batches of them."""
    return lambda: Net(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 6))


@of_rows
def mixed(net: Any, x: Tensor) -> Tensor:
    """They attend to each other."""
    h = net.first(x)
    return net.last((h @ h.mT).softmax(-1) @ h)


@of_rows
def neighbours(net: Any, x: Tensor) -> Tensor:
    """Graph convolutions: each node gets the messages of two others."""
    nodes = torch.arange(x.shape[-2])
    ends = torch.cat([nodes.roll(1), nodes.roll(3)]), nodes.repeat(2)
    h = net.first(x)
    h = h + torch.zeros_like(h).index_add(-2, ends[0], h[..., ends[1], :].tanh())
    return net.last(h)


@of_rows
def adjacency(net: Any, x: Tensor) -> Tensor:
    """Graph convolutions with a constant matrix on the left, and keys of their own."""
    matrix = (torch.eye(x.shape[-2]) + torch.eye(x.shape[-2]).roll(1, 0)).to(x)
    h = (matrix @ net.first(x)).tanh()
    return (h @ net.last(h).mT).softmax(-1) @ x + matrix @ net.last(h)


@pytest.mark.parametrize("net", [mixed, neighbours, adjacency])
@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton])
def test_a_batch_is_one_sample_where_that_is_declared(
    make: Callable, net: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the model were called with a batch of one."""
    monkeypatch.setattr(CurvatureDiagonal, "draws_of_one_sample", 1)  # as many as for a row
    x, y, finals = torch.randn(20, 6, dtype=torch.float64), torch.randint(6, (20,)), []
    for one in (False, True):
        torch.manual_seed(0)
        model = net().double()
        optimizer = make(model.parameters(), curvature_every=2)
        optimizer.attach(model, batch_axis=0 if one else None)
        loss = lambda: F.cross_entropy(model(x[None])[0] if one else model(x), y)  # noqa: B023, E731
        with silent():
            # the next eigenvectors of a factor of low rank are a matter of rounding
            descend(optimizer, loss, 1 if make is EKFACSGD else 5)
        assert covered(optimizer)
        finals.append([p.detach().clone() for p in model.parameters()])
        assert samples(model.first.weight, loss) == 1
    torch.testing.assert_close(*finals)


@of_rows
def by_largest(net: Any, x: Tensor) -> Tensor:
    """Graph convolutions that use no module for their weights: each node gets the largest of two messages."""
    to, ends = torch.cat([torch.arange(20).roll(1), torch.arange(20).roll(3)]), torch.arange(20).repeat(2)
    for layer in (net.first, net.last):
        h = F.linear(x, layer.weight)
        x = h.new_zeros(20, 6).scatter_reduce(0, to[:, None].expand(-1, 6), h[ends], "amax", include_self=False)
        x = x + layer.bias
    return x


@of_rows
def by_sparse(net: Any, x: Tensor) -> Tensor:
    matrix = (torch.eye(20) + torch.eye(20).roll(1, 0)).to_sparse()
    for layer in (net.first, net.last):
        x = torch.sparse.mm(matrix, F.linear(x, layer.weight)).tanh() + layer.bias
    return x


def spectral() -> nn.Module:
    """Mixes the four steps of each sample in the frequency domain, by a weight that has no rule."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.fft.rfft(net.first(x).view(-1, 4, 6), dim=1)
        h = torch.einsum("nki,kio->nko", h, torch.view_as_complex(net.weight))
        return net.last(torch.fft.irfft(h, n=4, dim=1).mean(1))

    weight = nn.Parameter(torch.randn(3, 6, 6, 2) / 6)
    return Net(forward, first=nn.Linear(6, 24), last=nn.Linear(6, 6), weight=weight)


def table() -> nn.Module:
    """Rows of a table that a graph has smoothed, as recommenders use."""
    graph = torch.rand(50, 50).softmax(1).to_sparse()
    return Net(lambda net, rows: torch.sparse.mm(graph, net.table.weight)[rows], table=nn.Embedding(50, 6))


def normed(width: int = 60) -> nn.Module:
    """Weights that are computed from parameters."""
    layers = nn.Linear(6, width), nn.Linear(width, 6)
    first, last = map(nn.utils.parametrizations.weight_norm, layers)
    return nn.Sequential(first, nn.Tanh(), last)


@pytest.mark.parametrize("make", [by_largest, by_sparse, spectral, normed, table])
def test_what_has_no_rows_or_would_cost_much_by_rows_is_one_sample_where_that_is_declared(make: Callable) -> None:
    model, y = make(), torch.randint(6, (20,))
    x = torch.randint(50, (20,)) if make is table else torch.randn(20, 6)
    optimizer = KFACAdamW(model.parameters())
    optimizer.attach(model, batch_axis=None)
    loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    with silent():
        descend(optimizer, loss, 2)
    assert covered(optimizer)
    assert {samples(p, loss) for p in model.parameters()} == {1}


def twins() -> nn.Module:
    """Returns its loss, by the correlations of two views, of which there are as many as rows (Barlow twins)."""

    def forward(net: Any, *views: Tensor) -> Tensor:
        a, b = (F.normalize(net.inner(view), dim=0) for view in views)
        return (a.T @ b - torch.eye(20)).square().sum()

    return Net(forward, inner=nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 20)))


@pytest.mark.parametrize("make", [KFACSGD, KFACAdamW])
def test_a_model_that_returns_a_loss_of_all_pairs_is_one_sample(make: Callable) -> None:
    model = twins()
    optimizer = make(model.parameters())
    optimizer.attach(model)

    def loss() -> Tensor:
        x = torch.randn(20, 6)
        return model(x + 0.1 * torch.randn_like(x), x)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CurvoptWarning)
        losses = descend(optimizer, loss, 20)
    assert not any("sample by sample" in str(w.message) for w in said)
    assert covered(optimizer) and losses[-1] < losses[0]


def empirical(seeded: torch.Generator) -> Extension:
    extension = KFACEmpirical()
    extension.columns = Empirical(seeded)
    return extension


def fields_of(model: nn.Module, extension: Extension, one: bool, loss: Callable[[], Tensor]) -> list:
    """Of each parameter, where the batch is one sample or not."""
    context = backpack(extension)
    context.request = replace(context.request, as_one_sample=one)
    with warnings.catch_warnings(), context:
        warnings.simplefilter("ignore", CurvoptWarning)
        loss().backward()
    return [getattr(p, extension.field) for p in model.parameters()]


def powers(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y) ** 2 + (z - y) ** 4).mean()


@pytest.mark.parametrize(
    ("net", "lossfunc", "of_rows", "of_one"),
    [
        (partial(normed, 5), F.cross_entropy, DiagGGNExact, lambda seeded: DiagGGNMC(1, seeded)),
        (mixed, F.mse_loss, KFACEmpirical, empirical),
        (mixed, powers, KFACEmpirical, empirical),
        (partial(mixed), powers, GradientDiagonal, RowDiagonal),
    ],
    ids=["sampled", "empirical, square", "empirical, fourth power", "diagonal, fourth power"],
)
def test_curvature_of_one_sample_averages_to_that_of_rows(
    net: Callable, lossfunc: Callable, of_rows: Callable, of_one: Callable
) -> None:
    """Products of different rows average to zero, by targets that are drawn independently, or by random signs."""
    model, seeded = extend(net().double()), generator(0)
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    target = y.argmax(1) if lossfunc is F.cross_entropy else y

    def curvature(extension: Extension, one: bool) -> list[Tensor]:
        found = fields_of(model, extension, one, lambda: lossfunc(model(x), target))
        # rows share the output of mixed.first, which has its whole block in place of factors then
        return [each[0] if isinstance(each, list) else each for each in (found[2:] if net is mixed else found)]

    expected, rounding = curvature(of_rows(), one=False), 0 if lossfunc is F.cross_entropy else 1e-9
    draws = [curvature(of_one(seeded), one=True) for _ in range(300)]
    for index, field in enumerate(expected):
        found = torch.stack([draw[index] for draw in draws])
        error = (found.mean(0) - field).norm()
        assert error < 4 * (found.var(0).sum() / len(draws)).sqrt() + rounding
        assert error < 0.2 * field.norm()


@pytest.mark.parametrize("f", [lambda z: -z.log_softmax(1)[:, 0], lambda z: z.square().sum(1) + z.cosh().log().sum(1)])
def test_calls_with_a_row_each_have_samples_of_their_own(f: Callable) -> None:
    """No product of gradients of different calls is in the empirical curvature; that of terms of a call is."""
    model, x = extend(normed(5).double()), torch.randn(7, 6).double()
    expected = fields_of(model, GradientDiagonal(), False, lambda: f(model(x)).sum())
    of_calls = fields_of(
        model, RowDiagonal(generator(0)), True, lambda: torch.cat([f(model(row[None])) for row in x]).sum()
    )
    assert_close(of_calls, [field / 7 for field in expected])  # times the number of samples, and not yet by the weight


@pytest.mark.filterwarnings("ignore::curvopt.CurvoptWarning")
@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton])
def test_losses_without_a_ggn_take_one_sample_too(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed sample by sample then."""
    monkeypatch.setattr(PerSampleRule, "jac_t", None)
    x, y, model = torch.randn(20, 6), torch.randn(20, 6), neighbours()
    optimizer = make(model.parameters(), curvature_every=1)
    optimizer.attach(model, batch_axis=None)
    losses = descend(optimizer, lambda: (1 - (-(model(x) - y).square().sum(1) / 8).exp()).mean(), 20)
    assert losses[-1] < losses[0] and covered(optimizer)


def test_an_encoder_whose_hidden_state_has_layers_first_is_told_nothing() -> None:
    rnns = (nn.GRU(5, 7, num_layers=2, batch_first=True) for _ in range(2))
    encoder, decoder = (Net(lambda net, *inputs: net.inner(*inputs), inner=rnn) for rnn in rnns)
    optimizers = [KFACSGD(encoder), KFACSGD(decoder)]
    x, t, y = torch.randn(6, 4, 5), torch.randn(6, 8, 5), torch.randint(7, (6, 8))
    with silent():
        descend(optimizers, lambda: F.cross_entropy(decoder(t, encoder(x)[1])[0].flatten(0, 1), y.flatten()), 3)
    assert all(covered(optimizer) for optimizer in optimizers)


def records(z: Tensor) -> bool:
    return any(isinstance(record, ModuleCall) for record, *_ in records_of(z.grad_fn))


def test_a_model_records_while_an_optimizer_is_due() -> None:
    gc.collect()  # optimizers of other tests, which may be due
    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(8, 4), torch.randint(3, (8,))
    optimizers = [KFACSGD(model, curvature_every=every) for every in (4, 6)]
    for step in range(18):
        due = not all(optimizer.state and min(counters(optimizer)["due"]) > step for optimizer in optimizers)
        z = model(x)
        assert records(z) == due
        with backpack():
            assert records(model(x))
        descend(optimizers, lambda: F.cross_entropy(z, y))  # noqa: B023
    assert not records(model(x))
    assert records(copy.deepcopy(model)(x)) and records(extend(model)(x))
    optimizers[0].attach(model)
    assert records(model(x))  # as the user has extended it, too


def test_curvature_does_not_depend_on_when_other_models_on_the_way_to_the_loss_are_due() -> None:
    """As of a generator, whose discriminator takes more steps."""
    found = []
    for is_due in (True, False):
        torch.manual_seed(0)
        generator, critic = (nn.Sequential(nn.Linear(n, 6), nn.Tanh(), nn.Linear(6, m)) for n, m in ((3, 4), (4, 1)))
        optimizers = [KFACSGD(model, fisher="exact") for model in (generator, critic)]
        if not is_due:
            critic(torch.ones(5, 4)).square().mean().backward()
            with torch.no_grad():
                kept = copy.deepcopy(critic.state_dict())
                optimizers[1].step()
                critic.load_state_dict(kept)
            optimizers[1].zero_grad()
            resume_with(optimizers[1], due=[1000] * 4)
        noise = torch.linspace(-1, 1, 24).view(8, 3)
        with silent():
            (critic(generator(noise)) - 1).pow(4).mean().backward()
            optimizers[0].step()
        found.append([optimizers[0].state[p]["curvature"].factors for p in generator.parameters()])
        before = curvature_of(optimizers[1].state[critic[0].weight]).ema_weight
        optimizers[1].step()
        assert (curvature_of(optimizers[1].state[critic[0].weight]).ema_weight is not before) == is_due
    torch.testing.assert_close(*found)


def test_a_forward_pass_before_the_step_that_makes_it_due_is_no_error() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(8, 4), torch.randint(3, (8,))
    optimizer = KFACSGD(model, curvature_every=4)
    z, refreshed = model(x), []
    with silent():
        for step in range(20):
            before = curvature_of(optimizer.state[model[0].weight]).ema_weight
            F.cross_entropy(z, y).backward()
            ahead = model(x)
            optimizer.step()
            if curvature_of(optimizer.state[model[0].weight]).ema_weight is not before:
                refreshed.append(step)
            optimizer.zero_grad()
            z = ahead
    assert refreshed[0] == 0 and max(b - a for a, b in itertools.pairwise(refreshed)) == 5
