"""Open the files of a run's folder. Another user may have written them."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

REPLAY = "replay.json"
"""File in the folder of a replay: the replayed run, and how the replay compares with it."""


def open_record(file: Path, *, links: bool = True) -> BufferedReader:
    """Open a regular file, or with `links` a link to one. OSError for other files: a pipe would block."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(file, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def read_record(file: Path) -> bytes:
    """Return the content of a file; see `open_record`."""
    with open_record(file) as opened:
        return opened.read()
