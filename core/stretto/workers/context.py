"""What the code of a role uses: the bus, the run, messages of the kernel, a thread for computation."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio.to_thread
import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose_mapping
from stretto.bus.client import Bus
from stretto.bus.messages.base import KernelMessage, Message
from stretto.bus.messages.membership import Beacon, Dismissal, Heartbeat, Routes, Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import TicketStarted
from stretto.component import Context
from stretto.dataset import Dataset
from stretto.errors import ConfigError, Refused
from stretto.launcher import Role
from stretto.machine import clock
from stretto.workers.full_memory import out_of_memory
from stretto.workers.kernel_watch import KernelWatch
from stretto.workers.process import HostProcess

T = TypeVar("T")
K = TypeVar("K", bound=KernelMessage)


class WorkerContext:
    """The bus, the run, and the kernel's beacons and routes, for the code of a role. One for each worker."""

    def __init__(
        self,
        bus: Bus,
        names: Subjects,
        worker: str,
        role: Role,
        nonce: str,
        welcome: Welcome,
        process: HostProcess,
    ) -> None:
        self.bus = bus
        self.process = process
        self.names = names
        self.worker = worker
        self.role: Role = role
        self.nonce = nonce
        composed = compose_mapping(msgspec.msgpack.decode(welcome.config))
        folder = welcome.folder if welcome.lock.folder_readable else ""
        self.assembly = Assembly(composed, folder=folder, run=welcome.run, worker=worker)
        self.composed = self.assembly.composed
        self.component_context: Context = self.assembly.context
        self.lease_epoch = welcome.lease_epoch
        self.kernel_epoch = welcome.lease_epoch
        """Lease epoch of the kernel that this worker has joined last."""
        self.has_successor = anyio.Event()
        """Set when another kernel owns the run."""
        self.kernel = KernelWatch(welcome.lock, grace_s=welcome.grace_s, outage_s=welcome.outage_s)
        self._fingerprints = welcome.fingerprints
        self.many_machines = welcome.many_machines
        """Whether workers may run on other machines than the kernel's."""
        self.routes: Routes | None = None
        """The latest routes. Only a rollout worker gets them."""
        self.held: Callable[[], tuple[TicketStarted, ...]] = tuple
        """Returns the attempts of tickets that the worker works on. Only a rollout worker has some."""
        self.leave = anyio.Event()
        self.reason = ""
        self.drain = anyio.Event()
        """Set when the worker has to finish its present work, take no new work, and leave."""
        self.drain_reason = ""
        self.drained = False
        self._beacon_listeners: list[Callable[[Beacon], None]] = []
        self._routes_listeners: list[Callable[[Routes], None]] = []

    def make(self, path: str) -> Any:
        """Make the component that a section of the run chose (see `Composed.make`)."""
        return self.assembly.make(path)

    async def dataset(self, path: str) -> Dataset:
        """Make the dataset of a section. Raise ConfigError if its rows are not those that the kernel has."""
        dataset: Dataset = await anyio.to_thread.run_sync(self.make, path)
        if dataset.fingerprint != self._fingerprints[path]:
            raise ConfigError(
                f"{path}: its rows on {self.worker} differ from the kernel's; put the same files at the same "
                "place on every machine",
                path=path,
            )
        return dataset

    def explain(self, error: BaseException) -> str:
        """Return an error as text for readers without its traceback (see `Composed.explain`)."""
        context = self.component_context
        file = context.path("logs", f"{self.worker}.jsonl") if context.folder else None
        text = self.composed.explain(error, file or f"the output of {self.worker}")
        return text + out_of_memory(error, self.worker, self.assembly)

    def subject(self, verb: str) -> str:
        """Return the subject of requests to this process to do `verb`."""
        return self.names.worker(self.role, self.worker, self.nonce, verb)

    def on_beacon(self, listener: Callable[[Beacon], None]) -> None:
        self._beacon_listeners.append(listener)

    def on_routes(self, listener: Callable[[Routes], None]) -> None:
        """Call `listener` with the routes whenever new routes arrive."""
        self._routes_listeners.append(listener)

    async def obey(self, verb: str, kind: type[K], handler: Callable[[K], Awaitable[Message]]) -> None:
        """Serve a request of the kernel, if it has the newest lease epoch that this worker has seen."""

        async def obey(message: K) -> Message:
            if message.lease_epoch != self.lease_epoch:
                owner = f"a kernel of lease epoch {self.lease_epoch} owns the run"
                raise Refused(self.worker, f"{owner}, not {message.lease_epoch}")
            return await handler(message)

        await self.bus.serve(self.subject(verb), kind, obey)

    def receive_beacon(self, beacon: Beacon) -> None:
        """Process a beacon and call the listeners. Ignore a beacon of a kernel that has been replaced."""
        if beacon.lease_epoch < self.lease_epoch:
            return
        self.lease_epoch = beacon.lease_epoch
        self.kernel.hear()
        if beacon.state == "over":
            self.request_shutdown("the run is over")
        elif beacon.lease_epoch > self.kernel_epoch:
            self.has_successor.set()
        for listener in self._beacon_listeners:
            listener(beacon)

    def welcome(self, welcome: Welcome) -> None:
        """Work for another kernel from now on."""
        self.kernel_epoch = welcome.lease_epoch
        self.lease_epoch = max(self.lease_epoch, welcome.lease_epoch)
        self.kernel.follow(welcome.lock)
        self.has_successor = anyio.Event()

    def receive_dismissal(self, dismissal: Dismissal) -> None:
        """Leave, if the dismissal comes from the kernel that this worker has joined."""
        if dismissal.lease_epoch == self.kernel_epoch:
            self.request_shutdown("the kernel counts on this process no more")

    def receive_routes(self, routes: Routes) -> None:
        """Store the routes and call the listeners. Ignore routes of a kernel that has been replaced."""
        if routes.lease_epoch < self.lease_epoch:
            return
        self.routes = routes
        for listener in self._routes_listeners:
            listener(routes)

    def request_shutdown(self, reason: str) -> None:
        """Make this worker leave. The first reason counts."""
        self.reason = self.reason or reason
        self.leave.set()

    def request_drain(self, reason: str) -> None:
        """Make this worker finish its present work, and then leave. The first reason counts."""
        self.drain_reason = self.drain_reason or reason
        self.drain.set()


class RoleWorker(Protocol):
    """The work of a role. It is created after the worker has joined."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Work until cancelled. Call `ready` once the worker can answer requests."""
        ...

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return the heartbeat with the role's own figures added."""
        ...

    async def drain(self) -> None:
        """Take no new work, and return when the rest is finished. Called at most once, beside `run`."""
        ...


class ComputeThread:
    """One thread for all computation of an engine, so that the event loop stays free."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.busy_s = 0.0

    async def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Run a function after all earlier ones. In the caller's context, its log lines name the worker."""
        return await asyncio.wrap_future(self.submit(function, *arguments, **keywords))

    def submit(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> Future[T]:
        """Queue a function as `run` does, and return at once."""
        call = partial(function, *arguments, **keywords)
        return self._executor.submit(copy_context().run, self._run_timed, call)

    def _run_timed(self, function: Callable[[], T]) -> T:
        start = clock.now()
        try:
            return function()
        finally:
            self.busy_s += clock.now() - start
