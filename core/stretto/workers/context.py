"""What the code of a role is given: the bus, the run, the kernel's latest word, a thread to compute in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from stretto.assembly.compose import Composed, compose_mapping
from stretto.assembly.plan import context_of
from stretto.bus.client import Bus
from stretto.bus.messages import Beacon, Heartbeat, Subjects, Welcome
from stretto.component import Context
from stretto.errors import Refused
from stretto.launcher import Role

__all__ = ["ComputeThread", "RoleWorker", "WorkerContext"]

T = TypeVar("T")


class WorkerContext:
    """What a role's code is given: the bus, the run, and the kernel's latest word."""

    def __init__(
        self, bus: Bus, names: Subjects, worker: str, role: Role, nonce: str, welcome: Welcome
    ) -> None:
        self.bus = bus
        self.names = names
        self.worker = worker
        self.role: Role = role
        self.nonce = nonce
        self.composed: Composed = compose_mapping(msgspec.msgpack.decode(welcome.config))
        self.component_context: Context = context_of(
            self.composed.config, run=welcome.run, folder=welcome.folder, worker=worker
        )
        self.lease_epoch = welcome.lease_epoch
        self.grace_s = welcome.grace_s
        self.fingerprints = welcome.fingerprints
        self.beacon: Beacon | None = None
        self.beacon_at = time.monotonic()
        self.leave = anyio.Event()
        self.reason = ""
        self._listeners: list[Callable[[Beacon], None]] = []

    def make(self, path: str) -> Any:
        """The component that a section of the run chose (see `Composed.make`)."""
        return self.composed.make(path, self.component_context)

    def explain(self, error: BaseException) -> str:
        """An error for those who cannot see its traceback."""
        return self.composed.explain(error, self.component_context.path("logs", f"{self.worker}.jsonl"))

    def subject(self, verb: str) -> str:
        """Where this worker is asked to do `verb`."""
        return self.names.worker(self.role, self.worker, verb)

    def on_beacon(self, listener: Callable[[Beacon], None]) -> None:
        """Call `listener` with every beacon."""
        self._listeners.append(listener)

    def check_lease(self, lease_epoch: int) -> None:
        """Accept a command of the kernel that owns the run.

        Raises:
            Refused: if a newer kernel than the sender owns the run.
        """
        if lease_epoch < self.lease_epoch:
            raise Refused(
                self.worker, f"a kernel of lease epoch {self.lease_epoch} owns the run, not {lease_epoch}"
            )
        self.lease_epoch = lease_epoch

    def receive_beacon(self, beacon: Beacon) -> None:
        """Take in a beacon; ignore one of a kernel that has been replaced."""
        if beacon.lease_epoch < self.lease_epoch:
            return
        self.lease_epoch, self.beacon, self.beacon_at = beacon.lease_epoch, beacon, time.monotonic()
        if beacon.state == "over":
            self.request_shutdown("the run is over")
        for listener in self._listeners:
            listener(beacon)

    def request_shutdown(self, reason: str) -> None:
        """Make this worker leave."""
        self.reason = self.reason or reason
        self.leave.set()


class RoleWorker(Protocol):
    """The work of a role, made once the worker has joined."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Do it until cancelled. `ready` is called when others may count on the worker."""
        ...

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """The heartbeat with the role's own figures."""
        ...


class ComputeThread:
    """One thread for all of an engine's compute: the event loop stays free, and the thread's own pool of
    compute threads is made once."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "compute")
        self.busy_s = 0.0
        """Seconds spent in `run` so far."""

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Run a function in the thread, after those before it."""
        timed = partial(self._timed, partial(function, *arguments, **named))
        return await asyncio.wrap_future(self._executor.submit(timed))

    def _timed(self, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self.busy_s += time.perf_counter() - began
