"""An oracle: the state of each scheduler is the fold of the events that its kernel has stored."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from stretto.bus.messages.events import Event, EventBatch, OutcomeRead, ScheduleStarted
from stretto.bus.payloads import is_split
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.schedule.fold import apply
from stretto.kernel.schedule.outcomes import Outcome, admit
from stretto.kernel.schedule.scheduler import Scheduler

_EVERY = 16
"""The comparison is at each event with a number that this divides."""


class _KernelLife:
    """What one kernel heard, and the fold of what it has stored of that."""

    def __init__(self, scheduler: Scheduler, begins: int) -> None:
        self.fold = scheduler
        self.begins = begins
        """Number of the event with which the schedule started."""
        self.digests: dict[int, bytes] = {}
        """Number of an event -> digest of the living scheduler after it, until the fold has come there."""


class FoldOracle:
    """Compares the living schedulers with folds of their events: state and commands.

    Args:
        read: returns the message at a sequence number of a run's log.
    """

    def __init__(self, read: Callable[[str, int], bytes]) -> None:
        self.violations: list[str] = []
        self.samples = True
        """Whether the policy samples the sequences of the run."""
        self._read = read
        self._lives: dict[tuple[str, int], _KernelLife] = {}
        """Subject of a run's events and lease epoch -> the kernel."""
        self._heard: dict[tuple[str, int], int] = {}
        """The same -> number of events that the kernel has heard."""
        self._started: Scheduler | None = None
        """A copy of the scheduler that starts now."""
        self._latest: tuple[Scheduler, list[Any]] | None = None
        """The scheduler that has taken in an event, and the commands that it gave."""

    def apply(self, scheduler: Scheduler, event: Event, outcome: Outcome | None = None) -> None:
        """Take the place of `apply` in the kernel."""
        if isinstance(event, ScheduleStarted):
            self._started = copy.deepcopy(scheduler)
        self._latest = scheduler, _apply(scheduler, event, outcome)

    def hear(self, writer: JournalWriter, event: Event) -> None:
        """Take the place of `JournalWriter.hear`."""
        _hear(writer, event)
        kernel = writer.names.events, writer.epoch
        number = self._heard.get(kernel, 0)
        self._heard[kernel] = number + 1
        if self._started is not None:
            self._lives[kernel] = _KernelLife(self._started, number)
            self._started = None
        life = self._lives.get(kernel)
        if life is not None and self._latest is not None and number % _EVERY == 0:
            life.digests[number] = _digest(*self._latest)

    def __call__(self, sender: str, subject: str, data: bytes, head: bytes) -> None:
        """Take a message that was published or stored."""
        if not subject.endswith(".journal.events") or is_split(data):
            return
        events = msgspec.msgpack.decode(data, type=EventBatch)
        life = self._lives.get((subject, events.lease_epoch))
        for number, raw in enumerate(events.events, start=events.first):
            if life is None or number < life.begins:
                continue
            event = msgspec.msgpack.decode(raw, type=Event)
            outcome = None
            if isinstance(event, OutcomeRead):
                outcome = self._outcome(subject.split(".")[1], event.sequence)
            commands = _apply(life.fold, event, outcome)
            if number in life.digests and life.digests.pop(number) != _digest(life.fold, commands):
                self.violations.append(
                    f"after {event} the scheduler of the kernel of lease {events.lease_epoch} is not the "
                    "fold of its events"
                )

    def _outcome(self, run: str, sequence: int) -> Outcome:
        outcome = msgspec.msgpack.decode(self._read(run, sequence), type=Outcome)
        return admit(outcome, sequence, samples=self.samples)


_COMMANDS = "_commands"
"""Attribute of a scheduler and its parts with the commands that the kernel has not taken yet."""
_hear = JournalWriter.hear  # before the oracle takes its place


def _apply(scheduler: Scheduler, event: Event, outcome: Outcome | None) -> list[Any]:
    """Let a scheduler take in an event, and return the commands that it gives. They stay in the scheduler."""
    commands = vars(scheduler)[_COMMANDS]
    before = len(commands)
    apply(scheduler, event, outcome)
    return commands[before:]


def _facts(part: Any) -> Any:
    """Return what is compared of an object."""
    if isinstance(part, deque):
        return list(cast("deque[Any]", part))
    if not hasattr(part, "__dict__"):
        return pickle.dumps(part)  # such as an array of a curriculum
    compared = ((name, value) for name, value in vars(part).items() if name != _COMMANDS)
    return {name: _in_order(value) for name, value in compared if not callable(value)}


def _in_order(value: Any) -> Any:
    """Sort a set, or the sets of a dictionary: their order depends on what was in them before."""
    if isinstance(value, (set, frozenset)):
        return sorted(cast("set[Any]", value))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: sorted(each) if isinstance(each, set) else each for key, each in items}
    return value


_encode = msgspec.msgpack.Encoder(enc_hook=_facts).encode


def _digest(scheduler: Scheduler, commands: list[Any]) -> bytes:
    return hashlib.blake2b(_encode([scheduler, commands]), digest_size=8).digest()
