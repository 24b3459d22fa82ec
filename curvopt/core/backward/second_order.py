"""Second-order quantities of a backward: the Hessian of the loss is factored into columns, which are pulled back.

Known losses have a root in closed form; of any other loss the root comes from double backward (`losses.any`). Columns
of the cross-entropy of outputs ``[N, C]``::

    Exact         KFLR, DiagGGNExact, GGNMP    C - 1 columns of S, where S S^T is the Hessian
    Hessian       DiagHessian, HMP             these, then the residuals of nonlinear operations
    MonteCarlo    KFAC, DiagGGNMC              gradients at targets that are drawn from the softmax
    Empirical     KFACEmpirical                the gradient at the target itself
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.backward.columns import (
    Empirical,
    Exact,
    Hessian,
    MonteCarlo,
    ranks_of,
)
from curvopt.core.backward.hessian_residuals import sweep_residuals
from curvopt.core.backward.kfra import kfra_jacobians
from curvopt.core.backward.request_checks import fields_of, naming_fields, warn_of_columns
from curvopt.core.graph.nodes import leaf_of, walk
from curvopt.core.losses.any import GenericLoss
from curvopt.core.losses.blocks import Head
from curvopt.core.losses.roots import Diagonal, Loss, LossCurvature, NotConvex, NotCurved
from curvopt.core.products.sums import cast, widened
from curvopt.errors import CurvoptError, CurvoptWarning

if TYPE_CHECKING:
    from curvopt.core.backward.backward_pass import BackwardPass
    from curvopt.extensions.base import Extension


class FactoredLoss(NamedTuple):
    """A loss with its Hessian in its input z, factored.

    Attributes:
        loss: the loss.
        edge: where z comes from.
        curvature: its Hessian, up to a factor.
        scale: the root of the factor.
        grad: what arrived.
    """

    loss: Loss
    edge: GradientEdge
    curvature: LossCurvature
    scale: Tensor
    grad: Tensor


def second_order(run: BackwardPass, arrived: Mapping[GradientEdge, Tensor]) -> None:
    """Pull back the columns of the known losses, from the gradients that arrived at them."""
    try:
        factored = [
            _factor(run, loss, arrived[edge])
            for loss, edge in run.losses.items()
            if loss.edge is not None and loss.input.numel() and edge in arrived
        ]
    except CurvoptError as error:
        whole = all(isinstance(e.columns, Empirical) for e in run.second_order)
        if isinstance(error, NotConvex):
            whole = whole or any(isinstance(e.columns, Hessian) for e in run.second_order)
        loss = run.any_loss() if run.any_loss is not None and whole else None
        if loss is None:
            raise
        run.weight = 0.0
        second_order_of_any_loss(run, loss)
        return
    if factored and (ggn := _ggn(run)) and all(map(_is_linear, factored)):
        _say_linear(run, ggn, factored[0].loss.describe())
    by_columns = _by_columns(run)
    remaining = len(by_columns) + sum(isinstance(e.columns, Hessian) for e in run.second_order)
    for columns, extensions in by_columns.items():
        remaining -= 1
        last = remaining == 0 and not run.first_order
        if isinstance(columns, Exact):
            _exact(run, factored, extensions, last)
        elif isinstance(columns, MonteCarlo):
            drawn = [cast(_sampled(run, columns, each), each.loss.input.dtype) for each in factored]
            _sweep_chunks(run, [each.edge for each in factored], drawn, extensions, last)
        elif isinstance(columns, Empirical):
            column = [cast(_signed(run, columns, _empirical(each)), each.loss.input.dtype) for each in factored]
            if columns.scaled:
                column = list(map(_scaled, column, [_drawn(each, columns) for each in factored]))
            _sweep_chunks(run, [each.edge for each in factored], column, extensions, last)
        else:
            _averaged(run, factored, extensions)
    for hessian, extensions in _of_hessian(run).items():
        for each in factored:
            slope = each.loss.slope(each.grad).to(each.loss.input.dtype)
            sweep_residuals(run, [each.edge], [slope], hessian.modify, extensions)


def second_order_of_any_loss(run: BackwardPass, loss: GenericLoss) -> None:
    """Pull back the columns of a loss of no known kind, from the heads."""
    edges = [head.edge for head in loss.heads]
    try:
        run.weight = loss.weight
        if ggn := _ggn(run):
            run.variables = max(run.variables, loss.variables)
            if loss.is_linear:
                _say_linear(run, ggn, loss.name)
        for columns, extensions in _by_columns(run).items():
            if isinstance(columns, Exact):
                warn_of_columns(extensions, loss.num_columns)
                signed = all(isinstance(e.columns, Hessian) for e in extensions)
                for heads, vectors, weights in (loss.signed if signed else loss.root)(run.chunk_size):
                    weights = _of_whole_batch(weights, loss.heads[heads[0]], loss.N)  # noqa: PLW2901
                    run.sweep([edges[i] for i in heads], vectors, weights, extensions, (), loss.num_columns)
            elif isinstance(columns, MonteCarlo):
                drawn = [v / columns.samples**0.5 for v in loss.sample(columns.samples, columns.generator)]
                if run.counted is not None:
                    slopes = [_signed(run, columns, each) for each in _empirical_of_any_loss(loss)]
                    drawn = list(map(_or_slopes, drawn, slopes))
                _sweep_chunks(run, edges, drawn, extensions, False)
            elif isinstance(columns, Empirical):
                column = [_signed(run, columns, each) for each in _empirical_of_any_loss(loss)]
                if columns.scaled:
                    column = list(map(_scaled, column, loss.sample(1, columns.generator)))
                _sweep_chunks(run, edges, column, extensions, False)
        for hessian, extensions in _of_hessian(run).items():
            sweep_residuals(run, edges, loss.slope, hessian.modify, extensions)
    except NotCurved:  # an optimizer takes another quantity: its users know no fields
        raise
    except CurvoptError as error:
        raise naming_fields(run.second_order, error) from error
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise CurvoptError(
            f"{fields_of(run.second_order)}: a part of the loss was compiled by torch.compile, so that its "
            "backward runs once; compute it outside of what is compiled, or set "
            "donated_buffer = False in PyTorch's functorch configuration before it is compiled."
        ) from error


def _ggn(run: BackwardPass) -> list[Extension]:
    """Extensions that a loss without curvature leaves with zeros; for optimizers also those of the Hessian."""
    of_hessian = Hessian if run.counted is None else ()
    curved = [e for e in run.second_order if isinstance(e.columns, (Exact, MonteCarlo))]
    return [e for e in curved if not isinstance(e.columns, of_hessian)]


def _is_linear(loss: FactoredLoss) -> bool:
    """Whether the Hessian is zero and the gradient is not."""
    curvature = loss.curvature
    return type(curvature) is Diagonal and not curvature.diagonal.any() and bool(loss.loss.slope(loss.grad).any())


def _say_linear(run: BackwardPass, ggn: Sequence[Extension], name: str) -> None:
    """Refuse a loss that is linear in the network's output where an optimizer wants its curvature, else warn."""
    if run.counted is not None:
        raise NotCurved(f"{name}: it is linear in the network's output, so it has no curvature; use KFACEmpirical.")
    warnings.warn(
        f"{fields_of(ggn)}: {name} is linear in the network's output, so the GGN is zero. Where a model "
        "contains its loss, or a loss has parameters, let the model return predictions.",
        CurvoptWarning,
        stacklevel=2,
    )


def _of_whole_batch(weights: Tensor | None, head: Head, N: int) -> Tensor | None:
    """Weights ``[v, N]`` of columns of a head that has some of the samples."""
    if weights is None or head.labels is None:
        return weights
    return weights.new_zeros(len(weights), N).index_copy(1, weights.new_tensor(head.labels, dtype=torch.long), weights)


def _by_columns(run: BackwardPass) -> dict[Any, list[Extension]]:
    """Extensions that share sweeps: those of the Hessian have the columns of the GGN, too."""
    groups: dict[Any, list[Extension]] = {}
    for extension in run.second_order:
        columns = extension.columns
        groups.setdefault(Exact() if isinstance(columns, Exact) else columns, []).append(extension)
    return groups


def _of_hessian(run: BackwardPass) -> dict[Hessian, list[Extension]]:
    """Extensions that share residuals."""
    kinds = dict.fromkeys(e.columns for e in run.second_order if isinstance(e.columns, Hessian))
    return {kind: [e for e in run.second_order if e.columns == kind] for kind in kinds}


def _factor(run: BackwardPass, loss: Loss, grad: Tensor) -> FactoredLoss:
    try:
        curvature, scale = loss.curvature(grad)
    except CurvoptError as error:
        raise naming_fields(run.second_order, error) from error
    if any(isinstance(e.columns, Exact) and e.columns.by_entries for e in run.second_order):
        curvature = curvature.by_entries()
    assert loss.edge is not None and curvature.weights is not None
    if not _is_of_others(run, loss):
        run.weight = run.weight + (curvature.weights * scale.square()).detach().sum()
        run.variables = max(run.variables, curvature.variables)
    return FactoredLoss(loss, loss.edge, curvature, scale, grad)


def _is_of_others(run: BackwardPass, loss: Loss) -> bool:
    """Whether a loss of a sum reaches none of the parameters that count."""
    if run.counted is None or len(run.losses) == 1 or run.counted.issuperset(run.located.graph.leaves.values()):
        return False
    assert loss.edge is not None
    return not any(leaf_of(node) in run.counted for node in walk([loss.edge.node]))


def _exact(run: BackwardPass, factored: Sequence[FactoredLoss], extensions: Sequence[Extension], last: bool) -> None:
    locations = list({id(call.location): call.location for call in run.calls}.values())
    for loss, curvature, scale in ((each, each.curvature, each.scale) for each in factored):
        for location in locations:
            rows = len(loss.loss.input)
            samples = location.rows_of(loss.edge)
            ranks = list(range(rows)) if samples is None else ranks_of(samples)
            columns = Exact()
            left = total = columns.total(curvature, ranks)
            warn_of_columns(extensions, total)
            skip = {call for call in run.calls if call.location is not location} if len(locations) > 1 else ()
            final = last and len(factored) == len(locations) == 1
            for chunk in columns.chunks(curvature, run.chunk_size, ranks):
                left -= len(chunk)
                vectors = cast(chunk * scale, loss.loss.input.dtype)
                run.sweep([loss.edge], [vectors], None, extensions, skip, total, final and left == 0)


def _empirical(loss: FactoredLoss) -> Tensor:
    assert loss.curvature.weights is not None
    weights = loss.curvature.weights * loss.scale.square()
    # a prediction that weighs nothing has no gradient, either
    factors = 1 / weights.clamp(min=torch.finfo(weights.dtype).tiny).sqrt()
    return (loss.loss.slope(loss.grad) * factors).unsqueeze(0)


def _sampled(run: BackwardPass, columns: MonteCarlo, loss: FactoredLoss) -> Tensor:
    """Random columns ``[V, ...]``; for optimizers with the gradient of outputs in which the loss is linear."""
    drawn = columns.draw(loss.curvature) * loss.scale
    if run.counted is None or not isinstance(loss.curvature, Diagonal):  # no other kind has outputs without curvature
        return drawn
    return _or_slopes(drawn, _signed(run, columns, _empirical(loss)))


def _empirical_of_any_loss(loss: GenericLoss) -> list[Tensor]:
    weights = [w.clamp(min=torch.finfo(w.dtype).tiny).sqrt() for w in loss.weights]
    slopes = zip(loss.slope, weights, loss.heads, strict=True)
    return [slope.unsqueeze(0) / _along(weight, head.axis, slope) for slope, weight, head in slopes]


def _or_slopes(drawn: Tensor, empirical: Tensor) -> Tensor:
    """Columns ``[V, ...]``, with the gradient of outputs in which the loss is linear, as of boxes by an L1 loss."""
    return torch.where((drawn == 0).all(0), empirical.to(drawn) / len(drawn) ** 0.5, drawn)


def _signed(run: BackwardPass, columns: Empirical | MonteCarlo, column: Tensor) -> Tensor:
    """A column ``[1, rows, ...]`` with random signs of the rows, where these are no samples."""
    if columns.generator is None or not any(location.is_one_sample for location in run.located.distinct_locations):
        return column
    bits = torch.randint(2, column.shape[1:2], generator=columns.generator, device=columns.generator.device)
    signs = (2 * bits - 1).to(column)
    return column * signs.view(1, -1, *[1] * (column.dim() - 2))


def _drawn(loss: FactoredLoss, columns: Empirical) -> Tensor:
    """A vector with the mean square of columns at drawn targets."""
    curvature = loss.curvature
    one = curvature.diagonal if isinstance(curvature, Diagonal) else curvature.sample(1, columns.generator)
    return one * loss.scale


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
    """Pull back columns of all losses together."""
    total = len(vectors[0]) if vectors else 0
    for start in range(0, total, run.chunk_size):
        part = [v[start : start + run.chunk_size] for v in vectors]
        run.sweep(edges, part, None, extensions, (), total, last and start + run.chunk_size >= total)


def _averaged(run: BackwardPass, factored: Sequence[FactoredLoss], extensions: Sequence[Extension]) -> None:
    for each in factored:
        for chunk in kfra_jacobians(each.edge, each.curvature, each.scale, run.calls, run.calls[0].location.N):
            run.update(chunk, extensions)


def _along(values: Tensor, axis: int, like: Tensor) -> Tensor:
    """A value for each sample, spread over the shares of an axis."""
    share = like.shape[axis] // len(values)
    return values.repeat_interleave(share).view(-1, *[1] * (like.dim() - axis - 1))
