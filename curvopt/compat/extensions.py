"""BackPACK's extensions: Kronecker factors of convolutions on its scale, and the base class of all."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

from curvopt import extensions
from curvopt.compat.unserved import EXTENSION, warn_of_rule


class Served:
    """What BackPACK's extensions have beside what curvopt's have."""

    field: str
    subsampling: Sequence[int] | None

    def get_subsampling(self) -> Sequence[int] | None:
        """Indices of the samples that are kept, ``None`` for all."""
        return self.subsampling

    def set_module_extension(self, module: type, extension: object, overwrite: bool = False) -> None:
        """Warn, and ignore the rule for a module: the quantity is computed for modules of any kind."""
        warn_of_rule(type(extension).__name__, module.__name__, self.field)


def served(kind: type[extensions.Extension], **options: Any) -> type[extensions.Extension]:
    """One of curvopt's extensions as one of BackPACK's, with other defaults."""
    made = partialmethod(kind.__init__, **options)  # type: ignore[misc]
    return type(kind.__name__, (Served, kind), {"__module__": __name__, "__doc__": kind.__doc__, "__init__": made})


class KFAC(Served, extensions.KFAC):
    """As `curvopt.extensions.KFAC` with ``approx="backpack"``."""

    def __init__(self, mc_samples: int = 1):
        """Take the number of samples."""
        super().__init__(mc_samples, approx="backpack")


class KFLR(Served, extensions.KFLR):
    """As `curvopt.extensions.KFLR` with ``approx="backpack"``."""

    def __init__(self) -> None:
        """Take no option."""
        super().__init__(approx="backpack")


class KFRA(Served, extensions.KFRA):
    """As `curvopt.extensions.KFRA`, with BackPACK's factors of convolutions."""

    approx = "backpack"


class BackpropExtension(ABC):  # noqa: B024 - nobody builds one
    """The class of all extensions, to annotate and to test with; yours derive from `curvopt.extensions.Extension`.

    Raises:
        ImportError: when a subclass is built.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Refuse."""
        raise ImportError(f"{type(self).__name__}: curvopt has no extensions made of parts for modules; {EXTENSION}.")


BackpropExtension.register(extensions.Extension)


class LossHessianStrategy:
    """How the Hessian of a loss enters."""

    EXACT, SAMPLING, SUM = CHOICES = ["exact", "sampling", "sum"]


class BackpropStrategy:
    """What travels backwards."""

    BATCH_AVERAGE, SQRT = CHOICES = ["average", "sqrt"]


class ExpectationApproximation:
    """What is averaged over the samples."""

    BOTEV_MARTENS, CHEN = CHOICES = ["E[J^T E(H) J]", "E(J^T) E(H) E(J)"]


class Curvature:
    """What is approximated."""

    HESSIAN, GGN, PCH_ABS, PCH_CLIP = CHOICES = ["hessian", "ggn", "pch-abs", "pch-clip"]


_SETTINGS = {
    ("ggn", "sampling", "sqrt", ExpectationApproximation.BOTEV_MARTENS): KFAC,
    ("ggn", "exact", "sqrt", ExpectationApproximation.BOTEV_MARTENS): KFLR,
    ("ggn", "sum", "average", ExpectationApproximation.BOTEV_MARTENS): KFRA,
}


class HBP(ABC):  # noqa: B024 - nobody builds one
    """Hessian backpropagation in the settings of `KFAC`, `KFLR` or `KFRA`: that extension with another field.

    Raises:
        NotImplementedError: for other settings.
    """

    def __new__(
        cls,
        curv_type: str,
        loss_hessian_strategy: str,
        backprop_strategy: str,
        ea_strategy: str,
        savefield: str = "hbp",
    ) -> Any:
        """Find the extension."""
        given = curv_type, loss_hessian_strategy, backprop_strategy, ea_strategy
        if given in _SETTINGS:
            extension = _SETTINGS[given]()
            extension.savefield = savefield
            return extension
        raise NotImplementedError(f"HBP: {given} are no settings of KFAC, KFLR or KFRA, which curvopt has.")


for _kind in _SETTINGS.values():
    HBP.register(_kind)
