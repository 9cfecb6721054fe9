"""The state of a run in its file `status.json`: what it does now, and who waits for whom since when.

The kernel writes the file every few seconds. The file can be read while the kernel hangs: its age then says
since when.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.errors import ConfigError

__all__ = ["STATUS", "Stall", "Status", "WorkerStatus", "read_status"]

STATUS = "status.json"


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker that has joined."""

    worker: str
    ready: bool
    silent_s: float
    """Seconds since its last heartbeat."""
    blocked_s: float
    """Seconds for which its event loop has stood still."""


class Stall(msgspec.Struct, frozen=True):
    """A process that waits for the answer of another."""

    asker: str
    who: str
    """The process that has to answer."""
    verb: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.asker} waits for {self.who} ({self.verb}) since {self.seconds:.0f} s"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    written: float
    """Unix time."""
    pid: int
    """Process id of the kernel."""
    version: int
    steps: int
    now: str
    """What the run does, as in the live view."""
    connected: bool
    """Whether the kernel has a connection to nats-server."""
    workers: list[WorkerStatus]
    starting: dict[str, str]
    """Workers that are not ready, with their state."""
    waits: list[Stall]
    """The longest wait of each process, longest first."""


def read_status(folder: Path) -> Status | None:
    """Return the state of the run in `folder`; None if its kernel has not written one yet.

    Raises:
        ConfigError: if the file is not the status of a run.
    """
    file = folder / STATUS
    try:
        return msgspec.json.decode(file.read_bytes(), type=Status)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not the status of a run: {error}") from error
