"""A small process between an inference worker and its server: no process of the server outlives the worker.

The worker runs this file, which imports only the standard library: `guard.py GRACE_S COMMAND…`. The worker
holds the other end of the guard's standard input until it ends, in whatever way. Servers start processes that
survive when the server is killed. The guard is their subreaper: it adopts them, and kills them all when the
server has ended or the worker has closed standard input. The guard's exit status is the server's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _children() -> list[int]:
    """Return the processes whose parent is the guard: the server, and adopted processes, whose parents have
    ended."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return []
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def _tracks(pid: int) -> bool:
    """Return whether a process is Python's resource tracker, which removes shared memory left by others."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill_all() -> None:
    """Kill the children, and their children once they are adopted, until none is left. Resource trackers get
    one second to clean up."""
    deadline = time.monotonic() + 1
    while True:
        for pid in _children():
            if time.monotonic() > deadline or not _tracks(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            reaped_pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not reaped_pid:
            time.sleep(_POLL_S / 4)


def main(grace_s: float, command: list[str]) -> int:
    """Run the server until it ends by itself or standard input is closed. Return the exit status."""
    # Ignore signals, which may go to the whole session: the worker closes standard input to stop the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", flush=True)
        return 127
    keep_running = True
    while keep_running and server.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        keep_running = not (readable and not os.read(sys.stdin.fileno(), 4096))
    if server.poll() is None:
        server.terminate()
        deadline = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    status = server.poll()
    _kill_all()
    return 128 + signal.SIGKILL if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
