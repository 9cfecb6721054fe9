"""Admits workers to a run, and tells the kernel's parts when a worker is ready, has left, or is lost."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from stretto.assembly.worker_numbers import EVALUATOR
from stretto.bus.client import Bus
from stretto.bus.joining import own_version
from stretto.bus.lock import KernelLock
from stretto.bus.messages.events import FleetChanged, Input, WorkerGone
from stretto.bus.messages.membership import AskRanks, Dismissal, Heartbeat, Join, Leaving, Ranks, Welcome
from stretto.bus.messages.tickets import TicketStarted
from stretto.errors import ConfigError, RunError
from stretto.kernel.calls.engines import Engines
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.fleet import FleetMember, late_workers
from stretto.kernel.fleet.routes import RouteSender
from stretto.kernel.setup import RunSetup
from stretto.launcher import ROLES, ClusterLauncher, Role

log = structlog.get_logger()

_WAITING_LOG_S = 10.0
"""Log which workers are still missing after this many seconds without a change of the workers."""
_START_S = 900.0
"""Deadline for all workers to be ready, models loaded."""


@dataclass(eq=False)
class Admission:
    """Admits the workers of one kernel."""

    _setup: RunSetup
    _bus: Bus
    _journal: JournalWriter
    _ending: Ending
    _tasks: TaskGroup
    _engines: Engines
    _routes: RouteSender
    _hear: Callable[[Input], None]
    """Called with the event that a rollout worker has left or is lost."""

    def __post_init__(self) -> None:
        self._fleet = fleet = self._setup.fleet
        self._lock = KernelLock.of(self._setup.folder / "bus")
        self.on_trainer_lost: Callable[[str, str], None] = self._end_start
        """Called with a lost trainer, and with how it was lost."""
        self._changed = anyio.Event()
        fleet.on_ready = self._on_ready
        fleet.on_lost = self._on_lost
        fleet.on_left = self._on_left
        fleet.on_change = self._on_change
        fleet.hears = lambda: self._bus.connected
        fleet.reconnect_s = self._bus.reconnect_s
        self._engines.on_callable = self._update_routes

    async def serve(self) -> None:
        """Subscribe to the workers' messages: joins, heartbeats, and leaving."""
        bus, names = self._bus, self._setup.names
        for role in ROLES:
            await bus.serve(names.kernel(role, "join"), Join, partial(self._welcome, role))
            await bus.subscribe(names.kernel(role, "heartbeat"), Heartbeat, partial(self._take_beat, role))
            await bus.subscribe(names.kernel(role, "leaving"), Leaving, self._fleet.leaving)
        await bus.serve(names.kernel("trainer", "ranks"), AskRanks, self._send_ranks)

    async def until_trainers_ready(self) -> dict[str, str]:
        """Wait until all trainers are ready. Return the nonces of their processes."""
        with self._in_time():
            while not {*self._trainers} <= {member.worker for member in self._fleet.of("trainer")}:
                await self._changed.wait()
        return self._nonces_of_trainers()

    async def until_all_callable(self) -> None:
        """Wait until all workers can be called."""
        with self._in_time():
            while missing := self._missing():
                # Wait for one worker after the other: a check of all workers at every change would take long.
                while not self._is_callable(missing[0]):
                    with anyio.move_on_after(_WAITING_LOG_S) as waiting:
                        await self._changed.wait()
                    if waiting.cancelled_caught:
                        log.info("waiting", workers=", ".join(late_workers(self._fleet)))

    def held(self) -> tuple[TicketStarted, ...]:
        """Return the attempts of a former kernel on which rollout workers still work."""
        return tuple(
            msgspec.structs.replace(each, worker=member.worker)
            for member in self._fleet.members.values()
            if member.role == "rollout"
            for each in member.held
        )

    def _update_routes(self, member: FleetMember) -> None:
        self._routes.look(member)
        self._notify()

    async def _welcome(self, role: Role, message: Join) -> Welcome:
        if self._ending.over.is_set():
            await anyio.sleep_forever()  # the worker may belong to the kernel that owns the run now
        if message.stretto != own_version():
            raise ConfigError(
                f"{message.worker} has stretto {message.stretto or 'of an older version'}, and the run has "
                f"{own_version()}: install stretto {own_version()} where the worker starts"
            )
        self._fleet.join(role, message)
        self._notify()
        self._journal.hear(FleetChanged(message.worker, "joined"))
        log.info("worker joined", worker=message.worker, place=message.place)
        setup = self._setup
        return Welcome(
            config=msgspec.msgpack.encode(msgspec.to_builtins(setup.config)),
            run=setup.run,
            folder=str(setup.folder),
            lease_epoch=self._journal.epoch,
            grace_s=setup.bus.grace_s,
            fingerprints={path: dataset.fingerprint for path, dataset in setup.datasets.items()},
            outage_s=setup.config.bus.outage_s,
            lock=self._lock,
            many_machines=isinstance(setup.launcher, ClusterLauncher),
        )

    async def _take_beat(self, role: Role, message: Heartbeat) -> None:
        """Take in a heartbeat. Dismiss a process that is no member: nobody could stop its work."""
        if not self._fleet.beat(message):
            subject = self._setup.names.worker(role, message.worker, message.nonce, "dismiss")
            await self._bus.publish(subject, Dismissal(self._journal.epoch))

    async def _send_ranks(self, message: AskRanks) -> Ranks:
        del message
        while not {*self._trainers} <= self._fleet.members.keys():
            await self._changed.wait()
        return Ranks(self._nonces_of_trainers())

    @property
    def _trainers(self) -> list[str]:
        return [worker.id for worker in self._setup.workers if worker.role == "trainer"]

    def _nonces_of_trainers(self) -> dict[str, str]:
        """Return the nonces of all trainers, which belong together: one loss replaces all trainers."""
        return {worker: self._fleet.members[worker].nonce for worker in self._trainers}

    def _missing(self) -> list[str]:
        """Return the workers that cannot be called yet, without the evaluator: it may have no evaluation."""
        ids = (worker.id for worker in self._setup.workers if worker.id != EVALUATOR)
        return sorted(worker for worker in ids if not self._is_callable(worker))

    def _is_callable(self, worker: str) -> bool:
        member = self._fleet.members.get(worker)
        return member is not None and member.callable

    @contextmanager
    def _in_time(self) -> Generator[None]:
        with anyio.move_on_after(_START_S) as waiting:
            yield
        if waiting.cancelled_caught:
            raise RunError(
                f"workers not ready after {_START_S:.0f} s: {', '.join(late_workers(self._fleet))}"
            )

    def _on_ready(self, member: FleetMember) -> None:
        log.info("worker ready", worker=member.worker)
        self._journal.hear(FleetChanged(member.worker, "ready"))
        if member.role == "inference":  # it becomes callable when it serves the current weights
            self._tasks.start_soon(self._engines.keep_current, member)
        else:
            member.callable = True
            self._update_routes(member)

    def _on_change(self, member: FleetMember) -> None:
        self._update_routes(member)
        self._engines.changed(member)

    def _on_left(self, member: FleetMember, why: str) -> None:
        self._journal.hear(FleetChanged(member.worker, "left", why))
        self._on_change(member)
        if member.role == "rollout":
            self._hear(WorkerGone(member.worker, drained=True))

    def _on_lost(self, member: FleetMember, how: str, final: bool) -> None:
        self._journal.hear(FleetChanged(member.worker, "lost", how))
        self._on_change(member)
        if final:
            self._ending.end("failed", f"{member.worker}: {how}")
        elif member.role == "trainer":
            self.on_trainer_lost(member.worker, how)
        elif member.role == "rollout":
            self._hear(WorkerGone(member.worker, drained=False))

    def _end_start(self, worker: str, how: str) -> None:
        self._ending.end("failed", f"{worker} was lost while the run was starting ({how})")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
