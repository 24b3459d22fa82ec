"""SGD on gradients divided by a curvature diagonal (Becker & LeCun 1989)."""

from typing import Any, Literal

import torch
from torch import Tensor

from curvopt.extensions import DiagGGNExact, DiagGGNMC
from curvopt.optim.base import CurvatureOptimizer, pop_field


class DiagonalNewton(CurvatureOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` whose gradient ``g`` is replaced by ``ν g / (h + λ)``.

    ``h`` is a moving average of the diagonal of the GGN (or Fisher) matrix, ``λ`` the damping, ``ν ≤ 1`` the KL clip.
    Use it as ``KFACSGD``; the loop, the checkpoints and the shared options are the same. The diagonal knows nothing of
    how parameters act together, so its steps are kept shorter.

    Args:
        params: parameters, named parameters or param groups; ``lr``, ``momentum``, ``weight_decay``, ``damping``,
            ``ema`` and the options of SGD may differ between groups.
        lr: learning rate.
        momentum: momentum of the preconditioned gradients.
        curvature: name of the diagonal, ``"diag_ggn_mc"`` (sampled) or ``"diag_ggn_exact"``.
        damping: ``λ``, in units of the curvature of the differentiated loss; read when the inverses are renewed.
        ema: decay of the average per refresh, bias-corrected.
        kl_clip: bound ``κ`` on the predicted ``lr² uᵀ g`` of a step over all groups; ``None`` for none.
        curvature_every: steps between refreshes of the diagonal, reached gradually from 1.
        mc_samples: samples per datum for ``curvature="diag_ggn_mc"``, drawn from a generator of the optimizer.
        weight_decay: decoupled: ``p *= 1 - lr * weight_decay``.
        dampening: as in SGD.
        nesterov: as in SGD.
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
        curvature: Literal["diag_ggn_mc", "diag_ggn_exact"] = "diag_ggn_mc",
        damping: float = 0.005,
        ema: float = 0.95,
        kl_clip: float | None = 0.0002,
        curvature_every: int = 10,
        mc_samples: int = 1,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        if curvature not in ("diag_ggn_mc", "diag_ggn_exact"):
            raise ValueError(f'curvature must be "diag_ggn_mc" or "diag_ggn_exact", got {curvature!r}')
        self._options = {"field": curvature, "mc_samples": mc_samples}
        self._configure(damping=damping, ema=ema, kl_clip=kl_clip, curvature_every=curvature_every, inverse_every=1)
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

    def _extension(self) -> Any:
        if self._options["field"] == "diag_ggn_exact":
            return DiagGGNExact()
        return DiagGGNMC(mc_samples=self._options["mc_samples"], generator=self._sampler())

    def _take(self, param: Tensor) -> list[Tensor] | None:
        diagonal = pop_field(param, self._options["field"])
        return None if diagonal is None else [diagonal.reshape(-1)]
