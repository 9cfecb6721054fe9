"""Keeps each engine at the newest weights, at the weights of the evaluation that the engine is lent to, or
asleep.

Rollout workers hear of an engine only when it serves the right weights. The run fails if an engine serves
other weights than announced or, with `inference.canary.on_drift: stop`, drifts too far from the trainer. The
engine has then sent no token of that version.
"""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count

import anyio
import msgspec
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

_SWAP_S = 300.0  # deadline of one swap
_LOOK_S = 0.5  # from one look for engines that are starting to the next
_ASKED = 32  # `busy_s` asks at most this many engines for their load
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
        """Called with an engine when rollout workers may call it, it serves a new version, or it is lent."""
        self._waits = setup.waits
        self._news: dict[str, anyio.Event] = {}
        """Worker -> event, set when the worker's target weights may have changed or the worker is lost."""
        self._swaps: dict[str, anyio.CancelScope] = {}
        self._lending_news = anyio.Event()
        self._numbers = count()
        self._lending = Lending(min(_TURN_S, setup.config.workflow.limit_s / _TURNS_PER_WORKFLOW))
        self._has_evaluator = setup.assembly.has_evaluator
        self._demand = Demand()
        self._busy: dict[str, float] = {}
        """Seconds of work of each engine, by the nonce of its process, at the last call of `busy_s`."""
        self._mean_busy_s = 0.0
        self.trainer: WorkerProcess | None = None
        """Rank 0 of the lead group; None while trainers are lost."""
        self.note: WeightsNote | None = None
        self._announced = anyio.Event()
        self._alternates = setup.scheduler.settings.alternates
        self._awake: set[str] = set()
        """The workers that have, or may get, weights on their device."""
        self._fell_asleep = anyio.Event()
        self._closed = False
        self._rooms = 0
        """Number of blocks of `making_room` under way."""
        self._fleet.may_start = lambda role: role != "inference" or not self._must_sleep
        self.notes: dict[int, WeightsNote] = {}
        """Version -> note, of the newest version and of versions that evaluations need."""

    def announce(self, note: WeightsNote) -> None:
        """Announce new weights, without waiting until the engines serve them."""
        self.note = note
        self.remember([note])
        self._notify_engines()
        self._announced.set()
        self._announced = anyio.Event()

    async def until_announced(self, version: int) -> WeightsNote:
        """Wait until a version, the newest or the next one, is announced, and return its note."""
        while self.note is None or self.note.version < version:
            await self._announced.wait()
        assert self.note.version == version
        return self.note

    def publish_again(self, note: WeightsNote) -> None:
        """Announce the new address of the newest weights, and begin swaps under way again."""
        for swap in self._swaps.values():
            swap.cancel()
        self.announce(note)

    def close(self) -> None:
        """Begin no swap to weights any more, and leave those under way: nothing needs them before the end."""
        self._closed = True
        for swap in self._swaps.values():
            swap.cancel()

    def remember(self, notes: Iterable[WeightsNote]) -> None:
        """Store the notes of versions that evaluations may need."""
        self.notes |= {note.version: note for note in notes}

    def lend(self, demand: Demand) -> None:
        """Set the current demand of evaluations for engines."""
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
        """Update the engines after a worker is lost, has left, or begins to drain."""
        if member.worker in self._news and not self._is_present(member):
            self._news.pop(member.worker).set()
            self._swaps.pop(member.worker, None)
            self._waits.gone(member.worker)
            self._mark_asleep(member.worker)
        self._look_at_lending_in_use()

    def _notify_engines(self) -> None:
        """Wake the task of every engine. The cost grows with the number of engines."""
        for news in self._news.values():
            news.set()

    def _look_at_lending_in_use(self) -> None:
        """Look at the lending, but only during an evaluation: without one, no engine is lent."""
        if self._demand.version is not None:
            self._look_at_lending()

    def _look_at_lending(self) -> None:
        self._lending_news.set()
        self._lending_news = anyio.Event()

    async def look_after_lending(self) -> None:
        """Lend engines to the evaluation under way and take them back, until cancelled."""
        while True:
            news, now = self._lending_news, clock.now()
            lent_before = self._lending.lent
            workers = {
                member.worker: member.exact_version
                for member in self._fleet.of("inference")
                if not member.leaving
            }
            evaluators = self._fleet.evaluators() if self._has_evaluator else None
            next_look = self._lending.choose(self._demand, workers, now, evaluators)
            if self._lending.lent != lent_before:
                log.info("engines lent", version=self._demand.version, workers=sorted(self._lending.lent))
                self._notify_engines()
                continue
            with anyio.move_on_at(next_look):
                await news.wait()

    @property
    def _must_sleep(self) -> bool:
        return self._demand.asleep or self._rooms > 0

    async def until_asleep(self) -> None:
        """Wait until all engines sleep, also those that are starting. They do so while they must."""
        while self._awake or any(worker.startswith("inference") for worker in self._fleet.starting):
            with anyio.move_on_after(_LOOK_S):
                await self._fell_asleep.wait()

    @asynccontextmanager
    async def making_room(self) -> AsyncGenerator[None]:
        """If engines and trainers take turns: let engines sleep during the block, in which trainers repeat
        steps."""
        self._rooms += self._alternates
        self._notify_engines()
        try:
            if self._alternates:
                await self.until_asleep()
            yield
        finally:
            self._rooms -= self._alternates
            self._notify_engines()

    def _mark_asleep(self, worker: str) -> None:
        self._awake.discard(worker)
        self._fell_asleep.set()
        self._fell_asleep = anyio.Event()

    async def keep_current(self, member: FleetMember) -> None:
        """Swap one worker to its target weights until the worker is gone. Outdated versions are skipped."""
        failures = 0
        served: tuple[int, str, bool] | None = None
        if member.is_former:  # the worker's time for a former kernel does not count
            self._busy[member.nonce] = member.beat.busy_s
            self._awake.add(member.worker)
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
                # Count only failures with the same weights: other weights may be gone, or published again.
                failures = failures + 1 if self._target(member) == target and self.trainer else 0
                # After a failed swap to or from an evaluation, the worker answers no request.
                served = None
                aim = f"serve version {note.version}" if note else "sleep"
                log.warning("swap failed", worker=member.worker, aim=aim, error=str(error))
                if failures == _TRIES:
                    raise RunError(f"{member.worker} cannot {aim}: {error}") from error
                await anyio.sleep(0.2 * max(1, failures))
                continue
            if not self._is_present(member):
                return  # the worker was lost before its answer came
            if note is None:
                failures, served, member.callable = 0, _served_by(target), False
                self._mark_asleep(member.worker)
                self.on_callable(member)
                continue
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
        """Return the engines' mean seconds of work since the kernel's start. As engines come and go, a call
        adds the mean work of the current engines since the previous call. With more than `_ASKED` engines,
        use their latest heartbeats."""
        members = self._fleet.of("inference")
        for member in members if len(members) <= _ASKED else ():
            subject = self._names.worker("inference", member.worker, member.nonce, "load")
            try:
                report = await self._bus.request(subject, AskLoad(), LoadReport, deadline_s=2)
                busy_s = report.load.busy_s
                member.beat = msgspec.structs.replace(member.beat, load=report.load, busy_s=busy_s)
            except NoAnswer as error:
                log.warning("no load figures", worker=member.worker, error=str(error))
        former_busy, self._busy = self._busy, {member.nonce: member.beat.busy_s for member in members}
        added_s = sum(busy_s - former_busy.get(nonce, 0.0) for nonce, busy_s in self._busy.items())
        self._mean_busy_s += added_s / max(1, len(members))
        return self._mean_busy_s

    def _target(self, member: FleetMember) -> tuple[WeightsNote | None, bool] | None:
        """Return the weights that a worker must serve, or None if it must sleep, and whether only an
        evaluation may use the worker. None: there are no weights for it yet."""
        if self._must_sleep:
            return None, False
        if self._closed:
            return None
        if member.worker in self._lending.lent and self._demand.version in self.notes:
            return self.notes[self._demand.version], True
        return (self.note, False) if self.note is not None and not member.is_evaluator else None

    async def _swap(self, member: FleetMember, note: WeightsNote | None, *, exact: bool) -> SwapDone | None:
        """Swap a worker to these weights, or to sleep without. Return None if the weights are published again
        meanwhile."""
        if note is not None:
            self._awake.add(member.worker)
        if (exact or note is None) and not member.is_evaluator:
            # It serves no training request until the next swap.
            newest = self.note.version if self.note else -1
            cause = Cause("evaluation", note.version) if note else Cause("swap", newest + 1)
            self._waits.away(member.worker, cause)
        with anyio.CancelScope() as self._swaps[member.worker]:
            subject = self._names.worker("inference", member.worker, member.nonce, "swap")
            swap = Swap(self._journal.epoch, next(self._numbers), note, exact, self.trainer)
            done = await self._bus.request(subject, swap, SwapDone, deadline_s=_SWAP_S)
            if done.fault:
                raise RunError(f"{member.worker}: {done.fault}")
            return done
        return None

    def _is_present(self, member: FleetMember) -> bool:
        return self._fleet.members.get(member.worker) is member


def _served_by(target: tuple[WeightsNote | None, bool]) -> tuple[int, str, bool]:
    """Return what identifies served weights: not their address, which changes at another publication."""
    note, exact = target
    return (note.version, note.digest, exact) if note else (-1, "", exact)
