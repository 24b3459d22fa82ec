"""Rules of recurrent nets, with matrices inside: their forward is replayed from products ``W x``.

Autograd pulls the vectors at the module's outputs back to every such product of the replay; from there on each matrix
is a linear layer whose shared positions are the time steps, so its Jacobian is an `Outer`::

    def replay(self, call, tape):
        return [torch.tanh(tape.linear(call.input, "weight", "bias"))]    # one site
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvopt.core.autograd_graph.vjp import pull
from curvopt.core.jacobians.base import Dense, Jacobian
from curvopt.core.jacobians.combine import combine
from curvopt.core.jacobians.outer import Outer
from curvopt.core.layers.rule import Jacobians, Rule
from curvopt.core.recording.calls import ModuleCall
from curvopt.core.recording.state import disable


@dataclass
class Site:
    """A product in a module, ``input W^T + b``.

    Attributes:
        input: ``[N, *S, I]``.
        weight: name of the weight.
        bias: name of the bias, if there is one.
    """

    input: Tensor
    weight: str
    bias: str | None = None


class Tape:
    """The parameters of a module and the products (sites) in a replay of its forward.

    Args:
        module: the module whose forward is replayed.
    """

    def __init__(self, module: Any):
        """Begin without sites."""
        self.module = module
        #: The sites, and their outputs ``[N, *S, O]``, to which autograd pulls back.
        self.sites: list[tuple[Site, Tensor]] = []

    def parameter(self, name: str) -> Tensor | None:
        """A parameter by its name, ``None`` where the module does without."""
        return getattr(self.module, name, None)

    def linear(self, x: Tensor, weight: str, bias: str) -> Tensor:
        """``x W^T + b`` with the named parameters."""
        W, b = self.parameter(weight), self.parameter(bias)
        assert W is not None
        return self.note(F.linear(x.to(W.dtype), W, b), Site(x, weight, None if b is None else bias))

    def note(self, output: Tensor, site: Site) -> Tensor:
        """Remember a site and return its output."""
        if output.requires_grad:
            self.sites.append((site, output))
        return output


class ReplayRule(Rule):
    """A module defined by a forward that calls `Tape.linear` for every product with a parameter."""

    @abstractmethod
    def replay(self, call: ModuleCall, tape: Tape) -> Sequence[Tensor | None]:
        """The outputs of the call, in order, with batch axes where the module has them; ``None`` for integer ones."""

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        if "replay" not in call.cache:
            tape = Tape(call.module)
            with torch.enable_grad(), disable():
                outputs = self.replay(call, tape)
            call.cache["replay"] = outputs, tape.sites
        outputs, sites = call.cache["replay"]
        sites = [(site, output) for site, output in sites if site.weight in names or site.bias in names]
        # autocast: the forward may have run in another precision
        arrived = [
            (out, grad.to(out.dtype))
            for out, grad in zip(outputs, grads, strict=True)
            if out is not None and grad is not None
        ]
        pulled = pull([out for out, _ in arrived], [output for _, output in sites], [grad for _, grad in arrived])
        V = len(arrived[0][1])
        lefts = [
            output.new_zeros(V, *output.shape) if left is None else left
            for (_, output), left in zip(sites, pulled, strict=True)
        ]
        parts: dict[str, list[Jacobian]] = {name: [] for name in names}
        for (site, _), left in zip(sites, lefts, strict=True):
            rows = left.reshape(len(left), N, 1, -1, left.shape[-1])
            for name in (site.weight, site.bias):
                if name in parts:
                    parts[name].append(self._jacobian(call.module.get_parameter(name), site, rows, name == site.bias))
        return {name: combine(jacobians) for name, jacobians in parts.items()}

    @staticmethod
    def _jacobian(parameter: Tensor, site: Site, left: Tensor, is_bias: bool) -> Jacobian:
        if is_bias:
            return Dense(left.sum(3).reshape(*left.shape[:2], *parameter.shape))
        right = site.input if torch.is_grad_enabled() else site.input.detach()
        return Outer(left, right.to(left.dtype).reshape(left.shape[1], 1, -1, right.shape[-1]), parameter.shape)
