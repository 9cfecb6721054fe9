"""Which inference workers are lent to the evaluation under way. A plain class without I/O.

A lent worker serves the weights of the evaluation, to the evaluation alone. With training at rest all are
lent. Of several, one is lent beside training, and half of them while another evaluation waits. A single one
takes turns: so much time for the evaluation, then as much for training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Lending", "Wish"]


@dataclass(frozen=True)
class Wish:
    """What the scheduler wants of the engines for evaluations."""

    version: int | None = None
    """Of the evaluation under way."""
    needed: tuple[int, ...] = ()
    """Versions of this and of those that wait for it."""
    resting: bool = False
    """Whether training misses no engine."""


class Lending:
    """Lives as long as its kernel.

    Args:
        turn_s: seconds of a turn.
    """

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._ends = -math.inf
        """When the present turn of the evaluation is over."""
        self.lent: frozenset[str] = frozenset()

    def choose(self, wish: Wish, workers: Sequence[str], now: float) -> float:
        """Set `lent` to those of the workers that are lent now. Returns when this is to be looked at again,
        whatever happens."""
        again = math.inf
        if wish.version is None:
            number, self._ends = 0, -math.inf
        elif wish.resting:
            number, self._ends = len(workers), -math.inf
        elif len(workers) == 1:
            number, again = self._turn(now)
        else:
            number = max(1, len(workers) // 2) if len(wish.needed) > 1 else 1
        # Whoever is lent stays so: each change costs two swaps.
        first = sorted(workers, key=lambda worker: (worker not in self.lent, worker))
        self.lent = frozenset(first[:number])
        return again

    def _turn(self, now: float) -> tuple[int, float]:
        """How many are lent in the present turn, and when it is over. The first is the evaluation's."""
        if now >= self._ends + self._turn_s:
            self._ends = now + self._turn_s
        return (1, self._ends) if now < self._ends else (0, self._ends + self._turn_s)
