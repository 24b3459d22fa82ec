"""A sample is a row of what the model was called with: against loops over the samples' parts of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import curvopt
from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import (
    GGNMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    KFACEmpirical,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Program(NamedTuple):
    """A model, the loss of a batch, and of each of its samples the part of the loss.

    Attributes:
        model: the extended model, or a module of several ones.
        total: the loss of the batch.
        parts: for each sample its part, of calls of the model on one sample.
        known: whether second-order quantities are defined for the loss.
    """

    model: nn.Module
    total: Callable[[], Tensor]
    parts: list[Callable[[], Tensor]]
    known: bool = True


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(**rows: tuple) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Add a function to the table, once for each keyword, whose value are the arguments."""

    def add(make: Callable[..., Program]) -> Callable[..., Program]:
        for name, args in (rows or {"": ()}).items():
            PROGRAMS[f"{make.__name__} {name}".strip()] = lambda args=args: make(*args)
        return make

    return add


def mlp(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def each(N: int, part: Callable[[int], Tensor]) -> list[Callable[[], Tensor]]:
    return [lambda n=n: part(n) for n in range(N)]


def one(x: Tensor, n: int) -> Tensor:
    return x[n : n + 1]


@program(cross_entropy=(F.cross_entropy, True), squares=(F.mse_loss, True), by_hand=(None, False))
def loop_over_images(loss: Callable | None, known: bool) -> Program:
    m, x = extend(mlp()), torch.randn(2, 5, 4)
    y = torch.randint(3, (2, 5)) if loss is F.cross_entropy else torch.randn(2, 5, 3)

    def of_image(z: Tensor, n: int) -> Tensor:
        return (z.abs() ** 3).mean() if loss is None else loss(z, y[n])

    def total() -> Tensor:
        return sum(of_image(z, n) for n, z in enumerate(m(x))) / 2

    return Program(m, total, each(2, lambda n: of_image(m(one(x, n))[0], n) / 2), known)


@program(unequal=([0, 1, 5, 8],), none_of_one=([0, 1, 8],))
def masked_tokens(where: list[int]) -> Program:
    layers = (nn.Embedding(7, 6), nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Linear(6, 7))
    m, ids = extend(nn.Sequential(*layers)), torch.randint(7, (3, 4))
    mask = torch.zeros(12, dtype=torch.bool).index_fill(0, torch.tensor(where), True).view(3, 4)

    def part(n: int) -> Tensor:
        return F.cross_entropy(m(one(ids, n))[one(mask, n)], one(ids, n)[one(mask, n)], reduction="sum") / len(where)

    return Program(m, lambda: F.cross_entropy(m(ids)[mask], ids[mask]), each(3, part))


@program(flattened=(True, False), classes_second=(False, False), ignored=(True, True))
def language_model(flattened: bool, ignored: bool) -> Program:
    m, ids, y = extend(nn.Sequential(nn.Embedding(7, 4), mlp(4, 7))), torch.randint(7, (3, 4)), torch.randint(7, (3, 4))
    if ignored:
        y[0, 1:], y[2, 0] = -100, -100
    count = int((y >= 0).sum())

    def loss(z: Tensor, y: Tensor) -> Tensor:
        z, y = (z.flatten(0, 1), y.flatten()) if flattened else (z.mT, y)
        return F.cross_entropy(z, y, reduction="sum") / count

    return Program(m, lambda: loss(m(ids), y), each(3, lambda n: loss(m(one(ids, n)), one(y, n))))


class Losses(nn.Module):
    """Returns its loss, and maybe logits whose tokens are rows."""

    def __init__(self, flat: bool):
        super().__init__()
        self.body, self.flat = nn.Sequential(nn.Embedding(7, 4), mlp(4, 7)), flat

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        z = self.body(ids).flatten(0, 1)
        return z if labels is None else F.cross_entropy(z, labels.flatten(), reduction="sum")


@program(loss=(True,), rows=(False,))
def model_that_returns(loss: bool) -> Program:
    m, ids = extend(Losses(True)), torch.randint(7, (3, 4))

    def of(ids: Tensor) -> Tensor:
        return m(ids, labels=ids) if loss else F.cross_entropy(m(ids), ids.flatten(), reduction="sum")

    return Program(m, lambda: of(ids), each(3, lambda n: of(one(ids, n))))


@program(known=(F.mse_loss, True), unknown=(F.smooth_l1_loss, False))
def parameter_list(loss: Callable, known: bool) -> Program:
    W, x, y = extend(nn.ParameterList([torch.randn(3, 4), torch.randn(3)])), torch.randn(6, 4), torch.randn(6, 3)
    total = lambda x, y: loss(F.linear(x, *W), y, reduction="sum")  # noqa: E731
    return Program(W, lambda: total(x, y), each(6, lambda n: total(one(x, n), one(y, n))), known)


class Graphs(nn.Module):
    """The rows of graphs (or of documents) are pooled, so that a sample is a row of the output."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.sparse = nn.Linear(4, 5), nn.Linear(5, 4), sparse

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.sparse:
            return self.last(torch.sparse.mm(F.one_hot(graph).T.to(h).to_sparse(), h))
        return self.last(h.new_zeros(int(graph.max()) + 1, 5).index_add(0, graph, h))


class LastOfTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0][-1])


@program(added=(False,), sparse=(True,))
def pooled_rows(sparse: bool) -> Program:
    m, x, graph = extend(Graphs(sparse)), torch.randn(7, 4), torch.tensor([0, 2, 1, 0, 1, 2, 2])
    y = torch.randn(3, 4)

    def of(n: int) -> Tensor:
        return F.mse_loss(m(x[graph == n], torch.zeros(int((graph == n).sum()), dtype=torch.long)), one(y, n), reduction="sum")  # fmt: skip # noqa: E501

    return Program(m, lambda: F.mse_loss(m(x, graph), y, reduction="sum"), each(3, of))


@program()
def last_of_a_sequence_with_the_time_first() -> Program:
    m, x, y = extend(LastOfTime()), torch.randn(7, 3, 4), torch.randn(3, 3)
    return Program(m, lambda: F.mse_loss(m(x), y, reduction="sum"), each(3, lambda n: F.mse_loss(m(x[:, n : n + 1]), one(y, n), reduction="sum")))  # fmt: skip # noqa: E501


class Detector(nn.Module):
    """Classes of images, and boxes of those regions that hold something."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh().flatten(2).mT
        return self.classes(h.mean(1)), self.boxes(h[mask])


@program(inside=(True,), parts=(False,))
def detector(inside: bool) -> Program:
    m, x, y = extend(Detector()), torch.randn(3, 2, 2, 2), torch.randint(3, (3,))
    mask, boxes = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 0]]).bool(), torch.randn(3, 4, 2)

    def loss(rows: slice) -> Tensor:
        if inside:
            h = m.body(x[rows]).tanh().flatten(2).mT
            z, b = m.classes(h.mean(1)), m.boxes(h[mask[rows]])
        else:
            z, b = m(x[rows], mask[rows])
        own = F.cross_entropy(z, y[rows], reduction="sum")
        return own + F.mse_loss(b, boxes[rows][mask[rows]], reduction="sum")

    if not inside:  # rows of which no layer with N rows says whose they are
        m = extend(nn.ModuleDict({"body": m.body, "classes": m.classes, "boxes": m.boxes}))
        inside, m.body, m.classes, m.boxes = True, m["body"], m["classes"], m["boxes"]
    return Program(m, lambda: loss(slice(None)), each(3, lambda n: loss(slice(n, n + 1))))


@program()
def adaptive_softmax() -> Program:
    m, x, y = extend(nn.ModuleList([mlp(4, 6), nn.AdaptiveLogSoftmaxWithLoss(6, 9, [2, 5], div_value=1.5)])), torch.randn(5, 4), torch.tensor([0, 3, 8, 1, 6])  # fmt: skip # noqa: E501
    total = lambda x, y: m[1](m[0](x), y).output.neg().sum()  # noqa: E731
    return Program(m, lambda: total(x, y), each(5, lambda n: total(one(x, n), one(y, n))), known=False)


@program(gru=(True,), own=(False,))
def cell_in_a_loop(gru: bool) -> Program:
    cell = nn.GRUCell(3, 4) if gru else mlp(7, 4)
    m = extend(nn.ModuleDict({"cell": cell, "head": nn.Linear(4, 3)}))
    x, y = torch.randn(4, 6, 3), torch.randint(3, (4, 6))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        h, total = x.new_zeros(len(x), 4), torch.zeros(())
        for t in range(6):
            h = m["cell"](x[:, t], h) if gru else m["cell"](torch.cat([x[:, t], h], 1))
            total = total + F.cross_entropy(m["head"](h), y[:, t], reduction="sum")
        return total

    return Program(m, lambda: loss(x, y), each(4, lambda n: loss(one(x, n), one(y, n))))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.net, self.last = nn.Linear(3, 4), nn.GRU(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(self.first(x).tanh())[0])


@program(known=(True,), unknown=(False,))
def batch_axis_of_one(known: bool) -> Program:
    m, x, y = extend(TimeFirst(), batch_axis=1), torch.randn(5, 4, 3), torch.randint(3, (5, 4))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = m(x)
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") if known else z.cosh().log().sum()

    return Program(m, lambda: loss(x, y), each(4, lambda n: loss(x[:, n : n + 1], y[:, n : n + 1])), known)


@program(known=(True,), unknown=(False,))
def flattened_with_batch_axis_of_one(known: bool) -> Program:
    """The rows of the output are those of all samples at a time, then of all at the next one."""
    m, x, y = extend(nn.Sequential(TimeFirst(), nn.Flatten(0, 1)), batch_axis=1), torch.randn(5, 4, 3), torch.ones(20)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = m(x)
        return F.cross_entropy(z, y.long(), reduction="sum") if known else z.cosh().log().sum()

    return Program(m, lambda: loss(x, y), each(4, lambda n: loss(x[:, n : n + 1], y[:5])), known)


class Ensemble(nn.Module):
    """Several nets as one, whose weights are stacked."""

    def __init__(self, nets: int) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(nets, 3, 5)), nn.Parameter(torch.randn(nets, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x.expand(len(self.first), *x.shape), self.first).tanh(), self.last)


@program(fewer=(3,), more=(8,))
def ensemble(nets: int) -> Program:
    """Outputs ``[E, N, 2]``."""
    m, x, y = extend(Ensemble(nets)), torch.randn(4, 3), torch.randn(4, 2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m(x).flatten(0, 1), y.repeat(nets, 1), reduction="sum")

    return Program(m, lambda: loss(x, y), each(4, lambda n: loss(one(x, n), one(y, n))))


class Transposed(nn.Module):
    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.axes)


@program(rows=(False,), flat=(True,))
def second_axis_of_as_many_as_samples(flat: bool) -> Program:
    """Scores of 4 candidates for each of 4 samples, scaled by a parameter of the sample's user."""
    m, scale = mlp(3, 1), nn.Embedding(2, 1)
    x, user, y = torch.randn(4, 4, 3), torch.tensor([0, 1, 1, 0]), torch.randint(4, (4,))

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = m, nn.Parameter(scale.weight.detach()[:, 0])

        def forward(self, x: Tensor, user: Tensor) -> Tensor:
            z = self.net(x)
            scale = self.scale[user][:, None]
            return (z * scale[:, None]).expand(-1, -1, 4).flatten(0, 1) if flat else z.squeeze(-1) * scale

    model = extend(Scores())

    def loss(x: Tensor, user: Tensor, y: Tensor) -> Tensor:
        z = model(x, user)
        return z.square().sum() + z.sum() if flat else F.cross_entropy(z, y, reduction="sum")

    parts = each(4, lambda n: loss(one(x, n), one(user, n), one(y, n)))
    return Program(model, lambda: loss(x, user, y), parts)


@program(shorter=(3,), longer=(8,))
def output_with_the_time_first(T: int) -> Program:
    m = extend(nn.Sequential(nn.Conv1d(3, 5, 1), nn.Tanh(), Transposed(1, 2), nn.Linear(5, 3), Transposed(0, 1)))
    x, y = torch.randn(4, 3, T), torch.randint(3, (T, 4))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum")

    return Program(m, lambda: loss(x, y), each(4, lambda n: loss(one(x, n), y[:, n : n + 1])))


@program()
def wasserstein_with_penalty() -> Program:
    """One call on real and generated samples; the slopes are of another one on points between them."""
    m, x = extend(nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 1))), torch.randn(3, 3, 4)

    def loss(x: Tensor) -> Tensor:
        real, fake, between = x.unbind(1)
        between = between.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(m(between).sum(), between, create_graph=True)
        return (m(fake) - m(real)).sum() + 10 * (slopes.norm(dim=1) - 1).square().sum()

    return Program(m, lambda: loss(x), each(3, lambda n: loss(one(x, n))), known=False)


class OfList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.body(torch.stack([image.mean(0) for image in images]))


@program()
def list_of_images() -> Program:
    m, images, y = extend(OfList()), [torch.randn(k, 4) for k in (2, 5, 3)], torch.randint(3, (3,))
    total = lambda images, y: F.cross_entropy(m(images), y, reduction="sum")  # noqa: E731
    return Program(m, lambda: total(images, y), each(3, lambda n: total([images[n]], one(y, n))))


REORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda z: torch.cat([z, z.sin()]),
    "sorted": lambda z: z[z[:, 0].argsort()],
    "repeated": lambda z: z.repeat_interleave(2, 0),
    "unbound": lambda z: torch.stack(z.unbind(0)[::-1], 1).T,
    "transposed": lambda z: z.T.reshape(3, 2, 2).permute(1, 2, 0).flatten(0, 1),
}


@program(**{name: (reorder,) for name, reorder in REORDERED.items()})
def reordered_before_the_loss(reorder: Callable[[Tensor], Tensor]) -> Program:
    m, x, t = extend(mlp()), torch.randn(4, 4), torch.randn(3)
    return Program(m, lambda: F.mse_loss(reorder(m(x)), t.expand(reorder(m(x)).shape), reduction="sum"), each(4, lambda n: _mse(reorder, m, x, n, t)))  # fmt: skip # noqa: E501


def _mse(reorder: Callable[[Tensor], Tensor], m: nn.Module, x: Tensor, n: int, t: Tensor) -> Tensor:
    """Only the rows of sample n."""
    z = m(one(x, n))
    rows = torch.cat([z, z.sin()]) if reorder is REORDERED["twice"] else z
    rows = z.repeat_interleave(2, 0) if reorder is REORDERED["repeated"] else rows
    return F.mse_loss(rows, t.expand(rows.shape), reduction="sum")


def gradients(p: Program) -> dict[nn.Parameter, Tensor]:
    """The gradients of all parts, ``[N, *p]``, by autograd alone."""
    params = list(p.model.parameters())
    found = [torch.autograd.grad(part(), params, allow_unused=True) for part in p.parts]
    found = [[torch.zeros_like(q) if g is None else g for q, g in zip(params, row, strict=True)] for row in found]
    return {q: torch.stack(rows) for q, *rows in zip(params, *found, strict=True)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sample_is_a_row_of_the_models_input(name: str):
    compare_first_order(PROGRAMS[name]())
    p = PROGRAMS[name]()
    if p.known and "unknown" not in name and name not in SLOW:
        with sdpa_kernel(SDPBackend.MATH):  # the other has no second derivative
            compare_second_order(p)


def compare_first_order(p: Program) -> None:
    expected = gradients(p)
    with warnings.catch_warnings(), backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance()):
        warnings.simplefilter("error", CurvoptWarning)
        p.total().backward()
    for i, (q, g) in enumerate(expected.items()):
        if q.grad is None:
            assert not hasattr(q, "grad_batch") and not g.any()
            continue
        assert_close(q.grad_batch, g, msg=lambda text, i=i: f"parameter {i}: {text}")
        assert_close(q.batch_l2, g.flatten(1).square().sum(1))
        assert_close(q.sum_grad_squared, g.square().sum(0))
        assert_close(q.variance, g.var(0, correction=0))


#: first order says the same of these, in less time
SLOW = {
    "cell_in_a_loop gru",
    "masked_tokens unequal",
    "reordered_before_the_loss twice",  # a loss of any kind: of its Hessian in the output of the model
}


def compare_second_order(p: Program) -> None:
    params = list(p.model.parameters())
    hessians = [_hessian_diagonals(part(), params) for part in p.parts]
    extensions = [DiagGGNExact(), BatchDiagGGNExact(), DiagHessian(), BatchDiagHessian(), SqrtGGNExact(), GGNMP()]
    alone = []
    for part in p.parts:
        with backpack(DiagGGNExact(), KFLR(approx="reduce")):
            part().backward()
        fields = [
            (q.diag_ggn_exact, q.kflr) if hasattr(q, "diag_ggn_exact") else (torch.zeros_like(q), None) for q in params
        ]
        alone.append(fields)
    with backpack(*extensions, KFLR(approx="reduce")):
        p.total().backward()
    for i, q in enumerate(params):
        ggn = torch.stack([fields[i][0] for fields in alone])
        hessian = torch.stack([diagonals[i] for diagonals in hessians])
        assert_close(q.diag_ggn_exact_batch, ggn)
        assert_close(q.diag_ggn_exact, ggn.sum(0))
        assert_close(q.diag_h_batch, hessian)
        assert_close(q.diag_h, hessian.sum(0))
        assert_close(q.sqrt_ggn_exact.square().sum(0), ggn)
        assert_close(torch.stack([q.ggnmp(torch.eye(q.numel())[k].view(1, *q.shape)).flatten()[k] for k in (0, -1)]), ggn.sum(0).flatten()[[0, -1]])  # fmt: skip # noqa: E501


def _hessian_diagonals(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    found = []
    for q, g in zip(params, grads, strict=True):
        if g is None or not g.requires_grad:
            found.append(torch.zeros_like(q))
            continue
        rows = [torch.autograd.grad(e, q, retain_graph=True, allow_unused=True)[0] for e in g.flatten()]
        found.append(torch.stack([torch.zeros(()) if row is None else row.flatten()[k] for k, row in enumerate(rows)]).view_as(q))  # fmt: skip # noqa: E501
    return found


# batches of different lengths: as if their rows were appended


@pytest.mark.parametrize("sizes", [(6, 4), (3, 6), (1, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("loss", [F.mse_loss, F.cross_entropy], ids=["values", "classes"])
def test_unequal_batches_are_appended(sizes: tuple[int, ...], loss: Callable):
    m, batches = extend(mlp()), [torch.randn(size, 4) for size in sizes]
    targets = [torch.randn(k, 3) if loss is F.mse_loss else torch.randint(3, (k,)) for k in sizes]
    quantities = [DiagGGNExact(), DiagHessian(), KFLR(), GGNMP()]
    params, found = list(m.parameters()), []

    def fields() -> list[list[Tensor]]:
        v = [torch.ones(1, *p.shape) for p in params]
        return [[p.diag_ggn_exact, p.diag_h, *p.kflr, p.ggnmp(x)[0]] for p, x in zip(params, v, strict=True)]

    for x, y in zip(batches, targets, strict=True):
        with backpack(*quantities):
            loss(m(x), y).backward()
        found.append(fields())
    with backpack(*quantities):
        sum(loss(m(x), y) for x, y in zip(batches, targets, strict=True)).backward()
    shares = torch.tensor(sizes) / sum(sizes)
    for i, together in enumerate(fields()):
        for k, field in enumerate(together):
            alone = torch.stack([each[i][k] for each in found])
            is_input_factor = k == 3 and len(together) == 5
            weights = shares if is_input_factor else torch.ones(len(sizes))
            assert_close(field, torch.einsum("b,b...->...", weights, alone))


@pytest.mark.parametrize("extension", [BatchGrad, BatchL2Grad, SumGradSquared, Variance, BatchDiagGGNExact])
def test_unequal_batches_keep_no_samples_apart(extension: type):
    m = extend(mlp())
    with pytest.raises(CurvoptError, match=f"{extension.field} keeps samples apart.*different lengths"):
        with backpack(extension()):
            sum(F.mse_loss(m(torch.randn(k, 4)), torch.zeros(k, 3)) for k in (6, 4)).backward()


# named errors


def rows_in_a_loop() -> Tensor:
    m = extend(mlp())
    return F.mse_loss(torch.cat([m(torch.randn(1, 4)) for _ in range(3)]), torch.zeros(3, 3))


class TimeFirstMean(TimeFirst):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(0)


def time_first_without_batch_axis() -> Tensor:
    return F.cross_entropy(extend(TimeFirstMean())(torch.randn(4, 5, 3)), torch.zeros(5).long())


class Pooled(nn.Module):
    """Several rows for each sample, in an order that no layer tells."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.of = nn.Linear(4, 3), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.body(x))


def mean_over_the_batch() -> Tensor:
    return F.mse_loss(extend(Pooled(lambda h: h.mean(0)))(torch.randn(6, 4)), torch.zeros(3))


def more_rows() -> Tensor:
    return F.mse_loss(extend(Pooled(lambda h: torch.cat([h, h[:2]])))(torch.randn(6, 4)), torch.zeros(8, 3))


def empty_batch() -> Tensor:
    return extend(mlp())(torch.randn(0, 4)).sum()


def pooled_to_as_many_features_as_rows() -> Tensor:
    """Of ``[3, 4]``, the second axis has features, though there are 4 rows."""
    return extend(nn.Sequential(nn.Linear(3, 4), Statistics()))(torch.randn(4, 3)).square().sum()


class Statistics(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.mean(0), x.std(0), x.amax(0)])


ERRORS: dict[Callable[[], Tensor], str] = {
    pooled_to_as_many_features_as_rows: r"4 samples along axis 0.*\[3, 4\]",
    rows_in_a_loop: "called 3 times with one row each.*stack the rows",
    time_first_without_batch_axis: r"4 samples along axis 0.*\[5, 3\].*batch_axis=1",
    mean_over_the_batch: r"6 samples.*\[3\]",
    more_rows: r"6 samples along axis 0.*\[8, 3\]",
    empty_batch: "batch is empty",
}


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: make.__name__)
def test_ambiguities_are_named(make: Callable[[], Tensor]):
    loss = make()
    with pytest.raises(CurvoptError, match=f"(?s){ERRORS[make]}") as error, backpack(BatchGrad()):
        loss.backward()
    assert str(error.value).count(". ") <= 2


# programs of several models and contexts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            if (route == k).any():
                out[route == k] = expert(x[route == k])
        return out


def test_fields_of_an_earlier_batch_are_removed():
    m, x, y = extend(Experts()), torch.randn(4, 4), torch.randint(3, (4,))
    for route in ([0, 1, 0, 1], [0, 0, 0, 0]):
        with backpack(BatchGrad(), DiagGGNExact(), KFAC(), KFACEmpirical()):
            F.cross_entropy(m(x, torch.tensor(route)), y).backward()
        fields = [f for p in m.experts[1].parameters() for f in ("grad_batch", "diag_ggn_exact", "kfac", "kfac_empirical") if hasattr(p, f)]  # fmt: skip # noqa: E501
        assert bool(fields) == (1 in route)
        weight = m.experts[0].weight
        assert_close(weight.grad_batch, _individual_gradients(m(x, torch.tensor(route)), y, weight))


@pytest.mark.parametrize("detached", [False, True])
def test_fields_of_heads_that_share_a_forward_stay(detached: bool):
    parts = body, *heads = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
    extend(nn.ModuleList(parts))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))

    def outputs() -> list[Tensor]:
        features = body(x).detach() if detached else body(x)
        return [head(features) for head in heads]

    def backward(output: Tensor) -> None:
        with backpack(BatchGrad(), DiagGGNExact()):
            F.cross_entropy(output, y).backward(retain_graph=True)

    def with_fields() -> list[bool]:
        return [hasattr(head.weight, "grad_batch") and hasattr(head.bias, "diag_ggn_exact") for head in heads]

    for output in outputs():
        backward(output)
    assert with_fields() == [True, True]
    weight = heads[0].weight
    assert_close(weight.grad_batch, _individual_gradients(heads[0](body(x)), y, weight))
    backward(outputs()[1])
    assert with_fields() == [False, True]


def _individual_gradients(z: Tensor, y: Tensor, p: Tensor) -> Tensor:
    losses = F.cross_entropy(z, y, reduction="none") / len(y)
    return torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])


def test_a_pass_through_a_part_of_a_model_removes_the_fields_of_all_of_it():
    model, y = extend(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))), torch.randint(3, (5,))
    for part in (model, model[1]):
        with backpack(BatchGrad()):
            F.cross_entropy(part(torch.randn(5, 4)), y).backward()
    assert [hasattr(layer.weight, "grad_batch") for layer in model] == [False, True]


@pytest.mark.parametrize(
    "mix", [nn.BatchNorm1d(3, dtype=torch.float64), lambda h: h - h.mean(0)], ids=["batch norm", "mean"]
)
def test_what_mixes_samples_between_two_models(mix: Callable[[Tensor], Tensor]):
    """The first model's samples are seen through the second one."""
    first, last = extend(nn.Linear(2, 3)), extend(nn.Linear(3, 3))
    x, y = torch.randn(4, 2), torch.tensor([0, 2, 1, 1])

    def loss() -> Tensor:
        return F.cross_entropy(last(mix(first(x)).tanh()), y)

    (gradient,) = torch.autograd.grad(loss(), first.bias, create_graph=True)
    rows = [torch.autograd.grad(g, first.bias, retain_graph=True)[0] for g in gradient]
    if isinstance(mix, nn.Module):
        with pytest.raises(CurvoptError, match="train-mode batch norm"), backpack(DiagHessian()):
            loss().backward()
        return
    with backpack(DiagHessian()):
        loss().backward()
    assert_close(first.bias.diag_h, torch.stack(rows).diagonal())


def test_two_models_of_which_the_loss_sees_both_outputs():
    first, last = extend(nn.Linear(2, 3)), extend(nn.Linear(3, 3))
    x, y = torch.randn(4, 2), torch.tensor([0, 2, 1, 1])
    diagonals = []
    for factor in (0.0, 1.0):
        with backpack(DiagGGNExact()):
            features = first(x)
            (F.cross_entropy(last(features), y) + factor * features.square().mean()).backward()
        diagonals.append(last.weight.diag_ggn_exact)
    assert diagonals[0].all()
    assert_close(diagonals[1], diagonals[0])


@pytest.mark.parametrize("inside", [False, True])
def test_gauss_newton_in_what_is_marked_as_a_prediction(inside: bool):
    """The Hessian of the loss in slopes and outputs is indefinite, that in the residual is not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))

        def residual(self, x: Tensor) -> Tensor:
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (slope * u).squeeze(1)

        def forward(self, x: Tensor, mark: Callable[[Tensor], Tensor]) -> Tensor:
            return logcosh(mark(self.residual(x)))

    def logcosh(r: Tensor) -> Tensor:
        return r.cosh().log().mean()

    model = Model().double()
    extend(model if inside else model.net)
    x, weight = torch.randn(4, 1, dtype=torch.float64, requires_grad=True), model.net[0].weight

    def loss(mark: Callable[[Tensor], Tensor]) -> Tensor:
        return model(x, mark) if inside else logcosh(mark(model.residual(x)))

    rows = model.residual(x)
    squares = [torch.autograd.grad(r, weight, retain_graph=True)[0] ** 2 for r in rows]
    expected = sum(s / r.detach().cosh() ** 2 for s, r in zip(squares, rows, strict=True)) / 4
    with pytest.raises(CurvoptError, match="indefinite"), backpack(DiagGGNExact()):
        loss(lambda r: r).backward()
    with backpack(DiagGGNExact()):
        loss(curvopt.prediction).backward()
    assert_close(weight.diag_ggn_exact, expected)


def test_gauss_newton_of_losses_with_a_term_that_is_kept_by_the_model():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            features = self.first(x)
            self.kept = features.square().mean(1)
            return self.last(features)

    model, x, y = extend(Kept()), torch.randn(4, 2), torch.tensor([0, 2, 1, 1])
    diagonals = []
    for term in (False, True):
        with backpack(DiagGGNExact()):
            losses = F.cross_entropy(model(x), y, reduction="none")
            (losses + model.kept if term else losses).mean().backward()
        diagonals.append(model.last.weight.diag_ggn_exact)
    assert diagonals[0].all()
    assert_close(diagonals[1], diagonals[0])


def test_batch_norm_between_two_outputs_of_a_model():
    class Neck(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.first(x)
            return self.last(self.norm(features)), features

    model = extend(Neck())
    with pytest.raises(CurvoptError, match="train-mode batch norm"), backpack(DiagHessian()):
        logits, features = model(torch.randn(4, 2))
        (F.cross_entropy(logits, torch.tensor([0, 2, 1, 1])) + features.square().mean()).backward()
