"""Transposed-Jacobian products of one parameter, kept in factored form, and the reductions every quantity is made of.

A rule turns the vectors that arrive at a module's output into a `Jacobian`: for each vector ``v`` and sample ``n`` the
product ``J_n^T v_n`` with respect to one parameter of shape ``p``. Letters: V vectors, N samples, G groups, S shared
positions (sequence, space, or several uses of one module), O/I output/input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Approx = Literal["expand", "reduce"]

#: Elements a temporary may hold before a reduction works through the samples in pieces (fits a core's cache).
CHUNK_ELEMENTS = 1 << 18
#: Largest number of entries of a parameter without Kronecker structure that still gets a dense curvature block.
DENSE_BLOCK_LIMIT = 2048


class Jacobian(ABC):
    """``J_n^T v_n`` for V vectors and N samples with respect to one parameter of shape ``shape``."""

    shape: torch.Size
    V: int
    N: int

    @abstractmethod
    def dense(self) -> Tensor:
        """All products, ``[V, N, *p]``."""

    @abstractmethod
    def sum_batch(self) -> Tensor:
        """Products summed over the samples, ``[V, *p]``."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Squared entries summed over vectors and samples, ``[*p]``."""

    @abstractmethod
    def squares_batch(self) -> Tensor:
        """Squared entries summed over the vectors only, ``[N, *p]``."""

    @abstractmethod
    def norms2(self) -> Tensor:
        """Squared Euclidean norm of every product, ``[V, N]``."""

    @abstractmethod
    def left_factor(self, approx: Approx = "expand") -> Tensor:
        """Second moment of the backpropagated side, summed over vectors and samples (the ``B`` of KFAC).

        ``[O, O]`` (``[G, O, O]`` with groups) for a parameter with Kronecker structure, else the dense block
        ``sum_vn j j^T`` of shape ``[P, P]``, or its diagonal ``[P]`` for more than `DENSE_BLOCK_LIMIT` entries.
        """

    @abstractmethod
    def right_factor(self, approx: Approx = "expand") -> Tensor | None:
        """Second moment of the input side, averaged over samples and positions (the ``A`` of KFAC), if there is one."""


class Dense(Jacobian):
    """Products that are already multiplied out: biases, scales, anything without structure.

    Args:
        values: ``[V, N, *p]``.
    """

    def __init__(self, values: Tensor):
        """Keep the values."""
        self.values = values
        self.V, self.N = values.shape[:2]
        self.shape = values.shape[2:]

    def dense(self) -> Tensor:  # noqa: D102
        return self.values

    def sum_batch(self) -> Tensor:  # noqa: D102
        return self.values.sum(1)

    def squares(self) -> Tensor:  # noqa: D102
        flat = self.values.flatten(0, 1)
        return torch.einsum("n...,n...->...", flat, flat)

    def squares_batch(self) -> Tensor:  # noqa: D102
        return torch.einsum("vn...,vn...->n...", self.values, self.values)

    def norms2(self) -> Tensor:  # noqa: D102
        return self.values.flatten(2).square().sum(2)

    def left_factor(self, approx: Approx = "expand") -> Tensor:  # noqa: D102
        flat = self.values.reshape(self.V * self.N, -1)
        return flat.T @ flat if flat.shape[1] <= DENSE_BLOCK_LIMIT else flat.square().sum(0)

    def right_factor(self, approx: Approx = "expand") -> None:  # noqa: D102
        return None


class Outer(Jacobian):
    """Products ``sum_s left ⊗ right`` of a matrix-times-patches parameter (linear, convolution, ...).

    Args:
        left: what arrived from the output, ``[V, N, G, S, O]``.
        right: the layer's input as patches, ``[N, G, S, I]``.
        shape: shape of the parameter, a reshaped ``[G, O, I]``.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size):
        """Keep both sides."""
        self.left, self.right, self.shape = left, right, shape
        self.V, self.N, self.G, self.S, self.O = left.shape
        self.I = right.shape[3]

    def dense(self) -> Tensor:  # noqa: D102
        return self._products(self.left, self.right).reshape(self.V, self.N, *self.shape)

    def sum_batch(self) -> Tensor:  # noqa: D102
        left = self.left.transpose(1, 2).reshape(self.V, self.G, self.N * self.S, self.O)
        right = self.right.transpose(0, 1).reshape(self.G, self.N * self.S, self.I)
        return (left.mT @ right).reshape(self.V, *self.shape)

    def squares(self) -> Tensor:  # noqa: D102
        if self.S == 1:
            left, right = self._squared_sides()
            return torch.einsum("ngo,ngi->goi", left, right).reshape(self.shape)
        if self._gram_is_cheaper():
            left, right = self._gram_sides()
            return torch.einsum("npgo,npgi->goi", left, right).reshape(self.shape)
        total = self.left.new_zeros(self.G, self.O, self.I)
        for products in self._sample_chunks():
            flat = products.flatten(0, 1)
            if torch.is_grad_enabled():
                total = total + flat.square().sum(0)
            elif flat.shape[0] == 1:
                total.addcmul_(flat[0], flat[0])
            else:
                total += flat.square_().sum(0)
        return total.reshape(self.shape)

    def squares_batch(self) -> Tensor:  # noqa: D102
        if self.S == 1:
            left, right = self._squared_sides()
            result = torch.einsum("ngo,ngi->ngoi", left, right)
        elif self._gram_is_cheaper():
            left, right = self._gram_sides()
            result = torch.einsum("npgo,npgi->ngoi", left, right)
        elif self.V == 1:
            result = self._products(self.left, self.right)[0].square()
        else:
            result = torch.cat([products.square().sum(0) for products in self._sample_chunks()])
        return result.reshape(self.N, *self.shape)

    def norms2(self) -> Tensor:
        """Squared norms ``[V, N]`` without forming the products where that is cheaper (Gram trick, Goodfellow 2015)."""
        if self.S == 1:
            left, right = self.left.square().sum((3, 4)), self.right.square().sum((2, 3))
            return (left * right).sum(2)
        if self.S * (self.O + self.I) < self.O * self.I:
            gram = torch.einsum("ngsi,ngti->ngst", self.right, self.right)
            return torch.einsum("vngst,ngst->vn", self.left @ self.left.mT, gram)
        return torch.cat([products.flatten(2).square().sum(2) for products in self._sample_chunks()], 1)

    def left_factor(self, approx: Approx = "expand") -> Tensor:  # noqa: D102
        left = self.left.sum(3, keepdim=True) if approx == "reduce" else self.left
        return _second_moment(left.flatten(0, 1))

    def right_factor(self, approx: Approx = "expand") -> Tensor:  # noqa: D102
        right = self.right.mean(2, keepdim=True) if approx == "reduce" else self.right
        return _second_moment(right) / (right.shape[0] * right.shape[2])

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        return left.mT @ right

    def _squared_sides(self) -> tuple[Tensor, Tensor]:
        """``[N, G, O]`` and ``[N, G, I]``: with one position the square of an outer product is that of the squares."""
        return torch.einsum("vngo,vngo->ngo", self.left[:, :, :, 0], self.left[:, :, :, 0]), self.right[
            :, :, 0
        ].square()

    def _gram_is_cheaper(self) -> bool:
        pairs = self.S * (self.S + 1) / 2
        return pairs * (self.O * self.I + self.V * self.O + self.I) < 0.7 * self.V * self.S * self.O * self.I

    def _gram_sides(self) -> tuple[Tensor, Tensor]:
        """``[N, P, G, O]`` and ``[N, P, G, I]`` over pairs P of positions: (sum_v l_s l_t) and r_s r_t (twice off-diagonal)."""
        s, t = torch.triu_indices(self.S, self.S, device=self.left.device)
        twice = torch.where(s == t, 1.0, 2.0).to(self.left.dtype)
        left = torch.einsum("vngpo,vngpo->npgo", self.left[:, :, :, s], self.left[:, :, :, t])
        right = (self.right[:, :, s] * self.right[:, :, t]).transpose(1, 2)
        return left, right * twice[:, None, None]

    def _sample_chunks(self):
        """Products ``[V, n, G, O, I]`` for a few samples at a time; the chunk is only valid until the next one."""
        step = max(1, CHUNK_ELEMENTS // (self.V * self.G * self.O * self.I))
        left, right = self.left, self.right
        if torch.is_grad_enabled():
            for n in range(0, self.N, step):
                yield self._products(left[:, n : n + step], right[n : n + step])
            return
        # fresh memory costs more than arithmetic: every chunk is written into one buffer
        buffer = left.new_empty(self.V, min(step, self.N), self.G, self.O, self.I)
        for n in range(0, self.N, step):
            chunk = left[:, n : n + step].mT
            yield torch.matmul(chunk, right[n : n + step], out=buffer[:, : chunk.shape[1]])


def _second_moment(rows: Tensor) -> Tensor:
    """``sum_{n,s} x x^T`` of ``[N, G, S, F]``: ``[F, F]``, or ``[G, F, F]`` when there are groups."""
    flat = rows.transpose(0, 1).flatten(1, 2)
    moment = flat.mT @ flat
    return moment[0] if moment.shape[0] == 1 else moment


def combine(parts: Sequence[Jacobian]) -> Jacobian:
    """One Jacobian for all uses of one parameter: positions are concatenated, other kinds are added."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Outer) for part in parts):
        outers = [part for part in parts if isinstance(part, Outer)]
        left, right = torch.cat([o.left for o in outers], 3), torch.cat([o.right for o in outers], 2)
        return Outer(left, right, outers[0].shape)
    return Dense(sum((part.dense() for part in parts[1:]), start=parts[0].dense()))
