"""The choice of the inference workers that are lent to the evaluation under way. A plain class without I/O.

A lent worker serves only the evaluation, with the evaluation's weights. While training needs no engine, all
workers are lent. While training needs engines, a run with an evaluator lends only that; a run without one
lends one of several workers, or half of them if another evaluation waits.

A single worker takes turns. Before the first step it serves training, so that faults of the training show
before an evaluation, which may take long. Then it serves the evaluation for some time, training for the same
time, then each for twice that time, and so on: an answer that the end of a turn interrupts may have to be
sampled again, and must fit into a later turn. A slow load of weights does not shorten a turn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """The need of evaluations for engines, according to the scheduler."""

    version: int | None = None
    """Version of the evaluation under way; None if none is under way."""
    needed: tuple[int, ...] = ()
    """Versions of the evaluation under way and of the evaluations that wait for it."""
    resting: bool = False
    """Whether training needs no engine now."""
    untrained: bool = False
    """Whether no step has been trained yet."""
    asleep: bool = False
    """Whether the engines must sleep: training has its turn on their device."""


class Lending:
    """The lending of one kernel's inference workers. `turn_s` is the length of an evaluation's first turn."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._turn, self._ends = 0, math.inf
        """`_turn` is the number of the turn at a single engine: even turns belong to the evaluation.
        `_ends` is the time at which the turn ends, infinite before the turn begins."""
        self.lent: frozenset[str] = frozenset()

    def choose(
        self, demand: Demand, workers: Mapping[str, int | None], now: float, own: frozenset[str] | None = None
    ) -> float:
        """Set `lent`. Return the time of the next call if nothing changes: the end of a turn, or infinity.

        `workers` maps each worker to the version that it serves to an evaluation, None if it serves training.
        `now` is in seconds of any clock. `own` has the evaluator if it is ready; None if the run has no
        evaluator. While `own` is empty, the evaluation waits for the evaluator.
        """
        must_share = len(workers) == 1 and not demand.resting and own is None
        if demand.version is not None and must_share and not demand.untrained:
            ((worker, serves),) = workers.items()
            turn_version = None if self._turn % 2 else demand.version
            return self._take_turns(worker, now, is_loaded=serves == turn_version)
        self._turn, self._ends = 0, math.inf
        if demand.version is None or must_share:
            lent_count = 0
        elif demand.resting:
            lent_count = len(workers)
        elif own is not None:
            lent_count = 0
        else:
            lent_count = max(1, len(workers) // 2) if len(demand.needed) > 1 else 1
        # A lent worker stays lent, because each change costs two swaps.
        lent_first = sorted(workers, key=lambda worker: (worker not in self.lent, worker))
        self.lent = frozenset(lent_first[:lent_count])
        if own is not None and demand.version is not None:
            self.lent |= own
        return math.inf

    def _take_turns(self, worker: str, now: float, *, is_loaded: bool) -> float:
        """Return the time at which the turn ends. The turn begins when the worker has loaded its weights."""
        if now >= self._ends:
            self._turn, self._ends = self._turn + 1, math.inf
        elif is_loaded:
            self._ends = min(self._ends, now + self._turn_s * 2 ** (self._turn // 2))
        self.lent = frozenset() if self._turn % 2 else frozenset([worker])
        return self._ends
