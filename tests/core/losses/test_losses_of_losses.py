"""Losses that contain others, regularizers or parameters: fields equal the dense ones, or a warning says why not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.testing import assert_close

from curvopt import CurvoptWarning, L2Regularizer, backpack, extend
from curvopt.extensions import DiagGGNExact, DiagHessian, KFACEmpirical

N, C = 6, 3


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def data() -> tuple[Tensor, Tensor, Tensor]:
    x, teacher = torch.randn(N, 5, dtype=torch.float64), torch.randn(N, C, dtype=torch.float64).log_softmax(1)
    return x, torch.randint(C, (N,)), teacher


def net() -> nn.Sequential:
    return extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)).double())


def assert_dense(model: nn.Module, x: Tensor, f) -> None:
    """The diagonals of the GGN and of the Hessian are those of ``f``, a function of the network's output."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def output(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (x,))

    H = hessian(f)(output(params)).reshape(N * C, N * C)
    of_output, of_loss = jacrev(output)(params), hessian(lambda params: f(output(params)))(params)
    for name, p in model.named_parameters():
        J = of_output[name].reshape(N * C, -1)
        assert_close(p.diag_ggn_exact.flatten(), (J * (H @ J)).sum(0))
        assert_close(p.diag_h.flatten(), of_loss[name][name].reshape(p.numel(), -1).diagonal())


def entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(1).mean()


class Focal(nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        logs = z.log_softmax(1).gather(1, y[:, None])
        return -((1 - logs.exp()) ** 2 * logs).mean()


class WithEntropy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nll = nn.NLLLoss()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        logs = z.log_softmax(1)
        return self.nll(logs, y) - 0.1 * entropy(logs)


@pytest.mark.parametrize("loss", [Focal, WithEntropy])
@pytest.mark.parametrize("extended", [False, True])
def test_a_loss_of_your_own_is_extended_with_or_without_saying_so(loss: type[nn.Module], extended: bool) -> None:
    (x, y, _), model = data(), net()
    lossfunc = extend(loss(), loss=extended)
    with backpack(DiagGGNExact(), DiagHessian()):
        lossfunc(0.3 * model(x), y).backward()
    assert_dense(model, x, lambda z: loss()(0.3 * z, y))


@pytest.mark.parametrize("loss", [Focal, WithEntropy])
def test_a_loss_of_your_own_is_a_part_of_the_module_that_is_extended(loss: type[nn.Module]) -> None:
    (x, y, _), whole = data(), nn.Module()
    whole.net, whole.criterion = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)).double(), loss()
    extend(whole)
    with backpack(DiagGGNExact(), DiagHessian()):
        whole.criterion(whole.net(x), y).backward()
    assert_dense(whole.net, x, lambda z: loss()(z, y))


@pytest.mark.parametrize("module", [nn.NLLLoss(), nn.KLDivLoss(reduction="batchmean")], ids=["nll", "kl"])
@pytest.mark.parametrize("extended", [False, True])
def test_losses_that_are_linear_in_log_probabilities_beside_others(module: nn.Module, extended: bool) -> None:
    (x, y, teacher), model = data(), net()
    target = y if isinstance(module, nn.NLLLoss) else teacher.exp()
    lossfunc = extend(module) if extended else module
    logs = model(x).log_softmax(1)
    with backpack(DiagGGNExact(), DiagHessian()):
        (lossfunc(logs, target) - 0.1 * entropy(logs)).backward()
    assert_dense(model, x, lambda z: module(z.log_softmax(1), target) - 0.1 * entropy(z.log_softmax(1)))


def test_a_known_loss_behind_another_is_split_at_its_own_input() -> None:
    (x, y, teacher), model = data(), net()

    def diagonals(loss) -> list[tuple[Tensor, Tensor]]:
        with backpack(DiagGGNExact(), DiagHessian()):
            loss(model(x).log_softmax(1)).backward()
        return [(p.diag_ggn_exact, p.diag_h) for p in model.parameters()]

    losses = (lambda logs: F.nll_loss(logs, y)), (lambda logs: F.mse_loss(logs, teacher))
    first, second = map(diagonals, losses)
    both = diagonals(lambda logs: losses[0](logs) + losses[1](logs))
    assert_close(both, [(a + b, c + d) for (a, c), (b, d) in zip(first, second, strict=True)])
    assert not torch.allclose(both[0][0], first[0][0])


def test_losses_of_two_models_one_behind_the_other() -> None:
    (x, y, teacher), first, second = data(), net(), extend(nn.Linear(C, 2).double())
    model = extend(nn.Sequential(first, nn.LogSoftmax(1), second))
    logs = first(x).log_softmax(1)
    with backpack(DiagHessian(), DiagGGNExact()):
        (F.nll_loss(logs, y) + F.mse_loss(second(logs), teacher[:, :2])).backward()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        logs = functional_call(first, {n[2:]: p for n, p in params.items() if n.startswith("0.")}, (x,)).log_softmax(1)
        outputs = functional_call(second, {n[2:]: p for n, p in params.items() if n.startswith("2.")}, (logs,))
        return F.nll_loss(logs, y) + F.mse_loss(outputs, teacher[:, :2])

    of_loss = hessian(loss)(params)
    for name, p in model.named_parameters():
        assert_close(p.diag_h.flatten(), of_loss[name][name].reshape(p.numel(), -1).diagonal())


def test_a_regularizer_inside_of_an_extended_loss() -> None:
    (x, y, _), model = data(), net()

    class Regularized(nn.CrossEntropyLoss):
        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return super().forward(z, y) + regularizer()

    regularizer, lossfunc = L2Regularizer(model.parameters(), 0.1), extend(Regularized())
    found = []
    for loss in (lambda: lossfunc(model(x), y), lambda: F.cross_entropy(model(x), y) + regularizer()):
        with backpack(DiagGGNExact(), DiagHessian()):
            loss().backward()
        found.append([(p.diag_ggn_exact, p.diag_h) for p in model.parameters()])
    assert_close(found[0], found[1])


class Learned(Focal):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.scale * z, y)


def test_a_loss_with_a_parameter_is_a_model_that_returns_its_loss() -> None:
    (x, y, _), model, lossfunc = data(), net(), extend(Learned())
    with backpack(DiagGGNExact(), DiagHessian()):
        lossfunc(model(x), y).backward()
    assert_dense(model, x, lambda z: Focal()(z, y))


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, C)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).gather(1, y[:, None]).mean()


def test_a_ggn_of_zero_is_said() -> None:
    (x, y, _), model = data(), extend(Score().double())
    with pytest.warns(CurvoptWarning, match=r"diag_ggn_exact: .*linear in the network's output.*let the model return"):
        with backpack(DiagGGNExact()):
            model(x, y).backward()


class Dice(nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        p = z.softmax(1).gather(1, y[:, None])
        return (1 - 2 * p / (p + 1)).mean()


@pytest.mark.filterwarnings("error")
def test_empirical_factors_of_a_loss_that_is_not_convex() -> None:
    (x, y, _), model, found = data(), net(), []
    for lossfunc in (extend(Dice(), loss=True), Dice()):
        with backpack(KFACEmpirical()):
            lossfunc(model(x), y).backward()
        found.append([list(p.kfac_empirical) for p in model.parameters()])
    assert_close(found[0], found[1])
