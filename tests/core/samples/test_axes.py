"""Samples that lie elsewhere than on the first axis, or depend on each other: right numbers or a refusal.

The rows are common code: embeddings of positions, time-first sequences, two views of a batch, experts for some samples.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Problem, cross_entropy, labels, normal
from checks import check_all, extended
from reference import Reference
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions import (
    KFLR,
    KFRA,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    Extension,
    KFACEmpirical,
    SumGradSquared,
    Variance,
)


class Around(nn.Module):
    """Linear layers around a function of ``[N, T, F]`` that is given a third one and an embedding of positions."""

    def __init__(self, function: Callable[[Around, Tensor], Tensor]):
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.positions = nn.Embedding(6, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        z = self.out(torch.tanh(self.function(self, self.into(x))))
        return z.mean(1) if z.dim() == 3 else z


def inner_on(reorder: Callable[[Tensor], Tensor], back: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    """The inner layer applied to reordered activations."""
    return lambda model, h: back(torch.tanh(model.inner(reorder(h))), h)


def experts(model: Around, h: Tensor) -> Tensor:
    """The inner layer gets every other sample."""
    h = h.clone()
    h[::2] = model.inner(h[::2])
    return h


def swap(h: Tensor) -> Tensor:
    """The second and third sample in each other's place."""
    return h[[0, 2, 1, *range(3, len(h))]]


def two_views(model: Around, h: Tensor) -> Tensor:
    left, right = model.inner(torch.cat([h, torch.cos(h)])).chunk(2)
    return left * right


def put_in_place(model: Around, h: Tensor) -> Tensor:
    """Rows are put one by one where none was yet."""
    rows = torch.zeros_like(h)
    for to, row in zip(range(len(h)), model.inner(h).flip(0), strict=True):
        rows[to - 1] = row
    return rows


REARRANGED: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "as it should be": inner_on(lambda h: h, lambda h, _: h),
    "flattened": inner_on(lambda h: h.flatten(0, 1), lambda h, old: h.view_as(old)),
    "time first": inner_on(lambda h: h.transpose(0, 1), lambda h, _: h.transpose(0, 1)),
    "flattened time first": inner_on(
        lambda h: h.transpose(0, 1).flatten(0, 1), lambda h, old: h.unflatten(0, (old.shape[1], -1)).transpose(0, 1)
    ),
    "reversed": inner_on(lambda h: h.flip(0), lambda h, _: h.flip(0)),
    "shuffled": inner_on(lambda h: h.roll(1, 0), lambda h, _: h.roll(-1, 0)),
    "two swapped": inner_on(lambda h: swap(h), lambda h, _: swap(h)),
    "two views": two_views,
    "interleaved views": inner_on(
        lambda h: torch.stack([h, torch.cos(h)], 1).flatten(0, 1),
        lambda h, old: h.view(len(old), 2, *h.shape[1:]).sum(1),
    ),
    "put in place": put_in_place,
    "some samples": experts,
    "positions without batch": lambda model, h: h + model.positions(torch.arange(h.shape[1])),
    "positions of a batch of one": lambda model, h: h + model.positions(torch.arange(h.shape[1])[None]),
    "positions of all samples": lambda model, h: h + model.positions(torch.arange(h.shape[1]).expand(h.shape[:2])),
    "positions through a layer": lambda model, h: h + model.inner(model.positions.weight[: h.shape[1]].detach()),
    "one vector for all": lambda model, h: h * model.inner(torch.ones(4).double()),
    "mean over the batch": lambda model, h: model.inner(h - h.mean(0)),
    "all but the first with their neighbours": lambda model, h: model.inner(torch.cat([h[:1], h[1:] + h[:-1]])),
    "the last two": lambda model, h: model.inner(torch.cat([h[:-1], h[-1:] * h[-2:-1]])),
    "neighbours": lambda model, h: model.inner(h + h.roll(1, 0)),
    "attention over samples": lambda model, h: model.inner(torch.softmax(h[:, 0] @ h[:, 0].T, 1) @ h[:, 0]),
    "fused attention over samples": lambda model, h: F.scaled_dot_product_attention(
        *[model.inner(h).transpose(0, 1)] * 3, attn_mask=(torch.eye(len(h)).to(h) - 1) * 1e9
    ).transpose(0, 1),
    "functional batch norm": lambda model, h: model.inner(F.batch_norm(h.mT, None, None, training=True).mT),
    "a kernel that moves along the batch": lambda model, h: F.conv1d(
        model.inner(h).flatten(1).T.unsqueeze(1), h.new_tensor([[[0.5, 1, 0]]]), padding=1
    )[:, 0].T.view_as(h),
}
MIXING = {
    "mean over the batch",
    "neighbours",
    "all but the first with their neighbours",
    "the last two",
    "attention over samples",
    "fused attention over samples",
    "functional batch norm",
    "a kernel that moves along the batch",
}
WITHOUT_ALL_SAMPLES = {"some samples", "one vector for all"}
ALIGNED = {
    "as it should be",
    "flattened",
    "interleaved views",
    "positions without batch",
    "positions of a batch of one",
    "positions of all samples",
}
FIRST_ORDER: list[type[Extension]] = [BatchGrad, BatchL2Grad, SumGradSquared, Variance]
EXACT: list[type[Extension]] = [DiagGGNExact, KFLR]


def same(actual: object, expected: object) -> bool:
    pairs = zip(actual, expected, strict=True) if isinstance(expected, list) else [(actual, expected)]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-8, atol=1e-12) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("sizes", [(4, 4), (3, 6)], ids=lambda sizes: f"N={sizes[0]},T={sizes[1]}")
@pytest.mark.parametrize("name", REARRANGED)
def test_right_or_refused(name: str, sizes: tuple[int, int]):
    extensions = [*FIRST_ORDER, *EXACT]
    N, T = sizes
    model = Around(REARRANGED[name]).double()
    x, y = torch.randn(N, T, 3).double(), torch.randint(2, (N,))
    ref = Reference(copy.deepcopy(model), x, lambda z: F.cross_entropy(z, y))
    extend(model)
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    try:
        with warnings.catch_warnings(record=True) as caught, backpack(*(extension() for extension in extensions)):
            warnings.simplefilter("always")
            loss.backward()
    except CurvoptError:
        assert name in MIXING | WITHOUT_ALL_SAMPLES
        return
    if name in ALIGNED:
        assert not [warning for warning in caught if issubclass(warning.category, CurvoptWarning)]
    for parameter, p in model.named_parameters():
        for field in [extension.field for extension in extensions]:
            if p.grad is None:
                assert not hasattr(p, field)
            elif field != "kflr" or parameter != "positions.weight":  # factors of embeddings are another chapter
                found, expected = getattr(p, field), getattr(ref, field)(parameter)
                if field == "kflr" and name not in ALIGNED and len(found) < len(expected):
                    expected = [ref.ggn(parameter)]  # of a layer whose samples are not along an axis
                assert same(found, expected), f"{parameter}.{field}"


class Common(nn.Module):
    """Attention whose queries, keys or scores have a part that is the same for all samples."""

    def __init__(self, use: Callable[[Common, Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.shared = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        self.distances, self.prompt = nn.Embedding(4, 1), nn.Linear(6, 6)
        self.latents = nn.Parameter(torch.randn(2, 6))
        self.register_buffer("table", (torch.arange(4.0) - torch.arange(4.0).unsqueeze(1)).unsqueeze(2))
        self.use = use

    def attention(self, h: Tensor, bias: Tensor) -> Tensor:
        return (torch.tanh(self.second(h)) @ h.mT + bias).softmax(-1) @ h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, self.first(x))).mean(1)


def bias_of_each(m: Common, h: Tensor) -> Tensor:
    bias = m.distances(m.table.squeeze(2).abs().long()).squeeze(2)
    return m.attention(m.attention(h, bias), m.shared(m.table).squeeze(2).sigmoid())


def latents(m: Common, h: Tensor) -> Tensor:
    """Of own parameters, through layers first."""
    queries = torch.tanh(m.prompt(m.latents)).expand(len(h), -1, -1)
    return (queries @ m.second(h).mT).softmax(-1) @ h + m.latents


#: what is done, and with which modules
COMMON: dict[str, tuple[Callable[[Common, Tensor], Tensor], set[str]]] = {
    "a bias of each layer": (bias_of_each, {"distances", "shared"}),
    "latents": (latents, {"prompt", "latents"}),
}


def common(name: str) -> Common:
    use, modules = COMMON[name]
    model = Common(use)
    for name, p in model.named_parameters():
        p.requires_grad_(name.split(".")[0] in {"first", "second", "head"} | modules)
    return model


@pytest.mark.parametrize("name", COMMON)
def test_what_all_samples_share_is_pulled_back_from_where_it_meets_them(name: str):
    problem = extended(Case("", lambda: common(name), normal(4, 4, 3), cross_entropy(), labels))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvoptWarning)
        with backpack(BatchGrad(), DiagGGNExact()):
            problem.loss().backward()
    check_all(problem)


class Packed(nn.Module):
    """Layers on the packed steps of sequences, before a recurrent one and a loss that is not known."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.GRU(4, 4)

    def forward(self, x: list[Tensor]) -> Tensor:
        with torch.device("cpu"):  # PyTorch makes the lengths on the default device, and wants them here
            steps = nn.utils.rnn.pack_sequence(x)
        return self.last(steps._replace(data=self.inner(steps.data)))[0].data


@pytest.mark.parametrize("lengths", [(2, 2), (3, 1), (3, 2)])
def test_packed_steps_are_no_shares_of_samples(lengths: tuple[int, int]):
    model = extend(Packed())
    with pytest.raises(CurvoptError, match="called with 2 samples"), backpack(BatchGrad()):
        model([torch.randn(length, 4) for length in lengths]).pow(4).sum().backward()


class Regions(nn.Module):
    """Classes of images, and of several regions in each."""

    def __init__(self):
        super().__init__()
        self.body, self.image, self.region = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, regions: list[int]) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        rows = [scale * h[n] for n, number in enumerate(regions) for scale in range(1, number + 1)]
        return self.image(h), self.region(torch.stack(rows))


@pytest.mark.parametrize("regions", [[2, 2, 2], [1, 3, 2]], ids=str)
def test_rows_of_another_head_that_were_stacked_one_by_one_are_refused(regions: list[int]):
    model, x = extend(Regions().double()), torch.randn(3, 4).double()
    with backpack(BatchGrad()), pytest.raises(CurvoptError, match=r"called with 3 samples.*shape \[6, 3\]"):
        sum(out.sum() for out in model(x, regions)).backward()


def test_samples_that_mix_are_told_in_half_precision():
    torch.manual_seed(0)
    model, x, y = extend(Around(REARRANGED["shuffled"])), torch.randn(8, 4, 3), torch.randint(2, (8,))
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    with pytest.warns(CurvoptWarning, match="sample by sample"), backpack(BatchGrad()):
        loss.backward()


class OneByOne(nn.Module):
    """Calls modules on each sample by itself."""

    def __init__(self, **layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(row) for row in x])

    def one(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class OfImages(OneByOne):
    def one(self, x: Tensor) -> Tensor:
        *layers, last = self.layers.values()
        return last(nn.Sequential(*layers)(x.unsqueeze(0)).flatten())


class OfSequences(OneByOne):
    def one(self, x: Tensor) -> Tensor:
        h = self.layers["words"](torch.tensor(1)).tanh()
        for step in x.split(2):
            h = self.layers["cell"](step, h)
        return self.layers["last"](h)


SINGLE = {
    "perceptron": lambda: OneByOne(
        first=nn.Linear(4, 5), norm=nn.LayerNorm(5), relu=nn.PReLU(), last=nn.Linear(5, 3, bias=False)
    ),
    "convolutions": lambda: OfImages(
        first=nn.Conv1d(1, 2, 3, padding=1),
        norm=nn.InstanceNorm1d(2, affine=True),
        up=nn.ConvTranspose1d(2, 2, 2, stride=2),
        last=nn.Linear(16, 3),
    ),
    "cells": lambda: OfSequences(words=nn.Embedding(3, 5), cell=nn.GRUCell(2, 5), last=nn.Linear(5, 3)),
}


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("name", SINGLE)
def test_calls_on_single_samples_without_a_batch_axis(name: str, N: int):
    check_all(extended(Case("", SINGLE[name], normal(N, 4), cross_entropy(), labels)))


def test_the_outputs_of_one_sample_are_not_taken_for_samples():
    model = extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    with pytest.raises(CurvoptError, match=r"called with 4 samples.*\[3\]"), backpack(BatchGrad()):
        F.mse_loss(model(torch.randn(4)), torch.zeros(3)).backward()


class Generated(nn.Module):
    """A head whose weight, and a shift of whose input, a layer and a norm make of a vector that all samples share."""

    def __init__(self, index: list[int] | int | None):
        super().__init__()
        self.index = index
        self.first, self.norm, self.make = nn.Linear(4, 5), nn.LayerNorm(2), nn.Linear(2, 20)
        self.vector = nn.Parameter(torch.randn(2))
        self.tasks = nn.Embedding(3, 2) if index is not None else None

    def forward(self, x: Tensor) -> Tensor:
        vector = self.vector if self.tasks is None else self.vector * self.tasks(torch.tensor(self.index))
        weight, shift = self.make(self.norm(vector)).split([15, 5], -1)
        return (self.first(x) + shift).tanh() @ weight.view(5, 3)


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("index", [None, 2, [2]])
def test_layers_that_see_a_vector_of_parameters(index: list[int] | int | None, N: int):
    check_all(extended(Case("", lambda: Generated(index), normal(N, 4), cross_entropy(), labels)))


class Steps(OneByOne):
    """Steps through a sequence by a cell that sees no batch, from what a layer makes of a constant."""

    def one(self, x: Tensor) -> Tensor:
        h = self.layers["first"](torch.ones(2, dtype=x.dtype))
        for step in x:
            h = self.layers["cell"](step, h)
        return self.layers["last"](h)


def _calls_of_functions(function: Callable[[], None]) -> int:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.filterwarnings("ignore:.*sample by sample")
def test_long_sequences_in_steps_take_time_in_proportion():
    model = extend(Steps(first=nn.Linear(2, 3), cell=nn.GRUCell(1, 3), last=nn.Linear(3, 2)))
    numbers = []
    for length in (5, 25, 100):  # at first modules are imported
        loss = F.cross_entropy(model(torch.randn(2, length, 1)), torch.zeros(2, dtype=torch.long))
        with backpack(BatchGrad()):
            numbers.append(_calls_of_functions(loss.backward))
    assert numbers[2] < 6 * numbers[1]


class BehindSteps(nn.Module):
    """A layer that has the samples first, or behind the steps along an axis of their own, or in rows."""

    def __init__(self, layer: nn.Module, layout: str = "batch first"):
        super().__init__()
        self.layer, self.last, self.layout = layer, nn.Linear(4, 3), layout

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "batch first":
            h = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).transpose(0, 1)
        elif self.layout == "axis":
            h = self.layer(x.transpose(0, 1))
        else:
            h = self.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0]))
        return self.last(torch.tanh(h).flatten(3).mean(3) if h.dim() > 3 else torch.tanh(h)).mean(0)


class Functional(nn.Module):
    """A layer by an operation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,), ("axis", "rows")),
    "function": (Functional, (5,), ("axis", "rows")),
    "layer norm": (lambda: nn.LayerNorm(4), (4,), ("axis", "rows")),
    "embedding": (lambda: nn.Embedding(5, 4), (), ("axis", "rows")),
    "convolution": (lambda: nn.Conv2d(2, 4, 2), (2, 3, 3), ("rows",)),
    "batch norm": (lambda: nn.BatchNorm2d(4).eval(), (4, 2, 2), ("rows",)),
    "block": (lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu"), (4,), ("axis",)),
}


@pytest.mark.parametrize("N", [3, 4])
@pytest.mark.parametrize(("layer", "layout"), [(name, layout) for name in LAYERS for layout in LAYERS[name][2]])
def test_steps_before_samples_cost_nothing(layer: str, layout: str, N: int):
    """Of any length, that of the batch, too; with the factors of the other layout."""
    make, shape, _ = LAYERS[layer]
    x = torch.randn(N, 4, *shape).double() if shape else torch.randint(5, (N, 4))
    net = BehindSteps(make(), layout).double()
    with warnings.catch_warnings(action="error"):
        check_all(Problem(net, x, torch.randint(3, (N,)), nn.CrossEntropyLoss()), of_hessian=layer != "block")
    if layer == "block":
        return
    factors = []
    for model in (net, BehindSteps(net.layer, "batch first").double()):
        model.last = net.last
        for approx in ("expand", "reduce"):
            with backpack(KFLR(approx=approx), KFACEmpirical(approx=approx)):
                F.cross_entropy(extend(model)(x), torch.arange(N) % 3).backward()
            factors.append([f for p in model.parameters() for f in (*p.kflr, *p.kfac_empirical)])
    for found, expected in zip(factors[:2], factors[2:], strict=True):
        torch.testing.assert_close(found, expected)


def test_averaged_factors_of_steps_before_samples_are_refused():
    net = extend(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double())
    with pytest.raises(CurvoptError, match="kfra|not one row for each sample"), backpack(KFRA()):
        z = net(torch.randn(4, 4, 5).double().transpose(0, 1))
        F.cross_entropy(z.permute(1, 2, 0), torch.randint(3, (4, 4))).backward()


def are_those_of_each(model: nn.Module, losses: Sequence[Tensor]) -> None:
    """Compare individual gradients and GGN diagonals of a mean with those of the loss of each sample by itself."""
    found = [(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()]
    alone = []
    for loss in losses:
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        alone.append([(p.grad_batch[0], p.diag_ggn_exact) for p in model.parameters()])
    for (grad_batch, diagonal), *each in zip(found, *alone, strict=True):
        torch.testing.assert_close(grad_batch, torch.stack([grad for grad, _ in each]) / len(losses))
        torch.testing.assert_close(diagonal, sum(share for _, share in each) / len(losses))


class TimeFirstByHand(nn.Module):
    """Products, biases, scales, positions, slopes and computed weights on ``[T, N, F]``, or on its rows."""

    def __init__(self, T: int, in_rows: bool):
        super().__init__()
        self.in_rows, self.mask = in_rows, torch.ones(4, 4).triu()
        self.weight, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.one = nn.Parameter(torch.ones(1))
        self.positions, self.slope, self.last = nn.Parameter(torch.randn(T, 1, 4)), nn.PReLU(), nn.Linear(4, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        shape = x.shape
        h = x.reshape(-1, 4) if self.in_rows else x
        h = torch.tanh(h @ self.weight + self.bias) * self.scale
        h = (h.view(shape) + self.positions).view(h.shape)
        h = self.slope(self.normed(h)) * self.one
        h = h + torch.tanh(h @ (self.other * self.mask))
        return self.last(h.view(shape).sin().mean(0))


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("T", [3, 4])
def test_functions_on_sequences_of_which_time_comes_first(T: int, in_rows: bool):
    model, x, y = extend(TimeFirstByHand(T, in_rows).double()), torch.randn(4, T, 4).double(), torch.randint(3, (4,))
    model.mask = model.mask.double()
    with warnings.catch_warnings(), backpack(BatchGrad(), DiagGGNExact()):
        warnings.simplefilter("error", CurvoptWarning)
        F.cross_entropy(model(x), y).backward()
    are_those_of_each(model, [F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(4)])


class Trajectory(nn.Module):
    """The states of a system over time, stacked along an axis, as solvers of differential equations return them."""

    def __init__(self, steps: int, axis: int, skipped: int):
        super().__init__()
        self.steps, self.axis, self.skipped = steps, axis, skipped
        self.slope = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for _ in range(self.steps + self.skipped):
            x = x + 0.3 * self.slope(x)
            states.append(x)
        stacked = torch.stack(states, self.axis)
        return stacked[self.skipped :] if self.axis == 0 else stacked[:, self.skipped :]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("steps", "skipped"), [(4, 0), (8, 1)])
def test_of_as_many_steps_as_samples_layers_say_which_axis_is_time(steps: int, skipped: int, axis: int):
    model, x = extend(Trajectory(steps, axis, skipped).double()), torch.randn(4, 2).double()

    def loss(x: Tensor) -> Tensor:
        return (model(x) - 1).square().mean()

    with warnings.catch_warnings(), backpack(BatchGrad(), DiagGGNExact()):
        warnings.simplefilter("error", CurvoptWarning)
        loss(x).backward()
    are_those_of_each(model, [loss(x[n : n + 1]) for n in range(4)])


class Sentences(nn.Module):
    """Classes of sentences of several lengths: layers on their packed steps before and after a recurrent one."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4, padding_idx=2), nn.LayerNorm(4)
        self.inner, self.net, self.outer, self.last = nn.Linear(4, 4), kind(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        steps, _ = self.net(packed._replace(data=self.norm(torch.tanh(self.inner(self.embed(packed.data))))))
        steps = steps._replace(data=torch.tanh(self.outer(steps.data)))
        return self.last(nn.utils.rnn.pad_packed_sequence(steps)[0].sum(0) / lengths[:, None])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_layers_on_packed_steps_are_told_their_samples(kind: type[nn.RNNBase]):
    model, lossfunc = extend(Sentences(kind).double(), batch_axis=1), nn.CrossEntropyLoss()
    for lengths in map(torch.tensor, ([5, 2, 3, 2], [2, 4, 2, 4])):
        x, y = torch.randint(7, (5, 4)), torch.randint(3, (4,))
        with warnings.catch_warnings(), backpack(BatchGrad(), DiagGGNExact()):
            warnings.simplefilter("error", CurvoptWarning)
            lossfunc(model(x, lengths), y).backward()
        alone = [lossfunc(model(x[:, n : n + 1], lengths[n : n + 1]), y[n : n + 1]) for n in range(4)]
        are_those_of_each(model, alone)


class AroundNorm(nn.Module):
    """A batch norm, with a connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.norm(h))


def test_samples_that_one_of_two_paths_mixes_are_mixed() -> None:
    model = extend(AroundNorm())
    loss = F.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 2)
    with pytest.raises(CurvoptError, match="train-mode batch norm mixes them"), backpack(BatchGrad()):
        loss.backward()
