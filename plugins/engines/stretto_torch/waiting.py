"""The order in which samples get a slot."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from stretto_torch.requests import SampleJob, SlotSample


class WaitingLine:
    """Samples without a slot, in order of arrival. A sample that needs newer weights than the engine has
    waits separately and does not block the others.
    """

    def __init__(self) -> None:
        self._version = -1
        self._tickets = count()
        self._ready: list[tuple[float, int, SlotSample]] = []
        self._aside: list[tuple[float, int, SlotSample]] = []
        self._waiting = 0

    def __len__(self) -> int:
        """Number of samples that wait, including those that need newer weights."""
        return self._waiting

    @property
    def ready(self) -> int:
        """Number of samples that could be served now. It may include samples that have ended, but is 0 if all
        have ended."""
        while self._ready and self._ready[0][2].ended:
            heappop(self._ready)
        return len(self._ready)

    def add(self, job: SampleJob, arrived: float) -> None:
        """Add all samples of a job to the line, in their order."""
        for sample in job.samples:
            sample.place = (arrived, next(self._tickets))
            self.put_back(sample)

    def put_back(self, sample: SlotSample) -> None:
        """Put a sample into the line at its place. A sample that has left its slot keeps its old place."""
        self._place((*sample.place, sample))
        self._waiting += 1

    @property
    def first(self) -> SlotSample:
        """The next sample to serve. Call only if `ready` is not 0."""
        return self._ready[0][2]

    def pop(self) -> SlotSample:
        """Remove and return `first`."""
        self._waiting -= 1
        return heappop(self._ready)[2]

    def leave(self) -> None:
        """Record that one sample has ended while it waited. It is removed from the line later."""
        self._waiting -= 1

    def set_version(self, version: int) -> None:
        """Set the version that the engine now serves, and sort the samples accordingly."""
        self._version = version
        entries = self._ready + self._aside
        self._ready, self._aside = [], []
        for entry in entries:
            if not entry[2].ended:
                self._place(entry)

    def _place(self, entry: tuple[float, int, SlotSample]) -> None:
        if max(entry[2].job.request.min_version, 0) <= self._version:
            heappush(self._ready, entry)
        else:
            self._aside.append(entry)
