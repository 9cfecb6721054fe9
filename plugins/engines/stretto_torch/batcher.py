"""Continuous batching: accept requests, sample tokens, and swap the weights between steps.

Only the engine's compute thread calls this module. No call waits for requests; `inference.py` does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine import Chunk, Finish, GenerateRequest
from stretto.errors import RequestError
from stretto.serving.intake import Intake, final_chunks
from stretto.serving.stop_strings import StopStrings
from stretto.training.device import is_gpu
from stretto_torch.decoder_graphs import GraphDecoder
from stretto_torch.images import PromptImages
from stretto_torch.model import LoadedModel
from stretto_torch.sleep import DeviceMemory
from stretto_torch.slot_sample import SlotSample
from stretto_torch.slots import NO_TOKENS, SampleEnding, SlotOutput, Slots


@dataclass
class Figures:
    """Totals since the start of the engine. The compute thread writes them; any thread may read them."""

    generated_tokens: int = 0
    busy_s: float = 0.0
    preemptions: int = 0
    """Number of times that a sample had to leave its slot because the cache was full."""
    swaps: int = 0
    pause_s: float = 0.0
    pause_max_s: float = 0.0


class Batcher:
    """Serves one model. `tokenizer` is called only for requests with stop strings."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Callable[[], Any],
        *,
        deterministic: bool,
        recompute_on_swap: bool,
    ) -> None:
        self.version = -1
        self.figures = Figures()
        self.model = model
        self._tokenizer = tokenizer
        self._deterministic = deterministic
        self._recompute_on_swap = recompute_on_swap
        image_token = -1 if model.reader is None else model.reader.vision.image_token
        self.slots = Slots(model.decoder, model.shapes, image_token, deterministic=deterministic)
        # With many slots, it saves more time to compute several new prompts together than the slots lose
        # while they are empty for a few steps.
        self._refill_from = max(1, model.shapes.slots // 8) if model.shapes.slots >= 32 else 1
        self.intake = Intake(
            SlotSample, vocabulary=model.decoder.vocabulary, room=model.shapes.context, eos=model.eos
        )
        """All unfinished samples. Call `step` at `intake.next_deadline` even if `busy` is False."""
        self._memory = DeviceMemory([*model.targets.tensors, *model.decoder.cache.layers])
        self._chunks: list[Chunk] = []
        # Time of the end of the last step; None if no sample remained, or a swap or `logprobs` came after it.
        self._decoding_since: float | None = None

    # ------------------------------------------------------------------------ calls that change the work

    def take(self, request: GenerateRequest, arrived: float, images: PromptImages | None = None) -> None:
        """Accept a request that came at `arrived`. Ignore it if a request with this id is unfinished."""
        try:
            if self._deterministic and any(len(tokens) for tokens in request.begun):
                raise RequestError(
                    "inference.deterministic: an engine repeats an answer from its seed, and cannot"
                    " continue one that another engine began"
                )
            self._check_images(request, images)
            samples = self.intake.accept(request, arrived)
        except RequestError as error:
            self._chunks += final_chunks(request, "error", str(error))
            return
        try:
            stops = StopStrings(request.sampling.stop, self._tokenizer()) if request.sampling.stop else None
        except RequestError as error:
            self._end_all(samples, "error", str(error))
            return
        for sample in samples:
            sample.stops, sample.images = stops, images
            is_complete = stops is not None and len(sample.begun) and stops.end(sample.begun)
            finish: Finish = "stop" if is_complete else sample.finish_on_arrival
            if finish:
                self._end(sample, finish)

    def _check_images(self, request: GenerateRequest, images: PromptImages | None) -> None:
        if self.model.reader is None:
            return
        texts = [*request.begun, *([request.prompt_ids] if images is None else [])]
        if any((text.numpy() == self.model.reader.vision.image_token).any() for text in texts):
            raise RequestError("a text has tokens of images, and the request has no image for them")

    def abort(self, request: str) -> None:
        """End the unfinished samples of a request."""
        self._end_all(self.intake.samples(request), "abort")

    def give_up(self) -> list[Chunk]:
        """Return unsent chunks and an `abort` chunk per sample: another engine may finish the samples."""
        return [*self._chunks, *(_chunk(sample, NO_TOKENS, "abort") for sample in self.intake)]

    def swap(self, tensors: Mapping[str, Tensor], version: int) -> float:
        """Use these checked weights from the next token on. Return the duration in seconds."""
        start, self._decoding_since = monotonic(), None
        self._memory.restore()
        self.model.targets.load(tensors)
        self.version = version
        ahead = [sample for sample in self.slots.running if sample.request.min_version > version]
        self._end_all(ahead, "error", f"the weights went back to version {version}")
        self._take_out(self.slots.weights_changed(version, recompute=self._recompute_on_swap))
        self.intake.serve(version)
        if is_gpu(device := self.model.decoder.cache.device):
            torch.get_device_module(device).synchronize()
        pause_s = monotonic() - start
        self.figures.swaps += 1
        self.figures.pause_s += pause_s
        self.figures.pause_max_s = max(self.figures.pause_max_s, pause_s)
        return pause_s

    def sleep(self) -> None:
        """Serve no version, and free the memory of weights and cache, until `swap` gets all tensors."""
        self.version = -1
        self.intake.serve(-1)
        self.model.targets.unpack()
        if isinstance(self.model.decoder, GraphDecoder):
            self.model.decoder.forget()
        self._memory.free()

    # -------------------------------------------------------------------------------- state and steps

    @property
    def busy(self) -> bool:
        """True if samples are running or ready to run."""
        return bool(self.slots.running or self.intake.ready)

    def step(self) -> None:
        """Fill free slots if enough are free, and sample one token for every running sample."""
        start = monotonic()
        busy_since = start if self._decoding_since is None else self._decoding_since
        for request in self.intake.late(start):
            self._end_all(self.intake.samples(request.id), "error", request.late)
        num_tokens = self._refill()
        self._make_room()
        if self.slots.running:
            num_tokens += len(self.slots.running)
            self._take_out(self.slots.step(self.version))
        now = monotonic()
        if num_tokens:
            self.figures.generated_tokens += num_tokens
            self.figures.busy_s += now - busy_since
        self._decoding_since = now if self.slots.running else None

    def logprobs(
        self, sequence: NDArray[np.int32], images: PromptImages | None = None
    ) -> NDArray[np.float32]:
        """Return a text's logprobs (L - 1,) under the current weights, L >= 2."""
        self._decoding_since = None
        context, vocabulary = self.model.shapes.context, self.model.decoder.vocabulary
        if self.version < 0:
            raise RequestError("no weights are served yet")
        if not 2 <= len(sequence) <= context:
            raise RequestError(f"a text of {len(sequence)} tokens; it must have 2 to {context}")
        if not 0 <= sequence.min() <= sequence.max() < vocabulary:
            raise RequestError(f"a text has tokens outside the vocabulary of {vocabulary}")
        tokens = torch.from_numpy(sequence.astype(np.int64)).to(self.model.decoder.cache.device)
        return self.model.decoder.score(tokens, images).cpu().numpy()

    def collect(self) -> list[Chunk]:
        """Return all chunks since the last call."""
        for sample in self.slots.running:
            if self.slots.length(sample) > sample.sent:
                answer = self.slots.answer(sample, sample.sent)
                self._chunks.append(_chunk(sample, answer))
                sample.sent += len(answer.tokens)
        chunks, self._chunks = self._chunks, []
        return chunks

    def _refill(self) -> int:
        free, ready = self.slots.free, self.intake.ready
        if not free or not ready or free < min(self._refill_from, ready):
            return 0
        samples: list[SlotSample] = []
        while len(samples) < free and self.intake.ready:
            if not self.slots.fits([*samples, self.intake.first]):
                break
            samples.append(self.intake.pop())
        if samples:
            self._take_out(self.slots.admit(samples, self.version))
        return len(samples)

    def _make_room(self) -> None:
        """Put samples back into the waiting line if the cache has no room for the next step of all."""
        preempted = self.slots.surplus()
        for sample in preempted:
            answer = self.slots.answer(sample, sample.sent)
            if len(answer.tokens):
                self._chunks.append(_chunk(sample, answer))
            sample.begun = self.slots.answer(sample, 0).tokens
            sample.sent = max(sample.sent, len(sample.begun))
        if preempted:
            self.slots.remove(preempted)
            self.figures.preemptions += len(preempted)
        for sample in preempted:
            self.intake.put_back(sample)

    # ------------------------------------------------------------------------------------ endings

    def _take_out(self, endings: Iterable[SampleEnding]) -> None:
        for ending in endings:
            self._end(ending.sample, ending.finish, ending.error, ending.unsent)

    def _end_all(self, samples: Iterable[SlotSample], finish: Finish, error: str = "") -> None:
        samples = tuple(samples)
        running = [sample for sample in samples if sample.row >= 0]
        unsent = {sample: self.slots.answer(sample, sample.sent) for sample in running}
        if running:
            self.slots.remove(running)
        for sample in samples:
            self._end(sample, finish, error, unsent.get(sample, NO_TOKENS))

    def _end(
        self, sample: SlotSample, finish: Finish, error: str = "", unsent: SlotOutput = NO_TOKENS
    ) -> None:
        self._chunks.append(_chunk(sample, unsent, finish, error))
        self.intake.close(sample)


def _chunk(sample: SlotSample, answer: SlotOutput, finish: Finish = "", error: str = "") -> Chunk:
    return Chunk(
        request=sample.request.id,
        sample=sample.index,
        position=sample.sent,
        tokens=answer.tokens,
        logprobs=answer.logprobs,
        versions=answer.versions,
        finish=finish,
        error=error,
        kept=answer.kept,
    )
