"""The dense references agree with each other and with torch.func, so that they may judge."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case
from reference import Reference, affine_type, patches, reference
from torch import Tensor, einsum, nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
REWRITES_GRAPH = {"checkpointed"}  # torch.func refuses saved-tensor hooks


def output_derivatives_equal_those_of_torch_func(case: Case):
    ref, problem = reference(case), case.problem()
    parameters = problem.trainable()
    assert_close(ref.H, torch.func.hessian(problem.loss_of_output)(ref.z).reshape(ref.H.shape))
    if case.name in REWRITES_GRAPH:
        return
    J = jacrev(lambda p: functional_call(problem.model, p, (problem.x,)).flatten(), chunk_size=1)(parameters)
    for name in parameters:
        assert_close(ref.J[name], J[name], msg=lambda text: f"{name}: {text}")  # noqa: B023


def parts_of_the_gradient_add_up_to_it(case: Case):
    ref, problem = reference(case), case.problem()
    problem.loss().backward()
    for name, p in problem.trainable().items():
        assert_close(ref.grad(name), p.grad)
        assert_close(ref.grad_batch(name).sum(0), p.grad)
        assert_close(ref.diag_ggn_exact_batch(name).sum(0), ref.diag_ggn_exact(name))
        assert_close(ref.diag_ggn_exact(name).flatten(), ref.ggn(name).diagonal())


def samples_are_independent(case: Case):
    ref, problem = reference(case), case.problem()
    z = torch.cat([problem.model(x[None]) for x in problem.x])
    assert_close(ref.z, z.detach())
    N = ref.samples
    H = ref.H.view(N, len(ref.H) // N, N, -1).transpose(1, 2)
    assert not H[~torch.eye(N, dtype=torch.bool)].any()


def weights_of_affine_layers_get_derivatives_times_patches(case: Case):
    ref = reference(case)
    for name in ref._owners:
        uses = [use for use in ref._uses if use[0].weight is ref.parameters[name]]
        J = sum(einsum("cgro,gri->cgoi", D, x) for _, x, D in uses)
        assert_close(J.reshape(ref.J[name].shape), ref.J[name])


def hessians_of_samples_add_up_to_that_of_torch_func(case: Case):
    ref, problem = reference(case), case.problem()
    for name in ref.parameters:
        blocks = ref.hessian_batch(name)
        assert_close(blocks, blocks.mT)
        if case.name in REWRITES_GRAPH:
            continue

        def loss(p: Tensor, name: str = name) -> Tensor:
            return problem.loss_of_output(functional_call(problem.model, {name: p}, (problem.x,)))

        H = jacrev(jacrev(loss), chunk_size=1)(ref.parameters[name].detach())
        assert_close(ref.hessian(name), H.reshape(blocks.shape[1:]))


@by_case
def test_the_reference_of_a_case(case: Case):
    output_derivatives_equal_those_of_torch_func(case)
    parts_of_the_gradient_add_up_to_it(case)
    samples_are_independent(case)
    weights_of_affine_layers_get_derivatives_times_patches(case)
    hessians_of_samples_add_up_to_that_of_torch_func(case)


def test_gauss_newton_is_the_hessian_of_a_linear_model():
    case = next(case for case in CASES if case.name == "linear-no-bias")
    problem, ref = case.problem(), reference(case)
    (name,) = ref.parameters
    H = torch.func.hessian(lambda w: problem.loss_of_output(functional_call(problem.model, {name: w}, (problem.x,))))
    W = ref.parameters[name]
    assert_close(ref.ggn(name), H(W.detach()).view(W.numel(), W.numel()))


def test_product_of_factors_is_the_block_for_one_sample_at_one_position():
    case = next(case for case in CASES if case.name == "mlp-one-sample")
    ref = reference(case)
    for name in ref.parameters:
        factors = ref.kflr(name)
        product = torch.kron(*factors) if len(factors) == 2 else factors[0]
        assert_close(product, ref.ggn(name))
        assert torch.linalg.matrix_rank(product) > 0


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": (1, 2)}, {"dilation": (1, 2)}])
def test_patches_equal_unfold(options: dict):
    x, conv = torch.randn(3, 2, 6, 7, dtype=torch.float64), nn.Conv2d(2, 4, 3, **options).double()
    assert_close(patches(conv, x)[0], F.unfold(x, 3, **options).mT.flatten(0, 1))


def test_subclasses_are_affine_when_they_compute_the_same():
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x):
            return 2 * x

    assert affine_type(Same(1, 1)) is nn.Linear and affine_type(Other(1, 1)) is None


def test_mean_over_the_batch_shows_in_every_field():
    """Without a normalizer that couples samples, a sample alone gives the same up to the factor 1/N."""
    case = next(case for case in CASES if case.name == "mlp")
    problem, ref = case.problem(), reference(case)
    for n in range(ref.samples):
        y = problem.y[n : n + 1]
        alone = Reference(problem.model, problem.x[n : n + 1], lambda z, y=y: problem.lossfunc(z, y))
        for name in ref.parameters:
            assert_close(ref.grad_batch(name)[n], alone.grad(name) / ref.samples)
            assert_close(ref.diag_ggn_exact_batch(name)[n], alone.diag_ggn_exact(name) / ref.samples)
