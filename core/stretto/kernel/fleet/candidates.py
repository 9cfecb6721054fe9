"""Chooses the engines and verifiers that each rollout worker may call. A plain class without I/O.

Routing needs a few candidates, not all workers. In each group, a rollout worker has these candidates:

- its part: a hash of each worker's id assigns the worker to one rollout worker, so that every worker is used;
- more workers up to a fixed number: those at the points that follow its own hashes on a hash ring.

So in a small group all workers are candidates. In a large group, a worker that joins or leaves changes few
candidates: conversations stay at engines that cache their prefixes. A group is all verifiers, the engines of
training, or the engines that are lent to one evaluation.
"""

from bisect import bisect
from collections.abc import Hashable
from functools import cache
from itertools import count
from zlib import crc32

_POINTS = 8
"""Points of a worker on the ring. With fewer points, workers are candidates less evenly often."""


class Candidates:
    """The m rollout workers and the n workers they may call; deterministic. A change is O((m + n) log n)."""

    def __init__(self) -> None:
        self._rollouts: dict[str, None] = {}
        self._group_of: dict[str, tuple[Hashable, int]] = {}
        """Worker -> its group, and the least number of candidates that a rollout worker has in the group."""
        self._known: dict[str, dict[str, Hashable]] | None = None
        """Rollout worker -> its candidates with their groups; None after a change."""
        self._told: dict[str, dict[str, Hashable]] = {}
        """The candidates at the last call of `take_changed`."""

    def __len__(self) -> int:
        return len(self._rollouts)

    def __contains__(self, rollout: str) -> bool:
        return rollout in self._rollouts

    @property
    def rollouts(self) -> list[str]:
        return list(self._rollouts)

    def add_rollout(self, rollout: str) -> None:
        """Add a rollout worker that can take work."""
        self._rollouts[rollout], self._known = None, None

    def remove_rollout(self, rollout: str) -> None:
        self._rollouts.pop(rollout, None)
        self._known = None

    def put(self, worker: str, group: Hashable, least: int) -> None:
        """Move a worker to a group, in which a rollout worker has at least `least` candidates if possible."""
        if self._group_of.get(worker) != (group, least):
            self._group_of[worker], self._known = (group, least), None

    def remove(self, worker: str) -> None:
        """Remove a worker that cannot be called any more."""
        if self._group_of.pop(worker, None) is not None:
            self._known = None

    def of(self, rollout: str) -> list[str]:
        """Return the candidates of a rollout worker, by id."""
        return sorted(self._all()[rollout])

    def rollouts_of(self, worker: str) -> set[str]:
        """Return the rollout workers that have a worker among their candidates."""
        return {rollout for rollout, known in self._all().items() if worker in known}

    def take_changed(self) -> list[str]:
        """Return the current rollout workers whose candidates have changed since the last call."""
        former, self._told = self._told, self._all()
        return [rollout for rollout, known in self._told.items() if former.get(rollout) != known]

    def _all(self) -> dict[str, dict[str, Hashable]]:
        """Return rollout worker -> candidate -> the candidate's group, computed again after a change."""
        if self._known is None:
            self._known = {rollout: {} for rollout in self._rollouts}
            groups: dict[tuple[Hashable, int], list[str]] = {}
            for worker, group_and_least in self._group_of.items():
                groups.setdefault(group_and_least, []).append(worker)
            for (group, least), workers in groups.items():
                for rollout, candidates in _choices(list(self._rollouts), workers, least).items():
                    self._known[rollout] |= dict.fromkeys(candidates, group)
        return self._known


def _choices(rollouts: list[str], workers: list[str], least: int) -> dict[str, list[str]]:
    if len(workers) <= least:
        return dict.fromkeys(rollouts, workers)
    parts: dict[str, list[str]] = {rollout: [] for rollout in rollouts}
    for worker in workers if rollouts else ():
        parts[rollouts[crc32(worker.encode()) % len(rollouts)]].append(worker)
    ring = sorted((place, worker) for worker in workers for place in _places(worker))
    for rollout, candidates in parts.items():
        chosen, numbers = set(candidates), count()
        while len(candidates) < least:
            place = crc32(f"{next(numbers)} {rollout}".encode())
            _, worker = ring[bisect(ring, (place, "")) % len(ring)]
            if worker not in chosen:
                chosen.add(worker)
                candidates.append(worker)
    return parts


@cache
def _places(worker: str) -> tuple[int, ...]:
    return tuple(crc32(f"{number} {worker}".encode()) for number in range(_POINTS))
