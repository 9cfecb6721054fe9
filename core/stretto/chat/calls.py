"""Formats in which policies write tool calls, and how each is read.

A *named* format is known beforehand. Any other format is read from the chat template (`format_of`): it writes
calls whose names, keys and values are known, so the texts between these are those of the format. A format
that does not read back each of these calls is not used.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from typing import Any, Literal, cast

import msgspec

from stretto.dataset import object_of
from stretto.errors import ConfigError

__all__ = [
    "A_CALL",
    "A_TOOL",
    "NAMED",
    "Call",
    "CallFormat",
    "ParserName",
    "ToolCall",
    "format_of",
]

ParserName = Literal["auto", "hermes", "llama3", "mistral", "harmony", "gemma4", "python"]
Call = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions."""
_Found = tuple[int, "list[ToolCall]"]
"""The index in a text at which the first call begins, and the calls."""
_Read = Callable[[str, Tools], _Found]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an answer of the policy."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    """Why the call cannot be made, as text for the policy; empty if it can."""
    id: str = ""
    """Id of the call, if the policy wrote one; otherwise empty."""

    @property
    def data(self) -> dict[str, Any]:
        """The call in a message's `tool_calls`, as in OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls."""

    name: str
    """The name in the config, or `template`."""
    marks: tuple[str, ...]
    """Texts with which calls begin."""
    read: _Read
    lead: str = ""
    """What the template writes between a text and a call: no part of the text."""

    def split(self, text: str, end: int | None = 0, tools: Tools = ()) -> tuple[str, list[ToolCall]]:
        """Return the text before the first call of an answer, and all calls. A call that cannot be read has a
        `fault`.

        Args:
            text: text of the answer, including special tokens.
            end: the place behind its reasoning, in which calls do not count; None if it never ended.
            tools: schemas of the tools. Formats that write all values as text take the types from these.
        """
        start, calls = (0, []) if end is None else self.read(text[end:], tools)
        if not calls:
            return text, calls
        behind = text[end:][:start]
        return text[:end] + (behind.removesuffix(self.lead) if behind.strip() else behind), calls


# ------------------------------------------------------------------------------------ named formats


def _hermes(text: str, tools: Tools) -> list[ToolCall]:
    """Read `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes write it."""
    return [_call_in(part) for part in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def _llama3(text: str, tools: Tools) -> list[ToolCall]:
    """Read an answer that is `{"name": …, "parameters": {…}}`, or several of these with `;` between them."""
    text = re.sub(r"<\|(python_tag|eom_id|eot_id)\|>", "", text).strip()
    if not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', text):
        return []
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        try:
            value, at = _json(text, at)
        except ValueError as error:
            return [*calls, _faulty(f"the call is not valid JSON: {error}")]
        calls.append(_call_of(value))
        at = cast("re.Match[str]", re.compile(r"[; \n\t]*").match(text, at)).end()
    return calls


def _mistral(text: str, tools: Tools) -> list[ToolCall]:
    """Read `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or from newer models
    one `[TOOL_CALLS]name[ARGS]{…}` for each call."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        part = part.removesuffix("</s>").strip()
        if call := re.match(r"([\w.-]+)(?:\[CALL_ID\]\s*(\w+))?\[ARGS\](.*)", part, re.DOTALL):
            name, id, arguments = call.groups()
            calls.append(_call_in(f'{{"name": "{name}", "id": "{id or ""}", "arguments": {arguments}}}'))
            continue
        try:
            value, _ = _json(part)
        except ValueError as error:
            calls.append(_faulty(f"the calls are not valid JSON: {error}"))
            continue
        calls += [
            _call_of(item) for item in (cast("list[Any]", value) if isinstance(value, list) else [value])
        ]
    return calls


def _harmony(text: str, tools: Tools) -> list[ToolCall]:
    """Read messages of gpt-oss to a function, which name it before or behind the channel:
    `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`."""
    header = r"to=functions\.([^\s<]+)(?:[^<{]|<\|(?:channel|constrain)\|>)*<\|message\|>"
    return [_call_with(found[1], text, found.end()) for found in re.finditer(header, text)]


def _gemma4(text: str, tools: Tools) -> list[ToolCall]:
    """Read `<|tool_call>call:name{key:3,other:<|"|>text<|"|>}<tool_call|>`."""
    found = re.findall(r"<\|tool_call>(?:call:([^\s{<]+))?(.*?)(?:<tool_call\|>|\Z)", text, re.DOTALL)
    broken = _faulty('a call is written as <|tool_call>call:name{key:3,other:<|"|>text<|"|>}<tool_call|>')
    return [_call_with(name, _gemma4_json(arguments)) if name else broken for name, arguments in found]


def _gemma4_json(arguments: str) -> str:
    def plain(text: str) -> str:
        text = re.sub(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:', r'\1"\2":', text)
        names = {"None": "null", "True": "true", "False": "false"}
        return re.sub(r"(?<=[:,\[])\s*(None|True|False)\b", lambda found: names[found[1]], text)

    parts = arguments.split('<|"|>')
    return "".join(json.dumps(part) if number % 2 else plain(part) for number, part in enumerate(parts))


_PYTHON = re.compile(
    r"(?:<\|tool_call_start\|>|\A\s*(?=\[\s*[A-Za-z_][\w.]*\())(.*?)(?:<\|tool_call_end\|>|\Z)", re.DOTALL
)
_MOST_PYTHON = 50_000
"""Characters of a list of Python calls. Python's parser needs up to 3 µs and 1 KiB for each."""


def _python(text: str, tools: Tools) -> list[ToolCall]:
    """Read a list of Python calls with constants as arguments, `[name(key=3, other='text')]`, alone or
    between `<|tool_call_start|>` and `<|tool_call_end|>`."""
    return [call for found in _PYTHON.finditer(text) for call in _python_calls(found[1].strip())]


def _python_calls(source: str) -> list[ToolCall]:
    expected = "expected a list of Python calls with constants as named arguments, such as [name(key='text')]"
    if len(source) > _MOST_PYTHON:
        return [_faulty(f"the calls have {len(source)} characters; expected at most {_MOST_PYTHON}")]
    try:
        tree = ast.parse(source, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [
            ToolCall(ast.unparse(cast("ast.Call", node).func), dict(_keywords(cast("ast.Call", node))))
            for node in nodes
        ]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        return [_faulty(f"the calls are not valid Python: {error}; {expected}")]


def _keywords(call: ast.Call) -> Iterator[tuple[str, Any]]:
    names = [keyword.arg for keyword in call.keywords]
    if call.args or None in names or len({*names}) < len(names):
        raise ValueError("an argument has no name, or one that is given twice")
    for keyword in call.keywords:
        value = json.dumps(ast.literal_eval(_WithJSONNames().visit(keyword.value)), ensure_ascii=False)
        value.encode()
        yield cast("str", keyword.arg), json.loads(value)


class _WithJSONNames(ast.NodeTransformer):
    """Replaces `true`, `false` and `null`, which templates write inside of Python's lists."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _call_in(text: str) -> ToolCall:
    try:
        return _call_of(_json(text.strip())[0])
    except ValueError as error:
        return _faulty(f"the call is not valid JSON: {error}")


def _call_with(name: str, text: str, at: int = 0) -> ToolCall:
    """Return the call of a function with the JSON object at a place of a text."""
    try:
        return _call_of({"name": name, "arguments": _json(text, at)[0]})
    except ValueError as error:
        return _faulty(f"the arguments are not valid JSON: {error}", name)


def _json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at a place of a text, and the place behind it. Raise ValueError if there is no
    JSON value, an object has a key twice, or it cannot be encoded as UTF-8."""
    at += len(text[at : at + 1000]) - len(text[at : at + 1000].lstrip())
    try:
        value, end = json.JSONDecoder(object_pairs_hook=object_of).raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value, end


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _faulty('a call is a JSON object with "name" and "arguments"')
    call = cast("dict[str, Any]", value)
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as text that is JSON
        try:
            arguments, _ = _json(arguments)
        except ValueError as error:
            return _faulty(f"the arguments are not valid JSON: {error}", call["name"])
    if not isinstance(arguments, dict):
        return _faulty("the arguments are not a JSON object", call["name"])
    return ToolCall(call["name"], cast("dict[str, Any]", arguments), id=str(call.get("id", "")))


def _faulty(fault: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, fault)


def _named(name: str, parse: Callable[[str, Tools], list[ToolCall]], *marks: str) -> CallFormat:
    def read(text: str, tools: Tools) -> _Found:
        return min((at for mark in marks if (at := text.find(mark)) >= 0), default=0), parse(text, tools)

    return CallFormat(name, marks, read)


NAMED: Mapping[str, CallFormat] = {
    each.name: each
    for each in (
        _named("hermes", _hermes, "<tool_call>"),
        _named("llama3", _llama3, "<|python_tag|>", "{"),
        _named("mistral", _mistral, "[TOOL_CALLS]"),
        _named(
            "harmony",
            _harmony,
            "<|start|>assistant<|channel|>commentary to=",
            "<|channel|>commentary to=",
            " to=functions.",
        ),
        _named("gemma4", _gemma4, "<|tool_call>"),
        _named("python", _python, "<|tool_call_start|>", "["),
    )
}

# ------------------------------------------------------------------------- formats of chat templates

_TOOL, _TOOL2 = "probetool", "probeothertool"
_KEY, _KEY2, _VALUE, _VALUE2 = "probekey", "probeotherkey", "probevalue", "probeothervalue"
_ID = "call0000"
REPLY = "probereply"
_KINDS = {
    "k_text": "string",
    "k_number": "number",
    "k_bool": "boolean",
    "k_list": "array",
    "k_object": "object",
}
_PROPERTIES = {key: {"type": kind} for key, kind in _KINDS.items()}
_SCHEMAS = [{"function": {"name": _TOOL, "parameters": {"type": "object", "properties": _PROPERTIES}}}]
A_CALL: Call = (_TOOL, {_KEY: _VALUE})
"""A call of probes."""
A_TOOL = {
    "type": "function",
    "function": {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""A tool of probes."""
_TEXT = """a "b" <c>d</c> [e] {f: 'g'}\n\n  h\té–☃"""
_PROBES: Sequence[Sequence[Call]] = (
    [(_TOOL, {})],
    [(_TOOL, {_KEY: _VALUE, _KEY2: _VALUE2})],
    [A_CALL, (_TOOL2, {})],
    [(_TOOL, {}), (_TOOL2, {_KEY2: _VALUE2})],
    [(_TOOL, {"k_text": _TEXT, "k_number": 3, "k_bool": True, "k_list": [1, "x"], "k_object": {"k": "v"}})],
    [(_TOOL, {"k_number": 0.5, "k_text": "3"})],
)

Write = Callable[[Sequence[Call], str], str]
"""Calls, and the text before them -> the answer with these that the template writes, without the token that
ends it; empty if the template refuses them."""


Parse = Callable[[str, Tools], Mapping[str, Any]]
"""An answer, and tools -> its message, with `tool_calls`; raises ValueError if it cannot be read."""


def format_of(write: Write, parse: Parse | None = None) -> CallFormat | None:
    """Return the format of the calls that a chat template writes: the first of the named formats that reads
    one, else the one that is read from the template, else that of the checkpoint's own parser, `parse`. None
    if its calls do not come back."""
    one = write([A_CALL], "")
    for named in NAMED.values():
        if _plain(named.split(one)[1]) == [A_CALL]:
            return _with_lead(named, write)
    if one and (derived := _derived(write)):
        _, of_null = derived.read(write([(_TOOL, {_KEY: None})], ""), ())
        word = of_null[0].arguments.get(_KEY) if of_null else None
        if isinstance(word, str) and word:  # such as Python's None
            derived = replace(derived, null=word)
        found = CallFormat("template", (derived.mark,), derived.read)
        if _all_come_back(found, write):
            return _with_lead(found, write)
    if one and parse:
        found = CallFormat("response_template", (), partial(_parsed, parse))
        if _all_come_back(found, write):
            return _with_lead(found, write)
    return None


def _parsed(parse: Parse, text: str, tools: Tools) -> _Found:
    """Read calls with a parser that does not tell their places: they begin where the text alone ends."""
    try:
        message = parse(text, tools)
        made = message.get("tool_calls") or ()
        calls = [_call_of({**call["function"], "id": call.get("id") or ""}) for call in made]
    except (KeyError, ValueError, TypeError) as error:
        return 0, [_faulty(f"the calls cannot be read: {error}")]
    content = str(message.get("content") or "").strip()
    return text.find(content) + len(content) if content in text else 0, calls


def _all_come_back(format: CallFormat, write: Write) -> bool:
    return all(_comes_back(format, calls, write(calls, "")) for calls in ([A_CALL], *_PROBES))


def _with_lead(format: CallFormat, write: Write) -> CallFormat:
    text, (before, _, _) = write([A_CALL], REPLY), write([], REPLY).partition(REPLY)
    if not text.startswith(before + REPLY):  # gpt-oss's template writes it as reasoning
        return format
    lead = text[len(before + REPLY) : format.read(text, ())[0]]
    return replace(format, lead=lead, marks=(*format.marks, lead.strip()))


def _comes_back(format: CallFormat, calls: Sequence[Call], text: str) -> bool:
    shown = [call for call in calls if call[0] in text]  # some templates write the first call alone
    found = format.split(text, tools=_SCHEMAS)[1]
    has_ids = all(each.id == id for at, each in enumerate(found, 1) if (id := f"{_ID}{at}") in text)
    return not shown or (_plain(found) == shown and has_ids)


def _plain(calls: Sequence[ToolCall]) -> list[Call]:
    return [(call.fault or call.name, call.arguments) for call in calls]


@dataclass(frozen=True)
class _Derived:
    """Reads calls by the texts that a template writes between names, keys and values."""

    example: str
    """A call, as the template writes it."""
    mark: str
    """The first text of a call."""
    begin: re.Pattern[str]
    """Finds what stands before the name of the first call, or before the JSON that holds it."""
    after_name: re.Pattern[str] | None
    """Finds what stands behind a name. None: names are in the JSON."""
    after_key: re.Pattern[str] | None
    """Finds what stands behind a key. None: arguments are JSON."""
    after_value: re.Pattern[str]
    """Finds what stands behind a value or JSON."""
    closing: str
    """The first text behind a value; empty if JSON ends it."""
    paths: tuple[Sequence[Any] | None, Sequence[Any], Sequence[Any]] = (None, (), ())
    """Keys that lead to the name, to the arguments and to the id in JSON."""
    null: str = "null"
    """A null, as the template writes it beside texts without quotes."""

    def read(self, text: str, tools: Tools) -> _Found:
        """Return where the first call begins, and all calls up to the first one that cannot be read."""
        text = text.rstrip()
        calls: list[ToolCall] = []
        first, at = len(text), 0
        while begin := self.begin.search(text, at):
            first = min(first, begin.start())
            if calls and self.closing and self.closing in text[at : begin.start()]:
                break
            try:
                at = self._read_from(begin, text, tools, calls)
            except ValueError as error:
                calls.append(_faulty(f"the call is not complete: {error}; expected {self.example}"))
                return first, calls
        if calls and self.closing and self.closing in text[at:]:
            calls.append(_faulty(f"text behind the calls has {self.closing!r}; expected {self.example}"))
        return first, calls

    def _read_from(self, begin: re.Match[str], text: str, tools: Tools, calls: list[ToolCall]) -> int:
        """Add the calls that follow each other from a place on; return the place behind them. Raise
        ValueError for a call that cannot be read."""
        if begin.lastgroup == "mark":
            raise ValueError(f"{self.mark!r} begins none")
        found, kind = begin, "next"
        while kind == "next":
            start, at, name = found, found.end(), ""
            if self.after_name:
                found = _next(self.after_name, text, at, "name")
                name, at = text[at : found.start()].strip(), found.end()
            # The text before a name may also hold the id of the call before it.
            ids = _ids_in(start)[-1:] if "id0" in self.begin.groupindex else _ids_in(found)[:1]
            if self.after_key:
                arguments, found = self._arguments(text, name, found, tools)
                more = [ToolCall(name, arguments)]
            else:
                value, at = _json(text, at)
                more = [*self._members(name, value)]
                behind = self.after_value.match(text, at)
                if behind is None:
                    raise ValueError(f"{text[at : at + 20]!r} stands behind the JSON")
                found = behind
            of_kimi = re.search(r"functions\.[^\s<]+:\d+", text[start.start() : found.end()])
            id = "".join(ids) or (of_kimi[0] if of_kimi else "")
            calls += (msgspec.structs.replace(call, id=call.id or id) for call in more)
            kind = found.lastgroup
        return found.end()

    def _arguments(
        self, text: str, name: str, found: re.Match[str], tools: Tools
    ) -> tuple[dict[str, Any], re.Match[str]]:
        """Return the arguments behind a name, and what stands behind them."""
        assert self.after_key
        arguments: dict[str, Any] = {}
        while found.lastgroup == "key":
            at, found = found.end(), _next(self.after_key, text, found.end(), "key")
            key, at, is_text = text[at : found.start()].strip(), found.end(), found.lastgroup == "text"
            found = _next(self.after_value, text, at, f"value of {key!r}")
            value = text[at : found.start()]
            if self.closing in value or key in arguments:
                raise ValueError(f"the key {key!r} stands twice, or its value has {self.closing!r} inside")
            arguments[key] = _value_of(value, _types_of(name, key, tools), is_text=is_text, null=self.null)
        return arguments, found

    def _members(self, name: str, value: Any) -> Iterator[ToolCall]:
        """Yield the calls in a JSON value: arguments, one call, or a list of calls."""
        if self.after_name:
            yield _call_of({"name": name, "arguments": value})
            return
        of_name, of_arguments, of_id = self.paths
        for item in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if of_name is None and isinstance(item, dict):
                yield from (_call_of({"name": each, "arguments": item[each]}) for each in item)
            else:
                found = {"name": _at(item, of_name or ()), "arguments": _at(item, of_arguments)}
                ids = [_at(item, path) for path in (of_id, ["id"], ["tool_call_id"]) if path]
                yield _call_of({**found, "id": next(filter(None, ids), "")})


def _ids_in(found: re.Match[str]) -> list[str]:
    """Return the ids that the policy wrote in a text between names and arguments."""
    return [each for name, each in found.groupdict().items() if name.startswith("id") and each]


def _next(pattern: re.Pattern[str], text: str, at: int, what: str) -> re.Match[str]:
    if found := pattern.search(text, at):
        return found
    raise ValueError(f"the {what} has no end")


def _derived(write: Write) -> _Derived | None:
    """Read the format that a template writes; None if nothing in its text tells where calls begin and end."""
    one, plain = write([A_CALL], ""), write([], REPLY)
    document = _document(one)
    kind: _Kind = "keys"
    if document:
        kind = "arguments" if document[2] == A_CALL[1] else "json"
    gaps = partial(_gaps, write, kind)
    first, behind = gaps([A_CALL]), gaps([A_CALL], REPLY)
    pair = gaps([A_CALL, (_TOOL2, {_KEY2: _VALUE2})])
    if first is None:
        return None
    begin = _same_end(first[0], behind[0].partition(REPLY)[2]) if behind and REPLY in behind[0] else first[0]
    written = begin[: same_start(begin, plain.partition(REPLY)[2])]
    begin = begin[len(whole_tags(written)) :].strip()
    between, last = pair[len(first) - 1] if pair else "", (pair or first)[-1]
    if not begin and not between.strip():
        return None
    mark = _mark(re.split(r"probe[a-z]+", begin or between)[-1], plain)
    starts = _pattern(begin) if begin else rf"(?:\A\s*|{_pattern(between)})(?=[\w.-]+\s*\{{)"
    only_mark = f"|(?P<mark>{re.escape(mark)})" if begin and mark else ""
    call = one[one.find(begin) :].strip()
    example = call.replace(_TOOL, "name").replace(_VALUE, "value").replace(_KEY, "key")
    common = (example, mark, _compiled(f"(?P<begin>{starts}){only_mark}"))
    if document:
        following = f"(?P<next>{_pattern(between.strip()) or '(?=[{[])'})|" if pair else ""
        return _Derived(
            *common,
            after_name=_compiled(_pattern(first[1].strip()) or r"\s*(?=\{)") if kind == "arguments" else None,
            after_key=None,
            after_value=_compiled(rf"\s*(?:{following}(?P<end>{_ending(last) or '()'}|\Z))"),
            closing="",
            paths=_paths(document[2]),
        )
    two, none = gaps([(_TOOL, {_KEY: _VALUE, _KEY2: _VALUE2})]), gaps([(_TOOL, {})])
    glued, data = gaps([(_TOOL, {}), (_TOOL2, {_KEY2: _VALUE2})]), gaps([(_TOOL, {_KEY: 7})])
    if two is None or none is None or not all(gap.strip() for gap in (first[1], first[2], two[3], last)):
        return None
    _, to_key, to_value, behind_value = first
    blank = re.escape(behind_value[: -len(behind_value.lstrip())])
    next_name = _pattern(glued[1].strip()) if glued else ""
    ends = {"key": _pattern(two[3].strip()), "next": _pattern(between.strip()), "end": _ending(last)}
    return _Derived(
        *common,
        after_name=_either({"key": _pattern(to_key.strip()), "next": next_name, "end": _ending(none[1])}),
        after_key=_either(_before_value(to_value, data[2] if data else to_value)),
        after_value=_either(ends, f"(?:{blank})?" if blank else ""),
        closing=_pieces(behind_value)[0],
    )


_Kind = Literal["keys", "arguments", "json"]
_BETWEEN = r"(?<=[>\]])\s*(?=[<\[])"
"""The place between two tags."""


def _gaps(write: Write, kind: _Kind, calls: Sequence[Call], content: str = "") -> list[str] | None:
    """Return the texts around the names, keys and values of calls, in their order; around names and
    arguments, or around JSON, for the other kinds. None if a text is missing."""
    text, at = write(calls, content), 0
    spans: list[tuple[int, int]] = []
    for number, (name, arguments) in enumerate(calls):
        words = [str(word) for pair in arguments.items() for word in pair] if kind == "keys" else []
        document = None if kind == "keys" else _document(text, at)
        following = [*words[:1], *(call[0] for call in calls[number + 1 : number + 2])]
        limit = document[0] if document else text.find(following[0], at) if following else len(text)
        if kind != "json":  # some write the name twice: the last one counts
            words = [name, *words]
        for word in words:
            start = text.rfind(word, at, limit) if word is name else text.find(word, at)
            if start < 0 or limit < 0:
                return None
            at = start + len(word)
            spans.append((start, at))
        if kind != "keys":
            if document is None:
                return None
            spans.append(document[:2])
            at = document[1]
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _document(text: str, at: int = 0) -> tuple[int, int, Any] | None:
    """Return start, end and value of the first JSON behind a place that has a word of a probe."""
    for found in re.compile(r"[\[{]").finditer(text, at):
        try:
            value, end = _json(text, found.start())
        except ValueError:
            continue
        if "probe" in json.dumps(value):
            return found.start(), end, value
    return None


def _same_end(a: str, b: str) -> str:
    """Return the end that two texts have in common, from the start of a tag on."""
    size = same_start(a[::-1], b[::-1])
    return a if size == len(a) else re.sub(r"\A[^<\[]*(?=[<\[])", "", a[len(a) - size :])


def same_start(a: str, b: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def whole_tags(text: str) -> str:
    """Return a text without a tag that is cut at its end."""
    return re.sub(r"[<\[][^<>\[\]]*\Z", "", text)


def _pieces(literal: str) -> list[str]:
    return [piece for piece in re.split(rf"{_BETWEEN}|\s+", literal.strip()) if piece] or [""]


def _mark(begin: str, plain: str) -> str:
    """Return the start of a text up to the tag that no plain answer has."""
    ends = [found.end() for found in re.finditer(r"[>\]=]+|(?<=\S)(?=\s|\Z)", begin)]
    return next((begin[:end] for end in ends if begin[:end] not in plain), begin)


def _pattern(literal: str) -> str:
    """Return a pattern of a text: white space inside may be other white space, between two tags or none,
    numbers may be other numbers, and names and ids any."""
    parts = re.split(rf"({_BETWEEN}|\s+|{_ID}\d|\d+|probe[a-z]+)", literal)
    parts[::2] = map(re.escape, parts[::2])
    for number, part in enumerate(parts[1::2]):
        kinds = {"": r"\s*", _ID: r"(?P<id>[^\s<]*?)", "probe": r"[^\s<>]+?"}
        parts[2 * number + 1] = kinds.get(part.strip()[: len(_ID) if part.startswith(_ID) else 5], r"\d+")
    return "".join(parts)


def _ending(literal: str) -> str:
    """Return a pattern of a text that ends a call. An answer may end within it, behind its first piece."""
    pattern = ""
    for piece in reversed(_pieces(literal)):
        pattern = _pattern(piece) + (rf"(?:\s*{pattern}|\s*\Z)" if pattern else "")
    return pattern


def _either(groups: Mapping[str, str], before: str = "") -> re.Pattern[str]:
    return _compiled(
        before + f"(?:{'|'.join(f'(?P<{name}>{each})' for name, each in groups.items() if each)})"
    )


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern, in which each id is a group of its own: `id0`, `id1` …"""
    numbers = count()
    return re.compile(re.sub(r"\(\?P<id>", lambda _: f"(?P<id{next(numbers)}>", pattern))


def _before_value(of_text: str, of_data: str) -> dict[str, str]:
    """Return the patterns of what stands between a key and its value. Some templates tell there whether the
    value is a text."""
    core = of_text.rstrip()
    blank = f"(?:{re.escape(of_text[len(core) :])})?"
    if of_text == of_data:
        return {"any": _pattern(core) + blank}
    start = same_start(of_text, of_data)
    end = same_start(core[:start:-1], of_data.rstrip()[:start:-1])
    return {
        "text": _pattern(core) + blank,
        "data": rf"{_pattern(core[:start])}\w+{_pattern(core[len(core) - end :])}{blank}",
    }


def _paths(value: Any) -> tuple[Sequence[Any] | None, Sequence[Any], Sequence[Any]]:
    """Return the keys that lead to the name, the arguments and the id of a call in JSON. The first is None if
    the name is the key of the arguments."""
    item = cast("list[Any]", value)[0] if isinstance(value, list) else value
    name, arguments = _path_to(_TOOL, item), _path_to(A_CALL[1], item)
    return name, arguments or _path_to(json.dumps(A_CALL[1]), item) or (), _path_to(f"{_ID}1", item) or ()


def _path_to(wanted: Any, value: Any) -> Sequence[Any] | None:
    if value == wanted:
        return ()
    for key, item in cast("dict[Any, Any]", value).items() if isinstance(value, dict) else ():
        if (path := _path_to(wanted, item)) is not None:
            return (key, *path)
    return None


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = cast("dict[Any, Any]", value).get(key) if isinstance(value, dict) else None
    return value


def _types_of(name: str, key: str, tools: Tools) -> set[str]:
    """Return the JSON types that a tool's schema gives to an argument; empty if it gives none."""
    for tool in tools:
        function: Any = tool.get("function", tool)
        if function.get("name") == name:
            schema = _at(function, ("parameters", "properties", key)) or {}
            forms = [schema, *(schema.get("anyOf") or schema.get("oneOf") or ())]
            types = [form.get("type") for form in forms]
            found = {each for type in types for each in (type if isinstance(type, list) else [type]) if each}
            return found or {_type(each) for each in schema.get("enum", ())}
    return set()


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _value_of(text: str, types: set[str], *, is_text: bool, null: str) -> Any:
    """Return a value that was written as text: JSON, or a Python constant, of one of the types; else the
    text. Without types, JSON counts. Where texts are allowed, a quoted text has its quotes, and only `null`
    is null."""
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        text = text[9:-3]
    if is_text and (not types or "string" in types):
        return text
    if "string" in types:
        if "null" in types and text == null:
            return None
        if not (types := types - {"string", "null"}):
            return text
    for read in (json.loads, ast.literal_eval)[: 2 if types and len(text) < _MOST_PYTHON else 1]:
        try:
            value = json.loads(json.dumps(read(text.strip()), ensure_ascii=False).encode())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        kind = _type(value)
        if not types or kind in types or (kind == "integer" and "number" in types):
            return value
    return text
