"""Models that return their losses, penalties on weights, matrices of pairs: the fields are those of plain programs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import BatchGrad, DiagGGNExact, DiagHessian, KFACEmpirical, Variance

pytestmark = pytest.mark.filterwarnings("ignore:.*sample by sample", "ignore:.*in the loss by another path")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def fields(model: nn.Module, run: Callable[[], Tensor], *extensions: type) -> dict[str, Tensor]:
    with backpack(*(extension() for extension in extensions)):
        run().backward()
    found = {}
    for name, p in model.named_parameters():
        for field in (extension.field for extension in extensions):
            value = getattr(p, field, None)
            for i, part in enumerate(value if isinstance(value, list) else [value]):
                found[f"{name} {field} {i}"] = part.detach().clone() if part is not None else None
    return found


# ------------------------------------------------------------------------------------------- losses inside of the model


def choose(logs: Tensor, y: Tensor) -> Tensor:
    return logs.gather(1, y[:, None]).squeeze(1)


CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "of each sample": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.tensor([1.0, 2, 0, 1])).mean(),
    "gathered": lambda z, y: -choose(z.log_softmax(1), y).mean(),
    "indexed": lambda z, y: -z.log_softmax(1)[torch.arange(4), y].sum() / 4,
    "by hand": lambda z, y: (z.logsumexp(1) - choose(z, y)).mean(),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).double(), reduction="none").sum(1).mean(),
    "softplus": lambda z, y: F.softplus((1 - 2.0 * F.one_hot(y, 3)) * z).mean(),
    "log1p": lambda z, y: ((1 - 2.0 * F.one_hot(y, 3)) * z).exp().log1p().mean(),
    "of probabilities": lambda z, y: -choose(z.softmax(1).log(), y).mean(),
    "poisson": lambda z, y: F.poisson_nll_loss(z, y[:, None].double().expand_as(z)),
    "divergence": lambda z, y: -0.5 * (1 + z - z.exp()).sum(1).mean(),
    "product": lambda z, y: (0.5 * (z - y[:, None]) * (z - y[:, None])).mean(),
    "form": lambda z, y: ((z - 1) @ torch.tensor([[2.0, 1, 0], [1, 3, 0], [0, 0, 1]]).to(z) * (z - 1)).sum(1).mean(),
    "root": lambda z, y: ((z - y[:, None]).square() + 0.1).sqrt().mean(),
    "focal": lambda z, y: -((1 - choose(z.softmax(1), y)) ** 2 * choose(z.log_softmax(1), y)).mean(),
    "bce by hand": lambda z, y: -(0.3 * z.sigmoid().log() + 0.7 * (1 - z.sigmoid()).log()).mean(),
}
BOXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smooth_l1": F.smooth_l1_loss,
    "huber of each": lambda b, t: (F.huber_loss(b, t, reduction="none") * torch.tensor([[1.0], [0], [1], [2]])).mean(),
}


class Detector(nn.Module):
    def __init__(self, classes: str, boxes: str, inside: bool):
        super().__init__()
        self.label, self.box, self.inside = nn.Linear(5, 3), nn.Linear(5, 4), inside
        self.loss = lambda z, b, y, t: CLASSES[classes](z, y) + BOXES[boxes](b, t)

    def forward(self, x: Tensor, y: Tensor, t: Tensor):
        outputs = self.label(x), self.box(x)
        return self.loss(*outputs, y, t) if self.inside else outputs


@pytest.mark.parametrize("boxes", BOXES)
@pytest.mark.parametrize("classes", CLASSES)
def test_a_model_that_returns_a_sum_of_losses(classes: str, boxes: str) -> None:
    model, returns = (extend(Detector(classes, boxes, inside).double()) for inside in (False, True))
    returns.load_state_dict(model.state_dict())
    x, y, t = torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 1]), torch.randn(4, 4).double()
    kinds = BatchGrad, DiagGGNExact, DiagHessian
    found = fields(returns, lambda: returns(x, y, t), *kinds)
    expected = fields(model, lambda: model.loss(*model(x, y, t), y, t), *kinds)
    for name, value in expected.items():
        assert value.any()
        assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


class Steps(nn.Module):
    """As many steps as samples; the losses of the steps are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(5, 3, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)[0]
        return torch.stack([F.mse_loss(z[:, t], y[:, t]) for t in range(x.shape[1])]).mean()


def test_losses_of_steps_are_no_samples() -> None:
    model, x, y = extend(Steps().double()), torch.randn(4, 4, 5).double(), torch.randn(4, 4, 3).double()
    found = fields(model, lambda: model(x, y), BatchGrad)
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1]) / 4, p)[0] for n in range(4)]
        assert_close(found[f"{name} grad_batch 0"], torch.stack(rows))


class LogProbabilities(Detector):
    def forward(self, x: Tensor, y: Tensor, t: Tensor):
        z, b = super().forward(x, y, t)
        return z.log_softmax(1), b


@pytest.mark.parametrize("boxes", [*BOXES, "mse"])
def test_a_model_that_returns_log_probabilities(boxes: str) -> None:
    """Its Gauss-Newton matrix does not depend on a further term."""
    model = extend(LogProbabilities("gathered", "smooth_l1", False).double())
    x, y, t = torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 1]), torch.randn(4, 4).double()
    found = []
    for second in (BOXES.get(boxes, F.mse_loss), lambda b, t: 0 * b.sum()):
        with backpack(DiagGGNExact(), DiagHessian()):
            logs, b = model(x, y, t)
            (F.nll_loss(logs, y) + second(b, t)).backward()
        found.append((model.label.weight.diag_ggn_exact, model.label.weight.diag_h))
    assert found[0][0].any()
    assert_close(*found)


class InTwoOrders(nn.Module):
    def __init__(self, inside: bool):
        super().__init__()
        self.net, self.inside = nn.Linear(5, 3), inside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        return self.loss(z, y) if self.inside else z

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + F.cross_entropy(z[[2, 0, 3, 1]], y) / 2


def test_rows_in_two_orders_in_the_loss_of_a_model() -> None:
    model, returns = (extend(InTwoOrders(inside).double()) for inside in (False, True))
    returns.load_state_dict(model.state_dict())
    x, y = torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 1])
    kinds = BatchGrad, DiagGGNExact, DiagHessian, KFACEmpirical
    found = fields(returns, lambda: returns(x, y), *kinds)
    for name, value in fields(model, lambda: model.loss(model(x, y), y), *kinds).items():
        assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


class Codebook(nn.Module):
    """Returns a reconstruction and a term, as a VQ-VAE does, or all of the loss."""

    def __init__(self, inside: bool):
        super().__init__()
        self.e, self.codes, self.d, self.inside = nn.Linear(5, 4), nn.Embedding(6, 4), nn.Linear(4, 5), inside

    def forward(self, x: Tensor):
        e = self.e(x)
        q = self.codes(torch.cdist(e, self.codes.weight).argmin(1))
        found, term = self.d(e + (q - e).detach()), F.mse_loss(q, e.detach()) + F.mse_loss(e, q.detach()) / 4
        return F.mse_loss(found, x) + term if self.inside else {"found": found, "term": term}


def test_a_term_that_a_model_returns_beside_its_output() -> None:
    model, returns = (extend(Codebook(inside).double()) for inside in (False, True))
    returns.load_state_dict(model.state_dict())
    x = torch.randn(4, 5).double()

    def loss() -> Tensor:
        found = model(x)
        return F.mse_loss(found["found"], x) + found["term"]

    kinds = BatchGrad, DiagGGNExact, DiagHessian, KFACEmpirical
    found = fields(returns, lambda: returns(x), *kinds)
    for name, value in fields(model, loss, *kinds).items():
        assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert_close(found["codes.weight grad_batch 0"].sum(0), returns.codes.weight.grad)


class LossBeside(nn.Module):
    """Returns its loss beside outputs, as models of transformers do."""

    def __init__(self, *names: str):
        super().__init__()
        self.body, self.last, self.names = nn.Linear(5, 4), nn.Linear(4, 3), names

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        z = self.last(h)
        outputs = {"loss": F.cross_entropy(z, y), "hidden": h, "logits": z, "probs": z.softmax(1)}
        return {name: outputs[name] for name in self.names}


@pytest.mark.parametrize("more", ["probs", "hidden", "logits"])
@pytest.mark.parametrize("others", [(), ("logits",), ("hidden",), ("logits", "hidden", "probs")], ids="-".join)
def test_a_loss_beside_outputs_that_enter_another_term(more: str, others: tuple[str, ...]) -> None:
    model = extend(LossBeside("loss", more, *others).double())
    x, y = torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 1])

    def loss(n: slice = slice(None)) -> Tensor:
        outputs = model(x[n], y[n])
        return outputs["loss"] + outputs[more].pow(4).sum(1).mean()

    found = fields(model, loss, BatchGrad, DiagHessian)
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(loss(slice(n, n + 1)) / 4, p, allow_unused=True)[0] for n in range(4)]
        assert_close(found[f"{name} grad_batch 0"], torch.stack(rows))
        (slope,) = torch.autograd.grad(loss(), p, create_graph=True)
        diagonal = [torch.autograd.grad(s, p, retain_graph=True)[0].flatten()[i] for i, s in enumerate(slope.flatten())]
        assert_close(found[f"{name} diag_h 0"].flatten(), torch.stack(diagonal))


class Experts(nn.Module):
    """As many as samples; the term that balances them is a mean over the batch."""

    def __init__(self, inside: bool):
        super().__init__()
        self.route, self.experts, self.inside = (
            nn.Linear(5, 4),
            nn.ModuleList(nn.Linear(5, 3) for _ in range(4)),
            inside,
        )

    def forward(self, x: Tensor, y: Tensor):
        p = self.route(x).softmax(1)
        z = sum(p[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        term = (p.mean(0) * torch.arange(4.0)).sum()
        return F.cross_entropy(z, y) + term if self.inside else (z, term)


@pytest.mark.parametrize("inside", [False, True])
def test_a_mean_over_the_batch_has_no_samples(inside: bool) -> None:
    """Though it has as many entries as there are samples."""
    model, x, y = extend(Experts(inside).double()), torch.randn(4, 5).double(), torch.tensor([0, 2, 1, 1])

    def loss(n: slice = slice(None)) -> Tensor:
        found = model(x[n], y[n])
        return found if inside else F.cross_entropy(found[0], y[n]) + found[1]

    found = fields(model, loss, BatchGrad)
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(loss(slice(n, n + 1)) / 4, p)[0] for n in range(4)]
        assert_close(found[f"{name} grad_batch 0"], torch.stack(rows))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Parameter(torch.randn(1, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(x * self.gate.sigmoid()), y)


def test_parameters_of_the_shape_of_a_single_sample() -> None:
    model, x, y = extend(Gated().double()), torch.randn(1, 5).double(), torch.tensor([2])
    found = fields(model, lambda: model(x, y), BatchGrad)
    for name, p in model.named_parameters():
        assert_close(found[f"{name} grad_batch 0"][0], p.grad)


# ------------------------------------------------------------------------------------------------ penalties on weights

PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda p: (0.1 * p**2).sum(),
    "root": lambda p: (p * 0.3).square().sum(),
    "distance": lambda p: (p - torch.full_like(p, 0.1)).square().sum(),
    "importance": lambda p: (torch.full_like(p, 2.0) * (p - 0.1) ** 2).sum(),
    "mask": lambda p: (p * torch.ones_like(p)).abs().sum(),
    "groups": lambda p: p.norm(dim=-1).sum(),
    "orthogonality": lambda p: (p @ p.T - torch.eye(4, dtype=p.dtype)).square().sum() if p.dim() == 2 else p.sum(),
}


class Returns(nn.Module):
    def __init__(self, penalty: Callable[[Tensor], Tensor] | None):
        super().__init__()
        self.net, self.penalty = nn.Linear(5, 4), penalty

    def forward(self, x: Tensor) -> Tensor:
        loss = F.mse_loss(self.net(x), torch.zeros(len(x), 4, dtype=x.dtype))
        return loss if self.penalty is None else loss + sum(self.penalty(p) for p in self.parameters())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_rows_of_weights_in_a_penalty_are_no_samples(penalty: str, inside: bool) -> None:
    """Though there are as many of them as samples."""
    x = torch.randn(4, 5).double()
    if inside:
        plain, model = extend(Returns(None).double()), extend(Returns(PENALTIES[penalty]).double())
        runs = lambda: plain(x), lambda: model(x)  # noqa: E731
    else:
        plain, model = extend(Returns(None).double()), extend(nn.Linear(5, 4).double())
        parameters = list(model.parameters())
        runs = (  # noqa: E731
            lambda: plain(x),
            lambda: F.mse_loss(model(x), torch.zeros_like(x[:, :4])) + sum(map(PENALTIES[penalty], parameters)),
        )
    model.load_state_dict(plain.state_dict() if inside else plain.net.state_dict())
    kinds = BatchGrad, DiagGGNExact, KFACEmpirical
    expected, found = fields(plain, runs[0], *kinds), fields(model, runs[1], *kinds)
    for name, value in expected.items():
        assert_close(found[name if inside else name.removeprefix("net.")], value)


# --------------------------------------------------------------------------------------------------- matrices of pairs


class Pairs(nn.Module):
    """Two encoders as in CLIP, of which ``kind`` is returned."""

    def __init__(self, kind: str, width: int):
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(5, width), nn.Linear(6, width)

    def forward(self, u: Tensor, v: Tensor):
        a, b = self.a(u), self.b(v)
        if self.kind == "embeddings":
            return a, b
        z = a @ b.T
        return (z, z.T) if self.kind == "both" else contrastive(z, z.T)

    def loss(self, u: Tensor, v: Tensor) -> Tensor:
        found = self(u, v)
        if self.kind == "loss":
            return found
        return contrastive(found[0] @ found[1].T, found[1] @ found[0].T) if self.kind[0] == "e" else contrastive(*found)


def contrastive(z: Tensor, transposed: Tensor) -> Tensor:
    y = torch.arange(len(z))
    return (F.cross_entropy(z, y) + F.cross_entropy(transposed, y)) / 2


@pytest.mark.parametrize("width", [3, 4])
def test_a_matrix_of_all_pairs_and_its_transpose(width: int) -> None:
    """A sample is a row of the embeddings then, if the model returns these or its loss."""
    model, other, both = (extend(Pairs(each, width).double()) for each in ("embeddings", "loss", "both"))
    other.load_state_dict(model.state_dict())
    u, v = torch.randn(4, 5).double(), torch.randn(4, 6).double()
    with backpack(KFACEmpirical()), pytest.raises(CurvoptError, match="a matrix of all pairs"):
        both.loss(u, v).backward()
    kinds = BatchGrad, Variance, KFACEmpirical
    found = fields(other, lambda: other.loss(u, v), *kinds)
    for name, value in fields(model, lambda: model.loss(u, v), *kinds).items():
        assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    for extension in (DiagGGNExact, DiagHessian):
        with backpack(extension()), pytest.raises(CurvoptError, match="couples samples"):
            other.loss(u, v).backward()


# -------------------------------------------------------------------------------------------------- complex parameters


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.cdouble))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=5)


def test_complex_parameters_of_functions_have_no_fields() -> None:
    model = extend(nn.Sequential(nn.Linear(5, 5), Spectral()).double())
    model[1].weight = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
    extend(model)
    x = torch.randn(4, 5).double()
    with backpack(BatchGrad()), pytest.warns(CurvoptWarning, match="weight' is complex, so it has no fields"):
        model(x).square().mean().backward()
    assert not hasattr(model[1].weight, "grad_batch") and model[1].weight.grad is not None
    assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)
