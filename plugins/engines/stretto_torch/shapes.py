"""The shapes a decode step computes with: how many rows, and how far attention looks.

Rows are padded to a multiple of 8 and lengths to one of 32. Within these steps a row of every kernel in
use gives the same bits whatever the shape, as far as has been observed; `determinism.py` tests it. Where
that fails, shapes are fixed at their largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROWS = 8
_LENGTH = 32
_PROMPT = 16
# Below this many rows a second call of attention costs more than it saves.
_FEWEST_TO_SPLIT = 16


@dataclass(frozen=True, slots=True)
class Span:
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
        """Rows of the cache and of the largest step."""
        return padded_rows(self.slots)

    def rows(self, live: int) -> int:
        """Rows of a step with so many live ones."""
        return self.most_rows if self.fixed else padded_rows(live)

    def splits(self, live: int) -> bool:
        """Whether a step with so many live rows is cut into spans."""
        return not self.fixed and live >= _FEWEST_TO_SPLIT

    def spans(self, positions: NDArray[np.int64], classes: tuple[int, ...]) -> list[Span]:
        """Cut the live rows of a step into spans of similar length.

        Args:
            positions: (live,); those beyond a cut before those below it.
            classes: lengths at which the decoder wants a cut, ascending.
        """
        live = len(positions)
        if self.fixed:
            return [Span(0, self.most_rows, self.length)]
        longest = int(positions.max()) + 1
        spans: list[Span] = []
        start = 0
        for cut in reversed(classes if self.splits(live) else ()):
            stop = int((positions >= cut).sum()) if cut < longest else start
            if start < stop < live:
                spans.append(Span(start, stop, padded_length(longest)))
                start, longest = stop, int(positions[stop:].max()) + 1
        spans.append(Span(start, live, padded_length(longest)))
        return spans


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
