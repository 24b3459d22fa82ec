"""What is measured: five networks with random data, and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        model: makes the network.
        inputs: shape of a sample; of an empty one, tokens.
        classes: number of classes, or the size of the vocabulary.
        N: number of samples.
        tokens: length of the sequences of tokens, 0 for images.
        exact: whether columns for every class (and token) are affordable, and the network is piecewise linear, so that
            Hessian and GGN have the same blocks.
    """

    model: Callable[[], nn.Module]
    N: int
    classes: int
    inputs: tuple[int, ...] = ()
    tokens: int = 0
    exact: bool = True

    def make(self, N: int | None = None, device: str = "cpu") -> Task:
        """The same network, always, and the first N samples, in the default dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model().to(device, torch.get_default_dtype())
            if self.tokens:
                text = torch.randint(self.classes, (self.N, self.tokens + 1))[:N]
                x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            else:
                x, y = torch.randn(self.N, *self.inputs)[:N], torch.randint(self.classes, (self.N,))[:N]
        return Task(model, nn.CrossEntropyLoss(), x.to(device), y.to(device))


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected layers with ReLU in between."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions(*layers: tuple[int, int, int, int, int]) -> list[nn.Module]:
    """Convolutions (channels in and out, kernel, stride, padding), each with a ReLU."""
    return [module for c_in, c_out, k, s, p in layers for module in (nn.Conv2d(c_in, c_out, k, s, p), nn.ReLU())]


def net_3c3d(classes: int = 10) -> nn.Sequential:
    """Three convolutions and three linear layers for CIFAR-10 (Schneider et al. 2019)."""
    layers: list[nn.Module] = []
    for c_in, c_out, kernel, padding in [(3, 64, 5, 0), (64, 96, 3, 0), (96, 128, 3, 1)]:
        layers += [*convolutions((c_in, c_out, kernel, 1, padding)), nn.MaxPool2d(3, 2, padding=1)]
    return nn.Sequential(*layers, *mlp(1152, 512, 256, classes))


def all_cnn_c(classes: int = 100) -> nn.Sequential:
    """Convolutions only (Springenberg et al. 2015)."""
    wide, wider = 96, 192
    layers = convolutions(
        *((c_in, wide, 3, stride, 1) for c_in, stride in [(3, 1), (wide, 1), (wide, 2)]),
        *((c_in, wider, 3, stride, 1) for c_in, stride in [(wide, 1), (wider, 1), (wider, 2)]),
        (wider, wider, 3, 1, 0),
        (wider, wider, 1, 1, 0),
        (wider, classes, 1, 1, 0),
    )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 for 32x32 images, with batch normalisation in eval mode."""
    from torchvision.models import resnet18  # slow, and of use here only

    model = resnet18(num_classes=classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model.eval()


class Block(nn.Module):
    """A pre-norm transformer block whose attention is made of linear layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model; its outputs are ``[N, vocabulary, tokens]``, as the loss wants them."""

    def __init__(self, vocabulary: int = 1000, tokens: int = 64, width: int = 128, depth: int = 2, heads: int = 4):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place(places)))).transpose(1, 2)


PROBLEMS = {
    "mlp": Problem(lambda: mlp(784, 512, 256, 10), N=128, inputs=(784,), classes=10),
    "3c3d": Problem(net_3c3d, N=64, inputs=(3, 32, 32), classes=10),
    "allcnnc": Problem(all_cnn_c, N=16, inputs=(3, 32, 32), classes=100),
    "resnet18": Problem(resnet18, N=16, inputs=(3, 32, 32), classes=10),
    "transformer": Problem(Transformer, N=8, tokens=64, classes=1000, exact=False),
    "tiny": Problem(
        lambda: nn.Sequential(*convolutions((1, 3, 3, 1, 1)), nn.MaxPool2d(2), *mlp(48, 5, 4)),
        N=6,
        inputs=(1, 8, 8),
        classes=4,
    ),
}
