"""The frame of inference engines that are HTTP servers: everything but the words that one kind of server
speaks.

A request's samples wait in the worker and are sent to the server one by one, at most `slots` at a time, as
streams. Before new weights are loaded, and after a server has ended, every stream is ended and its sample
goes back to the head of the line; later it is sent again as its prompt and the tokens so far. So one stream
lies within one version, and the version of a token is never a guess; a server that names the versions of a
stream is held to it. What this costs is one more prefill, which the server's prefix cache makes a short one
where the keys and values are to be kept: its entries are salted with the version that a sample was begun
under, so only samples that were in flight at a swap ever read those of older weights.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import numpy as np
import structlog
from numpy.typing import NDArray

from stretto.component import Context
from stretto.engine import Chunk, Emit, Finish, GenerateRequest, Load, Sampling, SwapReport
from stretto.errors import EngineError, RequestError, WeightsError
from stretto.model_files import end_tokens_in, folder_of_model, shapes_in, text_config
from stretto.sidecar import SidecarConfig, context_of_model
from stretto.sidecar_server import Server, ServerCommand, ServerLost, ServerRefused
from stretto.stops import StopStrings, stop_tokenizer
from stretto.weight_files import open_version
from stretto.weights import WeightsNote, digest_of

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from stretto.weights import WeightUpdate

__all__ = ["Ask", "Piece", "SidecarEngine"]

log = structlog.get_logger(__name__)

_EMIT_EVERY_S = 0.02
_LOOK_EVERY_S = 0.1
_EVALUATION_DELAY_S = 2.0  # a request of priority 1 is served as if it had come so much later
_DRAIN_S = 30.0
_RESTARTS_WITHIN_S = 600.0
_UNASKED_ABORTS = 5
_LOADS = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """One stream, as a server is asked for it."""

    id: str
    """Unique among the server's requests, and no prefix of another's."""
    tokens: list[int]
    """The prompt, and the answer so far."""
    max_tokens: int
    """Tokens still to come at most, at least 1."""
    seed: int
    """0 <= seed < 2**63."""
    sampling: Sampling
    salt: str
    """Of the prefix cache: the version that the sample was begun under."""


@dataclass(slots=True)
class Piece:
    """New tokens of a stream."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish = ""
    """`abort` where the stream was ended before its end; its tokens then do not end the answer."""
    error: str = ""
    versions: Sequence[str] = ()
    """With the last piece, if the server tells it: the versions whose weights gave the stream's tokens."""


@dataclass(eq=False)
class _Sample:
    """One answer in the making."""

    request: GenerateRequest
    index: int
    prompt: list[int]
    answer: list[int]
    """What it had when it came, and all that the server has given since."""
    begun: int
    """Tokens of the answer that it had when it came."""
    sent: int
    """Tokens of the answer that the asker has."""
    ticket: int
    """Its place in the line among those due at the same time; the same when it waits again."""
    due: float
    """Its place in the line: when it came, or a little later."""
    expires: float
    salt: str = ""
    """Of the prefix cache: the version that the server's first token of it was sampled by, or will be."""
    version: int = -1
    """Of the stream it is in, or was in last."""
    logprobs: deque[float] = field(default_factory=deque[float])
    """Of the tokens that are to be emitted; so are the versions."""
    versions: deque[int] = field(default_factory=deque[int])
    finish: Finish = ""
    error: str = ""
    aborts: int = 0
    """Streams that the server ended unasked."""
    scope: anyio.CancelScope | None = None
    """Of the stream it is in."""
    asked: str = ""
    """Id of the stream it is in."""


@dataclass(frozen=True)
class _Kept:
    """Files of a version, for a server that is started again."""

    note: WeightsNote
    folder: Path
    own: bool
    """Whether the folder is the engine's to remove."""

    def drop(self) -> None:
        if self.own:
            shutil.rmtree(self.folder, ignore_errors=True)


class SidecarEngine(ABC):
    """Keeps `stretto.engine.InferenceEngine`; a subclass says what its kind of server is asked, and how.

    A server that ends, breaks off or falls silent is started again with the weights that it served; when that
    has happened too often, or the server was only attached to, the task group given to `start` is broken with
    the end of the server's log.
    """

    health: ClassVar[str]
    """Path that answers 200 once the server can serve."""

    def __init__(self, config: SidecarConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._model = context.model or ""
        self._tokenizer: Any = None
        self._loading = anyio.Lock()
        self._config_of_model: Mapping[str, Any] = {}
        self._vocabulary = 2**31
        self._ends: frozenset[int] = frozenset()
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the model's own tensors; empty while they are not on this machine."""
        self._room = context_of_model(config, context.model)
        self._server: Server | None = None
        self._broken = ""
        """Why the server is not to be trusted any more."""
        self._replaced = anyio.Event()
        self._restarted: deque[float] = deque()
        self._control = anyio.Lock()
        """Held by whoever swaps weights, scores, or replaces the server."""
        self._open = False
        """Whether samples may be sent to the server."""
        self._tasks: TaskGroup | None = None
        self._emit: Emit | None = None
        self._requests: dict[str, list[_Sample]] = {}
        self._line: list[tuple[float, int, _Sample]] = []
        self._aside: list[_Sample] = []
        """Samples that need newer weights than there are."""
        self._running: set[_Sample] = set()
        self._idle = anyio.Event()
        self._news = anyio.Event()
        self._fresh: dict[_Sample, None] = {}
        """Samples with something to emit, in the order in which it came."""
        self._numbers = count()
        self._version = -1
        self._kept: _Kept | None = None
        """The weights served, for a server that is started again."""
        self._generated = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._pauses: list[float] = []

    # ------------------------------------------------------------- what a kind of server differs in

    @abstractmethod
    def command(self, port: int, key: str) -> ServerCommand:
        """How it is started, to listen on 127.0.0.1 and serve who shows the key."""

    @abstractmethod
    async def greet(self, server: Server) -> None:
        """See that a healthy server is what it must be, before anything else is asked of it.

        Raises:
            EngineError: if it is not.
        """

    def unfit(self, sampling: Sampling) -> str:
        """Why tokens cannot be drawn in this way; empty if they can."""
        del sampling
        return ""

    @abstractmethod
    def stream(self, server: Server, ask: Ask) -> AsyncGenerator[Piece]:
        """Ask for one stream. Its last piece has a `finish`."""

    @abstractmethod
    async def abort_streams(self, server: Server, ids: Sequence[str]) -> None:
        """End streams, each with a piece that says `abort`. Ids that the server does not know are passed
        over."""

    @abstractmethod
    async def prepare_weights(self, server: Server, update: WeightUpdate, folder: Path) -> None:
        """What can be done of `load_weights` while the server goes on sampling."""

    @abstractmethod
    async def load_weights(
        self, server: Server, update: WeightUpdate, folder: Path, *, forget: bool
    ) -> Mapping[str, str]:
        """Have the server, which is at rest, load a folder of safetensors and call it by its version.

        Args:
            forget: whether to empty its prefix cache.

        Returns:
            For each tensor of the update, the SHA-256 in hex of what was really loaded.

        Raises:
            WeightsError: if they do not fit; the old ones are untouched.
            ServerLost: if it is not known what it serves now.
        """
        ...

    @abstractmethod
    async def score(self, server: Server, tokens: list[int]) -> list[float]:
        """Logprobs at temperature 1 of the tokens after the first."""

    # -------------------------------------------------------------------------------- the contract

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """See `InferenceEngine`."""
        self._emit, self._tasks = emit, tasks
        self._server = await self._launch()
        await anyio.to_thread.run_sync(self._learn_model)
        tasks.start_soon(self._watch, name="server")
        tasks.start_soon(self._flush, name="chunks")

    async def stop(self) -> None:
        """See `InferenceEngine`."""
        self._emit = None
        self._open = False
        if self._kept is not None:
            self._kept.drop()
        if self._server is not None:
            await self._server.stop()

    def generate(self, request: GenerateRequest) -> None:
        """See `InferenceEngine`."""
        if request.id in self._requests:
            return
        try:
            samples = self._samples(request)
        except RequestError as error:
            self._refuse(request, str(error))
            return
        if samples:
            self._requests[request.id] = samples
        for sample in samples.copy():
            if sample.answer and self._is_end(sample.answer[-1], request.sampling):
                self._end(sample, "stop")
            elif len(sample.answer) >= request.sampling.max_tokens:
                self._end(sample, "length")
            else:
                self._place(sample)
        self._admit()

    def abort(self, request: str) -> None:
        """See `InferenceEngine`."""
        for sample in self._requests.get(request, []).copy():
            self._cut(sample, "abort")

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """See `InferenceEngine`.

        Raises:
            WeightsError: if the server refuses them, or they lie in no folder.
        """
        reason = ""
        for _ in range(_LOADS):
            async with self._control:
                server, replaced = self._the_server(), self._replaced
                try:
                    return await self._swap_on(server, update)
                except ServerLost as error:
                    reason = str(error)
                    self._distrust(server, f"at the swap to version {update.note.version}: {reason}")
            await replaced.wait()
        version = update.note.version
        raise WeightsError(
            f"version {version} was given to {_LOADS} servers, and each was lost: {reason}", version=version
        )

    async def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """See `InferenceEngine`."""
        found: list[NDArray[np.float32]] = []
        async with self._control:
            server = self._the_server()
            for sequence in sequences:
                try:
                    scored = await self.score(server, sequence.tolist())
                except ServerLost as error:
                    self._distrust(server, str(error))
                    raise
                if len(scored) != len(sequence) - 1:
                    raise EngineError(f"the server scored {len(scored)} tokens of a text of {len(sequence)}")
                found.append(np.array(scored, np.float32))
        return found

    def load(self) -> Load:
        """See `InferenceEngine`."""
        alive = sum(len(samples) for samples in self._requests.values())
        busy = time.monotonic() - self._busy_since if self._running else 0.0
        return Load(
            version=self._version,
            running=len(self._running),
            waiting=max(0, alive - len(self._running)),
            slots=self._config.slots,
            generated_tokens=self._generated,
            busy_s=self._busy_s + busy,
            swaps=len(self._pauses),
            pause_s=sum(self._pauses),
            pause_max_s=max(self._pauses, default=0.0),
        )

    # -------------------------------------------------------------------------------- the line

    def _samples(self, request: GenerateRequest) -> list[_Sample]:
        """The samples that are wanted of a request; or `RequestError`."""
        prompt = request.prompt_ids.numpy().tolist()
        number, longest = len(request.seeds), request.sampling.max_tokens
        if not prompt or not number:
            raise RequestError(f"{len(prompt)} prompt tokens and {number} seeds; each must be at least 1")
        if len(prompt) + longest > self._room:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens {longest} need {len(prompt) + longest};"
                f" a sample can have {self._room} (inference.context_length)"
            )
        if not all(request.sampling.stop):
            raise RequestError("an empty stop string would end every answer")
        if fault := self.unfit(request.sampling):
            raise RequestError(fault)
        begun: list[list[int]] = [part.numpy().tolist() for part in request.begun] or [[]] * number
        have = request.have or (0,) * number
        if len(begun) != number or len(have) != number:
            raise RequestError(f"'begun' and 'have' are for {len(begun)} and {len(have)} samples of {number}")
        for tokens in (prompt, *begun):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise RequestError(f"tokens outside the vocabulary of {self._vocabulary}")
        now = time.monotonic()
        due, expires = now + _EVALUATION_DELAY_S * request.priority, now + request.deadline_s
        return [
            _Sample(
                request=request,
                index=i,
                prompt=prompt,
                answer=begun[i].copy(),
                begun=len(begun[i]),
                sent=max(have[i], len(begun[i])),
                ticket=next(self._numbers),
                due=due,
                expires=expires,
            )
            for i in range(number)
            if have[i] >= 0
        ]

    def _is_end(self, token: int, sampling: Sampling) -> bool:
        return token in sampling.stop_token_ids or (token in self._ends and not sampling.ignore_eos)

    def _place(self, sample: _Sample) -> None:
        """Let a sample wait for its turn."""
        heapq.heappush(self._line, (sample.due, sample.ticket, sample))

    def _admit(self) -> None:
        """Send samples to the server while there are slots."""
        if self._tasks is None or self._emit is None:
            return
        while self._open and self._line and len(self._running) < self._config.slots:
            sample = heapq.heappop(self._line)[2]
            if sample.finish:
                continue
            if max(sample.request.min_version, 0) > self._version:
                self._aside.append(sample)
                continue
            if not self._running:
                self._busy_since, self._idle = time.monotonic(), anyio.Event()
                self._the_server().heard = self._busy_since
            self._running.add(sample)
            sample.version = self._version
            if len(sample.answer) == sample.begun or not sample.salt:
                sample.salt = f"v{self._version}"
            sample.scope = anyio.CancelScope()
            sample.asked = f"{next(self._numbers):016d}"
            self._tasks.start_soon(self._decode, self._the_server(), sample)

    async def _decode(self, server: Server, sample: _Sample) -> None:
        """One stream, from its question to its end; a sample that is unfinished then waits again."""
        assert sample.scope is not None
        ended = False
        try:
            with sample.scope:
                ended = await self._receive(server, sample)
        except RequestError as error:
            ended = True  # it was not even asked for
            self._end(sample, "error", str(error))
        except ServerRefused as error:
            ended = True
            if error.status < 500:
                self._end(sample, "error", str(error))
            else:
                self._distrust(server, str(error))
        except ServerLost as error:
            self._distrust(server, str(error))
        if not ended and not self._broken:
            await self._abort_at(server, sample.asked)
        self._running.remove(sample)
        if not self._running:
            self._busy_s += time.monotonic() - self._busy_since
            self._idle.set()
        sample.scope = None
        if not sample.finish:
            self._place(sample)
        self._admit()

    async def _receive(self, server: Server, sample: _Sample) -> bool:
        """Take the pieces of a stream until it or the sample ends; whether the stream did."""
        sampling, done = sample.request.sampling, len(sample.answer)
        ask = Ask(
            id=sample.asked,
            tokens=sample.prompt + sample.answer,
            max_tokens=sampling.max_tokens - done,
            seed=_seed(sample.request.seeds[sample.index], done),
            sampling=sampling,
            salt=sample.salt,
        )
        stops = await self._stop_strings(sampling)
        if stops is not None and sample.answer and stops.end(sample.answer):
            self._end(sample, "stop")  # it came so
            return True
        ended = False
        async with aclosing(self.stream(server, ask)) as pieces:
            async for piece in pieces:
                ended = ended or bool(piece.finish)
                self._take(sample, piece, stops)
                if sample.finish and not ended:
                    return False
        if not ended:
            raise ServerLost("a stream ended without a finish")
        return True

    def _take(self, sample: _Sample, piece: Piece, stops: StopStrings | None) -> None:
        for version in piece.versions:
            if version != str(sample.version):
                raise EngineError(
                    f"the server says that version {version!r} gave what was asked of {sample.version};"
                    " does another program swap its weights?"
                )
        sampling = sample.request.sampling
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            sample.answer.append(token)
            self._generated += 1
            if len(sample.answer) > sample.sent:
                sample.logprobs.append(logprob)
                sample.versions.append(sample.version)
            # SGLang passes over stop tokens together with the model's own ends.
            if token in sampling.stop_token_ids or (stops is not None and stops.end(sample.answer)):
                self._cut(sample, "stop")
                return
        self._note(sample)
        if piece.finish == "abort":
            # Ended for a swap, or because the server had no room: it goes on later.
            sample.aborts += self._open
            if sample.aborts > _UNASKED_ABORTS:
                self._end(sample, "error", f"the server ended the sample unasked, {sample.aborts} times")
        elif piece.finish == "length" and len(sample.answer) < sampling.max_tokens:
            got, of = len(sample.answer), sampling.max_tokens
            self._end(sample, "error", f"the server cut the answer to {got} of {of} tokens: it has less room")
        elif piece.finish:
            self._end(sample, piece.finish, piece.error)

    async def _stop_strings(self, sampling: Sampling) -> StopStrings | None:
        """What recognises the stop strings of a request. That is done here, since a server sees only its own
        part of an answer that goes on after a swap."""
        if not sampling.stop:
            return None
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await anyio.to_thread.run_sync(stop_tokenizer, self._model)
        return StopStrings(sampling.stop, self._tokenizer)

    # -------------------------------------------------------------------------------- chunks

    def _end(self, sample: _Sample, finish: Finish, error: str = "") -> None:
        """A sample has ended: nothing more is taken of it."""
        if sample.finish:
            return
        sample.finish, sample.error = finish, error
        self._requests[sample.request.id].remove(sample)
        if not self._requests[sample.request.id]:
            del self._requests[sample.request.id]
        self._note(sample)

    def _cut(self, sample: _Sample, finish: Finish, error: str = "") -> None:
        """End a sample whose stream, if it is in one, would go on."""
        self._end(sample, finish, error)
        if sample.scope is not None:
            sample.scope.cancel()

    def _refuse(self, request: GenerateRequest, why: str) -> None:
        """Answer a request that cannot be served."""
        for index in range(len(request.seeds)):
            if not request.have or (index < len(request.have) and request.have[index] >= 0):
                sent = request.have[index] if request.have else 0
                self._note(_Sample(request, index, [], [], 0, sent, 0, 0, 0, finish="error", error=why))

    def _note(self, sample: _Sample) -> None:
        """There is something to emit of a sample."""
        self._fresh[sample] = None
        self._news.set()

    async def _flush(self) -> None:
        """Emit what is new, the first of it at once."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            fresh, self._fresh = self._fresh, {}
            chunks = [_chunk(sample) for sample in fresh if sample.logprobs or sample.finish]
            if self._emit is not None and chunks:
                self._emit(chunks)
            await anyio.sleep(_EMIT_EVERY_S)

    # -------------------------------------------------------------------------------- weights

    async def _swap_on(self, server: Server, update: WeightUpdate) -> SwapReport:
        note = update.note
        if update.folder is None:
            raise WeightsError(
                f"version {note.version} came without a folder of files, which {self._config.use!r} loads;"
                " set weights.use: file, or bus",
                version=note.version,
            )
        await anyio.to_thread.run_sync(self._see_fitting, note, update.folder)
        await self.prepare_weights(server, update, update.folder)
        began = time.monotonic()
        self._open = False
        try:
            await self._drain(server)
            hashes = await self._load_on(server, update, update.folder)
        except ServerLost as error:
            self._distrust(server, str(error))
            raise
        finally:
            self._open = not self._broken
            self._admit()
        self._pauses.append(time.monotonic() - began)
        former, self._kept = self._kept, await anyio.to_thread.run_sync(self._keep, note, update.folder)
        if former is not None:
            await anyio.to_thread.run_sync(former.drop)
        return SwapReport(note.version, digest_of(hashes.items()), self._pauses[-1], hashes)

    def _see_fitting(self, note: WeightsNote, folder: Path) -> None:
        """Compare a version with the model's own files, if these are on this machine: servers find out in the
        midst of a load that a tensor does not fit, or not at all.

        Raises:
            WeightsError: naming the first tensor that is not the model's.
        """
        if not self._shapes:
            return
        given = self._untied(shapes_in(str(folder)))
        for name in sorted(self._shapes.keys() | given.keys()):
            if given.get(name) != self._shapes.get(name):
                raise WeightsError(
                    f"tensor {name!r} of version {note.version} has shape {given.get(name)}; the model's has"
                    f" {self._shapes.get(name)}",
                    version=note.version,
                )

    async def _drain(self, server: Server) -> None:
        """End every stream at the server. One that it has only just been asked for it may not know yet, so it
        is told again."""
        deadline = time.monotonic() + _DRAIN_S
        while self._running:
            if time.monotonic() > deadline:
                raise ServerLost(f"{len(self._running)} streams did not end within {_DRAIN_S:g} s")
            await self.abort_streams(server, [sample.asked for sample in self._running if sample.asked])
            with anyio.move_on_after(_LOOK_EVERY_S):
                await self._idle.wait()

    async def _load_on(self, server: Server, update: WeightUpdate, folder: Path) -> Mapping[str, str]:
        hashes = await self.load_weights(server, update, folder, forget=self._config.on_swap == "recompute")
        self._version = update.note.version
        aside, self._aside = self._aside, []
        for sample in aside:
            if not sample.finish:
                self._place(sample)
        return hashes

    def _keep(self, note: WeightsNote, folder: Path) -> _Kept:
        """Hold on to the files of the weights served, which their publisher removes at its own time. Links
        cost nothing; where there can be none, the files are used for as long as they are there."""
        links = folder.with_name(f".{self._context.worker}-{note.version:08d}")
        try:
            shutil.rmtree(links, ignore_errors=True)
            links.mkdir(mode=0o700)
            for file in folder.iterdir():
                os.link(file, links / file.name)
        except OSError as error:
            log.warning("weights cannot be kept for a restart", folder=str(folder), error=str(error))
            return _Kept(note, folder, own=False)
        return _Kept(note, links, own=True)

    # -------------------------------------------------------------------------------- the server

    def _the_server(self) -> Server:
        assert self._server is not None, "start comes first"
        return self._server

    async def _launch(self) -> Server:
        """A server that is ready for weights.

        Raises:
            EngineError: if there is none to be had, with the end of its log.
        """
        config, began = self._config, time.monotonic()
        if config.urls:
            server = Server(self._url(), config.api_key)
        else:
            port, key = Server.draw_address()
            log_file = self._context.path("logs", f"{self._context.worker}-server.log")
            server = await Server.start(self.command(port, key), port, key, log_file)
        try:
            await server.until_healthy(self.health, config.start_timeout_s)
            await self.greet(server)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await server.stop()
            raise
        log.info("server ready", url=server.url, after_s=round(time.monotonic() - began, 1))
        return server

    def _learn_model(self) -> None:
        """Read what must be known of the model; a server has fetched it by now."""
        folder = folder_of_model(self._context.model)
        if folder is None:
            return
        self._config_of_model = text_config(folder)
        self._vocabulary = self._config_of_model.get("vocab_size", self._vocabulary)
        self._ends = end_tokens_in(folder)
        self._shapes = self._untied(shapes_in(folder))

    def _untied(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Without the head of a model that has none of its own: files may hold it or not."""
        tied = self._config_of_model.get("tie_word_embeddings", False)
        return {name: shape for name, shape in shapes.items() if not tied or name != "lm_head.weight"}

    def _url(self) -> str:
        """Of the running server that is this worker's."""
        number, urls = self._context.worker.rpartition("-")[2], self._config.urls
        if not number.isdigit() or int(number) >= len(urls):
            raise EngineError(
                f"inference.urls names {len(urls)} server(s), none of them for {self._context.worker}"
            )
        return urls[int(number)]

    def _distrust(self, server: Server, why: str) -> None:
        """Something went wrong with a server; it will be replaced."""
        if server is self._server and not self._broken:
            self._broken, self._open = why, False

    async def _watch(self) -> None:
        """Look after the server and the deadlines of samples, until cancelled."""
        while True:
            await anyio.sleep(_LOOK_EVERY_S)
            now, server = time.monotonic(), self._the_server()
            for samples in list(self._requests.values()):
                for sample in samples.copy():
                    if sample.expires < now:
                        self._cut(sample, "error", "deadline passed")
            if server.status is not None:
                self._distrust(server, f"it ended with status {server.status}")
            elif self._running and self._open and now - server.heard > self._config.silence_s:
                self._distrust(
                    server, f"it sent nothing for {self._config.silence_s:g} s (inference.silence_s)"
                )
            if self._broken:
                await self._replace(server)

    async def _replace(self, server: Server) -> None:
        """Another server in the place of a broken one, with the weights that were served.

        Raises:
            EngineError: if there has been one too often, or it does not start.
        """
        log.warning("server lost", url=server.url, reason=self._broken)
        for sample in self._running:
            if sample.scope is not None:
                sample.scope.cancel()
        tail = server.tail()
        await server.stop()  # which ends what a swap may be waiting for
        if self._running:
            await self._idle.wait()
        async with self._control:
            while self._broken:
                self._account(server, tail)
                self._version = -1
                self._server = server = await self._launch()
                try:
                    await self._reload(server)
                    self._broken = ""
                except ServerLost as error:
                    self._broken, tail = str(error), server.tail()
                    await server.stop()
            self._forget_salts()
            self._open = True
            self._replaced.set()
            self._replaced = anyio.Event()
        self._admit()

    def _account(self, server: Server, tail: str) -> None:
        now, config = time.monotonic(), self._config
        while self._restarted and now - self._restarted[0] > _RESTARTS_WITHIN_S:
            self._restarted.popleft()
        said = f"; its log ends:\n{tail}" if tail else ""
        if server.attached:
            raise EngineError(
                f"the server at {server.url} is lost: {self._broken}; start it again, and resume the run"
            )
        if len(self._restarted) >= config.restarts:
            times, minutes = len(self._restarted) + 1, _RESTARTS_WITHIN_S / 60
            raise EngineError(
                f"the server was lost {times} times within {minutes:g} minutes"
                f" (inference.restarts: {config.restarts}): {self._broken}{said}"
            )
        self._restarted.append(now)

    def _forget_salts(self) -> None:
        """A fresh server has no keys and values that a sample could go on over."""
        for samples in self._requests.values():
            for sample in samples:
                sample.salt = ""

    async def _reload(self, server: Server) -> None:
        """Have a fresh server serve what the lost one did; where that is gone, the next swap will."""
        if self._kept is None:
            return
        note, folder = self._kept.note, self._kept.folder
        try:
            update = await anyio.to_thread.run_sync(open_version, note, folder)
            await self.prepare_weights(server, update, folder)
            await self._load_on(server, update, folder)
        except WeightsError as error:
            log.warning("weights are gone; waiting for the next swap", version=note.version, error=str(error))

    async def _abort_at(self, server: Server, id: str) -> None:
        """Have the server free the slot of a sample that is not wanted any more."""
        with anyio.CancelScope(shield=True):
            try:
                await self.abort_streams(server, [id])
            except (ServerLost, ServerRefused) as error:
                self._distrust(server, str(error))


def _chunk(sample: _Sample) -> Chunk:
    """All that is new of a sample."""
    number = len(sample.logprobs)
    tokens = sample.answer[sample.sent : sample.sent + number]
    chunk = Chunk(
        request=sample.request.id,
        sample=sample.index,
        position=sample.sent,
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(sample.logprobs, np.float32),
        versions=np.array(sample.versions, np.int32),
        finish=sample.finish,
        error=sample.error,
    )
    sample.sent += number
    sample.logprobs.clear()
    sample.versions.clear()
    return chunk


def _seed(seed: int, position: int) -> int:
    """The seed of a stream that begins at a position of the answer. A stream begun again must not draw with
    the random numbers that its earlier tokens were drawn with."""
    if position == 0:
        return seed % 2**63
    drawn = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn) % 2**63
