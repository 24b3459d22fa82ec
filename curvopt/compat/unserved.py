"""Names of BackPACK's own engine, for which curvopt has another way, if any.

Programs may import them, annotate and test with them, and subclass them; to build one is an error that says what to do.
Packages define classes on them beside others that need none of them.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

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


@cache
def placeholder(module: str, name: str, instead: str) -> type:
    """A class to stand for a name of a module (``backpack.anything``), of which there are no instances."""

    def refuse(cls: type, *args: object, **kwargs: object) -> object:
        raise ImportError(f"{module}.{name} is a part of BackPACK's engine, which curvopt does not have; {instead}.")

    return type(name, (), {"__module__": module, "__doc__": f"Not served; {instead}.", "__new__": refuse})
