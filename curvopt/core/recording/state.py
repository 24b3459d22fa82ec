"""Whether forward passes are recorded now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_recording = True


@contextmanager
def disable(active: bool = True) -> Iterator[None]:
    """Forward passes record nothing inside, so that they cost nothing extra and yield no fields.

    Args:
        active: ``False`` makes this a no-op.
    """
    global _recording
    before, _recording = _recording, _recording and not active
    try:
        yield
    finally:
        _recording = before


def outside_of_graphs(call: Callable[..., Any], *args: Any) -> Any:
    """Call something that ``torch.compile`` is tracing, without having it traced."""
    torch._dynamo.graph_break(
        msg="curvopt reads the autograd graph, which no compiled graph contains: use torch.compile without "
        "fullgraph=True, or run a forward that needs no quantities inside of curvopt.disable()."
    )
    return torch._dynamo.disable(_untraced)(call, *args)


def _untraced(call: Callable[..., Any], *args: Any) -> Any:
    from torch._functorch import config

    config.donated_buffer = False  # the backward of a compiled graph runs for several columns
    return call(*args)


def _records() -> bool:
    """Whether forward passes are recorded now: not where they are written down, to be run without modules."""
    if not (_recording and torch.is_grad_enabled()):
        return False
    # not is_exporting(), which older versions of PyTorch take for true in all that they compile
    return torch._C._get_tracing_state() is None and not torch.compiler._is_exporting_flag
