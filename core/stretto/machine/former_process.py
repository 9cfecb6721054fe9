"""A process that an earlier process of the run started, and that still runs after its parent's end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from signal import Signals

import anyio
import psutil

__all__ = ["UNKNOWN_STATUS", "FormerProcess"]

UNKNOWN_STATUS = 255
"""Stands for the exit status of a process that is no child: the system reports it only to the parent."""
_POLL_S = 0.2


class FormerProcess:
    """A process on this machine that this process did not start. Raises NoSuchProcess for an unused id."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.pid = pid
        self.created = _start_of(pid) or str(self._process.create_time())
        """Start time of the process. It tells the process apart from a later one with the same id."""

    @classmethod
    def find(cls, pid: int, created: str) -> FormerProcess | None:
        """Return the process with this id and this start time; None if it has ended."""
        with suppress(psutil.NoSuchProcess):
            process = cls(pid)
            if process.created == created and process.poll() is None:
                return process
        return None

    @property
    def command(self) -> list[str]:
        """Program and arguments; empty if the process has ended."""
        with suppress(psutil.NoSuchProcess):
            return self._process.cmdline()
        return []

    def poll(self) -> int | None:
        """Return None while the process runs, and `UNKNOWN_STATUS` when it has ended. A zombie has ended."""
        with suppress(psutil.NoSuchProcess):
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        return UNKNOWN_STATUS

    @property
    def stands_still(self) -> bool:
        """Whether a signal, such as SIGSTOP, has paused the process."""
        with suppress(psutil.NoSuchProcess):
            return self._process.status() == psutil.STATUS_STOPPED
        return False

    async def wait(self) -> int:
        """Wait until the process has ended, and return `UNKNOWN_STATUS`."""
        while self.poll() is None:
            await anyio.sleep(_POLL_S)
        return UNKNOWN_STATUS

    def send_signal(self, signal: Signals) -> None:
        """Send a signal. Do nothing if the process has ended."""
        with suppress(psutil.NoSuchProcess):
            self._process.send_signal(signal)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(Signals.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(Signals.SIGKILL)


def _start_of(pid: int) -> str:
    """Return the system's boot id and the clock tick at which a process started; empty without /proc. psutil
    computes a start time from the wall clock: after a change of that clock, `find` would find no process."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    return ""
