"""The base class of extensions: the columns that are pulled back, and the reduction of the Jacobian at a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, ClassVar

from torch import Tensor

from curvopt.core.losses.roots import Averaged, Empirical, Exact, Gradient, MonteCarlo
from curvopt.core.products.base import Chunk
from curvopt.errors import CurvoptError


class Extension(ABC):
    """One quantity of every parameter, computed along with a backward.

    A new quantity is one subclass: name the `field`, choose the `columns`, and let `update` add the Jacobian of a chunk
    of columns to the total.
    """

    #: Attribute of the parameter that holds the result.
    field: str
    #: The vectors that are pulled back.
    columns: Gradient | Exact | MonteCarlo | Empirical | Averaged = Gradient()

    #: Whether samples are kept apart in the result.
    per_sample: ClassVar[bool] = False

    #: Whether the quantity is undefined when samples mix (train-mode batch norm).
    needs_independent_samples: ClassVar[bool] = True

    #: Whether a first-order quantity takes row n's part of the gradient for sample n's gradient where samples mix.
    through_batch_norm: bool = False

    #: Whether a first-order quantity is the sum of that of parts of the batch.
    adds_up: ClassVar[bool] = False

    #: Indices of the samples that are kept, as of a list: negative ones count from the end; ``None`` for all.
    subsampling: Sequence[int] | None = None

    #: Whether only the first chunk of columns reads inputs, so that patches of convolutions need not be kept.
    reads_inputs_once: ClassVar[bool] = False

    @property
    def savefield(self) -> str:
        """BackPACK's name of `field`, which may be set: several extensions of a class may be in one context."""
        return self.field

    @savefield.setter
    def savefield(self, name: str) -> None:
        self.field = name

    @abstractmethod
    def update(self, total: Any, chunk: Chunk) -> Any:
        """The total after a chunk of columns.

        Args:
            total: the result of the last call, ``None`` at the first chunk. First-order quantities get a single chunk.
            chunk: the parameter and its Jacobian products.
        """

    def regularize(self, total: Any, weight: Tensor, p: Tensor, N: int) -> Any:
        """The total with ``weight`` times the identity added to the curvature of parameter p (an L2 regularizer).

        Raises:
            CurvoptError: where the quantity has no exact form for that.
        """
        raise CurvoptError(
            f"{self.field} of a loss with an L2Regularizer is not defined; leave the term out of this loss, or ask "
            "for a diagonal or a matrix product."
        )

    def finish(self, total: Any) -> Any:
        """The value of the field, from the total over all columns."""
        return total


def indices(subsampling: Iterable[int] | None) -> list[int] | None:
    """Indices of samples as plain numbers, ``None`` for all.

    Raises:
        TypeError: for an entry that is no index: a fraction, or an entry of a mask.
    """
    if subsampling is None:
        return None
    entries = subsampling.tolist() if isinstance(subsampling, Tensor) else list(subsampling)
    try:
        chosen = [index(entry) for entry in entries]
    except TypeError:
        chosen = None
    if chosen is None or any(isinstance(entry, bool) for entry in entries):
        raise TypeError(f"subsampling: expected indices of samples such as [0, 2], got {subsampling!r}.")
    return chosen


def fields_of(extensions: Iterable[Extension]) -> str:
    """Names of the fields, for messages."""
    return ", ".join(e.field for e in extensions)


def fields_that(extensions: Sequence[Extension], verb: str) -> str:
    """Names of the fields and a verb."""
    return f"{fields_of(extensions)} {verb if len(extensions) > 1 else verb + 's'}"


def naming_fields(extensions: Iterable[Extension], error: CurvoptError) -> CurvoptError:
    """An error that names the fields that were asked for, if it names none of them yet."""
    extensions, text = list(extensions), str(error)
    is_named = any(e.field in text for e in extensions)
    return type(error)(text if is_named else f"{fields_of(extensions)}: {text}")
