"""The inputs and the output of a module's call, as attributes of the module while a hook looks at it.

::

    with showing(module, record):
        module.input0  # its first argument
        module.output  # computed when it is asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from curvopt.core.record import ModuleCall, disable


@contextmanager
def showing(module: nn.Module, call: ModuleCall) -> Iterator[None]:
    """Inside, ``input0``, ``input1``, ... are the arguments, ``output`` is the first result, without its graph.

    Names that the module has itself are left alone. There is no output where random numbers were drawn for it.
    """
    attributes, buffers = vars(module), module._buffers
    taken = {*attributes, *buffers, *module._parameters, *module._modules}
    inputs = {f"input{i}": _input(x) for i, x in enumerate(call.args) if f"input{i}" not in taken}
    attributes.update(inputs)
    if "output" not in taken and not (call.training and getattr(module, "dropout", 0)):
        attributes["_buffers"] = _WithOutput(buffers, cache(lambda: _output(module, call, buffers)))
    try:
        yield
    finally:
        for name in inputs:
            attributes.pop(name, None)
        if module._buffers is not buffers:
            after = dict(module._buffers)
            buffers.clear()
            buffers.update(after)
            attributes["_buffers"] = buffers


class _WithOutput(dict[str, Any]):
    """The buffers of a module, where it finds its output when it is asked for it. That is not listed among them."""

    def __init__(self, buffers: dict[str, Any], output: Callable[[], Any]):
        super().__init__(buffers)
        self._output: Callable[[], Any] | None = output

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name == "output" and self._output is not None)

    def __missing__(self, name: str) -> Any:
        return self._output() if self._output is not None else None

    def __delitem__(self, name: str) -> None:
        if name == "output":
            self._output = None
        else:
            super().__delitem__(name)


def _input(x: Any) -> Any:
    """An argument; with its graph where fields have theirs."""
    return x.detach() if isinstance(x, Tensor) and not torch.is_grad_enabled() else x


def _output(module: nn.Module, call: ModuleCall, buffers: dict[str, Any]) -> Any:
    """The first result; if it was not kept, of a call of a twin, which may change its buffers."""
    twin = object.__new__(type(module))
    copies = {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    vars(twin).update(vars(module), _buffers=copies, training=call.training)
    call = call.in_precision(next(p.dtype for p in module.parameters() if p.is_floating_point()))
    with torch.no_grad(), disable():
        output = twin.forward(*call.args, **call.kwargs)
    return output[0] if isinstance(output, tuple) else output
