"""Draw the curvature of a trained network.

Reads a checkpoint of experiments.train (a file or a run directory) and writes four pictures: trace of the generalized
Gauss-Newton matrix per parameter, eigenvalues of the Kronecker factors, gradient norms of single held-out samples with
the images of the largest, and the diagonal of the Hessian.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Inspection:
    """Which checkpoint, and how much of it to draw."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or a run directory with one."""
    samples: int = 500
    """Held-out samples to take curvature and gradients of."""
    hessian_samples: int = 8
    """Held-out samples for the exact diagonal of the Hessian, which is slow with attention; 0 leaves it out."""
    data_root: Path | None = None
    """Folder where data sets are looked for; without it curvopt in the cache of the user."""
    out: Path | None = None
    """Directory for the pictures; without it inspect/ beside the checkpoint."""


def main() -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    inspection = tyro.cli(Inspection, prog="python -m experiments.inspect", description=__doc__)
    from experiments.data import DataError  # imports PyTorch, which help does without
    from experiments.pictures import draw

    try:
        pictures = draw(inspection)
    except (ValueError, DataError) as error:
        sys.exit(f"stopped: {error}")
    print(*pictures, sep="\n")


if __name__ == "__main__":
    main()
