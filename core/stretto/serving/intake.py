"""The intake of an inference engine: which requests it accepts, and in which order their samples start.

`Intake` checks a request, ignores a request that it already has, keeps waiting samples in order of arrival,
holds back samples that need newer weights, and finds requests that are late.

    intake = Intake(MySample, vocabulary=32000, room=4096)
    for sample in intake.accept(request):   # raises RequestError: answer with `final_chunks`
        ...
    while intake.ready and there_is_a_slot:
        start(intake.pop())
    intake.close(sample)                    # after its last chunk

Not thread-safe: the engine calls it from one thread. Others may read `waiting`.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.engine import Chunk, Finish, GenerateRequest
from stretto.errors import RequestError
from stretto.machine import clock

__all__ = ["Intake", "OpenRequest", "OpenSample", "final_chunks"]

_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)


@dataclass(frozen=True, eq=False, slots=True)
class OpenRequest:
    """An accepted request that has samples which have not ended."""

    request: GenerateRequest
    prompt: NDArray[np.int32]
    """(P,), P >= 1."""
    ends: frozenset[int]
    deadline: float
    """Time by `clock.now` at which its samples must have ended."""

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.request.id

    @property
    def late(self) -> str:
        """The error of a sample that did not end before the deadline."""
        return f"not finished within {self.request.deadline_s:g} s"


@dataclass(eq=False)
class OpenSample:
    """One answer that has not ended. An engine adds its own state in a subclass, in fields with defaults."""

    source: OpenRequest
    index: int
    begun: NDArray[np.int32]
    """(B,), answer tokens that the sample had on arrival, or when it last left its slot."""
    sent: int
    """Number of answer tokens that the client has. The engine raises it with every chunk."""
    place: int
    """Place in the waiting line: the order of arrival. A sample that waits again keeps it."""
    waiting: bool = True
    ended: bool = False

    @property
    def request(self) -> GenerateRequest:
        """The request as it arrived."""
        return self.source.request

    @property
    def prompt(self) -> NDArray[np.int32]:
        """(P,), the tokens of the prompt."""
        return self.source.prompt

    @property
    def seed(self) -> int:
        """The seed with which the sample's tokens are drawn."""
        return self.request.seeds[self.index]

    @property
    def finish_on_arrival(self) -> Finish:
        """The finish of an answer that was complete on arrival; else empty. Stop strings are not checked."""
        if len(self.begun) and int(self.begun[-1]) in self.source.ends:
            return "stop"
        return "length" if len(self.begun) == self.request.sampling.max_tokens else ""


Sample = TypeVar("Sample", bound=OpenSample)


class Intake(Generic[Sample]):
    """The open requests of one engine, and the line of the samples that wait.

    Args:
        sample: class of the engine's samples, a subclass of `OpenSample`.
        vocabulary: number of tokens in the model's vocabulary. It may be set again later.
        room: largest number of tokens of a sample, prompt and answer together.
        eos: tokens with which the model ends its answers. They may be set again later.
    """

    def __init__(
        self,
        sample: Callable[[OpenRequest, int, NDArray[np.int32], int, int], Sample],
        *,
        vocabulary: int,
        room: int,
        eos: Collection[int] = (),
    ) -> None:
        self.vocabulary = vocabulary
        self.eos = frozenset(eos)
        self._sample = sample
        self._room = room
        self._version = -1
        self._places = count()
        self._requests: dict[str, tuple[OpenRequest, list[Sample]]] = {}
        self._ready: list[tuple[int, Sample]] = []
        self._too_new: list[Sample] = []
        self.waiting = 0
        """Number of samples in the line, including those that need newer weights."""
        self.next_deadline = inf
        """The earliest time by `clock.now` at which `late` may return requests."""

    def accept(self, request: GenerateRequest, arrived: float | None = None) -> list[Sample]:
        """Put the samples of a request into the waiting line, and return them. Samples that the client
        already has are left out. A request that is already open has no new samples.

        Args:
            arrived: time of its arrival by `clock.now`; default: now.

        Raises:
            RequestError: if no engine with this model can serve the request.
        """
        if request.id in self._requests:
            return []
        source = OpenRequest(
            request=request,
            prompt=self._check_prompt(request),
            ends=frozenset(request.sampling.stop_token_ids)
            | (frozenset() if request.sampling.ignore_eos else self.eos),
            deadline=(clock.now() if arrived is None else arrived) + request.deadline_s,
        )
        begun, have = self._check_progress(request)
        samples = [
            self._sample(source, index, begun[index], max(have[index], len(begun[index])), next(self._places))
            for index in range(len(request.seeds))
            if have[index] >= 0
        ]
        if samples:
            self._requests[request.id] = source, samples
            self.next_deadline = min(self.next_deadline, source.deadline)
        for sample in samples:
            self._queue(sample)
        self.waiting += len(samples)
        return samples.copy()

    def samples(self, request: str) -> list[Sample]:
        """Return the samples of a request that have not ended; none if the request is not open."""
        return self._requests[request][1].copy() if request in self._requests else []

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over all samples that have not ended, also those that have left the line."""
        return iter([sample for _, samples in self._requests.values() for sample in samples])

    def late(self, now: float | None = None) -> list[OpenRequest]:
        """Return the requests that are late at `now`; the engine ends them with `OpenRequest.late`."""
        now = clock.now() if now is None else now
        if now < self.next_deadline:
            return []
        requests = [request for request, _ in self._requests.values()]
        self.next_deadline = min(
            (open_request.deadline for open_request in requests if open_request.deadline > now), default=inf
        )
        return [open_request for open_request in requests if open_request.deadline <= now]

    def close(self, sample: Sample) -> None:
        """Forget a sample that has ended, wherever it is. A closed sample stays closed."""
        if sample.ended:
            return
        sample.ended = True
        self.waiting -= sample.waiting
        sample.waiting = False
        _, samples = self._requests[sample.request.id]
        samples.remove(sample)
        if not samples:
            del self._requests[sample.request.id]

    @property
    def ready(self) -> int:
        """Number of samples that could start now. It may count ended samples, but is 0 without others."""
        while self._ready and self._ready[0][1].ended:
            heappop(self._ready)
        return len(self._ready)

    @property
    def first(self) -> Sample:
        """The sample that starts next. Read it only if `ready` is not 0."""
        return self._ready[0][1]

    def pop(self) -> Sample:
        """Remove the sample that starts next from the line, and return it. Call only if `ready` is not 0."""
        sample = heappop(self._ready)[1]
        sample.waiting = False
        self.waiting -= 1
        return sample

    def put_back(self, sample: Sample) -> None:
        """Put a sample back into the line, at the place that it had."""
        sample.waiting = True
        self.waiting += 1
        self._queue(sample)

    def serve(self, version: int) -> None:
        """Set the served policy version. Samples that need a newer version wait without blocking others."""
        self._version = version
        samples = [sample for _, sample in self._ready] + self._too_new
        self._ready, self._too_new = [], []
        for sample in samples:
            if not sample.ended:
                self._queue(sample)

    def _queue(self, sample: Sample) -> None:
        if max(sample.request.min_version, 0) <= self._version:
            heappush(self._ready, (sample.place, sample))
        else:
            self._too_new.append(sample)

    def _check_prompt(self, request: GenerateRequest) -> NDArray[np.int32]:
        sampling, count = request.sampling, len(request.seeds)
        prompt = self._check_tokens(request.prompt_ids, "prompt_ids")
        if not count or not len(prompt):
            raise RequestError(f"{len(prompt)} prompt tokens and {count} seeds; each must be at least 1")
        if len(prompt) + sampling.max_tokens > self._room:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} need"
                f" {len(prompt) + sampling.max_tokens}; a sample can have {self._room}"
                " (inference.context_length)"
            )
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                raise RequestError(f"{name!r} has tokens outside the vocabulary of {self.vocabulary}")
        if not all(sampling.stop):
            raise RequestError("an empty stop string would end every answer")
        return prompt

    def _check_progress(self, request: GenerateRequest) -> tuple[list[NDArray[np.int32]], tuple[int, ...]]:
        count, longest = len(request.seeds), request.sampling.max_tokens
        for name, values in (("begun", request.begun), ("have", request.have)):
            if values and len(values) != count:
                raise RequestError(f"{name!r} is for {len(values)} samples, the request has {count}")
        begun = [self._check_tokens(tokens, "begun") for tokens in request.begun] or [_NO_TOKENS] * count
        if max(map(len, begun)) > longest:
            raise RequestError(f"'begun' has {max(map(len, begun))} tokens, more than max_tokens {longest}")
        return begun, request.have or (0,) * count

    def _check_tokens(self, array: Array, name: str) -> NDArray[np.int32]:
        tokens = array.numpy()
        if not tokens.size:
            return _NO_TOKENS
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError(f"{name!r} is {tokens.dtype} of shape {tokens.shape}; expected integers (P,)")
        if not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise RequestError(f"{name!r} has tokens outside the vocabulary of {self.vocabulary}")
        return tokens.astype(np.int32)


def final_chunks(request: GenerateRequest, finish: Finish, error: str = "") -> list[Chunk]:
    """Return the answer to a request that is not served: a last chunk for every open sample."""
    count = max(1, len(request.seeds))
    positions = request.have if len(request.have) == count else (0,) * count
    return [
        Chunk(request.id, index, position, _NO_TOKENS, _NO_LOGPROBS, _NO_TOKENS, finish, error)
        for index, position in enumerate(positions)
        if position >= 0
    ]
