"""The end of a run: the status and reason with which it ends, and the signals that end it."""

from __future__ import annotations

import signal

import anyio
import structlog
from anyio.abc import TaskStatus

from stretto.records.status import State

__all__ = ["Ending"]

log = structlog.get_logger()


class Ending:
    """The end of one kernel. Only the first status and its reason count."""

    def __init__(self) -> None:
        self.status: State = "running"
        self.reason = ""
        self.over = anyio.Event()
        """Set when the run has ended. The kernel then dismisses the workers."""
        self.drain_requested = anyio.Event()
        self.drain_status: State = "running"
        """Status of the run after the drain. `drain_reason` is the reason of that status."""
        self.drain_reason = ""
        self.hurried = False
        """Whether the kernel stops the workers without giving them time to leave."""
        self.next_values: int | None = None
        """If the kernel only repeats the journal: number of the values with which the journal continues. None
        if the journal records no later change, or none that still applies."""

    def end(self, status: State, reason: str) -> None:
        """End the run at once."""
        if self.status == "running":
            self.status, self.reason = status, reason
        self.over.set()

    def drain(self, status: State, reason: str) -> None:
        """Ask the kernel to finish the step under way, write a checkpoint, and end the run.

        With the status `repeated` another kernel goes on afterwards, unless the run is drained for good
        meanwhile.
        """
        if not self.drain_requested.is_set() or self.drain_status == "repeated":
            self.drain_status, self.drain_reason = status, reason
            self.drain_requested.set()

    async def obey_signals(self, *, task_status: TaskStatus[None]) -> None:
        """Drain the run at the first signal, and end it at once at the second."""
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it stays ignored
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
                    log.warning("interrupted: ending after the step under way and a checkpoint", signal=name)
                    interrupted = True
                    self.drain("interrupted", name)
