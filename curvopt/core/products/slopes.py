"""Products of linear layers and of their slopes by the input: the weights of PINNs and gradient penalties.

::

    u = W x        J^T v = v ⊗ x            a position with the vector left and the input right
    s = W^T g      J^T v = g ⊗ v            a position with the sides exchanged

Both multiply W, but their sizes differ by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvopt.core.products.base import Approx
from curvopt.core.products.outer import Outer, concatenated
from curvopt.core.products.second_moments import in_blocks
from curvopt.core.products.sums import widened

#: `Slopes` compute A of so many samples if there are twice as many or more, and the last B of twice as many.
ENOUGH_SAMPLES = 256


class Slopes(Outer):
    """Products of a layer and of its slopes: derivatives by its input, which multiply its weight, too.

    Both are positions of the weight, but differ by orders of magnitude, so that means over all of them say little.
    Factors are those of the nearest Kronecker product (Van Loan & Pitsianis 1993): ``B = sum_n G_n A G_n^T`` and
    ``A = sum_n G_n^T B G_n`` in two turns for the products ``G_n`` of the samples. Of many samples some are drawn, see
    `ENOUGH_SAMPLES`. A has the trace of the second moment of the layer's inputs, ``B ⊗ A`` that of the exact block of
    all samples.
    """

    #: Trace of the right side's factor.
    size: Tensor
    #: Both factors by the limit of their blocks, once they are known.
    _factors: dict[int | None, tuple[Tensor, Tensor]]

    @staticmethod
    def are(outers: Sequence[Outer]) -> bool:
        """Whether some are slopes of the others by their input, which multiply the transposed weight, of one vector."""
        orientations = {outer.transposed for outer in outers}
        return len(orientations) == 2 and all(outer.V == outer.G == 1 and not outer.of_batch for outer in outers)

    @classmethod
    def of(cls, outers: Sequence[Outer]) -> Slopes:
        """The sum of products of layers, and of their slopes, whose sides are exchanged."""
        sides = [
            Outer(o.right.unsqueeze(0), o.left[0], o.shape, False, o.lengths) if o.transposed else o for o in outers
        ]
        left, right, lengths = concatenated(sides)
        result = cls(left, right, outers[0].shape, False, lengths, parts=sides)
        result._factors = {}
        inputs = [(outer.right.square().sum(), outer.positions) for outer in outers if not outer.transposed]
        result.size = torch.stack([size for size, _ in inputs]).sum() / max(sum(number for _, number in inputs), 1)
        return result

    def output_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """The factor of the left side, see the class, whatever ``approx``."""
        return self._nearest(limit)[0].clone()  # others may ask for it, too

    def input_factor(self, approx: Approx = "expand", limit: int | None = None) -> Tensor:
        """The factor of the right side, see the class, whatever ``approx``."""
        return self._nearest(limit)[1].clone()

    def _nearest(self, limit: int | None) -> tuple[Tensor, Tensor]:
        if limit in self._factors:
            return self._factors[limit]
        left, right = self.left[0, :, 0], self.right[:, 0]  # [N, S, F]
        of_left = left @ left.mT
        squares = (of_left * (right @ right.mT)).sum((1, 2))  # ||G_n||^2
        several = min(self.O, self.I) > 1  # else it is exact
        enough = ENOUGH_SAMPLES if several else self.N
        (some, share), (more, share_of_more) = _drawn(squares, enough), _drawn(squares, 2 * enough)
        A = _moment(right[some], of_left[some] * share, limit)
        if several:
            B = _moment(left[some], _gram(right[some], _sized(A)) * share, limit)
            A = _moment(right[some], _gram(left[some], _sized(B)) * share, limit)
        A = _sized(_symmetric(A), self.size)
        B = _symmetric(_moment(left[more], _gram(right[more], A) * share_of_more, limit))
        self._factors[limit] = _sized(B, squares.sum() / torch.where(self.size > 0, self.size, 1)), A
        return self._factors[limit]


def _drawn(squares: Tensor, number: int) -> tuple[Tensor | slice, Tensor | float]:
    """Indices of samples drawn by their squared norms, the same ones each time, and weights that make up for that.

    So few points of a boundary that weigh much are there, and a grid of points leaves no pattern.
    """
    if len(squares) < 2 * number:
        return slice(None), 1.0
    dtype = squares.dtype
    squares = widened(squares).clamp(min=torch.finfo(torch.float32).tiny)  # rounding may make them negative
    ends = squares.cumsum(0)
    step = ends[-1] / number
    places = torch.arange(number) + torch.rand(number, device="cpu", generator=torch.Generator().manual_seed(0))
    drawn = torch.searchsorted(ends, places.to(ends) * step).clamp(max=len(squares) - 1)
    return drawn, (step / squares[drawn]).to(dtype).view(-1, 1, 1)


def _moment(rows: Tensor, weights: Tensor, limit: int | None) -> Tensor:
    """``sum_n X_n^T W_n X_n`` of ``[N, S, F]`` and ``[N, S, S]``: ``[F, F]``, or blocks ``[1, K, b, b]``."""
    F = rows.shape[2]
    weighted, rows = (weights @ rows).flatten(0, 1), rows.flatten(0, 1)
    if limit is None or F <= limit:
        return rows.mT @ weighted
    return (in_blocks(rows, limit).permute(1, 2, 0) @ in_blocks(weighted, limit).transpose(0, 1)).unsqueeze(0)


def _symmetric(moment: Tensor) -> Tensor:
    """Without what rounding makes of a symmetric matrix."""
    return (moment + moment.mT) / 2


def _gram(rows: Tensor, factor: Tensor) -> Tensor:
    """``X_n M X_n^T`` of ``[N, S, F]`` and a factor: ``[N, S, S]``."""
    if factor.dim() == 2:
        return rows @ factor @ rows.mT
    blocks = in_blocks(rows, factor.shape[-1])  # [N, S, K, b]
    return torch.einsum("nskb,kbc,ntkc->nst", blocks, factor[0], blocks)


def _sized(factor: Tensor, trace: Tensor | float = 1.0) -> Tensor:
    """A factor scaled to a trace."""
    found = factor.diagonal(dim1=-2, dim2=-1).sum()
    return factor * (trace / torch.where(found > 0, found, 1))
