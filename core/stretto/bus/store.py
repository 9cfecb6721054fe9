"""The data that nats-server stores: streams, read by number, and work queues. README.md has the promises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from stretto.bus.connection import payload_limit
from stretto.bus.health import Refusals, Unanswered
from stretto.bus.messages.base import Message
from stretto.bus.messages.membership import SERVER
from stretto.bus.payloads import decoder, encode, join_stored, list_parts, split, with_parts
from stretto.bus.server import Bootstrap
from stretto.errors import BusError, Malformed, MessageGone, NoAnswer, Superseded, together
from stretto.machine import clock

M = TypeVar("M", bound=Message)
T = TypeVar("T")

log = structlog.get_logger()

_ANSWER_S = 10.0
"""Seconds for one attempt of an operation."""
_CLUSTER_ANSWER_S = 4.0
"""The same for a store with replicas. A killed server answers nothing, and another one may answer soon."""
_HEARTBEAT_S = 2
"""Seconds between two signs of life from the server of a stream that this process follows."""
_SILENT_S = 7.0
"""Seconds without a sign of life until the process creates another consumer, or asks again."""
_FOLLOW_S, _FOLLOW_AT_ONCE = 15.0, 256
"""Limits of one request to a followed stream: seconds until it ends, and messages."""
_READ_AT_ONCE = 32  # messages of one answer, and requests at the same time
_TAKE_S = 5.0
"""Seconds until one request to a work queue ends."""

_NO_MESSAGE = (10037, 10043, 10057)
"""Error codes of the server for a message that does not exist, or no longer exists."""
_OTHER_CONFIGURATION = 10058
"""Error code for a stream that exists with another configuration."""
_ELECTING = (10005, 10009, 10118, 10119, 10158)
"""Error codes of a cluster that has lost a server a moment ago: too few servers for the replicas, no leader
here, a stream or a consumer whose server is away, and a message whose first copy is still being stored."""
_OTHER_END = 10071
"""Error code for an append whose expected last sequence number is not the stream's."""
_COPYING = (10023,)
"""Error code while a stream is copied to more servers, before its consumer can be."""


@dataclass
class Delivery(Generic[M]):
    """A message taken from a work queue. Without a call of `acknowledge` or `in_progress`, the server
    delivers it again after the queue's `redeliver_s`."""

    message: M
    _msg: Msg

    async def acknowledge(self) -> None:
        """Remove the message from the queue."""
        await self._msg.ack()

    async def in_progress(self) -> None:
        """Restart the time until the server delivers the message again."""
        await self._msg.in_progress()


@dataclass(frozen=True)
class Extent:
    """The sequence numbers of a stream's messages at one moment."""

    first: int
    last: int
    """Highest number ever given; `first - 1` if the stream is empty."""
    missing: frozenset[int] = frozenset()
    """Numbers between `first` and `last` without a message."""

    def __contains__(self, sequence: int) -> bool:
        return self.first <= sequence <= self.last and sequence not in self.missing


@dataclass
class StreamEnd:
    """The end of a stream, as one writer knows it."""

    stream: str
    sequence: int
    """Sequence number of the last message. `append` advances it."""
    unsure: set[str] = field(default_factory=set[str])
    """Ids of messages that may be stored or not: the one under way, and those of cancelled appends."""


class Store:
    """The store of a run. `inbox` is the prefix of the subjects at which only this process gets messages."""

    def __init__(
        self, client: Client, bootstrap: Bootstrap, inbox: str, unanswered: Unanswered, refusals: Refusals
    ) -> None:
        self._client = client
        self._outage_s = bootstrap.outage_s
        self._replicas = bootstrap.replicas
        self._answer_s = _ANSWER_S if self._replicas == 1 else _CLUSTER_ANSWER_S
        self._jetstream: JetStreamContext = client.jetstream(timeout=self._answer_s)
        self._inbox = inbox
        self._unanswered = unanswered
        self._refuse = refusals.refuse
        self._up = asyncio.Event()
        self._pulls: list[_Pull] = []  # a set's order would depend on addresses in memory
        self._questions = 0

    async def on_disconnected(self) -> None:
        """Hold back all operations. The client also calls this when it closes."""
        self._up.clear()

    async def on_reconnected(self) -> None:
        """Continue all operations, and let every consumer of this process send its request again."""
        self._up.set()
        for pull in self._pulls:
            pull.messages.put_nowait(None)  # the server has forgotten the request

    async def make_log(self, stream: str, subjects: list[str]) -> None:
        """Create a stream that processes read by sequence number and purge from its beginning. Idempotent."""
        config = api.StreamConfig(name=stream, subjects=with_parts(*subjects), allow_direct=True)
        await self._make_stream(config)

    async def make_queue(self, stream: str, subjects: list[str], *, redeliver_s: float) -> None:
        """Create a work queue with one consumer for each subject, named after it. The server delivers a
        message again if nobody acknowledges it within `redeliver_s`. Idempotent."""
        await self._make_stream(
            api.StreamConfig(name=stream, subjects=subjects, retention=api.RetentionPolicy.WORK_QUEUE)
        )
        for subject in subjects:
            consumer = api.ConsumerConfig(
                durable_name=_consumer(subject),
                filter_subject=subject,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=redeliver_s,
                max_ack_pending=-1,
            )
            await self._storing(lambda c=consumer: self._jetstream.add_consumer(stream, c), stream)

    async def append(self, subject: str, message: Message, *, id: str, after: StreamEnd | None = None) -> int:
        """Store a message once for each `id`, and return its sequence number.

        With `after`, the message is stored directly behind that end or not at all; only one append at a time
        may use it. Raises NoAnswer without a confirmation in time, Superseded if another writer has stored a
        message after `after`, and BusError if the server cannot store, for example on a full disk.
        """
        first, *rest = parts = split(encode(message), payload_limit(self._client))
        if not rest:
            return await self._store(subject, first, id, after)
        _, of_parts = with_parts(subject)
        ids = (f"{id}.{index}" for index in range(len(parts)))
        numbers = [
            await self._store(of_parts, part, name, after) for part, name in zip(parts, ids, strict=True)
        ]
        return await self._store(subject, list_parts(numbers), id, after)

    async def read(self, stream: str, sequence: int, kind: type[M]) -> M:
        """Return a message. Raise MessageGone if a part of it is missing, or Malformed for another kind."""
        return await self._decode_stored(stream, await self._read_message(stream, sequence), kind)

    async def read_some(
        self, stream: str, subject: str, sequences: Collection[int], kind: type[M]
    ) -> dict[int, M]:
        """Return the messages of a subject with these numbers. One request reads up to 32 neighbours."""
        missing, result = set(sequences), dict[int, M]()
        while len(missing) > 1:
            number = min(len(missing), _READ_AT_ONCE)
            question = {"seq": min(missing), "batch": number, "next_by_subj": subject}
            messages = await self._storing(partial(self._get_some, stream, question), f"{stream} {number}")
            wanted = missing & messages.keys()
            for sequence in wanted:
                result[sequence] = await self._decode_stored(stream, messages[sequence], kind)
            missing -= wanted
            if 2 * len(wanted) <= number:
                break  # most messages between the wanted ones are not wanted

        async def read(sequence: int) -> M:
            return await self.read(stream, sequence, kind)

        return result | dict(zip(missing, await together(read, missing, _READ_AT_ONCE), strict=True))

    async def read_newest(self, stream: str, subject: str, kind: type[M]) -> M:
        """Return the newest message of a subject. Raises as `read`."""
        return await self._decode_stored(stream, await self._read_message(stream, 0, subject), kind)

    async def _decode_stored(self, stream: str, message: api.RawStreamMsg, kind: type[M]) -> M:
        try:
            return decoder(kind)(await self._join_stored_parts(stream, message.data or b""))
        except (msgspec.DecodeError, ValueError) as error:
            name = f"{stream} {message.seq}"
            self._refuse(name, kind, error)
            raise Malformed(name, kind.__name__, str(error)) from error

    async def follow(
        self, stream: str, subject: str, kind: Any, *, start: int
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (sequence, message) from `start` on, in order, without end. Skip malformed messages."""

        async def consumer_at(following: int) -> str:
            return await self.make_consumer(stream, [subject], start=following)

        async for item in self.follow_consumer(stream, {subject: kind}, consumer_at, start=start):
            yield item

    async def make_consumer(self, stream: str, subjects: list[str], *, start: int) -> str:
        """Create a consumer, and return its name. The server removes it after two minutes without a pull."""
        is_single = len(subjects) == 1
        consumer = api.ConsumerConfig(
            filter_subject=subjects[0] if is_single else None,
            filter_subjects=None if is_single else subjects,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start),
            ack_policy=api.AckPolicy.NONE,
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
        """Like `follow`, for several subjects. `consumer_at` creates the consumer, again after a loss."""
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
        """Return the sequence numbers of the messages in a stream. A damaged message counts as missing."""
        subject = f"$JS.API.STREAM.INFO.{stream}"

        async def ask() -> dict[str, Any]:
            question = b'{"deleted_details": true}'
            answer = await self._client.request(subject, question, timeout=self._answer_s)
            content = json.loads(answer.data)
            if "error" in content:
                raise APIError.from_error(content["error"])
            return content["state"]

        state = await self._storing(ask, subject)
        return Extent(state["first_seq"], state["last_seq"], frozenset(state.get("deleted") or ()))

    async def holds(self, stream: str, sequence: int) -> bool:
        """Return whether a stream holds a message with all its parts."""
        try:
            message = await self._read_message(stream, sequence)
            await self._join_stored_parts(stream, message.data or b"")
        except (msgspec.DecodeError, ValueError, MessageGone):
            return False
        return True

    async def end(self, stream: str) -> StreamEnd:
        """Return the present end of a stream, for its next writer."""
        info = await self._storing(lambda: self._jetstream.stream_info(stream), stream)
        return StreamEnd(stream, info.state.last_seq)

    async def identity(self, stream: str) -> str:
        """Return the time when a stream was created. A stream that replaces a lost one has another time."""
        info = await self._storing(lambda: self._jetstream.stream_info(stream), stream)
        return "" if info.created is None else info.created.isoformat()

    async def purge(self, stream: str, *, below: int | None = None) -> None:
        """Remove the messages below a number, or all. The next message has this number or a higher one."""
        await self._storing(lambda: self._jetstream.purge_stream(stream, below), stream)

    async def delete(self, stream: str, sequence: int) -> None:
        """Remove one message, if it exists."""
        try:
            await self._storing(lambda: self._jetstream.delete_msg(stream, sequence), stream)
        except BusError as error:
            if not (isinstance(error.__cause__, APIError) and error.__cause__.err_code in _NO_MESSAGE):
                raise

    async def take(
        self,
        stream: str,
        subject: str,
        kind: type[M],
        *,
        room: Callable[[], Awaitable[int]],
        until: anyio.Event,
    ) -> AsyncIterator[Delivery[M]]:
        """Yield messages of a work queue, each to one process at a time.

        `room` waits until the caller has room, and returns for how many messages. When `until` is set, the
        bus returns the messages that the server still sends (for `_TAKE_S` at most) to the queue.
        """
        decode = decoder(kind)
        async with self._pulling(stream, _consumer(subject), expires_s=_TAKE_S) as pull:
            while not (until.is_set() and not pull.asked):
                try:
                    if not pull.asked:
                        number = await room()
                        if until.is_set():
                            continue
                        await pull.ask(number)
                    msg = await pull.next()
                except (NoAnswer, nats.errors.Error) as error:
                    log.warning("work queue interrupted", stream=stream, error=str(error))
                    await anyio.sleep(0.5)
                    continue
                if msg is None:
                    continue
                if until.is_set():
                    await msg.nak()
                    continue
                try:
                    yield Delivery(decode(msg.data), msg)
                except msgspec.DecodeError as error:
                    self._refuse(subject, kind, error)
                    await msg.term()

    async def _make_stream(self, config: api.StreamConfig) -> None:
        """Create a stream, or reconfigure an existing one: a resumed run may have other `replicas`."""
        config.storage = api.StorageType.FILE
        config.num_replicas = self._replicas

        async def make() -> None:
            try:
                await self._jetstream.add_stream(config)
            except APIError as error:
                if error.err_code != _OTHER_CONFIGURATION:
                    raise
                await self._jetstream.update_stream(config)

        await self._storing(make, config.name or "")

    async def _storing(
        self, operation: Callable[[], Awaitable[T]], action: str, passing: Collection[int] = ()
    ) -> T:
        """Run an idempotent operation, and repeat it for up to `outage_s` while the server does not answer
        or sends a temporary error (in a cluster also `passing`). Time without a connection does not count."""
        remaining_s = self._outage_s
        while True:
            await self._up.wait()
            began = clock.now()
            try:
                with self._unanswered.waiting(SERVER, action, waited_s=self._outage_s - remaining_s):
                    return await operation()
            except NotFoundError:
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
            await anyio.sleep(0.2)
            remaining_s -= clock.now() - began

    async def _store(self, subject: str, data: bytes, id: str, after: StreamEnd | None) -> int:
        async def publish() -> int:
            headers = {"Nats-Msg-Id": id}
            if after is not None:
                headers["Nats-Expected-Last-Sequence"] = str(after.sequence)
            try:
                return (await self._jetstream.publish(subject, data, headers=headers)).seq
            except APIError as error:
                if after is None or error.err_code != _OTHER_END:
                    raise
                return await self._stored_before(after, id)

        if after is not None:
            after.unsure.add(id)
        sequence = await self._storing(publish, f"append to {subject}")
        if after is not None:
            after.sequence = sequence
            after.unsure.clear()
        return sequence

    async def _stored_before(self, after: StreamEnd, id: str) -> int:
        """Return the number of a message that an earlier attempt stored after `after`: its acknowledgement
        was lost, and the server compares the end of the stream before it looks for the id."""
        following = after.sequence + 1
        try:
            message = await self._jetstream.get_msg(after.stream, following)  # from the leader
        except NotFoundError:
            info = await self._jetstream.stream_info(after.stream)
            if info.state.last_seq < following:
                raise TimeoutError from None
            raise Superseded(after.stream) from None
        stored_id = (message.headers or {}).get("Nats-Msg-Id")
        if stored_id == id:
            return following
        if stored_id not in after.unsure:
            raise Superseded(after.stream)
        after.sequence = following
        raise TimeoutError

    async def _get_some(self, stream: str, question: Mapping[str, Any]) -> dict[int, api.RawStreamMsg]:
        messages: dict[int, api.RawStreamMsg] = {}
        complete = asyncio.Event()

        async def take(msg: Msg) -> None:
            headers = msg.headers or {}
            if "Nats-Sequence" in headers:
                sequence = int(headers["Nats-Sequence"])
                messages[sequence] = api.RawStreamMsg(seq=sequence, data=msg.data)
            # A server before version 2.11 sends one message and no end marker.
            if "Status" in headers or "Nats-Num-Pending" not in headers:
                complete.set()

        self._questions += 1
        inbox = f"{self._inbox}.get.{self._questions}"
        subscription = await self._client.subscribe(inbox, cb=take)
        try:
            content = msgspec.json.encode(question)
            await self._client.publish(f"$JS.API.DIRECT.GET.{stream}", content, inbox)
            with anyio.fail_after(self._answer_s):
                await complete.wait()
        finally:
            await subscription.unsubscribe()
        return messages

    async def _read_message(self, stream: str, sequence: int, subject: str | None = None) -> api.RawStreamMsg:
        """Return a message by number, or a subject's newest message; from the leader if others lack it."""

        async def get() -> api.RawStreamMsg:
            try:
                return await self._jetstream.get_msg(stream, sequence, subject, direct=True)
            except NotFoundError:
                if self._replicas == 1:
                    raise
                return await self._jetstream.get_msg(stream, sequence, subject)

        # With any number, even 0, the client puts the subject into the request's body: workers may send such
        # requests to one address only.
        name = subject or f"message {sequence}"
        try:
            return await self._storing(get, f"{stream} {name}")
        except NotFoundError as error:
            raise MessageGone(f"{name} of {stream} is gone") from error

    async def _join_stored_parts(self, stream: str, data: bytes) -> bytes:
        async def read(sequence: int) -> bytes:
            return (await self._read_message(stream, sequence)).data or b""

        return await join_stored(data, read)

    @asynccontextmanager
    async def _pulling(self, stream: str, consumer: str, *, expires_s: float) -> AsyncGenerator[_Pull]:
        subject, inbox = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", f"{self._inbox}.pull.{consumer}"
        pull = _Pull(self._client, subject, inbox, expires_s)
        subscription = await self._client.subscribe(inbox, cb=pull.messages.put)
        self._pulls.append(pull)
        try:
            yield pull
        finally:
            self._pulls.remove(pull)
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _pull(self, stream: str, consumer: str) -> AsyncIterator[tuple[int, str, bytes]]:
        """Yield (sequence, subject, payload) of each new message of a consumer. Raise as `_Pull.next`."""
        async with self._pulling(stream, consumer, expires_s=_FOLLOW_S) as pull:
            while True:
                if not pull.asked:
                    await pull.ask(_FOLLOW_AT_ONCE)
                msg = await pull.next()
                if msg is not None:
                    yield msg.metadata.sequence.stream, msg.subject, msg.data


class _Pull:
    """The messages of one consumer, requested in batches. The server ends each batch after `expires_s`."""

    def __init__(self, client: Client, subject: str, inbox: str, expires_s: float) -> None:
        self._client, self._subject, self._inbox = client, subject, inbox
        self._expires_s = expires_s
        self.messages: asyncio.Queue[Msg | None] = asyncio.Queue()
        """Messages that have arrived, and None for each reconnection."""
        self.asked = 0
        """Number of messages that the server may still send."""

    async def ask(self, number: int) -> None:
        self.asked = number
        question = {
            "batch": number,
            "expires": int(self._expires_s * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
        await self._client.publish(self._subject, msgspec.json.encode(question), self._inbox)

    async def next(self) -> Msg | None:
        """Return the next message; None for a sign of life, or at the end of a batch. Raise NoAnswer if the
        server is silent or has lost the consumer, or if the client has reconnected."""
        if self.messages.empty():
            try:
                with anyio.fail_after(_SILENT_S):
                    msg = await self.messages.get()
            except TimeoutError:
                raise self._lost(_SILENT_S) from None
        else:
            msg = self.messages.get_nowait()
        if msg is None:
            raise self._lost(0.0)
        status = msg.headers.get("Status") if msg.headers else None
        if status is None:
            self.asked -= 1
            return msg
        if status == "100":
            return None
        if status not in ("404", "408", "409") or "Deleted" in str(msg.headers):
            raise self._lost(0.0)
        self.asked = 0
        return None

    def _lost(self, seconds: float) -> NoAnswer:
        self.asked = 0
        return NoAnswer(SERVER, self._subject, seconds)


def _consumer(subject: str) -> str:
    return subject.replace(".", "_")


def _temporary(error: APIError) -> bool:
    # Code 503: JetStream is starting or has no leader yet.
    return error.code == 503 and "insufficient" not in (error.description or "").lower()
