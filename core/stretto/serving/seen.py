"""The texts that an engine has computed with its weights: an unlimited prefix cache would have them all."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PIECE = 32
"""Texts are compared by whole pieces of this many tokens."""
SHORTEST = 64
"""Fewest tokens of a useful prefix: copying fewer tokens costs more than computing them."""
_REMEMBERED = 2**18
"""Number of pieces to remember, 8 million tokens. Beyond it, the oldest pieces are forgotten."""


class SeenTexts:
    """The texts that were computed since the latest `clear`."""

    def __init__(self) -> None:
        self._lengths = OrderedDict[int, int]()  # key of a prefix -> its length, the latest last

    def clear(self) -> None:
        """Forget all texts: the engine has other weights."""
        self._lengths.clear()

    def add(self, keys: Sequence[int]) -> None:
        """Remember a text by the keys of its prefixes, see `prefix_keys`."""
        for number, key in enumerate(keys):
            self._lengths[key] = SHORTEST + PIECE * number
            self._lengths.move_to_end(key)
        while len(self._lengths) > _REMEMBERED:
            self._lengths.popitem(last=False)

    def shared(self, keys: Sequence[int]) -> int:
        """Return the number of leading tokens, in whole pieces, that a text shares with an earlier text."""
        return next((self._lengths[key] for key in reversed(keys) if key in self._lengths), 0)


def prefix_keys(ids: NDArray[np.int32]) -> tuple[int, ...]:
    """Return a key for each prefix of whole pieces, from the shortest useful one on."""
    key, keys = 0, list[int]()
    for stop in range(PIECE, len(ids) + 1, PIECE):
        key = hash((key, ids[stop - PIECE : stop].tobytes()))
        if stop >= SHORTEST:
            keys.append(key)
    return tuple(keys)
