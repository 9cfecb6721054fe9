"""Writes the state of a run into `status.json` every few seconds (see `stretto.records.status`)."""

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
from stretto.records.status import STATUS, Stall, Status, WorkerStatus

__all__ = ["keep_status"]

log = structlog.get_logger()

_WRITE_S = 2.0
_LONG_S = 60.0
"""Log a wait after this many seconds, and again each time its length has doubled."""


async def keep_status(setup: RunSetup, bus: Bus) -> None:
    """Write the file every few seconds, and log long waits, until cancelled."""
    next_log_s: dict[tuple[str, str, str], float] = {}
    complaint = ""
    while True:
        status = _status(setup, bus)
        try:
            _write(setup.folder / STATUS, status)
        except OSError as error:  # the run itself can do without the file
            if str(error) != complaint:
                complaint = str(error)
                log.warning("status not written", error=complaint)
        present = {(each.asker, each.who, each.verb): each for each in status.waits}
        next_log_s = {key: due for key, due in next_log_s.items() if key in present}
        for key, each in present.items():
            if each.seconds >= next_log_s.get(key, _LONG_S):
                next_log_s[key] = 2 * each.seconds
                log.warning("long wait", asker=key[0], who=key[1], verb=key[2], seconds=each.seconds)
        await anyio.sleep(_WRITE_S)


def _status(setup: RunSetup, bus: Bus) -> Status:
    fleet, scheduler, now = setup.fleet, setup.scheduler, time.monotonic()
    waits = [_stall(member.worker, member.wait) for member in fleet.members.values() if member.wait]
    if own := bus.longest_wait():
        waits.append(_stall("kernel", own))
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
        waits=sorted(waits, key=lambda each: -each.seconds),
    )


def _stall(asker: str, wait: Wait) -> Stall:
    return Stall(asker, wait.who, wait.verb, wait.seconds)


def _write(path: Path, status: Status) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(msgspec.json.encode(status))
    aside.rename(path)
