"""A wandb run beside ``metrics.jsonl`` that a training never fails by and never waits for."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

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
    """Passes rows on to wandb; the first thing that goes wrong is logged and ends the tracking, not the run."""

    def __init__(self, mode: Mode, directory: Path, name: str, config: Mapping[str, Any]) -> None:
        self._run: Any = None
        attempts: dict[Mode, tuple[Mode, ...]] = {
            "online": ("online", "offline"),
            "offline": ("offline",),
            "disabled": (),
        }
        for attempt in attempts[mode]:
            try:
                self._run = _start(attempt, directory, name, config)
                return
            except Exception as error:
                logger.warning("wandb could not start %s: %s", attempt, error)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log one row of ``metrics.jsonl``."""
        self._guarded("log", dict(row))

    def finish(self) -> None:
        """Send what is left, for a bounded time."""
        self._guarded("finish")
        self._run = None

    def _guarded(self, method: str, *args: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*args)
        except Exception as error:
            logger.warning("wandb stopped: %s", error)
            self._run = None


def _start(mode: Mode, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
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
        project="curvopt",
        name=name,
        dir=directory,
        config=dict(config),
        mode=mode,
        reinit="create_new",
        settings=settings,
    )
