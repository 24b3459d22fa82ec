"""Recording the calls of extended models, whose inputs say what a sample is.

A model call is the outermost call of an extended module: calls inside of it are its layers. Its number of samples N is
the length of the batch axis of its first tensor input; its outputs are the heads of the model.

>>> import torch
>>> from curvopt import extend
>>> from curvopt.core.record.calls import records_of
>>> out = extend(torch.nn.Linear(3, 2))(torch.ones(4, 3))
>>> [(record.name, record.samples) for record, *_ in records_of(out.grad_fn) if isinstance(record, ModelCall)]
[('the extended Linear', (4,))]
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from curvopt.errors import CurvoptWarning


class Model:
    """An extended model: a token that its modules share, also in copies of it.

    Attributes:
        name: for messages.
        batch_axis: axis of the inputs and outputs of the model that counts the samples; ``None`` where a batch is one
            sample.
        size: number of its modules.
        has_warned: whether the model's users were warned of the cost of quantities that are computed sample by sample.
        forward: number of the running forward pass; one that calls modules by themselves ends when one of them, or of
            those that it contains, is called again.
        called: paths of the modules that were called in it.
        forwards: by field, the forward passes that the fields on parameters are of.
    """

    def __init__(self, name: str, batch_axis: int | None = 0, size: int = 1):
        self.name, self.batch_axis, self.size = name, batch_axis, size
        self.has_warned = False
        self.forward, self.called = 0, set[str]()
        self.forwards: dict[str, set[int]] = {}

    def warn_of_cost(self, message: str) -> None:
        """Warn, unless there was such a warning before."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(message, CurvoptWarning, stacklevel=3)


class ModelCall:
    """The outermost call of an extended module. The records of its layers refer to it.

    Attributes:
        model: the model to which the module belongs.
        number: distinguishes the calls.
        name: of the module, for messages.
        listed: length of a list of tensors (images, say) that is the first input, or ``None``.
        shapes: of the tensors among the inputs, once the call has ended.
        forward: the forward pass of the model to which the call belongs, see `Model.forward`.
    """

    __slots__ = ("forward", "listed", "model", "name", "number", "shapes")
    _numbers = itertools.count()

    def __init__(self, model: Model):
        self.model, self.number, self.name = model, next(self._numbers), model.name
        self.listed: int | None = None
        self.shapes: tuple[torch.Size, ...] = ()
        self.forward = model.forward

    def end(self, path: str, name: str, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Note the path of the module, and the arguments, among which are some tensors."""
        model, at = self.model, f"{path}." if path else ""
        if any([at.startswith(called) or called.startswith(at) for called in model.called]):
            model.forward, model.called = model.forward + 1, set()
        model.called.add(at)
        self.forward = model.forward
        first = args[0] if args else next(iter(kwargs.values()), None)
        is_list = isinstance(first, list) and bool(first) and all(isinstance(x, Tensor) for x in first)
        self.name, self.listed = name, len(first) if is_list else None  # type: ignore[arg-type]
        self.shapes = tuple([x.shape for x in tensors])

    @property
    def samples(self) -> tuple[int, ...]:
        """Lengths that may be the number of samples, the likeliest first: of the list, and of the batch axis.

        None of a call without tensors.
        """
        axis = self.model.batch_axis or 0
        lengths = [shape[axis] for shape in self.shapes if len(shape) > axis][:1]
        return tuple(lengths if self.listed is None else [self.listed, *lengths])


class _Running(threading.local):
    """The outermost call of an extended module that runs now in a thread, its frame, and the depth of calls in it."""

    def __init__(self) -> None:
        self.call: ModelCall | None = None
        self.frame: FrameType | None = None
        self.depth = 0


_running = _Running()


def begin(model: Model, top: bool) -> None:
    """The call of an extended module begins; ``top`` for the model itself or one of its children."""
    if top and _running.depth and not _is_running(_running.frame):
        _running.depth = 0  # a call that was interrupted
    if not _running.depth:
        _running.call, _running.frame = ModelCall(model), sys._getframe(2)
    _running.depth += 1


def _is_running(frame: FrameType | None) -> bool:
    at: FrameType | None = sys._getframe(2)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


def end() -> bool:
    """The call of an extended module ends, also with an exception; whether it was a model call."""
    _running.depth = max(_running.depth - 1, 0)
    if not _running.depth:
        _running.call = _running.frame = None
    return not _running.depth


def running_call() -> ModelCall | None:
    """The model call that runs now."""
    return _running.call
