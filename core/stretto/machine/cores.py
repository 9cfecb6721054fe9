"""The processor cores and the memory that this process and its children may use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["CoreMeter", "CoreUse", "available_cores", "available_memory"]

_LIST_S = 5.0
"""Look for new processes this often: a machine may have thousands."""


def available_cores() -> float:
    """Return the number of cores that this process may use: a fraction, if a container has a limit."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = _quota()
    return cores if quota is None else min(cores, quota)


def available_memory() -> int:
    """Return the bytes of memory that processes here may take: the machine's, or a container's."""
    return min([psutil.virtual_memory().total, *memory_limits()])


def memory_limits(
    groups_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the limits of the control groups that this process is in, of both versions of the interface."""
    try:
        groups = groups_file.read_text().splitlines()
    except OSError:  # no Linux
        return
    for controllers, path in (group.split(":", 2)[1:] for group in groups):
        if controllers not in ("", "memory"):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / controllers / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root) and (limit := _number_in(each / name)) is not None:
                yield limit


def _number_in(file: Path) -> int | None:
    """Return the number that a file holds; None if it holds a word instead, such as max, or is not there."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


class CoreUse(NamedTuple):
    """Shares of the available cores over some time, from 0 to 1."""

    used: float
    """The share that this process and its descendants used."""
    idle: float
    """The share that no process used, and that a container's limit leaves."""


class CoreMeter:
    """Measures which shares of the available cores this process and its descendants use, and are idle."""

    def __init__(self) -> None:
        self._cores = available_cores()
        self._time = time.monotonic()
        self._idle_s = _idle_s()
        self._listed = 0.0
        self._processes: list[psutil.Process] = []
        self._seconds: dict[psutil.Process, float] = {}
        """Processor time of each process up to the last reading."""
        self.read()

    def read(self) -> CoreUse:
        """Return the mean shares since the last call. The system counts in hundredths of a second."""
        now, before = time.monotonic(), self._seconds
        if now - self._listed > _LIST_S:
            own = psutil.Process()
            self._listed, self._processes = now, [own, *own.children(recursive=True)]
        self._seconds = {
            process: _seconds_of(process, before.get(process, 0.0)) for process in self._processes
        }
        used_s = sum(seconds - before.get(process, 0.0) for process, seconds in self._seconds.items())
        idle_s, idle_before = _idle_s(), self._idle_s
        core_s = max(1e-9, (now - self._time) * self._cores)
        self._time, self._idle_s = now, idle_s
        used, idle = min(1.0, used_s / core_s), max(0.0, (idle_s - idle_before) / core_s)
        return CoreUse(used, min(1.0 - used, idle))


def _idle_s() -> float:
    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    return sum(cores[core].idle + getattr(cores[core], "iowait", 0.0) for core in usable if core < len(cores))


def _seconds_of(process: psutil.Process, before: float) -> float:
    """Return the processor time of a process so far; if it has ended, that of the reading before."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return before
    return times.user + times.system


def _quota() -> float | None:
    """Return the cores' worth of processor time that a container may use; None without a limit."""
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):  # no control groups of version 2
        return None
