"""Actual and expected values of a field, and how far they are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, einsum, nn

from curvopt.core.backward.context import backpack
from curvopt.core.extend import extend
from curvopt.core.losses.roots import Empirical, MonteCarlo
from curvopt.core.products.base import DENSE_BLOCK_LIMIT
from curvopt.core.record import disable
from curvopt.extensions import Extension, SqrtGGNExact, SqrtGGNMC
from curvopt.kroneckers import kfac_mat_prod, sizes_of
from curvopt.testing.reference import Reference, hessian
from curvopt.testing.report import Row


class Unchecked(Exception):  # noqa: N818 - no error
    """Why there is nothing to compare with."""


def plain_loss(lossfunc: Callable[[Tensor, Any], Tensor], z: Tensor, y: Any) -> Tensor:
    """The loss without the engine, which records nothing of it."""
    with disable():
        return lossfunc(z, y)


class Comparison:
    """Pairs of an actual and an expected tensor, by one method for each kind of field.

    Args:
        reference: defines the expected values.
        model: the model that the reference uses.
        parameters: those with fields, by name.
        entries: number of random entries that are compared where each of them is expensive.
        loss: the loss as a function of the model's output.
    """

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
        """Quantities of individual gradients."""
        expected = getattr(self.reference, extension.field)(name)
        return actual, expected if extension.subsampling is None else expected[extension.subsampling]

    def diagonal(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        """The diagonal of the GGN."""
        return actual, self.reference.diag_ggn_exact(name)

    def diagonal_batch(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        """Diagonals of the GGN per sample."""
        return actual, self.reference.diag_ggn_exact_batch(name)

    def root(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        """``VᵀV v`` with the root V of the GGN, along the random directions."""
        v = self.directions[name]
        V = actual.reshape(-1, v[0].numel())
        return (v.reshape(len(v), -1) @ V.T @ V).reshape(v.shape), self.reference.ggn_product(
            name, v, extension.subsampling
        )

    def ggn_product(self, name: str, extension: Any, actual: Callable) -> tuple[Tensor, Tensor]:
        """Products with the GGN, along the random directions."""
        v = self.directions[name]
        return actual(v), self.reference.ggn_product(name, v)

    @cached_property
    def _diag_h(self) -> dict[str, Tensor]:
        return self.reference.diag_h_entries(self.entries)

    def hessian_diagonal(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        """Random entries of the Hessian's diagonal."""
        return actual.flatten()[self.entries[name]], self._diag_h[name].sum(0)

    def hessian_diagonal_batch(self, name: str, extension: Any, actual: Tensor) -> tuple[Tensor, Tensor]:
        """Random entries of the Hessian's diagonals per sample."""
        return actual.reshape(len(actual), -1)[:, self.entries[name]], self._diag_h[name]

    @cached_property
    def _hessian_products(self) -> dict[str, Tensor]:
        return self.reference.hessian_products(self.directions)

    def hessian_product(self, name: str, extension: Any, actual: Callable) -> tuple[Tensor, Tensor]:
        """Products with the Hessian, along the random directions."""
        return actual(self.directions[name]), self._hessian_products[name]

    def factors(self, name: str, extension: Any, actual: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Kronecker factors, or a single block or diagonal."""
        reference = self._empirical if isinstance(extension.columns, Empirical) else self.reference
        if len(actual) == 1:  # a block of its own, or its diagonal
            block = actual[0].dim() == 2 and reference.parameters[name].numel() <= DENSE_BLOCK_LIMIT
            return actual, [reference.ggn(name) if block else reference.diag_ggn_exact(name).flatten()]
        if extension.limit is not None:
            raise Unchecked("leave max_factor_size out to check Kronecker factors")
        if not reference.has_factors(name):
            raise Unchecked("Kronecker factors are only checked for weights of linear and convolution layers")
        return actual, reference.kflr(name, extension.approx)

    @cached_property
    def _empirical(self) -> Reference:
        """The reference with ``Σ_n g_n g_nᵀ`` as Hessian, of the predictions' gradients over the roots of weights."""
        z = self.reference.z
        shift, columns = extend(Shift(z[0])), SqrtGGNExact()
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
        """The diagonal of the GGN in given bases."""
        p = self.parameters[name]
        if p not in extension.bases:
            raise Unchecked("no bases were given for it")
        reference = self._empirical if isinstance(extension.columns, Empirical) else self.reference
        inverses = [torch.ones_like(basis) if basis.ndim < 2 else basis.mT for basis in extension.bases[p]]
        J = reference.J[name].reshape(len(reference.H), -1)
        rotated = kfac_mat_prod(inverses, sizes_of(inverses, p.shape))(J.T)
        return actual, einsum("pc,cd,pd->p", rotated, reference.H, rotated)

    @cached_property
    def _kfra(self) -> dict[str, list[Tensor]]:
        return self.reference.kfra(_chain(self.model))

    def averaged_factors(self, name: str, extension: Any, actual: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Kronecker factors of KFRA."""
        if name not in self._kfra:
            raise Unchecked("factors of KFRA are only checked for layers of an nn.Sequential")
        return actual, self._kfra[name]


def _chain(model: nn.Module) -> list[nn.Module]:
    """The modules of nested nn.Sequential, in order; a single module is a chain of itself."""
    if type(model).forward is nn.Sequential.forward:
        return [leaf for child in model.children() for leaf in _chain(child)]
    return [model]


EXPECTED: dict[str, Callable[..., tuple[Any, Any]]] = {
    **dict.fromkeys(("grad_batch", "batch_l2", "sum_grad_squared", "variance"), Comparison.first),
    **dict.fromkeys(("diag_ggn_exact", "diag_ggn_mc"), Comparison.diagonal),
    **dict.fromkeys(("diag_ggn_exact_batch", "diag_ggn_mc_batch"), Comparison.diagonal_batch),
    **dict.fromkeys(("sqrt_ggn_exact", "sqrt_ggn_mc"), Comparison.root),
    **dict.fromkeys(("kfac", "kflr", "kfac_empirical"), Comparison.factors),
    "kfra": Comparison.averaged_factors,
    "eigen_diagonal": Comparison.eigen_diagonal,
    "ggnmp": Comparison.ggn_product,
    "diag_h": Comparison.hessian_diagonal,
    "diag_h_batch": Comparison.hessian_diagonal_batch,
    **dict.fromkeys(("hmp", "pchmp"), Comparison.hessian_product),
}


def compare(
    comparison: Comparison,
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
            actual, expected = EXPECTED[twin.field](comparison, name, twin, getattr(p, twin.field))
        except Unchecked as reason:
            rows.append(Row(name, twin.field, None, None, "not checked", str(reason)))
            continue
        both = (actual, expected) if isinstance(expected, list) else ([actual], [expected])
        if [a.shape for a in both[0]] != [e.shape for e in both[1]]:
            shapes = [[list(t.shape) for t in tensors] for tensors in both]
            rows.append(Row(name, twin.field, None, None, "WRONG", f"shape {shapes[0]}, expected {shapes[1]}"))
            continue
        pairs[name] = [(a.detach(), e.detach()) for a, e in zip(*both, strict=True)]
    # a field that is zero up to rounding gives no scale, nor does a variance, which is a difference
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


def compare_pchmp(comparison: Comparison, name: str, p: nn.Parameter, rtol: float) -> Row:
    """Whether the positive-curvature Hessian exceeds Hessian and GGN along the random directions."""
    v = comparison.directions[name]

    def along(product: Tensor) -> Tensor:
        return (v * product).flatten(1).sum(1)

    actual = along(getattr(p, "pchmp")(v))  # noqa: B009
    least = torch.maximum(along(comparison._hessian_products[name]), along(comparison.reference.ggn_product(name, v)))
    missing, scale = float((least - actual).max().clamp(min=0)), max(float(least.abs().max()), 1e-30)
    verdict = "ok" if missing <= rtol * scale else "WRONG"
    return Row(name, "pchmp", missing, missing / scale, verdict, "not below hmp and ggnmp")


class Shift(nn.Module):
    """``z + shift``: columns at the output are Jacobian products of the shift."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(like))

    def forward(self, z: Tensor) -> Tensor:
        """The shifted output."""
        return z + self.shift


def compare_draws(lossfunc: Callable[[Tensor, Any], Tensor], z: Tensor, y: Any) -> Row:
    """Whether the second moment of the draws is the Hessian of the loss, along eight random directions."""
    z = z * min(1.0, 2.0 / max(float(z.abs().max()), 1e-12))
    draws = max(256, min(4096, (1 << 24) // z.numel()))
    shift = extend(Shift(z[0]))
    with backpack(SqrtGGNMC(mc_samples=draws)):
        lossfunc(shift(z), y).backward()
    columns = getattr(shift.shift, "sqrt_ggn_mc").reshape(draws, len(z), -1) * draws**0.5  # noqa: B009 - [M, N, C]
    H = hessian(lambda z: plain_loss(lossfunc, z, y), z).view(*columns.shape[1:], *columns.shape[1:])
    a = torch.randn(8, *columns.shape[1:]).to(z)
    expected = einsum("knc,ncnd,knd->k", a, H, a)
    squares = einsum("knc,mnc->kmn", a, columns).square().sum(2)
    errors = (squares.mean(1) - expected).abs() / (squares.std(1) / draws**0.5).clamp(min=1e-12 * float(expected.max()))
    worst = float(errors.max())
    return Row(
        "loss", "draws", worst, None, "ok" if worst < 6 else "WRONG", f"second moment of {draws}, in standard errors"
    )
