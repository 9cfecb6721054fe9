"""Writes the journal, for the kernel that owns the run. The server stores an event before the kernel acts on
the event, and only if the stream's end is the one that the writer knows. A lease is a message in the same
stream: after another kernel has taken the lease, the server refuses events of the former kernel."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
import msgspec

from stretto.bus.client import Bus
from stretto.bus.messages.events import Event, EventBatch, JournalHead, KernelLease, Observation
from stretto.bus.messages.subjects import Subjects
from stretto.bus.payloads import encode
from stretto.bus.store import StreamEnd
from stretto.errors import Malformed, MessageGone, Superseded
from stretto.machine import clock

_BATCH_S = 0.05
"""Seconds for which an event that no `flush` waits for may be held, to share a message with later events."""

OnStored = Callable[[int, EventBatch, Sequence[Event]], None]
"""Called with each message that the server has stored: its sequence number, the message, and its events."""


class JournalWriter:
    """Appends a kernel's events after `end`, its lease `epoch`. `head` is the newest former message."""

    def __init__(self, bus: Bus, names: Subjects, epoch: int, end: StreamEnd, head: JournalHead) -> None:
        self._bus = bus
        self.names = names
        self.epoch = epoch
        self._end = end
        self.head = head
        """The newest message that the server has stored."""
        self.head_from = 0
        """Sequence number of the first part of `head`; 0 if a former kernel wrote `head`."""
        self._appending = anyio.Lock()
        self.events_after = end.sequence
        """Sequence number in the stream: the scheduler has taken in all inputs up to it."""
        self._stored = 0
        self._pending: list[tuple[float, msgspec.Raw, Event]] = []
        self._sent: tuple[EventBatch, tuple[Event, ...]] | None = None
        """The message that is on its way, or whose append has failed, and its events."""
        self._any_pending = anyio.Event()
        self.incarnation = 0
        """Incarnation of the weights. It rises when a repeated step does not reach its recorded digest."""
        self._began = clock.wall() - clock.now()
        self.on_stored: OnStored = lambda sequence, message, events: None

    def now(self) -> float:
        """Return the Unix time with 4 decimals. It never goes back, nor jumps with the machine's clock."""
        return round(self._began + clock.now(), 4)

    def hear(self, event: Event) -> None:
        """Queue an event. The next `flush`, or `keep`, stores it."""
        self._pending.append((self.now(), msgspec.Raw(encode(event)), event))
        self._any_pending.set()

    async def flush(self) -> None:
        """Wait until the server has stored all queued events. Raise Superseded if another kernel has
        the lease, and BusError if the server cannot store them: the next call tries again."""
        target = self._stored + self._waiting
        async with self._appending:
            while self._stored < target:
                await self._store_events()

    async def settle(self) -> None:
        """Wait until all events are stored. Until the next await, the state is that of `events_after`."""
        while self._waiting:
            await self.flush()

    async def keep(self) -> None:
        """Store the events that no `flush` waits for, until cancelled."""
        while True:
            await self._any_pending.wait()
            await anyio.sleep(_BATCH_S)
            await self.flush()

    @property
    def stored_to(self) -> int:
        """Sequence number of the last message in the stream."""
        return self._end.sequence

    @property
    def _waiting(self) -> int:
        return len(self._pending) + (len(self._sent[1]) if self._sent else 0)

    async def _store_events(self) -> None:
        """Append the queued events as one message. A message whose append failed is sent again unchanged."""
        if self._sent is None:
            times, raw, events = zip(*self._pending, strict=True)
            self._sent = EventBatch(self.epoch, self._stored, raw, times, self.head.digest), events
            self._pending, self._any_pending = [], anyio.Event()
        message, events = self._sent
        id, head_from = f"events/{self.epoch}/{message.first}", self._end.sequence + 1
        await self._bus.store.append(self.names.events, message, id=id, after=self._end)
        self._sent = None
        self._stored += len(events)
        if not all(isinstance(event, Observation) for event in events):
            self.events_after = self._end.sequence  # observations during a repetition are no state
        self.head, self.head_from = JournalHead(self._end.sequence, message.digest), head_from
        self.on_stored(self._end.sequence, message, events)


async def own_journal(bus: Bus, names: Subjects, place: str) -> JournalWriter:
    """Take the lease of the run in `place`: the server then refuses what a former writer appends."""
    await bus.store.make_log(names.journal_stream, names.of_journal)
    while True:
        end = await bus.store.end(names.journal_stream)
        try:
            epoch = await bus.store.append(
                names.leases, KernelLease(place), id=secrets.token_hex(16), after=end
            )
        except Superseded:
            continue  # the former kernel has just written events, or another one has taken the lease
        sequence, newest = await _newest(bus, names)
        return JournalWriter(bus, names, epoch, end, JournalHead(sequence, newest.digest if newest else ""))


async def newest_epoch(bus: Bus, names: Subjects) -> int:
    """Return the newest lease epoch. A checkpoint may have purged the lease, but events name its epoch."""
    lease = await bus.store.last_sequence(names.journal_stream, names.leases)
    _, newest = await _newest(bus, names)
    return max(lease, newest.lease_epoch if newest else 0)


async def _newest(bus: Bus, names: Subjects) -> tuple[int, EventBatch | None]:
    """Return number and content of the newest message of events; None if unreadable (see `stretto audit`)."""
    sequence = await bus.store.last_sequence(names.journal_stream, names.events)
    with suppress(MessageGone, Malformed):
        if sequence:
            return sequence, await bus.store.read(names.journal_stream, sequence, EventBatch)
    return sequence, None
