"""What an extension is: which columns travel backwards, and what is made of the Jacobian at a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from curvopt.core.jacobians import Jacobian
from curvopt.core.sweep import Exact, Gradient, MonteCarlo


class Extension(ABC):
    """One quantity of every parameter, computed along with a backward.

    A quantity of one's own is one subclass: name the `field`, choose the `columns`, and say in `update` how the
    Jacobian of a chunk of columns enters the total.
    """

    #: Attribute of the parameter that holds the result.
    field: ClassVar[str]
    #: What travels backwards.
    columns: Gradient | Exact | MonteCarlo = Gradient()

    #: Whether samples are kept apart in the result.
    per_sample: ClassVar[bool] = False

    @property
    def needs_independent_samples(self) -> bool:
        """Whether the quantity is undefined when samples mix (train-mode batch norm)."""
        return not isinstance(self.columns, MonteCarlo)

    @abstractmethod
    def update(self, total: Any, jacobian: Jacobian) -> Any:
        """The total after a chunk of columns.

        Args:
            total: what the last call returned, ``None`` at the first chunk. First-order quantities see a single chunk.
            jacobian: Jacobian products of the chunk, with all uses of the parameter combined.
        """

    def finish(self, total: Any) -> Any:
        """The value of the field, from the total over all columns."""
        return total


def add(total: Any, value: Any) -> Any:
    """``total + value``, in place where no graph is built."""
    if total is None:
        return value
    return total + value if total.requires_grad or value.requires_grad else total.add_(value)
