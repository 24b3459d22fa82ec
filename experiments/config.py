"""The settings of a training, and how a command line gives them."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import tyro

import curvopt
from experiments.data import DATASETS, DEFAULT_ROOT, Data, load, load_npz
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.problems import PROBLEMS, describe_problems
from experiments.tracking import Mode

if TYPE_CHECKING:
    ProblemName = str
    DataName = str
    OptimizerChoice = OptimizerConfig
else:
    ProblemName = Literal[tuple(PROBLEMS)]
    DataName = Literal[tuple(DATASETS)]
    OptimizerChoice = tyro.extras.subcommand_type_from_defaults(
        {name: kind() for name, kind in OPTIMIZERS.items()},
        descriptions={name: kind.__doc__ for name, kind in OPTIMIZERS.items()},
        prefix_names=False,
    )

_LARGER = 8  # batches of optimizers whose step minimizes the loss of its batch
#: Settings that do not change the curve of a run.
_FREE = {"data_root", "download", "save_every", "resume", "overwrite", "out", "wandb"}


class DivergedError(RuntimeError):
    """The training loss stopped being finite; names the option to lower."""


class SettingsError(ValueError):
    """A run cannot start with these settings; says which."""


@dataclass(frozen=True)
class Config:
    """The problem, the optimizer, and where the results go."""

    problem: ProblemName = "mnist5k-cnn"
    """Data set and model to train."""
    optimizer: OptimizerChoice = field(default_factory=OPTIMIZERS["kfac-sgd"])
    """Optimizer to train with."""
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
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to train: cpu, cuda, cuda:1, mps ..."""
    data: DataName | None = None
    """Another data set than the problem's."""
    npz: Path | None = None
    """Your own arrays: a NumPy archive of x_train, y_train, x_test, y_test."""
    data_root: Path = DEFAULT_ROOT
    """Folder where data sets are looked for and cached."""
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

    def resolved(self) -> "Config":
        """A copy with everything that was left to the problem filled in."""
        problem = PROBLEMS[self.problem]
        # runs of a wandb sweep differ in any setting
        name = "-".join(
            filter(None, [self.problem, self.optimizer.name, str(self.seed), os.environ.get("WANDB_RUN_ID")])
        )
        batch_size = problem.batch_size * (_LARGER if self.optimizer.fits_batch else 1)
        return replace(
            self,
            optimizer=self.optimizer.resolved(problem.settings(self.optimizer.name)),
            epochs=problem.epochs if self.epochs is None else self.epochs,
            batch_size=batch_size if self.batch_size is None else self.batch_size,
            augment=problem.augment if self.augment is None else self.augment,
            out=self.out or Path("runs") / name,
        )

    def as_json(self) -> dict[str, Any]:
        """All settings, and the versions they were used with, for ``config.json`` and wandb."""
        versions = {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "curvopt": curvopt.__version__,
        }
        settings = {
            **asdict(self),
            "optimizer": {"name": self.optimizer.name, **asdict(self.optimizer)},
            "versions": versions,
        }
        return json.loads(json.dumps(settings, default=str))  # as they are read back: lists for tuples

    def differences(self, other: Mapping[str, Any]) -> set[str]:
        """Settings that make the curve differ from that of ``other``, the ``config.json`` of a run."""
        ours = self.as_json()
        return {name for name in ours.keys() - _FREE if other.get(name) != ours[name]}

    def load_data(self) -> Data:
        """The problem's data set, another one by name, or arrays from a file, as the problem wants them."""
        if self.npz is not None and self.data is not None:
            raise SettingsError("--data and --npz both say which data to train on; give one")
        problem = PROBLEMS[self.problem]
        name = self.data or problem.data
        return problem.prepare(load_npz(self.npz) if self.npz else load(name, self.data_root, self.download))

    def check(self, samples: int, processes: int) -> None:
        """Raise `SettingsError` where a setting does not fit a training set of so many samples."""
        assert self.batch_size is not None
        parts = processes * self.accumulate
        check_least(self, epochs=1, accumulate=1, warmup=0, layers_every=0, save_every=0)
        if not 0 < self.batch_size <= samples:
            raise SettingsError(f"--batch-size must be in 1 ... {samples}, got {self.batch_size}")
        if self.batch_size % parts:
            raise SettingsError(
                f"--batch-size must be a multiple of {parts} (processes times --accumulate), got {self.batch_size}"
            )
        if self.amp == "fp16" and not self.optimizer.scalable:
            raise SettingsError(f"{self.optimizer.name} does not work with the scaled losses of --amp fp16; use bf16")
        if self.amp == "fp16" and self.device == "cpu":
            raise SettingsError("--amp fp16 needs a GPU; use --amp bf16 on a CPU")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise SettingsError(f"--device {self.device} cannot be used here: {error}") from error


def check_least(settings: Any, **least: int) -> None:
    """Raise `SettingsError` where a setting, unless it is ``None``, is less than it may be."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and value < bound:
            raise SettingsError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def parse(arguments: Sequence[str] | None = None, description: str = "") -> Config:
    """The settings that a command line asks for, by default that of this process."""
    return tyro.cli(
        Config,
        args=arguments,
        prog="python -m experiments.train",
        description=f"{description.strip()}\n\nProblems:\n\n{describe_problems()}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagCreatePairsOff),
    )
