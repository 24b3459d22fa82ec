"""Parameters of modules without a rule in operations that are known: read off the graph, right.

Tests of `core/graph.py`, `core/layers/computed.py` and `core/layers/operations.py`, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from cases import Case, Net, cross_entropy, labels, normal
from checks import check_all, columns_per_sweep, extended, gradients_of_each
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt import CurvoptError, L2Regularizer, backpack, extend
from curvopt.core.backward.backward_pass import read_and_locate
from curvopt.core.layers import computed
from curvopt.core.products import base as jacobians
from curvopt.core.products import costs
from curvopt.extensions import KFAC, KFLR, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, KFACEmpirical
from curvopt.kroneckers import kfac_mat_prod, kfacs_to_mat, sizes_of
from curvopt.optim import EKFACSGD, KFACSGD, KFACAdamW

N = 3
TOKENS = 4


class Own(nn.Module):
    """A layer perhaps, something done to its output with two parameters of one's own, and a head."""

    def __init__(
        self,
        use: Callable[[Own, Tensor], Tensor],
        shape: tuple[int, ...],
        other: tuple[int, ...] = (),
        on_data: bool = False,
    ):
        super().__init__()
        self.first, self.head = nn.Identity() if on_data else nn.Linear(4, 4), nn.Linear(4, 2)
        self.p, self.q = nn.Parameter(torch.randn(shape) / 2), nn.Parameter(torch.randn(other) / 2)
        self.register_buffer("constant", torch.randn(TOKENS, 4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, self.first(x)))).flatten(1)


def class_token(m: Own, h: Tensor) -> Tensor:
    return torch.cat([m.p.expand(len(h), -1, -1), h], 1) + m.q


def windows(m: Own, h: Tensor) -> Tensor:
    """Attention with a learned bias for every distance."""
    distances = torch.arange(TOKENS).unsqueeze(1) - torch.arange(TOKENS) + TOKENS - 1
    scores = h @ h.mT + m.p[distances.flatten().to(h.device)].view(TOKENS, TOKENS, 1).permute(2, 0, 1).contiguous()
    return scores.softmax(-1) @ h + m.q


def in_place(m: Own, h: Tensor) -> Tensor:
    h = h * 1
    h.mul_(m.p)
    h += m.q
    return h


def recurrence(m: Own, h: Tensor) -> Tensor:
    states = [torch.zeros_like(h[:, 0])]
    for x in h.unbind(1):
        states.append(torch.tanh(x @ m.p + F.linear(states[-1], m.q)))
    return torch.stack(states[1:], 1)


def low_rank(m: Own, h: Tensor) -> Tensor:
    return F.linear(h, torch.eye(4).to(h) + m.p @ m.q)


def merged(m: Own, h: Tensor) -> Tensor:
    weight = m.constant + 0.5 * (m.p @ m.q)
    return F.linear(h, m.constant[:, :1] * weight / weight.detach().norm(dim=1, keepdim=True))


def standardised(m: Own, h: Tensor) -> Tensor:
    weight = (m.p - m.p.mean((1, 2), keepdim=True)) / (m.p.std((1, 2), keepdim=True) + 0.1)
    return F.conv1d(h.mT, weight, m.q, padding=1).mT


def spectral(m: Own, h: Tensor) -> Tensor:
    return h @ (m.p / (m.constant[0] @ m.p @ m.constant[1])) * m.q


def attention(m: Own, h: Tensor) -> Tensor:
    q, k = h @ m.p, torch.einsum("ntf,hfd->nthd", h, m.q).flatten(2)
    return (q @ k.mT).softmax(-1) @ h


def joined(m: Own, h: Tensor) -> Tensor:
    """What is repeated meets the samples in two places, and one of them by another way, too."""
    repeated = m.p.expand(len(h), 1, 4)
    longer = torch.cat([h, h[:, : 2 * N - TOKENS]], 1)
    return (longer * (repeated.exp() + m.p))[:, :TOKENS] + repeated.tanh() * h * m.q


#: what is done with p and q, and their shapes
PRODUCTS: dict[str, tuple[Callable[[Own, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda m, h: F.linear(h, m.p, m.q), (4, 4), (4,)),
    "matmul": (lambda m, h: h @ m.p + m.q, (4, 4), (4,)),
    "addmm": (lambda m, h: torch.addmm(m.q, h.flatten(0, 1), m.p, beta=0.5).view_as(h), (4, 4), (4,)),
    "baddbmm": (lambda m, h: torch.baddbmm(m.q, h, m.p.expand(len(h), 4, 4), beta=2), (4, 4), (1, 1, 4)),
    "from the left": (lambda m, h: (m.p @ h.mT).mT * m.q, (4, 4), ()),
    "mixes tokens": (lambda m, h: m.p @ h + m.q, (TOKENS, TOKENS), (TOKENS, 1)),
    "einsum": (lambda m, h: torch.einsum("ntf,of->nto", h, m.p) + m.q, (4, 4), ()),
    "einsum from the left": (lambda m, h: torch.einsum("of,ntf->nto", m.p, h) + m.q, (4, 4), ()),
    "heads": (lambda m, h: torch.einsum("ntf,fhd->nthd", h, m.p).flatten(2) + m.q, (4, 2, 2), ()),
    "heads first": (lambda m, h: torch.einsum("ntf,hfd->nthd", h, m.p).flatten(2) + m.q, (2, 4, 2), ()),
    "matrix of each head": (
        lambda m, h: torch.einsum("nthd,hde->nthe", h.unflatten(2, (2, 2)), m.p).flatten(2) + m.q,
        (2, 2, 2),
        (),
    ),
    "vector": (lambda m, h: h + (h @ m.p).unsqueeze(2) * m.q, (4,), ()),
    "convolution": (lambda m, h: F.conv1d(h.mT, m.p, m.q, padding=1, groups=2).mT, (4, 2, 3), (4,)),
    "strided convolution": (lambda m, h: F.conv1d(h, m.p, m.q, stride=2, padding=3), (4, TOKENS, 3), (4,)),
    "transposed convolution": (lambda m, h: F.conv_transpose1d(h.mT, m.p, m.q, padding=1).mT, (4, 4, 3), (4,)),
    "bias that is a column": (lambda m, h: F.conv1d(h.mT, m.p, m.q[:, 0], padding=1).mT, (4, 4, 3), (4, 2)),
    "computed scale and bias": (lambda m, h: F.group_norm(h.mT, 2, m.p.exp(), m.q.tanh()).mT, (4,), (4,)),
    "masked": (lambda m, h: F.linear(h, m.p * (m.constant > 0), m.q), (4, 4), (4,)),
    "normalised": (lambda m, h: F.linear(h, F.normalize(m.p, dim=1)) * m.q, (4, 4), ()),
    "standardised": (standardised, (4, 4, 3), (4,)),
    "low rank": (low_rank, (4, 2), (2, 4)),
    "merged adapter": (merged, (4, 2), (2, 4)),
    "merged adapter of columns": (lambda m, h: h @ (m.constant + m.p @ m.q / 2), (4, 2), (2, 4)),
    "merged adapter of a convolution": (
        lambda m, h: F.conv1d(h.mT, 2 * (m.p @ m.q).view(4, 2, 3) - 1, padding=1, groups=2).mT,
        (4, 2),
        (2, 6),
    ),
    "adapter of kernels": (
        lambda m, h: F.conv1d(h.mT, (m.q.T @ m.p.T).T.reshape(4, 4, 3), padding=1).mT,
        (4, 2),
        (2, 12),
    ),
    "scaled rows and columns": (
        lambda m, h: F.linear(h, m.constant[:, :1] * m.p / m.constant[0].exp()) @ (m.q * 0.5).T,
        (4, 4),
        (4, 4),
    ),
    "scaled row and column": (lambda m, h: h * F.linear(h, m.p * 2) + h @ (m.q / 2), (1, 4), (4, 1)),
    "scaled rows and columns of the transpose": (
        lambda m, h: F.linear(h, (m.constant[:, :1] * m.p / m.constant[0].exp()).T) @ (m.q.T / m.constant[1, 1]),
        (4, 4),
        (4, 4),
    ),
    "scaled kernels": (
        lambda m, h: F.conv1d(F.conv1d(h.mT, m.p * m.constant[:, :2, None], groups=2).tanh(), m.q / m.constant[0]).mT,
        (4, 2, 1),
        (4, 4, 4),
    ),
    "entry by entry": (
        lambda m, h: F.conv1d(F.linear(h, m.p.tanh() * m.p).mT, m.q.exp().clamp(max=1) - 1, padding=1).mT,
        (4, 4),
        (4, 4, 3),
    ),
    "straight through": (
        lambda m, h: F.linear(h, m.p + (m.p.round() - m.p).detach()) * m.q,
        (4, 4),
        (),
    ),
    "magnitudes": (lambda m, h: F.linear(h, m.p * m.q / m.p.norm(dim=1, keepdim=True)), (4, 4), (4, 1)),
    "adapter": (lambda m, h: h + h @ m.p @ m.q, (4, 2), (2, 4)),
    "tied": (lambda m, h: torch.tanh(h @ m.p) @ m.p.T * m.q, (4, 2), ()),
    "of two shapes": (lambda m, h: torch.tanh(h @ m.p.flatten(1)) @ m.p.flatten(0, 1) * m.q, (4, 4, 4), ()),
    "square": (lambda m, h: h @ (m.p @ m.p) + m.q, (4, 4), ()),
    "spectral norm": (spectral, (4, 4), ()),
    "part": (lambda m, h: torch.cat([h @ m.p[:, :2], F.linear(h, m.p[:2])], 2) * m.q, (4, 4), ()),
    "packed": (lambda m, h: sum((h @ p for p in m.p.chunk(2, 1)), m.q), (4, 8), ()),
    "rows": (
        lambda m, h: F.linear(h, m.p[1:5]) * (h.tanh() @ m.p[-4:].T) + F.linear(h.sin(), m.p, m.q)[..., 2:],
        (6, 4),
        (6,),
    ),
    "rows of some": (lambda m, h: h @ m.p[2:].view(2, 4, 4)[1].T + F.linear(h, m.p[:8:2], m.q), (10, 4), (4,)),
    "recurrence": (recurrence, (4, 4), (4, 4)),
    "attention": (attention, (4, 4), (2, 4, 2)),
    "layer norm": (lambda m, h: F.layer_norm(h, (4,), m.p, m.q), (4,), (4,)),
    "layer norm of all": (lambda m, h: F.layer_norm(h, (TOKENS, 4), m.p, m.q), (TOKENS, 4), (TOKENS, 4)),
    "group norm": (lambda m, h: F.group_norm(h.mT, 2, m.p, m.q).mT, (4,), (4,)),
    "batch norm": (lambda m, h: F.batch_norm(h, m.constant[0], m.constant[1] ** 2, m.p, m.q), (4,), (TOKENS,)),
    "scale and shift by channels": (
        lambda m, h: F.batch_norm(h, m.constant[0], m.constant[1] ** 2, m.p.exp(), m.q[:TOKENS]),
        (4,),
        (TOKENS + 1,),
    ),
    "rms norm": (lambda m, h: F.rms_norm(h, (4,), m.p) * m.q, (4,), ()),
    "prelu": (lambda m, h: F.prelu(h, m.p) * F.prelu(h, m.q), (TOKENS,), (1,)),
    "lookup": (lambda m, h: h + F.embedding(h.argmax(2), m.p) + m.q, (4, 4), ()),
    "lookup of columns": (lambda m, h: h + F.embedding(h.argmax(2), m.p.T) + m.q, (4, 4), ()),
    "indexed": (
        lambda m, h: h + m.p[h.detach().argmax(2)] + m.q[h.detach()[..., 0].argmax(1) - TOKENS + 1][:, None, None],
        (4, 4),
        (TOKENS,),
    ),
    "rows selected": (
        lambda m, h: h + m.p.index_select(0, h.detach().argmax(2).flatten()).view_as(h) * m.q.exp()[[2]],
        (4, 4),
        (4, 4),
    ),
    "positions": (lambda m, h: h + F.embedding(torch.arange(TOKENS, device=h.device), m.p) * m.q, (6, 4), (4,)),
    "joined": (joined, (4,), ()),
    "features first": (lambda m, h: (m.p @ h.flatten(0, 1).T).T.view_as(h) + m.q, (4, 4), ()),
    "sequence first": (lambda m, h: (h.transpose(0, 1) @ m.p + m.q).transpose(0, 1), (4, 4), (4,)),
    "two layers": (lambda m, h: torch.tanh(h @ m.p) @ m.q, (4, 12), (12, 4)),
    "one repeated entry": (lambda m, h: h @ (2 * m.p).expand(16).view(4, 4) + m.q, (1,), ()),
}
USES: dict[str, tuple[Callable[[Own, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "scale and shift": (lambda m, h: h * m.p + m.q, (4,), (4,)),
    "subtracted": (lambda m, h: m.q - m.p * h, (4,), (1, TOKENS, 1)),
    "multiples": (lambda m, h: torch.sub(torch.add(h, m.p, alpha=2), m.q, alpha=0.5), (4,), ()),
    "in place": (in_place, (4,), (TOKENS, 4)),
    "class token and positions": (class_token, (1, 1, 4), (1, TOKENS + 1, 4)),
    "repeat": (lambda m, h: h + m.p.repeat(len(h), TOKENS, 1) + m.q.repeat(len(h), 1, 1), (1, 4), (1, TOKENS, 4)),
    "temperature": (lambda m, h: h * m.p.exp() + F.softplus(m.q), (), (4,)),
    "norm of a parameter": (lambda m, h: h * (m.p / 2).tanh().square() + m.q, (TOKENS, 1), (4,)),
    "residual": (lambda m, h: h + m.p * torch.tanh(h) + m.q * h, (4,), ()),
    "used twice": (lambda m, h: (h * m.p + m.p.sin()) * m.q, (4,), (4,)),
    "a part": (lambda m, h: h + m.p[:TOKENS] + m.q[None, :, None, None][:, :TOKENS, 0], (TOKENS + 2, 4), (9,)),
    "a constant": (lambda m, h: h + m.constant * m.p + (m.q + 1), (4,), (4,)),
    "as long as the batch": (lambda m, h: h + (m.constant[:N] * m.p).sum(0) + m.q, (4,), ()),
    "of its own for each sample": (lambda m, h: h * m.p + m.q, (N, 1, 4), (N, TOKENS, 4)),
    "mask": (lambda m, h: torch.where(h.detach() > 0, m.p, h) + torch.where(h.detach() < 0, h, m.q), (4,), ()),
    "bias of distances": (windows, (2 * TOKENS - 1, 1), ()),
    "samples trade places": (lambda m, h: (h.flip(0) * m.p).roll(1, 0) + m.q, (4,), (4,)),
    "samples mix": (lambda m, h: (h - h.mean(0)) * m.p + m.q, (4,), (4,)),
    "scaled, sequence first": (lambda m, h: (h.transpose(0, 1) * m.p + m.q).transpose(0, 1), (4,), (TOKENS, 1, 4)),
    "statistics of the batch": (lambda m, h: (h - (h.detach() * m.p).mean(0)) * m.q, (4,), (4,)),
    "power": (lambda m, h: (h * m.p).abs().add(1) ** m.q, (4,), (4,)),
    "base": (lambda m, h: h + m.p.exp() ** h.tanh() * m.q.abs() ** h.abs(), (4,), (TOKENS, 1)),
    "quotient": (lambda m, h: h / (m.p.exp() + 0.1) + m.q / h.exp(), (4,), ()),
    "pooling": (lambda m, h: (h.square() ** m.p.exp() + 0.1).sum(1, True) ** (1 / m.p.exp()) * m.q + h, (), ()),
    "sum with a product": (lambda m, h: torch.addcmul(m.q, h, m.p, value=2), (4,), (4,)),
    "product in a sum": (lambda m, h: torch.addcmul(h, m.p, h.tanh(), value=-0.5) * m.q, (4,), ()),
    "interpolation": (lambda m, h: torch.lerp(h, h.roll(1, 1), m.p) + torch.lerp(m.q, h, h.sigmoid()), (4,), (4,)),
    "interpolated": (lambda m, h: torch.lerp(h, m.p, h.sigmoid()) * torch.lerp(h, m.q, 0.5), (4,), (TOKENS, 1)),
    "in a logarithm": (lambda m, h: torch.logaddexp(h, m.p) * m.q, (4,), ()),
}


def recurrent(m: Own, h: Tensor) -> Tensor:
    """From a state that is learned."""
    states = [m.q[0].expand(len(h), 4)]
    for x in h.unbind(1):
        states.append(torch.tanh(x + states[-1] @ m.p))
    return torch.stack(states[1:], 1)


#: what is done with p, which gets two factors, and q, and their shapes
OF_ANY_SIZE: dict[str, tuple[Callable[[Own, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "learned state": (recurrent, (4, 4), (1, 4)),
    "learned queries": (
        lambda m, h: (F.linear(m.q.expand(len(h), -1, -1), m.p) @ h.mT).softmax(-1) @ h,
        (4, 4),
        (1, TOKENS, 4),
    ),
    "experts": (
        lambda m, h: torch.bmm(torch.tanh(torch.bmm(h.flatten(0, 1).expand(2, -1, -1), m.q)), m.p).sum(0).view_as(h),
        (2, 3, 4),
        (2, 4, 3),
    ),
    "heads of inputs and outputs": (
        lambda m, h: torch.einsum("nthd,hdo->nto", torch.tanh(torch.einsum("ntf,fhd->nthd", h, m.p)), m.q),
        (4, 2, 3),
        (2, 3, 4),
    ),
    "positions and a scale": (
        lambda m, h: h * m.q + F.embedding(torch.arange(TOKENS, device=h.device), m.p),
        (TOKENS, 4),
        (4,),
    ),
    "centres": (
        lambda m, h: (-(h.unsqueeze(2) - m.q).square().sum(3)).exp() @ m.p,
        (3, 4),
        (3, 4),
    ),
    "looked up by the data": (
        lambda m, h: torch.tanh(F.embedding(h.detach().argmax(2), m.q) @ m.p) + h,
        (4, 4),
        (4, 4),
    ),
}
TABLE = USES | PRODUCTS | OF_ANY_SIZE
assert len(TABLE) == len(USES) + len(PRODUCTS) + len(OF_ANY_SIZE), "names must differ"


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize(("name", "on_data"), [(name, i % 2 == 1) for i, name in enumerate(TABLE)])
def test_quantities_equal_the_dense_reference(name: str, on_data: bool):
    use, shape, other = TABLE[name]
    model = partial(Own, use, shape, other, on_data)
    check_all(extended(Case("", model, normal(N, TOKENS, 4), cross_entropy(), labels)))
    problem = extended(Case("", model, normal(N, TOKENS, 4), cross_entropy(), labels))
    with backpack(KFLR()):
        problem.loss().backward()
    for p in problem.model.parameters():  # a vector has one factor, whatever it was multiplied with
        assert len(p.kflr) <= (2 if p.dim() > 1 else 1)


def test_uses_of_a_parameter_are_summed_in_the_same_order_every_time():
    torch.manual_seed(0)
    steps = lambda m, h: sum((torch.tanh(h * i * m.p.exp() + m.q) for i in range(20)), h)  # noqa: E731
    model, x, y = extend(Own(steps, (4,), (4,))), torch.randn(N, TOKENS, 4), torch.randint(2 * TOKENS, (N,))
    found = []
    for _ in range(5):
        with backpack(BatchGrad(), KFLR()):
            F.cross_entropy(model(x), y).backward()
        found.append(torch.cat([x.flatten() for p in (model.p, model.q) for x in (p.grad_batch, *p.kflr)]))
    assert all(torch.equal(other, found[0]) for other in found)


def by_functions(layer: nn.Module, call: Callable[[Tensor, Tensor, Tensor], Tensor], transposed: bool = False) -> Net:
    """What a layer of PyTorch does."""
    weight = layer.weight.detach().mT if transposed else layer.weight.detach()
    return Net(lambda m, x: call(x, m.W, m.b), W=weight.clone(), b=layer.bias.detach().clone())


def of_two_axes(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("nthd,ohd->nto", x.unflatten(2, (2, 3)), W.unflatten(1, (2, 3))) + b


def moves_axes(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("nthd,ophd->ntpo", x.unflatten(2, (2, 3)), W.view(2, 3, 2, 3)).mT.flatten(2) + b


#: a layer, the function that does the same, and the shape of an input
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 5), F.linear, (4,)),
    "linear on tokens": (lambda: nn.Linear(4, 5), F.linear, (TOKENS, 4)),
    "matmul": (lambda: nn.Linear(4, 5), lambda x, W, b: x @ W + b, (TOKENS, 4)),
    "einsum": (lambda: nn.Linear(4, 5), lambda x, W, b: torch.einsum("nti,oi->nto", x, W) + b, (TOKENS, 4)),
    "einsum over two axes": (lambda: nn.Linear(6, 5), of_two_axes, (TOKENS, 6)),
    "einsum that moves axes": (lambda: nn.Linear(6, 6), moves_axes, (TOKENS, 6)),
    "convolution": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        partial(F.conv2d, stride=2, padding=1, groups=2),
        (4, 5, 6),
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
        partial(F.conv_transpose2d, stride=2, padding=1, groups=2),
        (4, 3, 2),
    ),
    "convolution of lists of one number": (
        lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2),
        partial(F.conv2d, stride=[2], padding=(1,), dilation=[2]),
        (2, 5, 6),
    ),
    "transposed convolution of lists of one number": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dilation=2),
        partial(F.conv_transpose2d, stride=[2], padding=(1,), dilation=[2]),
        (2, 3, 2),
    ),
}


@pytest.mark.parametrize("name", ["linear", "linear on tokens", "convolution", "transposed convolution"])
def test_biases_go_with_their_weights(name: str):
    make, call, shape = LAYERS[name]
    model = extend(by_functions(make(), call))
    located = read_and_locate([model(torch.randn(2, *shape)).square().sum().grad_fn])
    assert [list(found.parameters.values()) for found in located.calls] == [[model.W, model.b]]


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", LAYERS)
def test_factors_are_those_of_the_layer(name: str, approx: Literal["expand", "reduce"]):
    make, call, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, rest = make().double(), nn.Sequential(nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(6, *shape).double(), torch.randint(2, (6,))
    own = by_functions(layer, call, transposed=name == "matmul")
    for first in (layer, own):
        model = extend(nn.Sequential(first, *rest))
        model(x)  # makes the lazy layer
        torch.manual_seed(1)
        with backpack(KFLR(approx=approx), KFAC(approx=approx), KFACEmpirical(approx=approx)):
            F.cross_entropy(model(x), y).backward()
    for mine, its in ((own.W, layer.weight), (own.b, layer.bias)):
        for field in ("kflr", "kfac", "kfac_empirical"):
            factors = getattr(mine, field)
            expected = getattr(its, field)[::-1] if name == "matmul" else getattr(its, field)
            torch.testing.assert_close(factors, expected)


def test_rows_of_a_packed_weight_have_its_two_factors():
    """Those of a product with all rows, without what they have in common with each other."""
    uses = [
        lambda m, h: F.linear(h, m.p),
        lambda m, h: torch.cat([F.linear(h, rows) for rows in m.p.split([3, 1, 4])], -1),
        lambda m, h: torch.cat([h @ rows.T for rows in (m.p[:3], m.p[3:-4], m.p[-4:])], -1),
    ]
    models = [Own(use, (8, 4)).double() for use in uses]
    x, y = torch.randn(N, TOKENS, 4).double(), torch.randint(2 * TOKENS, (N,))
    for model in models:
        model.head = nn.Linear(8, 2).double()
        model.load_state_dict(models[0].state_dict())
        with backpack(KFLR(), BatchGrad()):
            F.cross_entropy(extend(model)(x), y).backward()
    B, A = models[0].p.kflr
    for model in models[1:]:
        torch.testing.assert_close(model.p.grad_batch, models[0].p.grad_batch)
        parts = torch.block_diag(B[:3, :3], B[3:4, 3:4], B[4:, 4:])
        torch.testing.assert_close(model.p.kflr, [parts, A])


#: In which what was computed is pulled back to a parameter, or is multiplied entry by entry.
COMPUTED = ["normalised", "standardised", "magnitudes", "spectral norm", "masked", "entry by entry"]


@pytest.mark.filterwarnings("ignore:kflr of a matrix leaves the L2Regularizer out")
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_a_few_samples_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch):
    use, shape, other = PRODUCTS[name]
    model = partial(Own, use, shape, other)
    entries = 40  # of the products of a few samples that are pulled back together
    monkeypatch.setattr(costs, "CHUNK_ENTRIES", {"cpu": entries, "accelerator": entries})
    check_all(extended(Case("", model, normal(5, TOKENS, 4), cross_entropy(), labels)))
    problem = extended(Case("", model, normal(5, TOKENS, 4), cross_entropy(), labels))
    monkeypatch.setattr(jacobians, "DENSE_BLOCK_LIMIT", 4)
    with backpack(KFLR(), DiagGGNExact(), BatchGrad(), BatchL2Grad()):
        (problem.loss() + L2Regularizer(problem.model.parameters(), 0.1)()).backward()
    for p in problem.trainable().values():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        torch.testing.assert_close(p.grad_batch.reshape(5, -1).square().sum(1), p.batch_l2)
    for p in (problem.model.p, problem.model.q):
        if len(p.kflr) == 1 and p.numel() > 4:
            torch.testing.assert_close(p.kflr[0], p.diag_ggn_exact.flatten())


class First(torch.autograd.Function):
    """The first of two tensors; no gradient arrives at the other."""

    @staticmethod
    def forward(ctx: object, first: Tensor, other: Tensor) -> Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize(("weight", "once"), [(torch.tanh, True), (lambda p: p * p.exp(), True), (F.normalize, False)])
def test_slopes_of_weights_that_are_computed_entry_by_entry_are_taken_once(
    weight: Callable[[Tensor], Tensor], once: bool, monkeypatch: pytest.MonkeyPatch
):
    """Else each product of each sample is pulled back to the parameter."""
    vectors, pull = [], computed._pull

    def counting(source: GradientEdge, p: nn.Parameter, pulled: Tensor) -> Tensor:
        vectors.append(pulled.numel() // p.numel())
        return pull(source, p, pulled)

    monkeypatch.setattr(computed, "_pull", counting)
    model = extend(Own(lambda m, h: F.linear(h, weight(m.p)), (4, 4)))
    with backpack(DiagGGNExact()):
        F.cross_entropy(model(torch.randn(N, TOKENS, 4)), torch.zeros(N, dtype=torch.long)).backward()
    assert (sum(vectors) == 1) == once and vectors


@pytest.mark.parametrize("weight", [torch.tril, torch.tanh, lambda p: p / p.norm()])
def test_computed_weights_of_several_uses(weight: Callable[[Tensor], Tensor]):
    def use(m: Own, h: Tensor) -> Tensor:
        W = weight(m.p)
        z = torch.tanh(torch.tanh(h @ W) @ W)
        return First.apply(z, h @ W) + z @ weight(m.p.T)

    torch.manual_seed(0)
    model, x, y = extend(Own(use, (4, 4)).double()), torch.randn(N, TOKENS, 4).double(), torch.randint(8, (N,))
    (expected,) = gradients_of_each(F.cross_entropy(model(x), y, reduction="none") / N, [model.p])
    for extensions in ([BatchGrad()], [BatchGrad(), BatchL2Grad()]):
        with backpack(*extensions):
            F.cross_entropy(model(x), y).backward()
        torch.testing.assert_close(model.p.grad_batch, expected)
    torch.testing.assert_close(model.p.batch_l2, expected.square().flatten(1).sum(1))


#: shapes of p and q, two ways to compute the same, and what of the factors is: a scale may be in either of them
THE_SAME: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Callable[[Own, Tensor], Tensor]], Callable]] = {
    "scaled row": (
        (1, 4),
        (4, 1),
        [
            lambda m, h: h * F.linear(h, m.p * 2) + h @ (m.q / 2),
            lambda m, h: h * (F.linear(h, m.p) * 2) + (h @ m.q) / 2,
        ],
        lambda factors: torch.kron(*factors) if len(factors) == 2 else factors,
    ),
    "merged adapter": (
        (4, 2),
        (2, 4),
        [
            lambda m, h: F.linear(h, m.constant + 0.5 * (m.p @ m.q)),
            lambda m, h: F.linear(h, m.constant) + 0.5 * F.linear(F.linear(h, m.q), m.p),
        ],
        list,
    ),
}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", THE_SAME)
def test_factors_of_computed_weights_are_those_of_the_layers(name: str, approx: Literal["expand", "reduce"]):
    shape, other, uses, of = THE_SAME[name]
    models = [extend(Own(use, shape, other)).double() for use in uses]
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.randn(6, TOKENS, 4).double(), torch.randint(2 * TOKENS, (6,))
    for model in models:
        with backpack(KFLR(approx=approx), BatchGrad()):
            F.cross_entropy(model(x), y).backward()
    for one, apart in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad_batch, apart.grad_batch)
        assert one.kflr.transposed == apart.kflr.transposed
        torch.testing.assert_close(of(one.kflr), of(apart.kflr))


#: Products with a parameter of three axes, of which the first or the last two belong together, or which has groups.
OF_THREE_AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "heads of outputs": ("nti,ihd->nthd", (4, 3, 2)),
    "heads of outputs first": ("nti,hdi->nthd", (3, 2, 4)),
    "heads of inputs": ("nthd,hdo->nto", (2, 2, 3)),
    "heads of inputs last": ("nthd,ohd->nto", (3, 2, 2)),
    "a matrix for each head": ("nthi,hio->ntho", (2, 2, 3)),
    "a matrix for each head, outputs first": ("nthi,hoi->ntho", (2, 3, 2)),
}


@pytest.mark.parametrize("name", OF_THREE_AXES)
def test_factors_of_parameters_of_three_axes(name: str):
    equation, shape = OF_THREE_AXES[name]
    inputs = (2, 2) if equation[:4] in ("nthd", "nthi") else (4,)
    torch.manual_seed(0)
    model = Own(lambda m, h: torch.einsum(equation, h.unflatten(2, inputs), m.p).flatten(2)[..., :4], shape)
    model.head = nn.LazyLinear(2)
    x, y = torch.randn(1, 1, 4), torch.randint(2, (1,))
    model(x)  # makes the lazy layer
    extend(model.double())
    with backpack(KFLR(), DiagGGNExact()):
        F.cross_entropy(model(x.double()), y).backward()
    factors, v = model.p.kflr, torch.randn(model.p.numel()).double()
    torch.testing.assert_close(kfacs_to_mat(factors).diagonal(), model.p.diag_ggn_exact.flatten())
    product = kfac_mat_prod(factors, sizes_of(factors, shape))(v)
    torch.testing.assert_close(product, kfacs_to_mat(factors) @ v)


@pytest.mark.parametrize("name", ["heads of outputs", "a matrix for each head"])
def test_optimizers_of_parameters_of_three_axes(name: str):
    equation, shape = OF_THREE_AXES[name]
    inputs = (2, 2) if equation[:4] in ("nthd", "nthi") else (4,)

    def product(m: Own, h: Tensor) -> Tensor:
        return F.pad(torch.einsum(equation, h.unflatten(2, inputs), m.p).flatten(2), (0, 1))[..., :4]

    for kind, max_factor_size in itertools.product([KFACSGD, EKFACSGD, KFACAdamW], [3, 128]):
        torch.manual_seed(0)
        model = Own(product, shape)
        x, y = torch.randn(N, TOKENS, 4), torch.randint(2 * TOKENS, (N,))
        optimizer = kind(model.parameters(), max_factor_size=max_factor_size)
        optimizer.attach(model)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (kind, max_factor_size)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_second_derivatives_that_pytorch_drops_are_refused(norm: str):
    """Of a bias that a norm without a weight adds, where they are asked of autograd."""

    def normalised(m: Own, h: Tensor, bias: Tensor | None) -> Tensor:
        if norm == "layer":
            return F.layer_norm(h, (4,), None, bias)
        return F.batch_norm(h.mT, m.constant[0], m.constant[1] ** 2, None, bias).mT

    model, found = extend(Own(lambda m, h: h, (4,)).double()), []
    x, y = torch.randn(N, TOKENS, 4).double(), torch.randint(2, (N,))
    for model.use in (lambda m, h: normalised(m, h, m.p), lambda m, h: normalised(m, h, None) + m.p):
        with backpack(DiagHessian()):
            F.cross_entropy(model(x), y).backward()
        found.append(model.p.diag_h)
    torch.testing.assert_close(*found)
    model.use = lambda m, h: normalised(m, h, m.p) * m.p
    with pytest.raises(CurvoptError, match="p: .*bias and no weight"), backpack(DiagHessian()):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.filterwarnings("ignore:.*curvature of several forms")
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_factors_have_the_same_form_for_batches_of_any_size(name: str):
    """Also for one sample, where an optimizer goes on, whatever it takes."""
    model = extend(Own(*OF_ANY_SIZE[name]))
    optimizer = KFACSGD(model, lr=1e-3)
    for size in (7, TOKENS, 2, 1):
        optimizer.zero_grad()
        with backpack(KFLR()):
            F.cross_entropy(model(torch.randn(size, TOKENS, 4)), torch.zeros(size, dtype=torch.long)).backward()
        optimizer.step()
        assert len(model.p.kflr) == 2 or size == 1
        assert all(p.isfinite().all() for p in model.parameters())


def with_distances() -> Net:
    """Meets the table of a module that is called without samples, as Swin has a bias for every distance."""
    steps = torch.arange(TOKENS)
    table = Net(lambda m: m.table[steps.unsqueeze(1) - steps + TOKENS - 1], table=torch.randn(2 * TOKENS - 1))

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(torch.logaddexp(h @ h.mT, m.distances()).softmax(-1) @ h).flatten(1)

    return Net(forward, distances=table, first=nn.Linear(4, 4), head=nn.Linear(4, 2))


@pytest.mark.filterwarnings("ignore:.*sample by sample")
def test_hooks_of_parameters_in_unknown_operations_see_the_gradient_alone():
    model, x = extend(with_distances()).double(), torch.randn(N, TOKENS, 4).double()
    y, table, seen = torch.randint(2, (N,)), model.distances.table, []
    alone = [torch.autograd.grad(F.cross_entropy(model(x[n, None]), y[n, None]) / N, table)[0] for n in range(N)]
    table.register_hook(lambda grad: (seen.append(grad), 2 * grad)[1])
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(table.grad_batch, torch.stack(alone))
    torch.testing.assert_close(seen, [sum(alone)])


def hypernetwork(twice: bool) -> Net:
    """A weight, or two, that modules compute from a parameter."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weight = m.weights(torch.tanh(m.hidden(m.z))).view(3, 4)
        h = torch.tanh(F.linear(torch.tanh(m.first(x)), weight))
        return m.head(torch.tanh(F.linear(h @ weight, weight)) if twice else h)

    layers = {"hidden": nn.Linear(2, 3), "weights": nn.Linear(3, 12), "first": nn.Linear(4, 4), "head": nn.Linear(3, 2)}
    return Net(forward, z=torch.randn(1, 2), **layers)


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("columns", [None, 1])
@pytest.mark.parametrize("samples", [1, N])
@pytest.mark.parametrize("twice", [True, False])
def test_weights_that_modules_compute_from_parameters(twice: bool, samples: int, columns: int | None):
    with columns_per_sweep(columns):
        check_all(extended(Case("", partial(hypernetwork, twice), normal(samples, 4), cross_entropy(), labels)))


def of_prototypes() -> Net:
    """Distances from prototypes: an operation without a rule, behind a layer with one."""
    forward = lambda m, x: m.last(torch.cdist(torch.tanh(m.first(x)), m.prototypes))  # noqa: E731
    return Net(forward, first=nn.Linear(4, 4), prototypes=torch.randn(5, 4), last=nn.Linear(5, 3))


@pytest.mark.filterwarnings("ignore:.*sample by sample")
def test_operations_without_a_rule_where_columns_are_pulled_back_one_by_one():
    """As in large networks: hooks reduce the calls while autograd goes on to the first layer, which alone it needs."""
    with columns_per_sweep(1):
        check_all(extended(Case("", of_prototypes, normal(N, 4), cross_entropy(), labels)))


@pytest.mark.filterwarnings("ignore:.*sample by sample")
def test_operations_without_a_rule_in_a_backward_to_other_parameters():
    model = extend(of_prototypes().double())
    x, y = torch.randn(N, 4).double(), torch.randint(3, (N,))
    (expected,) = gradients_of_each(F.cross_entropy(model(x), y, reduction="none"), [model.prototypes])
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), y, reduction="sum").backward(inputs=[model.first.weight])
    torch.testing.assert_close(model.prototypes.grad_batch, expected)
