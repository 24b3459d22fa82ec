"""State dicts, pickles and copies of curvature optimizers, from which a run continues bit for bit."""

from typing import Any

from curvopt.core.backward.intercept import attach
from curvopt.optim.checkpoint import export_run, exporting, import_run, importing, new_progress, without_curvature
from curvopt.optim.collector import CurvatureCollector

#: Attributes that copies of an optimizer keep, next to its state and the options of the whole run.
_KEPT = ("_run_options", "_group_defaults", "_options", "_attached", "_loss_reduction", "_communication_dtype")


class Resumable(CurvatureCollector):
    """A collector whose state can be saved and loaded."""

    def _export(self) -> dict[str, Any]:
        run = export_run(type(self).__name__, self._progress, self._samples, self._metrics)
        return run if (sharding := self._sharding()) is None else run | {"kinds": sharding.kinds_by_index()}

    def _import(self, exported: dict[str, Any]) -> None:
        if (sharding := self._sharding()) is not None:
            sharding.take_kinds(type(self).__name__, exported.get("kinds", {}), self.state)
        progress, self._samples, self._metrics = import_run(exported)
        self._progress = new_progress() | progress  # of older versions, too
        self._ranks_agree = False

    def state_dict(self) -> dict[str, Any]:
        """State of the torch optimizer plus all that a run needs to continue bit for bit."""
        with exporting(self, self._params(), self._export):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()``, of a model in any precision; curvature is kept in at least single precision.

        Raises:
            CurvoptError: if it is the state of another optimizer, or of parameters of other shapes. Nothing has changed
                then.
        """
        with importing(self, self._names(), self._import):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in (*_KEPT, *self._run_options)},
            **({"process_group": None} if self.process_group is None else {}),
            "curvature": self._export(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        exported = state.pop("curvature", None)
        with without_curvature(state["state"].get(p, {}) for group in state["param_groups"] for p in group["params"]):
            super().__setstate__(state)
        if exported is not None:  # unpickled or copied; load_state_dict() imports by itself
            self._start_collecting()
            self._import(exported)
            if self._attached:
                attach(self)
