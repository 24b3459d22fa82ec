"""The state of curvature optimizers in checkpoints, next to that of the torch optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from curvopt.errors import CurvoptError
from curvopt.kroneckers import sizes_of

#: Entries of a parameter's ``state`` that the torch optimizer does not have; they keep their own dtype.
CURVATURE_STATE = ("factors", "ema_weight", "inverses", "bases", "scales", "scales_weight")
#: Under this name state dicts have them, in dictionaries of tensors alone, as ``torch.distributed.checkpoint`` flattens
#: these. States of parameters hold an empty one, as it asks for the names that they have.
CURVATURE = "curvature"
#: The entry of the first param group of a state dict that has all that belongs to no parameter; else ``None``.
RUN = "run"
_OURS = {*CURVATURE_STATE, CURVATURE}
_NONE = "none"


class SampleStream:
    """Generators for Monte-Carlo samples, one for each ``curvature()``, which leave the global one alone.

    They follow from a seed, the number of those before and the rank: the checkpoint of any rank serves all.

    Args:
        seed: ``None`` to take that of PyTorch at the first draw.
        draws: number of generators that were made.
    """

    def __init__(self, seed: int | None = None, draws: int = 0):
        self.seed, self.draws = seed, draws

    def next(self, device: torch.device, rank: int) -> torch.Generator:
        """The next generator."""
        if self.seed is None:
            self.seed = torch.initial_seed() % 2**62
        digest = blake2b(f"{self.seed} {self.draws} {rank}".encode(), digest_size=7).digest()
        self.draws += 1
        return torch.Generator(device).manual_seed(int.from_bytes(digest))


@contextmanager
def without_curvature(states: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Inside, states that have our entries alone are empty: torch optimizers take others for those of their own."""
    own = [(state, dict(state)) for state in states if state and state.keys() <= _OURS]
    for state, _ in own:
        state.clear()
    try:
        yield
    finally:
        for state, ours in own:
            state.update(ours)


def new_progress() -> dict[str, Any]:
    """Counters, flags and numbers of a run that belong to no single parameter, at its start."""
    return {
        "step": 0,
        "steps": [],  # see `curvopt.optim.clocks`
        "due": [],
        "refreshed": [],
        "next_inverse": 0,
        "stale": False,
        "step_weight": torch.ones(()),
        "variables": 1,
        "mean_curvature": torch.zeros(()),
        "several": None,  # whether predictions have several variables, where that chooses the Fisher matrix
        "refused": False,  # whether all backwards that were due had no curvature
        "empirical": 0,  # whether the empirical quantity took the place of another one in the last backward
    }


def export_run(
    kind: str, progress: dict[str, Any], samples: SampleStream, metrics: dict[str, float | Tensor]
) -> dict[str, Any]:
    """The part of a checkpoint that belongs to no parameter: class, progress, random numbers, metrics."""
    # some metrics are measured only now and then: a resumed run logs the last ones, too
    numbers = {name: float(value) for name, value in metrics.items()}
    return {**progress, "optimizer": kind, "sampler": (samples.seed, samples.draws), "metrics": numbers}


def import_run(exported: dict[str, Any]) -> tuple[dict[str, Any], SampleStream, dict[str, float | Tensor]]:
    """Progress, random numbers and metrics of `export_run`."""
    progress = {name: exported[name] for name in exported if name not in ("optimizer", "sampler", "metrics", "kinds")}
    return progress, SampleStream(*exported["sampler"]), dict(exported.get("metrics", {}))


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with ours in one entry, see `CURVATURE`."""
    ours: dict[str, Any] = {name: state[name] for name in CURVATURE_STATE if name in state}
    for name, value in ours.items():
        if isinstance(value, list):  # an empty dictionary would be lost where it is flattened
            ours[name] = {str(i): each for i, each in enumerate(value)} or {_NONE: torch.zeros(())}
    return {name: value for name, value in state.items() if name not in _OURS} | {CURVATURE: ours}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Our entries of what `packed` has returned; or as versions before 0.3 have written them."""
    ours = dict(state.get(CURVATURE) or {name: state[name] for name in CURVATURE_STATE if state.get(name, {}) != {}})
    for name, value in ours.items():
        if isinstance(value, dict):
            ours[name] = [value[i] for i in sorted(value.keys() - {_NONE}, key=int)]
    return ours


@contextmanager
def exporting(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], run: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """Inside, ``state_dict()`` has our state `packed`, and ``run()`` in its first param group."""

    def export(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {index: packed(state) for index, state in state_dict["state"].items()}
        if states:  # of all parameters, also where another rank has it
            states = {i: states.get(i, {CURVATURE: {}}) for i in range(len(params))}
        first, *groups = state_dict["param_groups"]
        return {**state_dict, "state": states, "param_groups": [{**first, RUN: run()}, *groups]}

    for param in params:
        if param in optimizer.state:
            optimizer.state[param].setdefault(CURVATURE, {})
    # a hook before those of users, which see all of it
    handle = optimizer.register_state_dict_post_hook(export, True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def importing(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], restore: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Inside, ``load_state_dict()`` checks the state, loads our part of it, too, and passes the run to ``restore``.

    Args:
        optimizer: the optimizer that loads.
        names: of its parameters, in order.
        restore: takes the run of `exporting`.

    Raises:
        CurvoptError: from ``load_state_dict()``, if it is the state of another optimizer, or of parameters of other
            shapes.
    """
    ours: list[dict[str, Any]] = []
    run: dict[str, Any] = {}

    def take_ours(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        run.update(run_of(optimizer, loaded))
        states = dict(loaded["state"])
        for index in (index for group in loaded["param_groups"] for index in group["params"]):
            state = states.get(index, {})
            ours.append(unpacked(state))
            if index in states:  # torch would cast ours to the dtype of the parameter
                states[index] = {name: state[name] for name in state if name not in _OURS}
        for (param, name), state in zip(names.items(), ours, strict=False):
            if not fits(state.get("factors", []), param.shape):
                raise CurvoptError(
                    f"{type(optimizer).__name__}.load_state_dict(): {name} has shape {list(param.shape)}, but "
                    "curvature of another one was saved "
                    f"({[list(factor.shape) for factor in state['factors']]}); load the state of an equal model, "
                    "whose parameters come in this order. Nothing has changed."
                )
        groups = [{**group, RUN: None} for group in loaded["param_groups"]]
        return {**loaded, "state": states, "param_groups": groups}

    def put_back(_: Any) -> None:
        for param, state in zip(names, ours, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    value = value.to(param.device, dtype)
                elif isinstance(value, list):
                    value = [tensor.to(param.device, dtype) for tensor in value]
                optimizer.state[param][name] = value
            if param in optimizer.state:
                optimizer.state[param].setdefault(CURVATURE, {})
        restore(run)

    # after the hooks of users that may replace the state, and before those that see the loaded optimizer
    handles = (
        optimizer.register_load_state_dict_pre_hook(take_ours),
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
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(checkpoint_id).read_metadata()
    sharding = optimizer._sharding()
    names = optimizer._names()
    others = () if sharding is None else [(i, p) for i, p in enumerate(sharding.params) if not sharding.owns(p)]
    other = {name for i, p in others for name in (str(i), names[p])}
    result: dict[str, Any] = {"state": {}}
    saved: Any = metadata.planner_data
    for key, (first, *path) in saved.items():
        if first != name or (path[0] == "state" and str(path[1]) in other):
            continue
        entry = metadata.state_dict_metadata[key]
        is_tensor = isinstance(entry, TensorStorageMetadata)
        _put(result, path, torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None)
    return result


def _put(tree: Any, path: Sequence[str | int], value: Any) -> None:
    """Put a value into nested dictionaries (of names) and lists (of numbers), which are made on the way."""
    first, rest = path[0], path[1:]
    key: Any = int(first) if str(first).isdigit() else first  # parameters are numbers of a dictionary
    if isinstance(tree, list):
        tree.extend([None] * (key + 1 - len(tree)))
    elif key not in tree:
        tree[key] = None
    if rest and tree[key] is None:
        tree[key] = [] if isinstance(rest[0], int) else {}
    if rest:
        _put(tree[key], rest, value)
    else:
        tree[key] = value


def fits(factors: Sequence[Tensor], shape: Sequence[int]) -> bool:
    """Whether a factor list may be that of a parameter of some shape."""
    if not factors or (len(factors) > 1 and len(shape) < 2):
        return not factors
    pairs = list(zip(factors, sizes_of(factors, shape), strict=True))
    # blocks are padded
    return all(f.shape[-1] == d if f.ndim < 4 else 0 <= f.shape[-3] * f.shape[-1] - d < f.shape[-1] for f, d in pairs)
