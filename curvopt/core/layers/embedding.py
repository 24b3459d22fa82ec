"""Rules of embeddings: the input picks rows of the weight, so Jacobians are `Lookup`s and no one-hot matrix is formed.

Kronecker factors of the weight ``[num_embeddings, D]``: the diagonal of the second moment of the one-hot inputs (a
vector ``[num_embeddings]``: how often each row is picked per position), then that of the vectors, ``[D, D]``::

    weight [4, D],  x = [[0, 3], [3, 3]]    ──►    first factor [1/4, 0, 0, 3/4]
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from curvopt.core.layers.rule import Jacobians, Rule, arguments, register
from curvopt.core.products.lookup import Lookup
from curvopt.core.record import ModuleCall, RowsBySample
from curvopt.errors import CurvoptError


@register(nn.Embedding)
class Embedding(Rule):
    """``W[x]`` for integers x with any number of shared axes; ``padding_idx`` gets no gradient.

    Rows may be counted from the end, as functions of a parameter do.
    """

    any_axes = True
    any_order = True
    linear = True
    takes_single = True

    def expected(self, module: nn.Embedding) -> Container[str]:
        return ("weight",)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        _refuse_scaled_gradients(call)
        grad, x = grads[0], call.input % len(call.module.get_parameter("weight"))
        assert grad is not None
        samples = torch.arange(N, device=x.device).repeat_interleave(x.numel() // N)
        entries = call.module.get_parameter("weight").shape[1:].numel()
        left, x = grad.reshape(grad.shape[0], x.numel(), entries), x.flatten()
        if isinstance(call.steps, RowsBySample):
            there = call.steps.there.repeat_interleave(len(x) // len(call.steps.there))
            left, x, samples = left[:, there], x[there], samples[there]
        return _lookup(call, left, x, samples, N)


@register(nn.EmbeddingBag)
class EmbeddingBag(Rule):
    """Sums or means of picked rows; bags are the rows of a matrix, or parts of a vector that begin at offsets."""

    linear = True

    def expected(self, module: nn.EmbeddingBag) -> Container[str]:
        return ("weight",)

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        _refuse_scaled_gradients(call)
        given, grad = arguments(call), grads[0]
        assert grad is not None
        if call.module.mode == "max":
            raise CurvoptError(
                f"{call.describe()}: mode='max' has no rule; use nn.Embedding and .amax(1), which give the same."
            )
        x, offsets, weights = given["input"], given["offsets"], given["per_sample_weights"]
        bags = call.shapes[0][0]
        if offsets is None:
            of_bag = torch.arange(bags, device=x.device).repeat_interleave(x.numel() // bags)
        else:
            starts = offsets[:-1] if call.module.include_last_offset else offsets
            # the last bag that begins at or before a position; empty bags begin where the next one does
            of_bag = torch.searchsorted(starts, torch.arange(len(x), device=x.device), right=True) - 1
        x, left = x.flatten(), grad[:, of_bag]
        if weights is not None:
            left = left * weights.flatten()[:, None]
        if call.module.mode == "mean":
            counted = of_bag if call.module.padding_idx is None else of_bag[x != call.module.padding_idx]
            left = left / counted.bincount(minlength=bags).clamp(min=1)[of_bag, None]
        return _lookup(call, left, x, of_bag // (bags // N), N)


def _lookup(call: ModuleCall, left: Tensor, x: Tensor, samples: Tensor, N: int) -> Jacobians:
    weight: Any = call.module.weight
    if call.module.padding_idx is not None:
        kept = x != call.module.padding_idx
        left, x, samples = left[:, kept], x[kept], samples[kept]
    return {"weight": Lookup(left, x, samples, N, weight.shape)}


def _refuse_scaled_gradients(call: ModuleCall) -> None:
    if call.module.scale_grad_by_freq:
        raise CurvoptError(
            f"{call.describe()}: scale_grad_by_freq=True divides gradients by counts over the batch, so they are no "
            "gradients of the loss any more; use scale_grad_by_freq=False."
        )
