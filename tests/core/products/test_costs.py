"""Every algorithm of a reduction gives the same, whichever the sizes would choose.

Tests of `core/products/base.py`, `core/products/lookup.py`, `core/products/outer.py` and `core/products/sums.py`.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import Calls, assert_same
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import backpack, extend, set_columns_per_sweep
from curvopt.core.products import costs, sums
from curvopt.core.products.base import Dense, Jacobian, second_moment
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer, Patches, Squares
from curvopt.core.products.sums import Slopes, Tied, combine
from curvopt.core.record import KEY
from curvopt.extending import rule_for
from curvopt.extensions import KFLR, BatchDiagGGNExact, BatchGrad, DiagGGNExact, KFACEmpirical, SqrtGGNExact
from curvopt.kroneckers import kfacs_to_mat


def outer(
    V: int,
    S: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    G: int = 1,
    transposed: bool = False,
    weighted: bool = False,
) -> Outer:
    """Random products of 5 samples, with positions last in memory as convolutions have them."""
    left, right = torch.randn(V, 5, G, O, S).double().mT, torch.randn(G, I, 5, S).double().permute(2, 0, 3, 1)
    sides = (I, O) if transposed else (O, I)
    result = Outer(left, right, torch.Size((G * sides[0], sides[1])), transposed)
    if weighted:
        result.weights = torch.randn(V, 5).double()
    return result


def multiplied(jacobian: Outer) -> Dense:
    """The same, multiplied out by einsum."""
    J = torch.einsum("vngso,ngsi->vngoi", jacobian.left, jacobian.right)
    J = J.mT if jacobian.transposed else J
    result = Dense(J.reshape(*J.shape[:2], *jacobian.shape))
    result.weights = jacobian.weights
    return result


REDUCTIONS = [
    *map(methodcaller, ["dense", "sum_batch", "squares", "norms2"]),
    methodcaller("squares", per_sample=True),
]
# decisions of the cost model, each forced both ways
CHOICES = {
    "chosen": {},
    "pairs": {"by_pairs": lambda *sizes: True},
    "no pairs": {"by_pairs": lambda *sizes: False},
    "gram": {"by_gram": lambda *sizes: True},
    "no gram": {"by_gram": lambda *sizes: False},
    "one sample": {"by_pairs": lambda *sizes: False, "by_gram": lambda *sizes: False, "samples_at_once": lambda *_: 1},
    "some samples": {
        "by_pairs": lambda *sizes: False,
        "by_gram": lambda *sizes: False,
        "samples_at_once": lambda *_: 2,
    },
    "pairs of some": {"by_pairs": lambda *sizes: True, "samples_at_once": lambda *_: 2},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 3, 2),
        (4, 1, 3, 2),
        (1, 4, 3, 2),
        (3, 4, 3, 2),
        (2, 3, 3, 2, 2),
        (2, 1, 3, 2, 2, True),
        (2, 3, 3, 2, 2, True),
    ],
    ids=lambda sizes: ",".join(str(int(size)) for size in sizes),
)
def test_algorithms_agree(sizes: tuple, choice: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in CHOICES[choice].items():
        monkeypatch.setattr(costs, name, value)
    if sizes[1] == 1:  # there are no pairs of one position to choose
        monkeypatch.setattr(costs, "by_pairs", lambda *sizes: True)
    for weighted, grad in itertools.product([False, True], repeat=2):
        jacobian = outer(*sizes, weighted=weighted)
        expected = [reduction(multiplied(jacobian)) for reduction in REDUCTIONS]
        with torch.set_grad_enabled(grad):
            found = [reduction(jacobian) for reduction in REDUCTIONS]
            if jacobian.V == 1:
                assert_same(jacobian.moments(), multiplied(jacobian).moments())
        assert_same(found, expected)
        assert grad or all(value.is_contiguous() for value in found)


@pytest.mark.parametrize("shape", [(7, 1, 3, 5), (7, 2, 1, 4), (3, 1, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_symmetric_products_by_blocks(shape: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "by_blocks", lambda *sizes: True)
    monkeypatch.setattr(costs, "SYMMETRIC_BLOCK", 2)
    rows = torch.randn(shape).to(dtype)
    expected = torch.einsum("ngsi,ngsj->gij", rows.double(), rows.double()) / 3
    with torch.no_grad():
        moment = second_moment(rows, scale=1 / 3).double().reshape(expected.shape)
    rtol, atol = (1e-7, 0.0) if dtype == torch.float64 else (0.02, 0.05)
    assert_close(moment, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("later", [(), (False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 9, 3, 5), (2, 4, 3, 5), (1, 1, 3, 5), (2, 4, 3, 5, 2), (1, 9, 3, 5, 2, True)], ids=str
)
def test_squares_in_other_bases(sizes: tuple, blocks: bool, later: tuple, monkeypatch: pytest.MonkeyPatch):
    """Sides change their basis, or products do, whatever costs less."""
    jacobian = outer(*sizes, weighted=blocks)
    G = jacobian.G
    if later:
        answers = itertools.cycle(later)
        monkeypatch.setattr(costs, "in_basis_later", lambda *sizes: next(answers))
    if jacobian.S > 1:
        monkeypatch.setattr(costs, "by_pairs", lambda *sizes: False)
    of_left, first, second = (torch.linalg.qr(torch.randn(G, size, size).double())[0] for size in (3, 3, 2))
    whole = torch.stack([torch.block_diag(*each) for each in zip(first, second, strict=True)])
    padded = torch.stack([torch.block_diag(each, torch.ones(1, 1).double()) for each in second])
    of_right = torch.stack([first, padded], 1) if blocks else whole
    given, bases = [of_left, of_right], [of_left, whole]
    given, bases = (each[::-1] if jacobian.transposed else each for each in (given, bases))
    given = given if G > 1 else [each[0] if each.dim() == 3 else each for each in given]
    J = multiplied(jacobian).dense().flatten(2) @ kfacs_to_mat(bases)
    expected = Dense(J.unflatten(2, jacobian.shape)).with_weights(jacobian.weights).squares()
    with torch.no_grad():
        assert_close(jacobian.squares_in(given), expected)
        # the pass may have less precision than the parameters
        left, right = jacobian.left.float(), jacobian.right.float()
        low = jacobian.with_sides(left, right, jacobian.shape, jacobian.transposed).with_weights(jacobian.weights)
        assert_close(low.squares_in(given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("conv", "shape", "views"),
    [
        (nn.Conv1d(2, 3, 3, padding=2, dilation=2), (9,), True),
        (nn.Conv2d(2, 3, 3, padding=1), (5, 6), True),
        (nn.Conv2d(4, 6, (2, 3), (1, 2), dilation=(2, 1), groups=2), (6, 7), True),
        (nn.Conv2d(2, 3, (3, 1)), (5, 4), True),
        (nn.Conv2d(2, 3, 3, 2), (7, 7), False),
        (nn.Conv2d(2, 3, (1, 3)), (4, 5), False),
        (nn.Conv3d(2, 2, (2, 2, 3), padding=1, dilation=(1, 2, 1)), (3, 4, 4), True),
    ],
    ids=str,
)
def test_convolutions_by_views_of_their_input(
    conv: nn.Module, shape: tuple, views: bool, monkeypatch: pytest.MonkeyPatch
):
    """Sums of squares and norms without putting the patches together, and then the patches."""
    for weighted, rows in itertools.product([False, True], [1, 2]):
        with monkeypatch.context() as patched:
            products_are_those_of_views(conv, shape, views, weighted, rows, patched)


def products_are_those_of_views(
    conv: nn.Module, shape: tuple, views: bool, weighted: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: False)
    monkeypatch.setattr(costs, "by_gram", lambda *sizes: False)
    monkeypatch.setattr(costs, "samples_at_once", lambda *sizes: 1)
    conv = extend(conv.double())
    x = torch.randn(3 * rows, conv.weight.shape[1] * conv.groups, *shape).double()
    z = conv(x)
    use = z.grad_fn.metadata[KEY][0][0]
    vectors = torch.randn(2, *use.shapes[0]).double()
    of_sample = [slice(n * rows, (n + 1) * rows) for n in range(3)]
    jacobian = rule_for(conv).jac_t(use, [vectors], ["weight"], 3)["weight"]
    jacobian.weights = torch.randn(2, 3).double() if weighted else None
    J = torch.stack(
        [torch.autograd.grad(conv(x[n]), conv.weight, vectors[v, n])[0] for v in range(2) for n in of_sample]
    ).unflatten(0, (2, 3))
    expected = Dense(J)
    expected.weights = jacobian.weights
    with torch.no_grad():
        for name in ("squares", "norms2"):
            assert_same(getattr(jacobian, name)(), getattr(expected, name)())
        of_one = rule_for(conv).jac_t(use, [vectors[:1]], ["weight"], 3)["weight"]
        assert_same(of_one.moments(), Dense(J[:1]).moments())
        assert ("whole" not in vars(use.cache["right of 3"])) == (views and rows == 1)
        for reduction in REDUCTIONS:
            assert_same(reduction(jacobian), reduction(expected))
        monkeypatch.setattr(costs, "rows_at_once", lambda *sizes: 2)
        jacobian = jacobian.with_own_patches()
        assert_same(jacobian.dense(), J)
        assert_same(jacobian.select([2, 0]).dense(), J[:, [2, 0]])
        assert "whole" not in vars(jacobian._right)


@pytest.mark.parametrize("channels", [16, 64])
def test_small_products_of_convolutions_do_not_put_all_patches_together(channels: int):
    conv = extend(nn.Conv2d(channels, channels, 3))
    z = conv(torch.randn(4, channels, 25, 25))
    use = z.grad_fn.metadata[KEY][0][0]
    with torch.no_grad():
        squares = rule_for(conv).jac_t(use, [torch.randn(1, *z.shape)], ["weight"], 4)["weight"].squares()
    assert 4 * squares.numel() < costs.CACHED_ENTRIES
    assert "whole" not in vars(use.cache["right of 4"])


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_second_moments_in_half_precision(
    half: torch.dtype, groups: int, by_rows: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of many parts, of which each would vanish in the sum of the others, and over more positions than float16 has."""
    monkeypatch.setattr(costs, "by_rows", lambda *sizes: by_rows)
    monkeypatch.setattr(costs, "rows_at_once", lambda *sizes: 1)
    conv, x = nn.Conv2d(2 * groups, 4, 3, padding=1, groups=groups), torch.randn(1200, 2 * groups, 8, 8).to(half)
    right = rule_for(conv).unfold(conv, x).used_once()
    left = (1 / 8 * torch.randn(1, 1200, groups, 4 // groups, 64)).to(half).mT  # as it arrives: positions come last
    jacobian = Outer(left, right, conv.weight.shape)
    exact = Outer(left.double(), right.whole.double(), conv.weight.shape)
    for graph, limit in itertools.product([False, True], [None, 8]):
        with torch.set_grad_enabled(graph):
            found = jacobian.input_factor(limit=limit), jacobian.output_factor()
        for moment, expected in zip(found, (exact.input_factor(limit=limit), exact.output_factor()), strict=True):
            assert moment.dtype == half
            assert_close(moment.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.max()))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("pairs", [True, False])
def test_squares_of_chunks(pairs: bool, per_sample: bool, monkeypatch: pytest.MonkeyPatch):
    """Chunks that share their right side, then some with another, some multiplied out, and the first kind again."""
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: pairs)
    first, other = outer(2, 3, 4, 2), outer(1, 2, 4, 2)
    more = [Outer(torch.randn_like(first.left), first.right, first.shape) for _ in range(4)]
    more[2].weights, more[3].weights = torch.randn(2, 2, 5).double()
    chunks: list[Jacobian] = [first, more[0], other, Dense(torch.randn(2, 5, 4, 2).double()), *more[1:]]
    squares, expected = Squares(per_sample), torch.zeros((5, 4, 2) if per_sample else (4, 2)).double()
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            squares.add(chunk)
            values = chunk.dense().square() * (1 if chunk.weights is None else chunk.weights[..., None, None])
            expected += values.sum(0 if per_sample else (0, 1))
            if i in (1, 5):
                assert_same(squares.total(), expected)
    assert_same(squares.total(), expected)


def test_small_squares_in_half_precision_add_up(monkeypatch: pytest.MonkeyPatch):
    """Each would round to zero."""
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: False)
    squares, side = Squares(), torch.full((1, 1, 1, 2, 3), 2**-7, dtype=torch.float16)
    with torch.no_grad():
        for _ in range(1 << 10):
            squares.add(Outer(side, side[0], torch.Size((3, 3))))
    assert_close(squares.total(), torch.full((3, 3), 2.0**-16, dtype=torch.float16))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_sides_of_any_layout(transposed: bool):
    """Gradients of sums are expanded, those of slices lie apart."""
    values, features = torch.randn(2, 5, 1, 4, 6).double(), torch.randn(2, 5, 1, 6, 4).double().mT
    shape = torch.Size((4, 3) if transposed else (3, 4))
    for left in (
        values[..., 1:4],
        features[..., 1:4],
        values[..., :1].expand(-1, -1, -1, -1, 3),
        values[:, :, :, :1, :3].expand(-1, -1, -1, 4, -1),
        values[:1, :1, :, :1, :1].expand(2, 5, 1, 4, 3),
    ):
        for right in (values[0, ..., 2:], features[0, ..., 2:], values[0, :1, ..., 2:].expand(5, -1, -1, -1)):
            jacobian = Outer(left, right, shape, transposed)
            with torch.no_grad():
                for reduction in REDUCTIONS:
                    assert_same(reduction(jacobian), reduction(multiplied(jacobian)))


@pytest.mark.parametrize("step", [1, 3, 99])
def test_second_moments_of_positions(step: int, monkeypatch: pytest.MonkeyPatch):
    """A few samples at a time."""
    monkeypatch.setattr(costs, "rows_at_once", lambda *args: step)
    for jacobian in (outer(2, 4, 3, 2), outer(1, 3, 3, 2, 2)):
        expected = torch.einsum("vngso,vngsp->gop", jacobian.left, jacobian.left)
        with torch.no_grad():
            assert_same(jacobian.output_factor(), expected if jacobian.G > 1 else expected[0])


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 4, (2, 4), padding=(0, 1), groups=2),
        nn.Conv1d(2, 3, 2),
        nn.Conv3d(1, 2, (1, 2, 3), stride=(1, 2, 1)),
        nn.Conv2d(2, 3, (5, 2)),
        nn.Conv2d(2, 3, 3, dilation=(2, 1)),
        nn.Conv2d(2, 3, (3, 4), padding="same", padding_mode="circular"),
        nn.Conv3d(4, 2, (2, 3, 2), stride=(2, 1, 1), padding=1, groups=2),
        nn.Conv2d(2, 3, 1),
    ],
    ids=str,
)
def test_second_moments_of_patches_of_a_few_samples_at_a_time(conv: nn.Module, monkeypatch: pytest.MonkeyPatch):
    extend(conv.double())
    rows_at_once = costs.rows_at_once
    for by_rows, samples, rows in itertools.product([False, True], [1, 3], [1, 2]):
        monkeypatch.setattr(costs, "rows_at_once", rows_at_once)
        z = conv(torch.randn(4, conv.in_channels, *[5, 6, 7][5 - conv.weight.dim() :]).double())
        assert z.grad_fn is not None
        use = z.grad_fn.metadata[KEY][0][0]
        second_moments_agree(conv, z.detach(), use, by_rows, samples, rows, monkeypatch)


def second_moments_agree(
    conv: nn.Module, z: Tensor, use: Any, by_rows: bool, samples: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    with torch.no_grad():
        jacobian = rule_for(conv).jac_t(use, [torch.ones_like(z)[None]], ["weight"], 4 // rows)["weight"]
        assert isinstance(jacobian, Outer) and isinstance(jacobian._right, Patches)
        expected = Outer(jacobian.left, jacobian.right, jacobian.shape).input_factor()
        monkeypatch.setattr(costs, "rows_at_once", lambda *sizes: samples)
        monkeypatch.setattr(costs, "by_rows", lambda *sizes: by_rows)
        jacobian = jacobian.with_own_patches()
        # else some entries of the kernel have no rows in common
        tall = conv.stride[0] > 1 or z.shape[2] >= conv.dilation[0] * (conv.kernel_size[0] - 1)
        assert (jacobian._right.moment_by_rows() is not None) == (by_rows and tall)
        assert_same(jacobian.input_factor(), expected)


@pytest.mark.parametrize("last", [False, True])
def test_small_moments_of_patches_are_not_lost_beside_large_edges(last: bool, monkeypatch: pytest.MonkeyPatch):
    """Entries of the kernel that do not see the first, or last, row keep their precision."""
    conv, x, factors = nn.Conv2d(3, 2, 3, padding=1), torch.randn(4, 3, 8, 8), []
    x[:, :, -1 if last else 0].mul_(1e4)
    for by_rows, dtype in ((True, torch.float32), (False, torch.float64)):
        monkeypatch.setattr(costs, "by_rows", lambda *sizes, by_rows=by_rows: by_rows)
        model = extend(copy.deepcopy(conv).to(dtype))
        with backpack(KFACEmpirical()):
            z = model(x.to(dtype))
            F.mse_loss(z, torch.zeros_like(z)).backward()
        factors.append(model.weight.kfac_empirical[1].double())
    scale = factors[1].diagonal().rsqrt()
    torch.testing.assert_close(*(scale[:, None] * factor * scale for factor in factors), rtol=0, atol=1e-5)


def test_squares_by_pairs_are_not_negative(monkeypatch: pytest.MonkeyPatch):
    """Where positions cancel, as behind an instance norm, sums of terms of both signs round."""
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.Tanh(), nn.Flatten())
    model = extend(model.append(nn.Linear(64, 5)))
    with backpack(BatchDiagGGNExact(), DiagGGNExact()):
        F.cross_entropy(model(1000 + torch.randn(8, 8, 2, 2)), torch.arange(8) % 5).backward()
    assert model[0].weight.diag_ggn_exact_batch.min() >= 0 and model[0].weight.diag_ggn_exact.min() >= 0


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("V", "S"), [(1, 3), (9, 6)])
def test_few_positions_are_not_multiplied_out_for_each_vector(V: int, S: int, per_sample: bool):
    jacobian = outer(V, S, 64, 64)
    with torch.no_grad(), Calls() as calls:
        Squares(per_sample).add(jacobian).total()
    size = 64 * 64 * (jacobian.N if per_sample else 1)
    assert sum(entries for name, entries in calls.entries if name in ("mm", "bmm")) == size


@pytest.mark.parametrize("columns", [None, 1, 2])
@pytest.mark.parametrize("layer", [nn.Embedding(500, 7), nn.Linear(7, 500)])
def test_results_of_the_size_of_a_batch_are_not_copied(layer: nn.Module, columns: int | None) -> None:
    model, lossfunc = extend(nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(4))), extend(nn.CrossEntropyLoss())
    inputs = torch.arange(10).view(5, 2) if isinstance(layer, nn.Embedding) else torch.randn(5, 7)
    extensions = [BatchGrad(), SqrtGGNExact()]
    set_columns_per_sweep(columns)
    try:
        loss = lossfunc(model(inputs), torch.zeros(5, dtype=torch.long))
        with backpack(*extensions), Calls() as calls:
            loss.backward()
    finally:
        set_columns_per_sweep(None)
    size = 5 * layer.weight.numel()
    copied = [name for name, entries in calls.entries if entries >= size and name in ("cat", "clone", "index_add")]
    assert not copied
    assert layer.weight.sqrt_ggn_exact.shape == (4, 5, *layer.weight.shape)  # type: ignore[attr-defined]


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_share_the_calls_for_second_moments(conv: type[nn.Module]) -> None:
    def calls(groups: int) -> int:
        model = extend(nn.Sequential(conv(8, 8, 3, groups=groups), nn.Flatten(), nn.LazyLinear(2)))
        x, lossfunc = torch.randn(4, 8, 8, 8), extend(nn.CrossEntropyLoss())
        for counted in (False, False, True):  # the first two look for the samples, too
            loss = lossfunc(model(x), torch.zeros(4, dtype=torch.long))
            with backpack(KFLR()), Calls() if counted else nullcontext() as found:
                loss.backward()
        return len(found.entries)

    assert calls(8) == calls(2) <= calls(1) + 20


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("picked", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 1, 2]])
def test_an_embedding_that_is_also_the_output_layer(picked: list[int], weighted: bool):
    V, N, S, R, D = 2, 3, 4, 5, 20
    outer = Outer(torch.randn(V, N, 1, S, R), torch.randn(N, 1, S, D), torch.Size([R, D]))
    lookup = Lookup(torch.randn(V, 6, D), torch.tensor([4, 4, 0, 1, 2, 0]), torch.tensor(picked), N, torch.Size([R, D]))
    jacobian = combine([lookup, outer])
    assert isinstance(jacobian, Tied) == (picked[0] == 0)
    expected = Dense(outer.dense() + lookup.dense())
    if weighted:
        weights = torch.randn(V, N)
        jacobian, expected = jacobian.with_weights(weights), expected.with_weights(weights)
    directions, coefficients = torch.randn(3, R, D), torch.randn(3, V, N)
    for of in (
        lambda j: j.dense(),
        lambda j: j.sum_batch(),
        lambda j: j.squares(),
        lambda j: j.squares(per_sample=True),
        lambda j: j.norms2(),
        lambda j: j.output_factor(),
        lambda j: j.project(directions),
        lambda j: j.expand(coefficients),
        lambda j: j.select([2, 0]).dense(),
        lambda j: j.owned().squares(),
    ):
        assert_close(of(jacobian), of(expected))


@pytest.mark.parametrize("N", [3, 600, 1200])  # of many samples factors take some
def test_slopes_of_a_layer_share_its_kronecker_factors(N: int):
    """``(sum l r^T) = (sum r l^T)^T``: exact products, and nearly the nearest Kronecker product for all scales."""
    S, R, D = 2, 4, 5
    plain = Outer(torch.randn(1, N, 1, S, R), torch.randn(N, 1, S, D), torch.Size([R, D]))
    slope = Outer(1e3 * torch.randn(1, N, 1, S, D), torch.randn(N, 1, S, R), torch.Size([R, D]), transposed=True)
    both = combine([slope, plain])
    assert isinstance(both, Slopes) and not both.transposed
    assert_close(both.dense(), slope.dense() + plain.dense())
    B, A = both.output_factor(), both.input_factor()
    assert_close(A.trace(), plain.input_factor().trace())
    G = both.dense().flatten(0, 1).flatten(1)
    block = G.mT @ G
    assert_close(B.trace() * A.trace(), block.trace())
    values = torch.linalg.svdvals(block.view(R, D, R, D).transpose(1, 2).reshape(R * R, D * D))
    K = torch.kron(B.contiguous(), A.contiguous())
    assert (K * block).sum() / K.norm() / block.norm() > 0.99 * values[0] / values.norm()
    scaled = combine([Outer(1e3 * slope.left, slope.right / 1e3, slope.shape, transposed=True), plain])
    of_rounding = {"rtol": 1e-5 if N < 512 else 1e-2, "atol": 0.0}  # which samples are drawn may hang on it
    assert_close(scaled.output_factor(), B, **of_rounding)
    assert_close(scaled.input_factor(), A, **of_rounding)


def test_slopes_in_blocks():
    """Blocks are those of the whole factor where the other side is whole."""
    plain = Outer(torch.randn(1, 3, 1, 2, 5), torch.randn(3, 1, 2, 2), torch.Size([5, 2]))
    slope = Outer(torch.randn(1, 3, 1, 2, 2), torch.randn(3, 1, 2, 5), torch.Size([5, 2]), transposed=True)
    both = combine([slope, plain])
    blocks, A = both.output_factor(limit=4), both.input_factor(limit=4)
    assert blocks.shape == (1, 2, 3, 3) and not blocks[0, 1, 2].any()  # padded
    assert_close(blocks.diagonal(dim1=-2, dim2=-1).sum() * A.trace(), both.norms2().sum())
    whole = both.output_factor()
    assert_close(blocks[0, 0] / blocks[0, 0].trace(), whole[:3, :3] / whole[:3, :3].trace(), rtol=0.2, atol=0.05)


def test_few_samples_that_weigh_much_are_in_the_factors_of_slopes(monkeypatch: pytest.MonkeyPatch):
    """Two points of a boundary are half of the curvature of 2,000."""
    N, F = 2000, 4
    vectors = torch.randn(2, 1, N, 1, 1, F)
    vectors[..., :2, 0, 0, :] = 30 * torch.eye(F)[:2]
    plain = Outer(vectors[0], torch.randn(N, 1, 1, F), torch.Size([F, F]))
    slope = Outer(vectors[1], torch.randn(N, 1, 1, F), torch.Size([F, F]), transposed=True)
    drawn, whole = combine([plain, slope]), combine([plain, slope])
    factors = drawn.output_factor(), drawn.input_factor()
    monkeypatch.setattr(sums, "ENOUGH_SAMPLES", N)
    for factor, expected in zip(factors, (whole.output_factor(), whole.input_factor()), strict=True):
        assert_close(factor / expected.trace(), expected / expected.trace(), rtol=0.0, atol=0.05)
        assert not torch.equal(factor, expected)


def test_samples_of_a_factor_of_slopes_follow_no_grid():
    """Of a grid in space and time they are of all times."""
    right = torch.cartesian_prod(torch.linspace(0, 1, 256), torch.linspace(0, 1, 16)).view(-1, 1, 1, 2)
    plain = Outer(torch.randn(1, 4096, 1, 1, 3), right, torch.Size([3, 2]))
    slope = Outer(1e-3 * torch.randn(1, 4096, 1, 1, 2), torch.randn(4096, 1, 1, 3), torch.Size([3, 2]), transposed=True)
    both = combine([slope, plain])
    assert isinstance(both, Slopes)
    assert_close(both.input_factor(), plain.input_factor(), rtol=0.2, atol=0.0)
