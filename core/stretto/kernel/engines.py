"""The inference workers, as the kernel speaks to them: each is kept at the newest weights.

An engine is named to rollout workers only once it serves the weights it must. One that serves others than
were announced, or drifts too far from the trainer, ends the run; its worker has held back what it sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages import AskLoad, LoadReport, Subjects, Swap, SwapDone
from stretto.errors import BusError, NoAnswer, RunError
from stretto.kernel.fleet import Fleet, Member
from stretto.weights import WeightsNote

__all__ = ["Engines"]

log = structlog.get_logger()

_SWAP_S = 300.0
_TRIES = 5


class Engines:
    """All inference workers of the run.

    Args:
        on_swapped: called with each swap: of which worker, and what came of it.
        on_callable: called when an engine can be named to rollout workers, and when it serves a new version.
    """

    def __init__(
        self,
        bus: Bus,
        names: Subjects,
        fleet: Fleet,
        fence: int,
        *,
        on_swapped: Callable[[str, SwapDone], None],
        on_callable: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._fence = fence
        self._on_swapped = on_swapped
        self._on_callable = on_callable
        self._news = anyio.Event()
        self.note: WeightsNote | None = None
        """The newest weights."""

    def announce(self, note: WeightsNote) -> None:
        """There are new weights. Nobody waits until they are served."""
        self.note = note
        self._news.set()
        self._news = anyio.Event()

    async def keep_current(self, member: Member) -> None:
        """Have one worker serve the newest weights, until it is gone. Versions in between are passed over.

        Raises:
            RunError: if it cannot, or serves others than announced; naming worker, version and tensors.
        """
        failures = 0
        served: WeightsNote | None = None
        while self._there(member):
            note, news = self.note, self._news
            if note is None or note == served:
                await news.wait()
                continue
            try:
                await self._swap(member, note)
            except BusError as error:
                if not self._there(member):
                    return
                # Old weights may be gone by now, and have a successor; anything else is tried again.
                failures = failures + 1 if self.note is note else 0
                log.warning("swap failed", worker=member.worker, version=note.version, error=str(error))
                if failures == _TRIES:
                    raise RunError(f"{member.worker} cannot serve version {note.version}: {error}") from error
                await anyio.sleep(0.2 * failures)
                continue
            failures, served = 0, note
            member.callable = True
            self._fleet.serves(member, note.version)
            self._on_callable()

    async def busy_s(self) -> float:
        """Seconds that the engines have worked so far, mean of the present ones."""
        members = self._fleet.of("inference")
        for member in members:
            subject = self._names.worker("inference", member.worker, "load")
            try:
                report = await self._bus.request(
                    subject, AskLoad(), LoadReport, who=member.worker, deadline_s=2
                )
                member.load, member.busy_s = report.load, report.load.busy_s
            except NoAnswer as error:
                log.warning("no load figures", worker=member.worker, error=str(error))
        return sum(member.busy_s for member in members) / max(1, len(members))

    async def _swap(self, member: Member, note: WeightsNote) -> None:
        done = await self._bus.request(
            self._names.worker("inference", member.worker, "swap"),
            Swap(self._fence, note),
            SwapDone,
            who=member.worker,
            deadline_s=_SWAP_S,
        )
        if done.fault:
            raise RunError(f"{member.worker}: {done.fault}")
        self._on_swapped(member.worker, done)

    def _there(self, member: Member) -> bool:
        return self._fleet.members.get(member.worker) is member
