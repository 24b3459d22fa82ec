"""Losses that are read off the graph: fields equal the dense ones, whatever spells them; what has none is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import Lambda, Net, Problem
from checks import check, check_all, generator
from reference import Reference
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import (
    KFAC,
    KFLR,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    KFACEmpirical,
    Variance,
)

W = torch.tensor([0.5, 2.0, 1.3], dtype=torch.float64)
X = torch.randn(4, 4, dtype=torch.float64, generator=generator(0))
Y = torch.tensor([0, 2, 1, 1])
REAL = torch.rand(4, 3, dtype=torch.float64, generator=generator(1))

Loss = Callable[[Tensor], Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def tokens() -> nn.Module:
    """Output ``[4, 3, 2]``: classes on the second axis, of two positions."""
    positions, last = Lambda(lambda x: torch.stack([x, x.flip(1)], 1)), Lambda(lambda z: z.transpose(1, 2))
    return nn.Sequential(positions, *mlp(), last)


def fields_of(model: nn.Module, run: Callable[[], Tensor], *extensions: Extension) -> dict[str, Tensor | None]:
    """Every field of every parameter after a backward."""
    with backpack(*extensions):
        run().backward()
    found = {}
    for name, p in model.named_parameters():
        for field in (extension.field for extension in extensions):
            value = getattr(p, field, None)
            for i, part in enumerate(value if isinstance(value, list) else [value]):
                found[f"{name} {field} {i}"] = part.detach().clone() if part is not None else None
    return found


def fields(make: Callable[[], nn.Module], loss: Loss, extensions: list[type] | None = None) -> dict[str, Tensor | None]:
    """Exact and sampled fields, these with a fixed generator, or those of some extensions."""
    model = extend(make())
    sampled = [] if extensions else [cls(3, generator=generator(0)) for cls in (DiagGGNMC, KFAC)]
    exact = [cls() for cls in extensions or [DiagGGNExact, KFLR, DiagHessian]]
    return fields_of(model, lambda: loss(model(X)), *exact, *sampled)


def entropy(z: Tensor) -> Tensor:
    logs = z.log_softmax(1)
    return -(logs.exp() * logs).sum(1).mean()


def focal(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(1).gather(1, y[:, None])
    return -((1 - logs.exp()) ** 2 * logs).mean()


POSITIONS = torch.stack([Y, 2 - Y], 1)

#: Losses that are known however they are written, and others that keep samples apart and are convex; the options of
#: PyTorch's modules are in the table of cases.
LOSSES: dict[str, Loss] = {
    "scaled": lambda z: 3 * F.cross_entropy(z, Y) / 2,
    "nll": lambda z: nn.NLLLoss(W)(z.log_softmax(1), Y),
    "kl": lambda z: F.kl_div(z.log_softmax(1), REAL, reduction="sum"),
    "by hand": lambda z: -(REAL * z.log_softmax(1)).sum(1).mean(),
    "gathered": lambda z: -z.log_softmax(1).gather(1, Y[:, None]).mean(),
    "indexed": lambda z: -z.log_softmax(1)[torch.arange(4), Y].sum() / 4,
    "cross-entropy, weighted outside": lambda z: (F.cross_entropy(z, Y, reduction="none") * W[Y]).sum(),
    "squares, swapped": lambda z: F.mse_loss(REAL, z),
    "squares, reduced outside": lambda z: F.mse_loss(z, REAL, reduction="none").sum(1).mean(),
    "squares by products": lambda z: (0.5 * (z - REAL) * (z - REAL)).mean(),
    "squares of weighted norms": lambda z: (W[Y] * (z - REAL)[:, :1].norm(dim=1) ** 2).mean(),
    "squares of one column": lambda z: F.mse_loss(z[:, 0], REAL[:, 1]),
    "squares, broadcast": lambda z: F.mse_loss(z[:, 0], REAL[:, :1]),  # each output counts as often as there are rows
    "squares of the output and its sine": lambda z: F.mse_loss(z, z.sin()),
    "bce, weighted outside": lambda z: (W * F.binary_cross_entropy_with_logits(z, REAL, reduction="none")).mean(),
    "bce of the output as a target": lambda z: F.binary_cross_entropy_with_logits(REAL, z),
    "bce of probabilities": lambda z: F.binary_cross_entropy(z.sigmoid(), REAL),
    "two losses": lambda z: F.cross_entropy(z, Y) + 0.3 * F.mse_loss(z, REAL),
    "twice": lambda z: (lambda loss: torch.stack([loss, loss]).mean() + loss)(F.cross_entropy(z, Y)),
    "weighted by what is detached": lambda z: F.cross_entropy(z, Y) * F.cross_entropy(z, Y).detach(),
    "of one row": lambda z: F.cross_entropy(z[0], Y[0]),
    "exponential": lambda z: z.exp().mean(),
    "mean": lambda z: z.mean(),
    "huber": lambda z: F.huber_loss(z, REAL),
    "beside a penalty": lambda z: F.cross_entropy(z, Y) + 0.1 * z.square().mean(),
    "beside an entropy": lambda z: F.nll_loss(z.log_softmax(1), Y) - 0.1 * entropy(0.3 * z),
    "kl beside an entropy": lambda z: F.kl_div(z.log_softmax(1), REAL, reduction="batchmean") - 0.1 * entropy(0.3 * z),
    "focal": lambda z: focal(0.3 * z, Y),
    **{  # what nodes saved is computed again, and can be had once in each backward
        f"checkpointed {name}": lambda z, loss=loss: checkpoint(loss, z, use_reentrant=False)
        for name, loss in {
            "cross-entropy": lambda z: F.cross_entropy(z, Y),
            "squares": lambda z: F.mse_loss(z, REAL),
            "bce": lambda z: F.binary_cross_entropy_with_logits(z, REAL, W, pos_weight=W),
        }.items()
    },
}
#: The same of tokens.
OF_TOKENS: dict[str, Loss] = {
    "flattened": lambda z: F.cross_entropy(z.mT.reshape(-1, 3), POSITIONS.flatten()),
    "last axis": lambda z: F.nll_loss(F.log_softmax(z.mT, dim=-1).flatten(0, 1), POSITIONS.flatten()),
}


@pytest.mark.filterwarnings("ignore:.*linear in the network's output", "ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES | OF_TOKENS)
def test_fields_equal_the_dense_reference(name: str):
    model, loss = (tokens() if name in OF_TOKENS else mlp()), (LOSSES | OF_TOKENS)[name]
    problem = Problem(model, X, Y, nn.Identity())
    ref = Reference(copy.deepcopy(model), X, loss)
    check_all(problem, lambda: loss(model(X)), ref)
    with backpack(KFLR()):
        loss(model(X)).backward()
    check(problem, ref, KFLR)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda z: F.cross_entropy(z, Y) ** 2, "PowBackward0.*couples samples"),
        (lambda z: F.cross_entropy(z, Y) * F.mse_loss(z, REAL), "MulBackward0.*couples samples"),
        (lambda z: 1 / F.cross_entropy(z, Y), "couples samples"),
        (lambda z: REAL.sum() / F.cross_entropy(z, Y), "DivBackward0.*couples samples"),
        (lambda z: F.cross_entropy(z.T, torch.tensor([0, 1, 2])) + z.T.log_softmax(0).mean(), "couples samples"),
        (lambda z: (z.log_softmax(1).exp() * REAL).sum(), "SumBackward0.*indefinite"),
        (lambda z: F.cross_entropy(z, z.softmax(1)), "indefinite"),
        (lambda z: -F.cross_entropy(z, Y), "negative weight"),
        (lambda z: -1e-9 * F.cross_entropy(z, Y), "negative weight"),
        (lambda z: F.cross_entropy(z, Y) - 2 * F.mse_loss(z, REAL), "negative weight"),
        (lambda z: F.cross_entropy(z, Y, -W, reduction="sum"), "negative weight"),
        (lambda z: F.binary_cross_entropy_with_logits(z, REAL.sigmoid(), -W, reduction="sum"), "negative weight"),
    ],
)
def test_losses_without_a_gauss_newton_matrix_are_refused(loss: Loss, why: str):
    model = extend(mlp())
    for extension in (DiagGGNExact(), KFLR(), DiagGGNMC(), KFAC()):
        with pytest.raises(CurvoptError, match=f"{extension.field}: .*{why}"), backpack(extension):
            loss(model(X)).backward()
        assert not any(hasattr(p, extension.field) or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("lossfunc", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_loss_of_a_single_number_is_refused(lossfunc: Callable[..., Tensor]):
    model = extend(mlp())
    with (
        pytest.raises(CurvoptError, match="its input is a single number, but diag_h needs a row"),
        backpack(DiagHessian()),
    ):
        lossfunc(model(X).mean(), REAL[0, 0]).backward()
    with backpack(BatchGrad()):
        lossfunc(model(X).mean(), REAL[0, 0]).backward()
    assert_close(model[2].bias.grad_batch.sum(0), model[2].bias.grad)


@pytest.mark.parametrize("steps", [3, 4, 8])
def test_ctc_has_time_first(steps: int):
    """Its log-probabilities are ``[T, N, C]``: the model has to be batch-first before."""
    x, targets, steps_of, lengths = torch.randn(4, steps, 4).double(), 1 + Y[:, None] % 2, [steps] * 4, [1] * 4

    def log_probs(first: int = 0) -> Tensor:
        return model(x.transpose(0, first)).log_softmax(2).transpose(0, 1 - first)

    model = extend(mlp())
    with pytest.raises(CurvoptError, match=r"4 samples of .*batch-first"), backpack(BatchGrad()):
        F.ctc_loss(log_probs(first=1), targets, steps_of, lengths).backward()
    with backpack(BatchGrad()):
        F.ctc_loss(log_probs(), targets, steps_of, lengths).backward()
    parts = F.ctc_loss(log_probs(), targets, steps_of, lengths, reduction="none") / 4
    for p in model.parameters():
        assert_close(p.grad_batch, torch.stack([torch.autograd.grad(part, p, retain_graph=True)[0] for part in parts]))
    with pytest.raises(CurvoptError, match="second derivative|CtcLoss"), backpack(DiagGGNExact()):
        F.ctc_loss(log_probs(), targets, steps_of, lengths).backward()


WEIGHINGS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "log variances": lambda w, losses: sum((-w[i]).exp() * loss + w[i] for i, loss in enumerate(losses)),  # type: ignore
    "deviations": lambda w, losses: losses[0] / (2 * w[0] ** 2) + losses[1] / w[1] ** 2 + w.square().log1p().sum(),
    "softmax": lambda w, losses: w.softmax(0) @ torch.stack(losses),
}


@pytest.mark.parametrize("kept", ["outside", "in an extended module", "by an extended module"])
@pytest.mark.parametrize("weigh", WEIGHINGS.values(), ids=WEIGHINGS)
def test_learned_weights_of_losses_are_constants_for_the_network(weigh: Callable, kept: str):
    owner = Net(lambda m: m.weights * 1.5, weights=torch.tensor([0.4, 1.3]).double())
    weights: Callable[[], Tensor] = owner if kept.startswith("by") else lambda: owner.weights

    def loss(detach: bool) -> Loss:
        def of_output(z: Tensor) -> Tensor:
            w = weights().detach() if detach else weights()
            return weigh(w, [F.cross_entropy(z, Y), F.mse_loss(z, REAL)])

        return of_output

    extensions = [DiagGGNExact, KFLR, DiagHessian, BatchGrad]
    expected = fields(mlp, loss(detach=True), extensions)
    if kept != "outside":
        extend(owner)
    with nullcontext() if kept == "outside" else pytest.warns(CurvoptWarning, match="weights: .* weight of losses"):
        found = fields(mlp, loss(detach=False), extensions)
    assert owner.weights.grad is not None and found.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(found[key], value)


def test_weights_of_losses_have_no_quantities_but_those_of_predictions_have():
    model = mlp()
    model.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    extend(model)
    with pytest.warns(CurvoptWarning, match="weight: .* weight of losses"), backpack(DiagGGNExact()):
        (model.weight * F.cross_entropy(model.weight * model(X), Y)).backward()
    expected = fields(mlp, lambda z: 1.5 * F.cross_entropy(1.5 * z, Y), [DiagGGNExact])
    z = model(X).detach()
    H = torch.func.hessian(lambda weight: 1.5 * F.cross_entropy(weight * z, Y))(model.weight.detach())
    for name, _ in mlp().named_parameters():
        assert_close(model.get_parameter(name).diag_ggn_exact, expected[f"{name} diag_ggn_exact 0"])
    assert_close(model.weight.diag_ggn_exact, H)


@pytest.mark.parametrize("hook", [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook])
def test_backward_hooks_of_the_loss(hook: Callable):
    """They stand between the loss and what is differentiated, or between the network and its loss."""
    lossfunc = nn.CrossEntropyLoss()
    expected = fields(mlp, lambda z: F.cross_entropy(z, Y))
    hook(lossfunc, lambda *_: None)
    found = fields(mlp, lambda z: lossfunc(z, Y))
    assert_close(found, expected)


# ------------------------------------------------------------------------------------------- losses of several models


def test_a_loss_with_a_parameter_is_a_model_that_returns_its_loss() -> None:
    model = mlp()
    logcosh = Net(lambda m, z, y: (m.scale * z - F.one_hot(y, 3)).cosh().log().mean(), scale=torch.ones(()).double())
    ref = Reference(copy.deepcopy(model), X, lambda z: logcosh(z, Y))
    problem = Problem(extend(model), X, Y, extend(logcosh))
    with backpack(DiagGGNExact(), DiagHessian()):
        problem.loss().backward()
    check(problem, ref, DiagGGNExact)
    check(problem, ref, DiagHessian)


# ------------------------------------------------------------------------------------------------ penalties on weights

PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "importance": lambda p: (torch.full_like(p, 2.0) * (p - 0.1) ** 2).sum(),
    "groups": lambda p: p.norm(dim=-1).sum(),
    "orthogonality": lambda p: (p @ p.T - torch.eye(4, dtype=p.dtype)).square().sum() if p.dim() == 2 else p.sum(),
}


def returns(penalty: Callable[[Tensor], Tensor] | None) -> nn.Module:
    def forward(m: Net, x: Tensor) -> Tensor:
        loss = F.mse_loss(m.net(x), torch.zeros(len(x), 4, dtype=x.dtype))
        return loss if penalty is None else loss + sum(penalty(p) for p in m.parameters())

    return extend(Net(forward, net=nn.Linear(5, 4)).double())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_rows_of_weights_in_a_penalty_are_no_samples(penalty: str, inside: bool) -> None:
    """Though there are as many of them as samples."""
    x, kinds = torch.randn(4, 5).double(), (BatchGrad(), DiagGGNExact(), KFACEmpirical())
    plain, model = (returns(PENALTIES[penalty] if within else None) for within in (False, inside))
    model.load_state_dict(plain.state_dict())

    def loss() -> Tensor:
        return model(x) if inside else model(x) + sum(map(PENALTIES[penalty], model.parameters()))

    assert_close(fields_of(model, loss, *kinds), fields_of(plain, lambda: plain(x), *kinds))


# --------------------------------------------------------------------------------------------------- matrices of pairs


def contrastive(z: Tensor, transposed: Tensor) -> Tensor:
    y = torch.arange(len(z))
    return (F.cross_entropy(z, y) + F.cross_entropy(transposed, y)) / 2


@pytest.mark.parametrize("width", [3, 4])
def test_a_matrix_of_all_pairs_and_its_transpose(width: int) -> None:
    """Two encoders as in CLIP: a sample is a row of the embeddings, if a model returns these or its loss."""
    layers = {"a": nn.Linear(5, width).double(), "b": nn.Linear(6, width).double()}
    u, v = torch.randn(4, 5).double(), torch.randn(4, 6).double()

    def model(of: Callable[[Tensor, Tensor], object]) -> nn.Module:
        return extend(Net(lambda m, u, v: of(m.a(u), m.b(v)), **copy.deepcopy(layers)))

    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = a @ b.T
        return z, z.T

    embeddings, returns = model(lambda a, b: (a, b)), model(lambda a, b: contrastive(*both(a, b)))
    with backpack(KFACEmpirical()), pytest.raises(CurvoptError, match="a matrix of all pairs"):
        contrastive(*model(both)(u, v)).backward()

    def outside() -> Tensor:
        a, b = embeddings(u, v)
        return contrastive(a @ b.T, b @ a.T)

    kinds = BatchGrad(), Variance(), KFACEmpirical()
    found = fields_of(returns, lambda: returns(u, v), *kinds)
    for name, value in fields_of(embeddings, outside, *kinds).items():
        assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    for extension in (DiagGGNExact, DiagHessian):
        with backpack(extension()), pytest.raises(CurvoptError, match="couples samples"):
            returns(u, v).backward()


# -------------------------------------------------------------------------------------------------- complex parameters


def test_complex_parameters_of_functions_have_no_fields() -> None:
    spectral = Net(lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.weight, n=5), weight=torch.randn(3).cdouble())
    model = extend(nn.Sequential(nn.Linear(5, 5).double(), spectral))
    x = torch.randn(4, 5).double()
    with backpack(BatchGrad()), pytest.warns(CurvoptWarning, match="weight' is complex, so it has no fields"):
        model(x).square().mean().backward()
    assert not hasattr(model[1].weight, "grad_batch") and model[1].weight.grad is not None
    assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)
