"""SGD on gradients preconditioned in the Kronecker-factored eigenbasis (George et al. 2018)."""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from curvopt.core.products.base import Approx
from curvopt.kroneckers import kfac_mat_prod, kron_diagonal, sizes_of
from curvopt.optim.accumulation import ema_update, number, pop_field
from curvopt.optim.empirical import GradientFactors, GradientScales, Scales
from curvopt.optim.kronecker import Fisher, Kronecker
from curvopt.optim.options import Attached
from curvopt.optim.solvers import Eigenbasis, basis_changes, squared
from curvopt.optim.stacks import Stack
from curvopt.optim.step_size import dampings_of


class EKFACSGD(Kronecker, Eigenbasis, torch.optim.SGD):
    """SGD with momentum whose gradients are divided by the curvature along the eigenvectors of each layer's factors.

    As `KFACSGD` it makes steps short where the loss curves strongly and long where it is flat. Both know the
    eigenvectors of the curvature from two small matrices for each layer, its Kronecker factors. `KFACSGD` also takes
    the curvature along the eigenvectors from them; EKFACSGD measures it in each refresh, which is the best diagonal
    there is in these coordinates (George et al. 2018). The damping is added to it as it is, not split between factors.
    Loop, momentum, param groups, schedulers and ``state_dict`` are those of ``torch.optim.SGD``::

        import torch
        from curvopt.optim import EKFACSGD

        model, lossfunc = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss()
        optimizer = EKFACSGD(model)
        x, y = torch.rand(128, 64), torch.randint(10, (128,))
        for step in range(20):
            optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            optimizer.step()

    **In symbols**, the flattened gradient ``g`` of a parameter is replaced by ``ν U (diag(s) + λ I)⁻¹ Uᵀ g``:

    - ``U = U_B ⊗ U_A``: the columns of ``U_A`` and ``U_B`` are the eigenvectors of KFAC's factors ``A`` of the layer's
      inputs and ``B`` of its outputs, see `curvopt.extensions.KFAC`;
    - ``s`` is an average over batches of the diagonal of ``Uᵀ F U``, where ``F`` is the parameter's block of the Fisher
      matrix, which for cross-entropy and squared error is the generalized Gauss-Newton matrix;
    - ``λ`` is the damping, ``I`` a unit matrix, and ``ν ≤ 1`` makes steps shorter that would be too long, see
      ``rms_clip``.

    ``s`` is renewed with every refresh of the curvature, eigenvectors only once their factor is no longer diagonal in
    their coordinates.

    Args:
        params: a model, to which the optimizer is attached, or parameters, named parameters or param groups;
            ``lr``, ``momentum``, ``weight_decay``, dampings, ``ema`` and the options of SGD may differ between groups.
        lr: learning rate.
        momentum: momentum of the preconditioned gradients.
        damping: ``λ``, in units of the curvature of the mean-reduced loss; ``None`` for ``relative_damping``.
        relative_damping: ``λ`` of a parameter in multiples of its mean curvature, or of that of all parameters if this
            is less; so it follows the curvature in training.
        ema: decay of the averages per step, whatever the interval between refreshes.
        rms_clip: bound on the root mean square of each parameter's preconditioned gradient, entries without a gradient
            left out (Shazeer & Stern 2018, section 6); ``None`` for none. Squares of a weight with n > 128 inputs
            (entries of ``param[0]``) count n / 128 times, as more of them add up in an output. The root mean square of
            a step is at most ``lr * rms_clip / (1 - momentum)``, 0.0075 with the defaults; that of Adam is at most
            about ``lr``. Without any curvature, gradients of all parameters together are scaled to it, also up.
        curvature_every: steps between refreshes of factors and scales, reached gradually from 1.
        inverse_every: steps between checks of the bases, reached gradually from 1.
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
        curvature_every: int = 10,
        inverse_every: int = 10,
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

    def _extensions(self) -> list[Any]:
        factors = super()._extensions()
        return [*factors, Scales(self._bases(), factors[0].columns)]

    def _empirical_extensions(self, one_sample: bool) -> list[Any]:
        (factors,) = super()._empirical_extensions(one_sample)
        by_gradients = isinstance(factors, GradientFactors)
        return [factors, GradientScales(self._bases()) if by_gradients else Scales(self._bases(), factors.columns)]

    def _bases(self) -> Mapping[Tensor, list[Tensor]]:
        return self._for_backward({p: state["bases"] for p, state in self.state.items() if state.get("bases")})

    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        scales = pop_field(param, "eigen_diagonal")
        taken = super()._take(param)
        if taken is not None and scales is not None and self._fisher() is not None:  # else no factors are chosen yet
            taken[0].append(scales)
        return taken

    def _average(self, param: Tensor, new: list[Tensor], decay: float) -> None:
        state = self.state[param]
        # scales come last; those of bases that were forgotten are of no use
        has_scales = len(new) > 1 and new[-1].shape == (param.numel(),)
        factors = len(state.get("factors", new[:-1] if has_scales else new))
        if len(new) > factors and "scales" in state:
            weight = ema_update([state["scales"]], float(state["scales_weight"]), new[factors:], decay)
            state["scales_weight"] = number(weight)
        super()._average(param, new[:factors], decay)

    def _change_basis(self, param: Tensor, old: list[Tensor], spectra: list[Tensor | None]) -> None:
        state, sizes = self.state[param], sizes_of(self.state[param]["factors"], param.shape)
        if old:
            state["scales"] = kfac_mat_prod(squared(basis_changes(state["bases"], old)), sizes)(state["scales"])
        else:
            state["scales"] = kron_diagonal([spectrum for spectrum in spectra if spectrum is not None], sizes)
            state["scales_weight"] = number(float(state["ema_weight"]))

    def _solve(self, stack: Stack, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        mean, info = self._progress["mean_curvature"].to(grad), torch.finfo(grad.dtype)
        own = {p: self.state[p]["scales"] if self.state[p]["bases"] else mean.expand(p.numel()) for p in stack.params}
        if group["relative_damping" if group["damping"] is None else "damping"] > 0:
            scales = stack.join(own)
            pieces = scales.split(numels := [p.numel() for p in stack.params])
            sums = torch._foreach_norm(pieces, 1)  # pyright: ignore[reportPrivateImportUsage]
            means = torch._foreach_div(sums, [float(max(numel, 1)) for numel in numels])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(pieces, dampings_of(group, means, mean))  # pyright: ignore[reportPrivateImportUsage]
            scales.clamp_(min=info.tiny)
        else:  # directions without curvature are left out
            filled = {p: each.masked_fill(each <= info.eps * each.max(), torch.inf) for p, each in own.items()}
            scales = stack.join(filled)
        return stack.product(stack.product(grad, transposed=True) / scales)
