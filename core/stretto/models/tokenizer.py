"""Turn text into tokens and back, in processes that never import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import anyio
import anyio.to_thread
import numpy as np
from anyio.lowlevel import RunVar
from numpy.typing import NDArray

from stretto.errors import ConfigError

__all__ = [
    "ByteTokenizer",
    "Message",
    "Tokenizer",
    "apply_chat_template",
    "characters_of",
    "fault_of",
    "load_tokenizer",
    "shows_tools",
    "work_on_text",
]

T = TypeVar("T")

_SHORT = 2**14
"""Tokenising a text of this many characters takes about 20 ms."""
_LEAST = 2**20
_MOST = 2**22
"""`_LEAST` and `_MOST` are the bounds of `Tokenizer.most_characters` where only the model limits the text.
Tokenising a text of `_MOST` characters takes about 6 s and some 500 MB."""
_text_thread: RunVar[anyio.CapacityLimiter] = RunVar("stretto_text_thread")

Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and other keys that a template may use, such as `tool_calls`."""


class Tokenizer(Protocol):
    """The tokenizer methods that rollout workers and engines use."""

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """Return (P,) ids of a prompt. For chat messages, the chat template is applied once and opens the
        assistant's turn.

        Args:
            tools: as in `render`; a text shows none.

        Raises:
            ConfigError: if the prompt is chat messages and the tokenizer has no chat template.
        """
        ...

    def encode_answer(self, answer: str) -> NDArray[np.int32]:
        """Return (A,) ids of the answer to a text, and of the end-of-sequence token, if there is one. For the
        answer to chat messages, see `stretto.models.chats`."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return chat messages as text in the form of the chat template.

        Args:
            tools: JSON schemas of functions, for chat templates that show them to the model.
            add_generation_prompt: write the opening of the assistant's turn after the messages.

        Raises:
            ConfigError: if there is no chat template, or the template refuses the messages.
        """
        ...

    def encode_text(self, text: str) -> NDArray[np.int32]:
        """Return (L,) ids of a part of a text. No token is added before or after it. The text of a special
        token becomes that token."""
        ...

    def decode(self, ids: NDArray[np.int32], *, special: bool = False) -> str:
        """Return the text of tokens. Special tokens are left out unless `special` is True."""
        ...

    @property
    def end(self) -> str:
        """The end-of-sequence token as text; empty if there is none."""
        ...

    def most_characters(self, tokens: int | None) -> int:
        """Return how many characters a text of this many tokens has at most. A longer text is refused before
        it is tokenised, which would take long. Only a tokenizer that drops characters, or makes one unknown
        token of many, could put a longer text into as many tokens.

        Args:
            tokens: None for the model's own limit, which is only known to be at least 1 MiB of text.
        """
        ...


def load_tokenizer(model: str | None) -> Tokenizer:
    """Load the tokenizer of a model folder or hub id. Without a model, every byte is a token.

    Raises:
        ConfigError: if the model has no tokenizer that can be loaded.
    """
    if model is None:
        return ByteTokenizer()
    # AutoTokenizer would import torch.
    from transformers import PreTrainedTokenizerFast

    try:
        return _Fast(PreTrainedTokenizerFast.from_pretrained(model), model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} has no tokenizer that can be loaded: {error}") from error


def apply_chat_template(
    owner: Any,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return chat messages as text; see `Tokenizer.render`.

    Args:
        owner: has the chat template: a tokenizer or a processor of transformers.

    Raises:
        ConfigError: if there is no template, or if it refuses the messages.
    """
    from jinja2 import TemplateError

    if owner.chat_template is None:
        raise ConfigError(f"the prompt is chat messages, and model {model!r} has no chat template")
    try:
        return owner.apply_chat_template(
            [_without_nulls(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    # A template raises a TypeError where it joins text and a value of another type.
    except (TemplateError, TypeError) as error:
        raise ConfigError(f"the chat template of {model!r} refuses the messages: {error}") from error


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template of a model puts the given tools into the prompt.

    Raises:
        ConfigError: if the model has no chat template, or the template refuses a plain question.
    """
    tool = {"type": "function", "function": {"name": "a_tool", "description": "", "parameters": {}}}
    return "a_tool" in tokenizer.render([{"role": "user", "content": "hello"}], tools=[tool])


def fault_of(prompt: Any) -> str:
    """Return the reason why a value is not a valid prompt; an empty string if it is valid."""
    if isinstance(prompt, str):
        return ""
    turns = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if turns and all(isinstance(turn, dict) and _is_message(cast("Message", turn)) for turn in turns):
        return ""
    return f"expected text or chat messages ([{{'role': …, 'content': …}}, …]), found {str(prompt)[:60]!r}"


def _is_message(turn: Message) -> bool:
    """Return whether a mapping has a role, and a content or tool calls."""
    return "role" in turn and (turn.get("content") is not None or bool(turn.get("tool_calls")))


def _without_nulls(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: with a content, and without keys that have no value. Libraries
    of data give every message all keys that any message has."""
    keys = {key: value for key, value in message.items() if value is not None}
    if not keys.get("tool_calls"):
        keys.pop("tool_calls", None)
    return {"content": "", **keys}


def characters_of(content: Any) -> int:
    """Return the number of characters in a prompt: a text, chat messages, or the content of a message."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        part = cast("Mapping[str, Any]", content)
        return characters_of(part.get("content")) + characters_of(part.get("text"))
    return sum(map(characters_of, cast("list[Any]", content))) if isinstance(content, (list, tuple)) else 0


async def work_on_text(work: Callable[[], T], characters: int) -> T:
    """Do some work on a text of this many characters, such as to tokenise it, and return the result. A thread
    does it if the text is long, one text at a time: the event loop continues meanwhile."""
    if characters <= _SHORT:
        return work()
    try:
        limiter = _text_thread.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(1)
        _text_thread.set(limiter)
    return await anyio.to_thread.run_sync(work, limiter=limiter)


class ByteTokenizer:
    """A tokenizer whose tokens are bytes, for runs of mock engines without a model."""

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """Return the UTF-8 bytes of the text, or of the messages as `render` writes them."""
        text = prompt if isinstance(prompt, str) else self.render(prompt, tools=tools)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_answer(self, answer: str) -> NDArray[np.int32]:
        """Return the UTF-8 bytes of the text."""
        return self.encode_prompt(answer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the contents of the messages, each on its own line. Tools are not shown."""
        del tools, add_generation_prompt
        return "".join(f"{_without_nulls(message)['content']}\n" for message in messages)

    def encode_text(self, text: str) -> NDArray[np.int32]:
        """Return the UTF-8 bytes of the text."""
        return self.encode_prompt(text)

    end = ""

    def most_characters(self, tokens: int | None) -> int:
        """Return the number of tokens, because each character has at least one."""
        return _MOST if tokens is None else tokens

    def decode(self, ids: NDArray[np.int32], *, special: bool = False) -> str:
        """Return the bytes as text; bytes that are not UTF-8 are replaced."""
        del special
        return (ids % 256).astype(np.uint8).tobytes().decode(errors="replace")


class _Fast:
    """A tokenizer of the `tokenizers` library with its chat template."""

    def __init__(self, tokenizer: Any, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        # `_encode` leaves out the checks of transformers, which take longer than a short prompt. This is what
        # transformers sets at each call.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            return self._encode(prompt, special=True)
        return self.encode_text(self.render(prompt, tools=tools))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        return apply_chat_template(
            self._tokenizer, self._model, messages, tools, add_generation_prompt=add_generation_prompt
        )

    def encode_text(self, text: str) -> NDArray[np.int32]:
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> NDArray[np.int32]:
        """Return the ids of a text, with the tokens that belong around it or without."""
        return np.asarray(self._backend.encode(text, add_special_tokens=special).ids, np.int32)

    @property
    def end(self) -> str:
        return self._tokenizer.eos_token or ""

    def most_characters(self, tokens: int | None) -> int:
        if tokens is None:
            return min(_MOST, max(_LEAST, self._longest_token * self._tokenizer.model_max_length))
        return self._longest_token * tokens

    @cached_property
    def _longest_token(self) -> int:
        """Most characters that one token stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode_answer(self, answer: str) -> NDArray[np.int32]:
        ids = self.encode_text(answer).tolist()
        if (end := self._tokenizer.eos_token_id) is not None:
            ids.append(end)
        return np.asarray(ids, np.int32)

    def decode(self, ids: NDArray[np.int32], *, special: bool = False) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=not special)
