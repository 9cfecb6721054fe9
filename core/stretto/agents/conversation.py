"""Chats with the policy, kept as the token ids that the policy sampled.

Each prompt extends the ids of the earlier turns. Only text added since the last answer is tokenised; sampled
tokens are never tokenised again. If a chat template changes the history, for example by stripping earlier
reasoning, the ids so far end as a trajectory of their own, and a new one begins with the history as the
template writes it. This is a *split*.

Added text may have images if the policy reads them. In a chat, an image of the history is a part `{"type":
"image", "sha256": ...}` of a message's content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.array import KeptTokens
from stretto.dataset import Message
from stretto.errors import RequestError
from stretto.models.tokenizer import body_of, characters_of, work_on_text
from stretto.models.vision import images_in, place_images
from stretto.workflow import Answer, Images, OnTokens, Score, Session, Trajectory, parts_of_sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.chat.calls import ToolCall
    from stretto.engine import Sampling
    from stretto.tokenizer import Tokenizer

__all__ = ["Conversation", "Generate", "Segment", "conversation_in"]

# (ids of a prompt, sampling parameters, names of its images or None if it can have none) -> one answer.
Generate = Callable[["NDArray[np.int32]", "Sampling", "Sequence[str] | None"], Awaitable[Answer]]
# Tokens, loss mask, logprobs and versions.
_Part = tuple["NDArray[Any]", "NDArray[Any]", "NDArray[Any]", "NDArray[Any]"]


class Conversation:
    """One chat, or one plain text that the policy and others write in turns. Not for concurrent use.

    Args:
        generate: samples one answer.
        sampling: sampling parameters; an argument of `reply` replaces them.
        prompt: chat messages, or plain text without a chat.
        tools: JSON schemas of functions that the chat template shows to the policy.
        limit: maximum number of tokens, prompt included; None: only the engine's limit applies.
        images: the images of the ticket; None if the policy reads no images.
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
        images: Images | None = None,
    ) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._tools = tools
        self._limit = limit
        self._images = images
        self._text_images: list[str] = []
        """The images of a plain text, in order. Images of a chat are parts of its messages."""
        self._segments: list[Segment] = []
        self.history: str | list[Message] = prompt if isinstance(prompt, str) else list(prompt)
        """All messages or text so far. Each answer is an assistant's message, in the form in which the chat
        template takes it back (`stretto.chat.stored`)."""
        self.answers: list[Answer] = []
        self.said = ""
        """The text of the last answer in a chat, without the token that ended it."""
        self._end = ""
        """The token that ended the last answer."""
        self._answered = 0
        """The number of messages up to the last answer."""
        self._prompted = ""
        """The text before the last answer."""
        self._num_malformed = 0

    @property
    def splits(self) -> int:
        """Number of splits (see the module)."""
        return max(0, len(self._segments) - 1)

    def add(self, *turns: str | Message, images: Sequence[bytes] = ()) -> None:
        """Add turns of others before the next answer: to a chat messages, or text as a user's message; to a
        plain text, text.

        Args:
            images: files of the images in these turns, in the order of their places: the string `<image>` in
                a message's text, or a part `{"type": "image"}`; in a plain text, the model's own placeholder.

        Raises:
            TypeError: for a message in a plain text.
            ConfigError: if messages have another number of places than images.
            RequestError: if an image is too large, or the policy reads no images.
        """
        if images and self._images is None:
            raise RequestError("a turn has an image, and the run's model reads no images")
        self.place(turns, self._images.add(images) if self._images is not None else ())

    def place(self, turns: Sequence[str | Message], names: Sequence[str]) -> None:
        """Add turns, as `add` does, with images that the ticket has already."""
        if isinstance(self.history, list):
            messages = [
                {"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns
            ]
            self.history += place_images(messages, names)
            return
        self._text_images += names
        for turn in turns:
            if not isinstance(turn, str):
                raise TypeError(f"expected text in this conversation, found {turn!r}")
            self.history += turn

    async def reply(self, sampling: Sampling | None = None) -> Answer | None:
        """Sample the policy's next answer; None if the limit leaves no room for a token. Raises EngineError
        if no engine can serve the request, and RequestError if the text is too long for the model."""
        sampling = sampling or self._sampling
        segment = await self._current_segment()
        if segment is None:
            return None
        if self._limit is not None:
            room = self._limit - segment.length
            if room < 1:
                return None
            sampling = msgspec.structs.replace(sampling, max_tokens=min(room, sampling.max_tokens))
        ids, self._prompted = segment.prompt(), segment.text
        answer = await self._generate(ids, sampling, None if self._images is None else segment.images())
        text = self._tokenizer.decode(answer.tokens, special=True, after=ids)
        segment.add_answer(answer, text)
        self.answers.append(answer)
        if isinstance(self.history, str):
            self.history += text
        else:
            body, form = self.without_end(text, answer), self._tokenizer.form
            self.said, self._end = form.content_of(body, has_ended=body != text), text[len(body) :]
            self._num_malformed += form.stored.taken != "text" and form.stored.is_malformed(self.said)
            self.history.append(form.stored.message(self.said, answer.opened))
            self._answered = len(self.history)
        return answer

    def store_calls(self, before: str, calls: Sequence[ToolCall]) -> None:
        """Store the last answer of a chat with its tool calls. `before`: its text before the first call."""
        assert isinstance(self.history, list)
        stored, opened = self._tokenizer.form.stored, self.answers[-1].opened
        self.history[self._answered - 1] = stored.message(self.said, opened, before, calls)

    def trajectories(self, score: Score) -> list[Trajectory]:
        """Return one trajectory for each part between splits that has an answer. Each has the conversation's
        score, with the metrics `turns` and `splits`. The last one has the conversation's messages."""
        metrics = {**score.metrics, "turns": float(len(self.answers)), "splits": float(self.splits)}
        if self._num_malformed:
            metrics["malformed_reasoning"] = float(self._num_malformed)
        score = replace(score, metrics=metrics)
        reads_images = self._images is not None
        trajectories = [
            segment.trajectory(score, reads_images=reads_images)
            for segment in self._segments
            if segment.last is not None
        ]
        if trajectories and not isinstance(self.history, str):
            trajectories[-1] = replace(trajectories[-1], messages=list(self.history))
        return parts_of_sample(trajectories)

    def without_end(self, text: str, answer: Answer) -> str:
        """Return the text of an answer without the token that ended it: the template writes the end."""
        body = body_of(answer.tokens, answer.finish, self._tokenizer)
        return text.removesuffix(self._tokenizer.decode(answer.tokens[len(body) :], special=True))

    async def _current_segment(self) -> Segment | None:
        """Return a segment with the whole history: the newest segment, extended, or a new segment after a
        split. None if the limit leaves no room for the text."""
        history = self.history
        text, names = await self._rendered(history)
        segment = self._segments[-1] if self._segments else Segment()
        covered = await self._covered(segment, text)
        if covered is None:
            segment, covered = Segment(), 0
        new, new_names = text[covered:], names[len(segment.images()) :]
        if not self._has_room_for(new, segment):
            return None
        ids = await self._encoded(
            new, new_names, plain=isinstance(history, str), begins=not segment.length, after=text[:covered]
        )
        segment.add_text(ids, text, new_names)
        if segment not in self._segments:
            if self._segments and self._segments[-1].last is None:
                self._segments.pop()  # nothing was sampled in it
            self._segments.append(segment)
        return segment

    async def _covered(self, segment: Segment, text: str) -> int | None:
        """Return the length of the part of a text that a segment's ids already are; None after a split.

        The template may write a turn with other white space than the policy sampled, and calls with other
        JSON. If it writes the turn with its reasoning, as it would while it is the last one, the sampled ids
        stay.
        """
        if text.startswith(segment.text):
            return len(segment.text)
        history, form = self.history, self._tokenizer.form
        if isinstance(history, str) or self._images is not None or not text.startswith(self._prompted):
            return None
        messages = history[: self._answered]
        render = partial(self._tokenizer.render, messages, tools=self._tools, add_generation_prompt=False)
        last = (await work_on_text(render, characters_of(messages))).removesuffix(form.final)
        ends = [end.start() for end in form.ends_of(last) if not last[end.end() :].strip()]
        turn = last[: ends[-1] if ends else None] + self._end
        written = turn[len(self._prompted) :]
        if "tool_calls" in messages[-1]:
            thought = form.stored.split(self.said)
            is_whole = thought is None or thought[0] in written
        else:  # all of it: a template may drop what no form of reasoning names
            is_whole = "".join(self.said.split()) in "".join(written.split())
        return len(turn) if is_whole and segment.last and text.startswith(turn) else None

    async def _rendered(self, history: str | list[Message]) -> tuple[str, Sequence[str]]:
        """Return the history as text, and the names of its images in order."""
        if isinstance(history, str):
            return history, self._text_images
        if self._images is not None:
            return await self._images.render(history, tools=self._tools), images_in(history)
        render = partial(self._tokenizer.render, history, tools=self._tools)
        return await work_on_text(render, characters_of(history)), ()

    async def _encoded(
        self, text: str, names: Sequence[str], *, plain: bool, begins: bool, after: str
    ) -> NDArray[np.int32]:
        if self._images is not None:
            return await self._images.encode(text, names, plain=plain and begins)
        encode = partial(self._tokenizer.encode_text, text, whole=begins, after=after)
        if plain and begins:  # the tokenizer may put a special token in front
            encode = partial(self._tokenizer.encode_prompt, text)
        return await work_on_text(encode, len(text))

    def _has_room_for(self, text: str, segment: Segment) -> bool:
        """Return whether a text may fit after a segment. Only its number of tokens can show that it fits."""
        if self._limit is not None:
            return len(text) <= self._tokenizer.most_characters(self._limit - segment.length)
        most_characters = self._tokenizer.most_characters(None)
        if len(text) > most_characters:
            raise RequestError(
                f"a text of {len(text)} characters; the model reads at most {most_characters}: cut what "
                "tools and environments return"
            )
        return True


def conversation_in(
    session: Session,
    name: str,
    prompt: str | Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    limit: int | None = None,
    on_tokens: OnTokens | None = None,
) -> Conversation:
    """Return a new conversation whose answers a session samples. The row's images are at their places in the
    prompt. `name` is unique in the session."""

    async def generate_one(
        ids: NDArray[np.int32], sampling: Sampling, images: Sequence[str] | None
    ) -> Answer:
        [answer] = await session.generate(
            ids, sampling=sampling, conversation_id=name, on_tokens=on_tokens, images=images
        )
        return answer

    session.begin(name)
    beginning, turns = ("", [prompt]) if isinstance(prompt, str) else ([], prompt)
    sampling, images = session.sampling, session.images
    conversation = Conversation(
        generate_one, session.tokenizer, sampling, beginning, tools=tools, limit=limit, images=images
    )
    conversation.place(turns, images.of_row if images is not None else ())
    return conversation


class Segment:
    """A sequence of ids that begins with the prompt of each of its turns."""

    def __init__(self) -> None:
        self.text = ""
        """The text of the ids, special tokens included."""
        self.length = 0
        self.last: Answer | None = None
        self._parts: list[_Part] = []
        self._kept: list[KeptTokens | None] = []
        self._images: list[Sequence[str]] = []

    def add_text(self, ids: NDArray[np.int32], text: str, images: Sequence[str]) -> None:
        """Add tokens that the policy did not sample, and images; `text` is then the whole segment's text."""
        count = len(ids)
        unsampled = np.zeros(count, np.bool_), np.zeros(count, np.float32), np.full(count, -1, np.int32)
        self._add((ids, *unsampled), text, images, KeptTokens.none(count))

    def add_answer(self, answer: Answer, text: str) -> None:
        """Add the sampled tokens of an answer, whose text is `text`."""
        sampled = np.ones(len(answer.tokens), np.bool_)
        part = answer.tokens, sampled, answer.logprobs, answer.versions
        self._add(part, self.text + text, (), answer.kept)
        self.last = answer

    def prompt(self) -> NDArray[np.int32]:
        """Return all ids so far, (L,)."""
        return np.concatenate([part[0] for part in self._parts])

    def images(self, parts: int | None = None) -> list[str]:
        """Return the names of the images in the first parts, in order; by default, in all parts."""
        return [name for names in self._images[:parts] for name in names]

    def trajectory(self, score: Score, *, reads_images: bool) -> Trajectory:
        """Return the trajectory of the ids up to the last answer."""
        assert self.last is not None
        count = [number for number, part in enumerate(self._parts, 1) if part[1].any()][-1]
        tokens, loss_mask, logprobs, versions = map(np.concatenate, zip(*self._parts[:count], strict=True))
        last, images = self.last, self.images(count) if reads_images else None
        kept = [each for each in self._kept[:count] if each is not None]
        return Trajectory(
            *(tokens, loss_mask, logprobs, versions, score, last.finish, last.engine),
            images=images,
            kept=KeptTokens.concat(kept) if last.kept is not None and len(kept) == count else None,
        )

    def _add(self, part: _Part, text: str, images: Sequence[str], kept: KeptTokens | None) -> None:
        self._parts.append(part)
        self._kept.append(kept)
        self._images.append(images)
        self.length += len(part[0])
        self.text = text
