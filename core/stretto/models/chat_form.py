"""The chat form of a model: what its chat template, tokenizer and generation config make of a turn.

`form_of` finds it once for each tokenizer: it renders short chats and looks for their words in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, Literal, cast

from stretto.dataset import Message, OwnTurn
from stretto.errors import ConfigError

__all__ = ["ChatForm", "any_of", "form_of", "opened_in", "plain_text", "sections_of"]

_Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, whether to open the answer -> the text that the template writes."""

_Arguments = Literal["mapping", "text", "mapping or text"]

_CUT = "\ufdd0"
"""Mark after the first and the last character of a special token that is text. No Unicode character."""
_TAG = re.compile(r"<[A-Za-z_][\w-]*>|\[[A-Z_]+\]")
"""A tag that opens a part of an answer, such as `<think>` or `[THINK]`."""

_DATA = re.compile(r"""type(\\?['"]|&[#\w]+;): *\1t(ext|hinking)""", re.IGNORECASE)
"""Finds content parts that a template wrote as Python or JSON data, not as text."""

_ASK, _REPLY, _MORE, _RULE = "probeask", "probereply", "probemore", "proberule"
_THOUGHT, _TOOL, _KEY, _VALUE = "probethought", "probetool", "probekey", "probevalue"
_RESULT = {"role": "tool", "tool_call_id": "call00001"}
_TEXT = frozenset({"text"})


@dataclass(frozen=True)
class ChatForm:
    """What a model's turns look like. The defaults are those of a model without a chat template."""

    has_template: bool = False
    end_ids: frozenset[int] = frozenset()
    """Tokens that end an answer: the model's, the tokenizer's, and the one that the template writes."""
    stop_ids: tuple[int, ...] = ()
    """The token that ends the last turn, if engines do not stop at it by themselves."""
    ends: tuple[str, ...] = ()
    """`end_ids` as text."""
    closing: str = ""
    """Text of the token that ends the last turn, else of the tokenizer's end token; else empty."""
    writes_end: bool = True
    """Whether the template writes a token at the end of a turn."""
    call_closing: str = ""
    """The token that ends a last turn with tool calls, such as the token of the role that answers."""
    opened: str = ""
    """What the generation prompt writes after the header of the answer, such as `<think>\\n`."""
    header: str = ""
    """What the generation prompt adds to the messages."""
    opening: str = ""
    """The end of a prompt that opens an answer: the header, else what follows the user's words: `[/INST]`."""
    final: str = ""
    """What the template writes after the last turn only, if it opens no answer, such as `<|endoftext|>`. The
    policy does not sample it: it has ended its turn."""
    lead: str = ""
    """What the template writes in a history between header and content of an answer, such as GLM's line feed:
    the policy samples this text, but it is not content. Empty if the text may be part of a content."""
    tail: str = ""
    """The same for the text between the content and the token that ends the last turn."""
    plain_lead: str = ""
    plain_tail: str = ""
    """`lead` and `tail` without special tokens."""
    arguments: _Arguments = "mapping"
    """The form in which the template reads a call's arguments. If it reads both, JSON text stays text."""
    call_content: str | None = ""
    """The content with which the template shows the tool calls of a message without text."""
    content: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Role -> forms of a content that the template writes: `text`, `parts` (of text), parts of type
    `thinking`; `parts` with `images` for a model that reads images. The role "" means all other roles."""
    shows_tools: bool = False
    shows_calls: bool = False
    system: Literal["shown", "ignored", "refused"] = "ignored"
    drops_reasoning: bool = True
    """Whether the template leaves out the text in `<think>` tags of earlier answers."""

    def ends_of(self, text: str) -> Iterable[re.Match[str]]:
        """Return the matches of end tokens in a text."""
        return self._pattern.finditer(text) if self._pattern else ()

    def is_closed(self, answer: str) -> bool:
        """Return whether the answer contains an end token with only white space after it."""
        return any(not answer[match.end() :].strip() for match in self.ends_of(answer))

    def content_of(self, answer: str, *, has_ended: bool) -> str:
        """Return the content of an answer to a prompt that opens a turn, without the token that ended it."""
        return (answer.removesuffix(self.tail) if has_ended else answer).removeprefix(self.lead)

    def end_at(self, text: str, place: int) -> str:
        """Return the end token at a place of a text; empty if there is none."""
        match = self._pattern.match(text, place) if self._pattern else None
        return match[0] if match else ""

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        return any_of(self.ends)

    def prepared(self, messages: Sequence[Message], special: re.Pattern[str] | None) -> list[dict[str, Any]]:
        """Return messages in the form that the template wants. `special`: finds special tokens, which
        become text; None to keep them. Raise ConfigError for parts that the template does not write."""
        return [self._prepared(message, number, special) for number, message in enumerate(messages, 1)]

    def _prepared(self, message: Message, number: int, special: re.Pattern[str] | None) -> dict[str, Any]:
        # Data libraries give every message the keys of all messages, with None where it had no such key.
        prepared: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
        if special is not None and not isinstance(message, OwnTurn):
            prepared = _cut(prepared, special)
        calls, place = prepared.pop("tool_calls", None), f"message {number} (role {prepared.get('role')!r})"
        if calls:
            prepared["tool_calls"] = [_with_arguments(call, self.arguments, place) for call in calls]
        content, role = prepared.get("content"), str(prepared.get("role"))
        forms = self.content.get(role) or self.content.get("", _TEXT)
        if isinstance(content, list) and "images" not in forms:
            content = _given(cast("list[Any]", content), forms, place)
        elif isinstance(content, str) and "text" not in forms:
            content = _in_parts(content)
        prepared["content"] = content or (self.call_content if calls else "")
        return prepared


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds these texts, the longest first; None if there are no texts."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def plain_text(text: str, mark: str = "") -> str:
    """Return a rendered text with `mark` in place of each mark of a special token that is text."""
    return text.replace(_CUT, mark)


def sections_of(text: str, special: re.Pattern[str] | None) -> list[tuple[str, bool]]:
    """Return the sections of a rendered text, each with True if special tokens in it are text."""
    if _CUT not in text or special is None:
        return [(plain_text(text), _CUT in text)] if text else []
    sections: list[tuple[str, bool]] = []
    for part in filter(None, re.split(f"({special.pattern})", text)):
        if _CUT not in part and sections and not sections[-1][1]:
            sections[-1] = (sections[-1][0] + part, False)
        else:
            sections.append((plain_text(part), _CUT in part))
    return sections


def opened_in(prompt: str | Sequence[Message], form: ChatForm) -> str:
    """Return the start of the answer that a prompt already contains: `form.opened` for messages and for a
    text with the header at its end; for any other text, the tag at its end."""
    if not isinstance(prompt, str) or (form.header and prompt.endswith(form.header)):
        return form.opened
    tags = [*_TAG.finditer(prompt)]
    return prompt[tags[-1].start() :] if tags and not prompt[tags[-1].end() :].strip() else ""


def form_of(
    render: _Render,
    *,
    added: Mapping[str, int],
    own_ends: frozenset[int],
    model_ends: frozenset[int],
    special: re.Pattern[str] | None,
    text_of: Callable[[int], str],
    in_parts: bool = False,
) -> ChatForm:
    """Find the chat form by rendering probes.

    Args:
        render: writes messages as the template does; raises ConfigError for those that it refuses.
        added: the ids of the tokenizer's added tokens by their texts.
        own_ends: the tokenizer's end-of-sequence token.
        model_ends: the tokens at which engines stop by themselves.
        special: pattern that finds special tokens in a text.
        in_parts: whether contents must be lists of parts, because some parts are images.
    """

    contents = {"": frozenset({"parts", "images"}) if in_parts else _TEXT}

    def probe(messages: Sequence[Message], tools: Sequence[Any] = (), *, opens: bool = False) -> str | None:
        try:
            return render([_wrapped(message, contents) for message in messages], tools, opens)
        except ConfigError:
            return None

    def find_forms(message: Message, before: Sequence[Message] = (), after: Sequence[Message] = ()) -> None:
        def writes(content: Any, *words: str) -> bool:
            text = probe([*before, {**message, "content": content}, *after]) or ""
            return all(word in text.lower() for word in words) and not _DATA.search(text)

        one, two = _in_parts(_RULE), _in_parts(_RULE, _MORE)
        found = {"text"} if writes(_RULE, _RULE) else set[str]()
        if in_parts:
            found = {"parts", "images"} if writes(one, _RULE) else found
        elif writes(two, _RULE, _MORE) if found else writes(one, _RULE):  # some write only the first part
            found.add("parts")
        thought = {"type": "thinking", "thinking": _RULE}
        if message["role"] == "assistant" and "parts" in found and writes([thought, *two[1:]], _RULE, _MORE):
            found.add("thinking")
        if found:
            contents[message["role"]] = frozenset(found)

    ask, reply, more = _user(_ASK), _assistant(_REPLY), _user(_MORE)
    find_forms(ask)
    find_forms({"role": "system"}, after=[ask])
    find_forms(reply, before=[ask])
    asked_text, prompt = probe([ask]) or "", probe([ask], opens=True) or ""
    last_text, inner_text = probe([ask, reply]) or "", probe([ask, reply, more]) or ""

    def token_at(text: str) -> str:
        return max(filter(text.lstrip().startswith, added), key=len, default="")

    def last_of(text: str) -> str:
        return max(
            filter(text.__contains__, added), key=lambda each: (text.rfind(each), len(each)), default=""
        )

    def end_in(text: str) -> tuple[str, str]:
        """Return the text before a turn's end token, and the token: the first at which engines stop; without
        one, the first special token; without any, two empty texts."""
        place, fallback = 0, ("", "")
        while token := token_at(text[place:]):
            start = text.index(token, place)
            if added[token] in own_ends | model_ends:
                return text[:start], token
            if not fallback[1]:
                fallback = text[:start], token
            place = start + len(token)
        return fallback

    inner_tail, inner_end = end_in(inner_text.partition(_REPLY)[2])
    before, found_end, final = last_text.partition(f"{_REPLY}{inner_tail}{inner_end}")
    final = final.lstrip()
    is_end = added.get(inner_end) in own_ends | model_ends
    # Engines stop before `final`, or it also follows the user's turn: then it is no part of an answer's end.
    if inner_end and final and (is_end or (asked_text.endswith(final) and not prompt.startswith(asked_text))):
        last_text, asked_text = before + found_end, asked_text.removesuffix(final)
    else:
        final = ""
    tail, last_end = end_in(last_text.partition(_REPLY)[2])
    if (
        inner_end
        and not last_end
        and inner_end == last_of(asked_text.partition(_ASK)[0])
        and added[inner_end] not in own_ends | model_ends
    ):
        inner_end = ""  # this token begins the user's turn, and engines do not stop at it
    written = [last_end, inner_end]
    last_end = last_end or inner_end
    closing = last_end or next((text_of(each) for each in own_ends), "")
    forms = {"mapping": {_KEY: _VALUE}, "text": json.dumps({_KEY: _VALUE})}
    calls = [  # some templates show calls only in messages without content
        (form, content)
        for content in ("", None)
        for form, arguments in forms.items()
        if _shows(probe([ask, _calling(arguments, content)]))
    ]
    form, call_content = calls[0] if calls else ("mapping", "")
    argument_form = "mapping or text" if form == "mapping" and ("text", call_content) in calls else form
    calling = _calling(forms[form], call_content)
    call_text = (probe([ask, calling]) or "").removesuffix(final).rstrip()
    find_forms({**_RESULT, "name": _TOOL}, before=[ask, calling])
    if not any("text" in each for role, each in contents.items() if role):
        contents[""] = contents.get("user", contents[""])
    replied = probe([ask, calling, {**_RESULT, "content": _MORE}]) or ""
    next_role = token_at(replied[len(call_text) :]) if call_text and replied.startswith(call_text) else ""
    found = {added[token] for token in written if token}
    lead = last_text[len(prompt) :].partition(_REPLY)[0] if prompt and last_text.startswith(prompt) else ""
    doubled = probe([ask, _assistant(f"{lead}{_REPLY}"), more]) if lead.strip() else None
    if doubled is not None and f"{lead}{lead}{_REPLY}" not in doubled:
        lead = ""  # the template does not repeat it when a content begins with it
    doubled = probe([ask, _assistant(f"{_REPLY}{tail}")]) if tail.strip() else None
    if doubled is not None and f"{_REPLY}{tail}{tail}" not in doubled:
        tail = ""
    end_ids = frozenset(found | own_ends | model_ends)
    ends = tuple(filter(None, map(text_of, sorted(end_ids))))
    ends_call = next(filter(call_text.endswith, ends), "") or (next_role if next_role in ends else "")
    system_text = probe([{"role": "system", "content": _RULE}, ask])
    thought = probe([ask, _assistant(f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}"), more])
    tool = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
    # A template may write the user's words differently when it opens an answer.
    header = prompt.removeprefix(asked_text) if prompt.startswith(asked_text) else prompt.rpartition(_ASK)[2]
    return ChatForm(
        has_template=True,
        end_ids=end_ids,
        # Not the end token of earlier turns, which may be inside an answer: it ends gpt-oss's reasoning.
        stop_ids=(added[last_end],) if last_end and added[last_end] not in model_ends else (),
        ends=ends,
        closing=closing,
        writes_end=bool(last_end),
        call_closing=ends_call or closing,
        opened=_opened(prompt, [last_text, inner_text]),
        header=header,
        opening=(header or asked_text.partition(_ASK)[2]).lstrip(),
        final=final,
        lead=lead,
        tail=tail,
        plain_lead=special.sub("", lead) if special else lead,
        plain_tail=special.sub("", tail) if special else tail,
        arguments=cast("_Arguments", argument_form),
        call_content=call_content,
        content=contents,
        shows_tools=_TOOL in (probe([ask], [{"type": "function", "function": tool}]) or ""),
        shows_calls=bool(calls),
        system="refused" if system_text is None else "shown" if _RULE in system_text else "ignored",
        drops_reasoning=_THOUGHT not in (thought or ""),
    )


def _in_parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _wrapped(message: Message, forms: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    content, kinds = message["content"], forms.get(message["role"]) or forms[""]
    wraps = isinstance(content, str) and content and "text" not in kinds
    return {**message, "content": _in_parts(content) if wraps else content}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _calling(arguments: Any, content: str | None) -> Message:
    function = {"name": _TOOL, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _shows(text: str | None) -> bool:
    """Whether a text shows the probe call's arguments as JSON: not as Python data, and not quoted twice."""
    return text is not None and _VALUE in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text


def _opened(prompt: str, answered: Sequence[str]) -> str:
    """Return the text that only the generation prompt writes, from its first tag on."""
    heads = [text.partition(_REPLY)[0] for text in answered if _REPLY in text]
    place = min((_same(prompt, head) for head in heads), default=len(prompt))
    place -= prompt[:place].endswith(("<", "["))  # the history has another tag here, such as a closing tag
    tag = _TAG.search(prompt, max(place, prompt.rfind(_ASK) + len(_ASK)))
    return prompt[tag.start() :] if tag else ""


def _same(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _with_arguments(call: Any, form: _Arguments, place: str) -> Any:
    """Return a tool call with its arguments in the form that the template reads: a mapping, JSON text, or
    either. Arguments that are no JSON object stay unchanged."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    function = dict(cast("Mapping[str, Any]", function))
    arguments = function["arguments"]
    if isinstance(arguments, str) and (form == "mapping" or (form != "text" and not arguments.strip())):
        try:
            value = json.loads(arguments or "{}", object_pairs_hook=partial(_without_duplicates, place))
        except ValueError:
            value = None
        function["arguments"] = value if isinstance(value, dict) else arguments
    elif form == "text" and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": function} if "function" in call else function


def _without_duplicates(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    arguments = dict(pairs)
    if len(arguments) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"{place}: the arguments of a tool call have a key twice; found the keys {keys}")
    return arguments


def _given(parts: Sequence[Any], forms: frozenset[str], place: str) -> str | list[dict[str, Any]]:
    """Return a content of parts as the template reads it: as one text if the template reads no parts."""
    result: list[dict[str, Any]] = []
    for part in parts:
        item: dict[str, Any] = (
            dict(cast("Mapping[str, Any]", part)) if isinstance(part, Mapping) else {"text": part}
        )
        if isinstance(item.get("text"), str):
            item["type"] = "text"
        elif not (
            "thinking" in forms and item.get("type") == "thinking" and isinstance(item.get("thinking"), str)
        ):
            kind = item.get("type") if isinstance(part, Mapping) else part
            raise ConfigError(f"{place} has a part of the type {kind!r}, and the model reads only text")
        result.append(item)
    return result if "parts" in forms else "".join(part["text"] for part in result)


def _cut(value: Any, special: re.Pattern[str]) -> Any:
    """Return plain data in which marks (`_CUT`) split the text of each special token."""
    if isinstance(value, str):
        if _CUT in value:
            raise ConfigError("a message has the character U+FDD0, which is none of Unicode: leave it out")
        return special.sub(lambda found: found[0][0] + _CUT + found[0][1:] + _CUT, value)
    if isinstance(value, Mapping):
        return {
            _cut(key, special): _cut(item, special) for key, item in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return [_cut(item, special) for item in cast("Sequence[Any]", value)]
    return value
