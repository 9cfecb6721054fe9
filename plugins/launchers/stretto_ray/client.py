"""`python -m stretto_ray.client`: the client of the Ray cluster, a process beside the kernel.

It connects to the cluster, reserves placement groups, starts an actor for each worker, and writes the output
of the workers into their logs (see `stretto_ray.messages`). It is a process of its own because Ray ends a
client whose cluster is gone, and takes its signals.

When the kernel says that the run has ended, the client leaves. Ray then ends its actors, and these their
workers. When the kernel was killed, the client waits for the next one on a socket in the run's folder, for as
long as workers run. If the client itself is killed, its actors and their workers end.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec

from stretto.errors import LaunchError, one_error
from stretto_ray.actor import WorkerActor
from stretto_ray.messages import (
    Adopt,
    Cancel,
    ClientAnswer,
    Close,
    ClusterNode,
    Describe,
    Ended,
    Event,
    Failed,
    Greeting,
    KillActor,
    Launch,
    Request,
    Signal,
    Start,
    Unconnected,
    WorkerStarted,
)
from stretto_ray.placement import RayGroup, groups_of
from stretto_ray.sockets import listening_socket

_LINE = 2**28
"""Maximum size of a request: a launch has the environments and bootstrap texts of all its workers."""
_CPUS = 10_000
"""CPUs of a cluster on this machine: there, as with the launcher `local`, more threads than cores are no
error."""
_STORE = 100 * 2**20
"""Bytes of its object store, which the launcher hardly uses."""
_ANSWER_S = 10.0
_TURN_S = 1.0
"""The end of a kernel that was killed is heard within this many seconds."""
_RETRY_S = 0.5
_KILLED_S = 10.0
_LOST = 1


@dataclass(eq=False)
class _Reservation:
    """A placement group that Ray has made."""

    group: RayGroup
    handle: Any
    running: dict[int, int]
    """Start that is under way or has led to a worker that runs -> number of its bundle."""

    def own_bundle(self, start: Start) -> int | None:
        """Return the bundle that was made for a worker, unless another worker uses it."""
        for number, bundle in enumerate(self.group.bundles):
            mine = start.worker in bundle.workers and bundle.each == start.resources
            if mine and (start.unit or self._is_unused(number)):
                return number
        return None

    def unused_bundle(self, start: Start) -> int | None:
        """Return a bundle as large as a worker needs, of a worker that has ended."""
        for number, bundle in enumerate(self.group.bundles):
            if not start.unit and bundle.resources == start.resources and self._is_unused(number):
                return number
        return None

    def _is_unused(self, number: int) -> bool:
        return number not in self.running.values()


@dataclass(eq=False)
class _Process:
    """A worker, and its actor."""

    start: Start
    actor: Any
    reservation: _Reservation
    node: str = ""
    """Id of its node, once it runs."""
    pid: int = 0
    following: asyncio.Task[None] | None = None


class _RayClient:
    """Starts workers on the cluster that this process is connected to."""

    def __init__(self, greeting: Greeting) -> None:
        self._ray: Any = import_module("ray")
        self._greeting = greeting
        # `read` waits in the actor while it gets signals.
        self._actors = self._ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=8)(WorkerActor)
        self._reservations: list[_Reservation] = []
        self._processes: dict[int, _Process] = {}
        self._launches: dict[int, asyncio.Task[None]] = {}
        """Launches that can be cancelled."""
        self._turn = asyncio.Lock()
        """Held for the kernel that is connected."""
        self._kernel: asyncio.StreamWriter | None = None
        self._over = asyncio.Event()

    async def serve(self, first: socket.socket, listening: socket.socket | None) -> None:
        """Obey the run's kernels, one after the other, until one says `Close`, or was killed and no worker
        runs any more.

        Args:
            first: the connection to the first kernel, which has said its greeting.
            listening: where the next kernel connects; None if there will be none.
        """
        async with self._turn:
            if listening is not None:
                await asyncio.start_unix_server(self._welcome, sock=listening, limit=_LINE)
            await self._obey(*await asyncio.open_unix_connection(sock=first, limit=_LINE))
        await self._over.wait()

    async def _welcome(self, requests: asyncio.StreamReader, kernel: asyncio.StreamWriter) -> None:
        """Obey another kernel, if it wants the same cluster and the former one is gone."""
        with closing(kernel), suppress(ConnectionError, TimeoutError, msgspec.DecodeError):
            is_same = msgspec.json.decode(await requests.readline(), type=Greeting) == self._greeting
            if is_same and await asyncio.wait_for(self._turn.acquire(), _TURN_S):
                try:
                    await self._obey(requests, kernel)
                finally:
                    self._turn.release()

    async def _obey(self, requests: asyncio.StreamReader, kernel: asyncio.StreamWriter) -> None:
        """Obey the requests of a kernel until it is gone. Its launches under way end with it: no kernel would
        know their workers."""
        self._kernel = kernel
        try:
            with suppress(ConnectionError):
                while not self._over.is_set():
                    line = await requests.readline()
                    if not line.endswith(b"\n"):  # it may have been killed while it wrote
                        break
                    await self._do(msgspec.json.decode(line, type=Request))
        finally:
            self._kernel = None
            while self._launches:
                self._launches.popitem()[1].cancel()
            self._leave_without_workers()

    async def _do(self, request: Request) -> None:
        match request:
            case Describe():
                self._emit(ClientAnswer(id=request.id, nodes=await asyncio.to_thread(self._nodes)))
            case Launch():
                self._launches[request.id] = asyncio.create_task(self._answer_launch(request))
            case Cancel():
                if task := self._launches.pop(request.id, None):
                    task.cancel()
            case Adopt():
                if process := self._processes.get(request.run):
                    self._emit_started(process)
                    self._emit(ClientAnswer(id=request.id))
                else:
                    self._emit(Failed(id=request.id, error="it has ended"))
            case Signal():
                if process := self._processes.get(request.run):
                    process.actor.signal.remote(request.number)  # a lost actor is seen by `_follow`
            case KillActor():
                if process := self._processes.get(request.run):
                    self._ray.kill(process.actor)
            case Close():
                self._over.set()

    def _leave_without_workers(self) -> None:
        if self._kernel is None and not self._processes:
            self._over.set()

    def _emit(self, event: Event) -> None:
        """Send an event to the kernel, if one is there."""
        if self._kernel is not None:
            self._kernel.write(msgspec.json.encode(event) + b"\n")

    def _emit_started(self, process: _Process) -> None:
        node = self._name_of(process.node)
        self._emit(WorkerStarted(run=process.start.run, node=node, pid=process.pid))

    def _nodes(self) -> tuple[ClusterNode, ...]:
        own = self._ray.get_runtime_context().get_node_id()
        return tuple(
            ClusterNode(
                name=node["NodeName"],
                address=node["NodeManagerAddress"],
                own=node["NodeID"] == own,
                resources=node["Resources"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        )

    # -------------------------------------------------------------------------------- launching

    async def _answer_launch(self, launch: Launch) -> None:
        processes: list[_Process] = []
        try:
            async with asyncio.timeout(launch.within_s):
                await self._launch(launch, processes)
        except asyncio.CancelledError:
            await self._undo(processes)
            self._emit(Failed(id=launch.id, error="cancelled"))
        except LaunchError as error:
            await self._undo(processes)
            self._emit(Failed(id=launch.id, error=str(error), worker=error.worker))
        except TimeoutError:
            missing = [each.start.worker for each in processes if each.following is None]
            missing = missing or [each.worker for each in launch.starts]
            unused = await asyncio.to_thread(self._unused)
            await self._undo(processes)
            error = LaunchError(
                f"{', '.join(missing)} did not start within {launch.within_s:g} s (launcher.start_s); unused "
                f"in the Ray cluster: {unused}",
                worker=missing[0],
            )
            self._emit(Failed(id=launch.id, error=str(error), worker=error.worker))
        else:
            self._emit(ClientAnswer(id=launch.id))
        finally:
            self._launches.pop(launch.id, None)

    async def _launch(self, launch: Launch, processes: list[_Process]) -> None:
        """Start workers, and add them to `processes`.

        Raises:
            LaunchError: if one cannot start.
        """
        places = self._reserve(launch.starts)
        await asyncio.gather(*(self._until_ready(each) for each in {id(r): r for r, _ in places}.values()))
        for start, (reservation, bundle) in zip(launch.starts, places, strict=True):
            actor = self._actor(start, reservation, bundle)
            processes.append(_Process(start, actor, reservation))
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                for process in processes:
                    tasks.create_task(self._start(process, launch.folder))

    def _reserve(self, starts: tuple[Start, ...]) -> list[tuple[_Reservation, int]]:
        """Return a bundle for each worker: that in which it ran before, an unused one, or a new one."""
        places: dict[str, tuple[_Reservation, int]] = {}
        for find in (_Reservation.own_bundle, _Reservation.unused_bundle):
            for start in starts:
                for reservation in self._reservations:
                    if start.worker in places or reservation.group.name != start.group:
                        continue
                    if (bundle := find(reservation, start)) is not None:
                        reservation.running[start.run] = bundle
                        places[start.worker] = reservation, bundle
        missing = {start.worker: start for start in starts if start.worker not in places}
        if missing:
            self._release_unused()
        for group in groups_of(missing.values()):
            handle = self._ray.util.placement_group(
                [dict(bundle.resources) for bundle in group.bundles], strategy=group.strategy
            )
            reservation = _Reservation(group, handle, {})
            self._reservations.append(reservation)
            for number, bundle in enumerate(group.bundles):
                for worker in bundle.workers:
                    reservation.running[missing[worker].run] = number
                    places[worker] = reservation, number
        return [places[start.worker] for start in starts]

    def _release_unused(self) -> None:
        """Give back the placement groups in which no worker runs."""
        for unused in [each for each in self._reservations if not each.running]:
            self._reservations.remove(unused)
            self._ray.util.remove_placement_group(unused.handle)

    async def _until_ready(self, reservation: _Reservation) -> None:
        while not await asyncio.to_thread(reservation.handle.wait, 1):
            pass  # the caller has a deadline, and a thread cannot be cancelled

    def _actor(self, start: Start, reservation: _Reservation, bundle: int) -> Any:
        strategies: Any = import_module("ray.util.scheduling_strategies")
        resources = dict(start.resources)
        return self._actors.options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(reservation.handle, bundle),
        ).remote()

    async def _start(self, process: _Process, folder: str) -> None:
        """Start the process of a worker, and follow it.

        Raises:
            LaunchError: if it cannot start.
        """
        start = process.start
        try:
            process.node, process.pid = await process.actor.start.remote(
                start.command, start.env, start.text, folder
            )
        except self._ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else error
            raise LaunchError(f"{start.worker} cannot be started: {cause}", worker=start.worker) from error
        self._processes[start.run] = process
        place = f"{self._name_of(process.node)}, pid {process.pid}"
        _write(start.log, f"stretto: {start.worker} on {place}\n".encode())
        self._emit_started(process)
        process.following = asyncio.create_task(self._follow(process))

    async def _undo(self, processes: list[_Process]) -> None:
        """Stop what a failed launch has started."""
        for process in processes:
            if process.following is not None:
                process.actor.signal.remote(SIGKILL)
        if following := [each.following for each in processes if each.following is not None]:
            await asyncio.wait(following, timeout=_KILLED_S)
        for process in processes:
            self._ray.kill(process.actor)
            process.reservation.running.pop(process.start.run, None)
        self._release_unused()

    async def _follow(self, process: _Process) -> None:
        """Write the output of a worker into its log until it has ended."""
        run, offset = process.start.run, 0
        while True:
            try:
                data, status = await process.actor.read.remote(offset)
            except self._ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(_RETRY_S)  # its node may come back; if not, Ray says that it is lost
                continue
            except self._ray.exceptions.RayError as error:
                ended = Ended(
                    run=run, status=_LOST, remark=await asyncio.to_thread(self._loss, process, error)
                )
                break
            if data:
                _write(process.start.log, data)
                offset += len(data)
            elif status is not None:
                ended = Ended(run=run, status=status)
                break
        self._ray.kill(process.actor)
        del self._processes[run]
        process.reservation.running.pop(run, None)
        self._emit(ended)
        self._leave_without_workers()

    def _loss(self, process: _Process, error: Exception) -> str:
        """Return how a worker was lost."""
        living = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        if process.node not in living:
            return f"{process.start.worker} is lost with its node {self._name_of(process.node)}"
        return f"{process.start.worker} is lost with its Ray actor: {' '.join(str(error).split())}"

    def _name_of(self, node: str) -> str:
        return next((each["NodeName"] for each in self._ray.nodes() if each["NodeID"] == node), node)

    def _unused(self) -> str:
        """Return what the cluster has left, for an error."""
        unused = self._ray.available_resources()
        return ", ".join(f"{name} {unused.get(name, 0):g}" for name in ("CPU", "GPU"))


def main(connection: int, folder: str) -> int:
    """Body of the process. Return its exit status.

    Args:
        connection: the open file of the connection to the kernel.
        folder: where the next kernel finds a socket; empty if there will be none.
    """
    first = socket.socket(fileno=connection)
    first.set_inheritable(False)  # Ray's processes would keep it open
    with first.makefile("rb", buffering=0) as requests:  # the event loop reads on where this stops
        greeting = msgspec.json.decode(requests.readline(), type=Greeting)
    try:
        _connect(greeting)
        client = _RayClient(greeting)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds, and the kernel's process reports it
        first.sendall(msgspec.json.encode(Unconnected(error=str(error) or repr(error))) + b"\n")
        return 1
    with listening_socket(Path(folder)) if folder else nullcontext() as listening:
        asyncio.run(client.serve(first, listening))
    return 0


def _write(log: str, data: bytes) -> None:
    with suppress(OSError), Path(log).open("ab") as file:  # a full disk ends the run by way of the kernel
        file.write(data)


def _connect(greeting: Greeting) -> None:
    """Connect to the cluster, or start one. It ends with this process."""
    if greeting.address is None:
        # Its ports are open to other machines, so it asks for a login that only its own processes have.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    elif greeting.address != "auto":
        # Ray tries for minutes without a word.
        host, _, port = greeting.address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    ray: Any = import_module("ray")
    own: dict[str, Any] = {"num_cpus": _CPUS, "object_store_memory": _STORE, "include_dashboard": False}
    ray.init(
        address=greeting.address or "local",
        runtime_env=dict(greeting.runtime_env) or None,
        log_to_driver=False,
        **(own if greeting.address is None else {}),
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
