"""A small process between the kernel and the nats-server. It stops the server when the kernel is gone.

`guard.py NATS_SERVER CONFIGURATION LOCK GRACE_S CLEANER ...` uses only the standard library. A kernel, or a
supervisor that will start the next kernel, locks LOCK. After GRACE_S seconds without a lock, the guard stops
the server, and CLEANER removes what killed processes left. The guard restarts a server that has ended, with
the same store; the kernel restarts the guard.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

SUPERVISOR_LOCK = "supervisor.lock"
_POLL_S = 0.25
_CLEANER_S = 120.0
"""A cleaner that hangs must not keep the guard for ever."""
_PR_SET_PDEATHSIG = 1


def is_locked(lock: Path) -> bool:
    """Return whether a process holds the lock. The test takes the lock for an instant; kernels retry."""
    try:
        file = os.fdopen(os.open(lock, os.O_RDONLY | os.O_NONBLOCK))  # opening a pipe would block
    except FileNotFoundError:  # the run's folder was removed
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def has_owner(lock: Path) -> bool:
    """Return whether some kernel holds the lock, or a supervisor will start one."""
    return is_locked(lock) or is_locked(lock.with_name(SUPERVISOR_LOCK))


def folder_id(folder: Path) -> str:
    """Return an id that a renamed folder keeps, and that a copy of the folder does not have."""
    status = folder.stat()
    return f"{status.st_dev}:{status.st_ino}"


def _start(server: str, configuration: str) -> subprocess.Popen[bytes]:
    def die_with_guard() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # With Go's default of 100, garbage of large messages doubles the server's memory.
    environment = {"GOGC": "40", **os.environ}
    return subprocess.Popen([server, "-c", configuration], preexec_fn=die_with_guard, env=environment)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _end_former(pid_file: Path, configuration: str) -> None:
    """Kill the server of a killed guard. On Linux the server has died together with the guard."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):  # that server ended properly, or never wrote the file
        return
    listing = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, check=False)
    if configuration.encode() in listing.stdout:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(binary: str, configuration: str, lock: Path, grace_s: float, cleaner: list[str]) -> None:
    """Run the server until a signal or `grace_s` without a kernel. Run `cleaner` if there was no signal."""
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    pid_file = lock.with_name("guard.pid")
    pid_file.write_text(f"{os.getpid()} {folder_id(lock.parent)}")
    _end_former(lock.with_name("nats.pid"), configuration)
    server = _start(binary, configuration)
    last_locked = time.monotonic()
    while not signals and time.monotonic() - last_locked <= grace_s:
        time.sleep(_POLL_S)
        if has_owner(lock):
            last_locked = time.monotonic()
        if server.poll() is not None:
            print(f"nats-server ended with status {server.returncode}; starting it again", flush=True)
            time.sleep(_POLL_S)  # a server that cannot start must not keep the guard busy
            server = _start(binary, configuration)
    _end(server)
    pid_file.unlink(missing_ok=True)
    if cleaner and not signals:
        subprocess.run(cleaner, stdin=subprocess.DEVNULL, timeout=_CLEANER_S, check=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
