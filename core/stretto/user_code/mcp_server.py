"""An MCP server of the tool process: it is started when a call needs it, and again after it was lost."""

from __future__ import annotations

import base64
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from stretto.errors import StrettoError, error_text
from stretto.tools import MCPServer, Tool, ToolResult
from stretto.user_code.guard import guarded

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as MCPTool

_MOST_RESTARTS = 3
"""Restarts of a server without a call that works between them. Then the tool process ends, and the next
one starts all of its servers, or reports why it cannot."""
_LAST_LINES, _LAST_CHARS = 3, 300
"""Lines of standard error in an error, and characters of each: the last words, and the exit status."""
_READ_S = 1.0
"""Seconds for the end of a server's standard error, which a process that it left may hold open."""
_SHELL = ("-c", '"$@"; status=$?; [ $status = 0 ] || echo "exit status $status" >&2; exit $status', "sh")
"""Runs the server's command. `mcp` does not tell the exit status, so the shell writes it."""


class ToolServerError(StrettoError):
    """An MCP server reported an error, did not start, or was lost. The text is for the policy, too."""


class ToolServer:
    """One MCP server. The call in which it is lost fails and is never repeated. The next call starts it."""

    def __init__(self, config: MCPServer, tasks: TaskGroup) -> None:
        self.name = config.url or " ".join(config.command)
        self.given_up = ""
        """Why the server is not started again in this process; empty while it can be."""
        self._losses = 0
        self._config = config
        self._tasks = tasks
        self._client: Client | None = None
        self._fault: Exception | None = None

    async def tools(self) -> list[Tool]:
        """Start the server, and return its tools."""
        client = await self._start()
        listed: list[MCPTool] = []
        cursor: str | None = None
        try:
            while True:
                page = await client.list_tools(cursor=cursor)
                listed += page.tools
                if (cursor := page.next_cursor) is None:
                    break
        except Exception as error:
            raise await self._lost(error) from error
        return [
            Tool(tool.name, tool.description or "", tool.input_schema, partial(self.call, tool.name))
            for tool in listed
        ]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. Raise ToolServerError if it reports an error, or if the server is lost in the call, or
        does not start."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await self._running()
        try:
            result = await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise await self._lost(error) from error
        self._losses = 0
        text = "\n".join(
            _text_of(part) or f"[{part.type}, which cannot be shown as text]"
            for part in result.content
            if part.type != "image"
        )
        if result.is_error:
            raise ToolServerError(text)
        images = [base64.b64decode(part.data) for part in result.content if part.type == "image"]
        return ToolResult(text or result.structured_content or "", images)

    async def _running(self) -> Client:
        if self._client is not None:
            try:
                # A server that ended since the last call does not get this one.
                await self._client.list_tools(cache_mode="bypass")
            except Exception as error:  # noqa: BLE001 - whatever it is, the next step is a new connection
                await self._lost(error)
            else:
                return self._client
        return await self._start()

    async def _start(self) -> Client:
        self._leave, self._left = anyio.Event(), anyio.Event()
        self._output, self._fault = _StandardError(), None
        try:
            client = self._client = await self._tasks.start(self._hold)
        except Exception as error:
            raise self._loss("did not start", error) from error
        return client

    async def _hold(self, *, task_status: TaskStatus[Client]) -> None:
        """Hold the connection, in a task of its own: connections may end in any order."""
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        started = False
        program, *args = guarded(["sh", *_SHELL, *self._config.command])  # it has a session of its own
        command = StdioServerParameters(command=program, args=args, env=dict(os.environ))
        transport = self._config.url or stdio_client(command, self._output.pipe)
        try:
            async with Client(transport) as client:
                started = True
                self._output.pipe.close()  # only the server writes
                task_status.started(client)
                await self._leave.wait()
        except Exception as error:
            if not started:
                raise
            self._fault = error
        finally:
            self._output.pipe.close()
            self._left.set()

    async def _lost(self, error: Exception) -> ToolServerError:
        self._leave.set()
        await self._left.wait()
        self._client = None
        return self._loss("was lost", self._fault or error)

    def _loss(self, what: str, error: Exception) -> ToolServerError:
        last = "; ".join(self._output.last_lines())
        shown = f"; its last lines: {last}" if last else ""
        text = f"the MCP server {self.name!r} {what}: {error_text(error)}{shown}"
        print(text, file=sys.stderr, flush=True)
        self._losses += 1
        if self._losses > _MOST_RESTARTS:
            self.given_up = f"lost {self._losses} times in a row: {text}"
        return ToolServerError(text)


class _StandardError:
    """The standard error of one server process. A thread copies it to that of this process."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.pipe = os.fdopen(writing, "w")
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._thread = threading.Thread(target=self._copy, args=(reading,), daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Return the last lines of a server that has ended."""
        self._thread.join(_READ_S)
        return list(self._lines)

    def _copy(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                print(line, end="", file=sys.stderr, flush=True)
                if line.strip():
                    self._lines.append(line.strip()[-_LAST_CHARS:])


def _text_of(part: Any) -> str:
    """Return a part's text, or that of the resource in it, or the address of one that it links."""
    part = getattr(part, "resource", part)
    return getattr(part, "text", "") or str(getattr(part, "uri", ""))
