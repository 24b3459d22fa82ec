"""The inputs and the output of a module's call, as attributes of the module while a hook looks at it.

::

    with showing(module, record):
        module.input0  # its first argument
        module.output  # computed when it is asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from curvopt.core.record import ModuleCall, disable


@contextmanager
def showing(module: nn.Module, call: ModuleCall) -> Iterator[None]:
    """Inside, ``input0``, ``input1``, ... are the arguments, ``output`` is the first result, without its graph.

    Names that the module has itself are kept. There is no output where random numbers were drawn for it.
    """
    buffers = module._buffers
    values: dict[str, Callable[[], Any]] = {f"input{i}": partial(_input, x) for i, x in enumerate(call.args)}
    if not (call.training and getattr(module, "dropout", 0)):
        values["output"] = cache(lambda: _output(module, call, buffers))
    # attributes and parameters are found before buffers, submodules after them
    values = {name: value for name, value in values.items() if name not in buffers and name not in module._modules}
    shown = _Shown(buffers, values)
    vars(module)["_buffers"] = shown
    try:
        yield
    finally:
        buffers.clear()
        buffers.update(shown)
        vars(module)["_buffers"] = buffers


class _Shown(dict[str, Any]):
    """The buffers of a module, where it finds more when it is asked for an attribute. That is not listed among them."""

    def __init__(self, buffers: dict[str, Any], values: dict[str, Callable[[], Any]]):
        super().__init__(buffers)
        self._values = values

    def __contains__(self, name: object) -> bool:
        return name in self._values or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]() if name in self._values else super().__getitem__(name)

    def __delitem__(self, name: str) -> None:
        if self._values.pop(name, None) is None:
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
