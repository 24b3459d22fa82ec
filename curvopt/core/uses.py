"""Recording, in the forward pass, where modules were used: one `Use` on the autograd node of each output.

The record lives on ``grad_fn.metadata`` and in the closure of a tensor hook, so it lives and dies with the graph:
nothing is kept on modules or in globals. It must not hold the node or its output (an uncollectable cycle through C++).
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from curvopt.core.jacobians import widened
from curvopt.core.recording import model_calls
from curvopt.core.recording.model_calls import Model
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.core.derivatives.losses import LossCurvature
    from curvopt.core.derivatives.rules import Rule

KEY = "curvopt"
_recording = True


class Head(Protocol):
    """An output z of the network whose rows are the samples, or parts of them."""

    @property
    def edge(self) -> GradientEdge | None:
        """Where z comes from, if from parameters at all."""
        ...

    @property
    def input(self) -> Tensor:
        """A tensor like z."""
        ...

    @property
    def axis(self) -> int:
        """Along which its rows lie."""
        ...

    def describe(self) -> str:
        """What it is and where, for messages."""
        ...

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient in z, from what arrived; differentiable if gradients are enabled."""
        ...


class Loss(Head, Protocol):
    """A term of what is differentiated, as a function of z."""

    def curvature(self, grad: Tensor) -> tuple[LossCurvature, Tensor]:
        """The Hessian in z up to a factor, from what arrived, and the root of the factor."""
        ...


#: The contexts that are told of backwards, innermost last, and an `Engine` while it pulls back itself.
listeners: list[Any] = []


class Engine:
    """Hears what it does itself."""


def hears_itself() -> bool:
    """Whether the engine pulls back itself."""
    return bool(listeners) and isinstance(listeners[-1], Engine)


@contextmanager
def disable(active: bool = True) -> Iterator[None]:
    """Forward passes record nothing inside, so that they cost nothing extra and yield no fields.

    Args:
        active: ``False`` makes this a no-op.
    """
    global _recording
    before, _recording = _recording, _recording and not active
    try:
        yield
    finally:
        _recording = before


@contextmanager
def unheard() -> Iterator[None]:
    """Backward passes inside are the engine's own: no listener is told of them."""
    engine = Engine()
    listeners.append(engine)
    try:
        yield
    finally:
        listeners.remove(engine)  # the last one, unless another thread has added one


class Use:
    """One call of a module that has a rule, with what it got.

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
        "model",
        "module",
        "path",
        "rule",
        "seen",
        "settings",
        "shapes",
        "steps",
        "versions",
    )

    #: Set by `curvopt.core.derivatives.rules`, which knows modules, as this file does not.
    rule_for: ClassVar[Callable[[nn.Module], Rule | None]]

    def __init__(
        self,
        path: str,
        model: Model | None,
        module: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
        traced: bool = False,
    ):
        """Record what the call got, and the shapes of ``outputs``; it is ``traced`` in code that was compiled."""
        inputs = _tensors((args, kwargs)) if kwargs or len(args) != 1 else _tensors(args[0])
        self.path, self.model, self.module, self.kwargs = path, model, module, kwargs
        self.boundary = frozenset([leaf.grad_fn for leaf in inputs if leaf.grad_fn is not None])
        leaves = [leaf for leaf in inputs if leaf.grad_fn is None and leaf.requires_grad]
        #: Its own parameters among the inputs: no border in the graph tells what of them entered as which.
        self.given = tuple([p for p in module.parameters() if any([p is leaf for leaf in leaves])]) if leaves else ()
        self.seen = tuple(module._parameters.values())  # torch.func.functional_call puts others in their place
        self.shapes = tuple([out.shape for out in outputs])
        self.cache: dict[str, Any] = {}  # what several columns and quantities share; emptied after each backward
        rule = Use.rule_for(module)
        assert rule is not None
        self.rule = rule
        self.settings = _settings(module, self.rule)
        #: How the steps came before the samples, where these were put first (see `samples_first`).
        self.steps: Steps | None = None
        # an in-place forward: the input is gone, and holding the output would be a cycle (of several, copies are handed
        # out, and an input may be among them)
        changed = bool(self.boundary) and len(outputs) == 1 and any([outputs[0] is leaf for leaf in inputs])
        frozen = not any([p is not None and p.requires_grad for p in self.seen])
        if changed:
            self._args, self.kwargs = (), {}
        elif frozen:
            self._args, self.kwargs = tree_map_only(Tensor, _without_entries, (args, kwargs))
        elif not traced and len(args) == 1 and not kwargs and self._is_kept(args[0]):
            self._args = (TensorWeakRef(args[0]),)
        else:
            self._args = args
        #: Of what is held; ``None`` if it is not what it was.
        self.versions: tuple[int, ...] | None = None if changed else self._versions()

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
            and not torch.is_autocast_enabled(x.device.type)
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # type: ignore[attr-defined]
        )

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

    @args.setter
    def args(self, args: tuple) -> None:
        self._args = args

    @property
    def input(self) -> Tensor:
        """The first input of the call, given by position or by name."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def _versions(self) -> tuple[int, ...]:
        return tuple([version(leaf) for leaf in _tensors((self.args, self.kwargs))])

    @property
    def owner(self) -> nn.Module:
        """The module that was called, or in which an operation was."""
        return self.module

    def describe(self) -> str:
        """Path and type of the module, for messages."""
        return describe(self.path, self.owner)

    def in_precision(self, dtype: torch.dtype) -> Use:
        """The same call on inputs of at least the precision of ``dtype`` (autocast feeds modules lower ones)."""
        low = (torch.float16, torch.bfloat16)
        if dtype in low or not any(x.dtype in low for x in _tensors((self.args, self.kwargs))):
            return self
        use = copy.copy(self)
        raised = tree_map_only(Tensor, lambda x: x.to(dtype) if x.dtype in low else x, (self.args, self.kwargs))
        use.args, use.kwargs = raised
        return use

    def batched(self) -> Use:
        """The same call of a single sample, as one of a batch."""
        use = copy.copy(self)
        use.args, use.kwargs = tree_map_only(Tensor, lambda x: x.unsqueeze(0), (self.args, self.kwargs))
        use.shapes = tuple([torch.Size([1, *shape]) for shape in self.shapes])
        return use

    def samples_first(self, N: int, steps: Steps) -> Use:
        """The same call with the samples first, of a module to which rows, or axes before the features, are alike."""
        use = copy.copy(self)
        first = partial(samples_first, N, steps)
        use.args, use.kwargs = tree_map_only(Tensor, first, (self.args, self.kwargs))
        if isinstance(steps, Packed):
            use.shapes = tuple([torch.Size([N * steps.longest, *shape[1:]]) for shape in self.shapes])
        else:
            blanks = [_blank(shape, torch.float32, torch.device("cpu")) for shape in self.shapes]
            use.shapes = tuple([first(blank).shape for blank in blanks])
        use.cache, use.steps = self.cache.setdefault("samples first", {}), steps
        return use

    def check_settings(self) -> None:
        """Raise if an attribute that the rule reads changed since the forward."""
        if self.settings is not None and self.settings != _settings(self.module, self.rule):
            raise CurvoptError(
                f"{self.describe()}: an attribute of the module was changed between its forward pass and the backward "
                "(train() or eval(), a stride, a padding, ...); change it before the forward pass."
            )

    def check_inputs(self) -> None:
        """Raise if an input changed since the forward, or it ran with other parameters than its own."""
        own = self.module._parameters
        if not all(map(is_, self.seen, own.values())):
            name = next(name for name, seen in zip(own, self.seen, strict=True) if seen is not own[name])
            raise CurvoptError(
                f"{self.describe()} was called with another '{name}' than its own parameter "
                "(torch.func.functional_call? fully_shard?); call it with its own, so that quantities can be put "
                "on it. In several processes, train with DistributedDataParallel, which does not shard parameters."
            )
        if self.versions != self._versions():
            raise self.modified()

    def modified(self) -> CurvoptError:
        """The error where an input is not what it was."""
        return CurvoptError(
            f"{self.describe()}: an input was modified in place, by the module itself or after it, so its Jacobian "
            "cannot be formed; give the in-place operation a copy (`x = x.clone()`)."
        )


def samples_of(sequences: Tensor, N: int) -> Tensor:
    """The sample of each row of packed sequences, of which each has as many, one after the other."""
    return sequences // ((int(sequences.max()) + 1) // N)


class Packed(NamedTuple):
    """Where the rows of packed sequences lie if every sample has as many, ``[N T]``: between them zeros are put.

    Attributes:
        places: of the rows there.
        there: which rows of those are some of the sequences.
        lengths: of the sequences, ``[N]``, on the CPU.
    """

    places: Tensor
    there: Tensor
    lengths: Tensor

    @property
    def longest(self) -> int:
        """Number of steps T of the longest sequence."""
        return len(self.there) // len(self.lengths)

    @staticmethod
    def of(samples: Tensor, N: int) -> Packed:
        """From the sample of each row, whose steps come in their order."""
        lengths, order = samples.bincount(minlength=N), samples.argsort(stable=True)
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        places, longest = samples.clone(), int(lengths.max())
        places[order] = samples[order] * longest + torch.arange(len(samples), device=samples.device) - begins
        there = torch.zeros(N * longest, dtype=torch.bool, device=samples.device).index_fill_(0, places, True)
        return Packed(places, there, lengths.cpu())


#: How steps come before samples: along an axis of their own, or in rows, all samples of a step after each other, where
#: sequences may have ended.
Steps = Literal["axis", "rows"] | Packed


def samples_first(N: int, steps: Steps, x: Tensor, axis: int = 0) -> Tensor:
    """``[T, N, ...]`` as ``[N, T, ...]``, or ``[T N, ...]`` as ``[N T, ...]``; these begin at an axis."""
    if isinstance(steps, Packed):
        padded = x.new_zeros(*x.shape[:axis], len(steps.there), *x.shape[axis + 1 :])
        return padded.index_copy(axis, steps.places, x)
    if steps == "axis":
        return x.transpose(axis, axis + 1)
    return x.unflatten(axis, (-1, N)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def _without_entries(x: Tensor) -> Tensor:
    """A tensor of the same kind that takes no memory; what was computed with its entries would be nan."""
    if x.layout != torch.strided or x.is_nested or not x.is_floating_point():
        return x
    return _blank(x.shape, x.dtype, x.device)


@lru_cache(maxsize=1000)
def _blank(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


class TermUse:
    """A term of the loss that sees parameters only: ``weight / 2`` times the sum of their squares."""

    __slots__ = ("__weakref__", "boundary", "parameters", "weight")

    def __init__(self, parameters: Sequence[nn.Parameter], weight: float):
        """Record what the term sees."""
        self.parameters, self.weight, self.boundary = parameters, weight, frozenset()


class LossUse:
    """One call of an extended loss: its module, its input (the network's output) and its other arguments."""

    __slots__ = ("__weakref__", "args", "edge", "further", "input", "kwargs", "module", "path", "target", "version")
    axis = 0

    def __init__(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Record the arguments of the loss, given by position or by name: first the input, then the target if any."""
        self.path, self.module = path, module
        self.args, self.kwargs = args, kwargs
        given = [*args, *kwargs.values()]
        self.target: Any = kwargs.get("target", given[1] if len(given) > 1 else None)
        self._look_at(_first(args, kwargs))
        others = {id(other): other for other in self.others if other.requires_grad}
        #: The same call for each other argument that requires gradients.
        self.further = [copy.copy(self)._look_at(other) for other in others.values()]

    def _look_at(self, argument: Tensor) -> LossUse:
        self.input, self.version = argument, version(argument)
        self.edge = get_gradient_edge(argument) if argument.requires_grad else None
        return self

    @property
    def others(self) -> list[Tensor]:
        """Every tensor among the arguments but the input."""
        return [leaf for leaf in _tensors((self.args, self.kwargs)) if leaf is not self.input]

    def again(self, z: Tensor) -> Tensor:
        """The value of the loss at another input, in float32 at least."""
        given = (self.args, self.kwargs)
        args, kwargs = tree_map_only(Tensor, lambda arg: z if arg is self.input else widened(arg), given)
        held = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        wide = {name: raised for name, tensor in held if (raised := widened(tensor)) is not tensor}
        return torch.func.functional_call(self.module, wide, args, kwargs) if wide else self.module(*args, **kwargs)

    def slope(self, grad: Tensor) -> Tensor:
        """Gradient of the loss in its input, from the gradient of its value."""
        create_graph = torch.is_grad_enabled()
        # in float32 at least: a scaled loss would leave the range of float16
        z = self.input.to(torch.promote_types(self.input.dtype, torch.float32))
        z = z.view_as(z) if create_graph else z.detach().requires_grad_()  # an alias: the input itself has hooks
        with torch.enable_grad(), disable():
            value = self.again(z)
        grad = grad.reshape(value.shape).to(value.dtype)
        return torch.autograd.grad(value, z, grad, create_graph=create_graph)[0]

    def curvature(self, grad: Tensor) -> tuple[LossCurvature, Tensor]:
        """The curvature, and the root of the factor ``grad`` by which the loss was scaled."""
        from curvopt.core.derivatives.losses import curvature_of

        return curvature_of(self, grad)

    def describe(self) -> str:
        """Path and type of the loss module, for messages."""
        return describe(self.path, self.module)


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument of a loss that is the network's output, ``None`` if there are no arguments."""
    return args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))


def _settings(module: nn.Module, rule: Rule) -> list[Any]:
    """Numbers, flags and names among a module's attributes that its rule may read."""
    if rule.reads is not None:
        return [getattr(module, name) for name in rule.reads]
    return [v for name, v in vars(module).items() if type(v) in _SIMPLE and (rule.reads_mode or name != "training")]


_SIMPLE = frozenset([int, float, bool, str, tuple])


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list, dict):  # nearly always; a general tree takes long to look through
        return [leaf for branch in (tree.values() if type(tree) is dict else tree) for leaf in _tensors(branch)]
    return [] if tree is None else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def records_of(node: Node) -> list[tuple[Any, int, int]]:
    """What was recorded on a node: uses, the index of their output, and which output of the node it is."""
    return node.metadata.get(KEY, [])  # type: ignore[attr-defined]


def describe(path: str, module: nn.Module) -> str:
    """``layer2.bn (BatchNorm2d)``; the root module has no path."""
    return f"{path} ({type(module).__name__})" if path else f"the extended {type(module).__name__}"


def version(tensor: Tensor) -> int:
    """Count of in-place changes of a tensor (inference tensors have none)."""
    return 0 if tensor.is_inference() else tensor._version


def outside_of_graphs(call: Callable[..., Any], *args: Any) -> Any:
    """Call something that ``torch.compile`` is tracing, without having it traced."""
    torch._dynamo.graph_break(
        msg="curvopt reads the autograd graph, which no compiled graph contains: use torch.compile without "
        "fullgraph=True, or run a forward that needs no quantities inside of curvopt.disable()."
    )
    return torch._dynamo.disable(_untraced)(call, *args)


def _untraced(call: Callable[..., Any], *args: Any) -> Any:
    from torch._functorch import config

    config.donated_buffer = False  # the backward of a compiled graph runs for several columns
    return call(*args)


def _records() -> bool:
    """Whether forward passes are recorded now: not where they are written down, to be run without modules."""
    if not (_recording and torch.is_grad_enabled()):
        return False
    # not is_exporting(), which older versions of PyTorch take for true in all that they compile
    return torch._C._get_tracing_state() is None and not torch.compiler._is_exporting_flag


class Recorder:
    """The forward hooks of a module of an extended model. Stateless: they may be copied and pickled with the module."""

    def __init__(self, path: str, model: Model):
        """Remember the module's path in the model."""
        self.path, self.model = path, model

    def begin(self, module: nn.Module, args: tuple) -> None:
        """Before the forward: a call of the module runs."""
        if not _records():
            return
        if torch.compiler.is_dynamo_compiling():
            outside_of_graphs(self.begin, module, args)
        else:
            model_calls.begin(self.model, "." not in self.path)

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any, traced: bool = False
    ) -> Any:
        """Put a `Use` on the node of each output, and a `ModelCall` if the call is the outermost one."""
        if not _records():
            return None
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self, module, args, kwargs, output, True)
        running = model_calls.running_model()
        outermost = model_calls.end()
        outputs = _tensors(output)
        nodes = [out.grad_fn for out in outputs]
        if not any(nodes):
            return None
        ruled = self._has_rule(module)
        if ruled:
            use = Use(self.path, running or self.model, module, args, kwargs, outputs, traced)
            if len(outputs) > 1:
                # an output may be computed from another: hand out copies, so that what arrives there comes from outside
                # (no views: changed in place, they would take the record out of the graph)
                output = tree_map_only(Tensor, lambda out: out.clone() if out.grad_fn is not None else out, output)
                outputs = _tensors(output)
                nodes = [out.grad_fn for out in outputs]
            for index, (out, node) in enumerate(zip(outputs, nodes, strict=True)):
                # record the node now: an in-place activation will replace out.grad_fn
                if node is not None:
                    _record(node, use, index, out.output_nr)
        if outermost:
            # parameters of the model that it is called with are no samples
            given = [x for x in _tensors((args, kwargs)) if x not in _extended]
            call = model_calls.model_call(self.model, describe(self.path, module), args, kwargs, given)
            self.model.last = call.samples
            for out, node in zip(outputs, nodes, strict=True):
                if node is not None:
                    model_calls.record_model_call(node, call, out.output_nr)
        return output if ruled and len(outputs) > 1 else None

    def _has_rule(self, module: nn.Module) -> bool:
        """Whether a rule is known for the module; else its parameters are found in the graph, by their names."""
        owned = module._parameters or owned_parameters(module)
        if not owned or Use.rule_for(module) is not None:
            return bool(owned)
        for name, p in owned_parameters(module).items():
            if p not in _extended:  # of a copy, or added since
                _extended[p] = f"{self.path}.{name}".lstrip("."), weakref.ref(module), self.model
        return False


class LossRecorder:
    """The forward hook of a loss."""

    def __init__(self, path: str):
        """Remember the module's path."""
        self.path = path

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Put a `LossUse` on the node of the loss."""
        if not _records():
            return
        if torch.compiler.is_dynamo_compiling():
            outside_of_graphs(self, module, args, kwargs, output)
            return
        if not isinstance(output, Tensor) or output.grad_fn is None or _global_forward_hooks:
            return  # hooks for all modules come first and may have changed it: the graph tells what it is
        if not isinstance(_first(args, kwargs), Tensor):
            return  # outputs in a container: the graph tells what it makes of each
        _record(output.grad_fn, LossUse(self.path, module, args, kwargs), 0, output.output_nr)


def _record(node: Node, record: Use | LossUse | TermUse, index: int, output_nr: int) -> None:
    node.metadata.setdefault(KEY, []).append((record, index, output_nr))  # type: ignore[attr-defined]


def listen(edge: GradientEdge, arrived: Callable[[Tensor], None]) -> RemovableHandle:
    """Have ``arrived`` called with the gradient that arrives at an edge in a backward.

    That is before the node itself, and after the hooks of tensors by which users change gradients.
    """
    return edge.node.register_prehook(partial(_hear, arrived, edge.output_nr))


def _hear(arrived: Callable[[Tensor], None], output_nr: int, grads: Sequence[Tensor | None]) -> None:
    grad = grads[output_nr]
    if grad is not None:
        arrived(grad)


def record_term(out: Tensor, parameters: Sequence[nn.Parameter], weight: float) -> None:
    """Note on the node of ``out`` that it is ``weight / 2`` times the squared norm of the parameters."""
    if _records() and out.grad_fn is not None:
        _record(out.grad_fn, TermUse(parameters, weight), 0, out.output_nr)


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that a module's own forward uses: its own, and those of containers that have no forward.

    Names are relative to the module, e.g. ``weight``, ``parametrizations.weight.original0``, ``scales.0``.
    """
    owned = {name: p for name, p in module._parameters.items() if p is not None}
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)) or name == "parametrizations":
            owned |= {f"{name}.{key}": p for key, p in child.named_parameters(remove_duplicate=False)}
    return owned


# names of the parameters of extended modules, and the modules, to notice uses that nothing recorded
_extended = WeakIdKeyDictionary()


def extended_name(p: Tensor) -> str | None:
    """Path of a parameter in the model that was extended, ``None`` for other tensors."""
    return _extended[p][0] if p in _extended else None


def extended_model(p: Tensor) -> Model | None:
    """The extended model to which a parameter belongs, ``None`` for other tensors."""
    return _extended[p][2] if p in _extended else None


def extended_parameters(models: Collection[Model | None]) -> list[Tensor]:
    """The parameters of some extended models."""
    return [p for p, (_, _, model) in _extended.items() if model in models]


def extended_owner(p: Tensor) -> nn.Module:
    """The extended module that owns a parameter, called or not; an empty one if there is none any more."""
    owner = _extended[p][1]() if p in _extended else None
    return nn.Module() if owner is None else owner


def _model_of(module: nn.Module, batch_axis: int) -> Model:
    """The model that a module is extended as: the larger one that it is a part of, or itself."""
    size = sum(1 for _ in module.modules())
    recorder = next((hook for hook in module._forward_hooks.values() if isinstance(hook, Recorder)), None)
    if recorder is not None and recorder.model.size >= size:
        if batch_axis:
            recorder.model.batch_axis = batch_axis
        return recorder.model
    return Model(describe("", module), batch_axis, size)


M = TypeVar("M", bound=nn.Module)


def extend(module: M, debug: bool = False, use_converter: bool = False, loss: bool = False, batch_axis: int = 0) -> M:
    """Make a model or a loss tell the engine what it does. Changes and returns the same module; idempotent.

    Modules and parameters that are added or replaced afterwards have no fields until it is called again.

    Args:
        module: a model (every submodule that owns parameters is recorded) or a loss such as ``nn.CrossEntropyLoss``.
        debug: print each module that is recorded.
        use_converter: accepted for programs written for BackPACK and needed for nothing: functional code, residual
            connections and reused modules work as they are.
        loss: the module is a loss of one's own, called as ``module(output, target)`` with a scalar result; its
            curvature comes from autograd. PyTorch's losses are known without.
        batch_axis: axis of the model's inputs and outputs that counts the samples.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module``, or a part of it was made by ``torch.jit``.
    """
    from curvopt.core.derivatives.losses import is_loss

    if not isinstance(module, nn.Module):
        raise TypeError(
            f"extend: expected a torch.nn.Module, got {type(module).__name__}; pass the model or the loss module."
        )
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise TypeError(
                f"extend: {describe(path, child)} is a program of torch.jit, whose calls cannot be seen; extend the "
                "module that it was made of (torch.compile may compile extended ones)."
            )
    losses = [path for path, child in module.named_modules() if is_loss(child) or (loss and child is module)]
    model = _model_of(module, batch_axis)
    for path, child in module.named_modules():
        if any(path != outer and f"{path}.".startswith(f"{outer}." if outer else "") for outer in losses):
            continue  # part of a loss
        if path in losses:
            if not any(isinstance(hook, LossRecorder) for hook in child._forward_hooks.values()):
                child.register_forward_hook(LossRecorder(path), with_kwargs=True, prepend=True)
            continue
        held = isinstance(child, (nn.ParameterList, nn.ParameterDict))
        if "parametrizations" in path.split(".") or (held and child is not module):
            continue  # used through the module that holds them
        recorder = next((hook for hook in child._forward_hooks.values() if isinstance(hook, Recorder)), None)
        own = model if recorder is None or recorder.model.size <= model.size else recorder.model
        for name, p in owned_parameters(child).items():
            _extended[p] = f"{path}.{name}".lstrip("."), weakref.ref(child), own
        if recorder is not None:
            recorder.model = own
            continue
        recorder = Recorder(path, own)
        child.register_forward_pre_hook(recorder.begin, prepend=True)
        # first of all hooks: what the others make of the output is the graph's affair
        child.register_forward_hook(recorder, with_kwargs=True, prepend=True, always_call=True)
        if debug and owned_parameters(child):
            print(f"curvopt: extended {describe(path, child)}")
    return module
