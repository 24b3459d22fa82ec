"""Checking fields against slow, plain autograd, on a model of one's own: `check`.

`Reference` defines every field densely, from derivatives that the engine has no part in. The tests of this package
use it on small networks; `check` uses what of it is affordable on real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.func import functional_call

from curvopt.core.context import backpack
from curvopt.core.jacobians import DENSE_BLOCK_LIMIT
from curvopt.core.sweep import Empirical, Exact, Gradient, Hessian, MonteCarlo
from curvopt.core.uses import disable, extend
from curvopt.errors import CurvoptError
from curvopt.extensions import PCHMP, BatchL2Grad, EigenDiagonal, Extension, SqrtGGNExact, SqrtGGNMC
from curvopt.kroneckers import kfac_mat_prod, sizes_of

#: Numbers that the Jacobian of a checked model may have: samples times outputs times parameters (8 GB in float64).
JACOBIAN_LIMIT = 1 << 30


def jacobian(outputs: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives ``[outputs.numel(), *input]`` by one backward pass per output; zeros where there is no path."""
    rows = [torch.autograd.grad(z, inputs, retain_graph=True, materialize_grads=True) for z in outputs.flatten()]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Hessian ``[at.numel(), at.numel()]`` of a scalar function by one double backward pass per row."""
    at = at.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(at), at, create_graph=True)
    if not gradient.requires_grad:
        return at.new_zeros(at.numel(), at.numel())
    return jacobian(gradient, [at])[0].flatten(1).detach()


# layers that multiply patches of their input by a matrix, with the dimension of their output that holds its rows
CHANNELS = {nn.Linear: -1, nn.Bilinear: -1, nn.Conv1d: 1, nn.Conv2d: 1, nn.Conv3d: 1}


def affine_type(module: nn.Module) -> type[nn.Module] | None:
    """The known affine layer that ``module`` computes, or nothing."""
    return next((kind for kind in CHANNELS if type(module).forward is kind.forward), None)


def by_position(module: nn.Module, output: Tensor) -> Tensor:
    """A layer's output, or what it is derived by, as ``[G, positions of the whole batch, O / G]``."""
    kind = affine_type(module)
    assert kind is not None
    groups = getattr(module, "groups", 1)
    last = output.movedim(CHANNELS[kind], -1)
    return last.reshape(-1, groups, last.shape[-1] // groups).movedim(1, 0)


def patches(module: nn.Module, *inputs: Tensor) -> Tensor:
    """What the weight of an affine layer is multiplied by, ``[G, positions of the whole batch, I]``.

    Entry i is what an output of the layer returns when its row of the weight matrix selects the i-th entry.
    """
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    groups, size = getattr(module, "groups", 1), weight[0].numel()
    outputs = len(weight) // groups
    columns = []
    for start in range(0, size, outputs):
        selector = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        count = min(outputs, size - start)
        rows = selector.view(groups, outputs, size)[:, :count, start : start + count]
        rows.diagonal(dim1=1, dim2=2).fill_(1.0)
        parameters = {"weight": selector} if bias is None else {"weight": selector, "bias": torch.zeros_like(bias)}
        columns.append(by_position(module, functional_call(module, parameters, inputs))[:, :, :count])
    return torch.cat(columns, dim=2)


class Reference:
    """Slow, dense definitions of every field for one batch, by name of the parameter.

    All of them come from two matrices at the output ``z = model(x)`` with all its entries in a row: the Jacobian ``J``
    of ``z`` with respect to a parameter, and the gradient and Hessian ``H`` of the loss with respect to ``z``. The
    entries of ``z`` are divided evenly among the samples in order, so the n-th part of the gradient is
    ``g_n = J_n^T dloss/dz_n`` whatever normalizer the loss uses, and the generalized Gauss-Newton matrix is
    ``J^T H J``. The Hessian has the second derivatives of ``z``, weighted by ``dloss/dz``, besides.

    Args:
        model: A model. Its output is ordered by sample: all of the first comes first.
        x: Input of the model.
        loss: The scalar that is differentiated, as a function of the model's output.
        samples: Number of samples, by default the length of ``x``.
    """

    def __init__(self, model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], samples: int | None = None):
        self.x, self.samples = x, len(x) if samples is None else samples
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._owners = {
            name: module
            for name, p in self.parameters.items()
            for module in model.modules()
            if affine_type(module) is not None and module.weight is p
        }
        self._calls: list[tuple[nn.Module, list[Tensor], Tensor]] = []

        def record(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            self._calls.append((module, [x.detach() for x in (*args, *kwargs.values())], output))
            return output.clone()  # the next operation may overwrite it in place

        handles = [m.register_forward_hook(record, with_kwargs=True) for m in set(self._owners.values())]
        with disable():
            z = model(x)
        for handle in handles:
            handle.remove()

        self.z, self._graph, self._loss = z.detach(), z, loss
        self.gradient_of_output = torch.autograd.functional.jacobian(loss, self.z).flatten()
        self._second: dict[str, Tensor] = {}

    @cached_property
    def H(self) -> Tensor:
        """Hessian of the loss with respect to the output, ``[z.numel(), z.numel()]``."""
        return hessian(self._loss, self.z)

    @cached_property
    def J(self) -> dict[str, Tensor]:
        """Jacobians ``[z.numel(), *p]``, by one backward pass for each entry of the output."""
        return dict(zip(self.parameters, jacobian(self._graph, list(self.parameters.values())), strict=True))

    @cached_property
    def _uses(self) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Module, patches ``[G, R, I]``, and derivatives of z by the output ``[z.numel(), G, R, O / G]``."""
        derivatives = jacobian(self._graph, [output for _, _, output in self._calls])
        with disable():
            return [
                (module, patches(module, *inputs).detach(), torch.stack([by_position(module, d) for d in derivative]))
                for (module, inputs, _), derivative in zip(self._calls, derivatives, strict=True)
            ]

    # ------------------------------------------------------------------------------------------------------ first order

    @cached_property
    def _gradients(self) -> dict[str, Tensor]:
        """Gradients per sample, by one backward pass for each."""
        gradients = []
        for n in range(self.samples):
            own = torch.zeros_like(self.z).reshape(self.samples, -1)
            own[n] = self.gradient_of_output.view(self.samples, -1)[n]
            gradients.append(
                torch.autograd.grad(
                    self._graph,
                    list(self.parameters.values()),
                    own.reshape(self.z.shape),
                    retain_graph=True,
                    materialize_grads=True,
                )
            )
        return dict(zip(self.parameters, map(torch.stack, zip(*gradients, strict=True)), strict=True))

    def grad(self, name: str) -> Tensor:
        """The gradient."""
        return self.grad_batch(name).sum(0)

    def grad_batch(self, name: str) -> Tensor:
        """Gradients per sample, ``[N, *p]``."""
        return self._gradients[name]

    def batch_l2(self, name: str) -> Tensor:
        """Squared norms of the gradients per sample, ``[N]``."""
        return self.grad_batch(name).reshape(self.samples, -1).square().sum(1)

    def sum_grad_squared(self, name: str) -> Tensor:
        """Sum over samples of the squared gradients."""
        return self.grad_batch(name).square().sum(0)

    def variance(self, name: str) -> Tensor:
        """Variance over samples of the gradients."""
        return self.grad_batch(name).var(0, unbiased=False)

    # ----------------------------------------------------------------------------------------------------- second order

    def ggn(self, name: str) -> Tensor:
        """The block of the generalized Gauss-Newton matrix, ``[p.numel(), p.numel()]``."""
        J = self.J[name].reshape(len(self.H), -1)
        return J.T @ self.H @ J

    def ggn_batch(self, name: str) -> Tensor:
        """Blocks of the generalized Gauss-Newton matrices per sample, ``[N, p.numel(), p.numel()]``."""
        J = self.J[name].reshape(self.samples, -1, self.parameters[name].numel())
        return einsum("ncp,ncd,ndq->npq", J, self._H_batch, J)

    def ggn_product(self, name: str, v: Tensor, samples: Sequence[int] | None = None) -> Tensor:
        """The block of some samples' (all samples') GGN applied to ``[V, *p]`` directions."""
        chosen = list(range(self.samples) if samples is None else samples)
        J = self.J[name].reshape(self.samples, -1, self.parameters[name].numel())[chosen]
        return einsum("ncp,ncd,ndq,vq->vp", J, self._H_batch[chosen], J, v.reshape(len(v), -1)).reshape(v.shape)

    @property
    def _H_batch(self) -> Tensor:
        """Each sample's part of the Hessian with respect to the output, ``[N, C, C]``."""
        return self.H.view(*2 * (self.samples, len(self.H) // self.samples)).diagonal(dim1=0, dim2=2).movedim(2, 0)

    def diag_ggn_exact_batch(self, name: str) -> Tensor:
        """Diagonals of the generalized Gauss-Newton matrices per sample, ``[N, *p]``."""
        J = self.J[name].unflatten(0, (self.samples, -1))
        return einsum("nc...,ncd,nd...->n...", J, self._H_batch, J)

    def diag_ggn_exact(self, name: str) -> Tensor:
        """Diagonal of the generalized Gauss-Newton matrix."""
        return self.diag_ggn_exact_batch(name).sum(0)

    def _curved(self, term: Tensor) -> dict[str, Tensor]:
        """Gradients of ``term`` that can be differentiated; without a path the (zero) gradient stands alone."""
        parameters = list(self.parameters.values())
        gradients = torch.autograd.grad(term, parameters, create_graph=True, materialize_grads=True)
        return dict(zip(self.parameters, gradients, strict=True))

    @property
    def _terms(self) -> Tensor:
        """What second derivatives of z contribute, sample by sample: the output weighted by a fixed gradient."""
        return (self.gradient_of_output * self._graph.flatten()).view(self.samples, -1).sum(1)

    def hessian_batch(self, name: str) -> Tensor:
        """Blocks of the Hessians of the samples' terms of the loss, ``[N, p.numel(), p.numel()]``."""
        if not self._second:
            blocks: dict[str, list[Tensor]] = {other: [] for other in self.parameters}
            for term in self._terms:
                for other, g in self._curved(term).items():
                    p = self.parameters[other]
                    none = p.new_zeros(2 * [p.numel()])
                    blocks[other].append(jacobian(g, [p])[0].reshape(none.shape) if g.requires_grad else none)
            self._second = {other: torch.stack(block) for other, block in blocks.items()}
        return self._second[name] + self.ggn_batch(name)

    def hessian(self, name: str) -> Tensor:
        """The block of the Hessian, ``[p.numel(), p.numel()]``."""
        return self.hessian_batch(name).sum(0)

    def diag_h_batch(self, name: str) -> Tensor:
        """Diagonals of the Hessians per sample, ``[N, *p]``."""
        return self.hessian_batch(name).diagonal(dim1=1, dim2=2).reshape(-1, *self.parameters[name].shape)

    def diag_h(self, name: str) -> Tensor:
        """Diagonal of the Hessian."""
        return self.diag_h_batch(name).sum(0)

    def diag_h_entries(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        """Some entries ``[K]`` of every parameter of `diag_h_batch`, ``[N, K]``, by a double backward pass for each."""
        found = {}
        for name, chosen in entries.items():
            J = self.J[name].reshape(self.samples, -1, self.parameters[name].numel())[:, :, chosen]
            found[name] = einsum("nck,ncd,ndk->nk", J, self._H_batch, J)
        for n, term in enumerate(self._terms):
            for name, g in self._curved(term).items():
                if g.requires_grad:
                    for k, entry in enumerate(entries[name].tolist()):
                        (row,) = torch.autograd.grad(
                            g.flatten()[entry], self.parameters[name], retain_graph=True, materialize_grads=True
                        )
                        found[name][n, k] += row.flatten()[entry]
        return found

    def hessian_products(self, directions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Blocks of the Hessian applied to ``[V, *p]`` directions, by a double backward pass for each."""
        products = {}
        for name, g in self._curved(self._terms.sum()).items():
            product = self.ggn_product(name, directions[name])
            if g.requires_grad:
                p = self.parameters[name]
                rows = [
                    torch.autograd.grad(g, p, v, retain_graph=True, materialize_grads=True)[0] for v in directions[name]
                ]
                product = product + torch.stack(rows)
            products[name] = product
        return products

    def has_factors(self, name: str) -> bool:
        """Whether `kflr` has both Kronecker factors: the weight of an affine layer, used by such layers only."""
        if name not in self._owners:
            return False
        uses = [use for use in self._uses if use[0].weight is self.parameters[name]]
        J = self.J[name]
        explained = sum((einsum("cgro,gri->cgoi", D, x).reshape(J.shape) for _, x, D in uses), torch.zeros_like(J))
        return torch.allclose(explained, J, rtol=1e-3, atol=1e-3 * float(J.abs().max()))

    def kflr(self, name: str, approx: str = "expand") -> list[Tensor]:
        """Kronecker factors: ``[B, A]`` of weights of affine layers, else the whole block of the matrix."""
        if name not in self._owners:
            return [self.ggn(name)]
        uses = [use for use in self._uses if use[0].weight is self.parameters[name]]
        if approx == "reduce":  # all positions of a sample, those of several uses included, are one
            x = torch.cat([x.unflatten(1, (self.samples, -1)) for _, x, _ in uses], dim=2).mean(2)
            D = sum(
                (D.unflatten(2, (self.samples, -1)).sum(3) for _, _, D in uses[1:]),
                start=uses[0][2].unflatten(2, (self.samples, -1)).sum(3),
            )
        else:
            x = torch.cat([x for _, x, _ in uses], dim=1)
            D = torch.cat([D for _, _, D in uses], dim=2)
        B = einsum("cgro,cd,dgrp->gop", D, self.H, D).contiguous()
        A = einsum("gri,grj->gij", x, x) / x.shape[1]
        return [B[0], A[0]] if len(A) == 1 else [B, A]

    def kfra(self, chain: Sequence[nn.Module]) -> dict[str, list[Tensor]]:
        """Kronecker factors by name, from a matrix averaged over the samples at the output of every module of a chain.

        What several uses of a parameter contribute is summed on the left and averaged on the right.
        """
        with disable():
            return self._kfra(chain)

    def _kfra(self, chain: Sequence[nn.Module]) -> dict[str, list[Tensor]]:
        inputs = [self.x.detach()]
        for module in chain:
            inputs.append(module(inputs[-1].clone()).detach())  # an activation may overwrite its input
        H = self._H_batch.sum(0)
        lefts: dict[str, list[Tensor]] = {}
        rights: dict[str, list[Tensor]] = {}
        for module, x, y in reversed(list(zip(chain, inputs, inputs[1:], strict=False))):
            if affine_type(module) is not None:
                eigenvalues, eigenvectors = torch.linalg.eigh(H)
                root = (eigenvectors * eigenvalues.clamp(min=0).sqrt()).T.reshape(-1, 1, *y.shape[1:])
                left = torch.stack([by_position(module, column) for column in root])  # [V, G, R, O / G]
                right = patches(module, x).detach()
                sums = left.sum(2).flatten(1)
                for name, p in self.parameters.items():
                    if p is module.weight:
                        lefts.setdefault(name, []).append(einsum("vgro,vgrp->gop", left, left))
                        rights.setdefault(name, []).append(einsum("gri,grj->gij", right, right) / right.shape[1])
                    elif p is module.bias:
                        lefts.setdefault(name, []).append((sums.T @ sums)[None])
            pulled = []
            for at in x.split(1):
                at = at.clone().requires_grad_()
                J = jacobian(module(at.clone()), [at])[0].flatten(1)
                pulled.append(J.T @ H @ J)
            H = torch.stack(pulled).mean(0)
        factors = {name: [torch.stack(B).sum(0)] for name, B in lefts.items()}
        for name, A in rights.items():
            factors[name].append(torch.stack(A).mean(0))
        return {name: [f[0] if len(f) == 1 else f for f in both] for name, both in factors.items()}


# ---------------------------------------------------------------------------------------------------------------- check


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        parameter: path of the parameter, or ``loss`` for the draws of Monte-Carlo fields.
        field: name of the field.
        absolute: largest difference of an entry; in standard errors for draws.
        relative: the same in units of the largest entry of the expected field.
        verdict: ``"ok"``, ``"WRONG"`` or ``"not checked"``.
        note: what was compared, or why not.
    """

    parameter: str
    field: str
    absolute: float | None
    relative: float | None
    verdict: str
    note: str = ""


@dataclass
class CheckResult:
    """What `check` found; ``str()`` is the table.

    Attributes:
        title: what was checked.
        rows: a row for each parameter and field.
    """

    title: str
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """Rows that disagree."""
        return [row for row in self.rows if row.verdict == "WRONG"]

    @property
    def unchecked(self) -> list[Row]:
        """Rows for which there is no independent definition."""
        return [row for row in self.rows if row.verdict == "not checked"]

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing disagrees."""
        return not self.wrong and len(self.unchecked) < len(self.rows)

    def __str__(self) -> str:
        cells = [("parameter", "field", "max abs", "max rel", "verdict")]
        for row in self.rows:
            numbers = ["" if number is None else f"{number:.1e}" for number in (row.absolute, row.relative)]
            verdict = f"{row.verdict}: {row.note}" if row.note else row.verdict
            cells.append((row.parameter, row.field, numbers[0], numbers[1], verdict))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if i in (2, 3) else text.ljust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        agree = len(self.rows) - len(self.wrong) - len(self.unchecked)
        counts = f"{agree} agree, {len(self.wrong)} WRONG, {len(self.unchecked)} not checked"
        return "\n".join([self.title, "", lines[0], "-" * sum(widths, 8), *lines[1:], "", counts])


class _Unchecked(Exception):  # noqa: N818 - no error
    """Why there is nothing to compare with."""


def check(
    model: nn.Module,
    lossfunc: Callable[[Tensor, Any], Tensor],
    x: Tensor,
    y: Any,
    extensions: Sequence[Extension],
    *,
    raises: bool = False,
    dtype: torch.dtype = torch.float64,
    rtol: float | None = None,
    entries: int = 10,
) -> CheckResult:
    """Compare fields with slow, plain autograd on a model of one's own, and print a table.

    The fields are computed as in ``with backpack(*extensions): lossfunc(model(x), y).backward()``, and once more from
    their definition by derivatives of single outputs, in which the engine has no part. Both work on copies in
    ``dtype`` with the same random numbers; model and random state stay as they are.

    Sampled fields are checked in two steps that together determine their mean: all that happens to the samples is done
    to the exact columns instead and compared with the exact field, and the second moment of 256 to 4096 draws is
    compared with the Hessian of the loss, in standard errors (at an output scaled into ``[-2, 2]``, where draws
    of a confident network vary). Diagonals of the Hessian are compared at ``entries`` random entries of each
    parameter; matrix products and roots by their action on three random directions. ``pchmp`` depends on how the
    network is divided into operations, so no plain derivative defines it: with nothing replaced it is compared with
    the Hessian, and as it is it must lie above both Hessian and GGN along these directions. ``kfac_empirical`` is
    built from the gradients of single predictions, of which the weights in the loss are those that the engine knows.

    The cost, for N samples with C outputs each and P parameters: N backward passes for fields of individual gradients;
    N C passes and N C P numbers of memory for all else; for Hessian diagonals N · ``entries`` double backward passes
    for each parameter tensor. So take few samples, and the smallest inputs that show what is to be shown.

    Args:
        model: the model, extended or not. Its output is a tensor, ordered by sample.
        lossfunc: called as ``lossfunc(output, y)``; extended or not, a loss of one's own with ``loss=True``. Terms
            that see parameters (regularizers) have no place in it: to the copies they are constants.
        x: the model's input.
        y: the target.
        extensions: what to check.
        raises: raise if a field is wrong.
        dtype: the precision to check in. In float32 algorithms differ visibly near the kinks of ReLU and max-pooling.
        rtol: admitted difference in units of the largest entry of a field; by default 1e-6 in float64, else 1e-2.
        entries: number of entries of each parameter at which Hessian diagonals are compared.

    Returns:
        The rows of the table; ``result.ok`` tells whether all agree.

    Raises:
        CurvoptError: for what cannot be checked: no definition of the field is known, samples depend on each other,
            a second forward pass has another output, the Jacobian has more than `JACOBIAN_LIMIT` numbers; whatever
            the engine refuses; wrong fields, if ``raises``.
    """
    _check_request(model, x, extensions)
    rtol = (1e-6 if dtype == torch.float64 else 1e-2) if rtol is None else rtol
    x, y = (t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in (x, y))
    ours, theirs = (copy.deepcopy(model).to(dtype) for _ in range(2))
    ours.zero_grad()
    if isinstance(lossfunc, nn.Module):
        lossfunc = extend(copy.deepcopy(lossfunc).to(dtype))
    # all but the draws of Monte-Carlo extensions, and the eigenvalues of PCHMP: other columns take their way
    twins = [copy.copy(extension) for extension in extensions]
    for twin in twins:
        if isinstance(twin.columns, MonteCarlo):
            twin.columns = Exact()
        if isinstance(twin, PCHMP):
            twin.columns = Hessian()
        if isinstance(twin, EigenDiagonal):
            bases: dict[Tensor, list[Tensor]] = {}
            for p, own in zip(model.parameters(), ours.parameters(), strict=True):
                if p in twin.bases:
                    bases[own] = [basis.to(own) for basis in twin.bases[p]]
            twin.bases = bases

    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            z = extend(ours)(x)
        except RuntimeError as error:
            raise CurvoptError(
                f"check: the model does not run in {dtype} ({error}); make it independent of the precision, or "
                "pass dtype=torch.float32."
            ) from error
        _check_one_tensor(z, "output", "puts its outputs together")
        if not z.requires_grad:
            raise CurvoptError(
                "check: the output depends on no parameter that requires a gradient; call model.requires_grad_(), "
                "outside of torch.no_grad()."
            )
        loss = lossfunc(z, y)
        if loss.numel() != 1:
            raise CurvoptError(
                f"check: the loss has shape {list(loss.shape)}, but fields are those of a scalar; build it with "
                "reduction='mean' or 'sum'."
            )
        samples = _samples(ours, loss)
        parameters = {name: p for name, p in ours.named_parameters() if p.grad is not None}
        ours.zero_grad()
        if any(not isinstance(e.columns, Gradient) for e in extensions):
            _check_size(z.numel() * sum(p.numel() for p in parameters.values()), samples)
        with backpack(*twins):
            loss.backward(inputs=list(parameters.values()), retain_graph=True)
        torch.manual_seed(0)
        reference = Reference(theirs, x, lambda z: _scalar(lossfunc, z, y), samples)
        _check_reference(reference, z)
        result = CheckResult(
            f"curvopt.testing.check: {type(model).__name__}, {samples} samples with {z.numel() // samples} outputs "
            f"each, {sum(p.numel() for p in parameters.values())} parameters, {dtype}"
        )
        comparison = _Comparison(reference, theirs, parameters, entries, lambda z: lossfunc(z, y))
        for twin, extension in zip(twins, extensions, strict=True):
            result.rows += _rows(comparison, twin, extension, parameters, rtol)
        for extension in extensions:
            if isinstance(extension, PCHMP):
                with backpack(extension):
                    loss.backward(inputs=list(parameters.values()), retain_graph=True)
                result.rows += [_check_above(comparison, name, p, rtol) for name, p in parameters.items()]
        if any(isinstance(e.columns, MonteCarlo) for e in extensions):
            result.rows.append(_check_draws(lossfunc, reference.z, y))
    print(result)
    if raises and not result.ok:
        raise CurvoptError(f"check: fields are wrong.\n{result}")
    return result


def _scalar(lossfunc: Callable[[Tensor, Any], Tensor], z: Tensor, y: Any) -> Tensor:
    with disable():
        return lossfunc(z, y)


def _check_one_tensor(value: Any, what: str, wrapper: str) -> None:
    if not isinstance(value, Tensor):
        raise CurvoptError(
            f"check: expected one tensor as the model's {what}, got {type(value).__name__}; wrap the model in a module "
            f"that {wrapper}."
        )


def _check_request(model: nn.Module, x: Any, extensions: Sequence[Extension]) -> None:
    _check_one_tensor(x, "input", "keeps the other inputs")
    if not extensions:
        raise CurvoptError("check: got no extensions; pass a list, e.g. [curvopt.extensions.BatchGrad()].")
    for extension in extensions:
        name = getattr(extension, "field", None)
        if name not in _EXPECTED:
            raise CurvoptError(f"check: no definition of {name!r} is known, only of {', '.join(sorted(_EXPECTED))}.")
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise CurvoptError(
                f"check: {path or 'model'} ({type(module).__name__}) mixes the samples in train mode; call "
                "model.eval()."
            )


def _samples(model: nn.Module, loss: Tensor) -> int:
    """The number of samples that the engine finds; it refuses networks in which they depend on each other."""
    with backpack(BatchL2Grad()):
        loss.backward(retain_graph=True)
    return next(len(getattr(p, "batch_l2")) for p in model.parameters() if hasattr(p, "batch_l2"))  # noqa: B009


def _check_size(numbers: int, samples: int) -> None:
    if numbers > JACOBIAN_LIMIT:
        raise CurvoptError(
            f"check: the Jacobian of all outputs has {numbers:.1e} numbers, more than {JACOBIAN_LIMIT:.1e}; take fewer "
            f"than {samples} samples, a smaller network of the same layers, or fields of individual gradients only."
        )


def _check_reference(reference: Reference, z: Tensor) -> None:
    if z.shape != reference.z.shape or not torch.allclose(z, reference.z, rtol=1e-4, atol=1e-6):
        raise CurvoptError(
            "check: two forward passes with equal random numbers differ, so there is nothing to compare; make the "
            "model deterministic (model.eval(), fixed buffers)."
        )


class _Comparison:
    """Pairs of an actual and an expected tensor for a parameter and a field."""

    def __init__(
        self,
        reference: Reference,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        entries: int,
        loss: Callable[[Tensor], Tensor],
    ) -> None:
        self.reference, self.model, self.parameters, self.loss = reference, model, parameters, loss
        some = reference.parameters
        self.directions = {name: torch.randn(3, *p.shape).to(p) for name, p in some.items()}
        self.entries = {name: torch.randperm(p.numel())[:entries].to(p.device) for name, p in some.items()}

    def first(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        expected = getattr(self.reference, extension.field)(name)
        return actual, expected if extension.subsampling is None else expected[extension.subsampling]

    def diagonal(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        return actual, self.reference.diag_ggn_exact(name)

    def diagonal_batch(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        return actual, self.reference.diag_ggn_exact_batch(name)

    def root(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        v = self.directions[name]
        V = actual.reshape(-1, v[0].numel())
        return (v.reshape(len(v), -1) @ V.T @ V).reshape(v.shape), self.reference.ggn_product(
            name, v, extension.subsampling
        )

    def ggn_product(self, name: str, extension: Any, actual: Callable) -> tuple[Tensor, Tensor]:
        v = self.directions[name]
        return actual(v), self.reference.ggn_product(name, v)

    @cached_property
    def _diag_h(self) -> dict[str, Tensor]:
        return self.reference.diag_h_entries(self.entries)

    def hessian_diagonal(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        return actual.flatten()[self.entries[name]], self._diag_h[name].sum(0)

    def hessian_diagonal_batch(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        return actual.reshape(len(actual), -1)[:, self.entries[name]], self._diag_h[name]

    @cached_property
    def _hessian_products(self) -> dict[str, Tensor]:
        return self.reference.hessian_products(self.directions)

    def hessian_product(self, name: str, extension: Any, actual: Callable) -> tuple[Tensor, Tensor]:
        return actual(self.directions[name]), self._hessian_products[name]

    def factors(self, name: str, extension: Any, actual: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        reference = self._empirical if isinstance(extension.columns, Empirical) else self.reference
        if len(actual) == 1:  # a block of its own, or its diagonal
            block = actual[0].dim() == 2 and reference.parameters[name].numel() <= DENSE_BLOCK_LIMIT
            return actual, [reference.ggn(name) if block else reference.diag_ggn_exact(name).flatten()]
        if extension.limit is not None:
            raise _Unchecked("leave max_factor_size out to check Kronecker factors")
        if not reference.has_factors(name):
            raise _Unchecked("Kronecker factors are only checked for weights of linear and convolution layers")
        return actual, reference.kflr(name, extension.approx)

    @cached_property
    def _empirical(self) -> Reference:
        """With ``Σ_n g_n g_nᵀ``, of the gradients of the samples' predictions over roots of weights, for a Hessian."""
        z = self.reference.z
        shift, columns = extend(_Shift(z[0])), SqrtGGNExact()
        columns.columns = Empirical()
        with backpack(columns):
            self.loss(shift(z)).backward()
        weighted = getattr(shift.shift, columns.field).reshape(z.shape)
        plain = self.reference.gradient_of_output.view(z.shape)
        along = min(1, z.dim() - 1)  # a prediction's classes or entries; the weight is one for all of them
        lengths = [g.norm(dim=along, keepdim=True) for g in (weighted, plain)]
        g = (plain * (lengths[0] / lengths[1]).nan_to_num()).view(self.reference.samples, -1)
        empirical = copy.copy(self.reference)
        empirical.H = torch.block_diag(*(torch.outer(row, row) for row in g))
        return empirical

    def eigen_diagonal(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        p = self.parameters[name]
        if p not in extension.bases:
            raise _Unchecked("no bases were given for it")
        reference = self._empirical if isinstance(extension.columns, Empirical) else self.reference
        inverses = [torch.ones_like(basis) if basis.ndim < 2 else basis.mT for basis in extension.bases[p]]
        J = reference.J[name].reshape(len(reference.H), -1)
        rotated = kfac_mat_prod(inverses, sizes_of(inverses, p.shape))(J.T)
        return actual, einsum("pc,cd,pd->p", rotated, reference.H, rotated)

    @cached_property
    def _kfra(self) -> dict[str, list[Tensor]]:
        return self.reference.kfra(_chain(self.model))

    def averaged_factors(self, name: str, extension: Any, actual: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if name not in self._kfra:
            raise _Unchecked("factors of KFRA are only checked for layers of an nn.Sequential")
        return actual, self._kfra[name]


def _chain(model: nn.Module) -> list[nn.Module]:
    """The modules of nested nn.Sequential, in order; a single module is a chain of itself."""
    if type(model).forward is nn.Sequential.forward:
        return [leaf for child in model.children() for leaf in _chain(child)]
    return [model]


_EXPECTED: dict[str, Callable[..., tuple[Any, Any]]] = {
    **dict.fromkeys(("grad_batch", "batch_l2", "sum_grad_squared", "variance"), _Comparison.first),
    **dict.fromkeys(("diag_ggn_exact", "diag_ggn_mc"), _Comparison.diagonal),
    **dict.fromkeys(("diag_ggn_exact_batch", "diag_ggn_mc_batch"), _Comparison.diagonal_batch),
    **dict.fromkeys(("sqrt_ggn_exact", "sqrt_ggn_mc"), _Comparison.root),
    **dict.fromkeys(("kfac", "kflr", "kfac_empirical"), _Comparison.factors),
    "kfra": _Comparison.averaged_factors,
    "eigen_diagonal": _Comparison.eigen_diagonal,
    "ggnmp": _Comparison.ggn_product,
    "diag_h": _Comparison.hessian_diagonal,
    "diag_h_batch": _Comparison.hessian_diagonal_batch,
    **dict.fromkeys(("hmp", "pchmp"), _Comparison.hessian_product),
}


def _rows(
    comparison: _Comparison,
    twin: Extension,
    extension: Extension,
    parameters: dict[str, nn.Parameter],
    rtol: float,
) -> list[Row]:
    """A row for each parameter; a difference counts in units of the field's largest entry."""
    note = "with exact columns" if isinstance(extension.columns, MonteCarlo) else ""
    if twin.field == "pchmp":
        note = "with nothing replaced"
    rows: list[Row] = []
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, p in parameters.items():
        if not hasattr(p, twin.field):
            rows.append(Row(name, twin.field, None, None, "WRONG", "the backward pass did not set it"))
            continue
        try:
            actual, expected = _EXPECTED[twin.field](comparison, name, twin, getattr(p, twin.field))
        except _Unchecked as reason:
            rows.append(Row(name, twin.field, None, None, "not checked", str(reason)))
            continue
        both = (actual, expected) if isinstance(expected, list) else ([actual], [expected])
        if [a.shape for a in both[0]] != [e.shape for e in both[1]]:
            shapes = [[list(t.shape) for t in tensors] for tensors in both]
            rows.append(Row(name, twin.field, None, None, "WRONG", f"shape {shapes[0]}, expected {shapes[1]}"))
            continue
        pairs[name] = [(a.detach(), e.detach()) for a, e in zip(*both, strict=True)]
    # what is zero up to rounding has no scale of its own, nor has a variance, which is a difference
    largest = [float(e.abs().max()) for both in pairs.values() for _, e in both]
    if twin.field == "variance":
        largest += [float(comparison.reference.sum_grad_squared(name).max()) for name in pairs]
    overall = max(largest, default=0.0)
    for name, both in pairs.items():
        absolute, relative, right = 0.0, 0.0, True
        for a, e in both:
            difference, scale = float((a - e).abs().max()), max(float(e.abs().max()), 1e-3 * overall, 1e-30)
            absolute, relative = max(absolute, difference), max(relative, difference / scale)
            right = right and difference <= rtol * scale  # false for nan
        rows.append(Row(name, twin.field, absolute, relative, "ok" if right else "WRONG", note))
    return rows


def _check_above(comparison: _Comparison, name: str, p: nn.Parameter, rtol: float) -> Row:
    """Whether the positive-curvature Hessian exceeds Hessian and GGN along the random directions."""
    v = comparison.directions[name]

    def along(product: Tensor) -> Tensor:
        return (v * product).flatten(1).sum(1)

    actual = along(getattr(p, "pchmp")(v))  # noqa: B009
    least = torch.maximum(along(comparison._hessian_products[name]), along(comparison.reference.ggn_product(name, v)))
    missing, scale = float((least - actual).max().clamp(min=0)), max(float(least.abs().max()), 1e-30)
    verdict = "ok" if missing <= rtol * scale else "WRONG"
    return Row(name, "pchmp", missing, missing / scale, verdict, "not below hmp and ggnmp")


class _Shift(nn.Module):
    """``z + shift``: columns at the output are Jacobian products of the shift."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(like))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.shift


def _check_draws(lossfunc: Callable[[Tensor, Any], Tensor], z: Tensor, y: Any) -> Row:
    """Whether the second moment of the draws is the Hessian of the loss, along eight random directions."""
    z = z * min(1.0, 2.0 / max(float(z.abs().max()), 1e-12))
    draws = max(256, min(4096, (1 << 24) // z.numel()))
    shift = extend(_Shift(z[0]))
    with backpack(SqrtGGNMC(mc_samples=draws)):
        lossfunc(shift(z), y).backward()
    columns = getattr(shift.shift, "sqrt_ggn_mc").reshape(draws, len(z), -1) * draws**0.5  # noqa: B009 - [M, N, C]
    H = hessian(lambda z: _scalar(lossfunc, z, y), z).view(*columns.shape[1:], *columns.shape[1:])
    a = torch.randn(8, *columns.shape[1:]).to(z)
    expected = einsum("knc,ncnd,knd->k", a, H, a)
    squares = einsum("knc,mnc->kmn", a, columns).square().sum(2)
    errors = (squares.mean(1) - expected).abs() / (squares.std(1) / draws**0.5).clamp(min=1e-12 * float(expected.max()))
    worst = float(errors.max())
    return Row(
        "loss", "draws", worst, None, "ok" if worst < 6 else "WRONG", f"second moment of {draws}, in standard errors"
    )
