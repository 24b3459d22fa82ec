"""Options of curvature optimizers: those of the whole run, those of param groups, and those of the extensions."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from curvopt.errors import CurvoptWarning
from curvopt.optim.checkpoint import RUN, new_progress
from curvopt.optim.options import (
    DAMPINGS,
    Attached,
    check_attached,
    check_group_options,
    check_options,
    parameters_of,
)
from curvopt.optim.reports import shown
from curvopt.optim.step_checks import check_new_group


class Configured(torch.optim.Optimizer):
    """A torch optimizer with options of its own, which ``defaults`` and ``print`` show.

    A subclass sets ``_options``, those of its extensions, and calls ``_configure`` before the constructor of torch.
    """

    #: Options of the whole run, where an optimizer has them.
    rms_clip: float | None = None
    on_nonfinite: str = "raise"
    curvature_every: int
    inverse_every: int

    _run_options: tuple[str, ...]
    _group_defaults: dict[str, Any]
    _options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        given = self._given
        check_attached(type(self).__name__, params, given)
        super().__init__(parameters_of(params, given.get("lossfunc")), *args, **options)
        own = {name: getattr(self, name) for name in self._run_options}
        self.defaults |= self._group_defaults | own | self._options
        if isinstance(params, nn.Module):
            self.attach(params, **given)

    def attach(self, model: nn.Module | None = None, /, **options: Any) -> None:
        """Take part in the backwards of a model."""
        raise NotImplementedError

    def _configure(self, attached: Attached | None = None, **options: Any) -> None:
        """Check and store the options; before the constructor of the torch optimizer, which adds the param groups.

        Args:
            attached: for `attach`, where the optimizer is built of a model.
            options: ``ema`` and the damping (if the optimizer has one) of param groups, all others of the whole run.
        """
        self._group_defaults = {name: options.pop(name) for name in ("ema", *DAMPINGS) if name in options}
        check_options(options)
        for name, value in options.items():
            setattr(self, name, value)
        self._run_options, self._given = tuple(options), attached or {}
        self._progress = new_progress()
        self._attached = False
        self._metrics: dict[str, float | Tensor] = {}
        self._start_collecting()

    def _start_collecting(self) -> None:
        """Begin with nothing collected and nothing said."""
        self._said: set[str] = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, before or during training; damping and ``ema`` may be set per group.

        Raises:
            TypeError: an option is no number, or is one of the whole optimizer.
            ValueError: an option is out of its range.
        """
        for name, value in (self._group_defaults | {RUN: None}).items():
            param_group.setdefault(name, value)
        check_group_options(param_group, (*self._run_options, *self._options))
        if 0 in [param_group.get(name) for name in DAMPINGS]:
            warnings.warn(
                f"{type(self).__name__} with damping=0: a step is as long as the curvature says, however little that "
                "knows of a direction. Take a small positive number unless the curvature is exact and full-batch.",
                CurvoptWarning,
                stacklevel=4,
            )
        super().add_param_group(param_group)
        for name in (*self._run_options, *self._options):  # torch copies all of `defaults`
            self.param_groups[-1].pop(name, None)
        check_new_group(self, getattr(self, "_sharding", None))

    def _say(self, what: str, text: str) -> None:
        """Warn, unless that was said before."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"{type(self).__name__} {text}", CurvoptWarning, stacklevel=3)

    def __repr__(self) -> str:
        """The options of the whole optimizer, then those of each param group."""
        own = {name: getattr(self, name) for name in self._run_options} | self._options
        return shown(type(self).__name__, own, self.param_groups)
