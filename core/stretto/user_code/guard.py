"""A small process between a worker and a child process: nothing that the child starts outlives the child.

`guarded` returns the command that runs this file, which imports only the standard library: `guard.py PARENT
COMMAND…`. The guard leads a session of its own, and starts the child. On Linux it is the subreaper of the
child: it adopts every process that the child leaves behind, one with a session of its own too. It kills them
all when the child has ended, when it gets SIGTERM, and when the worker has ended, in whatever way. The guard
ends as the child ended: with the same exit status, or by the same signal.

On other systems the guard kills the child's process group, which processes can leave.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["guarded"]

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0
"""Seconds after which the guard leaves processes that it cannot kill: those of another user, or those that
hang in the kernel."""
_POLL_S = 0.005


def guarded(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` under a guard. Start it from the main thread of this process: the
    guard ends with the thread that started it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


# ------------------------------------------------------------------------------------------- process


def _main(parent: int, argv: list[str]) -> None:
    """Run the child until it ends or this process is asked to end. It does not return."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that started this one has gone")
    child = os.fork()
    if not child:
        _become(argv)
    _close_standard_files()
    code = _wait_for(child)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    _kill_children()
    _end_like(code)


def _become(argv: list[str]) -> None:
    """Body of the fork: run the child's program, in a process group of its own."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        os.write(2, f"{argv[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(127)


def _close_standard_files() -> None:
    """Leave the pipes to the child, so that the worker notices when the child has ended."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)


def _wait_for(child: int) -> int:
    """Wait for the end of the child, or until this process is asked to end. Return the exit status; negative
    for a signal."""
    while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        pid = -1
        while pid:  # collect adopted processes that have ended, too
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status)
    return -signal.SIGTERM


def _kill_children() -> None:
    """Kill the children, and their children once they are adopted, until none is left."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        try:
            collected, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not collected:
            for pid in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def _children() -> list[int]:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return []
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def _end_like(code: int) -> None:
    """End with an exit status, or by a signal if it is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.kill(os.getpid(), -code)  # Python ignores a few signals, such as SIGPIPE
    os._exit(128 - code if code < 0 else code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
