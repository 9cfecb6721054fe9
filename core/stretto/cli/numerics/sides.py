"""The two sides that are compared: a trainer and an engine of a run, both in this process."""

from __future__ import annotations

import gc
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from stretto.algorithm import Loss
from stretto.array import Array, KeptTokens
from stretto.engine import Chunk, GenerateRequest, InferenceEngine, Sampling, TrainingEngine, sample_seed
from stretto.errors import EngineError
from stretto.models.digest import swap_fault
from stretto.models.lora_files import is_adapter, merge_adapter_files
from stretto.models.version_files import FolderPublisher, open_version

if TYPE_CHECKING:
    from anyio.abc import ObjectReceiveStream
    from torch import Tensor

    from stretto.rl.batch import Batch
    from stretto.weights import WeightsNote

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]

_GROWTH, _TRIES = 4.0, 15
"""Growth of the learning rate from one try of `Trainer.move` to the next, and the most tries."""
_BEFORE = 16
"""Tokens that each sample has before the version changes, so that there is something to compare."""


class Trainer:
    """A training engine in one process, with the initial model."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        engine.load(None)

    def free(self) -> None:
        """Free the memory of the model."""
        self.engine.stop()
        del self.engine
        gc.collect()

    def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Logprobs]:
        """Return (L - 1,) of each sequence, each computed alone."""
        return [each for one in sequences for each in self.together([one], temperature)]

    def together(
        self, sequences: Sequence[Tokens], temperature: float = 1.0, kept: Sequence[KeptTokens] | None = None
    ) -> list[Logprobs]:
        """Return (L - 1,) of each sequence, computed in one batch. With kept tokens, (L,) of each sequence,
        they are the logprobs of the distribution that the sampler drew from."""
        batch = _batch_of(sequences, kept)
        parts = self.engine.forward(batch, temperature=temperature).split(batch.lengths)
        return [part[1:].numpy() for part in parts]

    def gradient_norm(self, sequences: Sequence[Tokens], seed: int) -> float:
        """Return the norm of the gradient of a random linear function of all logprobs. No weight changes."""
        signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), sum(map(len, sequences)))
        return self._train(sequences, signs, 0.0)["grad_norm"]

    def move(self, text: Tokens, far: float) -> float:
        """Train on a text, with larger and larger steps, until its logprobs have moved by `far` nats in the
        mean. Return how far they have moved. Raise EngineError if they do not move."""
        [before] = self.logprobs([text])
        for number in range(_TRIES):
            self._train([text], np.full(len(text), -1, np.float32), _GROWTH**number)
            [after] = self.logprobs([text])
            if (moved := float(np.abs(after - before).mean())) >= far:
                return moved
        raise EngineError(f"{_TRIES} larger and larger steps of training did not change the logprobs")

    def _train(
        self, sequences: Sequence[Tokens], signs: NDArray[np.float32], scale: float
    ) -> Mapping[str, float]:
        import torch

        def linear(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            return logprobs * batch["signs"], {}

        batch = _batch_of(sequences)
        mask = torch.ones(batch.num_tokens, dtype=torch.bool)
        batch = batch.with_columns({"signs": torch.from_numpy(signs), "loss_mask": mask})
        loss = Loss(linear, "token", lr_scale=lambda figures, old: scale)
        return self.engine.train(batch, loss, temperature=1.0)


def _batch_of(sequences: Sequence[Tokens], kept: Sequence[KeptTokens] | None = None) -> Batch:
    import torch

    from stretto.rl.batch import Batch, Drawn

    tokens = {"tokens": torch.from_numpy(np.concatenate(sequences)).long()}
    return Batch([*map(len, sequences)], tokens, {}, drawn=None if kept is None else Drawn({}, kept))


class Sampled(NamedTuple):
    """One sample of the engine, prompt included: L tokens, of which the last A were sampled."""

    tokens: Tokens
    logprobs: Logprobs
    """(A,) as the engine returned them."""
    versions: NDArray[np.int32]
    """(A,)"""
    kept: KeptTokens
    """(L,), or (0,) if the engine sent none."""

    @property
    def first(self) -> int:
        """Position of the first sampled token."""
        return len(self.tokens) - len(self.logprobs)


@dataclass
class Engine:
    """An inference engine that serves, and the versions that were published for it."""

    engine: InferenceEngine
    stream: ObjectReceiveStream[list[Chunk]]
    folder: Path
    publisher: FolderPublisher
    requests: int = 0

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightsNote:
        """Write a version as a trainer of a run does."""
        return self.publisher.publish(version, tensors)

    async def swap(self, note: WeightsNote, model: Path) -> str:
        """Serve a version; an adapter is merged into the files of `model` first. Return how the served
        weights differ from the published ones; empty if they match."""
        received = update = open_version(note, Path(note.address))
        if is_adapter(update.hashes()):
            update = merge_adapter_files(received, model, self.folder / f"merged-{note.version}")
            received.close()
        try:
            return swap_fault(await self.engine.swap(update), update.note, update.hashes())
        finally:
            update.close()

    async def sample(
        self,
        prompts: Sequence[Tokens],
        sampling: Sampling,
        *,
        wants_kept: bool = False,
        meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[Sampled]:
        """Return one sample for each prompt, with the same seeds in each call. `meanwhile` is called when all
        samples have their first tokens."""
        parts: list[list[Chunk]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            seed, name = sample_seed("numerics", "1", number), f"{self.requests}-{number}"
            given = Array.of(prompt, np.int32), (seed,), sampling, 0
            self.engine.generate(GenerateRequest(name, *given, wants_kept=wants_kept))
        self.requests += 1
        async with anyio.create_task_group() as tasks:
            while not all(part and part[-1].finish for part in parts):
                for chunk in await self.stream.receive():
                    if chunk.finish in ("abort", "error"):
                        raise EngineError(f"the engine gave up a sample: {chunk.error or 'no reason given'}")
                    parts[int(chunk.request.rpartition("-")[2])].append(chunk)
                count = min(sum(len(chunk.tokens) for chunk in part) for part in parts)
                if meanwhile is not None and count >= min(_BEFORE, sampling.max_tokens // 2):
                    tasks.start_soon(meanwhile)
                    meanwhile = None
        return [_join(prompt, chunks) for prompt, chunks in zip(prompts, parts, strict=True)]


def _join(prompt: Tokens, chunks: Sequence[Chunk]) -> Sampled:
    """Return the sample of these chunks. Raise EngineError if they leave a gap, as a worker would."""
    ends = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
    if [chunk.position for chunk in chunks] != ends[:-1].tolist():
        raise EngineError("the chunks of a sample leave a gap, or overlap")
    kept = [chunk.kept for chunk in chunks if chunk.kept is not None]
    return Sampled(
        np.concatenate([prompt, *(chunk.tokens for chunk in chunks)]).astype(np.int32),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.versions for chunk in chunks]),
        KeptTokens.concat([KeptTokens.none(len(prompt) if kept else 0), *kept]),
    )


@asynccontextmanager
async def serving(engine: InferenceEngine, folder: Path) -> AsyncGenerator[Engine]:
    """Start an engine, and stop it at the end of the block."""
    send, receive = anyio.create_memory_object_stream[list[Chunk]](math.inf)
    try:
        async with send, receive, anyio.create_task_group() as tasks:
            await engine.start(send.send_nowait, tasks)
            yield Engine(engine, receive, folder, FolderPublisher(folder / "versions", keep=1, shard_gb=1))
            tasks.cancel_scope.cancel()  # before `stop`, or a task would start the stopped server again
    finally:
        with anyio.CancelScope(shield=True):
            await engine.stop()
