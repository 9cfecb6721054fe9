"""Which engines and verifiers each rollout worker may call. A plain class without I/O.

Routing needs a few candidates, not all workers. In each group of workers, a rollout worker knows

- its part: the ids of the workers divide them among the rollout workers, so that nobody is forgotten;
- further ones up to a fixed number: those that follow places of its own on a ring with some points of each.

So of a small group everybody knows all. In a large one, a worker that joins or leaves changes few candidates:
conversations stay where their prefixes are cached. A group is the engines of training, or those lent to one
evaluation.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Hashable
from functools import cache
from itertools import count
from zlib import crc32

_POINTS = 8
"""Points of a worker on the ring. With fewer, the numbers of rollout workers that know it differ more."""


class Candidates:
    """The m rollout workers and the n workers they can call; deterministic. A change is O((m + n) log n)."""

    def __init__(self) -> None:
        self._rollouts: dict[str, None] = {}
        self._group_of: dict[str, tuple[Hashable, int]] = {}
        """Worker -> its group, and the candidates of a rollout worker in it, if it has that many."""
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
        """The current rollout workers."""
        return list(self._rollouts)

    def add_rollout(self, rollout: str) -> None:
        """Add a rollout worker that can take work."""
        self._rollouts[rollout], self._known = None, None

    def remove_rollout(self, rollout: str) -> None:
        """Remove a rollout worker that is gone."""
        self._rollouts.pop(rollout, None)
        self._known = None

    def put(self, worker: str, group: Hashable, least: int) -> None:
        """Move a worker to a group, of which a rollout worker knows `least`, if there are as many."""
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
        if self._known is None:
            self._known = {rollout: {} for rollout in self._rollouts}
            groups: dict[tuple[Hashable, int], list[str]] = {}
            for worker, group in self._group_of.items():
                groups.setdefault(group, []).append(worker)
            for (group, least), workers in groups.items():
                for rollout, found in _choices(list(self._rollouts), workers, least).items():
                    self._known[rollout] |= dict.fromkeys(found, group)
        return self._known


def _choices(rollouts: list[str], workers: list[str], least: int) -> dict[str, list[str]]:
    if len(workers) <= least:
        return dict.fromkeys(rollouts, workers)
    parts: dict[str, list[str]] = {rollout: [] for rollout in rollouts}
    for worker in workers if rollouts else ():
        parts[rollouts[crc32(worker.encode()) % len(rollouts)]].append(worker)
    ring = sorted((place, worker) for worker in workers for place in _places(worker))
    for rollout, found in parts.items():
        known, numbers = set(found), count()
        while len(found) < least:
            place = crc32(f"{next(numbers)} {rollout}".encode())
            _, worker = ring[bisect(ring, (place, "")) % len(ring)]
            if worker not in known:
                known.add(worker)
                found.append(worker)
    return parts


@cache
def _places(worker: str) -> tuple[int, ...]:
    return tuple(crc32(f"{number} {worker}".encode()) for number in range(_POINTS))
