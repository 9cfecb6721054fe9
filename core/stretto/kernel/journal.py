"""The journal's writer: each entry is stored before anybody relies on it."""

from __future__ import annotations

from stretto.bus.client import Bus
from stretto.bus.messages import JournalBatch, JournalChange, JournalEvaluation, JournalStep, Subjects

__all__ = ["JournalWriter"]


class JournalWriter:
    """Appends the entries of one kernel."""

    def __init__(self, bus: Bus, names: Subjects, lease_epoch: int, incarnation: int) -> None:
        self._bus = bus
        self._names = names
        self._lease_epoch = lease_epoch
        self.incarnation = incarnation
        """Of the weights: a repetition that does not reach its recorded digest begins the next one."""

    async def append(
        self, entry: JournalBatch | JournalStep | JournalEvaluation | JournalChange, what: str, version: int
    ) -> None:
        """Store an entry, once however often it is called.

        Raises:
            BusError: if the server cannot store it.
        """
        id = f"{self.incarnation}/{version}/{what}/{self._lease_epoch}"
        await self._bus.append(self._names.journal, entry, id=id)
