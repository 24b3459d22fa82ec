"""The ``with backpack(...)`` context: which extensions are active, and when a backward begins and ends.

Inside of ``with backpack(KFAC(), BatchGrad())``::

    loss.backward() ──► _prepare ──► before_backward: sets kfac ──► the user's backward: sets grad_batch
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvopt.core.backward.backward_pass import Backward, BackwardPass, Request, read_and_locate
from curvopt.core.backward.checks import check_derivatives, check_request
from curvopt.core.backward.intercept import Context
from curvopt.core.backward.second_order import SecondOrder
from curvopt.core.losses.roots import Gradient, Hessian
from curvopt.core.samples.samples import EmptyBatch
from curvopt.core.vjp import NotRepeatable
from curvopt.errors import CurvoptError
from curvopt.extensions.base import Extension, fields_of, naming_fields


class Listener(Protocol):
    """An optimizer that takes quantities from the backwards that accumulate gradients."""

    def wanted(self, leaves: set[Any]) -> bool:
        """Before a backward that reaches ``leaves``: whether the quantities are to be computed in it."""
        ...

    def refused(self, error: CurvoptError, request: Request) -> Request | None:
        """Where a request cannot be served, before the backward runs.

        Args:
            error: why.
            request: what was asked for.

        Returns:
            What to try instead, without extensions to let the backward run as it is; ``None`` to raise the error.
        """
        ...

    def finished(self, weight: Tensor | float, variables: int) -> None:
        """After a backward with quantities, once fields and gradients are final.

        Args:
            weight: of its loss, see `backpack.loss_weight`.
            variables: the largest number of variables of a prediction.
        """
        ...


class backpack(Context):  # noqa: N801 - the name users of BackPACK know
    """Compute quantities along with every backward inside the context and put them on the parameters.

    ::

        with backpack(BatchGrad(), KFAC()):
            loss.backward()
        model[0].weight.grad_batch, model[0].weight.kfac

    Fields are reset, never accumulated, by each backward. Contexts nest: the innermost decides. Nothing is left
    behind after an exception.

    Args:
        *extensions: instances of `curvopt.extensions`; none is allowed and computes nothing.
        extension_hook: called as ``extension_hook(module)`` as soon as all fields of a module's parameters are
            complete; it may use and delete them, so that not all layers' quantities are in memory at once. Called once
            in a backward for each module whose parameters have fields, not for losses, containers and layers
            without parameters. Inside, ``module.input0`` (``input1``, ...) are what a layer that has a rule was called
            with, detached unless the backward creates a graph. Gradients are disabled, as in all hooks of a backward;
            another backward goes inside of ``torch.enable_grad()``.
        debug: print which field is set on which parameter.
        retain_graph: accepted for programs written for BackPACK and needed for nothing: quantities that outlive the
            backward (matrix products) hold what they need.

    Raises:
        TypeError: for an extension class instead of an instance, or something that is no extension.
        ValueError: if two extensions write the same field.
    """

    def __init__(
        self,
        *extensions: Extension,
        extension_hook: Callable[[nn.Module], None] | None = None,
        debug: bool = False,
        retain_graph: bool = False,
    ):
        """Check the extensions."""
        for extension in extensions:
            if isinstance(extension, type) and issubclass(extension, Extension):
                raise TypeError(
                    f"backpack: got the class {extension.__name__}; pass an instance: {extension.__name__}()."
                )
            if not isinstance(extension, Extension):
                raise TypeError(
                    "backpack: expected extensions such as curvopt.extensions.KFAC(), without a list around them, got "
                    f"{extension!r}."
                )
        fields = [extension.field for extension in extensions]
        for field in fields:
            if fields.count(field) > 1:
                raise ValueError(f"backpack: two extensions write the field '{field}'; use separate contexts.")
        self.extensions, self.extension_hook, self.debug = extensions, extension_hook, debug
        #: Sum of the predictions' weights in the losses of all backwards so far: 1 for a mean, N for a sum over N; of
        #: elementwise losses a prediction is a sample with all its entries. For second-order quantities only.
        self.loss_weight: Tensor | float = 0.0
        self.request = Request(extensions)
        self.listener: Listener | None = None
        self._pass: BackwardPass | None = None  # of the running backward
        self._kernels, self._is_first = ExitStack(), True  # of attention; whether no backward has been in the context

    def __enter__(self) -> backpack:
        """Activate the extensions."""
        if any(isinstance(extension.columns, Hessian) for extension in self.extensions):
            self._kernels.enter_context(sdpa_kernel(SDPBackend.MATH))  # other kernels have no second derivative
        self._is_first = True
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deactivate them; after an exception, remove the fields of a half-finished backward."""
        super().__exit__(kind, error, trace)
        self._kernels.close()
        self._abandon()

    def _abandon(self) -> None:
        if self._pass is not None:
            self._pass.undo()
            self._pass = None

    def _prepare(self, how: Backward, request: Request) -> BackwardPass | None:
        """Read, locate and check: the pass of a call into autograd, if there is anything to do in it."""
        extensions = request.extensions
        if request.maximized:
            how = how._replace(roots={edge: -grad for edge, grad in how.roots.items()})
        roots = [node for node, _ in how.roots]
        try:
            located = read_and_locate(roots, request.as_one_sample)
        except CurvoptError as error:
            if request.skips_empty and isinstance(error, EmptyBatch):
                return None
            raise naming_fields(extensions, error) from error
        if not located.calls and not (how.accumulates and located.may_reach_parameters):
            for call in located.graph.module_calls if how.accumulates and request.counted is None else ():
                call.check_parameters()
            return None
        if how.batched:
            raise CurvoptError(
                f"{fields_of(extensions)}: is_grads_batched=True pulls several vectors back at once, while fields "
                "are those of one backward; call torch.autograd.grad for each vector, or for all of them inside of an "
                "empty `with backpack():`, which asks for no fields."
            )
        check_request(extensions, located)
        if how.create_graph and request.counted is None:  # nobody differentiates what optimizers take
            check_derivatives(extensions, located, [GradientEdge(*edge) for edge in how.roots])
        return BackwardPass(request, self.extension_hook, located, how)

    def _attempt(self, how: Backward, request: Request) -> BackwardPass | None:
        """Prepare the pass, and compute the second-order fields."""
        self._pass = run = self._prepare(how, request)
        if run is None:
            return None
        needs_second_order = not all(isinstance(e.columns, Gradient) for e in request.extensions)
        return run.before_backward(SecondOrder(run).compute if needs_second_order else None)

    def _begin(self, how: Backward) -> BackwardPass | None:
        """As `_attempt`; after an error of curvopt again, with what the listener asks for: in later backwards, too."""
        request = self.request
        while request.extensions:
            try:
                begun = self._attempt(how, request)
                self.request = request
                return begun
            except BaseException as error:
                self._abandon()
                if self.listener is None or isinstance(error, NotRepeatable) or not isinstance(error, CurvoptError):
                    raise
                instead = self.listener.refused(error, request)
                if instead is None:
                    raise
                request = instead
        return None

    def _run(self, call: Callable[..., Any], how: Backward) -> Any:
        """A call into autograd, with its graph read (and the request checked) before anything is computed."""
        if self.listener is not None and not (how.accumulates and self.listener.wanted(how.leaves())):
            return call()
        run = self._begin(how)
        if run is None:
            return call()  # a gradient of something else
        try:
            run.remove_earlier_fields(self._is_first)
            self._is_first = False
            with run.listening():  # not in the forward: a model that is extended but not asked should cost nothing
                result = call()
                run.finish()
            self._pass = None
            self.loss_weight = self.loss_weight + run.weight
            if self.listener is not None:
                self.listener.finished(run.weight, run.variables)
        except BaseException:
            self._abandon()
            raise
        if self.debug:
            for p, extensions in run.done.items():
                print(f"curvopt: {run.located.name(p)}: {', '.join(sorted(e.field for e in extensions))}")
        return result


class ListenedBackward(backpack):
    """A context of an optimizer, which listens.

    Args:
        request: what is computed in the backwards inside.
        listener: takes part in them.
        extension_hook: see `backpack`.
    """

    def __init__(self, request: Request, listener: Listener, extension_hook: Callable[[nn.Module], None] | None = None):
        super().__init__(*request.extensions, extension_hook=extension_hook)
        self.request, self.listener = request, listener
