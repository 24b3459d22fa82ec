"""What ``test_distributed.py`` runs in several processes: ``torchrun ... sharded_worker.py FILE CHECK ...``.

Here are the checks of models that ``fully_shard`` divides, in ``distributed_worker.py`` those of copies of a model.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_worker import CHECKS as REPLICATED
from distributed_worker import (
    EXACT,
    SAMPLED,
    Heads,
    Run,
    batch,
    compare_communication_dtypes,
    compare_linear_losses,
    compare_losses_without_a_ggn,
    main,
    network,
    of_total,
    own,
    part,
    raises,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from curvopt import backpack, extend
from curvopt.errors import CurvoptWarning
from curvopt.extensions import KFAC, BatchGrad
from curvopt.optim import KFACSGD, KFACAdamW, KFACPreconditioner, state_to_load

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def shard(model: nn.Module, by_layers: bool = False, **options: Any) -> nn.Module:
    for layer in model.children() if by_layers else ():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


class Sharded:
    """A sharded model and its optimizer."""

    def __init__(self, make: Callable[..., Any], net: Callable[[], nn.Module] = network, **options: Any) -> None:
        self.model = shard(net(), **options)
        self.lossfunc = nn.CrossEntropyLoss()
        self.optimizer = make(self.model.parameters())
        self.optimizer.attach(self.model, self.lossfunc)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.lossfunc(self.model(x), y).backward()
        self.optimizer.step()

    def train(self, data: Callable[[int], tuple[Tensor, ...]], steps: range) -> Sharded:
        for step in steps:
            self.step(*data(step))
        return self

    def weights(self) -> list[Tensor]:
        return [p.full_tensor().detach() for p in self.model.parameters()]


def assert_close(left: Any, right: Any, atol: float = 1e-6) -> None:
    for a, b in zip(left.weights(), right.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


def assert_moved(run: Any) -> None:
    for a, b in zip(run.weights(), network().parameters(), strict=True):
        assert (a - b).abs().max() > 1e-4


def entries(optimizer: torch.optim.Optimizer) -> int:
    """Numbers in the state of an optimizer."""
    lists = (v if isinstance(v, list) else [v] for state in optimizer.state.values() for v in state.values())
    return sum(tensor.numel() for tensors in lists for tensor in tensors)


# --------------------------------------------------------------------------------- equal to one rank on the whole batch


@check
def parts_of_a_batch_are_the_batch() -> None:
    for i, (name, make) in enumerate(EXACT.items()):
        alone = Run(make, alone=True).train(batch, range(6))
        run = Sharded(make, by_layers=(i + dist.get_world_size()) % 2 == 0).train(own, range(6))
        assert_close(run, alone), name
        assert_moved(run)
        # the ranks tell of one step, not of that of the parameters that they own
        assert run.optimizer.metrics().keys() == alone.optimizer.metrics().keys()
        for key, value in alone.optimizer.metrics().items():
            assert abs(float(run.optimizer.metrics()[key]) - float(value)) < 1e-6, (name, key)
        assert run.optimizer.coverage() == alone.optimizer.coverage()


@check
def directions_without_curvature() -> None:
    """Of a batch that is smaller than the layers: the basis is chosen by a rule, not by rounding."""
    weights = []
    for alone in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).double()
        if not alone:
            shard(model, by_layers=True)
        optimizer = KFACAdamW(model, fisher="exact", curvature_every=1)
        optimizer.process_group = None if alone else "world"
        for step in range(8):
            drawn = torch.Generator().manual_seed(step)
            x, y = torch.randn(4, 12, generator=drawn).double(), torch.randint(3, (4,), generator=drawn)
            if not alone:
                x, y = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in (x, y))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        weights.append([p.detach() if alone else p.full_tensor().detach() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@check
def resumption_by_get_and_set_state_dict() -> None:
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        first, second = (Sharded(EXACT["KFACAdamW"], by_layers=True) for _ in range(2))
        first.train(own, range(5))
        kept = copy.deepcopy(get_state_dict(first.model, first.optimizer, options=options))
        model, state = kept
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=state, options=options)
        for run in (first, second):
            run.train(own, range(5, 8))
        assert_close(first, second, atol=0)


@check
def extended_or_attached_before() -> None:
    alone = Run(EXACT["KFACSGD"], alone=True).train(batch, range(5))
    for order in ("extend", "attach"):
        model, lossfunc = network(), nn.CrossEntropyLoss()
        optimizer = EXACT["KFACSGD"](model.parameters())
        if order == "attach":
            optimizer.attach(model, lossfunc)
        else:
            extend(model), extend(lossfunc)
        shard(model, by_layers=True)
        if order == "extend":
            optimizer = EXACT["KFACSGD"](model.parameters())
        for step in range(5):
            x, y = own(step)
            optimizer.zero_grad()
            model.zero_grad()
            loss = lossfunc(model(x), y)
            with optimizer.curvature():
                loss.backward()
            optimizer.step()
        for p, q in zip(model.parameters(), alone.weights(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-6)


@check
def preconditioner() -> None:
    models = [network(), network()]
    shard(models[0], by_layers=True)
    for i, (model, data) in enumerate(zip(models, (own, batch), strict=True)):
        lossfunc = extend(nn.CrossEntropyLoss())
        pre = KFACPreconditioner(model, fisher="exact", curvature_every=3, inverse_every=4)
        pre.process_group = None if i else "world"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            x, y = data(step)
            optimizer.zero_grad()
            with pre.curvature():
                lossfunc(model(x), y).backward()
            pre.step()
            optimizer.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-6)


@check
def unequal_and_empty_batches() -> None:
    size = dist.get_world_size()
    for name in ("KFACSGD", "EKFACSGD"):
        run, alone = Sharded(EXACT[name], by_layers=True), Run(EXACT[name], alone=True)
        for step in range(4):
            bounds = [[0] * size + [60], [0, *[60] * size], [0, *range(25, 25 + size - 1), 60]][step % 3]
            x, y = part(batch(step), bounds)
            run.optimizer.zero_grad()
            of_total(run, x, y, 60).backward()
            run.optimizer.step()
            alone.train(batch, range(step, step + 1))
            assert_close(run, alone)


@check
def accumulation() -> None:
    for sync in (False, True):
        run, alone = Sharded(EXACT["KFACSGD"], by_layers=True), Run(EXACT["KFACSGD"], alone=True)
        for step in range(4):
            x, y = own(step)
            n = len(x) // 2
            run.optimizer.zero_grad()
            for last, rows in ((False, slice(n)), (True, slice(n, None))):
                run.model.set_requires_gradient_sync(last or sync)
                (run.lossfunc(run.model(x[rows]), y[rows]) / 2).backward()
            run.optimizer.step()
            alone.train(batch, range(step, step + 1))
            assert_close(run, alone)


@check
def gradients_that_are_reset_drop_their_curvature() -> None:
    run, alone = Sharded(EXACT["KFACSGD"]), Run(EXACT["KFACSGD"], alone=True)
    for step in range(4):
        for seen in (step + 100, step):
            run.model.zero_grad(set_to_none=step % 2 == 0)
            run.lossfunc(run.model(own(seen)[0]), own(seen)[1]).backward()
        run.optimizer.step()
        alone.train(batch, range(step, step + 1))
        assert_close(run, alone)


class Blocks(nn.Module):
    """Residual blocks whose activations are computed again in the backward, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen = nn.Linear(36, 7), nn.Linear(7, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.norm, self.last = nn.LayerNorm(7), nn.Linear(7, 5, bias=False)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.first(x.flatten(1))))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(self.norm(x))


@check
def blocks_with_checkpoints_and_frozen_layers() -> None:
    def make(p: Any) -> KFACSGD:
        return KFACSGD([p for p in p if p.requires_grad], lr=0.1, fisher="exact", curvature_every=3, weight_decay=0.1)

    run, alone = Sharded(make, Blocks), Run(make, True, Blocks)
    by_blocks = Blocks()
    for block in by_blocks.blocks:
        fully_shard(block)
    runs = [run, Sharded(make, lambda: by_blocks)]
    for step in range(4):
        alone.train(batch, range(step, step + 1))
        for each in runs:
            assert_close(each.train(own, range(step, step + 1)), alone)


@check
def replicas_of_shards() -> None:
    size = dist.get_world_size()
    alone = Run(EXACT["EKFACSGD"], alone=True).train(batch, range(6))
    for shape in {(size, 1), (size // 2, 2)}:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        assert_close(Sharded(EXACT["EKFACSGD"], by_layers=True, mesh=mesh).train(own, range(6)), alone)


@check
def options_of_fully_shard() -> None:
    size = dist.get_world_size()

    def columns(p: nn.Parameter) -> Shard:
        return Shard(1 if p.ndim > 1 and p.shape[1] % size == 0 else 0)

    alone = Run(EXACT["KFACSGD"], alone=True).train(batch, range(4))
    for options in ({"reshard_after_forward": False}, {"reshard_after_forward": True, "shard_placement_fn": columns}):
        run = Sharded(EXACT["KFACSGD"], by_layers=True, **options).train(own, range(4))
        assert_close(run, alone)
        with torch.no_grad():
            run.model(own(0)[0])
        run.optimizer.attach(run.model)


class Tied(nn.Module):
    """Two layers with one weight, and a model that does not use all of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last, self.unused = (nn.Linear(36, n) for n in (36, 36, 5, 4))
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


@check
def tied_weights_and_unused_layers() -> None:
    for name in ("KFACSGD", "EKFACSGD"):
        run, alone = Sharded(EXACT[name], Tied).train(own, range(4)), Run(EXACT[name], True, Tied)
        assert_close(run, alone.train(batch, range(4)))


@check
def heads_take_turns() -> None:
    for name in ("KFACSGD", "EKFACSGD"):
        run, alone = Sharded(EXACT[name], Heads), Run(EXACT[name], True, Heads)
        for step, head in enumerate([0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1]):
            for each, (x, y) in ((run, own(step)), (alone, batch(step))):
                each.optimizer.zero_grad()
                with each.optimizer.curvature():
                    each.lossfunc(each.model(x, head), y).backward()
                each.optimizer.step()
            assert_close(run, alone)
            clocks = [[each.optimizer._progress[one] for one in ("steps", "due")] for each in (run, alone)]
            assert clocks[0] == clocks[1], (step, clocks)
        assert len(set(clocks[0][0])) > 1


@check
def mixed_precision() -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)
    alone = Run(EXACT["EKFACSGD"], alone=True).train(batch, range(5))
    run = Sharded(EXACT["EKFACSGD"], by_layers=True, mp_policy=low).train(own, range(5))
    assert_close(run, alone, 1e-4)
    assert all(p.dtype == torch.float64 for p in run.model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = Blocks().float()
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    run = Sharded(lambda p: KFACSGD([q for q in p if q.requires_grad], lr=0.1), lambda: net, mp_policy=policy)
    x, y = own(0)
    losses = []
    for step in range(9):
        losses.append(nn.functional.cross_entropy(run.model(x.float()).float(), y).item())
        run.step(own(step)[0].float(), own(step)[1])
    assert losses[-1] < 0.9 * losses[0]
    assert all(f.dtype == torch.float32 for state in run.optimizer.state.values() for f in state["factors"])


@check
def sampled_steps() -> None:
    for make in SAMPLED.values():
        assert_moved(Sharded(make, by_layers=True).train(own, range(3)))


@check
def losses_without_a_ggn() -> None:
    compare_losses_without_a_ggn(Sharded, ("KFACSGD", "EKFACSGD"), nn.functional.cross_entropy)


@check
def losses_that_are_linear_in_a_batch() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*takes the empirical quantity for such batches")
        compare_linear_losses(Sharded, ("KFACSGD", "EKFACSGD"), together=True)


@check
def communication_dtypes() -> None:
    compare_communication_dtypes(Sharded, ("KFACSGD", "EKFACSGD"))


# ----------------------------------------------------------------------------------------------------- state and errors


@check
def state_falls_with_the_ranks() -> None:
    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), *[nn.Linear(36, 36, bias=False) for _ in range(12)]).double()

    for name in ("KFACSGD", "KFACAdamW"):
        alone = Run(EXACT[name], True, layers).train(batch, range(2))
        run = Sharded(EXACT[name], layers).train(own, range(2))
        whole = entries(alone.optimizer)
        assert entries(run.optimizer) == whole // dist.get_world_size()


def load(model: nn.Module, optimizer: Any, folder: str, **options: Any) -> None:
    state = {"model": model.state_dict(), "optimizer": state_to_load(optimizer, folder)}
    dcp.load(state, checkpoint_id=folder, **options)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def folder_of_all() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


@check
def checkpoints_resume_on_another_number_of_ranks() -> None:
    for name in ("KFACSGD", "EKFACSGD", "KFACAdamW"):
        folder = folder_of_all()
        alone = Run(EXACT[name], alone=True).train(batch, range(4))
        first = Sharded(EXACT[name], by_layers=True).train(own, range(4))
        dcp.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, checkpoint_id=folder)
        several, one = Sharded(EXACT[name]), Run(EXACT[name], alone=True)
        load(several.model, several.optimizer, folder)
        load(one.module, one.optimizer, folder, no_dist=True)
        assert several.optimizer.coverage() == one.optimizer.coverage() == alone.optimizer.coverage()
        alone.train(batch, range(4, 8))
        assert_close(one.train(batch, range(4, 8)), alone)
        assert_close(several.train(own, range(4, 8)), alone)
        # from one process to several
        again = Sharded(EXACT[name], by_layers=True)
        for p, q in zip(again.model.parameters(), alone.module.parameters(), strict=True):
            p.detach().copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
        again.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
        assert again.optimizer.coverage() == alone.optimizer.coverage()
        assert_close(again.train(own, range(8, 10)), alone.train(batch, range(8, 10)))
        saved = [again.optimizer.state_dict()]
        dist.broadcast_object_list(saved, 0)
        with raises("the state of another rank", "state_to_load") if dist.get_rank() else nullcontext():
            several.optimizer.load_state_dict(saved[0])


@check
def from_all_ranks_but_one_to_all() -> None:
    size, folder = dist.get_world_size() - 1, folder_of_all()
    mesh = DeviceMesh("cpu", list(range(size)))
    alone = Run(EXACT["EKFACSGD"], alone=True).train(batch, range(4))
    if dist.get_rank() < size:
        first = Sharded(EXACT["EKFACSGD"], mesh=mesh)
        first.train(lambda step: tuple(x[dist.get_rank() :: size] for x in batch(step)), range(4))
        state = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())
    dist.barrier()
    run = Sharded(EXACT["EKFACSGD"], by_layers=True)
    load(run.model, run.optimizer, folder)
    assert_close(run.train(own, range(4, 8)), alone.train(batch, range(4, 8)))


@check
def from_some_ranks_to_all_by_get_and_set_state_dict() -> None:
    size, folder = dist.get_world_size() - 1, folder_of_all()
    mesh = DeviceMesh("cpu", list(range(size)))
    alone = Run(EXACT["KFACAdamW"], alone=True).train(batch, range(4))
    if dist.get_rank() < size:
        first = Sharded(EXACT["KFACAdamW"], mesh=mesh)
        first.train(lambda step: tuple(x[dist.get_rank() :: size] for x in batch(step)), range(4))
        state = dict(zip(("model", "optimizer"), get_state_dict(first.model, first.optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())
    dist.barrier()
    run = Sharded(EXACT["KFACAdamW"], by_layers=True)
    into = {"model": run.model.state_dict(), "optimizer": state_to_load(run.optimizer, folder)}
    dcp.load(into, checkpoint_id=folder)
    model, optimizer, options = into["model"], into["optimizer"], StateDictOptions(strict=False)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
    assert_close(run.train(own, range(4, 8)), alone.train(batch, range(4, 8)))


@check
def what_is_refused() -> None:
    run = Sharded(EXACT["KFACSGD"]).train(own, range(1))
    words = ("fully_shard", "DistributedDataParallel", "sharded over ranks")
    x, y = own(1)
    lossfunc = extend(nn.CrossEntropyLoss())
    for extension in (BatchGrad(), KFAC()):
        with raises(*words), backpack(extension):
            lossfunc(run.model(x), y).backward()
    assert not any(hasattr(p, "grad_batch") or hasattr(p, "kfac") for p in run.model.parameters())
    if hasattr(run.model, "reset_iter_state"):
        run.model.reset_iter_state()
    new = Sharded(EXACT["KFACSGD"])
    loss = new.lossfunc(new.model(x), y)
    new.model[0].stride = (1, 1) if dist.get_rank() else (2, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss.backward()
    why = "an attribute of the module was changed" if dist.get_rank() else "refused on another rank"
    assert any("takes plain gradients" in str(each.message) and why in str(each.message) for each in said)
    new.model[0].stride = (2, 2)
    new.train(own, range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with raises("is not sharded, but other parameters are"):
        KFACSGD([nn.Parameter(torch.ones(2)), *run.model.parameters()])
    if dist.get_world_size() == 2:
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        for group, said in ((None, "process_group is None"), (alone, "set optimizer.process_group")):
            other = KFACSGD(shard(network(), mesh=mesh).parameters())
            other.process_group = group
            with raises(said):
                other.step()
    run.train(own, range(1, 3))


@check
def gradients_that_are_not_finite_on_one_rank() -> None:
    run = Sharded(EXACT["KFACSGD"], by_layers=True).train(own, range(3))
    before = run.weights()
    x, y = own(3)
    run.optimizer.zero_grad()
    run.lossfunc(run.model(x * torch.inf if dist.get_rank() else x), y).backward()
    with raises("not finite"):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))
    run.train(own, range(4, 6))
    assert all(weights.isfinite().all() for weights in run.weights())


@check
def steps_without_curvature() -> None:
    run = Sharded(EXACT["KFACSGD"])
    run.optimizer.zero_grad()
    with backpack():
        run.lossfunc(run.model(own(0)[0]), own(0)[1]).backward()
    before = [p.full_tensor().clone() for p in run.model.parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CurvoptWarning)
        run.optimizer.step()
    assert ["takes plain gradients" in str(each.message) for each in said] == [True]
    for p, old in zip(run.model.parameters(), before, strict=True):
        assert isinstance(p.grad.to_local(), Tensor)
        assert not torch.equal(p.full_tensor(), old)
    run.train(own, range(2))
    assert "none" not in run.optimizer.coverage().values()


@check
def groups_are_added() -> None:
    runs = []
    for net, data, group in ((network(), batch, None), (shard(network(), by_layers=True), own, "world")):
        params, lossfunc = list(net.parameters()), nn.CrossEntropyLoss()
        optimizer = EXACT["EKFACSGD"](params[4:])
        optimizer.process_group = group
        optimizer.attach(net, lossfunc)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": params[:4], "lr": 0.05})
            net.zero_grad()
            lossfunc(net(data(step)[0]), data(step)[1]).backward()
            optimizer.step()
        runs.append((params, optimizer))
    (whole, one), (shards, several) = runs
    for p, q in zip(shards, whole, strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-6)
    assert several.coverage() == one.coverage()


@check
def two_optimizers_of_one_model() -> None:
    models = [network(), shard(network(), by_layers=True)]
    lossfunc = nn.CrossEntropyLoss()
    for model, data, group in zip(models, (batch, own), (None, "world"), strict=True):
        params = list(model.parameters())
        pair = [EXACT["KFACSGD"](params[:4]), KFACAdamW(params[4:], lr=0.01, fisher="exact")]
        for each in pair:
            each.process_group = group
            each.attach(model, lossfunc)
        for step in range(5):
            x, y = data(step)
            model.zero_grad()
            lossfunc(model(x), y).backward()
            for each in pair:
                each.step()
    for p, q in zip(*(model.parameters() for model in models[::-1]), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-6)


ALL = CHECKS | {f"replicated {name}": check for name, check in REPLICATED.items()}

if __name__ == "__main__":
    # as where samples are looked for in vain
    warnings.simplefilter("error", CurvoptWarning)
    main(ALL, *sys.argv[1:])
