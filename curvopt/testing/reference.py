"""Dense definitions of every field, by derivatives that the engine has no part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, einsum, nn
from torch.func import functional_call

from curvopt.core.record import disable


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
    """A layer's output, or a derivative with respect to it, as ``[G, positions of the whole batch, O / G]``."""
    kind = affine_type(module)
    assert kind is not None
    groups = getattr(module, "groups", 1)
    last = output.movedim(CHANNELS[kind], -1)
    return last.reshape(-1, groups, last.shape[-1] // groups).movedim(1, 0)


def patches(module: nn.Module, *inputs: Tensor) -> Tensor:
    """The patches that the weight of an affine layer is multiplied by, ``[G, positions of the whole batch, I]``.

    Entry i is the output of the layer when the row of the weight matrix selects the i-th entry.
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
        """The output weighted by a fixed gradient, sample by sample: its Hessian has the second derivatives of z."""
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
        x, D = torch.cat([x for _, x, _ in uses], dim=1), torch.cat([D for _, _, D in uses], dim=2)
        if approx == "reduce":  # all positions of a sample, those of several uses included, are one
            x = torch.cat([x.unflatten(1, (self.samples, -1)) for _, x, _ in uses], dim=2).mean(2)
        if approx != "expand":
            D = sum(
                (D.unflatten(2, (self.samples, -1)).sum(3) for _, _, D in uses[1:]),
                start=uses[0][2].unflatten(2, (self.samples, -1)).sum(3),
            )
        B = einsum("cgro,cd,dgrp->gop", D, self.H, D).contiguous()
        A = einsum("gri,grj->gij", x, x) / (x.shape[1] if approx == "expand" else self.samples)
        return [B[0], A[0]] if len(A) == 1 else [B, A]

    def kfra(self, chain: Sequence[nn.Module]) -> dict[str, list[Tensor]]:
        """Kronecker factors by name, from a matrix averaged over the samples at the output of every module of a chain.

        For a parameter of several layers, B is summed over them and A is averaged.
        """
        with disable():
            return self._kfra(chain)

    def _kfra(self, chain: Sequence[nn.Module]) -> dict[str, list[Tensor]]:
        inputs = [self.x.detach()]
        for module in chain:
            inputs.append(module(inputs[-1].clone()).detach())  # an activation may overwrite its input
        H = self._H_batch.sum(0)
        Bs: dict[str, list[Tensor]] = {}
        As: dict[str, list[Tensor]] = {}
        for module, x, y in reversed(list(zip(chain, inputs, inputs[1:], strict=False))):
            if affine_type(module) is not None:
                eigenvalues, eigenvectors = torch.linalg.eigh(H)
                root = (eigenvectors * eigenvalues.clamp(min=0).sqrt()).T.reshape(-1, 1, *y.shape[1:])
                D = torch.stack([by_position(module, column) for column in root])  # [V, G, R, O / G]
                rows = patches(module, x).detach()
                sums = D.sum(2).flatten(1)
                for name, p in self.parameters.items():
                    if p is module.weight:
                        Bs.setdefault(name, []).append(einsum("vgro,vgrp->gop", D, D))
                        As.setdefault(name, []).append(einsum("gri,grj->gij", rows, rows) / rows.shape[1])
                    elif p is module.bias:
                        Bs.setdefault(name, []).append((sums.T @ sums)[None])
            pulled = []
            for at in x.split(1):
                at = at.clone().requires_grad_()
                J = jacobian(module(at.clone()), [at])[0].flatten(1)
                pulled.append(J.T @ H @ J)
            H = torch.stack(pulled).mean(0)
        factors = {name: [torch.stack(B).sum(0)] for name, B in Bs.items()}
        for name, A in As.items():
            factors[name].append(torch.stack(A).mean(0))
        return {name: [f[0] if len(f) == 1 else f for f in both] for name, both in factors.items()}
