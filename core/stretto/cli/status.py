"""`stretto status`: what a run does now, from its folder alone, even if its kernel hangs."""

from __future__ import annotations

import time
from pathlib import Path

from stretto.bus.guard import is_locked
from stretto.errors import ConfigError, printable
from stretto.records.status import STATUS, read_status, standstill

__all__ = ["status_lines"]


def status_lines(folder: Path) -> list[str]:
    """Describe the state of the run in `folder`.

    Raises:
        ConfigError: if the folder holds no status.
    """
    status = read_status(folder)
    if status is None:
        raise ConfigError(f"{folder} has no {STATUS}: it holds no run, or the run has not started")
    lines = [printable(f"step {status.version} of {status.steps}, {status.now}")]
    if status.bottleneck:
        lines.append(printable(f"bottleneck {status.bottleneck}"))
    age_s = time.time() - status.written
    lock = folder / "bus" / "kernel.lock"
    if not is_locked(lock):
        return [*lines, f"no kernel owns the run; this was its state {age_s:.0f} s ago"]
    if not lock.read_text().startswith(f"pid {status.pid},"):
        return [*lines, f"this was the state of a former kernel, {age_s:.0f} s ago; another one is starting"]
    if remark := standstill(status):
        lines.append(remark)
    if not status.connected:
        lines.append("the kernel has no connection to nats-server")
    if status.metrics_url:
        lines.append(printable(f"figures for Prometheus: {status.metrics_url}"))
    for worker in status.workers:
        state = "ready" if worker.ready else status.starting.get(worker.worker, "not ready")
        blocked = f", its event loop stands still for {worker.blocked_s:.0f} s" if worker.blocked_s else ""
        lines.append(printable(f"{worker.worker}: {state}, heard {worker.silent_s:.0f} s ago{blocked}"))
    return [*lines, *(printable(str(stall)) for stall in status.waits)]
