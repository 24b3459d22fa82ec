"""Models that return their losses, losses of several models, penalties on weights, matrices of pairs."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Problem
from checks import check
from reference import Reference
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import BatchGrad, DiagGGNExact, DiagHessian, KFACEmpirical, Variance

pytestmark = pytest.mark.filterwarnings("ignore:.*sample by sample", "ignore:.*in the loss by another path")


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

    def __init__(self, names: set[str]):
        super().__init__()
        self.body, self.last, self.names = nn.Linear(5, 4), nn.Linear(4, 3), names

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        z = self.last(h)
        outputs = {"loss": F.cross_entropy(z, y), "hidden": h, "logits": z, "probs": z.softmax(1)}
        return {name: value for name, value in outputs.items() if name in self.names}


@pytest.mark.parametrize("more", ["probs", "hidden", "logits"])
@pytest.mark.parametrize("others", [set(), {"logits", "hidden", "probs"}], ids=["alone", "beside others"])
def test_a_loss_beside_outputs_that_enter_another_term(more: str, others: set[str]) -> None:
    model = extend(LossBeside({"loss", more} | others).double())
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
        self.route, self.inside = nn.Linear(5, 4), inside
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

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


# ------------------------------------------------------------------------------------------- losses of several models


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_a_known_loss_behind_another_is_split_at_its_own_input() -> None:
    model, x, y, teacher = extend(net()), torch.randn(6, 5).double(), torch.arange(6) % 3, torch.randn(6, 3).double()

    def of(*losses: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        def run() -> Tensor:
            logs = model(x).log_softmax(1)
            return sum(loss(logs) for loss in losses)

        return fields(model, run, DiagGGNExact, DiagHessian)

    losses = (lambda logs: F.nll_loss(logs, y)), (lambda logs: F.mse_loss(logs, teacher.log_softmax(1)))
    first, second = map(of, losses)
    assert_close(of(*losses), {name: first[name] + second[name] for name in first})
    assert all(value.any() for value in (first | second).values())


def test_losses_of_two_models_one_behind_the_other() -> None:
    first, second, x, y = (
        extend(net()),
        extend(nn.Linear(3, 2).double()),
        torch.randn(6, 5).double(),
        torch.arange(6) % 3,
    )

    def loss() -> Tensor:
        logs = first(x).log_softmax(1)
        return F.nll_loss(logs, y) + F.mse_loss(second(logs), torch.ones(6, 2).double())

    model = nn.ModuleList([first, second])
    found = fields(model, loss, DiagGGNExact, DiagHessian)
    for name, p in model.named_parameters():
        (slope,) = torch.autograd.grad(loss(), p, create_graph=True)
        diagonal = [torch.autograd.grad(s, p, retain_graph=True)[0].flatten()[i] for i, s in enumerate(slope.flatten())]
        assert_close(found[f"{name} diag_h 0"].flatten(), torch.stack(diagonal))


class Learned(nn.Module):
    """Log-cosh with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.scale * z - F.one_hot(y, 3)).cosh().log().mean()


def test_a_loss_with_a_parameter_is_a_model_that_returns_its_loss() -> None:
    model, lossfunc, x, y = net(), Learned(), torch.randn(6, 5).double(), torch.arange(6) % 3
    ref, problem = Reference(copy.deepcopy(model), x, lambda z: Learned()(z, y)), Problem(extend(model), x, y, lossfunc)
    extend(lossfunc)
    with backpack(DiagGGNExact(), DiagHessian()):
        problem.loss().backward()
    check(problem, ref, DiagGGNExact)
    check(problem, ref, DiagHessian)


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).gather(1, y[:, None]).mean()


def test_a_ggn_of_zero_is_said() -> None:
    model = extend(Score())
    with pytest.warns(CurvoptWarning, match=r"diag_ggn_exact: .*linear in the network's output.*let the model return"):
        with backpack(DiagGGNExact()):
            model(torch.randn(6, 5), torch.arange(6) % 3).backward()


# ------------------------------------------------------------------------------------------------ penalties on weights

PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "importance": lambda p: (torch.full_like(p, 2.0) * (p - 0.1) ** 2).sum(),
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
    x, kinds = torch.randn(4, 5).double(), (BatchGrad, DiagGGNExact, KFACEmpirical)
    plain, model = (extend(Returns(PENALTIES[penalty] if within else None).double()) for within in (False, inside))
    model.load_state_dict(plain.state_dict())

    def loss() -> Tensor:
        return model(x) if inside else model(x) + sum(map(PENALTIES[penalty], model.parameters()))

    assert_close(fields(model, loss, *kinds), fields(plain, lambda: plain(x), *kinds))


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
