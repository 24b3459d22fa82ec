"""Faults and private functions of PyTorch, and how the engine deals with them.

A test of ``tests/core/test_pytorch_workarounds.py`` fails once PyTorch has mended a fault, so that its workaround
can go::

    WRONG_TWICE       second derivative of weight norm is wrong             a named error
    wrong_together    batch norm of one image, several vectors at once      vectors one by one
    wrong_together    `.data` in a function's backward, several at once     vectors one by one
    lone_biases       second derivatives of norms with a bias and no weight    a named error
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parallel import DistributedDataParallel

from curvopt.core.nodes import is_of_users, name_of, shape_of, walk


def running_backward() -> int:
    """A number that distinguishes the backward that runs now; -1 outside of any."""
    return torch._C._current_graph_task_id()


def saves_tensors_as_they_are() -> bool:
    """Whether no hook packs the tensors that autograd saves, and no autocast converts them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    return hooks is None and not torch._C._is_any_autocast_enabled()


def is_written_down() -> bool:
    """Whether operations are traced or exported, to be run later without modules."""
    # not is_exporting(), which older versions of PyTorch take for true in all that they compile
    return torch._C._get_tracing_state() is not None or torch.compiler._is_exporting_flag


def is_batched(x: Tensor) -> bool:
    """Whether a tensor holds several vectors, as in ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return torch._C._functorch.is_legacy_batchedtensor(x)  # type: ignore[attr-defined]


def outside_of_graphs(call: Callable[..., Any], *args: Any) -> Any:
    """Call something that ``torch.compile`` is tracing, without having it traced."""
    torch._dynamo.graph_break(
        msg="curvopt reads the autograd graph, which no compiled graph contains: use torch.compile without "
        "fullgraph=True, or run a forward that needs no quantities inside of curvopt.disable()."
    )
    return torch._dynamo.disable(_untraced)(call, *args)


def _untraced(call: Callable[..., Any], *args: Any) -> Any:
    from torch._functorch import config

    config.donated_buffer = False  # compiled backwards run for several columns
    return call(*args)


def forget_compiled_code() -> None:
    """Have ``torch.compile`` trace anew what it has compiled: its guards do not see that a module has got hooks."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.input_codes.seen and not torch.compiler.is_dynamo_compiling():
        torch.compiler.reset()


@contextmanager
def without_reductions(models: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Backwards inside start no reduction of gradients by models with a static graph."""
    models = list(models)
    before = [ddp._static_graph_delay_allreduce_enqueued for ddp in models]
    try:
        for ddp in models:
            ddp._static_graph_delay_allreduce_enqueued = True
        yield
    finally:
        for ddp, enqueued in zip(models, before, strict=True):
            ddp._static_graph_delay_allreduce_enqueued = enqueued


class Wrong(NamedTuple):
    """A derivative that is wrong in PyTorch, of nodes of a name, and what to do instead."""

    name: str
    derivative: str
    instead: str

    def nodes(self, roots: list[Node], boundary: frozenset = frozenset()) -> list[Node]:
        """The nodes of that name behind the roots."""
        return [node for node in walk(roots, boundary) if name_of(node) == self.name]


WRONG_TWICE = Wrong(
    "WeightNormInterfaceBackward0",  # as if norms were fixed
    "second derivative of weight norm",
    "normalise by other operations (`g * v / v.norm(dim=1, keepdim=True)`)",
)

WRONG_THREE_TIMES = Wrong(
    "NativeLayerNormBackward0",
    "third derivative of layer norm",
    "normalise by other operations (`F.group_norm` of rows, `(x - x.mean(-1, keepdim=True)) / ...`)",
)


def lone_biases(root: Node, boundary: frozenset = frozenset()) -> list[Node]:
    """The nodes of biases of norms behind ``root`` without a weight: PyTorch drops second derivatives in them."""
    norms = ("NativeLayerNormBackward0", "NativeBatchNormBackward0")
    found = [node for node in walk([root], boundary) if name_of(node) in norms and node.next_functions[1][0] is None]
    lone = [node for node in found if node._saved_weight is None]  # type: ignore[attr-defined]
    return [bias for node in lone if (bias := node.next_functions[2][0]) is not None]


def wrong_together(outputs: Sequence[GradientEdge | Tensor]) -> bool:
    """Whether PyTorch may pull several vectors back wrongly at once, or crash.

    Its batch norm of one image on a CPU mistakes strides of a batch of vectors in channels-last layout; an instance
    norm is one of one image, too. And ``.data`` of such a batch crashes the process: users' functions may take it.
    """
    roots = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in outputs]
    for node in walk([root for root in roots if root is not None]):
        if name_of(node) == "NativeBatchNormBackward0":
            shape = shape_of(node)
            if len(shape) > 3 and shape[0] == 1 and node._input_metadata[0].device.type == "cpu":  # type: ignore[attr-defined]
                return True
        if is_of_users(node):
            return True
    return False
