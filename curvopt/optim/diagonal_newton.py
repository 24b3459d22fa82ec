"""SGD on gradients divided by a curvature diagonal (Becker & LeCun 1989)."""

from collections.abc import Set
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from curvopt.extensions import DiagGGNExact, DiagGGNMC, DiagHessian
from curvopt.optim.accumulation import Collected, pop_field
from curvopt.optim.curvature import Curvature, Quantity, Taken
from curvopt.optim.empirical import GradientDiagonal, RowDiagonal
from curvopt.optim.options import Attached
from curvopt.optim.ranks import Alone
from curvopt.optim.solve import Inverse
from curvopt.optim.state import Run
from curvopt.optim.step import CurvatureOptimizer

Kind = Literal["diag_ggn_mc", "diag_ggn_exact", "diag_h"]


class CurvatureDiagonal(Quantity):
    """A diagonal, without negative entries.

    Args:
        kind: which one.
        modify: what becomes of negative entries.
        mc_samples: samples per datum.
    """

    draws_of_one_sample = 8

    def __init__(self, kind: Kind, modify: Literal["abs", "clip"], mc_samples: int):
        if kind not in ("diag_ggn_mc", "diag_ggn_exact", "diag_h"):
            raise ValueError(f'curvature must be "diag_ggn_mc", "diag_ggn_exact" or "diag_h", got {kind!r}')
        if modify not in ("abs", "clip"):
            raise ValueError(f'modify must be "abs" or "clip", got {modify!r}')
        DiagGGNMC(mc_samples)  # checks it
        self.kind, self.modify, self.mc_samples = kind, modify, mc_samples
        self.options = {"curvature": kind, "modify": modify, "mc_samples": mc_samples}

    def extensions(self, curvature: Curvature) -> list[Any]:
        """The extension of its kind."""
        if self.kind == "diag_ggn_mc":
            return [DiagGGNMC(self.mc_samples, curvature.sampler())]
        return [DiagGGNExact() if self.kind == "diag_ggn_exact" else DiagHessian()]

    def empirical(self, curvature: Curvature, one_sample: bool) -> list[Any]:
        """Of the samples' gradients, or the rows' with random signs."""
        return [RowDiagonal(curvature.sampler()) if one_sample else GradientDiagonal()]

    def take(self, param: Tensor, run: Run) -> Taken | None:
        """The diagonal as a vector."""
        diagonal = pop_field(param, "gradient_diagonal" if run.empirical else self.kind)
        return None if diagonal is None else ([diagonal.reshape(-1)], None)

    def settle(
        self,
        accepted: dict[Tensor, list[Tensor]],
        known: Set[Tensor],
        collected: Collected,
        run: Run,
        ranks: Alone,
    ) -> dict[Tensor, list[Tensor]]:
        """After the sum over backwards, whose parts of the batch may have other signs."""
        of = {p: d.abs() if self.modify == "abs" else d.clamp(min=0) for p, (d,) in accepted.items()}
        # of one batch: small entries say little
        first = [p for p in of if p not in known]
        means = ranks.over_pieces(first, [of[p].mean() for p in first], [p.numel() for p in first])
        of |= {p: torch.maximum(of[p], mean) for p, mean in zip(first, means, strict=True)}
        return {p: [diagonal] for p, diagonal in of.items()}


class DiagonalNewton(CurvatureOptimizer, torch.optim.SGD):
    """SGD with momentum whose gradients are divided by the curvature along each single weight.

    This is the cheapest curvature, one number for each weight, and the crudest: it ignores how weights act together
    (Becker & LeCun 1989). Of the curvature along a step it sees a small part, one in hundreds or thousands for usual
    networks, so steps would be much too long; a bound on their length is at work in most of them. Take it where memory
    allows nothing else, or for inputs in unlike units. Loop, momentum, param groups, schedulers and ``state_dict`` are
    those of ``torch.optim.SGD``::

        import torch
        from curvopt.optim import DiagonalNewton

        model, lossfunc = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss()
        optimizer = DiagonalNewton(model)
        x, y = torch.rand(128, 64), torch.randint(10, (128,))
        for step in range(20):
            optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            optimizer.step()

    **In symbols**, each entry ``g`` of a gradient is replaced by ``ν g / (h + λ)``. ``h`` is the entry of the diagonal
    of the Hessian, or of the generalized Gauss-Newton matrix (the Hessian without second derivatives of the network),
    averaged over batches; ``λ`` is the damping, and ``ν ≤ 1`` the bound on the length, see ``rms_clip``. The first
    diagonal of a parameter is from one batch, whose small entries say little: they are raised to its mean.

    Args:
        params: a model, to which the optimizer is attached, or parameters, named parameters or param groups;
            ``lr``, ``momentum``, ``weight_decay``, ``damping``, ``ema`` and the options of SGD may differ between
            groups.
        lr: learning rate.
        momentum: momentum of the preconditioned gradients.
        curvature: name of the diagonal, ``"diag_ggn_mc"`` (sampled), ``"diag_ggn_exact"`` or ``"diag_h"``.
        modify: replaces the negative entries of ``"diag_h"`` by their absolute value (``"abs"``) or zero (``"clip"``).
        damping: ``λ``, in units of the curvature of the mean-reduced loss; read when the inverses are renewed.
        ema: decay of the average per step, whatever the interval between refreshes.
        rms_clip: bound on the root mean square of each parameter's preconditioned gradient, entries without a gradient
            left out (Shazeer & Stern 2018, section 6); ``None`` for none. Squares of a weight with n > 128 inputs
            (entries of ``param[0]``) count n / 128 times, as more of them add up in an output. The root mean square of
            a step is at most ``lr * rms_clip / (1 - momentum)``, 0.003 with the defaults; that of Adam is at most about
            ``lr``. Without any curvature, gradients of all parameters together are scaled to it, also up.
        curvature_every: steps between refreshes of the diagonal, reached gradually from 1.
        mc_samples: samples per datum for ``curvature="diag_ggn_mc"``, drawn from a generator of the optimizer;
            eight times as many where the batch is one sample.
        weight_decay: decoupled: ``p *= 1 - lr * weight_decay``.
        dampening: as in SGD.
        nesterov: as in SGD.
        on_nonfinite: ``"raise"`` an error where a gradient is not finite, or ``"skip"`` the step; ``metrics()`` counts.
        maximize: as in SGD.
        foreach: as in SGD.
        **attached: where a model is given: ``batch_axis``, ``lossfunc``, ``scaler``, ``gradient_scale`` and
            ``loss_reduction``, as for ``attach``.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.04,
        momentum: float = 0.8,
        *,
        curvature: Kind = "diag_ggn_mc",
        modify: Literal["abs", "clip"] = "abs",
        damping: float = 0.001,
        ema: float = 0.995,
        rms_clip: float | None = 0.015,
        curvature_every: int = 10,
        mc_samples: int = 1,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        **attached: Unpack[Attached],
    ) -> None:
        super().__init__(
            params,
            CurvatureDiagonal(curvature, modify, mc_samples),
            Inverse(),
            {
                "damping": damping,
                "ema": ema,
                "rms_clip": rms_clip,
                "curvature_every": curvature_every,
                "inverse_every": 1,
                "on_nonfinite": on_nonfinite,
            },
            attached,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
        )
