"""The history of a run, read from its timeline: attempts of tickets, lives of workers, spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from stretto.run_folder import (
    CallSpan,
    EvaluationSpan,
    Event,
    KernelEnded,
    KernelStarted,
    StepSpan,
    SwapSpan,
    TicketDone,
    TicketIssued,
    TicketRetired,
    TicketTaken,
    WorkerChanged,
)

Outcome = Literal["trained", "evaluated", "filtered", "expired", "failed", "withdrawn", "unfinished"]
"""`withdrawn`: the ticket was issued again. `unfinished`: its kernel ended, or no step has used its group."""


@dataclass
class Attempt:
    """One attempt of a ticket, from its issue to its outcome."""

    issued: TicketIssued
    taken: TicketTaken | None = None
    done: TicketDone | None = None
    end: float = 0.0
    """When the worker was done with it, or when nobody waited for it any more."""
    outcome: Outcome = "unfinished"
    reason: str = ""
    step: StepSpan | None = None
    """The step that trained it."""

    @property
    def name(self) -> str:
        """`7/1`, or `eval-7/1`."""
        issued = self.issued
        return f"{'eval-' if issued.purpose == 'eval' else ''}{issued.ticket}/{issued.attempt}"

    @property
    def worker(self) -> str:
        """The rollout worker; empty if none has taken it."""
        taken = self.done or self.taken
        return taken.worker if taken else ""

    @property
    def start(self) -> float:
        """When the worker took it."""
        return self.taken.time if self.taken else self.issued.time


@dataclass
class Life:
    """One process of a worker, from its joining to its end."""

    worker: str
    joined: float
    ready: float | None = None
    end: float = 0.0
    how: str = ""


@dataclass
class RunHistory:
    """What happened in a run, read from its events."""

    start: float
    end: float
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    lives: list[Life] = field(default_factory=list[Life])
    calls: list[CallSpan] = field(default_factory=list[CallSpan])
    swaps: list[SwapSpan] = field(default_factory=list[SwapSpan])
    evaluations: list[EvaluationSpan] = field(default_factory=list[EvaluationSpan])
    steps: list[StepSpan] = field(default_factory=list[StepSpan])
    kernels: list[tuple[KernelStarted, float, str]] = field(
        default_factory=list[tuple[KernelStarted, float, str]]
    )
    """Start of each kernel, its end, and its status at the end; empty if it was killed or still runs."""
    in_flight: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Time and number of training tickets in flight."""
    waiting: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Time and number of finished groups that wait for training."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunHistory | None:
        """Read the events of a run; None if there are none."""
        reader: _Reader | None = None
        for event in events:
            reader = reader or _Reader(cls(event.time, event.time))
            reader.accept(event)
        if reader is None:
            return None
        reader.end_kernel("")
        return reader.history


class _Reader:
    """Reads events in their order into a `RunHistory`."""

    def __init__(self, history: RunHistory) -> None:
        self.history = history
        self._kernel: KernelStarted | None = None
        self._lives: dict[str, Life] = {}
        self._open: dict[tuple[str, int], Attempt] = {}
        """Newest attempt of each ticket that is not done."""
        self._withdrawn: dict[tuple[str, int, int], Attempt] = {}
        """Attempts of this kernel whose ticket was issued again."""
        self._done: dict[int, Attempt] = {}
        """Finished groups that wait for training, by ticket."""
        self._cut: dict[int, Attempt] = {}
        """Training attempts that were open when their kernel ended, by ticket."""
        self._in_flight: set[int] = set()

    def accept(self, event: Event) -> None:
        history = self.history
        match event:
            case KernelStarted():
                self.end_kernel("")
                self._kernel = event
            case KernelEnded():
                history.end = event.time
                self.end_kernel(event.status)
            case WorkerChanged():
                self._worker(event)
            case TicketIssued():
                self._withdraw(event)
                self._open[event.purpose, event.ticket] = Attempt(event)
                if event.purpose == "train":
                    self._in_flight.add(event.ticket)
            case TicketTaken():
                attempt = self._open.get((event.purpose, event.ticket))
                if attempt is not None and attempt.issued.attempt == event.attempt:
                    attempt.taken = event
            case TicketDone():
                self._finish(event)
            case TicketRetired():
                self._retire(event)
            case StepSpan():
                self._train(event)
            case CallSpan():
                history.calls.append(event)
            case SwapSpan():
                history.swaps.append(event)
            case EvaluationSpan():
                history.evaluations.append(event)
        history.end = event.time
        self._count(event)

    def end_kernel(self, status: str) -> None:
        """Close what is open: the workers and their work do not outlive their kernel."""
        history = self.history
        for key, attempt in list(self._open.items()):
            if attempt.issued.purpose == "train":
                self._cut[attempt.issued.ticket] = attempt
            self._close(key, history.end, "unfinished")
        for life in self._lives.values():
            life.end = history.end
        self._lives.clear()
        self._withdrawn.clear()
        if self._kernel is not None:
            history.kernels.append((self._kernel, history.end, status))
        self._kernel = None

    def _worker(self, event: WorkerChanged) -> None:
        if event.state == "joined":
            self._lives[event.worker] = Life(event.worker, event.time)
            self.history.lives.append(self._lives[event.worker])
        elif (life := self._lives.get(event.worker)) is None:
            return
        elif event.state == "ready":
            life.ready = event.time
        else:
            life.end = event.time
            life.how = f"left: {event.how}" if event.state == "left" else event.how
            del self._lives[event.worker]

    def _withdraw(self, again: TicketIssued) -> None:
        former = self._open.get((again.purpose, again.ticket))
        if former is not None:
            self._withdrawn[again.purpose, again.ticket, former.issued.attempt] = former
            self._close((again.purpose, again.ticket), again.time, "withdrawn")

    def _finish(self, event: TicketDone) -> None:
        key = event.purpose, event.ticket
        newest = self._open.get(key)
        if newest is None:
            return  # another attempt was first
        if newest.issued.attempt == event.attempt:
            attempt = newest
            self._close(key, event.time, "unfinished")
        elif former := self._withdrawn.get((*key, event.attempt)):
            attempt = former  # it had been finished after all, and counts
            attempt.end = event.time
            self._close(key, event.time, "withdrawn")
        else:
            return  # of a previous kernel
        attempt.done = event
        if event.purpose == "eval":
            attempt.outcome = "evaluated"
        else:
            attempt.outcome = "unfinished"
            self._done[event.ticket] = attempt

    def _retire(self, event: TicketRetired) -> None:
        done = None
        if event.purpose == "train":
            self._in_flight.discard(event.ticket)
            done = self._done.pop(event.ticket, None)
        if done is not None:
            done.outcome, done.reason = event.account, event.reason
        else:
            self._close((event.purpose, event.ticket), event.time, event.account, event.reason)

    def _train(self, step: StepSpan) -> None:
        self.history.steps.append(step)
        for ticket in step.tickets:
            self._in_flight.discard(ticket)
            # A killed kernel loses its last events: the group may be in the log without its `TicketDone`.
            cut = self._cut.pop(ticket, None)
            if (attempt := self._done.pop(ticket, cut)) is not None:
                attempt.outcome, attempt.step = "trained", step

    def _close(self, key: tuple[str, int], time: float, outcome: Outcome, reason: str = "") -> None:
        attempt = self._open.pop(key, None)
        if attempt is not None:
            attempt.end, attempt.outcome, attempt.reason = time, outcome, reason
            self.history.attempts.append(attempt)

    def _count(self, event: Event) -> None:
        counts = ((self.history.in_flight, len(self._in_flight)), (self.history.waiting, len(self._done)))
        for series, value in counts:
            if not series or series[-1][1] != value:
                series.append((event.time, value))
