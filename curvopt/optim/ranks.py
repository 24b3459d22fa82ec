"""The ranks that train a model together, as a step sees them: one process, several with copies, several with shards.

A step asks `Alone`, `Replicas` or `curvopt.optim.sharding.shards.Shards` for what differs, and never which it has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvopt.core.backward.backward_pass import Request
from curvopt.core.backward.context import ListenedBackward, Listener
from curvopt.core.record import extended_name
from curvopt.distributed import Ranks, is_sharded, refuse_sharded, share
from curvopt.errors import CurvoptError
from curvopt.optim.accumulation import Collected, Sums, are_zero, have_gradients
from curvopt.optim.options import DAMPINGS, parameter_names
from curvopt.optim.state import Run, have_curvature

#: By which part of their norm parameters of ranks may differ.
DRIFT = 1e-5


class Alone:
    """A process that trains a model without other ones.

    Attributes:
        rank: of the process.
        meet: whether a step in which curvature is due asks other ranks.
        gathered: sharded parameters, by what stands for them in a backward.
    """

    rank = 0
    meet = False
    gathered: Mapping[Tensor, Tensor] = {}  # noqa: RUF012

    # --- the backward -------------------------------------------------------------------------------------------

    def in_forward(self, params: Sequence[Tensor]) -> Mapping[Tensor, Tensor]:
        """The parameters, by what forward passes use in their place."""
        return {p: p for p in params}

    def in_backward(self, lists: Mapping[Tensor, list[Tensor]]) -> Mapping[Tensor, list[Tensor]]:
        """Lists of tensors of all parameters, by what a backward uses in place of these."""
        return lists

    def serving(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Inside, parameters that were gathered for a forward pass are not refused."""
        return nullcontext()

    def backward(self, request: Request, listener: Listener, hook: Callable[[Any], None]) -> AbstractContextManager:
        """The context that computes what is requested."""
        return ListenedBackward(request, listener, hook)

    def begin(self, found: bool) -> None:
        """A backward begins, in which curvature was found to be due, or not."""

    def has_begun(self, curvature: Any) -> bool:
        """Whether a backward since the last step has computed curvature."""
        return curvature.has_begun

    def have_gradients(self, params: Sequence[Tensor]) -> bool:
        """Whether any parameter has a gradient."""
        return have_gradients(params)

    def zero_test(self, params: Sequence[Tensor]) -> Callable[[], bool]:
        """Tells whether no gradient has an entry but zeros."""
        return partial(are_zero, params)

    def tell_of_step_left_out(self, step: int) -> None:
        """Tell ranks that may wait in a step that this one has left it out.

        Raises:
            CurvoptError: if they do.
        """

    # --- the step -----------------------------------------------------------------------------------------------

    def exchange(self, optimizer: Any, collected: Collected, run: Run) -> Collected:
        """The mean of the ranks' curvature.

        Args:
            optimizer: whose curvature it is.
            collected: by this rank.
            run: of the optimizer; what the ranks choose together is set.

        Raises:
            CurvoptError: on all ranks, for an error on one of them.
        """
        return collected

    @contextmanager
    def owned(
        self, optimizer: Any, grads: dict[Tensor, Tensor], collected: Collected
    ) -> Iterator[dict[Tensor, Tensor]]:
        """Inside, the optimizer has the parameters whose step this rank takes; their gradients."""
        yield grads

    def apply(self, optimizer: Any, grads: Mapping[Tensor, Tensor]) -> None:
        """Bring the step to parameters (or gradients) of which this rank does not take it."""

    def over_owners(self, numbers: Tensor, largest: bool = False) -> Tensor:
        """Sums (or maxima) over all parameters, of sums over those whose step this rank takes."""
        return numbers

    def any(self, items: Sized) -> bool:
        """Whether there is an item for any parameter."""
        return len(items) > 0

    def over_pieces(
        self,
        params: Iterable[Tensor],
        values: Sequence[Tensor],
        weights: Iterable[Any] | None = None,
        norms: bool = False,
    ) -> Sequence[Tensor]:
        """Values of whole parameters, by those of the rows that stand here; all ranks call it together.

        Args:
            params: the parameters, at most three times each.
            values: one or two numbers for each parameter: a tensor, or a row of a matrix.
            weights: by which a mean over the owners of rows is taken; ``None`` for their sum.
            norms: whether the values are roots of what is added up.
        """
        return values

    def sum(self, number: int) -> int:
        """Sum over the ranks."""
        return number

    def share(
        self,
        factors: Sequence[Tensor],
        work: Callable[[list[int]], Sequence[list[Tensor]]],
        shapes: Sequence[Callable[[Tensor], Sequence[int]]],
        symmetric: bool = False,
    ) -> Sequence[list[Tensor]]:
        """Do work on factors, each matrix on one of the ranks that have it; see `curvopt.distributed.share`."""
        return work(list(range(len(factors))))

    def refreshed(self, accepted: Mapping[Tensor, Any]) -> Set[Tensor]:
        """The parameters whose curvature was refreshed, if it was accepted for these."""
        return accepted.keys()

    def outside(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Parameters that no extended module has."""
        return [param for param in params if extended_name(param) is None]

    # --- the state ----------------------------------------------------------------------------------------------

    def owns(self, param: Tensor) -> bool:
        """Whether this rank keeps the state of a parameter."""
        return True

    def have_curvature(self, states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether any parameter has curvature, on any rank."""
        return have_curvature(states)

    def kinds(self, names: Mapping[Tensor, str]) -> dict[str, str]:
        """By name, the form of the curvature of parameters whose state is on other ranks."""
        return {}

    def export(self) -> dict[str, Any]:
        """What a checkpoint has of them."""
        return {}

    def saved(self, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The packed state of a parameter, as a checkpoint has it."""
        return state

    def loaded(self, who: str, p: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank keeps of the packed state of a parameter in a checkpoint.

        Raises:
            CurvoptError: if it is that of one of several ranks, which lacks some rows.
        """
        if any(map(is_sharded, tree_leaves(state))):
            raise CurvoptError(
                f"{who}.load_state_dict(): this is the state of one of several ranks, which has some rows of a "
                "parameter. Save and load with torch.distributed.checkpoint, and curvopt.optim.state_to_load for the "
                "tensors that this process needs."
            )
        return state

    def to_load(self, p: Tensor, entry: str, whole: Tensor) -> Tensor:
        """An empty tensor for what this rank keeps of a tensor of a parameter's state, given without memory."""
        return torch.empty_like(whole, device="cpu")

    def load(self, who: str, run: Mapping[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
        """Take over what `export` has returned, with the states of parameters that were loaded."""


class Replicas(Alone):
    """Processes that have copies of one model.

    Args:
        ranks: the processes.
        dtype: in which curvature is sent, see `curvopt.optim.step.CurvatureOptimizer.communication_dtype`.
    """

    meet = True

    def __init__(self, ranks: Ranks, dtype: torch.dtype | None):
        self.ranks, self.dtype, self.rank = ranks, dtype, ranks.rank

    def sum(self, number: int) -> int:
        """Sum over the ranks."""
        return self.ranks.sum(number)

    def share(self, factors: Any, work: Any, shapes: Any, symmetric: bool = False) -> Sequence[list[Tensor]]:
        """Each matrix is worked on by one rank."""
        return share(self.ranks, factors, work, shapes, symmetric and self.dtype is not None)

    def tell_of_step_left_out(self, step: int) -> None:
        """Whoever waits in this step raises an error, and this rank, too."""
        self.ranks.union({}, [], [0] * 8, {"step": f"{step} was left out, the gradients of it were reset"})

    def exchange(self, optimizer: Any, collected: Collected, run: Run) -> Collected:
        """One small transfer that finds whether the ranks are in equal states; then the curvature."""
        who, groups = type(optimizer).__name__, optimizer.param_groups
        names = parameter_names(groups)
        params = list(names)
        self.check(who, names)
        equal = {
            **{name: getattr(run, name) for name in ("step", "steps", "due", "next_inverse")},
            **{name: [_number(group.get(name)) for group in groups] for name in ("lr", *DAMPINGS)},
            "communication_dtype": str(self.dtype),
            "state_dtype": str(optimizer.state_dtype),
            "parameters": [list(param.shape) for param in params],
            "gradients": have_gradients(params),
        }
        seed, draws = run.sampler
        numbers = [-1 if seed is None else seed, draws, collected.variables, collected.refused]
        forms, (seed, draws, variables, refused, partial, run.empirical, *norms) = self.ranks.union(
            collected.forms(params),
            list(names.values()),
            [*numbers, collected.partial, run.empirical, *self.norm(params)],
            equal,
        )
        largest, smallest = (torch.tensor(abs(bits)).view(torch.float64).item() for bits in norms)
        if largest - smallest > DRIFT * largest:
            raise CurvoptError(
                f"{who}.step(): the ranks' parameters differ, with norms from {smallest:.6g} to {largest:.6g}. Train "
                "with DistributedDataParallel, which averages gradients, from equal parameters; or set "
                "optimizer.process_group, to None for a process that trains another model."
            )
        run.sampler = (None if seed < 0 else seed), draws
        collected.variables, collected.refused = variables, bool(refused)
        if forms:
            collected = self.mean(collected, forms, params)
        collected.partial = bool(partial)
        return collected

    def check(self, who: str, names: Mapping[Tensor, str]) -> None:
        """Refuse parameters that are no copies."""
        refuse_sharded((who, name, p) for p, name in names.items())

    def norm(self, params: Sequence[Tensor]) -> list[int]:
        """The norm of all parameters and minus it, as numbers of equal order."""
        whole = [p.detach() for p in params if p.numel()]
        if not whole:
            return [0, 0]
        norms = torch._foreach_norm(whole)  # pyright: ignore[reportPrivateImportUsage]
        bits = int(torch.stack([norm.double().to(norms[0].device) for norm in norms]).norm().cpu().view(torch.int64))
        return [bits, -bits]

    def mean(self, collected: Collected, forms: Mapping[int, Any], params: Sequence[Tensor]) -> Collected:
        """The mean over the ranks, which may have nothing for a parameter.

        Args:
            collected: by this rank.
            forms: of all ranks, see `Collected.forms`.
            params: the parameters.
        """
        device = params[0].device
        # of one dtype, whatever that of the losses: a rank may have none
        weights = [w.to(device, torch.float64) for w in (collected.weight, collected.step_weight)]
        sums: list[Tensor] = []
        for i, (shapes, dtype, of_input) in forms.items():
            zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device=params[i].device) for shape in shapes]
            nothing = Sums(zeros, of_input, torch.zeros((), device=params[i].device))
            of_rank = collected.curvature.get(params[i], nothing)
            sums += of_rank.sums
            weights.append(of_rank.weight.to(torch.float64))
        weight, step_weight, *of_params = self.ranks.mean(weights)
        result = Collected({}, weight, step_weight, variables=collected.variables)
        means = iter(self.ranks.mean(sums, self.dtype))
        for (i, (shapes, _, of_input)), mean_weight in zip(forms.items(), of_params, strict=True):
            result.curvature[params[i]] = Sums([next(means) for _ in shapes], of_input, mean_weight)
        return result


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
