"""A nats-server in memory, as far as stretto uses one: the client protocol, and JetStream's API.

The unmodified client of nats-py talks to this server. The tests of `tests/simulation` run on this server and
on a real one.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from stretto.simulation.loop import SimulatedLoop, SimulatedProcess
from stretto.simulation.streams import Asked, Stream, StreamRefusal, subjects_like
from stretto.simulation.transport import Link, SimulatedTransport

_CRLF = b"\r\n"
_DELAY_S, _JITTER_S = 2e-4, 5e-4  # seconds of a message's way: the least, and the mean of the random part
_LATE_S = 1.0
"""Time between the second delivery of a message and the late acknowledgement of the first."""
_NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"
_CREATED = "2026-01-01T00:00:00Z"


@dataclass
class Weather:
    """The present faults of network and server. Shares are probabilities."""

    loop: SimulatedLoop
    context: contextvars.Context
    lost: float = 0.0
    """Share of core messages that get lost."""
    doubled: float = 0.0
    """Share of core messages that arrive twice."""
    late: float = 0.0
    """Share of messages that stall their connection."""
    late_s: float = 0.0
    """Longest stall of a connection, in seconds."""
    unconfirmed: float = 0.0
    """Share of stored messages whose acknowledgement gets lost."""
    untaken: float = 0.0
    """Share of acknowledgements of work-queue messages that get lost: the message is then delivered again."""
    taken_late: float = 0.0
    """Share of acknowledgements of work-queue messages that arrive only after a second delivery."""
    store_fails: float = 0.0
    """Share of messages that the store refuses for now. With 1.0 the store's disk is full."""
    failing: float = 0.0
    """Share of requests for samples, and of scorings, that fail."""
    down_until: float = 0.0
    hangs_until: float = 0.0
    """Time until which the server does nothing but answer pings."""
    cut_until: dict[int, float] = field(default_factory=dict[int, float])
    """Id of a process -> time until which the process reaches no server."""
    _ends: dict[str, float] = field(default_factory=dict[str, float])

    def worsen(self, name: str, value: float, seconds: float) -> None:
        """Set a share for a while. If two faults set the same share, the later end counts."""
        setattr(self, name, value)
        ends = self._ends[name] = max(self._ends.get(name, 0.0), self.loop.time() + seconds)
        self.loop.call_at(ends, self._clear_up, name, context=self.context)

    def _clear_up(self, name: str) -> None:
        if self._ends[name] <= self.loop.time():
            setattr(self, name, 0.0)

    @property
    def hangs(self) -> bool:
        """Whether the server does nothing but answer pings."""
        return self.loop.time() < self.hangs_until

    @property
    def works(self) -> bool:
        """Whether the server runs and does more than answer pings."""
        return self.loop.time() >= max(self.down_until, self.hangs_until)

    @property
    def full_until(self) -> float:
        """Time until which the disk of the store is full."""
        return self._ends["store_fails"] if self.store_fails == 1.0 else 0.0

    def reaches(self, pid: int) -> bool:
        """Return whether a process can connect."""
        return self.loop.time() >= max(self.down_until, self.cut_until.get(pid, 0.0))


class SimulatedConnection:
    """The server's end of a connection."""

    def __init__(
        self, server: SimulatedServer, transport: SimulatedTransport, process: SimulatedProcess | None
    ) -> None:
        self.number = server.new_number()
        self.name, self.began = (process.name, process.began) if process else ("world", 0.0)
        self.transport, self.process = transport, process
        self.to_server = Link(server, self._take)
        self.to_client = Link(server, transport.receive)
        self._server = server
        self._held: list[tuple[Any, ...]] = []
        self._data = b""
        self.subscriptions: dict[bytes, tuple[str, str]] = {}
        """Number of a subscription -> (subject, queue group)."""

    def drop(self) -> None:
        """Forget the client, and discard the bytes under way in both directions."""
        self.to_server.open = self.to_client.open = False
        self._server.forget(self)

    def _take(self, data: bytes) -> None:
        data = self._data + data if self._data else data
        start = 0
        while (end := data.find(_CRLF, start)) >= 0:
            words = data[start:end].split(b" ")
            if words[0] in (b"PUB", b"HPUB"):
                size = int(words[-1])
                after = end + 2 + size + 2
                if len(data) < after:
                    break
                self._do(words, data[end + 2 : after - 2])
                start = after
            else:
                self._do(words, b"")
                start = end + 2
        self._data = data[start:]

    def _do(self, words: list[bytes], payload: bytes) -> None:
        server, verb = self._server, words[0]
        if verb == b"PING":
            self.to_client.send(b"PONG\r\n")
        elif server.weather.hangs:
            self._held.append((words, payload))
        elif verb == b"PUB":
            reply = words[2].decode() if len(words) == 4 else ""
            server.publish(self, words[1].decode(), reply, b"", payload)
        elif verb == b"HPUB":
            reply, head = words[2].decode() if len(words) == 5 else "", int(words[-2])
            server.publish(self, words[1].decode(), reply, payload[:head], payload[head:])
        elif verb == b"SUB":
            group = words[2].decode() if len(words) == 4 else ""
            server.subscribe(self, words[-1], words[1].decode(), group)
        elif verb == b"UNSUB" and len(words) == 2:
            server.unsubscribe(self, words[1])

    def catch_up(self) -> None:
        """Execute the client's commands that waited while the server only answered pings."""
        commands, self._held = self._held, []
        for words, payload in commands:
            self._do(words, payload)


class SimulatedServer:
    """The server: subscriptions and streams. The seed draws delays and losses."""

    def __init__(self, loop: SimulatedLoop, seed: int) -> None:
        self.loop = loop
        self.context = contextvars.Context()
        """The context of the server's own callbacks, which belong to no process."""
        self.weather = Weather(loop, self.context)
        self.observers: list[Callable[[str, str, bytes, bytes], None]] = []
        """Called with sender, subject, payload and headers of each core message and each stored message."""
        self.messages = 0
        self.streams: dict[str, Stream] = {}
        self._rng = Random(f"network {seed}")
        self._connections: dict[int, SimulatedConnection] = {}
        self._asked: dict[str, float] = {}
        """Reply subject of a request to a worker -> time of the first such request."""
        self._joining: dict[str, SimulatedProcess] = {}
        """Reply subject of a request to join -> the process that wants to join."""
        self.strangers: list[str] = []
        """Violations: processes that answered a request to their predecessor."""
        self._numbered = 0
        self._exact: dict[str, dict[tuple[int, bytes], tuple[SimulatedConnection, bytes, str]]] = {}
        self._patterns: dict[tuple[int, bytes], tuple[SimulatedConnection, bytes, str, re.Pattern[str]]] = {}
        self._matching: dict[str, list[tuple[SimulatedConnection, bytes, str]]] = {}
        """Cache: subject -> subscribers whose patterns match; cleared when a pattern is added or removed."""
        self._homes: dict[str, Stream | None] = {}
        SimulatedTransport.server = self

    def new_number(self) -> int:
        self._numbered += 1
        return self._numbered

    def happens(self, share: float) -> bool:
        """Draw whether an event with this probability happens. A share of 0 draws no random number."""
        return bool(share) and self._rng.random() < share

    def delay_s(self) -> float:
        """Draw the seconds that a message takes on its way."""
        delay = _DELAY_S + self._rng.expovariate(1 / _JITTER_S)
        if self.happens(self.weather.late):
            delay += self._rng.random() * self.weather.late_s
        return delay

    def later(self, seconds: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call a function after `seconds`, outside of all processes."""
        return self.loop.call_later(seconds, call, *args, context=self.context)

    def calm(self) -> None:
        """End all faults of network and server."""
        self.weather = Weather(self.loop, self.context)

    # ------------------------------------------------------------------------------- connections

    def accept(self, transport: SimulatedTransport, process: SimulatedProcess | None) -> SimulatedConnection:
        connection = SimulatedConnection(self, transport, process)
        self._connections[connection.number] = connection
        info = {
            "server_id": "simulated",
            "version": "2.12.0",
            "proto": 1,
            "headers": True,
            "max_payload": 2**20,
            "jetstream": True,
            "client_id": connection.number,
        }
        connection.to_client.send(b"INFO " + json.dumps(info).encode() + _CRLF)
        return connection

    def forget(self, connection: SimulatedConnection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            for sid in [*connection.subscriptions]:
                self.unsubscribe(connection, sid)

    def break_connections(self, name: str | None = None) -> None:
        """Break the connections of one process, or all of them."""
        for connection in [*self._connections.values()]:
            if name in (None, connection.name):
                connection.drop()
                connection.transport.break_off()

    def cut_off(self, process: SimulatedProcess, seconds: float) -> None:
        """Cut one process off from the server for a while. All others stay connected, its successor too."""
        self.loop.note("cut off", process.name, seconds)
        until = max(self.weather.cut_until.get(process.pid, 0.0), self.loop.time() + seconds)
        self.weather.cut_until[process.pid] = until
        self.break_connections(process.name)

    def go_down(self, seconds: float) -> None:
        """Stop the server for a while. Streams survive; consumers without a durable name do not."""
        self.loop.note("server down", seconds)
        self.weather.down_until = max(self.weather.down_until, self.loop.time() + seconds)
        self.break_connections()
        for stream in self.streams.values():
            stream.restart()

    def answer_pings_only(self, seconds: float) -> None:
        """Do nothing but answer pings for a while."""
        self.loop.note("server hangs", seconds)
        self.weather.hangs_until = max(self.weather.hangs_until, self.loop.time() + seconds)
        self.later(seconds, self._catch_up)

    def _catch_up(self) -> None:
        if self.weather.hangs:
            return  # the server was made to hang again
        self.loop.note("server works")
        for connection in [*self._connections.values()]:
            connection.catch_up()

    # ------------------------------------------------------------------------------ core messages

    def subscribe(self, connection: SimulatedConnection, sid: bytes, subject: str, group: str) -> None:
        """Subscribe a client to a subject. Each message goes to only one member of a queue group."""
        connection.subscriptions[sid] = subject, group
        key = connection.number, sid
        if "*" in subject or ">" in subject:
            self._matching.clear()
            self._patterns[key] = connection, sid, group, subjects_like(subject)
        else:
            self._exact.setdefault(subject, {})[key] = connection, sid, group

    def unsubscribe(self, connection: SimulatedConnection, sid: bytes) -> None:
        subject, _ = connection.subscriptions.pop(sid, ("", ""))
        key = connection.number, sid
        if self._patterns.pop(key, None) is not None:
            self._matching.clear()
        subscribers = self._exact.get(subject, {})
        subscribers.pop(key, None)
        if not subscribers:
            self._exact.pop(subject, None)

    def subscribers(self, subject: str) -> list[tuple[SimulatedConnection, bytes, str]]:
        """Return the clients that subscribe to a subject, each with its subscription and queue group."""
        if (exact := self._exact.get(subject)) is not None:
            return [*exact.values(), *self._by_pattern(subject)]
        return self._by_pattern(subject)

    def _by_pattern(self, subject: str) -> list[tuple[SimulatedConnection, bytes, str]]:
        if (subscribers := self._matching.get(subject)) is None:
            subscribers = [entry[:3] for entry in self._patterns.values() if entry[3].fullmatch(subject)]
            self._matching[subject] = subscribers
        return subscribers

    def publish(
        self, sender: SimulatedConnection, subject: str, reply: str, head: bytes, data: bytes
    ) -> None:
        """Handle a client's message: a call of the API, a message for a stream, or a core message."""
        self.messages += 1
        if subject.startswith("$JS."):
            self._call(subject.split("."), reply, data)
        elif stream := self._home(subject):
            answer = self._store(stream, subject, head, data)
            if "error" not in answer and "duplicate" not in answer:
                self._show(sender.name, subject, data, head)
            if reply and not self.happens(self.weather.unconfirmed):
                self.send(sender.name, reply, "", b"", json.dumps(answer).encode())
        else:
            if sender.process and subject.endswith(".join"):
                self._joining[reply] = sender.process
            elif process := self._joining.pop(subject, None):
                process.joined = True
            self._show(sender.name, subject, data, head)
            self._match(sender, subject, reply)
            if self.happens(self.weather.lost):
                self.loop.note("lost", sender.name, subject)
                return
            for _ in range(1 + self.happens(self.weather.doubled)):
                if not self.send(sender.name, subject, reply, head, data) and reply:
                    self.send("server", reply, "", _NO_RESPONDERS, b"")

    def _match(self, sender: SimulatedConnection, subject: str, reply: str) -> None:
        """Check that a worker's answer comes from the process that was asked, not from its successor."""
        if reply and ".worker." in subject:
            self._asked.setdefault(reply, self.loop.time())
        elif sender.began > self._asked.get(subject, math.inf):
            self.strangers.append(f"{sender.name} answers {subject}, which its predecessor was asked")

    def _show(self, *message: Any) -> None:
        for observe in self.observers:
            observe(*message)

    def send(self, sender: str, subject: str, reply: str, head: bytes, data: bytes, to: str = "") -> bool:
        """Send a message to the subscribers of its subject, or of `to`. Return whether there are any."""
        groups: dict[str, list[tuple[SimulatedConnection, bytes]]] = {}
        subscribers = self.subscribers(to or subject)
        for connection, sid, group in subscribers:
            if group:
                groups.setdefault(group, []).append((connection, sid))
            else:
                self._deliver(sender, connection, sid, subject, reply, head, data)
        for members in groups.values():
            self._deliver(sender, *self._rng.choice(members), subject, reply, head, data)
        return bool(subscribers)

    def _deliver(
        self,
        sender: str,
        to: SimulatedConnection,
        sid: bytes,
        subject: str,
        reply: str,
        head: bytes,
        data: bytes,
    ) -> None:
        self.loop.note("message", sender, to.name, subject, hashlib.blake2b(data, digest_size=8).hexdigest())
        address = f"{subject} {sid.decode()} {reply}".rstrip()
        if head:
            line = f"HMSG {address} {len(head)} {len(head) + len(data)}\r\n"
        else:
            line = f"MSG {address} {len(data)}\r\n"
        to.to_client.send(b"".join((line.encode(), head, data, _CRLF)))

    # ----------------------------------------------------------------------------------- JetStream

    def _home(self, subject: str) -> Stream | None:
        if subject not in self._homes:
            streams = (stream for stream in self.streams.values() if stream.stores(subject))
            self._homes[subject] = next(streams, None)
        return self._homes[subject]

    def _store(self, stream: Stream, subject: str, head: bytes, data: bytes) -> dict[str, Any]:
        try:
            if self.happens(self.weather.store_fails):
                is_full = self.weather.store_fails == 1.0
                raise StreamRefusal(503, *((10023, "insufficient resources") if is_full else (10077, "busy")))
            return stream.store(subject, head, data)
        except StreamRefusal as error:
            return {**error.answer(), "stream": stream.name, "seq": 0}

    def _call(self, words: list[str], reply: str, data: bytes) -> None:
        if words[1] == "ACK":
            self._acknowledge(words, data)
        elif words[2:4] == ["CONSUMER", "MSG"]:
            self._ask_consumer(words, reply, data)
        elif words[2:4] == ["DIRECT", "GET"]:
            self._get_directly(words, reply, data)
        else:
            try:
                answer = self._answer(words[2:], json.loads(data) if data else {})
            except StreamRefusal as error:
                answer = error.answer()
            self.send("server", reply, "", b"", json.dumps(answer).encode())

    def _acknowledge(self, words: list[str], data: bytes) -> None:
        # $JS.ACK.STREAM.CONSUMER.DELIVERIES.SEQUENCE.CONSUMER_SEQUENCE.TIME.PENDING
        if self.happens(self.weather.untaken):
            self.loop.note("acknowledgement lost", words[2], words[5])
            return
        stream = self.streams.get(words[2])
        consumer = stream.consumers.get(words[3]) if stream else None
        if consumer is not None and self.happens(self.weather.taken_late):
            self.later(consumer.redeliver_s + _LATE_S, consumer.acknowledged, int(words[5]), data)
        elif consumer is not None:
            consumer.acknowledged(int(words[5]), data)

    def _ask_consumer(self, words: list[str], reply: str, data: bytes) -> None:
        stream = self.streams.get(words[5])
        consumer = stream.consumers.get(words[6]) if stream else None
        if consumer is None:
            self.send("server", reply, "", _NO_RESPONDERS, b"")
        else:
            consumer.ask(Asked(reply, **_request(data)))

    def _get_directly(self, words: list[str], reply: str, data: bytes) -> None:
        stream = self.streams.get(words[4])
        question = json.loads(data) if data else {"last_by_subj": ".".join(words[5:])}
        if stream is None:
            self.send("server", reply, "", _NO_RESPONDERS, b"")
            return
        is_batch = "batch" in question
        messages = stream.find_some(question) if is_batch else [stream.find(question)]
        for number, message in enumerate(messages, 1):
            if message is None:
                continue
            head = (
                f"NATS/1.0\r\nNats-Stream: {stream.name}\r\nNats-Subject: {message.subject}\r\n"
                f"Nats-Sequence: {message.sequence}\r\nNats-Time-Stamp: {_CREATED}\r\n"
                + (f"Nats-Num-Pending: {len(messages) - number}\r\n\r\n" if is_batch else "\r\n")
            )
            self.send("server", reply, "", head.encode(), message.data)
        if not any(messages):
            self.send("server", reply, "", b"NATS/1.0 404 Message Not Found\r\n\r\n", b"")
        elif is_batch:
            self.send("server", reply, "", b"NATS/1.0 204 EOB\r\n\r\n", b"")

    def _answer(self, words: list[str], question: dict[str, Any]) -> dict[str, Any]:
        match words:
            case ["STREAM", "CREATE", name]:
                return self._create(name, question)
            case ["CONSUMER", "DURABLE", "CREATE", name, _] | ["CONSUMER", "CREATE", name, *_]:
                return self._stream(name).add_consumer(question["config"])
            case ["STREAM", "INFO", name]:
                return self._info(self._stream(name), details=bool(question.get("deleted_details")))
            case ["STREAM", "UPDATE", name]:
                self._stream(name).config = question
                return self._info(self._stream(name))
            case ["STREAM", "PURGE", name]:
                num_purged = self._stream(name).purge(question.get("seq"), question.get("filter"))
                return {"success": True, "purged": num_purged}
            case ["STREAM", "DELETE", name]:
                del self.streams[self._stream(name).name]
                self._homes.clear()
                return {"success": True}
            case ["STREAM", "MSG", "DELETE", name]:
                self._stream(name).delete(question["seq"])
                return {"success": True}
            case ["STREAM", "MSG", "GET", name]:
                return self._message(self._stream(name), question)
            case _:
                raise NotImplementedError(f"the simulated server has no {'.'.join(words)}")

    def _create(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        existing = self.streams.get(name)
        if existing is None:
            self.streams[name] = Stream(self, name, config)
            self._homes.clear()
        elif existing.config != config:
            raise StreamRefusal(400, 10058, "stream name already in use with a different configuration")
        return {**self._info(self.streams[name]), "did_create": existing is None}

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise StreamRefusal(404, 10059, "stream not found")
        return self.streams[name]

    @staticmethod
    def _info(stream: Stream, *, details: bool = False) -> dict[str, Any]:
        return {"config": stream.config, "created": _CREATED, "state": stream.state(details=details)}

    @staticmethod
    def _message(stream: Stream, question: dict[str, Any]) -> dict[str, Any]:
        message = stream.find(question)
        if message is None:
            raise StreamRefusal(404, 10037, "no message found")
        data = base64.b64encode(message.data).decode()
        content = {"subject": message.subject, "seq": message.sequence, "data": data, "time": _CREATED}
        if message.head:
            content["hdrs"] = base64.b64encode(message.head).decode()
        return {"message": content}


def _request(data: bytes) -> dict[str, Any]:
    question = json.loads(data) if data else {}
    if isinstance(question, int):
        question = {"batch": question}
    return {
        "number": question.get("batch", 1),
        "expires_s": question.get("expires", 0) / 1e9,
        "heartbeat_s": question.get("idle_heartbeat", 0) / 1e9,
        "wait": not question.get("no_wait", False),
    }
