"""Requests to inference engines, as a rollout worker makes them: streams of chunks put together, lost ones
asked for again, and what an engine had begun when it died, or gave it up, finished by another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.messages import Abort, Beacon, ChunkBatch, ChunkHead, Confirm, Generate
from stretto.engine import Finish, GenerateRequest
from stretto.errors import EngineError
from stretto.workers.context import WorkerContext
from stretto.workers.routing import Router
from stretto.workflow import OnTokens

__all__ = ["GeneratedSample", "Generations", "VersionFloor"]

log = structlog.get_logger()

_SILENT_ASKS = 3
"""A request that was asked for so often in vain leaves an engine that does nothing else either."""
_GIVEN_UP = 5
"""A request that engines gave up so often fails."""
_TOKEN = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("version", "<i4")])
"""A sampled token, as answers are kept: many pieces of a few tokens arrive, so a piece has to cost little."""


class VersionFloor:
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


@dataclass(slots=True)
class GeneratedSample:
    """What has arrived of one sample."""

    records: bytearray = field(default_factory=bytearray)
    """Its tokens, one `_TOKEN` after the other."""
    finish: Finish = ""
    engine: str = ""
    """Who gave the last of them."""
    told: int = 0
    """How many of them whoever listens was told of."""

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.records) // _TOKEN.itemsize

    def tokens(self) -> NDArray[np.int32]:
        """(A,) int32, the answer so far."""
        return self._column("token")

    def logprobs(self) -> NDArray[np.float32]:
        """(A,) float32, as reported with the tokens."""
        return self._column("logprob")

    def versions(self) -> NDArray[np.int32]:
        """(A,) int32, the policy version of each token."""
        return self._column("version")

    def _column(self, name: str) -> NDArray[Any]:
        return np.frombuffer(self.records, _TOKEN)[name].copy()


class _Generation:
    """One request under way, on one engine after another if they die."""

    def __init__(
        self,
        request: GenerateRequest,
        floor: VersionFloor,
        exact_version: int | None,
        on_tokens: OnTokens | None,
    ) -> None:
        self.request = request
        self.floor = floor
        self.exact_version = exact_version
        self.on_tokens = on_tokens
        self.samples = [GeneratedSample() for _ in request.seeds]
        self.unfinished = len(self.samples)
        self.failure: Exception | None = None
        """Why there will be no answer."""
        self.engine = ""
        """Who is at it."""
        self.given_up = False
        """That engine will not finish it."""
        self.alive = False
        """It has sent something since this was last looked at."""
        self.heard_at = time.monotonic()
        self.in_vain = 0
        """How often it was asked since it last sent anything."""
        self.wake = anyio.Event()
        """Set when that engine is done with it, or silent."""
        self._begun = False
        floor.asked()

    @property
    def over(self) -> bool:
        """Whether that engine has nothing more to say."""
        return self.given_up or self.failure is not None or not self.unfinished

    def move_to(self, engine: str) -> None:
        """Another engine goes on with what is left, or the same one anew."""
        self.engine, self.given_up, self.wake = engine, False, anyio.Event()
        self.heard_at, self.in_vain = time.monotonic(), 0

    def look(self, now: float, silence_s: float) -> None:
        """Wake whoever waits if nothing has come for so long."""
        if self.alive:
            self.alive, self.heard_at, self.in_vain = False, now, 0
        elif now - self.heard_at >= silence_s:
            self.heard_at = now
            self.in_vain += 1
            self.wake.set()

    def add(self, head: ChunkHead, records: memoryview) -> bool:
        """Take a chunk; False if something before it is missing."""
        sample = self.samples[head.sample]
        self.alive = True
        if sample.finish:
            return True
        begins = not sample.records
        known = len(sample.records) - head.position * _TOKEN.itemsize
        if known < 0:
            return False
        sample.records += records[known:]
        if begins and records:
            self._note_begun()
        if self.on_tokens is not None and sample.length > sample.told:
            self._tell(self.on_tokens, sample, head.sample)
        if head.finish:
            self._end(sample, head)
        return True

    def forget_unfinished(self) -> None:
        """Before a deterministic engine repeats from their seeds what another had begun, perhaps with other
        weights: parts of two answers make none."""
        for sample in self.samples:
            if not sample.finish:
                sample.records = bytearray()

    def _end(self, sample: GeneratedSample, head: ChunkHead) -> None:
        if head.finish == "abort":  # not asked for: nothing is listened to after that
            self.given_up = True
        elif head.finish == "error":
            self.failure = EngineError(f"{self.engine}: {head.error}")
        else:
            sample.finish, sample.engine = head.finish, self.engine
            self.unfinished -= 1
        if self.over:
            self.wake.set()

    def _tell(self, on_tokens: OnTokens, sample: GeneratedSample, index: int) -> None:
        told, sample.told = sample.told, sample.length
        try:
            on_tokens(index, sample.tokens()[told:])
        except Exception as error:  # noqa: BLE001 - raised again in the ticket that listens
            self.failure = error
            self.wake.set()

    def _note_begun(self) -> None:
        """Samples arrive in any order, so the first token of all is known only with that of each."""
        if not self._begun and all(sample.records for sample in self.samples):
            self._begun = True
            records = np.frombuffer(b"".join(sample.records for sample in self.samples), _TOKEN)
            self.floor.begun(int(records["version"].min()))


class Generations:
    """The requests of this worker, and the subject on which their chunks arrive.

    Args:
        silence_s: after so long without a chunk of a request, its engine is asked again at the next beacon.
    """

    def __init__(self, context: WorkerContext, engines: Router, *, silence_s: float = 10.0) -> None:
        self._context = context
        self._silence_s = silence_s
        self._bus = context.bus
        self._engines = engines
        self._deterministic = context.composed.config.inference.deterministic
        self._reply = f"{context.bus.inbox('inference')}.chunks.in"
        self._under_way: dict[str, _Generation] = {}
        """By the name that the engine at work on it knows it by."""
        context.on_beacon(self._look)

    async def open(self) -> None:
        """Listen for chunks. Called once, before `run`."""
        await self._bus.subscribe(self._reply, ChunkBatch, self._take)

    async def run(
        self,
        request: GenerateRequest,
        floor: VersionFloor,
        *,
        exact_version: int | None = None,
        affinity: str = "",
        on_tokens: OnTokens | None = None,
    ) -> list[GeneratedSample]:
        """Every sample of a request, finished.

        Args:
            exact_version: of an evaluation: the version that samples it. It goes to engines lent to that.
            affinity: what requests have in common that should go to the same engine (see `Router.member`), as
                it has their prefix; empty for none.
            on_tokens: called with (sample, new tokens) as they arrive, each position of an answer once.

        Raises:
            EngineError: if an engine refused it, or too many gave it up.
            Exception: whatever `on_tokens` raised.
        """
        generation = _Generation(request, floor, exact_version, on_tokens)
        place, given_up, left = 0, 0, ""
        while generation.unfinished:
            async with self._engines.member(
                affinity,
                min_version=floor.version,
                exact_version=exact_version,
                samples=lambda: generation.unfinished,
                avoid=left,
            ) as engine:
                await self._on(engine, generation, place)
            if generation.failure is not None:
                raise generation.failure
            if generation.given_up:
                given_up += 1
                if given_up == _GIVEN_UP:
                    raise EngineError(f"given up {given_up} times in a row, at last by {generation.engine}")
                await anyio.sleep(0.05 * 2**given_up)
            place, left = place + 1, generation.engine
        return generation.samples

    async def _on(self, engine: str, generation: _Generation, place: int) -> None:
        """Let one engine go on with what is left, until it is done, or gives it up, or is stuck. Cancelled
        when the engine is lost."""
        generation.move_to(engine)
        if self._deterministic:
            generation.forget_unfinished()
        # Another name for every engine in turn: what a former one still sends does not count.
        name = f"{generation.request.id}~{place}" if place else generation.request.id
        self._under_way[name] = generation
        try:
            await self._until_over(engine, generation, name)
        finally:
            del self._under_way[name]
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await self._release(engine, generation, name)

    async def _until_over(self, engine: str, generation: _Generation, name: str) -> None:
        await self._ask(engine, generation, name)
        while True:
            await generation.wake.wait()
            if generation.over:
                return
            if generation.in_vain >= _SILENT_ASKS and self._engines.stuck(engine):
                log.warning("engine is stuck, another goes on", engine=engine, request=name)
                return
            generation.wake = anyio.Event()
            await self._ask(engine, generation, name)  # the question or the answer was lost

    def _look(self, beacon: Beacon) -> None:
        """Beacons come every second: one look at all requests costs less than a timer for each."""
        del beacon
        now = time.monotonic()
        for generation in self._under_way.values():
            generation.look(now, self._silence_s)

    async def _ask(self, engine: str, generation: _Generation, name: str) -> None:
        begun: tuple[Array, ...] = ()
        if not self._deterministic and any(sample.records for sample in generation.samples):
            begun = tuple(Array.of(sample.tokens()) for sample in generation.samples)
        request = msgspec.structs.replace(
            generation.request,
            id=name,
            begun=begun,
            have=tuple(-1 if sample.finish else sample.length for sample in generation.samples),
            min_version=generation.floor.version,
        )
        subject = self._context.names.worker("inference", engine, "generate")
        await self._bus.publish(subject, Generate(request, self._reply, generation.exact_version))

    async def _release(self, engine: str, generation: _Generation, name: str) -> None:
        """The engine can forget the request."""
        names = self._context.names
        if generation.unfinished:
            await self._bus.publish(names.worker("inference", engine, "abort"), Abort(name))
        else:
            await self._bus.publish(names.worker("inference", engine, "confirm"), Confirm((name,)))

    async def _take(self, batch: ChunkBatch) -> None:
        """Hand the chunks of a message to the requests they belong to."""
        records = _records(batch)
        at = 0
        name, generation = "", None
        behind: set[str] = set()
        for head in batch.heads:
            start, at = at, at + head.count * _TOKEN.itemsize
            if head.request != name:  # those of a request mostly follow each other
                name = head.request
                generation = self._under_way.get(name)
            if generation is None or head.sample >= len(generation.samples):
                continue
            unfinished = generation.unfinished
            if not generation.add(head, records[start:at]):
                behind.add(name)
            if generation.unfinished < unfinished:
                self._engines.ended(generation.engine)
        for name in behind:
            await self._ask(batch.worker, self._under_way[name], name)


def _records(batch: ChunkBatch) -> memoryview:
    """The tokens of a message, as the bytes of one `_TOKEN` after the other."""
    records = np.empty(len(batch.tokens), _TOKEN)
    records["token"] = batch.tokens.numpy()
    records["logprob"] = batch.logprobs.numpy()
    records["version"] = batch.versions.numpy()
    return records.view(np.uint8).data
