"""The table of losses, and of functions that build their Hessians.

::

    @register_loss(LogCosh)
    def log_cosh(module, z, target) -> LossCurvature:
        return Diagonal(1 / (z - target).cosh())     # the root of the Hessian's diagonal, like z
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from curvopt.core.losses.roots import LossCurvature

# --------------------------------------------------------------------------------------------------- losses as modules

Builder = Callable[[Any, Tensor, Any], LossCurvature]

_losses: dict[type[nn.Module], Builder] = {}

B = TypeVar("B", bound=Builder)

#: Losses that are linear in their input: what is curved comes before them and is recognised in the graph.
LINEAR_LOSSES = (nn.NLLLoss, nn.KLDivLoss)


def register_loss(*types: type[nn.Module]) -> Callable[[B], B]:
    """Decorator: the class or function ``(module, z, target) -> LossCurvature`` serves these loss modules.

    The curvature is that of the module's scalar output, its reduction included; for a ``z`` in half precision it is
    computed in float32. Instances of the types, and of subclasses with the same ``forward``, are losses for
    `curvopt.extend`.
    """

    def add(builder: B) -> B:
        _losses.update(dict.fromkeys(types, builder))
        return builder

    return add


def is_loss(module: nn.Module) -> bool:
    """Whether a module is a loss: a registered type, or a subclass of PyTorch's (private) base of losses."""
    return isinstance(module, (nn.modules.loss._Loss, *_losses)) and not isinstance(module, LINEAR_LOSSES)


def _reduced(module: Any, weight: Any, terms: int | Tensor) -> Any:
    """The weight that the module's reduction leaves: divided by the number of averaged terms, or as it is in a sum."""
    return weight / terms if module.reduction == "mean" else weight
