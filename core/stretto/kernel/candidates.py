"""Which engines and verifiers each rollout worker may call. A plain class without I/O.

Routing needs a few candidates, not all workers. The candidates of a rollout worker are

- the first workers of each group in the order of a hash of both ids (rendezvous hashing), a fixed number;
- the workers for which this rollout worker is the first, in the same order.

So every rollout worker knows all of a small group, and no worker is without work because nobody knows it.
The number of a rollout worker's candidates depends on the number of workers for each rollout worker, and not
on the number of all. A worker that joins or leaves changes the candidates of few rollout workers. All engines
that serve the same purpose are one group: those of training, and those lent to the evaluation of a version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Candidates"]

_COVER = 1
"""Rollout workers that know a worker, at least."""
_NONE = np.uint64(2**64 - 1)
"""The score of an option that is not there: worse than all others."""


class Candidates:
    """The rollout workers of a run, the workers that they can call, and the choice between them. It depends
    on the present workers alone, not on their order of arrival."""

    def __init__(self) -> None:
        self._rollouts: dict[str, None] = {}
        self._group_of: dict[str, Hashable] = {}
        self._groups: dict[Hashable, _WorkerGroupChoices] = {}
        self._changed: set[str] = set()

    def __len__(self) -> int:
        """Return the number of rollout workers."""
        return len(self._rollouts)

    @property
    def rollouts(self) -> list[str]:
        """The present rollout workers."""
        return list(self._rollouts)

    def add_rollout(self, rollout: str) -> None:
        """A rollout worker can take work now."""
        if rollout not in self._rollouts:
            self._rollouts[rollout] = None
            self._changed.add(rollout)
            for group in self._groups.values():
                group.add_rollout(rollout)
                self._changed |= group.take_changed()

    def remove_rollout(self, rollout: str) -> None:
        """A rollout worker is gone."""
        if rollout in self._rollouts:
            del self._rollouts[rollout]
            for group in self._groups.values():
                group.remove_rollout(rollout)
                self._changed |= group.take_changed()

    def put(self, worker: str, group: Hashable, least: int) -> None:
        """A worker can be called now, as one of a group. It leaves its former group.

        Args:
            least: number of candidates of a rollout worker in this group, if the group has that many.
        """
        if worker in self._group_of and self._group_of[worker] == group:
            return
        self.remove(worker)
        self._group_of[worker] = group
        if group not in self._groups:
            self._groups[group] = _WorkerGroupChoices(self._rollouts, least)
        self._groups[group].add_worker(worker)
        self._changed |= self._groups[group].take_changed()

    def remove(self, worker: str) -> None:
        """A worker cannot be called any more."""
        if worker not in self._group_of:
            return
        name = self._group_of.pop(worker)
        group = self._groups[name]
        group.remove_worker(worker)
        self._changed |= group.take_changed()
        if not group.workers:
            del self._groups[name]

    def of(self, rollout: str) -> list[str]:
        """Return the candidates of a rollout worker, by id."""
        return sorted(worker for group in self._groups.values() for worker in group.of(rollout))

    def rollouts_of(self, worker: str) -> set[str]:
        """Return the rollout workers that have a worker among their candidates."""
        if worker not in self._group_of:
            return set()
        return self._groups[self._group_of[worker]].rollouts_of(worker)

    def take_changed(self) -> list[str]:
        """Return the present rollout workers whose candidates may have changed since the last call."""
        changed, self._changed = self._changed, set[str]()
        return [rollout for rollout in changed if rollout in self._rollouts]


class _WorkerGroupChoices:
    """The choices between the workers of a group and all rollout workers, in both directions."""

    def __init__(self, rollouts: dict[str, None], least: int) -> None:
        self._first = _FirstChoices(least)
        self._cover = _FirstChoices(_COVER)
        for rollout in rollouts:
            self.add_rollout(rollout)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._cover.chosen)

    def of(self, rollout: str) -> set[str]:
        return {*self._first.chosen.get(rollout, ()), *self._cover.choosers.get(rollout, ())}

    def rollouts_of(self, worker: str) -> set[str]:
        return {*self._cover.chosen[worker], *self._first.choosers[worker]}

    def take_changed(self) -> set[str]:
        """Return the rollout workers whose candidates have changed since the last call."""
        return {rollout for rollout, _ in self._first.take_changed()} | {
            rollout for _, rollout in self._cover.take_changed()
        }

    def add_rollout(self, rollout: str) -> None:
        self._first.add_chooser(rollout)
        self._cover.add_option(rollout)

    def remove_rollout(self, rollout: str) -> None:
        self._first.remove_chooser(rollout)
        self._cover.remove_option(rollout)

    def add_worker(self, worker: str) -> None:
        self._first.add_option(worker)
        self._cover.add_chooser(worker)

    def remove_worker(self, worker: str) -> None:
        self._first.remove_option(worker)
        self._cover.remove_chooser(worker)


class _FirstChoices:
    """The first `count` options of every chooser, in the order of a hash of both. With n options and m
    choosers, a change of one of them takes O(n + m) operations of numpy, and few of Python."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._choosers = _HashedIds()
        self._options = _HashedIds()
        self._worst = np.empty(0, np.uint64)
        """Score of the last choice of each chooser, in the order of the choosers; `_NONE` while it has fewer
        than `count`."""
        self._changed: list[tuple[str, str]] = []
        self.chosen: dict[str, dict[str, np.uint64]] = {}
        """Chooser -> its options, with their scores."""
        self.choosers: dict[str, set[str]] = {}
        """Option -> its choosers."""

    def take_changed(self) -> list[tuple[str, str]]:
        """Return each (chooser, option) that was chosen, or is chosen no more, since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def add_chooser(self, chooser: str) -> None:
        place = self._choosers.add(chooser)
        if place == len(self._worst):
            self._worst = np.concatenate([self._worst, np.full(max(16, place), _NONE)])
        self.chosen[chooser] = {}
        self._fill(chooser)

    def remove_chooser(self, chooser: str) -> None:
        place = self._choosers.remove(chooser)
        self._worst[place] = self._worst[len(self._choosers)]
        for option in self.chosen.pop(chooser):
            self.choosers[option].discard(chooser)
            self._changed.append((chooser, option))

    def add_option(self, option: str) -> None:
        self._options.add(option)
        self.choosers[option] = set()
        scores = _scores(self._choosers.hashes, _hash(option))
        for place in np.flatnonzero(scores < self._worst[: len(scores)]).tolist():
            chooser = self._choosers.names[place]
            chosen = self.chosen[chooser]
            if len(chosen) == self._count:
                self._unlink(chooser, max(chosen, key=chosen.__getitem__))
            self._link(chooser, option, scores[place])
            self._note_worst(chooser)

    def remove_option(self, option: str) -> None:
        self._options.remove(option)
        for chooser in self.choosers.pop(option):
            del self.chosen[chooser][option]
            self._changed.append((chooser, option))
            self._fill(chooser)

    def _fill(self, chooser: str) -> None:
        """Choose options until the chooser has enough."""
        scores = _scores(self._options.hashes, _hash(chooser))
        if len(scores) > self._count:
            places = np.argpartition(scores, self._count)[: self._count]
        else:
            places = np.arange(len(scores))
        for place in places.tolist():
            option = self._options.names[place]
            if option not in self.chosen[chooser]:
                self._link(chooser, option, scores[place])
        self._note_worst(chooser)

    def _link(self, chooser: str, option: str, score: np.uint64) -> None:
        self.chosen[chooser][option] = score
        self.choosers[option].add(chooser)
        self._changed.append((chooser, option))

    def _unlink(self, chooser: str, option: str) -> None:
        del self.chosen[chooser][option]
        self.choosers[option].discard(chooser)
        self._changed.append((chooser, option))

    def _note_worst(self, chooser: str) -> None:
        chosen = self.chosen[chooser]
        worst = max(chosen.values()) if len(chosen) == self._count else _NONE
        self._worst[self._choosers.place(chooser)] = worst


class _HashedIds:
    """Ids, and their hashes as an array. The last id takes the place of one that is removed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._places: dict[str, int] = {}
        self._hashes = np.empty(16, np.uint64)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """(n,) uint64, in the order of `names`."""
        return self._hashes[: len(self.names)]

    def place(self, name: str) -> int:
        return self._places[name]

    def add(self, name: str) -> int:
        """Add an id at the end, and return its place."""
        place = len(self.names)
        if place == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty(place, np.uint64)])
        self._hashes[place] = _hash(name)[0]
        self.names.append(name)
        self._places[name] = place
        return place

    def remove(self, name: str) -> int:
        """Remove an id, and return its former place."""
        place, last = self._places.pop(name), self.names.pop()
        if last != name:
            self.names[place] = last
            self._places[last] = place
            self._hashes[place] = self._hashes[len(self.names)]
        return place


@lru_cache(maxsize=2**16)
def _hash(name: str) -> NDArray[np.uint64]:
    """Return (1,) uint64."""
    return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint64)


def _scores(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the score of each pair of hashes: the finalizer of splitmix64 over both."""
    mixed = some ^ others
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
