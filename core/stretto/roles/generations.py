"""Requests to inference engines, as a rollout worker makes them: streams of chunks put together, lost ones
asked for again, and what an engine had begun when it died finished by another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.messages import Abort, ChunkBatch, Confirm, Generate
from stretto.engine import Finish, GenerateRequest
from stretto.errors import EngineError
from stretto.roles.pool import Pool
from stretto.roles.setting import Setting

__all__ = ["Floor", "Generations", "Sample"]

_SILENCE_S = 10.0
"""After so long without a chunk of a request, its engine is asked again."""


class Floor:
    """The version that no token of a ticket is older than: its `min_version`, until every request made so far
    has begun; then that of the oldest token there is, which later requests must respect.

    Args:
        told: called once, with the version, when it is known.
    """

    def __init__(self, min_version: int, told: Callable[[int], None]) -> None:
        self.version = min_version
        self._told: Callable[[int], None] | None = told
        self._not_begun = 0
        self._oldest: int | None = None

    def asked(self) -> None:
        """One more request is being made."""
        self._not_begun += 1

    def begun(self, oldest: int) -> None:
        """Every sample of a request has its first token; none of its tokens is older than this."""
        self._not_begun -= 1
        self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)
        if self._not_begun == 0 and self._told is not None:
            self.version = self._oldest
            self._told(self._oldest)
            self._told = None


@dataclass
class Sample:
    """What has arrived of one sample."""

    parts: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]
    length: int = 0
    finish: Finish = ""
    error: str = ""
    engine: str = ""

    def tokens(self) -> NDArray[np.int32]:
        """(A,) int32, the answer so far."""
        return _joined([part[0] for part in self.parts], np.int32)

    def logprobs(self) -> NDArray[np.float32]:
        """(A,) float32, as reported with the tokens."""
        return _joined([part[1] for part in self.parts], np.float32)

    def versions(self) -> NDArray[np.int32]:
        """(A,) int32, the policy version of each token."""
        return _joined([part[2] for part in self.parts], np.int32)


class _Generation:
    """One request under way, on one engine after another if they die."""

    def __init__(self, request: GenerateRequest, floor: Floor) -> None:
        self.request = request
        self.floor = floor
        self.samples = [Sample([]) for _ in request.seeds]
        self.news = anyio.Event()
        self.engine = ""
        """Who was asked last; what former ones still send does not count."""
        self._begun = False
        floor.asked()

    @property
    def finished(self) -> bool:
        return all(sample.finish for sample in self.samples)

    def add(
        self,
        engine: str,
        sample: Sample,
        position: int,
        columns: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
        finish: Finish,
        error: str,
    ) -> bool:
        """Take a chunk; False if something before it is missing."""
        if sample.finish or engine != self.engine:
            return True
        if position > sample.length:
            return False
        known = sample.length - position
        if known < len(columns[0]):
            tokens, logprobs, versions = (column[known:] for column in columns)
            sample.parts.append((tokens, logprobs, versions))
            sample.length += len(tokens)
        sample.finish, sample.error, sample.engine = finish, error, engine
        self._note_begun()
        self.news.set()
        return True

    def forget_unfinished(self) -> None:
        """Before a deterministic engine repeats from their seeds what another had begun, perhaps with other
        weights: parts of two answers make none."""
        for sample in self.samples:
            if not sample.finish:
                sample.parts, sample.length = [], 0

    def _note_begun(self) -> None:
        """Samples arrive in any order, so the first token of all is known only with that of each."""
        if not self._begun and all(sample.length for sample in self.samples):
            self._begun = True
            self.floor.begun(min(int(part[2].min()) for sample in self.samples for part in sample.parts))


class Generations:
    """The requests of this worker, and the subject on which their chunks arrive."""

    def __init__(self, setting: Setting, engines: Pool) -> None:
        self._setting = setting
        self._bus = setting.bus
        self._engines = engines
        self._reply = f"{setting.bus.inbox('inference')}.chunks.in"
        self._under_way: dict[str, _Generation] = {}

    async def open(self) -> None:
        """Listen for chunks. Called once, before `run`."""
        await self._bus.subscribe(self._reply, ChunkBatch, self._take)

    async def run(self, request: GenerateRequest, floor: Floor) -> list[Sample]:
        """Every sample of a request, finished.

        Raises:
            EngineError: if an engine refused it.
        """
        generation = self._under_way[request.id] = _Generation(request, floor)
        try:
            while not generation.finished:
                async with self._engines.member() as engine:
                    await self._on(engine, generation)
        finally:
            del self._under_way[request.id]
        for sample in generation.samples:
            if sample.finish == "error":
                raise EngineError(f"{sample.engine}: {sample.error}")
            if sample.finish == "abort":
                raise EngineError(f"{sample.engine} ended the request unasked")
        return generation.samples

    async def _on(self, engine: str, generation: _Generation) -> None:
        """Let one engine finish what is left. Cancelled when the engine is lost."""
        names, request = self._setting.names, generation.request
        generation.engine = engine
        if self._setting.composed.config.inference.deterministic:
            generation.forget_unfinished()
        try:
            await self._ask(engine, generation)
            while not generation.finished:
                generation.news = anyio.Event()
                with anyio.move_on_after(_SILENCE_S):
                    await generation.news.wait()
                    continue
                await self._ask(engine, generation)  # the question or the answer was lost
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await self._bus.publish(names.worker("inference", engine, "abort"), Abort(request.id))
            raise
        await self._bus.publish(names.worker("inference", engine, "confirm"), Confirm((request.id,)))

    async def _ask(self, engine: str, generation: _Generation) -> None:
        if self._setting.composed.config.inference.deterministic:
            request = generation.request
        else:
            begun = tuple(Array.of(sample.tokens()) for sample in generation.samples)
            request = msgspec.structs.replace(generation.request, begun=begun)
        have = tuple(-1 if sample.finish else sample.length for sample in generation.samples)
        request = msgspec.structs.replace(request, have=have, min_version=generation.floor.version)
        subject = self._setting.names.worker("inference", engine, "generate")
        await self._bus.publish(subject, Generate(request, self._reply))

    async def _take(self, batch: ChunkBatch) -> None:
        """Hand the chunks of a message to the requests they belong to."""
        tokens, logprobs, versions = batch.tokens.numpy(), batch.logprobs.numpy(), batch.versions.numpy()
        at = 0
        behind: set[str] = set()
        for head in batch.heads:
            span = slice(at, at + head.count)
            at += head.count
            generation = self._under_way.get(head.request)
            if generation is None or head.sample >= len(generation.samples):
                continue
            columns = (tokens[span], logprobs[span], versions[span])
            sample = generation.samples[head.sample]
            if not generation.add(batch.worker, sample, head.position, columns, head.finish, head.error):
                behind.add(head.request)
        for request in behind:
            await self._ask(batch.worker, self._under_way[request])


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
