"""The end of a run: the status and reason with which it ends, and the signals that end it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import anyio
import structlog

from stretto.records.status import State

log = structlog.get_logger()


class Ending:
    """The end of one kernel. Only the first final status and its reason count."""

    def __init__(self) -> None:
        self.status: State = "running"
        self.reason = ""
        self.over = anyio.Event()
        """Set when the run has ended. The kernel then dismisses the workers."""
        self.drain_requested = anyio.Event()
        self.drain_status: State = "running"
        """Status of the run after the drain. `drain_reason` is the reason of that status."""
        self.drain_reason = ""
        self._interruptions = 0
        self.forced = False
        """Whether the kernel stops the workers without giving them time to leave."""
        self.replaced = False
        """Whether another kernel owns the run now. This kernel then changes no file of the run any more."""

    def end(self, status: State, reason: str) -> None:
        if self.status == "running":
            self.status, self.reason = status, reason
        self.over.set()

    def drain(self, status: State, reason: str) -> None:
        """Ask the kernel to finish the step, write a checkpoint and end the run. With the status `repeated`
        another kernel continues the run; a later call with another status replaces `repeated`."""
        if self.status == "repeated":
            self.status, self.reason = status, reason
        elif not self.drain_requested.is_set() or self.drain_status == "repeated":
            self.drain_status, self.drain_reason = status, reason
            self.drain_requested.set()

    def interrupt(self, signals: Sequence[str]) -> None:
        """Drain the run at the first signal and end it at once at the second. `signals` are all so far."""
        for name in signals[self._interruptions :]:
            self._interruptions += 1
            if self._interruptions > 1:
                log.warning("interrupted again: ending at once", signal=name)
                self.forced = True
                self.end("interrupted", f"{name}, twice")
            else:
                log.warning("interrupted: ending after the step under way and a checkpoint", signal=name)
                self.drain("interrupted", name)


class Interruptions:
    """The signals that end a run. A later kernel of the run in this process also obeys earlier signals."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self._former: dict[signal.Signals, Any] = {}
        self._obey: Callable[[], object] | None = None

    @property
    def obeyed(self) -> bool:
        """Whether a kernel obeys the signals now."""
        return self._obey is not None

    def __enter__(self) -> Interruptions:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def hold(self) -> None:
        """Install signal handlers, before the first kernel begins. Until then a signal ends the process."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it stays ignored
            numbers.append(signal.SIGHUP)
        for number in numbers:
            if number not in self._former:
                self._former[number] = signal.signal(number, self.receive)

    @contextmanager
    def obeyed_by(self, ending: Ending) -> Generator[None]:
        """Pass all signals, including earlier ones, to one kernel during the block."""
        loop = asyncio.get_running_loop()
        self._obey = lambda: loop.call_soon_threadsafe(ending.interrupt, self.received)
        ending.interrupt(self.received)
        try:
            yield
        finally:
            self._obey = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Record a signal and pass it to the kernel. Without a kernel, the second signal ends the process."""
        del frame
        self.received.append(signal.Signals(number).name)
        if self._obey is not None:
            self._obey()
        elif len(self.received) > 1:  # no kernel can end the run in order
            self.__exit__()
            signal.raise_signal(number)
