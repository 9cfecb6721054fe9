"""Which inference workers are lent to the evaluation under way. A plain class without I/O.

A lent worker serves the weights of the evaluation, to the evaluation alone. With training at rest all are
lent. Of several, one is lent beside training, and half of them while another evaluation waits. A single one
takes turns: some time for the evaluation, then as much for training, then twice that for either, and so on:
an answer that a turn breaks off may have to be sampled anew, and is to fit into a later one. A turn begins
when the engine serves the weights of that turn, so a model that takes long to load loses none of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        turn_s: seconds of the first turn of an evaluation.
    """

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._number, self._ends = 0, math.inf
        """Of the turn at a single engine, even ones being the evaluation's; and when it is over: never,
        before it begins."""
        self.lent: frozenset[str] = frozenset()

    def choose(self, wish: Wish, workers: Mapping[str, int | None], now: float) -> float:
        """Set `lent` to those of the workers that are lent now.

        Args:
            workers: the version that each serves to an evaluation alone; None of those that serve training.
            now: seconds, of any clock.

        Returns:
            When this is to be looked at again although nothing has changed.
        """
        if wish.version is not None and not wish.resting and len(workers) == 1:
            ((worker, serves),) = workers.items()
            wanted = None if self._number % 2 else wish.version
            return self._take_turns(worker, now, begun=serves == wanted)
        self._number, self._ends = 0, math.inf
        if wish.version is None:
            number = 0
        elif wish.resting:
            number = len(workers)
        else:
            number = max(1, len(workers) // 2) if len(wish.needed) > 1 else 1
        # Whoever is lent stays so: each change costs two swaps.
        first = sorted(workers, key=lambda worker: (worker not in self.lent, worker))
        self.lent = frozenset(first[:number])
        return math.inf

    def _take_turns(self, worker: str, now: float, *, begun: bool) -> float:
        """Returns when the present turn is over."""
        if now >= self._ends:
            self._number, self._ends = self._number + 1, math.inf
        elif begun:
            self._ends = min(self._ends, now + self._turn_s * 2 ** (self._number // 2))
        self.lent = frozenset() if self._number % 2 else frozenset([worker])
        return self._ends
