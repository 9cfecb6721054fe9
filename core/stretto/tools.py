"""Tools: functions that the policy may call, and the parsers that read the calls from its answers.

A tool is a Python function with type hints, sync or async. Its name, docstring and hints become the JSON
schema that the chat template shows. stretto checks the arguments of a call against the hints before it calls
the function. The result becomes text: a string stays as it is, any other value becomes JSON. A `ToolResult`
can also have images, for a policy that reads images; they follow the text. The policy receives every error as
the answer of the tool: a wrong argument, an exception, or a call that takes too long.

The policy may also call tools of MCP servers. All tools run in the sandbox, in processes of the verifier
workers that stretto can kill. stretto may make a call twice if a verifier worker is lost during the call.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, cast, get_type_hints

import msgspec

from stretto.component import Importable, PositiveFloat, PositiveInt
from stretto.dataset import Message, OwnTurn, object_of
from stretto.errors import ConfigError
from stretto.reward import plain_number, reasoning_end
from stretto.workflow import WorkflowConfig

__all__ = [
    "PARSERS",
    "MCPServer",
    "ParserName",
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "ToolResult",
    "ToolsConfig",
    "assistant_message",
    "parse_calls",
    "tool_of",
]

ParserName = Literal["auto", "hermes", "llama3", "mistral"]


class MCPServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server of tools that speaks the Model Context Protocol. Either stretto starts it, or it already
    runs."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks over stdin and stdout. stretto starts it in the
    sandbox."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP, such as `http://host:8000/mcp`."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected either `command` or `url`")


class ToolsConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a workflow whose session has tools."""

    tools: tuple[Importable, ...] = ()
    """Python functions, each `path.py:name` or `module:name`."""
    mcp: tuple[MCPServer, ...] = ()
    """MCP servers whose tools the policy may call too; needs `stretto[mcp]`."""
    tool_timeout_s: PositiveFloat = 30.0
    """Time limit of one call, in seconds. A process that takes longer is killed, and the answer of the tool
    says so."""
    max_result_chars: PositiveInt = 8000
    """Maximum length of a result, in characters. Longer results are cut, with a note at the end."""
    network: bool = False
    """Let tools reach the network, through the proxies that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Environment variables for the tools, such as `{API_KEY: "${oc.env:API_KEY}"}`. Of the run's own
    variables, tools receive only PATH, and with `network` those that name proxies."""
    tool_memory_mb: PositiveInt | None = None
    """Limit of the address space of a tool's process, in MiB; with systemd, also of the memory of all its
    processes. Default: no limit; with systemd, half of the machine's memory."""


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool with images."""

    text: Any = ""
    """Text, or any plain data, which becomes JSON."""
    images: Sequence[Any] = ()
    """Images that follow the text: Pillow images, paths, or the bytes of files."""


@dataclass(frozen=True)
class Tool:
    """One tool, with its function."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    """Calls the function. Raises `msgspec.ValidationError` for arguments that do not fit, and every exception
    of the function."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's API and of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolAnswer(msgspec.Struct, frozen=True):
    """The answer to a call that the policy receives."""

    text: str
    failed: bool = False
    """Whether the call was refused, raised, or took too long; `text` then says so."""
    images: tuple[bytes, ...] = ()
    """Files of the images that follow the text."""

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The content of the tool's message, with a place for each image."""
        if not self.images:
            return self.text
        text = [{"type": "text", "text": self.text}] if self.text else []
        return [*text, *({"type": "image"} for _ in self.images)]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an answer of the policy."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    """Why the call cannot be made, as text for the policy; empty if it can."""
    id: str = ""
    """Id of the call, if the policy wrote one; otherwise empty."""


def tool_of(function: Callable[..., Any], name: str = "") -> Tool:
    """Make a tool from a function. The docstring up to `Args:` becomes the description of the tool, and the
    lines below `Args:` those of the parameters. `Annotated[..., msgspec.Meta(description=...)]` also
    describes a parameter.

    Args:
        name: name of the tool; default the name of the function.

    Raises:
        TypeError: if a parameter cannot be passed by name (such as `*args`, `**kwargs`), or a hint has no
            JSON schema.
    """
    name = name or function.__name__
    description, parameter_descriptions = _docstring(inspect.getdoc(function) or "")
    arguments = _struct_of(name, function)
    schema = msgspec.json.schema(arguments)
    definitions: dict[str, Any] = schema["$defs"]
    parameters: dict[str, Any] = definitions.pop(schema["$ref"].rpartition("/")[2])
    del parameters["title"]
    for parameter, text in parameter_descriptions.items():
        if parameter in parameters["properties"]:
            parameters["properties"][parameter].setdefault("description", text)
    if definitions:
        parameters["$defs"] = definitions

    async def run(values: Mapping[str, Any]) -> Any:
        struct = msgspec.convert(values, arguments, str_keys=True)
        taken = msgspec.to_builtins({name: getattr(struct, name) for name in values}, str_keys=True)
        if dropped := [*_dropped(values, taken)]:
            raise msgspec.ValidationError(f"Object contains unknown field `{dropped[0]}`")
        result = function(**{field: getattr(struct, field) for field in arguments.__struct_fields__})
        return await result if inspect.isawaitable(result) else result

    return Tool(name, description, parameters, run)


def text_of(result: Any, most: int) -> str:
    """Convert the result of a tool to text for the policy: at most `most` characters, and a note if it is
    cut.

    Raises:
        TypeError: if the result is not plain data.
    """
    if not isinstance(result, str):
        plain = msgspec.to_builtins(result, str_keys=True, builtin_types=(Decimal,), enc_hook=_plain)
        result = json.dumps(plain, default=float, ensure_ascii=False, separators=(",", ":"))
    text = cast("str", result)
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut after {most} of {len(text)} characters]"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else plain_number(value, "a value of the result")


def _dropped(given: Any, taken: Any) -> Iterator[str]:
    """Yield the keys in a call's arguments, at any depth, that their types do not have."""
    if isinstance(given, Mapping) and isinstance(taken, dict):
        for key, value in cast("Mapping[str, Any]", given).items():
            yield from _dropped(value, taken[key]) if key in taken else (key,)
    elif isinstance(given, list) and isinstance(taken, list):
        for pair in zip(cast("list[Any]", given), cast("list[Any]", taken), strict=False):
            yield from _dropped(*pair)


# ------------------------------------------------------------------------------------------- calls


def parse_calls(text: str, parser: ParserName, opened: str = "") -> list[ToolCall]:
    """Return the calls in an answer, in their order. Calls in its reasoning (up to `</think>`, or to the end
    of the part that the prompt opens) do not count.

    A call that cannot be parsed is returned with a `fault`.

    Args:
        text: text of the answer, including special tokens.
        opened: start of the answer in the prompt (`stretto.models.chat_form.ChatForm.opened`).
    """
    end = reasoning_end(text, opened)
    return [] if end is None else PARSERS[parser](text[end:])


def assistant_message(content: str, calls: Sequence[ToolCall], parser: ParserName) -> Message:
    """Make the message of an answer with calls, for the chat template to show in the history.

    Templates of `hermes` and `llama3` write the content as the policy sampled it. Mistral's templates refuse
    two consecutive answers unless the first has `tool_calls`; they write the calls again from these, behind
    the text before them.
    """
    if parser != "mistral" or not calls:
        return OwnTurn(role="assistant", content=content)
    tool_calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return OwnTurn(role="assistant", content=content.partition("[TOOL_CALLS]")[0], tool_calls=tool_calls)


def _hermes(text: str) -> list[ToolCall]:
    """Parse `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes write it."""
    return [_call_in(part) for part in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def _llama3(text: str) -> list[ToolCall]:
    """Parse an answer that is `{"name": …, "parameters": {…}}`, or several of these with `;` between them."""
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
    """Parse `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or from newer models
    one `[TOOL_CALLS]name[ARGS]{…}` for each call."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        part = part.removesuffix("</s>").strip()
        if call := re.match(r"([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*)", part, re.DOTALL):
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
    """Return the JSON value at the start of a text, and the rest of the text. Raise ValueError if there is no
    JSON value, an object has a key twice, or it cannot be encoded as UTF-8."""
    try:
        value, end = json.JSONDecoder(object_pairs_hook=object_of).raw_decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value, text[end:]


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


# ----------------------------------------------------------------------------------------- helpers


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    parts = re.split(r"^(?=(?:Args|Returns|Raises|Examples?):\s*$)", text, flags=re.MULTILINE)
    description, *sections = parts
    parameters: dict[str, str] = {}
    last = ""
    for line in next((part for part in sections if part.startswith("Args:")), "").splitlines()[1:]:
        if entry := re.match(r" {1,4}(\w+)(?:\s*\(.*?\))?:\s*(.*)", line):
            last, parameters[entry[1]] = entry[1], entry[2]
        elif last and line.strip():
            parameters[last] += " " + line.strip()
    return description.strip(), parameters


def _struct_of(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
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
    """Convert a default for msgspec: a mutable default is copied for each call."""
    if isinstance(value, (list, dict, set)):
        return msgspec.field(default_factory=lambda: cast("Any", value).copy())
    return value
