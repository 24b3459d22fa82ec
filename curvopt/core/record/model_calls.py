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

import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from curvopt.errors import CurvoptWarning


class Model:
    """An extended model: a token that its modules share, also in copies of it.

    Attributes:
        name: for messages.
        batch_axis: axis of the inputs and outputs of the model that counts the samples.
        size: number of its modules.
        seeks_axis: whether backwards may exchange axis 0 and 1, or set ``is_one_sample``, see
            `curvopt.core.backward.located_graph`; ``None`` as long as nobody has said.
        is_one_sample: whether optimizers take a batch as one sample, as it would cost many times a gradient by rows.
        is_refused: whether that holds for the last backward only, where rows were no samples.
        warned: what the model's users were warned of, see `warn_once`.
        last: `ModelCall.samples` of the last calls that no backward has used, which count where the loss depends on no
            output (a gradient penalty of a network of ReLUs, the residual of a PINN).
        forward: number of the forward pass that runs; it ends where a module, or a part of it, is called again.
        called: paths of the modules that were called in it, each with a dot behind it.
        forwards: by field, the forward passes of the last backward that was asked for it.
    """

    def __init__(self, name: str, batch_axis: int = 0, size: int = 1):
        self.name, self.batch_axis, self.size = name, batch_axis, size
        self.seeks_axis: bool | None = None
        self.is_one_sample = self.is_refused = False
        self.warned = set[str]()
        self.last: tuple[int, ...] = ()
        self.forward, self.called = 0, set[str]()
        self.forwards: dict[str, set[int]] = {}

    def warn_once(self, about: Literal["samples", "refused rows"], message: str) -> None:
        """Warn, unless there was a warning about the same before, perhaps in other words."""
        if about not in self.warned:
            self.warned.add(about)
            warnings.warn(message, CurvoptWarning, stacklevel=3)


class ModelCall(NamedTuple):
    """The outermost call of an extended module.

    Attributes:
        model: the model to which the module belongs.
        name: of the module, for messages.
        listed: length of a list of tensors (images, say) that is the first input, or ``None``.
        shapes: of the tensors among the inputs.
        number: distinguishes the calls.
        forward: the forward pass of the model to which the call belongs, see `Model.forward`.
    """

    model: Model
    name: str
    listed: int | None
    shapes: tuple[torch.Size, ...]
    number: int
    forward: int

    @property
    def samples(self) -> tuple[int, ...]:
        """Lengths that may be the number of samples, the likeliest first: of the list, and of the batch axis.

        None of a call without tensors.
        """
        axis = self.model.batch_axis
        lengths = [shape[axis] for shape in self.shapes if len(shape) > axis][:1]
        return tuple(lengths if self.listed is None else [self.listed, *lengths])


class _Running(threading.local):
    """The calls of extended modules that run now in a thread, outermost first, and the frame of the outermost one."""

    def __init__(self) -> None:
        self.calls: list[Model] = []
        self.frame: FrameType | None = None
        self.count = 0


_running = _Running()


def begin(model: Model, top: bool) -> None:
    """The call of an extended module begins; ``top`` for the model itself or one of its children."""
    if top and _running.calls and not _is_running(_running.frame):
        _running.calls.clear()  # a call that was interrupted
    if not _running.calls:
        _running.frame = sys._getframe(2)
    _running.calls.append(model)


def _is_running(frame: FrameType | None) -> bool:
    at: FrameType | None = sys._getframe(2)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


def end() -> bool:
    """The call of an extended module ends, also with an exception; whether it was a model call."""
    if _running.calls:
        _running.calls.pop()
    if not _running.calls:
        _running.frame = None
    return not _running.calls


def running_model() -> Model | None:
    """The model whose call runs now."""
    return _running.calls[0] if _running.calls else None


def model_call(
    model: Model, path: str, name: str, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> ModelCall:
    """A call of the module at a path with some arguments, among which are some tensors."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    listed = len(first) if isinstance(first, list) and first and all(isinstance(x, Tensor) for x in first) else None
    _running.count += 1
    at = f"{path}." if path else ""
    if any([at.startswith(called) or called.startswith(at) for called in model.called]):
        model.forward, model.called = model.forward + 1, set()
    model.called.add(at)
    return ModelCall(model, name, listed, tuple([x.shape for x in tensors]), _running.count, model.forward)
