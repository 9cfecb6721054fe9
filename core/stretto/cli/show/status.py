"""`stretto status`: describe a run, from its folder, even if its kernel hangs, or over the bus."""

import time
from pathlib import Path

import anyio
import msgspec

from stretto.bus.client import connect
from stretto.bus.guard import is_locked
from stretto.bus.messages.membership import RunStatus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.errors import ConfigError, NoAnswer, printable
from stretto.records import status as status_file


def status_lines(folder: Path) -> list[str]:
    """Describe the state of the run in `folder`."""
    status = status_file.read_status(folder)
    if status is None:
        raise ConfigError(
            f"{folder} has no {status_file.STATUS}: it holds no run, or the run has not started"
        )
    lines = _head(status)
    age_s = time.time() - status.written
    if not is_locked(folder / "bus" / "kernel.lock"):
        return [*lines, f"no kernel owns the run; this was its state {age_s:.0f} s ago"]
    remark = status_file.standstill(folder, status)
    if status_file.is_of_former_kernel(folder, status):
        return [*lines, remark]
    return [*lines, *([remark] if remark else []), *_details(status)]


def status_lines_over_bus(viewer: Bootstrap) -> list[str]:
    """Describe the state of a run whose kernel sends its status over the bus."""
    status = anyio.run(_receive_status, viewer)
    return [*_head(status), *_details(status)]


async def _receive_status(bootstrap: Bootstrap) -> status_file.Status:
    received: list[RunStatus] = []
    arrived = anyio.Event()

    def accept(message: RunStatus) -> None:
        received.append(message)
        arrived.set()

    subject = Subjects(bootstrap.run).status
    async with connect(bootstrap) as bus:
        await bus.subscribe(subject, RunStatus, accept)
        with anyio.move_on_after(status_file.LATE_S):
            await arrived.wait()
    if not received:
        raise NoAnswer("the kernel", subject, status_file.LATE_S)
    try:
        return status_file.decode_status(received[0].content)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the kernel sent what is not a status: {error}") from error


def _head(status: status_file.Status) -> list[str]:
    verdict = [status.verdict.text] if status.verdict is not None else []
    return [printable(text) for text in (f"step {status.version} of {status.steps}, {status.now}", *verdict)]


def _details(status: status_file.Status) -> list[str]:
    lines: list[str] = []
    if not status.connected:
        lines.append("the kernel has no connection to nats-server")
    if status.metrics_url:
        lines.append(printable(f"figures for Prometheus: {status.metrics_url}"))
    for worker in status.workers:
        ready = "leaving, with its work still to finish" if worker.leaving else "ready"
        state = ready if worker.ready else status.starting.get(worker.worker, "not ready")
        blocked = f", its event loop stands still for {worker.blocked_s:.0f} s" if worker.blocked_s else ""
        lines.append(printable(f"{worker.worker}: {state}, heard {worker.silent_s:.0f} s ago{blocked}"))
    return [*lines, *(printable(str(stall)) for stall in status.waits)]
