"""The prefix cache: texts whose keys and values are in the pool, for new texts with the same prefix.

Every text was computed completely with the current weights: a swap clears the cache. A running sample's text
is in its own block. When the sample leaves, its text is copied to the part of the pool that no row uses,
where new texts replace the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto_torch.kv import Block, Move
from stretto_torch.slot_sample import SlotSample

# Texts are found by whole pieces of this many tokens.
_PIECE = 32
# Copying fewer tokens costs more than computing them.
_SHORTEST = 64


@dataclass(eq=False, slots=True)
class CachedText:
    """One text of the prefix cache."""

    ids: NDArray[np.int32]
    place: SlotSample | Block
    """The running sample whose row holds the text, or a separate block."""
    keys: tuple[int, ...]


class Prefixes:
    """The texts of one pool with `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._by_key: dict[int, CachedText] = {}  # of each beginning in whole pieces, the newest text
        self._running: dict[SlotSample, CachedText] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._running.clear()
        # Texts without a row, oldest first, in a ring buffer over the bounds: the texts from the cursor on
        # are from the last round and come first, then those before the cursor.
        self._ring: deque[tuple[Block, CachedText]] = deque()
        self._bounds = self._free = (0, self._tokens)
        self._cursor = 0

    def find(self, ids: NDArray[np.int32]) -> tuple[SlotSample | Block, int] | None:
        """Find the text that shares the most leading pieces with this one; return where it is and how many
        tokens they share. At least one token is not shared, because the logits need one computed token."""
        for key in reversed([*_keys(ids[:-1])]):
            text = self._by_key.get(key)
            if text is not None:
                length = min(len(text.ids), len(ids) - 1)
                differ = text.ids[:length] != ids[:length]
                length = int(differ.argmax()) if differ.any() else length
                if length >= _SHORTEST:
                    return text.place, length
        return None

    def hold(self, sample: SlotSample, ids: NDArray[np.int32]) -> None:
        """Record that a running sample's slot begins with this text."""
        if len(ids) >= _SHORTEST:
            self._running[sample] = self._add(ids, sample)

    def release(self, sample: SlotSample) -> None:
        """Forget the text of a sample that leaves its slot."""
        text = self._running.pop(sample, None)
        if text is not None:
            self._forget(text)

    def free(self, free: tuple[int, int]) -> None:
        """Set the free part of the pool, tokens start..stop-1; rows have blocks in all other parts from now
        on."""
        self._free = free
        start, stop = max(free[0], self._bounds[0]), min(free[1], self._bounds[1])
        if (start, stop) != self._bounds:
            self._bounds = (start, stop)
            for block, text in tuple(self._ring):
                if block.start < start or sum(block) > stop:
                    self._ring.remove((block, text))
                    self._forget(text)

    def keep(self, former_texts: Sequence[tuple[Block, NDArray[np.int32]]]) -> list[Move]:
        """Keep texts of samples that have left, from their previous blocks. Return the moves for this; the
        caller must copy them before anything else happens."""
        copies: list[tuple[CachedText, Move]] = []
        for block, ids in former_texts:
            if _SHORTEST <= len(ids) <= self._free[1] - self._free[0]:
                target = Block(self._room(len(ids)), len(ids))
                text = self._add(ids, target)
                self._ring.append((target, text))
                copies.append((text, Move(block, target, len(ids))))
        # A kept text may already have been replaced by another one.
        return [move for text, move in copies if self._by_key.get(text.keys[-1]) is text]

    # ------------------------------------------------------------------------------------ private

    def _room(self, length: int) -> int:
        """Make room for a text after the newest one, or else at the beginning, and return its start."""
        start = max(self._cursor, self._bounds[0])
        if start + length > self._bounds[1]:
            self._forget_oldest(start, self._tokens)
            self._bounds = self._free
            start = self._bounds[0]
        self._cursor = start + length
        self._forget_oldest(start, self._cursor)
        return start

    def _forget_oldest(self, start: int, stop: int) -> None:
        """Forget the oldest texts while they begin in start..stop-1."""
        while self._ring and start <= self._ring[0][0].start < stop:
            self._forget(self._ring.popleft()[1])

    def _add(self, ids: NDArray[np.int32], place: SlotSample | Block) -> CachedText:
        text = CachedText(ids, place, tuple(_keys(ids)))
        self._by_key.update(dict.fromkeys(text.keys, text))
        return text

    def _forget(self, text: CachedText) -> None:
        for key in text.keys:
            if self._by_key.get(key) is text:
                del self._by_key[key]


def _keys(ids: NDArray[np.int32]) -> Iterator[int]:
    """Yield a key for each prefix of whole pieces, from the shortest useful one on."""
    key = 0
    for stop in range(_PIECE, len(ids) + 1, _PIECE):
        key = hash((key, ids[stop - _PIECE : stop].tobytes()))
        if stop >= _SHORTEST:
            yield key
