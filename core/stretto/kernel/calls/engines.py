"""Keeps each engine at the newest weights, or at those of the evaluation that it is lent to.

Rollout workers hear of an engine only when it serves the right weights. The run fails if it serves others
than announced, and with `inference.canary.on_drift: stop` if it drifts too far from the trainer: its worker
has then sent no token of that version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import anyio
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.events import Cause, WeightsServed
from stretto.bus.messages.inference import AskLoad, LoadReport, Swap, SwapDone
from stretto.bus.messages.membership import WorkerProcess
from stretto.errors import BusError, NoAnswer, RunError
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.fleet.fleet import FleetMember
from stretto.kernel.schedule.lending import Demand, Lending
from stretto.kernel.setup import RunSetup
from stretto.machine import clock
from stretto.weights import WeightsNote

log = structlog.get_logger()

_SWAP_S = 300.0
_ASKED = 32
_TURN_S = 30.0
"""Maximum length of an evaluation's first turn at a single engine."""
_TURNS_PER_WORKFLOW = 10
"""The first turn takes at most `workflow.timeout_s` divided by this number."""
_TRIES = 5
"""Number of failed swaps in a row to the same weights after which the run fails."""


class Engines:
    """All inference workers of the run."""

    def __init__(self, setup: RunSetup, bus: Bus, journal: JournalWriter) -> None:
        self._bus, self._names, self._fleet = bus, setup.names, setup.fleet
        self._journal = journal
        self.on_swapped: Callable[[str, SwapDone], None] = lambda worker, done: None
        self.on_callable: Callable[[FleetMember], None] = lambda member: None
        """Gets an engine that rollout workers may call, also when it serves a new version or is lent."""
        self._waits = setup.waits
        self._news: dict[str, anyio.Event] = {}
        """Worker -> set when its target may have changed, or when it is lost."""
        self._swaps: dict[str, anyio.CancelScope] = {}
        self._lending_news = anyio.Event()
        self._numbers = count()
        self._lending = Lending(min(_TURN_S, setup.config.workflow.timeout_s / _TURNS_PER_WORKFLOW))
        self._has_evaluator = setup.assembly.has_evaluator
        self._demand = Demand()
        self._busy: dict[str, float] = {}
        """Seconds of work of each engine, by the nonce of its process, at the last call of `busy_s`."""
        self._mean_busy_s = 0.0
        self.trainer: WorkerProcess | None = None
        """Rank 0 of the lead group; None while trainers are lost."""
        self.note: WeightsNote | None = None
        self._announced = anyio.Event()
        self.notes: dict[int, WeightsNote] = {}
        """By version: the newest weights, and the weights that evaluations need."""

    def announce(self, note: WeightsNote) -> None:
        """Announce new weights, without waiting until the engines serve them."""
        self.note = note
        self.remember([note])
        self._notify_engines()
        self._announced.set()
        self._announced = anyio.Event()

    async def announced(self, version: int) -> WeightsNote:
        """Return the note of a version, which is announced last or next."""
        while self.note is None or self.note.version < version:
            await self._announced.wait()
        assert self.note.version == version
        return self.note

    def publish_again(self, note: WeightsNote) -> None:
        """The newest weights have another address: swaps under way begin again."""
        for swap in self._swaps.values():
            swap.cancel()
        self.announce(note)

    def remember(self, notes: Iterable[WeightsNote]) -> None:
        """Store the notes of versions that evaluations may need."""
        self.notes |= {note.version: note for note in notes}

    def lend(self, demand: Demand) -> None:
        """Set what evaluations need from the engines, from now on."""
        if demand != self._demand:
            self._demand = demand
            self.notes = {
                version: note
                for version, note in self.notes.items()
                if version in demand.needed or note is self.note
            }
            self._notify_engines()
            self._look_at_lending()

    def changed(self, member: FleetMember) -> None:
        """Take in that a worker is lost, has left, or begins to drain."""
        if member.worker in self._news and not self._is_present(member):
            self._news.pop(member.worker).set()
            self._swaps.pop(member.worker, None)
            self._waits.gone(member.worker)
        self._look_at_lending_in_use()

    def _notify_engines(self) -> None:
        """This costs as much as there are engines."""
        for news in self._news.values():
            news.set()

    def _look_at_lending_in_use(self) -> None:
        """Without an evaluation none is lent, and a change of the engines costs nothing."""
        if self._demand.version is not None:
            self._look_at_lending()

    def _look_at_lending(self) -> None:
        self._lending_news.set()
        self._lending_news = anyio.Event()

    async def look_after_lending(self) -> None:
        """Lend engines to the evaluation under way and take them back, until cancelled."""
        while True:
            news, now = self._lending_news, clock.now()
            former = self._lending.lent
            workers = {
                member.worker: member.exact_version
                for member in self._fleet.of("inference")
                if not member.leaving
            }
            own = self._fleet.evaluators() if self._has_evaluator else None
            again = self._lending.choose(self._demand, workers, now, own)
            if self._lending.lent != former:
                log.info("engines lent", version=self._demand.version, workers=sorted(self._lending.lent))
                self._notify_engines()
                continue
            with anyio.move_on_at(again):
                await news.wait()

    async def keep_current(self, member: FleetMember) -> None:
        """Keep one worker at its weights until the worker is gone. It skips versions in between."""
        failures = 0
        served: tuple[int, str, bool] | None = None
        if member.again:  # what it did for a former kernel does not count
            self._busy[member.nonce] = member.busy_s
        self._look_at_lending_in_use()
        while self._is_present(member):
            news = self._news[member.worker] = anyio.Event()
            target = self._target(member)
            if target is None or _served_by(target) == served:
                await news.wait()
                continue
            note, exact = target
            began = self._journal.now()
            try:
                done = await self._swap(member, note, exact=exact)
                if done is None:
                    continue
            except BusError as error:
                if not self._is_present(member):
                    return
                # Only failures with the same weights count: others may be gone, or published again.
                failures = failures + 1 if self._target(member) == target and self.trainer else 0
                # After a failed swap to or from an evaluation, the worker answers no request.
                served = None
                log.warning("swap failed", worker=member.worker, version=note.version, error=str(error))
                if failures == _TRIES:
                    raise RunError(f"{member.worker} cannot serve version {note.version}: {error}") from error
                await anyio.sleep(0.2 * max(1, failures))
                continue
            if not self._is_present(member):
                return  # lost before it answered
            are_new = served is None or served[:2] != (note.version, note.digest)
            if are_new:
                self.on_swapped(member.worker, done)
            served_event = WeightsServed(
                *(began, member.worker, done.report.version, exact, are_new, done.report.pause_s),
                drift=done.drift,
                engine_kl=done.engine_kl,
                unscored=done.unscored,
            )
            self._journal.hear(served_event)
            failures, served = 0, _served_by(target)
            member.callable, member.exact_version = True, note.version if exact else None
            if not exact:
                self._waits.serves(member.worker, note.version, done.report.pause_s)
            self._fleet.serves(member, note.version)
            self.on_callable(member)
            self._look_at_lending_in_use()  # the turn of a single engine begins when it has its weights

    async def busy_s(self) -> float:
        """Return the engines' mean seconds of work since the kernel's start. It grows by the mean of what the
        current engines did since the last call: engines come and go. Of more than `_ASKED` engines, use the
        latest heartbeats."""
        members = self._fleet.of("inference")
        for member in members if len(members) <= _ASKED else ():
            subject = self._names.worker("inference", member.worker, member.nonce, "load")
            try:
                report = await self._bus.request(
                    subject, AskLoad(), LoadReport, who=member.worker, deadline_s=2
                )
                member.load, member.busy_s = report.load, report.load.busy_s
            except NoAnswer as error:
                log.warning("no load figures", worker=member.worker, error=str(error))
        former, self._busy = self._busy, {member.nonce: member.busy_s for member in members}
        new = sum(busy_s - former.get(nonce, 0.0) for nonce, busy_s in self._busy.items())
        self._mean_busy_s += new / max(1, len(members))
        return self._mean_busy_s

    def _target(self, member: FleetMember) -> tuple[WeightsNote, bool] | None:
        """Return the weights that a worker has to serve, and whether only their evaluation may use them."""
        if member.worker in self._lending.lent and self._demand.version in self.notes:
            return self.notes[self._demand.version], True
        return (self.note, False) if self.note is not None and not member.is_evaluator else None

    async def _swap(self, member: FleetMember, note: WeightsNote, *, exact: bool) -> SwapDone | None:
        """Return None if the weights are published again meanwhile."""
        if exact and not member.is_evaluator:  # until the next swap, it takes no request of training
            self._waits.away(member.worker, Cause("evaluation", note.version))
        with anyio.CancelScope() as self._swaps[member.worker]:
            done = await self._bus.request(
                self._names.worker("inference", member.worker, member.nonce, "swap"),
                Swap(self._journal.epoch, next(self._numbers), note, exact, self.trainer),
                SwapDone,
                who=member.worker,
                deadline_s=_SWAP_S,
            )
            if done.fault:
                raise RunError(f"{member.worker}: {done.fault}")
            return done
        return None

    def _is_present(self, member: FleetMember) -> bool:
        return self._fleet.members.get(member.worker) is member


def _served_by(target: tuple[WeightsNote, bool]) -> tuple[int, str, bool]:
    """Return version, digest, and exactness: the same weights may be published again, at another address."""
    note, exact = target
    return note.version, note.digest, exact
