"""Evaluating the closure of a step more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_pre_hook

from curvopt.core.backward.intercept import engine
from curvopt.core.pytorch_workarounds import running_backward
from curvopt.core.randomness import RandomState
from curvopt.core.vjp import is_own_backward
from curvopt.errors import CurvoptError

Step = TypeVar("Step", bound=Callable[..., Any])


def without_autocast(step: Step) -> Step:
    """Run a step outside of ``torch.autocast``, and its closure inside: mixed precision is for the network."""

    @wraps(step)
    def call(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return step(self, closure)
        kinds = {p.device.type for group in self.param_groups for p in group["params"]}
        dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        if not dtypes:
            return step(self, closure)

        def run(call: Callable[..., Any], *args: Any, enabled: bool) -> Any:
            with ExitStack() as stack:
                for kind, dtype in dtypes.items():
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
                return call(*args)

        inside = None if closure is None else lambda: run(closure, enabled=True)
        return run(step, self, inside, enabled=False)

    return call  # pyright: ignore[reportReturnType]


class Closure:
    """Runs a closure normally at first, then again for its value alone, without side effects.

    Its value is the sum of all tensors that it calls ``backward`` on, or if it never does, its result. When run again,
    it runs without gradients (unless it calls ``torch.autograd.grad``) and its backwards do nothing; random numbers are
    those of the first time; modules work on copies of their buffers and parameters have no gradients, so that running
    statistics and ``.grad`` stay. Contexts (``backpack``) see the first run alone. Anything else that the closure
    changes, it changes in each run.

    Args:
        closure: computes the loss and returns it, or calls ``backward`` on it, or both.
        parameters: the parameters whose gradients it may set.

    Attributes:
        result: of the first run.
        start: value of the first run.
        eps: precision of the value.
        roots: the tensors it called ``backward`` on then, or its result.
        cotangents: the gradients that it gave for them.
    """

    def __init__(self, closure: Callable[[], Any], parameters: Sequence[Tensor]):
        """Keep the state of the random number generators."""
        self.closure, self.parameters = closure, parameters
        self._random = RandomState(p.device for p in parameters)
        self._buffers: dict[nn.Module, dict[str, Tensor | None]] = {}  # by module, before its first call
        self._calls_backward = self._calls_grad = False

    def first(self, keep_graph: bool = False) -> Any:
        """Run it normally.

        Args:
            keep_graph: whether its backwards keep their graph.

        Raises:
            CurvoptError: if it neither returns a loss nor calls ``backward`` on one.
        """
        roots: list[Tensor] = []
        cotangents: list[Tensor] = []

        def backward(run: Callable, outputs: Any, grads: Any, retain_graph: bool, *rest: Any, **options: Any) -> Any:
            roots.extend(outputs)
            cotangents.extend(_cotangents(outputs, grads))
            return run(outputs, grads, retain_graph or keep_graph, *rest, **options)

        handle = register_module_forward_pre_hook(self._note_buffers)
        try:
            with torch.enable_grad(), self._watched(backward, contexts=True):
                self.result = self.closure()
        finally:
            handle.remove()
        self._calls_backward = bool(roots)
        if not roots:
            if not (isinstance(self.result, Tensor) and self.result.requires_grad and self.result.numel() == 1):
                raise CurvoptError(
                    "step(closure): the closure must return the loss, a scalar tensor with its graph, or call backward "
                    f"on it; it did not, and returned {_describe(self.result)}."
                )
            roots, cotangents = [self.result], [torch.ones_like(self.result)]
        self.roots, self.cotangents, self.start = roots, cotangents, _sum(roots, cotangents)
        self.eps = max(torch.finfo(root.dtype).eps for root in roots)
        return self.result

    def again(self) -> float:
        """Its value at the present parameters."""
        total = 0.0

        def backward(run: Callable, outputs: Any, grads: Any, *rest: Any, **options: Any) -> None:
            nonlocal total
            total += _sum(outputs, _cotangents(outputs, grads))

        quiet = self._without_side_effects()
        with torch.set_grad_enabled(self._calls_grad), self._watched(backward, contexts=False) as called, quiet:
            result = self.closure()
        # `if loss.requires_grad: loss.backward()`
        return total if self._calls_backward and called else float(result)

    def restore_buffers(self) -> None:
        """Put the buffers of all modules back to their values before the first run."""
        for module, before in self._buffers.items():
            for name, old in before.items():
                if old is not None:
                    module._buffers[name].copy_(old)  # pyright: ignore[reportOptionalMemberAccess]

    def _note_buffers(self, module: nn.Module, args: Any) -> None:
        if module._buffers and module not in self._buffers:
            self._buffers[module] = _clones(module._buffers)

    @contextmanager
    def _watched(self, backward: Callable, contexts: bool) -> Iterator[list[Any]]:
        """Pass backwards that accumulate gradients to ``backward``, and list them; contexts see them, or do not."""
        called: list[Any] = []

        def run(original: Callable, outputs: Sequence[Any], *rest: Any, **options: Any) -> Any:
            own = running_backward() == -1 and not is_own_backward()
            if own and options.get("accumulate_grad", False):
                called.append(outputs)
                return backward(original, outputs, *rest, **options)
            self._calls_grad = self._calls_grad or own
            return original(outputs, *rest, **options)

        with engine(run, contexts):
            yield called

    @contextmanager
    def _without_side_effects(self) -> Iterator[None]:
        """Random numbers of the first run, copies of buffers and no gradients inside; all is as before afterwards."""
        buffers = {module: dict(module._buffers) for module in self._buffers}
        grads = [p.grad for p in self.parameters]
        torch.clear_autocast_cache()  # it holds older weights here, and weights without a graph below
        with self._random.again():
            try:
                for module, originals in buffers.items():
                    module._buffers.update(_clones(originals))
                for p in self.parameters:
                    p.grad = None
                yield
            finally:
                for module, originals in buffers.items():
                    module._buffers.update(originals)
                for p, grad in zip(self.parameters, grads, strict=True):
                    p.grad = grad
                torch.clear_autocast_cache()


def _cotangents(outputs: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Tensor]:
    if any(isinstance(output, GradientEdge) for output in outputs):
        raise CurvoptError("step(closure): the closure called backward on a GradientEdge; call it on the loss.")
    return [torch.ones_like(z) if grad is None else grad for z, grad in zip(outputs, grads, strict=True)]


def _clones(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}{'' if result.requires_grad else ' without a graph'}"
    return f"a {type(result).__name__}"


def _sum(roots: Sequence[Tensor], cotangents: Sequence[Tensor]) -> float:
    return float(sum((c * z.detach()).sum() for z, c in zip(roots, cotangents, strict=True)))
