"""Transposed-Jacobian products of one parameter, kept in factored form, and the reductions every quantity is made of.

A rule turns the vectors that arrive at a module's output into a `Jacobian`: for each vector ``v`` and sample ``n`` the
product ``J_n^T v_n`` with respect to one parameter of shape ``p``. Letters: V vectors, N samples, G groups, S shared
positions (sequence, space, or several calls of one module), O/I output/input features.

>>> products = Dense(torch.ones(2, 4, 3))  # 2 vectors, 4 samples, a bias of 3 entries
>>> products.norms2().shape, products.squares(), products.output_factor().shape
(torch.Size([2, 4]), tensor([8., 8., 8.]), torch.Size([3, 3]))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from curvopt.core.products import costs

if TYPE_CHECKING:
    from curvopt.core.record import ModuleCall

Approx = Literal["expand", "reduce"]

#: Largest number of entries of a parameter without Kronecker structure that still gets a dense curvature block.
DENSE_BLOCK_LIMIT = 2048


class Jacobian(ABC):
    """``J_n^T v_n`` for V vectors and N samples with respect to one parameter of shape ``shape``."""

    shape: torch.Size
    V: int
    N: int
    #: A tensor of the type and on the device of the products.
    like: Tensor
    #: Whether the parameter has two Kronecker factors.
    factored = True
    #: Whether axis 0 of the parameter belongs to `input_factor` (``[I, O]``: transposed convolutions, embeddings).
    transposed = False
    #: Signed weight of every vector in the sums of squares and products, ``[V, N]``; ``None`` for ones.
    weights: Tensor | None = None

    @abstractmethod
    def dense(self) -> Tensor:
        """All products, ``[V, N, *p]``."""

    @abstractmethod
    def sum_batch(self) -> Tensor:
        """Products summed over the samples, ``[V, *p]``."""

    @abstractmethod
    def squares(self, per_sample: bool = False) -> Tensor:
        """Squared entries, weighted by `weights`, summed over vectors and samples, ``[*p]``.

        Args:
            per_sample: sum over the vectors only, ``[N, *p]``.
        """

    def moments(self) -> tuple[Tensor, Tensor]:
        """`sum_batch` and `squares` of the only vector, ``[*p]`` each, in any order in memory."""
        return self.sum_batch()[0], self.squares()

    def add_squares(self, total: Tensor | None, per_sample: bool) -> Tensor:
        """``total`` plus the squares, ``[*p]`` or, sample by sample, ``[N, *p]``, in at least float32."""
        return add(total, widened(self.squares(per_sample)))

    @abstractmethod
    def norms2(self) -> Tensor:
        """Squared Euclidean norm of every product, ``[V, N]``."""

    @abstractmethod
    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """Second moment of the backpropagated side, summed over vectors and samples (the ``B`` of KFAC).

        ``[O, O]`` (``[G, O, O]`` with groups) for a parameter with Kronecker structure, its blocks ``[G, K, b, b]`` on
        the diagonal where O is more than ``limit``. Else the dense block ``sum_vn j j^T`` of shape ``[P, P]``, or such
        blocks of it, or its diagonal ``[P]`` for more than `DENSE_BLOCK_LIMIT` entries.
        """

    @abstractmethod
    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor | None:
        """Second moment of the input side, averaged over samples and positions (the ``A`` of KFAC), if there is one.

        Blocks ``[G, K, b, b]`` on its diagonal where I is more than ``limit``.
        """

    @property
    def positions(self) -> int:
        """Number of positions of all samples together, of a parameter with Kronecker structure."""
        return 0

    @property
    def rows_of_batch(self) -> int:
        """Number of samples that have positions."""
        return self.N

    def with_lengths(self, lengths: Tensor) -> Self:
        """A copy for samples with so many rows, ``[N]``, behind which zeros fill up to the longest."""
        return self

    def with_weights(self, weights: Tensor | None) -> Self:
        """A copy whose vectors have weights ``[V, N]`` in sums of squares and products."""
        result = copy(self)
        result.weights = weights
        return result

    @abstractmethod
    def squares_in(self, bases: Sequence[Tensor]) -> Tensor:
        """`squares` in other coordinates: of ``(U1 ⊗ U2)^T j`` for orthogonal bases shaped as the Kronecker factors.

        Args:
            bases: the columns of the first and second factor's bases, or of the only one's; bases of diagonal factors
                are the identity, whatever their entries.
        """

    def select(self, samples: Sequence[int] | None) -> Jacobian:
        """The products of single samples (all for ``None``), in the order given."""
        return self if samples is None else self._selected(list(samples))

    def _selected(self, samples: list[int]) -> Jacobian:
        return Dense(self.dense()[:, samples])

    def project(self, directions: Tensor) -> Tensor:
        """Inner product of every product with ``[K, *p]`` directions, ``[K, V, N]``."""
        return torch.einsum("vnp,kp->kvn", self._flat(), directions.reshape(len(directions), -1))

    def expand(self, coefficients: Tensor) -> Tensor:
        """Products weighted by ``[K, V, N]`` coefficients and summed over vectors and samples, ``[K, *p]``."""
        result = torch.einsum("kvn,vnp->kp", coefficients, self._flat())
        return result.reshape(-1, *self.shape)

    def _flat(self) -> Tensor:
        return self.dense().reshape(self.V, self.N, -1)

    @abstractmethod
    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        """A copy that shares nothing with the network's activations or graph.

        Args:
            alike: such a copy for other vectors of the same calls, with which this one may share the layer's input.
        """

    def joined(self, following: Sequence[Jacobian]) -> Sequence[Jacobian]:
        """This and following ones; of a layer and with one input they are one Jacobian of all their vectors."""
        return [self, *following]

    def settled(self) -> Jacobian:
        """The products, formed so that they need the network's graph no longer."""
        return self

    def with_own_patches(self) -> Self:
        """A copy with patches for one use, which go with it."""
        return self

    def matmul(self, directions: Tensor) -> Tensor:
        """``sum_vn w_vn j_vn j_vn^T`` applied to ``[K, *p]`` directions."""
        coefficients = self.project(directions)
        return self.expand(coefficients if self.weights is None else coefficients * self.weights)


class Dense(Jacobian):
    """Products that are already multiplied out: biases, scales, anything without structure.

    Args:
        values: ``[V, N, *p]``.
    """

    factored = False

    def __init__(self, values: Tensor):
        """Keep the values."""
        self.values = self.like = values
        self.V, self.N = values.shape[:2]
        self.shape = values.shape[2:]

    def dense(self) -> Tensor:
        return self.values

    def sum_batch(self) -> Tensor:
        return self.values.sum(1)

    def squares(self, per_sample: bool = False) -> Tensor:
        squares = weighted(self.values.square(), self.weights)
        return squares if per_sample else squares.sum(0)

    def owned(self, alike: Jacobian | None = None) -> Jacobian:
        return Dense(self.values).with_weights(self.weights)

    def norms2(self) -> Tensor:
        return self._flat().square().sum(2)

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        if self.shape.numel() > DENSE_BLOCK_LIMIT:
            return self._flat().square().sum((0, 1))
        return self._moment(limit)

    def _moment(self, limit: int | None) -> Tensor:
        return second_moment(self._flat().flatten(0, 1)[:, None, None], limit)

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> None:
        return None

    def squares_in(self, bases: Sequence[Tensor]) -> Tensor:
        (basis,) = bases
        if basis.dim() == 1:
            return self.squares()
        values = in_basis(self._flat()[..., None, None, :], basis).reshape(self.values.shape)
        return Dense(values).with_weights(self.weights).squares()


@dataclass(frozen=True)
class Chunk:
    """Jacobian products of a parameter for a chunk of the columns of one sweep.

    Attributes:
        parameter: the parameter.
        jacobian: the products of all calls that share the parameter, combined.
        calls: these calls. Chunks of the same calls share the inputs of the layer.
        num_columns: number of columns of the whole sweep, if it is known; ``jacobian.V`` are in this chunk.
    """

    parameter: nn.Parameter
    jacobian: Jacobian
    calls: tuple[ModuleCall, ...] = ()
    num_columns: int | None = None


# Sums in at least float32


def widened(value: Tensor) -> Tensor:
    """In at least float32, to be summed: in half precision, small terms vanish in a large sum."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``value.to(dtype)``, without the call if that would do nothing."""
    return value if value.dtype == dtype else value.to(dtype)


def add(total: Any, value: Any) -> Any:
    """``total + value``, in place where no graph is built."""
    if total is None:
        return value
    return total + value if total.requires_grad or value.requires_grad else total.add_(value)


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """``[V, N, ...]`` values summed over V, with weights ``[V, N]`` if there are any."""
    if weights is None:
        return values.sum(0) if len(values) > 1 else values[0]
    return torch.einsum("vn,vn...->n...", weights, values)


def summed(values: Tensor) -> Tensor:
    """Sum over the first axis, laid out in memory as they are: where it is not, it takes ten times as long."""
    return torch.sum(values, 0, out=torch.empty_like(values[0]))


# Second moments of the sides of products: the Kronecker factors


def by_feature(values: Tensor) -> Tensor:
    """``[..., N, G, S, F]`` as ``[..., G, F, N S]``; what needs to be copied is copied by rows."""
    return values.movedim((-4, -2), (-2, -1)).flatten(-2)


def second_moment(rows: Tensor, limit: int | None = None, scale: float = 1.0) -> Tensor:
    """``scale * sum_{n,s} x x^T`` of ``[N, G, S, F]``: ``[F, F]``, or ``[G, F, F]`` when there are groups.

    If F is more than ``limit``, blocks on its diagonal, ``[G, K, b, b]``, the last padded with zeros.
    """
    if not torch.is_grad_enabled():
        return moment_of_parts(in_parts(rows), scale, limit)
    F = rows.shape[-1]
    flat = by_feature(rows)
    flat = flat if scale == 1 else flat * scale**0.5  # before the product: half precision ends at 65504
    if limit is not None and F > limit:
        blocks = in_blocks(flat.mT, limit).transpose(1, 2)
        return blocks.mT @ blocks
    return ungrouped(flat @ flat.mT)


def ungrouped(moments: Tensor) -> Tensor:
    """The only one of ``[G, F, F]``, if there are no groups."""
    return moments[0] if len(moments) == 1 else moments


def _are_sorted(rows: Tensor) -> bool:
    """Whether rows ``[N, G, S, F]`` of all samples are stored by features, or each feature's by rows."""
    return rows.stride(3) == 1 or rows.stride(0) == rows.shape[2] * rows.stride(2)


def in_parts(rows: Tensor) -> Sequence[Tensor]:
    """Some samples of ``[N, G, S, F]`` at a time, which will be sorted by features; all if they are sorted."""
    _, G, S, F = rows.shape
    return [rows] if _are_sorted(rows) else rows.split(costs.rows_at_once(S, G * F, rows.device.type))


def moment_of_parts(parts: Iterable[Tensor], scale: float, limit: int | None = None) -> Tensor:
    """The second moment of parts of the samples."""
    moments, dtype, size = None, None, 0
    for part in parts:
        x = by_feature(part)
        if moments is None:
            dtype, (G, F, _) = x.dtype, x.shape
            size = F if limit is None or F <= limit else costs.even_share(F, limit)
            moments = widened(x.new_zeros(G, -(-F // size), size, size))
        if moments.shape[1] == 1:
            add_square(moments[:, 0], x, scale)
            continue
        for block, of_block in zip(moments.unbind(1), x.split(size, 1), strict=True):
            features = of_block.shape[1]
            add_square(block[:, :features, :features], of_block, scale)
    assert moments is not None
    return cast(ungrouped(moments[:, 0]) if moments.shape[1] == 1 else moments, dtype)


def add_square(total: Tensor, x: Tensor, scale: float) -> None:
    """``total += scale x @ xᵀ`` of ``[G, F, R]``; above the diagonal alone where copies of that cost less."""
    F, R = x.shape[1:]
    if not costs.by_blocks(F, R, x.device.type):
        add_product(total, x, x.mT, scale)
        return
    size = costs.SYMMETRIC_BLOCK
    for start in range(0, F, size):
        here, after = slice(start, start + size), slice(start + size, F)
        add_product(total[:, here, here], x[:, here], x[:, here].mT, scale)
        if start + size < F:
            above = torch.baddbmm(x.new_zeros(1), x[:, here], x[:, after].mT, beta=0, alpha=scale)
            total[:, here, after] += above
            total[:, after, here] += above.mT


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """``total += scale left @ right`` of ``[G, M, R]`` and ``[G, R, K]``; the total may be in higher precision."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=scale)
    else:
        total.add_(torch.baddbmm(left.new_zeros(1), left, right, beta=0, alpha=scale))


def in_blocks(values: Tensor, limit: int) -> Tensor:
    """The last axis ``F`` cut into the fewest pieces of at most ``limit``, ``[..., K, b]``, padded with zeros."""
    return in_pieces(values, costs.even_share(values.shape[-1], limit))


def in_pieces(values: Tensor, size: int, axis: int = -1) -> Tensor:
    """An axis (-1, -2, ...) cut into pieces ``[..., K, size, ...]``, the last padded with zeros."""
    missing = -values.shape[axis] % size
    if missing:
        values = torch.nn.functional.pad(values, (0, 0) * (-1 - axis) + (0, missing))
    return values.unflatten(axis, (-1, size))


def in_basis(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows ``[..., G, S, F]`` in the basis of a factor: ``[F]`` (identity), ``[F, F]``, with groups or blocks.

    Factors of parameters in half precision may be kept in float32: then so are the results.
    """
    rows = rows.to(torch.promote_types(rows.dtype, basis.dtype))
    if basis.dim() == 1:
        return rows
    if basis.dim() == 2:
        return rows @ basis
    # broadcasting would copy the matrices for each row
    if basis.dim() == 3:
        return torch.einsum("...gsb,gbc->...gsc", rows, basis)
    blocks = in_blocks(rows, basis.shape[-1])  # [..., G, S, K, b]
    return torch.einsum("...gskb,gkbc->...gskc", blocks, basis).flatten(-2)[..., : rows.shape[-1]]
