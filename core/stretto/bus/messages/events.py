"""The journal: what happens in a run, in order, and the kernel's lease.

An input changes the scheduler's state: with the same settings and the same inputs a scheduler gives the same
commands. What workers send is an input as it is: `TicketStarted` and `Progress`. A decision follows the input
that leads to it, in the same message. A kernel that continues the run compares it with what its own scheduler
decides. An observation changes no state. All figures and times that people see come from these events.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import msgspec

from stretto.bus.messages.base import Message
from stretto.bus.messages.inference import Drift
from stretto.bus.messages.tickets import Progress, Purpose, TicketStarted
from stretto.bus.messages.training import RowRef

Account = Literal["filtered", "expired", "failed"]
"""An account of the ledger for tickets that end without being trained."""
WorkerState = Literal["joined", "ready", "left", "lost"]
CauseKind = Literal["evaluation", "checkpoint", "swap", "engines", "late_ticket", "groups", "overhead"]

CAUSES: tuple[CauseKind, ...] = get_args(CauseKind)


class Cause(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What training waits for."""

    kind: CauseKind
    number: int = 0
    """The version of an evaluation or of a swap, or the number of a late ticket."""

    def __str__(self) -> str:
        return _CAUSES[self.kind].format(self.number)


_CAUSES: dict[CauseKind, str] = {
    "evaluation": "evaluation of version {}",
    "checkpoint": "checkpoint",
    "swap": "swap to version {}",
    "engines": "absent engines",
    "late_ticket": "ticket {}",
    "groups": "groups",
    "overhead": "stretto itself",
}


class RunOwned(Message, frozen=True):
    """A kernel owns the run from here on: the first event of each kernel."""

    incarnation: int
    """Incarnation of the weights from which it continues."""
    version: int
    """Training version at which the run starts or continues."""
    values: int
    """Number of its values: 1 at the run's start, and one more with each change."""
    layout: str
    """Training engines, processes and threads. With another one, a repeated step may differ in some bits."""
    attempts_from: int
    """Attempts of tickets up to this number are those of former kernels."""


class ScheduleStarted(Message, frozen=True):
    """The workers are ready: tickets may be issued."""

    held: tuple[TicketStarted, ...] = ()
    """The attempts of a former kernel on which rollout workers go on."""


class GroupFigures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished group in figures, as its rollout worker reports them."""

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


class OutcomeRead(Message, frozen=True):
    """The outcome of a ticket is in the log."""

    sequence: int
    """Sequence number of the outcome in the log."""
    group: GroupFigures | None = None
    """None for a ticket that failed."""


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


class BatchExpired(Message, frozen=True):
    """The batch under way is given up, and its tickets expire: a user said so."""

    version: int
    """Version at which its step began."""


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
    | BatchExpired
    | BatchesReleased
    | RunClosing
    | RunEnded
)
"""Everything that changes the state of a scheduler."""


class IssuedTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One attempt of a ticket."""

    purpose: Purpose
    ticket: int
    attempt: int
    row: int
    min_version: int
    """The version of an evaluation; for training, the oldest version that its tokens may have."""


class TicketsIssued(Message, frozen=True):
    """Decision: these attempts enter the work queue. Each ends any previous attempt of its ticket."""

    tickets: tuple[IssuedTicket, ...]


class RetiredTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ticket that will not be trained, or a row of an evaluation without a result."""

    purpose: Purpose
    ticket: int
    attempt: int
    """The newest attempt; 0 if the ticket was not issued yet."""
    account: Account
    reason: str


class TicketsRetired(Message, frozen=True):
    """Decision: these tickets will not be trained, or rows of an evaluation have no result."""

    tickets: tuple[RetiredTicket, ...]


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


Measure = Literal["accuracy", "reward"]
"""What a held-out score is."""


class Evaluation(msgspec.Struct, frozen=True):
    """Result of one held-out evaluation."""

    version: int
    """Version of the weights that sampled every token of the evaluation."""
    accuracy: float | None
    """Mean of the samples' `accuracy` metric; None if some sample has none."""
    samples: int
    """Number of samples with a result."""
    failed: int
    """Number of rows without a result."""
    sources: dict[str, float] = msgspec.field(default_factory=dict)
    """On the rows of each source of a dataset made of several: the accuracy, or else the reward."""
    reward: float | None = None
    """Mean reward of the samples; None if no row has a result."""
    reward_std: float = 0.0
    """Standard deviation of the samples' rewards."""
    some_accuracy: float | None = None
    """Mean of the `accuracy` metric of the samples that have it, if others have not."""
    some_accuracy_answers: int = 0
    """Number of these samples."""


class EvaluationEnded(Message, frozen=True):
    """Decision: a held-out evaluation is complete."""

    result: Evaluation


Decision = TicketsIssued | TicketsRetired | BatchStarted | RowsDrawn | EvaluationEnded
"""Everything that follows from inputs, as far as readers need it."""


class KernelBegan(Message, frozen=True):
    """A kernel begins to change the run's files. What the run reports of versions after `version` no longer
    counts: its steps are repeated, or lost."""

    lease_epoch: int
    version: int
    """Version of the checkpoint from which it continues; 0 in a new run."""
    wall_s: float
    """Seconds of the run so far, those of former kernels up to the checkpoint included."""


class FleetChanged(Message, frozen=True):
    """A worker joined, can be called, or is gone."""

    worker: str
    state: WorkerState
    how: str = ""
    """How the worker was lost, or why it left."""


class Replaced(Message, frozen=True):
    """A trainer or the kernel was lost while others lived on, and another one has taken its place."""

    began: float
    """Unix time at which it was lost; of a kernel, that of its last event."""
    lost: str
    """The worker, or `kernel`."""
    how: str
    """How it was lost."""
    version: int
    """Version of the weights then."""
    repeated: int
    """Number of steps that were trained again, after that of the checkpoint."""


class WeightsServed(Message, frozen=True):
    """An inference worker serves other weights, or the same ones for another purpose."""

    began: float
    """Unix time at which the kernel asked for it."""
    worker: str
    version: int
    exact: bool
    """Whether the worker now serves an evaluation alone."""
    are_new: bool
    """Whether it served other weights before."""
    pause_s: float
    """Seconds in which the engine could sample no token."""
    drift: Drift | None
    """Of the canary; None if it was not compared."""
    engine_kl: float | None
    """See `SwapDone`."""
    unscored: str
    """Why the canary was not compared; empty if it was, or if the run has none."""


class CallEnded(Message, frozen=True):
    """A worker group has carried out one call of a step."""

    began: float
    """Unix time."""
    group: str
    """Path of the worker group in the run file, such as `training`."""
    call: str
    version: int
    """Version at which the step began."""
    seconds: float
    """Seconds of work, as the trainer measured them. The rest is the way there and back."""


class CallTime(msgspec.Struct, frozen=True):
    """When a call ran, in seconds from the start of its step."""

    call: str
    group: str
    start_s: float
    end_s: float


class StepMeasured(Message, frozen=True):
    """The figures of a step. They go into `metrics.jsonl`."""

    version: int
    """Version after the step."""
    repeated: bool
    """Whether a kernel that continues the run has trained the batch again."""
    began: float
    """Unix time."""
    train_s: float
    """Seconds in which at least one call ran."""
    tickets: tuple[int, ...]
    waits: tuple[tuple[Cause, float], ...]
    """What training waited for since the step before, in order, with the seconds; empty if repeated."""
    tokens: int
    """Number of trained tokens."""
    of_batch: dict[str, float]
    """Figures of the batch's groups, such as `reward`."""
    statistics: dict[str, float]
    """Figures of the calls, such as `loss`, of variants, sources and draws, and of the staleness gate."""
    of_engines: dict[str, float]
    """How tickets spent their time, and how full the engines were; empty if the run samples nothing."""
    engines: int
    """Number of inference workers."""
    generate_busy_s: float
    """Their mean seconds of work since the kernel's start."""
    verify_busy_s: float
    """Seconds of work of all verifiers since the kernel's start."""
    cores_used: float
    cores_idle: float
    calls: tuple[CallTime, ...]
    skipped: tuple[str, ...]
    """The models with a gradient that was not finite: empty for the lead, else its name and a slash."""
    ledger: dict[str, int]
    variants: dict[str, dict[str, int]]
    """Accounts of each variant's tickets; empty without variants."""
    not_trained: dict[str, int]
    """The most frequent reasons of tickets that were not trained since the step before, with numbers."""
    known: bool = False
    """Whether a former kernel has recorded the figures, and its trainers go on: nothing is repeated."""


class VersionPublished(Message, frozen=True):
    """The weights of a version are published."""

    incarnation: int
    version: int
    digest: str
    """A repetition of the step must reach it."""


Observation = (
    KernelBegan | FleetChanged | Replaced | WeightsServed | CallEnded | StepMeasured | VersionPublished
)
"""Everything else that readers need. It changes no state."""

Event = Input | Decision | Observation
"""Everything that the journal holds."""
_decode = msgspec.msgpack.Decoder(Event).decode


class EventBatch(Message, frozen=True):
    """Kernel to the journal: the events since the previous message of this kind, in order."""

    lease_epoch: int
    first: int
    """Number of the first event among those of this kernel, from 0 on."""
    events: tuple[msgspec.Raw, ...]
    """Each is an `Event`. A reader that does not know a kind can go on behind it."""
    times: tuple[float, ...]
    """Unix time of each event, with 4 decimals. It never goes back within a kernel."""
    former: str = ""
    """Digest of the message of this kind before it, also of another kernel; empty if there is none."""

    def decoded(self) -> list[Event]:
        """Return the events. Raise DecodeError if this stretto does not know the kind or the form of one."""
        return [_decode(each) for each in self.events]

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
