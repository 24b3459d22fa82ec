"""A sample is a row of what the model was called with: against loops over the samples' parts of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cases import Net
from checks import FIRST_ORDER, gradients_of_each, hessian_diagonals
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from curvopt import CurvoptError, CurvoptWarning, backpack, extend, prediction
from curvopt.extensions import (
    GGNMP,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
    Extension,
    KFACEmpirical,
    SqrtGGNExact,
)

GGN: list[type[Extension]] = [DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact, GGNMP, KFLR]
HESSIAN: list[type[Extension]] = [DiagHessian, BatchDiagHessian]
Y = torch.tensor([0, 2, 1, 1])


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass
class Program:
    """A model and the loss of some of its samples.

    Attributes:
        model: the extended model, or a module of several ones.
        loss: the loss of the samples of a slice.
        N: how many samples there are.
        mean: whether the loss of several samples is their mean, else it is the sum.
        second: the quantities of second order that are compared, too.
    """

    model: nn.Module
    loss: Callable[[slice], Tensor]
    N: int
    mean: bool = False
    second: Sequence[type[Extension]] = (*GGN, *HESSIAN)

    def total(self) -> Tensor:
        return self.loss(slice(None))

    def parts(self) -> list[Tensor]:
        """The part of the loss of each sample, from calls of the model on one sample."""
        return [self.loss(slice(n, n + 1)) / (self.N if self.mean else 1) for n in range(self.N)]


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


def squares(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y, reduction="sum")


def classes(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


def logcosh(z: Tensor, _: object = None) -> Tensor:
    return z.cosh().log().sum()


# ------------------------------------------------------------------------------------------------ rows and their losses


def cubes(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).abs().pow(3).mean()


@program(cross_entropy=(F.cross_entropy,), squares=(F.mse_loss,), by_hand=(cubes, ()))
def loop_over_images(loss: Callable, second: Sequence = (*GGN, *HESSIAN)) -> Program:
    m, x = extend(mlp()), torch.randn(2, 5, 4)
    y = torch.randint(3, (2, 5)) if loss is F.cross_entropy else torch.randn(2, 5, 3)
    return Program(m, lambda rows: sum(map(loss, m(x[rows]), y[rows])), 2, second=second)


@program(unequal=([0, 1, 5, 8],), none_of_one=([0, 1, 8],))
def masked_tokens(where: list[int]) -> Program:
    layers = (nn.Embedding(7, 6), nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Linear(6, 7))
    m, ids = extend(nn.Sequential(*layers)), torch.randint(7, (3, 4))
    mask = torch.zeros(12, dtype=torch.bool).index_fill(0, torch.tensor(where), True).view(3, 4)
    return Program(m, lambda rows: classes(m(ids[rows])[mask[rows]], ids[rows][mask[rows]]) / len(where), 3)


@program(flattened=(True, False), classes_second=(False, False), ignored=(True, True))
def language_model(flattened: bool, ignored: bool) -> Program:
    m, ids, y = extend(nn.Sequential(nn.Embedding(7, 4), mlp(4, 7))), torch.randint(7, (3, 4)), torch.randint(7, (3, 4))
    if ignored:
        y[0, 1:], y[2, 0] = -100, -100

    def loss(rows: slice) -> Tensor:
        z = m(ids[rows])
        return classes(z.flatten(0, 1), y[rows].flatten()) if flattened else classes(z.mT, y[rows])

    return Program(m, loss, 3)


@program(loss=(True,), rows=(False,))
def model_that_returns(loss: bool) -> Program:
    def forward(m: Net, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        z = m.body(ids).flatten(0, 1)
        return z if labels is None else classes(z, labels.flatten())

    m, ids = extend(Net(forward, body=nn.Sequential(nn.Embedding(7, 4), mlp(4, 7)))), torch.randint(7, (3, 4))
    of_rows = lambda x: m(x, labels=x) if loss else classes(m(x), x.flatten())  # noqa: E731
    return Program(m, lambda rows: of_rows(ids[rows]), 3)


@program(known=(F.mse_loss,), unknown=(F.smooth_l1_loss, ()))
def parameter_list(loss: Callable, second: Sequence = (*GGN, *HESSIAN)) -> Program:
    W, x, y = extend(nn.ParameterList([torch.randn(3, 4), torch.randn(3)])), torch.randn(6, 4), torch.randn(6, 3)
    return Program(W, lambda rows: loss(F.linear(x[rows], *W), y[rows], reduction="sum"), 6, second=second)


@program(added=(False,), sparse=(True,))
def pooled_rows(sparse: bool) -> Program:
    """The rows of graphs (or of documents) are pooled, so that a sample is a row of the output."""

    def forward(m: Net, x: Tensor, graph: Tensor) -> Tensor:
        h = m.first(x).tanh()
        if sparse:
            return m.last(torch.sparse.mm(F.one_hot(graph).T.to(h).to_sparse(), h))
        return m.last(h.new_zeros(int(graph.max()) + 1, 5).index_add(0, graph, h))

    m, graph = extend(Net(forward, first=nn.Linear(4, 5), last=nn.Linear(5, 4))), [0, 2, 1, 0, 1, 2, 2]
    x, y = torch.randn(7, 4), torch.randn(3, 4)

    def loss(rows: slice) -> Tensor:
        of = torch.tensor(graph) if rows.start is None else torch.zeros(graph.count(rows.start), dtype=torch.long)
        inside = torch.tensor([rows.start in (None, g) for g in graph])
        return squares(m(x[inside], of), y[rows])

    return Program(m, loss, 3)


@program(inside=(True,), parts=(False,))
def detector(inside: bool) -> Program:
    """Classes of images, and boxes of those regions that hold something."""
    parts = {"body": nn.Conv2d(2, 4, 3, padding=1), "classes": nn.Linear(4, 3), "boxes": nn.Linear(4, 2)}
    x, y, boxes = torch.randn(3, 2, 2, 2), torch.randint(3, (3,)), torch.randn(3, 4, 2)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 0]]).bool()

    def forward(m: Net, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = parts["body"](x).tanh().flatten(2).mT
        return parts["classes"](h.mean(1)), parts["boxes"](h[mask])

    m = Net(forward, **parts)
    extend(m if inside else nn.ModuleDict(parts))  # rows of which no layer with N rows says whose they are

    def loss(rows: slice) -> Tensor:
        z, b = m(x[rows], mask[rows])
        return classes(z, y[rows]) + squares(b, boxes[rows][mask[rows]])

    return Program(m, loss, 3)


@program()
def adaptive_softmax() -> Program:
    m = extend(nn.ModuleList([mlp(4, 6), nn.AdaptiveLogSoftmaxWithLoss(6, 9, [2, 5], div_value=1.5)]))
    x, y = torch.randn(5, 4), torch.tensor([0, 3, 8, 1, 6])
    return Program(m, lambda rows: m[1](m[0](x[rows]), y[rows]).output.neg().sum(), 5, second=())


@program()
def list_of_images() -> Program:
    m = extend(Net(lambda m, images: m.body(torch.stack([image.mean(0) for image in images])), body=mlp()))
    images, y = [torch.randn(k, 4) for k in (2, 5, 3)], torch.randint(3, (3,))
    return Program(m, lambda rows: classes(m(images[rows]), y[rows]), 3)


@program()
def wasserstein_with_penalty() -> Program:
    """One call on real and generated samples; the slopes are of another one on points between them."""
    m, x = extend(nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 1))), torch.randn(3, 3, 4)

    def loss(rows: slice) -> Tensor:
        real, fake, between = x[rows].unbind(1)
        between = between.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(m(between).sum(), between, create_graph=True)
        return (m(fake) - m(real)).sum() + 10 * (slopes.norm(dim=1) - 1).square().sum()

    return Program(m, loss, 3, second=())


# ---------------------------------------------------------------------------------------------------- losses in a model


@program()
def losses_of_steps() -> Program:
    """As many steps as samples; the losses of the steps are stacked."""

    def forward(m: Net, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.mse_loss(z, t) for z, t in zip(m.net(x)[0].unbind(1), y.unbind(1), strict=True)]).mean()

    m, x, y = extend(Net(forward, net=nn.GRU(5, 3, batch_first=True))), torch.randn(4, 4, 5), torch.randn(4, 4, 3)
    return Program(m, lambda rows: m(x[rows], y[rows]), 4, mean=True, second=HESSIAN)


@program(outside=(False,), inside=(True,))
def mean_over_the_experts(inside: bool) -> Program:
    """There are as many experts as samples; the term that balances them is a mean over the batch."""

    def forward(m: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        p = m.route(x).softmax(1)
        z = sum(p[:, i : i + 1] * expert(x) for i, expert in enumerate(m.experts))
        term = (p.mean(0) * torch.arange(4.0)).sum()
        return F.cross_entropy(z, y) + term if inside else (z, term)

    experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))
    m, x = extend(Net(forward, route=nn.Linear(5, 4), experts=experts)), torch.randn(4, 5)

    def loss(rows: slice) -> Tensor:
        found = m(x[rows], Y[rows])
        return found if inside else F.cross_entropy(found[0], Y[rows]) + found[1]

    return Program(m, loss, 4, mean=True, second=())


@program()
def parameter_of_the_shape_of_one_sample() -> Program:
    def forward(m: Net, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.last(x * m.gate.sigmoid()), y)

    m, x = extend(Net(forward, gate=torch.randn(1, 5), last=nn.Linear(5, 3))), torch.randn(1, 5)
    return Program(m, lambda rows: m(x[rows], torch.tensor([2])), 1)


# --------------------------------------------------------------------------------------- samples on another axis, steps


@program()
def last_of_a_sequence_with_the_time_first() -> Program:
    m = extend(Net(lambda m, x: m.last(m.rnn(x)[0][-1]), rnn=nn.GRU(4, 5), last=nn.Linear(5, 3)))
    x, y = torch.randn(7, 3, 4), torch.randn(3, 3)
    return Program(m, lambda rows: squares(m(x[:, rows]), y[rows]), 3)


@program(gru=(True, ()), own=(False,))
def cell_in_a_loop(gru: bool, second: Sequence = (*GGN, *HESSIAN)) -> Program:
    cell = nn.GRUCell(3, 4) if gru else mlp(7, 4)
    m = extend(nn.ModuleDict({"cell": cell, "head": nn.Linear(4, 3)}))
    x, y = torch.randn(4, 6, 3), torch.randint(3, (4, 6))

    def loss(rows: slice) -> Tensor:
        h, total = x.new_zeros(len(x[rows]), 4), torch.zeros(())
        for step, label in zip(x[rows].unbind(1), y[rows].unbind(1), strict=True):
            h = m["cell"](step, h) if gru else m["cell"](torch.cat([step, h], 1))
            total = total + classes(m["head"](h), label)
        return total

    return Program(m, loss, 4, second=second)


@program(known=(False, classes), unknown=(False, logcosh, ()), flat=(True, classes), flat_unknown=(True, logcosh, ()))
def batch_axis_of_one(flat: bool, loss: Callable, second: Sequence = (*GGN, *HESSIAN)) -> Program:
    """Rows of a flat output are those of all samples at a time, then of all at the next one."""
    net = nn.Sequential(time_first(), nn.Flatten(0, 1)) if flat else time_first()
    m, x, y = extend(net, batch_axis=1), torch.randn(5, 4, 3), torch.randint(3, (5, 4))
    return Program(m, lambda rows: loss(m(x[:, rows]).view(-1, 3), y[:, rows].flatten()), 4, second=second)


def time_first() -> Net:
    layers = {"first": nn.Linear(3, 4), "net": nn.GRU(4, 4), "last": nn.Linear(4, 3)}
    return Net(lambda m, x: m.last(m.net(m.first(x).tanh())[0]), **layers)


@program(fewer=(3,), more=(8,))
def ensemble(nets: int) -> Program:
    """Several nets as one, whose weights are stacked: outputs ``[E, N, 2]``."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x.expand(nets, *x.shape), m.first).tanh(), m.last)

    m = extend(Net(forward, first=torch.randn(nets, 3, 5), last=torch.randn(nets, 5, 2)))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    return Program(m, lambda rows: squares(m(x[rows]).flatten(0, 1), y[rows].repeat(nets, 1)), 4)


@program(rows=(False,), flat=(True,))
def second_axis_of_as_many_as_samples(flat: bool) -> Program:
    """Scores of 4 candidates for each of 4 samples, scaled by a parameter of the sample's user."""

    def forward(m: Net, x: Tensor, user: Tensor) -> Tensor:
        z, scale = m.net(x), m.scale[user][:, None]
        return (z * scale[:, None]).expand(-1, -1, 4).flatten(0, 1) if flat else z.squeeze(-1) * scale

    m = extend(Net(forward, net=mlp(3, 1), scale=torch.randn(2)))
    x, user, y = torch.randn(4, 4, 3), torch.tensor([0, 1, 1, 0]), torch.randint(4, (4,))

    def loss(rows: slice) -> Tensor:
        z = m(x[rows], user[rows])
        return z.square().sum() + z.sum() if flat else classes(z, y[rows])

    return Program(m, loss, 4)


@program(two=(2, True), three=(3, True), of_one_layer=(2, False))
def views_one_after_the_other(views: int, twice: bool) -> Program:
    """`torch.cat` of several rows for each sample, of calls of a net or behind one layer."""

    def forward(m: Net, *x: Tensor) -> Tensor:
        if twice:
            return torch.cat([m.last(m.first(each).tanh()) for each in x])
        h = m.first(x[0])
        return m.last(torch.cat([h, h.tanh()]))

    m = extend(Net(forward, first=nn.Linear(4, 3), last=nn.Linear(3, 3)))
    x, y = torch.randn(views, 2, 4), torch.randint(3, (views, 2))
    return Program(m, lambda rows: classes(m(*x[:, rows]), y[:, rows].flatten()), 2)


@program()
def one_row_of_a_model_that_has_the_time_first() -> Program:
    """All that depends on data is of the only sample, whichever axis layers take for that of the samples."""
    m = extend(Net(lambda m, x: m.net(x)[0].transpose(0, 1), net=nn.GRU(3, 2)))
    x, y = torch.randn(1, 4, 3), torch.randn(4, 1, 2)
    return Program(m, lambda rows: squares(m(x[rows]), y), 1, second=())


@program(shorter=(3, False), longer=(8, False), square=(4, False), square_of_linear_layers=(4, True))
def output_with_the_time_first(T: int, linear: bool) -> Program:
    """Outputs ``[T, N, C]``; where T = N, what layers get of the input shows which axis is which."""
    swapped = lambda *axes: Net(lambda _, x: x.transpose(*axes))  # noqa: E731
    first = [nn.Linear(3, 5), nn.Tanh()] if linear else [nn.Conv1d(3, 5, 1), nn.Tanh(), swapped(1, 2)]
    m = extend(nn.Sequential(*first, nn.Linear(5, 3), swapped(0, 1)))
    x, y = torch.randn(4, *((T, 3) if linear else (3, T))), torch.randint(3, (T, 4))
    return Program(m, lambda rows: classes(m(x[rows]).flatten(0, 1), y[:, rows].flatten()), 4)


@program(of_a_layer=(True,), of_a_function=(False,))
def as_many_classes_as_samples(layer: bool) -> Program:
    """Outputs ``[C, N]`` of a model whose input goes into a layer, or into a function first."""
    first = nn.Linear(3, 3) if layer else nn.Tanh()
    m = extend(Net(lambda m, x: m.last(m.first(x).tanh()).T, first=first, last=nn.Linear(3, 4)))
    x, y = torch.randn(4, 3), torch.randint(4, (4,))
    return Program(m, lambda rows: classes(m(x[rows]).T, y[rows]), 4)


@program(**{f"{T} steps{', in rows' if in_rows else ''}": (T, in_rows) for T in (3, 4) for in_rows in (False, True)})
def functions_of_sequences_of_which_time_comes_first(T: int, in_rows: bool) -> Program:
    """Products, biases, scales, positions, slopes and computed weights on ``[T, N, F]``, or on its rows."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        shape = x.shape
        h = x.reshape(-1, 4) if in_rows else x
        h = torch.tanh(h @ m.weight + m.bias) * m.scale
        h = (h.view(shape) + m.positions).view(h.shape)
        h = m.slope(m.normed(h)) * m.one
        h = h + torch.tanh(h @ (m.other * torch.ones(4, 4).triu()))
        return m.last(h.view(shape).sin().mean(0))

    shapes = {"weight": (4, 4), "other": (4, 4), "bias": (4,), "scale": (4,), "one": (1,), "positions": (T, 1, 4)}
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    m = extend(Net(forward, **parameters, normed=normed, slope=nn.PReLU(), last=nn.Linear(4, 3)))
    x, y = torch.randn(4, T, 4), torch.randint(3, (4,))
    return Program(m, lambda rows: classes(m(x[rows]), y[rows]), 4, second=[DiagGGNExact])


@program(**{f"{steps} along axis {axis}": (steps, axis, skip) for steps, skip in ((4, 0), (8, 1)) for axis in (0, 1)})
def trajectory(steps: int, axis: int, skipped: int) -> Program:
    """The states of a system over time, stacked along an axis, as solvers of differential equations return them."""

    def forward(m: Net, x: Tensor) -> Tensor:
        states = []
        for _ in range(steps + skipped):
            x = x + 0.3 * m.slope(x)
            states.append(x)
        return torch.stack(states, axis).narrow(axis, skipped, steps)

    m, x = extend(Net(forward, slope=mlp(2, 2))), torch.randn(4, 2)
    return Program(m, lambda rows: (m(x[rows]) - 1).square().mean(), 4, mean=True, second=[DiagGGNExact])


@program(**{
    f"{kind.__name__} {lengths}": (kind, lengths)
    for kind in (nn.LSTM, nn.RNN)
    for lengths in ([5, 2, 3, 2], [2, 4, 2, 4])
})  # fmt: skip
def packed_sentences(kind: type[nn.RNNBase], lengths: list[int]) -> Program:
    """Classes of sentences of several lengths: layers on their packed steps before and after a recurrent one."""

    def forward(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        steps, _ = m.net(packed._replace(data=m.norm(torch.tanh(m.inner(m.embed(packed.data))))))
        steps = steps._replace(data=torch.tanh(m.outer(steps.data)))
        return m.last(nn.utils.rnn.pad_packed_sequence(steps)[0].sum(0) / lengths[:, None])

    layers = {"embed": nn.Embedding(7, 4, padding_idx=2), "norm": nn.LayerNorm(4), "inner": nn.Linear(4, 4)}
    m = extend(Net(forward, **layers, net=kind(4, 4), outer=nn.Linear(4, 4), last=nn.Linear(4, 3)), batch_axis=1)
    x, y, of = torch.randint(7, (5, 4)), torch.randint(3, (4,)), torch.tensor(lengths)
    return Program(m, lambda rows: classes(m(x[:, rows], of[rows]), y[rows]), 4, second=[DiagGGNExact])


REORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda z: torch.cat([z, z.sin()]),
    "sorted": lambda z: z[z[:, 0].argsort()],
    "repeated": lambda z: z.repeat_interleave(2, 0),
    "unbound": lambda z: torch.stack(z.unbind(0)[::-1], 1).T,
    "transposed": lambda z: z.T.reshape(3, len(z) // 2, 2).permute(1, 2, 0).flatten(0, 1) if len(z) > 1 else z,
}


@program(**{name: (reorder,) for name, reorder in REORDERED.items()})
def reordered_before_the_loss(reorder: Callable[[Tensor], Tensor]) -> Program:
    m, x, t = extend(mlp()), torch.randn(4, 4), torch.randn(3)
    slow = reorder is REORDERED["twice"]  # a loss of any kind: of its Hessian in the output of the model

    def loss(rows: slice) -> Tensor:
        z = reorder(m(x[rows]))
        return squares(z, t.expand(z.shape))

    return Program(m, loss, 4, second=() if slow else (*GGN, *HESSIAN))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sample_is_a_row_of_the_models_input(name: str):
    p = PROGRAMS[name]()
    params = list(p.model.parameters())
    expected = gradients_of_each(p.parts(), params)
    with warnings.catch_warnings(), backpack(*(extension() for extension in FIRST_ORDER)):
        warnings.simplefilter("error", CurvoptWarning)
        p.total().backward()
    for i, (q, g) in enumerate(zip(params, expected, strict=True)):
        if q.grad is None:
            assert not hasattr(q, "grad_batch") and not g.any()
            continue
        assert_close(q.grad_batch, g, msg=lambda text, i=i: f"parameter {i}: {text}")
        assert_close(q.batch_l2, g.flatten(1).square().sum(1))
        assert_close(q.sum_grad_squared, g.square().sum(0))
        assert_close(q.variance, g.var(0, correction=0))
    with sdpa_kernel(SDPBackend.MATH):  # the other has no second derivative
        compare_second_order(p, params)


def compare_second_order(p: Program, params: list[nn.Parameter]) -> None:
    hessians = [hessian_diagonals(part, params) for part in p.parts()] if DiagHessian in p.second else []
    alone = []
    for part in p.parts() if DiagGGNExact in p.second else ():
        with backpack(DiagGGNExact()):
            part.backward()
        alone.append([getattr(q, "diag_ggn_exact", torch.zeros_like(q)) for q in params])
    if p.second:
        with backpack(*(KFLR(approx="reduce") if extension is KFLR else extension() for extension in p.second)):
            p.total().backward()
    for i, q in enumerate(params):
        if hessians:
            hessian = torch.stack([diagonals[i] for diagonals in hessians])
            assert_close(q.diag_h_batch, hessian)
            assert_close(q.diag_h, hessian.sum(0))
        if alone:
            ggn = torch.stack([fields[i] for fields in alone])
            assert_close(q.diag_ggn_exact, ggn.sum(0))
        if GGNMP in p.second:
            assert_close(q.diag_ggn_exact_batch, ggn)
            assert_close(q.sqrt_ggn_exact.square().sum(0), ggn)
            of_ends = [q.ggnmp(torch.eye(q.numel())[k].view(1, *q.shape)).flatten()[k] for k in (0, -1)]
            assert_close(torch.stack(of_ends), ggn.sum(0).flatten()[[0, -1]])


# --------------------------------------------------------- batches of different lengths: as if their rows were appended


@pytest.mark.parametrize("sizes", [(6, 4), (3, 6), (1, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("loss", [F.mse_loss, F.cross_entropy], ids=["values", "classes"])
def test_unequal_batches_are_appended(sizes: tuple[int, ...], loss: Callable):
    m = extend(mlp())
    params = list(m.parameters())
    batches = [(torch.randn(k, 4), torch.randn(k, 3) if loss is F.mse_loss else torch.randint(3, (k,))) for k in sizes]

    def fields(*batches: tuple[Tensor, Tensor]) -> list[list[Tensor]]:
        with backpack(DiagGGNExact(), DiagHessian(), GGNMP(), KFLR()):
            sum(loss(m(x), y) for x, y in batches).backward()
        return [[p.diag_ggn_exact, p.diag_h, p.ggnmp(torch.ones_like(p)), *p.kflr] for p in params]

    alone, shares = [fields(batch) for batch in batches], torch.tensor(sizes) / sum(sizes)
    for together, *each in zip(fields(*batches), *alone, strict=True):
        for k, (field, *parts) in enumerate(zip(together, *each, strict=True)):
            weights = shares if k == 4 else torch.ones(len(sizes))  # the factor of inputs is a mean
            assert_close(field, torch.einsum("b,b...->...", weights, torch.stack(parts)))


@pytest.mark.parametrize("extension", [*FIRST_ORDER, BatchDiagGGNExact])
def test_unequal_batches_keep_no_samples_apart(extension: type):
    m = extend(mlp())
    with pytest.raises(CurvoptError, match=f"{extension.field} keeps samples apart.*different lengths"):
        with backpack(extension()):
            sum(F.mse_loss(m(torch.randn(k, 4)), torch.zeros(k, 3)) for k in (6, 4)).backward()


# --------------------------------------------------------------------------------------------------------- named errors


def pooled(of: Callable[[Tensor], Tensor], features: int = 3) -> Callable[[], Tensor]:
    """Several rows for each sample, in an order that no layer tells."""
    return lambda: (
        extend(Net(lambda m, x: of(m.body(x)), body=nn.Linear(4, features)))(torch.randn(6, 4)).square().sum()
    )


def rows_in_a_loop() -> Tensor:
    m = extend(mlp())
    return F.mse_loss(torch.cat([m(torch.randn(1, 4)) for _ in range(3)]), torch.zeros(3, 3))


def stacked_rows() -> Tensor:
    def forward(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(m.body(x))
        return m.image(h), m.region(torch.stack([scale * row for row in h for scale in (1, 2)]))

    model = extend(Net(forward, body=nn.Linear(4, 6), image=nn.Linear(6, 3), region=nn.Linear(6, 3)))
    return sum(out.sum() for out in model(torch.randn(3, 4)))


def points_of_its_own() -> Tensor:
    points = torch.randn(5, 4, requires_grad=True)
    forward = lambda m: torch.autograd.grad(m.net(points).sum(), points, create_graph=True)[0].square().mean()  # noqa: E731
    return extend(Net(forward, net=mlp()))()


ERRORS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "statistics of as many features as rows": (
        pooled(lambda h: torch.stack([h.mean(0), h.std(0), h.amax(0)]), features=6),
        r"6 samples along axis 0.*\[3, 6\]",
    ),
    "mean over the batch": (pooled(lambda h: h.mean(0)), r"6 samples.*\[3\]"),
    "more rows": (pooled(lambda h: torch.cat([h, h[:2]])), r"6 samples along axis 0.*\[8, 3\]"),
    "rows of another head that were stacked": (stacked_rows, r"called with 3 samples.*shape \[6, 3\]"),
    "rows in a loop": (rows_in_a_loop, "called 3 times with one row each.*stack the rows"),
    "time first": (
        lambda: extend(Net(lambda m, x: m.net(x).mean(0), net=time_first()))(torch.randn(4, 5, 3)).square().sum(),
        r"4 samples along axis 0.*\[5, 3\].*batch_axis=1",
    ),
    "no inputs": (points_of_its_own, r"called without tensors.*extend\(model.network\)"),
    "empty batch": (lambda: extend(mlp())(torch.randn(0, 4)).sum(), "batch is empty"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_ambiguities_are_named(name: str):
    make, message = ERRORS[name]
    loss = make()
    with pytest.raises(CurvoptError, match=f"(?s){message}") as error, backpack(BatchGrad()):
        loss.backward()
    assert str(error.value).count(". ") <= 2


# ----------------------------------------------------------------------------------------- several models and contexts


def are_individual_gradients(z: Tensor, y: Tensor, p: Tensor) -> None:
    (expected,) = gradients_of_each(F.cross_entropy(z, y, reduction="none") / len(y), [p])
    assert_close(p.grad_batch, expected)


def test_fields_of_an_earlier_batch_are_removed():
    def forward(m: Net, x: Tensor, route: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(m.experts):
            if (route == k).any():
                out[route == k] = expert(x[route == k])
        return out

    m = extend(Net(forward, experts=nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])))
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    for route in map(torch.tensor, ([0, 1, 0, 1], [0, 0, 0, 0])):
        with backpack(BatchGrad(), DiagGGNExact(), KFAC(), KFACEmpirical()):
            F.cross_entropy(m(x, route), y).backward()
        fields = ("grad_batch", "diag_ggn_exact", "kfac", "kfac_empirical")
        assert any(hasattr(p, f) for p in m.experts[1].parameters() for f in fields) == bool((route == 1).any())
        are_individual_gradients(m(x, route), y, m.experts[0].weight)


@pytest.mark.parametrize("detached", [False, True])
def test_fields_of_heads_that_share_a_forward_stay(detached: bool):
    body, *heads = extend(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)]))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))

    def backward(*used: nn.Module) -> list[bool]:
        features = body(x).detach() if detached else body(x)
        for output in [head(features) for head in used]:
            with backpack(BatchGrad(), DiagGGNExact()):
                F.cross_entropy(output, y).backward(retain_graph=True)
        return [hasattr(head.weight, "grad_batch") and hasattr(head.bias, "diag_ggn_exact") for head in heads]

    assert backward(*heads) == [True, True]
    are_individual_gradients(heads[0](body(x)), y, heads[0].weight)
    assert backward(heads[1]) == [False, True]


def test_a_pass_through_a_part_of_a_model_removes_the_fields_of_all_of_it():
    model, y = extend(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))), torch.randint(3, (5,))
    for part in (model, model[1]):
        with backpack(BatchGrad()):
            F.cross_entropy(part(torch.randn(5, 4)), y).backward()
    assert [hasattr(layer.weight, "grad_batch") for layer in model] == [False, True]


def mixed(mix: Callable[[Tensor], Tensor]) -> tuple[nn.ModuleList, Callable[[], Tensor]]:
    """Two models, and a loss of the second one of what is done with the output of the first."""
    models, x = extend(nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 3)])), torch.randn(4, 2)
    return models, lambda: F.cross_entropy(models[1](mix(models[0](x)).tanh()), Y)


def test_samples_that_meet_between_two_models():
    """The first model's samples are seen through the second one."""
    models, loss = mixed(lambda h: h - h.mean(0))
    p = models[0].bias
    with backpack(DiagHessian()):
        loss().backward()
    assert_close(p.diag_h, hessian_diagonals(loss(), [p])[0])


def test_batch_norm_between_two_outputs():
    """Of two models, or of one."""
    _, between = mixed(nn.BatchNorm1d(3))
    layers = {"first": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "last": nn.Linear(3, 3)}
    neck = extend(Net(lambda m, x: (m.last(m.norm(m.first(x))), m.first(x)), **layers))

    def inside() -> Tensor:
        logits, features = neck(torch.randn(4, 2))
        return F.cross_entropy(logits, Y) + features.square().mean()

    for loss in (between, inside):
        with pytest.raises(CurvoptError, match="train-mode batch norm"), backpack(DiagHessian()):
            loss().backward()


@pytest.mark.parametrize(
    "program",
    [
        lambda mark, first, last, x: mark(first(x) + last(x)),
        lambda mark, first, last, x: mark(last(mark(first(x)).tanh())),
        lambda mark, first, last, x: last(mark(first(x))),
        lambda mark, first, last, x: mark(last(torch.cat([mark(first(x)), x]))),
    ],
    ids=["a sum", "behind a mark", "behind an output", "with other rows"],
)
def test_marks_of_what_two_models_compute_change_nothing(program: Callable[..., Tensor]):
    """Where what is marked is what the loss is split at in any case."""
    models, x = [extend(nn.Linear(3, 3)), extend(nn.Linear(3, 3))], torch.randn(4, 3)
    fields = []
    for mark in (lambda z: z, prediction):
        with backpack(BatchGrad(), DiagGGNExact()):
            program(mark, *models, x).square().mean().backward()
        fields.append([(m.weight.grad_batch, m.weight.diag_ggn_exact) for m in models])
    assert_close(fields[1], fields[0])


def test_a_mark_without_rows_is_named():
    model = extend(nn.Linear(3, 3))
    with pytest.raises(CurvoptError, match=r"\[1, 3\].* is marked by curvopt.prediction"), backpack(BatchGrad()):
        prediction(model(torch.randn(4, 3)).mean(0, keepdim=True)).square().sum().backward()
