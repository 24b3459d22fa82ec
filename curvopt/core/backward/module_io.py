"""The arguments of a module's call, as attributes of the module while a hook looks at it.

::

    with showing(module, record):
        module.input0  # its first argument
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from curvopt.core.record import ModuleCall


@contextmanager
def showing(module: nn.Module, call: ModuleCall) -> Iterator[None]:
    """Inside, ``input0``, ``input1``, ... are the arguments; with their graphs where fields have theirs.

    Names that the module has itself are kept.
    """
    detached = not torch.is_grad_enabled()
    inputs = {f"input{i}": x.detach() if isinstance(x, Tensor) and detached else x for i, x in enumerate(call.args)}
    inputs = {name: x for name, x in inputs.items() if not hasattr(module, name)}
    vars(module).update(inputs)
    try:
        yield
    finally:
        for name in inputs:
            vars(module).pop(name, None)
