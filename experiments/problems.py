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
    target: float  # training loss that optimizers are compared by
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


# Tuned with seed 100, nine trials per optimizer: the fewest steps to the target, then the lower loss at the end. Grids:
# sgd lr 0.001 ... 0.3 and adamw lr 0.0001 ... 0.03, denser around the best; kfac-sgd lr x damping 0.01, 0.03, 0.1 each;
# diagonal-newton lr 0.01, 0.03, 0.1 x damping 0.001, 0.005, 0.02. Nine more of sgd on mnist5k-cnn found nothing better.
PROBLEMS: dict[str, Problem] = {
    "digits-mlp": Problem(
        data="digits",
        model=lambda: mlp(64, 32, 10),
        epochs=10,
        batch_size=64,
        target=0.01,
        tuned={
            "kfac-sgd": {"lr": 0.03, "damping": 0.01},
            "sgd": {"lr": 0.2},
            "adamw": {"lr": 0.02},
            "diagonal-newton": {"lr": 0.01, "damping": 0.02},
        },
    ),
    "mnist5k-mlp": Problem(
        data="mnist5k",
        model=lambda: mlp(784, 128, 64, 10),
        epochs=15,
        batch_size=128,
        target=0.01,
        tuned={
            "kfac-sgd": {"lr": 0.01, "damping": 0.01},
            "sgd": {"lr": 0.05},
            "adamw": {"lr": 0.005},
            "diagonal-newton": {"lr": 0.1, "damping": 0.02},
        },
    ),
    "mnist5k-cnn": Problem(
        data="mnist5k",
        model=small_cnn,
        epochs=15,
        batch_size=128,
        target=0.01,
        tuned={
            "kfac-sgd": {"lr": 0.01, "damping": 0.03},
            "sgd": {"lr": 0.05},
            "adamw": {"lr": 0.003},
            "diagonal-newton": {"lr": 0.03, "damping": 0.005},
        },
    ),
}
