"""The processor cores that this process and its children may use, and how busy they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

__all__ = ["CoreMeter", "available_cores"]

_GROUP = Path("/sys/fs/cgroup")
"""The control group of a container, as the container sees it. It may limit processor time, not cores."""


def available_cores() -> float:
    """Return the number of cores that this process may use. A container's limit of processor time may make it
    a fraction."""
    cores = float(len(_core_numbers()))
    quota = _quota()
    return cores if quota is None else min(cores, quota)


class CoreMeter:
    """Measures which share of the available cores is busy.

    Counts all processes that use these cores, also those of other programs: a core that they use is not
    free. Under a container's limit of processor time it counts the container's processes.
    """

    def __init__(self) -> None:
        self._cores = available_cores()
        self._time, self._busy_s = time.monotonic(), self._busy()

    def read(self) -> float:
        """Return the mean share of the cores that was busy since the last call, from 0 to 1. Over less than a
        tenth of a second it is inexact, because the system counts in hundredths."""
        now, busy_s = time.monotonic(), self._busy()
        share = (busy_s - self._busy_s) / max(1e-9, (now - self._time) * self._cores)
        self._time, self._busy_s = now, busy_s
        return min(1.0, max(0.0, share))

    def _busy(self) -> float:
        """Return the seconds of work of all available cores since some time in the past."""
        cores = _core_numbers()
        if self._cores < len(cores):
            figures = dict(line.split() for line in (_GROUP / "cpu.stat").read_text().splitlines())
            return int(figures["usage_usec"]) / 1e6
        every = psutil.cpu_times(percpu=True)
        times = [every[core] for core in cores if core < len(every)]
        return sum(sum(each[:8]) - each.idle - getattr(each, "iowait", 0.0) for each in times)


def _core_numbers() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota() -> float | None:
    """Return the cores' worth of processor time that the control group allows; None if it sets no limit."""
    try:
        allowed, period = (_GROUP / "cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):  # no control groups of version 2
        return None
