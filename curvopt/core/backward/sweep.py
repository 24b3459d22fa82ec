"""One sweep: vectors are pulled back to all calls with parameters, and reduced as soon as they have arrived.

::

    columns [v, N, C] ──► last layer ──► rule ──► Chunk ──► extension.update
                              │
                              └──► first layer ──► rule ──► Chunk ──► extension.update

The chunks of a parameter that several calls share are combined first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from curvopt.core.graph.backward_graph import CallInGraph
from curvopt.core.products.base import Chunk
from curvopt.core.products.sums import combine

if TYPE_CHECKING:
    from curvopt.core.backward.backward_pass import BackwardPass
    from curvopt.extensions.base import Extension


@dataclass
class Sweep:
    """The vectors of one sweep, and the Jacobians that are not reduced yet.

    Attributes:
        run: the backward whose totals are updated.
        extensions: those whose totals they are.
        calls: where the vectors go to.
        skip: parameters that are left out.
        weights: of the vectors in sums of squares, ``[v, N]``; ``None`` for ones.
        columns: number of columns of all sweeps for these extensions.
        last: no vectors follow, so tensors that vectors share may be freed.
        waiting: vectors at the outputs of calls that have other outputs without vectors so far.
        parts: Jacobians of single calls, by parameter.
    """

    run: BackwardPass
    extensions: Sequence[Extension]
    calls: Sequence[CallInGraph]
    skip: Collection[CallInGraph | nn.Parameter] = ()
    weights: Tensor | None = None
    columns: int | None = None
    last: bool = False
    waiting: dict[CallInGraph, list[Tensor | None]] = field(default_factory=dict)
    parts: dict[nn.Parameter, list[Chunk]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = [(call, index) for call in self.calls for index in call.edges]

    def arrived(self, i: int, grad: Tensor) -> None:
        """Vectors ``[v, *out]`` have arrived at one of the places; reduce the call if all its outputs have some."""
        call, index = self.places[i]
        grads = self.waiting.setdefault(call, [None] * len(call.call.shapes))
        grads[index] = grad
        if len(call.edges) == 1 or sum([grad is not None for grad in grads]) == len(call.edges):
            self._reduce(call)

    def finish(self) -> None:
        """Reduce the rest: no other vectors arrive."""
        for call in list(self.waiting):
            self._reduce(call)
        for p in list(self.parts):
            self._update(p)

    def _reduce(self, call: CallInGraph) -> None:
        for chunk in self.run.jacobians(call, self.waiting.pop(call), self.last):
            p = chunk.parameter
            if p not in self.skip:
                self.parts.setdefault(p, []).append(chunk)
                del chunk
                if len(self.parts[p]) == self.run.calls_of[p]:
                    self._update(p)

    def _update(self, p: nn.Parameter) -> None:
        self.run.update(combined(self.parts.pop(p), self.weights, self.columns), self.extensions)


def combined(chunks: Sequence[Chunk], weights: Tensor | None = None, num_columns: int | None = None) -> Chunk:
    """One chunk for all calls that share a parameter."""
    p, jacobian = chunks[0].parameter, combine([chunk.jacobian for chunk in chunks])
    if weights is not None:
        jacobian = jacobian.with_weights(weights.to(p))
    return Chunk(p, jacobian, tuple([call for chunk in chunks for call in chunk.calls]), num_columns)
