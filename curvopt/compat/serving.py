"""A finder of modules that answers ``import backpack`` and ``import backpack.anything`` with the tables of `names`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from curvopt.compat.names import SERVED
from curvopt.compat.unserved import instead_of, placeholder

PACKAGE = "backpack"


class Finder(MetaPathFinder, Loader):
    """Finds the modules of the package, and fills them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the package and all modules that it has."""
        package, _, name = fullname.partition(".")
        if package != PACKAGE or not (name in SERVED or instead_of(name)):
            return None
        return spec_from_loader(fullname, self, origin="curvopt", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Set the names of a module; one that cannot be served has placeholders for all that it is asked for."""
        name = module.__name__.partition(".")[2]
        vars(module).update(SERVED.get(name, {}))
        if (instead := instead_of(name)) is not None:
            vars(module)["__getattr__"] = partial(_placeholder, module.__name__, instead)
        if not name:
            for child in filter(None, SERVED):
                importlib.import_module(f"{PACKAGE}.{child}")


def _placeholder(module: str, instead: str, name: str) -> type:
    if name.startswith("__"):  # what the import system asks for
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return placeholder(module, name, instead)


FINDER = Finder()


def serve() -> None:
    """Answer imports of the package from now on.

    Raises:
        ImportError: if another package of this name was imported before.
    """
    present = sys.modules.get(PACKAGE)
    if present is not None and getattr(present.__spec__, "loader", None) is not FINDER:
        raise ImportError(
            f"curvopt.as_backpack: {PACKAGE} was imported before, from {getattr(present, '__file__', 'elsewhere')}; "
            f"import curvopt.as_backpack first, before all packages that import {PACKAGE}."
        )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
