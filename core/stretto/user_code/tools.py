"""The tool process, child of a verifier worker: it runs tools in the sandbox, one call at a time.

The first frame names the tools; `Started` has their schemas. MCP servers are its children and end with it.
If one of them is lost, a call starts it again (`stretto.user_code.mcp_server`).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec

from stretto.component import Problem, SandboxMode
from stretto.errors import StrettoError, error_text, nearest, place_of
from stretto.machine.proxies import proxy_variables
from stretto.models.images import MAX_FILE_BYTES, ImageError, decode, files_of
from stretto.tools import MCPServer, Tool, ToolAnswer, ToolResult, ToolsConfig, text_of, tool_of
from stretto.user_code.importable import load_importable
from stretto.user_code.mcp_server import ToolServer, ToolServerError
from stretto.user_code.protocol import MAX_FRAME, Pipes, Started, encodable, try_to_ask
from stretto.user_code.sandbox import SandboxedCommand, can_show, sandbox_command

if TYPE_CHECKING:
    from stretto.config import RunConfig

_TRY_S = 60.0
"""Seconds for making the tools in a trial."""
_MAX_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""
_TEXTS = {"description", "default", "title"}
"""Keys that the schema of a parameter may have besides its type."""
_UNSEEN = "[image, which you cannot see]"
_MAX_REST = 1024
"""Bytes of an answer besides the result, such as the note that the result is cut."""


class Invocation(msgspec.Struct, frozen=True, array_like=True):
    """One call of a tool."""

    name: str
    arguments: bytes
    """JSON object."""
    images: bool = False
    """True if the answer may have images; otherwise its text has a note for each image."""


class _Setup(msgspec.Struct, frozen=True, array_like=True):
    tools: tuple[str, ...]
    mcp: tuple[MCPServer, ...]
    max_result_chars: int


def command(config: ToolsConfig, sandbox: SandboxMode, folder: str) -> SandboxedCommand:
    """Return the command that starts the process in its sandbox. The process can read the working folder,
    import its modules, and read the folders of the tools' files, but not the runs in `runs` and `folder`."""
    here = Path.cwd()
    modules = [tool.rpartition(":")[0] for tool in config.tools]
    files = [Path(module) for module in modules if module.endswith(".py")]
    python_path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH", "")]))
    own = {name.lower() for name in config.env}
    proxies = {name: value for name, value in proxy_variables().items() if config.network and name not in own}
    return sandbox_command(
        [sys.executable, "-m", "stretto.user_code.tools"],
        sandbox=sandbox,
        readable=[here, *files, *(file.parent for file in files)],
        hidden=[here / "runs", *([Path(folder)] if folder else [])],
        folder=here if can_show(here) else None,
        network=config.network,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, **proxies, **config.env},
        memory_mb=config.tool_memory_mb,
    )


def setup_frame(config: ToolsConfig) -> bytes:
    """Return the first frame for the process."""
    return msgspec.msgpack.encode(_Setup(config.tools, config.mcp, config.max_result_chars))


def max_answer(config: ToolsConfig) -> int:
    """Return the size in bytes of the largest answer to a call."""
    return min(_MAX_CHARACTER * config.max_result_chars + MAX_FILE_BYTES + _MAX_REST, MAX_FRAME)


def try_to_make(config: ToolsConfig, run: RunConfig) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Make the tools in a child process. Return their JSON schemas, and what is wrong with them."""
    sandboxed = command(config, run.sandbox, run.out or "")
    setup = setup_frame(config)
    try:
        started, _ = try_to_ask(sandboxed.argv, setup, (), _TRY_S, env=sandboxed.env, folder=sandboxed.folder)
    except TimeoutError:
        message = (
            f"not verified: making the tools took longer than {_TRY_S:.0f} s; the run does not need "
            f"this check{'' if not config.mcp else '; do all MCP servers answer?'}"
        )
        return [], [Problem("workflow.tools", message, "warning")]
    if started.error:
        return [], [Problem("workflow.tools", started.error)]
    schemas = msgspec.msgpack.decode(started.data, type=list[dict[str, Any]])
    return schemas, [*_lacking(schemas)]


def _lacking(schemas: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Warn of tools that a model cannot learn to call from their schemas."""
    for schema in schemas:
        tool = schema["function"]
        untyped = [
            name
            for name, parameter in (tool["parameters"].get("properties") or {}).items()
            if isinstance(parameter, dict) and not parameter.keys() - _TEXTS
        ]
        lacks = [
            *([] if tool["description"] else ["no description"]),
            *(f"no type of {name!r}" for name in untyped),
        ]
        if lacks:
            yield Problem(
                "workflow.tools",
                f"the tool {tool['name']!r} has {', '.join(lacks)}: the model does not learn how to call "
                "it; write a docstring, and hints of the parameters",
                "warning",
            )


async def _tools(setup: _Setup, servers: Sequence[ToolServer]) -> dict[str, Tool]:
    offered = [
        (reference, tool_of(load_importable(reference), reference.rpartition(":")[2]))
        for reference in setup.tools
    ]
    for server in servers:
        offered += [(server.name, tool) for tool in await server.tools()]
    tools: dict[str, Tool] = {}
    origins: dict[str, str] = {}
    for origin, tool in offered:
        if tool.name in tools:
            raise ValueError(
                f"two tools have the name {tool.name!r}: one from {origins[tool.name]}, one from {origin}"
            )
        tools[tool.name], origins[tool.name] = tool, origin
    return tools


async def _answer(tools: Mapping[str, Tool], invocation: Invocation, max_chars: int) -> ToolAnswer:
    """Return the result of a call as text, or the error as text for the policy."""

    def failed(reason: str) -> ToolAnswer:
        return ToolAnswer(_without_surrogates(text_of(f"error: {reason}", max_chars)), failed=True)

    tool = tools.get(invocation.name)
    if tool is None:
        hint = nearest(invocation.name, tools)
        return failed(f"no tool {invocation.name!r}{hint or ';'} tools: {', '.join(tools)}")
    try:
        result = await tool.run(json.loads(invocation.arguments))
        result = result if isinstance(result, ToolResult) else ToolResult(result)
        text, images = text_of(result.text, max_chars), files_of(result.images)
        if images and not invocation.images:
            text, images = "\n".join(filter(None, [text, *[_UNSEEN] * len(images)])), ()
        for image in images:
            decode(image)
    except ImageError as error:
        return failed(f"the result has an image that cannot be used: {error}")
    except msgspec.ValidationError as error:
        return failed(f"wrong arguments: {error}")
    except ToolServerError as error:
        return failed(str(error))
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the answer shows it to the policy
        print(f"tool {tool.name!r} raised {place_of(error)}", file=sys.stderr, flush=True)
        return failed(error_text(error))
    return ToolAnswer(_without_surrogates(text), images=images)


def _without_surrogates(text: str) -> str:
    """Replace each lone surrogate, which UTF-8 cannot encode, by one question mark."""
    return text.encode(errors="replace").decode()


async def _serve(pipes: Pipes) -> str | None:
    """Serve calls until the input ends. Return why if the process must end before."""
    first = pipes.receive()
    if first is None:
        return None
    setup = msgspec.msgpack.decode(first, type=_Setup)
    async with anyio.create_task_group() as tasks:
        servers = [ToolServer(config, tasks) for config in setup.mcp]
        try:
            tools = await _tools(setup, servers)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; `Started` reports it
            traceback.print_exc()
            reason = str(error) if isinstance(error, StrettoError) else place_of(error)
            pipes.send(Started(f"the tools cannot be made: {encodable(reason)}"))
        else:
            pipes.send(Started(data=msgspec.msgpack.encode([tool.schema for tool in tools.values()])))
            while (data := await anyio.to_thread.run_sync(pipes.receive)) is not None:
                invocation = msgspec.msgpack.decode(data, type=Invocation)
                answer = await _answer(tools, invocation, setup.max_result_chars)
                if given_up := [server.given_up for server in servers if server.given_up]:
                    return given_up[0]
                pipes.send(answer)
        finally:
            tasks.cancel_scope.cancel()
    return None


def main() -> None:
    """Serve calls of tools until the input ends."""
    sys.exit(anyio.run(_serve, Pipes()))


if __name__ == "__main__":
    main()
