"""The writer of the folder `events`: the journal's messages as files (see `stretto.records.events.files`).

New messages are written at once. Messages that former kernels or a full disk left out are read from
the journal's stream. A thread flushes the files every few seconds; the stream may drop only flushed messages.
"""

from io import FileIO
from pathlib import Path

import anyio.to_thread
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.events import EventBatch
from stretto.bus.messages.subjects import Subjects
from stretto.bus.payloads import encode
from stretto.errors import BusError
from stretto.kernel.durable.journal import newest_epoch
from stretto.kernel.ending import Ending
from stretto.kernel.facts import RunFacts
from stretto.records.events import files

log = structlog.get_logger()

_SYNC_S = 5.0  # a power cut loses the last seconds of the files; the stream still has them
_RETRY_S = 5.0  # while the disk is full or the server is away
_COMPLETE_S = 30.0
"""Seconds to write the last messages at the end of the run."""
_FILE_BYTES = 2**26
"""Size of a file beyond which the next file begins."""


class EventLog:
    """Writes one kernel's files. `facts` receives the last number on disk, and problems."""

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self._folder = folder
        self._facts = facts
        self._epoch = 0
        self._path = folder
        self._file: FileIO | None = None
        self._size = 0
        self._written: set[Path] = set()
        """Files not flushed to the disk since they were written."""
        self._last: int | None = None
        """Sequence number of the last message in the files; None while unknown."""
        self._newest = 0
        """Sequence number of the newest stored message."""
        self._is_behind = True
        """True while messages have to be read from the stream."""
        self._reading = anyio.Lock()
        self._complaint = ""

    def append(self, sequence: int, message: EventBatch) -> None:
        """Add a message of the kernel, which the server has stored."""
        self._epoch, self._newest = message.lease_epoch, sequence
        if not self._is_behind and sequence > (self._last or 0):  # else the stream had it
            self._append(sequence, message)

    async def keep(self, bus: Bus, names: Subjects) -> None:
        """Read missing messages from the stream, and flush the files, until cancelled."""
        while True:
            await self._catch_up(bus, names)
            await self._sync()
            await anyio.sleep(_RETRY_S if self._is_behind else _SYNC_S)

    async def complete(self, bus: Bus, names: Subjects, ending: Ending) -> None:
        """Write the last messages. If time runs out, note a problem: `stretto audit` reads the rest."""
        with anyio.move_on_after(_COMPLETE_S):
            while self._is_behind and bus.connected and not ending.forced:
                await self._catch_up(bus, names)
                await anyio.sleep(0.2 if self._is_behind else 0)
        await self._sync()
        if self._is_behind:
            self._facts.problems.append(
                f"the files in {files.FOLDER} end before the run does "
                f"({self._complaint or 'the server did not answer'}); the rest is in bus/store"
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _catch_up(self, bus: Bus, names: Subjects) -> None:
        async with self._reading:
            if self._is_behind:
                await self._read_stream(bus, names)

    async def _read_stream(self, bus: Bus, names: Subjects) -> None:
        try:
            if self._last is None:
                if await newest_epoch(bus, names) > self._epoch:
                    return  # another kernel owns the run and its files
                store = await bus.store.identity(names.journal_stream)
                self._last = await anyio.to_thread.run_sync(self._find_end, store)
                self._facts.events_on_disk = self._last
            last = await bus.store.last_sequence(names.journal_stream, names.events)
            if max(last, self._newest) <= self._last:
                self._is_behind = False
                return
            start = self._last + 1
            follow = bus.store.follow(names.journal_stream, names.events, EventBatch, start=start)
            async for sequence, message in follow:
                if not self._append(sequence, message):
                    return
                if sequence >= max(last, self._newest):
                    self._is_behind = False
                    return
        except (OSError, BusError) as error:
            self._complain(error)

    def _find_end(self, store: str) -> int:
        """Flush the files of former kernels to the disk, and return their last sequence number."""
        if aside := files.move_lost(self._folder, self._epoch, store):
            log.warning("the store is not the one of these event files", moved_to=str(aside))
        files.sync_files(self._folder, files.event_files(self._folder))
        return files.newest_stored(self._folder, below=self._epoch)

    def _append(self, sequence: int, message: EventBatch) -> bool:
        record = files.record_of(sequence, encode(message))
        try:
            if self._file is None or self._size > _FILE_BYTES:
                self._open(sequence)
            assert self._file is not None
            if self._file.write(record) != len(record):
                raise OSError(f"a part of {len(record)} bytes did not fit")
        except OSError as error:
            self._complain(error)
            self._is_behind = True
            self.close()  # a part of the record may be in the file: begin another file
            return False
        self._size += len(record)
        self._written.add(self._path)
        self._last = sequence
        return True

    def _open(self, sequence: int) -> None:
        self.close()
        self._path = self._folder / files.FOLDER / files.file_name(self._epoch, sequence)
        self._file = self._path.open("wb", buffering=0)
        self._size = 0

    async def _sync(self) -> None:
        written, last = self._written, self._last
        if not written or last is None:
            return
        self._written = set()
        try:
            await anyio.to_thread.run_sync(files.sync_files, self._folder, written)
            self._facts.events_on_disk = last
        except OSError as error:  # messages that are not on disk are lost: read them again
            self._complain(error)
            self.close()
            self._last, self._is_behind = self._facts.events_on_disk, True

    def _complain(self, error: Exception) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("events are not in files yet; trying again", error=self._complaint)
