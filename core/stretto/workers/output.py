"""Limits the size of a worker's output file, which its children share. This needs no kernel."""

import fcntl
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

MAX_OUTPUT = 16 * 2**20
"""Maximum bytes of the file. A larger file is rotated: its end is kept as `NAME.1`, the file is emptied."""
_STDERR = 2
_LOOK_S = 0.5  # the file may be longer than `MAX_OUTPUT` by what is written in this time
_CHUNK = 2**16

_rotating = threading.Lock()


def limit_output() -> None:
    """Start a thread that rotates the file of standard error, if there is one, until the process ends."""

    def watch() -> None:
        while True:
            rotate_output()
            never.wait(_LOOK_S)

    never = threading.Event()
    threading.Thread(target=watch, name="output", daemon=True).start()


def rotate_output() -> None:
    """Rotate the file of standard error if it is too large. Nothing happens if standard error is no file, or
    a file that is not opened for appending: its writers would continue at their old place."""
    with _rotating:
        status = os.fstat(_STDERR)
        appending = fcntl.fcntl(_STDERR, fcntl.F_GETFL) & os.O_APPEND
        if status.st_size <= MAX_OUTPUT or not stat.S_ISREG(status.st_mode) or not appending:
            return
        # Other processes have the file open too, such as servers: so the file stays, and is emptied. Lines
        # that they write meanwhile are lost.
        with suppress(OSError):  # if the disk is full: free space matters more than the old output
            _keep_end(status.st_size)
        os.ftruncate(_STDERR, 0)


def _keep_end(size: int) -> None:
    """Copy the end of the file to `NAME.1` beside it."""
    file = Path(f"/proc/self/fd/{_STDERR}").resolve()
    rotated = file.with_name(f"{file.name}.1")
    with file.open("rb") as source, rotated.open("wb") as target:
        source.seek(max(0, size - MAX_OUTPUT))
        bytes_left = MAX_OUTPUT
        while bytes_left and (data := source.read(min(bytes_left, _CHUNK))):
            target.write(data)
            bytes_left -= len(data)


class ChildOutput:
    """A pipe for children's standard error, and a thread that copies it: children do not open the file."""

    def __init__(self) -> None:
        self._reading, self.pipe = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="output of children", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy what the children have written, and close the pipe. Call this when the children have ended."""
        os.close(self.pipe)
        self._thread.join(1)  # a process that a child has left behind may hold the pipe

    def _copy(self) -> None:
        with os.fdopen(self._reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_CHUNK):
                # On a full disk output is lost. The thread continues, since the children wait for it.
                with suppress(OSError):
                    os.write(_STDERR, data)
                    rotate_output()
