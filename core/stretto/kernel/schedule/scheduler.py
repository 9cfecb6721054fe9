"""The scheduler: tickets, the ledger, the staleness gate, batches, evaluation. A plain class without I/O.

The kernel calls a method for each event, and `commands()` returns what the kernel has to do. The scheduler
keeps these promises for every order of events, also when messages are late, lost or doubled and when workers
die:

- Every issued training ticket is in exactly one of these accounts: trained, filtered, expired, failed, in
  flight. Every ticket ends once.
- At most (η + 1)·B tickets are in flight. A ticket's tokens are no older than the training version at its
  issue.
- With a bound on divergence, the scheduler issues a ticket only while fewer than (η_eff + 1)·B tickets are in
  flight, where 0 ≤ η_eff ≤ η. Nothing else depends on η_eff.
- No group is trained twice, or at a version after its deadline. The deadline is the version of the group's
  oldest token + η. Only `on_late: drop` lets the scheduler drop a group because it is late. A resumed run may
  have another η or B: groups then keep their deadlines or get earlier ones, and tickets that no longer fit
  expire (`fit`).
- Every due evaluation is done once, in the order of versions, on tokens of exactly its version. At most one
  evaluation waits for another: a step that would make one more evaluation due waits too.

With n open tickets, an event costs O(η + log n) on average, plus the commands that it leads to. Only what
happens once in a kernel's life or once a checkpoint looks at all of them: `restore`, `fit`, `start`,
`expire_finished` and `snapshot`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from stretto.algorithm import Group
from stretto.bus.messages.journal import Evaluation
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Purpose, Ticket
from stretto.dataset import Curriculum, TicketEnd
from stretto.kernel.schedule.draws import Draws, DrawState, RecordedDraw
from stretto.kernel.schedule.gate import DivergenceGate
from stretto.kernel.schedule.open_tickets import DeadlineQueue, Holders
from stretto.kernel.schedule.variants import VariantAccount, VariantAccounts
from stretto.records.timeline import Cause

__all__ = [
    "Account",
    "Command",
    "EvaluationDone",
    "Fail",
    "Finish",
    "HeldBack",
    "Issue",
    "Ledger",
    "RecordDraws",
    "Retire",
    "Scheduler",
    "SchedulerSettings",
    "Snapshot",
    "StartBatch",
    "Withdraw",
    "accuracies",
]


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of a run that the scheduler needs."""

    steps: int
    batch_size: int
    """Number of groups in a batch, B."""
    max_staleness: int
    """η."""
    rows: int
    """Number of rows in the dataset."""
    max_divergence: float | None = None
    """Bound of the divergence gate, in nats per token; None turns the gate off."""
    group_size: int = 1
    on_late: Literal["wait", "drop"] = "wait"
    max_attempts: int = 3
    max_failures: int = 64
    max_filtered: int = 512
    shuffle: bool = True
    seed: int = 0
    evaluation_rows: int = 0
    """Number of rows in a held-out evaluation; 0 turns evaluation off."""
    evaluation_every: int = 0
    evaluation_samples: int = 1
    variants: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each variant of the A/B test; empty without one."""

    @property
    def window(self) -> int:
        """Tickets that may be in flight at once, (η + 1)·B."""
        return (self.max_staleness + 1) * self.batch_size


# --------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class RecordDraws:
    """Write these draws of the curriculum to the journal, before the tickets are issued."""

    version: int
    """Training version at the draws."""
    draws: tuple[tuple[int, int], ...]
    """(ticket, row)."""


@dataclass(frozen=True)
class Issue:
    """Put this ticket into the work queue."""

    ticket: Ticket


@dataclass(frozen=True)
class Withdraw:
    """Take this attempt out of the queue and stop its worker: nobody waits for it any more."""

    purpose: Purpose
    ticket: int
    attempt: int


@dataclass(frozen=True)
class StartBatch:
    """Write this batch to the journal and train it; then call `step_finished`."""

    version: int
    groups: tuple[GroupDone, ...]
    """In the order of their tickets."""
    rows: tuple[int, ...]
    """Row of the dataset of each group."""


Account = Literal["filtered", "expired", "failed"]
"""An account of the ledger for tickets that end without being trained."""


@dataclass(frozen=True)
class Retire:
    """Record that this ticket will not be trained, or that its row of an evaluation has no result."""

    purpose: Purpose
    ticket: int
    attempt: int
    account: Account
    reason: str


@dataclass(frozen=True)
class EvaluationDone:
    """A held-out evaluation is complete."""

    evaluation: Evaluation


@dataclass(frozen=True)
class HeldBack:
    """A batch is ready but has to wait: its step would make an evaluation due while another one waits."""

    evaluating: int
    """Version of the evaluation under way."""
    waiting: int
    """Version of the evaluation that waits for it."""


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do: end the run."""


@dataclass(frozen=True)
class Fail:
    """The run cannot continue."""

    reason: str


Command = RecordDraws | Issue | Withdraw | StartBatch | Retire | EvaluationDone | HeldBack | Finish | Fail


# ------------------------------------------------------------------------------------------ state


class Ledger(msgspec.Struct):
    """Accounts of the training tickets. `issued` is the sum of the other accounts."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0
    in_flight: int = 0


class OpenTicket(msgspec.Struct):
    """A training ticket between issue and retirement."""

    id: int
    row: int
    since: int
    """Training version at its first issue."""
    deadline: int
    """Last training version at which the group may be trained. It is stored because η may change at a
    resume."""
    drawn_at: int = 0
    """Training version when its row was drawn."""
    drops: int = 0
    """How often earlier tickets with the same prompt expired because they were late."""
    attempt: int = 0
    tries: int = 0
    """Number of attempts that a worker has begun."""
    worker: str = ""
    """The worker of the present attempt; empty until it is known."""
    bounds: dict[int, int] = {}
    """Attempt -> lower bound on the version of the attempt's oldest token. The bound is the training version
    at the attempt's issue until the version of the oldest token is known. Any attempt may finish first."""
    done: GroupDone | None = None

    @property
    def oldest(self) -> int:
        """Lower bound on the version of the group's oldest token, whichever attempt finishes first."""
        if self.done is not None:
            return _versions(self.done)[0]
        return min(self.bounds.values(), default=self.since)


class Snapshot(msgspec.Struct):
    """The state that a restart needs. Every checkpoint contains it."""

    version: int
    ledger: Ledger
    window: int
    """Maximum number of tickets in flight when the snapshot was taken, (η + 1)·B."""
    cursor: int
    open: list[OpenTicket]
    again: list[tuple[int, int]]
    evaluations: list[Evaluation]
    staleness: dict[int, int]
    reasons: dict[str, int]
    gate: DivergenceGate | None = None
    """None where the run has no bound on divergence."""
    limits: dict[int, int] = {}
    evaluating: list[int] = []
    """Versions whose evaluations are under way or waiting, in order."""
    held_back: int = 0
    variants: dict[str, VariantAccount] = {}
    draws: DrawState | None = None
    """None where the run has no curriculum."""


@dataclass
class _Round:
    """A held-out evaluation under way."""

    version: int
    open: dict[int, OpenTicket]
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


def _versions(group: GroupDone) -> tuple[int, int]:
    """Versions of the oldest and the newest token of a group."""
    return min(member.oldest for member in group.members), max(member.newest for member in group.members)


def _rewards(group: GroupDone) -> tuple[float, ...]:
    """Rewards of a group's samples; empty if no policy sampled them."""
    return tuple(member.reward for member in group.members if member.sampled and not member.part)


def _urgency(ticket: OpenTicket) -> tuple[int, bool, int]:
    """Sort key for the order of training: earliest deadline first, then finished groups before unfinished
    ones, then by ticket number."""
    return ticket.deadline, ticket.done is None, ticket.id


class Scheduler:
    """The scheduler of one kernel, with the same lifetime.

    Args:
        keep: the algorithm's filter on finished groups.
        curriculum: what chooses the rows of training tickets; None for epochs of all rows.
        evaluation_source: from a row of the evaluation's dataset to the name of its source.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        keep: Callable[[Group], bool] = lambda group: True,
        *,
        curriculum: Curriculum | None = None,
        evaluation_source: Callable[[int], str] = lambda row: "",
    ) -> None:
        self.settings = settings
        self.version = 0
        self.evaluations: list[Evaluation] = []
        self.staleness: Counter[int] = Counter()
        """Number of trained trajectories, by staleness."""
        self.reasons: Counter[str] = Counter()
        """Number of tickets that were filtered, expired or failed, by reason. It includes evaluation rows
        without a result."""
        self.limits: Counter[int] = Counter()
        """Number of steps, by η_eff at the end of the step. Empty without a bound on divergence."""
        self.held_back = 0
        """How often a ready batch waited for an evaluation."""
        self.variants = VariantAccounts(settings.seed, settings.variants)
        self._keep = keep
        self._evaluation_source = evaluation_source
        self.draws = Draws(settings.rows, shuffle=settings.shuffle, seed=settings.seed, curriculum=curriculum)
        self._ledger = Ledger()
        self._open: dict[int, OpenTicket] = {}
        """In the order of their numbers."""
        self._unfinished = DeadlineQueue()
        self._finished = DeadlineQueue()
        """The open tickets whose groups wait for training. Those of the batch in training are in no queue."""
        self._holders: dict[Purpose, Holders] = {"train": Holders(), "eval": Holders()}
        self._training: frozenset[int] | None = None
        self.waits_for: Cause | None = None
        """What the next step waits for, or the end of the run; None while a batch is trained."""
        self._round: _Round | None = None
        self._rounds_due: deque[int] = deque([0] if settings.evaluation_rows else [])
        """Versions to evaluate after the evaluation under way."""
        self._holding_back = False
        self._eval_ids = 0
        self._attempts_from = 0
        self._floor = 0
        self._window = settings.window
        self._failures_in_a_row = 0
        self._filtered_in_a_row = 0
        self._left_out: set[int] = set()
        """Rows that are not fit to train on."""
        self._left_out_in_a_row = 0
        self._state: Literal["new", "training", "last evaluation", "over"] = "new"
        self._closing = False
        self._held = False
        self._gate = DivergenceGate(settings.max_staleness)
        self._commands: list[Command] = []

    # ------------------------------------------------------------------------------------- views

    @property
    def ledger(self) -> Ledger:
        """The accounts at this moment."""
        return msgspec.structs.replace(self._ledger, in_flight=len(self._open))

    @property
    def evaluating(self) -> int | None:
        """Version of the evaluation under way."""
        return self._round.version if self._round else None

    @property
    def evaluated_rows(self) -> int:
        """Number of finished rows of the evaluation under way, or of the last one if none is under way."""
        return self.settings.evaluation_rows - len(self._round.open if self._round else ())

    @property
    def needed_versions(self) -> tuple[int, ...]:
        """Versions whose weights evaluations still need: first the evaluation under way, then those that
        wait."""
        return (*([self._round.version] if self._round else []), *self._rounds_due)

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far; of several equal ones, the first."""
        scored = [each for each in self.evaluations if each.accuracy is not None]
        return max(scored, key=lambda each: each.accuracy or 0.0, default=None)

    @property
    def resting(self) -> bool:
        """Whether training neither computes nor waits for a group, so that it needs no engine."""
        return self._training is None and not self._unfinished

    @property
    def training(self) -> bool:
        """Whether a batch is being trained."""
        return self._training is not None

    @property
    def staleness_limit(self) -> int:
        """η_eff: number of train steps that generation may run ahead now. It is η without a bound on
        divergence."""
        return self._gate.limit

    @property
    def room(self) -> int:
        """Number of training tickets that may be in flight now: (η_eff + 1)·B, but no more than the remaining
        steps use."""
        wanted = (self.settings.steps - self.version) * self.settings.batch_size
        return min((self.staleness_limit + 1) * self.settings.batch_size, wanted)

    @property
    def done_groups(self) -> list[GroupDone]:
        """Finished groups that wait for training, in the order in which batches take them. With n groups this
        takes O(n log n): call it once per step at most."""
        return [group for id in self._finished.in_order() if (group := self._open[id].done) is not None]

    @property
    def finished(self) -> int:
        """Number of finished groups that wait for training."""
        return len(self._finished)

    def is_finished(self, group: GroupDone) -> bool:
        """Whether this group is finished and waits for training."""
        return group.ticket in self._finished and self._open[group.ticket].done is group

    def tickets_by_worker(self) -> Counter[str]:
        """Return the numbers of unfinished training tickets by the worker that has begun them; under an empty
        name, those that nobody has begun."""
        return Counter(ticket.worker for ticket in self._open.values() if ticket.done is None)

    def is_due(self, version: int) -> bool:
        """Whether the run evaluates this version while training continues."""
        every = self.settings.evaluation_every if self.settings.evaluation_rows else 0
        return bool(every) and version % every == 0 and version < self.settings.steps

    def commands(self) -> list[Command]:
        """Return the commands that the kernel has to carry out, in order. Each command is returned once."""
        commands, self._commands = self._commands, []
        return commands

    def snapshot(self) -> Snapshot:
        """Return the state between two steps, for `restore`."""
        assert self._training is None, "a snapshot is taken between steps"
        return Snapshot(
            version=self.version,
            ledger=self.ledger,
            window=self.settings.window,
            cursor=self.draws.cursor,
            open=[msgspec.structs.replace(ticket) for ticket in self._open.values()],
            again=list(self.draws.again),
            evaluations=list(self.evaluations),
            staleness=dict(self.staleness),
            reasons=dict(self.reasons),
            limits=dict(self.limits),
            gate=None if self.settings.max_divergence is None else msgspec.structs.replace(self._gate),
            evaluating=list(self.needed_versions),
            held_back=self.held_back,
            variants=self.variants.snapshot(),
            draws=self.draws.snapshot(),
        )

    # ------------------------------------------------------------------------------------ events

    def start(self) -> None:
        """Start the run, or continue it after `restore`. Failures before the restart no longer count."""
        self._closing, self._failures_in_a_row, self._filtered_in_a_row = False, 0, 0
        self._left_out.clear()
        self._left_out_in_a_row = 0
        self._state = "training"
        self._reissue_all()
        self._proceed()
        self._next_round()

    def restore(
        self, snapshot: Snapshot, *, attempts_from: int, recorded: Mapping[int, RecordedDraw] | None = None
    ) -> None:
        """Take over a previous kernel's state.

        Between `restore` and `start`, the caller may report with `replay` and `group_done` what the previous
        kernel's workers finished. `start` issues the other tickets again. It numbers their attempts from
        `attempts_from + 1`. After `start`, the scheduler ignores groups of earlier attempts.

        Args:
            recorded: draws in the journal of tickets that are not in the snapshot yet, by ticket.
        """
        self.version = snapshot.version
        self._floor = snapshot.version
        self._attempts_from = attempts_from
        self._ledger = msgspec.structs.replace(snapshot.ledger, in_flight=0)
        self._window = max(snapshot.window, self.settings.window)
        self._open = {ticket.id: msgspec.structs.replace(ticket) for ticket in snapshot.open}
        for ticket in self._open.values():
            ticket.tries, ticket.worker = 0, ""
            ticket.row %= self.settings.rows  # the dataset may have fewer rows now
            self._place(ticket)
        self.draws.restore(
            snapshot.draws, cursor=snapshot.cursor, again=snapshot.again, recorded=recorded or {}
        )
        self.evaluations = list(snapshot.evaluations)
        self.staleness = Counter(snapshot.staleness)
        self.reasons = Counter(snapshot.reasons)
        self.limits = Counter(snapshot.limits)
        if snapshot.gate is not None and self.settings.max_divergence is not None:
            limit = min(snapshot.gate.limit, self.settings.max_staleness)
            self._gate = msgspec.structs.replace(snapshot.gate, limit=limit)
        due = snapshot.evaluating if snapshot.version else self._rounds_due
        rows = self.settings.evaluation_rows  # 0 if the values that are in force now evaluate nothing
        self._rounds_due = deque(each for each in due if rows and not self._is_evaluated(each))
        self.held_back = snapshot.held_back
        self.variants.restore(snapshot.variants)

    def fit(self) -> None:
        """Fit the open tickets to a new η, B or number of steps. Called after `restore`.

        Finished groups get no later deadline than the new η allows. The scheduler then keeps the open tickets
        that can be trained in time, earliest deadline first. The other tickets expire, and the scheduler
        issues their prompts again.

        Afterwards, for every j in 0..η, at most (j + 1)·B tickets have a deadline of version + j or earlier.
        Admission preserves this condition.
        """
        settings, kept = self.settings, 0
        for ticket in self._open.values():
            if ticket.done is not None:
                ticket.deadline = min(ticket.deadline, ticket.oldest + settings.max_staleness)
            else:  # `start` issues it again at this version
                ticket.deadline = self.version + settings.max_staleness
            self._place(ticket)
        for ticket in sorted(self._open.values(), key=_urgency):
            batches = min(ticket.deadline + 1, settings.steps) - self.version
            if kept < batches * settings.batch_size:
                kept += 1
            else:
                terms = f"max_staleness={settings.max_staleness}, batch_size={settings.batch_size}"
                reason = f"does not fit {terms}, steps={settings.steps} from version {self.version} on"
                self._retire(ticket, "expired", reason)
                self.draws.again.append((ticket.row, ticket.drops))

    def close(self) -> None:
        """Issue no further ticket and start no further batch, because the run is ending early."""
        self._closing = True

    def ticket_started(self, purpose: Purpose, ticket: int, attempt: int, worker: str) -> None:
        """A rollout worker has taken an attempt."""
        found = self._find(purpose, ticket)
        if found is not None and found.attempt == attempt and not found.worker:
            found.worker = worker
            found.tries += 1
            if found.done is None:
                self._holders[purpose].put(ticket, worker)

    def first_token(self, ticket: int, attempt: int, version: int) -> None:
        """The version of an attempt's oldest token is known, although its group is not finished."""
        found = self._open.get(ticket)
        if found is not None and found.bounds.get(attempt, version) < version <= self.version:
            self._bound(found, attempt, version)
            self._place(found)
            self._proceed()

    def group_done(self, group: GroupDone) -> None:
        """All trajectories of a ticket are in the log. The first complete attempt wins."""
        found = self._find(group.purpose, group.ticket)
        if found is None or found.done is not None or self._void(group.attempt):
            return
        oldest, newest = _versions(group)
        allowed = found.bounds.get(group.attempt, found.since)
        most = self.version if group.purpose == "train" else found.since
        if not allowed <= oldest <= newest <= most:
            # The worker claims these versions. Either the claim is false, or the engine broke the ticket's
            # terms.
            reason = f"tokens of versions {oldest} to {newest}; allowed {allowed} to {most}"
            self.group_failed(GroupFailed(group.purpose, found.id, found.attempt, group.worker, reason))
            return
        if group.attempt != found.attempt and self._state != "new":
            self._commands.append(Withdraw(group.purpose, found.id, found.attempt))
        if group.purpose == "eval":
            self._evaluated(found, group)
            return
        self._failures_in_a_row = self._left_out_in_a_row = 0
        self.variants.observe(group)
        found.done = group
        self._date(found)
        self._place(found)
        lengths = tuple(member.sampled for member in group.members)
        if not self._keep(Group(tuple(member.reward for member in group.members), lengths)):
            self._filter(found, "by the algorithm")
        elif refusal := self.draws.refusal(found.row, _rewards(group)):
            self._filter(found, refusal)
        else:
            self._filtered_in_a_row = 0
        self._proceed()

    def group_failed(self, failure: GroupFailed) -> None:
        """The present attempt of a ticket produces no group. Failures of previous attempts do not count."""
        found = self._find(failure.purpose, failure.ticket)
        if found is None or found.done is not None:
            return
        if failure.attempt != found.attempt and self._state != "new":
            return
        if failure.purpose == "eval":
            self._evaluated(found, None, failure.reason)
        elif failure.filtered:
            self._leave_out(found, failure.reason)
        else:
            self._fail(found, failure.reason)
        self._proceed()

    def worker_lost(self, worker: str) -> None:
        """A rollout worker is gone. The scheduler issues the worker's tickets again. It also issues the
        tickets again that no worker has begun, because they may have been on their way to the lost worker."""
        if self._state == "new":
            return  # `start` issues all of them
        rounds = self._round.open if self._round else {}
        accounts: dict[Purpose, dict[int, OpenTicket]] = {"train": self._open, "eval": rounds}
        for purpose, tickets in accounts.items():
            for id in self._holders[purpose].of("", worker):
                self._reissue(purpose, tickets[id], f"its worker {worker} was lost")
        self._proceed()

    def worker_left(self, worker: str) -> None:
        """A rollout worker has left after a drain. The scheduler issues the tickets again that the worker did
        not finish. Such an attempt does not count as one of `max_attempts`: nothing went wrong in it."""
        if self._state == "new":
            return
        rounds = self._round.open if self._round else {}
        accounts: dict[Purpose, dict[int, OpenTicket]] = {"train": self._open, "eval": rounds}
        for purpose, tickets in accounts.items():
            for id in self._holders[purpose].of(worker):
                tickets[id].tries -= 1
                self._reissue(purpose, tickets[id], f"its worker {worker} left")
        self._proceed()

    def step_finished(self, *, hold: bool = False, divergence: float | None = None) -> None:
        """The batch that was started is trained and its weights are published.

        Args:
            hold: start no further batch before `release`, so that the kernel can write a checkpoint between
                two steps.
            divergence: divergence of the batch, in nats per token; None if it is unknown or was not measured.
        """
        self._held = hold
        self.waits_for = Cause("checkpoint") if hold else None
        assert self._training is not None, "no batch was started"
        for id in sorted(self._training):
            ticket = self._open.pop(id)
            assert ticket.done is not None
            self._ledger.trained += 1
            self.variants.count(id, "trained")
            self._tell_end(ticket, "trained")
            self.staleness.update(self.version - member.oldest for member in ticket.done.members)
        self._training = None
        self.version += 1
        bound, most = self.settings.max_divergence, self.settings.max_staleness
        if bound is not None:
            if divergence is not None:
                self._gate.observe(divergence, bound=bound, max_staleness=most)
            self.limits[self._gate.limit] += 1
        if self.is_due(self.version) and not self._is_evaluated(self.version):
            self._rounds_due.append(self.version)
        self._proceed()
        self._next_round()  # last, because the next batch must not wait for the evaluation's many tickets

    def release(self) -> None:
        """Allow batches to start again, after `step_finished(hold=True)`."""
        self._held = False
        self._proceed()

    def replay(self, tickets: Iterable[int], groups: Iterable[GroupDone]) -> StartBatch:
        """Start the next batch that the journal records, instead of composing one. Called after `restore`.

        Args:
            tickets: numbers of the batch's tickets.
            groups: the groups of these tickets in the log, from the attempts that were trained.
        """
        assert self._training is None
        finished, chosen = {group.ticket: group for group in groups}, sorted(tickets)
        for id in chosen:
            while self._ledger.issued <= id:  # the previous kernel had issued it
                self._open_next()
            if self._open[id].done is None:
                self.variants.observe(finished[id])
            self._open[id].done = finished[id]
            self._remove(id)
        self._training = frozenset(chosen)
        groups = tuple(finished[id] for id in chosen)
        return StartBatch(self.version, groups, tuple(self._open[id].row for id in chosen))

    def recall(self, evaluations: Iterable[Evaluation]) -> None:
        """Add the evaluations that were completed after the snapshot. Called after `restore` and before
        `replay`."""
        self.evaluations += [each for each in evaluations if not self._is_evaluated(each.version)]
        self._rounds_due = deque(each for each in self._rounds_due if not self._is_evaluated(each))

    def expire_finished(self, reason: str) -> None:
        """Expire all finished groups, because a new incarnation begins and weights of the previous one
        sampled them. Evaluations of later versions are dropped too. Called after `restore`."""
        self.evaluations = [each for each in self.evaluations if each.version <= self.version]
        for ticket in [ticket for ticket in self._open.values() if ticket.done]:
            self._retire(ticket, "expired", reason)

    # ----------------------------------------------------------------------------------- private

    def _proceed(self) -> None:
        """Do what the present state allows: start a batch, issue tickets, end the run."""
        if self._state != "training":
            return
        self._start_batch()
        self._admit()
        if self.version == self.settings.steps and not self.needed_versions and not self._held:
            self._end()

    def _end(self) -> None:
        if self.settings.evaluation_rows and not self._is_evaluated(self.version) and not self._closing:
            self._state = "last evaluation"
            self.waits_for = Cause("evaluation", self.version)
            self._begin_round(self.version)
        else:
            self._state = "over"
            self._commands.append(Finish())

    # ------------------------------------------------------------------------- tickets and ledger

    def _admit(self) -> None:
        """Issue tickets while there is room."""
        room, admitted = self.room, list[OpenTicket]()
        while len(self._open) < room and not self._closing:
            admitted.append(self._open_next())
        self._record_draws()
        for ticket in admitted:
            self._reissue("train", ticket, "")

    def _record_draws(self) -> None:
        if draws := self.draws.take_unrecorded():
            self._commands.append(RecordDraws(self.version, draws))

    def _open_next(self) -> OpenTicket:
        draw = self.draws.next(self._ledger.issued, self.version)
        oldest_possible = self._floor if self._state == "new" else self.version
        deadline = oldest_possible + self.settings.max_staleness
        ticket = OpenTicket(
            self._ledger.issued, draw.row, oldest_possible, deadline, draw.version, draw.drops
        )
        self._ledger.issued += 1
        self.variants.count(ticket.id, "issued")
        self._open[ticket.id] = ticket
        self._place(ticket)
        return ticket

    def _open_up_to(self, id: int) -> None:
        """Open all tickets up to this number, because the previous kernel had issued them. Called after
        `restore`, with the number in a worker's message: one that is too high opens no more than a window."""
        most = self._ledger.issued + self._window
        while self._ledger.issued <= id < most:
            self._open_next()

    def _reissue(self, purpose: Purpose, ticket: OpenTicket, reason: str) -> None:
        """Issue the next attempt of a ticket, or give the ticket up after `max_attempts` begun attempts."""
        if ticket.tries == self.settings.max_attempts:
            reason = f"begun {ticket.tries} times; at last {reason}"
            self._evaluated(ticket, None, reason) if purpose == "eval" else self._fail(ticket, reason)
            return
        if ticket.attempt > self._attempts_from:
            self._commands.append(Withdraw(purpose, ticket.id, ticket.attempt))
        ticket.attempt = max(ticket.attempt, self._attempts_from) + 1
        settings = self.settings
        version, samples = (
            (self.version, settings.group_size)
            if purpose == "train"
            else (ticket.since, settings.evaluation_samples)
        )
        self._bound(ticket, ticket.attempt, version)
        if purpose == "train":
            self._place(ticket)
        ticket.worker = ""
        self._holders[purpose].put(ticket.id, "")
        variant = self.variants.of(ticket.id) if purpose == "train" else ""
        self._commands.append(
            Issue(Ticket(ticket.id, ticket.attempt, purpose, ticket.row, version, samples, variant=variant))
        )

    def _bound(self, ticket: OpenTicket, attempt: int, version: int) -> None:
        """Record that an attempt's oldest token has this version or a newer one."""
        ticket.bounds = {**ticket.bounds, attempt: version}
        self._date(ticket)

    def _date(self, ticket: OpenTicket) -> None:
        """Store the deadline that follows from a ticket's oldest token."""
        ticket.deadline = ticket.oldest + self.settings.max_staleness

    def _place(self, ticket: OpenTicket) -> None:
        """Put a training ticket into its queue. Called after every change of its deadline or its group."""
        if self._training is not None and ticket.id in self._training:
            return
        if ticket.done is None:
            self._unfinished.put(ticket.id, ticket.deadline)
        else:
            self._unfinished.discard(ticket.id)
            self._finished.put(ticket.id, ticket.deadline)
            self._holders["train"].discard(ticket.id)

    def _remove(self, id: int) -> None:
        """Take a training ticket out of its queue."""
        self._unfinished.discard(id)
        self._finished.discard(id)
        self._holders["train"].discard(id)

    def _reissue_all(self) -> None:
        """Issue all unfinished tickets again, because after a restart no worker works on them."""
        self._record_draws()  # of tickets whose records a damaged store has lost
        for ticket in list(self._open.values()):
            if ticket.done is None:
                ticket.bounds = {}
                self._reissue("train", ticket, "")

    def _void(self, attempt: int) -> bool:
        """Whether an attempt belongs to a previous kernel and no longer counts."""
        return self._state != "new" and attempt <= self._attempts_from

    def _find(self, purpose: Purpose, ticket: int) -> OpenTicket | None:
        if purpose == "train":
            if self._state == "new":
                self._open_up_to(ticket)
            found = self._open.get(ticket)
            return None if self._training is not None and ticket in self._training else found
        return self._round.open.get(ticket) if self._round else None

    def _retire(self, ticket: OpenTicket, account: Account, reason: str) -> None:
        del self._open[ticket.id]
        self._remove(ticket.id)
        setattr(self._ledger, account, getattr(self._ledger, account) + 1)
        self.variants.count(ticket.id, account)
        self._tell_end(ticket, account)
        self.reasons[f"{account}: {reason}"] += 1
        self._commands.append(Retire("train", ticket.id, ticket.attempt, account, reason))

    def _tell_end(self, ticket: OpenTicket, outcome: Account | Literal["trained"]) -> None:
        if not self.draws.has_curriculum:
            return
        rewards = _rewards(ticket.done) if ticket.done is not None else ()
        self.draws.ended(ticket.drawn_at, TicketEnd(ticket.id, ticket.row, outcome, rewards))

    def _fail(self, ticket: OpenTicket, reason: str) -> None:
        self._retire(ticket, "failed", reason)
        self._failures_in_a_row += 1
        if self._failures_in_a_row == self.settings.max_failures:
            self._give_up(f"{self._failures_in_a_row} tickets failed one after the other; the last: {reason}")

    def _filter(self, ticket: OpenTicket, reason: str) -> None:
        self._retire(ticket, "filtered", reason)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row == self.settings.max_filtered:
            count = self._filtered_in_a_row
            self._give_up(f"{count} groups were filtered one after the other; the last: {reason}")

    def _leave_out(self, ticket: OpenTicket, reason: str) -> None:
        """Retire the ticket, and remember that its row is not fit to train on."""
        self._retire(ticket, "filtered", reason)
        self._left_out.add(ticket.row)
        self._left_out_in_a_row += 1
        rows = self.settings.rows
        if len(self._left_out) == rows and not self._closing:
            self._give_up(f"all {rows} rows of the dataset were left out; the last: {reason}")
        elif self._left_out_in_a_row == 2 * rows and not self._closing:  # a curriculum may avoid other rows
            self._give_up(f"the last {2 * rows} rows that were drawn were left out; the last: {reason}")

    def _give_up(self, reason: str) -> None:
        self._commands.append(Fail(reason))
        self._closing = True

    # -------------------------------------------------------------------------------- the batches

    def _start_batch(self) -> None:
        """Start a batch if enough groups are finished, and if every deadline can still be met afterwards."""
        if self._training is not None or self._held:
            return
        self.waits_for = None
        if self.version == self.settings.steps and self.needed_versions:
            self.waits_for = Cause("evaluation", self.needed_versions[0])
        if self._closing or self.version == self.settings.steps:
            return
        if self.finished < self.settings.batch_size:
            self.waits_for = Cause("groups")
            return
        while (late := self._blocking()) is not None:
            if self.settings.on_late == "wait":
                self.waits_for = Cause("late_ticket", late.id)
                return
            self._expire(late)
        if self._must_hold_back():
            self.waits_for = Cause("evaluation", self.needed_versions[0])
            return
        ids = sorted(self._finished.take(self.settings.batch_size))
        self._training = frozenset(ids)
        chosen = [self._open[id] for id in ids]
        groups = tuple(ticket.done for ticket in chosen if ticket.done is not None)
        rows = tuple(ticket.row for ticket in chosen)
        self._commands.append(StartBatch(self.version, groups, rows))

    def _blocking(self) -> OpenTicket | None:
        """Return the unfinished ticket that the next batch has to wait for, or None if the batch is
        admissible.

        The batch takes the first B finished groups. It is admissible at version v if, after it, for every j
        in -1..η at most (j + 1)·B of the remaining tickets have a deadline of v + 1 + j or earlier. Then
        every later batch can be made in time. For j = -1, no remaining ticket is due at v.
        """
        bound, size = self.settings.max_staleness, self.settings.batch_size
        remaining, places = dict(self._unfinished.due), size
        for deadline, count in sorted(self._finished.due.items()):
            taken = min(count, places)
            places -= taken
            remaining[deadline] = remaining.get(deadline, 0) + count - taken
        behind = 0
        for j in range(-1, bound + 1):
            behind += remaining.get(self.version + 1 + j, 0)
            if behind > (j + 1) * size:
                # Admission ensures that the tickets beyond the bound are unfinished: all finished ones with
                # such a deadline are in the batch.
                return self._open[self._unfinished.first()]
        return None

    def _expire(self, ticket: OpenTicket) -> None:
        """Expire a late ticket, and issue its prompt again in a new ticket, at most `max_attempts` times in
        all."""
        if ticket.attempt:
            self._commands.append(Withdraw("train", ticket.id, ticket.attempt))
        self._retire(ticket, "expired", f"due at version {self.version} and unfinished")
        if ticket.drops + 1 < self.settings.max_attempts:
            self.draws.again.append((ticket.row, ticket.drops + 1))

    # -------------------------------------------------------------------------------- evaluation

    def _is_evaluated(self, version: int) -> bool:
        return any(evaluation.version == version for evaluation in self.evaluations)

    def _must_hold_back(self) -> bool:
        """Whether the next step would make an evaluation due while another one waits. The scheduler gives one
        `HeldBack` command for each such wait."""
        if len(self.needed_versions) < 2 or not self.is_due(self.version + 1):
            return False
        if not self._holding_back:
            self._holding_back = True
            self.held_back += 1
            self._commands.append(HeldBack(*self.needed_versions[:2]))
        return True

    def _next_round(self) -> None:
        """Begin the evaluation that has waited longest, if none is under way."""
        if self._state == "training" and self._round is None and self._rounds_due and not self._closing:
            self._begin_round(self._rounds_due.popleft())

    def _begin_round(self, version: int) -> None:
        self._round = _Round(version, {})
        for row in range(self.settings.evaluation_rows):
            ticket = OpenTicket(self._eval_ids, row, version, version)
            self._eval_ids += 1
            self._round.open[ticket.id] = ticket
            self._reissue("eval", ticket, "")

    def _evaluated(self, ticket: OpenTicket, group: GroupDone | None, reason: str = "") -> None:
        """One row of the evaluation is finished. `group` is its result; without one, `reason` says why."""
        under_way = self._round
        assert under_way is not None
        del under_way.open[ticket.id]
        self._holders["eval"].discard(ticket.id)
        if group is None:
            under_way.failed += 1
            self.reasons[f"not evaluated: {reason}"] += 1
            self._commands.append(Retire("eval", ticket.id, ticket.attempt, "failed", reason))
        else:
            under_way.groups.append(group)
            under_way.sources.append(self._evaluation_source(ticket.row))
        if under_way.open:
            return
        self._round = None
        self._holding_back = False
        self.evaluations.append(under_way.result())
        self._commands.append(EvaluationDone(self.evaluations[-1]))
        if self._state == "last evaluation":
            self._state = "over"
            self._commands.append(Finish())
        else:
            self._proceed()
            self._next_round()
