"""The workers of a run, as the kernel knows them: started, joined, beating, lost, started again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from stretto.assembly.contracts import expect_contract
from stretto.assembly.plan import Worker
from stretto.bus.client import sleep_and_measure_delay
from stretto.bus.messages import Heartbeat, Join, Leaving, Peer
from stretto.engine import Load
from stretto.errors import LaunchError
from stretto.launcher import Handle, Job, Launcher, Role, thread_variables

__all__ = ["Fleet", "FleetMember"]

log = structlog.get_logger()

_SILENT_S = 15.0
"""A worker that has not been heard for so long is lost."""
_LONG_LIFE_S = 600.0
"""A worker that lived so long before it ended begins to count its restarts anew."""
_TAIL_LINES = 15


@dataclass
class FleetMember:
    """One worker that has joined."""

    worker: str
    role: Role
    nonce: str
    place: str
    heard: float
    ready: bool = False
    callable: bool = False
    """Others may be told of it: it is ready and, if an engine, holds the weights it must."""
    exact_version: int | None = None
    """Of an engine that is lent to an evaluation: the version it serves."""
    busy_s: float = 0.0
    load: Load | None = None
    refused: int = 0


class Fleet:
    """Starts the workers, listens to them, and starts again those that end unasked."""

    def __init__(
        self,
        launcher: Launcher,
        bootstraps: Path,
        logs: Path,
        *,
        max_restarts: int,
    ) -> None:
        self._launcher = launcher
        self._bootstraps = bootstraps
        self._logs = logs
        self._max_restarts = max_restarts
        self._handles: dict[str, Handle] = {}
        self._ended_busy: dict[Role, float] = {}
        self._ended_tokens = 0
        self._ended_refused = 0
        self._loads: list[Load] = []
        """Of the heartbeats since `load_figures` was last called."""
        self._given_up: set[str] = set()
        """Workers that failed at what would fail again."""
        self._launching = anyio.Lock()
        self._ending = False
        self.on_ready: Callable[[FleetMember], None] = lambda member: None
        """Called once for each worker that became ready."""
        self.on_lost: Callable[[FleetMember, str, bool], None] = lambda member, how, final: None
        """Called with each worker that is gone, how, and whether that is final, before it is started again;
        where that is final it is not started."""
        self.members: dict[str, FleetMember] = {}
        self.restarts = 0
        self.starting: dict[str, str] = {}
        """Workers that are not ready yet, and what they are at."""

    # -------------------------------------------------------------------------------- launching

    async def launch(self, workers: Iterable[Worker], tasks: TaskGroup) -> None:
        """Start the workers and look after each in `tasks`.

        Raises:
            LaunchError: if one cannot be started.
        """
        jobs = [self._job(worker) for worker in workers]
        async with self._launching:
            for job, handle in zip(jobs, await self._launcher.launch(jobs), strict=True):
                expect_contract(handle, Handle, f"the handle of {job.worker}")
                self._handles[job.worker] = handle
                self.starting[job.worker] = "starting"
                tasks.start_soon(self._look_after, job, handle)

    async def stop(self, grace_s: float) -> None:
        """Wait for the workers to leave by themselves, and end what has not after `grace_s`."""
        async with self._launching:  # what is being started is among the handles afterwards
            self._ending = True

        async def end(handle: Handle) -> None:
            joined = handle.worker in self.members  # others cannot have heard that the run is over
            with anyio.move_on_after(grace_s if joined else 0):
                await handle.wait()
                return
            log.info("stopping worker", worker=handle.worker, place=handle.place)
            await handle.stop(1.0)

        async with anyio.create_task_group() as tasks:
            for handle in self._handles.values():
                tasks.start_soon(end, handle)

    async def _look_after(self, job: Job, handle: Handle) -> None:
        """Wait for the end of a worker, and start it again; too often within a short time ends the run."""
        restarts = 0
        while True:
            began = time.monotonic()
            status = await handle.wait()
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            self._lose(job.worker, how)
            if self._ending or job.worker in self._given_up:
                return
            tail = handle.tail(_TAIL_LINES)
            log.error("worker ended", worker=job.worker, status=how, last_lines=tail)
            restarts = 1 if time.monotonic() - began > _LONG_LIFE_S else restarts + 1
            if restarts > self._max_restarts:
                raise LaunchError(
                    f"{job.worker} ended {restarts} times (launcher.max_restarts={self._max_restarts}), "
                    f"at last with {how}; its last lines:\n{tail}",
                    worker=job.worker,
                )
            await anyio.sleep(min(5.0, 0.25 * 2**restarts))
            async with self._launching:
                if self._ending:
                    return
                [handle] = await self._launcher.launch([job])
                self._handles[job.worker] = handle
            self.starting[job.worker] = "starting again"
            self.restarts += 1

    def _job(self, worker: Worker) -> Job:
        bootstrap = str(self._bootstraps / f"{worker.role}.json")
        return Job(
            worker=worker.id,
            role=worker.role,
            command=(sys.executable, "-m", "stretto", "worker", bootstrap, "--id", worker.id),
            env=thread_variables(worker.resources),
            resources=worker.resources,
            log=str(self._logs / f"{worker.id}.out"),
        )

    # ------------------------------------------------------------------------------- membership

    def join(self, message: Join) -> None:
        """A process says that it is there; one of the same name before it is gone."""
        former = self.members.get(message.worker)
        if former is not None and former.nonce != message.nonce:
            self._lose(message.worker, "replaced by a new process")
        if message.worker not in self.members:
            now = time.monotonic()
            self.members[message.worker] = FleetMember(
                message.worker, message.role, message.nonce, message.place, now
            )
            self.starting[message.worker] = "loading"

    def beat(self, message: Heartbeat) -> None:
        """A sign of life. One of a process that was replaced does not count."""
        member = self.members.get(message.worker)
        if member is None or member.nonce != message.nonce:
            return
        member.heard = time.monotonic()
        member.busy_s, member.load, member.refused = message.busy_s, message.load, message.refused
        if message.load is not None:
            self._loads.append(message.load)
        if message.ready and not member.ready:
            member.ready = True
            self.starting.pop(member.worker, None)
            self.on_ready(member)

    def serves(self, member: FleetMember, version: int) -> None:
        """An engine says that it has swapped: routing must not wait for its next heartbeat."""
        if member.load is not None:
            member.load = msgspec.structs.replace(member.load, version=version)

    def leaving(self, message: Leaving) -> None:
        """A worker goes by itself."""
        member = self.members.get(message.worker)
        if member is not None and member.nonce == message.nonce:
            if message.final:
                self._given_up.add(message.worker)
            self._lose(message.worker, message.reason)

    async def watch(self) -> None:
        """Lose those that have fallen silent; what is left of them is ended, to be started again."""
        while True:
            late = await sleep_and_measure_delay(1)
            for member in list(self.members.values()):
                member.heard += late  # the kernel stood still, not they
                silent = time.monotonic() - member.heard
                if silent > _SILENT_S:
                    self._lose(member.worker, f"silent for {silent:.0f} s")
                    if handle := self._handles.get(member.worker):
                        await handle.stop(0)

    def _lose(self, worker: str, how: str) -> None:
        member = self.members.pop(worker, None)
        if member is None:
            return
        self._ended_busy[member.role] = self._ended_busy.get(member.role, 0.0) + member.busy_s
        self._ended_tokens += member.load.generated_tokens if member.load else 0
        self._ended_refused += member.refused
        if not self._ending:
            log.warning("worker lost", worker=worker, how=how)
            self.on_lost(member, how, worker in self._given_up)

    # ----------------------------------------------------------------------------------- figures

    def of(self, role: Role) -> list[FleetMember]:
        """Members of a role that are ready."""
        return [member for member in self.members.values() if member.role == role and member.ready]

    def peers(self) -> tuple[Peer, ...]:
        """Those that rollout workers may call."""
        return tuple(
            Peer(member.worker, member.role, member.load, member.exact_version)
            for member in self.members.values()
            if member.callable
        )

    def busy_s(self, role: Role) -> float:
        """Seconds of work of a role since the start, added up over its workers, former ones included."""
        now = sum(member.busy_s for member in self.members.values() if member.role == role)
        return self._ended_busy.get(role, 0.0) + now

    def generated_tokens(self) -> int:
        """Tokens sampled since the start, by former workers too."""
        loads = [member.load for member in self.members.values() if member.load is not None]
        return self._ended_tokens + sum(load.generated_tokens for load in loads)

    def load_figures(self) -> dict[str, float]:
        """How full the engines were: means over the heartbeats since the last call, empty without one.

        `slots_used` and `kv_used` are shares, `samples_waiting` is a number of samples of one engine.
        """
        loads, self._loads = self._loads, []
        if not loads:
            return {}
        memory = [load.kv_used for load in loads if load.kv_used is not None]
        return {
            "slots_used": sum(load.running / load.slots for load in loads) / len(loads),
            "samples_waiting": sum(load.waiting for load in loads) / len(loads),
            **({"kv_used": sum(memory) / len(memory)} if memory else {}),
        }

    def refused(self) -> int:
        """Malformed messages that workers have refused since the start."""
        return self._ended_refused + sum(member.refused for member in self.members.values())
