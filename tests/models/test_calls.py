"""Formats of tool calls: what a template writes is read back or is a fault, whatever the arguments are."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from stretto.chat.calls import NAMED, Call, CallFormat, ToolCall, format_of

Each = Callable[[int, str, Mapping[str, Any]], str]


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def keys(each: str, **kinds: str) -> Callable[[Mapping[str, Any]], str]:
    """Write arguments one by one; `T` stands for the kind of a value."""

    def write(arguments: Mapping[str, Any]) -> str:
        parts: list[str] = []
        for key, value in arguments.items():
            kind = kinds["text"] if isinstance(value, str) else kinds["other"]
            parts.append(each.replace("T", kind).replace("K", key, 1).replace("V", text_of(value), 1))
        return "".join(parts)

    return write


LINES = keys("<parameter=K>\nV\n</parameter>\n", text="", other="")
PAIRS = keys("<arg_key>K</arg_key><arg_value>V</arg_value>", text="", other="")
TYPED = keys('<parameter name="K" string="T">V</parameter>\n', text="true", other="false")
KINDS = keys(
    '<|open|>argument key="K" type="T"<|sep|>V<|close|>argument<|sep|>', text="string", other="number"
)
# Template -> what stands before the calls, each call, between two, and behind them.
WRITERS: dict[str, tuple[str, Each, str, str]] = {
    "lines": (
        "", lambda _, n, a: f"<tool_call>\n<function={n}>\n{LINES(a)}</function>\n</tool_call>", "\n", ""
    ),
    "pairs": ("", lambda _, n, a: f"<tool_call>{n}{PAIRS(a)}</tool_call>", "", ""),
    "types": ("\n\n<calls>\n", lambda _, n, a: f'<invoke name="{n}">\n{TYPED(a)}</invoke>\n', "", "</calls>"),
    "kinds": (
        "<|open|>tools<|sep|>",
        lambda at, n, a: f'<|open|>call tool="{n}" index="{at}"<|sep|>{KINDS(a)}<|close|>call<|sep|>',
        "",
        "<|close|>tools<|sep|>",
    ),
    "JSON behind a name": (
        "<calls>",
        lambda _, n, a: f"<call>function<sep>{n}\n```json\n{json.dumps(a)}\n```</call>",
        "\n",
        "</calls>",
    ),
    "ids": (
        "<calls>", lambda i, n, a: f"<call>call0000{i}<name>{n}<args>{json.dumps(a)}</call>", "", "</calls>"
    ),
    "counted": (
        "<calls>", lambda i, n, a: f"<call>functions.{n}:{i - 1}<args>{json.dumps(a)}</call>", "", "</calls>"
    ),
    "late ids": ("", lambda i, n, a: f"<call><name>{n}<id>call0000{i}<args>{json.dumps(a)}</call>", "", ""),
    "names alone": ("", lambda _, n, a: f"{n}\n{json.dumps(a)}", ">>>", ""),
    "JSON lines": ("<calls>\n", lambda _, n, a: json.dumps({"name": n, "arguments": a}), "\n", "\n</calls>"),
    "other keys": (
        "<|ACTION|>[",
        lambda at, n, a: json.dumps({"tool_call_id": str(at), "tool_name": n, "parameters": a}),
        ",\n",
        "]<|END|>",
    ),
    "names as keys": ("<|tools|>[", lambda _, n, a: json.dumps({n: a}), ", ", "]<|end|>"),
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "text": {"type": "string"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "number": {"type": "number"},
                    "list": {"type": "array"},
                    "mode": {"enum": ["1", "2"]},
                }
            },
        },
    }
]


def write(name: str, calls: Sequence[Call], before: str = "") -> str:
    start, each, between, end = WRITERS[name]
    return (
        before + start + between.join(each(at, *call) for at, call in enumerate(calls, 1)) + end
        if calls
        else before
    )


def format_like(name: str) -> CallFormat:
    format = format_of(lambda calls, before: write(name, calls, before))
    assert format
    assert format.name == "template"
    return format


FORMATS = {name: format_like(name) for name in WRITERS}
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(),
        "maybe": st.none() | st.text().filter(lambda text: text != "null"),
        "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        "list": st.lists(st.integers() | st.text()),
        "mode": st.sampled_from(["1", "2"]),
    },
)


@pytest.mark.parametrize("name", WRITERS)
@given(calls=st.lists(st.tuples(st.sampled_from(["f", "f.g-1"]), ARGUMENTS), min_size=1, max_size=3))
@example(calls=[("f", {"maybe": text}) for text in ("None", '"a"', " null", "'None'")])
def test_a_call_is_read_as_it_was_written_or_is_a_fault(name: str, calls: list[Call]) -> None:
    tools = [TOOLS[0], {"function": {**TOOLS[0]["function"], "name": "f.g-1"}}]
    said = "" if name == "names alone" else "I look.\n"
    before, found = FORMATS[name].split(write(name, calls, said), tools=tools)
    if not any(call.fault for call in found):
        assert [(call.name, call.arguments) for call in found] == calls
        assert before.strip() == said.strip()
    else:  # a text has a mark of the format
        assert any(mark in json.dumps(calls, ensure_ascii=False) for mark in '<>|[]{}`,"')


def test_null_is_read_as_the_template_writes_it_beside_texts() -> None:
    def python(calls: Sequence[Call], before: str = "") -> str:
        return write("lines", calls, before).replace("\nnull\n", "\nNone\n")

    calls: list[Call] = [("f", {"maybe": None}), ("f", {"maybe": "a"})]
    for writes in (python, partial(write, "lines")):
        format = format_of(writes)
        assert format
        assert [(call.name, call.arguments) for call in format.split(writes(calls), tools=TOOLS)[1]] == calls


def test_ids_that_the_policy_wrote_are_kept() -> None:
    calls = [("f", {}), ("g", {"a": "b"})]
    ids = {name: [call.id for call in FORMATS[name].split(write(name, calls))[1]] for name in WRITERS}
    assert ids["ids"] == ids["late ids"] == ["call00001", "call00002"]
    assert ids["counted"] == ["functions.f:0", "functions.g:1"]
    assert ids["other keys"] == ["1", "2"]
    assert ids["lines"] == ["", ""]


F = ToolCall("f", {"text": "a", "number": 3})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines", "<tool_call><function=f><parameter=text>a</parameter><parameter=number>3</parameter>"
         "</function></tool_call>"),
        ("lines", "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=number>\n3\n"
         "</parameter>\n</function>"),
        ("pairs",
         "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>number</arg_key>\n"
         "<arg_value>3</arg_value>\n</tool_call>\n"),
        ("JSON behind a name",
         '<calls><call>function<sep>f\n```json\n{"text": "a", "number": 3}\n```</call>'),
        ("ids", '<calls>\n<call>xyz<name>f<args>{"text":"a","number":3}'),
        ("harmony",
         '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"text": "a", "number": 3}'),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"text": "a", "number": 3}<|call|>'),
        ("gemma4", '<|tool_call>call:f{text:<|"|>a<|"|>,number:3}<tool_call|>'),
        ("python", "<|tool_call_start|>[f(text='a', number=3)]<|tool_call_end|>"),
        ("python", 'so <|tool_call_start|>f(text="a", number=3)'),
        ("python", "[f(text='a', number=3)]"),
    ],
)  # fmt: skip
def test_calls_are_read_as_policies_write_them(name: str, text: str) -> None:
    [call] = (NAMED.get(name) or FORMATS[name]).split(text, tools=TOOLS)[1]
    assert (call.name, call.arguments, call.fault) == ("f", {"text": "a", "number": 3}, "")


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("lines", "<tool_call>\n<function=f>\n<parameter=text>\na",
         "the value of 'text' has no end; expected <tool_call>"),
        ("lines", "<tool_call>\n<function=f", "the name has no end"),
        ("lines", '<tool_call>\n{"name": "f"}\n</tool_call>', "'<tool_call>' begins none; expected"),
        ("lines", write("lines", [("f", {"text": "a</parameter>b"})]), "has '</parameter>' inside"),
        ("lines",
         write("lines", [("f", {"text": "a</parameter></function></tool_call>b"}), ("f", {})]),
         "behind the calls"),
        ("pairs", write("pairs", [("f", {"text": "a"})]).replace("</tool_call>", "") + PAIRS({"text": "b"}),
         "stands twice"),
        ("ids", "<calls><call>x<name>f<args>{1}</call></calls>", "Expecting property name"),
        ("ids", "<calls><call>x<name>f<args>{} and</call></calls>",
         "' and</call></calls>' stands behind the JSON"),
        ("names as keys", "<|tools|>[3]<|end|>", 'JSON object with "name"'),
        ("other keys", '<|ACTION|>[{"tool_name": "f"}]<|END|>', "not a JSON object"),
        ("harmony", " to=functions.f<|message|>{", "the arguments are not valid JSON"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>b<tool_call|>', "not valid JSON"),
        ("gemma4", "<|tool_call>f{}<tool_call|>", "written as <|tool_call>call:name{"),
        ("python", "[f(3)]", "an argument has no name"),
        ("python", "[f(a=g())]", "not valid Python: malformed node"),
        ("python", "[f(a=1, a=2)]", "or one that is given twice"),
        ("python", f"<|tool_call_start|>{'[' * 40_000}", "too many nested parentheses"),
        ("python", f"[f(a='{'b' * 50_000}')]", "expected at most 50000"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_what_was_expected(name: str, text: str, fault: str) -> None:
    *_, call = (NAMED.get(name) or FORMATS[name]).split(text, tools=TOOLS)[1]
    assert fault in call.fault


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines", "The answer is 3 < 4."),
        ("names alone", "all\nThe answer is 3."),
        ("names alone", "f is a function"),
        ("harmony", "<|channel|>analysis<|message|>I may write to=functions.f<|end|>"),
        ("python", "[1, 2]"),
        ("python", "[f(x) for x in y]."[1:]),
    ],
)
def test_a_text_without_a_call_is_a_text(name: str, text: str) -> None:
    assert (NAMED.get(name) or FORMATS[name]).split(text) == (text, [])


def test_values_are_what_the_tool_expects() -> None:
    def read(name: str, **arguments: Any) -> dict[str, Any]:
        [call] = FORMATS[name].split(write(name, [("f", arguments)]), tools=TOOLS)[1]
        return call.arguments

    given = {"text": "3", "maybe": "3", "number": "3.5", "list": "['a', None]", "mode": "1", "other": "[1]"}
    expected = {**given, "number": 3.5, "list": ["a", None], "other": [1]}
    assert read("lines", **given) == expected
    assert read("lines", maybe="null", text="true", other="it is") == {
        "maybe": None,
        "text": "true",
        "other": "it is",
    }
    assert read("types", other="[1]") == {"other": "[1]"}  # the template says that it is a text
    assert read("lines", text="<![CDATA[<a>]]>") == {"text": "<a>"}


def test_a_checkpoints_own_parser_reads_what_no_other_format_does() -> None:
    value = r'"(?:[^"\\]|\\.)*"|\[.*?\]|\{.*?\}|[\w.]+'
    attributes = {"tag_pattern": rf"(?P<key>\w+)=(?P<value>{value})", "value_parser": {"name": "json"}}
    made = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    calls = {"open_pattern": r"<do (?P<name>\w+)", "close": "/>", "content": "xml-inline", "repeats": True}
    calls |= {"content_args": attributes, "transform": made}
    spec = {"start_anchor": "<r>", "fields": {"content": {}, "tool_calls": calls}}

    def write(calls: Sequence[Call], before: str) -> str:
        written = [
            f"<do {name} {' '.join(f'{k}={json.dumps(v)}' for k, v in a.items())}/>" for name, a in calls
        ]
        return before + "".join(written)

    def parse(text: str, tools: Any) -> Mapping[str, Any]:
        return parse_response(text, spec, prefix="", tools=tools)

    assert format_of(write) is None
    found = format_of(write, parse)
    assert found
    assert found.split('so <do f text="a"/>', tools=TOOLS) == ("so", [ToolCall("f", {"text": "a"})])
    [call] = found.split("<do f n=1.2.3/>")[1]
    assert "the calls cannot be read: " in call.fault
    assert found.split("so it is") == ("so it is", [])
