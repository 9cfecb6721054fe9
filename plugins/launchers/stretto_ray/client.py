"""`python -m stretto_ray.client`: the client of the Ray cluster, a process beside the kernel.

It connects to the cluster, reserves placement groups, starts an actor for each worker, and passes on their
output (see `stretto_ray.messages`). It is a process of its own because Ray ends a client whose cluster is
gone, and takes its signals. When the kernel is gone, its standard input ends, and it leaves. Ray then ends
its actors, and these their workers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from signal import SIGKILL
from typing import Any, BinaryIO

import msgspec

from stretto.errors import LaunchError, one_error
from stretto_ray.actor import WorkerActor
from stretto_ray.messages import (
    Cancel,
    ClientAnswer,
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
    WorkerOutput,
    WorkerStarted,
)
from stretto_ray.placement import RayGroup, groups_of

_LINE = 2**28
"""Maximum size of a request: a launch has the environments and bootstrap texts of all its workers."""
_CPUS = 10_000
"""CPUs of a cluster on this machine: there, as with the launcher `local`, more threads than cores are no
error."""
_STORE = 100 * 2**20
"""Bytes of its object store, which the launcher hardly uses."""
_ANSWER_S = 10.0
_RETRY_S = 0.5
_KILLED_S = 10.0
_LOST = 1


@dataclass(eq=False)
class _Reservation:
    """A placement group that Ray has made."""

    group: RayGroup
    handle: Any
    running: dict[str, int]
    """Number of the bundle of each worker that starts or runs."""

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
    following: asyncio.Task[None] | None = None


class _RayClient:
    """Starts workers on the cluster that this process is connected to."""

    def __init__(self, greeting: Greeting, events: int) -> None:
        self._ray: Any = import_module("ray")
        self._folder = greeting.folder
        self._events = events
        # `read` waits in the actor while it gets signals.
        self._actors = self._ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=8)(WorkerActor)
        self._reservations: list[_Reservation] = []
        self._processes: dict[int, _Process] = {}
        self._launches: dict[int, asyncio.Task[None]] = {}

    async def serve(self, file: BinaryIO) -> None:
        """Obey requests until the kernel is gone."""
        requests = asyncio.StreamReader(limit=_LINE)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), file)
        while line := await requests.readline():
            request: Request = msgspec.json.decode(line, type=Request)
            match request:
                case Describe():
                    self._emit(ClientAnswer(id=request.id, nodes=await asyncio.to_thread(self._nodes)))
                case Launch():
                    self._launches[request.id] = asyncio.create_task(self._answer_launch(request))
                case Cancel():
                    if task := self._launches.get(request.id):
                        task.cancel()
                case Signal():
                    if process := self._processes.get(request.run):
                        process.actor.signal.remote(request.number)  # a lost actor is seen by `_follow`
                case KillActor():
                    if process := self._processes.get(request.run):
                        self._ray.kill(process.actor)

    def _emit(self, event: Event) -> None:
        """Send an event. Blocks while the kernel's process does not read: then its disk is slow."""
        data = memoryview(msgspec.json.encode(event) + b"\n")
        while data:
            data = data[os.write(self._events, data) :]

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
            del self._launches[launch.id]

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
                    tasks.create_task(self._start(process))

    def _reserve(self, starts: tuple[Start, ...]) -> list[tuple[_Reservation, int]]:
        """Return a bundle for each worker: that in which it ran before, an unused one, or a new one."""
        places: dict[str, tuple[_Reservation, int]] = {}
        for find in (_Reservation.own_bundle, _Reservation.unused_bundle):
            for start in starts:
                for reservation in self._reservations:
                    if start.worker in places or reservation.group.name != start.group:
                        continue
                    if (bundle := find(reservation, start)) is not None:
                        reservation.running[start.worker] = bundle
                        places[start.worker] = reservation, bundle
        missing = [start for start in starts if start.worker not in places]
        if missing:
            self._release_unused()
        for group in groups_of(missing):
            handle = self._ray.util.placement_group(
                [dict(bundle.resources) for bundle in group.bundles], strategy=group.strategy
            )
            reservation = _Reservation(group, handle, {})
            self._reservations.append(reservation)
            for number, bundle in enumerate(group.bundles):
                for worker in bundle.workers:
                    reservation.running[worker] = number
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
        """Return a new actor in a bundle."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        resources = dict(start.resources)
        return self._actors.options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(reservation.handle, bundle),
        ).remote()

    async def _start(self, process: _Process) -> None:
        """Start the process of a worker, and follow it.

        Raises:
            LaunchError: if it cannot start.
        """
        start = process.start
        try:
            process.node, pid = await process.actor.start.remote(
                start.command, start.env, start.text, self._folder
            )
        except self._ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else error
            raise LaunchError(f"{start.worker} cannot be started: {cause}", worker=start.worker) from error
        self._processes[start.run] = process
        self._emit(WorkerStarted(run=start.run, node=self._name_of(process.node), pid=pid))
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
            process.reservation.running.pop(process.start.worker, None)
        self._release_unused()

    async def _follow(self, process: _Process) -> None:
        """Pass on the output of a worker until it has ended."""
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
                self._emit(WorkerOutput(run=run, data=data))
                offset += len(data)
            elif status is not None:
                ended = Ended(run=run, status=status)
                break
        self._ray.kill(process.actor)
        del self._processes[run]
        process.reservation.running.pop(process.start.worker, None)
        self._emit(ended)

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


def main() -> int:
    """Body of the process. Return its exit status."""
    requests = open(0, "rb", buffering=0)  # noqa: SIM115 - the event loop reads on where this stops
    greeting = msgspec.json.decode(requests.readline(), type=Greeting)
    events = os.dup(1)
    os.dup2(2, 1)  # Ray prints
    try:
        _connect(greeting)
        client = _RayClient(greeting, events)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds, and the kernel's process reports it
        os.write(events, msgspec.json.encode(Unconnected(error=str(error) or repr(error))) + b"\n")
        return 1
    asyncio.run(client.serve(requests))
    return 0


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
    sys.exit(main())
