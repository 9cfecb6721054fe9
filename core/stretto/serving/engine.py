"""The base class of server engines: weights and server. `streams` has samples, subclasses the HTTP API."""

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import anyio
import numpy as np
import structlog
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto.component import Context
from stretto.engine import Emit, GenerateRequest, Load, Sampling, SwapReport
from stretto.errors import ConfigError, EngineError, RequestError, WeightsError
from stretto.machine import clock
from stretto.models import files
from stretto.models.digest import digest_of
from stretto.models.images import ImageFile
from stretto.models.version_files import open_version
from stretto.models.vision import image_token_of, is_vision_language, newest_name
from stretto.serving.config import ServerEngineConfig, context_of_model
from stretto.serving.images import ServerText
from stretto.serving.server import Server, ServerCommand, ServerLost
from stretto.serving.streams import StreamQueue, Streams
from stretto.weights import WeightsNote, WeightUpdate

__all__ = ["ServerEngine"]

log = structlog.get_logger(__name__)

_LOOK_EVERY_S = 0.1
_RESTARTS_WITHIN_S = 600.0  # see `ServerEngineConfig.restarts`
_LOADS = 2  # servers that a swap tries


@dataclass(frozen=True)
class _WeightFiles:
    note: WeightsNote
    folder: Path
    own: bool
    """True if the engine removes the folder."""

    def drop(self) -> None:
        if self.own:
            shutil.rmtree(self.folder, ignore_errors=True)


class ServerEngine(Streams, ABC):
    """Implements `stretto.engine.VisionEngine`; a subclass implements the API of its kind of server.

    The engine restarts a server that ends, breaks a connection or is silent for too long, and reloads its
    weights. After too many restarts, or if the lost server was only attached, an EngineError ends the task
    group given to `start`; for a started server, the error has the end of the server's log.
    """

    health: ClassVar[str]
    """Path that answers 200 once the server can serve."""

    def __init__(self, config: ServerEngineConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._model = context.model or ""
        self._reads_images = False
        self._has_tied_head = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the model's own tensors; empty while its files are not on this machine."""
        self._room = context_of_model(config, context.model)
        self._samples = StreamQueue(self, slots=config.most_running, room=self._room, model=self._model)
        self._server: Server | None = None
        self._replaced = anyio.Event()
        self._restart_times: deque[float] = deque()
        self._control = anyio.Lock()
        """Held while the engine swaps weights, scores, or replaces the server."""
        self._version = -1
        """The version that the server serves; -1 for none."""
        self._asleep = False
        self._weight_files: _WeightFiles | None = None
        self._pauses: list[float] = []

    def unfit(self, sampling: Sampling) -> str:
        """See `Streams`."""
        return self._config.unfit(sampling)

    # ------------------------------------------------------------------ the API of a kind of server

    @abstractmethod
    def command(self, port: int, key: str) -> ServerCommand:
        """Return the command that starts a server on 127.0.0.1 and this port, which requires the key."""

    @abstractmethod
    async def greet(self, server: Server) -> None:
        """Check that a healthy server is the expected one, before the engine sends any other request. Raise
        EngineError if it is not."""

    @abstractmethod
    async def prepare_weights(self, server: Server, update: WeightUpdate, folder: Path) -> None:
        """Do the part of `load_weights` that is possible while the server continues to sample."""

    @abstractmethod
    async def load_weights(
        self, server: Server, update: WeightUpdate, folder: Path, *, forget: bool
    ) -> Mapping[str, str]:
        """Make the server, which is idle, load a folder of safetensors as the update's version.

        Args:
            forget: whether to empty the server's prefix cache.

        Returns:
            For each tensor of the update, its hash as the server loaded it, see `stretto.models.digest`.

        Raises:
            WeightsError: if the weights do not fit; the server keeps its old weights.
            ServerLost: if the engine cannot know which weights the server has now.
        """

    @abstractmethod
    async def free_memory(self, server: Server) -> None:
        """Make the server, which is idle, free the memory of weights and cache. Raise ServerLost if it does
        not."""

    @abstractmethod
    async def take_memory(self, server: Server, part: Literal["weights", "kv_cache"]) -> None:
        """Make the server, which sleeps, take the memory of a part again. Raise ServerLost if it does not."""

    @abstractmethod
    async def score(self, server: Server, text: ServerText) -> list[float]:
        """Return the logprobs, at temperature 1, of all tokens after the first. Logprobs of image tokens
        mean nothing. Raise EngineError if the server's ids of a text with images differ."""

    # -------------------------------------------------------------------------------- the contract

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """See `InferenceEngine`."""
        self._samples.start(emit, tasks)
        self._reads_images = await anyio.to_thread.run_sync(self._look_at_model)
        self._server = await self._launch()
        await anyio.to_thread.run_sync(self._learn_model)
        tasks.start_soon(self._watch, name="server")

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        self._samples.stop()
        if self._weight_files is not None:
            self._weight_files.drop()
        if self._server is not None:
            await self._server.stop()

    def generate(self, request: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        """See `VisionEngine`."""
        self._samples.take(request, images)

    def abort(self, request: str) -> None:
        """See `InferenceEngine`."""
        self._samples.abort(request)

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """See `InferenceEngine`."""
        reason = ""
        for _ in range(_LOADS):
            async with self._control:
                server, replaced = self._current_server(), self._replaced
                try:
                    return await self._swap_on(server, update)
                except ServerLost as error:
                    reason, self._asleep = str(error), False
                    server.distrust(f"at the swap to version {update.note.version}: {reason}")
            await replaced.wait()
        version = update.note.version
        raise WeightsError(
            f"version {version} was given to {_LOADS} servers, and each was lost: {reason}", version=version
        )

    async def sleep(self) -> None:
        """See `SleepingEngine`. The next swap replaces a server that is lost now, or while it sleeps."""
        async with self._control:
            if self._asleep:
                return
            server = self._current_server()
            self._asleep, self._version = True, -1
            if self._weight_files is not None:
                self._weight_files.drop()
                self._weight_files = None
            self._samples.hold()
            try:
                await self._samples.drain(server)
                await self.free_memory(server)
            except ServerLost as error:
                server.distrust(f"at its sleep: {error}")
                await server.stop()

    async def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[bytes] = ()
    ) -> list[NDArray[np.float32]]:
        """See `VisionEngine`."""
        digests = [ImageFile(file).digest for file in images]
        results: list[NDArray[np.float32]] = []
        async with self._control:
            server = self._current_server()
            for sequence in sequences:
                tokens: list[int] = sequence.tolist()
                try:
                    seen = self._samples.images(sequence, images, digests)
                    text = await seen.text(tokens) if seen else ServerText(tokens, tokens)
                    scores = await self.score(server, text)
                except RequestError as error:
                    raise EngineError(str(error)) from error
                except ServerLost as error:
                    server.distrust(str(error))
                    raise
                if len(scores) != len(sequence) - 1:
                    raise EngineError(f"the server scored {len(scores)} tokens of a text of {len(sequence)}")
                results.append(np.array(scores, np.float32))
        return results

    def load(self) -> Load:
        """See `InferenceEngine`."""
        samples = self._samples
        return Load(
            version=self._version,
            running=samples.running,
            waiting=samples.waiting,
            slots=self._config.most_running,
            generated_tokens=samples.generated,
            busy_s=samples.busy_s,
            swaps=len(self._pauses),
            pause_s=sum(self._pauses),
            pause_max_s=max(self._pauses, default=0.0),
            lost_tokens=samples.lost_tokens,
        )

    # -------------------------------------------------------------------------------- weights

    async def _swap_on(self, server: Server, update: WeightUpdate) -> SwapReport:
        note = update.note
        if update.folder is None:
            raise WeightsError(
                f"version {note.version} came without a folder of files, which {self._config.use!r} loads;"
                " set weights.use: file, or bus",
                version=note.version,
            )
        await anyio.to_thread.run_sync(self._check_shapes, note, update.folder)
        await self.prepare_weights(server, update, update.folder)
        start = clock.now()
        self._samples.hold()
        try:
            await self._samples.drain(server)
            if self._asleep:
                await self.take_memory(server, "weights")
            hashes = await self._load_on(server, update, update.folder)
            if self._asleep:
                await self.take_memory(server, "kv_cache")
                self._asleep = False
        except (ServerLost, WeightsError) as error:
            if self._asleep or isinstance(error, ServerLost):
                server.distrust(str(error))
            raise
        finally:
            self._samples.send_to(server, self._version)
        self._pauses.append(clock.now() - start)
        former_files = self._weight_files
        self._weight_files = await anyio.to_thread.run_sync(self._keep, note, update.folder)
        if former_files is not None:
            await anyio.to_thread.run_sync(former_files.drop)
        return SwapReport(note.version, digest_of(hashes.items()), self._pauses[-1], hashes)

    def _check_shapes(self, note: WeightsNote, folder: Path) -> None:
        """Compare a version with the model's own files: a server notices a misfit only during the load, if at
        all."""
        if not self._shapes:
            return
        shapes = self._shapes_in(str(folder))
        for name in sorted(self._shapes.keys() | shapes.keys()):
            if shapes.get(name) != self._shapes.get(name):
                raise WeightsError(
                    f"tensor {name!r} of version {note.version} has shape {shapes.get(name)}; the model's has"
                    f" {self._shapes.get(name)}",
                    version=note.version,
                )

    async def _load_on(self, server: Server, update: WeightUpdate, folder: Path) -> Mapping[str, str]:
        hashes = await self.load_weights(server, update, folder, forget=self._config.on_swap == "recompute")
        self._version = update.note.version
        return hashes

    def _keep(self, note: WeightsNote, folder: Path) -> _WeightFiles:
        """Hard-link the files of the served weights, because their publisher removes them later. Where links
        are not possible, use the publisher's files until then."""
        links = folder.with_name(f".{self._context.worker}-{note.version:08d}")
        try:
            shutil.rmtree(links, ignore_errors=True)
            links.mkdir(mode=0o700)
            for file in folder.iterdir():
                os.link(file, links / file.name)
        except OSError as error:
            log.warning("weights cannot be kept for a restart", folder=str(folder), error=str(error))
            return _WeightFiles(note, folder, own=False)
        return _WeightFiles(note, links, own=True)

    # -------------------------------------------------------------------------------- the server

    def _current_server(self) -> Server:
        assert self._server is not None, "start comes first"
        return self._server

    async def _launch(self) -> Server:
        config, start = self._config, clock.now()
        if config.urls:
            server = Server(self._url(), config.api_key)
        else:
            port, key = Server.draw_address()
            server = await Server.start(self.command(port, key), port, key, self._log_file())
        try:
            await server.until_healthy(self.health, config.start_timeout_s)
            await self.greet(server)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await server.stop()
            raise
        log.info("server ready", url=server.url, after_s=round(clock.now() - start, 1))
        return server

    def _log_file(self) -> Path:
        """Return the server's log file; without the run's folder, it is in a new private folder."""
        worker = self._context.worker
        if self._context.folder:
            return self._context.path("logs", f"{worker}-server.log")
        file = Path(tempfile.mkdtemp(prefix=f"stretto-{self._context.run}-"), f"{worker}-server.log")
        log.info("the server's output is on this machine", file=str(file))
        return file

    def _look_at_model(self) -> bool:
        """Return whether the model reads images. An attached server's model may not be on this machine."""
        read_config = files.known_config if self._config.urls else files.fetch_config
        try:
            return is_vision_language(read_config(self._context.model))
        except ConfigError as error:
            raise EngineError(str(error)) from error

    def _learn_model(self) -> None:
        """Read the model's config, shapes and end tokens; the server has downloaded the model by now."""
        folder = files.folder_of_model(self._context.model)
        if folder is None:
            return
        whole, text = files.known_config(folder), files.text_config(folder)
        self._has_tied_head = whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        self._shapes = self._shapes_in(folder)
        self._samples.learn(text.get("vocab_size"), files.end_tokens_in(folder), image_token_of(whole))

    def _shapes_in(self, folder: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a folder's tensors, a vision-language model's under their newest names,
        without the head of tied embeddings: files may contain it or not."""
        shapes = files.shapes_in(folder)
        if self._reads_images:
            shapes = {newest_name(name): shape for name, shape in shapes.items()}
        return {
            name: shape
            for name, shape in shapes.items()
            if not self._has_tied_head or name != "lm_head.weight"
        }

    def _url(self) -> str:
        number, urls = self._context.worker.rpartition("-")[2], self._config.urls
        if not number.isdigit() or int(number) >= len(urls):
            raise EngineError(
                f"inference.urls names {len(urls)} server(s), none of them for {self._context.worker}"
            )
        return urls[int(number)]

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(_LOOK_EVERY_S)
            server, silence_s = self._current_server(), self._config.silence_s
            self._samples.expire()
            if server.status is not None:
                server.distrust(f"it ended with status {server.status}")
            elif self._samples.expecting and clock.now() - server.last_data_at > silence_s:
                server.distrust(f"it sent nothing for {silence_s:g} s (inference.silence_s)")
            if server.broken and self._asleep:
                await server.stop()
                while self._asleep:  # another one would take memory now: the next swap ends the sleep
                    await anyio.sleep(_LOOK_EVERY_S)
            if server.broken:
                await self._replace(server)

    async def _replace(self, server: Server) -> None:
        log.warning("server lost", url=server.url, reason=server.broken)
        tail = server.tail()
        await self._samples.leave()
        await server.stop()  # this ends the request that a swap may be waiting for
        async with self._control:
            while server.broken:
                self._count_restart(server, tail)
                self._version = -1
                self._server = server = await self._launch()
                try:
                    await self._reload(server)
                except ServerLost as error:
                    server.distrust(str(error))
                    tail = server.tail()
                    await server.stop()
            self._samples.send_to(server, self._version)
            self._replaced.set()
            self._replaced = anyio.Event()

    def _count_restart(self, server: Server, tail: str) -> None:
        now, config = clock.now(), self._config
        while self._restart_times and now - self._restart_times[0] > _RESTARTS_WITHIN_S:
            self._restart_times.popleft()
        if server.attached:
            raise EngineError(
                f"the server at {server.url} is lost: {server.broken}; start it again, and resume the run"
            )
        if len(self._restart_times) >= config.restarts:
            times, minutes = len(self._restart_times) + 1, _RESTARTS_WITHIN_S / 60
            log_text = f"; its log ends:\n{tail}" if tail else ""
            raise EngineError(
                f"the server was lost {times} times within {minutes:g} minutes"
                f" (inference.restarts: {config.restarts}): {server.broken}; if memory is short, lower slots,"
                f" context_length or share{log_text}"
            )
        self._restart_times.append(now)

    async def _reload(self, server: Server) -> None:
        """Load the lost server's weights into a new server. If the files are gone, wait for the next swap."""
        if self._weight_files is None:
            return
        note, folder = self._weight_files.note, self._weight_files.folder
        try:
            update = await anyio.to_thread.run_sync(open_version, note, folder)
            await self.prepare_weights(server, update, folder)
            await self._load_on(server, update, folder)
        except WeightsError as error:
            log.warning("weights are gone; waiting for the next swap", version=note.version, error=str(error))
