"""`stretto run --detach`: a run in the background, in a session of its own, that outlives the terminal."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stretto.cli.start.folders import OUTPUT
from stretto.errors import ConfigError, RunError
from stretto.machine import clock
from stretto.machine.child_process import start_apart
from stretto.records.status import read_status

_LOOK_S = 0.2  # a run takes some seconds until it trains
_TAIL_BYTES = 4000


def run_detached(arguments: Sequence[str], folder: Path) -> int:
    """Start a command that owns the run in a folder, wait until the run trains, and return the process id."""
    output, began = folder / OUTPUT, clock.wall()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        start = output.stat().st_size if output.exists() else 0
        process = start_apart([sys.executable, "-m", "stretto", *arguments], output)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {folder}: {error}", path="out") from error
    while not _trains(folder, began):
        if (status := process.poll()) is not None:
            if status == 0:  # the run has ended already
                break
            raise RunError(_failure(folder, start, status))
        time.sleep(_LOOK_S)
    return process.pid


def _trains(folder: Path, began: float) -> bool:
    status = read_status(folder)
    return status is not None and status.written >= began and status.started


def _failure(folder: Path, start: int, status: int) -> str:
    """Return why a run did not start. Remove the run's folder if it has no other files."""
    output = folder / OUTPUT
    with output.open("rb") as file:
        file.seek(start)
        printed = file.read()[-_TAIL_BYTES:].decode(errors="replace").strip()
    if not (folder / "config.yaml").exists():
        output.unlink()
        for path in (folder / "bus" / "kernel.lock", folder / "bus", folder):
            with suppress(OSError):  # a folder has other files
                path.unlink() if path.is_file() else path.rmdir()
    reasons = "\n".join(line.removeprefix("error: ") for line in printed.splitlines())
    return f"the run did not start (exit status {status}):\n{reasons}"
