"""The history of a run: what happened in it, as a fold of its journal's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from stretto.bus.messages import events
from stretto.bus.messages.tickets import Purpose, TicketStarted
from stretto.bus.messages.training import RowRef

AttemptOutcome = Literal[
    "trained", "evaluated", "filtered", "expired", "failed", "withdrawn", "unfinished", "open"
]
"""`withdrawn`: the ticket was issued again. `unfinished`: its kernel ended, or no step has trained its group.
`open`: a worker may be working on it."""
Key = tuple[Purpose, int]


@dataclass
class KernelLife:
    """The time of one kernel of the run. All times are Unix seconds."""

    began: float
    lease_epoch: int
    version: int
    """Version of the checkpoint from which it continued, so that it repeats later steps; 0 in a new run."""
    ended: float | None = None
    """None while the kernel owns the run, as far as the events show."""
    status: str = ""
    """How the kernel ended; empty if it was killed."""


@dataclass
class WorkerLife:
    """One process of a worker."""

    worker: str
    joined: float
    ready: float | None = None
    ended: float | None = None
    how: str = ""
    """How the worker was lost, or why it left."""


@dataclass
class StepSpan:
    """A train step that is complete. It waited, then it began, then it ended."""

    ended: float
    figures: events.StepMeasured

    @property
    def version(self) -> int:
        """Version after the step."""
        return self.figures.version

    @property
    def began(self) -> float:
        """Time at which the step's first call began."""
        return self.figures.began

    def waits(self) -> Iterator[tuple[events.Cause, float, float]]:
        """Yield what training waited for before the step, each with its beginning and end."""
        waits = [wait for wait in self.figures.waits if wait[0].kind != "publication"]
        start = self.began - sum(seconds for _, seconds in waits)
        for cause, seconds in waits:
            yield cause, start, start + seconds
            start += seconds

    @property
    def trained(self) -> float:
        """Time at which the step ended, or began to wait for the publication of its weights."""
        return self.ended - sum(each for cause, each in self.figures.waits if cause.kind == "publication")


@dataclass
class CallSpan:
    """A call of a step that a worker group has carried out."""

    ended: float
    figures: events.CallEnded


@dataclass
class SwapSpan:
    """A change of the weights that an inference worker serves, or of the purpose for which it serves them."""

    ended: float
    figures: events.WeightsServed


@dataclass(frozen=True)
class RecordedBatch:
    """A batch that a run has trained or begun to train."""

    version: int
    tickets: tuple[int, ...]
    rows: tuple[RowRef, ...]
    """In the order of the batch."""
    incarnation: int
    """Incarnation of the weights that the batch changes."""
    layout: str
    """See `stretto.bus.messages.events.RunOwned`."""


@dataclass
class EvaluationSpan:
    """A held-out evaluation that is complete."""

    began: float
    """Time at which its first ticket was issued."""
    ended: float
    incarnation: int
    result: events.Evaluation

    @property
    def score(self) -> str:
        """The accuracy as text; the reward if there is none."""
        result = self.result
        if result.accuracy is not None:
            return f"accuracy {result.accuracy:.4f}"
        return "no result" if result.reward is None else f"reward {result.reward:.4f}"


@dataclass
class Attempt:
    """One attempt of a ticket, from its issue to its outcome."""

    purpose: Purpose
    ticket: int
    attempt: int
    issued: events.IssuedTicket | None = None
    """None if the ticket was issued before the first event."""
    issued_at: float | None = None
    worker: str = ""
    """The rollout worker that took it; empty if none has."""
    taken: float | None = None
    done: events.GroupFigures | None = None
    """Figures of its group, once all trajectories of the group are in the log."""
    ended: float | None = None
    """Time at which the worker finished it, or at which the kernel stopped waiting for it."""
    outcome: AttemptOutcome = "open"
    reason: str = ""
    step: StepSpan | None = None

    @property
    def name(self) -> str:
        """Ticket and attempt: `7/1`, or `eval-7/1`."""
        return f"{'eval-' if self.purpose == 'eval' else ''}{self.ticket}/{self.attempt}"

    @property
    def start(self) -> float:
        """Time at which the worker took it; time of its issue if no worker has."""
        if self.taken is not None:
            return self.taken
        if self.done is not None and self.ended is not None:  # it was taken before the first event
            return self.ended - self.done.seconds
        assert self.issued_at is not None
        return self.issued_at


@dataclass
class RunHistory:
    """What happened in a run, or in a part of it.

        history = RunFolder(Path("runs/quickstart-1")).history
        for step in history.steps:
            print(step.version, step.ended - step.began, step.figures.statistics["loss"])

    A repeated step is listed once for each time. A batch is *in force* if it led to the run's current
    weights: a new incarnation replaces the batches from its first version on.
    """

    began: float | None = None
    ended: float = 0.0
    kernels: list[KernelLife] = field(default_factory=list[KernelLife])
    lives: list[WorkerLife] = field(default_factory=list[WorkerLife])
    steps: list[StepSpan] = field(default_factory=list[StepSpan])
    calls: list[CallSpan] = field(default_factory=list[CallSpan])
    swaps: list[SwapSpan] = field(default_factory=list[SwapSpan])
    evaluations: list[EvaluationSpan] = field(default_factory=list[EvaluationSpan])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    """In the order of their first event."""
    incarnation: int = 0
    layout: str = ""
    batches: dict[int, RecordedBatch] = field(default_factory=dict[int, RecordedBatch])
    """Version -> its batch in force."""
    values: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])
    """(first version, number of the values in force from this version on), in order."""
    digests: dict[tuple[int, int], list[str]] = field(default_factory=dict[tuple[int, int], list[str]])
    """(incarnation, version) -> a digest for each publication."""
    draws: dict[int, int] = field(default_factory=dict[int, int])
    """Ticket -> the row that the curriculum chose."""
    in_flight: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(time, number of training tickets not yet trained or retired) at each change of the number."""
    waiting: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(time, number of finished groups that wait for a step) at each change of the number."""
    _former: dict[int, tuple[dict[int, RecordedBatch], list[tuple[int, int]]]] = field(
        default_factory=dict[int, tuple[dict[int, RecordedBatch], list[tuple[int, int]]]]
    )
    """Former incarnation -> its batches and values."""
    _lives: dict[str, WorkerLife] = field(default_factory=dict[str, WorkerLife])
    _open: dict[Key, Attempt] = field(default_factory=dict[Key, Attempt])
    """Ticket -> its newest attempt, while this attempt is open."""
    _withdrawn: dict[tuple[Key, int], Attempt] = field(default_factory=dict[tuple[Key, int], Attempt])
    """Attempts of this kernel whose ticket was issued again."""
    _done: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    """Ticket -> finished group that waits for its step."""
    _cut: dict[Key, Attempt] = field(default_factory=dict[Key, Attempt])
    """Attempts that were open when their kernel ended. The next kernel may get their groups."""
    _in_flight: set[int] = field(default_factory=set[int])
    _evaluation_began: dict[int, float] = field(default_factory=dict[int, float])

    @classmethod
    def of(cls, timed_events: Iterable[tuple[float, events.Event]]) -> RunHistory:
        """Return the history of (time, event) pairs in order."""
        history = cls()
        for time, event in timed_events:
            history.add(time, event)
        return history

    def add(self, time: float, event: events.Event) -> None:
        """Add the next event to the history."""
        self.began = time if self.began is None else self.began
        previous_time, self.ended = self.ended, time
        match event:
            case events.RunOwned(incarnation, version, values, layout):
                self.layout = layout
                self.enter(incarnation, version)
                if self.values[-1][1] != values:
                    self.values = [entry for entry in self.values if entry[1] < values]
                    self.values.append((version, values))
            case events.BatchStarted(version, tickets, rows):
                batch = RecordedBatch(version, tickets, rows, self.incarnation, self.layout)
                self.batches[version] = batch
            case events.BatchExpired(version):
                self.batches.pop(version, None)
            case events.VersionPublished(incarnation, version, digest):
                self.digests.setdefault((incarnation, version), []).append(digest)
            case events.RowsDrawn(draws=draws):
                self.draws |= dict(draws)
            case events.KernelBegan(lease_epoch, version):
                self._end_kernel(previous_time, "")
                self.kernels.append(KernelLife(time, lease_epoch, version))
            case events.RunEnded(status):
                self._end_kernel(time, status)
            case events.FleetChanged():
                self._worker(time, event)
            case events.TicketsIssued(tickets):
                for entry in tickets:
                    self._issue(time, entry)
            case TicketStarted(worker, purpose, ticket, number):
                attempt = self._attempt(purpose, ticket, number)
                if attempt is not None:
                    attempt.taken, attempt.worker = time, worker
            case events.OutcomeRead(_, events.GroupFigures() as group):
                self._finish(time, group)
            case events.TicketsRetired(tickets):
                for entry in tickets:
                    self._retire(time, entry)
            case events.StepMeasured(known=False):
                self._train(StepSpan(time, event))
            case events.CallEnded():
                self.calls.append(CallSpan(time, event))
            case events.WeightsServed():
                self.swaps.append(SwapSpan(time, event))
            case events.EvaluationEnded(result):
                began = self._evaluation_began.pop(result.version, time)
                self.evaluations.append(EvaluationSpan(began, time, self.incarnation, result))
            case _:
                pass
        _note(self.in_flight, time, len(self._in_flight))
        _note(self.waiting, time, len(self._done))

    # ------------------------------------------------------------------------------------- batches

    @property
    def incarnations(self) -> int:
        """Number of incarnations of the weights so far."""
        return len({self.incarnation, *self._former})

    def batches_of(self, incarnation: int) -> dict[int, RecordedBatch]:
        """Return version -> batch that led to an incarnation's weights, also from incarnations before it."""
        return self.batches if incarnation == self.incarnation else self._former.get(incarnation, ({}, []))[0]

    @property
    def reached(self) -> dict[int, str]:
        """Version -> its digest, of each complete step whose batch is in force."""
        keys = ((batch.incarnation, version + 1) for version, batch in self.batches.items())
        return {key[1]: self.digests[key][0] for key in keys if key in self.digests}

    def values_at(self, version: int) -> int:
        """Return the number of the values with which the batch of a version was made."""
        return next(number for start, number in reversed(self.values) if start <= version)

    def enter(self, incarnation: int, version: int) -> None:
        """Switch to an incarnation: a higher one begins at `version`, a lower one is continued."""
        if incarnation == self.incarnation:
            return
        self._former[self.incarnation] = self.batches, self.values
        if incarnation > self.incarnation:
            self.batches = {each: batch for each, batch in self.batches.items() if each < version}
            self.values = [each for each in self.values if each[0] <= version]
        else:
            self.batches, self.values = self._former.get(incarnation, ({}, [(0, 1)]))
        self.incarnation = incarnation

    # ------------------------------------------------------------------------- kernels and workers

    def _end_kernel(self, time: float, status: str) -> None:
        """End the open workers and attempts: they do not outlive their kernel."""
        self._cut |= self._open
        for attempt in self._open.values():
            attempt.ended, attempt.outcome = time, "unfinished"
        self._open.clear()
        for life in self._lives.values():
            life.ended = time
        self._lives.clear()
        self._withdrawn.clear()
        if self.kernels and self.kernels[-1].ended is None:
            self.kernels[-1].ended, self.kernels[-1].status = time, status

    def _worker(self, time: float, event: events.FleetChanged) -> None:
        life = self._lives.get(event.worker)
        if event.state == "joined" or life is None:  # it may have joined before the first event
            life = self._lives[event.worker] = WorkerLife(event.worker, time)
            self.lives.append(life)
        if event.state == "ready":
            life.ready = time
        elif event.state in ("left", "lost"):
            life.ended = time
            life.how = f"left: {event.how}" if event.state == "left" else event.how
            del self._lives[event.worker]

    # ----------------------------------------------------------------------------------- attempts

    def _issue(self, time: float, issued: events.IssuedTicket) -> None:
        key = issued.purpose, issued.ticket
        if (withdrawn := self._open.get(key)) is not None:
            self._withdrawn[key, withdrawn.attempt] = withdrawn
            self._close(key, time, "withdrawn")
        attempt = Attempt(*key, issued.attempt, issued, time)
        self._open[key] = attempt
        self.attempts.append(attempt)
        if issued.purpose == "train":
            self._in_flight.add(issued.ticket)
        else:
            self._evaluation_began.setdefault(issued.min_version, time)

    def _attempt(self, purpose: Purpose, ticket: int, number: int) -> Attempt | None:
        """Return an open attempt, a new one if it began before the first event; None if it is not open."""
        key = purpose, ticket
        newest = self._open.get(key)
        if newest is None and not self.kernels:
            newest = self._open[key] = Attempt(*key, number)
            self.attempts.append(newest)
        return newest if newest is not None and newest.attempt == number else None

    def _finish(self, time: float, group: events.GroupFigures) -> None:
        key = group.purpose, group.ticket
        attempt = self._attempt(*key, group.attempt)
        if attempt is None:  # an attempt that was given up may finish after all, and counts
            attempt = self._withdrawn.get((key, group.attempt)) if key in self._open else self._cut.get(key)
        if attempt is None or attempt.attempt != group.attempt:
            return  # another attempt was first
        self._close(key, time, "withdrawn")  # the open attempt: this one, or a newer one
        self._cut.pop(key, None)
        attempt.ended, attempt.done, attempt.worker = time, group, group.worker
        attempt.outcome = "evaluated" if group.purpose == "eval" else "unfinished"
        if group.purpose == "train":
            self._done[group.ticket] = attempt

    def _retire(self, time: float, retired: events.RetiredTicket) -> None:
        key = retired.purpose, retired.ticket
        attempt = self._close(key, time, retired.account) or self._cut.pop(key, None)
        if retired.purpose == "train":
            self._in_flight.discard(retired.ticket)
            attempt = self._done.pop(retired.ticket, attempt)
        if attempt is not None:
            attempt.outcome, attempt.reason = retired.account, retired.reason

    def _train(self, step: StepSpan) -> None:
        self.steps.append(step)
        for ticket in step.figures.tickets:
            self._in_flight.discard(ticket)
            # A former kernel may have read a group's outcome and lost the event.
            cut_attempt = self._cut.pop(("train", ticket), None)
            if (attempt := self._done.pop(ticket, cut_attempt)) is not None:
                attempt.outcome, attempt.step = "trained", step

    def _close(self, key: Key, time: float, outcome: AttemptOutcome) -> Attempt | None:
        attempt = self._open.pop(key, None)
        if attempt is not None:
            attempt.ended, attempt.outcome = time, outcome
        return attempt


def _note(series: list[tuple[float, int]], time: float, value: int) -> None:
    if not series or series[-1][1] != value:
        series.append((time, value))
