"""Networks as people write them: every quantity is right on them, or refused with a reason.

Tests of `core/randomness.py`, too.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import (
    Case,
    Math,
    Net,
    OfPacked,
    Problem,
    Take,
    TimeFirst,
    attending,
    in_the_middle,
    mlp,
    normal,
    with_statistics,
)
from checks import (
    backward,
    check_all,
    columns_per_sweep,
    compare,
    extend_problem,
    extended,
    gradients_of_each,
)
from reference import Reference, reference
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.core.layers import affine
from curvopt.core.record import ModuleCall
from curvopt.extensions import (
    HMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    Extension,
    SumGradSquared,
)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------- resnet


# first and last layer, a strided convolution, a shortcut's, scales within and after a block
CHOSEN = (
    "conv1.weight bn1.weight layer1.0.bn2.bias layer2.0.conv1.weight layer2.0.downsample.0.weight layer4.1.bn2.weight "
    "fc.weight fc.bias"
).split()


def test_resnet18_in_eval_mode():
    """Torchvision's, with the statistics and scales of a trained one, against a backward for each sample."""
    models = pytest.importorskip("torchvision.models")
    model = with_statistics(models.resnet18(num_classes=2).double())
    problem = Problem(model, double(2, 3, 32, 32), torch.randint(2, (2,)))
    parameters, z = [model.get_parameter(name) for name in CHOSEN], model(problem.x)
    gradients = gradients_of_each(F.cross_entropy(z, problem.y, reduction="none") / 2, parameters)
    # the Hessian of cross-entropy with two classes is p_0 p_1 [[1, -1], [-1, 1]]
    slopes, curvature = gradients_of_each(z[:, 0] - z[:, 1], parameters), z.softmax(1).detach().prod(1) / 2
    backward(extend_problem(problem), BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian)
    for name, p, g, J in zip(CHOSEN, parameters, gradients, slopes, strict=True):
        assert g.any() and J.any()
        compare(p.grad_batch, g, f"{name}.grad_batch")
        compare(p.batch_l2, g.flatten(1).square().sum(1), f"{name}.batch_l2")
        compare(p.diag_ggn_exact, torch.einsum("n,n...->...", curvature, J.square()), f"{name}.diag_ggn_exact")
        # convolutions, eval-mode batch norm, ReLU, addition and max-pooling are piecewise linear
        compare(p.diag_h, p.diag_ggn_exact, f"{name}.diag_h")
    for p in model.parameters():
        assert_close(p.grad_batch.sum(0), p.grad)
        assert_close(p.diag_h, p.diag_ggn_exact)


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


def one_matrix() -> nn.Module:
    """A recurrent layer with one matrix for the input and the state."""
    net = Net(lambda m, x: m.head(m.steps(x)[0][:, -1]), steps=nn.RNN(4, 4, batch_first=True), head=nn.Linear(4, 3))
    net.steps.weight_hh_l0 = net.steps.weight_ih_l0
    return net


def mixed_and_tied() -> nn.Module:
    """Words in and out by one matrix, with a product in between and behind that mixes the samples."""
    mix = torch.randn(9, 9, dtype=torch.float64) / 3

    def forward(m: Net, tokens: Tensor) -> Tensor:
        z = m.head((mix @ m.words(tokens).flatten(0, 1)).tanh())
        return (mix @ z).unflatten(0, (3, 3)).sum(1)

    net = Net(forward, words=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False))
    net.head.weight = net.words.weight
    return net


# --------------------------------------------------------------------------------------------- other shapes of graphs


class Siamese(nn.Sequential):
    """One trunk on both halves of the input, and a head."""

    def forward(self, x: Tensor) -> Tensor:
        (left, right), (trunk, head) = x.chunk(2, dim=1), self
        return head((trunk(left) - trunk(right)).square())


def tokens(words: int = 5) -> Callable[[], Tensor]:
    return lambda: torch.randint(words, (3, 3))


NETS = [
    Case("siamese", lambda: Siamese(mlp(2, 4, 3), nn.Linear(3, 2)), normal(4, 4)),
    Case("a parameter of two names", one_matrix, normal(3, 2, 4)),
    Case("decoder, tied by a module", lambda: with_statistics(Decoder("module")), tokens(), scale=1.7),
    Case("decoder, tied by a function", lambda: with_statistics(Decoder("function")), tokens(), scale=1.7),
    Case("mixed and tied", mixed_and_tied, tokens()),
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
@pytest.mark.parametrize(
    "case",
    [
        NET["decoder, tied by a module"],
        NET["siamese"],
        Case(
            "encoder",
            lambda: Math(nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True), nn.Flatten(), nn.Linear(8, 2)),
            normal(3, 2, 4),
        ),
    ],
    ids=lambda case: case.name,
)
def test_copied_or_moved_after_extend(case: Case, move: Callable[[nn.Module], nn.Module]):
    problem = extended(case)
    used = problem.loss()  # what a forward leaves behind must not stand in the way
    backward(problem, BatchGrad, DiagGGNExact)
    moved = move(problem.model)
    if moved is not problem.model:
        with torch.no_grad():
            for p in problem.model.parameters():
                p.zero_()
    problem = Problem(moved, problem.x, problem.y)
    for p in moved.parameters():
        vars(p).clear()  # a pickle has the fields
    backward(problem, BatchGrad)  # before it is extended again
    assert all("grad_batch" in vars(p) for p in moved.parameters())
    check_all(problem)
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

    def adapted(*adapter: nn.Module) -> nn.Module:
        def forward(m: Net, x: Tensor) -> Tensor:
            h = torch.tanh(m.first(x))
            return m.last(h + m.adapter(h) if adapter else h)

        return Net(forward, first=first, last=last, adapter=nn.Sequential(*adapter)).double()

    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    fields = []
    for adapter in ((), (nn.Linear(4, 0), nn.Linear(0, 4, bias=False))):
        model = extend(adapted(*adapter))
        with backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFLR()):
            F.cross_entropy(model(x), y).backward()
        p = first.weight
        fields.append([p.grad_batch, p.diag_ggn_exact, p.diag_h, *p.kflr])
    torch.testing.assert_close(*fields)
    assert not any(hasattr(p, "kflr") for p in model.adapter.parameters())


DROPOUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    **{
        str(dropout): (lambda dropout=dropout: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), dropout), normal(3, 4))
        for dropout in (*map(nn.Dropout, (0.0, 0.3, 0.9, 1.0)), nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.4))
    },
    "attention": (lambda: attending(dropout=0.4, batch_first=True), normal(3, 4, 4)),
    "attention, no weights": (lambda: attending(dropout=0.4, need_weights=False), normal(3, 4, 4)),
    "recurrent": (lambda: Take(nn.RNN(2, 2, 2, dropout=0.5, batch_first=True), 1, -1), normal(3, 4, 2)),
    "two ways": (lambda: TimeFirst(nn.GRU(2, 2, 3, dropout=0.5, bidirectional=True)), normal(3, 4, 2)),
    "packed": (lambda: OfPacked(nn.LSTM(2, 2, 2, dropout=0.5), ordered=False), normal(3, 3, 2)),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_mask_of_dropout_is_not_told_from_zeros(name: str):
    """Zeros come from ReLU, too; the mask is that of the forward, whatever it left."""
    make, make_input = DROPOUTS[name]
    problem = Problem(in_the_middle(make, make_input)().double(), make_input(), torch.randint(2, (3,)))
    torch.manual_seed(3)
    ref = Reference(problem.model, problem.x, problem.loss_of_output)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return problem.loss()

    check_all(problem, loss, ref)
