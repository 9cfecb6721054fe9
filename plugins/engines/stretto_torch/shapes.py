"""The shapes a decode step computes with: how many rows, and how far attention looks.

Rows are padded to a multiple of 8 and lengths to one of 32. Within these steps a row of every kernel in
use gives the same bits whatever the shape, as far as has been observed; `determinism.py` tests it. Where
that fails, shapes are fixed at their largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROWS = 8
_LENGTH = 32
_PROMPT = 16


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Rows `start..stop-1`, which attend to positions `0..length-1` at most."""

    start: int
    stop: int
    length: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of one engine."""

    slots: int
    """Samples decoded at once."""
    context: int
    """Tokens a sample may have, prompt and answer together."""
    fixed: bool = False

    @property
    def length(self) -> int:
        """Tokens a slot has room for."""
        return padded_length(self.context)

    @property
    def most_rows(self) -> int:
        """Rows of the largest step."""
        return padded_rows(self.slots)

    def rows(self, live: int) -> int:
        """Rows of a step with so many live ones."""
        return self.most_rows if self.fixed else padded_rows(live)

    def spans(self, positions: NDArray[np.int64], shelves: Sequence[tuple[int, int]]) -> list[TokenSpan]:
        """The spans of a step: one a shelf, as far as its longest row reaches.

        Args:
            positions: (live,) of the tokens that are computed.
            shelves: rows start..stop-1 of each, in order; of all live rows.
        """
        if self.fixed:
            return [TokenSpan(0, self.most_rows, self.length)]
        return [
            TokenSpan(start, stop, padded_length(int(positions[start:stop].max()) + 1))
            for start, stop in shelves
        ]


def padded_length(length: int) -> int:
    """Positions to attend to for so many wanted ones."""
    return _up(length, _LENGTH)


def padded_rows(rows: int) -> int:
    """Rows to compute for so many wanted ones."""
    return _up(rows, _ROWS)


def padded_prompt(length: int) -> int:
    """Columns of a prefill of so many tokens."""
    return _up(length, _PROMPT)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
