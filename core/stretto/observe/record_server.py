"""The records of a run for its operator on another machine (`stretto mirror`)."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from stretto.base import clock
from stretto.bus.client import Bus
from stretto.bus.joining import check_operator
from stretto.bus.messages.operation import AskRecord, AskRecords, RecordPart, Records
from stretto.bus.messages.subjects import Subjects
from stretto.errors import ConfigError
from stretto.kernel.ending import Ending
from stretto.records.shared import record_file, record_sizes

_MOST_BYTES = 2**20
"""Most bytes of one answer."""
_LATELY_S = 10.0
_LOOK_S = 0.1
_LAST_LOOK_S = 20.0


class RecordServer:
    """Lists and reads the records in a run's folder. When the run ends, it waits for those who copy them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = (folder / "bus" / "kernel.lock").read_text()
        self._over = False
        self._seen: dict[str, float] = {}
        """Moment of the last question of each copy that is not complete."""

    async def serve(self, bus: Bus, names: Subjects) -> None:
        """Answer questions until the bus closes."""
        await bus.serve(names.kernel("operator", "records"), AskRecords, self._list, forget=True)
        await bus.serve(names.kernel("operator", "record"), AskRecord, self._read, forget=True)

    @property
    def copied_lately(self) -> bool:
        """Whether somebody copies the records."""
        return any(clock.now() - moment < _LATELY_S for moment in self._seen.values())

    async def hand_over(self, ending: Ending) -> None:
        """Let those who copy the records copy the last ones, until the user is in a hurry."""
        self._over = True
        with anyio.move_on_after(_LAST_LOOK_S):
            while self.copied_lately and not ending.forced:
                await anyio.sleep(_LOOK_S)

    async def _list(self, message: AskRecords) -> Records:
        check_operator(self._folder / "bus", message.token)
        if message.complete:
            self._seen.pop(message.copy, None)
        else:
            self._seen[message.copy] = clock.now()
        over = self._over  # before the look at the files
        return Records(await anyio.to_thread.run_sync(record_sizes, self._folder), self._owner, over)

    async def _read(self, message: AskRecord) -> RecordPart:
        check_operator(self._folder / "bus", message.token)
        return RecordPart(await anyio.to_thread.run_sync(self._part, message.name, message.offset))

    def _part(self, name: str, offset: int) -> bytes:
        if (file := record_file(self._folder, name)) is None:
            raise ConfigError(f"{name!r} is no record of this run")
        with file.open("rb") as content:
            content.seek(offset)
            return content.read(_MOST_BYTES)
