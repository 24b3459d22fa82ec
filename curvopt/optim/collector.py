"""Collecting curvature in the backwards of a training loop."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from curvopt import backpack
from curvopt.core.backward.backpack import attach
from curvopt.core.jacobians.sums import widened
from curvopt.core.recording.extended_parameters import owned_parameters
from curvopt.core.recording.state import outside_of_graphs
from curvopt.distributed import Ranks, ranks_of, refuse_sharded
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.optim.accumulation import Accumulation, Collection, nothing_received
from curvopt.optim.checkpoint import SampleStream
from curvopt.optim.reports import parameter_names
from curvopt.optim.step_checks import check_precision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CurvatureCollector(torch.optim.Optimizer, ABC):
    """A torch optimizer that collects curvature in the backwards inside of ``curvature()``, or after ``attach()``.

    A subclass tells which extensions compute the curvature, how it is taken off a parameter, and when it is due. The
    sums over the backwards since the last step are in ``_accumulation``.
    """

    #: Which ranks train this model together (see `curvopt.distributed`): all, or those of a group; ``None`` for a
    #: process on its own. A group is not copied or saved with the optimizer.
    process_group: "ProcessGroup | Literal['world'] | None" = "world"

    @abstractmethod
    def _extensions(self) -> list[Any]:
        """The extensions that ``curvature()`` activates."""

    @abstractmethod
    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        """Remove the extensions' fields from a parameter.

        Returns:
            The factor list (then anything else that adds up as losses do), and the index of the input's factor;
            ``None`` if there is none.
        """

    @abstractmethod
    def _due(self) -> bool:
        """Whether the next backward is to compute curvature."""

    def _start_collecting(self) -> None:
        """Begin without curvature and without a ``GradScaler``."""
        self._accumulation = Accumulation()
        self._samples = SampleStream()
        self._ranks_agree = False  # whether they were found in equal states
        self._scaler: Any = None
        self._knows_scale = True

    def attach(self, model: torch.nn.Module, lossfunc: torch.nn.Module | None = None, scaler: Any = None) -> None:
        """Collect curvature from now on in every ``loss.backward()`` that reaches this optimizer's parameters.

        So training loops of others (Lightning, transformers, accelerate) need no other change: a backward outside of
        ``curvature()`` runs in it as soon as it is due. So do backwards inside of a ``backpack(...)`` with extensions,
        and those that other attached optimizers see, too. Calls of ``torch.autograd.grad`` and backwards inside of an
        empty ``with backpack():`` are left alone. The optimizer is not kept alive by this; copies of it are attached,
        too.

        Args:
            model: is extended. If it is compiled by ``torch.compile``, attach before its first forward pass.
            lossfunc: is extended; not needed for the functional losses of PyTorch, or inside of the model.
            scaler: the ``torch.amp.GradScaler`` in use, if any (anything with ``get_scale()``); then
                ``curvature()`` without a ``loss_scale`` asks it, too. Later calls without one keep it; copies of the
                optimizer do not have it.

        Raises:
            CurvoptError: no parameter of this optimizer belongs to the model.
        """
        who = f"{type(self).__name__}.attach()"
        refuse_sharded((who, name, p) for name, p in model.named_parameters())
        if set(self._params()).isdisjoint(model.parameters()):
            raise CurvoptError(
                f"{who}: no parameter of this optimizer belongs to this {type(model).__name__}. Attach after "
                "everything that replaces parameters (moving to a device, wrapping), and build the optimizer from "
                "model.parameters()."
            )
        attach(self, model, lossfunc)
        self._scaler, self._attached = self._scaler if scaler is None else scaler, True

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> Any:
        """For a backward that is about to reach ``parameters()``: the context to run it in, or ``None``."""
        if self._accumulation.this_context is not None or not self._due():
            return None
        return None if parameters().isdisjoint(self._params()) else self.curvature()

    @contextmanager
    def curvature(self, loss_scale: float | Tensor | None = None) -> Iterator[None]:
        """Run the backward pass in here: refreshes the curvature on steps that are due, costs nothing on the others.

        Several backwards between two steps (gradient accumulation) add up as their gradients do; run all of them in
        here. If the block raises, its curvature is dropped; so is curvature from before gradients were reset.

        Args:
            loss_scale: factor of the loss that the gradients in ``step()`` no longer have: ``scaler.get_scale()`` for
                ``torch.amp.GradScaler``, which divides them in between. By default that of the scaler given to
                ``attach()``, else 1.

        Raises:
            CurvoptError: no parameter of this optimizer received curvature, or they have another precision than before.
        """
        accumulation, who = self._accumulation, type(self).__name__
        if accumulation.this_context is not None or not self._due():
            yield
            return
        check_precision(who, self.state, self._names())
        self._knows_scale = loss_scale is not None or self._scaler is not None
        scale = loss_scale if loss_scale is not None else 1.0 if self._scaler is None else self._scaler.get_scale()
        context = backpack(*self._extensions(), extension_hook=self._collect)
        alone = self._ranks() is None
        context.skips_empty, context.counted = not alone, set(self._params())
        context.began = lambda: accumulation.drop_discarded(self._params())
        context.ended = lambda: accumulation.note_zeros(self._params())
        context.finished = lambda weight, variables: accumulation.end_backward(weight, variables, scale)
        # step() looks whether other ranks received some
        with accumulation.context(who if alone else None), context:
            yield

    @torch.no_grad()
    def _collect(self, module: torch.nn.Module) -> None:
        """Extension hook: take the fields off a module's own parameters."""
        mine = set(self._params())
        for param in owned_parameters(module).values():
            taken = self._take(param)
            if taken is None:
                continue
            if param in mine:
                # bfloat16 or half factors would lose the average and break the inverse
                self._accumulation.this_backward[param] = ([widened(t.detach()) for t in taken[0]], taken[1])
            else:
                self._accumulation.foreign += 1

    def _sampler(self) -> torch.Generator:
        """A generator for the Monte-Carlo samples of one ``curvature()``."""
        ranks = self._ranks()
        return self._samples.next(self._device(), 0 if ranks is None else ranks.rank)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False; ``GradScaler.step`` asks for this, so here an unknown scaler is noticed: it makes curvature too large.

        The warning is for the line that calls ``GradScaler.step``.
        """
        if not self._knows_scale and isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
            warnings.warn(
                f"a GradScaler steps {type(self).__name__}, which takes the scale of the loss for curvature: updates "
                "will be far too small. Call optimizer.attach(model, scaler=scaler), or "
                "optimizer.curvature(loss_scale=scaler.get_scale()).",
                CurvoptWarning,
                stacklevel=3,
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the curvature that was collected with them."""
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.zero_grad, set_to_none)
        self._accumulation.drop()
        super().zero_grad(set_to_none)

    def _exchange(self, collected: Collection, ranks: Ranks, equal: dict[str, Any]) -> Collection:
        """The mean of the ranks' curvature.

        Args:
            collected: by this rank.
            ranks: the ranks.
            equal: numbers that must not differ between them.

        Raises:
            CurvoptError: on all ranks, for an error on one of them.
        """
        params, names, samples, who = self._params(), self._names(), self._samples, type(self).__name__
        refuse_sharded((who, name, p) for p, name in names.items())
        has_gradients = any(param.grad is not None for param in params)
        forms, (foreign, seed, draws, variables) = ranks.union(
            collected.forms(params),
            list(names.values()),
            [collected.foreign, -1 if samples.seed is None else samples.seed, samples.draws, collected.variables],
            equal | {"parameters": [list(param.shape) for param in params], "gradients": has_gradients},
        )
        self._ranks_agree = True
        samples.seed, samples.draws = (None if seed < 0 else seed), draws
        collected.variables = variables
        if foreign > 0 or (foreign == 0 and not forms):
            raise nothing_received(who, foreign)
        return collected.mean(forms, params, ranks) if forms else collected

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _names(self) -> dict[Tensor, str]:
        return parameter_names(self.param_groups)

    def _ranks(self) -> Ranks | None:
        """The ranks that train together; ``None`` for a process on its own."""
        return ranks_of(self.process_group, self._device())

    def _device(self) -> torch.device:
        """Where small numbers are exchanged and samples drawn."""
        return next((param.device for param in self._params()), torch.device("cpu"))
