"""The contracts of engines: training engines hold a model over ranks, inference engines sample from it.

Logprobs are everywhere those of `log_softmax(logits / temperature)`; a column of logprobs stands at
the token it is the probability of, so the first token of a sequence has none (0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from stretto.array import Array
from stretto.component import NonNegativeInt, PositiveFloat, PositiveInt, Share
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
    "CanaryConfig",
    "Chunk",
    "Emit",
    "Finish",
    "GenerateRequest",
    "InferenceConfig",
    "InferenceEngine",
    "Load",
    "Sampling",
    "SwapReport",
    "TrainingConfig",
    "TrainingEngine",
]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Logits are divided by it; 0 takes the most likely token (evaluation only)."""
    top_p: Share = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Keep tokens at least so likely, as a part of the most likely one's probability; 0 keeps all."""
    logit_bias: dict[int, Annotated[float, msgspec.Meta(ge=-100, le=100)]] = {}
    """Added to the logits of these token ids, before anything else; -100 as good as forbids a token."""
    max_tokens: PositiveInt = 256
    """Longest answer, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the token that completes one is the answer's last."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end an answer, beside the model's own; the answer's last token is the one met."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens: answers end by `stop`, `stop_token_ids` or length."""

    @property
    def reshapes(self) -> bool:
        """Whether tokens are drawn from another distribution than `softmax(logits / temperature)`."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(self.logit_bias)


# ------------------------------------------------------------------------------------- inference


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fixed text that trainer and engine score at every swap of weights: do both see the same model?

    The text is drawn at random, from the run's seed, over the whole vocabulary."""

    sequences: PositiveInt = 4
    """Sequences of it."""
    tokens: Annotated[int, msgspec.Meta(ge=2)] = 32
    """Tokens of each; the engine's context must hold them."""
    bound: PositiveFloat = 0.1
    """Largest mean difference between both sides' logprobs of a token. In float32 it is about 1e-5; engines
    that compute in bfloat16 drift by some hundredths."""
    on_drift: Literal["warn", "stop"] = "warn"
    """Beyond the bound: say so, or end the run before a sample of that version trains. With `stop`, an engine
    that cannot be compared is refused."""


class InferenceConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every inference engine's section."""

    use: str = "torch"
    """Name of the inference engine."""
    replicas: PositiveInt = 1
    """Inference workers, each with the whole model."""
    on_swap: Literal["keep_cache", "recompute"] = "keep_cache"
    """What becomes of requests in flight at a weight swap: they go on over the KV cache they have,
    or it is computed anew, so that every logprob is exactly its version's own."""
    deterministic: bool = False
    """The same answers bit for bit, whatever else the engine is doing; costs some speed."""
    canary: CanaryConfig | None = CanaryConfig()
    """Scored on both sides at every swap; null for none."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt and the samples wanted of it. Sent again with the same id, it is the same request."""

    id: str
    """Unique in the run and the same in every repetition: `ticket/attempt/turn`."""
    prompt_ids: Array
    """(P,) int32, P >= 1."""
    seeds: tuple[int, ...]
    """One 64-bit seed a sample; their number is the number of samples n."""
    sampling: Sampling
    min_version: int
    """No token may be sampled by older weights; an engine that is behind lets the request wait."""
    begun: tuple[Array, ...] = ()
    """For each sample, int32 tokens it already has from another engine: the answer goes on after
    them. Empty, or n arrays."""
    have: tuple[int, ...] = ()
    """For each sample, how many tokens of the answer the asker holds (those of `begun` included):
    the stream begins there. -1: all of it, nothing is wanted of this sample. Empty: none of any."""
    deadline_s: float = 3600.0
    """After so long without having finished, the engine ends it with `error`."""


Finish = Literal["", "stop", "length", "abort", "error"]


@dataclass(slots=True)
class Chunk:
    """New tokens of one sample. `finish` is empty until its last chunk."""

    request: str
    sample: int
    """Index of the sample in its request."""
    position: int
    """Index in the answer of the first token here; the chunks of a sample leave no gap."""
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probability with which each token was really drawn."""
    versions: NDArray[np.int32]
    """Policy version whose weights gave each token's logits."""
    finish: Finish = ""
    error: str = ""
    """Why, where `finish` is `error`."""


Emit = Callable[[list[Chunk]], None]


class SwapReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a swap of weights did."""

    version: int
    digest: str
    """Digest of the weights now served, computed from the tensors that were loaded."""
    pause_s: float
    """How long no token could be sampled."""
    hashes: Mapping[str, str] = {}
    """Tensor name -> SHA-256 in hex of the bytes that were really loaded, under the names of the update.
    Empty where an engine cannot say; then the digest alone is compared."""


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An engine's figures, for routing and for people. Totals count from its start."""

    version: int
    """Policy version served; -1 before the first swap."""
    running: int
    """Samples being decoded."""
    waiting: int
    """Samples not yet begun."""
    slots: int
    """Samples that can be decoded at once."""
    generated_tokens: int
    busy_s: float
    """Seconds in which at least one sample was being decoded."""
    swaps: int
    pause_s: float
    """Seconds lost to swaps."""
    pause_max_s: float
    kv_used: float | None = None
    """Share of the memory for keys and values that running samples hold; None where the engine cannot say."""


class InferenceEngine(Protocol):
    """Samples from one model. Lives in one process; its methods are called from one event loop.

    Chunks of one sample are emitted in order, each once; different samples in any order. Compute
    happens outside the event loop's thread.
    """

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """Load the model. From now on `emit` is called, on the event loop, with lists of new chunks,
        at most every 20 ms or so. No request is served before the first `swap`.

        Args:
            tasks: for whatever the engine does in the background. An exception there ends the worker.

        Raises:
            EngineError: if the model cannot be loaded or served.
        """
        ...

    def generate(self, request: GenerateRequest) -> None:
        """Take a request; returns at once. The last chunk of each sample carries its `finish`.
        A request that no engine could serve is answered by `error` chunks, which fail its ticket. One that
        this engine cannot go on with for reasons of its own is ended by `abort` chunks, as if asked for:
        another engine then goes on after the tokens emitted."""
        ...

    def abort(self, request: str) -> None:
        """End what is left of a request, with `abort` chunks, within one decode step. Idempotent."""
        ...

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Serve these weights from the next token on, requests in flight included.

        Raises:
            WeightsError: if they do not fit the model; the engine then still serves the old ones.
        """
        ...

    async def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """What the weights served now say of given text, at temperature 1: for each sequence of L >= 2
        tokens, (L - 1,) log-probabilities of its tokens after the first. For the comparison with the
        trainer's.

        Raises:
            EngineError: if the engine cannot say.
        """
        ...

    def load(self) -> Load:
        """The figures at this moment."""
        ...

    async def stop(self) -> None:
        """Free everything. No chunk is emitted afterwards."""
        ...


# -------------------------------------------------------------------------------------- training


class TrainingConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every training engine's section."""

    use: str = "torch"
    """Name of the training engine."""
    processes: PositiveInt = 1
    """Ranks of the worker group."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    @property
    def data_parallel(self) -> int:
        """Parts that a batch is split into, D. Ranks are numbered so that those which share a part follow
        each other: rank r works on part r // (processes // D)."""
        return self.processes


class TrainingEngine(Protocol):
    """Holds one model, in one rank of its worker group. Called from one thread, one call at a time.

    Every method but `stop` is called in all ranks of the group, in the same order, and may communicate.
    A batch is the rank's own part of the data, at least one sequence; ranks that share a part are given the
    same. Micro-batching and parallelism are the engine's business: the gradient must not depend on them.
    """

    def load(self, folder: Path | None) -> None:
        """Load the run's initial model (None), or all that `save` wrote into `folder`, with whatever
        layout. Called first, and again to go back to a checkpoint.

        Raises:
            EngineError: if it cannot be loaded.
        """
        ...

    def forward(self, batch: Batch, *, temperature: float) -> Tensor:
        """What the model's head says of every token of the batch under the current weights: (T,) float32,
        on CPU, no gradient. The temperature is for logprobs."""
        ...

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """One optimizer step on the parts of all ranks together. Returns the loss's statistics over all
        their trained tokens (see `stretto.algorithm.LossFunction`), the same in every rank, and the
        engine's own: `loss`, `grad_norm`, `lr`, `micro_batches`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, on CPU, one after the other; or an adapter alone, in
        the form of `stretto.models.lora_files`. Every rank goes through all of them; what rank 0 gets
        counts."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything a repetition needs into an empty folder that all ranks see: `model/` in Hugging
        Face format, optimizer, schedule and random states as safetensors and JSON.

        Raises:
            OSError: if it cannot be written; the caller removes the folder.
        """
        ...

    def stop(self) -> None:
        """Free everything."""
        ...
