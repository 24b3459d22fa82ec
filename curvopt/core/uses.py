"""Recording, in the forward pass, where modules were used: one `Use` on the autograd node of each output.

The record lives on ``grad_fn.metadata`` and in the closure of a tensor hook, so it lives and dies with the graph:
nothing is kept on modules or in globals. It must not hold the node or its output (an uncollectable cycle through C++).
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from curvopt.core.jacobians import widened
from curvopt.core.randomness import RandomState
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
    """One call of a module that owns parameters."""

    __slots__ = (
        "__weakref__",
        "args",
        "block",
        "boundary",
        "cache",
        "given",
        "kwargs",
        "kind",
        "left",
        "module",
        "outputs",
        "path",
        "random",
        "rule",
        "seen",
        "settings",
        "shapes",
        "state",
        "steps",
        "versions",
    )

    #: Set by `curvopt.core.derivatives.rules`, which knows modules, as this file does not.
    rule_for: ClassVar[Callable[[nn.Module], Rule]]

    def __init__(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: list[Tensor]):
        """Record what the call got, unless the graph has it; of ``outputs`` shapes, and values if there is no rule."""
        inputs = _tensors((args, kwargs)) if kwargs or len(args) != 1 else _tensors(args[0])
        self.path, self.module, self.args, self.kwargs = path, module, args, kwargs
        self.boundary = frozenset([leaf.grad_fn for leaf in inputs if leaf.grad_fn is not None])
        leaves = [leaf for leaf in inputs if leaf.grad_fn is None and leaf.requires_grad]
        #: Its own parameters among the inputs: no border in the graph tells what of them entered as which.
        self.given = tuple([p for p in module.parameters() if any([p is leaf for leaf in leaves])]) if leaves else ()
        # an in-place forward: the input is gone, and holding the output would be a cycle (of several, copies are handed
        # out, and an input may be among them)
        changed = bool(self.boundary) and len(outputs) == 1 and any([outputs[0] is leaf for leaf in inputs])
        if changed:
            self.args, self.kwargs = (), {}
        self.random = _random_states.pop(module, None) if isinstance(module, nn.MultiheadAttention) else None
        self.seen = tuple(module._parameters.values())  # torch.func.functional_call puts others in their place
        self.shapes = tuple([out.shape for out in outputs])
        self.cache: dict[str, Any] = {}  # what several columns and quantities share; emptied after each backward
        self.rule = Use.rule_for(module)
        self.settings = None if self.rule.checks_outputs else _settings(module, self.rule)
        self.outputs, self.state = None, {}
        #: How the steps came before the samples, where these were put first (see `samples_first`).
        self.steps: Steps | None = None
        #: Where the graph has the input, so that memory is free again with it.
        self.left: Left | Callable[[], tuple[Tensor, ...]] | None = None
        #: The block of an activation checkpoint that a module without a rule is called in, and what kind of call it is.
        self.block, self.kind = None, None
        frozen = not (module._modules or any([p is not None and p.requires_grad for p in self.seen]))
        known = False
        if not frozen and self.rule.checks_outputs:
            self.block = _block()
            if self.block is not None and all([leaf.requires_grad for leaf in inputs if leaf.is_floating_point()]):
                flags = [p.requires_grad for p in module.parameters()]
                self.kind = (module.training, *flags, *[(leaf.shape, leaf.dtype) for leaf in inputs], *self.shapes)
                known = self.kind in _read_off.get(module, ())
            if not known:
                # kept to check that calling the module again, sample by sample, gives what it gave
                self.outputs, self.state = [_kept(out) for out in outputs], self.rule.state(module)
        elif not (frozen or changed) and len(inputs) == len(outputs) == 1 and self.rule.leaves_input(module):
            # a rule of a user's, built on one of ours, may be of a layer that does something to the input first
            if type(self.rule).__module__.startswith("curvopt."):
                self.left = _place_of(inputs[0], outputs[0].grad_fn)
        if not changed and (frozen or known or self.left is not None):
            self._hold(_without_entries)
        #: Of what is held; ``None`` if it is not what it was.
        self.versions: tuple[int, ...] | None = None if changed else () if self.left is not None else self._versions()

    @property
    def input(self) -> Tensor:
        """The first input of the call, given by position or by name."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def _hold(self, what: Callable[[Tensor], Tensor]) -> None:
        """Put something in the place of each input."""
        if len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor):
            self.args = (what(self.args[0]),)  # nearly always; a general tree takes long
        else:
            self.args, self.kwargs = tree_map_only(Tensor, what, (self.args, self.kwargs))

    def hold_nothing(self) -> None:
        """Leave the inputs to the graph: what is held has their shapes."""
        self._hold(_without_entries)
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple([version(leaf) for leaf in _tensors((self.args, self.kwargs))])

    @contextmanager
    def holding(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the use has its inputs again, if they were left to the graph."""
        if self.left is None:
            yield
            return
        given, before = iter(inputs), (self.args, self.kwargs)
        self._hold(lambda blank: x if (x := next(given)).shape == blank.shape else x.view(blank.shape))
        try:
            yield
        finally:
            self.args, self.kwargs = before

    def was_read_off(self) -> None:
        """Its operations were read off the graph: the next call of this kind in a checkpoint need not keep anything."""
        if self.kind is not None:
            kinds = _read_off.setdefault(self.module, set())
            if len(kinds) >= 64:  # bounded
                kinds.clear()
            kinds.add(self.kind)

    def check_held(self) -> None:
        """Raise if a module without a rule has to be called again, but its inputs were not kept."""
        if self.block is not None and self.outputs is None:
            _read_off.pop(self.module, None)
            raise CurvoptError(
                f"{self.describe()}: it uses its parameters in a way that is not known, unlike before, so that its "
                "input was left to torch.utils.checkpoint; run the forward pass again, which keeps it."
            )

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
        (use.args, use.kwargs), use.outputs = raised, None
        return use

    @property
    def is_lookup(self) -> bool:
        """Whether the call got indices and nothing else, and has a rule."""
        given = [*self.args, *self.kwargs.values()]
        if self.outputs is not None or len(given) != 1 or not isinstance(given[0], Tensor):
            return False
        return not (given[0].is_floating_point() or given[0].is_complex())

    def batched(self) -> Use:
        """The same call of a single sample, as one of a batch."""
        use = copy.copy(self)
        use.args, use.kwargs = tree_map_only(Tensor, lambda x: x.unsqueeze(0), (self.args, self.kwargs))
        use.shapes = tuple([torch.Size([1, *shape]) for shape in self.shapes])
        use.outputs = self.outputs and [(out.unsqueeze(0), seen) for out, seen in self.outputs]
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

    def expanded(self, shape: torch.Size, shared: bool) -> Use:
        """The same lookup for each of ``shape[0]`` samples, by indices without a batch axis or with one of length 1."""
        use = copy.copy(self)
        x = self.input if shared else self.input[0]
        use.args, use.kwargs, use.shapes, use.cache = (x.expand(shape[0], *x.shape),), {}, (shape,), {}
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
        if type(self.left) is not Left and self.versions != self._versions():
            raise self.modified()

    def modified(self) -> CurvoptError:
        """The error where an input is not what it was."""
        return CurvoptError(
            f"{self.describe()}: an input was modified in place, by the module itself or after it, so its Jacobian "
            "cannot be formed; give the in-place operation a copy (`x = x.clone()`)."
        )


# by modules without a rule the kinds of their calls in checkpoints that were read off the graph
_read_off: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def _block() -> int | None:
    """The identity of the hook by which the block of an activation checkpoint keeps its tensors, if one runs.

    To hold the hook would be to hold the block's input.
    """
    hooks = _hooks()
    return None if hooks is None or not of_checkpoint(hooks[1]) else id(hooks[1])


def _hooks() -> tuple[Callable, Callable] | None:
    """The hooks by which tensors are saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]


def of_checkpoint(hook: Callable) -> bool:
    """Whether an activation checkpoint has put a hook where tensors are saved."""
    return hook.__module__ == checkpoint.__name__


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
    def of(sequences: Tensor, N: int) -> Packed:
        """From the sequence of each row, whose steps come in their order; samples are equal shares of the sequences."""
        samples = samples_of(sequences, N)
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


class Left(NamedTuple):
    """Where the graph has the input of a module.

    Attributes:
        depth: number of nodes to pass from that of the output.
        name: by which the node there has it.
        version: of it.
        hooked: whether something decides, as checkpoints do, what becomes of what nodes save.
    """

    depth: int
    name: str
    version: int
    hooked: bool


#: The names by which operations keep their input.
_KEEPING = {
    "AddmmBackward0": "_saved_mat1",
    "MmBackward0": "_saved_self",
    **dict.fromkeys(
        [f"{name}Backward0" for name in ("Convolution", "NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm")],
        "_saved_input",
    ),
}
_VIEWING = frozenset(["ViewBackward0", "UnsafeViewBackward0"])


def _place_of(x: Tensor, node: Node | None) -> Left | None:
    """Where the graph has the one input of a module of one operation, of which ``node`` gives the output."""
    for depth in range(3) if x.is_floating_point() else ():
        if node is None:
            break
        name = type(node).name(node)
        if name in _KEEPING:
            return Left(depth, _KEEPING[name], version(x), _hooks() is not None)
        if name not in _VIEWING:
            break
        node = node.next_functions[0][0]
    return None


def _without_entries(x: Tensor) -> Tensor:
    """A tensor of the same kind that takes no memory; what was computed with its entries would be nan."""
    if x.layout != torch.strided or x.is_nested or not x.is_floating_point():
        return x
    return _blank(x.shape, x.dtype, x.device)


@lru_cache(maxsize=1000)
def _blank(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def _kept(out: Tensor) -> tuple[Tensor, int]:
    """An output, in the precision in which autocast may have computed parts of it, and its version."""
    device, kept = out.device.type, out.detach()
    if torch.is_autocast_enabled(device) and kept.is_floating_point():
        kept = kept.to(torch.get_autocast_dtype(device))
    return kept, version(kept)


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


# random numbers before forwards that draw, until their use is recorded
_random_states: WeakKeyDictionary[nn.Module, RandomState] = WeakKeyDictionary()


def _keep_random_state(module: nn.Module, args: tuple) -> None:
    """Forward pre-hook of attention: what it takes to draw the same dropout mask again."""
    if _records() and module.training and module.dropout:
        _random_states[module] = RandomState([next(module.parameters()).device])


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
    """The forward hook of a module that owns parameters. Stateless: it may be copied and pickled with its module."""

    def __init__(self, path: str):
        """Remember the module's path in the extended model."""
        self.path = path

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Put a `Use` on the node of each output."""
        if not _records():
            return None
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self, module, args, kwargs, output)
        outputs = _tensors(output)
        nodes = [out.grad_fn for out in outputs]
        if not any(nodes):
            return None
        use = Use(self.path, module, args, kwargs, outputs)
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
        return output if len(outputs) > 1 else None


class LossRecorder(Recorder):
    """The forward hook of a loss."""

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


class Called(NamedTuple):
    """A call of a model without parameters of its own, for where none of its modules is called, but theirs are used."""

    module: nn.Module

    def describe(self) -> str:
        """The model, for messages."""
        return describe("", self.module)


def _note_call(module: nn.Module, args: tuple, output: Any) -> None:
    """The forward hook of such a model."""
    if _records() and not torch.compiler.is_dynamo_compiling():
        for out in _tensors(output):
            if out.grad_fn is not None:
                _record(out.grad_fn, Called(module), 0, out.output_nr)


def _record(node: Node, record: Use | LossUse | TermUse | Called, index: int, output_nr: int) -> None:
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


def is_hooked(parameters: Sequence[nn.Parameter], nodes: Sequence[Node]) -> bool:
    """Whether hooks of anybody see, and may change, what is computed at some nodes or arrives at some parameters."""
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
        return True
    for node in nodes:
        for register in (node.register_hook, node.register_prehook):
            handle = register(lambda *_: None)  # joins the others, which nothing else tells of
            hooks = handle.hooks_dict_ref()
            handle.remove()
            if hooks:
                return True
    return False


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
        functional = name == "out_proj" and type(module).forward is nn.MultiheadAttention.forward  # never called
        if functional or isinstance(child, (nn.ParameterList, nn.ParameterDict)) or name == "parametrizations":
            owned |= {f"{name}.{key}": p for key, p in child.named_parameters(remove_duplicate=False)}
    return owned


# names of the parameters of extended modules, and the modules, to notice uses that nothing recorded
_extended = WeakIdKeyDictionary()


def extended_name(p: Tensor) -> str | None:
    """Path of a parameter in the model that was extended, ``None`` for other tensors."""
    return _extended[p][0] if p in _extended else None


def extended_owner(p: Tensor) -> nn.Module:
    """The extended module that owns a parameter, called or not; an empty one if there is none any more."""
    owner = _extended[p][1]() if p in _extended else None
    return nn.Module() if owner is None else owner


M = TypeVar("M", bound=nn.Module)


def extend(module: M, debug: bool = False, use_converter: bool = False, loss: bool = False) -> M:
    """Make a model or a loss tell the engine what it does. Changes and returns the same module; idempotent.

    Modules and parameters that are added or replaced afterwards have no fields until it is called again.

    Args:
        module: a model (every submodule that owns parameters is recorded) or a loss such as ``nn.CrossEntropyLoss``.
        debug: print each module that is recorded.
        use_converter: accepted for programs written for BackPACK and needed for nothing: functional code, residual
            connections and reused modules work as they are.
        loss: the module is a loss of one's own, called as ``module(output, target)`` with a scalar result; its
            curvature comes from autograd. PyTorch's losses are known without.

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
    for path, child in module.named_modules():
        if any(path != outer and f"{path}.".startswith(f"{outer}." if outer else "") for outer in losses):
            continue  # part of a loss
        held = isinstance(child, (nn.ParameterList, nn.ParameterDict))
        if "parametrizations" in path.split(".") or (held and child is not module):
            continue  # used through the module that holds them
        if path in losses:
            recorder = LossRecorder(path)
        elif owned_parameters(child) or parametrize.is_parametrized(child):
            recorder = Recorder(path)
        else:
            calls_others = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            if child is module and not calls_others and _note_call not in child._forward_hooks.values():
                child.register_forward_hook(_note_call)
            continue
        for name, p in owned_parameters(child).items():
            _extended[p] = f"{path}.{name}".lstrip("."), weakref.ref(child)
        if not any(isinstance(hook, Recorder) for hook in child._forward_hooks.values()):
            # first of all hooks: what the others make of the output is the graph's affair
            child.register_forward_hook(recorder, with_kwargs=True, prepend=True)
            if isinstance(child, nn.MultiheadAttention):
                child.register_forward_pre_hook(_keep_random_state)
            if debug:
                print(f"curvopt: extended {describe(path, child)}")
    return module
