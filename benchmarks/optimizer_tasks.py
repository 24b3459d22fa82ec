"""The tasks of `benchmarks.optimizers`: networks, data, batches, and how long each is trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import pi, prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.language_model import GPT, Size, Text
from experiments import models
from experiments.data import DEFAULT_ROOT, Data, Split, load, load_npz, reconstruction, standardized
from experiments.problems import PROBLEMS

Batch = tuple[Tensor, Tensor]
#: Samples of which losses are reported, at most.
EVALUATED = 1000


@dataclass(frozen=True)
class Problem:
    """What is trained, and on what.

    Args:
        model: makes the network.
        loss: of the network and a batch, a mean over its samples.
        batches: of a seed and a size, without end.
        train: batches of equal size of which the training loss is reported.
        held_out: batches of which the held-out loss is reported.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: Callable[[int, int], Iterator[Batch]]
    train: list[Batch]
    held_out: list[Batch]


@dataclass(frozen=True)
class Task:
    """A problem, and how it is trained.

    Args:
        title: in words.
        make: makes the problem, of a file with images for tasks that need one.
        steps: how many.
        batch: samples in a batch.
        images: whether the task needs a file with images.
        attached: what curvopt's optimizers are told beside the model.
        faster: by how much all rates that are tried are higher; so the best of four is seldom the highest.
    """

    title: str
    make: Callable[[Path | None], Problem]
    steps: int
    batch: int = 64
    images: bool = False
    attached: Mapping[str, Any] = field(default_factory=dict)
    faster: float = 1.0


# ------------------------------------------------------------------------------------------------------------- networks


def batchnorm_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three convolutions with batch norm, and a linear layer."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in [(shape[0], 8), (8, 16), (16, 32)]:
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (shape[1] // 8) * (shape[2] // 8), classes))


def vit(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three layers of width 64 over 16 squares of 8 x 8 pixels."""
    return models.Transformer(models.Patches(shape[0], 64, size=8), 16, 64, 3, classes, causal=False)


class Recurrent(nn.Module):
    """A language model of one LSTM: characters ``[N, T]`` to logits ``[N, characters, T]``."""

    def __init__(self, characters: int, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm, self.head = nn.LSTM(32, width, batch_first=True), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next characters."""
        return self.head(self.lstm(self.embedding(x))[0]).mT


class GraphConvolutions(nn.Module):
    """Two layers, each a linear map of the nodes' features and a mean over neighbours (Kipf & Welling 2017)."""

    def __init__(self, neighbours: Tensor, *sizes: int) -> None:
        super().__init__()
        self.register_buffer("neighbours", neighbours, persistent=False)
        self.first, self.last = (nn.Linear(i, o) for i, o in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[nodes, F]`` to logits."""
        hidden = torch.sparse.mm(self.neighbours, self.first(x)).relu()
        return torch.sparse.mm(self.neighbours, self.last(hidden))


class Poisson(nn.Module):
    """A physics-informed network: points ``[N, 2]`` to residuals ``[N, 1]`` of ``-Δu = f`` on the unit square, over 10.

    ``u`` vanishes on the border by construction; the solution is ``sin(πx) sin(2πy) / 2``.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Residuals, by derivatives of derivatives."""
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            u = self.net(points) * (4 * points * (1 - points)).prod(1, keepdim=True)
            (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
            second = [
                torch.autograd.grad(slope[:, k].sum(), points, create_graph=True)[0][:, k : k + 1] for k in (0, 1)
            ]
        x, y = points.detach().split(1, 1)
        return (second[0] + second[1] + 2.5 * pi**2 * torch.sin(pi * x) * torch.sin(2 * pi * y)) / 10


def finetuned(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new head on a frozen trunk of convolutions, which has learned to tell the first five digits apart."""
    data = PROBLEMS["mnist5k-cnn"].prepare(load("mnist5k")).train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.small_cnn(classes)
        optimizer = torch.optim.AdamW(model.parameters(), 0.003)
        few = data.y < 5
        for chosen in torch.randperm(int(few.sum())).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[few][chosen]), data.y[few][chosen]).backward()
            optimizer.step()
    trunk = model[:-4].requires_grad_(False)
    return nn.Sequential(trunk, *models.mlp(32 * 3 * 3, 64, classes))


# ------------------------------------------------------------------------------------------------------------- problems


def supervised(
    data: Data, model: Callable[[tuple[int, ...], int], nn.Module], loss: Callable[[Tensor, Tensor], Tensor]
) -> Problem:
    """Inputs and targets."""

    def batches(seed: int, size: int) -> Iterator[Batch]:
        generator, train = torch.Generator().manual_seed(seed), data.train
        while True:
            order = torch.randperm(len(train.x), generator=generator)
            for chosen in order.split(min(size, len(order)))[: max(1, len(order) // size)]:
                yield train.x[chosen], train.y[chosen]

    train, held_out = (
        list(zip(split.x[:EVALUATED].split(250), split.y[:EVALUATED].split(250), strict=True))
        for split in (data.train, data.test)
    )
    return Problem(
        lambda: model(tuple(data.train.x.shape[1:]), data.classes),
        lambda network, batch: loss(network(batch[0]), batch[1]),
        batches,
        train,
        held_out,
    )


def mnist(model: Callable[[tuple[int, ...], int], nn.Module]) -> Problem:
    """4,000 images of MNIST, and 1,000 held out."""
    return supervised(standardized(load("mnist5k", DEFAULT_ROOT)), model, F.cross_entropy)


def autoencoder() -> Problem:
    """The same images, 784-1000-500-250-30 and back."""
    given = PROBLEMS["mnist5k-autoencoder"]
    return supervised(reconstruction(load("mnist5k", DEFAULT_ROOT)), given.model, given.loss())


def characters() -> Problem:
    """Python's help texts."""
    return supervised(load("python-help", DEFAULT_ROOT), lambda _, classes: Recurrent(classes), F.cross_entropy)


def language_model() -> Problem:
    """The network and the text of `benchmarks.language_model`, smaller; nats a byte."""
    text = Text.load()
    size = Size(dim=64, depth=3, heads=2, length=64, batch=16, steps=0, every=0, validated=256)

    def batches(seed: int, batch: int) -> Iterator[Batch]:
        return text.batches(replace(size, batch=batch), seed, "cpu")

    return Problem(
        partial(GPT, size),
        lambda network, batch: network(*batch) / batch[0].numel(),
        batches,
        Text(train=text.held_out, held_out=text.train).validation(size, "cpu"),
        text.validation(size, "cpu"),
    )


def graph() -> Problem:
    """Digits by an eighth of their pixels and by eight digits that look alike; every other digit is held out."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    images, labels = load_digits(return_X_y=True)
    near = torch.tensor(kneighbors_graph(images, 8).toarray(), dtype=torch.float32)
    near = (near + near.T + torch.eye(len(near))).clamp(max=1)
    scale = near.sum(1).rsqrt()
    seen = torch.rand(images.shape, generator=torch.Generator().manual_seed(0)) < 1 / 8
    x, y = torch.tensor(images, dtype=torch.float32) / 16 * seen, torch.tensor(labels)
    train, held_out = (y.where(torch.arange(len(y)) % 2 == half, -100) for half in (0, 1))
    return Problem(
        lambda: GraphConvolutions((scale[:, None] * near * scale).to_sparse(), 64, 64, 10),
        lambda network, batch: F.cross_entropy(network(batch[0]), batch[1]),
        lambda *_: itertools.repeat((x, train)),
        [(x, train)],
        [(x, held_out)],
    )


def friedman() -> Data:
    """Ten uniform inputs, five of them relevant (Friedman 1991), and a standardized target with a tenth of noise."""
    from sklearn.datasets import make_friedman1

    inputs, targets = (torch.tensor(a, dtype=torch.float32) for a in make_friedman1(8000, noise=0.5, random_state=0))
    x, y = 2 * inputs - 1, ((targets - targets.mean()) / targets.std()).unsqueeze(1)
    return Data(Split(x[:6000], y[:6000]), Split(x[6000:], y[6000:]), classes=1)


def unit_square() -> Data:
    """Points of the unit square, whose residuals are to vanish."""
    points = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    return Data(*(Split(p, torch.zeros(len(p), 1)) for p in points.split([3000, 1000])), classes=1)


# ------------------------------------------------------------------------------------------------------------ the tasks


def _of_images(model: Callable[[tuple[int, ...], int], nn.Module], file: Path | None) -> Problem:
    assert file is not None
    return supervised(standardized(load_npz(file)), model, F.cross_entropy)


#: From cheap to dear.
TASKS: dict[str, Task] = {
    "graph": Task(
        "Graph convolutions, all nodes in a batch", lambda _: graph(), 200, attached={"batch_axis": None}, faster=3
    ),
    "finetuning": Task("New head on a frozen trunk, MNIST", lambda _: mnist(finetuned), 300),
    "mlp": Task("MLP, MNIST, a millisecond a step", lambda _: mnist(PROBLEMS["mnist5k-mlp"].model), 800, 128),
    "regression": Task(
        "Regression of ten inputs",
        lambda _: supervised(friedman(), lambda shape, _: models.mlp(prod(shape), 64, 64, 64, 1), F.mse_loss),
        2000,
    ),
    "pinn": Task(
        "Poisson's equation, by derivatives of a network",
        lambda _: supervised(unit_square(), lambda *_: Poisson(), F.mse_loss),
        1500,
    ),
    "batchnorm": Task("CNN with batch norm, MNIST", lambda _: mnist(batchnorm_cnn), 300, 128),
    "lstm": Task("LSTM on characters", lambda _: characters(), 1500, 16),
    "gpt": Task("Language model on bytes of source code", lambda _: language_model(), 800, 16),
    "vit": Task("Vision transformer, 8,000 CIFAR-10 images", partial(_of_images, vit), 1000, images=True),
    "autoencoder": Task("Deep autoencoder, MNIST", lambda _: autoencoder(), 300, 256),
}
