"""Slow, dense definitions of every field, from plain autograd; they know nothing of the package under test.

All of them come from two matrices at the output ``z = model(x)`` with all its entries in a row: the Jacobian ``J`` of
``z`` with respect to a parameter, and the gradient and Hessian ``H`` of the loss with respect to ``z``. The entries of
``z`` are divided evenly among the samples in order, so the n-th part of the gradient is ``g_n = J_n^T dloss/dz_n``
whatever normalizer the loss uses, and the generalized Gauss-Newton matrix is ``J^T H J``. The Hessian has the second
derivatives of ``z``, weighted by ``dloss/dz``, besides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from cases import Case
from torch import Tensor, einsum, nn
from torch.func import functional_call


def jacobian(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Derivatives ``[outputs.numel(), *input]`` by one backward pass per output; zeros where there is no path."""
    rows = []
    for output in outputs.flatten():
        row = torch.autograd.grad(output, inputs, retain_graph=True, allow_unused=True)
        rows.append([torch.zeros_like(i) if r is None else r for i, r in zip(inputs, row, strict=True)])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Hessian ``[at.numel(), at.numel()]`` of a scalar function by one double backward pass per row."""
    at = at.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(at), at, create_graph=True)
    return jacobian(gradient, [at])[0].flatten(1).detach()


# layers that multiply patches of their input by a matrix, with the dimension of their output that holds its rows
CHANNELS = {nn.Linear: -1, nn.Bilinear: -1, nn.Conv1d: 1, nn.Conv2d: 1, nn.Conv3d: 1}


def affine_type(module: nn.Module) -> type[nn.Module] | None:
    """The known affine layer that ``module`` computes, or nothing."""
    return next((kind for kind in CHANNELS if type(module).forward is kind.forward), None)


def by_position(module: nn.Module, output: Tensor) -> Tensor:
    """A layer's output, or what it is derived by, as ``[G, positions of the whole batch, O / G]``."""
    groups = getattr(module, "groups", 1)
    last = output.movedim(CHANNELS[affine_type(module)], -1)
    return last.reshape(-1, groups, last.shape[-1] // groups).movedim(1, 0)


def patches(module: nn.Module, *inputs: Tensor) -> Tensor:
    """What the weight of an affine layer is multiplied by, ``[G, positions of the whole batch, I]``.

    Entry i is what the layer returns when its weight matrix selects the i-th entry.
    """
    columns = []
    for i in range(module.weight[0].numel()):
        selector = torch.zeros_like(module.weight)
        selector.flatten(1)[:, i] = 1.0
        parameters = {"weight": selector}
        if module.bias is not None:
            parameters["bias"] = torch.zeros_like(module.bias)
        columns.append(by_position(module, functional_call(module, parameters, inputs))[:, :, 0])
    return torch.stack(columns, dim=2)


class Reference:
    """Fields of the parameters of ``model`` for one batch, by name of the parameter.

    Args:
        model: A model that nothing was attached to. Its output is ordered by sample: all of the first comes first.
        x: Input whose first dimension counts the samples.
        loss: The scalar that is differentiated, as a function of the model's output.
    """

    def __init__(self, model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]):
        self.x, self.samples = x, len(x)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._owners = {
            name: module
            for name, p in self.parameters.items()
            for module in model.modules()
            if affine_type(module) is not None and module.weight is p
        }
        calls: list[tuple[nn.Module, list[Tensor], Tensor]] = []

        def record(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            calls.append((module, [x.detach() for x in (*args, *kwargs.values())], output))
            return output.clone()  # the next operation may overwrite it in place

        handles = [m.register_forward_hook(record, with_kwargs=True) for m in set(self._owners.values())]
        z = model(x)
        for handle in handles:
            handle.remove()

        self.z, self._graph = z.detach(), z
        self._second: dict[str, Tensor] = {}
        self.gradient_of_output = torch.autograd.functional.jacobian(loss, self.z).flatten()
        self.H = hessian(loss, self.z)
        tensors = [*self.parameters.values(), *(output for _, _, output in calls)]
        derivatives = jacobian(z, tensors)
        self.J = dict(zip(self.parameters, derivatives, strict=False))  # [z.numel(), *p]
        self._uses = [  # (module, patches [G, R, I], derivatives of z by the output [z.numel(), G, R, O / G])
            (module, patches(module, *inputs).detach(), torch.stack([by_position(module, d) for d in derivative]))
            for (module, inputs, _), derivative in zip(calls, derivatives[len(self.parameters) :], strict=True)
        ]

    # ------------------------------------------------------------------------------------------------------ first order

    def grad(self, name: str) -> Tensor:
        """The gradient."""
        return einsum("c,c...->...", self.gradient_of_output, self.J[name])

    def grad_batch(self, name: str) -> Tensor:
        """Gradients per sample, ``[N, *p]``."""
        J = self.J[name].unflatten(0, (self.samples, -1))
        return einsum("nc,nc...->n...", self.gradient_of_output.view(self.samples, -1), J)

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
        H = self.H.view(*2 * (self.samples, J.shape[1]))
        return einsum("ncp,ncnd,ndq->npq", J, H, J)

    def diag_ggn_exact_batch(self, name: str) -> Tensor:
        """Diagonals of the generalized Gauss-Newton matrices per sample, ``[N, *p]``."""
        J = self.J[name].unflatten(0, (self.samples, -1))
        H = self.H.view(*2 * (self.samples, J.shape[1]))
        return einsum("nc...,ncnd,nd...->n...", J, H, J)

    def diag_ggn_exact(self, name: str) -> Tensor:
        """Diagonal of the generalized Gauss-Newton matrix."""
        J = self.J[name]
        return einsum("c...,cd,d...->...", J, self.H, J)

    def hessian_batch(self, name: str) -> Tensor:
        """Blocks of the Hessians of the samples' terms of the loss, ``[N, p.numel(), p.numel()]``."""
        if not self._second:
            terms = (self.gradient_of_output * self._graph.flatten()).view(self.samples, -1).sum(1)
            seconds = []
            for term in terms:
                # without a path the (zero) gradient stands alone
                gradients = torch.autograd.grad(
                    term, list(self.parameters.values()), create_graph=True, allow_unused=True, materialize_grads=True
                )
                seconds.append(
                    [
                        jacobian(g, [p])[0].reshape(p.numel(), -1) if g.requires_grad else p.new_zeros(2 * [p.numel()])
                        for g, p in zip(gradients, self.parameters.values(), strict=True)
                    ]
                )
            self._second = {n: torch.stack(s) for n, s in zip(self.parameters, zip(*seconds, strict=True), strict=True)}
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

    def kflr(self, name: str, approx: str = "expand") -> list[Tensor]:
        """Kronecker factors: ``[B, A]`` of weights of affine layers, else the whole block of the matrix."""
        if name not in self._owners:
            return [self.ggn(name)]
        uses = [use for use in self._uses if use[0].weight is self.parameters[name]]
        if approx == "reduce":  # all positions of a sample, those of several uses included, are one
            x = torch.cat([x.unflatten(1, (self.samples, -1)) for _, x, _ in uses], dim=2).mean(2)
            D = sum(D.unflatten(2, (self.samples, -1)).sum(3) for _, _, D in uses)
        else:
            x = torch.cat([x for _, x, _ in uses], dim=1)
            D = torch.cat([D for _, _, D in uses], dim=2)
        B = einsum("cgro,cd,dgrp->gop", D, self.H, D)
        A = einsum("gri,grj->gij", x, x) / x.shape[1]
        return [B[0], A[0]] if len(A) == 1 else [B, A]

    def kfra(self, chain: list[nn.Module]) -> dict[str, list[Tensor]]:
        """Kronecker factors by name, from a matrix averaged over the samples at the output of every module of a chain.

        What several uses of a parameter contribute is summed on the left and averaged on the right.
        """
        inputs = [self.x.detach()]
        for module in chain:
            inputs.append(module(inputs[-1].clone()).detach())  # an activation may overwrite its input
        H = self.H.view(*2 * (self.samples, len(self.H) // self.samples)).diagonal(dim1=0, dim2=2).sum(2)
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
        factors = {name: [sum(B)] for name, B in lefts.items()}
        for name, A in rights.items():
            factors[name].append(torch.stack(A).mean(0))
        return {name: [f[0] if len(f) == 1 else f for f in both] for name, both in factors.items()}


@cache
def reference(case: Case) -> Reference:
    """The reference of a row of the table, computed once."""
    problem = case.problem()
    return Reference(problem.model, problem.x, problem.loss_of_output)
