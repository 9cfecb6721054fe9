"""The writer of `timeline.jsonl`: what happened when (see `stretto.records.timeline`).

The writer collects the lines of events and appends them about once per second. A killed kernel loses the last
second. The run does not depend on the file: if it cannot be written, the lines are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.base import clock
from stretto.bus.messages.events import (
    CallEnded,
    EvaluationEnded,
    Event,
    FleetChanged,
    GroupFigures,
    KernelBegan,
    OutcomeRead,
    StepMeasured,
    TicketsIssued,
    TicketsRetired,
    WeightsServed,
)
from stretto.bus.messages.tickets import TicketStarted
from stretto.records.timeline import (
    FILE,
    CallSpan,
    EvaluationSpan,
    KernelEnded,
    KernelStarted,
    StepSpan,
    SwapSpan,
    TicketDone,
    TicketIssued,
    TicketRetired,
    TicketTaken,
    WorkerChanged,
    newest_event,
)
from stretto.records.timeline import Event as Line

log = structlog.get_logger()

_WRITE_S = 1.0


class Timeline:
    """The timeline of one kernel of the run in a folder. Nothing is written before its first event."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._lines: list[Line] = []
        self._newest = 0.0
        self._evaluation_began: dict[int, float] = {}
        self._encoder = msgspec.json.Encoder()
        self._failing = False

    def take(self, time: float, event: Event) -> None:
        """Take in an event of the kernel. The time of a line never goes back, also when the machine's clock
        does between two kernels."""
        if isinstance(event, KernelBegan):
            self._begin()
        self._newest = max(self._newest, time)
        self._lines += self._lines_of(self._newest, event)

    async def keep(self) -> None:
        """Append the lines every second, until cancelled."""
        while True:
            await anyio.sleep(_WRITE_S)
            self._write()

    def end(self, status: str) -> None:
        """Append the last lines."""
        self._newest = max(self._newest, round(clock.wall(), 4))
        self._lines.append(KernelEnded(self._newest, status))
        self._write()

    # -------------------------------------------------------------------------------------- lines

    def _lines_of(self, now: float, event: Event) -> Iterator[Line]:
        match event:
            case KernelBegan(lease_epoch, version):
                yield KernelStarted(now, lease_epoch, version)
            case FleetChanged(worker, state, how):
                yield WorkerChanged(now, worker, state, how)
            case TicketsIssued(tickets):
                for each in tickets:
                    if each.purpose == "eval":
                        self._evaluation_began.setdefault(each.min_version, now)
                    yield TicketIssued(now, *msgspec.structs.astuple(each))
            case TicketStarted(worker, purpose, ticket, attempt):
                yield TicketTaken(now, purpose, ticket, attempt, worker)
            case OutcomeRead(_, GroupFigures() as group):
                yield TicketDone(now, *msgspec.structs.astuple(group))
            case TicketsRetired(tickets):
                for each in tickets:
                    yield TicketRetired(now, *msgspec.structs.astuple(each))
            case CallEnded(began, group, call, version, seconds):
                yield CallSpan(now, began, group, call, version, seconds)
            case WeightsServed(began, worker, version, exact):
                yield SwapSpan(now, began, worker, version, round(event.pause_s, 4), exact)
            case StepMeasured(version, _, began, known=False):
                yield StepSpan(now, began, version, event.waits, event.tickets)
            case EvaluationEnded(result):
                start = self._evaluation_began.pop(result.version, now)
                figures = result.version, result.accuracy, result.samples, result.failed, result.reward
                yield EvaluationSpan(now, start, *figures)
            case _:
                pass

    # ------------------------------------------------------------------------------------ writing

    def _begin(self) -> None:
        """Continue the file of a previous kernel, without a broken last line, or begin a new one."""
        try:
            self._newest = _cut_broken_line(self._file)
        except OSError as error:
            self._complain(error)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        size = None
        try:
            with self._file.open("ab", buffering=0) as file:
                size, block = file.tell(), self._encoder.encode_lines(lines)
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
