"""Samples that lie elsewhere than on the first axis, or depend on each other: right numbers or a refusal.

The rows are common code: embeddings of positions, time-first sequences, two views of a batch, experts for some samples.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Net, Problem, cross_entropy, labels, normal
from checks import FIRST_ORDER, check_all, extended
from reference import Reference
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions import (
    KFLR,
    BatchGrad,
    DiagGGNExact,
    KFACEmpirical,
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


def same(actual: object, expected: object) -> bool:
    pairs = zip(actual, expected, strict=True) if isinstance(expected, list) else [(actual, expected)]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-8, atol=1e-12) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("sizes", [(4, 4), (3, 6)], ids=lambda sizes: f"N={sizes[0]},T={sizes[1]}")
@pytest.mark.parametrize("name", REARRANGED)
def test_right_or_refused(name: str, sizes: tuple[int, int]):
    extensions = [*FIRST_ORDER, DiagGGNExact, KFLR]
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


def packed(m: Net, x: list[Tensor]) -> Tensor:
    """Layers on the packed steps of sequences, before a recurrent one."""
    with torch.device("cpu"):  # PyTorch makes the lengths on the default device, and wants them here
        steps = nn.utils.rnn.pack_sequence(x)
    return m.last(steps._replace(data=m.inner(steps.data)))[0].data


@pytest.mark.parametrize("lengths", [(2, 2), (3, 1), (3, 2)])
def test_packed_steps_are_no_shares_of_samples(lengths: tuple[int, int]):
    """Before a loss that is not known."""
    model = extend(Net(packed, inner=nn.Linear(4, 4), last=nn.GRU(4, 4)))
    with pytest.raises(CurvoptError, match="called with 2 samples"), backpack(BatchGrad()):
        model([torch.randn(length, 4) for length in lengths]).pow(4).sum().backward()


def one_by_one(of_one: Callable[[Net, Tensor], Tensor], **layers: nn.Module) -> Net:
    """Calls modules on each sample by itself."""
    return Net(lambda m, x: torch.stack([of_one(m, row) for row in x]), **layers)


def steps(m: Net, x: Tensor) -> Tensor:
    """Through a sequence by a cell that sees no batch, from what a layer makes of a constant."""
    h = m.words(torch.tensor(1)).tanh()
    for step in x.split(2):
        h = m.cell(step, h)
    return m.last(h)


SINGLE = {
    "perceptron": lambda: one_by_one(
        lambda m, x: m.last(m.relu(m.norm(m.first(x)))),
        first=nn.Linear(4, 5),
        norm=nn.LayerNorm(5),
        relu=nn.PReLU(),
        last=nn.Linear(5, 3, bias=False),
    ),
    "convolutions": lambda: one_by_one(
        lambda m, x: m.last(m.up(m.norm(m.first(x[None]))).flatten()),
        first=nn.Conv1d(1, 2, 3, padding=1),
        norm=nn.InstanceNorm1d(2, affine=True),
        up=nn.ConvTranspose1d(2, 2, 2, stride=2),
        last=nn.Linear(16, 3),
    ),
    "cells": lambda: one_by_one(steps, words=nn.Embedding(3, 5), cell=nn.GRUCell(2, 5), last=nn.Linear(5, 3)),
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


def calls_of_functions(function: Callable[[], None]) -> int:
    events: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(before)
    return events.count("call")


@pytest.mark.filterwarnings("ignore:.*sample by sample")
def test_long_sequences_in_steps_take_time_in_proportion():
    model, numbers = extend(SINGLE["cells"]()), []
    for length in (5, 25, 100):  # at first modules are imported
        loss = F.cross_entropy(model(torch.randn(2, 2 * length)), torch.zeros(2, dtype=torch.long))
        with backpack(BatchGrad()):
            numbers.append(calls_of_functions(loss.backward))
    assert numbers[2] < 6 * numbers[1]


def behind_steps(layer: nn.Module, last: nn.Module, layout: str) -> Net:
    """A layer that has the samples first, or behind the steps along an axis of their own, or in rows."""

    def forward(m: Net, x: Tensor) -> Tensor:
        if layout == "batch first":
            h = m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).transpose(0, 1)
        elif layout == "axis":
            h = m.layer(x.transpose(0, 1))
        else:
            h = m.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0]))
        return m.last(torch.tanh(h).flatten(3).mean(3) if h.dim() > 3 else torch.tanh(h)).mean(0)

    return Net(forward, layer=layer, last=last).double()


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,), ("axis", "rows")),
    "function": (lambda: Net(lambda m, x: F.linear(x, m.w), w=torch.randn(4, 5)), (5,), ("axis", "rows")),
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
    net = behind_steps(make(), nn.Linear(4, 3), layout)
    with warnings.catch_warnings(action="error"):
        check_all(Problem(net, x, torch.randint(3, (N,)), nn.CrossEntropyLoss()), of_hessian=layer != "block")
    if layer == "block":
        return
    factors = []
    for model in (net, behind_steps(net.layer, net.last, "batch first")):
        for approx in ("expand", "reduce"):
            with backpack(KFLR(approx=approx), KFACEmpirical(approx=approx)):
                F.cross_entropy(extend(model)(x), torch.arange(N) % 3).backward()
            factors.append([f for p in model.parameters() for f in (*p.kflr, *p.kfac_empirical)])
    for found, expected in zip(factors[:2], factors[2:], strict=True):
        torch.testing.assert_close(found, expected)


def test_samples_that_one_of_two_paths_mixes_are_mixed() -> None:
    """A batch norm, with a connection around it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(h + m.norm(h))

    model = extend(Net(forward, first=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(4, 2)))
    loss = F.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 2)
    with pytest.raises(CurvoptError, match="train-mode batch norm mixes them"), backpack(BatchGrad()):
        loss.backward()
