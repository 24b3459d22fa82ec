"""Curvature optimizers in several processes: one model, one step, the work divided.

Train with ``DistributedDataParallel`` as with any torch optimizer; nothing else changes::

    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    optimizer = KFACSGD(model)
    for x, y in loader:  # of a DistributedSampler
        optimizer.zero_grad()
        lossfunc(model(x), y).backward()
        optimizer.step()

On steps that refresh the curvature, ``step()`` first averages the curvature over the ranks, as DDP does with
gradients. So the loss of the step is the mean of the ranks' losses, and R ranks on equal parts of a batch take the step
that one rank takes on the whole. Where the parts are unequal, let each rank's loss be the sum over its samples times R,
divided by the number of samples on all ranks; a rank may then have none. Between refreshes nothing is exchanged.

Inverses and eigenbases are divided among the ranks by cost (d³ for a ``[d, d]`` matrix), each is computed once and
broadcast. All decisions (which curvature is not finite, which bases are renewed) are made on numbers that are equal on
all ranks, so no rank steps alone.

All ranks build the optimizer from one model, load one checkpoint (that of any rank will do), and call ``step()``
equally often. A rank that leaves out a step which refreshes curvature ends in an error that names the step. Under
``fully_shard``, so does any other step, once the timeout of the process group is over, if the backend raises an error
then, as gloo does. With ``DistributedDataParallel`` such a rank is a step behind at the next refresh, where its
transfers no longer match those of other ranks, so that the backend ends the process or waits for ever. So ranks have to
agree to leave out a step (as a loss is not finite, say), by an all-reduce before it. Ranks that run out of batches
before others cannot be waited for by ``torch.distributed.algorithms.Join``; give them empty batches. Monte-Carlo
samples follow from a seed that all ranks share, the number of draws and the rank: each rank has its own stream, and a
run resumes bit for bit on as many ranks as it had.

``optimizer.process_group`` chooses other ranks than all, or with ``None`` a process on its own.
``optimizer.communication_dtype = torch.bfloat16`` sends curvature by halves of matrices and in fewer bits, see
`curvopt.optim.step.CurvatureOptimizer.communication_dtype`.

Where ``fully_shard`` divides the parameters, each has one owner, see `curvopt.optim.sharding`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from typing import Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from curvopt.errors import CurvoptError
from curvopt.utils.compression import half, half_shape, sent_dtype, whole


class Ranks:
    """The ranks that train one model together.

    Args:
        group: of this rank and at least one other.
        device: where small numbers are exchanged.
    """

    def __init__(self, group: "dist.ProcessGroup", device: torch.device):
        """Look up the rank and the number of ranks."""
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def mean(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Means over the ranks, of tensors with equal shapes on all of them.

        Args:
            tensors: symmetric where they have two axes or more, if a dtype is given.
            dtype: sends symmetric matrices by halves, and numbers in this dtype if it has fewer bits than theirs.
        """
        means, sent = list(tensors), list(tensors) if dtype is None else [half(tensor) for tensor in tensors]
        for members in _kinds(tensors, range(len(tensors))):
            flat = torch.cat([sent[i].reshape(-1) for i in members])
            if (low := sent_dtype(flat.dtype, dtype)) != flat.dtype:
                flat = self._rounded_mean(flat, low)
            else:
                dist.all_reduce(flat, group=self.group)
                flat /= self.size
            for i, part in zip(members, flat.split([sent[i].numel() for i in members]), strict=True):
                mean = part.view(sent[i].shape)
                means[i] = mean if dtype is None else whole(mean, tensors[i].shape)
        return means

    def _rounded_mean(self, vector: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean of vectors that are sent in fewer bits, rounded twice however many ranks there are.

        Each rank adds up one part of them in full precision. An all-reduce would round once for each rank.
        """
        length = -(-vector.numel() // self.size)
        sent = torch.nn.functional.pad(vector, (0, length * self.size - vector.numel())).to(dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        part = received.view(self.size, length).to(vector.dtype).mean(0).to(dtype)
        dist.all_gather([*sent.split(length)], part, group=self.group)
        return sent[: vector.numel()].to(vector.dtype)

    def sum(self, number: int) -> int:
        """Sum over the ranks."""
        total = torch.tensor(number, device=self.device)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def total(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """Sums (or maxima) over the ranks, whose numbers may have different precisions."""
        total = numbers.to(self.device, torch.float64)
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return total.to(numbers)

    def union(
        self, forms: Mapping[int, Any], names: Sequence[str], largest: Sequence[int], equal: Any
    ) -> tuple[dict[int, Any], list[int]]:
        """Agree on forms and numbers: one small transfer, and a second one where the ranks differ in ``forms``.

        Args:
            forms: numbers and strings, by index of a parameter in increasing order.
            names: of the parameters.
            largest: numbers below 2⁶³.
            equal: numbers and strings that must not differ.

        Returns:
            The forms of all ranks together, and the largest over the ranks of each number in ``largest``.

        Raises:
            CurvoptError: on all ranks, if they differ in ``equal`` or in the form of a parameter.
        """
        own = [crc32(repr(list(forms.items())).encode()), crc32(repr(equal).encode())]
        numbers = torch.tensor([*own, *(-each for each in own), *largest], device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        high_forms, high, low_forms, low, *result = numbers.tolist()
        if high != -low:
            raise CurvoptError(
                f"the ranks' optimizers are not in the same state (rank {self.rank}: {equal}). Build them from the "
                "same model, load the same checkpoint and call step() on every rank; or set optimizer.process_group, "
                "to None for a process that trains another model."
            )
        if high_forms == -low_forms:
            return dict(forms), result
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, dict(forms), group=self.group)
        merged: dict[int, Any] = {}
        for rank, theirs in enumerate(every):
            for index, form in theirs.items():
                if merged.setdefault(index, form) != form:
                    raise CurvoptError(
                        f"parameter {names[index]} has curvature {merged[index]} on one rank and {form} on rank {rank} "
                        "(shapes, dtype, index of the input's factor); use it in the same modules on every rank."
                    )
        return dict(sorted(merged.items())), result


def ranks_of(group: "dist.ProcessGroup | Literal['world'] | None", device: torch.device) -> Ranks | None:
    """The ranks to work with: all, or those of a group; ``None`` for a process on its own, or outside of the group."""
    if group is None or not dist.is_available() or not dist.is_initialized():
        return None
    chosen: Any = dist.group.WORLD if group == "world" else group
    return Ranks(chosen, device) if dist.get_world_size(chosen) > 1 else None


def mean_of(ranks: Ranks | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean over all processes that train the model together."""
    return list(tensors) if ranks is None else ranks.mean(tensors)


def share(
    ranks: Ranks | None,
    factors: Sequence[Tensor],
    work: Callable[[list[int]], Sequence[list[Tensor]]],
    shapes: Sequence[Callable[[Tensor], Sequence[int]]],
    by_halves: bool = False,
) -> Sequence[list[Tensor]]:
    """Do work on many factors, each matrix on one rank; diagonals ``[d]`` cost less than sending them.

    Args:
        ranks: those that share the work.
        factors: equal on all ranks.
        work: from the indices of some factors to lists of results, one for each factor and of its dtype.
        shapes: of the results of a factor, for each list.
        by_halves: send one half of the results, which are symmetric.

    Returns:
        The lists of results for all factors, equal on all ranks.
    """
    if ranks is None:
        return work(list(range(len(factors))))
    if by_halves:
        forms = [lambda factor, shape=shape: half_shape(shape(factor)) for shape in shapes]
        halves = share(ranks, factors, lambda own: [[*map(half, column)] for column in work(own)], forms)
        return [
            [whole(each, shape(factor)) for each, factor in zip(column, factors, strict=True)]
            for column, shape in zip(halves, shapes, strict=True)
        ]
    shares = divide([prod(f.shape[:-1]) * f.shape[-1] ** 2 if f.ndim > 1 else 0 for f in factors], ranks.size)
    own = [*shares[ranks.rank], *(i for i, factor in enumerate(factors) if factor.ndim < 2)]
    results = [[torch.empty(0)] * len(factors) for _ in shapes]
    for column, found in zip(results, work(own), strict=True):
        for i, result in zip(own, found, strict=True):
            column[i] = result.contiguous()  # as broadcast: products with other strides round differently

    running = []
    for owner, chosen in enumerate(shares):
        for members in _kinds(factors, chosen):
            like = factors[members[0]]
            if owner == ranks.rank:
                buffer = torch.cat([column[i].to(like).reshape(-1) for column in results for i in members])
            else:
                buffer = like.new_empty(sum(prod(shape(factors[i])) for shape in shapes for i in members))
            handle = dist.broadcast(buffer, group=ranks.group, group_src=owner, async_op=True)
            running.append((owner, members, buffer, handle))
    for owner, members, buffer, handle in running:
        assert handle is not None
        handle.wait()
        if owner != ranks.rank:
            for column, shape in zip(results, shapes, strict=True):
                for i in members:
                    form = tuple(shape(factors[i]))
                    # a view would keep the whole buffer alive, and be saved with it
                    column[i] = buffer[: prod(form)].view(form).clone()
                    buffer = buffer[prod(form) :]
    return results


def divide(costs: Sequence[int], ranks: int, loads: list[int] | None = None) -> list[list[int]]:
    """Indices for each rank, of items with a cost: the most expensive item first, to the rank with the least so far.

    Args:
        costs: of the items.
        ranks: number of ranks.
        loads: costs of each rank so far, which are added to.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks if loads is None else loads
    for i in sorted((i for i, cost in enumerate(costs) if cost > 0), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += costs[i]
    return shares


def divide_rows(
    costs: Sequence[int], rows: Sequence[tuple[int, int]], ranks: int, loads: list[int]
) -> list[dict[int, tuple[int, int]]]:
    """Owners of parameters: one rank for each, or several that own blocks of rows where one would have too much.

    A parameter that costs more than the mean load of a rank is divided among the ranks with the least so far.

    Args:
        costs: of the parameters.
        rows: how many each has, and the rows of a block.
        ranks: number of ranks.
        loads: costs of each rank so far, which are added to.

    Returns:
        For each parameter, the first row and the one behind the last by rank.
    """
    mean = (sum(costs) + sum(loads)) / ranks
    divided = {i for i, (total, block) in enumerate(rows) if costs[i] > mean and total > block}
    owners: list[dict[int, tuple[int, int]]] = [{} for _ in costs]
    for rank, share in enumerate(divide([0 if i in divided else cost for i, cost in enumerate(costs)], ranks, loads)):
        for i in share:
            owners[i][rank] = (0, rows[i][0])
    for i in sorted(divided, key=lambda i: -costs[i]):
        total, block = rows[i]
        level = min((load + costs[i]) / k for k, load in enumerate(accumulate(sorted(loads)), 1))
        filled = start = 0
        for rank, load in enumerate(loads):
            filled += max(0, level - load)  # as water fills a valley
            stop = min(total, block * round(filled / costs[i] * -(-total // block)))
            if stop > start:
                owners[i][rank] = (start, stop)
                loads[rank] += costs[i] * (stop - start) // total
                start = stop
    return owners


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a ``DTensor``, which ``fully_shard`` and tensor parallelism make."""
    module = sys.modules.get("torch.distributed.tensor")  # imported by all code that makes such parameters
    return module is not None and isinstance(parameter, module.DTensor)


def own_part(tensor: Any) -> Tensor:
    """This rank's shard of a parameter or gradient; all of it where it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole_of(number: Any) -> Tensor:
    """A number that each rank has, which may be a ``DTensor``."""
    return number.full_tensor() if is_sharded(number) else number


def refuse_sharded(parameters: Iterable[tuple[str, str, Tensor]]) -> None:
    """Raise if a parameter is sharded: its quantities need the rows and columns that other ranks have.

    Args:
        parameters: the caller to name in the error, the parameter's name, and the parameter.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    gathered = {id(getattr(each, "_unsharded_param", None)) for each in fsdp_params(fsdp_states())}
    for who, name, parameter in parameters:
        sharded = is_sharded(parameter) or hasattr(parameter, "_fsdp_flattened")
        if sharded or (id(parameter) in gathered and id(parameter) not in _served):
            raise CurvoptError(
                f"{who}: parameter {name} of shape {list(parameter.shape)} is sharded over ranks (fully_shard, "
                "FullyShardedDataParallel or tensor parallelism), but whole parameters are needed. Train "
                "with torch.nn.parallel.DistributedDataParallel; or with fully_shard and the Kronecker factors or "
                "diagonals of KFACSGD, EKFACSGD, KFACAdamW, KFACPreconditioner or DiagonalNewton, which gather them."
            )


_served: set[int] = set()


@contextmanager
def serving(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, parameters that ``fully_shard`` has gathered are not refused."""
    global _served
    before, _served = _served, _served | {id(p) for p in parameters}
    try:
        yield
    finally:
        _served = before


def fsdp_states() -> list[Any]:
    """The states of all modules that ``fully_shard`` was called for, in the order of these calls."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    found = dict.fromkeys(state() for state in states.values())
    return [state for state in found if hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")]


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters of such a state."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # PyTorch 2.11 has one


def fsdp_params(states: Iterable[Any]) -> list[Any]:
    """What ``fully_shard`` keeps for each parameter of such states."""
    return [each for state in states for group in fsdp_groups(state) for each in group.fsdp_params]


def _kinds(tensors: Sequence[Tensor], chosen: Sequence[int]) -> list[list[int]]:
    """Indices of tensors that fit in one buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in chosen:
        kinds.setdefault((tensors[i].dtype, tensors[i].device), []).append(i)
    return list(kinds.values())
