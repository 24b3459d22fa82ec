"""What ``test_distributed.py`` runs in several processes: ``torchrun ... distributed_worker.py FILE CHECK ...``.

Ranks that have copies or shards of a model take the steps that one process takes on the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import Net
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.core.backward.context import ListenedBackward
from curvopt.core.losses.roots import NotCurved
from curvopt.extensions import KFAC, BatchGrad
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, HessianFree, KFACAdamW, KFACPreconditioner, state_to_load
from curvopt.optim.empirical import are_of_gradients
from curvopt.optim.kfac import Kronecker

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


def check(*kinds: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A check of ranks that have ``copies`` or ``shards`` of a model; where both may be, it is told which."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for kind in kinds:
            CHECKS[f"{kind} {function.__name__}"] = partial(function, kind) if len(kinds) > 1 else function
        return function

    return register


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


def own(step: int) -> tuple[Tensor, ...]:
    return part(batch(step))


def uneven() -> list[int]:
    """Bounds of parts that differ in size."""
    return [0, *range(25, 25 + dist.get_world_size() - 1), 60]


def part_of(step: int) -> tuple[Tensor, ...]:
    """All of a batch on the last rank, on the first, or on the ranks in parts that differ in size."""
    size = dist.get_world_size()
    return part(batch(step), [[0] * size + [60], [0, *[60] * size], uneven()][step % 3])


def shard(model: nn.Module, by_layers: bool = False, **options: Any) -> nn.Module:
    for layer in model.children() if by_layers else ():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


#: What is done in which order before a training: a model is extended, wrapped, or attached to its optimizer.
ORDER = {"alone": "attach", "copies": "attach wrap", "shards": "wrap attach"}


class Run:
    """A model and its optimizer: in this process ``alone``, or on all ranks, which have ``copies`` or ``shards`` of it.

    Options are those of ``DistributedDataParallel`` or of ``fully_shard``, which divides ``by_layers`` or as one.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[..., Any],
        net: Callable[[], nn.Module] = network,
        by_layers: bool = False,
        order: str = "",
        **options: Any,
    ) -> None:
        self.lossfunc, self.backwards = nn.CrossEntropyLoss(), 0
        self.module = self.model = net()
        self.optimizer: Any = None
        for action in (order or ORDER[kind]).split():
            if action == "extend":
                extend(self.model), extend(self.lossfunc)
            elif action == "attach":
                self.optimizer = make(self.model.parameters())
                self.optimizer.attach(self.model, self.lossfunc)
            elif kind == "copies":
                self.model = DistributedDataParallel(self.module, **options)
            else:
                shard(self.model, by_layers, **options)
        if kind == "alone":
            self.optimizer.process_group = None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.lossfunc(self.model(x), y)

    def share(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the mean loss over 60 samples, for ranks that take means over themselves."""
        return cross_entropy(self.model(x), y, reduction="sum") * (dist.get_world_size() / 60)

    def backward(self, *losses: Callable[[], Tensor]) -> None:
        self.backwards += 1
        self.optimizer.zero_grad(set_to_none=self.backwards % 2 == 0)
        for loss in losses:
            loss().backward()

    def step(self, *losses: Callable[[], Tensor]) -> None:
        self.backward(*losses)
        self.optimizer.step()

    def load(self, model: Any, optimizer: Any) -> Run:
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return self

    def train(
        self, data: Callable[[int], tuple[Tensor, ...]], steps: range, loss: Callable[..., Tensor] | None = None
    ) -> Run:
        for step in steps:
            self.step(lambda step=step: (loss or self.loss)(*data(step)))
        return self

    def step_on_parts(self, step: int, losses: list[Callable[..., Tensor]], bounds: list[int] | None = None) -> None:
        """The step of ranks that take means over their parts of a batch, each with a loss of its own."""
        size = len(losses)
        bounds = bounds or [60 // size * r for r in range(size + 1)]
        (x, y), parts = batch(step), zip(losses, bounds, bounds[1:], strict=False)
        self.step(*(lambda loss=loss, a=a, b=b: loss(x[a:b], y[a:b]) / size for loss, a, b in parts))


def alone(make: Callable[..., Any], net: Callable[[], nn.Module] = network) -> Run:
    return Run("alone", make, net)


def weights(of: Run | nn.Module) -> list[Tensor]:
    parameters = (of.model if isinstance(of, Run) else of).parameters()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


def assert_close(left: Run | nn.Module, right: Run | nn.Module, atol: float = 1e-6) -> None:
    for a, b in zip(weights(left), weights(right), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


def assert_same_steps(
    run: Run, one: Run, steps: int, data: Callable[[int], tuple[Tensor, ...]] = own, loss: Any = None
) -> None:
    """The ranks have after each step what one process has on the whole batches."""
    for step in range(steps):
        run.train(data, range(step, step + 1), loss)
        assert_close(run, one.train(batch, range(step, step + 1)))


def assert_moved(run: Run) -> None:
    for a, b in zip(weights(run), network().parameters(), strict=True):
        assert (a - b).abs().max() > 1e-4


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """In its state."""
    return tree_leaves(optimizer.state_dict()["state"])


def of_first_rank(tensor: Tensor) -> Tensor:
    dist.broadcast(first := tensor.clone(), 0)
    return first


def assert_alike(run: Run) -> None:
    """The ranks have the same parameters and state, bit for bit."""
    for tensor in [*weights(run), *tensors_of(run.optimizer)]:
        assert torch.equal(of_first_rank(tensor), tensor)


@contextmanager
def raises(*words: str) -> Iterator[None]:
    """On every rank."""
    try:
        yield
    except CurvoptError as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no CurvoptError with {words}")


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yields a list that has, behind the block, what was said in it."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield messages
    messages += [str(one.message) for one in said]


# --------------------------------------------------------------------------------- equal to one rank on the whole batch


@check("copies", "shards")
def parts_of_a_batch_are_the_batch(kind: str) -> None:
    for i, (name, make) in enumerate(EXACT.items()):
        run, one = Run(kind, make, by_layers=(i + dist.get_world_size()) % 2 == 0), alone(make)
        assert_same_steps(run, one, 9 if kind == "copies" else 6)
        assert_moved(run)
        if kind == "copies":
            assert_alike(run)
        # the ranks tell of one step, not of that of the parameters that they own
        assert run.optimizer.metrics().keys() == one.optimizer.metrics().keys()
        for key, value in one.optimizer.metrics().items():
            assert abs(float(run.optimizer.metrics()[key]) - float(value)) < 1e-6, (name, key)
        assert run.optimizer.coverage() == one.optimizer.coverage()


@check("copies", "shards")
def preconditioner(kind: str) -> None:
    model, one = network(), network()
    if kind == "copies":
        together = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        together = shard(model, by_layers=True)
    for each, data, group in ((together, own, "world"), (one, batch, None)):
        pre, lossfunc = KFACPreconditioner(each, fisher="exact", **EVERY), extend(nn.CrossEntropyLoss())
        pre.process_group = group
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            x, y = data(step)
            optimizer.zero_grad()
            lossfunc(each(x), y).backward()
            pre.step()
            optimizer.step()
    assert_close(together, one)


@check("copies", "shards")
def unequal_and_empty_batches(kind: str) -> None:
    names = ("KFACSGD", "EKFACSGD", "DiagonalNewton hessian") if kind == "copies" else ("KFACSGD", "EKFACSGD")
    for name in names:
        run, one = Run(kind, EXACT[name], by_layers=True), alone(EXACT[name])
        # also at the first step, where nothing is known of the shapes
        assert_same_steps(run, one, 7 if kind == "copies" else 4, part_of, run.share)
        if kind == "copies":
            assert_alike(run)
    if kind == "copies":
        run = Run(kind, SAMPLED["KFACAdamW"])
        assert_alike(run.train(part_of, range(7), run.share))


@check("copies")
def an_empty_batch_that_is_left_alone() -> None:
    run, one = Run("copies", EXACT["KFACSGD"]), alone(EXACT["KFACSGD"])
    for step in range(3):
        x, y = part(batch(step), [0] * dist.get_world_size() + [60])
        run.optimizer.zero_grad()
        with nullcontext() if len(x) else backpack():
            run.share(x, y).backward()
        run.optimizer.step()
        assert_close(run, one.train(batch, range(step, step + 1)))


@check("copies")
def unequal_batches_of_mean_losses() -> None:
    run, one = Run("copies", EXACT["KFACSGD"]), alone(EXACT["KFACSGD"])
    for step in range(5):
        run.train(lambda step: part(batch(step), uneven()), range(step, step + 1))
        one.step_on_parts(step, [one.loss] * dist.get_world_size(), uneven())
        assert_close(run, one)


@check("copies", "shards")
def accumulation(kind: str) -> None:
    """Over two halves of a batch; ranks exchange gradients behind the last, or behind each."""

    def exchanging(model: Any, now: bool) -> AbstractContextManager[Any]:
        if kind == "shards":
            model.set_requires_gradient_sync(now)
        return model.no_sync() if kind == "copies" and not now else nullcontext()

    names = {"copies": ("KFACSGD", "KFACAdamW", "DiagonalNewton"), "shards": ("KFACSGD",)}[kind]
    for name, each in [(name, False) for name in names] + [("KFACSGD", True)] * (kind == "shards"):
        run, one = Run(kind, EXACT[name], by_layers=True), alone(EXACT[name])
        for step in range(8 if kind == "copies" else 4):
            x, y = own(step)
            n = len(x) // 2
            run.optimizer.zero_grad()
            for last, rows in ((False, slice(n)), (True, slice(n, None))):
                with exchanging(run.model, last or each):
                    (run.loss(x[rows], y[rows]) / 2).backward()
            run.optimizer.step()
            assert_close(run, one.train(batch, range(step, step + 1)))


@check("shards")
def gradients_that_are_reset_drop_their_curvature() -> None:
    run, one = Run("shards", EXACT["KFACSGD"]), alone(EXACT["KFACSGD"])
    for step in range(4):
        for seen in (step + 100, step):
            run.model.zero_grad(set_to_none=step % 2 == 0)
            run.loss(*own(seen)).backward()
        run.optimizer.step()
        assert_close(run, one.train(batch, range(step, step + 1)))


def heads() -> Any:
    """Two heads, of which a batch takes one."""
    torch.manual_seed(0)
    forward = lambda net, x, head: net.heads[head](torch.tanh(net.body(x.flatten(1))))  # noqa: E731
    parts = {"body": nn.Linear(36, 8), "heads": nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])}
    return Net(forward, **parts).double()


@check("copies")
def parameters_that_some_ranks_do_not_use() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("KFACSGD", "EKFACSGD", "DiagonalNewton"):
        run, one = Run("copies", EXACT[name], heads, find_unused_parameters=True), alone(EXACT[name], heads)

        def loss(run: Run, of: int, x: Tensor, y: Tensor) -> Tensor:
            return run.lossfunc(run.model(x, of % 2), y)

        for step in range(6):
            run.train(own, range(step, step + 1), partial(loss, run, rank))
            one.step_on_parts(step, [partial(loss, one, of) for of in range(size)])
            assert_close(run, one)
        assert_alike(run)


@check("copies")
def a_head_that_one_rank_reaches_later_leaves_the_weight_of_the_loss() -> None:
    """It is due at once, where nothing of the other ranks is."""
    for kind in (KFACSGD, EKFACSGD, DiagonalNewton):
        run = Run("copies", kind, heads, find_unused_parameters=True)
        for step in range(7):
            head = int(step > 5 and dist.get_rank() == 0)
            run.train(own, range(step, step + 1), lambda x, y: run.lossfunc(run.model(x, head), y))  # noqa: B023
            weight = run.optimizer.state_dict()["param_groups"][0]["run"]["step_weight"]
            torch.testing.assert_close(float(weight), 1.0, rtol=1e-6, atol=0)
        assert run.module.heads[1].weight in run.optimizer.state


@check("shards")
def heads_take_turns() -> None:
    for name in ("KFACSGD", "EKFACSGD"):
        runs = Run("shards", EXACT[name], heads), alone(EXACT[name], heads)
        for step, head in enumerate([0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1]):
            clocks = []
            for run, data in zip(runs, (own, batch), strict=True):
                run.train(data, range(step, step + 1), lambda x, y: run.lossfunc(run.model(x, head), y))  # noqa: B023
                progress = run.optimizer.state_dict()["param_groups"][0]["run"]
                clocks.append([progress["steps"], progress["due"]])
            assert_close(*runs)
            assert clocks[0] == clocks[1], (step, clocks)
        assert len(set(clocks[0][0])) > 1


def reentrant() -> nn.Module:
    """Has a layer that may be called inside of a backward, where no samples are known."""

    def forward(net: Any, x: Tensor, inside: bool) -> Tensor:
        h = net.first(x)
        return net.last(checkpoint(net.middle, h, use_reentrant=True) if inside else net.middle(h))

    return Net(forward, first=nn.Linear(36, 7), middle=nn.Tanh(), last=nn.Linear(7, 5)).double()


@check("copies")
def samples_that_are_not_known_on_all_or_some_ranks() -> None:
    first = dist.get_rank() == 0
    for inside, one, covered in ((True, False, False), (first, False, True), (False, first, True)):
        run = Run("copies", SAMPLED["KFACAdamW"], reentrant)
        run.optimizer.attach(run.model)
        for step in range(6):
            x, y = own(step)
            x = x.flatten(1)
            run.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.lossfunc(run.model(x[0] if one else x, inside), y[0] if one else y).backward()
            run.optimizer.step()
        assert_alike(run)
        assert ("none" not in run.optimizer.coverage().values()) == covered, run.optimizer.coverage()


@check("copies")
def options_of_ddp_and_orders_of_extend() -> None:
    for options in (
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "broadcast_buffers": False},
    ):
        for order in ("extend wrap attach", "attach wrap", "wrap attach"):
            run = Run("copies", EXACT["KFACSGD"], order=order, **options)
            loss = lambda x, y: run.lossfunc(run.model(x).flatten(1), y)  # noqa: B023, E731
            assert_same_steps(run, alone(EXACT["KFACSGD"]), 5, loss=loss)


@check("shards")
def extended_or_attached_before() -> None:
    for order in ("extend wrap attach", "attach wrap"):
        run = Run("shards", EXACT["KFACSGD"], by_layers=True, order=order)
        assert_same_steps(run, alone(EXACT["KFACSGD"]), 5)


def columns(size: int, p: nn.Parameter) -> Shard:
    return Shard(1 if p.ndim > 1 and p.shape[1] % size == 0 else 0)


@check("shards")
def options_of_fully_shard() -> None:
    placed = partial(columns, dist.get_world_size())
    for options in ({"reshard_after_forward": False}, {"reshard_after_forward": True, "shard_placement_fn": placed}):
        run = Run("shards", EXACT["KFACSGD"], by_layers=True, **options)
        assert_same_steps(run, alone(EXACT["KFACSGD"]), 4)
        with torch.no_grad():
            run.model(own(0)[0])
        run.optimizer.attach(run.model)


@check("shards")
def replicas_of_shards() -> None:
    size = dist.get_world_size()
    for shape in {(size, 1), (size // 2, 2)}:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        run = Run("shards", EXACT["EKFACSGD"], by_layers=True, mesh=mesh)
        assert_same_steps(run, alone(EXACT["EKFACSGD"]), 6)


def blocks() -> Any:
    """Residual blocks whose activations are computed again in the backward, and a frozen layer."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.frozen(torch.tanh(net.first(x.flatten(1))))
        for block in net.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return net.last(net.norm(x))

    torch.manual_seed(0)
    first, frozen = nn.Linear(36, 7), nn.Linear(7, 7).requires_grad_(False)
    inner = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
    ends = {"norm": nn.LayerNorm(7), "last": nn.Linear(7, 5, bias=False)}
    return Net(forward, first=first, frozen=frozen, blocks=inner, **ends).double()


@check("shards")
def blocks_with_checkpoints_and_frozen_layers() -> None:
    def make(p: Any) -> KFACSGD:
        return KFACSGD([p for p in p if p.requires_grad], lr=0.1, fisher="exact", curvature_every=3, weight_decay=0.1)

    def by_blocks() -> nn.Module:
        net = blocks()
        for block in net.blocks:
            fully_shard(block)
        return net

    for net in (blocks, by_blocks):
        assert_same_steps(Run("shards", make, net), alone(make, blocks), 4)


def tied() -> Any:
    """Two layers with one weight, and a model that does not use all of its layers."""
    torch.manual_seed(0)
    forward = lambda net, x: net.last(torch.tanh(net.second(torch.tanh(net.first(x.flatten(1))))))  # noqa: E731
    sizes = {"first": 36, "second": 36, "last": 5, "unused": 4}
    net: Any = Net(forward, **{name: nn.Linear(36, n) for name, n in sizes.items()})
    net.second.weight = net.first.weight
    return net.double()


@check("shards")
def tied_weights_and_unused_layers() -> None:
    for name in ("KFACSGD", "EKFACSGD"):
        assert_same_steps(Run("shards", EXACT[name], tied), alone(EXACT[name], tied), 4)


@check("shards")
def directions_without_curvature() -> None:
    """Of a batch that is smaller than the layers: the basis is chosen by a rule, not by rounding."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).double()

    def few(step: int) -> tuple[Tensor, ...]:
        drawn = torch.Generator().manual_seed(step)
        return torch.randn(4, 12, generator=drawn).double(), torch.randint(3, (4,), generator=drawn)

    make = lambda p: KFACAdamW(p, fisher="exact", curvature_every=1)  # noqa: E731
    run = Run("shards", make, layers, by_layers=True).train(lambda step: part(few(step)), range(8))
    assert_close(run, alone(make, layers).train(few, range(8)))


@check("shards")
def mixed_precision() -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)
    run = Run("shards", EXACT["EKFACSGD"], by_layers=True, mp_policy=low).train(own, range(5))
    assert_close(run, alone(EXACT["EKFACSGD"]).train(batch, range(5)), 1e-4)
    assert all(p.dtype == torch.float64 for p in run.model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = blocks().float()
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    run = Run("shards", lambda p: KFACSGD([q for q in p if q.requires_grad], lr=0.1), lambda: net, mp_policy=policy)
    x, y = own(0)
    losses = []
    for step in range(9):
        losses.append(cross_entropy(run.model(x.float()).float(), y).item())
        run.train(lambda step: (own(step)[0].float(), own(step)[1]), range(step, step + 1))
    assert losses[-1] < 0.9 * losses[0]
    assert all(f.dtype == torch.float32 for state in run.optimizer.state.values() for f in state["curvature"].factors)


@check("shards")
def mixed_precision_with_several_owners_of_a_matrix() -> None:
    """Who owns which rows changes no step by more than it rounds; in bfloat16 there is no other reference."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    few: dict[str, Any] = {"fisher": "exact", "max_factor_size": 16, **EVERY}
    for kind, lr in ((KFACSGD, 0.1), (EKFACSGD, 0.1), (KFACAdamW, 0.01)):
        runs = []
        for rows in (Kronecker.rows_together, lambda _, p: len(p)):
            with mock.patch.object(Kronecker, "rows_together", rows):
                run = Run("shards", partial(kind, lr=lr, **few), lambda: language().float(), True, mp_policy=policy)
            runs.append(run.train(lambda step: part(words(step)), range(4)))
        several, one_each = (run.optimizer._ranks().divided for run in runs)
        assert several and not one_each
        assert_close(*runs, 1e-5)
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(weights(runs[0]), weights(language()), strict=True))


@check("shards")
def groups_are_added() -> None:
    make = EXACT["EKFACSGD"]
    some = lambda p: make(list(p)[4:])  # noqa: E731
    runs = alone(some), Run("shards", some, by_layers=True)
    for run, data in zip(runs, (batch, own), strict=True):
        run.train(data, range(3))
        run.optimizer.add_param_group({"params": list(run.model.parameters())[:4], "lr": 0.05})
        run.train(data, range(3, 6))
    assert_close(*runs)
    assert runs[0].optimizer.coverage() == runs[1].optimizer.coverage()


@check("shards")
def two_optimizers_of_one_model() -> None:
    models = [network(), shard(network(), by_layers=True)]
    for model, data, group in zip(models, (batch, own), (None, "world"), strict=True):
        params = list(model.parameters())
        pair = [EXACT["KFACSGD"](params[:4]), KFACAdamW(params[4:], lr=0.01, fisher="exact")]
        for each in pair:
            each.process_group = group
            each.attach(model)
        for step in range(5):
            x, y = data(step)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for each in pair:
                each.step()
    assert_close(*models)


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


def normed(synced: bool) -> nn.Module:
    """A network of functions with a batch norm."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x, scale = nn.functional.conv2d(x, net.conv), (net.weight, net.bias)
        h = SyncBatchNorm.apply(x, *scale) if synced else nn.functional.batch_norm(x, None, None, *scale, True)
        return torch.tanh(h).mean((2, 3)) @ net.out

    torch.manual_seed(0)
    tensors = {
        "conv": torch.randn(4, 1, 3, 3),
        "out": torch.randn(4, 5),
        "weight": torch.rand(4),
        "bias": torch.randn(4),
    }
    return Net(forward, **{name: nn.Parameter(tensor) for name, tensor in tensors.items()}).double()


@check("copies")
@mock.patch("torch.nn.modules._functions.SyncBatchNorm", SyncBatchNorm)
def synchronised_batch_norm() -> None:
    for kind in (KFACSGD, EKFACSGD):
        make = partial(kind, fisher="empirical")
        run, one = Run("copies", make, lambda: normed(True)), alone(make, lambda: normed(False))
        assert_same_steps(run, one, 4, lambda step: part(batch(step), uneven()), run.share)
        assert_alike(run)


@check("copies")
def loss_inside_of_the_model() -> None:
    """As models of transformers have it."""
    with_loss = lambda: Net(lambda net, x, y: cross_entropy(net.inner(x), y), inner=network())  # noqa: E731
    for name in ("KFACSGD", "DiagonalNewton hessian"):
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            run = Run("copies", EXACT[name], with_loss, **options)
            assert_same_steps(run, alone(EXACT[name]), 4, loss=run.model)


# ----------------------------------------------------------------------------------------------- losses, bytes, samples


def indefinite(z: Tensor, y: Tensor) -> Tensor:
    return z.sin().mean()


def linear(z: Tensor, y: Tensor) -> Tensor:
    return z[:, 0].relu().mean()


@contextmanager
def refused_together(together: bool) -> Iterator[None]:
    """Inside, if so, each backward of this process is refused at first, as where a rank with shards refuses one."""
    attempt = ListenedBackward._attempt

    def refuse(context: ListenedBackward, how: Any, request: Any) -> Any:
        if not are_of_gradients(request.extensions):
            raise NotCurved("there is no curvature on another rank")
        return attempt(context, how, request)

    ListenedBackward._attempt = refuse if together else attempt
    try:
        yield
    finally:
        ListenedBackward._attempt = attempt


@check("copies", "shards")
def losses_without_a_ggn(kind: str) -> None:
    """The ranks take the empirical quantity together, as one process does, and go on where they have none.

    The loss of the first rank has no GGN.
    """
    names = ("KFACSGD", "DiagonalNewton" if kind == "copies" else "EKFACSGD")
    rest = indefinite if kind == "copies" else cross_entropy
    losses = [indefinite, *[rest] * (dist.get_world_size() - 1)]
    for name in names:
        run, one = Run(kind, EXACT[name]).train(own, range(2)), alone(EXACT[name]).train(batch, range(2))
        run.lossfunc = losses[dist.get_rank()]
        with warned() as said:
            for step in range(2, 7):
                run.train(own, range(step, step + 1))
                parts = [lambda x, y, f=f: f(one.model(x), y) for f in losses]  # noqa: B023
                with refused_together(kind == "shards"):
                    one.step_on_parts(step, parts)
        assert sum("takes the empirical quantity" in message for message in said) == 2, said
        assert "empirical" in run.optimizer.metrics()
        assert_close(run, one)
    # a backward of which there is no curvature at all, where there is some from earlier ones
    run = Run(kind, EXACT["KFACSGD"]).train(own, range(1))
    layer = run.module[0]
    run.optimizer.zero_grad()
    with warned() as said:
        loss = run.loss(*own(1))
        layer.stride = (1, 1)
        loss.backward()
        layer.stride = (2, 2)
    run.optimizer.step()
    assert sum("goes on with the curvature it has" in message for message in said) == 1
    assert "empirical" not in run.optimizer.metrics()
    run.train(own, range(2, 4))


@check("copies", "shards")
def losses_that_are_linear_in_a_batch(kind: str) -> None:
    """Where the loss of the first rank is linear in a batch, that batch has the empirical quantity, and no later one.

    On ranks with shards the others have it in this step, too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*takes the empirical quantity for such batches")
        for name in ("KFACSGD", "DiagonalNewton" if kind == "copies" else "EKFACSGD"):
            run, one = Run(kind, EXACT[name]), alone(EXACT[name])
            for each in (run, one):
                each.optimizer.curvature_every = each.optimizer.inverse_every = 1
            for step in range(7):
                losses = [linear if step == 1 else cross_entropy, *[cross_entropy] * (dist.get_world_size() - 1)]
                run.lossfunc = losses[dist.get_rank()]
                run.train(own, range(step, step + 1))
                assert ("empirical" in run.optimizer.metrics()) == (step == 1)
                one.optimizer.zero_grad()
                parts = zip(losses, *(each.chunk(len(losses)) for each in batch(step)), strict=True)
                with refused_together(kind == "shards" and step == 1):
                    for lossfunc, x, y in parts:
                        (lossfunc(one.model(x), y) / len(losses)).backward()
                one.optimizer.step()
            assert_close(run, one)


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
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


@check("copies", "shards")
def communication_dtypes(kind: str) -> None:
    """Symmetric halves change nothing, bfloat16 no more than it rounds, and both send less."""
    for name in ("KFACSGD", "EKFACSGD", *(["KFACSGD empirical blocks"] if kind == "copies" else [])):
        runs, sent = {}, {}
        for dtype in (None, torch.float64, torch.bfloat16):
            run = runs[dtype] = Run(kind, EXACT[name])
            run.optimizer.communication_dtype = dtype
            assert copy.deepcopy(run.optimizer).communication_dtype == dtype
            with bytes_sent() as sizes:
                run.train(own, range(2))  # in the second step, sharded eigenbases go to all ranks
            sent[dtype] = sum(sizes)
        plain, halves, rounded = (
            [f for state in run.optimizer.state.values() for f in state["curvature"].factors] for run in runs.values()
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
        of_plain, *of_low = (weights(run.train(own, range(2, 6))) for run in runs.values())

        def distance(left: list[Tensor], right: list[Tensor]) -> Tensor:
            return torch.stack([(a - b).square().sum() for a, b in zip(left, right, strict=True)]).sum().sqrt()

        moved = distance(of_plain, weights(network()))
        for found, most in zip(of_low, (1e-11, 0.02), strict=True):
            assert distance(of_plain, found) / moved < most, (name, most)
    if kind == "copies":
        run = Run(kind, EXACT["KFACSGD"])
        run.optimizer.communication_dtype = torch.bfloat16
        assert_alike(run.train(own, range(5)))
        run.optimizer.communication_dtype = torch.float32 if dist.get_rank() else None
        with raises("not in the same state", "communication_dtype"):
            run.train(own, range(5, 9))


@check("copies", "shards")
def transfers_of_a_step(kind: str) -> None:
    """Between refreshes, copies send nothing; of shards, gradients and changes go through the wire once."""
    run = Run(kind, lambda p: KFACSGD(p, lr=0.1, fisher="exact")).train(own, range(3))
    run.backward(lambda: run.loss(*own(3)))
    with bytes_sent() as sizes:
        run.optimizer.step()
    everywhere = torch.tensor(sum(size for size in sizes if size > 100))
    dist.all_reduce(everywhere)
    once = sum(p.numel() * p.element_size() for p in run.model.parameters())
    assert (len(sizes), int(everywhere)) == ((0, 0) if kind == "copies" else (5, 2 * once)), sizes


@check("copies", "shards")
def sampled_steps(kind: str) -> None:
    for make in SAMPLED.values():
        run = Run(kind, make, by_layers=True)
        assert_moved(run.train(own, range(10 if kind == "copies" else 3)))
        if kind == "copies":
            assert_alike(run)


# --------------------------------------------------------------------------------------------------------- shared work


@check("copies")
def each_matrix_is_factored_on_one_rank() -> None:
    for name, function in (("KFACSGD", "cholesky_ex"), ("EKFACSGD", "eigh")):
        counts = []
        for run, data in ((Run("copies", EXACT[name]), own), (alone(EXACT[name]), batch)):
            sizes: list[int] = []
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


@check("copies")
def the_ladder_counts_on_all_ranks() -> None:
    run = Run("copies", EXACT["KFACSGD"])
    run.optimizer.curvature_every = run.optimizer.inverse_every = 1
    run.train(own, range(2))
    former: dict[Tensor, list[Tensor]] = {}
    for p in run.module.parameters():
        former[p] = [inverse.clone() for inverse in run.optimizer.state[p]["curvature"].inverses]
        if p.ndim == 1:
            run.optimizer.state[p]["curvature"].factors[0].fill_(torch.nan)
    run.train(own, range(2, 3))
    assert run.optimizer.metrics()["fallbacks"] == 4
    for p, inverses in former.items():
        for old, new in zip(inverses, run.optimizer.state[p]["curvature"].inverses, strict=True):
            assert torch.equal(old, new) == (p.ndim == 1)
            assert torch.equal(of_first_rank(new), new)


def language() -> Any:
    """An embedding and a head, each more than a rank's share."""
    torch.manual_seed(0)
    parts = {"words": nn.Embedding(200, 20), "mixed": nn.Linear(20, 20), "head": nn.Linear(20, 400, bias=False)}
    return Net(lambda net, x: net.head(torch.tanh(net.mixed(net.words(x).mean(1)))), **parts).double()


def words(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(200, (60, 3), generator=generator)
    return x, (x.sum(1) * 3) % 400


@check("shards")
def rows_of_large_matrices_have_several_owners() -> None:
    """Steps are those of one process, and of a checkpoint's, where dampings and bounds are those of all rows."""
    few, size = EVERY | {"max_factor_size": 16}, dist.get_world_size()
    options: dict[str, dict[str, Any]] = {"KFACAdamW": {"shard_placement_fn": partial(columns, size)}}
    if size == 4:
        options["EKFACSGD"] = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    for name, make in {
        "KFACSGD": lambda p: KFACSGD(p, lr=0.1, fisher="exact", **few),
        "EKFACSGD": lambda p: EKFACSGD(p, lr=0.1, fisher="empirical", **few),
        "KFACAdamW": lambda p: KFACAdamW(p, lr=0.01, fisher="exact", wide=5, **few),
        "DiagonalNewton": EXACT["DiagonalNewton"],
    }.items():
        run, one = Run("shards", make, language, name != "KFACSGD", **options.get(name, {})), alone(make, language)
        run.optimizer.communication_dtype = torch.float64 if name == "EKFACSGD" else None  # halves of matrices
        data = lambda step: part(words(step))  # noqa: E731
        for step in range(7):
            assert_close(run.train(data, range(step, step + 1)), one.train(words, range(step, step + 1)))
        for key, value in one.optimizer.metrics().items():
            if key not in ("condition", "new_bases"):  # of parts
                assert abs(float(run.optimizer.metrics()[key]) - float(value)) < 1e-6, (name, key)
        shards = run.optimizer._ranks()
        assert len(shards.divided) >= size // 2, name
        folder = folder_of_all()
        dcp.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, checkpoint_id=folder)
        again = Run("shards", make, language)
        if name == "KFACAdamW":
            parameters, state = get_state_dict(run.model, run.optimizer)
            set_state_dict(again.model, again.optimizer, model_state_dict=parameters, optim_state_dict=state)
        else:
            load_from(folder, again)
        again.train(data, range(7, 9))
        alone_again = load_from(folder, alone(make, language), no_dist=True).train(words, range(7, 9))
        assert_close(again, one.train(words, range(7, 9)))
        assert_close(alone_again, one)
        several, folder = Run("shards", make, language), folder_of_all()
        for p, q in zip(several.model.parameters(), one.module.parameters(), strict=True):
            p.detach().copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
        state = copy.deepcopy(one.optimizer.state_dict())
        if name in ("KFACSGD", "KFACAdamW"):
            dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/{dist.get_rank()}", no_dist=True)
            state = state_to_load(several.optimizer, f"{folder}/{dist.get_rank()}")
            dcp.load({"optimizer": state}, checkpoint_id=f"{folder}/{dist.get_rank()}", no_dist=True)
        several.optimizer.load_state_dict(state)
        assert_close(several.train(data, range(9, 11)), one.train(words, range(9, 11)))
        poisoned = 0
        for step in range(11, 15):  # what is rejected of some rows, is of all
            for each, of in ((several, data), (one, words)):
                each.backward(lambda each=each, of=of, step=step: each.loss(*of(step)))
                for curvature in [*each.optimizer._curvature.collected.curvature.values()][-1:]:
                    curvature.sums[0].view(-1)[0], poisoned = torch.nan, poisoned + 1
                each.optimizer.step()
            assert_close(several, one)
        assert poisoned >= 2
        with raises("one of several ranks"):
            alone(make, language).optimizer.load_state_dict(run.optimizer.state_dict())
    for kind in (KFACSGD, EKFACSGD):  # of which the first refresh has factors of two kinds
        run = Run("shards", partial(kind, **few), language).train(data, range(3))
        assert not set(run.optimizer.coverage().values()) - {"kronecker", "dense"}


@check("shards")
def orthogonalized_matrices_have_one_owner() -> None:
    make = lambda p: KFACAdamW(p, lr=0.01, fisher="exact", max_factor_size=16, orthogonalize=True, **EVERY)  # noqa: E731
    run, one = Run("shards", make, language), alone(make, language)
    data = lambda step: part(words(step))  # noqa: E731
    assert_close(run.train(data, range(5)), one.train(words, range(5)))
    run = Run("shards", lambda p: KFACAdamW(p, max_factor_size=16), language).train(data, range(2))
    before = weights(run)
    run.optimizer.param_groups[0]["orthogonalize"] = True
    with raises("got orthogonalize=True after ranks had divided"):
        run.train(data, range(2, 3))
    assert all(map(torch.equal, weights(run), before))


@check("shards")
def state_falls_with_the_ranks() -> None:
    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), *[nn.Linear(36, 36, bias=False) for _ in range(12)]).double()

    for name in ("KFACSGD", "KFACAdamW"):
        runs = alone(EXACT[name], layers).train(batch, range(2)), Run("shards", EXACT[name], layers)
        runs[1].train(own, range(2))
        whole, of_rank = (sum(tensor.numel() for tensor in tensors_of(run.optimizer)) for run in runs)
        assert of_rank == whole // dist.get_world_size()


# --------------------------------------------------------------------------------------------------------- checkpoints


@check("copies")
def ranks_draw_samples_of_their_own() -> None:
    run = Run("copies", SAMPLED["KFACSGD"])
    for step in range(2):  # before and after the ranks have met
        torch.manual_seed(0)
        run.backward(lambda: run.loss(*batch(0)))
        drawn = [c.sums[0] for c in run.optimizer._curvature.collected.curvature.values()]
        same = [torch.equal(tensor, of_first_rank(tensor)) for tensor in drawn]
        assert not any(same) or dist.get_rank() == 0, (step, same)
        run.optimizer.step()


@check("copies")
def a_checkpoint_of_any_rank_resumes_bit_for_bit() -> None:
    for make in SAMPLED.values():
        torch.manual_seed(100 + dist.get_rank())  # as for data augmentation
        run = Run("copies", make)
        torch.manual_seed(100 + dist.get_rank())
        run.train(own, range(5))
        saved = [None, copy.deepcopy((run.module.state_dict(), run.optimizer.state_dict()))]
        dist.broadcast_object_list(saved, dist.get_world_size() - 1)
        run.train(own, range(5, 9))
        torch.manual_seed(7)
        resumed = Run("copies", make)
        resumed.load(*saved[1]).train(own, range(5, 9))
        assert_close(run, resumed, atol=0)
        assert_alike(resumed)


@check("copies")
def resume_on_another_number_of_ranks() -> None:
    data = {"alone": batch, "copies": own}
    for make in EXACT.values():
        straight = alone(make).train(batch, range(9))
        for first, second in (("alone", "copies"), ("copies", "alone")):
            run, resumed = Run(first, make).train(data[first], range(5)), Run(second, make)
            resumed.load(run.module.state_dict(), copy.deepcopy(run.optimizer.state_dict()))
            assert_close(resumed.train(data[second], range(5, 9)), straight)
    one, run = alone(SAMPLED["KFACSGD"]).train(batch, range(3)), Run("copies", SAMPLED["KFACSGD"])
    run.load(one.module.state_dict(), one.optimizer.state_dict())
    state = run.optimizer._curvature.sampler().get_state()
    assert torch.equal(of_first_rank(state), state) == (dist.get_rank() == 0)


@check("shards")
def resumption_by_get_and_set_state_dict() -> None:
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        first, second = (Run("shards", EXACT["KFACAdamW"], by_layers=True) for _ in range(2))
        first.train(own, range(5))
        model, state = copy.deepcopy(get_state_dict(first.model, first.optimizer, options=options))
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=state, options=options)
        assert_close(first.train(own, range(5, 8)), second.train(own, range(5, 8)), atol=0)


def load_from(folder: str, run: Run, **options: Any) -> Run:
    state = {"model": run.model.state_dict(), "optimizer": state_to_load(run.optimizer, folder)}
    dcp.load(state, checkpoint_id=folder, **options)
    return run.load(state["model"], state["optimizer"])


def folder_of_all() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


@check("shards")
def checkpoints_resume_on_another_number_of_ranks() -> None:
    for name in ("KFACSGD", "EKFACSGD", "KFACAdamW"):
        folder, straight = folder_of_all(), alone(EXACT[name]).train(batch, range(4))
        first = Run("shards", EXACT[name], by_layers=True).train(own, range(4))
        dcp.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, checkpoint_id=folder)
        several = load_from(folder, Run("shards", EXACT[name]))
        one = load_from(folder, alone(EXACT[name]), no_dist=True)
        assert several.optimizer.coverage() == one.optimizer.coverage() == straight.optimizer.coverage()
        straight.train(batch, range(4, 8))
        assert_close(one.train(batch, range(4, 8)), straight)
        assert_close(several.train(own, range(4, 8)), straight)
        # from one process to several
        again = Run("shards", EXACT[name], by_layers=True)
        for p, q in zip(again.model.parameters(), straight.module.parameters(), strict=True):
            p.detach().copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
        again.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
        assert again.optimizer.coverage() == straight.optimizer.coverage()
        assert_close(again.train(own, range(8, 10)), straight.train(batch, range(8, 10)))
        saved = [again.optimizer.state_dict()]
        dist.broadcast_object_list(saved, 0)
        with raises("the state of another rank", "state_to_load") if dist.get_rank() else nullcontext():
            several.optimizer.load_state_dict(saved[0])


def saved_by_all_but_one(make: Callable[..., Any], state_of: Callable[[Run], dict[str, Any]]) -> str:
    """The folder of a checkpoint of four steps that all ranks but the last took together."""
    size, folder = dist.get_world_size() - 1, folder_of_all()
    mesh = DeviceMesh("cpu", list(range(size)))
    if dist.get_rank() < size:
        first = Run("shards", make, mesh=mesh)
        first.train(lambda step: tuple(x[dist.get_rank() :: size] for x in batch(step)), range(4))
        dcp.save(state_of(first), checkpoint_id=folder, process_group=mesh.get_group())
    dist.barrier()
    return folder


@check("shards")
def from_all_ranks_but_one_to_all() -> None:
    make = EXACT["EKFACSGD"]
    state_of = lambda run: {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}  # noqa: E731
    run = load_from(saved_by_all_but_one(make, state_of), Run("shards", make, by_layers=True))
    assert_close(run.train(own, range(4, 8)), alone(make).train(batch, range(8)))


@check("shards")
def from_some_ranks_to_all_by_get_and_set_state_dict() -> None:
    make = EXACT["KFACAdamW"]
    folder = saved_by_all_but_one(
        make, lambda run: dict(zip(("model", "optimizer"), get_state_dict(run.model, run.optimizer), strict=True))
    )
    run = Run("shards", make, by_layers=True)
    into = {"model": run.model.state_dict(), "optimizer": state_to_load(run.optimizer, folder)}
    dcp.load(into, checkpoint_id=folder)
    model, optimizer, options = into["model"], into["optimizer"], StateDictOptions(strict=False)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
    assert_close(run.train(own, range(4, 8)), alone(make).train(batch, range(8)))


# ---------------------------------------------------------------------------------------- what happens to one rank


@check("copies", "shards")
def a_gradient_that_is_not_finite_on_one_rank(kind: str) -> None:
    run = Run(kind, EXACT["KFACSGD"], by_layers=True).train(own, range(3))
    before = weights(run)
    x, y = own(3)
    run.backward(lambda: run.loss(x * torch.inf if dist.get_rank() else x, y))
    with raises("not finite"):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(run), before, strict=True))
    run.train(own, range(4, 8))
    assert all(values.isfinite().all() for values in weights(run))
    if kind == "copies":
        assert_alike(run)


@check("copies")
def curvature_that_is_not_finite_on_one_rank() -> None:
    run = Run("copies", EXACT["KFACSGD"])
    run.optimizer.curvature_every = run.optimizer.inverse_every = 1
    run.train(own, range(2))
    weight = run.module[5].weight
    run.backward(lambda: run.loss(*own(2)))
    if dist.get_rank() == 1:
        run.optimizer._curvature.collected.curvature[weight].sums[0][0, 0] = torch.nan
    factors = [f.clone() for f in run.optimizer.state[weight]["curvature"].factors]
    run.optimizer.step()
    kept = run.optimizer.state[weight]["curvature"]
    assert all(torch.equal(a, b) for a, b in zip(kept.factors, factors, strict=True))
    assert_alike(run.train(own, range(3, 6)))


@check("shards")
def steps_without_curvature() -> None:
    run = Run("shards", EXACT["KFACSGD"])
    with backpack():
        run.backward(lambda: run.loss(*own(0)))
    before = weights(run)
    with warned() as said:
        run.optimizer.step()
    assert ["takes plain gradients" in message for message in said] == [True]
    assert not any(torch.equal(p, old) for p, old in zip(weights(run), before, strict=True))
    run.train(own, range(2))
    assert "none" not in run.optimizer.coverage().values()


@check("copies")
def ranks_in_different_states() -> None:
    run, fresh, one = (
        Run("copies", EXACT["KFACSGD"]).train(own, range(5)),
        *(Run("copies", EXACT["KFACSGD"]) for _ in "ab"),
    )
    state = copy.deepcopy(run.optimizer.state_dict())
    assert min(state["param_groups"][0]["run"]["due"]) > 5
    if dist.get_rank() == 0:
        fresh.optimizer.load_state_dict(state)
    fresh.backward(lambda: fresh.loss(*own(5)))
    with raises("not in the same state", "load the same checkpoint", "process_group"):
        fresh.optimizer.step()
    one.backward(lambda: one.loss(*own(0)))
    if dist.get_rank() == 1:
        one.module.zero_grad()
    with raises("not in the same state", "'gradients'"):
        one.optimizer.step()


@check("copies", "shards")
def dtypes_of_states_that_differ(kind: str) -> None:
    run = Run(kind, SAMPLED["KFACAdamW"]).train(own, range(2))
    run.optimizer.state_dtype = torch.bfloat16 if dist.get_rank() else None
    with raises("not in the same state", f"'state_dtype': '{'torch.bfloat16' if dist.get_rank() else None}'"):
        run.train(own, range(2, 10))


@check("copies")
def rates_and_parameters_that_differ() -> None:
    make = lambda p: KFACSGD(p, lr=0.1 if dist.get_rank() else 0.2, fisher="exact")  # noqa: E731
    with raises("not in the same state", "'lr': [0.1]" if dist.get_rank() else "'lr': [0.2]"):
        Run("copies", make).train(own, range(3))
    run = Run("copies", EXACT["KFACSGD"])
    with raises("the ranks' parameters differ", "DistributedDataParallel"):
        run.train(own, range(6), lambda x, y: run.lossfunc(run.module(x), y))


@check("copies")
def a_rank_that_leaves_out_a_step() -> None:
    """All may, as they do where a scaler finds an overflow."""
    run = Run("copies", lambda p: KFACSGD(p, fisher="exact", curvature_every=1))
    for step in range(4):
        run.backward(lambda step=step: run.loss(*own(step)))
        if step != 1:
            run.optimizer.step()
    assert_alike(run)
    run.backward(lambda: run.loss(*own(4)))
    with raises("not in the same state", f"'step': {3 if dist.get_rank() else ''}"):
        if dist.get_rank() == 0:
            run.optimizer.zero_grad()
        else:
            run.optimizer.step()


@check("shards")
def a_rank_that_leaves_out_a_step_between_refreshes() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))

    def make(params: Any) -> KFACSGD:
        optimizer = KFACSGD(params, fisher="exact", curvature_every=100)
        optimizer.process_group = group
        return optimizer

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("of_short_patience",))  # else the same as later ones
    run = Run("shards", make, mesh=mesh).train(own, range(3))
    run.backward(lambda: run.loss(*own(3)))
    if dist.get_rank() == 0:
        with raises("step 3 were not exchanged", "a rank has left out this step"):
            run.optimizer.step()
    else:
        with contextlib.suppress(RuntimeError):  # of the backend, too
            run.train(own, range(4, 5))
    dist.barrier()
    dist.destroy_process_group(group)  # which is broken


@check("copies")
def parameters_of_different_kinds() -> None:
    run = Run("copies", EXACT["KFACSGD"])
    run.backward(lambda: run.loss(*own(0)))
    curvature = run.optimizer._curvature.collected.curvature[run.module[7].weight]
    if dist.get_rank() == 1:
        curvature.sums, curvature.of_input = [curvature.sums[0]], None
    with raises("parameter 0.6 has", "same modules on every rank"):
        run.optimizer.step()
    assert_alike(run.train(own, range(2)))


@check("copies")
def groups() -> None:
    rank = dist.get_rank()
    run = alone(EXACT["KFACSGD"]).train(batch, range(rank, 4))  # not equally often
    assert copy.deepcopy(run.optimizer).process_group is None
    for ranks in ([0, 1], [1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            together = Run("copies", EXACT["KFACSGD"], process_group=group)
            together.optimizer.process_group = group
            size, start = len(ranks), ranks.index(rank)
            together.train(lambda step: tuple(each[start::size] for each in batch(step)), range(5))  # noqa: B023
            assert_close(together, alone(EXACT["KFACSGD"]).train(batch, range(5)))


# ------------------------------------------------------------------------------------------------ what is refused


@check("shards")
def what_is_refused() -> None:
    run = Run("shards", EXACT["KFACSGD"]).train(own, range(1))
    x, y = own(1)
    for extension in (BatchGrad(), KFAC()):
        with raises("fully_shard", "DistributedDataParallel", "sharded over ranks"), backpack(extension):
            cross_entropy(run.model(x), y).backward()
    assert not any(hasattr(p, "grad_batch") or hasattr(p, "kfac") for p in run.model.parameters())
    if hasattr(run.model, "reset_iter_state"):
        run.model.reset_iter_state()
    new = Run("shards", EXACT["KFACSGD"])
    loss = new.loss(x, y)
    new.model[0].stride = (1, 1) if dist.get_rank() else (2, 2)
    with warned() as said:
        loss.backward()
    why = "an attribute of the module was changed" if dist.get_rank() else "refused on another rank"
    assert any("takes plain gradients" in message and why in message for message in said)
    new.model[0].stride = (2, 2)
    new.train(own, range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with raises("is not sharded, but other parameters are"):
        KFACSGD([nn.Parameter(torch.ones(2)), *run.model.parameters()])
    if dist.get_world_size() == 2:
        single = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        for group, said in ((None, "process_group is None"), (single, "set optimizer.process_group")):
            other = KFACSGD(shard(network(), mesh=mesh).parameters())
            other.process_group = group
            with raises(said):
                other.step()
    run.train(own, range(1, 3))


@check("copies")
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


def main(path: str, *names: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=3))
    results: dict[str, str] = {}
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        with open(f"{path}.{dist.get_rank()}", "w") as file:
            json.dump(results, file)
        if results[name]:
            os._exit(1)  # the other ranks may wait for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    # as where samples are looked for in vain
    warnings.simplefilter("error", CurvoptWarning)
    main(*sys.argv[1:])
