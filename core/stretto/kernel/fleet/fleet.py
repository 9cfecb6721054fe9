"""The workers of a run. The fleet starts them, receives their heartbeats, and restarts lost ones. It has no
handle of a worker that a user started: it does not restart such a worker, whose loss never ends the run."""

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from stretto.assembly.assembly import Worker
from stretto.assembly.contracts import expect_contract
from stretto.assembly.worker_numbers import EVALUATOR
from stretto.bus.health import sleep_and_measure_delay
from stretto.bus.joining import is_token_of, write_bootstrap
from stretto.bus.messages.membership import Heartbeat, Join, Leaving
from stretto.bus.messages.tickets import TicketStarted
from stretto.component import Problem
from stretto.engine import Load
from stretto.errors import LaunchError, Refused, printable, together
from stretto.kernel.fleet.adoption import Adoption
from stretto.kernel.supervised import Failure, supervised
from stretto.launcher import UNKNOWN_STATUS, Handle, Job, Launcher, Role
from stretto.machine import clock
from stretto.machine.cores import MemoryKills

log = structlog.get_logger()

_SILENT_S = 15.0
"""The fleet treats a worker as lost after this many seconds without a heartbeat."""
_HUNG_S = 600.0
"""The fleet treats a ready worker as lost after its event loop has stood still for this many seconds."""
_STACKS_S = 1.0
"""A hanging worker has this many seconds to write the stacks of its threads before the fleet kills it."""
_KILLED_S = 30.0
"""Seconds to wait for a killed process: one that hangs in a driver or on a network disk ends at no signal."""
_LONG_LIFE_S = 600.0
"""If a worker ran longer than this many seconds, the count of its restarts begins again at 1."""
_TAIL_LINES = 15
_AGAIN_S = 10.0
"""A worker of a former kernel has this many seconds to join again."""


@dataclass
class FleetMember:
    """One worker that has joined."""

    worker: str
    role: Role
    nonce: str
    place: str
    heard: float
    beat: Heartbeat
    """Its latest heartbeat, with the newest figures of its engine; an empty one before the first."""
    ready: bool = False
    callable: bool = False
    """Whether other workers may call it: it is ready, and an engine also serves the right weights."""
    leaving: bool = False
    """Whether it drains: it gets no new work."""
    exact_version: int | None = None
    """The version that an engine serves while it is lent to an evaluation."""
    is_former: bool = False
    """Whether it worked for a former kernel."""
    held: tuple[TicketStarted, ...] = ()
    """The attempts on which it worked when it joined."""
    has_beaten: bool = False

    @property
    def is_evaluator(self) -> bool:
        """Whether it is the inference worker that serves evaluations alone."""
        return self.worker == EVALUATOR

    @property
    def kind(self) -> str:
        """The kind under which its figures are added up: its role, or the evaluator."""
        return EVALUATOR if self.is_evaluator else self.role


class Fleet:
    """Starts the workers, receives their messages, and restarts workers that end unexpectedly."""

    def __init__(
        self,
        launcher: Launcher,
        bootstraps: Path,
        logs: Path,
        imports: Callable[[Worker], tuple[str, ...]],
        *,
        max_restarts: int,
        values: int = 1,
    ) -> None:
        self._launcher = launcher
        self._bootstraps = bootstraps
        self._logs = logs
        self._imports = imports
        self._max_restarts = max_restarts
        self.adoption = Adoption(launcher, bootstraps, values)
        self._handles: dict[str, Handle] = {}
        self._jobs: dict[str, Job] = {}
        self._waits: dict[str, anyio.CancelScope] = {}
        self._retired: set[str] = set()
        """Workers that the fleet has started and does not restart, because the run needs fewer."""
        self._ended_busy: dict[str, float] = {}
        self._ended_tokens = 0
        self._ended_refused = 0
        self._loads: list[Load] = []
        self._verifiers_used: list[float] = []
        self._sampled = self._lost = 0
        """`_loads` to `_lost` count since the last `load_figures`; lost tokens have to be computed again."""
        self._lasting: set[str] = set()
        """Workers that did enough work since their start to reset the count of their restarts."""
        self._hanging: set[str] = set()
        self._given_up: set[str] = set()
        """Workers that said that a restart would fail in the same way."""
        self._launching = anyio.Lock()
        self._ending = False
        self.on_ready: Callable[[FleetMember], None] = lambda member: None
        self.on_lost: Callable[[FleetMember, str, bool], None] = lambda member, how, final: None
        """Called with a lost worker before its restart, how it was lost, and whether the loss is final."""
        self.on_left: Callable[[FleetMember, str], None] = lambda member, why: None
        """Called with a worker that has left after a drain, and the reason."""
        self.on_change: Callable[[FleetMember], None] = lambda member: None
        """Called with a worker that begins to drain."""
        self.explain: Callable[[str], str] = lambda worker: ""
        """Returns an explanation for an error message about a worker that ends again and again."""
        self._memory_kills = MemoryKills()
        self.memory_of: Callable[[str], str] = lambda worker: ""
        """Returns what was counted before the start for the memory of a worker that the system killed."""
        self.needs: Callable[[Role], bool] = lambda role: True
        """Returns whether lost workers of a role start again."""
        self.may_start: Callable[[Role], bool] = lambda role: True
        """Whether a lost worker of this role may start again now."""
        self.hears: Callable[[], bool] = lambda: True
        """Returns whether heartbeats can arrive now."""
        self.reconnect_s = 0.0
        """Seconds for which a worker may look for another server of a cluster before it counts as silent."""
        self.members: dict[str, FleetMember] = {}
        self.restarts = 0
        self.starting: dict[str, str] = {}

    # -------------------------------------------------------------------------------- launching

    async def adopt(self, workers: Iterable[Worker], tasks: TaskGroup) -> None:
        """Take over the workers of a former kernel that still run; tasks watch and restart these workers."""
        for job, handle in await self.adoption.find([self._job(worker) for worker in workers]):
            self._handles[job.worker], self._jobs[job.worker] = handle, job
            self.starting[job.worker] = "joining again"
            tasks.start_soon(self._look_after, job)
        if self.adoption.absent:
            log.info("workers of the former kernel live on", workers=sorted(self.adoption.absent))
            tasks.start_soon(self._end_absent)

    async def _end_absent(self) -> None:
        """Kill the adopted workers, except trainers, that do not join again. The fleet then restarts them."""
        await anyio.sleep(_AGAIN_S + self.reconnect_s)
        async with anyio.create_task_group() as tasks:
            for worker in sorted(each for each in self.adoption.absent if not each.startswith("trainer")):
                log.warning("worker does not join again", worker=worker)
                tasks.start_soon(self._kill, worker, self._handles[worker], 0)

    async def launch(self, workers: Iterable[Worker], tasks: TaskGroup) -> None:
        """Start the workers that are not adopted; tasks watch and restart them."""
        jobs = [self._job(worker) for worker in workers if worker.id not in self._handles]
        async with self._launching:
            # Before the launch: some workers may be ready, or have failed for good, before all run.
            self.starting |= {job.worker: "starting" for job in jobs}
            self._jobs |= {job.worker: job for job in jobs}
            try:
                handles = await self._launcher.launch(jobs)
            except LaunchError:
                for job in jobs:
                    self.starting.pop(job.worker, None)
                    self._jobs.pop(job.worker, None)
                raise
            for job, handle in zip(jobs, handles, strict=True):
                expect_contract(handle, Handle, f"the handle of {job.worker}")
                self._handles[job.worker] = handle
                tasks.start_soon(self._look_after, job)
            self.adoption.record(self._handles)

    async def stop(self, grace_s: float) -> None:
        """Wait for workers to leave; stop the rest after `grace_s`, or at once if they have not joined."""
        async with self._launching:  # after a launch in progress, so that its handles are stopped too
            self._ending = True

        async def end(worker: str, handle: Handle) -> None:
            joined = worker in self.members  # a worker that has not joined received no last beacon
            with anyio.move_on_after(grace_s if joined else 0):
                await handle.wait()
                return
            log.info("stopping worker", worker=worker, place=handle.place)
            await self._kill(worker, handle, 1.0)

        await together(lambda worker_handle: end(*worker_handle), self._handles.items())

    async def _look_after(self, job: Job) -> None:
        last = await supervised(
            partial(self._live, job),
            partial(self._restart, job),
            first_pause_s=0.5,
            longest_pause_s=5.0,
            most=self._max_restarts,
        )
        if last is not None:
            raise LaunchError(
                f"{job.worker} ended {self._max_restarts + 1} times "
                f"(launcher.max_restarts={self._max_restarts}), at last with "
                f"{last.why}{self.explain(job.worker)}; its last lines:\n"
                f"{job.tail(_TAIL_LINES)}",
                worker=job.worker,
            )

    async def _live(self, job: Job) -> Failure | None:
        """Wait for the end of a worker's process. Return None if the worker is not to be restarted."""
        began, handle = clock.now(), self._handles[job.worker]
        status = await self._until_end(job.worker, handle)
        self.adoption.absent.discard(job.worker)
        match status:
            case None:
                how = f"{handle.place} does not end after SIGKILL"
            case _ if status < 0:
                how = f"killed by signal {-status}"
                if self._memory_kills.more():
                    how += f": this machine's memory was full{self.memory_of(job.worker)}"
            case _ if status == UNKNOWN_STATUS:
                how = "it ended"
            case _:
                how = f"exit status {status}"
        member = self.members.get(job.worker)
        is_orderly = member is not None and member.leaving and status in (0, UNKNOWN_STATUS)
        if member is not None and is_orderly:  # the worker's `Leaving` message has not arrived yet
            self._leave(member, "its work was finished")
        else:
            self._lose(job.worker, how)
        if self._ending or job.worker in self._given_up:
            return None
        if job.worker in self._retired:
            self._forget(job.worker)
            return None
        log.error("worker ended", worker=job.worker, status=how, last_lines=job.tail(_TAIL_LINES))
        lasted = job.worker in self._lasting or clock.now() - began > _LONG_LIFE_S
        self._lasting.discard(job.worker)
        return Failure(how, lasted)

    async def _restart(self, job: Job, pause_s: float) -> bool:
        """Start a worker again after a pause, if it is still needed. Return whether it was started."""
        await anyio.sleep(pause_s)
        self.starting.pop(job.worker, None)  # it ended before it joined
        # Without a connection, the worker would end again.
        while not (self.hears() and self.may_start(job.role)):
            await anyio.sleep(0.2)
        async with self._launching:
            if self._ending or not self.needs(job.role):
                return False
            if job.worker in self._retired:  # since it ended
                self._forget(job.worker)
                return False
            [self._handles[job.worker]] = await self._launcher.launch([job])
            self.adoption.record(self._handles)
        self.starting[job.worker] = "starting again"
        self.restarts += 1
        return True

    async def _until_end(self, worker: str, handle: Handle) -> int | None:
        """Wait for the end of a process. Return its exit status; None if `_kill` has given the process up."""
        with anyio.CancelScope() as self._waits[worker]:
            return await handle.wait()
        return None

    async def _kill(self, worker: str, handle: Handle, grace_s: float) -> None:
        """Stop a process. After SIGKILL it does nothing more, so give up a process that then does not end."""
        with anyio.move_on_after(grace_s + _KILLED_S) as waiting:
            await handle.stop(grace_s)
        if waiting.cancelled_caught:
            log.error("process does not end after SIGKILL", worker=worker, place=handle.place)
            self._waits[worker].cancel()

    def lose_all(self, role: Role, why: str) -> None:
        """Treat all workers of a role as lost."""
        for member in [each for each in self.members.values() if each.role == role]:
            self._lose(member.worker, why)

    async def end_all(self, role: Role) -> None:
        """Kill the processes of a role; `_end_hanging` kills those that hang. All processes start again."""
        working = [worker for worker in self.started(role) if worker not in self._hanging]
        await together(lambda worker: self._kill(worker, self._handles[worker], 0), working)

    def lasts(self, role: Role) -> None:
        """Reset the count of restarts for all workers of a role, because they have done their work."""
        self._lasting.update(self.started(role))

    def _job(self, worker: Worker) -> Job:
        bootstrap = write_bootstrap(self._bootstraps, worker.id)
        command = (sys.executable, "-m", "stretto.workers", str(bootstrap))
        return worker.job(command, str(self._logs / f"{worker.id}.out"), self._imports(worker))

    # ---------------------------------------------------------------------------------- retiring

    def started(self, role: Role) -> list[str]:
        """Return the workers of a role that the fleet has started and not retired, without the evaluator."""
        excluded = self._retired | {EVALUATOR}
        started = [each for each in self._handles if each.startswith(f"{role}-") and each not in excluded]
        return sorted(started, key=lambda worker: int(worker.rpartition("-")[2]))

    def free_ids(self, role: Role, count: int) -> list[str]:
        """Return ids for new workers of a role: the lowest numbers that no worker has."""
        taken = self._handles.keys() | self.members.keys()
        names = (f"{role}-{number}" for number in itertools.count())
        return list(itertools.islice((name for name in names if name not in taken), count))

    def retire(self, worker: str) -> FleetMember | None:
        """Give a worker no new work, and do not restart it. Return its member; None if it has not joined."""
        self._retired.add(worker)
        self.starting.pop(worker, None)
        member = self.members.get(worker)
        if member is not None:
            member.leaving = True
            self.on_change(member)
        return member

    def problems(self, added: Sequence[Worker]) -> list[Problem]:
        """Return what prevents these workers from running beside those that the fleet has started."""
        if not added:
            return []
        present = [job for worker, job in self._jobs.items() if worker in self._handles]
        return list(self._launcher.check([*present, *map(self._job, added)]))

    async def until_ended(self, worker: str, limit_s: float) -> None:
        """Wait until the process of a retired worker has ended. Stop it after `limit_s` seconds."""
        handle = self._handles.get(worker)
        if handle is None:
            return
        with anyio.move_on_after(limit_s):
            await handle.wait()
            return
        log.warning("worker did not leave in time", worker=worker, seconds=limit_s)
        await self._kill(worker, handle, 1.0)

    def _forget(self, worker: str) -> None:
        self._retired.discard(worker)
        self._handles.pop(worker, None)
        self._jobs.pop(worker, None)
        self.starting.pop(worker, None)

    # ------------------------------------------------------------------------------- membership

    def join(self, role: Role, message: Join) -> None:
        """Admit a process with the credentials of a role. It replaces a process with the same worker id."""
        if message.role != role or not is_token_of(self._bootstraps, role, message.worker, message.token):
            raise Refused(
                "kernel",
                f"a process with the credentials of role {role!r} may not join as {message.worker!r}: it "
                "needs the bootstrap file of that worker, which `stretto invite` writes",
            )
        former = self.members.get(message.worker)
        is_known = self.adoption.admits(message) or (former is not None and former.nonce == message.nonce)
        if message.again and not is_known:
            raise Refused("kernel", f"another process takes the place of {message.worker}")
        self.adoption.absent.discard(message.worker)
        if former is not None and former.nonce != message.nonce:
            self._lose(message.worker, "replaced by a new process")
        if message.worker not in self.members:
            now, beat = clock.now(), Heartbeat(message.worker, message.nonce, ready=False)
            self.members[message.worker] = FleetMember(
                *(message.worker, message.role, message.nonce, message.place, now, beat),
                is_former=message.again,
                held=message.held,
            )
            self.starting[message.worker] = "loading"

    def beat(self, message: Heartbeat) -> bool:
        """Take in a heartbeat, and return whether its process is a member of the fleet."""
        member = self.members.get(message.worker)
        if member is None or member.nonce != message.nonce:
            self.adoption.stranger_heard = clock.now()
            return False
        if member.is_former and not member.has_beaten:  # its figures for the former kernel do not count
            self._ended_busy[member.kind] = self._ended_busy.get(member.kind, 0.0) - message.busy_s
            self._ended_tokens -= message.load.generated_tokens if message.load else 0
            self._ended_refused -= message.refused
        member.heard, member.has_beaten = clock.now(), True
        if (new := message.load) is not None and not member.is_evaluator:
            self._loads.append(new)
            if (former := member.beat.load) is not None:
                self._sampled += new.generated_tokens - former.generated_tokens
                self._lost += (new.lost_tokens or 0) - (former.lost_tokens or 0)
        if member.role == "verifier" and message.ready:
            self._verifiers_used.append(min(1.0, max(0.0, message.used)))
        if message.paused and not member.beat.paused:
            log.warning("calls of user code pause", worker=member.worker, reason=printable(message.paused))
        member.beat = message
        if message.leaving and not member.leaving:
            member.leaving = True
            self.on_change(member)
        note = printable(new.note) if new is not None else ""
        if note and not message.ready and member.worker in self.starting:
            self.starting[member.worker] = note
        if message.ready and not member.ready:
            if note:
                log.warning("an engine has started", worker=member.worker, note=note)
            member.ready = True
            self.starting.pop(member.worker, None)
            self.on_ready(member)
        return True

    def serves(self, member: FleetMember, version: int) -> None:
        """Record that an engine serves a version, so that routing need not wait for the next heartbeat."""
        if (load := member.beat.load) is not None:
            load = msgspec.structs.replace(load, version=version)
            member.beat = msgspec.structs.replace(member.beat, load=load)

    def leaving(self, message: Leaving) -> None:
        """Remove a worker that leaves. If its message is final, the fleet does not restart the worker."""
        member = self.members.get(message.worker)
        if member is not None and member.nonce == message.nonce:
            is_orderly = message.drained or message.worker in self._retired
            if is_orderly and member.role != "trainer":
                self._leave(member, message.reason)
                return
            if message.final:
                self._given_up.add(message.worker)
            self._lose(message.worker, message.reason)

    async def watch(self) -> None:
        """Stop silent and hanging workers; they start again. Without a connection, no worker is silent."""
        async with anyio.create_task_group() as tasks:
            while True:
                delay_s = await sleep_and_measure_delay(1)
                now, hears = clock.now(), self.hears()
                for member in list(self.members.values()):
                    # The kernel's process was delayed, not the workers.
                    member.heard = member.heard + delay_s if hears else now
                    silent_s = now - member.heard
                    if silent_s > _SILENT_S + self.reconnect_s:
                        how = f"silent for {silent_s:.0f} s"
                    elif member.ready and member.beat.blocked_s > _HUNG_S:
                        how = f"its event loop stood still for {member.beat.blocked_s:.0f} s"
                    else:
                        continue
                    if handle := self._handles.get(member.worker):
                        self._hanging.add(member.worker)
                        tasks.start_soon(self._end_hanging, member.worker, handle)
                    self._lose(member.worker, how)

    async def _end_hanging(self, worker: str, handle: Handle) -> None:
        """Stop a process after it has written the stacks of its threads."""
        await handle.dump_stacks()
        await anyio.sleep(_STACKS_S)
        await self._kill(worker, handle, 0)
        self._hanging.discard(worker)

    def _lose(self, worker: str, how: str) -> None:
        member = self.members.get(worker)
        if member is None:
            return
        self._remove(member)
        if not self._ending:
            log.warning("worker lost", worker=worker, how=how)
            self.on_lost(member, how, worker in self._given_up and worker in self._jobs)

    def _leave(self, member: FleetMember, why: str) -> None:
        self._remove(member)
        if not self._ending:
            log.info("worker left", worker=member.worker, why=why)
            self.on_left(member, why)

    def _remove(self, member: FleetMember) -> None:
        del self.members[member.worker]
        if member.worker not in self._jobs:  # the fleet does not start it again
            self.starting.pop(member.worker, None)
        self._ended_busy[member.kind] = self._ended_busy.get(member.kind, 0.0) + member.beat.busy_s
        self._ended_tokens += load.generated_tokens if (load := member.beat.load) else 0
        self._ended_refused += member.beat.refused

    # ----------------------------------------------------------------------------------- figures

    def of(self, role: Role) -> list[FleetMember]:
        """Return the ready members of a role, without the evaluator."""
        return [member for member in self.members.values() if member.kind == role and member.ready]

    def evaluators(self) -> frozenset[str]:
        """Return a set with the evaluator's id, empty if the evaluator is not ready or drains."""
        member = self.members.get(EVALUATOR)
        return frozenset([EVALUATOR] if member is not None and member.ready and not member.leaving else ())

    def busy_s(self, role: Role) -> float:
        """Return the seconds of work of a role since the start, over all its workers but the evaluator."""
        now = sum(member.beat.busy_s for member in self.members.values() if member.kind == role)
        return self._ended_busy.get(role, 0.0) + now

    def generated_tokens(self) -> int:
        """Return the number of tokens sampled since the start, including those of previous workers."""
        loads = [load for member in self.members.values() if (load := member.beat.load) is not None]
        return self._ended_tokens + sum(load.generated_tokens for load in loads)

    def load_figures(self) -> dict[str, float]:
        """Return the mean load since the last call: `slots_used`, `kv_used` and `verifiers_used` from 0 to 1,
        `samples_waiting` per engine, and `lost_per_token`, tokens computed again per sampled token."""
        loads, sampled, lost = self._loads, self._sampled, self._lost
        self._loads, self._sampled, self._lost = [], 0, 0
        used, self._verifiers_used = self._verifiers_used, []
        of_verifiers = {"verifiers_used": sum(used) / len(used)} if used else {}
        if not loads:
            return of_verifiers
        memory = [load.kv_used for load in loads if load.kv_used is not None]
        knows_lost = sampled > 0 and any(load.lost_tokens is not None for load in loads)
        return {
            "slots_used": sum(load.running / load.slots for load in loads) / len(loads),
            "samples_waiting": sum(load.waiting for load in loads) / len(loads),
            **({"kv_used": sum(memory) / len(memory)} if memory else {}),
            **({"lost_per_token": lost / sampled} if knows_lost else {}),
            **of_verifiers,
        }

    def refused(self) -> int:
        """Return the number of malformed messages that workers have refused since the start."""
        return self._ended_refused + sum(member.beat.refused for member in self.members.values())


def late_workers(fleet: Fleet) -> list[str]:
    """Return the workers that cannot be called yet, each with its state."""
    states = dict(fleet.starting)
    for member in fleet.members.values():
        if member.ready and not (member.callable or member.leaving):
            states[member.worker] = "gets the weights"
    return [f"{worker} ({state})" for worker, state in sorted(states.items()) if worker != EVALUATOR]
