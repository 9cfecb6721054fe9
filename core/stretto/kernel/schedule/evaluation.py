"""The rounds of held-out evaluation; no I/O. If the run has an evaluator, rows begin in parts as training
groups finish: each row costs rollout workers, verifiers and the bus as much as a small group. When training
rests, all other rows begin. Without an evaluator all rows begin at once, and training waits."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from statistics import pstdev

import msgspec
import numpy as np

from stretto.bus.messages.events import Evaluation, EvaluationEnded, RetiredTicket
from stretto.bus.messages.tickets import GroupDone
from stretto.kernel.schedule.commands import Command, HeldBack, SchedulerSettings
from stretto.kernel.schedule.health import held_out
from stretto.kernel.schedule.open_tickets import OpenTicket, OpenTickets

_TOGETHER = 128
"""Number of rows that begin together. An engine samples 128 answers at once in little more time than one."""


class Round(msgspec.Struct):
    """A held-out evaluation under way."""

    version: int
    scores: list[tuple[str, float, float | None]] = []
    """(source of the row, or empty; reward; metric `accuracy`) of each sample so far."""
    failed: int = 0

    def result(self) -> Evaluation:
        rewards = [reward for _, reward, _ in self.scores]
        accuracies = [accuracy for *_, accuracy in self.scores if accuracy is not None]
        all_have_accuracy = len(accuracies) == len(rewards)
        sources = defaultdict[str, list[float]](list)
        for (name, *_), score in zip(self.scores, accuracies if all_have_accuracy else rewards, strict=True):
            sources[name].append(score)
        return Evaluation(
            version=self.version,
            accuracy=_mean(accuracies) if all_have_accuracy else None,
            samples=len(rewards),
            failed=self.failed,
            sources={name: float(np.mean(scores)) for name, scores in sorted(sources.items()) if name},
            reward=_mean(rewards),
            reward_std=pstdev(rewards) if rewards else 0.0,
            some_accuracy=None if all_have_accuracy else _mean(accuracies),
            some_accuracy_answers=0 if all_have_accuracy else len(accuracies),
        )


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


class EvaluationState(msgspec.Struct):
    """The state of the evaluations of a run."""

    results: list[Evaluation] = []
    round: Round | None = None
    """None if no evaluation is under way."""
    open: list[OpenTicket] = []
    due: list[int] = []
    """Versions to evaluate after the evaluation under way."""
    issued: int = 0
    credit: float = 0.0
    """Number of further rows that may begin; see `SchedulerSettings.evaluation_pace`."""
    held_back: int = 0
    holding_back: bool = False

    @property
    def needed_versions(self) -> tuple[int, ...]:
        """See `EvaluationRounds.needed_versions`."""
        return (*([self.round.version] if self.round else []), *self.due)


class EvaluationRounds:
    """Held-out evaluations. `source` names a row's source; `reasons` and `commands` are the scheduler's."""

    def __init__(
        self,
        settings: SchedulerSettings,
        source: Callable[[int], str],
        reasons: Counter[str],
        commands: list[Command],
    ) -> None:
        self.results: list[Evaluation] = []
        self.held_back = 0
        """Number of times that a ready batch waited for an evaluation."""
        self.tickets = OpenTickets("eval", settings.evaluation_samples, settings.max_attempts, commands)
        self._settings = settings
        self._source = source
        self._reasons = reasons
        self._commands = commands
        self._round: Round | None = None
        self._due: deque[int] = deque([0] if settings.evaluation_rows else [])
        self._holding_back = False
        self._ids = 0
        self._waiting: deque[OpenTicket] = deque()
        """The rows of the evaluation under way that have not begun."""
        self._credit = 0.0

    @property
    def under_way(self) -> int | None:
        """Version of the evaluation under way."""
        return self._round.version if self._round else None

    @property
    def finished_rows(self) -> int:
        """Number of finished rows of the evaluation under way, or of the last one."""
        return self._settings.evaluation_rows - len(self.tickets.open)

    @property
    def needed_versions(self) -> tuple[int, ...]:
        """Versions whose weights evaluations still need, first that of the evaluation under way."""
        return (*([self._round.version] if self._round else []), *self._due)

    def snapshot(self) -> EvaluationState:
        under_way = self._round
        return EvaluationState(
            results=list(self.results),
            round=under_way and msgspec.structs.replace(under_way, scores=list(under_way.scores)),
            open=[msgspec.structs.replace(ticket) for ticket in self.tickets.open.values()],
            due=list(self._due),
            issued=self._ids,
            credit=self._credit,
            held_back=self.held_back,
            holding_back=self._holding_back,
        )

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest score so far; of equal ones, the first."""
        best = max(held_out(self.results), key=lambda each: each.score, default=None)
        return best and next(each for each in self.results if each.version == best.version)

    def is_due(self, version: int) -> bool:
        """Return whether the run evaluates this version while training continues."""
        every = self._settings.evaluation_every if self._settings.evaluation_rows else 0
        return bool(every) and version % every == 0 and version < self._settings.steps

    def is_complete(self, version: int) -> bool:
        return any(evaluation.version == version for evaluation in self.results)

    def must_hold_back(self, version: int) -> bool:
        """Return whether the step to this version would make a second evaluation wait. Report it once."""
        if len(self.needed_versions) < 2 or not self.is_due(version):
            return False
        if not self._holding_back:
            self._holding_back = True
            self.held_back += 1
            self._commands.append(HeldBack(*self.needed_versions[:2]))
        return True

    def reached(self, version: int) -> None:
        """Queue an evaluation of the version that training has reached, if one is due."""
        if self.is_due(version) and not self.is_complete(version):
            self._due.append(version)

    def begin_next(self) -> None:
        """Begin the evaluation that has waited longest, if none is under way."""
        if self._round is None and self._due:
            self.begin(self._due.popleft())

    def begin(self, version: int) -> None:
        """Begin the evaluation of a version. Issue its tickets now if all rows begin at once."""
        self._round, self._credit = Round(version), 0.0
        for row in range(self._settings.evaluation_rows):
            ticket = OpenTicket(self._ids, row, version, version)
            self._ids += 1
            self.tickets.open[ticket.id] = ticket
            self._waiting.append(ticket)
        if not self._settings.evaluation_pace:
            self.begin_rows(everything=True)

    def grant(self) -> None:
        """Allow more rows to begin, because a training group has finished."""
        if self._waiting:
            self._credit += self._settings.evaluation_pace

    def begin_rows(self, *, everything: bool) -> None:
        """Issue the tickets of the rows that may begin or, with `everything`, of all rows."""
        while self._waiting:
            number = len(self._waiting) if everything else min(_TOGETHER, len(self._waiting))
            if not everything and self._credit < number:
                return
            self._credit -= number
            for _ in range(number):
                self.reissue(self._waiting.popleft(), "")

    def issue_again(self) -> None:
        """Issue again the tickets that have begun and have no worker."""
        for ticket in list(self.tickets.open.values()):
            if ticket.attempt and not ticket.worker:
                self.reissue(ticket, "")

    def reissue(self, ticket: OpenTicket, reason: str) -> None:
        """Issue the next attempt of a ticket; after too many attempts, finish its row without a result."""
        if refusal := self.tickets.issue(ticket, ticket.since, reason):
            self.finish(ticket, None, refusal)

    def finish(self, ticket: OpenTicket, group: GroupDone | None, reason: str = "") -> None:
        """Finish a row with its group as the result, or without a group for a `reason`."""
        under_way = self._round
        assert under_way is not None
        self.tickets.remove(ticket.id)
        if group is None:
            under_way.failed += 1
            self._reasons[f"not evaluated: {reason}"] += 1
            self._commands.append(RetiredTicket("eval", ticket.id, ticket.attempt, "failed", reason))
        else:
            source, samples = self._source(ticket.row), (each for each in group.members if not each.part)
            under_way.scores += [(source, each.reward, each.metrics.get("accuracy")) for each in samples]
        if self.tickets.open:
            return
        self._round = None
        self._holding_back = False
        self.results.append(under_way.result())
        self._commands.append(EvaluationEnded(self.results[-1]))

    def restore(self, state: EvaluationState, attempts_from: int) -> None:
        """Replace the whole state. See `Scheduler.restore`."""
        self.results = list(state.results)
        under_way = state.round
        self._round = under_way and msgspec.structs.replace(under_way, scores=list(under_way.scores))
        tickets = (msgspec.structs.replace(stored, bounds=dict(stored.bounds)) for stored in state.open)
        self.tickets.restore(tickets, attempts_from)
        self._waiting = deque(ticket for ticket in self.tickets.open.values() if not ticket.attempt)
        self._credit = state.credit
        self._due = deque(state.due)
        self._ids = state.issued
        self.held_back, self._holding_back = state.held_back, state.holding_back

    def fit(self) -> None:
        """Make the evaluation under way due again, with the rows of the settings. See `Scheduler.fit`."""
        due = self.needed_versions if self._settings.evaluation_rows else ()
        self._due = deque(due)
        self._round, self._holding_back = None, False
        self._waiting.clear()
        self.tickets.restore((), self.tickets.attempts_from)
