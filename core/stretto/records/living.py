"""The list of a user's runs that live on this machine: one small file for each, in the user's state folder.

A file has only the path of a run's folder. The run lives if its lock is held (`stretto.bus.guard.is_locked`).
"""

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from stretto.bus.guard import is_locked

log = structlog.get_logger()


@contextmanager
def listed(folder: Path) -> Generator[None]:
    """List a run that this process owns during the block. If the home cannot be written, log the error."""
    path = str(folder.resolve())
    try:
        list_folder = _place()
        list_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = list_folder / hashlib.sha256(path.encode()).hexdigest()[:16]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(file, flags, 0o600), "w") as opened:
            opened.write(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.info("the run is not in the list of living runs", error=str(error))
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def living() -> list[Path]:
    """Return the folders of the listed runs that live. Remove the files that killed kernels have left."""
    folders: list[Path] = []
    try:
        files = sorted(_place().iterdir())
    except (OSError, RuntimeError):  # no run was ever listed
        return []
    for file in files:
        with suppress(OSError):  # the file's run ends at this moment
            folder = Path(file.read_text())
            if is_locked(folder / "bus" / "kernel.lock"):
                folders.append(folder)
            else:
                file.unlink()
    return sorted(folders)


def _place() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "stretto" / "runs"
