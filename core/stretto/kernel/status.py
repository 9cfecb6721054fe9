"""The state of a run in a file, for `stretto status`: what it does now, and who waits for whom since when.

The kernel writes `status.json` every few seconds. The file can be read while the kernel hangs: its age then
says since when.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages import Wait
from stretto.kernel.setup import RunSetup

__all__ = ["FILE", "Stall", "Status", "WorkerStatus", "keep_status"]

log = structlog.get_logger()

FILE = "status.json"
_WRITE_S = 2.0
_LONG_S = 60.0
"""Log a wait after this many seconds, and again each time its length has doubled."""


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
    wait: Wait

    def __str__(self) -> str:
        return f"{self.asker} waits for {self.wait.who} ({self.wait.verb}) since {self.wait.seconds:.0f} s"


class Status(msgspec.Struct, frozen=True):
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


async def keep_status(setup: RunSetup, bus: Bus) -> None:
    """Write the file every few seconds, and log long waits, until cancelled."""
    next_log_s: dict[tuple[str, str, str], float] = {}
    complaint = ""
    while True:
        status = _status(setup, bus)
        try:
            _write(setup.folder / FILE, status)
        except OSError as error:  # the run itself can do without the file
            if str(error) != complaint:
                complaint = str(error)
                log.warning("status not written", error=complaint)
        present = {(each.asker, each.wait.who, each.wait.verb): each for each in status.waits}
        next_log_s = {key: due for key, due in next_log_s.items() if key in present}
        for key, each in present.items():
            if each.wait.seconds >= next_log_s.get(key, _LONG_S):
                next_log_s[key] = 2 * each.wait.seconds
                log.warning("long wait", asker=key[0], who=key[1], verb=key[2], seconds=each.wait.seconds)
        await anyio.sleep(_WRITE_S)


def _status(setup: RunSetup, bus: Bus) -> Status:
    fleet, scheduler, now = setup.fleet, setup.scheduler, time.monotonic()
    waits = [Stall(member.worker, member.wait) for member in fleet.members.values() if member.wait]
    if own := bus.longest_wait():
        waits.append(Stall("kernel", own))
    return Status(
        written=time.time(),
        pid=os.getpid(),
        version=scheduler.version,
        steps=setup.config.steps,
        now=" ".join(setup.view.state()),
        connected=bus.connected,
        workers=[
            WorkerStatus(member.worker, member.ready, now - member.heard, member.blocked_s)
            for member in fleet.members.values()
        ],
        starting=dict(fleet.starting),
        waits=sorted(waits, key=lambda each: -each.wait.seconds),
    )


def _write(path: Path, status: Status) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(msgspec.json.encode(status))
    aside.rename(path)
