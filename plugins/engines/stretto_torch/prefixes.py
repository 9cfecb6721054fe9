"""The prefix cache: texts whose keys and values are in the pool, for new texts with the same prefix.

Every text was computed completely with the current weights: a swap clears the cache. A running sample's text
is in its own block. When the sample leaves, its text is copied to the free part of the pool, where new texts
replace the least recently used ones. A text that is the beginning of another text needs no separate room.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.serving.seen import SHORTEST, SeenTexts, prefix_keys
from stretto.training.prefix_tree import common_length
from stretto_torch.kv import Block, Move
from stretto_torch.slot_sample import SlotSample

_NOWHERE = Block(0, 0)
# Places in the pool to compare for a new text. To compare more places takes longer than it saves.
_LOOKS = 256
# Initial number of tokens of the pool for the texts of ended samples, with `saves`.
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
    """The texts of one pool with `tokens` tokens. `saves`: use only a part of the pool, because memory once
    used is not freed. The part is at least the rows' largest use, and doubles when a lost text returns."""

    def __init__(self, tokens: int, *, saves: bool = False) -> None:
        self.lost_tokens = 0
        """Number of tokens computed again because the cache was too small to keep them."""
        self._tokens = tokens
        self._room = _ROOM if saves else tokens
        self._uses = 0
        self._by_key: dict[int, CachedText] = {}  # key of a prefix in whole pieces -> the newest text
        self._running: dict[SlotSample, CachedText] = {}
        self._seen = SeenTexts()
        self.clear()

    def clear(self) -> None:
        self._by_key.clear()
        self._running.clear()
        self._seen.clear()
        self._kept: list[CachedText] = []  # texts with separate blocks, in the order of the pool
        self._free = (0, self._tokens)
        self._next = 0  # index in `_kept` at which the search for a place begins

    def find(self, ids: NDArray[np.int32]) -> tuple[SlotSample | Block, int] | None:
        """Find the text that shares the most leading pieces with this one. Return its place and the number of
        shared tokens. The last token is never shared, because the logits after it must be computed."""
        keys = prefix_keys(ids[:-1])
        best = next((text for key in reversed(keys) if (text := self._by_key.get(key))), None)
        shared = 0 if best is None else common_length(best.ids, ids[:-1])
        lost = max(0, self._seen.shared(keys) - (shared if shared >= SHORTEST else 0))
        if lost:
            self.lost_tokens += lost
            self._room = min(2 * self._room, self._tokens)
        if best is None or shared < SHORTEST:
            return None
        best.used = self._next_use()
        return best.sample or best.block, shared

    def hold(self, sample: SlotSample, ids: NDArray[np.int32]) -> None:
        """Record that a running sample's slot begins with this text."""
        if len(ids) >= SHORTEST:
            self._running[sample] = text = self._new(ids)
            text.sample = sample
            self._add(text)

    def release(self, sample: SlotSample) -> None:
        """Forget the text of a sample that leaves its slot; `arrange` may keep a copy."""
        text = self._running.pop(sample, None)
        if text is not None:
            self._forget(text)

    def arrange(
        self, free: tuple[int, int], former_texts: Sequence[tuple[Block, NDArray[np.int32]]] = ()
    ) -> list[Move]:
        """Set the free part of the pool, tokens start..stop-1; the blocks of rows are in the rest. Move the
        texts outside of the free part into it, and add `former_texts`, those of samples that have left.
        The caller must copy the returned moves at once."""
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
        # A later text may have replaced a text that was placed before.
        return [move for text, move in moves if self._is_known(text)]

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _new(self, ids: NDArray[np.int32]) -> CachedText:
        text = CachedText(ids, prefix_keys(ids), self._next_use())
        self._seen.add(text.keys)
        return text

    def _place(self, text: CachedText) -> bool:
        """Assign a block to a text: the next gap that is large enough, else the place, of the next `_LOOKS`,
        whose texts were used least recently. Return False if all these were used after `text`."""
        kept, length, places = self._kept, len(text.ids), len(self._kept) + 1
        best = (text.used, 0, 0, 0)  # last use, size, and kept[first:last]: the texts to replace
        for offset in range(min(places, _LOOKS)):
            first = (self._next + offset) % places
            start = kept[first - 1].stop if first else self._free[0]
            last, last_use = first, 0
            while (stop := kept[last].block.start if last < len(kept) else self._free[1]) - start < length:
                if last == len(kept):
                    break
                last_use = max(last_use, kept[last].used)
                last += 1
            else:
                best = min(best, (last_use, stop - start, first, last))
                if first == last:
                    break
        last_use, _, first, last = best
        if last_use == text.used:
            return False
        text.block = Block(kept[first - 1].stop if first else self._free[0], length)
        for replaced in kept[first:last]:
            self._forget(replaced)
        kept[first:last] = [text]
        self._next = first + 1
        return True

    def _add(self, text: CachedText) -> None:
        older_texts = {older for key in text.keys if (older := self._by_key.get(key)) and not older.sample}
        self._by_key.update(dict.fromkeys(text.keys, text))
        # Drop older texts that are a beginning of the new text: all their keys now lead to the new text.
        for older in older_texts:
            if not self._is_known(older) and older in self._kept:
                self._kept.remove(older)

    def _is_known(self, text: CachedText) -> bool:
        return self._by_key.get(text.keys[-1]) is text

    def _forget(self, text: CachedText) -> None:
        for key in text.keys:
            if self._by_key.get(key) is text:
                del self._by_key[key]
