"""The transport of a simulated connection, in place of nats-py's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nats.aio.transport import Transport

from stretto.simulation.loop import Escaped, current_process

if TYPE_CHECKING:
    from stretto.simulation.server import SimulatedConnection, SimulatedServer

_READ_LIMIT = 2**26


class Link:
    """One direction of a connection. As with TCP, bytes arrive later, in order, and perhaps joined."""

    def __init__(self, server: SimulatedServer, deliver: Callable[[bytes], None]) -> None:
        self._server, self._deliver = server, deliver
        self._under_way: list[bytes] = []
        self._arrives = 0.0
        self.open = True

    def send(self, data: bytes) -> None:
        """Send bytes, which arrive later."""
        if not self.open:
            return
        self._under_way.append(data)
        if len(self._under_way) == 1:
            loop = self._server.loop
            self._arrives = max(self._arrives, loop.time() + self._server.delay_s())
            loop.call_at(self._arrives, self._arrive, context=self._server.context)

    def then(self, call: Callable[[], None]) -> None:
        """Call a function when all bytes under way have arrived."""
        if self._under_way:
            self._server.loop.call_at(self._arrives, call, context=self._server.context)
        else:
            call()

    def _arrive(self) -> None:
        data, self._under_way = b"".join(self._under_way), []
        if self.open:
            self._deliver(data)


class SimulatedTransport(Transport):
    """A client's end of a connection to the simulated server. It belongs to the process that opens it."""

    server: SimulatedServer

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._connection: SimulatedConnection | None = None

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        """Connect to the server. Raises ConnectionRefusedError if the process cannot reach the server."""
        self.close()
        await asyncio.sleep(3 * self.server.delay_s())  # the handshake
        process = current_process()
        if not self.server.weather.reaches(process.pid if process else 0):
            raise ConnectionRefusedError("connection refused")
        self._reader = asyncio.StreamReader(_READ_LIMIT, loop=self.server.loop)
        self._connection = self.server.accept(self, process)
        if process is not None:
            process.on_end.append(self.close)

    async def connect_tls(self, uri: Any, ssl_context: Any, buffer_size: int, connect_timeout: int) -> None:
        """Refuse: there is no TLS in the simulation."""
        raise Escaped("TLS is not simulated")

    def write(self, payload: bytes) -> None:
        """Send bytes, which are lost if the connection is closed."""
        if self._connection is not None:
            self._connection.to_server.send(bytes(payload))

    def writelines(self, payload: Iterable[bytes]) -> None:
        """Send several pieces of bytes as one."""
        self.write(b"".join(payload))

    async def read(self, buffer_size: int) -> bytes:
        """Wait for bytes and return them; empty at the end of the connection."""
        assert self._reader is not None
        return await self._reader.read(buffer_size)

    async def readline(self) -> bytes:
        assert self._reader is not None
        return await self._reader.readline()

    async def drain(self) -> None:
        """Let other tasks run; the buffer has no limit. Raises ConnectionResetError after a loss."""
        if self._connection is None or self.at_eof():
            raise ConnectionResetError("connection lost")
        await asyncio.sleep(0)

    async def wait_closed(self) -> None:
        """Return at once: closing takes no time."""

    def close(self) -> None:
        """Close the connection. The server still receives the bytes written before."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.to_client.open = False
            connection.to_server.then(connection.drop)
            self._end()

    def break_off(self) -> None:
        """Lose the connection and the bytes under way. The server calls this method."""
        self._connection = None
        self._end()

    def receive(self, data: bytes) -> None:
        if self._connection is not None and self._reader is not None:
            self._reader.feed_data(data)

    def at_eof(self) -> bool:
        """Return whether the connection has ended and all bytes were read."""
        return self._reader is None or self._reader.at_eof()

    def __bool__(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - nats-py's own is wrong
        return self._reader is not None

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.feed_eof()
