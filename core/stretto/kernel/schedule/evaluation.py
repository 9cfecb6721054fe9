"""The rounds of held-out evaluation. A plain class without I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from stretto.bus.messages.journal import Evaluation
from stretto.bus.messages.tickets import GroupDone
from stretto.kernel.schedule.commands import Command, EvaluationDone, HeldBack, Retire, SchedulerSettings
from stretto.kernel.schedule.open_tickets import OpenTicket, OpenTickets


@dataclass
class _Round:
    """A held-out evaluation under way."""

    version: int
    groups: list[GroupDone] = field(default_factory=list[GroupDone])
    failed: int = 0
    sources: list[str] = field(default_factory=list[str])
    """Source of the row of each group; empty for none."""

    def result(self) -> Evaluation:
        scores = accuracies(self.groups)
        sources = {
            name: accuracies(
                group for group, source in zip(self.groups, self.sources, strict=True) if source == name
            )
            for name in sorted(set(self.sources) - {""})
        }
        return Evaluation(
            version=self.version,
            accuracy=float(np.mean(scores)) if scores else None,
            samples=len(scores),
            failed=self.failed,
            sources={name: float(np.mean(each)) for name, each in sources.items()},
        )


def accuracies(groups: Iterable[GroupDone]) -> list[float]:
    """Return the `accuracy` metric of each sample, or its reward if it has none."""
    members = [member for group in groups for member in group.members if not member.part]
    return [member.metrics.get("accuracy", member.reward) for member in members]


class EvaluationRounds:
    """The held-out evaluations of a run: the complete ones, the one under way, and the versions that wait.

    Args:
        source: from a row of the evaluation's dataset to the name of its source.
        reasons: number of rows without a result, by reason; shared with the scheduler.
        commands: the scheduler's commands.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        source: Callable[[int], str],
        reasons: Counter[str],
        commands: list[Command],
    ) -> None:
        self.results: list[Evaluation] = []
        self.held_back = 0
        """How often a ready batch waited for an evaluation."""
        self.tickets = OpenTickets("eval", settings.evaluation_samples, settings.max_attempts, commands)
        self._settings = settings
        self._source = source
        self._reasons = reasons
        self._commands = commands
        self._round: _Round | None = None
        self._due: deque[int] = deque([0] if settings.evaluation_rows else [])
        """Versions to evaluate after the evaluation under way."""
        self._holding_back = False
        self._ids = 0

    @property
    def under_way(self) -> int | None:
        """Version of the evaluation under way."""
        return self._round.version if self._round else None

    @property
    def finished_rows(self) -> int:
        """Number of finished rows of the evaluation under way, or of the last one if none is under way."""
        return self._settings.evaluation_rows - len(self.tickets.open)

    @property
    def needed_versions(self) -> tuple[int, ...]:
        """Versions whose weights evaluations still need: first the evaluation under way, then those that
        wait."""
        return (*([self._round.version] if self._round else []), *self._due)

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far; of several equal ones, the first."""
        scored = [each for each in self.results if each.accuracy is not None]
        return max(scored, key=lambda each: each.accuracy or 0.0, default=None)

    def is_due(self, version: int) -> bool:
        """Return whether the run evaluates this version while training continues."""
        every = self._settings.evaluation_every if self._settings.evaluation_rows else 0
        return bool(every) and version % every == 0 and version < self._settings.steps

    def is_complete(self, version: int) -> bool:
        """Return whether this version has a result."""
        return any(evaluation.version == version for evaluation in self.results)

    def must_hold_back(self, version: int) -> bool:
        """Whether the step to this version would make an evaluation due while another one waits. There is one
        `HeldBack` command for each such wait."""
        if len(self.needed_versions) < 2 or not self.is_due(version):
            return False
        if not self._holding_back:
            self._holding_back = True
            self.held_back += 1
            self._commands.append(HeldBack(*self.needed_versions[:2]))
        return True

    def reached(self, version: int) -> None:
        """Training has reached this version."""
        if self.is_due(version) and not self.is_complete(version):
            self._due.append(version)

    def begin_next(self) -> None:
        """Begin the evaluation that has waited longest, if none is under way."""
        if self._round is None and self._due:
            self.begin(self._due.popleft())

    def begin(self, version: int) -> None:
        """Begin the evaluation of a version, and issue its tickets."""
        self._round = _Round(version)
        for row in range(self._settings.evaluation_rows):
            ticket = OpenTicket(self._ids, row, version, version)
            self._ids += 1
            self.tickets.open[ticket.id] = ticket
            self.reissue(ticket, "")

    def reissue(self, ticket: OpenTicket, reason: str) -> None:
        """Issue the next attempt of a ticket, or give its row up."""
        if refusal := self.tickets.issue(ticket, ticket.since, reason):
            self.finish(ticket, None, refusal)

    def finish(self, ticket: OpenTicket, group: GroupDone | None, reason: str = "") -> None:
        """One row is finished. `group` is its result; without one, `reason` says why."""
        under_way = self._round
        assert under_way is not None
        self.tickets.remove(ticket.id)
        if group is None:
            under_way.failed += 1
            self._reasons[f"not evaluated: {reason}"] += 1
            self._commands.append(Retire("eval", ticket.id, ticket.attempt, "failed", reason))
        else:
            under_way.groups.append(group)
            under_way.sources.append(self._source(ticket.row))
        if self.tickets.open:
            return
        self._round = None
        self._holding_back = False
        self.results.append(under_way.result())
        self._commands.append(EvaluationDone(self.results[-1]))

    def restore(self, results: Iterable[Evaluation], due: Iterable[int] | None, held_back: int) -> None:
        """Take over a previous kernel's state.

        Args:
            due: versions to evaluate; None for those of a new run.
        """
        self.results = list(results)
        rows = self._settings.evaluation_rows  # 0 if the values that are in force now evaluate nothing
        due = self._due if due is None else due
        self._due = deque(each for each in due if rows and not self.is_complete(each))
        self.held_back = held_back

    def recall(self, results: Iterable[Evaluation]) -> None:
        """Add the results that are newer than the snapshot. Called after `restore`, before `replay`."""
        self.results += [each for each in results if not self.is_complete(each.version)]
        self._due = deque(each for each in self._due if not self.is_complete(each))
