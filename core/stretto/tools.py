"""Tools: functions that the policy may call, and how calls are read out of its answers.

A tool is a Python function with type hints, sync or async: its name, docstring and hints become the JSON
schema that the chat template shows. A call's arguments are checked against the hints before the function sees
them. What it returns becomes text: text as it is, anything else as JSON. Whatever goes wrong, a wrong
argument, an exception, a call that takes too long, is told to the policy as the tool's answer.

Tools of MCP servers are offered beside them. All of them run in the sandbox, in processes of the verifier
workers that can be killed; a call may be made twice, if a verifier is lost in between.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_type_hints

import msgspec

from stretto.component import Importable, PositiveFloat, PositiveInt
from stretto.workflow import WorkflowConfig

if TYPE_CHECKING:
    from stretto.models.tokenizer import Message

__all__ = [
    "PARSERS",
    "MCPServer",
    "ParserName",
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "ToolsConfig",
    "assistant_message",
    "parse_calls",
    "tool_of",
]

ParserName = Literal["hermes", "llama3", "mistral"]


class MCPServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server of tools, by the Model Context Protocol: one that is started, or one that runs."""

    command: tuple[str, ...] = ()
    """Program and arguments of one that speaks over its standard pipes. It is started in the sandbox."""
    url: str | None = None
    """Address of one that speaks streamable HTTP, such as `http://host:8000/mcp`."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected either `command` or `url`")


class ToolsConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a workflow whose session has tools."""

    tools: tuple[Importable, ...] = ()
    """Python functions, each `path.py:name` or `module:name`."""
    mcp: tuple[MCPServer, ...] = ()
    """Servers whose tools are offered too; needs `stretto[mcp]`."""
    tool_timeout_s: PositiveFloat = 30.0
    """Seconds for one call. The process that takes longer is killed, and the policy is told so."""
    max_result_chars: PositiveInt = 8000
    """Longer results are cut, with a note."""
    network: bool = False
    """Let tools reach the network."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Environment variables that tools get, such as `{API_KEY: "${oc.env:API_KEY}"}`; of the run's own they
    get none but PATH."""
    tool_memory_mb: PositiveInt | None = None
    """Address space of a tool's process in MiB; default no limit."""


@dataclass(frozen=True)
class Tool:
    """One tool, with the function that is called."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    """Raises `msgspec.ValidationError` for arguments that do not fit, and whatever the function raises."""

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolAnswer(msgspec.Struct, frozen=True):
    """What the policy is told of a call."""

    text: str
    failed: bool = False
    """The call was refused, raised, or took too long; `text` says so."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool in an answer of the policy."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    """Why it cannot be made, for the policy to read."""
    id: str = ""
    """If the policy gave it one."""


def tool_of(function: Callable[..., Any], name: str = "") -> Tool:
    """A function as a tool. The docstring up to `Args:` describes it, and the lines below that its
    parameters; so does `Annotated[..., msgspec.Meta(description=...)]`.

    Args:
        name: default the function's own.

    Raises:
        TypeError: if it has a parameter without a name of its own (`*args`, `**kwargs`), or a hint that no
            JSON schema can say.
    """
    name = name or function.__name__
    described, of_parameters = _docstring(inspect.getdoc(function) or "")
    arguments = _struct_of(name, function)
    schema = msgspec.json.schema(arguments)
    definitions: dict[str, Any] = schema["$defs"]
    parameters: dict[str, Any] = definitions.pop(schema["$ref"].rpartition("/")[2])
    del parameters["title"]
    for parameter, text in of_parameters.items():
        if parameter in parameters["properties"]:
            parameters["properties"][parameter].setdefault("description", text)
    if definitions:
        parameters["$defs"] = definitions

    async def run(given: Mapping[str, Any]) -> Any:
        fitting = msgspec.convert(given, arguments)
        result = function(**{field: getattr(fitting, field) for field in arguments.__struct_fields__})
        return await result if inspect.isawaitable(result) else result

    return Tool(name, described, parameters, run)


def text_of(result: Any, most: int) -> str:
    """A tool's result as the policy reads it, of at most so many characters and a note.

    Raises:
        TypeError: if it is no plain data.
    """
    text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut after {most} of {len(text)} characters]"


# ------------------------------------------------------------------------------------------- calls


def parse_calls(text: str, parser: ParserName) -> list[ToolCall]:
    """The calls in an answer, in their order; none in its reasoning (up to `</think>`).

    A call that cannot be read is one with a `fault`.

    Args:
        text: of the answer, special tokens included.
    """
    if "<think>" in text and "</think>" not in text:
        return []  # it never stopped to think
    return PARSERS[parser](text.rpartition("</think>")[2])


def assistant_message(content: str, calls: Sequence[ToolCall], parser: ParserName) -> Message:
    """An answer with calls as the chat template has to see it in the history.

    Templates of `hermes` and `llama3` write the content as it was sampled. Mistral's refuse two answers in a
    row unless the first is said to have called a tool; they write the calls anew.
    """
    if parser != "mistral" or not calls:
        return {"role": "assistant", "content": content}
    made = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes write it."""
    return [_call_in(part) for part in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def _llama3(text: str) -> list[ToolCall]:
    """The whole answer is `{"name": …, "parameters": {…}}`, or several of these with `;` between them."""
    text = re.sub(r"<\|(python_tag|eom_id|eot_id)\|>", "", text).strip()
    if not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', text):
        return []
    calls: list[ToolCall] = []
    while text:
        try:
            value, text = _json(text)
        except ValueError as error:
            return [*calls, _faulty(f"the call is not valid JSON: {error}")]
        calls.append(_call_of(value))
        text = text.lstrip("; \n\t")
    return calls


def _mistral(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or of newer models `[TOOL_CALLS]name[ARGS]{…}`, once
    for each."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        part = part.removesuffix("</s>").strip()
        if named := re.match(r"([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*)", part, re.DOTALL):
            name, id, arguments = named.groups()
            calls.append(_call_in(f'{{"name": "{name}", "id": "{id or ""}", "arguments": {arguments}}}'))
            continue
        try:
            value, _ = _json(part)
        except ValueError as error:
            calls.append(_faulty(f"the calls are not valid JSON: {error}"))
            continue
        calls += [
            _call_of(each) for each in (cast("list[Any]", value) if isinstance(value, list) else [value])
        ]
    return calls


PARSERS: Mapping[ParserName, Callable[[str], list[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _call_in(text: str) -> ToolCall:
    try:
        return _call_of(_json(text.strip())[0])
    except ValueError as error:
        return _faulty(f"the call is not valid JSON: {error}")


def _json(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and the rest.

    Raises:
        ValueError: if there is none, or it could not be written as UTF-8.
    """
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value, text[end:]


def _call_of(value: Any) -> ToolCall:
    """A call, of a JSON value."""
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


# ----------------------------------------------------------------------------------------- helpers


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter below `Args:`."""
    described, *sections = re.split(r"^(?=(?:Args|Returns|Raises|Examples?):\s*$)", text, flags=re.MULTILINE)
    parameters: dict[str, str] = {}
    last = ""
    for line in next((part for part in sections if part.startswith("Args:")), "").splitlines()[1:]:
        if begun := re.match(r" {1,4}(\w+)(?:\s*\(.*?\))?:\s*(.*)", line):
            last, parameters[begun[1]] = begun[1], begun[2]
        elif last and line.strip():
            parameters[last] += " " + line.strip()
    return described.strip(), parameters


def _struct_of(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """The function's parameters as a struct."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name!r}: parameter {parameter.name!r} cannot be given by name")
        hint = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:
            fields.append((parameter.name, hint, _default(parameter.default)))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _default(value: Any) -> Any:
    """A default as msgspec takes it: one that can change is made anew for each call."""
    if isinstance(value, (list, dict, set)):
        return msgspec.field(default_factory=lambda: cast("Any", value).copy())
    return value
