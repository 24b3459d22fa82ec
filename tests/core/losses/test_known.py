"""Losses that are read off the graph: fields equal the dense ones, whatever spells them; what has none is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Problem
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


def test_repeated_and_nested_contexts_count_once():
    model = extend(mlp())
    loss = F.cross_entropy(model(X), Y)
    expected = fields(mlp, lambda z: F.cross_entropy(z, Y), [DiagGGNExact])
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
    with pytest.raises(CurvoptError, match=f"diag_ggn_exact: .*{why}"), backpack(DiagGGNExact()):
        loss(model(X)).backward()
    assert not any(hasattr(p, "diag_ggn_exact") for p in model.parameters())


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
        self.body, self.loss = mlp(), loss
        if batch_norm:
            self.body.insert(1, nn.BatchNorm1d(5).double())
        self.own = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        z = self.apply_head(self.body(x), self.own)
        return z if self.loss is None else self.loss(self, z)


INSIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "function": lambda model, z: F.cross_entropy(z, Y),
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


@pytest.mark.parametrize("hook", [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook])
def test_backward_hooks_of_the_loss(hook: Callable):
    """They stand between the loss and what is differentiated, or between the network and its loss."""
    lossfunc = nn.CrossEntropyLoss()
    expected = fields(mlp, lambda z: F.cross_entropy(z, Y))
    hook(lossfunc, lambda *_: None)
    found = fields(mlp, lambda z: lossfunc(z, Y))
    assert_close(found, expected)
