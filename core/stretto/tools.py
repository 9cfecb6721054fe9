"""Tools: functions that the policy may call (`stretto.chat.calls` reads the calls in its answers).

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
from typing import Any, cast, get_type_hints

import msgspec

from stretto.component import Importable, PositiveFloat, PositiveInt
from stretto.reward import plain_number
from stretto.workflow import WorkflowConfig

__all__ = [
    "MCPServer",
    "Tool",
    "ToolAnswer",
    "ToolResult",
    "ToolsConfig",
    "tool_of",
]


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
