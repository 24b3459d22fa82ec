"""Samples that lie elsewhere than on the first axis, or depend on each other: right numbers or a refusal."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Net, Problem, cross_entropy, labels, normal
from checks import FIRST_ORDER, check_all, extended
from core.random_programs import STEPS
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

#: Steps by which samples depend on each other; those with samples elsewhere, whose layers may have no two factors.
MIXING = {"gate", "leak", "branch", "matrix of samples", "attention among samples"}
ELSEWHERE = {"order", "one row", "two views", "views in turn", "put in place", "kernel along samples"}
RANDOM = [tuple(random.Random(seed).sample(list(STEPS), 2)) for seed in range(16)]


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("T", [3, 4])
@pytest.mark.parametrize("names", [*((name,) for name in STEPS), *RANDOM], ids=" and ".join)
def test_right_or_refused(names: tuple[str, ...], T: int):
    """Steps of random graphs, each before a layer."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.into(x)
        for name, layer, numbers in zip(names, m.layers, constants, strict=False):
            h = torch.tanh(layer(STEPS[name](h, numbers)))
        return m.out(h).mean(1)

    extensions = [*FIRST_ORDER, DiagGGNExact, KFLR]
    layers, constants = nn.ModuleList(nn.Linear(5, 5) for _ in names), torch.rand(2, 5, 5).double()
    model = Net(forward, into=nn.Linear(3, 5), layers=layers, out=nn.Linear(5, 2)).double()
    x, y = torch.randn(4, T, 3).double(), torch.randint(2, (4,))
    ref = Reference(copy.deepcopy(model), x, lambda z: F.cross_entropy(z, y))
    extend(model)
    mixing, aligned = not MIXING.isdisjoint(names), (MIXING | ELSEWHERE).isdisjoint(names)
    try:
        with warnings.catch_warnings(), backpack(*(extension() for extension in extensions)):
            warnings.simplefilter("error" if aligned else "ignore", CurvoptWarning)
            F.cross_entropy(model(x), y).backward()
    except CurvoptError:
        assert mixing
        return
    for parameter, p in model.named_parameters():
        for field in [extension.field for extension in extensions]:
            found, expected = getattr(p, field), getattr(ref, field)(parameter)
            if field == "kflr" and not aligned and len(found) < len(expected):
                expected = [ref.ggn(parameter)]  # of a layer whose samples are not along an axis
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


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
