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

__all__ = ["ComputeThread", "RoleWork", "Setting"]

T = TypeVar("T")


class Setting:
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
        self.context: Context = context_of(
            self.composed.config, run=welcome.run, folder=welcome.folder, worker=worker
        )
        self.fence = welcome.fence
        self.grace_s = welcome.grace_s
        self.fingerprints = welcome.fingerprints
        self.beacon: Beacon | None = None
        self.heard = time.monotonic()
        self.leave = anyio.Event()
        self.reason = ""
        self._listeners: list[Callable[[Beacon], None]] = []

    def make(self, path: str) -> Any:
        """The component that a section of the run chose (see `Composed.make`)."""
        return self.composed.make(path, self.context)

    def explain(self, error: BaseException) -> str:
        """An error for those who cannot see its traceback."""
        return self.composed.explain(error, self.context.path("logs", f"{self.worker}.jsonl"))

    def subject(self, verb: str) -> str:
        """Where this worker is asked to do `verb`."""
        return self.names.worker(self.role, self.worker, verb)

    def on_beacon(self, listener: Callable[[Beacon], None]) -> None:
        """Be told of every beacon."""
        self._listeners.append(listener)

    def obey(self, fence: int) -> None:
        """Accept a command, or not.

        Raises:
            Refused: if a newer kernel than the sender owns the run.
        """
        if fence < self.fence:
            raise Refused(self.worker, f"a kernel with fence {self.fence} owns the run, not {fence}")
        self.fence = fence

    def hear(self, beacon: Beacon) -> None:
        """Take in a beacon; one of a kernel that has been replaced does not count."""
        if beacon.fence < self.fence:
            return
        self.fence, self.beacon, self.heard = beacon.fence, beacon, time.monotonic()
        if beacon.state == "over":
            self.go("the run is over")
        for listener in self._listeners:
            listener(beacon)

    def go(self, reason: str) -> None:
        """Begin to leave."""
        self.reason = self.reason or reason
        self.leave.set()


class RoleWork(Protocol):
    """The work of a role, made once the worker has joined."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Do it until cancelled. `ready` is called when others may count on the worker."""
        ...

    def beat(self, beat: Heartbeat) -> Heartbeat:
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
