"""The journal's writer. The server has stored an entry before the kernel acts on it."""

from __future__ import annotations

from stretto.bus.client import Bus
from stretto.bus.messages.journal import JournalEntry
from stretto.bus.messages.subjects import Subjects


class JournalWriter:
    """Appends one kernel's entries to the journal."""

    def __init__(self, bus: Bus, names: Subjects, lease_epoch: int, incarnation: int) -> None:
        self._bus = bus
        self._names = names
        self._lease_epoch = lease_epoch
        self.incarnation = incarnation
        """Incarnation of the weights. It rises when a repeated step does not reach its recorded digest."""

    async def append(self, entry: JournalEntry, what: str, version: int) -> None:
        """Store an entry. A repeated call for the same entry stores nothing more.

        Args:
            what: the entry among those of its version, for the id by which the server recognises a repeated
                entry.

        Raises:
            BusError: if the server cannot store it.
        """
        id = f"{self.incarnation}/{version}/{what}/{self._lease_epoch}"
        await self._bus.store.append(self._names.journal, entry, id=id)
