"""A wandb run beside ``metrics.jsonl`` that a training never fails by and never waits for."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]

_PATIENCE = 20.0  # seconds that a server may take to answer at the start, and to receive what is left at the end


def default_mode() -> Mode:
    """What ``WANDB_MODE`` says, else online if a key is configured, else offline."""
    asked = os.environ.get("WANDB_MODE")
    for mode in get_args(Mode):
        if asked == mode:
            return mode
    try:
        import wandb

        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except Exception as error:
        logger.warning("wandb found no usable key: %s", error)
        return "offline"


class Tracker:
    """Passes rows on to wandb; the first thing that goes wrong is logged and ends the tracking, not the run.

    Args:
        mode: where the run goes; online falls back to offline.
        directory: run directory; ``wandb-id`` in it names the wandb run.
        name: of the run, for people.
        config: all settings.
        resume: go on with the wandb run that the directory names.
    """

    def __init__(self, mode: Mode, directory: Path, name: str, config: Mapping[str, Any], resume: bool = False) -> None:
        self._run: Any = None
        self._id = directory / "wandb-id"
        if not resume:
            self._id.unlink(missing_ok=True)
        attempts: dict[Mode, tuple[Mode, ...]] = {
            "online": ("online", "offline"),
            "offline": ("offline",),
            "disabled": (),
        }
        for attempt in attempts[mode]:
            try:
                known = self._id.read_text() if self._id.exists() else None
                self._run = _start(attempt, directory, name, config, known)
                self._id.write_text(self._run.id)
                return
            except (Exception, SystemExit) as error:
                logger.warning("wandb could not start %s: %s", attempt, error)

    def log(self, row: Mapping[str, Any], index: int, histograms: Mapping[str, Tensor] | None = None) -> None:
        """Log a row of ``metrics.jsonl`` as the ``index``-th: one that a resumed run repeats is not counted twice."""

        def log(wandb: Any, run: Any) -> None:
            drawn = {name: wandb.Histogram(values.cpu().numpy()) for name, values in (histograms or {}).items()}
            run.log({**flattened(row), **drawn}, step=index)

        self._guarded(log)

    def finish(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[Path]) -> None:
        """Add a table of rows, pictures and files, and send what is left, for a bounded time."""

        def add(wandb: Any, run: Any) -> None:
            columns = [name for name in (rows[0] if rows else ()) if name != "layers"]
            table = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
            images = {picture.stem: wandb.Image(str(picture)) for picture in pictures}
            artifact = wandb.Artifact(f"results-{run.id}", type="results")
            for picture in pictures:
                artifact.add_file(str(picture))
            artifact.add(table, "evaluations")
            run.log({"evaluations": table, **images})
            run.log_artifact(artifact)

        run = self._run
        self._guarded(add)
        self._run = run  # what was logged before is sent in any case
        self._guarded(lambda wandb, run: run.finish())
        self._run = None

    def _guarded(self, action: Any) -> None:
        if self._run is None:
            return
        try:
            import wandb

            action(wandb, self._run)
        except (Exception, SystemExit) as error:
            logger.warning("wandb stopped: %s", error)
            self._run = None


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Per-layer entries as ``quantity/layer``, so that wandb groups its charts by quantity; no lists."""
    layers = row.get("layers") or {}
    nested = {f"{quantity}/{layer}": value for layer, of in layers.items() for quantity, value in of.items()}
    flat = {**{name: value for name, value in row.items() if name != "layers"}, **nested}
    return {name: value for name, value in flat.items() if not isinstance(value, list)}


def _start(mode: Mode, directory: Path, name: str, config: Mapping[str, Any], known: str | None) -> Any:
    if mode == "offline":
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # crash reports would go out even then
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        init_timeout=_PATIENCE,
        login_timeout=int(_PATIENCE),
        finish_timeout=_PATIENCE,
    )
    directory.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "curvopt"),  # a sweep names its own
        id=os.environ.get("WANDB_RUN_ID", known),
        resume="allow",
        name=name,
        dir=directory,
        config=dict(config),
        mode=mode,
        reinit="create_new",
        settings=settings,
    )
