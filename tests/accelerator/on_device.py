"""What only devices have: waiting for them, random numbers of their own, networks spread over several.

``pytest --device emulated tests/accelerator/on_device.py`` runs it; `test_accelerator` does, with other tests.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from checks import FIRST_ORDER, compare
from torch import Tensor, nn

import accelerator
from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import (
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
)
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW
from experiments.config import parse
from experiments.training import Training


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device that is not the default one, so that whatever is made without saying where is made elsewhere."""
    with torch.device("cpu"):
        yield request.config.getoption("--device")


@pytest.fixture
def waits(device: str) -> Iterator[Callable[[], dict[str, int]]]:
    """What waited for the device since the last call."""
    if device != accelerator.NAME:
        pytest.skip("the emulated device counts")
    take: Callable[[], dict[str, int]] = accelerator.load().take_waits
    take()
    yield take


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 5))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3).eval()]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(12, 5))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x.squeeze(1))).mean(1))


every_net = pytest.mark.parametrize("make", [mlp, cnn, Transformer])
EXTENSIONS = [*FIRST_ORDER, KFAC, KFLR, DiagGGNExact, DiagGGNMC, BatchDiagGGNExact, DiagHessian]


def prepared(make: Callable[[], nn.Module], device: str, N: int = 20) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    x, y = torch.randn(N, 1, 8, 8, device=device), torch.randint(5, (N,), device=device)
    return extend(make().to(device)), extend(nn.CrossEntropyLoss()), x, y


@every_net
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_quantities_wait_for_the_sign_of_the_loss_alone(
    make: Callable[[], nn.Module], extension: type[Extension], device: str, waits: Callable
):
    model, lossfunc, x, y = prepared(make, device)
    loss = lossfunc(model(x), y)
    waits()
    with backpack(extension()):
        loss.backward()
    found = sum(waits().values())
    if make is Transformer and extension is DiagHessian:  # which operations are nonlinear, for all columns at once
        assert found <= 12
    else:  # whether the loss weighs something negative
        assert found == (0 if extension in FIRST_ORDER else 1)


@every_net
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_launches_do_not_grow_with_the_batch(
    make: Callable[[], nn.Module], extension: type[Extension], device: str, waits: Callable
):
    launches: list[dict[str, int]] = []
    for N in (16, 64):
        model, lossfunc, x, y = prepared(make, device, N)
        accelerator.load().take_launches()
        with backpack(extension()):
            lossfunc(model(x), y).backward()
        launches.append(accelerator.load().take_launches())
    assert launches[0] == launches[1]


@every_net
@pytest.mark.parametrize("make_optimizer", [KFACSGD, EKFACSGD, DiagonalNewton, KFACAdamW])
def test_steps_wait_once(make: Callable[[], nn.Module], make_optimizer: type, device: str, waits: Callable):
    model, lossfunc, x, y = prepared(make, device)
    optimizer = make_optimizer(model, lr=0.01)
    alone = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = lossfunc(model(x), y)
        loss.backward()
        waits()
        optimizer.step()
        alone.append(sum(waits().values()))
    layers = sum(p.dim() > 1 for p in model.parameters())
    assert min(alone) == 1  # is all of it finite
    # a refresh asks whether its decompositions succeeded: eigendecompositions one by one
    assert max(alone[1:]) <= (3 if make_optimizer in (KFACSGD, DiagonalNewton) else 2 + 2 * layers)


@pytest.mark.parametrize("make_optimizer", [KFACSGD, EKFACSGD, DiagonalNewton, KFACAdamW])
def test_launches_of_a_step(make_optimizer: type, device: str, waits: Callable):
    """They grow neither with the layers of one shape nor with the blocks that factors are cut down to."""

    def ordinary(layers: int, size: int) -> int:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, size), *(nn.Linear(size, size) for _ in range(layers)))
        model, lossfunc, x, y = prepared(lambda: nn.Sequential(*model, nn.Linear(size, 5)), device)
        blocks = {} if make_optimizer is DiagonalNewton else {"max_factor_size": 10}
        optimizer = make_optimizer(model, lr=1e-3, **blocks)
        found = []
        for _ in range(12):
            optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            accelerator.load().take_launches()
            optimizer.step()
            found.append(sum(accelerator.load().take_launches().values()))
        return min(found)

    few, many = ordinary(2, 16), ordinary(7, 16)
    # a norm of second moments, torch._foreach_norm, is two launches for each layer where a device has no kernel for all
    assert (many - few) / 5 in (0, 2 if make_optimizer in (KFACAdamW, EKFACSGD) else 0)
    assert ordinary(2, 45) == few


def test_quantities_draw_no_random_numbers_on_the_device(device: str):
    model, lossfunc, x, y = prepared(Transformer, device)
    state = torch.get_device_module(device).get_rng_state()
    lossfunc(model(x), y).backward()
    expected = torch.randn(3, device=device)
    gradients = [p.grad for p in model.parameters()]
    torch.get_device_module(device).set_rng_state(state)
    model.zero_grad()
    with backpack(BatchGrad()):
        lossfunc(model(x), y).backward()
    assert torch.equal(torch.randn(3, device=device), expected)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
        torch.testing.assert_close(p.grad_batch.sum(0), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["kfac-sgd", "kfac-adamw", "hessian-free", "adamw"])
def test_training_goes_on_where_it_was_interrupted(optimizer: str, device: str):
    def losses(training: Training, skip: int) -> list[float]:
        batches = itertools.islice(training.batches(0, skip), 3)
        return [training.step(x, y)["train/batch_loss"] for x, y in batches]

    config = parse(["--problem", "digits-mlp", "--epochs", "1", "--device", device, optimizer]).resolved()
    training = Training(config)
    before = losses(training, 0)
    torch.rand(2, device=device)  # as augmentation does
    state = copy.deepcopy(training.state())
    after, drawn = losses(training, 3), torch.rand(3, device=device)
    training = Training(config)
    training.load(state)
    assert losses(training, 3) == after and torch.equal(torch.rand(3, device=device), drawn)
    assert sum(after) < sum(before)
    assert all(p.device.type == torch.device(device).type for p in training.model.parameters())


class Cell(nn.Module):
    """A recurrent cell in a loop. A device computes it in one operation, which adds both biases."""

    def __init__(self, kind: type[nn.RNNCellBase]):
        super().__init__()
        self.cell = kind(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(8):
            state = self.cell(x[:, 0, t], state)
        return state[0] + 2 * state[1] if isinstance(self.cell, nn.LSTMCell) else state


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_have_the_fields_of_the_cpu(kind: type[nn.RNNCellBase], device: str):
    names = {BatchGrad: "grad_batch", KFLR: "kflr", DiagGGNExact: "diag_ggn_exact"}
    model = Cell(kind).double()
    found = []
    for where in ("cpu", device):
        own = extend(copy.deepcopy(model).to(where))
        x = torch.linspace(-1, 1, 3 * 64, dtype=torch.float64).view(3, 1, 8, 8).to(where)
        with warnings.catch_warnings(), backpack(*(extension() for extension in names)):
            warnings.simplefilter("error", CurvoptWarning)  # sample by sample, say
            extend(nn.MSELoss())(own(x), x[:, 0, 0, :4]).backward()
        fields = [getattr(p, name) for p in own.parameters() for name in names.values()]
        found.append([x.cpu() for field in fields for x in (field if isinstance(field, list) else [field])])
    torch.testing.assert_close(*found)


class To(nn.Module):
    def __init__(self, device: torch.device | str):
        super().__init__()
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.device)


@pytest.mark.parametrize("of_device", [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 1, 0)])
@pytest.mark.parametrize("extension", [e for e in EXTENSIONS if e not in (KFAC, DiagGGNMC)])
def test_networks_that_are_spread_over_devices(extension: type[Extension], of_device: tuple[int, ...], device: str):
    """Each of three layers on the device or on the CPU: the numbers are those of the CPU alone."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.Linear(48, 7), nn.Linear(7, 4)]
    x, y = torch.randn(5, 2, 6, 6).double(), torch.randint(4, (5,))
    between = [[nn.Tanh(), nn.Flatten()], [nn.Sigmoid()], []]

    def parts_of(p: nn.Parameter) -> list[Tensor]:
        field = getattr(p, extension.field)
        return list(field) if isinstance(field, list) else [field]

    def fields(where: tuple[int, ...]) -> list[list[Tensor]]:
        devices = [device if on_device else "cpu" for on_device in where]
        mine = [copy.deepcopy(layer).double().to(d) for layer, d in zip(layers, devices, strict=True)]
        parts = zip(devices, mine, between, strict=True)
        model = extend(nn.Sequential(*(module for d, layer, rest in parts for module in (To(d), layer, *rest))))
        with backpack(extension()):
            extend(nn.CrossEntropyLoss())(model(x), y.to(devices[-1])).backward()
        for layer, d in zip(mine, devices, strict=True):
            assert {part.device.type for part in parts_of(layer.weight)} == {d}
        return [[part.cpu() for part in parts_of(p)] for p in model.parameters()]

    for actual, expected in zip(fields(of_device), fields((0, 0, 0)), strict=True):
        compare(actual, expected, extension.field)


@pytest.mark.parametrize("known", [True, False])
def test_losses_with_negative_weights_are_those_of_the_cpu(device: str, known: bool):
    model, weights = mlp().double(), torch.randn(20).double()
    x, y = torch.randn(20, 1, 8, 8).double(), torch.randint(5, (20,))
    fields: list[list[Tensor]] = []
    for at in ("cpu", device):
        net, lossfunc = extend(copy.deepcopy(model).to(at)), extend(nn.CrossEntropyLoss())

        def loss(net=net, lossfunc=lossfunc, at=at) -> Tensor:
            z, labels = net(x.to(at)), y.to(at)
            of_each = nn.functional.cross_entropy(z, labels, reduction="none")
            return -lossfunc(z, labels) if known else (weights.to(at) * of_each).sum()

        with pytest.raises(CurvoptError, match="minimised"), backpack(DiagGGNExact()):
            loss().backward()
        with backpack(DiagHessian()):
            loss().backward()
        fields.append([p.diag_h.cpu() for p in net.parameters()])
    for expected, found in zip(*fields, strict=True):
        torch.testing.assert_close(found, expected)
