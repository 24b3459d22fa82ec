"""The closure of a step as a function of a change of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from curvopt.distributed import Ranks, mean_of
from curvopt.optim.closures import Closure
from curvopt.optim.hessian_free.quadratic_model import Differentiated, Vector


class Objective:
    """``f(θ + δ)`` by a closure: first with its graph, then for other δ without side effects.

    Args:
        closure: as for `HessianFree.step`.
        parameters: θ.
        decays: weight decay of each.
        sign: -1 to maximise the value of the closure.
        ranks: those that train together; f is the mean over them.

    Attributes:
        start: ``f(θ)``.
        resolution: change of f by rounding alone.
        evaluations: how often it was called.
    """

    def __init__(
        self,
        closure: Closure,
        parameters: Sequence[Tensor],
        decays: Sequence[float],
        sign: float = 1.0,
        ranks: Ranks | None = None,
    ):
        self.closure, self.parameters, self.decays, self.sign, self.ranks = closure, parameters, decays, sign, ranks
        self.theta = [p.detach().clone() for p in parameters]
        self.evaluations = 0

    def differentiate(self) -> Differentiated:
        """Run the closure normally, but keep the graph.

        Raises:
            CurvoptError: if it computes no loss, or one that is not known.
        """
        self.closure.first(keep_graph=True)
        self.evaluations += 1
        self.start = self._value(self.closure.start)
        self.resolution = self.closure.eps * abs(self.start)
        return Differentiated(self.closure.roots, [self.sign * c for c in self.closure.cotangents], self.parameters)

    def __call__(self, delta: Vector) -> float:
        """Value at θ + δ, infinite if it is not finite. The parameters stay there until `return_to_start`."""
        # through .data, which leaves the version alone: the graph at θ is used again when they are back there
        for p, old, d in zip(self.parameters, self.theta, delta, strict=True):
            p.data.copy_(old + d)
        self.evaluations += 1
        value = self._value(self.closure.again())
        return value if isfinite(value) else inf

    def return_to_start(self) -> None:
        """Put the parameters back, bit for bit."""
        for p, old in zip(self.parameters, self.theta, strict=True):
            p.data.copy_(old)

    def _value(self, of_closure: float) -> float:
        (mean,) = mean_of(self.ranks, [torch.tensor(of_closure, dtype=torch.float64, device=self.parameters[0].device)])
        decayed = [(decay, p) for decay, p in zip(self.decays, self.parameters, strict=True) if decay != 0]
        return self.sign * float(mean) + sum(decay / 2 * float(p.square().sum()) for decay, p in decayed)
