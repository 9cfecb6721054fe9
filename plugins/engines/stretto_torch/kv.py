"""The cache of keys and values: one slot a sample, filled from position 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token. Where values are narrower than keys, the rest stays unused."""

    kv_heads: int
    head_dim: int


class SlotCache:
    """Keys and values of every slot. Never holds NaN: masked positions are multiplied by 0, not skipped.

    `layers[i]` is (2, rows, kv_heads, length, head_dim): keys, then values.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.rows = rows
        self.length = length
        self.layers = [
            torch.zeros(2, rows, shape.kv_heads, length, shape.head_dim, device=device, dtype=dtype)
            for shape in shapes
        ]

    @property
    def device(self) -> torch.device:
        """Where the layers lie."""
        return self.layers[0].device

    def move(self, source: int, target: int, length: int) -> None:
        """Overwrite the first `length` positions of one row by another's."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def exchange(self, one: int, other: int, length: int) -> None:
        """Let two rows change places, `length` positions of them."""
        for layer in self.layers:
            kept = layer[:, one, :, :length].clone()
            layer[:, one, :, :length] = layer[:, other, :, :length]
            layer[:, other, :, :length] = kept

    def spread(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of one row to several others."""
        index = torch.tensor(targets, device=self.device)
        for layer in self.layers:
            layer[:, index, :, :length] = layer[:, source, :, :length].unsqueeze(1)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store what a prefill computed for some rows, from position 0 on.

        Args:
            layer: index of the layer.
            rows: (n,) int64.
            keys: (n, kv_heads, P, head_dim).
            values: the same, or with a narrower last dimension.
        """
        length = keys.shape[2]
        self.layers[layer][0, rows, :, :length, : keys.shape[3]] = keys
        self.layers[layer][1, rows, :, :length, : values.shape[3]] = values

    def clear(self, row: int) -> None:
        """Zero a row."""
        for layer in self.layers:
            layer[:, row] = 0
