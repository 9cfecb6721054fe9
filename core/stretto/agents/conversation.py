"""Chats with the policy, kept as the token ids that were really sampled.

The prompt of each turn extends the ids of the turns before: only what is new since the last answer is turned
into tokens, and nothing that was sampled is tokenised again. Where a chat template writes the history
otherwise than it was sampled (it strips earlier reasoning, say), the ids so far end as a trajectory of their
own and a new one begins with the history as the template has it: a *split*, which is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.workflow import Answer, Score, Trajectory, parts_of_sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.engine import Sampling
    from stretto.models.tokenizer import Message, Tokenizer

__all__ = ["Conversation", "Generate"]

# The ids of a prompt and how to sample -> one answer.
Generate = Callable[["NDArray[np.int32]", "Sampling"], Awaitable[Answer]]
# Tokens, loss mask, logprobs and versions.
_Part = tuple["NDArray[Any]", "NDArray[Any]", "NDArray[Any]", "NDArray[Any]"]


class Conversation:
    """One chat, or one text that the policy and somebody else write in turn. Not for concurrent use.

    Args:
        generate: samples one answer.
        tokenizer: the policy's.
        sampling: how tokens are drawn, unless `reply` is told otherwise.
        prompt: chat messages, or plain text where there is no chat.
        tools: JSON schemas of functions that the chat template shows the policy.
        limit: most tokens of the whole, prompt included; None for no limit but the engine's.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: Tokenizer,
        sampling: Sampling,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        limit: int | None = None,
    ) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._tools = tools
        self._limit = limit
        self._segments: list[_Segment] = []
        self.history: str | list[Message] = prompt if isinstance(prompt, str) else list(prompt)
        """All that was said. Each answer is an assistant's message with the text as it was sampled."""
        self.answers: list[Answer] = []
        """The policy's, in order."""

    @property
    def splits(self) -> int:
        """How often the template rewrote what was sampled."""
        return max(0, len(self._segments) - 1)

    def add(self, *turns: str | Message) -> None:
        """What others say before the next answer: messages; in a plain text, text.

        Raises:
            TypeError: for the one where the other is expected.
        """
        for turn in turns:
            if isinstance(self.history, str) and isinstance(turn, str):
                self.history += turn
            elif isinstance(self.history, list) and not isinstance(turn, str):
                self.history.append(turn)
            else:
                expected = "text" if isinstance(self.history, str) else "a chat message"
                raise TypeError(f"expected {expected} in this conversation, found {turn!r}")

    async def reply(self, sampling: Sampling | None = None) -> Answer | None:
        """Have the policy speak; None if the limit leaves no room for a token.

        Raises:
            EngineError: if no engine can serve it.
        """
        sampling = sampling or self._sampling
        segment = self._opened()
        if self._limit is not None:
            room = self._limit - segment.length
            if room < 1:
                return None
            sampling = msgspec.structs.replace(sampling, max_tokens=min(room, sampling.max_tokens))
        ids = segment.prompt()
        answer = await self._generate(ids, sampling)
        text = self._read(ids, answer)
        segment.answered(answer, text)
        self.answers.append(answer)
        if isinstance(self.history, str):
            self.history += text
        else:
            content = text.removesuffix(self._tokenizer.end) if answer.finish == "stop" else text
            self.history.append({"role": "assistant", "content": content})
        return answer

    def trajectories(self, score: Score) -> list[Trajectory]:
        """What was sampled, one trajectory unless there were splits; each has the score of the whole, to
        whose metrics `turns` and `splits` are added. Empty if nothing was."""
        metrics = {**score.metrics, "turns": float(len(self.answers)), "splits": float(self.splits)}
        score = replace(score, metrics=metrics)
        return parts_of_sample(
            [segment.trajectory(score) for segment in self._segments if segment.last is not None]
        )

    # ------------------------------------------------------------------------------------ private

    def _opened(self) -> _Segment:
        """The newest segment, or a new one, brought up to all that was said."""
        if isinstance(self.history, str):
            text = self.history
        else:
            text = self._tokenizer.render(self.history, tools=self._tools)
        if self._segments and text.startswith(self._segments[-1].text):
            segment = self._segments[-1]
            segment.said(self._tokenizer.encode_text(text[len(segment.text) :]), text)
            return segment
        segment = _Segment()
        # A plain text may begin with a token that the tokenizer puts in front of all.
        begin = (
            self._tokenizer.encode_prompt if isinstance(self.history, str) else self._tokenizer.encode_text
        )
        segment.said(begin(text), text)
        if self._segments and self._segments[-1].last is None:
            self._segments.pop()  # nothing was sampled in it
        self._segments.append(segment)
        return segment

    def _read(self, ids: NDArray[np.int32], answer: Answer) -> str:
        """The answer's text, special tokens included, as it stands after the prompt: some tokenizers drop a
        space before the first token they are given."""
        before = self._tokenizer.decode(ids[-1:], special=True)
        whole = self._tokenizer.decode(np.concatenate([ids[-1:], answer.tokens]), special=True)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode(answer.tokens, special=True)


class _Segment:
    """Ids of which each turn's prompt is a beginning."""

    def __init__(self) -> None:
        self.text = ""
        """What the ids read, special tokens included."""
        self.length = 0
        self.last: Answer | None = None
        self._parts: list[_Part] = []

    def said(self, ids: NDArray[np.int32], text: str) -> None:
        """Tokens that the policy did not write; the whole now reads `text`."""
        blank = len(ids)
        nothing = np.zeros(blank, np.bool_), np.zeros(blank, np.float32), np.full(blank, -1, np.int32)
        self._add((ids, *nothing), text)

    def answered(self, answer: Answer, text: str) -> None:
        """Tokens of the policy, which read `text`."""
        sampled = np.ones(len(answer.tokens), np.bool_)
        self._add((answer.tokens, sampled, answer.logprobs, answer.versions), self.text + text)
        self.last = answer

    def prompt(self) -> NDArray[np.int32]:
        """(L,) all ids so far."""
        return np.concatenate([part[0] for part in self._parts])

    def trajectory(self, score: Score) -> Trajectory:
        """All up to the last answer."""
        assert self.last is not None
        ends = [number for number, part in enumerate(self._parts, 1) if part[1].any()]
        tokens, loss_mask, logprobs, versions = map(
            np.concatenate, zip(*self._parts[: ends[-1]], strict=True)
        )
        return Trajectory(tokens, loss_mask, logprobs, versions, score, self.last.finish, self.last.engine)

    def _add(self, part: _Part, text: str) -> None:
        self._parts.append(part)
        self.length += len(part[0])
        self.text = text
