"""The model calls of one agent, and the trajectories that they become.

An agent calls as it likes: one chat that grows, several at once, a history that it has rewritten. A call that
begins with all an agent has seen of a chat goes on with that chat: its ids are extended by what is new, and
nothing that was sampled is tokenised again (`stretto.agents.conversation`). Any other call, one to a chat
that is being answered included, begins a chat of its own, which becomes a trajectory of its own. All share
the score.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.agents.conversation import Conversation, Generate
from stretto.errors import StrettoError
from stretto.workflow import Answer, OnTokens, Score, Session, Trajectory, parts_of_sample

if TYPE_CHECKING:
    from stretto.engine import Sampling
    from stretto.models.tokenizer import Message

__all__ = ["CallLimits", "CallRecorder", "Input", "OverLimit", "Thread"]

T = TypeVar("T")
Input = str | list[Any] | NDArray[np.int32]
"""What a call gives the policy: text, chat messages, or token ids."""


class OverLimit(StrettoError):
    """A call for which the agent's limits leave no room.

    Args:
        code: `max_calls`, `max_total_tokens`, `context_length_exceeded` or `run_over`.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class CallLimits:
    """What one agent run may use; None for no limit but the run's own."""

    calls: int | None = None
    """Answers; each of several choices counts."""
    tokens: int | None = None
    """Sampled tokens of all calls. Each call may use what is left when it begins, whatever others do."""
    context: int | None = None
    """Tokens of one chat, prompt included."""


class Thread:
    """One chat, text or list of ids: what the agent has seen of it, and what was really sampled."""

    def __init__(
        self, session: Session, name: str, given: Input, tools: Sequence[Mapping[str, Any]], limit: int | None
    ) -> None:
        self.given = given
        """What the agent gave with its last call."""
        self.message: Message | None = None
        """The last answer, as the agent was shown it."""
        self.prompt_tokens = 0
        """Tokens before the last answer."""
        self._tools = tools
        self._free = False
        """Whether a call may go on with it: the agent was shown the last answer."""
        self._session = session
        self._name = name
        self._on_tokens: OnTokens | None = None
        self._seen: str | list[Any] = ""
        """What a call has to begin with to go on here."""
        if isinstance(given, np.ndarray):
            self._talk: Conversation | _Given = _Given(self._generate, given, limit)
        else:
            self._talk = Conversation(
                self._generate, session.tokenizer, session.sampling, given, tools=tools, limit=limit
            )

    @property
    def chat(self) -> list[Message]:
        """What the agent gave with its last call, a prompt as a user's message, and the answer."""
        given, answer = self.given, [] if self.message is None else [self.message]
        if isinstance(given, list):
            return [*given, *answer]
        text = given if isinstance(given, str) else self._session.tokenizer.decode(given, special=True)
        return [{"role": "user", "content": text}, *answer]

    @property
    def length(self) -> int:
        """Messages or characters that a call has to begin with to go on here."""
        return len(self._seen)

    def news_in(self, given: Input, tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """What a call adds to this thread; None if it does not go on with it."""
        seen = self._seen
        if not self._free or tools != self._tools:
            return None
        if isinstance(given, str) and isinstance(seen, str):
            new = given.removeprefix(seen)
            return [new] if 0 < len(new) < len(given) else None
        if isinstance(given, list) and isinstance(seen, list) and given[: len(seen)] == seen:
            return given[len(seen) :] or None
        return None

    def go_on(self, given: Input, news: Sequence[Any]) -> None:
        """Take what a call adds; it now waits for an answer."""
        assert isinstance(self._talk, Conversation)
        self._talk.add(*news)
        self.given, self._free = given, False

    async def reply(self, sampling: Sampling, on_tokens: OnTokens | None) -> Answer | None:
        """The policy's answer; None if the thread's limit leaves no room for a token."""
        self._on_tokens = on_tokens
        before = len(self._text)
        answer = await self._talk.reply(sampling)
        if answer is not None and isinstance(self.given, str):
            # Agents that write prompts put a stop text back, but know nothing of the token that ends a turn.
            new = self._text[before:]
            end = self._session.tokenizer.end
            self._seen = self.given + (new.removesuffix(end) if answer.finish == "stop" else new)
        return answer

    def shown(self, message: Message, *, remembered: Message | None = None) -> None:
        """The agent gets the last answer in this form; a call with it, after all before it, goes on here.

        Args:
            remembered: what the chat template is given of the answer, where it refuses the text as it is.
        """
        self.message = message
        if isinstance(self._talk, _Given):
            return
        if isinstance(self.given, list):
            self._seen = [*self.given, message]
        if remembered is not None and isinstance(self._talk.history, list):
            self._talk.history[-1] = remembered
        self._free = True

    def trajectories(self, score: Score) -> list[Trajectory]:
        """What was sampled."""
        return self._talk.trajectories(score)

    @property
    def _text(self) -> str:
        """All that was written of a plain text."""
        return (
            self._talk.history
            if isinstance(self._talk, Conversation) and isinstance(self._talk.history, str)
            else ""
        )

    async def _generate(self, ids: NDArray[np.int32], sampling: Sampling) -> Answer:
        self.prompt_tokens = len(ids)
        [answer] = await self._session.generate(
            ids, sampling=sampling, conversation_id=self._name, on_tokens=self._on_tokens
        )
        return answer


class _Given:
    """One answer to given token ids, which no other call goes on with."""

    def __init__(self, generate: Generate, ids: NDArray[np.int32], limit: int | None) -> None:
        self._generate = generate
        self._ids = ids
        self._limit = limit
        self._answer: Answer | None = None

    async def reply(self, sampling: Sampling) -> Answer | None:
        room = sampling.max_tokens if self._limit is None else self._limit - len(self._ids)
        if room < 1:
            return None
        sampling = msgspec.structs.replace(sampling, max_tokens=min(room, sampling.max_tokens))
        self._answer = await self._generate(self._ids, sampling)
        return self._answer

    def trajectories(self, score: Score) -> list[Trajectory]:
        score = replace(score, metrics={**score.metrics, "turns": 1.0, "splits": 0.0})
        return [] if self._answer is None else [Trajectory.of(self._ids, self._answer, score)]


class CallRecorder:
    """One run of an agent: its threads, what it has used, and its calls under way.

    Args:
        session: the ticket's.
        name: letters and digits, different for every recorder of a session. Seeds depend on it.
        limits: what it may use.
    """

    def __init__(self, session: Session, name: str, limits: CallLimits | None = None) -> None:
        self.session = session
        self.limits = limits or CallLimits()
        self.calls = 0
        """Answers asked for so far."""
        self.tokens = 0
        """Tokens sampled so far."""
        self.over = ""
        """Which limit refused a call, the first time one did."""
        self.fault: Exception | None = None
        """What kept a call from being answered, the first time something did."""
        self.last: Thread | None = None
        """The thread that was answered last."""
        self._name = name
        self._threads: list[Thread] = []
        self._under_way: set[anyio.CancelScope] = set()
        self._ended = anyio.Event()
        self._closed = False

    def take(self, given: Sequence[Input], tools: Sequence[Mapping[str, Any]] = ()) -> list[Thread]:
        """The threads on which the choices of a call are to be answered, one for each input.

        Args:
            given: texts, lists of chat messages, or arrays of token ids.
            tools: JSON schemas of functions for the chat template to show.

        Raises:
            OverLimit: if the agent has used up its calls or its tokens.
        """
        limits = self.limits
        if limits.calls is not None and self.calls + len(given) > limits.calls:
            raise self._refusal(f"an agent may ask for {limits.calls} answers", "max_calls")
        if limits.tokens is not None and self.tokens >= limits.tokens:
            raise self._refusal(f"an agent may sample {limits.tokens} tokens", "max_total_tokens")
        self.calls += len(given)
        return [self._line(each, tools) for each in given]

    async def reply(
        self,
        thread: Thread,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        """Have the policy speak. The thread is free again once it was told what was `shown`.

        Args:
            max_tokens: most tokens of the answer, within the run's `sampling.max_tokens`.
            stop: texts that end the answer, besides the run's.
            on_tokens: called with (0, new tokens) as they arrive.

        Raises:
            OverLimit: if the chat's length leaves no room for a token.
            EngineError: if no engine can serve it.
            ConfigError: if there is no chat template, or it refuses the messages.
        """
        sampling = self.session.sampling
        most = (sampling.max_tokens, max_tokens, self._tokens_left())
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=min(each for each in most if each is not None),
            stop=(*sampling.stop, *(text for text in stop if text not in sampling.stop)),
        )
        try:
            answer = await thread.reply(sampling, on_tokens)
        except Exception as error:
            self.fault = self.fault or error
            raise
        if answer is None:
            message = (
                f"a chat may have {self.limits.context} tokens, and this one leaves no room for an answer"
            )
            raise self._refusal(message, "context_length_exceeded")
        self.tokens += len(answer.tokens)
        self.last = thread
        return answer

    async def doing(self, work: Awaitable[T]) -> T:
        """Do what a call needs, unless the recorder is closed first.

        Raises:
            OverLimit: if it is closed.
        """
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                if self._closed:
                    scope.cancel()
                return await work
            finally:
                self._under_way.remove(scope)
                self._ended.set()
        raise OverLimit("the agent run is over", "run_over")

    async def close(self) -> None:
        """End the calls under way, and take no more."""
        self._closed = True
        for scope in self._under_way:
            scope.cancel()
        while self._under_way:
            self._ended = anyio.Event()
            await self._ended.wait()

    def trajectories(self, score: Score) -> list[Trajectory]:
        """What was sampled, each chat by itself, with the agent run's score, to whose metrics `calls` and
        `chats` are added. Empty if nothing was."""
        answered = [thread for thread in self._threads if thread.message is not None]
        metrics = {**score.metrics, "calls": float(self.calls), "chats": float(len(answered))}
        score = replace(score, metrics=metrics)
        return parts_of_sample([each for thread in answered for each in thread.trajectories(score)])

    # ------------------------------------------------------------------------------------ private

    def _line(self, given: Input, tools: Sequence[Mapping[str, Any]]) -> Thread:
        """The thread with the longest history that a call goes on with, or a new one."""
        candidates = [
            (thread, news) for thread in self._threads if (news := thread.news_in(given, tools)) is not None
        ]
        if candidates:
            thread, news = max(candidates, key=lambda found: found[0].length)
            thread.go_on(given, news)
            return thread
        name = f"{self._name}c{len(self._threads) + 1}"
        self._threads.append(Thread(self.session, name, given, tools, self.limits.context))
        return self._threads[-1]

    def _tokens_left(self) -> int | None:
        return None if self.limits.tokens is None else max(1, self.limits.tokens - self.tokens)

    def _refusal(self, message: str, code: str) -> OverLimit:
        self.over = self.over or code
        return OverLimit(message, code)
