"""A folder that is removed when the process that made it ends, even if that process is killed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["scratch_folder"]

_REMOVE = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Generator[tuple[Path, int]]:
    """Make a folder for the block. Another process removes the folder, even if this process is killed. Yield
    the folder and a file descriptor: the folder stays while any process, such as a fork, has it open."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", _REMOVE, folder]
    quiet = subprocess.DEVNULL
    # Ctrl-C does not reach the remover, because it has a session of its own.
    remover = subprocess.Popen(command, stdin=reading, stdout=quiet, stderr=quiet, start_new_session=True)
    os.close(reading)
    try:
        yield Path(folder), writing
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writing)
        remover.kill()
        remover.wait()
