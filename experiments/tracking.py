"""A wandb run beside ``metrics.jsonl``; a training never fails by it and never waits for it."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]

_PATIENCE = 20.0  # seconds that a server may take to answer at the start, and to receive the rest at the end
_BEST = {"train/loss": "min,last", "test/loss": "min,last", "test/accuracy": "max,last"}  # shown in the table of runs


def default_mode() -> Mode:
    """``WANDB_MODE`` if it is set, else online if a key is configured, else offline."""
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
        config: all settings; those of the problem and the optimizer name the run's group and tags.
        resume: go on with the wandb run that the directory names.

    Attributes:
        where: a line that says where the run is and how to upload it; empty without one.
    """

    def __init__(self, mode: Mode, directory: Path, config: Mapping[str, Any], resume: bool = False) -> None:
        self.where = ""
        self._run: Any = None
        file = directory / "wandb-id"
        if not resume:
            file.unlink(missing_ok=True)
        attempts: dict[Mode, tuple[Mode, ...]] = {
            "online": ("online", "offline"),
            "offline": ("offline",),
            "disabled": (),
        }
        for attempt in attempts[mode]:
            try:
                known = file.read_text() if file.exists() else None
                self._run = _start(attempt, directory, config, known)
                file.write_text(self._run.id)
                if attempt == "online":
                    self.where = f"wandb: {self._run.url}"
                else:  # a resumed run has a folder for each time it was started
                    folders = sorted(directory.glob(f"wandb/offline-run-*-{self._run.id}*"))
                    self.where = f"wandb: offline; to upload the run: wandb sync {' '.join(map(str, folders))}"
                return
            except (Exception, SystemExit) as error:
                logger.warning("wandb could not start %s: %s", attempt, error)

    def log(self, row: Mapping[str, Any], index: int, histograms: Mapping[str, Tensor] | None = None) -> None:
        """Log a row of ``metrics.jsonl`` as the ``index``-th: one that a resumed run repeats is not counted twice."""

        def log(wandb: Any, run: Any) -> None:
            drawn = {name: wandb.Histogram(values.cpu().numpy()) for name, values in (histograms or {}).items()}
            run.log({**flattened(row), **drawn}, step=index)

        self._guarded(log)

    def finish(self, rows: Sequence[Mapping[str, Any]], pictures: Sequence[Path], files: Sequence[Path]) -> None:
        """Add a table of evaluations, pictures, an artifact of the results and one of the checkpoint, and send it all.

        Args:
            rows: the evaluations.
            pictures: PNG files.
            files: other files of the run; ``checkpoint.pt`` becomes an artifact of its own.
        """

        def add(wandb: Any, run: Any) -> None:
            columns = [name for name in (rows[0] if rows else ()) if name != "curvature"]
            table = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
            results = wandb.Artifact(f"results-{run.id}", type="results")
            results.add(table, "evaluations")
            model = wandb.Artifact(f"checkpoint-{run.id}", type="model")
            for file in (*pictures, *files):
                (model if file.suffix == ".pt" else results).add_file(str(file))
            run.log({"results/evaluations": table, **{f"results/{p.stem}": wandb.Image(str(p)) for p in pictures}})
            for artifact in (results, model):
                if artifact.manifest.entries:
                    run.log_artifact(artifact)

        run = self._run
        self._guarded(add)
        self._run = run  # the rows logged before are sent in any case
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
    """Curvature as ``curvature/<quantity>/<layer>``, so that wandb draws the layers side by side; no lists."""
    layers = row.get("curvature") or {}
    nested = {f"curvature/{quantity}/{layer}": value for layer, of in layers.items() for quantity, value in of.items()}
    flat = {**{name: value for name, value in row.items() if name != "curvature"}, **nested}
    return {name: value for name, value in flat.items() if not isinstance(value, list)}


def _start(mode: Mode, directory: Path, config: Mapping[str, Any], known: str | None) -> Any:
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
    problem, optimizer = config["problem"], config["optimizer"]["name"]
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "curvopt"),  # a sweep names its own
        id=os.environ.get("WANDB_RUN_ID", known),
        resume="allow",
        name=directory.name,
        group=f"{problem}-{optimizer}",  # seeds together
        job_type="train",
        tags=[problem, optimizer],
        dir=directory,
        config=dict(config),
        mode=mode,
        reinit="create_new",
        settings=settings,
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for name, summary in _BEST.items():
        run.define_metric(name, step_metric="step", summary=summary)
    return run
