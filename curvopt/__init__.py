"""Second-order information in one backward pass, and torch.optim optimizers that live on it."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from curvopt.core.backward.backward_pass import set_columns_per_sweep
from curvopt.core.backward.context import backpack
from curvopt.core.backward.explain import Explanation, explain
from curvopt.core.extend import extend, prediction
from curvopt.core.record import disable
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.fields import field
from curvopt.regularizers import L2Regularizer

__version__ = "0.3.0"

__all__ = [
    "CurvoptError",
    "CurvoptWarning",
    "Explanation",
    "L2Regularizer",
    "backpack",
    "disable",
    "explain",
    "extend",
    "field",
    "prediction",
    "set_columns_per_sweep",
]

if TYPE_CHECKING:
    from curvopt import distributed as distributed
    from curvopt import extending as extending
    from curvopt import extensions as extensions
    from curvopt import hessianfree as hessianfree
    from curvopt import kroneckers as kroneckers
    from curvopt import optim as optim
    from curvopt import testing as testing
else:  # a type checker that sees __getattr__ takes every name for an attribute
    _MODULES = ("distributed", "extending", "extensions", "hessianfree", "kroneckers", "optim", "testing")

    def __getattr__(name):
        """Import a public module when it is first looked up."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        for module in () if name.startswith("_") else ("optim", "extensions"):
            if hasattr(import_module(f"{__name__}.{module}"), name):
                # `from curvopt import` asks by importlib, and replaces the text of an AttributeError
                imports = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
                error = ImportError if imports else AttributeError
                raise error(f"{name} is in curvopt.{module}; write `from curvopt.{module} import {name}`.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        """Public names and modules."""
        return sorted([*__all__, *_MODULES, "__version__"])
