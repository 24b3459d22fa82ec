"""`extend`: a model records its calls in the forward pass, by forward hooks.

The hooks may be copied and pickled with the modules.

>>> model = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
>>> [type(hook).__name__ for hook in model[0]._forward_hooks.values()]
['Recorder']
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._pytree import tree_map_only

from curvopt.core.layers.rule import Rule, rule_for
from curvopt.core.pytorch_workarounds import forget_compiled_code, outside_of_graphs
from curvopt.core.record import (
    Model,
    ModelCall,
    ModuleCall,
    Prediction,
    _extended,
    _record,
    _records,
    _tensors,
    describe,
    note_parameters,
    owned_parameters,
    running,
)


class Recorder:
    """The forward hooks of a module of an extended model. They may be copied and pickled with the module.

    Args:
        path: of the module in the model.
        model: the model.
        owns: whether the module has parameters itself, not only in layers inside of it.
        begins: whether `begin` runs before the forward; a layer inside of a model needs none, as it calls no other.

    Attributes:
        knows_parameters: whether the parameters of the module and of those inside of it are noted; in copies they are
            when it is called.
    """

    knows_parameters = False

    def __init__(self, path: str, model: Model, owns: bool, begins: bool):
        self.path, self.model, self.owns, self.begins = path, model, owns, begins
        self.knows_parameters = True

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose parameters are other ones."""
        return {name: value for name, value in vars(self).items() if name != "knows_parameters"}

    @property
    def __name__(self) -> str:
        """Only ``torch.jit.script`` asks for it, which would compile the hook."""
        raise AttributeError(
            f"torch.jit.script: {self.path or self.model.name} is extended, and hooks that record calls cannot be "
            "compiled; script a model before it is extended, or use torch.compile."
        )

    def begin(self, module: nn.Module, args: tuple) -> None:
        """Before the forward: a call of the module runs."""
        if torch.compiler.is_dynamo_compiling():
            if _records():
                outside_of_graphs(self.begin, module, args)
        elif running.is_skipped or _records():
            running.begin(self.model, "." not in self.path)

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None, traced: bool = False
    ) -> Any:
        """Put a `ModuleCall` on the node of each output, and a `ModelCall` if the call is the outermost one."""
        compiles = torch.compiler.is_dynamo_compiling()
        if not compiles and running.is_skipped:
            if self.begins:
                running.end()
            return None
        if not _records():
            return None
        if output is None and not isinstance(kwargs, dict):  # registered anew without them, by quantization say
            kwargs, output = {}, kwargs
        if compiles:
            return outside_of_graphs(self, module, args, kwargs, output, True)
        if not self.knows_parameters:
            remember_parameters(module)
        model_call = running.call
        outermost = running.end() if self.begins else model_call is None
        if not (self.owns or outermost):
            return None
        if model_call is None:
            if not self.model.decide_to_record():
                return None
            model_call = ModelCall(self.model)
        outputs = _tensors(output)
        if outermost:
            # parameters of the model that it is called with are no samples
            given = [x for x in _tensors((args, kwargs)) if type(x) is Tensor or x not in _extended]
            model_call.end(self.path, describe(self.path, module), args, kwargs, given)
        if all([out.grad_fn is None for out in outputs]):
            return None
        rule, call = self._rule_for(module) if self.owns else None, None
        if rule is not None:
            call = ModuleCall(self.path, model_call, module, rule, args, kwargs, outputs, traced)
            if len(outputs) > 1:
                # an output may be computed from another: hand out copies, so that what arrives there comes from outside
                # (no views: changed in place, they would take the record out of the graph)
                output = tree_map_only(Tensor, lambda out: out.clone() if out.grad_fn is not None else out, output)
                outputs = _tensors(output)
        for index, out in enumerate(outputs):
            if call is not None:
                _record(out, call, index)
            if outermost:
                _record(out, model_call)
        return output if call is not None and len(outputs) > 1 else None

    def _rule_for(self, module: nn.Module) -> Rule | None:
        """The rule of the module; without one its parameters are found in the graph, by their names."""
        # hooks that come first may have changed the output
        is_first = next(iter(module._forward_hooks.values())) is self and not _global_forward_hooks
        rule = rule_for(module) if is_first else None
        if rule is None:
            note_parameters(module, self.path, self.model, again=False)  # of a copy, or added since
        return rule


def _recorder_of(module: nn.Module) -> Recorder | None:
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, Recorder)), None)


def remember_parameters(module: nn.Module) -> None:
    """Note the parameters that the extended modules of a module have now: ``fully_shard`` exchanges them."""
    for child in module.modules():
        recorder = _recorder_of(child)
        if recorder is not None:
            note_parameters(child, recorder.path, recorder.model)
            recorder.knows_parameters = True


def _model_of(module: nn.Module, batch_axis: int | None) -> Model:
    """The model that a module is extended as: the larger one that it is a part of, or itself."""
    size = sum(1 for _ in module.modules())
    recorder = _recorder_of(module)
    if recorder is not None and recorder.model.size >= size:
        if batch_axis != 0:
            recorder.model.batch_axis = batch_axis
        return recorder.model
    return Model(describe("", module), batch_axis, size)


M = TypeVar("M", bound=nn.Module)


def extend(
    module: M, debug: bool = False, use_converter: bool = False, loss: bool = False, batch_axis: int | None = 0
) -> M:
    """Make a model record its calls. Changes the module and returns it; idempotent.

    A loss without parameters is left as it is: losses are read off the graph.

    Modules and parameters that are added or replaced afterwards have no fields until it is called again.

    Args:
        module: a model; every submodule that owns parameters is recorded.
        debug: print each module that is recorded.
        use_converter: accepted for programs written for BackPACK and needed for nothing: functional code, residual
            connections and reused modules work as they are.
        loss: accepted for losses by hand and needed for nothing.
        batch_axis: axis of the model's inputs and outputs that counts the samples. ``None`` where rows are no samples,
            as in a graph: the batch is one sample. The default leaves an extended model as it is.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module``, or trainable parts of it were made by ``torch.jit``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"extend: expected a torch.nn.Module, got {type(module).__name__}; pass the model or the loss module."
        )
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(p.requires_grad for p in child.parameters()):
            raise TypeError(
                f"extend: {describe(path, child)} is a program of torch.jit, whose calls cannot be seen; extend the "
                "module that it was made of (torch.compile may compile extended ones), or freeze it."
            )
    model, is_new = _model_of(module, batch_axis), False
    model.on_demand = False
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) or not any(owned_parameters(part) for part in child.modules()):
            continue  # activations, nn.NLLLoss, a user's loss: read off the graph, as functions are
        held = isinstance(child, (nn.ParameterList, nn.ParameterDict))
        if "parametrizations" in path.split(".") or (held and child is not module):
            continue  # used through the module that holds them
        recorder = _recorder_of(child)
        larger = model if recorder is None or recorder.model.size <= model.size else recorder.model
        note_parameters(child, path, larger)
        owns = bool(owned_parameters(child))
        if recorder is not None:
            recorder.model, recorder.owns = larger, owns
            continue
        begins = not path or any(True for _ in child.children())
        recorder, is_new = Recorder(path, larger, owns, begins), True
        if begins:
            child.register_forward_pre_hook(recorder.begin, prepend=True)
        # first of all hooks: operations of other hooks are read off the graph
        child.register_forward_hook(recorder, with_kwargs=True, prepend=True, always_call=begins)
        if debug and owns:
            print(f"curvopt: extended {describe(path, child)}")
    if is_new:
        forget_compiled_code()
    return module


def extend_on_demand(module: nn.Module, batch_axis: int | None = 0) -> None:
    """Extend a module for optimizers: calls are recorded while one is due, unless they are anyway."""
    before = [recorder.model.on_demand for child in module.modules() if (recorder := _recorder_of(child))]
    extend(module, batch_axis=batch_axis)
    if all(before):
        for child in module.modules():
            if (recorder := _recorder_of(child)) is not None:
                recorder.model.on_demand = True


def prediction(z: Tensor) -> Tensor:
    """Say that a tensor is a prediction, and return it: the curvature of a loss is that in its predictions.

    Predictions are the outputs of models, if nobody says otherwise. Where a model returns its loss, they are what its
    last operations with parameters compute. Mark what is meant where that is something else: the residual of a PINN
    whose loss is no square, say, or a probability from which a model computes a loss that curvopt does not know.

    ::

        residual = curvopt.prediction(slope + u * u_x)
        loss = torch.nn.functional.huber_loss(residual, torch.zeros_like(residual))

    Args:
        z: a tensor with a row for each sample, ``[N, ...]``.

    Returns:
        The tensor itself.
    """
    if torch.compiler.is_dynamo_compiling():
        return outside_of_graphs(prediction, z)
    if _records():
        _record(z, Prediction())
    return z
