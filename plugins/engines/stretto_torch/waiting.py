"""The order in which samples get a slot."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from stretto_torch.requests import SampleJob, SlotSample


class WaitingLine:
    """Samples without a slot: first come, first served. Whoever needs newer weights than there are stands
    aside and holds up nobody.
    """

    def __init__(self) -> None:
        self._version = -1
        self._tickets = count()
        self._ready: list[tuple[float, int, SlotSample]] = []
        self._aside: list[tuple[float, int, SlotSample]] = []
        self._waiting = 0

    def __len__(self) -> int:
        """Samples that wait, whether or not they could be served."""
        return self._waiting

    @property
    def ready(self) -> int:
        """How many could be served now; may count some that have ended, but never those alone."""
        while self._ready and self._ready[0][2].ended:
            heappop(self._ready)
        return len(self._ready)

    def add(self, job: SampleJob, arrived: float) -> None:
        """Let all samples of a job wait, in their order."""
        for sample in job.samples:
            sample.place = (arrived, next(self._tickets))
            self.put_back(sample)

    def put_back(self, sample: SlotSample) -> None:
        """Let a sample that has left its slot wait again, at the place it had."""
        self._place((*sample.place, sample))
        self._waiting += 1

    @property
    def first(self) -> SlotSample:
        """The next sample to serve; only if `ready`."""
        return self._ready[0][2]

    def pop(self) -> SlotSample:
        """Take out `first`."""
        self._waiting -= 1
        return heappop(self._ready)[2]

    def leave(self) -> None:
        """One sample has ended while it waited; it is dropped when its turn comes."""
        self._waiting -= 1

    def set_version(self, version: int) -> None:
        """Weights of another version are served from now on."""
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
