"""Hessian of any loss in the outputs of the network, by double backward between these outputs and the scalar.

Nothing has to be known about the loss. The graph between the *heads* z (outputs of the network) and the scalar tells::

    loss = (z.logsumexp(1) - z[torch.arange(N), y]).mean()
    curvature = GenericLoss([get_gradient_edge(loss)], [torch.ones(())], [Head(get_gradient_edge(z), N)], N)
    for edges, (s,), weights in curvature.root(size=10):  # columns s, [10, N, C]
        H = H + torch.einsum("vnc,vnd->ncd", s, s)  # the Hessian of each sample

It has to be block-diagonal over the samples. Products with random vectors find out which entries of a sample it
couples, so that one product gives a column of all blocks::

    (z - t).square().sum()             single entries
    cross_entropy(z [N, C, T], y)      the C entries of each position: blocks C x C
    log_softmax over all of a sample   all entries of a sample
    z.mean(0).square().sum()           entries of several samples: an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from curvopt.core.linear_algebra import eigh
from curvopt.core.losses.known import KnownLoss
from curvopt.core.losses.roots import Columns, NotConvex, NotCurved
from curvopt.core.nodes import metadata, name_of, saved, shape_of, walk
from curvopt.core.record import records_of
from curvopt.core.vjp import NodeVjp, call_node, loses_derivative
from curvopt.errors import CurvoptError

#: How a loss of no known kind is reduced over the samples; ``None`` for what its last operation is.
Reduction: TypeAlias = Literal["mean", "sum"] | None
#: Additions of scalars, and what ``reduction="sum"`` is for losses of PyTorch.
ADDITIONS, REDUCES_BY_SUM = ("AddBackward0", "SubBackward0"), 2
#: Largest size of a block, and largest number of entries of all blocks.
LARGEST_BLOCK, ENTRIES = 4096, 2**28
#: Products of a Hessian with a vector at each head. Bounds on rounding errors are added to a list as second argument.
Product = Callable[..., list[Tensor]]


class Head(NamedTuple):
    """An output of the network.

    Attributes:
        edge: its gradient edge.
        N: number of its samples.
        axis: the axis that has N equal shares.
        labels: which samples of the whole batch they are; ``None`` for the first N.
    """

    edge: GradientEdge
    N: int
    axis: int = 0
    labels: tuple[int, ...] | None = None

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of the whole batch that it has."""
        return tuple(range(self.N)) if self.labels is None else self.labels

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return tuple(metadata(self.edge.node, self.edge.output_nr).shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape with its axis split in two: samples, and rows of a sample."""
        return (*self.shape[: self.axis], self.N, self.shape[self.axis] // self.N, *self.shape[self.axis + 1 :])

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of `sizes` along which a sample has several entries."""
        return tuple(a for a, size in enumerate(self.sizes) if a != self.axis and size > 1)

    def new(self, make: Callable[..., Tensor] = torch.zeros, **kwargs: Any) -> Tensor:
        """A tensor like the output, in float32 at least."""
        meta = metadata(self.edge.node, self.edge.output_nr)
        return make(self.shape, dtype=torch.promote_types(meta.dtype, torch.float32), device=meta.device, **kwargs)


class Cells(NamedTuple):
    """Entries of heads arranged as ``[N, P, C]``: one block C x C for each sample and position.

    Attributes:
        heads: the heads, by their indices.
        axes: for each head the axes of `Head.sizes` along which entries belong to one block.
    """

    heads: dict[int, Head]
    axes: Sequence[tuple[int, ...]]

    def _parts(self) -> Iterator[tuple[Head, list[int], int]]:
        """For each head the order of its axes (samples, positions, entries of a block), and the number of the last."""
        for head, axes in zip(self.heads.values(), self.axes, strict=True):
            positions = [a for a in range(len(head.sizes)) if a != head.axis and a not in axes]
            yield head, [head.axis, *positions, *axes], prod(head.sizes[a] for a in axes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, P and C."""
        parts = list(self._parts())
        head, _, C = parts[0]
        return head.N, prod(head.shape) // max(head.N * C, 1), sum(C for *_, C in parts)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """``[N, P, C]`` from a tensor for each head of the loss."""
        flat = zip(self.heads, self._parts(), strict=True)
        return torch.cat([tensors[i].view(h.sizes).permute(o).reshape(*self.shape[:2], C) for i, (h, o, C) in flat], 2)

    def scatter(self, cells: Tensor) -> dict[int, Tensor]:
        """``[v, *z.shape]`` for each of its heads, from ``[v, N, P, C]``."""
        vectors, parts = {}, list(self._parts())
        split = cells.split([C for *_, C in parts], 3)
        for i, (head, order, _), part in zip(self.heads, parts, split, strict=True):
            part = part.reshape(-1, *(head.sizes[a] for a in order))
            vectors[i] = part.permute(0, *(1 + order.index(a) for a in range(len(order)))).reshape(-1, *head.shape)
        return vectors


class Probe:
    """Products of the Hessian with random vectors, which show its structure.

    If and (almost surely) only if ``H`` has no entries between cells, ``H (s v) = s (H v)`` for a random vector
    ``v`` and a random factor ``s`` for each cell. Rounding errors show in ``H (c v) = c (H v)``.

    Args:
        heads: the outputs of the network.
        product: products with the Hessian.
        seed: of the random numbers; PyTorch's generator is not touched.
        margin: by which the estimate of rounding errors is multiplied.

    Attributes:
        rounding: bound on rounding errors of products, if operations cancel the largest numbers on the way.
        noise: estimate of them, root mean square for each head, times the margin.
        finite: whether all products are.
    """

    def __init__(self, heads: Sequence[Head], product: Product, seed: int, margin: float):
        """Take the products."""
        self.heads, self.product = dict(enumerate(heads)), product
        self.generator = torch.Generator(heads[0].new().device).manual_seed(seed)
        self.vectors = [head.new(torch.randn, generator=self.generator) for head in heads]
        rounding = [self.vectors[0].new_zeros(())]
        self.images = product(self.vectors, rounding)
        self.rounding = 10 * torch.stack(rounding).amax()
        largest = torch.stack([image.abs().amax() for image in self.images]).amax()
        self.finite, self.unit = bool(largest.isfinite()), torch.where(largest > 0, largest, 1)
        c = 1.37  # rounds otherwise than 1
        again = product([c * v for v in self.vectors])
        noise = self._rms([h / c - i for h, i in zip(again, self.images, strict=True)])
        self.noise = margin * torch.maximum(noise, torch.finfo(noise.dtype).eps * self._rms(self.images))

    def _rms(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([(t / self.unit).square().mean().sqrt() * self.unit for t in tensors])

    def _apart(self, cells: Sequence[Cells]) -> list[bool]:
        """For each head, whether its entries have nothing to do with entries of other cells."""
        factors = dict(enumerate(map(torch.ones_like, self.vectors)))
        for each in cells:
            v, (N, P, C) = self.vectors[next(iter(each.heads))], each.shape
            s = torch.rand(1, N, P, 1, generator=self.generator, dtype=v.dtype, device=v.device) + 0.5
            factors |= {i: factor[0] for i, factor in each.scatter(s.expand(1, N, P, C)).items()}
        images = self.product([s * v for s, v in zip(factors.values(), self.vectors, strict=True)])
        errors = [h - s * image for h, s, image in zip(images, factors.values(), self.images, strict=True)]
        return (self._rms(errors) <= self.noise).tolist()

    def cells(self) -> list[Cells] | None:
        """Cells as small as can be without entries of the Hessian between them; ``None`` if samples are coupled."""
        entries = [Cells({i: head}, [()]) for i, head in self.heads.items()]
        if not self.finite:
            return entries
        apart = self._apart(entries)
        found, rest = [entries[i] for i in self.heads if apart[i]], [i for i in self.heads if not apart[i]]
        if rest:
            batches = dict.fromkeys(h.samples for h in self.heads.values())
            alike = [{i: h for i, h in self.heads.items() if h.samples == batch} for batch in batches]
            samples = [Cells(heads, [head.axes for head in heads.values()]) for heads in alike]
            if not all(self._apart(samples)):
                return None
        for heads in self._groups(rest):
            *smaller, largest = _arrangements({i: self.heads[i] for i in heads})
            smaller = smaller[len(heads) == 1 :]  # single entries are not apart
            tested = (cells for cells in smaller if all(self._apart([cells])[i] for i in heads))
            found.append(next(tested, largest))
        return found

    def _groups(self, indices: list[int]) -> list[set[int]]:
        """Some heads in groups between which the Hessian has no entries."""
        whole = {i: Cells({i: self.heads[i]}, [self.heads[i].axes]) for i in indices}
        apart = self._apart([*whole.values()]) if len(indices) > 1 else [True] * len(self.heads)
        groups = [{i} for i in indices if apart[i]]
        for i in (i for i in indices if not apart[i]):
            apart_from = self._apart([whole[i]])
            group = {i, *(j for j in indices if not apart_from[j] and self.heads[j].samples == self.heads[i].samples)}
            linked = [other for other in groups if other & group]
            groups = [*(other for other in groups if other not in linked), group.union(*linked)]
        return groups


def _arrangements(heads: dict[int, Head]) -> list[Cells]:
    """Cells of heads together, small ones first: positions are along all axes, all but one, or none."""
    options: list[dict[tuple[int, ...], list[tuple[int, ...]]]] = []
    for head in heads.values():
        options.append({})
        for axes in dict.fromkeys([(), *((a,) for a in head.axes), head.axes]):
            positions = tuple(head.sizes[a] for a in head.axes if a not in axes)
            options[-1].setdefault(positions, []).append(axes)
    common = [key for key in options[0] if all(key in other for other in options)]
    cells = [Cells(heads, axes) for key in common for axes in zip(*(o[key] for o in options), strict=False)]
    return sorted(cells, key=lambda c: c.shape[2])


class Blocks(NamedTuple):
    """Blocks of the Hessian in eigenvectors, of largest absolute eigenvalues first.

    Attributes:
        cells: which entries they are of.
        values: eigenvalues, ``[N, P, R]``.
        vectors: eigenvectors, ``[N, P, C, R]``.
        tolerance: bound on rounding errors of eigenvalues, ``[N, P, 1]``.
    """

    cells: Cells
    values: Tensor
    vectors: Tensor
    tolerance: Tensor

    @property
    def columns(self) -> Tensor:
        """Position and rank of each column that is nonzero for any sample, ``[V, 2]``, at least one."""
        size = self.values.abs()
        rounding = 10 * size.shape[2] * torch.finfo(size.dtype).eps * size.amax(2, keepdim=True)
        nonzero = ((size != 0) & ~(size < rounding)).any(0).nonzero()
        return nonzero if len(nonzero) else nonzero.new_zeros(1, 2)


class GenericLoss:
    """The Hessian of a loss in several heads together, and the gradient at each.

    Derivatives are partial: a path through another head is cut. Everything is computed when it is first asked for,
    which has to be before the user's backward frees the graph. No hook of the user runs, and the graph stays as it is
    (see `curvopt.core.vjp`). Results are not differentiable.

    Args:
        roots: gradient edges of the scalars that are differentiated.
        grads: the gradient of each.
        heads: the outputs of the network.
        N: number of samples of the whole batch.
        largest_block: number of entries of a sample's outputs that it may couple.
        known: terms of the scalars that are left out.
        ends: tensors of which the rest is a linear function.
        rows: number of predictions, if these are no samples.

    Attributes:
        edges: where the heads and the ends come from.
        may_be_flat: whether the scalar may be linear in entries there.
    """

    may_be_flat = True

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        heads: Sequence[Head],
        N: int,
        largest_block: int = LARGEST_BLOCK,
        known: Sequence[KnownLoss] = (),
        ends: Sequence[GradientEdge] = (),
        rows: int | None = None,
    ):
        self.N, self.rows, self.largest_block = N, rows or N, largest_block
        self.roots, self.grads, self.heads = roots, [grad.detach() for grad in grads], list(heads)
        self.known, self.ends, self.edges = known, ends, [*(head.edge for head in heads), *ends]
        self.name = f"the loss ({', '.join(name_of(root.node) for root in roots)})"

    @cached_property
    def _vjp(self) -> NodeVjp:
        # less the known terms: what arrives at them is taken off there
        roots = [*self.roots, *(GradientEdge(loss.node, 0) for loss in self.known)]
        return NodeVjp(roots, self.edges)

    @cached_property
    def _vectors(self) -> list[Tensor]:
        return [*self.grads, *(-loss.grad.detach() for loss in self.known)]

    @cached_property
    def slopes(self) -> list[Tensor]:
        """Gradient of the loss at each edge, in float32 at least."""
        with torch.no_grad():
            slopes = self._vjp(self._vectors)
        return [new_like(edge) if grad is None else grad for edge, grad in zip(self.edges, slopes, strict=True)]

    @property
    def num_columns(self) -> int:
        """Number of all columns of `root`, and of `signed`."""
        return sum(len(blocks.columns) for blocks in self.blocks)

    def root(self, size: int) -> Iterator[Columns]:
        """Columns s of a root of the Hessian, ``H = sum_v s_v s_v^T`` for each sample, at most ``size`` at a time.

        Raises:
            CurvoptError: if the Hessian is indefinite, and as `blocks`.
        """
        self.check_definite()
        return (columns._replace(weights=None) for columns in self.signed(size))

    def signed(self, size: int) -> Iterator[Columns]:
        """Columns with weights of a Hessian that may be indefinite, ``H = sum_v w_v s_v s_v^T`` for each sample."""
        for blocks in self.blocks:
            cells, values, vectors, _ = blocks
            root = (vectors * values.abs().sqrt().unsqueeze(2)).permute(1, 3, 0, 2)
            for p, r in (chunk.T for chunk in blocks.columns.split(size)):
                columns = root.new_zeros(len(p), *cells.shape)
                columns[torch.arange(len(p), device=p.device), :, p] = root[p, r]
                heads, weights = list(cells.heads.values()), values.sign()[:, p, r].T
                if heads[0].labels is not None:  # it may have a part of the samples
                    labels = torch.tensor(heads[0].labels, device=weights.device)
                    weights = weights.new_zeros(len(weights), self.N).index_copy(1, labels, weights)
                yield Columns([head.edge for head in heads], list(cells.scatter(columns).values()), weights)

    def typical(self, generator: torch.Generator | None) -> list[Tensor]:
        """A column at each edge with the mean square of random ones."""
        return self.sample(1, generator)

    def sample(self, samples: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Independent random columns ``[samples, *z.shape]`` at each head, with ``E[s s^T] = H``: a root times signs.

        Those at the ends are zero.

        Raises:
            CurvoptError: as `root`.
        """
        self.check_definite()
        drawn: dict[int, Tensor] = {}
        for cells, values, vectors, _ in self.blocks:
            signs = values.new_empty(samples, *values.shape).bernoulli_(0.5, generator=generator) * 2 - 1
            drawn |= cells.scatter(torch.einsum("npcr,mnpr->mnpc", vectors, signs * values.clamp(min=0).sqrt()))
        zeros = (new_like(edge).expand(samples, *shape_of(edge.node, edge.output_nr)) for edge in self.ends)
        return [*(drawn[i] for i in range(len(self.heads))), *zeros]

    @property
    def variables(self) -> int:
        """Number of variables of a prediction, see `LossCurvature`: entries of z that have separate blocks."""
        shapes = (blocks.cells.shape for blocks in self.blocks)
        return max((N * P // self.rows for N, P, C in shapes if C == 1), default=1)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the Hessian is zero and the gradient is not: of hinge losses, of a critic's score."""
        return not any(blocks.values.any() for blocks in self.blocks) and any(slope.any() for slope in self.slopes)

    @cached_property
    def is_definite(self) -> bool:
        """Whether the Hessian has no negative eigenvalue."""
        return not any((blocks.values < -blocks.tolerance).any() for blocks in self.blocks)

    def check_definite(self) -> None:
        """Raise where there is no Gauss-Newton matrix.

        Raises:
            CurvoptError: if the Hessian is indefinite, and as `blocks`.
        """
        if not self.is_definite:
            smallest = min(float(blocks.values.min()) for blocks in self.blocks)
            raise NotConvex(
                f"{self.name}: its Hessian in the network's output is indefinite (it has the eigenvalue "
                f"{smallest:.3g}), so there is no Gauss-Newton matrix; use DiagHessian or HMP, or KFACEmpirical."
            )

    @cached_property
    def blocks(self) -> list[Blocks]:
        """The Hessian: each head is in one element.

        Raises:
            CurvoptError: if it couples samples, has too large blocks or is not finite, or if PyTorch has no second
                derivative of an operation, or a wrong one.
        """
        if not self.heads:
            return []
        product = self._product()
        margin = 4 if self._vjp.eps > 1e-4 else 30
        for seed in range(3):  # so that rounding errors are not taken for coupling by accident
            probe = Probe(self.heads, product, seed, margin * 2**seed)
            cells = probe.cells()
            if cells is not None:
                break
        else:
            raise CurvoptError(
                f"{self.name}: it couples samples (its Hessian in the network's output has entries between them), but "
                "second-order quantities need a sum or mean over samples; use KFACEmpirical or first-order quantities."
            )
        if not probe.finite and all(slope.isfinite().all() for slope in self.slopes):  # else the network diverged
            raise CurvoptError(f"{self.name}: its Hessian in the network's output is not finite; use KFACEmpirical.")
        for N, P, C in (each.shape for each in cells):
            if C > self.largest_block or N * P * C**2 > ENTRIES:
                raise CurvoptError(
                    f"{self.name}: it couples {C} entries of the network's output of each sample, too many for its "
                    f"exact Hessian ({N * P} blocks {C} x {C}); use KFACEmpirical."
                )
        rows: list[list[Tensor]] = [[] for _ in cells]
        for c in range(max(each.shape[2] for each in cells)):
            vectors = dict(enumerate(head.new() for head in self.heads))
            active = [(each, found) for each, found in zip(cells, rows, strict=True) if c < each.shape[2]]
            for each, _ in active:
                unit = each.gather([*vectors.values()])
                unit[..., c] = 1
                vectors |= {i: vector[0] for i, vector in each.scatter(unit.unsqueeze(0)).items()}
            images = product([*vectors.values()])
            for each, found in active:
                found.append(each.gather(images))
        return [self._decomposed(c, torch.stack(r, 2), probe) for c, r in zip(cells, rows, strict=True)]

    def _decomposed(self, cells: Cells, H: Tensor, probe: Probe) -> Blocks:
        limit = probe.noise[list(cells.heads)].amax().clamp(min=probe.rounding)
        if ((H - H.mT).abs() > limit + 1e-2 * H.abs().amax()).any():
            raise CurvoptError(
                f"{self.name}: PyTorch's second derivative of an operation in it is wrong (its Hessian is not "
                "symmetric); use KFACEmpirical or first-order quantities."
            )
        values, vectors = (H[..., 0], torch.ones_like(H)) if H.shape[3] == 1 else eigh((H + H.mT) / 2)
        order = values.abs().argsort(2, descending=True)
        values, vectors = values.gather(2, order), vectors.gather(3, order.unsqueeze(2).expand_as(vectors))
        tolerance = H.shape[3] ** 0.5 * limit + min(1e4 * self._vjp.eps, 0.1) * values[..., :1].abs()
        return Blocks(cells, values, vectors, tolerance)

    def _product(self) -> Product:
        """Products of the Hessian with a vector at each head; they note how large rounding errors may be on the way."""

        def run(vjp: NodeVjp, *args: Any) -> list[Tensor | None]:
            try:
                return vjp(*args)
            except (CurvoptError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                raise self._not_twice(str(error).split(". ")[0]) from error

        with torch.enable_grad():
            slope = run(self._vjp, self._vectors)[: len(self.heads)]
        curved = {i: s for i, s in enumerate(slope) if s is not None and s.grad_fn is not None}
        edges = [GradientEdge(s.grad_fn, s.output_nr) for s in curved.values()]  # type: ignore[arg-type]
        twice = NodeVjp(edges, [head.edge for head in self.heads])
        if any(name_of(node) == "torch::autograd::Error" for node in twice.nodes):
            raise self._not_twice("a function in it is marked with once_differentiable")
        if lost := [name_of(node) for node in self._vjp.order if loses_derivative(node)]:
            raise self._not_twice(f"the backward of {lost[0]} returns what its forward computed, or leaves autograd")
        inside = {*self._vjp.order, *(head.edge.node for head in self.heads)}

        def product(vectors: Sequence[Tensor], rounding: list[Tensor] | None = None) -> list[Tensor]:
            def arrived(node: Node, grad: Tensor) -> None:
                if rounding is not None and node in inside and grad.numel() > 1:
                    rounding.append(torch.finfo(grad.dtype).eps * grad.abs().amax().to(vectors[0]))

            with torch.no_grad():
                images = run(twice, [vectors[i] for i in curved], arrived)
            return [torch.zeros_like(v) if h is None else h for h, v in zip(images, vectors, strict=True)]

        return product

    def _not_twice(self, reason: str) -> CurvoptError:
        return NotCurved(
            f"{self.name}: PyTorch has no second derivative of it ({reason}); use other operations, KFACEmpirical or "
            "first-order quantities."
        )


def new_like(edge: GradientEdge) -> Tensor:
    """Zeros like the tensor at an edge, in float32 at least."""
    return Head(edge, 1).new()


def loss_weight(roots: Sequence[GradientEdge], grads: Sequence[Tensor], N: int, reduction: Reduction) -> Tensor:
    """How many means over the samples a loss is, ``[]``: the constant that scales it, 1 for ``mean()``.

    A sum over N rows is N means, whatever constant divides it. If what is summed by hand has several entries for each
    row, a constant of N or more makes it a mean again, as it may count entries (those that a mask has left, say). Terms
    of a sum weigh 1 together, or as much as the largest sum over rows among them; penalties on parameters count only
    where they are alone.

    Args:
        roots: gradient edges of the scalars that are differentiated.
        grads: the gradient of each.
        N: number of samples.
        reduction: "mean" to take sums for means, "sum" for N times as much; ``None`` to see which of them it is.
    """
    factors = [_factor(root, grad, N, reduction) for root, grad in zip(roots, grads, strict=True)]
    return torch.stack([factor.to(factors[0].device) for factor in factors]).amax() * (N if reduction == "sum" else 1)


@torch.no_grad()
def _factor(root: GradientEdge, grad: Tensor, N: int, reduction: Reduction) -> Tensor:
    """How many means over the samples a scalar is, times the gradient that arrives at it, ``[]``."""
    if grad.dim():
        return grad.new_ones(())
    found, penalties = list[Tensor](), list[Tensor]()
    # an operation, the product of constants from the scalar down to it, that before the last constant, and that at the
    # first addition
    terms: list[tuple[Node, Tensor, Tensor, Tensor | None]] = [(root.node, grad, grad, None)]
    while terms:
        node, factor, before, at_addition = terms.pop()
        kind, operands = name_of(node), []
        if kind in ("MulBackward0", "DivBackward0", "NegBackward0", *ADDITIONS) and not metadata(node).shape:
            grads = zip(node.next_functions, call_node(node, [factor]), strict=True)
            operands = [(edge[0], g) for edge, g in grads if edge[0] is not None and g is not None]
        if kind in ADDITIONS and operands and reduction is None:
            at_addition = factor if at_addition is None else at_addition
            terms += [(below, g, g if before is factor else before, at_addition) for below, g in operands]
        elif kind not in ADDITIONS and len(operands) == 1 and node.next_functions[0][0] is not None:
            terms.append((operands[0][0], operands[0][1], factor, at_addition))  # c / loss is not linear
        else:
            mean, total = abs(before), abs(factor)
            if reduction is None and (entries := _summed_entries(node, N)):
                mean = total * N if entries == 1 else torch.where(total * N <= mean, mean, total * N)
            elif at_addition is not None:
                mean = abs(at_addition)
            elif kind.startswith("SumBackward") and reduction != "sum":
                mean = torch.where(total < mean, mean, total)
            else:
                mean = total
            (penalties if at_addition is not None and not _is_computed(node) else found).append(mean)
    return torch.stack(found or penalties).amax()


def _summed_entries(node: Node, N: int) -> int:
    """How many entries of each row an operation sums; 0 where it does not sum what the network computes from N rows.

    A sum of a loss of PyTorch is one of rows' losses.
    """
    if not name_of(node).startswith("SumBackward"):
        return int(saved(node, "reduction", None) == REDUCES_BY_SUM)
    below, nr = node.next_functions[0]
    if below is None or N not in shape_of(below, nr)[:2] or not _is_computed(below):
        return 0
    return shape_of(below, nr).numel() // max(N, 1)


def _is_computed(node: Node) -> bool:
    """Whether the network computes a tensor: no penalty on parameters."""
    return any(map(records_of, walk([node])))
