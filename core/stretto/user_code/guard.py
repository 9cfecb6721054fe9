"""A small process between a worker and a child process: nothing that the child starts outlives the child.

`guard.py PARENT GRACE_S COMMAND…` imports only the standard library. The guard is the child's
subreaper, which adopts processes that the child leaves, even with a session of their own. The guard kills
all of them when the child or the worker has ended, or at SIGTERM; a running child first gets SIGTERM and
GRACE_S seconds. The guard ends as the child ended: same exit status or signal.

If the guard is killed, Linux kills the child, but not the child's own children.
"""

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

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TASKS = Path("/proc/self/task")
_END_S = 30.0
"""Seconds until the guard gives up processes that it cannot kill: another user's, or hung in the kernel."""
_TRACKER_S = 1.0
"""Seconds for Python's resource trackers to remove shared memory, if GRACE_S is not 0."""
_LOOK_S = 1.0
"""Seconds between checks that the worker runs, for systems that send no signal at the worker's end."""
_POLL_S = 0.005  # while processes end


def guarded(argv: Sequence[str], grace_s: float = 0.0) -> list[str]:
    """Return the command that runs `argv` under a guard, with `grace_s` seconds from SIGTERM to SIGKILL.

    Start it from the main thread: the guard ends with the thread that started it.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(grace_s), *argv]


def end_with_parent(number: int) -> None:
    """Have the system send this process a signal when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans(is_on: bool) -> None:
    """Have the system make orphaned descendants this process's children ("subreaper"), or not."""
    _prctl(_PR_SET_CHILD_SUBREAPER, is_on)


def _main(parent: int, grace_s: float, argv: list[str]) -> None:
    """Run the child until it ends or this process is asked to end. It does not return."""
    if os.getsid(0) != os.getpid():  # it may have been started as the leader of one
        os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the child
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    adopt_orphans(True)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that started this one has gone")
    child = os.fork()
    if not child:
        _become(argv)
    _close_standard_files()
    code = _wait_for(child, parent, grace_s)
    if not grace_s:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    _kill_children()
    _end_like(code)


def _become(argv: list[str]) -> None:
    """Body of the fork: run the child's program, in a process group of its own."""
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)
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


def _wait_for(child: int, parent: int, grace_s: float) -> int:
    """Wait for the end of the child, or of its time. Return the exit status; negative for a signal."""
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    deadline = 0.0
    while not deadline or time.monotonic() < deadline:
        number = signal.sigwait(_SIGNALS)
        if number == signal.SIGCHLD and (code := _collect(child)) is not None:
            return code
        if not deadline and (number == signal.SIGTERM or os.getppid() != parent):
            if not grace_s:
                return -signal.SIGTERM
            deadline = time.monotonic() + grace_s
            signal.setitimer(signal.ITIMER_REAL, _POLL_S, _POLL_S)
            os.kill(child, signal.SIGTERM)
    return -signal.SIGKILL


def _collect(child: int) -> int | None:
    """Collect ended processes, adopted ones too. Return how the child ended, if it has."""
    pid = -1
    while pid:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
    return None


def _kill_children() -> None:
    """Kill the children, and their children once they are adopted, until none is left."""
    start = time.monotonic()
    while (elapsed_s := time.monotonic() - start) < _END_S:
        try:
            collected, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not collected:
            for pid in _children():
                if elapsed_s > _TRACKER_S or not _is_tracker(pid):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def _children() -> list[int]:
    return [int(pid) for task in _TASKS.iterdir() for pid in (task / "children").read_text().split()]


def _is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker of Python, which ends after all its users."""
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _end_like(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])  # other signals may be pending
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
