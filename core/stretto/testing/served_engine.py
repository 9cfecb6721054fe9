"""An inference engine in its own event loop, which tests call as a worker does."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import numpy as np
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

from stretto.array import Array
from stretto.engine import (
    Chunk,
    Finish,
    GenerateRequest,
    InferenceEngine,
    Load,
    Sampling,
    SleepingEngine,
    SwapReport,
)
from stretto.errors import EngineError, one_job
from stretto.models.version_files import FolderPublisher, open_version
from stretto.testing.tiny_model import SPECIAL, VOCABULARY, NoModel, Reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sample", "ServedEngine"]


@dataclass
class Sample:
    """One sample, assembled from its chunks."""

    start: int = 0
    """Position of the first token that arrived."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    kept: list[list[int]] = field(default_factory=list[list[int]])
    """The ids from which each token was drawn, if the engine sent them."""
    finish: Finish = ""
    error: str = ""
    arrivals: list[float] = field(default_factory=list[float])
    """Time of arrival of each chunk, from `time.monotonic`."""

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk. Raises AssertionError if the chunk is not the next one, or not valid."""
        assert not self.finish, f"a chunk after the last one: {chunk}"
        if not self.arrivals:
            self.start = chunk.position
        assert chunk.position == self.start + len(self.tokens), f"a missing or repeated token: {chunk}"
        types = (chunk.tokens.dtype, chunk.logprobs.dtype, chunk.versions.dtype)
        assert types == (np.int32, np.float32, np.int32), f"columns of {types}"
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions), (
            f"columns of different lengths: {chunk}"
        )
        assert (chunk.finish == "error") == bool(chunk.error), f"`error` and `finish` disagree: {chunk}"
        assert len(chunk.tokens) or chunk.finish, "an empty chunk"
        self.arrivals.append(time.monotonic())
        self.tokens += chunk.tokens.tolist()
        self.logprobs += chunk.logprobs.tolist()
        self.versions += chunk.versions.tolist()
        if chunk.kept is not None:
            assert len(chunk.kept) == len(chunk.tokens), f"kept tokens of other tokens: {chunk}"
            ends = np.cumsum(chunk.kept.counts, dtype=np.int64)[:-1]
            self.kept += [ids.tolist() for ids in np.split(chunk.kept.ids, ends)] if len(chunk.kept) else []
        self.finish, self.error = chunk.finish, chunk.error


Key = tuple[str, int]
"""Id of a request, and index of a sample."""


class ServedEngine:
    """An engine in its own event loop, and all chunks that it has emitted. Tests call it from their thread.
    Each `swap` gives it the next version (0, 1, ...) in a folder, as with the transport `file`."""

    def __init__(
        self, engine: InferenceEngine, folder: Path, *, tolerance: float = 1e-3, start_s: float = 120.0
    ) -> None:
        self.engine = engine
        self.tolerance = tolerance
        """Maximum difference between a logprob and that of the reference, in nats."""
        self.start_s = start_s
        """Maximum duration of a start, of a swap and of the end, in seconds."""
        self.weights: dict[int, Reference | NoModel] = {}
        """The reference of each version."""
        self.messages = 0
        self._publisher = FolderPublisher(folder / "weights", keep=3, shard_gb=1.0)
        self._published = count()
        self._portal: BlockingPortal
        self._samples: dict[Key, Sample] = {}
        self._open_keys: dict[Key, None] = {}
        self._broken: BaseException | None = None
        self._violations: list[AssertionError] = []
        self._news = anyio.Event()
        self._over = anyio.Event()

    @contextmanager
    def running(self) -> Generator[ServedEngine]:
        """Start the engine, and stop it at the end of the block."""
        with start_blocking_portal("asyncio") as portal:
            self._portal = portal
            end, _ = portal.start_task(self._live)
            try:
                yield self
            finally:
                portal.call(self._over.set)
                end.result(self.start_s)
                self._publisher.close()

    # -------------------------------------------------------------------------- what a worker does

    def ask(self, *requests: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        """Send requests to the engine, with the files of their images if they have any."""
        options = {"images": images} if images else {}
        for request in requests:
            have = request.have or (0,) * len(request.seeds)
            self._open_keys |= {(request.id, i): None for i in range(len(request.seeds)) if have[i] >= 0}
        self._portal.call(lambda: [self.engine.generate(request, **options) for request in requests])

    def abort(self, request: str) -> None:
        """Abort a request."""
        self._portal.call(self.engine.abort, request)

    def load(self) -> Load:
        """Return the load figures of the engine."""
        return self._portal.call(self.engine.load)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the engine's logprobs of given sequences."""
        arrays = [np.array(sequence, np.int32) for sequence in sequences]
        return self._portal.call(self.engine.logprobs, arrays)

    def sleep(self) -> None:
        """Put the engine to sleep, once it has ended all requests."""
        self._portal.call(cast("SleepingEngine", self.engine).sleep)

    def swap(self, reference: Reference | NoModel) -> SwapReport:
        """Make the engine serve the weights of a model as the next version."""
        report = self.swap_tensors(reference.tensors())
        self.weights[report.version] = reference
        return report

    def swap_tensors(self, tensors: Mapping[str, Tensor]) -> SwapReport:
        """Make the engine serve tensors as the next version; they need not fit the model."""
        return self._portal.call(self._swap, next(self._published), tensors)

    def stop(self) -> None:
        """Stop the engine before the end of the test."""
        self._portal.call(self.engine.stop)

    @property
    def version(self) -> int:
        """The newest version that the engine received."""
        return max(self.weights)

    # ---------------------------------------------------------------------------------- the answers

    def until(self, *keys: Key, tokens: int | None = None, within_s: float = 180.0) -> list[Sample]:
        """Wait until each sample has finished or has `tokens` tokens, and return the samples."""
        return self._portal.call(self._until, keys, tokens, within_s)

    def finished(self, request: GenerateRequest) -> list[Sample]:
        """Wait for all samples of a request and return them."""
        return self.until(*((request.id, i) for i in range(len(request.seeds))))

    def answers(self, *requests: GenerateRequest) -> list[list[Sample]]:
        """Send requests and return the finished samples of each."""
        self.ask(*requests)
        return [self.finished(request) for request in requests]

    def answer(self, request: GenerateRequest) -> Sample:
        """Send a request and return its only sample."""
        return self.answers(request)[0][0]

    def until_load(self, condition: Callable[[Load], bool], within_s: float = 180.0) -> Load:
        """Wait until the load figures fulfil a condition, and return them."""
        deadline = time.monotonic() + within_s
        while not condition(load := self.load()):
            if self._broken is not None:
                raise EngineError("the engine has ended") from self._broken
            assert time.monotonic() < deadline, f"the load figures never fulfilled the condition: {load}"
            time.sleep(0.002)
        return load

    def settle(self) -> None:
        """Abort all unfinished samples and wait until the engine is idle."""
        open_ = [key for key in self._open_keys if not self._samples.get(key, Sample()).finish]
        for request in {key[0] for key in open_}:
            self.abort(request)
        self.until(*open_)
        self._open_keys.clear()
        self.until_load(lambda load: load.running == load.waiting == 0)

    def assert_own_logprobs(self, asked: GenerateRequest, sample: Sample, begun: Sequence[int] = ()) -> None:
        """Assert that each token has the reference logprob of its version; without a model, a finite one."""
        assert all(-np.inf < logprob <= 0 for logprob in sample.logprobs), f"logprobs {sample.logprobs}"
        prompt, answer = asked.prompt_ids.numpy().tolist(), [*begun, *sample.tokens]
        for version in set(sample.versions):
            reference = self.weights[version]
            if isinstance(reference, NoModel):
                continue
            forward = reference.logprobs(prompt, answer, asked.sampling.temperature)[len(begun) :]
            of_version = np.array(sample.versions) == version
            errors = np.abs(forward - sample.logprobs)[of_version]
            assert errors.max() <= self.tolerance, (
                f"{asked.id}: logprobs differ from version {version}'s by {errors.max():.2g}, first at token "
                f"{np.flatnonzero(of_version)[errors > self.tolerance][0]} of {len(answer)}"
            )

    # --------------------------------------------------------------------------- on the event loop

    async def _live(self, *, task_status: TaskStatus[None]) -> None:
        try:
            async with one_job() as tasks:
                with anyio.fail_after(self.start_s):
                    await self.engine.start(self._emit, tasks)
                task_status.started()
                await self._over.wait()
                tasks.cancel_scope.cancel()
        except BaseException as error:
            self._broken = error
            self._news.set()
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self.engine.stop()

    def _emit(self, chunks: list[Chunk]) -> None:
        self.messages += 1
        if not chunks:
            self._violations.append(AssertionError("an empty message"))
        for chunk in chunks:
            try:
                self._samples.setdefault((chunk.request, chunk.sample), Sample()).add(chunk)
            except AssertionError as error:  # it must fail the test, not the engine
                self._violations.append(error)
        self._news.set()
        self._news = anyio.Event()

    async def _until(self, keys: Sequence[Key], tokens: int | None, within_s: float) -> list[Sample]:
        with anyio.move_on_after(within_s) as scope:
            while not all(self._reached(key, tokens) for key in keys) and not self._violations:
                if self._broken is not None:
                    raise EngineError("the engine has ended") from self._broken
                await self._news.wait()
        if self._violations:
            raise self._violations.pop()
        missing = [key for key in keys if not self._reached(key, tokens)]
        assert not scope.cancelled_caught, (
            f"after {within_s:g} s, these samples are incomplete: {missing[:5]}"
        )
        return [deepcopy(self._samples[key]) for key in keys]

    def _reached(self, key: Key, tokens: int | None) -> bool:
        sample = self._samples.get(key, Sample())
        return bool(sample.finish) or (tokens is not None and len(sample.tokens) >= tokens)

    async def _swap(self, version: int, tensors: Mapping[str, Tensor]) -> SwapReport:
        note = self._publisher.publish(version, tensors.items())
        update = open_version(note, Path(note.address))
        try:
            with anyio.fail_after(self.start_s):
                return await self.engine.swap(update)
        finally:
            update.close()


_ids = count()


def request(
    prompt: int | Sequence[int] = 12,
    n: int = 1,
    *,
    seed: int = 0,
    min_version: int = 0,
    begun: Sequence[Sequence[int]] = (),
    have: tuple[int, ...] = (),
    deadline_s: float = 600.0,
    max_tokens: int = 20,
    ignore_eos: bool = True,
    wants_kept: bool = False,
    **sampling: Any,
) -> GenerateRequest:
    """Make a request with the given prompt, or with a random prompt of the given length."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = np.random.default_rng(number).integers(len(SPECIAL), VOCABULARY, prompt).tolist()
    return GenerateRequest(
        id=f"{number}/1/0",
        prompt_ids=Array.of(prompt, np.int32),
        seeds=tuple(range(seed, seed + n)),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
        min_version=min_version,
        begun=tuple(Array.of(tokens, np.int32) for tokens in begun),
        have=have,
        deadline_s=deadline_s,
        wants_kept=wants_kept,
    )
