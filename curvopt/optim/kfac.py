"""Optimizers on gradients preconditioned by Kronecker-factored curvature.

`KFACSGD` solves by inverses of the factors (Martens & Grosse 2015), `EKFACSGD` in their eigenbasis (George et al.
2018), and `KFACPreconditioner` solves for any optimizer of torch.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partialmethod
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from curvopt.core.losses.roots import Empirical
from curvopt.core.products.base import Approx
from curvopt.core.products.costs import even_share
from curvopt.errors import CurvoptError
from curvopt.extensions import KFAC, KFLR, KFACEmpirical
from curvopt.kroneckers import kfac_mat_prod, kron_diagonal, sizes_of
from curvopt.optim.accumulation import Collected, Move, number, pop_field
from curvopt.optim.curvature import Curvature, Quantity, Taken
from curvopt.optim.empirical import GradientFactors, GradientScales, Scales
from curvopt.optim.options import Attached
from curvopt.optim.ranks import Alone
from curvopt.optim.solve import Eigenbasis, Inverse, Solver, States, basis_changes, squared
from curvopt.optim.stacks import Stack
from curvopt.optim.state import ParameterCurvature, Run, curvature_of
from curvopt.optim.step import CurvatureOptimizer, Overflow
from curvopt.optim.step_size import dampings_of, sums_of

Fisher = Literal["mc", "exact", "empirical"]
#: A number that is kept costs as much as so many multiplications.
KEPT = 128
_FIELDS = {"mc": "kfac", "exact": "kflr", "empirical": "kfac_empirical"}


class Kronecker(Quantity):
    """The Kronecker factors of the Fisher (or GGN) matrix.

    Args:
        fisher: which matrix; ``None`` to choose by the first refresh.
        approx: how shared positions enter the factors, see `curvopt.extensions.KFAC`.
        mc_samples: samples per datum.
        max_factor_size: larger factors are cut down to blocks.
        **more: other options of the optimizer that are no numbers of a run.
    """

    def __init__(
        self, fisher: Fisher | None, approx: Approx, mc_samples: int, max_factor_size: int | None, **more: Any
    ):
        if fisher not in (None, "mc", "exact", "empirical"):
            raise ValueError(f'fisher must be "mc", "exact", "empirical" or None, got {fisher!r}')
        KFAC(mc_samples, approx, max_factor_size=max_factor_size)  # checks the others
        self.fisher: Fisher | None = fisher
        self.approx: Approx = approx
        self.mc_samples, self.max_factor_size = mc_samples, max_factor_size
        self.options = {
            "fisher": fisher,
            "approx": approx,
            "mc_samples": mc_samples,
            "max_factor_size": max_factor_size,
            **more,
        }
        self.prefers_empirical = fisher in (None, "empirical")

    def chosen(self, run: Run) -> Fisher | None:
        """The kind of factors; ``None`` before the first refresh has chosen."""
        return self.fisher or {None: None, True: "empirical", False: "mc"}[run.several]

    def extensions(self, curvature: Curvature) -> list[Any]:
        """One kind of factors, or two that the first refresh chooses from."""
        fisher = self.chosen(curvature.run)
        if fisher == "exact":
            return [KFLR(self.approx, self.max_factor_size)]
        sampler = curvature.sampler()
        kinds = {
            "mc": KFAC(self.mc_samples, self.approx, sampler, self.max_factor_size),
            "empirical": self._empirical(sampler, scaled=self.fisher is None),
        }
        return [*kinds.values()] if fisher is None else [kinds[fisher]]

    def empirical(self, curvature: Curvature, one_sample: bool) -> list[Any]:
        """Factors of the samples' gradients, or of the predictions' with random signs."""
        if one_sample:
            return [self._empirical(curvature.sampler(), scaled=False)]
        return [GradientFactors(self.approx, self.max_factor_size)]

    def _empirical(self, sampler: torch.Generator, scaled: bool) -> KFACEmpirical:
        """The factors of the predictions' gradients, ``scaled`` in units of the curvature of the loss."""
        extension = KFACEmpirical(self.approx, self.max_factor_size)
        extension.columns = Empirical(sampler, scaled=scaled)
        return extension

    def take(self, param: Tensor, run: Run) -> Taken | None:
        """The factors; of both kinds that there is a choice from, the factor of the outputs."""
        chosen = self.chosen(run)
        fisher = "empirical" if run.empirical else chosen
        factors = pop_field(param, _FIELDS[fisher or "mc"])
        if factors is None:
            return None
        of_input = None if len(factors) == 1 else 0 if factors.transposed else 1
        if chosen is None:
            other = factors if fisher == "empirical" else pop_field(param, _FIELDS["empirical"])
            # slopes have factors of a single vector, and a block of several
            same = len(other) == len(factors)
            return [*factors, (other if same else factors)[_of_output(of_input)]], of_input
        return list(factors), of_input

    def settle(
        self,
        accepted: dict[Tensor, list[Tensor]],
        known: Set[Tensor],
        collected: Collected,
        run: Run,
        ranks: Alone,
    ) -> dict[Tensor, list[Tensor]]:
        """Choose the kind of factors by the number of variables of a prediction.

        Several may err together, which samples of the model do not know, but the samples' own gradients do. Of a single
        one they say nothing but the size of the residual.
        """
        if self.chosen(run) is not None:
            return accepted
        run.several = several = run.variables > 1
        settled = {}
        for param, (*factors, empirical) in accepted.items():
            if several:
                factors[_of_output(collected.curvature[param].of_input)] = empirical
            settled[param] = factors
        return settled

    def cost(self, param: Tensor, inverse_every: int) -> int:
        """Products with inverses in each step, the inverses themselves now and then, and the numbers that are kept."""
        sizes = (param.numel(),) if param.ndim < 2 else (param.shape[0], param.numel() // max(1, param.shape[0]))
        blocks = [(d, d if self.max_factor_size is None else min(d, self.max_factor_size)) for d in sizes]
        kept = param.numel() + sum(d * b for d, b in blocks)
        return sum(b * (param.numel() + d * b // inverse_every) for d, b in blocks) + KEPT * kept + 1

    def rows_together(self, param: Tensor) -> int:
        """The rows of a block."""
        rows = max(1, param.shape[0])
        return max(super().rows_together(param), even_share(rows, self.max_factor_size or rows))


def _of_output(of_input: int | None) -> int:
    """Index of the factor of the outputs, by that of the input's."""
    return 1 if of_input == 0 else 0


class KroneckerSGD(CurvatureOptimizer, torch.optim.SGD):
    """SGD by Kronecker factors: the options of `KFACSGD` and `EKFACSGD`, which differ in how they solve."""

    _quantity_of: type[Kronecker] = Kronecker
    _solver_of: type[Solver]

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
        super().__init__(
            params,
            self._quantity_of(fisher, approx, mc_samples, max_factor_size),
            self._solver_of(),
            {
                "damping": damping,
                "relative_damping": relative_damping,
                "ema": ema,
                "rms_clip": rms_clip,
                "curvature_every": curvature_every,
                "inverse_every": inverse_every,
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


class KFACSGD(KroneckerSGD):
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

    _solver_of = Inverse


class KroneckerAndScales(Kronecker):
    """Kronecker factors, and the diagonal of the matrix in the eigenbases of earlier ones."""

    def extensions(self, curvature: Curvature) -> list[Any]:
        """The factors, and the scales with the vectors of the first."""
        factors = super().extensions(curvature)
        return [*factors, Scales(curvature.bases(), factors[0].columns)]

    def empirical(self, curvature: Curvature, one_sample: bool) -> list[Any]:
        """Both of gradients."""
        (factors,) = super().empirical(curvature, one_sample)
        bases = curvature.bases()
        by_gradients = isinstance(factors, GradientFactors)
        return [factors, GradientScales(bases) if by_gradients else Scales(bases, factors.columns)]

    def take(self, param: Tensor, run: Run) -> Taken | None:
        """Scales come last."""
        scales = pop_field(param, "eigen_diagonal")
        taken = super().take(param, run)
        if taken is not None and scales is not None and self.chosen(run) is not None:
            taken[0].append(scales)
        return taken

    def average(self, param: Tensor, kept: ParameterCurvature, new: list[Tensor], decay: float) -> list[Move]:
        """Scales of bases that were forgotten are of no use."""
        has_scales = len(new) > 1 and new[-1].shape == (param.numel(),)
        factors = len(kept.factors or (new[:-1] if has_scales else new))
        moves: list[Move] = []
        if len(new) > factors and kept.scales is not None and kept.scales_weight is not None:
            kept.scales_weight = number(weight := decay * float(kept.scales_weight) + 1)
            moves = [(kept.scales, new[factors], 1 / weight)]
        return moves + super().average(param, kept, new[:factors], decay)


class ScaledEigenbasis(Eigenbasis):
    """Divides by damped scales in the eigenbasis."""

    def change_basis(
        self, state: dict[str, Any], shape: torch.Size, old: list[Tensor], spectra: list[Tensor | None]
    ) -> None:
        """Transform the scales, or begin with the products of eigenvalues."""
        kept = curvature_of(state)
        assert kept.factors is not None and kept.bases is not None and kept.ema_weight is not None
        sizes = sizes_of(kept.factors, shape)
        if old:
            assert kept.scales is not None
            kept.scales = kfac_mat_prod(squared(basis_changes(kept.bases, old)), sizes)(kept.scales)
        else:
            kept.scales = kron_diagonal([spectrum for spectrum in spectra if spectrum is not None], sizes)
            kept.scales_weight = number(float(kept.ema_weight))

    def means(self, params: Sequence[Tensor], states: States, ranks: Alone) -> Mapping[Tensor, Tensor]:
        """The means of the scales."""
        of = {p: scales for p in params if (scales := curvature_of(states[p]).scales) is not None}
        numels = [float(max(p.numel(), 1)) for p in of]
        means = torch._foreach_div(sums_of([*of.values()]), numels) if of else []  # pyright: ignore[reportPrivateImportUsage]
        return dict(zip(of, ranks.over_pieces(of, means, numels), strict=True))

    def solve(
        self,
        stack: Stack,
        grad: Tensor,
        group: Mapping[str, Any],
        states: States,
        mean_curvature: Tensor,
        means: Mapping[Tensor, Tensor],
    ) -> Tensor:
        """To the eigenbasis, divided there, and back."""
        mean, info = mean_curvature.to(grad), torch.finfo(grad.dtype)
        kept = {p: curvature_of(states[p]) for p in stack.params}
        of = {
            p: mean.expand(p.shape) if not k.bases or k.scales is None else k.scales.view(p.shape)
            for p, k in kept.items()
        }
        if group["relative_damping" if group["damping"] is None else "damping"] > 0:
            scales = stack.join("scales", of)
            dampings = dampings_of(group, [means.get(p, mean) for p in stack.params], mean)
            torch._foreach_add_(scales.split(stack.numels), dampings)  # pyright: ignore[reportPrivateImportUsage]
            scales.clamp_(min=info.tiny)
        else:  # directions without curvature are left out
            of = {p: each.masked_fill(each <= info.eps * each.max(), torch.inf) for p, each in of.items()}
            scales = stack.join("scales", of)
        return stack.product("update", stack.product("rotated", grad, transposed=True).div_(scales))


class EKFACSGD(KroneckerSGD):
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

    _quantity_of = KroneckerAndScales
    _solver_of = ScaledEigenbasis
    __init__ = partialmethod(KroneckerSGD.__init__, curvature_every=10, inverse_every=10)  # pyright: ignore[reportAssignmentType]


class _NoStep(torch.optim.Optimizer):
    """Takes no step; another optimizer does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nothing."""


class KroneckerWithoutBound(Kronecker):
    """Kronecker factors for steps of any length, which diverge where curvature is old or of few draws."""

    draws_of_one_sample = 8
    growth = 1


class KFACPreconditioner(CurvatureOptimizer, _NoStep):
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
            none, as optimizers want whose step does not depend on the gradient's length (Adam, Muon). Say 0.015 where
            a bad batch may come, which would spoil the moments of the other optimizer for long.
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
        super().__init__(
            model,
            KroneckerWithoutBound(fisher, approx, mc_samples, max_factor_size),
            Inverse(),
            {
                "damping": damping,
                "ema": ema,
                "rms_clip": rms_clip,
                "curvature_every": curvature_every,
                "inverse_every": inverse_every,
            },
            attached,
            defaults={"lr": 1.0},  # schedulers want one
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Exchange the gradients; see `curvopt.optim.step.CurvatureOptimizer.step`."""
        curvature = self._curvature
        if closure is None and curvature.versions not in ([], [param._version for param in self._params()]):
            self._say(
                "order",
                "comes after the step that it is for: parameters have changed since the backward. Call "
                "preconditioner.step() before optimizer.step().",
            )
        curvature.versions = []
        if isinstance(curvature.scaler, torch.amp.GradScaler) and curvature.scaler.is_enabled():
            stages = [state["stage"] for state in curvature.scaler._per_optimizer_states.values()]
            if OptState.UNSCALED not in stages:
                raise CurvoptError(
                    "KFACPreconditioner.step(): the gradients still have the scale of the GradScaler; call "
                    "scaler.unscale_(optimizer) before preconditioner.step()."
                )
        try:
            return super().step(closure)
        except Overflow:
            if curvature.scaler is None or not getattr(curvature.scaler, "is_enabled", lambda: True)():
                raise
