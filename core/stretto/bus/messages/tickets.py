"""The life of a ticket: issued, started, done or failed. Its samples, and the texts that people read."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from stretto.array import Array, KeptTokens
from stretto.bus.messages.base import KernelMessage, Message, VariantName, WorkerId
from stretto.component import NonNegativeInt
from stretto.engine import Digest, Finish
from stretto.user_code.faults import FaultKind

Purpose = Literal["train", "eval"]


def attempt_name(purpose: Purpose, ticket: int, attempt: int) -> str:
    """Return the name of an attempt of a ticket: `7/1`, or `eval-7/1`. It is unique in the run."""
    return f"{'' if purpose == 'train' else 'eval-'}{ticket}/{attempt}"


_BUNDLE_BYTES = 512 * 1024  # a reader of one trajectory gets the whole message with it


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
    """Oldest version that tokens of the ticket may have; for an evaluation, their only version."""
    samples: int
    variant: VariantName = ""
    """The variant of the run that the ticket tests; empty for the run's own sections."""

    @property
    def name(self) -> str:
        """See `attempt_name`."""
        return attempt_name(self.purpose, self.id, self.attempt)

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


class TicketsStarted(Message, frozen=True):
    """Rollout worker to kernel: these attempts have started."""

    started: tuple[TicketStarted, ...]


class Progress(Message, frozen=True):
    """Rollout worker to kernel: all samples of these tickets have begun, so their oldest tokens are known."""

    worker: WorkerId
    oldest: tuple[tuple[int, int, int], ...]
    """(training ticket, attempt, version of its oldest token)."""


class AbortTicket(KernelMessage, frozen=True, tag="AbortTicket/2"):
    """Kernel to all rollout workers: stop this attempt, because nobody waits for it any more."""

    purpose: Purpose
    ticket: int
    attempt: int


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The facts about one trajectory of a finished group that the kernel gets."""

    id: str
    """`ticket/attempt/index`."""
    sequence: int
    """Sequence number, in the log, of the bundle that holds the trajectory."""
    index: int
    """Position in that bundle."""
    length: int
    """Number of tokens, including the prompt."""
    sampled: int
    """Number of tokens that the policy sampled."""
    oldest: int
    newest: int
    """`oldest` and `newest`: versions of the oldest and newest sampled token."""
    reward: float
    metrics: dict[str, float]
    finish: Finish
    part: bool = False
    """Whether the trajectory belongs to the same sample as the member before it."""
    kept: int = 0
    """Total number of ids that the sampled tokens were drawn from; 0 if from the whole vocabulary."""


class FailedSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sample of a finished group that has failed."""

    kind: FaultKind
    reason: str
    tries: int
    sampled: int = 0
    """Number of tokens sampled in the last try; 0 if it is unknown."""


class GroupDone(Message, frozen=True):
    """Rollout worker to the log: a group is complete. Only this message makes it count in the ledger."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    members: tuple[Member, ...]
    """In an evaluation, `sequence` is 0: training does not read the trajectories."""
    seconds: float
    """Seconds from the start of the ticket."""
    generate_s: float = 0.0
    """The part of `seconds` in which at least one of the ticket's requests was at an inference engine."""
    score_s: float = 0.0
    """The same for calls of a verifier: of a reward, a tool or an environment."""
    record: int = 0
    """Sequence number of the attempt's `TicketRecord`; 0 if its samples are not kept."""
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """SHA-256 over all that is kept of the group (see `stretto.records.samples.kept_sample`)."""
    images: tuple[int, ...] = ()
    """Sequence numbers of images that the workflow added."""
    missing: tuple[FailedSample, ...] = ()
    """Failed samples that are not in `members`."""
    penalized: tuple[FailedSample, ...] = ()
    """Samples that failed because of their own answer. They are in `members`, with the failure reward."""
    retried: dict[FaultKind, int] = msgspec.field(default_factory=dict)
    """Number of samples that succeeded after a failure, by the kind of the last fault."""
    redrawn: int = 0
    """Number of retried samples whose new answer differs from the failed one."""
    prompt: int = 0
    """Number of tokens of the row's prompt."""
    tool_s: float = 0.0
    """The part of `score_s` in which at least one call of a tool was at a verifier."""
    environment_s: float = 0.0
    """The part of `score_s` in which at least one call of an environment was at a verifier."""
    own_s: float = 0.0
    """Seconds of the workflow's own work: until it returned, without time at an engine or a verifier."""


class GroupFailed(Message, frozen=True):
    """Rollout worker to the log: this attempt produces no group."""

    purpose: Purpose
    ticket: int
    attempt: int
    worker: str
    reason: str
    filtered: bool = False
    """Whether the row is unfit for training (for example, its prompt is too long), rather than a failure."""
    record: int = 0
    """Sequence number of the attempt's `TicketRecord`; 0 if its samples are not kept."""
    prompt: int = 0
    """Number of tokens of the row's prompt; 0 if the prompt was not encoded."""


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
    """Index, in the ticket, of the sample that this trajectory is or belongs to."""
    images: tuple[Digest | NonNegativeInt, ...] | None = None
    """The images, in the order of their places in the tokens: the index of an image of the row, or the
    SHA-256 of a `StoredImage` that follows in the log. None: all images of the row."""
    kept_counts: Array | None = None
    """(L,) uint16, the number of ids that each token was drawn from; None for the whole vocabulary."""
    kept_ids: Array | None = None
    """(sum of kept_counts,) int32, in the order of the tokens."""

    @property
    def size(self) -> int:
        """Estimated number of bytes in a message."""
        kept_bytes = 0 if self.kept_ids is None else 2 * len(self.tokens) + 4 * len(self.kept_ids)
        return 13 * len(self.tokens) + kept_bytes + 200

    @property
    def kept(self) -> KeptTokens | None:
        """The tokens from which each token was drawn."""
        return KeptTokens.read(self.kept_counts, self.kept_ids)

    @property
    def added_images(self) -> list[str]:
        """SHA-256 of each image that the workflow added, in the order of their places."""
        return [image for image in self.images or () if isinstance(image, str)]


class StoredImage(Message, frozen=True):
    """Rollout worker to the log, after the trajectories that name it: an image that a workflow added. The
    subject has its SHA-256. Training reads the image, and the sample writer keeps it."""

    file: bytes


class TrajectoryBundle(Message, frozen=True):
    """Rollout worker to the log: as many trajectories of one ticket as fit into one message. Those of
    evaluations and failed attempts have another subject: only the sample writer reads them."""

    ticket: int
    attempt: int
    row: int
    trajectories: tuple[WireTrajectory, ...]


class KeptText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One trajectory as text."""

    prompt: str | None = None
    """Text before the first sampled token; None if it is the record's `prompt`."""
    text: str = ""
    """The text from the first sampled token on; with several turns, also the text between them."""
    messages: str = ""
    """The conversation as a JSON list, with its tool calls; empty if there was none."""


class TicketRecord(Message, frozen=True):
    """Rollout worker to the log, before an attempt's outcome: the samples as text, for people."""

    purpose: Purpose
    ticket: int
    attempt: int
    row: int
    """Index in the dataset of its purpose."""
    worker: str
    dataset_row: str
    """The row of the dataset as a JSON object, as `stretto.models.images.with_names` returns it."""
    prompt: str
    """The prompt as the model got it; with several prompts, the prompt of the first trajectory."""
    texts: tuple[KeptText, ...]
    """In the order of the trajectories."""
    seconds: float
    """Seconds from the start of the ticket. For the parts, see `GroupDone`."""
    generate_s: float
    score_s: float
    source: str = ""
    """The name of the dataset's part that has the row; empty if the dataset has no parts."""
    variant: VariantName = ""

    @property
    def name(self) -> str:
        """The name of the attempt's ticket (see `Ticket.name`)."""
        return attempt_name(self.purpose, self.ticket, self.attempt)


class TrainedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the trainer computed for one trajectory. K sampled tokens."""

    id: str
    advantages: Array
    """(K,) float32; (1,) if all are equal, (0,) without advantages."""
    importance_weights: Array
    """(K,) float32, current / behaviour at the first optimizer step that trains the trajectory."""

    @property
    def size(self) -> int:
        """Estimated number of bytes in a message."""
        return self.advantages.data.nbytes + self.importance_weights.data.nbytes + 100


Item = TypeVar("Item", WireTrajectory, TrainedRow)


def bundles_of(items: Sequence[Item]) -> list[list[Item]]:
    """Divide items, in their order, into small messages: a reader of one item gets few others."""
    bundles: list[list[Item]] = []
    room = 0
    for item in items:
        if not bundles or item.size > room:
            bundles.append([])
            room = _BUNDLE_BYTES
        bundles[-1].append(item)
        room -= item.size
    return bundles


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


class Following(Message, frozen=True):
    """The consumer with which the sample writer reads the log."""

    consumer: str
    start: int
    """The requested number; 1 if the log ends before that number, because a part of the log was lost."""
    last: int
    """Sequence number of the last message that the sample writer reads, at this moment."""


class Kept(Message, frozen=True):
    """Sample writer to the kernel, every few seconds: all samples of messages before this one are on disk."""

    below: int
