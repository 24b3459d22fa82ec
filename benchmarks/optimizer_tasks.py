"""The tasks of `benchmarks.optimizers`: each short, and five times as long with a rate that falls as a cosine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi, prod
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import models, problems
from experiments.data import Data, Split, load, load_npz
from experiments.problems import PROBLEMS


@dataclass(frozen=True)
class Task:
    """A problem of ``experiments``, at the size of this benchmark."""

    problem: problems.Problem
    steps: int
    every: int  # steps between evaluations
    batch: int
    evaluated: int | None = None  # samples of the training set, all by default
    npz: bool = False  # whether the data are the user's
    cosine: bool = False

    def data(self, npz: Path | None, root: Path) -> Data:
        """The data set, which may be in a file of the user's."""
        if self.npz:
            assert npz is not None
            return self.problem.prepare(load_npz(npz))
        made = {"friedman": friedman, "unit-square": unit_square}.get(self.problem.data)
        return self.problem.prepare(load(self.problem.data, root) if made is None else made())


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


# ----------------------------------------------------------------------------------------------------------------- data


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


def _mean_squares(data: str, **options: object) -> problems.Problem:
    common = {"epochs": 1, "batch_size": 64, "target": 0.0, "loss": nn.MSELoss, "prepare": lambda data: data}
    return problems.Problem(data=data, **{**common, **options})  # pyright: ignore[reportArgumentType]


_mlp, _gpt, _3c3d = PROBLEMS["mnist5k-mlp"], PROBLEMS["help-gpt"], replace(PROBLEMS["cifar10-3c3d"], augment=False)
SHORT: dict[str, Task] = {
    "autoencoder": Task(PROBLEMS["mnist5k-autoencoder"], steps=300, every=20, batch=256),
    "3c3d": Task(_3c3d, 80, every=10, batch=128, evaluated=1000, npz=True),
    "transformer": Task(
        replace(_gpt, model=lambda shape, classes: models.gpt(classes, *shape, dim=64, depth=2)),
        steps=240,
        every=20,
        batch=16,
        evaluated=400,
    ),
    "mlp": Task(_mlp, steps=160, every=10, batch=128),
    "batchnorm-cnn": Task(replace(_mlp, model=batchnorm_cnn), steps=60, every=6, batch=128, evaluated=1000),
    "vit": Task(replace(_3c3d, model=vit), steps=240, every=20, batch=64, evaluated=1000, npz=True),
    "lstm": Task(
        replace(_gpt, model=lambda _, classes: Recurrent(classes)), steps=300, every=20, batch=16, evaluated=400
    ),
    "pinn": Task(_mean_squares("unit-square", model=lambda *_: Poisson()), steps=400, every=40, batch=64),
    "regression": Task(
        _mean_squares("friedman", model=lambda shape, _: models.mlp(prod(shape), 64, 64, 64, 1)),
        steps=600,
        every=60,
        batch=64,
    ),
    "finetuning": Task(replace(_mlp, model=finetuned), steps=100, every=10, batch=64, evaluated=1000),
}
TASKS = SHORT | {
    f"{name}-long": replace(task, steps=5 * task.steps, every=5 * task.every, cosine=True)
    for name, task in SHORT.items()
}
