"""Run a wandb sweep file here, several runs at a time, without a server: a grid, random points, or Bayesian search.

Optuna proposes the points; `method: bayes` goes by those before (a tree-structured Parzen estimator). Runs that are
finished with the very same settings are not trained again, and interrupted ones go on from their checkpoint if they
have one (--save-every), so the same command resumes a sweep.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.settings import SettingsError


@dataclass(frozen=True)
class Sweep:
    """Which search, and how to run it."""

    file: Annotated[Path, tyro.conf.Positional] = Path(__file__).with_name("sweep.yaml")
    """A file for `wandb sweep`: command, method (grid, random or bayes), metric, parameters, run_cap."""
    runs: int | None = None
    """Runs of a random or Bayesian search; without it the file's run_cap, else 20. A grid has all its points."""
    jobs: int = 1
    """Runs at the same time. A Bayesian search learns from a run when all that began with it have ended."""
    seed: int = 0
    """Fixes the proposed points; two sweeps with one seed propose the same."""
    out: Path = Path("runs") / "sweep"
    """Directory for sweep.png, sweep.md and the run directories, each named by the settings in which it differs."""
    overwrite: bool = False
    """Train all runs anew, also those that are finished."""


def main() -> None:
    """The command line."""
    sweep = tyro.cli(Sweep, prog="python -m experiments.sweep", description=__doc__)
    from experiments.search import run_all  # imports PyTorch, which help does without

    try:
        table, failures = run_all(sweep)
    except SettingsError as error:
        sys.exit(f"stopped: {error}")
    print("\n".join(failures), table, f"\npicture: {sweep.out / 'sweep.png'}", sep="\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
