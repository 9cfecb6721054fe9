"""The `torch` inference engine: methods for the worker's event loop, and the compute thread behind them.

Only the thread uses the model. It reads the event loop's commands from a queue between two decode steps, and
returns chunks at most every 20 ms.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import structlog
import torch
from anyio.abc import TaskGroup
from numpy.typing import NDArray
from torch import Tensor

from stretto.component import Context
from stretto.engine import Chunk, Emit, Finish, GenerateRequest, Load, SwapReport
from stretto.errors import EngineError, RequestError
from stretto.models.digest import digest_of, hashes_of
from stretto.models.files import known_config
from stretto.serving.intake import final_chunks
from stretto.serving.stop_strings import stop_tokenizer
from stretto.weights import WeightUpdate
from stretto_torch import TorchInferenceConfig
from stretto_torch.batcher import Batcher
from stretto_torch.determinism import kept_shapes, what_was_found
from stretto_torch.images import PromptImages
from stretto_torch.model import load_model

log = structlog.get_logger(__name__)

_EMIT_EVERY_S = 0.02  # protects the event loop from a message for each decode step


@dataclass(frozen=True, slots=True)
class _GenerateCommand:
    request: GenerateRequest
    arrived: float
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class _AbortCommand:
    request: str


@dataclass(frozen=True, slots=True)
class _SwapCommand:
    order: int
    """Number of the `swap` call; of several swaps that are due, the one with the highest number is loaded."""
    version: int
    hashes: Mapping[str, str]  # of all tensors
    tensors: Mapping[str, Tensor]
    assumed: Collection[str]
    """Tensors that the decoder already had with the published hash, so that their data was not read."""
    report: Future[SwapReport] = field(default_factory=Future[SwapReport])


@dataclass(frozen=True, slots=True)
class _ScoreCommand:
    images: Sequence[PromptImages | None]  # of each sequence
    sequences: Sequence[NDArray[np.int32]]
    scores: Future[list[NDArray[np.float32]]] = field(default_factory=Future[list[NDArray[np.float32]]])


@dataclass(frozen=True, slots=True)
class _SleepCommand:
    done: Future[None] = field(default_factory=Future[None])


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _GenerateCommand | _AbortCommand | _SwapCommand | _ScoreCommand | _SleepCommand | _Stop


class TorchInferenceEngine:
    """Implements `stretto.engine.InferenceEngine`. An exception in the compute thread ends the engine's work:
    `start`'s task group and `swap` raise it, and unfinished and later requests end with `abort` chunks."""

    def __init__(self, config: TorchInferenceConfig, context: Context) -> None:
        self._config = config
        self._folder = context.model
        self._samples_in_flight = context.samples_in_flight
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torch-inference", daemon=True)
        self._loaded: Future[Batcher] = Future()
        # Used by the event loop only.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emit: Emit | None = None
        self._batcher: Batcher | None = None
        self._ended = asyncio.Event()
        self._failure: EngineError | None = None
        self._reading: dict[str, GenerateRequest] = {}  # requests whose images are being read
        self._reads = anyio.CapacityLimiter(1)
        self._samples_posted = 0
        self._swaps_called = 0
        self._note = ""
        """Activity of the compute thread while it loads, then its finding; replaced as a whole."""
        # Used by the compute thread only (`_samples_taken` is read by both).
        self._samples_taken = 0
        self._swaps_due: list[_SwapCommand] = []
        self._newest_swap = 0
        self._held: Mapping[str, str] = {}
        """Tensor name -> hash of the decoder's tensor; replaced as a whole, and read by another thread."""
        self._served = SwapReport(-1, "", 0.0)

    # --------------------------------------------------------------------------- on the event loop

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """Load the model in the engine's thread, and watch that thread (`InferenceEngine.start`)."""
        self._loop = asyncio.get_running_loop()
        self._emit = emit
        self._tasks = tasks
        self._thread.start()
        self._batcher = await asyncio.wrap_future(self._loaded)
        tasks.start_soon(self._watch, name="torch inference engine")

    def generate(self, request: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        """See `VisionEngine`."""
        if self._failure is not None:
            asyncio.get_running_loop().call_soon(self._deliver, final_chunks(request, "abort"))
            return
        self._samples_posted += len(request.seeds)
        if images:
            self._reading[request.id] = request
            self._tasks.start_soon(self._read, request, images, monotonic())
        else:
            self._commands.put(_GenerateCommand(request, monotonic()))

    def abort(self, request: str) -> None:
        """See `InferenceEngine`."""
        if reading := self._reading.pop(request, None):
            self._drop(reading, "abort")
        self._commands.put(_AbortCommand(request))

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """See `InferenceEngine`. Of several due swaps only the last is loaded; all return its version."""
        self._swaps_called += 1
        order = self._swaps_called
        command = await anyio.to_thread.run_sync(self._inspect, update, order)
        if self._ended.is_set():
            raise self._failure or EngineError("the torch inference engine was stopped")
        self._commands.put(command)
        # Wait even if cancelled: the compute thread may be reading the tensors, which the caller then closes.
        report = asyncio.wrap_future(command.report)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([report])
        return report.result()

    async def sleep(self) -> None:
        """See `SleepingEngine`."""
        if self._ended.is_set():
            raise self._failure or EngineError("the torch inference engine was stopped")
        command = _SleepCommand()
        self._commands.put(command)
        await asyncio.wrap_future(command.done)

    async def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[bytes] = ()
    ) -> list[NDArray[np.float32]]:
        """See `VisionEngine`. All sequences are scored between two decode steps, with the same weights."""
        if self._ended.is_set():
            raise self._failure or EngineError("the torch inference engine was stopped")
        prompt_images: Sequence[PromptImages | None] = [None] * len(sequences)
        if images:
            prompt_images = [await self._see(sequence, images) for sequence in sequences]
        command = _ScoreCommand(prompt_images, sequences)
        self._commands.put(command)
        return await asyncio.wrap_future(command.scores)

    def load(self) -> Load:
        """See `InferenceEngine`."""
        if self._batcher is None:
            return Load(-1, 0, 0, self._config.slots or 1, 0, 0.0, 0, 0.0, 0.0, note=self._note)
        batcher, figures = self._batcher, self._batcher.figures
        return Load(
            version=batcher.version,
            running=len(batcher.slots.running),
            waiting=batcher.intake.waiting + self._samples_posted - self._samples_taken,
            slots=batcher.slots.count,
            generated_tokens=figures.generated_tokens,
            busy_s=figures.busy_s,
            swaps=figures.swaps,
            pause_s=figures.pause_s,
            pause_max_s=figures.pause_max_s,
            kv_used=batcher.slots.kv_used,
            lost_tokens=batcher.slots.lost_tokens,
            note=self._note,
        )

    async def stop(self) -> None:
        """See `InferenceEngine`. May be called at any time, and more than once."""
        self._emit = None
        if self._loop is not None:
            self._commands.put(_Stop())
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._thread.join)
        self._reject_commands(EngineError("the torch inference engine was stopped"))
        self._ended.set()

    async def _read(self, request: GenerateRequest, files: Sequence[bytes], arrived: float) -> None:
        finish: Finish = "abort"
        images, error = None, ""
        try:
            images = await self._see(request.prompt_ids.numpy().astype(np.int32), files, request.images)
        except RequestError as refusal:
            finish, error = "error", str(refusal)
        if self._reading.pop(request.id, None) is None:
            return  # aborted in the meantime
        if images is None or self._ended.is_set():
            self._drop(request, finish, error)
        else:
            self._commands.put(_GenerateCommand(request, arrived, images))

    async def _see(
        self, text: NDArray[np.int32], files: Sequence[bytes], digests: Sequence[str] = ()
    ) -> PromptImages:
        reader = self._batcher.model.reader if self._batcher is not None else None
        if reader is None:
            raise RequestError("the request has images, and the model reads none")
        return await anyio.to_thread.run_sync(reader.read, text, digests, files, limiter=self._reads)

    def _drop(self, request: GenerateRequest, finish: Finish, error: str = "") -> None:
        self._samples_posted -= len(request.seeds)
        self._deliver(final_chunks(request, finish, error))

    async def _watch(self) -> None:
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def _inspect(self, update: WeightUpdate, order: int) -> _SwapCommand:
        """Check an update, and hash the tensors that the engine does not hold; runs in a separate thread."""
        tensors, published, held = update.tensors(), update.hashes(), self._held
        self._loaded.result().model.targets.check(tensors, update.note.version)
        same = {name: held[name] for name in tensors if name in held and held[name] == published.get(name)}
        changed = {name: tensor for name, tensor in tensors.items() if name not in same}
        return _SwapCommand(order, update.note.version, same | hashes_of(changed), tensors, same.keys())

    def _deliver(self, chunks: list[Chunk]) -> None:
        if self._emit is not None and chunks:
            self._emit(chunks)

    def _break(self, failure: EngineError, chunks: list[Chunk]) -> None:
        self._failure = failure
        self._deliver(chunks)
        self._reject_commands(failure)
        self._ended.set()

    def _reject_commands(self, error: EngineError) -> None:
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, _GenerateCommand):
                self._deliver(final_chunks(command.request, "abort"))
            elif isinstance(command, _SwapCommand):
                command.report.set_exception(error)
            elif isinstance(command, _ScoreCommand) and command.scores.set_running_or_notify_cancel():
                command.scores.set_exception(error)
            elif isinstance(command, _SleepCommand) and command.done.set_running_or_notify_cancel():
                command.done.set_exception(error)

    # ---------------------------------------------------------------------- in the compute thread

    def _run(self) -> None:
        self._loaded.set_running_or_notify_cancel()  # a cancelled `start` must not cancel this future
        with torch.inference_mode():
            try:
                batcher = self._load()
            except EngineError as error:
                self._loaded.set_exception(error)
                return
            except Exception as error:  # noqa: BLE001 - `start` raises every error of loading
                fault = f"cannot serve the model {self._folder!r}: {error!r}; the engines vllm and sglang may"
                self._loaded.set_exception(_caused(error, fault))
                return
            self._loaded.set_result(batcher)
            try:
                self._serve(batcher)
            except Exception as error:
                log.exception("the torch inference engine broke")
                failure = _caused(error, f"the torch inference engine broke: {error!r}")
                self._end_swaps(failure)
                self._post(self._break, failure, batcher.give_up())

    def _say(self, note: str) -> None:
        self._note = note

    def _load(self) -> Batcher:
        config = self._config
        if self._folder is None:
            raise EngineError("the torch inference engine needs a model (run.yaml: model)")
        model = load_model(self._folder, config, self._samples_in_flight)
        if config.deterministic:
            values = (repr(config), repr(known_config(self._folder)))
            model = replace(model, shapes=kept_shapes(model.decoder, model.shapes, values, self._say))
            self._say(what_was_found(model.shapes))
        log.info(
            "model loaded",
            decoder=model.decoder.name,
            slots=model.shapes.slots,
            context_length=model.shapes.context,
            cache_tokens=model.decoder.cache.tokens,
            device=str(model.decoder.cache.device),
        )
        return Batcher(
            model,
            partial(stop_tokenizer, self._folder),
            deterministic=config.deterministic,
            recompute_on_swap=config.on_swap == "recompute",
        )

    def _serve(self, batcher: Batcher) -> None:
        emitted_at = monotonic()
        while True:
            for command in self._take_commands(batcher):
                match command:
                    case _GenerateCommand(request, arrived, images):
                        batcher.take(request, arrived, images)
                        self._samples_taken += len(request.seeds)
                    case _AbortCommand(request):
                        batcher.abort(request)
                    case _SwapCommand():
                        self._swaps_due.append(command)
                    case _ScoreCommand():
                        self._score(batcher, command)
                    case _SleepCommand(done):
                        batcher.sleep()
                        self._held = {}
                        if done.set_running_or_notify_cancel():
                            done.set_result(None)
                    case _Stop():
                        self._end_swaps(EngineError("the torch inference engine was stopped"))
                        _log_totals(batcher)
                        return
            if self._swaps_due:
                self._swap(batcher)
            batcher.step()
            now = monotonic()
            if now - emitted_at >= _EMIT_EVERY_S or not batcher.busy:
                emitted_at = now
                self._post(self._deliver, batcher.collect())

    def _take_commands(self, batcher: Batcher) -> list[_Command]:
        """Return the new commands, up to a stop; wait for a command if there is nothing to compute."""
        commands: list[_Command] = []
        if not batcher.busy:
            timeout_s = min(batcher.intake.next_deadline - monotonic(), threading.TIMEOUT_MAX)
            with suppress(Empty):
                commands.append(self._commands.get(timeout=max(timeout_s, 0.0)))
        while not self._commands.empty() and not (commands and isinstance(commands[-1], _Stop)):
            commands.append(self._commands.get_nowait())
        return commands

    def _score(self, batcher: Batcher, command: _ScoreCommand) -> None:
        if not command.scores.set_running_or_notify_cancel():
            return
        try:
            texts = zip(command.sequences, command.images, strict=True)
            command.scores.set_result([batcher.logprobs(sequence, images) for sequence, images in texts])
        except Exception as error:  # noqa: BLE001 - the caller gets the error; serving is not affected
            fault = f"the torch inference engine cannot score: {error}; with `inference.canary: null` the run"
            command.scores.set_exception(_caused(error, f"{fault} does without"))

    def _swap(self, batcher: Batcher) -> None:
        newest = max(self._swaps_due, key=lambda swap: swap.order)
        if newest.order > self._newest_swap:
            held, hashes = self._held, dict(newest.hashes)
            changed = {name: t for name, t in newest.tensors.items() if held.get(name) != hashes[name]}
            # A swap in between may have replaced tensors that were assumed unchanged: load and hash them now.
            hashes |= hashes_of({name: changed[name] for name in newest.assumed if name in changed})
            pause_s = batcher.swap(changed, newest.version)
            self._newest_swap, self._held = newest.order, hashes
            self._served = SwapReport(newest.version, digest_of(hashes.items()), pause_s, hashes)
            newest.report.set_result(self._served)
            self._swaps_due.remove(newest)
        for command in self._swaps_due:
            command.report.set_result(msgspec.structs.replace(self._served, pause_s=0.0))
        self._swaps_due.clear()

    def _end_swaps(self, error: EngineError) -> None:
        for command in self._swaps_due:
            command.report.set_exception(error)
        self._swaps_due.clear()

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, so nobody waits for the call
            self._loop.call_soon_threadsafe(call, *arguments)


def _caused(error: Exception, fault: str) -> EngineError:
    failure = EngineError(fault)
    failure.__cause__ = error
    return failure


def _log_totals(batcher: Batcher) -> None:
    figures = batcher.figures
    log.info(
        "torch inference engine stops",
        generated_tokens=figures.generated_tokens,
        prefix_hits=batcher.slots.prefix_hits,
        prefix_tokens=batcher.slots.prefix_tokens,
        lost_tokens=batcher.slots.lost_tokens,
        preemptions=figures.preemptions,
    )
