"""Typed messages over one NATS connection. README.md has what the bus promises."""

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

from stretto.bus.connection import (
    NatsClient,
    close_client,
    inbox_of,
    login_of,
    open_client,
    payload_limit,
    seconds_to_reconnect,
    without_logins,
)
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
_KEEP_ANSWERS = 1024


@asynccontextmanager
async def connect(bootstrap: Bootstrap) -> AsyncGenerator[Bus]:
    """Open a bus for the block. Raise NoAnswer with the last reason if no server lets it in."""
    client = NatsClient()
    has_store = bool(bootstrap.store_user)
    store = NatsClient() if has_store else client
    bus = Bus(client, store, bootstrap)
    try:
        login = login_of(bootstrap)
        await open_client(client, bootstrap, bus.on_error, bus.on_disconnected, bus.on_reconnected, login)
        if has_store:
            login = {"user": bootstrap.store_user, "password": bootstrap.store_password}
            await open_client(
                store, bootstrap, bus.on_error, bus.store.on_disconnected, bus.store.on_reconnected, login
            )
        async with anyio.create_task_group() as tasks:
            await bus.open(tasks)
            yield bus
            tasks.cancel_scope.cancel()
    finally:
        bus.end()
        with anyio.CancelScope(shield=True):
            for each in dict.fromkeys((client, store)):
                await close_client(each)


class Bus:
    """One process's connection to the bus, from `connect`. Workers have no second one for the store."""

    def __init__(self, client: Client, store: Client, bootstrap: Bootstrap) -> None:
        self._nats = client
        self._names = Subjects(bootstrap.run)
        self._prefix = inbox_of(bootstrap)
        self.inbox = secrets.token_hex(11)
        """The part of this process's inbox subjects that no other process has."""
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
        """None before the bus is open, and after its end."""
        self._complaints: set[str] = set()
        """Errors that are logged already."""
        self._up = asyncio.Event()
        self._confirming: list[anyio.CancelScope] = []
        """Waits for the server to confirm a subscription. They begin again when the connection breaks."""
        self._serving = True
        self.explain: Callable[[Exception], str] = lambda error: f"{type(error).__name__}: {error}"
        """Returns the reason in the refusal that is sent when a request's handler raises."""

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._nats.is_connected

    @property
    def url(self) -> str:
        """Address of the server, or addresses of the servers, as the client has them now."""
        return without_logins(",".join(server.geturl() for server in self._nats.servers))

    @property
    def server(self) -> str:
        """Address of the current server, or of the last one without a connection."""
        url = self._nats.connected_url
        return without_logins(url.geturl()) if url is not None else ""

    @property
    def reconnect_s(self) -> float:
        """Seconds in which this process finds another server of the cluster; see `seconds_to_reconnect`."""
        return seconds_to_reconnect(self._nats)

    @property
    def local_address(self) -> str:
        """Address from which this machine reaches the server; the run's other machines reach it there."""
        server = self._nats.connected_url or self._nats.servers[0]
        return address_towards(server.hostname or "localhost")

    @property
    def limit(self) -> int:
        """Maximum size, in bytes, of a payload that the bus sends in one piece."""
        return payload_limit(self._nats)

    # ---------------------------------------------------------------------- publish and subscribe

    async def publish(self, subject: str, message: Message, *, reply: str = "") -> None:
        """Send a message to the current subscribers of a subject."""
        await self._send(subject, encode(message), reply)

    async def subscribe(self, subject: str, kind: type[M], handler: Handler[M]) -> None:
        """Call `handler` with each later message, one at a time. A coroutine function costs more."""
        decode = decoder(kind)

        def read(msg: Msg) -> M | None:
            data = self._payload(msg)
            try:
                return None if data is None else decode(data)
            except msgspec.DecodeError as error:
                self.refusals.refuse(msg.subject, kind, error)
                return None

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

    async def request(
        self, subject: str, message: Message, answer: type[R], *, who: str, deadline_s: float
    ) -> R:
        """Send a request to one process, repeat it until the answer arrives, and return the answer. The
        process serves the request once.

        Raises NoAnswer after `deadline_s` seconds of a connected bus, and Refused if the process refuses.
        """
        self._requests += 1
        _, answerer = self._names.parties(subject)
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
                        elif isinstance(reply := self._decode_answer(msg, decode, answer), Refusal):
                            raise Refused(who, reply.reason)
                        elif reply is not None:
                            return reply
                    remaining_s -= clock.now() - began
        finally:
            self._waiting.pop(reply_to, None)
        raise NoAnswer(who, subject, deadline_s)

    async def serve(
        self,
        subject: str,
        kind: type[M],
        handler: Callable[[M], Awaitable[Message]],
        *,
        forget: bool = False,
    ) -> None:
        """Answer requests until the bus closes. If the handler raises, the asking process gets a refusal.

        A request whose reply subject is not an inbox of a party in `messages.WORKER_VERBS` is refused: its
        sender would make this process publish there. `forget` keeps no answers and calls the handler again
        for a repeated request: for large answers without side effects.
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
                known = answers[msg.reply]
                if known is not None:
                    self._start(self._send, msg.reply, known, "")
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
        """Answer no request any more, not even those whose handlers still run. For a process that leaves: the
        askers turn to another process when they hear that it has left, and would take a refusal for final."""
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
        """Begin nothing any more, whatever still arrives."""
        self._tasks = None

    async def on_error(self, error: Exception) -> None:
        """Log an error of the server or the connection."""
        complaint = f"{type(error).__name__}: {error}"
        if complaint not in self._complaints:  # every attempt to reconnect reports the same errors
            self._complaints.add(complaint)
            log.warning("bus", error=complaint)

    async def on_disconnected(self) -> None:
        """Hold back messages. The client also calls it at the end."""
        self._up.clear()
        for scope in self._confirming:
            scope.cancel()
        if self._one_client:
            await self.store.on_disconnected()
        if not self._nats.is_closed:
            log.warning("bus disconnected")

    async def on_reconnected(self) -> None:
        """Send messages again."""
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

    def _decode_answer(self, msg: Msg, decode: Callable[[bytes], Any], kind: type[R]) -> R | Refusal | None:
        try:
            return decode(msg.data)
        except msgspec.DecodeError as error:
            self.refusals.refuse(msg.subject, kind, error)
            return None

    def _fail(self, error: Exception) -> None:
        async def raise_error() -> None:
            raise error

        self._start(raise_error)

    def _start(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        if self._tasks is not None:  # otherwise the connection closes, and sends what waits
            self._tasks.start_soon(function, *arguments)


class _AtOnce:
    """Stands for the future of a subscription: each message comes without a queue and a task between."""

    def __init__(self, deliver: Callable[[Msg], object]) -> None:
        self.set_result = deliver

    def cancelled(self) -> bool:
        return False
