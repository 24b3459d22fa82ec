"""AdamW in the eigenbasis of Kronecker-factored curvature."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from curvopt.core.products.base import Approx
from curvopt.kroneckers import kfac_mat_prod, kron_diagonal, sizes_of
from curvopt.optim.accumulation import LARGEST_JUMP
from curvopt.optim.curvature import Taken
from curvopt.optim.kfac import Fisher, Kronecker
from curvopt.optim.options import Attached, check_count
from curvopt.optim.ranks import Alone
from curvopt.optim.solve import Eigenbasis, basis_changes, squared, transposed
from curvopt.optim.stacks import Stack, by_parameter
from curvopt.optim.state import Run, curvature_of
from curvopt.optim.step import CurvatureOptimizer, Joined
from curvopt.optim.step_size import WIDE, cosine, moments, sums_of


class KroneckerOfMatrices(Kronecker):
    """Kronecker factors of matrices; vectors have diagonals, and so keep their coordinates."""

    def take(self, param: Tensor, run: Run) -> Taken | None:
        """The diagonal of a vector's dense factor."""
        taken = super().take(param, run)
        if taken is None or param.ndim > 1 or taken[0][0].ndim < 2:
            return taken
        (factor,), of_input = taken
        return [kron_diagonal([factor.diagonal(dim1=-2, dim2=-1)], sizes_of([factor], param.shape))], of_input


class MomentsInEigenbasis(Eigenbasis):
    """Keeps the moments of AdamW in the eigenbasis."""

    def forget(self, state: dict[str, Any], shape: torch.Size) -> None:
        """Moments are those of the parameter again."""
        kept = curvature_of(state)
        if kept.bases and kept.factors:
            _change_moments(state, kept.bases, sizes_of(kept.factors, shape))
        super().forget(state, shape)

    def change_basis(
        self, state: dict[str, Any], shape: torch.Size, old: list[Tensor], spectra: list[Tensor | None]
    ) -> None:
        """Transform the moments."""
        kept = curvature_of(state)
        assert kept.bases is not None and kept.factors is not None
        change = basis_changes(kept.bases, old) if old else transposed(kept.bases)
        _change_moments(state, change, sizes_of(kept.factors, shape))


def _change_moments(state: dict[str, Any], change: list[Tensor], sizes: list[int]) -> None:
    """Transform the moments of AdamW to other coordinates."""
    of_squares = squared(change)
    for name, matrices in (("exp_avg", change), ("exp_avg_sq", of_squares), ("max_exp_avg_sq", of_squares)):
        if name in state:
            value = state[name]
            flat = value.reshape(-1).to(matrices[0].dtype)
            state[name] = kfac_mat_prod(matrices, sizes)(flat).reshape(value.shape).to(value.dtype)


class KFACAdamW(CurvatureOptimizer, torch.optim.AdamW):
    """AdamW in coordinates in which parameters of a layer no longer act together.

    Adam divides each coordinate by the root of its mean squared gradient, as if no other coordinate moved. Along the
    eigenvectors of the curvature this is (nearly) right. KFACAdamW computes the eigenvectors of KFAC's two factors of
    each layer, turns the gradient into their coordinates, takes the step of AdamW there, and turns it back. Loop, param
    groups, schedulers and ``state_dict`` are those of ``torch.optim.AdamW``::

        import torch
        from curvopt.optim import KFACAdamW

        model, lossfunc = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss()
        optimizer = KFACAdamW(model)
        x, y = torch.rand(128, 64), torch.randint(10, (128,))
        for step in range(20):
            optimizer.zero_grad()
            lossfunc(model(x), y).backward()
            optimizer.step()

    **In symbols**, the coordinates of a weight ``W``, ``[out, in]``, are ``U_Bᵀ W U_A``. The columns of ``U_A``,
    ``[in, in]``, are the eigenvectors of the averaged second moment ``A`` of the layer's inputs; those of ``U_B``,
    ``[out, out]``, are the eigenvectors of the averaged curvature ``B`` of the loss with respect to its outputs, see
    `curvopt.extensions.KFAC`. The averages of AdamW are kept in these coordinates, and follow when the eigenvectors are
    renewed. SOAP (Vyas et al. 2024) takes the eigenvectors of second moments of the gradient instead; George et al.
    (2018) describe both. As in SOAP, vectors (biases, scales of norms) keep their own coordinates; so do parameters
    that the curvature does not cover.

    Coordinates whose step would go uphill, against a gradient of the batch that is more than rounding, stay where they
    are for this step, as in Liang et al. (2024, "Cautious optimizers"), but without their larger rate for the others.
    Say ``cautious=False`` for batches of one to four samples whose gradients are skewed (rare classes, heavy tails):
    there, many small gradients would hold up the momentum of few large ones, and the training would end in another
    place than the minimum.

    Weights with n > ``wide`` inputs (entries of ``param[0]``; of a stack of matrices, as ``torch.bmm`` takes it, the
    larger side of one) take ``lr * sqrt(wide / n)``: more inputs add up in an output, and usual initializations make
    such weights smaller by the root of n. So one rate serves narrow and wide layers. Yang & Hu (2021) derive how rates
    of Adam fall with the width.

    Rotated steps move all entries of a weight. Where a hook (``param.register_hook``) masks the gradient, entries that
    had none so far stay where they are. After a mask that is written as ``param.grad *= mask``, multiply the parameter
    by it after each step.

    With ``orthogonalize=True``, the step of a matrix gets about equal singular values and keeps its norm, before steps
    uphill are left out and rates of wide weights fall. So weak directions move as far as strong ones, as in Muon
    (Jordan et al. 2024), which does this to momentum. It pays for the matrices inside of a language model, and costs at
    most 15 products of a matrix with a square one. Give embeddings and the last layer a group without it::

        import torch
        from curvopt.optim import KFACAdamW

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        groups = [{"params": model[0].parameters(), "orthogonalize": True}, {"params": model[2].parameters()}]
        optimizer = KFACAdamW(groups, lr=0.02, betas=(0.9, 0.95))
        optimizer.attach(model)

    There is no damping but ``eps``, and no clip: as in Adam, ``lr`` bounds the step. A gradient of a parameter that is
    more than ten times as long as usual is shortened to that, so that one bad batch does not spoil the averages.

    Args:
        params: a model, to which the optimizer is attached, or parameters, named parameters or param groups;
            ``ema``, ``orthogonalize`` and the options of AdamW may differ between groups.
        lr: learning rate of weights with at most ``wide`` inputs, and of vectors.
        betas: decay of the averages of the gradients and their squares.
        eps: added to the root of the mean squares.
        weight_decay: as in AdamW.
        ema: decay of the averages of the factors per step, whatever the interval between refreshes.
        curvature_every: steps between refreshes of the factors, reached gradually from 1.
        inverse_every: steps between checks of the bases, reached gradually from 1.
        fisher: ``"mc"`` samples the Fisher matrix, ``"exact"`` sweeps one vector per output, ``"empirical"`` takes the
            targets of the data for samples.
        approx: how shared positions enter the factors, see `curvopt.extensions.KFAC`.
        mc_samples: samples per datum for ``fisher="mc"``, drawn from a generator of the optimizer.
        max_factor_size: larger factors are cut down to blocks on their diagonal, which cost less and need fewer
            samples; ``None`` for whole ones.
        amsgrad: as in AdamW.
        cautious: whether steps uphill are left out, see above.
        wide: number of inputs from which the rate of a weight falls, see above; ``None`` for ``lr`` everywhere.
        orthogonalize: whether steps of matrices get equal singular values, see above.
        state_dtype: ``torch.bfloat16`` keeps factors, eigenvectors and averages in it between steps, which halves
            their memory there; ``None`` for that of the parameters. It has 8 bits, so averages have to forget:
            ``betas`` and ``ema`` are at most 0.98 then.
        on_nonfinite: ``"raise"`` an error where a gradient is not finite, or ``"skip"`` the step; ``metrics()`` counts.
        maximize: as in AdamW.
        foreach: as in AdamW.
        **attached: where a model is given: ``batch_axis``, ``lossfunc``, ``scaler``, ``gradient_scale`` and
            ``loss_reduction``, as for ``attach``.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.015,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        ema: float = 0.97,
        curvature_every: int = 20,
        inverse_every: int = 20,
        fisher: Fisher = "mc",
        approx: Approx = "expand",
        mc_samples: int = 1,
        max_factor_size: int | None = 128,
        amsgrad: bool = False,
        cautious: bool = True,
        wide: int | None = WIDE,
        orthogonalize: bool = False,
        state_dtype: torch.dtype | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        **attached: Unpack[Attached],
    ) -> None:
        if not isinstance(cautious, bool):
            raise TypeError(f"cautious must be True or False, got {cautious!r}")
        if wide is not None:
            check_count("wide", wide)
        super().__init__(
            params,
            KroneckerOfMatrices(fisher, approx, mc_samples, max_factor_size, cautious=cautious, wide=wide),
            MomentsInEigenbasis(),
            {
                "ema": ema,
                "orthogonalize": orthogonalize,
                "curvature_every": curvature_every,
                "inverse_every": inverse_every,
                "state_dtype": state_dtype,
                "on_nonfinite": on_nonfinite,
            },
            attached,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, see `curvopt.optim.step.CurvatureOptimizer.add_param_group`.

        Raises:
            ValueError: also where ``state_dtype`` has too few bits for an average.
        """
        param_group.setdefault("betas", self.defaults["betas"])  # to be checked
        super().add_param_group(param_group)

    def _precondition(self, ranks: Alone, grads: dict[Tensor, Tensor], joined: Joined) -> dict[Tensor, Tensor]:
        """The gradients in the eigenbasis."""
        self._groups = [self.param_groups[i] for i, *_ in joined]
        rotated = [(stack, stack.product("rotated", flat, transposed=True)) for _, stack, flat, _ in joined]
        norms = [
            self._norms(*pair, self.param_groups[i]["betas"][1]) for (i, *_), pair in zip(joined, rotated, strict=True)
        ]
        whole = ranks.over_pieces((param for stack, _ in rotated for param in stack.params), norms, norms=True)
        self._rotated = [
            (stack, grad, self._bound(stack, grad, *each.unbind(1)))
            for (stack, grad), each in zip(rotated, whole, strict=True)
        ]
        return by_parameter(rotated, grads)

    def _norms(self, stack: Stack, grad: Tensor, decay: float) -> Tensor:
        """The root of the mean of the squares of each parameter's gradients so far, and the norm of this one."""
        norms, states = stack.norms(grad), [self.state[param] for param in stack.params]
        if not all("exp_avg_sq" in state for state in states):
            return torch.stack([torch.zeros_like(norms), norms], 1)
        ages = [1 - decay ** float(state["step"]) for state in states]
        means = torch.stack(sums_of([state["exp_avg_sq"] for state in states]))
        if len(set(ages)) == 1:  # all parameters have moved in all steps
            means = means / ages[0]
        else:
            means = torch.stack(torch._foreach_div(means.unbind(), ages))  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack([means.to(norms).sqrt(), norms], 1)

    def _bound(self, stack: Stack, grad: Tensor, usual: Tensor, norms: Tensor) -> Tensor:
        """Shorten gradients to `LARGEST_JUMP` times what is usual, as factors are, in place; return their norms.

        So one bad batch does not hold up the moments. A parameter whose gradients were zero so far is left alone.
        """
        largest = LARGEST_JUMP * usual
        if grad.is_cpu and not bool((norms > largest).any()):  # a step that reads one would wait for another device
            return norms
        factors = torch.where(usual > 0, largest / norms, 1.0).clamp(max=1.0)
        stack.scale(grad, factors)
        return norms * factors

    def _move(self, ranks: Alone, grads: dict[Tensor, Tensor], update: dict[Tensor, Tensor]) -> None:
        """The step of AdamW from zero in the eigenbasis, taken from where the parameters are."""
        params, sums = list(grads), [lambda: torch.zeros(3, device=self._device())]
        if params:
            stacks = [stack for stack, *_ in self._rotated]
            after = [stack.join("after") for stack in stacks]
            try:
                torch._foreach_zero_(params)  # pyright: ignore[reportPrivateImportUsage]
                super()._move(ranks, grads, update)
                steps = [(stack.join("grad"), grad) for stack, grad, _ in self._rotated]
                for (stack, grad, norms), (step, _), group in zip(self._rotated, steps, self._groups, strict=True):
                    for matrices in stack.matrices(step) if group.get("orthogonalize") else ():
                        matrices.copy_(orthogonalized(matrices))
                    if self._quantity.options["cautious"]:
                        product = stack.without_rounding("scratch", grad, norms).mul_(step)
                        step *= product.ge_(0) if group["maximize"] else product.le_(0)
                for stack, (step, _) in zip(stacks, steps, strict=True):
                    for piece, more in stack.wide(step, self._quantity.options["wide"]):
                        piece *= more**-0.5
                sums = [moments(*pair) for pair in steps]
                for stack, (step, _), flat in zip(stacks, steps, after, strict=True):
                    change = stack.product("rotated", step)
                    self._hold_masked(stack, change, grads)
                    flat += change
            finally:
                for stack, flat in zip(stacks, after, strict=True):
                    torch._foreach_copy_(stack.params, stack.split(flat))  # pyright: ignore[reportPrivateImportUsage]
            self._rotated = []
        self._measured = partial(_measured, self._over_owners(ranks, sums), self._run.step_weight)

    def _hold_masked(self, stack: Stack, step: Tensor, grads: dict[Tensor, Tensor]) -> None:
        """Leave entries where they are for which hooks of their parameter left no gradient so far."""
        if not any(param._backward_hooks for param in stack.params):
            return
        for param, piece in zip(stack.params, stack.split(step), strict=True):
            if param._backward_hooks:
                state, moves = self.state[param], grads[param] != 0
                state["moves"] = torch.logical_or(state["moves"], moves) if "moves" in state else moves
                piece *= state["moves"]


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices ``[n, d, e]`` of the same norms whose singular values are about equal.

    Five Newton-Schulz iterations with the coefficients of Muon (Jordan et al. 2024) bring all singular values that are
    not tiny beside the norm near to 1, within some tenths, and keep the singular vectors.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalized(matrices.mT).mT
    least = torch.finfo(matrices.dtype).tiny
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = matrices / norms.clamp(min=least)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x * (norms / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=least))


def _measured(total: Callable[[], Tensor], weight: Tensor) -> dict[str, Any]:
    """The metrics of a step, by its `moments`."""
    ug, uu, gg = total()
    return {"step_norm": uu.sqrt(), "grad_norm": gg.sqrt() / weight.to(gg), "cosine": cosine(-ug, uu, gg)}
