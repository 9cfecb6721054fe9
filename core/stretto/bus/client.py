"""Typed messages over one NATS connection. README.md lists the promises of the bus."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

import anyio
import msgspec
import nats.errors
import structlog
from anyio.abc import TaskGroup
from nats.aio.client import Client
from nats.aio.msg import Msg

from stretto.bus import connection
from stretto.bus.health import Refusals, Unanswered
from stretto.bus.messages.base import Message, Refusal
from stretto.bus.messages.subjects import Subjects
from stretto.bus.payloads import Parts, decoder, encode, is_split, split
from stretto.bus.server import Bootstrap
from stretto.bus.store import Store
from stretto.errors import NoAnswer, Refused, StrettoError
from stretto.machine import clock
from stretto.machine.interfaces import address_towards

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)
Handler = Callable[[M], Awaitable[None] | None]

log = structlog.get_logger()

_RESEND_S = 2.0
"""Seconds after which the bus repeats a request without an answer."""
_FLUSH_S = 10
"""Seconds until the bus asks again whether the server has a subscription."""
_KEEP_ANSWERS = 1024  # of each served subject, to send an answer again when a request is repeated


@asynccontextmanager
async def connect(bootstrap: Bootstrap) -> AsyncGenerator[Bus]:
    """Open a bus for the block. Raise NoAnswer with the last reason if no server lets it in."""
    client = connection.NatsClient()
    has_store = bool(bootstrap.store_user)
    store = connection.NatsClient() if has_store else client
    bus = Bus(client, store, bootstrap)
    try:
        login = connection.login_of(bootstrap)
        await connection.open_client(
            client, bootstrap, bus.on_error, bus.on_disconnected, bus.on_reconnected, login
        )
        if has_store:
            login = {"user": bootstrap.store_user, "password": bootstrap.store_password}
            await connection.open_client(
                store, bootstrap, bus.on_error, bus.store.on_disconnected, bus.store.on_reconnected, login
            )
        async with anyio.create_task_group() as tasks:
            await bus.open(tasks)
            yield bus
            tasks.cancel_scope.cancel()
    finally:
        bus.end()
        with anyio.CancelScope(shield=True):
            for nats_client in dict.fromkeys((client, store)):
                await connection.close_client(nats_client)


class Bus:
    """A process's connection to the bus, made by `connect`. Only a kernel may have another, for the store."""

    def __init__(self, client: Client, store: Client, bootstrap: Bootstrap) -> None:
        self._nats = client
        self._names = Subjects(bootstrap.run)
        self._prefix = connection.inbox_of(bootstrap)
        self.inbox = secrets.token_hex(11)
        """Random part of this process's inbox subjects: no other process has the same."""
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        """Reply subject of a request -> its answer. The subject names the role that may answer."""
        self._requests = 0
        self.unanswered = Unanswered()
        self.refusals = Refusals()
        own_inbox = f"{self._prefix}.{self.inbox}"
        self.store = Store(store, bootstrap, own_inbox, self.unanswered, self.refusals)
        self._one_client = store is client
        self._parts = Parts()
        self._tasks: TaskGroup | None = None
        """None before `open` and after `end`."""
        self._complaints: set[str] = set()
        """Errors that were logged since the last connection."""
        self._up = asyncio.Event()
        self._confirming: list[anyio.CancelScope] = []
        """Scopes of waits for the server to confirm a subscription; cancelled when the connection breaks."""
        self._serving = True
        self.explain: Callable[[Exception], str] = lambda error: f"{type(error).__name__}: {error}"
        """Returns the text of the refusal that the bus sends when a request's handler raises."""

    @property
    def connected(self) -> bool:
        """True while the client is connected."""
        return self._nats.is_connected

    @property
    def url(self) -> str:
        """Addresses of all servers that the client knows now, without logins."""
        return connection.without_logins(",".join(server.geturl() for server in self._nats.servers))

    @property
    def server(self) -> str:
        """Address of the current server; while there is no connection, of the last server."""
        url = self._nats.connected_url
        return connection.without_logins(url.geturl()) if url is not None else ""

    @property
    def reconnect_s(self) -> float:
        """Seconds in which this process finds another server of the cluster; see `seconds_to_reconnect`."""
        return connection.seconds_to_reconnect(self._nats)

    @property
    def local_address(self) -> str:
        """Address with which this machine reaches the server. The run's other machines can reach it there."""
        server = self._nats.connected_url or self._nats.servers[0]
        return address_towards(server.hostname or "localhost")

    @property
    def limit(self) -> int:
        """Maximum size, in bytes, of a payload that the bus sends in one piece."""
        return connection.payload_limit(self._nats)

    async def publish(self, subject: str, message: Message, *, reply: str = "") -> None:
        """Send a message to the current subscribers of a subject."""
        await self._send(subject, encode(message), reply)

    async def subscribe(self, subject: str, kind: type[M], handler: Handler[M]) -> None:
        """Call `handler` with each later message, one at a time. Plain functions cost less time."""
        decode = decoder(kind)

        def read(msg: Msg) -> M | None:
            data = self._payload(msg)
            return None if data is None else self._decode(msg.subject, data, decode, kind)

        def deliver(msg: Msg) -> None:
            message = read(msg)
            if message is not None:
                try:
                    if handler(message) is not None:
                        raise TypeError(f"{handler!r}: expected a function that returns nothing to wait for")
                except Exception as error:  # noqa: BLE001 - raised again where the bus was opened
                    self._fail(error)

        async def deliver_in_turn(msg: Msg) -> None:
            message = read(msg)
            if message is not None:
                try:
                    await cast("Awaitable[None]", handler(message))
                except Exception as error:  # noqa: BLE001 - as above
                    self._fail(error)

        if iscoroutinefunction(handler):
            await self._receive(subject, cb=deliver_in_turn)
        else:
            await self._receive(subject, future=_AtOnce(deliver))

    async def request(self, subject: str, message: Message, answer: type[R], *, deadline_s: float) -> R:
        """Send a request to one process, repeat it until the answer arrives, and return the answer. The
        process serves the request once.

        Raises NoAnswer after `deadline_s` seconds with a connection, and Refused if the process refuses.
        """
        self._requests += 1
        _, answerer = self._names.parties(subject)
        who = self._names.process_of(subject)
        reply_to = f"{self._prefix}.from.{answerer}.{self.inbox}.{self._requests}"
        data = encode(message)
        decode = decoder(answer | Refusal)
        remaining_s = deadline_s
        try:
            with self.unanswered.waiting(who, subject.rsplit(".", 1)[-1]):
                while remaining_s > 0:
                    await self._up.wait()
                    began = clock.now()
                    future = self._waiting[reply_to] = asyncio.get_running_loop().create_future()
                    with anyio.move_on_after(min(_RESEND_S, remaining_s)):
                        await self._send(subject, data, reply_to)
                        msg = await future
                        nobody_serves = not msg.data and (msg.headers or {}).get("Status") == "503"
                        if nobody_serves:
                            await anyio.sleep(0.1)
                        elif isinstance(
                            reply := self._decode(msg.subject, msg.data, decode, answer), Refusal
                        ):
                            raise Refused(who, reply.reason)
                        elif reply is not None:
                            return reply
                    remaining_s -= clock.now() - began
        finally:
            self._waiting.pop(reply_to, None)
        raise NoAnswer(who, subject, deadline_s)

    async def serve(
        self, subject: str, kind: type[M], handler: Callable[[M], Awaitable[Message]], *, forget: bool = False
    ) -> None:
        """Answer requests until the bus closes. If the handler raises, the asking process gets a refusal.

        A request is refused unless its reply subject is an inbox of a party that may send the request
        (`WORKER_VERBS`): else its sender could make this process publish to any subject. With `forget`, the
        bus keeps no answers, and a repeated request runs the handler again: for large answers of pure reads.
        """
        decode = decoder(kind)
        askers, answerer = self._names.parties(subject)
        prefixes = "|".join(re.escape(self._names.answers(asker, answerer)) for asker in askers)
        may_reply_to = re.compile(rf"(?:{prefixes})\.[A-Za-z0-9]{{1,64}}\.[0-9]{{1,20}}").fullmatch
        answers: OrderedDict[str, bytes | None] = OrderedDict()  # by reply subject; None: in work

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
            data = encode(result)
            if forget:
                del answers[reply]
            else:
                answers[reply] = data
            while len(answers) > _KEEP_ANSWERS and next(iter(answers.values())) is not None:
                answers.popitem(last=False)
            await self._send(reply, data, "")

        def deliver(msg: Msg) -> None:
            if not self._serving:
                return
            if not may_reply_to(msg.reply):
                reason = f"{msg.reply!r} is not an inbox of {' or '.join(askers)}"
                self.refusals.refuse(msg.subject, kind, ValueError(reason))
                return
            data = self._payload(msg)
            if data is None:
                return
            if msg.reply in answers:
                stored_answer = answers[msg.reply]
                if stored_answer is not None:
                    self._start(self._send, msg.reply, stored_answer, "")
                return
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                self.refusals.refuse(msg.subject, kind, error)
                refusal = encode(Refusal(f"malformed {kind.__name__}: {error}"))
                self._start(self._send, msg.reply, refusal, "")
                return
            answers[msg.reply] = None
            self._start(answer, msg.reply, message)

        await self._receive(subject, future=_AtOnce(deliver))

    def stop_serving(self) -> None:
        """Answer no more requests, not even those whose handlers still run. A process that leaves calls this:
        its askers then call another process, while a refusal would be final for them."""
        self._serving = False

    async def _receive(self, subject: str, **how: Any) -> None:
        """Subscribe, and return when the server has the subscription, even if the connection breaks."""
        await self._nats.subscribe(subject, **how)
        confirmed = False
        while not confirmed:
            await self._up.wait()
            with anyio.CancelScope() as scope, suppress(nats.errors.FlushTimeoutError):
                self._confirming.append(scope)
                try:
                    await self._nats.flush(_FLUSH_S)
                    confirmed = True
                finally:
                    self._confirming.remove(scope)

    async def open(self, tasks: TaskGroup) -> None:
        """Start to receive answers."""
        self._tasks = tasks
        self._up.set()
        await self.store.on_reconnected()
        answers: Any = _AtOnce(self._on_answer)
        await self._nats.subscribe(f"{self._prefix}.from.*.{self.inbox}.*", future=answers)

    def end(self) -> None:
        """Start no more tasks, even if messages still arrive."""
        self._tasks = None

    async def on_error(self, error: Exception) -> None:
        """Log an error of the server or the connection."""
        complaint = f"{type(error).__name__}: {error}"
        if complaint not in self._complaints:  # every attempt to reconnect reports the same errors
            self._complaints.add(complaint)
            log.warning("bus", error=complaint)

    async def on_disconnected(self) -> None:
        """Hold messages back until the client has reconnected. The client also calls this when it closes."""
        self._up.clear()
        for scope in self._confirming:
            scope.cancel()
        if self._one_client:
            await self.store.on_disconnected()
        if not self._nats.is_closed:
            log.warning("bus disconnected")

    async def on_reconnected(self) -> None:
        """Send the messages that were held back, and hold none back any more."""
        self._up.set()
        self._complaints.clear()
        log.info("bus reconnected", url=self.server)
        if self._one_client:
            await self.store.on_reconnected()

    async def _send(self, subject: str, data: bytes, reply: str) -> None:
        if not self._up.is_set():
            await self._up.wait()
        for part in split(data, self.limit):
            await self._nats.publish(subject, part, reply)

    def _payload(self, msg: Msg) -> bytes | None:
        """Return the payload; None if some of its parts have not arrived."""
        data = msg.data
        if not is_split(data):
            return data
        try:
            return self._parts.add(data)
        except ValueError as error:
            self.refusals.refuse(msg.subject, bytes, error)
            return None

    def _on_answer(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject)
        if future is None:
            return  # an answer that came too late
        data = self._payload(msg)
        if data is not None and not future.done():
            msg.data = data
            future.set_result(msg)

    def _decode(self, subject: str, data: bytes, decode: Callable[[bytes], Any], kind: Any) -> Any:
        """Return a message; None, and count it, if it is malformed."""
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            self.refusals.refuse(subject, kind, error)
            return None

    def _fail(self, error: Exception) -> None:
        async def raise_error() -> None:
            raise error

        self._start(raise_error)

    def _start(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        if self._tasks is not None:  # at the end, the connection only sends what is pending
            self._tasks.start_soon(function, *arguments)


class _AtOnce:
    """Replaces the future of a subscription: delivers every message directly, without a queue and a task."""

    def __init__(self, deliver: Callable[[Msg], object]) -> None:
        self.set_result = deliver

    def cancelled(self) -> bool:
        return False
