"""The networks, small enough to read; convolutional ones as in DeepOBS (Schneider et al. 2019)."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Fully connected layers with an activation in between."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def small_cnn(classes: int = 10) -> nn.Sequential:
    """Three convolutions and two linear layers for 28x28 grey images, 33 thousand parameters."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in pairwise([1, 16, 32, 32]):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *mlp(32 * 3 * 3, 64, classes))


def c2d2(classes: int = 10) -> nn.Sequential:
    """2C2D: two convolutions and two linear layers for 28x28 grey images."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in pairwise([1, 32, 64]):
        layers += [nn.Conv2d(channels_in, channels_out, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *mlp(64 * 7 * 7, 1024, classes))


def c3d3(classes: int = 10) -> nn.Sequential:
    """3C3D: three convolutions and three linear layers for 32x32 images."""
    layers: list[nn.Module] = []
    for channels_in, channels_out, size, padding in [(3, 64, 5, 0), (64, 96, 3, 0), (96, 128, 3, 1)]:
        layers += [
            nn.Conv2d(channels_in, channels_out, size, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
        ]
    return nn.Sequential(*layers, *mlp(128 * 3 * 3, 512, 256, classes))


def all_cnn_c(classes: int = 100) -> nn.Sequential:
    """All-CNN-C (Springenberg et al. 2015): nine convolutions, no pooling but the last, for 32x32 images.

    Weights and biases begin as in DeepOBS, larger than those of PyTorch, whose outputs hardly depend on the image.
    """
    layers: list[nn.Module] = [nn.Dropout(0.2)]
    for i, (channels_in, channels_out, size, stride, padding) in enumerate(
        [
            *[(3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1)],
            *[(96, 192, 3, 1, 1), (192, 192, 3, 1, 1), (192, 192, 3, 2, 1)],
            *[(192, 192, 3, 1, 0), (192, 192, 1, 1, 0), (192, classes, 1, 1, 0)],
        ]
    ):
        conv = nn.Conv2d(channels_in, channels_out, size, stride, padding)
        nn.init.xavier_normal_(conv.weight)
        nn.init.constant_(conv.bias, 0.1)  # pyright: ignore[reportArgumentType]
        layers += [conv, nn.ReLU()]
        if i in (2, 5):
            layers.append(nn.Dropout(0.5))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def resnet18(classes: int = 10) -> nn.Module:
    """The ResNet-18 of torchvision whose stem leaves 32x32 images their size: one 3x3 convolution, no pooling."""
    from torchvision.models import resnet18 as imagenet_resnet18  # only here: slow to import

    model = imagenet_resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return model


class Attention(nn.Module):
    """Multi-head self-attention ``[N, T, D] -> [N, T, D]``; a causal one looks back only."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, both behind a layer norm and beside a shortcut."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads, causal)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D] -> [N, T, D]``."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks over embedded tokens with learned positions, and a linear head on the normalized result."""

    def __init__(self, embedding: nn.Module, length: int, dim: int, depth: int, outputs: int, causal: bool) -> None:
        super().__init__()
        self.embedding, self.positions = embedding, nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads=4, causal=causal) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, outputs)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """Logits: ``[N, outputs]`` of the mean token, or, if causal, ``[N, outputs, T]`` of each token."""
        tokens = self.embedding(x)
        # every sample looks up the positions itself, so that it has a share of their gradient
        index = torch.arange(tokens.shape[1], device=x.device).expand(tokens.shape[:2])
        z = self.norm(self.blocks(tokens + self.positions(index)))
        return self.head(z).mT if self.causal else self.head(z.mean(1))


class Patches(nn.Module):
    """Images ``[N, C, H, W]`` as tokens ``[N, T, D]``, one for each square of ``size`` pixels."""

    def __init__(self, channels: int, dim: int, size: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, size, stride=size)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the squares."""
        return self.project(x).flatten(2).mT


def vit(classes: int = 10, dim: int = 128, depth: int = 6) -> Transformer:
    """A small vision transformer for 32x32 images, cut into 64 squares."""
    return Transformer(Patches(3, dim, size=4), 64, dim, depth, classes, causal=False)


def gpt(characters: int, length: int, dim: int = 128, depth: int = 4) -> Transformer:
    """A small language model that predicts each next character."""
    return Transformer(nn.Embedding(characters, dim), length, dim, depth, characters, causal=True)


class PixelLoss(nn.Module):
    """Binary cross-entropy of logits, summed over the pixels of an image and averaged over images."""

    def __init__(self) -> None:
        super().__init__()
        self.bce = nn.BCEWithLogitsLoss(reduction="sum")

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """``[N, pixels], [N, pixels] -> []``."""
        return self.bce(z, y) / len(z)
