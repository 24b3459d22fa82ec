"""The entries of the network's outputs that the Hessian of a loss couples, found by products with random vectors.

::

    (z - t).square().sum()             single entries
    cross_entropy(z [N, C, T], y)      the C entries of each position: blocks C x C
    log_softmax over all of a sample   all entries of a sample
    z.mean(0).square().sum()           entries of several samples: an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.graph.nodes import metadata

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
    """Entries of some heads arranged as ``[N, P, C]``, to speak of one block C x C for each sample and position.

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

    If and (almost surely) only if ``H`` has no entries between some cells, ``H (s v) = s (H v)`` for a random vector
    ``v`` and a random factor ``s`` for each cell. Rounding errors are those of ``H (c v) = c (H v)``.

    Args:
        heads: the outputs of the network.
        product: products with the Hessian.
        seed: of the random numbers; PyTorch's own generator is left alone.

    Attributes:
        vectors: a random vector at each head.
        images: their products.
        rounding: bound on rounding errors of products, if operations cancel the largest numbers on the way.
        noise: estimate of them, root mean square for each head, times a margin.
        finite: whether all products are.
        unit: the largest entry of a product, 1 if all are zero.
    """

    vectors: list[Tensor]
    images: list[Tensor]
    rounding: Tensor
    noise: Tensor
    finite: bool
    unit: Tensor

    def __init__(self, heads: list[Head], product: Product, seed: int):
        """Begin without products."""
        self.heads, self.product = dict(enumerate(heads)), product
        self.generator = torch.Generator(heads[0].new().device).manual_seed(seed)

    @classmethod
    def of(cls, heads: list[Head], product: Product, seed: int, margin: float) -> Probe:
        """Take the products."""
        probe = cls(heads, product, seed)
        probe.vectors = [head.new(torch.randn, generator=probe.generator) for head in heads]
        rounding = [probe.vectors[0].new_zeros(())]
        probe.images = product(probe.vectors, rounding)
        probe.rounding = 10 * torch.stack(rounding).amax()
        largest = torch.stack([image.abs().amax() for image in probe.images]).amax()
        probe.finite, probe.unit = bool(largest.isfinite()), torch.where(largest > 0, largest, 1)
        c = 1.37  # rounds otherwise than 1
        again = product([c * v for v in probe.vectors])
        noise = probe._rms([h / c - i for h, i in zip(again, probe.images, strict=True)])
        probe.noise = margin * torch.maximum(noise, torch.finfo(noise.dtype).eps * probe._rms(probe.images))
        return probe

    def _rms(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([(t / self.unit).square().mean().sqrt() * self.unit for t in tensors])

    def _apart(self, cells: Sequence[Cells]) -> list[bool]:
        """For each head, whether its entries have nothing to do with those of cells other than their own."""
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
            alone = self._apart([whole[i]])
            group = {i, *(j for j in indices if not alone[j] and self.heads[j].samples == self.heads[i].samples)}
            linked = [other for other in groups if other & group]
            groups = [*(other for other in groups if other not in linked), group.union(*linked)]
        return groups


def _arrangements(heads: dict[int, Head]) -> list[Cells]:
    """Cells of some heads together, small ones first: positions are along all axes, all but one, or none."""
    options: list[dict[tuple[int, ...], list[tuple[int, ...]]]] = []
    for head in heads.values():
        options.append({})
        for axes in dict.fromkeys([(), *((a,) for a in head.axes), head.axes]):
            positions = tuple(head.sizes[a] for a in head.axes if a not in axes)
            options[-1].setdefault(positions, []).append(axes)
    common = [key for key in options[0] if all(key in other for other in options)]
    cells = [Cells(heads, axes) for key in common for axes in zip(*(o[key] for o in options), strict=False)]
    return sorted(cells, key=lambda c: c.shape[2])
