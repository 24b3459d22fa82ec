"""Gradients that autograd need not compute, because they are sums of what is multiplied out for a quantity anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from cases import Case, Lambda, Problem, cross_entropy, labels, normal
from checks import FIRST_ORDER, by_case, check, extended
from reference import Reference, reference
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from curvopt import L2Regularizer, backpack, extend, set_columns_per_sweep
from curvopt.core import costs, sweep
from curvopt.core.derivatives.losses import Diagonal, register_loss
from curvopt.extensions import (
    GGNMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    Extension,
    KFACEmpirical,
    SumGradSquared,
    Variance,
)
from curvopt.optim import KFACSGD

Context = Callable[[], AbstractContextManager]


class Residual(nn.Sequential):
    """``x + f(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def network() -> nn.Module:
    """Convolutions of all kinds, with and without bias, on enough positions to be worth it; the first has no bias."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.Tanh(),
        Residual(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        nn.Conv2d(4, 3, (3, 1), (1, 2), padding_mode="circular", padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(3, 2, 2, 2),
        Lambda(lambda x: x.flatten(2).mT),
        nn.Linear(2, 3),
        nn.Tanh(),
        Lambda(lambda x: x.mean(1)),
        nn.Linear(3, 3),
    )


class Partly(nn.Module):
    """Squares of the outputs of all samples but the first, which is left linear."""

    def forward(self, z: Tensor, target: Tensor) -> Tensor:
        return z[0].sum() + (z[1:] - target[1:]).square().sum()


@register_loss(Partly)
def partly(module: Partly, z: Tensor, target: Tensor) -> Diagonal:
    """The root of its Hessian's diagonal."""
    diagonal = torch.full_like(z, 2**0.5)
    diagonal[0] = 0
    return Diagonal(diagonal)


CASE = Case("spared", network, normal(3, 2, 9, 8), cross_entropy(), labels)


class Weights(TorchDispatchMode):
    """Counts the weight gradients of convolutions that autograd computes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.count += bool(args[-1][1])
        return func(*args, **(kwargs or {}))


def backward(problem: Problem, *extensions: Extension) -> int:
    """Number of weight gradients of convolutions that autograd computed in a backward."""
    loss = problem.loss()
    with Weights() as weights, backpack(*extensions):
        loss.backward()
    return weights.count


@pytest.mark.parametrize("extension", FIRST_ORDER)
def test_gradients_and_fields_are_those_of_the_reference(extension: type[Extension]):
    ref, problem = reference(CASE), extended(CASE)
    assert backward(problem, extension()) == 0
    check(problem, ref, extension)
    for name, p in problem.trainable().items():
        assert_close(p.grad, ref.grad(name))
    backward(problem, extension())
    for name, p in problem.trainable().items():
        assert_close(p.grad, 2 * ref.grad(name))


@by_case
@pytest.mark.parametrize("one_by_one", [False, True], ids=["together", "one by one"])
def test_gradients_of_every_case(case: Case, one_by_one: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "spares_gradient", lambda *_: True)
    if one_by_one:
        monkeypatch.setattr(costs, "samples_at_once", lambda *sizes: 1)
        monkeypatch.setattr(costs, "by_pairs", lambda *_: False)
    ref, problem = reference(case), extended(case)
    for extension in FIRST_ORDER:
        problem.model.zero_grad()
        backward(problem, extension())
        check(problem, ref, extension)
        for name, p in problem.trainable().items():
            assert_close(p.grad, ref.grad(name))


@pytest.fixture
def one_by_one() -> Iterator[None]:
    """Columns are pulled back one by one, and the gradient brings one of them."""
    set_columns_per_sweep(1)
    yield
    set_columns_per_sweep(None)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("extension", [DiagGGNExact, BatchDiagGGNExact])
@pytest.mark.parametrize("pieces", [False, True])
def test_gradients_of_exact_diagonals(extension: type[Extension], pieces: bool, monkeypatch: pytest.MonkeyPatch):
    if pieces:
        monkeypatch.setattr(costs, "samples_at_once", lambda *sizes: 1)
    ref, problem = reference(CASE), extended(CASE)
    for times in (1, 2):
        assert backward(problem, extension()) == 0
        check(problem, ref, extension)
        for name, p in problem.trainable().items():
            assert_close(p.grad, times * ref.grad(name))
    assert backward(problem, extension(), KFLR(), GGNMP()) == 0
    assert backward(problem, extension(), Variance(), KFACEmpirical()) == 0
    for name, p in problem.trainable().items():
        assert_close(p.grad, 4 * ref.grad(name))


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian])
def test_gradients_where_it_brings_no_column_after_all(extension: type[Extension], monkeypatch: pytest.MonkeyPatch):
    """Which is known when the loss has been reached, after autograd was told what to compute."""
    monkeypatch.setattr(sweep, "turn", lambda *_: None)
    ref, problem = reference(CASE), extended(CASE)
    assert backward(problem, extension()) == 0
    check(problem, ref, extension)
    for name, p in problem.trainable().items():
        assert_close(p.grad, ref.grad(name))


@pytest.mark.usefixtures("one_by_one")
def test_gradients_of_samples_without_curvature():
    """Where a factor is zero, the gradient cannot be had from the column."""
    problem = Case("flat", network, normal(3, 2, 9, 8), Partly(), torch.zeros_like).problem()
    ref = Reference(problem.model, problem.x, problem.loss_of_output)
    extend(problem.model)
    extend(problem.lossfunc)
    assert backward(problem, DiagGGNExact()) == 0
    check(problem, ref, DiagGGNExact)
    for name, p in problem.trainable().items():
        assert_close(p.grad, ref.grad(name))


def test_together_with_other_quantities():
    problem, ref = extended(CASE), reference(CASE)
    assert backward(problem, Variance(), DiagGGNExact(), BatchGrad([0]), BatchL2Grad(), KFAC()) == 0
    for extension in (Variance, BatchL2Grad, DiagGGNExact):
        check(problem, ref, extension)
    for name, p in problem.trainable().items():
        assert_close(p.grad, ref.grad(name))
        assert_close(p.grad_batch, ref.grad_batch(name)[:1])


def test_frozen_parameters_have_no_gradient():
    problem = extended(CASE)
    convolutions = [m for m in problem.model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    convolutions[1].bias.requires_grad_(False)
    convolutions[2].weight.requires_grad_(False)
    ref = Reference(problem.model, problem.x, problem.loss_of_output)
    assert backward(problem, SumGradSquared()) == 0
    for name, p in problem.model.named_parameters():
        assert (p.grad is None) != p.requires_grad
        assert p.grad is None or torch.allclose(p.grad, ref.grad(name))


def test_inputs_have_theirs():
    problem, plain = extended(CASE), CASE.problem()
    problem.x.requires_grad_(True)
    plain.x.requires_grad_(True)
    plain.loss().backward()
    assert backward(problem, BatchL2Grad()) == 0
    assert_close(problem.x.grad, plain.x.grad)


def test_gradients_take_the_layout_of_their_parameter():
    problem = extended(CASE)
    problem.model.to(memory_format=torch.channels_last)
    assert backward(problem, Variance()) == 0
    for name, p in problem.trainable().items():
        assert p.grad.stride() == p.stride()
        assert_close(p.grad, reference(CASE).grad(name))


def test_extension_hooks_see_the_gradient():
    problem, ref, seen = extended(CASE), reference(CASE), []
    names = {module: name for name, module in problem.model.named_modules()}

    def hook(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            assert_close(module.weight.grad, ref.grad(f"{names[module]}.weight"))
            seen.append(module)

    with backpack(Variance(), extension_hook=hook):
        problem.loss().backward()
    assert len(seen) == 3


def test_hooks_of_gradient_accumulation_see_what_they_always_do():
    problem, ref, seen = extended(CASE), reference(CASE), {}
    nodes = {name: get_gradient_edge(p).node for name, p in problem.trainable().items()}
    for name, node in nodes.items():
        node.register_prehook(lambda grads, name=name: seen.update({name: grads[0].clone()}))
    backward(problem, Variance())
    assert seen.keys() == problem.trainable().keys()
    for name, grad in seen.items():
        assert_close(grad, ref.grad(name))


class Doubled(torch.autograd.Function):
    """Somebody's own, which may ask what is differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def append_custom(problem: Problem) -> None:
    problem.model.append(Lambda(Doubled.apply))


def double_at_output(problem: Problem) -> None:
    """By a hook on the output of a convolution."""

    def doubled(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return x

    problem.model.insert(1, Lambda(doubled))


def share_weight(problem: Problem) -> None:
    problem.model[2].append(nn.Conv2d(4, 4, 3, padding=1, groups=2))
    problem.model[2][-1].weight = problem.model[2][0].weight


# what is done to the problem, and of how many convolutions autograd computes the weight's gradient
CHANGES: dict[str, tuple[Callable[[Problem], object], int]] = {
    "tensor hook": (lambda problem: problem.model[3].weight.register_hook(lambda grad: 3 * grad), 1),
    "tensor hook on the bias": (lambda problem: problem.model[3].bias.register_hook(lambda grad: 3 * grad), 1),
    "hook after accumulation": (
        lambda problem: problem.model[3].weight.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", 3 * p.grad)
        ),
        1,
    ),
    "hook on an output": (double_at_output, 0),
    "module hook": (lambda problem: problem.model[3].register_full_backward_hook(lambda *_: None), 4),
    "custom function": (append_custom, 4),
    "shared weight": (share_weight, 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_somebody_else_has_a_say_autograd_does_it(change: str):
    do, count = CHANGES[change]
    problem, plain = CASE.problem(), CASE.problem()
    for of in (problem, plain):
        torch.manual_seed(1)
        do(of)
        of.model.double()
    plain.loss().backward()
    extend(problem.model)
    assert backward(problem, Variance()) == count
    for p, expected in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        assert_close(p.grad, expected.grad)


def test_hooks_on_several_parameters_see_all_gradients():
    problem, seen = extended(CASE), []
    register_multi_grad_hook(list(problem.model.parameters()), seen.append)
    assert backward(problem, Variance()) == 4
    assert len(seen) == 1
    assert all(grad is not None for grad in seen[0])


# programs that would notice, and what they notice: given a convolution, and a context for the backward


def unfrozen_after_the_forward(conv: nn.Module, context: Context) -> object:
    """As the discriminator of a GAN, while its generator is trained."""
    conv.requires_grad_(False)
    loss = conv(torch.randn(2, 2, 8, 8).requires_grad_()).sum()
    conv.requires_grad_(True)
    with context():
        loss.backward()
    return conv.weight.grad


def frozen_after_the_forward(conv: nn.Module, context: Context) -> object:
    scale = torch.ones(1).requires_grad_()
    x = scale * torch.randn(2, 2, 8, 8)
    x.retain_grad()
    loss = conv(x).sum()
    scale.requires_grad_(False)
    with context():
        loss.backward()
    return x.grad


def leaves_among_the_roots(conv: nn.Module, context: Context) -> object:
    y = torch.randn(3).requires_grad_()
    loss = conv(torch.randn(2, 2, 8, 8)).sum()
    with context():
        torch.autograd.backward([loss, y, conv.bias], [None, torch.ones(3), torch.ones(3)])
    return y.grad, conv.bias.grad


def legacy_module_hook(conv: nn.Module, context: Context) -> object:
    conv.register_backward_hook(lambda module, grads, _: tuple(None if g is None else 2 * g for g in grads))
    loss = conv(torch.randn(2, 2, 8, 8)).sum()
    with context():
        loss.backward()
    return conv.bias.grad


def hook_on_a_node(conv: nn.Module, context: Context) -> object:
    h = conv(torch.randn(2, 2, 8, 8))
    h.grad_fn.register_hook(lambda grads, _: (*grads[:2], 0 * grads[2]))
    with context():
        h.sum().backward()
    return conv.bias.grad


def hook_on_a_node_inside(_: nn.Module, context: Context) -> object:
    linear = extend(nn.Linear(2, 3).double())
    h = linear(torch.randn(2, 30, 2))
    h.grad_fn.next_functions[0][0].register_prehook(lambda grads: (2 * grads[0],))
    with context():
        h.sum().backward()
    return linear.bias.grad


def anomaly(conv: nn.Module, context: Context) -> object:
    x = torch.randn(2, 2, 8, 8)
    x[0, 0, 0, 0] = torch.inf
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values") as error:
        h = conv(x)
        loss = torch.where(h.isfinite(), h, 0.0).sum()
        with context():
            loss.backward()
    return str(error.value)


def graph_is_freed(_: nn.Module, context: Context) -> object:
    linear = extend(nn.Linear(2, 3).double())
    h = linear(torch.randn(2, 30, 2))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"), context():
        h.backward(torch.ones_like(h))
        h.backward(torch.ones_like(h))
    return None


def callback_at_the_end(conv: nn.Module, context: Context) -> object:
    """Of a hook of gradient accumulation, as reducers of gradients have it."""
    last, seen = extend(nn.Conv2d(3, 3, 3, padding=1).double()), []
    node = get_gradient_edge(last.weight).node
    end = lambda: seen.append(conv.weight.grad.clone())  # noqa: E731
    node.register_hook(lambda *_: torch.autograd.Variable._execution_engine.queue_callback(end))
    loss = last(conv(torch.randn(2, 2, 8, 8))).sum()
    with context():
        loss.backward()
    return seen


PROGRAMS = [
    unfrozen_after_the_forward,
    frozen_after_the_forward,
    leaves_among_the_roots,
    legacy_module_hook,
    hook_on_a_node,
    hook_on_a_node_inside,
    anomaly,
    graph_is_freed,
    callback_at_the_end,
]


@pytest.mark.filterwarnings("ignore:.*non-full backward hook", "ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_notice_nothing(program: Callable[[nn.Module, Context], object]):
    found = []
    for context in (nullcontext, lambda: backpack(Variance())):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            found.append(program(extend(nn.Conv2d(2, 3, 3)), context))
        finally:
            torch.set_default_dtype(torch.float32)
    plain, ours = found
    if isinstance(plain, str) or plain is None:
        assert ours == plain
    else:
        assert_close(ours, plain)


@pytest.mark.parametrize("extension", FIRST_ORDER)
def test_first_linear_layer_without_bias(extension: type[Extension]):
    """Nothing but its weight has the backward come there."""
    model = extend(nn.Linear(2, 3, bias=False).double())
    x = torch.randn(4, 30, 2).double()
    with backpack(extension()):
        model(x).square().sum().backward()
    assert_close(model.weight.grad, 2 * torch.einsum("nso,nsi->oi", x @ model.weight.T, x).detach())


def run(problem: Problem, *extensions: Extension, **options: object) -> None:
    loss = problem.loss()
    with backpack(*extensions):
        loss.backward(**options)


def with_terms(problem: Problem, *terms: Callable[[nn.Module], Tensor]) -> None:
    loss = problem.loss() + sum(term(problem.model) for term in terms)
    with backpack(Variance()):
        loss.backward()


def with_attached_optimizer(problem: Problem) -> None:
    optimizer = KFACSGD(problem.model.parameters(), 0.1)
    optimizer.attach(problem.model)
    run(problem, Variance())


def in_a_process_group(problem: Problem) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run(problem, Variance())
    finally:
        dist.destroy_process_group()


RUNS: dict[str, Callable[[Problem], None]] = {
    "some samples": lambda problem: run(problem, BatchGrad([0, 1])),
    "second order": lambda problem: run(problem, DiagGGNExact()),
    "a graph": lambda problem: run(problem, Variance(), create_graph=True),
    "inputs": lambda problem: run(problem, Variance(), inputs=list(problem.model.parameters())),
    "regularizer": lambda problem: with_terms(problem, lambda model: L2Regularizer(model.parameters(), 0.0)()),
    "added term": lambda problem: with_terms(problem, lambda model: 0 * model[3].weight.square().sum()),
    "attached": with_attached_optimizer,
    "process group": in_a_process_group,
}


@pytest.mark.filterwarnings("ignore:.*also enter the loss by an added term")
@pytest.mark.parametrize("way", RUNS)
def test_ways_to_differentiate_that_leave_it_to_autograd(way: str):
    problem, ref = extended(CASE), reference(CASE)
    with Weights() as weights:
        RUNS[way](problem)
    assert weights.count == 4
    for name, p in problem.trainable().items():
        assert_close(p.grad, ref.grad(name))


@pytest.mark.parametrize(
    "half", [lambda model: model.bfloat16(), lambda model: model.float()], ids=["whole", "autocast"]
)
def test_half_precision_is_left_to_autograd(half: Callable[[nn.Module], nn.Module]):
    problem = extended(CASE)
    half(problem.model)
    problem.x = problem.x.to(problem.model[0].weight.dtype)
    with torch.autocast("cpu", enabled=problem.x.dtype == torch.float32), Weights() as weights:
        run(problem, Variance())
    assert weights.count == 4


def test_a_hook_of_a_parameter_that_is_registered_while_the_backward_runs():
    problem, seen = extended(CASE), []
    weight = problem.model[0].weight
    output = problem.model(problem.x)

    def register(grad: Tensor) -> None:
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    output.register_hook(register)
    with backpack(BatchGrad()):
        problem.lossfunc(output, problem.y).backward()
    assert_close(seen, [weight.grad])
