"""Train a problem with an optimizer, which is a subcommand with settings of its own.

    python -m experiments.train --problem mnist5k-cnn --seed 1 kfac-sgd --lr 0.1 --damping 0.03
    torchrun --nproc-per-node 2 -m experiments.train --problem cifar10-3c3d --download sgd

The run directory gets config.json, metrics.jsonl (a JSON object per line: one for every step, and one after every
epoch with the loss over the whole training set, loss and accuracy on held-out data, and curvature per layer),
curves.png, layers.png, checkpoint.pt, and the files of a wandb run. Seconds are those of training alone.
"""

import contextlib
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

import curvopt
from curvopt import CurvoptError
from experiments import checkpoints
from experiments.curvature import layer_statistics
from experiments.data import DATASETS, DEFAULT_ROOT, Data, DataError, Split, augmented, load, load_npz
from experiments.optimizers import OPTIMIZERS, OptimizerConfig
from experiments.plots import evaluations, plot_curves, plot_layers, read_metrics
from experiments.problems import PROBLEMS, describe_problems
from experiments.tracking import Mode, Tracker, default_mode

logger = logging.getLogger(__name__)

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

_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LAYER_SAMPLES = 128  # that curvature per layer is taken of


@dataclass(frozen=True)
class Config:
    """What to train, how, and where to write it."""

    problem: ProblemName = "mnist5k-cnn"
    """What is trained: data set and model."""
    optimizer: OptimizerChoice = field(default_factory=OPTIMIZERS["kfac-sgd"])
    """How it is trained."""
    seed: int = 0
    """Fixes initial parameters, order of the data and the samples of the optimizer."""
    epochs: int | None = None
    """Passes over the training set; without it those of the problem."""
    batch_size: int | None = None
    """Samples per step, over all processes; without it those of the problem."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other; saves memory."""
    schedule: Literal["constant", "cosine", "linear", "steps"] = "constant"
    """Learning rate after warm-up: to zero by a cosine or linearly, or a tenth after 1/2 and again after 3/4."""
    warmup: int = 0
    """Steps in which the learning rate rises linearly at first."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision; fp16 with a scaled loss."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to train: cpu, cuda, cuda:1, mps ..."""
    data: DataName | None = None
    """Another data set than the problem's."""
    npz: Path | None = None
    """Arrays of one's own: a NumPy archive of x_train, y_train, x_test, y_test."""
    data_root: Path = DEFAULT_ROOT
    """Where data sets are looked for and cached."""
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
    out: Path | None = None
    """Run directory, overwritten; without it runs/<problem>-<optimizer>-<seed>."""
    wandb: Mode | None = None
    """Whether to log to wandb; without it online if a key is configured, else offline."""

    def resolved(self) -> "Config":
        """The same run with everything that was left to the problem filled in."""
        problem = PROBLEMS[self.problem]
        # runs of a wandb sweep differ in any setting
        name = "-".join(
            filter(None, [self.problem, self.optimizer.name, str(self.seed), os.environ.get("WANDB_RUN_ID")])
        )
        return replace(
            self,
            optimizer=self.optimizer.resolved(problem.tuned.get(self.optimizer.name, {})),
            epochs=problem.epochs if self.epochs is None else self.epochs,
            batch_size=problem.batch_size if self.batch_size is None else self.batch_size,
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
        return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}

    def differences(self) -> list[str]:
        """Settings in which the run in the run directory differs so that its curve does, too."""
        assert self.out is not None
        theirs, ours = json.loads((self.out / "config.json").read_text()), json.loads(json.dumps(self.as_json()))
        free = {"data_root", "download", "save_every", "resume", "out", "wandb"}
        return sorted(
            name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name) if name not in free
        )

    def finished(self) -> bool:
        """Whether the run directory holds all of this very run."""
        assert self.out is not None
        try:
            return (self.out / "finished.json").exists() and not self.differences()
        except (OSError, ValueError):
            return False


class DivergedError(RuntimeError):
    """The training loss stopped being finite; says what to lower."""


class SettingsError(ValueError):
    """A run cannot start with these settings; says which."""


def check_least(settings: Any, **least: int) -> None:
    """Raise `SettingsError` where a setting, unless it is ``None``, is less than it may be."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and value < bound:
            raise SettingsError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


@dataclass(frozen=True)
class Processes:
    """The processes of torchrun; one without it."""

    rank: int = int(os.environ.get("RANK", 0))
    count: int = int(os.environ.get("WORLD_SIZE", 1))

    def mean(self, *values: float) -> list[float]:
        """Means over the processes."""
        return torch.tensor(self.gather(values), dtype=torch.float64).mean(0).tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        gathered = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(gathered, value)
        return gathered


def problem_data(problem: str, name: str | None, npz: Path | None, root: Path, download: bool = False) -> Data:
    """What a problem is trained and tested on: its own data set, another one by name, or arrays from a file."""
    if npz is not None and name is not None:
        raise SettingsError("--data and --npz both say what to train on; give one")
    given = load_npz(npz) if npz is not None else load(name or PROBLEMS[problem].data, root, download)
    return PROBLEMS[problem].prepare(given)


class Training:
    """A model, an optimizer and all that belongs to a step."""

    def __init__(self, config: Config, processes: Processes) -> None:
        assert config.epochs is not None and config.batch_size is not None
        self.config, self.processes = config, processes
        try:
            self.device = torch.empty(0, device=config.device).device
        except (RuntimeError, AssertionError) as error:
            raise SettingsError(f"--device {config.device} cannot be used here: {error}") from error
        problem = PROBLEMS[config.problem]
        given = problem_data(config.problem, config.data, config.npz, config.data_root, config.download)
        self.train_set, self.test_set = given.train.to(self.device), given.test.to(self.device)
        self._check()
        torch.manual_seed(config.seed)
        self.model = problem.model(tuple(self.train_set.x.shape[1:]), given.classes).to(self.device)
        self.lossfunc = problem.loss()
        try:
            with torch.no_grad():
                self.model.eval()(self.train_set.x[:1])
            self.model.train()
        except RuntimeError as error:
            shapes = [list(DATASETS[problem.data].shape), list(self.train_set.x.shape[1:])]
            raise SettingsError(f"{config.problem} takes samples like {shapes[0]}, got {shapes[1]}: {error}") from error
        try:
            self.optimizer = config.optimizer.build(self.model, self.lossfunc)
        except ValueError as error:
            raise SettingsError(f"{config.optimizer}: {error}") from error
        self.per_epoch = len(self.train_set.x) // config.batch_size
        self.steps = config.epochs * self.per_epoch
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: self._lr_factor(step))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.network = self.model  # what is called
        if processes.count > 1:
            self.network = DistributedDataParallel(self.model)
            torch.manual_seed(config.seed + 1_000_003 * processes.rank)  # dropout, augmentation, sampling
        self.done, self.seconds = 0, 0.0  # steps, and their time

    def _check(self) -> None:
        config, samples, parts = self.config, len(self.train_set.x), self.processes.count * self.config.accumulate
        assert config.batch_size is not None
        check_least(config, epochs=1, accumulate=1, warmup=0, layers_every=0, save_every=0)
        if not 0 < config.batch_size <= samples:
            raise SettingsError(f"--batch-size must be in 1 ... {samples}, got {config.batch_size}")
        if config.batch_size % parts:
            raise SettingsError(
                f"--batch-size must be a multiple of {parts} (processes times --accumulate), got {config.batch_size}"
            )
        if config.augment and self.train_set.x.ndim != 4:
            raise SettingsError("--augment needs images")
        if config.amp == "fp16" and config.optimizer.needs_closure:
            raise SettingsError(
                f"{config.optimizer.name} evaluates the loss by itself, which --amp fp16 does not scale"
            )

    def _lr_factor(self, step: int) -> float:
        config = self.config
        if step < config.warmup:
            return (step + 1) / (config.warmup + 1)
        progress = min(1.0, (step - config.warmup) / max(1, self.steps - config.warmup))
        return {
            "constant": 1.0,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "linear": 1 - progress,
            "steps": 0.1 ** ((progress >= 0.5) + (progress >= 0.75)),
        }[config.schedule]

    def batches(self, epoch: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the shuffled batches of an epoch; samples that fill none wait for the next one."""
        assert self.config.batch_size is not None
        sampler = DistributedSampler(
            range(len(self.train_set.x)),  # pyright: ignore[reportArgumentType]: of which it wants the length
            num_replicas=self.processes.count,
            rank=self.processes.rank,
            seed=self.config.seed,
            drop_last=True,
        )
        sampler.set_epoch(epoch)
        share = self.config.batch_size // self.processes.count
        order = torch.tensor(list(sampler), device=self.device)[: share * self.per_epoch]
        for chosen in order.split(share)[skip:]:
            x = self.train_set.x[chosen]
            yield augmented(x) if self.config.augment else x, self.train_set.y[chosen]

    def step(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """One step; its row for the log. Nothing changes where the loss is not finite."""
        start = time.perf_counter()
        losses: list[float] = []

        def closure() -> float:
            losses.append(self._backward(x, y))
            if not math.isfinite(losses[0]):
                raise FloatingPointError  # there are no gradients to step with
            return losses[-1]

        with contextlib.suppress(FloatingPointError):
            if self.config.optimizer.needs_closure:
                self._update(closure)
            else:
                closure()
                self._update()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # so that the clock sees the step's own work
        took = time.perf_counter() - start
        self.seconds += took
        self.done += 1
        metrics = getattr(self.optimizer, "metrics", dict)()
        row = {
            "seconds": self.seconds,
            "step_seconds": took,
            "train_loss": losses[0],
            "lr": self.optimizer.param_groups[0]["lr"],
        }
        self.scheduler.step()
        return {**row, **{name: value if isinstance(value, str) else float(value) for name, value in metrics.items()}}

    def _update(self, *closure: Callable[[], float]) -> None:
        try:
            self.scaler.step(self.optimizer, *closure)
        except CurvoptError as error:
            if all(p.grad is None or p.grad.isfinite().all() for p in self.model.parameters()):
                raise
            optimizer = self.config.optimizer
            raise DivergedError(f"{optimizer} at step {self.done + 1}: {error} {optimizer.remedy}") from error
        self.scaler.update()

    def _backward(self, x: Tensor, y: Tensor) -> float:
        """Gradients, and curvature where the optimizer wants it; stops early at a loss that is not finite."""
        parts, total = self.config.accumulate, 0.0
        self.optimizer.zero_grad()
        for i, (part, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            waiting: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if i < parts - 1 and isinstance(self.network, DistributedDataParallel):
                waiting = self.network.no_sync()  # processes exchange the gradients of all parts together
            with waiting:
                with torch.autocast(self.device.type, _AMP.get(self.config.amp), enabled=self.config.amp != "off"):
                    loss = self.lossfunc(self.network(part), target) / parts
                [value] = self.processes.mean(loss.item())  # of all processes, so that all of them stop
                total += value
                if not math.isfinite(total):
                    break
                with self._curvature():
                    self.scaler.scale(loss).backward()
        return total

    def _curvature(self) -> contextlib.AbstractContextManager[Any]:
        collect: Callable | None = getattr(self.optimizer, "curvature", None)
        return contextlib.nullcontext() if collect is None else collect(loss_scale=self.scaler.get_scale())

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Loss over the training set, loss and accuracy on held-out data: the row of an epoch."""
        (train_loss, _), (test_loss, accuracy) = (
            evaluate(self.model, self.lossfunc, split, self.processes) for split in (self.train_set, self.test_set)
        )
        return {
            "seconds": self.seconds,
            "train_set_loss": train_loss,
            "test_loss": test_loss,
            "test_accuracy": accuracy,
        }

    def layers(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Curvature per layer of the first training samples, with histograms."""
        split = self.train_set
        chosen = torch.linspace(0, len(split.x) - 1, min(len(split.x), _LAYER_SAMPLES), device=self.device).long()
        return layer_statistics(self.model, self.lossfunc, split.x[chosen], split.y[chosen])

    def state(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit."""
        return {
            "step": self.done,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": self.processes.gather(_random_state(self.device)),
            "config": self.config.as_json(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        if len(state["random"]) != self.processes.count:
            raise SettingsError(
                f"the checkpoint is of {len(state['random'])} process(es), and this run has {self.processes.count}"
            )
        random = state["random"][self.processes.rank]
        self.done, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(random["cpu"])
        if "accelerator" in random:
            torch.get_device_module(self.device).set_rng_state(random["accelerator"], self.device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "mps"):
        states["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return states


@torch.no_grad()
def evaluate(
    model: nn.Module,
    lossfunc: nn.Module,
    split: Split,
    processes: Processes = Processes(0, 1),  # noqa: B008
    batch_size: int = 500,
) -> tuple[float, float]:
    """Mean loss and accuracy (nan where targets are no labels) over a split, in evaluation mode."""
    model.eval()
    loss = correct = 0.0
    x, y = (samples[processes.rank :: processes.count] for samples in (split.x, split.y))
    for part, target in zip(x.split(batch_size), y.split(batch_size), strict=True):
        z = model(part)
        loss += lossfunc(z, target).item() * len(part)
        correct += math.nan if y.is_floating_point() else (z.argmax(1) == target).sum().item()
    model.train()
    loss, correct = processes.mean(loss * processes.count, correct * processes.count)
    return loss / len(split.x), correct / split.y.numel()


class _Output:
    """What the first process writes: every row to ``metrics.jsonl`` and wandb, checkpoints, pictures."""

    def __init__(self, config: Config, state: dict[str, Any] | None) -> None:
        assert config.out is not None
        self.config, self.directory = config, config.out
        self.diverged: str | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--out: there cannot be a run directory ({error})") from error
        if state is None:
            for name in ("finished.json", *checkpoints.NAMES):  # of another run
                (self.directory / name).unlink(missing_ok=True)
        self._write_json("config.json", config.as_json())
        self._file = open(self.directory / "metrics.jsonl", "ab")
        self._file.truncate(0 if state is None else state["metrics_bytes"])  # what was written later comes again
        self._rows = len(read_metrics(self.directory))
        mode = config.wandb or default_mode()
        self._tracker = Tracker(mode, self.directory, self.directory.name, config.as_json(), config.resume)

    def write(self, row: dict[str, Any], histograms: dict[str, Tensor] | None = None) -> None:
        row = _json_numbers(row)
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self._tracker.log(row, self._rows, histograms)
        self._rows += 1

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint; a resumed run goes on behind the rows that are there now."""
        os.fsync(self._file.fileno())
        checkpoints.save({**state, "metrics_bytes": self._file.tell()}, self.directory)

    def close(self, training: Training) -> None:
        """Pictures, also of a run that was stopped, and the mark of one that need not be run again."""
        self._file.close()
        title, rows = f"{self.config.problem}, {self.config.optimizer}", read_metrics(self.directory)
        pictures = [self.directory / "curves.png"]
        plot_curves({self.config.optimizer.name: [self.directory]}, title, pictures[0])
        if any("layers" in row for row in rows):
            pictures.append(self.directory / "layers.png")
            plot_layers(rows, title, pictures[1])
        self._tracker.finish(evaluations(rows), pictures)
        if self.diverged or training.done == training.steps:
            self._write_json("finished.json", {"step": training.done, "diverged": self.diverged})

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        checkpoints.replace_file(self.directory / name, lambda stream: stream.write(text.encode()))


def _json_numbers(value: Any) -> Any:
    """The same with ``None`` for nan and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _json_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_json_numbers(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def train(config: Config) -> Path:
    """Trains as configured.

    Returns:
        The run directory.

    Raises:
        DivergedError: the training loss is not finite; everything up to there was written.
        SettingsError: a setting is out of its range.
        DataError: the data set is absent or corrupt.
    """
    config, processes = config.resolved(), Processes()
    assert config.out is not None
    state = _saved(config)
    training = Training(config, processes)
    if state is not None:
        training.load(state)
    if processes.rank > 0:
        _run(training, None)
        return config.out
    output = _Output(config, state)
    try:
        _run(training, output)
    except DivergedError as error:
        output.diverged = str(error)
        raise
    finally:
        output.close(training)
    return config.out


def _saved(config: Config) -> dict[str, Any] | None:
    """The checkpoint to go on from, if there is one."""
    assert config.out is not None
    if not config.resume or not config.out.is_dir():
        return None
    try:
        state = checkpoints.load(config.out)
    except ValueError as error:
        raise SettingsError(f"--resume: {error}; without --resume the run starts again") from error
    if state is not None and (others := set(config.differences()) - {"versions"}):
        raise SettingsError(
            f"--resume: {config.out} was trained with another {', '.join(sorted(others))}; see its config.json"
        )
    return state


def _run(training: Training, output: _Output | None) -> None:
    config = training.config
    assert config.epochs is not None
    name = f"{config.problem} {config.optimizer.name}"
    saving = training.steps if config.save_every is None else config.save_every
    with tqdm(
        total=training.steps, initial=training.done, desc=name, unit="step", mininterval=1, disable=output is None
    ) as bar:
        if training.done == 0:
            bar.set_postfix_str(_evaluate(training, output, 0), refresh=False)
        for epoch in range(training.done // training.per_epoch + 1, config.epochs + 1):
            for x, y in training.batches(epoch, skip=training.done % training.per_epoch):
                row = training.step(x, y)
                if output is not None:
                    output.write({"step": training.done, "epoch": epoch, **row})
                _require_finite(row["train_loss"], training)
                bar.update()
                if training.done % training.per_epoch == 0:
                    bar.set_postfix_str(_evaluate(training, output, epoch), refresh=False)
                if saving and (training.done % saving == 0 or training.done == training.steps):
                    state = training.state()
                    if output is not None:
                        output.save(state)


def _evaluate(training: Training, output: _Output | None, epoch: int) -> str:
    row, every = training.evaluate(), training.config.layers_every
    if output is not None:
        finite = math.isfinite(row["train_set_loss"])
        layers, histograms = training.layers() if every and epoch % every == 0 and finite else ({}, {})
        layers = {"layers": layers} if layers else {}
        output.write({"step": training.done, "epoch": epoch, **row, **layers}, histograms)
    _require_finite(row["train_set_loss"], training)
    accuracy = "" if math.isnan(row["test_accuracy"]) else f", accuracy {row['test_accuracy']:.1%}"
    return f"training loss {row['train_set_loss']:.3g}, held out {row['test_loss']:.3g}{accuracy}"


def _require_finite(loss: float, training: Training) -> None:
    if not math.isfinite(loss):
        optimizer = training.config.optimizer
        raise DivergedError(f"the training loss of {optimizer} is {loss} at step {training.done}; {optimizer.remedy}")


def parse(arguments: Sequence[str] | None = None) -> Config:
    """The settings that a command line asks for, by default that of this process."""
    given = sys.argv[1:] if arguments is None else arguments
    # to count the parameters of every model takes seconds, for torchvision has to be imported
    problems = describe_problems() if {"-h", "--help"}.intersection(given) else ""
    return tyro.cli(
        Config,
        args=arguments,
        prog="python -m experiments.train",
        description=f"{__doc__}\n{problems}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagCreatePairsOff),
    )


def main() -> None:
    """The command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    config = parse()
    processes = Processes()
    if processes.count > 1:
        accelerated = config.device.startswith("cuda")
        if accelerated:
            config = replace(config, device=f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(config.device)
        dist.init_process_group("nccl" if accelerated else "gloo")
    try:
        out = train(config)
    except (DivergedError, SettingsError, CurvoptError, DataError) as error:
        sys.exit(f"stopped: {error}" if processes.rank == 0 else 1)
    except KeyboardInterrupt:
        sys.exit("interrupted; with --save-every, the same command with --resume goes on from the last checkpoint")
    finally:
        if processes.count > 1:
            dist.destroy_process_group()
    if processes.rank == 0:
        print(f"curves: {out / 'curves.png'}")


if __name__ == "__main__":
    main()
