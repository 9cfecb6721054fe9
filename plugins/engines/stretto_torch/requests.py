"""What the engine knows of a request it has taken, and of each of its samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stretto.engine import GenerateRequest
from stretto.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.serving.stop_strings import StopStrings


UNWANTED = -1
"""Stands in `GenerateRequest.have` for a sample that the asker holds to its end."""

_NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class SampleJob:
    """A request from its arrival until its last sample has ended."""

    request: GenerateRequest
    prompt: NDArray[np.int32]
    deadline: float
    """On the clock of `time.monotonic`."""
    samples: list[SlotSample] = field(default_factory=list["SlotSample"])
    """Those that have not ended."""
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    stops: StopStrings | None = None
    """What recognises the request's stop strings, if it has any."""
    shared: SharedPrompt | None = None
    """The prompt, once it was computed with the weights of now."""

    @property
    def prompt_is_lent(self) -> bool:
        """Whether a running sample has the prompt's keys and values to copy."""
        return self.shared is not None and self.shared.lender.row >= 0


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """A prompt that was computed for one sample of a job, for the others to copy."""

    lender: SlotSample
    """The sample whose slot holds its keys and values, while it is running."""
    logits: Tensor
    """(V,) float32, after the last token of the prompt."""


@dataclass(eq=False, slots=True)
class SlotSample:
    """One answer in the making."""

    job: SampleJob
    index: int
    begun: NDArray[np.int32]
    """Tokens it had when it came, or when it last left its slot to others."""
    sent: int
    """Tokens of the answer that the asker has; grows with what is emitted."""
    place: tuple[float, int] = (0.0, 0)
    """Its place in the waiting line, which it keeps: who has a later one gives way."""
    row: int = -1
    """Its row among the running ones; -1 before and after."""
    pure: bool = True
    """Whether all that its slot holds was computed with the weights of now."""
    ended: bool = False

    @property
    def seed(self) -> int:
        """What its tokens are drawn with."""
        return self.job.request.seeds[self.index]


def open_job(
    request: GenerateRequest,
    arrived: float,
    *,
    vocabulary: int,
    context: int,
    eos: Iterable[int],
    deterministic: bool,
) -> SampleJob:
    """Read a request that arrived at some time of `time.monotonic`.

    Raises:
        RequestError: if it cannot be served by this engine.
    """
    count, longest = len(request.seeds), request.sampling.max_tokens
    prompt = _tokens(request.prompt_ids, vocabulary, "prompt_ids")
    if not count or not len(prompt):
        raise RequestError(f"{len(prompt)} prompt tokens and {count} seeds; each must be at least 1")
    if len(prompt) + longest > context:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens and max_tokens {longest} need {len(prompt) + longest};"
            f" a slot holds {context} (inference.context_length)"
        )
    for name, ids in (
        ("logit_bias", request.sampling.logit_bias),
        ("stop_token_ids", request.sampling.stop_token_ids),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise RequestError(f"{name!r} has tokens outside the vocabulary of {vocabulary}")
    if not all(request.sampling.stop):
        raise RequestError("an empty stop string would end every answer")
    for name, given in (("begun", request.begun), ("have", request.have)):
        if given and len(given) != count:
            raise RequestError(f"{name!r} is for {len(given)} samples, the request has {count}")
    if deterministic and any(len(tokens) for tokens in request.begun):
        raise RequestError("inference.deterministic: an answer is repeated from its seed, never gone on with")
    begun = [_tokens(tokens, vocabulary, "begun") for tokens in request.begun] or [_NOTHING] * count
    if max(map(len, begun)) > longest:
        raise RequestError(f"'begun' has {max(map(len, begun))} tokens, more than max_tokens {longest}")
    ends = {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else eos)}
    job = SampleJob(request, prompt, arrived + request.deadline_s, ends=frozenset(ends))
    have = request.have or (0,) * count
    job.samples = [
        SlotSample(job, i, begun[i], max(have[i], len(begun[i]))) for i in range(count) if have[i] != UNWANTED
    ]
    return job


def _tokens(array: Any, vocabulary: int, name: str) -> NDArray[np.int32]:
    try:
        tokens = array.numpy()
    except ValueError as error:
        raise RequestError(f"{name!r}: {error}") from error
    if not tokens.size:
        return _NOTHING
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"{name!r} is {tokens.dtype} of shape {tokens.shape}; expected integers (P,)")
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise RequestError(f"{name!r} has tokens outside the vocabulary of {vocabulary}")
    return tokens.astype(np.int32)
