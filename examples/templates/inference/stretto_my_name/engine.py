"""The engine: which samples run, decode steps in a thread, and swaps of weights between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engine import Chunk, Emit, Finish, GenerateRequest, Load, SwapReport
from stretto.errors import EngineError, RequestError
from stretto.models.digest import digest_of
from stretto.serving.intake import Intake, OpenSample, final_chunks
from stretto.serving.stop_strings import StopStrings, stop_tokenizer
from stretto_my_name.decoder import Decoder

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from stretto import Context, Sampling
    from stretto.weights import WeightUpdate
    from stretto_my_name import MyNameConfig

_EMIT_EVERY_S = 0.02


@dataclass(eq=False)
class _Answer(OpenSample):
    """One answer. The lists begin with the tokens that the sample had on arrival."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    stop: StopStrings | None = None


class MyNameInference:
    """Every step samples one token of every running sample."""

    def __init__(self, config: MyNameConfig, context: Context) -> None:
        self._config = config
        self._source = context.model
        self._intake = Intake(_Answer, vocabulary=0, room=config.context_length)
        self._running: list[_Answer] = []
        self._computing = anyio.Lock()
        self._news = anyio.Event()
        self._emit: Emit | None = None
        self._load = Load(-1, 0, 0, config.slots, 0, 0.0, 0, 0.0, 0.0)

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        """Load the model and start the task that decodes."""
        if self._source is None:
            raise EngineError("the engine my_name needs a model: give `model` in the run file")
        self._decoder = await anyio.to_thread.run_sync(Decoder, self._source, self._config.threads)
        self._intake.eos = frozenset(self._decoder.eos)
        self._intake.vocabulary = self._decoder.vocabulary
        self._emit = emit
        tasks.start_soon(self._decode)

    def generate(self, request: GenerateRequest) -> None:
        """Put the samples into the line, or answer with the reason why that is not possible."""
        try:
            _refuse_unsupported(request.sampling)
            stop = self._stop_strings(request.sampling)
            answers = self._intake.accept(request)
        except RequestError as error:
            self._send(final_chunks(request, "error", str(error)))
            return
        for answer in answers:
            answer.stop = stop
            answer.tokens = answer.begun.tolist()
            answer.logprobs, answer.versions = [0.0] * len(answer.tokens), [0] * len(answer.tokens)
        self._news.set()

    def abort(self, request: str) -> None:
        """End the unfinished samples of a request."""
        self._end(self._intake.samples(request), "abort")

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Load new weights between two steps."""
        async with self._computing:
            begun = time.monotonic()
            version = update.note.version
            hashes = await anyio.to_thread.run_sync(self._decoder.load, update.tensors(), version)
            if self._config.on_swap == "recompute":
                self._decoder.forget()
            pause_s = time.monotonic() - begun
            self._intake.serve(version)
            self._count(
                version=version,
                swaps=self._load.swaps + 1,
                pause_s=self._load.pause_s + pause_s,
                pause_max_s=max(self._load.pause_max_s, pause_s),
            )
        self._news.set()
        return SwapReport(version, digest_of(hashes.items()), pause_s, hashes)

    async def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return the logprobs of all tokens but the first of each sequence."""
        async with self._computing:
            return [
                await anyio.to_thread.run_sync(self._decoder.logprobs, sequence) for sequence in sequences
            ]

    def load(self) -> Load:
        """Return the current figures."""
        self._count(running=len(self._running), waiting=self._intake.waiting)
        return self._load

    async def stop(self) -> None:
        """Emit nothing from now on. The memory of the model is freed with the process."""
        self._emit = None

    # ------------------------------------------------------------------------- on the event loop

    async def _decode(self) -> None:
        """Decode step after step; wait where there is nothing to do."""
        emitted_at = time.monotonic()
        while True:
            for late in self._intake.late():
                self._end(self._intake.samples(late.id), "error", late.late)
            self._fill_slots()
            if not self._running:
                await self._wait()
                continue
            async with self._computing:
                begun = time.monotonic()
                running = [answer for answer in self._running if not answer.ended]
                version = self._load.version
                texts = {answer.place: [*answer.prompt.tolist(), *answer.tokens] for answer in running}
                logits = await anyio.to_thread.run_sync(self._decoder.step, texts)
            self._count(busy_s=self._load.busy_s + time.monotonic() - begun)
            ended = [
                self._append(answer, *_draw(logits[answer.place], answer), version)
                for answer in running
                if not answer.ended  # it may have been aborted during the step
            ]
            if any(ended) or time.monotonic() - emitted_at >= _EMIT_EVERY_S:
                emitted_at = time.monotonic()
                self._send([self._new_tokens(answer) for answer in self._running if self._is_news(answer)])

    def _fill_slots(self) -> None:
        while self._intake.ready and len(self._running) < self._config.slots:
            answer = self._intake.pop()
            if finish := answer.finish_on_arrival:
                self._end([answer], finish)
            else:
                self._running.append(answer)

    async def _wait(self) -> None:
        """Wait for a request, a swap or the next deadline."""
        self._news = anyio.Event()
        with anyio.move_on_after(max(0.0, self._intake.next_deadline - time.monotonic())):
            await self._news.wait()

    def _append(self, answer: _Answer, token: int, logprob: float, version: int) -> bool:
        """Add a sampled token, and return whether it ended the answer."""
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        answer.versions.append(version)
        self._count(generated_tokens=self._load.generated_tokens + 1)
        if token in answer.source.ends or (answer.stop is not None and answer.stop.end(answer.tokens)):
            self._end([answer], "stop")
        elif len(answer.tokens) == answer.request.sampling.max_tokens:
            self._end([answer], "length")
        return answer.ended

    def _is_news(self, answer: _Answer) -> bool:
        return len(answer.tokens) > answer.sent

    def _new_tokens(self, answer: _Answer, finish: Finish = "", error: str = "") -> Chunk:
        """Return the chunk of the tokens that the client does not have."""
        start, answer.sent = answer.sent, max(answer.sent, len(answer.tokens))
        return Chunk(
            request=answer.request.id,
            sample=answer.index,
            position=start,
            tokens=np.array(answer.tokens[start:], np.int32),
            logprobs=np.array(answer.logprobs[start:], np.float32),
            versions=np.array(answer.versions[start:], np.int32),
            finish=finish,
            error=error,
        )

    def _end(self, answers: Sequence[_Answer], finish: Finish, error: str = "") -> None:
        self._send([self._new_tokens(answer, finish, error) for answer in answers])
        for answer in answers:
            self._intake.close(answer)
        self._running = [answer for answer in self._running if not answer.ended]

    def _send(self, chunks: list[Chunk]) -> None:
        if self._emit is not None and chunks:
            self._emit(chunks)

    def _count(self, **figures: Any) -> None:
        self._load = Load(**{name: getattr(self._load, name) for name in Load.__struct_fields__} | figures)

    def _stop_strings(self, sampling: Sampling) -> StopStrings | None:
        if not sampling.stop:
            return None
        return StopStrings(sampling.stop, stop_tokenizer(str(self._source)))


def _draw(logits: torch.Tensor, answer: _Answer) -> tuple[int, float]:
    """Draw a token with the number that belongs to the sample's seed and the token's position."""
    temperature = answer.request.sampling.temperature
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = int(logprobs.argmax())
    else:
        bits = np.random.Philox(key=answer.seed % 2**64, counter=len(answer.tokens))
        threshold = np.random.Generator(bits).random()
        cumulative = logprobs.exp().cumsum(0)
        token = int(torch.searchsorted(cumulative, threshold * float(cumulative[-1]), right=True))
    return token, float(logprobs[token])


def _refuse_unsupported(sampling: Sampling) -> None:
    asked = {
        "top_p": sampling.top_p < 1,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0,
        "logit_bias": bool(sampling.logit_bias),
    }
    if names := [name for name, is_set in asked.items() if is_set]:
        raise RequestError(f"the engine my_name does not support {', '.join(names)}")
