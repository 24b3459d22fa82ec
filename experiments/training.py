"""A model, an optimizer and all that belongs to a step; accelerate knows the device, the precision, the processes."""

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)
from torch.utils.data import DistributedSampler

from curvopt import CurvoptError
from experiments.config import Config
from experiments.curvature import layer_statistics
from experiments.data import DATASETS, Split, augmented
from experiments.optimizers import attach
from experiments.problems import PROBLEMS
from experiments.settings import DivergedError, SettingsError

_PRECISION = {"off": "no", "bf16": "bf16", "fp16": "fp16"}
_LAYER_SAMPLES = 128  # that curvature per layer is taken of


def accelerator_for(config: Config) -> Accelerator:
    """The device, the precision and the processes of a run; torchrun or ``accelerate launch`` start several."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of a run before in this process
    if "LOCAL_RANK" not in os.environ and config.device != "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(torch.empty(0, device=config.device).device)
    try:
        return Accelerator(
            cpu=config.device == "cpu",
            mixed_precision=_PRECISION[config.amp],
            gradient_accumulation_steps=config.accumulate,
        )
    finally:
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)


class Training:
    """A model, an optimizer and all that belongs to a step."""

    def __init__(self, config: Config) -> None:
        given = config.load_data()
        config.check(len(given.train.x), int(os.environ.get("WORLD_SIZE", 1)))
        assert config.epochs is not None and config.batch_size is not None
        self.config, self.accelerator = config, accelerator_for(config)
        self.device = self.accelerator.device
        self.train_set, self.test_set = given.train.to(self.device), given.test.to(self.device)
        if config.augment and self.train_set.x.ndim != 4:
            raise SettingsError("--augment needs images")
        set_seed(config.seed)
        problem = PROBLEMS[config.problem]
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
            optimizer = config.optimizer.build(self.model)
        except ValueError as error:
            raise SettingsError(f"{config.optimizer}: {error}") from error
        self._optimizer = optimizer
        self.per_epoch = len(self.train_set.x) // config.batch_size
        self.steps = config.epochs * self.per_epoch
        self.scheduler = self._scheduler()  # before accelerate notes the optimizer's step, which schedulers wrap
        self.network = self.accelerator.prepare_model(self.model)  # called in a step: in parallel, in mixed precision
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        attach(optimizer, self.model, self.lossfunc, self.accelerator.scaler)
        set_seed(config.seed + 1_000_003 * self.accelerator.process_index)  # dropout, augmentation, sampling
        self.done, self.seconds = 0, 0.0  # steps, and their time

    def _scheduler(self) -> LRScheduler:
        optimizer, warmup = self._optimizer, self.config.warmup
        steps = max(1, self.steps - warmup)
        schedule: LRScheduler = {
            "constant": lambda: ConstantLR(optimizer, factor=1),
            "cosine": lambda: CosineAnnealingLR(optimizer, steps),
            "linear": lambda: LinearLR(optimizer, 1, 0, steps),
            "steps": lambda: MultiStepLR(optimizer, [math.ceil(steps / 2), math.ceil(3 * steps / 4)]),
        }[self.config.schedule]()
        if not warmup:
            return schedule
        rise = LinearLR(optimizer, 1 / (warmup + 1), 1, warmup)
        return SequentialLR(optimizer, [rise, schedule], [warmup])

    def batches(self, epoch: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the shuffled batches of an epoch; samples that fill none wait for the next one."""
        assert self.config.batch_size is not None
        processes = self.accelerator.num_processes
        sampler = DistributedSampler(
            range(len(self.train_set.x)),  # pyright: ignore[reportArgumentType]: it wants the length
            num_replicas=processes,
            rank=self.accelerator.process_index,
            seed=self.config.seed,
            drop_last=True,
        )
        sampler.set_epoch(epoch)
        share = self.config.batch_size // processes
        order = torch.tensor(list(sampler), device=self.device)[: share * self.per_epoch]
        for chosen in order.split(share)[skip:]:
            x = self.train_set.x[chosen]
            yield augmented(x) if self.config.augment else x, self.train_set.y[chosen]

    def step(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """One step; its row for the log. Nothing changes where the loss is not finite."""
        start = time.perf_counter()
        losses: list[float] = []
        norms: list[float] = []

        def closure() -> float:
            losses.append(self._backward(x, y))
            if not math.isfinite(losses[0]):
                raise FloatingPointError  # there are no gradients to step with
            if not norms:
                norms.append(self._gradient_norm())
            return losses[-1]

        lr = self.optimizer.param_groups[0]["lr"]
        with contextlib.suppress(FloatingPointError):
            if self.config.optimizer.needs_closure:
                self._update(closure)
            else:
                closure()
                self._update()
            self.scheduler.step()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # so that the clock sees the step's own work
        took = time.perf_counter() - start
        self.seconds += took
        self.done += 1
        metrics = getattr(self._optimizer, "metrics", dict)()
        return {
            "time/training": self.seconds,
            "time/step": took,
            "train/batch_loss": losses[0],
            "optim/lr": lr,
            "optim/gradient_norm": norms[0] if norms else math.nan,
            **{f"optim/{name}": value if isinstance(value, str) else float(value) for name, value in metrics.items()},
        }

    def _gradient_norm(self) -> float:
        """Norm of the gradient over all parameters, as it is before an optimizer changes it."""
        scaler = self.accelerator.scaler
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) / (scaler.get_scale() if scaler else 1)

    def _update(self, *closure: Callable[[], float]) -> None:
        try:
            self.optimizer.step(*closure)
        except CurvoptError as error:
            if all(p.grad is None or p.grad.isfinite().all() for p in self.model.parameters()):
                raise
            optimizer = self.config.optimizer
            raise DivergedError(f"{optimizer} at step {self.done + 1}: {error} {optimizer.remedy}") from error

    def _backward(self, x: Tensor, y: Tensor) -> float:
        """Gradients of the loss, a part of the batch after the other; stops early at a loss that is not finite."""
        parts, total = self.config.accumulate, 0.0
        self.optimizer.zero_grad()
        for i, (part, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            last = i == parts - 1  # processes exchange the gradients of all parts together
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.network):
                loss = self.lossfunc(self.network(part), target)
                # of all processes, so that all of them stop
                total += self.accelerator.reduce(loss.detach(), "mean").item() / parts  # pyright: ignore
                if not math.isfinite(total):
                    break
                self.accelerator.backward(loss)
        return total

    def evaluate(self) -> dict[str, Any]:
        """Loss over the training set, loss and accuracy on held-out data: the row of an epoch."""
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        halves = [Split(half.x[rank::count], half.y[rank::count]) for half in (self.train_set, self.test_set)]
        (train_loss, _), (test_loss, accuracy) = (evaluate(self.model, self.lossfunc, half) for half in halves)
        return {
            "time/training": self.seconds,
            "train/loss": train_loss,
            "test/loss": test_loss,
            "test/accuracy": accuracy,
        }

    def layers(self) -> dict[str, Any]:
        """Curvature per layer of some training samples."""
        split = self.train_set
        chosen = torch.linspace(0, len(split.x) - 1, min(len(split.x), _LAYER_SAMPLES), device=self.device).long()
        return layer_statistics(self.model, self.lossfunc, split.x[chosen], split.y[chosen])[0]

    def state(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit; the schedule follows from the number of steps."""
        scaler = self.accelerator.scaler
        return {
            "step": self.done,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": gather_object([_random_state(self.device)]),
            "config": self.config.as_json(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        processes = self.accelerator.num_processes
        if len(state["random"]) != processes:
            raise SettingsError(
                f"the checkpoint is of {len(state['random'])} process(es), and this run has {processes}"
            )
        random = state["random"][self.accelerator.process_index]
        self.done, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.scheduler = self._scheduler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer took these steps before
            for _ in range(self.done):
                self.scheduler.step()
        torch.set_rng_state(random["cpu"])
        if "accelerator" in random:
            torch.get_device_module(self.device).set_rng_state(random["accelerator"], self.device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "mps"):
        states["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return states


@torch.no_grad()
def evaluate(model: nn.Module, lossfunc: nn.Module, split: Split, batch_size: int = 500) -> tuple[float, float]:
    """Mean loss and accuracy (nan where targets are no labels) over the samples of all processes, in evaluation mode.

    Args:
        model: the network; is in training mode afterwards.
        lossfunc: a loss that is a mean over samples.
        split: this process's share of the samples.
        batch_size: samples at once.
    """
    labels = not split.y.is_floating_point()
    sums = torch.zeros(3, device=split.x.device)  # over samples: losses, shares of right answers, ones
    model.eval()
    for part, target in zip(split.x.split(batch_size), split.y.split(batch_size), strict=True):
        z = model(part)
        # the mean, as a text has many labels
        right = (z.argmax(1) == target).float().mean() if labels else sums.new_tensor(math.nan)
        sums += len(part) * torch.stack([lossfunc(z, target), right, torch.ones_like(right)])
    model.train()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    loss, right, samples = sums.tolist()
    return loss / samples, right / samples
