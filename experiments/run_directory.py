"""The files of a run: settings, a row for every step, checkpoints, pictures, and a wandb run beside them."""

import json
import math
import os
from typing import Any

from experiments import checkpoints
from experiments.config import Config
from experiments.metrics import evaluations, read_metrics
from experiments.problems import PROBLEMS
from experiments.settings import SettingsError
from experiments.tracking import Tracker, default_mode


def is_finished(config: Config) -> bool:
    """Whether the run directory holds all of this very run."""
    assert config.out is not None
    try:
        of_run = json.loads((config.out / "config.json").read_text())
        return (config.out / "finished.json").exists() and not config.differences(of_run)
    except (OSError, ValueError):
        return False


def require_free(config: Config) -> None:
    """Raise `SettingsError` if the run would destroy another one."""
    assert config.out is not None
    finished = (config.out / "finished.json").exists()
    resumable = any((config.out / name).exists() for name in checkpoints.NAMES)
    if config.overwrite or not (finished or resumable) or (resumable and config.resume):
        return
    ways = ["--resume goes on with it (to more --epochs)"] * resumable + ["--overwrite trains anew"]
    raise SettingsError(
        f"{config.out} holds a run that {'is finished' if finished else 'can be resumed'}; {', '.join(ways)}, --out "
        "names another directory"
    )


def saved_state(config: Config) -> dict[str, Any] | None:
    """The checkpoint to go on from with ``--resume``; ``None`` if there is none.

    Raises:
        SettingsError: it is of another run, or it or the rows before it cannot be read. Every file stays.
    """
    assert config.out is not None and config.epochs is not None
    if not config.resume or not config.out.is_dir():
        return None
    try:
        state = checkpoints.load(config.out)
    except ValueError as error:
        raise SettingsError(f"--resume: {error}; --overwrite starts again") from error
    if state is None:
        return None
    others = config.differences(state["config"]) - {"versions", "epochs"}
    if others:
        raise SettingsError(
            f"--resume: {config.out} was trained with another {', '.join(sorted(others))}; see its config.json"
        )
    if config.epochs < state["config"]["epochs"]:
        raise SettingsError(f"--resume: --epochs may be raised from {state['config']['epochs']}, got {config.epochs}")
    try:
        read_metrics(config.out, state["metrics_bytes"])
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--resume: {config.out} has a checkpoint of step {state['step']}, but not the rows before it: {error}; "
            "put metrics.jsonl back, or --overwrite starts again"
        ) from error
    return state


class RunDirectory:
    """Written by the first process: ``config.json``, ``metrics.jsonl``, checkpoints, pictures, and the wandb run.

    Args:
        config: the settings, resolved.
        facts: further entries of ``config.json``: the number of parameters, for example.
        state: the checkpoint that the run goes on from, if any.

    Attributes:
        diverged: why the run stopped early, if it did.
    """

    def __init__(self, config: Config, facts: dict[str, Any], state: dict[str, Any] | None) -> None:
        assert config.out is not None
        self.config, self.path = config, config.out
        self.diverged: str | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--out: there cannot be a run directory ({error})") from error
        for name in ("finished.json", *(checkpoints.NAMES if state is None else ())):  # of a run before
            (self.path / name).unlink(missing_ok=True)
        settings = {**config.as_json(), **facts}
        self._write_json("config.json", settings)
        self._file = open(self.path / "metrics.jsonl", "ab")
        self._file.truncate(0 if state is None else state["metrics_bytes"])  # rows behind the checkpoint come again
        rows = read_metrics(self.path)
        self._rows = len(rows)
        self.tracker = Tracker(config.wandb or default_mode(), self.path, settings, config.resume, rows)

    def write(self, row: dict[str, Any]) -> None:
        """A row of ``metrics.jsonl`` and of wandb."""
        row = _json_numbers(row)
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self.tracker.log(row, self._rows)
        self._rows += 1

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint; a resumed run goes on behind the rows that are there now."""
        os.fsync(self._file.fileno())
        checkpoints.save({**state, "metrics_bytes": self._file.tell()}, self.path)

    def close(self, step: int, all_steps: bool) -> None:
        """Pictures, also of a run that was stopped, and the mark of one that need not be run again."""
        self._file.close()
        from experiments.plots import plot_curves, plot_layers  # only here: slow to import

        title, rows = f"{PROBLEMS[self.config.problem].title}: {self.config.optimizer}", read_metrics(self.path)
        pictures = [self.path / "curves.png"]
        plot_curves({self.config.optimizer.name: [self.path]}, title, pictures[0])
        if any("curvature" in row for row in rows):
            pictures.append(self.path / "layers.png")
            plot_layers(rows, title, pictures[1])
        files = [self.path / name for name in ("config.json", "metrics.jsonl", checkpoints.NAMES[0])]
        self.tracker.finish(evaluations(rows), pictures, [file for file in files if file.exists()])
        if self.diverged or all_steps:
            self._write_json("finished.json", {"step": step, "diverged": self.diverged})
        print(f"curves: {pictures[0]}")
        if self.tracker.where:
            print(self.tracker.where)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        checkpoints.replace_file(self.path / name, lambda stream: stream.write(text.encode()))


def _json_numbers(value: Any) -> Any:
    """``value`` with ``None`` in place of nan and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _json_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_json_numbers(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
