"""What a worker uses of the process that it runs in. A simulated process takes its place in simulations."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager

import anyio

from stretto.bus.messages.membership import Heartbeat
from stretto.bus.server import Bootstrap
from stretto.launcher import Resources, Role, thread_variables
from stretto.workers.heartbeats import Heartbeats, heartbeats
from stretto.workers.scoring.child_pool import ChildPool, Program


class HostProcess:
    """This process, as the one of a worker."""

    @property
    def place(self) -> str:
        """The host and the process id, for people."""
        return f"{socket.gethostname()} pid {os.getpid()}"

    def heartbeats(
        self, bootstrap: Bootstrap, role: Role, first: Heartbeat
    ) -> AbstractContextManager[Heartbeats]:
        """Send heartbeats for the duration of the block, even while the event loop stands still."""
        return heartbeats(bootstrap, role, first)

    def signals(self) -> AbstractContextManager[AsyncIterator[signal.Signals]]:
        """Receive SIGTERM and SIGINT during the block."""
        return anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT)

    def limit_threads(self, resources: Resources) -> None:
        """Tell libraries, which have not read it yet, how many threads they may start."""
        os.environ |= thread_variables(resources)

    def executor(self, name: str) -> Executor:
        """Start a thread that computes."""
        return ThreadPoolExecutor(1, name)

    def children(self, program: Program, count: int) -> ChildPool:
        """Return a pool of processes that answer questions."""
        return ChildPool(program, count)

    def end_after(self, seconds: float) -> None:
        """End the process then, if it has not ended before."""
        watchdog = threading.Timer(seconds, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()
