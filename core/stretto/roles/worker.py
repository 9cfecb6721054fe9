"""What every worker process does: get onto the bus, join, beat, obey the kernel, and leave.

A worker leaves when the kernel says the run is over, when it is asked to (SIGTERM), and by itself when
it has heard nothing from the kernel for the grace time. What it does in between is its role's business.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
import structlog

from stretto.bus.client import Bus, connect
from stretto.bus.messages import Beacon, Heartbeat, Join, Leaving, Subjects, Welcome
from stretto.bus.server import Bootstrap
from stretto.component import Context
from stretto.config import Composed, compose_mapping
from stretto.errors import Refused, StrettoError, leaves
from stretto.launcher import Role, thread_variables
from stretto.logs import log_to
from stretto.plan import context_of, resources_of

__all__ = ["ComputeThread", "RoleWork", "Setting", "main"]

log = structlog.get_logger()

T = TypeVar("T")
BEAT_S = 1.0
_LEAVE_S = 4.0


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
        """The component that a section of the run chose."""
        return self.composed.make(path, self.context)

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


def main(bootstrap_file: Path, worker: str) -> int:
    """Body of `stretto worker`; returns the exit status."""
    bootstrap = Bootstrap.read(bootstrap_file)
    file = Path(bootstrap.logs, f"{worker}.jsonl") if bootstrap.logs else None
    log_to(file, run=bootstrap.run, role=bootstrap.role, worker=worker)
    try:
        anyio.run(_work, bootstrap, worker)
    except BaseExceptionGroup as group:
        for error in leaves(group):
            log.error("worker failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            print(f"{worker}: {type(error).__name__}: {error}", flush=True)
        return 1
    except StrettoError as error:
        log.error("worker failed", error=str(error))
        print(f"{worker}: {error}", flush=True)
        return 1
    return 0


async def _work(bootstrap: Bootstrap, worker: str) -> None:
    names = Subjects(bootstrap.run)
    role: Role = bootstrap.role  # pyright: ignore[reportAssignmentType] - the kernel's bootstrap is not a worker's
    async with connect(bootstrap, names.inbox(role), name=worker) as bus:
        nonce = secrets.token_hex(4)
        place = f"{socket.gethostname()} pid {os.getpid()}"
        join = Join(worker, role, place, nonce)
        welcome = await bus.request(names.join, join, Welcome, who="kernel", deadline_s=60)
        setting = Setting(bus, names, worker, role, nonce, welcome)
        # Before any library reads them: a worker started by hand has its threads too.
        os.environ |= thread_variables(resources_of(setting.composed.config, role))
        await bus.subscribe(names.beacon, Beacon, setting.hear)
        work = _role_work(role)(setting)
        ready = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_obey_signals, setting)
            tasks.start_soon(_watch_kernel, setting)
            tasks.start_soon(_beat, setting, work, ready)
            tasks.start_soon(work.run, ready.set)
            await setting.leave.wait()
            log.info("leaving", reason=setting.reason)
            _leave_for_certain()
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(1):
            await bus.publish(names.leaving, Leaving(worker, nonce, setting.reason))


def _leave_for_certain() -> None:
    """End the process even if something in it does not: a compute thread at a step of minutes, say."""
    watchdog = threading.Timer(_LEAVE_S, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()


def _role_work(role: Role) -> Callable[[Setting], RoleWork]:
    """The class of a role; only its own module is imported."""
    match role:
        case "trainer":
            from stretto.roles.trainer import TrainerWork

            return TrainerWork
        case "inference":
            from stretto.roles.inference import InferenceWork

            return InferenceWork
        case "rollout":
            from stretto.roles.rollout import RolloutWork

            return RolloutWork
        case "verifier":
            from stretto.roles.verifier import VerifierWork

            return VerifierWork


async def _obey_signals(setting: Setting) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            setting.go(f"asked by {signal.Signals(number).name}")


async def _watch_kernel(setting: Setting) -> None:
    """Leave by oneself when the kernel has been silent for the grace time."""
    while True:
        silent = time.monotonic() - setting.heard
        if silent > setting.grace_s:
            setting.go(f"no word from the kernel for {silent:.1f} s")
        await anyio.sleep(min(0.5, setting.grace_s / 4))


async def _beat(setting: Setting, work: RoleWork, ready: anyio.Event) -> None:
    """A heartbeat every second, and one at once when the role is ready."""
    while True:
        plain = Heartbeat(setting.worker, setting.nonce, ready=ready.is_set(), refused=setting.bus.refused)
        await setting.bus.publish(setting.names.heartbeat, work.beat(plain))
        with anyio.move_on_after(BEAT_S):
            await (anyio.sleep(BEAT_S) if ready.is_set() else ready.wait())


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
