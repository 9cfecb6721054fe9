"""The journal's writer: the kernel that owns the run.

The server has stored an entry before the kernel acts on it. A kernel becomes the writer with a lease, which
the journal's stream has too. The server stores an entry only at the end that its writer knows: so it refuses
those of a kernel after another one has taken the lease.
"""

from __future__ import annotations

import secrets

import anyio

from stretto.bus.client import Bus
from stretto.bus.messages.journal import JournalEntry, KernelLease
from stretto.bus.messages.subjects import Subjects
from stretto.bus.store import StreamEnd
from stretto.errors import Superseded


class JournalWriter:
    """Appends the entries of the kernel that owns the run to the journal.

    Args:
        epoch: number of the kernel's lease.
        end: the end of the journal's stream: its lease.
    """

    def __init__(self, bus: Bus, names: Subjects, epoch: int, end: StreamEnd) -> None:
        self._bus = bus
        self._names = names
        self.epoch = epoch
        self._end = end
        self._appending = anyio.Lock()
        self.incarnation = 0
        """Incarnation of the weights. It rises when a repeated step does not reach its recorded digest."""

    async def append(self, entry: JournalEntry, what: str, version: int) -> None:
        """Store an entry.

        Args:
            what: the entry among those of its version, for the id by which a repeated attempt of this call
                recognises what an earlier one has stored.

        Raises:
            Superseded: if another kernel has taken the lease.
            BusError: if the server cannot store it.
        """
        id = f"{entry.incarnation}/{version}/{what}/{self.epoch}"
        async with self._appending:
            await self._bus.store.append(self._names.journal, entry, id=id, after=self._end)


async def own_journal(bus: Bus, names: Subjects, place: str) -> JournalWriter:
    """Take the lease of a run, and return the writer of its journal. The server refuses what a former writer
    appends from here on.

    Args:
        place: the run's folder.

    Raises:
        BusError: if the server cannot store the lease.
    """
    await bus.store.make_log(names.journal_stream, [names.journal, names.leases])
    while True:
        end = StreamEnd(names.journal_stream, (await bus.store.extent(names.journal_stream)).last)
        try:
            epoch = await bus.store.append(
                names.leases, KernelLease(place), id=secrets.token_hex(16), after=end
            )
        except Superseded:
            continue  # the former kernel has just written an entry, or another one has taken the lease
        return JournalWriter(bus, names, epoch, end)


async def newest_epoch(bus: Bus, names: Subjects) -> int:
    """Return the number of the newest lease.

    Raises:
        BusError: if the server does not answer in time.
    """
    return await bus.store.last_sequence(names.journal_stream, names.leases)
