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
    DIAGONALS,
    FIRST_ORDER,
    backward,
    check,
    check_all,
    check_products,
    columns_per_sweep,
    compare,
    extend_problem,
    extended,
)
from reference import Reference, reference
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from curvopt import L2Regularizer, backpack, extend
from curvopt.core.layers import affine
from curvopt.core.record import ModuleCall
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    PCHMP,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    SqrtGGNExact,
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


# --------------------------------------------------------------------------------------------------------- regularizers


class Regularized(Reference):
    """The reference of a loss with ``weight / 2`` times the squared norm of some parameters, shared out evenly."""

    def __init__(self, problem: Problem, names: list[str], weight: float):
        super().__init__(copy.deepcopy(problem.model), problem.x, problem.loss_of_output)
        self.names, self.weight = names, weight

    def _of(self, name: str) -> float:
        return self.weight if name in self.names else 0.0

    def grad_batch(self, name: str) -> Tensor:
        return super().grad_batch(name) + self._of(name) * self.parameters[name].detach() / self.samples

    def ggn_batch(self, name: str) -> Tensor:
        ggn = super().ggn_batch(name)
        return ggn + self._of(name) / self.samples * torch.eye(ggn.shape[-1], dtype=ggn.dtype)

    def ggn(self, name: str) -> Tensor:
        return self.ggn_batch(name).sum(0)

    def diag_ggn_exact_batch(self, name: str) -> Tensor:
        return self.ggn_batch(name).diagonal(dim1=1, dim2=2).reshape(-1, *self.parameters[name].shape)

    def diag_ggn_exact(self, name: str) -> Tensor:
        return self.diag_ggn_exact_batch(name).sum(0)


SOME = ["trunk.0.weight", "trunk.2.bias", "head.weight"]


def regularized(case: Case = NET["siamese"], names: list[str] = SOME) -> tuple[Problem, L2Regularizer]:
    problem = extended(case)
    return problem, L2Regularizer([problem.model.get_parameter(name) for name in names], 0.3)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_regularizer_is_contained(factor: float):
    problem, regularizer = regularized()
    ref = Regularized(NET["siamese"].problem(), SOME, 0.3 * factor)
    for extension in [*FIRST_ORDER, *DIAGONALS]:
        backward(problem, extension, loss=lambda: problem.loss() + factor * regularizer())
        check(problem, ref, extension)
    backward(problem, HMP, GGNMP, loss=lambda: problem.loss() + factor * regularizer())
    check_products(problem, ref, HMP, GGNMP)
    for name in problem.trainable():
        assert (name in SOME) == (not torch.equal(ref.hessian(name), reference(NET["siamese"]).hessian(name)))


def test_regularizer_in_positive_curvature():
    case = Case("", lambda: mlp(3, 4, 2), normal(4, 3))
    problem, regularizer = regularized(case, ["0.weight", "0.bias", "2.weight", "2.bias"])
    plain = [p.pchmp for p in backward(problem, PCHMP).model.parameters()]
    backward(problem, PCHMP, loss=lambda: problem.loss() + regularizer())
    for p, product in zip(problem.model.parameters(), plain, strict=True):
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        compare(p.pchmp(v), product(v) + 0.3 * v, "pchmp")


def test_regularizer_where_it_is_not_defined():
    problem, regularizer = regularized()
    with pytest.raises(CurvoptError, match=r"sqrt_ggn_exact.*L2Regularizer"):
        backward(problem, SqrtGGNExact, loss=lambda: problem.loss() + regularizer())
    assert not any(hasattr(p, "sqrt_ggn_exact") for p in problem.model.parameters())


def test_kronecker_factors_leave_a_regularizer_out_and_say_so():
    problem, regularizer = regularized()
    with pytest.warns(CurvoptWarning, match=r"kflr.*damping"):
        backward(problem, KFLR, loss=lambda: problem.loss() + regularizer())
    ref = Regularized(NET["siamese"].problem(), SOME, 0.3)
    for name, p in problem.trainable().items():  # the block of a vector is dense, and has it
        compare(p.kflr, [ref.ggn(name)] if p.dim() == 1 else ref.kflr(name), name)


@pytest.mark.parametrize(
    "term",
    [
        lambda w: 0.1 * w.square().sum(),
        lambda w: 0.1 * w.abs().sum(),
        lambda w: 0.1 * w.norm(),
        lambda w: F.mse_loss(w, torch.zeros_like(w)),
    ],
    ids=["squares", "absolute", "norm", "mse"],
)
def test_handwritten_regularizer_is_left_out_and_said_so(term: Callable):
    for extension in [*FIRST_ORDER, *DIAGONALS, KFLR]:
        problem, ref = extended(NET["siamese"]), reference(NET["siamese"])
        w = problem.model.head.weight
        with pytest.warns(CurvoptWarning, match=r"head\.weight"):
            backward(problem, extension, loss=lambda problem=problem, w=w: problem.loss() + term(w))
        check(problem, ref, extension)
        assert not torch.allclose(w.grad, ref.grad("head.weight"))


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
