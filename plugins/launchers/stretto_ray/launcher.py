"""Starts workers on the nodes of a Ray cluster, each in an actor that runs the worker's program.

When the kernel's process ends in any way, Ray ends the actors and these end their workers.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread

from stretto import Context, Problem
from stretto.errors import LaunchError, together
from stretto.launcher import Job, thread_variables, visible_gpus
from stretto.nodes import Node, place
from stretto_ray import RayConfig
from stretto_ray.connection import call, connect, keep_sigterm
from stretto_ray.placement import ClusterNode, groups_of, resources_of, shortage
from stretto_ray.reservations import BundlePlace

_KILLED_S = 20.0
"""Seconds that a killed worker has to end, before its actor is killed."""
_ANSWER_S = 10.0
"""Time limit for an answer of the cluster's head, in seconds. Answers are used in messages only."""
_RETRY_S = 0.5  # between two questions to a node that does not answer
_LOST = 1  # exit status of a lost worker
_SHOWN = ("CPU", "GPU")  # resources in messages

T = TypeVar("T")


class RayHandle:
    """One worker, and the actor that runs it."""

    def __init__(self, job: Job, actor: Any, bundle: BundlePlace) -> None:
        self._ray: Any = import_module("ray")
        self._job = job
        self._actor = actor
        self._bundle = bundle
        self._node = self._name = ""
        self._pid = 0
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """The worker's node and process id."""
        return f"{self._name} pid {self._pid}"

    @property
    def worker(self) -> str:
        return self._job.worker

    @property
    def has_started(self) -> bool:
        """True once the worker's program has begun."""
        return self._following is not None

    async def start(self, folder: str) -> None:
        """Start the worker's program. Raise LaunchError if the start fails."""
        job = self._job
        command, text = job.command, b""
        if command[1:3] == ("-m", "stretto.workers"):
            text = Path(command[-1]).read_bytes()
            command = ("", *command[1:-1], "-")  # "": the Python of the node, or of the runtime environment
        env = {**thread_variables(job.resources), **job.env}
        try:
            self._node, self._pid = await self._actor.start.remote(command, env, text, folder)
        except self._ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else error
            raise LaunchError(f"{job.worker} cannot be started: {cause}", worker=job.worker) from error
        with anyio.CancelScope(shield=True):  # the program runs, and `stop` needs `_following`
            nodes = {node["NodeID"]: node["NodeName"] for node in await _ask(self._ray.nodes, [])}
            self._name = nodes.get(self._node, self._node)
            self._write(f"stretto: {job.worker} on {self._name}, pid {self._pid}\n".encode())
            self._following = asyncio.create_task(self._follow())

    async def wait(self) -> int:
        """Wait for the exit status of the worker; 1 if its node or its actor is lost."""
        return await asyncio.shield(self._status)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the worker, and SIGKILL to all processes of its session after `grace_s` seconds."""
        if grace_s > 0:
            self._signal(signal.SIGTERM)
        if await self._ends_within(grace_s):
            return
        self._signal(signal.SIGKILL)
        if self._following is not None and not await self._ends_within(_KILLED_S):
            self._following.cancel()  # the worker's node does not answer

    async def dump_stacks(self) -> None:
        """Send SIGUSR1: the worker then writes the stacks of its threads to its output."""
        self._signal(signal.SIGUSR1)

    async def undo(self) -> None:
        """End the worker, even if its program has not started."""
        if self.has_started:
            await self.stop(0)
        else:
            self._end(_LOST)

    async def _ends_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.wait()
        return self._status.done()

    def _signal(self, number: signal.Signals) -> None:
        if not self._status.done():
            self._actor.signal.remote(number)  # `_follow` notices a lost actor

    async def _follow(self) -> None:
        status = _LOST
        try:
            while True:
                try:
                    answer = await self._actor.read.remote()
                except self._ray.exceptions.ActorUnavailableError:
                    await asyncio.sleep(_RETRY_S)  # the node may come back; if not, Ray raises another error
                    continue
                except self._ray.exceptions.RayError as error:
                    self._write(f"stretto: {await self._loss(error)}\n".encode())
                    return
                if isinstance(answer, bytes):
                    self._write(answer)
                elif answer is not None:
                    status = answer
                    return
        finally:
            self._end(status)

    def _end(self, status: int) -> None:
        if not self._status.done():
            self._ray.kill(self._actor)
            self._bundle.leave()
            self._status.set_result(status)

    async def _loss(self, error: Exception) -> str:
        living = [node["NodeID"] for node in await _ask(self._ray.nodes, []) if node["Alive"]]
        if self._node not in living:
            return f"{self.worker} is lost with its node {self._name}"
        return f"{self.worker} is lost with its Ray actor: {' '.join(str(error).split())}"

    def _write(self, data: bytes) -> None:
        with suppress(OSError), Path(self._job.log).open("ab") as log:  # a full disk fails the run elsewhere
            log.write(data)


class RayLauncher:
    """Starts workers on the nodes of a Ray cluster. Connects at the first call that needs the cluster."""

    def __init__(self, config: RayConfig, context: Context) -> None:
        self._config = config
        logs = Path(context.folder, "logs")
        self._log = logs / "ray.out" if context.folder and logs.is_dir() else None

    @property
    def address(self) -> str:
        """Address of this machine for other nodes of the cluster. Raises LaunchError without a connection."""
        if self._config.address is None:
            return "127.0.0.1"
        ray, nodes = import_module("ray"), self._nodes()
        own_id = ray.get_runtime_context().get_node_id()
        for node in nodes:
            if node["NodeID"] == own_id:
                return node["NodeManagerAddress"]
        raise LaunchError("this machine is no node of the Ray cluster; start one with `ray start`")

    def check(self, jobs: Sequence[Job]) -> Iterator[Problem]:
        """Compare the resources that the jobs need with all resources of the cluster, used or not."""
        try:
            if self._config.address is None:
                place(jobs, [Node("this machine", gpus=tuple(visible_gpus(os.environ)))], {})
                return
            nodes = [ClusterNode(node["NodeName"], node["Resources"]) for node in self._nodes()]
            if lack := shortage(groups_of(self._config, jobs), nodes):
                yield Problem("launcher", lack, "environment")
        except LaunchError as error:
            yield Problem("launcher", str(error), "environment")

    async def launch(self, jobs: Sequence[Job]) -> list[RayHandle]:
        """Start an actor for each job, with the job's program. A worker that ran before gets its reserved
        resources again, on another node if its previous node is lost."""
        config = self._config
        connection = await anyio.to_thread.run_sync(connect, config, self._log)
        keep_sigterm()
        reservations, actors = connection.reservations, connection.actors
        handles: list[RayHandle] = []
        try:
            with anyio.move_on_after(config.start_s) as waiting:
                places = await asyncio.wrap_future(call(lambda: reservations.reserve(config, jobs)))
                for job, bundle in zip(jobs, places, strict=True):
                    actor = _begin(actors, resources_of(config, job), bundle)
                    handles.append(RayHandle(job, actor, bundle))
                folder = "" if "working_dir" in config.runtime_env else str(Path.cwd())
                await together(lambda handle: handle.start(folder), handles)
            if waiting.cancelled_caught:
                started = {handle.worker for handle in handles if handle.has_started}
                missing = [job.worker for job in jobs if job.worker not in started]
                amounts = await _ask(import_module("ray").available_resources, {})
                unused = ", ".join(f"{name} {amounts.get(name, 0):g}" for name in _SHOWN)
                raise LaunchError(
                    f"{', '.join(missing)} did not start within {config.start_s:g} s (launcher.start_s); "
                    f"unused in the Ray cluster: {unused}",
                    worker=missing[0],
                )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await together(RayHandle.undo, handles)
                call(reservations.release_unused)
            raise
        return handles

    def _nodes(self) -> list[dict[str, Any]]:
        connect(self._config, self._log)
        keep_sigterm()
        return [node for node in import_module("ray").nodes() if node["Alive"]]


def _begin(actors: Any, resources: dict[str, float], bundle: BundlePlace) -> Any:
    """Request an actor. Ray creates it when its placement group is ready."""
    strategies: Any = import_module("ray.util.scheduling_strategies")
    group_and_bundle = bundle.reservation.handle, bundle.number
    return actors.options(
        num_cpus=resources.pop("CPU"),
        num_gpus=resources.pop("GPU", 0),
        memory=resources.pop("memory", None),
        resources=resources,
        scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(*group_and_bundle),
    ).remote()


async def _ask(question: Callable[[], T], otherwise: T) -> T:
    with anyio.move_on_after(_ANSWER_S), suppress(Exception):  # Ray raises many kinds of errors
        return await asyncio.wrap_future(call(question))
    return otherwise
