"""Programs that go around what was recorded: the numbers are those of autograd, or the backward is refused.

Tests of `core/extend.py`, too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Net
from checks import gradients_of_each
from reference import Reference
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize

import curvopt
from curvopt import CurvoptError, CurvoptWarning, L2Regularizer, backpack, disable, extend
from curvopt.core.products.outer import Outer
from curvopt.extensions import KFAC, KFLR, KFRA, BatchGrad, DiagGGNExact, DiagHessian, Variance

N = 4


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3).double(), torch.tensor([0, 1, 2, 1])


def around(function: Callable[[Net, Tensor], Tensor], inner: nn.Module | None = None) -> Net:
    """Two linear layers around a function of the first layer, the input and a weight of its own."""
    forward = lambda m, x: m.last(torch.tanh(function(m, x)))  # noqa: E731
    return Net(forward, first=inner or nn.Linear(3, 4), last=nn.Linear(4, 3)).double()


def in_place_on_one_of_two(net: Net, x: Tensor) -> Tensor:
    h, total = net.first(x)
    h *= 2
    return h + total.unsqueeze(1)


def custom(function: Callable[[Tensor], Any]) -> nn.Module:
    """A module that no rule knows."""
    return Net(lambda m, x: function(x @ m.weight), weight=torch.randn(3, 4))


PROGRAMS: dict[str, Callable[[], Net]] = {
    "functional layer that is never called": lambda: around(lambda m, x: F.linear(x, m.first.weight, m.first.bias)),
    "forward called by name": lambda: around(lambda m, x: m.first.forward(x)),
    "view changed in place": lambda: around(
        lambda m, x: m.first(x).mul_(2).flatten(1), custom(lambda h: h.view(-1, 2, 2))
    ),
    "one of two outputs changed in place": lambda: around(in_place_on_one_of_two, custom(lambda h: (h, h.sum(1)))),
    "one row for all": lambda: around(lambda m, x: m.first(x) * m.first(torch.ones(1, 3).double())),
    "scaled product with a weight": lambda: around(
        lambda m, x: m.first(x) + torch.addmm(torch.zeros(4).double(), x, m.first.weight.t(), alpha=0.5)
    ),
    "weight normalised outside": lambda: around(lambda m, x: m.first(x) + x @ F.normalize(m.first.weight, dim=1).T),
}


def individual_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return gradients_of_each(F.cross_entropy(model(x), y, reduction="none") / len(y), model.parameters())


def same_or_refused(model: nn.Module, x: Tensor, y: Tensor, refusal: str | None = None) -> None:
    """Individual gradients, and the gradient, are those of autograd; or an error says why not, where one may come."""
    expected = individual_gradients(model, x, y)
    extend(model)
    try:
        with backpack(BatchGrad()):
            F.cross_entropy(model(x), y).backward()
    except CurvoptError as error:
        assert refusal is not None and refusal in str(error)
        return
    torch.testing.assert_close([p.grad_batch for p in model.parameters()], expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], [gradients.sum(0) for gradients in expected])


@pytest.mark.parametrize("program", PROGRAMS)
def test_individual_gradients(program: str):
    same_or_refused(PROGRAMS[program](), *data(), refusal="first")


def test_forward_of_the_instance():
    model = extend(around(lambda m, x: m.first(x)))
    plain = model.first.forward
    model.first.forward = lambda x: 2 * plain(x)
    same_or_refused(model, *data())


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "strided": lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1),
    "grouped, dilated": lambda: nn.Conv1d(2, 4, 3, padding=2, dilation=2, groups=2),
    "circular": lambda: nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"),
    "2d": lambda: nn.Sequential(nn.Unflatten(2, (2, 3)), nn.Conv2d(2, 4, 2)),
    "transposed": lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed, grouped": lambda: nn.ConvTranspose1d(2, 4, 2, groups=2),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv1d(2, 4, 3)).eval(),
}


@pytest.mark.parametrize("convolution", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_gradient_penalty_of_convolutions(convolution: Callable[[], nn.Module]):
    x = torch.randn(N, 2, 6).double().requires_grad_()
    model = nn.Sequential(convolution(), nn.LeakyReLU(), nn.Flatten(), nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1))
    model.double()(x)
    params = [p for p in extend(model).parameters() if p.dim() > 1]

    def slopes() -> Tensor:
        found = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].flatten(1)
        # by constants, too, a weight is computed that looks like data then
        return curvopt.prediction(found) if convolution is CONVOLUTIONS["spectral norm"] else found

    with warnings.catch_warnings(), backpack(BatchGrad()):
        # the padding is no single operation
        warnings.simplefilter("ignore" if convolution is CONVOLUTIONS["circular"] else "error", CurvoptWarning)
        ((slopes().norm(dim=1) - 1).square() + model(x).squeeze(1)).mean().backward()
    terms = ((slopes().norm(dim=1) - 1).square() + model(x).squeeze(1)) / N
    torch.testing.assert_close([p.grad_batch for p in params], gradients_of_each(terms, params))

    with backpack(DiagGGNExact()):
        F.mse_loss(slopes(), torch.ones(N, 12).double()).backward()
    rows = [torch.autograd.grad(z, params, retain_graph=True) for z in slopes().flatten()]
    for p, *row in zip(params, *rows, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, 2 / len(row) * torch.stack(row).square().sum(0))


class Times(torch.autograd.Function):
    """A product that keeps things where autograd's own nodes have something else."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.variable, ctx.name, ctx.x = w, "times", x
        return x * w

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.variable, (grad * ctx.x).sum(0)


class BatchNormBackwards(Times):
    """The same, named like a layer that mixes samples."""


@pytest.mark.parametrize("function", [Times, BatchNormBackwards])
def test_functions_with_attributes_of_any_name(function: type[Times]):
    net, (x, y) = around(lambda m, x: m.scale(m.first(x))), data()
    net.scale = Net(lambda m, h: function.apply(h, m.weight), weight=torch.randn(4)).double()
    expected, lossfunc = individual_gradients(net, x, y), extend(nn.CrossEntropyLoss())
    model = extend(net)
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    torch.testing.assert_close([p.grad_batch for p in model.parameters()], expected)
    curvature = [p.diag_ggn_exact for p in model.parameters()]
    with backpack(DiagGGNExact()), contextlib.suppress(CurvoptError):
        (function.apply(lossfunc(model(x), y), torch.ones(1).double()).sum() + lossfunc(model(x), y)).backward()
        for p, once in zip(model.parameters(), curvature, strict=True):
            torch.testing.assert_close(p.diag_ggn_exact, 2 * once)  # unless it was refused


def test_batch_norm_over_processes_mixes_samples():
    class SyncBatchNorm(Times):
        """What PyTorch calls the one that is written in Python."""

    net, (x, y) = around(lambda m, x: SyncBatchNorm.apply(m.first(x), torch.ones(4).double())), data()
    with pytest.raises(CurvoptError, match="train-mode batch norm"), backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(extend(net)(x), y).backward()


def convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.Flatten(), nn.Linear(192, 3)]
    return nn.Sequential(*layers).double(), torch.randn(N, 2, 8, 8).double(), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("changed", [nn.Conv2d, ()])
def test_hooks_for_all_modules(changed: Any):
    """They come before all others, and may change what a module gives."""
    hook = register_module_forward_hook(lambda module, _, out: out.sin() if isinstance(module, changed) else None)
    try:
        same_or_refused(*convolutions())
    finally:
        hook.remove()


def test_forward_of_the_class_replaced(monkeypatch: pytest.MonkeyPatch):
    def standardised(module: nn.Conv2d, x: Tensor) -> Tensor:
        weight = module.weight - module.weight.mean((1, 2, 3), keepdim=True)
        return module._conv_forward(x, weight / weight.std((1, 2, 3), keepdim=True), module.bias)

    monkeypatch.setattr(nn.Conv2d, "forward", standardised)
    same_or_refused(*convolutions())


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "spectral_norm"])
def test_backward_where_parametrizations_are_cached(kind: str):
    net, (x, y) = around(lambda m, x: m.first(x)), data()
    getattr(parametrizations, kind)(net.first)
    net.eval()
    with parametrize.cached():
        same_or_refused(net, x, y)


def test_norms_by_gram_matrices_are_not_negative():
    torch.manual_seed(0)
    left, right = torch.randn(1, 64, 1, 3, 8), torch.randn(64, 1, 1, 8).expand(-1, -1, 3, -1)
    left[:, :, :, 2] = -left[:, :, :, 0] - left[:, :, :, 1]  # products that sum to nothing
    norms = Outer(left, right, torch.Size((8, 8))).norms2()
    assert (norms >= 0).all() and norms.max() < 1e-3


def widened(h: Tensor) -> Tensor:
    return F.pad(h, (0, 1))


MODES: dict[str, tuple[bool, Callable[[], Net]]] = {
    "batch norm": (False, lambda: around(lambda m, x: widened(m.first(x)), nn.BatchNorm1d(3))),
    "instance norm": (
        True,
        lambda: around(
            lambda m, x: widened(m.first(x.unsqueeze(1)).squeeze(1)),
            nn.InstanceNorm1d(1, affine=True, track_running_stats=True),
        ),
    ),
    "dropout of an LSTM": (
        True,
        lambda: around(lambda m, x: m.first(x.unsqueeze(2))[0][:, -1], nn.LSTM(1, 4, 2, batch_first=True, dropout=0.5)),
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_the_mode_is_that_of_the_forward_pass(name: str):
    training, net = MODES[name]
    model, (x, y) = extend(net()), data()
    model(2 * x)  # other statistics than those of the batch
    losses = F.cross_entropy(model.train(training)(x), y, reduction="none") / N
    expected = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    model.train(not training)
    with backpack(BatchGrad()):
        losses.sum().backward()
    for p, gradients in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(gradients))


@pytest.mark.parametrize("extension", [DiagHessian, DiagGGNExact, KFAC])
def test_a_regularizer_under_a_root_is_refused(extension):
    model, (x, y) = extend(around(lambda m, x: m.first(x))), data()
    regularizer = L2Regularizer(model.parameters(), 0.1)
    with pytest.raises(CurvoptError, match="add the regularizer to the loss as it is"), backpack(extension()):
        (F.cross_entropy(model(x), y) + regularizer().sqrt()).backward()


@pytest.mark.parametrize("inner", [nn.Linear(3, 4), nn.Embedding(5, 4)])
def test_a_layer_whose_samples_are_scattered_has_its_whole_block_for_a_factor(inner: nn.Module):
    model = extend(around(lambda net, q: net.first(q.flip(0)).mean(1).flip(0), inner))
    q = torch.randn(N, 5, 3).double() if isinstance(inner, nn.Linear) else torch.randint(5, (N, 6))
    for approx in ("reduce", "expand", "backpack"):
        with backpack(KFLR(approx=approx), DiagGGNExact()):
            F.cross_entropy(model(q), data()[1]).backward()
        p = model.first.weight
        (block,) = p.kflr
        torch.testing.assert_close(block.diagonal(), p.diag_ggn_exact.flatten())
        torch.testing.assert_close(block, block.T)
        assert torch.linalg.matrix_rank(block) > 1


@pytest.mark.parametrize(
    "mix", [lambda h: torch.ones(N, N).double() @ h, lambda h: h.cumsum(0), lambda h: h.softmax(0)]
)
def test_averages_over_samples_that_meet_are_refused(mix: Callable[[Tensor], Tensor]):
    model, (x, y) = extend(around(lambda net, x: mix(net.first(x)))), data()
    with pytest.raises(CurvoptError, match="first .*kfra is .*defined.*use KF"), backpack(KFRA()):
        F.cross_entropy(model(x), y).backward()


def scaled(known: bool) -> nn.Module:
    """A product, or what no rule knows, with a scale."""
    product = (lambda x, w: x @ w.T) if known else torch.cdist
    return Net(lambda m, x: product(x, m.weight) * m.scale, weight=torch.randn(3, 3), scale=torch.randn(3))


OWN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weight": lambda net, x: F.linear(x, net.inner(net.inner.weight)),
    "weight, and called": lambda net, x: F.linear(net.inner(x), net.inner(net.inner.weight)),
    "weight and samples": lambda net, x: (
        net.inner(torch.cat([net.inner.weight, x]))[3:] * net.inner(net.inner.weight)[0]
    ),
    "weight, transposed": lambda net, x: F.linear(x, net.inner(net.inner.weight.T)),
    "what it makes of a parameter": lambda net, x: x @ net.inner(net.inner(net.first.weight[:3])),
}


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("inner", [partial(nn.Linear, 3, 3), partial(scaled, True), partial(scaled, False)])
@pytest.mark.parametrize("what", OWN)
def test_modules_called_with_their_own(what: str, inner: Callable[[], nn.Module]):
    """Parameters: by which way these enter is not told by where the call begins, and none counts twice."""
    net = around(lambda net, x: net.first(OWN[what](net, x)))
    net.inner = inner().double()
    same_or_refused(net, *data())


def test_one_parameter_by_several_names():
    """In ways that are not known."""
    net, p = around(lambda net, x: net.first(net.inner(x))), nn.Parameter(torch.randn(3, 3).double())
    net.inner = Net(
        lambda m, x: torch.cdist(x, m.one) + torch.cdist(x.sin(), m.two) * torch.cdist(x.cos(), m.several[0])
    )
    net.inner.one = net.inner.two = p
    net.inner.several = nn.ParameterList([p])
    same_or_refused(net, *data())


def frozen_in_one_call(net: Net, x: Tensor) -> Tensor:
    x = net.inner(x).tanh()
    net.inner.requires_grad_(False)
    h = net.first(net.inner(x))
    net.inner.requires_grad_(True)
    return h


def frozen_after_the_call(net: Net, x: Tensor) -> Tensor:
    h = net.first(net.inner(x))
    net.inner.requires_grad_(False)
    return h


@pytest.mark.parametrize("inner", [partial(nn.Linear, 3, 3), partial(nn.LayerNorm, 3), partial(scaled, False)])
@pytest.mark.parametrize("function", [frozen_in_one_call, frozen_after_the_call])
def test_parameters_that_are_frozen_while_they_are_called_or_later(function: Callable, inner: Callable[[], nn.Module]):
    net, (x, y) = around(function), data()
    net.inner = inner().double()
    extend(net)
    loss = F.cross_entropy(net(x), y)
    parameters = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    with backpack(BatchGrad(), Variance()):
        loss.backward()
    for p, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(p.grad_batch.sum(0), gradient)
        torch.testing.assert_close(p.grad, gradient)
    assert not any(hasattr(p, "grad_batch") for p in net.parameters() if not p.requires_grad)


def test_nested_tensors_are_refused():
    model = extend(nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        x = torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 1)], layout=torch.jagged)
    z = torch.stack([rows.mean(0) for rows in model(x).unbind()])
    with pytest.raises(CurvoptError, match="Linear was called with a nested tensor.*pad it"), backpack(BatchGrad()):
        z.square().sum().backward()


def of_mode(model: nn.Module, x: Tensor, y: Tensor, mode: Callable[[], contextlib.AbstractContextManager]) -> None:
    """Exact fields of backwards in a mode are those of other backwards."""
    found: list[list[Tensor]] = []
    for active in (contextlib.nullcontext, mode):
        loss = extend(nn.CrossEntropyLoss())(extend(model)(x), y)
        with active(), backpack(BatchGrad(), DiagGGNExact(), DiagHessian()):
            loss.backward()
        found.append([field for p in model.parameters() for field in (p.grad_batch, p.diag_ggn_exact, p.diag_h)])
    torch.testing.assert_close(*found)


last_step = Net(lambda m, x: m.steps(x.unsqueeze(2))[0][:, -1], steps=nn.LSTM(1, 4, batch_first=True))


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), last_step], ids=["linear", "recurrent"])
def test_anomaly_detection(layer: nn.Module):
    """It looks at numbers, which nothing that is pulled back for several columns at once has."""
    with warnings.catch_warnings(record=True) as caught:
        of_mode(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)).double(), *data(), torch.autograd.detect_anomaly)
    assert not [warning for warning in caught if "Error detected" in str(warning.message)]


def test_backward_in_inference_mode():
    of_mode(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), *data(), torch.inference_mode)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_of_sparse_inputs(sparse: Callable[[Tensor], Tensor], bias: bool):
    model, (x, y) = nn.Sequential(nn.Linear(3, 4, bias), nn.Tanh(), nn.Linear(4, 3)).double(), data()
    same_or_refused(model, sparse(x.relu()), y)


def functional() -> nn.Module:
    """Calls none of its modules."""

    def forward(m: Net, x: Tensor) -> Tensor:
        first, last = m.layers
        return F.linear(torch.tanh(F.linear(x, first.weight, first.bias)), last.weight, last.bias)

    return Net(forward, layers=nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)])).double()


def test_a_model_that_calls_none_of_its_modules():
    model, (x, y) = functional(), data()
    ref = Reference(model, x, lambda z: F.cross_entropy(z, y))
    extend(model)
    seen: list[nn.Module] = []
    with backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), extension_hook=seen.append):
        F.cross_entropy(model(x), y).backward()
    assert set(seen) == set(model.layers)
    for name, p in model.named_parameters():
        for field in ("grad_batch", "diag_ggn_exact", "diag_h"):
            torch.testing.assert_close(getattr(p, field), getattr(ref, field)(name))
    with backpack(BatchGrad()), pytest.raises(CurvoptError, match="no call of the extended model"), disable():
        F.cross_entropy(model(x), y).backward()


def test_an_exported_model():
    """Its modules are there for their parameters."""
    model, (x, y) = functional(), data()
    expected = individual_gradients(model, x, y)
    exported = extend(torch.export.export(model, (x,)).module())
    with backpack(BatchGrad()):
        F.cross_entropy(exported(x), y).backward()
    torch.testing.assert_close([p.grad_batch for p in exported.parameters()], expected)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian, KFLR])
def test_samples_that_meet_between_two_outputs_in_the_loss(extension: Callable):
    def forward(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        u = m.trunk(x)
        return m.head((u - u.mean(0)).tanh()), u

    def backward(extension: Callable) -> None:
        logits, u = model(x)
        with backpack(extension()):
            (F.cross_entropy(logits, y) + F.mse_loss(u, x)).backward()

    x, y, model = (
        torch.randn(3, 4),
        torch.tensor([0, 2, 1]),
        extend(Net(forward, trunk=nn.Linear(4, 4), head=nn.Linear(4, 3))),
    )
    with pytest.raises(CurvoptError, match=r"an output of shape \[3, 4\] is in the loss and its samples meet"):
        backward(extension)
    backward(KFAC)
    assert [len(p.kfac) for p in model.parameters()] == [2, 1, 2, 1]


def test_an_extended_model_runs_on_the_meta_device():
    model = extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to("meta"))
    assert model(torch.empty(6, 5, device="meta")).shape == (6, 3)


def test_a_program_of_torch_jit_is_refused_by_name():
    with pytest.raises(AttributeError, match=r"torch\.jit\.script: .*script a model before it is extended"):
        torch.jit.script(extend(nn.Sequential(nn.Linear(5, 4))))


def test_other_tensors_than_the_parameters_are_refused():
    model, x = extend(nn.Sequential(nn.Linear(5, 4))), torch.randn(3, 5)
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, (x,)).square().sum()
    with pytest.raises(CurvoptError, match=r"0 \(Linear\) was called with another 'weight'"), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("learned", [True, False])
def test_the_prediction_of_a_likelihood_with_a_learned_deviation_is_asked_for(learned: bool):
    policy = Net(lambda m, x: Normal(m.mean(x), m.log_std.exp()), mean=nn.Linear(4, 2), log_std=torch.zeros(2))
    policy.log_std.requires_grad_(learned)
    model, x, action = extend(policy.double()), torch.randn(6, 4).double(), torch.randn(6, 2).double()
    with contextlib.ExitStack() as stack:
        if learned:
            stack.enter_context(pytest.raises(CurvoptError, match=r"learned deviation.*curvopt\.prediction"))
        stack.enter_context(backpack(DiagGGNExact()))
        (-model(x).log_prob(action).sum(1).mean()).backward()
    if not learned:
        torch.testing.assert_close(model.mean.bias.diag_ggn_exact, torch.ones(2).double())


def test_a_backward_inside_of_a_hook_is_a_backward_of_its_own():
    model, x, other = extend(nn.Linear(5, 4)), torch.randn(3, 5), nn.Parameter(torch.ones(2))

    def hook(module: nn.Module) -> None:
        with torch.enable_grad():
            (3 * other).sum().backward()

    with backpack(BatchGrad(), extension_hook=hook):
        model(x).square().sum().backward()
    torch.testing.assert_close(other.grad, torch.full((2,), 3.0))
    torch.testing.assert_close(model.bias.grad_batch.sum(0), model.bias.grad)
