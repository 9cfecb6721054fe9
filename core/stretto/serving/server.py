"""One HTTP server of an inference worker: start it under a guard or attach to it, and send it requests.

A call with a deadline fails in one of two ways: `ServerRefused`, the server answered with an error; or
`ServerLost`, no valid answer came, and the server must be replaced.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec
import psutil
from anyio.abc import Process

from stretto.errors import EngineError
from stretto.machine import clock
from stretto.user_code.guard import guarded
from stretto.user_code.sandbox import kill

__all__ = ["Server", "ServerCommand", "ServerLost", "ServerRefused"]

T = TypeVar("T")

_GRACE_S = 1.5  # shorter than a worker's own time to leave
# Servers close idle connections after 5 s; do not send a request on one at that moment.
_KEEPALIVE_S = 2.0
_TAIL_LINES = 15
# Variables that the server does not inherit: they tell the worker's interpreter its packages.
_PRIVATE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class ServerRefused(EngineError):
    """The server answered a request with an error status."""

    def __init__(self, path: str, status: int, reason: str) -> None:
        super().__init__(f"the server refused {path}: {status} {reason}")
        self.status = status
        self.reason = reason


class ServerLost(EngineError):
    """The server did not answer in time, closed the connection, or sent data that cannot be decoded."""


@dataclass(frozen=True)
class ServerCommand:
    """The command line and environment that start a server."""

    arguments: tuple[str, ...]
    """The program and its arguments. Every user of the machine can read them."""
    env: Mapping[str, str]
    """Environment variables, added to the worker's own."""


class Server:
    """A running server, started or attached to, until `stop`."""

    def __init__(
        self, url: str, key: str | None, process: Process | None = None, log: Path | None = None
    ) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            # A stream may be silent for long while its sample waits; the engine has a deadline for that.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        self.last_data_at = clock.now()
        self.broken = ""
        """Why the server must be replaced; empty while it works."""

    def distrust(self, why: str) -> None:
        """Mark the server as broken, so that the engine replaces it. The first reason is kept."""
        self.broken = self.broken or why

    @staticmethod
    def draw_address() -> tuple[int, str]:
        """Return a free port of the loopback interface, and a new random key."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            # No other characters: a program takes an argument that begins with "-" for a flag.
            return probe.getsockname()[1], secrets.token_hex(24)

    @classmethod
    async def start(cls, command: ServerCommand, port: int, key: str, log: Path) -> Server:
        """Start a server under a guard. Call it on the event loop: the server ends with this thread."""
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
        with log.open("ab") as file:
            process = await anyio.open_process(
                guarded(command.arguments, _GRACE_S),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env, **command.env},
            )
        return cls(f"http://127.0.0.1:{port}", key, process, log)

    @property
    def attached(self) -> bool:
        """True if this worker did not start the server."""
        return self._process is None

    @property
    def status(self) -> int | None:
        """Exit status of a server that this worker started, negative for a signal; None while it runs."""
        return self._process.returncode if self._process is not None else None

    def tail(self) -> str:
        """Return the last lines of the server's log."""
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open(errors="replace") as file:
            return "".join(deque(file, maxlen=_TAIL_LINES)).rstrip()

    async def stop(self) -> None:
        """Close the connection; end a started server with all its processes. Idempotent."""
        await self._session.close()
        if self._process is None:
            return
        kill(self._process)
        if await self._process.wait() == -signal.SIGKILL:
            _kill_session(self._process.pid)

    async def until_healthy(self, path: str, deadline_s: float) -> None:
        """Wait until the server answers at `path`. Raise EngineError, with the log's end, if it does not."""
        deadline = clock.now() + deadline_s
        reason = "no answer"
        while self.status is None:
            try:
                await self.get(path, deadline_s=5)
            except (ServerLost, ServerRefused) as error:
                reason = str(error)
            else:
                return
            if clock.now() > deadline:
                raise EngineError(
                    f"the server at {self.url} was not ready after {deadline_s:g} s ({reason});"
                    f" inference.start_timeout_s allows more time{self._log_end()}"
                )
            await anyio.sleep(0.2)
        raise EngineError(f"the server ended at its start with status {self.status}{self._log_end()}")

    def _log_end(self) -> str:
        tail = self.tail()
        return f"; its log, {self._log}, ends:\n{tail}" if tail else ""

    async def get(self, path: str, *, deadline_s: float) -> Any:
        """Return the answer to a GET: decoded JSON, else text, or None if it is empty.

        Raises:
            ServerRefused: if the status is not 200; with the server's reason.
            ServerLost: if there is no answer by the deadline.
        """
        return await self._call("GET", path, None, deadline_s)

    async def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """Send a POST request, with `body` as JSON. The answer and the errors are those of `get`."""
        return await self._call("POST", path, body, deadline_s)

    async def change(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """Send a POST request without which the server's state would not be known.

        Raises:
            ServerLost: if there is no answer by the deadline, or the server refuses.
        """
        try:
            return await self.post(path, body, deadline_s=deadline_s)
        except ServerRefused as error:
            raise ServerLost(str(error)) from error

    async def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        self._check_open()
        try:
            with anyio.fail_after(deadline_s):
                async with self._session.request(method, path, **_json(body)) as response:
                    content = await response.read()
        except TimeoutError:
            raise ServerLost(f"{self.url}{path} did not answer within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{self.url}{path}: {error or type(error).__name__}") from error
        self.last_data_at = clock.now()
        if response.status != 200:
            raise ServerRefused(path, response.status, _reason(content))
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError:
            return content.decode(errors="replace")

    async def stream(self, path: str, body: Any, event: msgspec.json.Decoder[T]) -> AsyncGenerator[T]:
        """Yield the events of a stream until `[DONE]`. Closing the generator early closes the connection.
        Raise the errors of `get`, and ServerLost if it ends without `[DONE]` or has invalid events."""
        self._check_open()
        try:
            async with self._session.post(path, **_json(body)) as response:
                if response.status != 200:
                    raise ServerRefused(path, response.status, _reason(await response.read()))
                buffer = b""
                async for data in response.content.iter_any():
                    self.last_data_at = clock.now()
                    *lines, buffer = (buffer + data).split(b"\n\n")
                    for line in lines:
                        if line == b"data: [DONE]":
                            return
                        yield event.decode(line.removeprefix(b"data: "))
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ServerLost(f"{self.url}{path}: {error or type(error).__name__}") from error
        except RuntimeError:  # aiohttp raises it when `stop` closes the connection during a read
            self._check_open()
            raise
        raise ServerLost(f"{self.url}{path}: the stream ended without [DONE]")

    def _check_open(self) -> None:
        if self._session.closed:
            raise ServerLost(f"the server at {self.url} was stopped")


def _kill_session(leader: int) -> None:
    """Kill the remaining processes of a session: if a guard was killed, the server's processes still run."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def _json(body: Any) -> dict[str, Any]:
    if body is None:
        return {}
    return {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def _reason(content: bytes) -> str:
    try:
        message: Any = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content.decode(errors="replace")[:500].strip()
    while isinstance(message, dict):
        fields: dict[str, Any] = message  # pyright: ignore[reportUnknownVariableType]
        message = next((fields[key] for key in ("error", "message", "detail") if key in fields), str(fields))
    return str(message)[:500]
