"""Backwards of models that ``fully_shard`` divides among ranks (FSDP2), with whole parameters for the curvature.

FSDP gathers the parameters of a module when its outputs are differentiated, and divides them again behind its inputs.
The engine pulls vectors back through the graph several times, and each rank as often as its samples ask for. So all
parameters are gathered once, before it begins, and FSDP's hooks do nothing until the backward of the user runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from curvopt.core.backward.backward_pass import Request
from curvopt.core.backward.context import ListenedBackward, Listener
from curvopt.core.extend import remember_parameters
from curvopt.core.losses.roots import NotCurved
from curvopt.core.record import extended_name
from curvopt.distributed import Ranks, fsdp_groups, fsdp_params, fsdp_states, serving
from curvopt.errors import CurvoptError
from curvopt.optim.accumulation import have_gradients


def gathered_parameters(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """What forward passes use in place of sharded parameters, of their models that have run: the sharded ones by it."""
    pairs = [(getattr(each, "_unsharded_param", None), each.sharded_param) for each in fsdp_params(_states(params))]
    return {whole: sharded for whole, sharded in pairs if whole is not None}


def have_any_gradients(params: Iterable[Tensor]) -> bool:
    """Whether any sharded parameter has a gradient, or a part of one that the ranks have not added up so far."""
    if have_gradients(params):
        return True
    kept = fsdp_params(_states(params))
    whole = [getattr(each, "_unsharded_param", None) for each in kept]
    return any(each.unsharded_accumulated_grad is not None for each in kept) or any(
        p is not None and p.grad is not None for p in whole
    )


class GatheredBackward(ListenedBackward):
    """A context whose quantities are those of gathered parameters.

    Args:
        request: what is computed in the backwards inside; the parameters that it counts are sharded.
        listener: takes part in them.
        extension_hook: see `curvopt.backpack`.
        ranks: those that have the shards.
        whole: the sharded parameters by gathered ones; filled when a backward begins.
    """

    def __init__(
        self,
        request: Request,
        listener: Listener,
        extension_hook: Callable[[nn.Module], None],
        ranks: Ranks,
        whole: dict[Tensor, Tensor],
    ):
        super().__init__(request, listener, extension_hook)
        self.params, self.ranks, self.whole = request.counted or frozenset(), ranks, whole

    def _run(self, call: Callable[..., Any], how: Any) -> Any:
        if not how.accumulates:
            return call()
        states = _states(self.params)
        roots = [state._modules[0] for state in states]
        try:
            for module in roots:
                module.unshard()
            self.whole.update(gathered_parameters(self.params))
            if any(extended_name(p) is None for p in self.whole):
                for module in roots:
                    remember_parameters(module)
            counted = frozenset(p for p, sharded in self.whole.items() if sharded in self.params)
            self.request = replace(self.request, counted=counted)
            with _idle(states) as resume:
                return super()._run(partial(_resumed, resume, call), how)
        except BaseException:
            for module in roots:
                module.reshard()
            raise

    def _prepare(self, how: Any, request: Request) -> Any:
        with serving(self.whole):
            return super()._prepare(how, request)

    def _attempt(self, how: Any, request: Request) -> Any:
        """Refused on all ranks together, which then try the same extensions.

        Raises:
            CurvoptError: if the backward is refused on any rank.
        """
        begun, refusal = None, None
        try:
            begun = super()._attempt(how, request)
        except CurvoptError as error:
            refusal = error
        size = self.ranks.size
        refused = self.ranks.sum(0 if refusal is None else 1 if isinstance(refusal, NotCurved) else size + 1)
        if refused > 0:
            kind = CurvoptError if refused > size else NotCurved  # the same on all ranks, which then do the same
            raise kind(str(refusal or "The backward was refused on another rank, which says why."))
        return begun


def _states(params: Iterable[Tensor]) -> list[Any]:
    """FSDP's states of the models to which some sharded parameters belong."""
    mine = set(params)
    found: dict[Any, None] = {}
    for state in fsdp_states():
        if any(each.sharded_param in mine for each in fsdp_params([state])):
            found |= dict.fromkeys([*state._state_ctx.all_states, state])
    return list(found)


def _resumed(resume: Callable[[], None], call: Callable[[], Any]) -> Any:
    resume()
    return call()


@contextmanager
def _idle(states: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Until the function is called, backwards through sharded modules move neither parameters nor gradients."""
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, **values: Any) -> None:
        for name, value in values.items():
            kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    for state in states:
        put(state, _training_state=state._training_state)
        put(state._state_ctx, is_last_backward=False, post_backward_final_callback_queued=False)
        for group in fsdp_groups(state):
            put(group, _training_state=group._training_state, reduce_grads=False, reshard_after_backward=False)

    def resume() -> None:
        while kept:
            setattr(*kept.pop())

    try:
        yield resume
    finally:
        resume()
