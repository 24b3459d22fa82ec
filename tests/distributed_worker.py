"""Checks that several processes with copies of a model take the steps of one; ``sharded_worker.py`` runs them."""

from __future__ import annotations

import copy
import datetime
import json
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from curvopt import CurvoptError, backpack, extend
from curvopt.extensions import BatchGrad
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner

torch.set_num_threads(1)
EVERY: dict[str, Any] = {"curvature_every": 3, "inverse_every": 4}
EXACT: dict[str, Callable[..., Any]] = {
    "KFACSGD": lambda p: KFACSGD(p, lr=0.1, fisher="exact", **EVERY),
    "KFACSGD empirical blocks": lambda p: KFACSGD(
        p, lr=0.1, fisher="empirical", approx="reduce", max_factor_size=20, **EVERY
    ),
    # with less damping, roundings to bfloat16 change more
    "EKFACSGD": lambda p: EKFACSGD(p, lr=0.1, fisher="exact", relative_damping=2.0, **EVERY),
    "KFACAdamW": lambda p: KFACAdamW(p, lr=0.01, fisher="exact", wide=5, **EVERY),
    "DiagonalNewton": lambda p: DiagonalNewton(p, lr=0.1, curvature="diag_ggn_exact", curvature_every=3),
    "DiagonalNewton hessian": lambda p: DiagonalNewton(p, lr=0.1, curvature="diag_h", curvature_every=3),
}
SAMPLED: dict[str, Callable[..., Any]] = {
    "KFACSGD": lambda p: KFACSGD(p, lr=0.1, fisher="mc", **EVERY),
    "EKFACSGD": lambda p: EKFACSGD(p, lr=0.1, fisher="mc", **EVERY),
    "KFACAdamW": lambda p: KFACAdamW(p, lr=0.01, **EVERY),
    "DiagonalNewton": lambda p: DiagonalNewton(p, lr=0.1, curvature_every=3),
}
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 12),
        nn.Tanh(),
        nn.Linear(12, 5),
    ).double()


def batch(step: int, size: int = 60) -> tuple[Tensor, Tensor]:
    # so many that no factor is singular: the eigenvectors of a null space are anything, and so are scales there
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 1, 6, 6, dtype=torch.float64, generator=generator)
    return x, (x.flatten(1)[:, :5] + x.flatten(1)[:, 5:10]).argmax(1)


def part(data: tuple[Tensor, ...], bounds: list[int] | None = None) -> tuple[Tensor, ...]:
    """This rank's part of a batch: an equal one, or what lies between its bounds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    n = len(data[0]) // size
    bounds = [n * r for r in range(size + 1)] if bounds is None else bounds
    return tuple(each[bounds[rank] : bounds[rank + 1]] for each in data)


class Run:
    """A model and its optimizer, on the ranks together or (``alone``) in this process."""

    def __init__(
        self, make: Callable[..., Any], alone: bool = False, net: Callable[[], nn.Module] = network, **ddp: Any
    ) -> None:
        self.module = extend(net())
        self.model = self.module if alone else DistributedDataParallel(self.module, **ddp)
        self.lossfunc = extend(nn.CrossEntropyLoss())
        self.optimizer = make(self.model.parameters())
        if alone:
            self.optimizer.process_group = None

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        with self.optimizer.curvature():
            self.lossfunc(self.model(x), y).backward()

    def train(self, data: Callable[[int], tuple[Tensor, ...]], steps: range) -> Run:
        for step in steps:
            self.backward(*data(step))
            self.optimizer.step()
        return self

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def own(step: int) -> tuple[Tensor, ...]:
    return part(batch(step))


def assert_close(left: Run, right: Run) -> None:
    for a, b in zip(left.weights(), right.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def assert_moved(run: Run) -> None:
    for a, b in zip(run.weights(), network().parameters(), strict=True):
        assert (a - b).abs().max() > 1e-4


def assert_alike(run: Run) -> None:
    """The ranks have the same parameters and state, bit for bit."""
    tensors = run.weights()
    for state in run.optimizer.state.values():
        for value in state.values():
            tensors += value if isinstance(value, list) else [value] if isinstance(value, Tensor) else []
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


@contextmanager
def raises(*words: str):
    """On every rank."""
    try:
        yield
    except CurvoptError as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no CurvoptError with {words}")


# --------------------------------------------------------------------------------- equal to one rank on the whole batch


@check
def parts_of_a_batch_are_the_batch() -> None:
    for name, make in EXACT.items():
        together, alone = Run(make), Run(make, alone=True)
        for step in range(9):
            together.train(own, range(step, step + 1))
            alone.train(batch, range(step, step + 1))
            assert_close(together, alone)
        assert_moved(together), name
        assert_alike(together)


@check
def preconditioner_with_bucket_views() -> None:
    runs = [
        Run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), alone, gradient_as_bucket_view=True) for alone in (0, 1)
    ]
    for alone, (run, data) in enumerate(zip(runs, (own, batch), strict=True)):
        pre = KFACPreconditioner(run.model, fisher="exact", **EVERY)
        pre.process_group = None if alone else "world"
        for step in range(8):
            run.optimizer.zero_grad()
            with pre.curvature():
                run.lossfunc(run.model(data(step)[0]), data(step)[1]).backward()
            pre.step()
            run.optimizer.step()
    assert_close(*runs)
    assert_moved(runs[0])


def of_total(run: Run, x: Tensor, y: Tensor, total: int) -> Tensor:
    """A share of the mean loss over ``total`` samples, for DDP, which takes means over the ranks."""
    return nn.functional.cross_entropy(run.model(x), y, reduction="sum") * (dist.get_world_size() / total)


@check
def unequal_and_empty_batches() -> None:
    size = dist.get_world_size()
    for make in (EXACT["KFACSGD"], EXACT["EKFACSGD"], EXACT["DiagonalNewton hessian"], SAMPLED["KFACAdamW"]):
        together, alone = Run(make), Run(make, alone=True)
        exact = make is not SAMPLED["KFACAdamW"]
        for step in range(7):
            # also at the first step, where nothing is known of the shapes
            bounds = [[0] * size + [60], [0, *[60] * size], [0, *range(25, 25 + size - 1), 60]][step % 3]
            x, y = part(batch(step), bounds)
            together.optimizer.zero_grad()
            with together.optimizer.curvature():
                of_total(together, x, y, 60).backward()
            together.optimizer.step()
            alone.train(batch, range(step, step + 1))
            if exact:
                assert_close(together, alone)
        assert_alike(together)


@check
def an_empty_batch_outside_of_the_context() -> None:
    together, alone = Run(EXACT["KFACSGD"]), Run(EXACT["KFACSGD"], alone=True)
    for step in range(3):
        x, y = part(batch(step), [0] * dist.get_world_size() + [60])
        together.optimizer.zero_grad()
        with together.optimizer.curvature() if len(x) else nullcontext():
            of_total(together, x, y, 60).backward()
        together.optimizer.step()
        alone.train(batch, range(step, step + 1))
        assert_close(together, alone)


@check
def unequal_batches_of_mean_losses() -> None:
    together, alone = Run(EXACT["KFACSGD"]), Run(EXACT["KFACSGD"], alone=True)
    size = dist.get_world_size()
    bounds = [0, *range(25, 25 + size - 1), 60]
    for step in range(5):
        together.train(lambda step: part(batch(step), bounds), range(step, step + 1))
        x, y = batch(step)
        alone.optimizer.zero_grad()
        with alone.optimizer.curvature():
            for a, b in zip(bounds, bounds[1:], strict=False):
                (alone.lossfunc(alone.model(x[a:b]), y[a:b]) / size).backward()
        alone.optimizer.step()
        assert_close(together, alone)


@check
def accumulation_without_sync() -> None:
    for name in ("KFACSGD", "KFACAdamW", "DiagonalNewton"):
        together, alone = Run(EXACT[name]), Run(EXACT[name], alone=True)
        for step in range(8):
            x, y = own(step)
            n = len(x) // 2
            together.optimizer.zero_grad()
            for sync, rows in ((False, slice(n)), (True, slice(n, None))):
                with nullcontext() if sync else together.model.no_sync(), together.optimizer.curvature():
                    (together.lossfunc(together.model(x[rows]), y[rows]) / 2).backward()
            together.optimizer.step()
            alone.train(batch, range(step, step + 1))
            assert_close(together, alone)


class Heads(nn.Module):
    """Two heads, of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(36, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x.flatten(1))))


@check
def parameters_that_some_ranks_do_not_use() -> None:
    for name in ("KFACSGD", "EKFACSGD", "DiagonalNewton"):
        together = Run(EXACT[name], net=Heads, find_unused_parameters=True)
        alone = Run(EXACT[name], True, Heads)
        size = dist.get_world_size()
        for step in range(6):
            x, y = own(step)
            together.optimizer.zero_grad()
            with together.optimizer.curvature():
                together.lossfunc(together.model(x, dist.get_rank() % 2), y).backward()
            together.optimizer.step()
            alone.optimizer.zero_grad()
            xs, ys = batch(step)
            with alone.optimizer.curvature():
                for rank, (x, y) in enumerate(zip(xs.chunk(size), ys.chunk(size), strict=True)):
                    (alone.lossfunc(alone.model(x, rank % 2), y) / size).backward()
            alone.optimizer.step()
            assert_close(together, alone)
        assert_alike(together)


@check
def a_head_that_one_rank_reaches_later_leaves_the_weight_of_the_loss() -> None:
    """It is due at once, where nothing of the other ranks is."""
    for kind in (KFACSGD, EKFACSGD, DiagonalNewton):
        run = Run(kind, net=Heads, find_unused_parameters=True)
        for step in range(7):
            x, y = own(step)
            run.optimizer.zero_grad()
            with run.optimizer.curvature():
                run.lossfunc(run.model(x, int(step > 5 and dist.get_rank() == 0)), y).backward()
            run.optimizer.step()
            torch.testing.assert_close(float(run.optimizer._progress["step_weight"]), 1.0, rtol=1e-6, atol=0)
        assert run.module.heads[1].weight in run.optimizer.state


class Reentrant(nn.Sequential):
    """Has a layer that may be called inside of a backward, where no samples are known."""

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        h = self[0](x)
        return self[2](checkpoint(self[1], h, use_reentrant=True) if reentrant else self[1](h))


@check
def samples_that_are_not_known_on_all_or_some_ranks() -> None:
    first = dist.get_rank() == 0
    for reentrant, alone, covered in ((True, False, False), (first, False, True), (False, first, True)):
        make = lambda: Reentrant(nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, 5)).double()  # noqa: E731
        run = Run(SAMPLED["KFACAdamW"], net=make)
        run.optimizer.attach(run.model)
        for step in range(6):
            x, y = own(step)
            x = x.flatten(1)
            run.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.lossfunc(run.model(x[0] if alone else x, reentrant), y[0] if alone else y).backward()
            run.optimizer.step()
        assert_alike(run)
        assert ("none" not in run.optimizer.coverage().values()) == covered, run.optimizer.coverage()


@check
def options_of_ddp_and_orders_of_extend() -> None:
    make = EXACT["KFACSGD"]
    alone = Run(make, alone=True).train(batch, range(5))
    for options in (
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "broadcast_buffers": False},
    ):
        for order in ("extend first", "extend after", "attach"):
            model = network()
            if order == "extend first":
                extend(model)
            ddp = DistributedDataParallel(model, **options)
            lossfunc = nn.CrossEntropyLoss()
            optimizer = make(ddp.parameters())
            if order == "extend after":
                extend(ddp), extend(lossfunc)
            if order == "attach":
                optimizer.attach(ddp, lossfunc)
            for step in range(5):
                x, y = own(step)
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                with optimizer.curvature() if order != "attach" else nullcontext():
                    lossfunc(ddp(x).flatten(1), y).backward()
                optimizer.step()
            for a, b in zip(model.parameters(), alone.weights(), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-6), (options, order)


class SyncBatchNorm(torch.autograd.Function):
    """What `nn.SyncBatchNorm` calls, which PyTorch has for accelerators only; it saves the same tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(1)
        sums = torch.stack([rows.sum(1), rows.square().sum(1), torch.full_like(weight, rows.shape[1])])
        dist.all_reduce(sums)
        mean, square, count = sums[0] / sums[2], sums[1] / sums[2], sums[2]
        inverse = (square - mean.square() + 1e-5).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, count)
        return ((rows.T - mean) * inverse * weight + bias).T.unflatten(1, x.transpose(0, 1).shape[1:]).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, weight, mean, inverse, count = ctx.saved_tensors
        normed = (x.movedim(1, -1) - mean) * inverse
        rows = grad.movedim(1, -1)
        own = torch.stack([(rows * normed).flatten(0, -2).sum(0), rows.flatten(0, -2).sum(0)])
        sums = own.clone()
        dist.all_reduce(sums)
        above = (rows - (normed * sums[0] + sums[1]) / count) * weight * inverse
        return above.movedim(-1, 1), own[0], own[1]


class Normed(nn.Module):
    """A network of functions with a batch norm."""

    def __init__(self, synced: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Parameter(torch.randn(4, 1, 3, 3)), nn.Parameter(torch.randn(4, 5))
        self.weight, self.bias, self.synced = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4)), synced
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x, scale = nn.functional.conv2d(x, self.conv), (self.weight, self.bias)
        h = SyncBatchNorm.apply(x, *scale) if self.synced else nn.functional.batch_norm(x, None, None, *scale, True)
        return torch.tanh(h).mean((2, 3)) @ self.out


@check
@mock.patch("torch.nn.modules._functions.SyncBatchNorm", SyncBatchNorm)
def synchronised_batch_norm() -> None:
    for kind in (KFACSGD, EKFACSGD):
        make = partial(kind, fisher="empirical")
        together, alone = Run(make, net=lambda: Normed(True)), Run(make, True, lambda: Normed(False))
        for step in range(4):
            x, y = part(batch(step), [0, *range(25, 25 + dist.get_world_size() - 1), 60])
            together.optimizer.zero_grad()
            with together.optimizer.curvature():
                of_total(together, x, y, 60).backward()
            together.optimizer.step()
            alone.train(batch, range(step, step + 1))
            assert_close(together, alone)
        assert_alike(together)


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


@check
def loss_inside_of_the_model() -> None:
    for name in ("KFACSGD", "DiagonalNewton hessian"):
        alone = Run(EXACT[name], alone=True).train(batch, range(4))
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            together = Run(EXACT[name], net=WithLoss, **options)
            for step in range(4):
                together.optimizer.zero_grad()
                with together.optimizer.curvature():
                    together.model(*own(step)).backward()
                together.optimizer.step()
            assert_close(together, alone)


def indefinite(z: Tensor, y: Tensor) -> Tensor:
    return z.sin().mean()


def compare_losses_without_a_ggn(
    make_run: Callable[..., Any], names: tuple[str, ...], others: Callable[..., Tensor]
) -> None:
    """The ranks take the empirical quantity together, as one process does, and go on where they have none.

    The loss of the first rank has no GGN.
    """
    size = dist.get_world_size()
    losses = [indefinite, *[others] * (size - 1)]
    for name in names:
        run, alone = make_run(EXACT[name]), Run(EXACT[name], alone=True)
        run.train(own, range(2)), alone.train(batch, range(2))
        run.lossfunc = losses[dist.get_rank()]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(2, 7):
                run.train(own, range(step, step + 1))
                alone.optimizer.zero_grad()
                parts = zip(losses, *(each.chunk(size) for each in batch(step)), strict=True)
                with alone.optimizer.curvature():
                    for lossfunc, x, y in parts:
                        (lossfunc(alone.model(x), y) / size).backward()
                alone.optimizer.step()
        assert sum("takes the empirical quantity" in str(one.message) for one in said) == 2, [str(s) for s in said]
        for each in (run, alone):
            assert "empirical" in each.optimizer.metrics()
        for a, b in zip(run.weights(), alone.weights(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    _refuse(make_run(EXACT[names[0]]).train(own, range(1)))


def compare_linear_losses(make_run: Callable[..., Any], names: tuple[str, ...], together: bool) -> None:
    """Where the loss of the first rank is linear in a batch, that batch has the empirical quantity, and no later one.

    Args:
        together: whether the other ranks have it in this step, too.
    """
    size = dist.get_world_size()
    for name in names:
        run, alone = make_run(EXACT[name]), Run(EXACT[name], alone=True)
        usual = run.lossfunc
        for step in range(7):
            losses = [linear if step == 1 else usual, *[usual] * (size - 1)]
            run.lossfunc = losses[dist.get_rank()]
            run.train(own, range(step, step + 1))
            assert ("empirical" in run.optimizer.metrics()) == (step == 1)
            alone.optimizer.zero_grad()
            parts = zip(losses, *(each.chunk(size) for each in batch(step)), strict=True)
            with alone.optimizer.curvature() if together else nullcontext():
                for lossfunc, x, y in parts:
                    with alone.optimizer.curvature():
                        (lossfunc(alone.model(x), y) / size).backward()
            alone.optimizer.step()
        for a, b in zip(run.weights(), alone.weights(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def linear(z: Tensor, y: Tensor) -> Tensor:
    return z[:, 0].relu().mean()


@check
def losses_that_are_linear_in_a_batch() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*takes the empirical quantity for such batches")
        compare_linear_losses(Run, ("KFACSGD", "DiagonalNewton"), together=False)


def _refuse(run: Any) -> None:
    """A backward of which there is no curvature at all, where there is some from earlier ones."""
    layer, x, y = run.model.get_submodule("module.0" if hasattr(run.model, "module") else "0"), *own(1)
    run.optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with run.optimizer.curvature():
            loss = run.lossfunc(run.model(x), y)
            layer.stride = (1, 1)
            loss.backward()
        layer.stride = (2, 2)
    run.optimizer.step()
    assert sum("goes on with the curvature it has" in str(one.message) for one in said) == 1
    assert "empirical" not in run.optimizer.metrics()
    run.train(own, range(2, 4))


@check
def losses_without_a_ggn() -> None:
    compare_losses_without_a_ggn(Run, ("KFACSGD", "DiagonalNewton"), indefinite)


@contextmanager
def bytes_sent():
    """Yields a list to which the size of each tensor is added that an optimizer sends."""
    sizes: list[int] = []

    def counting(original: Callable, place: int) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            sizes.append(args[place].nbytes)
            return original(*args, **options)

        return call

    places = {"all_reduce": 0, "all_to_all_single": 1, "all_gather": 1, "broadcast": 0}
    with ExitStack() as stack:
        for name, place in places.items():
            stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name), place)))
        yield sizes


def compare_communication_dtypes(make_run: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Symmetric halves change nothing, bfloat16 no more than it rounds, and both send less."""
    for name in names:
        runs, sent = {}, {}
        for dtype in (None, torch.float64, torch.bfloat16):
            run = runs[dtype] = make_run(EXACT[name])
            run.optimizer.communication_dtype = dtype
            assert copy.deepcopy(run.optimizer).communication_dtype == dtype
            with bytes_sent() as sizes:
                run.train(own, range(2))  # in the second step, sharded eigenbases go to all ranks
            sent[dtype] = sum(sizes)
        plain, halves, rounded = (
            [f for state in run.optimizer.state.values() for f in state["factors"]] for run in runs.values()
        )
        differences = []
        for f, same, low in zip(plain, halves, rounded, strict=True):
            torch.testing.assert_close(f, same, rtol=1e-12, atol=1e-12)
            if f.ndim > 1:
                assert torch.equal(low, low.mT)
                d = f.diagonal(dim1=-2, dim2=-1)
                # two roundings by 2^-8 at most, of entries below the mean of their rows' and columns' diagonals
                assert ((f - low).abs() <= 1.1 * 2**-7 * (d.unsqueeze(-1) * d.unsqueeze(-2)).sqrt() + 1e-9).all()
                assert (torch.linalg.eigvalsh(low)[..., 0] >= -(2**-7) * d.sum(-1)).all()
            differences.append((f - low).abs().max())
        assert max(differences) > 0 or not differences
        assert sent[torch.bfloat16] < 0.9 * sent[torch.float64] < 0.81 * sent[None], (name, sent)
        for run in runs.values():
            run.train(own, range(2, 6))
        moved = sum((a - b).square().sum() for a, b in zip(runs[None].weights(), network().parameters(), strict=True))
        for dtype, most in ((torch.float64, 1e-11), (torch.bfloat16, 0.02)):
            pairs = zip(runs[None].weights(), runs[dtype].weights(), strict=True)
            difference = sum((a - b).square().sum() for a, b in pairs)
            assert (difference / moved).sqrt() < most, (name, dtype, (difference / moved).sqrt())


@check
def communication_dtypes() -> None:
    compare_communication_dtypes(Run, ("KFACSGD", "KFACSGD empirical blocks", "EKFACSGD"))
    run = Run(EXACT["KFACSGD"])
    run.optimizer.communication_dtype = torch.bfloat16
    assert_alike(run.train(own, range(5)))
    run.optimizer.communication_dtype = torch.float32 if dist.get_rank() else None
    with raises("not in the same state", "communication_dtype"):
        run.train(own, range(5, 9))


# --------------------------------------------------------------------------------------------------------- shared work


@check
def each_matrix_is_factored_on_one_rank() -> None:
    for name, function in (("KFACSGD", "cholesky_ex"), ("EKFACSGD", "eigh")):
        together, alone = Run(EXACT[name]), Run(EXACT[name], alone=True)
        counts = []
        for run, data in ((together, own), (alone, batch)):
            sizes: list[tuple[int, ...]] = []
            original = getattr(torch.linalg, function)

            def counted(matrices: Tensor, original: Callable = original, sizes: list = sizes) -> Any:
                d = matrices.shape[-1]
                sizes.extend([d] * (matrices.numel() // d**2))
                return original(matrices)

            with mock.patch.object(torch.linalg, function, counted):
                run.train(data, range(3))
            counts.append(sorted(sizes))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, counts[0])
        assert sorted(size for sizes in every for size in sizes) == counts[1]
        costs = [sum(size**3 for size in sizes) for sizes in every]
        assert 0 < max(costs) <= max(max(counts[1]) ** 3 * 3, 1.4 * sum(costs) / len(costs)), costs
        assert min(costs) > 0


@check
def the_ladder_counts_on_all_ranks() -> None:
    run = Run(EXACT["KFACSGD"]).train(own, range(2))
    former: dict[Tensor, list[Tensor]] = {}
    for p in run.module.parameters():
        former[p] = run.optimizer.state[p]["inverses"]
        if p.ndim == 1:
            run.optimizer.state[p]["factors"][0].fill_(torch.nan)
    run.train(own, range(2, 3))
    assert run.optimizer.metrics()["fallbacks"] == 4
    for p, inverses in former.items():
        for old, new in zip(inverses, run.optimizer.state[p]["inverses"], strict=True):
            assert torch.equal(old, new) == (p.ndim == 1)
            first = new.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, new)


# ------------------------------------------------------------------------------------------------- samples, checkpoints


@check
def sampled_steps_stay_alike() -> None:
    for make in SAMPLED.values():
        run = Run(make).train(own, range(10))
        assert_moved(run)
        assert_alike(run)


@check
def ranks_draw_samples_of_their_own() -> None:
    run = Run(SAMPLED["KFACSGD"])
    for step in range(2):  # before and after the ranks have met
        torch.manual_seed(0)
        run.backward(*batch(0))
        drawn = [c.sums[0] for c in run.optimizer._accumulation.since_last_step.curvature.values()]
        first = [tensor.clone() for tensor in drawn]
        for tensor in first:
            dist.broadcast(tensor, 0)
        same = [torch.equal(a, b) for a, b in zip(drawn, first, strict=True)]
        assert not any(same) or dist.get_rank() == 0, (step, same)
        run.optimizer.step()


@check
def a_checkpoint_of_any_rank_resumes_bit_for_bit() -> None:
    for make in SAMPLED.values():
        torch.manual_seed(100 + dist.get_rank())  # as for data augmentation
        run = Run(make)
        torch.manual_seed(100 + dist.get_rank())
        run.train(own, range(5))
        saved = [None, copy.deepcopy((run.module.state_dict(), run.optimizer.state_dict()))]
        dist.broadcast_object_list(saved, dist.get_world_size() - 1)
        run.train(own, range(5, 9))
        torch.manual_seed(7)
        resumed = Run(make)
        model, optimizer = saved[1]
        resumed.module.load_state_dict(model)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.train(own, range(5, 9))
        for a, b in zip(run.weights(), resumed.weights(), strict=True):
            assert torch.equal(a, b)
        assert_alike(resumed)


@check
def resume_on_another_number_of_ranks() -> None:
    for make in EXACT.values():
        straight = Run(make, alone=True).train(batch, range(9))
        for first, second in ((True, False), (False, True)):
            run = Run(make, alone=first).train(batch if first else own, range(5))
            resumed = Run(make, alone=second)
            resumed.module.load_state_dict(run.module.state_dict())
            resumed.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
            resumed.train(batch if second else own, range(5, 9))
            assert_close(resumed, straight)
    alone = Run(SAMPLED["KFACSGD"], alone=True).train(batch, range(3))
    run = Run(SAMPLED["KFACSGD"])
    run.optimizer.load_state_dict(alone.optimizer.state_dict())
    run.module.load_state_dict(alone.module.state_dict())
    states = [run.optimizer._sampler().get_state()]
    dist.broadcast(first := states[0].clone(), 0)
    assert torch.equal(first, states[0]) == (dist.get_rank() == 0)


# ------------------------------------------------------------------------------------------- what happens to one rank


@check
def a_gradient_that_is_not_finite_on_one_rank() -> None:
    run = Run(EXACT["KFACSGD"]).train(own, range(3))
    before = run.weights()
    x, y = own(3)
    if dist.get_rank() == 1:
        x = x * torch.inf
    run.backward(x, y)
    with raises("not finite"):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))
    assert_alike(run.train(own, range(4, 8)))


@check
def curvature_that_is_not_finite_on_one_rank() -> None:
    run = Run(EXACT["KFACSGD"]).train(own, range(2))
    run.optimizer.zero_grad()
    with run.optimizer.curvature():
        x, y = own(2)
        run.lossfunc(run.model(x), y).backward()
    if dist.get_rank() == 1:
        run.optimizer._accumulation.since_last_step.curvature[run.module[5].weight].sums[0][0, 0] = torch.nan
    factors = [f.clone() for f in run.optimizer.state[run.module[5].weight]["factors"]]
    run.optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(run.optimizer.state[run.module[5].weight]["factors"], factors, strict=True)
    )
    assert_alike(run.train(own, range(3, 6)))


@check
def nothing_received() -> None:
    run = Run(EXACT["KFACSGD"])
    stranger = extend(network())
    x, y = own(0)
    for strangers in (range(dist.get_world_size()), [1]):
        run.optimizer.zero_grad()
        run.lossfunc(run.model(x), y).backward()
        with run.optimizer.curvature():
            run.lossfunc((stranger if dist.get_rank() in strangers else run.module)(x), y).backward()
        with raises("none of this optimizer"):
            run.optimizer.step()
    run.backward(x[:0], y[:0])
    with raises("no parameter of this optimizer received curvature"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.lossfunc(run.model(x), y).backward()
    with raises("no curvature was computed so far", "optimizer.curvature()"):
        run.optimizer.step()
    assert_alike(run.train(own, range(3)))


@check
def ranks_in_different_states() -> None:
    run = Run(EXACT["KFACSGD"]).train(own, range(5))
    state = copy.deepcopy(run.optimizer.state_dict())
    assert min(state["param_groups"][0]["run"]["due"]) > 5
    fresh = Run(EXACT["KFACSGD"])
    if dist.get_rank() == 0:
        fresh.optimizer.load_state_dict(state)
    fresh.backward(*own(5))
    with raises("not in the same state", "load the same checkpoint", "process_group"):
        fresh.optimizer.step()
    one = Run(EXACT["KFACSGD"])
    one.backward(*own(0))
    if dist.get_rank() == 1:
        one.module.zero_grad()
    with raises("not in the same state", "'gradients'"):
        one.optimizer.step()


@check
def rates_and_parameters_that_differ() -> None:
    with raises("not in the same state", "'lr': [0.1]" if dist.get_rank() else "'lr': [0.2]"):
        Run(lambda p: KFACSGD(p, lr=0.1 if dist.get_rank() else 0.2, fisher="exact")).train(own, range(3))
    drifting = Run(EXACT["KFACSGD"])
    with raises("the ranks' parameters differ", "DistributedDataParallel"):
        for step in range(6):
            x, y = own(step)
            drifting.optimizer.zero_grad()
            with drifting.optimizer.curvature():
                drifting.lossfunc(drifting.module(x), y).backward()
            drifting.optimizer.step()


@check
def a_rank_that_leaves_out_a_step() -> None:
    """All may, as they do where a scaler finds an overflow."""
    run = Run(lambda p: KFACSGD(p, fisher="exact", curvature_every=1))
    for step in range(4):
        run.backward(*own(step))
        if step != 1:
            run.optimizer.step()
    assert_alike(run)
    run.backward(*own(4))
    with raises("not in the same state", f"'step': {3 if dist.get_rank() else ''}"):
        if dist.get_rank() == 0:
            run.optimizer.zero_grad()
        else:
            run.optimizer.step()


@check
def parameters_of_different_kinds() -> None:
    run = Run(EXACT["KFACSGD"])
    run.backward(*own(0))
    curvature = run.optimizer._accumulation.since_last_step.curvature[run.module[7].weight]
    if dist.get_rank() == 1:
        curvature.sums, curvature.of_input = [curvature.sums[0]], None
    with raises("parameter 0.6 has", "same modules on every rank"):
        run.optimizer.step()
    assert_alike(run.train(own, range(2)))


@check
def groups() -> None:
    rank = dist.get_rank()
    run = Run(EXACT["KFACSGD"], alone=True).train(batch, range(rank, 4))  # not equally often
    twin = copy.deepcopy(run.optimizer)
    assert twin.process_group is None
    for ranks in ([0, 1], [1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            together = Run(EXACT["KFACSGD"], process_group=group)
            together.optimizer.process_group = group
            size, start = len(ranks), ranks.index(rank)
            together.train(lambda step: tuple(each[start::size] for each in batch(step)), range(5))  # noqa: B023
            assert_close(together, Run(EXACT["KFACSGD"], alone=True).train(batch, range(5)))


# --------------------------------------------------------------------------------------------------- sharded parameters


@check
def sharded_parameters_are_refused() -> None:
    words = ("fully_shard", "DistributedDataParallel", "sharded over ranks")
    lossfunc, mesh = extend(nn.MSELoss()), init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    parallel = parallelize_module(layers[0], mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    flat = FullyShardedDataParallel(layers[2], device_id=torch.device("cpu"), use_orig_params=True)
    for sharded in (parallel, fully_shard(layers[1]), flat):
        with raises(*words[:2] if sharded is flat else words), backpack(BatchGrad()):
            lossfunc(extend(sharded)(torch.ones(4, 6)), torch.ones(4, 2)).backward()
        assert not any(hasattr(p, "grad_batch") or p.grad is not None for p in sharded.parameters())
    for make in (KFACSGD, KFACPreconditioner):
        with raises(*words):
            make(parallel if make is KFACPreconditioner else parallel.parameters())
    late = KFACSGD([nn.Parameter(torch.ones(2))])
    with raises("is not sharded, but other parameters are", "fully_shard"):
        late.add_param_group({"params": list(parallel.parameters())})
    other = KFACSGD([nn.Parameter(torch.ones(4, 6))])
    other.param_groups[0]["params"] = list(parallel.parameters())
    with raises(*words):
        other.step()
    for use_orig_params in (False, True):
        flat = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with raises(*words):
            KFACSGD(flat.parameters())
    with raises(*words):
        HessianFree(layers[1].parameters())


def main(checks: dict[str, Callable[[], None]], path: str, *names: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=3))
    results: dict[str, str] = {}
    for name in names or checks:
        try:
            checks[name]()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        with open(f"{path}.{dist.get_rank()}", "w") as file:
            json.dump(results, file)
        if results[name]:
            os._exit(1)  # the other ranks may wait for this one
    dist.destroy_process_group()
