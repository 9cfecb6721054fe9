"""How a run ends: asked for by a signal, by the scheduler, or by a worker that is lost."""

from __future__ import annotations

import signal

import anyio
import structlog
from anyio.abc import TaskStatus

from stretto.kernel.report import Status

__all__ = ["Ending"]

log = structlog.get_logger()


class Ending:
    """The end of one kernel's life. The first status counts."""

    def __init__(self) -> None:
        self.status: Status = "running"
        self.reason = ""
        self.over = anyio.Event()
        """Set when the kernel is to dismiss the workers."""
        self.drain_requested = anyio.Event()
        self.drain_status: Status = "running"
        """With `drain_reason`: what the run ends with after a drain."""
        self.drain_reason = ""
        self.hurried = False
        """Workers get no time to leave by themselves."""
        self.next_values: int | None = None
        """Where the life only repeated the journal: number of the values that come next, if it knows."""

    def end(self, status: Status, reason: str) -> None:
        """End the run at once."""
        if self.status == "running":
            self.status, self.reason = status, reason
        self.over.set()

    def drain(self, status: Status, reason: str) -> None:
        """Ask the kernel to finish the step under way, to write a checkpoint, and then to end the run."""
        if not self.drain_requested.is_set():
            self.drain_status, self.drain_reason = status, reason
            self.drain_requested.set()

    async def obey_signals(self, *, task_status: TaskStatus[None]) -> None:
        """Drain at the first signal, end at once at the second."""
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            signals.append(signal.SIGHUP)
        interrupted = False
        with anyio.open_signal_receiver(*signals) as received:
            task_status.started()
            async for number in received:
                name = signal.Signals(number).name
                if interrupted:
                    log.warning("interrupted again: ending at once", signal=name)
                    self.hurried = True
                    self.end("interrupted", f"{name}, twice")
                else:
                    log.warning("interrupted: the step under way, a checkpoint, then the end", signal=name)
                    interrupted = True
                    self.drain("interrupted", name)
