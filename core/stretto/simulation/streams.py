"""Streams and consumers of the simulated server: stored messages, and their delivery to readers."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.simulation.server import SimulatedServer

_SAME_ID_S = 120.0
"""Seconds for which a stream recognises the id of a stored message."""
_TIME = "1000000000"  # time stamp of each delivery, in nanoseconds


class StreamRefusal(Exception):
    """An error that the API reports to the client."""

    def __init__(self, code: int, err_code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.err_code, self.text = code, err_code, text

    def answer(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "err_code": self.err_code, "description": self.text}}


@dataclass(frozen=True, slots=True)
class _StreamMessage:
    sequence: int
    subject: str
    head: bytes
    data: bytes


def subjects_like(*patterns: str) -> re.Pattern[str]:
    """Return an expression that matches the patterns' subjects: `*` is one word, a last `>` all others."""
    expressions = (re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+") for pattern in patterns)
    return re.compile("|".join(expressions))


def header(head: bytes, name: bytes) -> str | None:
    """Return the header `name` of a message; None if the message has no such header."""
    for line in head.split(b"\r\n"):
        if line.startswith(name + b":"):
            return line[len(name) + 1 :].strip().decode()
    return None


class Stream:
    """A stream, which survives a restart of the server as if it were on disk."""

    def __init__(self, server: SimulatedServer, name: str, config: dict[str, Any]) -> None:
        self.server, self.name, self.config = server, name, config
        self.messages: dict[int, _StreamMessage] = {}
        self.last = 0
        self.consumers: dict[str, _Consumer] = {}
        self.is_queue = config.get("retention") == "workqueue"
        self._subjects = subjects_like(*config["subjects"])
        self._one_each = config.get("max_msgs_per_subject") == 1
        self._newest: dict[str, int] = {}
        self._ids: dict[str, tuple[float, int]] = {}

    def stores(self, subject: str) -> bool:
        return self._subjects.fullmatch(subject) is not None

    def store(self, subject: str, head: bytes, data: bytes) -> dict[str, Any]:
        """Store a message once for each id. Raises StreamRefusal if it expects another last number."""
        now, id = self.server.loop.time(), header(head, b"Nats-Msg-Id")
        expected = header(head, b"Nats-Expected-Last-Sequence")
        if expected is not None and int(expected) != self.last:
            raise StreamRefusal(400, 10071, f"wrong last sequence: {self.last}")
        if id in self._ids and now - self._ids[id][0] < _SAME_ID_S:
            return {"stream": self.name, "seq": self._ids[id][1], "duplicate": True}
        self.last += 1
        if id is not None:
            self._ids[id] = now, self.last
        if self._one_each and subject in self._newest:
            self.messages.pop(self._newest[subject], None)
        self._newest[subject] = self.last
        message = self.messages[self.last] = _StreamMessage(self.last, subject, head, data)
        for consumer in self.consumers.values():
            consumer.add(message)
        return {"stream": self.name, "seq": self.last}

    def find(self, question: dict[str, Any]) -> _StreamMessage | None:
        """Return a message by its number (`seq`), or the newest message of a subject (`last_by_subj`)."""
        if question.get("seq"):
            return self.messages.get(question["seq"])
        subject = question["last_by_subj"]
        newest = self.messages.get(self._newest.get(subject, 0))
        if newest is not None:
            return newest
        return next((each for each in reversed(self.messages.values()) if each.subject == subject), None)

    def find_some(self, question: dict[str, Any]) -> list[_StreamMessage]:
        """Return up to `batch` messages of the subject `next_by_subj`, from the number `seq` on."""
        of_subject = (
            message
            for sequence in range(question["seq"], self.last + 1)
            if (message := self.messages.get(sequence)) and message.subject == question["next_by_subj"]
        )
        return list(islice(of_subject, question["batch"]))

    def delete(self, sequence: int) -> None:
        """Remove a message. Raises StreamRefusal if the message does not exist."""
        if sequence not in self.messages:
            raise StreamRefusal(400, 10043, "sequence not found")
        self.remove(sequence)

    def remove(self, sequence: int) -> None:
        """Remove a message, if the message exists."""
        self.messages.pop(sequence, None)
        for consumer in self.consumers.values():
            consumer.forget(sequence)

    def purge(self, below: int | None, subject: str | None) -> int:
        """Remove the messages below a number, of one subject (None: all); return how many there were."""
        sequences = [
            each.sequence
            for each in self.messages.values()
            if (not below or each.sequence < below) and subject in (None, each.subject)
        ]
        for each in sequences:
            self.remove(each)
        if below and subject is None:
            self.last = max(self.last, below - 1)
        return len(sequences)

    def state(self, *, details: bool) -> dict[str, Any]:
        first = min(self.messages, default=self.last + 1 if self.last else 0)
        deleted = [each for each in range(max(1, first), self.last + 1) if each not in self.messages]
        return {
            "messages": len(self.messages),
            "bytes": sum(len(each.data) for each in self.messages.values()),
            "first_seq": first,
            "last_seq": self.last,
            "num_deleted": len(deleted),
            "consumer_count": len(self.consumers),
        } | ({"deleted": deleted} if details and deleted else {})

    def add_consumer(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create a consumer unless its name exists, and return the API's description of the consumer."""
        name = config.get("durable_name") or config.get("name") or f"reader{self.server.new_number()}"
        if name not in self.consumers:
            self.consumers[name] = _Consumer(self, name, config)
        no_message = {"consumer_seq": 0, "stream_seq": 0}
        counts = dict.fromkeys(("num_ack_pending", "num_redelivered", "num_waiting", "num_pending"), 0)
        return {
            "stream_name": self.name,
            "name": name,
            "config": config,
            "created": "2026-01-01T00:00:00Z",
            "delivered": no_message,
            "ack_floor": no_message,
            **counts,
        }

    def restart(self) -> None:
        """Forget what a server keeps in memory: requests of clients, and consumers without a durable name."""
        for name, consumer in [*self.consumers.items()]:
            consumer.restart()
            if not consumer.durable:
                del self.consumers[name]


@dataclass(eq=False)
class Asked:
    """A client's request for the next messages of a consumer, which go to the subject `reply`."""

    reply: str
    number: int
    expires_s: float
    heartbeat_s: float
    wait: bool
    over: bool = False


class _Consumer:
    """A reader's position in a stream; for a work queue also the delivered, unacknowledged messages."""

    def __init__(self, stream: Stream, name: str, config: dict[str, Any]) -> None:
        self._stream, self._server, self._name = stream, stream.server, name
        self.durable = bool(config.get("durable_name"))
        subjects = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        self._subjects = subjects_like(*subjects)
        self._explicit = config.get("ack_policy") == "explicit"
        self.redeliver_s = config.get("ack_wait", 30 * 10**9) / 1e9
        self._inactive_s = config.get("inactive_threshold", 0) / 1e9
        self._start = config.get("opt_start_seq", 1)
        self._to_send = deque(each.sequence for each in stream.messages.values() if self._wants(each))
        self._taken: dict[int, asyncio.TimerHandle] = {}
        """Sequence number of an unacknowledged message -> timer of its next delivery."""
        self._deliveries: dict[int, int] = {}
        self._sent = 0
        self._questions: deque[Asked] = deque()
        self._used = self._server.loop.time()
        if self._inactive_s and not self.durable:
            self._server.later(self._inactive_s, self._end_if_unused)

    def _wants(self, message: _StreamMessage) -> bool:
        return message.sequence >= self._start and self._subjects.fullmatch(message.subject) is not None

    def _end_if_unused(self) -> None:
        idle_s = self._server.loop.time() - self._used
        if self._questions or idle_s < self._inactive_s:
            self._server.later(
                self._inactive_s if self._questions else self._inactive_s - idle_s, self._end_if_unused
            )
        elif self._stream.consumers.get(self._name) is self:
            del self._stream.consumers[self._name]

    def add(self, message: _StreamMessage) -> None:
        if self._wants(message):
            self._to_send.append(message.sequence)
            self._send()

    def forget(self, sequence: int) -> None:
        if timer := self._taken.pop(sequence, None):
            timer.cancel()
        self._deliveries.pop(sequence, None)

    def restart(self) -> None:
        """End the requests of clients, which then have to send new ones."""
        for asked in self._questions:
            asked.over = True
        self._questions.clear()

    def ask(self, asked: Asked) -> None:
        self._used = self._server.loop.time()
        self._questions.append(asked)
        if asked.expires_s:
            self._server.later(asked.expires_s, self._expire, asked)
        if asked.heartbeat_s:
            self._server.later(asked.heartbeat_s, self._beat, asked)
        self._send()
        if not asked.over and not asked.expires_s and not asked.wait:
            self._end(asked, b"404 No Messages")

    def _end(self, asked: Asked, status: bytes) -> None:
        if not asked.over:
            asked.over = True
            self._questions.remove(asked)
            self._server.send("server", asked.reply, "", b"NATS/1.0 " + status + b"\r\n\r\n", b"")

    def _expire(self, asked: Asked) -> None:
        self._used = self._server.loop.time()
        self._end(asked, b"408 Request Timeout")

    def _beat(self, asked: Asked) -> None:
        if not asked.over and self._server.weather.works:
            self._server.send("server", asked.reply, "", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", b"")
        if not asked.over:
            self._server.later(asked.heartbeat_s, self._beat, asked)

    def _send(self) -> None:
        """Send messages to the clients with open requests, in turn."""
        while self._to_send and self._questions:
            asked = self._questions[0]
            if not self._server.subscribers(asked.reply):  # the client has left
                self._questions.popleft().over = True
            elif message := self._stream.messages.get(self._to_send.popleft()):
                asked.number -= 1
                asked.over = not asked.number
                self._questions.popleft()
                if asked.number:
                    self._questions.append(asked)
                self._deliver(message, asked.reply)

    def _deliver(self, message: _StreamMessage, to: str) -> None:
        self._sent += 1
        sequence = message.sequence
        deliveries = self._deliveries.get(sequence, 0) + 1
        if self._explicit:
            self._deliveries[sequence] = deliveries
            self._taken[sequence] = self._server.later(self.redeliver_s, self._redeliver, sequence)
        pending = len(self._to_send)
        ack_subject = (
            f"$JS.ACK.{self._stream.name}.{self._name}.{deliveries}.{sequence}.{self._sent}.{_TIME}.{pending}"
        )
        self._server.send("server", message.subject, ack_subject, message.head, message.data, to=to)

    def _redeliver(self, sequence: int) -> None:
        if self._taken.pop(sequence, None) is not None:
            self._server.loop.note("delivered again", self._stream.name, sequence)
            self._to_send.appendleft(sequence)
            self._send()

    def acknowledged(self, sequence: int, data: bytes) -> None:
        """Apply a client's acknowledgement: `+WPI` in progress, `-NAK` deliver again, else done."""
        kind, timer = data[:4], self._taken.pop(sequence, None)
        if timer is not None:
            timer.cancel()
        if kind == b"+WPI":
            if timer is not None:
                self._taken[sequence] = self._server.later(self.redeliver_s, self._redeliver, sequence)
        elif kind == b"-NAK":
            if timer is not None:
                self._to_send.appendleft(sequence)
                self._send()
        elif self._stream.is_queue:
            self._stream.remove(sequence)
