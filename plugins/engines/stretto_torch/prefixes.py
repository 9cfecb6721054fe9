"""The prefix cache: texts whose keys and values are in the pool, for new texts with the same prefix.

Every text was computed completely with the current weights: a swap clears the cache. A running sample's text
is in its own block. When the sample leaves, its text is copied to the free part of the pool, where new texts
replace the least recently used ones. A text that another one continues needs no room of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.serving.seen import SHORTEST, SeenTexts, prefix_keys
from stretto_torch.kv import Block, Move
from stretto_torch.slot_sample import SlotSample

_NOWHERE = Block(0, 0)
# Places to compare for a text: more of them take longer than they save.
_LOOKS = 256
# Tokens of the pool for texts that have ended, at first.
_ROOM = 2048


@dataclass(eq=False, slots=True)
class CachedText:
    """One text of the prefix cache."""

    ids: NDArray[np.int32]
    keys: tuple[int, ...]
    used: int  # when the text was added or found: a number that grows with each use
    sample: SlotSample | None = None
    """The running sample whose row holds the text; None if it has a separate block."""
    block: Block = _NOWHERE  # the separate block

    @property
    def stop(self) -> int:
        """The token of the pool after its separate block."""
        return self.block.start + self.block.capacity


class Prefixes:
    """The texts of one pool with `tokens` tokens. `saves`: use little of the pool, because used memory stays
    taken: as much as the rows had at most, and twice as much whenever a text returns that had no room."""

    def __init__(self, tokens: int, *, saves: bool = False) -> None:
        self.lost_tokens = 0
        """Tokens computed again because the cache, which had them before, is too small."""
        self._tokens = tokens
        self._room = _ROOM if saves else tokens
        self._uses = 0
        self._by_key: dict[int, CachedText] = {}  # of each beginning in whole pieces, the newest text
        self._running: dict[SlotSample, CachedText] = {}
        self._seen = SeenTexts()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._running.clear()
        self._seen.clear()
        self._kept: list[CachedText] = []  # those with separate blocks, by the place in the pool
        self._free = (0, self._tokens)
        self._next = 0  # where among them to look first for the next text's place

    def find(self, ids: NDArray[np.int32]) -> tuple[SlotSample | Block, int] | None:
        """Return where the text is that shares most leading pieces with this one, and how many tokens they
        share. At least one token is not shared, because the logits need one computed token."""
        keys = prefix_keys(ids[:-1])
        found = next((text for key in reversed(keys) if (text := self._by_key.get(key))), None)
        shared = 0 if found is None else _shared(found.ids, ids[:-1])
        lost = max(0, self._seen.shared(keys) - (shared if shared >= SHORTEST else 0))
        if lost:
            self.lost_tokens += lost
            self._room = min(2 * self._room, self._tokens)
        if found is None or shared < SHORTEST:
            return None
        found.used = self._next_use()
        return found.sample or found.block, shared

    def hold(self, sample: SlotSample, ids: NDArray[np.int32]) -> None:
        """Record that a running sample's slot begins with this text."""
        if len(ids) >= SHORTEST:
            self._running[sample] = text = self._new(ids)
            text.sample = sample
            self._add(text)

    def release(self, sample: SlotSample) -> None:
        """Forget a leaving sample's text; `arrange` may keep a copy."""
        text = self._running.pop(sample, None)
        if text is not None:
            self._forget(text)

    def arrange(
        self, free: tuple[int, int], former_texts: Sequence[tuple[Block, NDArray[np.int32]]] = ()
    ) -> list[Move]:
        """Set the free part of the pool, tokens start..stop-1; rows have blocks in all others. Keep there
        what was in the way of rows, and texts of samples that have left. Return the moves, which the caller
        must copy at once."""
        self._room = max(self._room, self._tokens - (free[1] - free[0]))
        self._free = free = (free[0], min(free[1], free[0] + self._room))
        kept = self._kept
        displaced: list[CachedText] = []
        while kept and kept[0].block.start < free[0]:
            displaced.append(kept.pop(0))
        while kept and kept[-1].stop > free[1]:
            displaced.append(kept.pop())
        displaced.sort(key=lambda text: text.used)
        moves: list[tuple[CachedText, Move]] = []
        for text in displaced:
            source = text.block
            if self._place(text):
                moves.append((text, Move(source, text.block, len(text.ids))))
            else:
                self._forget(text)
        for source, ids in former_texts:
            if len(ids) >= SHORTEST and self._place(text := self._new(ids)):
                moves.append((text, Move(source, text.block, len(ids))))
                self._add(text)
        # One that was placed may have been replaced by a later one.
        return [move for text, move in moves if self._is_known(text)]

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _new(self, ids: NDArray[np.int32]) -> CachedText:
        text = CachedText(ids, prefix_keys(ids), self._next_use())
        self._seen.add(text.keys)
        return text

    def _place(self, text: CachedText) -> bool:
        """Give a text a block: the next gap that is large enough, else the least recently used of the next
        `_LOOKS` places. Return False if that was used after the text's own."""
        kept, length, places = self._kept, len(text.ids), len(self._kept) + 1
        best = (text.used, 0, 0, 0)
        for look in range(min(places, _LOOKS)):
            first = (self._next + look) % places
            start = kept[first - 1].stop if first else self._free[0]
            last, newest = first, 0
            while (stop := kept[last].block.start if last < len(kept) else self._free[1]) - start < length:
                if last == len(kept):
                    break
                newest = max(newest, kept[last].used)
                last += 1
            else:
                best = min(best, (newest, stop - start, first, last))
                if first == last:
                    break
        newest, _, first, last = best
        if newest == text.used:
            return False
        text.block = Block(kept[first - 1].stop if first else self._free[0], length)
        for replaced in kept[first:last]:
            self._forget(replaced)
        kept[first:last] = [text]
        self._next = first + 1
        return True

    def _add(self, text: CachedText) -> None:
        former = {each for key in text.keys if (each := self._by_key.get(key)) and not each.sample}
        self._by_key.update(dict.fromkeys(text.keys, text))
        # What a text continues is found as its beginning from now on.
        for each in former:
            if not self._is_known(each) and each in self._kept:
                self._kept.remove(each)

    def _is_known(self, text: CachedText) -> bool:
        return self._by_key.get(text.keys[-1]) is text

    def _forget(self, text: CachedText) -> None:
        for key in text.keys:
            if self._by_key.get(key) is text:
                del self._by_key[key]


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
