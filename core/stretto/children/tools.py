"""The tool process: the run's tools, one call at a time, in the sandbox. Child of a verifier worker.

It is told which tools, and is ready with their schemas (see `pipes`); then an `Invocation` in, a `ToolAnswer`
out. MCP servers are its own children, and end with it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from stretto.children.protocol import Pipes, Started, try_to_start
from stretto.component import Problem, SandboxMode
from stretto.errors import nearest, place_of
from stretto.tools import MCPServer, Tool, ToolAnswer, ToolsConfig, text_of, tool_of
from stretto.user_code.importable import load_importable
from stretto.user_code.sandbox import Confined, confined, may_be_shown

if TYPE_CHECKING:
    from mcp import Client

    from stretto.config import RunConfig

__all__ = ["Invocation", "command", "told", "try_to_make"]

_TRY_S = 60.0
"""What the tools get to be made, on trial."""


class Invocation(msgspec.Struct, frozen=True, array_like=True):
    """One call."""

    name: str
    arguments: bytes
    """JSON object."""


class _Setup(msgspec.Struct, frozen=True, array_like=True):
    tools: tuple[str, ...]
    mcp: tuple[MCPServer, ...]
    max_result_chars: int


def command(config: ToolsConfig, sandbox: SandboxMode, folder: str) -> Confined:
    """How the process is started: it sees the working folder, whose modules can be imported, and what lies
    beside the tools' files; nothing of runs.

    Args:
        folder: the run's.
    """
    here = Path.cwd()
    files = [
        Path(module)
        for module, _, _ in (tool.rpartition(":") for tool in config.tools)
        if module.endswith(".py")
    ]
    search = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH", "")]))
    return confined(
        [sys.executable, "-m", "stretto.children.tools"],
        sandbox=sandbox,
        readable=[here, *files, *(file.parent for file in files)],
        hidden=[here / "runs", *([Path(folder)] if folder else [])],
        folder=here if may_be_shown(here) else None,
        network=config.network,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": search, **config.env},
        memory_mb=config.tool_memory_mb,
    )


def told(config: ToolsConfig) -> bytes:
    """What the process is told at its start."""
    return msgspec.msgpack.encode(_Setup(config.tools, config.mcp, config.max_result_chars))


def try_to_make(config: ToolsConfig, run: RunConfig) -> Iterator[Problem]:
    """What is wrong with the tools, found by a process that makes them."""
    confined = command(config, run.sandbox, run.out or "")
    try:
        started = try_to_start(confined.argv, told(config), _TRY_S, env=confined.env, folder=confined.folder)
    except TimeoutError:
        yield Problem("workflow.tools", f"not verified: not made within {_TRY_S:.0f} s", "warning")
        return
    if started.error:
        yield Problem("workflow.tools", started.error)


# ----------------------------------------------------------------------------------------- process


async def _tools(setup: _Setup, stack: AsyncExitStack) -> dict[str, Tool]:
    """The tools by name.

    Raises:
        ValueError: if two share a name.
    """
    offered = [
        (reference, tool_of(load_importable(reference), reference.rpartition(":")[2]))
        for reference in setup.tools
    ]
    for server in setup.mcp:
        offered += [(server.url or " ".join(server.command), tool) for tool in await _remote(server, stack)]
    found: dict[str, Tool] = {}
    origins: dict[str, str] = {}
    for origin, tool in offered:
        if tool.name in found:
            raise ValueError(f"two tools are called {tool.name!r}: of {origins[tool.name]} and of {origin}")
        found[tool.name], origins[tool.name] = tool, origin
    return found


async def _remote(server: MCPServer, stack: AsyncExitStack) -> list[Tool]:
    """The tools of an MCP server, which stays connected until the stack is closed."""
    client = await _connected(server, stack)
    tools: list[Tool] = []
    listed = await client.list_tools()
    while True:
        tools += [
            Tool(each.name, each.description or "", each.input_schema, _Remote(client, each.name))
            for each in listed.tools
        ]
        if listed.next_cursor is None:
            return tools
        listed = await client.list_tools(cursor=listed.next_cursor)


async def _connected(server: MCPServer, stack: AsyncExitStack) -> Client:
    from mcp import Client, StdioServerParameters

    if server.url is not None:
        return await stack.enter_async_context(Client(server.url))
    program, *arguments = server.command
    parameters = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
    return await stack.enter_async_context(Client(parameters))


class _Remote:
    """A tool of an MCP server as a function."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        result = await self._client.call_tool(self._name, dict(arguments))
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type}, which cannot be shown]"
            for part in result.content
        )
        if result.is_error:
            raise _SaidByServer(text)
        return text


class _SaidByServer(Exception):
    """An MCP server's own account of what went wrong."""


async def _answer(tools: Mapping[str, Tool], invocation: Invocation, most: int) -> ToolAnswer:
    """The result of a call as text, or what went wrong."""
    tool = tools.get(invocation.name)
    if tool is None:
        hint = nearest(invocation.name, tools)
        return ToolAnswer(
            f"error: no tool {invocation.name!r}{hint or ';'} there are: {', '.join(tools)}", failed=True
        )
    try:
        text = text_of(await tool.run(json.loads(invocation.arguments)), most)
    except msgspec.ValidationError as error:
        return ToolAnswer(f"error: wrong arguments: {error}", failed=True)
    except _SaidByServer as error:
        return ToolAnswer(text_of(f"error: {error}", most), failed=True)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the policy is told
        print(f"tool {tool.name!r} raised {place_of(error)}", file=sys.stderr, flush=True)
        return ToolAnswer(text_of(f"error: {type(error).__name__}: {error}", most), failed=True)
    return ToolAnswer(text.encode(errors="replace").decode())


async def _serve(pipes: Pipes) -> None:
    first = pipes.receive()
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=_Setup)
    async with AsyncExitStack() as stack:
        try:
            tools = await _tools(setup, stack)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is told
            traceback.print_exc()
            pipes.send(Started(f"the tools cannot be made: {place_of(error)}"))
            return
        pipes.send(Started(data=msgspec.msgpack.encode([tool.schema for tool in tools.values()])))
        while (data := await anyio.to_thread.run_sync(pipes.receive)) is not None:
            invocation = msgspec.msgpack.decode(data, type=Invocation)
            pipes.send(await _answer(tools, invocation, setup.max_result_chars))


def main() -> None:
    """Body of the process."""
    anyio.run(_serve, Pipes())


if __name__ == "__main__":
    main()
