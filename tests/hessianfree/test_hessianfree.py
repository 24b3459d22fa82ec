"""Matrix-free products against dense matrices from ``torch.func``; conjugate gradients against dense solves.

Tests of the folder `hessianfree`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import Once, Sine
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

from curvopt import CurvoptError, backpack, extend
from curvopt.extensions import DiagGGNExact
from curvopt.hessianfree import (
    L_op,
    R_op,
    cg,
    ggn_vector_product,
    ggn_vector_product_from_plist,
    hessian_vector_product,
)


class Net:
    """A small net with its loss, its parameters as one vector, and dense derivatives in them."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.x, self.y = torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5,))
        self.parameters = list(self.model.parameters())
        self.v = [torch.randn_like(p) for p in self.parameters]
        self.output = self.model(self.x)
        self.loss = F.cross_entropy(self.output, self.y)

    def output_of(self, w: Tensor) -> Tensor:
        parts = w.split([p.numel() for p in self.parameters])
        names = dict(self.model.named_parameters())
        given = {name: part.view_as(p) for (name, p), part in zip(names.items(), parts, strict=True)}
        return functional_call(self.model, given, (self.x,))

    @property
    def w(self) -> Tensor:
        return flat(self.parameters).detach()

    def J(self) -> Tensor:
        return torch.func.jacrev(self.output_of)(self.w).reshape(15, -1)

    def H_of_loss(self) -> Tensor:
        return torch.func.hessian(lambda z: F.cross_entropy(z, self.y))(self.output.detach()).reshape(15, 15)


def flat(tensors) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def test_products():
    net = Net()
    J, v = net.J(), flat(net.v)
    H = torch.func.hessian(lambda w: F.cross_entropy(net.output_of(w), net.y))(net.w)
    G = J.T @ net.H_of_loss() @ J
    u = torch.randn_like(net.output)
    for _ in range(2):  # the graph is kept
        assert_close(flat(R_op(net.output, net.parameters, net.v)), J @ v)
        assert_close(flat(L_op(net.output, net.parameters, u)), J.T @ u.flatten())
        assert_close(flat(hessian_vector_product(net.loss, net.parameters, net.v)), H @ v)
        assert_close(flat(ggn_vector_product(net.loss, net.output, net.model, net.v)), G @ v)
        assert_close(flat(ggn_vector_product_from_plist(net.loss, net.output, net.parameters, net.v)), G @ v)
    gradient = torch.autograd.grad(net.loss, net.parameters, create_graph=True)
    assert_close(flat(hessian_vector_product(net.loss, net.parameters, net.v, grad_params=gradient)), H @ v)
    net.loss.backward()


def test_norms_of_a_bias_alone_are_refused():
    bias, x = torch.randn(3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    with pytest.raises(CurvoptError, match="norms with a bias and no weight"):
        f = torch.nn.functional.layer_norm(x, (3,), None, bias).pow(3).sum()
        hessian_vector_product(f, [x, bias], [torch.ones_like(x), torch.ones_like(bias)])


@pytest.mark.parametrize("product", [R_op, L_op])
def test_the_graph_is_freed_where_that_is_asked_for(product):
    net = Net()
    vectors = net.v if product is R_op else net.output.detach()
    kept = product(net.output, net.parameters, vectors)
    assert_close(flat(product(net.output, net.parameters, vectors, retain_graph=False)), flat(kept))
    with pytest.raises(RuntimeError, match="a second time"):
        product(net.output, net.parameters, vectors)


def test_several_outputs_and_inputs():
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ys = [a.sin() * b, b.exp()]
    v, w = [torch.randn_like(a), torch.randn_like(b)], [torch.randn_like(y) for y in ys]
    zero = torch.zeros(3, 3, dtype=torch.float64)
    J = [[(a.cos() * b).diag(), a.sin().diag()], [zero, b.exp().diag()]]
    for found, row in zip(R_op(ys, [a, b], v), J, strict=True):
        assert_close(found, row[0] @ v[0] + row[1] @ v[1])
    for found, column in zip(L_op(ys, [a, b], w), zip(*J, strict=True), strict=True):
        assert_close(found, column[0].T @ w[0] + column[1].T @ w[1])


def test_products_can_be_differentiated():
    x, v = torch.randn(2, 4, dtype=torch.float64).unbind()
    x.requires_grad_()
    cube = x.pow(3).sum()
    (Hv,) = hessian_vector_product(cube, x, v, detach=False)
    assert_close(torch.autograd.grad(Hv.sum(), x)[0], 6 * v)
    (Jv,) = R_op(x.pow(3), x, v, detach=False)
    assert_close(torch.autograd.grad(Jv.sum(), x)[0], 6 * x * v)
    (Jtw,) = L_op(x.pow(3), x, v, detach=False)
    assert_close(torch.autograd.grad(Jtw.sum(), x)[0], 6 * x * v)
    for product in [hessian_vector_product(cube, x, v), R_op(x.pow(3), x, v), L_op(x.pow(3), x, v)]:
        assert not product[0].requires_grad


def test_what_does_not_depend_or_is_linear_is_zero():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    v = [torch.ones(2), torch.ones(2)]
    assert [t.tolist() for t in L_op(a.sin(), [a, b], torch.ones(2))][1] == [0, 0]
    assert [t.tolist() for t in R_op([a * 1, b * 1], [a], [v[0]])] == [[1, 1], [0, 0]]
    for f in [a.sum() + b.sum(), 0 * a.sum()]:
        assert [t.tolist() for t in hessian_vector_product(f, [a, b], v)] == [[0, 0], [0, 0]]


def test_frozen_parameters_are_passed_over():
    net = Net()
    net.model[0].weight.requires_grad_(False)
    output = net.model(net.x)
    keep = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in net.parameters])
    J = net.J()[:, keep]
    found = ggn_vector_product(F.cross_entropy(output, net.y), output, net.model, net.v[1:])
    assert_close(flat(found), J.T @ net.H_of_loss() @ J @ flat(net.v[1:]))


def test_an_active_context_is_not_disturbed():
    net = Net()
    model, lossfunc = extend(net.model), extend(nn.CrossEntropyLoss())
    output = model(net.x)
    loss = lossfunc(output, net.y)
    with backpack(DiagGGNExact()):
        hessian_vector_product(loss, net.parameters, net.v)
        ggn_vector_product(loss, output, model, net.v)
        assert not any(hasattr(p, "diag_ggn_exact") for p in net.parameters)
        loss.backward()
    assert all(hasattr(p, "diag_ggn_exact") for p in net.parameters)


@pytest.mark.parametrize("product", [R_op, hessian_vector_product])
def test_vectors_of_other_shapes_are_refused(product):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"expected vectors of shapes \[\[2\]\], got \[\[3\]\]"):
        product(x.square().sum(), x, torch.ones(3))
    with pytest.raises(ValueError, match=r"L_op: ws: expected vectors of shapes \[\[\]\], got \[\[2\]\]"):
        L_op(x.square().sum(), x, torch.ones(2))


# -------------------------------------------------------------------------------------------------- conjugate gradients


class System:
    """A symmetric positive definite system on two tensors."""

    def __init__(self, n: int = 12, condition: float = 100.0):
        torch.manual_seed(0)
        Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
        self.matrix = Q * torch.logspace(0, -torch.tensor(condition).log10(), n, dtype=torch.float64) @ Q.T
        self.b = self.split(torch.randn(n, dtype=torch.float64))
        self.products = 0

    def split(self, v: Tensor) -> list[Tensor]:
        return [v[:4].view(2, 2), v[4:]]

    def A(self, v) -> list[Tensor]:
        self.products += 1
        return self.split(self.matrix @ flat(v))

    def value(self, x) -> Tensor:
        x = flat(x)
        return x @ self.matrix @ x / 2 - flat(self.b) @ x

    def solution(self) -> Tensor:
        return torch.linalg.solve(self.matrix, flat(self.b))


def test_cg_solves():
    system = System()
    found = cg(system.A, system.b, tol=1e-10, maxiter=40)
    assert [t.shape for t in found.x] == [t.shape for t in system.b]
    assert_close(flat(found.x), system.solution())
    assert found.reason == "residual" and found.iterations == system.products <= 20
    again = cg(system.A, system.b, x0=found.x, tol=1e-9)
    assert again.iterations == 0 and again.reason == "residual"
    assert_close(flat(again.x), flat(found.x))


def test_every_step_of_cg_minimises_over_the_krylov_space():
    system = System()
    basis = [flat(system.b)]
    for steps in range(1, 6):
        found = cg(system.A, system.b, maxiter=steps, tol=0)
        K = torch.linalg.qr(torch.stack(basis, 1))[0]
        best = K @ torch.linalg.solve(K.T @ system.matrix @ K, K.T @ flat(system.b))
        assert_close(flat(found.x), best)
        assert found.iterations == steps and found.reason == "maxiter"
        basis.append(system.matrix @ basis[-1])


def test_cg_starts_where_told():
    system = System()
    start = system.split(torch.randn(12, dtype=torch.float64))
    before = [t.clone() for t in start]
    found = cg(system.A, system.b, x0=start, tol=1e-10, maxiter=40)
    assert_close(flat(found.x), system.solution())
    assert all(torch.equal(s, t) for s, t in zip(start, before, strict=True))
    assert system.value(cg(system.A, system.b, x0=start, maxiter=1).x) < system.value(start)


def test_preconditioner():
    system = System(condition=1e6)
    inverse = torch.linalg.inv(system.matrix)
    found = cg(system.A, system.b, tol=1e-6, preconditioner=lambda r: system.split(inverse @ flat(r)))
    assert found.iterations <= 2 and found.reason == "residual"
    scale = torch.logspace(-2, 2, 12, dtype=torch.float64)
    plain, badly_scaled = System(), System()
    badly_scaled.matrix = scale[:, None] * plain.matrix * scale
    steps = [
        cg(badly_scaled.A, plain.b, tol=1e-4, maxiter=200, preconditioner=p).iterations
        for p in (None, lambda r: plain.split(flat(r) / badly_scaled.matrix.diagonal()))
    ]
    assert steps[1] < steps[0]


def test_absolute_tolerance():
    system = System()
    found = cg(system.A, system.b, tol=0, atol=0.1)
    assert found.reason == "residual"
    assert (system.matrix @ flat(found.x) - flat(system.b)).norm() <= 0.1
    assert cg(system.A, system.b, tol=0, atol=1e9).iterations == 0


def test_relative_progress():
    system = System(n=200, condition=1e5)
    found = cg(system.A, system.b, tol=0, maxiter=2000, progress=5e-5)
    assert found.reason == "progress" and 110 < found.iterations < 2000

    def value(steps: int) -> float:
        return float(system.value(cg(system.A, system.b, tol=0, maxiter=steps).x))

    def slow(j: int) -> bool:
        k = max(10, j // 10)
        return (value(j) - value(j - k)) / value(j) < k * 5e-5

    assert slow(found.iterations) and not slow(found.iterations - 1)


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
def test_directions_without_positive_curvature_end_it(value: float):
    D = torch.tensor([1.0, 1.0, 1.0, 1.0] + [value] * 8, dtype=torch.float64)
    system = System()
    b = system.split(torch.ones(12, dtype=torch.float64))
    found = cg(lambda v: system.split(D * flat(v)), b)
    assert found.reason == "curvature" and flat(found.x).isfinite().all()


def test_nothing_to_solve():
    found = cg(lambda v: v, [torch.zeros(3)])
    assert found.iterations == 0 and found.reason == "residual" and found.x[0].tolist() == [0, 0, 0]


def test_newton_step_on_a_net():
    """The damped Gauss-Newton system, matrix-free, against the dense solve."""
    net = Net()
    J = net.J()
    G = J.T @ net.H_of_loss() @ J + 0.1 * torch.eye(len(net.w), dtype=torch.float64)
    gradient = torch.autograd.grad(net.loss, net.parameters, retain_graph=True)

    def damped(v: list[Tensor]) -> list[Tensor]:
        products = ggn_vector_product(net.loss, net.output, net.model, v)
        return [Gv + 0.1 * vi for Gv, vi in zip(products, v, strict=True)]

    assert_close(flat(cg(damped, gradient, tol=1e-12, maxiter=60).x), torch.linalg.solve(G, flat(gradient)))


@pytest.mark.parametrize("product", [R_op, hessian_vector_product])
def test_functions_that_are_differentiable_once_are_refused(product):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CurvoptError, match="once_differentiable"):  # autograd.grad takes it for zero
        product(Once.apply(2 * x).sum(), x, torch.ones(2))


class Prepared(torch.autograd.Function):
    """A sine whose forward computes its slope."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * ctx.slope


class Hidden(Sine):
    """A sine whose backward hides what it gets."""

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.data * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("function", [Prepared, Hidden])
def test_functions_whose_backward_has_no_derivative_are_refused(function):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CurvoptError, match=f"{function.__name__} returns what its forward computed, or leaves"):
        hessian_vector_product(function.apply(2 * x).sum(), x, torch.ones(2))
    Jv = R_op(Prepared.apply(2 * x), x, torch.ones(2))  # which needs none
    assert_close(Jv[0], 2 * (2 * x).cos())
