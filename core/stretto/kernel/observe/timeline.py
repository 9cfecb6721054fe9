"""The kernel's writer of `timeline.jsonl`: what happened when (see `stretto.records.timeline`).

The writer collects events and appends them about once per second. A killed kernel loses the last second. The
run does not depend on the file: if it cannot be written, the events are dropped.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.base import clock
from stretto.bus.messages.events import Evaluation
from stretto.bus.messages.tickets import GroupDone, Purpose, Ticket, TicketStarted
from stretto.kernel.schedule.commands import Account
from stretto.records.timeline import (
    FILE,
    CallSpan,
    Cause,
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
    WorkerState,
    newest_event,
)

log = structlog.get_logger()

_WRITE_S = 1.0
_LONGEST_NAME = 80
"""Characters. A rollout worker writes its own name into its groups."""


class Timeline:
    """The timeline of one kernel of the run in a folder. Nothing is written before `begin`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._events: list[Event] = []
        self._newest = 0.0
        self._evaluation_began: dict[int, float] = {}
        self._encoder = msgspec.json.Encoder()
        self._failing = False

    def now(self) -> float:
        """Return the Unix time with 4 decimals. It never goes back, also when the machine's clock does."""
        self._newest = max(self._newest, round(clock.wall(), 4))
        return self._newest

    def begin(self, lease_epoch: int, version: int) -> None:
        """Continue the file of a previous kernel, without a broken last line, or begin a new one.

        Args:
            version: version of the checkpoint from which the kernel continues.
        """
        try:
            self._newest = _cut_broken_line(self._file)
        except OSError as error:
            self._complain(error)
        self._events.append(KernelStarted(self.now(), lease_epoch, version))

    async def keep(self) -> None:
        """Append the events every second, until cancelled."""
        while True:
            await anyio.sleep(_WRITE_S)
            self._write()

    def end(self, status: str) -> None:
        """Append the last events."""
        self._events.append(KernelEnded(self.now(), status))
        self._write()

    # ------------------------------------------------------------------------------------- events

    def worker(self, worker: str, state: WorkerState, how: str = "") -> None:
        """A worker joined, is ready, has left after a drain, or was lost."""
        self._events.append(WorkerChanged(self.now(), worker, state, how))

    def issued(self, ticket: Ticket) -> None:
        """An attempt of a ticket enters the work queue."""
        now = self.now()
        if ticket.purpose == "eval":
            self._evaluation_began.setdefault(ticket.min_version, now)
        self._events.append(
            TicketIssued(now, ticket.purpose, ticket.id, ticket.attempt, ticket.row, ticket.min_version)
        )

    def taken(self, message: TicketStarted) -> None:
        """A rollout worker has taken an attempt."""
        self._events.append(
            TicketTaken(self.now(), message.purpose, message.ticket, message.attempt, message.worker)
        )

    def done(self, group: GroupDone) -> None:
        """A group is complete."""
        rewards = [member.reward for member in group.members if not member.part]
        event = TicketDone(
            self.now(),
            group.purpose,
            group.ticket,
            group.attempt,
            group.worker[:_LONGEST_NAME],
            seconds=round(group.seconds, 4),
            generate_s=round(group.generate_s, 4),
            score_s=round(group.score_s, 4),
            samples=len(rewards),
            reward=round(sum(rewards) / max(1, len(rewards)), 6),
            tokens=sum(member.sampled for member in group.members),
            oldest=min(member.oldest for member in group.members),
        )
        self._events.append(event)

    def retired(
        self,
        purpose: Purpose,
        ticket: int,
        attempt: int,
        account: Account,
        reason: str,
    ) -> None:
        """A ticket will not be trained, or a row of an evaluation has no result."""
        self._events.append(TicketRetired(self.now(), purpose, ticket, attempt, account, reason))

    def call(self, start: float, group: str, call: str, version: int, seconds: float) -> None:
        """A call of a step is done. `start` is a time of `now`."""
        self._events.append(CallSpan(self.now(), start, group, call, version, round(seconds, 4)))

    def swap(self, start: float, worker: str, version: int, pause_s: float, *, exact: bool) -> None:
        """An inference worker has swapped weights. `start` is a time of `now`."""
        self._events.append(SwapSpan(self.now(), start, worker, version, round(pause_s, 4), exact))

    def step(
        self, start: float, version: int, waits: tuple[tuple[Cause, float], ...], tickets: tuple[int, ...]
    ) -> None:
        """A step is complete; it led to `version`. `start` is a time of `now`."""
        waits = tuple((cause, round(seconds, 4)) for cause, seconds in waits)
        self._events.append(StepSpan(self.now(), start, version, waits, tickets))

    def evaluation(self, result: Evaluation) -> None:
        """An evaluation is complete."""
        now = self.now()
        start = self._evaluation_began.pop(result.version, now)
        self._events.append(
            EvaluationSpan(now, start, result.version, result.accuracy, result.samples, result.failed)
        )

    # ------------------------------------------------------------------------------------ writing

    def _write(self) -> None:
        events, self._events = self._events, []
        if not events:
            return
        size = None
        try:
            with self._file.open("ab", buffering=0) as file:
                size, block = file.tell(), self._encoder.encode_lines(events)
                if file.write(block) != len(block):
                    raise OSError(f"a part of {len(block)} bytes did not fit")
            self._failing = False
        except OSError as error:
            self._complain(error)
            if size is not None:
                with suppress(OSError):  # later lines must not continue a part of one
                    os.truncate(self._file, size)

    def _complain(self, error: OSError) -> None:
        """Log the first of several failures in a row."""
        if not self._failing:
            self._failing = True
            log.warning("timeline not written; events are missing", error=str(error))


def _cut_broken_line(path: Path) -> float:
    """Remove a last line that a killed kernel has not finished. Return the time of the last event, or 0."""
    if not path.exists():
        return 0.0
    with path.open("r+b") as file:
        newest, end = newest_event(file)
        file.truncate(end)
    return newest
