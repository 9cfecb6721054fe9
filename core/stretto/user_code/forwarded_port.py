"""A port that leads from a sandbox without the machine's network to a server in this process.

Before the command, `open_port.py` in the sandbox listens on the sandbox's loopback, and passes the listening
socket to this process. Clients in the sandbox reach nothing else.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import anyio

__all__ = ["SCRIPT", "ForwardedPort"]

SCRIPT = Path(__file__).with_name("open_port.py")
"""The sandbox must show this file."""
_FIRST_DESCRIPTOR = 10
"""Lowest descriptor of the channel: shells use lower ones, such as 9 for bubblewrap's seccomp filter."""


class ForwardedPort:
    """One port in one sandbox, for one start of a command.

    A context manager: at its end it closes the channel, and a listening socket that was not received.
    Raises OSError if this process has too many open files.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        with theirs:
            self.descriptor = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
            """The end of the channel that the sandboxed command must inherit."""

    def __enter__(self) -> ForwardedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        os.close(self.descriptor)

    def opening(self, argv: Sequence[str]) -> list[str]:
        """Return the command that opens the port and then becomes `argv`."""
        return [sys.executable, "-I", "-S", str(SCRIPT), str(self.descriptor), str(self.port), *argv]

    async def listener(self) -> socket.socket:
        """Wait until the sandbox listens, and return its listening socket, which the caller closes. If the
        command cannot start, this waits forever: wait for the command's process meanwhile."""
        await anyio.wait_readable(self._ours)
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        listener = socket.socket(fileno=descriptors[0])
        listener.setblocking(False)
        return listener
