"""Every message that travels between the processes of a run, in one file.

A message is a msgpack array: its tag, `Name/version`, then its fields in order. A change may append a field
with a default. Any other change raises the version in the tag, and readers refuse versions that they do not
know.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

from stretto.array import Array
from stretto.bus.lock import KernelLock
from stretto.component import NonNegativeInt
from stretto.engine import Digest, Finish, GenerateRequest, Load, SwapReport
from stretto.environment import Feedback
from stretto.errors import BusError
from stretto.launcher import ROLES, Role
from stretto.tools import ToolAnswer
from stretto.tracing import Traceparent
from stretto.weights import WeightsNote

__all__ = [
    "SERVER",
    "WORKER_VERBS",
    "Abort",
    "AbortTicket",
    "Answers",
    "AskColumn",
    "AskImage",
    "AskLoad",
    "AskMeetingPlace",
    "AskPublished",
    "AskRanks",
    "AskSharedRows",
    "AskTools",
    "AskWeights",
    "Beacon",
    "CallDone",
    "ChunkBatch",
    "ChunkHead",
    "Column",
    "Confirm",
    "Drain",
    "Draining",
    "Drift",
    "EndStep",
    "EngineFigures",
    "EnvironmentAnswer",
    "Evaluation",
    "Follow",
    "Following",
    "Generate",
    "GroupDone",
    "GroupFailed",
    "Heartbeat",
    "ImagePart",
    "Join",
    "JournalBatch",
    "JournalChange",
    "JournalDraws",
    "JournalEntry",
    "JournalEvaluation",
    "JournalStep",
    "Kept",
    "KeptText",
    "KernelLease",
    "Leaving",
    "LoadCheckpoint",
    "LoadReport",
    "Loaded",
    "MeetingPlace",
    "Member",
    "Message",
    "Party",
    "Peer",
    "Prefetch",
    "Progress",
    "Published",
    "Purpose",
    "Ranks",
    "Refusal",
    "RetiredTickets",
    "Routes",
    "RowRef",
    "RunCall",
    "RunScaled",
    "RunStatus",
    "RunStopping",
    "RunTool",
    "Save",
    "Saved",
    "ScaleRun",
    "ScoreSamples",
    "Scored",
    "ScoredRow",
    "SharedRows",
    "StepEnded",
    "StopRun",
    "StoredImage",
    "Subjects",
    "Swap",
    "SwapDone",
    "TellEnvironment",
    "Ticket",
    "TicketRecord",
    "TicketStarted",
    "ToolDone",
    "ToolList",
    "TrainedRow",
    "TrainedRows",
    "TrajectoryBundle",
    "Wait",
    "WeightsAnswer",
    "Welcome",
    "WireTrajectory",
    "WorkerId",
    "WorkerProcess",
    "is_worker_id",
]


Party = Literal["kernel", "trainer", "inference", "rollout", "verifier", "samples", "viewer", "operator"]
"""Who may be at an end of the bus: the kernel, a worker of a role, the sample writer, a viewer, who only
listens, or the operator, who gives commands to a run: its user."""

_WORKER_ID = rf"\A(?:{'|'.join(ROLES)})-[A-Za-z0-9_-]{{1,64}}\Z"
WorkerId = Annotated[str, msgspec.Meta(pattern=_WORKER_ID)]
"""Id of a worker, such as `rollout-0`. The bus makes subjects from it, so it has no other characters."""
_NONCE = r"\A[A-Za-z0-9]{1,64}\Z"
Nonce = Annotated[str, msgspec.Meta(pattern=_NONCE)]
"""Random text that a worker draws at its start. It distinguishes a restarted worker from the former process,
and is a part of the subjects of requests to the worker: so only the process that they are for hears them."""
VariantName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_]{0,32}\Z")]
"""Name of a variant in the run file; empty for the run's own sections."""
InboxToken = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9]{1,64}\Z")]
"""The part of a process's inbox subjects that only this process has."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=lambda name: f"{name}/1"):
    """Base of every message that is published on its own. Parts of messages are plain structs."""


class Refusal(Message, frozen=True):
    """Sent in place of the answer to a request: the reason why there is no answer."""

    reason: str


# ------------------------------------------------------------------------------------- membership


class Beacon(Message, frozen=True, tag="Beacon/2"):
    """Kernel to all workers, every second and at every change: the kernel is alive."""

    lease_epoch: int
    """Fencing number of the kernel's lease. A worker obeys the highest number that it has seen."""
    version: int
    """Training version."""
    state: Literal["running", "over"]
    """At `over` every worker leaves."""


class EngineFigures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What routing needs of an engine's `Load`, from its latest heartbeat."""

    version: int
    """Policy version that the engine serves."""
    samples: int
    """Number of samples that the engine is decoding or that wait."""
    slots: int
    """Number of samples that the engine can decode at once."""
    generated_tokens: int


class WorkerProcess(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One process of a worker, to send requests to."""

    worker: WorkerId
    nonce: Nonce


class Peer(WorkerProcess, frozen=True):
    """An inference or verifier worker that a rollout worker may call."""

    figures: EngineFigures | None = None
    """None for a verifier, and for an engine before its first figures."""
    exact_version: int | None = None
    """The version that an inference worker serves while it is lent to an evaluation. It then serves only that
    evaluation. None for other workers."""
    closed: bool = False
    """Whether the rollout worker may only finish the calls that it has there: the worker leaves, or the
    rollout worker has enough others now."""

    @property
    def role(self) -> str:
        """The worker's role, which its id begins with."""
        return self.worker.partition("-")[0]


class Routes(Message, frozen=True, tag="Routes/2"):
    """Kernel to one rollout worker, every second and at every change of them: the worker may call these
    workers, and no others."""

    lease_epoch: int
    peers: tuple[Peer, ...]
    """A few of each kind: of the verifiers, of the engines of training, and of those lent to each
    evaluation."""


class Join(Message, frozen=True, tag="Join/2"):
    """Worker to kernel, answered by `Welcome`: a process with this role has started."""

    worker: WorkerId
    role: Role
    place: str
    """Where the worker runs, for people."""
    nonce: Nonce
    token: str
    """Proof that the process may join under this id (see `stretto.bus.joining`)."""
    stretto: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Version of stretto that the process has. The kernel accepts only its own."""


class Welcome(Message, frozen=True, tag="Welcome/3"):
    """What a worker needs to know about the run."""

    config: bytes
    """The composed run as a plain mapping, in msgpack."""
    run: str
    folder: str
    lease_epoch: int
    grace_s: float
    """A worker that can see the kernel's lock leaves after this many seconds without beacon and lock."""
    fingerprints: dict[str, str]
    """Fingerprint of each dataset, by the key of its section."""
    outage_s: float
    """A worker that cannot see the lock leaves after this many seconds without a beacon."""
    lock: KernelLock
    many_machines: bool = False
    """Whether the launcher may start workers on other machines than the kernel's."""


class AskRanks(Message, frozen=True):
    """Trainer to kernel, answered by `Ranks` when all trainers have joined."""


class Ranks(Message, frozen=True):
    """The processes of all trainers of this kernel, which are never replaced while it lives."""

    nonces: dict[WorkerId, Nonce]


SERVER = "nats-server"
"""Name of the server in `Wait.who`."""


class Wait(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that a process has sent and that is not answered yet."""

    who: str
    """The process that has to answer: a worker, `kernel` or `SERVER`."""
    verb: str
    seconds: float


class Heartbeat(Message, frozen=True):
    """Worker to kernel, every second, from a thread of the worker: the process is alive."""

    worker: WorkerId
    nonce: str
    ready: bool
    """Whether the worker can be called."""
    busy_s: float = 0.0
    """Seconds of work since the worker's start, as the worker measures them."""
    load: Load | None = None
    """Load figures of the engine. Only inference workers send them."""
    tickets: int = 0
    """Tickets that a rollout worker is working on."""
    refused: int = 0
    """Number of malformed messages that the worker has refused."""
    blocked_s: float = 0.0
    """Seconds for which the worker's event loop has stood still; 0 while it runs."""
    wait: Wait | None = None
    """The worker's oldest request without an answer."""
    leaving: bool = False
    """Whether the worker drains: it finishes the work that it has, takes no new work, and then leaves."""


class RunStatus(Message, frozen=True):
    """Kernel to viewers, every two seconds: what `status.json` holds."""

    content: bytes
    """A `stretto.records.status.Status` in JSON."""


class Drain(Message, frozen=True):
    """Kernel to worker, answered by `Draining`: finish your work, take no new work, and leave."""

    lease_epoch: int


class Draining(Message, frozen=True):
    """The worker drains. It says `Leaving` when it is done."""


class Leaving(Message, frozen=True):
    """Worker to kernel: the worker leaves. It has finished its work or handed it back."""

    worker: WorkerId
    nonce: str
    reason: str
    final: bool = False
    """Whether the same failure would occur again after a restart of the worker or a resume of the run."""
    drained: bool = False
    """Whether the worker leaves because it was asked to, after a drain."""


# ------------------------------------------------------------------------------------- operation

ProcessNumber = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
"""Number of processes of a role or of a worker group."""


class ScaleRun(Message, frozen=True):
    """Operator to kernel, answered by `RunScaled`: change numbers of processes."""

    token: str
    """Proof that the operator is the run's user (see `stretto.bus.joining`)."""
    numbers: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=200)], ProcessNumber], msgspec.Meta(max_length=64)
    ]
    """Role, or path of a worker group such as `training` -> number of processes."""


class RunScaled(Message, frozen=True):
    """The kernel has begun to change the numbers."""

    done: tuple[str, ...]
    """What the kernel does, a sentence for each number."""


class StopRun(Message, frozen=True):
    """Operator to kernel, answered by `RunStopping`: end the run."""

    token: str
    now: bool
    """End at once, without a checkpoint. Otherwise the kernel finishes the step under way and writes one."""


class RunStopping(Message, frozen=True):
    """The run ends."""

    state: str
    """What the kernel does until then, in words."""


class AskRecords(Message, frozen=True):
    """Operator to kernel, answered by `Records`: which records the run has now."""

    token: str
    copy: Annotated[str, msgspec.Meta(max_length=64)]
    """Random text that the asking process draws at its start."""
    complete: bool = False
    """It has all records of a run that is over."""


class Records(Message, frozen=True):
    """The records in the run's folder (see `stretto.records.shared`)."""

    files: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=300)], tuple[Annotated[int, msgspec.Meta(ge=0)], int]],
        msgspec.Meta(max_length=100_000),
    ]
    """Path -> size in bytes, and time of the last change in nanoseconds."""
    owner: str
    """The text in the kernel's lock file."""
    over: bool
    """The run is over, and no record changes any more."""


class AskRecord(Message, frozen=True):
    """Operator to kernel, answered by `RecordPart`: send a part of a record."""

    token: str
    name: Annotated[str, msgspec.Meta(max_length=300)]
    offset: Annotated[int, msgspec.Meta(ge=0)]


class RecordPart(Message, frozen=True):
    """Bytes of a record from an offset on, at most 1 MiB. It is empty at the end of the file."""

    data: bytes


# ---------------------------------------------------------------------------------------- tickets

Purpose = Literal["train", "eval"]


class Ticket(Message, frozen=True):
    """Kernel to the rollout worker that takes it: permission to roll out one group."""

    id: int
    """Number of the ticket. Each purpose counts from 0."""
    attempt: int
    """Number of the attempt, from 1. It rises each time the kernel issues the ticket again."""
    purpose: Purpose
    row: int
    """Index in the dataset of its purpose."""
    min_version: int
    """The ticket's tokens have this version or a newer one. The tokens of an evaluation have exactly this
    version."""
    samples: int
    """Number of samples of the group, n."""
    traceparent: Traceparent = ""
    """Context of the ticket's trace."""
    variant: VariantName = ""
    """The variant of the run that the ticket tests; empty for the run's own sections."""

    @property
    def name(self) -> str:
        """`7/1`, or `eval-7/1`. The name is unique in the run."""
        return f"{'' if self.purpose == 'train' else 'eval-'}{self.id}/{self.attempt}"

    @property
    def exact_version(self) -> int | None:
        """The version that an evaluation ticket evaluates; None for a training ticket."""
        return self.min_version if self.purpose == "eval" else None


class TicketStarted(Message, frozen=True):
    """Rollout worker to kernel: the worker now works on this attempt."""

    worker: WorkerId
    purpose: Purpose
    ticket: int
    attempt: int


class Progress(Message, frozen=True):
    """Rollout worker to kernel: every sample of these tickets has begun, so the version of each ticket's
    oldest token is known."""

    worker: WorkerId
    oldest: tuple[tuple[int, int, int], ...]
    """(training ticket, attempt, version of its oldest token)."""


class AbortTicket(Message, frozen=True):
    """Kernel to all rollout workers: stop this attempt, because nobody waits for it any more."""

    purpose: Purpose
    ticket: int
    attempt: int


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the kernel knows of one trajectory of a finished group."""

    id: str
    """`ticket/attempt/index`."""
    sequence: int
    """Sequence number, in the log, of the bundle that holds the trajectory."""
    index: int
    """Position of the trajectory in that bundle."""
    length: int
    """Number of tokens, prompt included."""
    sampled: int
    """Number of tokens that the policy sampled."""
    oldest: int
    newest: int
    """`oldest` and `newest` are the versions of the trajectory's oldest and newest sampled token."""
    reward: float
    metrics: dict[str, float]
    finish: Finish
    part: bool = False
    """Whether the trajectory belongs to the same sample as the member before it."""


class GroupDone(Message, frozen=True):
    """Rollout worker to the log: all trajectories of one ticket are in the log. For the ledger, a group
    exists only through this message."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    members: tuple[Member, ...]
    """The log does not hold the data of evaluation tickets. If the run keeps the answers, `sequence` is the
    sequence number of their `Answers`."""
    seconds: float
    """Seconds from the start of the ticket."""
    generate_s: float = 0.0
    """The part of `seconds` in which at least one of the ticket's requests was at an inference engine."""
    score_s: float = 0.0
    """The part of `seconds` in which at least one of the ticket's calls was at a verifier: a reward, a tool
    or an environment."""
    record: int = 0
    """Sequence number of the attempt's `TicketRecord`; 0 if its samples are not kept."""
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """SHA-256 over all that is kept of the group (see `stretto.records.kept_sample`)."""
    images: tuple[int, ...] = ()
    """Sequence numbers of the images that the workflow added."""


class GroupFailed(Message, frozen=True):
    """Rollout worker to the log: this attempt produces no group."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    reason: str
    filtered: bool = False
    """Whether the row is not fit to train on (for example, its prompt is too long). False for a failure."""
    record: int = 0
    """Sequence number of the attempt's `TicketRecord`; 0 if its samples are not kept."""


class WireTrajectory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trajectory's data. L tokens."""

    id: str
    tokens: Array
    """(L,) int32."""
    loss_mask: Array
    """(L,) bool."""
    logprobs: Array
    """(L,) float32, logprobs of the behaviour policy."""
    versions: Array
    """(L,) int32."""
    reward: float
    metrics: dict[str, float]
    finish: Finish
    engine: str
    sample: int
    """Index of the ticket's sample that the trajectory is, or is a part of."""
    images: tuple[Digest | NonNegativeInt, ...] | None = None
    """The images, in the order of their places in the tokens: the index of an image of the row, or the
    SHA-256 of a `StoredImage` that follows in the log. None: all images of the row."""

    @property
    def added_images(self) -> list[str]:
        """SHA-256 of each image that the workflow added, in the order of their places."""
        return [image for image in self.images or () if isinstance(image, str)]


class StoredImage(Message, frozen=True):
    """Rollout worker to the log, after the trajectories that name it: an image that a workflow added. The
    subject names its SHA-256. Training reads it, and the sample writer keeps it."""

    file: bytes


class TrajectoryBundle(Message, frozen=True):
    """Rollout worker to the log: as many trajectories of one ticket as fit into one message.

    Training reads those of its own subject. Those of evaluations and of failed attempts have another subject:
    only the sample writer reads them."""

    ticket: int
    attempt: int
    row: int
    trajectories: tuple[WireTrajectory, ...]


class KeptText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trajectory as text."""

    prompt: str | None = None
    """The text before the first sampled token; None if it is the record's `prompt`."""
    text: str = ""
    """The text from the first sampled token on; with several turns, also the text between them."""
    messages: str = ""
    """The conversation as a JSON list, with its tool calls; empty if there was none."""


class TicketRecord(Message, frozen=True):
    """Rollout worker to the log, before an attempt's outcome: what people want to know of its samples."""

    purpose: Purpose
    ticket: int
    attempt: int
    row: int
    """Index in the dataset of its purpose."""
    worker: str
    dataset_row: str
    """The row of the dataset as a JSON object, as `stretto.models.images.with_names` returns it."""
    prompt: str
    """The prompt as the model got it; of several, that of the first trajectory."""
    texts: tuple[KeptText, ...]
    """In the order of the trajectories."""
    seconds: float
    """Seconds from the start of the ticket. For the parts, see `GroupDone`."""
    generate_s: float
    score_s: float

    @property
    def name(self) -> str:
        """The name of the attempt's ticket (see `Ticket.name`)."""
        return f"{'' if self.purpose == 'train' else 'eval-'}{self.ticket}/{self.attempt}"


class TrainedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the trainer computed for one trajectory. K sampled tokens."""

    id: str
    advantages: Array
    """(K,) float32; (1,) if all are equal, (0,) if the algorithm has no advantages."""
    importance_weights: Array
    """(K,) float32: current / behaviour, at the optimizer step that is the first to train the trajectory."""


class TrainedRows(Message, frozen=True):
    """Trainer to the log, after a step: what it computed for some of the batch's trajectories."""

    incarnation: int
    version: int
    """Training version at which the batch was trained."""
    rows: tuple[TrainedRow, ...]


class RetiredTickets(Message, frozen=True):
    """Kernel to the log: these training tickets ended without being trained."""

    tickets: tuple[tuple[int, str, str], ...]
    """(ticket, its account in the ledger, reason)."""


class Follow(Message, frozen=True):
    """Sample writer to the kernel, answered by `Following`: let me read the log from this place on."""

    start: int
    """Sequence number."""


class Following(Message, frozen=True):
    """The consumer with which the sample writer reads the log."""

    consumer: str
    start: int
    """Sequence number from which the consumer reads: the one that was asked for; or 1, if the log ends before
    it, because a part of it was lost."""
    last: int
    """Sequence number of the last message that the sample writer reads, at this moment."""


class Kept(Message, frozen=True):
    """Sample writer to the kernel, every few seconds: all samples of log messages before this place are on
    disk."""

    below: int
    """Sequence number."""


class Answers(Message, frozen=True):
    """Rollout worker to the log: the answers of an evaluation ticket, for people. The kernel copies the lines
    to a file and does not decode them."""

    lines: bytes
    """One JSON object a line, one line for each trajectory."""


# -------------------------------------------------------------------------------------- inference


class Generate(Message, frozen=True, tag="Generate/4"):
    """Rollout worker to an inference worker: answer this request, or continue it from `have`."""

    request: GenerateRequest
    inbox: InboxToken
    """The inference worker sends the chunks to `Subjects.chunks` of this inbox."""
    exact_version: int | None = None
    """The only version that may sample the request of an evaluation; None for training. A worker that is lent
    to an evaluation answers only the requests of that evaluation. Any other worker answers only the requests
    of training."""
    traceparent: Traceparent = ""
    """Context of the request's span."""
    sender: WorkerProcess | None = None
    """The rollout worker. Only requests with images name it: it has their files."""


class AskImage(Message, frozen=True):
    """Inference worker to a rollout worker, answered by `ImagePart`: send the file of an image."""

    digest: Digest
    offset: NonNegativeInt
    """Index of the first byte to send."""


class ImagePart(Message, frozen=True):
    """As much of an image's file as fits into a message."""

    size: NonNegativeInt
    """Bytes of the whole file."""
    data: bytes


class ChunkHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sample that the next `count` tokens of a `ChunkBatch` belong to."""

    request: str
    sample: int
    position: int
    count: int
    finish: Finish
    error: str


class ChunkBatch(Message, frozen=True):
    """Inference worker to a rollout worker: all new tokens of the rollout worker's requests."""

    worker: WorkerId
    heads: tuple[ChunkHead, ...]
    tokens: Array
    """(sum of counts,) int32, in the order of `heads`."""
    logprobs: Array
    versions: Array


class Confirm(Message, frozen=True):
    """Rollout worker to inference worker: forget these requests, because all their tokens have arrived."""

    requests: tuple[str, ...]


class Abort(Message, frozen=True):
    """Rollout worker to inference worker: stop this request, because nobody waits for it any more."""

    request: str


class Swap(Message, frozen=True, tag="Swap/2"):
    """Kernel to inference worker, answered by `SwapDone`: serve this version."""

    lease_epoch: int
    number: int
    """Number of the swap. It rises with every swap that a kernel asks for. The version may fall, for example
    when the swap is to the version of an evaluation."""
    note: WeightsNote
    exact: bool = False
    """Serve this version only to its evaluation, and sample nothing for training before the next swap."""
    traceparent: Traceparent = ""
    """Context of the kernel's span of the swap."""
    trainer: WorkerProcess | None = None
    """Rank 0 of the lead group, which has the version's `SharedRows`."""


class Drift(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Difference between an engine's and the trainer's logprobs of the canary, at the same version."""

    mean: float
    """Mean of |Δ| over the canary's tokens; infinite if either side returned a value that is not a number."""
    max: float
    """Largest |Δ| over the canary's tokens."""

    def within(self, bound: float) -> bool:
        """Whether the mean is at most `bound`."""
        return self.mean <= bound


class SwapDone(Message, frozen=True):
    """The version that the worker serves now. It is another version than the requested one if the worker had
    already done a later swap."""

    report: SwapReport
    """The engine's report of the swap, without the hashes."""
    fault: str = ""
    """The tensors that differ from the announced version, or another reason for the refusal; empty when all
    match. With a fault, the worker sends no token of that version."""
    drift: Drift | None = None
    """Drift of the canary; None if the worker did not compare the canary."""
    unscored: str = ""
    """Why the worker did not compare the canary, if the run has one."""
    engine_kl: float | None = None
    """Mean k3 estimate of KL(engine || trainer) at this version, in nats a token, over the trained tokens of
    the `SharedRows`; None if the worker did not compare the rows."""
    rows_unscored: str = ""
    """Why the worker cannot compare the rows; empty if there are no rows yet."""


class AskSharedRows(Message, frozen=True):
    """Inference worker to rank 0 of the lead group, answered by `SharedRows`: send rows that the trainer has
    scored with the weights of this version."""

    version: int


class ScoredRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of one sequence of the last batch. L tokens."""

    tokens: Array
    """(L,) int32, L >= 2."""
    trained: Array
    """(L - 1,) bool, one value for every token but the first: whether the token is trained."""
    logprobs: Array
    """(L - 1,) float32, the trainer's logprobs at temperature 1."""


class SharedRows(Message, frozen=True):
    """A few rows of the batch that led to a version. The inference worker measures the engine's error on
    them."""

    rows: tuple[ScoredRow, ...]
    """Empty if no batch led to the version, or if a newer version has replaced it."""
    unscored: str = ""
    """Why the trainer will never have such rows; empty otherwise."""


class AskLoad(Message, frozen=True):
    """Any process to inference worker, answered by `LoadReport`: report the engine's load."""


class LoadReport(Message, frozen=True):
    """The engine's load figures at this moment."""

    load: Load


class AskWeights(Message, frozen=True, tag="AskWeights/2"):
    """Inference worker to the trainer that publishes the weights, answered by `WeightsAnswer`: a question in
    the weight transport's own format."""

    question: bytes


class WeightsAnswer(Message, frozen=True):
    """The answer, in the weight transport's own format."""

    data: bytes


# --------------------------------------------------------------------------------------- scoring


class ScoreSamples(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `Scored`: score these completions of one row."""

    row: bytes
    """The dataset row, in msgpack."""
    completions: tuple[str, ...]
    columns: bytes
    """Further arguments that the reward gets by name: a msgpack map of lists, one value for each
    completion."""
    traceparent: Traceparent = ""
    """Context of the ticket's rollout."""
    variant: VariantName = ""
    """The variant whose reward scores; empty for the run's own reward."""


class Scored(Message, frozen=True):
    """Reward and metrics of each completion, or the error that prevented the scoring."""

    scores: tuple[tuple[float, dict[str, float]], ...]
    error: str = ""


class AskTools(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `ToolList`: list the tools of the run."""

    variant: VariantName = ""
    """The variant whose tools they are; empty for the run's own tools."""


class ToolList(Message, frozen=True):
    """All tools of the run."""

    schemas: bytes
    """A msgpack list of the tools' JSON schemas."""


class RunTool(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `ToolDone`: the policy calls a tool."""

    name: str
    arguments: bytes
    """A JSON object, as the policy wrote it."""
    traceparent: Traceparent = ""
    """Context of the ticket's rollout."""
    variant: VariantName = ""
    """The variant whose tool it is; empty for the run's own tools."""
    images: bool = False
    """Whether the policy reads images. If not, the answer has none."""


class ToolDone(Message, frozen=True):
    """The tool's answer to the policy."""

    answer: ToolAnswer


class TellEnvironment(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `EnvironmentAnswer`: the policy has answered."""

    arguments: bytes
    """The arguments of the environment, by name: a msgpack map."""
    traceparent: Traceparent = ""
    """Context of the ticket's rollout."""
    variant: VariantName = ""
    """The variant whose environment it is; empty for the run's own environment."""


class EnvironmentAnswer(Message, frozen=True):
    """The environment's feedback on the policy's answer, or the error that prevented it."""

    feedback: Feedback = Feedback()
    error: str = ""


# -------------------------------------------------------------------------------------- training


class RowRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of one sequence of a batch: a trajectory in the log, or a row of the dataset."""

    id: str
    sequence: int
    """Sequence number of the bundle in the log, or index of the dataset row."""
    index: int
    """Position in the bundle, or index among the sequences that are made from the dataset row."""
    group: int
    """Number of the ticket."""
    length: int
    """Number of tokens; 0 if only the trainers that read the row know it."""


class RunCall(Message, frozen=True, tag="Call/2"):
    """Kernel to rank 0 of a worker group, answered by `CallDone`: run one call of the dataflow. Rank 0
    informs the other ranks of its group."""

    lease_epoch: int
    incarnation: int
    version: int
    """Training version at which the trainers train the batch."""
    name: str
    rows: tuple[RowRef, ...]
    """The batch, in order. All calls of a step have the same rows."""
    traceparent: Traceparent = ""
    """Context of the step."""
    links: tuple[Traceparent, ...] = ()
    """Contexts of the batch's tickets, of those that are traced."""


class CallDone(Message, frozen=True, tag="CallDone/2"):
    """The statistics of a call. The call's data stays with the ranks that computed it."""

    statistics: dict[str, float]
    seconds: float


class AskColumn(Message, frozen=True):
    """Rank to rank, answered by `Column`: send the values that a call of this step wrote for these rows. The
    asking rank does not have them."""

    version: int
    key: str
    rows: tuple[int, ...]
    """Positions in the batch."""


class Column(Message, frozen=True):
    """The values of one column for some rows, concatenated in the order of the request."""

    values: Array
    per_token: bool
    """True if each token has a value, False if each row has one."""


class EndStep(Message, frozen=True):
    """Kernel to rank 0 of every worker group, answered by `StepEnded`: all calls are done; forget the batch.
    Rank 0 informs the other ranks of its group. The group of the lead model begins to publish its weights."""

    lease_epoch: int
    version: int
    """Version at which the step began. The weights are now those of `version + 1`."""
    needed: tuple[int, ...] = ()
    """Versions that evaluations still need. The trainers keep those of them that are published."""
    traceparent: Traceparent = ""
    """Context of the step."""


class StepEnded(Message, frozen=True):
    """The group is ready for the next step. Its lead model's weights may still be on their way into files."""


class AskPublished(Message, frozen=True):
    """Kernel to rank 0 of the lead model's group, answered by `Published` when the version is complete."""

    lease_epoch: int
    version: int


class Published(Message, frozen=True):
    """A version of the weights is published, as a whole."""

    note: WeightsNote


class Prefetch(Message, frozen=True):
    """Kernel to trainers: rows that the next batches will probably need."""

    rows: tuple[RowRef, ...]
    complete: bool = False
    """Whether the batches need no other rows, so that the trainers drop those that they have read."""


class AskMeetingPlace(Message, frozen=True):
    """Another rank to rank 0 of its worker group, answered by `MeetingPlace`: how do the ranks find each
    other?"""

    lease_epoch: int


class MeetingPlace(Message, frozen=True):
    """How the ranks of a worker group find each other (see `Context.rendezvous`)."""

    rendezvous: str


class LoadCheckpoint(Message, frozen=True):
    """Kernel to trainers, answered by `Loaded`: load the initial model or a checkpoint."""

    lease_epoch: int
    folder: str
    """A folder, or the URL of one. Empty for the initial model."""
    version: int
    needed: tuple[WeightsNote, ...] = ()
    """Older versions in the checkpoint that evaluations need. The trainers publish them again."""
    manifest: str = ""
    """SHA-256 of the checkpoint's `manifest.json`. A trainer compares files that it downloads with it."""


class Loaded(Message, frozen=True, tag="Loaded/2"):
    """The trainers have loaded the models."""

    note: WeightsNote | None = None
    """The published weights. Only the group of the lead model sends them."""
    needed: tuple[WeightsNote, ...] = ()
    """Notes of the older versions that were asked for, as they are published now."""


class Save(Message, frozen=True):
    """Kernel to trainers, answered by `Saved`: write models and optimizers into this folder."""

    lease_epoch: int
    folder: str
    """A folder, or the URL of one."""
    version: int
    needed: tuple[int, ...] = ()
    """Older versions that evaluations still need. The trainers copy their published weights into the folder
    too."""


class Saved(Message, frozen=True):
    """The trainers have written the files."""

    seconds: float
    uploaded: dict[str, str] = {}
    """Name -> SHA-256 of the files that all ranks have written to the URL. Empty for a folder."""


# --------------------------------------------------------------------------------------- journal


class JournalBatch(Message, frozen=True):
    """Kernel to the journal, before a batch is trained."""

    incarnation: int
    version: int
    rows: tuple[RowRef, ...]
    """The rows of the batch, in order. With the weights of `version` they determine the next weights."""
    tickets: tuple[int, ...]
    layout: str
    """Training engines, processes and threads. With another layout, a repeated step may differ in some
    bits."""
    seed: int


class JournalStep(Message, frozen=True):
    """Kernel to the journal, when a step is complete: the digest that a repetition of the step must reach."""

    incarnation: int
    version: int
    digest: str
    divergence: float | None = None
    """Divergence of the batch, in nats a token; None if it is unknown. When the step is repeated, the
    divergence gate uses this figure."""


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
    sources: dict[str, float] = {}
    """Accuracy on the rows of each source, if the dataset is made of several."""


class JournalEvaluation(Message, frozen=True, tag="JournalEvaluation/2"):
    """Kernel to the journal: a held-out evaluation is complete."""

    incarnation: int
    result: Evaluation


class JournalChange(Message, frozen=True):
    """Kernel to the journal, when a resumed run changes to new values. It comes before the first batch with
    the new values."""

    incarnation: int
    version: int
    """Training version from which the new values are in force."""
    values: int
    """Number of the values: 1 at the run's start, and one more with each change."""
    log_sequence: int
    """Sequence number of the last log message that the ledger had taken in. With it, a repetition expires the
    same tickets."""
    changed: dict[str, tuple[str, str]]
    """Dotted key -> (former value, new value), both as JSON."""


class JournalDraws(Message, frozen=True):
    """Kernel to the journal: the rows that a curriculum chose for new tickets. The kernel issues them when
    the server has stored this. All tickets that are admitted at once are in one entry."""

    incarnation: int
    version: int
    """Training version when the rows were drawn."""
    draws: tuple[tuple[int, int], ...]
    """(ticket, row). A dataset made of several has their rows one after the other."""


JournalEntry = JournalBatch | JournalStep | JournalEvaluation | JournalChange | JournalDraws
"""Everything that the journal holds."""


class KernelLease(Message, frozen=True):
    """A value in the run's state bucket: the kernel that owns the run. Its revision is the fencing number."""

    place: str


# -------------------------------------------------------------------------------------- subjects


WORKER_VERBS: dict[Role, dict[str, tuple[Party, ...]]] = {
    "trainer": {
        **dict.fromkeys(("load", "call", "end", "save"), ("kernel", "trainer")),
        **dict.fromkeys(("prefetch", "published"), ("kernel",)),
        **dict.fromkeys(("column", "meeting_place"), ("trainer",)),
        "weights": ("inference",),
        "shared_rows": ("inference",),
    },
    "inference": {
        **dict.fromkeys(("swap", "load", "drain"), ("kernel",)),
        **dict.fromkeys(("generate", "confirm", "abort"), ("rollout",)),
    },
    "rollout": {**dict.fromkeys(("routes", "drain"), ("kernel",)), "image": ("inference",)},
    "verifier": {
        "drain": ("kernel",),
        **dict.fromkeys(("score", "tools", "tool", "environment"), ("rollout",)),
    },
}
"""Role -> verb -> who may ask a worker of that role to do it. The server's permissions and the check of reply
subjects follow this table. Rank 0 of a group passes the kernel's requests on to the other trainers."""


class Subjects:
    """Names on the bus of one run: subjects, streams, consumers, buckets."""

    def __init__(self, run: str) -> None:
        self.root = f"st.{run}"
        self.beacon = f"{self.root}.beacon"
        self.status = f"{self.root}.status"
        self.ticket_started = self.kernel("rollout", "started")
        self.progress = self.kernel("rollout", "progress")
        self.abort_ticket = f"{self.root}.abort"
        self.log = f"{self.root}.log"
        self.trajectories = f"{self.log}.trajectories"
        self.groups = f"{self.log}.groups"
        self.kept_answers = f"{self.log}.answers"
        self.kept_trajectories = f"{self.log}.kept"
        self.records = f"{self.log}.records"
        self.trained = f"{self.log}.trained"
        self.retired = f"{self.log}.retired"
        self.tickets = f"{self.root}.tickets"
        self.journal = f"{self.root}.journal"
        self.tickets_stream = f"TICKETS_{run}"
        self.log_stream = f"LOG_{run}"
        self.journal_stream = f"JOURNAL_{run}"
        self.state_bucket = f"STATE_{run}"

    def image(self, digest: str) -> str:
        """Subject of an image in the log; `*` for all images."""
        return f"{self.log}.images.{digest}"

    @property
    def of_log(self) -> list[str]:
        """All subjects of the log."""
        return [*self.of_samples, self.kept_answers, self.image("*")]

    @property
    def of_samples(self) -> list[str]:
        """Subjects of the log that the sample writer reads."""
        return [
            *(self.trajectories, self.kept_trajectories, self.records),
            *(self.groups, self.trained, self.retired),
        ]

    def ticket(self, purpose: Purpose) -> str:
        """Subject of the tickets of a purpose. The name of their consumer is made from it."""
        return f"{self.tickets}.{purpose}"

    def kernel(self, party: Party, verb: str) -> str:
        """Subject of the messages and requests that a party sends to the kernel."""
        return f"{self.root}.kernel.{party}.{verb}"

    def worker(self, role: Role, worker: str, nonce: str, verb: str) -> str:
        """Subject of the requests and messages to one process of a worker.

        Raises:
            BusError: if `worker` is not a worker's id, or `nonce` not the nonce of a process.
        """
        return f"{self.root}.worker.{role}.{_checked(worker, nonce)}.{verb}"

    def inbox(self, party: Party) -> str:
        """Prefix of the inboxes of a party."""
        return f"{self.root}.inbox.{party}"

    def answers(self, asker: Party, answerer: Party) -> str:
        """Prefix of the subjects of all answers from `answerer` in the inboxes of `asker`."""
        return f"{self.inbox(asker)}.from.{answerer}"

    def chunks(self, inbox: str) -> str:
        """Subject of the chunks for the rollout worker with this inbox."""
        return f"{self.answers('rollout', 'inference')}.{inbox}.chunks.in"

    def parties(self, subject: str) -> tuple[tuple[Party, ...], Party]:
        """Return who may send requests to a subject, and who answers them."""
        to, *rest = subject.removeprefix(f"{self.root}.").split(".")
        party: Any = rest[0]  # `kernel` and `worker` made the subject
        return ((party,), "kernel") if to == "kernel" else (WORKER_VERBS[party][rest[-1]], party)


def is_worker_id(text: str) -> bool:
    """Whether a text is the id of a worker."""
    return re.search(_WORKER_ID, text) is not None


@lru_cache(maxsize=1024)
def _checked(worker: str, nonce: str) -> str:
    if not is_worker_id(worker):
        raise BusError(f"{worker!r} is not the id of a worker; expected an id such as 'rollout-0'")
    if re.search(_NONCE, nonce) is None:
        raise BusError(f"{nonce!r} is not the nonce of a process of {worker}; expected letters and digits")
    return f"{worker}.{nonce}"
