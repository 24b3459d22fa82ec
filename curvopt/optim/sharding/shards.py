"""Steps of parameters that ``fully_shard`` divides among the ranks (FSDP2): each parameter has an owner.

The owner of a parameter keeps all that the optimizer knows of it, whole: factors, inverses or eigenbases, momentum.
Owners are chosen by cost, so the state of a rank falls with the number of ranks. A matrix that would be more than a
rank's share, as embeddings and heads are, has several owners, each of some rows and of the blocks of factors that
belong to these. What is measured of a parameter (its damping, its bound) is that of all its rows, see
`Shards.over_pieces`. A step has four parts::

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
from functools import partial, reduce
from itertools import repeat
from math import prod
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from curvopt.core.backward.backward_pass import Request
from curvopt.core.backward.context import Listener
from curvopt.distributed import Ranks, divide_rows, is_sharded, serving
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

    def begin(self, i: int) -> int:
        """The first row of a slice."""
        return sum(self.lengths[:i]) if self.dim == 0 else 0

    def senders(self, owner: int) -> list[int]:
        """The ranks that send their slices to the owner: those of its replica."""
        return next(row for row in self.replicas if owner in row)


def layout(name: str, parameter: Any, group: dist.ProcessGroup) -> Layout:
    """How ``fully_shard`` has divided a parameter among the ranks of a group.

    Raises:
        CurvoptError: if it is divided in another way (tensor parallelism), or among other ranks.
    """
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


def within(tensor: Tensor, begin: int, rows: tuple[int, int]) -> Tensor:
    """What is in some rows, of a tensor whose first row is row ``begin``."""
    start, stop = (max(0, row - begin) for row in rows)
    return tensor[start:stop]


def by_rows(tree: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The packed state of a parameter, with a function of each tensor that has entries for rows of the parameter."""
    return {
        name: by_rows(value, function)
        if isinstance(value, Mapping)
        else function(value)
        if has_rows(name, value)
        else value
        for name, value in tree.items()
    }


def has_rows(name: str, value: Any) -> bool:
    """Whether an entry of a state has entries for rows: all tensors but numbers and the factors behind the first."""
    return isinstance(value, Tensor) and value.ndim > 0 and not (name.isdigit() and int(name) > 0)


class Shards(Replicas):
    """The sharded parameters of an optimizer, their owners, and the transfers between owners and shards.

    Args:
        optimizer: whose parameters they are.
        kinds: of the curvature of parameters, where it is known.

    Attributes:
        rows: the rows of each parameter that ranks own, by rank. They stay where param groups are added.
        divided: the parameters that several ranks own, and the rows of a block of each.
        pieces: in a step, what stands here for some rows of these, and their indices.
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
        loads, quantity, self.rows = [0] * self.ranks.size, optimizer._quantity, dict[Tensor, dict[int, Any]]()
        for group in optimizer.param_groups:
            costs = [quantity.cost(p, optimizer.inverse_every) for p in group["params"]]
            whole = group.get("orthogonalize")
            rows = [(p.shape[0], p.shape[0] if whole else quantity.rows_together(p)) for p in group["params"]]
            self.rows |= zip(group["params"], divide_rows(costs, rows, self.ranks.size, loads), strict=True)
        self.divided = {p: quantity.rows_together(p) for p, rows in self.rows.items() if len(rows) > 1}
        self.pieces: dict[Tensor, int] = {}
        self._kinds = {p: kind for p, kind in kinds.items() if p in self.rows}
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
        """Whether this rank owns a parameter, or some of its rows."""
        return self.rank in self.rows[p]

    def place(self, p: Tensor, shape: Sequence[int], owner: int) -> tuple[int, int, int]:
        """Axis, begin and length of an owner's part of a tensor that has entries, or blocks, for the rows of ``p``."""
        start, stop = self.rows[p][owner]
        if len(shape) == 4:
            block = self.divided[p]
            return 1, start // block, -(-stop // block) - start // block
        each = shape[0] // p.shape[0]
        return 0, start * each, (stop - start) * each

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
            raise self._of_another_rank(who, f"{len(missing)} parameters")

    def _of_another_rank(self, who: str, what: str) -> CurvoptError:
        return CurvoptError(
            f"{who}.load_state_dict(): no curvature for {what} that rank {self.rank} owns, for "
            "this is the state of another rank. Save and load with torch.distributed.checkpoint, and "
            "curvopt.optim.state_to_load for the tensors that a rank needs."
        )

    def saved(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The tensors of rows as parts of whole ones."""
        return by_rows(state, partial(self._part_of_whole, p)) if p in self.divided else state

    def _part_of_whole(self, p: Tensor, part: Tensor) -> Tensor:
        """A part of a tensor of a divided parameter, as ``torch.distributed.checkpoint`` saves and loads it."""
        total, (start, stop) = p.shape[0], self.rows[p][self.rank]
        shape = list(part.shape)
        if part.ndim == 4:
            shape[1] = -(-total // self.divided[p])
        else:
            shape[0] = total * (shape[0] // (stop - start))
        dim, begin, _ = self.place(p, shape, self.rank)
        shards = LocalShardsWrapper([part], [tuple(begin if i == dim else 0 for i in range(part.ndim))])
        like = torch.empty(shape, device="meta")
        mesh = p.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(
            shards, mesh, [Shard(dim)] * mesh.ndim, run_check=False, shape=like.shape, stride=like.stride()
        )

    def loaded(self, who: str, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The rows that this rank owns."""

        def part(tensor: Any) -> Tensor:
            dim, begin, length = self.place(p, tensor.shape, self.rank)
            if not is_sharded(tensor):
                return tensor.narrow(dim, begin, length).clone()
            local = tensor.to_local()
            if (local.local_offsets()[0][dim], local.local_sizes()[0][dim]) != (begin, length):
                raise self._of_another_rank(who, "some rows")
            return local.local_shards()[0]

        return by_rows(state, part) if p in self.divided and self.owns(p) else state

    def to_load(self, p: Tensor, entry: str, whole: Tensor) -> Tensor:
        """For the rows that this rank owns."""
        if p not in self.divided or not has_rows(entry, whole):
            return super().to_load(p, entry, whole)
        part = whole.narrow(*self.place(p, whole.shape, self.rank))
        return self._part_of_whole(p, torch.empty_like(part, device="cpu"))

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
        """Whole tensors, or rows, of the parameters that this rank owns, from the slices of all ranks.

        Args:
            shards: this rank's slices, by parameter; of equal parameters on all ranks.
        """
        outgoing, incoming, owned = [], [], []
        for p, shard in shards.items():
            where = self.layouts[p]
            for owner, rows in self.rows[p].items():
                senders = where.senders(owner)
                if self.rank in senders:
                    outgoing.append((owner, within(shard, where.begin(where.slice_of(self.rank)), rows)))
                if owner == self.rank:
                    owned.append(p)
                    shapes = (self._shape(p, i, rows) for i in range(len(where.lengths)))
                    incoming += [(rank, shape, p.dtype) for rank, shape in zip(senders, shapes, strict=True)]
        parts = iter(self.send(self.dtypes, outgoing, incoming))
        return {p: torch.cat([next(parts) for _ in self.layouts[p].lengths], self.layouts[p].dim) for p in owned}

    def slices(self, whole: Mapping[Tensor, Tensor], params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """This rank's slices of tensors that belong to some parameters, from their owners.

        Args:
            whole: tensors, or rows, of the parameters that this rank owns.
            params: the parameters; equal ones on all ranks.
        """
        outgoing, incoming = [], []
        for p in params:
            where = self.layouts[p]
            if p in whole:
                for i, length in enumerate(where.lengths):
                    if where.dim == 0:
                        begin = where.begin(i)
                        piece = within(whole[p], self.rows[p][self.rank][0], (begin, begin + length))
                    else:
                        piece = whole[p].narrow(where.dim, sum(where.lengths[:i]), length)
                    outgoing += [(row[i], piece) for row in where.replicas]
            mine = where.slice_of(self.rank)
            incoming += [(owner, self._shape(p, mine, rows), p.dtype) for owner, rows in self.rows[p].items()]
        parts = iter(self.send(self.dtypes, outgoing, incoming))
        return {p: torch.cat([next(parts) for _ in self.rows[p]]) for p in params}

    def _shape(self, p: Tensor, i: int, rows: tuple[int, int]) -> list[int]:
        """Of the part of a slice that is in some rows."""
        shape = list(p.shape)
        shape[self.layouts[p].dim] = self.layouts[p].lengths[i]
        return list(within(torch.empty(shape, device="meta"), self.layouts[p].begin(i), rows).shape)

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
        owned: dict[int, list[Any]] = {}
        for i, (shapes, _, of_input) in forms.items():
            p, curvature, dtype = params[i], sums[i], sent_dtype(dtypes[i], chosen)
            zero = torch.zeros((), dtype=dtype, device=device)
            tensors = [zero.expand(shape) for shape in shapes] if curvature is None else curvature.sums
            for owner in self.rows[p]:
                parts_of = self._parts(p, tensors, of_input, owner)
                outgoing += [(owner, (each if chosen is None else half(each)).to(dtype)) for each in parts_of]
                if owner == self.rank:
                    owned[i] = [each.shape for each in parts_of]
                    sent = owned[i] if chosen is None else map(half_shape, owned[i])
                    incoming += [(rank, shape, dtype) for shape in sent for rank in range(self.ranks.size)]
        kinds = dict.fromkeys(sent_dtype(dtype, chosen) for dtype in dtypes.values())
        parts = iter(self.send([*kinds], outgoing, incoming))
        for i, (shapes, _, of_input) in forms.items():
            self._kinds[params[i]] = kind_of(len(shapes[0]), of_input is not None)
        result = Collected({}, weight, step_weight, variables=collected.variables)
        for (i, (_, _, of_input)), mean_weight in zip(forms.items(), of_params, strict=True):
            if i in owned:
                of_ranks = ([next(parts).to(dtypes[i]) for _ in range(self.ranks.size)] for _ in owned[i])
                means = [reduce(torch.add, each) / self.ranks.size for each in of_ranks]
                means = means if chosen is None else [*map(whole, means, owned[i])]
                result.curvature[params[i]] = Sums(means, of_input, mean_weight)
        return result

    def _parts(self, p: Tensor, tensors: Sequence[Tensor], of_input: int | None, owner: int) -> list[Tensor]:
        """What an owner needs of the tensors of a parameter's curvature.

        Raises:
            CurvoptError: if the curvature of a divided parameter has another form than that of a matrix.
        """
        if p not in self.divided:
            return list(tensors)
        first, block = tensors[0].shape, self.divided[p]
        if len(first) != 1 and [*first] != [1, -(-p.shape[0] // block), block, block]:
            raise CurvoptError(
                f"a parameter of shape {list(p.shape)} that several ranks own by rows has curvature of shapes "
                f"{[list(each.shape) for each in tensors]}, which has no blocks of rows. Train with "
                "DistributedDataParallel, or with max_factor_size=None."
            )
        # the factor of the rows; behind both factors, scales, or a second one of the outputs
        of_rows = [
            i == 0 or of_input is None or each.shape == (p.numel(),) or (i > 1 and of_input == 1)
            for i, each in enumerate(tensors)
        ]
        return [
            each.narrow(*self.place(p, each.shape, owner)) if rows else each
            for rows, each in zip(of_rows, tensors, strict=True)
        ]

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
        lists_of = [{i: [next(parts).to(dtype) for _, dtype in form] for i, form in each.items()} for each in forms]
        result = {}
        for i, p in enumerate(self.params):
            pieces = [lists_of[owner][i] for owner in self.rows[p] if i in lists_of[owner]]
            if pieces:
                first = [piece[0] for piece in pieces]
                result[p] = [torch.cat(first, 1 if first[0].ndim == 4 else 0), *pieces[0][1:]]
        return result

    # --- the step -----------------------------------------------------------------------------------------------

    def over_owners(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """Of all owners."""
        return self.ranks.total(numbers, largest)

    def over_pieces(
        self,
        params: Iterable[Tensor],
        values: Sequence[Tensor],
        weights: Iterable[Any] | None = None,
        norms: bool = False,
    ) -> Sequence[Tensor]:
        """Of all ranks that own some rows."""
        if not self.divided:
            return values
        rows = [row for each in values for row in (each.unbind() if each.ndim > 1 else [each])]
        found = torch.zeros(len(self.divided), 3, 3, dtype=torch.float64, device=self.ranks.device)
        places: dict[int, tuple[int, int]] = {}
        for i, (p, row, weight) in enumerate(
            zip(params, rows, repeat(1.0) if weights is None else weights, strict=False)
        ):
            if p in self.pieces:
                place = places[i] = self.pieces[p], sum(piece == self.pieces[p] for piece, _ in places.values())
                numbers = row.to(found).reshape(-1)
                found[place][: len(numbers)] = weight * (numbers.square() if norms else numbers)
                found[place][2] = weight
        found = self.ranks.total(found)
        for i, place in places.items():
            *numbers, weight = found[place][[*range(rows[i].numel()), 2]]
            if weights is None or weight > 0:
                total = torch.stack(numbers) / (1.0 if weights is None else weight)
                rows[i] = (total.sqrt() if norms else total).view_as(rows[i]).to(rows[i])
        result = iter(rows)
        return [torch.stack([next(result) for _ in each]) if each.ndim > 1 else next(result) for each in values]

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
        """Inside, the optimizer has the parameters that this rank owns, whole, at zero, with their gradients.

        Raises:
            CurvoptError: if other ranks do not send gradients, as they have left out the step; or if rows of a matrix
                that is to be orthogonalized have several owners.
        """
        for group in optimizer.param_groups:
            if group.get("orthogonalize") and any(p in self.divided for p in group["params"]):
                raise CurvoptError(
                    f"{type(optimizer).__name__}.step(): a param group got orthogonalize=True after ranks had divided "
                    "the rows of its matrices; give it to the constructor, so that each matrix has one owner."
                )
        self.begun = False
        try:
            gradients = self.whole({p: grad.to_local() for p, grad in grads.items()})
        except RuntimeError as error:  # of the backend, whose timeout is over
            raise CurvoptError(
                f"{type(optimizer).__name__}.step(): the ranks' gradients of step {optimizer._run.step} were not "
                "exchanged, see the error above. If it is a timeout, a rank has left out this step: agree to leave "
                "it out on all ranks, by an all-reduce before it."
            ) from error
        mine, device = [p for p in self.params if self.owns(p)], self.ranks.device
        zeros: dict[Tensor, Tensor] = {
            p: nn.Parameter(torch.zeros((stop - start, *p.shape[1:]), dtype=p.dtype, device=device))
            for p in mine
            for start, stop in [self.rows[p][self.rank]]
        }
        self.pieces = {zeros[p]: i for i, p in enumerate(self.divided) if p in zeros}
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
            optimizer.state, self.pieces = state, {}
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
