"""BackPACK's contexts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar

from torch import nn

import curvopt
from curvopt.core.backward.backward_pass import Backward, BackwardPass, Request
from curvopt.core.backward.checks import MixedSamples
from curvopt.extensions import GGNMP, HMP, Extension


class NotSupported(curvopt.CurvoptError, NotImplementedError):
    """An error of curvopt, of the class that BackPACK raises."""


class backpack(curvopt.backpack):  # noqa: N801 - the name of BackPACK
    """As `curvopt.backpack`, but with errors of BackPACK's classes, and seen by `CTX`."""

    active: ClassVar[list[backpack]] = []

    def __init__(self, *extensions: Extension, **options: Any):
        """Check the extensions."""
        try:
            super().__init__(*extensions, **options)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def _attempt(self, how: Backward, request: Request) -> BackwardPass | None:
        """Where train-mode batch norm mixes the samples, products are those with the matrix of the whole batch."""
        try:
            return super()._attempt(how, request)
        except MixedSamples:
            if not all(isinstance(extension, (GGNMP, HMP)) for extension in request.extensions):
                raise
            return super()._attempt(how, replace(request, as_one_sample=True))

    def __enter__(self) -> backpack:
        """Activate the extensions."""
        super().__enter__()
        self.active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deactivate them; an error of curvopt leaves the context as a ``NotImplementedError``, too."""
        self.active.remove(self)
        super().__exit__(kind, error, trace)
        if isinstance(error, curvopt.CurvoptError) and not isinstance(error, NotSupported):
            raise NotSupported(str(error)).with_traceback(trace) from None


class CTX:
    """What the innermost open context was given."""

    @staticmethod
    def get_active_exts() -> tuple[Extension, ...]:
        """Its extensions."""
        return tuple(backpack.active[-1].extensions) if backpack.active else ()

    @staticmethod
    def is_extension_active(*extension_classes: type) -> bool:
        """Whether one of them is of a class."""
        return any(isinstance(extension, extension_classes) for extension in CTX.get_active_exts())

    @staticmethod
    def get_extension_hook() -> Callable[[nn.Module], None]:
        """Its hook, or one that does nothing."""
        hook = backpack.active[-1].extension_hook if backpack.active else None
        return hook or (lambda module: None)

    @staticmethod
    def get_debug() -> bool:
        """Whether it prints."""
        return bool(backpack.active) and backpack.active[-1].debug

    @staticmethod
    def remove_hooks() -> None:
        """Do nothing: modules stay extended, which costs nothing outside of contexts."""


class disable(AbstractContextManager[None]):  # noqa: N801 - the name of BackPACK
    """As `curvopt.disable`."""

    store_io: ClassVar[bool] = True

    def __enter__(self) -> None:
        """Record no forward passes."""
        self._before, disable.store_io = disable.store_io, False
        self._context = curvopt.disable()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Record them again."""
        disable.store_io = self._before
        self._context.__exit__(*error)

    @staticmethod
    def should_store_io() -> bool:
        """Whether forward passes are recorded, as far as these contexts are concerned."""
        return disable.store_io


class weight_jac_t_save_memory(AbstractContextManager[None]):  # noqa: N801 - the name of BackPACK
    """A context that does nothing: how convolutions are differentiated is chosen by cost here."""

    def __init__(self, save_memory: bool = True):
        """Take the option."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def memory_cleanup(module: nn.Module) -> None:
    """Do nothing: no inputs and outputs are kept on modules."""


def convert_module_to_backpack(module: nn.Module, debug: bool = False) -> nn.Module:
    """The module itself: functional code and reused modules are extended as they are."""
    return module
