"""What is measured: six networks with random data, and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import models


@dataclass(frozen=True)
class Task:
    """A network with its loss and one batch."""

    model: nn.Module
    lossfunc: nn.CrossEntropyLoss
    x: Tensor
    y: Tensor

    def gradient(self) -> None:
        """The plain gradient, the unit of all costs."""
        self.model.zero_grad()
        self.lossfunc(self.model(self.x), self.y).backward()


@dataclass(frozen=True)
class Problem:
    """How to make a `Task`.

    Args:
        model: makes the network for a number of classes; other processes must be able to load it.
        classes: number of classes, or the size of the vocabulary.
        N: number of samples.
        inputs: shape of a sample, unless it is tokens.
        tokens: length of the sequences of tokens, 0 for images.
        exact: whether columns for every class (and token) are affordable, and the network is piecewise linear, so that
            Hessian and GGN have the same blocks.
    """

    model: Callable[[int], nn.Module]
    classes: int
    N: int
    inputs: tuple[int, ...] = ()
    tokens: int = 0
    exact: bool = True

    def make(self, device: str = "cpu") -> Task:
        """The same network and samples, always; in the default dtype and in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model(self.classes).to(device, torch.get_default_dtype()).eval()
            if self.tokens:
                text = torch.randint(self.classes, (self.N, self.tokens + 1))
                x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            else:
                x, y = torch.randn(self.N, *self.inputs), torch.randint(self.classes, (self.N,))
        return Task(model, nn.CrossEntropyLoss(), x.to(device), y.to(device))


def all_cnn_c(classes: int) -> nn.Module:
    """With an average that more packages know."""
    model = models.all_cnn_c(classes)
    model[-2] = nn.AvgPool2d(6)
    return model


class Affine(nn.Module):
    """A layer of one's own, which computes what an ``nn.Linear`` does."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def mlp_of_functions(classes: int, widths: tuple[int, ...] = (784, 512, 256)) -> nn.Module:
    """The MLP, of layers that no package knows."""
    model = models.mlp(*widths, classes)
    return nn.Sequential(*(Affine(layer) if isinstance(layer, nn.Linear) else layer for layer in model))


def tiny(classes: int) -> nn.Module:
    """For tests."""
    convolution = nn.Conv2d(1, 3, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), *models.mlp(48, 5, classes))


PROBLEMS = {
    "mlp": Problem(partial(models.mlp, 784, 512, 256), classes=10, N=128, inputs=(784,)),
    "functions": Problem(mlp_of_functions, classes=10, N=128, inputs=(784,)),
    "3c3d": Problem(models.c3d3, classes=10, N=64, inputs=(3, 32, 32)),
    "allcnnc": Problem(all_cnn_c, classes=100, N=16, inputs=(3, 32, 32)),
    "resnet18": Problem(models.resnet18, classes=10, N=16, inputs=(3, 32, 32)),
    "transformer": Problem(partial(models.gpt, length=64, depth=2), classes=1000, N=8, tokens=64, exact=False),
    "tiny": Problem(tiny, classes=4, N=6, inputs=(1, 8, 8)),
}
