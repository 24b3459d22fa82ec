"""The ranks that train a model together, as an optimizer sees them: parameters, owners of shards, sums over ranks."""

from collections.abc import Callable, Mapping, Set, Sized
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from curvopt.distributed import Ranks, fsdp_states, is_sharded, ranks_of
from curvopt.optim import clocks
from curvopt.optim.configured import Configured
from curvopt.optim.gathering import gathered_parameters
from curvopt.optim.reports import parameter_names
from curvopt.optim.sharding import Sharding
from curvopt.optim.step_checks import check_mixed, has_curvature
from curvopt.utils.compression import check_communication_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OverRanks(Configured):
    """An optimizer in one process or in several, whose parameters ``fully_shard`` may divide among them."""

    #: Which ranks train this model together (see `curvopt.distributed`): all, or those of a group; ``None`` for a
    #: process on its own. A group is not copied or saved with the optimizer.
    process_group: "ProcessGroup | Literal['world'] | None" = "world"
    _communication_dtype: torch.dtype | None = None

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """In which precision ranks send curvature; ``None``, the default, sends it as it is.

        Any other value sends one half of each symmetric matrix, which loses nothing. ``torch.bfloat16`` also rounds
        factors, diagonals and scales to its 8 bits, and eigenbases on their way to backward passes of sharded models.
        They are added up, averaged over steps and inverted in full precision; inverses and eigenbases of steps are sent
        in it.

        Raises:
            TypeError: when it is set to anything but a dtype.
            ValueError: when it is set to a dtype that is not floating-point, or has a smaller range than float32.
        """
        return self._communication_dtype

    @communication_dtype.setter
    def communication_dtype(self, dtype: torch.dtype | None) -> None:
        check_communication_dtype(dtype)
        self._communication_dtype = dtype

    def _start_collecting(self) -> None:
        """Begin without shards."""
        super()._start_collecting()
        self._shards: Sharding | None = None
        self._step_of_owner = False  # whether the param groups are what stands for the parameters that this rank owns
        self._gathered: dict[Tensor, Tensor] = {}  # sharded parameters, by those of the backward
        self._attached_to: tuple[Callable[[], torch.nn.Module | None], Mapping[str, Tensor]] = (lambda: None, {})

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _names(self) -> dict[Tensor, str]:
        return parameter_names(self.param_groups)

    def _ranks(self) -> Ranks | None:
        """The ranks that train together; ``None`` for a process on its own."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        sharding = self._sharding()
        return ranks_of(self.process_group, self._device()) if sharding is None else sharding.ranks

    def _helpers(self) -> Ranks | None:
        """The ranks that share the work on matrices which all of them have."""
        return None if self._step_of_owner else self._ranks()

    def _over_ranks(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """Sums (or maxima) over the ranks, of sums over the parameters that each owns: all of them unless sharded."""
        if not self._step_of_owner or self._shards is None:
            return numbers
        return self._shards.ranks.total(numbers, largest)

    def _on_any_rank(self, items: Sized) -> bool:
        """Whether any of the ranks, of which each owns some parameters, has an item."""
        return bool(self._over_ranks(torch.tensor(len(items))) > 0) if self._step_of_owner else len(items) > 0

    def _sharding(self) -> Sharding | None:
        """Owners and transfers, where ``fully_shard`` divides the parameters among ranks."""
        if self._step_of_owner:
            return self._shards
        # all or none of a group, which was checked when it was added
        first = [group["params"][0] for group in self.param_groups if group["params"]]
        if not any(map(is_sharded, first)) and not self._take_over_shards():
            return None
        if self._shards is None or not self._shards.serves(self._params(), self.process_group):
            names = self._names()
            check_mixed(type(self).__name__, names)
            costs = [[self._cost(p) for p in group["params"]] for group in self.param_groups]
            kinds = {} if self._shards is None else self._shards.kinds
            self._shards = Sharding(type(self).__name__, names, costs, self.process_group, self._device())
            self._shards.kinds |= {p: kind for p, kind in kinds.items() if p in self._shards.owners}
            self._shards.forget_others(self.state)
        return self._shards

    def _take_over_shards(self) -> bool:
        """Replace the parameters of a model that was sharded after ``attach()``; whether there are some."""
        find, names = self._attached_to
        model = find() if names and fsdp_states() else None
        if model is None:
            return False
        now = dict(model.named_parameters())
        gathered = gathered_parameters([*now.values()])
        shards = {p: gathered.get(now[name], now[name]) for name, p in names.items() if name in now}
        shards = {p: shard for p, shard in shards.items() if is_sharded(shard)}
        for group in self.param_groups:
            group["params"] = [shards.get(p, p) for p in group["params"]]
        for p, shard in shards.items():
            if p in self.state:
                self.state[shard] = self.state.pop(p)
        self._attached_to = (lambda: None, {}) if shards else self._attached_to
        return bool(shards)

    def _cost(self, param: Tensor) -> int:
        """Of the step of a parameter, for the choice of its owner."""
        return param.numel() + 1

    def _for_backward(self, lists: dict[Tensor, list[Tensor]]) -> Mapping[Tensor, list[Tensor]]:
        """Lists of tensors from the state of all parameters, by what a backward uses in place of these."""
        sharding = self._sharding()
        if sharding is None:
            return lists
        lists = sharding.everywhere(lists, self.communication_dtype)
        return {p: lists[own] for p, own in self._in_forward().items() if own in lists}

    def _in_forward(self) -> Mapping[Tensor, Tensor]:
        """The parameters, by what forward passes use in their place: themselves unless they are sharded."""
        sharding = self._sharding()
        mine = {p: p for p in self._params()}
        found = {} if sharding is None else gathered_parameters(sharding.params)
        return mine | {whole: p for whole, p in found.items() if p in mine}

    def _own(self, leaves: Set[Tensor]) -> Set[Tensor]:
        """This optimizer's parameters among the leaves of a graph, or those that stand there for its shards."""
        mine = self._in_forward()
        return {mine[leaf] for leaf in leaves if leaf in mine}

    def _has_curvature(self) -> bool:
        """Whether there is curvature of any parameter, on any rank."""
        return has_curvature(self.state) if (sharding := self._sharding()) is None else bool(sharding.kinds)

    def _clocked(self) -> list[Tensor]:
        """The parameters that have clocks: all, also in the step of an owner of some."""
        return self._shards.params if self._step_of_owner and self._shards is not None else self._params()

    def _restart_clocks(self, refreshed: set[Tensor], moved: set[Tensor], every: int | None = None) -> None:
        """Let the intervals of parameters that were refreshed begin anew; an owner of some restarts those of all."""
        if self._step_of_owner and self._shards is not None:
            refreshed, moved = self._shards.refreshed, self._shards.moved
        clocks.restart(self._progress, self._clocked(), refreshed, moved, every or self.curvature_every)

    def _own_clocks(self, numbers: list[int]) -> list[int]:
        """Of numbers of all parameters, those of the parameters of this step."""
        if not self._step_of_owner or self._shards is None:
            return numbers
        return [n for p, n in zip(self._shards.params, numbers, strict=True) if self._shards.owns(p)]

    def _device(self) -> torch.device:
        """Where small numbers are exchanged and samples drawn."""
        return next((param.device for param in self._params()), torch.device("cpu"))
