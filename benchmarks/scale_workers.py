"""Simulated workers for `benchmarks/scale.py`: they speak the protocol of a run, and compute nothing.

    python benchmarks/scale_workers.py ORDERS

Each simulated rollout, inference and verifier worker has one connection of its own to the server, written
against the wire protocol of NATS, because thousands of full clients do not fit into one process. A rollout
worker pulls tickets, tells that it has started one, reports its first tokens, appends the trajectories and
the outcome to the log, and acknowledges the ticket. Not simulated are requests between workers, and each real
worker's second connection for heartbeats. Trainers use the project's own client.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec
import numpy as np

from scale_launcher import Orders
from stretto.array import Array
from stretto.bus.client import connect
from stretto.bus.joining import own_version
from stretto.bus.messages.base import Message
from stretto.bus.messages.inference import LoadReport, Swap, SwapDone
from stretto.bus.messages.membership import Beacon, Heartbeat, Join, Routes, Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import (
    GroupDone,
    Member,
    Progress,
    Ticket,
    TicketsStarted,
    TicketStarted,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.bus.messages.training import (
    AskPublished,
    AskSaved,
    CallDone,
    Copied,
    EndStep,
    LoadCheckpoint,
    Loaded,
    Prefetch,
    Published,
    RunCall,
    Save,
    Saved,
    StepEnded,
)
from stretto.bus.payloads import decoder
from stretto.bus.server import Bootstrap
from stretto.engine import Load, SwapReport
from stretto.weights import WeightsNote

JOINS_PER_S = 30.0
BEAT_S = 1.0
RARE_BEAT_S = 6.0
"""The kernel takes a worker for lost after 15 s."""
PULL_S = 15.0
"""A pull of a ticket ends after this many seconds."""
KEEP_ALIVE_S = 10.0
SPREAD_S = 3.0
LENGTH = 64
"""Tokens of a trajectory."""
encode = msgspec.msgpack.Encoder().encode
counts: Counter[str] = Counter()
"""Bytes that arrived, by the kind of message; bytes that were sent; groups, steps and ready workers."""


class Wire(asyncio.Protocol):
    """A connection to nats-server: subscriptions, and messages in both directions."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._buffer = b""
        self._handlers: dict[str, tuple[str, Callable[[str, str, bytes], None]]] = {}
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Log in."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        options = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "protocol": 1,
            "user": self._bootstrap.user,
            "pass": self._bootstrap.password,
            "lang": "python",
            "version": "0",
            "name": self._bootstrap.worker,
        }
        self._write(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        self.closed.set()

    def subscribe(self, subject: str, kind: str, handler: Callable[[str, str, bytes], None]) -> None:
        """Call `handler` with (subject, reply, payload) of each message. Its bytes count as `kind`."""
        number = str(len(self._handlers) + 1)
        self._handlers[number] = (kind, handler)
        self._write(f"SUB {subject} {number}\r\n".encode())

    def publish(
        self, subject: str, payload: bytes, reply: str = "", *, kind: str = "sent", id: str = ""
    ) -> None:
        """Send a message; with an id that the stream knows it by."""
        if id:
            head = f"NATS/1.0\r\nNats-Msg-Id: {id}\r\n\r\n".encode()
            line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(payload)}\r\n".encode()
            data = b"".join((line, head, payload, b"\r\n"))
        else:
            data = b"".join((f"PUB {subject} {reply} {len(payload)}\r\n".encode(), payload, b"\r\n"))
        counts[kind] += len(data)
        self._write(data)

    def ping(self) -> None:
        """Ping the server, as the project's client does every second."""
        self._write(b"PING\r\n")

    def _write(self, data: bytes) -> None:
        if not self.closed.is_set():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Give the messages that are complete to their handlers."""
        buffer = self._buffer + data if self._buffer else data
        place = 0
        while (end := buffer.find(b"\r\n", place)) >= 0:
            line = buffer[place:end]
            if line.startswith((b"MSG ", b"HMSG ")):
                parts = line.decode().split()
                size = int(parts[-1])
                if len(buffer) < end + 2 + size + 2:
                    break
                head = int(parts[-2]) if line[0] == 72 else 0
                fields = parts[1:-2] if head else parts[1:-1]
                after = end + 2 + size + 2
                kind, handler = self._handlers[fields[1]]
                counts[kind] += after - place
                payload = buffer[end + 2 + head : end + 2 + size]
                place = after
                if not (head and not payload):  # a status, such as the end of a pull
                    handler(fields[0], fields[2] if len(fields) > 2 else "", payload)
                continue
            if line == b"PING":
                self._write(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                print(self._bootstrap.worker, line.decode(), flush=True)
            place = end + 2
        self._buffer = buffer[place:]


class Worker:
    """A simulated worker: joins, sends heartbeats, hears beacons."""

    def __init__(self, bootstrap: Bootstrap, orders: Orders) -> None:
        self.bootstrap = bootstrap
        self.orders = orders
        self.names = Subjects(bootstrap.run)
        self.id = bootstrap.worker
        self.nonce = secrets.token_hex(4)
        self.inbox = f"{self.names.inbox(self.role)}.{secrets.token_hex(11)}"
        self.joins = 0
        self._welcome = asyncio.Event()

    @property
    def role(self) -> Any:
        """The worker's role."""
        return self.bootstrap.role

    async def run(self) -> None:
        """Join, and work until the connection ends."""
        address = urlsplit(self.bootstrap.url)
        host, port = address.hostname or "", address.port or 4222
        loop = asyncio.get_running_loop()
        is_new = True
        while not finish.is_set():
            try:
                _, self.wire = await loop.create_connection(lambda: Wire(self.bootstrap), host, port)
                await self.join()
            except (OSError, ConnectionError):
                await asyncio.sleep(2)
                continue
            self.wire.subscribe(self.names.beacon, "beacon", self._beacon)
            self.open()
            if is_new:
                counts["ready"] += 1
                self.beat()
                self.begin()
            is_new = False
            await self.wire.closed.wait()
            counts["reconnects"] += 1

    async def join(self) -> None:
        """Join the run, as often as it takes.

        Raises:
            ConnectionError: if the connection has ended.
        """
        self.joins += 1
        reply = f"{self.names.answers(self.role, 'kernel')}.{secrets.token_hex(11)}.{self.joins}"
        self.wire.subscribe(reply, "join", self._welcomed)
        message = encode(
            Join(self.id, self.role, "simulated", self.nonce, self.bootstrap.token, own_version())
        )
        self._welcome.clear()
        while not self._welcome.is_set():
            self.wire.publish(self.names.kernel(self.role, "join"), message, reply)
            try:
                await asyncio.wait_for(self._welcome.wait(), 5)
            except TimeoutError:
                if self.wire.closed.is_set():
                    raise ConnectionError from None

    def begin(self) -> None:
        """Begin to work."""

    def open(self) -> None:
        """Subscribe to what the role hears."""

    def load(self) -> Load | None:
        """Return the figures of an engine."""
        return None

    @property
    def tickets(self) -> int:
        """Number of tickets under way."""
        return 0

    def beat(self) -> None:
        """Send a heartbeat, and the next one a second later. While groups are measured, they are rarer:
        the cost of many would hide that of groups."""
        message = Heartbeat(self.id, self.nonce, ready=True, load=self.load(), tickets=self.tickets)
        self.wire.publish(self.names.kernel(self.role, "heartbeat"), encode(message), kind="heartbeats")
        self.wire.ping()
        asyncio.get_running_loop().call_later(RARE_BEAT_S if rare.is_set() else BEAT_S, self.beat)

    def _welcomed(self, subject: str, reply: str, payload: bytes) -> None:
        decoder(Welcome)(payload)
        self._welcome.set()

    def _beacon(self, subject: str, reply: str, payload: bytes) -> None:
        beacon = decoder(Beacon)(payload)
        if beacon.state == "over":
            counts["over"] += 1
            if counts["over"] >= counts["ready"]:
                finish.set()


class InferenceWorker(Worker):
    """Serves every version at once, and samples nothing."""

    def __init__(self, bootstrap: Bootstrap, orders: Orders) -> None:
        super().__init__(bootstrap, orders)
        self.served = -1
        self.tokens = 0

    def open(self) -> None:
        """Listen for swaps."""
        self.wire.subscribe(self.names.worker("inference", self.id, self.nonce, "swap"), "swaps", self._swap)
        self.wire.subscribe(self.names.worker("inference", self.id, self.nonce, "load"), "other", self._load)

    def load(self) -> Load:
        """Return the figures of a busy engine."""
        self.tokens += 2000
        return Load(self.served, 48, 3, 64, self.tokens, 1000.0, 10, 1.0, 0.1, 0.5)

    def _swap(self, subject: str, reply: str, payload: bytes) -> None:
        swap = decoder(Swap)(payload)
        self.served = swap.note.version
        counts["swaps done"] += 1
        report = SwapReport(swap.note.version, swap.note.digest, 0.01)
        self.wire.publish(reply, encode(SwapDone(report)))

    def _load(self, subject: str, reply: str, payload: bytes) -> None:
        self.wire.publish(reply, encode(LoadReport(self.load())))


class VerifierWorker(Worker):
    """Scores nothing: the simulated tickets need no reward."""


class RolloutWorker(Worker):
    """Works on tickets for a random time each."""

    def __init__(self, bootstrap: Bootstrap, orders: Orders) -> None:
        super().__init__(bootstrap, orders)
        self.running = 0
        self.pulled_at = 0.0
        self.routes: Routes | None = None
        self.acks: dict[str, asyncio.Future[int]] = {}

    def open(self) -> None:
        """Listen for routes and tickets."""
        self.wire.subscribe(
            self.names.worker("rollout", self.id, self.nonce, "routes"), "routes", self._routes
        )
        self.wire.subscribe(f"{self.inbox}.pull", "tickets", self._take)
        self.wire.subscribe(f"{self.inbox}.ack.*", "acks", self._stored)

    def begin(self) -> None:
        """Begin to pull tickets."""
        self.pull()

    @property
    def tickets(self) -> int:
        """Number of tickets under way."""
        return self.running

    def pull(self) -> None:
        """Ask for a ticket if a slot is free; look again later."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if going.is_set() and self.running < self.orders.slots and now - self.pulled_at > PULL_S:
            self.ask()
        loop.call_later(PULL_S / 3, self.pull)

    def ask(self) -> None:
        """Pull one ticket."""
        self.pulled_at = time.monotonic()
        consumer = self.names.ticket("train").replace(".", "_")
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.names.tickets_stream}.{consumer}"
        request = json.dumps({"batch": 1, "expires": int((PULL_S - 1) * 1e9)}).encode()
        self.wire.publish(subject, request, f"{self.inbox}.pull")

    def _routes(self, subject: str, reply: str, payload: bytes) -> None:
        self.routes = decoder(Routes)(payload)

    def _take(self, subject: str, reply: str, payload: bytes) -> None:
        if not reply.startswith("$JS.ACK"):
            return
        self.running += 1
        tasks.add(task := asyncio.get_running_loop().create_task(self._work(decoder(Ticket)(payload), reply)))
        task.add_done_callback(tasks.discard)
        self.pulled_at = 0.0
        if self.running < self.orders.slots:
            self.ask()

    def _stored(self, subject: str, reply: str, payload: bytes) -> None:
        answer = json.loads(payload)
        self.acks.pop(subject.rpartition(".")[2]).set_result(answer["seq"])

    async def append(self, subject: str, message: Message, id: str) -> int:
        """Append a message to the log, and return its sequence number."""
        number = secrets.token_hex(6)
        future = self.acks[number] = asyncio.get_running_loop().create_future()
        self.wire.publish(subject, encode(message), f"{self.inbox}.ack.{number}", id=id, kind="log")
        return await future

    async def _work(self, ticket: Ticket, ack: str) -> None:
        names, began = self.names, time.monotonic()
        started = TicketStarted(self.id, ticket.purpose, ticket.id, ticket.attempt)
        self.wire.publish(names.tickets_started, encode(TicketsStarted((started,))))
        left = random.uniform(0.3, 1.7) * self.orders.ticket_s
        await asyncio.sleep(min(1.0, left))
        oldest = max(ticket.min_version, 0)
        self.wire.publish(names.progress, encode(Progress(self.id, ((ticket.id, ticket.attempt, oldest),))))
        left -= 1.0
        while left > 0:
            await asyncio.sleep(min(left, KEEP_ALIVE_S))
            left -= KEEP_ALIVE_S
            if left > 0:
                self.wire.publish(ack, b"+WPI")
        while not going.is_set():
            self.wire.publish(ack, b"+WPI")
            with anyio.move_on_after(KEEP_ALIVE_S):
                await going.wait()
                await asyncio.sleep(random.uniform(0.0, SPREAD_S))  # not all at once
        ids = [f"{ticket.name}/{index}" for index in range(ticket.samples)]
        bundle = TrajectoryBundle(
            ticket.id, ticket.attempt, ticket.row, tuple(trajectory(id, i) for i, id in enumerate(ids))
        )
        sequence = await self.append(names.trajectories, bundle, f"{ticket.name}/trajectories/0")
        members = tuple(
            Member(id, sequence, index, LENGTH, LENGTH // 2, oldest, oldest, float(index % 2), {}, "stop")
            for index, id in enumerate(ids)
        )
        seconds = time.monotonic() - began
        done = GroupDone(ticket.purpose, ticket.id, ticket.attempt, self.id, members, seconds, seconds)
        await self.append(names.groups, done, f"{ticket.name}/end")
        self.wire.publish(ack, b"+ACK")
        counts["groups"] += 1
        self.running -= 1
        if time.monotonic() - self.pulled_at > PULL_S:
            self.ask()


def trajectory(id: str, sample: int) -> WireTrajectory:
    zeros = np.zeros(LENGTH, np.int32)
    tokens, mask, logprobs = (Array.of(zeros.astype(kind)) for kind in ("<i4", "?", "<f4"))
    return WireTrajectory(id, tokens, mask, logprobs, tokens, 1.0, {}, "stop", "inference-0", sample)


async def train(bootstrap: Bootstrap) -> None:
    """A trainer: every call takes no time, and every version is a name."""
    names, worker, nonce = Subjects(bootstrap.run), bootstrap.worker, secrets.token_hex(4)

    def note(version: int) -> WeightsNote:
        return WeightsNote(version, f"simulated-{version}", f"digest-{version}")

    async def load(message: LoadCheckpoint) -> Loaded:
        return Loaded(note(message.version))

    async def call(message: RunCall) -> CallDone:
        return CallDone({"loss": 0.0, "grad_norm": 1.0}, 0.0)

    async def end(message: EndStep) -> StepEnded:
        counts["steps"] += 1
        return StepEnded()

    async def published(message: AskPublished) -> Published:
        return Published(note(message.version))

    async def save(message: Save) -> Copied:
        return Copied()

    async def saved(message: AskSaved) -> Saved:
        return Saved(0.0)

    async with connect(bootstrap) as bus:
        subject = names.kernel("trainer", "join")
        join = Join(worker, "trainer", "simulated", nonce, bootstrap.token, own_version())
        await bus.request(subject, join, Welcome, deadline_s=60)
        own = partial(names.worker, "trainer", worker, nonce)
        await bus.serve(own("load"), LoadCheckpoint, load)
        await bus.serve(own("call"), RunCall, call)
        await bus.serve(own("end"), EndStep, end)
        await bus.serve(own("published"), AskPublished, published)
        await bus.serve(own("save"), Save, save)
        await bus.serve(own("saved"), AskSaved, saved)
        await bus.subscribe(own("prefetch"), Prefetch, lambda message: None)
        counts["ready"] += 1
        while not finish.is_set():
            beat = Heartbeat(worker, nonce, ready=True)
            await bus.publish(names.kernel("trainer", "heartbeat"), beat)
            with anyio.move_on_after(BEAT_S):
                await finish.wait()


async def watch(file: Path) -> None:
    """Work while a file is there."""
    while not finish.is_set():
        going.set() if file.exists() else going.clear()
        if going.is_set():
            rare.set()
        with anyio.move_on_after(0.1):
            await finish.wait()


async def report(file: Path) -> None:
    """Write the counts every second."""
    while not finish.is_set():
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps(counts))
        aside.rename(file)
        with anyio.move_on_after(1):
            await finish.wait()


KINDS = {"inference": InferenceWorker, "rollout": RolloutWorker, "verifier": VerifierWorker}
finish = asyncio.Event()
going = asyncio.Event()
"""Whether rollout workers take tickets and finish them."""
rare = asyncio.Event()
"""Whether heartbeats come rarely."""
tasks: set[asyncio.Task[None]] = set()


async def main(orders: Orders) -> None:
    tasks.add(asyncio.create_task(report(Path(orders.report))))
    tasks.add(asyncio.create_task(watch(Path(orders.go))))
    bootstraps = [Bootstrap.read(Path(each)) for each in orders.bootstraps]
    for bootstrap in sorted(bootstraps, key=lambda each: each.role != "trainer"):
        work = (
            train(bootstrap)
            if bootstrap.role == "trainer"
            else KINDS[bootstrap.role](bootstrap, orders).run()
        )
        tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(failed)
        await asyncio.sleep(1 / JOINS_PER_S)
    await finish.wait()
    await asyncio.sleep(0.5)


def failed(task: asyncio.Task[None]) -> None:
    """A connection that ends, ends the process: the figures would be wrong."""
    if not task.cancelled() and (error := task.exception()) is not None:
        print(repr(error), flush=True)
    finish.set()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Orders)))
