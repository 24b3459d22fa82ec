"""What a training can be asked for, in words. PyTorch is not imported here: that takes longer than a page of help."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from experiments.problems import PROBLEMS, describe_problems

if TYPE_CHECKING:
    ProblemName = str
    DataName = str
else:
    ProblemName = Literal[tuple(PROBLEMS)]
    DataName = Literal[tuple(dict.fromkeys(problem.data for problem in PROBLEMS.values()))]
Mode = Literal["online", "offline", "disabled"]

#: The optimizers of the command line.
OPTIMIZERS_IN_WORDS = {
    "kfac-sgd": "SGD with momentum whose gradients are multiplied by inverse Kronecker factors of the curvature",
    "kfac-adamw": "AdamW in the coordinates of the eigenvectors of the Kronecker factors",
    "ekfac-sgd": "KFACSGD with the best diagonal in the eigenvectors of the factors",
    "diagonal-newton": "SGD with momentum whose gradients are divided by a diagonal of the curvature",
    "hessian-free": "Newton steps by conjugate gradients, for large batches",
    "kfac-preconditioner": "inverse Kronecker factors in front of SGD with momentum 0.9, AdamW or Muon",
    "muon": "Muon for matrices of weights, AdamW for all other parameters (embeddings, biases, convolutions, norms)",
    "sgd": "stochastic gradient descent, with momentum if you ask for it",
    "adamw": "Adam with decoupled weight decay",
    "adam": "steps divided by the root of the mean squared gradient",
    "adafactor": "Adam whose squares are kept by rows and columns, to save memory",
    "adadelta": "steps divided by mean squared gradients, multiplied by mean squared steps",
    "adagrad": "steps divided by the root of the sum of squared gradients",
    "adamax": "Adam by the largest gradient in place of the mean square",
    "asgd": "averaged stochastic gradient descent",
    "lbfgs": "quasi-Newton steps from the gradients of former steps, for large batches",
    "nadam": "Adam with Nesterov's momentum",
    "radam": "Adam with a correction for its first steps",
    "rmsprop": "steps divided by the root of the mean squared gradient, without momentum by default",
    "rprop": "steps by the sign of the gradient, for whole data sets",
}


class DivergedError(RuntimeError):
    """The training loss stopped being finite; names the option to lower."""


class SettingsError(ValueError):
    """A run cannot start with these settings; says which."""


@dataclass(frozen=True)
class Settings:
    """The problem, and where the results go."""

    problem: ProblemName = "mnist5k-cnn"
    """Data set and model to train."""
    _: KW_ONLY
    seed: int = 0
    """Fixes initial parameters, order of the data and random numbers of the optimizer."""
    epochs: int | None = None
    """Passes over the training set; without it those of the problem. May be raised with --resume."""
    batch_size: int | None = None
    """Samples per step, over all processes; without it the problem's, 8 times as many for hessian-free and lbfgs."""
    accumulate: int = 1
    """Parts that a batch is cut into and computed one by one, which saves memory."""
    schedule: Literal["constant", "cosine", "linear", "steps"] = "constant"
    """Learning rate after warm-up: to zero by a cosine or linearly, or a tenth after 1/2 and again after 3/4."""
    warmup: int = 0
    """Steps in which the learning rate rises linearly at first."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision; fp16 needs a GPU."""
    device: str | None = None
    """Where to train: cpu, cuda, cuda:1, mps ...; without it cuda where there is a GPU, else cpu."""
    data: DataName | None = None
    """Another data set than the problem's."""
    npz: Path | None = None
    """Your own arrays: a NumPy archive of x_train, y_train, x_test, y_test."""
    data_root: Path | None = None
    """Folder where data sets are looked for and cached; without it curvopt in the cache of the user."""
    download: bool = False
    """Download the data set if it is not there."""
    augment: bool | None = None
    """Shift and mirror the images of each batch; without it as the problem does."""
    layers_every: int = 1
    """Epochs between curvature statistics per layer; 0 for none."""
    save_every: int | None = None
    """Steps between checkpoints; without it one at the end; 0 for none."""
    resume: bool = False
    """Go on from the checkpoint in the run directory, if there is one."""
    overwrite: bool = False
    """Train anew where the run directory holds a finished run or a checkpoint."""
    out: Path | None = None
    """Run directory; without it runs/<problem>-<optimizer>-<seed>."""
    wandb: Mode | None = None
    """Whether to log to wandb; without it online if a key is configured, else offline."""


def describe_optimizers() -> str:
    """A table of the optimizers, for the help of the command line."""
    return "\n".join(f"    {name:<20}{words}" for name, words in OPTIMIZERS_IN_WORDS.items())


def show_help(arguments: Sequence[str], description: str) -> None:
    """If help is asked for without an optimizer: show what all of them share, and end the process."""
    if {"-h", "--help"}.isdisjoint(arguments) or not OPTIMIZERS_IN_WORDS.keys().isdisjoint(arguments):
        return
    tyro.cli(
        Settings,
        args=["--help"],
        prog="python -m experiments.train [OPTIMIZER]",
        description=f"{description.strip()}\n\nProblems:\n\n{describe_problems()}\n\nOptimizers:\n\n"
        f"{describe_optimizers()}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
