"""Mistakes that others have made, and that no other test has under its name.

Where the table of cases holds the subject already (grouped, dilated or circular convolutions, ignored targets, reused
modules, scaled losses, ...), it is not repeated here.
"""

from __future__ import annotations

import pytest
import torch
from cases import Case, Lambda, Problem, mlp, normal
from checks import backward, check, check_all, columns_per_sweep, compare, extend_problem, extended
from reference import Reference
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.core.vjp import listeners, own_backward
from curvopt.extensions import KFAC, PCHMP, DiagGGNExact, DiagGGNMC, DiagHessian

# --------------------------------------------------------------------------------------------- wrong without a word


DROPOUTS = [
    *(nn.Dropout(p) for p in (0.0, 0.3, 0.9, 1.0)),
    nn.AlphaDropout(0.4),
    nn.FeatureAlphaDropout(0.4),
]


@pytest.mark.parametrize("dropout", DROPOUTS, ids=str)
def test_mask_of_dropout_is_not_told_from_zeros(dropout: nn.Module):
    """Zeros come from ReLU, too; the mask is that of the forward, whatever it left."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), dropout, nn.Linear(5, 4), nn.Tanh(), dropout, nn.Linear(4, 2))
    problem = Problem(model.double(), torch.randn(4, 4).double(), torch.randint(2, (4,)))
    torch.manual_seed(3)
    ref = Reference(problem.model, problem.x, problem.loss_of_output)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return problem.loss()

    check_all(problem, loss, ref)


@pytest.mark.parametrize("modify", ["clip", "abs"])
def test_positive_curvature_is_proportional_to_the_loss(modify: str):
    """A residual that is multiplied by the gradient twice would grow with its square."""
    products = []
    for scale in (1.0, 3.0):
        case = Case("", lambda: mlp(4, 5, 3, activation=nn.Sigmoid), normal(4, 4), scale=scale)
        problem = backward(extended(case), PCHMP(modify=modify))
        products.append([p.pchmp(torch.eye(p.numel()).double().view(-1, *p.shape)) for p in problem.model.parameters()])
    for single, triple in zip(*products, strict=True):
        compare(triple, 3 * single, modify)


# -------------------------------------------------------------------------------------------------------------- breaks


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LazyBatchNorm1d, nn.SyncBatchNorm], ids=lambda n: n.__name__)
def test_batch_norm_in_a_net_with_kfac(norm: type[nn.Module]):
    """Factors of the norm's own parameters included, in train mode and in eval mode."""
    model = nn.Sequential(
        nn.Linear(4, 5), norm() if norm is nn.LazyBatchNorm1d else norm(5), nn.ReLU(), nn.Linear(5, 2)
    )
    model = model.double()
    if norm is nn.LazyBatchNorm1d:
        model(torch.randn(4, 4).double())
    if norm is nn.SyncBatchNorm:
        model.eval()  # on CPUs there is no other
    lossfunc, x, y = extend(nn.CrossEntropyLoss()), torch.randn(6, 4).double(), torch.randint(2, (6,))
    extend(model)
    for mode in {model.training, False}:
        model.train(mode)
        with backpack(KFAC(), DiagGGNMC()):
            lossfunc(model(x), y).backward()
        for name, p in model.named_parameters():
            factors = p.kfac
            assert len(factors) == (2 if p.dim() == 2 else 1)
            assert all(factor.isfinite().all() and factor.any() for factor in factors), name
            if len(factors) == 1:
                compare(factors[0].diagonal(), p.diag_ggn_mc, name)


class _Complex(nn.Module):
    """Real parameters that meet the samples in complex numbers, one of them in no known way perhaps."""

    def __init__(self, known: bool):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 3, 2)), nn.Parameter(torch.randn(3))
        self.centres = None if known else nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(x * self.scale) @ torch.view_as_complex(self.weight)
        return z if self.centres is None else torch.complex(z.real, torch.cdist(x, self.centres))


def _cdist_has_a_second_derivative() -> bool:
    x = torch.rand(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.cdist(x, x.detach() + 1).sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError:
        return False
    return True


needs_cdist = pytest.mark.skipif(not _cdist_has_a_second_derivative(), reason="this PyTorch derives cdist only once")


@pytest.mark.filterwarnings("ignore:the first axis does not hold")
@pytest.mark.parametrize("known", [True, pytest.param(False, marks=needs_cdist)])
def test_real_parameters_of_complex_operations(known: bool):
    model = nn.Sequential(_Complex(known), Lambda(torch.abs), nn.Linear(3, 2)).double()
    check_all(Problem(model, torch.randn(3, 3).double(), torch.randint(2, (3,))))


@pytest.mark.parametrize("activation", [nn.Hardshrink(1e9), nn.ELU(), nn.SELU()], ids=str)
def test_nonlinear_operation_without_curvature_here(activation: nn.Module):
    """Where all units are in a linear part of it, or dead, it adds nothing, and no column is left to be swept."""
    model = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    problem = Problem(model, torch.randn(3, 3).double(), torch.randint(2, (3,)))
    ref = Reference(problem.model, problem.x, problem.loss_of_output)
    check(backward(extend_problem(problem), DiagHessian, DiagGGNExact), ref, DiagHessian, DiagGGNExact)
    for name, p in problem.trainable().items():
        compare(p.diag_h, p.diag_ggn_exact, name)


def test_contexts_of_two_threads_leave_nothing_behind():
    """They belong to the process, so those of threads may end in another order than they have begun."""
    pulling, context = own_backward(), backpack(KFAC())
    pulling.__enter__()
    context.__enter__()
    pulling.__exit__(None, None, None)
    context.__exit__(None, None, None)
    assert listeners() == []


def test_several_columns_of_one_image_pass_a_batch_norm_before_a_channels_last_convolution():
    """PyTorch's batching rule mistakes their strides."""
    for seed in range(20):
        torch.manual_seed(seed)
        inner = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        model = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.BatchNorm2d(2), inner, nn.Flatten(), nn.Linear(24, 3))
        model, lossfunc = extend(model.eval().double()), extend(nn.CrossEntropyLoss())
        x, y = torch.randn(1, 2, 5, 4).double(), torch.randint(3, (1,))
        found = []
        for columns in (1, None):
            with columns_per_sweep(columns), backpack(DiagGGNExact()):
                lossfunc(model(x), y).backward()
            found.append([p.diag_ggn_exact for p in model.parameters()])
        assert_close(*found)
