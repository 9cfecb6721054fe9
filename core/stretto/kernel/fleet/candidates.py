"""Which engines and verifiers each rollout worker may call. A plain class without I/O.

Routing needs a few candidates, not all workers. The workers of a group stand in a ring, in an order that
their ids give, and each rollout worker has a place in it. It knows

- its part: the workers from its place up to that of the next rollout worker, so that nobody is forgotten;
- further workers, at distances that are the same for all, until it knows a fixed number.

So of a small group everybody knows all. The distances are drawn: of next neighbours, the load of a few would
not spread. All engines that serve the same purpose are one group: those of training, and those lent to the
evaluation of a version.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from zlib import crc32


class Candidates:
    """The rollout workers of a run, and the workers that they can call. The same calls in the same order give
    the same choices. With m rollout workers and n workers, a change takes O(m + n log n)."""

    def __init__(self) -> None:
        self._rollouts: dict[str, None] = {}
        self._group_of: dict[str, Hashable] = {}
        """Worker -> its group."""
        self._least: dict[Hashable, int] = {}
        """Group -> candidates of a rollout worker, if the group has that many."""
        self._known: dict[str, list[str]] | None = None
        """Rollout worker -> its candidates; None after a change."""
        self._told: dict[str, list[str]] = {}
        """The candidates at the last call of `take_changed`."""

    def __len__(self) -> int:
        """Number of rollout workers."""
        return len(self._rollouts)

    def __contains__(self, rollout: str) -> bool:
        """Whether this is a current rollout worker."""
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
        """Add a worker that can be called to a group. It leaves its previous group.

        Args:
            least: number of candidates of a rollout worker in this group, if the group has that many.
        """
        if self._group_of.get(worker) != group:
            self._group_of[worker], self._least[group], self._known = group, least, None

    def remove(self, worker: str) -> None:
        """Remove a worker that cannot be called any more."""
        if self._group_of.pop(worker, None) is not None:
            self._known = None

    def of(self, rollout: str) -> list[str]:
        """Return the candidates of a rollout worker, by id."""
        return self._all()[rollout]

    def rollouts_of(self, worker: str) -> set[str]:
        """Return the rollout workers that have a worker among their candidates."""
        return {rollout for rollout, known in self._all().items() if worker in known}

    def take_changed(self) -> list[str]:
        """Return the current rollout workers whose candidates have changed since the last call."""
        former, self._told = self._told, self._all()
        return [rollout for rollout, known in self._told.items() if former.get(rollout) != known]

    def _all(self) -> dict[str, list[str]]:
        if self._known is None:
            rings: dict[Hashable, list[str]] = {}
            for worker in sorted(self._group_of, key=lambda each: (crc32(each.encode()), each)):
                rings.setdefault(self._group_of[worker], []).append(worker)
            found: dict[str, list[str]] = {rollout: [] for rollout in self._rollouts}
            for group, ring in rings.items():
                distances = _distances(len(ring), len(found), self._least[group])
                for number, known in enumerate(found.values()):
                    place = number * len(ring) // len(found)
                    known += [ring[(place + distance) % len(ring)] for distance in distances]
            self._known = {rollout: sorted(known) for rollout, known in found.items()}
        return self._known


def _distances(size: int, rollouts: int, least: int) -> list[int]:
    """Where the candidates of a rollout worker stand, from its place on, in a ring of this size."""
    part = -(-size // max(1, rollouts))  # rounded up
    others = range(part, size)
    drawn = random.Random(size).sample(others, min(len(others), max(0, least - part)))
    return [*range(part), *drawn]
