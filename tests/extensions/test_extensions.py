"""Every field of every case equals its dense reference, and the backward around it is none the worse for it.

Tests of `extensions/base.py`, `extensions/firstorder.py`, `extensions/secondorder.py`, `core/backward/context.py` and
`core/backward/kfra.py`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Lambda, Problem, cross_entropy, mlp, mse, normal, values
from checks import (
    BY_NAME,
    EXACT,
    VARIED,
    backward,
    by_case,
    by_varied_case,
    check,
    check_products,
    columns_per_sweep,
    compare,
    extended,
    generator,
    hessian_diagonals,
)
from reference import Reference, reference
from torch import Tensor, einsum, nn
from torch._subclasses import FakeTensor
from torch.testing import assert_close

from curvopt import backpack, disable, extend
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)

SAMPLED: list[type[Extension]] = [DiagGGNMC, KFAC]
FIELDS = [extension.field for extension in [*EXACT, *SAMPLED]]


def by_name(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [BY_NAME[name] for name in names], ids=lambda case: case.name)


# what KFRA is not defined for: operations that have no row per sample, several paths, other layers than affine ones
NO_CHAIN = {
    *"mlp-tokens mlp-two-leading-dims residual residual-conv heads attention-row-per-token mixer".split(),
    *"own-parameters-and-children keyword-arguments argument-without-batch bilinear subclass prelu".split(),
    *"batchnorm2d-eval batchnorm1d-eval layernorm groupnorm ce-smoothed-weight-ignored ce-probabilities-weight".split(),
    *(name for name in BY_NAME if "extra-dims" in name),
    *(name for name in BY_NAME if name.startswith(("conv1d", "conv2d", "conv3d")) and name != "conv2d-segmentation"),
}


def mean_over(*axes: int) -> nn.Module:
    return Lambda(lambda h: h.mean(axes))


# chains that are no Sequential
CHAINS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "functional-between": lambda m: [m.first, nn.GELU(), m.second, nn.Tanh(), m.third],
    "used-twice": lambda m: [m.again, nn.Tanh(), m.again, nn.Tanh(), m.out],
    "used-on-tokens-and-pool": lambda m: [m.shared, nn.Tanh(), mean_over(1), m.shared, m.out],
    "conv-used-twice": lambda m: [m.shared, nn.Tanh(), nn.AvgPool2d(2), m.shared, mean_over(2, 3), m.out],
    "checkpointed": lambda m: [*m.inner, m.out],
}


def chain_of(name: str, model: nn.Module) -> list[nn.Module]:
    """The modules of a sequential network in their order."""
    if name in CHAINS:
        return CHAINS[name](model)
    return [module for module in model.modules() if not isinstance(module, nn.Sequential)]


def seeded(seed: int = 5) -> torch.Generator:
    return generator(seed)


def has_fields(problem: Problem, *extensions: type[Extension]) -> bool:
    fields = [extension.field for extension in extensions] or FIELDS
    return any(hasattr(p, field) for p in problem.model.parameters() for field in fields)


# ------------------------------------------------------------------------------------------------------- numbers, exact


@by_case
def test_field_equals_dense_reference(case: Case):
    ref = reference(case)
    for extension in EXACT:
        check(backward(extended(case), extension), ref, extension)
    for approx in ("reduce", "backpack"):
        for name, p in backward(extended(case), KFLR(approx=approx)).trainable().items():
            compare(p.kflr, ref.kflr(name, approx), f"{name}.kflr, {approx}")
    for name, p in backward(extended(case), SqrtGGNExact).trainable().items():
        assert p.sqrt_ggn_exact.shape[1:] == (ref.samples, *p.shape)
        V = p.sqrt_ggn_exact.flatten(2) if p.dim() else p.sqrt_ggn_exact.unsqueeze(2)
        compare(einsum("cnp,cnq->npq", V, V), ref.ggn_batch(name), f"{name}.sqrt_ggn_exact")


@by_case
def test_all_in_one_backward_equal_one_by_one_and_leave_the_gradient_alone(case: Case):
    plain, problem = backward(case.problem()), backward(extended(case), *EXACT, *SAMPLED)
    check(problem, reference(case), *EXACT)
    for p, expected in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None)
        assert p.grad is None or torch.equal(p.grad, expected.grad)
        if p.requires_grad:
            assert p.diag_ggn_mc.shape == p.shape
            assert [f.shape for f in p.kfac] == [f.shape for f in p.kflr]
    if plain.x.requires_grad:
        assert torch.equal(problem.x.grad, plain.x.grad)


@pytest.mark.parametrize("columns", [1, 2, 100])
@by_name(*VARIED, "residual", "attention-row-per-token", "bilinear")
def test_number_of_columns_swept_together_changes_nothing(case: Case, columns: int):
    fields = [DiagGGNExact, KFLR, DiagHessian, BatchDiagHessian]
    with columns_per_sweep(columns):
        problem = backward(extended(case), *fields, HMP)
    check(problem, reference(case), *fields)
    check_products(problem, reference(case), HMP)


def test_roots_have_the_columns_of_the_losses_that_reach_them() -> None:
    """Not those of other losses, whose entries nobody would fill."""
    model, x = extend(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 5)]).double()), torch.randn(4, 2).double()
    torch.use_deterministic_algorithms(True)  # fills memory that is not initialized with nan
    try:
        with backpack(SqrtGGNExact(), DiagGGNExact()):
            (model[0](x).square().mean() + F.mse_loss(model[1](x), torch.zeros(4, 5).double())).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for p, columns in zip(model.parameters(), (2, 2, 5, 5), strict=True):
        assert p.sqrt_ggn_exact.shape == (columns, 4, *p.shape)
        assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact)


@by_varied_case
def test_subsamples_are_those_of_the_whole_batch(case: Case):
    """Scaling is that of the whole batch, and the order is the one asked for."""

    def fields(subsampling: Sequence[int] | None) -> dict[str, list[Tensor]]:
        mc = SqrtGGNMC(mc_samples=3, generator=seeded(), subsampling=subsampling)
        exact = BatchGrad(subsampling=subsampling), SqrtGGNExact(subsampling=subsampling)
        parameters = backward(extended(case), *exact, mc).trainable()
        return {name: [p.grad_batch, p.sqrt_ggn_exact, p.sqrt_ggn_mc] for name, p in parameters.items()}

    whole = fields(None)
    for subsampling in ([0], [2, 0], [1, 1, -1], (0, 2), range(1, 3), []):
        of = list(subsampling)
        for name, found in fields(subsampling).items():
            gradients, exact, mc = whole[name]
            compare(found, [gradients[of], exact[:, of], mc[:, of]], name)


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3)
        ),
    ],
    ids=["mlp", "convolution"],
)
def test_parts_of_the_gradient_through_batch_norm(net: Callable[[], nn.Sequential]):
    model, x, y = extend(net().double()), torch.randn(6, 4).double(), torch.arange(6) % 3
    kinds = (BatchGrad, BatchL2Grad, SumGradSquared, Variance)
    with (
        pytest.warns(CurvoptWarning, match="row n's part"),
        backpack(*(kind(through_batch_norm=True) for kind in kinds)),
    ):
        F.cross_entropy(model(x), y).backward()
    inputs = [x]
    for layer in model:
        inputs.append(layer(inputs[-1]))
    loss = F.cross_entropy(inputs[-1], y)
    for layer, before, after in zip(model, inputs, inputs[1:], strict=False):
        if not list(layer.parameters()):
            continue
        (arrived,) = torch.autograd.grad(loss, after, retain_graph=True)
        rows = (layer(before.detach()) * arrived).flatten(1).sum(1)
        for p in layer.parameters():
            parts = torch.stack([torch.autograd.grad(row, p, retain_graph=True)[0] for row in rows])
            compare(p.grad_batch, parts, "parts")
            compare(p.grad, parts.sum(0), "sum")
            compare(p.batch_l2, parts.flatten(1).square().sum(1), "norms")
            compare(p.sum_grad_squared, parts.square().sum(0), "squares")
            compare(p.variance, parts.var(0, unbiased=False), "variance")


def test_exact_fields_of_a_batch_that_batch_norm_mixes():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model, x, y = extend(net, batch_axis=None), torch.randn(5, 3).double(), torch.arange(5) % 3
    with backpack(DiagHessian(), DiagGGNExact()):
        F.cross_entropy(model(x), y).backward()
    z = model(x)
    logits = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(logits, y), logits, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(s, logits, retain_graph=True)[0].flatten() for s in slope.flatten()])
    diagonals = hessian_diagonals(F.cross_entropy(model(x), y), list(model.parameters()))
    for (name, p), diagonal in zip(model.named_parameters(), diagonals, strict=True):
        compare(p.diag_h, diagonal, f"{name}.diag_h")
        jacobian = torch.stack([torch.autograd.grad(e, p, retain_graph=True)[0].flatten() for e in z.flatten()])
        compare(p.diag_ggn_exact.flatten(), (jacobian.T @ hessian @ jacobian).diagonal(), f"{name}.diag_ggn_exact")


def test_extensions_of_one_class_under_names_of_their_own():
    model, few, many, exact = extend(nn.Linear(3, 2).double()), DiagGGNMC(), DiagGGNMC(20_000), DiagGGNExact()
    few.savefield, many.savefield = "few", "many"
    with backpack(few, many, exact):
        F.cross_entropy(model(torch.randn(4, 3).double()), torch.tensor([0, 1, 1, 0])).backward()
    assert not hasattr(model.weight, "diag_ggn_mc") and not torch.equal(model.weight.few, model.weight.many)
    assert_close(model.weight.many, model.weight.diag_ggn_exact, rtol=0.05, atol=0.0)


def test_single_precision_agrees_with_double():
    case = BY_NAME["conv2d-deep"]
    problem = extended(case)
    problem.model.float()
    problem.x, problem.y = problem.x.float(), problem.y.float()
    for name, p in backward(problem, *EXACT).trainable().items():
        for extension in EXACT:
            value, expected = getattr(p, extension.field), getattr(reference(case), extension.field)(name)
            for a, b in zip(value, expected, strict=True) if isinstance(value, list) else [(value, expected)]:
                assert a.dtype == torch.float32
                assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7, f"{name}.{extension.field}"


# ----------------------------------------------------------------------------------------------------- averaged factors


@by_case
def test_averaged_factors_equal_the_recursion_or_are_refused(case: Case):
    problem, ref = extended(case), reference(case)
    if case.name in NO_CHAIN:
        with pytest.raises(CurvoptError, match="kfra is defined|not one row for each sample"):
            backward(problem, KFRA)
        assert not has_fields(problem, KFRA)
        return
    model = case.problem().model
    expected = Reference(model, ref.x, problem.loss_of_output).kfra(chain_of(case.name, model))
    for name, p in backward(problem, KFRA).trainable().items():
        compare(p.kfra, expected[name], name)


def test_averaged_factors_of_layers_that_are_extended_one_by_one():
    whole = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    parts = [extend(layer) for layer in copy.deepcopy(whole)]
    with backpack(KFRA()):
        F.cross_entropy(extend(whole)(x), y).backward()
        F.cross_entropy(parts[2](parts[1](parts[0](x))), y).backward()
    for i in (0, 2):
        for p, q in zip(whole[i].parameters(), parts[i].parameters(), strict=True):
            compare(q.kfra, p.kfra, f"layer {i}")
    with pytest.raises(CurvoptError, match="another number.*kfra is not defined there"), backpack(KFRA()):
        sum(F.cross_entropy(model(x[:n]), y[:n]) for model, n in ((whole, 6), (parts[0], 3))).backward()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_averaged_factors_of_a_cnn(reduction: str, groups: int):
    net = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 4, 3, padding=1, groups=groups),
        nn.Sigmoid(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 2, 2, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    case = Case("", net, normal(3, 2, 6, 4), cross_entropy(reduction=reduction))
    problem, pristine = backward(extended(case), KFRA), case.problem()
    expected = Reference(pristine.model, pristine.x, problem.loss_of_output).kfra(list(pristine.model))
    for name, p in problem.trainable().items():
        compare(p.kfra, expected[name], name)
    factors = [p.kfra for p in problem.model[0].parameters()]
    problem.model[3].requires_grad_(False)
    backward(problem, KFRA)
    compare([p.kfra for p in problem.model[0].parameters()], factors, "before a frozen convolution")


# ----------------------------------------------------------------------------------------------------- numbers, sampled


@by_case
def test_sampled_fields_converge_to_exact_ones(case: Case):
    """The mean over independent draws is as far from the exact field as their scatter allows, and that is not far."""
    quantities_of_the_same_samples_fit_together(case)
    draws, samples = 12, 60
    problem, ref = extended(case), reference(case)
    loss = problem.loss()
    seen: dict[tuple[str, str], list] = {}
    torch.manual_seed(1)
    for _ in range(draws):
        with backpack(DiagGGNMC(mc_samples=samples), KFAC(mc_samples=samples)):
            torch.autograd.grad(loss, list(problem.trainable().values()), retain_graph=True)
        for name, p in problem.trainable().items():
            seen.setdefault((name, "diag_ggn_exact"), []).append(p.diag_ggn_mc)
            # a factor A is exact; what is sampled comes first
            seen.setdefault((name, "kflr"), []).append(p.kfac[0])
            assert len(p.kfac) == len(ref.kflr(name))
            compare(p.kfac[1:], ref.kflr(name)[1:], f"{name}: A")
    for (name, field), draws_of in seen.items():
        exact = getattr(ref, field)(name)
        exact = exact[0] if isinstance(exact, list) else exact
        mean, variance = torch.stack(draws_of).mean(0), torch.stack(draws_of).var(0).sum() / draws
        bound = 6 * variance.sqrt()
        assert (mean - exact).norm() <= bound + 1e-12, f"{name}: {field}"
        assert bound <= 0.6 * exact.norm() + 1e-12, f"{name}: the bound on {field} could not detect much"
        # in the direction of the exact field the estimate is a number, and so the sharper test of scalings
        along = torch.stack([(value * exact).sum() for value in draws_of]) / exact.square().sum().clamp(min=1e-300)
        if exact.norm() > 0:
            assert abs(along.mean() - 1) <= 6 * along.std() / draws**0.5 + 1e-12, f"{name}: scale of {field}"


def quantities_of_the_same_samples_fit_together(case: Case) -> None:
    """One seed is one draw: a root squares to the diagonals and the Kronecker factors of the same draw."""
    problem, ref = extended(case), reference(case)
    for approx in ("expand", "reduce"):
        backward(
            problem,
            SqrtGGNMC(mc_samples=3, generator=seeded()),
            DiagGGNMC(mc_samples=3, generator=seeded()),
            BatchDiagGGNMC(mc_samples=3, generator=seeded()),
            KFAC(mc_samples=3, generator=seeded(), approx=approx),
        )
        for name, p in problem.trainable().items():
            V = p.sqrt_ggn_mc
            assert V.shape == (3, ref.samples, *p.shape)
            compare(p.diag_ggn_mc, V.square().sum((0, 1)), f"{name}.diag_ggn_mc")
            compare(p.diag_ggn_mc_batch, V.square().sum(0), f"{name}.diag_ggn_mc_batch")
            if len(p.kfac) == 1:
                V = V.reshape(-1, p.numel())
                compare(p.kfac, [V.T @ V], f"{name}.kfac, {approx}")
            else:
                compare(p.kfac[1:], ref.kflr(name, approx)[1:], f"{name}: A, {approx}")


def test_quantities_with_the_same_columns_share_samples():
    problem = backward(extended(BY_NAME["mlp"]), KFAC(mc_samples=2), DiagGGNMC(mc_samples=2))
    for p in problem.trainable().values():
        if p.dim() == 1:
            assert_close(p.kfac[0].diagonal(), p.diag_ggn_mc)
    # samples that are not shared differ
    backward(problem, KFAC(mc_samples=2), DiagGGNMC(mc_samples=3))
    assert not torch.allclose(problem.model[0].bias.kfac[0].diagonal(), problem.model[0].bias.diag_ggn_mc)


@by_name("mlp", "mse-extra-dims", "bce-mean", "ce-extra-dims")
def test_a_generator_makes_samples_repeatable_and_leaves_the_global_one_alone(case: Case):
    problem, drawn = extended(case), []
    for seed in [1, 1, 2]:
        before = torch.get_rng_state()
        backward(problem, DiagGGNMC(mc_samples=2, generator=seeded(seed)))
        assert torch.equal(before, torch.get_rng_state())
        drawn.append(next(iter(problem.trainable().values())).diag_ggn_mc)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# ---------------------------------------------------------------------------------------------------------- the context


def test_without_a_context_no_field_is_set():
    problem = backward(extended(BY_NAME["mlp"]))
    problem.loss().backward()
    with backpack(BatchGrad()):
        pass
    problem.loss().backward()
    assert not has_fields(problem)


def test_extending_twice_changes_nothing():
    case = BY_NAME["used-twice"]
    problem = extended(case)
    assert extend(problem.model) is problem.model and extend(problem.lossfunc) is problem.lossfunc
    check(backward(problem, SumGradSquared, DiagGGNExact), reference(case), SumGradSquared, DiagGGNExact)


def test_inner_context_decides_and_outer_one_returns():
    problem, ref = extended(BY_NAME["mlp"]), reference(BY_NAME["mlp"])
    with backpack(BatchGrad()):
        check(backward(problem, BatchL2Grad), ref, BatchL2Grad)
        assert not has_fields(problem, BatchGrad)
        for p in problem.model.parameters():
            del p.batch_l2
        problem.loss().backward()
        assert not has_fields(problem, BatchL2Grad)
        check(problem, ref, BatchGrad)


@by_varied_case
def test_two_backwards_through_a_retained_graph(case: Case):
    problem = extended(case)
    loss = problem.loss()
    with backpack(BatchGrad(), KFLR()):
        loss.backward(retain_graph=True)
    with backpack(DiagGGNExact(), Variance()):
        loss.backward()
    check(problem, reference(case), BatchGrad, KFLR, DiagGGNExact, Variance)
    for name, p in problem.trainable().items():
        assert_close(p.grad, 2 * reference(case).grad(name))


@by_varied_case
def test_two_forwards_and_their_backwards_in_other_order(case: Case):
    problem, other, fields = extended(case), case.problem(seed=1), [BatchGrad, DiagGGNExact, KFLR]
    other_ref = Reference(copy.deepcopy(case.problem().model), other.x, other.loss_of_output)
    first, second = problem.loss(), problem.lossfunc(problem.model(other.x), other.y)
    with torch.no_grad():
        problem.model(torch.randn_like(problem.x))
    for loss, ref in [(second, other_ref), (first, reference(case))]:
        check(backward(problem, *fields, loss=lambda loss=loss: loss), ref, *fields)


def test_a_state_dict_knows_nothing_of_extension():
    case = BY_NAME["mlp"]
    problem = extended(case)
    assert problem.model.state_dict().keys() == case.problem().model.state_dict().keys()
    case.problem().model.load_state_dict(problem.model.state_dict())


def test_disabled_forward_computes_the_same_and_records_nothing():
    problem = extended(BY_NAME["mlp"])
    with disable():
        loss = problem.loss()
    with pytest.raises(CurvoptError):
        backward(problem, BatchGrad, loss=lambda: loss)
    assert torch.equal(loss, problem.loss())
    assert not has_fields(problem, BatchGrad)
    check(backward(problem, BatchGrad), reference(BY_NAME["mlp"]), BatchGrad)  # and recording is on again


@by_name(*VARIED, "attention-row-per-token", "checkpointed", "inplace-relu-conv")
def test_other_ways_into_autograd_fill_the_fields_too(case: Case):
    extensions = [SumGradSquared, DiagGGNExact, KFLR, DiagHessian]
    for differentiate in (
        lambda loss, inputs: torch.autograd.backward(loss),
        lambda loss, inputs: torch.autograd.grad(loss, inputs),
        lambda loss, inputs: loss.backward(create_graph=True),
    ):
        problem = extended(case)
        with backpack(*(extension() for extension in extensions)):
            differentiate(problem.loss(), list(problem.trainable().values()))
        check(problem, reference(case), *extensions)


def test_a_gradient_of_some_parameters_is_right_for_those():
    problem, ref = extended(BY_NAME["mlp"]), reference(BY_NAME["mlp"])
    last = problem.model[4].weight
    with backpack(BatchGrad(), DiagGGNExact()):
        torch.autograd.grad(problem.loss(), [last])
    compare(last.grad_batch, ref.grad_batch("4.weight"), "grad_batch")
    compare(last.diag_ggn_exact, ref.diag_ggn_exact("4.weight"), "diag_ggn_exact")


# ------------------------------------------------------------------------------------------------------- extension hook


def modules_with_trainable_parameters(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]


@by_name(*VARIED, "conv-used-twice", "checkpointed", "heads")
def test_hook_is_called_once_per_module_with_all_its_fields(case: Case):
    problem, called = extended(case), []

    def hook(module: nn.Module) -> None:
        called.append(module)
        for p in module.parameters(recurse=False):
            if p.requires_grad:
                seen[p] = p.batch_l2.clone(), [factor.clone() for factor in p.kflr]
                del p.kflr, p.batch_l2

    seen: dict[nn.Parameter, tuple] = {}
    with backpack(KFLR(), BatchL2Grad(), extension_hook=hook):
        problem.loss().backward()
    expected = modules_with_trainable_parameters(problem.model)
    assert len(called) == len(expected) and set(called) == set(expected)
    assert not has_fields(problem, KFLR, BatchL2Grad)
    for p, (norms, factors) in seen.items():
        p.batch_l2, p.kflr = norms, factors
    check(problem, reference(case), KFLR, BatchL2Grad)


def test_hook_comes_before_earlier_layers_have_their_gradients():
    """So that a hook that deletes fields keeps the memory at one layer's worth."""
    problem = extended(BY_NAME["mlp"])
    layers = modules_with_trainable_parameters(problem.model)
    pending = list(layers)

    def hook(module: nn.Module) -> None:
        assert module is pending.pop()
        assert not any(hasattr(p, "grad_batch") for layer in pending for p in layer.parameters())
        for p in module.parameters():
            del p.grad_batch

    with backpack(BatchGrad(), extension_hook=hook):
        problem.loss().backward()
    assert not pending


def test_hook_is_called_for_modules_that_share_a_parameter_in_every_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    problem, called = extended(Case("", lambda: model, normal(5, 4))), []

    def hook(module: nn.Module) -> None:
        assert all(hasattr(p, "grad_batch") and hasattr(p, "kflr") for p in module.parameters())
        called.append(module)

    with backpack(BatchGrad(), KFLR(), extension_hook=hook):
        for times in (1, 2):
            problem.loss().backward()
            assert len(called) == 3 * times and set(called) == {model[0], model[2], model[4]}


# ------------------------------------------------------------------------------------ memory and exceptions: no remains


def spy_on_activations(model: nn.Module) -> list[weakref.ref]:
    """Weak references to every output of a module, filled by forward passes."""
    seen: list[weakref.ref] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    return seen


@pytest.mark.parametrize("differentiated", [False, True])
@by_name("mlp", "conv2d-groups", "prelu", "residual-conv", "inplace-relu", "mixer")
def test_no_tensor_survives_a_dropped_graph(case: Case, differentiated: bool):
    problem = extended(case)
    seen = spy_on_activations(problem.model)
    gc.collect()
    gc.disable()  # reference counts alone must suffice: cycles keep activations for an unknown time
    try:
        loss = problem.loss()
        if differentiated:
            with backpack(*(extension() for extension in [*EXACT, *SAMPLED])):
                loss.backward()
        x, problem.x = weakref.ref(problem.x), None
        del loss
        assert seen and not any(ref() is not None for ref in seen)
        assert x() is None
    finally:
        gc.enable()


def tensors_alive() -> list[Tensor]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]  # what others exported has no memory


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.parametrize("create_graph", [False, True])
def test_nothing_grows_over_many_steps(create_graph: bool):
    problem = extended(Case("", lambda: mlp(50, 50, 50, 2), normal(200, 50), mse(), values))

    def steps(number: int) -> None:
        for _ in range(number):
            with backpack(BatchL2Grad(), DiagGGNExact(), KFAC()):
                problem.loss().backward(create_graph=create_graph)
            for p in problem.trainable().values():
                p.grad = None
                if create_graph:  # fields are then part of a graph that holds the parameter
                    del p.batch_l2, p.diag_ggn_exact, p.kfac

    steps(20)
    tensors, memory = len(tensors_alive()), resident_bytes()
    steps(200)
    assert len(tensors_alive()) <= tensors
    # one activation of each step would be 16 MB
    assert resident_bytes() - memory < 8e6


@pytest.mark.parametrize("product", [GGNMP, HMP])
def test_products_hold_no_graph(product: type[Extension]):
    """It would hold the parameter, which holds the product: a cycle that nobody collects, and that is not pickled."""
    problem = backward(extended(BY_NAME["mlp"]), product)
    pickle.dumps(problem.model)
    weight, x = weakref.ref(problem.model[0].weight), weakref.ref(problem.x)
    del problem
    gc.collect()
    assert weight() is None and x() is None


@by_varied_case
def test_a_retained_graph_keeps_nothing_of_a_backward(case: Case):
    """What quantities share during a backward (patches of inputs) is gone after it."""
    problem = extended(case)
    loss = problem.loss()

    def kept() -> set[int]:
        # what a graph saved has an object once it is read; an input that was left to the graph is a number
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # what torch.func keeps of other tests
        alive = [tensor for tensor in tensors_alive() if tensor.grad_fn is None and not wrapped(tensor)]
        apart = [tensor.untyped_storage() for tensor in alive]
        return {storage.data_ptr() for storage in apart if storage.nbytes() > 8}

    before = kept()
    with backpack(*(extension() for extension in [*EXACT, *SAMPLED])):
        loss.backward(retain_graph=True)
    for p in problem.trainable().values():
        p.grad = None
        for field in FIELDS:
            delattr(p, field)
    assert kept() <= before


class Interrupted(Exception):
    """What a user's code raises in the middle of a backward."""


def interrupt(*_: object) -> None:
    raise Interrupted


@pytest.mark.parametrize("extensions", [[BatchGrad], [DiagGGNExact], [BatchGrad, Variance, KFAC]])
def test_exception_in_a_backward_leaves_no_state(extensions: list[type[Extension]]):
    problem = extended(BY_NAME["mlp"])
    h = problem.model[0](problem.x)
    h.register_hook(interrupt)
    loss = problem.lossfunc(problem.model[1:](h), problem.y)
    with pytest.raises(Interrupted):
        backward(problem, *extensions, loss=lambda: loss)
    assert not has_fields(problem, *extensions)
    problem.loss().backward()  # outside of the context that was left by the exception
    assert not has_fields(problem, *extensions)
    check(backward(problem, *EXACT), reference(BY_NAME["mlp"]), *EXACT)


@pytest.mark.parametrize("differentiate", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward(loss)])
def test_a_context_survives_an_exception_that_is_caught_inside_it(differentiate: Callable[[Tensor], None]):
    problem = extended(BY_NAME["mlp"])
    with backpack(BatchGrad(), DiagGGNExact(), extension_hook=interrupt) as context:
        with pytest.raises(Interrupted):
            differentiate(problem.loss())
        context.extension_hook = None
        differentiate(problem.loss())
    check(problem, reference(BY_NAME["mlp"]), BatchGrad, DiagGGNExact)


def test_variance_does_not_read_gradients_that_are_something_else():
    """Those that a hook changes, and what earlier backwards left behind."""
    problem = extended(BY_NAME["mlp"])
    for p in list(problem.trainable().values())[1:]:
        p.register_hook(lambda gradient: 2 * gradient)
    for _ in range(2):
        check(backward(problem, Variance), reference(BY_NAME["mlp"]), Variance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("create_graph", [False, True])
def test_variance_of_nearly_equal_gradients_is_not_negative(dtype: torch.dtype, create_graph: bool):
    net, x = extend(nn.Linear(3, 2).to(dtype)), (10 + 1e-3 * torch.randn(64, 3)).to(dtype)
    with backpack(Variance()):
        F.mse_loss(net(x), torch.full((64, 2), 1000.0, dtype=dtype)).backward(create_graph=create_graph)
    assert all((p.variance >= 0).all() for p in net.parameters())


def test_individual_gradients_may_be_changed_in_place():
    """Those of a bias are what arrives at the output, but layers that are added get one and the same."""
    net, other, x = extend(nn.Linear(2, 3)), extend(nn.Linear(2, 3)), torch.randn(4, 2)
    with backpack(BatchGrad()):
        F.mse_loss(net(x) + other(x), torch.zeros(4, 3)).backward()
    expected = net.bias.grad_batch.clone()
    other.bias.grad_batch.zero_()
    assert_close(net.bias.grad_batch, expected)
    with backpack(BatchGrad()):
        net(x).sum().backward()
    net.bias.grad_batch.mul_(torch.arange(4.0).unsqueeze(1))
    assert_close(net.bias.grad_batch, torch.arange(4.0).unsqueeze(1).expand(4, 3))


# ------------------------------------------------------------------------------------------------- half precision


def test_sums_of_many_samples_in_half_precision():
    """A sample's share is less than the last digit of the sum."""
    x, fields = torch.randn(1024, 64, 2, 2), {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        net = extend(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(256, 2)).to(dtype))
        with backpack(SumGradSquared(), DiagGGNExact()):
            F.cross_entropy(net(x.to(dtype)), torch.arange(1024) % 2).backward()
        fields[dtype] = [net[0].weight.sum_grad_squared, net[0].weight.diag_ggn_exact]
    for single, half in zip(*fields.values(), strict=True):
        assert half.dtype == torch.bfloat16
        assert abs(half.float().sum() / single.sum() - 1) < 0.01


def test_sums_of_many_columns_in_half_precision():
    x, found = torch.randn(16, 4), []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        net = extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 700)).to(dtype))
        with columns_per_sweep(1), backpack(DiagGGNExact(), BatchDiagGGNExact(), KFLR()):
            F.cross_entropy(net(x.to(dtype)), torch.arange(16)).backward()
        p, bias = net[0].weight, net[0].bias
        fields = [p.diag_ggn_exact, p.diag_ggn_exact_batch, p.kflr[0].diagonal(), bias.diag_ggn_exact]
        assert all(field.dtype == dtype for field in fields)
        found.append(torch.stack([field.float().sum() for field in fields]))
    assert_close(found[1], found[0], rtol=0.02, atol=0)
