"""Programs that go around what was recorded: the numbers are those of autograd, or the backward is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt import CurvoptError, L2Regularizer, backpack, extend
from curvopt.extensions import BatchGrad, DiagGGNExact, DiagHessian

N = 4


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3).double(), torch.tensor([0, 1, 2, 1])


class Net(nn.Module):
    """Two linear layers around a function of the first layer, the input and a weight of its own."""

    def __init__(self, function: Callable[[Net, Tensor], Tensor], inner: nn.Module | None = None):
        super().__init__()
        self.first, self.last = inner or nn.Linear(3, 4), nn.Linear(4, 3)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.function(self, x)))


class View(nn.Module):
    """A custom module that returns a view."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).view(-1, 2, 2)


class Both(nn.Module):
    """A custom module that returns two tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ self.weight
        return h, h.sum(1)


def in_place_on_one_of_two(net: Net, x: Tensor) -> Tensor:
    h, s = net.first(x)
    h *= 2
    return h + s.unsqueeze(1)


def scaled_by_one_row(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * net.first(torch.ones(1, 3).double())


def penalised_weight(net: Net, x: Tensor) -> Tensor:
    return net.first(x) + torch.addmm(torch.zeros(4).double(), x, net.first.weight.t(), alpha=0.5)


PROGRAMS: dict[str, Callable[[], Net]] = {
    "functional layer that is never called": lambda: Net(lambda m, x: F.linear(x, m.first.weight, m.first.bias)),
    "forward called by name": lambda: Net(lambda m, x: m.first.forward(x)),
    "view changed in place": lambda: Net(lambda m, x: m.first(x).mul_(2).flatten(1), View()),
    "one of two outputs changed in place": lambda: Net(in_place_on_one_of_two, Both()),
    "one row for all": lambda: Net(scaled_by_one_row),
    "scaled product with a weight": lambda: Net(penalised_weight),
    "weight normalised outside": lambda: Net(lambda m, x: m.first(x) + x @ F.normalize(m.first.weight, dim=1).T),
}


def individual_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    losses = F.cross_entropy(model(x), y, reduction="none") / N
    return [list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)) for loss in losses]


@pytest.mark.parametrize("program", PROGRAMS)
def test_individual_gradients(program: str):
    model, (x, y) = PROGRAMS[program](), data()
    expected = individual_gradients(model, x, y)
    extend(model)
    try:
        with backpack(BatchGrad()):
            extend(nn.CrossEntropyLoss())(model(x), y).backward()
    except CurvoptError as refusal:
        assert "first" in str(refusal)
        return
    for i, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad_batch, torch.stack([gradients[i] for gradients in expected]))


def test_forward_of_the_instance():
    model, (x, y) = extend(Net(lambda m, x: m.first(x))), data()
    plain = model.first.forward
    model.first.forward = lambda x: 2 * plain(x)
    expected = individual_gradients(model, x, y)
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    torch.testing.assert_close(model.first.weight.grad_batch, torch.stack([g[0] for g in expected]))


def test_gradient_penalty():
    model, (x, _) = extend(Net(lambda m, x: m.first(x))), data()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(CurvoptError, match="first.*weight"), backpack(BatchGrad()):
        slope.square().sum().backward()


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


class Scale(nn.Module):
    """A weight that enters by a function of a user."""

    def __init__(self, function: type[Times]):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


@pytest.mark.parametrize("function", [Times, BatchNormBackwards])
def test_functions_with_attributes_of_any_name(function: type[Times]):
    net, (x, y) = Net(lambda m, x: m.scale(m.first(x))), data()
    net.scale = Scale(function).double()
    expected, lossfunc = individual_gradients(net, x, y), extend(nn.CrossEntropyLoss())
    model = extend(net)
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    for i, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.grad_batch, torch.stack([gradients[i] for gradients in expected]))
    curvature = [p.diag_ggn_exact for p in model.parameters()]
    with backpack(DiagGGNExact()), contextlib.suppress(CurvoptError):
        (function.apply(lossfunc(model(x), y), torch.ones(1).double()).sum() + lossfunc(model(x), y)).backward()
        for p, once in zip(model.parameters(), curvature, strict=True):
            torch.testing.assert_close(p.diag_ggn_exact, 2 * once)  # unless it was refused


def test_batch_norm_over_processes_mixes_samples():
    class SyncBatchNorm(Times):
        """What PyTorch calls the one that is written in Python."""

    net, (x, y) = Net(lambda m, x: SyncBatchNorm.apply(m.first(x), torch.ones(4).double())), data()
    with pytest.raises(CurvoptError, match="train-mode batch norm"), backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(extend(net)(x), y).backward()


def test_samples_that_begin_to_mix():
    """A gate that opens: what was found at the first backward does not hold for ever."""
    net = Net(lambda m, x: m.first(x) + m.gate * m.first(x).mean(0, keepdim=True))
    model, (x, y) = extend(net), data()
    for net.gate in (0.0, 1.0):
        expected = individual_gradients(model, x, y)
        try:
            with backpack(BatchGrad()):
                extend(nn.CrossEntropyLoss())(model(x), y).backward()
        except CurvoptError:
            continue
        torch.testing.assert_close(model.first.weight.grad_batch, torch.stack([g[0] for g in expected]))


def test_mode_switched_between_forward_and_backward():
    model, (x, y) = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()), data()
    model.eval()
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    model.train()
    with pytest.raises(CurvoptError, match=r"1 \(BatchNorm1d\).*changed"), backpack(BatchGrad()):
        loss.backward()


def test_padding_assigned_after_construction():
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(18, 3)).double(), data()[0]
    model[0].padding = model[0].dilation = (2, 2)
    x, y = torch.randn(N, 1, 3, 3).double(), data()[1]
    expected = individual_gradients(model, x, y)
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(extend(model)(x), y).backward()
    torch.testing.assert_close(model[0].weight.grad_batch, torch.stack([g[0] for g in expected]))


def test_network_in_the_second_argument_of_a_loss():
    model, (x, _) = extend(Net(lambda m, x: m.first(x))), data()
    with pytest.raises(CurvoptError, match="MSELoss.*first argument"), backpack(DiagGGNExact()):
        extend(nn.MSELoss())(x, model(x)).backward()


def test_regularizer_under_a_root():
    model, (x, y) = extend(Net(lambda m, x: m.first(x))), data()
    regularizer = L2Regularizer(model.parameters(), 0.1)
    with pytest.raises(CurvoptError, match="diag_h.*Sqrt"), backpack(DiagHessian()):
        (extend(nn.CrossEntropyLoss())(model(x), y) + regularizer().sqrt()).backward()


def test_replay_leaves_buffers_alone():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * self.gain

    model, (x, y) = extend(nn.Sequential(Counting(), nn.Linear(3, 3)).double()), data()
    with backpack(BatchGrad()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert model[0].calls.item() == 1
    torch.testing.assert_close(model[0].gain.grad_batch.sum(0), model[0].gain.grad)


def test_gradient_of_some_inputs_sets_no_partial_sums():
    net = Net(lambda m, x: m.square(m.first(x)) + m.square(torch.cos(m.first(x))))
    net.square = nn.Linear(4, 4).double()
    model, (x, y) = extend(net), data()
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    expected = individual_gradients(model, x, y)
    with backpack(BatchGrad()):
        torch.autograd.grad(loss, [model.last.weight])
    for name, i in (("first", 0), ("square", 4)):
        p = getattr(model, name).weight
        if hasattr(p, "grad_batch"):
            torch.testing.assert_close(p.grad_batch, torch.stack([g[i] for g in expected]))


def test_functional_call_that_the_backward_meets_first():
    """A tied head under a loss that nothing recognises: no hook of a forward comes before it."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.embedding(x)).mean(1), self.embedding.weight)

    model, x = extend(Tied().double()), torch.randint(5, (N, 3))
    weight = model.embedding.weight
    expected = torch.stack([torch.autograd.grad(model(row[None]).sin().sum(), weight)[0] for row in x])
    with backpack(BatchGrad()):
        model(x).sin().sum().backward()
    torch.testing.assert_close(weight.grad_batch, expected)
