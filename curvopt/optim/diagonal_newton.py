"""SGD on gradients divided by a curvature diagonal (Becker & LeCun 1989)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from curvopt.extensions import DiagGGNExact, DiagGGNMC, DiagHessian
from curvopt.optim.accumulation import pop_field
from curvopt.optim.empirical import GradientDiagonal
from curvopt.optim.solvers import FactoredInverse
from curvopt.optim.stacks import Stack


class DiagonalNewton(FactoredInverse, torch.optim.SGD):
    """``torch.optim.SGD`` whose gradient ``g`` is replaced by ``ν g / (h + λ)``.

    ``h`` is a moving average of the diagonal of the GGN (or Fisher) matrix or of the Hessian, ``λ`` the damping,
    ``ν ≤ 1`` the KL clip. Use it as ``KFACSGD``: loop, checkpoints and shared options are alike.

    The diagonal ignores how parameters act together: of the change ``δᵀGδ`` that a step ``δ`` makes, it
    predicts a small part ``Σ hᵢδᵢ²``, one in hundreds or thousands for usual networks. So the clip bounds the largest
    change that a matrix with this diagonal allows: ``δᵀGδ ≤ (Σ √hᵢ |δᵢ|)²`` for every positive semi-definite ``G``,
    by the Cauchy-Schwarz inequality; or the prediction of the damped diagonal, where that is more: in directions
    without curvature. The first diagonal of a parameter is from one batch, whose small entries say little: they are
    raised to its mean.

    Args:
        params: parameters, named parameters or param groups; ``lr``, ``momentum``, ``weight_decay``, ``damping``,
            ``ema`` and the options of SGD may differ between groups.
        lr: learning rate.
        momentum: momentum of the preconditioned gradients.
        curvature: name of the diagonal, ``"diag_ggn_mc"`` (sampled), ``"diag_ggn_exact"`` or ``"diag_h"``.
        modify: replaces the negative entries of ``"diag_h"`` by their absolute value (``"abs"``) or zero (``"clip"``).
        damping: ``λ``, in units of the curvature of the mean-reduced loss; read when the inverses are renewed.
        ema: decay of the average per step, whatever the interval between refreshes.
        kl_clip: bound ``κ`` on ``lr² (Σ √hᵢ |uᵢ|)² / √V``, and on ``lr² uᵀ g / V``, of a step ``u`` over all groups,
            with ``V`` the number of variables that a prediction has (1 for a class, a sample's entries for
            element-wise losses); ``None`` for none. The root is by experience. For squared errors of mean r it is
            ``κ min(r / 100, 1)``.
        curvature_every: steps between refreshes of the diagonal, reached gradually from 1.
        adaptive_damping: every fifth step, multiply ``damping`` by (19/20)^5 or its inverse if the change of the loss
            was predicted well or badly (Levenberg-Marquardt); needs ``step(closure)``. No step is taken back: from a
            damping far too low it is the KL clip that keeps the first ones short.
        mc_samples: samples per datum for ``curvature="diag_ggn_mc"``, drawn from a generator of the optimizer.
        weight_decay: decoupled: ``p *= 1 - lr * weight_decay``.
        dampening: as in SGD.
        nesterov: as in SGD.
        on_nonfinite: ``"raise"`` an error where a gradient is not finite, or ``"skip"`` the step; ``metrics()`` counts.
        maximize: as in SGD.
        foreach: as in SGD.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.05,
        momentum: float = 0.9,
        *,
        curvature: Literal["diag_ggn_mc", "diag_ggn_exact", "diag_h"] = "diag_ggn_mc",
        modify: Literal["abs", "clip"] = "abs",
        damping: float = 0.001,
        ema: float = 0.995,
        kl_clip: float | None = 0.1,
        curvature_every: int = 10,
        adaptive_damping: bool = False,
        mc_samples: int = 1,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        if curvature not in ("diag_ggn_mc", "diag_ggn_exact", "diag_h"):
            raise ValueError(f'curvature must be "diag_ggn_mc", "diag_ggn_exact" or "diag_h", got {curvature!r}')
        if modify not in ("abs", "clip"):
            raise ValueError(f'modify must be "abs" or "clip", got {modify!r}')
        DiagGGNMC(mc_samples)  # checks it
        self._options = {"curvature": curvature, "modify": modify, "mc_samples": mc_samples}
        self._configure(
            damping=damping,
            ema=ema,
            kl_clip=kl_clip,
            curvature_every=curvature_every,
            inverse_every=1,
            adaptive_damping=adaptive_damping,
            on_nonfinite=on_nonfinite,
        )
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
        )

    def _extensions(self) -> list[Any]:
        if self._options["curvature"] == "diag_ggn_mc":
            return [DiagGGNMC(self._options["mc_samples"], self._sampler())]
        return [DiagGGNExact() if self._options["curvature"] == "diag_ggn_exact" else DiagHessian()]

    def _empirical_extensions(self) -> list[Any]:
        return [GradientDiagonal()]

    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        diagonal = pop_field(param, "gradient_diagonal" if self._progress["empirical"] else self._options["curvature"])
        return None if diagonal is None else ([diagonal.reshape(-1)], None)

    def _average(self, param: Tensor, new: list[Tensor], decay: float) -> None:
        # after the sum over backwards, whose parts of the batch may have other signs
        (diagonal,) = new
        diagonal = diagonal.abs() if self._options["modify"] == "abs" else diagonal.clamp(min=0)
        if "factors" not in self.state[param]:  # of one batch: small entries say little
            diagonal = torch.maximum(diagonal, diagonal.mean())
        super()._average(param, [diagonal], decay)

    def _renew(self) -> None:
        super()._renew()
        mean = self._progress["mean_curvature"] * self._has_curvature()
        for param in self._params():
            state = self.state[param]
            state["scales"] = [h.sqrt().to(param.device) for h in state.get("factors", [mean])]

    def _kl(self, quadratic: Tensor, solved: Sequence[tuple[Stack, Tensor]], weight: Tensor) -> Tensor:
        length = torch.zeros_like(quadratic)
        rates = {param: group["lr"] for group in self.param_groups for param in group["params"]}
        for stack, update in solved:
            scales = {p: self.state[p]["scales"][0].expand(p.numel()) for p in stack.params}
            length += rates[stack.params[0]] * (update * stack.join(scales)).abs().sum().to(quadratic)
        length = self._over_ranks(length)
        bound = (length / weight).square() / self._progress["variables"] ** 0.5
        # where there is damping and no curvature
        bound = torch.maximum(bound, super()._kl(quadratic, solved, weight))
        # by experience: longer steps kill the ReLUs of regressions
        return bound / (0.01 * self._progress["residual"].to(bound)).clamp(max=1)
