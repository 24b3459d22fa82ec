"""The settings of a training, and how a command line gives them."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tyro

import curvopt
from experiments.data import DEFAULT_ROOT, Data, load, load_npz
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.problems import PROBLEMS
from experiments.settings import Settings, SettingsError

if TYPE_CHECKING:
    OptimizerChoice = OptimizerConfig
else:
    OptimizerChoice = tyro.extras.subcommand_type_from_defaults(
        {name: kind() for name, kind in OPTIMIZERS.items()},
        descriptions={name: kind.__doc__ for name, kind in OPTIMIZERS.items()},
        prefix_names=False,
    )

_LARGER = 8  # batches of optimizers whose step minimizes the loss of its batch
#: Settings that do not change the curve of a run.
_FREE = {"data_root", "download", "save_every", "resume", "overwrite", "out", "wandb"}


@dataclass(frozen=True)
class Config(Settings):
    """The problem, the optimizer, and where the results go."""

    optimizer: OptimizerChoice = field(default_factory=OPTIMIZERS["kfac-sgd"])
    """Optimizer to train with."""

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
            device=self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            data_root=self.data_root or DEFAULT_ROOT,
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
        name, root = self.data or problem.data, self.data_root or DEFAULT_ROOT
        return problem.prepare(load_npz(self.npz) if self.npz else load(name, root, self.download))

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
        description=description,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagCreatePairsOff),
    )
