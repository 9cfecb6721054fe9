"""An oracle: each scheduler is the fold of the stored events of all kernels of its run, however it was
recovered, and the journal's decisions are the fold's."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from stretto.bus.messages.events import (
    Decision,
    Event,
    EventBatch,
    Input,
    Observation,
    OutcomeRead,
    RunOwned,
)
from stretto.bus.payloads import decoder, is_split
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.schedule.fold import apply, decisions
from stretto.kernel.schedule.outcomes import Outcome, admit
from stretto.kernel.schedule.scheduler import Scheduler

_EVERY = 64
"""Compare at each event with a number that this divides."""


Kernel = tuple[str, int]
"""(subject of a run's events, lease epoch)."""


class FoldOracle:
    """Compares living schedulers with folds of their events. `read` returns a numbered message of a log."""

    def __init__(self, read: Callable[[str, int], bytes]) -> None:
        self.violations: list[str] = []
        self.samples = True
        """Whether the run samples its sequences."""
        self._read = read
        self._folds: dict[str, tuple[tuple[int, int, int], Scheduler]] = {}
        """Subject of a run's events -> (incarnation, values, number of rows) and the fold."""
        self._decided: dict[str, list[Decision]] = {}
        """Subject -> decisions of its fold that events do not record yet."""
        self._owner: dict[str, int] = {}
        """Subject -> lease epoch of the owning kernel."""
        self._heard: Counter[Kernel] = Counter()
        self._begun: dict[Kernel, Scheduler] = {}
        """Copies of the schedulers of kernels that begin to own a run."""
        self._digests: dict[tuple[Kernel, int], bytes] = {}
        """(kernel, number of an event) -> digest of the living scheduler, until the fold has come there."""
        self._latest: tuple[Scheduler, list[Any], Scheduler | None] | None = None
        """(scheduler that has taken an event, its commands, for `RunOwned` a copy from before)."""

    def apply(self, scheduler: Scheduler, event: Input, outcome: Outcome | None = None) -> None:
        """Take the place of `apply` in the kernel."""
        before = copy.deepcopy(scheduler) if isinstance(event, RunOwned) else None
        self._latest = scheduler, _apply(scheduler, event, outcome), before

    def hear(self, writer: JournalWriter, event: Event) -> None:
        """Take the place of `JournalWriter.hear`."""
        _hear(writer, event)
        kernel = writer.names.events, writer.epoch
        number = self._heard[kernel]
        self._heard[kernel] += 1
        if self._latest is None:
            return  # a step that is repeated
        scheduler, commands, before = self._latest
        self._latest = None
        if before is not None:
            self._begun[kernel] = before
        elif number % _EVERY == 0:
            self._digests[kernel, number] = _digest(scheduler, commands)

    def __call__(self, sender: str, subject: str, data: bytes, head: bytes) -> None:
        """Take a message that was published or stored."""
        if not subject.endswith(".journal.events") or is_split(data):
            return
        events = msgspec.msgpack.decode(data, type=EventBatch)
        kernel = subject, events.lease_epoch
        for number, event in enumerate(events.decoded(), start=events.first):
            if not isinstance(event, Input):
                self._compare(kernel, event)
                continue
            if isinstance(event, RunOwned):
                self._begin(kernel, event)
            outcome = None
            if isinstance(event, OutcomeRead):
                outcome = self._outcome(subject.split(".")[1], event.sequence)
            fold = self._folds[subject][1]
            commands = _apply(fold, event, outcome)
            if missing := self._decided.pop(subject, []):
                self.violations.append(f"the kernel of lease {events.lease_epoch} has not recorded {missing}")
            self._decided[subject] = [*decisions(fold.commands())]
            living = self._digests.pop((kernel, number), None)
            if living is not None and living != _digest(fold, commands):
                self.violations.append(
                    f"after {event} the scheduler of the kernel of lease {events.lease_epoch} is not the "
                    "fold of its events"
                )

    def _begin(self, kernel: Kernel, event: RunOwned) -> None:
        """Compare the scheduler of a kernel that begins with the fold. Where it has other values, another
        incarnation, or a dataset that has become smaller, the fold begins anew."""
        begun = self._begun.pop(kernel)
        now = event.incarnation, event.values, begun.settings.rows
        former, fold = self._folds.get(kernel[0], (None, begun))
        self._folds[kernel[0]] = now, fold if former == now else begun
        self._owner[kernel[0]] = kernel[1]
        self._decided.pop(kernel[0], None)
        if former == now and _digest(fold, []) != _digest(begun, []):
            self.violations.append(f"the kernel of lease {kernel[1]} begins in another state than the fold")

    def _compare(self, kernel: Kernel, decision: Event) -> None:
        expected = self._decided.get(kernel[0], [])
        if isinstance(decision, Observation):
            return
        if decision in expected:
            expected.remove(decision)
        elif self._owner.get(kernel[0]) == kernel[1]:  # else its state is not that of the fold
            self.violations.append(
                f"the kernel of lease {kernel[1]} has decided {decision}; the fold has not"
            )

    def _outcome(self, run: str, sequence: int) -> Outcome:
        outcome = decoder(Outcome)(self._read(run, sequence))
        return admit(outcome, sequence, samples=self.samples)


_COMMANDS = "_commands"
"""Attribute of a scheduler and its parts: commands that the kernel has not taken yet."""
_hear = JournalWriter.hear  # before the oracle takes its place


def _apply(scheduler: Scheduler, event: Input, outcome: Outcome | None) -> list[Any]:
    """Let a scheduler take an event. Return its commands, which also stay in it."""
    commands = vars(scheduler)[_COMMANDS]
    before = len(commands)
    apply(scheduler, event, outcome)
    return commands[before:]


def _digest(scheduler: Scheduler, commands: list[Any]) -> bytes:
    snapshot = scheduler.snapshot()
    rows = sorted(snapshot.setbacks.rows)
    snapshot.setbacks.rows.clear()  # a set is in no order
    return hashlib.blake2b(msgspec.msgpack.encode([snapshot, rows, commands]), digest_size=8).digest()
