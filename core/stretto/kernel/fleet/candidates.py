"""Which engines and verifiers each rollout worker may call. A plain class without I/O.

Routing needs a few candidates, not all workers. In each group of workers, a rollout worker knows

- its part of the group: every worker is in the part of one rollout worker, so that nobody is forgotten;
- further workers from a random sample, until it knows a fixed number.

So every rollout worker knows all of a small group. Of a large one it knows the fixed number, or its part if
that has more. A worker that joins or leaves changes the candidates of few rollout workers. All engines that
serve the same purpose are one group: those of training, and those lent to the evaluation of a version.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable


class Candidates:
    """The rollout workers of a run, the workers that they can call, and the choice between them. The same
    calls in the same order give the same choices."""

    def __init__(self) -> None:
        self._rollouts: dict[str, None] = {}
        self._group_of: dict[str, Hashable] = {}
        self._groups: dict[Hashable, _WorkerGroupChoices] = {}
        self._changed: set[str] = set()

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
        if rollout not in self._rollouts:
            self._rollouts[rollout] = None
            self._changed.add(rollout)
            for group in self._groups.values():
                self._changed |= group.add_rollout(rollout)

    def remove_rollout(self, rollout: str) -> None:
        """Remove a rollout worker that is gone."""
        if rollout in self._rollouts:
            del self._rollouts[rollout]
            for group in self._groups.values():
                self._changed |= group.remove_rollout(rollout)

    def put(self, worker: str, group: Hashable, least: int) -> None:
        """Add a worker that can be called to a group. It leaves its previous group.

        Args:
            least: number of candidates of a rollout worker in this group, if the group has that many.
        """
        if worker in self._group_of and self._group_of[worker] == group:
            return
        self.remove(worker)
        self._group_of[worker] = group
        if group not in self._groups:
            self._groups[group] = _WorkerGroupChoices(self._rollouts, least)
        self._changed |= self._groups[group].add(worker)

    def remove(self, worker: str) -> None:
        """Remove a worker that cannot be called any more."""
        if worker not in self._group_of:
            return
        name = self._group_of.pop(worker)
        self._changed |= self._groups[name].remove(worker)
        if not self._groups[name].workers:
            del self._groups[name]

    def of(self, rollout: str) -> list[str]:
        """Return the candidates of a rollout worker, by id."""
        return sorted(worker for group in self._groups.values() for worker in group.of(rollout))

    def rollouts_of(self, worker: str) -> set[str]:
        """Return the rollout workers that have a worker among their candidates."""
        group = self._groups.get(self._group_of.get(worker))
        return {rollout for rollout in self._rollouts if group is not None and worker in group.of(rollout)}

    def take_changed(self) -> list[str]:
        """Return the current rollout workers whose candidates may have changed since the last call."""
        changed, self._changed = self._changed, set[str]()
        return [rollout for rollout in changed if rollout in self._rollouts]


class _WorkerGroupChoices:
    """The workers of one group, and those that each rollout worker knows.

    A change returns the rollout workers whose candidates may have changed. With m rollout workers and n
    workers it takes O(m + n).
    """

    def __init__(self, rollouts: Iterable[str], least: int) -> None:
        self.workers: list[str] = []
        self._least = least
        self._parts = {rollout: set[str]() for rollout in rollouts}
        """Rollout worker -> workers. Each worker is in one part, if there is a rollout worker."""
        self._samples = {rollout: list[str]() for rollout in rollouts}
        """Rollout worker -> `least` different workers in random order; all workers if they are fewer."""
        self._random = random.Random(0)

    def of(self, rollout: str) -> list[str]:
        """Return the part of a rollout worker, filled up to `least` from its sample."""
        part = self._parts[rollout]
        others = [worker for worker in self._samples[rollout] if worker not in part]
        return [*part, *others[: max(0, self._least - len(part))]]

    def add_rollout(self, rollout: str) -> set[str]:
        """Draw a sample, and take a fair share from the parts of the others."""
        count = len(self.workers)
        self._samples[rollout] = self._random.sample(self.workers, min(count, self._least))
        share = set(self._random.sample(self.workers, count // (len(self._parts) + 1)))
        changed = {other for other, part in self._parts.items() if not part.isdisjoint(share)}
        for other in changed:
            self._parts[other] -= share
        self._parts[rollout] = share
        return {rollout, *changed}

    def remove_rollout(self, rollout: str) -> set[str]:
        del self._samples[rollout]
        orphans = sorted(self._parts.pop(rollout))
        return {other for worker in orphans for other in self._add_to_a_part(worker)}

    def add(self, worker: str) -> set[str]:
        """Put the worker into a part and, in the place of others, into as many samples as any other is in."""
        self.workers.append(worker)
        share = len(self._samples) * self._least / len(self.workers)
        count = min(len(self._samples), int(share + self._random.random()))
        chosen = self._random.sample(list(self._samples), count)
        for rollout in chosen:
            sample = self._samples[rollout]
            if len(sample) < self._least:
                sample.insert(self._random.randint(0, len(sample)), worker)
            else:
                sample[self._random.randrange(self._least)] = worker
        return self._add_to_a_part(worker).union(chosen)

    def remove(self, worker: str) -> set[str]:
        """Draw another worker in the place of this one, for each sample that it is in."""
        self.workers.remove(worker)
        changed = {rollout for rollout, part in self._parts.items() if worker in part}
        for rollout in changed:
            self._parts[rollout].remove(worker)
        for rollout, sample in self._samples.items():
            if worker in sample:
                # As many workers as the sample has, so at least one of them is not in it.
                drawn = self._random.sample(self.workers, min(len(sample), len(self.workers)))
                place = sample.index(worker)
                sample[place : place + 1] = [other for other in drawn if other not in sample][:1]
                changed.add(rollout)
        return changed

    def _add_to_a_part(self, worker: str) -> set[str]:
        chosen = self._random.choices(list(self._parts)) if self._parts else []
        for rollout in chosen:
            self._parts[rollout].add(worker)
        return set(chosen)
