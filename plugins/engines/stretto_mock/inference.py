"""The mock inference engine: it emits random tokens, or a function's answers, at a configured speed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto import Context
from stretto.engine import Chunk, Emit, Finish, GenerateRequest, Load, SwapReport
from stretto.errors import EngineError, RequestError
from stretto.serving.intake import Intake, OpenSample, final_chunks
from stretto.user_code.importable import load_importable
from stretto.weights import WeightUpdate
from stretto_mock import MockInferenceConfig

_TICK_S = 0.01  # protects the event loop from an engine of many tokens per second
_MOST_STEPS = 8  # steps computed at once, or fewer if a sample ends earlier
_EMIT_S = 0.02
"""Time between two messages of an engine that decodes in steps; an idle engine sends at once."""
_REFILL = 8
"""An engine that decodes in steps admits samples when 1 of this many slots is free, like `torch`."""
_NO_LIMIT = 2**31  # without a model, every token is in the vocabulary and every length is possible


@dataclass(eq=False)
class _MockSample(OpenSample):
    """One answer. Its tokens are drawn at the start and emitted as time passes."""

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # the whole answer
    finish: Finish = "stop"
    credit: float = 0.0  # number of tokens decoded by now, with a fraction


async def pass_time(seconds: float) -> None:
    """Let the time of some decode steps pass. A simulation replaces this function."""
    await anyio.sleep(seconds)


class MockInference:
    """Decodes in each slot at `tokens_per_s / slots`, like an engine bound by memory bandwidth."""

    def __init__(self, config: MockInferenceConfig, context: Context) -> None:
        del context
        self._config = config
        self._script = None if config.script is None else load_importable(config.script)
        self._intake = Intake(_MockSample, vocabulary=_NO_LIMIT, room=_NO_LIMIT)
        self._running: list[_MockSample] = []
        self._version = -1
        self._generated = 0
        self._busy_s = 0.0
        self._pauses: list[float] = []
        self._paused = anyio.Lock()
        self._work = anyio.Event()  # set when samples come
        self._emit: Emit | None = None

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        self._emit = emit
        config = self._config
        tasks.start_soon(self._steps if config.step_s or config.sample_s else self._tick)

    async def stop(self) -> None:
        """Do nothing: the engine holds no resources."""

    def generate(self, request: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        """Draw all answers at once; images have no influence."""
        del images
        try:
            samples = self._intake.accept(request)
        except RequestError as error:
            self._send(final_chunks(request, "error", str(error)))
            return
        for sample in samples:
            self._draw(sample)
        self._work.set()

    def abort(self, request: str) -> None:
        """End the unfinished samples of a request."""
        self._end(self._intake.samples(request), "abort", "")

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Sample for `fetch_s` seconds, pause for `swap_s` seconds, then serve the new version."""
        await anyio.sleep(self._config.fetch_s)
        started_at = time.monotonic()
        async with self._paused:
            await anyio.sleep(self._config.swap_s)
            self._version = update.note.version
            self._intake.serve(self._version)
        self._pauses.append(time.monotonic() - started_at if self._config.swap_s else 0.0)
        return SwapReport(self._version, update.note.digest, self._pauses[-1])

    async def sleep(self) -> None:
        """Serve no version until the next swap; there is no memory to free."""
        if self._intake.waiting or self._running:
            raise EngineError("the engine was put to sleep with unfinished requests")
        self._version = -1

    async def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[bytes] = ()
    ) -> list[NDArray[np.float32]]:
        """Raise EngineError: the mock engine has no model."""
        raise EngineError("the mock inference engine has no model")

    def load(self) -> Load:
        """Return the figures so far."""
        return Load(
            version=self._version,
            running=len(self._running),
            waiting=self._intake.waiting,
            slots=self._config.slots,
            generated_tokens=self._generated,
            busy_s=self._busy_s,
            swaps=len(self._pauses),
            pause_s=sum(self._pauses),
            pause_max_s=max(self._pauses, default=0.0),
        )

    def _draw(self, sample: _MockSample) -> None:
        limit = sample.request.sampling.max_tokens
        tokens = (
            self._random_answer(sample, limit + 1) if self._script is None else self._scripted_answer(sample)
        )
        sample.tokens = tokens[:limit]
        sample.finish = "length" if len(tokens) > limit else "stop"
        sample.credit = float(len(sample.begun))

    def _random_answer(self, sample: _MockSample, limit: int) -> NDArray[np.int32]:
        config = self._config
        random = np.random.default_rng(sample.seed)
        if config.lengths:
            length = int(random.choice(config.lengths))
        else:
            scale = random.lognormal(-(config.sigma**2) / 2, config.sigma)
            length = max(1, round(config.mean_tokens * scale))
        return random.integers(config.vocab_size, size=min(length, limit), dtype=np.int32)

    def _scripted_answer(self, sample: _MockSample) -> NDArray[np.int32]:
        assert self._script is not None
        prompt = sample.request.prompt_ids.numpy().astype(np.uint8).tobytes().decode(errors="replace")
        answer = str(self._script(prompt, sample.seed))
        return np.frombuffer(answer.encode(), np.uint8).astype(np.int32)

    async def _tick(self) -> None:
        last_tick = time.monotonic()
        while True:
            if not self._running and not self._intake.waiting:
                self._work = anyio.Event()
                await self._work.wait()
            await anyio.sleep(_TICK_S)
            async with self._paused:
                now = time.monotonic()
                elapsed, last_tick = now - last_tick, now
                if self._running:
                    self._busy_s += elapsed
                    self._send(self._advance(elapsed * self._config.tokens_per_s / self._config.slots))
                self._admit(now)  # after `_advance`, so that no slot stays empty while samples wait

    async def _steps(self) -> None:
        config = self._config
        chunks: list[Chunk] = []
        emitted_at = time.monotonic()
        while True:
            if not self._running and not self._intake.waiting:
                self._work = anyio.Event()
                await self._work.wait()
            async with self._paused:
                free = config.slots - len(self._running)
                if free * _REFILL >= config.slots:
                    self._admit(time.monotonic())
                if not self._running:
                    await anyio.sleep(_TICK_S)
                    continue
                min_left = min(len(sample.tokens) - int(sample.credit) for sample in self._running)
                steps = min(_MOST_STEPS, max(1, min_left))
                seconds = steps * (config.step_s + config.sample_s * len(self._running))
                await pass_time(seconds)
                self._busy_s += seconds
                chunks += self._advance(steps, all_=False)
                is_idle = not self._running and not self._intake.ready
                if is_idle or time.monotonic() - emitted_at >= _EMIT_S:
                    self._send(chunks + self._advance(0))
                    chunks, emitted_at = [], time.monotonic()

    def _admit(self, now: float) -> None:
        for request in self._intake.late(now):
            self._end(self._intake.samples(request.id), "error", request.late)
        while self._intake.ready and len(self._running) < self._config.slots:
            self._running.append(self._intake.pop())

    def _advance(self, tokens: float, *, all_: bool = True) -> list[Chunk]:
        """Add `tokens` tokens to each sample; return chunks of complete samples; with `all_`, of all."""
        chunks: list[Chunk] = []
        for sample in self._running:
            sample.credit = min(sample.credit + tokens, len(sample.tokens))
            num_tokens = int(sample.credit)
            is_complete = num_tokens == len(sample.tokens)
            if is_complete or (all_ and num_tokens > sample.sent):
                chunks.append(self._chunk(sample, num_tokens, sample.finish if is_complete else ""))
            if is_complete:
                self._intake.close(sample)
        self._running = [sample for sample in self._running if not sample.ended]
        return chunks

    def _chunk(self, sample: _MockSample, upto: int, finish: Finish, error: str = "") -> Chunk:
        new = sample.tokens[sample.sent : upto]
        chunk = Chunk(
            request=sample.request.id,
            sample=sample.index,
            position=sample.sent,
            tokens=new,
            logprobs=np.full(len(new), -np.log(self._config.vocab_size), np.float32),
            versions=np.full(len(new), self._version, np.int32),
            finish=finish,
            error=error,
        )
        sample.sent = max(upto, sample.sent)
        self._generated += len(new)
        return chunk

    def _end(self, samples: list[_MockSample], finish: Finish, error: str) -> None:
        self._send([self._chunk(sample, sample.sent, finish, error) for sample in samples])
        for sample in samples:
            self._intake.close(sample)
        self._running = [sample for sample in self._running if not sample.ended]

    def _send(self, chunks: list[Chunk]) -> None:
        assert self._emit is not None, "start comes first"
        if chunks:
            self._emit(chunks)
