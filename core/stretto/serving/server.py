"""One HTTP server beside an inference worker: started under a guard, or attached to, and spoken with.

Every call has a deadline. What goes wrong is one of two things: `ServerRefused`, an answer that says no, or
`ServerLost`, no answer that can be understood, after which the server is not to be trusted any more.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec
from anyio.abc import Process

from stretto.errors import EngineError
from stretto.serving import guard

__all__ = ["Server", "ServerCommand", "ServerLost", "ServerRefused"]

T = TypeVar("T")

_GRACE_S = 1.5  # shorter than a worker's own time to leave
_KEEPALIVE_S = 2.0
_TAIL_LINES = 15
# Of the worker's own environment: where its interpreter finds its packages is no business of the server's.
_PRIVATE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class ServerRefused(EngineError):
    """The server answered that it cannot or will not."""

    def __init__(self, path: str, status: int, reason: str) -> None:
        super().__init__(f"the server refused {path}: {status} {reason}")
        self.status = status
        self.reason = reason


class ServerLost(EngineError):
    """The server did not answer in time, or broke off."""


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started."""

    arguments: tuple[str, ...]
    """The program and its arguments; everybody on the machine can read them."""
    env: Mapping[str, str]
    """Variables beside the worker's own."""


class Server:
    """A server that is there, until `stop`."""

    def __init__(
        self, url: str, key: str | None, process: Process | None = None, log: Path | None = None
    ) -> None:
        self.url = url
        self._process = process
        self._log = log
        # A stream may be silent for long while its sample waits; the engine has its own deadline for that.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Servers close idle connections after 5 s; one must not be used at that very moment.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=timeout,
        )
        self.heard = time.monotonic()
        """When anything came from it last."""
        self.broken = ""
        """Why it is not to be trusted any more."""

    def distrust(self, why: str) -> None:
        """Something went wrong with it: nothing more is to be asked of it. The first reason counts."""
        self.broken = self.broken or why

    @staticmethod
    def draw_address() -> tuple[int, str]:
        """A free port of loopback, and a key."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1], secrets.token_urlsafe(24)

    @classmethod
    async def start(cls, command: ServerCommand, port: int, key: str, log: Path) -> Server:
        """Start a server under a guard. To be called on the event loop, in the thread that lives longest."""
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
        with log.open("ab") as file:
            process = await anyio.open_process(
                [sys.executable, guard.__file__, str(_GRACE_S), *command.arguments],
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env, **command.env},
                start_new_session=True,
            )
        return cls(f"http://127.0.0.1:{port}", key, process, log)

    @property
    def attached(self) -> bool:
        """Whether it was running already."""
        return self._process is None

    @property
    def status(self) -> int | None:
        """Exit status of a server started here, once it has ended."""
        return self._process.returncode if self._process is not None else None

    def tail(self) -> str:
        """The last lines of its log."""
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open(errors="replace") as file:
            return "".join(deque(file, maxlen=_TAIL_LINES)).rstrip()

    async def stop(self) -> None:
        """End what was started here; returns when none of its processes is left. May be called again."""
        await self._session.close()
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            await self._process.stdin.aclose()
        await self._process.wait()
        with suppress(ProcessLookupError):  # a guard that was killed has left the server's session behind
            os.killpg(self._process.pid, signal.SIGKILL)

    # ---------------------------------------------------------------------------------------- HTTP

    async def until_healthy(self, path: str, deadline_s: float) -> None:
        """Wait until it answers.

        Raises:
            EngineError: if it ended, with its last words, or did not answer in time.
        """
        deadline = time.monotonic() + deadline_s
        reason = "no answer"
        while self.status is None:
            try:
                await self.get(path, deadline_s=5)
            except (ServerLost, ServerRefused) as error:
                reason = str(error)
            else:
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the server at {self.url} was not ready after {deadline_s:g} s ({reason});"
                    f" inference.start_timeout_s allows more time{self._last_words()}"
                )
            await anyio.sleep(0.2)
        raise EngineError(f"the server ended at its start with status {self.status}{self._last_words()}")

    def _last_words(self) -> str:
        tail = self.tail()
        return f"; its log, {self._log}, ends:\n{tail}" if tail else ""

    async def get(self, path: str, *, deadline_s: float) -> Any:
        """What it answers, decoded from JSON; None where that is nothing.

        Raises:
            ServerRefused: with its reason.
            ServerLost: without an answer by the deadline.
        """
        return await self._call("GET", path, None, deadline_s)

    async def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """The same with a body, as JSON."""
        return await self._call("POST", path, body, deadline_s)

    async def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        self._see_open()
        try:
            with anyio.fail_after(deadline_s):
                async with self._session.request(method, path, **_json(body)) as response:
                    content = await response.read()
        except TimeoutError:
            raise ServerLost(f"{self.url}{path} did not answer within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{self.url}{path}: {error or type(error).__name__}") from error
        self.heard = time.monotonic()
        if response.status != 200:
            raise ServerRefused(path, response.status, _reason(content))
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError:
            return content.decode(errors="replace")

    async def stream(self, path: str, body: Any, event: msgspec.json.Decoder[T]) -> AsyncGenerator[T]:
        """The events of a stream until the server says `[DONE]`. Closing it early closes the connection.

        Raises:
            ServerRefused: with its reason.
            ServerLost: if it breaks off, or sends what is no such event.
        """
        self._see_open()
        try:
            async with self._session.post(path, **_json(body)) as response:
                if response.status != 200:
                    raise ServerRefused(path, response.status, _reason(await response.read()))
                rest = b""
                async for data in response.content.iter_any():
                    self.heard = time.monotonic()
                    *whole, rest = (rest + data).split(b"\n\n")
                    for each in whole:
                        if each == b"data: [DONE]":
                            return
                        yield event.decode(each.removeprefix(b"data: "))
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ServerLost(f"{self.url}{path}: {error or type(error).__name__}") from error
        except RuntimeError:  # aiohttp's, of a connection that `stop` closes during a read
            self._see_open()
            raise
        raise ServerLost(f"{self.url}{path}: the stream ended without [DONE]")

    def _see_open(self) -> None:
        if self._session.closed:
            raise ServerLost(f"the server at {self.url} was stopped")


def _json(body: Any) -> dict[str, Any]:
    if body is None:
        return {}
    return {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def _reason(content: bytes) -> str:
    """The message in the JSON of a refusal, or the text as it stands."""
    try:
        found: Any = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content.decode(errors="replace")[:500].strip()
    while isinstance(found, dict):
        known: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]
        found = next((known[key] for key in ("error", "message", "detail") if key in known), str(known))
    return str(found)[:500]
