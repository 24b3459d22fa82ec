"""Steps of parameters that ``fully_shard`` divides among the ranks (FSDP2): each parameter has one owner.

The owner of a parameter keeps all that the optimizer knows of it, whole: factors, inverses or eigenbases, momentum.
Owners are chosen by cost, so the state of a rank falls with the number of ranks. A step has four parts::

    backward      of whole parameters, gathered once where curvature is due; each rank has factors of its own samples
    to owners     factors, whose mean over the ranks the owner takes; and the shards of each gradient
    step          as in one process, of the parameters that the rank owns, from zero
    to shards     the slices of each change

All transfers are all-to-all: a rank sends its factors, its shards, and the changes of the parameters that it owns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from math import prod
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvopt.core.backward.backward_pass import Request
from curvopt.core.backward.context import Listener
from curvopt.distributed import Ranks, divide, is_sharded, serving
from curvopt.errors import CurvoptError
from curvopt.optim.accumulation import Collected, Sums, are_zero
from curvopt.optim.options import check_mixed, kind_of
from curvopt.optim.ranks import Replicas
from curvopt.optim.sharding.gathering import GatheredBackward, gathered_parameters, have_any_gradients
from curvopt.optim.state import curvature_of
from curvopt.optim.step_size import decay_weights
from curvopt.utils.compression import half, half_shape, sent_dtype, whole


class Layout(NamedTuple):
    """Which rank has which slice of a parameter.

    Attributes:
        dim: the axis that is divided.
        lengths: of the slices along it; those at the end may be shorter or empty.
        replicas: ranks (of the group), by replica and slice.
    """

    dim: int
    lengths: list[int]
    replicas: list[list[int]]

    def slice_of(self, rank: int) -> int:
        """The slice that a rank has."""
        return next(row.index(rank) for row in self.replicas if rank in row)

    def senders(self, owner: int) -> list[int]:
        """The ranks that send their slices to the owner: those of its replica."""
        return next(row for row in self.replicas if owner in row)


def layout(name: str, parameter: Any, group: dist.ProcessGroup) -> Layout:
    """How ``fully_shard`` has divided a parameter among the ranks of a group.

    Raises:
        CurvoptError: if it is divided in another way (tensor parallelism), or among other ranks.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = parameter.device_mesh, parameter.placements
    *before, last = placements
    if type(last) is not Shard or len(before) > 1 or not all(isinstance(each, Replicate) for each in before):
        raise CurvoptError(
            f"{name} is sharded over ranks as {placements}, but curvature needs whole rows and columns. Train with "
            "torch.distributed.fsdp.fully_shard alone, on a mesh of one axis or of replicas and shards, or with "
            "DistributedDataParallel; or give it to an optimizer of torch.optim."
        )
    places = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    ranks = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    if {rank for row in ranks for rank in row} != set(places):
        raise CurvoptError(
            f"{name} is sharded over the ranks {ranks}, but the optimizer works with {sorted(places)}; set "
            "optimizer.process_group to the group of the mesh. A mesh of replicas and shards has to have all ranks."
        )
    rows, shards = parameter.shape[last.dim], len(ranks[0])
    size = -(-rows // shards)
    lengths = [max(0, min(size, rows - size * i)) for i in range(shards)]
    return Layout(last.dim, lengths, [[places[rank] for rank in row] for row in ranks])


class Shards(Replicas):
    """The sharded parameters of an optimizer, their owners, and the transfers between owners and shards.

    Args:
        optimizer: whose parameters they are.
        kinds: of the curvature of parameters, where it is known.

    Attributes:
        owners: the rank that owns each parameter. It stays where param groups are added.
        kinds: of the curvature of each parameter, once it was collected.
        begun: whether a backward since the last step has computed curvature, on any rank.
        received: parameters of which curvature was last exchanged.
        stand_ins: in a step, what stands for the parameters that have a gradient and are owned.
    """

    def __init__(self, optimizer: Any, kinds: Mapping[Tensor, str]):
        who, names, self.given = type(optimizer).__name__, optimizer._names(), optimizer.process_group
        check_mixed(who, names)
        if self.given is None:
            raise CurvoptError(
                f"{who}.process_group is None, but the parameters are sharded over ranks; set it to their group."
            )
        mesh = next(iter(names)).device_mesh  # type: ignore[attr-defined]
        everyone = dist.group.WORLD if mesh.ndim > 1 or mesh.size() == dist.get_world_size() else mesh.get_group()
        chosen: Any = everyone if self.given == "world" else self.given
        super().__init__(Ranks(chosen, optimizer._device()), optimizer.communication_dtype)
        self.params = list(names)
        self.layouts = {p: layout(name, p, self.ranks.group) for p, name in names.items()}
        loads, owners = [0] * self.ranks.size, list[int]()
        for group in optimizer.param_groups:
            costs = [optimizer._quantity.cost(p, optimizer.inverse_every) for p in group["params"]]
            shares = divide(costs, self.ranks.size, loads)
            owner_of = {i: rank for rank, share in enumerate(shares) for i in share}
            owners += [owner_of[i] for i in range(len(costs))]
        self.owners = dict(zip(self.params, owners, strict=True))
        self._kinds = {p: kind for p, kind in kinds.items() if p in self.owners}
        self.begun, self.received = False, set[Tensor]()
        self.gathered: dict[Tensor, Tensor] = {}
        self.stand_ins: dict[Tensor, Tensor] = {}
        self.dtypes = list(dict.fromkeys(p.dtype for p in self.params))
        self._forget_states_of_other_ranks(optimizer.state)

    def serves(self, params: Iterable[Tensor], group: Any) -> bool:
        """Whether these are the parameters and the group that it was made for."""
        now = list(params)
        same = len(now) == len(self.params) and all(map(is_, now, self.params))
        return same and (group is self.given or group == self.given)

    def owns(self, p: Tensor) -> bool:
        """Whether this rank owns a parameter."""
        return self.owners[p] == self.rank

    # --- the backward -------------------------------------------------------------------------------------------

    def in_forward(self, params: Sequence[Tensor]) -> Mapping[Tensor, Tensor]:
        """Also the whole parameters that were gathered."""
        mine = {p: p for p in params}
        return mine | {whole: p for whole, p in gathered_parameters(self.params).items() if p in mine}

    def in_backward(self, lists: Mapping[Tensor, list[Tensor]]) -> Mapping[Tensor, list[Tensor]]:
        """From all owners, by whole parameters."""
        everywhere = self.everywhere(lists, self.dtype)
        return {p: everywhere[shard] for p, shard in self.in_forward(self.params).items() if shard in everywhere}

    def serving(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Of the optimizer's models."""
        return serving(gathered_parameters(params))

    def backward(self, request: Request, listener: Listener, hook: Callable[[Any], None]) -> AbstractContextManager:
        """Of whole parameters."""
        return GatheredBackward(request, listener, hook, self.ranks, self.gathered)

    def begin(self, found: bool) -> None:
        """As is found on all ranks."""
        self.begun |= found

    def has_begun(self, curvature: Any) -> bool:
        """On all ranks, also where this one has no curvature."""
        return self.begun

    def have_gradients(self, params: Sequence[Tensor]) -> bool:
        """Also gradients that the ranks have not added up so far."""
        return have_any_gradients(params)

    def zero_test(self, params: Sequence[Tensor]) -> Callable[[], bool]:
        """On no rank; all ranks call it together."""
        nonzero = self.ranks.sum(int(not are_zero(params)))
        return lambda: nonzero == 0

    # --- the state ----------------------------------------------------------------------------------------------

    def _forget_states_of_other_ranks(self, states: dict[Tensor, Any]) -> None:
        for p in self.params:
            if not self.owns(p):
                states.pop(p, None)

    def have_curvature(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """As the kinds tell."""
        return bool(self._kinds)

    def kinds(self, names: Mapping[Tensor, str]) -> dict[str, str]:
        """Of all parameters."""
        return {names[p]: kind for p, kind in self._kinds.items()}

    def export(self) -> dict[str, Any]:
        """The kinds of curvature, by index of a parameter."""
        return {"kinds": {i: self._kinds[p] for i, p in enumerate(self.params) if p in self._kinds}}

    def load(self, who: str, run: Mapping[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
        """Take over the kinds of a checkpoint, and keep the state that this rank owns.

        A checkpoint of one process has no kinds, but the state of all parameters.

        Raises:
            CurvoptError: if it has no state for a parameter that this rank owns.
        """
        found = {p: curvature_of(states[p]).factors for p in self.params if p in states}
        factors = {p: each for p, each in found.items() if each is not None}
        self._kinds = {p: kind_of(each[0].ndim, len(each) > 1) for p, each in factors.items()}
        self._kinds |= {self.params[int(i)]: kind for i, kind in run.get("kinds", {}).items()}
        self._forget_states_of_other_ranks(states)
        missing = [p for p in self._kinds if self.owns(p) and p not in factors]
        if missing:
            raise CurvoptError(
                f"{who}.load_state_dict(): no curvature for {len(missing)} parameters that rank {self.rank} owns, for "
                "this is the state of another rank. Save and load with torch.distributed.checkpoint, and "
                "curvopt.optim.state_to_load for the tensors that a rank needs."
            )

    # --- transfers ----------------------------------------------------------------------------------------------

    def send(
        self,
        dtypes: Sequence[torch.dtype],
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, Sequence[int], torch.dtype]],
    ) -> list[Tensor]:
        """Send tensors to ranks, and receive some: one all-to-all for each dtype.

        Args:
            dtypes: of the tensors of all ranks, in one order everywhere.
            outgoing: ranks, and tensors for them. Those for one rank come in the order that it expects.
            incoming: ranks, and shapes and dtypes of the tensors that they send.

        Returns:
            The tensors that were received, in the order of ``incoming``.
        """
        received = [torch.empty(0)] * len(incoming)
        for dtype in dtypes:
            parts: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
            for rank, tensor in outgoing:
                if tensor.dtype == dtype:
                    parts[rank].append(tensor.reshape(-1))
            expected: list[list[int]] = [[] for _ in range(self.ranks.size)]
            for i, (rank, _, of) in enumerate(incoming):
                if of == dtype:
                    expected[rank].append(i)
            sent = torch.cat([part for each in parts for part in each] or [torch.empty(0)]).to(self.ranks.device, dtype)
            order = [i for each in expected for i in each]
            sizes = [prod(incoming[i][1]) for i in order]
            buffer = sent.new_empty(sum(sizes))
            counts = [sum(prod(incoming[i][1]) for i in each) for each in expected]
            given = [sum(part.numel() for part in each) for each in parts]
            dist.all_to_all_single(buffer, sent, counts, given, group=self.ranks.group)
            for i, part in zip(order, buffer.split(sizes), strict=True):
                received[i] = part.view(tuple(incoming[i][1]))
        return received

    def whole(self, shards: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Whole tensors of the parameters that this rank owns, from the slices of all ranks.

        Args:
            shards: this rank's slices, by parameter; of equal parameters on all ranks.
        """
        outgoing, incoming, owned = [], [], []
        for p, shard in shards.items():
            owner, where = self.owners[p], self.layouts[p]
            senders = where.senders(owner)
            if self.ranks.rank in senders:
                outgoing.append((owner, shard))
            if owner == self.ranks.rank:
                owned.append(p)
                shapes = (self._shape(p, length) for length in where.lengths)
                incoming += [(rank, shape, p.dtype) for rank, shape in zip(senders, shapes, strict=True)]
        parts = iter(self.send(self.dtypes, outgoing, incoming))
        return {p: torch.cat([next(parts) for _ in self.layouts[p].lengths], self.layouts[p].dim) for p in owned}

    def slices(self, whole: Mapping[Tensor, Tensor], params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """This rank's slices of tensors that belong to some parameters, from their owners.

        Args:
            whole: tensors of the parameters that this rank owns.
            params: the parameters; equal ones on all ranks.
        """
        outgoing, incoming = [], []
        for p in params:
            where = self.layouts[p]
            if p in whole:
                pieces = whole[p].split(where.lengths, where.dim)
                outgoing += [(rank, piece) for row in where.replicas for rank, piece in zip(row, pieces, strict=True)]
            length = where.lengths[where.slice_of(self.ranks.rank)]
            incoming.append((self.owners[p], self._shape(p, length), p.dtype))
        return dict(zip(params, self.send(self.dtypes, outgoing, incoming), strict=True))

    def _shape(self, p: Tensor, length: int) -> list[int]:
        shape = list(p.shape)
        shape[self.layouts[p].dim] = length
        return shape

    def check(self, who: str, names: Mapping[Tensor, str]) -> None:
        """Nothing to refuse: this was done where the parameters were divided."""

    def norm(self, params: Sequence[Tensor]) -> list[int]:
        """None: each rank has shards."""
        return [0, 0]

    def mean(self, collected: Collected, forms: Mapping[int, Any], params: Sequence[Tensor]) -> Collected:
        """Of the parameters that this rank owns."""
        self.received, chosen = {params[i] for i in forms}, self.dtype
        device, nothing = self.ranks.device, torch.zeros(())
        sums = {i: collected.curvature.get(params[i]) for i in forms}
        weights = [collected.weight, collected.step_weight]
        weights += [nothing if each is None else each.weight for each in sums.values()]
        (means,) = self.ranks.mean([torch.stack([w.to(device, torch.float64) for w in weights])])
        weight, step_weight, *of_params = means
        outgoing, incoming = [], []
        dtypes = {i: getattr(torch, name) for i, (_, name, _) in forms.items()}
        for i, (shapes, _, _) in forms.items():
            owner, curvature, dtype = self.owners[params[i]], sums[i], sent_dtype(dtypes[i], chosen)
            zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            for each in zeros if curvature is None else curvature.sums:
                outgoing.append((owner, (each if chosen is None else half(each)).to(dtype)))
            if owner == self.ranks.rank:
                sent = shapes if chosen is None else map(half_shape, shapes)
                incoming += [(rank, shape, dtype) for shape in sent for rank in range(self.ranks.size)]
        kinds = dict.fromkeys(sent_dtype(dtype, chosen) for dtype in dtypes.values())
        parts = iter(self.send([*kinds], outgoing, incoming))
        for i, (shapes, _, of_input) in forms.items():
            self._kinds[params[i]] = kind_of(len(shapes[0]), of_input is not None)
        result = Collected({}, weight, step_weight, variables=collected.variables)
        for (i, (shapes, _, of_input)), mean_weight in zip(forms.items(), of_params, strict=True):
            p = params[i]
            if self.owns(p):
                of_ranks = ([next(parts).to(dtypes[i]) for _ in range(self.ranks.size)] for _ in shapes)
                means = [reduce(torch.add, each) / self.ranks.size for each in of_ranks]
                means = means if chosen is None else [*map(whole, means, shapes)]
                result.curvature[p] = Sums(means, of_input, mean_weight)
        return result

    def everywhere(
        self, lists: Mapping[Tensor, Sequence[Tensor]], chosen: torch.dtype | None
    ) -> dict[Tensor, list[Tensor]]:
        """Lists of tensors of all parameters, from their owners, which send them in a chosen dtype."""
        own = {i: lists[p] for i, p in enumerate(self.params) if p in lists}
        forms: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(
            forms, {i: [(t.shape, t.dtype) for t in each] for i, each in own.items()}, group=self.ranks.group
        )
        outgoing, incoming = [], []
        for tensors in own.values():
            sent = [t.to(sent_dtype(t.dtype, chosen)) for t in tensors]
            outgoing += [(rank, t) for t in sent for rank in range(self.ranks.size)]
        for rank, each in enumerate(forms):
            incoming += [(rank, shape, sent_dtype(dtype, chosen)) for form in each.values() for shape, dtype in form]
        parts = iter(self.send([*dict.fromkeys(dtype for _, _, dtype in incoming)], outgoing, incoming))
        return {
            self.params[i]: [next(parts).to(dtype) for _, dtype in form] for each in forms for i, form in each.items()
        }

    # --- the step -----------------------------------------------------------------------------------------------

    def over_owners(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """Of all owners."""
        return self.ranks.total(numbers, largest)

    def any(self, items: Sized) -> bool:
        """On any owner."""
        return bool(self.over_owners(torch.tensor(len(items))) > 0)

    def share(self, factors: Any, work: Any, shapes: Any, symmetric: bool = False) -> Sequence[list[Tensor]]:
        """All of it here, as no other rank has these factors."""
        return work(list(range(len(factors))))

    def refreshed(self, accepted: Mapping[Tensor, Any]) -> Set[Tensor]:
        """On any rank."""
        return self.received

    def outside(self, params: Sequence[Tensor]) -> list[Tensor]:
        """None: what stands for parameters has no modules."""
        return []

    @contextmanager
    def owned(self, optimizer: Any, grads: dict[Tensor, Any], collected: Collected) -> Iterator[dict[Tensor, Tensor]]:
        """Inside, the optimizer has the parameters that this rank owns, whole, at zero, with their gradients."""
        self.begun = False
        gradients = self.whole({p: grad.to_local() for p, grad in grads.items()})
        mine, device = [p for p in self.params if self.owns(p)], self.ranks.device
        zeros: dict[Tensor, Tensor] = {
            p: nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in mine
        }
        for p, grad in gradients.items():
            zeros[p].grad = grad
        collected.curvature = {zeros[p]: each for p, each in collected.curvature.items()}
        collected.ages = {zeros[p]: age for p, age in collected.ages.items() if p in zeros}
        before = [(group["params"], group.get("param_names")) for group in optimizer.param_groups]
        state, names = optimizer.state, optimizer._names()
        try:
            for group in optimizer.param_groups:
                kept = [p for p in group["params"] if p in zeros]
                group["params"], group["param_names"] = [zeros[p] for p in kept], [names[p] for p in kept]
            optimizer.state = defaultdict(dict, {zeros[p]: state[p] for p in mine})
            self.stand_ins = {p: zeros[p] for p in gradients}
            yield {p: p.grad for p in self.stand_ins.values() if p.grad is not None}
        finally:
            optimizer.state = state
            for group, (params, given) in zip(optimizer.param_groups, before, strict=True):
                group["params"], group["param_names"] = params, given
                if given is None:
                    del group["param_names"]

    def apply(self, optimizer: Any, grads: Mapping[Tensor, Any]) -> None:
        """The slices of each change (or of the preconditioned gradients), from their owners."""
        to_gradients, stand_ins = not optimizer._restores_gradients, self.stand_ins
        decay_weights(optimizer.param_groups, grads)
        whole = {p: each.grad if to_gradients else each.detach() for p, each in stand_ins.items()}
        for p, change in self.slices(whole, list(grads)).items():  # type: ignore[arg-type]
            if to_gradients:
                grads[p].to_local().copy_(change)
            else:
                p.to_local().add_(change)  # type: ignore[attr-defined]
        self.stand_ins = {}


def shards_of(optimizer: Any, known: Shards | None) -> Shards | None:
    """The shards of an optimizer: those that are known, if its parameters are; ``None`` if none is sharded."""
    # all or none of a group, which was checked when it was added
    first = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    if not any(map(is_sharded, first)) and not _take_over(optimizer):
        return None
    if known is None or not known.serves(optimizer._params(), optimizer.process_group):
        known = Shards(optimizer, {} if known is None else known._kinds)
    known.dtype = optimizer.communication_dtype
    return known


def _take_over(optimizer: Any) -> bool:
    """Replace the parameters of a model that was sharded after ``attach()``; whether there are any."""
    find, names = optimizer._curvature.model
    model = find() if names else None
    if model is None:
        return False
    now = dict(model.named_parameters())
    gathered = gathered_parameters([*now.values()])
    shards: dict[Tensor, Any] = {p: gathered.get(now[name], now[name]) for name, p in names.items() if name in now}
    shards = {p: shard for p, shard in shards.items() if is_sharded(shard)}
    for group in optimizer.param_groups:
        group["params"] = [shards.get(p, p) for p in group["params"]]
    for p, shard in shards.items():
        if p in optimizer.state:
            optimizer.state[shard] = optimizer.state.pop(p)
    if shards:
        optimizer._curvature.model = lambda: None, {}
    return bool(shards)
