"""Optimizers that collect Kronecker factors."""

from typing import Any, Literal

from torch import Tensor

from curvopt.core.jacobians.base import Approx
from curvopt.extensions import KFAC, KFLR, KFACEmpirical
from curvopt.optim.accumulation import pop_field
from curvopt.optim.curvature_optimizer import CurvatureOptimizer
from curvopt.optim.empirical import GradientFactors

Fisher = Literal["mc", "exact", "empirical"]


class Kronecker(CurvatureOptimizer):
    """Collects the Kronecker factors of the Fisher (or GGN) matrix."""

    def _configure_factors(
        self, *, fisher: Fisher, approx: Approx, mc_samples: int, max_factor_size: int | None
    ) -> None:
        """Check and store the options."""
        if fisher not in ("mc", "exact", "empirical"):
            raise ValueError(f'fisher must be "mc", "exact" or "empirical", got {fisher!r}')
        KFAC(mc_samples, approx, max_factor_size=max_factor_size)  # checks the others
        self._options = {
            "fisher": fisher,
            "approx": approx,
            "mc_samples": mc_samples,
            "max_factor_size": max_factor_size,
        }

    def _cost(self, param: Tensor) -> int:
        """Products with inverses in each step, and the inverses themselves now and then."""
        sizes = (param.numel(),) if param.ndim < 2 else (param.shape[0], param.numel() // max(1, param.shape[0]))
        limit = self._options["max_factor_size"]
        blocks = [(d, d if limit is None else min(d, limit)) for d in sizes]
        return sum(b * (param.numel() + d * b // self.inverse_every) for d, b in blocks) + 1

    def _extensions(self) -> list[Any]:
        fisher, approx, mc_samples, limit = self._options.values()
        if fisher == "mc":
            return [KFAC(mc_samples, approx, self._sampler(), limit)]
        return [(KFLR if fisher == "exact" else KFACEmpirical)(approx, limit)]

    def _empirical_extensions(self) -> list[Any]:
        return [GradientFactors(self._options["approx"], self._options["max_factor_size"])]

    def _wants_empirical(self) -> bool:
        return self._options["fisher"] == "empirical"

    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        fisher = "empirical" if self._progress["empirical"] else self._options["fisher"]
        factors = pop_field(param, {"mc": "kfac", "exact": "kflr", "empirical": "kfac_empirical"}[fisher])
        if factors is None:
            return None
        return list(factors), None if len(factors) == 1 else 0 if factors.transposed else 1
