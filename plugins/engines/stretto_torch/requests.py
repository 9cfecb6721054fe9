"""The engine's state of a request, and of each sample of the request."""

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
"""Marks in `GenerateRequest.have` a sample that the requester already has completely."""

_NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class SampleJob:
    """A request from its arrival until its last sample has ended."""

    request: GenerateRequest
    prompt: NDArray[np.int32]
    deadline: float
    """On the clock of `time.monotonic`."""
    samples: list[SlotSample] = field(default_factory=list["SlotSample"])
    """The samples that have not ended."""
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    stops: StopStrings | None = None
    """The detector of the request's stop strings, if it has any."""
    shared: SharedPrompt | None = None
    """The prompt, after it was computed with the current weights."""

    @property
    def prompt_is_lent(self) -> bool:
        """Whether a running sample holds the prompt's keys and values, so that others can copy them."""
        return self.shared is not None and self.shared.lender.row >= 0


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """A prompt that was computed for one sample of a job, so that the other samples can copy it."""

    lender: SlotSample
    """The sample whose slot holds the prompt's keys and values, while the sample is running."""
    logits: Tensor
    """(V,) float32, the logits after the last token of the prompt."""


@dataclass(eq=False, slots=True)
class SlotSample:
    """One answer that is being generated."""

    job: SampleJob
    index: int
    begun: NDArray[np.int32]
    """Answer tokens that the sample had on arrival, or when it last had to leave its slot."""
    sent: int
    """Number of answer tokens that the requester has; it grows with every chunk."""
    place: tuple[float, int] = (0.0, 0)
    """Place in the waiting line. The sample keeps it: if the cache is full, samples with later places leave
    their slots first."""
    row: int = -1
    """Row among the running samples; -1 while the sample is not running."""
    pure: bool = True
    """Whether everything in the sample's slot was computed with the current weights."""
    ended: bool = False

    @property
    def seed(self) -> int:
        """The seed with which the sample's tokens are drawn."""
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
    """Check a request and make its job.

    Args:
        arrived: time of its arrival, on the clock of `time.monotonic`.
        vocabulary: number of tokens in the vocabulary.
        context: largest number of tokens of a sample, prompt and answer together.
        eos: the tokens with which the model ends its answers.
        deterministic: answers are repeated from their seeds, so a request must not have begun ones.

    Raises:
        RequestError: if this engine cannot serve the request.
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
