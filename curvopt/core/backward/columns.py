"""The vectors that an extension wants to travel backwards: the gradient, or columns of a root of the loss Hessian.

>>> from curvopt.core.losses.roots import Diagonal
>>> loss = Diagonal(torch.ones(4, 3))  # squared errors of 4 samples with 3 outputs
>>> [list(columns.shape) for columns in Exact().chunks(loss, size=2, ranks=())]
[[2, 4, 3], [1, 4, 3]]
>>> list(MonteCarlo(5).draw(loss).shape)
[5, 4, 3]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvopt.core.backward.second_derivatives import Modify
from curvopt.core.losses.roots import LossCurvature

_columns_per_sweep: int | None = None


def set_columns_per_sweep(columns: int | None) -> None:
    """Override how many columns of the loss Hessian's root are pulled back, or kept to be multiplied, together.

    Args:
        columns: a positive number (memory grows with it), or ``None`` to choose from the sizes of the network.

    Raises:
        ValueError: for a number below one.
    """
    global _columns_per_sweep
    if columns is not None and columns < 1:
        raise ValueError(f"set_columns_per_sweep: expected a positive number or None, got {columns}.")
    _columns_per_sweep = columns


def columns_per_sweep() -> int | None:
    """The number that was set."""
    return _columns_per_sweep


@dataclass(frozen=True)
class Gradient:
    """The gradient itself: one column, whatever the loss."""


@dataclass(frozen=True)
class Exact:
    """All columns of the root of the loss Hessian.

    Args:
        by_entries: of the usual root, which may have more columns than it needs.
    """

    by_entries: bool = field(default=False, kw_only=True)

    def total(self, loss: LossCurvature, ranks: Sequence[int]) -> int:
        """Number of columns."""
        return loss.columns * (max(ranks, default=0) + 1)

    def chunks(self, loss: LossCurvature, size: int, ranks: Sequence[int]) -> Iterator[Tensor]:
        """Columns ``[v, *z.shape]``, at most ``size`` at a time.

        Args:
            loss: the curvature.
            size: columns at a time.
            ranks: of each row of z its number among those of its sample; rows of equal rank share columns.
        """
        rows = max(ranks, default=0) + 1
        for rank in range(rows):
            for start in range(0, loss.columns, size):
                columns = loss.root(start, min(start + size, loss.columns))
                if rows > 1:
                    own = torch.tensor([r == rank for r in ranks], device=columns.device)
                    columns = columns * own.view(1, -1, *[1] * (columns.dim() - 2))
                yield columns


@dataclass(frozen=True)
class Hessian(Exact):
    """All columns of the root of the loss Hessian, then weighted columns of what nonlinear operations add.

    Args:
        modify: replace what each operation adds by its positive part (``"clip"``) or absolute value (``"abs"``).
    """

    modify: Modify = None


@dataclass(frozen=True)
class MonteCarlo:
    """Random columns whose outer products average to the loss Hessian.

    Args:
        samples: number of columns drawn per data point.
        generator: source of randomness, else the global one.
    """

    samples: int = 1
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Refuse a number that is no number of samples."""
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"mc_samples: expected a positive integer, got {self.samples!r}.")

    def draw(self, loss: LossCurvature) -> Tensor:
        """Columns ``[samples, *z.shape]``, all drawn at once so that chunks of them change nothing."""
        return loss.sample(self.samples, self.generator) / self.samples**0.5


@dataclass(frozen=True)
class Empirical:
    """One column: each prediction's own gradient, at the target that it has.

    Args:
        generator: source of random signs of the rows where a batch counts as one sample, so that products of different
            rows average to zero, as they do for drawn targets. Without it such a batch goes by rows.
        scaled: multiply the column of each loss so that its mean square is that of columns at drawn targets: it shows
            how predictions err together, in units of the curvature of the loss, whatever the size of the errors.
    """

    generator: torch.Generator | None = None
    scaled: bool = False


@dataclass(frozen=True)
class Averaged:
    """One matrix for all samples, averaged layer by layer."""


def ranks_of(samples: Sequence[int]) -> list[int]:
    """The number of each row among those of its sample."""
    seen: dict[int, int] = {}
    ranks = []
    for sample in samples:
        ranks.append(seen.get(sample, 0))
        seen[sample] = ranks[-1] + 1
    return ranks
