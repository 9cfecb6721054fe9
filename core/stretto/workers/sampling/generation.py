"""A rollout worker's requests to engines: join the chunks, ask again for lost ones, and let another engine
finish a request when an engine dies or gives it up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto.array import Array, KeptTokens
from stretto.bus.gathered import Gathered
from stretto.bus.messages.inference import Abort, ChunkBatch, ChunkHead, Confirm, Generate
from stretto.bus.messages.membership import Beacon, Peer, WorkerProcess
from stretto.engine import Finish, GenerateRequest
from stretto.errors import EngineError
from stretto.machine import clock
from stretto.workers.context import WorkerContext
from stretto.workers.sampling.routing import Router
from stretto.workflow import OnTokens

log = structlog.get_logger()

_SILENT_ASKS = 3
"""A request leaves an engine after this many silent periods, if the engine samples nothing at all."""
_CONFIRM_S = 0.05  # one message confirms many requests; engines keep finished requests this much longer
_MAX_GIVE_UPS = 5
"""A request fails after engines have given it up this many times."""
_TOKEN = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("version", "<i4")])
"""A sampled token in an answer. Chunks of few tokens come often: adding one must be cheap."""


class VersionFloor:
    """A lower bound for the versions of a ticket's tokens. At first it is the ticket's `min_version`. Once
    all requests made so far have begun, it is the version of their oldest token, and stays so; `on_known` is
    called with it. Later requests ask for this version or a newer one."""

    def __init__(self, min_version: int, on_known: Callable[[int], None]) -> None:
        self.version = min_version
        self._on_known: Callable[[int], None] | None = on_known
        self._unstarted = 0
        self._oldest: int | None = None

    def add_request(self) -> None:
        """Record that one more request is made."""
        self._unstarted += 1

    def record_start(self, oldest: int) -> None:
        """Record that every sample of a request has its first token, and the version of the oldest."""
        self._unstarted -= 1
        self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)
        if self._unstarted == 0 and self._on_known is not None:
            self.version = self._oldest
            self._on_known(self._oldest)
            self._on_known = None


@dataclass(slots=True)
class GeneratedSample:
    """The part of one sample that has arrived."""

    records: bytearray = field(default_factory=bytearray)
    """The tokens, one `_TOKEN` record after the other."""
    kept_parts: list[KeptTokens] = field(default_factory=list[KeptTokens])
    """The kept tokens of all tokens so far, in parts; empty if the request does not want them."""
    finish: Finish = ""
    engine: str = ""
    """The engine that finished the sample; empty before."""
    reported: int = 0
    """Number of tokens that were passed to `on_tokens`."""

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self.records) // _TOKEN.itemsize

    def tokens(self) -> NDArray[np.int32]:
        """Return (A,) int32, the answer so far."""
        return self._column("token")

    def logprobs(self) -> NDArray[np.float32]:
        """Return (A,) float32, the logprob that the engine reported with each token."""
        return self._column("logprob")

    def versions(self) -> NDArray[np.int32]:
        """Return (A,) int32, the policy version of each token."""
        return self._column("version")

    def kept(self) -> KeptTokens | None:
        """Return, for each token, the tokens that top_p, top_k and min_p kept; None unless all were sent."""
        kept_tokens = KeptTokens.concat(self.kept_parts) if self.kept_parts else KeptTokens.none(0)
        return kept_tokens if len(kept_tokens) == self.length else None

    def _column(self, name: str) -> NDArray[Any]:
        return np.frombuffer(self.records, _TOKEN)[name].copy()


class _Generation:
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
        """The error with which the request failed; None while it has not failed."""
        self.peer: Peer | None = None
        self.given_up = False
        """Whether the engine has given the request up."""
        self.alive = False
        """Whether the engine has sent something since the last `look`."""
        self.quiet_since = clock.now()
        self.silent_periods = 0
        """Number of silent periods since the engine last sent something; the engine is asked after each."""
        self.wake = anyio.Event()
        """Set when the engine is done with the request, or is silent."""
        self._started = False
        floor.add_request()

    @property
    def over(self) -> bool:
        return self.given_up or self.failure is not None or not self.unfinished

    @property
    def engine(self) -> str:
        return self.peer.worker if self.peer else ""

    def move_to(self, peer: Peer) -> None:
        self.peer, self.given_up, self.wake = peer, False, anyio.Event()
        self.quiet_since, self.silent_periods = clock.now(), 0

    def look(self, now: float, silence_s: float) -> None:
        """Wake the waiting task if the engine has sent nothing for `silence_s` seconds."""
        if self.alive:
            self.alive, self.quiet_since, self.silent_periods = False, now, 0
        elif now - self.quiet_since >= silence_s:
            self.quiet_since = now
            self.silent_periods += 1
            self.wake.set()

    def add(self, head: ChunkHead, records: memoryview, kept: KeptTokens | None) -> bool:
        """Add a chunk. Return False if tokens before the chunk are missing."""
        sample = self.samples[head.sample]
        self.alive = True
        if sample.finish:
            return True
        is_first = not sample.records
        overlap = len(sample.records) - head.position * _TOKEN.itemsize
        if overlap < 0:
            return False
        if kept is not None and overlap < len(records):
            sample.kept_parts.append(kept.part(overlap // _TOKEN.itemsize))
        sample.records += records[overlap:]
        if is_first and records:
            self._report_start()
        if self.on_tokens is not None and sample.length > sample.reported:
            self._report(self.on_tokens, sample, head.sample)
        if head.finish:
            self._end(sample, head)
        return True

    def forget_unfinished(self) -> None:
        """Drop the tokens of unfinished samples: a deterministic engine samples them all again."""
        for sample in self.samples:
            if not sample.finish:
                sample.records, sample.kept_parts = bytearray(), []

    def _end(self, sample: GeneratedSample, head: ChunkHead) -> None:
        if head.finish == "abort":  # the engine gave up; this worker's own aborts bring no chunk here
            self.given_up = True
        elif head.finish == "error":
            self.failure = EngineError(f"{self.engine}: {head.error}")
        else:
            sample.finish, sample.engine = head.finish, self.engine
            self.unfinished -= 1
        if self.over:
            self.wake.set()

    def _report(self, on_tokens: OnTokens, sample: GeneratedSample, index: int) -> None:
        reported, sample.reported = sample.reported, sample.length
        try:
            on_tokens(index, sample.tokens()[reported:])
        except Exception as error:  # noqa: BLE001 - raised again in the ticket that listens
            self.failure = error
            self.wake.set()

    def _report_start(self) -> None:
        """Report the oldest version once every sample has its first token. The samples begin in any order."""
        if not self._started and all(sample.records for sample in self.samples):
            self._started = True
            records = np.frombuffer(b"".join(sample.records for sample in self.samples), _TOKEN)
            self.floor.record_start(int(records["version"].min()))


class Generations:
    """A worker's requests. After `silence_s` without a chunk, a request is sent again at the next beacon."""

    def __init__(self, context: WorkerContext, engines: Router, *, silence_s: float = 10.0) -> None:
        self._context = context
        self._silence_s = silence_s
        self._bus = context.bus
        self._engines = engines
        self._deterministic = context.composed.config.inference.deterministic
        self._running: dict[str, _Generation] = {}
        """Running requests by the name that their current engine knows."""
        self._confirms = Gathered[tuple[Peer, str]](self._confirm, _CONFIRM_S)
        context.on_beacon(self._look)

    async def open(self, tasks: TaskGroup) -> None:
        """Receive chunks, and confirm finished requests, in `tasks`. Called once, before `run`."""
        tasks.start_soon(self._confirms.run)
        chunks = self._context.names.chunks(self._bus.inbox)
        await self._bus.subscribe(chunks, ChunkBatch, self._take)

    async def run(
        self,
        request: GenerateRequest,
        floor: VersionFloor,
        *,
        exact_version: int | None = None,
        affinity: str = "",
        on_tokens: OnTokens | None = None,
    ) -> list[GeneratedSample]:
        """Run a request until every sample is finished, and return the samples.

        An evaluation gives its `exact_version`; only engines lent to it serve that version. Requests with one
        `affinity` go to the same engine if possible, because it has their prefix (see `Router.member`).
        `on_tokens` gets (sample, new tokens), each position once.
        """
        generation = _Generation(request, floor, exact_version, on_tokens)
        attempt, give_ups, former_engine = 0, 0, ""
        while generation.unfinished:
            async with self._engines.member(
                affinity,
                min_version=generation.floor.version,
                exact_version=generation.exact_version,
                samples=lambda: generation.unfinished,
                avoid=former_engine,
            ) as peer:
                await self._on(peer, generation, attempt)
            if generation.failure is not None:
                raise generation.failure
            if generation.given_up:
                give_ups += 1
                if give_ups == _MAX_GIVE_UPS:
                    raise EngineError(
                        f"engines gave the request up {give_ups} times, the last one was {generation.engine}"
                    )
                await anyio.sleep(0.05 * 2**give_ups)
            attempt, former_engine = attempt + 1, generation.engine
        return generation.samples

    async def _on(self, peer: Peer, generation: _Generation, attempt: int) -> None:
        """Run unfinished samples on one engine until it is done, gives up, is stuck or lost."""
        generation.move_to(peer)
        if self._deterministic:
            generation.forget_unfinished()
        # Every engine gets another name for the request, so that late chunks of earlier engines are ignored.
        name = f"{generation.request.id}~{attempt}" if attempt else generation.request.id
        self._running[name] = generation
        try:
            await self._until_over(peer, generation, name)
        finally:
            del self._running[name]
            if generation.unfinished:
                await self._abort(peer, name)
            else:
                self._confirms.add((peer, name))

    async def _until_over(self, peer: Peer, generation: _Generation, name: str) -> None:
        engine = peer.worker
        await self._ask(peer, generation, name)
        while True:
            await generation.wake.wait()
            if generation.over:
                return
            if generation.silent_periods >= _SILENT_ASKS and self._engines.stuck(engine):
                log.warning("engine is stuck, another continues", engine=engine, request=name)
                return
            generation.wake = anyio.Event()
            await self._ask(peer, generation, name)  # the request or the answer was lost

    def _look(self, _: Beacon) -> None:
        """Check all requests for silence at each beacon: this is cheaper than a timer for each request."""
        now = clock.now()
        for generation in self._running.values():
            generation.look(now, self._silence_s)

    async def _ask(self, peer: Peer, generation: _Generation, name: str) -> None:
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
        sender = WorkerProcess(self._context.worker, self._context.nonce) if request.images else None
        message = Generate(request, self._bus.inbox, generation.exact_version, sender)
        await self._bus.publish(self._subject(peer, "generate"), message)

    async def _abort(self, peer: Peer, name: str) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1):
            await self._bus.publish(self._subject(peer, "abort"), Abort(name))

    async def _confirm(self, requests: tuple[tuple[Peer, str], ...]) -> None:
        by_peer: dict[str, list[str]] = {}
        for peer, name in requests:
            by_peer.setdefault(self._subject(peer, "confirm"), []).append(name)
        for subject, names in by_peer.items():
            await self._bus.publish(subject, Confirm(tuple(names)))

    def _subject(self, peer: Peer, verb: str) -> str:
        return self._context.names.worker("inference", peer.worker, peer.nonce, verb)

    async def _take(self, batch: ChunkBatch) -> None:
        records, kept_tokens = _records(batch), KeptTokens.read(batch.kept_counts, batch.kept_ids)
        offset = 0
        name, generation = "", None
        incomplete: dict[str, None] = {}  # requests that miss tokens, in order
        for head in batch.heads:
            start, offset = offset, offset + head.count * _TOKEN.itemsize
            if head.request != name:  # the chunks of a request are mostly consecutive
                name = head.request
                generation = self._running.get(name)
            if generation is None or head.sample >= len(generation.samples):
                continue
            unfinished = generation.unfinished
            kept_part = kept_tokens and kept_tokens.part(start // _TOKEN.itemsize, offset // _TOKEN.itemsize)
            if not generation.add(head, records[start:offset], kept_part):
                incomplete[name] = None
            if generation.unfinished < unfinished:
                self._engines.finish_sample(generation.engine)
        for name in incomplete:
            generation = self._running[name]
            assert generation.peer is not None
            await self._ask(generation.peer, generation, name)


def _records(batch: ChunkBatch) -> memoryview:
    records = np.empty(len(batch.tokens), _TOKEN)
    records["token"] = batch.tokens.numpy()
    records["logprob"] = batch.logprobs.numpy()
    records["version"] = batch.versions.numpy()
    return records.view(np.uint8).data
