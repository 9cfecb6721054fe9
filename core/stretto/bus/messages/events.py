"""Events: what the scheduler of a kernel hears, in the order in which it hears it.

The kernel writes them into the journal's stream. With the same settings and the same events a scheduler gives
the same commands. What workers send is an event as it is: `TicketStarted` and `Progress`.
"""

from __future__ import annotations

import msgspec

from stretto.bus.messages.base import Message
from stretto.bus.messages.tickets import Progress, TicketStarted


class RunOwned(Message, frozen=True):
    """A kernel owns the run from here on: the first event of each kernel."""

    incarnation: int
    """Incarnation of the weights from which it continues."""
    values: int
    """Number of its values: 1 at the run's start, and one more with each change."""
    attempts_from: int
    """Attempts of tickets up to this number are those of former kernels."""


class ScheduleStarted(Message, frozen=True):
    """The workers are ready: tickets may be issued."""

    version: int
    """Training version at which the run starts or continues."""


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


class BatchesReleased(Message, frozen=True):
    """What held the next batch back, such as a checkpoint, is over."""


class RunClosing(Message, frozen=True):
    """The run ends early: no ticket is issued any more, and no batch begins."""


Event = (
    RunOwned
    | ScheduleStarted
    | TicketStarted
    | Progress
    | OutcomeRead
    | WorkerGone
    | StepTrained
    | BatchesReleased
    | RunClosing
)
"""Everything that changes the state of a scheduler."""


class EventBatch(Message, frozen=True):
    """Kernel to the journal's stream: the events since the previous message of this kind, in order."""

    lease_epoch: int
    first: int
    """Number of the first event among those of this kernel, from 0 on."""
    events: tuple[msgspec.Raw, ...]
    """Each is an `Event`. A reader that does not know a kind can go on behind it."""
