"""The problems: a data set, a model and a loss each; one row of ``PROBLEMS`` adds one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from experiments.data import Data


class _Later:
    """A module that is imported with its first use: help needs no PyTorch, which is slow to import."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


models, data, torch_nn = _Later("experiments.models"), _Later("experiments.data"), _Later("torch.nn")

# Options of optimizers to start from, which nobody has tuned.
_START: Mapping[str, Mapping[str, float]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adamw": {"lr": 0.001, "weight_decay": 0.0},
    "muon": {"lr": 0.01},
    "lbfgs": {"lr": 0.1, "max_iter": 5},  # whose unit step is for whole data sets
}
_START_AUTOENCODER: Mapping[str, Mapping[str, float]] = {  # whose loss is a sum over pixels
    "sgd": {"lr": 0.003, "momentum": 0.9},
    "adamw": {"lr": 0.001, "weight_decay": 0.0},
    "kfac-preconditioner": {"lr": 0.003},
}


@dataclass(frozen=True)
class Problem:
    """A model, the data it learns from, and options of optimizers for them."""

    data: str  # a name in DATASETS
    model: "Callable[[tuple[int, ...], int], nn.Module]"  # shape of a sample, number of classes
    epochs: int
    batch_size: int
    target: float  # training loss that optimizers are compared by
    tuned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # optimizer name -> its tuned options
    start: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: _START)  # those of others
    loss: "Callable[[], nn.Module]" = lambda: torch_nn.CrossEntropyLoss()
    prepare: "Callable[[Data], Data]" = lambda given: data.standardized(given)
    augment: bool = False  # shift and mirror the images of a batch
    title: str = ""  # in words

    def settings(self, optimizer: str) -> Mapping[str, float]:
        """The options of an optimizer: tuned, or else to start from; empty for its own defaults."""
        return self.tuned.get(optimizer) or self.start.get(optimizer, {})


def _deepobs_mlp(shape: tuple[int, ...], classes: int) -> "nn.Module":
    return models.mlp(prod(shape), 1000, 500, 100, classes)


def _autoencoder(shape: tuple[int, ...], classes: int) -> "nn.Module":
    pixels = prod(shape)
    return models.mlp(pixels, 1000, 500, 250, 30, 250, 500, 1000, pixels, activation=torch_nn.Tanh)


def describe_problems() -> str:
    """A table of the problems, for the help of the command line."""
    lines = []
    for name, problem in PROBLEMS.items():
        rates = [format(problem.settings(optimizer)["lr"], "g") for optimizer in ("sgd", "adamw")]
        lines += [
            f"{name:<20}{problem.title}",
            f"{'':<20}{problem.epochs} epochs of batches of {problem.batch_size}, learning rates {rates[0]} of SGD and "
            f"{rates[1]} of AdamW{'' if {'sgd', 'adamw'} <= problem.tuned.keys() else ' (not tuned)'}",
        ]
    return "\n".join(f"    {line}" for line in lines)  # indented lines are not filled


# Tuned with seed 100, nine trials per optimizer: the fewest steps to the target, then the lower loss at the end. Grids:
# sgd lr 0.001 ... 0.3 and adamw lr 0.0001 ... 0.03, denser around the best; kfac-sgd lr 0.03, 0.1, 0.3
# x relative damping 0.5, 2, 8; diagonal-newton lr 0.03, 0.1, 0.3 x damping 0.001, 0.005, 0.02. On
# mnist5k-cnn kfac-sgd had eight trials (lr 0.03, 0.05, 0.07, 0.1 with 0.5, 0.1 with 0.2, 0.05 with 1, 0.07 and 0.1
# with 2), diagonal-newton none; nine more of sgd found nothing better.
# Since then, relative damping has become smaller: a multiple of the mean curvature of each parameter, see KFACSGD.
# On the other problems, sgd, adamw, kfac-sgd and kfac-adamw were tuned coarsely, with one seed, the loss after 60 to
# 250 steps, and learning rates a factor of three apart, as many as it took for the best to have one below and above:
# mnist-mlp and mnist-2c2d on the images of mnist5k, cifar10-3c3d and cifar10-vit on 8,000 images (cifar10-vit in 60
# steps of 32); mnist-autoencoder has the rates of mnist5k-autoencoder. cifar10-resnet18 and cifar100-allcnnc were tuned
# in batches of 32 of these 8,000 images, by the mean loss of the last 30 batches of 60 and of 80 steps: rates are good
# to a factor of three, and for larger batches a larger one may be better. All-CNN-C had ten classes there. It leaves
# the loss of a guess late by sgd and adamw, which had 180 steps; adamw had 0.000003 to 0.001 (with 0.001 all outputs
# were dead).
PROBLEMS: dict[str, Problem] = {
    "digits-mlp": Problem(
        title="Small MLP on scikit-learn's 1,797 digits",
        data="digits",
        model=lambda shape, classes: models.mlp(prod(shape), 32, classes),
        epochs=10,
        batch_size=64,
        target=0.01,
        tuned={
            "kfac-sgd": {"lr": 0.3, "relative_damping": 0.5},
            "sgd": {"lr": 0.2, "momentum": 0.9},
            "adamw": {"lr": 0.02, "weight_decay": 0.0},
            "diagonal-newton": {"lr": 0.3, "damping": 0.001},
        },
    ),
    "mnist5k-mlp": Problem(
        title="MLP on 5,000 images of MNIST",
        data="mnist5k",
        model=lambda shape, classes: models.mlp(prod(shape), 128, 64, classes),
        epochs=15,
        batch_size=128,
        target=0.01,
        tuned={
            "kfac-sgd": {"lr": 0.1, "relative_damping": 0.5},
            "sgd": {"lr": 0.05, "momentum": 0.9},
            "adamw": {"lr": 0.005, "weight_decay": 0.0},
            "diagonal-newton": {"lr": 0.03, "damping": 0.02},
        },
    ),
    "mnist5k-cnn": Problem(
        title="Small CNN on 5,000 images of MNIST",
        data="mnist5k",
        model=lambda shape, classes: models.small_cnn(classes),
        epochs=15,
        batch_size=128,
        target=0.01,
        tuned={
            "kfac-sgd": {"lr": 0.03, "relative_damping": 0.5},
            "sgd": {"lr": 0.05, "momentum": 0.9},
            "adamw": {"lr": 0.003, "weight_decay": 0.0},
        },
    ),
    "mnist-mlp": Problem(
        title="DeepOBS's MLP on MNIST",
        data="mnist",
        model=_deepobs_mlp,
        epochs=10,
        batch_size=128,
        target=0.01,
        tuned={
            "sgd": {"lr": 0.03, "momentum": 0.9},
            "adamw": {"lr": 0.001, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.03},
            "kfac-adamw": {"lr": 0.005},
        },
    ),
    "fmnist-mlp": Problem(
        title="DeepOBS's MLP on Fashion-MNIST",
        data="fashion-mnist",
        model=_deepobs_mlp,
        epochs=20,
        batch_size=128,
        target=0.1,
        tuned={
            "sgd": {"lr": 0.03, "momentum": 0.9},
            "adamw": {"lr": 0.001, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.03},
            "kfac-adamw": {"lr": 0.015},
        },
    ),
    "mnist-2c2d": Problem(
        title="DeepOBS's CNN 2C2D on MNIST",
        data="mnist",
        model=lambda _, classes: models.c2d2(classes),
        epochs=10,
        batch_size=128,
        target=0.01,
        tuned={
            "sgd": {"lr": 0.1, "momentum": 0.9},
            "adamw": {"lr": 0.003, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.03},
            "kfac-adamw": {"lr": 0.005},
        },
    ),
    "fmnist-2c2d": Problem(
        title="DeepOBS's CNN 2C2D on Fashion-MNIST",
        data="fashion-mnist",
        model=lambda _, classes: models.c2d2(classes),
        epochs=20,
        batch_size=128,
        target=0.1,
        tuned={
            "sgd": {"lr": 0.1, "momentum": 0.9},
            "adamw": {"lr": 0.001, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.1},
            "kfac-adamw": {"lr": 0.015},
        },
    ),
    "mnist5k-autoencoder": Problem(
        title="Deep autoencoder on 5,000 images of MNIST",
        data="mnist5k",
        model=_autoencoder,
        loss=lambda: models.PixelLoss(),
        prepare=lambda given: data.reconstruction(given),
        epochs=30,
        batch_size=256,
        target=80,
        start=_START_AUTOENCODER,
        tuned={
            "sgd": {"lr": 0.001, "momentum": 0.9},
            "adamw": {"lr": 0.003, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.1},
            "kfac-adamw": {"lr": 0.015},
        },
    ),
    "mnist-autoencoder": Problem(
        title="Deep autoencoder on MNIST",
        data="mnist",
        model=_autoencoder,
        loss=lambda: models.PixelLoss(),
        prepare=lambda given: data.reconstruction(given),
        epochs=20,
        batch_size=256,
        target=70,
        start=_START_AUTOENCODER,
        tuned={
            "sgd": {"lr": 0.001, "momentum": 0.9},
            "adamw": {"lr": 0.003, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.1},
            "kfac-adamw": {"lr": 0.015},
        },
    ),
    "cifar10-3c3d": Problem(
        title="DeepOBS's CNN 3C3D on CIFAR-10",
        data="cifar10",
        model=lambda _, classes: models.c3d3(classes),
        epochs=30,
        batch_size=128,
        target=0.5,
        augment=True,
        tuned={
            "sgd": {"lr": 0.03, "momentum": 0.9},
            "adamw": {"lr": 0.001, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.1},
            "kfac-adamw": {"lr": 0.015},
        },
    ),
    "cifar100-allcnnc": Problem(
        title="All-CNN-C on CIFAR-100",
        data="cifar100",
        model=lambda _, classes: models.all_cnn_c(classes),
        epochs=60,
        batch_size=256,
        target=1.5,
        augment=True,
        start=_START,
        tuned={
            "sgd": {"lr": 0.003, "momentum": 0.9},
            "adamw": {"lr": 0.00003, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.03},
            "kfac-adamw": {"lr": 0.005},
        },
    ),
    "cifar10-resnet18": Problem(
        title="ResNet-18 on CIFAR-10",
        data="cifar10",
        model=lambda _, classes: models.resnet18(classes),
        epochs=30,
        batch_size=128,
        target=0.1,
        augment=True,
        tuned={
            "sgd": {"lr": 0.003, "momentum": 0.9},
            "adamw": {"lr": 0.0003, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.03},
            "kfac-adamw": {"lr": 0.005},
        },
    ),
    "cifar10-vit": Problem(
        title="Small vision transformer on CIFAR-10",
        data="cifar10",
        model=lambda _, classes: models.vit(classes),
        epochs=50,
        batch_size=128,
        target=0.7,
        augment=True,
        tuned={
            "sgd": {"lr": 0.01, "momentum": 0.9},
            "adamw": {"lr": 0.001, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.03},
            "kfac-adamw": {"lr": 0.005},
        },
    ),
    "help-gpt": Problem(
        title="Small language model on Python's help texts, by characters",
        data="python-help",
        model=lambda shape, characters: models.gpt(characters, *shape),
        prepare=lambda texts: texts,
        epochs=10,
        batch_size=64,
        target=1.5,
        tuned={
            "sgd": {"lr": 0.3, "momentum": 0.9},
            "adamw": {"lr": 0.003, "weight_decay": 0.0},
            "kfac-sgd": {"lr": 0.1},
            "kfac-adamw": {"lr": 0.015},
        },
    ),
}
