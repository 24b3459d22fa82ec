"""One backward of the user and what is computed along with it.

First order: the gradient that arrives at each use is its own column. Second order: when the backward reaches an
extended loss, columns of the root of the loss Hessian are pulled back by autograd to the outputs of all uses, a few
columns at a time, and local rules turn what arrives into Jacobians of parameters. Extensions that ask for the same
columns share one sweep.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvopt.core.derivatives.losses import LossCurvature, curvature_of
from curvopt.core.graph import Entry, Graph
from curvopt.core.jacobians import Dense, Jacobian, combine
from curvopt.core.residuals import (
    Modify,
    Residual,
    cut,
    nonlinear_operations,
    polarize,
    pull,
    residual_columns,
    unit_vectors,
)
from curvopt.core.uses import LossUse, Use, describe, disable
from curvopt.errors import CurvoptError, CurvoptWarning

if TYPE_CHECKING:
    from curvopt.extensions.base import Extension

#: Activation entries that columns swept together may hold: together wins on small nets, one by one on large ones.
SWEEP_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
#: Entries of parameters beyond which their exact Hessian by double backward is worth a warning.
DIRECT_ENTRIES = 2000
_columns_per_sweep: int | None = None


def set_columns_per_sweep(columns: int | None) -> None:
    """Override how many columns of the loss Hessian's root are pulled back together.

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
    """All columns of the root of the loss Hessian."""

    def chunks(self, loss: LossCurvature, size: int, rows: int) -> Iterator[Tensor]:
        """Columns ``[v, *z.shape]``, at most ``size`` at a time; ``rows`` of z belong to each sample."""
        for start in range(0, loss.columns, size):
            columns = loss.root(start, min(start + size, loss.columns))
            if rows == 1:
                yield columns
                continue
            # the network may mix the rows of a sample: one column for each of them
            for row in range(rows):
                only = torch.zeros_like(columns)
                only[:, row::rows] = columns[:, row::rows]
                yield only


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

    def chunks(self, loss: LossCurvature, size: int, rows: int) -> Iterator[Tensor]:
        """Columns ``[v, *z.shape]``, at most ``size`` at a time, all drawn at once so that chunking changes nothing."""
        yield from (loss.sample(self.samples, self.generator) / self.samples**0.5).split(size)


def loss_slope(use: LossUse, grad: Tensor) -> Tensor:
    """Gradient of a loss, scaled by ``grad``, in its input."""
    create_graph = torch.is_grad_enabled()
    z = use.input if create_graph else use.input.detach().requires_grad_()
    with torch.enable_grad(), disable():
        value = use.again(z)
    return torch.autograd.grad(value, z, grad.reshape(value.shape), create_graph=create_graph)[0]


class Pass:
    """One backward: collects what arrives, reduces it as soon as it is whole, and sets the fields.

    Args:
        extensions: the active extensions.
        extension_hook: called with each module whose fields are complete.
        graph: the graph of this backward, or ``None`` where its root was not seen.
    """

    def __init__(
        self,
        extensions: Sequence[Extension],
        extension_hook: Callable[[nn.Module], None] | None,
        graph: Graph | None,
    ):
        """Check the request against the graph, before anything is computed."""
        self.extensions, self.extension_hook, self.graph = extensions, extension_hook, graph
        self.first_order = [e for e in extensions if isinstance(e.columns, Gradient)]
        self.second_order = [e for e in extensions if not isinstance(e.columns, Gradient)]
        self.create_graph = torch.is_grad_enabled()
        self.entries: dict[Use, Entry] = {} if graph is None else graph.entries
        self.parts: dict[nn.Parameter, list[Jacobian]] = {}
        self.totals: dict[tuple[nn.Parameter, Extension], Any] = {}
        self.done: dict[nn.Parameter, set[Extension]] = {}
        self.owners: dict[nn.Parameter, nn.Module] = {}
        self.names: dict[nn.Parameter, str] = {}
        self.hooked: set[nn.Module] = set()
        self.losses_left = None if graph is None else len(graph.losses)
        if graph is not None:
            self._check(graph)

    # What the backward tells

    def gradient(self, use: Use, index: int, grad: Tensor) -> None:
        """The gradient of one output of a use: reduce it, or keep it until the parameter's other uses have theirs."""
        if self.second_order and self.losses_left is None:
            self._refuse_without_loss()
        if not self.first_order:
            return
        entry = self.entries.get(use) or self.entries.setdefault(use, Entry(use))
        if not entry.parameters:
            return
        N = self.graph.batch_size(self.graph.losses[0] if self.graph.losses else None) if self.graph else entry.rows
        grads = [grad.unsqueeze(0) if i == index else None for i in range(len(use.shapes))]
        for p, jacobian in self._jac_t(entry, grads, N):
            parts = self.parts.setdefault(p, [])
            parts.append(jacobian)
            if self.graph is not None and len(parts) == self.graph.uses_of[p]:
                self._reduce_gradient(p)

    def loss(self, use: LossUse, grad: Tensor) -> None:
        """An extended loss has been reached, scaled by ``grad``: sweep the columns of its Hessian's root."""
        if not self.second_order or use.edge is None:
            return
        if self.graph is None:
            # the root was not seen: this loss is the root as far as second order is concerned
            self.entries = Graph(use.edge.node).entries | self.entries
        graph = self.graph or Graph(use.edge.node)
        if self.graph is None:
            self._check(graph, needs_loss=False)
        entries = [entry for entry in graph.entries.values() if entry.parameters]
        N = graph.batch_size(use)
        curvature, scale = curvature_of(use, grad)
        size = _columns_per_sweep or self._chunk_size(entries, grad.device.type)
        groups: dict[Exact | MonteCarlo, list[Extension]] = {}
        for e in self.second_order:
            groups.setdefault(Exact() if isinstance(e.columns, Hessian) else e.columns, []).append(e)
        for columns, extensions in groups.items():
            for chunk in columns.chunks(curvature, size, len(use.input) // N):
                vectors = (chunk * scale).to(use.input.dtype)
                self._sweep([use.edge], [vectors], None, entries, N, extensions)
        for modify in dict.fromkeys(e.columns.modify for e in self.second_order if isinstance(e.columns, Hessian)):
            extensions = [e for e in self.second_order if e.columns == Hessian(modify)]
            self._residuals(use, grad, entries, N, size, modify, extensions)
        self.losses_left = 0 if self.losses_left is None else self.losses_left - 1
        if self.graph is not None and self.losses_left == 0:
            for p, extension in list(self.totals):
                self._complete(p, extension)

    def finish(self) -> None:
        """The backward is over: reduce what is left, set the remaining fields and forget everything shared."""
        with torch.set_grad_enabled(self.create_graph):
            for p in list(self.parts):
                self._reduce_gradient(p)
            for p, extension in list(self.totals):
                self._complete(p, extension)
        self.release()

    def release(self) -> None:
        """Drop what uses cached for this backward."""
        for use in self.entries:
            use.cache.clear()

    def undo(self) -> None:
        """Take back the fields that a failed backward has set."""
        for p, extensions in self.done.items():
            for extension in extensions:
                if hasattr(p, extension.field):
                    delattr(p, extension.field)
        self.release()

    # Computation

    def _jac_t(self, entry: Entry, grads: list[Tensor | None], N: int) -> Iterator[tuple[nn.Parameter, Jacobian]]:
        entry.use.check_inputs()
        jacobians = entry.rule.jac_t(entry.use, grads, list(entry.parameters), N)
        for name, jacobian in jacobians.items():
            p = entry.parameters[name]
            self.owners.setdefault(p, entry.use.module)
            self.names.setdefault(p, f"{entry.use.path}.{name}".lstrip("."))
            yield p, jacobian

    def _reduce_gradient(self, p: nn.Parameter) -> None:
        jacobian = combine(self.parts.pop(p))
        for extension in self.first_order:
            self.totals[p, extension] = extension.update(None, jacobian)
            self._complete(p, extension)

    def _sweep(
        self,
        outputs: list[GradientEdge],
        vectors: list[Tensor],
        weights: Tensor | None,
        entries: list[Entry],
        N: int,
        extensions: Sequence[Extension],
        skip: Collection[nn.Parameter] = (),
    ) -> None:
        """Pull vectors ``[v, *out]`` back to all uses and update the totals of every parameter.

        Without weights the columns are those of the loss, and every parameter gets them, as zeros if need be. Weighted
        ones are what an operation adds, and concern the parameters before it that are not in ``skip``.
        """
        remaining = iter(pull(outputs, [edge for entry in entries for edge in entry.edges.values()], vectors))
        parts: dict[nn.Parameter, list[Jacobian]] = {}
        for entry in entries:
            grads: list[Tensor | None] = [None] * len(entry.use.shapes)
            for index in entry.edges:
                grads[index] = next(remaining)
            if all(grad is None for grad in grads):
                if weights is not None:
                    continue
                index = next(iter(entry.edges))  # behind another loss: these columns do not reach it
                grads[index] = vectors[0].new_zeros(len(vectors[0]), *entry.use.shapes[index])
            for p, jacobian in self._jac_t(entry, grads, N):
                parts.setdefault(p, []).append(jacobian)
        for p, jacobians in parts.items():
            if p in skip:
                continue
            jacobian = combine(jacobians)
            jacobian.weights = weights
            self._update(p, jacobian, extensions)

    def _update(self, p: nn.Parameter, jacobian: Jacobian, extensions: Sequence[Extension]) -> None:
        for extension in extensions:
            self.totals[p, extension] = extension.update(self.totals.get((p, extension)), jacobian)

    def _residuals(
        self,
        use: LossUse,
        grad: Tensor,
        entries: list[Entry],
        N: int,
        size: int,
        modify: Modify,
        extensions: Sequence[Extension],
    ) -> None:
        """What nonlinear operations between the loss and the parameters add to the curvature."""
        assert use.edge is not None
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
        if not operations and not direct:
            return
        slope = loss_slope(use, grad)
        outputs = [GradientEdge(op.node, nr) for op in operations for nr in op.outputs]
        arrived = iter(pull([use.edge], outputs, [slope.unsqueeze(0)]))
        for operation in operations:
            grads = [next(arrived) for _ in operation.outputs]
            reached = [nr for nr, g in zip(operation.outputs, grads, strict=True) if g is not None]
            present = [g[0] for g in grads if g is not None]
            if present:
                self._check_rows(operation, N, extensions)
                for columns in residual_columns(operation._replace(outputs=reached), present, N, size, modify):
                    self._sweep(columns.edges, columns.vectors, columns.weights, entries, N, extensions, direct)
        if direct:
            self._direct(use, slope, list(direct), N, size, modify, extensions)

    def _direct(
        self,
        use: LossUse,
        slope: Tensor,
        parameters: list[nn.Parameter],
        N: int,
        size: int,
        modify: Modify,
        extensions: Sequence[Extension],
    ) -> None:
        """The same for single parameters by differentiating the gradient again, one column for each of their entries."""
        if modify is not None:
            raise CurvoptError(
                f"{self.names[parameters[0]]}: {self._fields(extensions)} is only defined for parameters that are used "
                "once and enter linearly; use HMP or GGNMP."
            )
        entries = sum(p.numel() for p in parameters)
        if entries > DIRECT_ENTRIES:
            warnings.warn(
                f"{self._fields(extensions)}: {entries} parameter entries ({self.names[parameters[0]]}, ...) are used "
                "several times or nonlinearly; their exact Hessian takes one double backward for each entry.",
                CurvoptWarning,
                stacklevel=2,
            )
        samples = range(N) if any(e.per_sample for e in extensions) else [None]
        rows = len(slope) // N
        for p in parameters:
            images = []
            for n in samples:
                seed = slope
                if n is not None:
                    seed = torch.zeros_like(slope).index_add(0, (i := torch.arange(n * rows, (n + 1) * rows)), slope[i])
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
            units = unit_vectors(torch.arange(p.numel(), device=p.device), p.numel(), len(images), products)
            vectors, weights = polarize(units, products)
            jacobian = Dense(vectors.reshape(*vectors.shape[:2], *p.shape))
            jacobian.weights = weights
            self._update(p, jacobian, extensions)

    def _check_rows(self, operation: Residual, N: int, extensions: Sequence[Extension]) -> None:
        for edge in operation.inputs:
            shape = edge.node._input_metadata[edge.output_nr].shape
            if not shape or shape[0] % N:
                raise CurvoptError(
                    f"{self._fields(extensions)}: the input of {operation.node.name()} has shape {list(shape)}, whose first axis "
                    f"does not hold the {N} samples; keep the batch axis first."
                )

    def _chunk_size(self, entries: Sequence[Entry], device: str) -> int:
        """Columns to sweep together, from the activations that one column fills."""
        elements = sum(prod(shape) for entry in entries for shape in entry.use.shapes)
        return max(1, SWEEP_ELEMENTS.get(device, SWEEP_ELEMENTS["cpu"]) // max(elements, 1))

    def _complete(self, p: nn.Parameter, extension: Extension) -> None:
        """Set one field; call the extension hook once all fields of a module's own parameters are there."""
        setattr(p, extension.field, extension.finish(self.totals.pop((p, extension))))
        self.done.setdefault(p, set()).add(extension)
        module = self.owners[p]
        if self.extension_hook is None or module in self.hooked:
            return
        wanted = {q for entry in self.entries.values() if entry.use.module is module for q in entry.parameters.values()}
        if all(len(self.done.get(q, ())) == len(self.extensions) for q in wanted):
            self.hooked.add(module)
            self.extension_hook(module)

    # Checks

    def _check(self, graph: Graph, needs_loss: bool = True) -> None:
        """Raise for every request that this graph would answer wrongly."""
        if not graph.entries:
            raise CurvoptError(
                f"{self._fields(self.extensions)}: no extended module took part in this backward; call extend(model) "
                "before the forward pass (and outside of curvopt.disable())."
            )
        if needs_loss and self.second_order and not graph.losses:
            self._refuse_without_loss()
        if graph.mixing:
            refused = [e for e in self.extensions if e.needs_independent_samples]
            if refused:
                raise CurvoptError(
                    f"{graph.mixing[0]}: {self._fields(refused)} need independent samples, but train-mode batch norm "
                    "mixes them; call model.eval() or use a Monte-Carlo quantity (KFAC, DiagGGNMC)."
                )
        for node, p in graph.outside:
            names = [
                f"{describe(entry.use.path, entry.use.module)}: parameter '{name}'"
                for entry in graph.entries.values()
                for name, q in entry.parameters.items()
                if q is p
            ]
            raise CurvoptError(
                f"{names[0]} is also used outside of its module (by {node.name()}), which "
                f"{self._fields(self.extensions)} would miss; use it through the module only, e.g. call the module a "
                "second time."
            )

    def _refuse_without_loss(self) -> None:
        raise CurvoptError(
            f"{self._fields(self.second_order)} need the curvature of the loss, but no extended loss took part in this "
            "backward; use lossfunc = extend(nn.CrossEntropyLoss()) (or MSELoss, BCEWithLogitsLoss)."
        )

    @staticmethod
    def _fields(extensions: Sequence[Extension]) -> str:
        return ", ".join(e.field for e in extensions)
