"""An oracle: each scheduler, also a recovered one, equals the fold of its run's stored events (a scheduler to
which they are applied again), and the journal's decisions are those of the fold."""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from stretto.bus.messages import events
from stretto.bus.payloads import decoder, is_split
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.schedule.fold import apply, decisions
from stretto.kernel.schedule.outcomes import Outcome, admit
from stretto.kernel.schedule.scheduler import Scheduler

_EVERY = 64
"""Compare only at event numbers that are multiples of this, because digests take time."""


Kernel = tuple[str, int]
"""(subject of a run's events, lease epoch)."""


class FoldOracle:
    """Compares schedulers of kernels with folds of their events. `read` returns a message of a run's log."""

    def __init__(self, read: Callable[[str, int], bytes]) -> None:
        self.violations: list[str] = []
        self.samples = True
        """Whether the run samples the sequences that it trains on."""
        self._read = read
        self._folds: dict[str, tuple[tuple[int, int, int], Scheduler]] = {}
        """Subject of a run's events -> ((incarnation, values, number of rows), fold)."""
        self._decided: dict[str, list[events.Decision]] = {}
        """Subject -> decisions of the fold that no stored event records yet."""
        self._owner: dict[str, int] = {}
        """Subject -> lease epoch of the owning kernel."""
        self._heard: Counter[Kernel] = Counter()
        self._begun: dict[Kernel, Scheduler] = {}
        """Kernel -> copy of its scheduler from before it owned the run."""
        self._digests: dict[tuple[Kernel, int], bytes] = {}
        """(kernel, number of an event) -> digest of the kernel's scheduler, until the fold gets the event."""
        self._latest: tuple[Scheduler, list[Any], Scheduler | None] | None = None
        """(scheduler that has applied an event, its new commands, for `RunOwned` a copy from before)."""

    def apply(self, scheduler: Scheduler, event: events.Input, outcome: Outcome | None = None) -> None:
        """Apply an event as the kernel's `apply` does, and note the commands."""
        scheduler_before = copy.deepcopy(scheduler) if isinstance(event, events.RunOwned) else None
        self._latest = scheduler, _apply(scheduler, event, outcome), scheduler_before

    def hear(self, writer: JournalWriter, event: events.Event) -> None:
        """Queue an event as `JournalWriter.hear` does, and note the digest of the scheduler."""
        _hear(writer, event)
        kernel = writer.names.events, writer.epoch
        number = self._heard[kernel]
        self._heard[kernel] += 1
        if self._latest is None:
            return  # no scheduler has applied this event
        scheduler, commands, scheduler_before = self._latest
        self._latest = None
        if scheduler_before is not None:
            self._begun[kernel] = scheduler_before
        elif number % _EVERY == 0:
            self._digests[kernel, number] = _digest(scheduler, commands)

    def __call__(self, sender: str, subject: str, data: bytes, head: bytes) -> None:
        """Check the events in a message that was published or stored."""
        if not subject.endswith(".journal.events") or is_split(data):
            return
        batch = msgspec.msgpack.decode(data, type=events.EventBatch)
        kernel = subject, batch.lease_epoch
        for number, event in enumerate(batch.decoded(), start=batch.first):
            if not isinstance(event, events.Input):
                self._compare(kernel, event)
                continue
            if isinstance(event, events.RunOwned):
                self._begin(kernel, event)
            outcome = None
            if isinstance(event, events.OutcomeRead):
                outcome = self._outcome(subject.split(".")[1], event.sequence)
            fold = self._folds[subject][1]
            commands = _apply(fold, event, outcome)
            if missing := self._decided.pop(subject, []):
                self.violations.append(f"the kernel of lease {batch.lease_epoch} has not recorded {missing}")
            self._decided[subject] = [*decisions(fold.commands())]
            kernel_digest = self._digests.pop((kernel, number), None)
            if kernel_digest is not None and kernel_digest != _digest(fold, commands):
                self.violations.append(
                    f"after {event} the scheduler of the kernel of lease {batch.lease_epoch} is not the "
                    "fold of its events"
                )

    def _begin(self, kernel: Kernel, event: events.RunOwned) -> None:
        """Compare the scheduler of a new kernel with the fold. If the kernel has another incarnation, other
        values or another number of rows, its scheduler becomes the new fold."""
        scheduler = self._begun.pop(kernel)
        identity = event.incarnation, event.values, scheduler.settings.rows
        former_identity, fold = self._folds.get(kernel[0], (None, scheduler))
        self._folds[kernel[0]] = identity, fold if former_identity == identity else scheduler
        self._owner[kernel[0]] = kernel[1]
        self._decided.pop(kernel[0], None)
        if former_identity == identity and _digest(fold, []) != _digest(scheduler, []):
            self.violations.append(f"the kernel of lease {kernel[1]} begins in another state than the fold")

    def _compare(self, kernel: Kernel, decision: events.Event) -> None:
        expected = self._decided.get(kernel[0], [])
        if isinstance(decision, events.Observation):
            return
        if decision in expected:
            expected.remove(decision)
        elif self._owner.get(kernel[0]) == kernel[1]:  # a replaced kernel's state differs from the fold
            self.violations.append(
                f"the kernel of lease {kernel[1]} has decided {decision}; the fold has not"
            )

    def _outcome(self, run: str, sequence: int) -> Outcome:
        outcome = decoder(Outcome)(self._read(run, sequence))
        return admit(outcome, sequence, samples=self.samples)


_COMMANDS = "_commands"
"""Attribute of a scheduler and its parts: commands that the kernel has not read yet."""
_hear = JournalWriter.hear  # the real method, before the oracle replaces it


def _apply(scheduler: Scheduler, event: events.Input, outcome: Outcome | None) -> list[Any]:
    """Apply an event to a scheduler. Return the new commands, which also stay in the scheduler."""
    commands = vars(scheduler)[_COMMANDS]
    num_before = len(commands)
    apply(scheduler, event, outcome)
    return commands[num_before:]


def _digest(scheduler: Scheduler, commands: list[Any]) -> bytes:
    snapshot = scheduler.snapshot()
    rows = sorted(snapshot.setbacks.rows)
    snapshot.setbacks.rows.clear()  # a set has no order
    return hashlib.blake2b(msgspec.msgpack.encode([snapshot, rows, commands]), digest_size=8).digest()
