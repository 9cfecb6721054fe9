"""Attention of the hand-written decoder, over a prompt and over slots.

N: tokens computed at once, R: rows, T: positions attended to, P: columns of a prefill, K: key-value heads, G:
query heads per key-value head, D: head dimension. `qkv` is always (N, (K * G + 2 * K) * D): the queries, keys
and values of each token. Queries and keys are already rotated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto_torch.kv import SlotCache
from stretto_torch.shapes import TokenSpan

Attend = Callable[[int, Tensor], Tensor]
"""Attention of one layer: (its index, qkv) -> (N, K * G * D)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Number and dimension of a model's attention heads."""

    query: int  # K * G
    kv: int  # K
    dim: int  # D

    def keys_and_values(self, qkv: Tensor) -> Tensor:
        """Return the keys and values of each token, which the cache keeps: (N * 2 * K, D)."""
        return qkv[:, self.query * self.dim :].reshape(-1, self.dim)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that are computed at once, each padded to P columns for attention. n: number of texts."""

    rows: Tensor  # (n,) the slot of each text
    positions: Tensor  # (n, P) int64, the position of each column in its slot
    unpadded: Tensor  # (N,) index of each token among the n * P columns

    def pad_columns(self, x: Tensor) -> Tensor:
        """Return x (N, width) as (n, P, width), with zeros for the padding."""
        columns = x.new_zeros(self.positions.numel(), x.shape[1]).index_copy_(0, self.unpadded, x)
        return columns.view(*self.positions.shape, -1)

    def cache_indices(self, cache: SlotCache) -> Tensor:
        """Return the indices in the cache of each token's keys and values: (N * 2 * K,)."""
        rows = self.rows[self.unpadded // self.positions.shape[1]]
        return cache.indices(0, rows, self.positions.flatten()[self.unpadded]).flatten()


def over_prompts(cache: SlotCache | None, heads: Heads, prompts: Prompts) -> Attend:
    """Return causal attention within each prompt. With a cache, also store the keys and values in it."""
    targets = None if cache is None else prompts.cache_indices(cache)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        if cache is not None and targets is not None:
            cache.layers[layer].index_copy_(0, targets, heads.keys_and_values(qkv))
        states = prompts.pad_columns(qkv).unflatten(2, (-1, heads.dim)).transpose(1, 2)
        queries, keys, values = states.split([heads.query, heads.kv, heads.kv], dim=1)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=heads.query != heads.kv
        )  # (n, K * G, P, D)
        return attended.transpose(1, 2).flatten(0, 1)[prompts.unpadded].flatten(1)

    return attend


def over_prefixes(cache: SlotCache, heads: Heads, prompts: Prompts, ends: Tensor) -> Attend:
    """Return causal attention for texts that continue the tokens in their slots, up to `ends` (n,) tokens."""
    targets = prompts.cache_indices(cache)
    columns = torch.arange(int(ends.max()), device=cache.device)  # (T,)
    # The block of a short text may end before column T.
    bounded_columns = torch.minimum(columns, (ends - 1).unsqueeze(1)).flatten()
    sources = cache.indices(0, prompts.rows.repeat_interleave(len(columns)), bounded_columns)
    sources = sources.view(len(ends), len(columns), -1).transpose(1, 2).flatten()
    visible = columns <= prompts.positions.view(len(ends), 1, -1, 1)  # (n, 1, P, T)

    def attend(layer: int, qkv: Tensor) -> Tensor:
        cache.layers[layer].index_copy_(0, targets, heads.keys_and_values(qkv))
        queries = prompts.pad_columns(qkv[:, : heads.query * heads.dim]).unflatten(2, (-1, heads.dim))
        states = cache.layers[layer][sources].view(len(ends), 2 * heads.kv, len(columns), heads.dim)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            *states.chunk(2, dim=1),
            attn_mask=visible,
            enable_gqa=heads.query != heads.kv,
        )
        return attended.transpose(1, 2).flatten(0, 1)[prompts.unpadded].flatten(1)

    return attend


class SlotAttention:
    """Attention of one new token per row to its slot. The G query heads of a key-value head are computed
    like G query positions, so that keys and values are read once and need not be repeated."""

    def __init__(self, cache: SlotCache, heads: Heads, length: int) -> None:
        self._cache = cache
        self._heads = heads
        self._scale = heads.dim**-0.5
        self._columns = torch.arange(length, device=cache.device)
        # The output of each row in the layer that is being computed. Padding rows keep old values.
        self._outputs = torch.zeros(
            cache.rows * heads.kv, heads.query // heads.kv, heads.dim, device=cache.device, dtype=cache.dtype
        )

    def at(self, positions: Tensor, spans: Sequence[TokenSpan]) -> Attend:
        """Return the attention of a step whose new tokens are at `positions` (R,). Its result is valid until
        the next layer is computed; rows after the last span get arbitrary values."""
        cache, heads, width = self._cache, self._heads, self._heads.query * self._heads.dim
        targets = cache.indices(0, slice(len(positions)), positions).flatten()
        output = self._outputs[: len(positions) * heads.kv]
        parts = [(span, self._mask(positions, span), self._rows(output, span)) for span in spans]
        joined = output.view(-1, width)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            cache.layers[layer].index_copy_(0, targets, heads.keys_and_values(qkv))
            queries = qkv[:, :width].reshape(-1, heads.query // heads.kv, heads.dim)  # (R * K, G, D)
            for span, mask, into in parts:
                keys, values = cache.span(layer, span.start, span.stop, span.length)
                self._attend(self._rows(queries, span), keys, values, mask, into)
            return joined

        return attend

    def _rows(self, x: Tensor, span: TokenSpan) -> Tensor:
        return x[span.start * self._heads.kv : span.stop * self._heads.kv]

    def _mask(self, positions: Tensor, span: TokenSpan) -> Tensor:
        """Return the additive mask for the scores of a span: (rows of the span * K, 1, T), 0 or -inf."""
        masked = self._columns[: span.length] > positions[span.start : span.stop].unsqueeze(1)
        if self._heads.kv > 1:
            masked = masked.repeat_interleave(self._heads.kv, dim=0)
        zeros = torch.zeros(masked.shape, device=masked.device, dtype=self._cache.dtype)
        return zeros.masked_fill_(masked, -inf).unsqueeze(1)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, into: Tensor) -> None:
        """Write the attention output of one span, (rows of the span * K, G, D), to `into`."""
        if queries.dtype != torch.float32:
            # Scores must not be rounded to half precision: this kernel keeps them in float32.
            inputs = [tensor.unsqueeze(1) for tensor in (queries, keys, values, mask)]
            into.copy_(F.scaled_dot_product_attention(*inputs[:3], attn_mask=inputs[3]).squeeze(1))
        else:
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=self._scale)
            torch.bmm(scores.softmax(-1), values, out=into)
