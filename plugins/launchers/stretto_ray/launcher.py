"""Starts workers on the nodes of a Ray cluster, by way of a client process (see `stretto_ray.client`)."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import anyio

from stretto import Context, Problem
from stretto.errors import LaunchError
from stretto.launcher import Job, thread_variables, visible_gpus
from stretto.nodes import Node, place
from stretto_ray import RayConfig
from stretto_ray.connection import Connection
from stretto_ray.messages import (
    Adopt,
    Cancel,
    ClientAnswer,
    ClusterNode,
    Describe,
    Ended,
    Greeting,
    KillActor,
    Launch,
    Signal,
    Start,
    WorkerStarted,
)
from stretto_ray.placement import group_of, groups_of, resources_of, shortage

_CONNECT_S = 120.0
_CANCEL_S = 30.0
_KILLED_S = 30.0
"""A worker that was killed has this many seconds to end, and its actor as many."""
_LOST = 1


class RayHandle:
    """One worker, which an actor watches."""

    def __init__(self, job: Job, connection: Connection, run: int) -> None:
        self._job = job
        self._connection = connection
        self._run = run
        self._place = ""
        self._status: Future[int] = Future()
        connection.listen(run, self._take)

    @property
    def place(self) -> str:
        """Its node and process id."""
        return self._place

    async def wait(self) -> int:
        """Wait for the exit status of the worker; 1 if its node or its actor is lost."""
        return await asyncio.shield(asyncio.wrap_future(self._status))

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the worker, and SIGKILL to all processes of its session after `grace_s` seconds."""
        if grace_s > 0:
            self._signal(signal.SIGTERM)
        if await self._ends_within(grace_s):
            return
        self._signal(signal.SIGKILL)
        if await self._ends_within(_KILLED_S):
            return
        self._connection.tell(KillActor(run=self._run))  # its node does not answer
        if not await self._ends_within(_KILLED_S):
            self._end(_LOST)

    async def dump_stacks(self) -> None:
        """Send SIGUSR1, at which a worker writes the stacks of its threads to its output."""
        self._signal(signal.SIGUSR1)

    async def _ends_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.wait()
        return self._status.done()

    def _signal(self, number: signal.Signals) -> None:
        if not self._status.done():
            self._connection.tell(Signal(run=self._run, number=number))

    def _take(self, event: WorkerStarted | Ended) -> None:
        """Take in an event. Called in the connection's thread."""
        match event:
            case WorkerStarted():
                self._place = f"{event.node} pid {event.pid}"
            case Ended():
                if event.remark:
                    with Path(self._job.log).open("a") as log:
                        log.write(f"stretto: {event.remark}\n")
                self._end(event.status)

    def _end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


class RayLauncher:
    """Starts workers on the nodes of a Ray cluster. Connects when it is first needed."""

    def __init__(self, config: RayConfig, context: Context) -> None:
        self._config = config
        self._folder = context.folder
        self._connected: Connection | None = None
        self._runs: dict[str, int] = {}
        """Worker -> number of its newest start."""

    @property
    def address(self) -> str:
        """Address of this machine as the other nodes of the cluster reach it.

        Raises:
            LaunchError: if there is no connection to the cluster.
        """
        if self._config.address is None:
            return "127.0.0.1"
        own = [node.address for node in self._nodes() if node.own]
        if not own:
            raise LaunchError("this machine is no node of the Ray cluster; start one with `ray start`")
        return own[0]

    def check(self, jobs: Sequence[Job]) -> Iterator[Problem]:
        """Compare what the jobs need with what the cluster has, whether it is used or not."""
        try:
            if self._config.address is None:
                place(jobs, [Node("this machine", gpus=tuple(visible_gpus(os.environ)))], {})
                return
            starts = [self._start(job, 0, with_text=False) for job in jobs]
            if lack := shortage(groups_of(starts), self._nodes()):
                yield Problem("launcher", lack, "environment")
        except LaunchError as error:
            yield Problem("launcher", str(error), "environment")

    async def launch(self, jobs: Sequence[Job]) -> list[RayHandle]:
        """Start an actor for each job, and its process. A worker that ran before gets the resources that were
        reserved for it, on another node if its previous one is lost.

        Raises:
            LaunchError: if the cluster has no room, or a worker does not start.
        """
        connection = await anyio.to_thread.run_sync(self._connect)
        starts = [self._start(job, connection.number(), with_text=True) for job in jobs]
        handles = [RayHandle(job, connection, start.run) for job, start in zip(jobs, starts, strict=True)]
        id = connection.number()
        folder = "" if "working_dir" in self._config.runtime_env else str(Path.cwd())
        launch = Launch(id=id, starts=tuple(starts), folder=folder, within_s=self._config.start_s)
        answer = asyncio.wrap_future(connection.ask(id, launch))
        try:
            await asyncio.shield(answer)
        except asyncio.CancelledError:
            connection.tell(Cancel(id=id))
            with anyio.CancelScope(shield=True):
                await asyncio.wait([answer], timeout=_CANCEL_S)
            raise
        self._runs |= {start.worker: start.run for start in starts}
        return handles

    def record(self, worker: str) -> str:
        """Return the number of a worker's start, by which its client knows it."""
        return str(self._runs[worker])

    async def adopt(self, job: Job, record: str) -> RayHandle | None:
        """Take over a worker of a former kernel's client, and this client, if both run."""
        if not record:
            return None
        connection = await anyio.to_thread.run_sync(self._connect)
        run, id = int(record), connection.number()
        handle = RayHandle(job, connection, run)
        try:
            await asyncio.shield(asyncio.wrap_future(connection.ask(id, Adopt(id=id, run=run))))
        except LaunchError:
            connection.forget(run)
            return None
        self._runs[job.worker] = run
        return handle

    def close(self) -> None:
        """End the connection to the cluster, and with it all workers. This also happens at the end of the
        process, or when nothing refers to the launcher any more."""
        if self._connected is not None:
            self._connected.close()

    def _start(self, job: Job, run: int, *, with_text: bool) -> Start:
        command, text = job.command, b""
        if command[1:3] == ("-m", "stretto.workers"):
            text = Path(command[-1]).read_bytes() if with_text else b""
            command = ("", *command[1:-1], "-")  # the Python of the node, or of the runtime environment
        return Start(
            run=run,
            worker=job.worker,
            command=command,
            env={**thread_variables(job.resources), **job.env},
            text=text,
            group=group_of(job),
            unit=job.unit,
            resources=resources_of(self._config, job),
            log=job.log,
        )

    def _nodes(self) -> tuple[ClusterNode, ...]:
        """Return the living nodes of the cluster.

        Raises:
            LaunchError: if there is no connection to it.
        """
        connection = self._connect()
        id = connection.number()
        answer: Future[ClientAnswer] = connection.ask(id, Describe(id=id))
        try:
            return answer.result(_CONNECT_S).nodes
        except TimeoutError as error:
            raise LaunchError(f"the Ray cluster did not answer within {_CONNECT_S:g} s") from error

    def _connect(self) -> Connection:
        """Return the connection, a new one if the previous one is lost: to the client of a former kernel, or
        to one that is started."""
        if self._connected is None or not self._connected.runs:
            greeting = Greeting(address=self._config.address, runtime_env=self._config.runtime_env)
            logs, bus = Path(self._folder, "logs"), Path(self._folder, "bus")
            log = logs / "ray.out" if self._folder and logs.is_dir() else None
            folder = bus if self._folder and bus.is_dir() else None
            former = folder and Connection.adopt(greeting, log, folder)
            self._connected = former or Connection.start(greeting, log, folder)
            weakref.finalize(self, self._connected.close)
        return self._connected
