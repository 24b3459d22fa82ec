"""What a regularizer of some parameters adds to each quantity: its share, or nothing and a word about it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Problem, mlp, normal
from checks import BY_NAME, DIAGONALS, FIRST_ORDER, backward, check, check_products, compare, extended
from reference import Reference, reference
from torch import Tensor

from curvopt import CurvoptError, CurvoptWarning, L2Regularizer
from curvopt.extensions import GGNMP, HMP, KFLR, PCHMP, SqrtGGNExact

CASE = BY_NAME["used-twice"]


class Regularized(Reference):
    """The reference of a loss with ``weight / 2`` times the squared norm of some parameters, shared out evenly."""

    def __init__(self, problem: Problem, names: list[str], weight: float):
        super().__init__(copy.deepcopy(problem.model), problem.x, problem.loss_of_output)
        self.names, self.weight = names, weight

    def _of(self, name: str) -> float:
        return self.weight if name in self.names else 0.0

    def grad_batch(self, name: str) -> Tensor:
        return super().grad_batch(name) + self._of(name) * self.parameters[name].detach() / self.samples

    def ggn_batch(self, name: str) -> Tensor:
        ggn = super().ggn_batch(name)
        return ggn + self._of(name) / self.samples * torch.eye(ggn.shape[-1], dtype=ggn.dtype)

    def ggn(self, name: str) -> Tensor:
        return self.ggn_batch(name).sum(0)

    def diag_ggn_exact_batch(self, name: str) -> Tensor:
        return self.ggn_batch(name).diagonal(dim1=1, dim2=2).reshape(-1, *self.parameters[name].shape)

    def diag_ggn_exact(self, name: str) -> Tensor:
        return self.diag_ggn_exact_batch(name).sum(0)


SOME = ["again.weight", "out.bias"]


def regularized(case: Case = CASE, names: list[str] = SOME) -> tuple[Problem, L2Regularizer]:
    problem = extended(case)
    return problem, L2Regularizer([problem.model.get_parameter(name) for name in names], 0.3)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_regularizer_is_contained(factor: float):
    problem, regularizer = regularized()
    ref = Regularized(CASE.problem(), SOME, 0.3 * factor)
    for extension in [*FIRST_ORDER, *DIAGONALS]:
        backward(problem, extension, loss=lambda: problem.loss() + factor * regularizer())
        check(problem, ref, extension)
    backward(problem, HMP, GGNMP, loss=lambda: problem.loss() + factor * regularizer())
    check_products(problem, ref, HMP, GGNMP)
    for name in problem.trainable():
        assert (name in SOME) == (not torch.equal(ref.hessian(name), reference(CASE).hessian(name)))


def test_regularizer_in_positive_curvature():
    case = Case("", lambda: mlp(3, 4, 2), normal(4, 3))
    problem, regularizer = regularized(case, ["0.weight", "0.bias", "2.weight", "2.bias"])
    plain = [p.pchmp for p in backward(problem, PCHMP).model.parameters()]
    backward(problem, PCHMP, loss=lambda: problem.loss() + regularizer())
    for p, product in zip(problem.model.parameters(), plain, strict=True):
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        compare(p.pchmp(v), product(v) + 0.3 * v, "pchmp")


def test_regularizer_where_it_is_not_defined():
    problem, regularizer = regularized()
    with pytest.raises(CurvoptError, match=r"sqrt_ggn_exact.*L2Regularizer"):
        backward(problem, SqrtGGNExact, loss=lambda: problem.loss() + regularizer())
    assert not any(hasattr(p, "sqrt_ggn_exact") for p in problem.model.parameters())


def test_kronecker_factors_leave_a_regularizer_out_and_say_so():
    problem, regularizer = regularized()
    with pytest.warns(CurvoptWarning, match=r"kflr.*damping"):
        backward(problem, KFLR, loss=lambda: problem.loss() + regularizer())
    ref = Regularized(CASE.problem(), SOME, 0.3)
    for name, p in problem.trainable().items():  # the block of a vector is dense, and has it
        compare(p.kflr, [ref.ggn(name)] if p.dim() == 1 else ref.kflr(name), name)


@pytest.mark.parametrize(
    "term",
    [
        lambda w: 0.1 * w.square().sum(),
        lambda w: 0.1 * w.abs().sum(),
        lambda w: 0.1 * w.norm(),
        lambda w: F.mse_loss(w, torch.zeros_like(w)),
    ],
    ids=["squares", "absolute", "norm", "mse"],
)
def test_handwritten_regularizer_is_left_out_and_said_so(term: Callable):
    for extension in [*FIRST_ORDER, *DIAGONALS, KFLR]:
        problem, ref = extended(CASE), reference(CASE)
        w = problem.model.out.weight
        with pytest.warns(CurvoptWarning, match=r"out\.weight"):
            backward(problem, extension, loss=lambda problem=problem, w=w: problem.loss() + term(w))
        check(problem, ref, extension)
        assert not torch.allclose(w.grad, ref.grad("out.weight"))
