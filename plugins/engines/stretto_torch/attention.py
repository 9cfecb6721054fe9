"""Attention of the hand-written decoder, over a prompt and over slots.

N: tokens computed at once, R: rows, T: positions attended to, P: columns of a prefill, K: key-value
heads, G: query heads of each, D: head dimension. `qkv` is always (N, (K * G + 2 * K) * D): queries, keys,
values of a token one after the other, queries and keys already rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto_torch.kv import SlotCache
from stretto_torch.shapes import Span

Attend = Callable[[int, Tensor], Tensor]
"""Attention of one layer: (its index, qkv) -> (N, K * G * D)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How a model's attention is cut."""

    query: int
    """K * G."""
    kv: int
    """K."""
    dim: int
    """D."""


def over_prompts(cache: SlotCache, heads: Heads, rows: Tensor, columns: int, real: Tensor) -> Attend:
    """Causal attention within each prompt, whose keys and values go to its slot.

    Args:
        cache: the slots.
        heads: how attention is cut.
        rows: (prompts,) the slot of each.
        columns: P, to which prompts are padded for attention.
        real: (N,) where each token stands among the prompts * P columns.
    """

    def attend(layer: int, qkv: Tensor) -> Tensor:
        padded = qkv.new_zeros(len(rows) * columns, qkv.shape[1]).index_copy_(0, real, qkv)
        each = padded.view(len(rows), columns, -1, heads.dim).transpose(1, 2)
        queries, keys, values = each.split([heads.query, heads.kv, heads.kv], dim=1)
        cache.write(layer, rows, keys, values)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=heads.query != heads.kv
        )  # (prompts, K * G, P, D)
        return attended.transpose(1, 2).flatten(0, 1)[real].flatten(1)

    return attend


class SlotAttention:
    """Attention of one new token a row to its slot.

    The G query heads of a key-value head stand where one would expect several query positions, so that
    keys and values are read once and need not be repeated.
    """

    def __init__(self, cache: SlotCache, heads: Heads) -> None:
        self._heads = heads
        self._scale = heads.dim**-0.5
        self._flat = [layer.view(-1, heads.dim) for layer in cache.layers]
        self._keys = [layer[0].flatten(0, 1) for layer in cache.layers]  # (rows * K, length, D)
        self._values = [layer[1].flatten(0, 1) for layer in cache.layers]
        device = cache.device
        self._columns = torch.arange(cache.length, device=device)
        # Where position 0 of each row's keys, then values, stands in `_flat`: (rows, 2 * K).
        starts = torch.arange(2 * cache.rows * heads.kv, device=device) * cache.length
        self._starts = starts.view(2, cache.rows, heads.kv).transpose(0, 1).flatten(1).contiguous()

    def at(self, positions: Tensor, spans: Sequence[Span]) -> Attend:
        """Attention of a step whose new tokens stand at `positions` (R,). Rows beyond the last span get
        zeros."""
        heads, width = self._heads, self._heads.query * self._heads.dim
        written = (self._starts[: len(positions)] + positions.unsqueeze(1)).flatten()
        masks = [self._mask(positions, span) for span in spans]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            self._flat[layer].index_copy_(0, written, qkv[:, width:].reshape(-1, heads.dim))
            queries = qkv[:, :width].reshape(-1, heads.query // heads.kv, heads.dim)  # (R * K, G, D)
            attended = [
                self._attend(layer, queries, span, mask) for span, mask in zip(spans, masks, strict=True)
            ]
            whole = attended[0] if len(attended) == 1 else torch.cat(attended)
            whole = whole.view(-1, width)
            dead = len(positions) - len(whole)
            return F.pad(whole, (0, 0, 0, dead)) if dead else whole

        return attend

    def _mask(self, positions: Tensor, span: Span) -> Tensor:
        """What to add to the scores of a span: (its rows * K, 1, T), 0 or -inf."""
        unseen = self._columns[: span.length] > positions[span.start : span.stop].unsqueeze(1)
        if self._heads.kv > 1:
            unseen = unseen.repeat_interleave(self._heads.kv, dim=0)
        zeros = torch.zeros(unseen.shape, device=unseen.device, dtype=self._flat[0].dtype)
        return zeros.masked_fill_(unseen, -inf).unsqueeze(1)

    def _attend(self, layer: int, queries: Tensor, span: Span, mask: Tensor) -> Tensor:
        """(its rows * K, G, D) for one span."""
        part = slice(span.start * self._heads.kv, span.stop * self._heads.kv)
        queries = queries[part]
        keys = self._keys[layer][part, : span.length]
        values = self._values[layer][part, : span.length]
        if queries.dtype != torch.float32:
            # Scores must not be rounded to half precision: this kernel keeps them in float32.
            four = [tensor.unsqueeze(1) for tensor in (queries, keys, values, mask)]
            return F.scaled_dot_product_attention(*four[:3], attn_mask=four[3]).squeeze(1)
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values)
