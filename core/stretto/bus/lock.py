"""The run's lock. It tells a dead kernel (free) from a dead bus or a kernel that stands still (held)."""

from __future__ import annotations

import fcntl
import socket
import time
from pathlib import Path
from typing import IO

import msgspec

from stretto.bus.guard import is_locked
from stretto.machine import clock

_RETRY_S = 0.01
"""Seconds between attempts. A process that only tests the lock holds it for less time than this."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def await_lock(path: Path, limit_s: float = 1.0) -> IO[str]:
    """Lock a file until it is closed. Raise BlockingIOError if another process holds it beyond `limit_s`."""
    file = path.open("a+")
    deadline = clock.now() + limit_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now() > deadline:
                file.close()
                raise
            time.sleep(_RETRY_S)
        else:
            return file


class KernelLock(msgspec.Struct, frozen=True, array_like=True):
    """The lock of one kernel."""

    path: str
    owner: str
    """The text in the lock file; a later kernel of the run writes another one."""
    machine: str
    """The kernel's machine. A shared folder does not always show the locks of other machines."""

    @classmethod
    def of(cls, folder: Path) -> KernelLock:
        """Return the lock of the run whose bus folder is `folder`, as a kernel on this machine holds it."""
        path = folder / "kernel.lock"
        return cls(str(path), path.read_text(), _machine())

    @property
    def visible(self) -> bool:
        """Whether this process can see who holds the lock: on the kernel's machine, with its files."""
        return self.machine == _machine() and Path(self.path).exists()

    @property
    def folder_readable(self) -> bool:
        """Whether this process can read this kernel's lock file: the run's folder is local or shared."""
        try:
            return Path(self.path).read_text() == self.owner
        except OSError:
            return False

    def is_held(self) -> bool:
        """Return whether this kernel still holds the lock. A lock that is not visible counts as free."""
        path = Path(self.path)
        try:
            return path.read_text() == self.owner and is_locked(path)
        except FileNotFoundError:
            return False


def _machine() -> str:
    """Return an id of this machine: on Linux the id of its last start, elsewhere its host name."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
