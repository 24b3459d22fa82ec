"""The switch that says whether forward passes are recorded.

>>> from curvopt import extend
>>> model = extend(torch.nn.Linear(3, 2))
>>> with disable():
...     out = model(torch.ones(4, 3))
>>> out.grad_fn.metadata
{}
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from curvopt.core.pytorch_workarounds import break_graph, is_written_down, keep_compiled_backwards


class _Recording(threading.local):
    """Whether one thread records."""

    def __init__(self) -> None:
        self.active = True


_recording = _Recording()


@contextmanager
def disable(active: bool = True) -> Iterator[None]:
    """Forward passes record nothing inside, so that they cost nothing extra and yield no fields.

    Args:
        active: ``False`` makes this a no-op.
    """
    before, _recording.active = _recording.active, _recording.active and not active
    try:
        yield
    finally:
        _recording.active = before


def outside_of_graphs(call: Callable[..., Any], *args: Any) -> Any:
    """Call something that ``torch.compile`` is tracing, without having it traced."""
    return break_graph(
        _untraced,
        "curvopt reads the autograd graph, which no compiled graph contains: use torch.compile without "
        "fullgraph=True, or run a forward that needs no quantities inside of curvopt.disable().",
    )(call, *args)


def _untraced(call: Callable[..., Any], *args: Any) -> Any:
    keep_compiled_backwards()  # which run for several columns
    return call(*args)


def _records() -> bool:
    """Whether forward passes are recorded now: not where they are written down, to be run without modules."""
    return _recording.active and torch.is_grad_enabled() and not is_written_down()
