"""The samples of an engine that is a server: their streams, and the chunks to emit.

The queue sends at most `slots` samples as streams at a time. Before new weights are loaded, and after a
server has ended, the queue ends every stream, puts the sample back at its place in the line, and later sends
the sample again with its tokens so far. So each stream belongs to one version, and the version of every token
is known exactly.

The cost is one more prefill for each interrupted sample, short if the prefix cache survives the swap. The
cache's entries are salted with the version under which a sample started, so only samples that were in flight
at a swap read keys and values of older weights.
"""

import hashlib
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import anyio.to_thread
import msgspec
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto.array import KeptTokens
from stretto.engine import Chunk, Emit, Finish, GenerateRequest, Sampling
from stretto.errors import EngineError, RequestError
from stretto.machine import clock
from stretto.serving.images import RequestImages, ServerText, image_runs
from stretto.serving.intake import Intake, OpenSample, final_chunks
from stretto.serving.seen import SeenTexts, prefix_keys
from stretto.serving.server import Server, ServerLost, ServerRefused
from stretto.serving.stop_strings import StopStrings, stop_tokenizer

__all__ = ["FINISH_REASONS", "Ask", "StreamChunk", "StreamQueue", "Streams", "VersionSpan"]

FINISH_REASONS: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
"""The server's finish reason -> the finish of the stream; every other reason is an error."""
_EMIT_EVERY_S = 0.02  # a message costs the receiver much, the tokens in it almost nothing
_LOOK_EVERY_S = 0.1
_DRAIN_S = 30.0  # a server that does not end its streams in this time is replaced
_UNASKED_ABORTS = 5  # more aborts by the server fail the sample


@dataclass(frozen=True, slots=True)
class Ask:
    """The request for one stream that the queue sends to a server."""

    id: str
    """Unique among the server's requests, and not a prefix of another id."""
    text: ServerText
    max_tokens: int
    """Largest number of tokens that the stream may add, at least 1."""
    seed: int
    """0 <= seed < 2**63."""
    sampling: Sampling
    salt: str
    """Salt of the prefix cache: the version under which the sample started."""


@dataclass(slots=True)
class StreamChunk:
    """New tokens of a stream."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish = ""
    """`abort` if the stream was interrupted; the answer is then not complete."""
    error: str = ""
    versions: Sequence[str] = ()
    """In the last chunk, if the server reports it: versions whose weights sampled the stream's tokens."""
    kept: Sequence[Sequence[int]] | None = None
    """The ids from which each token was drawn, if the server reports them."""
    cached_tokens: int | None = None
    """In one chunk, if the server reports it: leading tokens of the prompt that its prefix cache had."""


class VersionSpan(msgspec.Struct, gc=False):
    """A part of a stream that one version of the weights sampled, as servers report it."""

    version: str


@dataclass(eq=False)
class _ServerSample(OpenSample):
    answer: list[int] = field(init=False)
    """The tokens that the sample had on arrival, and those that the server has returned since."""
    salt: str = ""
    """Salt of the prefix cache: the version that samples, or sampled, the server's first token."""
    version: int = -1
    logprobs: deque[float] = field(default_factory=deque[float])
    """Logprobs of the tokens that have not been emitted; `versions` are for the same tokens."""
    versions: deque[int] = field(default_factory=deque[int])
    kept: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    """If the request wants them: the ids, ascending, from which each of the same tokens was drawn."""
    finish: Finish = ""
    error: str = ""
    aborts: int = 0
    """Number of streams that the server ended although the queue did not ask for it."""
    scope: anyio.CancelScope | None = None
    stream_id: str = ""
    images: RequestImages | None = None

    def __post_init__(self) -> None:
        self.answer = self.begun.tolist()


class Streams(Protocol):
    """The operations on streams for one kind of server."""

    @abstractmethod
    def unfit(self, sampling: Sampling) -> str:
        """Return the reason why the server does not support this sampling; empty if it does."""
        ...

    @abstractmethod
    def stream(self, server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
        """Request one stream. Its last chunk has a `finish`."""
        ...

    @abstractmethod
    async def abort_streams(self, server: Server, ids: Sequence[str]) -> None:
        """End streams; the last chunk of each has the finish `abort`. Unknown ids are ignored."""


class StreamQueue:
    """The samples of one worker: at most `slots` in streams, each of at most `room` tokens, prompt and answer
    together. `model` is for stop strings."""

    def __init__(self, streams: Streams, *, slots: int, room: int, model: str) -> None:
        self._streams = streams
        self._slots = slots
        self._intake = Intake(_ServerSample, vocabulary=2**31, room=room)
        self._model = model
        self._image_token: int | None = None
        self._tokenizer: Any = None
        self._loading = anyio.Lock()
        self._tasks: TaskGroup | None = None
        self._emit: Emit | None = None
        self._server: Server | None = None
        """The server that samples are sent to; None while no samples may be sent."""
        self._version = -1
        self._running: set[_ServerSample] = set()
        self._idle = anyio.Event()
        self._news = anyio.Event()
        self._fresh: dict[_ServerSample, None] = {}
        """Samples with something to emit, in the order of their first such news."""
        self._refusals: list[Chunk] = []
        self._stream_numbers = count()
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._seen = SeenTexts()
        self.block = 128
        """Most tokens of a block of the server's prefix cache."""
        self.generated = 0
        self.lost_tokens: int | None = None
        """Prompt tokens computed again after the prefix cache lost them; None until it has had any."""

    @property
    def running(self) -> int:
        """Number of samples in streams."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of samples that are not in streams."""
        return self._intake.waiting

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one sample was in a stream."""
        return self._busy_s + (clock.now() - self._busy_since if self._running else 0.0)

    @property
    def expecting(self) -> bool:
        """The queue expects the server to send something."""
        return bool(self._running) and self._sending_to is not None

    @property
    def _sending_to(self) -> Server | None:
        server = self._server
        return server if server is not None and not server.broken and self._emit is not None else None

    # ---------------------------------------------------------------------- calls from the engine

    def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """Start to emit chunks."""
        self._emit, self._tasks = emit, tasks
        tasks.start_soon(self._flush, name="chunks")

    def stop(self) -> None:
        """Stop: emit no more chunks and send no more samples."""
        self._emit = self._server = None

    def learn(self, vocabulary: int | None, ends: frozenset[int], image_token: int | None) -> None:
        """Set the size of the vocabulary (None keeps it), the answers' end tokens, and the image token."""
        self._image_token = image_token
        self._intake.vocabulary = vocabulary or self._intake.vocabulary
        self._intake.eos = ends

    def take(self, request: GenerateRequest, files: Sequence[bytes] = ()) -> None:
        """See `VisionEngine.generate`."""
        try:
            if fault := self._streams.unfit(request.sampling):
                raise RequestError(fault)
            images = self.images(request.prompt_ids.numpy(), files, request.images)
            samples = self._intake.accept(request)
        except RequestError as error:
            self._refusals += final_chunks(request, "error", str(error))
            self._news.set()
            return
        for sample in samples:
            sample.images = images
            if finish := sample.finish_on_arrival:
                self._end(sample, finish)
        self._admit()

    def images(
        self, prompt: NDArray[np.int32], files: Sequence[bytes], digests: Sequence[str]
    ) -> RequestImages | None:
        """Return a prompt's images, or None. Raise RequestError unless there is one token run for each."""
        token = self._image_token
        if token is None and files:
            raise RequestError(
                "the request has images, and the model reads none that is known here; with "
                "inference.urls its config.json must be on this machine"
            )
        if token is None:
            return None
        if (runs := image_runs(prompt, token)) != len(files):
            raise RequestError(
                f"a prompt has {runs} runs of image tokens (id {token}) and {len(files)} images; a server"
                " needs one run for each image, with other tokens between them"
            )
        return RequestImages(token, files, digests) if files else None

    def abort(self, request: str) -> None:
        """See `InferenceEngine.abort`."""
        for sample in self._intake.samples(request):
            self._end_and_cancel(sample, "abort")

    def expire(self) -> None:
        """End the samples whose deadline has passed."""
        for request in self._intake.late():
            for sample in self._intake.samples(request.id):
                self._end_and_cancel(sample, "error", request.late)

    def send_to(self, server: Server, version: int) -> None:
        """Send the next samples to a server, which serves this version."""
        self._server, self._version = server, version
        self._seen.clear()
        self._intake.serve(version)
        self._admit()

    def hold(self) -> None:
        """Send no more samples until the next `send_to`. Running streams continue."""
        self._server = None

    async def drain(self, server: Server) -> None:
        """End every stream at a server. It may not know a new stream yet, so the abort is repeated. Raise
        ServerLost if some streams do not end in time."""
        deadline = clock.now() + _DRAIN_S
        while self._running:
            if clock.now() > deadline:
                raise ServerLost(f"{len(self._running)} streams did not end within {_DRAIN_S:g} s")
            await self._streams.abort_streams(
                server, [sample.stream_id for sample in self._running if sample.stream_id]
            )
            with anyio.move_on_after(_LOOK_EVERY_S):
                await self._idle.wait()

    async def leave(self) -> None:
        """Cancel every stream of a lost server; its keys and values are lost, so samples' salts are reset."""
        for sample in self._running:
            if sample.scope is not None:
                sample.scope.cancel()
        if self._running:
            await self._idle.wait()
        for sample in self._intake:
            sample.salt = ""

    # -------------------------------------------------------------------------------- streams

    def _admit(self) -> None:
        while (
            (server := self._sending_to) is not None
            and self._intake.ready
            and len(self._running) < self._slots
        ):
            sample = self._intake.pop()
            if not self._running:
                self._busy_since, self._idle = clock.now(), anyio.Event()
                server.last_data_at = self._busy_since
            self._running.add(sample)
            sample.version = self._version
            if len(sample.answer) == len(sample.begun) or not sample.salt:
                sample.salt = f"v{self._version}"
            sample.scope = anyio.CancelScope()
            sample.stream_id = f"{next(self._stream_numbers):016d}"
            assert self._tasks is not None, "start comes first"
            self._tasks.start_soon(self._decode, server, sample)

    async def _decode(self, server: Server, sample: _ServerSample) -> None:
        """Run one stream from its request to its end. An unfinished sample then waits again."""
        assert sample.scope is not None
        ended, start_length = False, len(sample.answer)
        try:
            with sample.scope:
                ended = await self._receive(server, sample)
        except RequestError as error:
            ended = True  # the sample was never sent to the server
            self._end(sample, "error", str(error))
        except ServerRefused as error:
            ended = True
            if error.status < 500:
                self._end(sample, "error", str(error))
            else:
                server.distrust(str(error))
        except ServerLost as error:
            server.distrust(str(error))
        if not ended and not server.broken:
            await self._abort_at(server, sample.stream_id)
        if len(sample.answer) > start_length and self._can_be_found(sample):
            self._seen.add(_keys([*sample.prompt.tolist(), *sample.answer]))
        self._running.remove(sample)
        if not self._running:
            self._busy_s += clock.now() - self._busy_since
            self._idle.set()
        sample.scope = None
        if not sample.ended:
            self._intake.put_back(sample)
        self._admit()

    async def _abort_at(self, server: Server, id: str) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._streams.abort_streams(server, [id])
            except (ServerLost, ServerRefused) as error:
                server.distrust(str(error))

    async def _receive(self, server: Server, sample: _ServerSample) -> bool:
        """Receive chunks until the stream or its sample ends; False if the server still runs the stream."""
        sampling, start_length = sample.request.sampling, len(sample.answer)
        tokens = [*sample.prompt.tolist(), *sample.answer]
        ask = Ask(
            id=sample.stream_id,
            text=await sample.images.text(tokens) if sample.images else ServerText(tokens, tokens),
            max_tokens=sampling.max_tokens - start_length,
            seed=_seed(sample.seed, start_length),
            sampling=sampling,
            salt=sample.salt,
        )
        stops = await self._stop_strings(sampling)
        if stops is not None and sample.answer and stops.end(sample.answer):
            self._end(sample, "stop")  # its answer was already complete
            return True
        ended = False
        num_seen = self._seen.shared(_keys(tokens)) if self._can_be_found(sample) else 0
        async with aclosing(self._streams.stream(server, ask)) as pieces:
            async for piece in pieces:
                ended = ended or bool(piece.finish)
                if not sample.ended:  # a cancelled stream may still yield what it had received
                    self._take(sample, piece, stops)
                if len(sample.answer) > start_length and piece.cached_tokens is not None:
                    self._note_cached(piece.cached_tokens, num_seen)
                if sample.ended and not ended:
                    return False
        if not ended:
            raise ServerLost("a stream ended without a finish")
        return True

    def _can_be_found(self, sample: _ServerSample) -> bool:
        """Return whether tokens identify the text in the server's cache: they do not tell images apart."""
        return sample.images is None and sample.salt == f"v{self._version}"

    def _note_cached(self, cached: int, seen: int) -> None:
        """Count the lost tokens: those of a prompt's first `seen` that the cache of whole blocks lacks."""
        if cached and self.lost_tokens is None:
            self.lost_tokens = 0
        if self.lost_tokens is not None and cached + self.block < seen:
            self.lost_tokens += seen - cached

    def _take(self, sample: _ServerSample, piece: StreamChunk, stops: StopStrings | None) -> None:
        for version in piece.versions:
            if version != str(sample.version):
                raise EngineError(
                    f"the server sampled with version {version!r}, but it should serve version"
                    f" {sample.version}; does another program swap its weights?"
                )
        sampling, wants_kept = sample.request.sampling, sample.request.wants_kept
        if wants_kept and len(piece.kept or ()) != len(piece.tokens):
            raise EngineError("the server does not say from which tokens it drew, as SGLang 0.5.23 does")
        for index, (token, logprob) in enumerate(zip(piece.tokens, piece.logprobs, strict=True)):
            sample.answer.append(token)
            self.generated += 1
            if len(sample.answer) > sample.sent:
                sample.logprobs.append(logprob)
                sample.versions.append(sample.version)
                if wants_kept and piece.kept is not None:
                    sample.kept.append(np.sort(np.array(piece.kept[index], np.int32)))
            # When a request ignores the model's own end tokens, SGLang, it ignores stop tokens too.
            if token in sampling.stop_token_ids or (stops is not None and stops.end(sample.answer)):
                self._end_and_cancel(sample, "stop")
                return
        self._note(sample)
        length, limit = len(sample.answer), sampling.max_tokens
        if piece.finish == "abort":
            # The stream ended for a swap, or because the server had no room. The sample continues later.
            sample.aborts += self._sending_to is not None
            if sample.aborts > _UNASKED_ABORTS:
                error = f"the server aborted the sample {sample.aborts} times without a request"
                self._end(sample, "error", error)
        elif piece.finish == "length" and length < limit:
            error = f"the server cut the answer to {length} of {limit} tokens: it has less room"
            self._end(sample, "error", error)
        elif piece.finish:
            self._end(sample, piece.finish, piece.error)

    async def _stop_strings(self, sampling: Sampling) -> StopStrings | None:
        """Return the detector of a request's stop strings; None if it has no strings. The server cannot
        detect them: it sees only one part of an answer that continues after a swap."""
        if not sampling.stop:
            return None
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await anyio.to_thread.run_sync(stop_tokenizer, self._model)
        return StopStrings(sampling.stop, self._tokenizer)

    # -------------------------------------------------------------------------------- chunks

    def _end(self, sample: _ServerSample, finish: Finish, error: str = "") -> None:
        if sample.ended:
            return
        sample.finish, sample.error = finish, error
        self._intake.close(sample)
        self._note(sample)

    def _end_and_cancel(self, sample: _ServerSample, finish: Finish, error: str = "") -> None:
        self._end(sample, finish, error)
        if sample.scope is not None:
            sample.scope.cancel()

    def _note(self, sample: _ServerSample) -> None:
        self._fresh[sample] = None
        self._news.set()

    async def _flush(self) -> None:
        """Emit new chunks: at once if nothing was emitted recently, else together a little later."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            fresh, self._fresh = self._fresh, {}
            chunks, self._refusals = self._refusals, []
            chunks += [_chunk(sample) for sample in fresh if sample.logprobs or sample.finish]
            if self._emit is not None and chunks:
                self._emit(chunks)
            await anyio.sleep(_EMIT_EVERY_S)


def _chunk(sample: _ServerSample) -> Chunk:
    num_tokens = len(sample.logprobs)
    tokens = sample.answer[sample.sent : sample.sent + num_tokens]
    chunk = Chunk(
        request=sample.request.id,
        sample=sample.index,
        position=sample.sent,
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(sample.logprobs, np.float32),
        versions=np.array(sample.versions, np.int32),
        finish=sample.finish,
        error=sample.error,
        kept=KeptTokens.of(sample.kept) if sample.request.wants_kept else None,
    )
    sample.kept.clear()
    sample.sent += num_tokens
    sample.logprobs.clear()
    sample.versions.clear()
    return chunk


def _keys(tokens: list[int]) -> tuple[int, ...]:
    return prefix_keys(np.array(tokens, np.int32))


def _seed(seed: int, position: int) -> int:
    """Return the seed of a stream from a position of the answer on. It depends on the position: a later
    stream of the sample must not use the random numbers of earlier tokens again."""
    if position == 0:
        return seed % 2**63
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 2**63
