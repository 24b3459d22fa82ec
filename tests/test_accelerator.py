"""The engine and the optimizers on a device: in a process of its own, as PyTorch prepares for devices only once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import accelerator
import pytest
import torch

SUITES = {
    "quantities": "test_extensions.py test_functional_losses.py test_hessian.py",
    "rules and optimizers": "accelerator/on_device.py test_hessian_free.py test_optim.py test_rules.py",
}
#: What the emulated device has not, ...
ABSENT = "sparse or large_vocabulary or flash_attention or packed or two_processes or autocast"
#: ... and tests that are long or whose subject is another one: statistics, memory, checkpoints, ways to call, refusals.
LEFT_OUT = (
    "every_quantity or positive_curvature or sampled or retained or grows or survives or beat_sgd or "
    "further_than_sgd or many_seeds or every_kind or trains_from or resume or resumption or copies or not_finite or "
    "in_half_precision or more_samples or averaged_factors_of or closures or told_of_once or emptied or options or "
    "hooks or leaves_its_range or state_of or uphill or last_of_accumulated or first_group or damping_rises or "
    "fit_together or other_ways or interval or no_other_quantity or nothing_replaced or number_of_columns"
)

COMPILER = shutil.which("c++") and Path(sysconfig.get_path("include"), "Python.h").exists()
DEVICES = [
    pytest.param(
        accelerator.NAME,
        marks=pytest.mark.skipif(not COMPILER, reason="the device is compiled: a C++ compiler and Python's headers"),
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("files", SUITES.values(), ids=SUITES)
def test_on_a_device(files: str, device: str):
    """Other tests again, where backward passes run in a worker thread and tensors of two devices do not mix."""
    options = ["-q", "--device", device, "-k", f"not ({ABSENT} or {LEFT_OUT})"]
    command = [sys.executable, "-m", "pytest", *options, *files.split()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
