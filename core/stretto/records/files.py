"""Open the files of a run's folder, which somebody else may have written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

REPLAY = "replay.json"
"""File in the folder of a replay: where it came from, and how it compares."""


def open_record(file: Path, *, links: bool = True) -> BinaryIO:
    """Open a regular file, or with `links` a link to one. Others are an OSError: a pipe would block."""
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
