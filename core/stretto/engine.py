"""The contracts of engines. A training engine holds a model over ranks; an inference engine samples from it.

Logprobs are always those of `log_softmax(logits / temperature)`. Each logprob is stored at the position of
its own token, so the first token of a sequence has none (0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from stretto.array import Array, KeptTokens
from stretto.component import Head, NonNegativeInt, PositiveFloat, PositiveInt, Share
from stretto.launcher import Resources

if TYPE_CHECKING:
    import numpy as np
    from anyio.abc import TaskGroup
    from numpy.typing import NDArray
    from torch import Tensor

    from stretto.algorithm import Loss
    from stretto.rl.batch import Batch
    from stretto.weights import WeightUpdate

__all__ = [
    "FEW_SLOTS",
    "MOST_SLOTS",
    "CanaryConfig",
    "Chunk",
    "Digest",
    "Emit",
    "Finish",
    "GenerateRequest",
    "HeldModel",
    "InferenceConfig",
    "InferenceEngine",
    "Load",
    "PartlyFrozenEngine",
    "Sampling",
    "SleepingEngine",
    "SwapReport",
    "TrainingConfig",
    "TrainingEngine",
    "VisionEngine",
    "sample_seed",
    "slots_for",
]

FEW_SLOTS, MOST_SLOTS = 32, 128
"""Bounds of the number of slots of an engine if the run file does not set the number."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Sampling temperature: the engine divides the logits by it. 0 takes the most likely token (evaluation
    only)."""
    top_p: Share = 1.0
    """Sample from the smallest set of most likely tokens whose total probability is at least this value. 1
    keeps all tokens."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens. 0 keeps all tokens."""
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Sample from the tokens whose probability is at least this fraction of the most likely token's. 0 keeps
    all tokens."""
    logit_bias: dict[int, Annotated[float, msgspec.Meta(ge=-100, le=100)]] = {}
    """Values added to the logits of these token ids, before all other options. -100 practically forbids a
    token."""
    max_kept: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1024
    """In training with top_p, top_k or min_p: the maximum number of candidates from which a token is drawn.
    The engine applies it as a `top_k`, and sends the candidates with each token that it draws."""
    max_tokens: PositiveInt = 256
    """Maximum length of an answer, in tokens."""
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """Texts that end an answer. The token that completes a text is the last token of the answer."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Ids of tokens that end an answer, besides the model's end-of-sequence tokens. Such a token is the last
    token of the answer."""
    ignore_eos: bool = False
    """Do not end answers at the model's end-of-sequence tokens, only at `stop`, `stop_token_ids` or
    `max_tokens`."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def reshapes(self) -> bool:
        """Whether tokens are sampled from a distribution other than `softmax(logits / temperature)`."""
        return self.truncates or bool(self.logit_bias)

    @property
    def shape(self) -> tuple[object, ...]:
        """The options that define the distribution of sampled tokens, besides the temperature."""
        return self.top_p, self.top_k, self.min_p, self.logit_bias, self.max_kept

    def in_training(self) -> Sampling:
        """Return the options with `max_kept` applied, if tokens are sampled from a part of the vocabulary."""
        if not self.truncates:
            return self
        return msgspec.structs.replace(self, top_k=min(self.top_k or self.max_kept, self.max_kept))


# ------------------------------------------------------------------------------------- inference


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fixed texts that trainer and engine both score at every weight swap, to check that both have the same
    model.

    The texts are random: they are drawn with the run's seed from the whole vocabulary."""

    sequences: PositiveInt = 4
    """Number of short texts."""
    tokens: Annotated[int, msgspec.Meta(ge=2)] = 32
    """Number of tokens in each short text. It must fit into the engine's context."""
    depth: NonNegativeInt | None = None
    """Number of tokens of one long text: some faults show only behind many tokens. null: as
    `sampling.max_tokens`, at most 1,024 and the engine's context; for a model that reads images, 0. 0: no
    long text."""
    bound: PositiveFloat | None = None
    """Maximum allowed difference between the logprobs of trainer and engine, in nats: the mean over the
    tokens of each quarter of the long text's depth. By default 0.1 for an engine that computes in float32,
    where the difference is about 1e-5, and 0.3 for others: in bfloat16 it is 0.05 to 0.1 for a model of 135
    million parameters."""
    on_drift: Literal["warn", "stop"] = "warn"
    """What to do when the difference exceeds `bound`. `warn` logs a warning. `stop` ends the run before a
    sample of that version is trained on; it also refuses an engine that cannot be compared."""


def default_canary_bound(dtype: str | None) -> float:
    """Return `CanaryConfig.bound` for an engine that computes in this dtype, if the run file has none."""
    return 0.1 if dtype == "float32" else 0.3


class Memory(NamedTuple):
    """What one process of an engine needs of its device: of its GPU, or of the host if it has none."""

    parts: Mapping[str, int]
    """Bytes at most, by name: `weights`, `gradients`, `optimizer`, `casts`, `activations`, `cache`, ..."""
    settings: str = ""
    """The settings on which the sizes depend, as text for users."""
    parameters: int = 0
    """Number of parameters of the process's models, if a training engine counted them."""

    @property
    def size(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


class HeldModel(NamedTuple):
    """A model in a process of training."""

    source: str
    """Folder or hub id."""
    head: Head
    trainable: bool


class InferenceConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every inference engine's section."""

    use: str = "torch"
    """Name of the inference engine."""
    replicas: PositiveInt = 1
    """Number of inference workers. Each holds the whole model."""
    on_swap: Literal["keep_cache", "recompute"] = "keep_cache"
    """What to do with requests in flight at a weight swap. `keep_cache` continues with their existing KV
    cache. `recompute` computes the KV cache again with the new weights, so that every logprob is exactly that
    of its version."""
    may_be_doubled: ClassVar[bool] = False
    """Whether evaluations may get an engine of their own by default: it starts quickly, and on CPUs it needs
    little besides the memory for a second copy of the model."""
    sends_kept_tokens: ClassVar[bool] = False
    """Whether the engine sends `Chunk.kept`, and reports logprobs of the distribution that it really draws
    from, also under `logit_bias`."""
    sleep: bool | Literal["auto"] = False
    """Let generation and training take turns, for engines that share a device with the trainer. The engines
    sample (`queue.max_staleness` + 1) batches and the rows of due evaluations, then free the memory of
    weights and cache while the trainer trains these batches. `auto` does so if both use the same GPUs and
    their memory does not suffice otherwise."""
    may_sleep: ClassVar[bool] = False
    """Whether the engine is a `SleepingEngine`."""
    deterministic: bool = False
    """Give bitwise identical answers, whatever other requests the engine serves. This costs some speed. The
    first start of an engine tests what the processor needs for this, which takes up to some minutes. The
    result is kept in `~/.cache/stretto/deterministic`, for this model, processor, slots and other values."""
    canary: CanaryConfig | None = CanaryConfig()
    """The fixed texts that trainer and engine score at every weight swap; null for none."""

    @property
    def sleeps(self) -> bool:
        """Whether generation and training take turns. A start decides about `auto`."""
        return self.sleep is True

    @property
    def canary_bound(self) -> float | None:
        """The bound of the canary that holds for this engine, in nats; None without a canary."""
        if self.canary is None:
            return None
        return self.canary.bound or default_canary_bound(getattr(self, "dtype", None))

    def memory(self, model: str, parameters: int, samples_in_flight: int, available: float) -> Memory | None:
        """Return the memory that one process needs; None if not known before the start.

        Args:
            model: the run's model.
            parameters: number of its parameters.
            samples_in_flight: see `Context`.
            available: bytes that the process may use of its device; infinite if not known.
        """
        del model, parameters, samples_in_flight, available
        return None


Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""A SHA-256 in hexadecimal digits."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt and the samples to generate for it. A message with the same id is the same request again."""

    id: str
    """`ticket/attempt/turn`: unique in the run, and the same when the request is sent again."""
    prompt_ids: Array
    """(P,) int32, P >= 1."""
    seeds: tuple[int, ...]
    """One 64-bit seed for each sample. The number of seeds is the number of samples, n. See `sample_seed`."""
    sampling: Sampling
    min_version: int
    """Oldest policy version that may sample a token. An engine with older weights lets the request wait."""
    begun: tuple[Array, ...] = ()
    """For each sample, the int32 tokens that another engine has already sampled. The answer continues after
    them. Empty, or n arrays."""
    have: tuple[int, ...] = ()
    """For each sample, the number of answer tokens that the client already has, including those in `begun`.
    The stream starts after them. -1: the client has the whole sample; the engine sends nothing for it. Empty:
    the client has no tokens."""
    deadline_s: float = 3600.0
    """Seconds after which the engine ends the unfinished samples with `error`."""
    images: tuple[Digest, ...] = ()
    """SHA-256 of the file of each image, in the order of their places in the prompt. The prompt has the
    tokens that the model's processor makes of each image."""
    wants_kept: bool = False
    """Whether the engine sends with each token the candidates from which it was drawn (`Chunk.kept`)."""


Finish = Literal["", "stop", "length", "abort", "error"]


@dataclass(slots=True)
class Chunk:
    """New tokens of one sample. `finish` is empty in every chunk but the last."""

    request: str
    sample: int
    """Index of the sample in its request."""
    position: int
    """Index of the chunk's first token in the answer. The chunks of a sample leave no gap."""
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probability of each token in the distribution from which it was sampled."""
    versions: NDArray[np.int32]
    """Policy version whose weights computed the logits of each token."""
    finish: Finish = ""
    error: str = ""
    """The reason when `finish` is `error`; otherwise empty."""
    kept: KeptTokens | None = None
    """The candidates from which each token was drawn, if the request wants them."""


Emit = Callable[[list[Chunk]], None]


class SwapReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a weight swap."""

    version: int
    digest: str
    """Digest of the weights that the engine now serves, computed from the loaded tensors."""
    pause_s: float
    """Seconds during which the engine could sample no token."""
    hashes: Mapping[str, str] = {}
    """Tensor name (as in the update) -> `tensor_hash` of the loaded tensor. Empty when the engine cannot
    compute them; the worker then compares the digest alone."""


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Load figures of an engine, for routing and for display. Totals count from the start of the engine."""

    version: int
    """Policy version that the engine serves; -1 before the first swap."""
    running: NonNegativeInt
    """Number of samples that the engine is decoding."""
    waiting: NonNegativeInt
    """Number of samples that have not started."""
    slots: PositiveInt
    """Number of samples that the engine can decode at once."""
    generated_tokens: int
    busy_s: float
    """Seconds during which the engine decoded at least one sample."""
    swaps: int
    pause_s: float
    """Total pause of all swaps, in seconds."""
    pause_max_s: float
    """Longest pause of a swap, in seconds."""
    kv_used: float | None = None
    """Share of the KV cache memory that running samples use; None when the engine does not know it."""
    lost_tokens: int | None = None
    """Total number of tokens that the engine computed again because its prefix cache had no room to keep
    them; None when the engine does not know it."""
    note: Annotated[str, msgspec.Meta(max_length=500)] = ""
    """What a user waits for while the engine starts, shown as its state; and once it has started, what the
    user must know, which the run's log says once."""


class InferenceEngine(Protocol):
    """Samples from one model. An engine lives in one process; its worker calls the methods from one event
    loop.

    The engine emits the chunks of one sample in order, each exactly once; chunks of different samples may
    come in any order. It computes outside the thread of the event loop.
    """

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """Load the model. From now on the engine calls `emit` on the event loop with lists of new chunks, at
        most about every 20 ms. It serves no request before the first `swap`.

        Args:
            tasks: task group for the engine's background tasks. An exception in one of them ends the worker.

        Raises:
            EngineError: if the model cannot be loaded or served.
        """
        ...

    def generate(self, request: GenerateRequest) -> None:
        """Accept a request and return at once. The last chunk of each sample carries its `finish`.

        The engine answers a request that no engine could serve with `error` chunks, which fail the ticket. It
        ends a request that only this engine cannot continue with `abort` chunks, as if the client had aborted
        it: another engine then continues after the emitted tokens.
        """
        ...

    def abort(self, request: str) -> None:
        """End the unfinished samples of a request with `abort` chunks, within one decode step. Idempotent."""
        ...

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Serve these weights from the next token on, also for requests in flight.

        Raises:
            WeightsError: if the weights do not fit the model; the engine then continues serving the old ones.
        """
        ...

    async def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return the logprobs of given sequences under the current weights, at temperature 1.

        For each sequence of L >= 2 tokens, the result is an array (L - 1,) of the logprobs of all tokens but
        the first. The worker compares them with the trainer's.

        Raises:
            EngineError: if the engine cannot compute them.
        """
        ...

    def load(self) -> Load:
        """Return the current load figures."""
        ...

    async def stop(self) -> None:
        """Free all resources. The engine emits no chunk afterwards."""
        ...


class VisionEngine(InferenceEngine, Protocol):
    """An inference engine whose component says `reads_images`."""

    def generate(self, request: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        """See `InferenceEngine`.

        Args:
            images: the files of `request.images`. The engine decodes them with `stretto.models.images.decode`
                or as that does, and gives the model what its processor makes of them.
        """
        ...

    async def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[bytes] = ()
    ) -> list[NDArray[np.float32]]:
        """See `InferenceEngine`. Logprobs of image tokens mean nothing.

        Args:
            images: files of the images that every sequence has, in the order of their places.
        """
        ...


@runtime_checkable
class SleepingEngine(InferenceEngine, Protocol):
    """An inference engine that can give back the memory of its device, for `InferenceConfig.sleep`."""

    async def sleep(self) -> None:
        """Free the memory of weights and cache. Return when it is free. Called without unfinished requests,
        from `start` on, also for an engine that sleeps already.

        The engine then serves no version, as before its first `swap`, until the next `swap` has loaded all
        weights again.
        """
        ...


# -------------------------------------------------------------------------------------- training


class TrainingConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every training engine's section."""

    use: str = "torch"
    """Name of the training engine."""
    processes: PositiveInt = 1
    """Number of ranks (processes) of the worker group."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    reads_drawn: ClassVar[bool] = False
    """Whether the engine computes logprobs under the sampler's distribution, `Batch.drawn`."""

    @property
    def data_parallel(self) -> int:
        """Number of parts D into which a batch is split. Ranks that share a part have consecutive numbers:
        rank r works on part r // (processes // D)."""
        return self.processes

    @property
    def ranks_together(self) -> int:
        """Number of consecutive ranks that must be on one machine, because they exchange activations within
        each layer."""
        return 1

    def memory(self, models: Sequence[HeldModel], longest: int) -> Memory | None:
        """Return the memory that one process needs; None if not known before the start.

        Args:
            models: the models of the group.
            longest: number of tokens of the longest sequence; 0 if not known.
        """
        del models, longest
        return None


class TrainingEngine(Protocol):
    """Holds one model in one rank of its worker group. The worker calls it from one thread, one call at a
    time.

    The worker calls every method but `stop` in all ranks of the group, in the same order; these methods may
    communicate between ranks. A batch is the rank's own part of the data, at least one sequence; ranks that
    share a part receive the same batch. The engine decides about micro-batches and parallelism: the gradient
    must not depend on them.
    """

    def load(self, folder: Path | None) -> None:
        """Load the run's initial model (None), or the state that `save` wrote into `folder` with any layout.
        The worker calls it first, and again to go back to a checkpoint.

        Raises:
            EngineError: if the model or the state cannot be loaded.
        """
        ...

    def forward(self, batch: Batch, *, temperature: float) -> Tensor:
        """Return the output of the model's head for every token of the batch under the current weights: (T,)
        float32, on CPU, without gradient. The temperature applies to logprobs."""
        ...

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Do one optimizer step on the parts of all ranks together.

        Return the loss's statistics over all trained tokens of all ranks (see
        `stretto.algorithm.LossFunction`), the same in every rank, and the engine's own statistics: `loss`,
        `grad_norm`, `lr`, `micro_batches`.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the full tensors with their Hugging Face names, on CPU; or over an adapter alone, in
        the form of `stretto.models.lora_files`. Every rank iterates to the end; the tensors of rank 0 are
        published."""
        ...

    def save(self, folder: Path, copy_bytes: int = 0) -> Callable[[], object] | None:
        """Write all state that a resumed run needs into an empty folder that all ranks see: `model/` in
        Hugging Face format, and optimizer, schedule and random states as safetensors and JSON.

        Args:
            copy_bytes: largest copy of the state that this rank may make.

        Returns:
            None when everything is written; or a function that writes the rest, from a copy. The worker calls
            it once, in another thread, while the engine continues. The function raises as `save` does, and
            may not communicate with other ranks.

        Raises:
            OSError: if the state cannot be written; the caller removes the folder.
        """
        ...

    def stop(self) -> None:
        """Free all resources."""
        ...


@runtime_checkable
class MeasuringEngine(TrainingEngine, Protocol):
    """A training engine that can measure a loss without a step (`evaluation.measure: loss`)."""

    def measure(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Return `loss` and the loss's statistics over all trained tokens of all ranks, the same in every
        rank, under the current weights."""
        ...


@runtime_checkable
class PartlyFrozenEngine(TrainingEngine, Protocol):
    """A training engine that separates frozen tensors, which no step changes. They are published once, not
    with every version."""

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of `weights` that a step may change."""
        ...

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the other tensors of `weights`. They are the same until the next `load`."""
        ...


def sample_seed(scope: str, turn: str, sample: int) -> int:
    """Return the seed of one sample. It is the same in every attempt and in every repetition of the run:
    `scope` is the run's seed, the ticket's purpose, and the ticket's number or, in an evaluation, its row."""
    return int.from_bytes(sha256(f"{scope}/{turn}/{sample}".encode()).digest()[:8], "little")


def slots_for(samples_in_flight: int, *, deterministic: bool) -> int:
    """Return the number of slots of an engine whose run file has none, if its memory holds them.

    Args:
        samples_in_flight: see `Context`.
        deterministic: whether answers must be bitwise identical. The number is then constant.
    """
    if deterministic or not samples_in_flight:
        return FEW_SLOTS
    return min(samples_in_flight, MOST_SLOTS)
