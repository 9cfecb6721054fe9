"""Typed messages over one NATS connection: publish, subscribe, request and serve, streams, queue, state.

The bus promises:

- *publish → subscribe*: a message arrives at most once, and in order for one publisher and one subject. A
  handler runs for one message at a time.
- *request → serve*: the handler runs once for a request, even if the client has to repeat the request.
  Requests run concurrently.
- *streams*: a message is stored before `append` returns.
- The bus refuses bytes that are not the expected message. It counts and logs them, and no handler sees them.
- The bus sends payloads above the server's limit in parts, and joins the parts before a handler sees them.
- The client pings the server, and treats a server that stands still as a lost connection. It reconnects until
  the bus closes, and holds back what is published in the meantime.
- Every wait for an answer has a deadline; after it, `NoAnswer` names the silent process. The time without a
  connection does not count, because the silence of the bus says nothing about the other process.
- With several servers of a cluster, the client connects to any of them. What is stored survives the loss of a
  server if it has replicas; while the others elect a leader, the client repeats what it asked the store.
- With `tls://` nothing is sent before the server has shown a certificate that fits.
- If the handler of a subscription raises, the bus ends: the exception comes out of `async with connect(...)`.
  An exception in the handler of a request goes to the asking process as a refusal.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import ssl
import struct
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Generic, TypeVar

import anyio
import msgspec
import nats
import nats.errors
import structlog
from anyio.abc import TaskGroup
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    RawStreamMsg,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from stretto.bus.messages import SERVER, Message, Refusal, Subjects, Wait
from stretto.bus.server import Bootstrap
from stretto.bus.tls import client_context
from stretto.errors import BusError, Malformed, MessageGone, NoAnswer, Refused, StrettoError
from stretto.interfaces import address_towards

__all__ = [
    "Bus",
    "Delivery",
    "Extent",
    "connect",
    "decoder",
    "open_once",
    "sleep_and_measure_delay",
    "without_logins",
]

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)
T = TypeVar("T")
Handler = Callable[[M], Awaitable[None] | None]

log = structlog.get_logger()

# First byte of a part of a larger payload. msgpack never uses this byte.
_PART = 0xC1
_PART_HEAD = struct.Struct(">B16sII")  # mark, id of the whole payload, index, count
_CONNECT_S = 20.0
_STORE_ANSWER_S = 10.0
"""Seconds for one attempt of an operation on the store."""
_CLUSTER_ANSWER_S = 4.0
"""The same for a store with replicas. A killed server answers nothing, and another one may answer soon."""
_HEARTBEAT_S = 2
"""Seconds between two signs of life from the server of a stream that this process follows."""
_SILENT_S = 7.0
"""After this many seconds without one, the process creates another consumer."""
_RESEND_S = 2.0
_KEEP_ANSWERS = 1024
_MAX_PAYLOAD = 48 * 2**20
"""Largest payload, in bytes, that is sent in parts."""
_UNFINISHED_BYTES = 64 * 2**20
"""Memory for the parts of payloads that are not complete yet."""
_MAX_PARTS = 4096
_PART_SUFFIX = ".part"
"""Ends the subject under which a stream stores the parts of its messages."""
_PartNumbers = Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=_MAX_PARTS)]
_PIECE_OVERHEAD = 200
"""Estimated bytes that a stored piece takes besides its content."""
_LOGGED_REFUSALS = 100

_NO_MESSAGE = (10037, 10043, 10057)
"""Error codes of the server for a message that does not exist, or no longer exists."""
_OTHER_CONFIGURATION = 10058
"""Error code for a stream that exists with another configuration."""
_ELECTING = (10005, 10009, 10118, 10119, 10158)
"""Error codes of a cluster that has lost a server a moment ago: too few servers for the replicas, no leader
here, a stream or a consumer whose server is away, and a message whose first copy is still being stored."""
_COPYING = (10023,)
"""Error codes for a consumer with more replicas than its stream has now: a stream that gets more replicas is
copied first."""
_RECONNECT_S = 0.2
"""Seconds between attempts to reconnect. With 0, closing could hardly ever stop the client's attempts."""
_PING_S = 1
"""Seconds between two pings of the server."""
_UNANSWERED_PINGS = 5
"""After more pings than this without an answer, the client gives up the connection and reconnects."""
_TRY_S = 5
"""Seconds in which a server must answer a client that connects."""
_TRY_OF_SEVERAL_S = 2
"""The same with several servers: one that stands still must not keep a client from the others for long."""

_NO_CERTIFICATE = "it may want a client's certificate, of its own authority (bus.tls)"

_encode = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=256)
def decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    """Return the decoder of one kind of message. For malformed bytes it raises only msgspec.DecodeError."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_checked(data: bytes | memoryview) -> Any:
        try:
            return decode(data)
        except UnicodeDecodeError as error:  # msgspec raises it for some strings
            raise msgspec.DecodeError(f"a string is not UTF-8: {error}") from error
        except RecursionError as error:  # msgspec also reads the fields that it ignores
            raise msgspec.DecodeError("nested too deeply") from error

    return decode_checked


@dataclass
class Delivery(Generic[M]):
    """A message taken from a work queue. Without a call of `acknowledge` or `in_progress`, the server
    delivers it again after the queue's `redeliver_s`."""

    message: M
    _msg: Msg

    async def acknowledge(self) -> None:
        """Acknowledge the message, which removes it from the queue."""
        await self._msg.ack()

    async def give_back(self) -> None:
        """Let the server deliver the message to another process at once."""
        await self._msg.nak()

    async def in_progress(self) -> None:
        """Restart the time until the server delivers the message again."""
        await self._msg.in_progress()


@dataclass(frozen=True)
class Extent:
    """The sequence numbers of a stream's messages at one moment."""

    first: int
    last: int
    """Highest sequence number that the stream has ever given; `first - 1` if the stream is empty."""
    missing: frozenset[int] = frozenset()
    """Sequence numbers between `first` and `last` without a message, such as those of damaged messages."""

    def __contains__(self, sequence: int) -> bool:
        return self.first <= sequence <= self.last and sequence not in self.missing


@asynccontextmanager
async def connect(bootstrap: Bootstrap) -> AsyncGenerator[Bus]:
    """Open a bus for the duration of the block. The end of the block removes all subscriptions and closes the
    connections.

    Raises:
        NoAnswer: if no server can be reached, or if they refuse the credentials or the certificate, or have
            no valid certificate themselves. The message has the last reason.
        ConfigError: if the certificate of the bootstrap is damaged.
    """
    client = _Client()
    has_store = bool(bootstrap.store_user)
    store = _Client() if has_store else client
    bus = Bus(client, store, bootstrap)
    try:
        login = _login_of(bootstrap)
        await _open_client(client, bootstrap, bus.on_error, bus.on_disconnected, bus.on_reconnected, login)
        if has_store:
            login = {"user": bootstrap.store_user, "password": bootstrap.store_password}
            await _open_client(
                store, bootstrap, bus.on_error, bus.on_store_disconnected, bus.on_store_reconnected, login
            )
        async with anyio.create_task_group() as tasks:
            await bus.open(tasks)
            yield bus
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            for each in dict.fromkeys((client, store)):
                await _close_client(each)


class _Client(Client):
    """A NATS client that sends nothing, not even its credentials, to a `tls://` server that offers no TLS."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        if initial_connection and server and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise nats.errors.Error(f"{server.uri.hostname} offers no TLS")
        await super()._process_info(info, initial_connection)


async def open_once(
    bootstrap: Bootstrap,
    address: str,
    timeout_s: float,
    on_error: Callable[[Exception], Awaitable[None]] | None = None,
) -> Client:
    """Open a plain client of one server, which does not reconnect. The caller closes it.

    Args:
        on_error: called with each error that the server reports.

    Raises:
        BusError: if the server does not accept the client within `timeout_s` seconds.
        ConfigError: if the certificate of the bootstrap is damaged.
    """
    client = _Client()

    async def ignore(error: Exception) -> None:
        """Leave the error to the exception."""

    tls = {"tls": client_context(bootstrap.tls)} if address.startswith("tls://") else {}
    try:
        with anyio.fail_after(timeout_s):
            await client.connect(
                [address],
                inbox_prefix=_inbox_of(bootstrap).encode(),
                allow_reconnect=False,
                error_cb=on_error or ignore,
                **tls,
                **_login_of(bootstrap),
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        reason = client.last_error if isinstance(error, TimeoutError) else error
        await _close_client(client)
        raise BusError(_reason_text(reason or error, address)) from error
    return client


def _login_of(bootstrap: Bootstrap) -> dict[str, Any]:
    if bootstrap.credentials_file:
        return {"user_credentials": bootstrap.credentials_file}
    return {"user": bootstrap.user, "password": bootstrap.password} if bootstrap.user else {}


def without_logins(url: str) -> str:
    """Return addresses of servers without the users and passwords that they may contain."""
    return re.sub(r"//[^/@,]*@", "//", url)


def _reason_text(error: Exception, url: str) -> str:
    """Return why a connection was not made, in words for a user."""
    text = str(error).removeprefix("nats: ").strip("'") or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message or text}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or text}; {_NO_CERTIFICATE}"
    if isinstance(error, ConnectionResetError | BrokenPipeError) and "tls://" in url:
        return f"it ended the connection; {_NO_CERTIFICATE}"
    return text


async def _open_client(
    client: Client,
    bootstrap: Bootstrap,
    on_error: Callable[[Exception], Awaitable[None]],
    on_disconnected: Callable[[], Awaitable[None]],
    on_reconnected: Callable[[], Awaitable[None]],
    login: dict[str, Any],
) -> None:
    options: dict[str, Any] = {"reconnect_time_wait": _RECONNECT_S}  # typed as int there
    if "tls://" in bootstrap.url:
        options["tls"] = client_context(bootstrap.tls)
    try:
        with anyio.fail_after(_CONNECT_S):
            await client.connect(
                bootstrap.url.split(","),
                name=bootstrap.worker or bootstrap.role,
                inbox_prefix=_inbox_of(bootstrap).encode(),
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


async def _close_client(client: Client) -> None:
    if client.is_connected:
        with anyio.move_on_after(1), suppress(nats.errors.Error, OSError):
            await client.flush(1)
    with anyio.move_on_after(1), suppress(nats.errors.Error, OSError):
        await client.close()


def _inbox_of(bootstrap: Bootstrap) -> str:
    role: Any = bootstrap.role
    return Subjects(bootstrap.run).inbox(role)


class Bus:
    """One process's connection to the bus. `connect` creates it.

    Args:
        client: the connection for everything except what the store keeps.
        store: the connection to the streams and the state; the same as `client` for workers.
    """

    def __init__(self, client: Client, store: Client, bootstrap: Bootstrap) -> None:
        self._nats = client
        self._store_client = store
        self._outage_s = bootstrap.outage_s
        self._replicas = bootstrap.replicas
        self._answer_s = _STORE_ANSWER_S if self._replicas == 1 else _CLUSTER_ANSWER_S
        self._jetstream: JetStreamContext = store.jetstream(timeout=self._answer_s)
        self._names = Subjects(bootstrap.run)
        self._prefix = _inbox_of(bootstrap)
        self.inbox = secrets.token_hex(11)
        """The part of this process's inbox subjects that no other process has."""
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        """Reply subject of a request -> its answer. The subject names the answering role, so no other role
        can answer."""
        self._requests = 0
        self._unanswered: dict[str, tuple[str, str, float]] = {}
        """Process, verb and time of each request without an answer, and of each operation on the store."""
        self._parts = _Parts()
        self._tasks: TaskGroup | None = None
        self._complaints: set[str] = set()
        """Errors of the connection that are logged already."""
        self._up = asyncio.Event()
        self._store_up = self._up if store is client else asyncio.Event()
        self._pulling: set[asyncio.Queue[Msg | None]] = set()
        """Queues of the streams that this process follows. None in a queue means that the client has lost the
        connection and reconnected."""
        self._serving = True
        self.explain: Callable[[Exception], str] = _error_text
        """Returns the reason in the refusal that is sent when a request's handler raises."""
        self.refused = 0
        """Number of malformed messages refused so far."""

    @property
    def connected(self) -> bool:
        """Whether the client is connected at this moment."""
        return self._nats.is_connected

    @property
    def url(self) -> str:
        """Address of the server, or addresses of the servers, as the client has them now."""
        return without_logins(",".join(server.geturl() for server in self._nats.servers))

    @property
    def _address(self) -> str:
        """Address of the server to which the client is connected."""
        url = self._nats.connected_url
        return without_logins(url.geturl()) if url is not None else ""

    @property
    def server(self) -> str:
        """Address of the server that the client is connected to, or was at last."""
        return self._address

    @property
    def reconnect_s(self) -> float:
        """Seconds in which a process that has lost its server finds another one of the cluster, even if all
        others but one stand still; 0 with one server."""
        servers = len(self._nats.servers)
        return (_UNANSWERED_PINGS + 1) * _PING_S + servers * _TRY_OF_SEVERAL_S if servers > 1 else 0.0

    @property
    def local_address(self) -> str:
        """Address of this machine from which it reaches the server, so that other machines of the run reach
        it there.

        Raises:
            OSError: if there is no route to the server.
        """
        server = self._nats.connected_url or self._nats.servers[0]
        return address_towards(server.hostname or "localhost")

    @property
    def limit(self) -> int:
        """Maximum size, in bytes, of a payload that the bus sends in one piece."""
        return self._nats.max_payload - 1024  # room for headers

    # ---------------------------------------------------------------------- publish and subscribe

    async def publish(self, subject: str, message: Message, *, reply: str = "") -> None:
        """Send a message to the present subscribers of a subject."""
        await self._send(subject, _encode(message), reply)

    async def subscribe(self, subject: str, kind: type[M], handler: Handler[M]) -> None:
        """Call `handler` with each message, one at a time, until the bus closes.

        The handler may be a coroutine function or a plain function. It should not wait for long, because the
        next messages wait for it. The subscription receives every message published after this call returns.
        """
        decode = decoder(kind)

        async def deliver(msg: Msg) -> None:
            data = self._payload(msg)
            if data is None:
                return
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                self._refuse(msg.subject, kind, error)
                return
            try:
                result = handler(message)
                if result is not None:
                    await result
            except Exception as error:  # noqa: BLE001 - raised again where the bus was opened
                self._fail(error)

        await self._nats.subscribe(subject, cb=deliver)
        await self._nats.flush()

    # -------------------------------------------------------------------------- request and serve

    async def request(
        self, subject: str, message: Message, answer: type[R], *, who: str, deadline_s: float
    ) -> R:
        """Send a request to one process and wait for its answer. The bus repeats the request until the answer
        arrives; the process serves it once.

        Raises:
            NoAnswer: if no answer arrives within `deadline_s` seconds of a connected bus.
            Refused: if the process refuses the request.
        """
        self._requests += 1
        _, answerer = self._names.parties(subject)
        reply_to = f"{self._prefix}.from.{answerer}.{self.inbox}.{self._requests}"
        data = _encode(message)
        decode = decoder(answer | Refusal)
        remaining_s = deadline_s
        self._unanswered[reply_to] = (who, subject.rsplit(".", 1)[-1], anyio.current_time())
        try:
            while remaining_s > 0:
                await self._up.wait()
                began = anyio.current_time()
                future = self._waiting[reply_to] = asyncio.get_running_loop().create_future()
                with anyio.move_on_after(min(_RESEND_S, remaining_s)):
                    await self._send(subject, data, reply_to)
                    msg = await future
                    reply = None if _no_responders(msg) else self._decode_answer(msg, decode, answer)
                    if isinstance(reply, Refusal):
                        raise Refused(who, reply.reason)
                    if reply is not None:
                        return reply
                    if _no_responders(msg):
                        await anyio.sleep(0.1)
                remaining_s -= anyio.current_time() - began
        finally:
            self._waiting.pop(reply_to, None)
            del self._unanswered[reply_to]
        raise NoAnswer(who, subject, deadline_s)

    def longest_wait(self) -> Wait | None:
        """Return the oldest request of this process that is not answered yet, if it is older than a second.

        Operations on the store count, too: then the server has to answer, and time without a connection does
        not count.
        """
        if not self._unanswered:
            return None
        who, verb, since = min(self._unanswered.values(), key=lambda wait: wait[2])
        seconds = anyio.current_time() - since
        return Wait(who, verb, seconds) if seconds > 1 else None

    async def serve(
        self,
        subject: str,
        kind: type[M],
        handler: Callable[[M], Awaitable[Message]],
        *,
        forget: bool = False,
    ) -> None:
        """Answer requests until the bus closes. If the handler raises, the asking process gets a refusal.

        The answer goes only to an inbox of a party that may ask for this (see `messages.WORKER_VERBS`). The
        bus refuses requests with another reply subject: its sender would make this process publish there.

        Args:
            forget: keep no answers for repeated requests, and call the handler again instead. It is meant for
                large answers of handlers that change nothing.
        """
        decode = decoder(kind)
        askers, answerer = self._names.parties(subject)
        prefixes = "|".join(re.escape(self._names.answers(asker, answerer)) for asker in askers)
        may_reply_to = re.compile(rf"(?:{prefixes})\.[A-Za-z0-9]{{1,64}}\.[0-9]{{1,20}}").fullmatch
        answers: OrderedDict[str, bytes | None] = OrderedDict()  # reply -> answer, None while it is computed

        async def answer(reply: str, message: M) -> None:
            try:
                result: Message = await handler(message)
            except StrettoError as error:
                result = Refusal(str(error))
            except Exception as error:
                if self._serving:
                    log.exception("request failed", subject=subject)
                result = Refusal(self.explain(error))
            if not self._serving:
                return
            data = _encode(result)
            if forget:
                del answers[reply]
            else:
                answers[reply] = data
            while len(answers) > _KEEP_ANSWERS and next(iter(answers.values())) is not None:
                answers.popitem(last=False)
            await self._send(reply, data, "")

        async def deliver(msg: Msg) -> None:
            if not self._serving:
                return
            if not may_reply_to(msg.reply):
                reason = f"{msg.reply!r} is not an inbox of {' or '.join(askers)}"
                self._refuse(msg.subject, kind, ValueError(reason))
                return
            data = self._payload(msg)
            if data is None:
                return
            if msg.reply in answers:
                known = answers[msg.reply]
                if known is not None:
                    await self._send(msg.reply, known, "")
                return
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                self._refuse(msg.subject, kind, error)
                await self._send(msg.reply, _encode(Refusal(f"malformed {kind.__name__}: {error}")), "")
                return
            answers[msg.reply] = None
            self._start(answer, msg.reply, message)

        await self._nats.subscribe(subject, cb=deliver)
        await self._nats.flush()

    def stop_serving(self) -> None:
        """Answer no request any more, not even those whose handlers still run. For a process that leaves: the
        askers turn to another process when they hear that it has left, and would take a refusal for final."""
        self._serving = False

    # ---------------------------------------------------------------------------------- streams

    async def make_log(self, stream: str, subjects: list[str]) -> None:
        """Create a stream that processes read by sequence number and purge from its beginning. Idempotent."""
        subjects = [*subjects, *(f"{subject}{_PART_SUFFIX}" for subject in subjects)]
        await self._make_stream(StreamConfig(name=stream, subjects=subjects, allow_direct=True))

    async def make_queue(self, stream: str, subjects: list[str], *, redeliver_s: float) -> None:
        """Create a work queue with one consumer for each subject. The consumer's name is made from the
        subject. Idempotent.

        Args:
            redeliver_s: seconds after which the server delivers a message again that nobody acknowledged.
        """
        await self._make_stream(
            StreamConfig(name=stream, subjects=subjects, retention=RetentionPolicy.WORK_QUEUE)
        )
        for subject in subjects:
            consumer = ConsumerConfig(
                durable_name=_consumer(subject),
                filter_subject=subject,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=redeliver_s,
                max_ack_pending=-1,
            )
            await self._storing(lambda c=consumer: self._jetstream.add_consumer(stream, c), stream)

    async def append(self, subject: str, message: Message, *, id: str) -> int:
        """Store a message in the stream of its subject, once for each `id`, and return its sequence number.

        Raises:
            NoAnswer: if the server does not confirm in time.
            BusError: if the server cannot store the message, for example because the disk is full.
        """
        data = _encode(message)
        if len(data) > self.limit:
            # The parts go to a subject of their own, and the message holds their sequence numbers.
            parts = _split(data, self.limit)
            sequences = [
                await self._store(f"{subject}{_PART_SUFFIX}", part, f"{id}.{index}")
                for index, part in enumerate(parts)
            ]
            data = bytes([_PART]) + msgspec.msgpack.encode(sequences)
        return await self._store(subject, data, id)

    async def read(self, stream: str, sequence: int, kind: type[M]) -> M:
        """Return the message at a sequence number.

        Raises:
            NoAnswer: if the server does not answer in time.
            MessageGone: if the message, or a part of it, is not in the stream.
            Malformed: if the message is not of this kind.
        """
        return await self._decode_stored(stream, await self._read_message(stream, sequence), kind)

    async def read_newest(self, stream: str, subject: str, kind: type[M]) -> M:
        """Return the newest message of a subject.

        Raises:
            NoAnswer, MessageGone, Malformed: as `read`.
        """
        return await self._decode_stored(stream, await self._read_message(stream, 0, subject), kind)

    async def _decode_stored(self, stream: str, message: RawStreamMsg, kind: type[M]) -> M:
        try:
            return decoder(kind)(await self._join_stored_parts(stream, message.data or b""))
        except (msgspec.DecodeError, ValueError) as error:
            name = f"{stream} {message.seq}"
            self._refuse(name, kind, error)
            raise Malformed(name, kind.__name__, str(error)) from error

    async def follow(
        self, stream: str, subject: str, kind: Any, *, start: int
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (sequence, message) of a stream from `start` on, in order, each message once. It never ends.

        Args:
            kind: a message type or a union of message types. The bus refuses and skips malformed messages.
        """

        async def consumer_at(following: int) -> str:
            return await self.make_consumer(stream, [subject], start=following)

        async for item in self.follow_consumer(stream, {subject: kind}, consumer_at, start=start):
            yield item

    async def make_consumer(self, stream: str, subjects: list[str], *, start: int) -> str:
        """Create a consumer of a stream's messages from `start` on, and return its name. The server removes
        it when nobody has pulled from it for two minutes."""
        one = len(subjects) == 1
        consumer = ConsumerConfig(
            filter_subject=subjects[0] if one else None,
            filter_subjects=None if one else subjects,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start),
            ack_policy=AckPolicy.NONE,
            inactive_threshold=120,
            num_replicas=self._replicas,
        )
        info = await self._storing(
            lambda: self._jetstream.add_consumer(stream, consumer), stream, passing=_COPYING
        )
        return info.name

    async def follow_consumer(
        self,
        stream: str,
        kinds: Mapping[str, Any],
        consumer_at: Callable[[int], Awaitable[str]],
        *,
        start: int,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (sequence, message) as `follow` does, of several subjects, with consumers that someone else
        may have created.

        Args:
            kinds: subject -> a message type or a union of message types.
            consumer_at: returns the name of a new consumer from a sequence number on. It is called again when
                the server has lost the consumer.
        """
        decoders = {subject: decoder(kind) for subject, kind in kinds.items()}
        following = start
        while True:
            try:
                consumer = await consumer_at(following)
                async for sequence, subject, data in self._pull(stream, consumer):
                    if sequence < following:
                        continue
                    message = None
                    try:
                        message = decoders[subject](await self._join_stored_parts(stream, data))
                    except (msgspec.DecodeError, ValueError, MessageGone, KeyError) as error:
                        self._refuse(subject, kinds.get(subject), error)
                    following = sequence + 1
                    if message is not None:
                        yield sequence, message
            except (NoAnswer, NotFoundError):
                # The server has lost the consumer, for example at a restart: create another one.
                log.warning("stream interrupted", stream=stream, following=following)
                await anyio.sleep(0.5)

    async def last_sequence(self, stream: str, subject: str) -> int:
        """Return the sequence number of the newest message of a subject in its stream; 0 if there is none."""
        try:
            message = await self._storing(lambda: self._jetstream.get_last_msg(stream, subject), stream)
        except NotFoundError:
            return 0
        return message.seq or 0

    async def extent(self, stream: str) -> Extent:
        """Return the sequence numbers of the messages in a stream. The server has checked them at its start:
        a damaged message counts as missing."""
        subject = f"$JS.API.STREAM.INFO.{stream}"

        async def ask() -> dict[str, Any]:
            question = b'{"deleted_details": true}'
            answer = await self._store_client.request(subject, question, timeout=self._answer_s)
            content = json.loads(answer.data)
            if "error" in content:
                raise APIError.from_error(content["error"])
            return content["state"]

        state = await self._storing(ask, subject)
        return Extent(state["first_seq"], state["last_seq"], frozenset(state.get("deleted") or ()))

    async def holds(self, stream: str, sequence: int) -> bool:
        """Whether a stream holds a message with all its parts. It reads the message."""
        try:
            message = await self._read_message(stream, sequence)
            await self._join_stored_parts(stream, message.data or b"")
        except (msgspec.DecodeError, ValueError, MessageGone):
            return False
        return True

    async def purge(self, stream: str, *, below: int | None = None) -> None:
        """Remove the messages with a sequence number lower than `below`, or all messages if it is None.

        If the stream has not reached `below`, its next message gets that sequence number.
        """
        await self._storing(lambda: self._jetstream.purge_stream(stream, seq=below), stream)

    async def delete(self, stream: str, sequence: int) -> None:
        """Remove one message. If it is not there, do nothing."""
        try:
            await self._storing(lambda: self._jetstream.delete_msg(stream, sequence), stream)
        except BusError as error:
            if not (isinstance(error.__cause__, APIError) and error.__cause__.err_code in _NO_MESSAGE):
                raise

    async def take(
        self, stream: str, subject: str, kind: type[M], *, until: anyio.Event
    ) -> AsyncIterator[Delivery[M]]:
        """Yield messages of a work queue, each to one process at a time. The bus pulls a message only when
        the caller asks for the next one.

        Args:
            until: when it is set, the bus pulls no more. A message that was already asked for is still
                yielded, because the server counts it as delivered; this takes at most 10 s.
        """
        subscription = await self._jetstream.pull_subscribe_bind(
            consumer=_consumer(subject), stream=stream, pending_msgs_limit=16
        )
        decode = decoder(kind)
        while not until.is_set():
            try:
                [msg] = await subscription.fetch(1, timeout=self._answer_s)
            except (TimeoutError, nats.errors.TimeoutError):
                continue
            except (nats.errors.Error, APIError) as error:
                log.warning("work queue interrupted", stream=stream, error=str(error))
                await anyio.sleep(0.5)
                continue
            try:
                yield Delivery(decode(msg.data), msg)
            except msgspec.DecodeError as error:
                self._refuse(subject, kind, error)
                await msg.term()

    # ----------------------------------------------------------------------------------- state

    async def make_state(self, bucket: str) -> None:
        """Create a bucket of named values. Idempotent."""
        create = self._jetstream.create_key_value

        async def make() -> None:
            try:
                await create(bucket=bucket, history=1, replicas=self._replicas)
            except APIError as error:
                if error.err_code != _OTHER_CONFIGURATION:
                    raise
                present = (await self._jetstream.stream_info(f"KV_{bucket}")).config
                await self._jetstream.update_stream(present, num_replicas=self._replicas)

        await self._storing(make, bucket)

    async def put_state(self, bucket: str, key: str, message: Message) -> int:
        """Store a value and return its revision. Revisions only rise within a bucket."""
        values = await self._bucket(bucket)
        return await self._storing(lambda: values.put(key, _encode(message)), bucket)

    async def get_state(self, bucket: str, key: str, kind: type[M]) -> M | None:
        """Return the value of a key, or None if the key has no value."""
        values = await self._bucket(bucket)
        try:
            entry = await self._storing(lambda: values.get(key), bucket)
        except KeyNotFoundError:
            return None
        return decoder(kind)(entry.value or b"")

    # ------------------------------------------------------------------------------------ private

    async def open(self, tasks: TaskGroup) -> None:
        """Start to receive answers. `connect` calls it."""
        self._tasks = tasks
        self._up.set()
        self._store_up.set()
        await self._nats.subscribe(f"{self._prefix}.from.*.{self.inbox}.*", cb=self._on_answer)

    async def on_error(self, error: Exception) -> None:
        """Log an error of the server or the connection. The client calls it."""
        complaint = f"{type(error).__name__}: {error}"
        if complaint not in self._complaints:  # every attempt to reconnect reports the same errors
            self._complaints.add(complaint)
            log.warning("bus", error=complaint)

    async def on_disconnected(self) -> None:
        """Hold back messages from now on. The client calls it when the connection is lost, and at the end."""
        self._up.clear()
        if not self._nats.is_closed:
            log.warning("bus disconnected")

    async def on_reconnected(self) -> None:
        """Send messages again. The client calls it."""
        self._up.set()
        self._complaints.clear()
        log.info("bus reconnected", url=self._address)
        if self._store_client is self._nats:
            await self.on_store_reconnected()

    async def on_store_disconnected(self) -> None:
        """Hold back what goes to the store. The client of the store calls it when the connection is lost."""
        self._store_up.clear()

    async def on_store_reconnected(self) -> None:
        """Restart the streams that this process follows. The client of the store calls it."""
        self._store_up.set()
        for queue in self._pulling:
            queue.put_nowait(None)

    async def _send(self, subject: str, data: bytes, reply: str) -> None:
        if not self._up.is_set():
            await self._up.wait()
        for part in _split(data, self.limit):
            await self._nats.publish(subject, part, reply)

    def _payload(self, msg: Msg) -> bytes | None:
        """Return the payload, or None if some of its parts have not arrived."""
        data = msg.data
        if data[:1] != b"\xc1":
            return data
        try:
            return self._parts.add(data)
        except ValueError as error:
            self._refuse(msg.subject, bytes, error)
            return None

    async def _on_answer(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject)
        if future is None:
            return  # an answer that came too late
        data = self._payload(msg)
        if data is not None and not future.done():
            msg.data = data
            future.set_result(msg)

    def _decode_answer(self, msg: Msg, decode: Callable[[bytes], Any], kind: type[R]) -> R | Refusal | None:
        try:
            return decode(msg.data)
        except msgspec.DecodeError as error:
            self._refuse(msg.subject, kind, error)
            return None

    def _refuse(self, subject: str, kind: Any, error: Exception) -> None:
        self.refused += 1
        if self.refused <= _LOGGED_REFUSALS:
            expected = getattr(kind, "__name__", str(kind))
            log.warning(
                "message refused", subject=subject, expected=expected, reason=str(error), refused=self.refused
            )

    def _fail(self, error: Exception) -> None:
        """End the bus with the exception that a handler has raised."""

        async def raise_error() -> None:
            raise error

        self._start(raise_error)

    def _start(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        assert self._tasks is not None, "the bus is not open"
        self._tasks.start_soon(function, *arguments)

    async def _make_stream(self, config: StreamConfig) -> None:
        """Create a stream, or give an existing one this configuration: a resumed run may have other
        replicas."""
        config.storage = StorageType.FILE
        config.num_replicas = self._replicas

        async def make() -> None:
            try:
                await self._jetstream.add_stream(config)
            except APIError as error:
                if error.err_code != _OTHER_CONFIGURATION:
                    raise
                await self._jetstream.update_stream(config)

        await self._storing(make, config.name or "")

    async def _bucket(self, bucket: str) -> KeyValue:
        return await self._storing(lambda: self._jetstream.key_value(bucket), bucket)

    async def _storing(
        self, operation: Callable[[], Awaitable[T]], action: str, passing: Collection[int] = ()
    ) -> T:
        """Run a JetStream operation, and repeat it for up to `outage_s` while the server does not answer. The
        time without a connection does not count. All these operations are idempotent.

        Args:
            passing: more error codes of the server after which a cluster may succeed later.
        """
        remaining_s = self._outage_s
        self._requests += 1
        key = f"{action} {self._requests}"
        while True:
            await self._store_up.wait()
            began = anyio.current_time()
            self._unanswered[key] = (SERVER, action, began - (self._outage_s - remaining_s))
            try:
                return await operation()
            except (NotFoundError, KeyNotFoundError):
                raise
            except APIError as error:
                temporary = _temporary(error) or (
                    self._replicas > 1 and error.err_code in (*_ELECTING, *passing)
                )
                if not temporary or remaining_s <= 0:
                    raise BusError(f"nats-server refuses {action!r}: {error.description}") from error
            except (TimeoutError, nats.errors.Error) as error:
                if remaining_s <= 0:
                    raise NoAnswer(SERVER, action, self._outage_s) from error
            finally:
                del self._unanswered[key]
            await anyio.sleep(0.2)
            remaining_s -= anyio.current_time() - began

    async def _store(self, subject: str, data: bytes, id: str) -> int:
        headers = {"Nats-Msg-Id": id}
        ack = await self._storing(
            lambda: self._jetstream.publish(subject, data, headers=headers), f"append to {subject}"
        )
        return ack.seq

    async def _read_message(self, stream: str, sequence: int, subject: str | None = None) -> RawStreamMsg:
        """Return a stored message: the one with this number, or the newest one of a subject. Any server of a
        cluster may answer, also one that does not have the newest messages yet. So what that server lacks is
        asked of the leader, which has them all.

        Raises:
            MessageGone: if the message is not in the stream.
            NoAnswer: if the server does not answer in time.
        """

        async def get() -> RawStreamMsg:
            try:
                return await self._jetstream.get_msg(stream, sequence, subject, direct=True)
            except NotFoundError:
                if self._replicas == 1:
                    raise
                return await self._jetstream.get_msg(stream, sequence, subject)

        # With a number, also 0, the client puts the subject into the question and not into the question's own
        # subject: workers may ask at one subject alone.
        name = subject or f"message {sequence}"
        try:
            return await self._storing(get, f"{stream} {name}")
        except NotFoundError as error:
            raise MessageGone(f"{name} of {stream} is gone") from error

    async def _join_stored_parts(self, stream: str, data: bytes) -> bytes:
        """Return the appended payload. If it was stored in parts, join them.

        Raises:
            MessageGone: if a part is not there.
            ValueError: if the parts are no parts, or are too large together.
            NoAnswer: if the server does not answer in time.
        """
        if data[:1] != b"\xc1":
            return data
        pieces: list[bytes] = []
        room = _MAX_PAYLOAD
        for sequence in msgspec.msgpack.decode(data[1:], type=_PartNumbers):
            part = await self._read_message(stream, sequence)
            if not (part.subject or "").endswith(_PART_SUFFIX):
                raise ValueError(f"message {sequence} is not a part of another message")
            pieces.append((part.data or b"")[_PART_HEAD.size :])
            room -= len(pieces[-1])
            if room < 0:
                raise ValueError(f"the parts have more than {_MAX_PAYLOAD:,} bytes together")
        return b"".join(pieces)

    async def _pull(self, stream: str, consumer: str) -> AsyncIterator[tuple[int, str, bytes]]:
        """Yield (sequence, subject, payload) of a consumer's messages as they arrive, in order.

        Raises:
            NoAnswer: if the server is silent or has lost the consumer, or if the client has reconnected.
        """
        inbox = f"{self._prefix}.{self.inbox}.pull.{consumer}"
        queue: asyncio.Queue[Msg | None] = asyncio.Queue()

        async def enqueue(msg: Msg) -> None:
            queue.put_nowait(msg)

        subscription = await self._store_client.subscribe(inbox, cb=enqueue)
        self._pulling.add(queue)
        ask = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        batch, expires_s = 256, 15
        request = msgspec.json.encode(
            {"batch": batch, "expires": expires_s * 10**9, "idle_heartbeat": _HEARTBEAT_S * 10**9}
        )
        try:
            while True:
                await self._store_client.publish(ask, request, inbox)
                received = 0
                while received < batch:
                    try:
                        with anyio.fail_after(_SILENT_S):
                            msg = await queue.get()
                    except TimeoutError:
                        raise NoAnswer("nats-server", ask, _SILENT_S) from None
                    if msg is None:
                        raise NoAnswer("nats-server", ask, 0.0)
                    status = (msg.headers or {}).get("Status")
                    if status == "100":
                        continue
                    if status in ("404", "408", "409") and "Deleted" not in str(msg.headers):
                        break
                    if status is not None:
                        raise NoAnswer("nats-server", ask, 0.0)
                    received += 1
                    yield msg.metadata.sequence.stream, msg.subject, msg.data
        finally:
            self._pulling.discard(queue)
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()


class _Parts:
    """Payloads of which some parts have not arrived yet. Any process may send parts, so their memory is
    bounded: above `_UNFINISHED_BYTES` the oldest payload is dropped, because its sender has probably gone."""

    def __init__(self) -> None:
        self._unfinished: OrderedDict[bytes, _Unfinished] = OrderedDict()
        self._bytes = 0

    def add(self, data: bytes) -> bytes | None:
        """Add one part. Return the payload if it is complete now, or None.

        Raises:
            ValueError: if the part has no head, or does not fit the other parts of its payload, or if its
                payload would be too large.
        """
        if len(data) < _PART_HEAD.size:
            raise ValueError("a part without a head")
        _, key, index, count = _PART_HEAD.unpack_from(data)
        if not index < count <= _MAX_PARTS:
            raise ValueError(f"part {index} of {count}; a payload has at most {_MAX_PARTS} parts")
        payload = self._unfinished.setdefault(key, _Unfinished(count))
        if payload.count != count or index in payload.pieces:
            raise ValueError(f"part {index} of {count} does not fit the parts that have arrived")
        payload.pieces[index] = data[_PART_HEAD.size :]
        payload.bytes += len(data) + _PIECE_OVERHEAD
        self._bytes += len(data) + _PIECE_OVERHEAD
        if len(payload.pieces) == count:
            self._drop(key)
            return b"".join(payload.pieces[each] for each in range(count))
        while self._bytes > _UNFINISHED_BYTES:
            self._drop(next(iter(self._unfinished)))
        return None

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._unfinished.pop(key).bytes


@dataclass
class _Unfinished:
    """A payload of which some parts have not arrived yet."""

    count: int
    """Number of its parts."""
    pieces: dict[int, bytes] = field(default_factory=dict)
    """Index -> content, of the parts that have arrived."""
    bytes: int = 0
    """Memory of the pieces."""


def _split(data: bytes, limit: int) -> list[bytes]:
    """Split a payload into parts of at most `limit` bytes. A payload that fits stays as it is.

    Raises:
        BusError: if the payload is larger than any process accepts.
    """
    if len(data) <= limit:
        return [data]
    if len(data) > _MAX_PAYLOAD:
        raise BusError(
            f"a message of {len(data):,} bytes cannot be sent: the largest that is accepted has "
            f"{_MAX_PAYLOAD:,} bytes"
        )
    key = secrets.token_bytes(16)
    room = limit - _PART_HEAD.size
    pieces = [data[start : start + room] for start in range(0, len(data), room)]
    return [_PART_HEAD.pack(_PART, key, index, len(pieces)) + piece for index, piece in enumerate(pieces)]


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _no_responders(msg: Msg) -> bool:
    return not msg.data and (msg.headers or {}).get("Status") == "503"


def _consumer(subject: str) -> str:
    return subject.replace(".", "_")


def _temporary(error: APIError) -> bool:
    # Code 503: JetStream is starting or has no leader yet.
    return error.code == 503 and "insufficient" not in (error.description or "").lower()


async def sleep_and_measure_delay(seconds: float) -> float:
    """Sleep, and return the number of seconds by which this process woke up too late.

    During that time the process was stopped, swapped out or blocked, and it read no message. So the silence
    of its peers in that time says nothing about them. A delay of at most `seconds` returns 0, because a busy
    machine can cause it.
    """
    start = time.monotonic()
    await anyio.sleep(seconds)
    late = time.monotonic() - start - seconds
    return late if late > seconds else 0.0
