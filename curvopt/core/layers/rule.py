"""Rules: how a module turns vectors at its output into Jacobians of its parameters.

A rule is registered beside its definition. An affine layer needs two views, nothing else::

    @register(nn.Linear)
    class Linear(AffineRule):
        def unfold(self, module, x): ...          # the input as [N, G, S, I]
        def fold(self, module, grad, x): ...      # vectors at the output as [V, N, G, S, O]

The parameters of modules without a rule are found in the graph, in the operations that their forward is made of; a
registered rule is only ever a faster equal of that.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.products.base import Dense, Jacobian, cast
from curvopt.core.products.outer import Bias, Outer, Patches, by_sample
from curvopt.core.record import ModuleCall, owned_parameters
from curvopt.errors import CurvoptError

Jacobians = dict[str, Jacobian]


class Rule(ABC):
    """How one kind of module maps vectors at its outputs to Jacobians of its parameters."""

    #: Whether the only input may have any number of axes before those of the features; all of them are treated alike.
    any_axes = False
    #: Whether permuting the rows of the only input permutes the rows of the output in the same way.
    any_order = False
    #: Whether the output is linear in the parameters (the input fixed), so that only operations after it add curvature.
    linear = False
    #: Whether samples are given to the rule one by one, wherever they are, and in the type of the output.
    sample_by_sample = False
    #: Whether ``jac_t`` needs the nodes of the outputs, which are in ``call.cache["nodes"]``.
    reads_graph = False
    #: Whether a call on a single sample without a batch axis is the same as on a batch of it.
    takes_single = False
    #: The edge at which the weight of the call was computed from the parameter: the graph behind it is needed.
    source: GradientEdge | None = None
    #: Whether the products of that weight go back to the parameter by autograd, sample by sample.
    pulls_back = False
    #: Attributes of the module that the rule reads; ``None`` for any number, flag or name among them. The mode of the
    #: forward is ``call.training``.
    reads: tuple[str, ...] | None = None

    def expected(self, module: Any) -> Container[str] | None:
        """Names of the parameters that the rule knows; a module with further ones (parametrized weights) has none."""
        return None

    def fits(self, module: Any) -> bool:
        """Whether the rule knows this use of the module: parameters of these shapes, in this mode."""
        return True

    def leaves_input(self, module: Any) -> bool:
        """Whether the module is one operation, which keeps the input as it is for its backward."""
        return False

    def least_dims(self, module: Any) -> int:
        """Number of axes that an input with a batch axis has at least."""
        return 1

    def output_axis(self, call: ModuleCall, index: int) -> int | Tensor | None:
        """Number of the batch axis of an output; for packed sequences that of each row; ``None`` if not known."""
        return 0

    def takes_steps(self, call: ModuleCall, how: Literal["axis", "rows"]) -> bool:
        """Whether a call in which steps come before the samples is the same as one in which these come first."""
        if not self.any_order:
            return False
        x, shape = tensors(call)[0], call.shapes[0]
        alike = x.dim() - (self.least_dims(call.module) - 1) if self.any_axes else 1
        return (how == "rows" or alike > 1) and x.layout == torch.strided and shape[:alike] == x.shape[:alike]

    def check_input(self, call: ModuleCall) -> None:
        """Raise for an input without a batch axis where the rule needs one."""
        least, given = self.least_dims(call.module), tensors(call)
        if least > 1 and given and given[0].dim() < least - self.takes_single:
            raise no_batch_axis(call)

    def is_single(self, call: ModuleCall) -> bool:
        """Whether it is a call on a single sample without a batch axis."""
        return self.takes_single and tensors(call)[0].dim() == self.least_dims(call.module) - 1

    @abstractmethod
    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        """Transposed-Jacobian products of the named parameters.

        Args:
            call: the recorded call.
            grads: per output ``[V, *out]``, or ``None`` where nothing arrived.
            names: parameters wanted.
            N: number of samples; the batch axis of the use is a multiple, ``[N k, ...]`` with k rows of a sample
                together.
        """


_rules: dict[type[nn.Module] | str, Rule] = {}

_rule_of_kind: dict[tuple, Rule | None] = {}

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


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a module: that of its type if the module still computes what its type does, else ``None``."""
    # asked in every forward, so remembered by all that the answer depends on
    kind = type(module)
    key = (kind, kind.forward, getattr(kind, "_conv_forward", None), *module._parameters, *module._modules)
    if "forward" in vars(module) or "_conv_forward" in vars(module):  # put there by a user
        return None
    if key not in _rule_of_kind:
        _rule_of_kind[key] = _find_rule(module)
    rule = _rule_of_kind[key]
    return rule if rule is not None and rule.fits(module) else None


def _find_rule(module: nn.Module) -> Rule | None:
    for base in type(module).__mro__:
        rule = _rules.get(base) or _rules.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            forwards = [f for f in ("forward", "_conv_forward") if hasattr(base, f)]
            kept = all(getattr(type(module), f) is getattr(base, f) and _is_original(base, f) for f in forwards)
            expected = rule.expected(module)
            plain = expected is None or all(name in expected for name in owned_parameters(module))
            return rule if kept and plain else None
    return None


def _is_original(kind: type, name: str) -> bool:
    """Whether a method was written where its class was, not put there later."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return getattr(vars(owner)[name], "__globals__", {}).get("__name__") == owner.__module__


def no_batch_axis(call: ModuleCall) -> CurvoptError:
    """The error where the samples are not known without one."""
    return CurvoptError(
        f"{call.describe()} was called with an input of shape {list(tensors(call)[0].shape)}, which has no batch axis; "
        "give it a batch of one, e.g. x.unsqueeze(0)."
    )


def arguments(call: ModuleCall) -> dict[str, Any]:
    """The arguments of the forward by the names of its parameters, in their order, defaults included."""
    bound = inspect.signature(call.module.forward).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return bound.arguments


def tensors(call: ModuleCall) -> list[Tensor]:
    """The tensors among the arguments, in the order of the forward's parameters."""
    given = arguments(call).values() if call.kwargs else call.args
    return [value for value in given if isinstance(value, Tensor)]


class AffineRule(Rule):
    """A layer ``W x + b`` at every shared position, defined by two views."""

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

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        grad = grads[0]
        assert grad is not None  # a use is only asked when something arrived at its one output
        inputs = tensors(call)
        left = by_sample(self.fold(call.module, grad, *inputs), N)
        jacobians: dict[str, Any] = {}
        if "weight" in names:
            kept = f"right of {N}"  # another pass of this backward may take the batch as one sample
            if kept not in call.cache:
                # autocast: the input may be in another precision
                right = self.unfold(call.module, *[cast(x, left.dtype) for x in inputs])
                call.cache[kept] = right.by_sample(N) if isinstance(right, Patches) else by_sample(right, N)
            shape = call.module._parameters["weight"].shape  # type: ignore[union-attr]
            jacobians["weight"] = Outer(left, call.cache[kept], shape, self.transposed)
        if "bias" in names:
            values, shared = self.bias(grad, left), left.shape[2:4] == (1, 1) and not self.transposed
            jacobians["bias"] = Bias(values, jacobians["weight"]) if shared and jacobians else Dense(values)
        return jacobians
