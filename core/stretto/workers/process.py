"""The process of a worker, as the worker uses it. Simulations replace it by a simulated process."""

import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import anyio
from anyio.from_thread import start_blocking_portal

from stretto.bus.messages.membership import Heartbeat
from stretto.bus.server import Bootstrap
from stretto.launcher import Resources, Role, thread_variables
from stretto.workers.heartbeats import Heartbeats
from stretto.workers.scoring.child_pool import ChildPool, Program


class HostProcess:
    """The real process of a worker."""

    @property
    def place(self) -> str:
        """The host and the process id, for people."""
        return f"{socket.gethostname()} pid {os.getpid()}"

    @contextmanager
    def heartbeats(self, bootstrap: Bootstrap, role: Role, first: Heartbeat) -> Generator[Heartbeats]:
        """Send a heartbeat every second for the duration of the block: `first`, until the first `update`."""
        beats = Heartbeats(bootstrap, role, first)
        with start_blocking_portal(name="heartbeats") as portal:
            sending = portal.start_task_soon(beats.send)
            try:
                yield beats
            finally:
                sending.cancel()

    def signals(self) -> AbstractContextManager[AsyncIterator[signal.Signals]]:
        """Receive SIGTERM and SIGINT during the block."""
        return anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT)

    def limit_threads(self, resources: Resources) -> None:
        """Set how many threads libraries may start. Called before libraries read these variables."""
        os.environ |= thread_variables(resources)

    def executor(self, name: str) -> Executor:
        """Start a thread that computes."""
        return ThreadPoolExecutor(1, name)

    def children(self, program: Program, count: int) -> ChildPool:
        """Return a pool of processes that answer questions."""
        return ChildPool(program, count)

    def end_after(self, seconds: float) -> None:
        """End the process after this time, if it still runs."""
        watchdog = threading.Timer(seconds, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()
