"""The inference worker: one engine, behind the one protocol that all engines share.

Chunks go to the rollout worker that asked and are kept until it confirms the request, so that a gap, a
reconnect or a repeated question is answered from the position asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import numpy as np
import structlog

from stretto.array import Array
from stretto.bus.messages import (
    Abort,
    AskLoad,
    ChunkBatch,
    ChunkHead,
    Confirm,
    Generate,
    Heartbeat,
    LoadReport,
    Swap,
    SwapDone,
)
from stretto.engine import Chunk, InferenceEngine, SwapReport
from stretto.roles.setting import Setting
from stretto.weights import Subscriber

__all__ = ["InferenceWork"]

log = structlog.get_logger()

_FORGET_S = 600.0


@dataclass
class _Request:
    """A request in hand: where its chunks go, and all of them so far."""

    reply: str
    left: int
    """Samples not finished."""
    chunks: list[list[Chunk]] = field(default_factory=list[list[Chunk]])
    touched: float = 0.0


class InferenceWork:
    """One replica."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._bus = setting.bus
        self._engine: InferenceEngine | None = None
        self._subscriber: Subscriber | None = None
        self._requests: dict[str, _Request] = {}
        self._outgoing: dict[str, list[Chunk]] = {}
        self._pending = anyio.Event()
        self._swapping = anyio.Lock()
        self._served: SwapReport | None = None
        self._order = (-1, -1)
        """Fence and version of what is served: a new kernel may go back to an older version."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Start the engine, then serve until cancelled."""
        setting = self._setting
        engine = self._engine = await anyio.to_thread.run_sync(setting.make, "inference")
        self._subscriber = setting.make("weights").subscriber()
        try:
            async with anyio.create_task_group() as tasks:
                await engine.start(self._emit, tasks)
                tasks.start_soon(self._send)
                tasks.start_soon(self._forget)
                await self._bus.subscribe(setting.subject("generate"), Generate, self._generate)
                await self._bus.subscribe(setting.subject("confirm"), Confirm, self._confirm)
                await self._bus.subscribe(setting.subject("abort"), Abort, self._abort)
                await self._bus.serve(setting.subject("swap"), Swap, self._swap)
                await self._bus.serve(setting.subject("load"), AskLoad, self._load)
                ready()
        finally:
            with anyio.CancelScope(shield=True):
                await engine.stop()

    def beat(self, beat: Heartbeat) -> Heartbeat:
        """With the engine's own figures."""
        if self._engine is None:
            return beat
        load = self._engine.load()
        return Heartbeat(beat.worker, beat.nonce, beat.ready, load.busy_s, load, refused=beat.refused)

    # -------------------------------------------------------------------------------- requests

    def _generate(self, message: Generate) -> None:
        """A new request goes to the engine; a known one is told again what it has not."""
        request = message.request
        known = self._requests.get(request.id)
        if known is None:
            wanted = len(request.seeds) - request.have.count(-1)
            none_yet: list[list[Chunk]] = [[] for _ in request.seeds]
            self._requests[request.id] = _Request(message.reply, wanted, none_yet, time.monotonic())
            assert self._engine is not None
            self._engine.generate(request)
            return
        known.reply, known.touched = message.reply, time.monotonic()
        for sample, chunks in enumerate(known.chunks):
            have = request.have[sample] if request.have else 0
            if have < 0:
                continue
            again = [part for chunk in chunks if (part := _from(chunk, have)) is not None]
            self._queue(known.reply, again)

    def _confirm(self, message: Confirm) -> None:
        for request in message.requests:
            self._requests.pop(request, None)

    def _abort(self, message: Abort) -> None:
        assert self._engine is not None
        self._engine.abort(message.request)
        self._requests.pop(message.request, None)

    async def _forget(self) -> None:
        """Drop finished requests whose asker never confirmed: it is gone."""
        while True:
            await anyio.sleep(_FORGET_S / 4)
            now = time.monotonic()
            old = [
                id
                for id, request in self._requests.items()
                if request.left == 0 and now - request.touched > _FORGET_S
            ]
            for id in old:
                del self._requests[id]

    # ---------------------------------------------------------------------------------- chunks

    def _emit(self, chunks: list[Chunk]) -> None:
        """From the engine, on the event loop."""
        for chunk in chunks:
            request = self._requests.get(chunk.request)
            if request is None:
                continue  # aborted
            request.chunks[chunk.sample].append(chunk)
            request.touched = time.monotonic()
            request.left -= bool(chunk.finish)
            self._queue(request.reply, [chunk])

    def _queue(self, reply: str, chunks: list[Chunk]) -> None:
        if chunks:
            self._outgoing.setdefault(reply, []).extend(chunks)
            self._pending.set()

    async def _send(self) -> None:
        """One message for each asker with all that is new for it."""
        while True:
            await self._pending.wait()
            self._pending = anyio.Event()
            outgoing, self._outgoing = self._outgoing, {}
            for reply, chunks in outgoing.items():
                await self._bus.publish(reply, _batch(self._setting.worker, chunks))

    async def _load(self, message: AskLoad) -> LoadReport:
        del message
        assert self._engine is not None
        return LoadReport(self._engine.load())

    # ----------------------------------------------------------------------------------- swaps

    async def _swap(self, message: Swap) -> SwapDone:
        """Serve a version. Of several that wait for each other, older ones are passed over."""
        self._setting.obey(message.fence)
        assert self._engine is not None
        assert self._subscriber is not None
        async with self._swapping:
            order = (message.fence, message.note.version)
            if self._served is None or order > self._order:
                update = await self._subscriber.receive(message.note)
                try:
                    self._served = await self._engine.swap(update)
                finally:
                    update.close()
                self._order = order
                pause = round(self._served.pause_s, 4)
                log.info("swapped", version=self._served.version, pause_s=pause)
            return SwapDone(self._served)


def _from(chunk: Chunk, have: int) -> Chunk | None:
    """The part of a chunk that starts at position `have`, or None if there is nothing new in it."""
    skip = max(0, have - chunk.position)
    if skip >= len(chunk.tokens) and not chunk.finish:
        return None
    return Chunk(
        chunk.request,
        chunk.sample,
        chunk.position + min(skip, len(chunk.tokens)),
        chunk.tokens[skip:],
        chunk.logprobs[skip:],
        chunk.versions[skip:],
        chunk.finish,
        chunk.error,
    )


def _batch(worker: str, chunks: list[Chunk]) -> ChunkBatch:
    return ChunkBatch(
        worker,
        tuple(
            ChunkHead(
                chunk.request, chunk.sample, chunk.position, len(chunk.tokens), chunk.finish, chunk.error
            )
            for chunk in chunks
        ),
        Array.of(np.concatenate([chunk.tokens for chunk in chunks])),
        Array.of(np.concatenate([chunk.logprobs for chunk in chunks])),
        Array.of(np.concatenate([chunk.versions for chunk in chunks])),
    )
