"""Rules of modules with matrices inside (recurrent nets, attention): their forward is replayed from products ``x W^T``.

Autograd pulls the vectors at the module's outputs back to every such product of the replay; from there on each matrix is a
linear layer with its own shared positions (time steps, tokens), so its Jacobian is an `Outer` and has Kronecker factors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt.core.derivatives.rules import Jacobians, Rule, arguments, check_outputs, register  # noqa: F401
from curvopt.core.jacobians import Dense, Outer, combine
from curvopt.core.uses import Use, disable
from curvopt.errors import CurvoptError


@dataclass
class Site:
    """An affine map met in a replay: ``output = input W^T + b`` with some rows of a weight and of a bias.

    Attributes:
        output: what autograd pulls back to, ``[N, S, O]``.
        input: ``[N, S, I]``, or ``None`` for a site that only adds a bias.
        weight: name of the weight, if there is one.
        bias: name of the bias, if there is one.
        start: first of the O rows of weight and bias that are used.
    """

    output: Tensor
    input: Tensor | None = None
    weight: str | None = None
    bias: str | None = None
    start: int = 0


class Replay:
    """Collects the sites of one replay."""

    def __init__(self, module: nn.Module):
        """Look up parameters in the module."""
        self.module = module
        self.sites: list[Site] = []

    def get(self, name: str | None) -> Tensor | None:
        """A parameter by its name, if the module has it."""
        return None if name is None else getattr(self.module, name, None)

    def add(self, output: Tensor, x: Tensor | None, weight: str | None, bias: str | None, start: int = 0) -> Tensor:
        """Note a site (parameters that the module does not have are left out) and return its output."""
        if output.requires_grad:
            self.sites.append(Site(output, x, weight, bias if self.get(bias) is not None else None, start))
        return output
