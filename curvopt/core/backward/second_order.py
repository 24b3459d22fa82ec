"""Second-order quantities of a backward: the Hessian of the loss is factored into columns, which are pulled back.

What is differentiated is a sum of parts: known terms (`curvopt.core.losses.known`), which have a root in closed form at
their input, and a remainder, whose root comes from double backward (`curvopt.core.losses.any`)::

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
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.backward.backward_pass import BackwardPass, LocatedGraph
from curvopt.core.backward.checks import warn_of_columns
from curvopt.core.backward.kfra import kfra_jacobians
from curvopt.core.backward.residuals import Residuals
from curvopt.core.losses.any import GenericLoss, Head, loss_weight, new_like
from curvopt.core.losses.known import FactoredLoss, KnownLoss, Terms, find_terms
from curvopt.core.losses.roots import (
    Averaged,
    Columns,
    Empirical,
    Exact,
    Gradient,
    Hessian,
    MonteCarlo,
    NotConvex,
    NotCurved,
    ranks_of,
)
from curvopt.core.nodes import Edge, is_compiled, leads_to, leaf_of, name_of, operation, shape_of, walk
from curvopt.core.products.base import widened
from curvopt.core.record import ModuleCall, records_of
from curvopt.core.samples.axes import Samples
from curvopt.core.samples.layout import Layout, axis_of, labels_along
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions.base import Extension, fields_of, fields_that, naming_fields

Part = FactoredLoss | GenericLoss


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
    terms.join([loss for loss in terms.known if not has_rows_of_samples(loss)])
    return terms


class SecondOrder:
    """The second-order quantities of one backward.

    Args:
        run: the backward, which pulls columns back.

    Raises:
        CurvoptError: where the quantities cannot be had.
    """

    def __init__(self, run: BackwardPass):
        self.run, self.located, self.request = run, run.located, run.request
        self.extensions = [e for e in run.extensions if not isinstance(e.columns, Gradient)]
        self.is_for_optimizer = self.request.counted is not None
        self.terms = terms_of(list(run.how.roots), self.located)
        for loss in self.terms.known:
            if loss.input.dim() == 0:
                raise NotCurved(
                    f"{loss.describe()}: its input is a single number, but {fields_that(self.extensions, 'need')} a "
                    "row for each sample; give the loss the outputs of all samples, not their mean (of a single "
                    "sample, unsqueeze(0) output and target)."
                )
        # of a part that is linear in outputs of calls the gradient is needed, if anything
        needs_slopes = self.is_for_optimizer or any(
            isinstance(e.columns, (Hessian, Empirical)) for e in self.extensions
        )
        self.remainder: GenericLoss | None = None
        if self.terms.nonlinear or (self.terms.ends and needs_slopes):
            self.remainder = self._remainder()

    def compute(self) -> None:
        """Pull back the columns of all parts.

        Raises:
            CurvoptError: where the quantities cannot be had.
        """
        self.terms.receive(list(self.run.how.roots.values()))
        try:
            known = self._known()
            self._weigh(known)
            parts: list[Part] = [*known, *([] if self.remainder is None else [self.remainder])]
            self._check_curvature(parts)
            self._pull_back(parts)
        except CurvoptError as error:
            if isinstance(error, NotCurved) and self.is_for_optimizer:
                raise error from None  # it takes another quantity: its users know no fields
            raise naming_fields(self.extensions, error) from error
        except RuntimeError as error:
            if "donated buffers" not in str(error):
                raise
            raise NotCurved(
                f"{fields_of(self.extensions)}: a part of the loss was compiled by torch.compile, so that its "
                "backward runs once; compute it outside of what is compiled, or set "
                "donated_buffer = False in PyTorch's functorch configuration before it is compiled."
            ) from error

    # Parts

    def _known(self) -> list[FactoredLoss]:
        """The known terms with their Hessians. Of a Hessian, the remainder takes those with negative weights.

        A remainder that is not convex takes the terms at its predictions: a cross-entropy less an entropy has the
        Gauss-Newton matrix that it has as one function of the logits.
        """
        by_entries = any(isinstance(e.columns, Exact) and e.columns.by_entries for e in self.extensions)
        known, negative = list[FactoredLoss](), list[KnownLoss]()
        for loss in self.terms.known:
            try:
                known.append(FactoredLoss(loss, by_entries))
            except NotConvex:
                if self._of_ggn():
                    raise
                negative.append(loss)
        self._join(negative)
        for each in known:
            if not self._is_uncounted(each.loss):
                self.run.weight = self.run.weight + each.weights.detach().sum()
                self.run.variables = max(self.run.variables, each.variables)
        if self.remainder is not None and self._of_ggn() and not self.remainder.is_definite:
            heads = {(head.edge.node, head.edge.output_nr) for head in self.remainder.heads}
            self._join([x.loss for x in known if (x.loss.edge.node, x.loss.edge.output_nr) in heads])
        return [each for each in known if each.loss in self.terms.known]

    def _of_ggn(self) -> list[Extension]:
        """The extensions that need a convex loss."""
        return [e for e in self.extensions if not isinstance(e.columns, (Hessian, Empirical))]

    def _join(self, losses: Collection[KnownLoss]) -> None:
        """Make known terms a part of the remainder."""
        if losses:
            self.terms.join(losses)
            self.remainder = self._remainder()

    def _remainder(self) -> GenericLoss:
        """The scalar less the known terms.

        Raises:
            CurvoptError: where second-order quantities of it cannot be had.
        """
        what = (
            f"{fields_of(self.extensions)}: a part of the loss is of no known kind, or has negative weights "
            f"({', '.join(self.terms.nonlinear_names) or 'linear'})"
        )
        locations = self.located.distinct_locations
        causes = {
            "several models with different numbers of samples (call them with equally many rows)": len(locations) > 1,
            "derivatives of fields (create_graph=True)": self.run.how.create_graph and not self.is_for_optimizer,
            "KFRA": any(isinstance(e.columns, Averaged) for e in self.extensions),
        }
        for cause, applies in causes.items():
            if applies:
                raise CurvoptError(
                    f"{what}, and its Hessian cannot be had for {cause}; use a known loss such as "
                    "nn.CrossEntropyLoss, or an empirical quantity."
                )
        (location,) = locations
        edges = self._predictions(self.terms.nonlinear)
        heads = [_head(edge, location, what) for edge in edges]
        curved = [e for e in self.extensions if not isinstance(e.columns, Empirical)]
        last = {node for node, _ in edges}
        if curved and any(is_compiled(node) for node in walk(self.terms.nonlinear, last=last) if node not in last):
            raise NotCurved(
                f"{what}, and a part of it was compiled by torch.compile, which has no second derivative; compute the "
                "loss outside of what torch.compile compiles, or use an empirical quantity (KFACEmpirical)."
            )
        return GenericLoss(
            self.run.roots,
            list(self.run.how.roots.values()),
            heads,
            location.N,
            self.request.largest_block,
            self.terms.known,
            [GradientEdge(*edge) for edge in self.terms.ends if edge not in edges],
            self._rows(self.terms.nonlinear),
        )

    def _predictions(self, nonlinear: Iterable[Node]) -> list[Edge]:
        """The first tensors behind operations that a model returns, or an operation with parameters computes."""
        calls = [*self.located.calls, *self.located.graph.module_calls.values()]
        ends = {(edge.node, edge.output_nr) for call in calls for edge in call.edges.values()}
        ends |= {edge for location in self.located.distinct_locations for edge in location.heads}
        found, passed = dict[Edge, None](), set(nonlinear)
        for node in self.located.graph.nodes:  # each after the operations that use it
            for edge in node.next_functions if node in passed else ():
                if edge in ends:
                    found[edge] = None  # type: ignore[index]
                elif edge[0] is not None:
                    passed.add(edge[0])
        return list(found)

    def _rows(self, nonlinear: Iterable[Node]) -> int:
        """The number of rows of which a function behind operations may be a mean."""
        (location,) = self.located.distinct_locations
        if not location.is_one_sample:
            return location.N
        return max([shape_of(*edge)[0] for edge in self._predictions(nonlinear)], default=1)

    # How many means the scalar is

    def _weigh(self, known: Sequence[FactoredLoss]) -> None:
        """The weight of what is written by hand is that of the whole: its factors do not tell it term by term."""
        by_hand = self.remainder is not None or any(each.loss.is_square for each in known)
        #: The factor of the loss of a row, if it is one for all.
        self.of_row: Tensor | None = None
        if by_hand and len(self.located.distinct_locations) == 1:
            rows = self._rows([*self.terms.nonlinear, *(each.loss.node for each in known)])
            grads = [grad.detach() for grad in self.run.how.roots.values()]
            self.run.weight = loss_weight(self.run.roots, grads, rows, self.request.loss_reduction)
            self.of_row = self.run.weight / rows

    def _is_uncounted(self, loss: KnownLoss) -> bool:
        """Whether a term of a sum reaches none of the parameters that count."""
        counted = self.request.counted
        if counted is None or len(self.terms.known) == 1 or counted.issuperset(self.located.graph.leaves.values()):
            return False
        return not any(leaf_of(node) in counted for node in walk([loss.edge.node]))

    def _check_curvature(self, parts: Sequence[Part]) -> None:
        """Refuse a loss that is linear in the network's output where an optimizer wants its curvature, else warn."""
        curved = [e for e in self.extensions if not isinstance(e.columns, Empirical)]
        wanted = curved if self.is_for_optimizer else self._of_ggn()
        if not wanted:
            return
        self._refuse_scaled()
        name = "the loss"
        if self.remainder is not None:
            name, self.run.variables = self.remainder.name, max(self.run.variables, self.remainder.variables)
        if not (parts or self.terms.ends) or not all([part.is_linear for part in parts]):
            return
        if self.is_for_optimizer:
            raise NotCurved(f"{name}: it is linear in the network's output, so it has no curvature; use KFACEmpirical.")
        warnings.warn(
            f"{fields_of(wanted)}: {name} is linear in the network's output, so the GGN is zero. Where a model "
            "contains its loss, or a loss has parameters, let the model return predictions.",
            CurvoptWarning,
            stacklevel=2,
        )

    def _refuse_scaled(self) -> None:
        """Refuse a loss that is linear in what is scaled by a parameter past the outputs of models."""
        graph = self.located.graph
        outputs = {node for node, _ in graph.predictions.union(edge for _, edge in graph.model_calls)}
        scaled = {node for node, _ in self.terms.ends if operation(node) in ("DIV", "MUL")} - outputs
        for node in walk([node for node, _ in self.run.how.roots], last=outputs) if scaled else ():
            if node in scaled:
                raise NotCurved(
                    f"The loss is linear in what {name_of(node)} scales by a parameter, such as the error of a "
                    "likelihood with a learned deviation, so it does not tell its prediction; mark that by "
                    "curvopt.prediction, or use KFACEmpirical."
                )

    # Pull back

    def _pull_back(self, parts: Sequence[Part]) -> None:
        run, edges = self.run, [edge for part in parts for edge in part.edges]
        groups: dict[Any, list[Extension]] = {}  # that share sweeps; the Hessian has the columns of the GGN, too
        for extension in self.extensions:
            kind = Exact() if isinstance(extension.columns, Exact) else extension.columns
            groups.setdefault(kind, []).append(extension)
        hessians = dict.fromkeys([e.columns for e in self.extensions if isinstance(e.columns, Hessian)])
        for i, (kind, extensions) in enumerate(groups.items()):
            last = i == len(groups) - 1 and not hessians and not run.first_order and self.remainder is None
            if isinstance(kind, Exact):
                for part in parts:
                    if isinstance(part, FactoredLoss):
                        self._sweep_root(part, extensions, last and len(parts) == 1)
                        continue
                    warn_of_columns(extensions, part.num_columns)
                    signed = all(isinstance(e.columns, Hessian) for e in extensions)
                    for columns in (part.signed if signed else part.root)(run.chunk_size):
                        run.sweep(columns, extensions, (), part.num_columns)
            elif isinstance(kind, Averaged):
                for part in (part for part in parts if isinstance(part, FactoredLoss)):
                    N = self.located.distinct_locations[0].N
                    for chunk in kfra_jacobians(part.loss.edge, part.curvature, run.calls, N):
                        run.update(chunk, extensions)
            else:
                drawn = self._drawn(parts, kind)
                for columns in drawn:
                    total = len(columns.vectors[0])
                    for start in range(0, total, run.chunk_size):
                        chunk = [v[start : start + run.chunk_size] for v in columns.vectors]
                        is_last = last and columns is drawn[-1] and start + run.chunk_size >= total
                        run.sweep(Columns(columns.edges, chunk), extensions, (), total, is_last)
        if hessians:
            residuals = Residuals(run, edges, [slope for part in parts for slope in part.slopes])
            for hessian in hessians:
                residuals.add([e for e in self.extensions if e.columns == hessian], hessian.modify)
        self._fill_with_zeros()

    def _fill_with_zeros(self) -> None:
        """Parameters on which the scalar depends only linearly have fields, too."""
        run, ends = self.run, [GradientEdge(*edge) for edge in self.terms.ends]
        for extension in self.extensions if ends else ():
            there = {p for p in run.calls_of if (p, extension) in run.totals}
            if len(there) < len(run.calls_of):
                run.sweep(Columns(ends, [new_like(edge).unsqueeze(0) for edge in ends]), [extension], there)

    def _sweep_root(self, part: FactoredLoss, extensions: Sequence[Extension], last: bool) -> None:
        """All columns of a known term; rows of a sample have separate columns."""
        run, locations = self.run, self.located.distinct_locations
        for location in locations:
            samples = location.rows_of(part.edges[0])
            ranks = list(range(len(part.loss.input))) if samples is None else ranks_of(samples)
            left = total = part.curvature.columns * (max(ranks, default=0) + 1)
            warn_of_columns(extensions, total)
            skip = {call for call in run.calls if call.location is not location} if len(locations) > 1 else ()
            for columns in part.root(run.chunk_size, ranks):
                left -= len(columns.vectors[0])
                run.sweep(columns, extensions, skip, total, last and len(locations) == 1 and left == 0)

    def _drawn(self, parts: Sequence[Part], kind: MonteCarlo | Empirical) -> list[Columns]:
        """Columns that are drawn, or gradients: of all parts together, or of one call after the other."""
        vectors, signs = list[Tensor](), dict[Hashable, Tensor]()
        for part in parts:
            if isinstance(kind, Empirical):
                gradients = self._gradients(part, kind, signs)
                found = map(_scaled, gradients, part.typical(kind.generator)) if kind.scaled else gradients
            else:
                found = [column / kind.samples**0.5 for column in part.sample(kind.samples, kind.generator)]
                if self.is_for_optimizer and part.may_be_flat:
                    # outputs in which the loss is linear, as boxes in an L1 loss, have the gradient
                    pairs = zip(found, self._gradients(part, kind, signs), strict=True)
                    found = [torch.where((s == 0).all(0), g.to(s) / kind.samples**0.5, s) for s, g in pairs]
            vectors += found
        edges = [edge for part in parts for edge in part.edges]
        has_rows = isinstance(kind, MonteCarlo) or any([v.shape[1:2].numel() > 1 for v in vectors])
        if self._generator_of_signs(kind) is not None and not has_rows:
            samples: dict[Hashable, list[int]] = {}  # calls with one row each have samples of their own
            for i, edge in enumerate(edges):
                samples.setdefault(self._calls_behind(edge), []).append(i)
            return [Columns([edges[i] for i in x], [vectors[i] for i in x]) for x in samples.values()]
        return [Columns(edges, vectors)] if edges else []

    def _generator_of_signs(self, kind: MonteCarlo | Empirical) -> torch.Generator | None:
        """The generator of random signs of the rows' gradients, where rows are no samples."""
        return kind.generator if any(x.is_one_sample for x in self.located.distinct_locations) else None

    def _calls_behind(self, edge: GradientEdge) -> Hashable:
        """The calls of models that compute a prediction; its node where there is none."""
        records = [record for node in walk([edge.node]) for record, *_ in records_of(node)]
        calls = {record.model_call for record in records if isinstance(record, ModuleCall) and record.model_call}
        return frozenset(calls) or edge.node

    def _gradients(self, part: Part, kind: MonteCarlo | Empirical, signs: dict[Hashable, Tensor]) -> list[Tensor]:
        """Gradients of single predictions, ``[1, rows, ...]``, with random signs where rows are no samples.

        Args:
            part: the part.
            kind: has the generator of the signs.
            signs: by number of rows. Row n of all parts is of one sample, so they share its sign; of one row each,
                predictions of one call do.
        """
        weights = self.of_row if self.of_row is not None or isinstance(part, GenericLoss) else part.weights
        assert weights is not None  # beside a remainder
        # a prediction that weighs nothing has no gradient, either
        factor = 1 / weights.clamp(min=torch.finfo(weights.dtype).tiny).sqrt()
        gradients = [(slope * factor.to(slope.device)).unsqueeze(0) for slope in part.slopes]
        generator = self._generator_of_signs(kind)
        if generator is None:
            return gradients
        for i, (edge, g) in enumerate(zip(part.edges, gradients, strict=True)):
            rows = g.shape[1] if g.shape[1] > 1 else self._calls_behind(edge)
            if rows not in signs:
                signs[rows] = 2 * torch.randint(2, g.shape[1:2], generator=generator, device=generator.device) - 1
            gradients[i] = g * signs[rows].to(g).view(1, -1, *[1] * (g.dim() - 2))
        return gradients


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


def _scaled(column: Tensor, typical: Tensor) -> Tensor:
    """A column with the mean square of another one, and the column itself where that has none."""
    typical = torch.where(typical == 0, column.to(typical), typical)
    size = widened(column).norm().clamp(min=torch.finfo(torch.float32).tiny)
    return column * (widened(typical).norm() / size).to(column)
