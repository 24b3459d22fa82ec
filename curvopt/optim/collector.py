"""Collecting curvature in the backwards of a training loop."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from curvopt import extend
from curvopt.core.backward.backward_pass import Request
from curvopt.core.backward.checks import may_be_one_sample
from curvopt.core.backward.context import ListenedBackward
from curvopt.core.backward.intercept import attach
from curvopt.core.losses.roots import MonteCarlo, NotCurved
from curvopt.core.record import extended_model, outside_of_graphs, owned_parameters
from curvopt.distributed import Ranks, is_sharded, refuse_sharded, serving
from curvopt.errors import CurvoptError
from curvopt.optim.accumulation import Accumulation, Collected, are_zero, has_gradients, nothing_received, versions
from curvopt.optim.checkpoint import SampleStream
from curvopt.optim.empirical import are_of_gradients
from curvopt.optim.gathering import GatheredBackward, gathered_parameters, has_any_gradients
from curvopt.optim.over_ranks import OverRanks
from curvopt.optim.step_checks import check_precision

#: By which part of their norm parameters of ranks may differ.
DRIFT = 1e-5
#: How many outputs of a sample an unknown loss may couple: so many products with its Hessian cost a few gradients.
COUPLED_OUTPUTS = 32


class Listening:
    """Takes curvature for an optimizer from the backwards of one context, by a ladder that each context climbs anew.

    The curvature that was asked for, with rows as samples or else the batch as one sample; else the empirical quantity;
    else what there is: earlier curvature, or (attached) the gradient as it is. Each is said once. The context of an
    attached optimizer has one backward.

    Args:
        optimizer: takes the curvature.
        is_wanted: whether that is due in a backward that reaches some parameters; ``None``: in all.
        scale: factor of the loss that gradients do not have in ``step()``.
    """

    def __init__(self, optimizer: Any, is_wanted: Callable[[Set[Tensor]], bool] | None, scale: float | Tensor):
        self.optimizer, self.is_wanted, self.scale = optimizer, is_wanted, scale
        self.extensions: tuple[Any, ...] = ()  # the empirical ones, where the first ones were refused
        self.refusal: CurvoptError | None = None
        self.before = optimizer._progress["empirical"]

    def wanted(self, leaves: set[Any]) -> bool:
        """See `curvopt.core.backward.context.Listener`."""
        optimizer = self.optimizer
        optimizer._drop_discarded()
        # where none of ours is reached, an error says what to do
        own = optimizer._own(leaves)
        found = self.is_wanted is None or not own or self.is_wanted(own)
        optimizer._accumulation.unneeded |= not found
        sharding = optimizer._sharding()
        if sharding is not None:
            sharding.has_begun |= found
        if found and not self.extensions:
            optimizer._progress["empirical"] = 0
        return found

    def refused(self, error: CurvoptError, request: Request) -> Request | None:
        """See `curvopt.core.backward.context.Listener`.

        Raises:
            CurvoptError: the first refusal, if there is no curvature at all, and the optimizer is not attached.
        """
        optimizer, accumulation = self.optimizer, self.optimizer._accumulation
        self.refusal = self.refusal or error
        # not where the loss itself has no curvature, or takes one number
        of_rows = not (isinstance(error, NotCurved) or request.as_one_sample)
        if of_rows and may_be_one_sample(request.extensions):
            return replace(request, extensions=optimizer._of_one_sample(request.extensions), as_one_sample=True)
        if not self.extensions or of_rows:
            optimizer._progress["empirical"] = 1
            one_sample = of_rows or not isinstance(self.refusal, NotCurved)
            self.extensions = tuple(optimizer._empirical_extensions(one_sample or optimizer._has_no_rows()))
            return replace(request, extensions=self.extensions, as_one_sample=one_sample)
        error, optimizer._progress["empirical"] = self.refusal, self.before
        why = _in_words_of_attach(error)
        if optimizer._has_curvature() or accumulation.has_begun:
            optimizer._say("refused", f"goes on with the curvature it has, as a backward has none. {why}")
        elif optimizer._attached:
            accumulation.this_context.refused = True
            optimizer._say(
                "plain", f"takes plain gradients until a backward has curvature, as this one has none. {why}"
            )
        else:
            who = type(optimizer).__name__
            raise type(error)(str(error).replace("call extend(model)", f"build {who}(model), or call extend(model)"))
        accumulation.unneeded = True
        return Request()

    def finished(self, weight: Tensor | float, variables: int) -> None:
        """See `curvopt.core.backward.context.Listener`."""
        optimizer = self.optimizer
        if self.refusal is not None:
            why = _in_words_of_attach(self.refusal).split("; use ")[0].removesuffix(".")  # the rest names extensions
            if not self.extensions:
                optimizer._say(
                    "one sample",
                    f"takes a batch as one sample, which is right on average; batch_axis=None says so. {why}.",
                )
            elif not optimizer._wants_empirical():
                optimizer._say("empirical", f"takes the empirical quantity for such batches. {why}.")
        accumulation = optimizer._accumulation
        accumulation.end_backward(weight, variables, self.scale, are_of_gradients(self.extensions))
        if accumulation.this_context is not None:
            params = optimizer._params()
            accumulation.this_context.versions = versions(params) if are_zero(params) else []
        optimizer._versions = [param._version for param in optimizer._params()]


def _in_words_of_attach(error: CurvoptError) -> str:
    """The text of an error of the engine, whose remedy is an argument of `attach` here."""
    return str(error).replace("extend(model", "attach(model")


class CurvatureCollector(OverRanks, ABC):
    """A torch optimizer that collects curvature in the backwards inside of ``curvature()``, or after ``attach()``.

    A subclass tells which extensions compute the curvature, how it is taken off a parameter, and when it is due. The
    sums over the backwards since the last step are in ``_accumulation``.
    """

    _loss_reduction: Literal["mean", "sum"] | None = None
    #: How many times more vectors are drawn of a batch that is one sample: several where steps divide by the curvature
    #: without a bound, or by squares of the vectors themselves.
    _draws_of_one_sample = 1

    @abstractmethod
    def _extensions(self) -> list[Any]:
        """The extensions that ``curvature()`` activates."""

    def _empirical_extensions(self, one_sample: bool) -> list[Any]:
        """Extensions of the empirical quantity (see `curvopt.optim.empirical`); by default none.

        Args:
            one_sample: whether the batch is one sample.
        """
        return []

    def _of_one_sample(self, extensions: Sequence[Any]) -> tuple[Any, ...]:
        """The extensions for a batch that is one sample, which draw several vectors for it."""
        for extension in extensions:
            if isinstance(columns := extension.columns, MonteCarlo):
                extension.columns = replace(columns, samples=self._draws_of_one_sample * columns.samples)
        return tuple(extensions)

    def _has_no_rows(self) -> bool:
        """Whether a batch of the model is one sample, as it was extended so."""
        models = {extended_model(param) for param in self._params()}
        return any(model is not None and model.batch_axis is None for model in models)

    def _wants_empirical(self) -> bool:
        """Whether the empirical quantity is the one that the optimizer is made for."""
        return False

    @abstractmethod
    def _take(self, param: Tensor) -> tuple[list[Tensor], int | None] | None:
        """Remove the extensions' fields from a parameter.

        Returns:
            The factor list (then anything else that adds up as losses do), and the index of the input's factor;
            ``None`` if there is none.
        """

    @abstractmethod
    def _due(self, reached: Set[Tensor] | None) -> bool:
        """Whether a backward that reaches some parameters (``None``: any) is to compute curvature."""

    def _start_collecting(self) -> None:
        """Begin without curvature and without a ``GradScaler``."""
        super()._start_collecting()
        self._accumulation = Accumulation()
        self._samples = SampleStream()
        self._ranks_agree = False  # whether they were found in equal states
        self._scaler: Any = None
        self._versions: list[int] = []  # of the parameters at the end of the last backward with curvature
        self._gradient_scale: float | Callable[[], float] | None = None
        self._runs_closure = False
        self._knows_scale = True  # by what the gradients of the loss are divided before the step

    def attach(
        self,
        model: torch.nn.Module | None = None,
        lossfunc: torch.nn.Module | None = None,
        scaler: Any = None,
        *,
        gradient_scale: float | Callable[[], float] | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
        batch_axis: int | None = 0,
    ) -> None:
        """Collect curvature from now on in every ``loss.backward()`` that reaches this optimizer's parameters.

        So training loops of others (Lightning, transformers, accelerate) need no other change: a backward outside of
        ``curvature()`` runs in it as soon as it is due. So do backwards inside of a ``backpack(...)`` with extensions,
        and those that other attached optimizers see, too. Calls of ``torch.autograd.grad`` and backwards inside of an
        empty ``with backpack():`` are left alone. The optimizer is not kept alive by this; copies of it are attached,
        too.

        No loss is refused: where a loss has no curvature (it is not convex, couples samples, has no second derivative,
        or is linear in a batch), the optimizer warns once and takes the empirical quantity for that batch, the second
        moments of the samples' gradients; ``coverage()`` and ``metrics()`` say so. Where it is not clear what a sample
        is, it warns and takes the batch as one; where that does not help, the curvature it has, or plain gradients.

        Args:
            model: is extended.
            lossfunc: is extended; not needed for the functional losses of PyTorch, or inside of the model.
            scaler: what scales the loss, anything with ``get_scale()``; later calls without one keep it. Not needed
                for a ``torch.amp.GradScaler`` whose ``step()`` is given this optimizer, unless ``unscale_()`` comes
                before.
            gradient_scale: by what the loop multiplies gradients after the backward (1 / n where it divides them by a
                number n), or a function that returns it; later calls without it keep it.
            loss_reduction: whether losses of no known kind are a ``"mean"`` over the samples or a ``"sum"``; later
                calls without it keep it. To begin with, they are what their last operation is: a sum over rows that no
                constant divides again is a sum, all else a mean.
            batch_axis: axis of the model's inputs and outputs that counts the samples; 0, unless `extend` was told
                another one. ``None`` where rows are no samples, or would cost many times a gradient (nodes of a
                graph): the batch is one sample.

        Raises:
            CurvoptError: no parameter of this optimizer belongs to the model.
        """
        who = f"{type(self).__name__}.attach()"
        if not isinstance(model, torch.nn.Module):
            got = "nothing" if model is None else type(model).__name__
            raise TypeError(f"{who}: expected a torch.nn.Module, got {got}; write attach(model).")
        if lossfunc is not None and not isinstance(lossfunc, torch.nn.Module):
            kind = getattr(lossfunc, "__name__", type(lossfunc).__name__)
            raise TypeError(
                f"{who}: expected a torch.nn.Module, got {type(lossfunc).__name__} {kind} as lossfunc. Losses that are "
                "functions need none: write attach(model)."
            )
        mine = self._in_forward()
        with serving(gathered_parameters(self._params()) if self._shards is not None else ()):
            refuse_sharded((who, name, p) for name, p in model.named_parameters() if not is_sharded(p))
        own = {name: p for name, p in model.named_parameters() if p in mine}
        if not own:
            raise CurvoptError(
                f"{who}: no parameter of this optimizer belongs to this {type(model).__name__}. Attach after "
                "everything that replaces parameters (moving to a device, wrapping), and build the optimizer from "
                "model.parameters()."
            )
        extend(model, batch_axis=batch_axis)
        attach(self, lossfunc)
        self._loss_reduction = loss_reduction or self._loss_reduction
        self._gradient_scale = self._gradient_scale if gradient_scale is None else gradient_scale
        self._attached_to = weakref.ref(model), own
        self._scaler, self._attached = self._scaler if scaler is None else scaler, True
        self._said.clear()

    def _context_of_backward(self, parameters: Callable[[], set[Tensor]]) -> Any:
        """For a backward that is about to reach ``parameters()``: the context to run it in, or ``None``."""
        if self._accumulation.this_context is not None or not self._due(None):
            return None
        own = self._own(parameters())
        due = self._due(own)
        self._accumulation.since_last_step.partial |= bool(own) and not due
        return self._context(None, None) if due else None

    def curvature(self, loss_scale: float | Tensor | None = None) -> AbstractContextManager[None]:
        """Run the backward pass in here: refreshes the curvature on steps that are due, costs nothing on the others.

        Several backwards between two steps (gradient accumulation) add up as their gradients do; run all of them in
        here. If the block raises, its curvature is dropped; so is curvature from before gradients were reset.

        Args:
            loss_scale: factor of the loss that the gradients in ``step()`` no longer have: ``scaler.get_scale()`` for
                ``torch.amp.GradScaler``, which divides them in between. By default that of the scaler in use, else 1.

        Raises:
            CurvoptError: no parameter of this optimizer received curvature, or they have another precision than before.
        """
        return self._context(loss_scale, self._due)

    @contextmanager
    def _context(
        self, loss_scale: float | Tensor | None, wanted: Callable[[Set[Tensor]], bool] | None
    ) -> Iterator[None]:
        """See `curvature`; only in backwards for whose leaves it is ``wanted``."""
        accumulation, who = self._accumulation, type(self).__name__
        if accumulation.this_context is not None or not self._due(None):
            yield
            return
        check_precision(who, self.state, self._params(), self._names)
        self._knows_scale = loss_scale is not None or self._scaler is not None
        scale = loss_scale if loss_scale is not None else 1.0 if self._scaler is None else self._scaler.get_scale()
        sharding, alone = self._sharding(), self._ranks() is None
        extensions = self._extensions()
        request = Request(
            self._of_one_sample(extensions) if self._has_no_rows() else tuple(extensions),
            counted=frozenset(self._params()),
            maximized=bool(self.param_groups[0].get("maximize", False)),
            loss_reduction=self._loss_reduction,
            largest_block=COUPLED_OUTPUTS,
            skips_empty=not alone,
        )
        listener = Listening(self, wanted, scale)
        if sharding is None:
            context = ListenedBackward(request, listener, self._collect)
        else:
            context = GatheredBackward(request, listener, self._collect, sharding.ranks, self._gathered)
        # step() looks whether other ranks received some
        with accumulation.context(who if alone else None), context:
            yield

    @torch.no_grad()
    def _drop_discarded(self) -> None:
        """Before a backward: drop the curvature whose gradients were discarded since."""
        params, sharding = self._params(), self._sharding()
        if sharding is None:
            left_out = self._accumulation.drop_discarded(
                has_gradients(params), lambda: are_zero(params), versions(params)
            )
        else:
            zero = sharding.are_zero()
            left_out = self._accumulation.drop_discarded(has_any_gradients(params), lambda: zero, versions(params))
        if left_out:
            self._tell_of_step_left_out()

    def _norm_of_parameters(self) -> list[int]:
        """The norm of all parameters and minus it, as numbers of equal order; 0 where ranks have shards."""
        params = [p.detach() for p in self._params() if p.numel()]
        if not params or self._sharding() is not None:
            return [0, 0]
        norms = torch._foreach_norm(params)  # pyright: ignore[reportPrivateImportUsage]
        bits = int(torch.stack([norm.double().to(norms[0].device) for norm in norms]).norm().cpu().view(torch.int64))
        return [bits, -bits]

    def _tell_of_step_left_out(self) -> None:
        """Tell the other ranks that this one has left out a step that was due, in which they may wait for it.

        Raises:
            CurvoptError: if they do.
        """
        ranks = self._ranks()
        if ranks is not None:
            left_out = {"step": f"{self._progress['step']} was left out, the gradients of it were reset"}
            ranks.union({}, [], [0] * 9, left_out)

    @torch.no_grad()
    def _collect(self, module: torch.nn.Module) -> None:
        """Extension hook: take the fields off a module's own parameters."""
        mine = set(self._params())
        for param in owned_parameters(module).values():
            taken = self._take(param)
            if taken is None:
                continue
            if (own := self._gathered.get(param, param)) in mine:
                # bfloat16 or half factors would lose the average and break the inverse
                dtype = torch.promote_types(own.dtype, torch.float32)
                self._accumulation.this_backward[own] = ([t.detach().to(dtype) for t in taken[0]], taken[1])
            else:
                self._accumulation.foreign += 1

    def _sampler(self) -> torch.Generator:
        """A generator for the Monte-Carlo samples of one ``curvature()``."""
        ranks = self._ranks()
        return self._samples.next(self._device(), 0 if ranks is None else ranks.rank)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the curvature that was collected with them."""
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(self.zero_grad, set_to_none)
        if self._accumulation.drop():
            self._tell_of_step_left_out()
        super().zero_grad(set_to_none)

    def _exchange(self, collected: Collected, ranks: Ranks, equal: dict[str, Any]) -> Collected:
        """The mean of the ranks' curvature.

        Args:
            collected: by this rank.
            ranks: the ranks.
            equal: numbers that must not differ between them.

        Raises:
            CurvoptError: on all ranks, for an error on one of them.
        """
        params, names, samples, who = self._params(), self._names(), self._samples, type(self).__name__
        sharding, dtype = self._sharding(), self.communication_dtype
        if sharding is None:
            refuse_sharded((who, name, p) for p, name in names.items())
        equal = equal | {"communication_dtype": str(dtype), "parameters": [list(param.shape) for param in params]}
        seed = -1 if samples.seed is None else samples.seed
        numbers = [collected.foreign, seed, samples.draws, collected.variables, collected.refused, collected.partial]
        forms, (foreign, seed, draws, variables, refused, partial, self._progress["empirical"], *norms) = ranks.union(
            collected.forms(params),
            list(names.values()),
            [*numbers, self._progress["empirical"], *self._norm_of_parameters()],
            equal | {"gradients": has_gradients(params)},
        )
        self._ranks_agree = True
        largest, smallest = (torch.tensor(abs(bits)).view(torch.float64).item() for bits in norms)
        if largest - smallest > DRIFT * largest:
            raise CurvoptError(
                f"{who}.step(): the ranks' parameters differ, with norms from {smallest:.6g} to {largest:.6g}. Train "
                "with DistributedDataParallel, which averages gradients, from equal parameters; or set "
                "optimizer.process_group, to None for a process that trains another model."
            )
        samples.seed, samples.draws = (None if seed < 0 else seed), draws
        collected.variables, collected.refused = variables, bool(refused)
        if foreign > 0 or (foreign == 0 and not forms and not refused):
            raise nothing_received(who, foreign)
        if forms and sharding is None:
            collected = collected.mean(forms, params, ranks, dtype)
        elif forms and sharding is not None:
            collected = sharding.mean(collected, forms, dtype)
        collected.partial = bool(partial)
        return collected
