"""Optimizers that collect Kronecker factors."""

from typing import Any, Literal

import torch
from torch import Tensor

from curvopt.core.losses.roots import Empirical
from curvopt.core.products.base import Approx
from curvopt.extensions import KFAC, KFLR, KFACEmpirical
from curvopt.optim.accumulation import Collected, pop_field
from curvopt.optim.curvature_optimizer import CurvatureOptimizer
from curvopt.optim.empirical import GradientFactors

Fisher = Literal["mc", "exact", "empirical"]


class Kronecker(CurvatureOptimizer):
    """Collects the Kronecker factors of the Fisher (or GGN) matrix."""

    def _configure_factors(
        self, *, fisher: Fisher | None, approx: Approx, mc_samples: int, max_factor_size: int | None
    ) -> None:
        """Check and store the options."""
        if fisher not in (None, "mc", "exact", "empirical"):
            raise ValueError(f'fisher must be "mc", "exact", "empirical" or None, got {fisher!r}')
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
        approx, mc_samples, limit = (self._options[name] for name in ("approx", "mc_samples", "max_factor_size"))
        fisher = self._fisher()
        if fisher == "exact":
            return [KFLR(approx, limit)]
        sampler = self._sampler()
        kinds = {
            "mc": KFAC(mc_samples, approx, sampler, limit),
            "empirical": self._empirical(sampler, self._options["fisher"] is None),
        }
        return [*kinds.values()] if fisher is None else [kinds[fisher]]

    def _empirical(self, sampler: torch.Generator, scaled: bool) -> KFACEmpirical:
        """The factors of the predictions' gradients, ``scaled`` in units of the curvature of the loss."""
        extension = KFACEmpirical(self._options["approx"], self._options["max_factor_size"])
        extension.columns = Empirical(sampler, scaled=scaled)
        return extension

    def _empirical_extensions(self, one_sample: bool) -> list[Any]:
        if one_sample:
            return [self._empirical(self._sampler(), scaled=False)]
        return [GradientFactors(self._options["approx"], self._options["max_factor_size"])]

    def _wants_empirical(self) -> bool:
        return self._options["fisher"] in (None, "empirical")

    def _fisher(self) -> Fisher | None:
        """The kind of factors; ``None`` before the first refresh has chosen."""
        return self._options["fisher"] or {None: None, True: "empirical", False: "mc"}[self._progress["several"]]

    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        fields = {"mc": "kfac", "exact": "kflr", "empirical": "kfac_empirical"}
        fisher = "empirical" if self._progress["empirical"] else self._fisher()
        factors = pop_field(param, fields[fisher or "mc"])
        if factors is None:
            return None
        of_input = None if len(factors) == 1 else 0 if factors.transposed else 1
        if self._fisher() is None:  # its factor of the outputs is added in both kinds
            other = factors if fisher == "empirical" else pop_field(param, fields["empirical"])
            return [*factors, other[_of_output(of_input)]], of_input
        return list(factors), of_input

    def _settle(self, accepted: dict[Tensor, list[Tensor]], collected: Collected) -> dict[Tensor, list[Tensor]]:
        """Choose the kind of factors by the number of variables of a prediction.

        Several may err together, which samples of the model do not know, but the samples' own gradients do. Of a single
        one they say nothing but the size of the residual.
        """
        if self._fisher() is not None:
            return accepted
        self._progress["several"] = several = self._progress["variables"] > 1
        chosen = {}
        for param, (*factors, other) in accepted.items():
            if several:
                factors[_of_output(collected.curvature[param].of_input)] = other
            chosen[param] = factors
        return chosen


def _of_output(of_input: int | None) -> int:
    """Index of the factor of the outputs, by that of the input's."""
    return 1 if of_input == 0 else 0
