"""The journal: what happens in a run, in order, and the kernel's lease.

An input changes the scheduler's state: with the same settings and inputs, a scheduler decides the same. The
workers' messages `TicketStarted` and `Progress` are inputs. A decision follows the input that leads to it, in
the same message; a kernel that continues the run compares the decision with that of its own scheduler. An
observation changes no state. All figures and times that people see come from these events.
"""

import hashlib
from typing import Literal, get_args

import msgspec

from stretto.bus.messages.base import Message
from stretto.bus.messages.tickets import Progress, Purpose, TicketStarted
from stretto.bus.messages.training import RowRef
from stretto.rl.drift import Drift

Account = Literal["filtered", "expired", "failed"]
"""An account of the ledger for tickets that end without being trained."""
WorkerState = Literal["joined", "ready", "left", "lost"]
CauseKind = Literal[
    "evaluation", "checkpoint", "publication", "swap", "engines", "late_ticket", "groups", "overhead"
]

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
    "publication": "publication of the weights",
    "swap": "swap to version {}",
    "engines": "absent engines",
    "late_ticket": "ticket {}",
    "groups": "groups",
    "overhead": "stretto itself",
}


class RunOwned(Message, frozen=True):
    """A kernel owns the run from here on: the first event of each kernel."""

    incarnation: int
    """Incarnation of the weights from which the kernel continues."""
    version: int
    """Training version at which the run starts or continues."""
    values: int
    """Number of the run's set of values: 1 at the start, and one more after each change of a value."""
    layout: str
    """Training engines, processes and threads. With others, a repeated step may differ in some bits."""
    attempts_from: int
    """Attempts of tickets up to this number are those of former kernels."""


class ScheduleStarted(Message, frozen=True):
    """The workers are ready: tickets may be issued."""

    held: tuple[TicketStarted, ...] = ()
    """Attempts of a former kernel that rollout workers continue."""


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
    """Whether the worker finished its tickets and left. If not, the worker was lost."""


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
    """A user has given up the batch under way, and its tickets expire."""

    version: int
    """Version at which its step began."""


class BatchesReleased(Message, frozen=True):
    """The next batch may begin: the checkpoint, or whatever held it back, is done."""


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
    """Decision: a curriculum chose these rows, for all new tickets that are admitted together."""

    version: int
    """Training version when the rows were drawn."""
    draws: tuple[tuple[int, int], ...]
    """(ticket, row). A dataset made of several numbers the rows of all of them, one after the other."""


Measure = Literal["accuracy", "reward"]
"""The metric of a held-out score."""


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
    """Accuracy, or else reward, on the rows of each source of a dataset made of several."""
    reward: float | None = None
    """Mean reward of the samples; None if no row has a result."""
    reward_std: float = 0.0
    """Standard deviation of the samples' rewards."""
    some_accuracy: float | None = None
    """Mean `accuracy` of the samples that have this metric, if other samples do not have it."""
    some_accuracy_answers: int = 0
    """Number of samples behind `some_accuracy`."""


class EvaluationEnded(Message, frozen=True):
    """Decision: a held-out evaluation is complete."""

    result: Evaluation


Decision = TicketsIssued | TicketsRetired | BatchStarted | RowsDrawn | EvaluationEnded
"""What the scheduler decides from its inputs, as far as readers need it."""


class KernelBegan(Message, frozen=True):
    """A kernel begins to change the run's files. Earlier reports about versions after `version` no
    longer count: the steps of these versions are repeated, or lost."""

    lease_epoch: int
    version: int
    """Version of the checkpoint from which the kernel continues; 0 in a new run."""
    wall_s: float
    """Seconds of the run so far, including those of former kernels up to the checkpoint."""


class FleetChanged(Message, frozen=True):
    """A worker joined, can be called, or is gone."""

    worker: str
    state: WorkerState
    how: str = ""
    """How the worker was lost, or why it left."""


class Replaced(Message, frozen=True):
    """A trainer or the kernel was lost while other processes lived on, and was replaced."""

    began: float
    """Unix time of the loss; for a kernel, the time of its last event."""
    lost: str
    """The worker, or `kernel`."""
    how: str
    """How the worker or kernel was lost."""
    version: int
    """Version of the weights at the loss."""
    repeated: int
    """Number of steps after the checkpoint that were trained again."""


class WeightsServed(Message, frozen=True):
    """An inference worker serves other weights, or the same ones for another purpose."""

    began: float
    """Unix time at which the kernel requested the swap."""
    worker: str
    version: int
    exact: bool
    """Whether the worker now serves an evaluation alone."""
    are_new: bool
    """Whether the worker served other weights before."""
    pause_s: float
    """Seconds in which the engine could sample no token."""
    drift: Drift | None
    """Drift of the canary; None if it was not compared."""
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
    """Seconds of work, as the trainer measured them: without the time of request and answer."""


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
    """Causes that training waited for since the previous step, in order, with seconds; empty if repeated."""
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
    """Mean seconds of work of the inference workers since the kernel's start."""
    verify_busy_s: float
    """Seconds of work of all verifiers since the kernel's start."""
    cores_used: float
    cores_idle: float
    calls: tuple[CallTime, ...]
    skipped: tuple[str, ...]
    """Each model with a gradient that was not finite: its name and a slash; for the lead, empty text."""
    ledger: dict[str, int]
    variants: dict[str, dict[str, int]]
    """Accounts of each variant's tickets; empty without variants."""
    not_trained: dict[str, int]
    """The most frequent reasons why tickets were not trained since the previous step, with their numbers."""
    known: bool = False
    """Whether a former kernel has recorded the figures, and its trainers live on: nothing is repeated."""
    memory_used: float | None = None
    """Share of the memory of the kernel's machine; None in journals of an older stretto."""
    cores_of_roles: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Role -> its part of `cores_used`, with its child processes; see `CoreUse`."""


class VersionPublished(Message, frozen=True):
    """The weights of a version are published."""

    incarnation: int
    version: int
    digest: str
    """Digest of the weights. A repetition of the step must reach the same digest."""


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
    """Each is an `Event`. A reader can skip an event of an unknown kind."""
    times: tuple[float, ...]
    """Unix time of each event, with 4 decimals. It never goes back within a kernel."""
    former: str = ""
    """Digest of the previous message of this kind, also by another kernel; empty if there is none."""

    def decoded(self) -> list[Event]:
        """Return the events. Raise DecodeError if this stretto does not know the kind or the form of one."""
        return [_decode(event) for event in self.events]

    @property
    def digest(self) -> str:
        """128 bits of the BLAKE2b hash of the message, in hexadecimal digits."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()


class JournalHead(msgspec.Struct, frozen=True):
    """The newest `EventBatch` at a moment. Its digest reveals a change of any earlier one."""

    sequence: int
    """Sequence number in the journal's stream; 0 before the first."""
    digest: str


class KernelLease(Message, frozen=True):
    """Kernel to the journal's stream, at the kernel's start: this kernel owns the run, and from here on only
    this kernel writes the journal. The message's sequence number is the lease epoch."""

    place: str
    """The run's folder."""
