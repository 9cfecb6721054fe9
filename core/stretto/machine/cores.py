"""The processor cores and the memory that this process and its children may use."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["CoreMeter", "CoreUse", "MemoryKills", "available_cores", "available_memory"]

_WORKER = re.compile(r".*/([a-z]+)-[^/]*\.json")  # the last argument of a worker: its file
_LIST_S = 5.0
"""Time between two searches for child processes: each search reads all processes of the machine."""


def available_cores() -> float:
    """Return the number of cores that this process may use. The limit of a container may be a fraction."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _quota()
    return cores if quota is None else min(cores, quota)


def available_memory() -> int:
    """Return the bytes of memory that processes may use: the machine's, or a lower limit of a container."""
    return min([psutil.virtual_memory().total, *memory_limits()])


def memory_limits(
    groups_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the memory limits of this process's control groups, in version 1 or 2 of Linux's interface."""
    try:
        groups = groups_file.read_text().splitlines()
    except OSError:  # a system without control groups
        return
    for controllers, path in (group.split(":", 2)[1:] for group in groups):
        if controllers not in ("", "memory"):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = root / controllers / path.lstrip("/")
        for parent in (folder, *folder.parents):
            if parent.is_relative_to(root) and (limit := _number_in(parent / name)) is not None:
                yield limit


def _number_in(file: Path) -> int | None:
    """Return the number in a file; None if the file does not exist, or has a word such as `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


class MemoryKills:
    """Notices when the system kills a process because memory is full."""

    def __init__(self, counters: Path = Path("/proc/vmstat")) -> None:
        self._counters = counters
        self._seen = self._count()

    def more(self) -> bool:
        """Return whether the system has killed a process since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        try:
            return int(self._counters.read_text().partition("\noom_kill ")[2].split()[0])
        except (OSError, IndexError):  # a system that does not count them
            return 0


class CoreUse(NamedTuple):
    """Shares of the available cores during a period, and of memory at its end, from 0 to 1."""

    used: float
    """The share that this process and its descendants used."""
    idle: float
    """The share that no process of the machine used, at most the rest of this process's limit."""
    memory: float
    """The share of the machine's memory that its processes use."""
    of_roles: dict[str, float]
    """The parts of `used`: of the `kernel`, which is this process, `nats-server`, each role of workers with
    their children, and `other` processes."""


class CoreMeter:
    """Measures how much of the available cores this process and its descendants use, and how much is idle."""

    def __init__(self) -> None:
        self._cores = available_cores()
        self._time = time.monotonic()
        self._idle_s = _idle_s()
        self._listed = 0.0
        self._roles: dict[psutil.Process, str] = {}
        self._seconds: dict[psutil.Process, float] = {}
        """Processor time of each process up to the last reading."""
        self.read()
        self._listed = 0.0  # the next reading looks for children again: a run starts its workers meanwhile

    def read(self) -> CoreUse:
        """Return the mean shares since the last call. The system counts processor time in steps of 0.01 s."""
        now, before = time.monotonic(), self._seconds
        if now - self._listed > _LIST_S:
            self._listed, self._roles = now, _roles_of_family(psutil.Process())
        self._seconds = {process: _seconds_of(process, before.get(process, 0.0)) for process in self._roles}
        role_s = dict.fromkeys(self._roles.values(), 0.0)
        for process, role in self._roles.items():
            role_s[role] += self._seconds[process] - before.get(process, 0.0)
        idle_s, idle_before = _idle_s(), self._idle_s
        core_s = max(1e-9, (now - self._time) * self._cores)
        self._time, self._idle_s = now, idle_s
        used, idle = min(1.0, sum(role_s.values()) / core_s), max(0.0, (idle_s - idle_before) / core_s)
        of_roles = {role: seconds / core_s for role, seconds in role_s.items()}
        return CoreUse(used, min(1.0 - used, idle), psutil.virtual_memory().percent / 100, of_roles)


def _roles_of_family(kernel: psutil.Process) -> dict[psutil.Process, str]:
    """Return the role of a process and of each of its descendants."""
    roles, inherited = {kernel: "kernel"}, {kernel.pid: "other"}
    for process in kernel.children(recursive=True):  # each comes after its parent
        try:
            words = [word for word in process.cmdline() if word]  # a forked worker's has empty ones
            worker = _WORKER.fullmatch(words[-1]) if words else None
            role = "nats-server" if process.name() == "nats-server" else worker and worker[1]
            roles[process] = inherited[process.pid] = role or inherited[process.ppid()]
        except (psutil.Error, KeyError):  # it has ended, or its parent has
            continue
    return roles


def _idle_s() -> float:
    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0)
    return sum(cores[core].idle + cores[core].iowait for core in usable if core < len(cores))


def _seconds_of(process: psutil.Process, before: float) -> float:
    """Return the processor seconds of a process so far; `before`, the previous reading, if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return before
    return times.user + times.system


def _quota() -> float | None:
    """Return the number of cores that the container's limit allows, also a fraction; None without a limit."""
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):  # no control groups of version 2
        return None
