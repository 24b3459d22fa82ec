"""A device for tests that computes with the CPU and behaves like an accelerator; ``device.cpp`` says in what.

``pytest --device emulated`` runs tests with tensors on it by default.
"""

from __future__ import annotations

import os
import re
import sysconfig
import types
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

NAME = "emulated"


@cache
def load() -> Any:
    """Make the device known to PyTorch; compiled at the first time, for every version of PyTorch anew.

    Returns:
        A module whose ``take_waits()`` says for what and how often something waited for the device since the last time,
        and ``take_launches()`` which operations it was asked for, and how often.
    """
    from torch.utils import cpp_extension  # it looks for CUDA

    # ninja may be installed for this Python alone
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    torch.utils.rename_privateuse1_backend(NAME)
    source = Path(__file__).with_name("device.cpp")
    name = "curvopt_emulated_" + re.sub(r"\W", "_", torch.__version__)
    native = cpp_extension.load(name, [str(source)], ["-O0"])
    generator = native.default_generator()
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        device=nullcontext,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _is_in_bad_fork=lambda: False,
        manual_seed_all=generator.manual_seed,
        get_rng_state=lambda device=None: generator.get_state(),
        set_rng_state=lambda state, device=None: generator.set_state(state),
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return native
