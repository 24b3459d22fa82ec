"""Quantities of the Hessian and products with curvature matrices equal their dense references.

Tests of `extensions/hessian.py`, `core/backward/second_order.py`, `core/backward/residuals.py`, `core/operations.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import LAYERS, NO_PCHMP, Case, Net, mlp, mse, normal, values
from checks import BY_NAME, backward, by_case, check, check_all, check_products, compare, extended
from reference import reference
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils import parametrizations

from curvopt import backpack, extend
from curvopt.core import operations
from curvopt.core.nodes import walk
from curvopt.core.operations import nonlinear_operations
from curvopt.core.record import records_of
from curvopt.errors import CurvoptError
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    PCHMP,
    BatchDiagHessian,
    DiagGGNExact,
    DiagHessian,
)
from curvopt.hessianfree import hessian_vector_product


def dense(product: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    """The matrix behind a product, by all unit vectors at once, ``[p.numel(), p.numel()]``."""
    unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
    return product(unit).reshape(p.numel(), p.numel())


# ------------------------------------------------------------------------------------------- every case of the table


@by_case
def test_diagonals_and_products_equal_dense_reference(case: Case):
    """Shares of samples may be found in another way than their sum, so the sum is asked for alone, too."""
    ref = reference(case)
    for fields in ([DiagHessian, BatchDiagHessian], [DiagHessian]):
        check(backward(extended(case), *fields), ref, *fields)
    problem = backward(extended(case), HMP, GGNMP)
    problem.model(torch.zeros_like(problem.x))  # another forward changes nothing
    check_products(problem, ref, HMP, GGNMP)
    positive_curvature_is_the_hessian_with_parts_replaced(case)


def positive_curvature_is_the_hessian_with_parts_replaced(case: Case) -> None:
    """Clipping and absolute values only add to the Hessian, and nothing goes below the Gauss-Newton matrix."""
    problem, ref = extended(case), reference(case)
    if case.name in NO_PCHMP:
        with pytest.raises(CurvoptError, match="pchmp"):
            backward(problem, PCHMP)
        return
    matrices = {}
    for modify in ("clip", "abs"):
        parameters = backward(problem, PCHMP(modify=modify)).trainable()
        matrices[modify] = {name: dense(p.pchmp, p) for name, p in parameters.items()}
    for name in problem.trainable():
        clip, absolute, H, G = matrices["clip"][name], matrices["abs"][name], ref.hessian(name), ref.ggn(name)
        # |R| = 2 max(R, 0) - R
        compare(absolute, G + 2 * (clip - G) - (H - G), name)
        size = H.norm() + absolute.norm()
        for larger, smaller in [(clip, G), (clip, H), (absolute, clip)]:
            assert torch.linalg.eigvalsh(larger - smaller).min() >= -1e-10 * size, name


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_every_quantity_of_every_layer(case: Case):
    if case.name == "gru-packed-two-ways":
        pytest.xfail("a layer in front of packed sequences with two directions has no factors of the kind 'reduce'")
    problem, ref = case.problem(), reference(case)
    if "weight-norm" in case.name:  # PyTorch's double backward of the fused operation is wrong
        with pytest.raises(CurvoptError, match="second derivative"):
            check_all(problem, ref=ref)
    # PyTorch has no double backward of bags
    check_all(problem, ref=ref, of_hessian=not case.name.startswith(("weight-norm", "bag")))
    # Kronecker factors depend on what counts as a position: here only that both kinds have the same, and their form
    for approx in ("expand", "reduce"):
        backward(problem, KFAC(mc_samples=2, approx=approx), KFLR(approx=approx))
        for name, p in problem.trainable().items():
            assert [factor.shape for factor in p.kfac] == [factor.shape for factor in p.kflr], name
            rows = 1
            for factor in p.kflr:
                rows *= factor.shape[-1] * (factor.shape[0] if factor.dim() == 3 else 1)
                assert factor.isfinite().all()
                if factor.dim() > 1:
                    assert torch.linalg.eigvalsh(factor).min() >= -1e-10 * factor.norm(), name
            if len(p.kflr) == 1:
                compare(p.kflr[0].diagonal(), p.diag_ggn_exact.flatten(), name)
            elif p.kflr[0].dim() < 3:
                assert rows == p.numel(), name


Operation = Callable[[Tensor, Tensor], Tensor]


def of_one_trunk(operation: Operation) -> nn.Module:
    """Two branches of one trunk, the second of which gives the weight of an operation on the first."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.tanh(m.trunk(x))
        return m.out(operation(m.first(h), m.second(h)))

    sizes = {"trunk": (3, 4), "first": (4, 4), "second": (4, 4), "out": (4, 2)}
    return Net(forward, **{name: nn.Linear(*size) for name, size in sizes.items()})


def fixed_batch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, x.new_zeros(4), x.new_ones(4), weight[0], weight[0])


def weight_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch._weight_norm(x.view(2, 2), weight.view(2, 2)[:, :1].contiguous(), 0).view(1, 4)


@pytest.mark.parametrize("operation", [fixed_batch_norm, lambda x, weight: F.prelu(x, weight[0])])
def test_operations_whose_weight_depends_on_parameters_are_not_linear(operation: Operation):
    check_all(extended(Case("", lambda: of_one_trunk(operation), normal(1, 3), mse(), values)))


def test_a_wrong_second_derivative_is_refused_at_its_name():
    with pytest.raises(CurvoptError, match="weight norm is wrong"):
        backward(extended(Case("", lambda: of_one_trunk(weight_norm), normal(1, 3), mse(), values)), DiagHessian)
    # a row of one entry has a symmetric Hessian, right or wrong
    problem = extended(Case("", lambda: parametrizations.weight_norm(nn.Linear(1, 2)), normal(3, 1), mse(), values))
    with pytest.raises(CurvoptError, match="original.: PyTorch's second derivative of weight norm"):
        backward(problem, HMP)
    parameters = list(problem.model.parameters())
    with pytest.raises(CurvoptError, match="weight norm is wrong"):
        hessian_vector_product(problem.loss(), parameters, parameters)
    # what lies behind the output has no part in the loss' Hessian in it
    z = problem.model(problem.x)
    expected = torch.func.hessian(problem.loss_of_output)(z.detach()).view(z.numel(), -1) @ torch.ones(z.numel()).to(z)
    (product,) = hessian_vector_product(problem.loss_of_output(z), z, torch.ones_like(z))
    torch.testing.assert_close(product.flatten(), expected)


def alone(operation: Operation) -> Operation:
    """Sample by sample."""
    return lambda x, y: torch.cat([operation(*pair) for pair in zip(x.split(1), y.split(1), strict=True)])


def times(x: Tensor, y: Tensor) -> Tensor:
    return x.scatter_reduce(1, torch.tensor([[0, 0, 1, 2]], device=x.device), y, "prod")


def shared_attention() -> nn.Module:
    """Two layers of one attention, which does not depend on the bias of its keys."""

    def forward(m: Net, h: Tensor) -> Tensor:
        for _ in range(2):
            h = h + (m.q(h) @ m.k(h).mT).softmax(-1) @ h
        return m.out(h.mean(1))

    return Net(forward, q=nn.Linear(3, 3), k=nn.Linear(3, 3), out=nn.Linear(3, 3))


@pytest.mark.parametrize("make", [lambda: of_one_trunk(alone(times)), shared_attention])
def test_rounding_errors_are_no_wrong_second_derivative(make: Callable[[], nn.Module]):
    shape = (3, 4, 3) if make is shared_attention else (3, 3)
    case = Case("", make, normal(*shape), mse(), values)
    check(backward(extended(case), DiagHessian), reference(case), DiagHessian)


def test_rounding_errors_of_autocast_are_no_wrong_second_derivative():
    def forward(m: Net, x: Tensor) -> Tensor:
        weight = m.a @ m.b
        return F.linear(torch.tanh(F.linear(x, weight)), weight)

    for seed in range(10):
        torch.manual_seed(seed)
        model, x, found = (
            extend(Net(forward, a=0.6 * torch.randn(6, 2), b=0.6 * torch.randn(2, 6))),
            torch.randn(4, 6),
            [],
        )
        for rounded in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
                loss = F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]))
            with backpack(DiagHessian()):
                loss.backward()
            found.append(torch.cat([p.diag_h.flatten() for p in model.parameters()]))
        assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


# ------------------------------------------------------------------------- positive curvature from its definition


# ------------------------------------------------------------------------------------------------ around the numbers

PIECEWISE_LINEAR = [
    nn.ReLU,
    nn.LeakyReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardsigmoid,  # has no second derivative in PyTorch
    nn.Hardshrink,
    nn.Softshrink,
    nn.PReLU,
    nn.Identity,
]


def test_names_of_operations_are_those_of_pytorch():
    known = {re.sub(r"BACKWARD\d*$", "", name.upper()) for name in dir(torch._C._functions)}
    assert known >= operations.OPERATIONS.keys() - {"SYNCBATCHNORM"}  # which is written in Python


@pytest.mark.parametrize("activation", PIECEWISE_LINEAR, ids=lambda activation: activation.__name__)
def test_piecewise_linear_operations_add_nothing_to_the_gauss_newton_diagonal(activation: type[nn.Module]):
    case = Case("", lambda: mlp(4, 6, 6, 3, activation=activation), lambda: 10 * normal(5, 4)())
    problem = backward(extended(case), DiagHessian, DiagGGNExact)
    z = problem.model(problem.x)
    uses = {node for node in walk([z.grad_fn]) if records_of(node)}
    assert uses and not nonlinear_operations([GradientEdge(z.grad_fn, 0)], uses)
    for name, p in problem.trainable().items():
        assert p.diag_h.any()
        compare(p.diag_h, p.diag_ggn_exact, name)


@pytest.mark.parametrize("extension", [HMP, GGNMP, PCHMP], ids=lambda extension: extension.__name__)
def test_products_work_without_the_graph_and_after_an_update(extension: type):
    """They are those of the parameters and the batch of their backward."""
    problem = backward(extended(BY_NAME["mlp"]), extension)
    parameters = list(problem.trainable().values())
    before = [dense(getattr(p, extension.field), p) for p in parameters]
    with torch.no_grad():
        problem.x.zero_()
        for p in parameters:
            p.mul_(2)
    problem.model(problem.x)
    for p, matrix in zip(parameters, before, strict=True):
        assert torch.equal(dense(getattr(p, extension.field), p), matrix)


def test_positive_curvature_has_what_activations_between_the_model_and_the_loss_add():
    model, x, y = extend(nn.Linear(3, 2).double()), torch.randn(4, 3).double(), torch.rand(4, 2).double()
    with backpack(PCHMP()):
        F.mse_loss(model(x).tanh().tanh(), y).backward()
    u = model(x).tanh().detach()
    t = u.tanh()
    slopes, error = (1 - u * u, 1 - t * t), (t - y) / 4
    ggn = (slopes[0] * slopes[1]).square() / 4
    inner, outer = error * slopes[1] * (-2 * u * slopes[0]), error * (-2 * t * slopes[1])
    expected = ggn + inner.clamp(min=0) + outer.clamp(min=0) * slopes[0].square()
    compare(dense(model.bias.pchmp, model.bias), expected.sum(0).diag(), "bias.pchmp")


def test_unknown_replacement_is_refused():
    with pytest.raises(ValueError, match=r"PCHMP.*'flip'"):
        PCHMP(modify="flip")
