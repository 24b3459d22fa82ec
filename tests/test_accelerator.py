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

FILES = (
    "accelerator/on_device.py core/layers/test_rule.py core/losses/test_known.py extensions/test_extensions.py "
    "extensions/test_hessian.py optim/test_contract.py optim/test_hessian_free.py"
)
#: What the emulated device has not, ...
ABSENT = "sparse or large_vocabulary or flash_attention or packed or two_processes or autocast or complex_parameters"
#: ... tests that are long or whose subject is another one (statistics, memory, ways to call), ...
LEFT_OUT = (
    "every_quantity or sampled or retained or grows or survives or in_half_precision or averaged_factors_of or "
    "other_ways or number_of_columns or fields_of_nets or closures or options_that"
)
#: ... and of the tests of optimizers the few that are about numbers; their steps are in `on_device.py`.
OF_OPTIMIZERS = (
    "follows_the_reduction_ratio or test_closure or rms_clip or decoupled or schedule or "
    "grad_scaler or preconditioned_gradient or when_due or full_solve or dense or cg_starts or batch_size"
)
SELECTED = f"not ({ABSENT} or {LEFT_OUT}) and (not (test_contract or test_hessian_free) or {OF_OPTIMIZERS})"

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


@pytest.mark.slow(reason="compiles the device, and repeats tests of other files on it")
@pytest.mark.parametrize("device", DEVICES)
def test_on_a_device(device: str):
    """Other tests again, where backward passes run in a worker thread and tensors of two devices do not mix."""
    # the emulated device is slow; each net and each loss is met by several tests
    options = ["-q", "--device", device, "-k", SELECTED, "--one-of", "32" if device == accelerator.NAME else "1"]
    command = [sys.executable, "-m", "pytest", *options, *FILES.split()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
