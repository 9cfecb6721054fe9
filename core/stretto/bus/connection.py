"""Connections to nats-servers: how a client logs in, trusts a certificate, and reconnects."""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import anyio
import nats.errors
from nats.aio.client import PING_PROTO, Client, _validate_subject  # pyright: ignore[reportPrivateUsage]

from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.bus.tls import client_context
from stretto.errors import BusError, NoAnswer

_CONNECT_S = 20.0
"""Seconds for the first connection: the bundled server may start at the same time."""
_RECONNECT_S = 0.2
"""Seconds between attempts to reconnect. With 0, closing could hardly ever stop the client's attempts."""
_PING_S = 1
_UNANSWERED_PINGS = 5
"""The client reconnects after more unanswered pings than this."""
_TRY_S = 5  # for one attempt to connect to a server
_TRY_OF_SEVERAL_S = 2
"""Seconds for one attempt if there are several servers: a server that hangs must not delay the client."""

_expect_valid = lru_cache(maxsize=4096)(_validate_subject)
"""Raises BadSubjectError for a malformed subject: its text could contain other commands to the server."""

_NO_CERTIFICATE = "it may want a client's certificate, of its own authority (bus.tls)"


class NatsClient(Client):
    """A NATS client that sends nothing, not even its credentials, to a `tls://` server that offers no TLS.

    Its `flush` waits until the server has processed all earlier messages. Its `publish` costs less time.
    """

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish a message as nats-py does, but check each subject only once and copy no payload."""
        size = len(payload)
        if headers or self._status != Client.CONNECTED or size > self._max_payload:
            await super().publish(subject, payload, reply, headers)
            return
        _expect_valid(subject)
        if reply:
            _expect_valid(reply)
        head = f"PUB {subject} {reply} {size}\r\n".encode()
        self._pending += (head, payload, b"\r\n")
        self._pending_data_size += len(head) + size + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += size
        if self._pending_data_size > self._max_pending_size:
            await self._flush_pending(force_flush=True)
        elif self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def _connect_to_server(self, s: Any) -> None:
        # After a failed attempt to connect, nats-py does not close the socket.
        if self._transport is not None:
            self._transport.close()
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        if initial_connection and server and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise nats.errors.Error(f"{server.uri.hostname} offers no TLS")
        await super()._process_info(info, initial_connection)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # nats-py sends a ping before the pending commands, so its pong would not confirm a subscription.
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        # nats-py keeps the future of a `flush` that was cancelled or has timed out. The late pong would set
        # this future again, and the error would end the task that reads from the server.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


async def open_once(
    bootstrap: Bootstrap,
    address: str,
    timeout_s: float,
    on_error: Callable[[Exception], Awaitable[None]] | None = None,
) -> Client:
    """Open a client that does not reconnect and that the caller closes. Raise BusError after `timeout_s`."""
    client = NatsClient()

    async def ignore(error: Exception) -> None:
        pass

    tls = {"tls": client_context(bootstrap.tls)} if address.startswith("tls://") else {}
    try:
        with anyio.fail_after(timeout_s):
            await client.connect(
                [address],
                inbox_prefix=inbox_of(bootstrap).encode(),
                allow_reconnect=False,
                error_cb=on_error or ignore,
                **tls,
                **login_of(bootstrap),
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        reason = client.last_error if isinstance(error, TimeoutError) else error
        await close_client(client)
        raise BusError(_reason_text(reason or error, address)) from error
    return client


def login_of(bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the client's options for the credentials of a bootstrap."""
    if bootstrap.credentials_file:
        return {"user_credentials": bootstrap.credentials_file}
    return {"user": bootstrap.user, "password": bootstrap.password} if bootstrap.user else {}


def without_logins(url: str) -> str:
    """Return addresses of servers without the users and passwords that they may contain."""
    return re.sub(r"//[^/@,]*@", "//", url)


def _reason_text(error: Exception, url: str) -> str:
    text = str(error).removeprefix("nats: ").strip("'") or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message or text}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or text}; {_NO_CERTIFICATE}"
    if isinstance(error, ConnectionResetError | BrokenPipeError) and "tls://" in url:
        return f"it ended the connection; {_NO_CERTIFICATE}"
    return text


async def open_client(
    client: Client,
    bootstrap: Bootstrap,
    on_error: Callable[[Exception], Awaitable[None]],
    on_disconnected: Callable[[], Awaitable[None]],
    on_reconnected: Callable[[], Awaitable[None]],
    login: dict[str, Any],
) -> None:
    """Open a client that reconnects until it is closed."""
    options: dict[str, Any] = {"reconnect_time_wait": _RECONNECT_S}  # nats-py types it as int
    if "tls://" in bootstrap.url:
        options["tls"] = client_context(bootstrap.tls)
    try:
        with anyio.fail_after(_CONNECT_S):
            await client.connect(
                bootstrap.url.split(","),
                name=bootstrap.worker or bootstrap.role,
                inbox_prefix=inbox_of(bootstrap).encode(),
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                connect_timeout=_TRY_S if "," not in bootstrap.url else _TRY_OF_SEVERAL_S,
                ping_interval=_PING_S,
                max_outstanding_pings=_UNANSWERED_PINGS,
                error_cb=on_error,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
                **options,
                **login,
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        reason = client.last_error if isinstance(error, TimeoutError) else error
        why = f" ({_reason_text(reason, bootstrap.url)})" if reason is not None else ""
        raise NoAnswer(
            f"nats-server at {without_logins(bootstrap.url)}{why}", "connect", _CONNECT_S
        ) from error


async def close_client(client: Client) -> None:
    """Send the pending messages, and close a client. A lost server is no error."""
    if client.is_connected:
        with anyio.move_on_after(1), suppress(nats.errors.Error, OSError):
            await client.flush(1)
    with anyio.move_on_after(1), suppress(nats.errors.Error, OSError):
        await client.close()


def inbox_of(bootstrap: Bootstrap) -> str:
    """Return the prefix of the subjects at which a process of this role receives answers."""
    role: Any = bootstrap.role
    return Subjects(bootstrap.run).inbox(role)


def seconds_to_reconnect(client: Client) -> float:
    """Return the most seconds that a client needs to find another server of the cluster after the loss of its
    server, if all other servers but one hang; 0 if the cluster has one server."""
    servers = len(client.servers)
    return (_UNANSWERED_PINGS + 1) * _PING_S + servers * _TRY_OF_SEVERAL_S if servers > 1 else 0.0


def payload_limit(client: Client) -> int:
    """Return the maximum size, in bytes, of a payload that is sent in one piece."""
    return client.max_payload - 1024  # room for headers
