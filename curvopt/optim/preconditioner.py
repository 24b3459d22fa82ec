"""Kronecker-factored curvature in front of any optimizer."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from curvopt.core.products.base import Approx
from curvopt.errors import CurvoptError
from curvopt.optim.kronecker import Fisher, Kronecker
from curvopt.optim.options import Attached
from curvopt.optim.solvers import FactoredInverse
from curvopt.optim.step_checks import Overflow


class _NoStep(torch.optim.Optimizer):
    """Takes no step; another optimizer does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nothing."""


class KFACPreconditioner(Kronecker, FactoredInverse, _NoStep):
    """Multiplies the gradients of a model by the inverse of the curvature, and leaves the step to another optimizer.

    What `KFACSGD` does in front of SGD, this does in front of AdamW, Muon or any other optimizer: gradients become
    smaller along directions in which the loss curves strongly, and larger where it is flat. The loop has one line
    more::

        import torch
        from curvopt.optim import KFACPreconditioner

        model, lossfunc = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss()
        preconditioner = KFACPreconditioner(model)
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.rand(128, 64), torch.randint(10, (128,))
        for step in range(20):
            optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            preconditioner.step()  # exchanges .grad
            optimizer.step()

    **In symbols**, the gradient ``G`` of a weight is replaced by ``ν (B + √λ/π I)⁻¹ G (A + π √λ I)⁻¹``. The letters are
    those of `KFACSGD`: ``A`` and ``B`` are the Kronecker factors of the curvature, of the layer's inputs and of its
    outputs, ``λ`` is the damping, which ``π`` splits between them, and ``ν`` bounds the length of the result if
    ``rms_clip`` is given.

    The preconditioner is an optimizer itself, whose step changes gradients instead of parameters: ``attach()``,
    ``coverage()``, ``metrics()``, ``state_dict()`` and ``param_groups`` are as in `KFACSGD`. To have both steps taken
    by one call, ``optimizer.register_step_pre_hook(lambda *_: preconditioner.step())``; with a closure, before which
    such hooks run, ``optimizer.step(lambda: preconditioner.step(closure))`` instead. With a ``GradScaler``, build it
    with ``scaler=scaler`` and call ``scaler.unscale_(optimizer)`` before; gradients that overflow stay, so that the
    scaler skips the step.

    Args:
        model: the model, to which the preconditioner is attached; all its parameters are preconditioned.
        damping: ``λ``, in units of the curvature of the mean-reduced loss; read when the inverses are renewed.
        ema: decay of the averages per step, whatever the interval between refreshes.
        rms_clip: bound on the root mean square of each parameter's preconditioned gradient, see `KFACSGD`; ``None`` for
            none, as optimizers want whose step does not depend on the gradient's length (Adam, Muon).
        curvature_every: steps between refreshes of the factors, reached gradually from 1.
        inverse_every: steps between refreshes of the inverses, reached gradually from 1.
        fisher: ``"mc"`` samples the Fisher matrix, ``"exact"`` sweeps one vector per output (KFLR), ``"empirical"``
            takes the targets of the data for samples.
        approx: how shared positions enter the factors, see `curvopt.extensions.KFAC`.
        mc_samples: samples per datum for ``fisher="mc"``, drawn from a generator of the preconditioner;
            eight times as many where the batch is one sample.
        max_factor_size: larger factors are cut down to blocks on their diagonal, which cost less and need fewer
            samples; ``None`` for whole ones.
        **attached: ``batch_axis``, ``lossfunc``, ``scaler``, ``gradient_scale`` and ``loss_reduction``, as for
            ``attach``.

    Raises:
        TypeError: the model is none.
        ValueError: an option is out of its range.
    """

    _restores_gradients = False
    _draws_of_one_sample = 8

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float = 0.05,
        ema: float = 0.98,
        rms_clip: float | None = None,
        curvature_every: int = 20,
        inverse_every: int = 20,
        fisher: Fisher = "mc",
        approx: Approx = "expand",
        mc_samples: int = 1,
        max_factor_size: int | None = 128,
        **attached: Unpack[Attached],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"KFACPreconditioner: expected a torch.nn.Module, got {type(model).__name__}; write "
                "KFACPreconditioner(model), and give its parameters to the other optimizer."
            )
        self._configure_factors(fisher=fisher, approx=approx, mc_samples=mc_samples, max_factor_size=max_factor_size)
        self._configure(
            attached,
            damping=damping,
            ema=ema,
            rms_clip=rms_clip,
            curvature_every=curvature_every,
            inverse_every=inverse_every,
        )
        super().__init__(model, {"lr": 1.0})  # schedulers want one

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange the gradients; see `curvopt.optim.curvature_optimizer.CurvatureOptimizer.step`."""
        if closure is None and self._versions not in ([], [param._version for param in self._params()]):
            self._say(
                "order",
                "comes after the step that it is for: parameters have changed since the backward. Call "
                "preconditioner.step() before optimizer.step().",
            )
        self._versions = []
        if isinstance(self._scaler, torch.amp.GradScaler) and self._scaler.is_enabled():
            stages = [state["stage"] for state in self._scaler._per_optimizer_states.values()]
            if OptState.UNSCALED not in stages:
                raise CurvoptError(
                    "KFACPreconditioner.step(): the gradients still have the scale of the GradScaler; call "
                    "scaler.unscale_(optimizer) before preconditioner.step()."
                )
        try:
            return super().step(closure)
        except Overflow:
            if self._scaler is None or not getattr(self._scaler, "is_enabled", lambda: True)():
                raise
