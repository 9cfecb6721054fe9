"""`--supervise`: a process that runs `stretto resume` whenever a run's kernel was killed by a signal that it
cannot handle, such as SIGKILL. It passes signals on to the kernel. After the first death it holds a lock, so
that the workers wait for the next kernel."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from stretto.bus.guard import SUPERVISOR_LOCK
from stretto.bus.lock import await_lock
from stretto.kernel.durable.changes import newest_values
from stretto.records.metrics_file import MetricsFile

_MOST_DEATHS = 3
"""After more deaths of kernels in a row without a new step, the supervisor gives up."""
_HANDED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_FROM_TERMINAL = 0x80
"""`si_code` of a signal from the system, such as Ctrl-C, which reaches all processes of the terminal."""


def supervise(
    arguments: Sequence[str], folder: Path, options: Sequence[str] = (), overrides: Sequence[str] = ()
) -> int:
    """Start a command of stretto that owns the run in a folder, and resume the run whenever its kernel is
    killed. Each command gets the overrides until they are in force: a kernel may be killed before that."""
    deaths, reached, lock, values = 0, _version(folder), None, newest_values(folder)
    while True:
        status, is_stopped = _run(arguments)
        if status >= 0 or is_stopped or not (folder / "config.yaml").exists():
            return status if status >= 0 else 128 - status
        version = _version(folder)
        deaths = 1 if version > reached else deaths + 1
        reached = version
        killed = f"the kernel was killed by {signal.Signals(-status).name} at version {version}"
        if deaths > _MOST_DEATHS:
            typer.echo(f"{killed}, {deaths} times without a new step: stretto resume {folder}", err=True)
            return 128 - status
        if lock is None:
            lock = await_lock(folder / "bus" / SUPERVISOR_LOCK)
        typer.echo(f"{killed}; the next one continues the run", err=True)
        pending = overrides if newest_values(folder) == values else ()
        arguments = ["resume", str(folder), *pending, *options]


def _run(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run a command to its end, and pass on this process's signals. Return the exit status, negative after
    a deadly signal, and whether signals arrived: they stop the run, even if they kill a starting kernel."""
    is_stopped = False
    waits_for = _HANDED_ON | {signal.SIGCHLD}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, waits_for)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto", *arguments],
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask),
        )
        while (status := process.poll()) is None:
            received = signal.sigwaitinfo(waits_for)
            if received.si_signo not in _HANDED_ON:
                continue
            is_stopped = True
            if received.si_code != _FROM_TERMINAL:
                process.send_signal(received.si_signo)
        return status, is_stopped
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _version(folder: Path) -> int:
    return max((line["step"] for line in MetricsFile(folder).read()), default=0)
