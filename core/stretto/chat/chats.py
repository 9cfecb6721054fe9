"""Conversations as tokens: turns of the assistant, which are trained on, and the context between them.

The chat template writes the whole conversation. A turn of the assistant begins where the template opens an
answer, and ends with the token that ends the turn. Prompt, turns and the text between are tokenised
separately, as in a conversation with the policy (`stretto.agents.conversation`). If a template drops or
changes messages, training would differ from the row, so the row is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stretto.chat.chat_form import plain_text
from stretto.chat.prompts import name_of_tool
from stretto.chat.stored import KEYS, RARE_KEYS
from stretto.dataset import Message
from stretto.errors import ConfigError
from stretto.reward import REASONING_WORDS
from stretto.tokenizer import Tokenizer

__all__ = ["ChatPiece", "encode_chat", "hidden_tools", "is_data", "is_shown"]

Tools = Sequence[Mapping[str, Any]]

_TEXTS = ("content", *KEYS, *RARE_KEYS, "tool_plan")
"""Keys of a message that have text."""
_OF_APIS = ("reasoning_details", "thinking_blocks")
"""Keys that APIs give to messages, and no template reads."""
_OTHER = "othertext"


class ChatPiece(NamedTuple):
    """A part of a conversation."""

    ids: NDArray[np.int32]
    trained: bool


def encode_chat(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    tools: Tools = (),
    complete: bool = True,
) -> list[ChatPiece]:
    """Return the pieces of a conversation up to the end of the assistant's last turn; the first is the
    prompt, with the opening of the answer.

    Args:
        answer: turns of the assistant, who begins, of tools and of others. A tool call has its arguments as a
            mapping or as JSON text.
        complete: refuse messages and tools that the template drops or changes, except for white space and
            for reasoning in the prompt.

    Raises:
        ConfigError: if the template refuses, drops or changes messages, or writes the first messages in
            another way once later messages follow.
    """
    messages = [*prompt, *answer]
    for turn in messages:
        if turn.get("function_call") or turn["role"] == "function":
            raise ConfigError(
                "a message has a `function_call`, or the role 'function': write `tool_calls`, and tool"
            )
        for call in turn.get("tool_calls") or ():
            _arguments_of(call)
    return list(_Chat(messages, len(prompt), tokenizer, tools).pieces(complete=complete))


class _Chat:
    def __init__(self, messages: Sequence[Message], start: int, tokenizer: Tokenizer, tools: Tools) -> None:
        self._messages = messages
        self._start = start  # number of messages of the prompt
        self._tokenizer = tokenizer
        self._tools = tools
        self._text = self._render(len(messages), opens_answer=False)

    def pieces(self, *, complete: bool) -> Iterator[ChatPiece]:
        tokenizer, end = self._tokenizer, 0
        numbers = range(self._start, len(self._messages))
        turns = [number for number in numbers if self._messages[number]["role"] == "assistant"]
        openings = [self._opening(number) for number in turns]
        covered = 0
        for number, begin, limit in zip(turns, openings, [*openings[1:], len(self._text)], strict=True):
            context, turn = self._text[end:begin], self._turn(number, begin, limit)
            if complete:
                self._check(covered, number, context)
                self._check(number, number + 1, turn)
            if covered == 0:
                ids = tokenizer.encode_prompt(self._messages[:number], tools=self._tools)
            else:
                ids = tokenizer.encode_text(context, after=self._text[:end])
            yield ChatPiece(ids, trained=False)
            end, covered = begin + len(turn), number + 1
            if not any(tokenizer.form.ends_of(turn)) and not self._text[end:].strip():
                calls = self._messages[number].get("tool_calls")
                turn += tokenizer.form.call_closing if calls else tokenizer.form.closing
            ids = tokenizer.encode_text(turn, after=self._text[:begin])
            yield ChatPiece(ids, trained=self._is_trained(number))

    def _is_trained(self, number: int) -> bool:
        """Whether a turn is trained: not with `weight: 0` (OpenAI's key) or `train: false`."""
        turn = self._messages[number]
        weights = [value for key in ("weight", "train") if (value := turn.get(key)) is not None]
        if any(value not in (0, 1) for value in weights):
            raise ConfigError(f"{self._name(number)}: its weight is {weights[0]!r}; expected 0 or 1")
        return all(weights)

    def _opening(self, number: int) -> int:
        opened = self._render(number, opens_answer=True)
        if self._text.startswith(opened):
            return len(opened)
        same = next(at for at, (a, b) in enumerate(zip(opened, f"{self._text}\0", strict=False)) if a != b)
        start = same - opened[:same].endswith(("<", "["))  # a tag of both texts begins with it
        written = plain_text(self._text[start : start + 40])
        raise ConfigError(
            f"{self._name(number)}: the chat template opens the answer with {opened[start:][-40:]!r}, and "
            f"writes the whole conversation with {written!r} there: it changes earlier "
            "turns, or the answer lacks what the template puts before it; write one row for each turn of the "
            "assistant, or prompt and answer as text"
        )

    def _turn(self, number: int, begin: int, limit: int) -> str:
        """Return a turn's text up to its end token. The turn begins at `begin`, the next turn at `limit`."""
        form = self._tokenizer.form
        rendered = self._render(number + 1, opens_answer=False)
        ends = [match for match in form.ends_of(rendered) if match.start() >= begin]
        # Some templates end the last turn in another way than earlier turns.
        for prefix in (rendered, rendered[: ends[-1].start()] if ends else rendered):
            if self._text.startswith(prefix):
                turn = prefix[begin:]
                if inside := [*form.ends_of(turn)]:
                    if len(inside) > 1 and self._is_trained(number):
                        raise self._other_end(
                            number, f"has {inside[0][0]!r} inside it, at which engines stop"
                        )
                    return turn[: inside[-1].end()]
                if end := form.end_at(self._text, len(prefix)):
                    return turn + end
                ends_alone = form.inner_end and self._text.startswith(form.inner_end, len(prefix))
                if ends_alone and self._is_trained(number):
                    raise self._other_end(number, f"ends with {form.inner_end!r}, at which no engine stops")
                # The token of the next role would also end the turn here.
                ends_here = bool(form.closing) and form.writes_end and len(prefix) == len(self._text)
                return turn if ends_here else self._without_space_of_template(number, turn)
        # Some templates write a turn in another way while it is the last one.
        if ends and (first := next(iter(form.ends_of(self._text[begin:limit])), None)):
            turn = self._text[begin : begin + first.end()]
            # All that an earlier turn may lack is its reasoning (`_check` says whether the row has some).
            front, whole, _ = rendered[begin : ends[-1].end()].rpartition(turn)
            frame = form.lead.strip() if not re.search(REASONING_WORDS, form.lead, re.IGNORECASE) else ""
            if (whole and not (frame and frame in front)) or not self._is_trained(number):
                return turn
        raise ConfigError(
            f"{self._name(number)}: the chat template changes it once other messages follow; "
            "write one row for each turn of the assistant (docs/algorithms.md)"
        )

    def _other_end(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"{self._name(number)}: the chat template does not end it as the policy would: it {why}; write "
            "one row for each turn of the assistant, or text and calls as two messages"
        )

    def _without_space_of_template(self, number: int, turn: str) -> str:
        """Return a turn that ends with the message's white space, not with white space of the template."""
        content, body = self._messages[number].get("content"), turn.rstrip()
        if not isinstance(content, str) or not plain_text(body).endswith(content.rstrip()):
            return body
        space = content[len(content.rstrip()) :]
        return body + space if turn.startswith(space, len(body)) else body

    def _check(self, first: int, last: int, text: str) -> None:
        packed, write = _pack(text), partial(self._tokenizer.render, add_generation_prompt=False)
        if first == 0:
            for name in hidden_tools(self._tools, text, lambda: write(self._messages)):
                raise ConfigError(f"the chat template does not show the tool {name!r}")
        for number in range(first, last):
            turn = self._messages[number]
            in_prompt = number < self._start
            missing = [
                key
                for key in (_TEXTS[:1] if in_prompt else (*_TEXTS, *self._other_texts(number)))
                if not all(_has(packed, piece) for piece in _texts(turn.get(key), all_of_it=not in_prompt))
                or is_data(turn.get(key), text)
                or not self._depends_on(number, key)
            ]
            calls = turn.get("tool_calls") or ()
            if not all(_is_shown(call, packed) for call in calls) or not self._depends_on(
                number, "tool_calls"
            ):
                missing.append("tool_calls")
            missing += [key for key in _OF_APIS if turn.get(key) and not in_prompt]
            if missing:
                raise ConfigError(
                    f"{self._name(number)}: the chat template drops or changes its {missing[0]!r}; it writes "
                    f"{_short(text)!r} there{self._advice(number, missing[0])}"
                )

    def _other_texts(self, number: int) -> Iterator[str]:
        """Yield other keys of a message whose text the template writes if the conversation ends there."""
        chat, known = self._messages[: number + 1], {"role", *_TEXTS, *_OF_APIS}
        turn = chat[-1] if chat[-1]["role"] == "assistant" else {}
        keys = [key for key, value in turn.items() if key not in known and isinstance(value, str)]
        text = self._write(chat) if keys else ""
        yield from (key for key in keys if is_shown(chat, number, key, text, self._write))

    def _advice(self, number: int, key: str) -> str:
        """Return where the template would write a turn's reasoning; empty if nowhere."""
        turn, thought = self._messages[number], self._messages[number].get(key)
        if key not in (keys := (*KEYS, *RARE_KEYS)) or not isinstance(thought, str):
            return ""
        parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": turn.get("content")}]
        places: dict[str, Message] = {f"under the key {each!r}": {each: thought} for each in keys}
        places["as a part of the content, {'type': 'thinking', 'thinking': …}"] = {"content": parts}
        for place, reasoning in places.items():
            chat = [*self._messages]
            chat[number] = {**{each: turn[each] for each in turn if each != key}, **reasoning}
            try:
                if self._write(chat).count(thought) > self._text.count(thought):
                    return f"; it would write the reasoning {place}"
            except ConfigError:
                continue
        return ""

    def _depends_on(self, number: int, key: str) -> bool:
        return is_shown(self._messages, number, key, self._text, self._write)

    def _render(self, count: int, *, opens_answer: bool) -> str:
        text = self._write(self._messages[:count], opens_answer=opens_answer)
        return text if opens_answer else text.removesuffix(self._tokenizer.form.final)

    def _write(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        return self._tokenizer.render(messages, tools=self._tools, add_generation_prompt=opens_answer)

    def _name(self, number: int) -> str:
        place = number - self._start
        whose = f"message {place + 1} of the answer" if place >= 0 else f"message {number + 1} of the prompt"
        return f"{whose} (role {self._messages[number]['role']!r})"


def hidden_tools(tools: Tools, text: str, without: Callable[[], str]) -> list[str]:
    """Return the names of the tools that a chat template does not show in `text`. `without` renders the chat
    without tools: if that text is the same, no tool is shown, even where a message has its name."""
    try:
        hides_all = bool(tools) and without().startswith(text)
    except ConfigError:
        hides_all = False
    packed = _pack(text)
    return [name for name in map(name_of_tool, tools) if hides_all or _pack(name) not in packed]


def is_data(content: Any, text: str) -> bool:
    """Return whether a text contains a part of a content as Python or JSON data."""
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    text_parts = [{**part, "type": "text"} for part in parts if isinstance(part, Mapping) and "text" in part]
    forms = [
        form for part in text_parts for form in (str(part), json.dumps(part, ensure_ascii=False, default=str))
    ]
    packed = _pack(text) if forms else ""
    return any(_pack(form)[1:-1] in packed for form in forms)


def is_shown(
    messages: Sequence[Message], number: int, key: str, text: str, write: Callable[[list[Message]], str]
) -> bool:
    """Return whether the chat template's output, `text`, depends on the text or on each tool call under a key
    of a message. To search `text` is not enough, because other messages may have the same words."""
    value = messages[number].get(key)
    replacements: list[Any] = []  # for no value, and a list of parts, which may be images
    if key == "tool_calls" and value:
        other = {"name": _OTHER, "arguments": {}}
        each = enumerate(cast("list[Any]", value))
        replacements = [[*value[:at], {**call, "function": other}, *value[at + 1 :]] for at, call in each]
    elif isinstance(value, str) and value.strip():
        replacements = [f"{value.rstrip()}{_OTHER}"]

    def changes(replacement: Any) -> bool:
        changed = [*messages]
        changed[number] = type(messages[number])({**messages[number], key: replacement})  # type: ignore[reportCallIssue]
        try:
            return write(changed) != text
        except ConfigError:
            return True  # the template reads the value, because it refuses the replacement

    return all(map(changes, replacements))


def _arguments_of(call: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a tool call; ConfigError if `call` is no tool call."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):  # type: ignore[reportUnknownMemberType]
        raise ConfigError(
            "expected tool calls with a function's name and arguments, "
            f"{{'function': {{'name': …, 'arguments': …}}}}, found {call!r}"
        )
    function = cast("Mapping[str, Any]", function)
    arguments = function.get("arguments") or {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise ConfigError(
            f"the arguments of a tool call are not JSON: {error}; found {arguments!r}"
        ) from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected the arguments of a tool call as a JSON object, found {arguments!r}")
    return function["name"], cast("Mapping[str, Any]", value)


def _is_shown(call: Mapping[str, Any], packed: str) -> bool:
    """Whether a text without white space shows a tool call with its arguments as JSON, not as Python data."""
    name, arguments = _arguments_of(call)
    written, python = call.get("function", call).get("arguments"), _pack(str(arguments))
    if not (isinstance(written, str) and written and _pack(written) in packed):
        is_json = python == _pack(json.dumps(arguments)) or python not in packed
        return is_json and _has(packed, arguments) and _pack(name) in packed
    return _pack(name) in packed


def _has(packed: str, value: Any) -> bool:
    """Return whether a text without white space contains all keys and values of plain data."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return all(_has(packed, key) and _has(packed, item) for key, item in items)
    if isinstance(value, list | tuple):
        return all(_has(packed, item) for item in cast("Sequence[Any]", value))
    forms = [str(value), *(json.dumps(value, ensure_ascii=ascii) for ascii in (False, True))]
    if isinstance(value, str):
        forms[1:] = [form[1:-1] for form in forms[1:]]
    return any(_pack(form) in packed for form in forms)


def _texts(value: Any, *, all_of_it: bool) -> list[Any]:
    """Return the texts in a value, split at reasoning tags and at image placeholders, where a template may
    write something else. Without `all_of_it`, leave the reasoning out."""
    parts = cast("list[Any]", value) if isinstance(value, list) else [value]
    keys = ("text", "thinking") if all_of_it else ("text",)
    texts = [
        cast("Mapping[str, Any]", part).get(key) if isinstance(part, Mapping) else part
        for part in parts
        for key in keys
    ]
    shown = [text if all_of_it else text.rpartition("</think>")[2] for text in texts if isinstance(text, str)]
    return [piece for text in shown for piece in re.split("</?think>|<image>", text)]


def _pack(text: str) -> str:
    return "".join(plain_text(text).split())


def _short(text: str) -> str:
    text = plain_text(text)
    return text if len(text) <= 160 else f"{text[:80]} … {text[-80:]}"
