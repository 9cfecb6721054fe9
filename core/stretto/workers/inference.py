"""The inference worker: one engine, behind the one protocol that all engines share.

Chunks go to the rollout worker that asked and are kept until it confirms the request, so that a gap, a
reconnect or a repeated question is answered from the position asked for.

A version is doubted from before it is loaded until it has been found to be the one that the trainer
published. As long as it is, no chunk with tokens of it leaves the worker, nor any that follows one in its
sample.

A worker that is lent to an evaluation answers that evaluation alone, from before its version is loaded until
after another one is: so no token of training is sampled by those weights, and no token of the evaluation by
others. What is dropped on either change goes on elsewhere, or later: its askers hear of it by the beacon.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import msgspec
import numpy as np
import structlog

from stretto.array import Array
from stretto.assembly.contracts import expect_contract
from stretto.bus.messages import (
    Abort,
    AskLoad,
    AskSharedRows,
    ChunkBatch,
    ChunkHead,
    Confirm,
    Drift,
    Generate,
    Heartbeat,
    LoadReport,
    SharedRows,
    Swap,
    SwapDone,
)
from stretto.engine import Chunk, InferenceEngine, SwapReport
from stretto.errors import BusError, EngineError, WeightsError
from stretto.models.digest import differing, digest_of
from stretto.models.files import folder_of_model
from stretto.models.lora_files import is_adapter, made_whole
from stretto.models.version_files import RunFolders
from stretto.weights import Canary, Subscriber, WeightsNote, WeightUpdate
from stretto.workers.context import WorkerContext
from stretto.workers.shared_rows import engine_kl
from stretto.workers.weights_wire import BusWire

__all__ = ["InferenceWorker"]

log = structlog.get_logger()

_FORGET_S = 600.0
_EVERY_S, _FOR_EACH_S, _LATEST_S = 0.02, 0.0004, 0.2
"""Askers get a message at most so often, later for each sample that the last ones told of, but no later than
this: a message costs them much, a sample in it a little, its tokens next to nothing."""
_SCORE_S = 120.0
"""What an engine gets to score the canary, or the rows that it shares with the trainer."""
_ROWS_S = 30.0
"""What the trainer gets to send those rows."""


@dataclass
class _Request:
    """A request in hand: where its chunks go, and all of them so far."""

    reply: str
    left: int
    """Samples not finished."""
    chunks: list[list[Chunk]] = field(default_factory=list[list[Chunk]])
    touched: float = 0.0


Audience = int | None | Literal["nobody"]
"""Whose requests a worker answers: those of the evaluation of a version, those of training (None)."""


class InferenceWorker:
    """One replica."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._bus = context.bus
        self._engine: InferenceEngine | None = None
        self._subscriber: Subscriber | None = None
        self._requests: dict[str, _Request] = {}
        self._outgoing: dict[str, list[Chunk]] = {}
        self._pending = anyio.Event()
        self._swapping = anyio.Lock()
        self._served: SwapDone | None = None
        self._order = (-1, -1)
        """Fence and number of the swap to what is served."""
        self._note: WeightsNote | None = None
        """What is served."""
        self._audience: Audience = None
        self._doubted: set[int] = set()
        """Versions that may be served by now, and have not been found to be what was announced."""
        self._held: dict[tuple[str, int], list[Chunk]] = {}
        """(request, sample) -> its chunks from the first one with a doubted version on."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Start the engine, then serve until cancelled."""
        context = self._context
        engine = self._engine = await anyio.to_thread.run_sync(context.make, "inference")
        subscriber = self._subscriber = context.make("weights").subscriber(BusWire(context))
        expect_contract(subscriber, Subscriber, context.composed.origin("weights").label)
        self._whole = RunFolders(context.component_context, None).own("whole")
        try:
            async with anyio.create_task_group() as tasks:
                await engine.start(self._emit, tasks)
                tasks.start_soon(self._send)
                tasks.start_soon(self._forget)
                await self._bus.subscribe(context.subject("generate"), Generate, self._generate)
                await self._bus.subscribe(context.subject("confirm"), Confirm, self._confirm)
                await self._bus.subscribe(context.subject("abort"), Abort, self._abort)
                await self._bus.serve(context.subject("swap"), Swap, self._swap)
                await self._bus.serve(context.subject("load"), AskLoad, self._load)
                ready()
        finally:
            with anyio.CancelScope(shield=True):
                await engine.stop()
            subscriber.close()
            shutil.rmtree(self._whole, ignore_errors=True)

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """With the engine's own figures."""
        if self._engine is None:
            return heartbeat
        load = self._engine.load()
        return msgspec.structs.replace(heartbeat, busy_s=load.busy_s, load=load)

    # -------------------------------------------------------------------------------- requests

    def _generate(self, message: Generate) -> None:
        """A new request goes to the engine; a known one is told again what it has not."""
        request = message.request
        known = self._requests.get(request.id)
        if known is None and message.exact_version != self._audience:
            return  # for others; its asker learns from the beacon where to go, or asks again
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
        self._drop(message.request)

    def _drop(self, request: str) -> None:
        """Nobody waits here for a request any more."""
        assert self._engine is not None
        self._engine.abort(request)
        self._requests.pop(request, None)
        self._held = {key: chunks for key, chunks in self._held.items() if key[0] != request}

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
            sample = (chunk.request, chunk.sample)
            if sample in self._held or self._is_doubted(chunk):
                self._held.setdefault(sample, []).append(chunk)
            else:
                self._take(chunk)

    def _is_doubted(self, chunk: Chunk) -> bool:
        return bool(self._doubted) and not self._doubted.isdisjoint(chunk.versions.tolist())

    def _take(self, chunk: Chunk) -> None:
        """A chunk whose versions are what they say."""
        request = self._requests.get(chunk.request)
        if request is None:
            return  # aborted
        request.chunks[chunk.sample].append(chunk)
        request.touched = time.monotonic()
        request.left -= bool(chunk.finish)
        self._queue(request.reply, [chunk])

    def _trust(self, version: int) -> None:
        """Let go of what was held on account of a version."""
        self._doubted.discard(version)
        held, self._held = self._held, {}
        for chunks in held.values():
            self._emit(chunks)

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
            told = 0
            for reply, chunks in outgoing.items():
                batch = _batch(self._context.worker, chunks)
                told += len(batch.heads)
                await self._bus.publish(reply, batch)
            await anyio.sleep(min(_EVERY_S + _FOR_EACH_S * told, _LATEST_S))

    async def _load(self, message: AskLoad) -> LoadReport:
        del message
        assert self._engine is not None
        return LoadReport(self._engine.load())

    # ----------------------------------------------------------------------------------- swaps

    async def _swap(self, message: Swap) -> SwapDone:
        """Serve a version. Of several swaps that wait for each other, former ones are passed over."""
        self._context.check_lease(message.lease_epoch)
        async with self._swapping:
            order = (message.lease_epoch, message.number)
            if self._served is not None and order <= self._order:
                return self._served
            audience = message.note.version if message.exact else None
            done = await self._load_version(message.note, audience)
            if done.fault:
                return done
            self._order, self._note, self._audience = order, message.note, audience
            self._trust(message.note.version)
            # The weights of an evaluation say nothing of the batches that are trained now.
            self._served = done if message.exact else await self._measured(done)
            return self._served

    def _dismiss_others(self, audience: Audience) -> None:
        """Drop what is under way for others. Nobody is answered until the weights are there."""
        if self._audience != audience:
            self._audience = "nobody"
            for request in [id for id, request in self._requests.items() if request.left]:
                self._drop(request)

    async def _load_version(self, note: WeightsNote, audience: Audience) -> SwapDone:
        """Have the engine serve a version, and see what it really serves."""
        assert self._engine is not None
        if self._served is not None and note == self._note and self._engine.load().version == note.version:
            self._dismiss_others(audience)
            return self._served
        update = await self._received(note)
        try:
            self._dismiss_others(audience)
            self._doubted.add(note.version)
            report = await self._engine.swap(update)
        finally:
            update.close()
        log.info("swapped", version=report.version, pause_s=round(report.pause_s, 4))
        served = msgspec.structs.replace(report, hashes={})  # they have done their work here
        if fault := _fault_of(report, update.note, update.hashes()):
            return SwapDone(served, fault)
        drift, unscored = await self._compare(note.canary)
        return SwapDone(served, self._fault_of_canary(note, drift, unscored), drift, unscored)

    async def _received(self, note: WeightsNote) -> WeightUpdate:
        """A version that was announced, here and whole: an adapter is put into the model it is for."""
        assert self._subscriber is not None
        update = await self._subscriber.receive(note)
        if digest_of(update.hashes().items()) != note.digest:
            update.close()
            raise WeightsError(
                f"the hashes that came with version {note.version} are not those of the announced digest",
                version=note.version,
            )
        if not is_adapter(update.hashes()):
            return update
        try:
            folder, whole = await self._model_folder(note), self._whole / f"v{note.version:08d}"
            return await anyio.to_thread.run_sync(made_whole, update, folder, whole)
        finally:
            update.close()

    async def _model_folder(self, note: WeightsNote) -> Path:
        """Where the files of the run's model are on this machine."""
        model = self._context.component_context.model
        folder = await anyio.to_thread.run_sync(folder_of_model, model)
        if folder is None:
            raise WeightsError(
                f"version {note.version} is an adapter, and {model!r}, which it is for, is not on this "
                "machine; set training.lora.send: merged",
                version=note.version,
            )
        return Path(folder)

    async def _compare(self, canary: Canary | str) -> tuple[Drift | None, str]:
        """How far the engine is from the trainer, or why nobody can say."""
        if isinstance(canary, str):
            return None, canary
        assert self._engine is not None
        expected = canary.logprobs.numpy()
        try:
            with anyio.fail_after(_SCORE_S):
                found = await self._engine.logprobs(list(canary.tokens.numpy()))
        except EngineError as error:
            return None, str(error)
        except TimeoutError:
            return None, f"the engine did not score it within {_SCORE_S:.0f} s"
        difference = np.abs(np.concatenate(found) - expected.reshape(-1))
        difference = np.nan_to_num(difference, nan=np.inf, posinf=np.inf)
        return Drift(float(difference.mean()), float(difference.max())), ""

    async def _measured(self, done: SwapDone) -> SwapDone:
        """The same, with the engine's error at the version that it serves now, where the run needs it.
        Samples do not wait for this."""
        if self._context.composed.config.queue.max_divergence is None:
            return done
        assert self._engine is not None
        version = done.report.version
        try:
            shared = await self._bus.request(
                self._context.names.shared_rows,
                AskSharedRows(version),
                SharedRows,
                who="the trainer",
                deadline_s=_ROWS_S,
            )
            if not shared.rows:
                return msgspec.structs.replace(done, rows_unscored=shared.unscored)
            with anyio.fail_after(_SCORE_S):
                found = await self._engine.logprobs([row.tokens.numpy() for row in shared.rows])
            return msgspec.structs.replace(done, engine_kl=engine_kl(shared.rows, found))
        except (BusError, EngineError) as error:
            return msgspec.structs.replace(done, rows_unscored=str(error))
        except TimeoutError:
            unscored = f"the engine did not score rows of the last batch within {_SCORE_S:.0f} s"
            return msgspec.structs.replace(done, rows_unscored=unscored)

    def _fault_of_canary(self, note: WeightsNote, drift: Drift | None, unscored: str) -> str:
        """What is wrong where the run must not go on with a drift, or without knowing it."""
        config = self._context.composed.config.inference.canary
        if config is None or config.on_drift != "stop":
            return ""
        if drift is None:
            return (
                f"the canary of version {note.version} was not compared ({unscored}), and "
                "inference.canary.on_drift is 'stop'"
            )
        if not drift.within(config.bound):
            return (
                f"the canary of version {note.version} drifts by {drift.mean:.3g} a token (at most "
                f"{drift.max:.3g}) from the trainer's; inference.canary.bound is {config.bound:g}"
            )
        return ""


def _fault_of(report: SwapReport, note: WeightsNote, published: Mapping[str, str]) -> str:
    """Why an engine does not serve what was announced; empty if it does."""
    wrong = differing(report.hashes, published) if report.hashes else []
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    which = f": {', '.join(map(repr, wrong[:3]))}{more} differ" if wrong else ""
    if report.version != note.version:
        return (
            f"asked to serve version {note.version}, the engine serves version {report.version}, and said "
            f"nothing: the swap was skipped{which}"
        )
    if wrong or report.digest != note.digest:
        return (
            f"version {note.version} is not served as the trainer published it (digest "
            f"{note.digest[:12]}, served {report.digest[:12]}){which}"
        )
    return ""


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
    """A message of chunks, those of a sample that follow each other as one."""
    runs: list[list[Chunk]] = []
    newest: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in chunks:
        run = newest.get((chunk.request, chunk.sample))
        if run is not None and run[-1].position + len(run[-1].tokens) == chunk.position:
            run.append(chunk)
        else:
            newest[chunk.request, chunk.sample] = run = [chunk]
            runs.append(run)
    ordered = [chunk for run in runs for chunk in run]
    return ChunkBatch(
        worker,
        tuple(_head(run) for run in runs),
        Array.of(np.concatenate([chunk.tokens for chunk in ordered])),
        Array.of(np.concatenate([chunk.logprobs for chunk in ordered])),
        Array.of(np.concatenate([chunk.versions for chunk in ordered])),
    )


def _head(run: list[Chunk]) -> ChunkHead:
    first, last = run[0], run[-1]
    count = sum(len(chunk.tokens) for chunk in run)
    return ChunkHead(first.request, first.sample, first.position, count, last.finish, last.error)
