"""The rule of a layer whose weight is computed from a parameter: masks, norms, parts of a packed weight.

::

    W = a[:, None] * p,  y = x W^T
    rule of the layer  ──►  Outer of W  ──►  left side times a (`Sides`)  ──►  Outer of p

Operations that do not act on one side go by `PulledBack`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.layers.pull_to_parameter import _is_by_entry, _is_linear, _through
from curvopt.core.layers.rule import Jacobians, Rule
from curvopt.core.layers.two_sides import Sides, _way_back
from curvopt.core.products.outer import Outer
from curvopt.core.record.calls import ModuleCall


class ComputedWeightRule(Rule):
    """An operation with a weight that was computed from the parameter.

    Args:
        rule: of the operation with a weight of its own, by the name ``weight``.
        p: the parameter.
        source: where the weight was computed; ``None`` if it is the parameter, with axes moved perhaps.
        start: the first row of the parameter that is the weight; ``None`` if all rows are.
    """

    def __init__(self, rule: Rule, p: nn.Parameter, source: GradientEdge | None, start: int | None = None):
        """Keep them, and read what nodes saved: while the graph is passed, checkpoints give that out only once."""
        self.rule, self.p, self.source, self.start = rule, p, source, start
        self._way = [] if source is None else _way_back(source, p)

    @cached_property
    def linear(self) -> bool:  # type: ignore[override]
        return self.rule.linear and _is_linear(self.source, self.p)

    @cached_property
    def pulls_back(self) -> bool:  # type: ignore[override]
        whole = self._way and self._way[-1].operand is None
        return not (self.source is None or whole or _is_by_entry(self.source, self.p))

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        return self.rule.takes_steps(call, how)

    def output_axis(self, call: ModuleCall, index: int) -> int | Tensor | None:
        return self.rule.output_axis(call, index)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        jacobian, source = self.rule.jac_t(call, grads, ["weight"], N)["weight"], self.source
        if source is not None and isinstance(jacobian, Outer):
            if "sides" not in call.cache:
                call.cache["sides"] = Sides(source, jacobian).along(self._way)
            sides = call.cache["sides"]
            jacobian, source = sides(jacobian), sides.source
        if self.start is not None and isinstance(jacobian, Outer):
            others = self.start, len(self.p) - self.start - jacobian.O
            jacobian = jacobian.with_sides(F.pad(jacobian.left, others), None, self.p.shape, False)
        return dict.fromkeys(names, _through(call, source, self.p, jacobian))
