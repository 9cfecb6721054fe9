"""A small process between the kernel and the nats-server. It stops the server when the kernel is gone.

It runs as a file and uses only the standard library: `guard.py NATS_SERVER CONFIGURATION LOCK GRACE_S`.
The kernel holds a lock on the file LOCK during its whole life, and the system releases the lock however the
kernel ends. When nobody has held the lock for GRACE_S seconds, the guard stops the server. If a kernel takes
the lock within that time, the server keeps running. The guard restarts a server that ends unexpectedly, with
the same store.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


def _is_locked(lock: Path) -> bool:
    """Whether some kernel holds the lock. The guard takes the lock for an instant; kernels retry."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _start(server: str, configuration: str) -> subprocess.Popen[bytes]:
    def die_with_guard() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen([server, "-c", configuration], preexec_fn=die_with_guard)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def main(binary: str, configuration: str, lock: Path, grace_s: float) -> None:
    """Run the server until a signal asks the guard to stop, or until the kernel has been gone for
    `grace_s` seconds."""
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    pid_file = lock.with_name("guard.pid")
    pid_file.write_text(str(os.getpid()))
    server = _start(binary, configuration)
    last_locked = time.monotonic()
    while not signals and time.monotonic() - last_locked <= grace_s:
        time.sleep(_POLL_S)
        if _is_locked(lock):
            last_locked = time.monotonic()
        if server.poll() is not None:
            print(f"nats-server ended with status {server.returncode}; starting it again", flush=True)
            time.sleep(_POLL_S)  # a server that cannot start must not keep the guard busy
            server = _start(binary, configuration)
    _end(server)
    pid_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
