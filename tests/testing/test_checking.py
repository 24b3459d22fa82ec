"""`curvopt.testing.check` agrees with a right engine, notices a wrong one, and says what it does not look at.

Tests of `testing/comparison.py` and `testing/report.py`, too.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import NO_PCHMP
from checks import by_varied_case
from torch import Tensor, nn

from curvopt import CurvoptError, backpack, extend
from curvopt.core.backward import residuals
from curvopt.core.backward.residuals import residual_columns
from curvopt.core.layers.affine import Linear
from curvopt.core.losses.known import KnownLoss
from curvopt.core.losses.roots import Empirical, Exact, MonteCarlo, Softmax
from curvopt.core.products.base import Chunk
from curvopt.core.products.outer import Outer
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    EigenDiagonal,
    Extension,
    KFACEmpirical,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from curvopt.kroneckers import eigenbases
from curvopt.testing import check
from curvopt.testing.comparison import EXPECTED

PLAIN: list[type[Extension]] = [BatchGrad, BatchL2Grad, SumGradSquared, Variance, DiagGGNExact, DiagGGNMC, SqrtGGNMC]
PLAIN += [BatchDiagGGNExact, KFRA, KFACEmpirical, GGNMP, DiagHessian, BatchDiagHessian, HMP]
WITH_OPTIONS = [BatchDiagGGNMC(mc_samples=3), SqrtGGNExact(subsampling=[2, 0]), PCHMP(modify="abs")]
ALL = [*(kind() for kind in PLAIN), *WITH_OPTIONS, KFAC(approx="reduce"), KFLR(approx="backpack")]
OF_LINEAR = [e for e in ALL if not isinstance(e, KFRA)]  # which unfolds the second time by itself


def cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.arange(shape[0]) % 3


def test_every_field_agrees_and_is_in_the_printed_table(capsys):
    result = check(cnn(), nn.CrossEntropyLoss(), *batch(3, 1, 6, 6), ALL, raises=True)
    assert result.ok and not result.unchecked
    assert len(result.rows) == 4 * (len(ALL) + 1) + 1  # bounds of pchmp, and the draws
    printed = capsys.readouterr().out
    assert str(result) in printed
    assert all(f" {field} " in printed for field in EXPECTED if field != "eigen_diagonal")  # has its own test


@by_varied_case
def test_networks_of_all_kinds(case):
    without = (KFRA, SqrtGGNExact, *([PCHMP] if case.name in NO_PCHMP else []))
    problem, fields = case.problem(), [e for e in ALL if not isinstance(e, without)]
    lossfunc = extend(problem.lossfunc)
    check(problem.model, lambda z, y: case.scale * lossfunc(z, y), problem.x, problem.y, fields, raises=True, entries=3)


@pytest.mark.parametrize("extension", OF_LINEAR, ids=lambda extension: extension.field)
def test_a_wrong_rule_is_noticed(extension, monkeypatch):
    fold = Linear.fold
    monkeypatch.setattr(Linear, "fold", lambda self, module, grad, x: 0.999 * fold(self, module, grad, x))
    result = check(mlp(), nn.CrossEntropyLoss(), *batch(3, 4), [extension])
    assert {row.parameter for row in result.wrong} >= {"0.weight", "2.weight"} and not result.ok


def test_a_rule_that_confuses_samples_is_noticed(monkeypatch):
    unfold = Linear.unfold
    monkeypatch.setattr(Linear, "unfold", lambda self, module, x: unfold(self, module, x).flip(0))
    with pytest.raises(CurvoptError, match=r"0.weight +grad_batch .* WRONG"):
        check(mlp(), nn.CrossEntropyLoss(), *batch(2, 4), [BatchGrad()], raises=True)


@pytest.mark.parametrize("extension", [KFAC(), DiagGGNMC(), BatchDiagGGNMC(), SqrtGGNMC()], ids=lambda e: e.field)
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_wrong_sampler_is_noticed(extension, factor, monkeypatch):
    sample = Softmax.sample
    monkeypatch.setattr(Softmax, "sample", lambda self, *args: factor * sample(self, *args))
    result = check(mlp(), nn.CrossEntropyLoss(), *batch(6, 4), [extension])
    assert [row.field for row in result.wrong] == ["draws"]


@pytest.mark.parametrize("columns", [Exact(), MonteCarlo(), Empirical()], ids=lambda columns: type(columns).__name__)
@pytest.mark.parametrize("limit", [None, 4])
def test_diagonals_in_bases(columns, limit, monkeypatch):
    net, lossfunc, (x, y) = extend(cnn()), extend(nn.CrossEntropyLoss()), batch(3, 1, 6, 6)
    with backpack(KFLR(max_factor_size=limit)):
        lossfunc(net(x), y).backward()
    extension = EigenDiagonal({p: eigenbases(p.kflr)[0] for p in [*net.parameters()][:3]}, columns)
    result = check(net, lossfunc, x, y, [extension], raises=True)
    assert [row.parameter for row in result.unchecked] == ["4.bias"]
    squares_in = Outer.squares_in
    monkeypatch.setattr(Outer, "squares_in", lambda self, bases: squares_in(self, [basis.mT for basis in bases]))
    wrong = check(net, lossfunc, x, y, [extension]).wrong
    assert {row.parameter for row in wrong} >= {"0.weight", "4.weight"}


def test_wrong_gradients_of_predictions_are_noticed(monkeypatch):
    slope = KnownLoss.slope
    monkeypatch.setattr(KnownLoss, "slope", lambda self: slope(self).abs())
    result = check(mlp(), nn.CrossEntropyLoss(), *batch(6, 4), [KFACEmpirical(), KFLR()])
    assert {row.field for row in result.wrong} == {"kfac_empirical"}


@pytest.mark.parametrize("modify", ["clip", "abs"])
def test_replaced_curvature_that_is_none_is_noticed(modify, monkeypatch):
    monkeypatch.setattr(residuals, "residual_columns", lambda *args: residual_columns(*args[:-1], None))
    result = check(mlp(), nn.CrossEntropyLoss(), *batch(3, 4), [PCHMP(modify=modify)])
    assert {row.note for row in result.wrong} == {"not below hmp and ggnmp"}


@pytest.mark.parametrize(
    "lossfunc, target",
    [
        (nn.MSELoss(), torch.randn(4, 3)),
        (nn.BCEWithLogitsLoss(reduction="sum"), torch.rand(4, 3)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1), torch.arange(4) % 3),
        (nn.functional.cross_entropy, torch.arange(4) % 3),
    ],
    ids=["mse", "bce", "weighted", "functional"],
)
def test_losses(lossfunc, target):
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].weight.data *= 30  # a confident network: the draws are scaled to where they vary
    check(net, lossfunc, torch.randn(4, 4), target, [DiagGGNMC(), KFAC(), DiagHessian(), BatchGrad()], raises=True)


def test_a_loss_of_ones_own():
    class Cubes(nn.Module):
        def forward(self, z: Tensor, target: Tensor) -> Tensor:
            return (z - target).abs().pow(3).sum()

    check(mlp(), extend(Cubes(), loss=True), torch.randn(3, 4), torch.zeros(3, 3), [KFLR(), DiagGGNMC()], raises=True)


def test_images_with_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Tanh(), nn.Conv2d(2, 3, 2), nn.AvgPool2d(3), nn.Flatten())
    model, (x, y) = model.to(memory_format=torch.channels_last), batch(3, 2, 6, 6)
    fields = [BatchGrad(), SumGradSquared(), KFLR(), DiagGGNExact(), HMP()]
    check(model, nn.CrossEntropyLoss(), x.to(memory_format=torch.channels_last), y, fields, raises=True)


def test_factors_without_a_definition_are_not_checked():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randint(5, (3, 2)), torch.arange(3)
    result = check(net, nn.CrossEntropyLoss(), x, y, [KFLR(), DiagGGNExact()])
    assert [row.parameter for row in result.unchecked] == ["0.weight"] and result.ok
    assert check(net[2], nn.CrossEntropyLoss(), torch.randn(3, 8), y, [KFLR(max_factor_size=4)]).unchecked
    only = check(nn.Sequential(net[0], nn.Flatten()), nn.CrossEntropyLoss(), x, y, [KFLR()])
    assert not only.ok  # nothing was compared


def test_a_weight_that_is_used_otherwise_has_no_checked_factors():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.tanh(self.inner(x)), self.inner.weight)

    result = check(Tied(), nn.CrossEntropyLoss(), *batch(3, 4), [KFLR(), DiagGGNExact()])
    assert [row.field for row in result.unchecked] == ["kflr"] and not result.wrong


def test_model_and_randomness_stay_as_they_were():
    net = extend(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8).eval(), nn.ReLU(), nn.Linear(8, 3)))
    x, y = batch(3, 4)
    state, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.random.get_rng_state()
    check(net, nn.CrossEntropyLoss(), x, y, [BatchGrad(), DiagGGNMC()], raises=True)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(net.state_dict()[k], v) and v.dtype == net.state_dict()[k].dtype for k, v in state.items())
    assert all(p.grad is None and not hasattr(p, "grad_batch") for p in net.parameters())


def test_single_precision():
    class Casts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    x, y = batch(3, 4)
    with pytest.raises(CurvoptError, match=r"does not run in torch.float64 .* pass dtype=torch.float32"):
        check(Casts(4, 3), nn.CrossEntropyLoss(), x, y, [BatchGrad()])
    asked = Casts(4, 3), nn.CrossEntropyLoss(), x, y, [BatchGrad(), DiagGGNExact()]
    result = check(*asked, dtype=torch.float32, raises=True)
    largest = max(row.relative for row in result.rows if row.relative is not None)
    assert 0 < largest < 1e-5
    assert [check(*asked, dtype=torch.float32, rtol=part * largest).ok for part in (0.9, 1.1)] == [False, True]


def test_what_cannot_be_checked_is_refused(monkeypatch):
    x, y = batch(3, 4)

    class Own(Extension):
        field = "own"
        columns = Exact()

        def update(self, total: None, chunk: Chunk) -> Tensor:
            return chunk.jacobian.norms2()

    ce, lstm, grad = nn.CrossEntropyLoss(), nn.LSTM(4, 3), [BatchGrad()]
    first_output = lambda z, y: F.mse_loss(z[0], y)  # noqa: E731
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for arguments, message in (
        ((mlp(), ce, x, y, [Own()]), "no definition of 'own' is known"),
        ((mlp(), ce, x, y, []), "got no extensions"),
        ((mlp(), ce, (x, x), y, [KFAC()]), "one tensor as the model's input, got tuple"),
        (
            (lstm, first_output, x[None], torch.zeros(1, 3, 3), grad),
            "one tensor as the model's output, got tuple; wrap",
        ),
        ((mlp().requires_grad_(False), ce, x, y, grad), "no parameter that requires a gradient"),
        ((mlp(), nn.CrossEntropyLoss(reduction="none"), x, y, grad), r"has shape \[3\].*reduction='mean' or 'sum'"),
        ((norm, ce, x, y, [KFAC()]), r"1 \(BatchNorm1d\) mixes the samples in train mode; call model.eval"),
    ):
        with pytest.raises(CurvoptError, match=message):
            check(*arguments)
    monkeypatch.setattr("curvopt.testing.checking.JACOBIAN_LIMIT", 100)
    with pytest.raises(CurvoptError, match=r"samples, a smaller network"):
        check(mlp(), ce, x, y, [DiagGGNExact()])


def test_a_model_that_changes_with_every_forward_is_refused():
    calls = []

    class Drifts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x) * len(calls)

    with pytest.raises(CurvoptError, match="two forward passes with equal random numbers differ"):
        check(Drifts(nn.Linear(4, 3)), nn.CrossEntropyLoss(), *batch(3, 4), [BatchGrad()])


@pytest.mark.parametrize("extended_before", [False, True])
def test_samples_along_another_axis(extended_before: bool):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x, y = torch.randn(5, 6, 4, dtype=torch.float64), torch.randint(3, (5, 6))  # 5 steps of 6 samples
    if extended_before:
        extend(model, batch_axis=1)
    lossfunc = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())  # noqa: E731
    extensions = [BatchGrad(), Variance(), DiagGGNExact(), KFLR(), BatchDiagGGNExact(), DiagHessian()]
    axis = 0 if extended_before else 1
    result = check(model, lossfunc, x, y, extensions, batch_axis=axis)
    assert result.ok and "6 samples with 15 outputs" in str(result)
    with pytest.raises(CurvoptError, match="approx='reduce'"):
        check(model, lossfunc, x, y, [KFLR(approx="reduce")], batch_axis=axis)
