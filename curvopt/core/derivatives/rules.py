"""Rules: how a module turns vectors at its output into Jacobians of its parameters.

A rule is registered beside its definition with ``@register(nn.Linear)``. An affine layer needs two views,
`AffineRule.unfold` and `AffineRule.fold`, nothing else. Modules without a rule get `DefaultRule`, which differentiates
the module itself, sample by sample; a registered rule is only ever a faster equal of it.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from curvopt.core import costs
from curvopt.core.compare import allclose
from curvopt.core.jacobians import Dense, Jacobian, Outer, Patches, by_sample, cast, widened
from curvopt.core.randomness import RandomState
from curvopt.core.uses import Recorder, Use, disable, owned_parameters, version
from curvopt.errors import CurvoptError

Jacobians = dict[str, Jacobian]


class Rule(ABC):
    """How one kind of module maps vectors at its outputs to Jacobians of its parameters."""

    #: Whether the module is called again, so that a use keeps `state`, and its (detached) outputs for a check.
    checks_outputs = False
    #: Whether its operations, read off the graph, take its place where all that parameters enter are known.
    by_operations = False
    #: Whether the only input may have any number of axes before those of the features, which all mean the same.
    any_axes = False
    #: Whether rows of the only input may come in another order, in which those of the output are then.
    any_order = False
    #: Whether the output is linear in the parameters (the input fixed), so that only operations after it add curvature.
    linear = False
    #: Whether a call on a single sample without a batch axis is the same as on a batch of it.
    takes_single = False
    #: Where what the rule knows was computed from the parameter: the graph behind it is needed.
    source: GradientEdge | None = None
    #: Attributes of the module that the rule reads; ``None`` for any number, flag or name among them but ``training``.
    reads: tuple[str, ...] | None = None
    #: Whether the rule looks at ``module.training``.
    reads_mode = False

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters this rule answers for, by their names relative to the module."""
        return owned_parameters(module)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """What of a module's buffers its last forward computed with, if calling it again would change them."""
        return {}

    def expected(self, module: Any) -> Container[str] | None:
        """Names of the parameters that the rule knows; a module with others (parametrized weights) gets the default."""
        return None

    def fits(self, module: Any) -> bool:
        """Whether the parameters have the shapes that the rule knows, where the module's forward takes others, too."""
        return True

    def leaves_input(self, module: Any) -> bool:
        """Whether the module is one operation, which keeps the input as it is for its backward."""
        return False

    def least_dims(self, module: Any) -> int:
        """Number of axes that an input with a batch axis has at least."""
        return 1

    def batch_axis(self, module: Any) -> int:
        """Axis of the first input that counts the samples."""
        return 0

    def output_axis(self, use: Use, index: int) -> int | Tensor | None:
        """Axis of an output that counts the samples, or the packed sequence of each row; ``None`` if neither tells."""
        return 0

    def takes_steps(self, use: Use, how: Literal["axis", "rows"]) -> bool:
        """Whether a call in which steps come before the samples is the same as one in which these come first."""
        if not self.any_order:
            return False
        x, shape = tensors(use)[0], use.shapes[0]
        alike = x.dim() - (self.least_dims(use.module) - 1) if self.any_axes else 1
        return (how == "rows" or alike > 1) and x.layout == torch.strided and shape[:alike] == x.shape[:alike]

    def rows(self, use: Use) -> int:
        """Length of the batch axis of the use's input; 0 for a call on a single sample, which has none.

        Raises:
            CurvoptError: for an input without a batch axis where the rule needs one, or a nested tensor.
        """
        if any(isinstance(x, Tensor) and x.is_nested for x in (*use.args, *use.kwargs.values())):
            raise CurvoptError(
                f"{use.describe()} was called with a nested tensor, whose samples cannot be told apart; pad it "
                "(x.to_padded_tensor(0)), or call the module on each part."
            )
        if self.is_single(use):
            return 0
        if self.least_dims(use.module) == 1:
            return batch_length(use)
        x = tensors(use)[0]
        if x.dim() < self.least_dims(use.module):
            raise no_batch_axis(use)
        return x.shape[self.batch_axis(use.module)]

    def is_single(self, use: Use) -> bool:
        """Whether it is a call on a single sample without a batch axis."""
        return self.takes_single and tensors(use)[0].dim() == self.least_dims(use.module) - 1

    @abstractmethod
    def jac_t(self, use: Use, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        """Transposed-Jacobian products of the named parameters.

        Args:
            use: the recorded call.
            grads: per output ``[V, *out]``, or ``None`` where nothing arrived.
            names: parameters wanted.
            N: number of samples; the batch axis of the use is a multiple, ``[N k, ...]`` with k rows of a sample
                together.
        """


_rules: dict[type[nn.Module] | str, Rule] = {}
_rule_of_kind: dict[tuple, Rule] = {}
R = TypeVar("R", bound=Rule)


def register(*types: type[nn.Module] | str) -> Callable[[type[R]], type[R]]:
    """Class decorator: the rule serves these module types and their subclasses that keep the type's ``forward``.

    A type of a package that need not be there is given by its full name.
    """

    def add(rule: type[R]) -> type[R]:
        _rules.update(dict.fromkeys(types, rule()))
        _rule_of_kind.clear()
        return rule

    return add


def rule_for(module: nn.Module) -> Rule:
    """The rule of a module: that of its type if the module still computes what its type does, else the default."""
    # asked in every forward, so remembered by all that the answer depends on
    own = type(module)
    kind = (own, own.forward, getattr(own, "_conv_forward", None), *module._parameters, *module._modules)
    if _is_patched(module):
        return _default
    rule = _rule_of_kind.get(kind)
    if rule is None:
        rule = _rule_of_kind[kind] = _find_rule(module)
    return rule if rule.fits(module) else _default


Use.rule_for = rule_for


def _is_patched(module: nn.Module) -> bool:
    """Whether something other than the forward of its type decides what a module gives."""
    hooks = module._forward_hooks
    first = next(iter(hooks.values())) if hooks else None
    return (
        "forward" in vars(module)
        or "_conv_forward" in vars(module)
        or not (first is None or isinstance(first, Recorder))
        or bool(_global_forward_hooks)  # which come before all others
    )


def _find_rule(module: nn.Module) -> Rule:
    for base in type(module).__mro__:
        rule = _rules.get(base) or _rules.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            forwards = [f for f in ("forward", "_conv_forward") if hasattr(base, f)]
            kept = all(getattr(type(module), f) is getattr(base, f) and _is_original(base, f) for f in forwards)
            expected = rule.expected(module)
            plain = expected is None or all(name in expected for name in owned_parameters(module))
            return rule if kept and plain else _default
    return _default


def _is_original(kind: type, name: str) -> bool:
    """Whether a method was written where its class was, not put there later."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return getattr(vars(owner)[name], "__globals__", {}).get("__name__") == owner.__module__


def has_batch(use: Use) -> bool:
    """Whether a tensor with axes is among the inputs."""
    return any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in tree_leaves((use.args, use.kwargs)))


def no_batch_axis(use: Use) -> CurvoptError:
    """The error where the samples cannot be told without one."""
    return CurvoptError(
        f"{use.describe()} was called with an input of shape {list(tensors(use)[0].shape)}, which has no batch axis; "
        "give it a batch of one, e.g. x.unsqueeze(0)."
    )


def batch_length(use: Use) -> int:
    """Length of the first axis of the first tensor among the inputs."""
    for leaf in tree_leaves((use.args, use.kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise CurvoptError(
        f"{use.describe()} was called without a tensor that has a batch axis; pass the batch to its forward."
    )


def arguments(use: Use) -> dict[str, Any]:
    """What the forward was given by the names of its parameters, in their order, defaults included."""
    bound = inspect.signature(use.module.forward).bind(*use.args, **use.kwargs)
    bound.apply_defaults()
    return bound.arguments


def tensors(use: Use) -> list[Tensor]:
    """The tensors among the arguments, in the order of the forward's parameters."""
    given = arguments(use).values() if use.kwargs else use.args
    return [value for value in given if isinstance(value, Tensor)]


class AffineRule(Rule):
    """A layer ``W x + b`` at every shared position, told by two views."""

    any_order = True
    linear = True
    takes_single = True

    #: Whether the weight is a reshaped ``[G, I, O]``.
    transposed = False

    @abstractmethod
    def unfold(self, module: Any, *inputs: Tensor) -> Tensor | Patches:
        """The inputs of the call as patches, ``[N, G, S, I]``."""

    @abstractmethod
    def fold(self, module: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        """Vectors at the output, ``[V, N, *out]``, with positions and features sorted: ``[V, N, G, S, O]``."""

    def bias(self, grad: Tensor, left: Tensor) -> Tensor:
        """Vectors at the output, and what `fold` made of them, summed over positions: ``[V, N, *bias]``."""
        return left.flatten(2) if left.shape[3] == 1 else left.sum(3).flatten(2)

    def leaves_input(self, module: Any) -> bool:
        weight = module._parameters.get("weight")
        return weight is not None and weight.requires_grad

    def expected(self, module: Any) -> Container[str]:
        return ("weight", "bias")

    def jac_t(self, use: Use, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        grad = grads[0]
        assert grad is not None  # a use is only asked when something arrived at its one output
        inputs = tensors(use)
        left = by_sample(self.fold(use.module, grad, *inputs), N)
        jacobians: dict[str, Any] = {}
        if "weight" in names:
            if "right" not in use.cache:
                # autocast: the input may be in another precision
                right = self.unfold(use.module, *[cast(x, left.dtype) for x in inputs])
                use.cache["right"] = right.by_sample(N) if isinstance(right, Patches) else by_sample(right, N)
            shape = use.module._parameters["weight"].shape  # type: ignore[union-attr]
            jacobians["weight"] = Outer(left, use.cache["right"], shape, self.transposed)
        if "bias" in names:
            weight = jacobians.get("weight") if left.shape[2:4] == (1, 1) and not self.transposed else None
            jacobians["bias"] = Dense(self.bias(grad, left), left_of=weight)
        return jacobians


class DefaultRule(Rule):
    """Any module with parameters: ``vmap`` of ``vjp`` over its own forward, a loop where vmap cannot.

    It is called with all rows of a sample together.
    """

    checks_outputs = True
    by_operations = True

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        names = {p: name for name, p in reversed(super().parameters(module).items())}
        return {name: p for p, name in reversed(names.items())}  # tied ones once: the call is by all of their names

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        # a spectral norm improves its vectors before it uses them
        vectors: dict[str, Tensor] = {}
        for path, child in module.named_modules():
            if isinstance(child, parametrizations._SpectralNorm):
                vectors |= {f"{path}.{name}": buffer for name, buffer in child.named_buffers()}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                vectors |= {f"{hook.name}_{side}": getattr(module, f"{hook.name}_{side}") for side in "uv"}
        return {name: vector.clone() for name, vector in vectors.items()}

    def jac_t(self, use: Use, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        rows = self.rows(use)
        if rows == 0:
            V, params = len(next(grad for grad in grads if grad is not None)), self.parameters(use.module)
            return {name: Dense(params[name].new_zeros(V, N, *params[name].shape)) for name in names}
        leaves, spec = tree_flatten((use.args, use.kwargs))
        batched = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows]
        wanted = [i for i, grad in enumerate(grads) if grad is not None]
        arrived = [grad for grad in grads if grad is not None]
        parameters = {name: p for name, p in self.parameters(use.module).items() if name in names}
        for i, grad in zip(wanted, arrived, strict=True):
            if grad.dim() == 1 or (N > 1 and len(grad[0]) != rows):
                raise _no_batch_axis(use, i, grad)
        arrived = [grad.unflatten(1, (N, -1)) for grad in arrived]

        def whole(params: dict[str, Tensor], given: list[Any]) -> list[Tensor]:
            args, kwargs = tree_unflatten(given, spec)
            # buffers are copied, since the call may count or average in them
            state = {name: buffer.clone() for name, buffer in use.module.named_buffers()} | use.state | params
            result = torch.func.functional_call(
                _Forward(use.module), {f"module.{name}": value for name, value in state.items()}, args, kwargs
            )
            result = [out for out in tree_leaves(result) if isinstance(out, Tensor)]
            return [result[i] for i in wanted]

        def outputs(params: dict[str, Tensor], samples: list[Tensor]) -> list[Tensor]:
            full = list(leaves)
            for i, sample in zip(batched, samples, strict=True):
                full[i] = sample
            return whole(params, full)

        def products(samples: list[Tensor], vectors: list[Tensor]):
            results, vjp, *_ = torch.func.vjp(partial(outputs, samples=samples), parameters)
            return torch.func.vmap(lambda v: vjp(v)[0])(vectors), results

        samples = [leaves[i].unflatten(0, (N, -1)) for i in batched]
        elements = arrived[0].shape[0] * max((p.numel() for p in parameters.values()), default=1)
        values: dict[str, Tensor] = {}
        with disable():
            try:
                chunk = costs.samples_in_vmap(elements, arrived[0].device.type)
                values, results = torch.func.vmap(products, (0, 1), (1, 0), chunk_size=chunk)(samples, arrived)
                # some operators have wrong batching rules in PyTorch: a weighted sum is known without any
                _, vjp, *_ = torch.func.vjp(partial(whole, given=leaves), parameters)
                right = _have_sums(values, arrived, vjp)
            except Exception as error:
                if "randomness" in str(error):
                    raise CurvoptError(
                        f"{use.describe()}: its forward draws random numbers (dropout?) that cannot be drawn again; "
                        "call model.eval() or move the random operation into a submodule without parameters."
                    ) from error
                right = False
            if not right:
                values, results = self._loop(outputs, parameters, samples, arrived, use)
        again = dict(zip(wanted, (result.flatten(0, 1) for result in results), strict=True))
        check_outputs(use, [again.get(i) for i in range(len(grads))], "called on one sample at a time")
        if any(not value.any() for value in values.values()) and any(grad.any() for grad in arrived):
            given = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
            self._check_reached(use, partial(whole, given=given), parameters)
        if not right:
            self._check_sums(use, values, arrived, partial(whole, given=leaves), parameters)
        return {name: Dense(value) for name, value in values.items()}

    @staticmethod
    def _check_sums(
        use: Use, values: dict[str, Tensor], arrived: list[Tensor], call: Callable, parameters: dict[str, nn.Parameter]
    ) -> None:
        """Raise unless products of single samples add up to that of the batch, whose samples outputs alone may hide."""

        def pull(vectors: list[Tensor]) -> tuple[dict[str, Tensor]]:
            with torch.enable_grad():
                results = call(parameters)
            held = list(parameters.values())
            found = torch.autograd.grad(results, held, vectors, allow_unused=True, materialize_grads=True)
            return (dict(zip(parameters, found, strict=True)),)

        if _have_sums(values, arrived, pull):
            return
        (total,) = pull([grad.sum(0).flatten(0, 1) for grad in arrived])
        apart = [(x.detach().sum((0, 1)) - total[name]).abs().max() for name, x in values.items() if x.numel()]
        largest = max(x.detach().abs().max() for x in (*values.values(), *arrived) if x.numel())
        rounding = 100 * torch.finfo(arrived[0].dtype).eps * largest * math.sqrt(arrived[0].shape[:2].numel())
        if any(difference > rounding for difference in apart):  # not where there are nans
            raise _samples_meet(use, "called on one sample at a time its forward has other derivatives than it had")

    @staticmethod
    def _check_reached(use: Use, call: Callable, parameters: dict[str, nn.Parameter]) -> None:
        """Raise unless a module that is called again uses what it is given for its parameters."""
        with disable(), torch.enable_grad():
            results = [out for out in call({name: p.detach() for name, p in parameters.items()}) if out.requires_grad]
        ones, held = [torch.ones_like(result) for result in results], list(parameters.values())
        found = torch.autograd.grad(results, held, ones, allow_unused=True) if results else ()
        for name, gradient in zip(parameters, found, strict=False):
            if gradient is not None:
                raise CurvoptError(
                    f"{use.describe()}: its forward takes parameter '{name}' from elsewhere than its attribute (from a "
                    "list or a closure that holds it, too?), so it cannot be called again; take it from there."
                )

    def takes_samples(self, use: Use, names: list[str]) -> bool:
        """Whether the module can be called on one row alone, or gets indices that count in the whole batch (graphs)."""
        rows, leaves = self.rows(use), [x for x in tree_leaves((use.args, use.kwargs)) if isinstance(x, Tensor)]
        if not rows or not any(_may_index(x, rows) for x in leaves):
            return True
        dtype = self.parameters(use.module)[names[0]].dtype
        first = copy.copy(use.in_precision(dtype))
        assert use.outputs is not None
        first.outputs, first.cache = [(out[:1], seen) for out, seen in use.outputs], {}
        grads = [
            torch.zeros_like(out, dtype=dtype).unsqueeze(0) if out.is_floating_point() else None
            for out, _ in first.outputs
        ]
        with torch.no_grad(), RandomState([x.device for x in leaves]).again():
            try:
                first.args, first.kwargs = tree_map_only(
                    Tensor, lambda x: x[:1] if x.dim() and len(x) == rows else x, (first.args, first.kwargs)
                )
                self.jac_t(first, grads, names, 1)
            except (CurvoptError, RuntimeError):
                return False
        return True

    def _loop(self, outputs, parameters, samples, arrived, use):
        """The same sample by sample with plain autograd, for modules that vmap cannot enter (fused recurrent cells)."""
        create_graph = torch.is_grad_enabled()
        names, params = list(parameters), list(parameters.values())
        state = RandomState([arrived[0].device])
        values, results = [], []
        for n in range(arrived[0].shape[1]):
            try:
                with torch.enable_grad():
                    result = outputs(parameters, [sample[n] for sample in samples])
            except Exception as error:
                raise CurvoptError(
                    f"{use.describe()}: its forward fails on a single sample ({error}); let it take a batch of any "
                    "size, or move its parameters into submodules that do."
                ) from error
            for i, (out, grad) in enumerate(zip(result, arrived, strict=True)):
                if out.shape != grad.shape[2:]:
                    raise _no_batch_axis(use, i, grad)
            pulled = [
                torch.autograd.grad(
                    result,
                    params,
                    [g[v, n] for g in arrived],
                    retain_graph=True,
                    create_graph=create_graph,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for v in range(arrived[0].shape[0])
            ]
            values.append([torch.stack(column) for column in zip(*pulled, strict=True)])
            results.append([out if create_graph else out.detach() for out in result])
        if state.passed():
            raise CurvoptError(
                f"{use.describe()}: its forward draws random numbers that cannot be drawn again; call model.eval()."
            )
        stacked = [torch.stack(column, 1) for column in zip(*values, strict=True)]
        return dict(zip(names, stacked, strict=True)), [torch.stack(column) for column in zip(*results, strict=True)]


def _may_index(x: Tensor, rows: int) -> bool:
    """Whether an argument of a module may tell by indices which rows of its input meet."""
    if x.layout != torch.strided:
        return True
    return x.dim() > 0 and len(x) != rows and x.dtype in (torch.int32, torch.int64)


def _no_batch_axis(use: Use, index: int, grad: Tensor) -> CurvoptError:
    return CurvoptError(
        f"{use.describe()}: output {index} of shape {list(grad.shape[1:])} does not keep the batch axis of its input "
        f"(length {use.rule.rows(use)}) in front; let the module return it there, or move its parameters to a "
        "submodule that does."
    )


def _samples_meet(use: Use, what: str) -> CurvoptError:
    return CurvoptError(
        f"{use.describe()}: {what} on the batch, so its samples depend on each other, on state, or its batch axis is "
        "not the first; call model.eval(), or move its parameters into submodules that treat samples alike."
    )


def check_outputs(use: Use, results: Sequence[Tensor | None], how: str) -> None:
    """Raise unless a module, called again in another way, gave what it gave in the forward pass.

    Args:
        use: the recorded call.
        results: per output what it gives now, ``None`` for outputs that are not looked at.
        how: the other way, for the message.

    Raises:
        CurvoptError: if an output differs.
    """
    if use.outputs is None or "checked" in use.cache:
        return
    for again, (recorded, seen) in zip(results, use.outputs, strict=True):
        if again is None or version(recorded) != seen:
            continue
        # half precision: the forward ran under autocast, the second call does not
        rtol = {torch.float64: 1e-9, torch.float32: 1e-4}.get(recorded.dtype, 5e-2)
        if not recorded.numel():
            continue
        atol = rtol * recorded.abs().nan_to_num().max()
        if not allclose(again.to(recorded.dtype), recorded, rtol, atol, equal_nan=True):
            raise _samples_meet(use, f"{how} its forward gives another result than it gave")
    use.cache["checked"] = True


def _have_sums(values: dict[str, Tensor], arrived: Sequence[Tensor], vjp: Callable) -> bool:
    """Whether products by parameter, ``[V, N, *p]``, add up to what vectors that were added before are pulled back to.

    They are weighted so that all are about as long, and none is too short to count.

    Args:
        values: the products.
        arrived: their vectors, ``[V, N, ...]`` each.
        vjp: pulls vectors of all samples back, to sums by parameter.
    """

    def agree(names: Sequence[str], own: Tensor) -> bool:
        weights = _weights(there, own)
        total = vjp([_weighted_sum(grad, weights).to(grad.dtype).flatten(0, 1) for grad in arrived])[0]
        return all(_same_sum(values[name], weights, total[name]) for name in names)

    if any(value.shape[:2] != arrived[0].shape[:2] for value in values.values()):
        return False
    there = torch.stack([_lengths(grad) for grad in arrived]).sum(0)
    lengths = {name: _lengths(value) for name, value in values.items()}
    longest = torch.stack([*lengths.values()]).sum(0)
    alone = [name for name, own in lengths.items() if _vary(own / longest)]  # short where others are long
    alike = [name for name in lengths if name not in alone]
    return (not alike or agree(alike, longest)) and all(agree([name], lengths[name]) for name in alone)


def _vary(parts: Tensor) -> bool:
    """Whether some of the numbers that are not zero are a hundredth of the largest, or less."""
    parts = parts[parts > 0]
    return parts.numel() > 0 and bool(parts.min() * 100 <= parts.max())


def _lengths(values: Tensor) -> Tensor:
    """Of vectors ``[V, N, ...]``, ``[V, N]``."""
    values = widened(values.detach())
    return torch.linalg.vector_norm(values.reshape(*values.shape[:2], -1), dim=2).double()


def _weights(there: Tensor, own: Tensor) -> Tensor:
    """A positive number for each vector and each sample, ``[V, N]``, so that no two trade places unnoticed.

    Args:
        there: lengths of the vectors, ``[V, N]``.
        own: lengths of what they were pulled back to, which are about the same when weighted.
    """
    sizes = torch.where(own > 0, own, there * (own.sum() / there.sum()))
    different = (torch.arange(own.numel(), dtype=torch.float64).cos() + 1.5).reshape(own.shape).to(own.device)
    weights = different / torch.where(sizes > 0, sizes, 1)
    return weights / (weights * there).max().clamp(min=torch.finfo(torch.float64).tiny)  # in range, in half precision


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    values = widened(values)
    return torch.einsum("vn,vn...->n...", weights.to(values.dtype), values)


def _same_sum(values: Tensor, weights: Tensor, total: Tensor) -> bool:
    """Whether products ``[V, N, *p]`` have a weighted sum."""
    if values.shape != (*weights.shape, *total.shape):
        return False
    tolerance = torch.finfo(values.dtype).eps ** 0.4  # 1e-3 in float32
    found = _weighted_sum(values, weights).sum(0)
    return not total.numel() or bool(allclose(found, total, 10 * tolerance, tolerance * total.abs().max()))


class _Forward(nn.Module):
    """A module's forward without its forward hooks; pre-hooks run for their side effects (they may compute weights)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = [(module, dict(vars(module))) for module in self.module.modules()]
        cached, parametrize._cache_enabled = parametrize._cache_enabled, 0  # it has the weights of the forward
        try:
            for module, _ in attributes:
                if isinstance(module, parametrizations._SpectralNorm):
                    module.training = False  # no further power iteration: see `state`
            for hook in self.module._forward_pre_hooks.values():
                if isinstance(hook, SpectralNorm):
                    setattr(self.module, hook.name, hook.compute_weight(self.module, do_power_iteration=False))
                else:
                    hook(self.module, args)  # the recorded arguments already passed through it
            return self.module.forward(*args, **kwargs)
        finally:
            parametrize._cache_enabled = cached
            for module, before in attributes:  # weights that a hook computed and the like belong to this call alone
                vars(module).clear()
                vars(module).update(before)


_default = DefaultRule()
