"""A wandb run beside ``metrics.jsonl``; a training never fails by it and never waits for it.

wandb is called directly: the tracker of accelerate hands the arguments of ``wandb.init`` and the rows on as they are,
so all that is here would stay (offline where no server answers, one run for a training that is resumed, the charts, the
artifacts). ``wandb.watch`` draws a histogram for each parameter; the heat map shows all layers at once.
"""

import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from experiments.curvature import network_statistics
from experiments.settings import Mode

logger = logging.getLogger(__name__)

_PATIENCE = 20.0  # seconds that a server may take to answer at the start, and to receive the rest at the end
#: The charts of a run's page, which fit one screen. Other numbers are there for charts that a user adds.
_CHARTS = (
    *("train/batch_loss", "train/loss", "test/loss", "test/accuracy", "optim/lr", "optim/gradient_norm"),
    *("curvature/trace", "curvature/gradient_snr", "curvature/largest_eigenvalue"),
)
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
        rows: the rows of ``metrics.jsonl`` that are there already.

    Attributes:
        where: a line that says where the run is and how to upload it; empty without one.
    """

    def __init__(
        self,
        mode: Mode,
        directory: Path,
        config: Mapping[str, Any],
        resume: bool = False,
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.where = ""
        self._run: Any = None
        self._layers = [row for row in rows if "curvature" in row]
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

    def log(self, row: Mapping[str, Any], index: int) -> None:
        """Log a row of ``metrics.jsonl`` as the ``index``-th: one that a resumed run repeats is not counted twice.

        Statistics of layers become three numbers of the network, and a picture of all layers over the epochs so far.
        """

        def log(wandb: Any, run: Any) -> None:
            content = {name: value for name, value in row.items() if name != "curvature"}
            layers = row.get("curvature")
            if layers:
                self._layers.append(row)
                content |= network_statistics(layers)
                content["curvature/layers"] = wandb.Image(_heat_map(self._layers))
            run.log(content, step=index)

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


def _heat_map(rows: Sequence[Mapping[str, Any]]) -> Any:
    from PIL import Image

    from experiments.plots import plot_layers  # only here: slow to import

    drawn = io.BytesIO()
    plot_layers(rows, "", drawn)
    return Image.open(drawn)


def _start(mode: Mode, directory: Path, config: Mapping[str, Any], known: str | None) -> Any:
    if mode == "offline":
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # crash reports would go out even then
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        save_code=False,
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
    run.define_metric("*", step_metric="step", hidden=True)
    for name in _CHARTS:
        run.define_metric(name, step_metric="step", summary=_BEST.get(name))
    return run
