"""What optimizers keep of a parameter and of a run, and how checkpoints hold it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from curvopt.errors import CurvoptError
from curvopt.kroneckers import sizes_of

#: The entry of a parameter's ``state`` that the torch optimizer does not have.
CURVATURE = "curvature"
#: The entry of the first param group of a state dict that has all that belongs to no parameter; else ``None``.
RUN = "run"
_NONE = "none"


@dataclass(eq=False)
class ParameterCurvature:
    """The curvature of one parameter; a field is ``None`` as long as nothing has computed it.

    Attributes:
        factors: moving average of a factor list, see `curvopt.kroneckers`.
        ema_weight: sum of the weights of its values.
        inverses: of the damped factors; a number where there are none.
        bases: eigenbases of the factors; empty where there are none.
        scales: moving average of a diagonal in these.
        scales_weight: sum of the weights of its values.
    """

    factors: list[Tensor] | None = None
    ema_weight: Tensor | None = None
    inverses: list[Tensor] | None = None
    bases: list[Tensor] | None = None
    scales: Tensor | None = None
    scales_weight: Tensor | None = None

    @property
    def is_solved(self) -> bool:
        """Whether a solver has used the factors, or has replaced them where there are none so far."""
        made = self.bases if self.inverses is None else self.inverses
        if made is None or self.factors is None:
            return made is not None
        return bool(made) and made[0].ndim > 0

    def packed(self) -> dict[str, Any]:
        """Dictionaries of tensors alone, which ``torch.distributed.checkpoint`` flattens."""
        present = {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        for name, value in present.items():
            if isinstance(value, list):  # an empty dictionary would be lost where it is flattened
                present[name] = {str(i): each for i, each in enumerate(value)} or {_NONE: torch.zeros(())}
        return present


_FIELDS = tuple(each.name for each in fields(ParameterCurvature))


def unpacked(state: Mapping[str, Any]) -> ParameterCurvature:
    """The curvature in the saved state of a parameter; also in one that was written before 0.3."""
    found = dict(state.get(CURVATURE) or {name: state[name] for name in _FIELDS if state.get(name, {}) != {}})
    for name, value in found.items():
        if isinstance(value, dict):
            found[name] = [value[i] for i in sorted(value.keys() - {_NONE}, key=int)]
    return ParameterCurvature(**found)


def curvature_of(state: dict[str, Any]) -> ParameterCurvature:
    """The curvature in the state of a parameter."""
    if CURVATURE not in state:
        state[CURVATURE] = ParameterCurvature()
    return state[CURVATURE]


def have_curvature(states: Mapping[Tensor, dict[str, Any]]) -> bool:
    """Whether any parameter has curvature."""
    known = tuple(states.values())  # as another thread may add to them
    return any(CURVATURE in state and state[CURVATURE].factors is not None for state in known)


def unsolved(params: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Tensor]:
    """The parameters whose factors no solver has used so far."""
    if len(states) == len(params) and all(curvature_of(each).is_solved for each in states.values()):
        return []  # hashes of tensors are slow
    return [param for param in params if not curvature_of(states[param]).is_solved]


@dataclass
class Run:
    """Counters, choices and numbers of a run that belong to no single parameter.

    Attributes:
        step: number of steps.
        steps: by index of a parameter: how many it has taken,
        due: and the number at which its curvature is refreshed next,
        refreshed: or was refreshed last, see `curvopt.optim.curvature`.
        next_inverse: step from which the solver is renewed, if there is new curvature.
        stale: whether there is.
        step_weight: weight of the loss whose gradients reach a step.
        variables: largest number of variables of a prediction.
        mean_curvature: mean of the curvature's diagonal over all parameters.
        several: whether predictions have several variables, where that chooses the Fisher matrix.
        refused: whether all backwards that were due had no curvature.
        empirical: whether the empirical quantity took the place of another one in the last backward.
        sampler: seed of the Monte-Carlo samples (``None`` for PyTorch's at the first draw), and number of draws.
        metrics: of the last step; a resumed run logs those that are measured now and then, too.
    """

    step: int = 0
    steps: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)
    next_inverse: int = 0
    stale: bool = False
    step_weight: Tensor = field(default_factory=lambda: torch.ones(()))
    variables: int = 1
    mean_curvature: Tensor = field(default_factory=lambda: torch.zeros(()))
    several: bool | None = None
    refused: bool = False
    empirical: int = 0
    sampler: tuple[int | None, int] = (None, 0)
    metrics: dict[str, Any] = field(default_factory=dict)

    def generator(self, device: torch.device, rank: int) -> torch.Generator:
        """A generator for the Monte-Carlo samples of one backward, which leaves the global one alone.

        It follows from the seed, the number of draws before and the rank: the checkpoint of any rank serves all.
        """
        seed, draws = self.sampler
        seed = torch.initial_seed() % 2**62 if seed is None else seed
        digest = blake2b(f"{seed} {draws} {rank}".encode(), digest_size=7).digest()
        self.sampler = seed, draws + 1
        return torch.Generator(device).manual_seed(int.from_bytes(digest))

    def export(self, kind: str) -> dict[str, Any]:
        """The part of a checkpoint that belongs to no parameter."""
        numbers = {name: float(value) for name, value in self.metrics.items()}
        return {**vars(self), "optimizer": kind, "metrics": numbers}

    def load(self, exported: Mapping[str, Any]) -> None:
        """Take over what `export` has returned, of this version or an earlier one."""
        loaded = Run(**{each.name: exported[each.name] for each in fields(Run) if each.name in exported})
        seed, draws = loaded.sampler
        loaded.sampler, loaded.metrics = (seed, draws), dict(loaded.metrics)
        vars(self).update(vars(loaded))


@contextmanager
def without_curvature(states: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Inside, states that have curvature alone are empty: torch optimizers begin theirs where a state is."""
    emptied = [(state, dict(state)) for state in states if state.keys() == {CURVATURE}]
    for state, _ in emptied:
        state.clear()
    try:
        yield
    finally:
        for state, curvature in emptied:
            state.update(curvature)


@contextmanager
def in_full_precision(states: Mapping[Tensor, dict[str, Any]], kept: torch.dtype | None) -> Iterator[None]:
    """Inside, the states of parameters are in full precision; behind, tensors are kept in a dtype, if one is given."""

    def cast(dtype_of: Callable[[torch.dtype], torch.dtype]) -> None:
        def new(value: Any, full: torch.dtype) -> Any:
            if isinstance(value, list):
                return [new(each, full) for each in value]
            is_averaged = isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point()
            return value.to(dtype_of(full)) if is_averaged else value

        for param, state in states.items():
            for place, full in (
                (vars(state.get(CURVATURE, ParameterCurvature())), torch.promote_types(param.dtype, torch.float32)),
                (state, param.dtype),
            ):
                place |= {name: new(value, full) for name, value in place.items()}

    if kept is None:
        yield
        return
    cast(lambda full: full)
    try:
        yield
    finally:
        cast(lambda full: kept)


@contextmanager
def exporting(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    run: Callable[[], dict[str, Any]],
    saved: Callable[[Tensor, dict[str, Any]], dict[str, Any]],
) -> Iterator[None]:
    """Inside, ``state_dict()`` has packed states as they are ``saved``, and ``run()`` in its first param group."""

    def export(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            index: saved(params[index], {**state, CURVATURE: curvature_of(state).packed()})
            for index, state in state_dict["state"].items()
        }
        if states:  # of all parameters, also where another rank has it
            states = {i: states.get(i, {CURVATURE: {}}) for i in range(len(params))}
        first, *groups = state_dict["param_groups"]
        return {**state_dict, "state": states, "param_groups": [{**first, RUN: run()}, *groups]}

    # a hook before those of users, which see all of it
    handle = optimizer.register_state_dict_post_hook(export, True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def importing(
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    check: Callable[[dict[str, Any]], None],
    kept: Callable[[Tensor, dict[str, Any]], dict[str, Any]],
    restore: Callable[[dict[str, Any]], None],
) -> Iterator[None]:
    """Inside, ``load_state_dict()`` checks the state, loads the curvature, too, and passes the run to ``restore``.

    Args:
        optimizer: the optimizer that loads.
        names: of its parameters, in order.
        check: refuses a saved param group that the optimizer cannot have.
        kept: what is kept of the saved state of a parameter.
        restore: takes the run of `exporting`.

    Raises:
        CurvoptError: from ``load_state_dict()``, if it is the state of another optimizer, or of parameters of other
            shapes.
    """
    curvatures: list[ParameterCurvature] = []
    run: dict[str, Any] = {}

    def take(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        run.update(run_of(optimizer, loaded))
        for group in loaded["param_groups"]:
            check(group)
        states = dict(loaded["state"])
        for index in (index for group in loaded["param_groups"] for index in group["params"]):
            curvatures.append(unpacked(states.get(index, {})))
        for (param, name), curvature in zip(names.items(), curvatures, strict=False):
            if not fits(curvature.factors or [], param.shape):
                raise CurvoptError(
                    f"{type(optimizer).__name__}.load_state_dict(): {name} has shape {list(param.shape)}, but "
                    "curvature of another one was saved "
                    f"({[list(factor.shape) for factor in curvature.factors or []]}); load the state of an equal "
                    "model, whose parameters come in this order. Nothing has changed."
                )
        indices = (index for group in loaded["param_groups"] for index in group["params"])
        for i, (param, index) in enumerate(zip(names, indices, strict=False)):
            rest = {name: each for name, each in states.get(index, {}).items() if name not in (CURVATURE, *_FIELDS)}
            rest = kept(param, {**rest, CURVATURE: curvatures[i].packed()})
            curvatures[i] = unpacked({CURVATURE: rest.pop(CURVATURE)})
            if index in states:  # torch would cast curvature to the dtype of the parameter
                states[index] = rest
        groups = [{**group, RUN: None} for group in loaded["param_groups"]]
        return {**loaded, "state": states, "param_groups": groups}

    def put_back(_: Any) -> None:
        for param, curvature in zip(names, curvatures, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            for name, value in vars(curvature).items():
                if isinstance(value, Tensor) and value.ndim:
                    setattr(curvature, name, value.to(param.device, dtype))
                elif isinstance(value, list):
                    setattr(curvature, name, [tensor.to(param.device, dtype) for tensor in value])
            if param in optimizer.state or any(value is not None for value in vars(curvature).values()):
                optimizer.state[param][CURVATURE] = curvature
        restore(run)

    # after the hooks of users that may replace the state, and before those that see the loaded optimizer
    handles = (
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(put_back, True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_of(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """The run in a state dict, also in one that was written before 0.3.

    Raises:
        CurvoptError: if it is the state of an optimizer of another class.
    """
    who = f"{type(optimizer).__name__}.load_state_dict()"
    runs = [loaded.get("curvature"), *(group.get(RUN) for group in loaded["param_groups"])]
    run = next((run for run in runs if run), None)
    if run is None:
        raise CurvoptError(f'{who}: no param group has an entry "{RUN}", so this is the state of another optimizer.')
    saved = run.get("optimizer", type(optimizer).__name__)
    if saved not in (kind.__name__ for kind in type(optimizer).__mro__):  # a subclass may go on with its state
        raise CurvoptError(
            f"{who}: this is the state of another optimizer, {saved}; build that one. Nothing has changed."
        )
    return run


def state_to_load(optimizer: Any, checkpoint_id: str | PathLike, name: str = "optimizer") -> dict[str, Any]:
    """A ``state_dict()`` of empty tensors, for ``torch.distributed.checkpoint.load`` to fill.

    It has what this rank needs of a checkpoint that may have been written by another number of ranks::

        state = {"model": model.state_dict(), "optimizer": state_to_load(optimizer, path)}
        torch.distributed.checkpoint.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    Args:
        optimizer: a new optimizer of the model, which may be sharded in another way than the one that was saved.
        checkpoint_id: folder of the checkpoint.
        name: under which the optimizer's ``state_dict()`` was saved.
    """
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(checkpoint_id).read_metadata()
    ranks = optimizer._ranks()
    params = {each: p for i, (p, name) in enumerate(optimizer._names().items()) for each in (str(i), name)}
    result: dict[str, Any] = {"state": {}}
    saved: Any = metadata.planner_data
    for key, (first, *path) in saved.items():
        p = params.get(str(path[1])) if path[0] == "state" else None
        if first != name or (p is not None and not ranks.owns(p)):
            continue
        entry, value = metadata.state_dict_metadata[key], None
        if isinstance(entry, TensorStorageMetadata):
            value = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            value = torch.empty_like(value, device="cpu") if p is None else ranks.to_load(p, str(path[-1]), value)
        set_element(result, tuple(path), value)
    # parameters are numbers, unless names were saved
    return {**result, "state": {int(i) if i.isdigit() else i: each for i, each in result["state"].items()}}


def fits(factors: Sequence[Tensor], shape: Sequence[int]) -> bool:
    """Whether a factor list may be that of a parameter of some shape."""
    if not factors or (len(factors) > 1 and len(shape) < 2):
        return not factors
    pairs = list(zip(factors, sizes_of(factors, shape), strict=True))
    # blocks are padded
    return all(f.shape[-1] == d if f.ndim < 4 else 0 <= f.shape[-3] * f.shape[-1] - d < f.shape[-1] for f, d in pairs)
