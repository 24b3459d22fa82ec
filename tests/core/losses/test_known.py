"""Losses read off the graph give every field that the extended loss gives; what is not recognised is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import generator
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import (
    KFAC,
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    KFACEmpirical,
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
    return nn.Sequential(Positions(), *mlp(), Transpose())


class Positions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.flip(1)], 1)


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def fields(make: Callable[[], nn.Module], loss: Loss, extensions: list[type] | None = None) -> dict[str, Tensor]:
    """Every field of every parameter; sampled ones with a fixed generator."""
    model = extend(make())
    value = loss(model(X))
    exact = [cls() for cls in extensions or [DiagGGNExact, KFLR, DiagHessian]]
    sampled = [] if extensions else [cls(3, generator=generator(0)) for cls in (DiagGGNMC, KFAC)]
    with backpack(*exact, *sampled):
        value.backward()
    found = {}
    for name, p in model.named_parameters():
        for extension in [*exact, *sampled]:
            value = getattr(p, extension.field)
            factors = value if isinstance(value, list) else [value]
            found |= {f"{name} {extension.field} {i}": factor for i, factor in enumerate(factors)}
    return found


def extended(*terms: tuple[float, nn.Module, Tensor]) -> Loss:
    terms = tuple((factor, extend(lossfunc), target) for factor, lossfunc, target in terms)
    return lambda z: sum(factor * lossfunc(z, target) for factor, lossfunc, target in terms)


CE, MSE, BCE = nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss
IGNORED = torch.tensor([0, -100, 1, 1])
POSITIONS, SOFT = torch.stack([Y, 2 - Y], 1), torch.stack([REAL, REAL.flip(1)], 2)

FUNCTIONAL: dict[str, tuple[Callable[[], nn.Module], Loss, Loss]] = {
    "ce": (mlp, lambda z: F.cross_entropy(z, Y), extended((1, CE(), Y))),
    "ce-module": (mlp, lambda z: CE()(z, Y), extended((1, CE(), Y))),
    "ce-sum": (mlp, lambda z: F.cross_entropy(z, Y, reduction="sum"), extended((1, CE(reduction="sum"), Y))),
    "ce-scaled": (mlp, lambda z: 3 * F.cross_entropy(z, Y) / 2, extended((1.5, CE(), Y))),
    "ce-weight": (mlp, lambda z: F.cross_entropy(z, Y, W), extended((1, CE(W), Y))),
    "ce-ignored": (mlp, lambda z: F.cross_entropy(z, IGNORED), extended((1, CE(), IGNORED))),
    "ce-ignored-class": (mlp, lambda z: F.cross_entropy(z, Y, ignore_index=1), extended((1, CE(ignore_index=1), Y))),
    "ce-smooth": (mlp, lambda z: F.cross_entropy(z, Y, label_smoothing=0.2), extended((1, CE(label_smoothing=0.2), Y))),
    "ce-smooth-weight-ignored": (
        mlp,
        lambda z: F.cross_entropy(z, IGNORED, W, label_smoothing=0.2),
        extended((1, CE(W, label_smoothing=0.2), IGNORED)),
    ),
    "ce-probabilities": (mlp, lambda z: F.cross_entropy(z, REAL), extended((1, CE(), REAL))),
    "ce-probabilities-all": (
        mlp,
        lambda z: F.cross_entropy(z, REAL, W, label_smoothing=0.2, reduction="sum"),
        extended((1, CE(W, label_smoothing=0.2, reduction="sum"), REAL)),
    ),
    "ce-extra-dims": (tokens, lambda z: F.cross_entropy(z, POSITIONS), extended((1, CE(), POSITIONS))),
    "ce-extra-dims-image": (
        lambda: nn.Sequential(tokens(), nn.Unflatten(2, (1, 2))),
        lambda z: F.cross_entropy(z, POSITIONS.unsqueeze(1), W),
        extended((1, CE(W), POSITIONS.unsqueeze(1))),
    ),
    "ce-extra-dims-smooth": (
        tokens,
        lambda z: F.cross_entropy(z, POSITIONS, W, label_smoothing=0.1),
        extended((1, CE(W, label_smoothing=0.1), POSITIONS)),
    ),
    "ce-extra-dims-probabilities": (tokens, lambda z: F.cross_entropy(z, SOFT), extended((1, CE(), SOFT))),
    "ce-extra-dims-flattened": (
        tokens,
        lambda z: F.cross_entropy(z.mT.reshape(-1, 3), POSITIONS.flatten()),
        extended((1, CE(), POSITIONS)),
    ),
    "ce-last-axis": (
        tokens,
        lambda z: F.nll_loss(F.log_softmax(z.mT, dim=-1).flatten(0, 1), POSITIONS.flatten()),
        extended((1, CE(), POSITIONS)),
    ),
    "nll": (mlp, lambda z: F.nll_loss(z.log_softmax(1), Y), extended((1, CE(), Y))),
    "nll-extended": (mlp, lambda z: extend(nn.NLLLoss(W))(z.log_softmax(1), Y), extended((1, CE(W), Y))),
    "kl": (
        mlp,
        lambda z: F.kl_div(z.log_softmax(1), REAL, reduction="sum"),
        extended((1, CE(reduction="sum"), REAL)),
    ),
    "by-hand": (
        mlp,
        lambda z: -(REAL * z.log_softmax(1)).sum(1).mean(),
        extended((1, CE(), REAL)),
    ),
    "gather-by-hand": (mlp, lambda z: -z.log_softmax(1).gather(1, Y[:, None]).mean(), extended((1, CE(), Y))),
    "index-by-hand": (mlp, lambda z: -z.log_softmax(1)[torch.arange(4), Y].sum() / 4, extended((1, CE(), Y))),
    "ce-reduced-outside": (
        mlp,
        lambda z: (F.cross_entropy(z, Y, reduction="none") * W[Y]).sum(),
        extended((1, CE(W, reduction="sum"), Y)),
    ),
    "ce-extended-reduced-outside": (
        mlp,
        lambda z: extend(CE(reduction="none"))(z, Y).mean(),
        extended((1, CE(), Y)),
    ),
    "mse": (mlp, lambda z: F.mse_loss(z, REAL), extended((1, MSE(), REAL))),
    "mse-swapped": (mlp, lambda z: F.mse_loss(REAL, z), extended((1, MSE(), REAL))),
    "mse-sum": (mlp, lambda z: F.mse_loss(z, REAL, reduction="sum") / 4, extended((0.25, MSE(reduction="sum"), REAL))),
    "mse-none": (mlp, lambda z: F.mse_loss(z, REAL, reduction="none").sum(1).mean(), extended((3, MSE(), REAL))),
    "mse-extra-dims": (tokens, lambda z: F.mse_loss(z, SOFT), extended((1, MSE(), SOFT))),
    "mse-squeezed": (mlp, lambda z: F.mse_loss(z[:, 0], REAL[:, 1]), lambda z: extend(MSE())(z[:, 0], REAL[:, 1])),
    "bce": (mlp, lambda z: F.binary_cross_entropy_with_logits(z, REAL), extended((1, BCE(), REAL))),
    "bce-all": (
        mlp,
        lambda z: F.binary_cross_entropy_with_logits(z, REAL, W, pos_weight=2 * W, reduction="sum"),
        extended((1, BCE(W, pos_weight=2 * W, reduction="sum"), REAL)),
    ),
    "bce-weighted-outside": (
        mlp,
        lambda z: (W * F.binary_cross_entropy_with_logits(z, REAL, reduction="none")).mean(),
        extended((1, BCE(W), REAL)),
    ),
    "two-losses": (
        mlp,
        lambda z: F.cross_entropy(z, Y) + 0.3 * F.mse_loss(z, REAL),
        extended((1, CE(), Y), (0.3, MSE(), REAL)),
    ),
    "one-extended": (
        mlp,
        lambda z: extend(CE())(z, Y) + 0.3 * F.mse_loss(z, REAL),
        extended((1, CE(), Y), (0.3, MSE(), REAL)),
    ),
    "twice": (
        mlp,
        lambda z: (lambda loss: torch.stack([loss, loss]).mean() + loss)(F.cross_entropy(z, Y)),
        extended((2, CE(), Y)),
    ),
    "weighted-by-what-is-detached": (
        mlp,
        lambda z: F.cross_entropy(z, Y) * F.cross_entropy(z, Y).detach(),
        lambda z: extend(CE())(z, Y) * F.cross_entropy(z, Y).detach(),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_loss_equals_the_extended_one(name: str):
    make, functional, extended_loss = FUNCTIONAL[name]
    expected = fields(make, extended_loss)
    if len(expected) and name in ("two-losses", "one-extended", "twice"):
        # samples are drawn loss by loss: the order differs
        expected = {key: value for key, value in expected.items() if not key.split()[1].endswith(("_mc", "kfac"))}
    if name in ("ce-extra-dims-flattened", "ce-last-axis"):
        expected = {key: value for key, value in expected.items() if not key.split()[1].endswith(("_mc", "kfac"))}
    found = fields(make, functional)
    assert any(value.abs().max() > 0 for value in expected.values())
    for key, value in expected.items():
        assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["ce-smooth-weight-ignored", "mse", "bce-all"])
def test_gradient_fields_are_the_same(name: str):
    make, functional, extended_loss = FUNCTIONAL[name]
    found, expected = (fields(make, loss, [BatchGrad, BatchL2Grad]) for loss in (functional, extended_loss))
    for key, value in expected.items():
        assert_close(found[key], value)


@pytest.mark.parametrize("name", ["ce", "bce", "mse"])
def test_fields_of_functional_losses_can_be_differentiated(name: str):
    make, functional, extended_loss = FUNCTIONAL[name]
    found = []
    for loss in (functional, extended_loss):
        model = extend(make())
        with backpack(DiagGGNExact()):
            loss(model(X)).backward(create_graph=True)
        traces = sum(p.diag_ggn_exact.sum() for p in model.parameters())
        found.append(torch.autograd.grad(traces, list(model.parameters()), allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)
    assert found[0][0].abs().max() > 0


def test_repeated_and_nested_contexts_count_once():
    model = extend(mlp())
    loss = F.cross_entropy(model(X), Y)
    expected = fields(mlp, FUNCTIONAL["ce"][1], [DiagGGNExact])
    with backpack(KFLR()), backpack(DiagGGNExact()):
        for _ in range(2):
            loss.backward(retain_graph=True)
    with backpack(DiagGGNExact()):
        loss.backward(retain_graph=True)
    for name, p in model.named_parameters():
        assert_close(p.diag_ggn_exact, expected[f"{name} diag_ggn_exact 0"])
        assert not hasattr(p, "kflr")
    loss.backward()  # no hook is left behind


def test_nothing_keeps_the_graph_alive():
    model = extend(mlp())
    z = model(X)
    with backpack(KFAC()):
        F.cross_entropy(z, Y).backward()
    alive = weakref.ref(z)
    del z
    gc.collect()
    assert alive() is None


def test_half_precision_under_autocast():
    model, x = nn.Linear(4, 3), X.float()
    extend(model)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(x), Y)
        with backpack(DiagGGNExact()):
            loss.backward()
        found.append(model.weight.diag_ggn_exact.float())
    assert_close(found[1], found[0], rtol=0.05, atol=1e-3)


# ----------------------------------------------------------------------------------------------------- what is refused


class EndsWithLogSoftmax(nn.Module):
    """Owns a parameter, and makes log-probabilities of the logits itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).log_softmax(1)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda z: z.exp().mean(), "ExpBackward0"),
        (lambda z: z.mean(), "Backward"),
        (lambda z: F.cross_entropy(z, Y) ** 2, "PowBackward0"),
        (lambda z: F.cross_entropy(z, Y) * F.mse_loss(z, REAL), "MulBackward0"),
        (lambda z: 1 / F.cross_entropy(z, Y), "ReciprocalBackward0"),
        (lambda z: REAL.sum() / F.cross_entropy(z, Y), "DivBackward0"),
        (lambda z: F.cross_entropy(z, Y) + 0.1 * z.square().mean(), "PowBackward0"),
        (lambda z: extend(CE())(z, Y) + 0.1 * z.square().mean(), "PowBackward0"),
        (lambda z: extend(CE())(z, Y) ** 2, "PowBackward0"),
        (lambda z: (z.log_softmax(1).exp() * REAL).sum(), "ExpBackward0"),
        (lambda z: F.cross_entropy(z, z.softmax(1)), "MulBackward0"),
        (lambda z: F.mse_loss(z, z.sin()), "MseLossBackward0"),
        (lambda z: F.binary_cross_entropy_with_logits(REAL, z), "BinaryCrossEntropyWithLogitsBackward0"),
        (lambda z: F.cross_entropy(z.T, torch.tensor([0, 1, 2])) + z.T.log_softmax(0).mean(), "LogSoftmaxBackward0"),
        (lambda z: F.cross_entropy(z[0], Y[0]), ""),
        (lambda z: F.binary_cross_entropy(z.sigmoid(), REAL), "BinaryCrossEntropyBackward0"),
        (lambda z: F.huber_loss(z, REAL), "HuberLossBackward0"),
    ],
)
def test_other_functions_are_computed_or_refused(loss: Loss, names: str):
    """Of losses that keep samples apart and are convex the GGN is right; others are named errors."""
    model = extend(mlp())
    try:
        with backpack(DiagGGNExact()):
            loss(model(X)).backward()
    except CurvoptError as error:
        assert "diag_ggn_exact" in str(error)
        assert not any(hasattr(p, "diag_ggn_exact") for p in model.parameters())
        return
    z = model(X)
    hessian = torch.autograd.functional.hessian(loss, z.detach()).reshape(z.numel(), z.numel())
    for p in model.parameters():
        rows = [torch.autograd.grad(entry, p, retain_graph=True)[0].flatten() for entry in z.flatten()]
        jacobian = torch.stack(rows)
        expected = torch.einsum("ap,ab,bp->p", jacobian, hessian, jacobian).reshape(p.shape)
        assert_close(p.diag_ggn_exact, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_output_that_is_broadcast_to_the_target_counts_as_often():
    model = extend(mlp())
    with backpack(DiagGGNExact()):
        F.mse_loss(model(X)[:, 0], REAL[:, :1]).backward()
    found = [p.diag_ggn_exact for p in model.parameters()]
    with backpack(DiagGGNExact()):
        F.mse_loss(model(X)[:, :1].expand(-1, len(X)), REAL[:, :1].T.expand(len(X), -1)).backward()
    for p, before in zip(model.parameters(), found, strict=True):
        assert_close(before, p.diag_ggn_exact)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z, Y),
        lambda z: F.mse_loss(z, REAL),
        lambda z: F.binary_cross_entropy_with_logits(z, REAL, W, pos_weight=W),
    ],
)
def test_losses_under_checkpointing(loss: Loss):
    """What their nodes saved is computed again, and can be had once in each backward."""
    plain = fields(mlp, loss)
    again = fields(mlp, lambda z: checkpoint(loss, z, use_reentrant=False))
    assert plain.keys() == again.keys()
    for name, field in plain.items():
        assert_close(again[name], field)


@pytest.mark.parametrize("lossfunc", [F.mse_loss, extend(nn.MSELoss()), F.binary_cross_entropy_with_logits])
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


def test_loss_inside_of_a_module_with_parameters():
    class Ends(EndsWithLogSoftmax):
        def forward(self, z: Tensor) -> Tensor:
            return z * self.scale

    expected = fields(lambda: nn.Sequential(mlp(), Ends()), lambda z: F.cross_entropy(z, Y))
    assert_close(fields(lambda: nn.Sequential(mlp(), EndsWithLogSoftmax()), lambda z: F.nll_loss(z, Y)), expected)


@pytest.mark.filterwarnings("ignore::curvopt.CurvoptWarning")
def test_extended_loss_inside_of_a_module_with_parameters():
    """Whether the graph shows how its parameters are used or not."""

    class Owner(nn.Module):
        def __init__(self, times: Callable[[Tensor, Tensor], Tensor]):
            super().__init__()
            self.mlp, self.lossfunc, self.scale = mlp(), nn.CrossEntropyLoss(), nn.Parameter(torch.ones(3).double())
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            return self.lossfunc(self.times(self.mlp(x), self.scale), Y)

    def loss(scale: Tensor) -> Tensor:
        return F.cross_entropy(z * scale, Y)

    for times in (torch.mul, lambda z, scale: torch.addcdiv(torch.zeros_like(z), z, scale.reciprocal())):
        model = extend(Owner(times))
        with backpack(DiagGGNExact(), DiagHessian()):
            model(X).backward()
        z = model.mlp(X).detach()
        hessian = torch.autograd.functional.hessian(loss, model.scale.detach())
        assert_close(model.scale.diag_h, hessian.diagonal())
        assert_close(model.scale.diag_ggn_exact, hessian.diagonal())  # the scale enters linearly

    model.scale.requires_grad_(False)
    with backpack(DiagGGNExact()):
        model(X).backward()
    assert_close(
        model.mlp[2].bias.diag_ggn_exact,
        fields(mlp, lambda z: F.cross_entropy(z, Y), [DiagGGNExact])["2.bias diag_ggn_exact 0"],
    )


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("steps", [3, 4, 8])
def test_ctc_has_time_first(steps: int, extended: bool):
    """Its log-probabilities are ``[T, N, C]``: the model has to be batch-first before."""
    x, targets, steps_of, lengths = torch.randn(4, steps, 4).double(), 1 + Y[:, None] % 2, [steps] * 4, [1] * 4
    lossfunc = extend(nn.CTCLoss()) if extended else F.ctc_loss

    def log_probs(first: int = 0) -> Tensor:
        return model(x.transpose(0, first)).log_softmax(2).transpose(0, 1 - first)

    model = extend(mlp())
    with pytest.raises(CurvoptError, match=r"4 samples of .*batch-first"), backpack(BatchGrad()):
        lossfunc(log_probs(first=1), targets, steps_of, lengths).backward()
    with backpack(BatchGrad()):
        lossfunc(log_probs(), targets, steps_of, lengths).backward()
    parts = F.ctc_loss(log_probs(), targets, steps_of, lengths, reduction="none") / 4
    for p in model.parameters():
        assert_close(p.grad_batch, torch.stack([torch.autograd.grad(part, p, retain_graph=True)[0] for part in parts]))
    with pytest.raises(CurvoptError, match="second derivative|CtcLoss"), backpack(DiagGGNExact()):
        lossfunc(log_probs(), targets, steps_of, lengths).backward()
    if steps != 4:
        terms = F.ctc_loss(log_probs(), targets, steps_of, lengths, reduction="none")
        expected = [torch.autograd.grad(term / 4, model[0].weight, retain_graph=True)[0] for term in terms]
        assert_close(model[0].weight.grad_batch, torch.stack(expected))


def test_negative_factor_is_refused():
    model, weight = extend(mlp()), -torch.ones_like(REAL[0])
    ce, bce = (
        extend(nn.CrossEntropyLoss(weight, reduction="sum")),
        extend(nn.BCEWithLogitsLoss(weight, reduction="sum")),
    )
    for loss in [
        lambda z: -F.cross_entropy(z, Y),
        lambda z: F.cross_entropy(z, Y) - 2 * F.mse_loss(z, REAL),
        lambda z: F.binary_cross_entropy_with_logits(z, REAL.sigmoid(), weight),
        lambda z: ce(z, Y),
        lambda z: bce(z, REAL.sigmoid()),
    ]:
        with pytest.raises(CurvoptError, match="negative weight"), backpack(DiagGGNExact()):
            loss(model(X)).backward()


def test_parts_of_the_loss_without_the_network_are_no_matter():
    """A penalty on parameters that no extended module owns, and constants."""
    model, other = extend(mlp()), nn.Parameter(torch.ones(3, dtype=torch.float64))
    with backpack(DiagGGNExact()):
        (F.cross_entropy(model(X), Y) + F.mse_loss(other, REAL[0]) + other.exp().prod() + 3).backward()
    expected = fields(mlp, FUNCTIONAL["ce"][1], [DiagGGNExact])
    for name, p in model.named_parameters():
        assert_close(p.diag_ggn_exact, expected[f"{name} diag_ggn_exact 0"])


WEIGHINGS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "log variances": lambda w, losses: sum((-w[i]).exp() * loss + w[i] for i, loss in enumerate(losses)),  # type: ignore
    "deviations": lambda w, losses: losses[0] / (2 * w[0] ** 2) + losses[1] / w[1] ** 2 + w.square().log1p().sum(),
    "softmax": lambda w, losses: w.softmax(0) @ torch.stack(losses),
}


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.4, 1.3], dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.weights * 1.5


@pytest.mark.parametrize("kept", ["outside", "in an extended module", "by an extended module"])
@pytest.mark.parametrize("weigh", WEIGHINGS.values(), ids=WEIGHINGS)
def test_learned_weights_of_losses_are_constants_for_the_network(weigh: Callable, kept: str):
    owner = Weights()
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


#: What a model does with a parameter of its own before its loss.
HEADS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "scale": ((), lambda z, p: z * p.exp()),
    "matrix": ((3, 3), lambda z, p: z @ p),
    "known as nothing": ((3,), lambda z, p: torch.logaddexp(z, p.sort().values.cumsum(0))),
}


class WithHead(nn.Module):
    """Its loss may be computed in its forward, from what a parameter of its own makes of the output of others."""

    def __init__(self, head: str, loss: Callable[[nn.Module, Tensor], Tensor] | None, batch_norm: bool = False):
        super().__init__()
        shape, self.apply_head = HEADS[head]
        self.body, self.lossfunc, self.loss = mlp(), CE(), loss
        if batch_norm:
            self.body.insert(1, nn.BatchNorm1d(5).double())
        self.own = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        z = self.apply_head(self.body(x), self.own)
        return z if self.loss is None else self.loss(self, z)


INSIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "function": lambda model, z: F.cross_entropy(z, Y),
    "module": lambda model, z: model.lossfunc(z, Y),
    "with the output": lambda model, z: (z, F.cross_entropy(z, Y)),
}


@pytest.mark.filterwarnings("ignore::curvopt.CurvoptWarning")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_models_with_parameters_of_their_own_may_compute_their_loss(head: str, inside: Callable):
    first_order: list[type] = [BatchGrad, BatchL2Grad]
    for extensions in (None, first_order):
        expected = fields(lambda: WithHead(head, None), lambda z: F.cross_entropy(z, Y), extensions)
        found = fields(lambda: WithHead(head, inside), lambda out: out[1] if type(out) is tuple else out, extensions)
        assert_close(found, expected)


@pytest.mark.parametrize("head", ["scale", "matrix"])
def test_models_with_batch_norm_may_compute_their_loss(head: str):
    for extensions in ([DiagGGNMC], [KFACEmpirical]):
        torch.manual_seed(1)
        expected = fields(lambda: WithHead(head, None, True), lambda z: F.cross_entropy(z, Y), extensions)
        torch.manual_seed(1)
        found = fields(lambda: WithHead(head, INSIDE["function"], True), lambda out: out, extensions)
        assert_close(found, expected)


def test_models_may_learn_the_weights_of_their_losses():
    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.own = mlp(), nn.Parameter(torch.tensor(0.4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (-self.own).exp() * F.cross_entropy(self.body(x), Y) + self.own

    model = extend(Weighed())
    with pytest.warns(CurvoptWarning, match="own: .* weight of losses"), backpack(DiagGGNExact(), KFLR()):
        model(X).backward()
    expected = fields(mlp, lambda z: torch.tensor(-0.4).exp() * F.cross_entropy(z, Y), [DiagGGNExact, KFLR])
    for name, p in model.body.named_parameters():
        for field, factors in (("diag_ggn_exact", [p.diag_ggn_exact]), ("kflr", p.kflr)):
            for i, factor in enumerate(factors):
                assert_close(factor, expected[f"{name} {field} {i}"], atol=1e-7, rtol=1e-6)
    assert not hasattr(model.own, "kflr")


def test_losses_inside_of_a_loss_count_once():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.ce, self.mse = CE(), MSE()

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return self.ce(z, y) + self.mse(z, REAL)

    expected = fields(mlp, extended((1, CE(), Y), (1, MSE(), REAL)), [DiagGGNExact])
    for lossfunc in [extend(Both()), extend(Both(), loss=True), extend(extend(Both()), loss=True)]:
        found = fields(mlp, lambda z, lossfunc=lossfunc: lossfunc(z, Y), [DiagGGNExact])
        for key, value in expected.items():
            assert_close(found[key], value)


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("hook", [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook])
def test_backward_hooks_of_the_loss(hook: Callable, extended: bool):
    """They stand between the loss and what is differentiated, or between the network and its loss."""
    lossfunc = nn.CrossEntropyLoss()
    expected = fields(mlp, lambda z: F.cross_entropy(z, Y))
    hook(extend(lossfunc) if extended else lossfunc, lambda *_: None)
    found = fields(mlp, lambda z: lossfunc(z, Y))
    assert_close(found, expected)
