"""The shapes of decode steps (rows, and positions that attention reads) and of deterministic prefills.

Rows are padded to a multiple of 8, lengths to a multiple of 32, columns of a deterministic prefill to a
multiple of 16. With these shapes every kernel in use gave the same bits for a row; `determinism.py` tests it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROWS = 8
_LENGTH = 32
_PROMPT = 16
# Most columns, of all its prompts, in a deterministic prefill. More columns are hardly faster.
_PREFILL = 512


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Rows `start..stop-1`, which attend to positions `0..length-1` at most."""

    start: int
    stop: int
    length: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of one engine."""

    slots: int  # number of samples decoded at once
    context: int  # tokens a sample may have, prompt and answer together
    fixed: bool = False  # compute every step with the largest shapes
    trimmed: bool = False
    """With `fixed`, fix only the number of rows: attention reads no more positions than needed."""
    solo_prompts: bool = False  # compute every prompt of a deterministic engine separately

    @property
    def full(self) -> bool:
        """True if attention always reads all rows and all positions of a slot."""
        return self.fixed and not self.trimmed

    @property
    def length(self) -> int:
        """Number of tokens that fit into a slot."""
        return padded_length(self.context)

    @property
    def most_rows(self) -> int:
        return padded_rows(self.slots)

    def rows(self, live: int) -> int:
        """Return the number of rows of a step with `live` running samples."""
        return self.most_rows if self.fixed else padded_rows(live)

    def spans(self, positions: NDArray[np.int64], size_classes: Sequence[tuple[int, int]]) -> list[TokenSpan]:
        """Return a step's spans: one for each size class, as long as its longest row needs. `positions`:
        (live,) positions of the computed tokens. The classes are rows start..stop-1, in order."""
        if self.full:
            return [TokenSpan(0, self.most_rows, self.length)]
        return [
            TokenSpan(start, stop, padded_length(int(positions[start:stop].max()) + 1))
            for start, stop in size_classes
        ]

    def prompt_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide prompts into deterministic prefills. All prompts of a prefill have the same number of
        columns, so that attention computes each prompt as it would alone."""
        by_columns: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            by_columns.setdefault(padded_prompt(length), []).append(i)
        batches: list[list[int]] = []
        for columns, indices in by_columns.items():
            max_prompts = 1 if self.solo_prompts else max(1, _PREFILL // columns)
            batches += [indices[first : first + max_prompts] for first in range(0, len(indices), max_prompts)]
        return batches


def padded_length(length: int) -> int:
    """Round a number of positions to attend to up to a multiple of 32."""
    return _up(length, _LENGTH)


def padded_rows(rows: int) -> int:
    """Round a number of rows up to a multiple of 8."""
    return _up(rows, _ROWS)


def padded_prompt(length: int) -> int:
    """Round the columns of a prefill of `length` tokens up to a multiple of 16."""
    return _up(length, _PROMPT)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
