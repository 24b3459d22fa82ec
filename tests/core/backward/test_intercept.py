"""A context changes nothing in the user's backward: ``.grad`` keeps its bits, hooks of users run as in a plain one.

Tests of `core/vjp.py`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from cases import Lambda, Mixer, used_twice
from checks import FIRST_ORDER
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from curvopt import L2Regularizer, backpack, extend
from curvopt.core.vjp import listeners, own_backward
from curvopt.extensions import (
    GGNMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    Extension,
    KFACEmpirical,
    Variance,
)

Context = Callable[[], AbstractContextManager]


def convolutions() -> nn.Module:
    """All kinds, with and without bias, then a linear layer at many positions."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, (3, 1), (1, 2), padding_mode="circular", padding=1),
        nn.ConvTranspose2d(3, 2, 2, 2),
        Lambda(lambda x: x.flatten(2).mT),
        nn.Linear(2, 3, bias=False),
        Lambda(lambda x: torch.tanh(x).mean(1)),
        nn.Linear(3, 3),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
    return nn.Sequential(layer, Lambda(lambda x: x.mean(1)), nn.Linear(4, 3))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 3, 2, batch_first=True), Lambda(lambda out: out[0][:, -1]))


def partly_frozen() -> nn.Module:
    model = convolutions()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convolutions, (3, 2, 9, 8)),
    "channels last": (lambda: convolutions().to(memory_format=torch.channels_last), (3, 2, 9, 8)),
    "partly frozen": (partly_frozen, (3, 2, 9, 8)),
    "encoder": (encoder, (3, 5, 4)),
    "recurrent": (recurrent, (3, 5, 4)),
    "used twice": (used_twice, (3, 4)),
    "operations": (lambda: nn.Sequential(Mixer(5, 4), Lambda(lambda x: x.mean(1)), nn.Linear(4, 3)), (3, 5, 4)),
}
QUANTITIES: dict[str, list[type[Extension]]] = {
    **{extension.__name__: [extension] for extension in FIRST_ORDER},
    "sampled": [KFAC],
    "exact": [KFLR, DiagGGNExact, BatchDiagGGNExact, GGNMP],
    "empirical": [KFACEmpirical],
    "Hessian": [DiagHessian],
    "several": [Variance, DiagGGNExact, BatchGrad, KFACEmpirical, KFAC],
}


@pytest.mark.parametrize("net", NETS)
def test_gradients_have_the_bits_of_a_plain_backward(net: str):
    make, shape = NETS[net]

    def gradients(*extensions: Extension) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, x, y = extend(make()), torch.randn(shape, requires_grad=True), torch.tensor([0, 2, 1])
        for _ in range(2):  # the second adds to the first
            with sdpa_kernel(SDPBackend.MATH):  # the other has no second derivative
                loss = F.cross_entropy(model(x), y)
            with backpack(*extensions) if extensions else nullcontext():
                loss.backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    plain = gradients()
    for quantities in QUANTITIES.values():
        assert_close(gradients(*(extension() for extension in quantities)), plain, rtol=0, atol=0, check_stride=True)


# programs with hooks, or that differentiate in another way: given a convolution, and a context for the backward


#: What is done with the convolution, and perhaps layers around it, before an ordinary backward.
PREPARED: dict[str, Callable[[nn.Module], object]] = {
    "hook of the weight": lambda conv: conv.weight.register_hook(lambda grad: 3 * grad),
    "hook after accumulation": lambda conv: conv.weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", 3 * p.grad)
    ),
    "legacy hook of a module": lambda conv: conv.register_backward_hook(
        lambda module, grads, _: tuple(None if g is None else 2 * g for g in grads)
    ),
    "custom function": lambda conv: nn.Sequential(conv, Lambda(Doubled.apply)),
    "half precision": lambda conv: nn.Sequential(Lambda(lambda x: x.bfloat16()), conv.bfloat16()),
}


def hook_of_an_output(conv: nn.Module, context: Context) -> object:
    """Behind it, the gradient is another one."""

    def doubled(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return x

    return backward(nn.Sequential(conv, Lambda(doubled), extend(nn.Conv2d(3, 2, 3))), context)


def hook_of_the_loss_in_place(conv: nn.Module, context: Context) -> object:
    loss = F.mse_loss(conv(torch.randn(2, 2, 8, 8)), torch.zeros(2, 3, 6, 6))
    loss.register_hook(lambda grad: grad.mul_(2))
    with context():
        loss.backward()
    return [p.grad for p in conv.parameters()]


def hook_of_a_module(conv: nn.Module, context: Context) -> object:
    conv.register_full_backward_hook(lambda module, of_inputs, of_outputs: tuple(2 * grad for grad in of_inputs))
    return backward(nn.Sequential(extend(nn.Conv2d(2, 2, 3)), conv), context)


def hook_of_several_parameters(conv: nn.Module, context: Context) -> object:
    seen: list[object] = []
    register_multi_grad_hook(list(conv.parameters()), lambda grads: seen.append([grad.clone() for grad in grads]))
    return backward(conv, context), seen


def hooks_of_accumulation(conv: nn.Module, context: Context) -> object:
    seen: list[Tensor] = []
    for p in conv.parameters():
        get_gradient_edge(p).node.register_prehook(lambda grads: seen.append(grads[0].clone()))
    return backward(conv, context), seen


def callback_at_the_end(conv: nn.Module, context: Context) -> object:
    """Of a hook of gradient accumulation, as reducers of gradients have it."""
    last, seen = extend(nn.Conv2d(3, 3, 3, padding=1)), []
    node = get_gradient_edge(last.weight).node
    end = lambda: seen.append(conv.weight.grad.clone())  # noqa: E731
    node.register_hook(lambda *_: torch.autograd.Variable._execution_engine.queue_callback(end))
    return backward(nn.Sequential(conv, last), context), seen


def hook_of_a_node(conv: nn.Module, context: Context) -> object:
    h = conv(torch.randn(2, 2, 8, 8))
    h.grad_fn.register_hook(lambda grads, _: (*grads[:2], 0 * grads[2]))
    with context():
        h.sum().backward()
    return conv.bias.grad


def hook_of_a_node_inside(_: nn.Module, context: Context) -> object:
    linear = extend(nn.Linear(2, 3))
    h = linear(torch.randn(2, 30, 2))
    h.grad_fn.next_functions[0][0].register_prehook(lambda grads: (2 * grads[0],))
    with context():
        h.sum().backward()
    return linear.bias.grad


class Doubled(torch.autograd.Function):
    """Somebody's own."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


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


def some_inputs(conv: nn.Module, context: Context) -> object:
    return backward(conv, context, inputs=[conv.weight])


def create_graph(conv: nn.Module, context: Context) -> object:
    return [grad.detach() for grad in backward(conv, context, create_graph=True)]


def regularizer(conv: nn.Module, context: Context) -> object:
    loss = conv(torch.randn(2, 2, 8, 8)).sum() + L2Regularizer(conv.parameters(), 0.1)()
    with context():
        loss.backward()
    return [p.grad for p in conv.parameters()]


def autocast(conv: nn.Module, context: Context) -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return backward(conv, context)


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
    linear = extend(nn.Linear(2, 3))
    h = linear(torch.randn(2, 30, 2))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"), context():
        h.backward(torch.ones_like(h))
        h.backward(torch.ones_like(h))
    return [p.grad for p in linear.parameters()]


def backward(model: nn.Module, context: Context, **options: object) -> list[Tensor | None]:
    """Gradients of a model of images."""
    loss = model(torch.randn(2, 2, 8, 8)).square().sum()
    with context():
        loss.backward(**options)
    return [p.grad for p in model.parameters()]


PROGRAMS = [
    hook_of_an_output,
    hook_of_the_loss_in_place,
    hook_of_a_module,
    hook_of_several_parameters,
    hooks_of_accumulation,
    callback_at_the_end,
    hook_of_a_node,
    hook_of_a_node_inside,
    unfrozen_after_the_forward,
    frozen_after_the_forward,
    leaves_among_the_roots,
    some_inputs,
    create_graph,
    regularizer,
    autocast,
    anomaly,
    graph_is_freed,
]


@pytest.mark.filterwarnings(
    "ignore:.*non-full backward hook",
    "ignore:Anomaly Detection",
    "ignore:Error detected in",
    "ignore:Using backward",
)
@pytest.mark.parametrize("program", [*PREPARED, *PROGRAMS], ids=lambda program: getattr(program, "__name__", program))
def test_programs_notice_nothing(program: Callable[[nn.Module, Context], object] | str):
    found = []
    for context in (nullcontext, lambda: backpack(Variance())):
        torch.manual_seed(0)
        conv = extend(nn.Conv2d(2, 3, 3))
        if isinstance(program, str):
            around = PREPARED[program](conv)
            found.append(backward(around if isinstance(around, nn.Module) else conv, context))
        else:
            found.append(program(conv, context))
    plain, ours = found
    if isinstance(plain, str):
        assert ours == plain
    else:
        assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("quantities", FIRST_ORDER, ids=lambda extension: extension.__name__)
def test_hooks_of_users_run_as_often_as_in_a_plain_backward(quantities: type[Extension]):
    """Of tensors, nodes, modules and parameters, in two backwards, behind unknown operations, too."""
    counts = []
    for context in (nullcontext, lambda: backpack(quantities())):
        torch.manual_seed(0)
        ran: dict[str, int] = {}

        def count(name: str, ran: dict[str, int] = ran) -> Callable[..., None]:
            return lambda *_: ran.update({name: ran.get(name, 0) + 1})

        def hooked(name: str, x: Tensor, count: Callable[[str], Callable[..., None]] = count) -> Tensor:
            x.register_hook(count(f"tensor {name}"))
            x.grad_fn.register_prehook(count(f"before node {name}"))
            x.grad_fn.register_hook(count(f"after node {name}"))
            return x

        model = nn.Sequential(
            nn.Conv2d(2, 3, 3),
            Lambda(lambda x, hooked=hooked: hooked("relu", hooked("conv", x).relu())),
            nn.BatchNorm2d(3).eval(),
            Lambda(lambda x: torch.cdist(x.flatten(2), torch.ones(1, 4, 36))),  # probed
            Lambda(lambda x, hooked=hooked: hooked("sorted", x.sort(2).values.flatten(1))),
            nn.Linear(12, 4, bias=False),
            Lambda(Doubled.apply),
            used_twice(),
        )
        extend(model)
        for i, p in enumerate(model.parameters()):
            p.register_hook(count(f"parameter {i}"))
            p.register_post_accumulate_grad_hook(count(f"accumulated {i}"))
        model[5].register_full_backward_hook(count("module"))
        for _ in range(2):
            z = hooked("z", model(torch.randn(4, 2, 8, 8)))
            loss = hooked(
                "loss", F.smooth_l1_loss(z[:2], torch.zeros(2, 3)) + F.cross_entropy(z, torch.zeros(4).long())
            )
            with context():
                loss.backward()
        counts.append(ran)
    plain, ours = counts
    assert ours == plain and len(plain) > 20


def test_contexts_of_two_threads_leave_nothing_behind():
    """They belong to the process, so those of threads may end in another order than they have begun."""
    pulling, context = own_backward(), backpack(KFAC())
    pulling.__enter__()
    context.__enter__()
    pulling.__exit__(None, None, None)
    context.__exit__(None, None, None)
    assert listeners() == []
