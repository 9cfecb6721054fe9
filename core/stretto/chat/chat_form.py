"""The chat form of a model: what its chat template, tokenizer and generation config make of a turn.

`form_of` finds it once for each tokenizer: it renders short chats and looks for their words in the text.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, cast

from stretto.chat.calls import (
    A_CALL,
    A_TOOL,
    REPLY,
    Call,
    CallFormat,
    Parse,
    ToolCall,
    format_of,
    same_start,
    whole_tags,
)
from stretto.chat.stored import A_QUESTION, StoredForm, stored_form
from stretto.dataset import Message, OwnTurn, object_of
from stretto.errors import ConfigError
from stretto.reward import REASONING_WORDS

__all__ = ["ChatForm", "any_of", "form_of", "opened_in", "plain_text", "sections_of"]

_Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, whether to open the answer -> the text that the template writes."""

_Arguments = Literal["mapping", "text", "mapping or text"]

_CUT = "\ufdd0"
"""Mark after the first and the last character of a special token that is text. No Unicode character."""
_TAG = re.compile(r"<[A-Za-z_][\w:-]*>|\[[A-Z_]+\]")
"""A tag that opens a part of an answer, such as `<think>` or `[THINK]`."""
_OF_REASONING = re.compile(rf"[<\[◁][^\s<\[◁/]*(?:{REASONING_WORDS})", re.IGNORECASE)
"""The start of reasoning in other tags too: `<|START_THINKING|>`, `<|channel>thought`, `<|open|>think`."""

_DATA = re.compile(r"""type(\\?['"]|&[#\w]+;): *\1t(ext|hinking|houghts)""", re.IGNORECASE)
"""Finds content parts that a template wrote as Python or JSON data, not as text."""

_MORE, _RULE = "probemore", "proberule"
_TOOL, [(_KEY, _VALUE)] = A_CALL[0], A_CALL[1].items()
_ASKED, _ASK = A_QUESTION, A_QUESTION["content"]
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
    inner_end: str = ""
    """The token that the template writes at the end of earlier turns, if no engine stops at it."""
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
    call: str = ""
    """An answer that is `calls.A_CALL`, as the template writes it; empty if it shows no calls."""
    calls: CallFormat | None = None
    """The format of the calls that the template writes; None if it shows none, or none that can be read."""
    system: Literal["shown", "ignored", "refused"] = "ignored"
    stored: StoredForm = field(default_factory=StoredForm)
    """The form in which the template takes back answers."""

    def ends_of(self, text: str) -> Iterable[re.Match[str]]:
        """Return the matches of end tokens in a text."""
        return self._pattern.finditer(text)

    def is_closed(self, answer: str) -> bool:
        """Return whether the answer contains an end token with only white space after it."""
        return any(not answer[match.end() :].strip() for match in self.ends_of(answer))

    def content_of(self, answer: str, *, has_ended: bool) -> str:
        """Return the content of an answer to a prompt that opens a turn, without the token that ended it."""
        return (answer.removesuffix(self.tail) if has_ended else answer).removeprefix(self.lead)

    def end_at(self, text: str, place: int) -> str:
        """Return the end token at a place of a text; empty if there is none."""
        match = self._pattern.match(text, place)
        return match[0] if match else ""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
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


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds these texts, the longest first; nothing if there are no texts."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def plain_text(text: str, mark: str = "") -> str:
    """Return a rendered text with `mark` in place of each mark of a special token that is text."""
    return text.replace(_CUT, mark)


def sections_of(text: str, special: re.Pattern[str]) -> list[tuple[str, bool]]:
    """Return the sections of a rendered text, each with True if special tokens in it are text."""
    if _CUT not in text:
        return [(text, False)] if text else []
    sections: list[tuple[str, bool]] = []
    for part in filter(None, re.split(f"({special.pattern})", text)):
        if _CUT not in part and sections and not sections[-1][1]:
            sections[-1] = (sections[-1][0] + part, False)
        else:
            sections.append((plain_text(part), _CUT in part))
    return sections


def opened_in(prompt: str, form: ChatForm) -> str:
    """Return the start of the answer that a prompt already contains: `form.opened`, or its first tags; if the
    prompt ends with none of these, the tag at its end."""
    if form.header and prompt.endswith(form.header):
        return form.opened
    if opened := form.stored.opened_in(prompt):
        return opened
    tags = [*_TAG.finditer(prompt)]
    return prompt[tags[-1].start() :] if tags and not prompt[tags[-1].end() :].strip() else ""


def form_of(
    render: _Render,
    *,
    added: Mapping[str, int],
    own_ends: frozenset[int],
    model_ends: frozenset[int],
    special: re.Pattern[str],
    text_of: Callable[[int], str],
    in_parts: bool = False,
    parse: Parse | None = None,
) -> ChatForm:
    """Find the chat form by rendering probes.

    Args:
        render: writes messages as the template does; raises ConfigError for those that it refuses.
        added: the ids of the tokenizer's added tokens by their texts.
        own_ends: the tokenizer's end-of-sequence token.
        model_ends: the tokens at which engines stop by themselves.
        special: pattern that finds special tokens in a text.
        in_parts: whether contents must be lists of parts, because some parts are images.
        parse: the checkpoint's own parser of answers.
    """
    probe = _TemplateProbe(render, added, own_ends | model_ends, in_parts)
    turns = _turns(probe)
    last_end = turns.last_end or turns.inner_end
    end_ids = own_ends | model_ends | ({added[last_end]} if last_end else set())
    ends = tuple(filter(None, map(text_of, sorted(end_ids))))
    calls = _calls(probe, turns, any_of(ends), parse)
    opened = _opened(turns)
    lead, tail = _repeated(probe, turns, opened)
    closing = last_end or next((text_of(each) for each in own_ends), "")
    call_end = next(filter(calls.text.endswith, ends), "") or (
        calls.next_role if calls.next_role in ends else ""
    )
    system_text = probe.text([{"role": "system", "content": _RULE}, _ASKED])
    form = ChatForm(
        has_template=True,
        end_ids=end_ids,
        # Not the end token of earlier turns, which may be inside an answer: it ends gpt-oss's reasoning.
        stop_ids=(added[last_end],) if last_end and added[last_end] not in model_ends else (),
        ends=ends,
        closing=closing,
        inner_end="" if added.get(turns.inner_end) in end_ids else turns.inner_end,
        writes_end=bool(last_end),
        call_closing=call_end or closing,
        opened=opened,
        header=turns.header,
        opening=(turns.header or turns.asked.partition(_ASK)[2]).lstrip(),
        final=turns.final,
        lead=lead,
        tail=tail,
        plain_lead=special.sub("", lead),
        plain_tail=special.sub("", tail),
        arguments=calls.arguments,
        call_content=calls.content,
        content=probe.contents,
        shows_tools=_TOOL in (probe.text([_ASKED], [A_TOOL]) or ""),
        shows_calls=calls.shown,
        call=calls.sampled,
        calls=calls.format,
        system="refused" if system_text is None else "shown" if _RULE in system_text else "ignored",
    )

    def written(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], opens: bool) -> str:
        try:
            text = probe.text(form.prepared(messages, None), tools, opens=opens) or ""
        except ConfigError:  # parts that the template does not write
            return ""
        if _DATA.search(text):  # a content as data, which no model reads
            return ""
        return text if opens else text.removesuffix(turns.final)

    calling, result = _calling({_KEY: _VALUE}, ""), {**_RESULT, "name": _TOOL, "content": _MORE}
    pattern, turns_of_call = any_of(ends), [calling, result]
    stored = stored_form(written, opened, lead, tail, pattern, form.calls, form.call, turns_of_call)
    return replace(form, stored=stored)


class _TemplateProbe:
    """Renders short chats, and finds added tokens in their texts."""

    def __init__(
        self, render: _Render, added: Mapping[str, int], engine_ends: frozenset[int], in_parts: bool
    ) -> None:
        self._render, self._added, self._engine_ends = render, added, engine_ends
        self._visible_tokens = any_of(token for token in added if token.strip())
        self._in_parts = in_parts
        self.contents = {"": frozenset({"parts", "images"}) if in_parts else _TEXT}
        """`ChatForm.content`, as far as it is known."""
        self.tools: Sequence[Any] = ()
        """Tools of all chats: none, unless the template refuses a chat without."""
        self.tools = () if self.text([_ASKED]) is not None else [A_TOOL]

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opens: bool = False
    ) -> str | None:
        """Return what the template writes; None for messages that it refuses."""
        try:
            chat = [_wrapped(message, self.contents) for message in messages]
            return self._render(chat, tools or self.tools, opens)
        except ConfigError:
            return None

    def find_contents(
        self, message: Message, before: Sequence[Message] = (), after: Sequence[Message] = ()
    ) -> None:
        """Find the forms of a content that the template writes for the role of this message."""

        def writes(content: Any, *words: str) -> bool:
            text = self.text([*before, {**message, "content": content}, *after]) or ""
            return all(word in text.lower() for word in words) and not _DATA.search(text)

        one, two = _in_parts(_RULE), _in_parts(_RULE, _MORE)
        found = {"text"} if writes(_RULE, _RULE) else set[str]()
        if self._in_parts:
            found = {"parts", "images"} if writes(one, _RULE) else found
        elif writes(two, _RULE, _MORE) if found else writes(one, _RULE):  # some write only the first part
            found.add("parts")
        thought = {"type": "thinking", "thinking": _RULE}
        if message["role"] == "assistant" and "parts" in found and writes([thought, *two[1:]], _RULE, _MORE):
            found.add("thinking")
        if found:
            self.contents[message["role"]] = frozenset(found)

    def token_at(self, text: str) -> str:
        """Return the added token at the start of a text, after white space; empty if there is none."""
        return max(filter(text.lstrip().startswith, self._added), key=len, default="")

    def last_token(self, text: str) -> str:
        """Return the last added token in a text; empty if there is none."""
        inside = filter(text.__contains__, self._added)
        return max(inside, key=lambda each: (text.rfind(each), len(each)), default="")

    def stops(self, token: str) -> bool:
        """Return whether engines stop at a token by themselves."""
        return self._added.get(token) in self._engine_ends

    def end_in(self, text: str, shared: int) -> tuple[str, str]:
        """Return the text before a turn's end token, and the token: the first at which engines stop; without
        one, the first special token; without any, two empty texts. Visible text before it, such as
        `</answer>`, has to be in the `shared` first characters, which follow the content of every turn."""
        place, fallback = 0, ("", "")
        for found in self._visible_tokens.finditer(text):
            if text[place : found.start()].strip() and found.start() > shared:
                break
            if self.stops(found[0]):
                return text[: found.start()], found[0]
            fallback = fallback if fallback[1] else (text[: found.start()], found[0])
            place = found.end()
        return fallback


@dataclass(frozen=True)
class _Turns:
    """What the template writes around a question and an answer."""

    asked: str
    """A chat with a question, without `final`."""
    prompt: str
    """The same when it opens an answer."""
    last: str
    """A chat that ends with an answer, without `final`."""
    inner: str
    """A chat with a second question after the answer."""
    final: str
    """`ChatForm.final`."""
    tail: str
    """The text between the last answer and its end token."""
    last_end: str
    inner_end: str
    """The end tokens of the last answer and of an earlier one; empty if there is none."""

    @property
    def header(self) -> str:
        """`ChatForm.header`."""
        if self.prompt.startswith(self.asked):
            return self.prompt.removeprefix(self.asked)
        # A template may write the user's words differently when it opens an answer.
        return self.prompt.rpartition(_ASK)[2]


def _turns(probe: _TemplateProbe) -> _Turns:
    """Find how answers begin and end, after the forms of the contents of users, systems and assistants."""
    reply, more = _assistant(REPLY), _user(_MORE)
    probe.find_contents(_ASKED)
    probe.find_contents({"role": "system"}, after=[_ASKED])
    probe.find_contents(reply, before=[_ASKED])
    asked, prompt = probe.text([_ASKED]) or "", probe.text([_ASKED], opens=True) or ""
    last, inner = probe.text([_ASKED, reply]) or "", probe.text([_ASKED, reply, more]) or ""
    last_rest, inner_rest = last.partition(REPLY)[2], inner.partition(REPLY)[2].partition(_MORE)[0]
    shared = same_start(last_rest, inner_rest)
    inner_tail, inner_end = probe.end_in(inner_rest, shared)
    before, found_end, final = last.partition(f"{REPLY}{inner_tail}{inner_end}")
    final = final.lstrip()
    follows_users = asked.endswith(final) and not prompt.startswith(asked)
    # Engines stop before `final`, or it also follows the user's turn: then it is no part of an answer's end.
    if inner_end and final and (probe.stops(inner_end) or follows_users):
        last, asked = before + found_end, asked.removesuffix(final)
    else:
        final = ""
    last_rest = last.partition(REPLY)[2]
    tail, last_end = probe.end_in(last_rest, len(last_rest))  # all of it belongs to the answer
    if not last_end and last_rest.strip() and inner_rest.startswith(last_rest):
        tail = last_rest.rstrip()  # the template closes a turn with visible text alone
    begins_users = inner_end and inner_end == probe.last_token(asked.partition(_ASK)[0])
    if begins_users and not last_end and not probe.stops(inner_end):
        inner_end = ""  # this token begins the user's turn, and engines do not stop at it
    return _Turns(asked, prompt, last, inner, final, tail, last_end, inner_end)


@dataclass(frozen=True)
class _Calls:
    """How the template writes an answer with a tool call."""

    shown: bool
    arguments: _Arguments
    content: str | None
    """`ChatForm.call_content`."""
    text: str
    """A chat that ends with the call."""
    next_role: str
    """The token that begins the turn of the tool's result."""
    sampled: str
    """`ChatForm.call`."""
    format: CallFormat | None
    """`ChatForm.calls`."""


def _calls(probe: _TemplateProbe, turns: _Turns, ends: re.Pattern[str], parse: Parse | None) -> _Calls:
    """Find how calls are written, after the form of the content of a tool's result."""
    forms = {"mapping": {_KEY: _VALUE}, "text": json.dumps({_KEY: _VALUE})}
    of_others, shown = probe.tools, list[tuple[str, str | None]]()
    # Some choose a template by tools, some refuse the probe's.
    for shows, probe.tools in product((_shows_json, _shows), ([A_TOOL], of_others)):
        shown = [  # some templates show calls only in messages without content
            (form, content)
            for content in ("", None)
            for form, arguments in forms.items()
            if shows(probe.text([_ASKED, _calling(arguments, content)]) or "")
        ]
        if shown:
            break
    form, content = shown[0] if shown else ("mapping", "")
    arguments = "mapping or text" if form == "mapping" and ("text", content) in shown else form
    calling = _calling(forms[form], content)
    text = (probe.text([_ASKED, calling]) or "").removesuffix(turns.final).rstrip()
    probe.find_contents({**_RESULT, "name": _TOOL}, before=[_ASKED, calling])
    contents = probe.contents
    if not any("text" in each for role, each in contents.items() if role):
        contents[""] = contents.get("user", contents[""])
    replied = probe.text([_ASKED, calling, {**_RESULT, "content": _MORE}]) or ""
    next_role = probe.token_at(replied[len(text) :]) if text and replied.startswith(text) else ""
    prompt, plain = probe.text([_ASKED], opens=True) or "", probe.text([_ASKED, _assistant(REPLY)]) or ""

    def turn(calls: Sequence[Call], before: str) -> str:
        made = [(name, json.dumps(each) if form == "text" else each) for name, each in calls]
        answer = _calling_all(made, before or content) if calls else _assistant(before)
        written = (probe.text([_ASKED, answer]) or "").removesuffix(turns.final)
        if written.startswith(prompt):
            return written[len(prompt) :]
        # The template opens a turn in another way than it writes one: leave out what is before any answer.
        return written[len(whole_tags(written[: same_start(written, plain.partition(REPLY)[0])])) :]

    def write(calls: Sequence[Call], before: str) -> str:
        return ends.split(turn(calls, before), 1)[0]

    found = _Calls(
        shown=bool(shown),
        arguments=cast("_Arguments", arguments),
        content=content,
        text=text,
        next_role=next_role,
        sampled=turn([A_CALL], "") if shown else "",
        format=format_of(write, parse) if shown else None,
    )
    probe.tools = of_others
    return found


def _repeated(probe: _TemplateProbe, turns: _Turns, opened: str) -> tuple[str, str]:
    """Return `ChatForm.lead` and `tail`: empty if the template does not repeat them when the content of a
    message begins or ends with them, as then they may be part of a content."""
    prompt, last, tail = turns.prompt, turns.last, turns.tail
    heads = [head for head in (prompt, prompt.removesuffix(opened)) if head and last.startswith(head)]
    lead = last[len(heads[0]) :].partition(REPLY)[0] if heads else ""
    if opened and re.match(r"\s*[<\[]\W*/", lead):
        lead = ""  # the end of the block that the prompt opens
    if heads and heads[0] != prompt and re.search(REASONING_WORDS, lead, re.IGNORECASE):
        lead = ""  # the end of the block that the prompt opens and closes

    def repeats(written: str, *chat: Message) -> bool:  # some strip the content
        text = probe.text([_ASKED, *chat])
        return text is None or "".join(written.split()) in "".join(text.split())

    if lead.strip() and not repeats(f"{lead}{lead}{REPLY}", _assistant(f"{lead}{REPLY}")):
        lead = ""
    if tail.strip() and not repeats(f"{REPLY}{tail}{tail}", _assistant(f"{REPLY}{tail}")):
        tail = ""
    return lead, tail


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
    return _calling_all([(_TOOL, arguments)], content)


def _calling_all(calls: Sequence[tuple[str, Any]], content: str | None) -> Message:
    made = [ToolCall(name, each, id=f"call{at:05}").data for at, (name, each) in enumerate(calls, 1)]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _shows(text: str) -> bool:
    return _TOOL in text and _VALUE in text


def _shows_json(text: str) -> bool:
    """Whether a text shows the probe call's arguments as JSON: not as Python data, and not quoted twice."""
    return _VALUE in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text


def _opened(turns: _Turns) -> str:
    """Return what the generation prompt writes from the first tag on that no history has, else from the first
    tag of reasoning on: a history may have an empty block there."""
    prompt, header = turns.prompt, turns.header
    begin = len(prompt) - len(header)

    def shared(head: str) -> int:
        if (place := same_start(prompt, head)) >= begin:
            return place
        # The template writes the question in another way once it is answered.
        rest = head.rpartition(_ASK)[2]
        return begin + next(size for size in range(len(header), -1, -1) if header[:size] in rest)

    heads = [text.partition(REPLY)[0] for text in (turns.last, turns.inner) if REPLY in text]
    place = min(map(shared, heads), default=len(prompt))
    place -= prompt[:place].endswith(("<", "["))  # the history has another tag here, such as a closing tag
    tag = _TAG.search(prompt, max(place, prompt.rfind(_ASK) + len(_ASK)))
    thought = _OF_REASONING.search(prompt, begin)
    lead = turns.last.removeprefix(prompt) if turns.last.startswith(prompt) else ""
    if closes := re.match(r"\s*[<\[]\W*/([\w:-]+)\W*[>\]]", lead.partition(REPLY)[0]):
        thought = re.compile(rf"[<\[]\W*{closes[1]}\b[^<>\[\]]*[>\]]\s*\Z").search(prompt, begin) or thought
    if starts := [found.start() for found in (tag, thought) if found]:
        return prompt[min(starts) :]
    # A template may open reasoning with words alone.
    return prompt[place:] if re.search(REASONING_WORDS, prompt[place:], re.IGNORECASE) else ""


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
            value = json.loads(arguments or "{}", object_pairs_hook=object_of)
        except ValueError:
            value = None
        except ConfigError as error:
            raise ConfigError(f"{place}: the arguments of a tool call: {error}") from error
        function["arguments"] = value if isinstance(value, dict) else arguments
    elif form == "text" and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": function} if "function" in call else function


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
