"""The events of a run by their times, from the folder `events`, also while the run continues."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, groupby
from pathlib import Path

import msgspec

from stretto.bus.messages.events import Event, EventBatch
from stretto.bus.payloads import decoder
from stretto.errors import ConfigError
from stretto.records.events.files import files_of_kernels, next_record, records_in
from stretto.records.files import open_record

TimedEvent = tuple[float, Event]
"""Unix time of an event, and the event."""


class EventReader:
    """Reads events by time, each message once, without messages that are damaged in all files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, tuple[int, int]] = {}
        """File -> end and sequence number of the last record that was read."""
        self._places: dict[int, tuple[Path, int, float]] = {}
        """Sequence number of a message -> file, start of its record, and time of its last event."""
        self._order: list[int] = []
        self._newest: list[float] = []
        """Running maximum of the times of messages in `_order`: a new kernel's clock may be behind."""

    def time_range(self) -> tuple[float, float] | None:
        """Return the times of the first and the newest event in Unix seconds; None without an event."""
        first = next(self.between(None, None), None)
        return None if first is None else (first[0], self._newest[-1])

    def between(self, since: float | None, until: float | None) -> Iterator[TimedEvent]:
        """Yield the events with `since` <= time <= `until` in the journal's order. Raise ConfigError if
        a file cannot be read, or has events that this stretto does not know."""
        try:
            self._look()
            first = 0 if since is None else bisect_left(self._newest, since)
            newest = self._newest[first - 1] if first else 0.0  # the yielded times never fall
            for file, numbers in groupby(self._order[first:], key=lambda number: self._places[number][0]):
                with open_record(file) as opened:
                    for number in numbers:
                        opened.seek(self._places[number][1])
                        for time, event in _events_of(next_record(opened), number):
                            newest = max(newest, time)
                            if until is not None and newest > until:
                                return
                            if since is None or newest >= since:
                                yield newest, event
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self._ends = {}
            raise ConfigError(f"the events of the run in {self._folder} cannot be read: {error}") from error

    def _look(self) -> None:
        files = files_of_kernels(self._folder)
        if self._ends.keys() - dict(files).keys() or len(files) > len(self._ends):
            self._ends, self._places = {}, {}  # a new kernel may have moved files away
        num_known = len(self._places)
        for file, below in files:
            start, newest = self._ends.get(file, (0, 0))
            for number, message, end in records_in(file, below, start=start, newest=newest):
                with suppress(msgspec.DecodeError):
                    if message is not None and (times := _batch_of(message).times):
                        self._places.setdefault(number, (file, start, times[-1]))
                start, newest = end, number
            self._ends[file] = start, newest
        if len(self._places) != num_known or not self._order:
            self._order = sorted(self._places)
            self._newest = list(accumulate((self._places[number][2] for number in self._order), max))


_batch_of = decoder(EventBatch)


def _events_of(record: tuple[int, bytes | None] | None, number: int) -> Iterator[TimedEvent]:
    """Return the timed events of the message with this number; ValueError if the record is another."""
    if record is None or record[0] != number or record[1] is None:
        raise ValueError("a file was written again meanwhile; try again")
    batch: EventBatch = _batch_of(record[1])
    return zip(batch.times, batch.decoded(), strict=True)
