"""The record of a ticket that people read: the row, texts, conversations, times."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.tickets import KeptText, Ticket, TicketRecord
from stretto.dataset import Row
from stretto.models.images import with_names
from stretto.models.tokenizer import answer_text
from stretto.tokenizer import Tokenizer
from stretto.workflow import Trajectory

_RECORD_CHARACTERS = 2**23
"""Maximum characters of one record. As UTF-8 they fit into the largest message that the bus sends."""


def record_of(
    ticket: Ticket,
    worker: str,
    row: Row,
    trajectories: Sequence[Trajectory],
    tokenizer: Tokenizer,
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0),
    source: str = "",
) -> TicketRecord:
    """Return an attempt's record, with long texts cut. `seconds`: in total, in generation, in scoring."""
    limit = _RECORD_CHARACTERS // (3 * len(trajectories) + 2)
    prompts = _PromptTexts(tokenizer, limit)
    texts = [_text_of(trajectory, prompts, tokenizer, limit) for trajectory in trajectories]
    return TicketRecord(
        ticket.purpose,
        ticket.id,
        ticket.attempt,
        ticket.row,
        worker,
        _as_json(with_names(row), limit),
        prompts.first if trajectories else _as_text(row.get("prompt", ""))[:limit],
        tuple(texts),
        *seconds,
        source,
        ticket.variant,
    )


class _PromptTexts:
    """The prompts of a group as text. Most groups have only one prompt, the `first`."""

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._first_ids: NDArray[np.int32] | None = None
        self.first = ""

    def text_of(self, ids: NDArray[np.int32]) -> str | None:
        """Return a prompt as text; None for the first prompt."""
        if self._first_ids is not None and np.array_equal(self._first_ids, ids):
            return None
        text = self._tokenizer.decode(ids, special=True)[: self._limit]
        if self._first_ids is not None:
            return text
        self._first_ids, self.first = ids, text
        return None


def _text_of(trajectory: Trajectory, prompts: _PromptTexts, tokenizer: Tokenizer, limit: int) -> KeptText:
    start = int(np.argmax(trajectory.loss_mask))
    return KeptText(
        prompts.text_of(trajectory.tokens[:start]),
        "\n".join(_texts_of_turns(trajectory, start, tokenizer))[:limit],
        _as_json(trajectory.messages, limit) if trajectory.messages else "",
    )


def _texts_of_turns(trajectory: Trajectory, start: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of each turn from `start` on. Turns of the policy and of others alternate."""
    tokens = trajectory.tokens
    boundaries = np.flatnonzero(np.diff(trajectory.loss_mask[start:])) + 1 + start
    for begin, end in pairwise((start, *boundaries, len(tokens))):
        yield answer_text(tokens[:begin], tokens[begin:end], "stop", tokenizer)


def _as_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content", "")) for turn in prompt)


def _as_json(value: Any, limit: int) -> str:
    """Return JSON. Values that JSON does not have become text; a result that is too long, a cut text."""
    try:
        text = msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        # A dataset may have any Python objects, such as keys that are no text, or halves of characters.
        text = msgspec.json.encode(ascii(value)).decode()
    return text if len(text) <= limit else msgspec.json.encode(text[: limit // 2]).decode()
