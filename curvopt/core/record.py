"""Records of the forward pass: one `ModuleCall` on the autograd node of each output of a module with a rule.

>>> from curvopt import extend
>>> out = extend(nn.Linear(3, 2))(torch.ones(4, 3))
>>> [(record.describe(), record.input.shape) for record, *_ in records_of(out.grad_fn)[:1]]
[('the extended Linear', torch.Size([4, 3]))]

The record is in ``grad_fn.metadata``, so it lives and dies with the graph: nothing is kept on modules or in globals.
It must not hold the node or its output (an uncollectable cycle through C++). From top to bottom::

    Running, disable               the call that runs now, and whether it is recorded
    observe, all_observers         attached optimizers
    Model, ModelCall               an extended model, and its outermost calls, which say how many samples there are
    note_parameters, extended_...  names, modules and models of parameters
    samples_first                  inputs in which steps come before samples, in the order that rules expect
    ModuleCall                     a call of a layer, with its arguments
    Prediction, TermCall           what users mark, and regularizers
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from operator import is_
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from curvopt.core.pytorch_workarounds import is_written_down, saves_tensors_as_they_are
from curvopt.core.vjp import listeners
from curvopt.errors import CurvoptError, CurvoptWarning


class Running(threading.local):
    """The outermost call of an extended module that runs now in a thread.

    Attributes:
        call: its record, if it is recorded.
        is_skipped: whether it is not, as no optimizer is due.
        frame: the frame in which it runs.
        depth: number of the modules around the present place that may call other ones.
        is_enabled: whether calls are recorded at all, see `disable`.
    """

    call: ModelCall | None = None
    is_skipped = False
    frame: FrameType | None = None
    depth = 0
    is_enabled = True

    def begin(self, model: Model, top: bool) -> None:
        """The call of a module begins; ``top`` for the model itself or one of its children."""
        if top and self.depth and not self._goes_on():
            self.depth = 0  # a call that was interrupted
        if not self.depth:
            self.frame, self.is_skipped = sys._getframe(2), not model.decide_to_record()
            self.call = None if self.is_skipped else ModelCall(model)
        self.depth += 1

    def _goes_on(self) -> bool:
        at: FrameType | None = sys._getframe(2)
        while at is not None and at is not self.frame:
            at = at.f_back
        return at is not None

    def end(self) -> bool:
        """The call of a module ends, also with an exception; whether it was a model call."""
        self.depth = max(self.depth - 1, 0)
        if not self.depth:
            self.call, self.is_skipped, self.frame = None, False, None
        return not self.depth


running = Running()


@contextmanager
def disable(active: bool = True) -> Iterator[None]:
    """Forward passes record nothing inside, so that they cost nothing extra and yield no fields.

    Args:
        active: ``False`` makes this a no-op.
    """
    before, running.is_enabled = running.is_enabled, running.is_enabled and not active
    try:
        yield
    finally:
        running.is_enabled = before


def _records() -> bool:
    """Whether forward passes are recorded now: not where they are written down, to be run without modules."""
    return running.is_enabled and torch.is_grad_enabled() and not is_written_down()


class Observer(Protocol):
    """An attached optimizer, with a context for backwards of users."""

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> AbstractContextManager[Any] | None:
        """The context to run a backward in that will reach parameters; ``None`` to let it run as it is."""

    def _is_due(self) -> bool:
        """Before a forward pass: whether a backward behind it may want a context."""
        ...


_observers: list[weakref.ref[Observer]] = []


def observe(observer: Observer) -> bool:
    """Ask an optimizer from now on; whether it was not asked before."""
    is_new = observer not in all_observers()
    if is_new:
        _observers.append(weakref.ref(observer, _observers.remove))
    return is_new


def all_observers() -> list[Observer]:
    """The attached optimizers, in the order of attach()."""
    return [observer for reference in _observers.copy() if (observer := reference()) is not None]


class Model:
    """An extended model: a token that its modules share, also in copies of it.

    Attributes:
        name: for messages.
        batch_axis: axis of the inputs and outputs of the model that counts the samples; ``None`` where a batch is one
            sample.
        size: number of its modules.
        has_warned: whether the model's users were warned of the cost of quantities that are computed sample by sample.
        forward: number of the running forward pass; one that calls single modules ends when one of them, or a module
            inside of it, is called again.
        called: paths of the modules that were called in it.
        forwards: by field, the forward passes that the fields on parameters are of.
        on_demand: whether calls are recorded only inside of `backpack` and while an attached optimizer is due, as only
            optimizers have extended the model. Copies record always.
        was_skipped: whether its last call was not recorded, as no optimizer was due.
    """

    def __init__(self, name: str, batch_axis: int | None = 0, size: int = 1):
        self.name, self.batch_axis, self.size = name, batch_axis, size
        self.has_warned = False
        self.forward, self.called = 0, set[str]()
        self.forwards: dict[str, set[int]] = {}
        self.on_demand = False
        self.was_skipped = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which record always."""
        return {**vars(self), "on_demand": False}

    def decide_to_record(self) -> bool:
        """Whether a call that begins is recorded; any optimizer counts, as its backward may pass this model, too."""
        self.was_skipped = self.on_demand and not (listeners() or any(each._is_due() for each in all_observers()))
        return not self.was_skipped

    def warn_of_cost(self, message: str) -> None:
        """Warn, unless there was such a warning before."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(message, CurvoptWarning, stacklevel=3)


class ModelCall:
    """The outermost call of an extended module. The records of its layers refer to it.

    Attributes:
        model: the model to which the module belongs.
        number: distinguishes the calls.
        name: of the module, for messages.
        samples: lengths that may be the number of samples, once the call has ended, the likeliest first: of a list of
            tensors (images, say) that is the first input, and of the batch axis. None of a call without tensors.
        first: refers to the tensor whose rows are the samples, once the call has ended.
        forward: the forward pass of the model to which the call belongs, see `Model.forward`.
    """

    _numbers = itertools.count()

    def __init__(self, model: Model):
        self.model, self.number, self.name = model, next(self._numbers), model.name
        self.forward, self.samples = model.forward, list[int]()
        self.first: Callable[[], Tensor | None] = lambda: None

    def end(self, path: str, name: str, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Note the path of the module, and the arguments, among which are tensors."""
        model, at = self.model, f"{path}." if path else ""
        if any([at.startswith(called) or called.startswith(at) for called in model.called]):
            model.forward, model.called = model.forward + 1, set()
        model.called.add(at)
        self.forward = model.forward
        first = args[0] if args else next(iter(kwargs.values()), None)
        self.name, axis = name, model.batch_axis or 0
        counted = next((x for x in tensors if x.dim() > axis), None)
        if counted is not None:
            self.samples, self.first = [counted.shape[axis]], TensorWeakRef(counted)
        if isinstance(first, list) and first and all(isinstance(x, Tensor) for x in first):
            self.samples.insert(0, len(first))


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the forward of a module uses: of the module, and of containers that have no forward.

    Names are relative to the module, e.g. ``weight``, ``parametrizations.weight.original0``, ``scales.0``.
    """
    owned = {name: p for name, p in module._parameters.items() if p is not None}
    for name, child in module._modules.items():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)) or (
            child is not None and name == "parametrizations"
        ):
            owned |= {f"{name}.{key}": p for key, p in child.named_parameters(remove_duplicate=False)}
    return owned


_lock = threading.RLock()  # one thread may extend while another one looks all parameters through
# names of the parameters of extended modules, and the modules, to notice calls that nothing recorded
_extended = WeakIdKeyDictionary()
_UNKNOWN: tuple[str | None, Callable[[], nn.Module | None], Model | None] = None, lambda: None, None


def note_parameters(module: nn.Module, path: str, model: Model, again: bool = True) -> None:
    """Note the parameters that a module of an extended model owns now, and its path in the model.

    Args:
        module: the module.
        path: of it in the model.
        model: the model.
        again: also parameters that are noted already, perhaps for another module.
    """
    for name, p in owned_parameters(module).items():
        if again or p not in _extended:
            with _lock:
                _extended[p] = f"{path}.{name}".lstrip("."), weakref.ref(module), model


def extended_name(p: Tensor) -> str | None:
    """Path of a parameter in the model that was extended, ``None`` for other tensors."""
    return (_extended.get(p) or _UNKNOWN)[0]


def extended_model(p: Tensor) -> Model | None:
    """The extended model to which a parameter belongs, ``None`` for other tensors."""
    return (_extended.get(p) or _UNKNOWN)[2]


def extended_parameters(models: Collection[Model | None]) -> list[Tensor]:
    """The parameters of extended models."""
    with _lock:
        return [p for p, (_, _, model) in _extended.items() if model in models]


def extended_owner(p: Tensor) -> nn.Module:
    """The extended module that owns a parameter, called or not; an empty one if there is none any more."""
    owner = (_extended.get(p) or _UNKNOWN)[1]()
    return nn.Module() if owner is None else owner


class RowsBySample(NamedTuple):
    """Rows that belong to samples in any order: of packed sequences, or of appended batches of different lengths.

    Each sample gets as many places as the one with most rows has, ``[N T]``; zeros fill the gaps.

    Attributes:
        places: of the rows.
        there: which places have a row.
        lengths: number of rows of each sample, ``[N]``, on the CPU.
        longest: the largest of these, T.
    """

    places: Tensor
    there: Tensor
    lengths: Tensor
    longest: int


@lru_cache(maxsize=2)  # calls of one backward have rows of equal samples; few, as tensors are kept
def rows_by_sample(samples: tuple[int, ...], N: int, device: torch.device) -> RowsBySample:
    """The places of rows, from the sample of each, whose steps come in their order."""
    longest, lengths, places = max(Counter(samples).values(), default=0), [0] * N, list[int]()
    for n in samples:
        places.append(n * longest + lengths[n])
        lengths[n] += 1
    at = torch.tensor(places, dtype=torch.long, device=device)
    there = torch.zeros(N * longest, dtype=torch.bool, device=device).index_fill_(0, at, True)
    return RowsBySample(at, there, torch.tensor(lengths, device="cpu"), longest)


#: How steps come before samples: along an axis, or in rows, all samples of a step after each other, where
#: sequences may have ended. Of a single sample there may be no axis at all.
Steps = Literal["axis", "rows", "none"] | RowsBySample


def samples_first(N: int, steps: Steps, x: Tensor, axis: int = 0) -> Tensor:
    """``[T, N, ...]`` as ``[N, T, ...]``, or ``[T N, ...]`` as ``[N T, ...]``; these begin at an axis."""
    if isinstance(steps, RowsBySample):
        shape = list(x.shape)
        shape[axis] = N * steps.longest
        return x.new_zeros(shape).index_copy_(axis, steps.places, x)
    if steps == "none":
        return x.unsqueeze(axis)
    if steps == "axis":
        return x.transpose(axis, axis + 1)
    return x.unflatten(axis, (-1, N)).transpose(axis, axis + 1).flatten(axis, axis + 1)


KEY = "curvopt"


_LOW = frozenset([torch.float16, torch.bfloat16])


class ModuleCall:
    """One call of a module that has a rule, with its arguments.

    A tensor that autograd keeps for the backward anyway is referred to weakly, so that its memory is free again as soon
    as the backward has passed the layer.
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "boundary",
        "cache",
        "given",
        "kwargs",
        "model_call",
        "module",
        "owner",
        "path",
        "rule",
        "seen",
        "settings",
        "shapes",
        "steps",
        "training",
        "versions",
    )

    def __init__(
        self,
        path: str,
        model_call: ModelCall | None,
        module: nn.Module,
        rule: Any,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
        traced: bool = False,
    ):
        """Record the arguments, and the shapes of ``outputs``.

        Args:
            path: of the module in the model.
            model_call: the call of the model.
            module: the layer.
            rule: its `curvopt.core.layers.rule.Rule`.
            args: of the call, by position.
            kwargs: of the call, by name.
            outputs: of the call.
            traced: whether the call was in code that was compiled.
        """
        is_single = len(args) == 1 and not kwargs
        inputs = _tensors(args[0] if is_single else (args, kwargs))
        self.path, self.model_call, self.rule = path, model_call, rule
        self.module = self.owner = module  # of an operation the owner is the module in which it was
        nodes = [x.grad_fn for x in inputs]
        self.boundary = frozenset(nodes) - {None}
        leaves = [x for x in inputs if x.grad_fn is None and x.requires_grad] if None in nodes else ()
        #: Parameters of the module among the inputs: the graph does not show which of their uses are inputs.
        self.given = tuple([p for p in module.parameters() if any([p is leaf for leaf in leaves])]) if leaves else ()
        self.seen = tuple(module._parameters.values())  # torch.func.functional_call exchanges them
        self.shapes = tuple([torch.Size() if out.is_nested else out.shape for out in outputs])
        self.cache: dict[str, Any] = {}  # what several columns and quantities share; emptied after each backward
        self.settings, self.training = _settings(module, rule), module.training
        #: How the steps came before the samples, where these were put first (see `samples_first`).
        self.steps: Steps | None = None
        #: Versions of the tensors among the arguments; ``None`` if the call itself has changed them.
        self.versions: list[int] | None = [version(x) for x in inputs]
        # an in-place forward: the input is gone, and holding the output would be a cycle (of several, copies are handed
        # out, and an input may be among them)
        if self.boundary and len(outputs) == 1 and any(map(is_, inputs, itertools.repeat(outputs[0]))):
            args, kwargs, self.versions = (), {}, None
        elif not any([p is not None and p.requires_grad for p in self.seen]):
            args, kwargs = tree_map_only(Tensor, _without_entries, (args, kwargs))
            self.versions = [version(x) for x in _tensors((args, kwargs))]
        elif is_single and not traced and self._is_kept(args[0]):
            args = (TensorWeakRef(args[0]),)
        self._args, self.kwargs = args, kwargs

    def _is_kept(self, x: Any) -> bool:
        """Whether autograd keeps the only input of the module as it is until the backward has passed."""
        return (
            isinstance(x, Tensor)
            and self.rule.leaves_input(self.module)
            and type(self.rule).__module__.startswith("curvopt.")  # one of a user's may do something to it first
            and x.is_floating_point()
            and x.layout == torch.strided
            and x.is_contiguous()
            and x.grad_fn is not None
            # autograd may keep another view of its base
            and (not x._is_view() or (x.dim() == 2 and isinstance(self.module, nn.Linear)))
            and saves_tensors_as_they_are()
        )

    @property
    def model(self) -> Model | None:
        """The model of which it is a layer."""
        return None if self.model_call is None else self.model_call.model

    @property
    def args(self) -> tuple:
        """The positional arguments."""
        if len(self._args) == 1 and isinstance(self._args[0], TensorWeakRef):
            x = self._args[0]()
            if x is None:
                raise CurvoptError(
                    f"{self.describe()}: its input is gone, since the graph of this forward pass was freed; call "
                    "backward with retain_graph=True to go through it again."
                )
            return (x,)
        return self._args

    @property
    def is_held(self) -> bool:
        """Whether the arguments are still there."""
        return not any(isinstance(x, TensorWeakRef) and x() is None for x in self._args)

    @property
    def input(self) -> Tensor:
        """The first input of the call, given by position or by name."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        args = self.args
        return _tensors((args, self.kwargs) if self.kwargs or len(args) != 1 else args[0])

    def describe(self) -> str:
        """Path and type of the module, for messages."""
        return describe(self.path, self.owner)

    def in_precision(self, dtype: torch.dtype) -> ModuleCall:
        """This call on inputs of at least the precision of ``dtype`` (autocast feeds modules lower ones)."""
        if "is_low" not in self.cache:
            self.cache["is_low"] = not _LOW.isdisjoint([x.dtype for x in self.tensors])
        if dtype in _LOW or not self.cache["is_low"]:
            return self
        return self._with_inputs(lambda x: x.to(dtype) if x.dtype in _LOW else x)

    def _with_inputs(self, changed: Callable[[Tensor], Tensor]) -> ModuleCall:
        """A copy with other tensors among its arguments."""
        call, args = copy.copy(self), self.args
        if len(args) == 1 and not self.kwargs and isinstance(args[0], Tensor):  # a general tree takes long
            call._args = (changed(args[0]),)
        else:
            call._args, call.kwargs = tree_map_only(Tensor, changed, (args, self.kwargs))
        return call

    def samples_first(self, N: int, steps: Steps) -> ModuleCall:
        """This call with the samples first, of a module to which rows, or axes before the features, are alike."""
        first = partial(samples_first, N, steps)
        call = self._with_inputs(first)
        if isinstance(steps, RowsBySample):
            call.shapes = tuple([torch.Size([N * steps.longest, *shape[1:]]) for shape in self.shapes])
        else:
            blanks = [_blank(shape, torch.float32, torch.device("cpu")) for shape in self.shapes]
            call.shapes = tuple([first(blank).shape for blank in blanks])
        call.cache, call.steps = self.cache.setdefault("samples first", {}), steps
        return call

    def check_settings(self) -> None:
        """Raise if an attribute that the rule reads changed since the forward."""
        if self.settings is not None and self.settings != _settings(self.module, self.rule):
            raise CurvoptError(
                f"{self.describe()}: an attribute of the module was changed between its forward pass and the backward "
                "(a stride, a padding, ...); change it before the forward pass."
            )

    def check_inputs(self) -> None:
        """Raise if an input changed since the forward or is nested, or if `check_parameters` does."""
        self.check_parameters()
        inputs = self.tensors
        if any([x.is_nested for x in inputs]):
            raise CurvoptError(
                f"{self.describe()} was called with a nested tensor, whose samples cannot be separated; pad it "
                "(x.to_padded_tensor(0)), or call the module on each part."
            )
        if self.versions != [version(x) for x in inputs]:
            raise self.modified()

    def check_parameters(self) -> None:
        """Raise if the call had other parameters than the module has."""
        now = self.module._parameters
        if not all(map(is_, self.seen, now.values())):
            name = next(name for name, seen in zip(now, self.seen, strict=True) if seen is not now[name])
            raise CurvoptError(
                f"{self.describe()} was called with another '{name}' than its parameter (torch.func.functional_call? "
                "fully_shard?); call it with its parameters, or have torch.nn.utils.parametrize compute it from a "
                "parameter. In several processes, train with DistributedDataParallel, which does not shard parameters."
            )

    def modified(self) -> CurvoptError:
        """The error where an input has changed."""
        return CurvoptError(
            f"{self.describe()}: an input was modified in place, by the module itself or after it, so its Jacobian "
            "cannot be formed; give the in-place operation a copy (`x = x.clone()`)."
        )


def _without_entries(x: Tensor) -> Tensor:
    """A tensor of equal shape, type and device that takes no memory; results that use its entries are nan."""
    if x.layout != torch.strided or x.is_nested or not x.is_floating_point():
        return x
    return _blank(x.shape, x.dtype, x.device)


@lru_cache(maxsize=1000)
def _blank(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


class Prediction:
    """What a user says is a prediction, see `curvopt.prediction`."""


class TermCall:
    """A term of the loss that sees parameters only: ``weight / 2`` times the sum of their squares."""

    def __init__(self, parameters: Sequence[nn.Parameter], weight: float):
        """Record the parameters and the weight."""
        self.parameters, self.weight = parameters, weight


def _settings(module: nn.Module, rule: Any) -> list[Any]:
    """Numbers, flags and names among a module's attributes that its rule may read."""
    if rule.reads is not None:
        return [getattr(module, name) for name in rule.reads]
    return [v for name, v in vars(module).items() if type(v) in _SIMPLE and name != "training"]


_SIMPLE = frozenset([int, float, bool, str, tuple])


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list, dict):  # nearly always; a general tree takes long to look through
        return [leaf for branch in (tree.values() if type(tree) is dict else tree) for leaf in _tensors(branch)]
    return [] if tree is None else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def records_of(node: Node) -> list[tuple[Any, int, int]]:
    """The records on a node: calls, the index of their output, and the number of that output of the node."""
    return node.metadata.get(KEY, [])  # type: ignore[attr-defined]


def describe(path: str, module: nn.Module) -> str:
    """``layer2.bn (BatchNorm2d)``; the root module has no path."""
    return f"{path} ({type(module).__name__})" if path else f"the extended {type(module).__name__}"


def version(tensor: Tensor) -> int:
    """Count of in-place changes of a tensor (inference tensors have none)."""
    return 0 if tensor.is_inference() else tensor._version


def _record(out: Tensor, record: ModuleCall | ModelCall | TermCall | Prediction, index: int = 0) -> None:
    node: Any = out.grad_fn
    if node is not None:
        node.metadata.setdefault(KEY, []).append((record, index, out.output_nr))


def record_term(out: Tensor, parameters: Sequence[nn.Parameter], weight: float) -> None:
    """Note on the node of ``out`` that it is ``weight / 2`` times the squared norm of the parameters."""
    if _records():
        _record(out, TermCall(parameters, weight))
