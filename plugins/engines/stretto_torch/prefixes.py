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
class Held:
    """One text of the prefix cache."""

    ids: NDArray[np.int32]
    where: SlotSample | Block
    """The running sample whose row holds the text, or a separate block."""
    keys: tuple[int, ...]


class Prefixes:
    """The texts of one pool with `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._by_key: dict[int, Held] = {}  # of each beginning in whole pieces, the newest text
        self._running: dict[SlotSample, Held] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._running.clear()
        # Texts without a row, oldest first, in a ring buffer over the bounds: the texts from the cursor on
        # are from the last round and come first, then those before the cursor.
        self._left: deque[tuple[Block, Held]] = deque()
        self._bounds = self._free = (0, self._tokens)
        self._cursor = 0

    def find(self, ids: NDArray[np.int32]) -> tuple[SlotSample | Block, int] | None:
        """Find the text that shares the most leading pieces with this one; return where it is and how many
        tokens they share. At least one token is not shared, because the logits need one computed token."""
        for key in reversed([*_keys(ids[:-1])]):
            held = self._by_key.get(key)
            if held is not None:
                length = min(len(held.ids), len(ids) - 1)
                differ = held.ids[:length] != ids[:length]
                length = int(differ.argmax()) if differ.any() else length
                if length >= _SHORTEST:
                    return held.where, length
        return None

    def hold(self, sample: SlotSample, ids: NDArray[np.int32]) -> None:
        """Record that a running sample's slot begins with this text."""
        if len(ids) >= _SHORTEST:
            self._running[sample] = self._add(ids, sample)

    def release(self, sample: SlotSample) -> None:
        """Forget the text of a sample that leaves its slot."""
        held = self._running.pop(sample, None)
        if held is not None:
            self._forget(held)

    def free(self, free: tuple[int, int]) -> None:
        """Set the free part of the pool, tokens start..stop-1; rows have blocks in all other parts from now
        on."""
        self._free = free
        start, stop = max(free[0], self._bounds[0]), min(free[1], self._bounds[1])
        if (start, stop) != self._bounds:
            self._bounds = (start, stop)
            for block, held in tuple(self._left):
                if block.start < start or sum(block) > stop:
                    self._left.remove((block, held))
                    self._forget(held)

    def keep(self, left: Sequence[tuple[Block, NDArray[np.int32]]]) -> list[Move]:
        """Keep texts of samples that have left, from their former blocks. Return the moves for this; the
        caller must copy them before anything else happens."""
        kept: list[tuple[Held, Move]] = []
        for block, ids in left:
            if _SHORTEST <= len(ids) <= self._free[1] - self._free[0]:
                room = Block(self._room(len(ids)), len(ids))
                held = self._add(ids, room)
                self._left.append((room, held))
                kept.append((held, Move(block, room, len(ids))))
        # A kept text may already have been replaced by another one.
        return [move for held, move in kept if self._by_key.get(held.keys[-1]) is held]

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
        while self._left and start <= self._left[0][0].start < stop:
            self._forget(self._left.popleft()[1])

    def _add(self, ids: NDArray[np.int32], where: SlotSample | Block) -> Held:
        held = Held(ids, where, tuple(_keys(ids)))
        self._by_key.update(dict.fromkeys(held.keys, held))
        return held

    def _forget(self, held: Held) -> None:
        for key in held.keys:
            if self._by_key.get(key) is held:
                del self._by_key[key]


def _keys(ids: NDArray[np.int32]) -> Iterator[int]:
    """Yield a key for each prefix of whole pieces, from the shortest useful one on."""
    key = 0
    for stop in range(_PIECE, len(ids) + 1, _PIECE):
        key = hash((key, ids[stop - _PIECE : stop].tobytes()))
        if stop >= _SHORTEST:
            yield key
