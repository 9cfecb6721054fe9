"""Sampling and new weights: requests to inference workers, and their answers."""

import msgspec

from stretto.array import Array
from stretto.bus.messages.base import InboxToken, KernelMessage, Message, WorkerId
from stretto.bus.messages.membership import WorkerProcess
from stretto.component import NonNegativeInt
from stretto.engine import Digest, Finish, GenerateRequest, Load, SwapReport
from stretto.rl.drift import Drift
from stretto.weights import WeightsNote


class Generate(Message, frozen=True, tag="Generate/4"):
    """Rollout worker to an inference worker: answer this request, or continue it from `have`."""

    request: GenerateRequest
    inbox: InboxToken
    """Chunks go to `Subjects.chunks` of this inbox."""
    exact_version: int | None = None
    """The version that an evaluation asks for; None for training. A worker lent to an evaluation answers only
    that evaluation, any other worker only training."""
    sender: WorkerProcess | None = None
    """The rollout worker, which has the files of the request's images; None without images."""


class AskImage(Message, frozen=True):
    """Inference worker to a rollout worker, answered by `ImagePart`: send the file of an image."""

    digest: Digest
    offset: NonNegativeInt


class ImagePart(Message, frozen=True):
    """As much of an image's file as fits into a message."""

    size: NonNegativeInt
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
    kept_counts: Array | None = None
    """(sum of counts,) uint16, number of ids that each token was drawn from; None if no request wants it."""
    kept_ids: Array | None = None
    """(sum of kept_counts,) int32, these ids, in the order of the tokens."""


class Confirm(Message, frozen=True):
    """Rollout worker to inference worker: forget these requests, because all their tokens have arrived."""

    requests: tuple[str, ...]


class Abort(Message, frozen=True):
    """Rollout worker to inference worker: stop this request, because nobody waits for it any more."""

    request: str


class Swap(KernelMessage, frozen=True, tag="Swap/4"):
    """Kernel to inference worker, answered by `SwapDone`: serve this version, or none."""

    number: int
    """Number of the swap, which always rises. The version may fall: to the version of an evaluation."""
    note: WeightsNote | None
    """None: answer nobody, and sleep (`SleepingEngine`) until the next swap."""
    exact: bool = False
    """Serve this version only to its evaluation, and sample nothing for training before the next swap."""
    trainer: WorkerProcess | None = None
    """Rank 0 of the lead model's worker group, which has the version's `SharedRows`."""


class SwapDone(Message, frozen=True):
    """The version that the worker serves now. If a later swap was already done, this is its version."""

    report: SwapReport
    """The engine's report of the swap, without the hashes."""
    fault: str = ""
    """The tensors that differ from the announced version, or another reason for the refusal; empty when all
    match. With a fault, the worker sends no token of that version."""
    drift: Drift | None = None
    """Drift of the canary; None if it was not compared."""
    unscored: str = ""
    """Why the worker did not compare the canary, if the run has one."""
    engine_kl: float | None = None
    """Mean k3 estimate of KL(engine || trainer) at this version, in nats per token, over the trained tokens
    of the `SharedRows`; None if the worker did not compare the rows."""
    rows_unscored: str = ""
    """Why the worker cannot compare the rows; empty if there are no rows yet."""
    receive_s: float = 0.0
    """Seconds to receive the version, including the merge of an adapter."""


class AskSharedRows(Message, frozen=True):
    """Inference worker to rank 0 of the lead group, answered by `SharedRows`: rows scored at this version."""

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
    """A few rows of the batch that led to a version, on which the engine's error is measured."""

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
    """Inference worker to the publishing trainer, answered by `WeightsAnswer`: a request of the transport."""

    question: bytes


class WeightsAnswer(Message, frozen=True):
    """The answer, in the weight transport's own format."""

    data: bytes
