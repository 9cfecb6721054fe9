"""Every message that travels between the processes of a run, in one file.

A message is an array in msgpack: its tag, `Name/version`, then its fields in order. Fields may be
appended with a default; any other change raises the version in the tag, and readers refuse the
versions they do not know.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stretto.array import Array
from stretto.engine import Finish, GenerateRequest, Load, SwapReport
from stretto.environment import Feedback
from stretto.launcher import Role
from stretto.tools import ToolAnswer
from stretto.weights import WeightsNote

__all__ = [
    "Abort",
    "AbortTicket",
    "Answers",
    "AskColumn",
    "AskLoad",
    "AskSharedRows",
    "AskTools",
    "AskWeights",
    "Beacon",
    "CallDone",
    "ChunkBatch",
    "ChunkHead",
    "Column",
    "Confirm",
    "Drift",
    "EndStep",
    "EnvironmentSaid",
    "Evaluation",
    "Generate",
    "GroupDone",
    "GroupFailed",
    "Heartbeat",
    "Join",
    "JournalBatch",
    "JournalChange",
    "JournalEvaluation",
    "JournalStep",
    "KernelLease",
    "Leaving",
    "LoadCheckpoint",
    "LoadReport",
    "Loaded",
    "Member",
    "Message",
    "Peer",
    "Prefetch",
    "Progress",
    "Purpose",
    "Refusal",
    "RowRef",
    "RunCall",
    "RunTool",
    "Save",
    "Saved",
    "ScoreSamples",
    "Scored",
    "ScoredRow",
    "SharedRows",
    "StepEnded",
    "Subjects",
    "Swap",
    "SwapDone",
    "TellEnvironment",
    "Ticket",
    "TicketStarted",
    "ToolDone",
    "ToolList",
    "TrajectoryBundle",
    "WeightsAnswer",
    "Welcome",
    "WireTrajectory",
]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=lambda name: f"{name}/1"):
    """Base of everything published on its own; parts of messages are plain structs."""


class Refusal(Message, frozen=True):
    """Instead of the answer to a request: why there is none."""

    reason: str


# ------------------------------------------------------------------------------------- membership


class Peer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker that others may call."""

    worker: str
    role: Role
    load: Load | None = None
    """Of inference workers: the figures of the latest heartbeat."""
    exact_version: int | None = None
    """Of an inference worker that is lent to an evaluation: the version it serves, to that alone."""


class Beacon(Message, frozen=True):
    """Kernel to all, every second and at every change: it lives, and who else does."""

    lease_epoch: int
    """Fencing number of the kernel's lease: a worker obeys the highest it has seen."""
    version: int
    """Training version."""
    state: Literal["running", "over"]
    """`over`: every worker leaves."""
    peers: tuple[Peer, ...]
    """Inference and verifier workers that can be called now."""


class Join(Message, frozen=True):
    """Worker to kernel, answered by `Welcome`: a process of this role is there."""

    worker: str
    role: Role
    place: str
    """Where it runs, for people."""
    nonce: str
    """Drawn at its start: tells a worker started again from the one before."""


class Welcome(Message, frozen=True):
    """All that a worker has to know."""

    config: bytes
    """The composed run, msgpack of its plain mapping."""
    run: str
    folder: str
    lease_epoch: int
    grace_s: float
    """A worker that has heard no beacon for so long leaves."""
    fingerprints: dict[str, str]
    """Of the datasets, by the key of their section."""


class Heartbeat(Message, frozen=True):
    """Worker to kernel, every second."""

    worker: str
    nonce: str
    ready: bool
    """It can be called."""
    busy_s: float = 0.0
    """Seconds of work since its start, by its own measure."""
    load: Load | None = None
    """Of inference workers."""
    tickets: int = 0
    """Of rollout workers: tickets in hand."""
    refused: int = 0
    """Malformed messages it has refused."""


class Leaving(Message, frozen=True):
    """Worker to kernel: it goes, having handed back or finished what it had."""

    worker: str
    nonce: str
    reason: str
    final: bool = False
    """What it failed at would fail again: starting it again, or resuming the run, cannot help."""


# ---------------------------------------------------------------------------------------- tickets

Purpose = Literal["train", "eval"]


class Ticket(Message, frozen=True):
    """Kernel to whichever rollout worker takes it: leave to roll out one group."""

    id: int
    """From 0 up, for each purpose."""
    attempt: int
    """From 1 up, when it is issued again."""
    purpose: Purpose
    row: int
    """Index in the dataset of its purpose."""
    min_version: int
    """Its tokens are of this version or newer; those of an evaluation are of exactly this one."""
    samples: int
    """Trajectories wanted, n."""

    @property
    def name(self) -> str:
        """`7/1`, or `eval-7/1`: unique in the run."""
        return f"{'' if self.purpose == 'train' else 'eval-'}{self.id}/{self.attempt}"

    @property
    def exact_version(self) -> int | None:
        """Of an evaluation: the version that it is of."""
        return self.min_version if self.purpose == "eval" else None


class TicketStarted(Message, frozen=True):
    """Rollout worker to kernel: it works on this attempt now."""

    worker: str
    purpose: Purpose
    ticket: int
    attempt: int


class Progress(Message, frozen=True):
    """Rollout worker to kernel: every sample of these tickets has begun, so their oldest tokens are known."""

    worker: str
    oldest: tuple[tuple[int, int, int], ...]
    """(training ticket, attempt, version of its oldest token)."""


class AbortTicket(Message, frozen=True):
    """Kernel to all rollout workers: nobody waits for this ticket any more."""

    purpose: Purpose
    ticket: int
    attempt: int


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trajectory of a finished group, as the kernel sees it."""

    id: str
    """`ticket/attempt/index`."""
    sequence: int
    """Sequence number in the log of the bundle that holds it."""
    index: int
    """Its place in that bundle."""
    length: int
    """Tokens, prompt included."""
    sampled: int
    """Tokens that the policy sampled."""
    oldest: int
    newest: int
    """Versions of its oldest and newest sampled token."""
    reward: float
    metrics: dict[str, float]
    finish: Finish
    part: bool = False
    """Whether it is of the same sample as the member before it."""


class GroupDone(Message, frozen=True):
    """Rollout worker to the log: all trajectories of one ticket are in the log. The only way in which
    a group comes to exist for the ledger."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    members: tuple[Member, ...]
    """The data of evaluation tickets is not in the log; where answers are kept, `sequence` is that of their
    `Answers`."""
    seconds: float
    """From the start of the ticket."""
    generate_s: float = 0.0
    """Of these, in which at least one of its requests was at an inference engine."""
    score_s: float = 0.0
    """Of these, in which at least one of its calls was at a verifier: rewards, tools, environments."""


class GroupFailed(Message, frozen=True):
    """Rollout worker to the log: this attempt gives no group."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    reason: str
    filtered: bool = False
    """The row was not fit to be trained on (a prompt too long), as against a failure."""


class WireTrajectory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trajectory's data. L tokens."""

    id: str
    tokens: Array
    """(L,) int32."""
    loss_mask: Array
    """(L,) bool."""
    logprobs: Array
    """(L,) float32, behaviour."""
    versions: Array
    """(L,) int32."""
    reward: float
    metrics: dict[str, float]
    finish: Finish
    engine: str
    sample: int
    """Of the ticket's samples, which one it is, or is a piece of."""


class TrajectoryBundle(Message, frozen=True):
    """Rollout worker to the log: trajectories of one ticket, as many as fit into one message."""

    ticket: int
    attempt: int
    row: int
    trajectories: tuple[WireTrajectory, ...]


class Answers(Message, frozen=True):
    """Rollout worker to the log: what an evaluation ticket came to, for people. The kernel copies it to a
    file and does not look into it."""

    lines: bytes
    """A JSON object a line, one for each trajectory."""


# -------------------------------------------------------------------------------------- inference


class Generate(Message, frozen=True):
    """Rollout worker to an inference worker: take this request, or go on answering it from `have`."""

    request: GenerateRequest
    reply: str
    """Subject for the chunks."""
    exact_version: int | None = None
    """Of an evaluation: the one version that may sample it. A worker answers only those requests that it is
    there for at the moment: of this evaluation, or of training."""


class ChunkHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which sample the next `count` tokens of a `ChunkBatch` belong to."""

    request: str
    sample: int
    position: int
    count: int
    finish: Finish
    error: str


class ChunkBatch(Message, frozen=True):
    """Inference worker to a rollout worker: all that is new for it."""

    worker: str
    heads: tuple[ChunkHead, ...]
    tokens: Array
    """(sum of counts,) int32, in the order of `heads`."""
    logprobs: Array
    versions: Array


class Confirm(Message, frozen=True):
    """Rollout worker to inference worker: these requests are held in full and can be forgotten."""

    requests: tuple[str, ...]


class Abort(Message, frozen=True):
    """Rollout worker to inference worker: nobody waits for this request any more."""

    request: str


class Swap(Message, frozen=True, tag="Swap/2"):
    """Kernel to inference worker, answered by `SwapDone`: serve this version."""

    lease_epoch: int
    number: int
    """Rises with every swap that a kernel asks for; versions may go back, to that of an evaluation."""
    note: WeightsNote
    exact: bool = False
    """Serve it to the evaluation of this version alone, and sample nothing for training before the next
    swap."""


class Drift(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far an engine's logprobs of the canary are from the trainer's, of the same version."""

    mean: float
    """Mean |Δ| over its tokens; infinite where a side gave what is no number."""
    max: float

    def within(self, bound: float) -> bool:
        """Whether the mean is."""
        return self.mean <= bound


class SwapDone(Message, frozen=True):
    """What is served now; another version than asked for where a later swap overtook."""

    report: SwapReport
    """Without the hashes."""
    fault: str = ""
    """Why it is not what was announced, by tensor names where tensors differ; empty if it is. With a fault,
    no token of that version leaves the worker."""
    drift: Drift | None = None
    """Of the canary, if it was compared."""
    unscored: str = ""
    """Why it was not, if there was to be one."""
    engine_kl: float | None = None
    """Mean k3 estimate of KL(engine || trainer) at this version, in nats a token, over the trained tokens of
    the `SharedRows`; None if they were not compared."""
    rows_unscored: str = ""
    """Why they cannot be compared; empty where there are none yet."""


class AskSharedRows(Message, frozen=True):
    """Inference worker to rank 0 of the lead group, answered by `SharedRows`: give me rows that the trainer
    has scored with the weights of this version."""

    version: int


class ScoredRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of one sequence of the last batch. L tokens."""

    tokens: Array
    """(L,) int32, L >= 2."""
    trained: Array
    """(L - 1,) bool, of every token but the first."""
    logprobs: Array
    """(L - 1,) float32, the trainer's at temperature 1."""


class SharedRows(Message, frozen=True):
    """A few rows of the batch that led to a version, for the engine's error to be measured with."""

    rows: tuple[ScoredRow, ...]
    """Empty where no batch led to the version, or it is an old one by now."""
    unscored: str = ""
    """Why there will never be any."""


class AskLoad(Message, frozen=True):
    """Anyone to inference worker, answered by `LoadReport`: how busy are you?"""


class LoadReport(Message, frozen=True):
    """The engine's figures at this moment."""

    load: Load


class AskWeights(Message, frozen=True):
    """Inference worker to the trainer that publishes, answered by `WeightsAnswer`: a weight transport's own
    question."""

    nonce: str
    """Of the process that is meant."""
    question: bytes


class WeightsAnswer(Message, frozen=True):
    """The transport's own answer."""

    data: bytes


# --------------------------------------------------------------------------------------- scoring


class ScoreSamples(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `Scored`."""

    row: bytes
    """The dataset row, msgpack."""
    completions: tuple[str, ...]
    columns: bytes
    """More that the reward gets by name: a msgpack map of lists, one value a completion."""


class Scored(Message, frozen=True):
    """Reward and metrics of each completion, or why there are none."""

    scores: tuple[tuple[float, dict[str, float]], ...]
    error: str = ""


class AskTools(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `ToolList`: which tools are there?"""


class ToolList(Message, frozen=True):
    """All tools of the run."""

    schemas: bytes
    """A msgpack list of their JSON schemas."""


class RunTool(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `ToolDone`: the policy calls a tool."""

    name: str
    arguments: bytes
    """A JSON object, as the policy gave it."""


class ToolDone(Message, frozen=True):
    """What the policy is told of it."""

    answer: ToolAnswer


class TellEnvironment(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `EnvironmentSaid`: the policy has answered."""

    offered: bytes
    """What the environment is called with, by name: a msgpack map."""


class EnvironmentSaid(Message, frozen=True):
    """What it said of the answer, or why nothing."""

    feedback: Feedback = Feedback()
    error: str = ""


# -------------------------------------------------------------------------------------- training


class RowRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one sequence of a batch lies: a trajectory in the log, or a row of the dataset."""

    id: str
    sequence: int
    """Of the bundle in the log; of a dataset's row, its index."""
    index: int
    """Place in the bundle; of a dataset's row, which of the sequences that are made of it."""
    group: int
    """Number of its ticket."""
    length: int
    """Tokens; 0 where only those who read it know."""


class RunCall(Message, frozen=True, tag="Call/2"):
    """Kernel to rank 0 of a worker group, which tells its other ranks, answered by `CallDone`: run one call
    of the dataflow."""

    lease_epoch: int
    incarnation: int
    version: int
    """Training version at which the batch is trained."""
    name: str
    rows: tuple[RowRef, ...]
    """The batch, in order; the same in every call of a step."""


class CallDone(Message, frozen=True, tag="CallDone/2"):
    """Statistics; the data stays where it was made."""

    statistics: dict[str, float]
    seconds: float


class AskColumn(Message, frozen=True):
    """Rank to rank, answered by `Column`: what a call of this step wrote, for rows that the asker lacks."""

    version: int
    key: str
    rows: tuple[int, ...]
    """Places in the batch."""


class Column(Message, frozen=True):
    """One column of some rows, end to end in the order they were asked for."""

    values: Array
    per_token: bool
    """Whether there is a value for each token, or one for each row."""


class EndStep(Message, frozen=True):
    """Kernel to rank 0 of every worker group, which tells its other ranks, answered by `StepEnded`: all calls
    are done. Forget the batch; the group of the lead model publishes its weights."""

    lease_epoch: int
    version: int
    """At which the step began; the weights are now those of `version + 1`."""
    needed: tuple[int, ...] = ()
    """Versions that evaluations still need: published ones of these are kept."""


class StepEnded(Message, frozen=True):
    """The step is complete."""

    note: WeightsNote | None = None
    """From the group of the lead model: the weights that the step led to."""


class Prefetch(Message, frozen=True):
    """Kernel to trainers: the rows of the present batch, and those that will probably be wanted next."""

    rows: tuple[RowRef, ...]


class LoadCheckpoint(Message, frozen=True):
    """Kernel to trainers, answered by `Loaded`: begin, with the initial model or from a checkpoint."""

    lease_epoch: int
    folder: str
    """Empty for the initial model."""
    version: int
    needed: tuple[WeightsNote, ...] = ()
    """Older versions that lie in the checkpoint, for evaluations: they are published again."""


class Loaded(Message, frozen=True, tag="Loaded/2"):
    """The models are there."""

    note: WeightsNote | None = None
    """From the group of the lead model, which has published it."""
    needed: tuple[WeightsNote, ...] = ()
    """Where those that were asked for are to be had now."""


class Save(Message, frozen=True):
    """Kernel to trainers, answered by `Saved`: write models and optimizers into this folder."""

    lease_epoch: int
    folder: str
    version: int
    needed: tuple[int, ...] = ()
    """Older versions that evaluations still need, of which the published weights go into the folder too."""


class Saved(Message, frozen=True):
    """The files are written."""

    seconds: float


# --------------------------------------------------------------------------------------- journal


class JournalBatch(Message, frozen=True):
    """Kernel to the journal, before a batch is trained."""

    incarnation: int
    version: int
    rows: tuple[RowRef, ...]
    """Ordered; with the weights of `version` they determine the next ones."""
    tickets: tuple[int, ...]
    layout: str
    """Training engine and processes: elsewhere a repetition need not be bit for bit."""
    seed: int


class JournalStep(Message, frozen=True):
    """Kernel to the journal, when the step is complete: the digest that a repetition must reach."""

    incarnation: int
    version: int
    digest: str
    divergence: float | None = None
    """Of the batch, in nats a token; None where it is unknown. The gate of a repetition takes this figure."""


class Evaluation(msgspec.Struct, frozen=True):
    """Result of one held-out evaluation."""

    version: int
    """Of the weights that sampled every token of it."""
    accuracy: float | None
    """Mean of the samples' `accuracy` metric, or of their rewards where the reward gives none; None
    without a result."""
    samples: int
    failed: int
    """Rows without a result."""


class JournalEvaluation(Message, frozen=True, tag="JournalEvaluation/2"):
    """Kernel to the journal: a held-out evaluation is complete."""

    incarnation: int
    result: Evaluation


class JournalChange(Message, frozen=True):
    """Kernel to the journal, when a resumed run goes over to changed values, before any batch of theirs."""

    incarnation: int
    version: int
    """Training version from which on they are in force."""
    values: int
    """Number of the values: 1 at the run's start, and one more with each change."""
    log_sequence: int
    """Last message of the log that the ledger had taken in: so a repetition expires the same tickets."""
    changed: dict[str, tuple[str, str]]
    """Dotted key -> the former and the new value, as JSON."""


class KernelLease(Message, frozen=True):
    """In the run's state: which kernel owns the run. Its revision there is the fencing number."""

    place: str


# -------------------------------------------------------------------------------------- subjects


class Subjects:
    """Names on the bus of one run: subjects, streams, consumers, buckets."""

    def __init__(self, run: str) -> None:
        self.root = f"st.{run}"
        self.beacon = f"{self.root}.beacon"
        self.ticket_started = self.kernel("rollout", "started")
        self.progress = self.kernel("rollout", "progress")
        self.abort_ticket = f"{self.root}.abort"
        self.shared_rows = f"{self.root}.worker.trainer.shared_rows"
        self.log = f"{self.root}.log"
        self.trajectories = f"{self.log}.trajectories"
        self.groups = f"{self.log}.groups"
        self.kept_answers = f"{self.log}.answers"
        self.tickets = f"{self.root}.tickets"
        self.journal = f"{self.root}.journal"
        self.tickets_stream = f"TICKETS_{run}"
        self.log_stream = f"LOG_{run}"
        self.journal_stream = f"JOURNAL_{run}"
        self.state_bucket = f"STATE_{run}"

    def ticket(self, purpose: Purpose) -> str:
        """Where tickets of a purpose are put; also the name of their consumer."""
        return f"{self.tickets}.{purpose}"

    def kernel(self, role: Role, verb: str) -> str:
        """Where workers of a role tell or ask the kernel something."""
        return f"{self.root}.kernel.{role}.{verb}"

    def worker(self, role: Role, worker: str, verb: str) -> str:
        """Where one worker is asked to do something."""
        return f"{self.root}.worker.{role}.{worker}.{verb}"

    def inbox(self, role: Role | Literal["kernel"]) -> str:
        """Prefix of the inboxes of a role."""
        return f"{self.root}.inbox.{role}"

    def answers(self, asker: Role | Literal["kernel"], answerer: Role) -> str:
        """Where one role answers to another: its part of the inboxes there."""
        return f"{self.inbox(asker)}.from.{answerer}.>"
