"""Second-order quantities of a backward: the Hessian of the loss is factored into columns, which are pulled back.

What is differentiated is a sum: known terms (`curvopt.core.losses.known`), which have a root in closed form at their
input, and a remainder, whose root comes from double backward (`curvopt.core.losses.any`)::

    cross_entropy(z, y) + 0.1 * huber(a, t)     a known term at z, and a remainder at a
    mse(z.sigmoid(), t)                         a known term, at z.sigmoid()
    cross_entropy(z, y).sqrt()                  a remainder at z
    l1_loss(z, t)                               a remainder without curvature

The remainder is split at the first tensors behind its outermost nonlinear operations that a model returns, or that an
operation with parameters computes. Columns of the cross-entropy of outputs ``[N, C]``::

    Exact         KFLR, DiagGGNExact, GGNMP    C - 1 columns of S, where S S^T is the Hessian
    Hessian       DiagHessian, HMP             these, then the residuals of nonlinear operations
    MonteCarlo    KFAC, DiagGGNMC              gradients at targets that are drawn from the softmax
    Empirical     KFACEmpirical                the gradient at the target itself
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.backward.backward_pass import BackwardPass, LocatedGraph
from curvopt.core.backward.checks import warn_of_columns
from curvopt.core.backward.kfra import kfra_jacobians
from curvopt.core.backward.residuals import sweep_residuals
from curvopt.core.losses.any import GenericLoss, Head, Reduction
from curvopt.core.losses.known import KnownLoss, Terms, find_terms
from curvopt.core.losses.roots import (
    Averaged,
    Diagonal,
    Empirical,
    Exact,
    Hessian,
    LossCurvature,
    MonteCarlo,
    NotConvex,
    NotCurved,
    ranks_of,
)
from curvopt.core.nodes import Edge, is_compiled, leads_to, leaf_of, name_of, operation, shape_of, walk
from curvopt.core.products.base import cast, widened
from curvopt.core.samples.axes import Samples
from curvopt.core.samples.layout import Layout, axis_of, labels_along
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions.base import Extension, fields_of, fields_that, naming_fields


def terms_of(roots: Sequence[Edge], located: LocatedGraph) -> Terms:
    """The terms of what is differentiated; known ones have rows of one sample each in their input."""
    ends = {edge.node for call in located.calls for edge in call.edges.values()}
    locations = located.distinct_locations
    predictions = {
        edge
        for location in locations
        for edge in location.heads
        if shape_of(*edge).numel() > (shape_of(*edge)[0] if location.is_one_sample else location.N)
    }

    def has_rows_of_samples(loss: KnownLoss) -> bool:  # not so a mean over the batch
        edge = loss.edge
        return loss.input.dim() == 0 or all(
            location.N == 1
            or not leads_to(edge.node, {node for node, _ in location.heads})
            or isinstance(location.axes.layouts.get((edge.node, edge.output_nr)), Layout)
            or location.rows_of(edge) is not None
            for location in locations
        )

    terms = find_terms(roots, ends, predictions)
    terms.keep(has_rows_of_samples)
    return terms


class Factored(NamedTuple):
    """A known term, and its Hessian in its input."""

    loss: KnownLoss
    curvature: LossCurvature


class SecondOrder:
    """The second-order quantities of one backward, and the parts of what is differentiated.

    Args:
        run: pulls columns back.
        extensions: the active ones of second order.
        counted: losses that reach none of these parameters do not count in the weight; ``None`` if all do.
        reduction: how losses of no known kind are reduced over the samples, see `loss_weight`.
        largest_block: how many outputs of a sample the remainder may couple.

    Attributes:
        weight: sum of the factors that the losses of single predictions have in the scalar (see
            `LossCurvature.weights`): 1 for a mean, N for a sum over N.
        variables: the largest number of variables of a prediction (see `LossCurvature.variables`).

    Raises:
        CurvoptError: where the quantities cannot be had.
    """

    def __init__(
        self,
        run: BackwardPass,
        extensions: Sequence[Extension],
        counted: frozenset[Tensor] | None = None,
        reduction: Reduction = None,
        largest_block: int | None = None,
    ):
        self.run, self.extensions, self.counted = run, extensions, counted
        self.located, self.how = located, how = run.located, run.how
        self.reduction: Reduction = reduction
        self.largest_block = largest_block
        self.weight: Tensor | float = 0.0
        self.variables = 1
        self.terms = terms_of(list(how.roots), located)
        for loss in self.terms.known:
            if loss.input.dim() == 0:
                raise NotCurved(
                    f"{loss.describe()}: its input is a single number, but {fields_that(self.extensions, 'need')} a "
                    "row for each sample; give the loss the outputs of all samples, not their mean (of a single "
                    "sample, unsqueeze(0) output and target)."
                )
        self.remainder: GenericLoss | None = None
        if self.terms.nonlinear or (self.terms.ends and self._needs_linear_parts):
            self.remainder = self._generic(self.terms.nonlinear, self.terms.known)

    @property
    def _needs_linear_parts(self) -> bool:
        """Whether a quantity needs the gradient of a part that is linear in outputs of calls."""
        kinds = [e.columns for e in self.extensions]
        return self.counted is not None or any(isinstance(columns, (Hessian, Empirical)) for columns in kinds)

    def _generic(self, nonlinear: Sequence[Node], known: Sequence[KnownLoss]) -> GenericLoss:
        """The scalar less some known terms, which is a nonlinear function behind some nodes.

        Raises:
            CurvoptError: where second-order quantities of it cannot be had.
        """
        names = dict.fromkeys(self.terms.others + [loss.describe() for loss in self.terms.known if loss not in known])
        what = f"{fields_of(self.extensions)}: a part of the loss is of no known kind ({', '.join(names) or 'linear'})"
        locations = self.located.distinct_locations
        causes = {
            "several models with different numbers of samples": len(locations) > 1,
            "derivatives of fields (create_graph=True)": self.creates_graph,
            "KFRA": any(isinstance(e.columns, Averaged) for e in self.extensions),
        }
        for cause, applies in causes.items():
            if applies:
                raise CurvoptError(
                    f"{what}, where {cause} cannot be had; use a known loss such as nn.CrossEntropyLoss, or an "
                    "empirical quantity."
                )
        (location,) = locations
        edges = self._first_behind(nonlinear, location)
        heads = [_head(edge, location, what) for edge in edges]
        curved = [e for e in self.extensions if not isinstance(e.columns, Empirical)]
        last = {node for node, _ in edges}
        if curved and any(is_compiled(node) for node in walk(list(nonlinear), last=last) if node not in last):
            raise CurvoptError(
                f"{what}, and a part of it was compiled by torch.compile, which has no second derivative; compute the "
                "loss outside of what torch.compile compiles, or use an empirical quantity (KFACEmpirical)."
            )
        # the rows of which the loss is a mean
        rows = max([shape_of(*edge)[0] for edge in edges], default=1) if location.is_one_sample else location.N
        return GenericLoss(
            [GradientEdge(*edge) for edge in self.how.roots],
            list(self.how.roots.values()),
            heads,
            rows,
            self.reduction,
            self.largest_block,
            known,
            [GradientEdge(*edge) for edge in self.terms.ends if edge not in edges],
        )

    @cached_property
    def creates_graph(self) -> bool:
        """Whether fields may be differentiated; nobody differentiates what optimizers take."""
        return self.how.create_graph and self.counted is None

    def _first_behind(self, nonlinear: Iterable[Node], location: Samples) -> list[Edge]:
        """The first tensors behind some operations that a model returns, or an operation with parameters computes."""
        calls = [*self.located.calls, *self.located.graph.module_calls.values()]
        ends = {(edge.node, edge.output_nr) for call in calls for edge in call.edges.values()} | set(location.heads)
        found: dict[Edge, None] = {}
        stack = [below for node in nonlinear for below in node.next_functions]
        seen = set(stack)
        while stack:
            edge = stack.pop()
            if edge[0] is None or leaf_of(edge[0]) is not None:
                continue
            if edge in ends:
                found[edge] = None  # type: ignore[index]
                continue
            new = [below for below in edge[0].next_functions if below not in seen]
            seen.update(new)
            stack += new
        return list(found)

    # Pull back

    def compute(self) -> None:
        """Pull back the columns of all parts."""
        run = self.run
        self.terms.receive(list(self.how.roots.values()))
        factored, negative = list[Factored](), dict[KnownLoss, NotConvex]()
        for loss in self.terms.known:
            try:
                factored.append(self._factor(loss))
            except NotConvex as error:  # with the rest it may be convex, and has a Hessian in any case
                negative[loss] = error
        if negative:
            self.terms.keep(lambda loss: loss not in negative)
            try:
                self.remainder = self._generic(self.terms.nonlinear, self.terms.known)
            except CurvoptError:
                raise naming_fields(self.extensions, next(iter(negative.values()))) from None
        try:
            factored = self._joined(factored)
            self._pull_back(run, factored)
            run.weight, run.variables = self.weight, self.variables
        except CurvoptError as error:
            if isinstance(error, NotConvex) and negative:
                error = next(iter(negative.values()))
            if isinstance(error, NotCurved) and self.counted is not None:
                raise error from None  # an optimizer takes another quantity: its users know no fields
            raise naming_fields(self.extensions, error) from error
        except RuntimeError as error:
            if "donated buffers" not in str(error):
                raise
            raise CurvoptError(
                f"{fields_of(self.extensions)}: a part of the loss was compiled by torch.compile, so that its "
                "backward runs once; compute it outside of what is compiled, or set "
                "donated_buffer = False in PyTorch's functorch configuration before it is compiled."
            ) from error

    @cached_property
    def whole(self) -> GenericLoss:
        """All of the scalar as one loss of no known kind."""
        return self._generic([*self.terms.nonlinear, *(loss.node for loss in self.terms.known)], ())

    def _factor(self, loss: KnownLoss) -> Factored:
        curvature = loss.curvature()
        if any(isinstance(e.columns, Exact) and e.columns.by_entries for e in self.extensions):
            curvature = curvature.by_entries()
        assert curvature.weights is not None
        if not self._is_uncounted(loss):
            self.weight = self.weight + curvature.weights.detach().sum()
            self.variables = max(self.variables, curvature.variables)
        return Factored(loss, curvature)

    def _joined(self, factored: list[Factored]) -> list[Factored]:
        """Take known terms at predictions of the remainder for a part of it where that makes it convex.

        So a cross-entropy less an entropy has the Gauss-Newton matrix that it has as one function of the logits.
        """
        if self.remainder is None or not any(isinstance(e.columns, (Exact, MonteCarlo)) for e in self.extensions):
            return factored
        if all(isinstance(e.columns, Hessian) for e in self.extensions):
            return factored
        try:
            self.remainder.check_definite()
        except NotConvex:
            heads = {(head.edge.node, head.edge.output_nr) for head in self.remainder.heads}
            at_heads = {f.loss for f in factored if (f.loss.edge.node, f.loss.edge.output_nr) in heads}
            if at_heads:
                self.terms.keep(lambda loss: loss not in at_heads)
                self.remainder = self._generic(self.terms.nonlinear, self.terms.known)
        return [f for f in factored if f.loss in self.terms.known]

    def _is_uncounted(self, loss: KnownLoss) -> bool:
        """Whether a term of a sum reaches none of the parameters that count."""
        leaves = self.located.graph.leaves.values()
        if self.counted is None or len(self.terms.known) == 1 or self.counted.issuperset(leaves):
            return False
        return not any(leaf_of(node) in self.counted for node in walk([loss.edge.node]))

    def _pull_back(self, run: BackwardPass, factored: Sequence[Factored]) -> None:
        remainder, edges = self.remainder, [each.loss.edge for each in factored]
        # of what is written by hand the whole says how many means it is
        by_hand = any(loss.is_square for loss in self.terms.known) and len(self.located.distinct_locations) == 1
        by_hand = (by_hand and not self.creates_graph) or remainder is not None
        if by_hand:
            self.weight = self.whole.weight
        self._say_linear(factored)
        by_columns = self._by_columns
        remaining = len(by_columns) + sum(isinstance(e.columns, Hessian) for e in self.extensions)
        for columns, extensions in by_columns.items():
            remaining -= 1
            last = remaining == 0 and not run.first_order and remainder is None
            if isinstance(columns, Exact):
                self._exact(run, factored, extensions, last)
                if remainder is not None:
                    _exact_remainder(run, remainder, extensions)
            elif isinstance(columns, MonteCarlo):
                drawn = [cast(self._sampled(columns, each), each.loss.input.dtype) for each in factored]
                if remainder is not None:
                    drawn += self._sampled_remainder(columns, remainder)
                _sweep_chunks(run, edges + (remainder.edges if remainder else []), drawn, extensions, last)
            elif isinstance(columns, Empirical) and by_hand:
                whole = self.whole
                vectors = [self._signed(columns, each) for each in _empirical_of_any_loss(whole)]
                if columns.scaled:
                    vectors = list(map(_scaled, vectors, whole.sample(1, columns.generator)))
                _sweep_chunks(run, whole.edges, vectors, extensions, last)
            elif isinstance(columns, Empirical):
                vectors = [cast(self._signed(columns, _empirical(each)), each.loss.input.dtype) for each in factored]
                if columns.scaled:
                    vectors = list(map(_scaled, vectors, [_drawn(each, columns) for each in factored]))
                _sweep_chunks(run, edges, vectors, extensions, last)
            else:
                for loss, curvature in factored:
                    for chunk in kfra_jacobians(loss.edge, curvature, run.calls, run.calls[0].location.N):
                        run.update(chunk, extensions)
        slopes: list[Tensor] = []
        for hessian, extensions in self._by_residuals.items():
            slopes = slopes or [each.loss.slope().to(each.loss.input.dtype) for each in factored]
            more = (remainder.edges, remainder.slope) if remainder is not None else ([], [])
            sweep_residuals(run, edges + more[0], slopes + more[1], hessian.modify, extensions)
        self._fill_with_zeros(run)

    def _fill_with_zeros(self, run: BackwardPass) -> None:
        """Parameters on which the scalar depends linearly alone have fields, too."""
        parameters = {p for call in run.calls for p in call.parameters.values()}
        ends = [GradientEdge(*edge) for edge in self.terms.ends]
        for extension in self.extensions if ends else ():
            there = {p for p in parameters if (p, extension) in run.totals}
            if len(there) < len(parameters):
                zeros = [Head(edge, 1).new().unsqueeze(0) for edge in ends]
                run.sweep(ends, zeros, None, [extension], there)

    @property
    def _by_columns(self) -> dict[Any, list[Extension]]:
        """Extensions that share sweeps: those of the Hessian have the columns of the GGN, too."""
        groups: dict[Any, list[Extension]] = {}
        for extension in self.extensions:
            columns = extension.columns
            groups.setdefault(Exact() if isinstance(columns, Exact) else columns, []).append(extension)
        return groups

    @property
    def _by_residuals(self) -> dict[Hessian, list[Extension]]:
        """Extensions that share residuals."""
        kinds = dict.fromkeys(e.columns for e in self.extensions if isinstance(e.columns, Hessian))
        return {kind: [e for e in self.extensions if e.columns == kind] for kind in kinds}

    def _say_linear(self, factored: Sequence[Factored]) -> None:
        """Refuse a loss that is linear in the network's output where an optimizer wants its curvature, else warn."""
        # for optimizers also extensions of the Hessian
        of_hessian = Hessian if self.counted is None else ()
        curved = [e for e in self.extensions if isinstance(e.columns, (Exact, MonteCarlo))]
        ggn = [e for e in curved if not isinstance(e.columns, of_hessian)]
        if not ggn:
            return
        scaled = {node for node, _ in self.terms.ends if operation(node) in ("DIV", "MUL")}
        outputs = {node for _, (node, _) in self.located.graph.model_calls}
        for node in walk([node for node, _ in self.how.roots], last=outputs) if scaled else ():
            if node in scaled and node not in outputs:
                raise NotCurved(
                    f"The loss is linear in what {name_of(node)} scales by a parameter, such as the error of a "
                    "likelihood with a learned deviation, so it does not tell its prediction; mark that by "
                    "curvopt.prediction, or use KFACEmpirical."
                )
        if self.remainder is not None:
            self.variables = max(self.variables, self.remainder.variables)
        elif self.terms.ends and not factored:
            return self._refuse_linear(ggn, "the loss")
        if self.remainder is not None and factored:
            return None  # one of them may be curved
        if self.remainder is not None and self.remainder.is_linear:
            return self._refuse_linear(ggn, self.remainder.name)
        if factored and self.remainder is None and all(map(_is_linear, factored)):
            return self._refuse_linear(ggn, factored[0].loss.describe())
        return None

    def _refuse_linear(self, ggn: Sequence[Extension], name: str) -> None:
        if self.counted is not None:
            raise NotCurved(f"{name}: it is linear in the network's output, so it has no curvature; use KFACEmpirical.")
        warnings.warn(
            f"{fields_of(ggn)}: {name} is linear in the network's output, so the GGN is zero. Where a model "
            "contains its loss, or a loss has parameters, let the model return predictions.",
            CurvoptWarning,
            stacklevel=2,
        )

    def _exact(
        self, run: BackwardPass, factored: Sequence[Factored], extensions: Sequence[Extension], last: bool
    ) -> None:
        locations = self.located.distinct_locations
        for loss, curvature in factored:
            for location in locations:
                samples = location.rows_of(loss.edge)
                ranks = list(range(len(loss.input))) if samples is None else ranks_of(samples)
                columns = Exact()
                left = total = columns.total(curvature, ranks)
                warn_of_columns(extensions, total)
                skip = {call for call in run.calls if call.location is not location} if len(locations) > 1 else ()
                final = last and len(factored) == len(locations) == 1
                for chunk in columns.chunks(curvature, run.chunk_size, ranks):
                    left -= len(chunk)
                    vectors = cast(chunk, loss.input.dtype)
                    run.sweep([loss.edge], [vectors], None, extensions, skip, total, final and left == 0)

    def _sampled(self, columns: MonteCarlo, each: Factored) -> Tensor:
        """Random columns ``[V, ...]``; for optimizers with the gradient of outputs in which the loss is linear."""
        drawn = columns.draw(each.curvature)
        if self.counted is None or not isinstance(each.curvature, Diagonal):  # no other kind has outputs without any
            return drawn
        return _or_slopes(drawn, self._signed(columns, _empirical(each)))

    def _sampled_remainder(self, columns: MonteCarlo, remainder: GenericLoss) -> list[Tensor]:
        drawn = [v / columns.samples**0.5 for v in remainder.sample(columns.samples, columns.generator)]
        if self.counted is None:
            return drawn
        slopes = [self._signed(columns, each) for each in _empirical_of_any_loss(remainder)]
        return list(map(_or_slopes, drawn, slopes))

    def _signed(self, columns: Empirical | MonteCarlo, column: Tensor) -> Tensor:
        """A column ``[1, rows, ...]`` with random signs of the rows, where these are no samples."""
        one = any(location.is_one_sample for location in self.located.distinct_locations)
        if columns.generator is None or not one:
            return column
        bits = torch.randint(2, column.shape[1:2], generator=columns.generator, device=columns.generator.device)
        signs = (2 * bits - 1).to(column)
        return column * signs.view(1, -1, *[1] * (column.dim() - 2))


def _head(edge: Edge, location: Samples, what: str) -> Head:
    """A tensor at which the remainder is split."""
    shape, layout = shape_of(*edge), location.axes.layouts.get(edge)
    axis = axis_of(shape, layout) if isinstance(layout, Layout) else None
    if axis is not None and axis.before == 1:
        rows = labels_along(layout, axis)  # type: ignore[arg-type]
        samples = tuple(dict.fromkeys(rows))
        share = len(rows) // len(samples)
        if rows == tuple([sample for sample in samples for _ in range(share)]):
            return Head(GradientEdge(*edge), len(samples), axis.index, samples)
    raise CurvoptError(
        f"{what}, and an output of the model of shape {list(shape)} has the rows of a sample apart from one another "
        "along its axis; return them together, or use a known loss such as nn.CrossEntropyLoss."
    )


def _is_linear(each: Factored) -> bool:
    """Whether the Hessian is zero and the gradient is not."""
    curvature = each.curvature
    return type(curvature) is Diagonal and not curvature.diagonal.any() and bool(each.loss.slope().any())


def _exact_remainder(run: BackwardPass, remainder: GenericLoss, extensions: Sequence[Extension]) -> None:
    warn_of_columns(extensions, remainder.num_columns)
    signed = all(isinstance(e.columns, Hessian) for e in extensions)
    for heads, vectors, weights in (remainder.signed if signed else remainder.root)(run.chunk_size):
        head, edges = remainder.heads[heads[0]], [remainder.heads[i].edge for i in heads]
        if weights is not None and head.labels is not None:  # a head that has some of the samples
            labels = weights.new_tensor(head.labels, dtype=torch.long)
            weights = weights.new_zeros(len(weights), remainder.N).index_copy(1, labels, weights)  # noqa: PLW2901
        run.sweep(edges, vectors, weights, extensions, (), remainder.num_columns)


def _empirical(each: Factored) -> Tensor:
    weights = each.curvature.weights
    assert weights is not None
    # a prediction that weighs nothing has no gradient, either
    factors = 1 / weights.clamp(min=torch.finfo(weights.dtype).tiny).sqrt()
    return (each.loss.slope() * factors).unsqueeze(0)


def _empirical_of_any_loss(loss: GenericLoss) -> list[Tensor]:
    weight = (loss.weight / loss.N).clamp(min=torch.finfo(loss.weight.dtype).tiny).sqrt()
    return [(slope / weight.to(slope.device)).unsqueeze(0) for slope in loss.slope]


def _or_slopes(drawn: Tensor, empirical: Tensor) -> Tensor:
    """Columns ``[V, ...]``, with the gradient of outputs in which the loss is linear, as of boxes by an L1 loss."""
    return torch.where((drawn == 0).all(0), empirical.to(drawn) / len(drawn) ** 0.5, drawn)


def _drawn(each: Factored, columns: Empirical) -> Tensor:
    """A vector with the mean square of columns at drawn targets."""
    curvature = each.curvature
    return curvature.diagonal if isinstance(curvature, Diagonal) else curvature.sample(1, columns.generator)


def _scaled(column: Tensor, drawn: Tensor) -> Tensor:
    """A column with the mean square of another one, and its own where that has none."""
    drawn = torch.where(drawn == 0, column.to(drawn), drawn)
    size = widened(column).norm().clamp(min=torch.finfo(torch.float32).tiny)
    return column * (widened(drawn).norm() / size).to(column)


def _sweep_chunks(
    run: BackwardPass,
    edges: Sequence[GradientEdge],
    vectors: Sequence[Tensor],
    extensions: Sequence[Extension],
    last: bool,
) -> None:
    """Pull back columns of all parts together."""
    total = len(vectors[0]) if vectors else 0
    for start in range(0, total, run.chunk_size):
        part = [v[start : start + run.chunk_size] for v in vectors]
        run.sweep(edges, part, None, extensions, (), total, last and start + run.chunk_size >= total)
