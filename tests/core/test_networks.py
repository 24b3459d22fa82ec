"""Networks as people write them: every quantity is right on them, or refused with a reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Problem, mlp, normal, with_statistics
from checks import (
    backward,
    check_all,
    columns_per_sweep,
    compare,
    extend_problem,
    extended,
)
from reference import reference
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.core.layers import affine
from curvopt.core.record import ModuleCall
from curvopt.errors import CurvoptError
from curvopt.extensions import (
    HMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    SumGradSquared,
)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------- resnet


def resnet_problem() -> Problem:
    """Torchvision's, with the statistics and scales of a trained one rather than zeros and ones; in eval mode."""
    models = pytest.importorskip("torchvision.models")
    model = with_statistics(models.resnet18(num_classes=2).double())
    return Problem(model, double(2, 3, 32, 32), torch.randint(2, (2,)))


# first and last layer, a strided convolution, a shortcut's, scales within and after a block
CHOSEN = [
    "conv1.weight",
    "bn1.weight",
    "layer1.0.bn2.bias",
    "layer2.0.conv1.weight",
    "layer2.0.downsample.0.weight",
    "layer4.1.bn2.weight",
    "fc.weight",
    "fc.bias",
]


def test_resnet18_in_eval_mode():
    """Sample by sample, with a backward for each output."""
    problem = resnet_problem()
    parameters = [problem.model.get_parameter(name) for name in CHOSEN]
    expected: dict[str, list] = {"grad_batch": [], "batch_l2": [], "diag_ggn_exact": []}
    for x, y in zip(problem.x, problem.y, strict=True):
        z = problem.model(x[None])
        gradients = torch.autograd.grad(problem.lossfunc(z, y[None]) / 2, parameters, retain_graph=True)
        expected["grad_batch"].append(gradients)
        expected["batch_l2"].append([g.square().sum() for g in gradients])
        J = [torch.autograd.grad(z[0, c], parameters, retain_graph=True) for c in range(2)]
        p = torch.softmax(z[0], 0).detach()
        # the Hessian of cross-entropy with two classes is p_0 p_1 [[1, -1], [-1, 1]]
        expected["diag_ggn_exact"].append([p.prod() * (a - b).square() / 2 for a, b in zip(*J, strict=True)])
    backward(extend_problem(problem), BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian)
    for i, p in enumerate(parameters):
        for field, samples in expected.items():
            value = torch.stack([sample[i] for sample in samples])
            value = value.sum(0) if field == "diag_ggn_exact" else value
            compare(getattr(p, field), value, f"{CHOSEN[i]}.{field}")
            assert value.any()
        # convolutions, eval-mode batch norm, ReLU, addition and max-pooling are piecewise linear
        compare(p.diag_h, p.diag_ggn_exact, f"{CHOSEN[i]}.diag_h")
    for p in problem.model.parameters():
        assert_close(p.grad_batch.sum(0), p.grad)
        assert_close(p.diag_h, p.diag_ggn_exact)


def test_resnet18_in_train_mode():
    """Sampled quantities are there; those of single samples are not defined."""
    problem = extend_problem(resnet_problem())
    problem.model.train()
    backward(problem, KFAC, DiagGGNMC)
    for name, p in problem.model.named_parameters():
        assert p.diag_ggn_mc.shape == p.shape and p.diag_ggn_mc.isfinite().all(), name
        assert all(factor.isfinite().all() for factor in p.kfac), name
    with pytest.raises(CurvoptError, match=r"layer.* \(BatchNorm2d\).*grad_batch.*model\.eval"):
        backward(problem, BatchGrad)


# ---------------------------------------------------------------------------------------------------- transformers


class Block(nn.Module):
    """Pre-norm attention and perceptron, functional in between."""

    def __init__(self, features: int, causal: bool):
        super().__init__()
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.project = nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 5), nn.Linear(5, features)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        with sdpa_kernel(SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class VisionTransformer(nn.Module):
    """Patches by convolution, a class token, learned positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, stride=2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.block, self.norm, self.head = Block(4, causal=False), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.block(x))[:, 0])


class Decoder(nn.Module):
    """Tokens to logits of the next token, with one matrix for both, ``[N, T] -> [N T, words]``."""

    def __init__(self, tied: str, words: int = 5):
        super().__init__()
        self.words, self.places = nn.Embedding(words, 4), nn.Embedding(3, 4)
        self.block, self.norm = Block(4, causal=True), nn.LayerNorm(4)
        if tied == "module":
            self.head = nn.Linear(4, words, bias=False)
            self.head.weight = self.words.weight
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        h = self.norm(self.block(h))
        z = self.head(h) if self.tied == "module" else F.linear(h, self.words.weight)
        return z.flatten(0, 1)


class OneMatrix(nn.Module):
    """A recurrent layer with one matrix for the input and the state."""

    def __init__(self):
        super().__init__()
        self.steps, self.head = nn.RNN(4, 4, batch_first=True), nn.Linear(4, 3)
        self.steps.weight_hh_l0 = self.steps.weight_ih_l0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps(x)[0][:, -1])


class MixedTied(nn.Module):
    """Words in and out by one matrix, with a product in between and behind that mixes the samples."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mix", torch.randn(9, 9) / 3)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.head((self.mix @ self.words(tokens).flatten(0, 1)).tanh())
        return (self.mix @ z).unflatten(0, (3, 3)).sum(1)


# --------------------------------------------------------------------------------------------- other shapes of graphs


class Siamese(nn.Module):
    """One trunk on both halves of the input."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = mlp(2, 4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return self.head((self.trunk(left) - self.trunk(right)).square())


class Loop(nn.Module):
    """One recurrent cell, step by step."""

    def __init__(self, cell: type[nn.Module]):
        super().__init__()
        self.cell, self.out = cell(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return self.out(state[0] if isinstance(state, tuple) else state)


def tokens(words: int = 5) -> Callable[[], Tensor]:
    return lambda: torch.randint(words, (3, 3))


NETS = [
    Case("siamese", Siamese, normal(4, 4)),
    Case("rnn loop", lambda: Loop(nn.RNNCell), normal(3, 3, 2)),
    Case("gru loop", lambda: Loop(nn.GRUCell), normal(2, 2, 2)),
    Case("lstm loop", lambda: Loop(nn.LSTMCell), normal(2, 2, 2)),
    Case("a parameter of two names", OneMatrix, normal(3, 2, 4)),
    Case("vision transformer", lambda: with_statistics(VisionTransformer()), normal(3, 1, 4, 4)),
    Case("decoder, tied by a module", lambda: with_statistics(Decoder("module")), tokens(), scale=1.7),
    Case("decoder, tied by a function", lambda: with_statistics(Decoder("function")), tokens(), scale=1.7),
    Case("mixed and tied", MixedTied, tokens()),
]
NET = {case.name: case for case in NETS}
# positions of decoders are computed sample by sample
one_by_one = pytest.mark.filterwarnings("ignore::curvopt.errors.CurvoptWarning")


@one_by_one
@pytest.mark.parametrize("case", NETS, ids=lambda case: case.name)
def test_net(case: Case):
    problem = case.problem()
    check_all(problem)
    if problem.x.is_floating_point():
        problem = case.problem()
        problem.x.requires_grad_()
        check_all(problem)
        (expected,) = torch.autograd.grad(problem.loss(), problem.x)
        assert torch.equal(problem.x.grad, expected)


@one_by_one
@pytest.mark.parametrize("name", ["decoder, tied by a module", "decoder, tied by a function"])
def test_decoder_has_kronecker_factors(name: str):
    """All positions of a sample are shared positions; the tied matrix has words on its left in both of its uses."""
    for parameter, p in backward(extended(NET[name]), KFLR).trainable().items():
        if "words" not in parameter and "places" not in parameter:
            compare(p.kflr, reference(NET[name]).kflr(parameter), parameter)


@one_by_one
def test_two_kinds_of_calls_that_mix_samples_have_one_factor():
    problem = backward(extended(NET["mixed and tied"]), KFLR, DiagGGNExact)
    (factor,) = problem.model.head.weight.kflr
    assert_close(factor.diagonal(), problem.model.head.weight.diag_ggn_exact.flatten())


# ------------------------------------------------------------------------------------------------------- around a net


@one_by_one
@pytest.mark.parametrize(
    "move",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: model.float().double()],
    ids=["deepcopy", "pickle", "dtype"],
)
@pytest.mark.parametrize("name", ["decoder, tied by a module", "vision transformer", "siamese"])
def test_copied_or_moved_after_extend(name: str, move: Callable[[nn.Module], nn.Module]):
    problem = extended(NET[name])
    used = problem.loss()  # what a forward leaves behind must not stand in the way
    backward(problem, BatchGrad, DiagGGNExact)
    moved = move(problem.model)
    if moved is not problem.model:
        with torch.no_grad():
            for p in problem.model.parameters():
                p.zero_()
    check_all(Problem(moved, problem.x, problem.y))
    del used


@pytest.mark.parametrize(
    "case",
    [
        NET["siamese"],
        Case(
            "convolution",
            lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)),
            normal(4, 1, 4),
        ),
    ],
    ids=lambda case: case.name,
)
def test_autocast_to_half_precision(case: Case):
    """As close to double precision as eight bits of mantissa let it be."""
    problem, ref = extended(case), reference(case)
    problem.model.float()
    fields = [BatchGrad, BatchL2Grad, SumGradSquared, DiagGGNExact, BatchDiagGGNExact, DiagHessian, KFLR]
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.lossfunc(problem.model(problem.x.float()), problem.y)
    backward(problem, *fields, KFAC, HMP, loss=lambda: loss)
    for name, p in problem.trainable().items():
        for field in [extension.field for extension in fields]:
            value, expected = getattr(p, field), getattr(ref, field)(name)
            value, expected = (value[0], expected[0]) if isinstance(value, list) else (value, expected)
            assert (value - expected).norm() <= 0.2 * expected.norm() + 0.01, f"{name}.{field}"
        assert all(factor.isfinite().all() for factor in p.kfac)
        assert p.hmp(torch.randn(1, *p.shape)).isfinite().all()


@pytest.mark.parametrize(("extension", "columns"), [(KFAC, 1), (KFLR, 3), (DiagGGNExact, 3)])
def test_vectors_of_one_layer_at_a_time(extension: type[Extension], columns: int, monkeypatch: pytest.MonkeyPatch):
    """Where columns are pulled back one by one, a layer uses what arrives there before autograd goes on."""
    model = extend(nn.Sequential(*(nn.Conv2d(1, 1, 3) for _ in range(3)), nn.Flatten()))
    events, product = [], affine.Conv.jac_t

    def jac_t(self: affine.Conv, use: ModuleCall, *args):
        events.append(f"used {use.path}")
        return product(self, use, *args)

    monkeypatch.setattr(affine.Conv, "jac_t", jac_t)
    h = torch.randn(2, 1, 8, 8)
    for i, layer in enumerate(model):
        h = layer(h)
        h.register_hook(lambda grad, i=i: events.append(f"arrived {i}"))
    loss = F.cross_entropy(h, torch.tensor([0, 3]))
    with columns_per_sweep(1), backpack(extension()):
        loss.backward()
    column = ["arrived 2", "used 2", "arrived 1", "used 1", "arrived 0", "used 0"]
    events = [event for event in events if event != "arrived 3"]
    assert events[-6 * columns - 3 :] == columns * column + column[::2]  # the last is the gradient


def test_parameters_without_entries_get_no_fields():
    """An adapter of rank zero, as where its rank is an option."""

    class Adapted(nn.Module):
        def __init__(self, rank: int | None):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            layers = [] if rank is None else [nn.Linear(4, rank), nn.Linear(rank, 4, bias=False)]
            self.adapter = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.last(h + self.adapter(h) if len(self.adapter) else h)

    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    fields = []
    for rank in (None, 0):
        model = extend(Adapted(rank).double())
        with backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFLR()):
            F.cross_entropy(model(x), y).backward()
        p = model.first.weight
        fields.append([p.grad_batch, p.diag_ggn_exact, p.diag_h, *p.kflr])
    torch.testing.assert_close(*fields)
    assert not any(hasattr(p, "kflr") for p in model.adapter.parameters())
