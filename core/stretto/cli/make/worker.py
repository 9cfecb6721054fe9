"""`stretto worker` starts a worker by hand. `stretto invite` writes the file with which a worker may join.
The worker has its own session, so that Ctrl-C reaches only this command. The command passes Ctrl-C on to the
worker, but not to the worker's children, which finish their work."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from stretto.assembly.worker_numbers import NUMBER_KEYS
from stretto.bus.joining import reserve_worker, write_bootstrap
from stretto.bus.server import VIEWER, Bootstrap
from stretto.errors import ConfigError


def work_by_hand(
    folder: Path | None, role: str, invitation: Path | None, *, url: str | None, credentials: str | None
) -> int:
    """Run a worker until it leaves: with the next free id of `role` in `folder`, or by an invitation."""
    options = [*(["--bus", url] if url else []), *(["--credentials", credentials] if credentials else [])]
    with _bootstrap_file(folder, role, invitation) as file:
        bootstrap = Bootstrap.read(file).reached(url, credentials)
        if not bootstrap.worker:
            raise ConfigError(f"{file} is no invitation of a worker; `stretto invite RUN rollout` writes one")
        print(
            f"{bootstrap.worker} joins {bootstrap.run} at {bootstrap.url}; Ctrl-C: it leaves", file=sys.stderr
        )
        return _run([sys.executable, "-m", "stretto.workers", str(file), "--by-hand", *options])


def invite_guest(folder: Path, guest: str) -> list[str]:
    """Write a guest's file (a role, a worker's id, or `viewer`), and return the command that uses it."""
    bus = folder / "bus"
    if guest == VIEWER:
        Bootstrap.read(bus / f"{VIEWER}.json")
        return ["stretto", "watch", str(bus / f"{VIEWER}.json")]
    file = reserve_worker(bus, _role(guest)) if guest.isalpha() else write_bootstrap(bus, guest)
    return [sys.executable, "-m", "stretto", "worker", "--invitation", str(file)]


def _role(name: str) -> str:
    if name not in NUMBER_KEYS:
        raise ConfigError(
            f"{name!r}: expected {', '.join(NUMBER_KEYS)}; ranks of trainers join only "
            "together: `stretto scale RUN training=2`"
        )
    return name


@contextmanager
def _bootstrap_file(folder: Path | None, role: str, invitation: Path | None) -> Generator[Path]:
    """Yield the worker's bootstrap file. If the file was written for this block, remove it at the end."""
    if invitation is not None:
        yield invitation
        return
    assert folder is not None
    file = reserve_worker(folder.absolute() / "bus", _role(role))
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _run(command: list[str]) -> int:
    """Run a command in its own session, pass signals on to it, and kill what is left of it at the end."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: int, frame: object) -> None:
        del frame
        with suppress(ProcessLookupError):
            process.send_signal(number)

    signal.signal(signal.SIGINT, pass_on)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: pass_on(signal.SIGTERM, frame))
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
