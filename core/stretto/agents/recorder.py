"""The model calls of one agent, and the trajectories made of them.

An agent may call in any way: one growing chat, several at once, or a rewritten history. A call that begins
with everything that the agent has seen of a chat continues this chat: new messages extend its ids
(`stretto.agents.conversation`). Any other call begins a new chat with a trajectory of its own, as does a call
to a chat whose answer is still being sampled. All trajectories share the score.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.agents.conversation import Conversation, Generate
from stretto.chat.calls import ToolCall
from stretto.dataset import Message
from stretto.engine import Sampling
from stretto.errors import StrettoError
from stretto.models.tokenizer import answer_text
from stretto.workflow import Answer, OnTokens, Score, Session, Trajectory, parts_of_sample

__all__ = ["CallLimits", "CallRecorder", "Input", "OverLimit", "Thread"]

T = TypeVar("T")
Input = str | list[Any] | NDArray[np.int32]
"""The input of a call: text, chat messages, or token ids."""


class OverLimit(StrettoError):
    """A call is refused: a limit does not allow it, or the agent run is over. `code` is `max_calls`,
    `max_total_tokens`, `context_length_exceeded` or `run_over`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class CallLimits:
    """Limits of one agent run. None: only the limits of the training run apply."""

    calls: int | None = None
    """Maximum number of answers; each choice of a call counts."""
    tokens: int | None = None
    """Maximum number of tokens that all calls sample. Each call may use all that are left at its start."""
    context: int | None = None
    """Maximum number of tokens of one chat, prompt included."""


class Thread:
    """One chat, text or list of ids: what the agent has seen of it, and the sampled tokens."""

    def __init__(
        self, session: Session, name: str, input: Input, tools: Sequence[Mapping[str, Any]], limit: int | None
    ) -> None:
        self.input = input
        """The input of the agent's last call."""
        self.message: Message | None = None
        """The message of the last answer, as the agent got it."""
        self.prompt = np.empty(0, np.int32)
        """(P,) ids before the last answer."""
        self._tools = tools
        self._can_continue = False
        """Whether a call may continue the thread: true once the agent got the last answer."""
        self._session = session
        self._name = name
        session.begin(name)
        self._on_tokens: OnTokens | None = None
        self._prefix: str | list[Any] = ""
        """A call that begins with this continues the thread."""
        if isinstance(input, np.ndarray):
            self._conversation: Conversation | _TokenPrompt = _TokenPrompt(self._generate, input, limit)
        else:
            self._conversation = Conversation(
                self._generate,
                session.tokenizer,
                session.sampling,
                input,
                tools=tools,
                limit=limit,
                images=session.images,
            )

    @property
    def chat(self) -> list[Message]:
        """The input of the last call as messages, and the answer. Text or ids become a user's message."""
        input, answer = self.input, [] if self.message is None else [self.message]
        if isinstance(input, list):
            return [*input, *answer]
        text = input if isinstance(input, str) else self._session.tokenizer.decode(input, special=True)
        return [{"role": "user", "content": text}, *answer]

    @property
    def opened(self) -> str:
        """Start of the last answer that is part of the prompt, such as `<think>`; else empty."""
        answers = self._conversation.answers if isinstance(self._conversation, Conversation) else []
        return answers[-1].opened if answers else ""

    def text_of(self, answer: Answer, *, special: bool = False) -> str:
        """Return the text of the last answer. In a chat it has no `ChatForm.lead`. Agents that write prompts
        of their own append all sampled text to them."""
        tokenizer, whole = self._session.tokenizer, not isinstance(self.input, list)
        return answer_text(self.prompt, answer.tokens, answer.finish, tokenizer, special=special, whole=whole)

    @property
    def length(self) -> int:
        """Number of messages or characters that a call has to begin with to continue the thread."""
        return len(self._prefix)

    def news_in(self, input: Input, tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """Return what a call adds to this thread; None if the call does not continue it."""
        prefix = self._prefix
        if not self._can_continue or tools != self._tools:
            return None
        if isinstance(input, str) and isinstance(prefix, str):
            new = input.removeprefix(prefix)
            return [new] if 0 < len(new) < len(input) else None
        if isinstance(input, list) and isinstance(prefix, list) and input[: len(prefix)] == prefix:
            return input[len(prefix) :] or None
        return None

    def go_on(self, input: Input, news: Sequence[Any]) -> None:
        """Continue the thread with a call's input. The thread now waits for an answer."""
        assert isinstance(self._conversation, Conversation)
        self._conversation.add(*news)
        self.input, self._can_continue = input, False

    async def reply(self, sampling: Sampling, on_tokens: OnTokens | None) -> Answer | None:
        """Sample the policy's answer; None if the thread's limit leaves no room for a token."""
        self._on_tokens = on_tokens
        length_before = len(self._text)
        answer = await self._conversation.reply(sampling)
        if answer is not None and isinstance(self.input, str):
            # Agents that write prompts append a stop text again, but do not know the token that ends a turn.
            assert isinstance(self._conversation, Conversation)
            self._prefix = self.input + self._conversation.without_end(self._text[length_before:], answer)
        return answer

    def record_answer(self, message: Message, before: str = "", calls: Sequence[ToolCall] = ()) -> None:
        """Record the last answer as the agent gets it. A call that begins with input and message continues
        the thread. `before`, `calls`: those of `Conversation.store_calls`."""
        self.message = message
        if isinstance(self._conversation, _TokenPrompt):
            return
        if isinstance(self.input, list):
            self._prefix = [*self.input, message]
        if calls and isinstance(self.input, list):
            self._conversation.store_calls(before, calls)
        self._can_continue = True

    def trajectories(self, score: Score) -> list[Trajectory]:
        """Return the trajectories of the sampled tokens."""
        return self._conversation.trajectories(score)

    @property
    def _text(self) -> str:
        """The whole plain text so far; empty for a chat or for ids."""
        conversation = self._conversation
        if isinstance(conversation, Conversation) and isinstance(conversation.history, str):
            return conversation.history
        return ""

    async def _generate(
        self, ids: NDArray[np.int32], sampling: Sampling, images: Sequence[str] | None
    ) -> Answer:
        self.prompt = ids
        [answer] = await self._session.generate(
            ids, sampling=sampling, conversation_id=self._name, on_tokens=self._on_tokens, images=images
        )
        return answer


class _TokenPrompt:
    """One answer to a prompt of token ids. No other call can continue it."""

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
        self._answer = await self._generate(self._ids, sampling, None)
        return self._answer

    def trajectories(self, score: Score) -> list[Trajectory]:
        score = replace(score, metrics={**score.metrics, "turns": 1.0, "splits": 0.0})
        return [] if self._answer is None else [Trajectory.of(self._ids, self._answer, score)]


class CallRecorder:
    """One agent run: its threads, its use of calls and tokens, and its unfinished calls. `name`: letters and
    digits, different for every recorder of a session; seeds depend on it."""

    def __init__(self, session: Session, name: str, limits: CallLimits | None = None) -> None:
        self.session = session
        self.limits = limits or CallLimits()
        self.calls = 0
        self.tokens = 0
        self.over = ""
        """The first limit that refused a call; empty if none did."""
        self.fault: Exception | None = None
        """The first error of a call; None if there was none."""
        self.last: Thread | None = None
        self._name = name
        self._threads: list[Thread] = []
        self._call_scopes: set[anyio.CancelScope] = set()
        self._call_ended = anyio.Event()
        self._closed = False

    def take(self, inputs: Sequence[Input], tools: Sequence[Mapping[str, Any]] = ()) -> list[Thread]:
        """Return the threads for a call's inputs. Raise OverLimit if calls or tokens are used up."""
        limits = self.limits
        if limits.calls is not None and self.calls + len(inputs) > limits.calls:
            raise self._refusal(f"an agent may ask for {limits.calls} answers", "max_calls")
        if limits.tokens is not None and self.tokens >= limits.tokens:
            raise self._refusal(f"an agent may sample {limits.tokens} tokens", "max_total_tokens")
        self.calls += len(inputs)
        return [self._thread_for(prompt, tools) for prompt in inputs]

    async def reply(
        self,
        thread: Thread,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        """Sample the policy's answer. Then call `thread.record_answer`, so that the thread can continue.

        Args:
            max_tokens: maximum number of tokens of the answer, within the run's `sampling.max_tokens`.
            stop: texts that end the answer, in addition to the run's.
            on_tokens: called with (0, new tokens) as they arrive.

        Raises:
            OverLimit: if the chat's length leaves no room for a token.
            EngineError: if no engine can serve the request.
            ConfigError: if there is no chat template, or it refuses the messages.
        """
        sampling = self.session.sampling
        left = None if self.limits.tokens is None else max(1, self.limits.tokens - self.tokens)
        limits = (sampling.max_tokens, max_tokens, left)
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=min(limit for limit in limits if limit is not None),
            stop=(*sampling.stop, *(text for text in stop if text not in sampling.stop)),
        )
        try:
            answer = await thread.reply(sampling, on_tokens)
        except Exception as error:
            self.fault = self.fault or error
            raise
        if answer is None:
            text = f"a chat may have {self.limits.context} tokens, and this one leaves no room for an answer"
            raise self._refusal(text, "context_length_exceeded")
        self.tokens += len(answer.tokens)
        self.last = thread
        return answer

    async def run_call(self, work: Awaitable[T]) -> T:
        """Await the work of a call. If the recorder is closed, cancel the work and raise OverLimit."""
        with anyio.CancelScope() as scope:
            self._call_scopes.add(scope)
            try:
                if self._closed:
                    scope.cancel()
                return await work
            finally:
                self._call_scopes.remove(scope)
                self._call_ended.set()
        raise OverLimit("the agent run is over", "run_over")

    async def close(self) -> None:
        """Cancel the unfinished calls, and accept no more."""
        self._closed = True
        for scope in self._call_scopes:
            scope.cancel()
        while self._call_scopes:
            self._call_ended = anyio.Event()
            await self._call_ended.wait()

    def trajectories(self, score: Score) -> list[Trajectory]:
        """Return the trajectories of all chats, with the run's score and the metrics `calls` and `chats`."""
        threads = [thread for thread in self._threads if thread.message is not None]
        metrics = {**score.metrics, "calls": float(self.calls), "chats": float(len(threads))}
        score = replace(score, metrics=metrics)
        return parts_of_sample(
            [trajectory for thread in threads for trajectory in thread.trajectories(score)]
        )

    def _thread_for(self, input: Input, tools: Sequence[Mapping[str, Any]]) -> Thread:
        """Return the thread that a call continues, the longest if several match; else a new one."""
        candidates = [
            (thread, news) for thread in self._threads if (news := thread.news_in(input, tools)) is not None
        ]
        if candidates:
            thread, news = max(candidates, key=lambda candidate: candidate[0].length)
            thread.go_on(input, news)
            return thread
        name = f"{self._name}c{len(self._threads) + 1}"
        self._threads.append(Thread(self.session, name, input, tools, self.limits.context))
        return self._threads[-1]

    def _refusal(self, message: str, code: str) -> OverLimit:
        self.over = self.over or code
        return OverLimit(message, code)
