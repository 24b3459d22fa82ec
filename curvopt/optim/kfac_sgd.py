"""SGD on gradients preconditioned by Kronecker-factored curvature (Martens & Grosse 2015)."""

from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from curvopt.core.products.base import Approx
from curvopt.optim.kronecker import Fisher, Kronecker
from curvopt.optim.options import Attached
from curvopt.optim.solvers import FactoredInverse


class KFACSGD(Kronecker, FactoredInverse, torch.optim.SGD):
    """SGD with momentum whose gradients are multiplied by the inverse of the curvature of each layer.

    Steps become short along directions in which the loss curves strongly, and long where it is flat, so training needs
    fewer of them than with SGD. The curvature is the Fisher matrix of the predictions, which for cross-entropy and
    squared error is the generalized Gauss-Newton matrix (GGN). For each layer, two small matrices stand for it, its
    Kronecker factors (Martens & Grosse 2015). They are averaged over batches, and every ``curvature_every`` steps a
    backward pass renews them. Loop, momentum, param groups, schedulers and ``state_dict`` are those of
    ``torch.optim.SGD``::

        import torch
        from curvopt.optim import KFACSGD

        model, lossfunc = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss()
        optimizer = KFACSGD(model)
        x, y = torch.rand(128, 64), torch.randint(10, (128,))
        for step in range(20):
            optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            optimizer.step()

    **In symbols**, the gradient ``G`` of a weight, ``[out, in]``, is replaced by
    ``ν (B + √λ/π I)⁻¹ G (A + π √λ I)⁻¹``:

    - ``A``, ``[in, in]``, is the averaged second moment of the layer's inputs, and ``B``, ``[out, out]``, the averaged
      curvature of the loss with respect to its outputs, see `curvopt.extensions.KFAC`; ``I`` is a unit matrix;
    - ``λ`` is the damping, which is added to the curvature so that it can be inverted; ``π²``, the mean eigenvalue of
      ``A`` divided by that of ``B``, splits it between the two;
    - ``ν ≤ 1`` makes steps shorter that would be too long, see ``rms_clip``.

    A bias has one factor ``F`` and is multiplied by ``(F + λ I)⁻¹``; where a factor is a diagonal, this is a division.
    A parameter that the extension does not cover is treated as if it had the mean curvature of all other parameters.
    Where a gradient is zero, as under a mask, so is the result.

    Args:
        params: a model, to which the optimizer is attached, or parameters, named parameters or param groups;
            ``lr``, ``momentum``, ``weight_decay``, dampings, ``ema`` and the options of SGD may differ between groups.
        lr: learning rate; 1 is the step of Newton's method, where curvature is exact and nothing is clipped.
        momentum: momentum of the preconditioned gradients.
        damping: ``λ``, in units of the curvature of the mean-reduced loss; ``None`` for ``relative_damping``.
        relative_damping: ``λ`` of a parameter in multiples of its mean curvature, or of that of all parameters if this
            is less; so it follows the curvature in training. Read when the inverses are renewed.
        ema: decay of the averages per step, whatever the interval between refreshes.
        rms_clip: bound on the root mean square of each parameter's preconditioned gradient, entries without a gradient
            left out (Shazeer & Stern 2018, section 6); ``None`` for none. Squares of a weight with n > 128 inputs
            (entries of ``param[0]``) count n / 128 times, as more of them add up in an output. The root mean square of
            a step is at most ``lr * rms_clip / (1 - momentum)``, 0.0075 with the defaults; that of Adam is at most
            about ``lr``. Without any curvature, gradients of all parameters together are scaled to it, also up.
        curvature_every: steps between refreshes of the factors, reached gradually from 1.
        inverse_every: steps between refreshes of the inverses, reached gradually from 1.
        fisher: ``"empirical"`` takes each prediction's own gradient, ``"mc"`` one at a target drawn from the model,
            ``"exact"`` sweeps one vector per output (KFLR). The empirical matrix is no curvature at a minimum (Kunstner
            et al. 2019), but on the way it contains that predicted variables err together. So ``None`` takes it where
            a prediction has several (autoencoders), in units of the curvature of the loss, else ``"mc"`` (classes,
            regressions of one number).
        approx: how shared positions enter the factors, see `curvopt.extensions.KFAC`.
        mc_samples: samples per datum for ``fisher="mc"``, drawn from a generator of the optimizer.
        max_factor_size: larger factors are cut down to blocks on their diagonal, which cost less and need fewer
            samples; ``None`` for whole ones.
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
        lr: float | Tensor = 0.1,
        momentum: float = 0.8,
        *,
        damping: float | None = None,
        relative_damping: float = 0.5,
        ema: float = 0.98,
        rms_clip: float | None = 0.015,
        curvature_every: int = 20,
        inverse_every: int = 20,
        fisher: Fisher | None = None,
        approx: Approx = "expand",
        mc_samples: int = 1,
        max_factor_size: int | None = 128,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        **attached: Unpack[Attached],
    ) -> None:
        self._configure_factors(fisher=fisher, approx=approx, mc_samples=mc_samples, max_factor_size=max_factor_size)
        self._configure(
            attached,
            damping=damping,
            relative_damping=relative_damping,
            ema=ema,
            rms_clip=rms_clip,
            curvature_every=curvature_every,
            inverse_every=inverse_every,
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
