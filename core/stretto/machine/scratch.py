"""A folder that is removed when its owner has ended, even if the owner is killed."""

from __future__ import annotations

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
    """Make a folder for the block; another process removes it, even if this one is killed. Yield it with a
    file descriptor: the folder stays while any process has it open, as forks do."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", _REMOVE, folder]
    quiet = subprocess.DEVNULL
    # In a session of its own, no Ctrl-C reaches it.
    remover = subprocess.Popen(command, stdin=reading, stdout=quiet, stderr=quiet, start_new_session=True)
    os.close(reading)
    try:
        yield Path(folder), writing
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writing)
        remover.kill()
        remover.wait()
