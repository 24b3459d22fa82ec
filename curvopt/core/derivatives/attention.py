"""The rule of multi-head attention: tokens are shared positions of its matrices."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt.core.derivatives.replay import ReplayRule, Site, Tape
from curvopt.core.derivatives.rules import arguments, register
from curvopt.core.uses import Use


@register(nn.MultiheadAttention)
class MultiheadAttention(ReplayRule):
    """Packed or separate projections, masks, extra keys and values; ``out_proj``, which is no module here, included."""

    def expected(self, module: nn.MultiheadAttention) -> Container[str]:
        projections = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
        return (*projections, "bias_k", "bias_v", "out_proj.weight", "out_proj.bias")

    def least_dims(self, module: nn.MultiheadAttention) -> int:
        return 3

    def batch_axis(self, module: nn.MultiheadAttention) -> int:
        return 0 if module.batch_first else 1

    def output_axis(self, use: Use, index: int) -> int | None:
        return self.batch_axis(cast(nn.MultiheadAttention, use.module)) if index == 0 else 0

    def replay(self, use: Use, tape: Tape) -> Sequence[Tensor | None]:
        module, given = cast(nn.MultiheadAttention, use.module), arguments(use)
        q, k, v = self._projections(tape, given["query"], given["key"], given["value"])
        N, L, E = q.shape
        mask = self._mask(module, given["attn_mask"], given["key_padding_mask"], q, k)
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, tape.note(module.bias_k.expand(N, 1, E), Site(bias="bias_k"))], 1)
            v = torch.cat([v, tape.note(module.bias_v.expand(N, 1, E), Site(bias="bias_v"))], 1)
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (x.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + F.pad(mask, (0, k.shape[2] - mask.shape[-1]))
        if given["need_weights"]:
            weights = scores.softmax(-1)
        else:  # the fused kernels give zero to tokens that may attend to nothing
            nothing = (scores == -torch.inf).all(-1, keepdim=True)
            weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
        weights = F.dropout(weights, module.dropout, module.training)  # the mask of the forward: see `ReplayRule`
        out = tape.linear((weights @ v).transpose(1, 2).flatten(2), "out_proj.weight", "out_proj.bias")
        out = out if module.batch_first else out.transpose(0, 1)
        if not given["need_weights"]:
            return [out]
        return [out, weights.mean(1) if given["average_attn_weights"] else weights]

    @staticmethod
    def _projections(tape: Tape, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values ``[N, L, E]``; one product for inputs that are the same."""
        module, E = tape.module, tape.module.embed_dim
        q, k, v = (x if module.batch_first else x.transpose(0, 1) for x in (query, key, value))
        if not module._qkv_same_embed_dim:
            weights = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            return [
                _separate(tape, x, weight, slice(i * E, (i + 1) * E))
                for i, (x, weight) in enumerate(zip((q, k, v), weights, strict=True))
            ]
        if query is key and key is value:
            return tape.linear(q, "in_proj_weight", "in_proj_bias").chunk(3, -1)
        first = tape.linear(q, "in_proj_weight", "in_proj_bias", slice(0, E))
        if key is value:
            return first, *tape.linear(k, "in_proj_weight", "in_proj_bias", slice(E, 3 * E)).chunk(2, -1)
        second = tape.linear(k, "in_proj_weight", "in_proj_bias", slice(E, 2 * E))
        return first, second, tape.linear(v, "in_proj_weight", "in_proj_bias", slice(2 * E, 3 * E))

    @staticmethod
    def _mask(
        module: nn.MultiheadAttention, attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor
    ) -> Tensor | None:
        """Both masks as one that is added to the scores, broadcast to ``[N, heads, L, S]``."""
        masks = []
        if attention is not None:
            masks.append(attention if attention.dim() == 2 else attention.unflatten(0, (q.shape[0], module.num_heads)))
        if padding is not None:
            masks.append(padding[:, None, None])
        added = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
            for mask in masks
        ]
        return sum(added[1:], start=added[0]) if added else None


def _separate(tape: Tape, x: Tensor, weight: str, rows: slice) -> Tensor:
    """The product with all rows of a weight of its own, but some rows of the common bias."""
    W, b = tape.parameter(weight), tape.parameter("in_proj_bias")
    assert W is not None
    product = F.linear(x.to(W.dtype), W)
    tape.note(product, Site(x, weight))
    return product if b is None else tape.note(product + b[rows], Site(bias="in_proj_bias", start=rows.start))
