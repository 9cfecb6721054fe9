"""A port in a sandbox without the machine's network that leads to a server in this process.

Before the command, `open_port.py` in the sandbox listens on the sandbox's loopback, and hands the listening
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
"""Shells may use smaller descriptors, as the one that gives bubblewrap its seccomp filter does."""


class ForwardedPort:
    """One port in one sandbox, for one start of a command.

    A context manager: its end closes the channel, and a listening socket that nobody received. Raises OSError
    if this process has too many open files.
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
        """Wait until the sandbox listens and return its listening socket, which the caller closes. Without
        end, if the command cannot start: wait for its process meanwhile."""
        await anyio.wait_readable(self._ours)
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        listener = socket.socket(fileno=descriptors[0])
        listener.setblocking(False)
        return listener
