"""What is trained: a data set, a model and a loss; one row of ``PROBLEMS`` adds one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Problem:
    """A model, the data it learns from, and the settings tuned for them."""

    data: str  # a name in data.LOADERS
    model: Callable[[], nn.Module]
    epochs: int
    batch_size: int
    tuned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # optimizer name -> its tuned settings
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected layers with ReLU in between."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_cnn() -> nn.Sequential:
    """Three convolutions and two linear layers for 28x28 grey images, 33 thousand parameters."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in [(1, 16), (16, 32), (32, 32)]:
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *mlp(32 * 3 * 3, 64, 10))


PROBLEMS: dict[str, Problem] = {
    "digits-mlp": Problem("digits", lambda: mlp(64, 32, 10), epochs=10, batch_size=64),
    "mnist5k-mlp": Problem("mnist5k", lambda: mlp(784, 128, 64, 10), epochs=15, batch_size=128),
    "mnist5k-cnn": Problem("mnist5k", small_cnn, epochs=15, batch_size=128),
}
