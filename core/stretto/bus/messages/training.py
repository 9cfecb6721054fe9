"""Calls of trainers: batches, steps, published versions, checkpoints."""

import msgspec

from stretto.array import Array
from stretto.bus.messages.base import KernelMessage, Message
from stretto.weights import WeightsNote


class RowRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of one sequence of a batch: a trajectory in the log, or a row of the dataset."""

    id: str
    sequence: int
    """Sequence number of the bundle in the log, or index of the dataset row."""
    index: int
    """Position in the bundle, or among the sequences of the dataset row."""
    group: int
    """Number of the ticket."""
    length: int
    """Number of tokens; 0 if only the trainers, which read the row, know it."""

    @property
    def attempt(self) -> int:
        """The attempt of the ticket that the row comes from. It is in the id."""
        return int(self.id.split("/")[1])


class RunCall(KernelMessage, frozen=True, tag="Call/2"):
    """Kernel to rank 0 of a worker group, which informs the others, answered by `CallDone`: run a call."""

    incarnation: int
    version: int
    """Training version at which the trainers train the batch."""
    name: str
    rows: tuple[RowRef, ...]
    """The batch, in order. All calls of a step have the same rows."""


class CallDone(Message, frozen=True, tag="CallDone/2"):
    """The statistics of a call. The call's data stays with the ranks that computed it."""

    statistics: dict[str, float]
    seconds: float


class AskColumn(Message, frozen=True):
    """Rank to rank, answered by `Column`: send what a call of this step wrote for these rows."""

    version: int
    key: str
    rows: tuple[int, ...]
    """Positions in the batch."""


class Column(Message, frozen=True):
    """The values of one column for some rows, concatenated in the order of the request."""

    values: Array
    per_token: bool
    """True if each token has a value, False if each row has one."""


class EndStep(KernelMessage, frozen=True):
    """Kernel to rank 0 of every worker group, answered by `StepEnded`: all calls are done; forget the batch.
    Rank 0 informs the other ranks of its group. The group of the lead model begins to publish its weights."""

    version: int
    """Version before the step; the weights are now those of `version + 1`."""
    needed: tuple[int, ...] = ()
    """Versions that evaluations still need. The trainers keep those of them that are published."""


class StepEnded(Message, frozen=True):
    """The group is ready for the next step. The weights of its lead model may not be published yet."""


class AskPublished(KernelMessage, frozen=True):
    """Kernel to rank 0 of the lead model's group, answered by `Published` when the version is complete."""

    version: int


class Published(Message, frozen=True):
    """A version of the weights is published, as a whole."""

    note: WeightsNote


class AskState(KernelMessage, frozen=True):
    """Kernel to rank 0 of a group that a former kernel has started, answered by `TrainerState`."""


class TrainerState(Message, frozen=True):
    """The weights that a worker group has now."""

    version: int
    """Version of the weights; -1 before the first load. A step of it may be under way."""
    incarnation: int
    """Incarnation of the last step."""
    notes: tuple[WeightsNote, ...]
    """Notes of published earlier versions that evaluations need. Only the lead model's group has some."""


class Prefetch(Message, frozen=True):
    """Kernel to trainers: rows that the next batches will probably need."""

    rows: tuple[RowRef, ...]
    complete: bool = False
    """Whether no other rows are needed: trainers then drop the others that they have read."""


class AskMeetingPlace(KernelMessage, frozen=True):
    """Another rank to rank 0 of its group, answered by `MeetingPlace`: where do the ranks meet?"""


class MeetingPlace(Message, frozen=True):
    """How the ranks of a worker group find each other (see `Context.rendezvous`)."""

    rendezvous: str


class LoadCheckpoint(KernelMessage, frozen=True):
    """Kernel to trainers, answered by `Loaded`: load the initial model or a checkpoint."""

    folder: str
    """A folder or URL; empty for the initial model."""
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


class Save(KernelMessage, frozen=True):
    """Kernel to rank 0 of every worker group, answered by `Copied`: write models and optimizers into this
    folder. Rank 0 informs the other ranks of its group."""

    folder: str
    """A folder or URL."""
    version: int
    needed: tuple[int, ...] = ()
    """Older versions that evaluations still need. Their published weights go into the folder, too."""


class Copied(Message, frozen=True):
    """The group is ready for the next step. Its files may not be written yet."""


class AskSaved(KernelMessage, frozen=True):
    """Kernel to rank 0 of every group, answered by `Saved` when the newest `Save`'s files are written."""

    version: int


class Saved(Message, frozen=True):
    """The trainers have written the files."""

    seconds: float
    uploaded: dict[str, str] = msgspec.field(default_factory=dict)
    """Name -> SHA-256 of the files that all ranks have written to the URL; empty for a folder."""
