"""Names of BackPACK's own engine, for which curvopt has another way, if any.

Programs may import them, annotate and test with them, and subclass them. Rules for modules may be built and registered,
and are ignored; to build any other class is an error that says what to do.
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from functools import cache

from curvopt.errors import CurvoptWarning

EXTENSION = "a quantity of your own is a curvopt.extensions.Extension"
RULE = "one curvopt.extending.Rule for a layer serves all quantities, and unknown layers need none"

#: What to do instead, by patterns of modules.
_INSTEAD = {
    "core.derivatives.*": RULE,
    "extensions.module_extension": RULE,
    "extensions.mat_to_mat_jac_base": RULE,
    "extensions.*order.base": f"{RULE}; {EXTENSION}",
    "extensions.*order.*.*": RULE,
    "extensions.firstorder.gradient": RULE,
    "extensions.curvmatprod.*.*": RULE,
    "extensions.curvature": "the choices are curvopt.extensions.GGNMP, HMP and PCHMP",
    "extensions.saved_quantities": "nothing is kept on modules",
    "utils.conv*": RULE,
    "utils.linear": RULE,
    "utils.unsqueeze": "the functions of curvopt.kroneckers take vectors and matrices",
    "utils.hooks": "curvopt.extend registers its hooks itself",
    "utils.errors": "errors are of the class curvopt.CurvoptError",
    "utils.module_classification": "curvopt.extend takes modules of any kind",
}


def instead_of(module: str) -> str | None:
    """What to do instead of what a module of BackPACK's engine is for; ``None`` for other modules."""
    return next((way for pattern, way in _INSTEAD.items() if fnmatchcase(module, pattern)), None)


class ModuleRule:
    """How BackPACK computes a quantity for one kind of module: curvopt computes its own quantities for all of them."""

    def __init__(self, *args: object, **kwargs: object):
        """Take anything."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{type(self).__name__}.{name} is a part of BackPACK's engine; {RULE}.")


@cache
def warn_of_rule(rule: str, module: str, field: str) -> None:
    """Warn once that a rule was registered."""
    warnings.warn(
        f"set_module_extension: {rule} is ignored, as curvopt computes {field} of {module} itself.",
        CurvoptWarning,
        stacklevel=3,
    )


@cache
def placeholder(module: str, name: str, instead: str) -> type:
    """A class to stand for a name of a module (``backpack.anything``); only those of a `ModuleRule` have instances."""
    if instead.startswith(RULE) and name.lstrip("_")[0].isupper() and not name.endswith("BackpropExtension"):
        return type(name, (ModuleRule,), {"__module__": module, "__doc__": f"Ignored; {instead}."})

    def refuse(cls: type, *args: object, **kwargs: object) -> object:
        raise ImportError(f"{module}.{name} is a part of BackPACK's engine, which curvopt does not have; {instead}.")

    return type(name, (), {"__module__": module, "__doc__": f"Not served; {instead}.", "__new__": refuse})
