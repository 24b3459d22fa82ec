"""One backward of the user and what is computed along with it.

First order: the gradient that arrives at each use is its own column. Second order: when the backward reaches an
extended loss, columns of the root of the loss Hessian are pulled back by autograd to the outputs of all uses, a few
columns at a time, and local rules turn what arrives into Jacobians of parameters. Extensions that ask for the same
columns share one sweep. A column that is the gradient times a factor for each sample is not pulled back: the gradient
arrives anyway.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from curvopt.core import costs
from curvopt.core.averaged import averaged_jacobians
from curvopt.core.compare import allclose
from curvopt.core.derivatives.losses import LossCurvature
from curvopt.core.derivatives.rules import AffineRule
from curvopt.core.entries import Entry
from curvopt.core.functional import of_each_sample
from curvopt.core.graph import Graph, leaves_behind
from curvopt.core.jacobians import Computed, Dense, Jacobian, cast, combine, of_samples
from curvopt.core.residuals import (
    WRONG_THREE_TIMES,
    WRONG_TWICE,
    Modify,
    Wrong,
    cut,
    is_complex,
    leads_further_to,
    leads_to,
    leaf_of,
    lone_biases,
    nonlinear_operations,
    polarize,
    precisions,
    pull,
    pull_each,
    residual_columns,
    unit_vectors,
    walk,
)
from curvopt.core.samples import along, find_samples, only, unaligned
from curvopt.core.turned import carries, multiples, slope_at, turn
from curvopt.core.uses import Head, Loss, Packed, TermUse, Use, hears_itself, is_hooked, samples_first
from curvopt.errors import CurvoptError, CurvoptWarning

if TYPE_CHECKING:
    from curvopt.extensions.base import Extension

#: Entries of parameters beyond which their exact Hessian by double backward is worth a warning.
DIRECT_ENTRIES = 2000
_columns_per_sweep: int | None = None


def set_columns_per_sweep(columns: int | None) -> None:
    """Override how many columns of the loss Hessian's root are pulled back, or kept to be multiplied, together.

    Args:
        columns: a positive number (memory grows with it), or ``None`` to choose from the sizes of the network.

    Raises:
        ValueError: for a number below one.
    """
    global _columns_per_sweep
    if columns is not None and columns < 1:
        raise ValueError(f"set_columns_per_sweep: expected a positive number or None, got {columns}.")
    _columns_per_sweep = columns


@dataclass(frozen=True)
class Gradient:
    """The gradient itself travels backwards: one column, whatever the loss."""


@dataclass(frozen=True)
class Exact:
    """All columns of the root of the loss Hessian.

    Args:
        by_entries: of the usual root, which may have more columns than it needs.
    """

    by_entries: bool = field(default=False, kw_only=True)

    def total(self, loss: LossCurvature, rows: int) -> int:
        """Number of columns."""
        return loss.columns * rows

    def chunks(self, loss: LossCurvature, size: int, rows: int) -> Iterator[Tensor]:
        """Columns ``[v, *z.shape]``, at most ``size`` at a time; ``rows`` of z belong to each sample."""
        for row in range(rows):
            for start in range(0, loss.columns, size):
                columns = loss.root(start, min(start + size, loss.columns))
                if rows > 1:
                    # the network may mix the rows of a sample: one column for each of them
                    own = torch.zeros_like(columns)
                    own[:, row::rows] = columns[:, row::rows]
                    columns = own
                yield columns


@dataclass(frozen=True)
class Hessian(Exact):
    """All columns of the root of the loss Hessian, then weighted columns of what nonlinear operations add.

    Args:
        modify: replace what each operation adds by its positive part (``"clip"``) or absolute value (``"abs"``).
    """

    modify: Modify = None


@dataclass(frozen=True)
class MonteCarlo:
    """Random columns whose outer products average to the loss Hessian."""

    samples: int = 1
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Refuse a number that is no number of samples."""
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"mc_samples: expected a positive integer, got {self.samples!r}.")

    def total(self, loss: LossCurvature, rows: int) -> int:
        """Number of columns."""
        return self.samples

    def chunks(self, loss: LossCurvature, size: int, rows: int) -> Iterator[Tensor]:
        """Columns ``[v, *z.shape]``, at most ``size`` at a time, all drawn at once so that chunking changes nothing."""
        yield from (loss.sample(self.samples, self.generator) / self.samples**0.5).split(size)


@dataclass(frozen=True)
class Empirical:
    """One column: each prediction's own gradient, at the target that it has."""


@dataclass(frozen=True)
class Averaged:
    """One matrix for all samples, averaged layer by layer."""


class Backward(NamedTuple):
    """How autograd was called.

    Attributes:
        accumulates: whether gradients are accumulated in leaves.
        partial: whether it goes to some inputs only, and so perhaps past some uses of a parameter.
        plain: whether it accumulates, goes to all leaves and builds no graph of its own, so that it may bring columns.
        again: whether it builds a graph of its own, by which fields may be differentiated.
        alone: whether one context only is told of it, so that gradients of parameters may come from there.
        batched: whether several vectors are pulled back at once (``is_grads_batched=True``).
    """

    accumulates: bool
    partial: bool
    plain: bool
    again: bool
    alone: bool
    batched: bool


@dataclass
class Brought:
    """A column that the gradient brings, times a factor for each sample.

    Attributes:
        factors: of the samples, ``[N]``.
        extensions: which ask for it.
        columns: how many they see, with it.
        sums: whether gradients that are spared come from its products.
        parts: what has arrived at some uses of a parameter.
    """

    factors: Tensor
    extensions: list[Extension]
    columns: int
    sums: bool = False
    parts: dict[nn.Parameter, list[Jacobian]] = field(default_factory=dict)


def _without_autocast(method: Callable[..., None]) -> Callable[..., None]:
    """Mixed precision is for the network; quantities are computed in the precision of their parameters."""

    @wraps(method)
    def call(self: Pass, *args: Any) -> None:
        if not torch.is_autocast_enabled(self.device):
            return method(self, *args)
        with torch.autocast(self.device, enabled=False):
            return method(self, *args)

    return call


class Pass:
    """One backward: collects what arrives, reduces it as soon as it is whole, and sets the fields.

    Args:
        extensions: the active extensions.
        extension_hook: called with each module whose fields are complete.
        graph: the graph of this backward.
        how: how the backward was called.
        counted: losses that reach none of these do not count in the weight; ``None`` if all do.

    Raises:
        CurvoptError: for every request that this graph would answer wrongly, before anything is computed.
    """

    def __init__(
        self,
        extensions: Sequence[Extension],
        extension_hook: Callable[[nn.Module], None] | None,
        graph: Graph,
        how: Backward,
        counted: set[Tensor] | None = None,
    ):
        """Check the request against the graph, and find out where the samples lie."""
        self.extensions, self.extension_hook, self.graph, self.partial = extensions, extension_hook, graph, how.partial
        self.first_order = [e for e in extensions if isinstance(e.columns, Gradient)]
        self.second_order = [e for e in extensions if not isinstance(e.columns, Gradient)]
        self.reads_inputs_once = all(e.reads_inputs_once for e in extensions)
        self.parts: dict[nn.Parameter, list[Jacobian]] = {}
        self.totals: dict[tuple[nn.Parameter, Extension], Any] = {}
        self.terms: dict[nn.Parameter, Tensor] = {}
        #: How many losses of a mean prediction were differentiated (see `LossCurvature.weights`), for second order.
        self.weight: Tensor | float = 0.0
        #: The largest number of variables of a prediction (see `LossCurvature.variables`).
        self.variables = 1
        self.done: dict[nn.Parameter, set[Extension]] = {}
        self.hooked: set[nn.Module] = set()
        self.create_graph = False
        self.device = next(iter(graph.owners)).device.type if graph.owners else "cpu"
        self.losses_left = len(graph.losses)
        self.losses_of_others = set() if counted is None else self._losses_of_others(counted)
        if how.batched:
            raise CurvoptError(
                f"{fields_of(extensions)}: is_grads_batched=True pulls several vectors back at once, while fields are "
                "those of one backward; call torch.autograd.grad for each vector, or for all of them inside of an "
                "empty `with backpack():`, which asks for no fields."
            )
        self._check(graph)
        if how.again and counted is None:  # nobody differentiates what optimizers take
            self._check_derivatives(graph)
        with self._named():
            self.samples = find_samples(graph, graph.heads)
        self.entries = [entry for entry in graph.entries.values() if entry.parameters]
        for entry in self.entries:
            entry.steps = self.samples.steps.get(entry.use)
        self.entries_of = Counter(p for entry in self.entries for p in entry.parameters.values())
        #: Columns that the gradient brings, and whether there may be some.
        self.brought: list[Brought] = []
        self.may_bring = how.plain and self._may_bring()
        #: Parameters whose gradients come from here, as sums of products, and where the backward has to come for them.
        self.spared = dict(self._spared() if how.plain and how.alone else ())
        self.awaited = frozenset(self.awaiting())
        #: Hooks on nodes where weights are computed.
        self.settling: dict[tuple[nn.Parameter, GradientEdge], RemovableHandle] = {}
        for extension in extensions:
            self._check_subsampling(extension, self.samples.N)
        if self.samples.unaligned and graph.heads is not graph.losses:
            nodes = {head.edge.node for head in graph.heads if head.edge is not None}
            # what arrives at one must not hold what arrives at another
            if not nodes or any(leads_further_to(node, nodes) for node in nodes):
                self._refuse_nonlinear(graph)
        averaged = [e for e in extensions if isinstance(e.columns, Averaged)]
        elsewhere = [*self.samples.unaligned, *self.samples.steps]
        if elsewhere and averaged:
            where = ", ".join(use.describe() for use in elsewhere)
            raise CurvoptError(
                f"{where}: the samples meet, or trade places, on the way to the loss, where "
                f"{fields_of(averaged)} is not defined; use KFAC or KFLR."
            )

    def begin(self) -> None:
        """The backward has begun."""
        self.create_graph = torch.is_grad_enabled()

    # What the backward tells

    def listening(self) -> list[Entry]:
        """The uses that need the gradient of their outputs."""
        if not self.first_order and not self.may_bring:
            return []
        return [entry for entry in self.entries if entry.use not in self.samples.unaligned]

    @cached_property
    def parts_of(self) -> Counter[nn.Parameter]:
        """How many parts the gradient of each parameter comes in, of which each head gives one to an unaligned use."""
        heads = [head.edge.node for head in self.graph.heads if head.edge is not None]
        found: Counter[nn.Parameter] = Counter()
        for entry in self.entries:
            unaligned = entry.use in self.samples.unaligned
            number = sum(leads_to(head, entry.nodes) for head in heads) if unaligned else len(entry.edges)
            for p in entry.parameters.values():
                found[p] += number
        return found

    def awaiting(self) -> list[nn.Parameter]:
        """The parameters whose own gradient is known to be the sum over samples, where a quantity wants that, too."""
        wanted = any(e.uses_gradient for e in self.first_order)
        if not wanted or self.partial or self.graph.terms or self.graph.outside:
            return []
        # what is computed from a parameter is pulled back before the backward has passed and freed it
        computed = {p for entry in self.entries if entry.rule.source is not None for p in entry.parameters.values()}
        return [p for p in self.graph.owners if not p._backward_hooks and p not in self.spared and p not in computed]

    def _spared(self) -> Iterator[tuple[nn.Parameter, list[GradientEdge]]]:
        """Parameters whose gradient costs less as a sum of what is multiplied out here, and the nodes of their use."""
        graph, leaves = self.graph, set(self.graph.leaves)
        if graph.terms or graph.outside or graph.custom or torch.is_anomaly_enabled() or _in_several_processes():
            return
        if not all(leaf.requires_grad for leaf in leaves):  # autograd does not take them for inputs
            return
        for entry in self.listening():
            weight, use = entry.parameters.get("weight"), entry.use
            if weight is None or not isinstance(entry.rule, AffineRule):
                continue
            O = weight.shape[0]  # noqa: E741
            I = weight.numel() // O  # noqa: E741
            S = (use.input if entry.rule.transposed else use.shapes[0]).numel() // max(self.samples.N * O, 1)
            if not costs.spares_gradient(S, O, I, self.device):
                continue
            parameters = list(entry.parameters.values())
            own = all(p in leaves and self.entries_of[p] == 1 for p in parameters)
            if not own or not self._forms_products(S, O, I):
                continue
            nodes = graph.inside(entry)
            dtypes = {x.dtype for x in (use.input, nodes[0]._input_metadata[0], *parameters)}
            if dtypes not in ({torch.float32}, {torch.float64}) or is_hooked(parameters, nodes):
                continue
            # those that meet an input: the output may lie behind a view, and what it is a view of has to be passed, too
            passed = [GradientEdge(node, 0) for node in nodes if node is nodes[0] or len(node.next_functions) > 1]
            yield from ((p, passed) for p in parameters)

    def _forms_products(self, S: int, O: int, I: int) -> bool:  # noqa: E741
        """Whether products of the gradient, or of a column that it may bring, are multiplied out."""
        if self.first_order or not self.may_bring:
            return any(e.forms_products(S, O, I) for e in self.first_order)
        (loss,) = self.graph.losses
        exact = [e for e in self.second_order if isinstance(e.columns, Exact)]
        V = prod(loss.input.shape[1:])
        brings = self._brings(Exact(), V) and not any(e.keeps_columns for e in exact)
        return brings and any(e.forms_products(S, O, I, V) for e in exact)

    def _may_bring(self) -> bool:
        """Whether the gradient may be a column, and is worth to be one."""
        if len(self.graph.losses) != 1 or self.samples.unaligned:
            return False
        ((loss, edge),) = self.graph.losses.items()
        entries = prod(loss.input.shape[1:])
        wanted = any(self._brings(e.columns, V) for e in self.second_order for V in (entries - 1, entries))
        return wanted and not self.graph.mixing and carries(edge, loss, self.entries, self.samples.N)

    def _brings(self, columns: Any, V: int) -> bool:
        """Whether the gradient is worth to be had for one of some columns, if the exact root has V."""
        if isinstance(columns, Empirical) or self.device != "cpu":  # elsewhere, to ask about numbers is to wait
            return isinstance(columns, Empirical)
        # samples are multiples of the only column
        one_less = isinstance(columns, Exact) or (isinstance(columns, MonteCarlo) and V == 1)
        return one_less and costs.gradient_for_column(V, self._chunk_size)

    def _losses_of_others(self, parameters: set[Tensor]) -> set[Loss]:
        """The losses of a sum that reach none of some parameters."""
        losses = self.graph.losses
        if len(losses) == 1 or parameters.issuperset(self.graph.leaves):
            return set()
        return {
            loss for loss, edge in losses.items() if not any(leaf_of(node) in parameters for node in walk([edge.node]))
        }

    @_without_autocast
    def gradient(self, use: Use, index: int, grad: Tensor) -> None:
        """The gradient of one output of a use: reduce it, or keep it until the parameter's other uses have theirs."""
        entry = self.graph.entries[use]
        summed = any(brought.sums for brought in self.brought)
        itself = self.first_order or not (summed or self.spared.keys().isdisjoint(entry.parameters.values()))
        for brought in self.brought:
            self._bring(brought, entry, index, grad, last=not itself and brought is self.brought[-1])
        if not itself:
            return
        grads = [grad.unsqueeze(0) if i == index else None for i in range(len(use.shapes))]
        for p, jacobian in self._jac_t(entry, grads, self.samples.N, last=True):
            parts = self.parts.setdefault(p, [])
            parts.append(jacobian)
            if not self.graph.terms and len(parts) == self.parts_of[p] and p not in self.awaited:
                self._reduce_gradient(p)
            elif isinstance(jacobian, Computed) and (p, jacobian.source) not in self.settling:
                hook = partial(self._settle, p, jacobian.source)
                self.settling[p, jacobian.source] = jacobian.source.node.register_prehook(hook)

    def _bring(self, brought: Brought, entry: Entry, index: int, grad: Tensor, last: bool) -> None:
        """The same for a column."""
        axis = entry.axis(index)
        assert axis is not None
        column = (grad * along(brought.factors, axis, grad)).unsqueeze(0)
        columns = [column if i == index else None for i in range(len(entry.use.shapes))]
        for p, jacobian in self._jac_t(entry, columns, self.samples.N, last):
            parts = brought.parts.setdefault(p, [])
            parts.append(jacobian)
            if len(parts) == self.parts_of[p]:
                self._reduce_brought(p, brought)

    def _reduce_brought(self, p: nn.Parameter, brought: Brought) -> None:
        jacobian = combine(brought.parts.pop(p))
        jacobian.sums, jacobian.shares = brought.sums and p in self.spared, 1 / brought.factors.to(p)
        self._reduce_columns(p, [jacobian], None, brought.columns, brought.extensions)
        if jacobian.sums:
            summed = jacobian.gradient
            self._accumulate(p, jacobian.expand(jacobian.shares.view(1, 1, -1))[0] if summed is None else summed)
        for extension in () if self.graph.terms else brought.extensions:
            self._complete(p, extension)

    def _settle(self, p: nn.Parameter, source: GradientEdge, grads: object) -> None:
        """The backward has come to where a weight was computed: pull back what waits before that is freed."""
        if not hears_itself():  # in the user's backward
            for i, part in enumerate(parts := self.parts.get(p, [])):
                if isinstance(part, Computed) and part.source == source:
                    parts[i] = part.settled()

    @_without_autocast
    def accumulated(self, p: nn.Parameter, grad: Tensor) -> None:
        """The gradient of a parameter that was awaited: it is reduced with the sum over its samples known."""
        if p in self.parts:
            self._reduce_gradient(p, None if grad.is_sparse else grad)

    def term(self, use: TermUse, grad: Tensor) -> None:
        """A regularizer has been reached."""
        for p in use.parameters:
            self.terms[p] = self.terms.get(p, 0) + grad * use.weight

    @_without_autocast
    def head(self, head: Head, grad: Tensor) -> None:
        """Where the samples are known has been reached: pull them back one by one to where they lie elsewhere."""
        if self.first_order and head.edge is not None:
            slope = head.slope(grad).to(head.input.dtype).unsqueeze(0)

            def visit(p: nn.Parameter, jacobian: Jacobian) -> None:
                self.parts.setdefault(p, []).append(jacobian)

            self._jacobians([head.edge], [slope], visit, self.samples.unaligned, axis=1 + head.axis)

    @_without_autocast
    def loss(self, use: Loss, grad: Tensor) -> None:
        """A loss has been reached: pull the columns of its Hessian's root back, and what nonlinear operations add."""
        if use.edge is None:
            return
        if self.second_order:
            with self._named():
                curvature, scale = use.curvature(grad)
            assert curvature.weights is not None
            weights = curvature.weights * scale.square()
            if use not in self.losses_of_others:
                self.weight = self.weight + weights.detach().sum()
                self.variables = max(self.variables, curvature.variables)
            self._gauss_newton(use, use.edge, curvature, scale, grad)
            empirical = [e for e in self.second_order if isinstance(e.columns, Empirical)]
            if empirical:
                # a prediction that weighs nothing has no gradient, either
                factors = 1 / weights.clamp(min=torch.finfo(weights.dtype).tiny).sqrt()
                if self.may_bring and len(factors) == factors.numel():
                    self.brought.append(Brought(factors.flatten(), empirical, 1))
                else:
                    column = use.slope(grad) * factors
                    self._sweep([use.edge], [column.to(use.input.dtype).unsqueeze(0)], None, empirical)
            for columns in dict.fromkeys(e.columns for e in self.second_order):
                if isinstance(columns, Hessian):
                    extensions = [e for e in self.second_order if e.columns == columns]
                    try:
                        self._residuals(use, grad, columns.modify, extensions)
                    except (CurvoptError, torch.OutOfMemoryError):
                        raise
                    except RuntimeError as error:
                        raise CurvoptError(
                            f"{fields_of(extensions)}: an operation of the network has no second derivative in PyTorch "
                            f"({error}); use a GGN quantity, or for attention run the forward pass under "
                            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
                        ) from error
        self.losses_left -= 1
        if self.losses_left == 0 and not self.graph.terms:
            awaiting = {e for brought in self.brought for e in brought.extensions}
            for p, extension in list(self.totals):
                if extension not in awaiting:
                    self._complete(p, extension)

    @_without_autocast
    def finish(self) -> None:
        """The backward is over: reduce what is left, set the remaining fields and forget everything shared."""
        with torch.set_grad_enabled(self.create_graph):
            for p in list(self.parts):
                if not self.partial or len(self.parts[p]) == self.parts_of[p]:
                    self._reduce_gradient(p)
            for brought in self.brought:
                for p in list(brought.parts):
                    self._reduce_brought(p, brought)
            for p, extension in list(self.totals):
                self._complete(p, extension)
        self.release()

    def release(self) -> None:
        """Drop what uses cached for this backward."""
        for use in self.graph.entries:
            use.cache.clear()
        for handle in self.settling.values():
            handle.remove()
        costs.forget_unused()

    def undo(self) -> None:
        """Take back the fields that a failed backward has set."""
        for p, extensions in self.done.items():
            for extension in extensions:
                if hasattr(p, extension.field):
                    delattr(p, extension.field)
        self.release()

    # Computation

    def _gauss_newton(
        self, use: Loss, edge: GradientEdge, curvature: LossCurvature, scale: Tensor, grad: Tensor
    ) -> None:
        """Columns of the root of a loss' Hessian, each kind once for all extensions that ask for it."""
        groups: dict[Exact | MonteCarlo | Averaged, list[Extension]] = {}
        by_entries = any(isinstance(e.columns, Exact) and e.columns.by_entries for e in self.second_order)
        curvature = curvature.by_entries() if by_entries else curvature
        for e in self.second_order:
            if isinstance(e.columns, Empirical):
                continue
            columns: Any = Exact() if isinstance(e.columns, Exact) else e.columns
            groups.setdefault(columns, []).append(e)
        several = any(isinstance(e.columns, (Gradient, Empirical, Hessian)) for e in self.extensions)
        only = len(groups) == 1 and self.losses_left == 1 and not several
        for columns, extensions in groups.items():
            if isinstance(columns, Averaged):
                for p, jacobian in averaged_jacobians(edge, curvature, scale, self.graph, self.entries, self.samples.N):
                    self._update(p, jacobian, extensions)
                continue
            rows = len(use.input) // self.samples.N
            left = total = columns.total(curvature, rows)
            others = self._others(edge, columns, curvature, scale, grad, extensions)
            for chunk in columns.chunks(curvature, self._chunk_size, rows) if others is None else others:
                left -= len(chunk)
                vectors = cast(chunk * scale, use.input.dtype)
                self._sweep([edge], [vectors], None, extensions, columns=total, last=only and left == 0)

    def _others(
        self,
        edge: GradientEdge,
        columns: Exact | MonteCarlo,
        curvature: LossCurvature,
        scale: Tensor,
        grad: Tensor,
        extensions: list[Extension],
    ) -> Sequence[Tensor] | None:
        """The columns beside one that the gradient brings; ``None`` if it brings none."""
        brings = self.may_bring and self._brings(columns, curvature.columns)
        if not brings or any(e.keeps_columns for e in extensions):
            return None
        (of_loss,) = self.graph.losses.values()
        slope = slope_at(of_loss, edge, grad)
        turned = None if slope is None else turn(curvature, slope / scale, any(e.per_sample for e in extensions))
        if turned is None:
            return None
        factors, others = turned
        if isinstance(columns, MonteCarlo):  # multiples of the only column
            (drawn,) = columns.chunks(curvature, columns.samples, 1)
            factors = factors * multiples(drawn, curvature)
        sums = not self.first_order and isinstance(columns, Exact) and bool((factors > 0).all())
        self.brought.append(Brought(factors, extensions, len(others) + 1, sums))
        return others.split(self._chunk_size) if len(others) else ()

    def _jac_t(
        self, entry: Entry, grads: list[Tensor | None], N: int, last: bool = False
    ) -> Iterator[tuple[nn.Parameter, Jacobian]]:
        dtype = next(iter(entry.parameters.values())).dtype
        grads = [None if grad is None else cast(grad, dtype) for grad in grads]
        try:
            entry.use.check_inputs()
            with self.graph.holding(entry):
                use = entry.use.in_precision(dtype)
                if entry.single:
                    use, grads = use.batched(), [None if grad is None else grad.unsqueeze(1) for grad in grads]
                if entry.steps is not None:
                    use = use.samples_first(N, entry.steps)
                    grads = [None if grad is None else samples_first(N, entry.steps, grad, 1) for grad in grads]
                jacobians = entry.rule.jac_t(use, grads, list(entry.parameters), N)
        except CurvoptError as error:
            raise self._naming_fields(error) from error
        if last:
            entry.use.cache.clear()  # patches go with the Jacobians, layer by layer
        for name in list(jacobians):
            jacobian = jacobians.pop(name)
            jacobian.origin = (entry.use,)
            if isinstance(entry.steps, Packed):
                jacobian.set_lengths(entry.steps.lengths)
            if self.reads_inputs_once:
                jacobian.share_no_patches()
            yield entry.parameters[name], jacobian

    def _reduce_gradient(self, p: nn.Parameter, total: Tensor | None = None) -> None:
        jacobian = combine(self.parts.pop(p))
        if p in self.terms:
            share = self.terms[p] * p / jacobian.N
            jacobian = combine([jacobian, Dense(share.expand(1, jacobian.N, *p.shape))])
        jacobian.gradient, jacobian.sums = total, p in self.spared
        self._update(p, jacobian, self.first_order)
        if jacobian.sums:
            self._accumulate(p, jacobian.sum_batch()[0] if jacobian.gradient is None else jacobian.gradient)
        for extension in self.first_order:
            self._complete(p, extension)

    @staticmethod
    def _accumulate(p: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of a parameter as autograd does, which takes longer."""
        if p._backward_hooks or p._post_accumulate_grad_hooks:  # since the backward began
            engine = torch.autograd.Variable._execution_engine  # contexts are told of what comes by torch.autograd
            engine.run_backward((p,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif p.grad is None:
            p.grad = torch.empty_like(p, dtype=getattr(p, "grad_dtype", None)).copy_(gradient)
        else:
            p.grad = p.grad.add_(gradient) if p.grad.layout == torch.strided else p.grad + gradient

    def _jacobians(
        self,
        outputs: list[GradientEdge],
        vectors: list[Tensor],
        visit: Callable[[nn.Parameter, Jacobian], None],
        uses: Collection[Use] | None = None,
        last: bool = False,
        axis: int = 1,
    ) -> None:
        """Jacobian products of vectors ``[v, *out]`` at the outputs, use by use; nothing where nothing arrives.

        Args:
            outputs: where the vectors are.
            vectors: one tensor for each output.
            visit: called with each of them.
            uses: the uses asked for, ``None`` for all.
            last: no vectors follow, so what is shared among them may go.
            axis: along which the vectors have the samples.
        """
        N, unaligned, met = self.samples.N, self.samples.unaligned, self.samples.met
        if met:
            heads = {head.edge.node for head in self.graph.heads if head.edge is not None}
            met = {} if torch.is_grad_enabled() or any(edge.node not in heads for edge in outputs) else met

        def arrived(entry: Entry, grads: list[Tensor | None]) -> None:
            for p, jacobian in self._jac_t(entry, grads, N, last):
                visit(p, jacobian)

        wanted = [entry for entry in self.entries if uses is None or entry.use in uses]
        self._arrivals(outputs, vectors, [entry for entry in wanted if entry.use not in unaligned], arrived)
        near = [entry for entry in wanted if entry.use in met]
        far = [entry for entry in wanted if entry.use in unaligned and entry.use not in met]
        if not near and not far:
            return
        columns: dict[Entry, list[Tensor | None]] = {}  # of all samples, [v N, *out]
        places = list(dict.fromkeys(place for entry in near for place in met[entry.use]))
        if places:
            nodes = list(dict.fromkeys(node for node, _ in places))
            there = zip(nodes, pull(outputs, [GradientEdge(node, 0) for node in nodes], vectors), strict=True)
            reached = {node: found for node, found in there if found is not None}
            places = [(node, i) for node, i in places if node in reached]
            below = [GradientEdge(*node.next_functions[i]) for node, i in places]  # type: ignore[arg-type]
            if places:
                passed = [of_each_sample(node, i, reached[node], N) for node, i in places]
                self._arrivals(below, passed, near, columns.__setitem__)
        one_by_one: dict[Entry, list[list[Tensor | None]]] = {}
        for n in range(N) if far else ():
            alone = [only(v, axis, n, N) for v in vectors]
            self._arrivals(outputs, alone, far, lambda entry, grads: one_by_one.setdefault(entry, []).append(grads))
        for entry, found in one_by_one.items():
            columns[entry] = [_stacked(grads) for grads in zip(*found, strict=True)]
        for entry in [*far, *near]:
            if entry not in columns:  # nothing arrives: zeros at one output
                if not any(leads_to(edge.node, entry.nodes) for edge in outputs):
                    continue  # of another forward pass, whose graph may be gone
                first = min(entry.edges)
                columns[entry] = [None] * len(entry.use.shapes)
                columns[entry][first] = vectors[0].new_zeros(len(vectors[0]) * N, *entry.use.shapes[first])
            for p, jacobian in self._jac_t(entry, columns.pop(entry), 1):
                visit(p, of_samples(jacobian, N))

    def _arrivals(
        self,
        outputs: list[GradientEdge],
        vectors: list[Tensor],
        entries: list[Entry],
        visit: Callable[[Entry, list[Tensor | None]], None],
    ) -> None:
        """What arrives at each output of each use, ``[v, *out]``, once it is there for all of them; if it does."""
        places = [(entry, index) for entry in entries for index in entry.edges]
        waiting: dict[Entry, list[Tensor | None]] = {}

        def arrived(i: int, grad: Tensor) -> None:
            entry, index = places[i]
            grads = waiting.setdefault(entry, [None] * len(entry.use.shapes))
            grads[index] = grad
            if sum(grad is not None for grad in grads) == len(entry.edges):
                visit(entry, waiting.pop(entry))

        together = len(vectors[0]) > 1 or self._chunk_size > 1
        pull_each(outputs, [entry.edges[index] for entry, index in places], vectors, arrived, together)
        for entry in list(waiting):
            visit(entry, waiting.pop(entry))

    def _sweep(
        self,
        outputs: list[GradientEdge],
        vectors: list[Tensor],
        weights: Tensor | None,
        extensions: Sequence[Extension],
        skip: Collection[nn.Parameter] = (),
        columns: int | None = None,
        last: bool = False,
    ) -> None:
        """Pull vectors ``[v, *out]`` back to all uses and update the totals of every parameter not in ``skip``."""
        parts: dict[nn.Parameter, list[Jacobian]] = {}

        def reduce(p: nn.Parameter) -> None:
            self._reduce_columns(p, parts.pop(p), weights, columns, extensions)

        def visit(p: nn.Parameter, jacobian: Jacobian) -> None:
            if p not in skip:
                parts.setdefault(p, []).append(jacobian)
                del jacobian
                if len(parts[p]) == self.entries_of[p]:
                    reduce(p)

        self._jacobians(outputs, vectors, visit, last=last)
        for p in list(parts):
            reduce(p)

    def _reduce_columns(
        self,
        p: nn.Parameter,
        parts: list[Jacobian],
        weights: Tensor | None,
        columns: int | None,
        extensions: Sequence[Extension],
    ) -> None:
        jacobian = combine(parts)
        jacobian.weights, jacobian.columns = None if weights is None else weights.to(p), columns
        jacobian.kept = _columns_per_sweep or costs.columns_to_keep(self._column_entries, self.device)
        self._update(p, jacobian, extensions)

    def _update(self, p: nn.Parameter, jacobian: Jacobian, extensions: Sequence[Extension]) -> None:
        jacobian.parameter = p
        for extension in extensions:
            if (p, extension) not in self.totals:
                vars(p).pop(extension.field, None)  # its memory is used again
            self.totals[p, extension] = extension.update(self.totals.get((p, extension)), jacobian)

    def _residuals(self, use: Loss, grad: Tensor, modify: Modify, extensions: Sequence[Extension]) -> None:
        """What nonlinear operations between the loss and the parameters add to the curvature."""
        assert use.edge is not None
        self._refuse_wrong(WRONG_TWICE, use.edge.node, f"{fields_of(extensions)} cannot be had", "use a GGN quantity")
        N, entries, size = self.samples.N, self.entries, self._chunk_size
        # a parameter used twice, or in a way that is not linear in it, is met by more than the operations after it
        uses: dict[nn.Parameter, int] = {}
        for entry in entries:
            for p in entry.parameters.values():
                uses[p] = uses.get(p, 0) + (len(entry.edges) if entry.rule.linear else 2)
        direct = {p for p, count in uses.items() if count > 1}
        nodes = {
            e.node
            for entry in entries
            for e in entry.edges.values()
            if not direct.issuperset(entry.parameters.values())
        }
        operations = nonlinear_operations(use.edge.node, nodes) if nodes else []
        inputs = [edge for operation in operations for edge in operation.inputs]
        if any(is_complex(edge.node, edge.output_nr) for edge in inputs) or (
            inputs and unaligned(N, [use], [(i, edge, 0) for i, edge in enumerate(inputs)])[0]
        ):
            # operations on complex numbers, or that do not see the samples one after the other: differentiate the
            # gradient again instead
            direct, operations = set(uses), []
        if not operations and not direct:
            return
        dropped = leaves_behind(lone_biases(use.edge.node)) if direct else set()
        for p in direct & dropped:
            raise CurvoptError(
                f"{self.graph.name(p)}: PyTorch's second derivative of norms with a bias and no weight is wrong, so "
                f"{fields_of(extensions)} cannot be had; add the bias by `+`, or use a GGN quantity."
            )
        slope = use.slope(grad).to(use.input.dtype)
        outputs = [GradientEdge(op.node, nr) for op in operations for nr in op.outputs]
        arrived = iter(pull([use.edge], outputs, [slope.unsqueeze(0)]) if outputs else ())
        for operation in operations:
            grads = [next(arrived) for _ in operation.outputs]
            reached = [nr for nr, g in zip(operation.outputs, grads, strict=True) if g is not None]
            present = [g[0] for g in grads if g is not None]
            if present:
                for columns in residual_columns(operation._replace(outputs=reached), present, N, size, modify):
                    self._sweep(columns.edges, columns.vectors, columns.weights, extensions, direct)
        if direct:
            self._direct(use, slope, list(direct), modify, extensions)

    def _direct(
        self,
        use: Loss,
        slope: Tensor,
        parameters: list[nn.Parameter],
        modify: Modify,
        extensions: Sequence[Extension],
    ) -> None:
        """The same for single parameters by differentiating the gradient again, a column for each of their entries."""
        if modify is not None:
            raise CurvoptError(
                f"{self.graph.name(parameters[0])}: {fields_of(extensions)} is only defined for parameters that are "
                "used once and enter linearly; use HMP or GGNMP."
            )
        entries = sum(p.numel() for p in parameters)
        if entries > DIRECT_ENTRIES:
            warnings.warn(
                f"{fields_of(extensions)}: {entries} parameter entries ({self.graph.name(parameters[0])}, ...) are "
                "used several times or nonlinearly; their exact Hessian takes one double backward for each entry.",
                CurvoptWarning,
                stacklevel=2,
            )
        assert use.edge is not None
        N, size = self.samples.N, self._chunk_size
        samples = range(N) if any(e.per_sample for e in extensions) else [None]
        with torch.no_grad():  # of all: a parameter's own gradient may be nothing but rounding errors, too
            reached = pull([use.edge], parameters, [slope.detach().unsqueeze(0)])
        largest = torch.stack([slope.new_zeros(()), *(g.abs().max().to(slope) for g in reached if g is not None)]).max()
        eps = max(torch.finfo(dtype).eps for dtype in precisions([use.edge.node]))
        for p in parameters:
            # where second derivatives are zero, they come out as rounding errors
            noise = 100 * eps * largest.to(p) / p.detach().abs().max().clamp(min=torch.finfo(p.dtype).tiny)
            images = []
            for n in samples:
                seed = slope if n is None else only(slope, 0, n, N)
                with torch.enable_grad():
                    gradient = pull([use.edge], [p], [seed.unsqueeze(0)])[0]
                    gradient = None if gradient is None else gradient[0]
                image = torch.zeros(p.numel(), p.numel(), dtype=p.dtype, device=p.device)
                if gradient is not None and gradient.requires_grad:
                    units = torch.eye(p.numel(), dtype=p.dtype, device=p.device).reshape(-1, *p.shape).split(size)
                    with cut([seed.grad_fn]):
                        pulled = [pull([gradient], [p], [unit])[0] for unit in units]
                    image = torch.cat(
                        [torch.zeros_like(u) if h is None else h for h, u in zip(pulled, units, strict=True)]
                    )
                images.append(image.reshape(p.numel(), p.numel()))
            products = torch.stack(images, 1)
            if not allclose(products, products.transpose(0, 2), 0, noise + 1e-2 * products.detach().abs().max()):
                raise CurvoptError(
                    f"{self.graph.name(p)}: PyTorch's second derivative of an operation on the way is wrong "
                    f"(its Hessian is not symmetric), so {fields_of(extensions)} cannot be had; use a GGN quantity."
                )
            units = unit_vectors(torch.arange(p.numel(), device=p.device), p.numel(), len(images), products)
            vectors, weights = polarize(units, products)
            jacobian = Dense(vectors.reshape(*vectors.shape[:2], *p.shape))
            jacobian.weights = weights
            self._update(p, jacobian, extensions)

    @cached_property
    def _chunk_size(self) -> int:
        """Columns to sweep together, from the activations that one column fills."""
        if _columns_per_sweep is not None:
            return _columns_per_sweep
        return costs.columns_at_once(self._column_entries, self.device)

    @cached_property
    def _column_entries(self) -> int:
        """Activations that one column fills."""
        return sum(prod(shape) for entry in self.entries for shape in entry.use.shapes)

    def _complete(self, p: nn.Parameter, extension: Extension) -> None:
        """Set one field; call the extension hook once all fields of a module's own parameters are there."""
        total = self.totals.pop((p, extension))
        if p in self.terms and extension in self.second_order:
            total = extension.regularize(total, self.terms[p], p, self.samples.N)
        setattr(p, extension.field, extension.finish(total))
        self.done.setdefault(p, set()).add(extension)
        module = self.graph.owners[p][0].use.owner
        if self.extension_hook is None or module in self.hooked:
            return
        wanted = {q for entry in self.entries if entry.use.owner is module for q in entry.parameters.values()}
        if all(len(self.done.get(q, ())) == len(self.extensions) for q in wanted):
            self.hooked.add(module)
            self.extension_hook(module)

    # Checks

    def _check(self, graph: Graph) -> None:
        if len(graph.entries) == len(graph.functional) and not graph.may_be_functional:
            raise CurvoptError(
                f"{fields_of(self.extensions)}: no extended module took part in this backward; call extend(model) "
                "before the forward pass (and outside of curvopt.disable()), before the first one if it is compiled. A "
                "backward that is not meant (of a penalty alone, say) goes inside of `with backpack():`. A "
                "torch.utils.checkpoint of the whole model needs use_reentrant=False."
            )
        if self.second_order and graph.nonlinear:
            self._refuse_nonlinear(graph)
        if self.second_order and not graph.losses:
            raise CurvoptError(
                f"{fields_of(self.second_order)} need the curvature of the loss, but no loss was recognised in this "
                "backward; use lossfunc = extend(nn.CrossEntropyLoss()) (or MSELoss, BCEWithLogitsLoss)."
            )
        for use in graph.losses:
            others = getattr(use, "others", ())
            if use.edge is None and any(other.requires_grad for other in others):
                raise CurvoptError(
                    f"{use.describe()}: only the first argument of a loss may depend on parameters; swap the arguments."
                )
            if self.second_order and use.edge is not None and use.input.dim() == 0:
                raise CurvoptError(
                    f"{use.describe()}: its input is a single number, but {fields_of(self.second_order)} need a row "
                    "for each sample; give the loss the outputs of all samples, not their mean (of a single sample, "
                    "unsqueeze(0) output and target)."
                )
        if graph.mixing:
            refused = [e for e in self.extensions if e.needs_independent_samples]
            if refused:
                mixing = next(iter(graph.mixing.values()))
                raise CurvoptError(
                    f"{mixing}: {fields_of(refused)} need independent samples, but train-mode batch norm "
                    "mixes them; call model.eval() or use a Monte-Carlo quantity (KFAC, DiagGGNMC)."
                )
        if graph.outside:
            warnings.warn(
                f"{fields_of(self.extensions)}: {', '.join(graph.outside)} also enter the loss by an added term (a "
                "regularizer?), which is in .grad but not in these quantities; write it as curvopt.L2Regularizer to "
                "have it in both.",
                CurvoptWarning,
                stacklevel=2,
            )

        if graph.weights:
            warnings.warn(
                f"{fields_of(self.extensions)}: {', '.join(graph.weights)} weigh the losses: they have gradients, but "
                "none of these quantities.",
                CurvoptWarning,
                stacklevel=2,
            )

    def _check_derivatives(self, graph: Graph) -> None:
        """Refuse to build a graph of fields by which they would be differentiated wrongly."""
        of_hessian = [e for e in self.second_order if isinstance(e.columns, Hessian)]
        others = [e for e in self.extensions if e not in of_hessian]
        for edge in graph.heads.values():
            for wrong, extensions in ((WRONG_TWICE, others), (WRONG_THREE_TIMES, of_hessian)):
                if extensions:
                    what = f"{fields_of(extensions)} cannot be differentiated"
                    self._refuse_wrong(wrong, edge.node, what, "call backward without create_graph")

    def _refuse_wrong(self, wrong: Wrong, root: Node, what: str, remedy: str) -> None:
        behind = leaves_behind(wrong.nodes([root]))
        for p in self.graph.owners:
            if p in behind:
                name = self.graph.name(p)
                raise CurvoptError(
                    f"{name}: PyTorch's {wrong.derivative} is wrong, so {what}; {wrong.instead}, or {remedy}."
                )

    @staticmethod
    def _check_subsampling(extension: Extension, N: int) -> None:
        missing = [n for n in extension.subsampling or () if not -N <= n < N]
        if missing:
            raise CurvoptError(
                f"{extension.field}: subsampling asks for sample {missing[0]}, but this batch has {N}; choose indices "
                f"from {-N} to {N - 1} for each batch, as the last one may be smaller."
            )

    def _refuse_nonlinear(self, graph: Graph) -> None:
        raise CurvoptError(
            f"{fields_of(self.extensions)}: the loss depends on the network's output by "
            f"{', '.join(dict.fromkeys(graph.nonlinear))}, which is no known loss; use an extended one, e.g. "
            "lossfunc = extend(nn.CrossEntropyLoss()), or for a loss of your own, of one tensor, extend(MyLoss(), "
            "loss=True), as the last operation (up to sums and factors, and outside of what torch.compile compiles), "
            "and call backward inside of an empty `with backpack():` on terms that quantities need not contain."
        )

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors inside name the fields that were asked for."""
        try:
            yield
        except CurvoptError as error:
            raise self._naming_fields(error) from error

    def _naming_fields(self, error: CurvoptError) -> CurvoptError:
        return CurvoptError(f"{fields_of(self.extensions)}: {error}")


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Vectors ``[v, *out]`` of each sample, as ``[v N, *out]``."""
    return None if grads[0] is None else torch.stack([grad for grad in grads if grad is not None], 1).flatten(0, 1)


def _in_several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def fields_of(extensions: Iterable[Extension]) -> str:
    """Names of the fields, for messages."""
    return ", ".join(e.field for e in extensions)
