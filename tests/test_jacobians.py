"""Every algorithm of a reduction gives the same, whichever the sizes would choose."""

from __future__ import annotations

import copy
import functools
import mmap
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvopt import backpack, extend
from curvopt.core import costs, onednn
from curvopt.core.derivatives import rule_for
from curvopt.core.jacobians import Computed, Dense, Jacobian, Outer, Patches, Scaled, Squares, combine
from curvopt.core.products import add_product, add_products, product
from curvopt.core.saved import inputs_left
from curvopt.core.sweep import Pass, set_columns_per_sweep
from curvopt.core.uses import KEY
from curvopt.extensions import KFLR, BatchDiagGGNExact, BatchGrad, DiagGGNExact, KFACEmpirical, SqrtGGNExact


class Calls(TorchDispatchMode):
    """The operations, and how many entries each gives."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        entries = sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.entries.append((str(func).split(".")[1], entries))
        return result


def outer(
    V: int,
    S: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    G: int = 1,
    transposed: bool = False,
    weighted: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Outer:
    """Random products of 5 samples, with positions last in memory as convolutions have them."""
    left, right = torch.randn(V, 5, G, O, S).to(dtype).mT, torch.randn(G, I, 5, S).to(dtype).permute(2, 0, 3, 1)
    sides = (I, O) if transposed else (O, I)
    result = Outer(left, right, torch.Size((G * sides[0], sides[1])), transposed)
    if weighted:
        result.weights = torch.randn(V, 5).to(dtype)
    return result


def multiplied(jacobian: Outer) -> Dense:
    """The same, multiplied out by einsum."""
    J = torch.einsum("vngso,ngsi->vngoi", jacobian.left, jacobian.right)
    J = J.mT if jacobian.transposed else J
    result = Dense(J.reshape(*J.shape[:2], *jacobian.shape))
    result.weights = jacobian.weights
    return result


REDUCTIONS = ["dense", "sum_batch", "squares", "squares_batch", "norms2"]
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
    "large pages": {"KEPT_BLOCK": 0},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("S", [1, 2])
@pytest.mark.parametrize("kind", [Computed, Scaled])
def test_products_of_computed_weights_are_those_of_the_parameter(kind: type, S: int, weighted: bool):
    inner = outer(3, S, 4, 2)
    if kind is Scaled:
        slopes = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        jacobian: Jacobian = Scaled(inner, slopes.detach(), get_gradient_edge(slopes))
        expected = Dense(inner.dense() * slopes.detach())
    else:
        A, p = torch.randn(4, 6, dtype=torch.float64), nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
        jacobian = Computed(inner, lambda vectors: A.T @ vectors, p, get_gradient_edge(p))
        expected = Dense(A.T @ inner.dense())
    if weighted:
        jacobian.weights = expected.weights = torch.randn(3, 5, dtype=torch.float64)
    for reduction in [*REDUCTIONS, "left_factor"]:
        assert_close(getattr(jacobian, reduction)(), getattr(expected, reduction)())
    directions = torch.randn(2, *jacobian.shape, dtype=torch.float64)
    assert_close(jacobian.matmul(directions), expected.matmul(directions))
    assert_close(jacobian.select([4, 0]).dense(), expected.select([4, 0]).dense())
    twice = combine([jacobian, jacobian])
    assert isinstance(twice, kind)
    assert_close(twice.norms2(), 4 * expected.norms2())


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
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
@pytest.mark.parametrize("grad", [False, True], ids=["", "graph"])
def test_algorithms_agree(
    sizes: tuple, choice: str, weighted: bool, grad: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    jacobian = outer(*sizes, weighted=weighted, dtype=dtype)
    expected = [getattr(multiplied(jacobian), name)() for name in REDUCTIONS]
    for name, value in CHOICES[choice].items():
        monkeypatch.setattr(costs, name, value)
    if sizes[1] == 1:  # there are no pairs of one position to choose
        monkeypatch.setattr(costs, "by_pairs", lambda *sizes: True)
    with torch.set_grad_enabled(grad):
        found = [getattr(jacobian, name)() for name in REDUCTIONS]
    assert_same(found, expected)
    assert grad or all(value.is_contiguous() for value in found)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
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
@pytest.mark.parametrize("rows", [1, 2])
def test_convolutions_by_views_of_their_input(
    conv: nn.Module,
    shape: tuple,
    views: bool,
    weighted: bool,
    rows: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
):
    """Sums of squares and norms without putting the patches together, and then the patches."""
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: False)
    monkeypatch.setattr(costs, "by_gram", lambda *sizes: False)
    monkeypatch.setattr(costs, "samples_at_once", lambda *sizes: 1)
    conv = extend(conv.to(dtype))
    x = torch.randn(3 * rows, conv.weight.shape[1] * conv.groups, *shape).to(dtype)
    z = conv(x)
    use = z.grad_fn.metadata[KEY][0][0]
    vectors = torch.randn(2, *use.shapes[0]).to(dtype)
    of_sample = [slice(n * rows, (n + 1) * rows) for n in range(3)]
    with use.holding(inputs_left(use, z.grad_fn)):
        jacobian = rule_for(conv).jac_t(use, [vectors], ["weight"], 3)["weight"]
    jacobian.weights = torch.randn(2, 3).to(dtype) if weighted else None
    J = torch.stack(
        [torch.autograd.grad(conv(x[n]), conv.weight, vectors[v, n])[0] for v in range(2) for n in of_sample]
    ).unflatten(0, (2, 3))
    expected = Dense(J)
    expected.weights = jacobian.weights
    with torch.no_grad():
        for name in ("squares", "norms2"):
            assert_same(getattr(jacobian, name)(), getattr(expected, name)())
        viewed = views or dtype == torch.float32 and conv.groups == 1
        assert ("whole" not in vars(use.cache["right"])) == (viewed and rows == 1)
        for name in REDUCTIONS:
            assert_same(getattr(jacobian, name)(), getattr(expected, name)())
        monkeypatch.setattr(costs, "rows_at_once", lambda *sizes: 2)
        jacobian.share_no_patches()
        assert_same(jacobian.dense(), J)
        assert_same(jacobian.select([2, 0]).dense(), J[:, [2, 0]])
        assert "whole" not in vars(jacobian._right)


@pytest.mark.parametrize("channels", [16, 64])
def test_small_products_of_convolutions_do_not_put_all_patches_together(channels: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "onednn_is_faster", lambda: False)
    conv = extend(nn.Conv2d(channels, channels, 3))
    z = conv(torch.randn(4, channels, 25, 25))
    use = z.grad_fn.metadata[KEY][0][0]
    with torch.no_grad(), use.holding(inputs_left(use, z.grad_fn)):
        squares = rule_for(conv).jac_t(use, [torch.randn(1, *z.shape)], ["weight"], 4)["weight"].squares()
    assert squares.shape == conv.weight.shape and 4 * squares.numel() < costs.CACHED_ENTRIES
    assert "whole" not in vars(use.cache["right"])


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
@pytest.mark.parametrize("limit", [None, 8])
@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_second_moments_in_half_precision(
    half: torch.dtype, groups: int, shifts: bool, limit: int | None, graph: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of many parts, of which each would vanish in the sum of the others, and over more positions than float16 has."""
    for name, choice in (("by_shifts", shifts), ("by_blocks", not shifts)):
        monkeypatch.setattr(costs, name, lambda *sizes, choice=choice: choice)
    monkeypatch.setattr(costs, "samples_in_cache", lambda *sizes: 1)
    monkeypatch.setattr(costs, "SYMMETRIC_BLOCK", 7)
    monkeypatch.setattr(costs, "rows_at_once", lambda *sizes: 1)
    conv, x = nn.Conv2d(2 * groups, 4, 3, padding=1, groups=groups), torch.randn(1200, 2 * groups, 8, 8).to(half)
    right = rule_for(conv).unfold(conv, x).used_once()
    left = (1 / 8 * torch.randn(1, 1200, groups, 4 // groups, 64)).to(half).mT  # as it arrives: positions come last
    jacobian = Outer(left, right, conv.weight.shape)
    exact = Outer(left.double(), right.whole.double(), conv.weight.shape)
    with torch.set_grad_enabled(graph):
        found = jacobian.right_factor(limit=limit), jacobian.left_factor()
    for moment, expected in zip(found, (exact.right_factor(limit=limit), exact.left_factor()), strict=True):
        assert moment.dtype == half
        assert_close(moment.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.max()))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("pairs", "kept"), [(True, 1), (False, 1), (False, 3), (False, 1000)])
def test_squares_of_chunks(
    pairs: bool, kept: int, per_sample: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Chunks that share their right side, then some with another, some multiplied out, and the first kind again."""
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: pairs)
    first, other = outer(2, 3, 4, 2, dtype=dtype), outer(1, 2, 4, 2, dtype=dtype)
    more = [Outer(torch.randn_like(first.left), first.right, first.shape) for _ in range(4)]
    more[2].weights, more[3].weights = torch.randn(2, 2, 5).to(dtype)
    chunks: list[Jacobian] = [first, more[0], other, Dense(torch.randn(2, 5, 4, 2).to(dtype)), *more[1:]]
    squares, expected = Squares(per_sample), torch.zeros((5, 4, 2) if per_sample else (4, 2)).to(dtype)
    with torch.no_grad():
        for i, chunk in enumerate(chunks):
            chunk.kept = kept
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


@pytest.mark.parametrize("kept", [1, 3, 1000])
def test_exact_diagonals_with_columns_kept(kept: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Of several layers, of groups, of one used twice, in front of a sum; columns come one by one."""

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    x, y = torch.randn(3, 4, 6, 6).to(dtype), torch.tensor([0, 3, 4])
    shared = nn.Conv2d(4, 4, 3, padding=1)
    residual = Residual(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1))
    layers = [shared, nn.ReLU(), shared, residual, nn.ConvTranspose2d(4, 6, 2), nn.Tanh(), nn.Conv2d(6, 4, 2, groups=2)]
    model = extend(nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 5)).to(dtype))
    lossfunc = extend(nn.CrossEntropyLoss())

    def diagonals() -> list[Tensor]:
        with backpack(DiagGGNExact(), BatchDiagGGNExact()):
            lossfunc(model(x), y).backward()
        return [field for p in model.parameters() for field in (p.diag_ggn_exact, p.diag_ggn_exact_batch)]

    expected = diagonals()
    monkeypatch.setattr(costs, "by_pairs", lambda *sizes: False)
    monkeypatch.setattr(costs, "columns_at_once", lambda *sizes: 1)
    monkeypatch.setattr(costs, "columns_to_keep", lambda *sizes: kept)
    assert_same(diagonals(), expected)
    set_columns_per_sweep(1)
    try:
        monkeypatch.delattr(Outer, "together")  # who bounds memory has nothing kept
        assert_same(diagonals(), expected)
    finally:
        set_columns_per_sweep(None)


@pytest.mark.parametrize("G", [1, 3])
def test_symmetric_products_by_blocks(G: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    jacobian = outer(2, 4, 7, 8, G, dtype=dtype)
    expected = [jacobian.left_factor(), jacobian.right_factor()]
    monkeypatch.setattr(costs, "SYMMETRIC_BLOCK", 3)
    monkeypatch.setattr(costs, "by_blocks", lambda *sizes: True)
    with torch.no_grad():
        assert_same([jacobian.left_factor(), jacobian.right_factor()], expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_sides_of_any_layout(transposed: bool, dtype: torch.dtype):
    """Gradients of sums are expanded, those of slices lie apart."""
    values, features = torch.randn(2, 5, 1, 4, 6).to(dtype), torch.randn(2, 5, 1, 6, 4).to(dtype).mT
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
                for name in REDUCTIONS:
                    assert_same(getattr(jacobian, name)(), getattr(multiplied(jacobian), name)())


@pytest.mark.parametrize("grad", [False, True], ids=["", "graph"])
def test_products_of_matrices_of_any_layout(grad: bool, dtype: torch.dtype):
    wide = torch.randn(200, 300).to(dtype)
    layouts = [wide[:70, :80], wide[:80, :70].T, wide[:70, :80].contiguous(), wide[:80, :70].contiguous().T]
    with torch.set_grad_enabled(grad):
        for a in layouts:
            for columns in (70, 3):
                for b in (layout.T[:, :columns] for layout in layouts):
                    expected, total = torch.einsum("mk,kn->mn", a, b), torch.randn(70, columns).to(dtype)
                    assert_same(product(a, b), expected)
                    assert_same(add_product(None, a, b, 0.5), expected / 2)
                    assert_same(add_product(total.clone(), a, b, 2.0), total + 2 * expected)
                    assert_same(add_product(total.fill_(torch.nan), a, b, overwrite=True), expected)
                    assert product(a, b).is_contiguous()


@pytest.mark.parametrize("of_onednn", [False, True])
@pytest.mark.parametrize("G", [1, 3])
def test_products_side_by_side(of_onednn: bool, G: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    if of_onednn and onednn.available():
        monkeypatch.setattr(costs, "ONEDNN_SIZE", 0)
        monkeypatch.setattr(costs, "onednn_is_faster", lambda: True)
    a, b, total = torch.randn(G, 4, 5).to(dtype), torch.randn(G, 6, 5).to(dtype).mT, torch.randn(G, 4, 6).to(dtype)
    with torch.no_grad():
        assert_same(add_products(None, a, b, 0.5), a @ b / 2)
        assert_same(add_products(total.clone(), a, b, 0.5), total + a @ b / 2)


@pytest.mark.skipif(not onednn.available(), reason="about oneDNN")
@pytest.mark.parametrize(("blas", "faster"), [(1.5, True), (1.3, False)])
def test_libraries_are_compared_whatever_the_defaults(blas: float, faster: bool, monkeypatch: pytest.MonkeyPatch):
    results: list[Tensor] = []

    def seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor) -> float:
        results.append(multiply(a, a.T))
        return blas if len(results) <= 5 else 1.0

    monkeypatch.setattr(costs, "_seconds", seconds)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert costs.onednn_is_faster.__wrapped__() == faster
    assert {(result.dtype, result.device.type) for result in results} == {(torch.float32, "cpu")}
    assert_close(results[0], results[-1])


@pytest.mark.parametrize("step", [1, 3, 99])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("by_samples", [False, True])
def test_second_moments_of_positions(
    step: int, blocks: bool, by_samples: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """A few samples at a time."""
    monkeypatch.setattr(costs, "samples_at_once", lambda *args: step)
    monkeypatch.setattr(costs, "by_blocks", lambda *sizes: blocks)
    monkeypatch.setattr(costs, "moment_by_samples", lambda *sizes: by_samples)
    for jacobian in (outer(2, 4, 3, 2, dtype=dtype), outer(1, 3, 3, 2, 2, dtype=dtype)):
        expected = torch.einsum("vngso,vngsp->gop", jacobian.left, jacobian.left)
        with torch.no_grad():
            assert_same(jacobian.left_factor(), expected if jacobian.G > 1 else expected[0])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 4, (2, 4), padding=(0, 1), groups=2),
        nn.Conv1d(2, 3, 2),
        nn.Conv3d(1, 2, (1, 2, 3), stride=(1, 2, 1)),
        nn.Conv2d(2, 3, (4, 1)),
        nn.Conv2d(2, 3, (5, 2)),
        nn.Conv2d(2, 3, 3, dilation=(2, 1)),
        nn.Conv2d(4, 2, 3, stride=(2, 1), groups=2),
        nn.Conv2d(2, 3, (1, 3), stride=(1, 2)),
        nn.Conv2d(2, 3, (3, 4), padding="same", padding_mode="circular"),
        nn.Conv3d(2, 3, (2, 3, 2)),
        nn.Conv3d(4, 2, (2, 3, 2), stride=(2, 1, 1), padding=1, groups=2),
        nn.Conv2d(2, 3, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("samples", [None, 1, 3])
def test_second_moments_of_patches_by_shifts(
    conv: nn.Module, samples: int | None, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Along one axis or two, of planes of all samples or of a few at a time."""
    extend(conv.to(dtype))
    z = conv(torch.randn(4, conv.in_channels, *[5, 6, 7][5 - conv.weight.dim() :]).to(dtype))
    assert z.grad_fn is not None
    use = z.grad_fn.metadata[KEY][0][0]
    with torch.no_grad():
        with use.holding(inputs_left(use, z.grad_fn)):
            jacobian = rule_for(conv).jac_t(use, [torch.ones_like(z)[None]], ["weight"], 4 // rows)["weight"]
        assert isinstance(jacobian, Outer) and isinstance(jacobian._right, Patches)
        expected = outer_of(jacobian).right_factor()
        if samples is not None:
            monkeypatch.setattr(costs, "rows_at_once", lambda *sizes: samples)
            monkeypatch.setattr(costs, "samples_in_cache", lambda *sizes: samples)
            jacobian.share_no_patches()
        for choice in (True, False):
            monkeypatch.setattr(costs, "by_shifts", lambda *sizes, choice=choice: choice)
            # not where some windows have nothing in common
            shifted = choice and conv.stride[-1] == 1 and conv.kernel_size not in ((1, 1), (5, 2))
            assert (jacobian._right.shifted_moment() is not None) == shifted
            assert_same(jacobian.right_factor(), expected)


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 2, 3, padding=1), nn.Conv1d(3, 2, 4)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_small_moments_of_patches_are_not_lost_beside_large_edges(
    conv: nn.Module, last: bool, monkeypatch: pytest.MonkeyPatch
):
    """Entries of the kernel that do not see the first, or last, rows and columns keep their precision."""
    x = torch.randn(4, 3, *[8] * (conv.weight.dim() - 2))
    for axis in range(2, x.dim()):
        x.select(axis, -1 if last else 0).mul_(1e4)
    factors = []
    for shifts, dtype in ((True, torch.float32), (False, torch.float64)):
        monkeypatch.setattr(costs, "by_shifts", lambda *sizes, shifts=shifts: shifts)
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


def outer_of(jacobian: Outer) -> Outer:
    """The same of patches that are put together, and not known to be shifted."""
    return Outer(jacobian.left, jacobian.right, jacobian.shape)


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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="about pages of Linux")
def test_a_system_without_large_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch):
    class Small(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Small)
    monkeypatch.setattr(costs, "KEPT_BLOCK", 0)
    assert costs.empty((2, 3), torch.empty(0)).shape == (2, 3)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="about pages of Linux")
def test_large_results_use_the_memory_of_former_ones(monkeypatch: pytest.MonkeyPatch):
    mapped = []

    def spy(size: int, original: Callable = costs._mapped) -> mmap.mmap:
        mapped.append(size)
        return original(size)

    monkeypatch.setattr(costs, "_mapped", spy)
    monkeypatch.setattr(costs, "_freed", ({}, {}))
    monkeypatch.setattr(costs, "KEPT_BLOCK", 0)
    model, lossfunc = extend(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))), extend(nn.CrossEntropyLoss())
    inputs = torch.randn(7, 4, 6)

    def fields(x: Tensor) -> list[Tensor]:
        with backpack(BatchGrad(), DiagGGNExact(), BatchDiagGGNExact(), KFLR()):
            lossfunc(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
        fields = [getattr(p, name) for p in model.parameters() for name in ("grad_batch", "diag_ggn_exact_batch")]
        return fields + [factor for p in model.parameters() for factor in p.kflr]

    kept = fields(inputs[0])  # somebody else's from now on
    values = [field.clone() for field in kept]
    assert mapped
    fields(inputs[1])
    mapped.clear()
    found = [field.clone() for field in fields(inputs[2])]
    assert not mapped
    assert all(map(torch.equal, kept, values))
    monkeypatch.setattr(costs, "KEPT_BLOCK", 1 << 30)
    assert all(map(torch.equal, found, fields(inputs[2])))

    monkeypatch.setattr(costs, "KEPT_BLOCK", 0)
    for x in (inputs[3, :2], inputs[4, :2], inputs[5, :2]):  # blocks of another size are not kept for ever
        fields(x)
    mapped.clear()
    fields(inputs[6])
    assert mapped


def forget_last(self: Pass, sweep: Callable, *args: object, **options: object) -> None:
    """A sweep that is not told that it is the last, which would have it clear the caches."""
    sweep(self, *args, **options | {"last": False})


@pytest.mark.parametrize(("extensions", "kept"), [((KFLR(),), False), ((KFLR(), DiagGGNExact()), True)])
def test_patches_are_kept_for_those_who_look_again(
    extensions: tuple, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = extend(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)))
    lossfunc, caches, release = extend(nn.CrossEntropyLoss()), [], Pass.release

    def spy(self: Pass) -> None:
        caches.extend(set(vars(entry.use.cache["right"])) for entry in self.entries if "right" in entry.use.cache)
        release(self)

    monkeypatch.setattr(Pass, "release", spy)
    monkeypatch.setattr(Pass, "_chunk_size", 1)
    monkeypatch.setattr(costs, "gradient_for_column", lambda *_: False)
    monkeypatch.setattr(Pass, "_sweep", functools.partialmethod(forget_last, Pass._sweep))
    with backpack(*extensions):
        lossfunc(model(torch.randn(4, 2, 4, 4)), torch.zeros(4, dtype=torch.long)).backward()
    found = [{"windows", "whole"} & cache for cache in caches if "kept" in cache]
    assert found == [{"whole"} if kept else set()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_temporaries_use_the_same_pages_again():
    program = """if True:
        import resource, torch, curvopt
        with curvopt.backpack():
            pass
        for _ in range(5):  # until the heap has found its order
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            [torch.ones(5 << 20) for _ in range(4)]
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # of 20480 pages
