"""The file `timeline.jsonl` of a run: what happened when, as the kernel saw it.

One event a line, as a JSON array: its tag, then its fields in order. All times are Unix seconds with 4
decimals. The `time` of an event is the moment at which the kernel recorded it, so the lines are in the order
of `time`. A span is recorded when it is over. A resumed run appends: `KernelStarted.version` says from where
it repeats steps, and the later spans of a step replace the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from stretto.bus.messages.events import Account, Cause, WorkerState
from stretto.bus.messages.tickets import Purpose
from stretto.errors import ConfigError
from stretto.records.files import open_record

FILE = "timeline.jsonl"
_BLOCK = 4096
"""Bytes. The search for a time ends with a part of the file this long, which is then read line by line."""
_LONGEST_LINE = 2**20
"""Bytes. The line of a step has the number of each of its tickets."""


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the events."""

    time: float


class KernelStarted(_Event, frozen=True, tag="kernel"):
    """A kernel begins, or continues, the run."""

    lease_epoch: int
    version: int
    """Version of the checkpoint from which it continues; 0 in a new run. It repeats the later steps."""


class KernelEnded(_Event, frozen=True, tag="over"):
    """The kernel ends the run. A killed kernel writes no such event."""

    status: str


class WorkerChanged(_Event, frozen=True, tag="worker"):
    """A worker joined, can be called, or is gone."""

    worker: str
    state: WorkerState
    how: str = ""
    """How the worker was lost, or why it left."""


class TicketIssued(_Event, frozen=True, tag="issued"):
    """An attempt of a ticket enters the work queue. It ends any previous attempt of the ticket."""

    purpose: Purpose
    ticket: int
    attempt: int
    row: int
    min_version: int
    """The version of an evaluation; for training, the oldest version that its tokens may have."""


class TicketTaken(_Event, frozen=True, tag="taken"):
    """A rollout worker has taken an attempt from the queue."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str


class TicketDone(_Event, frozen=True, tag="done"):
    """All trajectories of an attempt are in the log."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    seconds: float
    """Seconds since the worker took the attempt."""
    generate_s: float
    """The part of `seconds` in which a request was at an inference engine."""
    score_s: float
    """The part of `seconds` in which a call was at a verifier."""
    samples: int
    reward: float
    """Mean over the samples."""
    tokens: int
    """Number of tokens that the policy sampled."""
    oldest: int
    """Version of the oldest token."""


class TicketRetired(_Event, frozen=True, tag="retired"):
    """A ticket will not be trained, or a row of an evaluation has no result."""

    purpose: Purpose
    ticket: int
    attempt: int
    """The newest attempt; 0 if the ticket was not issued yet."""
    account: Account
    reason: str


class CallSpan(_Event, frozen=True, tag="call"):
    """A worker group has carried out one call of a step."""

    start: float
    group: str
    """Path of the worker group in the run file, such as `training`."""
    call: str
    version: int
    """Version at which the step began."""
    seconds: float
    """Seconds of work, as the trainer measured them. The rest of the span is the way there and back."""


class SwapSpan(_Event, frozen=True, tag="swap"):
    """An inference worker serves other weights."""

    start: float
    worker: str
    version: int
    pause_s: float
    """Seconds in which the engine could sample no token."""
    exact: bool
    """Whether the worker now serves an evaluation alone."""


class EvaluationSpan(_Event, frozen=True, tag="evaluation"):
    """A held-out evaluation is complete."""

    start: float
    """When its first ticket was issued."""
    version: int
    accuracy: float | None
    """None if some answer had none."""
    samples: int
    failed: int
    reward: float | None = None
    """Mean reward; None if no row had a result."""

    @property
    def score(self) -> str:
        """The accuracy as text; the reward if there is none."""
        if self.accuracy is not None:
            return f"accuracy {self.accuracy:.4f}"
        return "no result" if self.reward is None else f"reward {self.reward:.4f}"


class StepSpan(_Event, frozen=True, tag="step"):
    """A train step is complete and its weights are announced."""

    start: float
    version: int
    """Version after the step."""
    waits: tuple[tuple[Cause, float], ...]
    """What training waited for since the step before, in order, with the seconds."""
    tickets: tuple[int, ...]
    """Numbers of the tickets that the step trained."""

    def wait_spans(self) -> Iterator[tuple[Cause, float, float]]:
        """Yield what training waited for before the step, each with its beginning and end."""
        start = self.start - sum(seconds for _, seconds in self.waits)
        for cause, seconds in self.waits:
            yield cause, start, start + seconds
            start += seconds


Event = (
    KernelStarted
    | KernelEnded
    | WorkerChanged
    | TicketIssued
    | TicketTaken
    | TicketDone
    | TicketRetired
    | CallSpan
    | SwapSpan
    | EvaluationSpan
    | StepSpan
)


def read_timeline(folder: Path, since: float | None = None, until: float | None = None) -> Iterator[Event]:
    """Yield the events of the run in a folder with `since` <= `time` <= `until`, in order.

    The file may be large and may grow: the beginning of the window is found by bisection. A run that has not
    begun has no events. A last line that is not whole does not count: the kernel writes it now, or was killed
    meanwhile.

    Args:
        since: Unix seconds; None for the beginning.
        until: Unix seconds; None for the end. A span that is over later is not among the events.
    """
    path = folder / FILE
    try:
        opened = open_record(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    decoder = msgspec.json.Decoder(Event)
    with opened as file:
        if since is not None:
            file.seek(_bisect(file, since))
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}: {line[:80]!r} is not an event of a timeline: {error}") from error
            if until is not None and event.time > until:
                return
            if since is None or event.time >= since:
                yield event


def time_range(folder: Path) -> tuple[float, float] | None:
    """Return the times of the first and the newest event of the run in a folder; None without an event."""
    first = next(read_timeline(folder), None)
    if first is None:
        return None
    with open_record(folder / FILE) as file:
        return first.time, newest_event(file)[0]


def newest_event(file: BinaryIO) -> tuple[float, int]:
    """Return the time of the last whole line of an open timeline, 0 if there is none, and the place of that
    line's end in bytes."""
    size = file.seek(0, 2)
    start = file.seek(max(0, size - _LONGEST_LINE))
    lines, end, _ = file.read().rpartition(b"\n")
    if not end:
        return 0.0, start
    return _time_of(lines.rpartition(b"\n")[2]), start + len(lines) + 1


def _time_of(line: bytes) -> float:
    """Return the time of an event without decoding it."""
    return float(line.split(b",", 2)[1])


def _bisect(file: BinaryIO, since: float) -> int:
    """Return the beginning of a line such that all earlier lines are earlier than `since`."""
    low, high = 0, file.seek(0, 2)
    while high - low > _BLOCK:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        start, line = file.tell(), file.readline()
        if start < high and line.endswith(b"\n") and _time_of(line) < since:
            low = start
        else:
            high = middle
    return low
