"""Train a network with an optimizer, log everything, draw the curves.

    python -m experiments.train                                   # KFACSGD on 5,000 MNIST images: half a minute
    python -m experiments.train --problem digits-mlp adamw --lr 0.01
    python -m experiments.train adamw --help                      # the options of AdamW
    torchrun --nproc-per-node 2 -m experiments.train --problem cifar10-3c3d --download sgd

The optimizer is a word of its own with options of its own; other options may stand before or behind it.

Everything goes to runs/<problem>-<optimizer>-<seed>: config.json, curves.png, layers.png, checkpoint.pt, a wandb run
and metrics.jsonl, which has a JSON object for every step, and one after every epoch with the loss over the whole
training set, loss and accuracy on held-out data, and curvature per layer. Seconds are those of training alone.
"""

import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from experiments.settings import DivergedError, SettingsError, show_help

if TYPE_CHECKING:
    from experiments.config import Config
    from experiments.run_directory import RunDirectory
    from experiments.training import Training


def train(config: "Config") -> Path:
    """Trains as configured.

    Returns:
        The run directory.

    Raises:
        DivergedError: the training loss is not finite; everything up to there was written.
        SettingsError: a setting is out of its range, or the run directory holds another run.
        DataError: the data set is absent or corrupt.
    """
    from experiments.run_directory import RunDirectory, require_free, saved_state  # only here: slow to import
    from experiments.training import Training

    config = config.resolved()
    assert config.out is not None
    require_free(config)
    state = saved_state(config)
    training = Training(config)
    if state is not None:
        training.load(state)
    if not training.accelerator.is_main_process:
        _run(training, None)
        return config.out
    facts = {
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "samples": {"train": len(training.train_set.x), "test": len(training.test_set.x)},
    }
    output = RunDirectory(config, facts, state)
    try:
        _run(training, output)
    except DivergedError as error:
        output.diverged = str(error)
        raise
    finally:
        output.close(training.done, training.done == training.steps)
    return config.out


def _run(training: "Training", output: "RunDirectory | None") -> None:
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
                _require_finite(row["train/batch_loss"], training)
                bar.update()
                if training.done % training.per_epoch == 0:
                    bar.set_postfix_str(_evaluate(training, output, epoch), refresh=False)
                if saving and (training.done % saving == 0 or training.done == training.steps):
                    state = training.state()
                    if output is not None:
                        output.save(state)


def _evaluate(training: "Training", output: "RunDirectory | None", epoch: int) -> str:
    row, every = training.evaluate(), training.config.layers_every
    if output is not None:
        finite = math.isfinite(row["train/loss"])
        layers = training.layers() if every and epoch % every == 0 and finite else {}
        curvature = {"curvature": layers} if layers else {}
        output.write({"step": training.done, "epoch": epoch, **row, **curvature})
    _require_finite(row["train/loss"], training)
    accuracy = "" if math.isnan(row["test/accuracy"]) else f", accuracy {row['test/accuracy']:.1%}"
    return f"training loss {row['train/loss']:.3g}, held out {row['test/loss']:.3g}{accuracy}"


def _require_finite(loss: float, training: "Training") -> None:
    if not math.isfinite(loss):
        optimizer = training.config.optimizer
        raise DivergedError(f"the training loss of {optimizer} is {loss} at step {training.done}; {optimizer.remedy}")


def main() -> None:
    """The command line."""
    show_help(sys.argv[1:], __doc__ or "")
    from torch import distributed

    from curvopt import CurvoptError
    from experiments import checkpoints
    from experiments.config import parse
    from experiments.data import DataError

    logging.basicConfig(format="%(levelname)s: %(message)s")
    config = parse(description=__doc__ or "")
    first = os.environ.get("RANK", "0") == "0"
    try:
        train(config)
    except (DivergedError, SettingsError, CurvoptError, DataError) as error:
        sys.exit(f"stopped: {error}" if first else 1)
    except OSError as error:
        logging.raiseExceptions = False  # wandb cannot write its log to that disk either, and would say so at length
        sys.exit(f"stopped: {config.resolved().out} cannot be written: {error}" if first else 1)
    except KeyboardInterrupt:
        out = config.resolved().out
        if out is not None and any((out / name).exists() for name in checkpoints.NAMES):
            sys.exit("interrupted; the same command with --resume goes on from the last checkpoint")
        sys.exit("interrupted before there was a checkpoint; --save-every N writes one every N steps")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
