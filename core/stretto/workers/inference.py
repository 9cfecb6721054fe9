"""The inference worker: one engine, behind the one protocol that all engines share.

The worker keeps the chunks of a request until the rollout worker confirms the request, so that it can send
them again after a gap or a reconnect. It holds back every chunk with tokens of a version that is not verified
yet, and every later chunk of the same sample. A worker that is lent to an evaluation answers only that
evaluation, from before the load of its version until after the load of the next one: a request that
is dropped at one of these changes continues on another engine, or later.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import anyio
import msgspec
import numpy as np
import structlog
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto.array import Array, KeptTokens
from stretto.assembly.contracts import expect_contract
from stretto.bus.messages import inference
from stretto.bus.messages.membership import Heartbeat, WorkerProcess
from stretto.engine import (
    Chunk,
    GenerateRequest,
    InferenceEngine,
    SleepingEngine,
    SwapReport,
    VisionEngine,
)
from stretto.errors import BusError, EngineError, WeightsError
from stretto.machine import clock
from stretto.models.digest import digest_of, swap_fault
from stretto.models.files import folder_of_model
from stretto.models.lora_files import is_adapter, merge_adapter_files
from stretto.models.version_files import FrozenFiles, RunFolders
from stretto.rl.drift import Drift, drift_by_depth, quarters
from stretto.serving.intake import final_chunks
from stretto.weights import Canary, Subscriber, WeightsNote, WeightUpdate
from stretto.workers.context import WorkerContext
from stretto.workers.images import ImageFetcher
from stretto.workers.shared_rows import engine_kl
from stretto.workers.weights_wire import BusWire

log = structlog.get_logger()

_FORGET_S = 600.0  # a rollout worker that is gone never confirms its requests
_DRAIN_POLL_S = 0.05
_BASE_PAUSE_S, _SAMPLE_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.0004, 0.2
"""Seconds between messages to the rollout workers: a base, an addition for each sample in the last messages,
and a maximum. For the receiver a message costs much, a sample in it little, its tokens almost nothing."""
_SCORE_S = 120.0
"""Time limit of an engine for scoring the canary, or the rows that it shares with the trainer."""
_ROWS_S = 30.0
"""Time limit of the trainer for sending those rows."""


@dataclass
class _Request:
    inbox: str
    unfinished: int
    chunks: list[list[Chunk]]
    active_at: float
    """When the request was last sent or got a chunk, in seconds of the monotonic clock."""


Audience = int | None | Literal["nobody"]
"""Whose requests a worker answers: a version's evaluation, training (None), or nobody."""


class InferenceWorker:
    """One replica of the inference engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._bus = context.bus
        self._engine: InferenceEngine
        self._subscriber: Subscriber
        self._tasks: TaskGroup
        self._images = ImageFetcher(context)
        self._requests: dict[str, _Request] = {}
        self._outgoing: dict[str, list[Chunk]] = {}
        self._pending = anyio.Event()
        self._swapping = anyio.Lock()
        self._receiving = anyio.CancelScope()
        """Scope of the receipt of weights. A newer swap cancels it."""
        self._newest_order = (0, -1)
        """Lease epoch and number of the newest swap that was requested."""
        self._served: inference.SwapDone | None = None
        self._order = (-1, -1)
        """Lease epoch and number of the swap to the version that is served."""
        self._note: WeightsNote | None = None
        self._audience: Audience = None
        self._unverified: set[int] = set()
        """Versions that the engine may serve already, but that are not verified yet."""
        self._held_chunks: dict[tuple[str, int], list[Chunk]] = {}
        """(request, sample) -> its chunks, from the first one with tokens of an unverified version."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Start the engine, then serve until cancelled."""
        context = self._context
        engine = self._engine = await anyio.to_thread.run_sync(context.make, "inference")
        subscriber = self._subscriber = context.make("weights").subscriber(BusWire(context))
        expect_contract(subscriber, Subscriber, context.composed.origin("weights").label)
        self._merged_root = RunFolders(context.component_context, None).own("whole")
        self._unadapted = FrozenFiles(self._merged_root / "frozen")
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await engine.start(self._emit, tasks)
                if context.composed.config.inference.sleeps:
                    await self._sleep()  # it may be training's turn
                tasks.start_soon(self._send)
                tasks.start_soon(self._forget)
                await self._bus.subscribe(context.subject("generate"), inference.Generate, self._generate)
                await self._bus.subscribe(context.subject("confirm"), inference.Confirm, self._confirm)
                await self._bus.subscribe(
                    context.subject("abort"), inference.Abort, lambda each: self._drop(each.request)
                )
                await context.obey("swap", inference.Swap, self._swap)
                await self._bus.serve(context.subject("load"), inference.AskLoad, self._load)
                ready()
        finally:
            if self._images.fetched:
                log.info("images came", **self._images.fetched)
            with anyio.CancelScope(shield=True):
                await engine.stop()
            subscriber.close()
            shutil.rmtree(self._merged_root, ignore_errors=True)

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """Add the engine's own figures."""
        if not hasattr(self, "_engine"):  # the engine is still being created
            return heartbeat
        load = self._engine.load()
        return msgspec.structs.replace(heartbeat, busy_s=load.busy_s, load=load)

    async def drain(self) -> None:
        """Wait until all requests are finished and sent. Rollout workers know, and send no new ones."""
        while self._outgoing or any(request.unfinished for request in self._requests.values()):
            await anyio.sleep(_DRAIN_POLL_S)

    # -------------------------------------------------------------------------------- requests

    def _generate(self, message: inference.Generate) -> None:
        """Pass a new request to the engine. For a known request, send again what the sender lacks."""
        request = message.request
        known_request = self._requests.get(request.id)
        if known_request is None:
            if message.exact_version != self._audience:
                return  # the sender learns another engine from its routes, or repeats the request
            num_unfinished = len(request.seeds) - request.have.count(-1)
            no_chunks: list[list[Chunk]] = [[] for _ in request.seeds]
            self._requests[request.id] = _Request(message.inbox, num_unfinished, no_chunks, clock.now())
            if request.images:
                self._tasks.start_soon(self._generate_with_images, request, message.sender)
            else:
                self._engine.generate(request)
            return
        known_request.inbox, known_request.active_at = message.inbox, clock.now()
        for sample, chunks in enumerate(known_request.chunks):
            have = request.have[sample] if request.have else 0
            if have < 0:
                continue
            missing = [part for chunk in chunks if (part := _from(chunk, have)) is not None]
            self._queue(known_request.inbox, missing)

    async def _generate_with_images(self, request: GenerateRequest, sender: WorkerProcess | None) -> None:
        accepted = self._requests.get(request.id)
        try:
            if sender is None:
                raise BusError("the request does not name the rollout worker that has them")
            images = await self._images.get(sender, request.images)
        except BusError as error:
            log.warning("images do not come", request=request.id, error=str(error))
            self._emit(final_chunks(request, "abort"))
            return
        if accepted is not None and self._requests.get(request.id) is accepted:  # not aborted in the meantime
            cast("VisionEngine", self._engine).generate(request, images)

    def _confirm(self, message: inference.Confirm) -> None:
        for request in message.requests:
            self._requests.pop(request, None)

    def _drop(self, request: str) -> None:
        self._engine.abort(request)
        self._requests.pop(request, None)
        self._held_chunks = {key: chunks for key, chunks in self._held_chunks.items() if key[0] != request}

    async def _forget(self) -> None:
        """Drop finished requests that were not confirmed for `_FORGET_S`: the rollout worker is gone."""
        while True:
            await anyio.sleep(_FORGET_S / 4)
            now = clock.now()
            self._requests = {
                id: request
                for id, request in self._requests.items()
                if request.unfinished or now - request.active_at <= _FORGET_S
            }

    # ---------------------------------------------------------------------------------- chunks

    def _emit(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sample = (chunk.request, chunk.sample)
            if sample in self._held_chunks or (
                self._unverified and not self._unverified.isdisjoint(chunk.versions.tolist())
            ):
                self._held_chunks.setdefault(sample, []).append(chunk)
            else:
                self._accept(chunk)

    def _accept(self, chunk: Chunk) -> None:
        request = self._requests.get(chunk.request)
        if request is None:
            return  # aborted
        request.chunks[chunk.sample].append(chunk)
        request.active_at = clock.now()
        request.unfinished -= bool(chunk.finish)
        self._queue(request.inbox, [chunk])

    def _trust(self, version: int) -> None:
        self._unverified.discard(version)
        held_chunks, self._held_chunks = self._held_chunks, {}
        for chunks in held_chunks.values():
            self._emit(chunks)

    def _queue(self, inbox: str, chunks: list[Chunk]) -> None:
        if chunks:
            self._outgoing.setdefault(inbox, []).extend(chunks)
            self._pending.set()

    async def _send(self) -> None:
        while True:
            await self._pending.wait()
            self._pending = anyio.Event()
            outgoing, self._outgoing = self._outgoing, {}
            samples = 0
            for inbox, chunks in outgoing.items():
                batch = _batch(self._context.worker, chunks)
                samples += len(batch.heads)
                await self._bus.publish(self._context.names.chunks(inbox), batch)
            await anyio.sleep(min(_BASE_PAUSE_S + _SAMPLE_PAUSE_S * samples, _MAX_PAUSE_S))

    async def _load(self, _: inference.AskLoad) -> inference.LoadReport:
        return inference.LoadReport(self._engine.load())

    # ----------------------------------------------------------------------------------- swaps

    async def _swap(self, message: inference.Swap) -> inference.SwapDone:
        """Serve a version. Skip a swap if a newer one is already done."""
        order = (message.lease_epoch, message.number)
        if order > self._newest_order:
            self._newest_order = order
            self._receiving.cancel()  # the older weights and their trainer may be gone
        async with self._swapping:
            if self._served is not None and order <= self._order:
                return self._served
            if message.note is None:
                self._order, self._served = order, await self._sleep()
                return self._served
            audience = message.note.version if message.exact else None
            result = await self._load_version(message.note, audience)
            if result.fault:
                return result
            self._order, self._note, self._audience = order, message.note, audience
            self._trust(message.note.version)
            # The error matters for training only, so it is not measured on the weights of an evaluation.
            self._served = result if message.exact else await self._measure_engine_error(result, message)
            return self._served

    async def _sleep(self) -> inference.SwapDone:
        """Drop unfinished requests, which nobody waits for any more, and free the engine's device."""
        self._drop_other_audiences("nobody")
        self._note = None
        await cast("SleepingEngine", self._engine).sleep()
        log.info("asleep")
        return inference.SwapDone(SwapReport(-1, "", 0.0))

    def _drop_other_audiences(self, audience: Audience) -> None:
        """Drop unfinished requests of another audience, and accept none until the weights are loaded."""
        if self._audience != audience:
            self._audience = "nobody"
            for request in [id for id, request in self._requests.items() if request.unfinished]:
                self._drop(request)

    async def _load_version(self, note: WeightsNote, audience: Audience) -> inference.SwapDone:
        served = self._note  # another trainer may publish the same weights again, at another address
        is_same = served is not None and (served.version, served.digest) == (note.version, note.digest)
        if self._served is not None and is_same and self._engine.load().version == note.version:
            self._drop_other_audiences(audience)
            return self._served
        update: WeightUpdate | None = None
        began = clock.now()
        with anyio.CancelScope() as self._receiving:
            update = await self._receive(note)
        if update is None:
            raise WeightsError(f"version {note.version} is not needed any more", version=note.version)
        receive_s = round(clock.now() - began, 4)
        try:
            self._drop_other_audiences(audience)
            self._unverified.add(note.version)
            report = await self._engine.swap(update)
        finally:
            update.close()
        log.info("swapped", version=report.version, pause_s=round(report.pause_s, 4))
        kernel_report = msgspec.structs.replace(report, hashes={})  # the kernel does not need the hashes
        if fault := swap_fault(report, update.note, update.hashes()):
            return inference.SwapDone(kernel_report, fault)
        drift, unscored = await self._compare(note.canary)
        fault = self._fault_of_canary(note, drift, unscored)
        return inference.SwapDone(kernel_report, fault, drift, unscored, receive_s=receive_s)

    async def _receive(self, note: WeightsNote) -> WeightUpdate:
        """Receive an announced version. If it is an adapter, return the base model merged with it."""
        update = await self._subscriber.receive(note)
        if digest_of(update.hashes().items()) != note.digest:
            update.close()
            raise WeightsError(
                f"the hashes received with version {note.version} do not match the announced digest",
                version=note.version,
            )
        if not is_adapter(update.hashes()):
            return update
        try:
            folder, merged = await self._model_folder(note), self._merged_root / f"v{note.version:08d}"
            return await anyio.to_thread.run_sync(
                merge_adapter_files, update, folder, merged, self._unadapted
            )
        finally:
            update.close()

    async def _model_folder(self, note: WeightsNote) -> Path:
        model = self._context.component_context.model
        folder = await anyio.to_thread.run_sync(folder_of_model, model)
        if folder is None:
            raise WeightsError(
                f"version {note.version} is an adapter for {model!r}, but that model is not on this machine; "
                "set training.lora.send: merged",
                version=note.version,
            )
        return Path(folder)

    async def _compare(self, canary: Canary | str) -> tuple[Drift | None, str]:
        """Return the drift between engine and trainer on the canary; or None, and the reason."""
        if isinstance(canary, str):
            return None, canary
        image_option = {"images": [canary.image]} if canary.image else {}
        try:
            with anyio.fail_after(_SCORE_S):
                texts = [text.numpy() for text in canary.texts]
                logprobs = await self._engine.logprobs(texts, **image_option)
        except EngineError as error:
            return None, str(error)
        except TimeoutError:
            return None, f"the engine did not score the canary within {_SCORE_S:.0f} s"
        return drift_of_canary(canary, logprobs), ""

    async def _measure_engine_error(
        self, result: inference.SwapDone, swap: inference.Swap
    ) -> inference.SwapDone:
        """Add the engine's error at this version, if the run bounds divergence. Requests do not wait."""
        trainer = swap.trainer
        if self._context.composed.config.queue.max_divergence is None or trainer is None:
            return result
        try:
            subject = self._context.names.worker("trainer", trainer.worker, trainer.nonce, "shared_rows")
            asked = inference.AskSharedRows(result.report.version)
            answer = await self._bus.request(subject, asked, inference.SharedRows, deadline_s=_ROWS_S)
            if answer.rows:
                with anyio.fail_after(_SCORE_S):
                    logprobs = await self._engine.logprobs([row.tokens.numpy() for row in answer.rows])
                return msgspec.structs.replace(result, engine_kl=engine_kl(answer.rows, logprobs))
            unscored = answer.unscored
        except (BusError, EngineError) as error:
            unscored = str(error)
        except TimeoutError:
            unscored = f"the engine did not score rows of the last batch within {_SCORE_S:.0f} s"
        return msgspec.structs.replace(result, rows_unscored=unscored)

    def _fault_of_canary(self, note: WeightsNote, drift: Drift | None, unscored: str) -> str:
        config = self._context.composed.config.inference.canary
        if config is None or config.on_drift != "stop":
            return ""
        if drift is None:
            return (
                f"the canary of version {note.version} was not compared ({unscored}), but "
                "inference.canary.on_drift is 'stop'"
            )
        if not drift.within(bound := self._context.composed.config.inference.canary_bound or 0.0):
            return (
                f"the canary of version {note.version} drifts by {drift.mean:.3g} nats per token in the mean "
                f"({drift.max:.3g} at most) from the trainer's logprobs; inference.canary.bound is "
                f"{bound:g}"
            )
        return ""


def drift_of_canary(canary: Canary, logprobs: Sequence[NDArray[np.float32]]) -> Drift:
    """Return the largest mean over a quarter of the depth, and the largest difference of a token."""
    expected = [part.numpy() for part in canary.logprobs]
    found = [part[-len(own) :] for part, own in zip(logprobs, expected, strict=True)]
    drifts = drift_by_depth(expected, found, quarters(max(map(len, expected))))
    known = [each for each in drifts if each is not None]
    return Drift(max(each.mean for each in known), max(each.max for each in known))


def _from(chunk: Chunk, have: int) -> Chunk | None:
    """Return the part of a chunk from position `have`; None if the chunk has nothing new."""
    skip = max(0, have - chunk.position)
    if skip >= len(chunk.tokens) and not chunk.finish:
        return None
    return replace(
        chunk,
        position=chunk.position + min(skip, len(chunk.tokens)),
        tokens=chunk.tokens[skip:],
        logprobs=chunk.logprobs[skip:],
        versions=chunk.versions[skip:],
        kept=None if chunk.kept is None else chunk.kept.part(skip),
    )


def _batch(worker: str, chunks: list[Chunk]) -> inference.ChunkBatch:
    """Return one message with the chunks. Consecutive chunks of a sample are joined."""
    runs: list[list[Chunk]] = []
    newest_runs: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in chunks:
        run = newest_runs.get((chunk.request, chunk.sample))
        if run is not None and run[-1].position + len(run[-1].tokens) == chunk.position:
            run.append(chunk)
        else:
            newest_runs[chunk.request, chunk.sample] = run = [chunk]
            runs.append(run)
    ordered = [chunk for run in runs for chunk in run]
    return inference.ChunkBatch(
        worker,
        tuple(_head(run) for run in runs),
        Array.of(np.concatenate([chunk.tokens for chunk in ordered])),
        Array.of(np.concatenate([chunk.logprobs for chunk in ordered])),
        Array.of(np.concatenate([chunk.versions for chunk in ordered])),
        *_kept_of(ordered),
    )


def _kept_of(chunks: Sequence[Chunk]) -> tuple[Array, Array] | tuple[()]:
    if all(chunk.kept is None for chunk in chunks):
        return ()
    kept_tokens = KeptTokens.concat([chunk.kept or KeptTokens.none(len(chunk.tokens)) for chunk in chunks])
    return Array.of(kept_tokens.counts), Array.of(kept_tokens.ids)


def _head(run: list[Chunk]) -> inference.ChunkHead:
    first, last = run[0], run[-1]
    count = sum(len(chunk.tokens) for chunk in run)
    return inference.ChunkHead(first.request, first.sample, first.position, count, last.finish, last.error)
