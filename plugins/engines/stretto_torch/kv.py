"""The cache of keys and values: one pool of tokens, in which every row has a separate block."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LayerShape(NamedTuple):
    """Shape of a layer's keys and values per token. `head_dim` is the larger of their two dimensions."""

    kv_heads: int
    head_dim: int


class Block(NamedTuple):
    """A part of the pool, filled from its first token on."""

    start: int  # index of the block's first token in the pool
    capacity: int  # number of tokens that fit into the block


class Move(NamedTuple):
    """A copy of the first `length` tokens of one block to the beginning of another."""

    source: Block
    target: Block
    length: int


class SlotCache:
    """Keys and values of every slot. Must not contain NaN: masked positions are multiplied by 0, not skipped.

    `layers[i]` is (2 * (tokens + 1) * kv_heads, head_dim): all keys, then all values. In a block the key of
    head k at position p is at `start * kv_heads + k * capacity + p`. Rows without a block write to the
    additional token. `rows`: rows of the largest step; `tokens`: size of the pool.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.tokens = tokens
        self.rows = rows
        self.device = device
        self.dtype = dtype
        self.blocks: list[Block] = []
        self.layers = [
            _zeros(2 * (tokens + 1) * shape.kv_heads, shape.head_dim, device, dtype) for shape in shapes
        ]
        self._heads = [shape.kv_heads for shape in shapes]
        self._head_counts = sorted(set(self._heads))
        # By number of heads: the index of position 0 of each row's keys, then values: (rows, 2 * kv_heads).
        self._starts = {
            heads: torch.zeros(rows, 2 * heads, dtype=torch.int64, device=device)
            for heads in self._head_counts
        }
        # The views that `span` has returned since the last call of `place`: making one costs as much as a
        # small kernel, and most steps need the views of the step before.
        self._spans: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self.place([])

    def place(self, blocks: Sequence[Block]) -> None:
        """Assign these blocks to rows 0, 1, ..., and none to later rows. No keys and values are moved."""
        self.blocks = list(blocks)
        self._spans.clear()
        dummies = (self.tokens, 1) * (self.rows - len(blocks))
        for heads in self._head_counts:
            starts = self._beginnings([*chain.from_iterable(blocks), *dummies], heads)
            self._starts[heads].copy_(torch.from_numpy(starts.reshape(self.rows, 2 * heads)))

    def place_evenly(self, capacity: int, rows: int) -> None:
        """Assign adjacent blocks of one capacity to this number of rows."""
        self.place([Block(row * capacity, capacity) for row in range(rows)])

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy parts of the pool, all at once: every move reads the contents from before all moves."""
        sources_and_targets = [*(move.source for move in moves), *(move.target for move in moves)]
        blocks = [*chain.from_iterable(sources_and_targets)]
        lengths = [move.length for move in moves]
        for heads in self._head_counts:
            sources, targets = self._tokens_of(blocks, lengths * 2, heads).chunk(2)
            for layer, layer_heads in zip(self.layers, self._heads, strict=True):
                if layer_heads == heads:
                    layer.index_copy_(0, targets, layer.index_select(0, sources))

    def clear(self, row: int) -> None:
        block = self.blocks[row]
        for layer, heads in zip(self.layers, self._heads, strict=True):
            layer[self._tokens_of(block, [block.capacity], heads)] = 0

    # --------------------------------------------------------------------------------- for decoders

    def indices(self, layer: int, rows: Tensor | slice, positions: Tensor) -> Tensor:
        """Return (tokens, 2 * kv_heads) indices of keys, then values, for tokens in `rows` at `positions`."""
        return self._starts[self._heads[layer]][rows] + positions.unsqueeze(1)

    def span(self, layer: int, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` keys and values of rows `start..stop-1`, each (rows * kv_heads, length,
        head_dim), as views. The rows' blocks must be adjacent and have one capacity."""
        key = (layer, start, stop, length)
        if key not in self._spans:
            self._spans[key] = self._views(*key)
        return self._spans[key]

    def _views(self, layer: int, start: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        flat, heads, first_block = self.layers[layer], self._heads[layer], self.blocks[start]
        dim = flat.shape[1]
        shape, stride = ((stop - start) * heads, length, dim), (first_block.capacity * dim, dim, 1)
        offset, half = first_block.start * heads * dim, flat.numel() // 2
        return flat.as_strided(shape, stride, offset), flat.as_strided(shape, stride, half + offset)

    def _beginnings(self, blocks: Sequence[int], heads: int) -> NDArray[np.int64]:
        """Return the indices of each head's first key, then first value: (blocks, 2 * heads). `blocks`: start
        and capacity of each block, flattened."""
        pairs = np.array(blocks).reshape(-1, 2, 1)
        keys = pairs[:, 0] * heads + pairs[:, 1] * np.arange(heads)
        return np.concatenate([keys, keys + (self.tokens + 1) * heads], axis=1)

    def _tokens_of(self, blocks: Sequence[int], lengths: Sequence[int], heads: int) -> Tensor:
        """Return the indices of all keys and values of the first tokens of each block (see `_beginnings`)."""
        counts = np.repeat(lengths, 2 * heads)
        ends = counts.cumsum()
        # For each head: index in the layer of its first token, minus number of tokens of the heads before.
        offsets = self._beginnings(blocks, heads).ravel() - (ends - counts)
        return torch.from_numpy(np.repeat(offsets, counts) + np.arange(ends[-1])).to(self.device)


def _zeros(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros. On a CPU `np.zeros` lets the system zero each page at its first use; `torch.zeros` would
    write all pages at once, which took 16 s for 6 GB."""
    if device.type != "cpu":
        return torch.zeros(rows, columns, device=device, dtype=dtype)
    size = rows * columns * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(rows, columns)
