"""Train a problem with an optimizer.

Writes into the run directory: config.json, metrics.jsonl (one JSON object per line: one for every step with the loss
of its batch, and after every epoch one with the loss over the whole training set and loss and accuracy on held-out
data), curves.png, and the files of a wandb run. Seconds are those of training, evaluation excluded.

The optimizer is a subcommand with settings of its own:

    python -m experiments.train --problem mnist5k-cnn --seed 1 kfac-sgd --lr 0.1 --damping 0.03
"""

import json
import logging
import math
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import torch
import tyro
from torch import nn
from tqdm import tqdm

from experiments import data
from experiments.optimizers import OPTIMIZERS, KfacSgdConfig, OptimizerConfig
from experiments.plots import plot_curves
from experiments.problems import PROBLEMS
from experiments.tracking import Mode, Tracker, default_mode

if TYPE_CHECKING:
    ProblemName = str
    OptimizerChoice = OptimizerConfig
else:
    ProblemName = Literal[tuple(PROBLEMS)]
    OptimizerChoice = tyro.extras.subcommand_type_from_defaults(
        {name: kind() for name, kind in OPTIMIZERS.items()},
        descriptions={name: kind.__doc__ for name, kind in OPTIMIZERS.items()},
        prefix_names=False,
    )


@dataclass(frozen=True)
class Config:
    """What to train, how, and where to write it."""

    problem: ProblemName = "mnist5k-cnn"
    """What is trained: data set and model."""
    optimizer: OptimizerChoice = field(default_factory=KfacSgdConfig)
    """How it is trained."""
    seed: int = 0
    """Fixes initial parameters, order of the data and the samples of the optimizer."""
    epochs: int | None = None
    """Passes over the training set; without it those of the problem."""
    batch_size: int | None = None
    """Samples per step; without it those of the problem."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to train: cpu, cuda, cuda:1, mps ..."""
    data_root: Path = data.DEFAULT_ROOT
    """Where data sets are looked for and cached."""
    download: bool = False
    """Download the data set if it is not there."""
    out: Path | None = None
    """Run directory, overwritten; without it runs/<problem>-<optimizer>-<seed>."""
    wandb: Mode | None = None
    """Whether to log to wandb; without it online if a key is configured, else offline."""

    def resolved(self) -> "Config":
        """The same run with everything that was left to the problem filled in."""
        problem = PROBLEMS[self.problem]
        return replace(
            self,
            optimizer=self.optimizer.resolved(problem.tuned.get(self.optimizer.name, {})),
            epochs=problem.epochs if self.epochs is None else self.epochs,
            batch_size=problem.batch_size if self.batch_size is None else self.batch_size,
            out=self.out or Path("runs") / f"{self.problem}-{self.optimizer.name}-{self.seed}",
        )

    def as_json(self) -> dict[str, Any]:
        """All settings, for ``config.json`` and wandb."""
        settings = {**asdict(self), "optimizer": {"name": self.optimizer.name, **asdict(self.optimizer)}}
        return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


class DivergedError(RuntimeError):
    """The training loss stopped being finite; says what to lower."""


class SettingsError(ValueError):
    """A run cannot start with these settings; says which."""


class _Log:
    """Sends every row to ``metrics.jsonl`` and to wandb."""

    def __init__(self, file: IO[str], tracker: Tracker) -> None:
        self._file, self._tracker = file, tracker

    def write(self, **row: Any) -> None:
        # JSON knows no nan and no infinity
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._tracker.log(row)

    def close(self) -> None:
        self._file.close()
        self._tracker.finish()


def train(config: Config) -> Path:
    """Trains as configured.

    Returns:
        The run directory.

    Raises:
        DivergedError: the training loss is not finite; everything up to there was written.
        SettingsError: a setting is out of its range.
    """
    config = config.resolved()
    assert config.out is not None
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "config.json").write_text(json.dumps(config.as_json(), indent=2) + "\n")
    tracker = Tracker(config.wandb or default_mode(), config.out, config.out.name, config.as_json())
    try:
        with closing(_Log(open(config.out / "metrics.jsonl", "w"), tracker)) as log:
            _train(config, log)
    finally:
        plot_curves(
            {config.optimizer.name: [config.out]}, f"{config.problem}, {config.optimizer}", config.out / "curves.png"
        )
    return config.out


def _train(config: Config, log: _Log) -> None:
    assert config.epochs is not None and config.batch_size is not None
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    problem = PROBLEMS[config.problem]
    splits = problem.prepare(data.load(problem.data, config.data_root, config.download))
    train_set, test_set = splits.train.to(device), splits.test.to(device)
    model, lossfunc = problem.model(tuple(train_set.x.shape[1:]), splits.classes).to(device), problem.loss()
    if config.epochs < 1:
        raise SettingsError(f"--epochs must be at least 1, got {config.epochs}")
    if not 0 < config.batch_size <= len(train_set.x):
        raise SettingsError(
            f"--batch-size must be in 1 ... {len(train_set.x)} ({problem.data}), got {config.batch_size}"
        )
    try:
        optimizer, curvature = config.optimizer.build(model, lossfunc)
    except ValueError as error:
        raise SettingsError(f"{config.optimizer}: {error}") from error
    order = torch.Generator().manual_seed(config.seed)

    step, seconds = 0, 0.0
    steps = config.epochs * train_set.steps_per_epoch(config.batch_size)
    with tqdm(total=steps, desc=f"{config.problem} {config.optimizer.name}", unit="step", mininterval=1) as bar:
        for epoch in range(config.epochs + 1):
            if epoch > 0:
                for x, y in train_set.epoch(config.batch_size, order):
                    start = time.perf_counter()
                    optimizer.zero_grad()
                    loss = lossfunc(model(data.augmented(x) if problem.augment else x), y)
                    value = loss.item()
                    if math.isfinite(value):
                        with curvature():
                            loss.backward()
                        optimizer.step()
                    if device.type != "cpu":
                        torch.accelerator.synchronize(device)  # so that the clock sees the step's own work
                    seconds += time.perf_counter() - start
                    step += 1
                    log.write(step=step, epoch=epoch, seconds=seconds, train_loss=value)
                    bar.update()
                    _require_finite(value, step, config)
            train_loss, _ = evaluate(model, lossfunc, train_set)
            test_loss, accuracy = evaluate(model, lossfunc, test_set)
            log.write(
                step=step,
                epoch=epoch,
                seconds=seconds,
                train_set_loss=train_loss,
                test_loss=test_loss,
                test_accuracy=accuracy,
            )
            _require_finite(train_loss, step, config)
            bar.set_postfix_str(
                f"training loss {train_loss:.3g}, held out {test_loss:.3g}, accuracy {accuracy:.1%}", refresh=False
            )


def _require_finite(loss: float, step: int, config: Config) -> None:
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss of {config.optimizer} is {loss} at step {step}; {config.optimizer.remedy}"
        )


@torch.no_grad()
def evaluate(model: nn.Module, lossfunc: nn.Module, split: data.Split, batch_size: int = 500) -> tuple[float, float]:
    """Mean loss and accuracy (nan where targets are no labels) over a split, in evaluation mode."""
    model.eval()
    loss = correct = 0.0
    for x, y in zip(split.x.split(batch_size), split.y.split(batch_size), strict=True):
        z = model(x)
        loss += lossfunc(z, y).item() * len(x)
        correct += float("nan") if y.is_floating_point() else (z.argmax(1) == y).sum().item()
    model.train()
    return loss / len(split.x), correct / split.y.numel()


def main() -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    config = tyro.cli(
        Config, prog="python -m experiments.train", description=__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )
    try:
        out = train(config)
    except (DivergedError, SettingsError, data.DataError) as error:
        sys.exit(f"stopped: {error}")
    print(f"curves: {out / 'curves.png'}")


if __name__ == "__main__":
    main()
