"""The journal: what the scheduler of a kernel hears and what it decides, in order, and the kernel's lease.

With the same settings and the same events a scheduler gives the same commands. What workers send is an event
as it is: `TicketStarted` and `Progress`. A decision follows the event that leads to it, in the same message.
Readers learn from it what was done, and a kernel that continues the run compares it with what its own
scheduler decides.
"""

from __future__ import annotations

import hashlib

import msgspec

from stretto.bus.messages.base import Message
from stretto.bus.messages.tickets import Progress, TicketStarted
from stretto.bus.messages.training import RowRef


class RunOwned(Message, frozen=True):
    """A kernel owns the run from here on: the first event of each kernel."""

    incarnation: int
    """Incarnation of the weights from which it continues."""
    version: int
    """Training version at which the run starts or continues."""
    values: int
    """Number of its values: 1 at the run's start, and one more with each change."""
    layout: str
    """Training engines, processes and threads. With another layout, a repeated step may differ in some
    bits."""
    attempts_from: int
    """Attempts of tickets up to this number are those of former kernels."""


class ScheduleStarted(Message, frozen=True):
    """The workers are ready: tickets may be issued."""


class OutcomeRead(Message, frozen=True):
    """The outcome of a ticket is in the log."""

    sequence: int
    """Sequence number of the outcome in the log."""


class WorkerGone(Message, frozen=True):
    """A rollout worker is no member of the run any more."""

    worker: str
    drained: bool
    """Whether it has finished its tickets and left. Else it is lost."""


class StepTrained(Message, frozen=True):
    """A batch is trained, and its weights are published or will be."""

    version: int
    """The version that the step has reached."""
    hold: bool
    """Whether the next batch waits for `BatchesReleased`."""
    divergence: float | None = None
    """Divergence of the batch, in nats per token; None if it is unknown or was not measured."""
    skipped: bool = False
    """Whether the step did not change some model, because its gradient was not finite."""


class BatchesReleased(Message, frozen=True):
    """What held the next batch back, such as a checkpoint, is over."""


class RunClosing(Message, frozen=True):
    """The run ends early: no ticket is issued any more, and no batch begins."""


class RunEnded(Message, frozen=True):
    """The kernel ends, and tells its user why."""

    status: str
    reason: str


Input = (
    RunOwned
    | ScheduleStarted
    | TicketStarted
    | Progress
    | OutcomeRead
    | WorkerGone
    | StepTrained
    | BatchesReleased
    | RunClosing
    | RunEnded
)
"""Everything that changes the state of a scheduler."""


class BatchStarted(Message, frozen=True):
    """Decision: this batch is trained next."""

    version: int
    tickets: tuple[int, ...]
    rows: tuple[RowRef, ...]
    """The rows of the batch, in order. With the weights of `version` they determine the next weights."""


class RowsDrawn(Message, frozen=True):
    """Decision: a curriculum chose these rows for new tickets, all those that are admitted at once."""

    version: int
    """Training version when the rows were drawn."""
    draws: tuple[tuple[int, int], ...]
    """(ticket, row). A dataset made of several has their rows one after the other."""


class Evaluation(msgspec.Struct, frozen=True):
    """Result of one held-out evaluation."""

    version: int
    """Version of the weights that sampled every token of the evaluation."""
    accuracy: float | None
    """Mean of the samples' `accuracy` metric. A sample without this metric counts with its reward. None if no
    row has a result."""
    samples: int
    """Number of samples with a result."""
    failed: int
    """Number of rows without a result."""
    sources: dict[str, float] = msgspec.field(default_factory=dict)
    """Accuracy on the rows of each source, if the dataset is made of several."""


class EvaluationEnded(Message, frozen=True):
    """Decision: a held-out evaluation is complete."""

    result: Evaluation


Decision = BatchStarted | RowsDrawn | EvaluationEnded


class VersionPublished(Message, frozen=True):
    """The weights of a version are published. It changes no scheduler."""

    incarnation: int
    version: int
    digest: str
    """A repetition of the step must reach it."""


Event = Input | Decision | VersionPublished
"""Everything that the journal holds."""


class EventBatch(Message, frozen=True):
    """Kernel to the journal: the events since the previous message of this kind, in order."""

    lease_epoch: int
    first: int
    """Number of the first event among those of this kernel, from 0 on."""
    events: tuple[msgspec.Raw, ...]
    """Each is an `Event`. A reader that does not know a kind can go on behind it."""
    former: str = ""
    """Digest of the message of this kind before it, also of another kernel; empty if there is none."""

    def decoded(self) -> list[Event]:
        """Return the events.

        Raises:
            msgspec.DecodeError: if one is of a kind or a form that this stretto does not know.
        """
        return [msgspec.msgpack.decode(each, type=Event) for each in self.events]

    @property
    def digest(self) -> str:
        """128 bits of the BLAKE2b hash of the message, in hexadecimal digits."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()


class JournalHead(msgspec.Struct, frozen=True):
    """The newest message with events at a moment. Who knows it notices a change of an earlier one."""

    sequence: int
    """Sequence number in the journal's stream; 0 before the first."""
    digest: str


class KernelLease(Message, frozen=True):
    """Kernel to the journal's stream, at its start: it owns the run, and from here on it alone writes the
    journal. The sequence number is the lease epoch."""

    place: str
    """The run's folder."""
